//! The loss that balances experts: its value and gradient against transformers, the same however
//! micro-batches and ranks split a step, and the load of experts beside it.

use std::sync::Arc;

use crate::golden_files::golden_of_family;
use crate::logits;
use crate::training;
use candle_core::{DType, Device};
use finetune::collective::{Collective, in_process};
use finetune::data::{Batch, IGNORE, Sample, Step};
use finetune::engine::{StepResult, Trainer, TrainerOptions};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::parallel::{DeviceMesh, GradReduceOptions, ShardingStrategy};
use finetune::recipe::enums::Attention;
use finetune::runtime::thread_pool;
use finetune::weights::ModelFiles;

fn trainer_options(router_aux_loss: f64) -> TrainerOptions {
    TrainerOptions { max_grad_norm: None, router_aux_loss, ..training::trainer_options() }
}

fn packed(sequences: &[&[u32]]) -> Batch {
    let mut batch = Batch::default();
    for ids in sequences {
        batch.samples.push(Sample { start: batch.ids.len(), len: ids.len(), ..Sample::default() });
        batch.ids.extend(*ids);
        batch.targets.extend(ids[1..].iter().copied().chain([IGNORE]));
        batch.num_samples += 1;
    }
    batch
}

/// Returns the values of a gradient after a step.
fn gradient(trainer: &Trainer, name: &str) -> Vec<f32> {
    let (bucket, entry) = trainer.engine.store.find(name).expect(name);
    let all = bucket.gradient().unwrap().unwrap();
    all.narrow(0, entry.start, entry.range().len()).unwrap().to_vec1().unwrap()
}

#[test]
fn value_and_gradients_are_those_of_transformers() -> Result<()> {
    for (name, router) in [
        ("tiny-qwen3-moe", "mlp.gate"),
        ("tiny-mixtral", "block_sparse_moe.gate"),
        ("tiny-olmoe", "mlp.gate"),
        ("tiny-qwen2-moe", "mlp.gate"),
    ] {
        let path = golden_of_family(&format!("forward/{name}.safetensors"));
        let info = std::fs::read_to_string(path.with_file_name("forward.json")).unwrap();
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let wanted = |key: &str| info[name]["aux"][key].as_f64().unwrap();
        let files = ModelFiles::open_file(&path).unwrap();
        let whole = |key: &str| -> Vec<i64> {
            let bytes = files.bytes(key).unwrap();
            bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let (ids, mask) = (whole("input_ids"), whole("attention_mask"));
        let row = |(ids, mask): (&[i64], &[i64])| -> Vec<u32> {
            ids.iter().zip(mask).filter(|(_, mask)| **mask == 1).map(|(id, _)| *id as u32).collect()
        };
        let sequences: Vec<Vec<u32>> = ids.chunks(32).zip(mask.chunks(32)).map(row).collect();
        let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();

        let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
        let base = logits::base(&golden_of_family(&format!("models/{name}")));
        let engine = base.engine(Trains::All, &options)?;
        let mut trainer = Trainer::new(engine, trainer_options(wanted("coef")))?;
        let result = trainer.step(&Step::new(vec![packed(&sequences)], 1.0))?;
        let (actual, theirs) = (result.experts.balance, wanted("aux_loss_f64"));
        assert!((actual / theirs - 1.0).abs() < 1e-5, "{name}: {actual}, transformers {theirs}");
        let (actual, theirs) = (result.grad_norm, wanted("grad_norm"));
        assert!(
            (actual / theirs - 1.0).abs() < 1e-4,
            "{name}: gradient norm {actual}, transformers {theirs}"
        );
        let mut compared = 0;
        for stored in files.names().filter(|stored| stored.starts_with("grad_aux.")) {
            let mut wanted = vec![0f32; files.info(stored).unwrap().elements()];
            files.read_f32(stored, &mut wanted)?;
            let own = stored.trim_start_matches("grad_aux.").replace("mlp.gate", router);
            let largest = wanted.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for (actual, wanted) in gradient(&trainer, &own).into_iter().zip(wanted) {
                assert!((actual - wanted).abs() < 1e-4 * largest, "{name} {own}: {actual}, wanted {wanted}");
            }
            compared += 1;
        }
        assert!(compared > 0, "{name}: no router");
    }
    Ok(())
}

/// Runs one step over four samples, `at_once` of them in a micro-batch.
fn run(ranks: usize, at_once: usize) -> StepResult {
    let samples: Vec<Vec<u32>> = [9u32, 15, 4, 12]
        .iter()
        .map(|len| (0..*len).map(|i| (i * 31 + len * 17) % 300 + 3).collect())
        .collect();
    let samples: Vec<&[u32]> = samples.iter().map(Vec::as_slice).collect();
    let rank = |end| -> Result<StepResult> {
        let world: Arc<dyn Collective> = Arc::new(end);
        let kind = if ranks == 1 { ShardingStrategy::Single } else { ShardingStrategy::Fsdp };
        let options = EngineOptions {
            mesh: DeviceMesh::new(kind, world)?,
            reducing: GradReduceOptions { accumulates: true, dtype: DType::F32, block_dtype: DType::F32 },
            ..EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0)
        };
        let base = logits::base(&golden_of_family("models/tiny-qwen3-moe"));
        let mut trainer = Trainer::new(base.engine(Trains::All, &options)?, trainer_options(0.5))?;
        trainer.step(&Step::new(samples.chunks(at_once).map(packed).collect(), 1.0))
    };
    let ends = in_process::InProcessWorld::new(ranks).communicators();
    let mut all = in_process::run_ranks(ends, |end| thread_pool::in_own_pool(1, || rank(end))).unwrap();
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "the same on every rank");
    all.remove(0)
}

/// With three micro-batches on two ranks, one rank repeats a micro-batch that does not count.
#[test]
fn splits_of_a_step_balance_alike() {
    let whole = run(1, 4);
    // 40 tokens in each of two layers with experts choose two of eight.
    assert_eq!((whole.experts.tokens, whole.experts.picks.iter().sum::<f64>()), (80.0, 160.0));
    assert!(whole.experts.balance > 1.9, "{:?}", whole.experts);
    for (ranks, at_once) in [(1, 1), (1, 2), (2, 2), (2, 1), (2, 4), (2, 3)] {
        let split = run(ranks, at_once);
        assert_eq!(split.experts.picks, whole.experts.picks, "{ranks} ranks, {at_once} at once");
        for (actual, wanted) in [
            (split.experts.balance, whole.experts.balance),
            (split.grad_norm, whole.grad_norm),
            (split.loss, whole.loss),
        ] {
            assert!(
                (actual / wanted - 1.0).abs() < 1e-5,
                "{ranks} ranks, {at_once} at once: {actual}, {wanted}"
            );
        }
    }
}
