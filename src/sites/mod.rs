//! Finds gates and defects in FlashInfer's files. Changes nothing.

pub mod cuda;
pub mod python;

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::tables::{self, Anchor, Form, Module, Place, Tables};

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    pub bytes: Range<usize>,
    /// Counted from 1.
    pub line: usize,
}

/// A file of FlashInfer, read for its anchors: CUDA by tokens, Python by syntax tree.
pub enum Source<'s> {
    Cuda(cuda::Source<'s>),
    Python(python::Source<'s>),
}

/// How an anchor that does not fit a file was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    pub find: String,
    /// ` in f` or ` outside f`, or nothing.
    pub place: String,
    pub expected: usize,
    pub found: usize,
}

impl<'s> Source<'s> {
    /// Reads `text`, the content of the file `path`, whose ending tells the language.
    pub fn new(path: &str, text: &'s [u8]) -> Self {
        match path.ends_with(".py") {
            true => Self::Python(python::Source::new(text)),
            false => Self::Cuda(cuda::Source::new(text)),
        }
    }

    /// The places of an anchor, in the order of the file, however many there are.
    pub fn find(&self, anchor: &Anchor) -> Vec<Site> {
        match self {
            Self::Cuda(source) => source.find(anchor),
            Self::Python(source) => source.find(anchor),
        }
    }

    /// The anchors of a form that are not found as often as they must; empty when the form fits.
    pub fn mismatches(&self, form: &Form) -> Vec<Mismatch> {
        form.expect
            .iter()
            .chain(&form.edits)
            .filter_map(|anchor| {
                let found = self.find(anchor).len();
                let place = match (&anchor.within, &anchor.outside) {
                    (Some(name), _) => format!(" in {name}"),
                    (None, Some(name)) => format!(" outside {name}"),
                    (None, None) => String::new(),
                };
                let mismatch = || Mismatch { find: anchor.find.clone(), place, expected: anchor.count, found };
                (found != anchor.count).then(mismatch)
            })
            .collect()
    }
}

/// The gate of a module as it stands in an installed FlashInfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateState {
    pub path: PathBuf,
    pub line: usize,
    /// The majors that are let in; `None` where the generator asks for none, and all are.
    pub majors: Option<Vec<u32>>,
}

impl GateState {
    /// Whether GPUs of this major version (12 for SM 12.0) are let in.
    pub fn open_for(&self, major: u32) -> bool {
        // FlashInfer takes an empty list for "all".
        self.majors.as_ref().is_none_or(|majors| majors.is_empty() || majors.contains(&major))
    }
}

/// The state of `module`'s gate in the FlashInfer in `package` (…/flashinfer).
pub fn gate(package: &Path, module: &Module) -> Result<GateState> {
    gate_in(&file_in(package, &module.generator.file), module)
}

/// The state of `module`'s gate in the file of its generator.
pub fn gate_in(path: &Path, module: &Module) -> Result<GateState> {
    let path = path.to_owned();
    let source = read(&path)?;
    let (line, majors) = match gate_of(module) {
        Some(gate) => {
            let found = python::gate(&source, &module.generator.function, gate).map_err(|error| at(&path, error))?;
            (found.site.line, Some(found.majors))
        }
        None => (python::function_line(&source, &module.generator.function).map_err(|error| at(&path, error))?, None),
    };
    Ok(GateState { path, line, majors })
}

/// The gate that the tables know for a module; `None` where its generator has none.
pub fn gate_of(module: &Module) -> Option<&'static tables::Gate> {
    let tables = Tables::load();
    module.defects.iter().flat_map(|id| &tables.defect(id).places).find_map(|place| match place {
        Place::Gate(place) => Some(&place.gate),
        Place::File(_) => None,
    })
}

/// Where `path` (of the tables: `flashinfer/…`) lies in the FlashInfer in `package`.
pub fn file_in(package: &Path, path: &str) -> PathBuf {
    package.join(path.strip_prefix("flashinfer/").expect("paths of the tables start so"))
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::unsupported(format!("this FlashInfer has no {}", path.display()))
            .because("fi-arch knows releases from 0.4.0 on; older ones have another layout (torch bindings)")
            .hint("if the installation is damaged, install FlashInfer again"),
        _ => Error::io("read", path, error),
    })
}

pub(crate) fn at(path: &Path, error: python::NotFound) -> Error {
    Error::unsupported(format!("{}: {error}", path.display())).hint(
        "if the file was edited by hand, install that FlashInfer again; else this release is one that fi-arch does not know",
    )
}

/// The line of a byte, counted from 1.
fn line_of(source: &[u8], byte: usize) -> usize {
    source[..byte].iter().filter(|b| **b == b'\n').count() + 1
}
