//! The table of a model's tensors: the modules of each part of a block, with their names in a
//! checkpoint, shapes and biases.
//!
//! No other code defines them. `spec` derives parameters and modules from the table, `assemble` the
//! weights of a block, [`BlockSaved::bytes`](super::BlockSaved::bytes) the sizes of adapters, and
//! `export` the names in GGUF.

use std::borrow::Cow;
use std::sync::Arc;

use super::ModelConfig;
use super::block_part::{BlockPart, XIELU};
use super::composition::{
    AltUp, AttentionMixer, ChannelMixer, DeltaMixer, Experts, GatedMlp, LatentMixer, MlpActivation,
    MlpAndExperts, PerLayerInput, PlainMlp, QkNormWidth, ResidualPlan, SharedExpert, ShortConvMixer,
    TokenMixer, Values,
};
use crate::weights::{
    EMBED_PER_LAYER_MODULE, EMBED_TOKENS_MODULE, LM_HEAD_MODULE, Stack, StackPart, StackParts,
};

/// The module of the last norm, in every family.
pub(super) const FINAL_NORM_MODULE: &str = "model.norm";

/// The shape of a module's weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightShape {
    /// The weight of a linear layer or a token table.
    Matrix {
        /// Rows: the width of a layer's output, the tokens of a table.
        out: usize,
        /// Columns: the width of a layer's input, the width of a table's rows.
        inputs: usize,
    },
    /// A norm's gain, or one value per head.
    Gain(usize),
    /// A single number.
    Scalar,
    /// The weights of a depthwise convolution.
    Conv {
        /// The number of channels.
        channels: usize,
        /// The number of tokens that each output reads.
        width: usize,
    },
}

impl WeightShape {
    /// Returns the shape in the checkpoint: `[out, in]`, `[n]` for a gain, `[]` for a number,
    /// `[channels, 1, width]` for a convolution.
    pub fn dims(self) -> Vec<usize> {
        match self {
            WeightShape::Matrix { out, inputs } => vec![out, inputs],
            WeightShape::Gain(len) => vec![len],
            WeightShape::Scalar => Vec::new(),
            WeightShape::Conv { channels, width } => vec![channels, 1, width],
        }
    }

    /// Returns the width of the module's output.
    pub fn out(self) -> usize {
        match self {
            WeightShape::Matrix { out, .. } => out,
            WeightShape::Gain(len) => len,
            WeightShape::Scalar => 1,
            WeightShape::Conv { channels, .. } => channels,
        }
    }
}

/// A module of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockModule {
    /// The role in the block.
    pub part: BlockPart,
    /// The name in the checkpoint, after that of the block, or of the model if it is a part of it;
    /// `{}` stands for the number of an expert or a stream.
    pub name: &'static str,
    /// The shape of its weight.
    pub weight: WeightShape,
    /// True if it has a bias, `[out]`; that of a norm is as long as its gain.
    pub bias: bool,
}

impl BlockModule {
    /// Returns its name in block `layer`, such as `model.layers.0.self_attn.q_proj`.
    pub fn name_in(&self, layer: usize) -> String {
        let name = match self.part.number() {
            None => Cow::Borrowed(self.name),
            Some(number) => self.name.replacen("{}", &number.to_string(), 1).into(),
        };
        if self.part.is_of_model() { format!("model.{name}") } else { format!("model.layers.{layer}.{name}") }
    }
}

/// The modules of one block, in the order of their parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLayout(Vec<BlockModule>);

/// Makes the rows of the table for one model, from its sizes and its family's names.
struct LayoutTable<'a>(&'a ModelConfig);

impl LayoutTable<'_> {
    /// Returns a linear layer, given the widths of its output and its input.
    fn linear(&self, part: BlockPart, (out, inputs): (usize, usize), bias: bool) -> BlockModule {
        BlockModule { part, name: self.name(part), weight: WeightShape::Matrix { out, inputs }, bias }
    }

    /// Returns a norm of vectors of `len` elements.
    fn norm(&self, part: BlockPart, len: usize, bias: bool) -> BlockModule {
        BlockModule { part, name: self.name(part), weight: WeightShape::Gain(len), bias }
    }

    fn name(&self, part: BlockPart) -> &'static str {
        (self.0.family.module_name)(part)
    }

    fn attention(&self, mixer: &AttentionMixer) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, heads) = (self.0.hidden_size, mixer.heads);
        let (q, kv, qkv) = (heads.q_width(), heads.kv_width(), heads.qkv_width());
        let has_keys = mixer.reads_from().is_none();
        let mut rows = if mixer.fused.is_some() {
            vec![self.linear(P::QkvProj, (qkv, d), mixer.qkv_bias)]
        } else {
            let with_gates = if mixer.has_gates { 2 * q } else { q };
            let keys = has_keys.then_some((P::KProj, kv));
            let values = (has_keys && mixer.values != Values::NormedKeys).then_some((P::VProj, kv));
            let inputs = std::iter::once((P::QProj, with_gates)).chain(keys).chain(values);
            inputs.map(|(part, out)| self.linear(part, (out, d), mixer.qkv_bias)).collect()
        };
        rows.push(self.linear(P::OProj, (d, q), mixer.o_bias));
        let of_heads = |width: QkNormWidth| match width {
            QkNormWidth::Head | QkNormWidth::HeadAfterRope => Some([heads.head_dim; 2]),
            QkNormWidth::Whole => Some([q, kv]),
            QkNormWidth::PlainHeadAfterRope => None,
        };
        if let Some([q, k]) = mixer.qk_norm.and_then(of_heads) {
            rows.push(self.norm(P::QNorm, q, false));
            rows.extend(has_keys.then(|| self.norm(P::KNorm, k, false)));
        }
        rows.extend(mixer.has_sinks.then(|| self.norm(P::Sinks, heads.num_heads, false)));
        rows
    }

    fn latent(&self, mixer: &LatentMixer) -> Vec<BlockModule> {
        use BlockPart as P;
        let (heads, bias) = (mixer.attention.heads.num_heads, mixer.attention.qkv_bias);
        let d = self.0.hidden_size;
        let (q, kv) = (heads * (mixer.plain + mixer.rotated), heads * (mixer.plain + mixer.value));
        let first = match mixer.q_rank {
            Some(rank) => self.linear(P::LatentQ, (rank, d), bias),
            None => self.linear(P::QProj, (q, d), false),
        };
        let mut rows = vec![first, self.linear(P::LatentKv, (mixer.kv_rank + mixer.rotated, d), bias)];
        rows.extend(mixer.q_rank.map(|rank| self.linear(P::LatentQUp, (q, rank), false)));
        rows.push(self.linear(P::LatentKvUp, (kv, mixer.kv_rank), false));
        rows.push(self.linear(P::OProj, (d, heads * mixer.value), mixer.attention.o_bias));
        rows.extend(mixer.q_rank.map(|rank| self.norm(P::LatentQNorm, rank, false)));
        rows.push(self.norm(P::LatentKvNorm, mixer.kv_rank, false));
        rows
    }

    fn gated_delta(&self, mixer: &DeltaMixer) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, heads) = (self.0.hidden_size, mixer.heads);
        let (conv, value, count) = (heads.conv_width(), heads.value_width(), heads.num_value_heads);
        let inputs = if mixer.by_key_head {
            vec![(P::DeltaQkvz, conv + value), (P::DeltaBa, 2 * count)]
        } else {
            vec![(P::DeltaQkv, conv), (P::DeltaZ, value), (P::DeltaB, count), (P::DeltaA, count)]
        };
        let mut rows: Vec<_> =
            inputs.into_iter().map(|(part, out)| self.linear(part, (out, d), false)).collect();
        rows.push(self.linear(P::DeltaOut, (d, value), false));
        let weights = WeightShape::Conv { channels: conv, width: mixer.conv_kernel };
        let conv = BlockModule { weight: weights, ..self.norm(P::DeltaConv, 0, false) };
        let [rate, step] = [P::DeltaRate, P::DeltaStep].map(|part| self.norm(part, count, false));
        rows.extend([conv, rate, step, self.norm(P::DeltaNorm, heads.value_dim, false)]);
        rows
    }

    fn short_conv(&self, mixer: &ShortConvMixer) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, channels) = (self.0.hidden_size, mixer.channels);
        let weights = WeightShape::Conv { channels, width: mixer.kernel };
        let taps = BlockModule { weight: weights, ..self.norm(P::ConvTaps, 0, mixer.bias) };
        let input = self.linear(P::ConvIn, (mixer.input_width(), d), mixer.bias);
        vec![input, self.linear(P::ConvOut, (d, channels), mixer.bias), taps]
    }

    fn gated_mlp(&self, mixer: &GatedMlp) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, f) = (self.0.hidden_size, mixer.width(self.0.intermediate_size));
        let mut rows = if mixer.fused {
            vec![self.linear(P::GateUpProj, (2 * f, d), mixer.bias)]
        } else {
            [P::GateProj, P::UpProj].map(|part| self.linear(part, (f, d), mixer.bias)).into()
        };
        rows.push(self.linear(P::DownProj, (d, f), mixer.bias));
        rows
    }

    fn plain_mlp(&self, mixer: &PlainMlp) -> Vec<BlockModule> {
        let (d, f) = (self.0.hidden_size, self.0.intermediate_size);
        let layers = [(BlockPart::UpProj, (f, d)), (BlockPart::DownProj, (d, f))];
        let mut rows: Vec<_> = layers.map(|(part, shape)| self.linear(part, shape, mixer.bias)).into();
        if mixer.activation == MlpActivation::Xielu {
            let shape =
                |part: BlockPart| if part.is_buffer() { WeightShape::Scalar } else { WeightShape::Gain(1) };
            let number = |part| BlockModule { weight: shape(part), ..self.norm(part, 1, false) };
            rows.extend(XIELU.map(number));
        }
        rows
    }

    fn experts(&self, mixer: &Experts) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, f) = (self.0.hidden_size, mixer.width);
        let of_expert = |e: u16| {
            let inputs = if mixer.has_one_gate_up {
                vec![self.linear(P::ExpertGateUp(e), (2 * f, d), false)]
            } else {
                [P::ExpertGate(e), P::ExpertUp(e)].map(|part| self.linear(part, (f, d), false)).into()
            };
            inputs.into_iter().chain([self.linear(P::ExpertDown(e), (d, f), false)])
        };
        let router = self.linear(P::Router, (mixer.count, d), mixer.layer_biases);
        let biases = |(part, inputs)| BlockModule {
            weight: WeightShape::Matrix { out: mixer.count, inputs },
            ..self.norm(part, 0, false)
        };
        let biases = [(P::ExpertGateUpBias, 2 * f), (P::ExpertDownBias, d)].map(biases);
        // The numbers of experts fit into 16 bits: `MOST_EXPERTS`.
        let mut experts: Vec<_> = (0..mixer.count as u16).flat_map(of_expert).collect();
        if self.0.family.stacked_experts.is_some() {
            // The parts of a stack come one after the other.
            experts.sort_by_key(|module| module.part.is_last_of_mlp());
        }
        let bias = mixer.has_bias.then(|| self.router_bias(mixer.count));
        let biases = biases.into_iter().filter(|_| mixer.layer_biases);
        let routed = std::iter::once(router).chain(bias).chain(experts).chain(biases);
        routed.chain(mixer.shared.iter().flat_map(|shared| self.shared_expert(shared))).collect()
    }

    fn router_bias(&self, count: usize) -> BlockModule {
        let vector = self.norm(BlockPart::RouterBias, count, false);
        if !self.0.family.router_bias_is_row {
            return vector;
        }
        BlockModule { weight: WeightShape::Matrix { out: 1, inputs: count }, ..vector }
    }

    fn mlp_and_experts(&self, mixer: &MlpAndExperts) -> Vec<BlockModule> {
        use BlockPart as P;
        let d = self.0.hidden_size;
        let norms = [P::MlpOutNorm, P::ExpertsNorm, P::ExpertsOutNorm];
        let vectors = [(P::RouterScale, d), (P::ExpertFactors, mixer.experts.count)];
        let norms = norms.map(|part| self.norm(part, d, self.0.hidden_norm.has_bias()));
        let mut rows = self.gated_mlp(&mixer.mlp);
        rows.extend(self.experts(&mixer.experts));
        rows.extend(norms);
        rows.extend(vectors.map(|(part, len)| self.norm(part, len, false)));
        rows
    }

    fn shared_expert(&self, SharedExpert { width, has_gate }: &SharedExpert) -> Vec<BlockModule> {
        use BlockPart as P;
        let d = self.0.hidden_size;
        let mut rows: Vec<_> =
            [P::SharedGate, P::SharedUp].map(|part| self.linear(part, (*width, d), false)).into();
        rows.push(self.linear(P::SharedDown, (d, *width), false));
        rows.extend(has_gate.then(|| self.linear(P::SharedFactor, (1, d), false)));
        rows
    }

    /// Returns the parts around the per-layer input of block `layer`, and in the first block those
    /// that make the inputs of all blocks.
    fn per_layer_input(&self, input: &PerLayerInput, layer: usize) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, p) = (self.0.hidden_size, input.width);
        let mut rows = vec![
            self.linear(P::PerLayerGate, (p, d), false),
            self.linear(P::PerLayerProjection, (d, p), false),
            self.norm(P::PerLayerNorm, d, self.0.hidden_norm.has_bias()),
        ];
        if layer == 0 {
            let all = self.0.per_layer_width(self.0.num_layers());
            rows.push(self.linear(P::PerLayerModel, (all, d), false));
            rows.push(self.norm(P::PerLayerModelNorm, p, false));
        }
        rows
    }

    /// Returns AltUp's parts of block `layer`: at both ends of the model also the projections to
    /// streams and from them.
    fn alt_up(&self, AltUp { streams, laurel_rank }: AltUp, layer: usize) -> Vec<BlockModule> {
        use BlockPart as P;
        let (d, s, bias) = (self.0.hidden_size, streams, self.0.hidden_norm.has_bias());
        let mut rows = vec![
            self.linear(P::AltUpRouter, (s, d), false),
            self.linear(P::AltUpPrediction, (s * s, s), false),
            self.linear(P::AltUpCorrection, (s, s), false),
            self.linear(P::LaurelLeft, (laurel_rank, d), false),
            self.linear(P::LaurelRight, (d, laurel_rank), false),
            self.norm(P::AltUpRouterNorm, d, bias),
            self.norm(P::LaurelNorm, d, bias),
            self.norm(P::AltUpOutputScale, d, false),
        ];
        let ends =
            [(P::StreamProjection as fn(u16) -> P, 0), (P::StreamUnprojection, self.0.num_layers() - 1)];
        for (part, _) in ends.into_iter().filter(|(_, end)| layer == *end) {
            rows.extend((1..s as u16).map(|stream| self.linear(part(stream - 1), (d, d), false)));
        }
        rows
    }

    fn norms(&self, plan: ResidualPlan) -> Vec<BlockModule> {
        use BlockPart as P;
        let parts: &[BlockPart] = match plan {
            ResidualPlan::PreNorm => &[P::AttnNorm, P::MlpNorm],
            ResidualPlan::ParallelTwoNorms => &[P::ParallelAttnNorm, P::ParallelMlpNorm],
            ResidualPlan::Parallel => &[P::AttnNorm],
            ResidualPlan::PreAndPostNorm | ResidualPlan::AltUp(_) => {
                &[P::AttnNorm, P::AttnPostNorm, P::MlpNorm, P::MlpPostNorm]
            }
            ResidualPlan::PostNorm => &[P::AttnPostNorm, P::MlpPostNorm],
        };
        let bias = self.0.hidden_norm.has_bias();
        parts.iter().map(|part| self.norm(*part, self.0.hidden_size, bias)).collect()
    }
}

impl BlockLayout {
    /// Returns the modules of block `layer` of a model of shape `config`.
    pub fn new(config: &ModelConfig, layer: usize) -> Self {
        let (table, block) = (LayoutTable(config), &config.blocks[layer]);
        let mut rows = match &block.token_mixer {
            TokenMixer::Attention(mixer) => table.attention(mixer),
            TokenMixer::Latent(mixer) => table.latent(mixer),
            TokenMixer::GatedDelta(mixer) => table.gated_delta(mixer),
            TokenMixer::ShortConv(mixer) => table.short_conv(mixer),
        };
        rows.extend(match &block.channel_mixer {
            ChannelMixer::GatedMlp(mixer) => table.gated_mlp(mixer),
            ChannelMixer::PlainMlp(mixer) => table.plain_mlp(mixer),
            ChannelMixer::Experts(mixer) => table.experts(mixer),
            ChannelMixer::MlpAndExperts(mixer) => table.mlp_and_experts(mixer),
        });
        rows.extend(table.norms(block.residual));
        rows.extend(block.residual.alt_up().into_iter().flat_map(|alt_up| table.alt_up(*alt_up, layer)));
        rows.extend(block.per_layer_input.iter().flat_map(|input| table.per_layer_input(input, layer)));
        rows.extend(block.has_output_factor.then(|| table.norm(BlockPart::OutputFactor, 1, false)));
        // Linear layers come before norms: runs number parameters and dropout masks in this order.
        rows.sort_by_key(|module| module.part.group().is_none());
        BlockLayout(rows)
    }

    /// Returns all modules of a block.
    pub fn modules(&self) -> &[BlockModule] {
        &self.0
    }

    /// Returns the module with this role; `None` in a model without it.
    pub fn module(&self, part: BlockPart) -> Option<&BlockModule> {
        self.0.iter().find(|module| module.part == part)
    }

    /// Returns the linear layers that a token uses: of experts, as many as are chosen for it, since
    /// all have the same shapes.
    pub fn active_linears(&self, config: &ModelConfig, layer: usize) -> impl Iterator<Item = &BlockModule> {
        let chosen = config.blocks[layer].channel_mixer.experts().map_or(0, |experts| experts.router.chosen);
        self.linears().filter(move |module| module.part.expert().is_none_or(|e| usize::from(e) < chosen))
    }

    /// Returns the number of weights of the experts that a token does not use.
    fn unused_weights(&self, config: &ModelConfig, layer: usize) -> u64 {
        let weights = |module: &BlockModule| module.weight.dims().iter().product::<usize>() as u64;
        let all: u64 = self.linears().map(weights).sum();
        all - self.active_linears(config, layer).map(weights).sum::<u64>()
    }

    /// Returns the linear layers, in the order in which dropout numbers them.
    pub fn linears(&self) -> impl Iterator<Item = &BlockModule> {
        self.0.iter().filter(|module| module.part.group().is_some())
    }
}

/// Returns the number of weights that a token does not use: those of experts that are not chosen,
/// over all blocks, and the table of per-layer inputs, of which it reads a row; 0 without both.
pub fn unused_weights(config: &ModelConfig) -> u64 {
    let of_layer = |layer| BlockLayout::new(config, layer).unused_weights(config, layer);
    let table = (config.per_layer_rows() * config.per_layer_width(config.num_layers())) as u64;
    (0..config.num_layers()).map(of_layer).sum::<u64>() + table
}

/// Returns the stacks in which checkpoints of this model may have its experts, each with the names
/// and shapes of its parts in order.
pub fn stacked_experts(config: &ModelConfig) -> Vec<StackParts> {
    let Some(names) = &config.family.stacked_experts else { return Vec::new() };
    let mut stacks = Vec::new();
    for layer in 0..config.num_layers() {
        let Some(experts) = config.blocks[layer].channel_mixer.experts() else { continue };
        let layout = BlockLayout::new(config, layer);
        let mut add = |name: &str, rows: usize, columns: usize, is_down: bool| {
            let of_experts = layout
                .linears()
                .filter(|module| module.part.expert().is_some() && module.part.is_last_of_mlp() == is_down);
            let part = |module: &BlockModule| StackPart {
                name: module.part.parameter(&module.name_in(layer)),
                shape: module.weight.dims(),
            };
            let parts = of_experts.map(part).collect();
            let name = format!("model.layers.{layer}.{name}");
            let transposed = config.family.transposes_stacks;
            let [rows, columns] = if transposed { [columns, rows] } else { [rows, columns] };
            let shape = vec![experts.count, rows, columns];
            stacks.push(StackParts { stack: Arc::new(Stack { name, shape, transposed }), parts });
        };
        add(names.gate_up, 2 * experts.width, config.hidden_size, false);
        add(names.down, config.hidden_size, experts.width, true);
    }
    stacks
}

/// Returns the modules behind the per-layer inputs other than the embedding: their table,
/// projection and norm; none in a model without such inputs.
pub fn per_layer_modules(config: &ModelConfig) -> Vec<String> {
    let is_part = |module: &NamedModule| match module.part {
        ModelPart::EmbedPerLayer => true,
        ModelPart::Block { part, .. } => part.makes_per_layer_inputs(),
        _ => false,
    };
    model_modules(config).into_iter().filter(is_part).map(|module| module.name).collect()
}

/// Returns the modules of blocks whose names have no block, and the table of per-layer inputs; none
/// in most families.
pub(crate) fn modules_beside_blocks(config: &ModelConfig) -> Vec<String> {
    let is_beside = |module: &NamedModule| match module.part {
        ModelPart::EmbedPerLayer => true,
        ModelPart::Block { part, .. } => part.is_of_model(),
        _ => false,
    };
    model_modules(config).into_iter().filter(is_beside).map(|module| module.name).collect()
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
    /// The table of each token's part in the per-layer inputs of all blocks.
    EmbedPerLayer,
    /// A module of a block.
    Block {
        /// Number of the block.
        layer: usize,
        /// The role in the block.
        part: BlockPart,
    },
    /// The norm after the last block.
    FinalNorm,
    /// The output layer.
    LmHead,
}

impl ModelPart {
    /// Returns the segment that uses it.
    pub fn segment(self) -> Segment {
        match self {
            ModelPart::EmbedTokens | ModelPart::EmbedPerLayer => Segment::Embed,
            ModelPart::Block { layer, .. } => Segment::Block(layer),
            ModelPart::FinalNorm | ModelPart::LmHead => Segment::Head,
        }
    }

    /// Returns whether it is a norm.
    pub fn is_norm(self) -> bool {
        match self {
            ModelPart::EmbedTokens | ModelPart::EmbedPerLayer | ModelPart::LmHead => false,
            ModelPart::Block { part, .. } => part.group().is_none() && !part.is_apart(),
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

/// Returns all modules of a model of shape `config`, in the order of their parameters, also a tied
/// head.
pub(super) fn model_modules(config: &ModelConfig) -> Vec<NamedModule> {
    let whole = |name: &str, part, weight| NamedModule { name: name.into(), part, weight, bias: false };
    let bias = config.hidden_norm.has_bias();
    let table = WeightShape::Matrix { out: config.vocab_size, inputs: config.hidden_size };
    let mut all = vec![whole(EMBED_TOKENS_MODULE, ModelPart::EmbedTokens, table)];
    let per_layer = config.per_layer_width(config.num_layers());
    if per_layer > 0 {
        let table = WeightShape::Matrix { out: config.per_layer_rows(), inputs: per_layer };
        all.push(whole(EMBED_PER_LAYER_MODULE, ModelPart::EmbedPerLayer, table));
    }
    for layer in 0..config.num_layers() {
        all.extend(BlockLayout::new(config, layer).modules().iter().map(|module| NamedModule {
            name: module.name_in(layer),
            part: ModelPart::Block { layer, part: module.part },
            weight: module.weight,
            bias: module.bias,
        }));
    }
    let gain = WeightShape::Gain(config.hidden_size);
    all.push(NamedModule { bias, ..whole(FINAL_NORM_MODULE, ModelPart::FinalNorm, gain) });
    all.push(whole(LM_HEAD_MODULE, ModelPart::LmHead, table));
    all
}
