//! The programs that a build runs: a CUDA toolkit and a host compiler, and proofs that they work before minutes are spent.
//!
//! What a program says of itself is remembered under its file's identity, so that a look-up that changed nothing starts none.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, FileHeader};
use serde::{Deserialize, Serialize};

use super::consumer::Consumer;
use super::diagnose::diagnose;
use super::view;
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::survey::Environment;
use crate::survey::process::{self, Ran, is_executable, is_script};
use crate::target::{CudaVersion, Target};

/// Longer than any program needs to say its version, on any file system.
const ANSWER: Duration = Duration::from_secs(30);
/// A probe compiles a few lines; past this something hangs.
const PROBE: Duration = Duration::from_secs(120);

/// A CUDA toolkit that is whole: nvcc, what it runs, headers of its own version, and a runtime to link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toolkit {
    pub root: PathBuf,
    pub nvcc: PathBuf,
    pub version: CudaVersion,
    /// With its build number: `13.0.88`.
    pub full_version: String,
    /// The folder that holds `cuda_runtime_api.h`.
    pub include: PathBuf,
    /// The libcudart to link: `libcudart.so` where there is one, else `libcudart.so.13` as in the pip toolkits.
    pub cudart: PathBuf,
    /// What a product linked to it will ask the loader for: `libcudart.so.13`.
    pub cudart_soname: String,
    /// The same runtime as an archive, where there is one.
    pub cudart_static: Option<PathBuf>,
    /// The files whose content decides what nvcc makes of a source.
    pub tools: Vec<PathBuf>,
    /// Who named it: `--toolkit DIR`, `CUDA_HOME`, `nvcc on PATH`, a folder of the system or the environment.
    pub origin: String,
}

impl Rejected {
    /// Its parts are of several CUDA releases.
    pub fn is_mixed(&self) -> bool {
        self.why.contains("its nvcc is of CUDA") || self.why.contains("its nvcc of")
    }
}

impl Toolkit {
    /// A command that runs this nvcc, free of the variables by which nvcc adds flags that no plan knows of.
    pub fn command(&self) -> Command {
        compiler_command(&self.nvcc)
    }

    /// How a product of this toolkit gets its CUDA runtime in the process of `consumer`, or why it cannot.
    pub fn cudart_for(&self, consumer: Option<&Consumer>) -> Result<Cudart, String> {
        let shared = consumer.is_none_or(|consumer| consumer.cuda.major == self.version.major);
        if shared {
            return Ok(Cudart::Shared { file: self.cudart.clone(), soname: self.cudart_soname.clone() });
        }
        serves(self.version, consumer)?;
        match &self.cudart_static {
            Some(file) => Ok(Cudart::Static { file: file.clone() }),
            None => Err(format!("it has no {STATIC_NAME} beside its libcudart")),
        }
    }
}

/// How a product gets the CUDA runtime that it calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cudart {
    /// It needs a libcudart, which the process must have: the toolkit's own is linked.
    Shared { file: PathBuf, soname: String },
    /// It holds a runtime of its own, and needs a driver as new as that. Beside another runtime in one process the two share
    /// the driver's primary context; streams and graphs are the driver's, so they pass between them.
    Static { file: PathBuf },
}

impl Cudart {
    /// The file that is linked.
    pub fn file(&self) -> &Path {
        match self {
            Self::Shared { file, .. } | Self::Static { file } => file,
        }
    }

    /// `shared` or `static`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Shared { .. } => "shared",
            Self::Static { .. } => "static",
        }
    }
}

const STATIC_NAME: &str = "libcudart_static.a";

/// The only CUDA whose runtime is linked into a product that a process of another CUDA will load.
const STATIC_MAJOR: u32 = 13;

/// Can a toolkit of this version make something that `consumer` can load? (Whether it has the archive shows later.)
pub fn serves(version: CudaVersion, consumer: Option<&Consumer>) -> Result<(), String> {
    match consumer {
        Some(consumer) if ![consumer.cuda.major, STATIC_MAJOR].contains(&version.major) => {
            let own = format!("libcudart.so.{}", version.major);
            Err(format!("its runtime is {own}, and {} has {}", consumer.name, consumer.soname()))
        }
        _ => Ok(()),
    }
}

/// A toolkit that was looked at and is not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    pub root: PathBuf,
    pub origin: String,
    pub why: String,
}

/// What a search found.
#[derive(Debug)]
pub struct Found {
    pub toolkit: Option<Toolkit>,
    /// What was looked at before it and is not fit, in order. Without a toolkit: all there is.
    pub rejected: Vec<Rejected>,
}

/// The first toolkit that is whole and that `wanted` accepts. Looked at in this order: `--toolkit` (then nothing else, and its
/// unfitness is an error), `CUDA_HOME`, `CUDA_PATH`, nvcc on `PATH`, `/usr/local/cuda`, `/usr/local/cuda-*`, the environment's wheels.
///
/// A toolkit with the runtime of `consumer` goes before every other; only where none is fit, one that can link its own
/// runtime into the product.
pub fn find(
    explicit: Option<&Path>,
    env: Option<&Environment>,
    consumer: Option<&Consumer>,
    wanted: &dyn Fn(CudaVersion) -> Result<()>,
    memo: &Memo,
) -> Result<Found> {
    if let Some(dir) = explicit {
        let unfit = |why: String| {
            Error::machine(format!("the toolkit {} is not fit", dir.display())).because(why).hint(
                "name a whole CUDA toolkit, or leave --toolkit out: without a fit one fi-arch fetches CUDA 13.0 into its own folder",
            )
        };
        let root = root_of(dir.as_os_str()).map_err(unfit)?;
        wanted(release(&root, memo).map_err(unfit)?.1)?;
        return at(&root, &format!("--toolkit {}", dir.display()), memo)
            .and_then(|toolkit| toolkit.cudart_for(consumer).map(|_| toolkit))
            .map(|toolkit| Found { toolkit: Some(toolkit), rejected: Vec::new() })
            .map_err(unfit);
    }
    let search = |serves: &dyn Fn(CudaVersion) -> Result<(), String>| {
        let fit = |root: &Path, origin: &str| {
            // Its version first: what else a toolkit that is too old lacks is of no use to anybody.
            let (_, version) = release(root, memo)?;
            wanted(version).map_err(|e| brief(&e))?;
            serves(version)?;
            let toolkit = at(root, origin, memo)?;
            toolkit.cudart_for(consumer).map(|_| toolkit)
        };
        first_fit(candidates(env, Path::new("/usr/local")), &fit)
    };
    let Some(theirs) = consumer else { return Ok(search(&|_| Ok(()))) };
    let found = search(&|version| match version.major == theirs.cuda.major {
        true => Ok(()),
        false => Err(format!("its runtime is libcudart.so.{}, and {} has {}", version.major, theirs.name, theirs.soname())),
    });
    Ok(if found.toolkit.is_some() { found } else { search(&|version| serves(version, consumer)) })
}

/// A folder to look at, or why the text that names one makes no sense.
struct Candidate {
    origin: String,
    root: PathBuf,
    nonsense: Option<String>,
}

fn candidates(env: Option<&Environment>, local: &Path) -> Vec<Candidate> {
    let sane = |origin: &str, root: PathBuf| Candidate { origin: origin.to_owned(), root, nonsense: None };
    let mut list = Vec::new();
    for name in [env::CUDA_HOME, env::CUDA_PATH] {
        let Some(value) = env::var(name) else { continue };
        list.push(match root_of(&value) {
            Ok(root) => sane(name, root),
            Err(why) => Candidate { origin: name.to_owned(), root: PathBuf::from(value), nonsense: Some(why) },
        });
    }
    if let Some(nvcc) = process::on_path("nvcc").first() {
        list.push(sane("nvcc on PATH", root_of_nvcc(nvcc)));
    }
    let system = Some(local.join("cuda")).filter(|dir| dir.is_dir()).into_iter().chain(versioned(local, "cuda-"));
    list.extend(system.map(|root| sane(&root.display().to_string(), root)));
    for site in env.map(|env| env.site_packages.as_slice()).unwrap_or_default() {
        // The wheels of CUDA 12 hold no nvcc driver: such a folder is no toolkit that somebody meant.
        let wheels = versioned(&site.join("nvidia"), "cu").into_iter().filter(|root| root.join("bin/nvcc").is_file());
        list.extend(wheels.map(|root| sane("CUDA wheels of the environment", root)));
    }
    list
}

fn first_fit(candidates: Vec<Candidate>, fit: &dyn Fn(&Path, &str) -> Result<Toolkit, String>) -> Found {
    let mut rejected: Vec<Rejected> = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    for Candidate { origin, root, nonsense } in candidates {
        let real = root.canonicalize().unwrap_or_else(|_| root.clone());
        if seen.contains(&real) {
            continue;
        }
        seen.push(real);
        let looked_at = match nonsense {
            Some(why) => Err(why),
            None => fit(&root, &origin),
        };
        match looked_at {
            Ok(toolkit) => return Found { toolkit: Some(toolkit), rejected },
            Err(why) => {
                tracing::info!("the toolkit {} ({origin}) is passed over: {why}", root.display());
                rejected.push(Rejected { root, origin, why });
            }
        }
    }
    Found { toolkit: None, rejected }
}

/// An error on one line.
fn brief(error: &Error) -> String {
    std::iter::once(error.what()).chain(error.why().iter().map(String::as_str)).collect::<Vec<_>>().join(": ")
}

/// The folders `PREFIX<version>` in `dir`, newest version first.
fn versioned(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found: Vec<(Vec<u32>, PathBuf)> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix(prefix)?.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
            Some((version, entry.path()))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

/// The root of the toolkit that `value` names: a root, its `bin` folder or its nvcc; quotes and spaces around it are forgiven.
fn root_of(value: &OsStr) -> Result<PathBuf, String> {
    let mut path = PathBuf::from(value);
    if !path.exists()
        && let Some(text) = value.to_str()
    {
        // `CUDA_HOME="'/usr/local/cuda'"` and trailing spaces come from env files, which shells did not read.
        path = PathBuf::from(text.trim().trim_matches(['"', '\'']).trim());
    }
    if !path.exists() {
        return Err(match value.to_str() {
            Some(text) if text.contains(':') => format!("`{text}` is a list, and a toolkit is one folder"),
            _ => format!("there is no {}", path.display()),
        });
    }
    let path = std::path::absolute(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    if path.is_file() {
        return match path.file_name() {
            Some(name) if name == "nvcc" => Ok(root_of_nvcc(&path)),
            _ => Err(format!("{} is a file, and neither a toolkit nor its nvcc", path.display())),
        };
    }
    match path.parent() {
        Some(parent) if path.ends_with("bin") && path.join("nvcc").exists() => Ok(parent.to_owned()),
        _ => Ok(path),
    }
}

/// The root of the toolkit that an nvcc belongs to, through symlinks (`/usr/bin/nvcc` is often one into `/usr/local/cuda-13.0`).
fn root_of_nvcc(nvcc: &Path) -> PathBuf {
    let root = |nvcc: &Path| nvcc.parent().filter(|bin| bin.ends_with("bin")).and_then(Path::parent).map(Path::to_owned);
    // A link to a program of another name (a compiler cache) leads away from the toolkit.
    let real = nvcc.canonicalize().ok().filter(|real| real.file_name() == nvcc.file_name());
    real.as_deref().and_then(root).or_else(|| root(nvcc)).unwrap_or_else(|| nvcc.parent().unwrap_or(nvcc).to_owned())
}

/// A compiler's command line, without what would come into it unseen.
fn compiler_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for name in env::SILENT_INPUTS {
        command.env_remove(name);
    }
    command
}

/// The names of this machine's folders below `targets/`.
fn target_folders() -> &'static [&'static str] {
    if cfg!(target_arch = "aarch64") { &["sbsa-linux", "aarch64-linux"] } else { &["x86_64-linux"] }
}

/// The toolkit whose root is `root`, or why it is not fit.
pub fn at(root: &Path, origin: &str, memo: &Memo) -> Result<Toolkit, String> {
    let (full_version, version) = release(root, memo)?;
    let nvcc = root.join("bin/nvcc");
    let include = headers(root, version, memo)?;
    let (cudart, cudart_soname) = runtime(root, version, memo)?;
    let cudart_static = runtime_folders(root).map(|folder| folder.join(STATIC_NAME)).find(|file| file.is_file());
    let tools = tools(root, &nvcc)?;
    Ok(Toolkit {
        root: root.to_owned(),
        nvcc,
        version,
        full_version,
        include,
        cudart,
        cudart_soname,
        cudart_static,
        tools,
        origin: origin.to_owned(),
    })
}

/// What the nvcc of `root` says its version is, whether the rest of that toolkit is fit or not.
pub fn version(root: &Path, memo: &Memo) -> Option<CudaVersion> {
    release(root, memo).ok().map(|(_, version)| version)
}

/// What the nvcc of `root` says its version is, in full (`13.0.88`) and as a release.
fn release(root: &Path, memo: &Memo) -> Result<(String, CudaVersion), String> {
    if !root.is_dir() {
        return Err(format!("there is no folder {}", root.display()));
    }
    let nvcc = root.join("bin/nvcc");
    if !nvcc.exists() {
        return Err("it has no bin/nvcc".to_owned());
    }
    if !is_executable(&nvcc) {
        return Err(format!("{} is not executable", nvcc.display()));
    }
    let full_version = memo.fact(&nvcc, "nvcc --version", || ask_version(&nvcc)).map_err(|e| brief(&e))?;
    let version = CudaVersion::parse(&full_version).ok_or_else(|| format!("`{full_version}` is no version of nvcc"))?;
    Ok((full_version, version))
}

/// `13.0.88` of `Cuda compilation tools, release 13.0, V13.0.88`.
fn ask_version(nvcc: &Path) -> Result<String> {
    let failed = |why: String| Error::machine(format!("{} does not say its version", nvcc.display())).because(why);
    let ran = process::run(compiler_command(nvcc).arg("--version"), ANSWER).map_err(|e| failed(e.to_string()))?;
    if !ran.ok {
        return Err(failed(ran.last_line()));
    }
    let line = ran.stdout.lines().find_map(|line| line.split_once("release ")).map(|(_, rest)| rest);
    let version = line.and_then(|rest| {
        let (release, build) = rest.split_once(',').unwrap_or((rest, ""));
        CudaVersion::parse(release)?;
        Some(build.trim().strip_prefix('V').unwrap_or(release.trim()).to_owned())
    });
    version.ok_or_else(|| failed(format!("no `release` in what it prints: {}", ran.last_line())))
}

/// The folder of headers of `root`, proved to be whole and of nvcc's own version.
fn headers(root: &Path, version: CudaVersion, memo: &Memo) -> Result<PathBuf, String> {
    let api = "cuda_runtime_api.h";
    let include = std::iter::once(root.join("include"))
        .chain(target_folders().iter().map(|target| root.join("targets").join(target).join("include")))
        .find(|dir| dir.join(api).is_file())
        .ok_or_else(|| format!("it has no headers ({api} is not there)"))?;
    let stated = memo.fact(&include.join(api), "CUDART_VERSION", || stated_version(&include.join(api))).map_err(|e| brief(&e))?;
    if stated != version.to_string() {
        return Err(format!("its headers are of CUDA {stated}, its nvcc of {version}"));
    }
    for file in ["crt/host_config.h", "crt/host_runtime.h"] {
        if !include.join(file).is_file() {
            return Err(format!("it has no {file} (the wheel nvidia-cuda-crt, or a whole toolkit, brings it)"));
        }
    }
    if !["cccl/cuda/std", "cuda/std"].iter().any(|dir| include.join(dir).is_dir()) {
        return Err("it has no CCCL headers (cuda/std is not there)".to_owned());
    }
    Ok(include)
}

/// `13.0` of `#define CUDART_VERSION  13000`.
fn stated_version(header: &Path) -> Result<String> {
    let bytes = fs::read(header).map_err(|e| Error::io("read", header, e))?;
    let text = String::from_utf8_lossy(&bytes);
    let number = text.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("define")?.trim_start();
        rest.strip_prefix("CUDART_VERSION")?.trim().parse::<u32>().ok()
    });
    let number = number.ok_or_else(|| Error::machine(format!("{} states no CUDART_VERSION", header.display())))?;
    Ok(CudaVersion::new(number / 1000, number % 1000 / 10).to_string())
}

/// The folders below `root` in which toolkits keep their CUDA runtime.
fn runtime_folders(root: &Path) -> impl Iterator<Item = PathBuf> + use<'_> {
    let machine = std::env::consts::ARCH;
    let targets = target_folders().iter().map(|target| root.join("targets").join(target).join("lib"));
    let multiarch = root.join("lib").join(format!("{machine}-linux-gnu"));
    ["lib64", "lib"].map(|lib| root.join(lib)).into_iter().chain(targets).chain([multiarch])
}

/// The libcudart of `root` to link, and its SONAME.
fn runtime(root: &Path, version: CudaVersion, memo: &Memo) -> Result<(PathBuf, String), String> {
    let expected = format!("libcudart.so.{}", version.major);
    let mut faults = Vec::new();
    for folder in runtime_folders(root) {
        for name in ["libcudart.so", &expected] {
            let file = folder.join(name);
            if !file.is_file() {
                continue;
            }
            match memo.fact(&file, "SONAME", || soname(&file)) {
                // CUDA 11 calls its runtime libcudart.so.11.0.
                Ok(found) if found == expected || found.starts_with(&format!("{expected}.")) => return Ok((file, found)),
                Ok(found) => faults.push(format!("{} is {found}, its nvcc is of CUDA {version}", file.display())),
                Err(error) => faults.push(brief(&error)),
            }
        }
    }
    Err(faults.into_iter().next().unwrap_or_else(|| format!("it has no {expected} in lib64, lib or targets/*/lib")))
}

/// The SONAME of a shared library for this machine.
pub(super) fn soname(file: &Path) -> Result<String> {
    let wrong = |why: String| Error::machine(format!("{} cannot be linked", file.display())).because(why);
    let bytes = fs::read(file).map_err(|e| Error::io("read", file, e))?;
    let read = || -> object::read::Result<(elf::Machine, Option<String>)> {
        let data = bytes.as_slice();
        let header = FileHeader64::<Endianness>::parse(data)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, data)?;
        let mut name = None;
        if let Some((entries, strings)) = sections.dynamic(endian, data)? {
            let strings = sections.strings(endian, data, strings)?;
            for entry in entries.iter().filter(|entry| entry.tag(endian) == elf::DT_SONAME) {
                name = Some(String::from_utf8_lossy(entry.string(endian, strings)?).into_owned());
            }
        }
        Ok((header.e_machine(endian), name))
    };
    let (machine, name) = read().map_err(|_| wrong("it is no 64-bit ELF library".to_owned()))?;
    let own = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    if machine != own {
        return Err(wrong(format!("it is made for another machine than {}", std::env::consts::ARCH)));
    }
    name.ok_or_else(|| wrong("it has no SONAME".to_owned()))
}

/// The files whose content decides what this nvcc makes of a source. (cicc holds its own NVVM: no libnvvm is loaded.)
fn tools(root: &Path, nvcc: &Path) -> Result<Vec<PathBuf>, String> {
    // Debian's package keeps the programs in a folder of its own, behind a script called nvcc.
    let private = root.join("lib/nvidia-cuda-toolkit");
    let bins = [root.join("bin"), private.join("bin"), root.join("nvvm/bin")];
    let libdevices = [root.join("nvvm/libdevice"), private.join("libdevice"), private.join("bin")];
    let mut tools = vec![nvcc.to_owned()];
    if is_script(nvcc) {
        tools.extend([private.join("bin/nvcc"), root.join("bin/nvcc.bin")].into_iter().filter(|file| file.is_file()));
    }
    let wanted = [("cudafe++", &bins), ("cicc", &bins), ("ptxas", &bins), ("fatbinary", &bins), ("nvcc.profile", &bins)];
    for (name, folders) in wanted.into_iter().chain([("libdevice.10.bc", &libdevices)]) {
        let file = folders.iter().map(|dir| dir.join(name)).find(|file| file.is_file());
        tools.push(file.ok_or_else(|| format!("it has no {name}, which nvcc needs"))?);
    }
    Ok(tools)
}

/// The C++ compiler for host code, the same for nvcc (`-ccbin`) and for the link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCompiler {
    pub path: PathBuf,
    /// What `CXX` says behind the program's name, such as `-m64`. A compiler cache before it is dropped: nvcc
    /// cannot take two words, and our own store does its work.
    pub args: Vec<String>,
    /// The first line of `--version`.
    pub version: String,
    /// The driver and what it runs (cc1plus, collect2, as, ld). A Clang is one program, described by `version`, with its libraries.
    pub tools: Vec<PathBuf>,
}

/// Programs that stand before a compiler, or in its place under its name.
const WRAPPERS: &[&str] = &["ccache", "sccache", "distcc", "icecc", "cachepot", "buildcache", "kache"];

fn is_wrapper(path: &Path) -> bool {
    path.file_stem().and_then(OsStr::to_str).is_some_and(|stem| WRAPPERS.iter().any(|w| w.eq_ignore_ascii_case(stem)))
}

/// The host compiler: `CXX`, else `NVCC_CCBIN`, else `c++`, `g++` or `clang++` on `PATH`.
pub fn host_compiler(memo: &Memo) -> Result<HostCompiler> {
    let (path, args) = host_program()?;
    let mut surroundings = format!("{args:?}");
    // What a GCC driver runs depends on these, apart from the driver itself.
    for name in [env::PATH, env::COMPILER_PATH, env::GCC_EXEC_PREFIX] {
        surroundings += &format!("\n{name}={:?}", env::var(name));
    }
    let name = format!("host compiler, {}", Digest::of(surroundings.as_bytes()).short());
    let learn = || learn_host(&path, &args);
    let parse = |text: &str| serde_json::from_str::<LearntHost>(text).ok().filter(|host| host.tools.iter().all(|t| t.exists()));
    let learnt = match parse(&memo.fact(&path, &name, learn)?) {
        Some(learnt) => learnt,
        // Remembered, but a program it names is gone.
        None => {
            parse(&learn()?).ok_or_else(|| Error::machine(format!("the programs of {} are not all there", path.display())))?
        }
    };
    Ok(HostCompiler { path, args, version: learnt.version, tools: learnt.tools })
}

#[derive(Debug, Serialize, Deserialize)]
struct LearntHost {
    version: String,
    tools: Vec<PathBuf>,
}

fn host_program() -> Result<(PathBuf, Vec<String>)> {
    if let Some(value) = env::var(env::CXX) {
        let bad = |why: String| {
            Error::machine(format!("CXX is set to `{}`, which is no compiler", value.display()))
                .because(why)
                .hint("set CXX to one C++ compiler, such as g++ or /usr/bin/g++-13 (quote a path with spaces), or unset it")
        };
        return program_of(&value).map_err(bad);
    }
    if let Some(value) = env::var(env::NVCC_CCBIN) {
        let bad = |why: String| {
            Error::machine(format!("NVCC_CCBIN is set to `{}`, which is no compiler", value.display()))
                .because(why)
                .hint("set CXX or NVCC_CCBIN to one C++ compiler, or unset them")
        };
        // As nvcc reads it: a program, or the folder in which one lies.
        let dir = Path::new(&value);
        return if dir.is_dir() { program_of(dir.join("g++").as_os_str()) } else { program_of(&value) }.map_err(bad);
    }
    let found = ["c++", "g++", "clang++"].into_iter().find_map(|name| program_of(OsStr::new(name)).ok());
    found.ok_or_else(|| {
        Error::machine("no C++ compiler was found")
            .because("neither CXX nor NVCC_CCBIN is set, and PATH has no c++, g++ or clang++")
            .hint("install one: `apt-get install g++`, `dnf install gcc-c++`, `conda install gxx`; or set CXX")
    })
}

/// The program and the arguments that a value of `CXX` stands for.
fn program_of(value: &OsStr) -> Result<(PathBuf, Vec<String>), String> {
    if Path::new(value).is_absolute() && is_executable(Path::new(value)) && !is_wrapper(Path::new(value)) {
        return Ok((PathBuf::from(value), Vec::new()));
    }
    let text = value.to_str().ok_or("it is not UTF-8")?;
    let mut words = split_words(text)?;
    while words.len() > 1 && is_wrapper(Path::new(&words[0])) {
        words.remove(0);
    }
    // A path with spaces that nobody quoted: the longest head that is a program.
    if let Some(count) = (2..=words.len()).rev().find(|&count| is_executable(Path::new(&words[..count].join(" ")))) {
        let path = words[..count].join(" ");
        words.splice(..count, [path]);
    }
    let Some((program, args)) = words.split_first() else { return Err("it is empty".to_owned()) };
    if is_wrapper(Path::new(program)) {
        return Err(format!("{program} is a compiler cache without a compiler behind it"));
    }
    let path = if program.contains('/') {
        let path = std::path::absolute(program).map_err(|e| e.to_string())?;
        Some(path).filter(|path| is_executable(path))
    } else {
        // A compiler cache may stand on PATH under the compiler's name: the real one comes behind it.
        process::on_path(program).into_iter().find(|path| !path.canonicalize().is_ok_and(|real| is_wrapper(&real)))
    };
    path.map(|path| (path, args.to_vec())).ok_or_else(|| format!("there is no program {program}"))
}

/// Splits as a shell does: at spaces, not inside quotes; a backslash takes the next letter as it is.
fn split_words(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            (_, Some(q)) if letter == q => quote = None,
            ('\\', None | Some('"')) => word.get_or_insert_default().extend(letters.next()),
            (_, Some(_)) => word.get_or_insert_default().push(letter),
            ('"' | '\'', None) => {
                word.get_or_insert_default();
                quote = Some(letter);
            }
            (_, None) if letter.is_whitespace() => words.extend(word.take()),
            (_, None) => word.get_or_insert_default().push(letter),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    words.extend(word);
    Ok(words)
}

fn learn_host(path: &Path, args: &[String]) -> Result<String> {
    let bad = |why: String| {
        Error::machine(format!("the host compiler {} does not work", path.display()))
            .because(why)
            .hint("set CXX to a working g++, or install one: `apt-get install g++`, `dnf install gcc-c++`")
    };
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let family = cc::Build::new()
        .cpp(true)
        .opt_level(0)
        .target(&host)
        .host(&host)
        .cargo_metadata(false)
        .cargo_output(false)
        .inherit_rustflags(false)
        .no_default_flags(true)
        .compiler(path)
        .try_get_compiler()
        .map_err(|e| bad(e.to_string()))?;
    if !family.is_like_gnu() && !family.is_like_clang() {
        return Err(bad("it is neither a GCC nor a Clang".to_owned()));
    }
    let ask = |question: &str| -> Result<Ran> {
        let ran = process::run(Command::new(path).args(args).arg(question), ANSWER).map_err(|e| bad(e.to_string()))?;
        if ran.ok { Ok(ran) } else { Err(bad(ran.last_line())) }
    };
    let version = ask("--version")?.stdout.lines().next().unwrap_or_default().trim().to_owned();
    if version.is_empty() {
        return Err(bad("it does not say its version".to_owned()));
    }
    let mut tools = vec![path.canonicalize().map_err(|e| Error::io("resolve", path, e))?];
    for name in ["cc1plus", "collect2", "as", "ld"] {
        let answer = ask(&format!("-print-prog-name={name}"))?.stdout;
        let answer = answer.trim();
        // A bare name is one that the compiler would look up on PATH.
        let file = if answer.contains('/') { Some(PathBuf::from(answer)) } else { process::on_path(answer).into_iter().next() };
        match file.and_then(|file| file.canonicalize().ok()).filter(|file| is_executable(file)) {
            Some(file) if !tools.contains(&file) => tools.push(file),
            Some(_) => {}
            // Clang has neither; a GCC without cc1plus compiles C alone.
            None if name == "cc1plus" && !family.is_like_clang() => {
                return Err(bad("it has no cc1plus: this GCC is installed without C++".to_owned()));
            }
            None if name == "ld" => return Err(bad("it finds no linker `ld` (the package is called binutils)".to_owned())),
            None => {}
        }
    }
    Ok(serde_json::to_string(&LearntHost { version, tools }).expect("paths of programs are UTF-8 or were read as such"))
}

/// The flags that link a product to its CUDA runtime, whose folder is called `folder` where the link runs. By file name: pip
/// toolkits have no `libcudart.so`.
pub fn link_flags(cudart: &Cudart, folder: &str) -> Vec<String> {
    let file = cudart.file().file_name().unwrap_or_default().display().to_string();
    let mut flags = vec![format!("-L{folder}"), format!("-l:{file}")];
    if let Cudart::Static { .. } = cudart {
        // Not one of its symbols may be seen: another file of the process would be bound to this runtime.
        flags.extend(["-lrt".to_owned(), "-lpthread".to_owned(), "-ldl".to_owned(), format!("-Wl,--exclude-libs,{file}")]);
    }
    flags
}

/// The functions of the CUDA driver that this toolkit's `cuda.h` declares, with the names that they have in the library.
pub fn driver_functions(toolkit: &Toolkit) -> Result<BTreeSet<String>> {
    let header = toolkit.include.join("cuda.h");
    let text = fs::read_to_string(&header).map_err(|e| Error::io("read", &header, e))?;
    let declared = text.split("CUDAAPI ").skip(1).filter_map(|rest| rest.split('(').next());
    // `#define cuMemAlloc cuMemAlloc_v2`: what a caller writes, and what the library exports.
    let renamed = text.lines().filter_map(|line| line.strip_prefix("#define cu")?.split_whitespace().nth(1));
    Ok(declared.chain(renamed).filter(|name| name.starts_with("cu")).map(str::to_owned).collect())
}

/// Where the host compiler's linker finds the library called `name`; None where it does not.
pub fn host_library(host: &HostCompiler, name: &str) -> Option<PathBuf> {
    let mut command = compiler_command(&host.path);
    command.args(&host.args).arg(format!("-print-file-name={name}"));
    let ran = process::run(&mut command, ANSWER).ok().filter(|ran| ran.ok)?;
    // What the compiler does not find it prints as it was asked for.
    Some(PathBuf::from(ran.stdout.trim())).filter(|path| path.is_absolute() && path.is_file())
}

/// Proves that the host compiler compiles against the toolkit's headers and links `cudart`, with the flags of the real link.
pub fn probe_link(toolkit: &Toolkit, cudart: &Cudart, host: &HostCompiler, staging: &Path) -> Result<()> {
    let dir = probe_folder(staging)?;
    let text = "#include <cuda_runtime_api.h>\n#include <string>\nextern \"C\" int probe() { return std::string(cudaGetErrorString(cudaGetLastError())).empty(); }\n";
    write(dir.path(), "probe.cpp", text)?;
    super::link(&toolkit.include, &dir.path().join("include"))?;
    super::link(cudart.file().parent().unwrap_or(&toolkit.root), &dir.path().join("lib"))?;
    let mut command = compiler_command(&host.path);
    command.args(&host.args).args(["-shared", "-fPIC", "-Wl,--no-undefined", "-o", "probe.so", "-I", "include", "probe.cpp"]);
    command.args(link_flags(cudart, "lib"));
    probe(&mut command, dir.path(), "a small library does not compile and link against this toolkit", toolkit, host)
}

/// Proves that nvcc compiles an empty kernel for `target` with this host compiler. Takes about half a second.
pub fn probe_nvcc(toolkit: &Toolkit, host: &HostCompiler, target: Target, staging: &Path) -> Result<()> {
    let dir = probe_folder(staging)?;
    write(dir.path(), "probe.cu", "__global__ void probe(int* p) { *p = 1; }\n")?;
    let mut command = toolkit.command();
    if let Ok(below) = toolkit.nvcc.strip_prefix(&toolkit.root) {
        // By the name that it has in the build folder.
        super::link(&toolkit.root, &dir.path().join(view::CUDA))?;
        command.arg0(Path::new(view::CUDA).join(below));
    }
    command.arg("-ccbin").arg(&host.path).args(host.args.iter().map(|arg| format!("-Xcompiler={arg}")));
    command.args(["-std=c++17", &target.gencode(), "-c", "-o", "probe.o", "probe.cu"]);
    probe(&mut command, dir.path(), &format!("nvcc does not compile an empty kernel for {target}"), toolkit, host)
}

fn write(dir: &Path, name: &str, text: &str) -> Result<()> {
    let file = dir.join(name);
    fs::write(&file, text).map_err(|e| Error::io("write", &file, e))
}

fn probe_folder(staging: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("probe-").tempdir_in(staging).map_err(|e| Error::io("make a folder in", staging, e))
}

fn probe(command: &mut Command, dir: &Path, what: &str, toolkit: &Toolkit, host: &HostCompiler) -> Result<()> {
    // In the staging folder, where the build will write too: a full disk shows now. In English: the text is read below.
    command.current_dir(dir).env("TMPDIR", ".").env("LC_ALL", "C");
    let failed = |why: String| Error::machine(what).because(why);
    let ran = process::run(command, PROBE).map_err(|e| failed(format!("{}: {e}", command.get_program().display())))?;
    if ran.ok {
        return Ok(());
    }
    let said = format!("{}\n{}", ran.stderr, ran.stdout);
    let last = || said.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned);
    let first = diagnose(&said, None).first_error.or_else(last).unwrap_or_else(|| "it printed nothing".to_owned());
    let error = if said.contains("nsupported gpu architecture") { Error::unsupported(what) } else { failed(String::new()) };
    Err(advise(Error::new(error.exit(), what).because(first), &said, toolkit, host))
}

/// Adds what helps against the fault that `said` shows.
fn advise(error: Error, said: &str, toolkit: &Toolkit, host: &HostCompiler) -> Error {
    let says = |words: &[&str]| words.iter().any(|word| said.contains(word));
    let error = if says(&["unsupported GNU version", "unsupported clang version"]) {
        error.hint(format!(
            "CUDA {} does not take this host compiler ({}): set CXX to an older one, such as g++-13, or name a newer toolkit with --toolkit",
            toolkit.version, host.version
        ))
    } else if says(&["nsupported gpu architecture"]) {
        error.hint("name a newer toolkit with --toolkit, or leave it out")
    } else if says(&["No space left"]) {
        error.hint("free some disk space, or set FI_ARCH_HOME to a folder on another disk")
    } else if says(&["cannot find -l", "incompatible", "file in wrong format", "file not recognized"]) {
        error.hint(format!(
            "the CUDA runtime of this toolkit ({}) cannot be linked: name another with --toolkit",
            toolkit.root.display()
        ))
    } else if says(&["fatal error: string", "'string' file not found", "cannot find 'ld'", "cc1plus"]) {
        error.hint("the host compiler is not whole: `apt-get install g++`, `dnf install gcc-c++`, or set CXX to another")
    } else {
        error
    };
    error.hint(format!(
        "toolkit {} ({}), host compiler {} ({})",
        toolkit.root.display(),
        toolkit.origin,
        host.path.display(),
        host.version
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compilers_name_is_split_as_a_shell_does() {
        assert_eq!(
            split_words(r#"'/opt/my gcc/g++' -m64  "-Da=b c" x\ y"#).unwrap(),
            ["/opt/my gcc/g++", "-m64", "-Da=b c", "x y"]
        );
        assert_eq!(split_words("  ").unwrap(), Vec::<String>::new());
        assert!(split_words("'g++").is_err());
    }

    #[test]
    fn folders_order_by_version_and_not_by_text() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cuda-9.2", "cuda-12.8", "cuda-13", "cuda-12.10", "cuda-old", "cuda"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let names: Vec<String> =
            versioned(dir.path(), "cuda-").iter().map(|p| p.file_name().unwrap().display().to_string()).collect();
        assert_eq!(names, ["cuda-13", "cuda-12.10", "cuda-12.8", "cuda-9.2"]);
    }

    #[test]
    fn a_toolkit_may_be_named_by_its_nvcc_its_bin_or_in_quotes_but_not_by_a_list() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap().join("cuda 13");
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::write(root.join("bin/nvcc"), "").unwrap();
        let text = root.display().to_string();
        for value in
            [text.clone(), format!("{text}/bin"), format!("{text}/bin/nvcc"), format!("\"{text}\""), format!(" '{text}' ")]
        {
            assert_eq!(root_of(OsStr::new(&value)), Ok(root.clone()), "{value}");
        }
        assert!(root_of(OsStr::new(&format!("{text}:{text}"))).unwrap_err().contains("a list"));
        assert!(root_of(dir.path().join("absent").as_os_str()).unwrap_err().contains("there is no"));
    }
}
