//! Which libraries a worker loads: libtvm_ffi and libcudart before the artifact, libnvrtc for our own kernels,
//! libnccl to compare with.

use std::path::{Path, PathBuf};

use super::ffi::library;
use crate::build::provision::Set;
use crate::cubin::Linkage;
use crate::env;
use crate::error::{Error, Result};
use crate::survey::{self, Environment};

const TVM_FFI: &str = "libtvm_ffi.so";

/// The library that a user named, that the environment has, or that fi-arch fetched for a build.
pub fn tvm_ffi(named: Option<&Path>, environment: Option<&Environment>, home: &Path) -> Result<PathBuf> {
    if let Some(named) = named {
        let folders = ["", "lib", "tvm_ffi/lib"].map(|dir| named.join(dir).join(TVM_FFI));
        let found = [named.to_owned()].into_iter().chain(folders).find(|file| file.is_file());
        return found.ok_or_else(|| {
            Error::usage(format!("no {TVM_FFI} at {}", named.display())).hint("name the file, or a folder that holds it")
        });
    }
    let mut places = Vec::new();
    if let Some(found) = environment.map(survey::tvm_ffi).transpose()?.flatten() {
        places.push(found.package.join("lib").join(TVM_FFI));
    }
    if let Some(site) = Set::tvm_ffi()?.installed(home) {
        places.push(site.join("tvm_ffi/lib").join(TVM_FFI));
    }
    places.into_iter().find(|file| file.is_file()).ok_or_else(|| {
        Error::machine(format!("no {TVM_FFI} is here")).because("the artifact's functions are called through it").hint(
            "name one with --tvm-ffi FILE, name an environment with apache-tvm-ffi with --env DIR, or run a build first, which fetches one",
        )
    })
}

/// The libcudart that the artifact needs: named, the environment's, the fetched toolkit's or that of `CUDA_HOME`. None where
/// the artifact holds its own, and where only the dynamic loader may still find one.
pub fn cudart(
    named: Option<&Path>,
    linkage: Option<&Linkage>,
    environment: Option<&Environment>,
    home: &Path,
) -> Result<Option<PathBuf>> {
    if let Some(named) = named {
        return file(named).map(Some);
    }
    let Some(soname) = linkage.and_then(|linkage| linkage.needed.iter().find(|name| name.starts_with("libcudart.so"))) else {
        return Ok(None);
    };
    let mut places: Vec<PathBuf> = environment.map(survey::cudarts).unwrap_or_default();
    places.retain(|file| file.file_name().is_some_and(|name| name.to_string_lossy() == **soname));
    places.extend(Set::cuda()?.installed(home).map(|root| root.join("lib").join(soname)));
    places.extend(of_toolkit().map(|dir| dir.join(soname)));
    Ok(places.into_iter().find(|file| file.is_file()))
}

/// The libnvrtc that compiles our own kernels: named, the environment's, that of `CUDA_HOME`, or one that the dynamic loader
/// finds (by its name then).
pub fn nvrtc(named: Option<&Path>, environment: Option<&Environment>) -> Result<PathBuf> {
    find(named, environment, "cuda_nvrtc", &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]).map_err(|missing| {
        missing.because("it compiles our own kernels for this GPU").hint(
            "name one with --nvrtc FILE, or an environment with torch, which brings one, with --env DIR, or a toolkit with CUDA_HOME",
        )
    })
}

/// The libnccl that the fused path is compared with, found as [`nvrtc`] is.
pub fn nccl(named: Option<&Path>, environment: Option<&Environment>) -> Result<PathBuf> {
    find(named, environment, "nccl", &["libnccl.so.2", "libnccl.so"]).map_err(|missing| {
        missing
            .because("the fused path is compared with its all-reduce")
            .hint("name one with --nccl FILE, or an environment with torch, which brings one, with --env DIR")
    })
}

/// A library of NVIDIA's, of which `names` are the names that the dynamic loader may know. `wheel` is the folder of CUDA 12's wheel.
fn find(named: Option<&Path>, environment: Option<&Environment>, wheel: &str, names: &[&str]) -> Result<PathBuf> {
    let stem = names[names.len() - 1];
    if let Some(named) = named {
        return file(named);
    }
    let of_environment = environment.map(|environment| survey::cuda_libraries(environment, wheel, stem)).unwrap_or_default();
    let of_toolkit = of_toolkit().flat_map(|dir| names.iter().map(|name| dir.join(name)).collect::<Vec<_>>());
    if let Some(file) = of_environment.into_iter().chain(of_toolkit).find(|file| file.is_file()) {
        return Ok(file);
    }
    let found = names.iter().find(|name| library::is_found(name));
    found.map(PathBuf::from).ok_or_else(|| Error::machine(format!("no {stem} is here")))
}

/// A file that a user named: its absolute path.
fn file(named: &Path) -> Result<PathBuf> {
    if named.is_file() {
        std::path::absolute(named).map_err(|error| Error::io("resolve", named, error))
    } else {
        Err(Error::usage(format!("no such file: {}", named.display())))
    }
}

/// The folders of libraries of the toolkit that the environment names.
fn of_toolkit() -> impl Iterator<Item = PathBuf> {
    let roots = [env::CUDA_HOME, env::CUDA_PATH].into_iter().filter_map(|variable| env::var(variable).map(PathBuf::from));
    roots.flat_map(|root| ["lib64", "lib"].map(|dir| root.join(dir)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needing(names: &[&str]) -> Linkage {
        Linkage { needed: names.iter().map(|name| (*name).to_owned()).collect(), ..Linkage::default() }
    }

    #[test]
    fn the_library_may_be_named_by_file_or_by_folder() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("lib");
        std::fs::create_dir(&lib).unwrap();
        let file = lib.join(TVM_FFI);
        std::fs::write(&file, "").unwrap();
        for named in [dir.path(), &lib, &file] {
            assert_eq!(tvm_ffi(Some(named), None, dir.path()).unwrap(), file);
        }
        assert_eq!(tvm_ffi(Some(&dir.path().join("no")), None, dir.path()).unwrap_err().exit() as u8, 2);
        assert_eq!(tvm_ffi(None, None, dir.path()).unwrap_err().exit() as u8, 3);
    }

    #[test]
    fn the_runtime_is_the_one_that_the_artifact_needs_and_none_where_it_needs_none() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("nvidia/cuda_runtime/lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join("libcudart.so.12"), "").unwrap();
        let environment = Environment::of_folder(dir.path());
        let found = |names: &[&str]| cudart(None, Some(&needing(names)), Some(&environment), dir.path()).unwrap();
        assert_eq!(found(&["libcudart.so.12", "libc.so.6"]), Some(lib.join("libcudart.so.12")));
        assert_eq!(found(&["libc.so.6"]), None);
        assert_ne!(found(&["libcudart.so.13"]), Some(lib.join("libcudart.so.12")));
    }
}
