//! The lint of the tables against a real release: every digest, every anchor, every stated range.

use super::{Files, ids, range_parts};
use crate::build::provision;
use crate::error::Result;
use crate::survey::Archive;
use crate::tables::{Release, Tables};

/// What one release shows.
#[derive(Debug)]
pub struct Report {
    pub version: String,
    /// The defects that were found and can be cured, by module; modules without any are left out.
    pub cures: Vec<(String, Vec<String>)>,
    /// What the tables say otherwise than the release; empty when they are right.
    pub faults: Vec<String>,
}

/// Holds the rows of `release` against `archive`.
pub fn check(release: &Release, archive: &mut Archive) -> Result<Report> {
    let tables = Tables::load();
    let version = release.version.to_string();
    let mut faults = Vec::new();
    if let (Some(pinned), Some(sha256)) = (provision::pinned_flashinfer(&version), archive.sha256()?)
        && pinned != sha256
    {
        faults.push(format!("the wheel has SHA-256 {sha256}, wheels.toml says {pinned}"));
    }
    let files = Files::of(archive)?;
    if files.version != version {
        faults.push(format!("it calls itself {}", files.version));
    }
    for path in tables.paths() {
        match (release.files.get(path), files.digest(path)) {
            (listed, found) if listed == found.as_ref() => {}
            (_, None) => faults.push(format!("{path} is not in it")),
            (None, Some(found)) => faults.push(format!("{path} has no digest in releases.toml; it is {found}")),
            (Some(listed), Some(found)) => faults.push(format!("{path} has SHA-256 {found}, releases.toml says {listed}")),
        }
    }
    match archive.tvm_ffi()? {
        Some(range) if range_parts(&range) == range_parts(&release.tvm_ffi) => {}
        Some(range) => faults.push(format!("it asks for apache-tvm-ffi {range}, releases.toml says {}", release.tvm_ffi)),
        None => faults.push("it asks for no apache-tvm-ffi".to_owned()),
    }
    let dir = files.lay_out()?;
    let mut cures = Vec::new();
    for module in &tables.modules {
        let overlay = match files.overlay(dir.path(), module) {
            Ok(overlay) => overlay,
            Err(error) => {
                faults.push(format!("{}: {}; {}", module.name, error.what(), error.why().join("; ")));
                continue;
            }
        };
        faults.extend(overlay.warnings.iter().map(|warning| format!("{}: {warning}", module.name)));
        let found = ids(&overlay);
        let stated: Vec<&str> = tables.defects_in(release, module).collect();
        if found != stated {
            let list = |ids: &[String]| if ids.is_empty() { "nothing".to_owned() } else { ids.join(", ") };
            let stated: Vec<String> = stated.into_iter().map(str::to_owned).collect();
            faults.push(format!("{}: found {}, defects.toml says {}", module.name, list(&found), list(&stated)));
        }
        if !found.is_empty() {
            cures.push((module.name.clone(), found));
        }
    }
    Ok(Report { version, cures, faults })
}
