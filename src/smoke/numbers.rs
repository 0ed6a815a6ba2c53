//! The number formats of the kernels' inputs and outputs, and rounding to them.

use half::f16;
use serde::{Deserialize, Serialize};

/// The type of inputs and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    Bf16,
    Fp16,
    Fp32,
}

impl DType {
    pub fn word(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp32 => "fp32",
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        if self == Self::Fp32 { 4 } else { 2 }
    }

    /// Largest relative error of rounding to nearest.
    pub fn unit(self) -> f64 {
        match self {
            Self::Bf16 => 2f64.powi(-8),
            Self::Fp16 => 2f64.powi(-11),
            Self::Fp32 => 2f64.powi(-24),
        }
    }

    /// Largest absolute error of rounding a subnormal to nearest: half of the smallest one.
    pub fn quantum(self) -> f64 {
        match self {
            Self::Bf16 => 2f64.powi(-134),
            Self::Fp16 => 2f64.powi(-25),
            Self::Fp32 => 2f64.powi(-150),
        }
    }

    /// The largest subnormal, as bits.
    pub fn largest_subnormal(self) -> u32 {
        match self {
            Self::Bf16 => 0x007f,
            Self::Fp16 => 0x03ff,
            Self::Fp32 => 0x007f_ffff,
        }
    }

    /// −0.0, as bits: what tells "not yet written" in the buffers of the one-shot kernels.
    pub fn negative_zero(self) -> u32 {
        1 << (8 * self.size() - 1)
    }

    /// A NaN that no arithmetic of a GPU gives, as bits.
    pub fn poison(self) -> u32 {
        match self {
            // One pattern for both, so that a buffer can be filled before its type is known.
            Self::Bf16 | Self::Fp16 => 0x7fa5,
            Self::Fp32 => 0x7fa5_7fa5,
        }
    }

    pub fn decode(self, bits: u32) -> f64 {
        match self {
            Self::Bf16 => f64::from(f32::from_bits(bits << 16)),
            Self::Fp16 => f16::from_bits(bits as u16).to_f64(),
            Self::Fp32 => f64::from(f32::from_bits(bits)),
        }
    }

    /// The bits of the nearest number, ties to even.
    pub fn encode(self, value: f64) -> u32 {
        match self {
            Self::Bf16 => narrow(value, 8, 7),
            Self::Fp16 => narrow(value, 5, 10),
            Self::Fp32 => narrow(value, 8, 23),
        }
    }
}

/// The bits of the nearest number with so many exponent and mantissa bits. Made of integers alone, since inputs must be the same
/// on every processor and GPU: `half` goes through float32 where the processor can, and so rounds twice.
fn narrow(value: f64, exponent_bits: u32, mantissa_bits: u32) -> u32 {
    let bits = value.to_bits();
    let sign = ((bits >> 63) as u32) << (exponent_bits + mantissa_bits);
    let magnitude = bits & !(1 << 63);
    let infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
    if magnitude > 0x7ff << 52 {
        return sign | infinity | 1 << (mantissa_bits - 1);
    }
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = (magnitude >> 52) as i32 - 1023 + bias;
    let rounded = if exponent > 0 {
        // What rounds up past the mantissa goes into the exponent, as it must.
        round(magnitude - (((1023 - bias) as u64) << 52), 52 - mantissa_bits)
    } else {
        let whole = magnitude & ((1 << 52) - 1) | 1 << 52;
        round(whole, 53 - mantissa_bits + exponent.unsigned_abs())
    };
    sign | (rounded.min(infinity.into()) as u32)
}

/// `value` without its last `shift` bits, rounded to nearest, ties to even.
fn round(value: u64, shift: u32) -> u64 {
    if shift > 53 {
        return 0;
    }
    let (kept, rest, half) = (value >> shift, value & ((1 << shift) - 1), 1 << (shift - 1));
    kept + u64::from(rest > half || (rest == half && kept & 1 == 1))
}

/// Numbers as they lie in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Floats {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Floats {
    /// No numbers.
    pub fn none() -> Self {
        Self { dtype: DType::Bf16, bytes: Vec::new() }
    }

    pub fn from_bytes(dtype: DType, bytes: Vec<u8>) -> Self {
        Self { dtype, bytes }
    }

    /// Numbers whose bits are given, each in the low bits of a word.
    pub fn from_words(dtype: DType, words: impl IntoIterator<Item = u32>) -> Self {
        let mut floats = Self { dtype, bytes: Vec::new() };
        for word in words {
            floats.bytes.extend_from_slice(&word.to_le_bytes()[..dtype.size()]);
        }
        floats
    }

    /// `rows` rows of `columns`, each filled by `fill(row, words)`, in parallel.
    pub fn by_rows(dtype: DType, rows: usize, columns: usize, fill: impl Fn(usize, &mut dyn FnMut(usize, u32)) + Sync) -> Self {
        use rayon::prelude::*;
        let size = dtype.size();
        let mut bytes = vec![0; rows * columns * size];
        bytes.par_chunks_mut(columns * size).enumerate().for_each(|(row, bytes)| {
            fill(row, &mut |column, word| bytes[column * size..][..size].copy_from_slice(&word.to_le_bytes()[..size]));
        });
        Self { dtype, bytes }
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bits of one number.
    pub fn word(&self, at: usize) -> u32 {
        match self.dtype {
            DType::Fp32 => {
                let bytes = &self.bytes[4 * at..][..4];
                u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            }
            _ => {
                let bytes = &self.bytes[2 * at..][..2];
                u16::from_le_bytes([bytes[0], bytes[1]]).into()
            }
        }
    }

    pub fn value(&self, at: usize) -> f64 {
        self.dtype.decode(self.word(at))
    }

    pub fn words(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.len()).map(|at| self.word(at))
    }

    pub fn set(&mut self, at: usize, word: u32) {
        let size = self.dtype.size();
        self.bytes[at * size..][..size].copy_from_slice(&word.to_le_bytes()[..size]);
    }
}

/// A small float whose finite values are few enough to list: sign, exponent and mantissa bits, and a largest finite value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Small {
    /// 8 bits: E4M3 without infinities.
    E4m3,
    /// 4 bits: E2M1, all finite.
    E2m1,
}

impl Small {
    fn shape(self) -> (i32, i32, i32) {
        // exponent bits, mantissa bits, exponent bias
        match self {
            Self::E4m3 => (4, 3, 7),
            Self::E2m1 => (2, 1, 1),
        }
    }

    pub fn largest(self) -> f64 {
        match self {
            Self::E4m3 => 448.0,
            Self::E2m1 => 6.0,
        }
    }

    /// The value of a code; NaN where it is none.
    pub fn decode(self, code: u8) -> f64 {
        let (exponent_bits, mantissa_bits, bias) = self.shape();
        let mantissa = i32::from(code) & ((1 << mantissa_bits) - 1);
        let exponent = (i32::from(code) >> mantissa_bits) & ((1 << exponent_bits) - 1);
        let negative = (code >> (exponent_bits + mantissa_bits)) & 1 == 1;
        if self == Self::E4m3 && exponent == 15 && mantissa == 7 {
            return f64::NAN;
        }
        let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
        let value = if exponent == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(exponent - bias) };
        if negative { -value } else { value }
    }

    /// The value that is nearest to `value`, ties to even, held within the largest finite one.
    pub fn round(self, value: f64) -> f64 {
        if value.is_nan() {
            return value;
        }
        let (_, mantissa_bits, bias) = self.shape();
        let magnitude = value.abs();
        // The exponent as the bits of the number hold it: 0 and subnormals count as very small.
        let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
        let step = power_of_two(exponent.max(1 - bias) - mantissa_bits);
        let rounded = (magnitude / step).round_ties_even() * step;
        rounded.min(self.largest()).copysign(value)
    }
}

/// 2 to a power between −1022 and 1023.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The value of an E8M0 code, a power of two.
pub fn decode_e8m0(code: u8) -> f64 {
    if code == 0xff { f64::NAN } else { power_of_two(i32::from(code) - 127) }
}

/// The smallest power of two that is not below `value`, within E8M0.
pub fn power_of_two_above(value: f64) -> f64 {
    if value <= 0.0 {
        return 2f64.powi(-127);
    }
    let bits = value.to_bits();
    let above = i32::from(bits & ((1 << 52) - 1) != 0);
    power_of_two(((bits >> 52) as i32 - 1023 + above).clamp(-127, 127))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_and_e2m1_decode_as_their_definitions_list_them() {
        let e2m1: Vec<f64> = (0..8).map(|code| Small::E2m1.decode(code)).collect();
        assert_eq!(e2m1, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(Small::E2m1.decode(0xf), -6.0);
        assert_eq!(Small::E4m3.decode(0x01), 2f64.powi(-9));
        assert_eq!(Small::E4m3.decode(0x08), 2f64.powi(-6));
        assert_eq!(Small::E4m3.decode(0x38), 1.0);
        assert_eq!(Small::E4m3.decode(0x7e), 448.0);
        assert!(Small::E4m3.decode(0x7f).is_nan() && Small::E4m3.decode(0xff).is_nan());
        assert_eq!(Small::E4m3.decode(0xb8), -1.0);
    }

    #[test]
    fn rounding_gives_the_nearest_code_with_ties_to_even() {
        for small in [Small::E4m3, Small::E2m1] {
            let codes = if small == Small::E4m3 { 0..0x7fu8 } else { 0..8 };
            let values: Vec<f64> = codes.map(|code| small.decode(code)).collect();
            for (code, pair) in values.windows(2).enumerate() {
                let middle = (pair[0] + pair[1]) / 2.0;
                let even = if code % 2 == 0 { pair[0] } else { pair[1] };
                assert_eq!(small.round(middle), even, "{small:?}: the middle of {pair:?}");
                assert_eq!(small.round(middle * (1.0 - 1e-9)), pair[0]);
                assert_eq!(small.round(-middle * (1.0 + 1e-9)), -pair[1]);
            }
            assert_eq!(small.round(1e9), small.largest());
            assert_eq!(small.round(-1e9), -small.largest());
            assert_eq!(small.round(0.0), 0.0);
        }
    }

    #[test]
    fn a_power_of_two_is_its_own_scale_and_anything_above_takes_the_next() {
        for exponent in -126..=127 {
            let power = 2f64.powi(exponent);
            assert_eq!(power_of_two_above(power), power);
            assert_eq!(power_of_two_above(power * (1.0 + 1e-12)), 2f64.powi((exponent + 1).min(127)));
        }
        assert_eq!(power_of_two_above(0.0), 2f64.powi(-127));
        assert_eq!(decode_e8m0(127), 1.0);
        assert!(decode_e8m0(255).is_nan());
    }

    #[test]
    fn encoding_gives_the_nearest_number_with_ties_to_even() {
        let mut state = 1u64;
        for at in 0..60_000u64 {
            state = crate::smoke::inputs::mix(state);
            // Every exponent that the types have and some beyond, and mantissas that end early, so that there are ties.
            let exponent = state >> 40 & 0x1ff;
            let mantissa = if at % 3 == 0 { state << 12 >> 12 } else { (state & 0xfff) << 40 };
            let value = f64::from_bits(state & 1 << 63 | (1023 - 256 + exponent) << 52 | mantissa);
            for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
                let word = dtype.encode(value);
                assert_eq!(word & dtype.negative_zero() != 0, value < 0.0);
                let magnitude = word & !dtype.negative_zero();
                let largest = if dtype == DType::Fp16 { 0x7c00 } else { 0x7f80 << (8 * dtype.size() - 16) };
                // Infinity stands for what the next power of two would be.
                let of = |word: u32| match (word == largest, dtype) {
                    (false, _) => dtype.decode(word),
                    (true, DType::Fp16) => 65536.0,
                    (true, _) => 2f64.powi(128),
                };
                let distance = |word: u32| (of(word) - value.abs()).abs();
                assert!(magnitude <= largest);
                if magnitude == largest && value.abs() > of(largest) {
                    continue;
                }
                if magnitude > 0 {
                    let below = distance(magnitude - 1);
                    assert!(
                        distance(magnitude) < below || (distance(magnitude) == below && word % 2 == 0),
                        "{dtype:?} {value:e}"
                    );
                }
                if magnitude < largest {
                    let above = distance(magnitude + 1);
                    assert!(
                        distance(magnitude) < above || (distance(magnitude) == above && word % 2 == 0),
                        "{dtype:?} {value:e}"
                    );
                }
            }
            assert_eq!(DType::Fp32.encode(value), (value as f32).to_bits());
        }
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
            assert!(dtype.decode(dtype.encode(f64::NAN)).is_nan());
            assert_eq!(dtype.decode(dtype.encode(f64::NEG_INFINITY)), f64::NEG_INFINITY);
            assert_eq!((dtype.encode(0.0), dtype.encode(-1e-320)), (0, dtype.negative_zero()));
        }
    }

    #[test]
    fn sixteen_bit_types_round_trip_and_poison_is_nan() {
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
            assert!(dtype.decode(dtype.poison()).is_nan());
            assert_eq!(dtype.decode(dtype.negative_zero()).to_bits(), (-0.0f64).to_bits());
            assert_eq!(dtype.decode(dtype.encode(1.5)), 1.5);
            let subnormal = dtype.decode(dtype.largest_subnormal());
            assert!(subnormal > 0.0 && dtype.encode(subnormal) == dtype.largest_subnormal());
            let words = [1, dtype.poison(), dtype.negative_zero()];
            let floats = Floats::from_words(dtype, words);
            assert_eq!(floats.words().collect::<Vec<_>>(), words);
            assert_eq!((floats.len(), floats.bytes().len()), (3, 3 * dtype.size()));
        }
        assert_eq!(DType::Bf16.encode(1.0 + 2f64.powi(-8)), 0x3f80, "a tie goes to even");
    }
}
