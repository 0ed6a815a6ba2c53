//! A worker's side of `bench`: one rank, on a GPU of its own.
//!
//! A graph is one call, an event, the calls that are timed, an event. The first call brings the ranks together, so that what lay
//! between their launches is in no figure.

use std::collections::BTreeMap;
use std::path::Path;

use super::plan::{ADD, FUNCTION, LONE_NORM, NORM, Point, SETS, Way};
use super::protocol::{Answer, Order};
use crate::smoke::cases::{Case, What};
use crate::smoke::compare;
use crate::smoke::fault;
use crate::smoke::ffi::driver::{CudaError, Driver, Event, Executable, Function, Graph, Memory, Parameter, Shape, Stream};
use crate::smoke::ffi::nccl::{Communicator, ID_BYTES, Nccl};
use crate::smoke::ffi::tvm::{Argument, Element};
use crate::smoke::inputs::{self, Inputs};
use crate::smoke::kernels::Source;
use crate::smoke::layout;
use crate::smoke::numbers::{DType, Floats};
use crate::smoke::protocol::Answer as Said;
use crate::smoke::reference::{Distance, EPS, Outputs};
use crate::smoke::signature::Values;
use crate::smoke::stage::{Stage, Trouble, Waited, buffers, mangled, must_hold, standing, told};

/// Our kernels that add and norm.
pub const SOURCE: Source =
    Source { name: "add_rms_norm.cu", text: include_str!("../../../cuda-src/bench/add_rms_norm.cu"), options: &["-std=c++17"] };
/// The oldest target whose kernels can start before the one ahead has ended.
const OVERLAPS_FROM: u32 = 90;
/// The threads of a block that adds, each with one vector of 16 bytes.
const ADDERS: u32 = 256;
/// How many replays pass between two signs of life.
const SIGN: u32 = 16;

/// What a worker keeps from order to order. Graphs go before the communicator whose kernels they hold.
#[derive(Debug, Default)]
pub struct Bench {
    laid: Option<Laid>,
    communicator: Option<Communicator>,
    nccl: Option<Nccl>,
    /// Our kernels, by their names.
    ours: BTreeMap<String, Function>,
}

/// A point in memory. Arrays hold all sets, one behind the other.
#[derive(Debug)]
struct Laid {
    point: Point,
    rank: usize,
    /// By set and rank.
    inputs: Vec<Vec<Inputs>>,
    main: Memory,
    residual: Memory,
    gamma: Memory,
    /// NCCL's output.
    sum: Memory,
    residual_out: Memory,
    norm_out: Memory,
    counters: Memory,
    /// The fused kernels' table of pointers; made when every rank has laid out its memory.
    table: Memory,
    graph: Option<(Way, Executable)>,
    events: (Event, Event),
    /// Where NCCL runs apart, and the events by which it forks and joins.
    side: Stream,
    forked: Event,
    joined: Event,
    /// Outputs that were held against the reference and are right: the same bytes of the same case are right again.
    right: Vec<(Case, Vec<Outputs>, Distance)>,
}

impl Bench {
    /// Does what is asked. `sign` tells the supervisor of a replay that begins.
    pub fn obey(&mut self, stage: &mut Stage, order: Order, sign: &mut dyn FnMut(usize, u32)) -> Result<Said, Trouble> {
        let answer = match order {
            Order::Load { nccl, norm, gpus } => match self.load(stage, &nccl, &norm, &gpus) {
                Ok(answer) => answer,
                Err(why) => return Ok(Said::Lacks(why)),
            },
            Order::Unique => {
                let nccl = self.nccl.ok_or_else(|| Trouble::Failed("no NCCL is loaded".to_owned()))?;
                Answer::Unique { id: nccl.unique_id().map_err(Trouble::Failed)?.to_vec() }
            }
            Order::Join { id, rank, ranks } => {
                self.release();
                let nccl = self.nccl.ok_or_else(|| Trouble::Failed("no NCCL is loaded".to_owned()))?;
                let id: [u8; ID_BYTES] =
                    id.try_into().map_err(|_| Trouble::Failed("the name of the communicator is damaged".to_owned()))?;
                self.communicator = Some(nccl.join(&id, rank, ranks).map_err(Trouble::Failed)?);
                Answer::Joined
            }
            Order::Begin { point, seed, rank, shared_bytes } => {
                // The memory of the point before goes first.
                self.laid = None;
                self.laid = Some(Laid::new(stage, point, seed, rank, shared_bytes)?);
                Answer::Begun
            }
            Order::Capture { way } => self.capture(stage, way)?,
            Order::Check => {
                let (distance, wrong) = match self.laid()?.check(stage) {
                    Ok(distance) => (distance, None),
                    Err(Trouble::Wrong(what)) => (Distance::default(), Some(what)),
                    Err(other) => return Err(other),
                };
                Answer::Checked { error: distance.relative, of_bound: distance.of_bound, wrong }
            }
            Order::Time { warm_up, replays } => Answer::Timed { micros: self.laid()?.time(stage, warm_up, replays, sign)? },
        };
        Ok(Said::Bench(answer))
    }

    /// Gives back what other ranks have a part in: nothing of theirs is used after this.
    pub fn release(&mut self) {
        self.laid = None;
        self.communicator = None;
    }

    fn laid(&mut self) -> Result<&mut Laid, Trouble> {
        self.laid.as_mut().ok_or_else(|| Trouble::Failed("no point was begun".to_owned()))
    }

    fn load(&mut self, stage: &Stage, nccl: &Path, norm: &Path, gpus: &[usize]) -> Result<Answer, String> {
        let said = |error: CudaError| error.to_string();
        let driver = Driver::open()?;
        let pairs = gpus.iter().flat_map(|one| gpus.iter().map(move |other| (*one, *other))).filter(|(one, other)| one != other);
        let links = pairs.map(|(one, other)| driver.link(one, other)).collect::<Result<_, _>>().map_err(said)?;
        let code = stage.code(norm).map_err(|trouble| trouble.to_string())?;
        for dtype in [DType::Bf16, DType::Fp16] {
            let norms = [NORM, LONE_NORM].into_iter().flat_map(|norm| EACH.map(|each| norm_name(norm, dtype, each)));
            for name in norms.chain([add_name(dtype)]) {
                let function = code.function(&name).map_err(said)?;
                self.ours.insert(name, function);
            }
        }
        let nccl = Nccl::open(nccl)?;
        self.nccl = Some(nccl);
        Ok(Answer::Loaded { nccl: nccl.version(), links })
    }

    fn capture(&mut self, stage: &Stage, way: Way) -> Result<Answer, Trouble> {
        let laid = self.laid.as_ref().ok_or_else(|| Trouble::Failed("no point was begun".to_owned()))?;
        let may_overlap = stage.device.sm >= OVERLAPS_FROM;
        if Way::RIVALS.contains(&way) {
            // NCCL connects its ranks at their first call, which is not to be in a graph.
            self.separately(stage, laid, way, 0, false)?;
            stage.finish(&stage.origin).map_err(|waited| laid.hung(waited, way.word(), 0))?;
        }
        let ((graph, executable), overlaps) = match self.graph(stage, laid, way, may_overlap) {
            Ok(graph) => (graph, may_overlap),
            // A driver that cannot hang such a launch behind NCCL's: ours starts when that has ended, as any kernel does.
            Err(Trouble::Failed(_)) if way == Way::Nccl && may_overlap => (self.graph(stage, laid, way, false)?, false),
            Err(other) => return Err(other),
        };
        let mut kernels: BTreeMap<String, usize> = BTreeMap::new();
        for name in graph.kernel_names()? {
            *kernels.entry(name).or_default() += 1;
        }
        let wanted = match way {
            // Declared `extern "C"`: their names are as they stand in the source.
            Way::Nccl => vec![NORM.to_owned()],
            Way::NcclApart => vec![ADD.to_owned(), LONE_NORM.to_owned()],
            fused => vec![laid.point.case(fused).kernels().iter().copied().map(mangled).collect()],
        };
        for wanted in wanted {
            must_hold(kernels.iter().map(|(name, count)| (name.as_str(), *count)), &wanted, laid.point.calls + 1)?;
        }
        self.laid()?.graph = Some((way, executable));
        Ok(Answer::Captured { kernels: kernels.into_iter().collect(), overlaps: overlaps && way == Way::Nccl })
    }

    fn graph(&self, stage: &Stage, laid: &Laid, way: Way, overlaps: bool) -> Result<(Graph, Executable), Trouble> {
        let graph = stage.origin.capture(|| -> Result<(), Trouble> {
            for call in 0..=laid.point.calls {
                if call == 1 {
                    laid.events.0.record_in_graph(&stage.origin)?;
                }
                match way {
                    Way::Nccl | Way::NcclApart => self.separately(stage, laid, way, call % SETS, overlaps)?,
                    fused => stage.call(FUNCTION, &laid.values(stage, fused, call % SETS), &stage.origin)?,
                }
            }
            Ok(laid.events.1.record_in_graph(&stage.origin)?)
        })?;
        let executable = graph.instantiate()?;
        Ok((graph, executable))
    }

    /// NCCL's all-reduce, then our kernels that add and norm. `overlaps`: in line, ours may start before NCCL's has ended.
    fn separately(&self, stage: &Stage, laid: &Laid, way: Way, set: usize, overlaps: bool) -> Result<(), Trouble> {
        let Point { tokens, hidden, dtype, .. } = laid.point;
        let communicator = self.communicator.as_ref().ok_or_else(|| Trouble::Failed("no communicator was joined".to_owned()))?;
        let [main, residual, sum, residual_out, norm_out] =
            [&laid.main, &laid.residual, &laid.sum, &laid.residual_out, &laid.norm_out].map(|memory| part(memory, set));
        let all_reduce =
            |stream: &Stream| communicator.all_reduce(&main, &sum, tokens * hidden, dtype, stream).map_err(Trouble::Failed);
        let ours = |name: String, shape: Shape, arguments: &[Parameter]| {
            let function = self.ours.get(&name).ok_or_else(|| Trouble::Failed(format!("{name} was not compiled")))?;
            stage.origin.run(function, shape, arguments).map_err(Trouble::from)
        };
        let (each, threads, vectors) = norm_shape(hidden);
        let a_token_a_block = Shape { blocks: tokens as u32, threads, shared_bytes: 0, overlaps };
        let address = |memory: &Memory| Parameter::Address(memory.address());
        let (gamma, eps) = (address(&part(&laid.gamma, set)), Parameter::F32(EPS as f32));
        if way == Way::Nccl {
            all_reduce(&stage.origin)?;
            let arguments = [
                address(&sum),
                address(&residual),
                gamma,
                address(&residual_out),
                address(&norm_out),
                Parameter::U32(vectors),
                eps,
            ];
            return ours(norm_name(NORM, dtype, each), a_token_a_block, &arguments);
        }
        laid.forked.record(&stage.origin)?;
        laid.side.wait(&laid.forked)?;
        all_reduce(&laid.side)?;
        laid.joined.record(&laid.side)?;
        stage.origin.wait(&laid.joined)?;
        let all = vectors * tokens as u32;
        let add = Shape { blocks: all.div_ceil(ADDERS), threads: ADDERS, shared_bytes: 0, overlaps: false };
        ours(add_name(dtype), add, &[address(&sum), address(&residual), address(&residual_out), Parameter::U32(all)])?;
        let arguments = [address(&residual_out), gamma, address(&norm_out), Parameter::U32(vectors), eps];
        ours(norm_name(LONE_NORM, dtype, each), Shape { overlaps: false, ..a_token_a_block }, &arguments)
    }
}

/// The vectors of a row that a thread of our norms may hold: there is a kernel for each.
const EACH: [usize; 3] = [1, 2, 4];

fn norm_name(norm: &str, dtype: DType, each: usize) -> String {
    format!("{norm}_{}_{each}", dtype.word())
}

fn add_name(dtype: DType) -> String {
    format!("{ADD}_{}", dtype.word())
}

/// How our norm is launched: vectors of 16 bytes for each thread, threads of a block, vectors of a row.
fn norm_shape(hidden: usize) -> (usize, u32, u32) {
    let vectors = hidden / 8;
    let each = EACH.into_iter().find(|each| vectors <= each * 1024).unwrap_or(4);
    let threads = layout::up(vectors.div_ceil(each), 32);
    (each, threads as u32, vectors as u32)
}

/// What one set has of an array.
fn part(memory: &Memory, set: usize) -> Memory {
    let bytes = memory.bytes() / SETS;
    memory.part(set * bytes, bytes)
}

impl Laid {
    fn new(stage: &mut Stage, point: Point, seed: u64, rank: usize, shared_bytes: usize) -> Result<Self, Trouble> {
        let workspace = point.workspace();
        let whole = stage.shared_of(rank, shared_bytes)?;
        let (counters, table) = stage.fusion_table(&workspace, &stage.addresses(&workspace, point.ranks)?)?;
        let alloc = |bytes: usize| stage.context.alloc(bytes);
        let matrix = || alloc(point.bytes() * SETS);
        let laid = Self {
            point,
            rank,
            inputs: inputs::of_all(&point.case(Way::OneShot), seed, SETS, &[rank]),
            main: matrix()?,
            residual: matrix()?,
            gamma: alloc(point.hidden * point.dtype.size() * SETS)?,
            sum: matrix()?,
            residual_out: matrix()?,
            norm_out: matrix()?,
            counters,
            table,
            graph: None,
            events: (stage.context.event()?, stage.context.event()?),
            side: stage.context.stream()?,
            forked: stage.context.event()?,
            joined: stage.context.event()?,
            right: Vec::new(),
        };
        for (set, inputs) in laid.inputs.iter().enumerate() {
            let mine = &inputs[rank];
            for (memory, floats) in [(&laid.main, &mine.main), (&laid.residual, &mine.residual), (&laid.gamma, &mine.gamma)] {
                part(memory, set).write(floats.bytes(), &stage.origin)?;
            }
        }
        let hung = |waited| laid.hung(waited, "the layout of its memory", 0);
        stage.initialize(&buffers(&whole, &workspace), &workspace, point.dtype, false, &hung)?;
        Ok(laid)
    }

    /// The values of a fused call, by the names of the tables.
    fn values(&self, stage: &Stage, way: Way, set: usize) -> Values {
        let Point { ranks, tokens, hidden, dtype, .. } = self.point;
        let float = Element::Float(dtype);
        let matrix = |memory: &Memory| stage.tensor(part(memory, set).address(), float, &[tokens, hidden]);
        let mut values = told(&self.point.case(way), self.rank);
        values.extend([
            ("allreduce_in", matrix(&self.main)),
            ("workspace_ptrs", stage.tensor(self.table.address(), Element::I64, &[3 * ranks + 1])),
            ("residual_in", matrix(&self.residual)),
            ("residual_out", matrix(&self.residual_out)),
            ("norm_out", matrix(&self.norm_out)),
            ("rms_gamma", stage.tensor(part(&self.gamma, set).address(), float, &[hidden])),
            ("rms_eps", Argument::Float(EPS)),
        ]);
        values
    }

    fn captured(&self) -> Result<(Way, &Executable), Trouble> {
        self.graph.as_ref().map(|(way, graph)| (*way, graph)).ok_or_else(|| Trouble::Failed("no graph was made".to_owned()))
    }

    /// Replays the graph once on poisoned outputs and holds what every set has of them against the reference.
    fn check(&mut self, stage: &Stage) -> Result<Distance, Trouble> {
        let (way, graph) = self.captured()?;
        let outputs = [&self.sum, &self.residual_out, &self.norm_out];
        for memory in outputs {
            memory.fill16(self.point.dtype.poison() as u16, &stage.origin)?;
        }
        stage.origin.launch(graph)?;
        stage.finish(&stage.origin).map_err(|waited| self.hung(waited, way.word(), 0))?;
        let case = self.point.case(way);
        let mut written = Vec::new();
        for set in 0..SETS {
            let read = |memory: &Memory| -> Result<Floats, Trouble> {
                let mut held = vec![0; self.point.bytes()];
                memory.read_at(set * self.point.bytes(), &mut held)?;
                Ok(Floats::from_bytes(self.point.dtype, held))
            };
            let mut outputs = Outputs::none();
            (outputs.residual, outputs.norm) = (read(&self.residual_out)?, read(&self.norm_out)?);
            if Way::RIVALS.contains(&way) {
                outputs.sum = read(&self.sum)?;
            }
            written.push(outputs);
        }
        if let Some((.., distance)) = self.right.iter().find(|(one, outputs, _)| *one == case && *outputs == written) {
            return Ok(*distance);
        }
        let distance = compare(&case, &self.inputs, self.rank, std::slice::from_ref(&written)).map_err(Trouble::Wrong)?;
        // One of each sum is kept: outputs can be large, and a way that is not repeatable would pile them up.
        let fused = Way::FUSED.contains(&way);
        self.right.retain(|(one, ..)| matches!(one.what, What::Fusion { .. }) != fused);
        self.right.push((case, written, distance));
        Ok(distance)
    }

    /// Microseconds between the events of each replay.
    fn time(&self, stage: &Stage, warm_up: u32, replays: u32, sign: &mut dyn FnMut(usize, u32)) -> Result<Vec<f64>, Trouble> {
        let (way, graph) = self.captured()?;
        let mut micros = Vec::with_capacity(replays as usize);
        for replay in 0..warm_up + replays {
            if replay.is_multiple_of(SIGN) || replay == 1 {
                sign(self.rank, replay);
            }
            fault::strike(self.rank, replay);
            stage.origin.launch(graph)?;
            stage.finish(&stage.origin).map_err(|waited| self.hung(waited, way.word(), replay))?;
            if replay >= warm_up {
                micros.push(self.events.1.micros_since(&self.events.0)?);
            }
        }
        Ok(micros)
    }

    fn hung(&self, waited: Waited, doing: &str, replay: u32) -> Trouble {
        waited.told(replay, || {
            let counters = (!Way::RIVALS.map(Way::word).contains(&doing)).then_some(&self.counters);
            vec![format!("{} ({doing}, {} tokens)", standing(self.rank, counters), self.point.tokens)]
        })
    }
}

/// Holds what `rank` alone wrote, by set, against what is right.
fn compare(case: &Case, inputs: &[Vec<Inputs>], rank: usize, outputs: &[Vec<Outputs>]) -> Result<Distance, String> {
    compare::verdict(&compare::on_host(case, inputs, &[rank], outputs), case.hidden).map_err(|fails| fails.what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smoke::bench::plan::Scenario;

    fn point(tokens: usize, hidden: usize) -> Point {
        Point { scenario: Scenario::Sweep, ranks: 4, tokens, hidden, dtype: DType::Bf16, calls: 16 }
    }

    /// What NCCL and our norm would write: every addition rounded, float32 within the norm.
    fn separately(point: &Point, inputs: &[Inputs], rank: usize) -> Outputs {
        let dtype = point.dtype;
        let round = |value: f64| dtype.decode(dtype.encode(value));
        let all = point.tokens * point.hidden;
        let sum: Vec<f64> = (0..all).map(|at| inputs.iter().fold(0.0, |sum, rank| round(sum + rank.main.value(at)))).collect();
        let residual: Vec<f64> = (0..all).map(|at| round(sum[at] + inputs[rank].residual.value(at))).collect();
        let norm = residual.chunks(point.hidden).flat_map(|row| {
            let mean = row.iter().map(|value| value * value).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / ((mean as f32) + EPS as f32).sqrt();
            row.iter()
                .enumerate()
                .map(|(column, value)| *value as f32 * scale * inputs[rank].gamma.value(column) as f32)
                .collect::<Vec<_>>()
        });
        let floats = |values: Vec<f64>| Floats::from_words(dtype, values.into_iter().map(|value| dtype.encode(value)));
        let mut outputs = Outputs::none();
        (outputs.norm, outputs.sum, outputs.residual) = (floats(norm.map(f64::from).collect()), floats(sum), floats(residual));
        outputs
    }

    #[test]
    fn nccl_and_our_norm_are_within_their_bound_and_what_is_off_is_told() {
        let point = point(3, 512);
        let case = point.case(Way::Nccl);
        let inputs = inputs::of_all(&point.case(Way::OneShot), 9, SETS, &[0, 1, 2, 3]);
        let mut outputs: Vec<Outputs> = inputs.iter().map(|set| separately(&point, set, 1)).collect();
        let distance = compare(&case, &inputs, 1, &[outputs.clone()]).unwrap();
        assert!(distance.of_bound <= 1.0 && distance.relative > 0.0);
        let at = 512 + 7;
        let right = outputs[1].norm.word(at);
        outputs[1].norm.set(at, right ^ 0x0400);
        let wrong = compare(&case, &inputs, 1, &[outputs.clone()]).unwrap_err();
        assert!(wrong.contains("token 1") && wrong.contains("norm_out") && wrong.contains("1 of 6 tokens"), "{wrong}");
        outputs[1].norm.set(at, DType::Bf16.poison());
        assert!(compare(&case, &inputs, 1, &[outputs.clone()]).unwrap_err().contains("never written"));
        assert!(compare(&case, &inputs, 2, &[outputs]).is_err(), "the residual is another rank's");
    }

    #[test]
    fn the_threads_of_our_norm_are_whole_warps_and_reach_every_vector() {
        for (hidden, shape) in [(7168, (1, 896, 896)), (2880, (1, 384, 360)), (8192, (1, 1024, 1024)), (16384, (2, 1024, 2048))] {
            assert_eq!(norm_shape(hidden), shape);
        }
        for hidden in (8..=super::super::plan::MOST_HIDDEN).step_by(8) {
            let (each, threads, vectors) = norm_shape(hidden);
            assert!(threads <= 1024 && threads.is_multiple_of(32) && each as u32 * threads >= vectors, "{hidden}");
        }
    }

    #[test]
    fn the_sets_of_inputs_differ_and_all_ways_get_the_same() {
        let made = |way| inputs::of_all(&point(2, 64).case(way), 3, SETS, &[1]);
        let sets = made(Way::OneShot);
        assert_ne!(sets[0], sets[1]);
        assert_eq!(sets, made(Way::TwoShot));
    }
}
