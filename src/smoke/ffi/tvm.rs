//! TVM-FFI's C ABI, written from its public header (`tvm/ffi/c_api.h`) and DLPack's: loading the libraries, calling functions.
//!
//! Unsafe, because it loads shared objects and calls C functions in them. What keeps it sound: libraries are never unloaded;
//! the layouts below are checked by size and offset; argument structures live on the caller's stack as long as the call; an
//! error object is copied into text and released at once. That a symbol has the signature that its name promises is the
//! artifact's word, which the judge and the artifact's own account of its parameters back.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::path::Path;

use libloading::os::unix::Library;

use super::StreamHandle;
use super::library::{load, symbol, within};
use crate::smoke::numbers::DType;

/// `DLDevice`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `TVMFFIAny`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Any {
    type_index: i32,
    zero_padding: u32,
    value: AnyValue,
}

#[repr(C)]
#[derive(Clone, Copy)]
union AnyValue {
    int: i64,
    float: f64,
    pointer: *mut c_void,
    dtype: DataType,
}

/// The head of `TVMFFIObject`, without its deleter.
#[repr(C)]
struct Object {
    combined_ref_count: u64,
    type_index: i32,
    padding: u32,
    deleter: *mut c_void,
}

/// `TVMFFIByteArray`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ByteArray {
    data: *const c_char,
    size: usize,
}

/// The head of `TVMFFIErrorCell`, which follows the object's head.
#[repr(C)]
struct ErrorCell {
    kind: ByteArray,
    message: ByteArray,
}

const _: () = {
    assert!(size_of::<Device>() == 8);
    assert!(size_of::<DataType>() == 4);
    assert!(size_of::<DlTensor>() == 48);
    assert!(offset_of!(DlTensor, dtype) == 20 && offset_of!(DlTensor, shape) == 24 && offset_of!(DlTensor, byte_offset) == 40);
    assert!(size_of::<Any>() == 16 && offset_of!(Any, value) == 8);
    assert!(size_of::<Object>() == 24 && offset_of!(Object, type_index) == 8);
    assert!(size_of::<ByteArray>() == 16);
};

/// Values of `TVMFFITypeIndex`.
mod index {
    pub const NONE: i32 = 0;
    pub const INT: i32 = 1;
    pub const BOOL: i32 = 2;
    pub const FLOAT: i32 = 3;
    pub const DATA_TYPE: i32 = 5;
    pub const DL_TENSOR: i32 = 7;
}

const CPU: i32 = 1;
const CUDA: i32 = 2;

/// Where a tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Host,
    Gpu(usize),
}

/// What a tensor's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    Float(DType),
    I32,
    I64,
    U8,
}

impl Element {
    fn dtype(self) -> DataType {
        // Codes of DLDataTypeCode: 0 int, 1 uint, 2 float, 4 bfloat.
        let (code, bits) = match self {
            Self::Float(DType::Bf16) => (4, 16),
            Self::Float(DType::Fp16) => (2, 16),
            Self::Float(DType::Fp32) => (2, 32),
            Self::I32 => (0, 32),
            Self::I64 => (0, 64),
            Self::U8 => (1, 8),
        };
        DataType { code, bits, lanes: 1 }
    }
}

/// A row-major tensor, by the address of its first element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub address: u64,
    pub place: Place,
    pub element: Element,
    pub shape: Vec<i64>,
}

/// An argument of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Argument {
    None,
    Int(i64),
    Bool(bool),
    Float(f64),
    DataType(DType),
    Tensor(Tensor),
}

/// Why a call failed: the kind of error and its text, as the callee raised them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raised {
    pub kind: String,
    pub message: String,
}

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

type SafeCall = unsafe extern "C" fn(*mut c_void, *const Any, i32, *mut Any) -> c_int;
type SetStream = unsafe extern "C" fn(i32, i32, *mut c_void, *mut *mut c_void) -> c_int;
type MoveFromRaised = unsafe extern "C" fn(*mut *mut c_void);
type DecRef = unsafe extern "C" fn(*mut c_void) -> c_int;
type GetVersion = unsafe extern "C" fn(*mut [u32; 3]);

/// An artifact with the libraries that it stands on.
#[derive(Debug)]
pub struct Module {
    artifact: Library,
    set_stream: SetStream,
    move_from_raised: MoveFromRaised,
    dec_ref: DecRef,
    get_version: Option<GetVersion>,
    // Never closed: their code may be on the stack of a thread of theirs.
    _libraries: Vec<Library>,
}

impl Module {
    /// Loads `before` (a libcudart, where the artifact needs one), libtvm_ffi and the artifact, in this order.
    pub fn open(before: Option<&Path>, tvm_ffi: &Path, artifact: &Path) -> Result<Self, String> {
        let mut libraries = Vec::new();
        if let Some(path) = before {
            libraries.push(load(path)?);
        }
        let ffi = load(tvm_ffi)?;
        let no = |why: String| within(tvm_ffi, &why);
        let set_stream = symbol(&ffi, "TVMFFIEnvSetStream").map_err(no)?;
        let move_from_raised = symbol(&ffi, "TVMFFIErrorMoveFromRaised").map_err(no)?;
        let dec_ref = symbol(&ffi, "TVMFFIObjectDecRef").map_err(no)?;
        let get_version = symbol(&ffi, "TVMFFIGetVersion").ok();
        libraries.push(ffi);
        let artifact = load(artifact)?;
        Ok(Self { artifact, set_stream, move_from_raised, dec_ref, get_version, _libraries: libraries })
    }

    /// The version of libtvm_ffi, where it tells one.
    pub fn tvm_ffi_version(&self) -> Option<String> {
        let mut version = [0; 3];
        unsafe { self.get_version?(&mut version) };
        Some(version.map(|part| part.to_string()).join("."))
    }

    /// The stream that the artifact's functions put their work on.
    pub fn set_stream(&self, device: usize, stream: StreamHandle) -> Result<(), Raised> {
        let code = unsafe { (self.set_stream)(CUDA, device as i32, stream.0, std::ptr::null_mut()) };
        self.outcome(code)
    }

    /// Whether the artifact exports a function of that name.
    pub fn has(&self, name: &str) -> bool {
        symbol::<SafeCall>(&self.artifact, &format!("__tvm_ffi_{name}")).is_ok()
    }

    /// Calls an exported function.
    pub fn call(&self, name: &str, arguments: &[Argument]) -> Result<(), Raised> {
        let function: SafeCall = symbol(&self.artifact, &format!("__tvm_ffi_{name}"))
            .map_err(|message| Raised { kind: "Missing".to_owned(), message })?;
        let strides: Vec<Vec<i64>> = arguments.iter().map(strides_of).collect();
        let mut tensors: Vec<Option<DlTensor>> =
            arguments.iter().zip(&strides).map(|(argument, strides)| dl_tensor(argument, strides)).collect();
        let values: Vec<Any> = arguments.iter().zip(&mut tensors).map(|(argument, tensor)| any(argument, tensor)).collect();
        let mut result = plain(index::NONE, AnyValue { int: 0 });
        let code = unsafe { function(std::ptr::null_mut(), values.as_ptr(), values.len() as i32, &mut result) };
        self.outcome(code)
    }

    fn outcome(&self, code: c_int) -> Result<(), Raised> {
        if code == 0 {
            return Ok(());
        }
        let mut object = std::ptr::null_mut();
        unsafe { (self.move_from_raised)(&mut object) };
        if object.is_null() {
            return Err(Raised { kind: "Error".to_owned(), message: format!("it returned {code} and raised nothing") });
        }
        // An error object is its head and then its cell; the cell's texts live as long as the object.
        let cell = unsafe { &*object.cast::<u8>().add(size_of::<Object>()).cast::<ErrorCell>() };
        let text = |bytes: ByteArray| {
            if bytes.data.is_null() {
                return String::new();
            }
            let bytes = unsafe { std::slice::from_raw_parts(bytes.data.cast::<u8>(), bytes.size) };
            String::from_utf8_lossy(bytes).into_owned()
        };
        let raised = Raised { kind: text(cell.kind), message: text(cell.message) };
        unsafe { (self.dec_ref)(object) };
        Err(raised)
    }
}

fn strides_of(argument: &Argument) -> Vec<i64> {
    let Argument::Tensor(tensor) = argument else { return Vec::new() };
    let mut strides = vec![1; tensor.shape.len()];
    for dim in (1..tensor.shape.len()).rev() {
        strides[dim - 1] = strides[dim] * tensor.shape[dim];
    }
    strides
}

fn dl_tensor(argument: &Argument, strides: &[i64]) -> Option<DlTensor> {
    let Argument::Tensor(tensor) = argument else { return None };
    let device = match tensor.place {
        Place::Host => Device { kind: CPU, id: 0 },
        Place::Gpu(ordinal) => Device { kind: CUDA, id: ordinal as i32 },
    };
    Some(DlTensor {
        data: tensor.address as *mut c_void,
        device,
        ndim: tensor.shape.len() as i32,
        dtype: tensor.element.dtype(),
        shape: tensor.shape.as_ptr(),
        strides: strides.as_ptr(),
        byte_offset: 0,
    })
}

fn plain(type_index: i32, value: AnyValue) -> Any {
    Any { type_index, zero_padding: 0, value }
}

fn any(argument: &Argument, tensor: &mut Option<DlTensor>) -> Any {
    match argument {
        Argument::None => plain(index::NONE, AnyValue { int: 0 }),
        Argument::Int(value) => plain(index::INT, AnyValue { int: *value }),
        Argument::Bool(value) => plain(index::BOOL, AnyValue { int: (*value).into() }),
        Argument::Float(value) => plain(index::FLOAT, AnyValue { float: *value }),
        Argument::DataType(dtype) => {
            // All eight bytes are compared when values are hashed, so the rest of the union is zero.
            let mut value = AnyValue { int: 0 };
            value.dtype = Element::Float(*dtype).dtype();
            plain(index::DATA_TYPE, value)
        }
        Argument::Tensor(_) => {
            let tensor = tensor.as_mut().expect("a tensor's structure was made for it");
            plain(index::DL_TENSOR, AnyValue { pointer: std::ptr::from_mut(tensor).cast() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_argument_points_to_a_row_major_dltensor() {
        let tensor = Tensor { address: 0x1000, place: Place::Gpu(3), element: Element::I64, shape: vec![2, 5, 7] };
        let argument = Argument::Tensor(tensor);
        let strides = strides_of(&argument);
        assert_eq!(strides, [35, 7, 1]);
        let mut made = dl_tensor(&argument, &strides);
        let any = any(&argument, &mut made);
        assert_eq!(any.type_index, 7);
        let made = made.unwrap();
        assert_eq!((made.ndim, made.data as u64, made.byte_offset), (3, 0x1000, 0));
        assert_eq!(made.device, Device { kind: 2, id: 3 });
        assert_eq!(made.dtype, DataType { code: 0, bits: 64, lanes: 1 });
    }

    #[test]
    fn element_types_have_the_codes_of_dlpack() {
        let code = |element: Element| (element.dtype().code, element.dtype().bits);
        assert_eq!(code(Element::Float(DType::Bf16)), (4, 16));
        assert_eq!(code(Element::Float(DType::Fp16)), (2, 16));
        assert_eq!(code(Element::Float(DType::Fp32)), (2, 32));
        assert_eq!(code(Element::U8), (1, 8));
    }

    #[test]
    fn a_library_that_is_not_there_is_an_error_that_names_it() {
        let error = Module::open(None, Path::new("/nowhere/libtvm_ffi.so"), Path::new("/nowhere/a.so")).unwrap_err();
        assert!(error.contains("/nowhere/libtvm_ffi.so"), "{error}");
    }
}
