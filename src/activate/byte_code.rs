//! Byte code for Python files that we write: made by the environment's own interpreter, valid by the source's content and not by
//! its time, so that copies into images keep it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::survey::{Environment, process};

/// Compiles each file named behind it, beside it, and prints where. One that does not compile is left out.
const COMPILE: &str = "\
import py_compile, sys
from importlib.util import cache_from_source
for file, known_as in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        py_compile.compile(file, cfile=cache_from_source(file, optimization=''), dfile=known_as, doraise=True,
                           invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    except py_compile.PyCompileError as error:
        print(error, file=sys.stderr)
";

/// The environment's interpreter, where its place tells.
pub fn interpreter(environment: &Environment) -> Option<PathBuf> {
    let bin = environment.prefix.join("bin");
    ["python3", "python"].map(|name| bin.join(name)).into_iter().find(|file| process::is_executable(file))
}

/// Compiles `files` (where each lies, and where it will lie) into the `__pycache__` beside each. Without byte code all works the
/// same and starts some milliseconds later, so a failure is no error; it is said why.
pub fn compile(environment: &Environment, files: &[(PathBuf, PathBuf)]) -> Result<(), String> {
    let python = interpreter(environment).ok_or("the interpreter of this environment was not found")?;
    if files.is_empty() {
        return Ok(());
    }
    let mut command = Command::new(&python);
    command.args(["-I", "-S", "-B", "-c", COMPILE]);
    command.args(files.iter().flat_map(|(file, known_as)| [file, known_as]));
    let ran = process::run(&mut command, Duration::from_secs(60)).map_err(|e| format!("{}: {e}", python.display()))?;
    if !ran.ok {
        return Err(format!("{}: {}", python.display(), ran.last_line()));
    }
    if !ran.stderr.trim().is_empty() {
        tracing::info!("byte code: {}", ran.stderr.trim());
    }
    Ok(())
}

/// The byte code of the source `file`, of every Python and every level of optimisation.
pub fn of(file: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(stem)) = (file.parent(), file.file_stem().and_then(|stem| stem.to_str())) else {
        return Vec::new();
    };
    let Ok(items) = std::fs::read_dir(folder.join("__pycache__")) else { return Vec::new() };
    let prefix = format!("{stem}.");
    let is_it = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // `comm.cpython-311.pyc`, `comm.cpython-311.opt-1.pyc`, but not the module `comm.x`, which no file is called.
        name.ends_with(".pyc")
            && name.strip_prefix(&prefix).is_some_and(|rest| rest.contains("python") || rest.starts_with("pypy"))
    };
    let mut found: Vec<PathBuf> = items.flatten().map(|item| item.path()).filter(is_it).collect();
    found.sort();
    found
}
