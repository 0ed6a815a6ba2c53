//! Locks that the kernel frees when their holder dies, however it dies. No lock is ever stale.
//!
//! Locks only save work (one builder compiles, the others wait). That no reader sees half an entry rests on renames
//! alone, because on shared filesystems a lock may hold on one machine only, or be refused altogether.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};

const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Held until dropped. The file stays. Only gc removes old ones, under their own lock: whoever waited for that lock then sees
/// that its file is no longer the one of that name, and takes the new one.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Waits for the lock on `path`. As long as another holds it, `on_wait` is called about twenty times a second with
    /// the holder's process id, if that is readable; when it returns an error, the wait ends with that error.
    pub(super) fn wait(path: &Path, on_wait: &mut dyn FnMut(Option<u32>) -> Result<()>) -> Result<Self> {
        let mut file = loop {
            let mut file = open(path).map_err(|e| Error::io("open the lock", path, e))?;
            while !try_lock(&file, path)? {
                on_wait(holder(&mut file))?;
                std::thread::sleep(LOOK_AGAIN);
            }
            if is_still(path, &file) {
                break file;
            }
        };
        // Only for people who wonder whom they wait for: a full disk must not forbid it.
        let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
        Ok(Self { file })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before the lock is free, so that it never names one who has gone in good order.
        let _ = self.file.set_len(0);
    }
}

/// Opens a lock file, and makes it where it is missing. Another user's file can be locked through a read-only handle.
pub(super) fn open(path: &Path) -> io::Result<File> {
    match File::options().read(true).write(true).create(true).truncate(false).open(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => File::open(path).map_err(|_| error),
        other => other,
    }
}

/// Whether `file` is now locked by us. Where the filesystem knows no locks, says so and carries on as if it were:
/// two builders may then compile the same thing, and the first to publish wins.
fn try_lock(file: &File, path: &Path) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(TryLockError::Error(error)) if knows_no_locks(&error) => {
            tracing::warn!("{} cannot be locked ({error}); builders may do the same work twice", path.display());
            Ok(true)
        }
        Err(TryLockError::Error(error)) => Err(Error::io("lock", path, error)),
    }
}

pub(super) fn knows_no_locks(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(rustix::io::Errno::NOLCK.raw_os_error())
}

fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Whether `path` still names the file that is open as `file`. A lock on a file that has been removed guards nothing.
pub(super) fn is_still(path: &Path, file: &File) -> bool {
    match (fs::symlink_metadata(path), file.metadata()) {
        (Ok(named), Ok(open)) => (named.dev(), named.ino()) == (open.dev(), open.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_learns_who_holds_the_lock_and_may_give_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        let held = Lock::wait(&path, &mut |_| panic!("nobody holds it")).unwrap();
        let mut seen = None;
        let error = Lock::wait(&path, &mut |pid| {
            seen = pid;
            Err(Error::machine("had enough"))
        });
        assert_eq!(error.unwrap_err().what(), "had enough");
        assert_eq!(seen, Some(std::process::id()));
        drop(held);
        Lock::wait(&path, &mut |_| panic!("it was given back")).unwrap();
    }

    #[test]
    fn no_two_hold_one_lock_though_its_file_was_removed_while_one_waited() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        let mut first = Some(Lock::wait(&path, &mut |_| panic!("nobody holds it")).unwrap());
        let mut second = None;
        let mut waits = 0;
        let _third = Lock::wait(&path, &mut |_| {
            waits += 1;
            if first.take().is_some() {
                // What gc does, and then another builder comes.
                fs::remove_file(&path).unwrap();
                second = Some(Lock::wait(&path, &mut |_| panic!("it is a new file")).unwrap());
            } else {
                second = None;
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(waits, 2, "the lock of the removed file is worth nothing");
    }

    #[test]
    fn a_filesystem_without_locks_is_told_from_a_fault() {
        let error = |errno: rustix::io::Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(knows_no_locks(&error(rustix::io::Errno::NOLCK)));
        assert!(knows_no_locks(&error(rustix::io::Errno::OPNOTSUPP)));
        assert!(knows_no_locks(&error(rustix::io::Errno::NOSYS)));
        assert!(!knows_no_locks(&error(rustix::io::Errno::IO)));
    }
}
