//! `fi_arch_shim/state.json`: what was activated. Written by us; read by the shim, by `verify` and by `uninstall`.
//!
//! ```text
//! fi_arch_shim/                 in a site-packages folder (`install`), or in a folder of its own (`run`)
//!   __init__.py, …              the shim
//!   state.json                  this, under its checksum as a manifest is
//!   overlay/flashinfer/…        the post-images, by the path that they have in their package
//!   artifact/sm_120f/trtllm_comm.so, manifest.json
//! ```
//! It holds no path of the machine and no number with a fraction, so that it may be moved, and read alike by everybody.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::policy::Policy;

/// The format of the states that this release writes, and the only one that it reads.
pub const FORMAT: u32 = 1;
/// The package in site-packages.
pub const PACKAGE: &str = "fi_arch_shim";
/// The state's file in the package.
pub const FILE: &str = "state.json";
/// The folder of the post-images in the package.
pub const OVERLAY_DIR: &str = "overlay";
/// The folder of the artifacts in the package.
pub const ARTIFACT_DIR: &str = "artifact";

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub format: u32,
    /// The release of fi-arch that wrote it.
    pub fi_arch: String,
    /// RFC 3339, UTC.
    pub created: String,
    pub mode: Mode,
    pub on_miss: OnMiss,
    /// FlashInfer first, engines behind it.
    pub packages: Vec<PackageState>,
    pub artifacts: Vec<ArtifactState>,
    pub policy: Policy,
}

/// How the overlay reaches Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// At import, from start-up code in site-packages.
    Shim,
    /// The post-images lie over the originals; no start-up code.
    InPlace,
    /// At import, in one process tree.
    Run,
}

/// What a process does that finds no artifact for its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMiss {
    Error,
    Build,
}

/// A package whose files are served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageState {
    /// As it is imported: `flashinfer`, `sglang`.
    pub name: String,
    /// As pip calls it: `flashinfer-python`.
    pub distribution: String,
    pub version: String,
    /// Sorted by path.
    pub files: Vec<FileState>,
    pub edits: Vec<EditState>,
}

/// A file that must be right for anything to be served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Relative to the folder that holds the package: `flashinfer/jit/comm.py`.
    pub path: String,
    /// The module's full name, for a Python file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// The original's digest; none for a file that we add.
    pub pre: Option<Digest>,
    /// The digest of what is served. The same as `pre`: the file is only watched, and must be as it is.
    pub post: Digest,
    /// The ids of the edits in it.
    pub edits: Vec<String>,
}

/// One edit, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditState {
    pub id: String,
    pub path: String,
    /// The line of its first site in the original, from 1.
    pub line: usize,
    pub sites: usize,
    pub reason: String,
}

/// An artifact in the package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactState {
    pub module: String,
    /// Such as `sm_120f`.
    pub target: String,
    /// The compute capabilities that can run it, such as `[[12, 0], [12, 1]]`.
    pub runs_on: Vec<[u32; 2]>,
    /// Relative to the package: `artifact/sm_120f/trtllm_comm.so`.
    pub file: String,
    pub sha256: Digest,
    pub bytes: u64,
    pub key: String,
    /// `shared` or `static`.
    pub cudart: String,
    /// The libcudart that it needs, such as `libcudart.so.13`; none where it holds one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libcudart: Option<String>,
    /// The oldest driver that can load it, such as `580.65.06`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_driver: Option<String>,
    pub tvm_ffi: String,
}
