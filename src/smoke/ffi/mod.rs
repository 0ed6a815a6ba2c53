//! What touches foreign code, in two small modules; everything else of `smoke` is safe Rust on top of them.
//!
//! `driver` wraps the CUDA driver, `tvm` loads libraries and calls the artifact's functions.

pub mod driver;
pub mod tvm;
