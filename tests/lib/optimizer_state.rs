//! Optimizers known to this module only go through steps, saving, loading, sharding and planning:
//! they declare their state tensors as a list.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::logits;
use candle_core::{DType, Device};
use finetune::checkpoint::{
    self, Retention, SaveThreads, SavedValues, Saver, SaverOptions, SnapshotPart, SnapshotTensor,
    TrainingState, WriteWeights,
};
use finetune::collective::{Collective, in_process};
use finetune::data::{Batch, IGNORE, Sample, Step};
use finetune::engine::{SaveAssignment, Trainer, TrainerOptions};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::objectives::ObjectiveCost;
use finetune::optim::{
    AdamW, OptimizerAlgorithm, OptimizerOptions, Schedule, StateTensor, StateValues, UpdatePiece,
};
use finetune::parallel::{Bucket, DeviceMesh, GradReduceOptions, MeshShape, OffloadTarget, ShardingStrategy};
use finetune::planning::{MemoryOptions, MemoryPlan, Saving};
use finetune::recipe::enums::{Attention, MasterWeights, Offload, Recompute, SchedulerKind, StateDtype};
use finetune::runtime::copy::copy_into;
use finetune::runtime::thread_pool;
use finetune::weights::{ModelFiles, StoredDtype, WriteEntry, write_file, write_text};
use half::bf16;

/// SGD with momentum, with one buffer or with the mean of several.
#[derive(Debug, Clone, Copy)]
struct Momentum {
    buffers: &'static [StateTensor],
}

const fn buffer(name: &'static str) -> StateTensor {
    StateTensor { name, may_be_int8: false }
}

const ONE: Momentum = Momentum { buffers: &[buffer("momentum_buffer")] };
const THREE: Momentum = Momentum { buffers: &[buffer("slow"), buffer("middle"), buffer("quick")] };

impl OptimizerAlgorithm for Momentum {
    fn state(&self) -> &'static [StateTensor] {
        self.buffers
    }

    fn update(&self, pieces: &[UpdatePiece<'_>]) -> Result<()> {
        pieces.iter().try_for_each(|piece| self.update_piece(piece))
    }
}

impl Momentum {
    fn update_piece(&self, piece: &UpdatePiece<'_>) -> Result<()> {
        let &UpdatePiece { param, grad, state, step, .. } = piece;
        assert_eq!(state.len(), self.buffers.len());
        let rate = step.learning_rate / state.len() as f64;
        for (position, buffer) in state.iter().enumerate() {
            let StateValues::F32(buffer) = buffer else { panic!("8 bits of what may not be") };
            let decay = 0.9 - 0.2 * position as f64;
            let buffered = ((&**buffer * decay)? + (grad * step.grad_scale)?)?;
            copy_into(buffer, &buffered)?;
            copy_into(param, &(&**param - (buffered * rate)?)?)?;
        }
        Ok(())
    }
}

fn tiny_llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama")
}

fn trainer(model: &Path, algorithm: Momentum, engine: &EngineOptions) -> Result<Trainer> {
    trainer_of(model, Arc::new(algorithm), engine)
}

fn trainer_of(
    model: &Path,
    algorithm: Arc<dyn OptimizerAlgorithm>,
    engine: &EngineOptions,
) -> Result<Trainer> {
    let engine = logits::base(model).engine(Trains::All, engine)?;
    // 8 bits are requested, which these buffers do not allow.
    let optimizer = OptimizerOptions { algorithm, weight_decay: 0.0, state: StateDtype::Int8 };
    let schedule = Schedule {
        kind: SchedulerKind::Constant,
        learning_rate: 1e-3,
        warmup_steps: 0,
        total_steps: 10,
        min_lr_ratio: 0.0,
        num_cycles: 1.0,
        power: 1.0,
        num_decay_steps: 0,
    };
    let options = TrainerOptions {
        optimizer,
        lora_plus_ratio: 1.0,
        schedule,
        // The norm of shards is a different sum of squares.
        max_grad_norm: None,
        router_aux_loss: 0.0,
        neftune_alpha: 0.0,
        seed: 0,
        recompute: Recompute::Block,
        save_assignment: SaveAssignment::Rank0,
        has_graphs: false,
    };
    Trainer::new(engine, options)
}

fn step(micro_batches: u32) -> Step {
    let batch = |salt: u32| {
        let ids: Vec<u32> = (0..24).map(|i| (i * 31 + salt * 17) % 300 + 3).collect();
        let mut targets: Vec<u32> = ids[1..].to_vec();
        targets.push(IGNORE);
        let segments = vec![Sample { start: 0, len: ids.len(), ..Sample::default() }];
        Batch { ids, targets, samples: segments, first_token: u64::from(salt) * 24, num_samples: 1 }
    };
    Step::new((0..micro_batches).map(batch).collect(), 1.0)
}

/// Returns every value and every state tensor, by name, in bits.
fn bits(trainer: &Trainer) -> Vec<(String, Vec<u32>)> {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    let mut all = Vec::new();
    for tensor in trainer.snapshot(true).unwrap() {
        for state in &tensor.state {
            let SavedValues::F32(values) = &state.values else { panic!("8 bits of what may not be") };
            assert!(values.iter().any(|value| *value != 0.0), "{}.{}", tensor.name, state.name);
            all.push((format!("{}.{}", tensor.name, state.name), bits(values)));
        }
        all.push((tensor.name.clone(), bits(&tensor.values.to_f32())));
    }
    all
}

/// Saves a checkpoint whose weights are a model in one file.
fn save(trainer: &Trainer, output: &Path) {
    let write_weights: WriteWeights =
        Arc::new(|folder: &Path, tensors: &[SnapshotTensor], part: SnapshotPart| match part {
            SnapshotPart::Tensors(_) => {
                let entry = |tensor: &SnapshotTensor| WriteEntry {
                    name: tensor.name.clone(),
                    dtype: StoredDtype::F32,
                    shape: tensor.shape.clone(),
                    stack: None,
                };
                let entries: Vec<WriteEntry> = tensors.iter().map(entry).collect();
                let path = folder.join("model.safetensors");
                let values = |name: &str| &tensors.iter().find(|tensor| tensor.name == name).unwrap().values;
                Ok(vec![write_file(&path, &entries, |entry, sink| values(&entry.name).write(sink))?])
            }
            SnapshotPart::Rest => {
                let config = std::fs::read_to_string(tiny_llama().join("config.json")).unwrap();
                Ok(vec![write_text(&folder.join("config.json"), &config)?])
            }
        });
    let options = SaverOptions {
        output: output.to_owned(),
        retention: Retention { last: 1, every: None },
        in_background: false,
        bytes: 0,
        write_weights,
    };
    let state = TrainingState {
        schema: checkpoint::SCHEMA,
        step: 1,
        epoch: 0,
        index: 1,
        tokens: 24,
        ranks: 1,
        micro_batches: Some(1),
        base: None,
        best: None,
        chat_template_date: None,
        fingerprint: std::collections::BTreeMap::new(),
    };
    let (writers, world) = (SaveThreads::default(), trainer.engine.store.mesh().world());
    let mut saver = Saver::new(options, true, &writers);
    saver.save(state, trainer.snapshot(true).unwrap(), world).unwrap();
    saver.finish(world).unwrap();
}

#[test]
fn a_run_goes_on_from_a_checkpoint() {
    for algorithm in [ONE, THREE] {
        for offload in [Offload::None, Offload::Optimizer] {
            let output = tempfile::tempdir().unwrap();
            let alone = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
            let engine = EngineOptions { offload: offload.into(), ..alone };
            let mut whole = trainer(&tiny_llama(), algorithm, &engine).unwrap();
            whole.step(&step(1)).unwrap();
            save(&whole, output.path());
            let folder = output.path().join("checkpoint-1");
            let files = ModelFiles::open_file(&folder.join("optimizer.safetensors")).unwrap();
            let mut names: Vec<&str> = algorithm.buffers.iter().map(|buffer| buffer.name).collect();
            names.sort_unstable();
            let suffixes: Vec<&str> =
                files.names().filter_map(|name| name.strip_prefix("model.norm.weight.")).collect();
            assert_eq!(suffixes, names);

            let (saved, _) = checkpoint::newest(output.path()).unwrap();
            let mut resumed = trainer(&folder, algorithm, &engine).unwrap();
            resumed.restore(&saved.unwrap()).unwrap();
            assert!(bits(&resumed) == bits(&whole), "{algorithm:?}");
            whole.step(&step(1)).unwrap();
            resumed.step(&step(1)).unwrap();
            assert!(bits(&resumed) == bits(&whole), "{algorithm:?}");
        }
    }
}

/// The algorithm writes the bf16 values itself, or they are rounded from the masters; with
/// offloaded state, too.
#[test]
fn values_in_bf16_follow_the_masters() {
    let adamw = AdamW { betas: [0.9, 0.999], eps: 1e-8 };
    let algorithms: [Arc<dyn OptimizerAlgorithm>; 2] = [Arc::new(ONE), Arc::new(adamw)];
    for algorithm in algorithms {
        for offload in [Offload::None, Offload::Optimizer] {
            let alone = EngineOptions::alone(Device::Cpu, DType::BF16, Attention::Flash, 0);
            let engine = EngineOptions { offload: offload.into(), ..alone };
            let mut trainer = trainer_of(&tiny_llama(), algorithm.clone(), &engine).unwrap();
            let masters = |trainer: &Trainer| -> Vec<Vec<f32>> {
                let store = &trainer.engine.store;
                let master = |bucket: &Bucket| bucket.updated()?.to_read()?.to_vec1().map_err(Into::into);
                store.trainable().map(master).collect::<Result<_>>().unwrap()
            };
            let before = masters(&trainer);
            trainer.step(&step(1)).unwrap();
            let after = masters(&trainer);
            assert!(before != after, "{algorithm:?}");
            let values = trainer.engine.store.trainable().map(|bucket| bucket.own_value().unwrap());
            for (values, master) in values.zip(after) {
                let rounded: Vec<bf16> = master.into_iter().map(bf16::from_f32).collect();
                let values = values.to_read().unwrap().to_vec1::<bf16>().unwrap();
                assert!(values == rounded, "{algorithm:?} {offload:?}");
            }
        }
    }
}

#[test]
fn shards_of_a_state_are_saved_whole() {
    let train = |strategy: ShardingStrategy, ranks: usize| {
        let rank = |end| -> Result<Vec<(String, Vec<u32>)>> {
            let world: Arc<dyn Collective> = Arc::new(end);
            let options = EngineOptions {
                mesh: DeviceMesh::new(strategy, world)?,
                reducing: GradReduceOptions {
                    accumulates: ranks == 1,
                    dtype: DType::F32,
                    block_dtype: DType::F32,
                },
                ..EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0)
            };
            let mut trainer = trainer(&tiny_llama(), THREE, &options)?;
            for _ in 0..2 {
                trainer.step(&step(2))?;
            }
            Ok(bits(&trainer))
        };
        let ends = in_process::InProcessWorld::new(ranks).communicators();
        let all = in_process::run_ranks(ends, |end| thread_pool::in_own_pool(1, || rank(end))).unwrap();
        all.into_iter().flatten().collect::<Vec<_>>()
    };
    let alone = train(ShardingStrategy::Single, 1);
    assert!(alone.iter().any(|(name, _)| name == "model.norm.weight.middle"));
    for kind in [ShardingStrategy::Zero1, ShardingStrategy::Fsdp] {
        assert!(train(kind, 2) == alone, "{kind:?}");
    }
}

#[test]
fn the_memory_plan_counts_each_tensor() {
    let alone = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let planned = |algorithm: Momentum| {
        let trainer = trainer(&tiny_llama(), algorithm, &alone).unwrap();
        let descs = trainer.shares().remove(0);
        let options = MemoryOptions {
            dtype: DType::F32,
            optimizer_state: finetune::optim::StateLayout {
                tensors: algorithm.state(),
                dtype: StateDtype::F32,
            },
            strategy: ShardingStrategy::Single,
            mesh: MeshShape::ONE,
            saving: Saving::InBackground,
            accumulates: false,
            master: MasterWeights::F32,
            kept_gradients: DType::F32,
            over_nccl: false,
            offload: &OffloadTarget::default(),
            on_host: true,
            bf16_copy: false,
            fp8: &std::collections::BTreeSet::new(),
            scales_rows: true,
            graphs: false,
            frozen_ranks: 1,
            objective: ObjectiveCost::default(),
        };
        let elements: usize = descs.iter().map(|desc| desc.global_elements()).sum();
        let plan = MemoryPlan::of_step(&trainer.engine.config, &descs, None, 24, Recompute::Block, &options);
        (plan.unwrap(), elements as u64)
    };
    let ((one, elements), (three, _)) = (planned(ONE), planned(THREE));
    assert_eq!([one.optimizer, three.optimizer], [4 * elements, 12 * elements]);
    assert_eq!(three.saving - one.saving, 8 * elements);
}
