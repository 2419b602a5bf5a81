//! The path of the loss through the output layer. It depends on the trained parts of that layer and
//! on a soft-cap of its logits.

use crate::model::ModelConfig;
use crate::parallel::{ParamDesc, TOKEN_ROWS};
use crate::weights::{EMBED_TOKENS, EMBED_TOKENS_MODULE, LM_HEAD, LM_HEAD_MODULE};

/// The path of the loss through the output layer, which determines its memory and speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossPath {
    /// The layer is frozen: the loss processes a part of the vocabulary at a time (on the CPU).
    Frozen,
    /// The weight is frozen, but an adapter on it or some of its rows train, or its logits have a
    /// soft-cap. The loss computes all logits of a chunk of rows at a time.
    Chunked,
    /// The weight trains: as `Chunked`, and its gradient is a third product.
    Trained,
}

impl LossPath {
    /// Returns the path of a model with the parameters `descs`.
    pub fn of(config: &ModelConfig, descs: &[ParamDesc]) -> Self {
        let has_own = descs.iter().any(|desc| desc.name == LM_HEAD);
        let tied = config.tie_word_embeddings && !has_own;
        let (weight, module) =
            if tied { (EMBED_TOKENS, EMBED_TOKENS_MODULE) } else { (LM_HEAD, LM_HEAD_MODULE) };
        let trains = |is_meant: &dyn Fn(&str) -> bool| {
            descs.iter().any(|desc| desc.kind.trains() && is_meant(&desc.name))
        };
        let has_rows = trains(&|name| name.strip_prefix(module) == Some(TOKEN_ROWS));
        // An adapter on the embedding is not on a head that is tied to it.
        let has_adapter = trains(&|name| {
            let slot = name.strip_prefix(LM_HEAD_MODULE).and_then(|slot| slot.strip_prefix('.'));
            slot.is_some_and(|slot| slot.starts_with("lora_"))
        });
        match () {
            () if trains(&|name| name == weight) => LossPath::Trained,
            () if has_rows || has_adapter || config.logit_softcap.is_some() => LossPath::Chunked,
            () => LossPath::Frozen,
        }
    }
}
