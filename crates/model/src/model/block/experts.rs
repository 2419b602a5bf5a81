//! A mixture of experts, forward and backward.
//!
//! ```text
//! y = Σ_j down_j(w_j · act(gate_j) · up_j) + w_j · bias_j?
//!     gate_j, up_j = gate_up_proj_j(x),  j: the experts of a token
//! ```
//!
//! The rows of an expert's tokens are copied side by side, so that each of its layers is one
//! product, and no token is dropped. The weights multiply the input of `down_proj` instead of its
//! output: it is linear, and the gradient of a weight then needs no output. `bias_j?` are its
//! biases (gpt-oss), one product of all experts' weights and biases. Stored factors may multiply
//! the weights (Gemma 4). Llama 4's weights multiply `x` instead, which is kept for their
//! gradients. Sums run in the order of the experts. Backward recomputes the gated products and the
//! copies of the rows.

use std::sync::Mutex;

use candle_core::{DType, Tensor};

use super::shared_expert::{PendingShared, SharedExpertSaved, SharedExpertWeights};
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::locks::locked;
use crate::model::Param;
use crate::model::composition::Experts;
use crate::model::linear::{self, LoraSaved, MergedLinear, PendingGradients};
use crate::model::lora::BranchContext;
use crate::ops::elementwise::{add, add_into};
use crate::ops::embedding::embed;
use crate::ops::experts::{
    ExpertChoice, ExpertRows, RowsOfExpert, balance_experts, choose_experts, choose_experts_backward,
    combine_rows, scale_rows, scale_rows_backward,
};
use crate::ops::glu::{glu, glu_backward};
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose, empty, matmul};
use crate::runtime::TensorMut;
use crate::runtime::copy::converted;

/// The parameters of a mixture of experts, for one use.
#[derive(Debug, Clone)]
pub struct ExpertsWeights {
    /// The shape of the mixer.
    pub mixer: Experts,
    /// The projection to a logit for each expert.
    pub router: MergedLinear,
    /// The biases of the experts' scores, for the choice: `[E]` f32.
    pub bias: Option<Tensor>,
    /// Factors on the weights of the experts, `[E]`.
    pub factors: Option<Param>,
    /// The experts, in the order of their numbers.
    pub experts: Vec<ExpertWeights>,
    /// The biases of the second projections, `[E, D]`, if they have any.
    pub down_biases: Option<Param>,
    /// The expert of every token.
    pub shared: Option<SharedExpertWeights>,
}

/// The parameters of one expert.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// The projections to gate and up.
    pub gate_up: MergedLinear,
    /// The second projection.
    pub down: MergedLinear,
}

/// The loss that balances the load of the experts, of a micro-batch.
///
/// With c_e the tokens of a step that chose expert e in any layer, and T its tokens times its
/// layers with experts, the loss is `Σ_e pull_e · Σ p_e`, where `pull_e = coefficient · E · c_e /
/// T²`. The gradient takes c as constant. Since c is of the whole step, micro-batches and ranks
/// only add up.
#[derive(Debug)]
pub struct ExpertBalance {
    /// pull: `[E]` f32.
    pull: Tensor,
    value: Mutex<f64>,
}

impl ExpertBalance {
    /// Returns the loss for these factors of the experts' probabilities, `[E]` f32.
    pub fn new(pull: Tensor) -> Self {
        ExpertBalance { pull, value: Mutex::new(0.0) }
    }

    /// Returns the sum over the backwards so far, and starts again at 0.
    pub fn take(&self) -> f64 {
        std::mem::take(&mut *locked(&self.value))
    }

    fn add(&self, value: f64) {
        *locked(&self.value) += value;
    }
}

/// The inputs of a mixture, `[N, D]` each and most often the same.
#[derive(Clone, Copy)]
pub(super) struct ExpertsInput<'a> {
    pub(super) experts: &'a Tensor,
    pub(super) router: &'a Tensor,
}

impl<'a> From<&'a Tensor> for ExpertsInput<'a> {
    fn from(x: &'a Tensor) -> Self {
        ExpertsInput { experts: x, router: x }
    }
}

/// The results of a router's backward.
pub(super) struct RouterGradients<'w> {
    /// The gradient of its input, if something reads it.
    pub(super) dinput: Option<Tensor>,
    /// Gradients of its parameters.
    pub(super) pending: PendingGradients<'w>,
}

/// The results of the backward of router and experts.
struct InnerGradients<'w> {
    /// The gradients of the rows of the experts' input, `[R, D]`, if something reads them.
    dx: Option<TensorMut>,
    /// Of each expert that has rows.
    experts: Vec<PendingGradients<'w>>,
    router: RouterGradients<'w>,
}

/// The tensors that backward needs.
#[derive(Debug, Clone)]
pub(super) struct ExpertsSaved {
    /// The router's logits, `[N, E]`, f32 or in the activations' dtype.
    logits: Tensor,
    router: LoraSaved,
    choice: ExpertChoice,
    rows: ExpertRows,
    /// Gates and ups of all rows, `[R, 2F]`.
    gate_up: Tensor,
    /// Of each expert that has rows: gate and up, then down.
    loras: Vec<[LoraSaved; 2]>,
    shared: Option<SharedExpertSaved>,
    /// The input, `[N, D]`, if the weights multiply it.
    input: Option<Tensor>,
}

/// Gradients that need the mixer's input.
pub(super) struct PendingExperts<'w> {
    /// `None` if the router has an input of its own.
    router: Option<PendingGradients<'w>>,
    rows: ExpertRows,
    /// Of each expert that has rows; none if the weights multiply the input.
    experts: Vec<PendingGradients<'w>>,
    shared: Option<PendingShared<'w>>,
}

impl PendingExperts<'_> {
    /// Returns whether a gradient needs the input.
    pub(super) fn reads_input(&self) -> bool {
        let shared = self.shared.as_ref().is_some_and(PendingShared::reads_input);
        let router = self.router.as_ref().is_some_and(PendingGradients::reads_input);
        shared || router || self.experts.iter().any(PendingGradients::reads_input)
    }

    /// Adds the gradients, given the mixer's input, `x: [N, D]`.
    pub(super) fn add(self, x: &Tensor) -> Result<()> {
        self.router.map_or(Ok(()), |router| router.add(x))?;
        self.shared.map_or(Ok(()), |shared| shared.add(x))?;
        if !self.experts.iter().any(PendingGradients::reads_input) {
            return Ok(());
        }
        let copies = copied(x, &self.rows)?;
        for (pending, RowsOfExpert { start, len, .. }) in self.experts.into_iter().zip(self.rows.of_experts())
        {
            pending.add(&copies.narrow(0, start, len)?)?;
        }
        Ok(())
    }
}

impl ExpertsSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    /// `hidden` is the width of the input.
    pub(super) fn parts(
        mixer: &Experts,
        hidden: usize,
        tokens: usize,
        dtype: DType,
    ) -> [(&'static str, usize); 3] {
        let rows = tokens * mixer.router.chosen;
        let size = dtype.size_in_bytes();
        let logits = tokens * mixer.count * logits_dtype(mixer, dtype).size_in_bytes();
        // Of each row: the expert, its weight, its number of copy and its place.
        let choice = 4 * rows * DType::F32.size_in_bytes();
        let [shared, factor] =
            mixer.shared.map_or([0; 2], |shared| SharedExpertSaved::bytes(&shared, tokens, dtype));
        [
            ("gate and up", rows * 2 * mixer.width * size + shared),
            ("the router's choice", logits + choice + factor),
            ("input of experts", if mixer.weighs_inputs { tokens * hidden * size } else { 0 }),
        ]
    }

    /// Returns the number of tokens that chose each expert.
    pub(super) fn loads(&self) -> Vec<usize> {
        self.rows.loads()
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let ExpertsSaved { logits, router, choice, rows, gate_up, loras, shared, input } = self;
        let loras = loras.iter().flatten().chain([router]).flat_map(LoraSaved::tensors);
        let choice = [&choice.ids, &choice.weights].into_iter().chain(rows.tensors());
        let shared = shared.iter().flat_map(SharedExpertSaved::tensors);
        [logits, gate_up].into_iter().chain(input).chain(choice).chain(loras).chain(shared).collect()
    }
}

/// Returns the dtype of the router's logits, given that of the activations.
fn logits_dtype(mixer: &Experts, dtype: DType) -> DType {
    if mixer.has_f32_logits { DType::F32 } else { dtype }
}

/// Returns a copy of the row of each token for each of its experts: `[R, D]`.
fn copied(x: &Tensor, rows: &ExpertRows) -> Result<Tensor> {
    embed(x, rows.tokens(), 1.0, x.dtype())
}

/// Returns the factor of each expert of a choice, `[N, k]` f32.
fn factors_of(factors: &Param, choice: &ExpertChoice) -> Result<Tensor> {
    let factors = factors.value.to_dtype(DType::F32)?;
    Ok(factors.index_select(&choice.ids.flatten_all()?, 0)?.reshape(choice.ids.shape())?)
}

impl ExpertsWeights {
    /// Returns the linear layers of experts for changes to them.
    pub(super) fn linears(&mut self) -> Vec<&mut MergedLinear> {
        let of_experts = self.experts.iter_mut().flat_map(|expert| [&mut expert.gate_up, &mut expert.down]);
        let of_shared = self.shared.iter_mut().flat_map(|shared| [&mut shared.gate_up, &mut shared.down]);
        of_experts.chain(of_shared).collect()
    }

    /// Computes the normed `input` → `[N, D]` plus `residual`, and the tensors that backward needs.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        input: ExpertsInput<'_>,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, ExpertsSaved)> {
        let x = input.experts;
        let (mut saved, product) = self.gated(pass, input)?;
        let (rows, _) = product.dims2()?;
        let y = empty(rows, x.dim(1)?, x.dtype(), x.device())?;
        for (RowsOfExpert { expert, start, len }, loras) in saved.rows.of_experts().zip(&mut saved.loras) {
            let (product, y) = (product.narrow(0, start, len)?, y.narrow(0, start, len)?);
            let down = &self.experts[expert].down;
            loras[1] = linear::forward_into(down, &product, &y, Addend::Nothing, pass.branch())?;
        }
        drop(product);
        let biased = self.with_biases(&saved.choice, x, residual)?;
        let residual = biased.as_ref().or(residual);
        let Some(shared) = &self.shared else {
            return Ok((combine_rows(&y, &saved.rows, residual)?, saved));
        };
        let (of_shared, saved_shared) = shared.forward(pass, x, residual)?;
        saved.shared = Some(saved_shared);
        Ok((combine_rows(&y, &saved.rows, Some(&of_shared))?, saved))
    }

    /// Works like [`ExpertsWeights::forward`] without its output, so without the products of
    /// `down_proj`.
    pub(super) fn recompute(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<ExpertsSaved> {
        let (mut saved, product) = self.gated(pass, x.into())?;
        for (RowsOfExpert { expert, start, len }, loras) in saved.rows.of_experts().zip(&mut saved.loras) {
            let product = || Ok(product.narrow(0, start, len)?);
            loras[1] = linear::recompute(&self.experts[expert].down, product, pass.branch())?;
        }
        saved.shared = self.shared.as_ref().map(|shared| shared.recompute(pass, x)).transpose()?;
        Ok(saved)
    }

    /// Chooses the experts and computes the weighted input of their `down_proj`, `[R, F]`. The
    /// adapters of `down_proj` and the shared expert are still missing.
    fn gated(&self, pass: LayerPass<'_>, input: ExpertsInput<'_>) -> Result<(ExpertsSaved, Tensor)> {
        let mixer = &self.mixer;
        let x = input.router;
        let logits = empty(x.dim(0)?, mixer.count, logits_dtype(mixer, x.dtype()), x.device())?;
        let router = linear::forward_into(&self.router, x, &logits, Addend::Nothing, pass.branch())?;
        let logits = logits.into_tensor();
        let choice = choose_experts(&logits, self.bias.as_ref(), mixer.router)?;
        let rows = ExpertRows::of(&choice, mixer.count)?;
        let weights = self.weights(&choice)?;
        let mut x = copied(input.experts, &rows)?;
        if mixer.weighs_inputs {
            x = scale_rows(&x, &weights, &rows)?;
        }
        let gate_up = empty(x.dim(0)?, 2 * mixer.width, x.dtype(), x.device())?;
        let through = |RowsOfExpert { expert, start, len }| -> Result<[LoraSaved; 2]> {
            let (x, y) = (x.narrow(0, start, len)?, gate_up.narrow(0, start, len)?);
            let layer = &self.experts[expert].gate_up;
            let saved = linear::forward_into(layer, &x, &y, Addend::Nothing, pass.branch())?;
            Ok([saved, LoraSaved::default()])
        };
        let loras = rows.of_experts().map(through).collect::<Result<_>>()?;
        drop(x);
        let gate_up = gate_up.into_tensor();
        let product = glu(&gate_up, mixer.activation)?;
        let weighed = !mixer.weighs_inputs;
        let product = if weighed { scale_rows(&product, &weights, &rows)? } else { product };
        let input = mixer.weighs_inputs.then(|| input.experts.clone());
        Ok((ExpertsSaved { logits, router, choice, rows, gate_up, loras, shared: None, input }, product))
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &ExpertsSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<MixerGradients<'_>> {
        let rows = &saved.rows;
        let InnerGradients { dx, experts, router } = self.backward_inside(pass, saved, &dout, need_dx)?;
        let mut around = router.dinput;
        let mut pending_shared = None;
        if let (Some(shared), Some(saved)) = (&self.shared, &saved.shared) {
            let (through, pending) = shared.backward(pass, saved, MixerBackward { dout, need_dx })?;
            around = around.zip(through).map(|(a, b)| add(&a, &b)).transpose()?;
            pending_shared = Some(pending);
        }
        let dinput = dx.map(|dx| combine_rows(&dx, rows, around.as_ref())).transpose()?;
        let router = Some(router.pending);
        let pending = PendingExperts { router, rows: rows.clone(), experts, shared: pending_shared };
        Ok(MixerGradients { dinput, pending: pending.into() })
    }

    /// Works like [`ExpertsWeights::backward`] without a shared expert, for a router with an input
    /// of its own.
    pub(super) fn backward_apart(
        &self,
        pass: LayerPass<'_>,
        saved: &ExpertsSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<(MixerGradients<'_>, RouterGradients<'_>)> {
        let rows = &saved.rows;
        let InnerGradients { dx, experts, router } = self.backward_inside(pass, saved, &dout, need_dx)?;
        let dinput = dx.map(|dx| combine_rows(&dx, rows, None)).transpose()?;
        let pending = PendingExperts { router: None, rows: rows.clone(), experts, shared: None };
        Ok((MixerGradients { dinput, pending: pending.into() }, router))
    }

    /// Computes the backward of router and experts, up to their inputs.
    fn backward_inside(
        &self,
        pass: LayerPass<'_>,
        saved: &ExpertsSaved,
        dout: &Tensor,
        need_dx: bool,
    ) -> Result<InnerGradients<'_>> {
        let (mixer, branch, rows) = (&self.mixer, pass.branch(), &saved.rows);
        let (dproduct, dweights) = self.through_down(saved, dout, branch)?;
        let dgate_up = glu_backward(&saved.gate_up, &dproduct, mixer.activation)?;
        drop(dproduct);
        let (count, width) = (dgate_up.dim(0)?, self.router.layers[0].weight.get().dims()?.1);
        let reads_dx = need_dx || mixer.weighs_inputs;
        let dx = reads_dx.then(|| empty(count, width, dgate_up.dtype(), dgate_up.device())).transpose()?;
        let through = |(RowsOfExpert { expert, start, len }, loras): (RowsOfExpert, &'_ [LoraSaved; 2])| {
            let dx = dx.as_ref().map(|dx| dx.narrow(0, start, len)).transpose()?;
            let dy = dgate_up.narrow(0, start, len)?;
            linear::backward_parts(&self.experts[expert].gate_up, &loras[0], &dy, dx.as_ref(), branch)
        };
        let mut experts = rows.of_experts().zip(&saved.loras).map(through).collect::<Result<Vec<_>>>()?;
        drop(dgate_up);
        let dweights = match (&saved.input, &dx) {
            (Some(input), Some(dx)) => self.through_input(saved, input, dx, std::mem::take(&mut experts))?,
            _ => dweights,
        };
        let dweights = self.weights_backward(&saved.choice, dweights)?;
        let dlogits = choose_experts_backward(&saved.logits, &saved.choice, &dweights, mixer.router)?;
        let dlogits = TensorMut::new(dlogits);
        if let Some(balance) = pass.context.balance {
            balance.add(balance_experts(&saved.logits, &balance.pull, &dlogits)?);
        }
        let dinput = || empty(dout.dim(0)?, width, dout.dtype(), dout.device());
        let dinput = need_dx.then(dinput).transpose()?;
        let pending = linear::backward_parts(&self.router, &saved.router, &dlogits, dinput.as_ref(), branch)?;
        let dinput = dinput.map(TensorMut::into_tensor);
        self.clear_others(rows)?;
        let dx = dx.filter(|_| need_dx);
        Ok(InnerGradients { dx, experts, router: RouterGradients { dinput, pending } })
    }

    /// Returns the weights of a choice with the stored factors, `[N, k]` f32.
    fn weights(&self, choice: &ExpertChoice) -> Result<Tensor> {
        match &self.factors {
            None => Ok(choice.weights.clone()),
            Some(factors) => Ok((&choice.weights * factors_of(factors, choice)?)?),
        }
    }

    /// Returns the gradient of the weights of a choice from that with the stored factors, and adds
    /// the gradient of the factors.
    fn weights_backward(&self, choice: &ExpertChoice, dweights: Tensor) -> Result<Tensor> {
        let Some(factors) = &self.factors else { return Ok(dweights) };
        if let Some(grad) = &factors.grad {
            let products = (&dweights * &choice.weights)?.flatten_all()?;
            let sums = Tensor::zeros(self.mixer.count, DType::F32, products.device())?;
            add_into(grad, &sums.index_add(&choice.ids.flatten_all()?, &products, 0)?)?;
        }
        Ok((dweights * factors_of(factors, choice)?)?)
    }

    /// Returns the gradients of the gated products, `[R, F]`, and of the weights of the choice,
    /// given that of the output. Adds the gradients of `down_proj`.
    fn through_down(
        &self,
        saved: &ExpertsSaved,
        of_tokens: &Tensor,
        branch: BranchContext<'_>,
    ) -> Result<(TensorMut, Tensor)> {
        let (dout, mixer) = (copied(of_tokens, &saved.rows)?, &self.mixer);
        let dproduct = empty(dout.dim(0)?, mixer.width, dout.dtype(), dout.device())?;
        let through = |(RowsOfExpert { expert, start, len }, loras): (RowsOfExpert, &'_ [LoraSaved; 2])| {
            let (dy, dx) = (dout.narrow(0, start, len)?, dproduct.narrow(0, start, len)?);
            linear::backward_parts(&self.experts[expert].down, &loras[1], &dy, Some(&dx), branch)
        };
        let pending = saved.rows.of_experts().zip(&saved.loras).map(through).collect::<Result<Vec<_>>>()?;
        let product = TensorMut::new(glu(&saved.gate_up, mixer.activation)?);
        let weights = self.weights(&saved.choice)?;
        // If the weights multiply the input, `through_input` gives their gradients.
        let weighed = !mixer.weighs_inputs;
        let dweights = weighed.then(|| scale_rows_backward(&product, &dproduct, &weights, &saved.rows));
        let dweights = dweights.unwrap_or(Ok(weights))?;
        let dweights = self.through_biases(&saved.choice, of_tokens, dweights)?;
        for (pending, RowsOfExpert { start, len, .. }) in pending.into_iter().zip(saved.rows.of_experts()) {
            pending.add(&product.narrow(0, start, len)?.into_tensor())?;
        }
        Ok((dproduct, dweights))
    }

    /// Converts `dx: [R, D]`, the gradients of the weighed rows of the input, `[N, D]`, to those of
    /// the rows. Adds the `pending` gradients of the experts, and returns those of the weights.
    fn through_input(
        &self,
        saved: &ExpertsSaved,
        input: &Tensor,
        dx: &TensorMut,
        pending: Vec<PendingGradients<'_>>,
    ) -> Result<Tensor> {
        let x = TensorMut::new(copied(input, &saved.rows)?);
        let dweights = scale_rows_backward(&x, dx, &self.weights(&saved.choice)?, &saved.rows)?;
        for (pending, RowsOfExpert { start, len, .. }) in pending.into_iter().zip(saved.rows.of_experts()) {
            pending.add(&x.narrow(0, start, len)?.into_tensor())?;
        }
        Ok(dweights)
    }

    /// Returns the biases of the second projections for the tokens of `x`, plus `residual`; `None`
    /// without biases.
    fn with_biases(
        &self,
        choice: &ExpertChoice,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(biases) = &self.down_biases else { return Ok(None) };
        let (weights, biases) =
            (self.weights_of_all(choice, x.dtype())?, converted(&biases.value, x.dtype())?);
        let y = empty(x.dim(0)?, biases.dim(1)?, x.dtype(), x.device())?;
        let (a, b) = (ColumnView::all(&weights), ColumnView::all(&biases));
        let added = residual.map_or(Addend::Nothing, Addend::Matrix);
        matmul(ColumnViewMut::all(&y), a, b, Transpose::Nn, 1.0, added)?;
        Ok(Some(y.into_tensor()))
    }

    /// Adds the gradient of the biases of the second projections, given that of the output, `dout:
    /// [N, D]`. Returns `dweights`, the gradient of the choice's weights, with the biases' part.
    fn through_biases(&self, choice: &ExpertChoice, dout: &Tensor, dweights: Tensor) -> Result<Tensor> {
        let Some(Param { value, grad }) = &self.down_biases else { return Ok(dweights) };
        let all = ColumnView::all(dout);
        if let Some(grad) = grad {
            let weights = self.weights_of_all(choice, dout.dtype())?;
            // Gradients in bf16 are of a single micro-batch: nothing is added to them.
            let added = Addend::destination_if(grad.dtype() == DType::F32);
            let weights = ColumnView::all(&weights);
            matmul(ColumnViewMut::all(grad), weights, all, Transpose::Tn, 1.0, added)?;
        }
        let biases = converted(value, dout.dtype())?;
        let by_expert = empty(dout.dim(0)?, self.mixer.count, DType::F32, dout.device())?;
        let biases = ColumnView::all(&biases);
        matmul(ColumnViewMut::all(&by_expert), all, biases, Transpose::Nt, 1.0, Addend::Nothing)?;
        Ok((dweights + by_expert.into_tensor().gather(&choice.ids, 1)?)?)
    }

    /// Returns the weight of each expert for each token, `[N, E]`: 0 if it is not chosen.
    fn weights_of_all(&self, choice: &ExpertChoice, dtype: DType) -> Result<Tensor> {
        let shape = (choice.ids.dim(0)?, self.mixer.count);
        let none = Tensor::zeros(shape, DType::F32, choice.weights.device())?;
        converted(&none.scatter(&choice.ids, &choice.weights, 1)?, dtype)
    }

    /// Makes zeros of the gradients of experts without rows that a micro-batch overwrites.
    fn clear_others(&self, rows: &ExpertRows) -> Result<()> {
        let mut used = vec![false; self.experts.len()];
        rows.of_experts().for_each(|rows| used[rows.expert] = true);
        let unused = self.experts.iter().zip(used).filter(|(_, used)| !used);
        unused.map(|(expert, _)| expert).try_for_each(|ExpertWeights { gate_up, down }| {
            gate_up.clear_overwritten_gradients()?;
            down.clear_overwritten_gradients()
        })
    }
}
