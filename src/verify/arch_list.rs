//! What FlashInfer makes of `FLASHINFER_CUDA_ARCH_LIST`, and of GPUs without it: its rule, restated.
//!
//! | `compilation_context.py` | releases | rule |
//! | --- | --- | --- |
//! | without `_normalize_cuda_arch` | up to 0.6.6 | `MAJOR.MINOR` is taken as it stands: `12.0` becomes `compute_120` |
//! | with it | 0.6.7 to 0.7.2 | a letter stays; `12.0` becomes `120f`, and needs nvcc 12.9 |
//! | with it, and it asks for 12.8 | 0.7.4 | as before; with nvcc 12.8, `12.0` becomes `120a` |
//!
//! The list is split at single spaces and each word at its dots, so every other spelling ends in a ValueError at import.

use super::{Finding, Report, names, text};
use crate::env;
use crate::target::{self, CudaVersion};

/// What FlashInfer makes of the variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchList {
    pub raw: String,
    /// What to export for the asked targets.
    pub canonical: String,
    /// `120f`, `90a`; or the error in which `import flashinfer` ends.
    pub becomes: Result<Vec<String>, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Literal,
    Normalised {
        /// CUDA 12.8 is enough for SM 12.0.
        takes_12_8: bool,
        /// SM 12.1 becomes `121a`, and not `121f`.
        keeps_minor: bool,
    },
}

impl Rule {
    fn of(source: &str) -> Self {
        if !source.contains("_normalize_cuda_arch") {
            return Self::Literal;
        }
        Self::Normalised {
            takes_12_8: source.contains("is_cuda_version_at_least(\"12.8\")"),
            keeps_minor: source.contains("if minor == 0"),
        }
    }

    /// The arch for one GPU, such as `120f`.
    fn normalise(self, major: u32, minor: &str, nvcc: Option<CudaVersion>) -> Result<String, String> {
        let Self::Normalised { takes_12_8, keeps_minor } = self else { return Ok(format!("{major}{minor}")) };
        let at_least = |minor| nvcc.is_none_or(|nvcc| nvcc >= CudaVersion::new(12, minor));
        match (major, minor) {
            (12, "0") if at_least(9) => Ok("120f".to_owned()),
            (12, "0") if takes_12_8 && at_least(8) => Ok("120a".to_owned()),
            (12, _) if at_least(9) => Ok(format!("12{minor}{}", if keeps_minor { "a" } else { "f" })),
            (12, _) => Err("RuntimeError: SM 12.x requires CUDA >= 12.9".to_owned()),
            (9.., _) => Ok(format!("{major}{minor}a")),
            _ => Ok(format!("{major}{minor}")),
        }
    }

    /// What the list becomes.
    fn list(self, raw: &str, nvcc: Option<CudaVersion>) -> Result<Vec<String>, String> {
        let mut archs: Vec<String> = Vec::new();
        for word in raw.split(' ') {
            let parts: Vec<&str> = word.split('.').collect();
            let [major, minor] = parts[..] else {
                let too = if parts.len() < 2 { "not enough values to unpack" } else { "too many values to unpack" };
                return Err(format!("ValueError: {too} at `{word}`"));
            };
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("ValueError: `{text}` is no number"));
            let major = number(major)?;
            let arch = match (self, minor.chars().last()) {
                (Self::Literal, _) => format!("{major}{minor}"),
                (_, None) => return Err(format!("IndexError at `{word}`")),
                (_, Some(last)) if last.is_alphabetic() => format!("{major}{minor}"),
                _ => self.normalise(major, &number(minor)?.to_string(), nvcc)?,
            };
            if !archs.contains(&arch) {
                archs.push(arch);
            }
        }
        Ok(archs)
    }
}

pub fn look(report: &mut Report) {
    let Some(package) = report.package() else { return };
    let file = package.join("compilation_context.py");
    let rule = Rule::of(&text(&file));
    // What FlashInfer would ask, fit for our purposes or not: its version decides here.
    let nvcc = report.cuda();
    let canonical = canonical(report, nvcc);
    // FlashInfer takes an empty variable for a list.
    let Some(raw) = report.vars.raw(env::FLASHINFER_CUDA_ARCH_LIST) else { return unset(report, rule, nvcc, &canonical) };
    let raw = raw.to_string_lossy().into_owned();
    let becomes = rule.list(&raw, nvcc);
    let export = format!("export FLASHINFER_CUDA_ARCH_LIST=\"{canonical}\"");
    match &becomes {
        Err(error) => report.findings.problem(
            Finding::new("arch-list-raises", format!("FLASHINFER_CUDA_ARCH_LIST=\"{raw}\": `import flashinfer` ends in {error}"))
                .hint(export)
                .at(file),
        ),
        Ok(archs) => {
            let unknown: Vec<&str> = archs.iter().map(String::as_str).filter(|arch| !is_arch(arch)).collect();
            let bare: Vec<&str> = archs.iter().map(String::as_str).filter(|arch| matches!(*arch, "120" | "121")).collect();
            let missing: Vec<u32> = report.sms().into_iter().filter(|sm| !archs.iter().any(|arch| covers(arch, *sm))).collect();
            let mut say = |code: &str, message: String| {
                report.findings.problem(Finding::new(code, message).hint(export.clone()).at(&file));
            };
            if !unknown.is_empty() {
                say(
                    "arch-list-unknown",
                    format!(
                        "FLASHINFER_CUDA_ARCH_LIST=\"{raw}\" becomes compute_{}, which nvcc does not know",
                        unknown.join(", compute_")
                    ),
                );
            }
            if !bare.is_empty() {
                say(
                    "arch-list-bare",
                    format!(
                        "FLASHINFER_CUDA_ARCH_LIST=\"{raw}\" becomes compute_{}: without a suffix the FP4 conversion does not assemble",
                        bare.join(", compute_")
                    ),
                );
            }
            if !missing.is_empty() {
                say("arch-list-lacks-target", format!("FLASHINFER_CUDA_ARCH_LIST=\"{raw}\" has nothing for {}", names(&missing)));
            }
        }
    }
    report.arch_list = Some(ArchList { raw, canonical, becomes });
}

/// Without the variable FlashInfer asks the GPUs; an error there leaves it without any target.
fn unset(report: &mut Report, rule: Rule, nvcc: Option<CudaVersion>, canonical: &str) {
    let Some(gpu) = report.gpus.iter().find(|gpu| rule.normalise(gpu.sm / 10, &(gpu.sm % 10).to_string(), nvcc).is_err()) else {
        return;
    };
    let nvcc = nvcc.map(|nvcc| nvcc.to_string()).unwrap_or_default();
    let message = format!(
        "FlashInfer takes no nvcc {nvcc} for {}: it logs that, goes on without any target, and later says \"requires sm75 or higher\"",
        gpu.name
    );
    let hint = format!("use nvcc 12.9 or newer, or: export FLASHINFER_CUDA_ARCH_LIST=\"{canonical}\"");
    report.findings.problem(Finding::new("arch-set-empty", message).hint(hint));
}

/// `12.0f 12.1a`: what every release reads alike.
fn canonical(report: &Report, nvcc: Option<CudaVersion>) -> String {
    let newest = CudaVersion::new(13, 0);
    let spell = |request: &target::Request| {
        let target = request.resolve(nvcc.unwrap_or(newest)).or_else(|_| request.resolve(newest)).ok()?;
        Some(format!("{}.{}{}", target.sm / 10, target.sm % 10, target.suffix))
    };
    report.targets.iter().filter_map(spell).collect::<Vec<_>>().join(" ")
}

fn is_arch(arch: &str) -> bool {
    let digits = arch.strip_suffix(['a', 'f']).unwrap_or(arch);
    (2..=3).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether machine code for `arch` runs on `sm`.
pub fn covers(arch: &str, sm: u32) -> bool {
    let digits = arch.trim_end_matches(['a', 'f']);
    let suffix = &arch[digits.len()..];
    digits.parse().is_ok_and(|of| crate::cubin::usable::usable(crate::cubin::Kind::Sass, of, suffix, sm).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Rule = Rule::Normalised { takes_12_8: false, keeps_minor: true };
    const NEWEST: Rule = Rule::Normalised { takes_12_8: true, keeps_minor: true };

    fn made(rule: Rule, raw: &str, nvcc: &str) -> String {
        match rule.list(raw, CudaVersion::parse(nvcc)) {
            Ok(archs) => archs.join(" "),
            Err(error) => error.split(':').next().unwrap().to_owned(),
        }
    }

    #[test]
    fn every_spelling_but_one_ends_in_an_error_at_import() {
        for rule in [Rule::Literal, NEW] {
            for raw in ["", "120", "sm_120", "12.0  9.0", " 12.0", "12.0 ", "12.0;9.0a", "12.0,9.0a"] {
                assert_eq!(made(rule, raw, "13.0"), "ValueError", "{rule:?} `{raw}`");
            }
            assert_eq!(made(rule, "12.0+PTX", "13.0"), "120+PTX");
            assert_eq!(made(rule, "12.0f 9.0a", "13.0"), "120f 90a");
        }
    }

    #[test]
    fn the_suffix_is_the_users_up_to_0_6_6_and_flashinfers_from_then_on() {
        assert_eq!(made(Rule::Literal, "12.0 12.1", "13.0"), "120 121");
        assert_eq!(made(NEW, "12.0 12.1 9.0 10.0 8.9", "13.0"), "120f 121a 90a 100a 89");
        assert_eq!(made(NEW, "12.0", "12.8"), "RuntimeError");
        assert_eq!(made(NEWEST, "12.0", "12.8"), "120a");
        assert_eq!(made(NEWEST, "12.1", "12.8"), "RuntimeError");
        assert_eq!(made(NEW, "12.0a", "12.8"), "120a");
    }
}
