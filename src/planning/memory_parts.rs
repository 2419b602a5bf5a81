//! The parts behind the causes of a [`MemoryPlan`](super::MemoryPlan): groups of parameters stored
//! alike, and the tensors that blocks keep for backward.

use candle_core::DType;

use super::memory::{MemoryOptions, branch_dtype, by_block, kept_gradients, weight_bytes};
use crate::loading::adapter_setup::AdapterSetup;
use crate::model::{BlockModule, BlockSaved, LoraShape, ModelConfig};
use crate::parallel::{ParamDesc, ParamKind};

/// The name of the group of f32 masters, without the suffix for their location.
pub(crate) const MASTERS: &str = "f32 masters";

/// Parameters that are stored alike.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeptGroup {
    /// Name of the group, such as `f32 masters`.
    pub(crate) what: String,
    /// Number of parameters.
    pub(crate) elements: u64,
    /// Bytes of all of them.
    pub(crate) bytes: u64,
    /// Number of ranks that share them.
    pub(crate) over: u64,
}

/// The parts of weights, gradients and states, in device or host memory, and of activations.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryParts {
    pub(crate) weights: Vec<KeptGroup>,
    pub(crate) gradients: Vec<KeptGroup>,
    pub(crate) optimizer: Vec<KeptGroup>,
    /// Bytes that all blocks keep without recomputing, by tensor; the inputs of the blocks come
    /// first.
    pub(crate) saved: Vec<(&'static str, u64)>,
}

impl MemoryParts {
    /// Counts the parts of a step over micro-batches of `tokens` tokens.
    pub(super) fn new(
        config: &ModelConfig,
        descs: &[ParamDesc],
        adapter_setup: Option<&AdapterSetup>,
        tokens: usize,
        options: &MemoryOptions<'_>,
    ) -> Self {
        let mut parts = MemoryParts::default();
        for desc in descs {
            let spec = options.kind.sharding_spec(desc.kind.role());
            let (value, master) = weight_bytes(desc, options);
            let count = |groups: &mut Vec<KeptGroup>, what: String, bytes: u64, over: u64| {
                add(groups, KeptGroup { what, elements: desc.elements() as u64, bytes, over });
            };
            let placed = |is_away: bool| if is_away && !options.on_host { " (on the host)" } else { "" };
            let away = placed(options.offload.has_values(desc.kind.role()));
            let state_away = placed(options.offload.has_state());
            let in_file = options.offload.has_values(desc.kind.role()) && options.offload.folder().is_some();
            let of_values = if in_file { " (in a file)" } else { away };
            let values = format!("{}{of_values}", kept_as(desc.kind, options));
            count(&mut parts.weights, values, value, options.share_of(spec.values));
            let update = options.share_of(spec.update);
            if master > 0 {
                count(&mut parts.weights, format!("{MASTERS}{state_away}"), master, update);
            }
            if desc.kind.trains() {
                let kept = kept_gradients(desc, options);
                let bytes = (desc.elements() * kept.size_in_bytes()) as u64;
                let over = options.share_of(spec.gradients);
                count(&mut parts.gradients, format!("{} gradients{away}", kept.as_str()), bytes, over);
                let int8 = options.optimizer_state.is_int8(desc.elements());
                let state = options.optimizer_state.bytes(desc.elements()) as u64;
                let what = if int8 { "moments in 8 bits" } else { "f32 moments" };
                count(&mut parts.optimizer, format!("{what}{state_away}"), state, update);
            }
        }
        let of_block = |layer: usize, adapter: &dyn Fn(&BlockModule) -> Option<LoraShape>| {
            BlockSaved::parts(config, layer, tokens, options.dtype, adapter)
        };
        for block in by_block(config, adapter_setup, branch_dtype(descs), !options.on_host, of_block) {
            for (what, bytes) in block {
                match parts.saved.iter_mut().find(|(known, _)| *known == what) {
                    Some((_, sum)) => *sum += bytes as u64,
                    None => parts.saved.push((what, bytes as u64)),
                }
            }
        }
        parts
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
            format!("frozen, {} in blocks of {}{double}", scheme.name(), scheme.hint().block_size)
        }
        ParamKind::Trainable(_) => format!("trained, {own}"),
        ParamKind::Adapter(_) => format!("adapters, {}", DType::F32.as_str()),
        ParamKind::AdapterInBf16(_) => format!("adapters, {}", DType::BF16.as_str()),
    }
}
