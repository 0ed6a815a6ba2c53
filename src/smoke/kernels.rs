//! Kernels of ours: CUDA source in the program, compiled by NVRTC for the GPU at hand, once a run. Workers load what it made.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use tempfile::NamedTempFile;

use super::ffi::nvrtc::Nvrtc;
use crate::error::Error;

/// What NVRTC compiles.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// What messages of the compiler call it.
    pub name: &'static str,
    pub text: &'static str,
    pub options: &'static [&'static str],
}

/// Machine code of ours, in a file that goes with it.
#[derive(Debug)]
pub struct Compiled {
    cubin: NamedTempFile,
    /// The CUDA of what compiled it.
    pub nvrtc: (u32, u32),
}

impl Compiled {
    /// The file that workers load.
    pub fn path(&self) -> &Path {
        self.cubin.path()
    }
}

/// Compiles for a GPU of `sm`, beside what the caller does next. The error holds the compiler's messages.
pub fn compile(nvrtc: PathBuf, source: Source, sm: u32) -> Compiling {
    Compiling(std::thread::spawn(move || {
        let nvrtc = Nvrtc::open(&nvrtc)?;
        let code = nvrtc.compile(source.name, source.text, source.options, sm)?;
        let cubin = NamedTempFile::new().and_then(|mut file| file.write_all(&code).map(|()| file));
        let cubin = cubin.map_err(|error| format!("cannot write the code of {} to a file: {error}", source.name))?;
        Ok(Compiled { cubin, nvrtc: nvrtc.version() })
    }))
}

/// Kernels while they are compiled.
#[derive(Debug)]
pub struct Compiling(JoinHandle<Result<Compiled, String>>);

impl Compiling {
    pub fn join(self) -> Result<Compiled, String> {
        self.0.join().expect("compiling does not panic")
    }
}

/// Why nothing can be run with them.
pub fn unusable(why: String) -> Error {
    Error::machine("our kernels cannot be used on this GPU")
        .because(why)
        .hint("name another compiler with --nvrtc FILE, or leave it out; the one of torch's environment (--env DIR) belongs to its driver")
}
