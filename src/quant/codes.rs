//! The values that codes stand for.

use std::sync::LazyLock;

/// A set of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 4-bit NormalFloat: quantiles of the normal distribution.
    Nf4,
    /// 4-bit float: sign, two bits of exponent, one of mantissa.
    Fp4,
    /// bitsandbytes' blockwise 8 bits: the signed dynamic map.
    Int8,
    /// LLM.int8(): whole numbers from -127 to 127 with one scale a row, which is the block.
    Int8Rows,
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

static SIGNED: LazyLock<[f32; 256]> = LazyLock::new(|| dynamic(true));
static UNSIGNED: LazyLock<[f32; 256]> = LazyLock::new(|| dynamic(false));
/// By byte, as two's complement.
static ROWS: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|i| f32::from(i as u8 as i8)));

impl Kind {
    /// The name in recipes and checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Nf4 => "nf4",
            Kind::Fp4 => "fp4",
            Kind::Int8 => "int8",
            Kind::Int8Rows => "int8 rows",
        }
    }

    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            Kind::Nf4 | Kind::Fp4 => 4,
            Kind::Int8 | Kind::Int8Rows => 8,
        }
    }

    /// What each code stands for, before its block's scale: 16 or 256 values.
    pub fn table(self) -> &'static [f32] {
        match self {
            Kind::Nf4 => &NF4,
            Kind::Fp4 => &FP4,
            Kind::Int8 => &*SIGNED,
            Kind::Int8Rows => &*ROWS,
        }
    }
}

/// bitsandbytes' map for numbers of either sign, ascending.
pub fn dynamic_signed() -> &'static [f32; 256] {
    &SIGNED
}

/// bitsandbytes' map for numbers that are not negative, ascending.
pub fn dynamic_unsigned() -> &'static [f32; 256] {
    &UNSIGNED
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

/// The code of `map` (ascending) nearest to `x`; halfway between two, the lower.
pub fn nearest(map: &[f32; 256], x: f32) -> u8 {
    let (mut low, mut high) = (0usize, 255usize);
    // The invariant of the binary search: the midpoint below `low` is below x, that above `high` is not.
    while low < high {
        let middle = usize::midpoint(low, high);
        if x > (map[middle] + map[middle + 1]) / 2.0 { low = middle + 1 } else { high = middle }
    }
    low as u8
}
