//! Reads the GPU code in a file: which targets, which kernels, and what each kernel can do.
//!
//! It needs no CUDA toolkit, and it knows nothing of what the kernels are for. It reads shared objects and executables,
//! objects (also relocatable device code), bare cubins and bare fat binaries, with zstd, LZ4 or no compression.
//!
//! | file | what it is |
//! | --- | --- |
//! | `host` | the outer ELF file: where its fat binaries lie, and which kernel names it registers |
//! | `fatbin` | the container: entries, targets, codecs |
//! | `image` | one cubin: its kernels and their resources |
//! | `info` | the attributes that the assembler leaves for the driver |
//! | `sass` | the one table of opcodes, and the scan over instructions |
//! | `calls` | which functions a kernel can reach, and so which code counts as its own |
//! | `linkage` | the dynamic symbols of a shared object |
//! | `compare` | two inventories, kernel by kernel |
//! | `scan` | a whole folder of such files |
//! | `skim` | which targets a file has code for, from headers alone; images one by one |
//! | `usable` | the one rule by which code for one target runs on another |
//!
//! # Hollow kernels
//! A kernel is *hollow* when no instruction that it can reach can write memory outside its thread block. Such a kernel
//! launches, returns success, and leaves every result as it was. What counts as a write is the table in `sass`; what
//! counts as reachable is in `calls`. Where the file does not hold the code that is called, the call counts as a write:
//! `hollow` is said only of what was seen whole.
//!
//! # What it does not do
//! - PTX is text that the driver compiles later. Its entries are listed by name and not judged.
//! - Machine code for targets before SM 70 has another encoding. Its kernels are listed and never called hollow.
//! - The assembler prints how many bytes it spilled and leaves no record of it in the file, so there is no spill count.
//!   [`Kernel::stack_bytes`] holds what spilling needs, and [`Kernel::local_loads`] and [`Kernel::local_stores`] count the
//!   instructions that use local memory, for spills and for arrays alike.

mod bytes;
mod calls;
pub mod compare;
mod fatbin;
mod host;
mod image;
mod info;
mod linkage;
mod sass;
pub mod scan;
mod skim;
#[cfg(test)]
mod tests;
pub mod usable;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::exit::Exit;

pub use linkage::{Linkage, Symbol, linkage};
pub use skim::{Outline, Skim, Unread, skim};

/// Everything that a file says about its GPU code.
#[derive(Debug, Clone)]
pub struct Inventory {
    pub format: Format,
    /// In the order in which they lie in the file.
    pub images: Vec<Image>,
    /// The kernel names that the host code can register with the CUDA runtime, read from its constant strings.
    ///
    /// Registration passes each kernel's name as a C string, so these are the strings in read-only data that either name a
    /// kernel of an image in this file, or are the mangled name of a function. It is exact as long as the program keeps no other
    /// such string: a `puts("_Z3fooPi")` would be taken for a kernel. A kernel with an unmangled (`extern "C"`) name is seen
    /// only when an image of this file holds it. Empty for files without host code.
    pub registered: BTreeSet<String>,
    /// None for files that the dynamic loader does not load.
    pub linkage: Option<Linkage>,
}

/// What kind of file it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A shared object or an executable.
    SharedObject,
    Object,
    Cubin,
    Fatbin,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedObject => "shared object",
            Self::Object => "object",
            Self::Cubin => "cubin",
            Self::Fatbin => "fatbin",
        })
    }
}

/// Code for one target: one entry of a fat binary, or a bare cubin.
#[derive(Debug, Clone)]
pub struct Image {
    /// `sm_120f`, `sm_90a`, `sm_75`; for everything but machine code `compute_120f`.
    pub target: String,
    pub kind: Kind,
    pub codec: Codec,
    /// Which fat binary of the file holds it, counted from 0.
    pub fatbin: usize,
    /// The release of the tools that made it, such as `13.0.88`, where it is recorded.
    pub toolkit: Option<String>,
    /// Size in the file, and after decompression.
    pub stored_bytes: u64,
    pub bytes: u64,
    /// The kernels of machine code, by name. Empty for everything else.
    pub kernels: Vec<Kernel>,
    /// The entry names of PTX, in order. Empty for everything else.
    pub ptx_entries: Vec<String>,
    /// Digest of the PTX text or of the intermediate code, so that two files can be compared. None for machine code,
    /// where each kernel has one.
    pub digest: Option<Digest>,
}

impl Image {
    /// One of which nothing is known yet but what its container says.
    fn unread(target: String, kind: Kind, codec: Codec) -> Self {
        let (kernels, ptx_entries) = (Vec::new(), Vec::new());
        Self { target, kind, codec, fatbin: 0, toolkit: None, stored_bytes: 0, bytes: 0, kernels, ptx_entries, digest: None }
    }

    /// The kernels that cannot write memory outside their thread block.
    pub fn hollow(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter().filter(|kernel| kernel.hollow)
    }

    /// The kernels that lack the wait or the trigger of programmatic dependent launch. Most kernels need neither.
    pub fn without_dependency_marks(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter().filter(|kernel| !kernel.has_dependency_marks())
    }
}

/// What an image holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Machine code.
    Sass,
    Ptx,
    /// Intermediate code for link-time optimisation: no code yet.
    LtoIr,
    /// An entry of a kind that this reader does not know.
    Other(u16),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sass => f.write_str("sass"),
            Self::Ptx => f.write_str("ptx"),
            Self::LtoIr => f.write_str("ltoir"),
            Self::Other(kind) => write!(f, "kind {kind}"),
        }
    }
}

/// How an image is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Raw,
    Zstd,
    Lz4,
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        })
    }
}

/// One kernel of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// As the linker knows it: mangled.
    pub name: String,
    /// Nothing that it can reach can write memory outside its thread block.
    pub hollow: bool,
    /// It can reach code that this image does not hold; then it is never called hollow.
    pub opaque: bool,
    /// It waits for the kernel before it (`griddepcontrol.wait`).
    pub waits: bool,
    /// It lets the kernel after it start early (`griddepcontrol.launch_dependents`).
    pub triggers: bool,
    /// Registers a thread.
    pub registers: u32,
    /// Static shared memory a block, with what the system reserves in it (1 KiB on newer targets, where the assembler counts it).
    pub shared_bytes: u64,
    /// Stack frame a thread, without that of called functions.
    pub stack_bytes: u64,
    /// Instructions that read and write local memory, in all the code that it can reach.
    pub local_loads: u32,
    pub local_stores: u32,
    /// The size of its own code section, with padding.
    pub code_bytes: u64,
    /// Of the code that it can reach and of its constants: the same in two files when those are the same.
    pub code: Fingerprint,
}

impl Kernel {
    /// True when the kernel both waits and triggers.
    pub fn has_dependency_marks(&self) -> bool {
        self.waits && self.triggers
    }
}

/// A hash of 128 bits that tells code apart. It is no proof against someone who wants two to be alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub u128);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The inventory of a file.
pub fn read(path: &Path) -> Result<Inventory> {
    let bytes = bytes::of_file(path).map_err(|e| Error::io("read", path, e))?;
    read_bytes(&bytes).map_err(|e| e.within(format!("cannot understand {}", path.display())))
}

/// The inventory of a file whose content is given. Errors do not name the file.
pub fn read_bytes(bytes: &[u8]) -> Result<Inventory> {
    match bytes {
        [] => Err(fault("the file is empty")),
        [0x7f, b'E', b'L', b'F', ..] => host::read_elf(bytes),
        [0x50, 0xed, 0x55, 0xba, ..] => {
            let entries = fatbin::entries(bytes, 0)?;
            let images = fatbin::images(&entries)?;
            Ok(Inventory { format: Format::Fatbin, images, registered: BTreeSet::new(), linkage: None })
        }
        [b'!', b'<', b'a', b'r', b'c', b'h', b'>', ..] => {
            Err(fault("it is a static library").hint("unpack it with `ar x` and inspect the objects in it"))
        }
        _ if bytes.len() < 64 => Err(fault(format!("it is {} bytes long, too short for any kind of binary", bytes.len()))),
        _ if !bytes[..bytes.len().min(4096)].contains(&0) => Err(fault("it is text, not a binary")),
        _ => Err(fault("it is neither ELF nor a fat binary")),
    }
}

/// A fault in the file that is read, not in us and not in the machine.
fn fault(what: impl Into<String>) -> Error {
    Error::new(Exit::Fault, what)
}
