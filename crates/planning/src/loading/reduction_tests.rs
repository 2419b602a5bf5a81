//! Tests whole steps with reductions delayed as long as allowed: the engine may compute meanwhile,
//! but no more than that.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use candle_core::{DType, Device};

use super::{AdapterSetup, BaseModel, EngineOptions, Resolver, Trains};
use crate::collective::Collective;
use crate::collective::in_process::{InProcessWorld, run_ranks};
use crate::collective::late_reductions::{LateCall, LateReductions};
use crate::data::{Batch, IGNORE, Sample, Step};
use crate::engine::{SaveAssignment, Trainer, TrainerOptions};
use crate::error::Result;
use crate::locks::locked;
use crate::optim::{OptimizerOptions, Schedule};
use crate::parallel::{DeviceMesh, GradReduceOptions, ShardingStrategy, SharedFrozen};
use crate::recipe::enums::{Attention, ModelInit, Offload, Recompute, SchedulerKind};
use crate::recipe::{AdapterSection, DataSource, ModelSection, OptimizerSection};
use crate::report::{Terminal, Verbosity};
use crate::runtime::cpu_tensor::memory;
use crate::runtime::thread_pool;

const RANKS: usize = 2;

/// A model of five blocks with random weights.
fn base(tied: bool) -> BaseModel {
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
            "tie_word_embeddings": {tied}}}"#
    );
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let terminal = Terminal::stderr(Verbosity::Quiet);
    let resolver = Resolver::new(true, &terminal).unwrap();
    let id = Some(DataSource::Path(folder.path().into()));
    let model = ModelSection { id, init: ModelInit::Random, ..ModelSection::default() };
    BaseModel::open(&model, None, &resolver).unwrap()
}

fn trainer_options(recompute: Recompute) -> TrainerOptions {
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
        recompute,
        save_assignment: SaveAssignment::RoundRobin,
        has_graphs: false,
    }
}

/// Returns one sample of 12 tokens, different for each `salt`.
fn batch(salt: u32) -> Batch {
    let ids: Vec<u32> = (0..12).map(|i| (i * 31 + salt * 17) % 290 + 3).collect();
    let mut targets: Vec<u32> = ids[1..].to_vec();
    targets.push(IGNORE);
    let segments = vec![Sample { start: 0, len: 12, ..Sample::default() }];
    Batch { ids, targets, samples: segments, first_token: u64::from(salt) * 12, num_samples: 1 }
}

struct Case {
    strategy: ShardingStrategy,
    reduce_dtype: DType,
    offload: Offload,
    adapter: bool,
    tied: bool,
    recompute: Recompute,
    micro_batches: u32,
}

impl Case {
    /// Returns losses and norms of two steps in bits, then the bits of all values after them.
    fn train(&self, world: Arc<dyn Collective>) -> Result<Vec<u64>> {
        Ok(self.train_sharing(world, SharedFrozen::default())?.bits)
    }

    /// Trains with the frozen weights in `frozen`.
    fn train_sharing(&self, world: Arc<dyn Collective>, frozen: SharedFrozen) -> Result<Trained> {
        let base = base(self.tied);
        let section = AdapterSection { r: 4, ..AdapterSection::default() };
        let adapter_setup = AdapterSetup::from_recipe(&section, ("base", &base.config), &[])?;
        let options = EngineOptions {
            mesh: DeviceMesh::new(self.strategy, world)?,
            reducing: GradReduceOptions {
                accumulates: self.micro_batches as usize > RANKS,
                dtype: self.reduce_dtype,
                block_dtype: DType::F32,
            },
            offload: self.offload.into(),
            frozen,
            ..EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0)
        };
        let trains = if self.adapter { Trains::adapter_or_all(Some(&adapter_setup)) } else { Trains::All };
        let mut trainer = Trainer::new(base.engine(trains, &options)?, trainer_options(self.recompute))?;
        let mut bits = Vec::new();
        for step in 0..2 {
            let micro_batches = (0..self.micro_batches).map(|i| batch(10 * step + i)).collect();
            let done = trainer.step(&Step::new(micro_batches, 1.0))?;
            bits.extend([done.loss.to_bits(), done.grad_norm.to_bits()]);
        }
        for tensor in trainer.snapshot(false)? {
            bits.extend(tensor.values.to_f32().iter().map(|value| u64::from(value.to_bits())));
        }
        let (bucket, _) = trainer.engine.store.find("model.layers.1.mlp.up_proj.weight").unwrap();
        let weight = memory(bucket.own_value()?.tensor()?)?.address();
        Ok(Trained { bits, weight })
    }
}

/// The result of a rank.
struct Trained {
    bits: Vec<u64>,
    /// The address of a weight of the model.
    weight: usize,
}

#[test]
fn late_reductions_train_to_the_same_bits() {
    use ShardingStrategy::{Ddp, Fsdp, Hsdp, Zero1, Zero2};
    let case = |strategy| Case {
        strategy,
        reduce_dtype: DType::F32,
        offload: Offload::None,
        adapter: false,
        tied: false,
        recompute: Recompute::None,
        micro_batches: 4,
    };
    let cases = [
        Case { micro_batches: 2, ..case(Ddp) },
        case(Ddp),
        case(Zero1),
        Case { recompute: Recompute::Block, ..case(Zero2) },
        Case { recompute: Recompute::Block, tied: true, ..case(Fsdp) },
        Case { reduce_dtype: DType::BF16, ..case(Fsdp) },
        Case { offload: Offload::Params, ..case(Hsdp(1)) },
        Case { adapter: true, ..case(Fsdp) },
        Case { adapter: true, tied: true, reduce_dtype: DType::BF16, ..case(Zero2) },
    ];
    for case in cases {
        let run = |late: bool| {
            let ends = InProcessWorld::new(RANKS).communicators();
            let rank = |end: Arc<dyn Collective>| {
                if !late {
                    return case.train(end);
                }
                let late = LateReductions::new(end);
                let calls = late.calls();
                let trained = case.train(Arc::new(late));
                let step = |call: &LateCall| if matches!(call, LateCall::Started(..)) { 1 } else { -1 };
                let calls = locked(&calls);
                let now = calls.iter().map(step).scan(0, |now, step| {
                    *now += step;
                    Some(*now)
                });
                assert_eq!(now.max(), Some(2), "a segment's and the next one's");
                trained
            };
            run_ranks(ends, |end| thread_pool::in_own_pool(1, || rank(Arc::new(end)))).unwrap()
        };
        assert!(run(true) == run(false), "{:?}, tied {}", case.strategy, case.tied);
    }
}

#[test]
fn ranks_of_a_process_share_frozen_weights() {
    use ShardingStrategy::{Ddp, Fsdp};
    for (strategy, adapter, is_shared) in [(Ddp, true, true), (Ddp, false, false), (Fsdp, true, false)] {
        let case = Case {
            strategy,
            reduce_dtype: DType::F32,
            offload: Offload::None,
            adapter,
            tied: false,
            recompute: Recompute::None,
            micro_batches: 2,
        };
        let run = |frozen: SharedFrozen| {
            let ends = InProcessWorld::new(RANKS).communicators();
            let rank = |end| case.train_sharing(Arc::new(end), frozen.clone());
            run_ranks(ends, |end| thread_pool::in_own_pool(1, || rank(end))).unwrap()
        };
        let (apart, together) = (run(SharedFrozen::default()), run(SharedFrozen::new(RANKS)));
        let bits = |ranks: &[Trained]| ranks.iter().map(|rank| rank.bits.clone()).collect::<Vec<_>>();
        assert!(bits(&apart) == bits(&together), "{strategy:?}");
        assert_eq!(together[0].weight == together[1].weight, is_shared, "{strategy:?}, adapter {adapter}");
        assert_ne!(apart[0].weight, apart[1].weight);
    }
}
