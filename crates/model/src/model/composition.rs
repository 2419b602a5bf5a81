//! The composition of a block: a token mixer and a channel mixer around a residual plan.
//!
//! A family's file (`families`) chooses the parts of each block. `layout` derives tensors from
//! them, `block` computes them.

use crate::ops::activation::PlainActivation;
use crate::ops::attention::{AttentionKind, Heads};
use crate::ops::experts::Router;
use crate::ops::gated_delta::DeltaHeads;
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;

/// The parts of one block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockConfig {
    /// The first half, which moves information between tokens.
    pub token_mixer: TokenMixer,
    /// The second half, which computes each token by itself.
    pub channel_mixer: ChannelMixer,
    /// The norms around both mixers, and their residual sums.
    pub residual: ResidualPlan,
    /// Factor on the output of each mixer before its residual sum (granite); 1 in most families.
    pub residual_factor: f64,
    /// True if a stored number multiplies the block's output (Gemma 4).
    pub has_output_factor: bool,
    /// An input of the block beside the hidden states (Gemma 4 E2B, E4B), in all blocks or in none.
    pub per_layer_input: Option<PerLayerInput>,
}

/// An input of one block that depends on the token and its embedding alone ("per-layer
/// embeddings"). The block adds `norm(projection(act(gate(y)) · input))` to the output `y` of its
/// mixers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerInput {
    /// The width of the input, P.
    pub width: usize,
    /// The activation of the gate.
    pub activation: Activation,
    /// The rows of the table of tokens, V or fewer: tokens beyond it have its first row.
    pub rows: usize,
}

/// The part of a block that lets a token read others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenMixer {
    /// Softmax attention with rotary positions.
    Attention(AttentionMixer),
    /// Softmax attention whose queries, keys and values come from narrow latents.
    Latent(LatentMixer),
    /// A recurrence with a state of fixed size.
    GatedDelta(DeltaMixer),
    /// A convolution over a few tokens between two gates.
    ShortConv(ShortConvMixer),
}

impl TokenMixer {
    /// Returns its attention, if it is one.
    pub fn attention(&self) -> Option<&AttentionMixer> {
        match self {
            TokenMixer::Attention(attention) => Some(attention),
            TokenMixer::Latent(latent) => Some(&latent.attention),
            TokenMixer::GatedDelta(_) | TokenMixer::ShortConv(_) => None,
        }
    }

    /// Returns the width of its first projections together.
    pub fn input_width(&self) -> usize {
        match self {
            TokenMixer::Attention(AttentionMixer { heads, has_gates: true, .. }) => {
                heads.qkv_width() + heads.q_width()
            }
            TokenMixer::Attention(mixer) if mixer.reads_from().is_some() => mixer.heads.q_width(),
            TokenMixer::Attention(AttentionMixer { heads, values: Values::NormedKeys, .. }) => {
                heads.qk_width()
            }
            TokenMixer::Attention(mixer) => mixer.heads.qkv_width(),
            TokenMixer::Latent(mixer) => {
                let num_heads = mixer.attention.heads.num_heads;
                let q = mixer.q_rank.unwrap_or(num_heads * (mixer.plain + mixer.rotated));
                q + mixer.kv_rank + mixer.rotated
            }
            TokenMixer::GatedDelta(mixer) => mixer.input_width(),
            TokenMixer::ShortConv(mixer) => mixer.input_width(),
        }
    }

    /// Returns the width of the input of its output projection.
    pub fn output_width(&self) -> usize {
        match self {
            TokenMixer::Attention(mixer) => mixer.heads.q_width(),
            TokenMixer::Latent(mixer) => mixer.attention.heads.num_heads * mixer.value,
            TokenMixer::GatedDelta(mixer) => mixer.heads.value_width(),
            TokenMixer::ShortConv(mixer) => mixer.channels,
        }
    }
}

/// The part of a block that computes each token by itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ChannelMixer {
    /// `down_proj(act(gate) · up)` of [`GatedMlp::width`].
    GatedMlp(GatedMlp),
    /// `down_proj(act(up_proj(x)))` of width
    /// [`ModelConfig::intermediate_size`](super::ModelConfig).
    PlainMlp(PlainMlp),
    /// Gated MLPs, of which a router chooses a few for each token.
    Experts(Experts),
    /// A gated MLP and experts side by side, each between norms of its own.
    MlpAndExperts(MlpAndExperts),
}

impl ChannelMixer {
    /// Returns the width of the first projections together, in inner widths.
    pub fn first_widths(&self) -> usize {
        match self {
            ChannelMixer::GatedMlp(_) | ChannelMixer::Experts(_) | ChannelMixer::MlpAndExperts(_) => 2,
            ChannelMixer::PlainMlp(_) => 1,
        }
    }

    /// Returns the inner width of its MLP for each token, 0 without one, given
    /// [`ModelConfig::intermediate_size`](super::ModelConfig).
    pub fn mlp_width(&self, intermediate_size: usize) -> usize {
        match self {
            ChannelMixer::GatedMlp(mlp) => mlp.width(intermediate_size),
            ChannelMixer::PlainMlp(_) => intermediate_size,
            ChannelMixer::Experts(_) => 0,
            ChannelMixer::MlpAndExperts(both) => both.mlp.width(intermediate_size),
        }
    }

    /// Returns its experts, if it has any.
    pub fn experts(&self) -> Option<&Experts> {
        match self {
            ChannelMixer::GatedMlp(_) | ChannelMixer::PlainMlp(_) => None,
            ChannelMixer::Experts(experts) => Some(experts),
            ChannelMixer::MlpAndExperts(both) => Some(&both.experts),
        }
    }

    /// Returns true if it has both an MLP for each token and experts.
    pub fn has_both(&self) -> bool {
        matches!(self, ChannelMixer::MlpAndExperts(_))
    }

    /// Returns the name of its activation.
    pub(super) fn activation(&self) -> String {
        match self {
            ChannelMixer::GatedMlp(mlp) => format!("{:?}", mlp.activation).to_lowercase(),
            ChannelMixer::PlainMlp(PlainMlp { activation: MlpActivation::Xielu, .. }) => "xielu".to_owned(),
            ChannelMixer::PlainMlp(PlainMlp { activation: MlpActivation::Fixed(activation), .. }) => {
                format!("{activation:?}").to_lowercase()
            }
            ChannelMixer::Experts(experts) | ChannelMixer::MlpAndExperts(MlpAndExperts { experts, .. }) => {
                format!("{:?}", experts.activation).to_lowercase()
            }
        }
    }
}

impl From<GatedMlp> for ChannelMixer {
    fn from(mlp: GatedMlp) -> Self {
        ChannelMixer::GatedMlp(mlp)
    }
}

impl From<PlainMlp> for ChannelMixer {
    fn from(mlp: PlainMlp) -> Self {
        ChannelMixer::PlainMlp(mlp)
    }
}

/// The position of norms around mixers, and the inputs of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResidualPlan {
    /// `x + mixer(norm(x))` for each mixer.
    PreNorm,
    /// `x + norm(mixer(norm(x)))` for each mixer (Gemma).
    PreAndPostNorm,
    /// `x + norm(mixer(x))` for each mixer (OLMo 2).
    PostNorm,
    /// `x + token_mixer(norm(x)) + channel_mixer(norm(x))` with one norm (Cohere).
    Parallel,
    /// `x + token_mixer(norm(x)) + channel_mixer(norm(x))` with a norm for each mixer (GPT-NeoX).
    ParallelTwoNorms,
    /// [`ResidualPlan::PreAndPostNorm`] of one of several hidden states, from which the others are
    /// predicted and corrected, with a residual of low rank (Gemma 3n).
    AltUp(AltUp),
}

/// The hidden states of AltUp (arXiv 2301.13310) and the residual of low rank beside attention
/// (LAuReL, arXiv 2411.07501).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AltUp {
    /// The number of hidden states, S, at least 2. The mixers compute the first one.
    pub streams: usize,
    /// The rank of the residual, R.
    pub laurel_rank: usize,
}

impl ResidualPlan {
    /// Returns true if a norm reads the outputs of the mixers.
    pub fn has_post_norms(self) -> bool {
        matches!(self, ResidualPlan::PreAndPostNorm | ResidualPlan::PostNorm | ResidualPlan::AltUp(_))
    }

    /// Returns its several hidden states, if it has them.
    pub fn alt_up(&self) -> Option<&AltUp> {
        match self {
            ResidualPlan::AltUp(alt_up) => Some(alt_up),
            _ => None,
        }
    }

    /// Returns true if both mixers read the block's input.
    pub fn is_parallel(self) -> bool {
        matches!(self, ResidualPlan::Parallel | ResidualPlan::ParallelTwoNorms)
    }
}

/// The norms of hidden states: those of blocks and the last one. Norms of q and k are RMS norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HiddenNorm {
    /// RMSNorm, without a mean.
    Rms,
    /// LayerNorm, around the mean.
    Layer {
        /// True if each has a bias.
        bias: bool,
    },
}

impl HiddenNorm {
    /// Returns whether each norm has a bias.
    pub(super) fn has_bias(self) -> bool {
        self == HiddenNorm::Layer { bias: true }
    }
}

/// Softmax attention with rotary positions over heads of one width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionMixer {
    /// Head counts and width: those of [`ModelConfig::heads`](super::ModelConfig) in most layers.
    pub heads: Heads,
    /// The window: a token sees itself and the `window − 1` tokens before it. `None`: all before
    /// it.
    pub window: Option<usize>,
    /// The length of blocks of tokens: a token sees those of its own block alone, up to itself
    /// (Llama 4). `None`: one block.
    pub chunk: Option<usize>,
    /// Index into [`ModelConfig::ropes`](super::ModelConfig).
    pub rope: usize,
    /// Factor on attention scores.
    pub scale: f64,
    /// Soft-cap on attention scores.
    pub softcap: Option<f64>,
    /// True if q, k and v have biases.
    pub qkv_bias: bool,
    /// True if o has a bias.
    pub o_bias: bool,
    /// The vectors of q and k that are normed, if any.
    pub qk_norm: Option<QkNormWidth>,
    /// The origin of the values.
    pub values: Values,
    /// The order of the rows if q, k and v are one tensor.
    pub fused: Option<FusedQkv>,
    /// True if the projection to queries also gives a gate for each value of the output, after the
    /// query of each head: the output is multiplied by the sigmoids of the gates (Qwen3.5).
    pub has_gates: bool,
    /// True if a learned logit of each head joins the softmax, without a value (gpt-oss).
    pub has_sinks: bool,
    /// The blocks that have these keys and values.
    pub sharing: Sharing,
}

/// The blocks that have the keys and values of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// This one alone.
    Own,
    /// This one computes them, and later ones read them too (Gemma 4 E2B, E4B).
    Stored,
    /// The block of this number computes them; this one only has queries.
    Read {
        /// The number of the block, before this one.
        owner: usize,
    },
}

/// Gated DeltaNet (arXiv 2412.06464): a convolution over the last tokens, and a state for each head
/// that decays and is corrected by each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaMixer {
    /// The counts and widths of its heads.
    pub heads: DeltaHeads,
    /// The number of tokens that an output of the convolution reads.
    pub conv_kernel: usize,
    /// True if the rows of two first projections are grouped by key head (Qwen3-Next); false if
    /// queries, keys and values, gates, strengths and decays each have a projection.
    pub by_key_head: bool,
}

impl DeltaMixer {
    /// Returns the width of its first projections together.
    pub fn input_width(&self) -> usize {
        self.heads.conv_width() + self.heads.value_width() + 2 * self.heads.num_value_heads
    }
}

/// A depthwise convolution over the last tokens, whose input and output gates multiply (LFM2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvMixer {
    /// The number of channels: the width of the hidden states.
    pub channels: usize,
    /// The number of tokens that an output reads.
    pub kernel: usize,
    /// True if the convolution and both projections have biases.
    pub bias: bool,
}

impl ShortConvMixer {
    /// Returns the width of its first projection: two gates and the input.
    pub fn input_width(&self) -> usize {
        3 * self.channels
    }
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A head's query and key have `plain`
/// columns and `rotated` ones; the rotated key is the same for all heads.
///
/// The width of the heads of its attention is that of the wider of keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentMixer {
    /// The scores and the rope; its projections and norms are those of latents.
    pub attention: AttentionMixer,
    /// The width of the latent of queries; `None`: queries are projected at once.
    pub q_rank: Option<usize>,
    /// The width of the latent of keys and values.
    pub kv_rank: usize,
    /// Columns of a head's query and key without positions.
    pub plain: usize,
    /// Columns of a head's query and key that rotate.
    pub rotated: usize,
    /// Columns of a head's value.
    pub value: usize,
    /// The norms of both latents.
    pub norm: NormKind,
}

impl LatentMixer {
    /// Returns the widths of a head's key and of its value together.
    pub fn attended_widths(&self) -> usize {
        self.plain + self.rotated + self.value
    }
}

/// The vectors that the norms of q and k see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormWidth {
    /// Each head (Qwen 3, Gemma 3).
    Head,
    /// Each head, after its rotation (Hunyuan).
    HeadAfterRope,
    /// Each head, after its rotation, by a norm without a weight (Llama 4).
    PlainHeadAfterRope,
    /// All heads together (OLMo 2).
    Whole,
}

/// The order of the rows of one projection to queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FusedQkv {
    /// All queries, all keys, all values (phi3).
    SideBySide,
    /// Of each key head: the queries that attend to it, its key, its value (GPT-NeoX, Falcon).
    ByKeyHead,
}

/// The origin of the values of attention. Their norm is of each head, without a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// A projection of their own.
    Projected,
    /// The norm of a projection (Gemma 4).
    Normed,
    /// The norm of the projection to keys, before their own norm and rotation (Gemma 4).
    NormedKeys,
}

impl AttentionMixer {
    /// Returns the settings of its scores and mask.
    pub fn kind(&self) -> AttentionKind {
        let AttentionMixer { heads, scale, softcap, window, .. } = *self;
        AttentionKind { heads, scale, softcap, window }
    }

    /// Returns the block whose keys and values it reads, if they are not its own.
    pub fn reads_from(&self) -> Option<usize> {
        match self.sharing {
            Sharing::Own | Sharing::Stored => None,
            Sharing::Read { owner } => Some(owner),
        }
    }

    /// Returns the heads that its own projection has: without keys and values if it reads those of
    /// another block.
    pub(crate) fn projected_heads(&self) -> Heads {
        match self.reads_from() {
            None => self.heads,
            Some(_) => Heads { num_kv_heads: 0, ..self.heads },
        }
    }
}

/// An MLP whose gate is activated and multiplied with its up-projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedMlp {
    /// The gate's activation.
    pub activation: Activation,
    /// True if gate, up and down have biases.
    pub bias: bool,
    /// True if gate and up are one tensor (phi3).
    pub fused: bool,
    /// Its inner width if it is another one than
    /// [`ModelConfig::intermediate_size`](super::ModelConfig).
    pub own_width: Option<usize>,
    /// The cut-off of gates, in standard deviations above their mean: those below count as 0, the
    /// others lose it (Gemma 3n).
    pub gate_deviations: Option<f64>,
}

impl GatedMlp {
    /// Returns its inner width, given [`ModelConfig::intermediate_size`](super::ModelConfig).
    pub fn width(&self, intermediate_size: usize) -> usize {
        self.own_width.unwrap_or(intermediate_size)
    }
}

/// The activation of an MLP without a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpActivation {
    /// One without parameters.
    Fixed(PlainActivation),
    /// xIELU, whose two curvatures each block learns (Apertus).
    Xielu,
}

/// An MLP without a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlainMlp {
    /// The activation of the first projection's output.
    pub activation: MlpActivation,
    /// True if up and down have biases.
    pub bias: bool,
}

/// A mixture of experts: gated MLPs, of which a router chooses a few for each token, and perhaps
/// one for all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// The number of experts, E.
    pub count: usize,
    /// The router's settings.
    pub router: Router,
    /// True if the choice adds a stored bias to each expert's score.
    pub has_bias: bool,
    /// True if the router's logits are f32 whatever the activations' dtype. They decide a choice,
    /// so that their rounding to bf16 would send some tokens to other experts.
    pub has_f32_logits: bool,
    /// True if the router and both layers of each expert have biases (gpt-oss).
    pub layer_biases: bool,
    /// The inner width of each expert.
    pub width: usize,
    /// The activation of the gates.
    pub activation: Activation,
    /// True if gate and up of an expert are one layer (gpt-oss, Llama 4). Its rows alternate with
    /// [`Activation::ClampedSilu`]; otherwise gate comes first.
    pub has_one_gate_up: bool,
    /// True if the weights multiply the experts' inputs instead of their outputs (Llama 4).
    pub weighs_inputs: bool,
    /// The coefficient of the loss that balances their load, in config.json.
    pub aux_coefficient: f64,
    /// The expert of every token, beside the chosen ones.
    pub shared: Option<SharedExpert>,
}

/// A gated MLP and a mixture of experts side by side, without a shared expert: their normed outputs
/// add up. The router has a norm of its own, and a factor multiplies the weight of each expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpAndExperts {
    /// The MLP that every token uses.
    pub mlp: GatedMlp,
    /// The experts beside it.
    pub experts: Experts,
}

/// A gated MLP without biases that every token uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its inner width.
    pub width: usize,
    /// True if its output is multiplied by the sigmoid of a linear layer of width 1.
    pub has_gate: bool,
}

impl From<AttentionMixer> for TokenMixer {
    fn from(attention: AttentionMixer) -> Self {
        TokenMixer::Attention(attention)
    }
}

impl From<LatentMixer> for TokenMixer {
    fn from(mixer: LatentMixer) -> Self {
        TokenMixer::Latent(mixer)
    }
}

impl From<ShortConvMixer> for TokenMixer {
    fn from(mixer: ShortConvMixer) -> Self {
        TokenMixer::ShortConv(mixer)
    }
}

impl From<DeltaMixer> for TokenMixer {
    fn from(mixer: DeltaMixer) -> Self {
        TokenMixer::GatedDelta(mixer)
    }
}

impl From<MlpAndExperts> for ChannelMixer {
    fn from(both: MlpAndExperts) -> Self {
        ChannelMixer::MlpAndExperts(both)
    }
}

impl From<Experts> for ChannelMixer {
    fn from(experts: Experts) -> Self {
        ChannelMixer::Experts(experts)
    }
}

impl BlockConfig {
    /// Returns a block like Llama's: a token mixer and a channel mixer, each after a norm.
    pub(super) fn pre_norm(mixer: impl Into<TokenMixer>, mlp: impl Into<ChannelMixer>) -> Self {
        Self {
            token_mixer: mixer.into(),
            channel_mixer: mlp.into(),
            residual: ResidualPlan::PreNorm,
            residual_factor: 1.0,
            has_output_factor: false,
            per_layer_input: None,
        }
    }
}
