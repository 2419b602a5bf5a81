//! The closed lists of texts that recipe keys choose from.

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
            /// Every choice, in the order declared.
            pub const ALL: &'static [$type] = &[$type::$first, $($type::$choice,)*];
            /// The text of every choice, in the same order.
            pub const NAMES: &'static [&'static str] = &[$first_text, $($text,)*];

            /// The text that a recipe holds.
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
    /// Where the weights of the model come from.
    pub enum ModelInit {
        /// From the model's safetensors files.
        Pretrained = "pretrained",
        /// Seeded random numbers; only config.json and the tokenizer are read.
        Random = "random",
    }
}

choices! {
    /// The floating-point type that a model is computed in. Training in f16 would need loss scaling, so it is not one.
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
    /// The floating-point type that weights are stored in.
    pub enum Dtype {
        /// The program chooses; the key's own documentation says how.
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
    /// How attention is computed.
    pub enum Attention {
        /// Tiled, memory linear in the sequence length.
        Flash = "flash",
        /// The plain formula with the whole score matrix, as a reference.
        Eager = "eager",
    }
}

choices! {
    /// How the frozen base is stored.
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
    /// Which kind of adapter is trained.
    pub enum AdapterKind {
        /// Low-rank update (arXiv:2106.09685).
        Lora = "lora",
        /// Low-rank direction with a learned magnitude (arXiv:2402.09353).
        Dora = "dora",
    }
}

choices! {
    /// How a new adapter starts.
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
    /// What a row of a data set looks like.
    pub enum DataFormat {
        /// Recognised from the first rows, and said.
        Auto = "auto",
        /// `messages` of `role` and `content`, as OpenAI has them.
        Messages = "messages",
        /// `conversations` of `from` and `value`.
        Sharegpt = "sharegpt",
        /// `chosen` and `rejected`: pairs of answers, for objectives that compare them.
        Preference = "preference",
        /// The same rows, of which the chosen answer alone is trained.
        PreferenceChosen = "preference_chosen",
        /// `instruction`, `output`, perhaps `input`.
        Alpaca = "alpaca",
        /// `instruction` and `response`, perhaps `context`.
        Instruction = "instruction",
        /// `prompt` and `completion`.
        PromptCompletion = "prompt_completion",
        /// `question` and `answer`.
        QuestionAnswer = "question_answer",
        /// Rows of plain text.
        Text = "text",
        /// `input_ids`, perhaps `labels` and `attention_mask`: rows that are tokens already.
        Tokens = "tokens",
    }
}

choices! {
    /// The objective that a run minimizes.
    pub enum ObjectiveKind {
        /// The cross-entropy of the trained tokens.
        CrossEntropy = "cross_entropy",
    }
}

choices! {
    /// What happens to a row that cannot be used.
    pub enum OnBadRow {
        /// The run stops and names it.
        Stop = "stop",
        /// It is left out, counted and said.
        Skip = "skip",
    }
}

choices! {
    /// What happens to a row with more than `max_seq_len` tokens.
    pub enum OnLongRow {
        /// Its end is cut off.
        Truncate = "truncate",
        /// It is left out.
        Drop = "drop",
        /// The run stops and names it.
        Stop = "stop",
    }
}

choices! {
    /// What happens when the loss or the gradient norm of a step is NaN or infinite; it updates nothing in any case.
    pub enum OnNan {
        /// The run ends and names the first bad value.
        Stop = "stop",
        /// The run goes on with the next step.
        Skip = "skip",
        /// The run goes back to its newest checkpoint and on with the rows after the step.
        Rollback = "rollback",
    }
}

choices! {
    /// Whether activations are kept or computed again in the backward pass.
    pub enum Recompute {
        /// All are kept: fastest.
        None = "none",
        /// Only each block's input is kept: least memory.
        Block = "block",
    }
}

choices! {
    /// The algorithm that updates the parameters.
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay (arXiv:1711.05101).
        Adamw = "adamw",
    }
}

choices! {
    /// How the optimizer's two moments are stored.
    pub enum StateDtype {
        /// 32 bits each.
        F32 = "f32",
        /// 8 bits each, in blocks (arXiv:2110.02861).
        Int8 = "int8",
    }
}

choices! {
    /// What the optimizer updates where weights train in bf16.
    pub enum MasterWeights {
        /// An f32 copy of each weight.
        F32 = "f32",
        /// The bf16 weights themselves, by stochastic rounding (arXiv:2010.06192).
        None = "none",
    }
}

choices! {
    /// The learning rate over the steps, named as in transformers.
    pub enum SchedulerKind {
        /// Half a cosine down to `min_lr_ratio`.
        Cosine = "cosine",
        /// A straight line down to `min_lr_ratio`.
        Linear = "linear",
        /// Always the same, without warm-up.
        Constant = "constant",
        /// Always the same after the warm-up.
        ConstantWithWarmup = "constant_with_warmup",
        /// `num_cycles` half cosines, each from the top.
        CosineWithRestarts = "cosine_with_restarts",
        /// Half a cosine down to `min_lr_ratio`, which must be given.
        CosineWithMinLr = "cosine_with_min_lr",
        /// A power of the remaining share of the steps.
        Polynomial = "polynomial",
        /// Falls with the inverse square root of the step.
        InverseSqrt = "inverse_sqrt",
        /// Constant, then half a cosine down over the last `num_decay_steps`.
        WarmupStableDecay = "warmup_stable_decay",
    }
}

impl SchedulerKind {
    /// Whether the rate starts with a warm-up.
    pub fn has_warmup(self) -> bool {
        self != SchedulerKind::Constant
    }

    /// Whether the rate comes down to a floor at the last step, which `min_lr_ratio` sets.
    pub fn has_floor(self) -> bool {
        use SchedulerKind::{Constant, ConstantWithWarmup, InverseSqrt};
        !matches!(self, Constant | ConstantWithWarmup | InverseSqrt)
    }
}

choices! {
    /// Where parameters, gradients and optimizer states live.
    pub enum Strategy {
        /// The fastest that fits.
        Auto = "auto",
        /// One device, without peers.
        Single = "single",
        /// A whole copy on each rank.
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
    /// What is kept in host memory.
    pub enum Offload {
        /// Nothing leaves the device.
        None = "none",
        /// The optimizer's states.
        Optimizer = "optimizer",
        /// Optimizer states and parameters.
        Params = "params",
    }
}

choices! {
    /// The type in which gradients are summed over ranks.
    pub enum ReduceDtype {
        /// 32-bit floating point.
        F32 = "f32",
        /// 16 bits: half of what is sent, sums rounded to 8 significant bits.
        Bf16 = "bf16",
    }
}

choices! {
    /// A kind of trouble that a run raises an alarm about.
    pub enum AlertRule {
        /// A loss far above those before it.
        LossSpike = "loss_spike",
        /// No step for much longer than a step takes.
        Stall = "stall",
        /// A loss or gradient norm that is NaN or infinite.
        NonFinite = "non_finite",
        /// A gradient that is zero step after step.
        NoProgress = "no_progress",
        /// A device that waits for most of the time.
        IdleDevice = "idle_device",
        /// A disk without room for the next checkpoint.
        LowDisk = "low_disk",
    }
}
