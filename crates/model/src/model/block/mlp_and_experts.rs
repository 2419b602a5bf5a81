//! A gated MLP and a mixture of experts side by side (Gemma 4), forward and backward.
//!
//! ```text
//! y = norm(mlp(norm(h))) + norm(experts(norm(h)))
//! ```
//!
//! All norms are different ones. The router reads a third: `h / rms(h) · scale / √D`. A stored
//! factor multiplies the weight of each expert.

use candle_core::{DType, Tensor};

use super::experts::{ExpertsInput, ExpertsSaved, ExpertsWeights};
use super::gated_mlp::{GatedMlpSaved, GatedMlpWeights};
use super::{HalfEnds, LayerPass, MixerBackward, MixerNorms, around_mixer_backward};
use crate::error::{Error, Result};
use crate::model::composition::MlpAndExperts;
use crate::model::{ModelConfig, Param};
use crate::ops::elementwise::{add, add_into};
use crate::ops::empty;
use crate::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use crate::runtime::TensorMut;

/// The parameters of both, for one use.
#[derive(Debug, Clone)]
pub struct MlpAndExpertsWeights {
    /// The MLP that every token uses.
    pub mlp: GatedMlpWeights,
    /// The norms around the MLP.
    pub mlp_norms: MixerNorms,
    /// The experts, with a factor on the weight of each.
    pub experts: ExpertsWeights,
    /// The norms around the experts.
    pub experts_norms: MixerNorms,
    /// The gain of the router's norm, before its division by √D: `[D]`.
    pub router_scale: Param,
}

/// The tensors that backward needs. Shapes: `h` and the outputs `[N, D]`.
#[derive(Debug, Clone)]
pub(super) struct MlpAndExpertsSaved {
    /// The input, which the block keeps too.
    h: Tensor,
    mlp: GatedMlpSaved,
    mlp_out: Tensor,
    experts: ExpertsSaved,
    experts_out: Tensor,
}

impl MlpAndExpertsSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters
    /// and without its input.
    pub(super) fn parts(
        config: &ModelConfig,
        mixer: &MlpAndExperts,
        tokens: usize,
        dtype: DType,
    ) -> Vec<(&'static str, usize)> {
        let mut parts: Vec<_> = ExpertsSaved::parts(&mixer.experts, config.hidden_size, tokens, dtype).into();
        parts[0].1 += GatedMlpSaved::parts(&mixer.mlp, config, tokens, dtype)[0].1;
        let outputs = 2 * tokens * config.hidden_size * dtype.size_in_bytes();
        parts.push(("outputs before norms of the mixers", outputs));
        parts
    }

    /// Returns the number of tokens that chose each expert.
    pub(super) fn loads(&self) -> Vec<usize> {
        self.experts.loads()
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let MlpAndExpertsSaved { h, mlp, mlp_out, experts, experts_out } = self;
        let mixers = mlp.tensors().into_iter().chain(experts.tensors());
        [h, mlp_out, experts_out].into_iter().chain(mixers).collect()
    }
}

impl MlpAndExpertsWeights {
    /// Computes `h: [N, D]` → `[N, D]` and the tensors that backward needs.
    pub(super) fn forward(&self, pass: LayerPass<'_>, h: &Tensor) -> Result<(Tensor, MlpAndExpertsSaved)> {
        let config = pass.config;
        let (mlp_out, mlp) = self.mlp.forward(pass, &self.mlp_norms.input(config, h)?, None)?;
        let gain = self.router_gain()?;
        let router = rms_norm(h, &gain, plain(config))?;
        let input = ExpertsInput { experts: &self.experts_norms.input(config, h)?, router: &router };
        let (experts_out, experts) = self.experts.forward(pass, input, None)?;
        drop(router);
        let of_mlp = self.mlp_norms.output(config, &mlp_out)?;
        let y = add(&of_mlp, &self.experts_norms.output(config, &experts_out)?)?;
        Ok((y, MlpAndExpertsSaved { h: h.clone(), mlp, mlp_out, experts, experts_out }))
    }

    /// Adds the gradients of all parameters and returns that of the input.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &MlpAndExpertsSaved,
        dout: &Tensor,
    ) -> Result<Tensor> {
        let (config, h) = (pass.config, &saved.h);
        let through_mlp = |half: MixerBackward| self.mlp.backward(pass, &saved.mlp, half);
        let ends = HalfEnds { x: h, out: Some(&saved.mlp_out) };
        let dh = around_mixer_backward(&self.mlp_norms, config, ends, (dout, None), true, through_mlp)?;
        let mut of_router = None;
        let through_experts = |half: MixerBackward| {
            let (gradients, router) = self.experts.backward_apart(pass, &saved.experts, half)?;
            of_router = Some(router);
            Ok(gradients)
        };
        let ends = HalfEnds { x: h, out: Some(&saved.experts_out) };
        let around = (dout, dh.as_ref());
        let dh = around_mixer_backward(&self.experts_norms, config, ends, around, true, through_experts)?;
        let no_gradient = || Error::internal("a router without the gradient of its input");
        let router = of_router.ok_or_else(no_gradient)?;
        let drouter = router.dinput.ok_or_else(no_gradient)?;
        let (rows, width) = h.dims2()?;
        let normed = || empty(rows, width, h.dtype(), h.device());
        let normed = router.pending.reads_input().then(normed).transpose()?;
        let dgain = self.router_scale.grad.as_ref();
        let dgain = dgain.map(|_| TensorMut::zeros(width, DType::F32, h.device())).transpose()?;
        let gain = self.router_gain()?;
        let dh = rms_norm_backward(
            h,
            &gain,
            &drouter,
            dh.as_ref(),
            dgain.as_ref(),
            normed.as_ref(),
            plain(config),
        )?;
        if let Some(normed) = normed {
            router.pending.add(&normed)?;
        }
        if let (Some(grad), Some(dgain)) = (&self.router_scale.grad, dgain) {
            add_into(grad, &(dgain.into_tensor() / (width as f64).sqrt())?)?;
        }
        Ok(dh)
    }

    /// Returns the gain of the router's norm, `[D]` f32.
    fn router_gain(&self) -> Result<Tensor> {
        let scale = self.router_scale.value.to_dtype(DType::F32)?;
        let width = scale.dim(0)? as f64;
        Ok((scale / width.sqrt())?)
    }
}

/// Returns the norm of the model's epsilon whose gain is the weight.
fn plain(config: &ModelConfig) -> NormKind {
    NormKind { unit_offset: false, ..config.norm }
}
