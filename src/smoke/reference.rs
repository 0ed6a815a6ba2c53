//! What is right: every output of a call against float64, within what the kernel's own roundings can add up to.
//!
//! The outputs are checked in stages, each from what the stage before really wrote: the sum (or the sum with the residual)
//! against the exact one; the norm against the exact norm of the residual that was written; quantized values against the
//! norm. A stage's bound so holds that stage's roundings alone. What lies in quantized outputs is decoded: it must be the
//! rounding of some value within the bound.
//!
//! With u the unit roundoff of the type, the roundings are these. A sum in float32 is rounded once (u of its value), else
//! after each of the N−1 additions (u of the sum of magnitudes each). Each later addition rounds once. The norm's result is
//! rounded once, and its float32 arithmetic with fast maths stays within 2⁻¹⁸. Subnormal float32 values count as zero.

use super::cases::{Case, Custom, What};
use super::inputs::Inputs;
use super::layout;
use super::numbers::{DType, Floats, Small, decode_e8m0, power_of_two_above};
use crate::tables::calls::Quant;

pub const EPS: f64 = 1e-5;
/// The scale that FP8 values are divided by: some of them saturate, most do not.
pub const FP8_SCALE: f32 = 0.25;
/// The scale that FP4 block scales are multiplied with.
pub const FP4_SCALE: f32 = 4.0;
/// Relative error of a few operations in float32 with fast maths.
const FAST: f64 = 1.0 / 262_144.0;
/// What flushing subnormal float32 values to zero can cost.
const TINY: f64 = 1.0 / (1u128 << 120) as f64;
/// The smallest scale of a group, and of a token.
const LEAST_GROUP_SCALE: f64 = 1e-10;
const LEAST_TOKEN_SCALE: f64 = 1.0 / 512.0 / 448.0;
/// What one byte that was never written holds: NaN as E4M3 and as E8M0.
pub const POISON_BYTE: u8 = 0xff;

/// What one rank's call wrote. What a call does not write is empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Outputs {
    pub sum: Floats,
    pub residual: Floats,
    pub norm: Floats,
    pub quant: Vec<u8>,
    pub scales: Vec<u8>,
}

impl Outputs {
    pub fn none() -> Self {
        Self { sum: Floats::none(), residual: Floats::none(), norm: Floats::none(), quant: Vec::new(), scales: Vec::new() }
    }
}

/// How far a token's outputs are from the exact ones.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Distance {
    /// The largest error, relative to the largest exact value of its row.
    pub relative: f64,
    /// The largest part of its bound that an error took up.
    pub of_bound: f64,
}

impl Distance {
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { relative: self.relative.max(other.relative), of_bound: self.of_bound.max(other.of_bound) }
    }
}

/// What is wrong with a token's output.
#[derive(Debug, Clone, PartialEq)]
pub struct Wrong {
    pub output: &'static str,
    /// How many elements of the row are wrong, and how many of them were never written.
    pub count: usize,
    pub unwritten: usize,
    /// The first of them.
    pub column: usize,
    pub got: f64,
    pub least: f64,
    pub most: f64,
}

/// The exact value of each element of a row, and how far from it an output may be.
#[derive(Debug, Clone)]
struct Row {
    exact: Vec<f64>,
    bound: Vec<f64>,
}

/// The exact sum over the ranks for one token of one call, ready for every rank's outputs to be held against it.
#[derive(Debug)]
pub struct Expected<'a> {
    case: &'a Case,
    inputs: &'a [Inputs],
    token: usize,
    sum: Row,
}

impl<'a> Expected<'a> {
    /// `inputs` are those of all ranks.
    pub fn new(case: &'a Case, inputs: &'a [Inputs], token: usize) -> Self {
        let sum = match case.what {
            What::MoeReduction { experts, .. } => sum_of_experts(case, inputs, token, |rank, column| {
                (0..experts)
                    .map(|expert| {
                        let at = expert * case.tokens + token;
                        let scale = inputs[rank].scales.value(at);
                        value(case, &inputs[rank].main, at, column) * scale
                    })
                    .fold((0.0, 0.0, 0), |(sum, size, count), x| (sum + x, size + x.abs(), count + 1))
            }),
            What::MoeFinalize { top_k, .. } => sum_of_experts(case, inputs, token, |rank, column| {
                (0..top_k)
                    .filter_map(|k| {
                        let at = token * top_k + k;
                        let row = usize::try_from(inputs[rank].rows[at]).ok()?;
                        let scales = &inputs[rank].scales;
                        let scale = if scales.is_empty() { 1.0 } else { scales.value(at) };
                        Some(value(case, &inputs[rank].main, row, column) * scale)
                    })
                    .fold((0.0, 0.0, 0), |(sum, size, count), x| (sum + x, size + x.abs(), count + 1))
            }),
            _ => sum_of_ranks(case, inputs, token),
        };
        Self { case, inputs, token, sum }
    }

    /// Holds what `rank` wrote for this token against what is right.
    pub fn check(&self, rank: usize, outputs: &Outputs) -> Result<Distance, Wrong> {
        let case = self.case;
        let mine = &self.inputs[rank];
        let mut distance = Distance::default();
        if !outputs.sum.is_empty() {
            distance = distance.max(self.elements("allreduce_out", &outputs.sum, &self.sum, |column| self.sum.exact[column])?);
        }
        if mine.residual.is_empty() {
            return Ok(distance);
        }

        let mut summed = self.sum.clone();
        if !mine.bias.is_empty() {
            summed = summed.plus(case.dtype, |column| value(case, &mine.bias, 0, column));
        }
        if !mine.gamma_pre.is_empty() {
            summed = norm(case, &summed, &mine.gamma_pre);
        }
        let summed = summed.plus(case.dtype, |column| value(case, &mine.residual, self.token, column));
        distance = distance.max(self.elements("residual_out", &outputs.residual, &summed, |column| summed.exact[column])?);

        let written = Row {
            exact: (0..case.hidden).map(|column| value(case, &outputs.residual, self.token, column)).collect(),
            bound: vec![0.0; case.hidden],
        };
        let normed = norm(case, &written, &mine.gamma);
        let mut before_quant = normed.clone();
        if !outputs.norm.is_empty() {
            let rms = rms_of(&summed.exact);
            let wholly_exact = |column: usize| summed.exact[column] * mine.gamma.value(column) / rms;
            distance = distance.max(self.elements("norm_out", &outputs.norm, &normed, wholly_exact)?);
            before_quant = Row {
                exact: (0..case.hidden).map(|column| value(case, &outputs.norm, self.token, column)).collect(),
                bound: vec![0.0; case.hidden],
            };
        }
        if let Some(quant) = case.what.quant() {
            Quantized { case, token: self.token, outputs, norm: before_quant }.check(quant)?;
        }
        Ok(distance)
    }

    /// `exact` is what the reported error is relative to; the verdict goes by `right`.
    fn elements(
        &self,
        output: &'static str,
        floats: &Floats,
        right: &Row,
        exact: impl Fn(usize) -> f64,
    ) -> Result<Distance, Wrong> {
        let poison = self.case.dtype.poison();
        let mut tally = Tally::new(output);
        let (mut largest, mut furthest, mut of_bound) = (0.0f64, 0.0f64, 0.0f64);
        for (column, (right, bound)) in right.exact.iter().zip(&right.bound).enumerate() {
            let at = self.token * self.case.hidden + column;
            let got = floats.value(at);
            let error = (got - right).abs();
            // Written so that a NaN is wrong too.
            if error <= *bound {
                let exact = exact(column);
                largest = largest.max(exact.abs());
                furthest = furthest.max((got - exact).abs());
                of_bound = of_bound.max(error / bound);
            } else {
                tally.wrong(column, got, right - bound, right + bound, floats.word(at) == poison);
            }
        }
        tally.end().map(|()| Distance { relative: if largest > 0.0 { furthest / largest } else { 0.0 }, of_bound })
    }
}

impl Row {
    /// One more addition, rounded once.
    fn plus(mut self, dtype: DType, other: impl Fn(usize) -> f64) -> Self {
        for (column, (exact, bound)) in self.exact.iter_mut().zip(&mut self.bound).enumerate() {
            *exact += other(column);
            *bound += (dtype.unit() + 2f64.powi(-23)) * (exact.abs() + *bound) + dtype.quantum() + TINY;
        }
        self
    }
}

fn value(case: &Case, floats: &Floats, row: usize, column: usize) -> f64 {
    floats.value(row * case.hidden + column)
}

fn sum_of_ranks(case: &Case, inputs: &[Inputs], token: usize) -> Row {
    let unit = case.dtype.unit();
    let in_float = match case.what {
        What::Fusion { fp32_acc, .. } => fp32_acc && case.dtype != DType::Fp32,
        _ => false,
    };
    let additions = case.ranks as f64 - 1.0;
    let (exact, bound) = (0..case.hidden)
        .map(|column| {
            let (sum, size) = inputs.iter().fold((0.0, 0.0), |(sum, size): (f64, f64), rank| {
                let x = value(case, &rank.main, token, column);
                (sum + x, size + x.abs())
            });
            let bound = if in_float {
                let error = case.ranks as f64 * 2f64.powi(-24) * size + TINY;
                error + unit * (sum.abs() + error) + case.dtype.quantum()
            } else {
                additions * (1.02 * unit * size + case.dtype.quantum()) + TINY
            };
            (sum, bound)
        })
        .unzip();
    Row { exact, bound }
}

/// The sum over ranks of each rank's sum over its experts and what is added to it. `experts` gives, for a rank and a
/// column: sum, sum of magnitudes, and number of experts.
fn sum_of_experts(case: &Case, inputs: &[Inputs], token: usize, experts: impl Fn(usize, usize) -> (f64, f64, usize)) -> Row {
    let (unit, quantum) = (case.dtype.unit(), case.dtype.quantum());
    let (exact, bound) = (0..case.hidden)
        .map(|column| {
            let (mut sum, mut size, mut bound) = (0.0, 0.0, 0.0);
            for (rank, inputs) in inputs.iter().enumerate() {
                let (mut of_rank, mut size_of_rank, count) = experts(rank, column);
                if !inputs.shared.is_empty() {
                    let shared = value(case, &inputs.shared, token, column);
                    of_rank += shared;
                    size_of_rank += shared.abs();
                }
                // Each product is rounded, and each addition.
                let roundings = count as f64 + 2.0;
                bound += roundings * (1.05 * unit * size_of_rank + quantum + TINY);
                sum += of_rank;
                size += size_of_rank;
            }
            bound += (case.ranks as f64 - 1.0) * (1.1 * unit * size + quantum) + TINY;
            (sum, bound)
        })
        .unzip();
    Row { exact, bound }
}

/// Partial sums of a row, each of every 256th value. A block of threads adds in this order too, so that it gets the same bits.
const LANES: usize = 256;

fn mean_of_squares(values: &[f64]) -> f64 {
    let mut lanes = [0.0; LANES];
    for chunk in values.chunks(LANES) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x * x);
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        half /= 2;
    }
    lanes[0] / values.len() as f64
}

fn rms_of(values: &[f64]) -> f64 {
    (mean_of_squares(values) + EPS).sqrt()
}

/// The RMS norm of a row whose elements are known within their bounds.
fn norm(case: &Case, row: &Row, gamma: &Floats) -> Row {
    let rms = rms_of(&row.exact);
    let rms_error = mean_of_squares(&row.bound).sqrt() / rms;
    let (exact, bound) = row
        .exact
        .iter()
        .zip(&row.bound)
        .enumerate()
        .map(|(column, (x, error))| {
            let weight = gamma.value(column);
            let exact = x * weight / rms;
            let mut bound = weight.abs() / rms * (error + x.abs() * rms_error) / (1.0 - rms_error);
            bound += FAST * exact.abs();
            bound += case.dtype.unit() * (exact.abs() + bound) + case.dtype.quantum() + TINY;
            (exact, bound)
        })
        .unzip();
    Row { exact, bound }
}

/// A token's quantized output, and the norm that it was made of.
struct Quantized<'a> {
    case: &'a Case,
    token: usize,
    outputs: &'a Outputs,
    norm: Row,
}

impl Quantized<'_> {
    fn check(&self, quant: Quant) -> Result<(), Wrong> {
        let (hidden, token) = (self.case.hidden, self.token);
        let scales = &self.outputs.scales;
        match quant {
            Quant::Fp8 => self.values("quant_out", Small::E4m3, hidden, |_| 1.0 / f64::from(FP8_SCALE)),
            Quant::Fp4 => {
                let layout = self.layout();
                let columns = hidden / 16;
                let code = |block: usize| scales[layout.offset(token, block, columns)];
                let given = f64::from(FP4_SCALE);
                self.scales(
                    columns,
                    16,
                    |block| Small::E4m3.decode(code(block)),
                    |largest| Small::E4m3.round(given * largest / 6.0),
                )?;
                self.values("quant_out", Small::E2m1, 16, |block| {
                    let scale = Small::E4m3.decode(code(block));
                    if scale == 0.0 { 0.0 } else { given / scale }
                })
            }
            Quant::GroupFp8 => {
                let group = self.case.group();
                let code = |at: usize| scales[layout::group_scale_offset(token, at, self.case.tokens)];
                self.scales(
                    hidden / group,
                    group,
                    |at| decode_e8m0(code(at)),
                    |largest| power_of_two_above((largest / 448.0).max(LEAST_GROUP_SCALE)),
                )?;
                self.values("quant_out", Small::E4m3, group, |at| 1.0 / decode_e8m0(code(at)))
            }
            Quant::DynamicFp8 => {
                let bytes: [u8; 4] = scales[token * 4..][..4].try_into().expect("four bytes were cut out");
                let scale = f64::from(f32::from_le_bytes(bytes));
                self.scales(1, hidden, |_| scale, |largest| (largest / 448.0).max(LEAST_TOKEN_SCALE))?;
                self.values("quant_out", Small::E4m3, hidden, |_| 1.0 / scale)
            }
            Quant::Mxfp8 => {
                let layout = self.layout();
                let columns = hidden / 32;
                let code = |block: usize| scales[layout.offset(token, block, columns)];
                self.scales(columns, 32, |block| decode_e8m0(code(block)), |largest| power_of_two_above(largest / 448.0))?;
                self.values("quant_out", Small::E4m3, 32, |block| match code(block) {
                    0 => 0.0,
                    code => 1.0 / decode_e8m0(code),
                })
            }
        }
    }

    fn layout(&self) -> layout::Scales {
        match self.case.what {
            What::Fusion { scales, .. } => scales,
            _ => layout::Scales::Swizzled,
        }
    }

    /// Each block's scale must be what `right` (which never falls) makes of some largest magnitude within the bounds.
    fn scales(&self, blocks: usize, block: usize, got: impl Fn(usize) -> f64, right: impl Fn(f64) -> f64) -> Result<(), Wrong> {
        let mut tally = Tally::new("scale_out");
        for at in 0..blocks {
            let columns = at * block..(at + 1) * block;
            let (mut least, mut most) = (0.0f64, 0.0f64);
            for (exact, bound) in self.norm.exact[columns.clone()].iter().zip(&self.norm.bound[columns]) {
                least = least.max(exact.abs() - bound);
                most = most.max(exact.abs() + bound);
            }
            let (least, most) = (right(least * (1.0 - FAST)) * (1.0 - FAST), right(most * (1.0 + FAST) + TINY) * (1.0 + FAST));
            let got = got(at);
            if !(least <= got && got <= most) {
                tally.wrong(at, got, least, most, got.is_nan());
            }
        }
        tally.end()
    }

    /// Each value must be the rounding of some value within the bounds, times its block's `factor`.
    fn values(&self, output: &'static str, small: Small, block: usize, factor: impl Fn(usize) -> f64) -> Result<(), Wrong> {
        let mut tally = Tally::new(output);
        let row = self.token * self.case.hidden;
        for at in 0..self.case.hidden / block {
            let factor = factor(at);
            for column in at * block..(at + 1) * block {
                let element = row + column;
                let code = match small {
                    Small::E4m3 => self.outputs.quant[element],
                    // The first of two values lies in the low half.
                    Small::E2m1 => self.outputs.quant[element / 2] >> (element % 2 * 4) & 15,
                };
                let got = small.decode(code);
                let (exact, bound) = (self.norm.exact[column], self.norm.bound[column]);
                let room = bound + FAST * exact.abs() + TINY;
                let (least, most) = (small.round((exact - room) * factor), small.round((exact + room) * factor));
                if !(least <= got && got <= most) {
                    tally.wrong(column, got, least, most, small == Small::E4m3 && code == POISON_BYTE);
                }
            }
        }
        tally.end()
    }
}

/// Counts what is wrong in a row and keeps the first.
struct Tally {
    output: &'static str,
    first: Option<Wrong>,
}

impl Tally {
    fn new(output: &'static str) -> Self {
        Self { output, first: None }
    }

    fn wrong(&mut self, column: usize, got: f64, least: f64, most: f64, unwritten: bool) {
        let output = self.output;
        let wrong = self.first.get_or_insert(Wrong { output, count: 0, unwritten: 0, column, got, least, most });
        wrong.count += 1;
        wrong.unwritten += usize::from(unwritten);
    }

    fn end(self) -> Result<(), Wrong> {
        self.first.map_or(Ok(()), Err)
    }
}

/// Which outputs a case writes, in elements (bytes for quantized ones) without the row that guards their end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    pub sum: usize,
    pub residual: usize,
    pub norm: usize,
    pub quant: usize,
    pub scales: usize,
}

impl Sizes {
    pub fn of(case: &Case) -> Self {
        let all = case.tokens * case.hidden;
        let mut sizes = Self::default();
        match case.what {
            What::Fusion { .. } => {
                let Some(pattern) = case.what.pattern() else { return sizes };
                if pattern.norm {
                    sizes.residual = all;
                    sizes.norm = if pattern.norm_out { all } else { 0 };
                } else {
                    sizes.sum = all;
                }
            }
            What::Custom { path, .. } if path.norm() => (sizes.residual, sizes.norm) = (all, all),
            What::Custom {
                path: Custom::OneShotPull | Custom::OneShotPush | Custom::TwoShotPull | Custom::TwoShotPush, ..
            } => {
                sizes.sum = all;
            }
            What::MoeReduction { .. } => (sizes.sum, sizes.residual, sizes.norm) = (all, all, all),
            What::MoeFinalize { .. } => (sizes.residual, sizes.norm) = (all, all),
            What::Custom { .. } | What::Initialize | What::InitializeAll => {}
        }
        let layout = match case.what {
            What::Fusion { scales, .. } => scales,
            _ => layout::Scales::Swizzled,
        };
        (sizes.quant, sizes.scales) = match case.what.quant() {
            None => (0, 0),
            Some(Quant::Fp8) => (all, 0),
            Some(Quant::Fp4) => (all / 2, layout.bytes(case.tokens, case.hidden / 16)),
            Some(Quant::GroupFp8) => (all, layout::group_scale_bytes(case.tokens, case.hidden / case.group())),
            Some(Quant::DynamicFp8) => (all, 4 * case.tokens),
            Some(Quant::Mxfp8) => (all, layout.bytes(case.tokens, case.hidden / 32)),
        };
        sizes
    }
}

#[cfg(test)]
pub mod tests;
