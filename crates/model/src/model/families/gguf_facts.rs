//! Facts about llama.cpp's computation of each family, from its sources (src/models/*.cpp,
//! src/llama-model.cpp).

use crate::ops::glu::Activation;

/// A family's architecture in llama.cpp, and its differences from most others.
#[derive(Debug, Clone, Copy)]
pub struct GgufFacts {
    /// The architecture's name in llama.cpp; empty if finetune does not write the family as GGUF.
    pub architecture: &'static str,
    /// The activation of the gate, which no key changes.
    pub activation: Activation,
    /// True if rotary positions rotate neighbouring elements, so the export interleaves the halves
    /// of each head of q and k.
    pub interleaves_heads: bool,
    /// True if the total width of all heads must be `hidden_size`.
    pub heads_fill_hidden: bool,
    /// True if llama.cpp reads biases of `o_proj` and of the MLP.
    pub reads_all_biases: bool,
    /// The soft-cap on attention scores.
    pub attention_softcap: GgufSoftcap,
    /// The soft-cap on logits.
    pub logit_softcap: GgufSoftcap,
    /// True if the head must be the embedding.
    pub needs_tied_head: bool,
    /// The sliding windows; `None`: every layer attends to all previous tokens.
    pub windows: Option<GgufWindows>,
    /// True if a key sets the rotated width of a head; otherwise all of it is rotated.
    pub rotates_partly: bool,
    /// True if sliding layers have their own rotary base.
    pub has_local_rope: bool,
    /// Supported values of `rope_type` besides default, linear and dynamic.
    pub rope_types: &'static [&'static str],
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

/// The sliding windows of an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufWindows {
    /// Every layer slides except the last of each `period`, unless a key overrides it.
    pub period: usize,
    /// True if layers slide even without a key for the width of the window.
    pub always: bool,
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
    pub(super) const NONE: Self = GgufFacts::usual("");

    /// Returns the most common facts: SiLU, fully rotated heads, no windows, no caps.
    pub(super) const fn usual(architecture: &'static str) -> Self {
        GgufFacts {
            architecture,
            activation: Activation::Silu,
            interleaves_heads: false,
            heads_fill_hidden: false,
            reads_all_biases: false,
            attention_softcap: GgufSoftcap::Never,
            logit_softcap: GgufSoftcap::Never,
            needs_tied_head: false,
            windows: None,
            rotates_partly: false,
            has_local_rope: false,
            rope_types: &["yarn"],
            scales_by_hidden_at: None,
            seventy_b: GgufSeventyB::Never,
            stripping_names: &[],
        }
    }
}
