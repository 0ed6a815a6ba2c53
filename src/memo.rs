//! Remembers what was learnt from a file's content (its digest, an nvcc's version) under the file's stat identity.
//!
//! The memory only saves re-reading: it is never part of a key, and losing it costs time alone.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result};

/// A change within the clock's grain of the last look would go unseen, so a file younger than this (ns) is not remembered.
const SETTLING_NS: i128 = 2_000_000_000;

/// Device, inode, size, mtime and ctime: while all five stay, the content stays (ctime cannot be set by hand).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    dev: u64,
    ino: u64,
    size: u64,
    mtime_ns: i128,
    ctime_ns: i128,
}

impl FileId {
    pub fn of(meta: &Metadata) -> Self {
        let ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            size: meta.size(),
            mtime_ns: ns(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: ns(meta.ctime(), meta.ctime_nsec()),
        }
    }

    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i128);
        now - self.mtime_ns.max(self.ctime_ns) > SETTLING_NS
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    id: FileId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<Digest>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    facts: BTreeMap<String, String>,
}

/// What is remembered, by path. Shared between threads.
#[derive(Debug, Default)]
pub struct Memo {
    file: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By path as text: comparing paths component by component costs more than all else here. A path that is no text is not
    /// remembered.
    entries: BTreeMap<String, Entry>,
    dirty: bool,
}

impl Memo {
    /// Reads the memory kept under `home`. A missing or unreadable one is an empty one.
    pub fn load(home: &Path) -> Self {
        let file = home.join("memo.json");
        let entries = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Self { file: Some(file), state: Mutex::new(State { entries, dirty: false }) }
    }

    /// The digest of a file's content.
    pub fn digest(&self, path: &Path) -> Result<Digest> {
        let id = stat(path)?;
        if let Some(digest) = self.recall(path, &id).and_then(|entry| entry.digest) {
            return Ok(digest);
        }
        let digest = Digest::of_file(path)?;
        // The file may have changed while it was read: only a digest of one known state is worth keeping.
        if stat(path)? == id {
            self.remember(path, id, |entry| entry.digest = Some(digest));
        }
        Ok(digest)
    }

    /// A fact called `name` that follows from the content of `path` (and from nothing that `name` does not say).
    /// `learn` finds it out when it is not remembered.
    pub fn fact(&self, path: &Path, name: &str, learn: impl FnOnce() -> Result<String>) -> Result<String> {
        let id = stat(path)?;
        if let Some(fact) = self.recall(path, &id).and_then(|entry| entry.facts.get(name).cloned()) {
            return Ok(fact);
        }
        let fact = learn()?;
        if stat(path)? == id {
            self.remember(path, id, |entry| {
                entry.facts.insert(name.to_owned(), fact.clone());
            });
        }
        Ok(fact)
    }

    /// Keeps the memory for the next process. A failure is logged and changes nothing else.
    pub fn save(&self) {
        let Some(file) = &self.file else { return };
        let mut state = self.state.lock().expect("no thread panics while it holds the memory");
        if !std::mem::take(&mut state.dirty) {
            return;
        }
        let write = || -> std::io::Result<()> {
            let dir = file.parent().expect("the memory lies in a folder");
            fs::create_dir_all(dir)?;
            let mut staged = tempfile::NamedTempFile::new_in(dir)?;
            serde_json::to_writer(std::io::BufWriter::new(&mut staged), &state.entries)?;
            staged.persist(file)?;
            Ok(())
        };
        if let Err(error) = write() {
            tracing::debug!("the memory of digests was not kept in {}: {error}", file.display());
        }
    }

    fn recall(&self, path: &Path, id: &FileId) -> Option<Entry> {
        let state = self.state.lock().expect("no thread panics while it holds the memory");
        state.entries.get(path.to_str()?).filter(|entry| entry.id == *id).cloned()
    }

    fn remember(&self, path: &Path, id: FileId, change: impl FnOnce(&mut Entry)) {
        let Some(path) = path.to_str().filter(|_| id.is_settled()) else { return };
        let mut state = self.state.lock().expect("no thread panics while it holds the memory");
        let fresh = || Entry { id, digest: None, facts: BTreeMap::new() };
        let entry = state.entries.entry(path.to_owned()).or_insert_with(fresh);
        if entry.id != id {
            *entry = fresh();
        }
        change(entry);
        state.dirty = true;
    }
}

fn stat(path: &Path) -> Result<FileId> {
    fs::metadata(path).map(|meta| FileId::of(&meta)).map_err(|e| Error::io("look at", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backdate(path: &Path) {
        // ctime cannot be set, so the tests wait until the file counts as settled.
        while !stat(path).unwrap().is_settled() {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    #[test]
    fn a_changed_file_is_read_again_even_when_its_mtime_is_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "one").unwrap();
        backdate(&file);
        let memo = Memo::load(dir.path());
        assert_eq!(memo.digest(&file).unwrap(), Digest::of(b"one"));
        memo.save();

        let mtime = fs::metadata(&file).unwrap().modified().unwrap();
        fs::write(&file, "two").unwrap();
        fs::File::options().write(true).open(&file).unwrap().set_modified(mtime).unwrap();
        let memo = Memo::load(dir.path());
        assert_eq!(memo.digest(&file).unwrap(), Digest::of(b"two"));
    }

    #[test]
    fn a_fact_is_learnt_once_while_its_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nvcc");
        fs::write(&file, "x").unwrap();
        backdate(&file);
        let memo = Memo::load(dir.path());
        assert_eq!(memo.fact(&file, "version", || Ok("13.0".into())).unwrap(), "13.0");
        memo.save();
        let memo = Memo::load(dir.path());
        assert_eq!(memo.fact(&file, "version", || panic!("was remembered")).unwrap(), "13.0");
    }

    #[test]
    fn a_broken_memory_is_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("memo.json"), "{ not json").unwrap();
        let memo = Memo::load(dir.path());
        assert_eq!(memo.digest(&dir.path().join("memo.json")).unwrap(), Digest::of(b"{ not json"));
    }
}
