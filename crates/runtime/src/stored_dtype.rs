//! Element types of safetensors files, and their conversions to and from the engine's types.
//!
//! Conversions use f32, except between equal types, whose bits are copied: a frozen weight that is
//! read and written again keeps its bytes. All threads convert large tensors.

use std::fmt;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::recipe::enums::Dtype;

/// Elements per conversion task; below four tasks the threads cost more than they save.
const CHUNK: usize = 1 << 16;

/// Element type in the header of a safetensors file. Types of less than a byte are unsupported.
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
    pub const ALL: [StoredDtype; 16] = {
        use StoredDtype::*;
        [F32, F16, BF16, F64, F8E4M3, F8E5M2, F8E8M0, I64, I32, I16, I8, U64, U32, U16, U8, Bool]
    };

    /// Name in a safetensors header: `F32`, `BF16`, `F8_E4M3`.
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

    /// Type with the name `name` in a safetensors header.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Name in config.json (`torch_dtype` or `dtype`); none for types without models.
    pub fn config_name(self) -> Option<&'static str> {
        match self {
            Self::F16 => Some("float16"),
            Self::BF16 => Some("bfloat16"),
            Self::F32 => Some("float32"),
            Self::F64 => Some("float64"),
            _ => None,
        }
    }

    /// Size of one element in bytes.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns true if [`StoredElement::decode`] can convert it: F32, F16, BF16, F64.
    pub fn is_float(self) -> bool {
        self.config_name().is_some()
    }
}

impl StoredDtype {
    /// Type for storing new weights as `dtype` in place of this type; non-floats are never
    /// converted.
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

/// Element type of the engine: f32, bf16 or f16. Its loops are functions of this crate and not
/// generic, because callers would compile them unoptimized in the dev profile.
pub trait StoredElement: Copy + Default + Send + Sync + sealed::Sealed {
    /// The same type on disk.
    const DTYPE: StoredDtype;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Exact value as f32.
    fn to_f32(self) -> f32;
    /// Rounds `values` into `out`, of equal count, like [`StoredElement::from_f32`].
    fn round(values: &[f32], out: &mut [Self]);
    /// Converts the stored elements of `bytes` into `out`, of equal count. False if `dtype` is no
    /// float.
    #[must_use]
    fn decode(bytes: &[u8], dtype: StoredDtype, out: &mut [Self]) -> bool;
    /// Appends `values` as elements of `dtype` to `bytes`. False if `dtype` is no float.
    #[must_use]
    fn encode(values: &[Self], dtype: StoredDtype, bytes: &mut Vec<u8>) -> bool;
}

macro_rules! stored_element {
    ($type:ty, $dtype:ident, $from_f32:expr, $to_f32:expr) => {
        impl StoredElement for $type {
            const DTYPE: StoredDtype = StoredDtype::$dtype;
            fn from_f32(value: f32) -> Self {
                $from_f32(value)
            }
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }
            fn round(values: &[f32], out: &mut [Self]) {
                debug_assert_eq!(values.len(), out.len());
                out.iter_mut().zip(values).for_each(|(out, value)| *out = $from_f32(*value));
            }
            fn decode(bytes: &[u8], dtype: StoredDtype, out: &mut [Self]) -> bool {
                debug_assert_eq!(bytes.len(), out.len() * dtype.size_bytes());
                if dtype == Self::DTYPE {
                    map_elements(bytes, out, <$type>::from_le_bytes);
                    return true;
                }
                match dtype {
                    StoredDtype::F32 => map_elements(bytes, out, |b| $from_f32(f32::from_le_bytes(b))),
                    StoredDtype::F16 => {
                        map_elements(bytes, out, |b| $from_f32(f16::from_le_bytes(b).to_f32()))
                    }
                    // The bits of a bf16 are the upper half of an f32's. `half` also quiets NaNs,
                    // which prevents vectorization.
                    StoredDtype::BF16 => map_elements(bytes, out, |b| {
                        $from_f32(f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
                    }),
                    StoredDtype::F64 => map_elements(bytes, out, |b| $from_f32(f64::from_le_bytes(b) as f32)),
                    _ => return false,
                }
                true
            }
            fn encode(values: &[Self], dtype: StoredDtype, bytes: &mut Vec<u8>) -> bool {
                if dtype == Self::DTYPE {
                    append_elements(values, bytes, |v| v.to_le_bytes());
                    return true;
                }
                match dtype {
                    StoredDtype::F32 => append_elements(values, bytes, |v| $to_f32(v).to_le_bytes()),
                    StoredDtype::F16 => {
                        append_elements(values, bytes, |v| f16::from_f32($to_f32(v)).to_le_bytes());
                    }
                    StoredDtype::BF16 => {
                        append_elements(values, bytes, |v| bf16::from_f32($to_f32(v)).to_le_bytes());
                    }
                    StoredDtype::F64 => {
                        append_elements(values, bytes, |v| f64::from($to_f32(v)).to_le_bytes())
                    }
                    _ => return false,
                }
                true
            }
        }
    };
}

stored_element!(f32, F32, std::convert::identity, std::convert::identity);
stored_element!(bf16, BF16, bf16::from_f32, bf16::to_f32);
stored_element!(f16, F16, f16::from_f32, f16::to_f32);

/// Converts elements of `N` bytes each.
fn map_elements<const N: usize, T: Send>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T + Sync) {
    let convert_chunk = |out: &mut [T], bytes: &[u8]| {
        let (elements, _) = bytes.as_chunks::<N>();
        out.iter_mut().zip(elements).for_each(|(out, element)| *out = convert(*element));
    };
    if out.len() < 4 * CHUNK {
        convert_chunk(out, bytes);
    } else {
        let chunks = out.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * N));
        chunks.for_each(|(out, bytes)| convert_chunk(out, bytes));
    }
}

/// Appends elements of `N` bytes each.
fn append_elements<const N: usize, T: Copy>(
    values: &[T],
    bytes: &mut Vec<u8>,
    convert: impl Fn(T) -> [u8; N],
) {
    let start = bytes.len();
    bytes.resize(start + values.len() * N, 0);
    let (elements, _) = bytes[start..].as_chunks_mut::<N>();
    elements.iter_mut().zip(values).for_each(|(element, value)| *element = convert(*value));
}

/// Fills `out` in parts; `values_at` writes the values from an index.
pub fn fill<T: StoredElement>(out: &mut [T], values_at: impl Fn(usize, &mut [f32]) + Sync) {
    /// Values between the two passes, few enough for the cache.
    const PART: usize = 1 << 12;
    let fill_chunk = |start: usize, out: &mut [T]| {
        let mut values = [0f32; PART];
        for (i, out) in out.chunks_mut(PART).enumerate() {
            let values = &mut values[..out.len()];
            values_at(start + i * PART, values);
            T::round(values, out);
        }
    };
    if out.len() < 4 * CHUNK {
        fill_chunk(0, out);
    } else {
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(i, out)| fill_chunk(i * CHUNK, out));
    }
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
        // A signalling NaN, which conversion through f32 would quiet.
        let bits: [u16; 3] = [0x7f81, 0x3f80, 0x8000];
        let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
        let mut values = [bf16::ZERO; 3];
        assert!(bf16::decode(&bytes, StoredDtype::BF16, &mut values));
        let mut again = Vec::new();
        assert!(bf16::encode(&values, StoredDtype::BF16, &mut again));
        assert_eq!(again, bytes);
    }

    #[test]
    fn conversions_round_to_nearest_even() {
        // 1 + 2^-8 is midway between two bf16 neighbours, 1 and 1 + 2^-7: the even one is 1.
        let mut out = [bf16::ZERO; 2];
        let bytes: Vec<u8> =
            [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert!(StoredElement::decode(&bytes, StoredDtype::F32, &mut out));
        assert_eq!(out.map(|v| v.to_f32()), [1.0, 1.0 + 4.0 / 256.0]);
        let mut wide = [0.0f32; 1];
        assert!(StoredElement::decode(&(-2.5f64).to_le_bytes(), StoredDtype::F64, &mut wide));
        assert_eq!(wide, [-2.5]);
        assert!(StoredElement::decode(&f16::from_f32(0.25).to_le_bytes(), StoredDtype::F16, &mut wide));
        assert_eq!(wide, [0.25]);
        assert!(!StoredElement::decode(&[1, 0, 0, 0], StoredDtype::I32, &mut wide));
    }

    #[test]
    fn threads_convert_what_one_thread_does() {
        let n = 4 * CHUNK + 3;
        let bytes: Vec<u8> = (0..n).flat_map(|i| bf16::from_f32((i % 251) as f32).to_le_bytes()).collect();
        let mut out = vec![0.0f32; n];
        assert!(StoredElement::decode(&bytes, StoredDtype::BF16, &mut out));
        assert!(out.iter().enumerate().all(|(i, &v)| v == (i % 251) as f32));
    }
}
