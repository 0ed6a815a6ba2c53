//! Why the store's answer came out as it did: what is the same as for the nearest artifact in it, and what is not.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::{Prepared, content};
use crate::build::closure;
use crate::build::units::is_made;
use crate::build::view::HOST;
use crate::digest::Digest;
use crate::memo::Memo;
use crate::store::{Entry, Fields, Inputs, Key, Store, Value};

/// How many entries of the module are compared file by file: those whose commands and tools are most alike.
const COMPARED: usize = 8;

/// What is to be said of a hit or a miss.
#[derive(Debug)]
pub struct Explanation {
    pub hit: bool,
    /// The artifact that the present inputs were compared with: on a hit the one handed out.
    pub nearest: Option<Nearest>,
    /// On a miss: an artifact of exactly these inputs was here and is gone, or was broken and moved aside.
    pub gone: Option<Key>,
    /// In order of weight: what was asked for, tools, flags, sources, files.
    pub changes: Vec<Change>,
    /// How many inputs are the same, by kind.
    pub same: BTreeMap<&'static str, usize>,
}

#[derive(Debug)]
pub struct Nearest {
    pub key: Key,
    pub created: String,
    pub flashinfer: String,
}

/// One input that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Stable, for scripts: `plan`, `judge`, `module`, `target`, `nvcc`, `host-compiler`, `tvm-ffi`, `abi`, `tool`, `flag`, `source`,
    /// `overlay`, `header`, `shadow`, `input`.
    pub kind: &'static str,
    pub name: String,
    /// What it was; none where it is new.
    pub from: Option<String>,
    /// What it is; none where it is gone.
    pub to: Option<String>,
}

/// Explains the answer `hit` to what is prepared. Reads inputs and entries, and changes nothing.
pub(super) fn explain(prepared: &Prepared, store: &Store, hit: Option<&Entry>, memo: &Memo) -> Explanation {
    if let Some(entry) = hit {
        let inputs = entry.inputs();
        let same = inputs.map(|inputs| compare(prepared, &inputs, memo).same).unwrap_or_default();
        return Explanation { hit: true, nearest: Some(nearest(entry)), gone: None, changes: Vec::new(), same };
    }
    let of_module = |entry: &Entry| entry.manifest.module == prepared.basis.module.name;
    let entries = store.entries().unwrap_or_default().into_iter().filter_map(|summary| summary.entry.ok()).filter(of_module);
    let mut known: Vec<(usize, Entry, Inputs)> = entries
        .filter_map(|entry| {
            let inputs = entry.inputs()?;
            Some((differing_fields(&inputs.request, &prepared.fields), entry, inputs))
        })
        .collect();
    // Stable: among equals the newest stays first.
    known.sort_by_key(|(differing, ..)| *differing);
    let compared = known.into_iter().take(COMPARED).map(|(_, entry, inputs)| (compare(prepared, &inputs, memo), entry));
    let best = compared.min_by_key(|(comparison, _)| comparison.changes.len());
    let gone = store.closures(&prepared.request).iter().find_map(|remembered| {
        let shadow =
            closure::shadow(&remembered.files, &prepared.plan.include_dirs, &prepared.plan.view, &prepared.basis.overlay);
        let inputs = super::inputs(prepared, &remembered.files, memo).ok().filter(|_| shadow.is_none())?;
        Some(inputs.key())
    });
    match best {
        None => Explanation { hit: false, nearest: None, gone, changes: Vec::new(), same: BTreeMap::new() },
        Some((Comparison { changes, same }, entry)) => {
            Explanation { hit: false, nearest: Some(nearest(&entry)), gone, changes, same }
        }
    }
}

fn nearest(entry: &Entry) -> Nearest {
    let manifest = &entry.manifest;
    Nearest { key: entry.key, created: manifest.created.clone(), flashinfer: manifest.flashinfer.clone() }
}

#[derive(Default)]
struct Comparison {
    changes: Vec<Change>,
    same: BTreeMap<&'static str, usize>,
}

/// What has become of the inputs `then`.
fn compare(prepared: &Prepared, then: &Inputs, memo: &Memo) -> Comparison {
    let mut comparison = Comparison::default();
    compare_fields(&then.request, &prepared.fields, &mut comparison);

    // Sources and the overlay's files are fields already.
    let plan = &prepared.plan;
    let sources: Vec<_> = plan.sources.iter().map(|source| plan.view.locate(&source.path)).collect();
    let files: Vec<_> = then.files.iter().filter(|input| !is_made(&input.file.root) && !sources.contains(&input.file)).collect();
    let present: Vec<Option<Digest>> = files.par_iter().map(|input| content(prepared, &input.file, memo).ok()).collect();
    for (input, now) in files.iter().zip(present) {
        let file = &input.file;
        // The host's files are named by where they lie; everything else by its root.
        let name = if file.root == HOST { file.path.clone() } else { format!("{}/{}", file.root, file.path) };
        comparison.note("header", &name, Some(input.sha256.short()), now.map(|now| now.short()), Some(input.sha256) == now);
    }
    let read = then.closure();
    if let Some(shadow) = closure::shadow(&read.files, &plan.include_dirs, &plan.view, &prepared.basis.overlay) {
        comparison.changes.push(Change { kind: "shadow", name: shadow, from: None, to: None });
    }
    comparison
}

impl Comparison {
    fn note(&mut self, kind: &'static str, name: &str, from: Option<String>, to: Option<String>, same: bool) {
        if same {
            *self.same.entry(kind).or_default() += 1;
        } else {
            self.changes.push(Change { kind, name: name.to_owned(), from, to });
        }
    }
}

/// The kind of a field for people and scripts, and what is left of its name.
fn kind_of(name: &str) -> (&'static str, &str) {
    match name.split_once(' ') {
        Some(("source", source)) => ("source", source),
        Some(("overlay" | "stand-in", file)) => ("overlay", file),
        Some(("tool", tool)) => ("tool", tool),
        _ => match name {
            "judge" => ("judge", ""),
            "module" => ("module", ""),
            "target" => ("target", ""),
            "nvcc" => ("nvcc", ""),
            "host compiler" => ("host-compiler", ""),
            "tvm_ffi" => ("tvm-ffi", ""),
            "cxx11_abi" => ("abi", ""),
            _ => ("input", name),
        },
    }
}

/// The fields' values by name, names in the order of their first field.
fn grouped(fields: &Fields) -> Vec<(&str, Vec<&Value>)> {
    let mut groups: Vec<(&str, Vec<&Value>)> = Vec::new();
    for field in fields.iter() {
        match groups.iter_mut().find(|(name, _)| *name == field.name) {
            Some((_, values)) => values.push(&field.value),
            None => groups.push((&field.name, vec![&field.value])),
        }
    }
    groups
}

fn compare_fields(then: &Fields, now: &Fields, to: &mut Comparison) {
    if then.format() != now.format() {
        to.note("plan", "", Some(then.format().to_owned()), Some(now.format().to_owned()), false);
    }
    let (before, after) = (grouped(then), grouped(now));
    let none = Vec::new();
    let added = after.iter().filter(|(name, _)| !before.iter().any(|(known, _)| known == name));
    for (name, _) in before.iter().chain(added) {
        let of = |groups: &[(&str, Vec<&'_ Value>)]| groups.iter().position(|(known, _)| known == name);
        let from = of(&before).map_or(&none, |at| &before[at].1);
        let to_values = of(&after).map_or(&none, |at| &after[at].1);
        if *name == "word" {
            compare_words(from, to_values, to);
            continue;
        }
        let (kind, rest) = kind_of(name);
        for at in 0..from.len().max(to_values.len()) {
            let (from, now) = (from.get(at), to_values.get(at));
            if *name == "command" && from == now {
                continue;
            }
            to.note(kind, rest, from.map(|value| shown(value)), now.map(|value| shown(value)), from == now);
        }
    }
}

/// Words of commands have no names: what matters is which came and which went.
fn compare_words(from: &[&Value], now: &[&Value], to: &mut Comparison) {
    let mut gone: Vec<&Value> = Vec::new();
    let mut new: Vec<&Value> = now.to_vec();
    for word in from {
        match new.iter().position(|known| known == word) {
            Some(at) => drop(new.remove(at)),
            None => gone.push(word),
        }
    }
    *to.same.entry("flag").or_default() += now.len() - new.len();
    for word in gone.iter() {
        to.note("flag", &shown(word), Some(shown(word)), None, false);
    }
    for word in new.iter() {
        to.note("flag", &shown(word), None, Some(shown(word)), false);
    }
    if gone.is_empty() && new.is_empty() && from != now {
        let order = |words: &[&Value]| words.iter().map(|word| shown(word)).collect::<Vec<_>>().join(" ");
        to.note("flag", "their order", Some(order(from)), Some(order(now)), false);
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Digest(digest) => digest.short(),
    }
}

fn differing_fields(then: &Fields, now: &Fields) -> usize {
    let mut comparison = Comparison::default();
    compare_fields(then, now, &mut comparison);
    comparison.changes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(target: &str, words: &[&str], tool: &str) -> Fields {
        let mut fields = Fields::new("test 1");
        fields.text("target", target);
        for word in words {
            fields.text("word", word);
        }
        fields.digest("tool ptxas", Digest::of(tool.as_bytes()));
        fields
    }

    fn changes(then: &Fields, now: &Fields) -> Vec<(&'static str, String, bool, bool)> {
        let mut comparison = Comparison::default();
        compare_fields(then, now, &mut comparison);
        comparison.changes.into_iter().map(|c| (c.kind, c.name, c.from.is_some(), c.to.is_some())).collect()
    }

    #[test]
    fn each_input_that_came_went_or_changed_is_named_and_no_other() {
        let then = fields("sm_120f", &["-O3", "-g", "-O3"], "a");
        assert_eq!(changes(&then, &then), []);
        let now = fields("sm_90a", &["-O3", "--foo", "-O3"], "b");
        let expected = [
            ("target", String::new(), true, true),
            ("flag", "-g".into(), true, false),
            ("flag", "--foo".into(), false, true),
            ("tool", "ptxas".into(), true, true),
        ];
        assert_eq!(changes(&then, &now), expected);
        let other_order = fields("sm_120f", &["-g", "-O3", "-O3"], "a");
        assert_eq!(changes(&then, &other_order), [("flag", "their order".into(), true, true)]);
    }
}
