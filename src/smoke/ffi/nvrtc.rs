//! NVRTC: CUDA source in, machine code for one GPU out, at run time. Neither nvcc nor a C++ compiler is needed.
//!
//! Unsafe, because it calls C functions through pointers. What keeps it sound: their types are those of `nvrtc.h`; texts that go
//! in end with a zero and live as long as the call; buffers have the size that NVRTC asked for; a program is destroyed once.
//!
//! The functions are looked up here and not by cudarc, which takes the first `libnvrtc.so` that the dynamic loader finds: here the
//! file that was found or named is the one that compiles.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::os::unix::Library;

use super::library::{load, symbol, within};

// A result is taken as a number: a later NVRTC may return one that no list of ours has.
type Create = unsafe extern "C" fn(
    *mut nvrtcProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(nvrtcProgram, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_int;
type Fetch = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut nvrtcProgram) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// A libnvrtc.
#[derive(Debug)]
pub struct Nvrtc {
    path: PathBuf,
    version: (u32, u32),
    create: Create,
    compile: Compile,
    log_size: Size,
    log: Fetch,
    cubin_size: Size,
    cubin: Fetch,
    destroy: Destroy,
    error_string: ErrorString,
    _libraries: Vec<Library>,
}

impl Nvrtc {
    /// Loads a libnvrtc, by its path or by a name that the dynamic loader knows.
    pub fn open(path: &Path) -> Result<Self, String> {
        // NVRTC asks the dynamic loader for its other half by name, which does not find the one beside it in a wheel.
        let builtins = beside(path).iter().map(|file| load(file)).collect::<Result<Vec<_>, _>>()?;
        let library = load(path)?;
        let no = |why: String| within(path, &why);
        let version: Version = symbol(&library, "nvrtcVersion").map_err(no)?;
        let (mut major, mut minor) = (0, 0);
        if unsafe { version(&mut major, &mut minor) } != 0 {
            return Err(within(path, "it does not tell its version"));
        }
        Ok(Self {
            path: path.to_owned(),
            version: (major.unsigned_abs(), minor.unsigned_abs()),
            create: symbol(&library, "nvrtcCreateProgram").map_err(no)?,
            compile: symbol(&library, "nvrtcCompileProgram").map_err(no)?,
            log_size: symbol(&library, "nvrtcGetProgramLogSize").map_err(no)?,
            log: symbol(&library, "nvrtcGetProgramLog").map_err(no)?,
            cubin_size: symbol(&library, "nvrtcGetCUBINSize").map_err(no)?,
            cubin: symbol(&library, "nvrtcGetCUBIN").map_err(no)?,
            destroy: symbol(&library, "nvrtcDestroyProgram").map_err(no)?,
            error_string: symbol(&library, "nvrtcGetErrorString").map_err(no)?,
            _libraries: builtins.into_iter().chain([library]).collect(),
        })
    }

    /// The CUDA that it belongs to, such as (13, 0).
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Machine code (a cubin) of `source` for the GPU of `sm`, 90 for 9.0. `name` is what messages call the source. There are no
    /// headers but those that NVRTC itself has. The error holds the compiler's messages.
    pub fn compile(&self, name: &str, source: &str, options: &[&str], sm: u32) -> Result<Vec<u8>, String> {
        let text = |text: &str| CString::new(text).map_err(|_| format!("{name} or an option has a zero in it"));
        let (source, title) = (text(source)?, text(name)?);
        let target = text(&format!("--gpu-architecture=sm_{sm}"))?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = [&target].into_iter().chain(&options).map(|option| option.as_ptr()).collect();

        let mut program = Program { nvrtc: self, program: ptr::null_mut() };
        let made = unsafe { (self.create)(&mut program.program, source.as_ptr(), title.as_ptr(), 0, ptr::null(), ptr::null()) };
        self.check(made, "nvrtcCreateProgram")?;
        let compiled = unsafe { (self.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        if let Err(why) = self.check(compiled, "nvrtcCompileProgram") {
            let log = program.fetch(self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_end_matches('\0').trim();
            let (major, minor) = self.version;
            return Err(format!("{} {major}.{minor} does not compile {name} for sm_{sm}: {why}\n{log}", self.path.display()));
        }
        let cubin = program.fetch(self.cubin_size, self.cubin)?;
        if cubin.is_empty() { Err(format!("{} made no code of {name} for sm_{sm}", self.path.display())) } else { Ok(cubin) }
    }

    fn check(&self, result: c_int, call: &str) -> Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        let text = unsafe { (self.error_string)(result) };
        // What it returns are constants of the library.
        let text = if text.is_null() { "".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() };
        Err(format!("{call}: {text} ({result})"))
    }
}

/// The libraries of built-in functions in the folder of a libnvrtc.
fn beside(path: &Path) -> Vec<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let files = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = files
        .filter(|file| file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so."))
        .map(|file| file.path())
        .collect();
    found.sort();
    found
}

/// Destroyed when it goes.
struct Program<'n> {
    nvrtc: &'n Nvrtc,
    program: nvrtcProgram,
}

impl Program<'_> {
    /// What `fetch` writes into as many bytes as `size` says.
    fn fetch(&self, size: Size, fetch: Fetch) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        self.nvrtc.check(unsafe { size(self.program, &mut bytes) }, "the size of NVRTC's output")?;
        let mut held = vec![0; bytes];
        self.nvrtc.check(unsafe { fetch(self.program, held.as_mut_ptr().cast()) }, "NVRTC's output")?;
        Ok(held)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_or_is_none_is_an_error_that_names_it() {
        let error = Nvrtc::open(Path::new("/nowhere/libnvrtc.so.13")).unwrap_err();
        assert!(error.contains("/nowhere/libnvrtc.so.13"), "{error}");
        let error = Nvrtc::open(Path::new("libc.so.6")).unwrap_err();
        assert!(error.contains("libc.so.6") && error.contains("nvrtcVersion"), "{error}");
    }
}
