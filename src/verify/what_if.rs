//! Another release of FlashInfer in place of the installed one: what would have to be edited.

use std::sync::OnceLock;

use pep440_rs::{Version, VersionSpecifiers};
use serde::Deserialize;

use super::Report;
use crate::build::provision;
use crate::error::{Error, Result};
use crate::tables::{Module, Tables};

/// What would be different.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WhatIf {
    pub flashinfer: String,
    /// The ids of the defects that would have to be cured; empty where that release is right as it is.
    pub edits: Vec<String>,
    /// Of what is wrong now, the codes that would be gone.
    pub gone: Vec<String>,
    /// The codes that would be new.
    pub new: Vec<String>,
    /// Ids of known faults that would stay; none are known of releases that are not in the tables.
    pub remains: Option<Vec<String>>,
    /// The installed apache-tvm-ffi lies in that release's range; none where one of the two is not known.
    pub tvm_ffi_fits: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    history: Vec<Row>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    defect: String,
    since: String,
    cured: String,
}

fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| {
        toml_edit::de::from_str::<Rows>(include_str!("../../arch-tables/flashinfer/history.toml"))
            .expect("arch-tables/flashinfer/history.toml is well formed")
            .history
    })
}

fn numbers(version: &str) -> Vec<u64> {
    version.parse::<Version>().map(|version| version.release().to_vec()).unwrap_or_default()
}

/// The ids of the defects of a release, by the table.
pub fn defects(release: &Version, module: &Module) -> Vec<String> {
    let here = release.release().to_vec();
    let is_in = |row: &&Row| here >= numbers(&row.since) && here < numbers(&row.cured) && module.defects.contains(&row.defect);
    rows().iter().filter(is_in).map(|row| row.defect.clone()).collect()
}

pub fn ask(text: &str, report: &Report, module: &Module) -> Result<WhatIf> {
    let hint = "write `--what-if flashinfer==0.6.17`";
    let version = text.strip_prefix("flashinfer==").or_else(|| text.strip_prefix("flashinfer-python=="));
    let version = version.ok_or_else(|| Error::usage(format!("`{text}` names no release of FlashInfer")).hint(hint))?;
    let wanted: Version = version.parse().map_err(|_| Error::usage(format!("`{version}` is no release number")).hint(hint))?;
    let tables = Tables::load();
    let row = tables.release(version);
    if row.is_none() {
        // A release that can be fetched is known; the error for any other says which are nearest.
        provision::Set::flashinfer(Some(version))?;
    }
    if row.is_none() && wanted.any_prerelease() && rows().iter().any(|row| numbers(&row.cured) == wanted.release()) {
        return Err(Error::unsupported(format!("FlashInfer {version} is a candidate of a release that cured defects"))
            .because("whether this candidate holds the cures already is not known here; its files would tell")
            .hint("ask for the release itself, or install the candidate and run `fi-arch doctor` there"));
    }
    let edits = defects(&wanted, module);
    let code = |id: &String| if id == "gate" { "gate-closed".to_owned() } else { format!("defect-{id}") };
    let would: Vec<String> = edits.iter().map(code).collect();
    let mut is: Vec<String> = report.findings.problems.iter().map(|problem| problem.code.clone()).collect();
    is.retain(|code| code == "gate-closed" || code.starts_with("defect-"));
    let fits = |range: &str| {
        let found = report.tvm_ffi.as_ref()?.version.parse::<Version>().ok()?;
        Some(range.parse::<VersionSpecifiers>().ok()?.contains(&found))
    };
    Ok(WhatIf {
        flashinfer: version.to_owned(),
        gone: is.iter().filter(|code| !would.contains(code)).cloned().collect(),
        new: would.into_iter().filter(|code| !is.contains(code)).collect(),
        edits,
        remains: row.map(|row| row.remains.clone()),
        tvm_ffi_fits: row.and_then(|row| fits(&row.tvm_ffi)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_defect_of_the_module_has_a_history() {
        let module = Tables::load().module("trtllm_comm").unwrap();
        let mut known = defects(&"0.6.3".parse().unwrap(), module);
        known.sort();
        let mut all = module.defects.clone();
        all.sort();
        assert_eq!(known, all);
        assert_eq!(defects(&"0.6.17".parse().unwrap(), module), Vec::<String>::new());
        assert_eq!(defects(&"0.6.16.post4".parse().unwrap(), module).len(), 5);
    }
}
