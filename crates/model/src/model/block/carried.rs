//! The state that runs beside the hidden states from block to block: per-layer inputs, and keys and
//! values that later blocks read.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::model::composition::{AttentionMixer, Sharing};
use crate::ops::elementwise::add;
use crate::runtime::TensorMut;
use crate::runtime::copy::converted;

/// The state beside the hidden states of a micro-batch of N tokens. Empty in most families.
///
/// Blocks only add to it, so that a block recomputes from the state after the forward.
#[derive(Debug, Clone, Default)]
pub struct Carried {
    /// `[N, Σ P]`, the columns of the first block first. Before the first block, these are the rows
    /// of the table; the first block makes the inputs of all blocks of them.
    pub(super) per_layer: Option<Tensor>,
    /// By the block that computes them.
    keys_values: BTreeMap<usize, KeysValues>,
}

/// The keys and values of one block, as attention reads them: `[M, K head_dim]` each.
#[derive(Debug, Clone)]
pub(super) struct KeysValues {
    /// Normed and rotated keys.
    pub(super) k: Tensor,
    /// The normed values.
    pub(super) v: Tensor,
}

impl Carried {
    /// Creates the state before the first block. `rows` are those of the per-layer table,
    /// `[N, Σ P]`, in a model that has one.
    pub fn new(rows: Option<Tensor>) -> Self {
        Carried { per_layer: rows, keys_values: BTreeMap::new() }
    }

    /// Returns the bytes of the state of `tokens` tokens in `dtype`, by tensor.
    pub fn parts(config: &ModelConfig, tokens: usize, dtype: DType) -> Vec<(&'static str, usize)> {
        let rows = |width: usize| tokens * width * dtype.size_in_bytes();
        [
            ("per-layer inputs", rows(config.per_layer_width(config.num_layers()))),
            ("keys and values that blocks share", rows(shared_width(config))),
        ]
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .collect()
    }

    /// Returns its tensors.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let shared = self.keys_values.values().flat_map(|KeysValues { k, v }| [k, v]);
        self.per_layer.iter().chain(shared)
    }

    /// Returns the keys and values of another block that `mixer` reads, if it does.
    pub(super) fn read_by(&self, mixer: &AttentionMixer) -> Result<Option<&KeysValues>> {
        let Some(owner) = mixer.reads_from() else { return Ok(None) };
        let missing = || Error::internal(format!("block {owner} has left no keys and values"));
        self.keys_values.get(&owner).map(Some).ok_or_else(missing)
    }

    /// Keeps the keys and values of block `owner` for later blocks.
    pub(super) fn keep(&mut self, owner: usize, k: Tensor, v: Tensor) {
        self.keys_values.insert(owner, KeysValues { k, v });
    }

    /// Returns the columns of a block's input, `[N, width]` from column `start` on.
    pub(super) fn input(&self, start: usize, width: usize) -> Result<Tensor> {
        let all = self.per_layer.as_ref().ok_or_else(|| Error::internal("no per-layer inputs"))?;
        Ok(all.narrow(1, start, width)?.contiguous()?)
    }
}

/// The gradients of a [`Carried`] state, which the backward of blocks adds to.
#[derive(Debug, Default)]
pub struct CarriedGradients {
    /// True if something trains behind the per-layer inputs.
    wants_per_layer: bool,
    /// `[N, Σ P]`, in the dtype of activations. After the backward of the first block, that of the
    /// rows of the table.
    pub(super) per_layer: Option<TensorMut>,
    /// The f32 sums of keys and of values over the blocks that read them, by the block that
    /// computes them.
    keys_values: BTreeMap<usize, [Tensor; 2]>,
}

impl CarriedGradients {
    /// Creates the gradients before the backward of the last block. `wants_per_layer` is true if
    /// something trains behind the per-layer inputs.
    pub fn new(wants_per_layer: bool) -> Self {
        CarriedGradients { wants_per_layer, ..CarriedGradients::default() }
    }

    /// Returns the bytes of the gradients for `tokens` tokens in `dtype`. `wants_per_layer` is that
    /// of [`CarriedGradients::new`].
    pub fn bytes(config: &ModelConfig, tokens: usize, dtype: DType, wants_per_layer: bool) -> usize {
        let inputs = if wants_per_layer { config.per_layer_width(config.num_layers()) } else { 0 };
        tokens * (inputs * dtype.size_in_bytes() + shared_width(config) * DType::F32.size_in_bytes())
    }

    /// Returns the gradient of the rows of the per-layer table, `[N, Σ P]`, after the backward of
    /// the first block.
    pub fn into_rows(self) -> Option<Tensor> {
        self.per_layer.map(TensorMut::into_tensor)
    }

    /// Sets the gradient `d: [N, P]` of a block's input, the columns from `start` on of `width`.
    pub(super) fn set_input(&mut self, d: &Tensor, start: usize, width: usize) -> Result<()> {
        if !self.wants_per_layer {
            return Ok(());
        }
        let all = match self.per_layer.take() {
            Some(all) => all,
            None => TensorMut::zeros((d.dim(0)?, width), d.dtype(), d.device())?,
        };
        all.slice_set(d, 1, start)?;
        self.per_layer = Some(all);
        Ok(())
    }

    /// Adds the gradients of the keys and values of block `owner`, `[N, K head_dim]` each.
    pub(super) fn add_keys_values(&mut self, owner: usize, d: [Tensor; 2]) -> Result<()> {
        let [dk, dv] = d.map(|d| converted(&d, DType::F32));
        let (dk, dv) = (dk?, dv?);
        let sum = match self.keys_values.remove(&owner) {
            Some([k, v]) => [add(&k, &dk)?, add(&v, &dv)?],
            None => [dk, dv],
        };
        self.keys_values.insert(owner, sum);
        Ok(())
    }

    /// Takes the sums of [`CarriedGradients::add_keys_values`], if a block has added some.
    pub(super) fn take_keys_values(&mut self, owner: usize) -> Option<[Tensor; 2]> {
        self.keys_values.remove(&owner)
    }
}

/// Returns the width of the keys and values that later blocks read.
fn shared_width(config: &ModelConfig) -> usize {
    let stored = config.attentions().filter(|attention| attention.sharing == Sharing::Stored);
    stored.map(|attention| 2 * attention.heads.kv_width()).sum()
}

/// The state that a block's backward reads, and the gradients that it adds to.
#[derive(Debug)]
pub struct CarriedBackward<'a> {
    /// The state after the forward.
    pub carried: &'a Carried,
    /// The gradients of the state.
    pub gradients: &'a mut CarriedGradients,
}
