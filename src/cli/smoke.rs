//! `fi-arch smoke`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::gpu::{self, Display, Flags};
use super::output::Output;
use crate::cancel;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::pipeline::Context;
use crate::smoke::cases::{Case, Planned, RANKS, Set, What};
use crate::smoke::ffi::driver::Driver;
use crate::smoke::report::{ComparedBy, Report, junit};
use crate::smoke::supervise::{Played, Transport, Verdict};
use crate::smoke::{self, Event, Request};
use crate::{survey, target};

/// Prove on GPUs that an artifact computes the right numbers, inside captured CUDA graphs
///
/// Runs every function of the artifact and every pattern of its fused all-reduce, with fresh inputs in each replay, and holds
/// each number against a float64 reference. Needs no Python and no torch. Ends with 1 when a number is wrong or a rank hangs.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    gpu: Flags,

    /// Where ranks live: in processes with CUDA IPC between them, as the engines have it, or as streams of one process on one GPU
    #[arg(long, value_enum, default_value_t = TransportArg::Ipc)]
    transport: TransportArg,

    /// How many ranks: a list of 2, 4, 8 [default: 2,4,8; with --quick 2]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u8))]
    ranks: Vec<u8>,

    /// A gate before a server starts: the main shapes of every pattern in seconds, in little memory
    #[arg(long, conflicts_with = "cases")]
    quick: bool,

    /// Which cases: every shape once, every pair of choices a thousand times, or both
    #[arg(long, value_enum, default_value_t = CasesArg::All)]
    cases: CasesArg,

    /// Only cases whose name has TEXT in it; may be given several times, then all must be
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// Replays of each case [default: 20; 1000 in the pairwise set; 5 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    replays: Option<u32>,

    /// Also run cases that every release is known to get wrong
    #[arg(long)]
    known_faults: bool,

    /// Print the names of the cases for the target of this GPU (or TARGET, such as 120), and run none
    #[arg(long, value_name = "TARGET", num_args = 0..=1)]
    list: Option<Option<String>>,

    /// Who makes the inputs and compares the outputs with the float64 reference: kernels of ours on the GPU (and the host too in the
    /// first replay of each case), or the host alone, as it is where no libnvrtc is found to compile them
    #[arg(long, value_enum, default_value_t = CompareArg::Device)]
    compare: CompareArg,

    /// Also write the results as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TransportArg {
    /// One process a rank, CUDA IPC between them
    Ipc,
    /// One process, each rank a stream of one graph
    Inproc,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CompareArg {
    Device,
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CasesArg {
    All,
    Pairwise,
    Both,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    cancel::on_signals();
    let context = Context::open()?;
    let environment = survey::environment(args.gpu.env.as_deref(), &context.memo)?;
    let request = request(&args, &context)?;
    if let Some(sm) = &args.list {
        return list(&request, sm.as_deref(), output);
    }
    let (display, mut failed) = (Display::new(output), 0);
    let ran = smoke::run(&request, environment.as_ref(), &context.home, &mut |event| show(&display, event, &mut failed));
    display.finish();
    let report = ran?;
    if let Some(path) = &args.junit {
        std::fs::write(path, junit(&report)).map_err(|error| Error::io("write", path, error))?;
    }
    output.result(|| report_json(&report), || report_text(&report));
    Ok(match report.word() {
        "pass" => Exit::Right,
        "platform" => Exit::Machine,
        _ => Exit::Fault,
    })
}

/// The hidden verb of the worker processes.
pub fn worker() -> Result<Exit> {
    smoke::worker::serve().map_err(|error| Error::machine("a worker lost its supervisor").because(error))?;
    Ok(Exit::Right)
}

fn request(args: &Args, context: &Context) -> Result<Request> {
    let ranks: Vec<usize> = match (&args.ranks[..], args.quick) {
        ([], true) => vec![2],
        ([], false) => RANKS.to_vec(),
        (given, _) => given.iter().map(|ranks| usize::from(*ranks)).collect(),
    };
    gpu::check_ranks(&ranks)?;
    Ok(Request {
        setup: args.gpu.setup(context)?,
        transport: match args.transport {
            TransportArg::Ipc => Transport::Ipc,
            TransportArg::Inproc => Transport::InProcess,
        },
        sets: match (args.quick, args.cases) {
            (true, _) => vec![Set::Quick],
            (false, CasesArg::All) => vec![Set::All],
            (false, CasesArg::Pairwise) => vec![Set::Pairwise],
            (false, CasesArg::Both) => vec![Set::All, Set::Pairwise],
        },
        ranks,
        only: args.only.clone(),
        replays: args.replays,
        known_faults: args.known_faults,
        on_host: args.compare == CompareArg::Host,
    })
}

fn list(request: &Request, sm: Option<&str>, output: &Output) -> Result<Exit> {
    let sm = match sm {
        Some(text) => target::parse(text)?.sm,
        None => {
            let found = Driver::open().and_then(|driver| driver.devices().map_err(|error| error.to_string()));
            let found = found.map_err(|why| {
                Error::machine("the target of the GPU cannot be asked for").because(why).hint("name one: --list 120")
            })?;
            found
                .first()
                .map(|device| device.sm)
                .ok_or_else(|| Error::machine("there is no GPU").hint("name a target: --list 120"))?
        }
    };
    let planned = smoke::list(request, sm)?;
    let line = |one: &Planned| match &one.not_run {
        None => format!("{}\n", one.case),
        Some(why) => format!("{} – not run: {why}\n", one.case),
    };
    output.result(
        || {
            json!({ "cases": planned.iter().map(|one| {
            let mut case = case_json(&one.case);
            case["not_run"] = json!(one.not_run);
            case
        }).collect::<Vec<_>>() })
        },
        || planned.iter().map(line).collect(),
    );
    Ok(Exit::Right)
}

/// Shows an event; `failed` counts.
fn show(display: &Display, event: Event, failed: &mut usize) {
    match event {
        Event::Step(text) => display.step(text),
        Event::Played { at, of, played } => {
            if let Verdict::Fail(why) = &played.verdict {
                *failed += 1;
                display.line(&format!("FAIL {}: {why}", played.case));
            }
            let counted = (at % 100 == 0 || at == of).then(|| format!("  {at} of {of} cases, {failed} failed"));
            display.ended(at, of, played.case.to_string(), counted);
        }
    }
}

fn case_json(case: &Case) -> Value {
    let mut value = json!({
        "name": case.to_string(),
        "function": case.what.function(),
        "pattern": case.pattern(),
        "dtype": case.dtype.word(),
        "tokens": case.tokens,
        "hidden": case.hidden,
        "ranks": case.ranks,
        "oneshot": case.oneshot(),
        "pdl": case.pdl,
    });
    if let What::Fusion { fp32_acc, trigger_at_end, scales, .. } = case.what {
        value["fp32_acc"] = json!(fp32_acc);
        value["trigger"] = json!(if trigger_at_end { "end" } else { "start" });
        value["scales"] = json!(scales);
    }
    value
}

fn played_json(played: &Played) -> Value {
    let mut value = case_json(&played.case);
    let ran = !played.outcome.micros.is_empty();
    value["error"] = json!(ran.then_some(played.outcome.error));
    value["of_bound"] = json!(ran.then_some(played.outcome.of_bound));
    value["replays"] = json!(played.outcome.right);
    value["median_us"] = json!(played.median_us());
    value["seconds"] = json!(played.seconds);
    value["verdict"] = json!(played.word());
    value["why"] = json!(played.why());
    value["known_fault"] = json!(played.fault.map(|fault| &fault.id));
    value["kernels"] = json!(played.launches);
    value
}

fn report_json(report: &Report) -> Value {
    let counts = report.counts();
    let problem = |code: &str, message: &str| json!({ "code": code, "message": message });
    let mut problems = report.platform.problems();
    problems.extend(report.played.iter().filter_map(|played| match &played.verdict {
        Verdict::Fail(why) => Some(problem("wrong", &format!("{}: {why}", played.case))),
        _ => None,
    }));
    if let Some(nothing) = nothing_proven(report) {
        problems.push(problem("nothing-proven", nothing));
    }
    json!({
        "verdict": report.word(),
        "artifact": report.artifact.display().to_string(),
        "flashinfer": report.flashinfer,
        "targets": report.targets,
        "transport": report.transport.word(),
        "transport_proven": report.transport_proven,
        "gpus": report.gpus,
        "devices": report.devices,
        "driver_cuda": report.driver,
        "tvm_ffi": report.tvm_ffi,
        "counts": {
            "passed": counts.passed, "failed": counts.failed, "known_faults": counts.known_faults,
            "skipped": counts.skipped, "not_run": counts.not_run, "lost": counts.lost,
        },
        "clusters": report.clusters(),
        "not_called": report.not_called,
        "unknown_patterns": report.unknown_patterns,
        "problems": problems,
        "platform": report.platform.seen,
        "remarks": report.remarks,
        "memory": report.memory.iter().map(|(gpu, taken)| json!({
            "gpu": gpu, "allocated_mib": mib(taken.allocated_bytes), "fallen_mib": mib(taken.fallen_bytes),
        })).collect::<Vec<_>>(),
        "compared_by": report.compared_by.word(),
        "compared_by_why": match &report.compared_by {
            ComparedBy::Host(why) => Some(why),
            ComparedBy::Device(_) => None,
        },
        "spent_s": report.spent,
        "elapsed_s": report.elapsed_s,
        "cases": report.played.iter().map(played_json).collect::<Vec<_>>(),
    })
}

/// Said where no case failed and none passed.
fn nothing_proven(report: &Report) -> Option<&'static str> {
    let counts = report.counts();
    let nothing = counts.passed == 0 && counts.failed == 0 && counts.lost == 0 && report.platform.faults.is_empty();
    nothing.then_some("no case passed: nothing is proven of the artifact")
}

fn mib(bytes: u64) -> f64 {
    (bytes as f64 / f64::from(1 << 20) * 10.0).round() / 10.0
}

/// What cases of one kind had in common.
#[derive(Default)]
struct Line {
    passed: usize,
    failed: usize,
    known: usize,
    left_out: usize,
    error: f64,
    of_bound: f64,
    micros: Vec<f64>,
}

fn report_text(report: &Report) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{}", report.artifact.display());
    let gpus = report.used();
    let named = gpus.first().map_or_else(String::new, |gpu| format!("{} × {} (sm_{})", gpus.len(), gpu.name, gpu.sm));
    let _ = writeln!(
        text,
        "  on {named}, driver for CUDA {}, tvm-ffi {}",
        report.driver,
        report.tvm_ffi.as_deref().unwrap_or("unknown")
    );
    let transport = match (report.transport, report.transport_proven) {
        (Transport::Ipc, true) => "a process and a GPU for each rank, CUDA IPC between them",
        (Transport::Ipc, false) => "a process for each rank, several on one GPU: transport not proven",
        (Transport::InProcess, _) => "all ranks in one process on one GPU: transport not proven",
    };
    let _ = writeln!(text, "  {transport}");
    let _ = match &report.compared_by {
        ComparedBy::Device(kernels) => writeln!(
            text,
            "  inputs and comparison: kernels of ours on the GPU (NVRTC {}.{}), and the host too in the first replay of each case\n",
            kernels.nvrtc.0, kernels.nvrtc.1
        ),
        ComparedBy::Host(why) => writeln!(text, "  inputs and comparison: the host alone, since {why}\n"),
    };
    let mut lines: BTreeMap<(String, &str), Line> = BTreeMap::new();
    for played in &report.played {
        let shot = played.case.oneshot().map_or("", |oneshot| if oneshot { "one-shot" } else { "two-shot" });
        let line = lines.entry((played.case.pattern(), shot)).or_default();
        match played.verdict {
            Verdict::Pass => line.passed += 1,
            Verdict::Fail(_) => line.failed += 1,
            Verdict::KnownFault(_) => line.known += 1,
            _ => line.left_out += 1,
        }
        if played.verdict == Verdict::Pass {
            line.error = line.error.max(played.outcome.error);
            line.of_bound = line.of_bound.max(played.outcome.of_bound);
            line.micros.extend(played.median_us());
        }
    }
    let _ = writeln!(
        text,
        "  {:24} {:9} {:>6} {:>6} {:>6} {:>8} {:>9} {:>8}  median µs a call",
        "", "", "passed", "failed", "known", "left out", "error", "of bound"
    );
    for ((pattern, shot), line) in &lines {
        let least = line.micros.iter().copied().fold(f64::INFINITY, f64::min);
        let most = line.micros.iter().copied().fold(0.0, f64::max);
        let micros = if line.micros.is_empty() { String::new() } else { format!("{least:.1} – {most:.1}") };
        let _ = writeln!(
            text,
            "  {pattern:24} {shot:9} {:>6} {:>6} {:>6} {:>8} {:>9.1e} {:>8.2}  {micros}",
            line.passed, line.failed, line.known, line.left_out, line.error, line.of_bound
        );
    }
    text.push('\n');
    reasons(&mut text, report);
    let counts = report.counts();
    let _ = writeln!(
        text,
        "{}: {} passed, {} failed, {} with a known fault of the release, {} skipped, {} not run, in {:.1} s",
        report.word(),
        counts.passed,
        counts.failed,
        counts.known_faults,
        counts.skipped,
        counts.not_run + counts.lost,
        report.elapsed_s
    );
    text
}

/// What failed, and why cases were left out, each reason once.
fn reasons(text: &mut String, report: &Report) {
    text.push_str(&report.platform.text());
    for remark in &report.remarks {
        let _ = writeln!(text, "  remark: {remark}");
    }
    let mut left_out: BTreeMap<&str, usize> = BTreeMap::new();
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    for played in &report.played {
        match &played.verdict {
            Verdict::Fail(why) => _ = writeln!(text, "  FAIL {}: {why}", played.case),
            Verdict::Pass => {}
            Verdict::KnownFault(_) => {
                let fault = played.fault.map_or("", |fault| fault.why.as_str());
                *known.entry(fault).or_default() += 1;
            }
            Verdict::Skipped(why) if why.starts_with("its ranks cannot") => {
                *left_out.entry("its ranks cannot all make progress on one GPU").or_default() += 1;
            }
            Verdict::Skipped(why) | Verdict::NotRun(why) | Verdict::Lost(why) => *left_out.entry(why).or_default() += 1,
        }
    }
    if let Some(nothing) = nothing_proven(report) {
        let _ = writeln!(text, "  {nothing}");
    }
    for (why, count) in known {
        let _ = writeln!(text, "  {count} known: {why}");
    }
    for (why, count) in left_out {
        let _ = writeln!(text, "  {count} left out: {why}");
    }
    for unknown in &report.not_called {
        let _ = writeln!(text, "  not called: {}: {}", unknown.function, unknown.why);
    }
    if !report.unknown_patterns.is_empty() {
        let _ = writeln!(text, "  patterns that the tables do not know, not run: {:?}", report.unknown_patterns);
    }
    let clusters: Vec<_> = report.clusters().iter().map(|(size, cases)| format!("{size} in {cases}")).collect();
    if !clusters.is_empty() {
        let _ = writeln!(text, "  cluster sizes: {} cases", clusters.join(", "));
    }
    let parts: Vec<_> = report.spent.parts().iter().map(|(name, seconds)| format!("{name} {seconds:.1}")).collect();
    let _ = writeln!(text, "  seconds of all workers together: {}", parts.join(", "));
    for (gpu, taken) in &report.memory {
        let (allocated, fallen) = (mib(taken.allocated_bytes), mib(taken.fallen_bytes));
        let _ = writeln!(text, "  GPU {gpu}: {allocated} MiB allocated at most; its free memory fell by {fallen} MiB");
    }
}
