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
//! | `device` | making inputs and comparing on the GPU, by kernels of ours |
//! | `layout` | sizes and layouts of workspaces and scale factors |
//! | `signature` | which parameter list a function has; values bound to it by name |
//! | `ffi` | the modules that touch foreign code: shared objects, the CUDA driver, TVM-FFI, NVRTC, NCCL |
//! | `libraries` | which libtvm_ffi, libcudart and libnvrtc are loaded |
//! | `fault` | faults that a test plants |
//! | `stage` | a worker's side of the GPU: memory, graph, replays |
//! | `worker`, `protocol`, `supervise` | the processes: who hosts ranks, what they say to each other, who kills them |
//! | `platform` | what on this machine keeps GPUs from reading each other's memory |
//! | `report` | what a run showed |
//! | `bench` | the fused path against NCCL and a norm, ending in a policy |
//!
//! Ranks live in worker processes: this program itself, started again with a hidden verb. A kernel that waits for a rank
//! which never comes cannot be stopped from inside its process, so the supervisor never touches the GPU, every wait has a
//! deadline, and workers that do not answer are killed.
//!
//! Inputs are made and outputs compared on the GPU, by kernels of ours that NVRTC compiles; in the first replay of each case the
//! host does both too, and the two must agree bit for bit. Without NVRTC the host does it alone, and the report says so.

mod arrays;
pub mod bench;
pub mod cases;
mod compare;
mod device;
mod fault;
pub mod ffi;
mod inputs;
pub mod layout;
mod libraries;
pub mod numbers;
mod platform;
pub mod protocol;
mod reference;
pub mod report;
mod signature;
mod stage;
pub mod supervise;
pub mod worker;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pep440_rs::Version;
use tempfile::NamedTempFile;

use crate::cubin::usable::usable;
use crate::cubin::{self, Inventory, Kind};
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::store::{self, Manifest};
use crate::survey::Environment;
use crate::tables::calls::{FaultKind, calls};
use crate::target;
use cases::{Planned, Scope, Set};
use ffi::driver::Driver;
use ffi::nvrtc::Nvrtc;
use protocol::{Spent, Unknown};
use report::{ComparedBy, Report};
use supervise::{Crew, Played, Supervisor, Transport, Verdict};

/// What a user asks of `smoke`.
#[derive(Debug, Clone)]
pub struct Request {
    pub artifact: PathBuf,
    pub transport: Transport,
    pub sets: Vec<Set>,
    pub ranks: Vec<usize>,
    /// Ordinals of GPUs; all of them where empty.
    pub gpus: Vec<usize>,
    /// Only cases whose name has all of these words in it.
    pub only: Vec<String>,
    /// Replays of each case, in place of the set's own number.
    pub replays: Option<u32>,
    /// Run cases that meet a known fault of the release as well.
    pub known_faults: bool,
    pub deadline: Duration,
    pub tvm_ffi: Option<PathBuf>,
    pub cudart: Option<PathBuf>,
    /// The host makes inputs and compares, even where the GPU could.
    pub on_host: bool,
    pub nvrtc: Option<PathBuf>,
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
    let inventory = cubin::read(&request.artifact)?;
    let exports = exports(&inventory);
    if exports.is_empty() {
        return Err(Error::new(Exit::Fault, format!("{} has no function that can be called", request.artifact.display()))
            .because("it exports no __tvm_ffi_… symbol")
            .hint("name the trtllm_comm.so that `fi-arch build` prints, or another build of that module"));
    }
    if !Driver::is_there() {
        return Err(Error::machine("no NVIDIA driver is on this machine")
            .because("the dynamic loader finds no libcuda.so.1")
            .hint("run smoke on the machine with the GPU; in a container, pass the GPU through (docker run --gpus all)"));
    }
    let manifest = manifest_beside(&request.artifact);
    let compiler = compiler(request, environment)?;
    let crew = Crew {
        artifact: absolute(&request.artifact)?,
        tvm_ffi: libraries::tvm_ffi(request.tvm_ffi.as_deref(), environment, home)?,
        cudart: libraries::cudart(request.cudart.as_deref(), inventory.linkage.as_ref(), environment, home)?,
        transport: request.transport,
        gpus: request.gpus.clone(),
        deadline: request.deadline,
        ranks: request.ranks.iter().copied().max().unwrap_or(1),
    };
    observe(Event::Step("starting a worker on the GPU".to_owned()));
    let mut supervisor = Supervisor::new(crew);
    let machine = supervisor.machine()?;
    let gpus = supervisor.gpus();
    let sm = sm_of(&machine.devices, &gpus)?;
    runs_on(&inventory, sm, &request.artifact)?;

    let compiling = compiler.map(|nvrtc| compile(nvrtc, sm));
    let known: BTreeSet<i64> = calls().patterns.iter().map(|pattern| pattern.code).collect();
    let patterns = patterns(&inventory);
    let uncallable: BTreeSet<&str> = machine.unknown.iter().map(|unknown| unknown.function.as_str()).collect();
    let functions = exports.iter().filter(|name| !uncallable.contains(name.as_str())).cloned().collect();
    let release = release_of(manifest.as_ref());
    let code_sm = code_sm(manifest.as_ref(), sm);
    let scope = Scope { sm: code_sm, functions, patterns: patterns.clone(), ranks: request.ranks.clone(), release };
    let planned = plan(request, &scope)?;

    let to_run = || planned.iter().filter(|one| one.not_run.is_none());
    supervisor.will_share(to_run().map(|one| one.case.workspace().bytes()).max().unwrap_or(0));
    let most = to_run().map(|one| one.case.ranks).max().unwrap_or(0);
    let transport_proven = supervisor.one_gpu_a_rank(most) && most > 1;
    let platform = platform::look(&addresses(&machine.devices, &gpus));
    let mut platform_faults = Vec::new();
    if request.transport == Transport::Ipc && most > 1 {
        observe(Event::Step(format!("trying whether {most} ranks can read and write each other's memory")));
        platform_faults = supervisor.probe(most)?;
        platform_faults.extend(platform::namespaces_apart(&supervisor.processes_of_ranks()));
    }
    let compared_by = compiled(compiling, &mut supervisor, request.nvrtc.is_some(), observe)?;
    let mut played = Vec::with_capacity(planned.len());
    for (at, one) in planned.iter().enumerate() {
        let one = if platform_faults.is_empty() {
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
    let mut remarks = Vec::new();
    if let Some(Manifest { target, run_on: Some(run_on), .. }) = &manifest {
        remarks.push(format!("what runs is the code of {target}, assembled for {run_on}: a test, not an artifact for this GPU"));
    }
    Ok(Report {
        artifact: request.artifact.clone(),
        flashinfer: manifest.map(|manifest| manifest.flashinfer),
        targets: inventory.images.iter().map(|image| image.target.clone()).collect::<BTreeSet<_>>().into_iter().collect(),
        transport: request.transport,
        transport_proven,
        not_called: not_called(&exports, &machine.unknown, &played),
        devices: machine.devices,
        gpus,
        driver: machine.driver,
        tvm_ffi: machine.tvm_ffi,
        played,
        unknown_patterns: patterns.difference(&known).copied().collect(),
        platform_faults,
        platform,
        remarks,
        memory: supervisor.memory().clone(),
        compared_by,
        spent,
        at,
        elapsed_s: started.elapsed().as_secs_f64(),
    })
}

/// The kernels that make inputs and check outputs, while they are compiled: in a file, with the CUDA of what compiles them.
type Compiling = JoinHandle<std::result::Result<(NamedTempFile, (u32, u32)), String>>;

/// What compiles our kernels; the inner error says why nothing does.
fn compiler(request: &Request, environment: Option<&Environment>) -> Result<std::result::Result<PathBuf, String>> {
    if request.on_host {
        return Ok(Err("it was asked for (--compare host)".to_owned()));
    }
    match libraries::nvrtc(request.nvrtc.as_deref(), environment) {
        Ok(nvrtc) => Ok(Ok(nvrtc)),
        Err(error) if request.nvrtc.is_some() => Err(error),
        Err(_) => Ok(Err("no libnvrtc is here to compile our kernels with (--nvrtc FILE names one)".to_owned())),
    }
}

/// Begins to compile our kernels for the GPU of `sm`.
fn compile(nvrtc: PathBuf, sm: u32) -> Compiling {
    std::thread::spawn(move || {
        let nvrtc = Nvrtc::open(&nvrtc)?;
        let cubin = nvrtc.compile(device::NAME, device::SOURCE, &device::OPTIONS, sm)?;
        let file = NamedTempFile::new().and_then(|mut file| file.write_all(&cubin).map(|()| file));
        file.map(|file| (file, nvrtc.version())).map_err(|error| format!("cannot write our kernels to a file: {error}"))
    })
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
    let loaded = match compiling.join().expect("compiling does not panic") {
        Ok((file, version)) => {
            supervisor.load(file.path().to_owned())?.map(|()| ComparedBy::Device { nvrtc: version, _cubin: file })
        }
        Err(why) => Err(why),
    };
    match loaded {
        Ok(by) => Ok(by),
        Err(why) if named => Err(Error::machine("our kernels cannot be used on this GPU").because(why).hint("leave out --nvrtc")),
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
    let inventory = cubin::read(&request.artifact)?;
    let manifest = manifest_beside(&request.artifact);
    let (release, sm) = (release_of(manifest.as_ref()), code_sm(manifest.as_ref(), sm));
    let (functions, patterns) = (exports(&inventory), patterns(&inventory));
    let scope = Scope { sm, functions, patterns, ranks: request.ranks.clone(), release };
    plan(request, &scope)
}

/// The functions that an artifact exports, without their prefix.
fn exports(inventory: &Inventory) -> BTreeSet<String> {
    let symbols = inventory.linkage.iter().flat_map(|linkage| &linkage.exports);
    let names = symbols.filter_map(|symbol| symbol.name.strip_prefix("__tvm_ffi_"));
    // Newer releases of TVM-FFI export a description beside each function.
    names.filter(|name| !name.starts_with('_')).map(str::to_owned).collect()
}

/// The patterns of the fusion function that the artifact's kernels name.
fn patterns(inventory: &Inventory) -> BTreeSet<i64> {
    const MARK: &str = "22AllReduceFusionPatternE";
    let kernels = inventory.images.iter().flat_map(|image| &image.kernels).map(|kernel| kernel.name.as_str());
    let codes = kernels.filter_map(|name| {
        let (_, rest) = name.split_once(MARK)?;
        rest.split_once('E')?.0.parse().ok()
    });
    codes.collect()
}

/// The one SM of the GPUs that are used.
fn sm_of(devices: &[ffi::driver::DeviceInfo], gpus: &[usize]) -> Result<u32> {
    let of = |ordinal: &usize| devices.iter().find(|device| device.ordinal == *ordinal);
    if let Some(missing) = gpus.iter().find(|ordinal| of(ordinal).is_none()) {
        return Err(Error::usage(format!("there is no GPU {missing}")).because(format!(
            "the driver shows {}: {}",
            devices.len(),
            names(devices)
        )));
    }
    let sms: BTreeSet<u32> = gpus.iter().filter_map(of).map(|device| device.sm).collect();
    match sms.into_iter().collect::<Vec<_>>()[..] {
        [sm] => Ok(sm),
        [] => Err(Error::machine("the driver shows no GPU")),
        _ => Err(Error::machine("the GPUs are of different kinds").because(names(devices)).hint("choose GPUs with --gpus 0,1")),
    }
}

/// The PCI addresses of the GPUs that are used.
fn addresses(devices: &[ffi::driver::DeviceInfo], gpus: &[usize]) -> Vec<String> {
    devices.iter().filter(|device| gpus.contains(&device.ordinal)).map(|device| device.pci.clone()).collect()
}

fn names(devices: &[ffi::driver::DeviceInfo]) -> String {
    devices.iter().map(|device| format!("{} {} (sm_{})", device.ordinal, device.name, device.sm)).collect::<Vec<_>>().join(", ")
}

/// Refuses an artifact that has no machine code for the GPU.
fn runs_on(inventory: &Inventory, sm: u32, artifact: &Path) -> Result<()> {
    let split = |target: &str| {
        let number = target.trim_start_matches("sm_");
        let suffix = number.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
        number.trim_end_matches(suffix.as_str()).parse::<u32>().ok().map(|number| (number, suffix))
    };
    let has_code = inventory
        .images
        .iter()
        .filter(|image| image.kind == Kind::Sass && !image.kernels.is_empty())
        .any(|image| split(&image.target).is_some_and(|(number, suffix)| usable(Kind::Sass, number, &suffix, sm).is_some()));
    if has_code {
        return Ok(());
    }
    let targets: BTreeSet<&str> = inventory.images.iter().map(|image| image.target.as_str()).collect();
    Err(Error::new(Exit::Fault, format!("{} has no machine code for this GPU", artifact.display()))
        .because(format!("it is for {}, and the GPU is of sm_{sm}", targets.into_iter().collect::<Vec<_>>().join(", ")))
        .hint(format!("`fi-arch build --sm {sm}` makes one that is")))
}

/// The manifest beside an artifact that lies in a store or in an environment; none where there is none for it.
fn manifest_beside(artifact: &Path) -> Option<Manifest> {
    let text = std::fs::read(artifact.with_file_name("manifest.json")).ok()?;
    let manifest: Manifest = serde_json::from_value(store::unseal_value(&text).ok()?).ok()?;
    (artifact.file_name()? == manifest.artifact.file.as_str()).then_some(manifest)
}

/// The release that the artifact was built from, where its manifest says so.
fn release_of(manifest: Option<&Manifest>) -> Option<Version> {
    manifest?.flashinfer.parse().ok()
}

/// The SM whose code an artifact for a GPU of `sm` holds: another one where it was assembled for the GPU as a test.
fn code_sm(manifest: Option<&Manifest>, sm: u32) -> u32 {
    let moved = manifest.filter(|manifest| manifest.run_on.is_some());
    moved.and_then(|manifest| target::parse(&manifest.target).ok()).map_or(sm, |target| target.sm)
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

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::io("resolve", path, error))
}
