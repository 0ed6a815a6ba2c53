//! The gate of every generator beside ours, the defects behind ours, and the faults that stay.

use std::path::PathBuf;

use super::activation::Activation;
use super::{Finding, Report, names};
use crate::overlay;
use crate::sites::{self, python};
use crate::tables::{Module, Tables};

/// Whose business a gate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// A module that fi-arch repairs.
    FiArch,
    /// FlashInfer excludes these GPUs on purpose; fi-arch does not touch it.
    OnPurpose,
    /// Nothing is in the way.
    Nobody,
}

impl Owner {
    /// As JSON has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::FiArch => "fi-arch",
            Self::OnPurpose => "on purpose, not touched",
            Self::Nobody => "open",
        }
    }
}

/// The gate of one generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateReport {
    pub generator: String,
    pub path: PathBuf,
    pub line: usize,
    /// The majors that are let in; `None` where the generator asks for none, and all are.
    pub majors: Option<Vec<u32>>,
    /// For each asked target, whether it is let in.
    pub open: Vec<(u32, bool)>,
    pub owner: Owner,
}

/// Looks at the gates on disk and at what stands behind ours. Where an activation is in force, a process meets its gate instead.
pub fn look(report: &mut Report, module: &Module, activation: Option<&Activation>) {
    let Some(flashinfer) = report.flashinfer.clone() else { return };
    let package = &flashinfer.package;
    let path = sites::file_in(package, &module.generator.file);
    let sms = report.sms();
    if let (Ok(source), Some(gate)) = (sites::read(&path), sites::gate_of(module)) {
        match python::generators(&source, gate) {
            Ok(found) => report.gates.extend(found.into_iter().map(|found| one(found, &path, &sms))),
            Err(error) => report.findings.problem(Finding::of("gate-unknown", &sites::at(&path, error)).at(&path)),
        }
    }
    let served = activation.and_then(|activation| activation.served(&module.generator.file));
    match served.map_or_else(|| sites::gate(package, module), |file| sites::gate_in(&file, module)) {
        Ok(state) => {
            let closed: Vec<u32> = sms.iter().copied().filter(|sm| !state.open_for(sm / 10)).collect();
            if !closed.is_empty() {
                let majors = state.majors.unwrap_or_default();
                let message = format!(
                    "{} lets in the majors {majors:?} alone: {} ends in \"No supported CUDA architectures found for major versions {majors:?}\"",
                    module.generator.function,
                    names(&closed)
                );
                let hint = format!(
                    "`fi-arch install --sm {}` builds the module and serves the repaired files; FlashInfer 0.6.17 and later need no repair",
                    closed[0]
                );
                report.findings.problem(Finding::new("gate-closed", message).hint(hint).at(&state.path).line(state.line));
            }
        }
        Err(error) => report.findings.problem(Finding::of("gate-unknown", &error).at(&path)),
    }
    defects(report, module, activation.is_some());
    remaining(report);
}

/// Faults of this release that no edit cures.
pub fn remaining(report: &mut Report) {
    let Some(flashinfer) = &report.flashinfer else { return };
    if let Some(release) = Tables::load().release(&flashinfer.version) {
        report.remains = Tables::load().remaining(release);
    }
    for fault in report.remains.clone() {
        report.findings.note(
            Finding::new("fault-remains", format!("{}: {}", fault.id, fault.text))
                .hint("no edit of fi-arch cures it: keep it in mind, or use a release without it"),
        );
    }
}

fn one(found: python::Generator, path: &std::path::Path, sms: &[u32]) -> GateReport {
    let state = sites::GateState { path: path.to_owned(), line: found.line, majors: found.majors };
    let open: Vec<(u32, bool)> = sms.iter().map(|&sm| (sm, state.open_for(sm / 10))).collect();
    let ours = Tables::load().modules.iter().any(|module| module.generator.function == found.name && module.gated);
    let owner = match (ours, open.iter().all(|(_, open)| *open)) {
        (true, _) => Owner::FiArch,
        (false, false) => Owner::OnPurpose,
        (false, true) => Owner::Nobody,
    };
    GateReport { generator: found.name, path: state.path, line: state.line, majors: state.majors, open, owner }
}

/// The defects behind the gate: problems, unless an activation serves them cured.
fn defects(report: &mut Report, module: &Module, cured: bool) {
    let Some(flashinfer) = &report.flashinfer else { return };
    let overlay = match overlay::compute(&flashinfer.package, module, &flashinfer.version, &overlay::Options::default()) {
        Ok(overlay) => overlay,
        Err(error) if error.what().contains("bears fi-arch's edits already") => {
            report.listed = true;
            if !cured {
                report.findings.note(Finding::of("edited-in-place", &error));
            }
            return;
        }
        Err(error) => return report.findings.problem(Finding::of("flashinfer-unknown", &error).at(&flashinfer.package)),
    };
    report.listed = overlay.listed;
    for warning in &overlay.warnings {
        let text = warning.strip_prefix("unlisted: ").unwrap_or(warning);
        report
            .findings
            .note(Finding::new("flashinfer-unlisted", text).hint("what fi-arch says of it was found in its files, and holds"));
    }
    let gate = sites::gate_of(module).map(|_| "gate");
    let mut told: Vec<&str> = Vec::new();
    for edit in overlay.edits.iter().filter(|edit| !cured && Some(edit.id.as_str()) != gate) {
        if told.contains(&edit.id.as_str()) {
            continue;
        }
        told.push(&edit.id);
        let defect = Tables::load().defect(&edit.id);
        report.findings.problems.push(
            Finding::new(format!("defect-{}", edit.id), format!("{} (cured by {})", defect.causes, defect.upstream))
                .hint("`fi-arch install` cures all defects of a release together; `fi-arch build --show-edits` shows how")
                .at(sites::file_in(&flashinfer.package, &edit.path))
                .line(edit.line),
        );
    }
    report.edits = overlay.edits;
}
