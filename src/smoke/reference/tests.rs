//! The reference against a stand-in for the kernels: their roundings, step by step, in 16-bit and float32 arithmetic.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::*;
use crate::smoke::cases::{RANKS, REPLAYS};
use crate::smoke::inputs::{make, seed};
use crate::smoke::layout::Scales;
use crate::tables::calls::calls;

fn fusion(pattern: i64, dtype: DType, ranks: usize, hidden: usize, fp32_acc: bool) -> Case {
    let what = What::Fusion { pattern, oneshot: true, fp32_acc, trigger_at_end: true, scales: Scales::Swizzled };
    Case { what, dtype, ranks, tokens: 3, hidden, pdl: false, replays: REPLAYS }
}

/// The value as the type holds it.
fn held(dtype: DType, value: f32) -> f32 {
    dtype.decode(dtype.encode(f64::from(value))) as f32
}

/// A row of numbers; of one that has a single row, row 0.
fn numbers(floats: &Floats, row: usize, hidden: usize) -> Vec<f32> {
    (row * hidden..(row + 1) * hidden).map(|at| floats.value(at) as f32).collect()
}

fn added(dtype: DType, one: &[f32], other: &[f32]) -> Vec<f32> {
    one.iter().zip(other).map(|(a, b)| held(dtype, a + b)).collect()
}

fn normed(dtype: DType, row: &[f32], gamma: &[f32]) -> Vec<f32> {
    let square: f32 = row.iter().map(|x| x * x).sum();
    let factor = 1.0 / (square / row.len() as f32 + EPS as f32).sqrt();
    row.iter().zip(gamma).map(|(x, g)| held(dtype, x * factor * g)).collect()
}

/// What the kernels would write for `rank`.
pub fn kernel(case: &Case, inputs: &[Inputs], rank: usize) -> Outputs {
    let (dtype, hidden) = (case.dtype, case.hidden);
    let sizes = Sizes::of(case);
    let mut outputs =
        Outputs { quant: vec![POISON_BYTE; sizes.quant], scales: vec![POISON_BYTE; sizes.scales], ..Outputs::none() };
    let (mut sums, mut residuals, mut norms) = (Vec::new(), Vec::new(), Vec::new());
    let encode = |row: &[f32]| row.iter().map(|x| dtype.encode(f64::from(*x))).collect::<Vec<_>>();
    let gamma = if inputs[rank].gamma.is_empty() { Vec::new() } else { numbers(&inputs[rank].gamma, 0, hidden) };
    for token in 0..case.tokens {
        let sum = summed(case, inputs, token);
        if sizes.sum > 0 {
            sums.extend(encode(&sum));
        }
        if inputs[rank].residual.is_empty() {
            continue;
        }
        let mut row = sum;
        if !inputs[rank].bias.is_empty() {
            row = added(dtype, &row, &numbers(&inputs[rank].bias, 0, hidden));
        }
        if !inputs[rank].gamma_pre.is_empty() {
            row = normed(dtype, &row, &numbers(&inputs[rank].gamma_pre, 0, hidden));
        }
        row = added(dtype, &row, &numbers(&inputs[rank].residual, token, hidden));
        residuals.extend(encode(&row));
        let norm = normed(dtype, &row, &gamma);
        if sizes.norm > 0 {
            norms.extend(encode(&norm));
        }
        if let Some(quant) = case.what.quant() {
            quantize(case, quant, token, &norm, &mut outputs);
        }
    }
    outputs.sum = Floats::from_words(dtype, sums);
    outputs.residual = Floats::from_words(dtype, residuals);
    outputs.norm = Floats::from_words(dtype, norms);
    outputs
}

fn summed(case: &Case, inputs: &[Inputs], token: usize) -> Vec<f32> {
    let (dtype, hidden) = (case.dtype, case.hidden);
    let of_rank = |inputs: &Inputs| -> Vec<f32> {
        let row = |floats: &Floats, at: usize| numbers(floats, at, hidden);
        let mut sum = vec![0.0; hidden];
        let mut add = |row: Vec<f32>, scale: f32| {
            let scaled: Vec<f32> = row.iter().map(|x| held(dtype, x * scale)).collect();
            sum = added(dtype, &sum, &scaled);
        };
        match case.what {
            What::MoeReduction { experts, .. } => {
                for expert in 0..experts {
                    let at = expert * case.tokens + token;
                    add(row(&inputs.main, at), inputs.scales.value(at) as f32);
                }
            }
            What::MoeFinalize { top_k, .. } => {
                for at in token * top_k..(token + 1) * top_k {
                    if let Ok(from) = usize::try_from(inputs.rows[at]) {
                        let scale = if inputs.scales.is_empty() { 1.0 } else { inputs.scales.value(at) as f32 };
                        add(row(&inputs.main, from), scale);
                    }
                }
            }
            _ => return row(&inputs.main, token),
        }
        if inputs.shared.is_empty() { sum } else { added(dtype, &sum, &row(&inputs.shared, token)) }
    };
    let rows: Vec<Vec<f32>> = inputs.iter().map(of_rank).collect();
    if matches!(case.what, What::Fusion { fp32_acc: true, .. }) && dtype != DType::Fp32 {
        return (0..hidden).map(|column| held(dtype, rows.iter().map(|row| row[column]).sum())).collect();
    }
    rows[1..].iter().fold(rows[0].clone(), |sum, row| added(dtype, &sum, row))
}

/// A number as a key: zeros of both signs are one.
fn bits_of(value: f64) -> u64 {
    (value + 0.0).to_bits()
}

/// The first code of each number.
fn codes(small: Small) -> &'static HashMap<u64, u8> {
    static CODES: [OnceLock<HashMap<u64, u8>>; 2] = [OnceLock::new(), OnceLock::new()];
    let (at, last) = if small == Small::E4m3 { (0, 255u8) } else { (1, 15) };
    CODES[at].get_or_init(|| (0..=last).rev().map(|code| (bits_of(small.decode(code)), code)).collect())
}

fn quantize(case: &Case, quant: Quant, token: usize, norm: &[f32], outputs: &mut Outputs) {
    let hidden = case.hidden;
    let code_of = |small: Small, value: f32| codes(small)[&bits_of(small.round(f64::from(value)))];
    let e8m0 = |value: f64| (value.log2() + 127.0) as u8;
    let largest = |block: &[f32]| block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let layout = match case.what {
        What::Fusion { scales, .. } => scales,
        _ => Scales::Swizzled,
    };
    let (small, block) = match quant {
        Quant::Fp8 | Quant::DynamicFp8 => (Small::E4m3, hidden),
        Quant::Fp4 => (Small::E2m1, 16),
        Quant::GroupFp8 => (Small::E4m3, case.group()),
        Quant::Mxfp8 => (Small::E4m3, 32),
    };
    for (at, values) in norm.chunks(block).enumerate() {
        let factor = match quant {
            Quant::Fp8 => 1.0 / FP8_SCALE,
            Quant::Fp4 => {
                let code = code_of(Small::E4m3, FP4_SCALE * (largest(values) / 6.0));
                outputs.scales[layout.offset(token, at, hidden / 16)] = code;
                let scale = Small::E4m3.decode(code) as f32;
                if scale == 0.0 { 0.0 } else { FP4_SCALE / scale }
            }
            Quant::GroupFp8 => {
                let scale = power_of_two_above(f64::from(largest(values) / 448.0).max(LEAST_GROUP_SCALE));
                outputs.scales[layout::group_scale_offset(token, at, case.tokens)] = e8m0(scale);
                1.0 / scale as f32
            }
            Quant::DynamicFp8 => {
                let scale = (largest(values) / 448.0).max(LEAST_TOKEN_SCALE as f32);
                outputs.scales[token * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                1.0 / scale
            }
            Quant::Mxfp8 => {
                let scale = power_of_two_above(f64::from(largest(values) / 448.0));
                outputs.scales[layout.offset(token, at, hidden / 32)] = e8m0(scale);
                if e8m0(scale) == 0 { 0.0 } else { 1.0 / scale as f32 }
            }
        };
        for (column, value) in values.iter().enumerate() {
            let element = token * hidden + at * block + column;
            let code = code_of(small, value * factor);
            match small {
                Small::E4m3 => outputs.quant[element] = code,
                Small::E2m1 if element.is_multiple_of(2) => outputs.quant[element / 2] = code,
                Small::E2m1 => outputs.quant[element / 2] |= code << 4,
            }
        }
    }
}

fn inputs(case: &Case, replay: u32) -> Vec<Inputs> {
    (0..case.ranks).map(|rank| make(case, seed(1, replay), 0, rank)).collect()
}

fn check(case: &Case, inputs: &[Inputs], rank: usize, outputs: &Outputs) -> Result<Distance, Wrong> {
    (0..case.tokens).try_fold(Distance::default(), |distance, token| {
        Expected::new(case, inputs, token).check(rank, outputs).map(|found| distance.max(found))
    })
}

/// Checks what the stand-in makes of `case`; how close it came to its bounds.
fn passes(case: &Case) -> Distance {
    let mut distance = Distance::default();
    for replay in 0..2 {
        let inputs = inputs(case, replay);
        for rank in [0, case.ranks - 1] {
            let outputs = kernel(case, &inputs, rank);
            distance = distance.max(check(case, &inputs, rank, &outputs).unwrap_or_else(|wrong| panic!("{case}: {wrong:?}")));
        }
    }
    distance
}

#[test]
fn correct_roundings_pass_in_every_pattern_and_type() {
    let mut distance = Distance::default();
    for pattern in &calls().patterns {
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
            if pattern.quant == Some(Quant::Fp4) && dtype == DType::Fp32 {
                continue;
            }
            // A row of whole warps, and one whose last warp is partial.
            for hidden in [512, 576] {
                distance = distance.max(passes(&fusion(pattern.code, dtype, 4, hidden, true)));
            }
        }
        for ranks in RANKS {
            distance = distance.max(passes(&fusion(pattern.code, DType::Bf16, ranks, 512, false)));
        }
    }
    distance = distance.max(passes(&fusion(1, DType::Bf16, 4, 2880, true)));
    // The bounds are worst cases and no fantasies: real roundings come near them.
    assert!(distance.of_bound > 0.5 && distance.of_bound <= 1.0, "{distance:?}");
    assert!(distance.relative < 2e-2, "{distance:?}");
}

#[test]
fn correct_roundings_pass_in_the_custom_and_moe_functions() {
    let case = |what, dtype| Case { what, dtype, ranks: 4, tokens: 3, hidden: 512, pdl: false, replays: REPLAYS };
    for dtype in [DType::Bf16, DType::Fp16] {
        for path in Custom::ALL {
            passes(&case(What::Custom { path, bias: path.norm() }, dtype));
        }
        passes(&case(What::MoeReduction { experts: 3, quant: false }, dtype));
        passes(&case(What::MoeReduction { experts: 3, quant: true }, dtype));
        for (shared, weighted) in [(true, true), (false, true), (true, false)] {
            passes(&case(What::MoeFinalize { top_k: 3, shared, weighted }, dtype));
        }
    }
}

#[test]
fn an_element_that_was_never_written_is_found_and_said_to_be_so() {
    let case = fusion(4, DType::Bf16, 2, 512, true);
    let inputs = inputs(&case, 0);
    let right = kernel(&case, &inputs, 0);
    let mut outputs = right.clone();
    outputs.norm.set(700, DType::Bf16.poison());
    let wrong = check(&case, &inputs, 0, &outputs).unwrap_err();
    assert_eq!((wrong.output, wrong.count, wrong.unwritten, wrong.column), ("norm_out", 1, 1, 188));
    let mut outputs = right;
    outputs.quant[513] = POISON_BYTE;
    let wrong = check(&case, &inputs, 0, &outputs).unwrap_err();
    assert_eq!((wrong.output, wrong.unwritten, wrong.column), ("quant_out", 1, 1));
}

#[test]
fn a_rank_that_is_missing_doubled_or_of_the_replay_before_is_found() {
    for dtype in [DType::Bf16, DType::Fp16] {
        let case = fusion(1, dtype, 8, 512, false);
        let right = inputs(&case, 1);
        let before = inputs(&case, 0);
        let with = |at: usize, other: &Inputs| {
            let mut changed = right.clone();
            changed[at].main = other.main.clone();
            check(&case, &right, 0, &kernel(&case, &changed, 0)).unwrap_err()
        };
        let nothing = Inputs { main: Floats::from_words(dtype, vec![0; right[0].main.len()]), ..Inputs::none() };
        for wrong in [with(3, &nothing), with(3, &right[2]), with(7, &before[7])] {
            assert_eq!(wrong.output, "residual_out");
            assert!(wrong.count > 100, "{wrong:?}");
        }
    }
}

#[test]
fn a_row_whose_mean_missed_a_warp_is_found() {
    let case = fusion(1, DType::Bf16, 2, 2880, true);
    let inputs = inputs(&case, 0);
    let mut outputs = kernel(&case, &inputs, 0);
    for token in 0..case.tokens {
        let row = numbers(&outputs.residual, token, 2880);
        let square: f32 = row[..2880 - 160].iter().map(|x| x * x).sum();
        let factor = 1.0 / (square / 2880.0 + EPS as f32).sqrt();
        let gamma = numbers(&inputs[0].gamma, 0, 2880);
        for column in 0..2880 {
            let word = case.dtype.encode(f64::from(row[column] * factor * gamma[column]));
            outputs.norm.set(token * 2880 + column, word);
        }
    }
    assert_eq!(check(&case, &inputs, 0, &outputs).unwrap_err().output, "norm_out");
}

#[test]
fn a_wrong_scale_a_shifted_value_and_nan_are_found_in_quantized_outputs() {
    for code in [3, 5, 8, 10, 13] {
        let case = fusion(code, DType::Bf16, 2, 512, true);
        let inputs = inputs(&case, 0);
        let right = kernel(&case, &inputs, 0);
        check(&case, &inputs, 0, &right).unwrap();
        let mut outputs = right.clone();
        outputs.scales[1] = outputs.scales[1].wrapping_add(8);
        if code == 10 {
            outputs.scales[3] ^= 1;
        }
        assert_eq!(check(&case, &inputs, 0, &outputs).unwrap_err().output, "scale_out", "pattern {code}");
        let mut outputs = right.clone();
        outputs.quant.rotate_right(1);
        assert_eq!(check(&case, &inputs, 0, &outputs).unwrap_err().output, "quant_out", "pattern {code}");
        let mut outputs = right;
        outputs.residual.set(5, 0x7fc0);
        assert_eq!(check(&case, &inputs, 0, &outputs).unwrap_err().output, "residual_out", "pattern {code}");
    }
}

#[test]
fn negative_zero_is_as_good_as_zero_in_a_result() {
    let case = fusion(0, DType::Bf16, 2, 512, true);
    let all = |word| Floats::from_words(DType::Bf16, vec![word; 3 * 512]);
    let zeros = vec![Inputs { main: all(0), ..Inputs::none() }; 2];
    let outputs = Outputs { sum: all(0x8000), ..Outputs::none() };
    assert_eq!(check(&case, &zeros, 1, &outputs).unwrap().relative, 0.0);
}
