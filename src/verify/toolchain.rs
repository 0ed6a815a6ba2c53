//! CUDA toolkits, the host compiler, and whether they fit torch.

use std::path::PathBuf;

use super::{Finding, Report, names};
use crate::build::toolchain;
use crate::env;
use crate::error::Error;
use crate::memo::Memo;
use crate::target::CudaVersion;

pub fn look(report: &mut Report, memo: &Memo) {
    let targets = report.targets.clone();
    let wanted = |nvcc: CudaVersion| targets.iter().try_for_each(|target| target.resolve(nvcc).map(|_| ()));
    match toolchain::find(None, report.environment.as_ref(), None, &wanted, memo) {
        Ok(found) => (report.toolkit, report.rejected) = (found.toolkit, found.rejected),
        Err(error) => report.findings.problem(Finding::of("toolkit-unfit", &error)),
    }
    rejected(report, memo);
    forgiven(report);
    match toolchain::host_compiler(memo) {
        Ok(found) => report.host = Some(found),
        Err(error) => host(report, &error),
    }
    if let (Some(toolkit), Some(torch)) = (&report.toolkit, report.torch.as_ref().and_then(|torch| torch.cuda)) {
        let pair =
            format!("the toolkit {} is CUDA {}, and torch is built for CUDA {torch}", toolkit.root.display(), toolkit.version);
        if toolkit.version.major != torch.major {
            let message =
                format!("{pair}: what FlashInfer compiles asks for {}, which torch does not bring", toolkit.cudart_soname);
            let hint = format!("point CUDA_HOME at a CUDA {} toolkit", torch.major);
            let root = toolkit.root.clone();
            report.findings.problem(Finding::new("toolkit-torch-major", message).hint(hint).at(root));
        } else if toolkit.version != torch {
            let root = toolkit.root.clone();
            let finding = Finding::new("toolkit-torch-minor", format!("{pair}: works, within one major"));
            report.findings.note(finding.hint("nothing has to be done").at(root));
        }
    }
}

/// The toolkits that were passed over. FlashInfer takes `CUDA_HOME`, else `CUDA_PATH`, else nvcc on `PATH`, as it is: the first
/// of these that is unfit is what its own compiles stumble over.
fn rejected(report: &mut Report, memo: &Memo) {
    let first = [env::CUDA_HOME, env::CUDA_PATH].into_iter().find(|name| env::is_set(name));
    for rejected in report.rejected.clone() {
        let is_variable = rejected.origin == env::CUDA_HOME || rejected.origin == env::CUDA_PATH;
        let flashinfers = first.map_or(rejected.origin == "nvcc on PATH", |name| rejected.origin == name);
        if flashinfers {
            report.nvcc = toolchain::version(&rejected.root, memo);
        }
        let code = match (is_variable && !rejected.root.is_dir(), rejected.is_mixed()) {
            (true, _) => "cuda-home-malformed",
            (_, true) => "toolkit-mixed",
            _ if rejected.why.contains("cannot emit code") => "toolkit-too-old",
            _ => "toolkit-unfit",
        };
        let message = format!("{} ({}) is passed over: {}", rejected.root.display(), rejected.origin, rejected.why);
        let hint = if is_variable {
            format!("set {} to the folder of one whole toolkit, or unset it", rejected.origin)
        } else {
            "install a whole toolkit of CUDA 12.9 or newer; `fi-arch build` fetches one into its own folder where none fits"
                .to_owned()
        };
        report.findings.add(flashinfers, Finding::new(code, message).hint(hint).at(rejected.root));
    }
}

/// A value that fi-arch understands and FlashInfer, which takes it letter by letter, does not: quotes, spaces, a bin folder.
fn forgiven(report: &mut Report) {
    let Some(name) = [env::CUDA_HOME, env::CUDA_PATH].into_iter().find(|name| env::is_set(name)) else { return };
    let Some(toolkit) = report.toolkit.clone().filter(|toolkit| toolkit.origin == name) else { return };
    let value = env::var(name).map(PathBuf::from).unwrap_or_default();
    if !value.join("bin/nvcc").exists() {
        let message = format!("{name} is set to `{}`, in which FlashInfer finds no bin/nvcc", value.display());
        let hint = format!("export {name}={}", toolkit.root.display());
        report.findings.problem(Finding::new("cuda-home-malformed", message).hint(hint).at(toolkit.root));
    }
}

/// No host compiler: a problem only for who compiles here.
fn host(report: &mut Report, error: &Error) {
    let named = env::is_set(env::CXX) || env::is_set(env::NVCC_CCBIN);
    report.findings.add(named, Finding::of("host-compiler", error));
}

/// Says that nothing here can compile, where nothing that is there can be loaded either.
pub fn missing(report: &mut Report, is_needed: bool) {
    if report.toolkit.is_some() || report.flashinfer.is_none() {
        return;
    }
    let sms = report.sms();
    let finding = Finding::new("toolkit-missing", format!("no CUDA toolkit here can compile for {}", names(&sms))).hint(format!(
        "`fi-arch build --sm {}` fetches CUDA 13.0 into its own folder; or install a toolkit and set CUDA_HOME",
        sms[0]
    ));
    report.findings.add(is_needed, finding);
}
