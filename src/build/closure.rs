//! What the compilers read: every file named in their dependency files, and whether another would be read today.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::view::{HOST, OVERLAY, View};
use crate::error::{Error, Result};
use crate::overlay::Overlay;

/// A file that a compile read: the name of its root in the build folder, and its path below it (absolute for the host's).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Located {
    pub root: String,
    pub path: String,
}

/// The files named in the dependency files `depfiles`, each once, in order of root and path.
pub fn read(depfiles: &[PathBuf], view: &View) -> Result<Vec<Located>> {
    let mut files = BTreeSet::new();
    for depfile in depfiles {
        let text = fs::read_to_string(depfile).map_err(|e| Error::io("read", depfile, e))?;
        files.extend(prerequisites(&text).iter().map(|name| view.locate(name)));
    }
    if files.is_empty() {
        return Err(Error::refused("the compiler named no file that it read").because("its dependency files are empty"));
    }
    Ok(files.into_iter().collect())
}

/// The prerequisites in Make syntax: `target : a b \⏎ c`, where `\ ` is a space and `$$` a dollar.
fn prerequisites(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut name = String::new();
    let mut in_target = true;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.peek() {
                Some('\n') => {
                    chars.next();
                    if !name.is_empty() {
                        names.push(std::mem::take(&mut name));
                    }
                }
                Some(' ' | '#' | '\\') => name.extend(chars.next()),
                _ => name.push('\\'),
            },
            '$' if chars.peek() == Some(&'$') => name.extend(chars.next()),
            ':' if in_target && chars.peek().is_none_or(|next| next.is_whitespace()) => {
                // What stood before the colon was the target.
                (in_target, name) = (false, String::new());
                names.clear();
            }
            c if c.is_whitespace() => {
                if !name.is_empty() {
                    names.push(std::mem::take(&mut name));
                }
                // An unescaped end of line ends the rule.
                in_target |= c == '\n';
                if c == '\n' && !names.is_empty() {
                    break;
                }
            }
            c => name.push(c),
        }
    }
    if !name.is_empty() {
        names.push(name);
    }
    names
}

/// A file that now stands earlier on the include path under the name of one that was read: the next compile would read it
/// instead, so what was learnt from the last one no longer holds. None while nothing shadows anything.
///
/// `include_dirs` are the plan's include folders in search order, as names in the build folder.
pub fn shadow(files: &[Located], include_dirs: &[String], view: &View, overlay: &Overlay) -> Option<String> {
    let dirs: Vec<Located> = include_dirs.iter().map(|dir| view.locate(&format!("{dir}/"))).collect();
    let mut folders = Folders::default();
    for file in files {
        // How the file was asked for cannot be read from a dependency file; below the first include folder that holds it,
        // and for the host's below each of its `include` folders, is how headers are named.
        let home = dirs.iter().position(|dir| dir.root == file.root && file.path.starts_with(&dir.path));
        let (earlier, name) = match home {
            Some(index) => (&dirs[..index], &file.path[dirs[index].path.len()..]),
            None if file.root == HOST => match file.path.split_once("/include/") {
                Some((_, name)) => (&dirs[..], name),
                None => continue,
            },
            None => continue,
        };
        if name.contains("..") {
            continue;
        }
        for dir in earlier {
            let candidate = Located { root: dir.root.clone(), path: format!("{}{name}", dir.path) };
            let there = if dir.root == OVERLAY {
                overlay_file(overlay, &candidate.path).is_some()
            } else {
                view.path_of(&candidate).is_some_and(|path| folders.contains(&path))
            };
            if there && candidate != *file {
                return Some(format!("{}/{} now comes before {}/{}", candidate.root, candidate.path, file.root, file.path));
            }
        }
    }
    None
}

/// The overlay's file whose name below the overlay folder is `path`.
pub fn overlay_file<'a>(overlay: &'a Overlay, path: &str) -> Option<&'a crate::overlay::File> {
    overlay.files.iter().find(|file| file.path.strip_prefix("flashinfer/data/") == Some(path))
}

/// Folder listings, each read once: thousands of "is it there" become a few dozen reads.
#[derive(Default)]
struct Folders(HashMap<PathBuf, Option<HashSet<OsString>>>);

impl Folders {
    fn contains(&mut self, path: &Path) -> bool {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return false };
        if !self.0.contains_key(dir) {
            // A folder below one that is not there need not be asked for.
            let parent_has_it = dir.parent().is_none_or(|up| self.0.get(up).is_none_or(Option::is_some));
            let listing = parent_has_it
                .then(|| fs::read_dir(dir).ok().map(|entries| entries.flatten().map(|e| e.file_name()).collect()))
                .flatten();
            self.0.insert(dir.to_owned(), listing);
        }
        self.0[dir].as_ref().is_some_and(|names| names.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn make_syntax_is_read_as_make_reads_it() {
        let text = "obj/v.o : data/csrc/v.cu \\\n    /usr/include/stdc-predef.h \\\n    a\\ b/c$$d.h e#f\n";
        assert_eq!(prerequisites(text), ["data/csrc/v.cu", "/usr/include/stdc-predef.h", "a b/c$d.h", "e#f"]);
        assert_eq!(prerequisites("x.o: a.h b.h\nb.h:\n"), ["a.h", "b.h"]);
        assert!(prerequisites("").is_empty());
    }

    #[test]
    fn a_header_that_appears_earlier_on_the_path_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        fs::create_dir_all(first.join("sub")).unwrap();
        fs::create_dir_all(second.join("sub")).unwrap();
        fs::write(second.join("sub/x.h"), "").unwrap();
        let view = View::new(vec![("data", first.clone()), ("cuda", second)]);
        let files = [Located { root: "cuda".into(), path: "sub/x.h".into() }];
        let dirs = ["data".to_owned(), "cuda".to_owned()];
        let overlay = Overlay {
            name: String::new(),
            files: Vec::new(),
            edits: Vec::new(),
            warnings: Vec::new(),
            release: String::new(),
            listed: true,
        };
        assert_eq!(shadow(&files, &dirs, &view, &overlay), None);
        fs::write(first.join("sub/x.h"), "").unwrap();
        assert!(shadow(&files, &dirs, &view, &overlay).is_some());
    }
}
