//! Every change of a file system that an activation makes. One function is one or a few steps, and each step can be made to fail
//! by a test: [`FI_ARCH_FAULT`](crate::env::FI_ARCH_FAULT) counts them.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::env;
use crate::error::Error;

/// What a test wants to go wrong.
struct Fault {
    step: u64,
    how: How,
}

enum How {
    Kill,
    Errno(Errno),
    /// From that step on, whatever needs room fails; removing and renaming work.
    Full,
}

/// `step:7:kill`, `step:7:enospc`, `step:7:eio`, `step:7:full`; anything else is no fault.
fn fault() -> Option<&'static Fault> {
    static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
    let parse = || {
        let text = env::var(env::FI_ARCH_FAULT)?.into_string().ok()?;
        let (step, how) = text.strip_prefix("step:")?.split_once(':')?;
        let how = match how {
            "kill" => How::Kill,
            "enospc" => How::Errno(Errno::NOSPC),
            "eio" => How::Errno(Errno::IO),
            "full" => How::Full,
            _ => return None,
        };
        Some(Fault { step: step.parse().ok()?, how })
    };
    FAULT.get_or_init(parse).as_ref()
}

/// One step begins. `half` is what a kill or a full disk would leave of it.
fn step(needs_room: bool, half: impl FnOnce()) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let Some(fault) = fault() else { return Ok(()) };
    let now = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    match &fault.how {
        How::Kill if now == fault.step => {
            half();
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            std::process::abort()
        }
        How::Errno(errno) if now == fault.step => {
            half();
            Err((*errno).into())
        }
        How::Full if now >= fault.step && needs_room => {
            half();
            Err(Errno::NOSPC.into())
        }
        _ => Ok(()),
    }
}

/// Writes a new file of that mode, and waits until it is on the disk.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    step(true, || ())?;
    let mut file = File::options().write(true).create_new(true).mode(mode).open(path)?;
    step(true, || drop(file.write_all(&bytes[..bytes.len() / 2])))?;
    file.write_all(bytes)?;
    // Whatever the umask is: another user runs the server.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()
}

/// Makes a folder that everybody may read.
pub fn create_dir(path: &Path) -> io::Result<()> {
    step(true, || ())?;
    fs::DirBuilder::new().mode(0o755).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

/// Makes a folder and those above it.
pub fn create_dirs(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        create_dirs(parent)?;
    }
    create_dir(path)
}

/// Removes an empty folder.
pub fn remove_dir(path: &Path) -> io::Result<()> {
    step(false, || ())?;
    fs::remove_dir(path)
}

/// Removes a file.
pub fn remove(path: &Path) -> io::Result<()> {
    step(false, || ())?;
    fs::remove_file(path)
}

/// Removes whatever lies there, with everything in it.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => {
            for item in fs::read_dir(path)? {
                remove_tree(&item?.path())?;
            }
            remove_dir(path)
        }
        Ok(_) => remove(path),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Renames a file or a folder, over what is there.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    step(false, || ())?;
    fs::rename(from, to)
}

/// Swaps two names in one moment. Not every file system can.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    step(false, || ())?;
    let here = rustix::fs::CWD;
    Ok(rustix::fs::renameat_with(here, one, here, other, rustix::fs::RenameFlags::EXCHANGE)?)
}

/// Gives the file at `from` a second name.
pub fn link(from: &Path, to: &Path) -> io::Result<()> {
    step(true, || ())?;
    fs::hard_link(from, to)
}

/// Gives the file a second name; where it can have none (another file system, a rule of the kernel), makes a copy of it.
pub fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    match link(from, to) {
        // Linking may be forbidden where it would be possible: files of other users, some network and container file systems.
        Err(error) if is_other_file_system(&error) || error.kind() == ErrorKind::PermissionDenied => copy(from, to),
        other => other,
    }
}

/// Moves a file, over what is there; onto another file system as a copy that takes its place by rename.
pub fn move_file(from: &Path, to: &Path) -> io::Result<()> {
    match rename(from, to) {
        Err(error) if is_other_file_system(&error) => {
            copy(from, to)?;
            remove(from)
        }
        other => other,
    }
}

/// Moves a folder to where nothing is, or the beginning of the same move.
pub fn move_dir(from: &Path, to: &Path) -> io::Result<()> {
    if !to.exists() {
        match rename(from, to) {
            // A folder of a lower layer of an overlay file system cannot be renamed, though its files can.
            Err(error) if is_other_file_system(&error) => create_dir(to)?,
            other => return other,
        }
    }
    for item in fs::read_dir(from)? {
        let item = item?;
        let target = to.join(item.file_name());
        if item.file_type()?.is_dir() { move_dir(&item.path(), &target)? } else { move_file(&item.path(), &target)? }
    }
    remove_dir(from)
}

/// Copies a file with its mode, owner and times, into place by rename.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let beside = beside(to);
    let _ = fs::remove_file(&beside);
    let bytes = fs::read(from)?;
    let meta = fs::metadata(from)?;
    write(&beside, &bytes, meta.mode() & 0o7777)?;
    own_as(&beside, &meta)?;
    File::options().write(true).open(&beside).or_else(|_| File::open(&beside))?.set_times(times(&meta)?)?;
    rename(&beside, to)
}

/// Where a file of that name is written before it is renamed into place.
pub fn beside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".fi-arch-tmp");
    path.with_file_name(name)
}

/// Gives a file the owner of another, as far as we may.
pub fn own_as(path: &Path, meta: &Metadata) -> io::Result<()> {
    let now = fs::metadata(path)?;
    if (now.uid(), now.gid()) == (meta.uid(), meta.gid()) {
        return Ok(());
    }
    match chown(path, Some(meta.uid()), Some(meta.gid())) {
        // Only root may give files away.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
        // A change of owner takes special bits away.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(meta.mode() & 0o7777)),
        other => other,
    }
}

fn times(meta: &Metadata) -> io::Result<fs::FileTimes> {
    Ok(fs::FileTimes::new().set_accessed(meta.accessed()?).set_modified(meta.modified()?))
}

/// Waits until the names in a folder are on the disk.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    step(false, || ())?;
    match File::open(path)?.sync_all() {
        // Some file systems cannot sync a folder; there is nothing more to be done on those.
        Err(error) if error.kind() == ErrorKind::InvalidInput || error.kind() == ErrorKind::Unsupported => Ok(()),
        other => other,
    }
}

/// Waits until a file's content is on the disk.
pub fn sync_file(path: &Path) -> io::Result<()> {
    step(true, || ())?;
    File::open(path)?.sync_all()
}

/// Makes sure that a file of that content really can be made in a folder, by making one.
pub fn probe(dir: &Path) -> io::Result<()> {
    let path = dir.join(format!(".fi-arch-probe-{}", std::process::id()));
    let _ = fs::remove_file(&path);
    File::options().write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)
}

pub fn is_other_file_system(error: &io::Error) -> bool {
    let errnos = [Errno::XDEV, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK];
    errnos.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The error of a step, with a hint for what people can do about it.
pub fn failed(doing: &str, path: &Path, source: io::Error) -> Error {
    let hint = match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Some("free some disk space where the environment lies"),
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => {
            Some("do it as a user who may write there; `fi-arch run -- CMD…` needs no installation")
        }
        _ => None,
    };
    let error = Error::machine(format!("cannot {doing} {}", path.display())).because(source);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}
