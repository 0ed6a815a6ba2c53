//! Variables of the process that decide what becomes of the fused path.

use std::path::PathBuf;

use super::{Finding, Report};
use crate::env;
use crate::survey::Package;
use crate::tables;

/// The code of the finding, and the id of the engines' note of the versions that it concerns.
pub const EXPANDABLE: &str = "expandable-segments";

pub fn look(report: &mut Report, engines: &[(String, Package)]) {
    let vars = report.vars.clone();
    for name in env::TORCH_ALLOC_CONF {
        let Some(value) = vars.text(name).filter(|value| is_expandable(value)) else { continue };
        let message = format!(
            "{name}=\"{value}\": torch's memory then lies in pieces, and ranks were reported to fail when they exchange its handles"
        );
        let hint = format!("take expandable_segments:True out of {name}");
        report.findings.add(breaks_handles(report, engines), Finding::new(EXPANDABLE, message).hint(hint));
    }
    if vars.is_on(env::FLASHINFER_CONFIDENTIAL_COMPUTE) {
        let message =
            "FLASHINFER_CONFIDENTIAL_COMPUTE is set: a FlashInfer that knows it takes torch's symmetric memory for its workspace";
        report.findings.note(
            Finding::new("confidential-compute", message)
                .hint("right where FlashInfer's own allocation is refused; else unset it"),
        );
    }
    if visible(&vars) == Some(0) {
        let value = vars.raw(env::CUDA_VISIBLE_DEVICES).unwrap_or_default();
        let message = format!("CUDA_VISIBLE_DEVICES=\"{}\": the process sees no GPU", value.to_string_lossy());
        report.findings.problem(Finding::new("no-visible-gpu", message).hint("unset it, or name the GPUs that are to be used"));
    }
}

/// Whether an engine that is here exchanges handles in the way that was reported to fail. Without an engine nobody knows.
fn breaks_handles(report: &Report, engines: &[(String, Package)]) -> bool {
    let flashinfer = report.flashinfer.as_ref().map_or("unknown", |found| found.version.as_str());
    let concerned = |(name, package): &(String, Package)| {
        let engine = tables::engine(name).ok();
        engine.is_some_and(|engine| tables::notes(engine, &package.version, flashinfer, None).iter().any(|n| n.id == EXPANDABLE))
    };
    engines.is_empty() || engines.iter().any(concerned)
}

/// The number of GPUs that CUDA_VISIBLE_DEVICES shows; none where it is unset.
pub fn visible(vars: &env::Vars) -> Option<usize> {
    let value = vars.raw(env::CUDA_VISIBLE_DEVICES)?.to_string_lossy().into_owned();
    // CUDA reads up to the first entry that is no GPU.
    let is_gpu = |word: &&str| !word.is_empty() && !word.starts_with('-');
    Some(value.split(',').map(str::trim).take_while(is_gpu).count())
}

/// The numbers in CUDA_VISIBLE_DEVICES, where it is made of numbers.
pub fn visible_numbers(vars: &env::Vars) -> Option<Vec<usize>> {
    let value = vars.raw(env::CUDA_VISIBLE_DEVICES)?.to_string_lossy().into_owned();
    let words: Vec<&str> =
        value.split(',').map(str::trim).take_while(|word| !word.is_empty() && !word.starts_with('-')).collect();
    words.into_iter().map(|word| word.parse().ok()).collect()
}

fn is_expandable(value: &str) -> bool {
    let pair = |setting: &str| {
        let (name, value) = setting.split_once(':')?;
        Some(name.trim() == "expandable_segments" && value.trim().eq_ignore_ascii_case("true"))
    };
    value.split(',').any(|setting| pair(setting).unwrap_or(false))
}

/// The folder that `python -m` searches before all others, where it holds a package called like one of the environment's.
pub fn shadowing_folder(report: &Report, folder: PathBuf, packages: &[&str]) -> Option<PathBuf> {
    let environment = report.environment.as_ref()?;
    if environment.folders().any(|known| *known == folder) {
        return None;
    }
    packages.iter().map(|name| folder.join(name)).find(|dir| dir.join("__init__.py").is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_allocator_and_lists_of_gpus_are_read_as_torch_and_cuda_do() {
        assert!(is_expandable("max_split_size_mb:512, expandable_segments:True"));
        assert!(!is_expandable("expandable_segments:False") && !is_expandable("garbage"));
        let mut vars = env::Vars::default();
        for (value, count) in [("", 0), ("-1", 0), ("0,1", 2), ("0, 3", 2), ("1,-1,2", 1), ("GPU-abc,GPU-def", 2)] {
            vars.set(env::CUDA_VISIBLE_DEVICES, value);
            assert_eq!(visible(&vars), Some(count), "{value}");
        }
        assert_eq!(visible_numbers(&vars), None);
        vars.unset(env::CUDA_VISIBLE_DEVICES);
        assert_eq!(visible(&vars), None);
    }
}
