//! A Python environment with a real FlashInfer in it, and a look at every file of a folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use fi_arch::digest::Digest;
use fi_arch::tables::Tables;
use serde_json::Value;

use super::sandbox::{Ran, Sandbox, copy_dir};

/// The release that is installed.
pub const RELEASE: &str = "0.6.16.post4";

/// A sandbox with a proven artifact in its store, whose environment holds FlashInfer and tvm-ffi. Every file of them has a second
/// name in the folder `twin`, as uv gives it to each environment.
pub struct World {
    pub sandbox: Sandbox,
    pub site: PathBuf,
}

impl World {
    /// The environment is made of files alone; no Python starts in it.
    pub fn new() -> Self {
        let (sandbox, _) = Sandbox::with_trtllm_build();
        let world = Self { site: sandbox.path("venv/lib/python3.11/site-packages"), sandbox };
        world.fill();
        world
    }

    /// The environment is a real one.
    pub fn with_python() -> Self {
        let (sandbox, _) = Sandbox::with_trtllm_build();
        fs::remove_dir_all(sandbox.path("venv")).unwrap();
        let made = Command::new("python3").args(["-m", "venv"]).arg(sandbox.path("venv")).status().unwrap();
        assert!(made.success());
        let pythons = fs::read_dir(sandbox.path("venv/lib")).unwrap().flatten().next().unwrap().path();
        let world = Self { site: pythons.join("site-packages"), sandbox };
        world.fill();
        world
    }

    fn fill(&self) {
        // A copy for each, so that no other test's links are counted.
        let twin = self.sandbox.path("twin");
        copy_dir(&pristine(&self.sandbox), &twin);
        for item in fs::read_dir(&twin).unwrap().flatten() {
            link_dir(&item.path(), &self.site.join(item.file_name()));
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.sandbox.path(name)
    }

    pub fn python(&self) -> PathBuf {
        self.path("venv/bin/python3")
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.sandbox.run(args)
    }

    /// `install --sm 120` with `args`; it must succeed.
    pub fn install(&self, args: &[&str]) -> Value {
        self.run(&[&["install", "--json", "--sm", "120", "--offline"], args].concat()).exits(0).json()
    }

    pub fn uninstall(&self) -> Value {
        self.run(&["uninstall", "--json"]).exits(0).json()
    }

    pub fn status(&self) -> Value {
        self.run(&["status", "--json"]).exits(0).json()
    }

    /// Every file of the environment.
    pub fn look(&self) -> Look {
        look(&self.path("venv"))
    }

    /// The files of FlashInfer that an overlay changes.
    pub fn changed(&self) -> Vec<PathBuf> {
        let names = [
            "flashinfer/jit/comm.py",
            "flashinfer/data/csrc/trtllm_allreduce.cu",
            "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh",
            "flashinfer/data/include/flashinfer/comm/trtllm_allreduce_fusion.cuh",
            "flashinfer/data/include/flashinfer/comm/trtllm_moe_allreduce_fusion.cuh",
        ];
        names.map(|name| self.site.join(name)).to_vec()
    }
}

/// FlashInfer as far as this module reads it, so that it can be looked at hundreds of times; and tvm-ffi. The byte code of the
/// file with the gate stands for all byte code.
fn pristine(sandbox: &Sandbox) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let done = root.join(format!("pristine-{RELEASE}"));
    let lock = File::create(root.join("pristine.lock")).unwrap();
    lock.lock().unwrap();
    if done.is_dir() {
        return done;
    }
    let staging = root.join("pristine.partial");
    let _ = fs::remove_dir_all(&staging);
    fs::create_dir_all(&staging).unwrap();
    let fetched = |name: &str| {
        let items = fs::read_dir(sandbox.home().join("wheels")).unwrap().flatten().map(|item| item.path());
        let is_it = |path: &PathBuf| path.is_dir() && path.file_name().unwrap().to_string_lossy().starts_with(name);
        items.into_iter().find(is_it).expect("the build has fetched it")
    };
    let tvm_ffi = fetched("apache-tvm-ffi-");
    fs::read_dir(tvm_ffi).unwrap().flatten().for_each(|item| copy_dir(&item.path(), &staging.join(item.file_name())));
    // Large, and called by nobody where nothing is compiled.
    fs::remove_dir_all(staging.join("tvm_ffi/lib")).unwrap();

    let from = fetched(&format!("flashinfer-python-{RELEASE}-"));
    let entry = fs::read_dir(sandbox.home().join("store/v1/artifacts")).unwrap().flatten().next().unwrap().path();
    let inputs: Value = serde_json::from_slice(&fs::read(entry.join("inputs.json")).unwrap()).unwrap();
    let read = inputs["files"].as_array().unwrap().iter().filter(|input| input["root"] == "data");
    let mut files: Vec<String> = read.map(|input| format!("flashinfer/data/{}", input["path"].as_str().unwrap())).collect();
    files.extend(Tables::load().module("trtllm_comm").unwrap().files.iter().cloned());
    for file in files {
        let to = staging.join(&file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from.join(&file), to).unwrap();
    }
    for name in ["flashinfer/jit", "flashinfer/comm", &format!("flashinfer_python-{RELEASE}.dist-info")] {
        let _ = fs::remove_dir_all(staging.join(name));
        copy_dir(&from.join(name), &staging.join(name));
    }
    for item in fs::read_dir(from.join("flashinfer")).unwrap().flatten().filter(|item| item.path().is_file()) {
        fs::copy(item.path(), staging.join("flashinfer").join(item.file_name())).unwrap();
    }
    let code = staging.join("flashinfer/jit/__pycache__");
    fs::create_dir_all(&code).unwrap();
    fs::write(code.join("comm.cpython-39.pyc"), "the byte code of another Python").unwrap();
    fs::write(code.join("comm.cpython-39.opt-1.pyc"), "and without its assertions").unwrap();
    fs::write(code.join("core.cpython-39.pyc"), "another module's").unwrap();
    fs::rename(&staging, &done).unwrap();
    done
}

fn link_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    let status = Command::new("cp").arg("-al").arg(from).arg(to).status().expect("cp starts");
    assert!(status.success(), "cp -al {} {}", from.display(), to.display());
}

/// Everything that can be told of the files below a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look(BTreeMap<PathBuf, Seen>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    Folder { mode: u32 },
    File { mode: u32, inode: u64, links: u64, size: u64, mtime: (i64, i64), owner: (u32, u32), content: Digest },
    Link(PathBuf),
}

/// The digest of a file; read again only when its time of change, which nobody can set, says that it may have changed.
fn content(path: &Path, meta: &fs::Metadata) -> Digest {
    type Identity = (u64, u64, u64, i64, i64);
    static KNOWN: Mutex<BTreeMap<Identity, Digest>> = Mutex::new(BTreeMap::new());
    let identity = (meta.dev(), meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec());
    let old = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64 - meta.ctime() > 2;
    if let Some(known) = KNOWN.lock().unwrap().get(&identity).filter(|_| old) {
        return *known;
    }
    let digest = Digest::of(&fs::read(path).unwrap());
    KNOWN.lock().unwrap().insert(identity, digest);
    digest
}

/// Looks at every file below `root`.
pub fn look(root: &Path) -> Look {
    let mut seen = BTreeMap::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for item in fs::read_dir(&dir).unwrap() {
            let path = item.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let what = if meta.is_dir() {
                dirs.push(path.clone());
                Seen::Folder { mode: meta.mode() }
            } else if meta.is_symlink() {
                Seen::Link(fs::read_link(&path).unwrap())
            } else {
                Seen::File {
                    mode: meta.mode(),
                    inode: meta.ino(),
                    links: meta.nlink(),
                    size: meta.size(),
                    mtime: (meta.mtime(), meta.mtime_nsec()),
                    owner: (meta.uid(), meta.gid()),
                    content: content(&path, &meta),
                }
            };
            seen.insert(path.strip_prefix(root).unwrap().to_owned(), what);
        }
    }
    Look(seen)
}

impl Look {
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.keys().map(PathBuf::as_path)
    }

    pub fn get(&self, path: &Path) -> Option<&Seen> {
        self.0.get(path)
    }

    /// The paths that are not the same in `other`, on either side.
    pub fn changes(&self, other: &Self) -> Vec<String> {
        let all = self.0.keys().chain(other.0.keys().filter(|path| !self.0.contains_key(*path)));
        let differ = all.filter(|path| self.0.get(*path) != other.0.get(*path));
        differ.map(|path| path.to_str().unwrap().to_owned()).collect()
    }

    /// Checks that nothing at all differs.
    #[track_caller]
    pub fn is(&self, other: &Self, what: &str) {
        let differ = self.changes(other);
        let first = differ.first().map(|path| (self.get(Path::new(path)), other.get(Path::new(path))));
        assert!(differ.is_empty(), "{what}: these differ: {differ:#?}\nthe first: {first:#?}");
    }

    /// The same, but for what a copy cannot keep: inodes, links and times.
    #[track_caller]
    pub fn is_as_good_as(&self, other: &Self, what: &str) {
        let plain = |look: &Self| {
            let plain = |seen: &Seen| match seen {
                Seen::File { mode, size, content, owner, .. } => {
                    Seen::File { mode: *mode, inode: 0, links: 0, size: *size, mtime: (0, 0), owner: *owner, content: *content }
                }
                other => other.clone(),
            };
            Self(look.0.iter().map(|(path, seen)| (path.clone(), plain(seen))).collect())
        };
        plain(self).is(&plain(other), what);
    }

    /// With `other`'s state.json, RECORD and the like in place of its own: what bears the moment of an installation.
    pub fn but_state(&self, other: &Self) -> Self {
        let moment = |path: &Path| path.ends_with("state.json") || path.ends_with("RECORD");
        let pairs = self.0.iter().map(|(path, seen)| match other.0.get(path) {
            Some(theirs) if moment(path) => (path.clone(), theirs.clone()),
            _ => (path.clone(), seen.clone()),
        });
        Self(pairs.collect())
    }

    /// Only what `wanted` keeps.
    pub fn only(&self, wanted: impl Fn(&str) -> bool) -> Self {
        let kept = self.0.iter().filter(|(path, _)| wanted(path.to_str().unwrap()));
        Self(kept.map(|(path, seen)| (path.clone(), seen.clone())).collect())
    }
}
