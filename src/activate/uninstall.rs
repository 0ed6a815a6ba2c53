//! Takes back what `install` did, byte for byte; or leaves a file that somebody else changed since, and says so.

use std::path::{Path, PathBuf};

use super::journal::{Doing, FOLDER, InPlace, Op, Original, Recovered, Site, Transaction, digest};
use super::look::FileIs;
use super::{byte_code, record, shim, state, steps};
use crate::error::{Error, Result};
use crate::survey::{self, Environment};

/// What was found and done.
#[derive(Debug)]
pub struct TakenBack {
    pub site: PathBuf,
    /// Put right before anything else.
    pub recovered: Option<Recovered>,
    /// There was something to take back.
    pub found: bool,
    /// What had been written over or added, as it was found.
    pub files: Vec<FoundFile>,
}

/// A file that had been written over or added.
#[derive(Debug)]
pub struct FoundFile {
    pub path: PathBuf,
    pub distribution: String,
    pub is: FileIs,
    /// Why it was not restored.
    pub left: Option<String>,
}

impl TakenBack {
    /// The files that are not as they were before us.
    pub fn left(&self) -> impl Iterator<Item = &FoundFile> {
        self.files.iter().filter(|file| file.left.is_some())
    }
}

/// Takes back every installation in `environment`.
pub fn uninstall(environment: &Environment) -> Result<Vec<TakenBack>> {
    let sites = environment.site_packages.iter().filter(|site| bears_anything(site));
    sites.map(|site| uninstall_from(site, environment)).collect()
}

/// Whether anything of ours lies in a site-packages folder.
pub fn bears_anything(site: &Path) -> bool {
    [FOLDER, state::PACKAGE, shim::PTH_FILE, shim::START_FILE].iter().any(|name| site.join(name).exists())
        || !record::ours(site).is_empty()
}

fn uninstall_from(site: &Path, environment: &Environment) -> Result<TakenBack> {
    let site = Site::lock(site)?;
    steps::probe(site.dir()).map_err(|e| not_writable(site.dir(), e))?;
    let recovered = site.recover()?;
    let in_place = site.in_place()?;
    if !bears_anything(site.dir()) {
        return Ok(TakenBack {
            site: site.dir().to_owned(),
            recovered,
            found: recovered == Some(Recovered::UninstallFinished),
            files: Vec::new(),
        });
    }
    let transaction = site.begin()?;
    let planned = plan(&site, &transaction, in_place.as_ref(), environment);
    let (ops, after, files) = match planned {
        Ok(planned) => planned,
        Err(error) => {
            transaction.abandon();
            return Err(error);
        }
    };
    transaction.commit(Doing::Uninstall, ops, after)?;
    Ok(TakenBack { site: site.dir().to_owned(), recovered, found: true, files })
}

type Planned = (Vec<Op>, Option<InPlace>, Vec<FoundFile>);

fn plan(site: &Site, transaction: &Transaction<'_>, in_place: Option<&InPlace>, environment: &Environment) -> Result<Planned> {
    let mut ops = Vec::new();
    // First what starts the shim, so that no process starts on half of it.
    for name in [shim::PTH_FILE, shim::START_FILE] {
        ops.extend(removal(site, transaction, &site.dir().join(name)));
    }
    let (mut after, mut files) = (None, Vec::new());
    if let Some(in_place) = in_place {
        let (more, left, found) = restore(site, transaction, in_place, environment)?;
        ops.extend(more);
        (after, files) = (left, found);
    }
    ops.extend(removal(site, transaction, &site.dir().join(state::PACKAGE)));
    for folder in record::ours(site.dir()) {
        ops.extend(removal(site, transaction, &folder));
    }
    Ok((ops, after, files))
}

/// The removal of what lies at `path`, if anything does.
pub fn removal(site: &Site, transaction: &Transaction<'_>, path: &Path) -> Option<Op> {
    let name = path.file_name()?.to_string_lossy();
    path.symlink_metadata().ok()?;
    Some(Op::Remove { path: site.name_of(path), old: transaction.name(&format!("trash/{name}")) })
}

/// The restoring of everything that lies in place, last written first; what cannot be restored; and how each file was found.
pub fn restore(site: &Site, transaction: &Transaction<'_>, in_place: &InPlace, environment: &Environment) -> Result<Planned> {
    let (mut ops, mut files) = (Vec::new(), Vec::new());
    let mut after = InPlace { files: Vec::new(), ..in_place.clone() };
    for (number, file) in in_place.files.iter().enumerate().rev() {
        let path = site.at(&file.path);
        let now = digest(&path);
        let is = match now {
            Some(now) if now == file.post => FileIs::Ours,
            Some(now) if Some(now) == file.pre => FileIs::Original,
            Some(_) => FileIs::Drifted,
            None if file.pre.is_none() => FileIs::Original,
            None => FileIs::Missing,
        };
        let left = match is {
            FileIs::Original => None,
            FileIs::Ours | FileIs::Missing => match &file.backup {
                Some(backup) if digest(&site.folder().join(backup)) != file.pre => {
                    Some(format!("the original in {} is gone or damaged", site.folder().join(backup).display()))
                }
                _ if is == FileIs::Missing && is_uninstalled(file, &path, environment)? => None,
                _ => {
                    ops.extend(give_back(site, transaction, file, number, is));
                    None
                }
            },
            // What an installer put there is right, whatever it is.
            FileIs::Drifted if is_installers(file, &path, environment)? => None,
            FileIs::Drifted => Some(match &file.backup {
                Some(backup) => format!("somebody changed it since; the original is {}", site.folder().join(backup).display()),
                None => "somebody changed it since; it did not exist before".to_owned(),
            }),
        };
        if left.is_some() {
            after.files.insert(0, file.clone());
        }
        files.insert(0, FoundFile { path, distribution: file.distribution.clone(), is, left });
    }
    ops.extend(in_place.folders.iter().rev().map(|folder| Op::Rmdir { path: folder.clone() }));
    let after = (!after.files.is_empty()).then_some(after);
    Ok((ops, after, files))
}

fn give_back(site: &Site, transaction: &Transaction<'_>, file: &Original, number: usize, is: FileIs) -> Vec<Op> {
    let path = site.at(&file.path);
    let Some(backup) = &file.backup else {
        return vec![Op::Remove { path: file.path.clone(), old: transaction.name(&format!("trash/{number}")) }];
    };
    let mut ops = Vec::new();
    // Python takes byte code for right by the time or the content of its source: all of it goes with the source.
    for (index, code) in byte_code::of(&path).iter().enumerate() {
        let name = site.name_of(code);
        let old = transaction.name(&format!("trash/{number}-{index}.pyc"));
        match (file.byte_code.iter().find(|known| known.path == name), digest(code)) {
            (Some(known), Some(now)) if known.pre == now => {}
            (Some(known), Some(now)) if digest(&site.folder().join(&known.backup)) == Some(known.pre) => {
                ops.push(Op::Replace { path: name, from: now, to: known.pre, new: known.backup.clone(), old, distribution: None })
            }
            _ => ops.push(Op::Remove { path: name, old }),
        }
    }
    let gone = file.byte_code.iter().filter(|known| !site.at(&known.path).exists());
    let gone = gone.filter(|known| site.at(&known.path).parent().is_some_and(Path::is_dir));
    ops.extend(gone.map(|known| Op::Create { path: known.path.clone(), new: known.backup.clone() }));
    let pre = file.pre.expect("what has a backup has an original");
    ops.push(match is {
        FileIs::Missing => Op::Create { path: file.path.clone(), new: backup.clone() },
        _ => Op::Replace {
            path: file.path.clone(),
            from: file.post,
            to: pre,
            new: backup.clone(),
            old: transaction.name(&format!("trash/{number}")),
            distribution: Some(file.distribution.clone()),
        },
    });
    ops
}

/// Whether an installer says that `path` is to be what it is.
fn is_installers(file: &Original, path: &Path, environment: &Environment) -> Result<bool> {
    let (Some(record), Some(now)) = (survey::record(environment, &file.distribution)?, digest(path)) else { return Ok(false) };
    let site = record.parent().unwrap_or(Path::new(""));
    Ok(path.strip_prefix(site).is_ok_and(|inside| record::lists(&record, &inside.to_string_lossy(), &now)))
}

/// Whether a missing file is missing because its package is gone, or is another release without it.
fn is_uninstalled(file: &Original, path: &Path, environment: &Environment) -> Result<bool> {
    let Some(record) = survey::record(environment, &file.distribution)? else {
        // A source tree that nothing records: as long as its folder is there, the file belongs there.
        return Ok(!path.parent().is_some_and(Path::is_dir));
    };
    let site = record.parent().unwrap_or(Path::new(""));
    let Ok(inside) = path.strip_prefix(site) else { return Ok(!path.parent().is_some_and(Path::is_dir)) };
    Ok(!file.pre.is_some_and(|pre| record::lists(&record, &inside.to_string_lossy(), &pre)))
}

/// The error where a site-packages folder cannot be written.
pub fn not_writable(dir: &Path, error: std::io::Error) -> Error {
    Error::machine(format!("nothing can be written into {}", dir.display()))
        .because(error)
        .hint("`fi-arch run -- CMD…` serves one process tree and installs nothing")
        .hint("or do it as the user who owns that environment, or while its image is made")
}
