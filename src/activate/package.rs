//! The folder `fi_arch_shim`: the shim, the state, the post-images and the artifacts. One and the same for `install`,
//! `install --in-place` and `run`.

use std::collections::BTreeMap;
use std::path::Path;

use super::shim;
use super::state::{
    ARTIFACT_DIR, ArtifactState, EditState, FILE, FORMAT, FileState, Mode, OVERLAY_DIR, OnMiss, PackageState, State,
};
use crate::cubin::{Kind, usable::usable};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::overlay::Overlay;
use crate::policy::Policy;
use crate::store::{self, Manifest};
use crate::target;

/// A package whose files are served, or only watched.
#[derive(Debug, Clone)]
pub struct Served {
    /// As it is imported.
    pub name: String,
    /// As pip calls it.
    pub distribution: String,
    pub overlay: Overlay,
    /// Files that must be as they are though nothing is changed in them: path and digest.
    pub watched: Vec<(String, Digest)>,
}

/// An artifact with its manifest.
#[derive(Debug, Clone)]
pub struct Artifact {
    pub manifest: Manifest,
    pub bytes: Vec<u8>,
}

/// Everything that goes into the folder.
#[derive(Debug, Clone)]
pub struct Package {
    pub state: State,
    /// By path in the folder. Not the state itself.
    files: BTreeMap<String, Vec<u8>>,
}

impl Package {
    /// The package that serves `packages` (FlashInfer first) with `artifacts`. An artifact that was not proven is refused.
    pub fn new(mode: Mode, on_miss: OnMiss, policy: Policy, packages: &[Served], artifacts: &[Artifact]) -> Result<Self> {
        let mut files: BTreeMap<String, Vec<u8>> =
            shim::FILES.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect();
        for file in packages.iter().flat_map(|package| &package.overlay.files) {
            files.insert(format!("{OVERLAY_DIR}/{}", file.path), file.post.clone());
        }
        let mut states = Vec::new();
        for artifact in artifacts {
            let state = artifact_state(artifact)?;
            if files.insert(state.file.clone(), artifact.bytes.clone()).is_some() {
                return Err(Error::usage(format!("two artifacts for {} were named", state.target)));
            }
            let manifest = serde_json::to_value(&artifact.manifest).expect("a manifest is always JSON");
            files.insert(format!("{ARTIFACT_DIR}/{}/manifest.json", state.target), store::seal_manifest(manifest).into_bytes());
            states.push(state);
        }
        let state = State {
            format: FORMAT,
            fi_arch: env!("CARGO_PKG_VERSION").to_owned(),
            created: store::timestamp(),
            mode,
            on_miss,
            packages: packages.iter().map(package_state).collect(),
            artifacts: states,
            policy,
        };
        Ok(Self { state, files })
    }

    /// All files by their path in the folder, the state among them.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = self.files.clone();
        let state = serde_json::to_value(&self.state).expect("a state is always JSON");
        files.insert(FILE.to_owned(), store::seal_manifest(state).into_bytes());
        files
    }

    /// The digest of all that the folder does: everything but the moment at which it was written.
    pub fn digest(&self) -> Digest {
        digest_of(&self.state, self.files.iter().map(|(path, bytes)| (path.as_str(), Digest::of(bytes))))
    }

    /// The digest of the package that lies in the folder `dir`, if it has just the files of this one and they are whole.
    pub fn digest_on_disk(&self, dir: &Path) -> Option<Digest> {
        let state = super::look::read(dir).ok()?;
        let read = |path: &str| std::fs::read(dir.join(path)).ok();
        let files: Option<Vec<_>> = self.files.keys().map(|path| Some((path.as_str(), Digest::of(&read(path)?)))).collect();
        Some(digest_of(&state, files?.into_iter()))
    }
}

fn digest_of<'f>(state: &State, files: impl Iterator<Item = (&'f str, Digest)>) -> Digest {
    let state = State { created: String::new(), ..state.clone() };
    let mut text = serde_json::to_string(&state).expect("a state is always JSON");
    files.for_each(|(path, digest)| text.push_str(&format!("\n{digest} {path}")));
    Digest::of(text.as_bytes())
}

fn package_state(served: &Served) -> PackageState {
    let overlay = &served.overlay;
    let changed = overlay.files.iter().map(|file| FileState {
        module: module_of(&file.path),
        path: file.path.clone(),
        pre: file.pre,
        post: Digest::of(&file.post),
        edits: file.edits.clone(),
    });
    let watched = served.watched.iter().map(|(path, digest)| FileState {
        module: module_of(path),
        path: path.clone(),
        pre: Some(*digest),
        post: *digest,
        edits: Vec::new(),
    });
    let mut files: Vec<FileState> = changed.chain(watched).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let edits = overlay.edits.iter().map(|edit| EditState {
        id: edit.id.clone(),
        path: edit.path.clone(),
        line: edit.line,
        sites: edit.sites,
        reason: edit.reason.clone(),
    });
    PackageState {
        name: served.name.clone(),
        distribution: served.distribution.clone(),
        version: overlay.release.clone(),
        files,
        edits: edits.collect(),
    }
}

/// `flashinfer.jit.comm` of `flashinfer/jit/comm.py`; none for a file that is no Python.
fn module_of(path: &str) -> Option<String> {
    let stem = path.strip_suffix(".py")?;
    Some(stem.strip_suffix("/__init__").unwrap_or(stem).replace('/', "."))
}

fn artifact_state(Artifact { manifest, bytes }: &Artifact) -> Result<ArtifactState> {
    let refused = |why: String| {
        Error::refused(format!("the artifact {} of {} is not used", manifest.key.short(), manifest.module)).because(why)
    };
    if manifest.test_only {
        return Err(refused("it was made by a test and is never to be installed".to_owned()));
    }
    if manifest.verdict.verdict != "pass" {
        return Err(refused(format!("the judge said `{}` of it", manifest.verdict.verdict)));
    }
    let sha256 = Digest::of(bytes);
    if (sha256, bytes.len() as u64) != (manifest.artifact.sha256, manifest.artifact.bytes) {
        return Err(refused(format!("its content is {}, and {} was proven", sha256.short(), manifest.artifact.sha256.short())));
    }
    Ok(ArtifactState {
        module: manifest.module.clone(),
        target: manifest.target.clone(),
        runs_on: runs_on(&manifest.target)?,
        file: format!("{ARTIFACT_DIR}/{}/{}", manifest.target, manifest.artifact.file),
        sha256,
        bytes: bytes.len() as u64,
        key: manifest.key.to_string(),
        cudart: manifest.cudart.clone(),
        libcudart: manifest.verdict.needed.iter().find(|name| name.starts_with("libcudart")).cloned(),
        min_driver: manifest.min_driver.clone(),
        tvm_ffi: manifest.tvm_ffi.clone(),
    })
}

/// The compute capabilities that can run code for `sm_120f`, of those that are known.
fn runs_on(target: &str) -> Result<Vec<[u32; 2]>> {
    let request = target::parse(target)?;
    let suffix = request.suffix.map(|suffix| suffix.to_string()).unwrap_or_default();
    let on = target::known_sms().filter(|on| usable(Kind::Sass, request.sm, &suffix, *on).is_some());
    Ok(on.map(|on| [on / 10, on % 10]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_target_runs_on_its_family_and_any_other_on_its_chip() {
        assert_eq!(runs_on("sm_120f").unwrap(), [[12, 0], [12, 1]]);
        assert_eq!(runs_on("sm_120a").unwrap(), [[12, 0]]);
        assert_eq!(runs_on("sm_121a").unwrap(), [[12, 1]]);
        assert_eq!(runs_on("sm_100f").unwrap(), [[10, 0], [10, 3]]);
    }

    #[test]
    fn a_files_module_is_told_from_its_path() {
        assert_eq!(module_of("flashinfer/jit/comm.py").as_deref(), Some("flashinfer.jit.comm"));
        assert_eq!(module_of("flashinfer/comm/__init__.py").as_deref(), Some("flashinfer.comm"));
        assert_eq!(module_of("flashinfer/data/csrc/x.cu"), None);
    }
}
