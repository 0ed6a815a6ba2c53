//! Entries: what the store hands out, and the checks before it does.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::inputs::{self, Inputs};
use super::key::Key;
use super::manifest::{self, Manifest};
use crate::digest::Digest;
use crate::error::Result;

/// A manifest is a few KiB; a file beyond this is none, and is not read into memory.
const MANIFEST_LIMIT: u64 = 4 << 20;

/// An artifact that was checked. The folder and its files never change; they may only vanish.
#[derive(Debug, Clone)]
pub struct Entry {
    pub key: Key,
    pub dir: PathBuf,
    pub artifact: PathBuf,
    pub manifest: Manifest,
}

/// One name in the store, sound or not.
#[derive(Debug)]
pub struct EntrySummary {
    /// The key's text, or whatever else lies there.
    pub name: String,
    pub dir: PathBuf,
    /// The entry, its artifact not read; or what is wrong with it.
    pub entry: Result<Entry, String>,
}

/// Why an entry is not handed out.
#[derive(Debug)]
pub(super) enum Fault {
    Absent,
    /// It could not be looked at now, and may still be sound: access, stale handles, too many open files.
    Unreadable(String),
    /// Its files are not those that were published.
    Altered(String),
}

impl Fault {
    fn io(what: &Path, error: &io::Error) -> Self {
        // What is gone below a folder that is there was taken away.
        match error.kind() {
            io::ErrorKind::NotFound => Self::Altered(format!("{} is missing", name_of(what))),
            _ => Self::Unreadable(format!("cannot read {}: {error}", what.display())),
        }
    }

    pub(super) fn reason(self) -> String {
        match self {
            Self::Absent => "it is not there".into(),
            Self::Unreadable(reason) | Self::Altered(reason) => reason,
        }
    }
}

impl Entry {
    /// Checks the folder `dir` as the entry of `key`: all but the artifact's content.
    pub(super) fn read(dir: &Path, key: &Key) -> Result<Self, Fault> {
        match fs::symlink_metadata(dir) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(Fault::Altered("it is no folder".into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Fault::Absent),
            Err(error) => return Err(Fault::io(dir, &error)),
        }
        let file = dir.join(manifest::FILE);
        if plain_file_size(&file)? > MANIFEST_LIMIT {
            return Err(Fault::Altered(format!("{} is too large to be one", manifest::FILE)));
        }
        let text = fs::read(&file).map_err(|e| Fault::io(&file, &e))?;
        let manifest = parse(&text, key).map_err(Fault::Altered)?;
        let artifact = dir.join(&manifest.artifact.file);
        let inputs = manifest.inputs.as_ref().map(|record| dir.join(&record.file));
        for item in fs::read_dir(dir).map_err(|e| Fault::io(dir, &e))? {
            let path = item.map_err(|e| Fault::io(dir, &e))?.path();
            if path != file && path != artifact && Some(&path) != inputs.as_ref() {
                return Err(Fault::Altered(format!("{} does not belong in it", name_of(&path))));
            }
        }
        for record in [&manifest.artifact].into_iter().chain(&manifest.inputs) {
            let (bytes, said) = (plain_file_size(&dir.join(&record.file))?, record.bytes);
            if bytes != said {
                return Err(Fault::Altered(format!("{} has {bytes} bytes, and {said} were published", record.file)));
            }
        }
        Ok(Self { key: *key, dir: dir.to_owned(), artifact, manifest })
    }

    /// All that decided the artifact. None where it cannot be told: it is not there, or is not what was published.
    pub fn inputs(&self) -> Option<Inputs> {
        let record = self.manifest.inputs.as_ref()?;
        let text = fs::read(self.dir.join(&record.file)).ok().filter(|text| Digest::of(text) == record.sha256)?;
        serde_json::from_slice(&text).ok()
    }

    /// Checks the folder `dir` as the entry of `key`, with the artifact's content as `digest` tells it.
    pub(super) fn check(dir: &Path, key: &Key, digest: impl FnOnce(&Path) -> Result<Digest>) -> Result<Self, Fault> {
        let entry = Self::read(dir, key)?;
        let found = digest(&entry.artifact).map_err(|e| Fault::Unreadable(e.to_string()))?;
        let said = entry.manifest.artifact.sha256;
        if found != said {
            let file = &entry.manifest.artifact.file;
            return Err(Fault::Altered(format!(
                "the content of {file} is {}, and {} was published",
                found.short(),
                said.short()
            )));
        }
        Ok(entry)
    }
}

/// The manifest of the entry `key`, or what is wrong with it.
fn parse(text: &[u8], key: &Key) -> Result<Manifest, String> {
    let manifest = manifest::unseal(text).map_err(|error| format!("{} cannot be read: {error}", manifest::FILE))?;
    if manifest.format != manifest::FORMAT {
        return Err(format!("its format is {}, and this store holds format {}", manifest.format, manifest::FORMAT));
    }
    if manifest.key != *key {
        return Err(format!("its manifest is that of {}", manifest.key.short()));
    }
    if !is_plain_name(&manifest.artifact.file) {
        return Err(format!("`{}` is no name for an artifact", manifest.artifact.file.escape_debug()));
    }
    if let Some(record) = manifest.inputs.as_ref().filter(|record| record.file != inputs::FILE) {
        return Err(format!("`{}` is no name for the list of inputs", record.file.escape_debug()));
    }
    Ok(manifest)
}

/// Whether a manifest may name its artifact so: a file right beside it, and nothing else, whoever wrote the manifest.
pub(super) fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && ![manifest::FILE, inputs::FILE].contains(&name)
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'+'))
}

/// The size in bytes of a regular file; a link to one is none.
fn plain_file_size(path: &Path) -> Result<u64, Fault> {
    let meta = fs::symlink_metadata(path).map_err(|e| Fault::io(path, &e))?;
    if meta.is_file() { Ok(meta.len()) } else { Err(Fault::Altered(format!("{} is no plain file", name_of(path)))) }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_can_only_name_a_file_beside_it() {
        for name in ["trtllm_comm.so", "a-b_c+1.so"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "../x.so",
            "/etc/passwd",
            "a/b.so",
            "a\\b",
            "x\0.so",
            ".hidden",
            "manifest.json",
            "inputs.json",
            "a b",
        ] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }
}
