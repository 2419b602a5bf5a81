//! Assembles the weight structs of segments from named parameters. No other code knows both.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::block::{
    ActivationWeights, AltUpWeights, AttentionWeights, BlockWeights, ChannelMixerWeights, ExpertWeights,
    ExpertsWeights, GatedDeltaWeights, GatedMlpWeights, LatentUp, LatentWeights, LaurelWeights, MixerNorms,
    MlpAndExpertsWeights, PerLayerModelWeights, PerLayerWeights, PlainMlpWeights, SharedExpertWeights,
    ShortConvWeights, StreamEnds, TokenMixerWeights, XieluWeights,
};
use super::block_part::{BlockPart, LinearGroup, XIELU};
use super::composition::{
    AltUp, ChannelMixer, Experts, MlpActivation, MlpAndExperts, PerLayerInput, ResidualPlan, SharedExpert,
    TokenMixer,
};
use super::embedding::{EmbedGradients, EmbedWeights, TableGradients, TableWeights, TokenRows};
use super::layout::{BlockLayout, BlockModule, FINAL_NORM_MODULE};
use super::linear::{Linear, MergedLinear};
use super::lm_head::HeadWeights;
use super::{Lora, ModelConfig, Norm, Param, WeightMatrix};
use crate::error::{Error, Result};
use crate::runtime::TensorMut;
use crate::weights::{
    EMBED_PER_LAYER_MODULE as EMBED_PER_LAYER, EMBED_TOKENS_MODULE as EMBED, LM_HEAD_MODULE as HEAD,
};

/// Access to parameters by name, independent of their storage.
pub trait ParamLookup {
    /// Returns the parameter `name`.
    ///
    /// # Errors
    /// Internal: no such parameter, or its value is not available in full.
    fn param(&self, name: &str) -> Result<Param>;
    /// Returns the buffer that sums the gradient of the parameter `name`, if it trains. Its value
    /// need not be available.
    ///
    /// # Errors
    /// Internal: no such parameter.
    fn grad(&self, name: &str) -> Result<Option<TensorMut>>;
    /// Returns the weight of a linear layer of a block, which may be quantized.
    ///
    /// # Errors
    /// Internal: no such parameter.
    fn matrix(&self, name: &str) -> Result<WeightMatrix>;
    /// Returns these matrices as one, stacked by rows; `None` unless they are dense and contiguous.
    ///
    /// # Errors
    /// Internal: no such parameter.
    fn merged(&self, names: &[String]) -> Result<Option<Param>>;
    /// Returns the adapter on a module, if it is a target.
    ///
    /// # Errors
    /// The adapter's parameters are not available.
    fn lora(&self, module: &str, module_index: u64) -> Result<Option<Lora>>;
    /// Returns the trainable rows of a token table, if the module has such rows.
    ///
    /// # Errors
    /// The parameters of the rows are not available.
    fn rows(&self, module: &str) -> Result<Option<TokenRows>>;
    /// Returns the dtype of activations.
    fn dtype(&self) -> DType;
    /// Returns whether the output layer has its own parameter although the model ties it to the
    /// embedding.
    fn has_own_head(&self) -> bool;
}

/// Returns the embedding's weights.
///
/// # Errors
/// A parameter is not available.
pub fn embed(config: &ModelConfig, from: &dyn ParamLookup) -> Result<EmbedWeights> {
    let table = |module: &str| -> Result<TableWeights> {
        let table = from.param(&format!("{module}.weight"))?.value;
        Ok(TableWeights { table, lora: from.lora(module, 0)? })
    };
    let per_layer = has_per_layer(config).then(|| table(EMBED_PER_LAYER)).transpose()?;
    Ok(EmbedWeights { tokens: table(EMBED)?, per_layer, dtype: from.dtype() })
}

/// Returns the inputs of the embedding's backward, without the table itself.
///
/// # Errors
/// Internal: the model has no embedding.
pub fn embed_gradients(config: &ModelConfig, from: &dyn ParamLookup) -> Result<EmbedGradients> {
    let table = |module: &str| -> Result<TableGradients> {
        let table = from.grad(&format!("{module}.weight"))?;
        Ok(TableGradients { table, rows: from.rows(module)?, lora: from.lora(module, 0)? })
    };
    let per_layer = has_per_layer(config).then(|| table(EMBED_PER_LAYER)).transpose()?;
    Ok(EmbedGradients { tokens: table(EMBED)?, per_layer })
}

/// Returns whether the blocks of a model have inputs of their own.
fn has_per_layer(config: &ModelConfig) -> bool {
    config.per_layer_width(1) > 0
}

/// Returns the head's weights. A tied head is the embedding's own parameter.
///
/// # Errors
/// A parameter is not available.
pub fn head(config: &ModelConfig, from: &dyn ParamLookup) -> Result<HeadWeights> {
    let tied = config.tie_word_embeddings && !from.has_own_head();
    let table = if tied { EMBED } else { HEAD };
    Ok(HeadWeights {
        norm: norm(FINAL_NORM_MODULE, config.hidden_norm.has_bias(), from)?,
        lm_head: from.param(&format!("{table}.weight"))?,
        rows: from.rows(table)?,
        lora: from.lora(HEAD, 0)?,
    })
}

/// Returns the norm `name` of hidden states.
fn norm(name: &str, has_bias: bool, from: &dyn ParamLookup) -> Result<Norm> {
    let bias = has_bias.then(|| from.param(&format!("{name}.bias"))).transpose()?;
    Ok(Norm { weight: from.param(&format!("{name}.weight"))?, bias })
}

/// Returns the weights of block `layer`.
///
/// # Errors
/// A parameter of the block is not available.
pub fn block(config: &ModelConfig, layer: usize, from: &dyn ParamLookup) -> Result<BlockWeights> {
    let (block, layout) = (&config.blocks[layer], BlockLayout::new(config, layer));
    // Dropout numbers the linear layers of a block from 1 on.
    let mut groups: HashMap<LinearGroup, Vec<(&BlockModule, u64)>> = HashMap::new();
    for (module, number) in layout.linears().zip(1..) {
        groups.entry(module.part.group().unwrap_or(LinearGroup::Down)).or_default().push((module, number));
    }
    let linears = |group: LinearGroup| -> Result<MergedLinear> {
        let members = groups.get(&group).map_or(&[][..], Vec::as_slice);
        let linear = |&(module, module_index): &(&BlockModule, u64)| -> Result<Linear> {
            let name = module.name_in(layer);
            let bias = module.bias.then(|| from.param(&format!("{name}.bias"))).transpose()?;
            let weight = from.matrix(&format!("{name}.weight"))?;
            let lora = from.lora(&name, module_index)?;
            Ok(Linear { weight, bias, lora, is_gate: module.part.is_gate() })
        };
        let layers = members.iter().map(linear).collect::<Result<Vec<_>>>()?;
        let names: Vec<_> =
            members.iter().map(|(module, _)| format!("{}.weight", module.name_in(layer))).collect();
        let merged = if names.len() > 1 { from.merged(&names)? } else { None };
        Ok(MergedLinear { layers, merged, fp8: None })
    };
    let optional = |part: BlockPart| -> Result<Option<Param>> {
        let name = layout.module(part).map(|module| part.parameter(&module.name_in(layer)));
        name.map(|name| from.param(&name)).transpose()
    };
    let hidden_norm = |part| -> Result<Option<Norm>> {
        layout.module(part).map(|module| norm(&module.name_in(layer), module.bias, from)).transpose()
    };
    let bias = |part: BlockPart| -> Result<Option<Param>> {
        let module = layout.module(part).filter(|module| module.bias);
        module.map(|module| from.param(&format!("{}.bias", module.name_in(layer)))).transpose()
    };
    let token_mixer = token_mixer(block.token_mixer, &linears, &optional, &bias)?;
    let norms = |before: Option<BlockPart>, after, factor| -> Result<MixerNorms> {
        let before = before.map(hidden_norm).transpose()?.flatten();
        Ok(MixerNorms { before, after: hidden_norm(after)?, factor })
    };
    let inner = |before, after| norms(Some(before), after, 1.0);
    let channel_mixer = channel_mixer(block.channel_mixer, &linears, &optional, &inner)?;
    let (token_norm, channel_norm) = match block.residual {
        ResidualPlan::Parallel => (BlockPart::AttnNorm, Some(BlockPart::AttnNorm)),
        ResidualPlan::ParallelTwoNorms => (BlockPart::ParallelAttnNorm, Some(BlockPart::ParallelMlpNorm)),
        _ if block.channel_mixer.has_both() => (BlockPart::AttnNorm, None),
        _ => (BlockPart::AttnNorm, Some(BlockPart::MlpNorm)),
    };
    let per_layer = |input| per_layer(input, &linears, &optional, norms(None, BlockPart::PerLayerNorm, 1.0)?);
    let per_layer = block.per_layer_input.map(per_layer).transpose()?;
    let factor = block.residual_factor;
    let alt_up = |plan: &AltUp| alt_up(plan, (config, layer), &linears, &optional, &hidden_norm);
    let alt_up = block.residual.alt_up().map(alt_up).transpose()?;
    Ok(BlockWeights {
        alt_up: alt_up.map(Box::new),
        token_norms: norms(Some(token_norm), BlockPart::AttnPostNorm, factor)?,
        token_mixer,
        channel_norms: norms(channel_norm, BlockPart::MlpPostNorm, factor)?,
        channel_mixer,
        per_layer,
        output_factor: optional(BlockPart::OutputFactor)?.map(|factor| factor.value),
    })
}

/// Returns the weights of AltUp, like [`channel_mixer`].
fn alt_up(
    AltUp { streams, .. }: &AltUp,
    (config, layer): (&ModelConfig, usize),
    linears: &dyn Fn(LinearGroup) -> Result<MergedLinear>,
    optional: &dyn Fn(BlockPart) -> Result<Option<Param>>,
    hidden_norm: &dyn Fn(BlockPart) -> Result<Option<Norm>>,
) -> Result<AltUpWeights> {
    let missing = |part: BlockPart| Error::internal(format!("no parameter for {part:?}"));
    let norm = |part| hidden_norm(part)?.ok_or_else(|| missing(part));
    let (is_first, is_last) = (layer == 0, layer + 1 == config.num_layers());
    let others = if is_last { 0..*streams as u16 - 1 } else { 0..0 };
    let scale = BlockPart::AltUpOutputScale;
    Ok(AltUpWeights {
        streams: *streams,
        router: linears(LinearGroup::AltUpRouter)?,
        router_norm: norm(BlockPart::AltUpRouterNorm)?,
        prediction: linears(LinearGroup::AltUpPrediction)?,
        correction: linears(LinearGroup::AltUpCorrection)?,
        output_scale: optional(scale)?.ok_or_else(|| missing(scale))?,
        laurel: LaurelWeights {
            left: linears(LinearGroup::LaurelLeft)?,
            right: linears(LinearGroup::LaurelRight)?,
            norm: norm(BlockPart::LaurelNorm)?,
        },
        ends: StreamEnds {
            project: is_first.then(|| linears(LinearGroup::StreamProjections)).transpose()?,
            unproject: others
                .map(|stream| linears(LinearGroup::StreamUnprojection(stream)))
                .collect::<Result<_>>()?,
        },
    })
}

/// Returns the weights of a block's use of its input, like [`channel_mixer`].
fn per_layer(
    input: PerLayerInput,
    linears: &dyn Fn(LinearGroup) -> Result<MergedLinear>,
    optional: &dyn Fn(BlockPart) -> Result<Option<Param>>,
    norms: MixerNorms,
) -> Result<PerLayerWeights> {
    let model = |norm| -> Result<PerLayerModelWeights> {
        Ok(PerLayerModelWeights { projection: linears(LinearGroup::PerLayerModel)?, norm })
    };
    Ok(PerLayerWeights {
        input,
        gate: linears(LinearGroup::PerLayerGate)?,
        projection: linears(LinearGroup::PerLayerProjection)?,
        norms,
        model: optional(BlockPart::PerLayerModelNorm)?.map(model).transpose()?,
    })
}

/// Returns the weights of a token mixer, of the layers that `linears` gives and the parameters that
/// `optional` and `bias` give if the block has them.
fn token_mixer(
    mixer: TokenMixer,
    linears: &dyn Fn(LinearGroup) -> Result<MergedLinear>,
    optional: &dyn Fn(BlockPart) -> Result<Option<Param>>,
    bias: &dyn Fn(BlockPart) -> Result<Option<Param>>,
) -> Result<TokenMixerWeights> {
    let (qkv, o) = (linears(LinearGroup::Qkv)?, linears(LinearGroup::O)?);
    let param = |part: BlockPart| {
        optional(part)?.ok_or_else(|| Error::internal(format!("no parameter for {part:?}")))
    };
    // The weights of a convolution, `[channels, taps]` instead of `[channels, 1, taps]`.
    let conv = |part: BlockPart, shape: (usize, usize)| -> Result<Param> {
        let Param { value, grad } = param(part)?;
        let grad = grad.map(|grad| grad.reshape(shape)).transpose()?.map(TensorMut::new);
        Ok(Param { value: value.reshape(shape)?, grad })
    };
    Ok(match mixer {
        TokenMixer::Attention(mixer) => {
            let (q, k) = (optional(BlockPart::QNorm)?, optional(BlockPart::KNorm)?);
            // Without keys of its own, a block has no norm of them.
            let none = || q.as_ref().map(|q| Param { value: q.value.clone(), grad: None });
            let k = if mixer.reads_from().is_some() { none() } else { k };
            let qk_norm = q.zip(k);
            let sinks = optional(BlockPart::Sinks)?;
            TokenMixerWeights::Attention(AttentionWeights { mixer, qkv, qk_norm, sinks, o })
        }
        TokenMixer::Latent(mixer) => {
            let up = |norm, group| -> Result<LatentUp> {
                Ok(LatentUp { norm: param(norm)?, up: linears(group)? })
            };
            let q_up = || up(BlockPart::LatentQNorm, LinearGroup::QUp);
            TokenMixerWeights::Latent(Box::new(LatentWeights {
                mixer,
                attention: AttentionWeights { mixer: mixer.attention, qkv, qk_norm: None, sinks: None, o },
                q_up: mixer.q_rank.map(|_| q_up()).transpose()?,
                kv_up: up(BlockPart::LatentKvNorm, LinearGroup::KvUp)?,
            }))
        }
        TokenMixer::ShortConv(mixer) => TokenMixerWeights::ShortConv(ShortConvWeights {
            mixer,
            input: qkv,
            conv: conv(BlockPart::ConvTaps, (mixer.channels, mixer.kernel))?,
            bias: bias(BlockPart::ConvTaps)?,
            out: o,
        }),
        TokenMixer::GatedDelta(mixer) => TokenMixerWeights::GatedDelta(GatedDeltaWeights {
            mixer,
            input: qkv,
            conv: conv(BlockPart::DeltaConv, (mixer.heads.conv_width(), mixer.conv_kernel))?,
            rate: param(BlockPart::DeltaRate)?,
            step: param(BlockPart::DeltaStep)?,
            norm: param(BlockPart::DeltaNorm)?,
            out: o,
        }),
    })
}

/// Returns the weights of a channel mixer, of the layers that `linears` gives, the parameters that
/// `optional` gives if the block has them, and the norms that `norms` gives.
fn channel_mixer(
    mixer: ChannelMixer,
    linears: &dyn Fn(LinearGroup) -> Result<MergedLinear>,
    optional: &dyn Fn(BlockPart) -> Result<Option<Param>>,
    norms: &dyn Fn(BlockPart, BlockPart) -> Result<MixerNorms>,
) -> Result<ChannelMixerWeights> {
    let gated_mlp = |mixer| -> Result<GatedMlpWeights> {
        let (gate_up, down) = (linears(LinearGroup::GateUp)?, linears(LinearGroup::Down)?);
        Ok(GatedMlpWeights { mixer, gate_up, down })
    };
    Ok(match mixer {
        ChannelMixer::GatedMlp(mixer) => ChannelMixerWeights::GatedMlp(gated_mlp(mixer)?),
        ChannelMixer::PlainMlp(mixer) => ChannelMixerWeights::PlainMlp(PlainMlpWeights {
            mixer,
            up: linears(LinearGroup::GateUp)?,
            down: linears(LinearGroup::Down)?,
            activation: match mixer.activation {
                MlpActivation::Fixed(activation) => ActivationWeights::Fixed(activation),
                MlpActivation::Xielu => {
                    let [positive, negative, beta, eps] = XIELU.map(|part| -> Result<Param> {
                        optional(part)?.ok_or_else(|| Error::internal(format!("no parameter for {part:?}")))
                    });
                    ActivationWeights::Xielu(XieluWeights {
                        alphas: [positive?, negative?],
                        beta: beta?.value,
                        eps: eps?.value,
                    })
                }
            },
        }),
        ChannelMixer::Experts(mixer) => {
            ChannelMixerWeights::Experts(Box::new(experts(mixer, linears, optional)?))
        }
        ChannelMixer::MlpAndExperts(MlpAndExperts { mlp, experts: mixer }) => {
            let router_scale = optional(BlockPart::RouterScale)?;
            ChannelMixerWeights::MlpAndExperts(Box::new(MlpAndExpertsWeights {
                mlp: gated_mlp(mlp)?,
                mlp_norms: norms(BlockPart::MlpNorm, BlockPart::MlpOutNorm)?,
                experts: experts(mixer, linears, optional)?,
                experts_norms: norms(BlockPart::ExpertsNorm, BlockPart::ExpertsOutNorm)?,
                router_scale: router_scale.ok_or_else(|| Error::internal("a router without its scale"))?,
            }))
        }
    })
}

/// Returns the weights of a mixture of experts, like [`channel_mixer`].
fn experts(
    mixer: Experts,
    linears: &dyn Fn(LinearGroup) -> Result<MergedLinear>,
    optional: &dyn Fn(BlockPart) -> Result<Option<Param>>,
) -> Result<ExpertsWeights> {
    let biases = optional(BlockPart::ExpertGateUpBias)?;
    let expert = |e: u16| -> Result<ExpertWeights> {
        let mut gate_up = linears(LinearGroup::ExpertGateUp(e))?;
        if let (Some(biases), Some(layer)) = (&biases, gate_up.layers.first_mut()) {
            layer.bias = Some(row(biases, e.into())?);
        }
        Ok(ExpertWeights { gate_up, down: linears(LinearGroup::ExpertDown(e))? })
    };
    let shared = |shared: SharedExpert| -> Result<SharedExpertWeights> {
        let factor = shared.has_gate.then(|| linears(LinearGroup::SharedFactor)).transpose()?;
        let (gate_up, down) = (linears(LinearGroup::SharedGateUp)?, linears(LinearGroup::SharedDown)?);
        Ok(SharedExpertWeights { activation: mixer.activation, gate_up, down, factor })
    };
    Ok(ExpertsWeights {
        mixer,
        router: linears(LinearGroup::Router)?,
        bias: optional(BlockPart::RouterBias)?.map(|bias| bias.value.flatten_all()).transpose()?,
        factors: optional(BlockPart::ExpertFactors)?,
        experts: (0..mixer.count as u16).map(expert).collect::<Result<_>>()?,
        down_biases: optional(BlockPart::ExpertDownBias)?,
        shared: mixer.shared.map(shared).transpose()?,
    })
}

/// Returns row `at` of a matrix as a vector.
fn row(matrix: &Param, at: usize) -> Result<Param> {
    let of = |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.narrow(0, at, 1)?.squeeze(0)?) };
    let grad = matrix.grad.as_ref().map(|grad| of(grad)).transpose()?.map(TensorMut::new);
    Ok(Param { value: of(&matrix.value)?, grad })
}
