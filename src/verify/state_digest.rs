//! One digest of everything that decides what a process will load: nodes that are set up alike have the same one.
//!
//! No path, no moment, no name of a machine, and nothing of its GPUs and their driver goes into it.

use std::fmt::Write as _;

use super::Report;
use super::activation::Activation;
use crate::digest::Digest;
use crate::sites;
use crate::survey::Package;
use crate::tables::Module;

/// Problems of a machine's GPUs, not of what is set up on it.
const OF_THE_MACHINE: [&str; 6] =
    ["artifact-absent", "artifact-driver-too-old", "driver-too-old", "more-ranks-than-gpus", "no-visible-gpu", "arch-set-empty"];

pub fn of(report: &Report, module: &Module, activation: Option<&Activation>, engines: &[(String, Package)]) -> Digest {
    let text = text(report, module, activation, engines);
    tracing::debug!("the state:\n{text}");
    Digest::of(text.as_bytes())
}

/// What the digest is of, a line each.
fn text(report: &Report, module: &Module, activation: Option<&Activation>, engines: &[(String, Package)]) -> String {
    let mut text = "fi-arch state 1\n".to_owned();
    let mut line = |what: &str, value: &dyn std::fmt::Display| _ = writeln!(text, "{what} {value}");
    let digest = |digest: Option<Digest>| digest.map_or_else(|| "none".to_owned(), |digest| digest.to_string());
    for (name, package) in engines {
        line(&format!("version {name}"), &package.version);
    }
    if let Some(flashinfer) = &report.flashinfer {
        line("version flashinfer", &flashinfer.version);
    }
    if let Some(tvm_ffi) = &report.tvm_ffi {
        line("version tvm_ffi", &tvm_ffi.version);
    }
    if let Some(torch) = &report.torch {
        line("version torch", &torch.version);
    }
    for (name, package) in &report.companions {
        line(&format!("version {name}"), &package.version);
    }
    match activation {
        None => {
            line("mode", &"none");
            for path in report.package().map(|_| &module.files).into_iter().flatten() {
                let file = sites::file_in(report.package().expect("it was there"), path);
                line(&format!("file {path}"), &digest(Digest::of_file(&file).ok()));
            }
        }
        Some(activation) => {
            match activation.state() {
                None => line("mode", &"unreadable"),
                Some(state) => {
                    let json = |value| serde_json::to_string(&value).expect("it is always JSON");
                    line("mode", &json(serde_json::json!([state.mode, state.on_miss])));
                    line("policy", &json(serde_json::json!(state.policy)));
                    for (package, found) in state.packages.iter().zip(&activation.found.packages) {
                        line(&format!("recorded {}", package.name), &package.version);
                        for (file, found) in package.files.iter().zip(&found.files) {
                            line(&format!("file {} {}", file.path, file.post), &digest(found.digest));
                        }
                    }
                }
            }
            line("in force", &activation.in_force);
            for (path, found) in &activation.own {
                line(&format!("own {path}"), &digest(*found));
            }
            for artifact in &activation.artifacts {
                let state = &artifact.state;
                line(&format!("artifact {} {} {}", state.module, state.target, state.key), &digest(artifact.sha256));
            }
        }
    }
    let mut codes: Vec<&str> = report.findings.problems.iter().map(|problem| problem.code.as_str()).collect();
    codes.retain(|code| !OF_THE_MACHINE.contains(code));
    codes.sort_unstable();
    codes.dedup();
    line("problems", &codes.join(" "));
    text
}
