//! The translation units of a build: a module's sources as they are, or each source split by the types for which it instantiates
//! its kernels, so that many cores have something to do.
//!
//! Both make the same kernels, instruction by instruction; how much shared memory ptxas reserves for one goes by what else is in a unit.
//! The bytes of the file differ, so what a store holds is keyed by the units too, while a request is the same for all and is answered by
//! whichever is there. A source is split without a change of its text: a header of ours that goes before the source's own declares
//! instantiations `extern template`, and small units make them.

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

/// A source that is split: those of a row's units that its header has the features for.
struct Split {
    shards: &'static Shards,
    units: Vec<&'static Shard>,
    /// The name of the folders for its files: the same files for the same name.
    name: String,
}

impl Split {
    fn new(shards: &'static Shards, has: impl Fn(&str) -> bool) -> Self {
        let features = shards.features.keys().filter(|feature| has(feature)).map(|feature| format!("-{feature}"));
        let name = format!("{}{}", shards.from_jobs, features.collect::<String>());
        let units = shards.units.iter().filter(|unit| unit.needs.as_deref().is_none_or(&has)).collect();
        Self { shards, units, name }
    }

    /// Every one that the tables can lead to.
    fn all() -> impl Iterator<Item = Self> {
        speed().shards.iter().flat_map(|shards| {
            (0..1usize << shards.features.len()).map(move |set| {
                let at = |feature: &str| shards.features.keys().position(|key| key == feature);
                Self::new(shards, |feature| at(feature).is_some_and(|at| set >> at & 1 == 1))
            })
        })
    }

    /// The folder of the header that goes before the source's own, as an include path.
    fn before(&self) -> String {
        format!("{BEFORE}/{}", self.name)
    }

    fn unit_name(&self, unit: &Shard) -> String {
        format!("{}-{}", stem(&self.shards.source), unit.name)
    }

    fn unit_path(&self, unit: &Shard) -> String {
        format!("{SHARDS}/{}/{}.cu", self.name, self.unit_name(unit))
    }

    /// The files that it takes: the header that goes before the source's own, and each unit, which reads it too: it may make what
    /// was declared to be made elsewhere.
    fn files(&self) -> Vec<(String, String)> {
        let header = &self.shards.header;
        let lines = |start: &str, unit: &Shard| -> String {
            self.shards.declarations(unit).into_iter().map(|one| format!("{start}{one};\n")).collect()
        };
        let declared: String = self.units.iter().map(|unit| lines("extern template ", unit)).collect();
        let mut files = vec![(format!("{}/{header}", self.before()), format!("#include_next <{header}>\n{declared}"))];
        files.extend(self.units.iter().map(|unit| {
            // Where a unit defines no function of its own, the front end names what is local to it after its process.
            let anchor = self.unit_name(unit).replace('-', "_");
            let anchor = format!("extern \"C\" __attribute__((visibility(\"hidden\"))) void fi_arch_unit_{anchor}() {{}}\n");
            (self.unit_path(unit), format!("#include <{header}>\n{}{anchor}", lines("template ", unit)))
        }));
        files
    }
}

/// The file of our own at `path` in the build folder's `ours`, for stand-ins and split sources; none where there is no such file.
pub fn file(path: &str) -> Option<&'static str> {
    // A store's answer asks for each file of a split build: those of a split are made once.
    type Files = OnceLock<BTreeMap<String, String>>;
    static SPLITS: OnceLock<Vec<(Split, Files)>> = OnceLock::new();
    let (kind, below) = path.split_once('/')?;
    if kind == "include" {
        return speed().stand_ins.iter().any(|one| one.header == below).then(|| headers::text(below));
    }
    let (name, _) = below.split_once('/')?;
    let splits = SPLITS.get_or_init(|| Split::all().map(|split| (split, Files::new())).collect());
    let mut named = splits.iter().filter(|(split, _)| split.name == name);
    named.find_map(|(split, files)| files.get_or_init(|| split.files().into_iter().collect()).get(path)).map(String::as_str)
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
        if let Some(split) = split(layout, source, overlay, package) {
            flags = vec!["-isystem".to_owned(), format!("{OURS}/{}", split.before())];
            small.extend(split.units.iter().map(|unit| Unit {
                name: split.unit_name(unit),
                path: format!("{OURS}/{}", split.unit_path(unit)),
                source: split.shards.source.clone(),
                flags: [&speed().shard_flags[..], &flags].concat(),
            }));
            ours.extend(split.files().into_iter().map(|(path, _)| path));
        }
        rest.push(Unit { name: stem(source), path: path.clone(), source: (*source).to_owned(), flags });
    }
    small.extend(rest);
    (small, ours)
}

/// How `source` is split; none where it stays whole. Of a FlashInfer that no release lists, nobody has looked at what is instantiated.
fn split(layout: Layout, source: &str, overlay: &Overlay, package: &Path) -> Option<Split> {
    let Layout::ForJobs(jobs) = layout else { return None };
    let fits = |shards: &&Shards| shards.source == source && shards.from_jobs <= jobs && overlay.listed;
    let mut fitting: Vec<&Shards> = speed().shards.iter().filter(fits).collect();
    fitting.sort_by_key(|shards| std::cmp::Reverse(shards.from_jobs));
    fitting.into_iter().find_map(|shards| {
        let header = header(shards, overlay, package)?;
        let defines = |text: &str| header.contains(&plain(text));
        let known = shards.templates.values().all(|template| defines(&template.definition));
        known.then(|| Split::new(shards, |feature| defines(&shards.features[feature])))
    })
}

/// The text of a split source's header, as the build reads it.
fn header(shards: &Shards, overlay: &Overlay, package: &Path) -> Option<String> {
    let below = format!("include/{}", shards.header);
    let edited = super::closure::overlay_file(overlay, &below).map(|file| file.post.clone());
    let text = edited.or_else(|| std::fs::read(package.join(DATA).join(below)).ok())?;
    Some(plain(&String::from_utf8_lossy(&text)))
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
    fn each_instantiation_is_declared_for_all_and_made_in_one_unit() {
        for split in Split::all() {
            let text = |path: &str| file(path).unwrap_or_else(|| panic!("{path}"));
            let before = text(&format!("{}/{}", split.before(), split.shards.header));
            assert!(before.starts_with("#include_next <flashinfer/"));
            for unit in &split.units {
                // Without a function of its own, a unit's bytes would depend on the folder and the process that compiled it.
                let anchor = format!("fi_arch_unit_{}()", split.unit_name(unit).replace('-', "_"));
                assert!(text(&split.unit_path(unit)).contains(&anchor), "{anchor}");
                for declaration in split.shards.declarations(unit) {
                    let (made, extern_) = (format!("\ntemplate {declaration};\n"), format!("\nextern template {declaration};\n"));
                    assert!(before.contains(&extern_) && !before.contains(&made), "{before}");
                    let makers = split.units.iter().filter(|unit| text(&split.unit_path(unit)).contains(&made));
                    assert_eq!(makers.map(|unit| &unit.name).collect::<Vec<_>>(), [&unit.name], "{declaration}");
                }
            }
        }
        assert_eq!(file("shards/5/none.cu"), None);
        assert_eq!(file("include/none.h"), None);
    }
}
