//! (being built)

pub mod provision;
pub mod toolchain;
