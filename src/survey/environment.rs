//! Finds the Python environment and the folders that its packages lie in, from files.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::process;
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::memo::Memo;

/// A Python environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The folders that packages are imported from, in the order in which Python searches them. All exist.
    pub site_packages: Vec<PathBuf>,
    /// What Python searches before them: the folders of `PYTHONPATH`, for the active environment alone. They belong to somebody
    /// else: read, never written to.
    pub python_path: Vec<PathBuf>,
    /// Who named it: `--env DIR`, `VIRTUAL_ENV`, `CONDA_PREFIX` or `python3 on PATH`.
    pub origin: String,
    /// Python's `sys.prefix`.
    pub prefix: PathBuf,
}

impl Environment {
    /// Every folder that packages are looked for in, in order.
    pub fn folders(&self) -> impl Iterator<Item = &PathBuf> {
        self.python_path.iter().chain(&self.site_packages)
    }

    /// One folder like a site-packages, taken for an environment of its own.
    pub fn of_folder(site: &Path) -> Self {
        let origin = site.display().to_string();
        Self { site_packages: vec![site.to_owned()], python_path: Vec::new(), origin, prefix: site.to_owned() }
    }
}

/// The environment that `--env` names, else the active one (`VIRTUAL_ENV`, `CONDA_PREFIX`), else that of `python3` on `PATH`.
pub fn environment(explicit: Option<&Path>, memo: &Memo) -> Result<Option<Environment>> {
    if let Some(dir) = explicit {
        return named(dir).map(Some);
    }
    let active = active(memo)?;
    let python_path = env::var(env::PYTHONPATH).map(|value| python_path(&value)).unwrap_or_default();
    Ok(active.map(|environment| Environment { python_path, ..environment }))
}

/// The folders of a `PYTHONPATH` that exist, in order. As Python reads it: an empty entry is the working folder.
pub fn python_path(value: &OsStr) -> Vec<PathBuf> {
    let dirs = std::env::split_paths(value).filter_map(|dir| match dir.as_os_str().is_empty() {
        true => std::env::current_dir().ok(),
        false => std::path::absolute(dir).ok(),
    });
    dirs.filter(|dir| dir.is_dir()).collect()
}

fn active(memo: &Memo) -> Result<Option<Environment>> {
    if let Some(dir) = env::var(env::VIRTUAL_ENV) {
        let dir = absolute(Path::new(&dir))?;
        return match of_prefix(&dir, env::VIRTUAL_ENV, None) {
            Some(found) => Ok(Some(found)),
            // Going on with another environment would build for a FlashInfer that the user does not mean.
            None => Err(Error::machine(format!("VIRTUAL_ENV names {}, which is no Python environment", dir.display()))
                .because(why_not(&dir))
                .hint("activate an environment that exists, unset VIRTUAL_ENV, or name one with --env DIR")),
        };
    }
    if let Some(dir) = env::var(env::CONDA_PREFIX) {
        let dir = absolute(Path::new(&dir))?;
        match of_prefix(&dir, env::CONDA_PREFIX, None) {
            Some(found) => return Ok(Some(found)),
            // Common and harmless: a conda environment of compilers, without a Python of its own.
            None => tracing::info!("CONDA_PREFIX names {}, which holds no Python packages", dir.display()),
        }
    }
    on_path(memo)
}

fn named(dir: &Path) -> Result<Environment> {
    let origin = format!("--env {}", dir.display());
    let dir = absolute(dir)?;
    let error = |why: String| {
        Error::usage(format!("{} is no Python environment", dir.display()))
            .because(why)
            .hint("name a virtual or conda environment (the folder that holds bin/ and lib/), or a site-packages folder")
    };
    if dir.is_file() {
        let is_python = dir.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"python"));
        return is_python.then(|| of_executable(&dir, &origin)).flatten().ok_or_else(|| error("it is a file".to_owned()));
    }
    if !dir.is_dir() {
        return Err(error("there is no such folder".to_owned()));
    }
    if let Some(found) = of_prefix(&dir, &origin, None) {
        return Ok(found);
    }
    let named_so = dir.ends_with("site-packages") || dir.ends_with("dist-packages");
    if named_so || holds_packages(&dir) {
        // …/lib/python3.12/site-packages belongs to the prefix three folders up; a `pip --target` folder to none.
        let prefix =
            dir.parent().filter(|lib| named_so && version_of_folder(lib).is_some()).and_then(|lib| lib.ancestors().nth(2));
        let prefix = prefix.unwrap_or(&dir).to_owned();
        return Ok(Environment { prefix, site_packages: vec![dir], python_path: Vec::new(), origin });
    }
    Err(error(why_not(&dir)))
}

fn why_not(prefix: &Path) -> String {
    if prefix.is_dir() { "it holds no lib/python3.*/site-packages".to_owned() } else { "there is no such folder".to_owned() }
}

fn holds_packages(dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(dir) else { return false };
    entries.flatten().any(|entry| entry.path().extension().is_some_and(|ext| ext == "dist-info"))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))
}

/// The environment whose `sys.prefix` is `prefix`. `version` (`3.12`, `3.13t`) says which Python, where that is known.
fn of_prefix(prefix: &Path, origin: &str, version: Option<String>) -> Option<Environment> {
    let config = VenvConfig::read(prefix);
    let known = version.is_some();
    let version = version.or_else(|| version_of_prefix(prefix, config.as_ref()))?;
    let own = own_sites(prefix, &version);
    let mut dirs = Vec::new();
    match &config {
        Some(config) => {
            if own.is_empty() {
                return None;
            }
            dirs.extend(own);
            if config.system_packages {
                dirs.extend(user_site(&version));
                if let Some(base) = config.base_prefix() {
                    dirs.extend(own_sites(&base, &version));
                }
            }
        }
        None => {
            dirs.extend(user_site(&version));
            // A user's own packages alone make an environment only of a Python that is known to be there.
            if own.is_empty() && (dirs.is_empty() || !known) {
                return None;
            }
            dirs.extend(own);
        }
    }
    let mut site_packages: Vec<PathBuf> = Vec::new();
    for dir in dirs {
        if !site_packages.contains(&dir) {
            site_packages.push(dir);
        }
    }
    Some(Environment { site_packages, python_path: Vec::new(), origin: origin.to_owned(), prefix: prefix.to_owned() })
}

/// The package folders under `prefix` itself that exist, as `site.getsitepackages()` orders them.
fn own_sites(prefix: &Path, version: &str) -> Vec<PathBuf> {
    let python = format!("python{version}");
    let mut dirs = Vec::new();
    if prefix.ends_with("usr") {
        let local = prefix.join("local");
        if prefix.join("lib/python3/dist-packages").is_dir() {
            // Debian's own Python: pip writes below /usr/local, apt into a folder that all minor versions share.
            dirs.push(local.join("lib").join(&python).join("dist-packages"));
            dirs.push(prefix.join("lib/python3/dist-packages"));
            dirs.push(prefix.join("lib").join(&python).join("dist-packages"));
            return dirs.into_iter().filter(|dir| dir.is_dir()).collect();
        }
        // Fedora's Python does the same with site-packages, unless /usr/local has a Python of its own.
        if !local.join("bin").join(&python).exists() {
            dirs.extend(["lib64", "lib"].map(|lib| local.join(lib).join(&python).join("site-packages")));
        }
    }
    // In a venv `lib64` is a link to `lib`; on Fedora it is a folder of its own, and comes first.
    let lib64 = prefix.join("lib64");
    if !lib64.is_symlink() {
        dirs.push(lib64.join(&python).join("site-packages"));
    }
    dirs.push(prefix.join("lib").join(&python).join("site-packages"));
    dirs.into_iter().filter(|dir| dir.is_dir()).collect()
}

/// The user's own packages, which every Python outside a virtual environment searches first.
fn user_site(version: &str) -> Option<PathBuf> {
    if env::var(env::PYTHONNOUSERSITE).is_some() {
        return None;
    }
    let base = match env::var(env::PYTHONUSERBASE) {
        Some(base) => PathBuf::from(base),
        None => dirs::home_dir()?.join(".local"),
    };
    Some(base.join("lib").join(format!("python{version}")).join("site-packages")).filter(|dir| dir.is_dir())
}

/// `3.12` of a folder or program called `python3.12`.
fn version_of_folder(path: &Path) -> Option<String> {
    let version = path.file_name()?.to_str()?.strip_prefix("python")?;
    let minor = version.strip_prefix("3.")?;
    let digits = minor.strip_suffix('t').unwrap_or(minor);
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then(|| version.to_owned())
}

fn version_of_prefix(prefix: &Path, config: Option<&VenvConfig>) -> Option<String> {
    let mut present: Vec<String> = Vec::new();
    for lib in ["lib", "lib64"] {
        let entries = fs::read_dir(prefix.join(lib)).into_iter().flatten().flatten();
        for version in entries.filter_map(|entry| version_of_folder(&entry.path())) {
            if !present.contains(&version) {
                present.push(version);
            }
        }
    }
    let fitting = |wanted: &str| {
        let free_threaded = format!("{wanted}t");
        present.iter().find(|v| *v == wanted).or_else(|| present.iter().find(|v| **v == free_threaded)).cloned()
    };
    // Several Pythons may share a prefix (/usr, a venv that was upgraded): what it calls its own decides.
    let stated = || config.and_then(|config| config.version.as_deref()).and_then(fitting);
    let program = || {
        let program = prefix.join("bin/python3").canonicalize().ok()?;
        version_of_folder(&program).as_deref().and_then(fitting)
    };
    let minor = |version: &String| version[2..].trim_end_matches('t').parse::<u32>().unwrap_or(0);
    stated().or_else(program).or_else(|| present.iter().max_by_key(|v| minor(v)).cloned())
}

/// What `pyvenv.cfg` says.
struct VenvConfig {
    system_packages: bool,
    home: Option<PathBuf>,
    executable: Option<PathBuf>,
    /// Major and minor alone: `3.12`.
    version: Option<String>,
}

impl VenvConfig {
    fn read(prefix: &Path) -> Option<Self> {
        let text = fs::read_to_string(prefix.join("pyvenv.cfg")).ok()?;
        let value = |key: &str| {
            text.lines()
                .filter_map(|line| line.split_once('='))
                .find(|(k, _)| k.trim().eq_ignore_ascii_case(key))
                .map(|(_, v)| v.trim())
        };
        let version = value("version").or_else(|| value("version_info")).and_then(|full| {
            let mut parts = full.split('.');
            Some(format!("{}.{}", parts.next()?, parts.next()?))
        });
        Some(Self {
            system_packages: value("include-system-site-packages").is_some_and(|v| v.eq_ignore_ascii_case("true")),
            home: value("home").map(PathBuf::from),
            executable: value("executable").or_else(|| value("base-executable")).map(PathBuf::from),
            version,
        })
    }

    /// The prefix of the Python that the environment was made from.
    fn base_prefix(&self) -> Option<PathBuf> {
        let program = self.executable.clone().or_else(|| self.home.as_ref().map(|home| home.join("python3")))?;
        let real = program.canonicalize().ok();
        let bin = real.as_deref().and_then(Path::parent).or(self.home.as_deref())?;
        bin.parent().map(Path::to_owned)
    }
}

/// The environment of a Python program, or `None` where its file does not tell (a shim, a wrapper).
fn of_executable(program: &Path, origin: &str) -> Option<Environment> {
    // As Python does it: a pyvenv.cfg beside the program, or one folder up, before any symlink is followed.
    let bin = program.parent()?;
    for prefix in [Some(bin), bin.parent()].into_iter().flatten() {
        if prefix.join("pyvenv.cfg").is_file() {
            return of_prefix(prefix, origin, None);
        }
    }
    let real = program.canonicalize().ok()?;
    if !real.file_name()?.as_encoded_bytes().starts_with(b"python") || process::is_script(&real) {
        return None;
    }
    let prefix = real.parent()?.parent()?;
    let version = version_of_folder(&real).or_else(|| version_of_prefix(prefix, None))?;
    // The landmark that Python itself looks for.
    let landmark = |lib: &str| prefix.join(lib).join(format!("python{version}/os.py")).is_file();
    (landmark("lib") || landmark("lib64")).then(|| of_prefix(prefix, origin, Some(version.clone()))).flatten()
}

/// What an interpreter says of itself.
#[derive(Debug, Deserialize)]
struct Told {
    executable: PathBuf,
    prefix: PathBuf,
    sites: Vec<PathBuf>,
}

const TELL: &str = "import json, site, sys; \
    print(json.dumps({'executable': sys.executable, 'prefix': sys.prefix, 'sites': site.getsitepackages()}))";

fn on_path(memo: &Memo) -> Result<Option<Environment>> {
    let Some((name, program)) =
        ["python3", "python"].into_iter().find_map(|name| process::on_path(name).into_iter().next().map(|file| (name, file)))
    else {
        return Ok(None);
    };
    let origin = format!("{name} on PATH");
    if let Some(found) = of_executable(&program, &origin) {
        return Ok(Some(found));
    }
    // A shim of pyenv, asdf, mise, or a wrapper: only running it tells which Python it stands for.
    let ask = || ask(&program);
    let told = match memo.fact(&program, &format!("python behind this shim, {}", shim_state()), ask) {
        Ok(told) => told,
        Err(error) => {
            tracing::warn!("{error}");
            return Ok(None);
        }
    };
    let parse = |text: &str| serde_json::from_str::<Told>(text).ok();
    // The Python it stood for may have been removed since: then what is remembered is worth nothing.
    let told = match parse(&told).filter(|told| told.executable.exists()) {
        Some(told) => Some(told),
        None => self::ask(&program).ok().as_deref().and_then(parse),
    };
    let Some(told) = told else { return Ok(None) };
    if let Some(found) = of_executable(&told.executable, &origin) {
        return Ok(Some(found));
    }
    let user = told.sites.iter().find_map(|dir| dir.parent().and_then(version_of_folder)).and_then(|version| user_site(&version));
    let site_packages: Vec<PathBuf> = user.into_iter().chain(told.sites.into_iter().filter(|dir| dir.is_dir())).collect();
    Ok((!site_packages.is_empty()).then_some(Environment { site_packages, python_path: Vec::new(), origin, prefix: told.prefix }))
}

fn ask(program: &Path) -> Result<String> {
    let failed = |why: String| Error::machine(format!("{} does not run", program.display())).because(why);
    let ran = process::run(Command::new(program).args(["-I", "-c", TELL]), Duration::from_secs(20))
        .map_err(|e| failed(e.to_string()))?;
    if ran.ok { Ok(ran.stdout.trim().to_owned()) } else { Err(failed(ran.last_line())) }
}

/// A digest of all that decides which Python a version manager's shim runs, apart from the shim itself.
fn shim_state() -> String {
    let mut state: Vec<u8> = Vec::new();
    let mut vars: Vec<_> = std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.to_string_lossy();
            name == env::PATH || ["PYENV_", "ASDF_", "MISE_", "RTX_"].iter().any(|prefix| name.starts_with(prefix))
        })
        .collect();
    vars.sort();
    for (name, value) in &vars {
        state.extend([name.as_encoded_bytes(), b"=", value.as_encoded_bytes(), b"\n"].concat());
    }
    let cwd = std::env::current_dir().unwrap_or_default();
    let home = dirs::home_dir().unwrap_or_default();
    let pyenv = env::var(env::PYENV_ROOT).map_or_else(|| home.join(".pyenv"), PathBuf::from);
    let local = cwd.ancestors().flat_map(|dir| {
        [".python-version", ".tool-versions", "mise.toml", ".mise.toml", ".mise/config.toml", ".config/mise.toml"]
            .map(|name| dir.join(name))
    });
    let global = [pyenv.join("version"), home.join(".tool-versions"), home.join(".config/mise/config.toml")];
    for file in local.chain(global) {
        if let Ok(bytes) = fs::read(&file) {
            state.extend([file.as_os_str().as_encoded_bytes(), b"\n", &bytes].concat());
        }
    }
    Digest::of(&state).short()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirs_under(root: &Path, dirs: &[&str]) {
        for dir in dirs {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
    }

    fn relative(environment: &Environment, root: &Path) -> Vec<String> {
        // The user site of whoever runs the tests is not under test here.
        let under = |dir: &PathBuf| dir.strip_prefix(root).ok().map(|dir| dir.display().to_string());
        environment.site_packages.iter().filter_map(under).collect()
    }

    #[test]
    fn debian_looks_below_usr_local_first_and_never_into_site_packages() {
        let root = tempfile::tempdir().unwrap();
        let usr = root.path().join("usr");
        dirs_under(
            &usr,
            &["lib/python3/dist-packages", "local/lib/python3.12/dist-packages", "lib/python3.12", "lib/python3.11"],
        );
        dirs_under(&usr, &["bin", "local/lib/python3.12/site-packages"]);
        fs::write(usr.join("bin/python3.12"), "\x7fELF").unwrap();
        fs::write(usr.join("lib/python3.12/os.py"), "").unwrap();
        std::os::unix::fs::symlink("python3.12", usr.join("bin/python3")).unwrap();
        for found in [of_prefix(&usr, "test", None), of_executable(&usr.join("bin/python3"), "test")] {
            let found = found.unwrap();
            assert_eq!(relative(&found, &usr), ["local/lib/python3.12/dist-packages", "lib/python3/dist-packages"]);
            assert!(found.prefix.ends_with("usr"));
        }
    }

    #[test]
    fn fedora_keeps_lib64_apart() {
        let root = tempfile::tempdir().unwrap();
        let usr = root.path().join("usr");
        let python = "python3.13/site-packages";
        dirs_under(&usr, &["lib64", "lib", "local/lib"].map(|lib| format!("{lib}/{python}")).each_ref().map(String::as_str));
        let found = of_prefix(&usr, "test", None).unwrap();
        assert_eq!(relative(&found, &usr), [format!("local/lib/{python}"), format!("lib64/{python}"), format!("lib/{python}")]);
    }

    #[test]
    fn a_venv_shows_the_systems_packages_only_when_its_config_says_so() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let (base, venv) = (root.join("base"), root.join("venv"));
        dirs_under(&base, &["bin", "lib/python3.12/site-packages"]);
        dirs_under(&venv, &["bin", "lib/python3.12/site-packages", "lib/python3.9/site-packages"]);
        fs::write(base.join("bin/python3.12"), "\x7fELF").unwrap();
        std::os::unix::fs::symlink("lib", venv.join("lib64")).unwrap();
        std::os::unix::fs::symlink(base.join("bin/python3.12"), venv.join("bin/python3")).unwrap();
        for (flag, expected) in [("false", &["venv/"][..]), ("true", &["venv/", "base/"][..])] {
            let config =
                format!("home = {}\ninclude-system-site-packages = {flag}\nversion_info = 3.12.4\n", base.join("bin").display());
            fs::write(venv.join("pyvenv.cfg"), config).unwrap();
            let found = of_executable(&venv.join("bin/python3"), "test").unwrap();
            let expected: Vec<String> = expected.iter().map(|p| format!("{p}lib/python3.12/site-packages")).collect();
            assert_eq!(relative(&found, &root), expected, "{flag}");
            assert_eq!(found.prefix, venv);
        }
    }

    #[test]
    fn a_folder_named_by_hand_is_understood_or_refused_as_a_usage_error() {
        let root = tempfile::tempdir().unwrap();
        dirs_under(root.path(), &["venv/lib/python3.12/site-packages", "target/x-1.0.dist-info", "empty"]);
        let site = root.path().join("venv/lib/python3.12/site-packages");
        assert_eq!(named(&root.path().join("venv")).unwrap().site_packages.last(), Some(&site));
        let direct = named(&site).unwrap();
        assert_eq!((direct.prefix, direct.site_packages), (root.path().join("venv"), vec![site]));
        assert_eq!(named(&root.path().join("target")).unwrap().site_packages, [root.path().join("target")]);
        for nonsense in ["empty", "missing"] {
            let error = named(&root.path().join(nonsense)).unwrap_err();
            assert_eq!(error.exit() as u8, 2);
            assert!(!error.hints().is_empty());
        }
    }
}
