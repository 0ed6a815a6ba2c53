//! SM targets: a tolerant parser of every spelling in use, and what an nvcc can emit for each.
//!
//! FlashInfer splits its arch list on single spaces and on "."; `12.0;9.0a`, `120`, `sm_120` and a doubled
//! space all break it at import. This parser takes them all, and prints one canonical form.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::Deserialize;

use crate::error::{Error, Result};

/// The version of an nvcc: major and minor, as in `release 13.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    pub major: u32,
    pub minor: u32,
}

impl CudaVersion {
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Reads `13.0` or the head of `13.0.88`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        Some(Self { major, minor })
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The letter behind an arch: `a` for the one chip, `f` for its family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Suffix {
    A,
    F,
}

impl fmt::Display for Suffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "a",
            Self::F => "f",
        })
    }
}

/// What a user asked for; the suffix may still be open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// 120 for SM 12.0.
    pub sm: u32,
    pub suffix: Option<Suffix>,
    /// The user wrote `+PTX`. fi-arch ships machine code only, so this earns a remark and nothing else.
    pub ptx: bool,
}

/// An arch that one nvcc can emit, such as `120f`. Always with a suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    pub sm: u32,
    pub suffix: Suffix,
}

impl Target {
    /// 12 for SM 12.0: what FlashInfer's `supported_major_versions` lists.
    pub fn major(&self) -> u32 {
        self.sm / 10
    }

    /// nvcc's flag for machine code of this target, and no PTX.
    pub fn gencode(&self) -> String {
        format!("-gencode=arch=compute_{0}{1},code=sm_{0}{1}", self.sm, self.suffix)
    }
}

impl FromStr for Target {
    type Err = Error;

    /// Reads the canonical spelling alone, as in a manifest: `sm_120f`.
    fn from_str(text: &str) -> Result<Self> {
        match parse(text) {
            Ok(Request { sm, suffix: Some(suffix), .. }) if Self { sm, suffix }.to_string() == text => Ok(Self { sm, suffix }),
            _ => Err(Error::unsupported(format!("this fi-arch knows no target {}", text.escape_debug()))),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.sm, self.suffix)
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.sm)?;
        self.suffix.map_or(Ok(()), |suffix| write!(f, "{suffix}"))
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    target: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    sm: u32,
    name: String,
    forms: Vec<Form>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    suffix: Suffix,
    nvcc: String,
}

impl Form {
    fn nvcc(&self) -> CudaVersion {
        CudaVersion::parse(&self.nvcc).expect("arch-tables/targets.toml: `nvcc` is MAJOR.MINOR")
    }
}

fn table() -> &'static [Row] {
    static TABLE: OnceLock<Vec<Row>> = OnceLock::new();
    TABLE.get_or_init(|| {
        toml_edit::de::from_str::<Table>(include_str!("../arch-tables/targets.toml"))
            .expect("arch-tables/targets.toml is well formed")
            .target
    })
}

/// Every SM that fi-arch knows: 120 for 12.0.
pub fn known_sms() -> impl Iterator<Item = u32> {
    table().iter().map(|row| row.sm)
}

fn known() -> String {
    table().iter().map(|row| format!("{} ({})", row.sm, row.name)).collect::<Vec<_>>().join(", ")
}

/// Reads a list of targets in any common spelling, separated by spaces, commas or semicolons.
/// Returns them in the given order, each once.
pub fn parse_list(text: &str) -> Result<Vec<Request>> {
    let mut requests: Vec<Request> = Vec::new();
    for word in text.split([' ', ',', ';', '\t', '\n']).filter(|word| !word.is_empty()) {
        let request = parse(word)?;
        match requests.iter_mut().find(|r| (r.sm, r.suffix) == (request.sm, request.suffix)) {
            Some(same) => same.ptx |= request.ptx,
            None => requests.push(request),
        }
    }
    if requests.is_empty() {
        return Err(Error::usage("no target is named").hint("for example `--sm 120`, `--sm 12.0f` or `--sm \"120 121\"`"));
    }
    Ok(requests)
}

/// Reads one target: `120`, `12.0`, `12.0a`, `sm_120`, `compute_121a`, each with `+PTX` or `-real`.
pub fn parse(word: &str) -> Result<Request> {
    let wrong = |why: &str| {
        Error::usage(format!("`{word}` is no target"))
            .because(why)
            .hint("write 120, 12.0, 12.0a, 12.0f, sm_120 or compute_121a; lists may use spaces, commas or semicolons")
    };
    let lower = word.to_ascii_lowercase();
    let mut rest = lower.as_str();
    for prefix in ["sm_", "compute_", "sm"] {
        if let Some(bare) = rest.strip_prefix(prefix) {
            rest = bare;
            break;
        }
    }
    let mut ptx = false;
    if let Some(bare) = rest.strip_suffix("+ptx") {
        (rest, ptx) = (bare, true);
    } else if let Some(bare) = rest.strip_suffix("-real") {
        rest = bare;
    } else if rest.ends_with("-virtual") {
        return Err(wrong("`-virtual` asks for PTX alone, and fi-arch builds machine code, which is what it can prove"));
    }
    let suffix = match rest.chars().last() {
        Some('a') => Some(Suffix::A),
        Some('f') => Some(Suffix::F),
        _ => None,
    };
    let number = if suffix.is_some() { &rest[..rest.len() - 1] } else { rest };
    let digits = |text: &str| !text.is_empty() && text.len() <= 3 && text.bytes().all(|b| b.is_ascii_digit());
    let sm = match number.split_once('.') {
        Some((major, minor)) if digits(major) && minor.len() == 1 && digits(minor) => format!("{major}{minor}"),
        None if digits(number) && number.len() >= 2 => number.to_owned(),
        _ => return Err(wrong("a target is a compute capability, such as 12.0, with or without its dot")),
    };
    let sm: u32 = sm.parse().map_err(|_| wrong("the number is out of range"))?;
    if !table().iter().any(|row| row.sm == sm) {
        return Err(Error::unsupported(format!("target {word} is not one that fi-arch knows"))
            .because(format!("known: {}", known()))
            .hint("a new target is one row in arch-tables/targets.toml"));
    }
    Ok(Request { sm, suffix, ptx })
}

impl Request {
    /// The arch to build for this request with an nvcc of version `nvcc`. Never one without a suffix.
    pub fn resolve(&self, nvcc: CudaVersion) -> Result<Target> {
        let row = table().iter().find(|row| row.sm == self.sm).expect("parse() admits only rows of the table");
        let wanted = |form: &&Form| self.suffix.is_none_or(|suffix| suffix == form.suffix);
        let Some(oldest) = row.forms.iter().filter(wanted).map(Form::nvcc).min() else {
            return Err(Error::unsupported(format!("{self} is not a form of SM {} that fi-arch builds", self.sm)));
        };
        match row.forms.iter().filter(wanted).find(|form| nvcc >= form.nvcc()) {
            Some(form) => Ok(Target { sm: self.sm, suffix: form.suffix }),
            None => {
                let error = Error::unsupported(format!("nvcc {nvcc} cannot emit code for {self}"))
                    .because(format!("{self} ({}) needs CUDA {oldest} or newer", row.name));
                let other = row.forms.iter().find(|form| nvcc >= form.nvcc());
                Err(match other {
                    Some(form) => error.hint(format!(
                        "this nvcc can emit sm_{}{}: ask for `--sm {}` and the best form is chosen",
                        self.sm, form.suffix, self.sm
                    )),
                    None => error.hint(
                        "name a newer toolkit with --toolkit DIR, or leave it out: without a fit one fi-arch fetches CUDA 13.0 into its own folder",
                    ),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(word: &str, nvcc: &str) -> String {
        let nvcc = CudaVersion::parse(nvcc).unwrap();
        parse(word).and_then(|r| r.resolve(nvcc)).map_or_else(|e| format!("exit {}", e.exit() as u8), |t| t.to_string())
    }

    #[test]
    fn every_spelling_of_a_target_is_read() {
        for word in ["120", "12.0", "sm_120", "SM120", "compute_120", "12.0+PTX", "sm_120-real"] {
            assert_eq!(resolved(word, "13.0"), "sm_120f", "{word}");
        }
        for word in ["12.0a", "120a", "sm_120a", "compute_120A"] {
            assert_eq!(resolved(word, "13.0"), "sm_120a", "{word}");
        }
        assert_eq!(resolved("compute_121a", "12.9"), "sm_121a");
        assert_eq!(resolved("12.0f", "12.9"), "sm_120f");
        assert_eq!(resolved("90", "12.4"), "sm_90a");
        assert_eq!(resolved("10.0", "12.8"), "sm_100a");
        assert_eq!(resolved("103", "13.0"), "sm_103a");
    }

    #[test]
    fn no_target_is_ever_without_a_suffix_and_too_old_an_nvcc_is_refused() {
        assert_eq!(resolved("120", "12.9"), "sm_120f");
        assert_eq!(resolved("120", "12.8"), "sm_120a");
        assert_eq!(resolved("120", "12.6"), "exit 4");
        assert_eq!(resolved("120f", "12.8"), "exit 4");
        assert_eq!(resolved("121", "12.9"), "sm_121a");
        assert_eq!(resolved("121", "12.8"), "exit 4");
    }

    #[test]
    fn words_that_are_no_target_are_usage_errors() {
        for word in ["", "12.", ".0", "12.0.1", "a", "f", "sm_", "12.0x", "twelve", "1200000", "12.0-virtual", "1", "-120", "é"]
        {
            let exit = parse(word).map_err(|e| e.exit() as u8);
            assert!(matches!(exit, Err(2)), "{word}: {exit:?}");
        }
        assert_eq!(parse("75").unwrap_err().exit() as u8, 4);
    }

    #[test]
    fn lists_may_use_spaces_commas_and_semicolons() {
        let list = |text| parse_list(text).map(|l| l.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")).unwrap();
        assert_eq!(list("12.0;9.0a"), "sm_120 sm_90a");
        assert_eq!(list(" 120,  121 ; 120 "), "sm_120 sm_121");
        assert_eq!(parse_list(" ; ").unwrap_err().exit() as u8, 2);
    }
}
