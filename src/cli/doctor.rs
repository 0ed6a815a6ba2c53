//! `fi-arch doctor`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use super::findings;
use super::output::Output;
use crate::env;
use crate::error::Result;
use crate::exit::Exit;
use crate::memo::Memo;
use crate::overlay;
use crate::target;
use crate::verify::{self, GateReport, Owner, Report};

/// Say what stands between an environment and the fused all-reduce on a GPU: every gate, every defect, every trap
///
/// Looks at files alone: starts no Python, imports nothing, compiles nothing, needs no network and no GPU. Ends with 1 when
/// something is wrong for the targets. Every problem has a stable code (docs/problems.md).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The Python environment to look at [default: the active one, else that of python3 on PATH]
    #[arg(long, value_name = "DIR")]
    env: Option<PathBuf>,

    /// The GPUs that matter: 120, 12.0f, sm_121, or a list [default: those of this machine, else 120]
    #[arg(long, value_name = "TARGETS")]
    sm: Option<String>,

    /// Say what another release would change, such as flashinfer==0.6.17
    #[arg(long, value_name = "flashinfer==VERSION")]
    what_if: Option<String>,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    let started = Instant::now();
    let targets = args.sm.as_deref().map(target::parse_list).transpose()?.unwrap_or_default();
    let memo = env::home().map(|home| Memo::load(&home)).unwrap_or_default();
    let report = verify::examine(&verify::Request { env: args.env, targets, what_if: args.what_if }, &memo)?;
    memo.save();
    let exit = if report.findings.problems.is_empty() { Exit::Right } else { Exit::Fault };
    let elapsed = started.elapsed().as_secs_f64();
    output.result(|| to_json(&report, elapsed), || text(&report));
    Ok(exit)
}

fn to_json(report: &Report, elapsed: f64) -> Value {
    let path = |path: &std::path::Path| path.display().to_string();
    json!({
        "verdict": findings::verdict(&report.findings),
        "problems": findings::to_json(&report.findings.problems),
        "notes": findings::to_json(&report.findings.notes),
        "targets": report.targets.iter().map(|target| format!("sm_{}", target.sm)).collect::<Vec<_>>(),
        "environment": report.environment.as_ref().map(|found| json!({
            "prefix": path(&found.prefix),
            "origin": found.origin,
            "site_packages": found.site_packages.iter().map(|dir| path(dir)).collect::<Vec<_>>(),
        })),
        "flashinfer": report.flashinfer.as_ref().map(|found| json!({
            "version": found.version,
            "path": path(&found.package),
            "listed": report.listed,
            "editable": report.editable,
            "edits": edit_ids(report),
            "remains": report.remains.iter().map(|fault| &fault.id).collect::<Vec<_>>(),
        })),
        "tvm_ffi": report.tvm_ffi.as_ref().map(|found| json!({ "version": found.version, "path": path(&found.package) })),
        "torch": report.torch.as_ref().map(|found| json!({
            "version": found.version,
            "cuda": found.cuda.map(|cuda| cuda.to_string()),
            "cxx11_abi": found.cxx11_abi,
        })),
        "companions": report.companions.iter().map(|(name, found)| json!({
            "name": name,
            "version": found.version,
            "path": path(&found.package),
        })).collect::<Vec<_>>(),
        "toolkits": report.rejected.iter().map(|rejected| json!({
            "root": path(&rejected.root),
            "origin": rejected.origin,
            "fit": false,
            "why": rejected.why,
        })).chain(report.toolkit.iter().map(|toolkit| json!({
            "root": path(&toolkit.root),
            "origin": toolkit.origin,
            "fit": true,
            "version": toolkit.full_version,
            "cudart": toolkit.cudart_soname,
        }))).collect::<Vec<_>>(),
        "host_compiler": report.host.as_ref().map(|host| json!({ "path": path(&host.path), "version": host.version })),
        "gpus": report.gpus.iter().map(|gpu| json!({
            "name": gpu.name,
            "target": format!("sm_{}", gpu.sm),
            "driver": gpu.driver,
        })).collect::<Vec<_>>(),
        "gates": report.gates.iter().map(gate).collect::<Vec<_>>(),
        "arch_list": report.arch_list.as_ref().map(|list| json!({
            "raw": list.raw,
            "canonical": list.canonical,
            "becomes": list.becomes.as_ref().ok(),
            "error": list.becomes.as_ref().err(),
        })),
        "prebuilt": report.prebuilt.iter().map(|found| json!({
            "path": path(&found.path),
            "origin": found.origin,
            "first": found.first,
            "targets": found.targets,
            "kernels": found.kernels,
            "hollow": found.hollow,
            "missing": found.missing.iter().map(|sm| format!("sm_{sm}")).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "what_if": report.what_if.as_ref().map(|what_if| json!({
            "flashinfer": what_if.flashinfer,
            "edits": what_if.edits,
            "gone": what_if.gone,
            "new": what_if.new,
            "remains": what_if.remains,
            "tvm_ffi_fits": what_if.tvm_ffi_fits,
        })),
        "elapsed_s": elapsed,
    })
}

fn gate(gate: &GateReport) -> Value {
    json!({
        "generator": gate.generator,
        "path": gate.path.display().to_string(),
        "line": gate.line,
        "majors": gate.majors,
        "open": gate.open.iter().map(|(sm, open)| (format!("sm_{sm}"), json!(open))).collect::<serde_json::Map<_, _>>(),
        "owner": gate.owner.name(),
    })
}

fn edit_ids(report: &Report) -> Vec<&str> {
    overlay::each_once(report.edits.iter().map(|edit| edit.id.as_str()))
}

fn text(report: &Report) -> String {
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
        report.flashinfer.as_ref().map_or_else(none, |found| {
            let listed = if report.listed { "" } else { ", not listed" };
            let editable = if report.editable { ", a source tree" } else { "" };
            format!("{}{listed}{editable}, {}", found.version, found.package.display())
        }),
    );
    row("tvm-ffi", report.tvm_ffi.as_ref().map_or_else(none, |found| found.version.clone()));
    row(
        "torch",
        report.torch.as_ref().map_or_else(none, |found| {
            let cuda = found.cuda.map_or("no CUDA".to_owned(), |cuda| format!("CUDA {cuda}"));
            format!("{} ({cuda})", found.version)
        }),
    );
    for (name, found) in &report.companions {
        row(name.strip_prefix("flashinfer-").unwrap_or(name), found.version.clone());
    }
    row(
        "CUDA toolkit",
        report
            .toolkit
            .as_ref()
            .map_or_else(none, |found| format!("{}, {} ({})", found.full_version, found.root.display(), found.origin)),
    );
    row("host compiler", report.host.as_ref().map_or_else(none, |host| format!("{}, {}", host.version, host.path.display())));
    let gpus = report.gpus.iter().map(|gpu| format!("{} (sm_{}, driver {})", gpu.name, gpu.sm, gpu.driver)).collect::<Vec<_>>();
    row("GPUs", if gpus.is_empty() { none() } else { gpus.join("; ") });
    for gate in &report.gates {
        let open =
            gate.open.iter().map(|(sm, open)| format!("sm_{sm} {}", if *open { "open" } else { "closed" })).collect::<Vec<_>>();
        let owner = if gate.owner == Owner::OnPurpose { " on purpose, not touched" } else { "" };
        let file = gate.path.file_name().unwrap_or_default().display();
        row("gate", format!("{} ({file}:{}): {}{owner}", gate.generator, gate.line, open.join(", ")));
    }
    for found in &report.prebuilt {
        let first = if found.first { "loaded first" } else { "there" };
        row(
            "module",
            format!(
                "{first}: {} ({}; {} kernels, {} hollow)",
                found.path.display(),
                found.targets.join(" "),
                found.kernels,
                found.hollow
            ),
        );
    }
    if let Some(list) = &report.arch_list {
        let becomes = list.becomes.as_ref().map_or_else(Clone::clone, |archs| archs.join(" "));
        row("arch list", format!("\"{}\" becomes {becomes}", list.raw));
    }
    if let Some(what_if) = &report.what_if {
        let list = |ids: &[String]| if ids.is_empty() { "nothing".to_owned() } else { ids.join(", ") };
        row(
            "what if",
            format!("FlashInfer {}: to repair: {}; gone: {}", what_if.flashinfer, list(&what_if.edits), list(&what_if.gone)),
        );
    }
    text.push_str(&findings::text(&report.findings, "nothing is wrong for these targets"));
    text
}
