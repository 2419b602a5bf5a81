//! The splits of a run's own method: passes the memory and compute of its step on one device to
//! [`splits`].

use candle_core::DType;

use super::splits::{self, ParallelSplit, RefusedSplit, SplitWork, splits};
use super::step_time::{dequantized_bytes, launches, token_secs, update};
use super::{SizingRequest, kept_bytes};
use crate::error::Result;
use crate::planning::carried::carried_bytes;
use crate::planning::{KeptGroup, MASTERS, MemoryParts, PlannedStep, widest_micro_batch};
use crate::recipe::Strategy;

impl SizingRequest<'_> {
    /// Returns every split of the hardware's devices, and the refused numbers; empty for one device
    /// or without times.
    pub(super) fn splits(
        &self,
        step: &PlannedStep,
        parts: &MemoryParts,
        budget: Option<u64>,
    ) -> Result<(Vec<ParallelSplit>, Vec<RefusedSplit>)> {
        let Some((hardware, rates)) = self.timed else { return Ok(Default::default()) };
        if hardware.devices() == 1 {
            return Ok(Default::default());
        }
        let load = self.workload(self.recipe);
        let config = &self.inputs.base.config;
        let flops = self.flops(self.recipe, step, load.row);
        let is_master = |group: &&KeptGroup| group.what.starts_with(MASTERS);
        let masters: u64 = parts.weights.iter().filter(is_master).map(|group| group.bytes).sum();
        let gradients: u64 = parts.gradients.iter().map(|group| group.bytes).sum();
        let optimizer: u64 = parts.optimizer.iter().map(|group| group.bytes).sum();
        let (updating, update_copies) = update(self.recipe, step, (hardware, rates), 1.0);
        let updated = launches(config, step, (hardware, 0.0));
        let work = SplitWork {
            config,
            values: (kept_bytes(parts) - masters - gradients - optimizer) as f64,
            gradients: gradients as f64,
            states: (masters + optimizer) as f64,
            token_secs: token_secs(config, &flops, rates),
            attention_secs: flops.attention / rates.attention,
            dequantize_secs: self.dequantizing_passes(self.recipe, step) * dequantized_bytes(&step.descs)
                / rates.update,
            launch_secs: launches(config, step, (hardware, 1.0)) - updated,
            update_secs: updating + update_copies,
            row: load.row,
            tokens: load.tokens * load.micro_batches as f64 * self.world.all as f64,
            activation_bytes: step.fit.memory.activations as f64
                / widest_micro_batch(self.recipe, self.inputs.rows) as f64,
            carried_bytes: carried_bytes(config, &step.descs, 1, DType::BF16) as f64,
            budget: budget.unwrap_or(u64::MAX).saturating_sub(step.fit.memory.nccl),
        };
        let (mut all, refused) = splits(&work, hardware);
        for split in &mut all {
            if split.runs {
                self.plan_split(split)?;
            } else {
                // Splits that the engine runs include process and NCCL in their plan; `fits` was
                // computed without them.
                split.bytes += step.fit.memory.process + step.fit.memory.nccl;
            }
        }
        splits::sort(&mut all);
        Ok((all, refused))
    }

    /// Sets memory and time of a split that the engine runs to those of its plan.
    fn plan_split(&self, split: &mut ParallelSplit) -> Result<()> {
        let mut recipe = self.recipe.clone();
        (recipe.parallel.strategy, recipe.parallel.shard_size) = match split.shard {
            1 => (Strategy::Ddp, None),
            all if all == self.world.all => (Strategy::Fsdp, None),
            group => (Strategy::Hsdp, Some(group)),
        };
        let step = self.step_of_named(&recipe)?;
        split.bytes = step.fit.memory.total();
        split.fits = self.has_room(&step.fit.memory);
        split.step_secs = self.time(&recipe, &step).map_or(split.step_secs, |time| time.total);
        Ok(())
    }
}
