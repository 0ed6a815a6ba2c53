//! One cubin: an ELF file of its own, with a code section for each kernel.

use std::collections::HashMap;

use object::elf;
use object::read::elf::{FileHeader as _, Rel as _, Rela as _, SectionHeader as _, Sym as _};
use object::{LittleEndian, SymbolIndex};
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::calls::{Graph, Place, is_quiet};
use super::{Fingerprint, Kernel, fault, info, sass};
use crate::error::Result;

const LE: LittleEndian = LittleEndian;
pub type Header = elf::FileHeader64<LittleEndian>;

/// The machine number of NVIDIA GPUs.
pub const EM_CUDA: u16 = 190;
/// In a symbol's `st_other`: the function is a kernel.
const STO_CUDA_ENTRY: u8 = 0x10;
/// The ABI from which on `e_flags` has the SM in its second byte.
const ABI_WITH_WIDE_FLAGS: u8 = 8;
const EF_ACCELERATOR_OLD: u32 = 0x800;
const EF_ACCELERATOR: u32 = 0x8;

/// What one cubin holds.
#[derive(Debug)]
pub struct Cubin {
    /// `sm_120f`.
    pub target: String,
    pub toolkit: Option<String>,
    /// By name.
    pub kernels: Vec<Kernel>,
}

/// A code section, read.
struct Code {
    marks: sass::Marks,
    fingerprint: u128,
}

/// What is in the cubin `bytes`. `entry` is the SM and the suffix that the fat binary gives for it: the suffix stands there, and
/// in a cubin only as a remark of the assembler.
pub fn parse(bytes: &[u8], entry: Option<(u32, &str)>) -> Result<Cubin> {
    let damaged = |e: object::read::Error| fault("the cubin is damaged or cut short").because(e);
    let header = Header::parse(bytes).map_err(|e| fault("the cubin is no 64-bit ELF file").because(e))?;
    if header.e_machine(LE).0 != EM_CUDA {
        return Err(fault(format!("the cubin is for machine {} and not for a GPU", header.e_machine(LE).0)));
    }
    header.endian().map_err(damaged)?;
    // Not needed here, but the driver reads them, and they lie at the end.
    header.program_headers(LE, bytes).map_err(damaged)?;
    let sections = header.sections(LE, bytes).map_err(damaged)?;
    let mut names = Vec::with_capacity(sections.len());
    // Sections of a real cubin share neither names nor code. Where they do, reading each would take time without bound.
    let (mut name_bytes, mut code_bytes) = (0u64, 0u64);
    for section in sections.iter() {
        let name = sections.section_name(LE, section).map_err(damaged)?;
        name_bytes = name_bytes.saturating_add(name.len() as u64);
        if name.starts_with(b".text.") || name.starts_with(b".nv.constant") {
            code_bytes = code_bytes.saturating_add(section.sh_size(LE));
        }
        if name_bytes > bytes.len() as u64 || code_bytes > bytes.len() as u64 {
            return Err(fault("the cubin's sections overlap"));
        }
        names.push(name);
    }
    let by_name: HashMap<&[u8], usize> = names.iter().enumerate().map(|(index, name)| (*name, index)).collect();
    let data = |index: usize| sections.section(object::SectionIndex(index)).and_then(|s| s.data(LE, bytes)).map_err(damaged);

    let note = by_name.get(&b".note.nv.tkinfo"[..]).map_or(Ok(&[][..]), |index| data(*index))?;
    let (sm, suffix) = target(header, note, entry);
    let symbols = sections.symbols(LE, bytes, elf::SHT_SYMTAB).map_err(damaged)?;

    // Which functions lie in which section, and which of them is the kernel.
    let mut functions: HashMap<usize, usize> = HashMap::new();
    let mut entries: Vec<(usize, usize, &[u8])> = Vec::new();
    for (index, symbol) in symbols.enumerate() {
        let section = usize::from(symbol.st_shndx(LE).0);
        if symbol.st_type() != elf::STT_FUNC || section == 0 || section >= names.len() {
            continue;
        }
        *functions.entry(section).or_default() += 1;
        if symbol.st_other.0 & STO_CUDA_ENTRY != 0 {
            entries.push((index.0, section, symbols.symbol_name(LE, symbol).map_err(damaged)?));
        }
    }
    // A cubin without a symbol table: only a kernel has a bank of parameters.
    if symbols.is_empty() {
        for (section, name) in names.iter().enumerate() {
            if let Some(kernel) = name.strip_prefix(b".text.")
                && by_name.contains_key(&[b".nv.constant0.", kernel].concat()[..])
            {
                entries.push((0, section, kernel));
            }
        }
    }

    // Constants that belong to one function. Bank 0 holds its parameters, which the caller fills.
    let mut constants: HashMap<&[u8], Vec<usize>> = HashMap::new();
    for (index, name) in names.iter().enumerate() {
        if let Some(rest) = name.strip_prefix(b".nv.constant")
            && let Some(dot) = rest.iter().position(|&byte| byte == b'.')
            && &rest[..dot] != b"0"
        {
            constants.entry(&rest[dot + 1..]).or_default().push(index);
        }
    }
    let is_code = |index: usize| names.get(index).is_some_and(|name| name.starts_with(b".text."));
    let code: Vec<Option<Code>> = (0..names.len())
        .into_par_iter()
        .with_min_len(64)
        .map(|index| {
            let Some(function) = names[index].strip_prefix(b".text.") else { return Ok(None) };
            let text = data(index)?;
            let fingerprint = match constants.get(function) {
                None => xxh3_128(text),
                Some(banks) => {
                    let mut hash = Xxh3::new();
                    hash.update(text);
                    for &bank in banks {
                        hash.update(names[bank]);
                        hash.update(data(bank)?);
                    }
                    hash.digest128()
                }
            };
            let marks = if sm >= sass::FIRST_SM { sass::scan(text) } else { sass::Marks { writes: true, ..Default::default() } };
            Ok(Some(Code { marks, fingerprint }))
        })
        .collect::<Result<_>>()?;

    let place = |index: SymbolIndex| {
        let symbol = symbols.symbol(index).ok()?;
        let section = usize::from(symbol.st_shndx(LE).0);
        match symbol.st_type() {
            elf::STT_FUNC if section == 0 => Some(Place::Missing(index.0)),
            elf::STT_FUNC | elf::STT_SECTION if is_code(section) => Some(Place::Section(section)),
            _ => None,
        }
    };
    let mut graph = Graph::default();
    for (index, section) in sections.iter().enumerate() {
        if names[index] == b".nv.callgraph" {
            graph.add_section(data(index)?, |symbol| place(SymbolIndex(symbol as usize)));
        }
        let caller = section.sh_info(LE) as usize;
        if !(names[index].starts_with(b".rel.text.") || names[index].starts_with(b".rela.text.")) || !is_code(caller) {
            continue;
        }
        let mut add = |symbol: Option<SymbolIndex>| {
            if let Some(callee) = symbol.and_then(place) {
                graph.add(Place::Section(caller), callee);
            }
        };
        if let Some((relocations, _)) = section.rel(LE, bytes).map_err(damaged)? {
            relocations.iter().for_each(|relocation| add(relocation.symbol(LE)));
        }
        if let Some((relocations, _)) = section.rela(LE, bytes).map_err(damaged)? {
            relocations.iter().for_each(|relocation| add(relocation.symbol(LE, false)));
        }
    }

    let info = by_name.get(&b".nv.info"[..]).map_or(Ok(&[][..]), |index| data(*index)).map(info::parse)?;
    let mut kernels = Vec::with_capacity(entries.len());
    for (symbol, section, name) in entries {
        let Some(own) = code[section].as_ref() else { continue };
        let reach = graph.reach(section);
        let mut marks = own.marks;
        let mut local_functions = functions.get(&section).is_some_and(|count| *count > 1);
        let mut whole = own.fingerprint;
        if reach.sections.len() > 1 {
            let mut hash = Xxh3::new();
            hash.update(&own.fingerprint.to_le_bytes());
            for &other in reach.sections.iter().filter(|other| **other != section) {
                if let Some(code) = code[other].as_ref() {
                    marks.add(&code.marks);
                    local_functions |= functions.get(&other).is_some_and(|count| *count > 1);
                    hash.update(names[other]);
                    hash.update(&code.fingerprint.to_le_bytes());
                }
            }
            whole = hash.digest128();
        }
        let elsewhere = reach.sections.len() > 1 || !reach.missing.is_empty();
        let unknown = reach.missing.iter().any(|symbol| {
            let name = symbols.symbol(SymbolIndex(*symbol)).and_then(|symbol| symbols.symbol_name(LE, symbol));
            !name.is_ok_and(is_quiet)
        });
        let opaque = unknown
            || reach.indirect
            || marks.calls_pointer
            || (marks.calls_absolute && !elsewhere)
            || (marks.calls && !elsewhere && !local_functions);
        let text = sections.section(object::SectionIndex(section)).map_err(damaged)?;
        let key = u32::try_from(symbol).unwrap_or(0);
        kernels.push(Kernel {
            name: String::from_utf8_lossy(name).into_owned(),
            hollow: !marks.writes && !opaque,
            opaque,
            waits: marks.waits,
            triggers: marks.triggers,
            // Older assemblers wrote the number into the section header alone.
            registers: info.registers.get(&key).copied().unwrap_or(text.sh_info(LE) >> 24),
            shared_bytes: by_name
                .get(&[b".nv.shared.", name].concat()[..])
                .and_then(|index| sections.section(object::SectionIndex(*index)).ok())
                .map_or(0, |shared| shared.sh_size(LE)),
            stack_bytes: info.frame_bytes.get(&key).copied().unwrap_or(0).into(),
            local_loads: marks.local_loads,
            local_stores: marks.local_stores,
            code_bytes: text.sh_size(LE),
            code: Fingerprint(whole),
        });
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Cubin { target: format!("sm_{sm}{suffix}"), toolkit: toolkit(note), kernels })
}

/// The SM and the suffix: as the fat binary says, else as the assembler noted them, else as the flags tell.
pub fn target(header: &Header, note: &[u8], entry: Option<(u32, &str)>) -> (u32, String) {
    let flags = header.e_flags(LE).0;
    let (sm, accelerator) = match header.e_ident().abi_version {
        abi if abi >= ABI_WITH_WIDE_FLAGS => ((flags >> 8) & 0xff, EF_ACCELERATOR),
        _ => (flags & 0xff, EF_ACCELERATOR_OLD),
    };
    let sm = entry.map_or(sm, |(sm, _)| sm);
    if let Some((_, suffix)) = entry.filter(|(_, suffix)| !suffix.is_empty()) {
        return (sm, suffix.to_owned());
    }
    let noted =
        after(note, b"-arch sm_").or_else(|| after(note, b"-arch=sm_")).and_then(|text| text.strip_prefix(&sm.to_string()));
    let suffix = match noted {
        Some(suffix @ ("" | "a" | "f")) => suffix,
        _ if flags & accelerator != 0 => "a",
        _ => "",
    };
    (sm, suffix.to_owned())
}

/// The release in a note such as `Cuda compilation tools, release 13.0, V13.0.88`.
fn toolkit(note: &[u8]) -> Option<String> {
    after(note, b", V").filter(|text| text.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned)
}

/// The word behind `mark`.
fn after<'a>(note: &'a [u8], mark: &[u8]) -> Option<&'a str> {
    let at = note.windows(mark.len()).position(|window| window == mark)? + mark.len();
    let rest = &note[at..];
    let end = rest.iter().position(|byte| !(byte.is_ascii_alphanumeric() || *byte == b'.')).unwrap_or(rest.len());
    std::str::from_utf8(&rest[..end]).ok()
}
