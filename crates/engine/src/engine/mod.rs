//! The pass over a model's segments for training, evaluation and generation, the same for every
//! strategy.
//!
//! Invariants, checked by tests:
//! - Every recompute choice and every split of a batch into micro-batches gives the same loss and
//!   gradients.
//! - Forward keeps a block's full [`BlockSaved`](model::BlockSaved) for backward, or under
//!   recompute only its input.
//! - Dropout is keyed by (seed, step, layer, index of the token in the global batch).
//! - The loss is an [`Objective`]: a sum, divided once by its denominator, by default the step's
//!   number of targets.
//! - No update happens when the loss or the gradient norm is not finite.

mod best_weights;
mod compare;
mod divergence;
mod embedding_noise;
mod evaluate;
mod generate;
mod nan_policy;
mod reference;
mod run_watch;
mod sampling;
mod save_schedule;
mod stage;
mod state;
mod stop_text;
mod train_loop;
mod trainer;
mod trainer_reference;
mod utilization;

use candle_core::{Device, Tensor};

pub use compare::Comparison;
pub use embedding_noise::EmbeddingNoise;
pub use nan_policy::NanPolicy;
pub use reference::{Reference, ReferenceLogProbs};
pub use sampling::{NextToken, SamplingOptions, TokenSampler};
pub use stage::{ForwardState, Stage, StageGradients, StageInput, StageOutput};
pub use stop_text::StopSearch;
pub use train_loop::{Progress, Reporter, RunOptions, RunSummary, TrainLoop};
pub use trainer::{SaveAssignment, StepResult, Trainer, TrainerOptions};
pub use utilization::PeakFlops;

use crate::data::Batch;
use crate::error::{Error, Result};
use crate::model::PositionTable;
use crate::model::{
    self, AdapterSwitch, BlockContext, BlockWeights, DropoutContext, ExpertBalance, ModelConfig, RotaryTables,
};
pub use crate::objectives::Evaluation;
use crate::objectives::{LossSums, Objective, StepTotals};
use crate::ops::attention::Span;
use crate::ops::cross_entropy::TokenScore;
use crate::ops::{BlockGraphs, BlockPass};
use crate::parallel::ParamStore;
use crate::recipe::enums::{Attention, Recompute};
use crate::runtime::trace::{SpanInfo, SpanKind};

/// A model and the store that holds its (possibly sharded) parameters.
#[derive(Debug)]
pub struct Engine {
    /// The shape of the model.
    pub config: ModelConfig,
    /// The model's parameters, whole or sharded.
    pub store: ParamStore,
    /// Flash or eager attention.
    pub attention: Attention,
    /// The device of activations.
    pub device: Device,
    /// The angles of the model's ropes, up to the longest sequence so far.
    pub tables: RotaryTables,
}

/// Options of the computation of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct MicroStep<'a> {
    /// The loss to minimize.
    pub objective: &'a dyn Objective,
    /// Factor of the loss before its gradient: one over the step's denominator.
    pub scale: f64,
    /// Counts of the whole step.
    pub totals: StepTotals,
    /// The log-probability of each sample under the objective's reference, if it has one.
    pub reference: Option<&'a [f64]>,
    /// The activations that forward keeps for backward (gradient checkpointing).
    pub recompute: Recompute,
    /// Keys of dropout; `None` disables dropout.
    pub dropout: Option<DropoutContext>,
    /// Noise on the embeddings; `None` for none.
    pub noise: Option<EmbeddingNoise>,
    /// The loss that balances the load of experts; `None` without it.
    pub balance: Option<&'a ExpertBalance>,
    /// True for the rank's last micro-batch of a step: reductions that wait for it start.
    pub last: bool,
    /// The graphs of the blocks, if their launches are requested together.
    pub graphs: Option<&'a BlockGraphs>,
}

impl MicroStep<'_> {
    /// Computes `work`, a pass over block `layer` with these weights: by the block's graph, if the
    /// block launches alone.
    fn in_graph<R>(
        &self,
        (engine, layer, pass): (&Engine, usize, BlockPass),
        weights: &BlockWeights,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        match self.graphs.filter(|_| weights.launches_alone(&engine.config, layer)) {
            Some(graphs) => graphs.run(&engine.device, layer, pass, work),
            None => work(),
        }
    }
}

/// The sequences of a micro-batch and their rotary tables.
#[derive(Debug)]
struct BatchLayout {
    spans: Vec<Span>,
    tables: Vec<PositionTable>,
}

/// Returns the trace span of a part of the model.
fn segment(pass: &'static str, what: &'static str, index: usize) -> SpanInfo {
    SpanInfo::new(SpanKind::Segment, pass).detail(what).index(index)
}

impl Engine {
    fn layout(&self, batch: &Batch) -> Result<BatchLayout> {
        self.store.mesh().world().expect_tokens(batch.targets.len());
        self.layout_of(batch.samples.iter().map(|s| Span::sequence(s.start, s.len)).collect())
    }

    fn layout_of(&self, spans: Vec<Span>) -> Result<BatchLayout> {
        let tables = self.tables.of_spans(&self.config.ropes, &spans)?;
        Ok(BatchLayout { spans, tables })
    }

    fn context<'a>(&self, layout: &'a BatchLayout, step: MicroStep<'a>) -> BlockContext<'a> {
        BlockContext {
            dropout: step.dropout,
            balance: step.balance,
            ..self.evaluation_context(layout, AdapterSwitch::On)
        }
    }

    /// Returns the context of a forward without a backward.
    fn evaluation_context<'a>(&self, layout: &'a BatchLayout, adapter: AdapterSwitch) -> BlockContext<'a> {
        BlockContext {
            spans: &layout.spans,
            tables: &layout.tables,
            attention: self.attention,
            adapter,
            dropout: None,
            balance: None,
        }
    }

    /// Returns the hidden states after the last block: `[N, D]`, in the dtype of activations.
    ///
    /// # Errors
    /// The adapter is off and the weights below it are not those of the base; a tensor operation
    /// failed; a peer failed.
    pub fn hidden(&self, batch: &Batch, adapter: AdapterSwitch) -> Result<Tensor> {
        self.hidden_by_layer(batch, adapter, |_, _| Ok(()))
    }

    /// Computes [`Engine::hidden`], and shows `see` each layer and its output.
    fn hidden_by_layer(
        &self,
        batch: &Batch,
        adapter: AdapterSwitch,
        mut see: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        self.check_switch(adapter)?;
        let layout = self.layout(batch)?;
        let context = self.evaluation_context(&layout, adapter);
        let (mut x, mut carried) = self.store.embed()?.forward(&self.config, &batch.ids, adapter)?;
        for layer in 0..self.config.num_layers() {
            let weights = self.store.block(layer, self.after(layer))?;
            (x, _) = model::forward(&self.config, layer, &weights, &x, &context, &mut carried, None)?;
            see(layer, &x)?;
        }
        Ok(x)
    }

    /// Returns whether the model without its adapter is the base: false if the adapter replaces
    /// weights of the base.
    pub fn has_base(&self) -> bool {
        self.store.base_change().is_none()
    }

    /// Checks that the model without its adapter is the base.
    fn check_switch(&self, adapter: AdapterSwitch) -> Result<()> {
        match self.store.base_change().filter(|_| adapter == AdapterSwitch::Off) {
            None => Ok(()),
            Some(change) => Err(Error::user("cannot compute the base model by switching the adapter off")
                .because(change)
                .hint("load the base model by itself")),
        }
    }

    /// Returns the block that comes after `layer` in forward.
    fn after(&self, layer: usize) -> Option<usize> {
        Some(layer + 1).filter(|next| *next < self.config.num_layers())
    }

    /// Returns the logits of every position: `[N, V]` f32.
    ///
    /// # Errors
    /// Those of [`Engine::hidden`].
    pub fn logits(&self, batch: &Batch, adapter: AdapterSwitch) -> Result<Tensor> {
        let hidden = self.hidden(batch, adapter)?;
        self.store.head()?.logits(&self.config, &hidden, adapter)
    }

    /// Returns the loss and hit of every position with a target, in order.
    ///
    /// # Errors
    /// Those of [`Engine::hidden`].
    pub fn score(&self, batch: &Batch, adapter: AdapterSwitch) -> Result<Vec<TokenScore>> {
        let hidden = self.hidden(batch, adapter)?;
        self.store.head()?.score(&self.config, &hidden, &batch.targets, adapter, None)
    }

    /// Computes forward and backward of one micro-batch. Returns the summed loss and the
    /// objective's metrics, and adds the gradients of `loss · scale` to the store.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed.
    pub fn micro_step(&self, batch: &Batch, step: MicroStep<'_>) -> Result<LossSums> {
        let stage = Stage::whole(&self.config);
        let (output, state) = self.forward(&stage, batch, None, step)?;
        let StageOutput::Loss(mut sums) = output else {
            return Err(Error::internal("a whole model computed no loss"));
        };
        sums.experts = state.experts.clone();
        self.backward(&stage, batch, state, None, step)?;
        sums.experts.balance = step.balance.map_or(0.0, ExpertBalance::take);
        if step.last {
            self.store.finish_reductions()?;
        }
        Ok(sums)
    }
}
