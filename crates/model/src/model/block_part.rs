//! The modules of a block by their role, independent of a family's names for them.

/// The role of a module in its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockPart {
    /// The projection to queries.
    QProj,
    /// The projection to keys.
    KProj,
    /// The projection to values.
    VProj,
    /// One projection to queries, keys and values, side by side in this order.
    QkvProj,
    /// The projection of attention's output.
    OProj,
    /// The MLP's projection to the input of its activation.
    GateProj,
    /// The MLP's projection to the factor of the activated gate. Without a gate, the projection to
    /// the input of its activation.
    UpProj,
    /// One projection to gate and up, side by side in this order.
    GateUpProj,
    /// The MLP's projection back to the width of the model.
    DownProj,
    /// The router's projection to a logit for each expert.
    Router,
    /// The bias of each expert's score, for the choice alone.
    RouterBias,
    /// The projection of the expert of this number to the input of its activation.
    ExpertGate(u16),
    /// The projection of an expert to the factor of the activated gate.
    ExpertUp(u16),
    /// One projection of an expert to gate and up (gpt-oss, Llama 4).
    ExpertGateUp(u16),
    /// The projection of an expert back to the width of the model.
    ExpertDown(u16),
    /// The biases of gate and up of all experts, whose columns alternate.
    ExpertGateUpBias,
    /// The biases of the second projections of all experts.
    ExpertDownBias,
    /// The shared expert's projection to the input of its activation.
    SharedGate,
    /// The shared expert's projection to the factor of the activated gate.
    SharedUp,
    /// The shared expert's projection back to the width of the model.
    SharedDown,
    /// The projection to the one logit of the factor on the shared expert.
    SharedFactor,
    /// Gated DeltaNet's projection to queries, keys and values.
    DeltaQkv,
    /// Gated DeltaNet's projection to the gates of its output.
    DeltaZ,
    /// Gated DeltaNet's projection to the strength of each head's update.
    DeltaB,
    /// Gated DeltaNet's projection to the decay of each head's state.
    DeltaA,
    /// One projection to queries, keys, values and gates, by key head (Qwen3-Next).
    DeltaQkvz,
    /// One projection to strengths and decays, by key head (Qwen3-Next).
    DeltaBa,
    /// Gated DeltaNet's output projection.
    DeltaOut,
    /// The weights of Gated DeltaNet's convolution.
    DeltaConv,
    /// The logarithm of each head's rate of decay.
    DeltaRate,
    /// The addend of the projected decay of each head.
    DeltaStep,
    /// The gated norm of each head's output.
    DeltaNorm,
    /// The projection to the gates and the input of a short convolution.
    ConvIn,
    /// The weights of a short convolution.
    ConvTaps,
    /// The output projection of a short convolution.
    ConvOut,
    /// Latent attention's projection to the latent of queries.
    LatentQ,
    /// Latent attention's projection to the latent of keys and values, and to the rotated part of
    /// keys.
    LatentKv,
    /// Latent attention's projection from the latent to queries.
    LatentQUp,
    /// Latent attention's projection from the latent to keys and values.
    LatentKvUp,
    /// The norm of the latent of queries.
    LatentQNorm,
    /// The norm of the latent of keys and values.
    LatentKvNorm,
    /// The norm on each head's query.
    QNorm,
    /// The norm on each head's key.
    KNorm,
    /// The logit of each head that joins attention's softmax without a value.
    Sinks,
    /// The norm before attention.
    AttnNorm,
    /// The norm on attention's output, before the residual sum (Gemma, OLMo 2).
    AttnPostNorm,
    /// The norm before the MLP.
    MlpNorm,
    /// The norm before attention, of mixers in parallel with a norm each.
    ParallelAttnNorm,
    /// The norm before the MLP, of mixers in parallel with a norm each.
    ParallelMlpNorm,
    /// The norm on the MLP's output, before the residual sum (Gemma, OLMo 2).
    MlpPostNorm,
    /// The norm on the output of an MLP beside experts.
    MlpOutNorm,
    /// The norm before experts beside an MLP.
    ExpertsNorm,
    /// The norm on the output of experts beside an MLP.
    ExpertsOutNorm,
    /// The gain of the norm before a router that has one.
    RouterScale,
    /// The factor on the weight of each expert.
    ExpertFactors,
    /// The stored number that multiplies the block's output.
    OutputFactor,
    /// The number whose softplus is the curvature of xIELU above 0.
    XieluPositive,
    /// The number whose softplus, plus the slope at 0, is its curvature below 0.
    XieluNegative,
    /// Its slope at 0.
    XieluBeta,
    /// The bound of its exponent.
    XieluEps,
    /// The projection of the output of both mixers to the gate of the per-layer input.
    PerLayerGate,
    /// The projection of the gated per-layer input to the width of the model.
    PerLayerProjection,
    /// The norm on the projected per-layer input, before the residual sum.
    PerLayerNorm,
    /// The projection of embeddings to the per-layer inputs of all blocks, in the first block.
    PerLayerModel,
    /// The norm on these inputs of each block, in the first block.
    PerLayerModelNorm,
    /// AltUp's projection to a value for each stream.
    AltUpRouter,
    /// The norm before AltUp's router.
    AltUpRouterNorm,
    /// AltUp's projection to the factors of predictions.
    AltUpPrediction,
    /// AltUp's projection to the factors of corrections.
    AltUpCorrection,
    /// AltUp's factor on the corrected stream before the per-layer input.
    AltUpOutputScale,
    /// Laurel's projection to its rank.
    LaurelLeft,
    /// Laurel's projection back.
    LaurelRight,
    /// The norm on Laurel's output.
    LaurelNorm,
    /// The projection of embeddings to the stream after that of this number, in the first block.
    StreamProjection(u16),
    /// The projection of the stream after that of this number, in the last block.
    StreamUnprojection(u16),
}

/// The parameters of xIELU: both curvatures, the slope at 0, and the bound of the exponent.
pub const XIELU: [BlockPart; 4] =
    [BlockPart::XieluPositive, BlockPart::XieluNegative, BlockPart::XieluBeta, BlockPart::XieluEps];

/// Linear layers of a block that read the same input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearGroup {
    /// Queries, keys and values; all first projections of another token mixer.
    Qkv,
    /// Latent attention's queries from their latent.
    QUp,
    /// Latent attention's keys and values from their latent.
    KvUp,
    /// The output projection of the token mixer.
    O,
    /// The MLP's gate and up, or up alone.
    GateUp,
    /// The MLP's second projection.
    Down,
    /// The router of experts.
    Router,
    /// Gate and up of the expert of this number.
    ExpertGateUp(u16),
    /// The second projection of an expert.
    ExpertDown(u16),
    /// Gate and up of the shared expert.
    SharedGateUp,
    /// The second projection of the shared expert.
    SharedDown,
    /// The factor on the shared expert.
    SharedFactor,
    /// The gate of the per-layer input.
    PerLayerGate,
    /// The projection of the gated per-layer input.
    PerLayerProjection,
    /// The projection of embeddings to the per-layer inputs of all blocks.
    PerLayerModel,
    /// The router of AltUp's streams.
    AltUpRouter,
    /// AltUp's factors of predictions.
    AltUpPrediction,
    /// AltUp's factors of corrections.
    AltUpCorrection,
    /// Laurel's first projection.
    LaurelLeft,
    /// Laurel's second projection.
    LaurelRight,
    /// The projections of embeddings to streams.
    StreamProjections,
    /// The projection of the stream after that of this number.
    StreamUnprojection(u16),
}

impl LinearGroup {
    /// Returns the groups outside experts in the order of their products in a block's forward or
    /// backward. Latents go through the projection of queries first in both. Not listed is the
    /// group that makes the per-layer inputs of all blocks: one block alone multiplies by it.
    pub fn in_order(in_backward: bool) -> [LinearGroup; 8] {
        use LinearGroup as G;
        if in_backward {
            [G::PerLayerProjection, G::PerLayerGate, G::Down, G::GateUp, G::O, G::QUp, G::KvUp, G::Qkv]
        } else {
            [G::Qkv, G::QUp, G::KvUp, G::O, G::GateUp, G::Down, G::PerLayerGate, G::PerLayerProjection]
        }
    }
}

impl BlockPart {
    /// Returns the number that stands for `{}` in its name: that of its expert or of its stream.
    pub(super) fn number(self) -> Option<u16> {
        match self {
            BlockPart::StreamProjection(number) | BlockPart::StreamUnprojection(number) => Some(number),
            _ => self.expert(),
        }
    }

    /// Returns the number of the expert that it belongs to, if it belongs to one.
    pub fn expert(self) -> Option<u16> {
        match self {
            BlockPart::ExpertGate(expert)
            | BlockPart::ExpertUp(expert)
            | BlockPart::ExpertGateUp(expert)
            | BlockPart::ExpertDown(expert) => Some(expert),
            _ => None,
        }
    }

    /// Returns true for a part of the whole model that the first or the last block computes: its
    /// name has no block.
    pub fn is_of_model(self) -> bool {
        self.makes_per_layer_inputs()
            || matches!(self, BlockPart::StreamProjection(_) | BlockPart::StreamUnprojection(_))
    }

    /// Returns true for a part that makes the per-layer inputs of all blocks, in the first block.
    pub(crate) fn makes_per_layer_inputs(self) -> bool {
        matches!(self, BlockPart::PerLayerModel | BlockPart::PerLayerModelNorm)
    }

    /// Returns true for the last layer of a channel mixer, whose output only a norm reads again.
    pub fn is_last_of_mlp(self) -> bool {
        matches!(self, BlockPart::DownProj | BlockPart::ExpertDown(_) | BlockPart::SharedDown)
    }

    /// Returns true for a linear layer that is never quantized: its few outputs decide about all
    /// values of a token.
    pub fn is_gate(self) -> bool {
        let alt_up = [BlockPart::AltUpRouter, BlockPart::AltUpPrediction, BlockPart::AltUpCorrection];
        self.is_router()
            || alt_up.contains(&self)
            || matches!(self, BlockPart::DeltaB | BlockPart::DeltaA | BlockPart::DeltaBa)
    }

    /// Returns true for a parameter of a recurrence, a router or an activation that is no norm and
    /// no matrix of a linear layer.
    pub(crate) fn is_of_recurrence(self) -> bool {
        let router = matches!(self, BlockPart::RouterScale | BlockPart::ExpertFactors);
        let curvature = matches!(self, BlockPart::XieluPositive | BlockPart::XieluNegative);
        router
            || curvature
            || self == BlockPart::AltUpOutputScale
            || matches!(
                self,
                BlockPart::DeltaConv | BlockPart::DeltaRate | BlockPart::DeltaStep | BlockPart::ConvTaps
            )
    }

    /// Returns true for the biases of all experts, which are one parameter.
    pub(crate) fn is_bias_of_experts(self) -> bool {
        matches!(self, BlockPart::ExpertGateUpBias | BlockPart::ExpertDownBias)
    }

    /// Returns true for a parameter outside linear layers and norms.
    pub(crate) fn is_apart(self) -> bool {
        self.is_of_recurrence() || self.is_bias_of_experts() || self.is_buffer() || self == BlockPart::Sinks
    }

    /// Returns true for values that no optimizer updates.
    pub fn is_buffer(self) -> bool {
        let scalar = matches!(self, BlockPart::XieluBeta | BlockPart::XieluEps);
        scalar || matches!(self, BlockPart::RouterBias | BlockPart::OutputFactor)
    }

    /// Returns the name of its parameter, given the name of its module: `…q_proj.weight`. Some
    /// parameters have no module of their own.
    pub fn parameter(self, module: &str) -> String {
        match self {
            BlockPart::DeltaRate
            | BlockPart::DeltaStep
            | BlockPart::RouterBias
            | BlockPart::RouterScale
            | BlockPart::ExpertFactors
            | BlockPart::XieluPositive
            | BlockPart::XieluNegative
            | BlockPart::XieluBeta
            | BlockPart::XieluEps
            | BlockPart::AltUpOutputScale
            | BlockPart::OutputFactor => module.to_owned(),
            BlockPart::ExpertGateUpBias | BlockPart::ExpertDownBias | BlockPart::Sinks => module.to_owned(),
            _ => format!("{module}.weight"),
        }
    }

    /// Returns true for a linear layer that decides about experts: it is adapted only by its name.
    pub(crate) fn is_router(self) -> bool {
        matches!(self, BlockPart::Router | BlockPart::SharedFactor)
    }

    /// Returns the group of layers with the same input as this one; `None` unless it is a linear
    /// layer.
    #[expect(clippy::too_many_lines, reason = "a table with a line for each part")]
    pub fn group(self) -> Option<LinearGroup> {
        match self {
            BlockPart::QProj | BlockPart::KProj | BlockPart::VProj | BlockPart::QkvProj => {
                Some(LinearGroup::Qkv)
            }
            BlockPart::DeltaQkv
            | BlockPart::DeltaZ
            | BlockPart::DeltaB
            | BlockPart::DeltaA
            | BlockPart::DeltaQkvz
            | BlockPart::DeltaBa
            | BlockPart::ConvIn
            | BlockPart::LatentQ
            | BlockPart::LatentKv => Some(LinearGroup::Qkv),
            BlockPart::LatentQUp => Some(LinearGroup::QUp),
            BlockPart::LatentKvUp => Some(LinearGroup::KvUp),
            BlockPart::OProj | BlockPart::DeltaOut | BlockPart::ConvOut => Some(LinearGroup::O),
            BlockPart::GateProj | BlockPart::UpProj | BlockPart::GateUpProj => Some(LinearGroup::GateUp),
            BlockPart::DownProj => Some(LinearGroup::Down),
            BlockPart::PerLayerGate => Some(LinearGroup::PerLayerGate),
            BlockPart::PerLayerProjection => Some(LinearGroup::PerLayerProjection),
            BlockPart::PerLayerModel => Some(LinearGroup::PerLayerModel),
            BlockPart::AltUpRouter => Some(LinearGroup::AltUpRouter),
            BlockPart::AltUpPrediction => Some(LinearGroup::AltUpPrediction),
            BlockPart::AltUpCorrection => Some(LinearGroup::AltUpCorrection),
            BlockPart::LaurelLeft => Some(LinearGroup::LaurelLeft),
            BlockPart::LaurelRight => Some(LinearGroup::LaurelRight),
            BlockPart::StreamProjection(_) => Some(LinearGroup::StreamProjections),
            BlockPart::StreamUnprojection(number) => Some(LinearGroup::StreamUnprojection(number)),
            BlockPart::Router => Some(LinearGroup::Router),
            BlockPart::ExpertGate(expert) | BlockPart::ExpertUp(expert) | BlockPart::ExpertGateUp(expert) => {
                Some(LinearGroup::ExpertGateUp(expert))
            }
            BlockPart::ExpertDown(expert) => Some(LinearGroup::ExpertDown(expert)),
            BlockPart::SharedGate | BlockPart::SharedUp => Some(LinearGroup::SharedGateUp),
            BlockPart::SharedDown => Some(LinearGroup::SharedDown),
            BlockPart::SharedFactor => Some(LinearGroup::SharedFactor),
            BlockPart::RouterBias
            | BlockPart::ExpertGateUpBias
            | BlockPart::ExpertDownBias
            | BlockPart::Sinks
            | BlockPart::DeltaConv
            | BlockPart::DeltaRate
            | BlockPart::DeltaStep
            | BlockPart::DeltaNorm
            | BlockPart::ConvTaps
            | BlockPart::LatentQNorm
            | BlockPart::LatentKvNorm
            | BlockPart::QNorm
            | BlockPart::KNorm
            | BlockPart::AttnNorm
            | BlockPart::AttnPostNorm
            | BlockPart::MlpNorm
            | BlockPart::ParallelAttnNorm
            | BlockPart::ParallelMlpNorm
            | BlockPart::MlpPostNorm
            | BlockPart::MlpOutNorm
            | BlockPart::ExpertsNorm
            | BlockPart::ExpertsOutNorm
            | BlockPart::RouterScale
            | BlockPart::ExpertFactors
            | BlockPart::XieluPositive
            | BlockPart::XieluNegative
            | BlockPart::XieluBeta
            | BlockPart::XieluEps
            | BlockPart::PerLayerNorm
            | BlockPart::PerLayerModelNorm
            | BlockPart::AltUpRouterNorm
            | BlockPart::AltUpOutputScale
            | BlockPart::LaurelNorm
            | BlockPart::OutputFactor => None,
        }
    }
}
