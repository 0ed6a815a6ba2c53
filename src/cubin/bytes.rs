//! The bytes of a file, and little-endian numbers out of bytes that may end anywhere.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rayon::prelude::*;

/// What one thread reads at a time.
const PIECE: usize = 1 << 20;

/// The content of a file. It is read and not mapped: a file that is cut short under us is then an error and not a signal.
/// All cores read, since most of the time goes into making memory ready.
pub fn of_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let about = file.metadata()?;
    let mut bytes = Vec::new();
    if !about.is_file() || about.len() <= PIECE as u64 {
        file.read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    let size = usize::try_from(about.len()).map_err(io::Error::other)?;
    // Asks whether there is so much memory, and leaves it untouched.
    bytes.try_reserve_exact(size).map_err(io::Error::other)?;
    drop(bytes);
    let mut bytes = vec![0; size];
    bytes.par_chunks_mut(PIECE).enumerate().try_for_each(|(index, piece)| file.read_exact_at(piece, (index * PIECE) as u64))?;
    Ok(bytes)
}

/// The `u16` at `at`, or None when the bytes end before it does.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|chunk| u16::from_le_bytes(*chunk))
}

/// The `u32` at `at`, or None when the bytes end before it does.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|chunk| u32::from_le_bytes(*chunk))
}

/// The `u64` at `at`, or None when the bytes end before it does.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|chunk| u64::from_le_bytes(*chunk))
}
