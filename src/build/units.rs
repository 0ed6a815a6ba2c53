//! The translation units of a build: a module's sources as they are, or each source split by the types for which it instantiates
//! its kernels, so that many cores have something to do.
//!
//! Both make the same kernels, instruction by instruction; the bytes of the file differ, so what a store holds is keyed by the units too,
//! while a request is the same for all and is answered by whichever is there. A source is split without a change of its text: a
//! header of ours that goes before the source's own declares instantiations `extern template`, and small units make them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use crate::overlay::Overlay;
use crate::overlay::headers;
use crate::tables::{Shard, Shards, StandIn, speed};

use super::closure::Located;
use super::view::{DATA, OURS, OVERLAY};

/// How sources become translation units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A unit for each source.
    Whole,
    /// Sources are split as far as pays with so many compile jobs at once: each unit has a front end of its own to pay for.
    ForJobs(usize),
}

/// One translation unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// A name for people and for file names, such as `trtllm_allreduce-half`.
    pub name: String,
    /// Its path in the build folder.
    pub path: String,
    /// The source that it is made of, as the tables name it.
    pub source: String,
    /// Flags that go before all others.
    pub flags: Vec<String>,
}

/// The folder of headers that go before those of split sources.
const BEFORE: &str = "before";

/// The folder of the units that sources are split into.
const SHARDS: &str = "shards";

/// The file of our own at `path` in the build folder's `ours`, for stand-ins and split sources; none where there is no such file.
pub fn file(path: &str) -> Option<&'static str> {
    // A store's answer asks for each file of a split build: all are made once.
    static SPLIT: OnceLock<BTreeMap<String, String>> = OnceLock::new();
    if let Some(header) = path.strip_prefix("include/") {
        return speed().stand_ins.iter().any(|one| one.header == header).then(|| headers::text(header));
    }
    SPLIT.get_or_init(|| speed().shards.iter().flat_map(files).collect()).get(path).map(String::as_str)
}

/// The files that splitting a source takes: the header that goes before its own, and each unit.
fn files(shards: &Shards) -> impl Iterator<Item = (String, String)> {
    let header = &shards.header;
    let lines = |start: &str, declarations: Vec<String>| -> String {
        declarations.into_iter().map(|one| format!("{start}{one};\n")).collect()
    };
    let extern_but = move |own: Option<&Shard>| -> String {
        let others = shards.units.iter().filter(|unit| own.is_none_or(|own| own.name != unit.name));
        others.map(|unit| lines("extern template ", shards.declarations(unit))).collect()
    };
    let before = (format!("{}/{header}", before(shards)), format!("#include_next <{header}>\n{}", extern_but(None)));
    let units = shards.units.iter().map(move |unit| {
        let own = lines("template ", shards.declarations(unit));
        (shard_path(shards, unit), format!("#include <{header}>\n{}{own}", extern_but(Some(unit))))
    });
    std::iter::once(before).chain(units)
}

/// The folder of the header that goes before a source's own, as an include path.
fn before(shards: &Shards) -> String {
    format!("{BEFORE}/{}", shards.from_jobs)
}

fn shard_path(shards: &Shards, unit: &Shard) -> String {
    format!("{SHARDS}/{}/{}.cu", shards.from_jobs, shard_name(shards, unit))
}

fn shard_name(shards: &Shards, unit: &Shard) -> String {
    format!("{}-{}", stem(&shards.source), unit.name)
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
        let mut flags = Vec::new();
        if let Some(shards) = split(layout, source, overlay, package) {
            small.extend(shards.units.iter().map(|unit| Unit {
                name: shard_name(shards, unit),
                path: format!("{OURS}/{}", shard_path(shards, unit)),
                source: shards.source.clone(),
                flags: speed().shard_flags.clone(),
            }));
            ours.extend(files(shards).map(|(path, _)| path));
            flags = vec!["-isystem".to_owned(), format!("{OURS}/{}", before(shards))];
        }
        rest.push(Unit { name: stem(source), path: path.clone(), source: (*source).to_owned(), flags });
    }
    small.extend(rest);
    (small, ours)
}

/// How `source` is split; none where it stays whole. Of a FlashInfer that no release lists, nobody has looked at what is instantiated.
fn split(layout: Layout, source: &str, overlay: &Overlay, package: &Path) -> Option<&'static Shards> {
    let Layout::ForJobs(jobs) = layout else { return None };
    let fitting = speed().shards.iter().filter(|shards| shards.source == source && shards.from_jobs <= jobs && overlay.listed);
    fitting.filter(|shards| is_as_known(shards, overlay, package)).max_by_key(|shards| shards.from_jobs)
}

/// Whether the header of a split source defines the functions as the tables say.
fn is_as_known(shards: &Shards, overlay: &Overlay, package: &Path) -> bool {
    let below = format!("include/{}", shards.header);
    let edited = super::closure::overlay_file(overlay, &below).map(|file| file.post.clone());
    let Some(text) = edited.or_else(|| std::fs::read(package.join(DATA).join(below)).ok()) else { return false };
    let text = plain(&String::from_utf8_lossy(&text));
    shards.templates.values().all(|template| text.contains(&plain(&template.definition)))
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
    fn each_instantiation_is_made_in_one_unit_and_declared_extern_in_every_other() {
        for shards in &speed().shards {
            let before = file(&format!("{}/{}", before(shards), shards.header)).unwrap();
            assert!(before.starts_with("#include_next <flashinfer/"));
            for unit in &shards.units {
                for declaration in shards.declarations(unit) {
                    let (made, extern_) = (format!("\ntemplate {declaration};\n"), format!("\nextern template {declaration};\n"));
                    assert!(before.contains(&extern_) && !before.contains(&made), "{before}");
                    for other in &shards.units {
                        let text = file(&shard_path(shards, other)).unwrap();
                        let own = other.name == unit.name;
                        assert_eq!((text.contains(&made), text.contains(&extern_)), (own, !own), "{declaration}");
                    }
                }
            }
        }
        assert_eq!(file("shards/5/none.cu"), None);
        assert_eq!(file("include/none.h"), None);
    }
}
