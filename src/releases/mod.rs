//! Holds the tables against the released wheels, and drafts the rows of a new release.

pub mod check;
pub mod draft;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::overlay::{self, Overlay};
use crate::survey::Archive;
use crate::tables::{Module, Tables};

/// The files of one release that the tables follow.
struct Files {
    version: String,
    by_path: BTreeMap<String, Vec<u8>>,
}

impl Files {
    /// Reads them out of `archive`. A file that is not in it is left out.
    fn of(archive: &mut Archive) -> Result<Self> {
        let version = archive.version()?;
        let mut by_path = BTreeMap::new();
        for path in Tables::load().paths() {
            if let Some(bytes) = archive.read(path)? {
                by_path.insert(path.to_owned(), bytes);
            }
        }
        Ok(Self { version, by_path })
    }

    fn digest(&self, path: &str) -> Option<Digest> {
        self.by_path.get(path).map(|bytes| Digest::of(bytes))
    }

    /// Lays the files out as an installed FlashInfer: a folder that goes with what is returned.
    fn lay_out(&self) -> Result<TempDir> {
        let dir = tempfile::tempdir().map_err(|e| Error::io("make a folder in", &std::env::temp_dir(), e))?;
        for (path, bytes) in &self.by_path {
            let to = dir.path().join(path);
            let folder = to.parent().expect("a file lies in a folder");
            fs::create_dir_all(folder).map_err(|e| Error::io("make", folder, e))?;
            fs::write(&to, bytes).map_err(|e| Error::io("write", &to, e))?;
        }
        Ok(dir)
    }

    /// The overlay for `module` of files laid out in `dir`.
    fn overlay(&self, dir: &Path, module: &Module) -> Result<Overlay> {
        overlay::compute(&dir.join("flashinfer"), module, &self.version, &overlay::Options::default())
    }
}

/// The ids of the defects that an overlay cures, each once.
fn ids(overlay: &Overlay) -> Vec<String> {
    overlay::each_once(overlay.edits.iter().map(|edit| edit.id.as_str())).into_iter().map(str::to_owned).collect()
}

/// The parts of a version range, in one order, however it is written.
fn range_parts(range: &str) -> Vec<String> {
    let mut parts: Vec<String> = range.split(',').map(|part| part.split_whitespace().collect()).collect();
    parts.sort();
    parts
}
