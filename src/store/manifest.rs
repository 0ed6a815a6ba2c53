//! The manifest: what an artifact is, how it came to be, and that the judge let it pass.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::key::Key;
use crate::digest::Digest;

/// The format of the manifests that this release writes, and the only one that it reads. See [the rule](super).
pub const FORMAT: u32 = 1;

/// The file name of the manifest in an entry's folder.
pub const FILE: &str = "manifest.json";

/// Stands beside every artifact. Fields that a newer release added are skipped on reading.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    /// The entry's own key: an entry that was moved to another name is not handed out.
    pub key: Key,
    /// The key of what was known before compiling; see [`Closure`](super::Closure).
    pub request: Key,
    pub module: String,
    /// Such as `sm_120f`.
    pub target: String,
    /// The GPU that its machine code is really for, where that is not `target`: the target's PTX, assembled for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_on: Option<String>,
    /// The FlashInfer release that the sources came from.
    pub flashinfer: String,
    pub tvm_ffi: String,
    pub artifact: FileRecord,
    /// The nvcc's own description of its version.
    pub nvcc: String,
    pub host_compiler: String,
    pub flags: Vec<String>,
    /// Translation units. A builder with many cores splits the sources into more: the file's bytes depend on it, its kernels do not.
    /// None in manifests of releases that did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<usize>,
    pub edits: Vec<EditRecord>,
    pub verdict: VerdictRecord,
    /// The file beside the manifest that names every input; see [`Inputs`](super::Inputs). The store fills it in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<FileRecord>,
    /// How it gets its CUDA runtime: `shared` (it needs a libcudart, see `verdict.needed`) or `static` (it holds one).
    #[serde(default = "shared")]
    pub cudart: String,
    /// The oldest driver that can load the artifact, where it is known.
    pub min_driver: Option<String>,
    /// RFC 3339, UTC; see [`timestamp`].
    pub created: String,
    /// The release of fi-arch that built it.
    pub fi_arch: String,
    /// How long the build took, in seconds.
    pub elapsed_s: f64,
    /// For tests alone (`run_on` says why, or it is a fake): never to be installed, and in no bundle.
    pub test_only: bool,
}

fn shared() -> String {
    "shared".to_owned()
}

/// A file in the manifest's folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// A plain file name beside the manifest.
    pub file: String,
    pub sha256: Digest,
    pub bytes: u64,
}

/// One edit of the overlay that went into the artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditRecord {
    pub id: String,
    pub path: String,
    pub reason: String,
    /// How many places of the file it changed.
    pub sites: usize,
    /// The original's digest; none where the overlay added the file.
    pub pre: Option<Digest>,
    pub post: Digest,
}

/// What the judge saw in the artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerdictRecord {
    /// `pass`; nothing else is ever stored.
    pub verdict: String,
    pub kernels: usize,
    pub hollow: usize,
    pub with_dependency_marks: usize,
    pub need_no_marks: usize,
    pub needed: Vec<String>,
    pub exports: Vec<String>,
    pub glibc_floor: Option<String>,
    pub libstdcxx_floor: Option<String>,
}

/// The last field of a manifest on disk: the SHA-256 of the manifest without it.
const CHECKSUM: &str = "checksum";

/// The text of a manifest on disk: `manifest` (an object) under its checksum, so that a flipped bit is noticed as it is in
/// the artifact.
pub fn seal(mut manifest: Value) -> String {
    let object = manifest.as_object_mut().expect("a manifest is an object");
    object.shift_remove(CHECKSUM);
    let checksum = Digest::of(pretty(&manifest).as_bytes());
    manifest[CHECKSUM] = checksum.to_string().into();
    format!("{}\n", pretty(&manifest))
}

/// The manifest in a sealed text, or what is wrong with it. Fields of newer releases are covered by the checksum too.
pub fn unseal(text: &[u8]) -> Result<Manifest, String> {
    serde_json::from_value(unseal_value(text)?).map_err(|error| error.to_string())
}

/// The object in a sealed text, or what is wrong with it.
pub fn unseal_value(text: &[u8]) -> Result<Value, String> {
    let mut value: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let said = value.as_object_mut().and_then(|object| object.shift_remove(CHECKSUM)).ok_or("it has no checksum")?;
    let found = Digest::of(pretty(&value).as_bytes()).to_string();
    if said != found {
        return Err("it was altered: its checksum differs".into());
    }
    Ok(value)
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always JSON")
}

/// The present moment as manifests write it: RFC 3339, UTC, in whole seconds.
pub fn timestamp() -> String {
    let seconds = jiff::Timestamp::now().as_second();
    jiff::Timestamp::from_second(seconds).expect("a moment that was now is in range").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_manifest_is_whole_whatever_its_numbers() {
        // Numbers that the quick way of parsing, which is off by one bit at times, makes another text of.
        let seen = [7.7515226980000005, 7.2659364889999996, 7.2611830170000005, 7.3234772679999995];
        let durations = (0..5_000_u64).map(|n| std::time::Duration::from_nanos(n * 7_919_000_041).as_secs_f64());
        for elapsed_s in seen.into_iter().chain(durations) {
            let text = seal(serde_json::json!({ "elapsed_s": elapsed_s }));
            assert_eq!(unseal_value(text.as_bytes()), Ok(serde_json::json!({ "elapsed_s": elapsed_s })), "{text}");
        }
    }

    #[test]
    fn a_sealed_manifest_shows_any_change() {
        let text = seal(serde_json::json!({ "format": 1, "elapsed_s": 0.1 }));
        assert_eq!(seal(serde_json::from_str(&text).unwrap()), text, "sealing again changes nothing");
        assert!(unseal(text.replace("0.1", "0.2").as_bytes()).unwrap_err().contains("checksum"));
        assert!(unseal(b"{}").unwrap_err().contains("checksum"));
    }

    #[test]
    fn a_time_stamp_is_utc_in_whole_seconds() {
        let text = timestamp();
        assert_eq!(text.len(), "2026-01-02T03:04:05Z".len(), "{text}");
        assert!(text.ends_with('Z') && text.parse::<jiff::Timestamp>().is_ok(), "{text}");
    }
}
