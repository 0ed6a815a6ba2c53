//! Another release of FlashInfer in place of the installed one: what would have to be edited.

use pep440_rs::{Version, VersionSpecifiers};

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
    /// Ids of known faults that would stay.
    pub remains: Vec<String>,
    /// The installed apache-tvm-ffi lies in that release's range; none where one of the two is not known.
    pub tvm_ffi_fits: Option<bool>,
}

/// What another release would change. `text` is the user's `flashinfer==VERSION`.
pub fn ask(text: &str, report: &Report, module: &Module) -> Result<WhatIf> {
    let hint = "write `--what-if flashinfer==0.6.17`";
    let version = text.strip_prefix("flashinfer==").or_else(|| text.strip_prefix("flashinfer-python=="));
    let version = version.ok_or_else(|| Error::usage(format!("`{text}` names no release of FlashInfer")).hint(hint))?;
    let wanted: Version = version.parse().map_err(|_| Error::usage(format!("`{version}` is no release number")).hint(hint))?;
    let tables = Tables::load();
    let Some(row) = tables.release(version) else {
        // Why it is not known: never released, of another layout, or newer than these tables.
        provision::Set::flashinfer(Some(version))?;
        return Err(Error::unsupported(format!("FlashInfer {wanted} is not in the tables"))
            .because("what its files hold is not known here; they would tell")
            .hint("install it elsewhere and run `fi-arch doctor --env DIR` there"));
    };
    let edits: Vec<String> = tables.defects_in(row, module).map(str::to_owned).collect();
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
        remains: row.remains.clone(),
        tvm_ffi_fits: fits(&row.tvm_ffi),
    })
}
