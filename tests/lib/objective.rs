//! The loss as an argument of the step: a custom objective trains the model, on one rank and on
//! two, and cross-entropy with coefficients weights its rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::logits;
use crate::training;
use candle_core::{DType, Device, Tensor};
use finetune::collective::{Collective, in_process};
use finetune::data::{Batch, IGNORE, Sample, Step};
use finetune::engine::{Engine, MicroStep, StepResult, Trainer, TrainerOptions};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::model::HeadWeights;
use finetune::objectives::{
    CrossEntropy, Evaluation, MetricSum, Objective, ObjectiveInput, ObjectiveOutput, StepTotals,
};
use finetune::ops::cross_entropy::LossTargets;
use finetune::parallel::{DeviceMesh, GradReduceOptions, ShardingStrategy};
use finetune::recipe::enums::{Attention, Recompute};
use finetune::runtime::thread_pool;

fn trainer_options() -> TrainerOptions {
    TrainerOptions { max_grad_norm: None, ..training::trainer_options() }
}

/// Two samples of 9 and 15 tokens.
fn batch(salt: u32) -> Batch {
    let ids: Vec<u32> = (0..24).map(|i| (i * 31 + salt * 17) % 300 + 3).collect();
    let mut targets: Vec<u32> = ids[1..].to_vec();
    targets.push(IGNORE);
    targets[8] = IGNORE;
    let segments = vec![
        Sample { start: 0, len: 9, ..Sample::default() },
        Sample { start: 9, len: 15, ..Sample::default() },
    ];
    Batch { ids, targets, samples: segments, first_token: u64::from(salt) * 24, num_samples: 2 }
}

fn step(micro_batches: u32) -> Step {
    Step::new((0..micro_batches).map(batch).collect(), 1.0)
}

/// Penalizes large hidden states: the mean square over a sample, summed over samples. The second
/// sample of a micro-batch counts twice.
#[derive(Debug)]
struct SmallStates;

impl SmallStates {
    /// Returns the factor of each position.
    fn coefficients(batch: &Batch) -> Vec<f32> {
        let mut coefficients = vec![0.0; batch.len()];
        for (i, sample) in batch.samples.iter().enumerate() {
            let positions = sample.start..sample.start + sample.len;
            if batch.targets[positions.clone()].iter().any(|target| *target != IGNORE) {
                coefficients[positions].fill((i + 1) as f32 / sample.len as f32);
            }
        }
        coefficients
    }
}

impl Objective for SmallStates {
    fn denominator(&self, totals: &StepTotals) -> f64 {
        totals.samples
    }

    fn evaluate(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<Evaluation> {
        CrossEntropy.evaluate(head, input)
    }

    fn loss_and_grad(&self, _: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput> {
        let (rows, width) = input.hidden.dims2()?;
        let coefficients = Self::coefficients(input.batch);
        let counted = coefficients.iter().filter(|c| **c > 0.0).count();
        let factors = Tensor::from_vec(coefficients, (rows, 1), input.hidden.device())?;
        let squares = (input.hidden.sqr()?.sum_keepdim(1)? / width as f64)?;
        let loss = (squares * &factors)?.sum_all()?.to_scalar::<f32>()?;
        let dx = (input.hidden.broadcast_mul(&factors)? * (2.0 / width as f64 * input.scale))?;
        let metrics = vec![
            MetricSum { name: "positions", sum: counted as f64, count: 1.0 },
            MetricSum { name: "twice the loss", sum: 2.0 * f64::from(loss), count: 1.0 },
        ];
        Ok(ObjectiveOutput { loss: f64::from(loss).into(), dx, metrics })
    }
}

/// The results of three steps, and all values afterwards in bits.
#[derive(Debug, PartialEq)]
struct Trained {
    steps: Vec<StepResult>,
    values: BTreeMap<String, Vec<u32>>,
}

/// Trains tiny-llama on steps of this many micro-batches.
fn train(strategy: ShardingStrategy, ranks: usize, micro_batches: u32) -> Trained {
    train_after(strategy, ranks, micro_batches, &|_| Ok(()))
}

/// Like [`train`], after `prepare`.
fn train_after(
    strategy: ShardingStrategy,
    ranks: usize,
    micro_batches: u32,
    prepare: &(dyn Fn(&Trainer) -> Result<()> + Sync),
) -> Trained {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    let rank = |end| -> Result<Trained> {
        let world: Arc<dyn Collective> = Arc::new(end);
        let accumulates = micro_batches as usize > ranks;
        let options = EngineOptions {
            mesh: DeviceMesh::new(strategy, world)?,
            reducing: GradReduceOptions { accumulates, dtype: DType::F32, block_dtype: DType::F32 },
            ..EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0)
        };
        let engine = logits::base(&folder).engine(Trains::All, &options)?;
        let mut trainer = Trainer::new(engine, trainer_options())?.with_objective(Arc::new(SmallStates));
        prepare(&trainer)?;
        let steps = (0..3).map(|_| trainer.step(&step(micro_batches))).collect::<Result<_>>()?;
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        let saved = trainer.snapshot(true)?.into_iter();
        Ok(Trained {
            steps,
            values: saved.map(|tensor| (tensor.name, bits(tensor.values.to_f32().into_owned()))).collect(),
        })
    };
    let ends = in_process::InProcessWorld::new(ranks).communicators();
    let all = in_process::run_ranks(ends, |end| thread_pool::in_own_pool(1, || rank(end))).unwrap();
    let mut all = all.into_iter();
    let mut trained = all.next().unwrap();
    for other in all {
        assert_eq!(other.steps, trained.steps, "the same on every rank");
        trained.values.extend(other.values);
    }
    trained
}

#[test]
fn another_objective_trains_to_the_same_bits_on_one_rank_and_two() {
    let alone = train(ShardingStrategy::Single, 1, 2);
    let losses: Vec<f64> = alone.steps.iter().map(|step| step.loss).collect();
    assert!(losses[0] > losses[1] && losses[1] > losses[2], "{losses:?}");
    for step in &alone.steps {
        // All positions of two micro-batches; the mean is over their four samples.
        let wanted = [("positions", 48.0), ("twice the loss", 2.0 * 4.0 * step.loss)];
        let actual: Vec<_> = step.metrics.iter().map(|metric| (metric.name, metric.sum)).collect();
        assert_eq!(actual, wanted);
    }
    for kind in [ShardingStrategy::Ddp, ShardingStrategy::Fsdp] {
        let split = train(kind, 2, 2);
        assert!(split.values == alone.values, "{kind:?}: values");
        assert_eq!(split.steps.len(), 3);
        for (split, alone) in split.steps.iter().zip(&alone.steps) {
            assert_eq!((split.loss, &split.metrics), (alone.loss, &alone.metrics), "{kind:?}");
        }
    }
}

/// Computing the longest micro-batch before the first step, on every rank, changes nothing that is
/// trained.
#[test]
fn a_rehearsal_changes_nothing() {
    for (kind, ranks) in [(ShardingStrategy::Single, 1), (ShardingStrategy::Fsdp, 2)] {
        let rehearsed = train_after(kind, ranks, 2, &|trainer| trainer.rehearse(&training::batch(7)));
        assert!(rehearsed == train(kind, ranks, 2), "{kind:?}");
    }
}

/// Sums of several micro-batches a rank have another order; a rank without a last micro-batch adds
/// nothing.
#[test]
fn metrics_are_summed_over_micro_batches_and_ranks() {
    for micro_batches in [3, 4] {
        let alone = train(ShardingStrategy::Single, 1, micro_batches);
        let split = train(ShardingStrategy::Fsdp, 2, micro_batches);
        for (split, alone) in split.steps.iter().zip(&alone.steps) {
            assert!((split.loss / alone.loss - 1.0).abs() < 1e-6, "{split:?}, on one rank {alone:?}");
            assert_eq!(split.metrics[0].sum, f64::from(24 * micro_batches));
            assert!((split.metrics[1].sum / alone.metrics[1].sum - 1.0).abs() < 1e-6);
        }
    }
}

/// Cross-entropy with a coefficient for each sample.
#[derive(Debug)]
struct BySample([f32; 2]);

impl Objective for BySample {
    fn evaluate(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<Evaluation> {
        CrossEntropy.evaluate(head, input)
    }

    fn loss_and_grad(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput> {
        let samples = input.batch.samples.iter().zip(self.0);
        let coefficients: Vec<f32> = samples.flat_map(|(sample, c)| vec![c; sample.len]).collect();
        let targets = LossTargets { ids: &input.batch.targets, coefficients: Some(&coefficients) };
        let (loss, dx) =
            head.loss_and_grad(input.config, input.hidden, targets, input.scale, input.dropout)?;
        Ok(ObjectiveOutput { loss, dx, metrics: Vec::new() })
    }
}

#[test]
fn coefficients_of_one_are_cross_entropy_and_of_zero_no_target() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let engine = logits::base(&folder).engine(Trains::All, &options)?;
    let run = |engine: &Engine, objective: &dyn Objective, batch: &Batch| -> Result<(f64, f64)> {
        engine.store.zero_gradients()?;
        let step = MicroStep {
            objective,
            scale: 0.1,
            totals: StepTotals::default(),
            reference: None,
            recompute: Recompute::None,
            dropout: None,
            noise: None,
            balance: None,
            last: true,
            graphs: None,
        };
        let sums = engine.micro_step(batch, step)?;
        Ok((sums.loss.read()?, engine.store.gradient_norm()?))
    };
    let whole = run(&engine, &CrossEntropy, &batch(1))?;
    assert_eq!(run(&engine, &BySample([1.0, 1.0]), &batch(1))?, whole);

    let mut second = batch(1);
    second.targets[..9].fill(IGNORE);
    let (second, norm) = run(&engine, &CrossEntropy, &second)?;
    for factor in [1.0, 2.0] {
        let (actual, found_norm) = run(&engine, &BySample([0.0, factor]), &batch(1))?;
        let factor = f64::from(factor);
        assert!((actual / (factor * second) - 1.0).abs() < 1e-6, "{actual:?}");
        assert!((found_norm / (factor * norm) - 1.0).abs() < 1e-5, "{found_norm}, by targets {norm}");
    }
    Ok(())
}
