//! The overlay of an engine: its own gates, opened all together or not at all.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Edit, File, Installed, Overlay, Work, apply, changes, distance, installed, sites_of};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::sites::Mismatch;
use crate::tables::{Engine, EngineForm, EngineGate, EnginePlace, Tables};

/// How to compute an engine's overlay.
#[derive(Debug, Clone, Copy, Default)]
pub struct EngineOptions {
    /// The engine switches the fused path on by itself on SM 12.x too, for the models for which it does so elsewhere.
    pub auto_enable: bool,
}

/// What must differ from the engine whose package is the folder `root` (…/sglang), and which calls itself `version`.
pub fn engine(root: &Path, engine: &Engine, version: &str, options: &EngineOptions) -> Result<Overlay> {
    let gates: Vec<&EngineGate> = engine.gates.iter().filter(|gate| options.auto_enable || !gate.auto_enable).collect();
    let bytes = read(root, engine, &gates)?;
    let installed = installed(&bytes);
    // Every edit of ours in Python calls a name that starts so.
    let ours = bytes.iter().find(|(_, bytes)| bytes.windows(9).any(|window| window == b"_fi_arch_"));
    if let Some((path, _)) = ours {
        return Err(Error::unsupported(format!("{} {version} bears fi-arch's edits already", engine.title))
            .because(format!("{path} was edited in place, so the text that the edits look for is gone"))
            .hint(format!("take the edits back with fi-arch uninstall, or install that {} again", engine.title)));
    }

    let mut work: BTreeMap<&str, Work> = BTreeMap::new();
    let mut helpers: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut edits = Vec::new();
    for gate in gates {
        for place in &gate.places {
            let form = the_form(engine, gate, place, version, &installed)?;
            if form.form.edits.is_empty() {
                continue;
            }
            let file = &installed[form.file.as_str()];
            let work = work.entry(&form.file).or_default();
            let (mut sites, mut line) = (0, usize::MAX);
            for (anchor, site) in sites_of(&form.form, file) {
                line = line.min(site.line);
                sites += 1;
                work.changes.extend(changes(anchor, &site.bytes, file));
            }
            if !work.edits.contains(&gate.id) {
                work.edits.push(gate.id.clone());
            }
            let wanted = helpers.entry(&form.file).or_default();
            for id in &form.helpers {
                if !wanted.contains(&id.as_str()) {
                    wanted.push(id);
                }
            }
            let reason = format!("{}: {}", gate.cure, gate.causes);
            edits.push(Edit { id: gate.id.clone(), path: form.file.clone(), line, sites, reason });
        }
    }

    let mut files = Vec::new();
    for (path, mut work) in work {
        let original = &bytes[path];
        let mut post = apply(original, &mut work.changes);
        if !post.ends_with(b"\n") {
            post.push(b'\n');
        }
        for id in &helpers[path] {
            post.extend_from_slice(b"\n\n");
            post.extend_from_slice(engine.helper(id).as_bytes());
        }
        files.push(File {
            path: path.to_owned(),
            pre: Some(Digest::of(original)),
            original: original.clone(),
            post,
            edits: work.edits,
        });
    }
    let listed = engine.is_listed(version);
    let mut warnings = Vec::new();
    if !listed && !engine.gates.is_empty() {
        warnings.push(format!(
            "unlisted: {} {version} is not among the known releases ({}); every place was found exactly as in those",
            engine.title,
            known_releases(engine)
        ));
    }
    Ok(Overlay { name: engine.title.clone(), files, edits, warnings, release: version.to_owned(), listed })
}

/// The files of the gates that are there, by path.
fn read<'e>(root: &Path, engine: &Engine, gates: &[&'e EngineGate]) -> Result<BTreeMap<&'e str, Vec<u8>>> {
    let mut bytes = BTreeMap::new();
    for form in gates.iter().flat_map(|gate| &gate.places).flat_map(|place| &place.forms) {
        let inside = form.file.strip_prefix(&format!("{}/", engine.name)).expect("the tables' own test looks at it");
        let path = root.join(inside);
        match std::fs::read(&path) {
            Ok(text) => _ = bytes.insert(form.file.as_str(), text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("read", &path, error)),
        }
    }
    Ok(bytes)
}

/// The releases that were read, for people.
fn known_releases(engine: &Engine) -> String {
    // FlashInfer's own table lists them.
    if engine.releases.is_empty() { Tables::load().known_releases() } else { engine.known_releases() }
}

/// The one form that fits.
fn the_form<'e>(
    engine: &Engine,
    gate: &EngineGate,
    place: &'e EnginePlace,
    version: &str,
    installed: &BTreeMap<&str, Installed<'_>>,
) -> Result<&'e EngineForm> {
    let there: Vec<(&EngineForm, Vec<Mismatch>)> = place
        .forms
        .iter()
        .filter_map(|form| Some((form, installed.get(form.file.as_str())?.source.mismatches(&form.form))))
        .collect();
    let mut fitting = there.iter().filter(|(_, misfit)| misfit.is_empty()).map(|(form, _)| *form);
    if let (Some(form), None) = (fitting.next(), fitting.next()) {
        return Ok(form);
    }
    let mut error = Error::unsupported(format!("{} {version}: `{}` is nowhere as fi-arch knows it", engine.title, gate.id));
    match there.iter().min_by_key(|(_, misfit)| distance(misfit)) {
        None => {
            let mut files: Vec<&str> = place.forms.iter().map(|form| form.file.as_str()).collect();
            files.dedup();
            error = error.because(format!("it has no {}", files.join(" and no ")));
        }
        Some((_, misfit)) if misfit.is_empty() => error = error.because("several known forms fit at once"),
        Some((form, misfit)) => {
            for Mismatch { find, place, expected, found } in misfit {
                error = error.because(format!(
                    "{}: expected {expected} × `{find}`{place}, found {found} (as for: {})",
                    form.file, form.form.name
                ));
            }
        }
    }
    error = error.because("a part of the edits is worse than none, so nothing was changed");
    if gate.auto_enable {
        error = error.hint("leave --auto-enable out, and give the server the flag");
    }
    Err(error
        .hint(format!("if the file was edited by hand, install that {} again; else use a known release", engine.title))
        .hint(format!("known: {}", known_releases(engine))))
}

#[cfg(test)]
mod tests {
    use crate::sites::python;
    use crate::tables;

    #[test]
    fn what_is_found_in_any_order_is_one_chain() {
        let all = tables::engines().iter().chain([tables::policy_edits()]);
        for gate in all.flat_map(|engine| &engine.gates) {
            for form in gate.places.iter().flat_map(|place| &place.forms).map(|form| &form.form) {
                for anchor in form.expect.iter().chain(&form.edits).filter(|anchor| anchor.any_order) {
                    assert!(python::is_chain(&anchor.find), "{}: {}", gate.id, anchor.find);
                }
            }
        }
    }
}
