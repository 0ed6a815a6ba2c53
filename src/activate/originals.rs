//! A package as it was before we wrote over its files: what overlays are computed from, and artifacts built from, while an
//! installation in place is in force. A folder of links; nothing is copied and nothing is changed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::journal::{self, FOLDER, InPlace};
use crate::error::{Error, Result};
use crate::survey::{Environment, FlashInfer};

/// A view of one package; it vanishes when dropped.
#[derive(Debug)]
pub struct View {
    dir: TempDir,
    name: String,
}

impl View {
    /// The folder that holds the package.
    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    /// The package's folder.
    pub fn package(&self) -> PathBuf {
        self.dir.path().join(&self.name)
    }
}

/// `flashinfer` as it was, where files of it are ours now.
pub fn flashinfer(environment: &Environment, flashinfer: &FlashInfer) -> Result<Option<View>> {
    let view = package(environment, &flashinfer.package)?;
    if let (Some(view), Some(record)) = (&view, &flashinfer.dist_info) {
        // What states its version.
        link(record, &view.root().join(record.file_name().unwrap_or_default()))?;
    }
    Ok(view)
}

/// The package in the folder `package` as it was, where files of it are ours now.
pub fn package(environment: &Environment, package: &Path) -> Result<Option<View>> {
    let Some((site, in_place)) = in_place(environment)? else { return Ok(None) };
    let mut were = BTreeMap::new();
    for file in &in_place.files {
        let path = site.join(&file.path);
        // A file that was reinstalled or edited since is what it is.
        if path.starts_with(package) && journal::digest(&path) == Some(file.post) {
            were.insert(path, file.backup.as_ref().map(|backup| site.join(FOLDER).join(backup)));
        }
    }
    let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if were.is_empty() {
        return Ok(None);
    }
    let dir = tempfile::tempdir().map_err(|e| Error::io("create a folder in", &std::env::temp_dir(), e))?;
    mirror(package, &dir.path().join(&name), &were)?;
    Ok(Some(View { dir, name }))
}

/// What lies in place in an environment, and the site-packages folder that knows of it.
pub fn in_place(environment: &Environment) -> Result<Option<(PathBuf, InPlace)>> {
    for site in &environment.site_packages {
        if let (Some(in_place), _) = journal::peek(site)? {
            return Ok(Some((site.clone(), in_place)));
        }
    }
    Ok(None)
}

fn mirror(from: &Path, to: &Path, were: &BTreeMap<PathBuf, Option<PathBuf>>) -> Result<()> {
    fs::create_dir(to).map_err(|e| Error::io("create", to, e))?;
    for item in fs::read_dir(from).map_err(|e| Error::io("read", from, e))? {
        let item = item.map_err(|e| Error::io("read", from, e))?;
        let (path, target) = (item.path(), to.join(item.file_name()));
        match were.get(&path) {
            Some(Some(backup)) => link(backup, &target)?,
            Some(None) => {}
            None if were.keys().any(|known| known.starts_with(&path)) => {
                // A folder that we made holds nothing but what we added.
                let ours = were.iter().filter(|(known, _)| known.starts_with(&path)).all(|(_, backup)| backup.is_none());
                let added = ours
                    && fs::read_dir(&path)
                        .is_ok_and(|mut items| items.all(|item| item.is_ok_and(|item| were.contains_key(&item.path()))));
                if !added {
                    mirror(&path, &target, were)?;
                }
            }
            None => link(&path, &target)?,
        }
    }
    Ok(())
}

fn link(from: &Path, to: &Path) -> Result<()> {
    symlink(from, to).map_err(|e| Error::io("create the link", to, e))
}
