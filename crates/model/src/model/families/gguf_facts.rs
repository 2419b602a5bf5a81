//! The facts that llama.cpp computes a family by, as its sources state them (src/models/*.cpp, src/llama-model.cpp).

use crate::ops::glu::Activation;

/// The architecture of llama.cpp that a family becomes, and its differences from what most of them compute.
#[derive(Debug, Clone, Copy)]
pub struct GgufFacts {
    /// The architecture's name in llama.cpp.
    pub architecture: &'static str,
    /// The activation of the gate, which no key changes.
    pub activation: Activation,
    /// Rotary positions turn neighbouring elements, so the halves of each head of q and k are interleaved.
    pub interleaves_heads: bool,
    /// The heads together must be as wide as `hidden_size`.
    pub heads_fill_hidden: bool,
    /// Biases of `o_proj` and of the MLP are read.
    pub reads_all_biases: bool,
    /// The soft-cap on attention scores.
    pub attention_softcap: GgufSoftcap,
    /// The soft-cap on logits.
    pub logit_softcap: GgufSoftcap,
    /// The head must be the embedding.
    pub needs_tied_head: bool,
    /// The sliding windows; none: every layer attends to all that came before.
    pub windows: Option<GgufWindows>,
    /// A key says how much of a head is rotated; otherwise all of it is.
    pub rotates_partly: bool,
    /// Sliding layers have a rotary base of their own.
    pub has_local_rope: bool,
    /// Values of `rope_type` that it computes besides default, linear and dynamic.
    pub rope_types: &'static [&'static str],
    /// The number of layers at which scores are scaled by `hidden_size / num_attention_heads`, not by the width of a
    /// head.
    pub scales_by_hidden_at: Option<usize>,
    /// The models of 80 layers that get the mixture of types of Llama 2 70B.
    pub seventy_b: GgufSeventyB,
    /// Parts of a model's name by which alone llama.cpp knows that special tokens take the white space after them.
    pub stripping_names: &'static [&'static str],
}

/// The presence of a soft-cap in an architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufSoftcap {
    /// No key sets a cap.
    Never,
    /// A key sets the cap, and without it scores are not capped.
    Optional,
    /// Scores are always capped.
    Always,
}

impl GgufSoftcap {
    /// True if the architecture computes a model with this cap.
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
    /// Every layer slides but the last of so many, unless a key says otherwise.
    pub period: usize,
    /// Layers slide even if no key gives the width of the window.
    pub always: bool,
}

/// The models of 80 layers that llama.cpp takes for Llama 2 70B.
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
    /// The facts of an architecture that computes as most do: SiLU, all of a head rotated, no windows, no caps.
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
