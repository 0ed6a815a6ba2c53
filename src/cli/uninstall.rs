//! `fi-arch uninstall`.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;

use super::output::Output;
use crate::activate::{self, TakenBack};
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::memo::Memo;
use crate::survey;

/// Take back what `fi-arch install` did, byte for byte
///
/// A file that somebody else changed since is left alone and named; everything else is restored, and the exit code is 1.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The Python environment [default: the active one, else that of python3 on PATH]
    #[arg(long, value_name = "DIR")]
    env: Option<PathBuf>,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    let memo = env::home().map(|home| Memo::load(&home)).unwrap_or_default();
    let environment = survey::environment(args.env.as_deref(), &memo)?
        .ok_or_else(|| Error::machine("no Python environment was found").hint("name one with --env DIR"))?;
    let all = activate::uninstall(&environment)?;
    let found: Vec<&TakenBack> = all.iter().filter(|one| one.found).collect();
    let left = found.iter().any(|one| one.left().next().is_some());
    let verdict = match (found.is_empty(), left) {
        (true, _) => "nothing-to-do",
        (false, false) => "uninstalled",
        (false, true) => "left",
    };
    output.result(
        || {
            let files = found.iter().flat_map(|one| &one.files);
            let file = |file: &activate::FoundFile| {
                json!({ "path": file.path, "distribution": file.distribution, "was": file.is.word(), "left": file.left })
            };
            json!({
                "verdict": verdict,
                "sites": found.iter().map(|one| &one.site).collect::<Vec<_>>(),
                "files": files.map(file).collect::<Vec<_>>(),
            })
        },
        || match found.is_empty() {
            true => format!("nothing of fi-arch is installed in {}\n", environment.prefix.display()),
            false => found.iter().map(|one| text(one)).collect(),
        },
    );
    Ok(if left { Exit::Fault } else { Exit::Right })
}

fn text(one: &TakenBack) -> String {
    let site = one.site.display();
    let mut text = String::new();
    let left = one.left().count();
    let mut say = |line: String| writeln!(text, "{line}").expect("a string takes all");
    if let Some(recovered) = &one.recovered {
        say(recovered.says().to_owned());
    }
    if left == 0 {
        say(format!("uninstalled from {site}: everything is as it was before"));
        return text;
    }
    say(format!("uninstalled from {site}, but {left} of {} files could not be restored:", one.files.len()));
    for file in &one.files {
        match &file.left {
            Some(why) => say(format!("  {:<9} {}\n            {why}", file.is.word(), file.path.display())),
            None => say(format!("  restored  {}", file.path.display())),
        }
    }
    say("put those files right (copy the original back, or reinstall the package), then run `fi-arch uninstall` again".to_owned());
    text
}
