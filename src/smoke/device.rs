//! Inputs made and outputs compared by kernels of ours on the GPU: what `inputs` and `reference` do, bit for bit.
//!
//! The arithmetic is in cuda-src/smoke/check.h, which a C++ compiler builds for the tests too. NVRTC builds the kernels for the GPU
//! at hand (`kernels`).

use std::collections::BTreeMap;

use super::arrays::{Array, guard, input_sizes, output_sizes};
use super::cases::{Case, What};
use super::compare::{Changed, Fault, Found};
use super::ffi::driver::{Code, Context, CudaError, Function, Memory, Parameter, Shape, Stream};
use super::kernels::Source;
use super::layout;
use super::numbers::DType;
use super::reference::{Distance, Sizes, Wrong};
use crate::tables::calls::Quant;

/// What NVRTC compiles. No product and sum may become one rounding: the host's do not.
pub const SOURCE: Source = Source {
    name: "fi_arch_smoke.cu",
    text: concat!(include_str!("../../cuda-src/smoke/check.h"), include_str!("../../cuda-src/smoke/kernels.cu")),
    options: &["-std=c++17", "-fmad=false"],
};

/// Threads of a block; `LANES` in check.h.
const LANES: u32 = 256;
/// Blocks that make one input together.
const CHUNKS: u32 = 16;
/// The most blocks that check rows, and the rows of doubles that each needs (`SCRATCH_ROWS` in check.h).
const BLOCKS: usize = 64;
const SCRATCH_ROWS: usize = 6;
const MOST_RANKS: usize = 8;
/// Words of a `Found` in check.h.
const FOUND: usize = 9;

/// The kernels, on one GPU.
#[derive(Debug)]
pub struct Kernels {
    rows: Function,
    make: Function,
    held: Function,
    check: Function,
}

impl Kernels {
    pub fn of(code: &Code) -> Result<Self, CudaError> {
        Ok(Self {
            rows: code.function("fi_arch_smoke_rows")?,
            make: code.function("fi_arch_smoke_make")?,
            held: code.function("fi_arch_smoke_held")?,
            check: code.function("fi_arch_smoke_check")?,
        })
    }
}

/// A rank of this worker, and where its arrays lie; 0 for one that it does not have.
pub struct Host {
    pub rank: usize,
    pub addresses: [u64; Array::ALL.len()],
}

impl Host {
    pub fn new(rank: usize, arrays: &BTreeMap<Array, Memory>) -> Self {
        Self { rank, addresses: Array::ALL.map(|array| arrays.get(&array).map_or(0, Memory::address)) }
    }
}

/// A case on a GPU, ready to be made inputs for and to be checked.
#[derive(Debug)]
pub struct Checker {
    case: Case,
    hosted: Vec<usize>,
    task: Memory,
    /// The tables of rows of the MoE finalization, of all calls and ranks; else a place holder.
    tables: Memory,
    scratch: Memory,
    results: Memory,
}

impl Checker {
    /// `replays`: how many can be under way at once, each with results of its own.
    pub fn new(
        context: &Context,
        case: &Case,
        sizes: &Sizes,
        hosts: &[Host],
        replays: usize,
        stream: &Stream,
    ) -> Result<Self, CudaError> {
        let words: Vec<u8> = task(case, sizes, hosts).iter().flat_map(|word| word.to_le_bytes()).collect();
        let task = context.alloc(words.len())?;
        task.write(&words, stream)?;
        let tables = context.alloc(table_length(case) * case.calls() * case.ranks * 4)?;
        let scratch = context.alloc(blocks(case) * SCRATCH_ROWS * case.hidden * 8)?;
        let results = context.alloc(replays * result_words(case, hosts.len()) * 8)?;
        Ok(Self { case: case.clone(), hosted: hosts.iter().map(|host| host.rank).collect(), task, tables, scratch, results })
    }

    /// Takes out results of earlier replays: what the kernels do not write counts as wrong.
    pub fn forget(&self, stream: &Stream) -> Result<(), CudaError> {
        self.results.fill8(0xff, stream)
    }

    /// Puts making the inputs of all hosted ranks on the stream.
    pub fn make(&self, kernels: &Kernels, seed: u64, stream: &Stream) -> Result<(), CudaError> {
        let case = &self.case;
        let (task, seed, tables) = (self.task(), Parameter::U64(seed), Parameter::Address(self.tables.address()));
        if table_length(case) > 0 {
            stream.run(&kernels.rows, shape(case.calls() * case.ranks), &[task, seed, tables])?;
        }
        let inputs = Array::ALL.iter().filter(|array| !array.is_output()).count();
        let blocks = self.hosted.len() * case.calls() * inputs * CHUNKS as usize;
        stream.run(&kernels.make, shape(blocks), &[task, seed, Parameter::U64(CHUNKS.into()), tables])
    }

    /// Puts checking all outputs of a replay on the stream, with the results in place `slot`.
    pub fn check(&self, kernels: &Kernels, seed: u64, slot: usize, stream: &Stream) -> Result<(), CudaError> {
        let (case, hosted) = (&self.case, self.hosted.len());
        let (task, seed, tables) = (self.task(), Parameter::U64(seed), Parameter::Address(self.tables.address()));
        let found = self.results.address() + (slot * result_words(case, hosted) * 8) as u64;
        let counts = found + (rows(case) * hosted * FOUND * 8) as u64;
        let scratch = Parameter::Address(self.scratch.address());
        stream.run(&kernels.check, shape(blocks(case)), &[task, seed, tables, scratch, Parameter::Address(found)])?;
        let arrays = hosted * case.calls() * Array::ALL.len();
        stream.run(&kernels.held, shape(arrays), &[task, seed, tables, Parameter::Address(counts)])
    }

    /// What was found in the replays of the first `slots` places. All work on the stream must have ended.
    pub fn found(&self, slots: usize) -> Result<Vec<Found>, CudaError> {
        let words = result_words(&self.case, self.hosted.len());
        let mut held = vec![0; slots * words * 8];
        self.results.read(&mut held)?;
        let held: Vec<u64> = held.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
        Ok(held.chunks_exact(words).map(|words| read(&self.case, &self.hosted, words)).collect())
    }

    fn task(&self) -> Parameter {
        Parameter::Address(self.task.address())
    }
}

fn shape(blocks: usize) -> Shape {
    Shape { blocks: blocks as u32, threads: LANES, shared_bytes: 0, overlaps: false }
}

fn rows(case: &Case) -> usize {
    case.calls() * case.tokens
}

/// The blocks that check rows: each takes memory, so that it has two rows at least.
fn blocks(case: &Case) -> usize {
    BLOCKS.min(rows(case).div_ceil(2))
}

/// Entries of the table of rows of one rank's call.
fn table_length(case: &Case) -> usize {
    match case.what {
        What::MoeFinalize { top_k, .. } => top_k * case.tokens,
        _ => 0,
    }
}

fn result_words(case: &Case, hosted: usize) -> usize {
    rows(case) * hosted * FOUND + hosted * case.calls() * Array::ALL.len()
}

/// The words of `Task` in check.h.
fn task(case: &Case, sizes: &Sizes, hosts: &[Host]) -> Vec<u64> {
    let flag = u64::from;
    let (kind, experts) = match case.what {
        What::MoeReduction { experts, .. } => (1, experts),
        What::MoeFinalize { top_k, .. } => (2, top_k),
        _ => (0, 0),
    };
    let (weighted, shared) = match case.what {
        What::MoeReduction { .. } => (true, true),
        What::MoeFinalize { shared, weighted, .. } => (weighted, shared),
        _ => (false, false),
    };
    let quant = match case.what.quant() {
        None => 0,
        Some(Quant::Fp8) => 1,
        Some(Quant::Fp4) => 2,
        Some(Quant::GroupFp8) => 3,
        Some(Quant::DynamicFp8) => 4,
        Some(Quant::Mxfp8) => 5,
    };
    let (in_float, linear) = match case.what {
        What::Fusion { fp32_acc, scales, .. } => (fp32_acc && case.dtype != DType::Fp32, scales == layout::Scales::Linear),
        _ => (false, false),
    };
    let dtype = match case.dtype {
        DType::Bf16 => 0,
        DType::Fp16 => 1,
        DType::Fp32 => 2,
    };
    let mut words = vec![kind, dtype];
    words.extend([case.ranks, case.tokens, case.hidden, case.calls(), experts].map(|size| size as u64));
    words.extend([weighted, shared, case.takes_negative_zero(), in_float].map(flag));
    words.extend([case.what.norms(), case.what.norms_first(), matches!(case.what, What::Custom { bias: true, .. })].map(flag));
    words.extend([quant, flag(linear), case.group() as u64]);
    let bytes: BTreeMap<Array, usize> = input_sizes(case).into_iter().chain(output_sizes(case, sizes)).collect();
    words.extend(Array::ALL.iter().map(|array| bytes[array] as u64));
    words.extend(Array::ALL.iter().map(|array| if array.is_output() { guard(case, *array) as u64 } else { 0 }));
    words.push(hosts.len() as u64);
    words.extend((0..MOST_RANKS).map(|at| hosts.get(at).map_or(0, |host| host.rank as u64)));
    words.extend((0..MOST_RANKS).flat_map(|at| hosts.get(at).map_or([0; Array::ALL.len()], |host| host.addresses)));
    words
}

/// What the kernels wrote of one replay.
fn read(case: &Case, hosted: &[usize], words: &[u64]) -> Found {
    let (found, counts) = words.split_at(rows(case) * hosted.len() * FOUND);
    let row = |(at, found): (usize, &[u64])| {
        let (call, token) = (at / case.tokens, at % case.tokens);
        let mut ranks = hosted.iter().zip(found.chunks_exact(FOUND));
        ranks.try_fold(Distance::default(), |distance, (&rank, found)| match of_rank(found) {
            Ok(one) => Ok(distance.max(one)),
            Err(wrong) => Err(Fault { call, rank, token, wrong }),
        })
    };
    let changed = counts.iter().enumerate().find(|(_, count)| **count > 0).map(|(at, count)| {
        let (array, call) = (Array::ALL[at % Array::ALL.len()], at / Array::ALL.len() % case.calls());
        Changed { rank: hosted[at / Array::ALL.len() / case.calls()], call, array, count: *count }
    });
    Found { rows: found.chunks_exact(FOUND * hosted.len()).enumerate().map(row).collect(), changed }
}

fn of_rank(words: &[u64]) -> Result<Distance, Wrong> {
    const OUTPUTS: [&str; 5] = ["allreduce_out", "residual_out", "norm_out", "quant_out", "scale_out"];
    let real = |at: usize| f64::from_bits(words[at]);
    if words[0] == 0 {
        return Ok(Distance { relative: real(7), of_bound: real(8) });
    }
    Err(Wrong {
        output: OUTPUTS.get(words[0] as usize - 1).copied().unwrap_or("an unknown output"),
        count: words[1] as usize,
        unwritten: words[2] as usize,
        column: words[3] as usize,
        got: real(4),
        least: real(5),
        most: real(6),
    })
}

#[cfg(test)]
mod tests;
