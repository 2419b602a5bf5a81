//! The values of a model's tensors under llama.cpp's names, and the changes of their values.
//!
//! Names and changes follow llama.cpp's conversion scripts (conversion/*.py,
//! gguf-py/gguf/tensor_mapping.py). The llama architecture rotates neighbouring elements, so the
//! two halves of each head of q and k are interleaved. Gemma's norms are stored as 1 + w. granite
//! has gate and up apart even if the checkpoint has them in one tensor. One change is not
//! llama.cpp's: its gemma derives the attention scale from the width of a head and
//! reads no key. If `query_pre_attn_scalar` differs, q absorbs the quotient.

use std::collections::{BTreeMap, HashMap};

use super::destinations::{TensorRows, destinations, row_of};
use crate::error::Result;
use crate::model::{self, BlockPart, ModelConfig, ModelPart, ParamSpec, Role, StoredModel, TokenMixer};
use crate::weights::{ModelFiles, rows_of};

/// Elements of a tensor in memory at a time, unless a row is longer.
const BLOCK: usize = 1 << 22;

/// The change of a tensor's values: rows are reordered, then each value v becomes (v + `add`) ·
/// `factor`, or −exp(v) if it is the logarithm of a rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TensorChange {
    /// Number of heads whose halves are interleaved.
    pub(super) interleave_heads: Option<usize>,
    /// The number added to each value.
    pub(super) add: f32,
    /// The factor on each sum.
    pub(super) factor: f32,
    /// True if each value is the logarithm of a rate of decay.
    pub(super) is_log_rate: bool,
}

impl TensorChange {
    /// The change that keeps all values.
    pub(super) const NONE: Self = Self { interleave_heads: None, add: 0.0, factor: 1.0, is_log_rate: false };

    /// Returns the row (of `rows`) that moves to `row`.
    pub(super) fn source_row(&self, row: usize, rows: usize) -> usize {
        let Some(heads) = self.interleave_heads else { return row };
        let width = rows / heads;
        let (head, at) = (row / width, row % width);
        head * width + at % 2 * (width / 2) + at / 2
    }

    /// Changes values in place, without reordering rows.
    pub(super) fn apply(&self, values: &mut [f32]) {
        if self.is_log_rate {
            values.iter_mut().for_each(|value| *value = -value.exp());
        }
        if self.add != 0.0 || self.factor != 1.0 {
            values.iter_mut().for_each(|value| *value = (*value + self.add) * self.factor);
        }
    }
}

/// A tensor of the file and its parameter of the model, or those of all experts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedTensor {
    /// The name in llama.cpp, and the rows of the parameter that it holds.
    pub(super) destination: TensorRows,
    /// The name in the checkpoint; of experts, one name each.
    pub(super) stored: Vec<String>,
    /// Its shape in the file.
    pub(super) shape: Vec<usize>,
    /// The columns of the parameter.
    columns: usize,
    /// True if it holds experts that the checkpoint has in MXFP4: they stay so.
    pub(super) is_mxfp4: bool,
    /// The change of values between checkpoint and file.
    pub(super) change: TensorChange,
}

/// Returns every parameter of the model, in order.
///
/// # Errors
/// User: a tensor is missing, has another shape than in config.json, or is not part of the model.
pub(super) fn plan(config: &ModelConfig, files: &ModelFiles) -> Result<Vec<PlannedTensor>> {
    let parameters = model::parameters(config);
    StoredModel { config, files, stored_tokens: config.vocab_size }
        .check("export", parameters.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())))?;
    let mut all: Vec<PlannedTensor> = Vec::with_capacity(parameters.len());
    let mut of_experts: HashMap<String, usize> = HashMap::new();
    for spec in &parameters {
        let is_of_expert = matches!(spec.part, ModelPart::Block { part, .. } if part.expert().is_some());
        for mut tensor in planned(config, files, spec) {
            if !is_of_expert {
                all.push(tensor);
            } else if let Some(first) =
                of_experts.get(&tensor.destination.name).and_then(|at| all.get_mut(*at))
            {
                first.stored.append(&mut tensor.stored);
                first.shape[0] += 1;
            } else {
                of_experts.insert(tensor.destination.name.clone(), all.len());
                tensor.shape.insert(0, 1);
                all.push(tensor);
            }
        }
    }
    Ok(all)
}

/// Returns the parameters that are lists of numbers under keys, one number a layer.
///
/// # Errors
/// User: a tensor holds no floats.
pub(super) fn lists(config: &ModelConfig, files: &ModelFiles) -> Result<BTreeMap<String, Vec<f32>>> {
    let mut lists: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for spec in &model::parameters(config) {
        for destination in
            destinations(config, spec).into_iter().filter(|destination| destination.of_list.is_some())
        {
            let mut value = [0f32];
            files.read_part(&spec.name, 0, &mut value)?;
            lists.entry(destination.name).or_default().extend(value);
        }
    }
    Ok(lists)
}

/// Returns the tensors that a parameter becomes.
fn planned(config: &ModelConfig, files: &ModelFiles, spec: &ParamSpec) -> Vec<PlannedTensor> {
    let stored = model::stored_name(config, files, &spec.name);
    let is_of_expert = matches!(spec.part, ModelPart::Block { part, .. } if part.expert().is_some());
    let tensor = |destination: TensorRows| PlannedTensor {
        stored: vec![stored.to_owned()],
        is_mxfp4: is_of_expert && files.is_mxfp4(stored),
        shape: destination.shape(spec.part, &spec.shape),
        columns: row_of(&spec.shape),
        change: change(config, spec),
        destination,
    };
    destinations(config, spec)
        .into_iter()
        .filter(|destination| destination.of_list.is_none())
        .map(tensor)
        .collect()
}

/// Returns the change of a parameter's values.
pub(super) fn change(config: &ModelConfig, spec: &ParamSpec) -> TensorChange {
    let (part, mut change) = (spec.part, TensorChange::NONE);
    let is_delta = matches!(part, ModelPart::Block { part: BlockPart::DeltaNorm, .. });
    if config.norm.unit_offset && part.is_norm() && spec.role == Role::Norm && !is_delta {
        change.add = 1.0;
    }
    let ModelPart::Block { layer, part } = part else { return change };
    change.is_log_rate = part == BlockPart::DeltaRate;
    let TokenMixer::Attention(attention) = &config.blocks[layer].token_mixer else { return change };
    if config.family.gguf.interleaves_heads {
        change.interleave_heads = match part {
            BlockPart::QProj => Some(config.heads.num_heads),
            BlockPart::KProj => Some(config.heads.num_kv_heads),
            _ => None,
        };
    }
    // Scores are linear in q; if q is normed, the norm's weight absorbs the factor.
    let scaled = if attention.qk_norm.is_some() { BlockPart::QNorm } else { BlockPart::QProj };
    if part == scaled && !config.family.gguf.reads_factors {
        change.factor = (attention.scale / assumed_attention_scale(config)) as f32;
    }
    change
}

/// Returns llama.cpp's factor on attention scores.
fn assumed_attention_scale(config: &ModelConfig) -> f64 {
    let heads = config.heads;
    if config.family.gguf.unscaled_scores {
        return 1.0;
    }
    let by_hidden = config.family.gguf.scales_by_hidden_at == Some(config.num_layers());
    let width = if by_hidden { config.hidden_size / heads.num_heads } else { heads.head_dim };
    1.0 / (width as f64).sqrt()
}

/// Reads a tensor block by block, changes it, and passes each block of whole rows to `take`, with
/// the name of its stored tensor.
///
/// # Errors
/// User: the tensor holds no floats. Errors of `take`.
pub(super) fn read(
    files: &ModelFiles,
    planned: &PlannedTensor,
    mut take: impl FnMut(&str, &[f32]) -> Result<()>,
) -> Result<()> {
    let row = if planned.destination.by_element { 1 } else { planned.columns.max(1) };
    let rows = planned.shape.iter().product::<usize>() / row / planned.stored.len().max(1);
    let heads = planned.destination.transposed_heads;
    let block = heads.map_or((BLOCK / row).max(1), |heads| rows / heads.max(1));
    let order: Option<Vec<usize>> = planned.order(rows);
    let columns: Option<Vec<usize>> =
        planned.destination.columns.as_ref().map(|columns| rows_of(columns).collect());
    let mut values = vec![0f32; block.min(rows) * row];
    for stored in &planned.stored {
        for first in (0..rows).step_by(block.max(1)) {
            let count = block.min(rows - first);
            let values = &mut values[..count * row];
            match &order {
                Some(order) => read_rows(files, stored, &order[first..first + count], row, values)?,
                None => {
                    files.read_part(stored, first * row, values)?;
                    files.discard(stored);
                }
            }
            planned.change.apply(values);
            if let Some(columns) = &columns {
                values.chunks_exact_mut(row).for_each(|line| {
                    let moved: Vec<f32> = columns.iter().map(|from| line[*from]).collect();
                    line.copy_from_slice(&moved);
                });
            }
            match heads {
                Some(_) => take(stored, &transposed(values, row))?,
                None => take(stored, values)?,
            }
        }
        files.discard(stored);
    }
    Ok(())
}

impl PlannedTensor {
    /// Returns the rows of the parameter in the order of the file, of which there are `rows`;
    /// `None`: all in order.
    fn order(&self, rows: usize) -> Option<Vec<usize>> {
        match (&self.destination.rows, self.change.interleave_heads) {
            (Some(runs), _) => Some(rows_of(runs).collect()),
            (None, Some(_)) => Some((0..rows).map(|row| self.change.source_row(row, rows)).collect()),
            (None, None) => None,
        }
    }
}

/// Reads the rows of `order`, those side by side at once.
fn read_rows(
    files: &ModelFiles,
    stored: &str,
    order: &[usize],
    row: usize,
    mut out: &mut [f32],
) -> Result<()> {
    for run in order.chunk_by(|a, b| a + 1 == *b) {
        let (part, rest) = out.split_at_mut(run.len() * row);
        files.read_part(stored, run[0] * row, part)?;
        out = rest;
    }
    Ok(())
}

/// Returns the transpose of a matrix with rows of `row` values.
fn transposed(values: &[f32], row: usize) -> Vec<f32> {
    (0..row).flat_map(|column| values.iter().skip(column).step_by(row).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `permute` of conversion/llama.py on rows 0–15 with 2 heads, by hand: a head's rows 0 1 2 3 |
    /// 4 5 6 7 become 0 4 1 5 2 6 3 7.
    #[test]
    fn halves_of_heads_are_interleaved() {
        let change = TensorChange { interleave_heads: Some(2), ..TensorChange::NONE };
        let rows: Vec<usize> = (0..16).map(|row| change.source_row(row, 16)).collect();
        assert_eq!(rows, [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]);
    }

    #[test]
    fn values_change_in_order() {
        let mut values = [0.0, -0.5, 1.0];
        TensorChange { add: 1.0, factor: 2.0, ..TensorChange::NONE }.apply(&mut values);
        assert_eq!(values, [2.0, 1.0, 4.0]);
        let mut rates = [0.0, 2f32.ln()];
        TensorChange { is_log_rate: true, ..TensorChange::NONE }.apply(&mut rates);
        assert!(rates[0] == -1.0 && (rates[1] + 2.0).abs() < 1e-6, "{rates:?}");
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
