//! Inventory + linkage → verdict. Looks at the product alone: a compiler's exit code proves nothing.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::cubin::{Inventory, Kernel, Kind, Linkage, Symbol};
use crate::target::Target;

/// The version of these rules. A verdict given under other rules is no verdict under these, so it is part of every key.
pub const RULES: &str = "2";

/// What an artifact has to be.
#[derive(Debug)]
pub struct Expectation<'a> {
    pub target: Target,
    /// The functions that the sources export, as symbol names.
    pub exports: &'a BTreeSet<String>,
    /// Must kernels carry dependency marks, since the host launches them with programmatic serialization?
    pub marks_required: bool,
    /// Kernels whose mangled name contains one of these are launched plainly and need no marks.
    pub launched_plainly: &'a [String],
    /// The libcudart of the process that will load it; none: the artifact must hold a CUDA runtime of its own.
    pub cudart: Option<&'a Owner>,
    /// The other libraries that will be there when the artifact is loaded.
    pub owners: &'a [Owner],
}

/// A library that provides symbols: its name, and what it exports.
#[derive(Debug)]
pub struct Owner {
    pub name: String,
    pub exports: Vec<Symbol>,
}

/// One reason why an artifact is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Stable, for scripts: `no-code`, `wrong-target`, `ptx`, `unknown-code`, `missing-kernel`, `unregistered-kernel`,
    /// `hollow-kernel`, `opaque-kernel`, `missing-marks`, `missing-export`, `no-linkage`, `wrong-runtime`, `no-owner`.
    pub code: &'static str,
    pub message: String,
    /// What it concerns: kernels or symbols, by name.
    pub names: Vec<String>,
}

/// What was proven of an artifact, or why it was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub kernels: usize,
    pub hollow: usize,
    pub with_dependency_marks: usize,
    /// Kernels without marks that need none.
    pub need_no_marks: usize,
    pub faults: Vec<Fault>,
}

impl Verdict {
    pub fn passed(&self) -> bool {
        self.faults.is_empty()
    }

    /// `pass` or `fail`, as in every JSON output.
    pub fn word(&self) -> &'static str {
        if self.passed() { "pass" } else { "fail" }
    }
}

/// Judges an artifact kernel by kernel and symbol by symbol.
pub fn judge(inventory: &Inventory, expected: &Expectation) -> Verdict {
    let mut faults = Vec::new();
    let mut fault = |code, message: String, names: Vec<String>| faults.push(Fault { code, message, names });

    let wanted = expected.target.to_string();
    let (right, wrong): (Vec<_>, Vec<_>) =
        inventory.images.iter().partition(|image| image.kind == Kind::Sass && image.target == wanted);
    let targets = |kind| wrong.iter().filter(|i| i.kind == kind).map(|i| i.target.clone()).collect::<BTreeSet<_>>();
    let (other_code, ptx) = (targets(Kind::Sass), targets(Kind::Ptx));
    if !other_code.is_empty() {
        let names: Vec<_> = other_code.into_iter().collect();
        fault("wrong-target", format!("machine code for {} instead of {wanted} alone", names.join(", ")), names);
    }
    if !ptx.is_empty() {
        let names: Vec<_> = ptx.into_iter().collect();
        fault("ptx", format!("PTX for {}, which a driver would compile unproven", names.join(", ")), names);
    }

    let unknown: BTreeSet<String> = wrong
        .iter()
        .filter(|i| !matches!(i.kind, Kind::Sass | Kind::Ptx))
        .map(|i| format!("{} for {}", i.kind, i.target))
        .collect();
    if !unknown.is_empty() {
        let names: Vec<_> = unknown.into_iter().collect();
        fault("unknown-code", format!("code that cannot be judged: {}", names.join(", ")), names);
    }

    let kernels: Vec<&Kernel> = right.iter().flat_map(|image| &image.kernels).collect();
    if kernels.is_empty() {
        fault("no-code", format!("no kernel for {wanted}"), Vec::new());
    }
    let names: BTreeSet<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    let registered: BTreeSet<&str> = inventory.registered.iter().map(String::as_str).collect();
    let missing = owned(registered.difference(&names));
    if !missing.is_empty() {
        let message = format!("{} kernels that the host code registers have no machine code", missing.len());
        fault("missing-kernel", message, missing);
    }
    let unregistered = owned(names.difference(&registered));
    if !unregistered.is_empty() {
        let message = format!("{} kernels are registered by no host code: nothing can launch them", unregistered.len());
        fault("unregistered-kernel", message, unregistered);
    }

    let hollow: Vec<String> = kernels.iter().filter(|k| k.hollow).map(|k| k.name.clone()).collect();
    if !hollow.is_empty() {
        let message = format!("{} of {} kernels are hollow: they run and write nothing", hollow.len(), kernels.len());
        fault("hollow-kernel", message, hollow.clone());
    }

    let opaque: Vec<String> = kernels.iter().filter(|k| k.opaque).map(|k| k.name.clone()).collect();
    if !opaque.is_empty() {
        let message = format!("{} kernels call code that is not here, so that nothing is proven of them", opaque.len());
        fault("opaque-kernel", message, opaque);
    }

    let plain = |kernel: &Kernel| expected.launched_plainly.iter().any(|part| kernel.name.contains(part.as_str()));
    let unmarked: Vec<&&Kernel> = kernels.iter().filter(|kernel| !kernel.has_dependency_marks()).collect();
    // A hollow kernel has no marks because it has no code: it is told once, as hollow.
    let needing: Vec<String> = unmarked
        .iter()
        .filter(|kernel| expected.marks_required && !plain(kernel) && !kernel.hollow)
        .map(|kernel| kernel.name.clone())
        .collect();
    let need_no_marks = unmarked.iter().filter(|kernel| !expected.marks_required || plain(kernel)).count();
    if !needing.is_empty() {
        let message = format!(
            "{} kernels lack the dependency marks (ACQBULK, PREEXIT) that their launch with programmatic serialization needs",
            needing.len()
        );
        fault("missing-marks", message, needing);
    }

    match &inventory.linkage {
        None => fault("no-linkage", "it is no shared object: nothing can load it".into(), Vec::new()),
        Some(linkage) => {
            let exports: BTreeSet<&str> = linkage.exports.iter().map(|symbol| symbol.name.as_str()).collect();
            let missing: Vec<String> = expected.exports.iter().filter(|name| !exports.contains(name.as_str())).cloned().collect();
            if !missing.is_empty() {
                fault("missing-export", format!("{} functions of the sources are not exported", missing.len()), missing);
            }
            let orphans = orphans(linkage, |symbol| !is_of_runtime(symbol), expected.owners);
            if !orphans.is_empty() {
                let owners: Vec<&str> = expected.owners.iter().map(|owner| owner.name.as_str()).collect();
                let message = format!("{} undefined symbols have no owner among {}", orphans.len(), owners.join(", "));
                fault("no-owner", message, orphans);
            }
            faults.extend(runtime_faults(linkage, expected.cudart));
        }
    }

    Verdict {
        kernels: kernels.len(),
        hollow: hollow.len(),
        with_dependency_marks: kernels.len() - unmarked.len(),
        need_no_marks,
        faults,
    }
}

/// What stands between an artifact and the CUDA runtime of the process that will load it: `cudart`, or none where the artifact
/// must hold its own. This part of the verdict depends on who loads it, so it is given anew for everyone who is handed it.
pub fn runtime_faults(linkage: &Linkage, cudart: Option<&Owner>) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut fault = |code, message: String, names: Vec<String>| faults.push(Fault { code, message, names });
    let needed: Vec<String> = linkage.needed.iter().filter(|name| name.starts_with("libcudart")).cloned().collect();
    match cudart {
        Some(owner) if needed != [owner.name.as_str()] => {
            let message = format!("it needs {} where {} alone is right", list_or_none(&needed), owner.name);
            fault("wrong-runtime", message, needed);
        }
        None if !needed.is_empty() => {
            let message = format!("it needs {} although the runtime is to be linked in", needed.join(", "));
            fault("wrong-runtime", message, needed);
        }
        _ => {}
    }
    let orphans = orphans(linkage, is_of_runtime, cudart.map(std::slice::from_ref).unwrap_or_default());
    if !orphans.is_empty() {
        let where_to = cudart.map_or("the runtime that was linked in", |owner| owner.name.as_str());
        fault("no-owner", format!("{} undefined symbols of the CUDA runtime are not in {where_to}", orphans.len()), orphans);
    }
    let exported: Vec<String> = linkage.exports.iter().filter(|s| is_of_runtime(s)).map(|s| s.name.clone()).collect();
    if !exported.is_empty() {
        let message = format!("it exports {} symbols of the CUDA runtime, to which others could be bound", exported.len());
        fault("wrong-runtime", message, exported);
    }
    faults
}

fn list_or_none(names: &[String]) -> String {
    if names.is_empty() { "no libcudart".to_owned() } else { names.join(", ") }
}

/// Does a symbol belong to the CUDA runtime by its name (`cudaMalloc`, `__cudaRegisterFunction`)?
fn is_of_runtime(symbol: &Symbol) -> bool {
    symbol.name.trim_start_matches('_').starts_with("cuda")
}

/// The undefined symbols among the `concerned` that no owner exports.
fn orphans(linkage: &Linkage, concerned: impl Fn(&Symbol) -> bool, owners: &[Owner]) -> Vec<String> {
    let fits = |export: &Symbol, symbol: &Symbol| {
        export.name == symbol.name && (symbol.version.is_none() || symbol.version == export.version)
    };
    let owned = |symbol: &Symbol| owners.iter().any(|owner| owner.exports.iter().any(|export| fits(export, symbol)));
    let undefined = linkage.undefined.iter().filter(|symbol| !symbol.weak && concerned(symbol));
    undefined.filter(|symbol| !owned(symbol)).map(|symbol| symbol.name.clone()).collect()
}

fn owned<'a>(names: impl Iterator<Item = &'a &'a str>) -> Vec<String> {
    names.map(|name| (*name).to_owned()).collect()
}

/// The symbols that a module's sources export: TVM-FFI's macro makes `__tvm_ffi_NAME` of its first argument.
pub fn exports_of(sources: &[Vec<u8>]) -> BTreeSet<String> {
    const MACRO: &str = "TVM_FFI_DLL_EXPORT_TYPED_FUNC(";
    let texts = sources.iter().map(|bytes| String::from_utf8_lossy(bytes));
    texts
        .flat_map(|text| {
            let lines = text.lines().map(str::trim_start).filter(|line| !line.starts_with("//") && !line.starts_with('#'));
            let code = lines.collect::<Vec<_>>().join("\n");
            let calls = code.split(MACRO).skip(1);
            calls
                .filter_map(|rest| rest.split([',', ')']).next())
                .map(|name| format!("__tvm_ffi_{}", name.trim()))
                .collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(names: &[&str]) -> Vec<Symbol> {
        names.iter().map(|name| Symbol { name: (*name).to_owned(), version: None, weak: false }).collect()
    }

    fn artifact(needed: &[&str], undefined: &[&str], exports: &[&str]) -> Linkage {
        let needed = needed.iter().map(|name| (*name).to_owned()).collect();
        Linkage { needed, undefined: symbols(undefined), exports: symbols(exports), ..Linkage::default() }
    }

    fn codes(linkage: &Linkage, cudart: Option<&Owner>) -> Vec<&'static str> {
        runtime_faults(linkage, cudart).iter().map(|fault| fault.code).collect()
    }

    #[test]
    fn a_shared_artifact_needs_exactly_the_runtime_of_its_consumer() {
        let cudart = Owner { name: "libcudart.so.12".to_owned(), exports: symbols(&["cudaMalloc", "__cudaRegisterFunction"]) };
        let calls = ["cudaMalloc", "__cudaRegisterFunction", "TVMFFIError"];
        assert_eq!(codes(&artifact(&["libc.so.6", "libcudart.so.12"], &calls, &[]), Some(&cudart)), [] as [&str; 0]);
        assert_eq!(codes(&artifact(&["libcudart.so.13"], &calls, &[]), Some(&cudart)), ["wrong-runtime"]);
        assert_eq!(codes(&artifact(&["libcudart.so.12", "libcudart.so.13"], &[], &[]), Some(&cudart)), ["wrong-runtime"]);
        assert_eq!(codes(&artifact(&[], &[], &[]), Some(&cudart)), ["wrong-runtime"]);
        assert_eq!(codes(&artifact(&["libcudart.so.12"], &["cudaNewInMinor9"], &[]), Some(&cudart)), ["no-owner"]);
    }

    #[test]
    fn a_static_artifact_neither_needs_nor_gives_a_symbol_of_a_runtime() {
        assert_eq!(codes(&artifact(&["libc.so.6"], &["dlopen", "TVMFFIError"], &["__tvm_ffi_x"]), None), [] as [&str; 0]);
        assert_eq!(codes(&artifact(&["libcudart.so.13"], &[], &[]), None), ["wrong-runtime"]);
        assert_eq!(codes(&artifact(&[], &["__cudaRegisterFatBinary"], &[]), None), ["no-owner"]);
        assert_eq!(codes(&artifact(&[], &[], &["cudaMalloc"]), None), ["wrong-runtime"]);
    }
}
