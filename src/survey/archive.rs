//! A release of FlashInfer as it is published: a wheel, or an unpacked source distribution. Single files are read out of it.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use zip::ZipArchive;
use zip::result::ZipError;

use crate::digest::Digest;
use crate::error::{Error, Result};

pub struct Archive {
    path: PathBuf,
    content: Content,
}

enum Content {
    Wheel(Box<ZipArchive<BufReader<File>>>),
    Tree,
}

impl Archive {
    /// Opens a wheel, or the folder of an unpacked source distribution.
    pub fn open(path: &Path) -> Result<Self> {
        let content = if path.is_dir() {
            Content::Tree
        } else {
            let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
            let zip = ZipArchive::new(BufReader::new(file)).map_err(|error| broken(path, error))?;
            Content::Wheel(Box::new(zip))
        };
        Ok(Self { path: path.to_owned(), content })
    }

    /// The release `version` in `dir`: its wheel, or its unpacked source distribution. `None` when neither is there.
    pub fn find(dir: &Path, version: &pep440_rs::Version) -> Result<Option<Self>> {
        let entries = fs::read_dir(dir).map_err(|e| Error::io("read", dir, e))?;
        let is_it = |name: &str| {
            let stem = name.strip_suffix(".whl").unwrap_or(name).strip_prefix("flashinfer_python-");
            stem.and_then(|stem| stem.split('-').next()).and_then(|text| text.parse().ok()).as_ref() == Some(version)
        };
        let wanted = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            is_it(name) && (name.ends_with(".whl") || path.is_dir())
        };
        // A wheel before a folder: only wheels have a pinned hash.
        let found = entries.flatten().map(|entry| entry.path()).filter(wanted).min_by_key(|path| path.is_dir());
        found.map(|path| Self::open(&path)).transpose()
    }

    /// The content of a file by its path in an installed FlashInfer (`flashinfer/…`); `None` when it is not there.
    pub fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>> {
        let archive = &self.path;
        match &mut self.content {
            Content::Wheel(zip) => match zip.by_name(path) {
                Ok(mut member) => {
                    let mut bytes = Vec::new();
                    member.read_to_end(&mut bytes).map_err(|e| Error::io("read", archive, e))?;
                    Ok(Some(bytes))
                }
                Err(ZipError::FileNotFound) => Ok(None),
                Err(error) => Err(broken(archive, error)),
            },
            Content::Tree => {
                // In a source tree what becomes flashinfer/data lies at the top.
                let inside = path.strip_prefix("flashinfer/data/").unwrap_or(path);
                let file = archive.join(inside);
                match fs::read(&file) {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(Error::io("read", &file, error)),
                }
            }
        }
    }

    /// The SHA-256 of a wheel; `None` for a folder.
    pub fn sha256(&self) -> Result<Option<Digest>> {
        match self.content {
            Content::Wheel(_) => Digest::of_file(&self.path).map(Some),
            Content::Tree => Ok(None),
        }
    }

    /// The release number that the metadata state.
    pub fn version(&mut self) -> Result<String> {
        let path = self.path.clone();
        let stated = self.metadata()?.lines().find_map(|line| line.strip_prefix("Version:")).map(|text| text.trim().to_owned());
        stated.ok_or_else(|| {
            Error::usage(format!("{} is no release of FlashInfer", path.display())).because("its metadata state no version")
        })
    }

    /// The range of apache-tvm-ffi that it asks for without extras; `None` when it asks for none.
    pub fn tvm_ffi(&mut self) -> Result<Option<String>> {
        let metadata = self.metadata()?;
        let mut asked =
            metadata.lines().filter_map(|line| line.strip_prefix("Requires-Dist:")).filter(|line| !line.contains(';'));
        Ok(asked.find_map(|line| line.trim().strip_prefix("apache-tvm-ffi")).map(|range| range.trim().to_owned()))
    }

    /// The head of the metadata, without the description.
    fn metadata(&mut self) -> Result<String> {
        let name = match &self.content {
            Content::Wheel(zip) => {
                let is_it = |name: &str| name.starts_with("flashinfer_python-") && name.ends_with(".dist-info/METADATA");
                zip.file_names().flatten().map(|name| name.into_owned()).find(|name| is_it(name))
            }
            Content::Tree => Some("PKG-INFO".to_owned()),
        };
        let bytes = match name {
            Some(name) => self.read(&name)?,
            None => None,
        };
        let bytes = bytes.ok_or_else(|| {
            Error::usage(format!("{} is no release of FlashInfer", self.path.display()))
                .because("it holds no metadata of flashinfer-python")
                .hint("name a wheel of flashinfer-python, or the folder of its unpacked source distribution")
        })?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.lines().take_while(|line| !line.trim().is_empty()).map(|line| format!("{line}\n")).collect())
    }
}

fn broken(path: &Path, error: ZipError) -> Error {
    Error::refused(format!("{} is no whole wheel", path.display())).because(error).hint("download it again")
}
