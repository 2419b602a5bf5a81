//! Preference objectives follow TRL 1.16: loss, gradient norm and metrics of eight steps, from the
//! batches of its own trainers, on one rank and on two, of adapters and of all weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};
use finetune::collective::{Collective, in_process};
use finetune::data::{Batch, IGNORE, Role, Sample, Step};
use finetune::engine::{Reference, ReferenceLogProbs, SaveAssignment, StepResult, Trainer, TrainerOptions};
use finetune::error::Result;
use finetune::loading::{AdapterSetup, EngineOptions, Trains};
use finetune::objectives::objective;
use finetune::optim::{OptimizerOptions, Schedule};
use finetune::parallel::{DeviceMesh, GradReduceOptions, ShardingStrategy};
use finetune::recipe::enums::{Attention, Recompute, SchedulerKind};
use finetune::recipe::{ObjectiveSection, OptimizerSection, Recipe, RecipeLayers, RecipeText};
use finetune::runtime::thread_pool;
use finetune::weights::ModelFiles;
use serde_json::Value;

use crate::golden_files::golden_of_family;
use crate::logits;
use crate::training;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/preference")
}

/// A run of TRL: its settings, and its batches as micro-batches of each step.
struct GoldenRun {
    folder: PathBuf,
    run: Value,
    wanted: Vec<Value>,
    steps: Vec<Step>,
}

/// The rows of a padded matrix of one micro-batch.
struct Rows {
    ids: Vec<Vec<u32>>,
    /// The number of tokens that are not padding.
    lengths: Vec<usize>,
    /// True for each token of an answer.
    answers: Vec<Vec<bool>>,
}

impl GoldenRun {
    fn open(name: &str) -> Self {
        let folder = golden().join(name);
        let text = std::fs::read_to_string(folder.join("trajectory.json")).unwrap();
        let trajectory: Value = serde_json::from_str(&text).unwrap();
        let batches = golden().join(trajectory["batches"].as_str().unwrap());
        let files = ModelFiles::open_file(&batches).unwrap();
        let run = trajectory["run"].clone();
        let wanted = trajectory["steps"].as_array().unwrap().clone();
        let mut example = 0;
        let step = |step: usize| {
            let names = (0..).map(|micro| format!("s{step}.a{micro}."));
            let has = |name: &String| files.names().any(|tensor| tensor.starts_with(name));
            let mut first_token = 0;
            let batches: Vec<Batch> = names
                .take_while(has)
                .map(|name| {
                    let batch = micro_batch(&files, &name, first_token, &mut example);
                    first_token += batch.len() as u64;
                    batch
                })
                .collect();
            Step::new(batches, 1.0)
        };
        let steps = (0..wanted.len()).map(step).collect();
        GoldenRun { folder, run, wanted, steps }
    }

    fn number(&self, key: &str) -> f64 {
        self.run[key].as_f64().unwrap()
    }

    /// Returns the objective's section of a recipe with TRL's settings.
    fn section(&self) -> ObjectiveSection {
        let args = self.run["args"].as_object().unwrap();
        let loss = args.get("loss_type").and_then(Value::as_str);
        let alpha = args.get("cpo_alpha").and_then(Value::as_f64);
        let kind = match (self.run["kind"].as_str().unwrap(), loss, alpha) {
            ("cpo", Some("simpo"), Some(0.0)) => "simpo",
            (kind, _, _) => kind,
        };
        let mut set = vec![format!("objective.kind={kind}")];
        for (key, value) in args {
            let is_simpo = kind == "simpo" && ["loss_type", "cpo_alpha"].contains(&key.as_str());
            // The number of rows in a batch changes no number, and the rows are cut already.
            let is_other =
                ["precompute_ref_batch_size", "max_length", "truncation_mode"].contains(&key.as_str());
            if !is_other && !is_simpo {
                set.push(format!("objective.{key}={value}"));
            }
        }
        let base =
            "[model]\nid = \"org/m\"\n[data]\ntrain = [\"org/d\"]\n[optimizer]\nlearning_rate = 1e-3\n";
        let text = RecipeText { name: "my.toml".into(), text: base.into(), folder: "/nowhere".into() };
        let layers =
            RecipeLayers { recipe: Some(text), set, folder: "/nowhere".into(), ..RecipeLayers::default() };
        Recipe::load(&layers).unwrap().objective
    }

    fn options(&self) -> TrainerOptions {
        let betas = self.run["betas"].as_array().unwrap();
        let optimizer = OptimizerSection {
            betas: [0, 1].map(|at| betas[at].as_f64().unwrap()),
            eps: self.number("eps"),
            weight_decay: self.number("weight_decay"),
            ..OptimizerSection::default()
        };
        TrainerOptions {
            optimizer: OptimizerOptions::from(&optimizer),
            schedule: Schedule {
                kind: SchedulerKind::Linear,
                learning_rate: self.number("lr"),
                warmup_steps: self.run["warmup"].as_u64().unwrap(),
                total_steps: self.wanted.len() as u64,
                ..training::trainer_options().schedule
            },
            max_grad_norm: Some(self.number("clip")),
            recompute: Recompute::None,
            save_assignment: SaveAssignment::Rank0,
            ..training::trainer_options()
        }
    }

    /// Trains the steps on `ranks` ranks; with several, each gets micro-batches of one pair.
    fn train(&self, ranks: usize, strategy: ShardingStrategy) -> Vec<StepResult> {
        let model = golden_of_family(&format!("models/{}", self.run["model"].as_str().unwrap()));
        let steps: Vec<Step> = if ranks == 1 {
            self.steps.clone()
        } else {
            let split =
                |step: &Step| Step::new(step.micro_batches.iter().flat_map(single_groups).collect(), 1.0);
            self.steps.iter().map(split).collect()
        };
        let rank = |end| -> Result<Vec<StepResult>> {
            let world: Arc<dyn Collective> = Arc::new(end);
            let accumulates = steps.iter().any(|step| step.micro_batches.len() > ranks);
            let options = EngineOptions {
                mesh: DeviceMesh::new(strategy, world)?,
                reducing: GradReduceOptions { accumulates, dtype: DType::F32, block_dtype: DType::F32 },
                ..EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0)
            };
            let base = logits::base(&model);
            let is_full = self.run["method"] == "full";
            let adapter = if is_full {
                None
            } else {
                Some(AdapterSetup::saved_in(&self.folder.join("adapter_step0"), &base.config)?)
            };
            let trains = Trains::adapter_or_all(adapter.as_ref());
            let engine = base.engine(trains, &options)?;
            let section = self.section();
            let mut trainer = Trainer::new(engine, self.options())?.with_objective(objective(&section));
            // The reference of an adapter that has learned is that adapter.
            let has_learned = self.run.get("random_b").is_some();
            let precomputes = is_full || has_learned || section.precompute_ref_log_probs;
            if section.has_reference() && precomputes {
                trainer = self.precomputed(trainer, &steps)?;
            }
            steps.iter().map(|step| trainer.step(step)).collect()
        };
        let ends = in_process::InProcessWorld::new(ranks).communicators();
        let all = in_process::run_ranks(ends, |end| thread_pool::in_own_pool(1, || rank(end))).unwrap();
        assert!(all.iter().all(|results| *results == all[0]), "the same on every rank");
        all[0].clone()
    }

    /// Returns the trainer with the log-probabilities of all samples under its first weights.
    fn precomputed(&self, trainer: Trainer, steps: &[Step]) -> Result<Trainer> {
        let batches: Vec<Batch> = steps.iter().flat_map(|step| step.micro_batches.clone()).collect();
        let samples = batches.iter().map(|batch| batch.samples.len()).sum();
        let train = trainer.reference_log_probs(&batches, samples, |_| ())?;
        Ok(trainer.with_reference(Reference::Precomputed(ReferenceLogProbs { train, held_out: Vec::new() })))
    }

    /// Trains on `ranks` ranks and compares every step.
    fn follows(&self, ranks: usize, strategy: ShardingStrategy) {
        let name = format!("{}, {ranks} ranks", self.folder.display());
        let results = self.train(ranks, strategy);
        // A hinge is a sum of margins whose rounding differs by 2.7e-5 already between f32 and f64.
        let most = if name.contains("hinge") { 5e-5 } else { 2e-5 };
        for (number, (ours, theirs)) in (1..).zip(results.iter().zip(&self.wanted)) {
            let what = format!("{name}, step {number}");
            let loss = theirs["loss"].as_f64().unwrap();
            let near =
                |ours: f64, theirs: f64, most: f64| (ours - theirs).abs() <= most * theirs.abs().max(1.0);
            assert!(near(ours.loss, loss, most), "{what}: loss {} for {loss}", ours.loss);
            let norm = theirs["grad_norm"].as_f64().unwrap();
            let distance = (ours.grad_norm - norm).abs();
            assert!(distance <= 2e-4 * norm, "{what}: norm {} for {norm}", ours.grad_norm);
            let means: BTreeMap<&str, f64> =
                ours.metrics.iter().filter_map(|metric| Some((metric.name, metric.mean()?))).collect();
            for (metric, wanted) in theirs["metrics"].as_object().unwrap() {
                let (wanted, is_other) = (wanted.as_f64().unwrap(), NOT_OURS.contains(&metric.as_str()));
                // At equal rewards rounding decides.
                let is_tie = metric == "rewards/accuracies" && means["rewards/margins"].abs() < 1e-4;
                // TRL logs 0 for a cross-entropy that has no weight.
                let is_weightless = metric == "nll_loss" && wanted == 0.0;
                // TRL takes the mean over micro-batches of means over tokens.
                let is_split = metric == "mean_token_accuracy" && self.run["accum"] != 1;
                if !is_other && !is_tie && !is_weightless && !is_split {
                    let actual = means.get(metric.as_str());
                    let actual = actual.unwrap_or_else(|| panic!("{what}: no {metric} in {means:?}"));
                    assert!(near(*actual, wanted, METRIC_DISTANCE), "{what}: {metric} {actual} for {wanted}");
                }
            }
        }
    }
}

/// The largest distance of a metric, relative above 1: rewards are sums of f32 over the tokens of
/// answers, which TRL rounds in another order.
const METRIC_DISTANCE: f64 = 2e-4;

/// Metrics of TRL that finetune does not have: they need all logits, or are in other columns.
const NOT_OURS: [&str; 4] = ["entropy", "num_tokens", "logits/chosen", "logits/rejected"];

impl Rows {
    fn read(files: &ModelFiles, name: &str, prefix: &str) -> Self {
        let named = |tensor: &str| format!("{name}{prefix}{tensor}");
        let width = files.info(&named("input_ids")).unwrap().shape[1];
        let integers = |tensor: &str| {
            let bytes = files.bytes(&named(tensor)).unwrap().chunks_exact(4);
            bytes.map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
        };
        let flags = |tensor: &str| files.bytes(&named(tensor)).unwrap().iter().map(|b| *b == 1).collect();
        let mask: Vec<bool> = flags("attention_mask");
        let answers: Vec<bool> = if files.info(&named("labels")).is_some() {
            integers("labels").into_iter().map(|label| label != -100).collect()
        } else {
            flags("completion_mask")
        };
        Rows {
            ids: integers("input_ids")
                .chunks(width)
                .map(|row| row.iter().map(|id| *id as u32).collect())
                .collect(),
            lengths: mask.chunks(width).map(|row| row.iter().filter(|is_token| **is_token).count()).collect(),
            answers: answers.chunks(width).map(<[bool]>::to_vec).collect(),
        }
    }

    /// Adds row `row` to a micro-batch, without its padding.
    fn add(&self, row: usize, batch: &mut Batch, role: Role, example: &mut u32) {
        let (ids, len) = (&self.ids[row][..self.lengths[row]], self.lengths[row]);
        batch.samples.push(Sample { start: batch.ids.len(), len, role, example: *example });
        batch.ids.extend(ids);
        let next = (1..len).map(|at| if self.answers[row][at] { ids[at] } else { IGNORE });
        batch.targets.extend(next.chain([IGNORE]));
        batch.num_samples += 1;
        *example += 1;
    }
}

/// Returns one micro-batch of TRL: pairs, or answers with a label and mismatched ones.
fn micro_batch(files: &ModelFiles, name: &str, first_token: u64, example: &mut u32) -> Batch {
    let mut batch = Batch { first_token, ..Batch::default() };
    let chosen = Role::Chosen;
    if files.info(&format!("{name}label")).is_some() {
        let rows = Rows::read(files, name, "");
        let has_mismatched = files.info(&format!("{name}KL_input_ids")).is_some();
        let mismatched = has_mismatched.then(|| Rows::read(files, name, "KL_"));
        for (row, label) in files.bytes(&format!("{name}label")).unwrap().iter().enumerate() {
            let role = if *label == 1 { Role::Desirable } else { Role::Undesirable };
            rows.add(row, &mut batch, role, example);
            if let Some(mismatched) = &mismatched {
                mismatched.add(row, &mut batch, Role::Mismatched, example);
            }
        }
    } else if files.info(&format!("{name}chosen_input_ids")).is_some() {
        let [better, worse] = ["chosen_", "rejected_"].map(|prefix| Rows::read(files, name, prefix));
        for row in 0..better.ids.len() {
            better.add(row, &mut batch, chosen, example);
            worse.add(row, &mut batch, Role::Rejected, example);
        }
    } else {
        let rows = Rows::read(files, name, "");
        let count = rows.ids.len() / 2;
        for row in 0..count {
            rows.add(row, &mut batch, chosen, example);
            rows.add(count + row, &mut batch, Role::Rejected, example);
        }
    }
    batch
}

/// Returns each pair of a micro-batch, or each answer with its mismatched one, as a micro-batch.
fn single_groups(batch: &Batch) -> Vec<Batch> {
    let pair = |samples: &[Sample]| {
        let start = samples[0].start;
        let tokens = start..start + samples.iter().map(|sample| sample.len).sum::<usize>();
        Batch {
            ids: batch.ids[tokens.clone()].to_vec(),
            targets: batch.targets[tokens].to_vec(),
            samples: samples.iter().map(|sample| Sample { start: sample.start - start, ..*sample }).collect(),
            first_token: batch.first_token + start as u64,
            num_samples: samples.len(),
        }
    };
    let continues = |_: &Sample, next: &Sample| matches!(next.role, Role::Rejected | Role::Mismatched);
    batch.samples.chunk_by(continues).map(pair).collect()
}

fn follows_alone(name: &str) {
    GoldenRun::open(name).follows(1, ShardingStrategy::Single);
}

/// Follows on one rank, and on two under both strategies, with one pair in a micro-batch.
fn follows(name: &str) {
    let run = GoldenRun::open(name);
    run.follows(1, ShardingStrategy::Single);
    run.follows(2, ShardingStrategy::Ddp);
    run.follows(2, ShardingStrategy::Fsdp);
}

#[test]
fn dpo_follows_trl() {
    for name in ["sigmoid", "sigmoid_qwen3", "sigmoid_b05", "plain_llama3", "accum3", "accum3_rpo_as_one"] {
        follows(&format!("dpo/dpo_{name}"));
    }
    for name in ["plain", "plain_gemma2", "phi3", "implicit", "truncate_start", "accum3_as_one"] {
        follows_alone(&format!("dpo/dpo_{name}"));
    }
}

#[test]
fn each_loss_of_dpo_follows_trl() {
    for name in ["hinge", "ipo", "ipo_qwen3", "sigmoid_norm", "robust", "exo", "nca", "bco", "sppo"] {
        follows_alone(&format!("dpo/dpo_{name}"));
    }
    for name in ["aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "rpo", "mpo"] {
        follows_alone(&format!("dpo/dpo_{name}"));
    }
}

#[test]
fn variants_of_dpo_follow_trl() {
    for name in ["f_alpha", "f_forward_kl", "f_js", "ld", "wpo"] {
        follows(&format!("dpo/dpo_{name}"));
    }
}

/// The reference is computed before the first step.
#[test]
fn dpo_with_a_precomputed_reference_follows_trl() {
    for name in ["precompute", "full", "full_qwen3", "full_precompute", "adapter_reference"] {
        follows(&format!("dpo/dpo_{name}"));
    }
}

/// A cross-entropy of the chosen row with its prompt, and odds of mean log-probabilities.
#[test]
fn orpo_follows_trl() {
    for name in ["orpo", "full", "plain_llama3"] {
        let name = if name == "orpo" { name.to_owned() } else { format!("orpo_{name}") };
        follows(&format!("orpo/{name}"));
    }
}

#[test]
fn cpo_and_simpo_follow_trl() {
    for name in ["cpo", "simpo", "simpo_qwen3_accum3"] {
        follows(&format!("cpo/{name}"));
    }
    for name in ["cpo_hinge", "cpo_ipo", "cpo_simpo", "cpo_smoothing"] {
        follows_alone(&format!("cpo/{name}"));
    }
}

#[test]
fn kto_follows_trl() {
    for name in ["kto", "kto_full", "kto_weights", "kto_apo_zero"] {
        follows(&format!("kto/{name}"));
    }
    for name in ["kto_from_pairs", "kto_one_sided", "kto_precompute"] {
        follows_alone(&format!("kto/{name}"));
    }
}
