//! The overlay that is activated, as a diff against the originals.

use std::fs;
use std::path::Path;

use super::look::Found;
use super::state::{FileState, OVERLAY_DIR};
use super::{journal, originals};
use crate::error::{Error, Result};
use crate::overlay::{self, Edit, Overlay};
use crate::survey::Environment;

/// The unified diff of what is activated against the originals, each edit with its reason.
pub fn diff(found: &Found, environment: &Environment) -> Result<String> {
    let state = found.state.as_ref().map_err(|why| {
        Error::machine(format!("the state of {} cannot be read", found.package().display()))
            .because(why)
            .hint("`fi-arch install` writes it anew, `fi-arch uninstall` takes it back")
    })?;
    let mut text = String::new();
    for (package, now) in state.packages.iter().zip(&found.packages) {
        let mut files = Vec::new();
        for (file, now) in package.files.iter().zip(&now.files).filter(|(file, _)| file.pre != Some(file.post)) {
            let place = found.package().join(OVERLAY_DIR).join(&file.path);
            let post = fs::read(&place).map_err(|e| Error::io("read", &place, e))?;
            let original = original(file, &now.path, environment)?;
            files.push(overlay::File { path: file.path.clone(), pre: file.pre, original, post, edits: file.edits.clone() });
        }
        let edits = package.edits.iter().map(|edit| Edit {
            id: edit.id.clone(),
            path: edit.path.clone(),
            line: edit.line,
            sites: edit.sites,
            reason: edit.reason.clone(),
        });
        let release = package.version.clone();
        text +=
            &Overlay { name: package.name.clone(), files, edits: edits.collect(), warnings: Vec::new(), release, listed: true }
                .diff();
    }
    Ok(text)
}

/// What the file was before us: on disk, or kept beside the journal.
fn original(file: &FileState, path: &Path, environment: &Environment) -> Result<Vec<u8>> {
    let Some(pre) = file.pre else { return Ok(Vec::new()) };
    let mut places = vec![path.to_owned()];
    if let Some((site, in_place)) = originals::in_place(environment)? {
        let kept = in_place.files.iter().filter(|one| one.pre == Some(pre)).filter_map(|one| one.backup.as_ref());
        places.extend(kept.map(|backup| site.join(journal::FOLDER).join(backup)));
    }
    let whole = places.iter().find(|place| journal::digest(place) == Some(pre));
    let place = whole.ok_or_else(|| {
        Error::machine(format!("{} is not what it was when fi-arch was installed", path.display()))
            .because("so there is no original to compare with")
            .hint("`fi-arch status` says what lies there")
    })?;
    fs::read(place).map_err(|e| Error::io("read", place, e))
}
