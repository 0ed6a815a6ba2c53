//! How the functions of a module are called: `calls.toml` read into types.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::OnceLock;

use pep440_rs::{Version, VersionSpecifiers};
use serde::{Deserialize, Deserializer};

/// The calls of all modules.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    #[serde(rename = "function")]
    pub functions: Vec<Function>,
    #[serde(rename = "pattern")]
    pub patterns: Vec<Pattern>,
    #[serde(rename = "oneshot")]
    pub oneshots: Vec<OneShot>,
    #[serde(rename = "fault")]
    pub faults: Vec<Fault>,
}

/// An exported function, and what it takes in each release.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    pub module: String,
    pub name: String,
    #[serde(rename = "form")]
    pub forms: Vec<Form>,
}

/// One parameter list of a function.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    #[serde(deserialize_with = "super::from_str")]
    pub releases: VersionSpecifiers,
    pub parameters: Vec<Parameter>,
}

/// A parameter: what it means, and what may be passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub kind: Kind,
    /// It may be left out.
    pub optional: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Int,
    Bool,
    Float,
    DataType,
    Tensor,
}

impl Kind {
    const WORDS: [(&str, Self); 5] =
        [("int", Self::Int), ("bool", Self::Bool), ("float", Self::Float), ("dtype", Self::DataType), ("tensor", Self::Tensor)];

    /// The word of the table for it.
    pub fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, kind)| *kind == self).expect("every kind has a word").0
    }
}

impl FromStr for Parameter {
    type Err = String;

    /// Reads `name: kind` or `name: kind?`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, kind) = text.split_once(": ").ok_or_else(|| format!("`{text}` is no `name: kind`"))?;
        let word = kind.strip_suffix('?').unwrap_or(kind);
        let known = Kind::WORDS.iter().find(|(known, _)| *known == word);
        let kind_of = known.ok_or_else(|| format!("`{word}` is no kind of parameter"))?.1;
        Ok(Self { name: name.to_owned(), kind: kind_of, optional: kind.len() > word.len() })
    }
}

impl<'de> Deserialize<'de> for Parameter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        super::from_str(deserializer)
    }
}

/// What `pattern_code` asks of `trtllm_allreduce_fusion`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pattern {
    pub code: i64,
    pub name: String,
    /// It adds the residual and norms the sum.
    #[serde(default = "super::yes")]
    pub norm: bool,
    /// The norm itself is written too.
    #[serde(default)]
    pub norm_out: bool,
    pub quant: Option<Quant>,
    /// The oldest target for which the sources have a body.
    #[serde(default)]
    pub min_sm: u32,
}

/// How the norm is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quant {
    /// E4M3 with one scale that is given.
    Fp8,
    /// E2M1 with an E4M3 scale for each 16 values.
    Fp4,
    /// E4M3 with a power of two for each group of a token's values.
    GroupFp8,
    /// E4M3 with one scale a token.
    DynamicFp8,
    /// E4M3 with a power of two for each 32 values.
    Mxfp8,
}

/// When FlashInfer's Python takes the one-shot kernels, where its caller leaves that open.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneShot {
    pub function: String,
    #[serde(deserialize_with = "super::from_str")]
    pub releases: VersionSpecifiers,
    /// By number of ranks: most MiB of twice all ranks' inputs. A number of ranks that is not here is refused.
    #[serde(deserialize_with = "by_number")]
    mib: BTreeMap<usize, usize>,
    /// Most bytes of a rank's part of the Lamport buffer.
    most_bytes: usize,
}

/// TOML's keys are texts.
fn by_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<usize, usize>, D::Error> {
    let texts = BTreeMap::<String, usize>::deserialize(deserializer)?;
    let number = |text: String| text.parse().map_err(|_| serde::de::Error::custom(format!("`{text}` is no number of ranks")));
    texts.into_iter().map(|(text, value)| Ok((number(text)?, value))).collect()
}

impl OneShot {
    /// Whether one-shot is taken for inputs of `bytes` in each of `ranks`; none where so many ranks are refused.
    pub fn takes(&self, ranks: usize, bytes: usize) -> Option<bool> {
        let most = self.mib.get(&ranks)? << 20;
        Some(2 * ranks * bytes <= most && self.holds(ranks, bytes))
    }

    /// Whether the one-shot kernels can be used at all: their buffer has room.
    pub fn holds(&self, ranks: usize, bytes: usize) -> bool {
        ranks * bytes <= self.most_bytes
    }
}

/// What a function is known to do wrong, whatever it is compiled for.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    pub id: String,
    pub function: String,
    /// The names of cases, without their shapes; all of the function's where empty.
    #[serde(default)]
    pub paths: Vec<String>,
    pub when: When,
    pub kind: FaultKind,
    #[serde(deserialize_with = "super::from_str")]
    pub releases: VersionSpecifiers,
    pub why: String,
}

/// The shapes that meet a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    Always,
    /// The last warp of a row is partial.
    Ragged,
    /// That, and there is a row behind the first.
    RaggedRows,
    /// The chunks of the blocks of a two-shot kernel overlap.
    UnevenChunks,
}

/// Whether luck helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// It never comes out right, or never ends.
    Wrong,
    /// It comes out right or wrong by the order in which threads run.
    Race,
}

/// The calls that this fi-arch was built with.
pub fn calls() -> &'static Calls {
    static CALLS: OnceLock<Calls> = OnceLock::new();
    CALLS.get_or_init(|| super::parse("calls", include_str!("../../arch-tables/flashinfer/calls.toml")))
}

impl Calls {
    /// The functions of a module.
    pub fn of_module<'t>(&'t self, module: &'t str) -> impl Iterator<Item = &'t Function> {
        self.functions.iter().filter(move |function| function.module == module)
    }

    /// The pattern of that code.
    pub fn pattern(&self, code: i64) -> Option<&Pattern> {
        self.patterns.iter().find(|pattern| pattern.code == code)
    }

    /// The rule of a release for one-shot; of an unknown release, that of the newest.
    pub fn oneshot(&self, function: &str, release: Option<&Version>) -> Option<&OneShot> {
        let mut rules = self.oneshots.iter().filter(|rule| rule.function == function);
        match release {
            Some(release) => rules.find(|rule| rule.releases.contains(release)),
            None => rules.next_back(),
        }
    }

    /// What is inconsistent; empty when nothing is.
    pub fn lint(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for function in &self.functions {
            for form in &function.forms {
                let mut names: Vec<_> = form.parameters.iter().map(|parameter| &parameter.name).collect();
                names.sort();
                names.dedup();
                if names.len() != form.parameters.len() {
                    faults.push(format!("{}, {}: a name stands there twice", function.name, form.releases));
                }
            }
        }
        let mut codes: Vec<_> = self.patterns.iter().map(|pattern| pattern.code).collect();
        codes.dedup();
        if codes.len() != self.patterns.len() || !codes.is_sorted() {
            faults.push("patterns are not in order, or one stands there twice".to_owned());
        }
        for fault in &self.faults {
            if !self.functions.iter().any(|function| function.name == fault.function) {
                faults.push(format!("{}: there is no function {}", fault.id, fault.function));
            }
            if self.faults.iter().filter(|other| other.id == fault.id).count() > 1 {
                faults.push(format!("{} stands there twice", fault.id));
            }
        }
        faults
    }
}

impl Function {
    /// The parameter list of a release.
    pub fn form_of(&self, version: &Version) -> Option<&Form> {
        self.forms.iter().find(|form| form.releases.contains(version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::Tables;

    #[test]
    fn every_listed_release_since_0_5_has_exactly_one_form_of_every_function() {
        let calls = calls();
        assert_eq!(calls.lint(), Vec::<String>::new());
        let oldest = Version::from_str("0.5.0rc1").unwrap();
        for release in Tables::load().releases.iter().filter(|release| release.version >= oldest) {
            for function in &calls.functions {
                let forms = function.forms.iter().filter(|form| form.releases.contains(&release.version)).count();
                assert_eq!(forms, 1, "{} of {}", function.name, release.version);
            }
        }
    }

    /// The launchers are the source of the parameter lists: where their content changes, a form may begin, and nowhere else.
    #[test]
    fn a_form_begins_only_where_the_launchers_of_the_release_change() {
        let releases = &Tables::load().releases;
        let launcher = |function: &str| match function {
            "trtllm_allreduce_fusion" => "flashinfer/data/csrc/trtllm_allreduce_fusion.cu",
            name if name.starts_with("trtllm_moe") => "flashinfer/data/csrc/trtllm_moe_allreduce_fusion.cu",
            _ => "flashinfer/data/csrc/trtllm_allreduce.cu",
        };
        for function in &calls().functions {
            let file = launcher(&function.name);
            for pair in releases.windows(2) {
                let form = |at: usize| function.form_of(&pair[at].version).map(|form| &form.parameters);
                if let (Some(one), Some(next)) = (form(0), form(1))
                    && one != next
                {
                    let text = format!("{} changes at {}", function.name, pair[1].version);
                    assert_ne!(pair[0].files.get(file), pair[1].files.get(file), "{text}, {file} does not");
                }
            }
        }
    }

    #[test]
    fn one_shot_is_taken_up_to_the_size_of_the_release_s_own_rule() {
        let rule = |release: &str| calls().oneshot("trtllm_allreduce_fusion", Some(&release.parse().unwrap()));
        assert!(rule("0.4.1").is_none(), "it goes by another rule");
        for rule in [rule("0.6.4"), rule("0.7.4"), calls().oneshot("trtllm_allreduce_fusion", None)] {
            let takes = |ranks, tokens: usize| rule.unwrap().takes(ranks, tokens * 7168 * 2);
            assert_eq!((takes(2, 2048), takes(2, 16384)), (Some(true), Some(false)));
            assert_eq!((takes(4, 585), takes(4, 586)), (Some(true), Some(false)));
            assert_eq!((takes(8, 192), takes(8, 193)), (Some(true), Some(false)));
            assert_eq!(takes(16, 1), None);
            assert!(!rule.unwrap().holds(8, 1 << 30));
        }
    }

    #[test]
    fn a_parameter_is_a_name_and_a_kind() {
        let read = |text: &str| text.parse::<Parameter>();
        assert_eq!(read("a: int?"), Ok(Parameter { name: "a".into(), kind: Kind::Int, optional: true }));
        assert!(!read("eps: float").unwrap().optional);
        assert!(read("a").is_err() && read("a: text").is_err() && read("a: ?").is_err());
        assert_eq!(read("t: tensor").unwrap().kind.word(), "tensor");
    }
}
