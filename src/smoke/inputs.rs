//! The inputs of a replay: made anew each time from a seed, the same in every process that needs them.
//!
//! Each element comes from a counter alone, so that any rank, any thread and any device can make any part of it.

use rayon::prelude::*;

use super::cases::{Case, What};
use super::numbers::{DType, Floats};

/// What one rank passes to one call. What a call does not take is empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// What is reduced over the ranks: tokens × hidden; for the MoE functions (experts or top-k) × tokens × hidden.
    pub main: Floats,
    pub residual: Floats,
    pub gamma: Floats,
    /// The weight of the norm before the residual.
    pub gamma_pre: Floats,
    pub bias: Floats,
    /// MoE: what is added to the experts' sum (tokens × hidden).
    pub shared: Floats,
    /// MoE: experts × tokens (reduction, float32) or tokens × top-k (finalize, the type of the case).
    pub scales: Floats,
    /// MoE finalize: the row of `main` for each token and expert, or −1 for none. tokens × top-k.
    pub rows: Vec<i32>,
}

impl Inputs {
    pub fn none() -> Self {
        let none = Floats::none;
        Self {
            main: none(),
            residual: none(),
            gamma: none(),
            gamma_pre: none(),
            bias: none(),
            shared: none(),
            scales: none(),
            rows: Vec::new(),
        }
    }
}

/// The arrays of [`Inputs`] have streams of their own.
#[derive(Clone, Copy)]
enum Stream {
    Main = 1,
    Residual,
    Gamma,
    GammaPre,
    Bias,
    Shared,
    Scales,
    Rows,
}

/// A seed of one replay of one case.
pub fn seed(case_number: u64, replay: u32) -> u64 {
    mix(case_number << 32 | u64::from(replay))
}

/// The inputs of `rank` for the call `call` of a replay.
#[cfg(test)]
pub fn make(case: &Case, seed: u64, call: usize, rank: usize) -> Inputs {
    parts(case, seed, call, rank, true)
}

/// The inputs of so many calls, by call and rank: whole for the `hosted` ranks, what is reduced for the others.
pub fn of_all(case: &Case, seed: u64, calls: usize, hosted: &[usize]) -> Vec<Vec<Inputs>> {
    let of_rank = |call, rank| parts(case, seed, call, rank, hosted.contains(&rank));
    (0..calls).map(|call| (0..case.ranks).into_par_iter().map(|rank| of_rank(call, rank)).collect()).collect()
}

/// The inputs of `rank` for the call `call`: `whole`, or what the other ranks need of them, with the rest empty.
fn parts(case: &Case, seed: u64, call: usize, rank: usize, whole: bool) -> Inputs {
    let (tokens, hidden) = (case.tokens, case.hidden);
    let source = |stream: Stream| mix(seed ^ mix((call as u64) << 32 | (rank as u64) << 8 | stream as u64));
    let values = |stream, rows: usize, spared: bool| {
        matrix(case.dtype, source(stream), rows, hidden, (seed % 4) as usize, case.takes_negative_zero() || spared)
    };
    let mut inputs = Inputs::none();
    match case.what {
        What::Fusion { .. } | What::Custom { .. } => inputs.main = values(Stream::Main, tokens, false),
        What::MoeReduction { experts, .. } => {
            inputs.main = values(Stream::Main, experts * tokens, false);
            inputs.shared = values(Stream::Shared, tokens, false);
            inputs.scales = scales(source(Stream::Scales), experts * tokens, DType::Fp32);
        }
        What::MoeFinalize { top_k, shared, weighted } => {
            inputs.main = values(Stream::Main, top_k * tokens, false);
            inputs.rows = rows(source(Stream::Rows), top_k * tokens);
            if shared {
                inputs.shared = values(Stream::Shared, tokens, false);
            }
            if weighted {
                inputs.scales = scales(source(Stream::Scales), top_k * tokens, case.dtype);
            }
        }
        What::Initialize | What::InitializeAll => {}
    }
    if whole && case.what.norms() {
        inputs.residual = values(Stream::Residual, tokens, true);
        inputs.gamma = values(Stream::Gamma, 1, true);
        if case.what.norms_first() {
            inputs.gamma_pre = values(Stream::GammaPre, 1, true);
        }
    }
    if whole && matches!(case.what, What::Custom { bias: true, .. }) {
        inputs.bias = values(Stream::Bias, 1, true);
    }
    inputs
}

/// Rows of very different size, with zeros of both signs and subnormals among them.
fn matrix(dtype: DType, source: u64, rows: usize, hidden: usize, turn: usize, negative_zeros: bool) -> Floats {
    // The second is of the order of sqrt(eps), where the norm is most sensitive.
    const SIZES: [f64; 4] = [1.0, 4e-3, 30.0, 0.2];
    Floats::by_rows(dtype, rows, hidden, |row, set| {
        let size = SIZES[(row + turn) % 4];
        for column in 0..hidden {
            // A whole access of 16 bytes, in every rank.
            let word = if row == rows - 1 && column < 8 {
                dtype.negative_zero()
            } else {
                element(dtype, mix(source ^ (row * hidden + column) as u64), size)
            };
            set(column, if !negative_zeros && word == dtype.negative_zero() { 0 } else { word });
        }
    })
}

/// The bits of one element: nearly normal of the given size; one in 32 a subnormal, one in 64 zero, one in 32 −0.0.
fn element(dtype: DType, hash: u64, size: f64) -> u32 {
    let kind = mix(hash) & 63;
    match kind {
        0 | 1 => {
            let subnormal = (hash >> 8) as u32 % dtype.largest_subnormal() + 1;
            let sign = if hash & 1 == 1 { dtype.negative_zero() } else { 0 };
            subnormal | sign
        }
        2 => 0,
        62 | 63 => dtype.negative_zero(),
        _ => dtype.encode(normal(hash) * size),
    }
}

/// Of mean 0 and deviation 1, and nearly normal: the sum of four uniform numbers.
fn normal(hash: u64) -> f64 {
    let sum: u64 = (0..4).map(|part| hash >> (16 * part) & 0xffff).sum();
    (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
}

/// Weights of experts: between 1/8 and 9/8.
fn scales(source: u64, count: usize, dtype: DType) -> Floats {
    let scale = |at| dtype.encode(0.125 + (mix(source ^ at as u64) >> 11) as f64 / 2f64.powi(53));
    Floats::from_words(dtype, (0..count).map(scale))
}

/// A permutation of all rows, in which about one in eight is none.
fn rows(source: u64, count: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..count as i32).collect();
    order.sort_by_key(|row| mix(source ^ *row as u64));
    order.iter().enumerate().map(|(at, row)| if mix(source.wrapping_add(at as u64)) & 7 == 0 { -1 } else { *row }).collect()
}

/// A number of 64 bits in which every bit depends on every bit of `value` (the finalizer of SplitMix64).
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smoke::cases::{Custom, REPLAYS, Scope, Set, plan};
    use crate::tables::calls::calls;

    fn case(what: What, dtype: DType) -> Case {
        Case { what, dtype, ranks: 2, tokens: 5, hidden: 2880, pdl: false, replays: REPLAYS }
    }

    #[test]
    fn inputs_hold_zeros_of_both_signs_and_subnormals_and_are_finite() {
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
            let what = plan_fusion();
            let inputs = make(&case(what, dtype), seed(3, 1), 0, 1);
            for words in [&inputs.main, &inputs.residual, &inputs.gamma] {
                assert!(words.words().any(|word| word == dtype.negative_zero()) && words.words().any(|word| word == 0));
                let magnitude = |word: u32| word & !dtype.negative_zero();
                assert!(words.words().any(|word| (1..=dtype.largest_subnormal()).contains(&magnitude(word))));
                assert!(words.words().all(|word| dtype.decode(word).is_finite()));
            }
            assert!((0..8).all(|column| inputs.main.word(4 * 2880 + column) == dtype.negative_zero()));
        }
    }

    fn plan_fusion() -> What {
        let scope = Scope {
            sm: 120,
            functions: calls().functions.iter().map(|function| function.name.clone()).collect(),
            patterns: [1].into(),
            ranks: vec![2],
            release: None,
        };
        plan(Set::Quick, &scope)[0].case.what
    }

    #[test]
    fn the_path_that_would_wait_for_ever_gets_no_negative_zero() {
        let what = What::Custom { path: Custom::NormLamport, bias: true };
        let inputs = make(&case(what, DType::Bf16), 7, 2, 0);
        assert!(inputs.main.words().all(|word| word != DType::Bf16.negative_zero()));
        assert!(inputs.residual.words().any(|word| word == DType::Bf16.negative_zero()), "the residual is not sent");
        assert_eq!(inputs.bias.len(), 2880);
    }

    #[test]
    fn inputs_are_the_same_for_a_seed_and_others_for_any_other() {
        let case = case(plan_fusion(), DType::Fp16);
        assert_eq!(make(&case, 5, 0, 0), make(&case, 5, 0, 0));
        let first = make(&case, seed(0, 0), 0, 0).main;
        for other in [make(&case, seed(0, 1), 0, 0), make(&case, seed(0, 0), 1, 0), make(&case, seed(0, 0), 0, 1)] {
            let equal = first.words().zip(other.main.words()).filter(|(one, other)| one == other).count();
            assert!(equal < first.len() / 10, "{equal} of {} are equal", first.len());
        }
    }

    #[test]
    fn what_the_others_need_is_a_part_of_what_a_rank_has() {
        let finalize = What::MoeFinalize { top_k: 3, shared: true, weighted: true };
        for what in [plan_fusion(), finalize, What::Custom { path: Custom::PrePostOneShot, bias: true }] {
            let case = case(what, DType::Bf16);
            let (whole, reduced) = (make(&case, 5, 0, 1), parts(&case, 5, 0, 1, false));
            assert!(!whole.gamma.is_empty() && reduced.gamma.is_empty() && reduced.bias.is_empty());
            let none = Floats::none;
            let (residual, gamma, gamma_pre, bias) = (none(), none(), none(), none());
            assert_eq!(reduced, Inputs { residual, gamma, gamma_pre, bias, ..whole });
        }
    }

    #[test]
    fn rows_of_experts_are_a_permutation_with_gaps() {
        let inputs = make(&case(What::MoeFinalize { top_k: 3, shared: true, weighted: true }, DType::Bf16), 11, 0, 0);
        let mut rows: Vec<i32> = inputs.rows.iter().copied().filter(|row| *row >= 0).collect();
        assert!(rows.len() < 15 && rows.len() > 5, "{rows:?}");
        rows.sort();
        rows.dedup();
        assert_eq!(rows.len(), inputs.rows.iter().filter(|row| **row >= 0).count());
        assert!((0..15).all(|at| (0.12..1.13).contains(&inputs.scales.value(at))));
    }

    #[test]
    fn the_normal_numbers_have_mean_0_and_deviation_1() {
        let numbers: Vec<f64> = (0..20_000u64).map(|at| normal(mix(at))).collect();
        let mean = numbers.iter().sum::<f64>() / 2e4;
        let square = numbers.iter().map(|x| x * x).sum::<f64>() / 2e4;
        assert!(mean.abs() < 0.03 && (square - 1.0).abs() < 0.05, "{mean} {square}");
    }
}
