//! Staging: private folders in which entries are made before anyone can see them.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Store, lock};
use crate::digest::Digest;
use crate::error::{Error, Result};

/// A lock that holds on its own machine only looks free from every other one. No build takes this long.
const FOREIGN_IS_DEAD_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder of one owner, on the filesystem of the artifacts, so that publishing is a rename. Removed when dropped;
/// if its owner is killed instead, the next one to open a staging removes it.
#[derive(Debug)]
pub struct Staging {
    dir: PathBuf,
    lock_file: PathBuf,
    _locked: File,
}

impl Staging {
    pub fn path(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The lock's file goes last: what has no lock file is not looked for.
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::debug!("{} is left for the next sweep: {error}", self.dir.display());
            return;
        }
        let _ = fs::remove_file(&self.lock_file);
    }
}

impl Store {
    /// A new staging folder. First removes those whose owner is dead, whoever made them.
    pub fn staging(&self) -> Result<Staging> {
        let parent = self.root.join("staging");
        sweep(&parent);
        let boot = boot();
        loop {
            // The name alone says on which start of which machine the owner lives.
            let name = format!("{boot}-{}-{}", std::process::id(), unique());
            let lock_file = parent.join(format!("{name}.lock"));
            let locked = match File::options().read(true).write(true).create_new(true).open(&lock_file) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(|e| Error::io("create", &lock_file, e))?,
            };
            if !claim(&lock_file, &locked)? {
                continue;
            }
            let dir = parent.join(name);
            return match DirBuilder::new().mode(0o700).create(&dir) {
                Ok(()) => Ok(Staging { dir, lock_file, _locked: locked }),
                Err(error) => {
                    let _ = fs::remove_file(&lock_file);
                    Err(Error::io("create", &dir, error))
                }
            };
        }
    }
}

/// Locks the new lock file, and says whether it is still there: a sweep may have come between its making and the lock.
fn claim(lock_file: &Path, made: &File) -> Result<bool> {
    match made.lock() {
        Err(error) if !lock::knows_no_locks(&error) => Err(Error::io("lock", lock_file, error)),
        _ => Ok(lock::is_still(lock_file, made)),
    }
}

/// Removes the staging folders of dead owners. What cannot be removed is left to others.
fn sweep(parent: &Path) {
    let Ok(listing) = fs::read_dir(parent) else { return };
    let boot = boot();
    for lock_file in listing.flatten().map(|item| item.path()).filter(|path| path.extension().is_some_and(|e| e == "lock")) {
        if let Err(error) = sweep_one(&lock_file, &boot) {
            tracing::debug!("{} is not swept: {error}", lock_file.display());
        }
    }
}

fn sweep_one(lock_file: &Path, boot: &str) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(lock_file)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let ours = lock_file.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&format!("{boot}-")));
    let is_old = || {
        file.metadata().and_then(|meta| meta.modified()).is_ok_and(|m| m.elapsed().is_ok_and(|age| age > FOREIGN_IS_DEAD_AFTER))
    };
    if !lock::is_still(lock_file, &file) || !(ours || is_old()) {
        return Ok(());
    }
    match fs::remove_dir_all(lock_file.with_extension("")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::remove_file(lock_file),
    }
}

/// Names this start of this machine: containers of one kernel share it, as they share its locks.
fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Digest::of(id.trim().as_bytes()).short()
}

/// A number that no other caller in this process gets.
pub(super) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_staging_of_another_machine_is_left_for_a_day_though_its_lock_looks_free() {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        let foreign = store.root.join("staging/000000000000-1-0");
        let lock_file = foreign.with_extension("lock");
        fs::create_dir(&foreign).unwrap();
        let file = File::create(&lock_file).unwrap();
        store.staging().unwrap();
        assert!(foreign.is_dir(), "its owner may live on another machine");

        file.set_modified(std::time::SystemTime::now() - 2 * FOREIGN_IS_DEAD_AFTER).unwrap();
        store.staging().unwrap();
        assert!(!foreign.exists() && !lock_file.exists());
    }

    #[test]
    fn a_sweep_between_the_making_of_a_lock_file_and_its_lock_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let lock_file = dir.path().join(format!("{}-1-0.lock", boot()));
        let made = File::create_new(&lock_file).unwrap();
        sweep(dir.path());
        assert!(!claim(&lock_file, &made).unwrap());
        let made = File::create_new(&lock_file).unwrap();
        assert!(claim(&lock_file, &made).unwrap());
        sweep(dir.path());
        assert!(lock_file.is_file());
    }

    #[test]
    fn no_sweep_takes_a_living_owners_folder() {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let staging = store.staging().unwrap();
                        let file = staging.path().join("object.o");
                        fs::write(&file, "half").unwrap();
                        std::thread::yield_now();
                        assert_eq!(fs::read(&file).unwrap(), b"half");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(store.root.join("staging")).unwrap().count(), 0, "each was removed when dropped");
    }
}
