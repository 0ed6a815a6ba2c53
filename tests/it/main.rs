//! Black-box tests of the binary, by topic. One test binary: it links once.
//!
//! Tests that fetch wheels need the network (PyPI through pip) and fail without it; they never skip.

mod bench;
mod build;
mod bundle;
mod consumer;
mod doctor;
mod engines;
mod explain;
mod inspect;
mod install;
mod judge;
mod overlay;
mod provision;
mod retarget;
mod run;
mod scan;
mod shim;
mod smoke;
mod store;
mod support;
mod survey;
mod tables;
mod toolchain;
mod verify;
