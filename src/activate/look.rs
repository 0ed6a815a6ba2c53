//! What is activated in an environment, and how each of its files is now. Changes nothing.

use std::path::{Path, PathBuf};

use super::state::{self, FileState, Mode, PackageState, State};
use crate::digest::Digest;
use crate::error::Result;
use crate::memo::Memo;
use crate::store;
use crate::survey::{self, Environment};

/// An activation in a site-packages folder.
#[derive(Debug)]
pub struct Found {
    /// The folder that holds `fi_arch_shim`.
    pub site: PathBuf,
    /// What Python would import under that name instead: a folder or a file that it finds earlier.
    pub shadowed_by: Option<PathBuf>,
    /// Further folders with an activation, which Python does not come to.
    pub others: Vec<PathBuf>,
    /// What it says of itself, or why that cannot be read.
    pub state: std::result::Result<State, String>,
    /// In the order of the state.
    pub packages: Vec<PackageFound>,
}

/// A package of the state as it is now.
#[derive(Debug)]
pub struct PackageFound {
    pub name: String,
    /// The folder that holds the package's folder; none where the package is gone.
    pub root: Option<PathBuf>,
    /// The version that is installed now.
    pub version: Option<String>,
    pub files: Vec<FileFound>,
}

/// A file of the overlay as it is now.
#[derive(Debug)]
pub struct FileFound {
    pub path: PathBuf,
    pub is: FileIs,
    /// Of what lies there; none where nothing can be read.
    pub digest: Option<Digest>,
}

/// What lies at a file's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileIs {
    /// As it was before us. For a file that we add: nothing lies there.
    Original,
    /// Our post-image.
    Ours,
    /// Neither.
    Drifted,
    /// Nothing lies there, and something should.
    Missing,
}

impl Found {
    /// The package `fi_arch_shim`.
    pub fn package(&self) -> PathBuf {
        self.site.join(state::PACKAGE)
    }
}

impl FileIs {
    /// In one word, for people and for JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::Ours => "ours",
            Self::Drifted => "drifted",
            Self::Missing => "missing",
        }
    }

    /// Whether Python gets what the state says, from disk (`in-place`) or through the shim.
    pub fn is_right(self, file: &FileState, mode: Mode) -> bool {
        let watched = file.pre == Some(file.post);
        match (watched, mode) {
            (true, _) => self != Self::Drifted && self != Self::Missing,
            (false, Mode::InPlace) => self == Self::Ours,
            (false, Mode::Shim | Mode::Run) => self == Self::Original,
        }
    }
}

/// The activation in `environment`: the first on Python's search path. `PYTHONPATH` may hold one too, that of `run`.
pub fn look(environment: &Environment, _memo: &Memo) -> Result<Option<Found>> {
    let mut sites = environment.folders().filter(|site| site.join(state::PACKAGE).join(state::FILE).exists());
    let Some(site) = sites.next() else { return Ok(None) };
    let others = sites.cloned().collect();
    let is_imported = |path: &PathBuf| path.is_file() || path.join("__init__.py").is_file();
    let earlier = environment.folders().take_while(|folder| *folder != site);
    let shadowed_by =
        earlier.flat_map(|folder| [folder.join(state::PACKAGE), folder.join(format!("{}.py", state::PACKAGE))]).find(is_imported);
    let state = read(&site.join(state::PACKAGE));
    let packages = match &state {
        Ok(state) => state.packages.iter().map(|package| package_as_it_is(package, environment)).collect::<Result<_>>()?,
        Err(_) => Vec::new(),
    };
    Ok(Some(Found { site: site.clone(), shadowed_by, others, state, packages }))
}

/// The state in the folder `fi_arch_shim`, or why it cannot be read.
pub fn read(package: &Path) -> std::result::Result<State, String> {
    let text = std::fs::read(package.join(state::FILE)).map_err(|error| error.to_string())?;
    let value = store::unseal_value(&text)?;
    let format = value["format"].as_u64().unwrap_or(0);
    if format != u64::from(state::FORMAT) {
        return Err(format!("it has format {format}, and this fi-arch knows {}", state::FORMAT));
    }
    let state: State = serde_json::from_value(value).map_err(|error| error.to_string())?;
    state.policy.check().map_err(|error| error.what().to_owned())?;
    Ok(state)
}

fn package_as_it_is(package: &PackageState, environment: &Environment) -> Result<PackageFound> {
    let found = survey::package(environment, &package.name, &package.distribution)?;
    let root = found.as_ref().and_then(|found| found.package.parent()).map(Path::to_owned);
    let files = package.files.iter().map(|file| {
        let path = root.as_deref().unwrap_or(Path::new("")).join(&file.path);
        let (is, digest) = if root.is_none() { (FileIs::Missing, None) } else { file_as_it_is(&path, file) };
        FileFound { path, is, digest }
    });
    let files = files.collect();
    Ok(PackageFound { name: package.name.clone(), root, version: found.map(|found| found.version), files })
}

/// These files are small: they are read, and nothing is remembered of them.
fn file_as_it_is(path: &Path, file: &FileState) -> (FileIs, Option<Digest>) {
    match std::fs::read(path).map(|bytes| Digest::of(&bytes)) {
        Ok(digest) if Some(digest) == file.pre => (FileIs::Original, Some(digest)),
        Ok(digest) if digest == file.post => (FileIs::Ours, Some(digest)),
        Ok(digest) => (FileIs::Drifted, Some(digest)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && file.pre.is_none() => (FileIs::Original, None),
        Err(_) => (FileIs::Missing, None),
    }
}
