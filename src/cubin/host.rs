//! The outer ELF file: where its fat binaries lie, and which kernel names it registers.

use std::collections::{BTreeSet, HashSet};

use cpp_demangle::{DemangleOptions, ParseOptions};
use object::LittleEndian;
use object::elf;
use object::read::elf::{FileHeader as _, SectionHeader as _};

use super::{Codec, Format, Image, Inventory, Kind, fatbin, fault, image, linkage};
use crate::error::Result;

const LE: LittleEndian = LittleEndian;

/// A mangled name longer than this is no name. The longest real ones have some ten thousand characters.
const NAME_MAX: usize = 1 << 16;

/// The inventory of an ELF file.
pub fn read_elf(bytes: &[u8]) -> Result<Inventory> {
    let damaged = |e: object::read::Error| fault("the ELF file is damaged or cut short").because(e);
    match bytes.get(4..6) {
        Some([2, 1]) => {}
        Some(_) => return Err(fault("it is ELF, and not of the 64-bit little-endian kind that holds CUDA code")),
        None => return Err(fault("the ELF file is cut short in its header")),
    }
    let header = elf::FileHeader64::<LittleEndian>::parse(bytes).map_err(damaged)?;
    let format = match (header.e_machine(LE).0, header.e_type(LE)) {
        (image::EM_CUDA, _) => return bare_cubin(bytes),
        (_, elf::ET_REL) => Format::Object,
        (_, elf::ET_DYN | elf::ET_EXEC) => Format::SharedObject,
        (_, other) => return Err(fault(format!("it is ELF of type {}, neither an object nor a shared object", other.0))),
    };
    header.program_headers(LE, bytes).map_err(damaged)?;
    let sections = header.sections(LE, bytes).map_err(damaged)?;
    let mut entries = Vec::new();
    let mut strings = Vec::new();
    for section in sections.iter() {
        let name = sections.section_name(LE, section).map_err(damaged)?;
        // The second name is that of relocatable device code, which waits for nvlink.
        if matches!(name, b".nv_fatbin" | b"__nv_relfatbin") {
            let first = entries.last().map_or(0, |entry: &fatbin::Entry<'_>| entry.fatbin + 1);
            let data = section.data(LE, bytes).map_err(damaged)?;
            entries.extend(fatbin::entries(data, first).map_err(|e| e.within(format!("section {} is damaged", lossy(name))))?);
        } else if holds_strings(name, section) {
            strings.push(section.data(LE, bytes).map_err(damaged)?);
        }
    }
    let (images, linkage) =
        rayon::join(|| fatbin::images(&entries), || (format == Format::SharedObject).then(|| linkage::of(bytes)).transpose());
    let (images, linkage) = (images?, linkage?);
    let registered = if images.is_empty() { BTreeSet::new() } else { registered(&strings, &images) };
    Ok(Inventory { format, images, registered, linkage })
}

fn bare_cubin(bytes: &[u8]) -> Result<Inventory> {
    let cubin = image::parse(bytes, None)?;
    let image = Image {
        toolkit: cubin.toolkit,
        stored_bytes: bytes.len() as u64,
        bytes: bytes.len() as u64,
        kernels: cubin.kernels,
        ..Image::unread(cubin.target, Kind::Sass, Codec::Raw)
    };
    Ok(Inventory { format: Format::Cubin, images: vec![image], registered: BTreeSet::new(), linkage: None })
}

/// True for constants that the program can read: where a compiler puts string literals.
fn holds_strings(name: &[u8], section: &elf::SectionHeader64<LittleEndian>) -> bool {
    let flags = section.sh_flags(LE).0;
    let read_only = flags & (elf::SHF_ALLOC.0 | elf::SHF_WRITE.0 | elf::SHF_EXECINSTR.0) == elf::SHF_ALLOC.0;
    section.sh_type(LE) == elf::SHT_PROGBITS
        && read_only
        && !name.starts_with(b".eh_frame")
        && !name.starts_with(b".gcc_except_table")
        && name != b".interp"
}

/// The kernel names among the strings of the host code; see [`Inventory::registered`].
fn registered(sections: &[&[u8]], images: &[Image]) -> BTreeSet<String> {
    let kernels: HashSet<&[u8]> = images
        .iter()
        .flat_map(|image| image.kernels.iter().map(|kernel| &kernel.name).chain(&image.ptx_entries))
        .map(|name| name.as_bytes())
        .collect();
    let mut found = BTreeSet::new();
    for string in sections.iter().flat_map(|section| section.split(|&byte| byte == 0)).filter(|string| !string.is_empty()) {
        let is_name =
            |name: &[u8]| name.len() <= NAME_MAX && (kernels.contains(name) || (name.starts_with(b"_Z") && is_function(name)));
        if is_name(string) {
            found.insert(lossy(string));
        } else if let Some(name) = behind_other_data(string).filter(|name| is_name(name)) {
            found.insert(lossy(name));
        }
    }
    found
}

/// The mangled name at the end of `bytes`, where something else goes before it: a table of numbers need not end with a zero, and the
/// linker puts strings right behind it.
fn behind_other_data(bytes: &[u8]) -> Option<&[u8]> {
    let last_foreign = bytes.iter().rposition(|byte| !is_of_a_name(*byte));
    let end = &bytes[last_foreign.map_or(0, |at| at + 1)..];
    // The byte before may look like a letter.
    let start = end.windows(2).position(|two| two == b"_Z")?;
    (last_foreign.is_some() || start > 0).then(|| &end[start..])
}

fn is_of_a_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_.$".contains(&byte)
}

/// True for the mangled name of a function, false for that of a variable or for anything else.
fn is_function(name: &[u8]) -> bool {
    if !name.iter().all(|byte| is_of_a_name(*byte)) {
        return false;
    }
    // Only a function's name says what it takes, so only its long form ends with a parenthesis.
    let limits = ParseOptions::default().recursion_limit(96);
    cpp_demangle::Symbol::new_with_options(name, &limits)
        .ok()
        .and_then(|symbol| symbol.demangle_with_options(&DemangleOptions::default()).ok())
        .is_some_and(|long| long.ends_with(')'))
}

fn lossy(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_right_behind_other_constants_is_found() {
        let ptx = Image::unread("sm_120f".to_owned(), Kind::Ptx, Codec::Raw);
        let images = [Image { ptx_entries: vec!["_Z1kPf".to_owned()], ..ptx }];
        let found = |bytes: &[u8]| registered(&[bytes], &images).into_iter().collect::<Vec<_>>();
        assert_eq!(found(b"\0_Z1kPf\0"), ["_Z1kPf"]);
        assert_eq!(found(b"\0\x10\xff_Z1kPf\0"), ["_Z1kPf"]);
        assert_eq!(found(b"\0\x10\xffA_Z1kPf\0"), ["_Z1kPf"]);
        assert_eq!(found(b"\xff_Z1gPf\0"), ["_Z1gPf"], "also one that no image has");
        assert!(found(b"\xff_Z1kPf is not there\0").is_empty());
    }

    #[test]
    fn names_of_variables_and_broken_names_are_not_taken_for_kernels() {
        assert!(is_function(b"_Z2tkILi1EEvPi"));
        assert!(is_function(b"_ZN2ns4kernEPf"));
        assert!(!is_function(b"_ZN2ns4gvarE"));
        assert!(!is_function(b"_Zhello"));
        assert!(!is_function(b"_Z"));
        assert!(!is_function(b"_Z3fooPi is called"));
    }
}
