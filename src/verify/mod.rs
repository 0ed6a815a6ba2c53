//! What is wrong in an environment, and what FlashInfer would do and load in it. Reads files and the tables; changes nothing.
//!
//! | file | what it looks at |
//! | --- | --- |
//! | `packages` | the environment, FlashInfer, tvm-ffi, torch, companion packages, leftovers |
//! | `gates` | the gate of each generator, the defects behind ours, faults that stay |
//! | `toolchain` | CUDA toolkits, the host compiler, runtimes that do not fit each other |
//! | `gpus` | GPUs and their driver |
//! | `arch_list` | what FlashInfer makes of `FLASHINFER_CUDA_ARCH_LIST` |
//! | `prebuilt` | which file FlashInfer would load, what lies in its caches, locks |
//! | `what_if` | another release in place of the installed one |
//! | `activation` | what `install` or `run` has activated: will it start, is it whole, can its artifact be loaded |
//! | `variables` | variables of the process that decide |
//! | `command_line` | a command line, read without running it |
//! | `launch` | what an engine's command line makes of the fused path |
//! | `state_digest` | one digest of all that decides |
//! | `proof` | all of it together, for `verify` |
//!
//! Every finding has a stable code; docs/problems.md lists them all.

pub mod activation;
mod arch_list;
pub mod command_line;
mod gates;
mod gpus;
pub mod launch;
mod packages;
mod prebuilt;
pub mod proof;
mod state_digest;
mod toolchain;
mod variables;
mod what_if;

use std::path::{Path, PathBuf};

use crate::build::toolchain::{HostCompiler, Rejected, Toolkit};
use crate::env::Vars;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::overlay::Edit;
use crate::survey::{self, Environment, FlashInfer, Gpu, Package, Torch, TvmFfi};
use crate::tables::{Fault, Module, Tables};
use crate::target::{self, CudaVersion};

use activation::Activation;
pub use arch_list::ArchList;
pub use gates::{GateReport, Owner};
pub use prebuilt::Prebuilt;
pub use what_if::WhatIf;

/// The module whose fate a server's start depends on.
const MODULE: &str = "trtllm_comm";

/// What to look at.
#[derive(Debug, Default)]
pub struct Request {
    /// `--env DIR`; the active environment without it.
    pub env: Option<PathBuf>,
    /// The GPUs that matter. Empty: those of this machine, and SM 120 where there is none.
    pub targets: Vec<target::Request>,
    /// `flashinfer==0.6.17`.
    pub what_if: Option<String>,
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Stable: scripts rely on it.
    pub code: String,
    pub message: String,
    pub hint: String,
    pub path: Option<PathBuf>,
    /// Counted from 1.
    pub line: Option<usize>,
}

impl Finding {
    fn new(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), hint: String::new(), path: None, line: None }
    }

    /// What an error says, under a code.
    fn of(code: &str, error: &Error) -> Self {
        let message = std::iter::once(error.what()).chain(error.why().iter().map(String::as_str)).collect::<Vec<_>>().join(": ");
        Self::new(code, message).hint(error.hints().join("; "))
    }

    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    fn at(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    fn line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }
}

/// What stands in the way, and what is only worth knowing.
#[derive(Debug, Default)]
pub struct Findings {
    pub problems: Vec<Finding>,
    pub notes: Vec<Finding>,
}

impl Findings {
    fn problem(&mut self, finding: Finding) {
        self.problems.push(finding);
    }

    fn note(&mut self, finding: Finding) {
        self.notes.push(finding);
    }

    fn add(&mut self, is_problem: bool, finding: Finding) {
        if is_problem { self.problem(finding) } else { self.note(finding) }
    }
}

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Report {
    /// The variables that the process in question will have.
    pub vars: Vars,
    pub targets: Vec<target::Request>,
    pub environment: Option<Environment>,
    pub flashinfer: Option<FlashInfer>,
    /// Its files for the module are those of a release in the tables, byte for byte.
    pub listed: bool,
    /// It lies outside the folder that records it: an editable install or a source tree.
    pub editable: bool,
    pub tvm_ffi: Option<TvmFfi>,
    pub torch: Option<Torch>,
    /// flashinfer-jit-cache, flashinfer-cubin and the like, by name.
    pub companions: Vec<(String, Package)>,
    pub toolkit: Option<Toolkit>,
    pub rejected: Vec<Rejected>,
    /// The version of an unfit nvcc that FlashInfer would take all the same.
    nvcc: Option<CudaVersion>,
    pub host: Option<HostCompiler>,
    pub gpus: Vec<Gpu>,
    pub gates: Vec<GateReport>,
    /// What the overlay would change.
    pub edits: Vec<Edit>,
    /// Known faults that stay in this release, whatever is done.
    pub remains: Vec<&'static Fault>,
    pub arch_list: Option<ArchList>,
    /// The files that FlashInfer would load or has built, the one that it takes first.
    pub prebuilt: Vec<Prebuilt>,
    pub what_if: Option<WhatIf>,
    pub findings: Findings,
}

impl Report {
    fn sms(&self) -> Vec<u32> {
        self.targets.iter().map(|target| target.sm).collect()
    }

    /// The CUDA release that FlashInfer would compile with: it asks nvcc, and torch where there is none.
    fn cuda(&self) -> Option<CudaVersion> {
        self.nvcc.or(self.toolkit.as_ref().map(|toolkit| toolkit.version)).or(self.torch.as_ref().and_then(|torch| torch.cuda))
    }

    /// The folder `flashinfer`, where there is one.
    fn package(&self) -> Option<&Path> {
        self.flashinfer.as_ref().map(|flashinfer| flashinfer.package.as_path())
    }
}

/// Looks at everything. An error is a wrong command line; whatever is wrong with the machine is a finding.
pub fn examine(request: &Request, memo: &Memo) -> Result<Report> {
    let mut report = Report::default();
    let module = Tables::load().module(MODULE)?;
    // What a driver answers takes longer than all the files here.
    std::thread::scope(|scope| {
        let gpus = scope.spawn(|| survey::gpus_of_this_boot(memo));
        packages::environment(&mut report, request, memo)?;
        packages::look(&mut report);
        report.gpus = gpus.join().unwrap_or_default();
        Ok::<(), Error>(())
    })?;
    targets(&mut report, request)?;
    toolchain::look(&mut report, memo);
    gpus::look(&mut report);
    let activation = activated(&mut report, memo);
    gates::look(&mut report, module, activation.as_ref());
    arch_list::look(&mut report);
    let before = report.findings.problems.len();
    prebuilt::look(&mut report, module, memo);
    if activation.is_some_and(|activation| activation.brings_artifact()) {
        // It is loaded before anything else is looked for, and nothing has to be compiled.
        let behind = report.findings.problems.split_off(before);
        behind.into_iter().for_each(|finding| report.findings.note(finding));
    }
    if let Some(text) = &request.what_if {
        report.what_if = Some(what_if::ask(text, &report, module)?);
    }
    Ok(report)
}

/// The activation that is in force. `verify` tells all that is wrong with one; here it is one problem.
fn activated(report: &mut Report, memo: &Memo) -> Option<Activation> {
    let kept = std::mem::take(&mut report.findings);
    let activation = activation::look(report, &activation::Start::default(), memo);
    let own = std::mem::replace(&mut report.findings, kept);
    let activation = activation?;
    let place = activation.found.package();
    if activation.in_force {
        let message = "fi-arch is activated here, and in force: a gate that is closed on disk may be open all the same";
        report.findings.note(
            Finding::new("activated", message).hint("`fi-arch verify` proves it, `fi-arch uninstall` takes it back").at(place),
        );
        return Some(activation);
    }
    let first = own.problems.first().map(|problem| problem.message.clone()).unwrap_or_default();
    let message = format!("fi-arch is activated here, and not in force: {first}");
    report
        .findings
        .problem(Finding::new("activation-broken", message).hint("`fi-arch verify` tells all that is wrong").at(place));
    None
}

fn targets(report: &mut Report, request: &Request) -> Result<()> {
    report.targets = request.targets.clone();
    if report.targets.is_empty() {
        let own: Vec<String> = report.gpus.iter().map(|gpu| gpu.sm.to_string()).collect();
        // A GPU that fi-arch does not know is no reason to say nothing.
        report.targets = own.iter().filter_map(|sm| target::parse(sm).ok()).collect();
        report.targets.dedup();
    }
    if report.targets.is_empty() {
        report.targets = target::parse_list("120")?;
        report.findings.note(
            Finding::new("target-assumed", "no --sm is given and no known GPU is visible: SM 120 is looked at")
                .hint("name the GPUs that matter, such as `--sm 121`"),
        );
    }
    Ok(())
}

/// The text of a file; empty where it cannot be read.
fn text(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// `sm_120, sm_121`.
fn names(sms: &[u32]) -> String {
    sms.iter().map(|sm| format!("sm_{sm}")).collect::<Vec<_>>().join(", ")
}

fn module_so(module: &Module) -> PathBuf {
    Path::new(&module.name).join(format!("{}.so", module.name))
}
