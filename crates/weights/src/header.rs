//! The header of one safetensors file, validated as untrusted input.
//!
//! The format (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON object
//! from tensor names to `dtype`, `shape` and `data_offsets`, then the data, which the offsets cover
//! without a hole or overlap. Allocates nothing for a mere claim of a header, and touches no tensor
//! byte.
//!
//! The crate `safetensors` (0.8, `src/tensor.rs`) is the tests' reference and is not used here,
//! because:
//! - its reader needs the bytes of the whole file (`read_metadata` compares their number with the
//!   header's), but a file on the hub is checked by its first bytes and its size alone;
//! - of a duplicate name it keeps the last one (`HashMetadata` is a `HashMap`): two tensors that
//!   claim the same bytes pass;
//! - one non-text entry of `__metadata__` refuses the whole file, although readers of weights
//!   ignore it;
//! - a shape may have any number of dimensions, and most errors name neither the tensor nor the
//!   numbers.
//!
//! Its writer (`serialize_to_file`) also streams from lazy views. But it needs each tensor whole
//! and in one piece, cannot handle a failure to get a value (`View::data` returns no error, and
//! ranks gather theirs), chooses the order itself, writes `__metadata__` in the order of a
//! `HashMap`, so that the bytes of two entries differ between runs, and neither flushes to the disk
//! nor computes a digest. See [`super::write`] and [`super::random_access_writer`].

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::StoredDtype;
use crate::error::{Error, Result};

/// The limit of the JSON part, the same as the reference implementation's.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// The longest accepted name: longer than any tensor's. Names are compared, sorted and shown.
const MAX_NAME_BYTES: usize = 4096;
/// The most accepted dimensions: more than any tensor of a model has. Bounds the allocations for a
/// hostile shape.
const MAX_DIMS: usize = 32;

/// One tensor of a file: its name, type and shape, and the position of its bytes in the file.
#[derive(Debug)]
pub(super) struct HeaderTensor {
    pub(super) name: String,
    pub(super) dtype: StoredDtype,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
}

/// The contents of a header.
#[derive(Debug)]
pub(super) struct Header {
    /// The tensors, in the order of their bytes.
    pub(super) tensors: Vec<HeaderTensor>,
    /// The texts of `__metadata__`.
    pub(super) metadata: BTreeMap<String, String>,
}

/// Parses the header of the file `path` of `file_bytes` bytes; `start` holds at least the header.
pub(super) fn parse(start: &[u8], file_bytes: u64, path: &Path) -> Result<Header> {
    parse_checked(start, file_bytes).map_err(|cause| malformed(path, cause))
}

/// Returns the end of the header of the file `path` of `file_bytes` bytes; `start` holds at least
/// its first 8 bytes.
pub(super) fn end(start: &[u8], file_bytes: u64, path: &Path) -> Result<u64> {
    let length = json_length(start, file_bytes).map_err(|cause| malformed(path, cause))?;
    Ok(8 + length as u64)
}

fn malformed(path: &Path, cause: String) -> Error {
    Error::user(format!("cannot read weights {}", path.display()))
        .because(cause)
        .hint("download or save the file again")
}

/// Returns the length of the header's JSON, which is within the file.
fn json_length(start: &[u8], file_bytes: u64) -> Result<usize, String> {
    let Some((length, rest)) = start.split_first_chunk::<8>() else {
        return Err(format!("it has {file_bytes} bytes; a safetensors file has at least 8"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "its first 8 bytes give a header of {length} bytes; accepted: up to {MAX_HEADER_BYTES} (not a safetensors file?)"
        ));
    }
    if rest.first().is_some_and(|&first| first != b'{') {
        return Err("its header does not start with `{` (not a safetensors file?)".into());
    }
    let left = file_bytes.saturating_sub(8);
    if left < length || length == 0 {
        return Err(format!(
            "it is truncated: the header should have {length} bytes, at least 2; {left} follow"
        ));
    }
    Ok(length as usize)
}

fn parse_checked(start: &[u8], file_bytes: u64) -> Result<Header, String> {
    let length = json_length(start, file_bytes)?;
    let json = start.get(8..8 + length).ok_or("its header was not read to its end")?;
    let data_bytes = usize::try_from(file_bytes - 8 - length as u64)
        .map_err(|_| "it is larger than this machine can address".to_owned())?;
    let RawHeader { tensors, metadata } =
        serde_json::from_slice(json).map_err(|error| format!("its header is not valid: {error}"))?;
    let mut tensors = tensors.into_iter().map(check_tensor).collect::<Result<Vec<_>, String>>()?;
    refuse_duplicates(&tensors)?;
    tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    check_cover(&tensors, data_bytes)?;
    for tensor in &mut tensors {
        tensor.range = tensor.range.start + 8 + length..tensor.range.end + 8 + length;
    }
    Ok(Header { tensors, metadata })
}

fn check_tensor((name, raw): (String, RawTensor)) -> Result<HeaderTensor, String> {
    let shown = clip(&name);
    let Some(dtype) = StoredDtype::from_name(&raw.dtype) else {
        let accepted: Vec<&str> = StoredDtype::ALL.iter().map(|dtype| dtype.name()).collect();
        return Err(format!(
            "tensor `{shown}` has dtype `{}`; accepted: {}",
            clip(&raw.dtype),
            accepted.join(", ")
        ));
    };
    let [start, end] = raw.data_offsets;
    if start > end {
        return Err(format!(
            "tensor `{shown}` has data_offsets [{start}, {end}], which end before they start"
        ));
    }
    let bytes = raw.shape.iter().try_fold(dtype.size_bytes() as u64, |n, &dim| n.checked_mul(dim));
    let Some(bytes) = bytes else {
        return Err(format!("tensor `{shown}` has shape {:?}, more than 2^64 bytes", raw.shape));
    };
    if bytes != end - start {
        return Err(format!(
            "tensor `{shown}` has data_offsets [{start}, {end}], {} bytes; its shape {:?} of {dtype} needs {bytes}",
            end - start,
            raw.shape
        ));
    }
    let too_large = |_| format!("tensor `{shown}` is larger than this machine can address");
    let shape =
        raw.shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<_, _>>().map_err(too_large)?;
    let range = usize::try_from(start).map_err(too_large)?..usize::try_from(end).map_err(too_large)?;
    Ok(HeaderTensor { name, dtype, shape, range })
}

fn refuse_duplicates(tensors: &[HeaderTensor]) -> Result<(), String> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("tensor `{}` is in its header twice", clip(pair[0]))),
        None => Ok(()),
    }
}

/// Checks that `tensors`, sorted by their offsets, cover `0..data_bytes` exactly.
fn check_cover(tensors: &[HeaderTensor], data_bytes: usize) -> Result<(), String> {
    let mut covered = 0;
    let mut before = "the header";
    for tensor in tensors {
        let name = clip(&tensor.name);
        if tensor.range.start < covered {
            return Err(format!(
                "tensor `{name}` starts at byte {} and overlaps `{}`, which ends at {covered}",
                tensor.range.start,
                clip(before)
            ));
        }
        if tensor.range.start > covered {
            return Err(format!(
                "no tensor covers bytes {covered} to {} of its data, before tensor `{name}`",
                tensor.range.start
            ));
        }
        covered = tensor.range.end;
        before = &tensor.name;
    }
    if covered > data_bytes {
        return Err(format!("it is truncated: its tensors need {covered} bytes, the file has {data_bytes}"));
    }
    if covered < data_bytes {
        return Err(format!("its tensors cover {covered} bytes of data, the file has {data_bytes}"));
    }
    Ok(())
}

/// Returns a name from a file in a form fit for an error: control characters escaped, cut at 80
/// characters.
pub(super) fn clip(name: &str) -> String {
    let mut shown: String = name.chars().take(80).flat_map(char::escape_debug).collect();
    if name.chars().nth(80).is_some() {
        shown.push('…');
    }
    shown
}

struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderNames;
        impl<'de> Visitor<'de> for HeaderNames {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let (mut tensors, mut metadata) = (Vec::new(), BTreeMap::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() > MAX_NAME_BYTES {
                        return Err(A::Error::custom(format!(
                            "the name of tensor `{}` has {} bytes; accepted: up to {MAX_NAME_BYTES}",
                            clip(&name),
                            name.len()
                        )));
                    }
                    if name == "__metadata__" {
                        metadata.extend(texts(map.next_value()?));
                        continue;
                    }
                    let tensor = map
                        .next_value::<RawTensor>()
                        .map_err(|error| A::Error::custom(format!("tensor `{}`: {error}", clip(&name))))?;
                    tensors.push((name, tensor));
                }
                Ok(RawHeader { tensors, metadata })
            }
        }
        deserializer.deserialize_map(HeaderNames)
    }
}

/// Returns the entries of `__metadata__` that are texts, as the format requires.
fn texts(metadata: serde_json::Value) -> impl Iterator<Item = (String, String)> {
    let serde_json::Value::Object(entries) = metadata else { return None.into_iter().flatten() };
    let text = |(key, value): (String, serde_json::Value)| Some((key, value.as_str()?.to_owned()));
    Some(entries.into_iter().filter_map(text)).into_iter().flatten()
}

impl<'de> Deserialize<'de> for RawTensor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(expecting = "an object with dtype, shape and data_offsets")]
        struct Fields {
            dtype: String,
            shape: Sizes,
            data_offsets: Sizes,
        }
        let fields = Fields::deserialize(deserializer)?;
        let Sizes(offsets) = fields.data_offsets;
        let data_offsets = <[u64; 2]>::try_from(offsets).map_err(|numbers| {
            D::Error::custom(format!("data_offsets has {} numbers, accepted: 2", numbers.len()))
        })?;
        Ok(RawTensor { dtype: fields.dtype, shape: fields.shape.0, data_offsets })
    }
}

/// A list of sizes, a separate type so that no claim in a header allocates more than [`MAX_DIMS`]
/// numbers.
struct Sizes(Vec<u64>);

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Sizes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of whole numbers from 0")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Sizes, A::Error> {
                let mut sizes = Vec::new();
                while let Some(Size(size)) = list.next_element::<Size>()? {
                    if sizes.len() == MAX_DIMS {
                        return Err(A::Error::custom(format!("more than {MAX_DIMS} dimensions")));
                    }
                    sizes.push(size);
                }
                Ok(Sizes(sizes))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeNumber;
        impl Visitor<'_> for WholeNumber {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 0 to 2^64 - 1")
            }
            fn visit_u64<E: serde::de::Error>(self, size: u64) -> Result<Size, E> {
                Ok(Size(size))
            }
        }
        deserializer.deserialize_u64(WholeNumber)
    }
}
