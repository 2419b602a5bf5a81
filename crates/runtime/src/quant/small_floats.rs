//! Numbers of 8 and 4 bits, and the types of scales.

use half::{bf16, f16};

use super::e4m3::{E4M3, to_e4m3};

/// The type of scales. `kernels/dequantize_grid.cu` has their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each name says its width and kind")]
pub enum ScaleDtype {
    F32,
    F16,
    BF16,
    E8m0,
    /// Numbers in e4m3, times a factor of the whole matrix (ModelOpt).
    E4m3Times,
    /// Numbers in e4m3, divided by a factor of the whole matrix (compressed-tensors).
    E4m3Over,
}

impl ScaleDtype {
    /// Returns the bytes of a scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleDtype::F32 => 4,
            ScaleDtype::F16 | ScaleDtype::BF16 => 2,
            ScaleDtype::E8m0 | ScaleDtype::E4m3Times | ScaleDtype::E4m3Over => 1,
        }
    }

    /// Returns a stored scale with the factor of its matrix.
    pub(super) fn with_factor(self, scale: f32, factor: f32) -> f32 {
        match self {
            ScaleDtype::E4m3Times => scale * factor,
            ScaleDtype::E4m3Over => scale / factor,
            ScaleDtype::F32 | ScaleDtype::F16 | ScaleDtype::BF16 | ScaleDtype::E8m0 => scale,
        }
    }

    /// Reads one of the scales in `bytes`.
    pub(super) fn read(self, bytes: &[u8], at: usize) -> f32 {
        self.value(self.bits(bytes, at))
    }

    /// Reads the bits of one of the scales in `bytes`.
    pub(super) fn bits(self, bytes: &[u8], at: usize) -> u32 {
        let size = self.bytes();
        let little_endian = bytes[size * at..size * at + size].iter().rev();
        little_endian.fold(0, |bits, byte| bits << 8 | u32::from(*byte))
    }

    /// Returns the bits of the number nearest to `scale`, which is positive, with the `factor` of
    /// its matrix; of exponents, the power of two below it.
    pub(super) fn nearest(self, scale: f32, factor: f32) -> u32 {
        match self {
            ScaleDtype::F32 => scale.to_bits(),
            ScaleDtype::F16 => f16::from_f32(scale.min(f16::MAX.to_f32())).to_bits().into(),
            ScaleDtype::BF16 => bf16::from_f32(scale.min(bf16::MAX.to_f32())).to_bits().into(),
            ScaleDtype::E8m0 => scale.to_bits() >> 23,
            ScaleDtype::E4m3Times => to_e4m3(scale / factor).into(),
            ScaleDtype::E4m3Over => to_e4m3(scale * factor).into(),
        }
    }

    /// Returns the value of these bits, without a factor.
    pub fn value(self, bits: u32) -> f32 {
        match self {
            ScaleDtype::F32 => f32::from_bits(bits),
            ScaleDtype::F16 => f16::from_bits(bits as u16).to_f32(),
            ScaleDtype::BF16 => bf16::from_bits(bits as u16).to_f32(),
            ScaleDtype::E8m0 => e8m0(bits as u8),
            ScaleDtype::E4m3Times | ScaleDtype::E4m3Over => E4M3[(bits & 0xff) as usize],
        }
    }
}

/// Returns the power of two of an exponent with bias 127; 255 is NaN (OCP MX 1.0).
fn e8m0(exponent: u8) -> f32 {
    match exponent {
        0 => f32::MIN_POSITIVE / 2.0,
        255 => f32::NAN,
        other => f32::from_bits(u32::from(other) << 23),
    }
}

/// Values of e2m1 (OCP MX 1.0).
pub(super) static E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the code of the value of e2m1 nearest to `x`, ties to the even code; beyond ±6 that of
/// ±6. A zero keeps its sign. Branch-free, so that loops vectorize.
#[inline(always)]
pub(super) fn to_e2m1(x: f32) -> u8 {
    let (bits, magnitude) = (x.to_bits(), x.abs());
    // The middles of neighbours: a tie belongs to the even one of both.
    let above = [magnitude > 0.25, magnitude > 1.25, magnitude > 2.5, magnitude > 5.0];
    let from = [magnitude >= 0.75, magnitude >= 1.75, magnitude >= 3.5];
    let count = |middles: &[bool]| middles.iter().map(|&is_beyond| u8::from(is_beyond)).sum::<u8>();
    (bits >> 28) as u8 & 8 | (count(&above) + count(&from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_of_e2m1_go_to_the_even_code() {
        for code in 0..8u8 {
            let value = E2M1[usize::from(code)];
            assert_eq!([to_e2m1(value), to_e2m1(-value)], [code, code | 8]);
            let Some(next) = E2M1[..8].get(usize::from(code) + 1) else { continue };
            let middle = (value + next) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!([to_e2m1(middle), to_e2m1(-middle)], [even, even | 8], "{middle}");
            assert_eq!([to_e2m1(middle.next_down()), to_e2m1(middle.next_up())], [code, code + 1]);
        }
        assert_eq!([to_e2m1(1e9), to_e2m1(f32::NEG_INFINITY)], [7, 15]);
    }
}
