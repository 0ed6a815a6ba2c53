//! `fi-arch run`.

use std::ffi::OsString;

use super::output::Output;
use super::progress::Progress;
use super::selection::Flags;
use crate::activate::{self, Mode, Planned, Program};
use crate::cancel;
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::memo::Memo;

/// Run a command with the repaired FlashInfer and the proven module, and install nothing
///
/// For that process and all that it starts. The environment is that of --env, else that of the Python which the command itself
/// names (python, or the first line of a script), else the active one. Where `fi-arch install` was used in it, the command simply
/// runs: what is installed is used, and the flags here say nothing. Signals and the exit code are the command's own.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: Flags,

    /// The command, behind `--`
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    // A build may be on the way; the command itself gets its signals as ever.
    cancel::on_signals();
    let program = Program::new(&args.command)?;
    let mut selection = args.selection.selection()?;
    if selection.env.is_none() {
        selection.env = program.python();
    }
    let home = env::home()?;
    let mut progress = Progress::new(output);
    let (environment, _) = activate::environment(selection.env.as_deref(), &Memo::load(&home))?;
    if let Some(found) = activate::look(&environment, &Memo::load(&home))? {
        progress.warn(&format!(
            "fi-arch is installed in {}: that is used, as it is, and nothing is added (`fi-arch uninstall` takes it back)",
            found.site.display()
        ));
        return Err(program.exec(None));
    }
    if let Some((site, in_place)) = activate::in_place(&environment)? {
        let files = in_place.files.len();
        return Err(Error::machine(format!(
            "{files} files of an installation in place are still in force in {}",
            site.display()
        ))
        .because("their package was removed without taking them back")
        .hint("`fi-arch uninstall` gives the originals back; `fi-arch install --in-place` makes it whole again"));
    }
    let planned = activate::plan(&selection, Mode::Run, &mut |event| progress.event(event));
    progress.finish();
    match planned? {
        Planned::NothingToDo { flashinfer, .. } => {
            progress.warn(&format!(
                "nothing to do: {} of FlashInfer {} is right as it is, and no engine that was named has a gate to open",
                selection.module, flashinfer.version
            ));
            Err(program.exec(None))
        }
        Planned::Plan(plan) => {
            if let Some(flag) = program.deaf() {
                progress.warn(&format!(
                    "this Python is started with {flag}, which hides what `run` sets: nothing will be in force. Leave {flag} out, or use `fi-arch install`"
                ));
            }
            Err(program.exec(Some(&activate::run_folder(&plan, &home)?)))
        }
    }
}
