//! The common parts of Gemma 2 and 3: norms around each mixer, stored as gain − 1, and scaled
//! embeddings.

use super::architecture::Composition;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp, HiddenNorm, ResidualPlan};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;
use crate::ops::rms_norm::NormKind;

/// Default of `head_dim`.
pub(super) const HEAD_DIM: usize = 256;

/// Reads attention with the scale of `query_pre_attn_scalar`.
pub(super) fn attention(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<AttentionMixer> {
    let scalar = keys.above_zero("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(AttentionMixer { scale: 1.0 / scalar.sqrt(), ..parts::attention(keys, sizes)? })
}

/// Reads the MLP; as in transformers, `hidden_act` of older files has no effect.
pub(super) fn mlp(keys: &ConfigReader<'_>) -> Result<GatedMlp> {
    let activation = parts::activation_of(keys, "hidden_activation", "gelu_pytorch_tanh")?;
    Ok(GatedMlp { activation, bias: false, fused: false, own_width: None, gate_deviations: None })
}

/// Returns a block with norms before and after its mixers.
pub(super) fn block(attention: AttentionMixer, mlp: GatedMlp) -> BlockConfig {
    BlockConfig { residual: ResidualPlan::PreAndPostNorm, ..BlockConfig::pre_norm(attention, mlp) }
}

/// Composes the model around `blocks`; `logit_softcap` is the family's default.
pub(super) fn compose(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    blocks: Vec<BlockConfig>,
    ropes: Vec<Rope>,
    logit_softcap: Option<f64>,
) -> Result<Composition> {
    Ok(Composition {
        blocks,
        ropes,
        norm: NormKind { unit_offset: true, ..parts::rms_norm(keys)? },
        hidden_norm: HiddenNorm::Rms,
        embedding_factor: (sizes.hidden_size as f64).sqrt(),
        logit_factor: 1.0,
        logit_softcap: parts::softcap(keys, "final_logit_softcapping", logit_softcap)?,
    })
}

/// Returns the name of a module in Gemma's checkpoints.
pub(super) fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::MlpNorm => "pre_feedforward_layernorm",
        other => parts::llama_name(other),
    }
}
