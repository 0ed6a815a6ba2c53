//! `releases.toml`: releases that are handled alike, and since which release a file has which content.

use std::collections::BTreeMap;
use std::str::FromStr;

use pep440_rs::Version;
use serde::{Deserialize, Deserializer};

use super::{Fault, Release};
use crate::digest::Digest;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rows {
    release: Vec<Row>,
    pub fault: Vec<Fault>,
    /// By path.
    file: BTreeMap<String, Contents>,
}

/// Releases that are handled alike.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    #[serde(deserialize_with = "versions")]
    versions: Vec<Version>,
    recipe: String,
    tvm_ffi: String,
    #[serde(default)]
    notes: String,
}

/// What a file has contained: each digest beside the first release that has it.
#[derive(Debug)]
struct Contents(BTreeMap<Version, Digest>);

impl Rows {
    /// One [`Release`] a version, in the order of the table.
    pub fn releases(&self) -> Vec<Release> {
        let one = |row: &Row, version: &Version| Release {
            version: version.clone(),
            recipe: row.recipe.clone(),
            tvm_ffi: row.tvm_ffi.clone(),
            remains: self.fault.iter().filter(|fault| fault.releases.contains(version)).map(|fault| fault.id.clone()).collect(),
            notes: row.notes.clone(),
            files: self.files_of(version),
        };
        self.release.iter().flat_map(|row| row.versions.iter().map(move |version| one(row, version))).collect()
    }

    /// A file that starts to exist after `version` has no digest.
    fn files_of(&self, version: &Version) -> BTreeMap<String, Digest> {
        let at = |contents: &Contents| contents.0.range(..=version).next_back().map(|(_, digest)| *digest);
        self.file.iter().filter_map(|(path, contents)| Some((path.clone(), at(contents)?))).collect()
    }
}

impl<'de> Deserialize<'de> for Contents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let rows = BTreeMap::<String, Digest>::deserialize(deserializer)?;
        let rows = rows.into_iter().map(|(version, digest)| Ok((parse(&version)?, digest)));
        rows.collect::<Result<_, D::Error>>().map(Self)
    }
}

fn versions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Version>, D::Error> {
    Vec::<String>::deserialize(deserializer)?.iter().map(|text| parse(text)).collect()
}

fn parse<E: serde::de::Error>(version: &str) -> Result<Version, E> {
    Version::from_str(version).map_err(E::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Result<Rows, toml_edit::de::Error> {
        toml_edit::de::from_str(text)
    }

    #[test]
    fn contents_and_faults_go_by_the_order_of_versions() {
        let (one, two) = (Digest::of(b"1"), Digest::of(b"2"));
        let text = format!(
            r#"
[[fault]]
id = "f"
releases = "<0.6.10rc1"
text = ""
[[release]]
versions = ["0.6.9", "0.6.10rc1", "0.6.10"]
recipe = "r"
tvm_ffi = ""
[file.a]
"0.6.10rc1" = "{two}"
"0.6.2" = "{one}"
[file.b]
"0.6.10" = "{one}"
"#
        );
        let releases = rows(&text).unwrap().releases();
        let of = |path: &str| releases.iter().map(|release| release.files.get(path).copied()).collect::<Vec<_>>();
        assert_eq!(of("a"), [Some(one), Some(two), Some(two)]);
        assert_eq!(of("b"), [None, None, Some(one)]);
        assert_eq!(releases.iter().map(|release| release.remains.len()).collect::<Vec<_>>(), [1, 0, 0]);
    }

    #[test]
    fn a_row_that_is_no_version_is_an_error() {
        let text = format!("fault = []\nrelease = []\n[file.a]\n\"newest\" = \"{}\"\n", Digest::of(b""));
        assert!(rows(&text).is_err());
    }
}
