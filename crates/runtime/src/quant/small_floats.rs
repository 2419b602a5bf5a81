//! Numbers of 8 and 4 bits, and the types of scales.

use half::{bf16, f16};

use super::e4m3::E4M3;

/// The type of scales.
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
        let size = self.bytes();
        let little_endian = bytes[size * at..size * at + size].iter().rev();
        self.value(little_endian.fold(0, |bits, byte| bits << 8 | u32::from(*byte)))
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
