//! The walk over the segments: training steps, evaluation, generation. Written once for every strategy.
//!
//! Invariants, held by tests:
//! - Every recompute choice and every split of a batch into micro-batches gives the same loss and gradients.
//! - What is kept for backward is a block's full [`BlockSaved`], or under recompute its input alone.
//! - Dropout is keyed by (seed, step, layer, index of the token in the global batch).
//! - The loss is summed, then divided once by the step's number of targets.
//! - No update happens when the loss or the gradient norm is not finite.

mod compare;
mod evaluate;
mod generate;
mod run;
mod trainer;

use candle_core::{Device, Tensor};

pub use compare::Comparison;
pub use evaluate::Evaluation;
pub use generate::Sampling;
pub use run::{Moment, Reporter, Run, RunOptions, RunSummary};
pub use trainer::{Recompute, StepResult, Trainer, TrainerOptions};

use crate::data::Batch;
use crate::error::Result;
use crate::model::{self, BlockSaved, Context, DropoutContext, ModelConfig};
use crate::ops::attention::{Algorithm, Span};
use crate::ops::rotary::RotaryTable;
use crate::strategy::Single;

/// A model whose weights are somewhere, ready to compute.
#[derive(Debug)]
pub struct Engine {
    /// Its shape.
    pub config: ModelConfig,
    /// Its weights.
    pub strategy: Single,
    /// Flash or eager attention.
    pub algorithm: Algorithm,
    /// Where activations live.
    pub device: Device,
}

/// What a block leaves for its backward.
enum Kept {
    All(Box<BlockSaved>),
    Input(Tensor),
}

/// The sequences of a micro-batch and their rotary tables.
struct Layout {
    spans: Vec<Span>,
    tables: Vec<RotaryTable>,
}

impl Engine {
    fn layout(&self, batch: &Batch) -> Result<Layout> {
        let spans: Vec<Span> = batch.segments.iter().map(|s| Span::sequence(s.start, s.len)).collect();
        let tables =
            self.config.ropes.iter().map(|rope| rope.table(&spans, &self.device)).collect::<Result<_>>()?;
        Ok(Layout { spans, tables })
    }

    fn context<'a>(&self, layout: &'a Layout, dropout: Option<DropoutContext>) -> Context<'a> {
        Context { spans: &layout.spans, tables: &layout.tables, algorithm: self.algorithm, dropout }
    }

    /// The hidden states after the last block: `[N, D]`.
    pub fn hidden(&self, batch: &Batch) -> Result<Tensor> {
        let layout = self.layout(batch)?;
        let context = self.context(&layout, None);
        let mut x = self.strategy.embed().forward(&self.config, &batch.ids)?;
        for layer in 0..self.config.num_layers() {
            (x, _) = model::forward(&self.config, layer, self.strategy.block(layer), &x, &context, None)?;
        }
        Ok(x)
    }

    /// f32 logits of every position: `[N, V]`.
    pub fn logits(&self, batch: &Batch) -> Result<Tensor> {
        self.strategy.head().logits(&self.config, &self.hidden(batch)?)
    }

    /// Forward and backward of one micro-batch: returns the summed loss, adds up the gradients of `loss · scale`.
    pub fn micro_step(
        &self,
        batch: &Batch,
        scale: f64,
        recompute: Recompute,
        dropout: Option<DropoutContext>,
    ) -> Result<f64> {
        let (config, strategy) = (&self.config, &self.strategy);
        let layout = self.layout(batch)?;
        let context = self.context(&layout, dropout);
        let mut x = strategy.embed().forward(config, &batch.ids)?;
        let mut kept = Vec::with_capacity(config.num_layers());
        for layer in 0..config.num_layers() {
            let (y, saved) = model::forward(config, layer, strategy.block(layer), &x, &context, None)?;
            kept.push(match recompute {
                Recompute::None => Kept::All(Box::new(saved)),
                Recompute::Block => Kept::Input(x),
            });
            x = y;
        }
        let source = context.source(config.num_layers());
        let (loss, mut dx) = strategy.head().loss_and_grad(config, &x, &batch.targets, scale, source)?;
        drop(x);
        for layer in (0..config.num_layers()).rev() {
            let weights = strategy.block(layer);
            let saved = match kept.pop() {
                Some(Kept::All(saved)) => saved,
                Some(Kept::Input(x)) => {
                    Box::new(model::forward(config, layer, weights, &x, &context, None)?.1)
                }
                None => break,
            };
            let need_dx = layer > 0 || strategy.embedding_trains();
            match model::backward(config, layer, weights, &saved, &dx, &context, need_dx)? {
                Some(gradient) => dx = gradient,
                None => return Ok(loss),
            }
        }
        strategy.embed().backward(config, &batch.ids, &dx)?;
        Ok(loss)
    }

    /// The first place where a micro-batch turns up a NaN or an infinity: a weight, a gradient, a block's output.
    pub fn first_non_finite(&self, batches: &[Batch]) -> Result<String> {
        if let Some(found) = self.strategy.first_non_finite()? {
            return Ok(found);
        }
        for (i, batch) in batches.iter().enumerate() {
            let layout = self.layout(batch)?;
            let context = self.context(&layout, None);
            let mut x = self.strategy.embed().forward(&self.config, &batch.ids)?;
            for layer in 0..self.config.num_layers() {
                (x, _) = model::forward(&self.config, layer, self.strategy.block(layer), &x, &context, None)?;
                let flat = x.flatten_all()?.to_dtype(candle_core::DType::F32)?;
                if flat.to_vec1::<f32>()?.iter().any(|v| !v.is_finite()) {
                    return Ok(format!("the output of model.layers.{layer} on micro-batch {}", i + 1));
                }
            }
        }
        Ok("the output of lm_head".into())
    }
}
