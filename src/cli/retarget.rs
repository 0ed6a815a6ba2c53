//! `ptxas` and `fatbinary` of a build with `--run-on`: what the scripts in its toolkit view call. For no person.

use std::path::PathBuf;

use crate::build::retarget::{Tool, become_tool};
use crate::error::Error;
use crate::target::Target;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(value_parser = tool)]
    tool: Tool,

    /// What nvcc compiles for
    #[arg(long)]
    from: Target,

    /// What the code is to run on
    #[arg(long)]
    to: Target,

    /// The toolkit's own program
    #[arg(long)]
    program: PathBuf,

    /// What nvcc passes to it
    #[arg(last = true)]
    args: Vec<String>,
}

fn tool(name: &str) -> Result<Tool, String> {
    let known = [Tool::Ptxas, Tool::Fatbinary];
    known.into_iter().find(|tool| tool.name() == name).ok_or_else(|| format!("`{name}` is neither ptxas nor fatbinary"))
}

/// Becomes the toolkit's program; returns only the reason why not.
pub fn run(args: Args) -> Error {
    become_tool(args.tool, &args.program, args.from, args.to, args.args)
}
