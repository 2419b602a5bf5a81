//! Granite 4 without experts and Mamba layers (350M, 1B, micro): Granite 3 with gate and up in one
//! tensor, and positions only if config.json asks for them.

use super::architecture::{Architecture, Composition};
use super::sizes::ModelSizes;
use super::{granite, parts};
use crate::error::{Error, Result};
use crate::model::block_part::BlockPart;
use crate::model::composition::GatedMlp;
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::Rope;

pub(super) static GRANITEMOEHYBRID: Architecture = Architecture {
    intermediate_size: "shared_intermediate_size",
    module_name,
    gguf: granite::GGUF,
    ..parts::architecture("granitemoehybrid", &["granitemoehybrid"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    refuse_other_mixers(keys)?;
    if keys.opt_usize("num_local_experts")? != Some(0) {
        return Err(Error::user("`num_local_experts` is missing, so the model has experts")
            .because("accepted: 0")
            .hint("choose a model without experts"));
    }
    let mlp = GatedMlp { fused: true, ..parts::gated_mlp(keys)? };
    let rope = match keys.opt_str("position_embedding_type")? {
        Some("rope") => parts::plain_rope(keys, sizes)?,
        None | Some("nope") => Rope::without_positions(),
        Some(other) => return Err(refused("position_embedding_type", other, "rope, nope, null")),
    };
    granite::compose_of(keys, sizes, mlp, rope)
}

/// Refuses Mamba layers, which all layers are if config.json names no kind.
fn refuse_other_mixers(keys: &ConfigReader<'_>) -> Result<()> {
    let [types, older] = [keys.opt_list("layer_types")?, keys.opt_list("layers_block_type")?];
    let is_attention = |name: &str| matches!(name, "attention" | "full_attention");
    let fault = match types.or(older) {
        None => "`layer_types` is missing, so all layers are Mamba".to_owned(),
        Some(named) => match named.iter().find(|name| !name.as_str().is_some_and(is_attention)) {
            Some(other) => format!("`layer_types` names {other}"),
            None => return Ok(()),
        },
    };
    Err(Error::user(fault)
        .because("finetune computes no Mamba layers; accepted: attention, full_attention")
        .hint("choose a Granite 4 without \"h\" in its name, such as granite-4.0-micro"))
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::GateUpProj => "shared_mlp.input_linear",
        BlockPart::DownProj => "shared_mlp.output_linear",
        other => parts::llama_name(other),
    }
}
