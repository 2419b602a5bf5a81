//! xIELU with the numbers of a block (Apertus), forward and backward.
//!
//! The curvatures are softplus(alpha_p) and beta + softplus(alpha_n) (transformers 5.24,
//! `XIELUActivation`). Each is one number, so that its chain rule is a few operations on the
//! device.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::model::Param;
use crate::ops::elementwise::add_into;
use crate::ops::xielu::{xielu, xielu_backward};
use crate::runtime::TensorMut;

/// The parameters of xIELU, for one use.
#[derive(Debug, Clone)]
pub struct XieluWeights {
    /// The numbers whose softplus gives the curvatures above and below 0: `[1]` each.
    pub alphas: [Param; 2],
    /// The slope at 0, one number in f32.
    pub beta: Tensor,
    /// The bound of the exponent, one number in f32.
    pub eps: Tensor,
}

impl XieluWeights {
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        xielu(x, &self.curve()?)
    }

    /// Returns the gradient of `x` from `dh`, which becomes the activated values, and adds those of
    /// the parameters.
    pub(super) fn backward(&self, x: &Tensor, dh: &TensorMut) -> Result<Tensor> {
        let trains = self.alphas.iter().any(|alpha| alpha.grad.is_some());
        let sums = trains.then(|| TensorMut::zeros(2, DType::F32, x.device())).transpose()?;
        let dx = xielu_backward(x, dh, &self.curve()?, sums.as_ref())?;
        let Some(sums) = sums.map(TensorMut::into_tensor) else { return Ok(dx) };
        for (i, alpha) in self.alphas.iter().enumerate() {
            let Some(grad) = &alpha.grad else { continue };
            let slope = (alpha.value.to_dtype(DType::F32)?.neg()?.exp()? + 1.0)?.recip()?;
            add_into(grad, &(sums.narrow(0, i, 1)? * slope)?)?;
        }
        Ok(dx)
    }

    /// Returns the numbers of the curve, `[4]` f32.
    fn curve(&self) -> Result<Tensor> {
        let softplus = |alpha: &Param| -> Result<Tensor> {
            let alpha = alpha.value.to_dtype(DType::F32)?;
            Ok((alpha.relu()? + (alpha.abs()?.neg()?.exp()? + 1.0)?.log()?)?)
        };
        let number = |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.to_dtype(DType::F32)?.reshape(1)?) };
        let (beta, [positive, negative]) = (number(&self.beta)?, &self.alphas);
        let negative = (softplus(negative)? + &beta)?;
        Ok(Tensor::cat(&[softplus(positive)?, negative, beta, number(&self.eps)?], 0)?)
    }
}
