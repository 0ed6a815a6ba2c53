//! A worker's side of the GPU: the ranks that it hosts, their memory, their graph, and its replays.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::arrays::{Array, byte_poison, guard, input_bytes, input_sizes, is_poison, output_sizes};
use super::cases::{Case, REPLAYS, What};
use super::compare::{self, Changed, Fails, Found};
use super::device::{Checker, Host, Kernels};
use super::fault::{Planted, planted};
use super::ffi::driver::{self, Code, Context, CudaError, Driver, Event, Executable, IpcHandle, Memory, PeerMemory, Stream};
use super::ffi::tvm::{Argument, Element, Module, Place, Raised, Tensor};
use super::inputs::{self, Inputs};
use super::layout::{self, Workspace};
use super::numbers::{DType, Floats};
use super::protocol::{Clock, Launch, Outcome, Unknown, hex, unhex};
use super::reference::{EPS, FP4_SCALE, FP8_SCALE, Outputs, Sizes};
use super::signature::{self, Values};
use crate::tables::calls::{Form, Quant, calls};

/// What a Lamport buffer holds before the artifact initializes it.
const STALE: u16 = 0x5a5a;
/// Bytes that each rank writes to each other in the probe.
const PROBE_SLOT: usize = 1 << 16;

/// Why a case could not be carried out.
#[derive(Debug)]
pub enum Trouble {
    /// It cannot be run here.
    Skip(String),
    /// The graph, or what an initialization left, is wrong; the GPU is well.
    Wrong(String),
    /// Host and GPU do not judge alike.
    Ours(String),
    /// An error was raised.
    Failed(String),
    /// The GPU did not finish in time.
    Hung { replay: u32, standing: Vec<String> },
}

impl From<CudaError> for Trouble {
    fn from(error: CudaError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<Raised> for Trouble {
    fn from(raised: Raised) -> Self {
        Self::Failed(format!("the artifact raised {raised}"))
    }
}

/// The artifact on one GPU.
#[derive(Debug)]
pub struct Stage {
    pub device: driver::DeviceInfo,
    pub devices: Vec<driver::DeviceInfo>,
    pub driver: (u32, u32),
    pub(super) context: Context,
    module: Module,
    forms: BTreeMap<&'static str, &'static Form>,
    pub unknown: Vec<Unknown>,
    /// What makes inputs and checks outputs on the GPU; the host does both without.
    kernels: Option<Kernels>,
    /// The stream from which the others fork.
    pub(super) origin: Stream,
    deadline: Duration,
    /// Bytes of the GPU that nobody had taken when the artifact was loaded.
    pub free_bytes: u64,
    /// What the hosted ranks share, each one allocation for the life of the worker.
    shared: BTreeMap<usize, Memory>,
    /// What the ranks of other workers share.
    peers: BTreeMap<usize, PeerMemory>,
}

/// Why a stage could not be opened: the machine's fault, or the artifact's.
#[derive(Debug)]
pub enum Unopened {
    Lacks(String),
    Broken(String),
}

impl Stage {
    pub fn open(
        artifact: &Path,
        tvm_ffi: &Path,
        cudart: Option<&Path>,
        device: usize,
        deadline: Duration,
    ) -> Result<Self, Unopened> {
        let lacks = |error: CudaError| Unopened::Lacks(error.to_string());
        let driver = Driver::open().map_err(Unopened::Lacks)?;
        let devices = driver.devices().map_err(lacks)?;
        let Some(info) = devices.get(device).cloned() else {
            return Err(Unopened::Lacks(format!("there is no GPU {device}; the driver shows {}", devices.len())));
        };
        let context = Context::open(driver, device).map_err(lacks)?;
        let module = Module::open(cudart, tvm_ffi, artifact).map_err(Unopened::Broken)?;
        let mut forms = BTreeMap::new();
        let mut unknown = Vec::new();
        for function in calls().functions.iter().filter(|function| module.has(&function.name)) {
            match signature::form_in(&module, function) {
                Ok(form) => _ = forms.insert(function.name.as_str(), form),
                Err(why) => unknown.push(Unknown { function: function.name.clone(), why }),
            }
        }
        let origin = context.stream().map_err(lacks)?;
        let driver = driver.version().map_err(lacks)?;
        let free_bytes = context.free_bytes().map_err(lacks)?;
        let (shared, peers) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self {
            device: info,
            devices,
            driver,
            context,
            module,
            forms,
            unknown,
            kernels: None,
            origin,
            deadline,
            free_bytes,
            shared,
            peers,
        })
    }

    /// Loads the kernels that make inputs and check outputs.
    pub fn load(&mut self, cubin: &Path) -> Result<(), Trouble> {
        self.kernels = Some(Kernels::of(&self.code(cubin)?).map_err(|error| Trouble::Skip(error.to_string()))?);
        Ok(())
    }

    /// Kernels of ours, from the file that they were compiled to.
    pub(super) fn code(&self, cubin: &Path) -> Result<Code, Trouble> {
        let no = |why: String| Trouble::Skip(format!("our kernels cannot be loaded: {why}"));
        let image = std::fs::read(cubin).map_err(|error| no(format!("{}: {error}", cubin.display())))?;
        self.context.load(&image).map_err(|error| no(error.to_string()))
    }

    /// What a hosted rank shares with the others; `bytes` are the same in every call.
    pub(super) fn shared_of(&mut self, rank: usize, bytes: usize) -> Result<Memory, Trouble> {
        if !self.shared.contains_key(&rank) {
            self.shared.insert(rank, self.context.alloc(bytes)?);
        }
        Ok(self.shared[&rank].clone())
    }

    /// The IPC handle of what a hosted rank shares.
    pub fn share(&mut self, rank: usize, bytes: usize) -> Result<String, Trouble> {
        Ok(hex(&self.shared_of(rank, bytes)?.ipc_handle()?.0))
    }

    /// Maps what the ranks of other workers share, and says what cannot be mapped. What is mapped already stays.
    pub fn map(&mut self, handles: &[String]) -> Result<Vec<String>, Trouble> {
        let mut faults = Vec::new();
        for (other, handle) in handles.iter().enumerate() {
            if self.shared.contains_key(&other) || self.peers.contains_key(&other) {
                continue;
            }
            let raw = unhex(handle).ok_or_else(|| Trouble::Failed("a handle is damaged".to_owned()))?;
            match self.context.open_peer(&IpcHandle(raw)) {
                Ok(peer) => _ = self.peers.insert(other, peer),
                Err(error) => faults.push(format!("rank {} cannot map the memory of rank {other} ({error})", self.own_rank())),
            }
        }
        Ok(faults)
    }

    /// Lets go of what the ranks of other workers share.
    pub fn unmap(&mut self) {
        self.peers.clear();
    }

    /// The rank of a worker that hosts one.
    fn own_rank(&self) -> usize {
        self.shared.keys().next().copied().unwrap_or(0)
    }

    /// The address of what a rank shares.
    pub(super) fn address_of(&self, rank: usize) -> Option<u64> {
        self.shared.get(&rank).map(Memory::address).or_else(|| self.peers.get(&rank).map(PeerMemory::address))
    }

    pub fn tvm_ffi_version(&self) -> Option<String> {
        self.module.tvm_ffi_version()
    }

    /// Calls a function of the artifact on a stream.
    pub(super) fn call(&self, function: &'static str, values: &Values, stream: &Stream) -> Result<(), Trouble> {
        let form = self.forms.get(function).ok_or_else(|| {
            let why = self.unknown.iter().find(|unknown| unknown.function == function);
            Trouble::Skip(why.map_or_else(|| format!("the artifact has no {function}"), |unknown| unknown.why.clone()))
        })?;
        let arguments = signature::bind(form, values).map_err(|why| Trouble::Skip(format!("{function}: {why}")))?;
        self.module.set_stream(self.device.ordinal, stream.handle())?;
        Ok(self.module.call(function, &arguments)?)
    }

    /// Waits until a stream has nothing left to do.
    pub(super) fn finish(&self, stream: &Stream) -> Result<(), Waited> {
        self.wait_until(|| stream.is_done())
    }

    fn wait_until(&self, is_so: impl Fn() -> Result<bool, CudaError>) -> Result<(), Waited> {
        let until = Instant::now() + self.deadline;
        let mut pause = Duration::from_micros(5);
        loop {
            if is_so().map_err(Waited::Failed)? {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(Waited::TooLong);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    pub(super) fn tensor(&self, address: u64, element: Element, shape: &[usize]) -> Argument {
        let shape = shape.iter().map(|size| *size as i64).collect();
        Argument::Tensor(Tensor { address, place: Place::Gpu(self.device.ordinal), element, shape })
    }
}

pub(super) enum Waited {
    TooLong,
    Failed(CudaError),
}

impl Waited {
    /// What it means that the GPU was waited for in vain in a replay, counted from 0. `standing`: where each hosted rank stands.
    pub(super) fn told(self, replay: u32, standing: impl FnOnce() -> Vec<String>) -> Trouble {
        match self {
            Self::Failed(error) => Trouble::Failed(error.to_string()),
            Self::TooLong => Trouble::Hung { replay, standing: standing() },
        }
    }
}

/// What of a workspace is the same for every call.
impl Stage {
    /// The addresses of all ranks' buffers, by rank and buffer.
    pub(super) fn addresses(&self, workspace: &Workspace, ranks: usize) -> Result<Vec<Vec<u64>>, Trouble> {
        let of = |rank: usize| {
            let base =
                self.address_of(rank).ok_or_else(|| Trouble::Failed(format!("the memory of rank {rank} is not mapped")))?;
            Ok(workspace.offsets().map(|offset| base + offset as u64).collect())
        };
        (0..ranks).map(of).collect()
    }

    /// The counters of a rank's fused kernels, and its table of pointers.
    pub(super) fn fusion_table(&self, workspace: &Workspace, addresses: &[Vec<u64>]) -> Result<(Memory, Memory), Trouble> {
        let words: Vec<u8> = layout::counters(workspace.part).iter().flat_map(|word| word.to_le_bytes()).collect();
        let counters = self.context.alloc(words.len())?;
        counters.write(&words, &self.origin)?;
        let pointers = layout::fusion_pointers(addresses, counters.address());
        let pointers: Vec<u8> = pointers.iter().flat_map(|pointer| pointer.to_le_bytes()).collect();
        let table = self.context.alloc(pointers.len())?;
        table.write(&pointers, &self.origin)?;
        Ok((counters, table))
    }

    /// Brings a rank's buffers into the state before the first call: has the artifact fill the Lamport buffers with −0.0, and looks
    /// whether it did (at each of them as a `whole`, or at its beginning).
    pub(super) fn initialize(
        &self,
        buffers: &[Memory],
        workspace: &Workspace,
        dtype: DType,
        whole: bool,
        hung: &dyn Fn(Waited) -> Trouble,
    ) -> Result<(), Trouble> {
        for (memory, lamport) in buffers.iter().zip(&workspace.lamport) {
            if *lamport { memory.fill16(STALE, &self.origin)? } else { memory.fill8(0, &self.origin)? }
        }
        let lamport: Vec<&Memory> =
            buffers.iter().zip(&workspace.lamport).filter(|(_, is)| **is).map(|(memory, _)| memory).collect();
        let address = |memory: &Memory| Argument::Int(memory.address() as i64);
        match lamport[..] {
            [] => {}
            [one] => {
                let size = Argument::Int((one.bytes() / dtype.size()) as i64);
                let values = Values::from([("buffer_ptr", address(one)), ("size", size), ("dtype", Argument::DataType(dtype))]);
                self.call("trtllm_lamport_initialize", &values, &self.origin)?;
            }
            [one, two, three] => {
                let values = Values::from([
                    ("buffer_0_ptr", address(one)),
                    ("buffer_1_ptr", address(two)),
                    ("buffer_2_ptr", address(three)),
                    ("size", Argument::Int(one.bytes() as i64)),
                    ("dtype", Argument::DataType(dtype)),
                ]);
                self.call("trtllm_lamport_initialize_all", &values, &self.origin)?;
            }
            _ => unreachable!("workspaces have none, one or three Lamport buffers"),
        }
        self.finish(&self.origin).map_err(hung)?;
        for memory in lamport {
            let mut held = vec![0; if whole { memory.bytes() } else { memory.bytes().min(4096) }];
            memory.read(&mut held)?;
            let left = Floats::from_bytes(dtype, held).words().filter(|word| *word != dtype.negative_zero()).count();
            if left > 0 {
                return Err(Trouble::Wrong(format!("the Lamport initialization left {left} elements as they were")));
            }
        }
        Ok(())
    }
}

/// The buffers of a workspace that lie behind each other in what a rank shares as a `whole`.
pub(super) fn buffers(whole: &Memory, workspace: &Workspace) -> Vec<Memory> {
    workspace.offsets().zip(&workspace.buffers).map(|(offset, bytes)| whole.part(offset, *bytes)).collect()
}

/// How a name stands in mangled ones: the length of each part is before it, so that no longer name is taken for this one.
pub(super) fn mangled(name: &str) -> String {
    format!("{}{name}", name.len())
}

/// Refuses a graph, of which `kernels` are the names and how often each stands there, that does not hold `part` so often.
pub(super) fn must_hold<'k>(
    kernels: impl Iterator<Item = (&'k str, usize)> + Clone,
    part: &str,
    expected: usize,
) -> Result<(), Trouble> {
    let count: usize = kernels.clone().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum();
    if count == expected {
        return Ok(());
    }
    let held: Vec<_> = kernels.map(|(name, count)| format!("{count} × {name}")).collect();
    let wanted = part.trim_start_matches(|c: char| c.is_ascii_digit());
    Err(Trouble::Wrong(format!("the graph holds {} where {expected} × {wanted} are expected", held.join(", "))))
}

/// One case on a stage, from its memory to its last replay.
#[derive(Debug)]
pub struct Play {
    case: Case,
    number: u64,
    workspace: Workspace,
    sizes: Sizes,
    ranks: Vec<Rank>,
    graph: Option<Executable>,
    outcome: Outcome,
    replay: u32,
    /// Replays go on, and are compared, after one with wrong numbers.
    past_wrong: bool,
    /// Inputs that come back, where there are more replays than sets of them and the host makes them.
    sets: Vec<Set>,
    marks: Vec<Marks>,
    /// The longest time from the first to the last mark of a replay, in seconds.
    slowest_s: f64,
    /// Makes inputs and checks outputs on the GPU, where it can.
    checker: Option<Checker>,
}

/// Events around the steps of a replay that is under way: before its inputs are made, before and behind the artifact's kernels,
/// and when it has been checked.
#[derive(Debug)]
struct Marks {
    begin: Event,
    launch: Event,
    done: Event,
    end: Event,
}

impl Marks {
    fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self { begin: context.event()?, launch: context.event()?, done: context.event()?, end: context.event()? })
    }
}

/// The most replays that are under way at once, where the GPU makes inputs and checks: nobody waits for the host in between.
const UNDER_WAY: u32 = 8;

/// The inputs of a replay: by call and rank.
#[derive(Debug)]
struct Set {
    inputs: Vec<Vec<Inputs>>,
    /// What the hosted ranks once made of them and was right: by rank and call. The kernels add in a fixed order, so it comes out
    /// the same again; what does not is held against the reference once more.
    right: Option<Vec<Vec<Outputs>>>,
}

/// The most sets of inputs of a case, and the most bytes that they may take.
const SETS: u32 = REPLAYS;
const SETS_BYTES: usize = 1 << 30;

/// A hosted rank.
#[derive(Debug)]
struct Rank {
    rank: usize,
    stream: Stream,
    /// What the other ranks read and write.
    shared: Vec<Memory>,
    /// The fusion kernels' counters, and their table of pointers.
    counters: Option<Memory>,
    table: Option<Memory>,
    /// `trtllm_custom_all_reduce` reads its tables on the host: one a buffer.
    host_tables: Vec<Vec<i64>>,
    scale_factor: Option<Memory>,
    arrays: BTreeMap<Array, Memory>,
}

impl Play {
    /// Allocates and initializes what the hosted ranks need.
    pub fn begin(
        stage: &mut Stage,
        number: u64,
        case: &Case,
        ranks: &[usize],
        shared_bytes: usize,
        past_wrong: bool,
    ) -> Result<Self, Trouble> {
        let mut clock = Clock::start();
        let workspace = case.workspace();
        let sizes = Sizes::of(case);
        let mut hosted = Vec::new();
        for &rank in ranks {
            let whole = stage.shared_of(rank, shared_bytes)?;
            hosted.push(Rank::new(stage, case, &whole, &workspace, &sizes, rank)?);
        }
        let ranks = hosted;
        let under_way = if case.in_step() { 1 } else { UNDER_WAY.min(case.replays) };
        let marks = (0..under_way).map(|_| Marks::new(&stage.context)).collect::<Result<_, _>>()?;
        let hosts: Vec<Host> = ranks.iter().map(|rank| Host::new(rank.rank, &rank.arrays)).collect();
        let checks = stage.kernels.is_some() && !matches!(case.what, What::Initialize | What::InitializeAll);
        let checker =
            checks.then(|| Checker::new(&stage.context, case, &sizes, &hosts, under_way as usize, &stage.origin)).transpose()?;
        let mut play = Self {
            case: case.clone(),
            number,
            workspace,
            sizes,
            ranks,
            graph: None,
            outcome: Outcome::default(),
            replay: 0,
            past_wrong,
            sets: Vec::new(),
            marks,
            slowest_s: 0.0,
            checker,
        };
        let whole = matches!(play.case.what, What::Initialize | What::InitializeAll);
        for rank in &play.ranks {
            stage.initialize(&rank.shared, &play.workspace, play.case.dtype, whole, &|waited| play.hung(0, waited))?;
        }
        play.outcome.spent.setting_up = clock.lap();
        Ok(play)
    }

    /// Makes the graph, once the buffers of all ranks are as the first call wants them.
    pub fn connect(&mut self, stage: &Stage) -> Result<Vec<Launch>, Trouble> {
        if matches!(self.case.what, What::Initialize | What::InitializeAll) {
            return Ok(Vec::new());
        }
        let mut clock = Clock::start();
        let addresses = stage.addresses(&self.workspace, self.case.ranks)?;
        for rank in &mut self.ranks {
            rank.tables(stage, &self.case, &self.workspace, &addresses)?;
        }
        let launches = self.capture(stage)?;
        self.outcome.spent.setting_up += clock.lap();
        Ok(launches)
    }

    /// One graph in which each rank's calls follow each other and no rank waits for another.
    fn capture(&mut self, stage: &Stage) -> Result<Vec<Launch>, Trouble> {
        let (fork, join) = (stage.context.event()?, stage.context.event()?);
        let graph = stage.origin.capture(|| -> Result<(), Trouble> {
            fork.record(&stage.origin)?;
            for rank in &self.ranks {
                rank.stream.wait(&fork)?;
                for call in 0..self.case.calls() {
                    stage.call(self.case.what.function(), &self.values(stage, rank, call), &rank.stream)?;
                }
                join.record(&rank.stream)?;
                stage.origin.wait(&join)?;
            }
            Ok(())
        })?;
        let launches = launches(graph.kernels()?);
        self.check_kernels(&launches)?;
        self.graph = Some(graph.instantiate()?);
        Ok(launches.into_iter().map(|(launch, _)| launch).collect())
    }

    /// The graph must hold the kernels that the case is about, and a GPU must hold enough of them at once.
    fn check_kernels(&self, launches: &[(Launch, u32)]) -> Result<(), Trouble> {
        let wanted = self.case.kernels();
        let expected = self.case.calls() * self.ranks.len();
        for name in wanted {
            must_hold(launches.iter().map(|(launch, _)| (launch.kernel.as_str(), launch.count)), &mangled(name), expected)?;
        }
        // Hosted ranks share the GPU: all but one of them, and a cluster of the last, must be on it at once.
        let others = (self.ranks.len() - 1) as u32;
        let ahead = if self.case.pdl && self.case.triggers_early() { 2 } else { 1 };
        for (launch, resident) in launches {
            let clusters = launch.grid / launch.cluster;
            let needed = others * clusters * ahead + 1;
            if needed > *resident {
                return Err(Trouble::Skip(format!(
                    "its ranks cannot all make progress on one GPU: {needed} clusters of {} × {} threads must be on it at once, and it holds {resident}",
                    launch.cluster, launch.block
                )));
            }
        }
        Ok(())
    }

    /// Runs the next replay, or the next ones; true when the last was among them.
    pub fn replay(&mut self, stage: &Stage) -> Result<bool, Trouble> {
        if self.graph.is_none() {
            // The initializations were looked at before.
            self.outcome.right = 1;
            return Ok(true);
        }
        match (self.checker.take(), &stage.kernels) {
            (Some(checker), Some(kernels)) => {
                let replayed = self.replay_on_device(stage, kernels, &checker);
                self.checker = Some(checker);
                replayed?;
            }
            _ => self.replay_on_host(stage)?,
        }
        // Where other workers hold ranks, they would wait for ever for one that stops.
        let alone = self.ranks.len() == self.case.ranks;
        Ok(self.replay == self.case.replays || (alone && self.outcome.wrong.is_some() && !self.past_wrong))
    }

    /// One replay, whose inputs the host makes and whose outputs it checks.
    fn replay_on_host(&mut self, stage: &Stage) -> Result<(), Trouble> {
        let mut clock = Clock::start();
        let at = self.prepare();
        self.outcome.spent.making_inputs += clock.lap();
        for rank in &self.ranks {
            rank.write_inputs(&self.sets[at].inputs, &stage.origin)?;
            rank.poison_outputs(&self.case, self.replay, &stage.origin)?;
        }
        self.launch(stage, 0)?;
        self.outcome.spent.copying += clock.lap();
        stage.finish(&stage.origin).map_err(|waited| self.hung(self.replay, waited))?;
        self.outcome.spent.artifact += clock.lap();
        self.take_time(0)?;
        if self.outcome.wrong.is_none() || self.past_wrong {
            let (outputs, mut changed) = self.read_outputs()?;
            self.outcome.spent.copying += clock.lap();
            let last = self.replay + 1 == self.case.replays;
            let again = self.sets[at].right.as_ref() == Some(&outputs) && changed.is_none() && !last;
            if again {
                self.outcome.right += 1;
            } else {
                let all = &self.sets[at].inputs;
                if last {
                    changed = self.changed_input(all)?.or(changed);
                }
                let rows = compare::on_host(&self.case, all, &self.hosted().collect::<Vec<_>>(), &outputs);
                self.settle(&Found { rows, changed });
                if self.case.replays > SETS && self.outcome.wrong.is_none() {
                    self.sets[at].right = Some(outputs);
                }
            }
            self.outcome.spent.checking += clock.lap();
        }
        self.replay += 1;
        Ok(())
    }

    /// The next replays, as many as can be under way at once: the GPU makes the inputs and checks the outputs itself. The first
    /// one goes alone, and the host does all of it once more.
    fn replay_on_device(&mut self, stage: &Stage, kernels: &Kernels, checker: &Checker) -> Result<(), Trouble> {
        let first = self.replay == 0;
        let left = self.case.replays - self.replay;
        // The supervisor hears of a worker between batches alone, and gives it no longer than a replay may take.
        let fitting = (stage.deadline.as_secs_f64() / 2.0 / self.slowest_s.max(1e-9)) as u32;
        let count = if first { 1 } else { left.min(self.marks.len() as u32).min(fitting.max(1)) };
        let mut clock = Clock::start();
        checker.forget(&stage.origin)?;
        for slot in 0..count {
            let replay = self.replay + slot;
            let mut seed = inputs::seed(self.number, replay);
            if planted() == Some(Planted::Seed) {
                seed = !seed;
            }
            self.marks[slot as usize].begin.record(&stage.origin)?;
            checker.make(kernels, seed, &stage.origin)?;
            for rank in &self.ranks {
                rank.poison_outputs(&self.case, replay, &stage.origin)?;
            }
            self.launch(stage, slot as usize)?;
            checker.check(kernels, seed, slot as usize, &stage.origin)?;
            self.marks[slot as usize].end.record(&stage.origin)?;
        }
        self.outcome.spent.copying += clock.lap();
        if first {
            self.prepare();
            self.outcome.spent.making_inputs += clock.lap();
        }
        for slot in 0..count as usize {
            let end = &self.marks[slot].end;
            stage.wait_until(|| end.is_past()).map_err(|waited| self.hung(self.replay + slot as u32, waited))?;
            self.take_time(slot)?;
            let Marks { begin, launch, done, end } = &self.marks[slot];
            let seconds = |from: &Event, to: &Event| to.micros_since(from).map(|micros| micros / 1e6);
            let spent = &mut self.outcome.spent;
            spent.making_inputs += seconds(begin, launch)?;
            spent.artifact += seconds(launch, done)?;
            spent.checking += seconds(done, end)?;
            self.slowest_s = self.slowest_s.max(seconds(begin, end)?);
        }
        clock.lap();
        let found = checker.found(count as usize)?;
        self.outcome.spent.copying += clock.lap();
        if first {
            self.check_checker(&found[0])?;
            self.outcome.spent.checking += clock.lap();
        }
        for found in &found {
            if self.outcome.wrong.is_none() || self.past_wrong {
                self.settle(found);
            }
            self.replay += 1;
        }
        Ok(())
    }

    /// Does on the host what the GPU did in the first replay; what it `found` must be the same.
    fn check_checker(&mut self, found: &Found) -> Result<(), Trouble> {
        let (outputs, behind) = self.read_outputs()?;
        let all = &self.sets[0].inputs;
        let hosted: Vec<usize> = self.hosted().collect();
        let changed = self.changed_input(all)?.into_iter().chain(behind).min_by_key(|one| {
            let at = hosted.iter().position(|rank| *rank == one.rank);
            (at, one.call, one.array)
        });
        let on_host = Found { rows: compare::on_host(&self.case, all, &hosted, &outputs), changed };
        self.sets.clear();
        match on_host.difference(found) {
            None => Ok(()),
            Some(what) => Err(Trouble::Ours(format!("{}: host and GPU: {what}", self.case))),
        }
    }

    /// Puts the graph on the stream, between two marks.
    fn launch(&self, stage: &Stage, slot: usize) -> Result<(), Trouble> {
        let graph = self.graph.as_ref().expect("a case with a graph is replayed");
        self.marks[slot].launch.record(&stage.origin)?;
        stage.origin.launch(graph)?;
        self.marks[slot].done.record(&stage.origin)?;
        Ok(())
    }

    /// Notes how long a replay that has ended took.
    fn take_time(&mut self, slot: usize) -> Result<(), Trouble> {
        let Marks { launch, done, .. } = &self.marks[slot];
        self.outcome.micros.push(done.micros_since(launch)? / self.case.calls() as f64);
        Ok(())
    }

    /// Notes what was found in this replay.
    fn settle(&mut self, found: &Found) {
        match found.verdict(self.case.hidden) {
            Ok(distance) => {
                self.outcome.right += 1;
                self.outcome.error = self.outcome.error.max(distance.relative);
                self.outcome.of_bound = self.outcome.of_bound.max(distance.of_bound);
            }
            Err(Fails { what, beyond_a_race }) => {
                self.outcome.beyond_a_race |= beyond_a_race;
                self.outcome.wrong.get_or_insert_with(|| format!("replay {}: {what}", self.replay + 1));
            }
        }
    }

    pub fn replays_done(&self) -> u32 {
        self.replay
    }

    pub fn hosted(&self) -> impl Iterator<Item = usize> + '_ {
        self.ranks.iter().map(|rank| rank.rank)
    }

    pub fn case(&self) -> &Case {
        &self.case
    }

    /// What came of it, after so many seconds of `waiting` for orders.
    pub fn outcome(&mut self, stage: &Stage, waiting: f64) -> Result<Outcome, Trouble> {
        self.outcome.spent.waiting = waiting;
        let (allocated_bytes, free_bytes) = (stage.context.most_allocated(), stage.context.free_bytes()?);
        Ok(Outcome { allocated_bytes, free_bytes, ..std::mem::take(&mut self.outcome) })
    }

    /// The inputs of this replay are made, or come back; which of the sets they are.
    fn prepare(&mut self) -> usize {
        if let Some(first) = self.sets.first() {
            let bytes: usize = first.inputs.iter().flatten().flat_map(input_bytes).map(|(_, bytes)| bytes.len()).sum();
            let most = (SETS_BYTES / bytes.max(1)).clamp(2, SETS as usize);
            if self.case.replays <= SETS {
                // Each is used once.
                self.sets.clear();
            } else if self.sets.len() == most {
                return self.replay as usize % most;
            }
        }
        let (case, seed) = (&self.case, inputs::seed(self.number, self.replay));
        let hosted: Vec<usize> = self.hosted().collect();
        let inputs = inputs::of_all(case, seed, case.calls(), &hosted);
        self.sets.push(Set { inputs, right: None });
        self.sets.len() - 1
    }

    /// What every hosted rank's calls wrote, by rank and call, and the first of them that wrote behind an output.
    fn read_outputs(&self) -> Result<(Vec<Vec<Outputs>>, Option<Changed>), Trouble> {
        let mut first = None;
        let mut all = Vec::new();
        for rank in &self.ranks {
            let (outputs, changed) = rank.read_outputs(&self.case, &self.sizes)?;
            first = first.or(changed);
            all.push(outputs);
        }
        Ok((all, first))
    }

    /// The first input of a hosted rank that is no longer what was written.
    fn changed_input(&self, all: &[Vec<Inputs>]) -> Result<Option<Changed>, Trouble> {
        for rank in &self.ranks {
            if let Some(changed) = rank.changed_input(&self.case, all)? {
                return Ok(Some(changed));
            }
        }
        Ok(None)
    }

    /// What it means that the GPU was waited for in vain in a replay, counted from 0.
    fn hung(&self, replay: u32, waited: Waited) -> Trouble {
        waited.told(replay, || self.ranks.iter().map(|rank| rank.standing()).collect())
    }

    /// The values of one call, by the names of the tables.
    fn values(&self, stage: &Stage, rank: &Rank, call: usize) -> Values {
        let case = &self.case;
        let (tokens, hidden) = (case.tokens, case.hidden);
        let float = Element::Float(case.dtype);
        let mut values = told(case, rank.rank);
        let mut put = |name, array, element: Element, shape: &[usize]| {
            if let Some(memory) = rank.arrays.get(&array) {
                let stride = memory.bytes() / case.calls();
                let is_output = matches!(array, Array::SumOut | Array::ResidualOut | Array::NormOut | Array::QuantOut);
                let call = if is_output && call == 0 && planted() == Some(Planted::Unwritten) { case.calls() - 1 } else { call };
                values.insert(name, stage.tensor(memory.address() + (call * stride) as u64, element, shape));
            }
        };
        let matrix = [tokens, hidden];
        put("residual_in", Array::Residual, float, &matrix);
        put("rms_gamma", Array::Gamma, float, &[hidden]);
        put("rms_gamma_pre", Array::GammaPre, float, &[hidden]);
        put("bias", Array::Bias, float, &[hidden]);
        put("allreduce_out", Array::SumOut, float, &matrix);
        put("residual_out", Array::ResidualOut, float, &matrix);
        put("norm_out", Array::NormOut, float, &matrix);
        put(
            "quant_out",
            Array::QuantOut,
            Element::U8,
            &[tokens, if case.what.quant() == Some(Quant::Fp4) { hidden / 2 } else { hidden }],
        );
        put("scale_out", Array::ScalesOut, Element::U8, &[self.sizes.scales]);
        match case.what {
            What::Fusion { .. } => put("allreduce_in", Array::Main, float, &matrix),
            What::Custom { path, .. } => {
                put("in", Array::Main, float, &matrix);
                put("intermediate", Array::ResidualOut, float, &matrix);
                put("out", if path.norm() { Array::NormOut } else { Array::SumOut }, float, &matrix);
            }
            What::MoeReduction { experts, .. } => {
                put("expert_tokens", Array::Main, float, &[experts, tokens, hidden]);
                put("expert_scales", Array::Scales, Element::Float(DType::Fp32), &[experts, tokens]);
                put("token_input", Array::Shared, float, &matrix);
            }
            What::MoeFinalize { top_k, .. } => {
                put("allreduce_in", Array::Main, float, &[top_k * tokens, hidden]);
                put("expert_rows", Array::Rows, Element::I32, &[tokens, top_k]);
                put("expert_scales", Array::Scales, float, &[tokens, top_k]);
                put("shared_expert", Array::Shared, float, &matrix);
            }
            What::Initialize | What::InitializeAll => {}
        }
        if rank.arrays.contains_key(&Array::Gamma) {
            values.insert("rms_eps", Argument::Float(EPS));
        }
        if let Some(table) = &rank.table {
            let length = case.ranks * 3 + 1;
            values.insert("workspace_ptrs", stage.tensor(table.address(), Element::I64, &[length]));
        }
        if let Some(factor) = &rank.scale_factor {
            values.insert("scale_factor", stage.tensor(factor.address(), Element::Float(DType::Fp32), &[1]));
        }
        if matches!(case.what, What::Custom { .. }) {
            self.put_buffers(rank, call, &mut values);
        }
        values
    }

    /// The buffers of FlashInfer's older all-reduce, and the flag that stands for one call.
    fn put_buffers(&self, rank: &Rank, call: usize, values: &mut Values) {
        // Zero means a released barrier.
        let flag = call + 1;
        values.insert("flag_value", Argument::Int(flag as i64));
        let names = [flag % 2, 2, 3, 4, 5, 6].into_iter().zip([
            "peer_comm_buffer_ptrs",
            "peer_barrier_ptrs_in",
            "peer_barrier_ptrs_out",
            "lamport_ptrs_0",
            "lamport_ptrs_1",
            "lamport_ptrs_2",
        ]);
        for (buffer, name) in names {
            let table = &rank.host_tables[buffer];
            let shape = vec![table.len() as i64];
            let address = table.as_ptr() as u64;
            values.insert(name, Argument::Tensor(Tensor { address, place: Place::Host, element: Element::I64, shape }));
        }
    }
}

/// What every call of a case is told beside its arrays, by the names of the tables. What a test plants is told instead.
pub(super) fn told(case: &Case, rank: usize) -> Values {
    let fusion_with = |fault| planted() == Some(fault) && matches!(case.what, What::Fusion { .. });
    let few = fusion_with(Planted::FewTokens) && case.oneshot() == Some(false);
    let tokens = if few { case.ranks } else { case.tokens };
    let hidden = if fusion_with(Planted::Stride) { case.hidden - 256 } else { case.hidden };
    let mut values = Values::from([
        ("world_size", Argument::Int(case.ranks as i64)),
        ("world_rank", Argument::Int(rank as i64)),
        ("token_num", Argument::Int(tokens as i64)),
        ("hidden_dim", Argument::Int(hidden as i64)),
        ("launch_with_pdl", Argument::Bool(case.pdl)),
    ]);
    match case.what {
        What::Fusion { pattern, oneshot, fp32_acc, trigger_at_end, scales } => {
            values.insert("pattern_code", Argument::Int(pattern));
            values.insert("use_oneshot", Argument::Bool(oneshot));
            values.insert("fp32_acc", Argument::Bool(fp32_acc));
            values.insert("trigger_completion_at_end", Argument::Bool(trigger_at_end));
            if matches!(case.what.quant(), Some(Quant::Fp4 | Quant::Mxfp8)) {
                values.insert("layout_code", Argument::Int(scales.code()));
            }
            if case.what.quant() == Some(Quant::GroupFp8) {
                values.insert("block_quant_group_size", Argument::Int(case.group() as i64));
            }
        }
        What::Custom { path, .. } => {
            values.insert("fusion_op_code", Argument::Int(path.operation()));
            values.insert("strategy_code", Argument::Int(path.strategy()));
            values.insert("config_code", Argument::Int(path.config()));
        }
        What::MoeReduction { experts, .. } => {
            values.insert("num_experts", Argument::Int(experts as i64));
            values.insert("scale_factor_value", Argument::Float(f64::from(FP4_SCALE)));
            values.insert("layout_code", Argument::Int(layout::Scales::Swizzled.code()));
        }
        What::MoeFinalize { .. } | What::Initialize | What::InitializeAll => {}
    }
    values
}

/// Kernels that are alike, counted; with how many clusters of each a GPU can hold.
fn launches(kernels: Vec<driver::Kernel>) -> Vec<(Launch, u32)> {
    let mut found: Vec<(Launch, u32)> = Vec::new();
    for kernel in kernels {
        let driver::Kernel { name, grid, block, cluster, resident_clusters } = kernel;
        let same = |(launch, _): &&mut (Launch, u32)| {
            (&launch.kernel, launch.grid, launch.block, launch.cluster) == (&name, grid, block, cluster)
        };
        match found.iter_mut().find(same) {
            Some((launch, _)) => launch.count += 1,
            None => found.push((Launch { kernel: name, grid, block, cluster, count: 1 }, resident_clusters)),
        }
    }
    found
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skip(why) | Self::Wrong(why) | Self::Ours(why) | Self::Failed(why) => f.write_str(why),
            Self::Hung { replay, standing } => write!(f, "hung in replay {}: {}", replay + 1, standing.join("; ")),
        }
    }
}

impl Rank {
    /// Its buffers lie in what it shares as a `whole`.
    fn new(
        stage: &Stage,
        case: &Case,
        whole: &Memory,
        workspace: &Workspace,
        sizes: &Sizes,
        rank: usize,
    ) -> Result<Self, Trouble> {
        let shared = buffers(whole, workspace);
        let context = &stage.context;
        let mut arrays = BTreeMap::new();
        for (array, bytes) in input_sizes(case) {
            if bytes > 0 {
                arrays.insert(array, context.alloc(bytes * case.calls())?);
            }
        }
        for (array, bytes) in output_sizes(case, sizes) {
            if bytes > 0 {
                arrays.insert(array, context.alloc((bytes + guard(case, array)) * case.calls())?);
            }
        }
        let scale_factor = match case.what {
            What::Fusion { .. } if case.what.quant().is_some() => {
                let memory = context.alloc(16)?;
                let factor = if case.what.quant() == Some(Quant::Fp4) { FP4_SCALE } else { FP8_SCALE };
                memory.write(&factor.to_le_bytes(), &stage.origin)?;
                Some(memory)
            }
            _ => None,
        };
        let stream = context.stream()?;
        Ok(Self { rank, stream, shared, counters: None, table: None, host_tables: Vec::new(), scale_factor, arrays })
    }

    /// Writes the tables of pointers once the addresses of all ranks are known.
    fn tables(&mut self, stage: &Stage, case: &Case, workspace: &Workspace, addresses: &[Vec<u64>]) -> Result<(), Trouble> {
        if matches!(case.what, What::Custom { .. }) {
            let table = |buffer: usize| addresses.iter().map(|rank| rank[buffer] as i64).collect();
            self.host_tables = (0..workspace.buffers.len()).map(table).collect();
            return Ok(());
        }
        let (counters, table) = stage.fusion_table(workspace, addresses)?;
        self.counters = Some(counters);
        self.table = Some(table);
        Ok(())
    }

    fn write_inputs(&self, all: &[Vec<Inputs>], stream: &Stream) -> Result<(), Trouble> {
        for (call, inputs) in all.iter().enumerate() {
            for (array, bytes) in input_bytes(&inputs[self.rank]) {
                if !bytes.is_empty() {
                    self.arrays[&array].write_at(call * bytes.len(), &bytes, stream)?;
                }
            }
        }
        Ok(())
    }

    /// The first input that is no longer what was written.
    fn changed_input(&self, case: &Case, all: &[Vec<Inputs>]) -> Result<Option<Changed>, Trouble> {
        let now = |(array, size): (Array, usize)| -> Result<(Array, Vec<u8>), Trouble> {
            let mut now = vec![0; size * all.len()];
            if size > 0 {
                self.arrays[&array].read(&mut now)?;
            }
            Ok((array, now))
        };
        let now: BTreeMap<Array, Vec<u8>> = input_sizes(case).into_iter().map(now).collect::<Result<_, _>>()?;
        for (call, inputs) in all.iter().enumerate() {
            for (array, bytes) in input_bytes(&inputs[self.rank]) {
                let now = &now[&array][call * bytes.len()..][..bytes.len()];
                if *now != bytes[..] {
                    let size = case.dtype.size();
                    let words = now.chunks(size).zip(bytes.chunks(size)).filter(|(now, made)| now != made).count();
                    return Ok(Some(Changed { rank: self.rank, call, array, count: words as u64 }));
                }
            }
        }
        Ok(None)
    }

    fn poison_outputs(&self, case: &Case, replay: u32, stream: &Stream) -> Result<(), Trouble> {
        for (array, memory) in &self.arrays {
            match array {
                Array::SumOut | Array::ResidualOut | Array::NormOut => memory.fill16(case.dtype.poison() as u16, stream)?,
                Array::QuantOut | Array::ScalesOut => memory.fill8(byte_poison(case, *array, replay), stream)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// What every call wrote, and the first that wrote behind its output.
    fn read_outputs(&self, case: &Case, sizes: &Sizes) -> Result<(Vec<Outputs>, Option<Changed>), Trouble> {
        let mut calls = vec![Outputs::none(); case.calls()];
        let mut first: Option<Changed> = None;
        for (array, size) in output_sizes(case, sizes) {
            let Some(memory) = self.arrays.get(&array).filter(|_| size > 0) else { continue };
            let stride = size + guard(case, array);
            let mut all = vec![0; stride * calls.len()];
            memory.read(&mut all)?;
            for (call, (outputs, held)) in calls.iter_mut().zip(all.chunks_exact(stride)).enumerate() {
                let count = held[size..].iter().filter(|byte| !is_poison(case, array, **byte)).count() as u64;
                if count > 0 && first.is_none_or(|first| call < first.call) {
                    first = Some(Changed { rank: self.rank, call, array, count });
                }
                let held = held[..size].to_vec();
                match array {
                    Array::SumOut => outputs.sum = Floats::from_bytes(case.dtype, held),
                    Array::ResidualOut => outputs.residual = Floats::from_bytes(case.dtype, held),
                    Array::NormOut => outputs.norm = Floats::from_bytes(case.dtype, held),
                    Array::QuantOut => outputs.quant = held,
                    _ => outputs.scales = held,
                }
            }
        }
        Ok((calls, first))
    }

    /// Where the rank stands.
    fn standing(&self) -> String {
        standing(self.rank, self.counters.as_ref())
    }
}

/// Where a rank stands, by what its kernels left in its counters.
pub(super) fn standing(rank: usize, counters: Option<&Memory>) -> String {
    let Some(counters) = counters else { return format!("rank {rank}: it keeps no counters") };
    match counters.read_within(20, Duration::from_secs(2)) {
        Ok(Some(held)) => {
            let word = |at: usize| i32::from_le_bytes([held[4 * at], held[4 * at + 1], held[4 * at + 2], held[4 * at + 3]]);
            format!(
                "rank {rank}: {} blocks have arrived in the call it is in, barrier flag {}, Lamport part {}",
                word(0),
                word(1),
                word(2)
            )
        }
        Ok(None) => format!("rank {rank}: its counters cannot be read in time"),
        Err(error) => format!("rank {rank}: its counters cannot be read ({error})"),
    }
}

/// What `from` writes for `to`.
fn pattern(from: usize, to: usize) -> Vec<u8> {
    (0..PROBE_SLOT).map(|at| inputs::mix((from << 40 | to << 32 | at) as u64) as u8).collect()
}

/// Before any kernel runs: what the ranks share, read and written by copies, with data and a deadline. Slot 0 holds what its
/// rank wrote, slot R + 1 what rank R did.
impl Stage {
    fn own(&self) -> Result<(usize, &Memory), Trouble> {
        let own = self.shared.iter().next().ok_or_else(|| Trouble::Failed("nothing is shared".to_owned()))?;
        Ok((*own.0, own.1))
    }

    /// Writes a pattern for the others to read.
    pub fn probe(&mut self) -> Result<(), Trouble> {
        let (rank, own) = self.own()?;
        own.fill8(0, &self.origin)?;
        own.write(&pattern(rank, rank), &self.origin)?;
        let mut faults = Vec::new();
        if self.arrived(&mut faults, "the first write of all")? { Ok(()) } else { Err(Trouble::Failed(faults.join("; "))) }
    }

    /// Reads every other rank's memory and writes into it; what was not so.
    pub fn probe_peers(&mut self) -> Result<Vec<String>, Trouble> {
        let (rank, _) = self.own()?;
        let scratch = self.context.alloc(PROBE_SLOT)?;
        let mut faults = Vec::new();
        for (&other, peer) in &self.peers {
            scratch.fill8(0, &self.origin)?;
            scratch.copy_from(peer, 0, PROBE_SLOT, &self.origin)?;
            if !self.arrived(&mut faults, &format!("a read of rank {other}'s memory by rank {rank}"))? {
                continue;
            }
            let mut got = vec![0; PROBE_SLOT];
            scratch.read(&mut got)?;
            if got != pattern(other, other) {
                faults.push(format!("rank {rank} reads other bytes from rank {other}'s memory than are there"));
            }
            scratch.write(&pattern(rank, other), &self.origin)?;
            scratch.copy_to(peer, PROBE_SLOT * (rank + 1), PROBE_SLOT, &self.origin)?;
            self.arrived(&mut faults, &format!("a write to rank {other}'s memory by rank {rank}"))?;
        }
        Ok(faults)
    }

    /// Looks at what the others wrote.
    pub fn probe_own(&mut self) -> Result<Vec<String>, Trouble> {
        let (rank, own) = self.own()?;
        let mut faults = Vec::new();
        for &other in self.peers.keys() {
            let mut held = vec![0; PROBE_SLOT];
            own.read_at(PROBE_SLOT * (other + 1), &mut held)?;
            if held != pattern(other, rank) {
                faults.push(format!("what rank {other} wrote to rank {rank}'s memory did not arrive"));
            }
        }
        Ok(faults)
    }

    fn arrived(&self, faults: &mut Vec<String>, what: &str) -> Result<bool, Trouble> {
        match self.finish(&self.origin) {
            Ok(()) => Ok(true),
            Err(Waited::TooLong) => {
                faults.push(format!("{what} did not end within {} s", self.deadline.as_secs()));
                Ok(false)
            }
            Err(Waited::Failed(error)) => Err(Trouble::Failed(format!("{what}: {error}"))),
        }
    }
}
