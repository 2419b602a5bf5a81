//! Forward and backward of a stage: a range of blocks, with or without the embedding before and the
//! head behind them.
//!
//! A whole model is one stage, and a micro-step is its forward and its backward. A pipeline gives
//! each rank another stage: hidden states go to the next stage, and their gradient comes back.

use std::ops::Range;

use candle_core::Tensor;

use super::{BatchLayout, Engine, MicroStep, segment};
use crate::collective::Phase;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::model::{
    self, BlockContext, BlockSaved, BlockWeights, Carried, CarriedBackward, CarriedGradients, ModelConfig,
    Segment,
};
use crate::objectives::{ExpertLoad, LossSums, ObjectiveInput, ObjectiveOutput};
use crate::ops::BlockPass;
use crate::profile::op_table::RECOMPUTE;
use crate::recipe::enums::BlockStorage;
use crate::report::memory;
use crate::runtime::device;
use crate::runtime::rng::RngStream;
use crate::runtime::trace::{self, ReleaseSpan, span};

/// A contiguous range of a model's segments that one rank computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Indices of the stage's blocks.
    pub blocks: Range<usize>,
    /// True if the stage begins with the embedding; else it takes hidden states.
    pub has_embedding: bool,
    /// True if the stage ends with the head and the loss; else it returns hidden states.
    pub has_head: bool,
}

impl Stage {
    /// Returns a stage with all segments of a model.
    pub fn whole(config: &ModelConfig) -> Self {
        Stage { blocks: 0..config.num_layers(), has_embedding: true, has_head: true }
    }

    /// Returns the block that forward computes after `layer`.
    fn after(&self, layer: usize) -> Option<usize> {
        Some(layer + 1).filter(|next| self.blocks.contains(next))
    }

    /// Returns the block whose weights are used after the backward of `layer`: the one before it,
    /// or the first of those that are recomputed for its backward. `earlier` are the blocks before
    /// `layer`.
    fn before(&self, layer: usize, earlier: &[Checkpointed]) -> Option<usize> {
        let recomputed = earlier.iter().rev().take_while(|block| matches!(block, Checkpointed::Nothing));
        layer.checked_sub(1 + recomputed.count()).filter(|next| self.blocks.contains(next))
    }
}

/// Everything that goes from a stage to the next one.
#[derive(Debug)]
pub struct StageInput {
    /// Hidden states after the last block of the stage before, `[N, D]`.
    pub hidden: Tensor,
    /// The state beside them.
    pub carried: Carried,
}

/// The gradients of a [`StageInput`], which go back to the stage before.
#[derive(Debug)]
pub struct StageGradients {
    /// That of the hidden states, `[N, D]`.
    pub hidden: Tensor,
    /// Those of the state beside them.
    pub carried: CarriedGradients,
}

/// The result of a stage's forward.
#[derive(Debug)]
pub enum StageOutput {
    /// The hidden states and the state beside them, for the next stage.
    Hidden(StageInput),
    /// The loss of a stage with the head.
    Loss(LossSums),
}

/// Everything that a stage's forward keeps for its backward.
#[derive(Debug)]
pub struct ForwardState {
    layout: BatchLayout,
    blocks: Vec<Checkpointed>,
    /// The state beside the hidden states, after the last block.
    carried: Carried,
    /// The gradient of the last hidden states, `[N, D]`, if the stage has the head: a head computes
    /// its backward with its forward.
    dx: Option<Tensor>,
    /// The load of the stage's experts.
    pub(super) experts: ExpertLoad,
}

/// The part of a block that its backward starts from.
#[derive(Debug)]
enum Checkpointed {
    Saved(Box<BlockSaved>),
    Input(Tensor),
    /// Its input comes from recomputing earlier blocks.
    Nothing,
}

impl Engine {
    /// Computes a stage of a micro-batch. `input` is the output of the stage before; `None` for a
    /// stage with the embedding.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed; `input` is missing.
    pub fn forward(
        &self,
        stage: &Stage,
        batch: &Batch,
        input: Option<StageInput>,
        step: MicroStep<'_>,
    ) -> Result<(StageOutput, ForwardState)> {
        let (config, store) = (&self.config, &self.store);
        let world = store.mesh().world();
        let layout = self.layout(batch)?;
        let context = self.context(&layout, step);
        let mut experts = ExpertLoad::default();
        world.enter(Phase::Forward)?;
        let (mut x, mut carried) = if stage.has_embedding {
            let _span = span(|| segment("forward", "embedding", 0));
            let (x, carried) = store.embed()?.forward(config, &batch.ids, context.adapter)?;
            let noisy = step.noise.map(|noise| noise.added(&x, batch)).transpose()?;
            (noisy.unwrap_or(x), carried)
        } else {
            let missing = || Error::internal("a stage without embedding got no hidden states");
            input.map(|input| (input.hidden, input.carried)).ok_or_else(missing)?
        };
        let stored = step.recompute.stored(stage.blocks.len(), stage.has_head);
        let mut blocks = Vec::with_capacity(stage.blocks.len());
        for layer in stage.blocks.clone() {
            let _span = span(|| segment("forward", "block", layer));
            let mut release = ReleaseSpan::default();
            let weights = store.block(layer, stage.after(layer))?;
            let forward = || model::forward(config, layer, &weights, &x, &context, &mut carried, None);
            let (y, mut saved) = step.in_graph((self, layer, BlockPass::Forward), &weights, forward)?;
            self.trace_memory();
            if let Some(loads) = saved.expert_loads() {
                experts.add_layer(&loads, batch.len());
            }
            let storage = stored.of(blocks.len());
            if storage == BlockStorage::Products {
                saved.drop_attended();
            }
            blocks.push(match storage {
                BlockStorage::Results | BlockStorage::Products => Checkpointed::Saved(Box::new(saved)),
                BlockStorage::Input => Checkpointed::Input(x),
                BlockStorage::Nothing => Checkpointed::Nothing,
            });
            x = y;
            release.begin();
        }
        if !stage.has_head {
            let output = StageInput { hidden: x, carried: carried.clone() };
            let state = ForwardState { layout, blocks, carried, dx: None, experts };
            return Ok((StageOutput::Hidden(output), state));
        }
        let source = context.source(config.num_layers());
        let (sums, dx) = self.loss(stage, batch, x, source, step)?;
        Ok((StageOutput::Loss(sums), ForwardState { layout, blocks, carried, dx: Some(dx), experts }))
    }

    /// Returns the loss of the last hidden states and their gradient, `[N, D]`. Reduces the head's
    /// own gradients.
    fn loss(
        &self,
        stage: &Stage,
        batch: &Batch,
        x: Tensor,
        dropout: Option<(RngStream, u64)>,
        step: MicroStep<'_>,
    ) -> Result<(LossSums, Tensor)> {
        let (config, store) = (&self.config, &self.store);
        store.mesh().world().enter(Phase::Loss)?;
        let head = store.head_and_gradients(stage.blocks.clone().next_back())?;
        let MicroStep { scale, totals, reference, .. } = step;
        let input = ObjectiveInput { config, hidden: &x, batch, scale, totals, reference, dropout };
        let ObjectiveOutput { loss, dx, metrics } = step.objective.loss_and_grad(&head, input)?;
        trace::release((x, head));
        store.reduce(Segment::Head, step.last)?;
        Ok((LossSums { loss, metrics, experts: ExpertLoad::default() }, dx))
    }

    /// Computes the gradients of a stage and adds them to the store. `behind` are the gradients of
    /// the stage's output, from the stage behind; `None` for a stage with the head. Returns those
    /// of the stage's input if the stage before needs them.
    ///
    /// # Errors
    /// A tensor operation failed; a peer failed; `behind` is missing.
    pub fn backward(
        &self,
        stage: &Stage,
        batch: &Batch,
        mut state: ForwardState,
        behind: Option<StageGradients>,
        step: MicroStep<'_>,
    ) -> Result<Option<StageGradients>> {
        let (config, store) = (&self.config, &self.store);
        let context = self.context(&state.layout, step);
        let first = |hidden| StageGradients {
            hidden,
            carried: CarriedGradients::new(store.per_layer_inputs_train()),
        };
        let behind = state.dx.take().map(first).or(behind);
        let StageGradients { hidden: mut dx, carried: mut gradients } =
            behind.ok_or_else(|| Error::internal("a stage without head got no gradient"))?;
        store.mesh().world().enter(Phase::Backward)?;
        for layer in stage.blocks.clone().rev() {
            let _span = span(|| segment("backward", "block", layer));
            let mut release = ReleaseSpan::default();
            let Some(block_state) = state.blocks.pop() else { break };
            let block_state = match block_state {
                Checkpointed::Nothing => {
                    let input =
                        self.recompute_before(layer, &mut state.blocks, step, (&context, &state.carried));
                    Checkpointed::Input(input?)
                }
                other => other,
            };
            let weights = store.block(layer, stage.before(layer, &state.blocks))?;
            let panels = match &block_state {
                Checkpointed::Input(x) => weights.with_panels(x)?,
                Checkpointed::Saved(_) | Checkpointed::Nothing => None,
            };
            let block = panels.as_ref().unwrap_or(&weights);
            let saved = self.saved((layer, step), block_state, block, (&context, &state.carried))?;
            store.prepare_backward(Segment::Block(layer))?;
            let need_dx = layer > 0 || store.embedding_trains();
            let mut beside = CarriedBackward { carried: &state.carried, gradients: &mut gradients };
            let backward =
                || model::backward(config, layer, block, &saved, (&dx, need_dx), &context, &mut beside);
            let gradient = step.in_graph((self, layer, BlockPass::Backward), block, backward)?;
            drop((panels, weights));
            self.trace_memory();
            store.reduce(Segment::Block(layer), step.last)?;
            release.begin();
            match gradient {
                Some(gradient) => dx = gradient,
                None => return Ok(None),
            }
        }
        if !stage.has_embedding {
            return Ok(Some(StageGradients { hidden: dx, carried: gradients }));
        }
        let _span = span(|| segment("backward", "embedding", 0));
        store.embed_gradients()?.backward(config, &batch.ids, &dx, gradients.into_rows().as_ref())?;
        store.reduce(Segment::Embed, step.last)?;
        Ok(None)
    }

    /// Returns the tensors that a block's backward needs, recomputed if forward kept only the
    /// block's input.
    fn saved(
        &self,
        (layer, step): (usize, MicroStep<'_>),
        checkpointed: Checkpointed,
        weights: &BlockWeights,
        (context, carried): (&BlockContext<'_>, &Carried),
    ) -> Result<Box<BlockSaved>> {
        match checkpointed {
            Checkpointed::Saved(saved) => Ok(saved),
            Checkpointed::Nothing => Err(Error::internal("a block without input was not recomputed")),
            Checkpointed::Input(x) => {
                let _span = span(|| segment(RECOMPUTE, "block", layer));
                let recompute = || model::recompute(&self.config, layer, weights, &x, context, carried);
                Ok(Box::new(step.in_graph((self, layer, BlockPass::Recompute), weights, recompute)?))
            }
        }
    }

    /// Computes the blocks before `layer` again from the last input that was kept, and keeps the
    /// tensors that their backward needs. `earlier` are the blocks of the stage before `layer`.
    /// Returns the input of `layer`.
    fn recompute_before(
        &self,
        layer: usize,
        earlier: &mut [Checkpointed],
        step: MicroStep<'_>,
        (context, carried): (&BlockContext<'_>, &Carried),
    ) -> Result<Tensor> {
        let missing = || Error::internal("no input of a block is kept");
        let is_input = |block: &Checkpointed| matches!(block, Checkpointed::Input(_));
        let start = earlier.iter().rposition(is_input).ok_or_else(missing)?;
        let group = &mut earlier[start..];
        let first = layer - group.len();
        let Some(Checkpointed::Input(input)) = group.first() else { return Err(missing()) };
        let mut x = input.clone();
        for (block, stored) in (first..).zip(group) {
            let _span = span(|| segment(RECOMPUTE, "block", block));
            let mut release = ReleaseSpan::default();
            let weights = self.store.block(block, Some(block + 1))?;
            let again = || model::forward_again(&self.config, block, &weights, &x, context, carried);
            let (y, saved) = step.in_graph((self, block, BlockPass::Recompute), &weights, again)?;
            self.trace_memory();
            *stored = Checkpointed::Saved(Box::new(saved));
            x = y;
            release.begin();
        }
        Ok(x)
    }

    /// Records the memory in use in a trace: that of the device, or of the process on a CPU.
    fn trace_memory(&self) {
        if self.device.is_cpu() {
            trace::value("process memory", memory::current_bytes);
        } else {
            trace::value("device memory", || device::used_bytes(&self.device));
        }
    }
}
