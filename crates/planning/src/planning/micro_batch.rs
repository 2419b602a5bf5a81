//! Decides `train.micro_batch_size = "auto"`: the number of micro-batches for the rows of a step.
//!
//! The rows of a step are fixed: `gradient_accumulation_steps` on each rank. Every split gives the
//! same loss and gradients, so the memory of a machine does not affect the result. finetune picks
//! the largest micro-batch whose step fits, without recomputing if single rows need none. It does
//! not exceed [`USEFUL_TOKENS`]: beyond them, products gain no speed.

use super::fit::{ParallelDecision, StepInputs, widest_micro_batch};
use super::parallel::WorldSize;
use crate::error::Result;
use crate::recipe::{AutoOr, Recipe, Recompute};

/// Tokens of a micro-batch above which a larger one is no faster, on a processor and on a GPU. A
/// product reads a weight once for all tokens: with 2,048, a processor does 2,000 multiplications
/// for each value read. A GPU of 132 multiprocessors has a tile of 128 rows for each of them at
/// 16,384.
const USEFUL_TOKENS: [usize; 2] = [2048, 16_384];

impl StepInputs<'_> {
    /// Splits the rows of a step of `recipe` into micro-batches, if the recipe leaves that open.
    ///
    /// # Errors
    /// Those of `StepInputs::decide`.
    pub fn split_rows(&self, recipe: &mut Recipe, world: WorldSize) -> Result<()> {
        if recipe.train.micro_batch_size != AutoOr::Auto {
            return Ok(());
        }
        let rows = recipe.train.accumulation();
        let of = |size: usize| {
            let mut split = recipe.clone();
            split.train.micro_batch_size = AutoOr::Fixed(size);
            split.train.gradient_accumulation_steps = AutoOr::Fixed(rows / size);
            split
        };
        let useful = USEFUL_TOKENS[usize::from(!self.engine.traits.is_cpu)];
        let single = self.fit(&of(1), world)?;
        let budget = self.budget(world.all);
        let fits = |fit: &ParallelDecision| {
            budget.is_none_or(|bytes| fit.memory.required() - fit.memory.process <= bytes)
        };
        let mut best = of(1);
        for size in (2..=rows).filter(|size| rows.is_multiple_of(*size)) {
            let split = of(size);
            if widest_micro_batch(&split, self.row_lengths) > useful {
                break;
            }
            let Some(fit) = self.fit(&split, world)? else { break };
            let alike = |one: &ParallelDecision| {
                one.strategy == fit.strategy && amount(one.recompute) == amount(fit.recompute)
            };
            let same = single.as_ref().is_some_and(alike);
            if !same || !fits(&fit) {
                break;
            }
            best = split;
        }
        *recipe = best;
        Ok(())
    }
}

/// Returns the passes over blocks that backward recomputes: none, one, or runs of blocks.
fn amount(recompute: Recompute) -> u8 {
    match recompute {
        Recompute::None => 0,
        Recompute::Selective | Recompute::First(_) | Recompute::Block => 1,
        Recompute::Every(_) | Recompute::EverySqrt => 2,
    }
}
