//! A worker's side of the GPU: the ranks that it hosts, their memory, their graph, and its replays.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::cases::{Case, REPLAYS, What};
use super::fault::{Planted, planted};
use super::ffi::driver::{self, Context, CudaError, Driver, Event, Executable, IpcHandle, Memory, PeerMemory, Stream};
use super::ffi::tvm::{Argument, Element, Module, Place, Raised, Tensor};
use super::inputs::{self, Inputs};
use super::layout::{self, Workspace};
use super::numbers::{DType, Floats};
use super::protocol::{Launch, Outcome, Unknown, hex, unhex};
use super::reference::{Distance, EPS, Expected, FP4_SCALE, FP8_SCALE, Outputs, POISON_BYTE, Sizes, Wrong};
use super::signature::{self, Values};
use crate::tables::calls::{Form, Quant, calls};

/// Bytes behind an output that must stay as they are.
const GUARD: usize = 64;
/// What a Lamport buffer holds before the artifact initializes it.
const STALE: u16 = 0x5a5a;
/// Bytes that each rank writes to each other in the probe.
const PROBE_SLOT: usize = 1 << 16;

/// Why a case could not be carried out.
#[derive(Debug)]
pub enum Trouble {
    /// It cannot be run here.
    Skip(String),
    /// The numbers, or the graph, are wrong; the GPU is well.
    Wrong(String),
    /// Every output was written, some with wrong numbers.
    Off(String),
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
        Ok(Self { device: info, devices, driver, context, module, forms, unknown, origin, deadline, free_bytes, shared, peers })
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
        let until = Instant::now() + self.deadline;
        let mut pause = Duration::from_micros(5);
        loop {
            if stream.is_done().map_err(Waited::Failed)? {
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

/// One case on a stage, from its memory to its last replay.
#[derive(Debug)]
pub struct Play {
    case: Case,
    number: u64,
    workspace: Workspace,
    sizes: Sizes,
    ranks: Vec<Rank>,
    /// Addresses of all ranks' buffers, by rank and buffer.
    addresses: Vec<Vec<u64>>,
    graph: Option<Executable>,
    outcome: Outcome,
    replay: u32,
    /// Replays go on, and are compared, after one with wrong numbers.
    past_wrong: bool,
    /// Inputs that come back, where there are more replays than sets of them.
    sets: Vec<Set>,
    /// The first and the last event of a replay.
    events: (Event, Event),
}

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

/// Arrays of a call, each with all calls one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Array {
    Main,
    Residual,
    Gamma,
    GammaPre,
    Bias,
    Shared,
    Scales,
    Rows,
    SumOut,
    ResidualOut,
    NormOut,
    QuantOut,
    ScalesOut,
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
        let workspace = case.workspace();
        let sizes = Sizes::of(case);
        let mut hosted = Vec::new();
        for &rank in ranks {
            let whole = stage.shared_of(rank, shared_bytes)?;
            hosted.push(Rank::new(stage, case, &whole, &workspace, &sizes, rank)?);
        }
        let ranks = hosted;
        let events = (stage.context.event()?, stage.context.event()?);
        let play = Self {
            case: case.clone(),
            number,
            workspace,
            sizes,
            ranks,
            addresses: vec![Vec::new(); case.ranks],
            graph: None,
            outcome: Outcome::default(),
            replay: 0,
            past_wrong,
            sets: Vec::new(),
            events,
        };
        play.initialize(stage)?;
        Ok(play)
    }

    /// Has the artifact fill the Lamport buffers with −0.0, and looks whether it did.
    fn initialize(&self, stage: &Stage) -> Result<(), Trouble> {
        let dtype = self.case.dtype;
        let whole = matches!(self.case.what, What::Initialize | What::InitializeAll);
        for rank in &self.ranks {
            for (memory, lamport) in rank.shared.iter().zip(&self.workspace.lamport) {
                if *lamport { memory.fill16(STALE, &stage.origin)? } else { memory.fill8(0, &stage.origin)? }
            }
            let lamport: Vec<&Memory> =
                rank.shared.iter().zip(&self.workspace.lamport).filter(|(_, is)| **is).map(|(memory, _)| memory).collect();
            let address = |memory: &Memory| Argument::Int(memory.address() as i64);
            match lamport[..] {
                [] => {}
                [one] => {
                    let size = Argument::Int((one.bytes() / dtype.size()) as i64);
                    let values =
                        Values::from([("buffer_ptr", address(one)), ("size", size), ("dtype", Argument::DataType(dtype))]);
                    stage.call("trtllm_lamport_initialize", &values, &stage.origin)?;
                }
                [one, two, three] => {
                    let values = Values::from([
                        ("buffer_0_ptr", address(one)),
                        ("buffer_1_ptr", address(two)),
                        ("buffer_2_ptr", address(three)),
                        ("size", Argument::Int(one.bytes() as i64)),
                        ("dtype", Argument::DataType(dtype)),
                    ]);
                    stage.call("trtllm_lamport_initialize_all", &values, &stage.origin)?;
                }
                _ => unreachable!("workspaces have none, one or three Lamport buffers"),
            }
            stage.finish(&stage.origin).map_err(|waited| self.hung(waited))?;
            for memory in lamport {
                let mut held = vec![0; if whole { memory.bytes() } else { memory.bytes().min(4096) }];
                memory.read(&mut held)?;
                let left = Floats::from_bytes(dtype, held).words().filter(|word| *word != dtype.negative_zero()).count();
                if left > 0 {
                    return Err(Trouble::Wrong(format!("the Lamport initialization left {left} elements as they were")));
                }
            }
        }
        Ok(())
    }

    /// Makes the graph, once the buffers of all ranks are as the first call wants them.
    pub fn connect(&mut self, stage: &Stage) -> Result<Vec<Launch>, Trouble> {
        if matches!(self.case.what, What::Initialize | What::InitializeAll) {
            return Ok(Vec::new());
        }
        for (rank, addresses) in self.addresses.iter_mut().enumerate() {
            let base =
                stage.address_of(rank).ok_or_else(|| Trouble::Failed(format!("the memory of rank {rank} is not mapped")))?;
            *addresses = self.workspace.offsets().map(|offset| base + offset as u64).collect();
        }
        for rank in &mut self.ranks {
            rank.tables(stage, &self.case, &self.workspace, &self.addresses)?;
        }
        self.capture(stage)
    }

    /// One graph in which each rank's calls follow each other and no rank waits for another.
    fn capture(&mut self, stage: &Stage) -> Result<Vec<Launch>, Trouble> {
        let (fork, join) = (stage.context.event()?, stage.context.event()?);
        stage.origin.begin_capture()?;
        let put = || -> Result<(), Trouble> {
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
        };
        let put = put();
        // The end of a capture that failed only says that it failed.
        let graph = stage.origin.end_capture();
        put?;
        let graph = graph?;
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
            // A mangled name has the length of each part before it, so no longer name is taken for this one.
            let part = format!("{}{name}", name.len());
            let count: usize =
                launches.iter().filter(|(launch, _)| launch.kernel.contains(&part)).map(|(launch, _)| launch.count).sum();
            if count != expected {
                let held: Vec<_> = launches.iter().map(|(launch, _)| format!("{} × {}", launch.count, launch.kernel)).collect();
                return Err(Trouble::Wrong(format!(
                    "the graph holds {} where {expected} × {name} are expected",
                    held.join(", ")
                )));
            }
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

    /// Runs the next replay; true when it was the last.
    pub fn replay(&mut self, stage: &Stage) -> Result<bool, Trouble> {
        if self.graph.is_none() {
            // The initializations were looked at before.
            self.outcome.right = 1;
            return Ok(true);
        }
        let calls = self.case.calls();
        let at = self.prepare();
        for rank in &self.ranks {
            rank.write_inputs(&self.sets[at].inputs, &stage.origin)?;
            rank.poison_outputs(&self.case, self.replay, &stage.origin)?;
        }
        let graph = self.graph.as_ref().expect("looked at above");
        self.events.0.record(&stage.origin)?;
        stage.origin.launch(graph)?;
        self.events.1.record(&stage.origin)?;
        stage.finish(&stage.origin).map_err(|waited| self.hung(waited))?;
        self.outcome.micros.push(self.events.1.micros_since(&self.events.0)? / calls as f64);
        if self.outcome.wrong.is_none() || self.past_wrong {
            match self.compare(at) {
                Ok(distance) => {
                    self.outcome.right += 1;
                    self.outcome.error = self.outcome.error.max(distance.relative);
                    self.outcome.of_bound = self.outcome.of_bound.max(distance.of_bound);
                }
                Err(trouble @ (Trouble::Wrong(_) | Trouble::Off(_))) => {
                    self.outcome.beyond_a_race |= matches!(trouble, Trouble::Wrong(_));
                    self.outcome.wrong.get_or_insert_with(|| format!("replay {}: {trouble}", self.replay + 1));
                }
                Err(other) => return Err(other),
            }
        }
        self.replay += 1;
        // Where other workers hold ranks, they would wait for ever for one that stops.
        let alone = self.ranks.len() == self.case.ranks;
        Ok(self.replay == self.case.replays || (alone && self.outcome.wrong.is_some() && !self.past_wrong))
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

    /// What came of it.
    pub fn outcome(&mut self, stage: &Stage) -> Result<Outcome, Trouble> {
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
        let of_call = |call| (0..case.ranks).into_par_iter().map(|rank| inputs::make(case, seed, call, rank)).collect();
        let inputs = (0..case.calls()).map(of_call).collect();
        self.sets.push(Set { inputs, right: None });
        self.sets.len() - 1
    }

    /// Holds all outputs of a replay against what is right for the set of inputs `at`.
    fn compare(&mut self, at: usize) -> Result<Distance, Trouble> {
        let calls = self.case.calls();
        let mut outputs: Vec<Vec<Outputs>> = Vec::new();
        for rank in &self.ranks {
            let of_rank = rank.read_outputs(&self.case, &self.sizes).map_err(|trouble| trouble.at(rank.rank))?;
            outputs.push(of_rank);
        }
        let all = &self.sets[at].inputs;
        if self.sets[at].right.as_ref() == Some(&outputs) && self.replay + 1 < self.case.replays {
            return Ok(Distance::default());
        }
        // Handles of the driver stay in this thread.
        let (case, hosted) = (&self.case, self.hosted().collect::<Vec<_>>());
        let rows: Vec<(usize, usize)> =
            (0..calls).flat_map(|call| (0..self.case.tokens).map(move |token| (call, token))).collect();
        let found: Vec<Result<Distance, (usize, usize, usize, Wrong)>> = rows
            .into_par_iter()
            .map(|(call, token)| {
                let expected = Expected::new(case, &all[call], token);
                hosted.iter().zip(&outputs).try_fold(Distance::default(), |distance, (&rank, outputs)| {
                    let found = expected.check(rank, &outputs[call]);
                    found.map(|found| distance.max(found)).map_err(|wrong| (call, rank, token, wrong))
                })
            })
            .collect();
        let rows_wrong = found.iter().filter(|row| row.is_err()).count();
        let any_unwritten = found.iter().any(|row| row.as_ref().is_err_and(|(.., wrong)| wrong.unwritten > 0));
        let rows = found.len();
        let mut distance = Distance::default();
        for row in found {
            match row {
                Ok(one) => distance = distance.max(one),
                Err((call, rank, token, wrong)) => {
                    let what = format!(
                        "rank {rank}, call {call}, token {token}: {} ({rows_wrong} of {rows} tokens are wrong)",
                        describe(&wrong, self.case.hidden)
                    );
                    return Err(if any_unwritten { Trouble::Wrong(what) } else { Trouble::Off(what) });
                }
            }
        }
        if self.replay + 1 == self.case.replays {
            for rank in &self.ranks {
                rank.inputs_are_untouched(all)?;
            }
        }
        if self.case.replays > SETS {
            self.sets[at].right = Some(outputs);
        }
        Ok(distance)
    }

    fn hung(&self, waited: Waited) -> Trouble {
        match waited {
            Waited::Failed(error) => Trouble::Failed(error.to_string()),
            Waited::TooLong => {
                let standing = self.ranks.iter().map(|rank| rank.standing()).collect();
                Trouble::Hung { replay: self.replay, standing }
            }
        }
    }

    /// The values of one call, by the names of the tables.
    fn values(&self, stage: &Stage, rank: &Rank, call: usize) -> Values {
        let case = &self.case;
        let (tokens, hidden) = (case.tokens, case.hidden);
        let float = Element::Float(case.dtype);
        let fusion_with = |fault| planted() == Some(fault) && matches!(case.what, What::Fusion { .. });
        let told_tokens = if fusion_with(Planted::FewTokens) && case.oneshot() == Some(false) { case.ranks } else { tokens };
        let told_hidden = if fusion_with(Planted::Stride) { hidden - 256 } else { hidden };
        let mut values = Values::from([
            ("world_size", Argument::Int(case.ranks as i64)),
            ("world_rank", Argument::Int(rank.rank as i64)),
            ("token_num", Argument::Int(told_tokens as i64)),
            ("hidden_dim", Argument::Int(told_hidden as i64)),
            ("launch_with_pdl", Argument::Bool(case.pdl)),
        ]);
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
        self.choices(rank, call, &mut values);
        values
    }

    /// The values that are choices of the case alone.
    fn choices(&self, rank: &Rank, call: usize, values: &mut Values) {
        match self.case.what {
            What::Fusion { pattern, oneshot, fp32_acc, trigger_at_end, scales } => {
                values.insert("pattern_code", Argument::Int(pattern));
                values.insert("use_oneshot", Argument::Bool(oneshot));
                values.insert("fp32_acc", Argument::Bool(fp32_acc));
                values.insert("trigger_completion_at_end", Argument::Bool(trigger_at_end));
                if matches!(self.case.what.quant(), Some(Quant::Fp4 | Quant::Mxfp8)) {
                    values.insert("layout_code", Argument::Int(scales.code()));
                }
                if self.case.what.quant() == Some(Quant::GroupFp8) {
                    values.insert("block_quant_group_size", Argument::Int(self.case.group() as i64));
                }
            }
            What::Custom { path, .. } => {
                // Zero means a released barrier.
                let flag = call + 1;
                values.insert("fusion_op_code", Argument::Int(path.operation()));
                values.insert("strategy_code", Argument::Int(path.strategy()));
                values.insert("config_code", Argument::Int(path.config()));
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
            What::MoeReduction { experts, .. } => {
                values.insert("num_experts", Argument::Int(experts as i64));
                values.insert("scale_factor_value", Argument::Float(f64::from(FP4_SCALE)));
                values.insert("layout_code", Argument::Int(layout::Scales::Swizzled.code()));
            }
            What::MoeFinalize { .. } | What::Initialize | What::InitializeAll => {}
        }
    }
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

pub(super) fn describe(wrong: &Wrong, hidden: usize) -> String {
    let Wrong { output, count, unwritten, column, got, least, most } = wrong;
    if unwritten == count {
        return format!("{output}: {count} elements of {hidden} were never written, the first at {column}");
    }
    let never = if *unwritten > 0 { format!(", {unwritten} of them never written") } else { String::new() };
    format!(
        "{output}: {count} elements are wrong{never}; the first, at {column}, is {got:.6e} and must be in {least:.6e} to {most:.6e}"
    )
}

impl Trouble {
    fn at(self, rank: usize) -> Self {
        match self {
            Self::Wrong(what) => Self::Wrong(format!("rank {rank}: {what}")),
            other => other,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skip(why) | Self::Wrong(why) | Self::Off(why) | Self::Failed(why) => f.write_str(why),
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
        let shared = workspace.offsets().zip(&workspace.buffers).map(|(offset, bytes)| whole.part(offset, *bytes)).collect();
        let context = &stage.context;
        // One call's worth tells the sizes; what it holds does not matter.
        let example = inputs::make(case, 0, 0, rank);
        let mut arrays = BTreeMap::new();
        for (array, bytes) in input_bytes(&example) {
            if !bytes.is_empty() {
                arrays.insert(array, context.alloc(bytes.len() * case.calls())?);
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
        let counters = stage.context.alloc(5 * 4)?;
        counters.write(
            &layout::counters(workspace.part).iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>(),
            &stage.origin,
        )?;
        let pointers = layout::fusion_pointers(addresses, counters.address());
        let table = stage.context.alloc(pointers.len() * 8)?;
        table.write(&pointers.iter().flat_map(|pointer| pointer.to_le_bytes()).collect::<Vec<_>>(), &stage.origin)?;
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

    fn inputs_are_untouched(&self, all: &[Vec<Inputs>]) -> Result<(), Trouble> {
        for (call, inputs) in all.iter().enumerate() {
            for (array, bytes) in input_bytes(&inputs[self.rank]) {
                if bytes.is_empty() {
                    continue;
                }
                let mut now = vec![0; bytes.len()];
                self.arrays[&array].read_at(call * bytes.len(), &mut now)?;
                if now[..] != bytes[..] {
                    return Err(Trouble::Wrong(format!("rank {}, call {call}: the input {array:?} was overwritten", self.rank)));
                }
            }
        }
        Ok(())
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

    /// What every call wrote. Fails where one wrote behind its output.
    fn read_outputs(&self, case: &Case, sizes: &Sizes) -> Result<Vec<Outputs>, Trouble> {
        let mut calls = vec![Outputs::none(); case.calls()];
        for (array, size) in output_sizes(case, sizes) {
            let Some(memory) = self.arrays.get(&array).filter(|_| size > 0) else { continue };
            let stride = size + guard(case, array);
            for (call, outputs) in calls.iter_mut().enumerate() {
                let mut held = vec![0; stride];
                memory.read_at(call * stride, &mut held)?;
                let changed = held[size..].iter().filter(|byte| !is_poison(case, array, **byte)).count();
                if changed > 0 {
                    return Err(Trouble::Wrong(format!("call {call}: {changed} bytes behind {array:?} were written")));
                }
                held.truncate(size);
                match array {
                    Array::SumOut => outputs.sum = Floats::from_bytes(case.dtype, held),
                    Array::ResidualOut => outputs.residual = Floats::from_bytes(case.dtype, held),
                    Array::NormOut => outputs.norm = Floats::from_bytes(case.dtype, held),
                    Array::QuantOut => outputs.quant = held,
                    _ => outputs.scales = held,
                }
            }
        }
        Ok(calls)
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

/// The inputs of a call as they lie in memory.
fn input_bytes(inputs: &Inputs) -> [(Array, Cow<'_, [u8]>); 8] {
    [
        (Array::Main, inputs.main.bytes().into()),
        (Array::Residual, inputs.residual.bytes().into()),
        (Array::Gamma, inputs.gamma.bytes().into()),
        (Array::GammaPre, inputs.gamma_pre.bytes().into()),
        (Array::Bias, inputs.bias.bytes().into()),
        (Array::Shared, inputs.shared.bytes().into()),
        (Array::Scales, inputs.scales.bytes().into()),
        (Array::Rows, inputs.rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>().into()),
    ]
}

/// The bytes of each output of one call, without what guards its end.
fn output_sizes(case: &Case, sizes: &Sizes) -> [(Array, usize); 5] {
    let element = case.dtype.size();
    [
        (Array::SumOut, sizes.sum * element),
        (Array::ResidualOut, sizes.residual * element),
        (Array::NormOut, sizes.norm * element),
        (Array::QuantOut, sizes.quant),
        (Array::ScalesOut, sizes.scales),
    ]
}

/// The bytes that guard the end of an output: a row of elements.
fn guard(case: &Case, array: Array) -> usize {
    match array {
        Array::QuantOut | Array::ScalesOut => GUARD,
        _ => case.hidden * case.dtype.size(),
    }
}

/// What a byte of a quantized output holds before a call.
fn byte_poison(case: &Case, array: Array, replay: u32) -> u8 {
    match (array, case.what.quant()) {
        // Every code of four bits is a number: two that take turns, so that one that stays is seen.
        (Array::QuantOut, Some(Quant::Fp4)) => [0x55, 0xaa][replay as usize % 2],
        _ => POISON_BYTE,
    }
}

fn is_poison(case: &Case, array: Array, byte: u8) -> bool {
    match array {
        Array::QuantOut | Array::ScalesOut => [0, 1].iter().any(|replay| byte_poison(case, array, *replay) == byte),
        _ => (case.dtype.poison() as u16).to_le_bytes().contains(&byte),
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
