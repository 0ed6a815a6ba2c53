//! What tests stand on: real wheels, and fakes for faults.

pub mod wheels;
