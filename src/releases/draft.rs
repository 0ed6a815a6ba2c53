//! Drafts the rows of a release that the tables do not list yet. Comments and layout of the tables stay as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pep440_rs::Version;
use toml_edit::{Array, DocumentMut, Item, Table, Value};

use super::{Files, ids, range_parts};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::survey::Archive;
use crate::tables::{RECIPE_FILES, Tables};

/// The tables with the rows of one more release.
#[derive(Debug)]
pub struct Draft {
    pub version: String,
    /// Each file that changes, with its old and its new text.
    pub changes: Vec<Change>,
    /// What a person must look at before the rows are true.
    pub remarks: Vec<String>,
}

#[derive(Debug)]
pub struct Change {
    pub path: PathBuf,
    pub before: String,
    pub after: String,
}

/// The widest line of the tables.
const WIDTH: usize = 124;

/// The folder `arch-tables` of the source checkout that `dir` lies in.
pub fn checkout_tables(dir: &Path) -> Result<PathBuf> {
    let tables = dir.ancestors().map(|dir| dir.join("arch-tables")).find(|dir| dir.join(RELEASES).is_file());
    tables.ok_or_else(|| {
        Error::usage("no tables to add to").because(format!("{} lies in no source checkout of fi-arch", dir.display())).hint(
            "the tables are built into the program, so a new row needs a source checkout: run this in one, or name its arch-tables with --tables",
        )
    })
}

const RELEASES: &str = "flashinfer/releases.toml";
const WHEELS: &str = "wheels.toml";

/// The rows of `archive` in the tables in `dir` (a checkout's `arch-tables`). Writes nothing.
pub fn draft(archive: &mut Archive, dir: &Path) -> Result<Draft> {
    let files = Files::of(archive)?;
    let version = version_of(&files.version)?;
    let mut remarks = Vec::new();

    let path = dir.join(RELEASES);
    let (before, mut releases) = document(&path)?;
    let listed = listed(&releases, &path)?;
    if listed.contains(&version) {
        return Err(Error::usage(format!("FlashInfer {version} is listed already")).because(format!("{} has it", path.display())));
    }
    let recipe = recipe(&files, &version, &mut remarks)?;
    let tvm_ffi = archive.tvm_ffi()?.unwrap_or_default();
    add_release(&mut releases, &version, &recipe, &tvm_ffi)?;
    add_contents(&mut releases, &files, &version, &listed, &mut remarks)?;
    let mut changes = vec![Change { path, before, after: releases.to_string() }];

    if let Some(sha256) = archive.sha256()? {
        let path = dir.join(WHEELS);
        let (before, mut wheels) = document(&path)?;
        let pins = wheels["flashinfer"].as_table_mut().ok_or_else(|| malformed(&path, "[flashinfer]"))?;
        insert(pins, &version, sha256);
        changes.push(Change { path, before, after: wheels.to_string() });
    }

    judge_anchors(&files, &mut remarks)?;
    let remain: Vec<&str> =
        Tables::load().faults.iter().filter(|fault| fault.releases.contains(&version)).map(|fault| fault.id.as_str()).collect();
    if !remain.is_empty() {
        remarks.push(format!("the tables say that these faults remain in it: {}; look whether they do", remain.join(", ")));
    }
    Ok(Draft { version: files.version, changes, remarks })
}

/// What the anchors say of the new release.
fn judge_anchors(files: &Files, remarks: &mut Vec<String>) -> Result<()> {
    let tables = Tables::load();
    let dir = files.lay_out()?;
    for module in &tables.modules {
        match files.overlay(dir.path(), module) {
            Ok(overlay) if overlay.is_empty() => remarks.push(format!("{}: nothing to patch", module.name)),
            Ok(overlay) => {
                let found = ids(&overlay).join(", ");
                remarks
                    .push(format!("{}: every anchor fits; it has {found}: `releases` in defects.toml must say so", module.name));
            }
            Err(error) => remarks.push(format!("{}: NO ROW YET: {}; {}", module.name, error.what(), error.why().join("; "))),
        }
    }
    Ok(())
}

/// The recipe of the release with the same files, or of the nearest older one.
fn recipe(files: &Files, version: &Version, remarks: &mut Vec<String>) -> Result<String> {
    let tables = Tables::load();
    let same = |release: &&crate::tables::Release| {
        RECIPE_FILES.iter().all(|path| files.digest(path).is_some() && files.digest(path).as_ref() == release.files.get(*path))
    };
    if let Some(release) = tables.releases.iter().rev().find(same) {
        return Ok(release.recipe.clone());
    }
    let older = tables.releases.iter().rev().find(|release| release.version < *version);
    let older = older.ok_or_else(|| Error::unsupported(format!("FlashInfer {version} is older than every listed release")))?;
    remarks.push(format!(
        "its compiler flags come from files that no listed release has; `{}` is that of {}: hold it against them with ci/check-recipes.sh",
        older.recipe, older.version
    ));
    Ok(older.recipe.clone())
}

/// Puts the version into the row of the release before it, or makes a row of its own where it is handled otherwise.
fn add_release(document: &mut DocumentMut, version: &Version, recipe: &str, tvm_ffi: &str) -> Result<()> {
    let rows = document["release"].as_array_of_tables_mut().ok_or_else(|| malformed(Path::new(RELEASES), "[[release]]"))?;
    let mut tables: Vec<Table> = rows.iter().cloned().collect();
    // The row, and the place in it, behind which the version belongs.
    let mut behind = None;
    for (row, table) in tables.iter().enumerate() {
        for (place, known) in versions(table)?.iter().enumerate() {
            if known < version {
                behind = Some((row, place));
            }
        }
    }
    let (row, place) =
        behind.ok_or_else(|| Error::unsupported(format!("FlashInfer {version} is older than every listed release")))?;
    let text = |table: &Table, key: &str| table.get(key).and_then(Item::as_str).unwrap_or_default().to_owned();
    let alike = |table: &Table| text(table, "recipe") == recipe && range_parts(&text(table, "tvm_ffi")) == range_parts(tvm_ffi);
    let last = place + 1 == versions(&tables[row])?.len();
    if alike(&tables[row]) {
        push(&mut tables[row], place + 1, version)?;
    } else if last && tables.get(row + 1).is_some_and(alike) {
        push(&mut tables[row + 1], 0, version)?;
    } else if last {
        let mut table = Table::new();
        table.decor_mut().set_prefix("\n");
        let mut list = Array::new();
        list.set_trailing("\n");
        table.insert("versions", Item::Value(Value::Array(list)));
        push(&mut table, 0, version)?;
        table.insert("recipe", toml_edit::value(recipe));
        table.insert("tvm_ffi", toml_edit::value(tvm_ffi));
        tables.insert(row + 1, table);
    } else {
        return Err(Error::unsupported(format!("the row of FlashInfer {version} cannot be drafted"))
            .because("it would cut a row of releases in two: its neighbours are handled alike, and it is not")
            .hint(format!("cut the row in {RELEASES} in two by hand, then run this again")));
    }
    rows.clear();
    tables.into_iter().for_each(|table| rows.push(table));
    Ok(())
}

/// Adds a version to a row, on its last line or on a new one.
fn push(table: &mut Table, place: usize, version: &Version) -> Result<()> {
    let list = table["versions"].as_array_mut().ok_or_else(|| malformed(Path::new(RELEASES), "versions"))?;
    let text = list.to_string();
    let line = text.trim_end_matches(['\n', ']']).lines().last().unwrap_or_default().chars().count();
    let mut value = Value::from(version.to_string());
    let wrapped = list.is_empty() || (place == list.len() && line + version.to_string().len() + 4 > WIDTH);
    value.decor_mut().set_prefix(if wrapped || place == 0 { "\n    " } else { " " });
    if place == 0
        && let Some(first) = list.get_mut(0)
    {
        first.decor_mut().set_prefix(" ");
    }
    list.insert_formatted(place, value);
    list.set_trailing_comma(true);
    Ok(())
}

/// Adds a digest where a file's content changes with this release, and where it changes back behind it.
fn add_contents(
    document: &mut DocumentMut,
    files: &Files,
    version: &Version,
    listed: &[Version],
    remarks: &mut Vec<String>,
) -> Result<()> {
    let tables = document["file"].as_table_mut().ok_or_else(|| malformed(Path::new(RELEASES), "[file]"))?;
    let next = listed.iter().find(|known| *known > version);
    let mut changed = Vec::new();
    for (path, item) in tables.iter_mut() {
        let contents = item.as_table_mut().ok_or_else(|| malformed(Path::new(RELEASES), path.get()))?;
        let Some(digest) = files.digest(path.get()) else {
            remarks.push(format!("it has no {}", path.get()));
            continue;
        };
        let mut rows = Vec::new();
        for (since, value) in contents.iter() {
            rows.push((version_of(since)?, value.as_str().unwrap_or_default().to_owned()));
        }
        rows.sort();
        let before = rows.iter().rev().find(|(since, _)| since < version).map(|(_, digest)| digest.clone());
        if before.as_deref() == Some(&digest.to_string()) {
            continue;
        }
        changed.push(path.get().rsplit('/').next().unwrap_or_default().to_owned());
        insert(contents, version, digest);
        // What the next release has it had from an older row; now this one stands between.
        if let (Some(next), Some(before)) = (next, before)
            && !rows.iter().any(|(since, _)| since > version && since <= next)
        {
            let before = Digest::from_str(&before).map_err(|_| malformed(Path::new(RELEASES), path.get()))?;
            insert(contents, next, before);
        }
    }
    let files = if changed.is_empty() { "none".to_owned() } else { changed.join(", ") };
    remarks.push(format!("files with a new content: {files}"));
    Ok(())
}

/// Adds `"VERSION" = "DIGEST"`, in the order of versions.
fn insert(table: &mut Table, version: &Version, digest: Digest) {
    table.insert(&version.to_string(), toml_edit::value(digest.to_string()));
    let order = |key: &str| Version::from_str(key).ok();
    table.sort_values_by(|a, _, b, _| order(a.get()).cmp(&order(b.get())));
}

fn listed(document: &DocumentMut, path: &Path) -> Result<Vec<Version>> {
    let rows = document["release"].as_array_of_tables().ok_or_else(|| malformed(path, "[[release]]"))?;
    let mut all = Vec::new();
    for row in rows {
        all.extend(versions(row)?);
    }
    all.sort();
    Ok(all)
}

fn versions(table: &Table) -> Result<Vec<Version>> {
    let list = table.get("versions").and_then(Item::as_array).ok_or_else(|| malformed(Path::new(RELEASES), "versions"))?;
    list.iter().map(|value| version_of(value.as_str().unwrap_or_default())).collect()
}

fn version_of(text: &str) -> Result<Version> {
    Version::from_str(text).map_err(|error| Error::unsupported(format!("`{text}` is no release number")).because(error))
}

fn document(path: &Path) -> Result<(String, DocumentMut)> {
    let text = fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let document = text.parse().map_err(|error| Error::usage(format!("{} is no TOML", path.display())).because(error))?;
    Ok((text, document))
}

fn malformed(path: &Path, what: &str) -> Error {
    Error::usage(format!("{} is no table of fi-arch", path.display()))
        .because(format!("it has no {what} as this fi-arch knows it"))
}
