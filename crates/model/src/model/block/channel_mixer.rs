//! The channel mixers of a block by their kind.

use candle_core::{DType, Tensor};

use super::experts::{ExpertsSaved, ExpertsWeights, PendingExperts};
use super::gated_mlp::{GatedMlpSaved, GatedMlpWeights};
use super::mlp_and_experts::{MlpAndExpertsSaved, MlpAndExpertsWeights};
use super::plain_mlp::{PlainMlpSaved, PlainMlpWeights};
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::model::block_part::LinearGroup;
use crate::model::composition::ChannelMixer;
use crate::model::linear::{MergedLinear, PendingGradients};
use crate::ops::elementwise::add;

/// The parameters of a channel mixer.
#[derive(Debug, Clone)]
pub enum ChannelMixerWeights {
    /// An MLP with an activated gate.
    GatedMlp(GatedMlpWeights),
    /// An MLP without a gate.
    PlainMlp(PlainMlpWeights),
    /// A mixture of experts.
    Experts(Box<ExpertsWeights>),
    /// An MLP and a mixture of experts side by side.
    MlpAndExperts(Box<MlpAndExpertsWeights>),
}

impl ChannelMixerWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> Vec<&mut MergedLinear> {
        match self {
            ChannelMixerWeights::GatedMlp(mlp) => vec![&mut mlp.gate_up, &mut mlp.down],
            ChannelMixerWeights::PlainMlp(mlp) => vec![&mut mlp.up, &mut mlp.down],
            ChannelMixerWeights::Experts(experts) => experts.linears(),
            ChannelMixerWeights::MlpAndExperts(both) => {
                let mlp = [&mut both.mlp.gate_up, &mut both.mlp.down];
                mlp.into_iter().chain(both.experts.linears()).collect()
            }
        }
    }

    /// Returns the layers of a group outside experts, if the mixer has it.
    pub(super) fn linear(&self, group: LinearGroup) -> Option<&MergedLinear> {
        let (first, second) = match self {
            ChannelMixerWeights::GatedMlp(mlp) => (&mlp.gate_up, &mlp.down),
            ChannelMixerWeights::PlainMlp(mlp) => (&mlp.up, &mlp.down),
            ChannelMixerWeights::Experts(_) => return None,
            ChannelMixerWeights::MlpAndExperts(both) => (&both.mlp.gate_up, &both.mlp.down),
        };
        match group {
            LinearGroup::GateUp => Some(first),
            LinearGroup::Down => Some(second),
            _ => None,
        }
    }

    /// Returns whether [`ChannelMixerWeights::recompute`] multiplies by the layers of a group.
    pub(super) fn is_recomputed(&self, group: LinearGroup) -> bool {
        group != LinearGroup::Down || matches!(self, ChannelMixerWeights::MlpAndExperts(_))
    }

    /// Returns the layers whose dequantized panels serve recomputing and backward. Recomputing
    /// multiplies by `down_proj` only if its output `is_read`.
    pub(super) fn panels(&mut self, is_read: bool) -> Vec<&mut MergedLinear> {
        match self {
            ChannelMixerWeights::Experts(_) => Vec::new(),
            // The norm of the MLP's output always reads it.
            ChannelMixerWeights::MlpAndExperts(both) => vec![&mut both.mlp.gate_up, &mut both.mlp.down],
            mlp => mlp.linears().into_iter().take(if is_read { 2 } else { 1 }).collect(),
        }
    }

    /// Computes the mixer's output for `x: [N, D]`, normed, plus `residual`: `[N, D]`.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, ChannelMixerSaved)> {
        match self {
            ChannelMixerWeights::GatedMlp(mlp) => {
                let (out, saved) = mlp.forward(pass, x, residual)?;
                Ok((out, ChannelMixerSaved::GatedMlp(saved)))
            }
            ChannelMixerWeights::PlainMlp(mlp) => {
                let (out, saved) = mlp.forward(pass, x, residual)?;
                Ok((out, ChannelMixerSaved::PlainMlp(saved)))
            }
            ChannelMixerWeights::Experts(experts) => {
                let (out, saved) = experts.forward(pass, x.into(), residual)?;
                Ok((out, ChannelMixerSaved::Experts(saved)))
            }
            ChannelMixerWeights::MlpAndExperts(both) => {
                let (out, saved) = both.forward(pass, x)?;
                let out = residual.map_or(Ok(out.clone()), |residual| add(residual, &out))?;
                Ok((out, ChannelMixerSaved::MlpAndExperts(Box::new(saved))))
            }
        }
    }

    /// Works like [`ChannelMixerWeights::forward`] without its output.
    pub(super) fn recompute(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<ChannelMixerSaved> {
        match self {
            ChannelMixerWeights::GatedMlp(mlp) => mlp.recompute(pass, x).map(ChannelMixerSaved::GatedMlp),
            ChannelMixerWeights::PlainMlp(mlp) => mlp.recompute(pass, x).map(ChannelMixerSaved::PlainMlp),
            ChannelMixerWeights::Experts(experts) => {
                experts.recompute(pass, x).map(ChannelMixerSaved::Experts)
            }
            ChannelMixerWeights::MlpAndExperts(both) => {
                let (_, saved) = both.forward(pass, x)?;
                Ok(ChannelMixerSaved::MlpAndExperts(Box::new(saved)))
            }
        }
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &ChannelMixerSaved,
        half: MixerBackward,
    ) -> Result<MixerGradients<'_>> {
        match (self, saved) {
            (ChannelMixerWeights::GatedMlp(mlp), ChannelMixerSaved::GatedMlp(saved)) => {
                mlp.backward(pass, saved, half)
            }
            (ChannelMixerWeights::PlainMlp(mlp), ChannelMixerSaved::PlainMlp(saved)) => {
                mlp.backward(pass, saved, half)
            }
            (ChannelMixerWeights::Experts(experts), ChannelMixerSaved::Experts(saved)) => {
                experts.backward(pass, saved, half)
            }
            (ChannelMixerWeights::MlpAndExperts(both), ChannelMixerSaved::MlpAndExperts(saved)) => {
                let dinput = Some(both.backward(pass, saved, &half.dout)?);
                Ok(MixerGradients { dinput, pending: PendingMixer::Done })
            }
            _ => Err(Error::internal("the saved tensors are of another channel mixer")),
        }
    }
}

/// The tensors that a channel mixer's backward needs.
#[derive(Debug, Clone)]
pub(super) enum ChannelMixerSaved {
    GatedMlp(GatedMlpSaved),
    PlainMlp(PlainMlpSaved),
    Experts(ExpertsSaved),
    MlpAndExperts(Box<MlpAndExpertsSaved>),
}

impl ChannelMixerSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(
        config: &ModelConfig,
        mixer: &ChannelMixer,
        tokens: usize,
        dtype: DType,
    ) -> Vec<(&'static str, usize)> {
        match mixer {
            ChannelMixer::GatedMlp(mlp) => GatedMlpSaved::parts(mlp, config, tokens, dtype).into(),
            ChannelMixer::PlainMlp(_) => PlainMlpSaved::parts(config, tokens, dtype).into(),
            ChannelMixer::Experts(experts) => {
                ExpertsSaved::parts(experts, config.hidden_size, tokens, dtype).into()
            }
            ChannelMixer::MlpAndExperts(both) => MlpAndExpertsSaved::parts(config, both, tokens, dtype),
        }
    }

    /// Returns the number of tokens that chose each expert; `None` without experts.
    pub(super) fn loads(&self) -> Option<Vec<usize>> {
        match self {
            ChannelMixerSaved::GatedMlp(_) | ChannelMixerSaved::PlainMlp(_) => None,
            ChannelMixerSaved::Experts(saved) => Some(saved.loads()),
            ChannelMixerSaved::MlpAndExperts(saved) => Some(saved.loads()),
        }
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            ChannelMixerSaved::GatedMlp(mlp) => mlp.tensors(),
            ChannelMixerSaved::PlainMlp(mlp) => mlp.tensors(),
            ChannelMixerSaved::Experts(experts) => experts.tensors(),
            ChannelMixerSaved::MlpAndExperts(both) => both.tensors(),
        }
    }
}

/// Gradients of a mixer's parameters that need its input.
pub(super) enum PendingMixer<'w> {
    Linear(PendingGradients<'w>),
    Experts(PendingExperts<'w>),
    /// None: all are added.
    Done,
}

impl<'w> From<PendingGradients<'w>> for PendingMixer<'w> {
    fn from(pending: PendingGradients<'w>) -> Self {
        PendingMixer::Linear(pending)
    }
}

impl<'w> From<PendingExperts<'w>> for PendingMixer<'w> {
    fn from(pending: PendingExperts<'w>) -> Self {
        PendingMixer::Experts(pending)
    }
}

impl PendingMixer<'_> {
    /// Returns whether a gradient needs the input.
    pub(super) fn reads_input(&self) -> bool {
        match self {
            PendingMixer::Linear(pending) => pending.reads_input(),
            PendingMixer::Experts(pending) => pending.reads_input(),
            PendingMixer::Done => false,
        }
    }

    /// Adds the gradients, given the mixer's input, `x: [N, D]`.
    pub(super) fn add(self, x: &Tensor) -> Result<()> {
        match self {
            PendingMixer::Linear(pending) => pending.add(x),
            PendingMixer::Experts(pending) => pending.add(x),
            PendingMixer::Done => Ok(()),
        }
    }
}
