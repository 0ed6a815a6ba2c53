//! Code of one target on a GPU of another, for tests: nvcc compiles as for the target, and the PTX that it makes is assembled
//! for the other GPU. So the code path of a GPU that is not at hand can be run, and seen to be wrong or right.
//!
//! nvcc starts `ptxas` and `fatbinary` from the folder that it was itself started from. It is given a folder that looks like
//! the toolkit, in which these two are scripts of ours: they change what has to be changed of their arguments, and of the PTX,
//! and then become the toolkit's own programs. Nothing of what nvcc prints is read.
//!
//! | file | what it does |
//! | --- | --- |
//! | `ptx` | the PTX: its target, and the one conversion that Hopper lacks |
//! | `tools` | the arguments of `ptxas` and `fatbinary`, as nvcc gives them |

mod ptx;
mod tools;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub use tools::{Tool, become_tool};

use super::toolchain::Toolkit;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::survey::process::is_script;
use crate::target::Target;

/// The version of what is done to arguments and to PTX, beyond the text of the sequence. Part of the key of what it made.
const RULES: &str = "1";

/// The hidden verb by which the scripts call this program.
pub const VERB: &str = "__retarget";

/// The only GPU onto which code was moved, and on which the result was looked at.
const RUN_ON: u32 = 90;

/// Code of a target, to be run on another GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retarget {
    /// What nvcc compiles for.
    pub from: Target,
    /// What the PTX is assembled for.
    pub to: Target,
    /// Where this toolkit's programs lie.
    programs: PathBuf,
}

impl Retarget {
    /// Moves what `toolkit` compiles for `from` onto `to`, or says why that cannot be.
    pub fn new(toolkit: &Toolkit, from: Target, to: Target) -> Result<Self> {
        if to.sm != RUN_ON || from.sm <= to.sm {
            return Err(Error::unsupported(format!("code for {from} cannot be made to run on {to}"))
                .because(format!("what a GPU lacks is known of SM {RUN_ON} alone, and of code for newer GPUs"))
                .hint(format!("for example `--sm 120 --run-on {RUN_ON}`")));
        }
        let programs = toolkit.root.join("bin");
        let is_program = |name: &str| programs.join(name).is_file() && !is_script(&programs.join(name));
        match ["nvcc", "ptxas", "fatbinary"].into_iter().find(|name| !is_program(name)) {
            None => Ok(Self { from, to, programs }),
            Some(name) => Err(Error::machine("this toolkit cannot be used with --run-on")
                .because(format!("{} is no program but a script, or is not there", programs.join(name).display()))
                .hint("name a toolkit as NVIDIA ships it with --toolkit DIR, or leave it out: where no fit one is, CUDA 13.0 is fetched")),
        }
    }

    /// What decides the product beside the toolkit and the plan, for a key: the rules and the text that is put into the PTX.
    pub fn rules(&self) -> Digest {
        Digest::of(format!("{RULES}\n{}", ptx::conversion("d", "a", "b")).as_bytes())
    }

    /// Makes `dir` look like the toolkit `root`, with our own `ptxas` and `fatbinary`.
    pub fn lay_out(&self, dir: &Path, root: &Path) -> Result<()> {
        let bin = dir.join("bin");
        fs::create_dir_all(&bin).map_err(|e| Error::io("create", &bin, e))?;
        link_all(root, dir, &["bin"])?;
        link_all(&self.programs, &bin, &[Tool::Ptxas.name(), Tool::Fatbinary.name()])?;
        for tool in [Tool::Ptxas, Tool::Fatbinary] {
            let script = bin.join(tool.name());
            fs::write(&script, self.script(tool)?).map_err(|e| Error::io("write", &script, e))?;
            let executable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&script, executable).map_err(|e| Error::io("make executable", &script, e))?;
        }
        Ok(())
    }

    fn script(&self, tool: Tool) -> Result<String> {
        let own = std::env::current_exe().map_err(|e| Error::machine("cannot find fi-arch's own program").because(e))?;
        let (own, program) = (quoted(&own)?, quoted(&self.programs.join(tool.name()))?);
        let (from, to) = (self.from, self.to);
        Ok(format!(
            "#!/bin/sh\n# For tests alone: nvcc compiles for {from}, and this assembles for {to}.\n\
             exec {own} {VERB} {} --from {from} --to {to} --program {program} -- \"$@\"\n",
            tool.name()
        ))
    }
}

/// Links every entry of the folder `from` into the folder `to`, but for those named.
fn link_all(from: &Path, to: &Path, but: &[&str]) -> Result<()> {
    for entry in fs::read_dir(from).map_err(|e| Error::io("list", from, e))? {
        let entry = entry.map_err(|e| Error::io("list", from, e))?;
        if but.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        super::link(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// A path as one word of a shell.
fn quoted(path: &Path) -> Result<String> {
    let text = path.to_str().ok_or_else(|| Error::machine(format!("{} is not UTF-8", path.display())))?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        assert_eq!(quoted(Path::new("/a b/c'd$e")).unwrap(), r"'/a b/c'\''d$e'");
    }
}
