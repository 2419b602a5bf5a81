//! Training fixtures: constant options of a run, and a micro-batch.

use finetune::data::{Batch, IGNORE, Sample};
use finetune::engine::{SaveAssignment, TrainerOptions};
use finetune::optim::{OptimizerOptions, Schedule};
use finetune::recipe::OptimizerSection;
use finetune::recipe::enums::{Recompute, SchedulerKind};

/// Returns options with a constant learning rate, recomputed blocks and clipped gradients.
pub(crate) fn trainer_options() -> TrainerOptions {
    TrainerOptions {
        optimizer: OptimizerOptions::from(&OptimizerSection::default()),
        lora_plus_ratio: 1.0,
        schedule: Schedule {
            kind: SchedulerKind::Constant,
            learning_rate: 1e-3,
            warmup_steps: 0,
            total_steps: 10,
            min_lr_ratio: 0.0,
            num_cycles: 1.0,
            power: 1.0,
            num_decay_steps: 0,
        },
        max_grad_norm: Some(1.0),
        router_aux_loss: 0.0,
        neftune_alpha: 0.0,
        seed: 0,
        recompute: Recompute::Block,
        save_assignment: SaveAssignment::RoundRobin,
        has_graphs: false,
    }
}

/// Returns one sample of 24 tokens, another one for each `salt`.
pub(crate) fn batch(salt: u32) -> Batch {
    let ids: Vec<u32> = (0..24).map(|i| (i * 31 + salt * 17) % 300 + 3).collect();
    let mut targets: Vec<u32> = ids[1..].to_vec();
    targets.push(IGNORE);
    let segments = vec![Sample { start: 0, len: ids.len(), ..Sample::default() }];
    Batch { ids, targets, samples: segments, first_token: u64::from(salt) * 24, num_samples: 1 }
}
