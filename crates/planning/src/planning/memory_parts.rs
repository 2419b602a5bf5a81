//! The parts behind the causes of a [`MemoryPlan`](super::MemoryPlan): groups of parameters stored
//! alike, and the tensors that blocks keep for backward.

use candle_core::DType;

use super::carried::carried_parts;
use super::memory::{MemoryOptions, by_block, kept_gradients, weight_bytes};
use crate::error::Result;
use crate::loading::adapter_setup::AdapterSetup;
use crate::model::{BlockSaved, ModelConfig};
use crate::parallel::{ParamDesc, ParamKind, Placements, trains_rows};

/// The name of the group of f32 masters, without the suffix for their location.
pub(crate) const MASTERS: &str = "f32 masters";

/// Parameters that are stored alike.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeptGroup {
    /// Name of the group, such as `f32 masters`.
    pub what: String,
    /// Number of parameters.
    pub elements: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Number of ranks that share them.
    pub over: u64,
}

/// The parts of weights, gradients and states, in device or host memory, and of activations.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryParts {
    pub weights: Vec<KeptGroup>,
    pub gradients: Vec<KeptGroup>,
    pub optimizer: Vec<KeptGroup>,
    /// Bytes that all blocks keep without recomputing, by tensor; the inputs of the blocks come
    /// first.
    pub saved: Vec<(&'static str, u64)>,
    /// Bytes of the state beside the hidden states, by tensor, and of its gradients.
    pub carried: Vec<(&'static str, u64)>,
}

impl MemoryParts {
    /// Counts the parts of a step over micro-batches of `tokens` tokens.
    pub(super) fn new(
        config: &ModelConfig,
        descs: &[ParamDesc],
        adapter_setup: Option<&AdapterSetup>,
        tokens: usize,
        options: &MemoryOptions<'_>,
    ) -> Result<Self> {
        let mut parts = MemoryParts::default();
        let trains_rows = trains_rows(descs);
        for desc in descs {
            let spec = options.strategy.sharding_spec(desc.kind.role());
            let elements = desc.local_elements(options.mesh)?;
            let over = |placements: Placements| placements.parts(0, options.mesh) as u64;
            let (value, master) = weight_bytes(desc, options)?;
            let count = |groups: &mut Vec<KeptGroup>, what: String, bytes: u64, over: u64| {
                add(groups, KeptGroup { what, elements: elements as u64, bytes, over });
            };
            let placed = |is_away: bool| if is_away && !options.on_host { " (on the host)" } else { "" };
            let away = placed(options.offload.has_values(desc.kind.role()));
            let state_away = placed(options.offload.has_state());
            let in_file = options.offload.has_values(desc.kind.role()) && options.offload.folder().is_some();
            let of_values = if in_file { " (in a file)" } else { away };
            let values = format!("{}{of_values}", kept_as(desc.kind, options));
            count(&mut parts.weights, values, value, options.sharing(desc, trains_rows));
            let codes = options.codes(desc);
            if codes > 0 {
                count(&mut parts.weights, "codes of frozen weights, fp8".to_owned(), codes, 1);
            }
            let update = over(spec.update);
            if master > 0 {
                count(&mut parts.weights, format!("{MASTERS}{state_away}"), master, update);
            }
            if desc.kind.trains() {
                let dtype = kept_gradients(desc, options);
                let bytes = (elements * dtype.size_in_bytes()) as u64;
                let gradients = format!("{} gradients{away}", dtype.as_str());
                count(&mut parts.gradients, gradients, bytes, over(spec.gradients));
                let int8 = options.optimizer_state.is_int8(elements);
                let state = options.optimizer_state.bytes(elements) as u64;
                let what = if int8 { "moments in 8 bits" } else { "f32 moments" };
                count(&mut parts.optimizer, format!("{what}{state_away}"), state, update);
            }
        }
        let blocks = by_block(config, descs, adapter_setup, options, |layer, adapter| {
            BlockSaved::parts(config, layer, tokens, options.dtype, adapter)
        });
        parts.carried = carried_parts(config, descs, tokens, options.dtype);
        for (what, bytes) in blocks.into_iter().flatten() {
            match parts.saved.iter_mut().find(|(known, _)| *known == what) {
                Some((_, sum)) => *sum += bytes as u64,
                None => parts.saved.push((what, bytes as u64)),
            }
        }
        Ok(parts)
    }
}

fn add(groups: &mut Vec<KeptGroup>, group: KeptGroup) {
    let known = groups.iter_mut().find(|known| known.what == group.what && known.over == group.over);
    match known {
        Some(known) => {
            known.elements += group.elements;
            known.bytes += group.bytes;
        }
        None => groups.push(group),
    }
}

/// Returns a description of the values and their stored format.
fn kept_as(kind: ParamKind, options: &MemoryOptions<'_>) -> String {
    let own = options.dtype.as_str();
    match kind {
        ParamKind::Frozen { dtype } => format!("frozen, {}", dtype.map_or(own, |dtype| dtype.as_str())),
        ParamKind::Quantized(format) => {
            let scheme = format.scheme();
            let double = if scheme.double_quant() { ", its scales in 8 bits" } else { "" };
            format!("frozen, {} {}{double}", scheme.name(), scheme.blocks_in_words())
        }
        ParamKind::Buffer { .. } => format!("frozen, {}", DType::F32.as_str()),
        ParamKind::Trainable(_) => format!("trained, {own}"),
        ParamKind::Adapter(_) => format!("adapters, {}", DType::F32.as_str()),
        ParamKind::AdapterInBf16(_) => format!("adapters, {}", DType::BF16.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::model::Segment;
    use crate::objectives::ObjectiveCost;
    use crate::optim::StateLayout;
    use crate::parallel::{LrGroup, MeshAxis, MeshShape, OffloadTarget, ShardingStrategy, UpdateRule};
    use crate::planning::Saving;
    use crate::planning::memory::MemoryPlan;
    use crate::recipe::{MasterWeights, Recompute, StateDtype};

    /// FSDP in f32, without an optimizer's state.
    fn options<'a>(
        mesh: MeshShape,
        fp8: &'a BTreeSet<String>,
        offload: &'a OffloadTarget,
    ) -> MemoryOptions<'a> {
        MemoryOptions {
            dtype: DType::F32,
            optimizer_state: StateLayout { tensors: &[], dtype: StateDtype::F32 },
            strategy: ShardingStrategy::Fsdp,
            mesh,
            saving: Saving::Outputs,
            accumulates: false,
            master: MasterWeights::F32,
            kept_gradients: DType::F32,
            over_nccl: false,
            offload,
            on_host: true,
            bf16_copy: false,
            fp8,
            scales_rows: true,
            graphs: false,
            frozen_ranks: 1,
            objective: ObjectiveCost::default(),
        }
    }

    /// No strategy has a tensor axis yet: the counts follow from the placement alone.
    #[test]
    fn the_local_part_of_a_split_parameter_is_counted() -> Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let parts = |rows: usize, ranks: usize| {
            let kind = ParamKind::Trainable(UpdateRule { decay: true, lr_group: LrGroup::Base });
            let split = Placements::REPLICATED.shard(MeshAxis::Tensor, 0);
            let desc = ParamDesc::new("up".into(), vec![rows, 10], split, Segment::Block(0), kind);
            let mesh = MeshShape::ONE.with(MeshAxis::Shard, 3).with(MeshAxis::Tensor, ranks);
            let (none, nowhere) = (BTreeSet::new(), OffloadTarget::default());
            let options = options(mesh, &none, &nowhere);
            MemoryParts::new(&config, &[desc], None, 7, &options)
        };
        for (ranks, elements) in [(1, 80), (2, 40), (4, 20)] {
            let parts = parts(8, ranks)?;
            for groups in [parts.weights, parts.gradients] {
                let sizes: Vec<_> = groups.iter().map(|g| [g.elements, g.bytes, g.over]).collect();
                assert_eq!(sizes, [[elements, 4 * elements, 3]], "{ranks} ranks");
            }
        }
        let error = parts(7, 2).expect_err("7 rows for 2 ranks");
        assert_eq!(error.what(), "cannot split `up` over 2 ranks");
        Ok(())
    }

    /// The state beside the hidden states and its gradients are parts of the activations, and no
    /// part of what a block keeps.
    #[test]
    fn the_parts_of_activations_add_up() -> Result<()> {
        let folder =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/families/models");
        let read = |model: &str| std::fs::read_to_string(folder.join(model).join("config.json"));
        for (model, carried) in [("tiny-gemma4-e2b", 3), ("tiny-gemma4", 0)] {
            let text = read(model).expect("a config.json");
            let config = ModelConfig::from_json(&text, "config.json")?;
            let (none, nowhere) = (BTreeSet::new(), OffloadTarget::default());
            let options = options(MeshShape::ONE, &none, &nowhere);
            let kind = ParamKind::Trainable(UpdateRule { decay: true, lr_group: LrGroup::Base });
            let name = "model.embed_tokens.weight".into();
            let desc = ParamDesc::new(name, vec![8, 10], Placements::REPLICATED, Segment::Embed, kind);
            let parts = MemoryParts::new(&config, std::slice::from_ref(&desc), None, 7, &options)?;
            let bytes = |parts: &[(&str, u64)]| parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
            assert_eq!(parts.carried.len(), carried, "{model}");
            let descs = std::slice::from_ref(&desc);
            let plan = MemoryPlan::of_step(&config, descs, None, 7, Recompute::None, &options)?;
            assert_eq!(bytes(&parts.saved) + bytes(&parts.carried), plan.activations, "{model}");
        }
        Ok(())
    }
}
