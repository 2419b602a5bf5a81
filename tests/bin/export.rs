//! Models and adapters exported to other programs' formats: candle reads the GGUF files back,
//! finetune's own reader the Hugging Face folders.
//!
//! Expected names, permutations and bounds are written here by hand from llama.cpp's sources and
//! ggml's block formats. Values come from the golden checkpoints, and an adapter's sum from the
//! model that PEFT merged.

mod families;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use crate::exhaustive::each_third;
use crate::test_dir::{TestDir, copy_folder, golden, tiny_models};
use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value, VersionedMagic};
use finetune::error::Result;
use finetune::export::{gguf, hf};
use finetune::model::ModelConfig;
use finetune::recipe;
use finetune::weights::ModelFiles;
use half::{bf16, f16};
use insta::assert_snapshot;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value as Json, json};

fn read_json(path: &Path) -> Json {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn config_of(folder: &Path) -> ModelConfig {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    ModelConfig::from_json(&text, "config.json").unwrap()
}

/// Returns shape and values of every tensor in a folder's safetensors files.
fn stored(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut tensors = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F32 => data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
                Dtype::F16 => data.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
                Dtype::BF16 => data.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
                other => panic!("{name} is {other:?}"),
            };
            tensors.insert(name.clone(), (view.shape().to_vec(), values));
        }
    }
    tensors
}

/// A GGUF file as candle reads it.
struct Read {
    content: Content,
    path: PathBuf,
}

impl Read {
    fn open(path: &Path) -> Self {
        let content = Content::read(&mut File::open(path).unwrap()).unwrap();
        Read { content, path: path.into() }
    }

    fn value(&self, key: &str) -> &Value {
        self.content.metadata.get(key).unwrap_or_else(|| panic!("no key {key}"))
    }

    fn number(&self, key: &str) -> u32 {
        self.value(key).to_u32().unwrap()
    }

    fn text(&self, key: &str) -> &str {
        self.value(key).to_string().unwrap()
    }

    fn has(&self, key: &str) -> bool {
        self.content.metadata.contains_key(key)
    }

    fn list(&self, key: &str) -> &[Value] {
        self.value(key).to_vec().unwrap()
    }

    fn dtype(&self, name: &str) -> GgmlDType {
        self.content.tensor_infos[name].ggml_dtype
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let tensor = self.content.tensor(&mut File::open(&self.path).unwrap(), name, &Device::Cpu).unwrap();
        tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }
}

fn export(folder: &Path, kind: &str, output: &Path) -> Result<gguf::Exported> {
    let (mut config, mut files) = (config_of(folder), ModelFiles::open(folder)?);
    finetune::model::settle(&mut config, &mut files)?;
    gguf::write_model(&config, &files, "name", kind.parse().unwrap(), output)
}

fn exported(folder: &Path, kind: &str) -> (tempfile::TempDir, Read) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    export(folder, kind, &path).unwrap();
    let read = Read::open(&path);
    (dir, read)
}

/// Golden models that llama.cpp cannot compute: heads of three are not as wide as the model, two
/// have a layer without experts, one has attention in shorter blocks than llama.cpp's, one a factor
/// on the weights of experts, one biases of short convolutions. Gemma 3n has tensors of streams
/// that finetune does not write.
const NOT_EXPORTED: [&str; 9] = [
    "tiny-cohere2",
    "tiny-exaone4",
    "tiny-gemma3n",
    "tiny-lfm2-bias",
    "tiny-lfm2-moe",
    "tiny-llama4",
    "tiny-nemotron",
    "tiny-qwen3-moe",
    "tiny-qwen3-next",
];

/// Golden models of which `families` has the arrangements.
const ARRANGED: [&str; 25] = [
    "tiny-apertus",
    "tiny-arcee",
    "tiny-cohere",
    "tiny-deepseek-v3",
    "tiny-ernie4-5-moe",
    "tiny-falcon",
    "tiny-falcon-7b",
    "tiny-gemma4",
    "tiny-gemma4-e2b",
    "tiny-gemma4-moe",
    "tiny-glm4-moe",
    "tiny-glm4-moe-lite",
    "tiny-gpt-neox",
    "tiny-gpt-oss",
    "tiny-granitemoe",
    "tiny-hunyuan",
    "tiny-hunyuan-moe",
    "tiny-lfm2",
    "tiny-minimax-m2",
    "tiny-mistral4",
    "tiny-qwen3-5",
    "tiny-qwen3-5-moe",
    "tiny-stablelm",
    "tiny-stablelm-parallel",
    "tiny-starcoder2",
];

#[test]
fn what_cannot_be_written_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let all = tiny_models("families/models").into_iter().filter(|name| NOT_EXPORTED.contains(&name.as_str()));
    for (i, name) in all.enumerate() {
        let refused = export(&golden("families/models").join(&name), "f32", &dir.path().join(i.to_string()));
        let refused = refused.expect_err(&name).to_string();
        assert!(refused.contains("cannot export this model as GGUF"), "{name}: {refused}");
        let experts = refused.contains("layers without experts");
        assert_eq!(experts, name.starts_with("tiny-qwen3"), "{refused}");
    }
}

/// Names and folders of the golden models that llama.cpp computes, without those of `families`.
fn exported_models() -> Vec<(String, PathBuf)> {
    let all = ["models", "families/models"].map(|set| {
        let others = |name: &String| ![&NOT_EXPORTED[..], &ARRANGED].concat().contains(&name.as_str());
        let names = tiny_models(set).into_iter().filter(others);
        names.map(|name| (name.clone(), golden(set).join(name))).collect::<Vec<_>>()
    });
    all.concat()
}

fn arch(model: &str) -> &str {
    match model {
        "tiny-llama" | "tiny-llama3" | "tiny-mistral" | "tiny-ministral" => "llama",
        "tiny-granite4" | "tiny-granite4-nope" => "granite",
        "tiny-ministral3" => "mistral3",
        "tiny-olmo3" => "olmo2",
        "tiny-phi4-mini" => "phi3",
        "tiny-ernie4-5" => "ernie4_5",
        "tiny-seed-oss" => "seed_oss",
        "tiny-mixtral" => "llama",
        "tiny-qwen2-moe" => "qwen2moe",
        other => other.strip_prefix("tiny-").unwrap(),
    }
}

/// Returns the tensors of a folder, with Granite 4's gate and up apart under Llama's names:
/// llama.cpp's granite has no tensor for both.
fn stored_apart(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut tensors = stored(folder);
    let both: Vec<String> = tensors
        .keys()
        .filter(|name| name.contains("shared_mlp.") && name.contains("put_linear"))
        .cloned()
        .collect();
    for name in both {
        let (shape, mut values) = tensors.remove(&name).unwrap();
        let renamed =
            |from: &str, to: &str| name.replace(&format!("shared_mlp.{from}"), &format!("mlp.{to}"));
        if name.contains("output_linear") {
            tensors.insert(renamed("output_linear", "down_proj"), (shape, values));
            continue;
        }
        let up = values.split_off(values.len() / 2);
        let half = vec![shape[0] / 2, shape[1]];
        tensors.insert(renamed("input_linear", "gate_proj"), (half.clone(), values));
        tensors.insert(renamed("input_linear", "up_proj"), (half, up));
    }
    // Experts are one tensor in the order of their numbers.
    let expert = |name: &str| -> Option<(String, usize)> {
        let (dir, rest) = name.split_once(".experts.")?;
        let (number, layer) = rest.split_once('.')?;
        Some((format!("{dir}.experts.{layer}"), number.parse().unwrap()))
    };
    let mut experts: Vec<_> = tensors.keys().filter_map(|name| Some((expert(name)?, name.clone()))).collect();
    experts.sort();
    for ((together, number), name) in experts {
        let (shape, values) = tensors.remove(&name).unwrap();
        let (all, sum) = tensors.entry(together).or_insert((vec![0, shape[0], shape[1]], Vec::new()));
        assert_eq!(all[0], number, "{name}");
        all[0] += 1;
        sum.extend(values);
    }
    for (shape, _) in tensors.iter_mut().filter(|(name, _)| name.contains("shared_expert_gate")).map(|t| t.1)
    {
        shape.remove(0);
    }
    tensors
}

/// llama.cpp's name of a tensor, from its tensor_mapping.py.
fn gguf_name(model: &str, name: &str) -> String {
    let after_attention =
        ["gemma", "olmo2", "olmo3", "exaone", "seed"].iter().any(|name| model.contains(name));
    let name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd");
    let name = name.replace("model.norm", "output_norm").replace("lm_head", "output");
    let pairs = [
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("block_sparse_moe.gate", "ffn_gate_inp"),
        ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
        ("block_sparse_moe.experts.w2", "ffn_down_exps"),
        ("block_sparse_moe.experts.w3", "ffn_up_exps"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("mlp.experts.gate_proj", "ffn_gate_exps"),
        ("mlp.experts.down_proj", "ffn_down_exps"),
        ("mlp.experts.up_proj", "ffn_up_exps"),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_self_attn_layernorm", "post_attention_norm"),
        ("post_mlp_layernorm", "post_ffw_norm"),
        ("post_attention_layernorm", if after_attention { "post_attention_norm" } else { "ffn_norm" }),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ];
    pairs.iter().fold(name, |name, (hf, ours)| name.replace(hf, ours))
}

/// Returns the exact values expected in the file: `reshape(heads, 2, d / 2, …).swapaxes(1, 2)` for
/// q and k of the architectures that rotate neighbours, unless the family does so itself; 1 + w for
/// gemma's norms.
fn wanted(model: &str, config: &Json, name: &str, shape: &[usize], values: &[f32]) -> Vec<f32> {
    let heads = match name {
        _ if !["llama", "granite", "smollm3", "mistral3"].contains(&arch(model)) => None,
        name if name.contains("q_proj") => config["num_attention_heads"].as_u64(),
        name if name.contains("k_proj") => config["num_key_value_heads"].as_u64(),
        _ => None,
    };
    if let Some(heads) = heads {
        let heads = usize::try_from(heads).unwrap();
        let (rows, row) = (shape[0], values.len() / shape[0]);
        let width = rows / heads;
        let mut out = Vec::with_capacity(values.len());
        for head in 0..heads {
            for pair in 0..width / 2 {
                for half in 0..2 {
                    let from = head * width + half * (width / 2) + pair;
                    out.extend_from_slice(&values[from * row..(from + 1) * row]);
                }
            }
        }
        return out;
    }
    if model.contains("gemma") && name.contains("norm") {
        return values.iter().map(|value| value + 1.0).collect();
    }
    // llama.cpp scales by 1/√head_dim, this model by 1/√query_pre_attn_scalar: 32 and 24.
    if model == "tiny-gemma2" && name.contains("q_proj") {
        let factor = (32f64 / 24.0).sqrt() as f32;
        return values.iter().map(|value| value * factor).collect();
    }
    values.to_vec()
}

#[test]
fn f32_holds_every_family_to_the_bit() {
    for (model, folder) in exported_models() {
        let model = model.as_str();
        let (_place, read) = exported(&folder, "f32");
        assert!(matches!(read.content.magic, VersionedMagic::GgufV3), "{model}");
        assert_eq!(read.content.tensor_data_offset % 32, 0);
        assert!(read.content.tensor_infos.values().all(|info| info.offset % 32 == 0));
        assert_eq!(std::fs::metadata(&read.path).unwrap().len() % 32, 0, "the last tensor is padded too");
        let config = read_json(&folder.join("config.json"));
        let tensors = stored_apart(&folder);
        let made = match model {
            "tiny-llama3" => 1,
            "tiny-phi4-mini" => 2,
            _ => 0,
        };
        assert_eq!(read.content.tensor_infos.len(), tensors.len() + made, "{model}");
        for (name, (shape, values)) in &tensors {
            let ours = gguf_name(model, name);
            let info = read.content.tensor_infos.get(&ours).unwrap_or_else(|| panic!("{model}: {ours}"));
            assert_eq!(info.shape.dims(), shape, "{model}: {ours}");
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let wanted = wanted(model, &config, name, shape, values);
            assert!(bits(read.values(&ours)) == bits(wanted), "{model}: {ours}");
        }
    }
}

#[test]
fn halves_round_to_nearest_and_vectors_stay_f32() {
    let folder = golden("models/tiny-llama");
    let config = read_json(&folder.join("config.json"));
    for kind in ["f16", "bf16"] {
        let (_place, read) = exported(&folder, kind);
        for (name, (shape, values)) in stored(&folder) {
            let ours = gguf_name("tiny-llama", &name);
            let wanted = wanted("tiny-llama", &config, &name, &shape, &values);
            let round = |value: &f32| match kind {
                _ if shape.len() == 1 => *value,
                "f16" => f16::from_f32(*value).to_f32(),
                _ => bf16::from_f32(*value).to_f32(),
            };
            assert!(read.values(&ours) == wanted.iter().map(round).collect::<Vec<_>>(), "{kind}: {ours}");
        }
    }
}

#[test]
fn the_default_type_loses_nothing() {
    for (model, kind) in [("tiny-llama", "f32"), ("tiny-mistral", "bf16"), ("tiny-phi3", "f16")] {
        let files = ModelFiles::open(&golden("models").join(model)).unwrap();
        assert_eq!(gguf::stored_type(&files).to_string(), kind, "{model}");
    }
}

#[test]
fn keys_say_what_config_json_says() {
    for (model, folder) in exported_models() {
        let model = model.as_str();
        let config = read_json(&folder.join("config.json"));
        let (_place, read) = exported(&folder, "f32");
        let arch = arch(model);
        let of_granite4 = if model.contains("granite4") { "shared_" } else { "" };
        assert_eq!(read.text("general.architecture"), arch);
        assert_eq!(read.text("general.type"), "model");
        assert_eq!((read.number("general.file_type"), read.number("general.quantization_version")), (0, 2));
        for (key, hf) in [
            ("vocab_size", "vocab_size"),
            ("context_length", "max_position_embeddings"),
            ("embedding_length", "hidden_size"),
            ("block_count", "num_hidden_layers"),
            ("feed_forward_length", &format!("{of_granite4}intermediate_size")),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
        ] {
            assert_eq!(
                Some(u64::from(read.number(&format!("{arch}.{key}")))),
                config[hf].as_u64(),
                "{model}: {key}"
            );
        }
        let size = |key: &str| config[key].as_u64().unwrap();
        let head_dim =
            config["head_dim"].as_u64().unwrap_or_else(|| size("hidden_size") / size("num_attention_heads"));
        for key in ["attention.key_length", "attention.value_length"] {
            assert_eq!(u64::from(read.number(&format!("{arch}.{key}"))), head_dim, "{model}: {key}");
        }
        let float = |key: &str| read.value(&format!("{arch}.{key}")).to_f32().unwrap();
        assert_eq!(
            float("attention.layer_norm_rms_epsilon"),
            config["rms_norm_eps"].as_f64().unwrap() as f32
        );
        if model == "tiny-granite4-nope" {
            assert!(!read.value("granite.rope.scaling.finetuned").to_bool().unwrap());
            continue;
        }
        let rotated = match model {
            "tiny-glm4" => 8,
            "tiny-phi4-mini" => 12,
            _ => head_dim,
        };
        assert_eq!(u64::from(read.number(&format!("{arch}.rope.dimension_count"))), rotated, "{model}");
        let theta = match model {
            "tiny-llama3" | "tiny-olmo2" | "tiny-olmo3" | "tiny-ernie4-5" => 5e5,
            "tiny-qwen2" | "tiny-qwen3" | "tiny-gemma3" | "tiny-ministral" | "tiny-ministral3"
            | "tiny-mixtral" | "tiny-qwen2-moe" => 1e6,
            "tiny-smollm3" => 5e6,
            "tiny-seed-oss" => 1e7,
            _ => 1e4,
        };
        assert_eq!(float("rope.freq_base"), theta, "{model}");
        let is_scaled = ["tiny-ministral3", "tiny-olmo3", "tiny-phi4-mini"].contains(&model);
        assert_eq!(read.has(&format!("{arch}.rope.scaling.type")), is_scaled, "{model}");
    }
}

/// The keys that only some architectures read (src/models/granite.cpp, mistral3.cpp, olmo2.cpp).
/// llama.cpp multiplies yarn's factor of the paper, 0.1 · ln(factor) + 1, by `attn_factor`.
#[test]
fn keys_of_one_architecture() {
    let paper = |factor: f64| (0.1 * factor.ln() + 1.0) as f32;
    let granite =
        [("embedding_scale", 6.0), ("attention.scale", 0.11), ("residual_scale", 0.4), ("logit_scale", 3.0)];
    let ministral3 = [
        ("attention.temperature_scale", 0.1),
        ("rope.scaling.factor", 16.0),
        ("rope.scaling.attn_factor", 1.0 / paper(16.0)),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
    ];
    let olmo3 = [
        ("rope.scaling.factor", 8.0),
        ("rope.scaling.attn_factor", 1.2 / paper(8.0)),
        ("rope.freq_base_swa", 5e5),
    ];
    for (model, keys) in [
        ("tiny-granite", &granite[..]),
        ("tiny-granite4", &granite),
        ("tiny-granite4-nope", &granite),
        ("tiny-ministral3", &ministral3),
        ("tiny-olmo3", &olmo3),
    ] {
        let (_place, read) = exported(&golden("families/models").join(model), "bf16");
        for (key, wanted) in keys {
            let actual = read.value(&format!("{}.{key}", arch(model))).to_f32().unwrap();
            assert!((actual - wanted).abs() <= 1e-6 * wanted, "{model}: {key} is {actual}, not {wanted}");
        }
    }
    let open = |model: &str| exported(&golden("families/models").join(model), "bf16");
    let (_place, read) = open("tiny-ministral3");
    assert_eq!(read.number("mistral3.rope.scaling.original_context_length"), 16);
    let (_place, read) = open("tiny-olmo3");
    assert_eq!(read.number("olmo2.rope.scaling.original_context_length"), 32);
    assert_eq!(read.number("olmo2.attention.sliding_window"), 8);
    assert!(!read.has("olmo2.attention.sliding_window_pattern"), "three of four layers slide without a key");
    let (_place, read) = open("tiny-olmo2");
    assert!(!read.has("olmo2.attention.sliding_window") && !read.has("olmo2.rope.freq_base_swa"));
    let (_place, read) = open("tiny-granite");
    assert!(!read.has("granite.rope.scaling.finetuned"), "positions are the default");
}

/// The keys and the stacked tensors of experts (src/models/qwen3moe.cpp, qwen2moe.cpp, olmoe.cpp).
#[test]
fn experts_are_one_tensor_with_their_keys() {
    let sparse = |config: &mut Json| config["mlp_only_layers"] = json!([]);
    let qwen3 = noise("families/models/tiny-qwen3-moe", sparse);
    let of = |model: &str| golden("families/models").join(model);
    for (folder, arch, numbers) in [
        (qwen3.path().to_owned(), "qwen3moe", [8, 2, 32, 0]),
        (of("tiny-qwen2-moe"), "qwen2moe", [6, 2, 32, 48]),
        (of("tiny-mixtral"), "llama", [4, 2, 0, 0]),
        (of("tiny-olmoe"), "olmoe", [8, 3, 0, 0]),
    ] {
        let (_place, read) = exported(&folder, "q8_0");
        let keys = [
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
        ];
        for (key, wanted) in keys.into_iter().zip(numbers) {
            let key = format!("{arch}.{key}");
            assert_eq!(if read.has(&key) { read.number(&key) } else { 0 }, wanted, "{key}");
        }
        let shape = |name: &str| read.content.tensor_infos[name].shape.dims().to_vec();
        assert_eq!(shape("blk.0.ffn_gate_exps.weight")[0], numbers[0] as usize, "{arch}");
        assert_eq!(read.dtype("blk.0.ffn_gate_inp.weight"), GgmlDType::F32, "{arch}: a router stays exact");
    }
    // llama.cpp has no key for weights that are not divided by their sum here.
    for (model, renormalized) in [("tiny-olmoe", true), ("tiny-qwen2-moe", true)] {
        let folder = noise(&format!("families/models/{model}"), |config: &mut Json| {
            config["norm_topk_prob"] = json!(renormalized);
        });
        let dir = tempfile::tempdir().unwrap();
        let refused = export(folder.path(), "f32", &dir.path().join("m.gguf")).unwrap_err().to_string();
        assert!(refused.contains("`norm_topk_prob` true"), "{refused}");
    }
}

/// llama.cpp slides at the 64 layers of the 32B model alone, which also leaves out the positions
/// of the other layers.
#[test]
fn exaone4_slides_at_64_layers() {
    let small = |config: &mut Json| {
        config["head_dim"] = json!(12);
        config["sliding_window"] = json!(null);
        config["layer_types"] = json!(vec!["full_attention"; 4]);
    };
    let large = |config: &mut Json| {
        config["head_dim"] = json!(12);
        config["num_hidden_layers"] = json!(64);
        config["layer_types"] = json!(null);
    };
    for (window, change) in [(None, &small as &dyn Fn(&mut Json)), (Some(8), &large)] {
        let folder = noise("families/models/tiny-exaone4", change);
        let (_place, read) = exported(folder.path(), "f32");
        let key = "exaone4.attention.sliding_window";
        assert_eq!(read.has(key).then(|| read.number(key)), window);
        assert!(!read.has("exaone4.attention.sliding_window_pattern"), "the last of four is the default");
        assert_eq!(read.values("rope_freqs.weight").len(), 6);
        let tensors = stored(folder.path());
        assert_eq!(read.content.tensor_infos.len(), tensors.len() + 1);
        for (name, (_, values)) in &tensors {
            assert!(read.values(&gguf_name("tiny-exaone4", name)) == *values, "{name}");
        }
    }
}

/// Differences from llama.cpp's fixed choices of each architecture.
#[test]
fn what_an_architecture_has_no_key_for() {
    let changes = |keys: &[(&str, Json)]| {
        let keys: Vec<(String, Json)> =
            keys.iter().map(|(key, value)| ((*key).into(), value.clone())).collect();
        move |config: &mut Json| keys.iter().for_each(|(key, value)| config[key] = value.clone())
    };
    let yarn = |key: &str, value: Json| {
        let mut yarn = json!({ "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
            "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1 });
        yarn[key] = value;
        ("rope_parameters", yarn)
    };
    let bases =
        json!({ "full_attention": { "rope_theta": 5e5 }, "sliding_attention": { "rope_theta": 1e4 } });
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    let refuses = |model: &str, keys: &[(&str, Json)], fault: &str| {
        let folder = noise(&format!("families/models/tiny-{model}"), changes(keys));
        let dir = tempfile::tempdir().unwrap();
        let refused = export(folder.path(), "f32", &dir.path().join("m.gguf")).unwrap_err();
        let causes = refused.causes().join("; ");
        assert!(refused.to_string().contains("cannot export this model as GGUF"), "{model}: {refused}");
        assert!(causes.contains(fault), "{model}: {causes}");
        assert!(!dir.path().join("m.gguf").exists());
    };
    refuses("smollm3", &[("no_rope_layers", json!([1, 0, 1, 1]))], "layers without positions are [1]");
    refuses("smollm3", &[("attention_bias", json!(true))], "a bias in o_proj");
    refuses("smollm3", &[("mlp_bias", json!(true))], "biases in the MLP");
    refuses(
        "smollm3",
        &[("rope_scaling", llama3.clone())],
        "smollm3 cannot compute `rope_scaling` of type \"llama3\"",
    );
    refuses("seed-oss", &[("attention_out_bias", json!(true))], "a bias in o_proj");
    refuses("seed-oss", &[("mlp_bias", json!(true))], "biases in the MLP");
    refuses("ernie4-5", &[("use_bias", json!(true))], "biases in the MLP");
    refuses("glm4", &[("rope_scaling", llama3)], "glm4 cannot compute");
    refuses("olmo2", &[("tie_word_embeddings", json!(true))], "`tie_word_embeddings` true");
    refuses("olmo2", &[("head_dim", json!(8))], "heads of 32 columns in total, not hidden_size 64");
    refuses("olmo3", &[("rope_parameters", bases)], "`rope_theta` is 10000 in sliding layers and 500000");
    refuses("exaone4", &[], "heads of 64 columns in total, not hidden_size 48");
    refuses("exaone4", &[("head_dim", json!(12))], "`sliding_window` is 8 and `num_hidden_layers` 4");
    let of_32b = [("head_dim", json!(12)), ("num_hidden_layers", json!(64)), ("layer_types", json!(null))];
    let no_window = [&of_32b[..], &[("sliding_window", json!(null))]].concat();
    refuses("exaone4", &no_window, "`sliding_window` is null and `num_hidden_layers` 64");
    refuses(
        "ministral3",
        &[("rope_parameters", json!(null))],
        "accepted: as `rope_parameters` in config.json",
    );
    refuses("ministral3", &[yarn("truncate", json!(false))], "of type \"yarn\"");
    refuses("ministral3", &[("original_max_position_embeddings", json!(32))], "grow from 16 positions");
    refuses("ministral3", &[yarn("rope_type", json!("default"))], "grow from 16 positions");
    let folder = noise("families/models/tiny-ministral3", changes(&[yarn("beta_fast", json!(4.0))]));
    let (_place, read) = exported(folder.path(), "bf16");
    assert_eq!(read.value("mistral3.rope.scaling.yarn_beta_fast").to_f32().unwrap(), 4.0);
    let folder = noise("families/models/tiny-ministral3", changes(&[yarn("llama_4_scaling_beta", json!(0))]));
    let (_place, read) = exported(folder.path(), "bf16");
    assert!(!read.has("mistral3.attention.temperature_scale"));
}

#[test]
fn windows_and_caps_of_gemma() {
    let (_place, read) = exported(&golden("models/tiny-gemma2"), "f32");
    assert_eq!(read.number("gemma2.attention.sliding_window"), 8);
    assert_eq!(read.value("gemma2.attn_logit_softcapping").to_f32().unwrap(), 5.0);
    assert_eq!(read.value("gemma2.final_logit_softcapping").to_f32().unwrap(), 6.0);
    assert!(!read.has("gemma2.attention.sliding_window_pattern"), "even layers slide without a key");
    let (_place, read) = exported(&golden("models/tiny-gemma3"), "f32");
    assert_eq!(read.number("gemma3.attention.sliding_window"), 8);
    assert_eq!(read.value("gemma3.rope.freq_base_swa").to_f32().unwrap(), 1e4);
    let pattern: Vec<bool> = read
        .list("gemma3.attention.sliding_window_pattern")
        .iter()
        .map(|slides| slides.to_bool().unwrap())
        .collect();
    assert_eq!(pattern, [true, false], "not five of six");
}

/// The divisors follow conversion/llama.py, in f64: frequencies with wavelengths above 64 / 1 are
/// divided by the factor 8, those below 64 / 4 are kept.
#[test]
fn llama3_frequencies_are_a_tensor() {
    let (_place, read) = exported(&golden("models/tiny-llama3"), "q8_0");
    let actual = read.values("rope_freqs.weight");
    assert_eq!((actual.len(), read.dtype("rope_freqs.weight")), (8, GgmlDType::F32));
    for (i, actual) in actual.iter().enumerate() {
        let wavelength = std::f64::consts::TAU * 500_000f64.powf(2.0 * i as f64 / 16.0);
        let wanted = match wavelength {
            short if short < 16.0 => 1.0,
            long if long > 64.0 => 8.0,
            middle => {
                let smooth = (64.0 / middle - 1.0) / (4.0 - 1.0);
                1.0 / ((1.0 - smooth) / 8.0 + smooth)
            }
        };
        assert!((f64::from(*actual) / wanted - 1.0).abs() < 1e-5, "{i}: {actual}, {wanted}");
    }
}

/// A copy of a golden model with changed config.json and tokenizer.json.
fn changed(
    model: &str,
    config: impl FnOnce(&mut Json),
    tokenizer: impl FnOnce(&mut Json),
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_folder(&golden("models").join(model), dir.path());
    let rewrite = |name: &str, change: &mut dyn FnMut(&mut Json)| {
        let path = dir.path().join(name);
        let mut json = read_json(&path);
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
    };
    let (mut config, mut tokenizer) = (Some(config), Some(tokenizer));
    rewrite("config.json", &mut |json| config.take().unwrap()(json));
    rewrite("tokenizer.json", &mut |json| tokenizer.take().unwrap()(json));
    dir
}

#[test]
fn scaled_positions_are_keys_and_tensors() {
    let factors = |from: f64| (0..8).map(|i| from + f64::from(i)).collect::<Vec<f64>>();
    let folder = changed(
        "tiny-phi3",
        |config| {
            config["rope_scaling"] =
                json!({ "type": "longrope", "short_factor": factors(1.0), "long_factor": factors(2.0) });
            config["original_max_position_embeddings"] = json!(64);
        },
        |_| {},
    );
    let (_place, read) = exported(folder.path(), "f16");
    let floats = |from: f64| factors(from).into_iter().map(|f| f as f32).collect::<Vec<f32>>();
    assert_eq!(read.values("rope_factors_short.weight"), floats(1.0));
    assert_eq!(read.values("rope_factors_long.weight"), floats(2.0));
    assert_eq!(read.number("phi3.rope.scaling.original_context_length"), 64);
    // √(1 + ln(256 / 64) / ln 64)
    let factor = read.value("phi3.rope.scaling.attn_factor").to_f32().unwrap();
    assert!((f64::from(factor) - (4.0f64 / 3.0).sqrt()).abs() < 1e-6, "{factor}");

    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    let folder = changed("tiny-qwen2", |config| config["rope_scaling"] = yarn, |_| {});
    let (_place, read) = exported(folder.path(), "f16");
    assert_eq!(read.text("qwen2.rope.scaling.type"), "yarn");
    assert_eq!(read.value("qwen2.rope.scaling.factor").to_f32().unwrap(), 4.0);
    assert_eq!(read.number("qwen2.rope.scaling.original_context_length"), 64);
    assert!(!read.has("qwen2.rope.scaling.attn_factor"), "llama.cpp has the paper's factor");
}

#[test]
fn tokenizers_are_whole() {
    let texts = |read: &Read, key: &str| -> Vec<String> {
        read.list(key).iter().map(|text| text.to_string().unwrap().clone()).collect()
    };
    // Model, kind, pre-tokenizer, tokens without padding, whether BOS and a space precede a text.
    let table = [
        ("tiny-llama", "gpt2", "smollm", 480, false, false),
        ("tiny-llama3", "gpt2", "llama-bpe", 600, true, false),
        ("tiny-qwen2", "gpt2", "qwen2", 500, false, false),
        ("tiny-qwen3", "gpt2", "qwen2", 512, false, false),
        ("tiny-mistral", "llama", "default", 520, true, true),
        ("tiny-phi3", "llama", "default", 530, false, true),
        ("tiny-gemma2", "llama", "default", 640, true, false),
        ("tiny-gemma3", "llama", "default", 560, true, false),
    ];
    for (model, kind, pre, tokens, bos, space) in table {
        let folder = golden("models").join(model);
        let (config, json) = (config_of(&folder), read_json(&folder.join("tokenizer.json")));
        let (_place, read) = exported(&folder, "f16");
        assert_eq!(read.text("tokenizer.ggml.model"), kind, "{model}");
        assert_eq!(read.text("tokenizer.ggml.pre"), pre, "{model}");
        let list = texts(&read, "tokenizer.ggml.tokens");
        let types: Vec<i32> =
            read.list("tokenizer.ggml.token_type").iter().map(|kind| kind.to_i32().unwrap()).collect();
        assert_eq!((list.len(), types.len()), (config.vocab_size, config.vocab_size), "{model}");
        assert_eq!(types.iter().position(|kind| *kind == 5).unwrap_or(list.len()), tokens, "{model}");
        for (text, id) in json["model"]["vocab"].as_object().unwrap() {
            assert_eq!(&list[usize::try_from(id.as_u64().unwrap()).unwrap()], text, "{model}");
        }
        for token in json["added_tokens"].as_array().unwrap() {
            let id = usize::try_from(token["id"].as_u64().unwrap()).unwrap();
            assert_eq!(list[id], token["content"].as_str().unwrap(), "{model}");
            let unknown = token["content"] == json["model"]["unk_token"];
            let is_special = token["special"].as_bool().unwrap();
            let wanted = if unknown {
                2
            } else if is_special {
                3
            } else {
                4
            };
            assert_eq!(types[id], wanted, "{model}: {token}");
        }
        assert_eq!(read.value("tokenizer.ggml.add_bos_token").to_bool().unwrap(), bos, "{model}");
        assert!(!read.value("tokenizer.ggml.add_eos_token").to_bool().unwrap(), "{model}");
        if kind == "gpt2" {
            let merges = json["model"]["merges"].as_array().unwrap();
            assert_eq!(read.list("tokenizer.ggml.merges").len(), merges.len(), "{model}");
        } else {
            assert_eq!(read.value("tokenizer.ggml.add_space_prefix").to_bool().unwrap(), space, "{model}");
            assert_eq!(types.iter().filter(|kind| **kind == 6).count(), 256, "{model}: bytes");
            scores(&read, &json, &list);
        }
    }
}

/// The earlier a merge makes a token, the higher its score: llama.cpp merges by scores alone.
fn scores(read: &Read, json: &Json, tokens: &[String]) {
    let scores = read.list("tokenizer.ggml.scores");
    assert_eq!(scores.len(), tokens.len());
    let score = |text: &str| {
        let id = tokens.iter().position(|token| token == text).unwrap();
        scores[id].to_f32().unwrap()
    };
    let merged: Vec<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|merge| match merge {
            Json::String(text) => text.replace(' ', ""),
            pair => format!("{}{}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        })
        .collect();
    for (rank, text) in merged.iter().enumerate() {
        let first = merged.iter().position(|other| other == text).unwrap();
        assert_eq!(score(text), 0.0 - first as f32, "{rank}: {text}");
    }
}

#[test]
fn special_tokens_and_templates() {
    let (_place, read) = exported(&golden("models/tiny-llama3"), "f16");
    let id = |name: &str| read.number(&format!("tokenizer.ggml.{name}_token_id"));
    // tokenizer_config.json sets <|begin_of_text|> and <|eot_id|>; config.json also ends at
    // <|end_of_text|>.
    assert_eq!((id("bos"), id("eos"), id("eot")), (595, 599, 596));
    let tokenizer = read_json(&golden("models/tiny-llama3/tokenizer_config.json"));
    assert_eq!(read.text("tokenizer.chat_template"), tokenizer["chat_template"].as_str().unwrap());
    let (_place, read) = exported(&golden("models/tiny-qwen3"), "f16");
    let template = std::fs::read_to_string(golden("models/tiny-qwen3/chat_template.jinja")).unwrap();
    assert_eq!(read.text("tokenizer.chat_template"), template);
    assert!(!read.has("tokenizer.ggml.bos_token_id"), "qwen has none");
    let (_place, read) = exported(&golden("models/tiny-phi3"), "f16");
    let id = |name: &str| read.number(&format!("tokenizer.ggml.{name}_token_id"));
    assert_eq!((id("eos"), id("eot"), id("eom"), id("padding"), id("unknown")), (525, 528, 526, 525, 0));
    assert_eq!(read.text("general.name"), "name (phi-3)", "its special tokens strip what follows");
}

/// A llama with rows of 256 and 512 values of seeded noise, and tiny-llama's tokenizer.
fn wide() -> tempfile::TempDir {
    noise("models/tiny-llama", |config| {
        (config["hidden_size"], config["intermediate_size"]) = (json!(256), json!(512));
        config["num_hidden_layers"] = json!(8);
    })
}

/// A copy of a golden model with a changed config.json, and weights of seeded noise to match.
fn noise(model: &str, change: impl Fn(&mut Json)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_folder(&golden(model), dir.path());
    let path = dir.path().join("config.json");
    let mut config = read_json(&path);
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    let mut state = 1u64;
    let mut noise = || {
        // Knuth's MMIX generator; the sum of four uniform numbers is roughly bell-shaped.
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        0.05 * (uniform() + uniform() + uniform() + uniform())
    };
    let shapes = finetune::model::parameters(&config_of(dir.path()));
    let tensors: Vec<_> = shapes
        .iter()
        .map(|spec| {
            let bytes: Vec<u8> = (0..spec.len()).flat_map(|_| noise().to_le_bytes()).collect();
            (spec.name.clone(), spec.shape.clone(), bytes)
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

/// Returns the largest rounding error of a block type: half a step. If scales are themselves
/// rounded to 6 or 8 bits (k-quants), it is at most a whole step of the widest block of 256.
fn bound(dtype: GgmlDType, values: &[f32]) -> f32 {
    let amax = values.iter().fold(0f32, |max, value| max.max(value.abs()));
    let width = |block: &[f32]| {
        let low = block.iter().copied().fold(0f32, f32::min);
        block.iter().copied().fold(0f32, f32::max) - low
    };
    // Scales are f16, so they may be off by half a unit of 2^-10.
    let scale = amax / 2048.0;
    match dtype {
        GgmlDType::Q8_0 => 0.5 * amax / 127.0 + scale,
        // Steps run from -8 to 7: the largest value of the other sign may be off by a whole step.
        GgmlDType::Q4_0 => amax / 8.0 + scale,
        GgmlDType::Q5_0 => amax / 16.0 + scale,
        GgmlDType::Q5_1 => 0.5 * width(values) / 31.0 + 2.0 * scale,
        GgmlDType::Q4K => values.chunks(32).map(|block| width(block) / 15.0).fold(0.0, f32::max),
        GgmlDType::Q5K => values.chunks(32).map(|block| width(block) / 31.0).fold(0.0, f32::max),
        // Steps run from -32 to 31; scales of blocks of 16 are in 127ths of the largest.
        GgmlDType::Q6K => amax / 32.0 + amax / 254.0,
        GgmlDType::F16 => amax / 1024.0,
        GgmlDType::F32 => 0.0,
        other => panic!("{other:?}"),
    }
}

fn check_errors(folder: &Path, model: &str, read: &Read) {
    let config = read_json(&folder.join("config.json"));
    for (name, (shape, values)) in stored(folder) {
        let ours = gguf_name(model, &name);
        let (dtype, wanted) = (read.dtype(&ours), wanted(model, &config, &name, &shape, &values));
        let actual = read.values(&ours);
        let block = if dtype.block_size() == 1 { wanted.len() } else { dtype.block_size() };
        for (wanted, actual) in wanted.chunks(block).zip(actual.chunks(block)) {
            let bound = bound(dtype, wanted);
            let worst = wanted.iter().zip(actual).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= bound, "{ours} {dtype:?}: {worst} > {bound}");
        }
    }
}

/// Types by hand from llama_tensor_get_type. With 8 layers 8/8 = 1 and 7·8/8 = 7: layers 0, 7 and
/// 3, 6 get more bits.
#[test]
fn mixtures_of_blocks() {
    let folder = wide();
    use GgmlDType::{F32, Q4_0, Q4K, Q5K, Q6K, Q8_0};
    let kinds = [
        ("q8_0", Q8_0, Q8_0, Q8_0),
        ("q4_0", Q4_0, Q4_0, Q6K),
        ("q4_k_m", Q4K, Q6K, Q6K),
        ("q5_k_m", Q5K, Q6K, Q6K),
        ("q6_k", Q6K, Q6K, Q6K),
    ];
    for (kind, most, more, output) in each_third(kinds, 2) {
        let (_place, read) = exported(folder.path(), kind);
        for (name, info) in &read.content.tensor_infos {
            let layer = name.split('.').nth(1).and_then(|layer| layer.parse::<usize>().ok());
            let favoured = matches!(layer, Some(0 | 3 | 6 | 7));
            let wanted = match name.as_str() {
                "output.weight" => output,
                name if name.contains("norm") => F32,
                name if favoured && (name.contains("attn_v") || name.contains("ffn_down")) => more,
                _ => most,
            };
            assert_eq!(info.ggml_dtype, wanted, "{kind}: {name}");
        }
        check_errors(folder.path(), "tiny-llama", &read);
    }
}

/// tiny-llama3 has rows of 64 values and, in its down projections, of 112. The latter are no
/// multiple of a block size and stay f16.
#[test]
fn rows_that_blocks_do_not_divide() {
    use GgmlDType::{F16, Q4_0, Q5_0, Q5_1, Q8_0};
    let folder = golden("models/tiny-llama3");
    for (kind, rows_of_64, value, embedding) in [
        ("q8_0", Q8_0, Q8_0, Q8_0),
        ("q4_0", Q4_0, Q4_0, Q8_0),
        ("q4_k_m", Q5_0, Q8_0, Q8_0),
        ("q5_k_m", Q5_1, Q8_0, Q8_0),
        ("q6_k", Q8_0, Q8_0, Q8_0),
    ] {
        let (_place, read) = exported(&folder, kind);
        assert_eq!(read.dtype("blk.0.attn_q.weight"), rows_of_64, "{kind}");
        assert_eq!(read.dtype("blk.1.attn_v.weight"), value, "{kind}: layer 1 of 2 has more bits");
        assert_eq!(read.dtype("token_embd.weight"), embedding, "{kind}: tied, so also the output");
        assert_eq!(read.dtype("blk.0.ffn_down.weight"), F16, "{kind}");
        check_errors(&folder, "tiny-llama3", &read);
    }
    let dir = tempfile::tempdir().unwrap();
    let report = export(&folder, "q6_k", &dir.path().join("m.gguf")).unwrap();
    assert_eq!(report.fallbacks, 14, "7 matrices in each of 2 layers; the output's q8_0 is the rule");
    let all: usize = report.types.values().sum();
    let note = format!("14 of {all} tensors got f16 or q8_0: their rows are no multiple of 256");
    assert_eq!(report.fallback_note(), Some(note));
}

/// W + alpha / r · B A with A and B from the GGUF file, rows permuted back, equals PEFT's merged
/// model.
#[test]
fn an_adapter_is_the_sum_that_peft_merged() {
    let (base, adapter) = (golden("models/tiny-llama"), golden("train/lora/adapter_final"));
    let config = read_json(&base.join("config.json"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    let kind = "f32".parse().unwrap();
    gguf::write_adapter(&config_of(&base), &adapter, "a", kind, &path).unwrap();
    let read = Read::open(&path);
    assert_eq!(read.text("general.type"), "adapter");
    assert_eq!((read.text("general.architecture"), read.text("adapter.type")), ("llama", "lora"));
    let alpha = read.value("adapter.lora.alpha").to_f32().unwrap();
    let (merged, mut changed) = (stored(&golden("train/lora/merged")), 0);
    for (name, (shape, values)) in stored(&base) {
        let ours = gguf_name("tiny-llama", &name);
        let merged = wanted("tiny-llama", &config, &name, &shape, &merged[&name].1);
        let mut sum = wanted("tiny-llama", &config, &name, &shape, &values);
        if read.content.tensor_infos.contains_key(&format!("{ours}.lora_a")) {
            let (a, b) = (read.values(&format!("{ours}.lora_a")), read.values(&format!("{ours}.lora_b")));
            let r = a.len() / shape[1];
            assert_eq!(b.len(), shape[0] * r);
            for (row, out) in sum.chunks_mut(shape[1]).enumerate() {
                for (column, out) in out.iter_mut().enumerate() {
                    let dot: f32 = (0..r).map(|k| b[row * r + k] * a[k * shape[1] + column]).sum();
                    *out += alpha / r as f32 * dot;
                }
            }
            changed += 1;
        }
        let worst = sum.iter().zip(&merged).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-6, "{ours}: {worst}");
    }
    assert_eq!(read.content.tensor_infos.len(), 2 * changed);
    assert!(changed > 0);
}

/// Granite 4's gate and up are one module with LoRA, and two in llama.cpp: each has A and half of
/// B's rows.
#[test]
fn an_adapter_on_gate_and_up_is_two() {
    let (base, adapter) = ("families/models/tiny-granite4", "families/train/lora_granite4/adapter_final");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    let kind = "f32".parse().unwrap();
    gguf::write_adapter(&config_of(&golden(base)), &golden(adapter), "a", kind, &path).unwrap();
    let (read, tensors) = (Read::open(&path), stored(&golden(adapter)));
    assert_eq!(read.text("general.architecture"), "granite");
    for layer in 0..2 {
        let of = |half: &str| {
            let module = format!("base_model.model.model.layers.{layer}.shared_mlp.input_linear");
            tensors[&format!("{module}.lora_{half}.weight")].clone()
        };
        let ((_, a), (shape, b)) = (of("A"), of("B"));
        let (gate, up) = b.split_at(b.len() / 2);
        for (name, b) in [("ffn_gate", gate), ("ffn_up", up)] {
            let name = format!("blk.{layer}.{name}.weight");
            assert!(read.values(&format!("{name}.lora_a")) == a, "{name}");
            assert!(read.values(&format!("{name}.lora_b")) == b, "{name}");
            let info = &read.content.tensor_infos[&format!("{name}.lora_b")];
            assert_eq!(info.shape.dims(), [shape[0] / 2, shape[1]]);
        }
    }
    assert_eq!(read.content.tensor_infos.len(), 2 * 2 * 5, "q, v, gate, up and down of 2 layers");
}

/// rsLoRA scales by alpha / √r, llama.cpp by alpha / r, so B carries the quotient.
#[test]
fn an_adapter_keeps_its_scale() {
    let (base, adapter) = (golden("models/tiny-llama"), golden("train/rslora/adapter_final"));
    let config = read_json(&adapter.join("adapter_config.json"));
    assert_eq!(config["use_rslora"], true);
    let r = config["r"].as_f64().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    gguf::write_adapter(&config_of(&base), &adapter, "a", "f32".parse().unwrap(), &path).unwrap();
    let read = Read::open(&path);
    assert_eq!(
        f64::from(read.value("adapter.lora.alpha").to_f32().unwrap()),
        config["lora_alpha"].as_f64().unwrap()
    );
    let tensors = stored(&adapter);
    let (_, b) = &tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"];
    for (actual, b) in read.values("blk.0.attn_v.weight.lora_b").iter().zip(b) {
        assert!(
            (f64::from(*actual) - f64::from(*b) * r.sqrt()).abs() <= 1e-6 * f64::from(b.abs()),
            "{actual}, {b}"
        );
    }
}

#[test]
fn a_hugging_face_folder_is_the_model_again() {
    let source = golden("models/tiny-mistral");
    let files = ModelFiles::open(&source).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("same");
    hf::export(&files, &output, recipe::Dtype::Auto, hf::SHARD_BYTES).unwrap();
    assert!(output.join("model.safetensors").exists(), "one file, whatever the source had");
    let same = ModelFiles::open(&output).unwrap();
    assert!(same.names().eq(files.names()));
    assert!(files.names().all(|name| same.bytes(name).unwrap() == files.bytes(name).unwrap()));
    for name in ["config.json", "generation_config.json"] {
        assert_eq!(read_json(&output.join(name)), read_json(&source.join(name)), "{name}");
    }
    let bytes =
        |name: &str| (std::fs::read(output.join(name)).unwrap(), std::fs::read(source.join(name)).unwrap());
    let (ours, theirs) = bytes("tokenizer.json");
    assert!(ours == theirs);

    let output = dir.path().join("f16");
    hf::export(&files, &output, recipe::Dtype::F16, 200_000).unwrap();
    assert_eq!(read_json(&output.join("config.json"))["torch_dtype"], "float16");
    let half = ModelFiles::open(&output).unwrap();
    assert!(half.is_indexed() && half.files().len() > 1, "sharded");
    for (name, (_, values)) in stored(&source) {
        let mut actual = vec![0f32; values.len()];
        half.read_f32(&name, &mut actual).unwrap();
        assert!(actual.iter().zip(&values).all(|(a, b)| *a == f16::from_f32(*b).to_f32()), "{name}");
    }
}

// Through the binary: bad input.

fn refused(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(&[&["export"], args].concat()).arg("--quiet").output().unwrap();
    let said = dir.told(&output.stderr);
    let code = output.status.code().unwrap();
    assert_ne!(code, 0, "{said}");
    assert!(!said.contains("internal error"), "{said}");
    assert!(output.stdout.is_empty(), "errors go to stderr alone");
    let left = std::fs::read_dir(dir.path("model").parent().unwrap()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.contains("tmp")), "{left:?}");
    format!("exit {code}\n{said}")
}

const GGUF: [&str; 6] = ["--model", "model", "--format", "gguf", "--output", "m.gguf"];

fn refused_gguf(dir: &TestDir, more: &[&str]) -> String {
    let text = refused(dir, &[&GGUF, more].concat());
    assert!(!dir.path("m.gguf").exists(), "a file after: {text}");
    text
}

#[test]
fn an_unknown_type() {
    assert_snapshot!(refused_gguf(&TestDir::new(), &["--type", "q3_k_l"]), @"
    exit 2
    error: invalid value 'q3_k_l' for '--type <TYPE>'
      [possible values: f32, f16, bf16, q8_0, q4_0, q4_k_m, q5_k_m, q6_k]

      tip: a similar value exists: 'q5_k_m'

    For more information, try '--help'.
    ");
}

#[test]
fn an_output_that_exists() {
    let dir = TestDir::new();
    dir.write("m.gguf", "mine");
    assert_snapshot!(refused(&dir, &GGUF), @"
    exit 1
    error: cannot write m.gguf
      caused by: a file of that name exists
    hint: give another path with `--output`, or remove the file
    ");
    assert_eq!(std::fs::read(dir.path("m.gguf")).unwrap(), b"mine");
    assert_snapshot!(refused(&dir, &["--model", "model", "--format", "gguf", "--output", "model"]), @"
    exit 1
    error: cannot write model
      caused by: it is a folder; a GGUF is one file
    hint: write `--output model/model.gguf`
    ");
    assert_snapshot!(refused(&dir, &["--model", "model", "--format", "hf", "--output", "model"]), @"
    exit 1
    error: cannot write to model
      caused by: the folder is not empty
    hint: give a new or empty folder as `--output`
    ");
}

#[test]
fn what_does_not_go_together() {
    let dir = TestDir::new();
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    let hf = ["--model", "model", "--format", "hf", "--output", "out"];
    assert_snapshot!(refused(&dir, &[&hf[..], &["--type", "q8_0"]].concat()), @"
    exit 1
    error: cannot store a Hugging Face model as q8_0
      caused by: accepted with `--format hf`: f32, f16, bf16
    hint: write `--format gguf`
    ");
    assert_snapshot!(refused(&dir, &[&hf[..], &["--adapter", "adapter"]].concat()), @"
    exit 1
    error: cannot export an adapter as a Hugging Face model
      caused by: accepted with `--adapter` alone: `--format gguf`
    hint: add `--merge`, which merges the adapter into its model first
    ");
    assert_snapshot!(refused_gguf(&dir, &["--adapter", "adapter", "--type", "q4_k_m"]), @"
    exit 1
    error: cannot export an adapter as q4_k_m
      caused by: accepted for an adapter: f32, f16
    hint: merge first: `finetune merge --model MODEL --adapter [DIR]/adapter --output merged`, then export `--model merged`
    ");
}

/// `export` with an adapter writes the files of `merge` and `export`, and leaves no other file.
#[test]
fn an_adapter_is_merged_on_the_way() {
    let dir = TestDir::new();
    let adapter = ["--adapter", "adapter", "--model", "model"];
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    // A GGUF file takes the name of its model's folder, which is here the adapter's.
    std::fs::create_dir(dir.path("merged")).unwrap();
    dir.said(&[&["merge", "--output", "merged/adapter"][..], &adapter].concat());
    let merge = [&["export", "--merge"][..], &adapter].concat();
    for (kind, name) in [("f32", "a.gguf"), ("q8_0", "b.gguf")] {
        let two = format!("two-{name}");
        let format = ["--format", "gguf", "--type", kind, "--output"];
        dir.said(&[&["export", "--model", "merged/adapter"][..], &format, &[two.as_str()]].concat());
        let said = dir.said(&[&merge[..], &format, &[name]].concat());
        assert!(said.contains(&format!("merging adapter adapter in [DIR]/{name}.merged.tmp-")), "{said}");
        let read = |name: &str| std::fs::read(dir.path(name)).unwrap();
        assert!(read(name).starts_with(b"GGUF") && read(name) == read(&two), "{kind}");
    }
    dir.said(&[&merge[..], &["--format", "hf", "--output", "one/"]].concat());
    assert_eq!(stored(&dir.path("one")), stored(&dir.path("merged/adapter")));
    // A failed merge leaves nothing beside the output.
    let said = refused_gguf(&dir, &["--adapter", "nothing", "--merge"]);
    assert!(said.contains("nothing"), "{said}");
    let mut config = read_json(&dir.path("model/config.json"));
    config["hidden_size"] = json!(32);
    std::fs::write(dir.path("model/config.json"), config.to_string()).unwrap();
    refused_gguf(&dir, &["--adapter", "adapter", "--merge"]);
    let taken = refused(&dir, &[&["--merge", "--format", "hf", "--output", "one"][..], &adapter].concat());
    assert!(taken.contains("the folder is not empty"), "{taken}");
    assert!(refused(&dir, &[&GGUF[..], &["--merge"]].concat()).contains("--adapter"));
}

#[test]
fn an_adapter_that_is_more_than_lora() {
    let dir = TestDir::new();
    copy_folder(&golden("train/dora/adapter_final"), &dir.path("dora"));
    assert_snapshot!(refused_gguf(&dir, &["--adapter", "dora"]), @"
    exit 1
    error: cannot export adapter [DIR]/dora as GGUF
      caused by: it has `use_dora`: true; a GGUF adapter holds LoRA of linear layers alone
    hint: merge first: `finetune merge --model MODEL --adapter [DIR]/dora --output merged`, then export `--model merged`
    ");
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("saved"));
    let path = dir.path("saved/adapter_config.json");
    let mut config = read_json(&path);
    config["modules_to_save"] = json!(["lm_head"]);
    std::fs::write(&path, config.to_string()).unwrap();
    assert_snapshot!(refused_gguf(&dir, &["--adapter", "saved"]), @r#"
    exit 1
    error: cannot export adapter [DIR]/saved as GGUF
      caused by: it has `modules_to_save`: ["lm_head"]; a GGUF adapter holds LoRA of linear layers alone
    hint: merge first: `finetune merge --model MODEL --adapter [DIR]/saved --output merged`, then export `--model merged`
    "#);
}

#[test]
fn an_adapter_of_another_model() {
    let dir = TestDir::with_model("tiny-qwen2");
    copy_folder(&golden("train/lora_phi3/adapter_final"), &dir.path("adapter"));
    assert_snapshot!(refused_gguf(&dir, &["--adapter", "adapter"]), @"
    exit 1
    error: cannot use adapter [DIR]/adapter with this model
      caused by: it has tensors for `model.layers.0.mlp.gate_up_proj`, which the model does not have
    hint: give the model it was trained on as `--model`: tiny-phi3
    ");
}

/// The error of exporting tiny-llama with a changed config.json or tokenizer.json.
fn refused_model(config: impl FnOnce(&mut Json), tokenizer: impl FnOnce(&mut Json)) -> String {
    let dir = TestDir::new();
    copy_folder(changed("tiny-llama", config, tokenizer).path(), &dir.path("model"));
    refused_gguf(&dir, &[])
}

#[test]
fn a_tokenizer_that_llama_cpp_does_not_have() {
    assert_snapshot!(refused_model(
        |_| {},
        |tokenizer| {
            tokenizer["model"] = json!({ "type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0 });
        }
    ), @"
    exit 1
    error: cannot express this model's tokenizer in GGUF
      caused by: its model is Unigram; accepted: BPE
    hint: write `--format hf` for programs that read Hugging Face folders
    ");
    assert_snapshot!(refused_model(
        |_| {},
        |tokenizer| tokenizer["pre_tokenizer"]["pretokenizers"][0] =
            json!({ "type": "Punctuation", "behavior": "Isolated" })
    ), @r#"
    exit 1
    error: cannot express this model's tokenizer in GGUF
      caused by: its pre-tokenizer is {"type":"Sequence","pretokenizers":[{"type":"Punctuation","behavior":"Isolated"},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}]}, for which llama.cpp has no name
    hint: write `--format hf` for programs that read Hugging Face folders
    "#);
    assert_snapshot!(refused_model(
        |_| {},
        |tokenizer| tokenizer["normalizer"] = json!({ "type": "Lowercase" })
    ), @r#"
    exit 1
    error: cannot express this model's tokenizer in GGUF
      caused by: its normalizer is {"type":"Lowercase"}; accepted: none, NFC
    hint: write `--format hf` for programs that read Hugging Face folders
    "#);
}

/// The error of exporting tiny-qwen2 with this `rope_scaling`.
fn refused_of(scaling: &Json) -> String {
    let dir = TestDir::new();
    let model = changed("tiny-qwen2", |config| config["rope_scaling"] = scaling.clone(), |_| {});
    copy_folder(model.path(), &dir.path("model"));
    refused_gguf(&dir, &[])
}

#[test]
fn a_model_that_llama_cpp_cannot_compute() {
    assert_snapshot!(refused_model(|config| config["hidden_act"] = json!("gelu_pytorch_tanh"), |_| {}), @"
    exit 1
    error: cannot export this model as GGUF
      caused by: it has the activation GeluTanh, which llama.cpp's llama has no key for
    hint: write `--format hf` for programs that read Hugging Face folders
    ");
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    assert!(refused_of(&json!({ "rope_type": "yarn", "factor": 4.0, "beta_fast": 16 })).contains("\"yarn\""));
    assert_snapshot!(refused_of(&scaling), @r#"
    exit 1
    error: cannot export this model as GGUF
      caused by: llama.cpp's qwen2 cannot compute `rope_scaling` of type "llama3" as it is set here
    hint: write `--format hf` for programs that read Hugging Face folders
    "#);
}

#[test]
fn layers_that_llama_cpp_would_rotate() {
    let dir = TestDir::new();
    let change = |config: &mut Json| config["no_rope_layers"] = json!([1, 0, 1, 1]);
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    copy_folder(noise("families/models/tiny-smollm3", change).path(), &dir.path("model"));
    assert_snapshot!(refused_gguf(&dir, &[]), @"
    exit 1
    error: cannot export this model as GGUF
      caused by: its layers without positions are [1] (`no_rope_layers`, `layer_types`); those of llama.cpp's smollm3 are [3]
    hint: write `--format hf` for programs that read Hugging Face folders
    ");
}

#[test]
fn weights_that_do_not_fit() {
    let dir = TestDir::new();
    let path = dir.path("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut up = file.tensor("model.layers.1.mlp.up_proj.weight").unwrap().data().to_vec();
    up[..4].copy_from_slice(&70000f32.to_le_bytes());
    let write = |keep: &dyn Fn(&str) -> bool, up: &[u8]| {
        let tensors = file.tensors();
        let views = tensors.iter().filter(|(name, _)| keep(name)).map(|(name, view)| {
            let data = if name == "model.layers.1.mlp.up_proj.weight" { up } else { view.data() };
            (name.as_str(), TensorView::new(view.dtype(), view.shape().to_vec(), data).unwrap())
        });
        safetensors::serialize_to_file(views, None, &path).unwrap();
    };
    write(&|_| true, &up);
    assert_snapshot!(refused_gguf(&dir, &["--type", "f16"]), @"
    exit 1
    error: cannot store tensor `model.layers.1.mlp.up_proj.weight` as f16
      caused by: it holds 70000; the largest number of f16 is 65504
    hint: write `--type bf16` or `--type f32`
    ");
    let hf = ["--model", "model", "--format", "hf", "--type", "f16", "--output", "out"];
    assert_snapshot!(refused(&dir, &hf), @"
    exit 1
    error: cannot store tensor `model.layers.1.mlp.up_proj.weight` as f16
      caused by: it holds 70000; the largest number of f16 is 65504
    hint: write `--type bf16` or `--type f32`
    ");
    assert!(!dir.path("out").exists());
    up[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(&|_| true, &up);
    assert_snapshot!(refused_gguf(&dir, &["--type", "q8_0"]), @"
    exit 1
    error: cannot store tensor `model.layers.1.mlp.up_proj.weight` as q8_0
      caused by: it holds NaN; accepted: finite numbers
    hint: give an earlier checkpoint of that run
    ");
    write(&|name| name != "model.norm.weight", &up);
    assert_snapshot!(refused_gguf(&dir, &[]), @"
    exit 1
    error: cannot read weights in [DIR]/model
      caused by: tensor `model.norm.weight` is missing; the nearest is `lm_head.weight`
    hint: give config.json and weights of one and the same model
    ");
}
