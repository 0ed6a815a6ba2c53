//! Whether the fused all-reduce pays on this machine: measured against NCCL's all-reduce and a norm, in captured graphs, one GPU
//! a rank, ending in a policy.
//!
//! | file | what it is |
//! | --- | --- |
//! | `plan` | points (shapes with a number of ranks) and the ways through each |
//! | `protocol`, `worker` | a rank's side: memory, graphs, the clock, the comparison with the reference |
//! | `measure` | over the workers: the legs of a point |
//! | `stats` | medians, noise, differences |
//! | `rows` | what was measured, one row for each way through a point |
//! | `verdict` | from rows to a decision, and to a policy |
//! | `machine` | GPUs, driver, links |
//! | `baseline` | figures beside those of an earlier run |
//! | `report`, `html` | what a run showed, as JSON and as a file for a browser |
//!
//! Workers may be started several times over: a set of processes can be quicker or slower than the next by more than anything that is
//! measured within one of them. With a second artifact the starts take turns, first the one's, then the other's.
//!
//! What is measured must compute the right numbers first: a graph's outputs are held against the float64 reference before and after
//! its time is taken, and what is wrong has no figure.

pub mod baseline;
pub mod html;
pub mod machine;
mod measure;
pub mod plan;
pub mod protocol;
pub mod report;
pub mod rows;
pub mod stats;
pub mod verdict;
pub mod worker;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use pep440_rs::Version;

use super::artifact::Artifact;
use super::ffi::driver::DeviceInfo;
use super::kernels::{self, Compiled, compile};
use super::protocol::Unknown;
use super::supervise::{Transport, used};
use super::{Setup, inputs, libraries, needs_driver, probe, sm_of};
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::survey::Environment;
use crate::tables::calls::{OneShot, calls};
use baseline::Compared;
use machine::{Gpu, Machine, Topology};
use measure::{Came, Crew, Loaded, Rival};
use plan::{ADD, FUNCTION, LONE_NORM, Mode, NORM, PATTERN, Point, SETS, Wanted, Way};
use report::{Named, Report, Settings};
use rows::{Legs, Of, Ran, Row};
use stats::Difference;

/// Replays before those that count.
pub const WARM_UP: u32 = 10;

/// What a user asks of `bench`.
#[derive(Debug, Clone)]
pub struct Request {
    pub setup: Setup,
    /// A second artifact, measured in turn with the first.
    pub against: Option<PathBuf>,
    pub wanted: Wanted,
    /// Numbers of ranks; all that there are GPUs for where empty.
    pub ranks: Vec<usize>,
    /// How many times the workers of an artifact are started.
    pub restarts: u32,
    /// Of a graph, in all starts together.
    pub replays: u32,
    /// The release of an artifact without a manifest.
    pub flashinfer: Option<Version>,
    pub nccl: Option<PathBuf>,
    /// A file, or a folder with files by the names of machines.
    pub baseline: Option<PathBuf>,
    pub save_baseline: Option<PathBuf>,
    pub tolerance_percent: f64,
    /// The command line, for the report.
    pub command: String,
}

/// What happens on the way, for a display.
#[derive(Debug)]
pub enum Event<'a> {
    Step(String),
    /// A point has been measured in one start, as number `at` of `of`; what was wrong in it.
    Measured {
        at: usize,
        of: usize,
        point: &'a Point,
        faults: Vec<String>,
    },
}

/// Refuses an artifact without the fused call that is measured.
fn measurable(path: &Path) -> Result<Artifact> {
    let artifact = Artifact::read(path)?;
    let lacks = |what: String| {
        Error::new(Exit::Fault, format!("{} cannot be measured", path.display()))
            .because(what)
            .hint("name the trtllm_comm.so that `fi-arch build` prints, or another build of that module")
    };
    if let Some(missing) = [FUNCTION, "trtllm_lamport_initialize"].iter().find(|name| !artifact.exports.contains(**name)) {
        return Err(lacks(format!("it exports no {missing}")));
    }
    if !artifact.patterns.contains(&PATTERN) {
        return Err(lacks("it has no kernel that reduces, adds and norms (pattern 1)".to_owned()));
    }
    Ok(artifact)
}

fn named(artifact: &Artifact, release: Option<&Version>) -> Result<Named> {
    Ok(Named {
        artifact: artifact.path.clone(),
        digest: Digest::of_file(&artifact.path)?,
        flashinfer: release.map(ToString::to_string),
        target: artifact.targets(),
    })
}

/// Measures. An error means that nothing could be; faults that were met are in the report.
pub fn run(request: &Request, environment: Option<&Environment>, home: &Path, observe: &mut dyn FnMut(Event)) -> Result<Report> {
    let started = Instant::now();
    let artifact = measurable(&request.setup.artifact)?;
    let against = request.against.as_deref().map(measurable).transpose()?;
    needs_driver("bench")?;
    let nccl = libraries::nccl(request.nccl.as_deref(), environment)?;
    let nvrtc = libraries::nvrtc(request.setup.nvrtc.as_deref(), environment)?;
    let most_asked = request.ranks.iter().copied().max().unwrap_or(2);
    let over = |artifact| request.setup.supervisor(artifact, Transport::Ipc, most_asked, environment, home);
    observe(Event::Step("starting a worker on the GPU".to_owned()));
    let mut supervisor = over(&artifact)?;
    let found = supervisor.machine()?;
    let gpus = supervisor.gpus();
    let sm = sm_of(&found.devices, &gpus)?;
    for artifact in [Some(&artifact), against.as_ref()].into_iter().flatten() {
        artifact.runs_on(sm)?;
    }
    callable(&artifact, &found.unknown)?;
    let counts = ranks(&request.ranks, &gpus)?;
    let points = plan::points(&request.wanted, &counts);
    let shared_bytes = points.iter().map(|point| point.workspace().bytes()).max().unwrap_or(0);
    supervisor.will_share(shared_bytes);
    let compiling = compile(nvrtc, worker::SOURCE, sm);
    let most = counts.iter().copied().max().unwrap_or(0);
    let platform = probe(&mut supervisor, &found.devices, most, &mut |step| observe(Event::Step(step)))?;
    observe(Event::Step("compiling the kernel that adds and norms".to_owned()));
    let norm = compiling.join().map_err(kernels::unusable)?;
    let rival = Rival { nccl, norm: norm.path().to_owned(), gpus: gpus.clone() };
    // Both are alike in all that they load and do: their ratio is one of like with like.
    let crew = |supervisor| Crew::new(supervisor, request.setup.deadline, rival.clone());
    let mut crews = vec![(Of::Artifact, crew(supervisor))];
    if let Some(artifact) = &against {
        let mut supervisor = over(artifact)?;
        supervisor.will_share(shared_bytes);
        callable(artifact, &supervisor.machine()?.unknown)?;
        let mut crew = crew(supervisor);
        // That it can be loaded is known. Its turn comes when the others have gone.
        crew.stand_down();
        crews.push((Of::Against, crew));
    }

    let release = request.flashinfer.clone().or_else(|| artifact.release());
    let rule = calls().oneshot(FUNCTION, release.as_ref());
    let mut run = Run { request, shared_bytes, overlaps: true, nccl_kernels: BTreeSet::new() };
    let mut remarks = remarks(request, &artifact, against.as_ref(), release.as_ref(), rule.is_none());
    let mut legs: Vec<Legs> = points.iter().map(|point| left_out(point, rule)).collect();
    if platform.faults.is_empty() {
        remarks.extend(run.starts(&points, &mut legs, &mut crews, observe)?);
    }
    if !run.overlaps {
        remarks.push("our norm starts when NCCL's kernel has ended: the driver takes no earlier start behind it".to_owned());
    }
    let of_point = |(point, legs): (&Point, &Legs)| rows::rows(point, legs, against.is_some(), rule);
    // A point that was never come to has no rows.
    let measured = points.iter().zip(&legs).filter(|(_, legs)| !legs.ran.is_empty());
    let rows: Vec<Row> = measured.flat_map(of_point).collect();
    remarks.extend(apart_is_stronger(&rows));
    let machine = machine_of(
        used(&found.devices, &gpus[..most.min(gpus.len())]),
        &found.driver,
        found.tvm_ffi.clone(),
        &norm,
        &crews[0].1.loaded,
    );
    let mut report = Report {
        artifact: named(&artifact, release.as_ref())?,
        against: against.as_ref().map(|other| named(other, other.release().as_ref())).transpose()?,
        decisions: verdict::decide(&rows, &machine.line()),
        machine,
        rows,
        platform,
        remarks,
        settings: Settings {
            restarts: request.restarts,
            replays: request.replays,
            warm_up: WARM_UP,
            sets: SETS,
            order: ORDER.map(Way::word).join(", "),
            pdl: true,
            fp32_acc: true,
            norm_overlaps: run.overlaps,
            nccl_kernels: run.nccl_kernels.into_iter().collect(),
        },
        baseline: None,
        command: request.command.clone(),
        elapsed_s: 0.0,
    };
    keep(request, &mut report)?;
    report.elapsed_s = started.elapsed().as_secs_f64();
    Ok(report)
}

/// What is the same for all points, and what they gather.
struct Run<'r> {
    request: &'r Request,
    shared_bytes: usize,
    overlaps: bool,
    nccl_kernels: BTreeSet<String>,
}

impl Run<'_> {
    /// Measures all points in each start of each crew, which take turns. Says what was left out.
    fn starts(
        &mut self,
        points: &[Point],
        legs: &mut [Legs],
        crews: &mut [(Of, Crew)],
        observe: &mut dyn FnMut(Event),
    ) -> Result<Option<String>> {
        let starts = self.request.restarts as usize;
        let (each, all) = (points.len() * crews.len(), points.len() * crews.len() * starts);
        for start in 0..starts {
            for (turn, (of, crew)) in crews.iter_mut().enumerate() {
                for (at, (point, legs)) in points.iter().zip(&mut *legs).enumerate() {
                    let done = start * each + turn * points.len() + at;
                    if let Some(spent) = crew.is_spent() {
                        return Ok(Some(format!("{} of {all} measurements were left out: {spent}", all - done)));
                    }
                    let of_all = if starts > 1 { format!(", start {} of {starts}", start + 1) } else { String::new() };
                    let which = if *of == Of::Against { "the second artifact, " } else { "" };
                    let Point { scenario, ranks, tokens, .. } = point;
                    observe(Event::Step(format!("{which}{}: {ranks} ranks, {tokens} tokens{of_all}", scenario.word())));
                    let before = legs.ran.len();
                    self.point(at, point, *of, start, crew, legs)?;
                    let faults = legs.ran[before..].iter().filter_map(|ran| match &ran.came {
                        Came::Fault(fault) => Some(format!("{} ({}): {fault}", point.name(ran.way.word()), ran.of.word())),
                        _ => None,
                    });
                    observe(Event::Measured { at: done + 1, of: all, point, faults: faults.collect() });
                }
                crew.stand_down();
            }
            if start + 1 < starts && legs.iter().any(Legs::has_fault) {
                let many = starts - start - 1;
                return Ok(Some(format!("{many} of {starts} starts were left out: nothing follows from a run with a fault")));
            }
        }
        Ok(None)
    }

    /// All legs of a point in one start.
    fn point(&mut self, number: usize, point: &Point, of: Of, start: usize, crew: &mut Crew, legs: &mut Legs) -> Result<()> {
        if let Some(why) = crew.prepare(point.ranks)? {
            return Err(Error::machine(format!("{} ranks could not be brought together", point.ranks))
                .because(why)
                .hint("NCCL_DEBUG=INFO makes NCCL say more; `fi-arch smoke` tries the artifact without NCCL"));
        }
        // The same numbers in every start, so that their sums take the same time.
        let down = crew.begin(point, inputs::seed(number as u64, 0), self.shared_bytes)?;
        let replays = self.request.replays.div_ceil(self.request.restarts.max(1));
        for way in ORDER {
            if legs.skipped.iter().any(|(skipped, _)| *skipped == way) {
                continue;
            }
            let of = if Way::RIVALS.contains(&way) { Of::Nccl } else { of };
            if legs.fault(of, way).is_some() {
                continue;
            }
            let came = match &down {
                Some(why) => Came::Fault(why.clone()),
                None => crew.leg(point, way, WARM_UP, replays)?,
            };
            if let (Way::Nccl, Came::Measured(leg)) = (way, &came) {
                self.overlaps &= leg.overlaps;
                let is_ours = |kernel: &str| [NORM, ADD, LONE_NORM].iter().any(|ours| kernel.contains(ours));
                let kernels = leg.kernels.iter().map(|(kernel, _)| kernel);
                self.nccl_kernels.extend(kernels.filter(|kernel| !is_ours(kernel)).cloned());
            }
            legs.ran.push(Ran { of, start, way, came });
        }
        Ok(())
    }
}

/// The legs of a point in one start: what the fused ways are compared with, before and after them.
const ORDER: [Way; 6] = [Way::Nccl, Way::NcclApart, Way::OneShot, Way::TwoShot, Way::NcclApart, Way::Nccl];

/// A point before its first leg: with the ways that FlashInfer's Python would not take.
fn left_out(point: &Point, rule: Option<&OneShot>) -> Legs {
    let impossible = Way::FUSED.into_iter().filter_map(|way| point.impossible(way, rule).map(|why| (way, why)));
    Legs { ran: Vec::new(), skipped: impossible.collect() }
}

/// Refuses an artifact whose fused call has parameters that are not known.
fn callable(artifact: &Artifact, unknown: &[Unknown]) -> Result<()> {
    match unknown.iter().find(|unknown| unknown.function == FUNCTION) {
        None => Ok(()),
        Some(unknown) => {
            Err(Error::unsupported(format!("{FUNCTION} of {} cannot be called", artifact.path.display())).because(&unknown.why))
        }
    }
}

/// Says so where NCCL in line, which is there to be the stronger of the two, is not.
fn apart_is_stronger(rows: &[Row]) -> Option<String> {
    let faster = |row: &&Row| row.mode == Mode::NcclApart && row.difference == Some(Difference::Faster);
    let names: Vec<String> = rows.iter().filter(faster).map(Row::name).collect();
    let list = names.join(", ");
    (!names.is_empty())
        .then(|| format!("NCCL apart is faster than in line, and the fused path must be faster than it, in {list}"))
}

/// The numbers of ranks to measure: those asked for, or all that there are GPUs for.
fn ranks(asked: &[usize], gpus: &[usize]) -> Result<Vec<usize>> {
    let distinct: BTreeSet<usize> = gpus.iter().copied().collect();
    if distinct.len() < gpus.len() {
        return Err(Error::usage("a GPU is named twice").because("NCCL takes one rank a GPU"));
    }
    let too_few = |ranks: usize| {
        Error::machine(format!("there are {} GPUs, and {ranks} ranks were asked for", gpus.len()))
            .because("NCCL takes one rank a GPU, and ranks that share one take turns, so that their times say nothing")
            .hint("fewer ranks with --ranks; `fi-arch smoke` proves the numbers with any number of GPUs")
    };
    if let Some(many) = asked.iter().find(|ranks| **ranks > gpus.len()) {
        return Err(too_few(*many));
    }
    let wanted: BTreeSet<usize> = match asked {
        [] => super::cases::RANKS.into_iter().filter(|ranks| *ranks <= gpus.len()).collect(),
        asked => asked.iter().copied().collect(),
    };
    if wanted.is_empty() { Err(too_few(2)) } else { Ok(wanted.into_iter().collect()) }
}

fn remarks(
    request: &Request,
    artifact: &Artifact,
    against: Option<&Artifact>,
    release: Option<&Version>,
    no_rule: bool,
) -> Vec<String> {
    let mut remarks: Vec<String> = [Some(artifact), against].into_iter().flatten().filter_map(Artifact::moved).collect();
    match release {
        None => remarks.push(
            "the artifact does not say its release of FlashInfer: `auto` goes by the rule of the newest (--flashinfer names one)"
                .to_owned(),
        ),
        Some(release) if no_rule => {
            remarks.push(format!("there is no row `auto`: when FlashInfer {release} takes one-shot is not in the tables"));
        }
        Some(_) => {}
    }
    let is_held_against_others = request.baseline.is_some() || request.save_baseline.is_some() || against.is_some();
    if is_held_against_others && request.restarts == 1 {
        remarks.push("the workers were started once: how far one start lies from another is not in the noise".to_owned());
    }
    remarks
}

fn machine_of(used: Vec<&DeviceInfo>, cuda: &str, tvm_ffi: Option<String>, norm: &Compiled, loaded: &Loaded) -> Machine {
    let is_used = |ordinal: usize| used.iter().any(|device| device.ordinal == ordinal);
    let links: Vec<_> = loaded.links.iter().filter(|link| is_used(link.from) && is_used(link.to)).cloned().collect();
    Machine {
        gpu: used.first().map_or_else(String::new, |device| device.name.clone()),
        gpus: used.into_iter().map(Gpu::of).collect(),
        driver: machine::driver_release(),
        cuda: cuda.to_owned(),
        topology: Topology::of(&links),
        links,
        nccl: loaded.nccl.clone(),
        // The workers get 0 where it is not set.
        nvls: env::var(env::NCCL_NVLS_ENABLE).map_or_else(|| "0".to_owned(), |value| value.to_string_lossy().into_owned()),
        nvrtc: Some(format!("{}.{}", norm.nvrtc.0, norm.nvrtc.1)),
        tvm_ffi,
    }
}

/// Holds the run against its baseline, and keeps it where it is asked to.
fn keep(request: &Request, report: &mut Report) -> Result<()> {
    if !report.platform.faults.is_empty() {
        return Ok(());
    }
    if let Some(named) = &request.baseline {
        report.baseline = match baseline::compare(report, named, request.tolerance_percent) {
            Ok(Some(compared)) => Some(compared),
            // What was measured is told all the same.
            Err(error) => {
                let unusable = Some([&[error.what().to_owned()], error.why()].concat().join(": "));
                Some(Compared { path: baseline::file(named, &report.machine), unusable, ..Compared::default() })
            }
            Ok(None) => {
                let path = baseline::file(named, &report.machine);
                let saved = !report.has_fault();
                if saved {
                    baseline::save(report, &path)?;
                }
                Some(Compared { path, saved, tolerance_percent: request.tolerance_percent, ..Compared::default() })
            }
        };
    }
    match &request.save_baseline {
        Some(dir) if !report.has_fault() => baseline::save(report, &dir.join(report.machine.file_name())),
        Some(_) => {
            report.remarks.push("the run was not kept as a baseline: it has a fault".to_owned());
            Ok(())
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::rows::tests::{measured, point};
    use super::*;

    #[test]
    fn both_ways_with_nccl_are_measured_before_and_after_the_fused_ones() {
        let fused = ORDER.iter().position(|way| *way == Way::OneShot).unwrap();
        assert_eq!(ORDER[fused..fused + 2], Way::FUSED);
        for way in Way::RIVALS {
            assert!(ORDER[..fused].contains(&way) && ORDER[fused + 2..].contains(&way), "{}", way.word());
        }
    }

    #[test]
    fn that_nccl_apart_is_the_faster_of_the_two_is_told() {
        let mut rows = measured(&point(2, 3), 16.0, Some(5.0), None);
        assert_eq!(apart_is_stronger(&rows), None);
        rows[1].difference = Some(Difference::Faster);
        assert!(apart_is_stronger(&rows).unwrap().contains("sweep nccl-apart 2 ranks 3 tokens"));
    }

    #[test]
    fn ranks_are_those_that_there_are_gpus_for_and_more_are_refused() {
        assert_eq!(ranks(&[], &[0, 1, 2, 3, 4]).unwrap(), [2, 4]);
        assert_eq!(ranks(&[4, 2, 4], &[0, 1, 2, 3]).unwrap(), [2, 4]);
        for (asked, gpus) in [(&[][..], &[0][..]), (&[4], &[0, 1])] {
            let error = ranks(asked, gpus).unwrap_err();
            assert!(error.exit() as u8 == 3 && !error.hints().is_empty(), "{error}");
        }
        assert_eq!(ranks(&[2], &[0, 0]).unwrap_err().exit() as u8, 2);
    }
}
