//! Floating-point operations of a token, forward and backward, from shapes alone.
//!
//! ```text
//! full                   6 (N + H) + 3.5 A
//! LoRA                   4 (N + H) + 6 L + 3.5 A
//! recompute              + 2 N' + 2 L' + A'
//! ```
//!
//! The primes count the blocks that are recomputed, which the last one never is, and for attention
//! those of "selective" too. If nothing reads the output of a `down_proj` in recomputing (no norm,
//! no DoRA, no later block), they leave out its weights and the B of its adapter.
//!
//! N are the weights of the blocks' linear layers (of experts, those of a token), H those of the
//! output layer (6 H if an adapter's
//! run trains its weight), L those of adapters, A attention's forward. A product of a weight is 2
//! operations. Its backward is one product for the input, and one for the weight if that trains
//! (Kaplan et al., arXiv 2001.08361, section 2.1). Attention: 4 · q_width · keys seen, backward 2.5
//! times forward (Dao, arXiv 2307.08691).

use std::collections::{BTreeSet, HashSet};

use crate::model::{BlockLayout, BlockModule, BlockPart, ModelConfig, Segment, TokenMixer, WeightShape};
use crate::objectives::ObjectiveCost;
use crate::parallel::{ParamDesc, ParamKind};
use crate::planning::LossPath;
use crate::recipe::enums::{BlockStorage, StoredActivations};

/// Operations of a product per weight and token: a multiplication and an addition.
const PRODUCT: f64 = 2.0;
/// Operations per trained weight and token: a product forward, and two backward.
pub(super) const TRAINED: f64 = 6.0;
/// Operations per frozen weight and token: only its input has a gradient.
pub(super) const FROZEN: f64 = 4.0;
/// Ratio of attention's forward and backward to its forward.
pub(super) const ATTENTION: f64 = 3.5;

/// Floating-point operations of one token, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenFlops {
    /// Operations of the blocks' linear layers and adapters.
    pub linear: f64,
    /// Operations of the output layer.
    pub head: f64,
    /// The path of the loss through the output layer.
    pub loss_path: LossPath,
    /// Operations of attention, or of the delta rule, in all layers.
    pub attention: f64,
    /// Operations of recomputing.
    pub recomputed: f64,
    /// Operations of a forward without a backward; a part of the above.
    pub forward: f64,
    /// Operations of the objective's further forwards.
    pub objective: f64,
}

/// The trained weights of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainedWeights {
    /// Number of weights of adapters; none if all weights train.
    pub branches: Option<u64>,
    /// Number of weights, those of adapters included, that recomputing blocks multiplies by.
    pub recomputed: u64,
    /// The path of the loss through the output layer.
    pub loss_path: LossPath,
}

impl TrainedWeights {
    /// Describes the trained weights among the parameters `descs`. `stored` decides which blocks
    /// are recomputed.
    pub fn of(config: &ModelConfig, descs: &[ParamDesc], stored: &StoredActivations) -> Self {
        let is_frozen = |kind: ParamKind| !kind.trains() && !matches!(kind, ParamKind::Buffer { .. });
        let frozen = descs.iter().any(|desc| is_frozen(desc.kind));
        TrainedWeights {
            branches: frozen.then(|| adapter_weights(config, descs, |_| true)),
            recomputed: recomputed_weights(config, descs, stored),
            loss_path: LossPath::of(config, descs),
        }
    }
}

impl TokenFlops {
    /// Counts the operations of a token in a row of `row` tokens. A token sees half of the row, or
    /// its window.
    pub fn new(config: &ModelConfig, trained: TrainedWeights, row: f64, stored: &StoredActivations) -> Self {
        let linear = linear_weights(config) as f64;
        let head = (config.vocab_size * config.hidden_size) as f64;
        let attention = attention_forward(config, row).sum::<f64>();
        let TrainedWeights { branches, recomputed, loss_path } = trained;
        let products = |trains: bool| if trains { TRAINED } else { FROZEN };
        let of_blocks = products(branches.is_none());
        let branches = branches.unwrap_or(0) as f64;
        let of_blocks_forward = PRODUCT * (linear + branches) + attention;
        let attends_again = |(layer, _): &(usize, f64)| !matches!(stored.of(*layer), BlockStorage::Results);
        let attention_again = attention_forward(config, row).enumerate().filter(attends_again);
        let recomputed = PRODUCT * recomputed as f64 + attention_again.map(|(_, flops)| flops).sum::<f64>();
        TokenFlops {
            linear: of_blocks * linear + TRAINED * branches,
            head: products(loss_path == LossPath::Trained) * head,
            loss_path,
            attention: ATTENTION * attention,
            recomputed,
            forward: of_blocks_forward + PRODUCT * head,
            objective: 0.0,
        }
    }

    /// The same with the further forwards of an objective.
    #[must_use]
    pub fn with_objective(self, cost: ObjectiveCost) -> Self {
        let factor = if self.loss_path == LossPath::Trained { TRAINED } else { FROZEN };
        let of_head = cost.head_forwards as f64 * self.head * PRODUCT / factor;
        TokenFlops { objective: cost.extra_forwards as f64 * self.forward + of_head, ..self }
    }

    /// Returns the operations of the model, as model FLOP utilisation (MFU) counts them.
    pub fn model(&self) -> f64 {
        self.linear + self.head + self.attention
    }

    /// Returns the operations of the hardware including recomputing, as HFU counts them.
    pub fn hardware(&self) -> f64 {
        self.model() + self.recomputed + self.objective
    }
}

/// Returns the number of weights in the blocks' linear layers that a token uses.
pub fn linear_weights(config: &ModelConfig) -> usize {
    (0..config.num_layers()).map(|layer| block_weights(config, layer, |_| true)).sum()
}

/// Returns the number of weights in the chosen linear layers of a block.
fn block_weights(config: &ModelConfig, layer: usize, is_chosen: impl Fn(&BlockModule) -> bool) -> usize {
    let weights = |module: &BlockModule| match module.weight {
        WeightShape::Matrix { out, inputs } => out * inputs,
        WeightShape::Gain(_) | WeightShape::Scalar | WeightShape::Conv { .. } => 0,
    };
    let layout = BlockLayout::new(config, layer);
    layout.active_linears(config, layer).filter(|module| is_chosen(module)).map(weights).sum()
}

/// Returns the number of weights that a token uses of the chosen parameters of adapters.
fn adapter_weights(config: &ModelConfig, descs: &[ParamDesc], is_chosen: impl Fn(&ParamDesc) -> bool) -> u64 {
    let unused: HashSet<String> = (0..config.num_layers()).flat_map(|layer| unused(config, layer)).collect();
    let is_used =
        |name: &str| unused.is_empty() || !name.split_once(".lora_").is_some_and(|(m, _)| unused.contains(m));
    let of_adapter = descs.iter().filter(|desc| desc.kind.is_adapter() && is_used(&desc.name));
    of_adapter.filter(|desc| is_chosen(desc)).map(|desc| desc.global_elements() as u64).sum()
}

/// Returns the names of the experts' layers beyond those that a token uses.
fn unused(config: &ModelConfig, layer: usize) -> Vec<String> {
    let layout = BlockLayout::new(config, layer);
    let used: HashSet<BlockPart> = layout.active_linears(config, layer).map(|module| module.part).collect();
    let unused = layout.linears().filter(|module| !used.contains(&module.part));
    unused.map(|module| module.name_in(layer)).collect()
}

/// Returns the number of weights that a backward multiplies by again: those of all blocks that it
/// recomputes. If nothing reads the output of a `down_proj`, recomputing needs of it only the inner
/// activations of its adapter.
fn recomputed_weights(config: &ModelConfig, descs: &[ParamDesc], stored: &StoredActivations) -> u64 {
    let layers: BTreeSet<usize> =
        (0..config.num_layers()).filter(|layer| stored.group(*layer).is_some()).collect();
    let has_dora: HashSet<&str> =
        descs.iter().filter_map(|desc| desc.name.strip_suffix(".lora_magnitude_vector")).collect();
    let is_read = |layer: usize, module: &BlockModule| {
        !module.part.is_last_of_mlp()
            || !stored.ends_group(layer)
            || config.blocks[layer].residual.has_post_norms()
            || has_dora.contains(module.name_in(layer).as_str())
    };
    let weights = |layer| block_weights(config, layer, |module| is_read(layer, module));
    let unread = |layer: usize| {
        let modules = BlockLayout::new(config, layer);
        let unread = modules.linears().filter(|module| !is_read(layer, module));
        unread.map(|module| format!("{}.lora_B.weight", module.name_in(layer))).collect::<Vec<_>>()
    };
    let unread: HashSet<String> = layers.iter().copied().flat_map(unread).collect();
    let is_again = |desc: &ParamDesc| {
        matches!(desc.segment, Segment::Block(layer) if layers.contains(&layer))
            && !unread.contains(&desc.name)
    };
    layers.iter().copied().map(weights).sum::<usize>() as u64 + adapter_weights(config, descs, is_again)
}

/// Returns the operations of the forward of attention, or of the delta rule, for a token, by layer.
fn attention_forward(config: &ModelConfig, row: f64) -> impl Iterator<Item = f64> {
    config.blocks.iter().map(move |block| match &block.token_mixer {
        TokenMixer::Attention(attention) => {
            // A token sees half of its block of tokens.
            let row = attention.chunk.map_or(row, |chunk| row.min(chunk as f64));
            let seen = match attention.window {
                Some(window) if (window as f64) < row => {
                    let window = window as f64;
                    window - window * window / (2.0 * row)
                }
                _ => row / 2.0,
            };
            4.0 * attention.heads.q_width() as f64 * seen
        }
        // Widths of keys and of values differ.
        TokenMixer::Latent(latent) => {
            2.0 * (latent.attended_widths() * latent.attention.heads.num_heads) as f64 * row / 2.0
        }
        TokenMixer::GatedDelta(delta) => delta.heads.forward_flops(1) as f64,
        TokenMixer::ShortConv(conv) => 2.0 * (conv.channels * conv.kernel) as f64,
    })
}
