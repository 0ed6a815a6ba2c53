//! Activation for one process tree: the same package in a folder of our own, put before everything on `PYTHONPATH`. Nothing is
//! installed.
//!
//! ```text
//! FI_ARCH_HOME/run/<digest>/   immutable, published by rename
//!   fi_arch_shim/              the package
//!   sitecustomize.py           starts it, and then the sitecustomize that would have been started
//! ```

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::install::Plan;
use super::{byte_code, shim, state};
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::survey::process;

/// A command as `run` gets it.
#[derive(Debug, Clone)]
pub struct Program {
    name: OsString,
    args: Vec<OsString>,
    /// Where it lies; none where it cannot be found.
    file: Option<PathBuf>,
}

impl Program {
    /// `words`: the program and its arguments.
    pub fn new(words: &[OsString]) -> Result<Self> {
        let Some((name, args)) = words.split_first() else {
            return Err(Error::usage("no command is named").hint("fi-arch run -- python -m sglang.launch_server …"));
        };
        let file = match Path::new(name).components().count() {
            1 => process::on_path(name).into_iter().next(),
            _ => std::path::absolute(name).ok().filter(|file| process::is_executable(file)),
        };
        Ok(Self { name: name.clone(), args: args.to_vec(), file })
    }

    /// The Python that will run it, where the program says so: itself, or the one in a script's first line.
    pub fn python(&self) -> Option<PathBuf> {
        let file = self.file.as_ref()?;
        if is_python(file) {
            return Some(file.clone());
        }
        let interpreter = PathBuf::from(first_line(file)?.split_whitespace().next()?);
        is_python(&interpreter).then_some(interpreter)
    }

    /// The flag that keeps Python from what `run` sets, if the command has one.
    pub fn deaf(&self) -> Option<String> {
        let file = self.file.as_ref()?;
        if is_python(file) {
            return deaf_flag(self.args.iter().map(|arg| arg.to_string_lossy().into_owned()));
        }
        let line = first_line(file)?;
        let mut words = line.split_whitespace();
        let interpreter = PathBuf::from(words.next()?);
        if is_python(&interpreter) { deaf_flag(words.map(str::to_owned)) } else { None }
    }

    /// Becomes the command, so that its signals and its exit code are its own. Comes back only with an error.
    pub fn exec(&self, first_on_python_path: Option<&Path>) -> Error {
        let mut command = Command::new(self.file.as_deref().unwrap_or(Path::new(&self.name)));
        command.arg0(&self.name).args(&self.args);
        if let Some(folder) = first_on_python_path {
            command.env(env::PYTHONPATH, before(folder, env::var(env::PYTHONPATH)));
        }
        let error = command.exec();
        Error::usage(format!("{} cannot be run", self.name.to_string_lossy()))
            .because(error)
            .hint("name a program, or python and a script: fi-arch run -- python -m sglang.launch_server …")
    }
}

/// `folder` before what is there already.
fn before(folder: &Path, there: Option<OsString>) -> OsString {
    let mut value = folder.as_os_str().to_owned();
    if let Some(there) = there {
        value.push(":");
        value.push(there);
    }
    value
}

fn is_python(file: &Path) -> bool {
    let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.strip_prefix("python").is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit() || c == '.' || c == 't'))
}

/// What stands behind `#!` in a script.
fn first_line(file: &Path) -> Option<String> {
    let mut head = Vec::new();
    fs::File::open(file).ok()?.take(512).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    Some(String::from_utf8_lossy(line).trim().to_owned())
}

/// The first of Python's own flags that hides `PYTHONPATH` (`-E`, `-I`) or start-up code (`-S`).
fn deaf_flag(args: impl Iterator<Item = String>) -> Option<String> {
    let mut args = args;
    while let Some(arg) = args.next() {
        let letters = arg.strip_prefix('-')?;
        if letters == "-check-hash-based-pycs" {
            args.next();
            continue;
        }
        if letters.is_empty() || letters.starts_with('-') {
            return None;
        }
        for (at, letter) in letters.char_indices() {
            match letter {
                'E' | 'I' | 'S' => return Some(format!("-{letter}")),
                // What follows is the program, and its arguments.
                'c' | 'm' => return None,
                // Their value is the rest of the word, or the next one.
                'W' | 'X' => {
                    if at + 1 == letters.len() {
                        args.next();
                    }
                    break;
                }
                _ => {}
            }
        }
    }
    None
}

/// The folder to put on `PYTHONPATH` for `plan`; written if it is not there yet.
pub fn folder(plan: &Plan, home: &Path) -> Result<PathBuf> {
    let parent = home.join("run");
    let digest = Digest::of(format!("{}\n{}", plan.package.digest(), shim::SITECUSTOMIZE).as_bytes());
    let folder = parent.join(digest.to_string());
    if is_whole(&folder, plan) {
        return Ok(folder);
    }
    fs::create_dir_all(&parent).map_err(|e| Error::io("create", &parent, e))?;
    let staging = tempfile::Builder::new().prefix(".staging-").tempdir_in(&parent);
    let staging = staging.map_err(|e| Error::io("create a folder in", &parent, e))?;
    write(plan, staging.path(), &folder).map_err(|e| Error::io("write", staging.path(), e))?;
    for _ in 0..2 {
        match fs::rename(staging.path(), &folder) {
            Ok(()) => {
                let _ = staging.keep();
                return Ok(folder);
            }
            // Another process was faster.
            Err(_) if is_whole(&folder, plan) => return Ok(folder),
            // A damaged one: whoever runs on it keeps its files, under another name.
            Err(_) if folder.exists() => {
                let aside = tempfile::Builder::new().prefix(".damaged-").tempdir_in(&parent);
                let aside = aside.map_err(|e| Error::io("create a folder in", &parent, e))?.keep();
                let _ = fs::rename(&folder, aside.join("was"));
            }
            Err(error) => return Err(Error::io("create", &folder, error)),
        }
    }
    Err(Error::machine(format!("{} is damaged and cannot be replaced", folder.display())).hint("remove it, then try again"))
}

fn is_whole(folder: &Path, plan: &Plan) -> bool {
    fs::read_to_string(folder.join(shim::SITECUSTOMIZE_FILE)).is_ok_and(|text| text == shim::SITECUSTOMIZE)
        && plan.package.digest_on_disk(&folder.join(state::PACKAGE)) == Some(plan.package.digest())
}

fn write(plan: &Plan, staging: &Path, known_as: &Path) -> io::Result<()> {
    let mut sources = Vec::new();
    let files = plan.package.files().into_iter().map(|(path, bytes)| (format!("{}/{path}", state::PACKAGE), bytes));
    let sitecustomize = (shim::SITECUSTOMIZE_FILE.to_owned(), shim::SITECUSTOMIZE.as_bytes().to_vec());
    for (path, bytes) in files.chain([sitecustomize]) {
        let file = staging.join(&path);
        fs::create_dir_all(file.parent().expect("it lies in a folder"))?;
        fs::write(&file, bytes)?;
        if path.ends_with(".py") {
            sources.push((file, known_as.join(&path)));
        }
    }
    if let Err(why) = byte_code::compile(&plan.environment, &sources) {
        tracing::info!("no byte code was made: {why}");
    }
    for item in walkdir::WalkDir::new(staging).into_iter().flatten() {
        let mode = if item.file_type().is_dir() { 0o755 } else { 0o644 };
        fs::set_permissions(item.path(), Permissions::from_mode(mode))?;
        // A kill or a power cut must not leave a name without its content.
        fs::File::open(item.path())?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_hide_what_run_sets_are_found_among_pythons_own_alone() {
        let deaf = |line: &str| deaf_flag(line.split_whitespace().map(str::to_owned));
        for (line, flag) in
            [("-I -m x", "-I"), ("-uE x.py", "-E"), ("-S", "-S"), ("-W ignore -X dev -sI x.py", "-I"), ("-Im x", "-I")]
        {
            assert_eq!(deaf(line).as_deref(), Some(flag), "{line}");
        }
        for line in ["", "-m x -I", "-c -I", "x.py -E", "-W I x.py", "-WI x.py", "-Ximporttime -u x.py", "-- -I", "-um x -S"] {
            assert_eq!(deaf(line), None, "{line}");
        }
    }

    #[test]
    fn only_pythons_are_pythons() {
        for name in ["python", "python3", "/opt/venv/bin/python3.12", "python3.13t"] {
            assert!(is_python(Path::new(name)), "{name}");
        }
        for name in ["python3-config", "pythonw.exe", "pip", "ipython"] {
            assert!(!is_python(Path::new(name)), "{name}");
        }
    }
}
