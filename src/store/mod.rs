//! The store: built artifacts by key, immutable, published by rename.
//!
//! ```text
//! FI_ARCH_HOME/store/v1/
//!   artifacts/<key>/          an entry: the artifact, its manifest.json and its inputs.json, read-only; the folder's time of
//!                             modification says when it was last handed out
//!   closures/<request>.json   the files that compiles of a request have read
//!   locks/                    kernel locks; the files mean nothing by themselves
//!   staging/                  private folders of living builders
//!   quarantine/               broken entries, moved aside
//!   spare/                    entries of builders that could not use their own key's name
//! ```
//!
//! # When the format on disk changes
//! - A change that an older fi-arch can live with (a new manifest field, a new folder) stays in `v1`: readers skip fields
//!   that they do not know, and a new field has a `serde` default, so that older entries stay readable.
//! - Any other change (a field's meaning, a field removed, the layout, how locks are taken) is a new folder `v2`. A
//!   fi-arch only ever touches the folder of its own version: old and new run side by side, and nothing is migrated.
//! - What goes into a key is no such change: another key is another entry.

mod bundle;
mod closure;
mod entry;
mod gc;
mod inputs;
mod key;
mod lock;
mod manifest;
mod publish;
mod staging;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::memo::Memo;

pub use crate::build::closure::Located;
pub use bundle::{Bundle, FORMAT as BUNDLE_FORMAT, OverlayFile, staged_beside};
pub use closure::Closure;
use entry::Fault;
pub use entry::{Entry, EntrySummary};
pub use gc::{Held, Kept, Limits, Removed, Report, YOUNG, held};
pub use inputs::{Field, Fields, Input, Inputs, Value};
pub use key::{Key, KeyBuilder};
pub use lock::Lock;
pub use manifest::{
    EditRecord, FORMAT as MANIFEST_FORMAT, FileRecord, Manifest, VerdictRecord, seal as seal_manifest, timestamp, unseal_value,
};
pub use staging::Staging;

/// The store under one home folder.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store under `home`, as it is: nothing is created. For verbs that only look.
    pub fn at(home: &Path) -> Self {
        Self { root: home.join("store").join("v1") }
    }

    /// The store under `home`, with all its folders. One that has entries and cannot be written opens too: it serves
    /// them, and the first write says what is wrong.
    pub fn open(home: &Path) -> Result<Self> {
        let store = Self::at(home);
        for folder in ["artifacts", "closures", "locks", "staging"] {
            let dir = store.root.join(folder);
            if let Err(error) = fs::create_dir_all(&dir) {
                if store.root.join("artifacts").is_dir() {
                    tracing::debug!("the store only serves what it has: {}: {error}", dir.display());
                    break;
                }
                return Err(Error::io("create", &dir, error));
            }
        }
        Ok(store)
    }

    /// The folder of the store, `FI_ARCH_HOME/store/v1`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The entry of `key`, if it is there and sound. One that is not what was published is moved aside, with a warning.
    /// `memo` saves reading an artifact that has not changed since it was last read.
    pub fn lookup(&self, key: &Key, memo: &Memo) -> Option<Entry> {
        let dir = self.artifact_dir(key);
        let found = {
            // Marked before it is looked at, so that it is either absent or stays for the next hour.
            let _looking = self.looking();
            gc::mark_used(&dir);
            Entry::check(&dir, key, |file| memo.digest(file))
        };
        match found {
            Ok(entry) => Some(entry),
            Err(Fault::Absent) => None,
            Err(Fault::Unreadable(reason)) => {
                tracing::warn!("the store's entry {key} is not used: {reason}");
                None
            }
            Err(Fault::Altered(reason)) => {
                self.set_aside(key, &reason);
                None
            }
        }
    }

    /// The entry of `key`, all its files read anew; or what is wrong with it. Moves nothing.
    pub fn check(&self, key: &Key) -> Result<Entry, String> {
        let entry = Entry::check(&self.artifact_dir(key), key, Digest::of_file).map_err(Fault::reason)?;
        if entry.manifest.inputs.is_some() && entry.inputs().is_none() {
            return Err("its list of inputs is not the one that was published".into());
        }
        Ok(entry)
    }

    /// Everything in the store, newest first, then what is broken. Artifacts are not read; [`check`](Self::check) does.
    pub fn entries(&self) -> Result<Vec<EntrySummary>> {
        let parent = self.root.join("artifacts");
        let listing = match fs::read_dir(&parent) {
            Ok(listing) => listing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io("list", &parent, error)),
        };
        let mut entries = Vec::new();
        for item in listing {
            let dir = item.map_err(|e| Error::io("list", &parent, e))?.path();
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let entry = match name.parse::<Key>().map(|key| Entry::read(&dir, &key)) {
                Ok(Ok(entry)) => Ok(entry),
                Ok(Err(Fault::Absent)) => continue,
                Ok(Err(fault)) => Err(fault.reason()),
                Err(no_key) => Err(no_key),
            };
            entries.push(EntrySummary { name, dir, entry });
        }
        let newest_first = |e: &EntrySummary| std::cmp::Reverse(e.entry.as_ref().ok().map(|e| e.manifest.created.clone()));
        entries.sort_by_cached_key(|entry| (newest_first(entry), entry.name.clone()));
        Ok(entries)
    }

    /// Waits for the lock `name`. As long as another holds it, `on_wait` is called about ten times a second with the
    /// holder's process id, if that is readable; an error that it returns (the user pressed Ctrl-C) ends the wait.
    pub fn lock(&self, name: &str, on_wait: &mut dyn FnMut(Option<u32>) -> Result<()>) -> Result<Lock> {
        assert!(entry::is_plain_name(name), "a lock has a plain file name");
        Lock::wait(&self.root.join("locks").join(format!("{name}.lock")), on_wait)
    }

    /// Held for the moment in which something that is visible in the store is replaced.
    fn alone(&self) -> Result<Lock> {
        Lock::wait(&self.root.join("locks").join(".store.lock"), &mut |_| Ok(()))
    }

    fn artifact_dir(&self, key: &Key) -> PathBuf {
        self.root.join("artifacts").join(key.to_string())
    }
}
