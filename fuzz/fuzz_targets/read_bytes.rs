//! Whatever the bytes, the reader of GPU binaries answers: an inventory or an error. Never a panic, never memory without
//! bound.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = fi_arch::cubin::read_bytes(bytes);
});
