//! `fi-arch cache`: looks after the store.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::output::Output;
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::pipeline::{self, Imported};
use crate::store::{EntrySummary, Limits, Manifest, Removed, Store};

/// Look after the store of built artifacts
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List what the store holds, newest first
    Ls,
    /// Show all that is known of one artifact
    Show {
        /// The key, or as much of its head as names one entry
        #[arg(value_name = "KEY-PREFIX")]
        prefix: String,
    },
    /// Read every artifact anew and compare it with its manifest; exit 1 if one is broken
    Verify {
        /// Only these keys, or heads of keys
        #[arg(value_name = "KEY")]
        keys: Vec<String>,
    },
    /// Take in bundles that `build --export` wrote; each is checked and judged first. Needs no network, nvcc or FlashInfer
    Import {
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
    /// Make room: remove what was not used for long, and the leavings of past work; never what is in use
    ///
    /// Without limits: what was not used for 30 days. Whatever a process has open, a builder works on, or was used within
    /// the last hour stays.
    Gc {
        /// Remove artifacts that were not used for so long: 30d, 12h, 2w
        #[arg(long, value_name = "AGE", value_parser = age)]
        older_than: Option<Duration>,

        /// Remove the longest unused artifacts until the rest takes no more than this: 2G, 500M
        #[arg(long, value_name = "SIZE", value_parser = bytes)]
        max_size: Option<u64>,

        /// Also remove fetched wheels that neither this fi-arch nor an artifact left in the store needs
        #[arg(long)]
        wheels: bool,

        /// Say what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
}

/// What `cache gc` goes by when no limit is given.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// A duration such as `30d`.
fn age(text: &str) -> Result<Duration, String> {
    let unit = |c| {
        Some(match c {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            'w' => 604_800,
            _ => return None,
        })
    };
    let parsed =
        text.chars().last().and_then(unit).and_then(|unit: u64| text[..text.len() - 1].parse::<u64>().ok()?.checked_mul(unit));
    parsed.map(Duration::from_secs).ok_or_else(|| "write a number and s, m, h, d or w, such as 30d".to_owned())
}

/// A size such as `2G`, in powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let number = text.trim_end_matches("iB").trim_end_matches('B');
    let (digits, shift) = match number.chars().last() {
        Some('K' | 'k') => (&number[..number.len() - 1], 10),
        Some('M') => (&number[..number.len() - 1], 20),
        Some('G') => (&number[..number.len() - 1], 30),
        Some('T') => (&number[..number.len() - 1], 40),
        _ => (number, 0),
    };
    let parsed = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    parsed.ok_or_else(|| "write a number and K, M, G or T, such as 2G".to_owned())
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    let store = Store::at(&env::home()?);
    match args.verb {
        Verb::Ls => list(&store, output),
        Verb::Show { prefix } => show(&store, &prefix, output),
        Verb::Verify { keys } => verify(&store, &keys, output),
        Verb::Import { files } => import(&files, output),
        Verb::Gc { older_than, max_size, wheels, dry_run } => {
            let older_than = older_than.or(max_size.is_none().then_some(UNUSED));
            gc(&Limits { older_than, max_bytes: max_size, dry_run }, wheels, output)
        }
    }
}

fn list(store: &Store, output: &Output) -> Result<Exit> {
    let entries = store.entries()?;
    output.result(
        || json!({ "store": store.root(), "entries": entries.iter().map(summary_json).collect::<Vec<_>>() }),
        || {
            if entries.is_empty() {
                return empty(store);
            }
            let head = ["KEY", "MODULE", "FLASHINFER", "TARGET", "KERNELS", "SIZE", "CREATED (UTC)", "VERDICT"];
            let rows = entries.iter().map(row);
            table(std::iter::once(head.map(str::to_owned)).chain(rows).collect())
        },
    );
    Ok(Exit::Right)
}

fn show(store: &Store, prefix: &str, output: &Output) -> Result<Exit> {
    let entries = store.entries()?;
    let summary = find(&entries, prefix)?;
    let body = || match &summary.entry {
        Ok(entry) => describe(&entry.manifest, &summary.dir.display().to_string()),
        Err(reason) => format!("{} is broken: {reason}\n  folder  {}\n", summary.name, summary.dir.display()),
    };
    let json = || match &summary.entry {
        Ok(entry) => json!({ "key": entry.key, "artifact": entry.artifact, "manifest": entry.manifest }),
        Err(_) => summary_json(summary),
    };
    output.result(json, body);
    Ok(if summary.entry.is_ok() { Exit::Right } else { Exit::Fault })
}

fn verify(store: &Store, keys: &[String], output: &Output) -> Result<Exit> {
    let entries = store.entries()?;
    let mut chosen: Vec<&EntrySummary> = if keys.is_empty() {
        entries.iter().collect()
    } else {
        keys.iter().map(|prefix| find(&entries, prefix)).collect::<Result<_>>()?
    };
    chosen.sort_by(|a, b| a.name.cmp(&b.name));
    chosen.dedup_by(|a, b| a.name == b.name);
    let problems: Vec<Option<String>> = chosen.par_iter().map(|summary| problem(store, summary)).collect();
    let broken = problems.iter().flatten().count();
    let looked = || chosen.iter().zip(&problems);
    output.result(
        || {
            let entry = |(s, problem): (&&EntrySummary, &Option<String>)| {
                json!({ "key": s.name, "verdict": if problem.is_none() { "pass" } else { "broken" }, "problem": problem, "path": s.dir })
            };
            let fault = |(s, problem): (&&EntrySummary, &Option<String>)| {
                let message = format!("{} is broken: {}", s.name, problem.as_ref()?);
                Some(json!({ "code": "store-entry-broken", "message": message, "hint": REBUILD, "path": s.dir, "line": null }))
            };
            json!({
                "verdict": if broken == 0 { "pass" } else { "fail" },
                "entries": looked().map(entry).collect::<Vec<_>>(),
                "problems": looked().filter_map(fault).collect::<Vec<_>>(),
            })
        },
        || {
            if chosen.is_empty() {
                return empty(store);
            }
            let mut text = String::new();
            for (summary, problem) in looked() {
                match problem {
                    None => writeln!(text, "pass    {}", summary.name),
                    Some(reason) => writeln!(text, "BROKEN  {}: {reason}", summary.name),
                }
                .expect("a String takes all text");
            }
            if broken > 0 {
                text.push_str(&format!("{broken} of {} broken; {REBUILD}\n", chosen.len()));
            }
            text
        },
    );
    Ok(if broken == 0 { Exit::Right } else { Exit::Fault })
}

fn import(files: &[PathBuf], output: &Output) -> Result<Exit> {
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let imported = pipeline::import(&files, &env::home()?)?;
    let all = || files.iter().zip(&imported);
    output.result(
        || {
            let one = |(file, imported): (&&Path, &Imported)| {
                let manifest = &imported.entry.manifest;
                json!({
                    "file": file, "key": imported.entry.key, "artifact": imported.entry.artifact, "new": imported.new,
                    "module": manifest.module, "flashinfer": imported.flashinfer, "target": manifest.target,
                    "kernels": manifest.verdict.kernels, "verdict": manifest.verdict.verdict,
                })
            };
            json!({ "verdict": "pass", "imported": all().map(one).collect::<Vec<_>>() })
        },
        || {
            let one = |(file, imported): (&&Path, &Imported)| {
                let Imported { entry, flashinfer, new } = imported;
                let Manifest { module, target, verdict, .. } = &entry.manifest;
                format!(
                    "{}: {module} for {target}, FlashInfer {flashinfer}: {}, {} kernels judged anew; key {}{}\n",
                    file.display(),
                    verdict.verdict,
                    verdict.kernels,
                    entry.key.short(),
                    if *new { "" } else { " (was here already)" }
                )
            };
            all().map(one).collect()
        },
    );
    Ok(Exit::Right)
}

fn gc(limits: &Limits, wheels: bool, output: &Output) -> Result<Exit> {
    let freed = pipeline::gc(&env::home()?, limits, wheels)?;
    let report = &freed.store;
    let total = report.freed_bytes() + freed.wheels.iter().map(|(_, bytes)| bytes).sum::<u64>();
    output.result(
        || {
            let one = |r: &Removed| json!({ "kind": r.kind, "name": r.name, "bytes": r.bytes, "unused_s": r.unused.as_secs() });
            let wheels = freed.wheels.iter().map(|(name, bytes)| json!({ "kind": "wheels", "name": name, "bytes": bytes }));
            json!({
                "dry_run": limits.dry_run,
                "removed": report.removed.iter().map(one).chain(wheels).collect::<Vec<_>>(),
                "kept": report.kept.iter().map(|kept| json!({ "name": kept.name, "why": kept.why })).collect::<Vec<_>>(),
                "wheels_kept": freed.wheels_stay,
                "freed_bytes": total,
                "left": report.left,
                "left_bytes": report.left_bytes,
            })
        },
        || {
            let verb = if limits.dry_run { "would remove" } else { "removed" };
            let mut text = String::new();
            let mut line = |words: String| text.push_str(&(words + "\n"));
            for r in report.removed.iter().filter(|r| !matches!(r.kind, "closure" | "lock")) {
                let label = if r.label.is_empty() { r.kind } else { &r.label };
                line(format!("{verb} {} ({label}), {}, unused for {}", short(&r.name), size(r.bytes), days(r.unused)));
            }
            for (name, bytes) in &freed.wheels {
                line(format!("{verb} the wheels {name}, {}", size(*bytes)));
            }
            let small = report.removed.iter().filter(|r| matches!(r.kind, "closure" | "lock")).count();
            if small > 0 {
                line(format!("{verb} {small} small files (remembered closures, lock files)"));
            }
            for kept in &report.kept {
                line(format!("kept {}: {}", short(&kept.name), kept.why));
            }
            if let Some(why) = freed.wheels_stay {
                line(format!("kept all wheels: {why}"));
            }
            let freed = if limits.dry_run { "would be freed" } else { "freed" };
            line(format!("{} {freed}; {} artifacts are left, {}", size(total), report.left, size(report.left_bytes)));
            text
        },
    );
    Ok(Exit::Right)
}

fn short(name: &str) -> &str {
    name.get(..12).unwrap_or(name)
}

fn days(unused: Duration) -> String {
    match unused.as_secs() / 3600 {
        hours if hours < 48 => format!("{hours} h"),
        hours => format!("{} days", hours / 24),
    }
}

const REBUILD: &str = "a broken entry is never used: the next build that needs it moves it aside and builds it anew";

fn problem(store: &Store, summary: &EntrySummary) -> Option<String> {
    match &summary.entry {
        Ok(entry) => store.check(&entry.key).err(),
        Err(reason) => Some(reason.clone()),
    }
}

/// The one entry whose key starts with `prefix`.
fn find<'a>(entries: &'a [EntrySummary], prefix: &str) -> Result<&'a EntrySummary> {
    let prefix = prefix.to_ascii_lowercase();
    let matching: Vec<_> = entries.iter().filter(|entry| entry.name.starts_with(&prefix)).collect();
    let names = |entries: &[&EntrySummary]| {
        let shown = entries.iter().take(8).map(|entry| label(entry)).collect::<Vec<_>>().join("\n");
        if entries.len() > 8 { format!("{shown}\n… and {} more", entries.len() - 8) } else { shown }
    };
    match matching.as_slice() {
        [one] => Ok(one),
        [] if entries.is_empty() => Err(Error::usage(format!("no key starts with `{prefix}`")).because("the store is empty")),
        [] => {
            let all: Vec<_> = entries.iter().collect();
            Err(Error::usage(format!("no key starts with `{prefix}`")).because(format!("the store holds\n{}", names(&all))))
        }
        several => Err(Error::usage(format!("{} keys start with `{prefix}`", several.len()))
            .because(names(several))
            .hint("give more of the key")),
    }
}

fn label(summary: &EntrySummary) -> String {
    match &summary.entry {
        Ok(entry) => {
            let Manifest { module, flashinfer, target, .. } = &entry.manifest;
            format!("{} {module} {flashinfer} {target}", summary.name)
        }
        Err(_) => format!("{} (broken)", summary.name),
    }
}

fn empty(store: &Store) -> String {
    format!("the store is empty: {}\n", store.root().display())
}

fn summary_json(summary: &EntrySummary) -> Value {
    match &summary.entry {
        Ok(entry) => {
            let manifest = &entry.manifest;
            json!({
                "key": entry.key, "path": summary.dir, "artifact": entry.artifact, "broken": null,
                "module": manifest.module, "flashinfer": manifest.flashinfer, "target": manifest.target,
                "kernels": manifest.verdict.kernels, "bytes": manifest.artifact.bytes, "created": manifest.created,
                "verdict": manifest.verdict.verdict, "test_only": manifest.test_only, "run_on": manifest.run_on,
            })
        }
        Err(reason) => json!({ "key": summary.name, "path": summary.dir, "broken": reason }),
    }
}

fn row(summary: &EntrySummary) -> [String; 8] {
    match &summary.entry {
        Ok(entry) => {
            let manifest = &entry.manifest;
            let verdict = &manifest.verdict;
            [
                entry.key.short(),
                manifest.module.clone(),
                manifest.flashinfer.clone(),
                manifest.run_on.as_ref().map_or(manifest.target.clone(), |run_on| format!("{} on {run_on}", manifest.target)),
                verdict.kernels.to_string(),
                size(manifest.artifact.bytes),
                minute(&manifest.created),
                if manifest.test_only { format!("{} (test only)", verdict.verdict) } else { verdict.verdict.clone() },
            ]
        }
        Err(reason) => {
            let name = summary.name.chars().take(12).collect();
            let none = || "-".to_owned();
            [name, none(), none(), none(), none(), none(), none(), format!("BROKEN: {reason}")]
        }
    }
}

fn table(rows: Vec<[String; 8]>) -> String {
    let mut widths = [0; 8];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |row: &[String; 8]| {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// The whole manifest for people.
fn describe(manifest: &Manifest, folder: &str) -> String {
    let or_unknown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not known".into());
    let Manifest { artifact, verdict, .. } = manifest;
    let mut text = format!("{}\n", manifest.key);
    let mut line = |name: &str, value: &str| {
        text.push_str(&format!("  {name:<15} {}\n", if value.is_empty() { "none" } else { value }));
    };
    line("module", &manifest.module);
    line("target", &manifest.target);
    line("flashinfer", &manifest.flashinfer);
    line("tvm-ffi", &manifest.tvm_ffi);
    line("folder", folder);
    line("artifact", &format!("{}, {}", artifact.file, size(artifact.bytes)));
    line("sha256", &artifact.sha256.to_string());
    line("request", &manifest.request.to_string());
    line("created", &format!("{} by fi-arch {} in {:.1} s", manifest.created, manifest.fi_arch, manifest.elapsed_s));
    line("nvcc", &manifest.nvcc);
    line("host compiler", &manifest.host_compiler);
    line("flags", &manifest.flags.join(" "));
    line("CUDA runtime", if manifest.cudart == "static" { "linked in (static)" } else { "shared" });
    line("oldest driver", &or_unknown(&manifest.min_driver));
    line("verdict", &verdict.verdict);
    line("kernels", &format!("{}, {} hollow", verdict.kernels, verdict.hollow));
    line("", &format!("{} with dependency marks, {} that need none", verdict.with_dependency_marks, verdict.need_no_marks));
    line("needs", &verdict.needed.join(" "));
    line("exports", &verdict.exports.join(" "));
    line("glibc from", &or_unknown(&verdict.glibc_floor));
    line("libstdc++ from", &or_unknown(&verdict.libstdcxx_floor));
    if manifest.test_only {
        let how =
            manifest.run_on.as_ref().map_or("a fake".to_owned(), |run_on| format!("the target's PTX, assembled for {run_on}"));
        line("test only", &format!("yes: {how}; never to be installed or exported"));
    }
    for edit in &manifest.edits {
        line("edit", &format!("{} in {} ({}): {}", edit.id, edit.path, places(edit.sites), edit.reason));
        line("", &format!("from {}", edit.pre.map_or("nothing: the overlay adds it".into(), |digest| digest.to_string())));
        line("", &format!("to   {}", edit.post));
    }
    text
}

fn places(sites: usize) -> String {
    if sites == 1 { "1 place".into() } else { format!("{sites} places") }
}

/// The date and minute of an RFC 3339 time, or the text as it is.
fn minute(created: &str) -> String {
    match (created.parse::<jiff::Timestamp>(), created.get(..16)) {
        (Ok(_), Some(head)) => head.replace('T', " "),
        _ => created.to_owned(),
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
    }
}
