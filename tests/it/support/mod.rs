//! What tests stand on: real wheels, a sandbox for the binary, and fakes for faults.

pub mod activation;
pub mod environment;
pub mod gpu;
pub mod probes;
pub mod sandbox;
pub mod toolkit;
pub mod wheels;
pub mod world;
