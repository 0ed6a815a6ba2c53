//! The container: a header of 16 bytes, then entries, each a header and a payload for one target.

use std::fmt;

use rayon::prelude::*;

use super::bytes::{Buffer, u16_at, u32_at, u64_at};
use super::{Codec, Image, Kind, fault, image};
use crate::digest::Digest;
use crate::error::{Error, Result};

const MAGIC: u32 = 0xba55_ed50;
const FATBIN_HEADER: usize = 16;
const ENTRY_HEADER: usize = 64;
// Real entry headers are 64 to about 200 bytes: they end with an object name and the assembler's options.
const ENTRY_HEADER_MAX: usize = 1 << 16;

const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;
// The suffix of the target, in bits 20 and 21.
const FLAG_SUFFIX_A: u64 = 0x10_0000;
const FLAG_SUFFIX_F: u64 = 0x20_0000;

// Limits on what a header may promise, since memory is set aside by that promise. Real images stay below a twentieth of the
// first; machine code shrinks by a factor of 5 to 30, and the densest real one, all padding, by some hundreds.
const IMAGE_MAX: u64 = 2 << 30;
const RATIO_MAX: u64 = 4096;

/// One entry of a fat binary, as it lies in the file.
#[derive(Debug)]
pub struct Entry<'a> {
    pub kind: Kind,
    pub codec: Codec,
    /// 120 for SM 12.0.
    pub sm: u32,
    /// `a`, `f` or nothing.
    pub suffix: &'static str,
    pub fatbin: usize,
    /// Where it starts in the section or file, for messages.
    pub at: usize,
    /// Without padding where the header tells its true size.
    pub payload: &'a [u8],
    /// The size after decompression.
    pub size: u64,
}

/// The entries of all fat binaries in `bytes`, which lie one behind the other with zeros between them. `first` is the number
/// of the first fat binary.
pub fn entries(bytes: &[u8], first: usize) -> Result<Vec<Entry<'_>>> {
    let mut found = Vec::new();
    let mut fatbin = first;
    let mut at = 0;
    loop {
        // The linker aligns each object's part.
        at += bytes[at..].iter().position(|&byte| byte != 0).unwrap_or(bytes.len() - at);
        if at == bytes.len() {
            return Ok(found);
        }
        at = one_fatbin(bytes, at, fatbin, &mut found)?;
        fatbin += 1;
    }
}

/// The header of a fat binary that starts with `bytes`: its own size, and the size of everything with it. `left` is how many
/// bytes there are from there.
pub fn container(bytes: &[u8], left: u64, here: &dyn Fn(&str) -> Error) -> Result<(usize, u64)> {
    let short = || here("is cut short in its header");
    let magic = u32_at(bytes, 0).ok_or_else(short)?;
    if magic != MAGIC {
        return Err(here(&format!("starts with {magic:#010x} and not with {MAGIC:#010x}")));
    }
    let (Some(version), Some(header), Some(size)) = (u16_at(bytes, 4), u16_at(bytes, 6), u64_at(bytes, 8)) else {
        return Err(short());
    };
    if version != 1 {
        return Err(here(&format!("has version {version}; only version 1 is known")));
    }
    let header = usize::from(header);
    if header < FATBIN_HEADER {
        return Err(here(&format!("says that its header has {header} bytes; the least is {FATBIN_HEADER}")));
    }
    let whole = size.checked_add(header as u64).filter(|whole| *whole <= left);
    let whole = whole.ok_or_else(|| {
        here(&format!("says that it has {size} bytes behind its header, and the file has {left} from there: cut short?"))
    })?;
    Ok((header, whole))
}

/// Adds the entries of the fat binary at `start` and returns where it ends.
fn one_fatbin<'a>(bytes: &'a [u8], start: usize, fatbin: usize, found: &mut Vec<Entry<'a>>) -> Result<usize> {
    let here = |what: &str| fault(format!("fat binary {fatbin} at offset {start:#x} {what}"));
    let left = bytes.len() - start;
    let (header, whole) = container(&bytes[start..], left as u64, &here)?;
    // Not longer than `left`, which is a usize.
    let end = start + usize::try_from(whole).unwrap_or(left);
    let mut at = start + header;
    while at < end {
        at = one_entry(&bytes[..end], at, fatbin, found)?;
    }
    Ok(end)
}

/// What the header of an entry says, checked as far as it can be without the payload.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    pub kind: Kind,
    pub codec: Codec,
    pub sm: u32,
    pub suffix: &'static str,
    /// The size of the header itself; the payload starts behind it.
    pub header: usize,
    /// The size of the payload without padding, where the header tells it.
    pub stored: usize,
    /// The size after decompression.
    pub size: u64,
    /// How far it is from this entry to the next one.
    pub step: usize,
}

/// The header of the entry that starts with `head`. `left` is how many bytes the fat binary has from there.
/// `here` makes an error that names the place.
pub fn head(head: &[u8], left: usize, here: &dyn Fn(&str) -> Error) -> Result<Head> {
    let short = || here("is cut short in its header");
    if left < ENTRY_HEADER {
        return Err(short());
    }
    let kind = u16_at(head, 0).ok_or_else(short)?;
    let header = u32_at(head, 4).ok_or_else(short)?;
    let padded = u64_at(head, 8).ok_or_else(short)?;
    let compressed = u32_at(head, 16).ok_or_else(short)?;
    let sm = u32_at(head, 28).ok_or_else(short)?;
    let flags = u64_at(head, 40).ok_or_else(short)?;
    let size = u64_at(head, 56).ok_or_else(short)?;

    let header = usize::try_from(header)
        .ok()
        .filter(|header| (ENTRY_HEADER..=ENTRY_HEADER_MAX.min(left)).contains(header))
        .ok_or_else(|| here(&format!("says that its header has {header} bytes; {left} are left")))?;
    let room = left - header;
    let padded = usize::try_from(padded)
        .ok()
        .filter(|padded| *padded <= room)
        .ok_or_else(|| here(&format!("says that its payload has {padded} bytes; {room} are left")))?;
    let codec = match (flags & FLAG_ZSTD != 0, flags & FLAG_LZ4 != 0) {
        (false, false) => Codec::Raw,
        (true, false) => Codec::Zstd,
        (false, true) => Codec::Lz4,
        (true, true) => return Err(here(&format!("has the flags {flags:#x}, which name two codecs"))),
    };
    let (stored, size) = match codec {
        Codec::Raw => (padded, padded as u64),
        Codec::Zstd | Codec::Lz4 => {
            let stored = usize::try_from(compressed).ok().filter(|compressed| *compressed <= padded);
            (stored.ok_or_else(|| here(&format!("says that {compressed} bytes of its {padded} are compressed")))?, size)
        }
    };
    if size > IMAGE_MAX || size / RATIO_MAX > stored as u64 {
        return Err(here(&format!("says that {stored} bytes become {size}, which is absurd")));
    }
    Ok(Head {
        kind: match kind {
            1 => Kind::Ptx,
            2 => Kind::Sass,
            8 => Kind::LtoIr,
            other => Kind::Other(other),
        },
        codec,
        sm,
        suffix: match (flags & FLAG_SUFFIX_A != 0, flags & FLAG_SUFFIX_F != 0) {
            (true, false) => "a",
            (false, true) => "f",
            _ => "",
        },
        header,
        stored,
        size,
        // Payloads are padded to 8; the last one may end with the fat binary.
        step: (header + padded.next_multiple_of(8)).min(left),
    })
}

/// Adds the entry at `start` and returns where the next one starts, which is always further on. `bytes` end with the fat binary.
fn one_entry<'a>(bytes: &'a [u8], start: usize, fatbin: usize, found: &mut Vec<Entry<'a>>) -> Result<usize> {
    let here = |what: &str| fault(format!("the entry at offset {start:#x} of fat binary {fatbin} {what}"));
    let head = head(&bytes[start..], bytes.len() - start, &here)?;
    let Head { kind, codec, sm, suffix, size, .. } = head;
    let payload = &bytes[start + head.header..start + head.header + head.stored];
    found.push(Entry { kind, codec, sm, suffix, fatbin, at: start, payload, size });
    Ok(start + head.step)
}

/// Reads all entries, on all cores.
pub fn images(entries: &[Entry<'_>]) -> Result<Vec<Image>> {
    entries.par_iter().map(|entry| one_image(entry).map_err(|e| e.within(entry.name()))).collect()
}

impl Entry<'_> {
    fn name(&self) -> String {
        format!("the {} entry for SM {} at offset {:#x} of fat binary {}", self.kind, self.sm, self.at, self.fatbin)
    }

    /// The payload after decompression. The size was checked against limits; the machine may still not have so much.
    fn unpacked(&self) -> Result<Buffer> {
        let size = usize::try_from(self.size).map_err(|_| fault(format!("{} bytes are too many", self.size)))?;
        let mut buffer = Buffer::zeroed(size).map_err(|e| Error::machine(format!("no memory for {size} bytes")).because(e))?;
        let wrong = |codec: &str, why: &dyn fmt::Display| fault(format!("its {codec} data is damaged")).because(why);
        let got = match self.codec {
            Codec::Raw => 0,
            Codec::Zstd => zstd::bulk::Decompressor::new()
                .and_then(|mut zstd| zstd.decompress_to_buffer(self.payload, &mut buffer[..]))
                .map_err(|e| wrong("zstd", &e))?,
            Codec::Lz4 => lz4_flex::block::decompress_into(self.payload, &mut buffer).map_err(|e| wrong("LZ4", &e))?,
        };
        if got != size {
            return Err(fault(format!("it unpacks to {got} bytes and not to {size}, as its header says")));
        }
        Ok(buffer)
    }
}

/// The image that an entry holds.
pub fn one_image(entry: &Entry<'_>) -> Result<Image> {
    let mut image = Image {
        fatbin: entry.fatbin,
        stored_bytes: entry.payload.len() as u64,
        bytes: entry.size,
        ..Image::unread(format!("compute_{}{}", entry.sm, entry.suffix), entry.kind, entry.codec)
    };
    // The codecs of other kinds differ from what their flags say; nothing in those is code yet.
    let unpacks = entry.codec != Codec::Raw && matches!(entry.kind, Kind::Sass | Kind::Ptx);
    let unpacked = unpacks.then(|| entry.unpacked()).transpose()?;
    let content = unpacked.as_deref().unwrap_or(entry.payload);
    match entry.kind {
        Kind::Sass => {
            let cubin = image::parse(content, Some((entry.sm, entry.suffix)))?;
            image.target = cubin.target;
            image.toolkit = cubin.toolkit;
            image.kernels = cubin.kernels;
        }
        Kind::Ptx => {
            // Raw PTX is padded with zeros.
            let text = &content[..content.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1)];
            image.ptx_entries = ptx_entries(text);
            image.digest = Some(Digest::of(text));
        }
        Kind::LtoIr | Kind::Other(_) => image.digest = Some(Digest::of(content)),
    }
    Ok(image)
}

/// The names behind `.entry`, in order.
fn ptx_entries(text: &[u8]) -> Vec<String> {
    const WORD: &[u8] = b".entry";
    let mut names = Vec::new();
    for line in text.split(|&byte| byte == b'\n') {
        let mut rest = line;
        while let Some(at) = rest.windows(WORD.len()).position(|window| window == WORD) {
            let before = rest[..at].last().is_none_or(u8::is_ascii_whitespace);
            rest = &rest[at + WORD.len()..];
            let name = rest.trim_ascii_start();
            let end = name.iter().position(|byte| !(byte.is_ascii_alphanumeric() || b"_$%".contains(byte))).unwrap_or(name.len());
            if before && end > 0 && name.len() < rest.len() {
                names.push(String::from_utf8_lossy(&name[..end]).into_owned());
            }
        }
    }
    names
}
