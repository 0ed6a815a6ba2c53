//! What is on this machine: Python environments, the packages in them, GPUs. Read-only, and knows nothing of gates.
//!
//! It reads metadata files. An interpreter is started only where an environment's layout cannot be read from files
//! (a shim of a version manager), and what it said is remembered. Nothing here imports a package.

mod archive;
mod environment;
mod gpus;
mod packages;
pub(crate) mod process;

pub use archive::Archive;
pub use environment::{Environment, environment, python_path};
pub use gpus::{Gpu, gpus, gpus_of_this_boot};
pub use packages::{
    FlashInfer, Package, Torch, TvmFfi, cuda_libraries, cudarts, flashinfer, flashinfer_at, package, record, torch, tvm_ffi,
    tvm_ffi_in,
};
