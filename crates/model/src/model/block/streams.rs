//! Several hidden states side by side (AltUp): their origin in the first block and their mean after
//! the last one, forward and backward.
//!
//! ```text
//! x_0 = x,  x_i = like(project_i(x), x)                       in the first block
//! y   = mean of x_0 and like(unproject_i(x_i), x_0)           in the last one
//! ```
//!
//! `like(p, x)` is `p` with the root mean square of `x` instead of its own. Backward computes the
//! projections again.

use candle_core::{DType, Tensor};

use super::LayerPass;
use crate::error::Result;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::model::lora::BranchContext;
use crate::ops::elementwise::add;
use crate::runtime::copy::converted;

/// The least mean square of a projection, as in transformers.
const LEAST_SQUARE: f64 = 1e-5;
/// A divisor of a gradient that is 0 anyway: that of a hidden state of zeros.
const TINY: f64 = 1e-30;

/// The projections at both ends of a model's streams, in its first and in its last block.
#[derive(Debug, Clone)]
pub struct StreamEnds {
    /// In the first block: the projections to all streams but the first, `[(S − 1) D, D]`.
    pub project: Option<MergedLinear>,
    /// In the last block: the projection of each stream but the first, `[D, D]`.
    pub unproject: Vec<MergedLinear>,
}

impl StreamEnds {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut MergedLinear> {
        self.project.iter_mut().chain(&mut self.unproject)
    }

    /// Returns true in the last block.
    pub(super) fn is_last(&self) -> bool {
        !self.unproject.is_empty()
    }

    /// Returns the `count` streams of a block's input, `[N, D]` f32 each: made of `x: [N, D]` in
    /// the first block.
    pub(super) fn streams(&self, pass: LayerPass<'_>, x: &Tensor, count: usize) -> Result<Vec<Tensor>> {
        let Some(project) = &self.project else { return split(x, count) };
        let (projected, _) = projected(pass, project, x)?;
        let x = converted(x, DType::F32)?;
        let others = split(&projected, count - 1)?.into_iter().map(|p| like(&p, &x));
        std::iter::once(Ok(x.clone())).chain(others).collect()
    }

    /// Returns the gradient of a block's input from those of its streams, and adds those of the
    /// projections; `None` in the first block without `need_dx`.
    pub(super) fn streams_backward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        dstreams: &[Tensor],
        need_dx: bool,
    ) -> Result<Option<Tensor>> {
        let Some(project) = &self.project else { return join(dstreams, x.dtype()).map(Some) };
        let (projected, lora) = projected(pass, project, x)?;
        let x_f32 = converted(x, DType::F32)?;
        let (mut dprojected, mut dx) = (Vec::new(), dstreams[0].clone());
        for (p, d) in split(&projected, dstreams.len() - 1)?.iter().zip(&dstreams[1..]) {
            let gradients = like_backward(p, &x_f32, d)?;
            dprojected.push(gradients.p);
            dx = (dx + gradients.x)?;
        }
        let dprojected = join(&dprojected, x.dtype())?;
        let (through, pending) = linear::backward_first(project, &lora, &dprojected, alone(pass), need_dx)?;
        pending.add(x)?;
        let dx = converted(&dx, x.dtype())?;
        through.map(|through| add(&dx, &through)).transpose()
    }

    /// Returns the mean of the `count` streams `x: [N, S D]` after the last block, `[N, D]`.
    pub(super) fn one_of(&self, pass: LayerPass<'_>, x: &Tensor, count: usize) -> Result<Tensor> {
        let streams = split(x, count)?;
        let mut sum = streams[0].clone();
        for (unproject, stream) in self.unproject.iter().zip(&streams[1..]) {
            let (p, _) = projected(pass, unproject, &converted(stream, x.dtype())?)?;
            sum = (sum + like(&converted(&p, DType::F32)?, &streams[0])?)?;
        }
        converted(&sum.affine(1.0 / count as f64, 0.0)?, x.dtype())
    }

    /// Returns the gradients of the streams `x: [N, S D]`, f32, from that of their mean, and adds
    /// those of the projections.
    pub(super) fn one_of_backward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        dy: &Tensor,
        count: usize,
    ) -> Result<Vec<Tensor>> {
        let streams = split(x, count)?;
        let d = converted(dy, DType::F32)?.affine(1.0 / count as f64, 0.0)?;
        let mut dstreams = vec![d.clone()];
        for (unproject, stream) in self.unproject.iter().zip(&streams[1..]) {
            let stream = converted(stream, x.dtype())?;
            let (p, lora) = projected(pass, unproject, &stream)?;
            let gradients = like_backward(&converted(&p, DType::F32)?, &streams[0], &d)?;
            dstreams[0] = (&dstreams[0] + gradients.x)?;
            let dp = converted(&gradients.p, x.dtype())?;
            let (dstream, pending) = linear::backward(unproject, &lora, &dp, alone(pass))?;
            pending.add(&stream)?;
            dstreams.push(converted(&dstream, DType::F32)?);
        }
        Ok(dstreams)
    }
}

/// Returns the settings of these layers, which make their panels themselves.
fn alone(pass: LayerPass<'_>) -> BranchContext<'_> {
    BranchContext { panels: None, ..pass.branch() }
}

fn projected(pass: LayerPass<'_>, layer: &MergedLinear, x: &Tensor) -> Result<(Tensor, LoraSaved)> {
    linear::forward(layer, x, None, alone(pass))
}

/// Returns the `count` parts of equal width of the columns of `x`, f32.
pub(super) fn split(x: &Tensor, count: usize) -> Result<Vec<Tensor>> {
    let width = x.dim(1)? / count;
    (0..count).map(|part| converted(&x.narrow(1, part * width, width)?.contiguous()?, DType::F32)).collect()
}

/// Returns the parts side by side, in `dtype`.
pub(super) fn join(parts: &[Tensor], dtype: DType) -> Result<Tensor> {
    converted(&Tensor::cat(parts, 1)?, dtype)
}

/// Returns the mean square of each row, `[N, 1]`.
fn mean_square(x: &Tensor) -> Result<Tensor> {
    Ok(x.sqr()?.mean_keepdim(1)?)
}

/// Returns `p: [N, D]` with the root mean square of `x: [N, D]`, both f32.
fn like(p: &Tensor, x: &Tensor) -> Result<Tensor> {
    let own = mean_square(p)?.maximum(LEAST_SQUARE)?.sqrt()?;
    Ok(p.broadcast_mul(&(mean_square(x)?.sqrt()? / own)?)?)
}

/// The gradients of both arguments of [`like`].
struct LikeGradients {
    p: Tensor,
    x: Tensor,
}

fn like_backward(p: &Tensor, x: &Tensor, dy: &Tensor) -> Result<LikeGradients> {
    let width = p.dim(1)? as f64;
    let square = mean_square(p)?;
    let own = square.maximum(LEAST_SQUARE)?.sqrt()?;
    let target = mean_square(x)?.sqrt()?;
    let along = (dy * p)?.sum_keepdim(1)?;
    // A projection below the least mean square is divided by a constant.
    let is_free = square.ge(LEAST_SQUARE)?.to_dtype(DType::F32)?;
    let ratio = (&target / &own)?;
    let back = ((((&along * &ratio)? / own.sqr()?)? * is_free)? * (1.0 / width))?;
    let dp = (dy.broadcast_mul(&ratio)? - p.broadcast_mul(&back)?)?;
    let of_target = ((&along / &own)? / (target * width)?.maximum(TINY)?)?;
    Ok(LikeGradients { p: dp, x: x.broadcast_mul(&of_target)? })
}
