//! Every key of a recipe, declared once: documentation, name, type, default, range.
//!
//! Names and meanings follow transformers and PEFT if they have the key.

use super::command_line::CommandLine;
use super::enums::{
    AdapterInit, AdapterKind, AlertRule, Attention, BaseProducts, ComputeDtype, DataFormat, Dtype,
    FDivergence, LossType, MasterWeights, ModelInit, ObjectiveKind, Offload, OnBadRow, OnLongRow, OnNan,
    OptimizerKind, QuantKind, Recompute, ReduceDtype, SchedulerKind, StateDtype, Strategy,
};
use super::listen_address::ListenAddress;
use super::row_source::RowSource;
use super::schema::section;
use super::source::{DataSource, Folder, Template};
use super::step_interval::StepInterval;
use super::train_on::TrainOn;
use super::value::Bounds::{Above, AtLeast, Between, FromToBelow, OneOf};
use super::value::{AutoOr, Patterns, TargetModules};
use super::webhook::WebhookSource;

/// Highest rank of an adapter: above the width of any adapted matrix, and low enough to count its
/// parameters.
const MOST_RANK: f64 = 65_536.0;

/// Shortest row in tokens: one token and the next one to predict.
pub const LEAST_SEQ_LEN: usize = 2;
/// Maximum number of micro-batches of a step on a rank.
pub const MOST_ACCUMULATION: usize = 1 << 20;
/// Maximum number of rows of a step over all ranks.
const MOST_GLOBAL_BATCH: usize = 1 << 20;

section! {
    /// The model to start from.
    pub struct ModelSection "model" {
        /// Folder in Hugging Face layout, or hub id such as `Qwen/Qwen2.5-0.5B`; see `--model`.
        id: Option<DataSource> = None;
        /// Branch, tag or commit of a hub id.
        revision: String = "main".into();
        /// Source of the weights: the model's files, or seeded random numbers.
        init: ModelInit = ModelInit::Pretrained;
        /// Dtype of the weights and the computation; auto: bf16 on a GPU, f32 on the CPU.
        dtype: ComputeDtype = ComputeDtype::Auto;
        /// Dequantize a base in FP8, MXFP4, NVFP4, GPTQ, AWQ, HQQ, compressed-tensors or GGUF while
        /// it is read; false: keep it packed in memory under an adapter.
        dequantize: bool = true;
        /// Tiled attention, or the plain formula as a reference.
        attention: Attention = Attention::Flash;
        /// Tokens to train, also beside an adapter. Tokens that the tokenizer lacks are added to
        /// it. If the embedding and head have no unused rows, they grow by new rows, which start as
        /// the mean of the others.
        new_tokens: Vec<String> = Vec::new();
    }
}

section! {
    /// Quantization of the frozen base. Without this table it is not quantized.
    pub struct QuantizationSection "quantization" {
        /// Format of the quantized weights.
        kind: QuantKind = QuantKind::Nf4;
        /// Weights that share one scale, for every kind.
        block_size: usize = 64, OneOf(&[32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0]);
        /// Quantize the scales too.
        double_quant: bool = true;
        /// Linear layers that are not quantized, such as "down_proj" or "layers.0"; embedding and
        /// head never are.
        skip_modules: Vec<String> = Vec::new();
        /// Also keep the weights in bf16 on a GPU, 2 bytes each, so that no step dequantizes them;
        /// only for LoRA in bf16.
        bf16_copy: bool = false;
    }
}

section! {
    /// The adapter to train, with PEFT's names. Without this table all weights are trained.
    pub struct AdapterSection "adapter" {
        /// The kind of adapter.
        kind: AdapterKind = AdapterKind::Lora;
        /// Rank of the update.
        r: usize = 16, Between(1.0, MOST_RANK);
        /// The update is scaled by `lora_alpha / r`.
        lora_alpha: f64 = 32.0, Above(0.0);
        /// Fraction of the adapter's inputs set to zero in training.
        lora_dropout: f64 = 0.0, FromToBelow(0.0, 1.0);
        /// Modules with an adapter: all linear layers except the head, a list of names, a pattern.
        target_modules: TargetModules = TargetModules::AllLinear;
        /// Modules among them without an adapter.
        exclude_modules: Vec<String> = Vec::new();
        /// Modules trained in full beside the adapter, such as "lm_head".
        modules_to_save: Vec<String> = Vec::new();
        /// Other ranks by module-name pattern; the first match counts.
        rank_pattern: Patterns<usize> = Patterns::default(), Between(1.0, MOST_RANK);
        /// Other alphas by module-name pattern; the first match counts.
        alpha_pattern: Patterns<f64> = Patterns::default(), Above(0.0);
        /// Scale by `lora_alpha / sqrt(r)` instead (arXiv:2312.03732).
        use_rslora: bool = false;
        /// Initial values of a new adapter.
        init: AdapterInit = AdapterInit::Default;
        /// A saved PEFT adapter to start from.
        path: Option<DataSource> = None;
    }
}

section! {
    /// Training and evaluation data.
    pub struct DataSection "data" {
        /// Files, folders or hub data sets to train on, or tables (`[[data.train]]`) of `path` and,
        /// optionally, `format`, `columns`, `prompt_template`, `system`, `weight`, `limit`,
        /// `split`. `--dataset` sets it.
        train: Vec<RowSource> = Vec::new();
        /// Data sets for evaluation, in the same form. `--eval-dataset` sets it.
        eval: Vec<RowSource> = Vec::new();
        /// Training rows to hold out for evaluation instead: a fraction below 1, or a row count.
        eval_split: Option<f64> = None, Above(0.0);
        /// Format of the rows; auto: detected from the rows and printed.
        format: DataFormat = DataFormat::Auto;
        /// Maximum tokens of a row; auto: the model's number of positions, up to 2,048.
        max_seq_len: AutoOr<usize> = AutoOr::Auto, Between(LEAST_SEQ_LEN as f64, 16_777_216.0);
        /// Put several samples into one row, without attention between them.
        packing: bool = true;
        /// Shuffle each epoch by the seed; false: file order.
        shuffle: bool = true;
        /// Tokens that count in the loss: the assistant's, all, those of its last turn, or those of
        /// some roles. A table also sets `turns` ("all", "last") and `ends` ("turn", "all", "last",
        /// "none": the tokens that end messages). In plain text all tokens count.
        train_on: TrainOn = TrainOn::default();
        /// Chat template, as Jinja text, its file or its name, such as "chatml"; default: the
        /// tokenizer's own.
        chat_template: Option<Template> = None;
        /// Action for an unusable row.
        on_bad_row: OnBadRow = OnBadRow::Stop;
        /// Action for a row longer than `max_seq_len`.
        on_long_row: OnLongRow = OnLongRow::Truncate;
        /// Encode special tokens in chat texts as plain text, like this option of transformers.
        sanitize_control_tokens: bool = false;
    }
}

section! {
    /// Objective of the training.
    pub struct ObjectiveSection "objective" {
        /// Loss that is minimized; cross_entropy: that of the tokens that `data.train_on` selects.
        /// The others learn from rows with chosen and rejected answers, or (kto) labelled answers.
        kind: ObjectiveKind = ObjectiveKind::CrossEntropy;
        /// Losses of dpo, kto or cpo; several of dpo add up. Default: "sigmoid", for kto "kto".
        loss_type: Option<Vec<LossType>> = None;
        /// Factor of each loss in `loss_type`; default: 1 each.
        loss_weights: Option<Vec<f64>> = None, AtLeast(0.0);
        /// Strength of the preference: with a reference, a higher value keeps the model nearer to
        /// it; of orpo, the factor of the odds ratio.
        beta: f64 = 0.1, Above(0.0);
        /// Rate at which the two answers of a pair are assumed to be exchanged; for the losses
        /// "robust", "exo_pair", "aot" and "aot_unpaired" of dpo, and "sigmoid" of cpo and simpo.
        label_smoothing: f64 = 0.0, FromToBelow(0.0, 0.5);
        /// Weight of the tokens of the longer answer beyond the length of the shorter one (LD-DPO,
        /// arXiv:2409.06411); not set: 1.
        ld_alpha: Option<f64> = None, Between(0.0, 1.0);
        /// Divergence from the reference that dpo limits (arXiv:2309.16240).
        f_divergence_type: FDivergence = FDivergence::ReverseKl;
        /// Exponent of "alpha_divergence".
        f_alpha_divergence_coef: f64 = 0.5, Above(0.0);
        /// Weigh each pair of dpo by the model's own probability of its answers (WPO,
        /// arXiv:2406.11827).
        use_weighting: bool = false;
        /// Temperature of the blend in "discopop".
        discopop_tau: f64 = 0.05, Above(0.0);
        /// Compute the reference's log-probabilities of all rows before the first step, and keep no
        /// reference model in memory during training.
        precompute_ref_log_probs: bool = false;
        /// Weight of the good answers of kto.
        desirable_weight: f64 = 1.0, AtLeast(0.0);
        /// Weight of the bad answers of kto.
        undesirable_weight: f64 = 1.0, AtLeast(0.0);
        /// Weight of the cross-entropy of the chosen answers in cpo.
        cpo_alpha: f64 = 1.0, AtLeast(0.0);
        /// Margin between the two answers of a pair that simpo trains for.
        simpo_gamma: f64 = 0.5, AtLeast(0.0);
    }
}

section! {
    /// Length of the training and batch sizes.
    pub struct TrainSection "train" {
        /// Passes over the data.
        epochs: f64 = 3.0, Above(0.0);
        /// Optimizer steps of the whole run; if set, it overrides `epochs`.
        max_steps: Option<u64> = None, AtLeast(1.0);
        /// Rows of a micro-batch on each rank; "auto": `gradient_accumulation_steps` then counts
        /// the rows of a step on each rank, and finetune splits them into micro-batches as large as
        /// memory allows and speed gains.
        micro_batch_size: AutoOr<usize> = AutoOr::Fixed(1), Between(1.0, 65_536.0);
        /// Micro-batches per optimizer step on each rank; "auto": as many as leave thirty steps in
        /// an epoch, if the rows allow that, and at most 8 rows a step over all ranks.
        gradient_accumulation_steps: AutoOr<usize> = AutoOr::Fixed(1), Between(1.0, MOST_ACCUMULATION as f64);
        /// Rows (with packing: packed rows) of one optimizer step over all ranks, a multiple of
        /// `micro_batch_size` times the ranks; excludes `gradient_accumulation_steps`, which then
        /// follows from it.
        global_batch_size: Option<usize> = None, Between(1.0, MOST_GLOBAL_BATCH as f64);
        /// Maximum norm of the gradients, which are scaled down to it; 0: no limit.
        max_grad_norm: f64 = 1.0, AtLeast(0.0);
        /// Coefficient of the loss that balances the load of experts; "auto": the
        /// `router_aux_loss_coef` of config.json; 0: no such loss, as in transformers.
        router_aux_loss: AutoOr<f64> = AutoOr::Fixed(0.0), AtLeast(0.0);
        /// Action at a step whose loss or gradient norm is NaN or infinite, and which therefore
        /// updates nothing: stop the run, skip the step, or roll back to the newest checkpoint and
        /// continue with the rows after the step.
        on_nan: OnNan = OnNan::Stop;
        /// Maximum skipped steps in a row, or rollbacks to one checkpoint; the next bad step stops
        /// the run.
        nan_limit: u64 = 3, AtLeast(1.0);
        /// Uniform noise on the embeddings of training rows (NEFTune), at most this number divided
        /// by the square root of the row's tokens times the model's width; 5 is usual. 0: no noise.
        neftune_alpha: f64 = 0.0, AtLeast(0.0);
        /// Seed of all random numbers.
        seed: u64 = 0, AtLeast(0.0);
        /// Activations that the backward pass recomputes to save memory: "none"; "selective": the
        /// results of attention; "first:N": the first N blocks; "block": all blocks; "every:N" and
        /// "every:sqrt": runs of N blocks, from the input of the first one. "auto": no more blocks
        /// than the memory demands.
        recompute: AutoOr<Recompute> = AutoOr::Auto;
        /// Products of the frozen linear layers below an adapter, in training and its evaluations:
        /// in `model.dtype`, or beside bf16 in fp8 (e4m3, a scale for each row), which is faster on
        /// GPUs from compute capability 8.9 on. Adapters, routers, embedding and head stay in bf16.
        base_products: BaseProducts = BaseProducts::Dtype;
        /// Launch each pass over a block as one CUDA graph on a GPU: faster where launches take
        /// longer than their work, as with small models and few tokens. The results are the same.
        cuda_graphs: bool = false;
    }
}

section! {
    /// The optimizer that applies gradients.
    pub struct OptimizerSection "optimizer" {
        /// Algorithm of the optimizer.
        kind: OptimizerKind = OptimizerKind::Adamw;
        /// Learning rate after the warm-up; about 2e-4 for an adapter, 2e-5 for all weights.
        learning_rate: Option<f64> = None, Above(0.0);
        /// Decay rates of the two moments.
        betas: [f64; 2] = [0.9, 0.999], FromToBelow(0.0, 1.0);
        /// Added to the denominator.
        eps: f64 = 1e-8, Above(0.0);
        /// Decoupled weight decay; not applied to biases and norms.
        weight_decay: f64 = 0.0, AtLeast(0.0);
        /// Storage format of the moments.
        state: StateDtype = StateDtype::F32;
        /// Weights that the optimizer updates if all weights train in bf16: an f32 copy of each, or
        /// the bf16 weights themselves, with stochastic rounding, which saves 4 to 6 bytes per
        /// weight.
        master: MasterWeights = MasterWeights::F32;
        /// Ratio of the learning rate of B to that of A (LoRA+, arXiv:2402.12354).
        lora_plus_ratio: f64 = 1.0, Above(0.0);
    }
}

section! {
    /// Learning-rate schedule, as in transformers.
    pub struct SchedulerSection "scheduler" {
        /// Shape of the learning rate after the warm-up.
        kind: SchedulerKind = SchedulerKind::Cosine;
        /// Steps of the linear warm-up from 0; excludes `warmup_ratio`.
        warmup_steps: Option<u64> = None, AtLeast(0.0);
        /// Warm-up as a fraction of all steps, rounded down, and at most a tenth of them; excludes
        /// `warmup_steps`.
        warmup_ratio: Option<f64> = None, Between(0.0, 1.0);
        /// Learning rate at the end, as a fraction of `learning_rate`.
        min_lr_ratio: f64 = 0.0, Between(0.0, 1.0);
        /// Number of cycles of "cosine_with_restarts".
        num_cycles: usize = 1, AtLeast(1.0);
        /// Exponent of "polynomial".
        power: f64 = 1.0, Above(0.0);
        /// Steps of the decay at the end of "warmup_stable_decay", which requires this key.
        num_decay_steps: Option<u64> = None, AtLeast(1.0);
    }
}

section! {
    /// Distribution of the work over devices.
    pub struct ParallelSection "parallel" {
        /// Distribution of parameters, gradients and optimizer states over ranks.
        strategy: Strategy = Strategy::Auto;
        /// Ranks in a group of "hsdp"; default: the ranks of one host.
        shard_size: Option<usize> = None, AtLeast(1.0);
        /// State in host memory: the optimizer's, or also parameters and gradients.
        offload: Offload = Offload::None;
        /// Folder on a fast disk for a file that holds the parameters instead of host memory.
        /// Requires `offload = "params"`.
        offload_folder: Option<Folder> = None;
        /// Dtype in which gradients are summed over ranks.
        reduce_dtype: ReduceDtype = ReduceDtype::F32;
        /// Seconds without progress, also while loading or saving, after which a rank counts as
        /// hung and the run ends; default: learned from the run, at least 15.
        timeout_secs: Option<u64> = None, Between(1.0, 31_536_000.0);
    }
}

section! {
    /// Checkpoints and the result.
    pub struct CheckpointSection "checkpoint" {
        /// Steps between checkpoints; "epoch": after each epoch and at the end; "auto": also after
        /// thirty minutes without one; "never": none.
        save_steps: StepInterval = StepInterval::Auto, AtLeast(1.0);
        /// Number of checkpoints to keep.
        keep_last: usize = 2, AtLeast(1.0);
        /// Keep the checkpoints after each so many steps too; a multiple of `save_steps`.
        keep_every: Option<u64> = None, AtLeast(1.0);
        /// Write checkpoints while training continues; each rank writes its share of a snapshot of
        /// the tensors.
        async_save: bool = true;
        /// Dtype of the weights in the result; auto: the base's.
        output_dtype: Dtype = Dtype::Auto;
    }
}

section! {
    /// Evaluation on `data.eval`. If that is set, a run also evaluates before its first step, for
    /// comparison.
    pub struct EvalSection "eval" {
        /// Steps between evaluations; "epoch": after each epoch; "auto": "epoch" with `keep_best`,
        /// else "never"; "never": none between the first step and the last.
        steps: StepInterval = StepInterval::Auto, AtLeast(1.0);
        /// Evaluate after the last step; false skips only this evaluation.
        at_end: bool = true;
        /// Return the weights of the evaluation with the lowest loss instead of the last ones; each
        /// new best is saved as a checkpoint, which is kept.
        keep_best: bool = false;
        /// End the run early after this many evaluations in a row without a new lowest loss.
        /// Implies `keep_best`.
        patience: Option<u64> = None, AtLeast(1.0);
        /// Held-out rows that the model answers at each evaluation: terminal, metrics.jsonl and
        /// report.html show the answers. An answer has at most 64 tokens.
        samples: usize = 0, Between(0.0, 64.0);
    }
}

section! {
    /// Logging of a run.
    pub struct LogSection "log" {
        /// Steps between progress lines.
        every_steps: u64 = 1, AtLeast(1.0);
        /// Write TensorBoard event files.
        tensorboard: bool = true;
        /// Serve the metrics of the last step at this address, under /metrics, for Prometheus; not
        /// set: no port is opened.
        metrics_address: Option<ListenAddress> = None;
        /// Peak speed of each rank's device in 10^12 operations per second, the base of `mfu` and
        /// `hfu`; default: the maker's value for a known GPU; on other devices neither metric
        /// exists.
        peak_tflops: Option<f64> = None, Above(0.0);
        /// Program and arguments to start, without a shell, that gets the run and each line of
        /// metrics.jsonl as JSON on its input, such as a script of integrations/.
        command: Option<CommandLine> = None;
    }
}

section! {
    /// Trace of some steps, scheduled as in PyTorch's profiler: `trace/rank-N.json` in the output
    /// folder.
    pub struct ProfileSection "profile" {
        /// Untraced steps at the beginning of a cycle.
        wait: u64 = 1, AtLeast(0.0);
        /// Steps after them that are traced and discarded, while caches fill.
        warmup: u64 = 1, AtLeast(0.0);
        /// Steps after these whose trace is kept; 0: tracing is off.
        active: u64 = 0, AtLeast(0.0);
        /// Number of cycles; 0: until the run ends.
        repeat: u64 = 1, AtLeast(0.0);
    }
}

section! {
    /// Alerts about problems of a run: on the terminal, in alerts.jsonl in the output folder, and
    /// to the targets below.
    pub struct AlertsSection "alerts" {
        /// Conditions to watch for; not set: all, if `command` or `webhook` is set.
        rules: Option<Vec<AlertRule>> = None;
        /// Program and arguments to start, without a shell, for each alert, which it reads as JSON
        /// on its input.
        command: Option<CommandLine> = None;
        /// URL to which each alert is posted as JSON. Anyone who knows it can post there, so
        /// finetune never prints or stores it; `env:NAME` also keeps it out of the recipe.
        webhook: Option<WebhookSource> = None;
    }
}
