//! What runs: an artifact, read from its file, with what its manifest says of it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use pep440_rs::Version;

use crate::cubin::usable::usable;
use crate::cubin::{self, Inventory, Kind};
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::store::{self, Manifest};
use crate::target;

/// An artifact.
#[derive(Debug)]
pub struct Artifact {
    /// Absolute.
    pub path: PathBuf,
    pub inventory: Inventory,
    /// From beside it, where it lies in a store or in an environment.
    pub manifest: Option<Manifest>,
    /// The functions that it exports, without their prefix.
    pub exports: BTreeSet<String>,
    /// The patterns of the fusion function that its kernels name.
    pub patterns: BTreeSet<i64>,
}

impl Artifact {
    pub fn read(path: &Path) -> Result<Self> {
        let inventory = cubin::read(path)?;
        Ok(Self {
            path: std::path::absolute(path).map_err(|error| Error::io("resolve", path, error))?,
            exports: exports(&inventory),
            patterns: patterns(&inventory),
            manifest: manifest_beside(path),
            inventory,
        })
    }

    /// What it is built for, by its machine code.
    pub fn targets(&self) -> Vec<String> {
        let targets: BTreeSet<&str> = self.inventory.images.iter().map(|image| image.target.as_str()).collect();
        targets.into_iter().map(str::to_owned).collect()
    }

    /// The release that it was built from, where its manifest says so.
    pub fn release(&self) -> Option<Version> {
        self.manifest.as_ref()?.flashinfer.parse().ok()
    }

    /// The SM whose code it holds for a GPU of `sm`: another one where it was assembled for the GPU as a test.
    pub fn code_sm(&self, sm: u32) -> u32 {
        let moved = self.manifest.as_ref().filter(|manifest| manifest.run_on.is_some());
        moved.and_then(|manifest| target::parse(&manifest.target).ok()).map_or(sm, |target| target.sm)
    }

    /// What must be said where it was assembled for another GPU than its target.
    pub fn moved(&self) -> Option<String> {
        let Manifest { target, run_on, .. } = self.manifest.as_ref()?;
        let run_on = run_on.as_ref()?;
        Some(format!("what runs is the code of {target}, assembled for {run_on}: a test, not an artifact for this GPU"))
    }

    /// Refuses an artifact that has no machine code for a GPU of `sm`.
    pub fn runs_on(&self, sm: u32) -> Result<()> {
        let split = |target: &str| {
            let number = target.trim_start_matches("sm_");
            let suffix = number.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
            number.trim_end_matches(suffix.as_str()).parse::<u32>().ok().map(|number| (number, suffix))
        };
        let code = self.inventory.images.iter().filter(|image| image.kind == Kind::Sass && !image.kernels.is_empty());
        let mut targets = code.filter_map(|image| split(&image.target));
        if targets.any(|(number, suffix)| usable(Kind::Sass, number, &suffix, sm).is_some()) {
            return Ok(());
        }
        Err(Error::new(Exit::Fault, format!("{} has no machine code for this GPU", self.path.display()))
            .because(format!("it is for {}, and the GPU is of sm_{sm}", self.targets().join(", ")))
            .hint(format!("`fi-arch build --sm {sm}` makes one that is")))
    }
}

fn exports(inventory: &Inventory) -> BTreeSet<String> {
    let symbols = inventory.linkage.iter().flat_map(|linkage| &linkage.exports);
    let names = symbols.filter_map(|symbol| symbol.name.strip_prefix("__tvm_ffi_"));
    // Newer releases of TVM-FFI export a description beside each function.
    names.filter(|name| !name.starts_with('_')).map(str::to_owned).collect()
}

fn patterns(inventory: &Inventory) -> BTreeSet<i64> {
    const MARK: &str = "22AllReduceFusionPatternE";
    let kernels = inventory.images.iter().flat_map(|image| &image.kernels).map(|kernel| kernel.name.as_str());
    let codes = kernels.filter_map(|name| {
        let (_, rest) = name.split_once(MARK)?;
        rest.split_once('E')?.0.parse().ok()
    });
    codes.collect()
}

/// The manifest beside an artifact; none where there is none for it.
fn manifest_beside(artifact: &Path) -> Option<Manifest> {
    let text = std::fs::read(artifact.with_file_name("manifest.json")).ok()?;
    let manifest: Manifest = serde_json::from_value(store::unseal_value(&text).ok()?).ok()?;
    (artifact.file_name()? == manifest.artifact.file.as_str()).then_some(manifest)
}
