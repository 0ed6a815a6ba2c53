//! Which compiled module FlashInfer would load, what lies in its caches, and locks that a dead process left.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Finding, Report, arch_list, module_so, names, text, toolchain};
use crate::cubin::scan::{self, Kernels, Options};
use crate::env;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::tables::Module;

/// A lock of torch is held by a file's being there. Older than this, its owner is no longer compiling.
const LOCK_AGE: Duration = Duration::from_secs(30 * 60);

/// A compiled module on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prebuilt {
    pub path: PathBuf,
    /// Whose it is: `slot`, `flashinfer-jit-cache`, `cached_ops`.
    pub origin: &'static str,
    /// FlashInfer takes it before anything else.
    pub first: bool,
    pub targets: Vec<String>,
    pub kernels: usize,
    pub hollow: usize,
    /// The asked targets for which it has nothing.
    pub missing: Vec<u32>,
}

/// What is remembered of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Facts {
    targets: Vec<String>,
    kernels: usize,
    hollow: usize,
    missing: Vec<u32>,
}

pub fn look(report: &mut Report, module: &Module, memo: &Memo) {
    locks(report);
    let Some(flashinfer) = report.flashinfer.clone() else { return };
    let (files, by_provider) = candidates(report, &flashinfer.package, module);
    let mut is_first = true;
    for (path, origin) in files.into_iter().filter(|(path, _)| path.is_file()) {
        one(report, path, origin, is_first, memo);
        // Providers are chosen by what they say of themselves; everything else is taken blindly.
        is_first = is_first && by_provider && origin != "slot";
    }
    for path in cached(report, &flashinfer.version, module) {
        one(report, path, "cached_ops", false, memo);
    }
    let is_fit = |prebuilt: &Prebuilt| prebuilt.missing.is_empty() && prebuilt.hollow == 0 && prebuilt.kernels > 0;
    let loads = report.prebuilt.iter().any(|prebuilt| prebuilt.first && is_fit(prebuilt));
    toolchain::missing(report, !loads && !report.prebuilt.iter().any(is_fit));
    if report.vars.is_set(env::FLASHINFER_DISABLE_JIT) {
        let message = "FLASHINFER_DISABLE_JIT is set, and any value, 0 too, keeps FlashInfer from compiling";
        report.findings.add(!loads, Finding::new("jit-disabled", message).hint("unset FLASHINFER_DISABLE_JIT"));
    }
}

/// Says of compiled modules that they are not loaded, since the artifact of an activation is.
pub fn passed_over(report: &mut Report, module: &Module) {
    let Some(flashinfer) = report.flashinfer.clone() else { return };
    let (files, _) = candidates(report, &flashinfer.package, module);
    let cached = cached(report, &flashinfer.version, module);
    for path in files.into_iter().map(|(path, _)| path).filter(|path| path.is_file()).chain(cached) {
        let message = "this compiled module is not loaded while the activation is in force: its artifact lies elsewhere, and is asked for first";
        report.findings.note(
            Finding::new("prebuilt-passed-over", message)
                .hint("nothing; after `fi-arch uninstall` FlashInfer looks at it again")
                .at(path),
        );
    }
}

/// The files that FlashInfer looks for before it compiles, in its order, and whether it knows providers.
fn candidates(report: &mut Report, package: &Path, module: &Module) -> (Vec<(PathBuf, &'static str)>, bool) {
    let so = module_so(module);
    let slot = package.join("data/aot").join(&so);
    let sites = report.environment.as_ref().map(|environment| environment.site_packages.clone()).unwrap_or_default();
    let installed = |name: &str| sites.iter().map(|site| site.join(name)).find(|dir| dir.join("__init__.py").is_file());
    let cache = installed("flashinfer_jit_cache");
    let by_provider = text(&package.join("jit/env.py")).contains("FLASHINFER_AOT_PROVIDERS");
    let mut files = Vec::new();
    if by_provider {
        files.push((slot, "slot"));
        for site in &sites {
            let Ok(entries) = fs::read_dir(site) else { continue };
            let mut dirs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            dirs.sort();
            let is_provider =
                |dir: &&PathBuf| dir.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"flashinfer_jit_cache"));
            files.extend(dirs.iter().filter(is_provider).map(|dir| (dir.join("jit_cache").join(&so), "flashinfer-jit-cache")));
        }
    } else if let Some(cache) = cache {
        if slot.is_file() {
            let message = "flashinfer-jit-cache is installed, so FlashInfer does not look here";
            report
                .findings
                .note(Finding::new("slot-ignored", message).hint("remove this file, or flashinfer-jit-cache").at(slot));
        }
        files.push((cache.join("jit_cache").join(&so), "flashinfer-jit-cache"));
    } else {
        files.push((slot, "slot"));
    }
    (files, by_provider)
}

/// What FlashInfer compiled itself for the asked targets: in the folders named after them, and in the one that a failed look at
/// the GPU leaves without a name.
fn cached(report: &Report, version: &str, module: &Module) -> Vec<PathBuf> {
    let base = report.vars.var(env::FLASHINFER_WORKSPACE_BASE).map(PathBuf::from).or_else(dirs::home_dir);
    let Some(root) = base.map(|base| base.join(".cache/flashinfer").join(version)) else { return Vec::new() };
    let sms = report.sms();
    let mut folders = vec![root.clone()];
    for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let archs = name.to_str().unwrap_or_default().split('_');
        if archs.into_iter().any(|arch| sms.iter().any(|sm| arch_list::covers(arch, *sm))) {
            folders.push(entry.path());
        }
    }
    folders.sort();
    folders.into_iter().map(|dir| dir.join("cached_ops").join(module_so(module))).filter(|path| path.is_file()).collect()
}

fn one(report: &mut Report, path: PathBuf, origin: &'static str, first: bool, memo: &Memo) {
    let sms = report.sms();
    let hint = match origin {
        "cached_ops" => format!("remove {}, and it is built anew", path.parent().unwrap_or(&path).display()),
        "slot" => "remove this file: FlashInfer takes it blindly, before anything that is built".to_owned(),
        _ => "uninstall flashinfer-jit-cache, or install one that is built for this GPU".to_owned(),
    };
    let facts = memo
        .fact(&path, &format!("GPU code for {}, by fi-arch {}", names(&sms), env!("CARGO_PKG_VERSION")), || facts(&path, &sms))
        .and_then(|text| serde_json::from_str::<Facts>(&text).map_err(|e| Error::machine("the memory is damaged").because(e)));
    let facts = match facts {
        Ok(facts) => facts,
        Err(error) => return report.findings.problem(Finding::of("prebuilt-unreadable", &error).hint(hint).at(path)),
    };
    let kind = if origin == "cached_ops" { "cached" } else { "prebuilt" };
    let who = if origin == "cached_ops" { "FlashInfer's own build" } else { "the prebuilt module that FlashInfer loads" };
    if !facts.missing.is_empty() {
        let message = format!(
            "{who} has nothing for {} (it has {}): \"no kernel image\" at the first launch",
            names(&facts.missing),
            facts.targets.join(", ")
        );
        let problem = first || origin == "cached_ops";
        report.findings.add(problem, Finding::new(format!("{kind}-lacks-target"), message).hint(&hint).at(&path));
    }
    if facts.hollow > 0 {
        let message = format!(
            "{} of {} kernels of {who} can write nothing: results stay as they were, and no error says so",
            facts.hollow, facts.kernels
        );
        report.findings.problem(Finding::new(format!("{kind}-hollow"), message).hint(&hint).at(&path));
    }
    let Facts { targets, kernels, hollow, missing } = facts;
    report.prebuilt.push(Prebuilt { path, origin, first, targets, kernels, hollow, missing });
}

fn facts(path: &Path, sms: &[u32]) -> Result<String> {
    let found = scan::file(path, &Options { sms: sms.to_vec(), read_all: true }).map_err(|unread| unread.error)?;
    let (kernels, hollow) = match &found.kernels {
        Kernels::Read { count, hollow, .. } => (*count, hollow.len()),
        _ => (0, 0),
    };
    let missing = found.usable.iter().filter(|(_, how)| how.is_none()).map(|(sm, _)| *sm);
    // A file without any GPU code lacks every target.
    let missing: Vec<u32> = if found.has_gpu_code() { missing.collect() } else { sms.to_vec() };
    let facts = Facts { targets: found.targets.into_keys().collect(), kernels, hollow, missing };
    serde_json::to_string(&facts).map_err(|e| Error::machine("cannot remember").because(e))
}

/// torch's extension builds wait for a file called `lock` to go away; a killed build leaves it, and `import flashinfer` hangs.
pub fn locks(report: &mut Report) {
    let root = report
        .vars
        .var(env::TORCH_EXTENSIONS_DIR)
        .map(PathBuf::from)
        .or_else(|| Some(dirs::home_dir()?.join(".cache/torch_extensions")));
    let Some(root) = root else { return };
    let below = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    let mut folders = below(&root);
    folders.extend(folders.clone().iter().flat_map(|dir| below(dir)));
    folders.sort();
    for lock in folders.into_iter().map(|dir| dir.join("lock")) {
        let Ok(modified) = lock.metadata().and_then(|about| about.modified()) else { continue };
        let age = SystemTime::now().duration_since(modified).unwrap_or_default();
        let message = format!(
            "a build of a torch extension left its lock {} minutes ago; whoever needs that extension waits for ever",
            age.as_secs() / 60
        );
        let hint = "remove this file, unless a build is running";
        report.findings.add(age >= LOCK_AGE, Finding::new("stale-lock", message).hint(hint).at(lock));
    }
}
