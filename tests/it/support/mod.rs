//! What tests stand on: real wheels, and fakes for faults.

pub mod toolkit;
pub mod wheels;
