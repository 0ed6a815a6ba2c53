//! Bundles, made and taken in. Neither needs a toolkit, a FlashInfer or a network.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Built, verdict_record};
use crate::cubin;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::judge::{self, Expectation, Owner};
use crate::store::{Bundle, Entry, Store};
use crate::tables::{DependencyMarks, Tables};
use crate::target::Target;

/// What was written by [`export`].
#[derive(Debug)]
pub struct Exported {
    pub sha256: Digest,
    pub bytes: u64,
}

/// Writes what was built, and the overlay that goes with it, into the file `path`.
pub fn export(built: &Built, path: &Path) -> Result<Exported> {
    if built.entry.manifest.test_only {
        return Err(Error::refused("an artifact for tests alone does not leave the store")
            .because("it is assembled for another GPU than its target, and a bundle is there to be installed from"));
    }
    let (sha256, bytes) = Bundle::of(&built.entry, &built.prepared.basis.overlay)?.write(path)?;
    Ok(Exported { sha256, bytes })
}

/// What was taken in by [`import`].
#[derive(Debug)]
pub struct Imported {
    pub entry: Entry,
    /// The FlashInfer that the bundle's overlay is for.
    pub flashinfer: String,
    /// It was not in the store before.
    pub new: bool,
}

/// Takes the artifacts of bundles into the store under `home`. All are checked before the first one is taken.
pub fn import(paths: &[&Path], home: &Path) -> Result<Vec<Imported>> {
    let bundles = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>>>()?;
    let store = Store::open(home)?;
    let take = |bundle: Bundle| {
        let (entry, new) = bundle.publish(&store)?;
        Ok(Imported { entry, flashinfer: bundle.flashinfer, new })
    };
    bundles.into_iter().map(take).collect()
}

/// The bundle in the file `path`, every hash checked and its artifact judged anew, as far as that needs no toolkit: that
/// every undefined symbol has an owner was proven where it was built.
pub fn open(path: &Path) -> Result<Bundle> {
    let bundle = Bundle::open(path)?;
    judge(&bundle).map_err(|error| {
        let error = error.within(format!("{} is not used", path.display()));
        if error.hints().is_empty() { error.hint("take the bundle from where it was made, or build here") } else { error }
    })?;
    Ok(bundle)
}

/// The artifact must be what its manifest says, by the rules of this release. A manifest is only words.
fn judge(bundle: &Bundle) -> Result<()> {
    let manifest = &bundle.manifest;
    if manifest.test_only {
        return Err(Error::refused("its artifact was made for tests alone and is never to be used"));
    }
    let module = Tables::load().module(&manifest.module).map_err(|_| {
        Error::unsupported(format!("this fi-arch knows no module {}", manifest.module.escape_debug()))
            .hint("use the release of fi-arch that made the bundle, or a newer one")
    })?;
    let target: Target = manifest.target.parse()?;
    let inventory = cubin::read_bytes(&bundle.artifact)
        .map_err(|error| Error::refused("its artifact cannot be read").because(error.what()).because(error.why().join("; ")))?;
    let exports: BTreeSet<String> = manifest.verdict.exports.iter().cloned().collect();
    // Which functions that runtime has is for the machine that loads the artifact to say; which one it is, the artifact says.
    let runtime = match manifest.cudart.as_str() {
        "static" => None,
        "shared" => manifest.verdict.needed.iter().find(|name| name.starts_with("libcudart")).cloned().or(Some(String::new())),
        other => {
            return Err(Error::refused(format!("its manifest names an unknown kind of CUDA runtime, {}", other.escape_debug())));
        }
    };
    let runtime = runtime.map(|name| Owner { name, exports: Vec::new() });
    let mut verdict = judge::judge(
        &inventory,
        &Expectation {
            target,
            exports: &exports,
            marks_required: module.dependency_marks == DependencyMarks::Required,
            launched_plainly: &module.launched_plainly,
            owners: &[],
            cudart: runtime.as_ref(),
        },
    );
    verdict.faults.retain(|fault| fault.code != "no-owner");
    if !verdict.passed() {
        let error = Error::refused(format!("the judge refused its artifact, {} for {target}", module.name));
        return Err(verdict
            .faults
            .iter()
            .fold(error, |error, fault| error.because(format!("{}: {}", fault.code, fault.message))));
    }
    let Some(linkage) = &inventory.linkage else { unreachable!("an artifact without linkage does not pass the judge") };
    let found = verdict_record(&verdict, linkage);
    if found == manifest.verdict {
        return Ok(());
    }
    let mut error = Error::refused("its manifest does not describe its artifact");
    let pairs = [serde_json::to_value(&manifest.verdict), serde_json::to_value(&found)].map(|v| v.expect("a verdict is JSON"));
    for (name, found) in pairs[1].as_object().expect("a verdict is an object") {
        if pairs[0][name] != *found {
            error = error.because(format!("{name}: the manifest says {}, and it has {found}", pairs[0][name]));
        }
    }
    Err(error)
}
