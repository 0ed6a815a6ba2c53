//! Making room: removes what has not been used for long, or what is beyond a size, and the leavings of past work.
//!
//! Never what is in use: what a process has open or mapped (where `/proc` shows it), what a builder is working on, and
//! whatever was handed out or made within [`YOUNG`]. When an entry was last used is its folder's time of modification, which
//! [`Store::lookup`] sets; on a read-only store nothing is set, and nothing can be removed either.

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::entry::EntrySummary;
use super::key::Key;
use super::{Store, lock};
use crate::error::{Error, Result};

/// A builder that was just handed an entry must find it for so long.
pub const YOUNG: Duration = Duration::from_secs(60 * 60);

/// What is to be removed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Entries that were not used for so long.
    pub older_than: Option<Duration>,
    /// Then the longest unused ones, until all entries together take no more bytes than this.
    pub max_bytes: Option<u64>,
    /// Say what would be removed, and remove nothing.
    pub dry_run: bool,
}

/// What was removed, or would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// Stable, for scripts: `entry`, `quarantine`, `spare`, `closure`, `lock`.
    pub kind: &'static str,
    pub name: String,
    /// What it is, for people.
    pub label: String,
    pub bytes: u64,
    /// How long it was not used.
    pub unused: Duration,
}

/// An entry that the limits name and that stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub name: String,
    pub why: String,
}

#[derive(Debug, Default)]
pub struct Report {
    pub removed: Vec<Removed>,
    pub kept: Vec<Kept>,
    /// The entries that are left, and their bytes.
    pub left: usize,
    pub left_bytes: u64,
}

impl Report {
    pub fn freed_bytes(&self) -> u64 {
        self.removed.iter().map(|removed| removed.bytes).sum()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Gone,
    Stays(&'static str),
}

/// Something that may be removed.
struct Candidate {
    kind: &'static str,
    name: String,
    label: String,
    path: PathBuf,
    bytes: u64,
    unused: Duration,
    request: Option<Key>,
}

impl Store {
    /// Removes what `limits` name, and the leavings of past work. `held` is what processes hold.
    pub fn gc(&self, limits: &Limits, held: &Held) -> Result<Report> {
        let mut report = Report::default();
        if !self.root.join("artifacts").is_dir() {
            return Ok(report);
        }
        // Opening one sweeps those of dead builders.
        let staging = if limits.dry_run { None } else { Some(self.staging()?) };
        let aside = staging.as_ref().map(|staging| staging.path());

        let mut entries: Vec<Candidate> = self.entries()?.into_iter().filter_map(candidate).collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.unused));
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let mut left: HashSet<Key> = HashSet::new();
        for entry in entries {
            let too_old = limits.older_than.is_some_and(|age| entry.unused >= age);
            let too_many = limits.max_bytes.is_some_and(|most| bytes > most);
            let size = entry.bytes;
            let why = match (too_old || too_many).then(|| self.remove(&entry, held, aside)).transpose()? {
                Some(Outcome::Gone) => {
                    bytes -= size;
                    report.removed.push(entry.removed());
                    continue;
                }
                Some(Outcome::Stays(why)) => Some(why),
                None => None,
            };
            (report.left, report.left_bytes) = (report.left + 1, report.left_bytes + size);
            left.extend(entry.request);
            report.kept.extend(why.map(|why| Kept { name: entry.name, why: why.to_owned() }));
        }
        for kind in ["quarantine", "spare"] {
            for entry in self.leavings(kind) {
                if self.remove(&entry, held, aside)? == Outcome::Gone {
                    report.removed.push(entry.removed());
                }
            }
        }
        for file in self.files("closures", "json").into_iter().filter(|file| !left.contains(&file.request)) {
            let gone = file.is_old() && {
                let _alone = if limits.dry_run { None } else { Some(self.alone()?) };
                !self.is_locked(&file.request) && file.is_old() && (limits.dry_run || fs::remove_file(&file.path).is_ok())
            };
            if gone {
                report.removed.push(file.removed("closure"));
            }
        }
        for file in self.files("locks", "lock") {
            if file.is_old() && remove_lock(&file.path, limits.dry_run) {
                report.removed.push(file.removed("lock"));
            }
        }
        Ok(report)
    }

    /// Moves an entry to the folder `aside` and removes it there. Without that folder it only looks whether it would.
    fn remove(&self, entry: &Candidate, held: &Held, aside: Option<&Path>) -> Result<Outcome> {
        if held.names.contains(&entry.name) {
            return Ok(Outcome::Stays("a process has it open"));
        }
        if entry.request.is_some_and(|request| self.is_locked(&request)) {
            return Ok(Outcome::Stays("a builder is at work on it"));
        }
        let parked = {
            // No builder is being handed an entry meanwhile: they look under the same lock, and mark what they are given.
            let _nobody_looks = aside.map(|_| self.nobody_looks()).transpose()?;
            if unused(&entry.path) < YOUNG {
                return Ok(Outcome::Stays("it was used within the last hour"));
            }
            let Some(aside) = aside else { return Ok(Outcome::Gone) };
            let parked = aside.join(format!("{}-{}", entry.kind, entry.name));
            if let Err(error) = fs::rename(&entry.path, &parked) {
                tracing::warn!("{} stays: {error}", entry.path.display());
                return Ok(Outcome::Stays("it cannot be moved"));
            }
            parked
        };
        // What cannot be removed now goes with the staging, or with a later sweep.
        if let Err(error) = fs::remove_dir_all(&parked) {
            tracing::debug!("{} is left for later: {error}", parked.display());
        }
        Ok(Outcome::Gone)
    }

    /// What lies in a folder of leavings.
    fn leavings(&self, kind: &'static str) -> Vec<Candidate> {
        let listing = fs::read_dir(self.root.join(kind)).into_iter().flatten().flatten();
        let candidate = |item: fs::DirEntry| {
            let (path, name) = (item.path(), item.file_name().to_string_lossy().into_owned());
            name.get(..64)?.parse::<Key>().ok()?;
            let (bytes, unused) = (bytes_of(&path), unused(&path));
            Some(Candidate { kind, label: String::new(), name, path, bytes, unused, request: None })
        };
        listing.filter_map(candidate).collect()
    }

    /// The files of a folder that are named by a request.
    fn files(&self, folder: &str, extension: &str) -> Vec<OfRequest> {
        let listing = fs::read_dir(self.root.join(folder)).into_iter().flatten().flatten();
        let of_request = |item: fs::DirEntry| {
            let path = item.path();
            let request = path.file_stem()?.to_str()?.parse().ok()?;
            let bytes = item.metadata().ok().filter(|meta| meta.is_file())?.len();
            (path.extension()? == extension).then_some(OfRequest { request, path, bytes })
        };
        listing.filter_map(of_request).collect()
    }

    /// Whether somebody builds that request now.
    fn is_locked(&self, request: &Key) -> bool {
        let path = self.root.join("locks").join(format!("{request}.lock"));
        File::open(path).is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Whether any builder is at work in this store now.
    pub fn is_building(&self) -> bool {
        let listing = fs::read_dir(self.root.join("locks")).into_iter().flatten().flatten();
        let requests = listing.filter_map(|item| item.path().file_stem()?.to_str()?.parse().ok());
        requests.into_iter().any(|request: Key| self.is_locked(&request))
    }

    /// Held while an entry is being handed out: no gc takes it away before it is marked as used. A store that cannot be
    /// written, or a filesystem without locks, does without: then the mark alone protects.
    pub(super) fn looking(&self) -> Option<File> {
        let file = lock::open(&self.gc_lock()).ok()?;
        file.lock_shared().ok()?;
        Some(file)
    }

    fn nobody_looks(&self) -> Result<File> {
        let path = self.gc_lock();
        let file = lock::open(&path).map_err(|e| Error::io("open the lock", &path, e))?;
        match file.lock() {
            Err(error) if !lock::knows_no_locks(&error) => Err(Error::io("lock", &path, error)),
            _ => Ok(file),
        }
    }

    fn gc_lock(&self) -> PathBuf {
        self.root.join("locks").join(".gc.lock")
    }
}

/// Marks an entry as used now. Costs microseconds; where it cannot be marked, it also cannot be removed.
pub(super) fn mark_used(dir: &Path) {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};
    let at = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps { last_access: at(UTIME_OMIT), last_modification: at(UTIME_NOW) };
    let _ = utimensat(CWD, dir, &times, AtFlags::SYMLINK_NOFOLLOW);
}

impl Candidate {
    fn removed(&self) -> Removed {
        let Self { kind, name, label, bytes, unused, .. } = self;
        Removed { kind, name: name.clone(), label: label.clone(), bytes: *bytes, unused: *unused }
    }
}

/// A file that is named by a request.
struct OfRequest {
    request: Key,
    path: PathBuf,
    bytes: u64,
}

impl OfRequest {
    fn is_old(&self) -> bool {
        unused(&self.path) >= YOUNG
    }

    fn removed(&self, kind: &'static str) -> Removed {
        let name = self.request.to_string();
        Removed { kind, name, label: String::new(), bytes: self.bytes, unused: unused(&self.path) }
    }
}

/// What is no entry by its name was put there by nobody of ours, and stays.
fn candidate(summary: EntrySummary) -> Option<Candidate> {
    summary.name.parse::<Key>().ok()?;
    let manifest = summary.entry.as_ref().ok().map(|entry| &entry.manifest);
    Some(Candidate {
        kind: "entry",
        label: manifest.map_or("broken".to_owned(), |m| format!("{} {} {}", m.module, m.flashinfer, m.target)),
        request: manifest.map(|manifest| manifest.request),
        bytes: bytes_of(&summary.dir),
        unused: unused(&summary.dir),
        name: summary.name,
        path: summary.dir,
    })
}

/// How long something was not used. What is gone, or bears a time to come, was used now.
fn unused(path: &Path) -> Duration {
    let modified = fs::symlink_metadata(path).and_then(|meta| meta.modified());
    modified.ok().and_then(|modified| SystemTime::now().duration_since(modified).ok()).unwrap_or_default()
}

/// The bytes of the files in a folder of ours, which has no folders in it.
fn bytes_of(dir: &Path) -> u64 {
    let Ok(listing) = fs::read_dir(dir) else { return fs::symlink_metadata(dir).map_or(0, |meta| meta.len()) };
    listing.flatten().filter_map(|item| item.metadata().ok()).map(|meta| meta.len()).sum()
}

/// Removes a lock file that nobody holds. Waiters look whether the file that they locked is still the one of that name.
fn remove_lock(path: &Path, dry_run: bool) -> bool {
    let Ok(file) = File::open(path) else { return false };
    file.try_lock().is_ok() && lock::is_still(path, &file) && (dry_run || fs::remove_file(path).is_ok())
}

/// What processes hold of a home folder.
#[derive(Debug, Default)]
pub struct Held {
    /// Names of folders in the store that begin with a key.
    names: HashSet<String>,
    /// Names of folders right below a folder called `wheels`.
    pub wheels: HashSet<String>,
}

/// What running processes have open, mapped, or work in, by the names in `/proc`. A container may see our folders at
/// another place: what counts is the end of a path, and keys are like no other name. Processes of other users cannot be looked
/// into; what they have mapped stays whole for them, as a removed file does on Unix.
pub fn held() -> Held {
    let mut held = Held::default();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes.filter(|item| item.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit)) {
        let dir = process.path();
        if let Ok(maps) = fs::read(dir.join("maps")) {
            for path in String::from_utf8_lossy(&maps).lines().filter_map(|line| Some(&line[line.find('/')?..])) {
                held.note(path);
            }
        }
        let descriptors = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten().map(|item| item.path());
        for link in descriptors.chain([dir.join("cwd"), dir.join("exe")]) {
            if let Ok(path) = fs::read_link(link) {
                held.note(&path.to_string_lossy());
            }
        }
    }
    held
}

impl Held {
    fn note(&mut self, path: &str) {
        let mut before = "";
        for part in path.split('/') {
            if before == "wheels" {
                self.wheels.insert(part.to_owned());
            }
            if part.get(..64).is_some_and(|head| head.parse::<Key>().is_ok()) {
                self.names.insert(part.split(' ').next().unwrap_or(part).to_owned());
            }
            before = part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_is_being_handed_out_is_not_taken_away_between_the_look_and_the_mark() {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        let key = super::super::KeyBuilder::new("test").finish();
        let dir = store.artifact_dir(&key);
        fs::create_dir(&dir).unwrap();
        File::open(&dir).unwrap().set_modified(SystemTime::now() - 2 * YOUNG).unwrap();
        let looking = store.looking().unwrap();
        let limits = Limits { older_than: Some(YOUNG), ..Limits::default() };
        std::thread::scope(|scope| {
            let gc = scope.spawn(|| store.gc(&limits, &Held::default()).unwrap());
            std::thread::sleep(Duration::from_millis(100));
            assert!(dir.is_dir(), "gc waits for those who look");
            mark_used(&dir);
            drop(looking);
            assert_eq!(gc.join().unwrap().kept.len(), 1);
        });
        assert!(dir.is_dir());
    }

    #[test]
    fn what_a_process_holds_is_known_by_the_end_of_its_path() {
        let key = "ab".repeat(32);
        let mut held = Held::default();
        held.note(&format!("/cache/store/v1/artifacts/{key}/trtllm_comm.so (deleted)"));
        held.note(&format!("/x/spare/{key}-12-0/trtllm_comm.so"));
        held.note("/home/user/.cache/fi-arch/wheels/cuda-13.0-aabbccddeeff/nvidia/cu13/bin/nvcc");
        held.note("/lib/x86_64-linux-gnu/libc.so.6");
        assert_eq!(held.names, HashSet::from([key.clone(), format!("{key}-12-0")]));
        assert_eq!(held.wheels, HashSet::from(["cuda-13.0-aabbccddeeff".to_owned()]));
    }
}
