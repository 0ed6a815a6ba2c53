//! Closures: the files that a compile read, which are known only after it.
//!
//! A header that no list names can still decide the result. So a key has two levels: the *request* is the key of all
//! that is known before compiling (sources, overlay, flags, tools); for each request the store remembers which files
//! such compiles have read; and the artifact's key is the request plus the digest of each of those files.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::key::Key;
use super::{Store, manifest};
use crate::build::closure::Located;
use crate::error::{Error, Result};

/// One request rarely has more: another closure means that an edit of a header changed what it includes.
const REMEMBERED: usize = 8;

/// The files that one compile read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closure {
    pub files: Vec<Located>,
}

#[derive(Serialize, Deserialize)]
struct Remembered {
    format: u32,
    /// Newest first.
    closures: Vec<Closure>,
}

impl Store {
    /// What compiles of `request` have read, newest first. An unreadable memory is an empty one: it costs a compile.
    pub fn closures(&self, request: &Key) -> Vec<Closure> {
        let file = self.closure_file(request);
        let read = fs::read(&file).and_then(|bytes| Ok(serde_json::from_slice::<Remembered>(&bytes)?));
        match read {
            Ok(remembered) if remembered.format == manifest::FORMAT => remembered.closures,
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::debug!("nothing is remembered in {}: {error}", file.display());
                Vec::new()
            }
        }
    }

    pub fn remember_closure(&self, request: &Key, closure: &Closure) -> Result<()> {
        let staging = self.staging()?;
        let _alone = self.alone()?;
        let mut closures = self.closures(request);
        closures.retain(|old| old != closure);
        closures.insert(0, closure.clone());
        closures.truncate(REMEMBERED);
        let text = serde_json::to_string_pretty(&Remembered { format: manifest::FORMAT, closures })
            .expect("a list of texts is always JSON");
        let staged = staging.path().join("closures.json");
        let file = self.closure_file(request);
        fs::write(&staged, text).map_err(|e| Error::io("write", &staged, e))?;
        fs::rename(&staged, &file).map_err(|e| Error::io("replace", &file, e))
    }

    fn closure_file(&self, request: &Key) -> PathBuf {
        self.root.join("closures").join(format!("{request}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::KeyBuilder;
    use super::*;

    fn closure(path: &str) -> Closure {
        Closure { files: vec![Located { root: "data".into(), path: path.into() }] }
    }

    #[test]
    fn the_newest_closures_come_first_and_the_oldest_are_forgotten() {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        let request = KeyBuilder::new("test").finish();
        assert_eq!(store.closures(&request), []);
        for n in 0..10 {
            store.remember_closure(&request, &closure(&n.to_string())).unwrap();
        }
        store.remember_closure(&request, &closure("5")).unwrap();
        let paths: Vec<String> = store.closures(&request).into_iter().map(|c| c.files[0].path.clone()).collect();
        assert_eq!(paths, ["5", "9", "8", "7", "6", "4", "3", "2"]);
    }

    #[test]
    fn a_broken_memory_is_an_empty_one_and_is_written_anew() {
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        let request = KeyBuilder::new("test").finish();
        fs::write(store.closure_file(&request), "{\"format\":1,\"closures\":[").unwrap();
        assert_eq!(store.closures(&request), []);
        store.remember_closure(&request, &closure("a")).unwrap();
        assert_eq!(store.closures(&request), [closure("a")]);
    }
}
