//! What touches foreign code, in two small modules; everything else of `smoke` is safe Rust on top of them.
//!
//! `driver` wraps the CUDA driver, `tvm` loads libraries and calls the artifact's functions.

pub mod driver;
pub mod tvm;

/// A stream as foreign code takes it. Only these modules make one, of a stream that lives.
#[derive(Debug, Clone, Copy)]
pub struct StreamHandle(*mut std::ffi::c_void);
