//! Which targets a file has code for, read from headers alone: libraries of gigabytes take milliseconds. Single images can
//! then be read whole.

use std::fs::File;
use std::io::{ErrorKind, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use object::LittleEndian;
use object::elf;
use object::read::ReadCache;
use object::read::elf::{FileHeader as _, SectionHeader as _};

use super::{Codec, Format, Image, Kind, fatbin, fault, image};
use crate::error::{Error, Result};

const LE: LittleEndian = LittleEndian;
/// Enough for a fat binary's header, for an entry's, and for the zeros before one.
const WINDOW: usize = 256;
/// Zeros behind the last fat binary of a section are skipped in pieces of this size.
const GAP: usize = 64 << 10;

/// What a file says of its GPU code in its headers.
#[derive(Debug, Clone)]
pub struct Skim {
    pub format: Format,
    /// In the order in which they lie in the file.
    pub images: Vec<Outline>,
}

/// Why a file is not understood.
#[derive(Debug)]
pub struct Unread {
    pub error: Error,
    /// It holds GPU code: what is damaged is a part of that.
    pub holds_code: bool,
}

impl Unread {
    pub fn code(error: Error) -> Self {
        Self { error, holds_code: true }
    }

    fn within(self, what: String) -> Self {
        Self { error: self.error.within(what), ..self }
    }
}

impl From<Error> for Unread {
    fn from(error: Error) -> Self {
        Self { error, holds_code: false }
    }
}

/// Code for one target, not read yet.
#[derive(Debug, Clone)]
pub struct Outline {
    pub kind: Kind,
    pub codec: Codec,
    /// 120 for SM 12.0.
    pub sm: u32,
    /// `a`, `f` or nothing.
    pub suffix: String,
    /// Where the code lies in the file, and its size there and after decompression.
    pub offset: u64,
    pub stored_bytes: u64,
    pub bytes: u64,
    /// Which fat binary of the file holds it; None for a bare cubin.
    fatbin: Option<usize>,
}

impl Outline {
    /// `sm_120f`; for everything but machine code `compute_120f`.
    pub fn target(&self) -> String {
        format!("{}_{}{}", if self.kind == Kind::Sass { "sm" } else { "compute" }, self.sm, self.suffix)
    }

    /// The image itself, out of the file that this outline is of.
    pub fn read(&self, file: &File) -> Result<Image> {
        let stored =
            usize::try_from(self.stored_bytes).map_err(|_| fault(format!("{} bytes are too many", self.stored_bytes)))?;
        let mut payload = super::bytes::Buffer::zeroed(stored)
            .map_err(|e| Error::machine(format!("no memory for {stored} bytes")).because(e))?;
        file.read_exact_at(&mut payload, self.offset).map_err(|e| fault("the file was cut short under us").because(e))?;
        let Some(fatbin) = self.fatbin else {
            return super::read_bytes(&payload)?.images.pop().ok_or_else(|| fault("the cubin holds no image"));
        };
        let suffix = match self.suffix.as_str() {
            "a" => "a",
            "f" => "f",
            _ => "",
        };
        let (kind, codec, sm, size) = (self.kind, self.codec, self.sm, self.bytes);
        fatbin::one_image(&fatbin::Entry { kind, codec, sm, suffix, fatbin, at: 0, payload: &payload, size })
    }
}

/// The outlines of the file's GPU code; None for a file of another kind (text, a static library, ELF for other machines).
pub fn skim(path: &Path) -> Result<Option<Skim>, Unread> {
    let mut file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let size =
        file.seek(SeekFrom::End(0)).and_then(|size| file.rewind().map(|()| size)).map_err(|e| Error::io("read", path, e))?;
    of(&file, size).map_err(|e| e.within(format!("cannot understand {}", path.display())))
}

fn of(file: &File, size: u64) -> Result<Option<Skim>, Unread> {
    let mut head = [0; 64];
    let got = window(file, 0, &mut head)?;
    match &head[..got] {
        [0x7f, b'E', b'L', b'F', 2, 1, ..] => elf(file, size).map(Some),
        [0x50, 0xed, 0x55, 0xba, ..] => {
            let mut images = Vec::new();
            fatbins(file, 0..size, &mut 0, &mut images).map_err(Unread::code)?;
            Ok(Some(Skim { format: Format::Fatbin, images }))
        }
        _ => Ok(None),
    }
}

fn elf(file: &File, size: u64) -> Result<Skim, Unread> {
    let damaged = |e: object::read::Error| fault("the ELF file is damaged or cut short").because(e);
    let cache = ReadCache::new(file);
    let header = image::Header::parse(&cache).map_err(damaged)?;
    let sections = header.sections(LE, &cache).map_err(damaged)?;
    if header.e_machine(LE).0 == image::EM_CUDA {
        let mut note = &[][..];
        let damaged = |e| Unread::code(damaged(e));
        for section in sections.iter() {
            if sections.section_name(LE, section).map_err(damaged)? == b".note.nv.tkinfo" {
                note = section.data(LE, &cache).map_err(damaged)?;
            }
        }
        let (sm, suffix) = image::target(header, note, None);
        let images = vec![Outline {
            kind: Kind::Sass,
            codec: Codec::Raw,
            sm,
            suffix,
            offset: 0,
            stored_bytes: size,
            bytes: size,
            fatbin: None,
        }];
        return Ok(Skim { format: Format::Cubin, images });
    }
    let format = if header.e_type(LE) == elf::ET_REL { Format::Object } else { Format::SharedObject };
    if sections.is_empty() {
        return Err(fault("it has no section headers, so GPU code in it cannot be found").into());
    }
    let (mut images, mut count) = (Vec::new(), 0);
    for section in sections.iter() {
        let name = sections.section_name(LE, section).map_err(damaged)?;
        // Relocatable device code waits for the linker; what a linked library keeps of it is never loaded.
        let wanted = name == b".nv_fatbin" || (name == b"__nv_relfatbin" && format == Format::Object);
        if !wanted || section.sh_type(LE) == elf::SHT_NOBITS {
            continue;
        }
        let (start, length) = (section.sh_offset(LE), section.sh_size(LE));
        let end = start.checked_add(length).filter(|end| *end <= size);
        let end = end.ok_or_else(|| {
            Unread::code(fault(format!("section {} reaches past the end of the file: cut short?", lossy(name))))
        })?;
        fatbins(file, start..end, &mut count, &mut images)
            .map_err(|e| Unread::code(e.within(format!("section {} is damaged", lossy(name)))))?;
    }
    Ok(Skim { format, images })
}

/// Adds the outlines of all fat binaries in a part of the file, which lie one behind the other with zeros between them.
fn fatbins(file: &File, part: std::ops::Range<u64>, count: &mut usize, images: &mut Vec<Outline>) -> Result<()> {
    let mut at = part.start;
    let mut bytes = [0; WINDOW];
    while let Some(start) = next_byte(file, at..part.end)? {
        let fatbin = *count;
        *count += 1;
        let here = |what: &str| fault(format!("fat binary {fatbin} at offset {start:#x} {what}"));
        let got = window(file, start, &mut bytes)?;
        let (header, whole) = fatbin::container(&bytes[..got], part.end - start, &here)?;
        let end = start + whole;
        at = start + header as u64;
        while at < end {
            let here = |what: &str| fault(format!("the entry at offset {at:#x} of fat binary {fatbin} {what}"));
            let left = usize::try_from(end - at).map_err(|_| here("is too large for this machine"))?;
            let got = window(file, at, &mut bytes)?;
            let head = fatbin::head(&bytes[..got], left, &here)?;
            images.push(Outline {
                kind: head.kind,
                codec: head.codec,
                sm: head.sm,
                suffix: head.suffix.to_owned(),
                offset: at + head.header as u64,
                stored_bytes: head.stored as u64,
                bytes: head.size,
                fatbin: Some(fatbin),
            });
            at += head.step as u64;
        }
        at = end;
    }
    Ok(())
}

/// Where the first byte that is not zero lies.
fn next_byte(file: &File, part: std::ops::Range<u64>) -> Result<Option<u64>> {
    let mut at = part.start;
    let mut bytes = vec![0; WINDOW];
    while at < part.end {
        let got = window(file, at, &mut bytes)?;
        if got == 0 {
            break;
        }
        if let Some(found) = bytes[..got].iter().position(|&byte| byte != 0) {
            return Ok(Some(at + found as u64).filter(|found| *found < part.end));
        }
        at += got as u64;
        bytes.resize(GAP, 0);
    }
    Ok(None)
}

/// Reads what there is at `at`, up to the size of `bytes`; returns how much that is.
fn window(file: &File, at: u64, bytes: &mut [u8]) -> Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match file.read_at(&mut bytes[got..], at + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::machine("cannot read the file").because(error)),
        }
    }
    Ok(got)
}

fn lossy(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}
