//! Facts about llama.cpp's computation of each family, from its sources (src/models/*.cpp,
//! src/llama-model.cpp).

use crate::ops::activation::PlainActivation;
use crate::ops::experts::RouterScores;
use crate::ops::glu::Activation;

/// A family's architecture in llama.cpp, and its differences from most others.
#[derive(Debug, Clone, Copy)]
pub struct GgufFacts {
    /// The architecture's name in llama.cpp; empty if finetune does not write the family as GGUF.
    pub architecture: &'static str,
    /// The activation of the gate, which no key changes.
    pub activation: Activation,
    /// The activations of an MLP without a gate that llama.cpp computes alike, the family's first;
    /// empty: the architecture has a gate.
    pub plain_activations: &'static [PlainActivation],
    /// True if the activation of an MLP without a gate is xIELU, whose numbers are keys.
    pub has_xielu: bool,
    /// True if rotary positions rotate neighbouring elements, so the export interleaves the halves
    /// of each head of q and k.
    pub interleaves_heads: bool,
    /// True if the total width of all heads must be `hidden_size`.
    pub heads_fill_hidden: bool,
    /// True if llama.cpp reads a bias of `o_proj`.
    pub reads_o_bias: bool,
    /// True if llama.cpp reads biases of the MLP.
    pub reads_mlp_biases: bool,
    /// True if llama.cpp needs every bias that it reads.
    pub needs_biases: bool,
    /// The name of the norm before the head.
    pub final_norm: &'static str,
    /// The name of the norm before the MLP.
    pub mlp_norm: &'static str,
    /// The names of the norms before attention and the MLP where both read the block's input.
    pub parallel_norms: [&'static str; 2],
    /// True if a key says whether both mixers read the block's input.
    pub names_parallel: bool,
    /// True if blocks without a norm before the MLP are parallel, whatever that key says.
    pub parallel_by_norm: bool,
    /// True if both mixers always read the block's input.
    pub always_parallel: bool,
    /// True if layers with a window have heads of their own.
    pub own_heads: bool,
    /// True if gate and up are two tensors even where the checkpoint has one.
    pub splits_gate_up: bool,
    /// True if keys set the factors on embeddings, attention scores, mixers and logits.
    pub reads_factors: bool,
    /// True if a key sets the factor on logits alone.
    pub reads_logit_factor: bool,
    /// True if attention scores have no factor, whatever the width of a head.
    pub unscaled_scores: bool,
    /// The soft-cap on attention scores.
    pub attention_softcap: GgufSoftcap,
    /// The soft-cap on logits.
    pub logit_softcap: GgufSoftcap,
    /// True if the head must be the embedding, false if it must not; `None`: either.
    pub tied_head: Option<bool>,
    /// The experts; `None`: the architecture has none.
    pub experts: Option<GgufExperts>,
    /// The sliding windows; `None`: every layer attends to all previous tokens.
    pub windows: Option<GgufWindows>,
    /// True if a key sets the rotated width of a head; otherwise all of it is rotated.
    pub rotates_partly: bool,
    /// The rotary positions of sliding layers, where they differ from those of the others.
    pub local_rope: Option<GgufLocalRope>,
    /// The layers without positions.
    pub no_positions: GgufNoPositions,
    /// The growth of queries in layers without positions; `None`: they do not grow.
    pub fixed_growth: Option<GgufGrowth>,
    /// Models with this many experts have no norms of q and k, all other models have them; `None`:
    /// the tensors say so.
    pub unnormed_at: Option<usize>,
    /// Supported values of `rope_type` besides default, linear and dynamic.
    pub rope_types: &'static [&'static str],
    /// True if keys set the ramp of yarn, `beta_fast` and `beta_slow`.
    pub reads_yarn_ramp: bool,
    /// True if the ends of yarn's ramp are no whole numbers in the family; llama.cpp rounds them.
    pub rounds_yarn_ramp: bool,
    /// True if attention is latent.
    pub has_latents: bool,
    /// True if `mscale` and `mscale_all_dim` of yarn may be other equal numbers than 1 in latent
    /// attention.
    pub scales_latents_freely: bool,
    /// True if layers without key heads are short convolutions.
    pub has_short_convs: bool,
    /// True if config.json without a scaling of rotary positions has one.
    pub scales_by_default: bool,
    /// Gated DeltaNet; `None`: every layer has attention.
    pub delta: Option<GgufDelta>,
    /// The number of layers at which `hidden_size / num_attention_heads` scales the scores, instead
    /// of the width of a head.
    pub scales_by_hidden_at: Option<usize>,
    /// The models of 80 layers that get the mixture of types of Llama 2 70B.
    pub seventy_b: GgufSeventyB,
    /// Substrings of model names. By these alone llama.cpp detects that special tokens strip the
    /// white space after them.
    pub stripping_names: &'static [&'static str],
}

/// Support for a soft-cap in an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufSoftcap {
    /// No key sets a cap.
    Never,
    /// A key sets the cap; without it there is no cap.
    Optional,
    /// Scores are always capped.
    Always,
}

impl GgufSoftcap {
    /// Returns whether the architecture supports a model with this cap.
    pub fn fits(self, cap: Option<f64>) -> bool {
        match self {
            GgufSoftcap::Never => cap.is_none(),
            GgufSoftcap::Optional => true,
            GgufSoftcap::Always => cap.is_some(),
        }
    }
}

/// The experts of an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufExperts {
    /// True if the weights of a token's experts sum to 1; `None`: a key says so.
    pub renormalizes: Option<bool>,
    /// True if a key sets their inner width, instead of that of a model without experts.
    pub has_width: bool,
    /// True if a key sets the number of first layers without experts.
    pub has_dense_layers: bool,
    /// True if a key sets the interval of layers with experts. Without this key and that of
    /// `has_dense_layers` every layer has experts.
    pub has_step: bool,
    /// True if a key sets the number of shared experts, in widths of an expert.
    pub has_shared_count: bool,
    /// True if keys name the function of the scores, and a factor on the weights.
    pub has_scores: bool,
    /// True if that factor has an effect.
    pub reads_factor: bool,
    /// The function of the scores without such keys.
    pub scores: RouterScores,
    /// True if the choice always adds a stored bias to each score.
    pub needs_bias: bool,
    /// True if an MLP beside the experts has another width.
    pub has_mlp: bool,
}

impl GgufExperts {
    /// Experts in each layer, chosen by a softmax, whose weights sum to 1.
    pub(super) const USUAL: Self = GgufExperts {
        renormalizes: Some(true),
        has_width: true,
        has_dense_layers: false,
        has_step: false,
        has_shared_count: false,
        has_scores: false,
        reads_factor: false,
        scores: RouterScores::Softmax,
        needs_bias: false,
        has_mlp: false,
    };
    /// The experts of DeepSeek-V3.
    pub(super) const DEEPSEEK: Self = GgufExperts {
        renormalizes: None,
        has_dense_layers: true,
        has_shared_count: true,
        has_scores: true,
        reads_factor: true,
        ..GgufExperts::USUAL
    };
}

/// Gated DeltaNet in an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufDelta {
    /// True if the value heads of different key heads alternate, instead of those of one key head
    /// being side by side.
    pub tiles_value_heads: bool,
    /// True if a key shares out the rotated pairs among the axes of images.
    pub has_sections: bool,
}

/// The sliding windows of an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufWindows {
    /// Every layer slides except the last of each `period`, unless a key overrides it.
    pub period: usize,
    /// The models that slide.
    pub models: GgufSliding,
}

/// The models of an architecture of llama.cpp whose layers slide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufSliding {
    /// Models with the key for the width of the window.
    WithKey,
    /// Every model, even without the key.
    Always,
    /// Every model of this number of layers, and no other.
    OfLayers(usize),
    /// Every model, by blocks of this many tokens instead of windows.
    InBlocks(usize),
}

/// The growth of queries with their positions in an architecture of llama.cpp, from a first
/// position of 1 on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GgufGrowth {
    /// The factor on the logarithm.
    pub beta: f64,
    /// The number of positions between two steps.
    pub every: usize,
}

/// The rotary positions of the sliding layers of an architecture of llama.cpp: never scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufLocalRope {
    /// A key sets their base.
    OwnBase,
    /// Their base is that of the other layers.
    SameBase,
}

/// The layers without positions in an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufNoPositions {
    /// None of the layers.
    Never,
    /// All layers or none, by a key.
    AllByKey,
    /// The last layer of each period of this length.
    LastOf(usize),
    /// The layers of full attention, in a model with windows.
    BesideWindows,
}

impl GgufNoPositions {
    /// Returns the layers without positions that llama.cpp computes, for a model with `missing`
    /// ones of which `slides` marks the sliding ones.
    pub fn wanted(self, missing: &[bool], slides: &[bool]) -> Vec<bool> {
        let any_slides = slides.contains(&true);
        let wanted = |layer: usize| match self {
            GgufNoPositions::Never => false,
            GgufNoPositions::AllByKey => missing[0],
            GgufNoPositions::LastOf(period) => layer % period == period - 1,
            GgufNoPositions::BesideWindows => any_slides && !slides[layer],
        };
        (0..missing.len()).map(wanted).collect()
    }
}

/// The models of 80 layers that llama.cpp treats as Llama 2 70B.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufSeventyB {
    /// No model of the architecture.
    Never,
    /// Models that have fewer key-value heads than query heads.
    Grouped,
    /// Every model of 80 layers.
    Always,
}

impl GgufFacts {
    /// The facts of a family that finetune does not write as GGUF.
    pub(super) const NONE: Self = GgufFacts {
        architecture: "",
        activation: Activation::Silu,
        plain_activations: &[],
        has_xielu: false,
        interleaves_heads: false,
        heads_fill_hidden: false,
        reads_o_bias: false,
        reads_mlp_biases: false,
        needs_biases: false,
        final_norm: "output_norm",
        mlp_norm: "ffn_norm",
        parallel_norms: ["attn_norm", "ffn_norm"],
        names_parallel: false,
        parallel_by_norm: false,
        always_parallel: false,
        own_heads: false,
        splits_gate_up: false,
        reads_factors: false,
        reads_logit_factor: false,
        unscaled_scores: false,
        attention_softcap: GgufSoftcap::Never,
        logit_softcap: GgufSoftcap::Never,
        tied_head: None,
        experts: None,
        windows: None,
        rotates_partly: false,
        local_rope: None,
        no_positions: GgufNoPositions::Never,
        fixed_growth: None,
        unnormed_at: None,
        rope_types: &["yarn"],
        reads_yarn_ramp: false,
        rounds_yarn_ramp: false,
        has_latents: false,
        scales_latents_freely: false,
        has_short_convs: false,
        scales_by_default: false,
        delta: None,
        scales_by_hidden_at: None,
        seventy_b: GgufSeventyB::Never,
        stripping_names: &[],
    };

    /// Returns the most common facts: SiLU, fully rotated heads, no windows, no caps.
    pub(super) const fn usual(architecture: &'static str) -> Self {
        GgufFacts { architecture, ..GgufFacts::NONE }
    }
}
