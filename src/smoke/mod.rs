//! Runs an artifact on GPUs, in captured CUDA graphs, and holds every number that it computes against a float64 reference.
//!
//! | file | what it is |
//! | --- | --- |
//! | `cases` | what is run: one case is one call with one shape; the sets of cases |
//! | `numbers` | the number formats, and rounding to them |
//! | `inputs` | the inputs of a replay, from a seed |
//! | `reference` | what is right, and how far from it an output may be |
//! | `arrays` | the arrays of a call, and what guards their ends |
//! | `compare` | what was found in a replay, and comparing on the host |
//! | `artifact` | what runs |
//! | `device` | making inputs and comparing on the GPU, by kernels of ours |
//! | `layout` | sizes and layouts of workspaces and scale factors |
//! | `signature` | which parameter list a function has; values bound to it by name |
//! | `ffi` | the modules that touch foreign code: shared objects, the CUDA driver, TVM-FFI, NVRTC, NCCL |
//! | `libraries` | which libtvm_ffi, libcudart and libnvrtc are loaded |
//! | `kernels` | kernels of ours, compiled for the GPU at hand |
//! | `fault` | faults that a test plants |
//! | `stage` | a worker's side of the GPU: memory, graph, replays |
//! | `worker`, `protocol`, `supervise` | the processes: who hosts ranks, what they say to each other, who kills them |
//! | `platform` | what on this machine keeps GPUs from reading each other's memory |
//! | `report` | what a run showed |
//! | `quantiles` | what a series of times comes to |
//! | `bench` | the fused path against NCCL and a norm, ending in a policy |
//!
//! Ranks live in worker processes: this program itself, started again with a hidden verb. A kernel that waits for a rank
//! which never comes cannot be stopped from inside its process, so the supervisor never touches the GPU, every wait has a
//! deadline, and workers that do not answer are killed.
//!
//! Inputs are made and outputs compared on the GPU, by kernels of ours that NVRTC compiles; in the first replay of each case the
//! host does both too, and the two must agree bit for bit. Without NVRTC the host does it alone, and the report says so.

mod arrays;
mod artifact;
pub mod bench;
pub mod cases;
mod compare;
mod device;
mod fault;
pub mod ffi;
mod inputs;
mod kernels;
pub mod layout;
mod libraries;
pub mod numbers;
mod platform;
pub mod protocol;
mod quantiles;
mod reference;
pub mod report;
mod signature;
mod stage;
pub mod supervise;
pub mod worker;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::survey::Environment;
use crate::tables::calls::{FaultKind, calls};
use artifact::Artifact;
use cases::{Planned, Scope, Set};
use ffi::driver::{DeviceInfo, Driver};
use kernels::{Compiling, compile};
use platform::Probed;
use protocol::{Spent, Unknown};
use report::{ComparedBy, Report};
use supervise::{Crew, Played, Supervisor, Transport, Verdict, used};

/// What `smoke` and `bench` are both told: what runs, on which GPUs, with which libraries.
#[derive(Debug, Clone)]
pub struct Setup {
    pub artifact: PathBuf,
    /// Ordinals of GPUs; all of them where empty.
    pub gpus: Vec<usize>,
    /// How long the GPU may take for one replay.
    pub deadline: Duration,
    pub tvm_ffi: Option<PathBuf>,
    pub cudart: Option<PathBuf>,
    pub nvrtc: Option<PathBuf>,
}

/// What a user asks of `smoke`.
#[derive(Debug, Clone)]
pub struct Request {
    pub setup: Setup,
    pub transport: Transport,
    pub sets: Vec<Set>,
    pub ranks: Vec<usize>,
    /// Only cases whose name has all of these words in it.
    pub only: Vec<String>,
    /// Replays of each case, in place of the set's own number.
    pub replays: Option<u32>,
    /// Run cases that meet a known fault of the release as well.
    pub known_faults: bool,
    /// The host makes inputs and compares, even where the GPU could.
    pub on_host: bool,
}

/// What happens on the way, for a display.
#[derive(Debug)]
pub enum Event<'a> {
    Step(String),
    /// A case has ended, as number `at` of `of`.
    Played {
        at: usize,
        of: usize,
        played: &'a Played,
    },
}

/// Runs the cases. An error means that nothing could be run; faults that cases show are in the report.
pub fn run(request: &Request, environment: Option<&Environment>, home: &Path, observe: &mut dyn FnMut(Event)) -> Result<Report> {
    let (started, at) = (Instant::now(), jiff::Timestamp::now());
    let artifact = Artifact::read(&request.setup.artifact)?;
    if artifact.exports.is_empty() {
        return Err(Error::new(Exit::Fault, format!("{} has no function that can be called", artifact.path.display()))
            .because("it exports no __tvm_ffi_… symbol")
            .hint("name the trtllm_comm.so that `fi-arch build` prints, or another build of that module"));
    }
    needs_driver("smoke")?;
    let compiler = compiler(request, environment)?;
    let most_asked = request.ranks.iter().copied().max().unwrap_or(1);
    let mut supervisor = request.setup.supervisor(&artifact, request.transport, most_asked, environment, home)?;
    observe(Event::Step("starting a worker on the GPU".to_owned()));
    let machine = supervisor.machine()?;
    let gpus = supervisor.gpus();
    let sm = sm_of(&machine.devices, &gpus)?;
    artifact.runs_on(sm)?;

    let compiling = compiler.map(|nvrtc| compile(nvrtc, device::SOURCE, sm));
    let known: BTreeSet<i64> = calls().patterns.iter().map(|pattern| pattern.code).collect();
    let uncallable: BTreeSet<&str> = machine.unknown.iter().map(|unknown| unknown.function.as_str()).collect();
    let mut scope = scope(request, &artifact, sm);
    scope.functions.retain(|name| !uncallable.contains(name.as_str()));
    let planned = plan(request, &scope)?;

    let to_run = || planned.iter().filter(|one| one.not_run.is_none());
    supervisor.will_share(to_run().map(|one| one.case.workspace().bytes()).max().unwrap_or(0));
    let most = to_run().map(|one| one.case.ranks).max().unwrap_or(0);
    let transport_proven = supervisor.one_gpu_a_rank(most) && most > 1;
    let shared_by = if request.transport == Transport::Ipc { most } else { 1 };
    let platform = probe(&mut supervisor, &machine.devices, shared_by, &mut |step| observe(Event::Step(step)))?;
    let compared_by = compiled(compiling, &mut supervisor, request.setup.nvrtc.is_some(), observe)?;
    let mut played = Vec::with_capacity(planned.len());
    for (at, one) in planned.iter().enumerate() {
        let one = if platform.faults.is_empty() {
            supervisor.play(at as u64, one)?
        } else {
            let why = "the platform, not the kernel: the ranks cannot read and write each other's memory";
            let verdict = Verdict::Lost(why.to_owned());
            Played::new(one, verdict)
        };
        observe(Event::Played { at: at + 1, of: planned.len(), played: &one });
        played.push(one);
    }
    supervisor.finish();
    let mut spent = Spent { starting: supervisor.starting(), ..Spent::default() };
    played.iter().for_each(|one| spent.add(&one.outcome.spent));
    Ok(Report {
        artifact: artifact.path.clone(),
        flashinfer: artifact.manifest.as_ref().map(|manifest| manifest.flashinfer.clone()),
        targets: artifact.targets(),
        transport: request.transport,
        transport_proven,
        not_called: not_called(&artifact.exports, &machine.unknown, &played),
        devices: machine.devices,
        gpus,
        driver: machine.driver,
        tvm_ffi: machine.tvm_ffi,
        played,
        unknown_patterns: artifact.patterns.difference(&known).copied().collect(),
        platform,
        remarks: artifact.moved().into_iter().collect(),
        memory: supervisor.memory().clone(),
        compared_by,
        spent,
        at,
        elapsed_s: started.elapsed().as_secs_f64(),
    })
}

impl Setup {
    /// Over the workers that have at most so many ranks.
    fn supervisor(
        &self,
        artifact: &Artifact,
        transport: Transport,
        ranks: usize,
        environment: Option<&Environment>,
        home: &Path,
    ) -> Result<Supervisor> {
        Ok(Supervisor::new(Crew {
            artifact: artifact.path.clone(),
            tvm_ffi: libraries::tvm_ffi(self.tvm_ffi.as_deref(), environment, home)?,
            cudart: libraries::cudart(self.cudart.as_deref(), artifact.inventory.linkage.as_ref(), environment, home)?,
            transport,
            gpus: self.gpus.clone(),
            deadline: self.deadline,
            ranks,
        }))
    }
}

/// Refuses a machine without a driver, for a verb.
fn needs_driver(verb: &str) -> Result<()> {
    if Driver::is_there() {
        return Ok(());
    }
    Err(Error::machine("no NVIDIA driver is on this machine")
        .because("the dynamic loader finds no libcuda.so.1")
        .hint(format!("run {verb} on the machine with the GPUs; in a container, pass them through (docker run --gpus all)")))
}

/// Looks at the platform, and whether the processes of `ranks` can read and write each other's memory; one alone has no other.
fn probe(supervisor: &mut Supervisor, devices: &[DeviceInfo], ranks: usize, step: &mut dyn FnMut(String)) -> Result<Probed> {
    let gpus = supervisor.gpus();
    let addresses: Vec<String> = used(devices, &gpus).into_iter().map(|device| device.pci.clone()).collect();
    let mut probed = Probed { seen: platform::look(&addresses), several: gpus.len() > 1, faults: Vec::new() };
    if ranks > 1 {
        step(format!("trying whether {ranks} ranks can read and write each other's memory"));
        probed.faults = supervisor.probe(ranks)?;
        probed.faults.extend(platform::namespaces_apart(&supervisor.processes_of_ranks()));
    }
    Ok(probed)
}

/// What decides which cases there are, on a GPU of `sm`.
fn scope(request: &Request, artifact: &Artifact, sm: u32) -> Scope {
    Scope {
        sm: artifact.code_sm(sm),
        functions: artifact.exports.clone(),
        patterns: artifact.patterns.clone(),
        ranks: request.ranks.clone(),
        release: artifact.release(),
    }
}

/// What compiles our kernels; the inner error says why nothing does.
fn compiler(request: &Request, environment: Option<&Environment>) -> Result<std::result::Result<PathBuf, String>> {
    if request.on_host {
        return Ok(Err("it was asked for (--compare host)".to_owned()));
    }
    match libraries::nvrtc(request.setup.nvrtc.as_deref(), environment) {
        Ok(nvrtc) => Ok(Ok(nvrtc)),
        Err(error) if request.setup.nvrtc.is_some() => Err(error),
        Err(_) => Ok(Err("no libnvrtc is here to compile our kernels with (--nvrtc FILE names one)".to_owned())),
    }
}

/// Gives the compiled kernels to the workers. Where that does not work the host compares, unless the compiler was `named`.
fn compiled(
    compiling: std::result::Result<Compiling, String>,
    supervisor: &mut Supervisor,
    named: bool,
    observe: &mut dyn FnMut(Event),
) -> Result<ComparedBy> {
    let compiling = match compiling {
        Ok(compiling) => compiling,
        Err(why) => return Ok(ComparedBy::Host(why)),
    };
    observe(Event::Step("compiling the kernels that make inputs and compare".to_owned()));
    let loaded = match compiling.join() {
        Ok(kernels) => supervisor.load(kernels.path().to_owned())?.map(|()| ComparedBy::Device(kernels)),
        Err(why) => Err(why),
    };
    match loaded {
        Ok(by) => Ok(by),
        Err(why) if named => Err(kernels::unusable(why)),
        Err(why) => Ok(ComparedBy::Host(why)),
    }
}

/// The cases that a request asks for, in order.
fn plan(request: &Request, scope: &Scope) -> Result<Vec<Planned>> {
    let mut planned: Vec<Planned> = request.sets.iter().flat_map(|set| cases::plan(*set, scope)).collect();
    planned.retain(|one| {
        let name = one.case.to_string();
        request.only.iter().all(|part| name.contains(part.as_str()))
    });
    for one in &mut planned {
        if let Some(replays) = request.replays {
            one.case.replays = replays;
        }
        let left_out_for_it = one.fault.is_some_and(|fault| fault.kind == FaultKind::Wrong);
        if request.known_faults && left_out_for_it && cases::lacks_nothing(&one.case, scope) {
            one.not_run = None;
        }
    }
    if planned.is_empty() {
        return Err(Error::usage("there is no such case").hint("`fi-arch smoke ARTIFACT --list` shows the names of all cases"));
    }
    Ok(planned)
}

/// The cases that a request would run on a GPU of SM `sm`. Needs no GPU.
pub fn list(request: &Request, sm: u32) -> Result<Vec<Planned>> {
    let artifact = Artifact::read(&request.setup.artifact)?;
    plan(request, &scope(request, &artifact, sm))
}

/// The one SM of the GPUs that are used.
fn sm_of(devices: &[DeviceInfo], gpus: &[usize]) -> Result<u32> {
    if let Some(missing) = gpus.iter().find(|ordinal| devices.iter().all(|device| device.ordinal != **ordinal)) {
        return Err(Error::usage(format!("there is no GPU {missing}")).because(format!(
            "the driver shows {}: {}",
            devices.len(),
            names(devices)
        )));
    }
    let sms: BTreeSet<u32> = used(devices, gpus).into_iter().map(|device| device.sm).collect();
    match sms.into_iter().collect::<Vec<_>>()[..] {
        [sm] => Ok(sm),
        [] => Err(Error::machine("the driver shows no GPU")),
        _ => Err(Error::machine("the GPUs are of different kinds").because(names(devices)).hint("choose GPUs with --gpus 0,1")),
    }
}

fn names(devices: &[DeviceInfo]) -> String {
    devices.iter().map(|device| format!("{} {} (sm_{})", device.ordinal, device.name, device.sm)).collect::<Vec<_>>().join(", ")
}

/// Every exported function that no case has called, and why.
fn not_called(exports: &BTreeSet<String>, unknown: &[Unknown], played: &[Played]) -> Vec<Unknown> {
    let called = |name: &String| {
        played.iter().any(|one| {
            let function = one.case.what.function();
            // Every workspace is initialized by the artifact's own function.
            let initializes = !matches!(one.verdict, Verdict::NotRun(_) | Verdict::Lost(_))
                && name
                    == if function == "trtllm_custom_all_reduce" {
                        "trtllm_lamport_initialize_all"
                    } else {
                        "trtllm_lamport_initialize"
                    };
            initializes || (function == name && matches!(one.verdict, Verdict::Pass | Verdict::Fail(_) | Verdict::KnownFault(_)))
        })
    };
    let why = |name: &String| {
        if let Some(unknown) = unknown.iter().find(|unknown| unknown.function == **name) {
            return unknown.why.clone();
        }
        if !calls().functions.iter().any(|function| function.name == *name) {
            return "the tables do not know it".to_owned();
        }
        let of_it = played.iter().filter(|one| one.case.what.function() == name);
        of_it.filter_map(|one| one.why()).next().map_or_else(|| "no case of it was asked for".to_owned(), str::to_owned)
    };
    let names = exports.iter().filter(|name| !called(name));
    names.map(|name| Unknown { function: name.clone(), why: why(name) }).collect()
}
