//! Gradients of linear layers that need the layers' input.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::model::lora::{DropoutSource, Lora};
use crate::model::lora_group::LoraGroup;
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose, matmul};
use crate::runtime::TensorMut;

/// Gradients that a backward leaves until the layers' input is known: those of the weights and of
/// the adapters' A.
#[derive(Default)]
pub(in crate::model) struct PendingGradients<'a> {
    pub(super) weights: Vec<PendingWeight<'a>>,
    /// Adapters that are no group, with the gradients of their inner activations.
    pub(super) adapters: Vec<(&'a Lora, Tensor)>,
    pub(super) group: Option<(LoraGroup<'a>, Tensor)>,
    pub(super) source: DropoutSource,
}

/// The gradient of a weight, and the columns of the output's gradient that it needs.
pub(super) struct PendingWeight<'a> {
    pub(super) grad: &'a TensorMut,
    pub(super) dy: Tensor,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl PendingGradients<'_> {
    /// Returns whether a gradient needs the input.
    pub(in crate::model) fn reads_input(&self) -> bool {
        let trains_a = self.adapters.iter().any(|(lora, _)| lora.a.grad.is_some());
        trains_a || !self.weights.is_empty() || self.group.as_ref().is_some_and(|(group, _)| group.trains_a())
    }

    /// Adds the gradients of two uses of the same layers in a micro-batch, given the input of each.
    /// Those of a weight are one product, since nothing is added to gradients in bf16.
    pub(in crate::model) fn add_both(mut self, x: &Tensor, mut other: Self, other_x: &Tensor) -> Result<()> {
        let weights = std::mem::take(&mut self.weights).into_iter().zip(std::mem::take(&mut other.weights));
        let weights: Vec<_> = weights.collect();
        self.add(x)?;
        other.add(other_x)?;
        if weights.is_empty() {
            return Ok(());
        }
        let join = |of: &PendingWeight<'_>, other: &PendingWeight<'_>| -> Result<Tensor> {
            Ok(Tensor::cat(&[&of.dy, &other.dy], 0)?)
        };
        let weights =
            weights.into_iter().map(|(of, other)| Ok(PendingWeight { dy: join(&of, &other)?, ..of }));
        let weights = weights.collect::<Result<_>>()?;
        PendingGradients { weights, ..PendingGradients::default() }.add(&Tensor::cat(&[x, other_x], 0)?)
    }

    /// Adds the gradients, given the layers' input, `x: [N, in]`.
    pub(in crate::model) fn add(self, x: &Tensor) -> Result<()> {
        if let Some((group, du)) = self.group.filter(|(group, _)| group.trains_a()) {
            group.add_gradients_of_a(x, &du)?;
        }
        for (lora, du) in self.adapters {
            lora.add_gradient_of_a(x, &du, self.source)?;
        }
        for PendingWeight { grad, dy, start, len } in self.weights {
            let dy = ColumnView { tensor: &dy, start, len };
            // Gradients in bf16 are of a single micro-batch: nothing is added to them.
            let addend = Addend::destination_if(grad.dtype() == DType::F32);
            matmul(ColumnViewMut::all(grad), dy, ColumnView::all(x), Transpose::Tn, 1.0, addend)?;
        }
        Ok(())
    }
}
