//! The values that codes stand for.

use std::sync::LazyLock;

use super::magnitude::largest;
use crate::instruction_set::vectorized;
use crate::recipe::enums::QuantKind;

/// A set of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CodeKind {
    /// One that a recipe may choose, with a scale for each block.
    Blockwise(QuantKind),
    /// LLM.int8(): whole numbers from -127 to 127 with one scale a row, which is the block.
    Int8Rows,
}

impl CodeKind {
    /// 4-bit NormalFloat: quantiles of the normal distribution.
    pub const NF4: Self = CodeKind::Blockwise(QuantKind::Nf4);
    /// 4-bit float: sign, two bits of exponent, one of mantissa.
    pub const FP4: Self = CodeKind::Blockwise(QuantKind::Fp4);
    /// bitsandbytes' blockwise 8 bits: the signed dynamic map.
    pub const INT8: Self = CodeKind::Blockwise(QuantKind::Int8);
}

/// QLoRA's appendix E, in f32.
static NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Twelfths of 1/16, 8, 12, 4, 6, 2, 3; the second half is negative, so code 8 is a second zero.
static FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(dynamic(true)));
static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(dynamic(false)));
/// By byte, as two's complement.
static ROWS: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|i| f32::from(i as u8 as i8)));

impl CodeKind {
    /// The name in recipes and checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            CodeKind::Blockwise(kind) => kind.as_str(),
            CodeKind::Int8Rows => "int8 rows",
        }
    }

    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            CodeKind::NF4 | CodeKind::FP4 => 4,
            CodeKind::INT8 | CodeKind::Int8Rows => 8,
        }
    }

    /// What each code stands for, before its block's scale: 16 or 256 values.
    pub fn table(self) -> &'static [f32] {
        match self {
            CodeKind::NF4 => &NF4,
            CodeKind::FP4 => &FP4,
            CodeKind::INT8 => &SIGNED.values,
            CodeKind::Int8Rows => &*ROWS,
        }
    }
}

/// bitsandbytes' map for numbers of either sign, ascending.
pub fn dynamic_signed() -> &'static [f32; 256] {
    &SIGNED.values
}

/// bitsandbytes' map for numbers that are not negative, ascending.
pub fn dynamic_unsigned() -> &'static [f32; 256] {
    &UNSIGNED.values
}

/// Seven decades with 1, 2, 4 … (unsigned: 2, 4, 8 …) linear steps each, zero and one (`create_dynamic_map`).
fn dynamic(signed: bool) -> [f32; 256] {
    let mut values = vec![0.0f32, 1.0];
    for decade in 0..7 {
        let steps = if signed { 1usize << decade } else { 2 << decade };
        let power = 10f64.powi(decade - 6) as f32;
        // torch.linspace counts from both ends.
        let step = (1.0f32 - 0.1) / steps as f32;
        let bound = |i: usize| {
            if i < steps.div_ceil(2) {
                step.mul_add(i as f32, 0.1)
            } else {
                (-step).mul_add((steps - i) as f32, 1.0)
            }
        };
        for i in 0..steps {
            let mean = power * ((bound(i) + bound(i + 1)) / 2.0);
            values.push(mean);
            if signed {
                values.push(-mean);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    values.try_into().unwrap_or([0.0; 256])
}

/// A dynamic map with an index that finds nearest codes at once, for optimizer states.
///
/// Halfway between two codes it takes the even one, as bitsandbytes' CUDA kernels do: their binary search ends at an even
/// code and leaves it only past a midpoint. (Its CPU library goes through a table that turns zero into 1.5e-5, so that a
/// parameter without gradient would drift; weights follow it nevertheless: `table`.)
///
/// A number's exponent and first mantissa bits choose a start; steps of the map are so wide that at most one midpoint
/// lies among the numbers with the same bits, so one comparison gives the code.
#[derive(Debug)]
pub struct DynamicMap {
    values: [f32; 256],
    /// The largest f32 whose code is not above each code; an infinity for the last.
    limits: [f32; 256],
    /// By leading bits of the magnitude, from [`DynamicMap::LEAST`] on, first of numbers that are not negative.
    /// Zeros after them, so that every masked place is within.
    starts: [u8; DynamicMap::PLACES],
}

impl DynamicMap {
    /// Bits of a f32 that do not count: all but sign, exponent and 7 of the mantissa.
    const SHIFT: u32 = 16;
    /// The leading bits of 2^-22; numbers nearer to zero have the code of zero.
    const LEAST: u32 = (127 - 22) << 7;
    /// Up to 1, the largest number of a map.
    const BUCKETS: usize = (22 << 7) + 1;
    /// A power of two that the buckets of both signs fit into.
    const PLACES: usize = (2 * DynamicMap::BUCKETS).next_power_of_two();
    /// Values that are brought to codes together.
    const RUN: usize = 256;

    /// For numbers of either sign.
    pub fn signed() -> &'static Self {
        &SIGNED
    }

    /// For numbers that are not negative.
    pub fn unsigned() -> &'static Self {
        &UNSIGNED
    }

    /// For each code the largest number that has it or one below; an infinity for the last.
    pub fn limits(&self) -> &[f32] {
        &self.limits
    }

    /// The first code to try of numbers with the same leading bits, as kernels look it up.
    pub fn starts(&self) -> &[u8] {
        &self.starts[..2 * Self::BUCKETS]
    }

    fn new(values: [f32; 256]) -> Self {
        let limits: [f32; 256] = std::array::from_fn(|code| match values.get(code + 1) {
            Some(next) if code.is_multiple_of(2) => (values[code] + next) / 2.0,
            Some(next) => ((values[code] + next) / 2.0).next_down(),
            None => f32::INFINITY,
        });
        let below = |x: f32| limits.iter().take_while(|limit| **limit < x).count() as u8;
        let starts = std::array::from_fn(|bucket| {
            let bits = |bucket: usize| f32::from_bits((bucket as u32 + Self::LEAST) << Self::SHIFT);
            match bucket.checked_sub(Self::BUCKETS) {
                _ if bucket >= 2 * Self::BUCKETS => 0,
                None if bucket == 0 => below(0.0),
                None => below(bits(bucket)),
                // The farthest from zero of its numbers comes first, which is one step before the next bucket's.
                Some(bucket) => below(-bits(bucket + 1).next_down()),
            }
        });
        DynamicMap { values, limits, starts }
    }

    /// The value of each code, ascending.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The code nearest to `x`; halfway between two, the even one. As [`nearest`] for numbers from -1 to 1.
    #[inline]
    pub fn nearest(&self, x: f32) -> u8 {
        self.code(x, Self::place(x))
    }

    /// The place of `x` in the index.
    #[inline(always)]
    fn place(x: f32) -> u16 {
        let leading = (x.abs().to_bits() >> Self::SHIFT).saturating_sub(Self::LEAST);
        let side = if x.is_sign_negative() { Self::BUCKETS as u32 } else { 0 };
        (leading.min(Self::BUCKETS as u32 - 1) + side) as u16
    }

    /// The code of `x`, whose place this is.
    #[inline(always)]
    fn code(&self, x: f32, place: u16) -> u8 {
        let start = self.starts[usize::from(place) % Self::PLACES];
        start + u8::from(x > self.limits[usize::from(start)])
    }

    /// Writes the codes of one block of `values` and returns its scale, the largest magnitude.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = largest(values);
        // Divided, not multiplied by the reciprocal as in 4 bits: so bitsandbytes' optimizer kernels have it.
        let unit = if absmax > 0.0 { absmax } else { 1.0 };
        let (mut scaled, mut places) = ([0f32; Self::RUN], [0u16; Self::RUN]);
        for (codes, values) in codes.chunks_mut(Self::RUN).zip(values.chunks(Self::RUN)) {
            // Two loops: the first is vector code, look-ups are not.
            scale(&mut scaled, &mut places, values, unit);
            for (code, (x, place)) in codes.iter_mut().zip(scaled.iter().zip(&places)) {
                *code = self.code(*x, *place);
            }
        }
        absmax
    }
}

vectorized! {
    /// `values` over `unit`, and their places in the index of a dynamic map.
    fn scale(scaled: &mut [f32], places: &mut [u16], values: &[f32], unit: f32) {
        for ((scaled, place), value) in scaled.iter_mut().zip(places).zip(values) {
            *scaled = value / unit;
            *place = DynamicMap::place(*scaled);
        }
    }
}

/// The code of `map` (ascending) nearest to `x`; halfway between two, the even one.
pub fn nearest(map: &[f32; 256], x: f32) -> u8 {
    let (mut low, mut high) = (0usize, 255usize);
    // The invariant of the binary search: `low` is not above the code, `high` not below it.
    while low < high {
        let middle = usize::midpoint(low, high);
        let midpoint = (map[middle] + map[middle + 1]) / 2.0;
        if x > midpoint || x == midpoint && middle % 2 == 1 { low = middle + 1 } else { high = middle }
    }
    low as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_finds_what_the_search_finds() {
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            let around = |x: f32| [x.next_down(), x, x.next_up()];
            let ties = map.limits[..255].iter().map(|limit| limit.next_up()).flat_map(around);
            let edges = map.starts().iter().enumerate().flat_map(|(i, _)| {
                let bits = ((i % DynamicMap::BUCKETS) as u32 + DynamicMap::LEAST) << DynamicMap::SHIFT;
                let edge = f32::from_bits(bits);
                around(if i < DynamicMap::BUCKETS { edge } else { -edge })
            });
            let even = (-4_000_000..=4_000_000).map(|i| i as f32 / 4e6);
            let tiny = [0.0, -0.0, f32::MIN_POSITIVE, -f32::MIN_POSITIVE, 1e-45, 1.0, -1.0];
            for x in ties.chain(edges).chain(even).chain(tiny).filter(|x| x.abs() <= 1.0) {
                assert_eq!(map.nearest(x), nearest(map.values(), x), "{x:e}");
            }
        }
    }
}
