//! Sites and edits → the files as they should be. One overlay serves nvcc, Python and `install --in-place` alike.
//!
//! All the defects of a FlashInfer are cured, or none: a file that is not exactly what the tables describe is refused.

mod diff;
mod engine;
pub mod headers;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use pep440_rs::Version;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::memo::{FileId, Memo};
use crate::sites::{self, Source, python};
use crate::tables::{Anchor, Defect, FilePlace, Form, Gate, Module, Place, RECIPE_FILES, Tables, policy_edits};

pub use engine::{EngineOptions, engine};

/// The first release with the layout that fi-arch knows.
const FIRST_VERSION: &str = "0.4.0";

/// What must differ from an installed FlashInfer for one module. Empty where that FlashInfer is right as it is.
#[derive(Debug, Clone)]
pub struct Overlay {
    /// Whose files these are, for people: `FlashInfer`, or an engine.
    pub name: String,
    /// Sorted by path.
    pub files: Vec<File>,
    pub edits: Vec<Edit>,
    pub warnings: Vec<String>,
    /// The version as installed.
    pub release: String,
    /// The module's files are those of a listed release, byte for byte.
    pub listed: bool,
}

/// A file of the overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Relative to the folder that holds `flashinfer/`.
    pub path: String,
    /// The digest of the installed file; `None` for a file that we add.
    pub pre: Option<Digest>,
    /// The installed file; empty for a file that we add.
    pub original: Vec<u8>,
    pub post: Vec<u8>,
    /// The ids of the defects that are cured here.
    pub edits: Vec<String>,
}

/// The cure of one defect in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    /// The id of the defect.
    pub id: String,
    pub path: String,
    /// The line of the first site in the installed file, from 1.
    pub line: usize,
    /// How many sites of the file are edited.
    pub sites: usize,
    pub reason: String,
}

/// How to compute an overlay.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// The cures of these defects alone, by id. For tests that show what the others are for.
    pub only: Option<&'a [String]>,
    /// For Python as well as for nvcc: an opened generator asks the package `fi_arch_shim` for the artifact, and the policy is asked
    /// between one-shot and two-shot.
    pub serve: bool,
    /// The policy is asked in a FlashInfer that needs nothing else too: an engine's gates are opened over it.
    pub policy: bool,
}

/// A change of some bytes of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Change {
    bytes: Range<usize>,
    text: String,
}

/// An installed file, read once.
struct Installed<'f> {
    bytes: &'f [u8],
    source: Source<'f>,
}

/// What is to be done to a file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Work {
    changes: Vec<Change>,
    edits: Vec<String>,
}

/// What is to be done to FlashInfer's files: all that the looking gives, so that it need not be looked for twice.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    /// By path.
    work: BTreeMap<String, Work>,
    edits: Vec<Edit>,
    /// Headers that are added, with the cures that want them.
    added: BTreeMap<String, Vec<String>>,
    warnings: Vec<String>,
    listed: bool,
}

/// The overlay for `module` of the FlashInfer in `package` (…/flashinfer), which calls itself `version`.
pub fn compute(package: &Path, module: &Module, version: &str, options: &Options) -> Result<Overlay> {
    check_layout(version)?;
    let bytes = read(package, module)?;
    let found = find(package, module, version, options, &bytes)?;
    assemble(package, module, version, options, found, &bytes)
}

/// The same with plain options, looked for once as long as FlashInfer's files, this program and its tables stay.
pub fn remembered(package: &Path, module: &Module, version: &str, memo: &Memo) -> Result<Overlay> {
    let options = Options::default();
    check_layout(version)?;
    let mut known = format!("{} {} {version}", this_program(), module.name);
    let mut digests = BTreeMap::new();
    for path in module.files.iter().map(String::as_str).chain(RECIPE_FILES) {
        let digest = memo.digest(&sites::file_in(package, path)).map_err(|_| ());
        let Ok(digest) = digest else { return compute(package, module, version, &options) };
        known.push_str(&format!("\n{digest} {path}"));
        digests.insert(path, digest);
    }
    let name = format!("overlay {}", Digest::of(known.as_bytes()));
    let bytes = read(package, module)?;
    if bytes.iter().any(|(path, bytes)| Digest::of(bytes) != digests[path]) {
        // Somebody writes into it just now.
        return compute(package, module, version, &options);
    }
    let learn = || {
        let found = find(package, module, version, &options, &bytes)?;
        Ok(serde_json::to_string(&found).expect("it is always JSON"))
    };
    let text = memo.fact(&sites::file_in(package, &module.generator.file), &name, learn)?;
    match serde_json::from_str(&text) {
        Ok(found) => assemble(package, module, version, &options, found, &bytes),
        Err(_) => compute(package, module, version, &options),
    }
}

/// What tells this program, with the tables in it, from every other: the identity of its file.
fn this_program() -> String {
    let meta = std::env::current_exe().and_then(fs::metadata);
    meta.map_or_else(|_| String::new(), |meta| format!("{:?}", FileId::of(&meta)))
}

/// The module's files, by path.
fn read<'m>(package: &Path, module: &'m Module) -> Result<BTreeMap<&'m str, Vec<u8>>> {
    let one = |path: &'m String| Ok((path.as_str(), sites::read(&sites::file_in(package, path))?));
    module.files.iter().map(one).collect()
}

/// Looks for every defect.
fn find(package: &Path, module: &Module, version: &str, options: &Options, bytes: &BTreeMap<&str, Vec<u8>>) -> Result<Found> {
    let tables = Tables::load();
    let installed = installed(bytes);
    check_not_ours(&installed, version)?;

    let digests = bytes.iter().map(|(path, bytes)| ((*path).to_owned(), Digest::of(bytes))).collect();
    let listed = tables.release_by_digests(&digests, version).is_some();
    let mut warnings = Vec::new();
    if !listed {
        warnings.push(unlisted(&digests, module, version));
    }
    if !tables.recipe_is_listed(package, version)? {
        let recipe = &tables.recipe_for(package, version)?.id;
        warnings.push(format!(
            "unlisted: the compiler flags of FlashInfer {version} are not known; those of the nearest one are used (recipe `{recipe}`)"
        ));
    }
    if let Some(only) = options.only {
        if let Some(unknown) = only.iter().find(|id| !module.defects.contains(id)) {
            return Err(Error::usage(format!("{} has no defect `{unknown}`", module.name))
                .hint(format!("its defects: {}", module.defects.join(", "))));
        }
        warnings.push(format!("partial: of all cures only {} is done; the rest stays as it is, wrong", only.join(", ")));
    }
    let is_wanted = |defect: &Defect| options.only.is_none_or(|only| only.contains(&defect.id));

    let mut work: BTreeMap<&str, Work> = BTreeMap::new();
    let mut edits = Vec::new();
    let mut added: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for id in &module.defects {
        let defect = tables.defect(id);
        for place in &defect.places {
            let edit = match place {
                _ if !is_wanted(defect) => None,
                Place::Gate(place) => open_gate(defect, &place.gate, package, module, &installed, &mut work)?,
                Place::File(place) => cure(defect, place, version, &installed, &mut work)?,
            };
            if let Some(edit) = edit {
                for header in &defect.adds {
                    let ids = added.entry(header.clone()).or_default();
                    if !ids.contains(id) {
                        ids.push(id.clone());
                    }
                }
                edits.push(edit);
            }
        }
    }

    let work = work.into_iter().map(|(path, work)| (path.to_owned(), work)).collect();
    Ok(Found { work, edits, added, warnings, listed })
}

/// Does what was found to be done.
fn assemble(
    package: &Path,
    module: &Module,
    version: &str,
    options: &Options,
    found: Found,
    bytes: &BTreeMap<&str, Vec<u8>>,
) -> Result<Overlay> {
    let Found { work, mut edits, added, warnings, listed } = found;
    let mut files = Vec::new();
    for (path, mut work) in work {
        let original = &bytes[path.as_str()];
        files.push(File {
            pre: Some(Digest::of(original)),
            original: original.clone(),
            post: apply(original, &mut work.changes),
            edits: work.edits,
            path,
        });
    }
    if options.serve {
        files.iter_mut().filter(|file| file.path == module.generator.file).for_each(|file| serve(file, module));
    }
    for (header, edits) in added {
        files.push(our_header(package, &header, edits)?);
    }
    let policy = policy_edits();
    if policy.module == module.name && (options.policy || options.serve && !files.is_empty()) {
        let asked = engine(package, policy, version, &EngineOptions::default())?;
        files.extend(asked.files);
        edits.extend(asked.edits);
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(Overlay { name: "FlashInfer".to_owned(), files, edits, warnings, release: version.to_owned(), listed })
}

impl Overlay {
    /// Nothing has to be changed: this FlashInfer is right as it is.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// What is to be said of an overlay in one line.
    pub fn summary(&self) -> String {
        if self.is_empty() {
            return format!("{} {}: nothing to patch", self.name, self.release);
        }
        let sites: usize = self.edits.iter().map(|edit| edit.sites).sum();
        let ids = each_once(self.edits.iter().map(|edit| edit.id.as_str()));
        format!("{} {}: {sites} sites in {} files ({})", self.name, self.release, self.files.len(), ids.join(", "))
    }

    /// Writes the CUDA files under `dir`, laid out as under `flashinfer/data`: `include/…`, `csrc/…`.
    pub fn write_to(&self, dir: &Path) -> Result<()> {
        for file in &self.files {
            let Some(inside) = file.data_path() else { continue };
            let path = dir.join(inside);
            let folder = path.parent().expect("a file lies in a folder");
            fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, error))?;
            fs::write(&path, &file.post).map_err(|error| Error::io("write", &path, error))?;
        }
        Ok(())
    }

    /// The whole overlay as a unified diff. Lines that start with `#` say why, before each file.
    pub fn diff(&self) -> String {
        diff::of(self)
    }

    /// What decides the overlay's effect, for a key: each file's path with the digest before and after. Sorted by path.
    pub fn digest_fields(&self) -> Vec<(&str, Option<Digest>, Digest)> {
        self.files.iter().map(|file| (file.path.as_str(), file.pre, Digest::of(&file.post))).collect()
    }
}

impl File {
    /// The path relative to `flashinfer/data`; `None` for a Python file.
    pub fn data_path(&self) -> Option<&str> {
        self.path.strip_prefix("flashinfer/data/")
    }
}

/// The ids of edits, each once, in the order in which they come first.
pub fn each_once<'e>(ids: impl IntoIterator<Item = &'e str>) -> Vec<&'e str> {
    let mut once: Vec<&str> = Vec::new();
    for id in ids {
        if !once.contains(&id) {
            once.push(id);
        }
    }
    once
}

fn check_layout(version: &str) -> Result<()> {
    let parse = |version| Version::from_str(version).ok();
    let Some(installed) = parse(version) else { return Ok(()) };
    let first = parse(FIRST_VERSION).expect("it is a version");
    // A release candidate of the first version has its layout; source trees without a number call themselves 0.0.0.
    if installed.release() < first.release() && installed.release().iter().any(|part| *part > 0) {
        return Err(Error::unsupported(format!("FlashInfer {version} has another layout (torch bindings)"))
            .because(format!("fi-arch knows FlashInfer from {FIRST_VERSION} on"))
            .hint("upgrade FlashInfer, or choose one with --flashinfer VERSION"));
    }
    Ok(())
}

fn installed<'f>(bytes: &'f BTreeMap<&str, Vec<u8>>) -> BTreeMap<&'f str, Installed<'f>> {
    let read = |(path, bytes): (&&'f str, &'f Vec<u8>)| (*path, Installed { bytes, source: Source::new(path, bytes) });
    // Side by side: the syntax tree of the one large Python file takes as long as all the headers.
    bytes.par_iter().map(read).collect()
}

/// Refuses files that bear our own edits: they would have no known form.
fn check_not_ours(installed: &BTreeMap<&str, Installed<'_>>, version: &str) -> Result<()> {
    // Every edited header of ours includes one of our own, by this folder.
    let is_ours = |file: &Installed<'_>| matches!(&file.source, Source::Cuda(source) if source.has_word("fi_arch"));
    let ours = installed.iter().find(|(_, file)| is_ours(file));
    match ours {
        Some((path, _)) => Err(Error::unsupported(format!("FlashInfer {version} bears fi-arch's edits already"))
            .because(format!("{path} was edited in place, so the text that the edits look for is gone"))
            .hint("`fi-arch uninstall` takes them back, if `fi-arch install --in-place` made them; else install that FlashInfer again")),
        None => Ok(()),
    }
}

/// What to say of files that are no listed release's.
fn unlisted(digests: &BTreeMap<String, Digest>, module: &Module, version: &str) -> String {
    let tables = Tables::load();
    match tables.release(version) {
        None => format!(
            "unlisted: FlashInfer {version} is not among the known releases ({}); every place was found exactly as in those",
            tables.known_releases()
        ),
        Some(release) => {
            let changed: Vec<&str> =
                module.files.iter().filter(|path| digests.get(*path) != release.files.get(*path)).map(String::as_str).collect();
            format!(
                "unlisted: this FlashInfer {version} is not as released: {} differ; every place was found exactly",
                changed.join(", ")
            )
        }
    }
}

fn open_gate<'m>(
    defect: &Defect,
    gate: &Gate,
    package: &Path,
    module: &'m Module,
    installed: &BTreeMap<&str, Installed<'_>>,
    work: &mut BTreeMap<&'m str, Work>,
) -> Result<Option<Edit>> {
    let path = module.generator.file.as_str();
    let found = python::gate(installed[path].bytes, &module.generator.function, gate)
        .map_err(|error| sites::at(&sites::file_in(package, path), error))?;
    // FlashInfer takes an empty list for "all".
    if found.majors.is_empty() || found.majors.contains(&gate.add) {
        return Ok(None);
    }
    let work = work.entry(path).or_default();
    work.changes.push(Change { bytes: found.end_of_last..found.end_of_last, text: format!(", {}", gate.add) });
    work.edits.push(defect.id.clone());
    Ok(Some(edit(defect, path, found.site.line, 1)))
}

/// Hands the generator to the package `fi_arch_shim`. Behind all else, so that no line of the file moves; and where the package is
/// gone, the generator is FlashInfer's own.
fn serve(file: &mut File, module: &Module) {
    let generator = &module.generator.function;
    let end = if file.post.ends_with(b"\n") { "" } else { "\n" };
    let text = format!(
        "{end}\n\n# fi-arch: the proven artifact of {name} is loaded from the package fi_arch_shim.\n\
         try:\n    from fi_arch_shim import serve as _fi_arch_serve\n\
         except ImportError:\n    pass\n\
         else:\n    {generator} = _fi_arch_serve(\"{name}\", {generator})\n",
        name = module.name
    );
    file.post.extend_from_slice(text.as_bytes());
}

fn cure<'p>(
    defect: &Defect,
    place: &'p FilePlace,
    version: &str,
    installed: &BTreeMap<&str, Installed<'_>>,
    work: &mut BTreeMap<&'p str, Work>,
) -> Result<Option<Edit>> {
    let file = &installed[place.file.as_str()];
    let misfits: Vec<_> = place.forms.iter().map(|form| file.source.mismatches(form)).collect();
    let mut fitting = place.forms.iter().zip(&misfits).filter(|(_, misfit)| misfit.is_empty()).map(|(form, _)| form);
    let (Some(form), None) = (fitting.next(), fitting.next()) else {
        return Err(no_form(defect, place, version, &misfits));
    };
    if form.edits.is_empty() {
        return Ok(None);
    }
    let work = work.entry(&place.file).or_default();
    let mut sites = 0;
    let mut line = usize::MAX;
    for (anchor, site) in sites_of(form, file) {
        line = line.min(site.line);
        sites += 1;
        work.changes.extend(changes(anchor, &site.bytes, file));
    }
    work.edits.push(defect.id.clone());
    Ok(Some(edit(defect, &place.file, line, sites)))
}

/// A header that the overlay adds to FlashInfer's own, for the cures `edits`.
fn our_header(package: &Path, header: &str, edits: Vec<String>) -> Result<File> {
    let path = format!("flashinfer/data/include/{header}");
    let installed = sites::file_in(package, &path);
    if installed.exists() {
        return Err(Error::unsupported(format!("{} is there already, and must not be", installed.display()))
            .because("the overlay adds this file; what lies there was left by an earlier edit in place")
            .hint("`fi-arch uninstall` takes it back, if `fi-arch install --in-place` put it there; else install that FlashInfer again"));
    }
    Ok(File { path, pre: None, original: Vec::new(), post: headers::text(header).as_bytes().to_vec(), edits })
}

fn edit(defect: &Defect, path: &str, line: usize, sites: usize) -> Edit {
    Edit {
        id: defect.id.clone(),
        path: path.to_owned(),
        line,
        sites,
        reason: format!("{} ({}): {}", defect.cure, defect.upstream, defect.causes),
    }
}

/// Every site that a form edits, with what is done there.
fn sites_of<'t>(form: &'t Form, file: &Installed<'_>) -> Vec<(&'t Anchor, sites::Site)> {
    form.edits.iter().flat_map(|anchor| file.source.find(anchor).into_iter().map(move |site| (anchor, site))).collect()
}

/// How far a file is from a form.
fn distance(misfit: &[sites::Mismatch]) -> usize {
    misfit.iter().map(|mismatch| mismatch.expected.abs_diff(mismatch.found)).sum()
}

/// What an edit does to one of its sites.
fn changes(anchor: &Anchor, site: &Range<usize>, file: &Installed<'_>) -> Vec<Change> {
    let found = String::from_utf8_lossy(&file.bytes[site.clone()]);
    let change = |text: &Option<String>, bytes: Range<usize>| {
        let text = text.as_ref()?.replace('$', &found);
        let text = match file.source {
            Source::Cuda(_) => text,
            // In Python the indentation is part of the meaning.
            Source::Python(_) => text.replace('\n', &format!("\n{}", indentation(file.bytes, site.start))),
        };
        Some(Change { bytes, text })
    };
    let all = [
        change(&anchor.before, site.start..site.start),
        change(&anchor.replace, site.clone()),
        change(&anchor.after, site.end..site.end),
    ];
    all.into_iter().flatten().collect()
}

/// The white space at the start of the line of a byte.
fn indentation(source: &[u8], byte: usize) -> String {
    let line = source[..byte].iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    let width = source[line..].iter().take_while(|b| matches!(b, b' ' | b'\t')).count();
    String::from_utf8_lossy(&source[line..line + width]).into_owned()
}

/// The error for a file of which no form is known: it names what was expected of the form that comes nearest.
fn no_form(defect: &Defect, place: &FilePlace, version: &str, misfits: &[Vec<sites::Mismatch>]) -> Error {
    let what = format!("FlashInfer {version}: {} is no file in which fi-arch can cure `{}`", place.file, defect.id);
    let mut error = Error::unsupported(what);
    let nearest = place.forms.iter().zip(misfits).min_by_key(|(_, misfit)| distance(misfit));
    match nearest {
        Some((form, misfit)) if !misfit.is_empty() => {
            for sites::Mismatch { find, place, expected, found } in misfit {
                error = error.because(format!("expected {expected} × `{find}`{place}, found {found} (as for: {})", form.name));
            }
        }
        _ => error = error.because("it fits several known forms at once"),
    }
    error
        .because("a half patch is worse than none, so nothing was changed")
        .hint("if the file was edited by hand, install that FlashInfer again; else use a listed release")
        .hint(format!("listed: {}", Tables::load().known_releases()))
}

/// Applies changes of which none overlaps another; several at one place keep their order.
fn apply(original: &[u8], changes: &mut [Change]) -> Vec<u8> {
    changes.sort_by_key(|change| (change.bytes.start, change.bytes.end));
    let mut post = Vec::with_capacity(original.len() + 1024);
    let mut done = 0;
    for change in changes {
        assert!(change.bytes.start >= done, "the tables describe two edits of the same text");
        post.extend_from_slice(&original[done..change.bytes.start]);
        post.extend_from_slice(change.text.as_bytes());
        done = change.bytes.end;
    }
    post.extend_from_slice(&original[done..]);
    post
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_at_one_place_keep_their_order() {
        let change = |bytes: Range<usize>, text: &str| Change { bytes, text: text.to_owned() };
        let mut changes = [change(3..4, "D"), change(1..1, "1"), change(1..1, "2"), change(0..1, "A")];
        assert_eq!(apply(b"abcd", &mut changes), b"A12bcD");
    }

    #[test]
    fn every_place_and_header_of_the_tables_is_known() {
        let tables = Tables::load();
        for module in &tables.modules {
            for defect in module.defects.iter().map(|id| tables.defect(id)) {
                for place in &defect.places {
                    if let Place::File(place) = place {
                        assert!(module.files.contains(&place.file), "{}: {}", defect.id, place.file);
                    }
                }
                defect.adds.iter().for_each(|header| assert!(!headers::text(header).is_empty()));
            }
        }
    }

    #[test]
    fn a_release_with_torch_bindings_is_refused() {
        for version in ["0.2.14", "0.3.1", "0.3.1.post1"] {
            let error = check_layout(version).unwrap_err();
            assert_eq!(error.exit() as u8, 4);
            assert!(error.what().contains("another layout (torch bindings)"), "{error}");
        }
        for version in ["0.4.0", "0.4.0rc1", "0.6.16.post4", "1.0", "0.6.4+cu130", "0.0.0+unknown", "nightly"] {
            assert!(check_layout(version).is_ok(), "{version}");
        }
    }
}
