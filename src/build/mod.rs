//! (being built)

pub mod toolchain;
