//! The interface of a reader of quantized checkpoints, and the checks that all readers share.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::header::clip;
use crate::packed::PackedParts;
use crate::quant::{PackedFormat, ScaleDtype};
use crate::quantized::read_f32;
use crate::stored_parts::StoredParts;
use crate::tensor_info::ShardRange;
use crate::{StoredDtype, TensorInfo};

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, TensorInfo>;

/// A `quantization_config` of config.json.
pub(super) type Settings = Map<String, Value>;

/// A function that checks a weight with its companions. Returns its entry, as before quantization
/// but with the position of its codes, and the positions of its other parts; or the cause of a
/// refusal.
pub(super) type ReadWeight = Box<dyn Fn(&StoredWeight<'_, '_>) -> Result<(TensorInfo, StoredParts), String>>;

/// One format of quantized checkpoints.
pub(super) trait CheckpointFormat: Sync {
    /// Returns the `quant_method` in config.json.
    fn method(&self) -> &'static str;

    /// Returns whether settings without a method belong to this format.
    fn reads_unnamed(&self, _settings: &Settings) -> bool {
        false
    }

    /// Returns the weight of which a tensor of this name would be a companion.
    fn owner(&self, name: &str) -> Option<String>;

    /// Returns whether the companions of `weight` are those of a quantized weight: a format with
    /// common names asks for more than one of them.
    fn is_quantized(&self, _weight: &str, _tensors: &Tensors) -> bool {
        true
    }

    /// Returns whether a tensor of this name is a companion in any model: a format with common
    /// names has few of these.
    fn is_telling(&self, name: &str) -> bool {
        self.owner(name).is_some()
    }

    /// Returns whether a reader reads the values of a tensor of this name. They are fetched even if
    /// a plan reads only the headers of a model.
    fn is_label(&self, _name: &str) -> bool {
        false
    }

    /// Returns whether a weight of this type is quantized even if it has no companion.
    fn is_codes(&self, _dtype: StoredDtype) -> bool {
        false
    }

    /// Returns the advice for a weight that cannot be read.
    fn hint(&self) -> &'static str {
        "download the model again, or give the model that was not quantized"
    }

    /// Returns the reader for these settings.
    ///
    /// # Errors
    /// User: a setting is malformed or not supported.
    fn reader(&self, settings: &Settings) -> Result<ReadWeight>;
}

/// Returns the first of `keys` that is present and not null.
fn present<'s, 'k>(settings: &'s Settings, keys: &[&'k str]) -> Option<(&'k str, &'s Value)> {
    let given = |key: &str| settings.get(key).filter(|value| !value.is_null());
    keys.iter().find_map(|key| Some((*key, given(key)?)))
}

/// Reads the first of `keys` that is present and not null, or null.
///
/// # Errors
/// User: it has another type; the error lists the `accepted` values.
pub(super) fn setting<T: DeserializeOwned>(settings: &Settings, keys: &[&str], accepted: &str) -> Result<T> {
    let (key, value) = present(settings, keys).unwrap_or((keys[0], &Value::Null));
    T::deserialize(value).map_err(|_| refused(key, value, accepted))
}

/// Reads the first of `keys` that is present and not null: one of the `accepted` names, in any
/// case.
///
/// # Errors
/// User: it is another value.
pub(super) fn name_in<'n>(
    settings: &Settings,
    keys: &[&str],
    accepted: &[&'n str],
) -> Result<Option<&'n str>> {
    let Some((key, value)) = present(settings, keys) else { return Ok(None) };
    let is_meant = |name: &&&str| value.as_str().is_some_and(|text| text.eq_ignore_ascii_case(name));
    let quoted = || accepted.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    accepted.iter().find(is_meant).map(|name| Some(*name)).ok_or_else(|| refused(key, value, &quoted()))
}

/// Returns the error for a setting that no reader supports.
pub(super) fn refused(key: &str, value: impl std::fmt::Display, accepted: &str) -> Error {
    Error::user("the model is quantized in a way that this program does not read")
        .because(format!("`quantization_config.{key}` is {value}; accepted: {accepted}"))
        .hint("give the model that was not quantized")
}

/// Returns the weight of the module before one of `ends` in `name`.
pub(super) fn weight_before(ends: &[&str], name: &str) -> Option<String> {
    ends.iter().find_map(|end| name.strip_suffix(end)).map(|module| format!("{module}.weight"))
}

/// A quantized weight among the tensors of a checkpoint.
pub(super) struct StoredWeight<'w, 'a> {
    /// All tensors of the checkpoint.
    pub(super) tensors: &'w Tensors,
    /// The name of the weight.
    pub(super) name: &'w str,
    /// The type in config.json.
    pub(super) dtype: Option<StoredDtype>,
    /// Bytes of all tensors that belong to it.
    pub(super) stored_bytes: u64,
    /// Reads a tensor.
    pub(super) bytes: &'w dyn Fn(&TensorInfo) -> &'a [u8],
}

impl StoredWeight<'_, '_> {
    /// Returns the name of its module.
    pub(super) fn module(&self) -> &str {
        self.name.trim_end_matches(".weight")
    }

    /// Returns the companion that is named by the weight and `end`.
    pub(super) fn companion(&self, end: &str) -> Option<&TensorInfo> {
        self.tensors.get(&format!("{}{end}", self.name))
    }

    /// Returns the companion that is named by the module and `end`.
    pub(super) fn of_module(&self, end: &str) -> Option<&TensorInfo> {
        self.tensors.get(&format!("{}{end}", self.module()))
    }

    /// Returns the companion that is named by the module and `end`, which the format requires.
    pub(super) fn required(&self, end: &str) -> Result<&TensorInfo, String> {
        self.of_module(end).ok_or_else(|| format!("{} is missing", &end[1..]))
    }

    /// Returns the words of codes, which are named by the module and `end`.
    pub(super) fn words(&self, end: &str) -> Result<&TensorInfo, String> {
        if self.tensors.contains_key(self.name) {
            return Err(format!("it is stored twice, as weight and as {}", &end[1..]));
        }
        let words = self.required(end)?;
        expect(&end[1..], words, StoredDtype::I32, None)?;
        Ok(words)
    }

    /// Returns the tensor under the weight's own name.
    pub(super) fn codes(&self) -> Result<&TensorInfo, String> {
        self.tensors.get(self.name).ok_or_else(|| "its codes are missing".into())
    }

    /// Returns the rows and columns that the companion `end` of the module holds.
    pub(super) fn stored_shape(&self, end: &str) -> Result<[usize; 2], String> {
        let (name, shape) = (&end[1..], self.required(end)?);
        expect(name, shape, StoredDtype::I64, Some(&[2]))?;
        let (stored, _) = (self.bytes)(shape).as_chunks::<8>();
        let sizes: Vec<i64> = stored.iter().map(|size| i64::from_le_bytes(*size)).collect();
        let size = |at: usize| usize::try_from(sizes.get(at).copied().unwrap_or_default());
        match (size(0), size(1)) {
            (Ok(rows), Ok(columns)) => Ok([rows, columns]),
            _ => Err(format!("{name} is {sizes:?}; accepted: two numbers from 0")),
        }
    }

    /// Returns the companion `end` if it names one of `groups` for each of `columns`, or its values
    /// are not available. Returns `None` if it is missing or `is_unset`: groups are then of
    /// consecutive columns.
    pub(super) fn groups(
        &self,
        end: &str,
        [columns, groups]: [usize; 2],
        is_unset: impl Fn(&[i32]) -> bool,
    ) -> Result<Option<&TensorInfo>, String> {
        let (name, Some(info)) = (&end[1..], self.of_module(end)) else { return Ok(None) };
        expect(name, info, StoredDtype::I32, Some(&[columns]))?;
        let (words, _) = (self.bytes)(info).as_chunks::<4>();
        let indices: Vec<i32> = words.iter().map(|word| i32::from_le_bytes(*word)).collect();
        if !indices.is_empty() && is_unset(&indices) {
            return Ok(None);
        }
        let in_range = |index: i32| usize::try_from(index).is_ok_and(|index| index < groups);
        match indices.into_iter().enumerate().find(|(_, index)| !in_range(*index)) {
            Some((column, index)) => Err(format!(
                "{name} gives column {column} the group {index}; accepted: 0 to {}",
                groups.saturating_sub(1)
            )),
            None => Ok(Some(info)),
        }
    }

    /// Returns whether the groups of columns are others than consecutive columns. True if their
    /// values are not available.
    fn is_scattered(&self, groups: &TensorInfo, column_block: usize) -> bool {
        let (words, _) = (self.bytes)(groups).as_chunks::<4>();
        let mut groups = words.iter().map(|word| i32::from_le_bytes(*word)).enumerate();
        words.is_empty() || groups.any(|(column, group)| usize::try_from(group) != Ok(column / column_block))
    }

    /// Returns a weight that is decoded while it is read: codes, scales, and the companions with
    /// zeros and with the groups of columns.
    pub(super) fn packed(
        &self,
        name: &'static str,
        format: PackedFormat,
        codes: &TensorInfo,
        [scales, zeros, groups]: [Option<&TensorInfo>; 3],
    ) -> Result<(TensorInfo, StoredParts), String> {
        let scales = scales.ok_or("its scales are missing")?;
        let range_of = |info: &TensorInfo| ShardRange { shard: info.shard, range: info.range.clone() };
        let by_scales = if scales.dtype == StoredDtype::F16 { StoredDtype::F16 } else { StoredDtype::BF16 };
        let info = TensorInfo {
            dtype: self.dtype.unwrap_or(by_scales),
            shape: vec![format.rows, format.columns],
            ..codes.clone()
        };
        let parts = PackedParts {
            name,
            format,
            scales: range_of(scales),
            zeros: zeros.map(range_of),
            groups: groups.map(range_of),
            factor: None,
            scattered: groups.is_some_and(|groups| self.is_scattered(groups, format.column_block)),
            bytes: self.stored_bytes,
        };
        Ok((info, StoredParts::Packed(parts)))
    }

    /// Returns a weight from [`StoredWeight::packed`] whose scales have a factor: the number in the
    /// companion `end` of the module.
    pub(super) fn with_factor(
        &self,
        (info, parts): (TensorInfo, StoredParts),
        end: &str,
    ) -> Result<(TensorInfo, StoredParts), String> {
        let (name, factor) = (&end[1..], self.required(end)?);
        if factor.dtype != StoredDtype::F32 || factor.elements() != 1 {
            let (dtype, shape) = (factor.dtype, &factor.shape);
            return Err(format!("{name} has dtype {dtype} and shape {shape:?}; accepted: one number of F32"));
        }
        // Its value may not be available.
        match read_f32((self.bytes)(factor)).next().filter(|value| !value.is_normal()) {
            Some(value) => Err(format!("{name} is {value}; accepted: normal numbers")),
            None => {
                let StoredParts::Packed(mut parts) = parts else { return Ok((info, parts)) };
                parts.factor = Some(ShardRange { shard: factor.shard, range: factor.range.clone() });
                Ok((info, StoredParts::Packed(parts)))
            }
        }
    }

    /// Returns the error for a weight that cannot be read.
    pub(super) fn malformed(&self, format: &dyn CheckpointFormat, cause: &str) -> Error {
        let any = self.tensors.iter().find(|(name, _)| name.starts_with(self.module()));
        let file = any.map(|(_, info)| info.file.display().to_string()).unwrap_or_default();
        let (name, method) = (clip(self.name), format.method());
        Error::user(format!("cannot read weights {file}"))
            .because(format!("tensor `{name}`, quantized by {method}: {cause}"))
            .hint(format.hint())
    }
}

/// Checks type and shape of the companion `name`; `shape` of `None` accepts any matrix.
pub(super) fn expect(
    name: &str,
    info: &TensorInfo,
    dtype: StoredDtype,
    shape: Option<&[usize]>,
) -> Result<(), String> {
    if info.dtype != dtype {
        return Err(format!("{name} has dtype {}; accepted: {dtype}", info.dtype));
    }
    match shape {
        Some(shape) if info.shape != shape => {
            Err(format!("{name} has shape {:?}; accepted: {shape:?}", info.shape))
        }
        None if info.shape.len() != 2 => {
            Err(format!("{name} has shape {:?}; accepted: two dimensions", info.shape))
        }
        _ => Ok(()),
    }
}

/// Returns the type of the scales `name`.
pub(super) fn scale_dtype(name: &str, info: &TensorInfo) -> Result<ScaleDtype, String> {
    match info.dtype {
        StoredDtype::F32 => Ok(ScaleDtype::F32),
        StoredDtype::F16 => Ok(ScaleDtype::F16),
        StoredDtype::BF16 => Ok(ScaleDtype::BF16),
        other => Err(format!("{name} has dtype {other}; accepted: F32, F16, BF16")),
    }
}
