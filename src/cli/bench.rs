//! `fi-arch bench`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use pep440_rs::Version;

use super::gpu::{self, Display, Flags};
use super::output::Output;
use crate::cancel;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::pipeline::Context;
use crate::smoke::bench::plan::{HIDDEN, MOST_HIDDEN, Mode, Scenario, TOKENS, Wanted};
use crate::smoke::bench::report::{Report, Word};
use crate::smoke::bench::rows::{Of, Row};
use crate::smoke::bench::stats::Difference;
use crate::smoke::bench::{self, Event, Request, html};
use crate::smoke::numbers::DType;
use crate::survey;

/// Measure whether the fused all-reduce pays on this machine, and write the policy that follows
///
/// All-reduce + residual add + RMSNorm: FlashInfer's fused kernels, one-shot and two-shot, against NCCL's all-reduce and one kernel
/// that adds and norms (which decides), and against NCCL on a stream of its own with two kernels, as torch.distributed has it. In captured CUDA graphs, one process and one GPU for each rank. Numbers are held against a float64 reference
/// before and after the clock. Needs two GPUs, NCCL and NVRTC (torch's environment has both); no Python, no torch. Nothing else may
/// run on these GPUs. Ends with 0 whether it pays or not, with 1 when a number is wrong, a rank hangs, or it is slower than the baseline.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    gpu: Flags,

    /// A second artifact, whose workers take turns with those of the first
    #[arg(long, value_name = "OTHER")]
    against: Option<PathBuf>,

    /// One call over many numbers of tokens, all 122 calls of a decoding step of 61 layers with 3 tokens, or both
    #[arg(long, value_enum, default_value_t = ScenarioArg::All)]
    scenario: ScenarioArg,

    /// Tokens of the sweep [default: 1,2,3,4,8,16,…,2048]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: Vec<u32>,

    /// Elements of a token: a multiple of 8, at most 32768
    #[arg(long, value_name = "N", default_value_t = HIDDEN)]
    hidden: usize,

    /// The type of the elements
    #[arg(long, value_enum, default_value_t = DTypeArg::Bf16)]
    dtype: DTypeArg,

    /// How many ranks: a list of 2, 4, 8 [default: all that there are GPUs for]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    ranks: Vec<usize>,

    /// How many times the workers of an artifact are started: times differ from start to start [default: 3 with --against, --baseline or --save-baseline, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    restarts: Option<u32>,

    /// Replays of each graph that count, in all starts together; ten more go before them in each
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    replays: u32,

    /// The release of FlashInfer that an artifact without a manifest was built from: when FlashInfer takes one-shot depends on it
    #[arg(long, value_name = "VERSION")]
    flashinfer: Option<Version>,

    /// Write the limits that follow as a policy for `fi-arch install --policy`
    #[arg(long, value_name = "FILE")]
    write_policy: Option<PathBuf>,

    /// Write the report as one HTML file with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Compare with an earlier run: its JSON, or a folder with one for each kind of machine; where there is none, this run is kept there
    #[arg(long, value_name = "FILE|DIR")]
    baseline: Option<PathBuf>,

    /// Keep this run in a folder, under the name of GPU, driver and topology
    #[arg(long, value_name = "DIR")]
    save_baseline: Option<PathBuf>,

    /// By how much a figure may exceed the baseline, beside the noise within and between starts, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, allow_negative_numbers = true)]
    tolerance: f64,

    /// libnccl.so.2 [default: the environment's, else that of CUDA_HOME, else the system's]
    #[arg(long, value_name = "FILE")]
    nccl: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ScenarioArg {
    All,
    Sweep,
    Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DTypeArg {
    Bf16,
    Fp16,
}

impl Args {
    /// What is held against another run or another artifact needs to know how far its own starts lie apart.
    fn restarts(&self) -> u32 {
        let is_held_against_others = self.against.is_some() || self.baseline.is_some() || self.save_baseline.is_some();
        self.restarts.unwrap_or(if is_held_against_others { 3 } else { 1 })
    }
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    cancel::on_signals();
    let context = Context::open()?;
    let environment = survey::environment(args.gpu.env.as_deref(), &context.memo)?;
    let request = request(&args, &context)?;
    let display = Display::new(output);
    let ran = bench::run(&request, environment.as_ref(), &context.home, &mut |event| show(&display, event));
    display.finish();
    let report = ran?;
    if let Some(path) = &args.html {
        let text = html::html(&report).map_err(|why| Error::new(Exit::Bug, "the HTML report could not be drawn").because(why))?;
        std::fs::write(path, text).map_err(|error| Error::io("write", path, error))?;
    }
    let measured = !matches!(report.word(), Word::Fault | Word::Platform);
    if let Some(path) = args.write_policy.as_ref().filter(|_| measured) {
        std::fs::write(path, report.policy_text()).map_err(|error| Error::io("write", path, error))?;
    }
    output.result(|| report.to_json(), || text(&report, args.write_policy.is_some() && !measured));
    Ok(match report.word() {
        Word::Use | Word::DoNotUse => Exit::Right,
        Word::Fault | Word::Regression => Exit::Fault,
        Word::NoBaseline => Exit::Usage,
        Word::Platform => Exit::Machine,
    })
}

fn request(args: &Args, context: &Context) -> Result<Request> {
    gpu::check_ranks(&args.ranks)?;
    if !args.hidden.is_multiple_of(8) || !(512..=MOST_HIDDEN).contains(&args.hidden) {
        return Err(Error::usage(format!("a hidden size of {} cannot be measured", args.hidden))
            .because("accesses are of 16 bytes, and our norm holds a row in registers")
            .hint(format!("a multiple of 8 between 512 and {MOST_HIDDEN}")));
    }
    if !(args.tolerance >= 0.0 && args.tolerance.is_finite()) {
        return Err(Error::usage(format!("a tolerance of {} % is none", args.tolerance)).hint("0 or more, such as 10"));
    }
    let tokens: BTreeSet<usize> = match &args.tokens[..] {
        [] => TOKENS.into_iter().collect(),
        given => given.iter().map(|tokens| *tokens as usize).collect(),
    };
    Ok(Request {
        setup: args.gpu.setup(context)?,
        against: args.against.clone(),
        wanted: Wanted {
            scenarios: match args.scenario {
                ScenarioArg::All => vec![Scenario::Sweep, Scenario::Step],
                ScenarioArg::Sweep => vec![Scenario::Sweep],
                ScenarioArg::Step => vec![Scenario::Step],
            },
            tokens: tokens.into_iter().collect(),
            hidden: args.hidden,
            dtype: match args.dtype {
                DTypeArg::Bf16 => DType::Bf16,
                DTypeArg::Fp16 => DType::Fp16,
            },
        },
        ranks: args.ranks.clone(),
        restarts: args.restarts(),
        replays: args.replays,
        flashinfer: args.flashinfer.clone(),
        nccl: args.nccl.clone(),
        baseline: args.baseline.clone(),
        save_baseline: args.save_baseline.clone(),
        tolerance_percent: args.tolerance,
        command: std::env::args().map(|word| quoted(&word)).collect::<Vec<_>>().join(" "),
    })
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

fn show(display: &Display, event: Event) {
    match event {
        Event::Step(text) => display.step(text),
        Event::Measured { at, of, point, faults } => {
            for fault in faults {
                display.line(&format!("FAULT {fault}"));
            }
            display.ended(at, of, format!("{} ranks, {} tokens", point.ranks, point.tokens), None);
        }
    }
}

fn text(report: &Report, policy_withheld: bool) -> String {
    let mut text = String::new();
    let machine = &report.machine;
    let _ = writeln!(text, "{}", machine.line());
    let _ = writeln!(text, "  {}; NCCL_NVLS_ENABLE={}", machine.topology.text(), machine.nvls);
    for (one, what) in [(Some(&report.artifact), "artifact"), (report.against.as_ref(), "against")] {
        if let Some(one) = one {
            let release = one.flashinfer.as_deref().unwrap_or("of an unknown release");
            let _ = writeln!(text, "  {what} {} for {}, FlashInfer {release}", one.artifact.display(), one.target.join(", "));
        }
    }
    for (scenario, rows) in report.by_scenario() {
        let mut ranks: Vec<usize> = rows.iter().map(|row| row.ranks).collect();
        ranks.dedup();
        for ranks in ranks {
            let rows: Vec<&Row> = rows.iter().copied().filter(|row| row.ranks == ranks).collect();
            table(&mut text, scenario, ranks, &rows, report.against.is_some());
        }
    }
    text.push('\n');
    for row in report.rows.iter().filter(|row| row.taken.is_none()) {
        if let Some(fault) = &row.fault {
            let _ = writeln!(text, "  FAULT {} ({}): {fault}", row.name(), row.of.word());
        }
    }
    text.push_str(&report.platform.text());
    for remark in &report.remarks {
        let _ = writeln!(text, "  remark: {remark}");
    }
    if report.settings.restarts > 1 && !report.has_fault() {
        let _ = writeln!(
            text,
            "  the workers were started {} times; figures are the median of the starts', and how far those lie apart is noise",
            report.settings.restarts
        );
    }
    if let Some((median, most)) = report.against_ratios() {
        let _ = writeln!(text, "  by the medians of the second artifact: {median:.3} × in the middle, {most:.3} × at most");
        for row in report.rows.iter().filter(|row| row.taken.is_none()) {
            if let (Some(Difference::Slower), Some(ratio)) = (row.against_difference, row.against_ratio) {
                let _ = writeln!(text, "    {ratio:.3} × {}, beyond the noise", row.name());
            }
        }
    }
    if let Some(compared) = &report.baseline {
        let path = compared.path.display();
        let _ = match (compared.saved, compared.rows) {
            _ if compared.unusable.is_some() => {
                writeln!(text, "  baseline: {}", compared.unusable.as_deref().unwrap_or_default())
            }
            (true, _) => writeln!(text, "  baseline: there was none for this machine; this run is now in {path}"),
            (false, 0) => {
                writeln!(text, "  baseline: there is none for this machine, and a run with a fault is not kept ({path})")
            }
            (false, rows) => {
                let slower = compared.regressions.len();
                writeln!(
                    text,
                    "  baseline: {rows} figures compared, {slower} slower by more than {} % and the noise",
                    compared.tolerance_percent
                )
            }
        };
        for one in &compared.regressions {
            let _ = writeln!(text, "  SLOWER {}", one.text());
        }
        for one in &compared.drifts {
            let _ = writeln!(text, "  NCCL itself is slower: {}", one.text());
        }
    }
    for decision in &report.decisions {
        let _ = match (decision.fused, decision.max_tokens) {
            (true, Some(most)) => {
                let oneshot = decision.oneshot_tokens.map_or_else(String::new, |tokens| format!(", one-shot up to {tokens}"));
                writeln!(text, "  {} ranks: use it, up to {most} tokens{oneshot}", decision.ranks)
            }
            _ => writeln!(text, "  {} ranks: do not use it", decision.ranks),
        };
        // A reason is long; each part of it has a line.
        for part in decision.reason.split("; ") {
            let _ = writeln!(text, "    {part}");
        }
    }
    if policy_withheld {
        text.push_str("  no policy was written: nothing follows from a run with a fault\n");
    }
    let _ = writeln!(text, "{}: {} rows in {:.1} s", report.word().word(), report.rows.len(), report.elapsed_s);
    text
}

/// The figures of one number of ranks, a line for each number of tokens.
fn table(text: &mut String, scenario: Scenario, ranks: usize, rows: &[&Row], against: bool) {
    let Some(any) = rows.first() else { return };
    let what = match scenario {
        Scenario::Sweep => "one call".to_owned(),
        Scenario::Step => format!("a decoding step: {} calls in one graph", any.calls),
    };
    let _ = writeln!(text, "\n  {ranks} ranks, hidden {} {}, {what}; median µs a call", any.hidden, any.dtype.word());
    let _ = write!(
        text,
        "  {:>6} {:>11} {:>6} {:>10} {:>8} {:>8} {:>8}",
        "tokens", "NCCL + norm", "noise", "NCCL apart", "one-shot", "two-shot", "auto"
    );
    if against {
        let _ = write!(text, " {:>21}", "of the second artifact");
    }
    let _ = writeln!(text, "  best, by NCCL + norm");
    let mut tokens: Vec<usize> = rows.iter().map(|row| row.tokens).collect();
    tokens.dedup();
    for tokens in tokens {
        let find = |of: Of, mode: Mode| rows.iter().find(|row| (row.of, row.mode, row.tokens) == (of, mode, tokens));
        let micros = |row: Option<&&Row>| match row {
            Some(Row { series: Some(series), .. }) => format!("{:.2}", series.median_us),
            Some(Row { fault: Some(_), .. }) => "FAULT".to_owned(),
            _ => "–".to_owned(),
        };
        let nccl = find(Of::Nccl, Mode::Nccl);
        let noise = nccl.and_then(|row| row.series).map_or_else(String::new, |series| format!("{:.2}", series.noise_us));
        let fused = [Mode::OneShot, Mode::TwoShot].map(|mode| find(Of::Artifact, mode));
        let auto = find(Of::Artifact, Mode::Auto).and_then(|row| row.taken).map_or("–", Mode::word);
        let _ = write!(
            text,
            "  {tokens:>6} {:>11} {noise:>6} {:>10} {:>8} {:>8} {auto:>8}",
            micros(nccl),
            micros(find(Of::Nccl, Mode::NcclApart)),
            micros(fused[0]),
            micros(fused[1])
        );
        if against {
            let ratio = |row: Option<&&Row>| {
                row.and_then(|row| row.against_ratio).map_or("–".to_owned(), |ratio| format!("{ratio:.3} ×"))
            };
            let _ = write!(text, " {:>10} {:>10}", ratio(fused[0]), ratio(fused[1]));
        }
        let median = |row: &&&Row| row.series.map_or(f64::INFINITY, |series| series.median_us);
        let best =
            fused.iter().flatten().filter(|row| row.ratio.is_some()).min_by(|one, other| median(one).total_cmp(&median(other)));
        let _ = match best {
            Some(row) => {
                let says = match row.difference {
                    Some(Difference::Faster) => "faster",
                    Some(Difference::Slower) => "slower",
                    _ => "no difference beyond the noise",
                };
                let step = row.step_us.map_or_else(String::new, |micros| format!(", {micros:.0} µs a step"));
                let apart = row.ratio_apart.map_or_else(String::new, |ratio| format!(" ({ratio:.2} × apart)"));
                let ratio = row.ratio.unwrap_or(f64::NAN);
                writeln!(text, "  {} {ratio:.2} ×{apart}, {says}{step}", row.mode.word())
            }
            None => writeln!(text, "  –"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_in_a_report_can_be_pasted() {
        assert_eq!(quoted("--tokens=1,2"), "--tokens=1,2");
        assert_eq!((quoted("a b"), quoted("it's"), quoted("")), ("'a b'".to_owned(), "'it'\\''s'".to_owned(), "''".to_owned()));
    }
}
