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
use crate::planning::router_aux_loss::router_aux_loss;
use crate::runtime::device;
use crate::runtime::thread_pool::run_in_pool;

/// Returns the trainer of a rank of `plan` on its `device`, with weights loaded. `resumed` is the
/// checkpoint passed to [`Plan::resume`]. All ranks call it.
///
/// # Errors
/// Weights cannot be read or do not fit the model; a peer failed.
pub fn trainer(
    plan: &Plan,
    resumed: Option<&SavedCheckpoint>,
    world: Arc<dyn Collective>,
    device: &Device,
) -> Result<Trainer> {
    device::release_above(device, kept_by_pool(plan.memory.tensors()))?;
    let (ranks, device) = (DeviceMesh::new(plan.strategy, world)?, device.clone());
    let engine = EngineOptions { mesh: ranks, device, ..plan.engine.clone() };
    let (engine, initial) = run_in_pool(&Device::Cpu, || {
        plan.base.load(Trains::adapter_or_all(plan.adapter_setup.as_ref()), &engine)
    })?;
    plan.initial.get_or_init(|| Arc::new(initial));
    let options = TrainerOptions {
        optimizer: OptimizerOptions::from(&plan.recipe.optimizer),
        lora_plus_ratio: plan.recipe.optimizer.lora_plus_ratio,
        schedule: plan.schedule()?,
        max_grad_norm: Some(plan.recipe.train.max_grad_norm).filter(|max| *max > 0.0),
        router_aux_loss: router_aux_loss(&plan.recipe, &plan.base.config)?,
        neftune_alpha: plan.recipe.train.neftune_alpha,
        seed: plan.recipe.train.seed,
        recompute: plan.recompute,
        save_assignment: if plan.adapter_setup.is_some() {
            SaveAssignment::Rank0
        } else {
            SaveAssignment::RoundRobin
        },
        has_graphs: plan.recipe.train.cuda_graphs,
    };
    let objective = objectives::objective(&plan.recipe.objective);
    let mut trainer = Trainer::new(engine, options)?.with_objective(objective);
    if let Some(saved) = resumed {
        trainer.restore(saved)?;
    }
    Ok(trainer)
}

/// Returns the bytes that the memory pool of a GPU keeps for a plan of `planned` bytes: 5 % more,
/// and at least 512 MiB more, because the driver adds memory in large pieces. The rest is for
/// modules, libraries and communicators.
fn kept_by_pool(planned: u64) -> u64 {
    planned.saturating_add((planned / 20).max(512 << 20))
}

#[cfg(test)]
mod tests {
    use super::kept_by_pool;

    #[test]
    fn the_pool_keeps_512_mib_beside_a_small_plan() {
        let extra = |gib: u64| kept_by_pool(gib << 30) - (gib << 30);
        assert_eq!([0, 2, 10].map(extra), [512 << 20; 3]);
        assert_eq!(extra(40), 2 << 30);
        assert_eq!(kept_by_pool(u64::MAX), u64::MAX);
    }
}
