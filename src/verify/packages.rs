//! The environment and the packages in it: there, whole, and fitting each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use pep440_rs::{Version, VersionSpecifiers};

use super::{Finding, Report, Request, text};
use crate::env;
use crate::error::Result;
use crate::exit::Exit;
use crate::memo::Memo;
use crate::survey;
use crate::tables::Tables;

/// Packages that come with FlashInfer and must be of its release: module, distribution, and whether their version bears a
/// CUDA suffix.
const COMPANIONS: [(&str, &str, bool); 2] =
    [("flashinfer_jit_cache", "flashinfer-jit-cache", true), ("flashinfer_cubin", "flashinfer-cubin", false)];

pub fn environment(report: &mut Report, request: &Request, memo: &Memo) -> Result<()> {
    match survey::environment(request.env.as_deref(), memo) {
        Ok(Some(found)) => report.environment = Some(found),
        Ok(None) => report.findings.problem(
            Finding::new("environment-missing", "no Python environment is active, and no python3 is on PATH")
                .hint("activate one, or name it with --env DIR"),
        ),
        Err(error) if error.exit() == Exit::Usage => return Err(error),
        Err(error) => report.findings.problem(Finding::of("environment-broken", &error)),
    }
    Ok(())
}

pub fn look(report: &mut Report) {
    let Some(environment) = report.environment.clone() else { return };
    match survey::flashinfer(&environment) {
        Ok(found) => report.flashinfer = found,
        Err(error) => report.findings.problem(Finding::of("flashinfer-broken", &error)),
    }
    if let Some(flashinfer) = &report.flashinfer {
        let site = flashinfer.package.parent();
        report.editable = !environment.site_packages.iter().any(|dir| Some(dir.as_path()) == site);
    }
    leftovers(report, &environment.site_packages);
    if report.flashinfer.is_none() && !report.findings.problems.iter().any(|problem| problem.code == "flashinfer-broken") {
        report.findings.problem(
            Finding::new("flashinfer-missing", format!("no FlashInfer is installed in {}", environment.prefix.display()))
                .hint("name the environment with --env DIR; `fi-arch build` needs none and fetches one"),
        );
    }
    tvm_ffi(report, &environment);
    torch(report, &environment);
    companions(report, &environment);
    runtimes(report, &environment.site_packages);
    let sglang = || survey::package(&environment, "sglang", "sglang").is_ok_and(|found| found.is_some());
    if report.vars.is_set(env::FLASHINFER_CUDA_ARCH_LIST) && sglang() {
        report.findings.note(
            Finding::new(
                "arch-list-overwritten",
                "SGLang sets FLASHINFER_CUDA_ARCH_LIST itself, in `set_cuda_arch()`: your value has no effect in its processes",
            )
            .hint("let SGLang set it"),
        );
    }
}

/// A folder without `__init__.py` that `find_spec` still takes for a package.
fn leftovers(report: &mut Report, sites: &[PathBuf]) {
    for (module, distribution) in [("flashinfer", "flashinfer-python"), ("flashinfer_jit_cache", "flashinfer-jit-cache")] {
        let is_left = |dir: &PathBuf| dir.is_dir() && !dir.join("__init__.py").exists();
        let left = sites.iter().map(|site| site.join(module)).find(is_left);
        let elsewhere = module == "flashinfer" && report.flashinfer.is_some();
        if let Some(dir) = left {
            let message = format!(
                "a folder `{module}` without __init__.py is left of an uninstalled {distribution}; Python imports it as an empty package"
            );
            report.findings.add(!elsewhere, Finding::new("leftover-folder", message).hint("remove that folder").at(dir));
        }
    }
}

fn tvm_ffi(report: &mut Report, environment: &survey::Environment) {
    match survey::tvm_ffi(environment) {
        Ok(found) => report.tvm_ffi = found,
        Err(error) => return report.findings.problem(Finding::of("tvm-ffi-broken", &error)),
    }
    let Some(flashinfer) = &report.flashinfer else { return };
    let Some(found) = &report.tvm_ffi else {
        return report.findings.problem(
            Finding::new("tvm-ffi-missing", "apache-tvm-ffi is not installed, and FlashInfer imports it")
                .hint("pip install apache-tvm-ffi, in the range that FlashInfer asks for"),
        );
    };
    let stated = flashinfer.dist_info.as_deref().and_then(required_tvm_ffi);
    let listed = || Tables::load().release(&flashinfer.version).map(|release| release.tvm_ffi.clone());
    let Some(range) = stated.or_else(listed) else { return };
    let (Ok(specifiers), Ok(version)) = (range.parse::<VersionSpecifiers>(), found.version.parse::<Version>()) else { return };
    if !specifiers.contains(&version) {
        report.findings.problem(
            Finding::new(
                "tvm-ffi-out-of-range",
                format!("apache-tvm-ffi {version} is installed, and FlashInfer {} asks for {range}", flashinfer.version),
            )
            .hint(format!("pip install 'apache-tvm-ffi{range}'"))
            .at(&found.package),
        );
    }
}

/// The range in `Requires-Dist: apache-tvm-ffi>=0.1.6,<0.2`.
fn required_tvm_ffi(record: &Path) -> Option<String> {
    let metadata = text(&record.join("METADATA"));
    let line = metadata
        .lines()
        .take_while(|line| !line.is_empty())
        .find_map(|line| line.strip_prefix("Requires-Dist: apache-tvm-ffi"))?;
    let range = line.split(';').next()?.trim().trim_matches(['(', ')']);
    (!range.is_empty()).then(|| range.to_owned())
}

fn torch(report: &mut Report, environment: &survey::Environment) {
    match survey::torch(environment) {
        Ok(found) => report.torch = found,
        Err(error) => return report.findings.problem(Finding::of("torch-broken", &error)),
    }
    if report.flashinfer.is_none() {
        return;
    }
    match &report.torch {
        None => report.findings.problem(
            Finding::new("torch-missing", "torch is not installed, and FlashInfer imports it").hint("pip install torch"),
        ),
        Some(torch) if torch.cuda.is_none() => report.findings.problem(
            Finding::new("torch-without-cuda", format!("torch {} is built without CUDA", torch.version))
                .hint("install a torch for CUDA, such as one from https://download.pytorch.org/whl/cu130"),
        ),
        Some(_) => {}
    }
}

fn companions(report: &mut Report, environment: &survey::Environment) {
    for (module, distribution, has_suffix) in COMPANIONS {
        let found = match survey::package(environment, module, distribution) {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            Err(error) => {
                report.findings.problem(Finding::of("companion-broken", &error));
                continue;
            }
        };
        if let Some(flashinfer) = &report.flashinfer {
            let (release, suffix) = found.version.split_once('+').unwrap_or((&found.version, ""));
            let own = flashinfer.version.split('+').next().unwrap_or_default();
            let same = match (release.parse::<Version>(), own.parse::<Version>()) {
                (Ok(release), Ok(own)) => release == own,
                _ => release == own,
            };
            let unchecked = report.vars.is_set(env::FLASHINFER_DISABLE_VERSION_CHECK);
            if !same {
                let ignores = text(&flashinfer.package.join("jit/env.py")).contains("Ignoring incompatible");
                let effect = match (unchecked, ignores) {
                    (true, _) => "it is used all the same, because FLASHINFER_DISABLE_VERSION_CHECK is set",
                    (_, true) => "FlashInfer leaves it aside and compiles instead",
                    // Older releases compare by prefix: 0.6.10 passes for 0.6.1.
                    _ if has_suffix && found.version.starts_with(own) => {
                        "FlashInfer takes it for its own, since it compares by prefix"
                    }
                    _ => "`import flashinfer` ends in an error",
                };
                let message =
                    format!("{distribution} {} is installed beside FlashInfer {}: {effect}", found.version, flashinfer.version);
                let hint = format!("install {distribution} of release {own}, or uninstall it");
                report.findings.problem(Finding::new("companion-version", message).hint(hint).at(&found.package));
            } else if let (true, Some(cuda)) = (has_suffix, report.torch.as_ref().and_then(|torch| torch.cuda)) {
                // cu129, cu130
                let number = suffix.strip_prefix("cu").and_then(|digits| digits.parse::<u32>().ok());
                if let Some(number) = number.filter(|number| number / 10 != cuda.major) {
                    let message =
                        format!("{distribution} {} is built for CUDA {}, and torch for CUDA {cuda}", found.version, number / 10);
                    let hint = format!("install the {distribution} for cu{}{}", cuda.major, cuda.minor);
                    report.findings.problem(Finding::new("companion-cuda", message).hint(hint).at(&found.package));
                }
            }
        }
        report.companions.push((distribution.to_owned(), found));
    }
    if report.vars.is_set(env::FLASHINFER_DISABLE_VERSION_CHECK) {
        report.findings.note(
            Finding::new(
                "version-check-off",
                "FLASHINFER_DISABLE_VERSION_CHECK is set: FlashInfer takes companion packages of any release",
            )
            .hint("unset it, and install companions of FlashInfer's own release"),
        );
    }
}

/// CUDA runtimes of several majors, each of which some package loads.
fn runtimes(report: &mut Report, sites: &[PathBuf]) {
    let mut found: BTreeMap<u32, BTreeSet<PathBuf>> = BTreeMap::new();
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    for site in sites {
        let nvidia = entries(&site.join("nvidia")).into_iter().map(|package| package.join("lib"));
        for dir in nvidia.chain([site.join("torch/lib"), site.join("torch.libs")]) {
            for file in entries(&dir) {
                let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                let Some((_, version)) = name.strip_prefix("libcudart").and_then(|rest| rest.split_once(".so.")) else {
                    continue;
                };
                if let Some(major) = version.split('.').next().and_then(|major| major.parse().ok()) {
                    found.entry(major).or_default().insert(file);
                }
            }
        }
    }
    if found.len() > 1 {
        let own = report.torch.as_ref().and_then(|torch| torch.cuda).map(|cuda| cuda.major);
        let list: Vec<String> = found.keys().map(|major| format!("libcudart.so.{major}")).collect();
        let other = found.iter().find(|(major, _)| Some(**major) != own).and_then(|(_, files)| files.first().cloned());
        let message = format!("{} lie in this environment; a process that loads both has two CUDA runtimes", list.join(" and "));
        let finding = Finding::new("several-runtimes", message).hint("uninstall the nvidia packages that torch does not ask for");
        report.findings.add(own.is_none_or(|own| !found.contains_key(&own)), finding.at(other.unwrap_or_default()));
    }
}
