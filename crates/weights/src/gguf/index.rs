//! The list of a model's parameters in GGUF files, and the opening of these files by it.
//!
//! The list is a file beside the config.json that was made from the GGUF metadata. For each
//! parameter it names the tensors that hold its rows and the change of its values. So this module
//! needs no knowledge of families.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::blocks::BlockParts;
use super::file::GgufFile;
use super::order::FileOrder;
use super::parameter::GgufParameter;
use super::source::BlockSource;
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::quant::BlockType;
use crate::stored_parts::StoredParts;
use crate::tensor_info::ShardRange;
use crate::{ModelFiles, StoredDtype, TensorInfo};

/// The name of the list in the folder of a model.
pub const GGUF_INDEX: &str = "model.gguf.index.json";

/// The contents of the list.
#[derive(Debug, Serialize, Deserialize)]
pub struct GgufIndex {
    /// The GGUF file.
    pub file: PathBuf,
    /// The parameters by name.
    pub parameters: BTreeMap<String, GgufParameter>,
    /// Notes on tensors that the model does not use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A parameter in the form of [`ModelFiles`].
struct Placed {
    info: TensorInfo,
    parts: Option<BlockParts>,
}

/// Opens the GGUF model whose list is in `folder`.
///
/// # Errors
/// User: the list or a file is missing or malformed, or a tensor of the list is not in the files or
/// has another shape.
pub(crate) fn open(folder: &Path) -> Result<ModelFiles> {
    let path = folder.join(GGUF_INDEX);
    let text = input_file::read("read", &path)?;
    let index: GgufIndex = serde_json::from_slice(&text)
        .map_err(|error| Error::user(format!("cannot read {}", path.display())).because(error.to_string()))?;
    let file = GgufFile::open(&index.file)?;
    let (mut tensors, mut all_parts) = (BTreeMap::new(), BTreeMap::new());
    for (name, parameter) in &index.parameters {
        let Placed { info, parts } =
            placed(&file, parameter).map_err(|cause| file.refused(format!("tensor `{name}`: {cause}")))?;
        tensors.insert(name.clone(), info);
        all_parts.extend(parts.map(|parts| (name.clone(), StoredParts::Blocks(parts))));
    }
    let mut files = ModelFiles::of_gguf(folder, file.shards, tensors, all_parts);
    index.notes.into_iter().for_each(|note| files.add_warning(note));
    Ok(files)
}

/// Finds the tensors of a parameter, whose rows are in `order`.
fn sources(
    file: &GgufFile,
    parameter: &GgufParameter,
    order: Option<&FileOrder>,
) -> Result<Vec<BlockSource>, String> {
    let GgufParameter { tensors, expert, position, half, shape, .. } = parameter;
    if let Some(half) = half.filter(|half| *half > 1) {
        return Err(format!("the list has half {half} of it; accepted: 0, 1"));
    }
    let halves = if half.is_some() { 2 } else { 1 };
    let (one_of, what) = match (expert, position) {
        (None, None) => (None, ""),
        (Some(expert), _) => (Some(expert), " for each expert"),
        (None, Some(position)) => (Some(position), " for each layer"),
    };
    let columns = shape.last().copied().unwrap_or(1);
    let share = shape.iter().product::<usize>() / tensors.len().max(1);
    let mut sources = Vec::new();
    for (at, name) in tensors.iter().enumerate() {
        let share = order.map_or(share, |order| order.elements(at));
        let (shard, tensor) = file.find(name).ok_or_else(|| format!("`{name}` is not in the file"))?;
        let stored: usize = tensor.shape.iter().product();
        let all = halves * if one_of.is_some() { tensor.shape[0] } else { 1 };
        let row = tensor.shape.last().copied().unwrap_or(1);
        let one = halves.saturating_mul(one_of.copied().unwrap_or(0)).saturating_add(half.unwrap_or(0));
        let is_wide = order.map_or(columns, |order| order.row_of(at, &tensor.shape)) == row;
        if !is_wide || stored != share * all || one >= all {
            return Err(format!(
                "`{name}` has shape {:?}; accepted: {share} elements{what} in rows of {columns}",
                tensor.shape
            ));
        }
        if order.is_some_and(FileOrder::is_by_element) && tensor.kind.is_quantized() {
            return Err(format!("`{name}` has type {}; accepted: f32, f16, bf16", tensor.kind));
        }
        let bytes = tensor.range.len() / all;
        let start = tensor.range.start + one * bytes;
        sources
            .push(BlockSource { kind: tensor.kind, span: ShardRange { shard, range: start..start + bytes } });
    }
    Ok(sources)
}

/// Finds the values of a parameter.
fn placed(file: &GgufFile, parameter: &GgufParameter) -> Result<Placed, String> {
    let GgufParameter { tensors, shape, interleaved_heads, added, is_log_rate, .. } = parameter;
    let columns = shape.last().copied().unwrap_or(1);
    let elements: usize = shape.iter().product();
    let share = elements / tensors.len().max(1);
    let order = FileOrder::of(parameter, elements)?;
    let sources = sources(file, parameter, order.as_ref())?;
    let first = sources.first().ok_or("the list names no tensor of it")?;
    let dtype = match first.kind {
        BlockType::F32 => StoredDtype::F32,
        BlockType::F16 => StoredDtype::F16,
        // The type before quantization is unknown.
        _ => StoredDtype::BF16,
    };
    let ShardRange { shard, range } = first.span.clone();
    let info = TensorInfo {
        dtype,
        shape: shape.clone(),
        file: Arc::clone(&file.shards[shard].path),
        range,
        shard,
        stack: None,
    };
    let is_plain = sources.len() == 1 && !first.kind.is_quantized() && *added == 0.0;
    if is_plain && interleaved_heads.is_none() && order.is_none() && !is_log_rate {
        return Ok(Placed { info, parts: None });
    }
    let rows = share / columns.max(1);
    if let Some(heads) = interleaved_heads.filter(|heads| *heads == 0 || !rows.is_multiple_of(2 * heads)) {
        return Err(format!("its {rows} rows are no pairs of {heads} heads"));
    }
    let parts = BlockParts {
        sources,
        columns,
        rows,
        interleaved_heads: *interleaved_heads,
        added: *added,
        order,
        is_log_rate: *is_log_rate,
    };
    Ok(Placed { info, parts: Some(parts) })
}
