//! Finds FlashInfer, tvm-ffi and torch in an environment: by their files and metadata, without importing them.

use std::fs;
use std::path::{Path, PathBuf};

use super::environment::Environment;
use crate::error::{Error, Result};
use crate::target::CudaVersion;

/// A FlashInfer whose sources are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlashInfer {
    /// The folder `flashinfer`, which holds `data/` and `jit/`.
    pub package: PathBuf,
    /// Its release number; `unknown` for a tree that states none.
    pub version: String,
    /// Its metadata folder; none for a source tree or an unpacked archive without one.
    pub dist_info: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TvmFfi {
    /// The folder `tvm_ffi`, which holds `include/` and `lib/`.
    pub package: PathBuf,
    pub version: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// Its folder.
    pub package: PathBuf,
    pub version: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torch {
    /// With its local part, such as `2.9.1+cu128`.
    pub version: String,
    /// The CUDA it was built with; none for a CPU or ROCm build.
    pub cuda: Option<CudaVersion>,
    /// Which `std::string` its libraries use (`_GLIBCXX_USE_CXX11_ABI`); none where it does not say.
    pub cxx11_abi: Option<bool>,
}

/// The FlashInfer that `import flashinfer` finds in `env`.
pub fn flashinfer(env: &Environment) -> Result<Option<FlashInfer>> {
    let Some(found) = Search::new(env).find("flashinfer", "flashinfer-python")? else { return Ok(None) };
    whole(&found.package)?;
    Ok(Some(FlashInfer { version: found.flashinfer_version()?, package: found.package, dist_info: found.dist_info }))
}

/// The FlashInfer at a path the user names: a site-packages folder, the folder `flashinfer` itself, an unpacked wheel, or
/// a source tree that was installed editable.
pub fn flashinfer_at(path: &Path) -> Result<FlashInfer> {
    let path = std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))?;
    let no = |why: String| {
        Error::usage(format!("no FlashInfer at {}", path.display()))
            .because(why)
            .hint("name a site-packages folder, the folder `flashinfer` in it, an unpacked wheel, or a source tree")
    };
    if path.is_file() {
        let error = no("it is a file".to_owned());
        let wheel = path.extension().is_some_and(|ext| ext == "whl");
        return Err(if wheel { error.hint("unpack a wheel first: python3 -m zipfile -e FILE.whl FOLDER") } else { error });
    }
    if !path.is_dir() {
        return Err(no("there is no such folder".to_owned()));
    }
    let is_package = |dir: &Path| dir.join("__init__.py").is_file();
    let package = if is_package(&path.join("flashinfer")) {
        path.join("flashinfer")
    } else if path.ends_with("flashinfer") && is_package(&path) {
        path.clone()
    } else if path.join("flashinfer").is_dir() {
        return Err(no("its folder `flashinfer` has no __init__.py: a leftover of an uninstalled FlashInfer".to_owned()));
    } else {
        return Err(no("it holds no folder `flashinfer` with an __init__.py".to_owned()));
    };
    whole(&package)?;
    let site = package.parent().unwrap_or(&path);
    let dist_info = only_record(site, "flashinfer-python")?;
    let found = Found { package, dist_info, editable: false };
    Ok(FlashInfer { version: found.flashinfer_version()?, package: found.package, dist_info: found.dist_info })
}

/// The tvm-ffi that `import tvm_ffi` finds in `env`.
pub fn tvm_ffi(env: &Environment) -> Result<Option<TvmFfi>> {
    let Some(found) = Search::new(env).find("tvm_ffi", "apache-tvm-ffi")? else { return Ok(None) };
    let version = match &found.dist_info {
        Some(dir) => recorded_version(dir)?,
        None => python_string(&read(&found.package.join("_version.py")), "__version__").unwrap_or_else(unknown),
    };
    Ok(Some(TvmFfi { package: found.package, version }))
}

/// Any package: what `import module` finds, and what the record of `distribution` says its version is.
pub fn package(env: &Environment, module: &str, distribution: &str) -> Result<Option<Package>> {
    let Some(found) = Search::new(env).find(module, distribution)? else { return Ok(None) };
    let version = found.dist_info.as_deref().map_or_else(|| Ok(unknown()), recorded_version)?;
    Ok(Some(Package { package: found.package, version }))
}

/// The metadata folder of `distribution`, wherever the package itself lies.
pub fn record(env: &Environment, distribution: &str) -> Result<Option<PathBuf>> {
    Search::new(env).record(distribution)
}

/// The tvm-ffi in one folder like a site-packages.
pub fn tvm_ffi_in(site: &Path) -> Result<Option<TvmFfi>> {
    tvm_ffi(&Environment::of_folder(site))
}

/// The torch that `import torch` finds in `env`.
pub fn torch(env: &Environment) -> Result<Option<Torch>> {
    let Some(found) = Search::new(env).find("torch", "torch")? else { return Ok(None) };
    let stated = read(&found.package.join("version.py"));
    let version = match (python_string(&stated, "__version__"), &found.dist_info) {
        (Some(version), _) => version,
        (None, Some(dir)) => recorded_version(dir)?,
        (None, None) => unknown(),
    };
    let cuda = python_string(&stated, "cuda").and_then(|text| CudaVersion::parse(&text));
    let cmake = read(&found.package.join("share/cmake/Torch/TorchConfig.cmake"));
    let cxx11_abi = cmake.split_once("_GLIBCXX_USE_CXX11_ABI=").and_then(|(_, rest)| match rest.as_bytes().first() {
        Some(b'0') => Some(false),
        Some(b'1') => Some(true),
        _ => None,
    });
    Ok(Some(Torch { version, cuda, cxx11_abi }))
}

/// The CUDA runtimes (`libcudart.so.12`, …) that the packages of `env` bring. torch loads the one that it was built with; others may
/// lie beside it.
pub fn cudarts(env: &Environment) -> Vec<PathBuf> {
    cuda_libraries(env, "cuda_runtime", "libcudart.so.")
}

/// The libraries whose file name begins with `name` that the packages of `env` bring: those of NVIDIA's wheels in the order in
/// which Python would find them, then those of a conda prefix. CUDA 12's wheels have a folder for each library, `wheel`; CUDA 13's
/// have one for all, `cu13`.
pub fn cuda_libraries(env: &Environment, wheel: &str, name: &str) -> Vec<PathBuf> {
    let wheels = Search::new(env).folders.into_iter().flat_map(|folder| {
        let nvidia = folder.dir.join("nvidia");
        let newer = sorted(&nvidia).into_iter().filter(|dir| {
            let name = dir.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("cu"));
            name.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
        });
        std::iter::once(nvidia.join(wheel)).chain(newer).map(|dir| dir.join("lib")).collect::<Vec<_>>()
    });
    let is_it = |file: &PathBuf| {
        let file_name = file.file_name().and_then(|name| name.to_str());
        file_name.is_some_and(|file_name| file_name.starts_with(name)) && file.is_file()
    };
    wheels.chain([env.prefix.join("lib")]).flat_map(|dir| sorted(&dir)).filter(is_it).collect()
}

/// What lies in a folder, by name; nothing where it cannot be read.
fn sorted(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// Refuses a FlashInfer without the folders that every build reads.
fn whole(package: &Path) -> Result<()> {
    let missing: Vec<&str> = ["data", "jit"].into_iter().filter(|name| !package.join(name).is_dir()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let error = Error::machine(format!("the FlashInfer at {} is not whole", package.display()))
        .because(format!("it has no {}/", missing.join("/ and no ")));
    let tree = package.parent().is_some_and(|root| root.join("csrc").is_dir());
    Err(if tree {
        error.hint("in a source tree the folder `data` is made by `pip install --no-build-isolation -e .`").hint(
            "by hand, in the tree: mkdir flashinfer/data && ln -s ../../csrc ../../include ../../3rdparty/cutlass ../../3rdparty/spdlog flashinfer/data/",
        )
    } else {
        error.hint("reinstall it: pip install --force-reinstall --no-deps flashinfer-python==VERSION")
    })
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// A package found: where it lies, and what records it.
struct Found {
    package: PathBuf,
    dist_info: Option<PathBuf>,
    /// The package lies outside the folder that records it.
    editable: bool,
}

impl Found {
    fn flashinfer_version(&self) -> Result<String> {
        let tree = || {
            let text = read(&self.package.parent().unwrap_or(&self.package).join("version.txt"));
            Some(text.trim().to_owned()).filter(|version| !version.is_empty())
        };
        let meta = || python_string(&read(&self.package.join("_build_meta.py")), "__version__");
        // An editable install's record is as old as the install; the tree may have moved on.
        if self.editable
            && let Some(version) = tree()
        {
            return Ok(version);
        }
        match &self.dist_info {
            Some(dir) => recorded_version(dir),
            None => Ok(meta().or_else(tree).unwrap_or_else(unknown)),
        }
    }
}

/// Where Python would look for packages: folders in order, and what editable installs map.
struct Search {
    folders: Vec<Folder>,
    finders: Vec<PathBuf>,
}

struct Folder {
    dir: PathBuf,
    kind: FolderKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FolderKind {
    Site,
    /// Added by a `.pth` file or an egg-link: what lies in it is recorded in a site-packages folder.
    Linked,
    /// Named by `PYTHONPATH`: nothing but itself records what lies in it.
    PythonPath,
}

impl Search {
    fn new(env: &Environment) -> Self {
        let mut search = Self { folders: Vec::new(), finders: Vec::new() };
        for dir in &env.python_path {
            search.push(dir.clone(), FolderKind::PythonPath);
        }
        for site in &env.site_packages {
            search.push(site.clone(), FolderKind::Site);
            let Ok(entries) = fs::read_dir(site) else { continue };
            let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            files.sort();
            for file in &files {
                match file.extension().and_then(|ext| ext.to_str()) {
                    Some("pth") => search.read_pth(site, file),
                    Some("egg-link") => {
                        if let Some(line) = read(file).lines().next() {
                            search.push(site.join(line.trim()), FolderKind::Linked);
                        }
                    }
                    _ => {}
                }
            }
        }
        search
    }

    fn push(&mut self, dir: PathBuf, kind: FolderKind) {
        if dir.is_dir() && !self.folders.iter().any(|known| known.dir == dir) {
            self.folders.push(Folder { dir, kind });
        }
    }

    fn read_pth(&mut self, site: &Path, file: &Path) {
        for line in read(file).lines().map(str::trim_end) {
            if let Some(code) = line.strip_prefix("import ").or_else(|| line.strip_prefix("import\t")) {
                // setuptools: `import __editable___NAME_finder; __editable___NAME_finder.install()`
                let module = code.split(';').next().unwrap_or_default().trim();
                if module.starts_with("__editable__") {
                    self.finders.push(site.join(format!("{module}.py")));
                }
            } else if !line.is_empty() && !line.starts_with('#') {
                self.push(site.join(line), FolderKind::Linked);
            }
        }
    }

    /// The package that `import module` finds, and the record of `distribution` that belongs to it.
    fn find(&self, module: &str, distribution: &str) -> Result<Option<Found>> {
        let is_package = |dir: &Path| dir.join("__init__.py").is_file();
        // A folder without __init__.py is a namespace: what is left of an uninstalled package, not an installed one.
        let direct = self.folders.iter().find(|folder| is_package(&folder.dir.join(module)));
        if let Some(Folder { dir, kind }) = direct {
            let dist_info = match only_record(dir, distribution)? {
                Some(record) => Some(record),
                None if *kind == FolderKind::PythonPath => None,
                None => self.record(distribution)?,
            };
            return Ok(Some(Found { package: dir.join(module), dist_info, editable: *kind != FolderKind::Site }));
        }
        let record = self.record(distribution)?;
        let mapped = self.finders.iter().find_map(|finder| mapped_folder(&read(finder), module));
        let linked = || {
            let tree = editable_tree(record.as_deref()?)?;
            [tree.join(module), tree.join("src").join(module)].into_iter().find(|dir| is_package(dir))
        };
        if let Some(package) = mapped.filter(|dir| is_package(dir)).or_else(linked) {
            return Ok(Some(Found { package, dist_info: record, editable: true }));
        }
        match record {
            None => Ok(None),
            Some(record) => Err(Error::machine(format!("{distribution} is recorded as installed, but its files are gone"))
                .because(format!("{} is there; no folder `{module}` with an __init__.py is", record.display()))
                .hint(format!("reinstall it: pip install --force-reinstall --no-deps {distribution}"))),
        }
    }

    fn record(&self, distribution: &str) -> Result<Option<PathBuf>> {
        for folder in &self.folders {
            if let Some(record) = only_record(&folder.dir, distribution)? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }
}

/// The metadata folder of `distribution` in `dir`. Two of them are a fault: nobody can say which one is true.
fn only_record(dir: &Path, distribution: &str) -> Result<Option<PathBuf>> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(None) };
    let mut records: Vec<PathBuf> = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(stem) = name.strip_suffix(".dist-info").or_else(|| name.strip_suffix(".egg-info")) else { continue };
        // `NAME-VERSION`, or `NAME` alone in the tree of an editable install.
        let recorded = stem.split_once('-').map_or(stem, |(name, _)| name);
        if normalised(recorded) == distribution && metadata(&entry.path()).is_some() {
            records.push(entry.path());
        }
    }
    records.sort();
    match records.len() {
        0 | 1 => Ok(records.pop()),
        _ => {
            let names: Vec<String> =
                records.iter().filter_map(|r| r.file_name()).map(|name| name.to_string_lossy().into_owned()).collect();
            Err(Error::machine(format!("{distribution} is recorded {} times in {}", records.len(), dir.display()))
                .because(format!("found {}: an upgrade that went wrong", names.join(" and ")))
                .hint(format!("uninstall it until pip says it is gone, then install it again: pip uninstall -y {distribution}")))
        }
    }
}

/// A distribution's name as PEP 503 compares them.
fn normalised(name: &str) -> String {
    name.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

fn metadata(record: &Path) -> Option<String> {
    ["METADATA", "PKG-INFO"].into_iter().find_map(|name| fs::read_to_string(record.join(name)).ok())
}

fn recorded_version(record: &Path) -> Result<String> {
    let version = metadata(record).and_then(|text| {
        // The head ends at the first empty line; a description behind it may say `Version:` as well.
        let head = text.lines().take_while(|line| !line.is_empty());
        head.filter_map(|line| line.strip_prefix("Version:")).map(|version| version.trim().to_owned()).next()
    });
    version.ok_or_else(|| {
        Error::machine(format!("{} states no version", record.display()))
            .because("its METADATA has no line `Version:`")
            .hint("reinstall that package")
    })
}

/// The source tree of an editable install, from its `direct_url.json`.
fn editable_tree(record: &Path) -> Option<PathBuf> {
    let json: serde_json::Value = serde_json::from_str(&fs::read_to_string(record.join("direct_url.json")).ok()?).ok()?;
    json.pointer("/dir_info/editable")?.as_bool().filter(|editable| *editable)?;
    percent_decoded(json.get("url")?.as_str()?.strip_prefix("file://")?)
}

fn percent_decoded(text: &str) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let pair = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&pair).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    Some(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

/// The folder that a setuptools finder maps `module` to: `MAPPING: dict[str, str] = {'flashinfer': '/src/flashinfer'}`.
fn mapped_folder(finder: &str, module: &str) -> Option<PathBuf> {
    let mapping = finder.lines().find(|line| line.starts_with("MAPPING"))?;
    let entry =
        ['\'', '"'].iter().find_map(|q| mapping.split_once(&format!("{q}{module}{q}:"))).map(|(_, rest)| rest.trim_start())?;
    let quote = entry.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let path = entry[1..].split(quote).next()?;
    Some(PathBuf::from(path.replace("\\\\", "\\")))
}

/// The text that a Python file assigns to `name` at its top level, as in `cuda: Optional[str] = '12.8'`.
fn python_string(source: &str, name: &str) -> Option<String> {
    source.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        let annotated = rest.trim_start();
        let value = if annotated.starts_with(':') { annotated.split_once('=')?.1 } else { annotated.strip_prefix('=')? };
        let value = value.trim();
        let quote = value.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        value[1..].split(quote).next().map(str::to_owned)
    })
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_assignments_are_read_with_and_without_annotation() {
        let source = "from typing import Optional\n__version__ = '2.9.1+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n";
        assert_eq!(python_string(source, "__version__").as_deref(), Some("2.9.1+cu128"));
        assert_eq!(python_string(source, "cuda").as_deref(), Some("12.8"));
        assert_eq!(python_string(source, "hip"), None);
        assert_eq!(python_string("cuda_version = '1'\n", "cuda"), None);
    }

    #[test]
    fn names_compare_as_pep_503_says() {
        for name in ["flashinfer_python", "Flashinfer-Python", "flashinfer.python", "flashinfer__python"] {
            assert_eq!(normalised(name), "flashinfer-python");
        }
    }

    #[test]
    fn editable_installs_name_their_tree() {
        assert_eq!(percent_decoded("/src/flash%20infer").unwrap(), Path::new("/src/flash infer"));
        assert_eq!(percent_decoded("/src/%zz"), None);
        let finder = "NAME = 'x'\nMAPPING: dict[str, str] = {'a': '/a', 'flashinfer': '/src/fi/flashinfer'}\n";
        assert_eq!(mapped_folder(finder, "flashinfer").unwrap(), Path::new("/src/fi/flashinfer"));
        assert_eq!(mapped_folder(finder, "flash"), None);
    }
}
