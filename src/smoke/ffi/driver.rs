//! The CUDA driver API, as far as `smoke` needs it: contexts, memory, streams, events, graphs, IPC.
//!
//! Unsafe, because every call goes into libcuda with raw pointers. What keeps it sound: handles are made here and live in
//! types that own them; host memory is passed as slices, whose length is what is copied; device addresses go only to the
//! driver and to kernels, never through Rust references. Memory and streams are dropped only while their context lives
//! (each holds it), and a process whose GPU hangs exits without dropping anything. A kernel of our own gets as many arguments,
//! of the sizes that its code says it takes.
//!
//! What is written or filled here goes onto a stream that the caller names, never onto the default one: other streams do not
//! wait for that, so a kernel could run before what it reads is there.
//!
//! Only plain device memory (`cuMemAlloc`) is used: no managed memory, no virtual memory objects, no multicast.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};

use super::StreamHandle;
use crate::env;

/// Why a call of the driver failed: its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError {
    pub call: &'static str,
    pub name: String,
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.call, self.name)
    }
}

impl std::error::Error for CudaError {}

type Result<T> = std::result::Result<T, CudaError>;

/// `cuGetErrorName`, <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__ERROR.html>.
fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = ptr::null();
    let known = unsafe { sys::cuGetErrorName(result, &mut name) } == CUresult::CUDA_SUCCESS && !name.is_null();
    let name =
        if known { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() } else { format!("error {}", result as u32) };
    Err(CudaError { call, name })
}

macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($function), unsafe { sys::$function($($argument),*) })
    };
}

/// The CUDA of the oldest driver that has all functions which are called here.
const OLDEST: (u32, u32) = (12, 8);

/// Proof that libcuda is there, is new enough, and started.
#[derive(Debug, Clone, Copy)]
pub struct Driver(());

/// What a GPU says of itself.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceInfo {
    pub ordinal: usize,
    pub name: String,
    /// 120 for compute capability 12.0.
    pub sm: u32,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    pub pci: String,
}

impl Driver {
    /// Whether there is a libcuda that the dynamic loader finds.
    pub fn is_there() -> bool {
        unsafe { sys::is_culib_present() }
    }

    /// Loads libcuda and starts it. The error says which of the two is missing: the library, or a GPU that it can use.
    pub fn open() -> std::result::Result<Self, String> {
        if !Self::is_there() {
            return Err("there is no libcuda.so.1 that the dynamic loader finds: no NVIDIA driver is installed here".to_owned());
        }
        call!(cuInit(0)).map_err(|error| {
            let shown = match std::env::var(env::CUDA_VISIBLE_DEVICES) {
                Ok(shown) => format!("; {} is set to `{shown}`", env::CUDA_VISIBLE_DEVICES),
                Err(_) => String::new(),
            };
            match error.name.as_str() {
                "CUDA_ERROR_NO_DEVICE" => format!("the driver shows no GPU ({error}{shown})"),
                _ => format!("libcuda.so.1 is there and cannot start ({error}{shown})"),
            }
        })?;
        let driver = Self(());
        match driver.version() {
            Ok(version) if version >= OLDEST => Ok(driver),
            Ok((major, minor)) => Err(format!(
                "the driver speaks CUDA {major}.{minor}, and functions that are used here came with {}.{} (driver 570)",
                OLDEST.0, OLDEST.1
            )),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The newest CUDA that the driver speaks, such as (13, 0).
    pub fn version(self) -> Result<(u32, u32)> {
        let mut version = 0;
        call!(cuDriverGetVersion(&mut version))?;
        Ok((version as u32 / 1000, version as u32 % 1000 / 10))
    }

    /// All GPUs that this process may use, in the driver's order.
    pub fn devices(self) -> Result<Vec<DeviceInfo>> {
        let mut count = 0;
        call!(cuDeviceGetCount(&mut count))?;
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    fn device(self, ordinal: i32) -> Result<DeviceInfo> {
        use sys::CUdevice_attribute as Attribute;
        let mut device = 0;
        call!(cuDeviceGet(&mut device, ordinal))?;
        let attribute = |which| {
            let mut value = 0;
            call!(cuDeviceGetAttribute(&mut value, which, device)).map(|()| value as u32)
        };
        let mut name = [0 as std::ffi::c_char; 256];
        call!(cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        let mut pci = [0 as std::ffi::c_char; 64];
        call!(cuDeviceGetPCIBusId(pci.as_mut_ptr(), 63, device))?;
        let mut memory_bytes = 0;
        call!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
        // Both buffers were zeroed and are longer than what the driver may write.
        let text = |bytes: &[std::ffi::c_char]| unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned();
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(DeviceInfo {
            ordinal: ordinal as usize,
            name: text(&name),
            sm: major * 10 + minor,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory_bytes as u64,
            pci: text(&pci),
        })
    }

    /// What the driver says of the link from one GPU to the other.
    pub fn link(self, one: usize, other: usize) -> Result<LinkInfo> {
        use sys::CUdevice_P2PAttribute as Attribute;
        let attribute = |which| {
            let mut value = 0;
            call!(cuDeviceGetP2PAttribute(&mut value, which, one as i32, other as i32)).map(|()| value)
        };
        Ok(LinkInfo {
            from: one,
            to: other,
            peer_access: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
            native_atomics: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
            performance_rank: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        })
    }

    /// Whether the driver says that one GPU can read and write the memory of the other. It may say so where it cannot.
    pub fn says_peers(self, one: usize, other: usize) -> Result<bool> {
        let mut can = 0;
        call!(cuDeviceCanAccessPeer(&mut can, one as i32, other as i32)).map(|()| can != 0)
    }
}

/// The link from one GPU to another, as the driver tells it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LinkInfo {
    pub from: usize,
    pub to: usize,
    pub peer_access: bool,
    /// All atomic operations work over the link: NVLink has them, PCIe does not.
    pub native_atomics: bool,
    /// Relative: a lower number is a faster link.
    pub performance_rank: i32,
}

/// The primary context of a GPU: the one that the CUDA runtime in the artifact uses too.
#[derive(Debug, Clone)]
pub struct Context(Arc<Primary>);

#[derive(Debug)]
struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// Bytes of the memory that lives, and the most that ever did.
    allocated: AtomicU64,
    most_allocated: AtomicU64,
}

// A context may be used from any thread that makes it current, and the driver locks it.
unsafe impl Send for Primary {}
unsafe impl Sync for Primary {}

impl Drop for Primary {
    fn drop(&mut self) {
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

impl Context {
    /// The primary context of a GPU, current in this thread.
    pub fn open(_: Driver, ordinal: usize) -> Result<Self> {
        let (mut device, mut context) = (0, ptr::null_mut());
        call!(cuDeviceGet(&mut device, ordinal as i32))?;
        call!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        let context =
            Self(Arc::new(Primary { device, context, allocated: AtomicU64::new(0), most_allocated: AtomicU64::new(0) }));
        context.make_current()?;
        Ok(context)
    }

    pub fn make_current(&self) -> Result<()> {
        call!(cuCtxSetCurrent(self.0.context))
    }

    /// Waits for all work. Only where nothing can hang.
    pub fn synchronize(&self) -> Result<()> {
        call!(cuCtxSynchronize())
    }

    /// `bytes` of device memory, not initialized.
    pub fn alloc(&self, bytes: usize) -> Result<Memory> {
        let mut address = 0;
        let bytes = bytes.max(16);
        call!(cuMemAlloc_v2(&mut address, bytes))?;
        let now = self.0.allocated.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.0.most_allocated.fetch_max(now, Ordering::Relaxed);
        Ok(Memory { address, bytes, block: Arc::new(Block { address, bytes, context: self.clone() }) })
    }

    /// The most bytes that were allocated here at one time.
    pub fn most_allocated(&self) -> u64 {
        self.0.most_allocated.load(Ordering::Relaxed)
    }

    /// Bytes of the GPU that nobody has taken.
    pub fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total)).map(|()| free as u64)
    }

    pub fn stream(&self) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        call!(cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Stream { stream, _context: self.clone() })
    }

    pub fn event(&self) -> Result<Event> {
        let mut event = ptr::null_mut();
        call!(cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DEFAULT as u32))?;
        Ok(Event { event, _context: self.clone() })
    }

    /// Loads machine code (a cubin), such as NVRTC makes.
    /// `cuModuleLoadData`, <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MODULE.html>.
    pub fn load(&self, image: &[u8]) -> Result<Code> {
        let mut module = ptr::null_mut();
        call!(cuModuleLoadData(&mut module, image.as_ptr().cast()))?;
        Ok(Code(Arc::new(Loaded { module, _context: self.clone() })))
    }

    /// Maps memory of another process. Peer access is enabled by the driver on the way.
    pub fn open_peer(&self, handle: &IpcHandle) -> Result<PeerMemory> {
        let mut raw = sys::CUipcMemHandle { reserved: [0; 64] };
        for (to, from) in raw.reserved.iter_mut().zip(handle.0) {
            *to = from as std::ffi::c_char;
        }
        let mut address = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        call!(cuIpcOpenMemHandle_v2(&mut address, raw, flags))?;
        Ok(PeerMemory { address, _context: self.clone() })
    }
}

/// Machine code of ours in a context; unloaded with the last of its functions.
#[derive(Debug, Clone)]
pub struct Code(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    module: sys::CUmodule,
    _context: Context,
}

// As a context: any thread may use it, and the driver locks it.
unsafe impl Send for Loaded {}
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = call!(cuModuleUnload(self.module));
    }
}

impl Code {
    /// The kernel of that name; names of C++ are mangled unless it is declared `extern "C"`.
    pub fn function(&self, name: &str) -> Result<Function> {
        let text = CString::new(name).map_err(|_| CudaError { call: "cuModuleGetFunction", name: format!("no name: {name}") })?;
        let mut function = ptr::null_mut();
        call!(cuModuleGetFunction(&mut function, self.0.module, text.as_ptr()))?;
        let mut parameters = Vec::new();
        let (mut offset, mut size) = (0, 0);
        // The number of parameters is where the driver finds no further one.
        while unsafe { sys::cuFuncGetParamInfo(function, parameters.len(), &mut offset, &mut size) } == CUresult::CUDA_SUCCESS {
            parameters.push(size);
        }
        Ok(Function { function, name: name.to_owned(), parameters, _code: self.clone() })
    }
}

/// A kernel of ours.
#[derive(Debug, Clone)]
pub struct Function {
    function: sys::CUfunction,
    name: String,
    /// The bytes of each parameter, as the code says.
    parameters: Vec<usize>,
    _code: Code,
}

/// An argument of a kernel of ours.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Parameter {
    /// An address of the GPU's.
    Address(u64),
    I32(i32),
    U32(u32),
    I64(i64),
    U64(u64),
    F32(f32),
    F64(f64),
}

impl Parameter {
    fn bytes(self) -> usize {
        match self {
            Self::I32(_) | Self::U32(_) | Self::F32(_) => 4,
            Self::Address(_) | Self::I64(_) | Self::U64(_) | Self::F64(_) => 8,
        }
    }

    /// The value in the low bytes, as a kernel reads it.
    fn word(self) -> u64 {
        match self {
            Self::I32(value) => u64::from(value as u32),
            Self::U32(value) => value.into(),
            Self::F32(value) => value.to_bits().into(),
            Self::I64(value) => value as u64,
            Self::Address(value) | Self::U64(value) => value,
            Self::F64(value) => value.to_bits(),
        }
    }
}

/// How a kernel of ours is launched.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub blocks: u32,
    pub threads: u32,
    /// Bytes of shared memory beside what the kernel declares.
    pub shared_bytes: u32,
    /// It may start before the kernel ahead of it has ended (programmatic dependent launch): it waits itself, by
    /// `griddepcontrol.wait`.
    pub overlaps: bool,
}

/// Device memory of this process, or a part of it. What was allocated is freed with its last part.
#[derive(Debug, Clone)]
pub struct Memory {
    address: sys::CUdeviceptr,
    bytes: usize,
    block: Arc<Block>,
}

/// What was allocated at once.
#[derive(Debug)]
struct Block {
    address: sys::CUdeviceptr,
    bytes: usize,
    context: Context,
}

impl Drop for Block {
    fn drop(&mut self) {
        let _ = call!(cuMemFree_v2(self.address));
        self.context.0.allocated.fetch_sub(self.bytes as u64, Ordering::Relaxed);
    }
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` of this memory, from `offset` on.
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        assert!(offset + bytes <= self.bytes, "a part stays within its memory");
        Self { address: self.address + offset as u64, bytes, block: self.block.clone() }
    }

    /// Copies `bytes` to the start of the memory, in the order of the stream.
    pub fn write(&self, bytes: &[u8], stream: &Stream) -> Result<()> {
        self.write_at(0, bytes, stream)
    }

    /// Copies `bytes` into the memory, from `offset` on, in the order of the stream. They are taken before this returns.
    pub fn write_at(&self, offset: usize, bytes: &[u8], stream: &Stream) -> Result<()> {
        assert!(offset + bytes.len() <= self.bytes, "a copy stays within its memory");
        call!(cuMemcpyHtoDAsync_v2(self.address + offset as u64, bytes.as_ptr().cast(), bytes.len(), stream.stream))
    }

    /// Copies the start of the memory into `bytes`.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        self.read_at(0, bytes)
    }

    /// Copies the memory from `offset` on into `bytes`.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        assert!(offset + bytes.len() <= self.bytes, "a copy stays within its memory");
        call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address + offset as u64, bytes.len()))
    }

    /// The first `bytes`, read while kernels are at work; none where the copy does not end in time.
    pub fn read_within(&self, bytes: usize, deadline: Duration) -> Result<Option<Vec<u8>>> {
        assert!(bytes <= self.bytes, "a copy stays within its memory");
        let stream = self.block.context.stream()?;
        let mut held = vec![0; bytes];
        call!(cuMemcpyDtoHAsync_v2(held.as_mut_ptr().cast(), self.address, bytes, stream.stream))?;
        let until = Instant::now() + deadline;
        while !stream.is_done()? {
            if Instant::now() > until {
                // The copy may still come: its target must stay.
                held.leak();
                std::mem::forget(stream);
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Some(held))
    }

    /// Copies `bytes` of another process's memory, from `offset` on, to the start of this one.
    pub fn copy_from(&self, from: &PeerMemory, offset: usize, bytes: usize, stream: &Stream) -> Result<()> {
        assert!(bytes <= self.bytes, "a copy stays within its memory");
        call!(cuMemcpyDtoDAsync_v2(self.address, from.address + offset as u64, bytes, stream.stream))
    }

    /// Copies the start of this memory to another process's, at `offset`.
    pub fn copy_to(&self, to: &PeerMemory, offset: usize, bytes: usize, stream: &Stream) -> Result<()> {
        assert!(bytes <= self.bytes, "a copy stays within its memory");
        call!(cuMemcpyDtoDAsync_v2(to.address + offset as u64, self.address, bytes, stream.stream))
    }

    /// Fills the whole memory with one byte, in the order of the stream.
    pub fn fill8(&self, byte: u8, stream: &Stream) -> Result<()> {
        call!(cuMemsetD8Async(self.address, byte, self.bytes, stream.stream))
    }

    /// Fills the whole memory with one 16-bit word, in the order of the stream.
    pub fn fill16(&self, word: u16, stream: &Stream) -> Result<()> {
        call!(cuMemsetD16Async(self.address, word, self.bytes / 2, stream.stream))
    }

    /// What another process needs to map this memory. A handle names what was allocated as a whole, so no part has one.
    pub fn ipc_handle(&self) -> Result<IpcHandle> {
        assert!((self.address, self.bytes) == (self.block.address, self.block.bytes), "a part has no handle");
        let mut raw = sys::CUipcMemHandle { reserved: [0; 64] };
        call!(cuIpcGetMemHandle(&mut raw, self.address))?;
        Ok(IpcHandle(raw.reserved.map(|byte| byte as u8)))
    }
}

/// Names memory across processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

/// Memory of another process, mapped into this one.
#[derive(Debug)]
pub struct PeerMemory {
    address: sys::CUdeviceptr,
    _context: Context,
}

impl PeerMemory {
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        let _ = call!(cuIpcCloseMemHandle(self.address));
    }
}

#[derive(Debug)]
pub struct Stream {
    stream: sys::CUstream,
    _context: Context,
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = call!(cuStreamDestroy_v2(self.stream));
    }
}

impl Stream {
    /// The handle as foreign code takes it.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.stream.cast())
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        call!(cuStreamWaitEvent(self.stream, event.event, 0))
    }

    /// A graph of what `put` puts on this stream, and on streams that wait for it.
    pub fn capture<E: From<CudaError>>(&self, put: impl FnOnce() -> std::result::Result<(), E>) -> std::result::Result<Graph, E> {
        call!(cuStreamBeginCapture_v2(self.stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED))?;
        let put = put();
        let mut graph = ptr::null_mut();
        let ended = call!(cuStreamEndCapture(self.stream, &mut graph)).map(|()| Graph { graph });
        // The end of a capture that failed only says that it failed.
        put?;
        Ok(ended?)
    }

    pub fn launch(&self, graph: &Executable) -> Result<()> {
        call!(cuGraphLaunch(graph.exec, self.stream))
    }

    /// Puts a kernel of ours onto the stream. Refused where the arguments are not of the sizes that its code says.
    /// `cuLaunchKernelEx`, <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html>.
    pub fn run(&self, function: &Function, shape: Shape, arguments: &[Parameter]) -> Result<()> {
        if !arguments.iter().map(|argument| argument.bytes()).eq(function.parameters.iter().copied()) {
            let name = format!("{} takes parameters of {:?} bytes, not {arguments:?}", function.name, function.parameters);
            return Err(CudaError { call: "cuLaunchKernelEx", name });
        }
        let mut words: Vec<u64> = arguments.iter().map(|argument| argument.word()).collect();
        let mut pointers: Vec<*mut std::ffi::c_void> = words.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        // Zero is a valid value of every field of this plain C structure.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(shape.overlaps),
        };
        // The arguments are copied before it returns.
        call!(cuLaunchKernelEx(&config, function.function, pointers.as_mut_ptr(), ptr::null_mut()))
    }

    /// Whether all work on the stream is done; an error where it failed.
    pub fn is_done(&self) -> Result<bool> {
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("cuStreamQuery", other).map(|()| true),
        }
    }
}

#[derive(Debug)]
pub struct Event {
    event: sys::CUevent,
    _context: Context,
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = call!(cuEventDestroy_v2(self.event));
    }
}

impl Event {
    pub fn record(&self, stream: &Stream) -> Result<()> {
        call!(cuEventRecord(self.event, stream.stream))
    }

    /// In a capture: every launch of the graph records the event at this place.
    /// `cuEventRecordWithFlags`, <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EVENT.html>.
    pub fn record_in_graph(&self, stream: &Stream) -> Result<()> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        call!(cuEventRecordWithFlags(self.event, stream.stream, flags))
    }

    /// Whether all work before it is done; an error where it failed.
    pub fn is_past(&self) -> Result<bool> {
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("cuEventQuery", other).map(|()| true),
        }
    }

    /// Microseconds from `earlier` to this; both must have passed.
    pub fn micros_since(&self, earlier: &Self) -> Result<f64> {
        let mut millis = 0f32;
        call!(cuEventElapsedTime_v2(&mut millis, earlier.event, self.event))?;
        Ok(f64::from(millis) * 1e3)
    }
}

/// A captured graph.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = call!(cuGraphDestroy(self.graph));
    }
}

/// A kernel as it stands in a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Mangled.
    pub name: String,
    pub grid: u32,
    pub block: u32,
    /// Blocks a cluster; 1 without clusters.
    pub cluster: u32,
    /// How many clusters of it a GPU that does nothing else can hold at once.
    pub resident_clusters: u32,
}

impl Graph {
    /// The kernels of the graph.
    pub fn kernels(&self) -> Result<Vec<Kernel>> {
        self.kernel_nodes()?.into_iter().map(kernel).collect()
    }

    /// The mangled names of its kernels, in no order.
    pub fn kernel_names(&self) -> Result<Vec<String>> {
        self.kernel_nodes()?.into_iter().map(|node| launched(node).and_then(|(_, function)| name_of(function))).collect()
    }

    fn kernel_nodes(&self) -> Result<Vec<sys::CUgraphNode>> {
        let mut count = 0;
        call!(cuGraphGetNodes(self.graph, ptr::null_mut(), &mut count))?;
        let mut nodes = vec![ptr::null_mut(); count];
        call!(cuGraphGetNodes(self.graph, nodes.as_mut_ptr(), &mut count))?;
        let mut kernels = Vec::new();
        for node in nodes {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            call!(cuGraphNodeGetType(node, &mut kind))?;
            if kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
                kernels.push(node);
            }
        }
        Ok(kernels)
    }

    pub fn instantiate(&self) -> Result<Executable> {
        let mut exec = ptr::null_mut();
        call!(cuGraphInstantiateWithFlags(&mut exec, self.graph, 0))?;
        Ok(Executable { exec })
    }
}

/// What a kernel node launches, and how.
fn launched(node: sys::CUgraphNode) -> Result<(sys::CUDA_KERNEL_NODE_PARAMS, sys::CUfunction)> {
    // Zero is a valid value of every field of this plain C structure.
    let mut params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    call!(cuGraphKernelNodeGetParams_v2(node, &mut params))?;
    let mut function = params.func;
    if function.is_null() {
        call!(cuKernelGetFunction(&mut function, params.kern))?;
    }
    Ok((params, function))
}

fn name_of(function: sys::CUfunction) -> Result<String> {
    let mut name = ptr::null();
    call!(cuFuncGetName(&mut name, function))?;
    // The driver keeps the name as long as the function is loaded.
    Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

fn kernel(node: sys::CUgraphNode) -> Result<Kernel> {
    let (params, function) = launched(node)?;
    let name = name_of(function)?;

    // Zero is a valid value of every field of these plain C structures.
    let mut value: sys::CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
    let which = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    call!(cuGraphKernelNodeGetAttribute(node, which, &mut value))?;
    // The attribute asked for says which field of the union was written.
    let cluster = unsafe { value.clusterDim.x }.max(1);

    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = which;
    attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
    let config = sys::CUlaunchConfig {
        gridDimX: params.gridDimX,
        gridDimY: params.gridDimY,
        gridDimZ: params.gridDimZ,
        blockDimX: params.blockDimX,
        blockDimY: params.blockDimY,
        blockDimZ: params.blockDimZ,
        sharedMemBytes: params.sharedMemBytes,
        hStream: ptr::null_mut(),
        attrs: &mut attribute,
        numAttrs: 1,
    };
    let mut resident = 0;
    call!(cuOccupancyMaxActiveClusters(&mut resident, function, &config))?;
    Ok(Kernel {
        name,
        grid: params.gridDimX * params.gridDimY * params.gridDimZ,
        block: params.blockDimX * params.blockDimY * params.blockDimZ,
        cluster,
        resident_clusters: resident.max(0) as u32,
    })
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct Executable {
    exec: sys::CUgraphExec,
}

impl Drop for Executable {
    fn drop(&mut self) {
        let _ = call!(cuGraphExecDestroy(self.exec));
    }
}
