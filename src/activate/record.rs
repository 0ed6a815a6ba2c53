//! The distribution's metadata, as every installer writes them: `pip list` shows `fi-arch`, `pip uninstall fi-arch` removes it.

use std::path::{Path, PathBuf};

use crate::digest::Digest;

/// What pip calls us.
pub const DISTRIBUTION: &str = "fi-arch";
const INSTALLER: &str = "fi-arch\n";

/// The name of our metadata folder.
pub fn folder() -> String {
    format!("fi_arch-{}.dist-info", env!("CARGO_PKG_VERSION"))
}

/// The files of the metadata folder but for RECORD: name and text.
pub fn files() -> Vec<(&'static str, String)> {
    let version = env!("CARGO_PKG_VERSION");
    let metadata = format!(
        "Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\nSummary: Written by `fi-arch install`: a proven FlashInfer \
         module for this GPU, and the shim that serves it\nLicense: Apache-2.0\n\n\
         `fi-arch status` shows what was changed, `fi-arch uninstall` takes it back.\n"
    );
    let wheel = format!("Wheel-Version: 1.0\nGenerator: fi-arch ({version})\nRoot-Is-Purelib: false\nTag: py3-none-any\n");
    vec![("METADATA", metadata), ("WHEEL", wheel), ("INSTALLER", INSTALLER.to_owned())]
}

/// The text of RECORD for files by their path in the site-packages folder. Byte code stands without a hash, as pip has it.
pub fn text<'a>(files: impl Iterator<Item = (&'a str, &'a [u8])>) -> String {
    let mut lines: Vec<String> = files
        .map(|(path, bytes)| match path.ends_with(".pyc") {
            true => format!("{path},,\n"),
            false => format!("{path},sha256={},{}\n", base64(&Digest::of(bytes)), bytes.len()),
        })
        .collect();
    lines.push(format!("{}/RECORD,,\n", folder()));
    lines.sort();
    lines.concat()
}

/// Our metadata folders in a site-packages folder, of whatever release.
pub fn ours(site: &Path) -> Vec<PathBuf> {
    let Ok(items) = std::fs::read_dir(site) else { return Vec::new() };
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("fi_arch-")
            && name.ends_with(".dist-info")
            // One that pip put there is another distribution of that name: not ours to touch.
            && std::fs::read_to_string(path.join("INSTALLER")).is_ok_and(|text| text == INSTALLER)
    };
    let mut found: Vec<PathBuf> = items.flatten().map(|item| item.path()).filter(is_ours).collect();
    found.sort();
    found
}

/// Whether an installer's RECORD in the metadata folder `dist_info` says that the file `path` has the content `digest`.
pub fn lists(dist_info: &Path, path: &str, digest: &Digest) -> bool {
    let Ok(text) = std::fs::read_to_string(dist_info.join("RECORD")) else { return false };
    let row = format!("{path},sha256={},", base64(digest));
    text.lines().any(|line| line.starts_with(&row))
}

/// URL-safe, without padding: how RECORD writes a digest.
fn base64(digest: &Digest) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let letter = |bits: u32| char::from(LETTERS[(bits & 63) as usize]);
    let mut text = String::with_capacity(44);
    for chunk in digest.0.chunks(3) {
        let bits = chunk.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        (0..=chunk.len()).for_each(|i| text.push(letter(bits >> (18 - 6 * i))));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_written_as_other_installers_write_it() {
        // From the RECORD of a wheel with an empty `py.typed`.
        assert_eq!(base64(&Digest::of(b"")), "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU");
    }
}
