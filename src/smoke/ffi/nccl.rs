//! NCCL, as far as `bench` needs it: one communicator, and all-reduce.
//!
//! Unsafe, because it calls C functions through pointers. What keeps it sound: their types are those of `nccl.h`; memory is passed
//! with its length, which bounds the count; a communicator is destroyed once, and lives no longer than its library, which is
//! never closed.
//!
//! The functions are looked up here and not by cudarc, whose list of names has no `libnccl.so.2`, the only one in NVIDIA's wheels.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::os::unix::Library;

use super::driver::{Memory, Stream};
use super::library::{load, symbol, within};
use crate::smoke::numbers::DType;

/// Bytes of what names a communicator before it is there.
pub const ID_BYTES: usize = 128;

// A result is taken as a number: a later NCCL may return one that no list of ours has.
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut ncclUniqueId) -> c_int;
type CommInitRank = unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> c_int;
type CommDestroy = unsafe extern "C" fn(ncclComm_t) -> c_int;
type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void) -> c_int;
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetLastError = unsafe extern "C" fn(ncclComm_t) -> *const c_char;

/// A libnccl.
#[derive(Debug, Clone, Copy)]
pub struct Nccl {
    version: u32,
    get_unique_id: GetUniqueId,
    comm_init_rank: CommInitRank,
    comm_destroy: CommDestroy,
    all_reduce: AllReduce,
    error_string: GetErrorString,
    last_error: Option<GetLastError>,
}

impl Nccl {
    /// Loads a libnccl, by its path or by a name that the dynamic loader knows.
    pub fn open(path: &Path) -> Result<Self, String> {
        let library: Library = load(path)?;
        let no = |why: String| within(path, &why);
        let get_version: GetVersion = symbol(&library, "ncclGetVersion").map_err(no)?;
        let mut version = 0;
        if unsafe { get_version(&mut version) } != 0 {
            return Err(within(path, "it does not tell its version"));
        }
        let nccl = Self {
            version: version.unsigned_abs(),
            get_unique_id: symbol(&library, "ncclGetUniqueId").map_err(no)?,
            comm_init_rank: symbol(&library, "ncclCommInitRank").map_err(no)?,
            comm_destroy: symbol(&library, "ncclCommDestroy").map_err(no)?,
            all_reduce: symbol(&library, "ncclAllReduce").map_err(no)?,
            error_string: symbol(&library, "ncclGetErrorString").map_err(no)?,
            last_error: symbol(&library, "ncclGetLastError").ok(),
        };
        // Its threads run its code until the process ends.
        std::mem::forget(library);
        Ok(nccl)
    }

    /// Its release, such as 2.28.9.
    pub fn version(&self) -> String {
        let code = self.version;
        format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
    }

    /// What names a new communicator. This process answers those who join it.
    pub fn unique_id(&self) -> Result<[u8; ID_BYTES], String> {
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        let result = unsafe { (self.get_unique_id)(&mut id) };
        self.check(result, "ncclGetUniqueId", ptr::null_mut())?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Joins a communicator with the GPU whose context is current; returns when all ranks have.
    pub fn join(&self, id: &[u8; ID_BYTES], rank: usize, ranks: usize) -> Result<Communicator, String> {
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut comm = ptr::null_mut();
        let result = unsafe { (self.comm_init_rank)(&mut comm, ranks as c_int, id, rank as c_int) };
        self.check(result, "ncclCommInitRank", ptr::null_mut())?;
        Ok(Communicator { nccl: *self, comm })
    }

    fn check(&self, result: c_int, call: &str, comm: ncclComm_t) -> Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        let text = |text: *const c_char| {
            // What these return are texts of the library, whole until the next error.
            if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned() }
        };
        let what = text(unsafe { (self.error_string)(result) });
        let why = self.last_error.map(|last_error| text(unsafe { last_error(comm) })).filter(|why| !why.is_empty());
        Err(format!("{call}: {what}{}", why.map_or_else(String::new, |why| format!(" ({why})"))))
    }
}

/// A rank of a communicator.
#[derive(Debug)]
pub struct Communicator {
    nccl: Nccl,
    comm: ncclComm_t,
}

impl Communicator {
    /// Puts the sum over all ranks of the first `count` elements of `from` into `to`, in the order of the stream.
    pub fn all_reduce(&self, from: &Memory, to: &Memory, count: usize, dtype: DType, stream: &Stream) -> Result<(), String> {
        assert!(count * dtype.size() <= from.bytes().min(to.bytes()), "an all-reduce stays within its memory");
        let kind = match dtype {
            DType::Bf16 => ncclDataType_t::ncclBfloat16,
            DType::Fp16 => ncclDataType_t::ncclFloat16,
            DType::Fp32 => ncclDataType_t::ncclFloat32,
        };
        let (from, to) = (from.address() as *const c_void, to.address() as *mut c_void);
        let sum = ncclRedOp_t::ncclSum;
        let result = unsafe { (self.nccl.all_reduce)(from, to, count, kind, sum, self.comm, stream.handle().0) };
        self.nccl.check(result, "ncclAllReduce", self.comm)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        unsafe { (self.nccl.comm_destroy)(self.comm) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_is_none_is_an_error_that_names_it() {
        let error = Nccl::open(Path::new("/nowhere/libnccl.so.2")).unwrap_err();
        assert!(error.contains("/nowhere/libnccl.so.2"), "{error}");
        let error = Nccl::open(Path::new("libc.so.6")).unwrap_err();
        assert!(error.contains("libc.so.6") && error.contains("ncclGetVersion"), "{error}");
    }
}
