//! The arrays that a call reads and writes, as they lie in a rank's memory.

use std::borrow::Cow;

use super::cases::{Case, What};
use super::inputs::Inputs;
use super::numbers::DType;
use super::reference::{POISON_BYTE, Sizes};
use crate::tables::calls::Quant;

/// Bytes behind a quantized output that must stay as they are.
const GUARD: usize = 64;

/// Arrays of a call, each with all calls one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Array {
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

impl Array {
    /// In the order in which the kernels of ours number them (cuda-src/smoke/check.h).
    pub const ALL: [Self; 13] = [
        Self::Main,
        Self::Residual,
        Self::Gamma,
        Self::GammaPre,
        Self::Bias,
        Self::Shared,
        Self::Scales,
        Self::Rows,
        Self::SumOut,
        Self::ResidualOut,
        Self::NormOut,
        Self::QuantOut,
        Self::ScalesOut,
    ];

    pub fn is_output(self) -> bool {
        self >= Self::SumOut
    }
}

/// The bytes of each input of one call.
pub fn input_sizes(case: &Case) -> [(Array, usize); 8] {
    let row = case.hidden * case.dtype.size();
    let rows = |is: bool, count: usize| if is { count * row } else { 0 };
    let (norms, tokens) = (case.what.norms(), case.tokens);
    let (main, shared, scales, table) = match case.what {
        What::Fusion { .. } | What::Custom { .. } => (tokens, false, 0, 0),
        What::MoeReduction { experts, .. } => (experts * tokens, true, experts * tokens * DType::Fp32.size(), 0),
        What::MoeFinalize { top_k, shared, weighted } => {
            let count = top_k * tokens;
            (count, shared, if weighted { count * case.dtype.size() } else { 0 }, count * 4)
        }
        What::Initialize | What::InitializeAll => (0, false, 0, 0),
    };
    [
        (Array::Main, rows(true, main)),
        (Array::Residual, rows(norms, tokens)),
        (Array::Gamma, rows(norms, 1)),
        (Array::GammaPre, rows(case.what.norms_first(), 1)),
        (Array::Bias, rows(matches!(case.what, What::Custom { bias: true, .. }), 1)),
        (Array::Shared, rows(shared, tokens)),
        (Array::Scales, scales),
        (Array::Rows, table),
    ]
}

/// The inputs of a call as they lie in memory.
pub fn input_bytes(inputs: &Inputs) -> [(Array, Cow<'_, [u8]>); 8] {
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
pub fn output_sizes(case: &Case, sizes: &Sizes) -> [(Array, usize); 5] {
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
pub fn guard(case: &Case, array: Array) -> usize {
    match array {
        Array::QuantOut | Array::ScalesOut => GUARD,
        _ => case.hidden * case.dtype.size(),
    }
}

/// What a byte of a quantized output holds before a call.
pub fn byte_poison(case: &Case, array: Array, replay: u32) -> u8 {
    match (array, case.what.quant()) {
        // Every code of four bits is a number: two that take turns, so that one that stays is seen.
        (Array::QuantOut, Some(Quant::Fp4)) => [0x55, 0xaa][replay as usize % 2],
        _ => POISON_BYTE,
    }
}

pub fn is_poison(case: &Case, array: Array, byte: u8) -> bool {
    match array {
        Array::QuantOut | Array::ScalesOut => [0, 1].iter().any(|replay| byte_poison(case, array, *replay) == byte),
        _ => (case.dtype.poison() as u16).to_le_bytes().contains(&byte),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smoke::cases::{Scope, Set, plan};
    use crate::smoke::inputs::make;
    use crate::tables::calls::calls;

    #[test]
    fn the_sizes_of_inputs_are_those_of_what_is_made() {
        let scope = Scope {
            sm: 120,
            functions: calls().functions.iter().map(|function| function.name.clone()).collect(),
            patterns: calls().patterns.iter().map(|pattern| pattern.code).collect(),
            ranks: vec![2],
            release: None,
        };
        // No size depends on how a kernel is launched.
        let planned = plan(Set::All, &scope);
        for planned in planned.iter().filter(|one| one.case.hidden == 2880 && one.case.tokens < 8 && !one.case.pdl) {
            let inputs = make(&planned.case, 3, 0, 1);
            let made = input_bytes(&inputs).map(|(array, bytes)| (array, bytes.len()));
            assert_eq!(made, input_sizes(&planned.case), "{}", planned.case);
        }
    }

    #[test]
    fn arrays_are_numbered_in_their_order() {
        assert!(Array::ALL.is_sorted() && Array::ALL.iter().enumerate().all(|(at, array)| *array as usize == at));
        assert_eq!(Array::ALL.iter().filter(|array| array.is_output()).count(), 5);
    }
}
