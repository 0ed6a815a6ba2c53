//! Black-box tests of the binary, by topic. One test binary: it links once.
//!
//! Tests that fetch wheels need the network (PyPI through pip) and fail without it; they never skip.

mod build;
mod inspect;
mod overlay;
mod provision;
mod store;
mod support;
mod survey;
mod tables;
mod toolchain;
