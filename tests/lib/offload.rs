//! Offload beyond the equality that `split.rs` checks: parameters on the device at a time, memory
//! savings, no file left, and every use of weights apart from training steps.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::logits;
use crate::training::{batch, trainer_options};
use candle_core::{DType, Device, Tensor};
use finetune::data::Step;
use finetune::engine::{TokenSampler, Trainer, TrainerOptions};
use finetune::loading::{EngineOptions, Trains};
use finetune::model::AdapterSwitch;
use finetune::ops::stochastic_rounding::StochasticRounding;
use finetune::optim::{Optimizer, OptimizerOptions, ParamGroup, StateValues};
use finetune::parallel::{GradReduceOptions, OffloadTarget};
use finetune::recipe::OptimizerSection;
use finetune::recipe::enums::{Attention, MasterWeights, Offload, StateDtype};
use finetune::runtime::rng::RngStream;
use serde_json::{Value, json};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn adamw(state: StateDtype) -> OptimizerOptions {
    OptimizerOptions { weight_decay: 0.1, state, ..OptimizerOptions::from(&OptimizerSection::default()) }
}

fn trainer(offload: impl Into<OffloadTarget>, dtype: DType) -> Trainer {
    trainer_with(offload, dtype, MasterWeights::F32)
}

fn trainer_with(offload: impl Into<OffloadTarget>, dtype: DType, master: MasterWeights) -> Trainer {
    let alone = EngineOptions::alone(Device::Cpu, dtype, Attention::Flash, 0);
    let block_dtype = if master == MasterWeights::None { DType::BF16 } else { DType::F32 };
    let options = EngineOptions {
        offload: offload.into(),
        master,
        reducing: GradReduceOptions { block_dtype, ..alone.reducing },
        ..alone
    };
    let engine = logits::base(&golden().join("models/tiny-llama")).engine(Trains::All, &options).unwrap();
    let options = TrainerOptions { optimizer: adamw(StateDtype::F32), ..trainer_options() };
    Trainer::new(engine, options).unwrap()
}

/// Returns parameters in a file of `folder`.
fn to_file(folder: &Path) -> OffloadTarget {
    OffloadTarget { what: Offload::Params, folder: Some(folder.to_owned()) }
}

/// Returns the results of every use of a model after two steps, in bits.
fn answers(trainer: &mut Trainer) -> (Vec<u32>, Vec<u32>, String, Vec<Vec<u32>>) {
    let step = Step::new(vec![batch(0)], 1.0);
    for _ in 0..2 {
        trainer.step(&step).unwrap();
    }
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let logits = trainer.engine.logits(&batch(0), AdapterSwitch::On).unwrap().to_dtype(DType::F32).unwrap();
    let mut greedy = TokenSampler::greedy();
    let text = trainer.engine.generate(&[5, 6, 7], 8, &mut greedy, &[], &mut |_| Ok(true)).unwrap();
    let evaluation = trainer.evaluate(&[batch(0)]).unwrap();
    let saved = trainer.snapshot(true).unwrap();
    let saved = saved.into_iter().map(|tensor| bits(tensor.values.to_f32().into_owned())).collect();
    (bits(logits.flatten_all().unwrap().to_vec1().unwrap()), text, format!("{:?}", evaluation.loss()), saved)
}

#[test]
fn every_use_of_weights_is_the_same_away_from_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let masters = [MasterWeights::F32, MasterWeights::None];
    for (dtype, master) in [(DType::F32, masters[0]), (DType::BF16, masters[0]), (DType::BF16, masters[1])] {
        let mut alone = trainer_with(Offload::None, dtype, master);
        let wanted = answers(&mut alone);
        assert_eq!(alone.engine.store.most_gathered(), 0);
        assert_eq!(alone.most_staged(), 0);
        let in_file = to_file(folder.path());
        for offload in [Offload::Optimizer.into(), Offload::Params.into(), in_file] {
            let mut away = trainer_with(offload.clone(), dtype, master);
            assert!(answers(&mut away) == wanted, "{offload:?} in {dtype:?}, master {master:?}");
            // At most two segments are on the device at a time.
            let most = if offload.what == Offload::Optimizer { 0 } else { 2 };
            assert_eq!(away.engine.store.most_gathered(), most, "{offload:?}");
            assert!(away.most_staged() > 0, "{offload:?}");
            // The file in use has no name.
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }
}

#[test]
fn a_bad_value_is_named_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut diverging = trainer(to_file(folder.path()), DType::F32);
    let step = Step { valid: 0, ..Step::new(vec![batch(0)], 1.0) };
    let error = diverging.step(&step).unwrap_err();
    assert!(error.causes()[0].contains("the gradient of model.embed_tokens.weight"), "{error}");
}

fn piece(len: usize, salt: usize) -> ParamGroup {
    let wave = |step: usize| (0..len).map(|i| ((i * step + salt) as f32).sin()).collect::<Vec<_>>();
    let flat = |step| Tensor::from_vec(wave(step), len, &Device::Cpu).unwrap();
    ParamGroup {
        param: flat(3).into(),
        value: None,
        rounding: StochasticRounding::new(RngStream::new(1), 0),
        grad: flat(7),
        decay: true,
        rate: 1.0,
        large: len >= 4096,
    }
}

fn bits(optimizer: &Optimizer, pieces: &[ParamGroup]) -> Vec<Vec<u8>> {
    let f32s = |flat: &Tensor| -> Vec<u8> {
        flat.to_dtype(DType::F32)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect()
    };
    let mut all: Vec<Vec<u8>> = pieces.iter().map(|piece| f32s(&piece.param.to_read().unwrap())).collect();
    for values in optimizer.states().iter().flatten() {
        match values {
            StateValues::F32(values) => all.push(f32s(values)),
            StateValues::Int8(state) => {
                all.extend([state.codes.to_vec1().unwrap(), f32s(&state.absmax)]);
            }
        }
    }
    all
}

/// Like [`piece`] in bf16, with a gradient in bf16 or f32.
fn piece_in_bf16(len: usize, salt: usize, grad: DType) -> ParamGroup {
    let piece = piece(len, salt);
    let param = piece.param.to_read().unwrap().to_dtype(DType::BF16).unwrap();
    ParamGroup { param: param.into(), grad: piece.grad.to_dtype(grad).unwrap(), ..piece }
}

/// Runs of 512 values, the last one short, give the same bits, and no more are on the device.
#[test]
fn updates_are_staged_in_short_runs() {
    for state in [StateDtype::F32, StateDtype::Int8] {
        let [pieces, others] = [0, 1].map(|_| {
            let in_bf16 = [piece_in_bf16(5000, 4, DType::BF16), piece_in_bf16(700, 5, DType::F32)];
            [piece(5000, 1), piece(300, 2), piece(4096, 3)].into_iter().chain(in_bf16).collect::<Vec<_>>()
        });
        let mut in_place = Optimizer::new(adamw(state), pieces.clone()).unwrap();
        let mut staged = Optimizer::offloaded(adamw(state), others.clone(), &Device::Cpu, Some(512)).unwrap();
        for _ in 0..3 {
            in_place.update(1e-2, 0.5).unwrap();
            staged.update(1e-2, 0.5).unwrap();
        }
        assert!(bits(&in_place, &pieces) == bits(&staged, &others), "{state:?}");
        assert_eq!((staged.most_staged(), in_place.most_staged()), (512, 0));
    }
}

/// Steps of a tenth of the distance between two bf16 numbers: each weight moves as far as in f32,
/// up to the noise of its own rounding. With the same random bits in every step, some would never
/// move and others ten times as far.
#[test]
fn every_weight_in_bf16_moves_on_average_as_in_f32() {
    const STEPS: usize = 400;
    let len = 512;
    let ones = |dtype| Tensor::ones(len, dtype, &Device::Cpu).unwrap();
    let group = ParamGroup { grad: ones(DType::F32), decay: false, ..piece(len, 0) };
    // Down from 1, where neighbours are 2⁻⁸ apart.
    let group = ParamGroup { param: ones(DType::BF16).into(), ..group };
    let other = StochasticRounding::new(RngStream::new(2), 0);
    let others = ParamGroup { param: ones(DType::BF16).into(), rounding: other, ..group.clone() };
    let mut optimizer = Optimizer::new(adamw(StateDtype::F32), vec![group.clone(), others.clone()]).unwrap();
    // With a constant gradient AdamW moves by its learning rate in each step.
    let (unit, rate) = (1.0 / 256.0, 0.1 / 256.0);
    for _ in 0..STEPS {
        optimizer.update(rate, 1.0).unwrap();
    }
    let values = |group: &ParamGroup| {
        let values = group.param.to_read().unwrap().to_dtype(DType::F32).unwrap();
        values.to_vec1::<f32>().unwrap()
    };
    let wanted = 1.0 - STEPS as f64 * rate;
    // The deviation of a sum of roundings, each up with probability p: the root of 400 p (1 - p)
    // units, here 6; times five.
    let most = 5.0 * unit * (STEPS as f64 * 0.1 * 0.9).sqrt();
    for value in values(&group).into_iter().chain(values(&others)) {
        assert!((f64::from(value) - wanted).abs() < most, "{value}, {wanted} in f32");
    }
    assert_ne!(values(&group), values(&others), "two streams");
}

fn train(model: &Path, dir: &Path, output: &str, keys: &[String], fault: Option<&str>) -> Output {
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
    command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1");
    match fault {
        None => {}
        Some("--dry-run") => drop(command.arg("--dry-run")),
        Some(fault) => drop(command.env("FINETUNE_FAULT", fault).args(["--ranks", "2"])),
    }
    command.arg("--model").arg(model).arg("--output").arg(dir.join(output));
    command.arg("--dataset").arg(golden().join("data/sft_messages.jsonl"));
    let fixed = ["train.max_steps=2", "data.max_seq_len=256", "data.packing=false", "log.tensorboard=false"];
    let rate = ["optimizer.learning_rate=1e-3", "parallel.offload=params"];
    for key in fixed.iter().chain(&rate).map(|key| (*key).to_owned()).chain(keys.iter().cloned()) {
        command.args(["--set", &key]);
    }
    command.output().unwrap()
}

/// 4 bytes a parameter: all in the file, none in memory.
#[test]
fn a_plan_says_where_parameters_are() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden().join("models/tiny-llama");
    let said = |keys: &[String]| {
        let done = train(&model, dir.path(), "out", keys, Some("--dry-run"));
        assert!(done.status.success());
        String::from_utf8(done.stderr).unwrap()
    };
    let folder = format!("parallel.offload_folder={}", dir.path().display());
    let (text, host) = (said(&[folder]), said(&[]));
    // tiny-llama has 135,488 parameters: 529.25 KiB in f32.
    assert!(text.contains(&format!("in a file in {}: 529 KiB", dir.path().display())), "{text}");
    assert!(text.contains("= weights 0 B + gradients 529 KiB + optimizer 1.03 MiB"), "{text}");
    assert!(host.contains("= weights 529 KiB + gradients 529 KiB"), "{host}");
    assert!(host.contains("on the CPU offload to host memory frees nothing"), "{host}");
}

#[test]
fn no_file_is_left_whatever_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("disk");
    std::fs::create_dir(&folder).unwrap();
    let keys = [format!("parallel.offload_folder={}", folder.display())];
    let model = golden().join("models/tiny-llama");
    let faults = [None, Some("0:backward:panic"), Some("1:backward:error"), Some("1:load:panic")];
    for (i, fault) in faults.into_iter().enumerate() {
        let done = train(&model, dir.path(), &format!("out-{i}"), &keys, fault);
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(if fault.is_some() { 75 } else { 0 }), "{fault:?}: {said}");
        assert!(said.contains(&format!("in a file in {}", folder.display())), "{said}");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "{fault:?}");
    }
}

#[test]
fn a_folder_that_takes_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden().join("models/tiny-llama");
    let keys = ["parallel.offload_folder=/proc".to_owned()];
    let done = train(&model, dir.path(), "out", &keys, None);
    let said = String::from_utf8_lossy(&done.stderr);
    if Path::new("/proc/self").exists() {
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains("cannot create a file in /proc"), "{said}");
        assert!(said.contains("hint: set `parallel.offload_folder` to another folder"), "{said}");
    }
}

/// Returns the peak memory of a run from its metrics.
fn peak(output: &Path) -> u64 {
    let text = std::fs::read_to_string(output.join("metrics.jsonl")).unwrap();
    let peaks =
        text.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["peak_bytes"].as_u64());
    peaks.max().unwrap()
}

/// A base of 17 million frozen parameters, 68 MB in f32, with a small adapter.
#[test]
fn parameters_in_a_file_are_not_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let tiny = golden().join("models/tiny-llama");
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        std::fs::copy(tiny.join(name), model.join(name)).unwrap();
    }
    let text = std::fs::read_to_string(tiny.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let larger = [("hidden_size", 256), ("intermediate_size", 1024), ("num_hidden_layers", 17)];
    larger.iter().for_each(|(key, value)| config[*key] = json!(value));
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let mut peaks = Vec::new();
    for (output, folder) in [("memory", None), ("file", Some(dir.path()))] {
        let mut keys = vec!["model.init=random".to_owned(), "adapter.r=2".to_owned()];
        keys.extend(folder.map(|folder| format!("parallel.offload_folder={}", folder.display())));
        let done = train(&model, dir.path(), output, &keys, None);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        peaks.push(peak(&dir.path().join(output)));
    }
    assert!(peaks[1] + (50 << 20) < peaks[0], "{peaks:?}");
}
