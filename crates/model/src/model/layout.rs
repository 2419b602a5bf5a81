//! The table of a model's tensors: what each module is to its block, its name in a checkpoint, its shape and biases, and
//! which models have it.
//!
//! Nothing else knows them: `spec` makes parameters and modules of the table, `assemble` the weights of a block,
//! [`BlockSaved::bytes`](super::BlockSaved::bytes) counts the adapters on it, `export` gives each part its name in GGUF.

use super::ModelConfig;
use crate::weights::{EMBED_TOKENS_MODULE, LM_HEAD_MODULE};

/// The module of the last norm, in every family.
pub(super) const FINAL_NORM_MODULE: &str = "model.norm";

/// What a module is to its block.
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
    /// The projection of what attention returns.
    OProj,
    /// The MLP's projection to what its activation takes.
    GateProj,
    /// The MLP's projection to what the gate is multiplied with.
    UpProj,
    /// One projection to gate and up, side by side in this order.
    GateUpProj,
    /// The MLP's projection back to the width of the model.
    DownProj,
    /// The norm on each head's query.
    QNorm,
    /// The norm on each head's key.
    KNorm,
    /// The norm before attention.
    AttnNorm,
    /// The norm on what attention adds to its input (Gemma).
    AttnPostNorm,
    /// The norm before the MLP.
    MlpNorm,
    /// The norm on what the MLP adds to its input (Gemma).
    MlpPostNorm,
}

/// Linear layers of a block that read one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearGroup {
    /// Queries, keys and values.
    Qkv,
    /// Attention's output projection.
    O,
    /// The MLP's gate and up.
    GateUp,
    /// The MLP's second projection.
    Down,
}

impl BlockPart {
    /// The layers that this one stands beside; none for a norm.
    pub fn group(self) -> Option<LinearGroup> {
        match self {
            BlockPart::QProj | BlockPart::KProj | BlockPart::VProj | BlockPart::QkvProj => {
                Some(LinearGroup::Qkv)
            }
            BlockPart::OProj => Some(LinearGroup::O),
            BlockPart::GateProj | BlockPart::UpProj | BlockPart::GateUpProj => Some(LinearGroup::GateUp),
            BlockPart::DownProj => Some(LinearGroup::Down),
            BlockPart::QNorm
            | BlockPart::KNorm
            | BlockPart::AttnNorm
            | BlockPart::AttnPostNorm
            | BlockPart::MlpNorm
            | BlockPart::MlpPostNorm => None,
        }
    }
}

/// The weight of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightShape {
    /// A linear layer's or a token table's.
    Matrix {
        /// Rows: the width of a layer's output, the tokens of a table.
        out: usize,
        /// Columns: the width of a layer's input, the width of a table's rows.
        inputs: usize,
    },
    /// A norm's gain.
    Gain(usize),
}

impl WeightShape {
    /// The shape in the checkpoint: `[out, in]`, or `[n]` of a gain.
    pub fn dims(self) -> Vec<usize> {
        match self {
            WeightShape::Matrix { out, inputs } => vec![out, inputs],
            WeightShape::Gain(len) => vec![len],
        }
    }

    /// The width of what the module returns.
    pub fn out(self) -> usize {
        match self {
            WeightShape::Matrix { out, .. } => out,
            WeightShape::Gain(len) => len,
        }
    }
}

/// A module of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockModule {
    /// What it is to the block.
    pub part: BlockPart,
    /// Its name in the checkpoint, after that of the block.
    pub name: &'static str,
    /// The shape of its weight.
    pub weight: WeightShape,
    /// Whether it has a bias, as long as its output is wide.
    pub bias: bool,
}

impl BlockModule {
    /// Its name in block `layer`, such as `model.layers.0.self_attn.q_proj`.
    pub fn name_in(&self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name)
    }
}

/// A row of the table: a linear layer, by the widths of its output and its input.
fn linear(part: BlockPart, name: &'static str, (out, inputs): (usize, usize), bias: bool) -> BlockModule {
    BlockModule { part, name, weight: WeightShape::Matrix { out, inputs }, bias }
}

/// A row of the table: a norm of vectors of `len` elements.
fn norm(part: BlockPart, name: &'static str, len: usize) -> BlockModule {
    BlockModule { part, name, weight: WeightShape::Gain(len), bias: false }
}

/// The modules of every block of one model, in the order of their parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLayout(Vec<BlockModule>);

impl BlockLayout {
    /// The blocks of a model of shape `config`.
    pub fn new(config: &ModelConfig) -> Self {
        use BlockPart as P;
        let (d, f, heads) = (config.hidden_size, config.intermediate_size, config.heads);
        let (q, kv, qkv) = (heads.q_width(), heads.kv_width(), heads.qkv_width());
        let (qkv_bias, mlp_bias) = (config.qkv_bias, config.mlp_bias);
        let (fused, post_norms) = (config.fused, config.post_norms);
        // Whether a model has it, and what it is. The second norm of a block has the same name whatever it is to it.
        let table = [
            (fused, linear(P::QkvProj, "self_attn.qkv_proj", (qkv, d), qkv_bias)),
            (!fused, linear(P::QProj, "self_attn.q_proj", (q, d), qkv_bias)),
            (!fused, linear(P::KProj, "self_attn.k_proj", (kv, d), qkv_bias)),
            (!fused, linear(P::VProj, "self_attn.v_proj", (kv, d), qkv_bias)),
            (true, linear(P::OProj, "self_attn.o_proj", (d, q), config.o_bias)),
            (fused, linear(P::GateUpProj, "mlp.gate_up_proj", (2 * f, d), mlp_bias)),
            (!fused, linear(P::GateProj, "mlp.gate_proj", (f, d), mlp_bias)),
            (!fused, linear(P::UpProj, "mlp.up_proj", (f, d), mlp_bias)),
            (true, linear(P::DownProj, "mlp.down_proj", (d, f), mlp_bias)),
            (config.qk_norm, norm(P::QNorm, "self_attn.q_norm", heads.head_dim)),
            (config.qk_norm, norm(P::KNorm, "self_attn.k_norm", heads.head_dim)),
            (true, norm(P::AttnNorm, "input_layernorm", d)),
            (!post_norms, norm(P::MlpNorm, "post_attention_layernorm", d)),
            (post_norms, norm(P::AttnPostNorm, "post_attention_layernorm", d)),
            (post_norms, norm(P::MlpNorm, "pre_feedforward_layernorm", d)),
            (post_norms, norm(P::MlpPostNorm, "post_feedforward_layernorm", d)),
        ];
        BlockLayout(table.into_iter().filter_map(|(there, module)| there.then_some(module)).collect())
    }

    /// All modules of a block.
    pub fn modules(&self) -> &[BlockModule] {
        &self.0
    }

    /// The module with this part; none in a model without it.
    pub fn module(&self, part: BlockPart) -> Option<&BlockModule> {
        self.0.iter().find(|module| module.part == part)
    }

    /// The linear layers, in the order in which dropout numbers them.
    pub fn linears(&self) -> impl Iterator<Item = &BlockModule> {
        self.0.iter().filter(|module| module.part.group().is_some())
    }
}

/// A part of the model whose weights are used together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Segment {
    /// The token embedding.
    Embed,
    /// The decoder block of this number.
    Block(usize),
    /// Final norm and output layer.
    Head,
}

/// A module of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelPart {
    /// The token embedding.
    EmbedTokens,
    /// A module of a block.
    Block {
        /// Number of the block.
        layer: usize,
        /// What it is there.
        part: BlockPart,
    },
    /// The norm after the last block.
    FinalNorm,
    /// The output layer.
    LmHead,
}

impl ModelPart {
    /// The segment that uses it.
    pub fn segment(self) -> Segment {
        match self {
            ModelPart::EmbedTokens => Segment::Embed,
            ModelPart::Block { layer, .. } => Segment::Block(layer),
            ModelPart::FinalNorm | ModelPart::LmHead => Segment::Head,
        }
    }

    /// Whether it is a norm.
    pub fn is_norm(self) -> bool {
        match self {
            ModelPart::EmbedTokens | ModelPart::LmHead => false,
            ModelPart::Block { part, .. } => part.group().is_none(),
            ModelPart::FinalNorm => true,
        }
    }
}

/// A module of a model, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedModule {
    pub(super) name: String,
    pub(super) part: ModelPart,
    pub(super) weight: WeightShape,
    pub(super) bias: bool,
}

/// All modules of a model of shape `config`, in the order of their parameters; the head also where it is tied.
pub(super) fn model_modules(config: &ModelConfig) -> Vec<NamedModule> {
    let whole = |name: &str, part, weight| NamedModule { name: name.into(), part, weight, bias: false };
    let table = WeightShape::Matrix { out: config.vocab_size, inputs: config.hidden_size };
    let layout = BlockLayout::new(config);
    let mut all = vec![whole(EMBED_TOKENS_MODULE, ModelPart::EmbedTokens, table)];
    for layer in 0..config.num_layers() {
        all.extend(layout.modules().iter().map(|module| NamedModule {
            name: module.name_in(layer),
            part: ModelPart::Block { layer, part: module.part },
            weight: module.weight,
            bias: module.bias,
        }));
    }
    let gain = WeightShape::Gain(config.hidden_size);
    all.push(whole(FINAL_NORM_MODULE, ModelPart::FinalNorm, gain));
    all.push(whole(LM_HEAD_MODULE, ModelPart::LmHead, table));
    all
}
