//! The bytes of a file, and little-endian numbers out of bytes that may end anywhere.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use memmap2::MmapMut;
use rayon::prelude::*;

/// What one thread reads at a time, and from what size on a buffer has pages of its own.
const PIECE: usize = 1 << 20;

/// Zeroed memory of a fixed size. Large buffers are in huge pages where the system has them: an image unpacks to tens of
/// megabytes, and making small pages ready for those takes longer than unpacking.
pub enum Buffer {
    Small(Vec<u8>),
    Large(MmapMut),
}

impl Buffer {
    /// `size` bytes of zeros, or an error when the system has not so much memory.
    pub fn zeroed(size: usize) -> io::Result<Self> {
        if size < PIECE {
            return Ok(Self::Small(vec![0; size]));
        }
        let map = MmapMut::map_anon(size)?;
        // A system without huge pages says so, and does as well without.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self::Large(map))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Large(map) => map,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Large(map) => map,
        }
    }
}

/// The content of a file. It is read and not mapped: a file that is cut short under us is then an error and not a signal.
pub fn of_file(path: &Path) -> io::Result<Buffer> {
    let mut file = File::open(path)?;
    let about = file.metadata()?;
    if !about.is_file() {
        // A pipe has no size.
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        return Ok(Buffer::Small(bytes));
    }
    let mut buffer = Buffer::zeroed(usize::try_from(about.len()).map_err(io::Error::other)?)?;
    let read = |(index, piece): (usize, &mut [u8])| file.read_exact_at(piece, (index * PIECE) as u64);
    buffer.par_chunks_mut(PIECE).enumerate().try_for_each(read)?;
    Ok(buffer)
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
