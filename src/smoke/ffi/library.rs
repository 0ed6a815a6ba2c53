//! Shared objects, loaded at run time and never closed.
//!
//! Unsafe, because loading one runs its constructors, and a symbol has the type that the caller gives it. What keeps it sound:
//! the user named the library or the survey found it, and callers give the type that the library's public header declares.
#![allow(unsafe_code)]

use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

/// Loads a shared object so that what is loaded later finds its symbols; stays loaded.
pub(super) fn load(path: &Path) -> Result<Library, String> {
    // Running a library's constructors is what loading one means.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| within(path, &reason(&error)))
}

/// Whether the dynamic loader finds a library by this name, and can load it.
pub fn is_found(name: &str) -> bool {
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.is_ok()
}

/// A symbol of the library, as the type that its header declares for the name.
pub(super) fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    unsafe { library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol).map_err(|error| reason(&error))
}

/// Says that the library cannot be used, and why.
pub(super) fn within(path: &Path, why: &str) -> String {
    let path = path.display().to_string();
    // The loader mostly names the file itself.
    if why.contains(&path) { format!("cannot load {why}") } else { format!("cannot load {path}: {why}") }
}

/// What the dynamic loader said: the error itself only says which of its functions failed.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
