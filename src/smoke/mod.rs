//! The GPU proof.
pub mod cases;
pub mod ffi;
pub mod layout;
pub mod numbers;
pub mod signature;
