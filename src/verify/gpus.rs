//! GPUs and their driver.

use std::path::{Path, PathBuf};

use super::{Finding, Report};
use crate::build::provision;
use crate::env;
use crate::tables;
use crate::target::{Suffix, Target};

pub fn look(report: &mut Report) {
    libcuda(report);
    // What will be loaded is of the CUDA that torch brings, or of the one that fi-arch fetches.
    let cuda = report.torch.as_ref().and_then(|torch| torch.cuda).unwrap_or_else(provision::cuda_version);
    for gpu in report.gpus.clone() {
        let Some(floor) = tables::min_driver(cuda, Target { sm: gpu.sm, suffix: Suffix::A }) else { continue };
        if older(&gpu.driver, floor) {
            let message =
                format!("{} runs driver {}; code of CUDA {} for it needs {floor} or newer", gpu.name, gpu.driver, cuda.major);
            let hint = format!("install driver {floor} or newer, or a torch of an older CUDA major");
            report.findings.problem(Finding::new("driver-too-old", message).hint(hint));
        }
    }
    let here: Vec<u32> = report.gpus.iter().map(|gpu| gpu.sm).collect();
    let absent: Vec<u32> = report.sms().into_iter().filter(|sm| !here.is_empty() && !here.contains(sm)).collect();
    if !absent.is_empty() {
        let message = format!("{} is asked for, and this machine has {}", super::names(&absent), super::names(&here));
        report.findings.note(Finding::new("target-elsewhere", message).hint("what is said of it holds for another machine"));
    }
}

fn libcuda(report: &mut Report) {
    let machine = std::env::consts::ARCH;
    let own = env::var(env::LD_LIBRARY_PATH).unwrap_or_default();
    let system = [
        format!("/usr/lib/{machine}-linux-gnu"),
        format!("/lib/{machine}-linux-gnu"),
        "/usr/lib64".to_owned(),
        "/usr/lib".to_owned(),
        "/usr/local/nvidia/lib64".to_owned(),
        "/usr/local/cuda/compat".to_owned(),
        "/usr/lib/wsl/lib".to_owned(),
        "/run/opengl-driver/lib".to_owned(),
    ];
    let is_there = std::env::split_paths(&own).chain(system.into_iter().map(PathBuf::from)).any(|dir| has_driver(&dir));
    if !is_there {
        report.findings.note(
            Finding::new("no-libcuda", "no libcuda.so.1 is here: kernels can be built and proven, and not run")
                .hint("none is needed to build; in a container, start it with the NVIDIA runtime (`--gpus all`)"),
        );
    }
}

fn has_driver(dir: &Path) -> bool {
    dir.join("libcuda.so.1").exists()
}

/// Whether a driver's version is below a floor.
pub fn older(version: &str, floor: &str) -> bool {
    numbers(version) < numbers(floor)
}

/// A version by its numbers. Missing ones count as nothing: 580 is not newer than 580.65.
fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}
