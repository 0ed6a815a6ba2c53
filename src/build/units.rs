//! The translation units of a build: a module's sources as they are, or each source split by the types for which it instantiates
//! its kernels, so that many cores have something to do.
//!
//! Both make the same kernels, instruction by instruction. A source is split without a change of its text: a header of ours that goes
//! before the source's own declares the instantiations `extern template`, and one small unit for each type makes them.

use std::path::Path;

use crate::overlay::Overlay;
use crate::overlay::headers;
use crate::tables::{Shards, StandIn, speed};

use super::closure::Located;
use super::view::{DATA, OURS, OVERLAY};

/// How sources become translation units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A unit for each source.
    Whole,
    /// Sources that can be split are.
    Split,
}

/// From so many jobs at once on, splitting pays: below, each unit's own front end costs more than the cores that it keeps busy.
const SPLIT_FROM: usize = 5;

impl Layout {
    /// The layout for `jobs` compile jobs at once.
    pub fn for_jobs(jobs: usize) -> Self {
        if jobs < SPLIT_FROM { Self::Whole } else { Self::Split }
    }
}

/// One translation unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// A name for people and for file names, such as `trtllm_allreduce-half`.
    pub name: String,
    /// Its path in the build folder.
    pub path: String,
    /// Flags that go before all others.
    pub flags: Vec<String>,
}

/// The folder of headers that go before those of a split source.
const BEFORE: &str = "before";

/// The folder of the units that split sources are split into.
const SHARDS: &str = "shards";

/// The file of our own at `path` in the build folder's `ours`, for stand-ins and split sources; none where there is no such file.
pub fn file(path: &str) -> Option<String> {
    if let Some(header) = path.strip_prefix("include/") {
        let known = speed().stand_ins.iter().any(|one| one.header == header);
        return known.then(|| headers::text(header).to_owned());
    }
    speed().shards.iter().find_map(|shards| files(shards).find(|(name, _)| name == path)).map(|(_, text)| text)
}

/// The files that splitting a source takes: the header that goes before its own, and a unit for each type.
fn files(shards: &Shards) -> impl Iterator<Item = (String, String)> {
    let declared = |start: &str, of: &str| -> String {
        shards.functions.iter().map(|one| format!("{start}{};\n", one.declaration.replace("{type}", of))).collect()
    };
    let header = &shards.header;
    let all: String = shards.types.iter().map(|of| declared("extern template ", of)).collect();
    let before = (format!("{BEFORE}/{header}"), format!("#include_next <{header}>\n{all}"));
    let units: Vec<_> = shards
        .types
        .iter()
        .map(|of| (shard_path(shards, of), format!("#include <{header}>\n{}", declared("template ", of))))
        .collect();
    std::iter::once(before).chain(units)
}

fn shard_path(shards: &Shards, of: &str) -> String {
    format!("{SHARDS}/{}.cu", shard_name(shards, of))
}

fn shard_name(shards: &Shards, of: &str) -> String {
    format!("{}-{}", stem(&shards.source), of.trim_matches('_'))
}

/// The name of a file without folder and ending.
pub fn stem(path: &str) -> String {
    Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The units of `sources` (name in the tables, path in the build folder), those with the most work first, and the files of our own
/// that they need.
pub fn units(layout: Layout, sources: &[(&str, String)], overlay: &Overlay, package: &Path) -> (Vec<Unit>, Vec<String>) {
    let (mut small, mut rest, mut ours) = (Vec::new(), Vec::new(), Vec::new());
    for (source, path) in sources {
        let split = speed().shards.iter().find(|shards| {
            layout == Layout::Split && shards.source == **source && overlay.listed && is_as_known(shards, overlay, package)
        });
        let mut flags = Vec::new();
        if let Some(shards) = split {
            let of_type = |of: &String| Unit {
                name: shard_name(shards, of),
                path: format!("{OURS}/{}", shard_path(shards, of)),
                flags: speed().shard_flags.clone(),
            };
            small.extend(shards.types.iter().map(of_type));
            ours.extend(files(shards).map(|(path, _)| path));
            flags = vec!["-isystem".to_owned(), format!("{OURS}/{BEFORE}")];
        }
        rest.push(Unit { name: stem(source), path: path.clone(), flags });
    }
    small.extend(rest);
    (small, ours)
}

/// Whether the header of a split source defines the functions as the tables say.
fn is_as_known(shards: &Shards, overlay: &Overlay, package: &Path) -> bool {
    let below = format!("include/{}", shards.header);
    let edited = super::closure::overlay_file(overlay, &below).map(|file| file.post.clone());
    let Some(text) = edited.or_else(|| std::fs::read(package.join(DATA).join(below)).ok()) else { return false };
    let text = plain(&String::from_utf8_lossy(&text));
    shards.functions.iter().all(|function| text.contains(&plain(&function.definition)))
}

fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How many units a compile of `sources` sources had that read `files`.
pub fn count<'a>(sources: usize, files: impl Iterator<Item = &'a Located>) -> usize {
    let shards = files.filter(|file| file.root == OURS && file.path.starts_with(SHARDS));
    sources + shards.count()
}

/// The path of a stand-in in the build folder.
pub fn stand_in_path(stand_in: &StandIn) -> String {
    format!("{OURS}/include/{}", stand_in.header)
}

/// Whether a root of the build folder holds files that are on no disk outside of it.
pub fn is_made(root: &str) -> bool {
    root == OVERLAY || root == OURS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_jobs_leave_sources_whole() {
        assert_eq!(
            [1, 2, 4, 5, 32].map(Layout::for_jobs),
            [Layout::Whole, Layout::Whole, Layout::Whole, Layout::Split, Layout::Split]
        );
    }

    #[test]
    fn each_type_is_instantiated_in_one_unit_and_declared_extern_before_the_source() {
        for shards in &speed().shards {
            let before = file(&format!("{BEFORE}/{}", shards.header)).unwrap();
            assert!(before.starts_with("#include_next <flashinfer/"));
            for of in &shards.types {
                let unit = file(&shard_path(shards, of)).unwrap();
                for function in &shards.functions {
                    let declaration = function.declaration.replace("{type}", of);
                    assert!(before.contains(&format!("\nextern template {declaration};\n")), "{before}");
                    assert!(unit.contains(&format!("\ntemplate {declaration};\n")), "{unit}");
                }
            }
        }
        assert_eq!(file("shards/none.cu"), None);
        assert_eq!(file("include/none.h"), None);
    }
}
