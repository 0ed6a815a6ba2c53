//! Making room in everything that fi-arch keeps.

use std::path::Path;

use crate::build::provision;
use crate::error::Result;
use crate::store::{self, Limits, Report, Store};

/// What was removed under one home folder.
#[derive(Debug)]
pub struct Freed {
    pub store: Report,
    /// Folders of fetched wheels, with their bytes.
    pub wheels: Vec<(String, u64)>,
    /// Why no wheels were looked at, where they were asked for.
    pub wheels_stay: Option<&'static str>,
}

/// Removes from the store what `limits` name; with `wheels` also the fetched wheels that neither this release of fi-arch
/// fetches by itself nor any artifact left in the store was built from.
pub fn gc(home: &Path, limits: &Limits, wheels: bool) -> Result<Freed> {
    let store = Store::at(home);
    let held = store::held();
    let report = store.gc(limits, &held)?;
    let mut freed = Freed { store: report, wheels: Vec::new(), wheels_stay: None };
    if wheels && store.is_building() {
        freed.wheels_stay = Some("a build is running, and may need them");
    } else if wheels {
        let gone: Vec<&str> = freed.store.removed.iter().map(|removed| removed.name.as_str()).collect();
        let left = store.entries()?.into_iter().filter(|summary| !gone.contains(&summary.name.as_str()));
        let releases: Vec<String> = left.filter_map(|summary| Some(summary.entry.ok()?.manifest.flashinfer)).collect();
        freed.wheels = provision::trim(home, &releases, &held.wheels, limits.dry_run)?;
    }
    Ok(freed)
}
