//! Every key of a recipe, declared once: documentation, name, type, default, range.
//!
//! Names and meanings follow transformers and PEFT where they have the key.

use super::addresses::{ListenAddress, ServerUrl};
use super::enums::{
    AdapterInit, AdapterKind, AlertRule, Attention, ComputeDtype, DataFormat, Dtype, MasterWeights,
    ModelInit, ObjectiveKind, Offload, OnBadRow, OnLongRow, OnNan, OptimizerKind, QuantKind, Recompute,
    ReduceDtype, SchedulerKind, StateDtype, Strategy,
};
use super::row_source::RowSource;
use super::schema::section;
use super::source::{DataSource, Folder, Template};
use super::step_interval::StepInterval;
use super::train_on::TrainOn;
use super::value::Bounds::{Above, AtLeast, Between, FromToBelow, OneOf};
use super::value::{AutoOr, Patterns, TargetModules};
use super::webhook::{AlertProgram, WebhookSource};

/// The highest rank of an adapter: wider than any matrix that is adapted, and low enough that its parameters can be
/// counted.
const MOST_RANK: f64 = 65_536.0;

/// The shortest row: a token to predict another from.
pub const LEAST_SEQ_LEN: usize = 2;
/// The most micro-batches of a step.
pub const MOST_ACCUMULATION: usize = 1 << 20;
/// The most rows of a step over all ranks.
const MOST_GLOBAL_BATCH: usize = 1 << 20;

section! {
    /// The model to start from.
    pub struct ModelSection "model" {
        /// A folder in Hugging Face layout, or a hub id such as `Qwen/Qwen2.5-0.5B`. `--model` sets it.
        id: Option<DataSource> = None;
        /// Branch, tag or commit of a hub id.
        revision: String = "main".into();
        /// Where the weights come from: the model's files, or seeded random numbers.
        init: ModelInit = ModelInit::Pretrained;
        /// Type of the weights and of the computation; auto: bf16 on a GPU, f32 on the CPU.
        dtype: ComputeDtype = ComputeDtype::Auto;
        /// Tiled attention, or the plain formula as a reference.
        attention: Attention = Attention::Flash;
        /// Tokens to train, beside the adapter if there is one; those that the tokenizer does not have are added to it.
        /// Embedding and head grow by their rows, which start as the mean of the others, where they have none unused.
        new_tokens: Vec<String> = Vec::new();
    }
}

section! {
    /// How the frozen base is stored. Without this table it is not quantized.
    pub struct QuantizationSection "quantization" {
        /// The format of the codes.
        kind: QuantKind = QuantKind::Nf4;
        /// Weights that share one scale.
        block_size: usize = 64, OneOf(&[32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0]);
        /// Whether the scales are quantized too.
        double_quant: bool = true;
        /// Linear layers that stay as they are stored, such as "down_proj" or "layers.0"; embedding and head always do.
        skip_modules: Vec<String> = Vec::new();
        /// Whether a GPU keeps the weights in bf16 too, 2 bytes each, so that no step dequantizes them; LoRA in bf16 alone.
        bf16_copy: bool = false;
    }
}

section! {
    /// The adapter to train, in PEFT's words. Without this table all weights are trained.
    pub struct AdapterSection "adapter" {
        /// The kind of adapter.
        kind: AdapterKind = AdapterKind::Lora;
        /// Rank of the update.
        r: usize = 16, Between(1.0, MOST_RANK);
        /// The update is scaled by `lora_alpha / r`.
        lora_alpha: f64 = 32.0, Above(0.0);
        /// Share of the adapter's inputs set to zero in training.
        lora_dropout: f64 = 0.0, FromToBelow(0.0, 1.0);
        /// Modules that get an adapter: every linear layer but the head, a list of names, or a pattern.
        target_modules: TargetModules = TargetModules::AllLinear;
        /// Modules among them that get none.
        exclude_modules: Vec<String> = Vec::new();
        /// Modules trained in full beside the adapter, such as "lm_head".
        modules_to_save: Vec<String> = Vec::new();
        /// Other ranks by module-name pattern; the first that matches counts.
        rank_pattern: Patterns<usize> = Patterns::default(), Between(1.0, MOST_RANK);
        /// Other alphas by module-name pattern; the first that matches counts.
        alpha_pattern: Patterns<f64> = Patterns::default(), Above(0.0);
        /// Scale by `lora_alpha / sqrt(r)` instead (arXiv:2312.03732).
        use_rslora: bool = false;
        /// How a new adapter starts.
        init: AdapterInit = AdapterInit::Default;
        /// A saved PEFT adapter to start from.
        path: Option<DataSource> = None;
    }
}

section! {
    /// What the model learns from.
    pub struct DataSection "data" {
        /// Files, folders or hub data sets to train on, or tables (`[[data.train]]`) of `path` and, where they are needed,
        /// `format`, `columns`, `prompt_template`, `system`, `weight`, `limit`, `split`. `--dataset` sets it.
        train: Vec<RowSource> = Vec::new();
        /// The same, held out for evaluation. `--eval-dataset` sets it.
        eval: Vec<RowSource> = Vec::new();
        /// Training rows to hold out for evaluation instead: a share below 1, or a number of rows.
        eval_split: Option<f64> = None, Above(0.0);
        /// What a row looks like; auto: recognised, and said.
        format: DataFormat = DataFormat::Auto;
        /// Tokens of a row at most; auto: the positions that the model has, 2,048 at most.
        max_seq_len: AutoOr<usize> = AutoOr::Auto, Between(LEAST_SEQ_LEN as f64, 16_777_216.0);
        /// Put several samples into one row, without attention between them.
        packing: bool = true;
        /// A new order each epoch, from the seed; else file order.
        shuffle: bool = true;
        /// Tokens that count in the loss: the assistant's, all, those of its last turn, or those of some roles; `turns` ("all",
        /// "last") and `ends` ("turn", "all", "last", "none": the tokens that end messages) say more. Plain text has nothing
        /// to mask.
        train_on: TrainOn = TrainOn::default();
        /// A chat template, as Jinja text, its file or its name, such as "chatml"; default: the tokenizer's own.
        chat_template: Option<Template> = None;
        /// What happens to a row that cannot be used.
        on_bad_row: OnBadRow = OnBadRow::Stop;
        /// What happens to a row longer than `max_seq_len`.
        on_long_row: OnLongRow = OnLongRow::Truncate;
        /// Encode special tokens that stand in the texts of a chat as text, as transformers' option of this name does.
        sanitize_control_tokens: bool = false;
    }
}

section! {
    /// The objective of the training.
    pub struct ObjectiveSection "objective" {
        /// The loss that is minimized: cross_entropy of the tokens that `data.train_on` selects.
        kind: ObjectiveKind = ObjectiveKind::CrossEntropy;
    }
}

section! {
    /// How long and in which portions.
    pub struct TrainSection "train" {
        /// Passes over the data.
        epochs: f64 = 3.0, Above(0.0);
        /// Optimizer steps of the whole run; set, it decides instead of `epochs`.
        max_steps: Option<u64> = None, AtLeast(1.0);
        /// Rows that go through the model at once, on each rank; "auto": of the rows of a step, which are then
        /// `gradient_accumulation_steps` on each rank, as many as memory holds and speed gains by.
        micro_batch_size: AutoOr<usize> = AutoOr::Fixed(1), Between(1.0, 65_536.0);
        /// Micro-batches whose gradients make one optimizer step, on each rank; "auto": as many as leave thirty steps in an
        /// epoch, where the rows allow that, and 8 rows a step over all ranks at most.
        gradient_accumulation_steps: AutoOr<usize> = AutoOr::Fixed(1), Between(1.0, MOST_ACCUMULATION as f64);
        /// Rows (with packing: packed rows) of one optimizer step over all ranks, a multiple of `micro_batch_size` times the
        /// ranks; excludes `gradient_accumulation_steps`, which then follows from it.
        global_batch_size: Option<usize> = None, Between(1.0, MOST_GLOBAL_BATCH as f64);
        /// Gradients are scaled down to this norm; 0: never.
        max_grad_norm: f64 = 1.0, AtLeast(0.0);
        /// What happens at a step whose loss or gradient norm is NaN or infinite, and which therefore updates nothing:
        /// the run stops; skips it; rolls back to the newest checkpoint and goes on with the rows after it.
        on_nan: OnNan = OnNan::Stop;
        /// Steps in a row that are skipped, or roll-backs to one checkpoint, before the run stops after all.
        nan_limit: u64 = 3, AtLeast(1.0);
        /// Seed of everything random.
        seed: u64 = 0, AtLeast(0.0);
        /// Compute activations again in the backward pass to save memory.
        recompute: AutoOr<Recompute> = AutoOr::Auto;
    }
}

section! {
    /// What turns gradients into updates.
    pub struct OptimizerSection "optimizer" {
        /// The algorithm of the optimizer.
        kind: OptimizerKind = OptimizerKind::Adamw;
        /// Learning rate after the warm-up; about 2e-4 for an adapter, 2e-5 for all weights.
        learning_rate: Option<f64> = None, Above(0.0);
        /// Decay of the two moments.
        betas: [f64; 2] = [0.9, 0.999], FromToBelow(0.0, 1.0);
        /// Added to the denominator.
        eps: f64 = 1e-8, Above(0.0);
        /// Decoupled weight decay; biases and norms are spared.
        weight_decay: f64 = 0.0, AtLeast(0.0);
        /// How the moments are stored.
        state: StateDtype = StateDtype::F32;
        /// What is updated where all weights train in bf16: an f32 copy of each, or the bf16 weights themselves, with
        /// stochastic rounding, which takes 4 to 6 bytes less a weight.
        master: MasterWeights = MasterWeights::F32;
        /// Learning rate of B over that of A (LoRA+, arXiv:2402.12354).
        lora_plus_ratio: f64 = 1.0, Above(0.0);
    }
}

section! {
    /// The learning rate over the steps, in the schedules of transformers.
    pub struct SchedulerSection "scheduler" {
        /// How the learning rate falls after the warm-up.
        kind: SchedulerKind = SchedulerKind::Cosine;
        /// Steps of the linear warm-up from 0; excludes `warmup_ratio`.
        warmup_steps: Option<u64> = None, AtLeast(0.0);
        /// The warm-up as a share of all steps, rounded down and a tenth of them at most; excludes `warmup_steps`.
        warmup_ratio: Option<f64> = None, Between(0.0, 1.0);
        /// Learning rate at the end, as a share of `learning_rate`.
        min_lr_ratio: f64 = 0.0, Between(0.0, 1.0);
        /// Restarts of "cosine_with_restarts".
        num_cycles: usize = 1, AtLeast(1.0);
        /// Exponent of "polynomial".
        power: f64 = 1.0, Above(0.0);
        /// Steps of the fall at the end of "warmup_stable_decay", which needs it.
        num_decay_steps: Option<u64> = None, AtLeast(1.0);
    }
}

section! {
    /// How the work is spread over devices.
    pub struct ParallelSection "parallel" {
        /// Where parameters, gradients and optimizer states live.
        strategy: Strategy = Strategy::Auto;
        /// Ranks in a group of "hsdp"; default: those of one host.
        shard_size: Option<usize> = None, AtLeast(1.0);
        /// What is kept in host memory: the optimizer's state, or parameters and gradients too.
        offload: Offload = Offload::None;
        /// A folder on a fast disk; parameters are kept in a file there instead. With `offload = "params"`.
        offload_folder: Option<Folder> = None;
        /// Type in which gradients are summed over ranks.
        reduce_dtype: ReduceDtype = ReduceDtype::F32;
        /// Seconds without progress after which a rank counts as hung and the run ends, loading and saving included;
        /// default: learned from the run, 15 at least.
        timeout_secs: Option<u64> = None, Between(1.0, 31_536_000.0);
    }
}

section! {
    /// What is saved on the way and at the end.
    pub struct CheckpointSection "checkpoint" {
        /// Steps between checkpoints; "epoch": one after each epoch and at the end; "auto": also after thirty minutes without
        /// one; "never": none.
        save_steps: StepInterval = StepInterval::Auto, AtLeast(1.0);
        /// How many checkpoints are kept.
        keep_last: usize = 2, AtLeast(1.0);
        /// Write while training goes on: each rank its share of the tensors as they were.
        async_save: bool = true;
        /// Type of the weights a run leaves; auto: the base's.
        output_dtype: Dtype = Dtype::Auto;
    }
}

section! {
    /// Evaluation on `data.eval`. Where that is given, a run also evaluates before its first step, to compare with.
    pub struct EvalSection "eval" {
        /// Steps between evaluations; "epoch": one after each epoch; "auto": "epoch" with `keep_best`, else "never"; "never":
        /// none between the first step and the last.
        steps: StepInterval = StepInterval::Auto, AtLeast(1.0);
        /// Evaluate after the last step; false leaves out this evaluation alone.
        at_end: bool = true;
        /// Leave the weights of the evaluation with the lowest loss instead of the last ones; each new best is saved as a
        /// checkpoint, which stays.
        keep_best: bool = false;
        /// End the run early after so many evaluations in a row whose loss is not the lowest so far. With `keep_best`, also
        /// where that is not set.
        patience: Option<u64> = None, AtLeast(1.0);
        /// Held-out rows that the model answers at each evaluation: terminal, metrics.jsonl and report.html show the answers.
        /// An answer has 64 tokens at most.
        samples: usize = 0, Between(0.0, 64.0);
    }
}

section! {
    /// What a run reports.
    pub struct LogSection "log" {
        /// Steps between lines of progress.
        every_steps: u64 = 1, AtLeast(1.0);
        /// Write TensorBoard event files.
        tensorboard: bool = true;
        /// Serve the figures of the last step at this address, under /metrics, for Prometheus; not set: nothing listens.
        metrics_address: Option<ListenAddress> = None;
        /// 10^12 operations a second that each rank's device could do at best, which `mfu` and `hfu` are shares of; default:
        /// what its maker says of a GPU that is known, and neither figure on another device.
        peak_tflops: Option<f64> = None, Above(0.0);
        /// Also log to the MLflow server at this address.
        mlflow: Option<ServerUrl> = None;
        /// The experiment there that the run belongs to, which is made where there is none; default: "finetune".
        mlflow_experiment: Option<String> = None;
    }
}

section! {
    /// A trace of some steps, in the words of PyTorch's profiler schedule: `trace/rank-N.json` in the output folder.
    pub struct ProfileSection "profile" {
        /// Steps at the beginning of a cycle that are not traced.
        wait: u64 = 1, AtLeast(0.0);
        /// Steps after them that are traced and forgotten, while caches fill.
        warmup: u64 = 1, AtLeast(0.0);
        /// Steps after these that are traced and kept; 0: nothing is traced.
        active: u64 = 0, AtLeast(0.0);
        /// How many such cycles there are; 0: as many as the run has room for.
        repeat: u64 = 1, AtLeast(0.0);
    }
}

section! {
    /// Alarms about trouble in a run: on the terminal, in alerts.jsonl in the output folder, and to whoever is named here.
    pub struct AlertsSection "alerts" {
        /// What is watched for; not set: everything, once `command` or `webhook` is.
        rules: Option<Vec<AlertRule>> = None;
        /// A program and its arguments, without a shell, to start for each alarm, which it gets as JSON on its input.
        command: Option<AlertProgram> = None;
        /// An address to post each alarm to as JSON. Who knows it can post there: it is kept out of everything that a run
        /// leaves and says, and `env:NAME` keeps it out of the recipe too.
        webhook: Option<WebhookSource> = None;
    }
}
