//! The journal: what an installation is about to do to a site-packages folder, written and synced before the first step, so that
//! whatever ends it (a kill, a full disk) is finished or taken back by the next call. Also what an installation in place must
//! know to give the originals back.
//!
//! ```text
//! .fi_arch/               in the site-packages folder; in no RECORD, so that `pip uninstall fi-arch` leaves it
//!   journal.json          this, under its checksum; absent when nothing is under way and nothing lies in place
//!   <transaction>/stage   what will be renamed into place
//!   <transaction>/backup  originals, by hard link where that can be: what comes back is the same inode
//!   <transaction>/trash   what was taken away, until it is certain
//! ```
//! A transaction is a list of renames, each of which can be done again or undone from any state that a kill can leave: what lies
//! where tells, not how far a counter came.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::steps;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::store;

/// The format of the journals that this release writes, and the only one that it reads.
pub const FORMAT: u32 = 1;
/// The folder of everything that an installation must know and is no part of the distribution.
pub const FOLDER: &str = ".fi_arch";
const FILE: &str = "journal.json";
/// In a transaction's folder: what the journal is when it was taken back, and when it is done.
const BEFORE: &str = "before.json";
const AFTER: &str = "after.json";

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Journal {
    format: u32,
    in_place: Option<InPlace>,
    pending: Option<Pending>,
}

/// What was written over, or added to, other packages' files. Paths are relative to the site-packages folder where they lie in
/// it, so that an environment may be copied; else absolute.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InPlace {
    /// RFC 3339, UTC.
    pub created: String,
    pub fi_arch: String,
    pub files: Vec<Original>,
    /// Folders that were made, outermost first.
    pub folders: Vec<String>,
}

/// A file that was written over or added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    /// The distribution that it belongs to, such as `flashinfer-python`.
    pub distribution: String,
    pub path: String,
    /// None for a file that was added.
    pub pre: Option<Digest>,
    pub post: Digest,
    /// Relative to [`FOLDER`]; none for a file that was added.
    pub backup: Option<String>,
    /// Byte code that Python had made of the original: path, digest and backup.
    #[serde(default)]
    pub byte_code: Vec<ByteCode>,
}

/// Byte code of an original.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteCode {
    pub path: String,
    pub pre: Digest,
    pub backup: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Doing {
    Install,
    Uninstall,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Pending {
    doing: Doing,
    transaction: String,
    ops: Vec<Op>,
    after: Option<InPlace>,
}

/// One reversible change. `new`, `old` are relative to [`FOLDER`], `path` as in [`InPlace`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "op")]
pub enum Op {
    /// The file `path`, which has the digest `from`, becomes the file `new`, which has the digest `to`; it is kept as `old`.
    /// `distribution` is whose file it is; none for byte code, which Python may write anew at any moment.
    Replace { path: String, from: Digest, to: Digest, new: String, old: String, distribution: Option<String> },
    /// Nothing lies at `path`; the file or folder `new` does then.
    Create { path: String, new: String },
    /// The file or folder `path` is kept as `old`, and nothing lies at `path` then.
    Remove { path: String, old: String },
    /// The folder `path` becomes the folder `new`, which has that inode, in one moment; it is kept as `old`.
    ReplaceDir { path: String, new: String, inode: u64, old: String },
    /// The folder `path` is made.
    Mkdir { path: String },
    /// The folder `path` goes, if nothing is in it.
    Rmdir { path: String },
}

/// A site-packages folder that nobody else of us changes as long as this lives.
#[derive(Debug)]
pub struct Site {
    dir: PathBuf,
    /// Locks the folder itself: no file is left behind, and a dead holder holds nothing.
    _lock: File,
}

/// What [`Site::recover`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovered {
    /// An interrupted installation was taken back.
    InstallUndone,
    /// An interrupted removal was finished.
    UninstallFinished,
}

impl Recovered {
    pub fn says(self) -> &'static str {
        match self {
            Self::InstallUndone => "an interrupted installation was taken back first",
            Self::UninstallFinished => "an interrupted removal was finished first",
        }
    }
}

impl Site {
    /// Waits until no other call changes `dir`.
    pub fn lock(dir: &Path) -> Result<Self> {
        let lock = File::open(dir).map_err(|e| Error::io("open", dir, e))?;
        if let Err(error) = lock.lock() {
            // Some network file systems know no locks on folders.
            tracing::warn!("{} cannot be locked ({error}): let nobody else install there now", dir.display());
        }
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder [`FOLDER`].
    pub fn folder(&self) -> PathBuf {
        self.dir.join(FOLDER)
    }

    /// What lies in place; see [`InPlace`].
    pub fn in_place(&self) -> Result<Option<InPlace>> {
        Ok(read(&self.dir)?.and_then(|journal| journal.in_place))
    }

    /// A path of the journal on this machine.
    pub fn at(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }

    /// A path as the journal holds it.
    pub fn name_of(&self, path: &Path) -> String {
        path.strip_prefix(&self.dir).unwrap_or(path).to_string_lossy().into_owned()
    }

    fn kept(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Finishes or takes back what an earlier call left half done, and sweeps what a killed one left lying about.
    pub fn recover(&self) -> Result<Option<Recovered>> {
        if !self.folder().is_dir() {
            return Ok(None);
        }
        let Some(Journal { in_place: before, pending, .. }) = read(&self.dir)? else {
            self.sweep(None);
            return Ok(None);
        };
        let Some(pending) = pending else {
            self.sweep(before.as_ref());
            return Ok(None);
        };
        let stuck = |error: Error| {
            error.within("an earlier call of fi-arch was interrupted, and that cannot be put right now").hint(format!(
                "once that is cured, `fi-arch uninstall` ends it; the originals are safe in {}",
                self.folder().display()
            ))
        };
        match pending.doing {
            Doing::Install => {
                let left = self.undo(&pending.ops).map_err(stuck)?;
                self.settle(with_left(before, left), Some(&pending.transaction)).map_err(stuck)?;
                Ok(Some(Recovered::InstallUndone))
            }
            Doing::Uninstall => {
                pending.ops.iter().try_for_each(|op| self.redo(op)).map_err(stuck)?;
                self.settle(pending.after, Some(&pending.transaction)).map_err(stuck)?;
                Ok(Some(Recovered::UninstallFinished))
            }
        }
    }

    /// Opens a transaction: its folder, with an empty `stage`, `backup` and `trash`.
    pub fn begin(&self) -> Result<Transaction<'_>> {
        let name = format!("{}-{}", std::process::id(), jiff::Timestamp::now().as_nanosecond());
        let dir = self.folder().join(&name);
        let transaction = Transaction { site: self, name };
        for folder in [dir.join("stage"), dir.join("backup"), dir.join("trash")] {
            if let Err(error) = steps::create_dirs(&folder) {
                transaction.abandon();
                return Err(steps::failed("create", &folder, error));
            }
        }
        Ok(transaction)
    }

    /// Removes all in [`FOLDER`] that nothing speaks of. What cannot be removed now is removed by a later call.
    fn sweep(&self, in_place: Option<&InPlace>) {
        let kept: Vec<&str> = in_place.into_iter().flat_map(backups).collect();
        let Ok(items) = fs::read_dir(self.folder()) else { return };
        for item in items.flatten() {
            let name = item.file_name();
            let name = name.to_string_lossy();
            let within = |backup: &&&str| backup.split_once('/').is_some_and(|(transaction, _)| transaction == name);
            if name == FILE && in_place.is_some() {
                continue;
            }
            let result = if kept.iter().any(|backup| within(&backup)) {
                ["stage", "trash", BEFORE, AFTER].iter().try_for_each(|folder| steps::remove_tree(&item.path().join(folder)))
            } else {
                steps::remove_tree(&item.path())
            };
            if let Err(error) = result {
                tracing::info!("{} is left for a later call: {error}", item.path().display());
            }
        }
        if in_place.is_none() {
            let _ = steps::remove_dir(&self.folder());
        }
    }

    /// The journal is `in_place` and nothing else, or gone. A transaction has written beforehand what it may become, so that the
    /// disk may be full by now.
    fn settle(&self, in_place: Option<InPlace>, transaction: Option<&str>) -> Result<()> {
        let file = self.folder().join(FILE);
        match &in_place {
            Some(lies) => {
                let text = text(&Journal { format: FORMAT, in_place: Some(lies.clone()), pending: None });
                let written = transaction.into_iter().flat_map(|name| [BEFORE, AFTER].map(|end| self.kept(name).join(end)));
                match written.into_iter().find(|path| fs::read_to_string(path).is_ok_and(|found| found == text)) {
                    Some(written) => steps::rename(&written, &file)
                        .and_then(|()| steps::sync_dir(&self.folder()))
                        .map_err(|e| steps::failed("write", &file, e))?,
                    None => self.write(&text)?,
                }
            }
            None => {
                steps::remove(&file)
                    .or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
                    .map_err(|e| steps::failed("remove", &file, e))?;
                let _ = steps::sync_dir(&self.folder());
            }
        }
        self.sweep(in_place.as_ref());
        Ok(())
    }

    fn write(&self, text: &str) -> Result<()> {
        let file = self.folder().join(FILE);
        let staged = steps::beside(&file);
        let _ = fs::remove_file(&staged);
        steps::write(&staged, text.as_bytes(), 0o644)
            .and_then(|()| steps::rename(&staged, &file))
            .and_then(|()| steps::sync_dir(&self.folder()))
            .map_err(|e| steps::failed("write", &file, e))
    }

    /// Does `op`, wherever an earlier attempt ended.
    fn redo(&self, op: &Op) -> Result<()> {
        let done = match op {
            Op::Replace { path, from: _, to, new, old, .. } => self.replace(&self.at(path), &self.kept(new), &self.kept(old), to),
            Op::Create { path, new } => self.create(&self.at(path), &self.kept(new)),
            Op::Remove { path, old } => self.put(&self.at(path), &self.kept(old)),
            Op::ReplaceDir { path, new, inode, old } => {
                self.replace_dir(&self.at(path), &self.kept(new), *inode, &self.kept(old))
            }
            Op::Mkdir { path } => create_dir_if_missing(&self.at(path)),
            Op::Rmdir { path } => remove_dir_if_empty(&self.at(path)),
        };
        done.map_err(|e| steps::failed("change", &self.at(op.path()), e))
    }

    /// Undoes all `ops`, however far they came. What was changed by somebody else meanwhile is left, and said.
    fn undo(&self, ops: &[Op]) -> Result<Vec<Original>> {
        let mut left = Vec::new();
        for op in ops.iter().rev() {
            let path = self.at(op.path());
            let undone = match op {
                Op::Replace { path: name, from, to, new, old, distribution } => {
                    let undone = self.unreplace(&path, &self.kept(new), &self.kept(old), (from, to), distribution.is_some());
                    if let (Ok(false), Some(distribution)) = (&undone, distribution) {
                        left.push(Original {
                            distribution: distribution.clone(),
                            path: name.clone(),
                            pre: Some(*from),
                            post: *to,
                            backup: Some(old.clone()),
                            byte_code: Vec::new(),
                        });
                    }
                    undone.map(drop)
                }
                Op::Create { new, .. } => self.uncreate(&path, &self.kept(new)),
                Op::Remove { old, .. } => self.put(&self.kept(old), &path),
                Op::ReplaceDir { new, inode, old, .. } => self.unreplace_dir(&path, &self.kept(new), *inode, &self.kept(old)),
                Op::Mkdir { .. } => remove_dir_if_empty(&path),
                Op::Rmdir { .. } => create_dir_if_missing(&path),
            };
            undone.map_err(|e| steps::failed("restore", &path, e))?;
        }
        Ok(left)
    }

    /// Moves what lies at `from` to `to`. Nothing at `from`: it was done, or there is nothing to do.
    fn put(&self, from: &Path, to: &Path) -> io::Result<()> {
        let _ = fs::remove_file(steps::beside(to));
        let Ok(meta) = fs::symlink_metadata(from) else { return Ok(()) };
        if meta.is_dir() {
            return steps::move_dir(from, to);
        }
        match digest(to) {
            // Copied to another file system, and killed before the original went.
            Some(there) if Some(there) == digest(from) => steps::remove(from),
            _ => steps::move_file(from, to),
        }
    }

    fn create(&self, path: &Path, new: &Path) -> io::Result<()> {
        let theirs = new.exists() && path.exists() && (new.is_dir() || digest(new) != digest(path));
        if theirs { Err(ErrorKind::AlreadyExists.into()) } else { self.put(new, path) }
    }

    fn uncreate(&self, path: &Path, new: &Path) -> io::Result<()> {
        let _ = fs::remove_file(steps::beside(path));
        if !new.exists() {
            return self.put(path, new);
        }
        // Not done. A file of the same content was copied to another file system by an attempt that was killed.
        if new.is_file() && digest(new) == digest(path) { steps::remove(path) } else { Ok(()) }
    }

    fn replace(&self, path: &Path, new: &Path, old: &Path, to: &Digest) -> io::Result<()> {
        let _ = fs::remove_file(steps::beside(path));
        let now = digest(path);
        if now.as_ref() == Some(to) {
            return if new.exists() { steps::remove(new) } else { Ok(()) };
        }
        if now.is_none() {
            // Taken away by somebody else, and with it the reason to change it.
            return Ok(());
        }
        match digest(old) {
            // An undoing that swapped the two and was killed.
            Some(kept) if kept == *to && !new.exists() => steps::rename(old, new)?,
            Some(_) => steps::remove(old)?,
            None => {}
        }
        steps::link_or_copy(path, old)?;
        steps::move_file(new, path)
    }

    /// False: neither the one nor the other lies there, so it is left, and so is its backup; but only where that is to be kept.
    fn unreplace(&self, path: &Path, new: &Path, old: &Path, (from, to): (&Digest, &Digest), keep: bool) -> io::Result<bool> {
        let _ = fs::remove_file(steps::beside(path));
        let now = digest(path);
        if now.as_ref() != Some(to) {
            match digest(old) {
                Some(kept) if kept == *to && !new.exists() => steps::rename(old, new)?,
                // Only a second name, or a copy, of what lies at `path`.
                Some(_) if now.as_ref() == Some(from) => steps::remove(old)?,
                Some(_) if !keep => steps::move_file(old, path)?,
                Some(_) => return Ok(false),
                None => {}
            }
            return Ok(true);
        }
        if !new.exists() {
            // Needs no room on a full disk, as a second name might.
            if steps::exchange(old, path).is_ok() {
                return steps::rename(old, new).map(|()| true);
            }
            steps::link_or_copy(path, new)?;
        }
        steps::move_file(old, path).map(|()| true)
    }

    fn replace_dir(&self, path: &Path, new: &Path, inode: u64, old: &Path) -> io::Result<()> {
        if inode_of(path) != Some(inode) {
            if path.exists() && (old.exists() || steps::exchange(new, path).is_err()) {
                // No swap on this file system: for a moment nothing lies there.
                steps::move_dir(path, old)?;
            }
            if inode_of(path) != Some(inode) {
                return steps::rename(new, path);
            }
        }
        self.put(new, old)
    }

    fn unreplace_dir(&self, path: &Path, new: &Path, inode: u64, old: &Path) -> io::Result<()> {
        if inode_of(path) != Some(inode) {
            // Not done, or moved away without a swap.
            return if path.exists() && !old.exists() { Ok(()) } else { self.put(old, path) };
        }
        // `new` is what was there when the swap was done and no more.
        let was = if new.exists() { new } else { old };
        if steps::exchange(was, path).is_err() {
            let aside = steps::beside(new);
            steps::move_dir(path, &aside)?;
            steps::move_dir(was, path)?;
            return self.put(&aside, new);
        }
        if was == old { steps::rename(old, new) } else { Ok(()) }
    }
}

impl Op {
    fn path(&self) -> &str {
        match self {
            Self::Replace { path, .. }
            | Self::Create { path, .. }
            | Self::Remove { path, .. }
            | Self::ReplaceDir { path, .. }
            | Self::Mkdir { path }
            | Self::Rmdir { path } => path,
        }
    }
}

/// The folder of one transaction, and how it ends.
#[derive(Debug)]
pub struct Transaction<'s> {
    site: &'s Site,
    name: String,
}

impl Transaction<'_> {
    /// The name of a thing in the transaction's folder, relative to [`FOLDER`].
    pub fn name(&self, inside: &str) -> String {
        format!("{}/{inside}", self.name)
    }

    /// Its path.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.site.folder().join(&self.name).join(inside)
    }

    /// Writes a file that waits to be renamed into place.
    pub fn stage(&self, inside: &str, bytes: &[u8], mode: u32) -> Result<()> {
        let path = self.path(inside);
        let folder = path.parent().expect("a staged file lies in a folder");
        steps::create_dirs(folder).map_err(|e| steps::failed("create", folder, e))?;
        steps::write(&path, bytes, mode).map_err(|e| steps::failed("write", &path, e))
    }

    /// Nothing has happened, and nothing stays.
    pub fn abandon(self) {
        self.site.sweep(self.site.in_place().ok().flatten().as_ref());
    }

    /// Does all of `ops`, or none. `after` is what lies in place then.
    pub fn commit(self, doing: Doing, ops: Vec<Op>, after: Option<InPlace>) -> Result<()> {
        let site = self.site;
        let before = site.in_place()?;
        let name = self.name.clone();
        for (end, lies) in [(BEFORE, &before), (AFTER, &after)] {
            let Some(lies) = lies else { continue };
            let text = text(&Journal { format: FORMAT, in_place: Some(lies.clone()), pending: None });
            if let Err(error) = self.stage(end, text.as_bytes(), 0o644) {
                self.abandon();
                return Err(error);
            }
        }
        let pending = Pending { doing, transaction: name.clone(), ops, after: after.clone() };
        let journal = Journal { format: FORMAT, in_place: before.clone(), pending: Some(pending) };
        if let Err(error) = site.write(&text(&journal)) {
            // It may have been renamed into place before its folder could be synced.
            let _ = site.settle(before, Some(&name));
            return Err(error);
        }
        let ops = &journal.pending.as_ref().expect("it was just put there").ops;
        let done = ops
            .iter()
            .try_for_each(|op| site.redo(op))
            .and_then(|()| site.sync(ops))
            .and_then(|()| site.settle(after, Some(&name)));
        let Err(error) = done else { return Ok(()) };
        let undone = site.undo(ops).and_then(|left| site.settle(with_left(before, left), Some(&name)));
        Err(match undone {
            Ok(()) => error.because("all was put back as it was before"),
            Err(second) => error
                .because(format!("and it could not be put back: {second}"))
                .hint("run `fi-arch uninstall` once that is cured: it ends what was begun"),
        })
    }
}

impl Site {
    fn sync(&self, ops: &[Op]) -> Result<()> {
        let mut folders: Vec<PathBuf> = ops.iter().filter_map(|op| Some(self.at(op.path()).parent()?.to_owned())).collect();
        folders.sort();
        folders.dedup();
        folders
            .iter()
            .filter(|dir| dir.is_dir())
            .try_for_each(|dir| steps::sync_dir(dir).map_err(|e| steps::failed("sync", dir, e)))
    }
}

fn text(journal: &Journal) -> String {
    store::seal_manifest(serde_json::to_value(journal).expect("a journal is always JSON"))
}

/// The journal in a site-packages folder.
fn read(site: &Path) -> Result<Option<Journal>> {
    let file = site.join(FOLDER).join(FILE);
    let text = match fs::read(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", &file, error)),
    };
    let parsed = store::unseal_value(&text).and_then(|value| match value["format"].as_u64() {
        Some(format) if format == u64::from(FORMAT) => serde_json::from_value::<Journal>(value).map_err(|e| e.to_string()),
        format => Err(format!("it has format {}, and this fi-arch knows {FORMAT}", format.unwrap_or(0))),
    });
    parsed.map(Some).map_err(|why| {
        Error::machine(format!("the journal {} cannot be read, so nothing is touched", file.display()))
            .because(why)
            .hint("use the release of fi-arch that wrote it; the originals lie beside it, under `backup`")
            .hint("or reinstall the packages whose files were edited (pip install --force-reinstall --no-deps), then remove that folder")
    })
}

/// What lies in place in a site-packages folder, and whether a call was interrupted there. Changes nothing.
pub fn peek(site: &Path) -> Result<(Option<InPlace>, bool)> {
    Ok(read(site)?.map_or((None, false), |journal| (journal.in_place, journal.pending.is_some())))
}

fn with_left(before: Option<InPlace>, left: Vec<Original>) -> Option<InPlace> {
    if left.is_empty() {
        return before;
    }
    let mut all = before.unwrap_or_default();
    left.into_iter().for_each(|one| {
        if !all.files.iter().any(|known| known.path == one.path) {
            all.files.push(one);
        }
    });
    Some(all)
}

fn backups(in_place: &InPlace) -> impl Iterator<Item = &str> {
    let codes = in_place.files.iter().flat_map(|file| &file.byte_code).map(|code| code.backup.as_str());
    in_place.files.iter().filter_map(|file| file.backup.as_deref()).chain(codes)
}

fn create_dir_if_missing(path: &Path) -> io::Result<()> {
    if path.is_dir() { Ok(()) } else { steps::create_dir(path) }
}

fn remove_dir_if_empty(path: &Path) -> io::Result<()> {
    match steps::remove_dir(path) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::DirectoryNotEmpty].contains(&error.kind()) => Ok(()),
        other => other,
    }
}

/// The digest of a file's content; none where there is none.
pub fn digest(path: &Path) -> Option<Digest> {
    Digest::of_file(path).ok()
}

fn inode_of(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).ok().map(|meta| meta.ino())
}
