//! `fi-arch build`: from what is installed, or from nothing, to a proven artifact.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;

use super::explain;
use super::output::Output;
use super::progress::Progress;
use crate::build::consumer::Consumer;
use crate::build::provision::Mode;
use crate::cancel;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::overlay::{self, Overlay};
use crate::pipeline::{self, Built, Context, DryRun, Exported, Prepared, Request, Unstored};
use crate::store::{self, Manifest};
use crate::target;

/// Build a FlashInfer module for a GPU that this FlashInfer does not list, prove it, and store it
///
/// Uses the FlashInfer of the active environment and this machine's CUDA toolkit; whatever of the two is missing or unfit is
/// fetched as pinned wheels into fi-arch's own folder. Run again, it answers from the store.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The target: 120, 12.0, 12.0a, sm_120, compute_121a, or a list of them; left out, the GPUs of this machine
    #[arg(long, value_name = "TARGETS")]
    sm: Option<String>,

    /// The module to build
    #[arg(long, default_value = "trtllm_comm", value_name = "NAME")]
    module: String,

    /// FlashInfer: a release such as 0.6.4, or a folder that holds one
    #[arg(long, value_name = "VERSION|PATH")]
    flashinfer: Option<String>,

    /// The Python environment to build for: a venv, a conda prefix, a site-packages or dist-packages folder
    #[arg(long, value_name = "DIR")]
    env: Option<PathBuf>,

    /// Who will load the artifact: torch==2.9.1+cu128, cu128, cuda==12.8 [default: the torch of the environment]
    ///
    /// Its CUDA runtime is what the artifact will need. Where no toolkit here has that one, the runtime of CUDA 13 is linked into
    /// the artifact, which then needs driver 580 or newer.
    #[arg(long = "for", value_name = "WHO")]
    consumer: Option<String>,

    /// The CUDA toolkit to build with, and no other
    #[arg(long, value_name = "DIR")]
    toolkit: Option<PathBuf>,

    /// Compile jobs at once [default: what cores and available memory allow]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,

    /// Never use the network: what is missing is an error
    #[arg(long)]
    offline: bool,

    /// Also write the artifact, its manifest and its overlay into one file for `fi-arch cache import` on another machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dry_run", "show_edits"])]
    export: Option<PathBuf>,

    /// Say why it is a hit, or what has changed since the nearest artifact in the store
    #[arg(long, conflicts_with = "show_edits")]
    explain: bool,

    /// Say what would be done, and do nothing but fetch FlashInfer where it is missing
    #[arg(long)]
    dry_run: bool,

    /// Print the edits as a unified diff with their reasons, and build nothing
    #[arg(long, conflicts_with = "dry_run")]
    show_edits: bool,

    /// For tests: assemble the code of --sm for this GPU, which is at hand [known: 90]
    ///
    /// nvcc compiles exactly as for the target; of its PTX only the target's name is changed, and the conversion to FP4, which
    /// Hopper lacks, is replaced by a sequence of other instructions. The artifact says so of itself: it is never installed or
    /// exported, and no other build is answered with it.
    #[arg(long, value_name = "TARGET", requires = "sm", conflicts_with_all = ["export", "show_edits"])]
    run_on: Option<String>,

    /// With --run-on: write the artifact into this file and not into the store, whatever the judge says of it
    #[arg(long, value_name = "FILE", requires = "run_on", conflicts_with_all = ["dry_run", "explain"])]
    output: Option<PathBuf>,

    /// With --output: the edits of these defects alone, to show on a GPU what the others are for; see --show-edits
    #[arg(long, value_name = "EDITS", value_delimiter = ',', requires = "output", conflicts_with = "gate_only")]
    only: Option<Vec<String>>,

    /// The gate edit alone, to show what a one-line edit gives; the judge refuses the result
    #[arg(long, hide = true)]
    gate_only: bool,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    cancel::on_signals();
    let requests = requests(&args)?;
    let context = Context::open()?;
    if args.show_edits {
        return show_edits(&requests[0], &context, output);
    }
    if let Some(path) = &args.export {
        if requests.len() > 1 {
            return Err(Error::usage("a bundle holds one artifact").hint("name one target with --sm"));
        }
        // Minutes of compiling are no time to learn that the file cannot be written.
        drop(store::staged_beside(path)?);
    }
    if let Some(path) = &args.output {
        if requests.len() > 1 {
            return Err(Error::usage("one file holds one artifact").hint("name one target with --sm"));
        }
        drop(store::staged_beside(path)?);
        return build_into(path, &requests[0], &context, output);
    }
    let mut results = Vec::new();
    for request in &requests {
        let started = Instant::now();
        let mut progress = Progress::new(output);
        if request.target.ptx {
            progress.warn("+PTX is left out: fi-arch ships machine code alone, which is what it can prove");
        }
        let observe = &mut |event: pipeline::Event| progress.event(event);
        let result = if args.dry_run {
            let dry = pipeline::dry_run(request, &context, observe);
            dry.map(|dry| (dry_json(&dry, request, started), dry_text(&dry, request)))
        } else {
            let built = pipeline::build(request, &context, observe);
            let export = |built: Built| match &args.export {
                None => Ok((built_json(&built, started), built_text(&built, started))),
                Some(path) => pipeline::export(&built, path).map(|exported| with_export(&built, started, path, &exported)),
            };
            built.and_then(export)
        };
        progress.finish();
        results.push(result?);
    }
    let (mut objects, texts): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    output.result(
        || if objects.len() == 1 { objects.remove(0) } else { json!({ "verdict": objects[0]["verdict"], "builds": objects }) },
        || texts.join("\n"),
    );
    Ok(Exit::Right)
}

/// Builds for a test, past the store.
fn build_into(path: &Path, request: &Request, context: &Context, output: &Output) -> Result<Exit> {
    let started = Instant::now();
    let mut progress = Progress::new(output);
    let made = pipeline::build_into(path, request, context, &mut |event| progress.event(event));
    progress.finish();
    let made = made?;
    output.result(|| unstored_json(&made, path, started), || unstored_text(&made, path, started));
    // The file is there as asked; the exit code is the judge's, as for every build.
    Ok(if made.verdict.passed() { Exit::Right } else { Exit::Refused })
}

fn unstored_json(made: &Unstored, path: &Path, started: Instant) -> serde_json::Value {
    let Unstored { prepared, verdict, .. } = made;
    let basis = &prepared.basis;
    json!({
        "verdict": verdict.word(),
        "module": basis.module.name,
        "flashinfer": basis.flashinfer.version,
        "target": basis.target.to_string(),
        "run_on": run_on(prepared),
        "test_only": true,
        "key": null,
        "artifact": path,
        "cache": null,
        "kernels": verdict.kernels,
        "hollow": verdict.hollow,
        "with_dependency_marks": verdict.with_dependency_marks,
        "need_no_marks": verdict.need_no_marks,
        "faults": verdict.faults,
        "edits": ids(&basis.overlay),
        "left_out": prepared.left_out,
        "cudart": basis.cudart.word(),
        "min_driver": prepared.min_driver,
        "sha256": made.sha256,
        "bytes": made.bytes,
        "elapsed_s": seconds(started),
    })
}

fn unstored_text(made: &Unstored, path: &Path, started: Instant) -> String {
    let Unstored { prepared, verdict, bytes, .. } = made;
    let basis = &prepared.basis;
    let or_nothing = |ids: Vec<&str>| if ids.is_empty() { "nothing".to_owned() } else { ids.join(", ") };
    let mut text = format!(
        "{module} for {target}, FlashInfer {version}: {word}\n  artifact  {path} ({mb:.1} MB), in no store\n  test only {moved}\n  \
         judged    {kernels} kernels, {hollow} hollow; {marks} with dependency marks, {none} that need none\n",
        module = basis.module.name,
        target = basis.target,
        version = basis.flashinfer.version,
        word = verdict.word(),
        path = path.display(),
        mb = *bytes as f64 / 1e6,
        moved = moved(&run_on(prepared).unwrap_or_default()),
        kernels = verdict.kernels,
        hollow = verdict.hollow,
        marks = verdict.with_dependency_marks,
        none = verdict.need_no_marks,
    );
    for fault in &verdict.faults {
        text.push_str(&format!("  fault     {}: {}\n", fault.code, fault.message));
    }
    text.push_str(&format!(
        "  repaired  {}\n  left out  {}\n  built in  {} s\n",
        or_nothing(ids(&basis.overlay)),
        or_nothing(prepared.left_out.iter().map(String::as_str).collect()),
        seconds(started)
    ));
    text
}

/// The GPU that the code is really for, where that is not the target.
fn run_on(prepared: &Prepared) -> Option<String> {
    prepared.basis.retarget.as_ref().map(|retarget| retarget.to.to_string())
}

/// What was done to an artifact for tests, in one line.
fn moved(run_on: &str) -> String {
    format!("the target's PTX, assembled for {run_on}: never to be installed or exported")
}

fn with_export(built: &Built, started: Instant, path: &Path, exported: &Exported) -> (serde_json::Value, String) {
    let (mut json, mut text) = (built_json(built, started), built_text(built, started));
    json["export"] = json!({ "path": path, "sha256": exported.sha256, "bytes": exported.bytes });
    text.push_str(&format!("  bundle    {} ({:.1} MB)\n", path.display(), exported.bytes as f64 / 1e6));
    (json, text)
}

fn requests(args: &Args) -> Result<Vec<Request>> {
    let targets = match &args.sm {
        Some(text) => target::parse_list(text)?,
        // The edits are the same for every target, so showing them needs none.
        None if args.show_edits => target::parse_list("120")?,
        None => pipeline::targets_here()?,
    };
    let run_on = match &args.run_on {
        None => None,
        Some(text) => match target::parse_list(text)?[..] {
            [run_on] => Some(run_on),
            _ => return Err(Error::usage("--run-on names one GPU").hint("for example `--sm 120 --run-on 90`")),
        },
    };
    let only = if args.gate_only { Some(vec!["gate".to_owned()]) } else { args.only.clone() };
    let request = |target| Request {
        module: args.module.clone(),
        target,
        flashinfer: args.flashinfer.clone(),
        env: args.env.clone(),
        consumer: args.consumer.clone(),
        toolkit: args.toolkit.clone(),
        jobs: args.jobs.map(usize::from),
        mode: if args.offline { Mode::Offline } else { Mode::Online },
        explain: args.explain,
        only: only.clone(),
        run_on,
    };
    Ok(targets.into_iter().map(request).collect())
}

fn show_edits(request: &Request, context: &Context, output: &Output) -> Result<Exit> {
    let mut progress = Progress::new(output);
    let edits = pipeline::edits(request, context, &mut |event| progress.event(event));
    progress.finish();
    let (flashinfer, overlay) = edits?;
    output.result(
        || json!({ "module": request.module, "flashinfer": flashinfer.version, "edits": ids(&overlay), "diff": overlay.diff() }),
        || match overlay.edits.is_empty() {
            true => nothing_to_patch(&flashinfer.version, &request.module),
            false => overlay.diff(),
        },
    );
    Ok(Exit::Right)
}

fn nothing_to_patch(version: &str, module: &str) -> String {
    format!("nothing to patch: {module} of FlashInfer {version} is right as it is\n")
}

/// The ids of the defects that an overlay repairs, each once, in the order of the tables.
fn ids(overlay: &Overlay) -> Vec<&str> {
    overlay::each_once(overlay.edits.iter().map(|edit| edit.id.as_str()))
}

/// Seconds to three places.
fn seconds(started: Instant) -> f64 {
    (started.elapsed().as_secs_f64() * 1000.0).round() / 1000.0
}

fn built_json(built: &Built, started: Instant) -> serde_json::Value {
    let (prepared, manifest) = (&built.prepared, &built.entry.manifest);
    let basis = &prepared.basis;
    json!({
        "verdict": manifest.verdict.verdict,
        "module": basis.module.name,
        "flashinfer": basis.flashinfer.version,
        "target": basis.target.to_string(),
        "run_on": manifest.run_on,
        "test_only": manifest.test_only,
        "key": built.entry.key.to_string(),
        "artifact": built.entry.artifact,
        "cache": if built.hit { "hit" } else { "miss" },
        "kernels": manifest.verdict.kernels,
        "hollow": manifest.verdict.hollow,
        "with_dependency_marks": manifest.verdict.with_dependency_marks,
        "need_no_marks": manifest.verdict.need_no_marks,
        "edits": ids(&basis.overlay),
        "consumer": prepared.consumer.as_ref().map(|consumer| &consumer.name),
        "cudart": basis.cudart.word(),
        "min_driver": prepared.min_driver,
        "sha256": manifest.artifact.sha256,
        "nvcc": basis.toolkit.full_version,
        "tvm_ffi": basis.tvm_ffi.version,
        "elapsed_s": seconds(started),
        "explain": built.explanation.as_ref().map(explain::to_json),
    })
}

fn built_text(built: &Built, started: Instant) -> String {
    let (prepared, manifest) = (&built.prepared, &built.entry.manifest);
    let (basis, verdict) = (&prepared.basis, &manifest.verdict);
    let version = &basis.flashinfer.version;
    let repaired = if basis.overlay.edits.is_empty() {
        "nothing: this release is right as it is".to_owned()
    } else {
        ids(&basis.overlay).join(", ")
    };
    let how = if built.hit { "from the store" } else { "built" };
    format!(
        "{module} for {target}, FlashInfer {version}: {word}\n  artifact  {path} ({mb:.1} MB)\n{test_only}  proven    {proven}\n  repaired  {repaired}\n  \
         for       {loader}\n  needs     {needs}\n  key       {key}, {how} in {elapsed} s\n",
        module = basis.module.name,
        target = basis.target,
        word = verdict.verdict,
        path = built.entry.artifact.display(),
        mb = manifest.artifact.bytes as f64 / 1e6,
        test_only = manifest.run_on.as_ref().map_or(String::new(), |run_on| format!("  test only {}\n", moved(run_on))),
        proven = proven(manifest),
        loader = loader(prepared.consumer.as_ref()),
        needs = needs(manifest, prepared.min_driver),
        key = built.entry.key.short(),
        elapsed = seconds(started),
    ) + &built.explanation.as_ref().map(explain::to_text).unwrap_or_default()
}

/// Who will load the artifact, in one line.
fn loader(consumer: Option<&Consumer>) -> String {
    match consumer {
        None => "anyone with this CUDA runtime: no torch with CUDA was found, and none named with --for".to_owned(),
        Some(Consumer { name, cudart: Some(file), .. }) => format!("{name}, whose CUDA runtime is {}", file.display()),
        Some(consumer) => format!("{}, whose CUDA runtime is a {}", consumer.name, consumer.soname()),
    }
}

/// What the judge proved, in one line.
fn proven(manifest: &Manifest) -> String {
    let verdict = &manifest.verdict;
    format!(
        "{} kernels, {} hollow; {} with dependency marks, {} that need none; {} alone, no PTX; {} functions exported",
        verdict.kernels,
        verdict.hollow,
        verdict.with_dependency_marks,
        verdict.need_no_marks,
        manifest.run_on.as_ref().unwrap_or(&manifest.target),
        verdict.exports.len(),
    )
}

/// What the machine that loads the artifact must have, in one line.
fn needs(manifest: &Manifest, min_driver: Option<&str>) -> String {
    let verdict = &manifest.verdict;
    let mut needs: Vec<String> = verdict.needed.iter().filter(|name| name.starts_with("libcudart")).cloned().collect();
    if manifest.cudart == "static" {
        needs.push("no libcudart: its CUDA runtime is linked in (static)".to_owned());
    }
    needs.extend(min_driver.map(|driver| format!("driver {driver} or newer")));
    needs.extend(verdict.glibc_floor.iter().map(|floor| format!("glibc {floor}")));
    needs.extend(verdict.libstdcxx_floor.iter().map(|floor| format!("libstdc++ {floor}")));
    needs.join(", ")
}

fn dry_json(dry: &DryRun, request: &Request, started: Instant) -> serde_json::Value {
    let entry = dry.planned.as_ref().and_then(|planned| planned.entry.as_ref());
    json!({
        "verdict": entry.map(|entry| &entry.manifest.verdict.verdict),
        "module": request.module,
        "flashinfer": dry.flashinfer.version,
        "target": dry.target.to_string(),
        "run_on": dry.run_on.map(|target| target.to_string()),
        "test_only": dry.run_on.is_some(),
        "key": entry.map(|entry| entry.key.to_string()),
        "artifact": entry.map(|entry| &entry.artifact),
        "cache": dry.planned.as_ref().map(|_| if entry.is_some() { "hit" } else { "miss" }),
        "kernels": entry.map(|entry| entry.manifest.verdict.kernels),
        "hollow": entry.map(|entry| entry.manifest.verdict.hollow),
        "edits": ids(&dry.overlay),
        "consumer": dry.consumer.as_ref().map(|consumer| &consumer.name),
        "cudart": dry.cudart,
        "min_driver": dry.min_driver,
        "would_fetch": dry.would_fetch,
        "commands": dry.planned.as_ref().map(|planned| planned.plan.commands().collect::<Vec<_>>()),
        // What the names that start a path in these commands stand for; `overlay` and `ours` are written when a build runs.
        "folders": dry.planned.as_ref().map(|planned| planned.plan.view.folders().collect::<BTreeMap<_, _>>()),
        "explain": dry.planned.as_ref().and_then(|planned| planned.explanation.as_ref()).map(explain::to_json),
        "request": dry.planned.as_ref().map(|planned| planned.request.to_string()),
        "elapsed_s": seconds(started),
    })
}

fn dry_text(dry: &DryRun, request: &Request) -> String {
    let version = &dry.flashinfer.version;
    let mut text = format!("{} for {}, FlashInfer {version}: dry run\n", request.module, dry.target);
    if dry.overlay.edits.is_empty() {
        text.push_str(&format!("  {}", nothing_to_patch(version, &request.module)));
    }
    for edit in &dry.overlay.edits {
        text.push_str(&format!(
            "  edit      {} at {}:{} ({} sites): {}\n",
            edit.id, edit.path, edit.line, edit.sites, edit.reason
        ));
    }
    let runtime = match dry.cudart {
        "static" => "linked into the artifact (static)".to_owned(),
        _ => dry.consumer.as_ref().map_or("shared".to_owned(), |consumer| format!("shared, {}", consumer.soname())),
    };
    let driver = dry.min_driver.map_or(String::new(), |driver| format!("; driver {driver} or newer"));
    text.push_str(&format!("  for       {}\n", loader(dry.consumer.as_ref())));
    text.push_str(&format!("  cudart    {runtime}{driver}\n"));
    if let Some(run_on) = dry.run_on {
        text.push_str(&format!("  test only {}\n", moved(&run_on.to_string())));
    }
    for thing in &dry.would_fetch {
        text.push_str(&format!("  fetch     {thing}\n"));
    }
    if let Some(planned) = &dry.planned {
        for command in planned.plan.commands() {
            text.push_str(&format!("  run       {}\n", command.join(" ")));
        }
        let answer = match &planned.entry {
            Some(entry) => format!("a hit: {}", entry.artifact.display()),
            None => "a miss: it would be compiled".to_owned(),
        };
        text.push_str(&format!("  store     {answer}\n"));
        text.push_str(&planned.explanation.as_ref().map(explain::to_text).unwrap_or_default());
    }
    text
}
