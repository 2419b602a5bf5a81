//! The element types a safetensors file may hold, and the conversions between them and the engine's.
//!
//! Conversions go through f32, but for equal types, whose bits are copied: a frozen weight that is read and
//! written again keeps its bytes. Large tensors are converted by all threads.

use std::fmt;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::recipe::enums::Dtype;

/// Elements that one task converts; below four of these the threads cost more than they save.
const CHUNK: usize = 1 << 16;

/// An element type as the header of a safetensors file names it. Types of less than a byte are not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "each name says its width and kind")]
pub enum StoredDtype {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl StoredDtype {
    /// Every type, in the order of an error's list.
    pub const ALL: [StoredDtype; 16] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F64,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F8E8M0,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U64,
        Self::U32,
        Self::U16,
        Self::U8,
        Self::Bool,
    ];

    /// The name in a safetensors header: `F32`, `BF16`, `F8_E4M3`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::U16 => "U16",
            Self::I16 => "I16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::F32 => "F32",
            Self::U64 => "U64",
            Self::I64 => "I64",
            Self::F64 => "F64",
        }
    }

    /// The type a safetensors header calls `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The name in config.json (`torch_dtype` or `dtype`); none for types no model is computed in.
    pub fn config_name(self) -> Option<&'static str> {
        match self {
            Self::F16 => Some("float16"),
            Self::BF16 => Some("bfloat16"),
            Self::F32 => Some("float32"),
            Self::F64 => Some("float64"),
            _ => None,
        }
    }

    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether [`crate::weights::ModelFiles::read_into`] can convert it: F32, F16, BF16, F64.
    pub fn is_float(self) -> bool {
        self.config_name().is_some()
    }
}

impl StoredDtype {
    /// The type in which new weights are stored as `dtype` of what is stored as this; what is no float is never converted.
    pub fn stored_as(self, dtype: Dtype) -> Self {
        match dtype {
            _ if !self.is_float() => self,
            Dtype::Auto => self,
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// An element type the engine computes in: f32, bf16 or f16.
pub trait StoredElement: Copy + Default + Send + Sync + sealed::Sealed {
    /// The same type on disk.
    const DTYPE: StoredDtype;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// The value as f32, exactly.
    fn to_f32(self) -> f32;
    /// From the bytes of one element, little-endian; `bytes` has `DTYPE.size_bytes()` of them.
    fn from_le(bytes: &[u8]) -> Self;
    /// Appends the bytes of one element, little-endian.
    fn put_le(self, bytes: &mut Vec<u8>);
}

impl StoredElement for f32 {
    const DTYPE: StoredDtype = StoredDtype::F32;
    fn from_f32(value: f32) -> Self {
        value
    }
    fn to_f32(self) -> f32 {
        self
    }
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    fn put_le(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_le_bytes());
    }
}

impl StoredElement for bf16 {
    const DTYPE: StoredDtype = StoredDtype::BF16;
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1]])
    }
    fn put_le(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_le_bytes());
    }
}

impl StoredElement for f16 {
    const DTYPE: StoredDtype = StoredDtype::F16;
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    fn from_le(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1]])
    }
    fn put_le(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.to_le_bytes());
    }
}

/// Converts the stored elements of `bytes` into `out`, of equal count. False if `dtype` is not a float.
#[must_use]
pub(super) fn decode<T: StoredElement>(bytes: &[u8], dtype: StoredDtype, out: &mut [T]) -> bool {
    debug_assert_eq!(bytes.len(), out.len() * dtype.size_bytes());
    match dtype {
        same if same == T::DTYPE => map_elements(bytes, same, out, T::from_le),
        StoredDtype::F32 => map_elements(bytes, dtype, out, |b| T::from_f32(f32::from_le(b))),
        StoredDtype::F16 => map_elements(bytes, dtype, out, |b| T::from_f32(f16::from_le(b).to_f32())),
        // The bits of a bf16 are the upper half of an f32's. `half` also quiets NaNs, which keeps it from becoming vector code.
        StoredDtype::BF16 => map_elements(bytes, dtype, out, |b| {
            T::from_f32(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
        }),
        StoredDtype::F64 => map_elements(bytes, dtype, out, |b| {
            T::from_f32(f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32)
        }),
        _ => return false,
    }
    true
}

fn map_elements<T: StoredElement>(
    bytes: &[u8],
    dtype: StoredDtype,
    out: &mut [T],
    convert: impl Fn(&[u8]) -> T + Sync,
) {
    let size = dtype.size_bytes();
    let convert_chunk = |out: &mut [T], bytes: &[u8]| {
        for (out, element) in out.iter_mut().zip(bytes.chunks_exact(size)) {
            *out = convert(element);
        }
    };
    if out.len() < 4 * CHUNK {
        convert_chunk(out, bytes);
    } else {
        let chunks = out.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * size));
        chunks.for_each(|(out, bytes)| convert_chunk(out, bytes));
    }
}

/// Fills `out` by parts: `values_at` gives the values from a place on.
pub(super) fn fill<T: StoredElement>(out: &mut [T], values_at: impl Fn(usize, &mut [f32]) + Sync) {
    /// Values between the two passes, few enough to stay in the cache.
    const PART: usize = 1 << 12;
    let fill_chunk = |start: usize, out: &mut [T]| {
        let mut values = [0f32; PART];
        for (i, out) in out.chunks_mut(PART).enumerate() {
            let values = &mut values[..out.len()];
            values_at(start + i * PART, values);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = T::from_f32(*value));
        }
    };
    if out.len() < 4 * CHUNK {
        fill_chunk(0, out);
    } else {
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(i, out)| fill_chunk(i * CHUNK, out));
    }
}

/// Appends `values` as elements of `dtype` to `bytes`. False if `dtype` is not a float.
#[must_use]
pub(super) fn encode<T: StoredElement>(values: &[T], dtype: StoredDtype, bytes: &mut Vec<u8>) -> bool {
    bytes.reserve(values.len() * dtype.size_bytes());
    match dtype {
        same if same == T::DTYPE => values.iter().for_each(|v| v.put_le(bytes)),
        StoredDtype::F32 => values.iter().for_each(|v| v.to_f32().put_le(bytes)),
        StoredDtype::F16 => values.iter().for_each(|v| f16::from_f32(v.to_f32()).put_le(bytes)),
        StoredDtype::BF16 => values.iter().for_each(|v| bf16::from_f32(v.to_f32()).put_le(bytes)),
        StoredDtype::F64 => {
            values.iter().for_each(|v| bytes.extend_from_slice(&f64::from(v.to_f32()).to_le_bytes()));
        }
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_its_own_name() {
        for dtype in StoredDtype::ALL {
            assert_eq!(StoredDtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(StoredDtype::from_name("f32"), None);
    }

    #[test]
    fn equal_types_keep_their_bits_nan_included() {
        // A signalling NaN, which a trip through f32 would quiet.
        let bits: [u16; 3] = [0x7f81, 0x3f80, 0x8000];
        let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
        let mut values = [bf16::ZERO; 3];
        assert!(decode(&bytes, StoredDtype::BF16, &mut values));
        let mut again = Vec::new();
        assert!(encode(&values, StoredDtype::BF16, &mut again));
        assert_eq!(again, bytes);
    }

    #[test]
    fn conversions_round_to_nearest_even() {
        // 1 + 2^-8 lies midway between two bf16 neighbours, 1 and 1 + 2^-7: the even one is 1.
        let mut out = [bf16::ZERO; 2];
        let bytes: Vec<u8> =
            [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert!(decode(&bytes, StoredDtype::F32, &mut out));
        assert_eq!(out.map(|v| v.to_f32()), [1.0, 1.0 + 4.0 / 256.0]);
        let mut wide = [0.0f32; 1];
        assert!(decode(&(-2.5f64).to_le_bytes(), StoredDtype::F64, &mut wide));
        assert_eq!(wide, [-2.5]);
        assert!(decode(&f16::from_f32(0.25).to_le_bytes(), StoredDtype::F16, &mut wide));
        assert_eq!(wide, [0.25]);
        assert!(!decode(&[1, 0, 0, 0], StoredDtype::I32, &mut wide));
    }

    #[test]
    fn threads_convert_what_one_thread_does() {
        let n = 4 * CHUNK + 3;
        let bytes: Vec<u8> = (0..n).flat_map(|i| bf16::from_f32((i % 251) as f32).to_le_bytes()).collect();
        let mut out = vec![0.0f32; n];
        assert!(decode(&bytes, StoredDtype::BF16, &mut out));
        assert!(out.iter().enumerate().all(|(i, &v)| v == (i % 251) as f32));
    }
}
