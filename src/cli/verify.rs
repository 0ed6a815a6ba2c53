//! `fi-arch verify`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::findings;
use super::output::Output;
use crate::activate::{FileIs, Mode};
use crate::env;
use crate::error::Result;
use crate::exit::Exit;
use crate::memo::Memo;
use crate::target;
use crate::verify::activation::{Activation, ArtifactReport};
use crate::verify::proof::{self, EffectiveGate, Proof, Request};

/// Say what a server will really load, and whether that is right, before it is started
///
/// Reads the environment as the server's Python will: what is activated and whether it starts, the state of every file, the gates
/// on disk and through the shim, the artifact, its driver and its libraries, and the variables that matter. Behind `--` it reads a
/// command line as well, without running it. Looks at files alone: starts no Python and imports nothing. Ends with 1 when
/// something is wrong. Every problem has a stable code (docs/problems.md). The last line is one digest of all that decides: nodes
/// that are set up alike have the same one.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The Python environment to look at [default: that of the command's Python, else the active one]
    #[arg(long, value_name = "DIR")]
    env: Option<PathBuf>,

    /// The GPUs that matter: 120, 12.0f, sm_121, or a list [default: those of this machine, else 120]
    #[arg(long, value_name = "TARGETS")]
    sm: Option<String>,

    /// The command line that starts the server, such as `python -m sglang.launch_server --tp 2 …`
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    let started = Instant::now();
    let targets = args.sm.as_deref().map(target::parse_list).transpose()?.unwrap_or_default();
    // Nothing of ours is needed on a machine that serves, a home neither.
    let memo = env::home().map(|home| Memo::load(&home)).unwrap_or_default();
    let proof = proof::prove(&Request { env: args.env, targets, command: args.command }, &memo)?;
    memo.save();
    let exit = if proof.report.findings.problems.is_empty() { Exit::Right } else { Exit::Fault };
    let elapsed = started.elapsed().as_secs_f64();
    output.result(|| to_json(&proof, elapsed), || text(&proof));
    Ok(exit)
}

fn to_json(proof: &Proof, elapsed: f64) -> Value {
    let report = &proof.report;
    let activation = proof.activation.as_ref();
    json!({
        "verdict": findings::verdict(&report.findings),
        "problems": findings::to_json(&report.findings.problems),
        "notes": findings::to_json(&report.findings.notes),
        "state": proof.state.to_string(),
        "mode": activation.and_then(Activation::mode).map(mode),
        "in_force": activation.is_some_and(|activation| activation.in_force),
        "targets": report.targets.iter().map(|target| format!("sm_{}", target.sm)).collect::<Vec<_>>(),
        "environment": report.environment.as_ref().map(|found| json!({
            "prefix": path(&found.prefix),
            "origin": found.origin,
            "site_packages": found.site_packages.iter().map(|dir| path(dir)).collect::<Vec<_>>(),
            "python_path": found.python_path.iter().map(|dir| path(dir)).collect::<Vec<_>>(),
        })),
        "flashinfer": report.flashinfer.as_ref().map(|found| json!({ "version": found.version, "path": path(&found.package) })),
        "engines": proof.engines.iter().map(|(name, package)| json!({
            "name": name,
            "version": package.version,
            "path": path(&package.package),
            "activated": activation.is_some_and(|activation| activation.package(name).is_some()),
        })).collect::<Vec<_>>(),
        "activation": activation.map(|activation| json!({
            "path": path(&activation.found.package()),
            "fi_arch": activation.state().map(|state| &state.fi_arch),
            "created": activation.state().map(|state| &state.created),
            "policy": activation.state().map(|state| &state.policy),
        })),
        "files": proof.files.iter().map(|file| json!({
            "package": file.package,
            "path": path(&file.path),
            "state": file.is.word(),
            "edited": !file.watched,
            "served": file.served.as_deref().map(path),
        })).collect::<Vec<_>>(),
        "artifact": chosen(proof).map(artifact),
        "artifacts": activation.map(|activation| activation.artifacts.iter().map(artifact).collect::<Vec<_>>()).unwrap_or_default(),
        "gates": proof.gates.iter().map(gate).collect::<Vec<_>>(),
        "gpus": report.gpus.iter().map(|gpu| json!({
            "name": gpu.name,
            "target": format!("sm_{}", gpu.sm),
            "driver": gpu.driver,
        })).collect::<Vec<_>>(),
        "command": proof.command.as_ref().map(|line| json!({
            "engine": line.engine.map(|launcher| &launcher.name),
            "program": line.program,
            "through": line.through,
            "ranks": proof.launch.as_ref().and_then(|launch| launch.ranks),
        })),
        "if_disabled": proof.if_disabled,
        "elapsed_s": elapsed,
    })
}

/// The artifact of the first target that has one.
fn chosen(proof: &Proof) -> Option<&ArtifactReport> {
    let activation = proof.activation.as_ref()?;
    proof.report.targets.iter().find_map(|target| activation.artifact_for(target.sm))
}

fn artifact(artifact: &ArtifactReport) -> Value {
    let state = &artifact.state;
    json!({
        "module": state.module,
        "target": state.target,
        "path": path(&artifact.path),
        "sha256": artifact.sha256.map(|digest| digest.to_string()),
        "recorded_sha256": state.sha256.to_string(),
        "bytes": state.bytes,
        "key": state.key,
        "verdict": artifact.manifest.as_ref().map(|manifest| &manifest.verdict.verdict),
        "kernels": artifact.manifest.as_ref().map(|manifest| manifest.verdict.kernels),
        "code": artifact.targets,
        "usable": artifact.usable.iter().map(|sm| format!("sm_{sm}")).collect::<Vec<_>>(),
        "cudart": state.cudart,
        "libcudart": state.libcudart,
        "min_driver": state.min_driver,
        "tvm_ffi": state.tvm_ffi,
    })
}

fn gate(gate: &EffectiveGate) -> Value {
    let map = |open: &[(u32, bool)]| open.iter().map(|(sm, open)| (format!("sm_{sm}"), json!(open))).collect::<Map<_, _>>();
    json!({
        "package": gate.package,
        "name": gate.name,
        "path": path(&gate.path),
        "line": gate.line,
        "on_disk": map(&gate.on_disk),
        "open": map(&gate.open),
        "owner": gate.owner.name(),
    })
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Shim => "shim",
        Mode::InPlace => "in-place",
        Mode::Run => "run",
    }
}

fn text(proof: &Proof) -> String {
    let report = &proof.report;
    let mut text = String::new();
    let mut row = |name: &str, value: String| _ = writeln!(text, "{name:<14}{value}");
    let none = || "none".to_owned();
    row("targets", report.targets.iter().map(|target| format!("sm_{}", target.sm)).collect::<Vec<_>>().join(", "));
    row(
        "environment",
        report.environment.as_ref().map_or_else(none, |found| format!("{} ({})", found.prefix.display(), found.origin)),
    );
    row(
        "FlashInfer",
        report.flashinfer.as_ref().map_or_else(none, |found| format!("{}, {}", found.version, found.package.display())),
    );
    for (name, package) in &proof.engines {
        row(name, package.version.clone());
    }
    row(
        "activation",
        proof.activation.as_ref().map_or_else(none, |activation| {
            let force = if activation.in_force { "in force" } else { "NOT in force" };
            let mode = activation.mode().map_or("unreadable", mode);
            format!("{mode}, {force}, {}", activation.found.package().display())
        }),
    );
    if let Some(state) = proof.activation.as_ref().and_then(Activation::state) {
        row("policy", format!("ranks: {}", state.policy.counts()));
    }
    if !proof.files.is_empty() {
        let count = |is: FileIs| proof.files.iter().filter(|file| file.is == is).count();
        let counts = [FileIs::Original, FileIs::Ours, FileIs::Drifted, FileIs::Missing].map(|is| (is, count(is)));
        let told: Vec<String> =
            counts.iter().filter(|(_, count)| *count > 0).map(|(is, count)| format!("{count} {}", is.word())).collect();
        let served = proof.files.iter().filter(|file| file.served.is_some()).count();
        row("files", format!("{}; {served} served in their place", told.join(", ")));
    }
    if let Some(found) = chosen(proof) {
        let verdict = found.manifest.as_ref().map_or("unproven", |manifest| manifest.verdict.verdict.as_str());
        let runtime = found.state.libcudart.as_deref().unwrap_or("its own CUDA runtime");
        let driver = found.state.min_driver.as_ref().map(|floor| format!(", driver {floor}")).unwrap_or_default();
        row(
            "artifact",
            format!(
                "{} {}, {:.1} MB, {}, {verdict}, {runtime}{driver}",
                found.state.module,
                found.state.target,
                found.state.bytes as f64 / 1e6,
                found.sha256.map_or_else(none, |digest| digest.short())
            ),
        );
    }
    for gate in proof.gates.iter().filter(|gate| gate.owner.name() == "fi-arch") {
        let word = |open: bool| if open { "open" } else { "closed" };
        let states: Vec<String> = gate
            .open
            .iter()
            .zip(&gate.on_disk)
            .map(|((sm, open), (_, on_disk))| match open == on_disk {
                true => format!("sm_{sm} {}", word(*open)),
                false => format!("sm_{sm} {} ({} on disk)", word(*open), word(*on_disk)),
            })
            .collect();
        let file = gate.path.file_name().unwrap_or_default().display();
        row("gate", format!("{} {} ({file}:{}): {}", gate.package, gate.name, gate.line, states.join(", ")));
    }
    if let Some(line) = &proof.command {
        let what = line.engine.map_or("not read", |launcher| launcher.name.as_str());
        let ranks = proof.launch.as_ref().and_then(|launch| launch.ranks).map(|ranks| format!(", {ranks} ranks"));
        row("command", format!("{what}{}", ranks.unwrap_or_default()));
    }
    row("if disabled", proof.if_disabled.clone());
    text.push_str(&findings::text(&report.findings, "this is what will be loaded, and it is right"));
    let _ = writeln!(text, "state {}", proof.state);
    text
}
