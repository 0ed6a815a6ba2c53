//! `arch-tables/engines/`: what is known of the engines that call FlashInfer. Data, not code.
//!
//! An engine keeps SM 12.x out with gates of its own. They are opened together or not at all; what opens them asks the package
//! `fi_arch_shim` at run time, so that no gate is open over a closed FlashInfer.

use std::str::FromStr;
use std::sync::OnceLock;

use pep440_rs::{Version, VersionSpecifiers};
use serde::{Deserialize, Deserializer};

use super::{Anchor, Form, from_str};
use crate::error::{Error, Result};

/// The tables of the engines as they stand in `arch-tables/engines`: name and text.
const TEXTS: [(&str, &str); 3] = [
    ("sglang", include_str!("../../arch-tables/engines/sglang.toml")),
    ("vllm", include_str!("../../arch-tables/engines/vllm.toml")),
    ("flashinfer", include_str!("../../arch-tables/engines/flashinfer.toml")),
];

/// An engine, and what is to be done in it so that it uses the fused path on SM 12.x.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// As it is imported: `sglang`.
    pub name: String,
    /// As people call it: `SGLang`.
    pub title: String,
    /// As pip calls it.
    pub distribution: String,
    /// The module of FlashInfer that it is about.
    pub module: String,
    /// The releases that were read, oldest first. Only names: an overlay goes by what it finds.
    #[serde(deserialize_with = "versions")]
    pub releases: Vec<Version>,
    /// Python of ours that edits rely on.
    #[serde(default, rename = "helper")]
    pub helpers: Vec<Helper>,
    #[serde(default, rename = "gate")]
    pub gates: Vec<EngineGate>,
    /// What its user must give on the command line, by release.
    #[serde(default, rename = "advice")]
    pub advices: Vec<Advice>,
    /// What stays wrong, slow or better done otherwise.
    #[serde(default, rename = "note")]
    pub notes: Vec<Note>,
}

/// Python that is appended to a file, once, behind all else, so that no line of the file moves.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Helper {
    pub id: String,
    pub text: String,
}

/// One check, or one fault behind a check, and what is written in its place.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineGate {
    pub id: String,
    /// Opened only where the user asks for the engine to switch the fused path on by itself.
    #[serde(default)]
    pub auto_enable: bool,
    pub causes: String,
    pub cure: String,
    #[serde(rename = "place")]
    pub places: Vec<EnginePlace>,
}

/// A thing that must be found in one of several files, in one of several forms.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnginePlace {
    #[serde(rename = "form")]
    pub forms: Vec<EngineForm>,
}

/// One way in which a place may be written, and where. It fits when the file is there and every anchor is found as often as it says.
#[derive(Debug, Deserialize)]
#[serde(from = "FormRow")]
pub struct EngineForm {
    /// Relative to the folder that holds the engine's package.
    pub file: String,
    pub form: Form,
    /// Ids of the helpers that the edits call.
    pub helpers: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FormRow {
    file: String,
    name: String,
    #[serde(default)]
    expect: Vec<Anchor>,
    #[serde(default)]
    edits: Vec<Anchor>,
    #[serde(default)]
    helpers: Vec<String>,
}

impl From<FormRow> for EngineForm {
    fn from(row: FormRow) -> Self {
        let FormRow { file, name, expect, edits, helpers } = row;
        Self { file, form: Form { name, expect, edits }, helpers }
    }
}

/// What the user of some releases must give, so that the engine asks for the fused path at all.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Advice {
    #[serde(deserialize_with = "from_str")]
    pub releases: VersionSpecifiers,
    /// Words of the command line.
    #[serde(default)]
    pub flags: Vec<String>,
    /// `NAME=value`.
    #[serde(default)]
    pub env: Vec<String>,
    pub text: String,
}

/// Something that a user of a pair of releases should know before relying on it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    pub id: String,
    pub kind: NoteKind,
    /// The engine's releases; any without it.
    #[serde(default, deserialize_with = "some_range")]
    pub releases: Option<VersionSpecifiers>,
    /// FlashInfer's releases; any without it.
    #[serde(default, deserialize_with = "some_range")]
    pub flashinfer: Option<VersionSpecifiers>,
    /// The targets' numbers, such as 120; all of major 12 without it.
    #[serde(default)]
    pub sm: Vec<u32>,
    pub text: String,
}

/// What a [`Note`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NoteKind {
    /// Results are wrong.
    Wrong,
    /// It does not work, or ends the server.
    Broken,
    /// It may cost more time than it saves.
    Slow,
    /// Wrong in the release as it is, right with our overlay.
    Repaired,
    /// Something else does it better.
    Better,
}

impl NoteKind {
    /// In one word, for people and for JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wrong => "wrong",
            Self::Broken => "broken",
            Self::Slow => "slow",
            Self::Repaired => "repaired",
            Self::Better => "better",
        }
    }
}

impl Engine {
    /// What the user of `version` must give. `None` where the text is no version, or no row is about it.
    pub fn advice(&self, version: &str) -> Option<&Advice> {
        let version = Version::from_str(version).ok()?;
        self.advices.iter().find(|advice| contains(&advice.releases, &version))
    }

    /// Whether `version` is a release that was read.
    pub fn is_listed(&self, version: &str) -> bool {
        Version::from_str(version).is_ok_and(|version| self.releases.contains(&version))
    }

    /// The releases that were read, for people.
    pub fn known_releases(&self) -> String {
        match &self.releases[..] {
            [] => "none".to_owned(),
            [one] => one.to_string(),
            [first, .., last] => format!("{first} to {last}"),
        }
    }

    /// The text of a helper that the tables name.
    pub fn helper(&self, id: &str) -> &str {
        let helper = self.helpers.iter().find(|helper| helper.id == id);
        &helper.unwrap_or_else(|| panic!("arch-tables/engines/{}.toml has no helper {id}", self.name)).text
    }

    /// What is inconsistent in the table; empty when nothing is.
    pub fn lint(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut check = |right: bool, what: String| {
            if !right {
                faults.push(what);
            }
        };
        check(
            self.releases.is_sorted_by(|one, next| one < next),
            "releases are not in order, or one stands there twice".to_owned(),
        );
        for gate in &self.gates {
            for place in &gate.places {
                for EngineForm { file, form, helpers } in &place.forms {
                    let at = format!("gate {}, {file}, form `{}`", gate.id, form.name);
                    check(file.starts_with(&format!("{}/", self.name)), format!("{at}: lies in another package"));
                    check(!(form.expect.is_empty() && form.edits.is_empty()), format!("{at}: nothing tells it"));
                    for id in helpers {
                        check(self.helpers.iter().any(|helper| helper.id == *id), format!("{at}: no helper {id}"));
                    }
                    for anchor in &form.expect {
                        let plain = [&anchor.replace, &anchor.before, &anchor.after].iter().all(|text| text.is_none());
                        check(plain, format!("{at}: `{}` is expected, not edited", anchor.find));
                    }
                    for anchor in &form.edits {
                        let around = anchor.before.is_some() || anchor.after.is_some();
                        check(
                            anchor.replace.is_some() != around,
                            format!("{at}: `{}` needs `replace`, or `before` and `after`", anchor.find),
                        );
                        check(anchor.count > 0, format!("{at}: `{}` is edited nowhere", anchor.find));
                    }
                }
            }
        }
        faults
    }
}

/// The engine of that name.
pub fn engine(name: &str) -> Result<&'static Engine> {
    let engines = engines();
    engines.iter().find(|engine| engine.name == name).ok_or_else(|| {
        let known: Vec<_> = engines.iter().map(|engine| engine.name.as_str()).collect();
        Error::usage(format!("`{name}` is no engine that fi-arch knows")).hint(format!("known: {}", known.join(", ")))
    })
}

/// All engines.
pub fn engines() -> &'static [Engine] {
    let all = load();
    &all[..all.len() - 1]
}

/// What the policy needs in FlashInfer itself. No build has a part in it.
pub fn policy_edits() -> &'static Engine {
    load().last().expect("the tables are not empty")
}

/// What stays wrong or slow with `version` of an engine on `flashinfer`, on GPUs of capability `sm` (121 for SM 12.1; all of major
/// 12 without it), and what does better. A text that is no version fits every range, so that nothing is kept back.
pub fn notes<'e>(engine: &'e Engine, version: &str, flashinfer: &str, sm: Option<u32>) -> Vec<&'e Note> {
    let within = |range: &Option<VersionSpecifiers>, version: &str| match (range, Version::from_str(version)) {
        (Some(range), Ok(version)) => contains(range, &version),
        _ => true,
    };
    let on = |note: &Note| note.sm.is_empty() || sm.is_none_or(|sm| note.sm.contains(&sm));
    engine
        .notes
        .iter()
        .filter(|note| within(&note.releases, version) && within(&note.flashinfer, flashinfer) && on(note))
        .collect()
}

/// Whether a release lies in a range; one that is not out yet (0.5.10rc1, 0.5.10.dev3) as the release that it becomes.
fn contains(range: &VersionSpecifiers, version: &Version) -> bool {
    range.contains(version) || (version.any_prerelease() && range.contains(&version.only_release()))
}

fn load() -> &'static [Engine] {
    static ENGINES: OnceLock<Vec<Engine>> = OnceLock::new();
    ENGINES.get_or_init(|| {
        let parse = |(name, text): &(&str, &str)| {
            toml_edit::de::from_str(text).unwrap_or_else(|error| panic!("arch-tables/engines/{name}.toml: {error}"))
        };
        TEXTS.iter().map(parse).collect()
    })
}

fn versions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Version>, D::Error> {
    let versions = Vec::<String>::deserialize(deserializer)?;
    versions.iter().map(|version| Version::from_str(version).map_err(serde::de::Error::custom)).collect()
}

fn some_range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<VersionSpecifiers>, D::Error> {
    from_str(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_of_the_engines_are_consistent() {
        for engine in load() {
            assert_eq!(engine.lint(), Vec::<String>::new(), "{}", engine.name);
        }
        assert_eq!(policy_edits().name, "flashinfer");
    }

    #[test]
    fn an_unknown_engine_is_a_usage_error_that_names_the_known_ones() {
        let error = engine("flashinfer").unwrap_err();
        assert_eq!(error.exit() as u8, 2);
        assert_eq!(error.hints(), ["known: sglang, vllm"]);
    }
}
