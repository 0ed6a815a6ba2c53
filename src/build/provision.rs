//! Fetches pinned wheels (FlashInfer, tvm-ffi, CUDA 13.0) through pip into our own folder, each set once.
//!
//! pip is what a user's proxies, mirrors and certificates are already set up for. The pins lie in `arch-tables/wheels.toml`.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pep440_rs::Version;
use rustix::process::{Pid, Signal};
use serde::Deserialize;

use crate::cancel;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::survey::process;
use crate::target::CudaVersion;

/// Whether the network may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Online,
    Offline,
}

/// One wheel, as the index must serve it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    pub name: String,
    pub version: String,
    pub sha256: Digest,
}

/// Wheels that make one folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    name: &'static str,
    version: String,
    pins: Vec<Pin>,
    /// What is given out, below the folder: empty for the folder itself.
    root: &'static str,
    /// A file that is there when the wheels are, below the folder.
    proof: &'static str,
}

/// The file that is written last into a folder of wheels, and says which they are.
const RECORD: &str = "fi-arch.json";

/// A folder like a site-packages that holds FlashInfer `version` (the table's default for none). Fetched when it is not there.
pub fn flashinfer(home: &Path, version: Option<&str>, mode: Mode, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    Set::flashinfer(version)?.provide(home, mode, progress)
}

/// Downloads the wheel of FlashInfer `version` into `dir`: with its pinned hash, or without one where there is none yet.
pub fn flashinfer_wheel(version: &str, dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    Set::any_flashinfer(version)?.download(dir, progress)
}

/// The hash that the wheel of FlashInfer `version` must have; `None` where no wheel of it is pinned.
pub fn pinned_flashinfer(version: &str) -> Option<Digest> {
    let wanted = Version::from_str(version).ok()?;
    let same = |known: &str| Version::from_str(known).is_ok_and(|known| known == wanted);
    table().flashinfer.iter().find(|(known, _)| same(known)).map(|(_, sha256)| *sha256)
}

/// A folder like a site-packages that holds tvm-ffi: good for its headers and library, whatever Python is here.
pub fn tvm_ffi(home: &Path, mode: Mode, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    Set::tvm_ffi()?.provide(home, mode, progress)
}

/// The root of a CUDA 13.0 toolkit.
pub fn cuda(home: &Path, mode: Mode, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    Set::cuda()?.provide(home, mode, progress)
}

/// The CUDA release that is fetched.
pub fn cuda_version() -> CudaVersion {
    CudaVersion::parse(&table().cuda.version).expect("the tables' CUDA version is MAJOR.MINOR")
}

/// The FlashInfer release that is meant where none is named or installed.
pub fn default_flashinfer() -> &'static str {
    &table().default_flashinfer
}

/// Removes the folders of fetched wheels that are of no use: not what this release fetches unasked, not the FlashInfer of one of
/// `releases`, not named in `held`, and at least an hour old. Returns their names and bytes; with `dry_run` removes nothing.
pub fn trim(home: &Path, releases: &[String], held: &HashSet<String>, dry_run: bool) -> Result<Vec<(String, u64)>> {
    let mut needed = vec![Set::flashinfer(None)?, Set::tvm_ffi()?, Set::cuda()?];
    needed.extend(releases.iter().filter_map(|release| Set::flashinfer(Some(release)).ok()));
    let needed: Vec<PathBuf> = needed.iter().map(|set| set.folder(home)).collect();
    let parent = home.join("wheels");
    let mut removed = Vec::new();
    for dir in fs::read_dir(&parent).into_iter().flatten().flatten().map(|item| item.path()) {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let age = fs::metadata(dir.join(RECORD)).and_then(|meta| meta.modified()).ok().and_then(|at| at.elapsed().ok());
        let is_old = age.is_some_and(|age| age > Duration::from_secs(60 * 60));
        if needed.contains(&dir) || held.contains(&name) || !is_old {
            continue;
        }
        // Its fetchers hold this lock.
        let Some((set, _)) = name.rsplit_once('-') else { continue };
        let Ok(lock) = File::options().create(true).append(true).open(parent.join(format!("{set}.lock"))) else { continue };
        if lock.try_lock().is_err() {
            continue;
        }
        let files = walkdir::WalkDir::new(&dir).into_iter().flatten().filter_map(|item| item.metadata().ok());
        let bytes = files.filter(fs::Metadata::is_file).map(|meta| meta.len()).sum();
        if !dry_run {
            // Under this name a later fetch removes it, should this process be killed.
            let partial = PathBuf::from(format!("{}.partial", dir.display()));
            clear(&partial)?;
            fs::rename(&dir, &partial).map_err(|e| Error::io("move", &dir, e))?;
            clear(&partial)?;
        }
        removed.push((name, bytes));
    }
    removed.sort();
    Ok(removed)
}

impl Set {
    /// FlashInfer `version`, or the default. A release that is unknown or cannot be fetched is an error (exit 4).
    pub fn flashinfer(version: Option<&str>) -> Result<Self> {
        let table = table();
        let text = version.unwrap_or(&table.default_flashinfer);
        let wanted = Version::from_str(text).map_err(|_| {
            Error::usage(format!("`{text}` is no release number of FlashInfer"))
                .hint("write one such as 0.6.4, or the path of a FlashInfer")
        })?;
        let same = |known: &str| Version::from_str(known).is_ok_and(|known| known == wanted);
        if let Some((known, sha256)) = table.flashinfer.iter().find(|(known, _)| same(known)) {
            let pin = Pin { name: "flashinfer-python".to_owned(), version: known.clone(), sha256: *sha256 };
            return Ok(Self {
                name: "flashinfer-python",
                version: known.clone(),
                pins: vec![pin],
                root: "",
                proof: "flashinfer/__init__.py",
            });
        }
        if let Some(row) = table.not_fetchable.iter().find(|row| row.versions.iter().any(|known| same(known))) {
            return Err(Error::unsupported(format!("FlashInfer {text} cannot be fetched")).because(&row.why).hint(&row.hint));
        }
        Err(Error::unsupported(format!("there is no FlashInfer {text} that fi-arch knows"))
            .because(format!("the nearest that it knows: {}", nearest(&wanted)))
            .hint("a newer release may be built from where it is installed: --env DIR, or --flashinfer PATH"))
    }

    /// FlashInfer `version`, also where it is not pinned. A release that is known not to be fetchable is an error (exit 4).
    fn any_flashinfer(version: &str) -> Result<Self> {
        let known = pinned_flashinfer(version).is_some()
            || table().not_fetchable.iter().any(|row| row.versions.iter().any(|known| known == version))
            || Version::from_str(version).is_err();
        if known {
            return Self::flashinfer(Some(version));
        }
        Ok(Self {
            name: "flashinfer-python",
            version: version.to_owned(),
            pins: Vec::new(),
            root: "",
            proof: "flashinfer/__init__.py",
        })
    }

    /// The tvm-ffi that every known FlashInfer accepts.
    pub fn tvm_ffi() -> Result<Self> {
        let wheel = &table().tvm_ffi;
        Ok(Self {
            name: "apache-tvm-ffi",
            version: wheel.version.clone(),
            pins: vec![wheel.pin()?],
            root: "",
            proof: "tvm_ffi/__init__.py",
        })
    }

    /// The CUDA toolkit that compiles for every target in the table.
    pub fn cuda() -> Result<Self> {
        let set = &table().cuda;
        let pins = set.wheel.iter().map(Wheel::pin).collect::<Result<_>>()?;
        Ok(Self { name: "cuda", version: set.version.clone(), pins, root: "nvidia/cu13", proof: "nvidia/cu13/bin/nvcc" })
    }

    /// The wheels of this set.
    pub fn pins(&self) -> &[Pin] {
        &self.pins
    }

    /// The set for people: `flashinfer-python 0.6.4`.
    pub fn title(&self) -> String {
        format!("{} {}", self.name, self.version)
    }

    /// What the set gives, if it has been fetched before. Starts nothing and reads one small file.
    pub fn installed(&self, home: &Path) -> Option<PathBuf> {
        let dir = self.folder(home);
        let whole =
            fs::read_to_string(dir.join(RECORD)).is_ok_and(|text| text == self.record()) && dir.join(self.proof).is_file();
        whole.then(|| if self.root.is_empty() { dir } else { dir.join(self.root) })
    }

    /// What the set gives: found, or fetched. Callers at the same time fetch once, the others wait.
    pub fn provide(&self, home: &Path, mode: Mode, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
        if let Some(found) = self.installed(home) {
            return Ok(found);
        }
        if mode == Mode::Offline {
            let wheels: Vec<String> = self.pins.iter().map(|pin| format!("{} {}", pin.name, pin.version)).collect();
            return Err(Error::machine(format!("{} is not here, and fetching is not allowed", self.title()))
                .because(format!("without --offline these wheels would be fetched: {}", wheels.join(", ")))
                .hint(format!(
                    "run once without --offline, or copy {} from a machine that has it",
                    self.folder(home).display()
                )));
        }
        let parent = home.join("wheels");
        fs::create_dir_all(&parent).map_err(|e| Error::io("make", &parent, e))?;
        let lock = self.lock(&parent, progress)?;
        // Another process may have fetched it while this one waited.
        if let Some(found) = self.installed(home) {
            return Ok(found);
        }
        self.fetch(home, &lock, progress)?;
        self.installed(home).ok_or_else(|| {
            Error::refused(format!("the wheels of {} do not hold what they should", self.title()))
                .because(format!("after their installation there is no {}", self.folder(home).join(self.proof).display()))
        })
    }

    /// Downloads the one wheel of this set into `dir`, unpacks nothing, and returns its path.
    fn download(&self, dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
        let tmp = dir.join("tmp");
        fs::create_dir_all(&tmp).map_err(|e| Error::io("make", &tmp, e))?;
        let lock = dir.join("lock");
        let lock = File::create(&lock).map_err(|e| Error::io("make", &lock, e))?;
        let requirements = dir.join("requirements.txt");
        let text = if self.pins.is_empty() { format!("{}=={}\n", self.name, self.version) } else { self.requirements() };
        fs::write(&requirements, text).map_err(|e| Error::io("write", &requirements, e))?;
        progress(&format!("fetching {}", self.title()));
        self.run_pip(Get::Wheels, &requirements, dir, &tmp, &lock, progress)?;
        let wheel = |path: &PathBuf| path.extension().is_some_and(|ext| ext == "whl");
        let entries = fs::read_dir(dir).map_err(|e| Error::io("read", dir, e))?;
        entries.flatten().map(|entry| entry.path()).find(wheel).ok_or_else(|| {
            Error::machine(format!("cannot fetch {}", self.title())).because("pip ended without an error and left no wheel")
        })
    }

    fn folder(&self, home: &Path) -> PathBuf {
        let digest = Digest::of(self.requirements().as_bytes());
        home.join("wheels").join(format!("{}-{}-{}", self.name, self.version, digest.short()))
    }

    /// The set as a requirements file of pip. Its digest names the folder.
    fn requirements(&self) -> String {
        self.pins.iter().map(|pin| format!("{}=={} --hash=sha256:{}\n", pin.name, pin.version, pin.sha256)).collect()
    }

    fn record(&self) -> String {
        let wheels: Vec<serde_json::Value> = self
            .pins
            .iter()
            .map(|pin| serde_json::json!({ "name": pin.name, "version": pin.version, "sha256": pin.sha256 }))
            .collect();
        format!("{}\n", serde_json::json!({ "wheels": wheels }))
    }

    /// The lock of this set. The kernel gives it back when its last holder ends, however that ends.
    fn lock(&self, parent: &Path, progress: &mut dyn FnMut(&str)) -> Result<File> {
        let path = parent.join(format!("{}-{}.lock", self.name, self.version));
        let file = File::options().create(true).append(true).open(&path).map_err(|e| Error::io("open", &path, e))?;
        if file.try_lock().is_err() {
            progress(&format!("waiting for another fi-arch that is fetching {}", self.title()));
            loop {
                cancel::check()?;
                match file.try_lock() {
                    Ok(()) => break,
                    Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
                    Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
                }
            }
        }
        Ok(file)
    }

    fn fetch(&self, home: &Path, lock: &File, progress: &mut dyn FnMut(&str)) -> Result<()> {
        let folder = self.folder(home);
        let partial = PathBuf::from(format!("{}.partial", folder.display()));
        // Whoever left these was killed: the lock is ours.
        clear(&partial)?;
        let (packages, tmp) = (partial.join("packages"), partial.join("tmp"));
        fs::create_dir_all(&tmp).map_err(|e| Error::io("make", &tmp, e))?;
        let requirements = partial.join("requirements.txt");
        fs::write(&requirements, self.requirements()).map_err(|e| Error::io("write", &requirements, e))?;
        progress(&format!("fetching {}", self.title()));
        let fetched = self.run_pip(Get::Packages, &requirements, &packages, &tmp, lock, progress).and_then(|()| {
            let record = packages.join(RECORD);
            fs::write(&record, self.record()).map_err(|e| Error::io("write", &record, e))?;
            // Not whole, or it would have been used: somebody changed it by hand.
            clear(&folder)?;
            fs::rename(&packages, &folder).map_err(|e| Error::io("rename", &packages, e))
        });
        // Also after a failure: what pip left is of no use.
        let cleared = clear(&partial);
        fetched.and(cleared)
    }

    fn run_pip(
        &self,
        get: Get,
        requirements: &Path,
        packages: &Path,
        tmp: &Path,
        lock: &File,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let mut without_pip: Vec<PathBuf> = Vec::new();
        for python in ["python3", "python"].into_iter().flat_map(process::on_path) {
            let said = match pip(&python, get, requirements, packages, tmp, lock, progress) {
                Ok((true, _)) => return Ok(()),
                // Ctrl-C reaches pip too: its failure is then no news.
                Ok((false, _)) if cancel::is_asked() => return cancel::check(),
                Ok((false, said)) => said,
                Err(error) => {
                    tracing::info!("{} does not start: {error}", python.display());
                    continue;
                }
            };
            if !said.contains("No module named pip") && !said.contains("No module named 'pip'") {
                tracing::debug!("{} -m pip:\n{said}", python.display());
                return Err(self.explain(&said));
            }
            // Environments made by uv have none; the next Python on PATH may.
            without_pip.push(python);
        }
        let why = if without_pip.is_empty() {
            "there is no python3 on PATH".to_owned()
        } else {
            let list: Vec<String> = without_pip.iter().map(|python| python.display().to_string()).collect();
            format!("no Python on PATH has pip: {}", list.join(", "))
        };
        Err(Error::machine(format!("{} cannot be fetched without pip", self.title()))
            .because(why)
            .hint("install it: `python3 -m ensurepip`, `uv pip install pip`, `apt-get install python3-pip` or `dnf install python3-pip`"))
    }

    /// The error that pip's output tells of.
    fn explain(&self, said: &str) -> Error {
        let says = |words: &[&str]| words.iter().any(|word| said.contains(word));
        let what = format!("cannot fetch {}", self.title());
        let last = last_error(said);
        if says(&["DO NOT MATCH THE HASHES"]) {
            return mismatch(said);
        }
        if says(&["No space left on device", "Errno 28", "Disk quota exceeded"]) {
            return Error::machine(what)
                .because(last)
                .hint("free some disk space, or set FI_ARCH_HOME to a folder on another disk");
        }
        let network = [
            UNREACHABLE,
            "connection broken by",
            "Connection refused",
            "Max retries exceeded",
            "ReadTimeoutError",
            "NewConnectionError",
            "ProxyError",
            "SSLError",
            "HTTP error",
            "HTTPError",
            "Name or service not known",
            "Temporary failure in name resolution",
        ];
        if says(&network) {
            // pip ends with `No matching distribution found` here too; why it saw none stands further up.
            let cause = said.lines().map(str::trim).find(|line| network.iter().any(|word| line.contains(word)));
            return Error::machine(what)
                .because("the package index cannot be reached")
                .because(cause.unwrap_or_default())
                .because(last)
                .hint("behind a proxy set HTTPS_PROXY; for a mirror set PIP_INDEX_URL; both as pip reads them")
                .hint(
                    "without a network install FlashInfer and a CUDA toolkit first, or copy FI_ARCH_HOME/wheels from another machine",
                );
        }
        let error = Error::machine(what).because(&last);
        if says(&["No matching distribution found"]) {
            error.hint("the index that pip uses does not have that wheel: look at PIP_INDEX_URL, PIP_NO_INDEX and PIP_FIND_LINKS")
        } else if says(&["no such option", "no such command"]) {
            error.hint("this pip is too old: python3 -m pip install --upgrade pip")
        } else {
            error.hint("run again with FI_ARCH_LOG=debug to see all that pip said")
        }
    }
}

/// What pip is asked for.
#[derive(Debug, Clone, Copy)]
enum Get {
    /// The packages, unpacked.
    Packages,
    /// The wheels as they are.
    Wheels,
}

/// How often a wait looks whether it should end.
const LOOK: Duration = Duration::from_millis(50);

/// How a line of pip's log begins that tells of an index out of reach.
const UNREACHABLE: &str = "Could not fetch URL";

/// What Python runs: pip, without the working folder on its path (a `token.py` in it would stop pip), and ended by the kernel
/// with the process that started it.
const BOOTSTRAP: &str = "\
import sys
sys.path[:] = [p for p in sys.path if p]
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except Exception:
    pass
import runpy
runpy.run_module('pip', run_name='__main__', alter_sys=True)
";

/// Runs pip of `python`. Returns whether it succeeded, and all that it said.
fn pip(
    python: &Path,
    get: Get,
    requirements: &Path,
    packages: &Path,
    tmp: &Path,
    lock: &File,
    progress: &mut dyn FnMut(&str),
) -> std::io::Result<(bool, String)> {
    let machine = std::env::consts::ARCH;
    let mut command = Command::new(python);
    command.args(["-c", BOOTSTRAP]);
    match get {
        Get::Packages => command.args(["install", "--require-hashes", "--no-compile", "--target"]).arg(packages),
        // pip checks the hashes that it is given.
        Get::Wheels => command.args(["download", "--dest"]).arg(packages),
    };
    command.args(["--no-deps", "--only-binary=:all:"]);
    command.args(["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]);
    // Only its log says that an index could not be reached; the terminal reads `No matching distribution`.
    let log = tmp.join("pip.log");
    command.arg("--log").arg(&log);
    // The wheels are for any Python here: no code of theirs is run.
    command.args(["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]);
    for libc in ["manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010"] {
        command.arg("--platform").arg(format!("{libc}_{machine}"));
    }
    command.arg("-r").arg(requirements);
    // Settings that make sense for a user's own installations, and none for ours. Index, proxy and certificates stay.
    for (name, value) in [
        ("PIP_USER", "0"),
        ("PIP_REQUIRE_VIRTUALENV", "0"),
        ("PIP_QUIET", "0"),
        ("PIP_CONSTRAINT", "/dev/null"),
        ("PYTHONUNBUFFERED", "1"),
    ] {
        command.env(name, value);
    }
    for name in ["PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_REPORT", "PIP_DRY_RUN"] {
        command.env_remove(name);
    }
    // On the same disk as the target, and cleared with it.
    command.env("TMPDIR", tmp);
    // pip holds the lock as its standard input: should it outlive us, the next caller waits for it.
    command.stdin(Stdio::from(lock.try_clone()?)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let pip = Pid::from_child(&child);
    let ended = Arc::new(AtomicBool::new(false));
    let watcher = std::thread::spawn({
        let ended = Arc::clone(&ended);
        move || {
            while !ended.load(Ordering::SeqCst) {
                if cancel::is_asked() {
                    let _ = rustix::process::kill_process(pip, Signal::KILL);
                }
                std::thread::sleep(LOOK);
            }
        }
    });
    let stderr = child.stderr.take().map(|mut pipe| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let mut said = String::new();
    let mut lines = child.stdout.take().map(BufReader::new);
    let mut line = Vec::new();
    while let Some(lines) = &mut lines
        && lines.read_until(b'\n', &mut line)? > 0
    {
        let text = String::from_utf8_lossy(&line).into_owned();
        // "Downloading NAME (38.1 MB)", "Using cached NAME (38.1 MB)", "Installing collected packages: …"
        if ["Downloading ", "Using cached ", "Installing collected "].iter().any(|head| text.trim_start().starts_with(head)) {
            progress(text.trim());
        }
        said += &text;
        line.clear();
    }
    // Before pip is reaped: until then its number is its own.
    ended.store(true, Ordering::SeqCst);
    let _ = watcher.join();
    let status = child.wait()?;
    if let Some(stderr) = stderr.and_then(|reader| reader.join().ok()) {
        said += &stderr;
    }
    if !status.success() {
        let log = fs::read(&log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        // Each line begins with its time.
        let lines = log.lines().map(|line| line.split_once(' ').map_or(line, |(_, rest)| rest));
        let unreachable: Vec<&str> = lines.filter(|line| line.trim_start().starts_with(UNREACHABLE)).collect();
        said = format!("{}\n{said}", unreachable.join("\n"));
    }
    Ok((status.success(), said))
}

/// pip's own last line of error, else its last line.
fn last_error(said: &str) -> String {
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty()).rev();
    let error = lines().find_map(|line| line.strip_prefix("ERROR: "));
    error.or_else(|| lines().next()).unwrap_or("pip said nothing").to_owned()
}

/// The error of a wheel whose content is not the pinned one.
fn mismatch(said: &str) -> Error {
    let mut lines = said.lines().map(str::trim).skip_while(|line| !line.contains("DO NOT MATCH THE HASHES")).skip(1);
    // `NAME==VERSION from URL (from -r FILE (line 1)):`
    let wheel = lines.next().unwrap_or_default();
    let (name, place) = wheel.split_once(" from ").unwrap_or((wheel, ""));
    let place = place.split(" (from ").next().unwrap_or(place).trim_end_matches(':');
    let value = |head: &str, line: &str| line.strip_prefix(head).map(|rest| rest.trim().to_owned());
    let (mut expected, mut got) = (String::new(), String::new());
    for line in lines {
        if let Some(hash) = value("Expected sha256", line) {
            expected = hash;
        } else if let Some(hash) = value("Got", line) {
            got = hash;
            break;
        }
    }
    Error::refused(format!("the wheel of {name} is not the one that is pinned"))
        .because(format!("expected SHA-256 {expected}\ngot              {got}\nfrom {place}"))
        .hint("something between the index and here changed the file: look at PIP_INDEX_URL, PIP_FIND_LINKS and the proxy; `pip cache purge` drops a broken download")
}

fn clear(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", dir, error)),
        _ => Ok(()),
    }
}

/// The known releases just below and just above `wanted`.
fn nearest(wanted: &Version) -> String {
    let mut known: Vec<(Version, &str)> =
        table().flashinfer.keys().filter_map(|text| Some((Version::from_str(text).ok()?, text.as_str()))).collect();
    known.sort();
    let above = known.partition_point(|(version, _)| version < wanted);
    let around = [above.checked_sub(1), Some(above)].into_iter().flatten().filter_map(|at| known.get(at));
    around.map(|(_, text)| *text).collect::<Vec<_>>().join(", ")
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Table {
    default_flashinfer: String,
    cuda: CudaSet,
    tvm_ffi: Wheel,
    flashinfer: BTreeMap<String, Digest>,
    not_fetchable: Vec<NotFetchable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CudaSet {
    version: String,
    wheel: Vec<Wheel>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wheel {
    name: String,
    version: String,
    /// By machine, as `std::env::consts::ARCH` calls it.
    sha256: BTreeMap<String, Digest>,
}

impl Wheel {
    fn pin(&self) -> Result<Pin> {
        let machine = std::env::consts::ARCH;
        let sha256 = self.sha256.get(machine).ok_or_else(|| {
            Error::unsupported(format!("{} {} is not pinned for {machine}", self.name, self.version))
                .hint("install it yourself, and a CUDA toolkit, and name them with --env and --toolkit")
        })?;
        Ok(Pin { name: self.name.clone(), version: self.version.clone(), sha256: *sha256 })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NotFetchable {
    why: String,
    hint: String,
    versions: Vec<String>,
}

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        toml_edit::de::from_str(include_str!("../../arch-tables/wheels.toml")).expect("arch-tables/wheels.toml is well formed")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_release_is_fetchable_or_refused_with_its_reason() {
        for version in ["0.5.0", "0.5.3", "0.6.4", "0.6.16.post4", "0.6.16-post4", "0.7.4", "0.7.0rc3"] {
            assert_eq!(Set::flashinfer(Some(version)).unwrap().pins().len(), 1, "{version}");
        }
        assert_eq!(Set::flashinfer(None).unwrap().title(), "flashinfer-python 0.6.16.post4");
        let refusal = |version: &str| {
            let error = Set::flashinfer(Some(version)).unwrap_err();
            (error.exit() as u8, error.to_string())
        };
        for (version, exit, why) in [
            ("0.2.5", 4, "another layout"),
            ("0.4.1", 4, "source distribution only"),
            ("0.6.19", 4, "0.6.18.post1, 0.7.0rc3"),
            ("0.1.6", 4, "0.5.0rc1"),
            ("9.9", 4, "0.7.4"),
            ("latest!", 2, "no release number"),
        ] {
            let told = refusal(version);
            assert!(told.0 == exit && told.1.contains(why), "{version}: {told:?}");
        }
    }

    #[test]
    fn pins_are_there_for_both_machines_and_name_the_folder() {
        for wheel in table().cuda.wheel.iter().chain([&table().tvm_ffi]) {
            let machines: Vec<&str> = wheel.sha256.keys().map(String::as_str).collect();
            assert_eq!(machines, ["aarch64", "x86_64"], "{}", wheel.name);
        }
        let set = Set::cuda().unwrap();
        let mut other = set.clone();
        other.pins[0].sha256 = Digest::of(b"another wheel");
        assert_ne!(set.folder(Path::new("/h")), other.folder(Path::new("/h")));
    }

    #[test]
    fn pips_last_words_become_an_error_with_the_right_exit_code() {
        let set = Set::tvm_ffi().unwrap();
        let told = |said: &str| set.explain(said);
        let full =
            told("  Downloading x\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n");
        assert!(full.exit() as u8 == 3 && full.hints()[0].contains("disk space"), "{full}");
        let unreachable = told(
            "Could not fetch URL https://index.example/simple/x/: connection error: [Errno 111] Connection refused - skipping\nERROR: No matching distribution found for x==1\n",
        );
        assert!(unreachable.exit() as u8 == 3 && unreachable.why()[0].contains("cannot be reached"), "{unreachable}");
        let missing = told("ERROR: Could not find a version\nERROR: No matching distribution found for x==1\n");
        assert!(missing.exit() as u8 == 3 && missing.hints()[0].contains("PIP_INDEX_URL"), "{missing}");
        let changed = told(
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you\n    x==1 from https://h/x.whl (from -r r.txt (line 1)):\n        Expected sha256 aa\n             Got        bb\n",
        );
        assert_eq!(changed.exit() as u8, 5);
        assert_eq!(changed.why(), ["expected SHA-256 aa\ngot              bb\nfrom https://h/x.whl"]);
    }
}
