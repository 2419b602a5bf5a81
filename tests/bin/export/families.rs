//! Names, shapes and values of the architectures whose tensors llama.cpp arranges in its own way.
//!
//! The arrangements are written here by hand, as reshapes and permutations of whole tensors, from
//! llama.cpp's conversion/*.py and gguf-py/gguf/tensor_mapping.py.

use super::*;

/// A change of config.json.
type Change = fn(&mut Json);

/// Golden models and their architectures, with the change of config.json that llama.cpp needs.
const MODELS: [(&str, &str, Option<Change>); 29] = [
    ("tiny-apertus", "apertus", None),
    ("tiny-arcee", "arcee", None),
    ("tiny-cohere", "command-r", None),
    ("tiny-cohere2", "cohere2", Some(|config| config["head_dim"] = json!(12))),
    ("tiny-deepseek-v3", "deepseek2", None),
    ("tiny-ernie4-5-moe", "ernie4_5-moe", None),
    ("tiny-falcon", "falcon", None),
    ("tiny-falcon-7b", "falcon", None),
    ("tiny-gemma4", "gemma4", None),
    ("tiny-gemma4-e2b", "gemma4", None),
    ("tiny-gemma4-moe", "gemma4", None),
    ("tiny-glm4-moe", "glm4moe", None),
    ("tiny-glm4-moe-lite", "deepseek2", None),
    ("tiny-gpt-neox", "gptneox", None),
    ("tiny-gpt-oss", "gpt-oss", None),
    ("tiny-granitemoe", "granitemoe", None),
    ("tiny-hunyuan", "hunyuan-dense", None),
    ("tiny-hunyuan-moe", "hunyuan-moe", None),
    ("tiny-lfm2", "lfm2", None),
    ("tiny-lfm2-moe", "lfm2moe", Some(|config| config["routed_scaling_factor"] = json!(1.0))),
    ("tiny-llama4", "llama4", Some(blocks_of_llama4)),
    ("tiny-minimax-m2", "minimax-m2", None),
    ("tiny-mistral4", "mistral4", None),
    ("tiny-nemotron", "nemotron", Some(|config| config["head_dim"] = json!(12))),
    ("tiny-qwen3-5", "qwen35", None),
    ("tiny-qwen3-5-moe", "qwen35moe", None),
    ("tiny-qwen3-next", "qwen3next", Some(|config| config["mlp_only_layers"] = json!([]))),
    ("tiny-stablelm", "stablelm", None),
    ("tiny-starcoder2", "starcoder2", None),
];

/// The numbers of Llama 4 that no key changes.
fn blocks_of_llama4(config: &mut Json) {
    config["attention_chunk_size"] = json!(8192);
    config["floor_scale"] = json!(8192);
    config["attn_scale"] = json!(0.1);
}

/// The last parts of names, from the longest.
const NAMES: [(&str, &str); 92] = [
    ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
    ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
    ("feed_forward.experts.w1", "ffn_gate_exps"),
    ("feed_forward.experts.w2", "ffn_down_exps"),
    ("feed_forward.experts.w3", "ffn_up_exps"),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.down_proj", "ffn_down"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.w3", "ffn_up"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("operator_norm", "attn_norm"),
    ("attention_layernorm", "attn_norm"),
    ("feedforward_layernorm", "ffn_norm"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
    ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.w2", "ffn_down_exps"),
    ("block_sparse_moe.experts.w3", "ffn_up_exps"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.wg", "ffn_gate_inp"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attention.query_key_value", "attn_qkv"),
    ("self_attention.dense", "attn_output"),
    ("attention.query_key_value", "attn_qkv"),
    ("attention.dense", "attn_output"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.out_proj", "ssm_out"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.norm", "ssm_norm"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.proj", "ffn_gate_inp"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("ln_attn", "attn_norm_2"),
    ("ln_mlp", "attn_norm"),
    ("input_layernorm", "attn_norm"),
];

fn named(model: &str, name: &str) -> String {
    let mut name = name.to_owned();
    for (from, to) in [
        ("model.layers.", "blk."),
        ("gpt_neox.layers.", "blk."),
        ("transformer.h.", "blk."),
        ("model.embed_tokens_per_layer", "per_layer_token_embd"),
        ("model.per_layer_model_projection", "per_layer_model_proj"),
        ("model.per_layer_projection_norm", "per_layer_proj_norm"),
        ("model.embedding_norm", "token_embd_norm"),
        ("model.embed_tokens", "token_embd"),
        ("gpt_neox.embed_in", "token_embd"),
        ("transformer.word_embeddings", "token_embd"),
        ("model.norm", "output_norm"),
        ("gpt_neox.final_layer_norm", "output_norm"),
        ("transformer.ln_f", "output_norm"),
        ("lm_head", "output"),
        ("embed_out", "output"),
    ] {
        name = name.replace(from, to);
    }
    let after = ["gemma4", "glm4-moe", "gpt-oss", "qwen3-"].iter().any(|with| model.contains(with))
        && !model.contains("lite");
    for (from, to) in [
        ("post_per_layer_input_norm", "post_norm"),
        ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_attention_layernorm", if after { "post_attention_norm" } else { "ffn_norm" }),
    ] {
        name = name.replace(from, to);
    }
    let pair = NAMES.iter().find(|(from, _)| name.contains(from));
    pair.map_or(name.clone(), |(from, to)| name.replace(from, to))
}

/// A tensor of some shape.
#[derive(Clone)]
struct Array(Vec<usize>, Vec<f32>);

impl Array {
    fn view(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.1.len(), "{:?}", self.0);
        Array(shape.to_vec(), self.1.clone())
    }

    /// numpy's transpose.
    fn permuted(&self, axes: &[usize]) -> Self {
        let strides: Vec<usize> = (0..self.0.len()).map(|axis| self.0[axis + 1..].iter().product()).collect();
        let shape: Vec<usize> = axes.iter().map(|axis| self.0[*axis]).collect();
        let value = |mut at: usize| {
            let mut from = 0;
            for (axis, size) in axes.iter().zip(&shape).rev() {
                from += at % size * strides[*axis];
                at /= size;
            }
            self.1[from]
        };
        let values = (0..self.1.len()).map(value).collect();
        Array(shape, values)
    }

    /// Rows `from..to` of the second axis of three.
    fn middle(&self, from: usize, to: usize) -> Self {
        let [a, b, c] = self.0[..] else { panic!("{:?}", self.0) };
        let block = |i: usize| self.1[(i * b + from) * c..(i * b + to) * c].to_vec();
        Array(vec![a, to - from, c], (0..a).flat_map(block).collect())
    }

    /// Rows `from..to` of the first axis.
    fn rows(&self, from: usize, to: usize) -> Self {
        let row = self.1.len() / self.0[0];
        let shape = [&[to - from], &self.0[1..]].concat();
        Array(shape, self.1[from * row..to * row].to_vec())
    }

    fn followed_by(mut self, other: &Self) -> Self {
        self.0[0] += other.0[0];
        self.1.extend(&other.1);
        self
    }
}

/// Makes one tensor of the experts of a layer, as [`stored_apart`] does.
fn together(folder: &Path) -> BTreeMap<String, Array> {
    let mut all = BTreeMap::new();
    for (name, (shape, values)) in stored_apart(folder) {
        all.insert(name, Array(shape, values));
    }
    all
}

/// The tensors of llama.cpp that a stored one becomes.
fn arranged(model: &str, config: &Json, name: &str, array: &Array) -> Vec<(String, Array)> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let columns = array.0.last().copied().unwrap_or(1);
    let ours = named(model, name);
    let one = |array: Array| vec![(ours.clone(), array)];
    let of_block = |part: &str| format!("{}.{part}", ours.split('.').take(2).collect::<Vec<_>>().join("."));
    match () {
        () if model == "tiny-gpt-oss" && name.contains("experts") => {
            let is_bias = name.ends_with("_bias");
            let array = if is_bias { array.clone() } else { array.permuted(&[0, 2, 1]) };
            let end = if is_bias { "bias" } else { "weight" };
            if name.contains("down_proj") {
                return vec![(of_block(&format!("ffn_down_exps.{end}")), array)];
            }
            let (experts, inner) = (array.0[0], array.0[1] / 2);
            let rest = array.1.len() / experts / inner / 2;
            let apart = array.view(&[experts, inner, 2, rest]).permuted(&[2, 0, 1, 3]);
            let part = |i: usize| {
                let half = apart.rows(i, i + 1);
                if is_bias { half.view(&[experts, inner]) } else { half.view(&[experts, inner, rest]) }
            };
            vec![
                (of_block(&format!("ffn_gate_exps.{end}")), part(0)),
                (of_block(&format!("ffn_up_exps.{end}")), part(1)),
            ]
        }
        // Keys, which another test reads.
        () if name.contains("act_fn") => Vec::new(),
        () if name.contains("conv.conv") => one(array.view(&[array.0[0], columns])),
        () if model == "tiny-llama4" && name.contains("experts.") => {
            let array = array.permuted(&[0, 2, 1]);
            let inner = array.0[1] / 2;
            if name.contains("down_proj") {
                return vec![(of_block("ffn_down_exps.weight"), array)];
            }
            vec![
                (of_block("ffn_gate_exps.weight"), array.middle(0, inner)),
                (of_block("ffn_up_exps.weight"), array.middle(inner, 2 * inner)),
            ]
        }
        () if name.contains("gate_up_proj") || name.contains("input_linear") => {
            let inner = array.0[1] / 2;
            vec![
                (of_block("ffn_gate_exps.weight"), array.middle(0, inner)),
                (of_block("ffn_up_exps.weight"), array.middle(inner, 2 * inner)),
            ]
        }
        () if name.contains("output_linear") || name.ends_with("experts.down_proj") => {
            vec![(of_block("ffn_down_exps.weight"), array.clone())]
        }
        () if name.contains("query_key_value") => {
            let heads = size("num_attention_heads");
            let groups = match model {
                "tiny-falcon" => size("num_kv_heads"),
                "tiny-falcon-7b" => 1,
                _ => heads,
            };
            let width = array.0[0] / (heads + 2 * groups);
            let row = array.1.len() / array.0[0];
            let by_group = array.view(&[groups, heads / groups + 2, width * row]);
            let queries = heads / groups;
            let [q, k, v] = [(0, queries), (queries, queries + 1), (queries + 1, queries + 2)]
                .map(|(from, to)| by_group.middle(from, to).1);
            one(Array(array.0.clone(), [q, k, v].concat()))
        }
        () if name.contains("kv_b_proj") => {
            let (heads, plain, value) =
                (size("num_attention_heads"), size("qk_nope_head_dim"), size("v_head_dim"));
            let by_head = array.view(&[heads, plain + value, columns]);
            vec![
                (of_block("attn_k_b.weight"), by_head.middle(0, plain).permuted(&[0, 2, 1])),
                (of_block("attn_v_b.weight"), {
                    let values = by_head.middle(plain, plain + value);
                    values.view(&[heads, value, columns])
                }),
            ]
        }
        // Its halves rotate, where llama.cpp rotates neighbours.
        () if model == "tiny-glm4-moe-lite" && name.contains("self_attn.q_proj") => {
            let (heads, plain, rotated) =
                (size("num_attention_heads"), size("qk_nope_head_dim"), size("qk_rope_head_dim"));
            let by_head = array.view(&[heads, plain + rotated, columns]);
            let turning = by_head.middle(plain, plain + rotated).view(&[heads, 2, rotated / 2, columns]);
            let turning = turning.permuted(&[0, 2, 1, 3]).view(&[heads, rotated, columns]);
            let head = |i: usize| {
                let plain = by_head.middle(0, plain).rows(i, i + 1).1;
                [plain, turning.rows(i, i + 1).1].concat()
            };
            one(Array(array.0.clone(), (0..heads).flat_map(head).collect()))
        }
        () if model == "tiny-glm4-moe-lite" && name.contains("kv_a_proj") => {
            let (rank, rotated) = (size("kv_lora_rank"), size("qk_rope_head_dim"));
            let turning = array.rows(rank, rank + rotated).view(&[2, rotated / 2, columns]);
            let turning = turning.permuted(&[1, 0, 2]).view(&[rotated, columns]);
            one(array.rows(0, rank).followed_by(&turning))
        }
        () if name.contains("linear_attn") => delta(model, config, name, array, &ours),
        () if ["tiny-arcee", "tiny-granitemoe"].contains(&model)
            && (name.contains("q_proj") || name.contains("k_proj")) =>
        {
            let heads =
                size(if name.contains("q_proj") { "num_attention_heads" } else { "num_key_value_heads" });
            let halves = array.view(&[heads, 2, array.0[0] / heads / 2, columns]);
            one(halves.permuted(&[0, 2, 1, 3]).view(&array.0))
        }
        () if (model == "tiny-nemotron" || model.contains("qwen3-"))
            && name.contains("norm")
            && !name.ends_with("bias") =>
        {
            one(Array(array.0.clone(), array.1.iter().map(|value| value + 1.0).collect()))
        }
        () if ours.ends_with("exp_probs_b.bias") => one(array.view(&[array.1.len()])),
        () => one(array.clone()),
    }
}

/// Gated DeltaNet: two key heads, each with two value heads of 16 columns.
fn delta(model: &str, config: &Json, name: &str, array: &Array, ours: &str) -> Vec<(String, Array)> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (groups, width) = (size("linear_num_key_heads"), size("linear_key_head_dim"));
    let each = size("linear_num_value_heads") / groups;
    let keys = 2 * groups * width;
    let columns = *array.0.last().unwrap();
    let one = |array: Array| vec![(ours.to_owned(), array)];
    let tiled = model != "tiny-qwen3-next";
    let in_turns = |array: &Array, width: usize| {
        let row = array.1.len() / array.0[0];
        array.view(&[groups, each, width * row]).permuted(&[1, 0, 2]).view(&array.0)
    };
    match () {
        () if name.contains("qkvz") => {
            let row = 2 * width + 2 * each * width;
            let by_group = array.view(&[groups, row, columns]);
            let part = |from: usize, to: usize| {
                let part = by_group.middle(from, to);
                part.view(&[groups * (to - from), columns])
            };
            let values = 2 * width + each * width;
            let qkv =
                part(0, width).followed_by(&part(width, 2 * width)).followed_by(&part(2 * width, values));
            let of_block = |part: &str| ours.split('.').take(2).chain([part]).collect::<Vec<_>>().join(".");
            vec![(of_block("attn_qkv.weight"), qkv), (of_block("attn_gate.weight"), part(values, row))]
        }
        () if name.contains("A_log") => {
            let rates = Array(array.0.clone(), array.1.iter().map(|value| -value.exp()).collect());
            one(if tiled { in_turns(&rates, 1) } else { rates })
        }
        () if name.contains("conv1d") || tiled && name.contains("in_proj_qkv") => {
            let flat = array.view(&[array.0[0], columns]);
            let values = flat.rows(keys, array.0[0]);
            let values = if tiled { in_turns(&values, width) } else { values };
            one(flat.rows(0, keys).followed_by(&values))
        }
        () if tiled && name.contains("in_proj_z") => one(in_turns(array, width)),
        () if tiled && ["in_proj_a", "in_proj_b", "dt_bias"].iter().any(|part| name.contains(part)) => {
            one(in_turns(array, 1))
        }
        () if tiled && name.contains("out_proj") => {
            let by_head = array.view(&[array.0[0], groups, each, width]);
            one(by_head.permuted(&[0, 2, 1, 3]).view(&array.0))
        }
        () => one(array.clone()),
    }
}

/// The model's folder; of a changed config.json with seeded noise as its weights, unless the change
/// keeps their shapes.
fn folder(model: &str, change: Option<Change>) -> (Option<tempfile::TempDir>, PathBuf) {
    let own = golden("families/models").join(model);
    match change {
        None => (None, own),
        Some(change) if ["tiny-llama4", "tiny-lfm2-moe"].contains(&model) => {
            let dir = changed(model, change);
            let path = dir.path().to_owned();
            (Some(dir), path)
        }
        Some(change) => {
            let dir = noise(&format!("families/models/{model}"), change);
            let path = dir.path().to_owned();
            (Some(dir), path)
        }
    }
}

/// A golden model with a changed config.json.
fn changed(model: &str, change: impl Fn(&mut Json)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy_folder(&golden("families/models").join(model), dir.path());
    let path = dir.path().join("config.json");
    let mut config = read_json(&path);
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    dir
}

#[test]
fn f32_holds_every_arrangement_to_the_bit() {
    for (model, arch, change) in MODELS {
        let (_kept, folder) = folder(model, change);
        let config = read_json(&folder.join("config.json"));
        let (_place, read) = exported(&folder, "f32");
        assert_eq!(read.text("general.architecture"), arch, "{model}");
        let mut left: BTreeMap<&str, ()> =
            read.content.tensor_infos.keys().map(|name| (name.as_str(), ())).collect();
        for (name, array) in together(&folder) {
            for (ours, Array(shape, wanted)) in arranged(model, &config, &name, &array) {
                let info = read.content.tensor_infos.get(&ours).unwrap_or_else(|| panic!("{model}: {ours}"));
                let (actual, stacked) = (info.shape.dims(), shape.iter().product::<usize>());
                let same =
                    actual == shape || actual.len() == 3 && actual.iter().product::<usize>() == stacked;
                assert!(same, "{model}: {ours}: {actual:?}, {shape:?}");
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert!(bits(read.values(&ours)) == bits(wanted), "{model}: {ours}");
                left.remove(ours.as_str());
            }
        }
        let made: Vec<&str> = left.into_keys().collect();
        let divides = ["gemma4", "llama4", "apertus"].iter().any(|with| model.contains(with));
        let wanted: &[&str] = if divides { &["rope_freqs.weight"] } else { &[] };
        assert_eq!(made, wanted, "{model}: tensors that nothing is stored for");
    }
}

/// The keys of mixers (src/models/*.cpp, src/llama-model.cpp).
#[test]
fn mixers_have_their_keys() {
    let number = |model: &str, keys: &[(&str, u32)]| {
        let (_, arch, change) = MODELS.into_iter().find(|(name, ..)| *name == model).unwrap();
        let (_kept, folder) = folder(model, change);
        let (dir, read) = exported(&folder, "bf16");
        for (key, wanted) in keys {
            let value = read.value(&format!("{arch}.{key}"));
            let actual = value.to_u32().ok().or(value.to_bool().ok().map(u32::from));
            let actual = actual.or(value.to_f32().ok().map(|actual| (actual * 1e6).round() as u32)).unwrap();
            assert_eq!(actual, *wanted, "{model}: {key}");
        }
        (dir, read)
    };
    number(
        "tiny-deepseek-v3",
        &[
            ("attention.head_count_kv", 1),
            ("attention.key_length", 40),
            ("attention.value_length", 32),
            ("attention.key_length_mla", 24),
            ("attention.value_length_mla", 12),
            ("attention.q_lora_rank", 24),
            ("attention.kv_lora_rank", 32),
            ("rope.dimension_count", 8),
            ("leading_dense_block_count", 1),
            ("expert_shared_count", 1),
            ("expert_group_count", 4),
            ("expert_group_used_count", 2),
            ("expert_gating_func", 2),
            ("expert_weights_norm", 1),
            ("expert_weights_scale", 2_500_000),
            ("rope.scaling.yarn_log_multiplier", 100_000),
        ],
    );
    let (_place, mistral4) =
        number("tiny-mistral4", &[("expert_gating_func", 1), ("attention.temperature_length", 16)]);
    assert_eq!(mistral4.value("mistral4.attention.temperature_scale").to_f32().unwrap(), 0.1);
    assert!(!mistral4.has("mistral4.rope.scaling.attn_factor"), "llama.cpp assumes equal factors");
    let (_place, qwen35) = number(
        "tiny-qwen3-5",
        &[
            ("ssm.conv_kernel", 4),
            ("ssm.state_size", 16),
            ("ssm.group_count", 2),
            ("ssm.time_step_rank", 4),
            ("ssm.inner_size", 64),
            ("full_attention_interval", 4),
            ("rope.dimension_count", 8),
        ],
    );
    let sections = qwen35.list("qwen35.rope.dimension_sections");
    assert_eq!(sections.iter().map(|pairs| pairs.to_i32().unwrap()).collect::<Vec<_>>(), [2, 1, 1, 0]);
    number("tiny-qwen3-5-moe", &[("full_attention_interval", 2), ("expert_shared_feed_forward_length", 24)]);
    number("tiny-gpt-oss", &[("attention.sliding_window", 8), ("expert_feed_forward_length", 32)]);
    number("tiny-ernie4-5-moe", &[("interleave_moe_layer_step", 1), ("leading_dense_block_count", 1)]);
    number("tiny-minimax-m2", &[("expert_gating_func", 2), ("rope.dimension_count", 8)]);
    number("tiny-gpt-neox", &[("use_parallel_residual", 1), ("attention.layer_norm_epsilon", 10)]);
    number("tiny-stablelm", &[("use_parallel_residual", 0), ("rope.dimension_count", 2)]);
    let (_place, cohere) = number("tiny-cohere2", &[("attention.sliding_window", 8)]);
    assert_eq!(cohere.value("cohere2.logit_scale").to_f32().unwrap(), 0.25);
    let (_place, gemma4) = number(
        "tiny-gemma4",
        &[
            ("attention.key_length", 32),
            ("attention.key_length_swa", 16),
            ("rope.dimension_count", 32),
            ("rope.dimension_count_swa", 16),
            ("attention.shared_kv_layers", 0),
            ("embedding_length_per_layer_input", 0),
        ],
    );
    let heads: Vec<i32> =
        gemma4.list("gemma4.attention.head_count_kv").iter().map(|heads| heads.to_i32().unwrap()).collect();
    assert_eq!(heads, [2, 2, 1]);
    let wanted = [[1.0f32; 4].as_slice(), &[1e30; 12]].concat();
    assert_eq!(gemma4.values("rope_freqs.weight"), wanted, "a quarter of the pairs turns");
    let (_place, lfm2) = number("tiny-lfm2", &[("shortconv.l_cache", 3), ("feed_forward_length", 80)]);
    assert_eq!(numbers(&lfm2, "lfm2.attention.head_count_kv"), [0, 2, 0]);
    let (_place, lfm2) = number(
        "tiny-lfm2-moe",
        &[
            ("shortconv.l_cache", 4),
            ("leading_dense_block_count", 1),
            ("expert_feed_forward_length", 32),
            ("expert_gating_func", 2),
            ("expert_weights_scale", 1_000_000),
        ],
    );
    assert_eq!(numbers(&lfm2, "lfm2moe.attention.head_count_kv"), [0, 2, 0, 2]);
    assert!(!lfm2.has("lfm2moe.interleave_moe_layer_step"));
    let (_place, llama4) = number(
        "tiny-llama4",
        &[
            ("interleave_moe_layer_step", 2),
            ("feed_forward_length", 96),
            ("expert_feed_forward_length", 32),
            ("expert_used_count", 1),
            ("rope.dimension_count", 16),
        ],
    );
    for key in ["sliding_window", "sliding_window_pattern", "scale"] {
        assert!(!llama4.has(&format!("llama4.attention.{key}")), "{key}");
    }
    let (_place, gemma4) = number(
        "tiny-gemma4-e2b",
        &[("attention.shared_kv_layers", 4), ("embedding_length_per_layer_input", 16)],
    );
    assert_eq!(numbers(&gemma4, "gemma4.feed_forward_length"), [32, 32, 32, 64, 64, 64, 64]);
    assert_eq!(numbers(&gemma4, "gemma4.attention.head_count_kv"), [1; 7]);
    // xIELU's numbers of each layer, which have no tensors.
    let (_place, apertus) = number("tiny-apertus", &[("feed_forward_length", 80)]);
    let tensors = stored(&golden("families/models/tiny-apertus"));
    for key in ["alpha_p", "alpha_n", "beta", "eps"] {
        let list = apertus.list(&format!("xielu.{key}"));
        let actual: Vec<f32> = list.iter().map(|value| value.to_f32().unwrap()).collect();
        let wanted = [0, 1].map(|layer| tensors[&format!("model.layers.{layer}.mlp.act_fn.{key}")].1[0]);
        assert_eq!(actual, wanted, "{key}");
    }
    // Latents have an epsilon of their own.
    let dir = tempfile::tempdir().unwrap();
    for (model, has_note) in [("tiny-glm4-moe-lite", true), ("tiny-deepseek-v3", false)] {
        let folder = golden("families/models").join(model);
        let notes = export(&folder, "bf16", &dir.path().join(model)).unwrap().notes;
        assert_eq!(notes.iter().any(|note| note.contains("1e-5 instead of 1e-6")), has_note, "{notes:?}");
    }
    // Hunyuan's base, stretched once: 10000 · 1000^(16 / 14).
    let (_place, read) = exported(&golden("families/models/tiny-hunyuan"), "bf16");
    let base = read.value("hunyuan-dense.rope.freq_base").to_f32().unwrap();
    assert!((f64::from(base) / (1e4 * 1000f64.powf(16.0 / 14.0)) - 1.0).abs() < 1e-6, "{base}");
}

/// The whole numbers of a list.
fn numbers(read: &Read, key: &str) -> Vec<i32> {
    read.list(key).iter().map(|number| number.to_i32().unwrap()).collect()
}

/// Differences from what llama.cpp computes.
#[test]
fn other_mixers_are_refused() {
    let refuses = |model: &str, key: &str, value: Json, fault: &str| {
        let folder = noise(&format!("families/models/{model}"), |config| config[key] = value.clone());
        let dir = tempfile::tempdir().unwrap();
        let refused = export(folder.path(), "f32", &dir.path().join("m.gguf")).expect_err(model);
        let causes = refused.causes().join("; ");
        assert!(causes.contains(fault), "{model} {key}: {causes}");
    };
    refuses("tiny-qwen3-5", "linear_value_head_dim", json!(8), "keys of 16 and values of 8 columns");
    refuses("tiny-deepseek-v3", "num_hidden_layers", json!(27), "takes a model of so many layers");
    let yarn = json!({ "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5 });
    refuses("tiny-deepseek-v3", "rope_scaling", yarn, "`mscale` is 1 and `mscale_all_dim` 0.5");
    refuses("tiny-ernie4-5-moe", "moe_layer_interval", json!(2), "layers without experts");
    refuses("tiny-starcoder2", "use_bias", json!(false), "no biases in the MLP");
    refuses("tiny-falcon-7b", "parallel_attn", json!(false), "mixers one after the other");
    refuses("tiny-arcee", "mlp_bias", json!(true), "biases in the MLP");
    refuses("tiny-arcee", "hidden_act", json!("gelu"), "the activation Gelu");
    refuses("tiny-apertus", "tie_word_embeddings", json!(true), "`tie_word_embeddings` true");
    refuses("tiny-lfm2-moe", "use_expert_bias", json!(false), "no bias in the choice of experts");
    refuses("tiny-llama4", "moe_layers", json!([1]), "layers without experts");
    refuses("tiny-lfm2-moe", "norm_topk_prob", json!(false), "`norm_topk_prob` false");
    refuses("tiny-lfm2-moe", "routed_scaling_factor", json!(1.5), "scores by Sigmoid with a factor of 1.5");
    refuses("tiny-gemma4-e2b", "num_kv_shared_layers", json!(3), "keys and values of layer 2 in layer 4");
    // llama.cpp needs two layers with keys and values of their own.
    let one_own = |config: &mut Json| {
        config["layer_types"] = json!(vec!["full_attention"; 7]);
        config["num_kv_shared_layers"] = json!(6);
    };
    let folder = noise("families/models/tiny-gemma4-e2b", one_own);
    let dir = tempfile::tempdir().unwrap();
    let refused = export(folder.path(), "f32", &dir.path().join("m.gguf")).expect_err("one own layer");
    assert!(
        refused.causes().join("; ").contains("layer 1 without keys and values of its own"),
        "{refused:?}"
    );
    for (key, value, fault) in [
        (
            "attention_chunk_size",
            json!(12),
            "`attention_chunk_size` is 12; llama.cpp's llama4 has blocks of 8192",
        ),
        ("attention_chunk_size", Json::Null, "no layer attends within blocks"),
        ("layer_types", json!(vec!["full_attention"; 4]), "no layer attends within blocks"),
        ("floor_scale", json!(8), "grow by 0.1 at each 8 ("),
        ("attn_temperature_tuning", json!(false), "do not grow"),
        ("no_rope_layers", json!([1, 0, 1, 0]), "its layers without positions are [1, 3]"),
        ("use_qk_norm", json!(false), "`use_qk_norm` false with 4 experts"),
    ] {
        let folder = changed("tiny-llama4", |config| {
            blocks_of_llama4(config);
            if key == "attention_chunk_size" && value.is_null() {
                config["layer_types"] = json!(vec!["full_attention"; 4]);
            }
            config[key] = value.clone();
        });
        let dir = tempfile::tempdir().unwrap();
        let refused = export(folder.path(), "f32", &dir.path().join("m.gguf")).expect_err(key);
        let causes = refused.causes().join("; ");
        assert!(causes.contains(fault), "{key}: {causes}");
    }
    refuses("tiny-cohere", "tie_word_embeddings", json!(false), "`tie_word_embeddings` false");
}

/// Of each layer, A and B of all experts are a tensor each: gate and up of gpt-oss alternate in B.
#[test]
fn an_adapter_on_experts_is_stacked() {
    let adapter = |name: &str| golden("families/train").join(name).join("adapter_final");
    let write = |model: &str, name: &str, dir: &Path| {
        let base = golden("families/models").join(model);
        gguf::write_adapter(&config_of(&base), &adapter(name), "a", "f32".parse().unwrap(), dir)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    write("tiny-gpt-oss", "lora_experts_gpt-oss", &path).unwrap();
    let read = Read::open(&path);
    let shape = |name: &str| read.content.tensor_infos[name].shape.dims().to_vec();
    let [gate, up] = ["gate", "up"].map(|part| format!("blk.0.ffn_{part}_exps.weight"));
    let a = shape(&format!("{gate}.lora_a"));
    assert_eq!((a[0], a[2]), (4, 64), "an A for each of four experts");
    assert_eq!(shape(&format!("{gate}.lora_b")), [4, 32, a[1]]);
    assert!(read.values(&format!("{gate}.lora_a")) == read.values(&format!("{up}.lora_a")));
    let (gates, ups) = (read.values(&format!("{gate}.lora_b")), read.values(&format!("{up}.lora_b")));
    assert!(gates != ups && gates.len() == ups.len());
    // Halves of Llama 4's: gates come first.
    let path = dir.path().join("l.gguf");
    write("tiny-llama4", "lora_experts_llama4", &path).unwrap();
    let read = Read::open(&path);
    let [gate, up, down] = ["gate", "up", "down"].map(|part| format!("blk.1.ffn_{part}_exps.weight"));
    let dims = |name: String| read.content.tensor_infos[&name].shape.dims().to_vec();
    let rank = dims(format!("{gate}.lora_a"))[1];
    for (name, inputs, rows) in [(&gate, 64, 32), (&up, 64, 32), (&down, 32, 64)] {
        assert_eq!(dims(format!("{name}.lora_a")), [4, rank, inputs], "{name}");
        assert_eq!(dims(format!("{name}.lora_b")), [4, rows, rank], "{name}");
    }
    assert!(read.values(&format!("{gate}.lora_a")) == read.values(&format!("{up}.lora_a")));
    assert!(read.values(&format!("{gate}.lora_b")) != read.values(&format!("{up}.lora_b")));
    for (model, name, fault) in [
        ("tiny-deepseek-v3", "lora_deepseek-v3", "which llama.cpp computes without adapters"),
        ("tiny-gemma4-moe", "lora_experts_gemma4-moe", "leaves out the factor of each expert"),
        ("tiny-gemma4-e2b", "lora_gemma4-e2b", "which llama.cpp computes without adapters"),
    ] {
        let refused = write(model, name, &dir.path().join(model)).expect_err(model);
        assert!(refused.causes().join("; ").contains(fault), "{refused:?}");
    }
}
