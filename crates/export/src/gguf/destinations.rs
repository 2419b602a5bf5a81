//! The tensors of a parameter: llama.cpp's names, and which rows of the parameter each has.
//!
//! Most parameters are one tensor with the same rows. llama.cpp wants queries, keys and values of
//! all heads side by side, gates and ups of experts apart, the value heads of Gated DeltaNet in
//! turns, and the keys of latent attention transposed (conversion/*.py,
//! gguf-py/gguf/tensor_mapping.py).

use crate::model::{
    BlockPart, DeltaMixer, FusedQkv, GgufFacts, LatentMixer, ModelConfig, ModelPart, ParamSpec, Role,
    TokenMixer, XIELU,
};
use crate::ops::glu::Activation;
use crate::weights::RowRun;

/// A tensor of the file with rows of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorRows {
    /// Its name in llama.cpp.
    pub(super) name: String,
    /// The rows in order; `None`: all rows of the parameter.
    pub(super) rows: Option<Vec<RowRun>>,
    /// The columns in order; `None`: as in the parameter.
    pub(super) columns: Option<Vec<RowRun>>,
    /// The number of heads, if the matrix of each is apart.
    pub(super) heads: Option<usize>,
    /// The number of heads whose matrices it holds transposed.
    pub(super) transposed_heads: Option<usize>,
    /// True if `rows` counts single elements.
    pub(super) by_element: bool,
    /// The position of its one number in a list of the file's keys; `None`: it is a tensor.
    pub(super) of_list: Option<usize>,
}

impl TensorRows {
    fn of(name: String) -> Self {
        TensorRows {
            name,
            rows: None,
            columns: None,
            heads: None,
            transposed_heads: None,
            by_element: false,
            of_list: None,
        }
    }

    fn with(mut self, rows: Option<Vec<RowRun>>) -> Self {
        self.rows = rows;
        self
    }

    /// Returns its shape, given that of the parameter.
    pub(super) fn shape(&self, part: ModelPart, parameter: &[usize]) -> Vec<usize> {
        let columns = parameter.last().copied().unwrap_or(1);
        let count = self.rows.as_ref().map(|rows| rows.iter().map(RowRun::count).sum::<usize>());
        let mut shape = parameter.to_vec();
        match (count, self.transposed_heads) {
            (Some(count), Some(heads)) => return vec![heads, columns, count / heads],
            (Some(count), None) if self.by_element => {
                return vec![parameter[0], count / parameter[0].max(1)];
            }
            (Some(count), None) => match self.heads {
                Some(heads) => return vec![heads, count / heads.max(1), columns],
                None => shape[0] = count,
            },
            _ => {}
        }
        match part {
            // The factor on the shared expert is a vector.
            ModelPart::Block { part: BlockPart::SharedFactor, .. } => drop(shape.remove(0)),
            ModelPart::Block { part: BlockPart::DeltaConv | BlockPart::ConvTaps, .. } if shape.len() > 1 => {
                shape.remove(1);
            }
            // Some checkpoints have it as one row.
            ModelPart::Block { part: BlockPart::RouterBias, .. } => shape = vec![shape.iter().product()],
            _ => {}
        }
        shape
    }
}

/// Returns the length of a row of a parameter; a vector has rows of one value.
pub(super) fn row_of(shape: &[usize]) -> usize {
    match shape {
        [] | [_] => 1,
        [.., row] => *row,
    }
}

/// Returns the tensors of a parameter.
pub(super) fn destinations(config: &ModelConfig, spec: &ParamSpec) -> Vec<TensorRows> {
    let facts = &config.family.gguf;
    let ModelPart::Block { layer, part } = spec.part else {
        let name = match spec.part {
            ModelPart::EmbedTokens => "token_embd",
            ModelPart::EmbedPerLayer => "per_layer_token_embd",
            ModelPart::FinalNorm => facts.final_norm,
            ModelPart::LmHead | ModelPart::Block { .. } => "output",
        };
        let end = if spec.role == Role::Bias { "bias" } else { "weight" };
        return vec![TensorRows::of(format!("{name}.{end}"))];
    };
    let of_block = if part.is_of_model() { String::new() } else { format!("blk.{layer}.") };
    let tensor = |name: &str| TensorRows::of(format!("{of_block}{name}{}", end(part, spec.role)));
    let all = || tensor(name(facts, part));
    let (rows, columns) = (spec.shape.first().copied().unwrap_or(1), row_of(&spec.shape));
    let half = |i: usize| Some(vec![RowRun::range(i * rows / 2, rows / 2)]);
    match (part, config.blocks[layer].token_mixer) {
        (BlockPart::GateUpProj, _) if facts.splits_gate_up => {
            vec![tensor("ffn_gate").with(half(0)), tensor("ffn_up").with(half(1))]
        }
        (part, _) if XIELU.contains(&part) => {
            let list = TensorRows::of(name(facts, part).to_owned());
            vec![TensorRows { of_list: Some(layer), ..list }]
        }
        (BlockPart::ExpertGateUp(_), _) if is_alternating(config, layer) => {
            alternating(tensor, rows / 2).into()
        }
        (BlockPart::ExpertGateUp(_), _) => {
            vec![tensor("ffn_gate_exps").with(half(0)), tensor("ffn_up_exps").with(half(1))]
        }
        (BlockPart::ExpertGateUpBias, _) => alternating(tensor, rows * columns / 2)
            .map(|tensor| TensorRows { by_element: true, ..tensor })
            .into(),
        (BlockPart::QkvProj, TokenMixer::Attention(mixer)) if mixer.fused == Some(FusedQkv::ByKeyHead) => {
            let (groups, d) = (mixer.heads.num_kv_heads, mixer.heads.head_dim);
            let queries = mixer.heads.num_heads / groups.max(1) * d;
            let block = |start, len| RowRun::blocks(start, groups, queries + 2 * d, len);
            vec![all().with(Some(vec![block(0, queries), block(queries, d), block(queries + d, d)]))]
        }
        (_, TokenMixer::Latent(mixer)) => latent(config, &mixer, part, all(), tensor),
        (_, TokenMixer::GatedDelta(mixer)) => delta(facts, &mixer, part, all(), tensor),
        _ => vec![all()],
    }
}

/// Returns whether the rows of gate and up of experts alternate.
fn is_alternating(config: &ModelConfig, layer: usize) -> bool {
    let experts = config.blocks[layer].channel_mixer.experts();
    experts.is_some_and(|experts| experts.activation == Activation::ClampedSilu)
}

/// Returns gate and up of rows that alternate.
fn alternating(tensor: impl Fn(&str) -> TensorRows, count: usize) -> [TensorRows; 2] {
    let every_second = |start| Some(vec![RowRun { start, counts: [1, 1, count], strides: [0, 0, 2] }]);
    [tensor("ffn_gate_exps").with(every_second(0)), tensor("ffn_up_exps").with(every_second(1))]
}

/// Returns the tensors of a part of latent attention: keys and values of the latent are apart, and
/// rotated columns are neighbours.
fn latent(
    config: &ModelConfig,
    mixer: &LatentMixer,
    part: BlockPart,
    all: TensorRows,
    tensor: impl Fn(&str) -> TensorRows,
) -> Vec<TensorRows> {
    let &LatentMixer { plain, rotated, value, kv_rank, .. } = mixer;
    let heads = mixer.attention.heads.num_heads;
    let neighbours = |start| RowRun { start, counts: [1, rotated / 2, 2], strides: [0, 1, rotated / 2] };
    let are_halves = !config.ropes[mixer.attention.rope].interleaved;
    match part {
        BlockPart::LatentKvUp => {
            let block = |start, len| Some(vec![RowRun::blocks(start, heads, plain + value, len)]);
            let keys = tensor("attn_k_b").with(block(0, plain));
            let values = tensor("attn_v_b").with(block(plain, value));
            let heads = Some(heads);
            vec![TensorRows { transposed_heads: heads, ..keys }, TensorRows { heads, ..values }]
        }
        BlockPart::QProj | BlockPart::LatentQUp if are_halves => {
            let head = |head: usize| {
                let start = head * (plain + rotated);
                [RowRun::range(start, plain), neighbours(start + plain)]
            };
            vec![all.with(Some((0..heads).flat_map(head).collect()))]
        }
        BlockPart::LatentKv if are_halves => {
            vec![all.with(Some(vec![RowRun::range(0, kv_rank), neighbours(kv_rank)]))]
        }
        _ => vec![all],
    }
}

/// Returns the tensors of a part of Gated DeltaNet.
fn delta(
    facts: &GgufFacts,
    mixer: &DeltaMixer,
    part: BlockPart,
    all: TensorRows,
    tensor: impl Fn(&str) -> TensorRows,
) -> Vec<TensorRows> {
    let heads = mixer.heads;
    let (groups, key, value) = (heads.num_key_heads, heads.key_dim, heads.value_dim);
    let of_group = heads.num_value_heads / groups.max(1);
    if part == BlockPart::DeltaQkvz {
        let values = of_group * value;
        let block = |start, len| RowRun::blocks(start, groups, 2 * (key + values), len);
        let qkv = vec![block(0, key), block(key, key), block(2 * key, values)];
        let gates = vec![block(2 * key + values, values)];
        return vec![tensor("attn_qkv").with(Some(qkv)), tensor("attn_gate").with(Some(gates))];
    }
    let tiles = facts.delta.is_some_and(|delta| delta.tiles_value_heads) && of_group > 1;
    // The first value head of each key head, then the second of each.
    let in_turns =
        |start, len| RowRun { start, counts: [of_group, groups, len], strides: [len, of_group * len, 1] };
    match part {
        _ if !tiles => vec![all],
        BlockPart::DeltaQkv | BlockPart::DeltaConv => {
            let keys = 2 * groups * key;
            vec![all.with(Some(vec![RowRun::range(0, keys), in_turns(keys, value)]))]
        }
        BlockPart::DeltaZ => vec![all.with(Some(vec![in_turns(0, value)]))],
        BlockPart::DeltaA | BlockPart::DeltaB | BlockPart::DeltaRate | BlockPart::DeltaStep => {
            vec![all.with(Some(vec![in_turns(0, 1)]))]
        }
        BlockPart::DeltaOut => vec![TensorRows { columns: Some(vec![in_turns(0, value)]), ..all }],
        _ => vec![all],
    }
}

/// Returns the end of a tensor's name.
fn end(part: BlockPart, role: Role) -> &'static str {
    match part {
        BlockPart::DeltaRate => "",
        BlockPart::RouterBias => ".bias",
        BlockPart::RouterScale | BlockPart::ExpertFactors => ".scale",
        _ if role == Role::Bias => ".bias",
        _ => ".weight",
    }
}

#[expect(clippy::too_many_lines, reason = "a table with a line for each part")]
fn name(facts: &GgufFacts, part: BlockPart) -> &'static str {
    match part {
        BlockPart::QProj => "attn_q",
        BlockPart::KProj => "attn_k",
        BlockPart::VProj => "attn_v",
        BlockPart::QkvProj => "attn_qkv",
        BlockPart::OProj => "attn_output",
        BlockPart::QNorm => "attn_q_norm",
        BlockPart::KNorm => "attn_k_norm",
        BlockPart::Sinks => "attn_sinks",
        BlockPart::GateProj => "ffn_gate",
        // llama.cpp splits a matrix of this name with twice the rows: the gate is the first half,
        // as here.
        BlockPart::UpProj | BlockPart::GateUpProj => "ffn_up",
        BlockPart::DownProj => "ffn_down",
        BlockPart::Router | BlockPart::RouterScale => "ffn_gate_inp",
        // One tensor holds those of all experts.
        BlockPart::ExpertGate(_) => "ffn_gate_exps",
        BlockPart::ExpertUp(_) => "ffn_up_exps",
        BlockPart::ExpertGateUp(_) | BlockPart::ExpertGateUpBias => "ffn_gate_up_exps",
        BlockPart::ExpertDown(_) | BlockPart::ExpertDownBias | BlockPart::ExpertFactors => "ffn_down_exps",
        BlockPart::RouterBias => "exp_probs_b",
        BlockPart::SharedGate => "ffn_gate_shexp",
        BlockPart::SharedUp => "ffn_up_shexp",
        BlockPart::SharedDown => "ffn_down_shexp",
        BlockPart::SharedFactor => "ffn_gate_inp_shexp",
        BlockPart::DeltaQkv | BlockPart::DeltaQkvz => "attn_qkv",
        BlockPart::DeltaZ => "attn_gate",
        BlockPart::DeltaB => "ssm_beta",
        BlockPart::DeltaA => "ssm_alpha",
        BlockPart::DeltaBa => "ssm_ba",
        BlockPart::DeltaOut => "ssm_out",
        BlockPart::DeltaConv => "ssm_conv1d",
        BlockPart::DeltaRate => "ssm_a",
        BlockPart::DeltaStep => "ssm_dt",
        BlockPart::DeltaNorm => "ssm_norm",
        BlockPart::LatentQ => "attn_q_a",
        BlockPart::LatentKv => "attn_kv_a_mqa",
        BlockPart::LatentQUp => "attn_q_b",
        BlockPart::LatentKvUp => "attn_kv_b",
        BlockPart::LatentQNorm => "attn_q_a_norm",
        BlockPart::LatentKvNorm => "attn_kv_a_norm",
        BlockPart::AttnNorm => "attn_norm",
        BlockPart::ParallelAttnNorm => facts.parallel_norms[0],
        BlockPart::ParallelMlpNorm => facts.parallel_norms[1],
        BlockPart::AttnPostNorm => "post_attention_norm",
        BlockPart::MlpNorm => facts.mlp_norm,
        BlockPart::MlpPostNorm => "post_ffw_norm",
        BlockPart::MlpOutNorm => "post_ffw_norm_1",
        BlockPart::ExpertsNorm => "pre_ffw_norm_2",
        BlockPart::ExpertsOutNorm => "post_ffw_norm_2",
        BlockPart::OutputFactor => "layer_output_scale",
        // Lists with a number of each block.
        BlockPart::XieluPositive => "xielu.alpha_p",
        BlockPart::XieluNegative => "xielu.alpha_n",
        BlockPart::XieluBeta => "xielu.beta",
        BlockPart::XieluEps => "xielu.eps",
        BlockPart::ConvIn => "shortconv.in_proj",
        BlockPart::ConvTaps => "shortconv.conv",
        BlockPart::ConvOut => "shortconv.out_proj",
        BlockPart::PerLayerGate => "inp_gate",
        BlockPart::PerLayerProjection => "proj",
        BlockPart::PerLayerNorm => "post_norm",
        BlockPart::PerLayerModel => "per_layer_model_proj",
        BlockPart::PerLayerModelNorm => "per_layer_proj_norm",
        BlockPart::AltUpRouter => "altup_router",
        BlockPart::AltUpRouterNorm => "altup_router_norm",
        BlockPart::AltUpPrediction => "altup_predict_coef",
        BlockPart::AltUpCorrection => "altup_correct_coef",
        BlockPart::AltUpOutputScale => "altup_correct_scale",
        BlockPart::LaurelLeft => "laurel_l",
        BlockPart::LaurelRight => "laurel_r",
        BlockPart::LaurelNorm => "laurel_post_norm",
        // One tensor holds those of all streams.
        BlockPart::StreamProjection(_) => "altup_proj",
        BlockPart::StreamUnprojection(_) => "altup_unembd_proj",
    }
}
