//! The tensors of a model under llama.cpp's names, and the changes of their values.
//!
//! Names and changes follow llama.cpp's conversion scripts (conversion/*.py,
//! gguf-py/gguf/tensor_mapping.py). The llama architecture rotates neighbouring elements, so the
//! two halves of each head of q and k are interleaved. Gemma's norms are stored as 1 + w. granite
//! has gate and up apart even if the checkpoint has them in one tensor. One change is not
//! llama.cpp's: its gemma derives the attention scale from the width of a head and
//! reads no key. If `query_pre_attn_scalar` differs, q absorbs the quotient.

use std::collections::HashMap;

use crate::error::Result;
use crate::model::{self, BlockPart, GgufFacts, ModelConfig, ModelPart, ParamSpec, Role, StoredModel};
use crate::weights::ModelFiles;

/// Elements of a tensor in memory at a time, unless a row is longer.
const BLOCK: usize = 1 << 22;

/// The change of a tensor's values: rows are reordered, then each value v becomes (v + `add`) ·
/// `factor`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TensorChange {
    /// Number of heads whose halves are interleaved.
    pub(super) interleave_heads: Option<usize>,
    /// The number added to each value.
    pub(super) add: f32,
    /// The factor on each sum.
    pub(super) factor: f32,
}

impl TensorChange {
    const NONE: Self = Self { interleave_heads: None, add: 0.0, factor: 1.0 };

    /// Returns the row (of `rows`) that moves to `row`.
    pub(super) fn source_row(&self, row: usize, rows: usize) -> usize {
        let Some(heads) = self.interleave_heads else { return row };
        let width = rows / heads;
        let (head, at) = (row / width, row % width);
        head * width + at % 2 * (width / 2) + at / 2
    }

    /// Changes values in place, without reordering rows.
    pub(super) fn apply(&self, values: &mut [f32]) {
        if self.add != 0.0 || self.factor != 1.0 {
            values.iter_mut().for_each(|value| *value = (*value + self.add) * self.factor);
        }
    }
}

/// A tensor of the file and its parameter of the model, or those of all experts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlannedTensor {
    /// Name of the tensor in llama.cpp.
    pub(super) name: String,
    /// The name in the checkpoint; of experts, one name each.
    pub(super) stored: Vec<String>,
    /// The row of a stored tensor that is its first.
    pub(super) first_row: usize,
    /// Its shape in the file.
    pub(super) shape: Vec<usize>,
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
            } else if let Some(first) = of_experts.get(&tensor.name).and_then(|at| all.get_mut(*at)) {
                first.stored.append(&mut tensor.stored);
                first.shape[0] += 1;
            } else {
                of_experts.insert(tensor.name.clone(), all.len());
                tensor.shape.insert(0, 1);
                all.push(tensor);
            }
        }
    }
    Ok(all)
}

/// Returns the tensors that a parameter becomes.
fn planned(config: &ModelConfig, files: &ModelFiles, spec: &ParamSpec) -> Vec<PlannedTensor> {
    let end = if spec.role == Role::Bias { "bias" } else { "weight" };
    let names = module_names(&config.family.gguf, spec.part);
    let mut shape = spec.shape.clone();
    // A single number has no rows.
    let rows = shape.first().map_or(0, |rows| rows / names.len());
    shape.iter_mut().take(1).for_each(|first| *first = rows);
    // llama.cpp has the factor on the shared expert as a vector.
    if matches!(spec.part, ModelPart::Block { part: BlockPart::SharedFactor, .. }) {
        shape.remove(0);
    }
    let tensor = |(i, name)| PlannedTensor {
        name: format!("{name}.{end}"),
        stored: vec![model::stored_name(config, files, &spec.name).to_owned()],
        first_row: i * rows,
        shape: shape.clone(),
        change: change(config, spec.part),
    };
    names.into_iter().enumerate().map(tensor).collect()
}

/// Returns llama.cpp's names of the modules that have equal shares of a module's rows, in order;
/// most often one.
pub(super) fn module_names(facts: &GgufFacts, part: ModelPart) -> Vec<String> {
    match part {
        ModelPart::EmbedTokens => vec!["token_embd".into()],
        ModelPart::Block { layer, part: BlockPart::GateUpProj } if facts.splits_gate_up => {
            ["ffn_gate", "ffn_up"].map(|name| format!("blk.{layer}.{name}")).into()
        }
        ModelPart::Block { layer, part } => vec![format!("blk.{layer}.{}", block_part_name(facts, part))],
        ModelPart::FinalNorm => vec!["output_norm".into()],
        ModelPart::LmHead => vec!["output".into()],
    }
}

fn block_part_name(facts: &GgufFacts, part: BlockPart) -> &'static str {
    match part {
        BlockPart::QProj => "attn_q",
        BlockPart::KProj => "attn_k",
        BlockPart::VProj => "attn_v",
        BlockPart::QkvProj => "attn_qkv",
        BlockPart::OProj => "attn_output",
        BlockPart::QNorm => "attn_q_norm",
        BlockPart::KNorm => "attn_k_norm",
        BlockPart::Sinks => "attn_sinks",
        BlockPart::GateProj => "ffn_gate",
        // llama.cpp splits a matrix of this name with twice the rows: the gate is the first half,
        // as here.
        BlockPart::UpProj | BlockPart::GateUpProj => "ffn_up",
        BlockPart::DownProj => "ffn_down",
        BlockPart::Router => "ffn_gate_inp",
        // One tensor holds those of all experts.
        BlockPart::ExpertGate(_) => "ffn_gate_exps",
        BlockPart::ExpertUp(_) => "ffn_up_exps",
        BlockPart::ExpertGateUp(_) | BlockPart::ExpertGateUpBias => "ffn_gate_up_exps",
        BlockPart::ExpertDown(_) | BlockPart::ExpertDownBias => "ffn_down_exps",
        BlockPart::RouterBias => "exp_probs_b",
        BlockPart::SharedGate => "ffn_gate_shexp",
        BlockPart::SharedUp => "ffn_up_shexp",
        BlockPart::SharedDown => "ffn_down_shexp",
        BlockPart::SharedFactor => "ffn_gate_inp_shexp",
        BlockPart::DeltaQkv => "attn_qkv",
        BlockPart::DeltaZ => "attn_gate",
        BlockPart::DeltaB => "ssm_beta",
        BlockPart::DeltaA => "ssm_alpha",
        BlockPart::DeltaQkvz => "ssm_in",
        BlockPart::DeltaBa => "ssm_ba",
        BlockPart::DeltaOut => "ssm_out",
        BlockPart::DeltaConv => "ssm_conv1d",
        BlockPart::DeltaRate => "ssm_a",
        BlockPart::DeltaStep => "ssm_dt",
        BlockPart::DeltaNorm => "ssm_norm",
        BlockPart::XieluPositive => "xielu.alpha_p",
        BlockPart::XieluNegative => "xielu.alpha_n",
        BlockPart::XieluBeta => "xielu.beta",
        BlockPart::XieluEps => "xielu.eps",
        BlockPart::ConvIn => "shortconv.in_proj",
        BlockPart::ConvTaps => "shortconv.conv",
        BlockPart::ConvOut => "shortconv.out_proj",
        BlockPart::LatentQ => "attn_q_a",
        BlockPart::LatentKv => "attn_kv_a_mqa",
        BlockPart::LatentQUp => "attn_q_b",
        BlockPart::LatentKvUp => "attn_kv_b",
        BlockPart::LatentQNorm => "attn_q_a_norm",
        BlockPart::LatentKvNorm => "attn_kv_a_norm",
        BlockPart::AttnNorm | BlockPart::ParallelAttnNorm => "attn_norm",
        BlockPart::AttnPostNorm => "post_attention_norm",
        BlockPart::MlpNorm | BlockPart::ParallelMlpNorm => facts.mlp_norm,
        BlockPart::MlpPostNorm => "post_ffw_norm",
        BlockPart::MlpOutNorm => "post_ffw_norm_1",
        BlockPart::ExpertsNorm => "pre_ffw_norm_2",
        BlockPart::ExpertsOutNorm => "post_ffw_norm_2",
        BlockPart::RouterScale => "ffn_gate_inp_s",
        BlockPart::ExpertFactors => "ffn_down_exps_s",
        BlockPart::OutputFactor => "layer_output_scale",
    }
}

/// Returns the change of the values of a module's parameters.
pub(super) fn change(config: &ModelConfig, part: ModelPart) -> TensorChange {
    let mut change = TensorChange::NONE;
    if config.norm.unit_offset && part.is_norm() {
        change.add = 1.0;
    }
    let ModelPart::Block { layer, part } = part else { return change };
    let Some(attention) = config.blocks[layer].token_mixer.attention() else { return change };
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
    let (rows, row) = match planned.shape[..] {
        [len] => (len, 1),
        [.., row] => (planned.shape.iter().product::<usize>() / row.max(1), row.max(1)),
        [] => (1, 1),
    };
    let rows = rows / planned.stored.len().max(1);
    let block = (BLOCK / row).max(1);
    let mut values = vec![0f32; block.min(rows) * row];
    for stored in &planned.stored {
        for first in (0..rows).step_by(block) {
            let count = block.min(rows - first);
            let values = &mut values[..count * row];
            if planned.change.interleave_heads.is_some() {
                for (i, out) in values.chunks_exact_mut(row).enumerate() {
                    let source = planned.first_row + planned.change.source_row(first + i, rows);
                    files.read_part(stored, source * row, out)?;
                }
            } else {
                files.read_part(stored, (planned.first_row + first) * row, values)?;
                files.discard(stored);
            }
            planned.change.apply(values);
            take(stored, values)?;
        }
        files.discard(stored);
    }
    Ok(())
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
    }
}
