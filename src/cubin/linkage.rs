//! The dynamic symbols of a shared object: what it needs, what it gives, and how new the system must be.

use std::fmt;
use std::fs::File;
use std::path::Path;

use object::read::elf::{FileHeader as _, SectionHeader as _, Sym as _, VersionTable};
use object::read::{ReadCache, ReadRef, StringTable};
use object::{LittleEndian, SymbolIndex, elf};

use super::fault;
use crate::error::{Error, Result};

const LE: LittleEndian = LittleEndian;

/// What the dynamic loader reads of a shared object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Linkage {
    /// Libraries that must be there, in order.
    pub needed: Vec<String>,
    pub soname: Option<String>,
    /// Where it looks for libraries; `DT_RUNPATH`, and the older `DT_RPATH`.
    pub runpath: Option<String>,
    pub rpath: Option<String>,
    /// In the order of the symbol table.
    pub exports: Vec<Symbol>,
    pub undefined: Vec<Symbol>,
    /// The names of the symbol versions that it defines, without the one that is the file's own name.
    pub defines_versions: Vec<String>,
    /// The newest `GLIBC_…` that it asks for, such as `2.34`.
    pub glibc_floor: Option<String>,
    /// The newest `GLIBCXX_…` that it asks for, such as `3.4.32`.
    pub libstdcxx_floor: Option<String>,
    /// The newest `CXXABI_…` that it asks for, such as `1.3.13`.
    pub cxxabi_floor: Option<String>,
}

/// A dynamic symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    pub name: String,
    /// The version that it has, or that is asked for.
    pub version: Option<String>,
    /// An undefined weak symbol may stay undefined.
    pub weak: bool,
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.version.as_ref().map_or(Ok(()), |version| write!(f, "@{version}"))
    }
}

/// The linkage of any ELF shared object, reading only the parts that it needs: libraries of gigabytes take milliseconds.
pub fn linkage(path: &Path) -> Result<Linkage> {
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    of(&ReadCache::new(file)).map_err(|e| e.within(format!("cannot understand {}", path.display())))
}

/// The linkage of an ELF file. It goes by section headers, as the link editor does; a file without them has none.
pub fn of<'data, R: ReadRef<'data>>(data: R) -> Result<Linkage> {
    let damaged = |e: object::read::Error| fault("its dynamic symbols are damaged or cut short").because(e);
    let header = elf::FileHeader64::<LittleEndian>::parse(data).map_err(|e| fault("it is no 64-bit ELF file").because(e))?;
    if header.is_big_endian() {
        return Err(fault("it is a big-endian ELF file"));
    }
    let sections = header.sections(LE, data).map_err(damaged)?;
    let section_bytes =
        |index: usize| sections.section(object::SectionIndex(index)).and_then(|s| s.data(LE, data)).map_err(damaged);
    // Strings come as one piece: asking for them one by one is slow on a file, and refused for long C++ names.
    let strings_of =
        |link: u32| section_bytes(link as usize).map(|bytes| (bytes, StringTable::new(bytes, 0, bytes.len() as u64)));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut linkage = Linkage::default();

    for section in sections.iter().filter(|section| section.sh_type(LE) == elf::SHT_DYNAMIC) {
        let (_, strings) = strings_of(section.sh_link(LE))?;
        let tags = section.data_as_array::<elf::Dyn64<LittleEndian>, _>(LE, data).map_err(damaged)?;
        for tag in tags.iter().take_while(|tag| tag.d_tag.get(LE) != elf::DT_NULL) {
            let string = || {
                let offset = u32::try_from(tag.d_val.get(LE)).map_err(|_| fault("a dynamic tag points outside the file"))?;
                strings.get(offset).map(text).map_err(|()| fault("a dynamic tag points outside its strings"))
            };
            match tag.d_tag.get(LE) {
                elf::DT_NEEDED => linkage.needed.push(string()?),
                elf::DT_SONAME => linkage.soname = Some(string()?),
                elf::DT_RPATH => linkage.rpath = Some(string()?),
                elf::DT_RUNPATH => linkage.runpath = Some(string()?),
                _ => {}
            }
        }
    }

    let Some(section) = sections.iter().find(|section| section.sh_type(LE) == elf::SHT_DYNSYM) else { return Ok(linkage) };
    let (string_bytes, strings) = strings_of(section.sh_link(LE))?;
    let symbols = section.data_as_array::<elf::Sym64<LittleEndian>, _>(LE, data).map_err(damaged)?;
    let versions = {
        let numbers = sections.gnu_versym(LE, data).map_err(damaged)?.map_or(&[][..], |(numbers, _)| numbers);
        let defined = sections.gnu_verdef(LE, data).map_err(damaged)?.map(|(defined, _)| defined);
        let asked = sections.gnu_verneed(LE, data).map_err(damaged)?.map(|(asked, _)| asked);
        VersionTable::<elf::FileHeader64<LittleEndian>>::parse(LE, numbers, defined, asked, strings).map_err(damaged)?
    };
    // Names of a real symbol table may share their ends, and no more.
    let mut name_bytes = 0usize;
    for (index, symbol) in symbols.iter().enumerate().skip(1) {
        let name = strings.get(symbol.st_name(LE)).map_err(|()| fault("a symbol's name lies outside the strings"))?;
        name_bytes = name_bytes.saturating_add(name.len());
        if name_bytes > string_bytes.len().saturating_mul(16).saturating_add(1 << 20) {
            return Err(fault("the names of its dynamic symbols overlap"));
        }
        let undefined = symbol.st_shndx(LE) == elf::SHN_UNDEF;
        if name.is_empty() || symbol.st_bind() == elf::STB_LOCAL || matches!(symbol.st_type(), elf::STT_SECTION | elf::STT_FILE) {
            continue;
        }
        if !undefined && matches!(symbol.st_visibility(), elf::STV_HIDDEN | elf::STV_INTERNAL) {
            continue;
        }
        let number = versions.version_index(LE, SymbolIndex(index));
        let version = versions.version(number.index()).map_err(damaged)?.map(|version| text(version.name()));
        let entry = Symbol { name: text(name), version, weak: symbol.st_bind() == elf::STB_WEAK };
        if undefined { linkage.undefined.push(entry) } else { linkage.exports.push(entry) }
    }

    if let Some((mut asked, link)) = sections.gnu_verneed(LE, data).map_err(damaged)? {
        let (_, strings) = strings_of(u32::try_from(link.0).unwrap_or(0))?;
        while let Some((_, mut versions)) = asked.next().map_err(damaged)? {
            while let Some(version) = versions.next().map_err(damaged)? {
                let name =
                    strings.get(version.vna_name.get(LE)).map_err(|()| fault("a version's name lies outside the strings"))?;
                let name = text(name);
                raise(&mut linkage.glibc_floor, name.strip_prefix("GLIBC_"));
                raise(&mut linkage.libstdcxx_floor, name.strip_prefix("GLIBCXX_"));
                raise(&mut linkage.cxxabi_floor, name.strip_prefix("CXXABI_"));
            }
        }
    }
    if let Some((mut defined, link)) = sections.gnu_verdef(LE, data).map_err(damaged)? {
        let (_, strings) = strings_of(u32::try_from(link.0).unwrap_or(0))?;
        while let Some((definition, mut names)) = defined.next().map_err(damaged)? {
            let is_file = definition.vd_flags.get(LE).0 & elf::VER_FLG_BASE.0 != 0;
            if let (false, Some(name)) = (is_file, names.next().map_err(damaged)?) {
                let name = strings.get(name.vda_name.get(LE)).map_err(|()| fault("a version's name lies outside the strings"))?;
                linkage.defines_versions.push(text(name));
            }
        }
    }
    Ok(linkage)
}

/// Raises `floor` to `version` where that is newer. What is not made of numbers (`PRIVATE`, `ABI_DT_RELR`) is no release.
fn raise(floor: &mut Option<String>, version: Option<&str>) {
    let numbers = |text: &str| text.split('.').map(|part| part.parse::<u32>().ok()).collect::<Option<Vec<_>>>();
    let Some((version, new)) = version.and_then(|version| Some((version, numbers(version)?))) else { return };
    if floor.as_deref().and_then(numbers).is_none_or(|old| old < new) {
        *floor = Some(version.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_order_as_numbers_and_private_ones_are_no_floor() {
        let mut floor = None;
        for version in ["2.9", "2.34", "PRIVATE", "2.2.5", "ABI_DT_RELR"] {
            raise(&mut floor, Some(version));
        }
        assert_eq!(floor.as_deref(), Some("2.34"));
    }
}
