//! Builds the trainers of a plan, one for each rank.

use std::sync::Arc;

use candle_core::Device;

use crate::checkpoint::SavedCheckpoint;
use crate::collective::Collective;
use crate::engine::{SaveAssignment, Trainer, TrainerOptions};
use crate::error::Result;
use crate::loading::EngineOptions;
use crate::loading::param_layout::Trains;
use crate::objectives;
use crate::optim::OptimizerOptions;
use crate::parallel::DeviceMesh;
use crate::planning::Plan;
use crate::runtime::device;
use crate::runtime::thread_pool::run_in_pool;

/// Returns the trainer of a rank of `plan` on its `device`, with weights loaded. `resumed` is the
/// checkpoint passed to [`Plan::resume`]. All ranks call it. The memory pool of a GPU keeps 5 %
/// more than the planned tensors, and 512 MiB more than a few of them, because the driver adds
/// memory in large pieces; the rest is for modules, libraries and communicators.
///
/// # Errors
/// Weights cannot be read or do not fit the model; a peer failed.
pub fn trainer(
    plan: &Plan,
    resumed: Option<&SavedCheckpoint>,
    world: Arc<dyn Collective>,
    device: &Device,
) -> Result<Trainer> {
    let planned = plan.memory.tensors();
    device::release_above(device, planned.saturating_add((planned / 20).max(512 << 20)))?;
    let (ranks, device) = (DeviceMesh::new(plan.strategy, world)?, device.clone());
    let engine = EngineOptions { ranks, device, ..plan.engine.clone() };
    let (engine, initial) = run_in_pool(&Device::Cpu, || {
        plan.base.load(Trains::adapter_or_all(plan.adapter_setup.as_ref()), &engine)
    })?;
    plan.initial.get_or_init(|| Arc::new(initial));
    let options = TrainerOptions {
        optimizer: OptimizerOptions::from(&plan.recipe.optimizer),
        lora_plus_ratio: plan.recipe.optimizer.lora_plus_ratio,
        schedule: plan.schedule()?,
        max_grad_norm: Some(plan.recipe.train.max_grad_norm).filter(|max| *max > 0.0),
        seed: plan.recipe.train.seed,
        recompute: plan.recompute,
        save_assignment: if plan.adapter_setup.is_some() {
            SaveAssignment::Rank0
        } else {
            SaveAssignment::RoundRobin
        },
    };
    let objective = objectives::objective(&plan.recipe.objective);
    let mut trainer = Trainer::new(engine, options)?.with_objective(objective);
    if let Some(saved) = resumed {
        trainer.restore(saved)?;
    }
    Ok(trainer)
}
