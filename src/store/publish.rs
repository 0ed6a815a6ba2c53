//! Publishing: an entry is made whole in private, then appears under its key in one rename. First wins.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::entry::{Entry, Fault, is_plain_name};
use super::inputs::{self, Inputs};
use super::key::Key;
use super::manifest::{self, FileRecord, Manifest};
use super::{Store, gc, staging};
use crate::digest::Digest;
use crate::error::{Error, Result};

impl Store {
    /// Makes `artifact`, a file inside a [`Staging`](super::Staging), the entry of `key`. The file itself stays where it is.
    /// `inputs` are kept beside it, so that it can be told later what has changed since.
    ///
    /// When another has published `key` meanwhile, theirs is checked and handed out; a broken one is moved aside. When
    /// theirs can be neither seen nor moved, ours is kept under a name of its own: the caller always gets a sound entry.
    pub fn publish(&self, key: &Key, artifact: &Path, manifest: &Manifest, inputs: Option<&Inputs>) -> Result<Entry> {
        assert!(artifact.starts_with(self.root.join("staging")), "only what lies in a staging is published");
        assert_eq!((manifest.format, &manifest.key), (manifest::FORMAT, key), "a manifest speaks of its own entry");
        assert!(is_plain_name(&manifest.artifact.file), "an artifact has a plain file name");
        let inputs = inputs.map(Inputs::to_text);
        let record = inputs.as_ref().map(|text| FileRecord {
            file: inputs::FILE.to_owned(),
            sha256: Digest::of(text.as_bytes()),
            bytes: text.len() as u64,
        });
        let manifest = &Manifest { inputs: record, ..manifest.clone() };
        let made = artifact.with_file_name(format!("entry-{}", name_of_our_own()));
        make(&made, artifact, manifest, inputs.as_deref()).map_err(|error| {
            // A full disk needs the room now, not when the staging goes.
            let _ = fs::remove_dir_all(&made);
            error.within("the artifact was built, but cannot be kept")
        })?;
        let place = self.artifact_dir(key);
        for _ in 0..3 {
            let Err(error) = fs::rename(&made, &place) else {
                // It is visible and whole; whether the name outlives a power cut is all that this decides.
                if let Err(error) = sync_dir(&self.root.join("artifacts")) {
                    tracing::debug!("the store's folder was not synced: {error}");
                }
                return Ok(own(key, place, manifest));
            };
            // Also after an error that a network filesystem reports for a rename that it has done.
            let theirs = {
                let _looking = self.looking();
                gc::mark_used(&place);
                Entry::check(&place, key, Digest::of_file)
            };
            match theirs {
                Ok(theirs) => return Ok(theirs),
                Err(_) if !is_taken(&error) => return Err(Error::io("publish", &place, error)),
                Err(Fault::Altered(reason)) if self.set_aside(key, &reason) => {}
                // It stays, or (on a network filesystem) the name is taken long before it can be seen.
                Err(_) => break,
            }
        }
        let spare = self.root.join("spare").join(format!("{key}-{}", name_of_our_own()));
        tracing::warn!("the entry of {} that another published cannot be used; ours stays in {}", key.short(), spare.display());
        let parent = self.root.join("spare");
        fs::create_dir_all(&parent).map_err(|e| Error::io("create", &parent, e))?;
        fs::rename(&made, &spare).map_err(|e| Error::io("publish", &spare, e))?;
        Ok(own(key, spare, manifest))
    }

    /// Moves the broken entry of `key` out of the way, into the quarantine, and says so. Where another has put a sound
    /// one in its place meanwhile, that one stays. Returns whether the broken one is gone.
    pub(super) fn set_aside(&self, key: &Key, reason: &str) -> bool {
        let dir = self.artifact_dir(key);
        match self.try_set_aside(key, &dir) {
            Ok(Some(aside)) => {
                tracing::warn!(
                    "the store's entry {key} is broken: {reason}; it is not used, and was moved to {}",
                    aside.display()
                );
                true
            }
            Ok(None) => true,
            Err(error) => {
                tracing::warn!(
                    "the store's entry {key} is broken: {reason}; it is not used, and stays in {}: {error}",
                    dir.display()
                );
                false
            }
        }
    }

    fn try_set_aside(&self, key: &Key, dir: &Path) -> Result<Option<PathBuf>> {
        // What is broken now is still broken when it moves: its name is free for a sound one only after a move, and moves
        // need this lock. (But for an empty folder, which a rename replaces; no builder of ours leaves one.)
        let _alone = self.alone()?;
        let Err(Fault::Altered(_)) = Entry::check(dir, key, Digest::of_file) else { return Ok(None) };
        let parent = self.root.join("quarantine");
        fs::create_dir_all(&parent).map_err(|e| Error::io("create", &parent, e))?;
        let mut number = 0;
        loop {
            number += 1;
            let aside = parent.join(format!("{key}-{number}"));
            if aside.symlink_metadata().is_ok() {
                continue;
            }
            return fs::rename(dir, &aside).map(|()| Some(aside)).map_err(|e| Error::io("move", dir, e));
        }
    }
}

/// Makes the folder `dir` an entry, whole and on disk.
fn make(dir: &Path, artifact: &Path, manifest: &Manifest, inputs: Option<&str>) -> Result<()> {
    let record = &manifest.artifact;
    fs::create_dir(dir).map_err(|e| Error::io("create", dir, e))?;
    let file = dir.join(&record.file);
    // A copy, not a link: nobody else has it open, and nothing that still happens in the staging can reach it.
    fs::copy(artifact, &file).and_then(|_| seal(&file)).map_err(|e| Error::io("write", &file, e))?;
    let bytes = fs::metadata(&file).map_err(|e| Error::io("look at", &file, e))?.len();
    if (Digest::of_file(&file)?, bytes) != (record.sha256, record.bytes) {
        return Err(Error::refused(format!("{} has changed since it was judged", artifact.display()))
            .hint("nothing was stored; build again, and look for what else writes into fi-arch's folder"));
    }
    let text = manifest::seal(serde_json::to_value(manifest).expect("a manifest is always JSON"));
    for (name, text) in inputs.map(|text| (inputs::FILE, text)).into_iter().chain([(manifest::FILE, text.as_str())]) {
        let file = dir.join(name);
        File::create_new(&file)
            .and_then(|mut open| open.write_all(text.as_bytes()))
            .and_then(|()| seal(&file))
            .map_err(|e| Error::io("write", &file, e))?;
    }
    sync_dir(dir).map_err(|e| Error::io("write", dir, e))
}

fn own(key: &Key, dir: PathBuf, manifest: &Manifest) -> Entry {
    Entry { key: *key, artifact: dir.join(&manifest.artifact.file), dir, manifest: manifest.clone() }
}

/// Whether a rename failed because something already has that name.
fn is_taken(error: &io::Error) -> bool {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory, ResourceBusy};
    matches!(error.kind(), AlreadyExists | DirectoryNotEmpty | NotADirectory | ResourceBusy)
}

/// Makes a file read-only and waits until it is on disk: a full disk shows here at the latest.
fn seal(file: &Path) -> io::Result<()> {
    fs::set_permissions(file, Permissions::from_mode(0o444))?;
    File::open(file)?.sync_all()
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    match File::open(dir)?.sync_all() {
        // Some filesystems cannot sync a folder, and need not.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        other => other,
    }
}

fn name_of_our_own() -> String {
    format!("{}-{}", std::process::id(), staging::unique())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::KeyBuilder;
    use super::*;

    #[test]
    fn an_entry_that_another_has_mended_meanwhile_is_not_moved_aside() {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        let key = KeyBuilder::new("test").finish();
        let manifest: Manifest = serde_json::from_value(json!({
            "format": manifest::FORMAT, "key": key, "request": key, "module": "", "target": "", "flashinfer": "",
            "tvm_ffi": "", "artifact": { "file": "a.so", "sha256": Digest::of(b"a"), "bytes": 1 }, "nvcc": "",
            "host_compiler": "", "flags": [], "edits": [], "verdict": { "verdict": "pass", "kernels": 0, "hollow": 0,
            "with_dependency_marks": 0, "need_no_marks": 0, "needed": [], "exports": [] }, "created": "", "fi_arch": "",
            "elapsed_s": 0.0, "test_only": true
        }))
        .unwrap();
        let staging = store.staging().unwrap();
        let artifact = staging.path().join("a.so");
        fs::write(&artifact, "a").unwrap();
        let entry = store.publish(&key, &artifact, &manifest, None).unwrap();
        assert!(store.set_aside(&key, "what was seen before"));
        assert!(entry.artifact.is_file());
    }
}
