//! Every environment variable that fi-arch reads, and the folder of everything it keeps.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use crate::error::{Error, Result};

/// The folder of everything that fi-arch keeps (store, fetched wheels, logs).
pub const FI_ARCH_HOME: &str = "FI_ARCH_HOME";
/// For tests alone: which step of an installation goes wrong, and how (`step:7:kill`, `step:7:enospc`), or what goes wrong in a
/// run on a GPU (`smoke:stride`; all of them in `src/smoke/fault.rs`).
pub const FI_ARCH_FAULT: &str = "FI_ARCH_FAULT";
/// Log filter of `tracing`, such as `debug` or `fi_arch::build=trace`.
pub const FI_ARCH_LOG: &str = "FI_ARCH_LOG";
/// Caps the memory that compile jobs may plan with, in MiB. A cgroup limit is seen without it.
pub const FI_ARCH_MEMORY_MIB: &str = "FI_ARCH_MEMORY_MIB";
/// Read by the shim in Python, not by the program: set to anything but nothing and `0`, nothing of an activation is in force
/// in that process.
pub const FI_ARCH_DISABLE: &str = "FI_ARCH_DISABLE";
/// Read by the shim in Python, not by the program: set to anything but nothing and `0`, a process that imports FlashInfer or an
/// engine ends with exit code 3 where anything is not as it was verified.
pub const FI_ARCH_REQUIRE: &str = "FI_ARCH_REQUIRE";
/// A CUDA toolkit, as every CUDA project reads it.
pub const CUDA_HOME: &str = "CUDA_HOME";
/// The other common name of `CUDA_HOME`; FlashInfer reads it second.
pub const CUDA_PATH: &str = "CUDA_PATH";
/// How many queues a process has on a GPU. Set for `smoke`'s workers, whose ranks wait for each other.
pub const CUDA_DEVICE_MAX_CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Whether NCCL uses NVLink multicast (NVLS). `bench`'s workers get 0 where it is not set.
pub const NCCL_NVLS_ENABLE: &str = "NCCL_NVLS_ENABLE";
/// How many threads work on the host's side. Set for `smoke`'s and `bench`'s workers, which share the cores, unless it is set.
pub const RAYON_NUM_THREADS: &str = "RAYON_NUM_THREADS";
/// The active virtual environment.
pub const VIRTUAL_ENV: &str = "VIRTUAL_ENV";
/// The active conda environment.
pub const CONDA_PREFIX: &str = "CONDA_PREFIX";
/// Where pyenv keeps its Pythons and the name of the global one.
pub const PYENV_ROOT: &str = "PYENV_ROOT";
/// Python's folder for a user's own packages, `~/.local` without it.
pub const PYTHONUSERBASE: &str = "PYTHONUSERBASE";
/// Hides a user's own packages from Python when set to anything.
pub const PYTHONNOUSERSITE: &str = "PYTHONNOUSERSITE";
/// Folders that Python searches before its own.
pub const PYTHONPATH: &str = "PYTHONPATH";
/// Keeps the folder of a program, or the working folder, from being searched for packages.
pub const PYTHONSAFEPATH: &str = "PYTHONSAFEPATH";
/// Where programs are looked for.
pub const PATH: &str = "PATH";
/// The host C++ compiler.
pub const CXX: &str = "CXX";
/// The host compiler that nvcc takes without `-ccbin`; distributions whose default compiler is too new for CUDA set it.
pub const NVCC_CCBIN: &str = "NVCC_CCBIN";
/// Variables that would slip flags, include paths or libraries into a compile behind the plan's back: whatever fi-arch starts to
/// compile or to link does not get them. `COMPILER_PATH` and `GCC_EXEC_PREFIX` stay: the host compiler's programs were found with
/// them, so the key knows what they choose.
pub const SILENT_INPUTS: [&str; 9] = [
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "CUDA_CACHE_DISABLE",
];
/// Where a GCC driver looks for the programs it runs.
pub const COMPILER_PATH: &str = "COMPILER_PATH";
/// The other place where a GCC driver looks for the programs it runs.
pub const GCC_EXEC_PREFIX: &str = "GCC_EXEC_PREFIX";
/// FlashInfer's own list of targets, which it reads at import, set to nothing as well.
pub const FLASHINFER_CUDA_ARCH_LIST: &str = "FLASHINFER_CUDA_ARCH_LIST";
/// Keeps FlashInfer from compiling when set to anything, `0` too.
pub const FLASHINFER_DISABLE_JIT: &str = "FLASHINFER_DISABLE_JIT";
/// Keeps FlashInfer from comparing its version with those of its companion packages.
pub const FLASHINFER_DISABLE_VERSION_CHECK: &str = "FLASHINFER_DISABLE_VERSION_CHECK";
/// Where FlashInfer keeps `.cache/flashinfer`; the home folder without it.
pub const FLASHINFER_WORKSPACE_BASE: &str = "FLASHINFER_WORKSPACE_BASE";
/// Where torch keeps extensions that it compiled; `~/.cache/torch_extensions` without it.
pub const TORCH_EXTENSIONS_DIR: &str = "TORCH_EXTENSIONS_DIR";
/// Makes FlashInfer take torch's symmetric memory for its workspace instead of its own, when set to 1.
pub const FLASHINFER_CONFIDENTIAL_COMPUTE: &str = "FLASHINFER_CONFIDENTIAL_COMPUTE";
/// The settings of torch's allocator; the older name first.
pub const TORCH_ALLOC_CONF: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];
/// The GPUs that a process may see: numbers or names; none where it is set to nothing.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Where the dynamic loader looks first.
pub const LD_LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
/// Disables colour when set to anything (<https://no-color.org>).
pub const NO_COLOR: &str = "NO_COLOR";

/// The value of `name`; an empty one counts as unset, as shells mean it.
pub fn var(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether `name` is set to anything but nothing.
pub fn is_set(name: &str) -> bool {
    var(name).is_some()
}

/// The variables that a process will have: those of this process, with some changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vars {
    /// `env -i`: nothing is handed on.
    cleared: bool,
    changed: BTreeMap<String, Option<OsString>>,
}

impl Vars {
    /// The value as it will be; `Some` of nothing where it is set to nothing.
    pub fn raw(&self, name: &str) -> Option<OsString> {
        match self.changed.get(name) {
            Some(value) => value.clone(),
            None if self.cleared => None,
            None => std::env::var_os(name),
        }
    }

    /// As [`var`]: an empty value counts as unset.
    pub fn var(&self, name: &str) -> Option<OsString> {
        self.raw(name).filter(|value| !value.is_empty())
    }

    /// The value as text, where it is set to anything.
    pub fn text(&self, name: &str) -> Option<String> {
        self.var(name).map(|value| value.to_string_lossy().into_owned())
    }

    /// Whether `name` is set to anything but nothing.
    pub fn is_set(&self, name: &str) -> bool {
        self.var(name).is_some()
    }

    /// Whether a switch is on: set, and to nothing that says no.
    pub fn is_on(&self, name: &str) -> bool {
        self.text(name)
            .is_some_and(|value| !matches!(value.trim().to_ascii_lowercase().as_str(), "" | "0" | "false" | "no" | "off"))
    }

    /// Whether one of our own switches is on: set to anything but nothing and `0`, as the shim reads it.
    pub fn is_switched(&self, name: &str) -> bool {
        self.text(name).is_some_and(|value| value != "0")
    }

    pub fn set(&mut self, name: &str, value: impl Into<OsString>) {
        self.changed.insert(name.to_owned(), Some(value.into()));
    }

    pub fn unset(&mut self, name: &str) {
        self.changed.insert(name.to_owned(), None);
    }

    /// Forgets everything, as `env -i` does.
    pub fn clear(&mut self) {
        *self = Self { cleared: true, changed: BTreeMap::new() };
    }
}

/// The folder of everything that fi-arch keeps: `FI_ARCH_HOME`, else the platform's cache folder `/fi-arch`.
pub fn home() -> Result<PathBuf> {
    let home = match var(FI_ARCH_HOME) {
        Some(dir) => {
            let dir = PathBuf::from(dir);
            std::path::absolute(&dir).map_err(|e| Error::io("resolve", &dir, e))?
        }
        None => dirs::cache_dir().map(|dir| dir.join("fi-arch")).ok_or_else(|| {
            Error::machine("no folder to keep artifacts in")
                .because("neither FI_ARCH_HOME, XDG_CACHE_HOME nor HOME is set")
                .hint("set FI_ARCH_HOME to a folder that can be written")
        })?,
    };
    if home.to_str().is_none() {
        return Err(Error::machine(format!("artifacts cannot be kept in {}", home.display()))
            .because("its name is not UTF-8, and JSON can name no file in it")
            .hint("set FI_ARCH_HOME to a folder whose name is UTF-8"));
    }
    Ok(home)
}
