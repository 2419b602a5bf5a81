//! Peak transient GPU memory of a step. Freed buffers are reused, so only tensors that live at the
//! same time count.

use std::collections::{HashMap, HashSet};

use candle_core::DType;

use super::activation_memory::ActivationMemory;
use super::cuda_graphs::held_bytes;
use super::fp8_weights::Fp8Weights;
use crate::loading::adapter_setup::AdapterSetup;
use crate::model::{
    BlockLayout, BlockModule, Experts, LinearGroup, ModelConfig, TokenMixer, Values, WeightShape,
};
use crate::ops::GEMM_WORKSPACE;
use crate::ops::cross_entropy::logits_bytes;
use crate::ops::matmul_fp8::Fp8Rows;
use crate::parallel::{MeshShape, ParamDesc, ShardingStrategy, communicator_count};

/// Bytes of an f32 value.
const F32: usize = 4;
/// Bytes that NCCL holds on a GPU for a communicator: buffers of its channels and connections. An
/// assumption: users report 0.3 to 1.5 GB on hosts of 8 GPUs.
pub(crate) const COMMUNICATOR: u64 = 500_000_000;

/// Returns the bytes that NCCL holds on the GPU of a rank that trains parameters of `descs`.
pub(super) fn nccl_bytes(strategy: ShardingStrategy, mesh: MeshShape, descs: &[ParamDesc]) -> u64 {
    let trained = descs.iter().filter(|desc| desc.kind.trains()).map(|desc| desc.kind.role());
    COMMUNICATOR * communicator_count(strategy, mesh, trained) as u64
}

/// One micro-batch on its way through the blocks of a model.
pub(super) struct GpuStep<'a> {
    config: &'a ModelConfig,
    tokens: usize,
    /// Bytes of one activation value.
    size: usize,
    /// The distinct shapes of blocks.
    shapes: Vec<BlockShape>,
    /// The shape of each block.
    shape_of: Vec<usize>,
    /// False if the weights of the blocks train, so that their gradients need the outputs' last.
    has_adapter: bool,
    has_dora: bool,
    has_dropout: bool,
    /// True if the computation is in bf16.
    in_bf16: bool,
    /// True if the codes of weights in fp8 are kept.
    keeps_codes: bool,
    /// True if a product in fp8 multiplies by the scales itself.
    scales_rows: bool,
    /// True if the blocks that can be are launched as graphs.
    has_graphs: bool,
}

/// Peak bytes of transient tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Workspace {
    /// With the panels that a second queue makes ahead, and the results that graphs hold.
    pub(super) all: u64,
    /// Without them: a run does without if its memory is short.
    pub(super) required: u64,
}

impl Workspace {
    /// Returns a workspace that is required.
    pub(super) fn of(bytes: u64) -> Self {
        Workspace { all: bytes, required: bytes }
    }

    /// Returns the larger of this and of `bytes` required bytes.
    pub(super) fn at_least(self, bytes: u64) -> Self {
        Workspace { all: self.all.max(bytes), required: self.required.max(bytes) }
    }
}

/// A block as far as it decides transient memory.
#[derive(PartialEq)]
struct BlockShape {
    /// True if a graph can hold its launches.
    launches_alone: bool,
    layers: Vec<LinearLayer>,
    token_mixer: TokenMixer,
    experts: Option<Experts>,
    /// True if it has experts and an MLP.
    has_both: bool,
    has_post_norms: bool,
    is_parallel: bool,
    /// Inner width of the MLP.
    mlp_width: usize,
    /// Width of the first projections of the MLP together.
    first_mlp_width: usize,
    /// Width of the per-layer input.
    per_layer_input: usize,
}

/// A linear layer of a block.
#[derive(PartialEq, Eq)]
struct LinearLayer {
    group: LinearGroup,
    out: usize,
    inputs: usize,
    is_quantized: bool,
    in_fp8: bool,
    /// The rank of its adapter, if it has one.
    r: Option<usize>,
}

impl<'a> GpuStep<'a> {
    /// Describes a micro-batch of `tokens` tokens with activations in `dtype`. `dequantized` names
    /// the matrices that a product dequantizes into panels.
    pub(super) fn new(
        config: &'a ModelConfig,
        dequantized: &HashSet<&str>,
        adapter_setup: Option<&AdapterSetup>,
        (tokens, dtype): (usize, DType),
        fp8: Fp8Weights<'_>,
    ) -> Self {
        let targets = adapter_setup.map_or(&[][..], |setup| &setup.targets);
        let ranks: HashMap<&str, usize> =
            targets.iter().map(|target| (target.name.as_str(), target.r)).collect();
        let shape = |block: usize| {
            let layer = |module: &BlockModule| {
                let WeightShape::Matrix { out, inputs } = module.weight else { return None };
                let name = module.name_in(block);
                let weight = format!("{name}.weight");
                Some(LinearLayer {
                    group: module.part.group()?,
                    out,
                    inputs,
                    is_quantized: dequantized.contains(weight.as_str()),
                    in_fp8: fp8.names.is_some_and(|names| names.contains(&weight)),
                    r: ranks.get(name.as_str()).copied(),
                })
            };
            BlockShape {
                launches_alone: config.launches_alone(block),
                layers: BlockLayout::new(config, block).modules().iter().filter_map(layer).collect(),
                token_mixer: config.blocks[block].token_mixer,
                experts: config.blocks[block].channel_mixer.experts().copied(),
                has_both: config.blocks[block].channel_mixer.has_both(),
                has_post_norms: config.blocks[block].residual.has_post_norms(),
                is_parallel: config.blocks[block].residual.is_parallel(),
                mlp_width: config.blocks[block].channel_mixer.mlp_width(config.intermediate_size),
                first_mlp_width: config.blocks[block].channel_mixer.first_widths()
                    * config.blocks[block].channel_mixer.mlp_width(config.intermediate_size),
                per_layer_input: config.blocks[block].per_layer_input.map_or(0, |input| input.width),
            }
        };
        let (mut shapes, mut shape_of) = (Vec::new(), Vec::new());
        for block in (0..config.num_layers()).map(shape) {
            shape_of.push(shapes.iter().position(|known| *known == block).unwrap_or(shapes.len()));
            if shape_of.last() == Some(&shapes.len()) {
                shapes.push(block);
            }
        }
        GpuStep {
            config,
            tokens,
            size: dtype.size_in_bytes(),
            shapes,
            shape_of,
            has_adapter: adapter_setup.is_some(),
            has_dora: adapter_setup.is_some_and(|setup| setup.config.spec.use_dora),
            has_dropout: adapter_setup.is_some_and(|setup| setup.config.lora_dropout as f32 > 0.0),
            in_bf16: dtype == DType::BF16,
            keeps_codes: fp8.keeps_codes,
            scales_rows: fp8.scales_rows,
            has_graphs: false,
        }
    }

    /// Returns the same step with graphs of blocks, or without.
    pub(super) fn with_graphs(self, has_graphs: bool) -> Self {
        GpuStep { has_graphs, ..self }
    }

    /// Returns the peak bytes beside the kept activations, which are the same during the loss and
    /// the backward of a block. The backward of the last block reuses the buffers of the loss, so
    /// only the larger of the two counts.
    pub(super) fn workspace(&self, activations: &ActivationMemory<'_>) -> Workspace {
        let [all, required] = [true, false].map(|ahead| self.peak(activations, ahead));
        Workspace { all, required }
    }

    /// Returns the peak with or without panels that are made ahead and results that graphs hold.
    fn peak(&self, activations: &ActivationMemory<'_>, is_all: bool) -> u64 {
        // Beside the logits: the last hidden states, their normed copy, and the gradients of both.
        let hidden = self.rows(4 * self.config.hidden_size);
        let loss = hidden + logits_bytes(self.config.vocab_size, self.tokens) as u64;
        // The last block of each shape that keeps panels or not: later ones have freed least.
        let mut last: HashMap<(usize, bool), usize> = HashMap::new();
        for (layer, shape) in self.shape_of.iter().enumerate() {
            let keeps_panels = self.in_bf16 && activations.blocks().ends_group(layer);
            last.insert((*shape, keeps_panels), layer);
        }
        let of_block = |(&(shape, keeps_panels), &layer): (&(usize, bool), &usize)| {
            let shape = &self.shapes[shape];
            let has_graph = self.has_graphs && shape.launches_alone;
            let has_panels_ahead = is_all && !has_graph;
            let temporaries = BlockStep { step: self, shape, keeps_panels, has_panels_ahead }.temporaries();
            let widths = shape.layers.iter().map(|layer| layer.out + layer.inputs).sum();
            let held = if has_graph && is_all { held_bytes(self.rows(widths)) } else { 0 };
            (temporaries + held).saturating_sub(activations.freed(layer) as u64)
        };
        let temporaries = last.iter().map(of_block).max().unwrap_or(0);
        GEMM_WORKSPACE as u64 + loss.max(temporaries)
    }

    /// Bytes of activations of this width.
    fn rows(&self, width: usize) -> u64 {
        (self.tokens * width * self.size) as u64
    }
}

/// The step through one block.
struct BlockStep<'a> {
    step: &'a GpuStep<'a>,
    shape: &'a BlockShape,
    /// True if a panel that recomputing and backward both read is kept.
    keeps_panels: bool,
    /// True if the memory suffices to make panels ahead.
    has_panels_ahead: bool,
}

impl BlockStep<'_> {
    /// Returns the largest sum of tensors that live together at any stage of the block: of its
    /// backward, as in `model::backward`, and of its forward under recompute.
    fn temporaries(&self) -> u64 {
        let config = self.step.config;
        let d = config.hidden_size;
        let rows = |width| self.step.rows(width);
        let through = |group| self.product_backward(group);
        // The gradient through the channel mixer, which waits for attention's in a parallel plan.
        let around = if self.shape.is_parallel { rows(d) } else { 0 };
        let mixer = &self.shape.token_mixer;
        let (input, output) = (mixer.input_width(), mixer.output_width());
        let after_o = self.panel_ahead(LinearGroup::O, true);
        let of_tokens = [
            // Beside `around`: through the output projection; then the operations between the
            // projections; then through the first projections to their input, and through its norm.
            around + rows(2 * d + output) + through(LinearGroup::O),
            around + rows(2 * d + self.inside_token_mixer()) + self.delta_workspace() + after_o,
            around + rows(2 * d + self.inside_token_mixer()) + through(LinearGroup::KvUp),
            around + rows(2 * d + self.inside_token_mixer()) + through(LinearGroup::QUp),
            around + rows(3 * d + input) + through(LinearGroup::Qkv),
            around + rows(5 * d) + self.until_norm(input),
            // Forward: the gradient of the block's output, and the layer's input; for the last
            // layer, its output.
            rows(2 * d) + self.product_forward(LinearGroup::Qkv),
            rows(d + output) + self.product_forward(LinearGroup::O),
        ];
        let mut of_channels = match &self.shape.experts {
            None => self.of_mlp(self.shape.mlp_width),
            Some(experts) => self.of_experts(experts),
        };
        if self.shape.has_both {
            of_channels.extend(self.of_mlp(self.shape.mlp_width));
            // Beside each of both: the gradients of their sum and of their input, and the other's
            // output.
            of_channels.iter_mut().for_each(|bytes| *bytes += rows(3 * d));
        }
        let stages = of_tokens.into_iter().chain(of_channels).chain(self.of_per_layer_input());
        let groups = LinearGroup::in_order(false).into_iter().chain([LinearGroup::PerLayerModel]);
        let groups_with_panels = groups.filter(|group| self.keeps_panel(*group));
        stages.max().unwrap_or(0)
            + groups_with_panels.map(|group| self.kept_panel(group)).sum::<u64>()
            + self.of_streams()
    }

    /// Returns the bytes of the f32 tensors of AltUp, over all stages: the streams, their
    /// predictions, the gradients of both, and a sum of products; 0 with one hidden state.
    fn of_streams(&self) -> u64 {
        let config = self.step.config;
        let width = config.streams_width();
        if width == config.hidden_size {
            return 0;
        }
        (self.step.tokens * 5 * width * F32) as u64
    }

    /// Returns the values of a token that live together in the backward of a token mixer between
    /// its projections.
    fn inside_token_mixer(&self) -> usize {
        let heads = self.shape.token_mixer.attention().map_or(self.step.config.heads, |mixer| mixer.heads);
        let (q, qk, qkv) = (heads.q_width(), heads.qk_width(), heads.qkv_width());
        match &self.shape.token_mixer {
            // Also the normed values and their gradient, or the gradients twice.
            TokenMixer::Attention(mixer) if mixer.values != Values::Projected => {
                q + qk + qkv + 3 * heads.kv_width()
            }
            // The gradient of the output, the rotated q and k, and the gradients of q, k and v.
            TokenMixer::Attention(mixer) if !mixer.has_gates => q + qk + qkv,
            // Also the gates with the output and the gradients of both, or the gradients twice.
            TokenMixer::Attention(_) => (q + qk + qkv + q).max(5 * q).max(2 * (qkv + q) + q),
            // The gradient of the output; queries, keys and values, q and k rotated, and the
            // gradients of all.
            TokenMixer::Latent(_) => q + qk + 2 * qkv,
            // The gradients of the norm's input and of all inputs, the convolution and its
            // gradient; or those of all inputs twice.
            TokenMixer::GatedDelta(mixer) => {
                let (conv, value) = (mixer.heads.conv_width(), mixer.heads.value_width());
                (value + mixer.input_width() + 2 * conv).max(2 * mixer.input_width())
            }
            // Gates and input; the gated input, its convolution and the gradients of both, of the
            // product and of the output gate; then the gradients of all inputs.
            TokenMixer::ShortConv(mixer) => 3 * mixer.input_width(),
        }
    }

    /// Returns the bytes of tensors of other shapes in the backward of the delta rule.
    fn delta_workspace(&self) -> u64 {
        match &self.shape.token_mixer {
            TokenMixer::Attention(_) | TokenMixer::Latent(_) | TokenMixer::ShortConv(_) => 0,
            TokenMixer::GatedDelta(mixer) => mixer.heads.backward_workspace(self.step.tokens) as u64,
        }
    }

    /// Returns the bytes of a gradient that waits for the norm of a layer's input, since a weight's
    /// gradient comes after it.
    fn until_norm(&self, width: usize) -> u64 {
        if self.step.has_adapter { 0 } else { self.step.rows(width) }
    }

    /// Returns the sums of tensors at the stages of an MLP of width `f`.
    fn of_mlp(&self, f: usize) -> Vec<u64> {
        let (d, first, rows) =
            (self.step.config.hidden_size, self.shape.first_mlp_width, |width| self.step.rows(width));
        vec![
            // The gradient of the product of gate and up through the down projection.
            rows(f + d) + self.product_backward(LinearGroup::Down),
            // The product, in place of its gradient, and the gradients of gate and up.
            rows(f + first + d) + self.panel_ahead(LinearGroup::Down, true),
            // Through gate and up to their input, then through its norm, which is computed again.
            rows(first + 2 * d) + self.product_backward(LinearGroup::GateUp),
            rows(4 * d) + self.until_norm(first) + self.panel_ahead(LinearGroup::GateUp, true),
            // Forward.
            rows(2 * d) + self.product_forward(LinearGroup::GateUp),
            rows(2 * d + f) + self.product_forward(LinearGroup::Down),
        ]
    }

    /// Returns the sums of tensors at the stages of the per-layer input, and in the first block of
    /// those that make the inputs of all blocks; none without such inputs.
    fn of_per_layer_input(&self) -> Vec<u64> {
        let (d, p, rows) =
            (self.step.config.hidden_size, self.shape.per_layer_input, |width| self.step.rows(width));
        if p == 0 {
            return Vec::new();
        }
        let all = self.group(LinearGroup::PerLayerModel).map(|layer| layer.out).sum::<usize>();
        let of_model = if all == 0 {
            [0; 2]
        } else {
            // The projection, its norm's input, and the gradients of both; forward, also the rows.
            [
                rows(3 * d + 4 * all) + self.product_backward(LinearGroup::PerLayerModel),
                rows(2 * d + 4 * all) + self.product_forward(LinearGroup::PerLayerModel),
            ]
        };
        let of_block = [
            // The gradient of the gated input; then the gate beside the input, and both gradients.
            rows(2 * d + p) + self.product_backward(LinearGroup::PerLayerProjection),
            rows(2 * d + 5 * p) + self.panel_ahead(LinearGroup::PerLayerProjection, true),
            rows(3 * d + 4 * p) + self.product_backward(LinearGroup::PerLayerGate),
            // Forward.
            rows(2 * d + p) + self.product_forward(LinearGroup::PerLayerGate),
            rows(2 * d + 3 * p) + self.product_forward(LinearGroup::PerLayerProjection),
        ];
        of_block.into_iter().chain(of_model).collect()
    }

    /// Returns the sums of tensors at the stages of a mixture of experts. The layers of one expert
    /// stand for those of all, which are computed one after the other. An MLP beside them comes
    /// first in both passes, so that the panel of the product after it waits meanwhile.
    fn of_experts(&self, experts: &Experts) -> Vec<u64> {
        let (d, f, k) = (self.step.config.hidden_size, experts.width, experts.router.chosen);
        let (rows, copies) = (|width| self.step.rows(width), |width| self.step.rows(k * width));
        let (gate_up, down) = (LinearGroup::ExpertGateUp(0), LinearGroup::ExpertDown(0));
        // The gradients of gates and ups that wait for the input, for the gradients of weights.
        let waiting = if self.step.has_adapter { 0 } else { copies(2 * f) };
        let shared_width = experts.shared.map_or(0, |shared| shared.width);
        let waiting_shared = self.until_norm(2 * shared_width);
        // The weights of all experts for each token, and their gradients, in f32 too.
        let of_biases = if experts.layer_biases { rows(5 * experts.count) } else { 0 };
        // The shared expert's gradients beside the copies of the input's.
        let of_shared = experts.shared.map_or(0, |shared| {
            let through = [LinearGroup::SharedGateUp, LinearGroup::SharedDown];
            let most = through.map(|group| self.product_backward(group)).into_iter().max();
            rows(2 * d + 3 * shared.width) + copies(d) + waiting + most.unwrap_or(0)
        });
        let backward = [
            of_shared,
            // The copies of the output's gradient through the down projections.
            rows(d) + copies(d + f) + self.product_backward(down),
            // The product, its gradient, and the gradients of gate and up.
            rows(d) + copies(4 * f) + of_biases,
            // Through gate and up to the copies of the input, and to the input.
            rows(d) + copies(2 * f + d) + self.product_backward(gate_up),
            rows(3 * d) + copies(d),
            // The input is copied again for the gradients of its layers.
            rows(4 * d) + copies(d) + waiting + waiting_shared,
        ];
        // The copies of the input; the product and the weighted one; the copies of the output.
        let forward = [
            rows(2 * d) + copies(d) + self.product_forward(gate_up),
            rows(2 * d) + copies(2 * f),
            rows(2 * d) + copies(f + d) + self.product_forward(down),
        ];
        let [after_down, after_gate_up] =
            [(LinearGroup::Down, false), (LinearGroup::GateUp, true)].map(|(group, in_backward)| {
                if self.shape.has_both { self.panel_ahead(group, in_backward) } else { 0 }
            });
        let backward = backward.map(|bytes| bytes + after_gate_up);
        backward.into_iter().chain(forward.map(|bytes| bytes + after_down)).collect()
    }

    /// True if the panel of a group is kept from recomputing to the end of the block's backward.
    /// Recomputing multiplies by `down_proj` only before a norm of its output.
    fn keeps_panel(&self, group: LinearGroup) -> bool {
        let is_read = group != LinearGroup::Down || self.shape.has_post_norms;
        let is_one = if self.has_fp8(group) {
            !self.step.keeps_codes && !self.has_dora(group)
        } else {
            self.is_one_panel(group)
        };
        self.keeps_panels && is_read && is_one
    }

    /// Returns the bytes of a group's panel in bf16, or of its codes in fp8.
    fn kept_panel(&self, group: LinearGroup) -> u64 {
        if self.has_fp8(group) { self.codes(group) } else { self.dequantized(group) }
    }

    fn in_fp8(&self, group: LinearGroup) -> impl Iterator<Item = &LinearLayer> {
        self.group(group).filter(|layer| layer.in_fp8)
    }

    fn has_fp8(&self, group: LinearGroup) -> bool {
        self.in_fp8(group).next().is_some()
    }

    /// Returns the bytes of the weights of a group in fp8.
    fn codes(&self, group: LinearGroup) -> u64 {
        self.in_fp8(group).map(|layer| Fp8Rows::bytes(layer.out, layer.inputs) as u64).sum()
    }

    /// Returns the bytes of panels and codes during a product of the group: of the weights, if each
    /// use quantizes them, and of the other operand. The gradient of the input also transposes the
    /// weights' codes.
    fn operands(&self, group: LinearGroup, backward: bool) -> u64 {
        let panel = self.panel(group);
        if !self.has_fp8(group) {
            return panel;
        }
        // With DoRA each layer is a product of its own, and the norm reads the panel.
        let has_dora = self.has_dora(group);
        let widths = self.in_fp8(group).map(|layer| layer.out);
        let out = if has_dora { widths.max().unwrap_or(0) } else { widths.sum() };
        let inputs = self.in_fp8(group).map(|layer| layer.inputs).max().unwrap_or(0);
        let made = !self.step.keeps_codes && !self.keeps_panel(group);
        let own = if made { Fp8Rows::bytes(out, inputs) } else { 0 };
        let (tokens, result) = (self.step.tokens, if backward { inputs } else { out });
        let turned = if backward { Fp8Rows::bytes(inputs, out) + F32 * inputs } else { 0 };
        let sums = if self.step.scales_rows { 0 } else { tokens * result * F32 };
        let rows = Fp8Rows::bytes(tokens, if backward { out } else { inputs });
        let rest = (rows + turned + sums) as u64;
        own as u64 + if has_dora && !backward { panel + rest } else { panel.max(rest) }
    }

    /// True if all matrices of a group are dequantized together.
    fn is_one_panel(&self, group: LinearGroup) -> bool {
        self.group(group).all(|layer| layer.is_quantized) && !self.has_dora(group)
    }

    /// Returns the bytes of the dequantized matrices of a group.
    fn dequantized(&self, group: LinearGroup) -> u64 {
        self.group(group).filter(|layer| layer.is_quantized).map(|layer| self.matrix(layer)).sum()
    }

    /// Returns the bytes of a dequantized matrix.
    fn matrix(&self, layer: &LinearLayer) -> u64 {
        (layer.out * layer.inputs * self.step.size) as u64
    }

    fn group(&self, group: LinearGroup) -> impl Iterator<Item = &LinearLayer> {
        self.shape.layers.iter().filter(move |layer| layer.group == group)
    }

    fn adapted(&self, group: LinearGroup) -> impl Iterator<Item = &LinearLayer> {
        self.group(group).filter(|layer| layer.r.is_some())
    }

    /// True if a layer of the group has DoRA.
    fn has_dora(&self, group: LinearGroup) -> bool {
        self.step.has_dora && self.adapted(group).next().is_some()
    }

    /// The widest input of a layer with an adapter.
    fn adapted_inputs(&self, group: LinearGroup) -> usize {
        self.adapted(group).map(|layer| layer.inputs).max().unwrap_or(0)
    }

    /// Returns the bytes of dequantized matrices that a product of the group holds, beside kept
    /// ones. With DoRA, for codes in fp8, or if some layers are dense, only one matrix is held at a
    /// time.
    fn panel(&self, group: LinearGroup) -> u64 {
        let has_fp8 = self.has_fp8(group);
        if self.keeps_panel(group) || has_fp8 && self.step.keeps_codes && !self.has_dora(group) {
            return 0;
        }
        if self.is_one_panel(group) && !has_fp8 {
            return self.dequantized(group);
        }
        let quantized = self.group(group).filter(|layer| layer.is_quantized);
        quantized.map(|layer| self.matrix(layer)).max().unwrap_or(0)
    }

    /// Returns the bytes of the panel that a second queue makes from the product of `group` on, for
    /// the next product that dequantizes, as in `model::PanelsAhead`.
    fn panel_ahead(&self, group: LinearGroup, in_backward: bool) -> u64 {
        if !self.has_panels_ahead {
            return 0;
        }
        let order = LinearGroup::in_order(in_backward);
        let Some(index) = order.iter().position(|product| *product == group) else { return 0 };
        let dequantizes = |group: &&LinearGroup| self.dequantizes(**group);
        let (begun, later) = order.split_at(index + 1);
        let next = later.iter().find(dequantizes).filter(|_| begun.iter().any(|group| dequantizes(&group)));
        next.map_or(0, |group| self.dequantized(*group))
    }

    /// True if a product of the group makes one panel for itself.
    fn dequantizes(&self, group: LinearGroup) -> bool {
        let is_one = self.is_one_panel(group) && !self.has_fp8(group);
        is_one && !self.keeps_panel(group) && self.dequantized(group) > 0
    }

    /// True if the panel of a group's forward is made during the product before it.
    fn is_made_ahead(&self, group: LinearGroup) -> bool {
        let order = LinearGroup::in_order(false);
        let first = order.into_iter().find(|group| self.dequantizes(*group));
        let is_later = order.contains(&group) && first != Some(group);
        self.has_panels_ahead && is_later && self.dequantizes(group)
    }

    /// Returns the bytes beside input and output during the forward of a group.
    fn product_forward(&self, group: LinearGroup) -> u64 {
        let ahead = self.panel_ahead(group, false);
        let dropped = if self.step.has_dropout { self.step.rows(self.adapted_inputs(group)) } else { 0 };
        let panel = self.operands(group, false);
        // DoRA's norm and products read one panel.
        if self.has_dora(group) {
            return panel + dropped + ahead;
        }
        // Branches come before a product of weights, and before the next panel is begun.
        let begun = match (self.dequantizes(group), self.is_made_ahead(group)) {
            (true, true) => panel,
            (true, false) => 0,
            (false, _) => ahead,
        };
        (begun + dropped.max(self.shared_a(group))).max(panel + ahead)
    }

    /// Returns the sum of the ranks of a group's adapters.
    fn rank(&self, group: LinearGroup) -> usize {
        self.adapted(group).filter_map(|layer| layer.r).sum()
    }

    /// Returns the bytes of the A of several adapters with one input, which a pass copies into one
    /// matrix.
    fn shared_a(&self, group: LinearGroup) -> u64 {
        let is_shared = self.adapted(group).nth(1).is_some() && !self.step.has_dropout;
        if !is_shared || self.has_dora(group) {
            return 0;
        }
        (self.rank(group) * self.adapted_inputs(group) * self.step.size) as u64
    }

    /// Returns the bytes beside the gradients of input and output during the backward of a group.
    fn product_backward(&self, group: LinearGroup) -> u64 {
        // The gradient through a branch with dropout, in f32, and a copy of it with values dropped.
        let through_branch = (self.step.tokens * self.adapted_inputs(group) * F32) as u64;
        let dropped = if self.step.has_dropout { 2 * through_branch } else { 0 };
        if !self.has_dora(group) {
            // The gradients of inner activations; before the product, those of a copied A in f32.
            let (a, du) = (self.shared_a(group), self.step.rows(self.rank(group)));
            let da = a / self.step.size as u64 * F32 as u64;
            let ahead = self.panel_ahead(group, true);
            return a + du + self.operands(group, true).max(dropped).max(da) + ahead;
        }
        let beside_panel = if self.step.has_dropout { through_branch } else { 0 };
        let out = self.adapted(group).map(|layer| layer.out).max().unwrap_or(0);
        let ahead = self.panel_ahead(group, true);
        self.step.rows(out) + (self.operands(group, true) + beside_panel).max(dropped) + ahead
    }
}

#[cfg(test)]
mod tests;
