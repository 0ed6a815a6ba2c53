//! `fi-arch tables`: what is known of FlashInfer, held against the released wheels, and extended.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Subcommand;
use pep440_rs::Version;
use serde_json::{Value, json};
use similar::TextDiff;

use super::output::Output;
use super::progress::Progress;
use crate::build::provision;
use crate::cancel;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::pipeline::Event;
use crate::releases::check::{self, Report};
use crate::releases::draft::{self, Draft};
use crate::survey::Archive;
use crate::tables::{self, Release, Tables};

/// Look at what is known of FlashInfer's releases, check it, extend it
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List modules, releases, their defects and what remains
    Ls,
    /// Hold the tables against the released wheels: every digest, every anchor; exit 1 if they differ
    Check {
        /// Only this release (may be repeated) [default: all that have a wheel]
        #[arg(long, value_name = "VERSION")]
        release: Vec<String>,
        /// Take wheels (or unpacked source distributions) from this folder and fetch nothing
        #[arg(long, value_name = "DIR")]
        wheels: Option<PathBuf>,
    },
    /// Draft the rows of a new release in a source checkout of fi-arch; print them as a diff
    Add {
        /// A release to fetch, or a wheel
        #[arg(value_name = "VERSION|WHEEL")]
        what: String,
        /// The checkout's arch-tables [default: that of the checkout around the working folder]
        #[arg(long, value_name = "DIR")]
        tables: Option<PathBuf>,
        /// Write the rows into the tables
        #[arg(long)]
        write: bool,
    },
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    match args.verb {
        Verb::Ls => list(output),
        Verb::Check { release, wheels } => check_all(&release, wheels.as_deref(), output),
        Verb::Add { what, tables, write } => add(&what, tables, write, output),
    }
}

fn list(output: &Output) -> Result<Exit> {
    let tables = Tables::load();
    output.result(|| ls_json(tables), || ls_text(tables));
    Ok(Exit::Right)
}

fn ls_json(tables: &Tables) -> Value {
    let modules = tables.modules.iter().map(|module| {
        json!({ "module": module.name, "about": module.about, "gated": module.gated, "sources": module.sources, "defects": module.defects })
    });
    let releases = tables.releases.iter().map(|release| {
        let defects = tables.modules.iter().map(|module| {
            let ids: Vec<&str> = tables.defects_in(release, module).collect();
            (module.name.clone(), json!(ids))
        });
        json!({
            "release": release.version.to_string(),
            "recipe": release.recipe,
            "tvm_ffi": release.tvm_ffi,
            "defects": defects.collect::<serde_json::Map<_, _>>(),
            "remains": release.remains,
            "fetchable": provision::pinned_flashinfer(&release.version.to_string()).is_some(),
            "notes": release.notes,
            "files": release.files,
        })
    });
    let named = |id: &str, releases: String, text: &str| json!({ "id": id, "releases": releases, "text": text });
    let engines = tables::engines().iter().map(|engine| {
        let releases: Vec<_> = engine.releases.iter().map(ToString::to_string).collect();
        let gates =
            engine.gates.iter().map(|gate| json!({ "id": gate.id, "auto_enable": gate.auto_enable, "text": gate.causes }));
        json!({ "engine": engine.name, "releases": releases, "gates": gates.collect::<Vec<_>>() })
    });
    json!({
        "modules": modules.collect::<Vec<_>>(),
        "engines": engines.collect::<Vec<_>>(),
        "releases": releases.collect::<Vec<_>>(),
        "defects": tables.defects.iter().map(|d| named(&d.id, d.releases.to_string(), &d.causes)).collect::<Vec<_>>(),
        "faults": tables.faults.iter().map(|f| named(&f.id, f.releases.to_string(), &f.text)).collect::<Vec<_>>(),
    })
}

fn ls_text(tables: &Tables) -> String {
    let mut text = String::new();
    for module in &tables.modules {
        text.push_str(&format!("{}: {}\n", module.name, module.about));
    }
    for module in tables.modules.iter().filter(|module| !module.defects.is_empty()) {
        let head = ["RELEASES".to_owned(), "RECIPE".to_owned(), format!("DEFECTS OF {}", module.name), "REMAINS".to_owned()];
        let mut rows: Vec<(Version, [String; 4])> = Vec::new();
        for release in &tables.releases {
            let list = |ids: Vec<&str>| if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
            let version = release.version.to_string();
            let defects = list(tables.defects_in(release, module).collect());
            let remains = list(release.remains.iter().map(String::as_str).collect());
            match rows.last_mut() {
                Some((first, row)) if row[1..] == [release.recipe.clone(), defects.clone(), remains.clone()] => {
                    row[0] = format!("{first} … {version}");
                }
                _ => rows.push((release.version.clone(), [version, release.recipe.clone(), defects, remains])),
            }
        }
        let mut width = [0; 4];
        for row in std::iter::once(&head).chain(rows.iter().map(|(_, row)| row)) {
            width.iter_mut().zip(row).for_each(|(width, cell)| *width = cell.chars().count().max(*width));
        }
        text.push('\n');
        for row in std::iter::once(&head).chain(rows.iter().map(|(_, row)| row)) {
            let line: Vec<String> = row.iter().zip(width).map(|(cell, width)| format!("{cell:width$}")).collect();
            text.push_str(line.join("  ").trim_end());
            text.push('\n');
        }
    }
    text.push_str("\nDefects are repaired by the overlay; what remains is not.\n");
    let known = tables.defects.iter().map(|defect| (&defect.id, &defect.causes));
    for (id, what) in known.chain(tables.faults.iter().map(|fault| (&fault.id, &fault.text))) {
        text.push_str(&format!("  {id}: {what}\n"));
    }
    for engine in tables::engines() {
        let gates = if engine.gates.is_empty() { "needs no edit" } else { "gates of its own" };
        text.push_str(&format!("\n{} ({} read): {gates}\n", engine.title, engine.known_releases()));
        engine.gates.iter().for_each(|gate| text.push_str(&format!("  {}: {}\n", gate.id, gate.causes)));
    }
    text
}

fn check_all(wanted: &[String], wheels: Option<&Path>, output: &Output) -> Result<Exit> {
    cancel::on_signals();
    let tables = Tables::load();
    let releases: Vec<&Release> = match wanted {
        [] => tables.releases.iter().collect(),
        _ => wanted.iter().map(|version| named(tables, version)).collect::<Result<_>>()?,
    };
    let mut progress = Progress::new(output);
    let mut reports = Vec::new();
    let mut skipped: Vec<(String, String)> = Vec::new();
    for release in releases {
        cancel::check()?;
        let version = release.version.to_string();
        // Of one release at a time: together they are some gigabytes.
        let dir = folder()?;
        let archive = match wheels {
            Some(dir) => Archive::find(dir, &release.version)?,
            None if provision::pinned_flashinfer(&version).is_none() && wanted.is_empty() => None,
            None => Some(Archive::open(&fetch(&version, dir.path(), &mut progress)?)?),
        };
        match archive {
            Some(mut archive) => reports.push(check::check(release, &mut archive)?),
            None if wanted.is_empty() => {
                skipped.push((version, if wheels.is_some() { "not in the folder" } else { "has no wheel" }.to_owned()))
            }
            None => {
                progress.finish();
                return Err(Error::machine(format!("no wheel of FlashInfer {version}")).because("the folder does not hold one"));
            }
        }
    }
    progress.finish();
    let faults: usize = reports.iter().map(|report| report.faults.len()).sum();
    output.result(|| check_json(&reports, &skipped), || check_text(&reports, &skipped, faults));
    Ok(if faults == 0 { Exit::Right } else { Exit::Fault })
}

fn named<'t>(tables: &'t Tables, version: &str) -> Result<&'t Release> {
    tables.release(version).ok_or_else(|| {
        Error::unsupported(format!("FlashInfer {version} is not listed"))
            .hint("`fi-arch tables ls` lists the known releases; `fi-arch tables add` drafts the rows of a new one")
    })
}

fn folder() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|e| Error::io("make a folder in", &std::env::temp_dir(), e))
}

fn fetch(version: &str, dir: &Path, progress: &mut Progress) -> Result<PathBuf> {
    provision::flashinfer_wheel(version, dir, &mut |step| progress.event(Event::Step(step.to_owned())))
}

fn check_json(reports: &[Report], skipped: &[(String, String)]) -> Value {
    let right = |report: &Report| if report.faults.is_empty() { "right" } else { "fault" };
    let all = reports.iter().map(|report| {
        let defects: serde_json::Map<_, _> = report.cures.iter().map(|(module, ids)| (module.clone(), json!(ids))).collect();
        json!({ "release": report.version, "verdict": right(report), "defects": defects, "faults": report.faults })
    });
    json!({
        "verdict": if reports.iter().all(|report| report.faults.is_empty()) { "right" } else { "fault" },
        "releases": all.collect::<Vec<_>>(),
        "skipped": skipped.iter().map(|(version, why)| json!({ "release": version, "why": why })).collect::<Vec<_>>(),
    })
}

fn check_text(reports: &[Report], skipped: &[(String, String)], faults: usize) -> String {
    let mut text = String::new();
    for report in reports {
        let found: Vec<String> = report.cures.iter().map(|(module, ids)| format!("{module} has {}", ids.join(", "))).collect();
        let found = if found.is_empty() { "nothing to patch".to_owned() } else { found.join("; ") };
        let verdict = if report.faults.is_empty() { "right" } else { "FAULT" };
        text.push_str(&format!("{}: {verdict}: {found}\n", report.version));
        report.faults.iter().for_each(|fault| text.push_str(&format!("  {fault}\n")));
    }
    for (version, why) in skipped {
        text.push_str(&format!("{version}: skipped: {why}\n"));
    }
    text + &format!("{} releases checked, {} skipped, {faults} faults\n", reports.len(), skipped.len())
}

fn add(what: &str, tables: Option<PathBuf>, write: bool, output: &Output) -> Result<Exit> {
    cancel::on_signals();
    let tables = match tables {
        Some(dir) => dir,
        None => {
            let here = std::env::current_dir().map_err(|e| Error::io("find", Path::new("."), e))?;
            draft::checkout_tables(&here)?
        }
    };
    let dir = folder()?;
    let mut progress = Progress::new(output);
    let path = if Path::new(what).exists() {
        PathBuf::from(what)
    } else if Version::from_str(what).is_ok() {
        fetch(what, dir.path(), &mut progress)?
    } else {
        return Err(Error::usage(format!("`{what}` is neither a release number nor a file")));
    };
    let draft = draft::draft(&mut Archive::open(&path)?, &tables);
    progress.finish();
    let draft = draft?;
    if write {
        for change in &draft.changes {
            std::fs::write(&change.path, &change.after).map_err(|e| Error::io("write", &change.path, e))?;
        }
    }
    output.result(|| draft_json(&draft, write), || draft_text(&draft, write));
    Ok(Exit::Right)
}

fn diff(draft: &Draft) -> String {
    let one = |change: &draft::Change| {
        let name = change.path.display().to_string();
        TextDiff::from_lines(&change.before, &change.after).unified_diff().header(&name, &name).to_string()
    };
    draft.changes.iter().map(one).collect()
}

fn draft_json(draft: &Draft, written: bool) -> Value {
    let files: Vec<_> = draft.changes.iter().map(|change| &change.path).collect();
    json!({ "release": draft.version, "written": written, "files": files, "remarks": draft.remarks, "diff": diff(draft) })
}

fn draft_text(draft: &Draft, written: bool) -> String {
    let mut text: String = draft.remarks.iter().map(|remark| format!("# {remark}\n")).collect();
    text.push_str(match written {
        true => "# written; build fi-arch anew, then: fi-arch tables check\n",
        false => "# nothing was written: --write does it\n",
    });
    text + &diff(draft)
}
