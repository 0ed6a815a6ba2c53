//! `fi-arch install`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::output::Output;
use super::progress::Progress;
use super::selection::Flags;
use crate::activate::{self, Asked, Installed, Mode, OnMiss, Plan, Planned, State};
use crate::cancel;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::overlay;
use crate::policy::Policy;
use crate::tables;

/// Put a proven module and the repaired FlashInfer into a Python environment, exactly reversibly
///
/// The artifact comes from a bundle, from the store, or is built. It is installed as a distribution of its own, `fi-arch`: no file of
/// another package is changed; a small shim serves the repaired files at import. With --in-place they are written over the
/// originals instead, and nothing runs at start-up. `fi-arch uninstall` gives everything back, byte for byte.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: Flags,

    /// Write the repaired files over the originals (by rename, with a journal), without any start-up code: the way for images
    #[arg(long)]
    in_place: bool,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    cancel::on_signals();
    let selection = args.selection.selection()?;
    let mode = if args.in_place { Mode::InPlace } else { Mode::Shim };
    if mode == Mode::InPlace && selection.on_miss == OnMiss::Build {
        return Err(Error::usage("--in-place and --on-miss build exclude each other")
            .because("a build needs FlashInfer's originals, and they are no longer in place then")
            .hint("name all GPUs now, such as --sm \"120 121\", or leave --in-place out"));
    }
    let mut progress = Progress::new(output);
    let planned = activate::plan(&selection, mode, &mut |event| progress.event(event));
    progress.finish();
    match planned? {
        Planned::NothingToDo { flashinfer, engines } => {
            let engines_json = engines_json(&engines, &flashinfer.version);
            output.result(
                || json!({ "verdict": "nothing-to-do", "flashinfer": flashinfer.version, "files": [], "edits": [], "engines": engines_json }),
                || {
                    let mut text =
                        format!("nothing to do: {} of FlashInfer {} is right as it is", selection.module, flashinfer.version);
                    let named: Vec<&str> = engines.iter().map(|asked| asked.engine.title.as_str()).collect();
                    text.push_str(&match named.is_empty() {
                        true => ", and no engine was named\n".to_owned(),
                        false => format!(", and {} has no gate to open\n", named.join(" and ")),
                    });
                    let mut line = |name: &str, what: &str| writeln!(text, "  {name:<9} {what}").expect("a string takes all");
                    engine_lines(&engines, &flashinfer.version, &mut line);
                    text
                },
            );
        }
        Planned::Plan(plan) => {
            cancel::check()?;
            let installed = activate::install(&plan)?;
            if let Some(why) = &installed.no_byte_code {
                tracing::info!("no byte code was made, so each start compiles the files anew: {why}");
            }
            for file in &installed.left {
                let why = file.left.as_deref().unwrap_or_default();
                progress.warn(&format!("{} is left as it is: {why}", file.path.display()));
            }
            output.result(|| to_json(&plan, &installed), || text(&plan, &installed));
        }
    }
    Ok(Exit::Right)
}

fn to_json(plan: &Plan, installed: &Installed) -> Value {
    let state = &plan.package.state;
    let first = state.artifacts.first();
    json!({
        "verdict": if installed.already { "already-installed" } else { "installed" },
        "mode": state.mode,
        "site": installed.site,
        "flashinfer": plan.flashinfer.version,
        "packages": state.packages.iter().map(|package| json!({ "name": package.name, "version": package.version })).collect::<Vec<_>>(),
        "files": installed.files.iter().map(|(path, state)| json!({ "path": path, "state": state })).collect::<Vec<_>>(),
        "left": installed.left.iter().map(|file| json!({ "path": file.path, "why": file.left })).collect::<Vec<_>>(),
        "edits": edits(state),
        "artifact": first.map(|artifact| installed.site.join(activate::PACKAGE).join(&artifact.file)),
        "key": first.map(|artifact| &artifact.key),
        "artifacts": state.artifacts,
        "targets": state.artifacts.iter().map(|artifact| &artifact.target).collect::<Vec<_>>(),
        "policy": state.policy,
        "digest": plan.package.digest(),
        "engines": engines_json(&plan.engines, &plan.flashinfer.version),
    })
}

fn text(plan: &Plan, installed: &Installed) -> String {
    let state = &plan.package.state;
    let site = installed.site.display();
    if installed.already {
        return format!("already installed in {site}, nothing to do\n");
    }
    let mut text = format!("FlashInfer {} is activated in {site}\n", plan.flashinfer.version);
    let count = installed.files.len();
    let mode = match state.mode {
        Mode::InPlace => format!("in place: {count} files were written over or added, and are kept for `fi-arch uninstall`"),
        Mode::Shim | Mode::Run => format!("shim: {count} files are served at import, and no file of another package is changed"),
    };
    let mut line = |name: &str, what: &str| writeln!(text, "  {name:<9} {what}").expect("a string takes all");
    line("mode", &mode);
    line("edits", &edits(state).join(", "));
    state_lines(state, &mut line);
    engine_lines(&plan.engines, &plan.flashinfer.version, &mut line);
    line("next", "`fi-arch status` shows it, `fi-arch uninstall` takes it back");
    text
}

/// What each engine's user must give, and should know.
fn engines_json(engines: &[Asked], flashinfer: &str) -> Vec<Value> {
    let one = |asked: &Asked| {
        let advice = asked.engine.advice(&asked.version);
        let notes = tables::notes(asked.engine, &asked.version, flashinfer, None);
        json!({
            "name": asked.engine.name,
            "version": asked.version,
            "flags": advice.map(|advice| &advice.flags),
            "env": advice.map(|advice| &advice.env),
            "advice": advice.map(|advice| &advice.text),
            "notes": notes.iter().map(|note| json!({ "id": note.id, "kind": note.kind.name(), "text": note.text })).collect::<Vec<_>>(),
        })
    };
    engines.iter().map(one).collect()
}

/// The same for people.
fn engine_lines(engines: &[Asked], flashinfer: &str, line: &mut impl FnMut(&str, &str)) {
    for asked in engines {
        line("engine", &format!("{} {}", asked.engine.title, asked.version));
        if let Some(advice) = asked.engine.advice(&asked.version) {
            let words: Vec<&str> = advice.env.iter().chain(&advice.flags).map(String::as_str).collect();
            if !words.is_empty() {
                line("start it", &format!("with {}", words.join(" ")));
            }
            line("", &advice.text);
        }
        for note in tables::notes(asked.engine, &asked.version, flashinfer, None) {
            line(note.kind.name(), &note.text);
        }
    }
}

/// The ids of all edits, each once.
pub fn edits(state: &State) -> Vec<&str> {
    overlay::each_once(state.packages.iter().flat_map(|package| &package.edits).map(|edit| edit.id.as_str()))
}

/// Artifacts and policy, line by line.
pub fn state_lines(state: &State, line: &mut impl FnMut(&str, &str)) {
    for artifact in &state.artifacts {
        let on: Vec<String> = artifact.runs_on.iter().map(|[major, minor]| format!("{major}.{minor}")).collect();
        let megabytes = artifact.bytes as f64 / 1e6;
        line(
            "artifact",
            &format!(
                "{} for {} (runs on {}), {megabytes:.1} MB, key {}",
                artifact.module,
                artifact.target,
                on.join(", "),
                &artifact.key[..artifact.key.len().min(12)]
            ),
        );
        let mut needs = vec![match &artifact.libcudart {
            Some(library) => library.clone(),
            None => "no libcudart (its CUDA runtime is linked in)".to_owned(),
        }];
        needs.extend(artifact.min_driver.iter().map(|driver| format!("driver {driver} or newer")));
        line("needs", &needs.join(", "));
    }
    line("policy", &policy(&state.policy));
}

fn policy(policy: &Policy) -> String {
    let ranks = policy.ranks.iter().map(|ranks| {
        let limit =
            |name: &str, limit: Option<u32>| limit.map_or(String::new(), |limit| format!(", {name} up to {limit} tokens"));
        format!("{} ranks{}{}", ranks.count, limit("fused", ranks.max_tokens), limit("one-shot", ranks.oneshot_tokens))
    });
    let ranks = ranks.collect::<Vec<_>>().join("; ");
    if ranks.is_empty() { "no rank count is admitted".to_owned() } else { ranks }
}
