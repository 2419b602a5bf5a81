//! The dynamic maps of bitsandbytes: values of 8-bit codes, and the nearest code.

use std::sync::LazyLock;

use super::magnitude::largest;
use crate::instruction_set::vectorized;

static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(dynamic(true)));
static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(dynamic(false)));

/// bitsandbytes' map for signed numbers, ascending.
pub fn dynamic_signed() -> &'static [f32; 256] {
    &SIGNED.values
}

/// bitsandbytes' map for non-negative numbers, ascending.
pub fn dynamic_unsigned() -> &'static [f32; 256] {
    &UNSIGNED.values
}

/// Creates a map of seven decades with 1, 2, 4 … (unsigned: 2, 4, 8 …) linear steps each, zero and
/// one (`create_dynamic_map`).
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

const TABLE_LEN: usize = 1 << 16;

static SIGNED_CODES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let map = dynamic_signed();
    let mut code = 0;
    let codes = (0..TABLE_LEN).map(|i| {
        let value = -1.0 + (2 * i) as f32 / (TABLE_LEN - 1) as f32;
        while code < 255 && 0.5 * (map[code] + map[code + 1]) < value {
            code += 1;
        }
        code as u8
    });
    codes.collect()
});

/// Writes the codes of one block of `values` and returns its scale, the largest magnitude. They are
/// the codes of bitsandbytes' CPU library for weights and scales.
///
/// The library looks codes up in a table: it rounds a value to the nearest of 65536 evenly spaced
/// numbers from -1 to 1, and uses that number's nearest code. So a value within 1.5e-5 of the
/// midpoint of two codes may get either, and zero, which is not in the table, has the code of
/// 1.5e-5. Midpoints are common in bf16 weights, and few distinct scales turn one such value into
/// many codes. Optimizer states, where zero must stay zero, use the nearest code:
/// [`DynamicMap`].
pub(super) fn quantize_signed(values: &[f32], codes: &mut [u8]) -> f32 {
    let absmax = largest(values);
    if absmax == 0.0 {
        codes.fill(0);
        return absmax;
    }
    let (factor, table) = (1.0 / absmax, &SIGNED_CODES[..TABLE_LEN]);
    for (code, value) in codes.iter_mut().zip(values) {
        let scaled = (value * factor).clamp(-1.0, 1.0);
        *code = table[((scaled + 1.0) * 0.5 * (TABLE_LEN - 1) as f32 + 0.5) as usize & (TABLE_LEN - 1)];
    }
    absmax
}

/// A dynamic map with an index that finds the nearest code in constant time, for optimizer states.
///
/// Halfway between two codes it uses the even one, as bitsandbytes' CUDA kernels do: their binary
/// search ends at an even code and leaves it only past a midpoint. bitsandbytes' CPU library uses a
/// table that turns zero into 1.5e-5, so a parameter without gradient would drift; weights still
/// follow that library, with `quantize_signed`.
///
/// A number's exponent and first mantissa bits select a start. The steps of the map are wide enough
/// that numbers with the same bits contain at most one midpoint, so one comparison gives the code.
#[derive(Debug)]
pub struct DynamicMap {
    values: [f32; 256],
    /// Largest f32 of each code or a lower one; infinity for the last code.
    limits: [f32; 256],
    /// First code by leading bits of the magnitude, from [`DynamicMap::LEAST`], non-negative
    /// numbers first. Zeros pad it, so that every masked index is in range.
    starts: [u8; DynamicMap::STARTS],
}

impl DynamicMap {
    /// Ignored bits of an f32: all except sign, exponent and 7 of the mantissa.
    const SHIFT: u32 = 16;
    /// Leading bits of 2^-22; numbers closer to zero have the code of zero.
    const LEAST: u32 = (127 - 22) << 7;
    /// Number of buckets up to 1, the largest number of a map.
    const BUCKETS: usize = (22 << 7) + 1;
    /// Power of two that holds the buckets of both signs.
    const STARTS: usize = (2 * DynamicMap::BUCKETS).next_power_of_two();
    /// Values that are converted to codes together.
    const RUN: usize = 256;

    /// The map for signed numbers.
    pub fn signed() -> &'static Self {
        &SIGNED
    }

    /// The map for non-negative numbers.
    pub fn unsigned() -> &'static Self {
        &UNSIGNED
    }

    /// Largest number of each code or a lower one; infinity for the last code.
    pub fn limits(&self) -> &[f32] {
        &self.limits
    }

    /// First code to try for numbers with the same leading bits, as kernels index it.
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
                // The bucket's number farthest from zero comes first, one step before the next
                // bucket.
                Some(bucket) => below(-bits(bucket + 1).next_down()),
            }
        });
        DynamicMap { values, limits, starts }
    }

    /// Value of each code, ascending.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// Code nearest to `x`; halfway between two, the even one. Same as [`nearest`] for numbers from
    /// -1 to 1.
    #[inline]
    pub fn nearest(&self, x: f32) -> u8 {
        self.code(x, Self::start_index(x))
    }

    /// Index of `x` in `starts`.
    #[inline(always)]
    fn start_index(x: f32) -> u16 {
        let leading = (x.abs().to_bits() >> Self::SHIFT).saturating_sub(Self::LEAST);
        let side = if x.is_sign_negative() { Self::BUCKETS as u32 } else { 0 };
        (leading.min(Self::BUCKETS as u32 - 1) + side) as u16
    }

    /// Code of `x`, whose index in `starts` is `start_index`.
    #[inline(always)]
    fn code(&self, x: f32, start_index: u16) -> u8 {
        let start = self.starts[usize::from(start_index) % Self::STARTS];
        start + u8::from(x > self.limits[usize::from(start)])
    }

    /// Writes the codes of one block of `values` and returns its scale, the largest magnitude.
    pub fn quantize(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let absmax = largest(values);
        // bitsandbytes' optimizer kernels divide here, and do not multiply by the reciprocal as for
        // 4 bits.
        let unit = if absmax > 0.0 { absmax } else { 1.0 };
        let (mut scaled, mut start_indices) = ([0f32; Self::RUN], [0u16; Self::RUN]);
        for (codes, values) in codes.chunks_mut(Self::RUN).zip(values.chunks(Self::RUN)) {
            // Two loops: only the first vectorizes, look-ups do not.
            scale(&mut scaled, &mut start_indices, values, unit);
            for (code, (x, start_index)) in codes.iter_mut().zip(scaled.iter().zip(&start_indices)) {
                *code = self.code(*x, *start_index);
            }
        }
        absmax
    }
}

vectorized! {
    /// Computes `values / unit`, and their indices in a dynamic map.
    fn scale(scaled: &mut [f32], start_indices: &mut [u16], values: &[f32], unit: f32) {
        for ((scaled, start_index), value) in scaled.iter_mut().zip(start_indices).zip(values) {
            *scaled = value / unit;
            *start_index = DynamicMap::start_index(*scaled);
        }
    }
}

/// Code of `map` (ascending) nearest to `x`; halfway between two, the even one.
pub fn nearest(map: &[f32; 256], x: f32) -> u8 {
    let (mut low, mut high) = (0usize, 255usize);
    // Binary search: `low` never exceeds the code, and `high` is never below it.
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
