//! How the engines are told on their command lines to take the fused path: `arch-tables/engines/flags.toml`.

use std::sync::OnceLock;

use pep440_rs::{Version, VersionSpecifiers};
use serde::{Deserialize, Deserializer};

/// The command line of an engine.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launcher {
    /// As it is imported: `sglang`.
    pub name: String,
    /// Console scripts, whose first word must be one of `subcommands`.
    pub programs: Vec<String>,
    pub subcommands: Vec<String>,
    /// What `python -m` starts it with.
    pub modules: Vec<String>,
    /// The flag that names a YAML file of further flags.
    pub config: String,
    /// `--a_b` is read as `--a-b`.
    #[serde(default)]
    pub underscores: bool,
    #[serde(rename = "flag")]
    pub flags: Vec<LaunchFlag>,
    #[serde(rename = "variable")]
    pub variables: Vec<Variable>,
    pub fusion: Vec<Fusion>,
}

/// A flag that matters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchFlag {
    pub means: Means,
    /// All its spellings, the plainest first.
    pub spelled: Vec<String>,
    /// It takes a value.
    #[serde(default)]
    pub value: bool,
    /// The values that lead to the trtllm kernels on SM 12.x; any where there are none.
    #[serde(default)]
    pub right: Vec<String>,
    /// The versions in which it means that; all without it.
    #[serde(default, deserialize_with = "versions")]
    pub versions: Option<VersionSpecifiers>,
}

/// What a flag means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    /// Take the fused path.
    Fusion,
    /// Never take it.
    FusionOff,
    /// Take it, with this backend.
    Backend,
    /// GPUs of tensor parallelism.
    Ranks,
    /// Stages of pipeline parallelism.
    Stages,
    Nodes,
    DataParallel,
    /// Attention in as many groups as there are of data parallelism; nothing where that is one.
    DpAttention,
    /// The number of such groups.
    AttentionGroups,
    /// GPUs of expert parallelism.
    Experts,
    /// Experts are spread over all ranks.
    ExpertsOn,
    /// GPUs of context parallelism in attention.
    Context,
    Deterministic,
    /// No compilation, and so no passes.
    Eager,
    /// The level of compilation.
    Level,
    /// JSON that holds the settings of the passes.
    Compile,
}

/// An environment variable that matters to the fused path.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variable {
    pub name: String,
    #[serde(default, deserialize_with = "versions")]
    pub versions: Option<VersionSpecifiers>,
    /// The value that is right.
    pub want: Option<String>,
    /// Switched on, it takes the fused path's place.
    #[serde(default)]
    pub keeps_off: bool,
}

/// The fused path in a range of versions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fusion {
    #[serde(deserialize_with = "range")]
    pub versions: VersionSpecifiers,
    /// What is without a flag.
    pub default: String,
    /// What becomes of it on SM 12.x behind a closed gate.
    pub closed: String,
    /// The key of `pass_config` that turns it on.
    #[serde(rename = "pass")]
    pub switch: Option<String>,
    /// The key of `pass_config` that it needs as well, since the engine has no limit of its own for SM 12.x.
    pub limit: Option<String>,
}

impl Launcher {
    /// The row for a version. One that is no version (a source tree) counts as the newest.
    pub fn fusion_of(&self, version: &str) -> Option<&Fusion> {
        match release(version) {
            Some(version) => self.fusion.iter().find(|row| row.versions.contains(&version)),
            None => self.fusion.last(),
        }
    }
}

impl LaunchFlag {
    pub fn holds_in(&self, version: &str) -> bool {
        holds(self.versions.as_ref(), version)
    }
}

impl Variable {
    pub fn holds_in(&self, version: &str) -> bool {
        holds(self.versions.as_ref(), version)
    }
}

fn holds(range: Option<&VersionSpecifiers>, version: &str) -> bool {
    range.is_none_or(|range| release(version).is_none_or(|version| range.contains(&version)))
}

/// The release that a version is of: a pre-release or a local build of it has its flags.
fn release(version: &str) -> Option<Version> {
    version.parse::<Version>().ok().map(|version| version.only_release())
}

/// The command lines of all engines.
pub fn launchers() -> &'static [Launcher] {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Table {
        engine: Vec<Launcher>,
    }
    static TABLE: OnceLock<Table> = OnceLock::new();
    &TABLE.get_or_init(|| super::parse("../engines/flags", include_str!("../../arch-tables/engines/flags.toml"))).engine
}

fn range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<VersionSpecifiers, D::Error> {
    super::from_str(deserializer)
}

fn versions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<VersionSpecifiers>, D::Error> {
    super::from_str(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_has_one_row_and_every_spelling_one_meaning() {
        for launcher in launchers() {
            for version in ["0.5.4", "0.5.6.post2", "0.5.7", "0.5.9", "0.5.13", "0.5.23", "0.11.0", "0.14.1", "0.33.0", "1.0"] {
                let release = release(version).unwrap();
                let rows = launcher.fusion.iter().filter(|row| row.versions.contains(&release)).count();
                assert_eq!(rows, 1, "{} {version}", launcher.name);
            }
            let mut spelled: Vec<&String> = launcher.flags.iter().flat_map(|flag| &flag.spelled).collect();
            let count = spelled.len();
            spelled.sort();
            spelled.dedup();
            assert_eq!(spelled.len(), count, "{}", launcher.name);
        }
    }

    #[test]
    fn a_source_tree_without_a_version_counts_as_the_newest() {
        let sglang = launchers().iter().find(|launcher| launcher.name == "sglang").unwrap();
        assert!(sglang.fusion_of("unknown").unwrap().closed.contains("at start-up"));
        assert!(sglang.fusion_of("0.5.9rc1+git1234").unwrap().closed.contains("silently"));
    }
}
