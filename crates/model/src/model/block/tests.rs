use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use candle_core::{CpuStorage, Device, Storage};

use super::*;
use crate::model::assemble::{self, ParamLookup};
use crate::model::{
    BlockLayout, BlockModule, Linear, Lora, LoraShape, Param, ParamSpec, Role, RotaryTables, TokenRows,
    WeightMatrix, modules, parameters,
};
use crate::recipe::enums::AdapterKind;
use crate::runtime::TensorMut;

mod product_order;

const TOKENS: usize = 12;
const WIDTHS: &str = r#""vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32"#;
/// Families, each with the peculiarities of its blocks.
const MODELS: [&str; 37] = [
    r#""model_type": "llama", "attention_bias": true, "mlp_bias": true"#,
    r#""model_type": "qwen2""#,
    r#""model_type": "gemma2""#,
    r#""model_type": "qwen3""#,
    r#""model_type": "gemma3_text""#,
    r#""model_type": "phi3""#,
    r#""model_type": "olmo2""#,
    r#""model_type": "granite", "residual_multiplier": 0.5"#,
    r#""model_type": "arcee", "mlp_bias": true"#,
    r#""model_type": "starcoder2""#,
    r#""model_type": "nemotron""#,
    r#""model_type": "cohere""#,
    r#""model_type": "stablelm", "use_parallel_residual": true, "partial_rotary_factor": 0.5"#,
    r#""model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12"#,
    r#""model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8"#,
    r#""model_type": "qwen3_5_text", "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 4, "partial_rotary_factor": 0.5"#,
    r#""model_type": "qwen3_5_text", "full_attention_interval": 1, "partial_rotary_factor": 0.5"#,
    r#""model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 4, "partial_rotary_factor": 0.5, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12"#,
    r#""model_type": "gemma4_unified_text""#,
    r#""model_type": "gemma4_unified_text", "layer_types": ["full_attention", "full_attention"],
        "attention_k_eq_v": true, "global_head_dim": 8, "num_global_key_value_heads": 1"#,
    r#""model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 8"#,
    r#""model_type": "gemma4_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 8,
        "layer_types": ["full_attention", "full_attention"], "global_head_dim": 8, "num_kv_shared_layers": 1"#,
    r#""model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "use_double_wide_mlp": true,
        "layer_types": ["full_attention", "full_attention"], "global_head_dim": 8, "num_kv_shared_layers": 1"#,
    // Every expert is chosen: one without rows would hold no adapter.
    r#""model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 3"#,
    r#""model_type": "gpt_neox", "rotary_pct": 0.5"#,
    r#""model_type": "falcon", "ffn_hidden_size": 24, "new_decoder_architecture": true, "num_kv_heads": 2"#,
    r#""model_type": "falcon", "ffn_hidden_size": 24, "bias": true"#,
    r#""model_type": "ernie4_5_moe", "moe_layer_start_index": 0, "moe_num_experts": 3, "moe_k": 3,
        "moe_intermediate_size": 8, "moe_num_shared_experts": 2"#,
    r#""model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 100.0}"#,
    r#""model_type": "hunyuan_v1_moe", "num_experts": 3, "moe_topk": [3, 3]"#,
    r#""model_type": "llama4_text", "intermediate_size_mlp": 20, "attention_chunk_size": 4,
        "num_local_experts": 3, "num_experts_per_tok": 3"#,
    r#""model_type": "llama4_text", "intermediate_size_mlp": 20, "moe_layers": [], "no_rope_layers": [0, 1],
        "floor_scale": 4"#,
    r#""model_type": "lfm2", "full_attn_idxs": [1], "block_auto_adjust_ff_dim": false"#,
    r#""model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": false,
        "conv_bias": true"#,
    r#""model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"], "num_dense_layers": 0, "num_experts": 3,
        "num_experts_per_tok": 3, "moe_intermediate_size": 8, "conv_L_cache": 4"#,
    r#""model_type": "apertus""#,
    r#""model_type": "gemma3n_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 8,
        "layer_types": ["full_attention", "full_attention"], "num_kv_shared_layers": 1, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0]"#,
];

fn config(model: &str) -> ModelConfig {
    ModelConfig::from_json(&format!("{{{model}, {WIDTHS}}}"), "config.json").expect("valid")
}

/// Random parameters of a model, and adapters on some of its linear layers, by module.
struct RandomParams {
    shapes: HashMap<String, Vec<usize>>,
    adapters: HashMap<String, LoraShape>,
    /// Those that stay in f32.
    buffers: HashSet<String>,
    dtype: DType,
}

impl RandomParams {
    fn new(config: &ModelConfig, dtype: DType, adapter: impl Fn(&BlockModule) -> Option<LoraShape>) -> Self {
        let mut adapters = HashMap::new();
        for layer in 0..config.num_layers() {
            let layout = BlockLayout::new(config, layer);
            let adapted =
                layout.linears().filter_map(|module| Some((module.name_in(layer), adapter(module)?)));
            adapters.extend(adapted);
        }
        let is_buffer = |spec: &ParamSpec| spec.role == Role::Buffer;
        let buffers = parameters(config).into_iter().filter(is_buffer).map(|spec| spec.name).collect();
        let mut shapes: HashMap<String, Vec<usize>> =
            parameters(config).into_iter().map(|spec| (spec.name, spec.shape)).collect();
        shapes.extend(modules(config).into_iter().map(|module| (module.name, module.shape)));
        RandomParams { shapes, adapters, buffers, dtype }
    }
}

fn normal(name: &str, shape: &[usize], dtype: DType) -> Result<Param> {
    let stream = RngStream::new(0).named(name);
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u64).map(|i| stream.normal(i)).collect();
    Ok(Param { value: Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?, grad: None })
}

impl ParamLookup for RandomParams {
    fn param(&self, name: &str) -> Result<Param> {
        let dtype = if self.buffers.contains(name) { DType::F32 } else { self.dtype };
        normal(name, &self.shapes[name], dtype)
    }

    fn grad(&self, _: &str) -> Result<Option<TensorMut>> {
        Ok(None)
    }

    fn matrix(&self, name: &str) -> Result<WeightMatrix> {
        Ok(WeightMatrix::Dense(self.param(name)?))
    }

    fn merged(&self, _: &[String]) -> Result<Option<Param>> {
        Ok(None)
    }

    fn lora(&self, module: &str, module_index: u64) -> Result<Option<Lora>> {
        let Some(LoraShape { kind, r, .. }) = self.adapters.get(module).copied() else { return Ok(None) };
        let (out, inputs) = (self.shapes[module][0], self.shapes[module][1]);
        let magnitude = (kind == AdapterKind::Dora).then(|| normal("m", &[out], DType::F32)).transpose()?;
        let [a, b] = [normal("a", &[r, inputs], DType::F32)?, normal("b", &[out, r], DType::F32)?];
        Ok(Some(Lora { a, b, magnitude, scale: 2.0, dropout: 0.1, module_index }))
    }

    fn rows(&self, _: &str) -> Result<Option<TokenRows>> {
        Ok(None)
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn has_own_head(&self) -> bool {
        false
    }
}

/// Returns the bytes of the tensors' memory; several views of one buffer count once.
fn memory_of<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> usize {
    let memory = |tensor: &Tensor| match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(values)) => (values.as_ptr() as usize, 4 * values.len()),
        Storage::Cpu(CpuStorage::U32(values)) => (values.as_ptr() as usize, 4 * values.len()),
        Storage::Cpu(CpuStorage::BF16(values)) => (values.as_ptr() as usize, 2 * values.len()),
        _ => panic!("a tensor of another dtype than f32, bf16 and u32"),
    };
    tensors.into_iter().map(memory).collect::<BTreeMap<_, _>>().values().sum()
}

/// Returns the bits of the tensors' values.
fn bits(saved: &BlockSaved) -> Result<Vec<Vec<u32>>> {
    let of_tensor = |tensor: &Tensor| -> Result<Vec<u32>> {
        let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        Ok(values.into_iter().map(f32::to_bits).collect())
    };
    saved.tensors().into_iter().map(of_tensor).collect()
}

/// Runs the forward of all blocks in training, and returns what each keeps. Recomputing them gives
/// the same bits, and the state beside the hidden states has the planned bytes.
fn forward_of(
    config: &ModelConfig,
    params: &RandomParams,
    attention: Attention,
    (adapter, dropout): (AdapterSwitch, Option<DropoutContext>),
) -> Result<Vec<BlockSaved>> {
    let spans = [Span::sequence(0, 5), Span::sequence(5, TOKENS - 5)];
    let tables = RotaryTables::new(&config.ropes, &Device::Cpu).of_spans(&config.ropes, &spans)?;
    let context = BlockContext { spans: &spans, tables: &tables, attention, adapter, dropout, balance: None };
    let mut x = normal("x", &[TOKENS, config.hidden_size], params.dtype)?.value;
    let width = config.per_layer_width(config.num_layers());
    let rows = (width > 0).then(|| normal("rows", &[TOKENS, width], params.dtype)).transpose()?;
    let mut carried = Carried::new(rows.map(|rows| rows.value));
    let mut blocks = Vec::new();
    for layer in 0..config.num_layers() {
        let weights = assemble::block(config, layer, params)?;
        let (y, saved) = forward(config, layer, &weights, &x, &context, &mut carried, None)?;
        blocks.push((weights, x, saved));
        x = y;
    }
    for (layer, (weights, x, saved)) in blocks.iter().enumerate() {
        let again = recompute(config, layer, weights, x, &context, &carried)?;
        assert_eq!(bits(&again)?, bits(saved)?, "block {layer}");
    }
    let planned: usize = Carried::parts(config, TOKENS, params.dtype).iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(memory_of(carried.tensors()), planned);
    Ok(blocks.into_iter().map(|(_, _, saved)| saved).collect())
}

#[test]
fn bytes_are_those_of_the_memory_that_is_held() -> Result<()> {
    let none = |_: &BlockModule| None;
    let lora = |module: &BlockModule| {
        Some(LoraShape {
            kind: AdapterKind::Lora,
            r: 1 + module.name.len(),
            dtype: DType::F32,
            has_kernels: false,
        })
    };
    let dora = |module: &BlockModule| {
        Some(LoraShape {
            kind: AdapterKind::Dora,
            r: 1 + module.name.len(),
            dtype: DType::F32,
            has_kernels: false,
        })
    };
    let lora_on_one = |module: &BlockModule| {
        Some(LoraShape { kind: AdapterKind::Lora, r: 5, dtype: DType::F32, has_kernels: false })
            .filter(|_| module.name == "mlp.down_proj")
    };
    let dora_on_one = |module: &BlockModule| {
        Some(LoraShape { kind: AdapterKind::Dora, r: 5, dtype: DType::F32, has_kernels: false })
            .filter(|_| module.name == "self_attn.o_proj")
    };
    type Adapter<'a> = &'a dyn Fn(&BlockModule) -> Option<LoraShape>;
    let adapters: [Adapter<'_>; 5] = [&none, &lora, &dora, &lora_on_one, &dora_on_one];
    for (model, dtype) in MODELS.iter().flat_map(|model| [(model, DType::F32), (model, DType::BF16)]) {
        let config = config(model);
        for (i, adapter) in adapters.into_iter().enumerate() {
            let params = RandomParams::new(&config, dtype, adapter);
            for attention in [Attention::Flash, Attention::Eager] {
                let case = format!("{model} {dtype:?} {attention:?}, adapter {i}");
                let dropout = DropoutContext { stream: RngStream::new(1), first_token: 0 };
                // Without dropout the adapters of a group share one buffer.
                for dropout in [Some(dropout), None] {
                    let blocks = forward_of(&config, &params, attention, (AdapterSwitch::On, dropout))?;
                    for (layer, saved) in blocks.iter().enumerate() {
                        let case = format!("{case}, block {layer} {dropout:?}");
                        let SavedBytes { input, rest, attended } =
                            BlockSaved::bytes(&config, layer, TOKENS, dtype, adapter);
                        // Under recompute only the block's input is kept.
                        assert_eq!(memory_of([&saved.x]), input, "{case}");
                        assert_eq!(memory_of(saved.tensors()), input + rest, "{case}");
                        let mut products = saved.clone();
                        products.drop_attended();
                        assert_eq!(memory_of(products.tensors()), input + rest - attended, "{case}");
                    }
                }
                let off = forward_of(&config, &params, attention, (AdapterSwitch::Off, Some(dropout)))?;
                for (layer, off) in off.iter().enumerate() {
                    let without = BlockSaved::bytes(&config, layer, TOKENS, dtype, none);
                    assert_eq!(
                        memory_of(off.tensors()),
                        without.input + without.rest,
                        "{case}, switched off"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_part_and_every_name_stands_once() {
    for model in MODELS {
        let layout = BlockLayout::new(&config(model), 0);
        let all = layout.modules().len();
        let names: BTreeSet<String> = layout.modules().iter().map(|module| module.name_in(0)).collect();
        let parts: BTreeSet<_> = layout.modules().iter().map(|module| module.part).collect();
        assert_eq!((names.len(), parts.len()), (all, all), "{model}");
    }
}

/// Dropout numbers the linear layers of a block in this order; another order would change the masks
/// of every run.
#[test]
fn linear_layers_are_numbered_in_order() -> Result<()> {
    let cases: [(&str, [&[u64]; 4]); 3] = [
        (MODELS[0], [&[1, 2, 3], &[4], &[5, 6], &[7]]),
        (MODELS[5], [&[1], &[2], &[3], &[4]]),
        (MODELS[8], [&[1, 2, 3], &[4], &[5], &[6]]),
    ];
    for (model, groups) in cases {
        let adapter = |_: &BlockModule| {
            Some(LoraShape { kind: AdapterKind::Lora, r: 2, dtype: DType::F32, has_kernels: false })
        };
        let config = config(model);
        let weights = assemble::block(&config, 0, &RandomParams::new(&config, DType::F32, adapter))?;
        let number = |linear: &Linear| linear.lora.as_ref().map_or(0, |lora| lora.module_index);
        let numbers = |linear: &MergedLinear| linear.layers.iter().map(number).collect::<Vec<_>>();
        let TokenMixerWeights::Attention(attention) = &weights.token_mixer else { panic!("no attention") };
        let (first, down) = match &weights.channel_mixer {
            ChannelMixerWeights::GatedMlp(mlp) => (&mlp.gate_up, &mlp.down),
            ChannelMixerWeights::PlainMlp(mlp) => (&mlp.up, &mlp.down),
            ChannelMixerWeights::Experts(_) | ChannelMixerWeights::MlpAndExperts(_) => panic!("no MLP"),
        };
        let actual = [&attention.qkv, &attention.o, first, down].map(numbers);
        assert_eq!(actual, groups, "{model}");
    }
    Ok(())
}
