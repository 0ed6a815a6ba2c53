//! What a running process has loaded, from its memory map: its all-reduce module, its CUDA runtime, its tvm-ffi.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{look, state};
use crate::digest::Digest;
use crate::error::{Error, Result};

/// See [`process`].
#[derive(Debug)]
pub struct Process {
    pub pid: u32,
    /// In the order of its map, each file once.
    pub libraries: Vec<Library>,
    /// `FI_ARCH_…` and `PYTHONPATH`, as it was started with.
    pub variables: Vec<(String, String)>,
}

/// A library in a process.
#[derive(Debug)]
pub struct Library {
    pub path: PathBuf,
    pub is: Is,
    /// The content that the process has; none where that file is gone or was replaced since.
    pub sha256: Option<Digest>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Is {
    /// A module that FlashInfer's JIT compiled, or that we made, and how it stands to what is installed.
    Module(Standing),
    Cudart,
    TvmFfi,
}

/// How a module stands to the package `fi_arch_shim` that it lies in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// The very artifact that the state records.
    Installed,
    /// It lies in our package, and is not what is installed now; says why.
    Stale(String),
    /// It lies elsewhere: FlashInfer's own.
    Foreign,
}

/// Looks at the process `pid`.
pub fn process(pid: u32, module: &str) -> Result<Process> {
    let dir = PathBuf::from(format!("/proc/{pid}"));
    let maps = read(&dir, "maps", pid)?;
    let environ = read(&dir, "environ", pid)?;
    let mut libraries: Vec<Library> = Vec::new();
    for line in maps.split(|byte| *byte == b'\n') {
        let Some(mapped) = mapping(&String::from_utf8_lossy(line)) else { continue };
        let name = mapped.path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let kind = match () {
            () if name == format!("{module}.so") => None,
            () if name.starts_with("libcudart.so") => Some(Is::Cudart),
            () if name.starts_with("libtvm_ffi.so") => Some(Is::TvmFfi),
            () => continue,
        };
        if libraries.iter().any(|known| known.path == mapped.path) {
            continue;
        }
        // As the process sees it: it may live in a container.
        let file = dir.join("root").join(mapped.path.strip_prefix("/").unwrap_or(&mapped.path));
        let file = if file.exists() { file } else { mapped.path.clone() };
        let same = !mapped.deleted && fs::metadata(&file).is_ok_and(|meta| meta.ino() == mapped.inode);
        let sha256 = same.then(|| Digest::of_file(&file).ok()).flatten();
        let is = kind.unwrap_or_else(|| Is::Module(standing(&file, sha256)));
        libraries.push(Library { path: mapped.path, is, sha256 });
    }
    let variables = environ.split(|byte| *byte == 0).filter_map(|entry| {
        let entry = String::from_utf8_lossy(entry);
        let (name, value) = entry.split_once('=')?;
        (name.starts_with("FI_ARCH_") || name == crate::env::PYTHONPATH).then(|| (name.to_owned(), value.to_owned()))
    });
    Ok(Process { pid, libraries, variables: variables.collect() })
}

fn read(dir: &Path, name: &str, pid: u32) -> Result<Vec<u8>> {
    fs::read(dir.join(name)).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::usage(format!("there is no process {pid}")).hint("`ps -ef` lists them"),
        ErrorKind::PermissionDenied => {
            let owner = fs::metadata(dir).map(|meta| format!(" (its user id is {})", meta.uid())).unwrap_or_default();
            Error::machine(format!("process {pid} cannot be looked at"))
                .because(format!("it belongs to another user{owner}, or may not be traced"))
                .hint("run this as that user, or as root")
        }
        _ => Error::io("read", &dir.join(name), error),
    })
}

struct Mapped {
    path: PathBuf,
    inode: u64,
    deleted: bool,
}

/// The file of a line such as `7f00-7f01 r-xp 00000000 08:01 1234  /path/lib.so (deleted)`.
fn mapping(line: &str) -> Option<Mapped> {
    let mut rest = line;
    let mut fields = Vec::new();
    for _ in 0..5 {
        let trimmed = rest.trim_start();
        let (field, after) = trimmed.split_once(' ')?;
        fields.push(field);
        rest = after;
    }
    let path = rest.trim_start();
    let (path, deleted) = path.strip_suffix(" (deleted)").map_or((path, false), |path| (path, true));
    path.starts_with('/').then(|| Mapped { path: PathBuf::from(path), inode: fields[4].parse().unwrap_or(0), deleted })
}

fn standing(file: &Path, sha256: Option<Digest>) -> Standing {
    let Some(package) = file.ancestors().find(|dir| dir.ends_with(state::PACKAGE)) else { return Standing::Foreign };
    let Some(sha256) = sha256 else {
        return Standing::Stale("the file was removed or replaced after this process had loaded it: restart it".to_owned());
    };
    match look::read(package) {
        Err(why) => Standing::Stale(format!("{} cannot be read: {why}", package.join(state::FILE).display())),
        Ok(state) if state.artifacts.iter().any(|artifact| artifact.sha256 == sha256) => Standing::Installed,
        Ok(_) => Standing::Stale("its content is not what was installed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_memory_map_is_read_with_spaces_in_the_path_and_after_a_removal() {
        let mapped = mapping("7f5e-7f5f r-xp 00001000 fe:00 4711                       /a b/libcudart.so.12 (deleted)").unwrap();
        assert_eq!((mapped.path.as_path(), mapped.inode, mapped.deleted), (Path::new("/a b/libcudart.so.12"), 4711, true));
        assert!(mapping("7f5e-7f5f rw-p 00000000 00:00 0 ").is_none());
        assert!(mapping("7f5e-7f5f rw-p 00000000 00:00 0                          [heap]").is_none());
        assert!(mapping("").is_none());
    }
}
