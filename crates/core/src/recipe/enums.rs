//! Closed lists of texts that recipe keys accept.

pub use super::recompute::{BlockStorage, Recompute, StoredActivations};

/// Declares a closed list of texts as an enum; the first is the default.
macro_rules! choices {
    (
        $(#[doc = $doc:literal])+
        pub enum $type:ident {
            $(#[doc = $first_doc:literal])+ $first:ident = $first_text:literal,
            $( $(#[doc = $choice_doc:literal])+ $choice:ident = $text:literal, )*
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub enum $type {
            $(#[doc = $first_doc])+ #[default] $first,
            $( $(#[doc = $choice_doc])+ $choice, )*
        }

        impl $type {
            /// Every choice, in declaration order.
            pub const ALL: &'static [$type] = &[$type::$first, $($type::$choice,)*];
            /// The text of every choice, in the same order.
            pub const NAMES: &'static [&'static str] = &[$first_text, $($text,)*];

            /// The text in a recipe.
            pub fn as_str(self) -> &'static str {
                match self { $type::$first => $first_text, $($type::$choice => $text,)* }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::Error;

            fn from_str(text: &str) -> $crate::error::Result<Self> {
                Self::ALL.iter().copied().find(|choice| choice.as_str() == text).ok_or_else(|| {
                    $crate::error::Error::user(format!("unknown choice `{text}`"))
                        .because(format!("accepted: {}", Self::NAMES.join(", ")))
                })
            }
        }
    };
}

choices! {
    /// Source of the model's weights.
    pub enum ModelInit {
        /// From the model's safetensors files.
        Pretrained = "pretrained",
        /// Seeded random numbers; only config.json and the tokenizer are read.
        Random = "random",
    }
}

choices! {
    /// Floating-point type of the model's computation. f16 is missing because it would need loss
    /// scaling.
    pub enum ComputeDtype {
        /// bf16 on a GPU, f32 on the CPU.
        Auto = "auto",
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16: 8 bits of exponent, 8 significant bits.
        Bf16 = "bf16",
    }
}

choices! {
    /// Products of frozen weights with activations and gradients.
    pub enum BaseProducts {
        /// In the dtype of the computation.
        Dtype = "dtype",
        /// In e4m3 with a scale for each row: 4 bits of exponent, 4 significant bits.
        Fp8 = "fp8",
    }
}

choices! {
    /// Floating-point type in which weights are stored.
    pub enum Dtype {
        /// finetune chooses; see the documentation of the key.
        Auto = "auto",
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16: 8 bits of exponent, 8 significant bits.
        Bf16 = "bf16",
        /// IEEE half precision.
        F16 = "f16",
    }
}

choices! {
    /// Implementation of attention.
    pub enum Attention {
        /// Tiled, memory linear in the sequence length.
        Flash = "flash",
        /// The plain formula with the whole score matrix, as a reference.
        Eager = "eager",
    }
}

choices! {
    /// Storage format of the frozen base.
    pub enum QuantKind {
        /// 4-bit NormalFloat (QLoRA, arXiv:2305.14314).
        Nf4 = "nf4",
        /// 4-bit floating point.
        Fp4 = "fp4",
        /// 8-bit integers with a scale per block.
        Int8 = "int8",
    }
}

choices! {
    /// Kind of the trained adapter.
    pub enum AdapterKind {
        /// Low-rank update (arXiv:2106.09685).
        Lora = "lora",
        /// Low-rank direction with a learned magnitude (arXiv:2402.09353).
        Dora = "dora",
    }
}

choices! {
    /// Initial values of a new adapter.
    pub enum AdapterInit {
        /// A uniform (Kaiming, as PEFT), B zero.
        Default = "default",
        /// A normal with deviation 1/r, B zero.
        Gaussian = "gaussian",
        /// The principal singular vectors of the base weight (arXiv:2404.02948).
        Pissa = "pissa",
        /// The residue of quantizing the base weight (arXiv:2310.08659).
        Loftq = "loftq",
    }
}

choices! {
    /// Format of a data set's rows.
    pub enum DataFormat {
        /// Detected from the rows and printed.
        Auto = "auto",
        /// `messages` of `role` and `content`, the format of OpenAI.
        Messages = "messages",
        /// `conversations` of `from` and `value`.
        Sharegpt = "sharegpt",
        /// `chosen` and `rejected`: pairs of answers, for objectives that compare them.
        Preference = "preference",
        /// The same rows, of which the chosen answer alone is trained.
        PreferenceChosen = "preference_chosen",
        /// `instruction`, `output` and optional `input`.
        Alpaca = "alpaca",
        /// `instruction`, `response` and optional `context`.
        Instruction = "instruction",
        /// `prompt` and `completion`.
        PromptCompletion = "prompt_completion",
        /// `question` and `answer`.
        QuestionAnswer = "question_answer",
        /// Rows of plain text.
        Text = "text",
        /// `input_ids` and optional `labels` and `attention_mask`: tokenized rows.
        Tokens = "tokens",
    }
}

choices! {
    /// Objective that a run minimizes.
    pub enum ObjectiveKind {
        /// Cross-entropy of the trained tokens.
        CrossEntropy = "cross_entropy",
        /// Direct preference optimization: pairs against a reference (arXiv:2305.18290).
        Dpo = "dpo",
        /// Kahneman-Tversky optimization: single answers, good or bad (arXiv:2402.01306).
        Kto = "kto",
        /// Odds-ratio preference optimization: pairs, without a reference (arXiv:2403.07691).
        Orpo = "orpo",
        /// Contrastive preference optimization: pairs, without a reference (arXiv:2401.08417).
        Cpo = "cpo",
        /// Simple preference optimization: pairs by mean log-probability (arXiv:2405.14734).
        Simpo = "simpo",
    }
}

/// The rows that an objective reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectiveRows {
    /// Rows with one text or chat.
    Single,
    /// Rows with a chosen and a rejected answer.
    Pairs,
    /// Rows with an answer and its label, or pairs, of which each makes two.
    Labelled,
}

impl ObjectiveKind {
    /// The rows that it reads.
    pub fn rows(self) -> ObjectiveRows {
        match self {
            ObjectiveKind::CrossEntropy => ObjectiveRows::Single,
            ObjectiveKind::Kto => ObjectiveRows::Labelled,
            ObjectiveKind::Dpo | ObjectiveKind::Orpo | ObjectiveKind::Cpo | ObjectiveKind::Simpo => {
                ObjectiveRows::Pairs
            }
        }
    }

    /// True if TRL encodes its rows as CPO's: special tokens come from the trainer, and each answer
    /// has its own prompt.
    pub fn is_cpo_like(self) -> bool {
        matches!(self, ObjectiveKind::Orpo | ObjectiveKind::Cpo | ObjectiveKind::Simpo)
    }
}

choices! {
    /// Loss of a preference objective, named as in TRL.
    pub enum LossType {
        /// Negative log-sigmoid of the scaled difference of the two answers.
        Sigmoid = "sigmoid",
        /// Hinge of the scaled difference (arXiv:2305.10425).
        Hinge = "hinge",
        /// Squared distance of the difference per token from 1 / (2 beta) (arXiv:2310.12036).
        Ipo = "ipo",
        /// `sigmoid` of the difference per token.
        SigmoidNorm = "sigmoid_norm",
        /// `sigmoid` without the bias of labels that are wrong at the rate `label_smoothing`
        /// (arXiv:2403.00409).
        Robust = "robust",
        /// Reverse divergence from the smoothed label (arXiv:2402.00856).
        ExoPair = "exo_pair",
        /// Noise-contrastive alignment (arXiv:2402.05369).
        NcaPair = "nca_pair",
        /// Binary classification of each answer (arXiv:2404.04656).
        BcoPair = "bco_pair",
        /// Self-play preference optimization with hard labels (arXiv:2405.00675).
        SppoHard = "sppo_hard",
        /// Optimal transport between sorted margins of a micro-batch (arXiv:2406.05882).
        Aot = "aot",
        /// The same between sorted answers of a micro-batch.
        AotUnpaired = "aot_unpaired",
        /// Anchored: chosen up, rejected down (arXiv:2408.06266).
        ApoZero = "apo_zero",
        /// Anchored: both down, rejected more (arXiv:2408.06266).
        ApoDown = "apo_down",
        /// Discovered loss: `sigmoid` blended with an exponential (arXiv:2406.08414).
        Discopop = "discopop",
        /// Cross-entropy of the chosen answers.
        Sft = "sft",
        /// The loss of KTO.
        Kto = "kto",
        /// `apo_zero` of single answers, without an estimate of the divergence.
        ApoZeroUnpaired = "apo_zero_unpaired",
        /// The loss of SimPO.
        Simpo = "simpo",
    }
}

choices! {
    /// Divergence between the trained model and its reference.
    pub enum FDivergence {
        /// Reverse Kullback-Leibler divergence.
        ReverseKl = "reverse_kl",
        /// Forward Kullback-Leibler divergence.
        ForwardKl = "forward_kl",
        /// The Jensen-Shannon divergence.
        JsDivergence = "js_divergence",
        /// Alpha divergence of `f_alpha_divergence_coef`.
        AlphaDivergence = "alpha_divergence",
    }
}

choices! {
    /// Action for an unusable row.
    pub enum OnBadRow {
        /// The run stops and names the row.
        Stop = "stop",
        /// The row is skipped, counted and logged.
        Skip = "skip",
    }
}

choices! {
    /// Action for a row with more than `max_seq_len` tokens.
    pub enum OnLongRow {
        /// Its end is cut.
        Truncate = "truncate",
        /// The row is dropped.
        Drop = "drop",
        /// The run stops and names the row.
        Stop = "stop",
    }
}

choices! {
    /// Action when the loss or gradient norm of a step is NaN or infinite. No choice applies that
    /// step's update.
    pub enum OnNan {
        /// The run stops and names the first bad value.
        Stop = "stop",
        /// The run continues with the next step.
        Skip = "skip",
        /// The run restores its newest checkpoint and continues with the rows after the bad step.
        Rollback = "rollback",
    }
}

choices! {
    /// Algorithm that updates the parameters.
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay (arXiv:1711.05101).
        Adamw = "adamw",
    }
}

choices! {
    /// Storage format of the optimizer's two moments.
    pub enum StateDtype {
        /// 32 bits each.
        F32 = "f32",
        /// 8 bits each, in blocks (arXiv:2110.02861).
        Int8 = "int8",
    }
}

choices! {
    /// Weights that the optimizer updates when the model trains in bf16.
    pub enum MasterWeights {
        /// An f32 copy of each weight.
        F32 = "f32",
        /// The bf16 weights themselves, by stochastic rounding (arXiv:2010.06192).
        None = "none",
    }
}

choices! {
    /// Learning-rate schedule, named as in transformers.
    pub enum SchedulerKind {
        /// Half a cosine down to `min_lr_ratio`.
        Cosine = "cosine",
        /// A straight line down to `min_lr_ratio`.
        Linear = "linear",
        /// Constant, without warm-up.
        Constant = "constant",
        /// Constant after the warm-up.
        ConstantWithWarmup = "constant_with_warmup",
        /// `num_cycles` half cosines, each from the top.
        CosineWithRestarts = "cosine_with_restarts",
        /// Half a cosine down to `min_lr_ratio`, which is required.
        CosineWithMinLr = "cosine_with_min_lr",
        /// A power of the remaining fraction of the steps.
        Polynomial = "polynomial",
        /// Falls with the inverse square root of the step.
        InverseSqrt = "inverse_sqrt",
        /// Constant, then half a cosine down over the last `num_decay_steps`.
        WarmupStableDecay = "warmup_stable_decay",
    }
}

impl SchedulerKind {
    /// True if the rate starts with a warm-up.
    pub fn has_warmup(self) -> bool {
        self != SchedulerKind::Constant
    }

    /// True if the rate falls to the floor of `min_lr_ratio` at the last step.
    pub fn has_floor(self) -> bool {
        use SchedulerKind::{Constant, ConstantWithWarmup, InverseSqrt};
        !matches!(self, Constant | ConstantWithWarmup | InverseSqrt)
    }
}

choices! {
    /// Distribution of parameters, gradients and optimizer states over ranks.
    pub enum Strategy {
        /// The fastest strategy that fits.
        Auto = "auto",
        /// One device, without other ranks.
        Single = "single",
        /// A full copy on each rank.
        Ddp = "ddp",
        /// Optimizer states sharded.
        Zero1 = "zero1",
        /// Optimizer states and gradients sharded.
        Zero2 = "zero2",
        /// Parameters, gradients and optimizer states sharded.
        Fsdp = "fsdp",
        /// `fsdp` inside groups of `shard_size` ranks, copies across them.
        Hsdp = "hsdp",
    }
}

choices! {
    /// State that is kept in host memory.
    pub enum Offload {
        /// Everything stays on the device.
        None = "none",
        /// The optimizer states.
        Optimizer = "optimizer",
        /// Optimizer states and parameters.
        Params = "params",
    }
}

choices! {
    /// Dtype in which gradients are summed over ranks.
    pub enum ReduceDtype {
        /// 32-bit floating point.
        F32 = "f32",
        /// 16 bits: half the traffic, with sums rounded to 8 significant bits.
        Bf16 = "bf16",
    }
}

choices! {
    /// Selection among the messages of the trained roles.
    pub enum TrainedTurns {
        /// All of them.
        All = "all",
        /// Only the last of a chat.
        Last = "last",
    }
}

choices! {
    /// Selection of trained end tokens of messages (EOS, `<|im_end|>`).
    pub enum TrainedEnds {
        /// End tokens of the trained messages.
        Turn = "turn",
        /// End tokens of all messages.
        All = "all",
        /// End token of a chat's last trained message.
        Last = "last",
        /// None of them: the model does not learn to stop.
        None = "none",
    }
}

choices! {
    /// A condition that raises an alert during a run.
    pub enum AlertRule {
        /// A loss far above the previous losses.
        LossSpike = "loss_spike",
        /// No step for much longer than a usual step.
        Stall = "stall",
        /// A loss or gradient norm that is NaN or infinite.
        NonFinite = "non_finite",
        /// A gradient that is zero step after step.
        NoProgress = "no_progress",
        /// A device that is idle most of the time.
        IdleDevice = "idle_device",
        /// A disk with too little free space for the next checkpoint.
        LowDisk = "low_disk",
    }
}
