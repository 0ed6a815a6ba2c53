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
use plan::{FUNCTION, NORM, PATTERN, Point, SETS, Wanted, Way};
use report::{Named, Report, Settings};
use rows::{Legs, Of, Row};

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
    /// A point has been measured, as number `at` of `of`.
    Measured {
        at: usize,
        of: usize,
        point: Point,
        rows: &'a [Row],
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
    if let Some(unknown) = found.unknown.iter().find(|unknown| unknown.function == FUNCTION) {
        return Err(Error::unsupported(format!("{FUNCTION} of this artifact cannot be called")).because(&unknown.why));
    }
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
    let mut first = Crew::new(supervisor, request.setup.deadline, Some(rival));
    let mut second = match &against {
        Some(artifact) => {
            let mut supervisor = over(artifact)?;
            supervisor.machine()?;
            supervisor.will_share(shared_bytes);
            Some(Crew::new(supervisor, request.setup.deadline, None))
        }
        None => None,
    };

    let release = request.flashinfer.clone().or_else(|| artifact.release());
    let rule = calls().oneshot(FUNCTION, release.as_ref());
    let mut run = Run { request, rule, shared_bytes, order: Vec::new(), overlaps: true, nccl_kernels: BTreeSet::new() };
    let mut rows = Vec::new();
    let mut remarks = remarks(&artifact, against.as_ref(), release.as_ref(), rule.is_none());
    if platform.faults.is_empty() {
        for (at, point) in points.iter().enumerate() {
            if let Some(spent) = first.is_spent().or_else(|| second.as_ref().and_then(Crew::is_spent)) {
                remarks.push(format!("{} of {} points were left out: {spent}", points.len() - at, points.len()));
                break;
            }
            let of_point = run.point(at, point, &mut first, second.as_mut(), observe)?;
            observe(Event::Measured { at: at + 1, of: points.len(), point: *point, rows: &of_point });
            rows.extend(of_point);
        }
    }
    first.finish();
    if let Some(second) = &mut second {
        second.finish();
    }
    if !run.overlaps {
        remarks.push("our norm starts when NCCL's kernel has ended: the driver takes no earlier start behind it".to_owned());
    }
    let machine = machine_of(
        used(&found.devices, &gpus[..most.min(gpus.len())]),
        &found.driver,
        found.tvm_ffi.clone(),
        &norm,
        &first.loaded,
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
            replays: request.replays,
            warm_up: WARM_UP,
            sets: SETS,
            order: run.order.join(", "),
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
    rule: Option<&'static OneShot>,
    shared_bytes: usize,
    /// The legs of a point where all ways are possible.
    order: Vec<String>,
    overlaps: bool,
    nccl_kernels: BTreeSet<String>,
}

impl Run<'_> {
    fn point(
        &mut self,
        number: usize,
        point: &Point,
        first: &mut Crew,
        mut second: Option<&mut Crew>,
        observe: &mut dyn FnMut(Event),
    ) -> Result<Vec<Row>> {
        observe(Event::Step(format!("{}: {} ranks, {} tokens", point.scenario.word(), point.ranks, point.tokens)));
        let mut legs = Legs::default();
        for way in Way::FUSED {
            legs.skipped.extend(point.impossible(way, self.rule).map(|why| (way, why)));
        }
        let seed = inputs::seed(number as u64, 0);
        let mut down: Vec<(Of, String)> = Vec::new();
        for (of, crew) in [(Of::Artifact, Some(&mut *first)), (Of::Against, second.as_deref_mut())] {
            let Some(crew) = crew else { continue };
            if let Some(why) = crew.prepare(point.ranks)? {
                return Err(Error::machine(format!("{} ranks could not be brought together", point.ranks))
                    .because(why)
                    .hint("NCCL_DEBUG=INFO makes NCCL say more; `fi-arch smoke` tries the artifact without NCCL"));
            }
            down.extend(crew.begin(point, seed, self.shared_bytes)?.map(|why| (of, why)));
        }
        let order = order(second.is_some());
        if self.order.is_empty() {
            self.order = order.iter().map(|(of, way)| name(*of, *way)).collect();
        }
        for (of, way) in order {
            if legs.skipped.iter().any(|(skipped, _)| *skipped == way) {
                continue;
            }
            let whose = if of == Of::Against { Of::Against } else { Of::Artifact };
            let crew = match (whose, second.as_deref_mut()) {
                (Of::Against, Some(second)) => second,
                _ => &mut *first,
            };
            let came = match down.iter().find(|(down, _)| *down == whose) {
                Some((_, why)) => Came::Fault(why.clone()),
                None => crew.leg(point, way, WARM_UP, self.request.replays)?,
            };
            if let (Way::Nccl, Came::Measured(leg)) = (way, &came) {
                self.overlaps &= leg.overlaps;
                let kernels = leg.kernels.iter().map(|(kernel, _)| kernel);
                self.nccl_kernels.extend(kernels.filter(|kernel| !kernel.contains(NORM)).cloned());
            }
            legs.came.push((of, way, came));
        }
        Ok(rows::rows(point, &legs, second.is_some(), self.rule))
    }
}

/// The legs of a point: NCCL before and after everything; with a second artifact, the first before and after it.
fn order(against: bool) -> Vec<(Of, Way)> {
    let mut order = vec![(Of::Nccl, Way::Nccl)];
    for way in Way::FUSED {
        order.push((Of::Artifact, way));
        if against {
            order.extend([(Of::Against, way), (Of::Artifact, way)]);
        }
    }
    order.push((Of::Nccl, Way::Nccl));
    order
}

fn name(of: Of, way: Way) -> String {
    match of {
        Of::Against => format!("{} of the second artifact", way.word()),
        _ => way.word().to_owned(),
    }
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

fn remarks(artifact: &Artifact, against: Option<&Artifact>, release: Option<&Version>, no_rule: bool) -> Vec<String> {
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
    use super::*;

    #[test]
    fn nccl_is_measured_before_and_after_all_and_the_first_artifact_before_and_after_the_second() {
        let names = |against| order(against).iter().map(|(of, way)| name(*of, *way)).collect::<Vec<_>>().join(" ");
        assert_eq!(names(false), "nccl one-shot two-shot nccl");
        let one = "one-shot one-shot of the second artifact one-shot";
        assert_eq!(names(true), format!("nccl {one} {} nccl", one.replace("one", "two")));
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
