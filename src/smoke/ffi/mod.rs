//! What touches foreign code, in small modules; everything else of `smoke` is safe Rust on top of them.
//!
//! `library` loads shared objects, `driver` wraps the CUDA driver, `tvm` calls the artifact's functions, `nvrtc` compiles our own
//! kernels, `nccl` is what `bench` compares with.

pub mod driver;
pub mod library;
pub mod nccl;
pub mod nvrtc;
pub mod tvm;

/// A stream as foreign code takes it. Only these modules make one, of a stream that lives.
#[derive(Debug, Clone, Copy)]
pub struct StreamHandle(*mut std::ffi::c_void);
