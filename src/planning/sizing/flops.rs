//! What a token costs: floating-point operations of forward and backward, from shapes alone.
//!
//! ```text
//! full    6 (N + H) + 3.5 A      LoRA    4 (N + H) + 6 L + 3.5 A      recompute of blocks    + 2 N + 2 L + A
//! ```
//!
//! N are the weights of the blocks' linear layers, H those of the output layer (6 H where an adapter's run trains its weight), L those of adapters, A
//! attention's forward.
//! A product of a weight is 2 operations; its backward is one product for the input and one for the weight, where that trains
//! (Kaplan et al., arXiv 2001.08361, section 2.1). Attention: 4 · q_width · keys seen, backward 2.5 times forward (Dao, arXiv 2307.08691).

use serde::Serialize;

use crate::model::{BlockLayout, BlockModule, ModelConfig, WeightShape};
use crate::parallel::{ParamDesc, ParamKind};
use crate::planning::LossPath;
use crate::recipe::Recompute;

/// Operations of a weight and token: a product and a sum.
const PRODUCT: f64 = 2.0;
/// Operations of a weight and token where it trains: a product forward, and two backward.
pub(super) const TRAINED: f64 = 6.0;
/// Where it is frozen: its input alone has a gradient.
pub(super) const FROZEN: f64 = 4.0;
/// Attention forward and backward, over its forward.
pub(super) const ATTENTION: f64 = 3.5;

/// Floating-point operations of one token, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TokenFlops {
    /// Of the blocks' linear layers and adapters.
    pub linear: f64,
    /// Of the output layer.
    pub head: f64,
    /// How the loss goes through that layer.
    pub loss_path: LossPath,
    /// Of attention in all layers.
    pub attention: f64,
    /// Of what is computed a second time.
    pub recomputed: f64,
    /// Of it all what a forward without a backward takes.
    pub forward: f64,
}

/// Which weights of a model train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainedWeights {
    /// Weights of adapters; none where all weights train.
    pub branches: Option<u64>,
    /// How the loss goes through the output layer.
    pub loss_path: LossPath,
}

impl TrainedWeights {
    /// All of them.
    pub const ALL: TrainedWeights = TrainedWeights { branches: None, loss_path: LossPath::Trained };

    /// Those of the parameters `descs`.
    pub fn of(config: &ModelConfig, descs: &[ParamDesc]) -> Self {
        let of_adapter =
            |desc: &&ParamDesc| matches!(desc.kind, ParamKind::Adapter(_) | ParamKind::AdapterInBf16(_));
        let frozen = descs.iter().any(|desc| !desc.kind.trains());
        let branches = || descs.iter().filter(of_adapter).map(|desc| desc.elements() as u64).sum();
        TrainedWeights { branches: frozen.then(branches), loss_path: LossPath::of(config, descs) }
    }
}

impl TokenFlops {
    /// Of a token in a row of `row` tokens, which sees half of them, or its window. `trained` is what trains.
    pub fn new(config: &ModelConfig, trained: TrainedWeights, row: f64, recompute: Recompute) -> Self {
        let linear = linear_weights(config) as f64;
        let head = (config.vocab_size * config.hidden_size) as f64;
        let attention = attention_forward(config, row);
        let TrainedWeights { branches, loss_path } = trained;
        let products = |trains: bool| if trains { TRAINED } else { FROZEN };
        let of_blocks = products(branches.is_none());
        let branches = branches.unwrap_or(0) as f64;
        let of_blocks_forward = PRODUCT * (linear + branches) + attention;
        let recomputed = match recompute {
            Recompute::None => 0.0,
            Recompute::Block => of_blocks_forward,
        };
        TokenFlops {
            linear: of_blocks * linear + TRAINED * branches,
            head: products(loss_path == LossPath::Trained) * head,
            loss_path,
            attention: ATTENTION * attention,
            recomputed,
            forward: of_blocks_forward + PRODUCT * head,
        }
    }

    /// Of the model: what model FLOP utilisation (MFU) counts.
    pub fn model(&self) -> f64 {
        self.linear + self.head + self.attention
    }

    /// Of the hardware, with what is computed again: what HFU counts.
    pub fn hardware(&self) -> f64 {
        self.model() + self.recomputed
    }
}

/// Weights of the blocks' linear layers.
pub fn linear_weights(config: &ModelConfig) -> usize {
    let weights = |module: &BlockModule| match module.weight {
        WeightShape::Matrix { out, inputs } => out * inputs,
        WeightShape::Gain(_) => 0,
    };
    let of_block = |layer| -> usize { BlockLayout::new(config, layer).linears().map(weights).sum() };
    (0..config.num_layers()).map(of_block).sum()
}

/// Of a token, over all layers.
fn attention_forward(config: &ModelConfig, row: f64) -> f64 {
    let width = config.heads.q_width() as f64;
    let layers = config.attentions().map(|attention| {
        let seen = match attention.window {
            Some(window) if (window as f64) < row => {
                let window = window as f64;
                window - window * window / (2.0 * row)
            }
            _ => row / 2.0,
        };
        4.0 * width * seen
    });
    layers.sum()
}
