//! GGUF files as llama.cpp's converter writes them, where they differ from those of the export:
//! joined experts, the tokenizer of Gemma 4, blocks that predict further tokens, keys and values
//! that no block reads.

use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};
use finetune::export::gguf::{GgufType, describe_base, write_model};
use finetune::model::{ModelConfig, settle};
use finetune::weights::ModelFiles;
use tempfile::TempDir;

use crate::gguf_base::{config, described, golden, is_the_same};
use crate::gguf_contents::Contents;
use crate::logits::floats;
use crate::test_dir::copy_folder;

/// A golden model, and the file that the export writes of it.
struct Exported {
    name: &'static str,
    dir: TempDir,
    folder: PathBuf,
    own: ModelConfig,
    files: ModelFiles,
}

impl Exported {
    fn of(name: &'static str) -> Self {
        Self::with(name, &[])
    }

    /// The model with other settings in config.json, which change no shape.
    fn with(name: &'static str, settings: &[(&str, serde_json::Value)]) -> Self {
        let (dir, folder) = (tempfile::tempdir().unwrap(), golden("families/models").join(name));
        let folder = if settings.is_empty() {
            folder
        } else {
            let copy = dir.path().join("model");
            copy_folder(&folder, &copy);
            let path = copy.join("config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            let mut json: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
            json.extend(settings.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
            std::fs::write(&path, serde_json::Value::Object(json).to_string()).unwrap();
            copy
        };
        let mut files = ModelFiles::open(&folder).unwrap();
        let mut own = config(&folder);
        settle(&mut own, &mut files).unwrap();
        write_model(&own, &files, "tiny", GgufType::F32, &dir.path().join("own.gguf")).unwrap();
        Exported { name, dir, folder, own, files }
    }

    /// Writes the file with changes.
    fn changed(&self, change: impl FnOnce(&mut Contents)) -> PathBuf {
        let mut contents = Contents::of(&self.dir.path().join("own.gguf"));
        change(&mut contents);
        let path = self.dir.path().join("model.gguf");
        contents.write(&path);
        path
    }

    /// Checks that the changed file is the model, and returns the notes on it.
    fn is_in(&self, file: &Path) -> Vec<String> {
        is_the_same(self.name, &self.folder, &self.own, &self.files, file);
        let folder = described(file);
        ModelFiles::open(folder.path()).unwrap().warnings().map(str::to_owned).collect()
    }
}

fn texts(list: impl Iterator<Item = String>) -> Value {
    Value::Array(list.map(Value::String).collect())
}

/// Gates and ups of all experts of a layer in one tensor, and merges instead of scores.
#[test]
fn gemma_4_with_joined_experts_and_merges() {
    let exported = Exported::of("tiny-gemma4-moe");
    let text = std::fs::read(exported.folder.join("tokenizer.json")).unwrap();
    let tokenizer: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let file = exported.changed(|contents| {
        contents.join_experts(0..exported.own.num_layers(), GgmlDType::F32);
        let merge = |merge: &serde_json::Value| {
            let side = |at: usize| merge[at].as_str().unwrap().to_owned();
            format!("{} {}", side(0), side(1))
        };
        let merges = tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge);
        contents.keys.insert("tokenizer.ggml.merges".to_owned(), texts(merges));
        contents.keys.insert("tokenizer.ggml.model".to_owned(), Value::String("gemma4".to_owned()));
        contents.keys.remove("tokenizer.ggml.add_bos_token");
        contents.keys.remove("tokenizer.ggml.pre");
    });
    assert_eq!(exported.is_in(&file), [] as [&str; 0]);
    // Users can change the list of parameters.
    let folder = described(&file);
    let path = folder.path().join("model.gguf.index.json");
    let list = std::fs::read_to_string(&path).unwrap();
    assert!(list.contains("\"half\":1"), "{list}");
    std::fs::write(&path, list.replace("\"half\":1", "\"half\":2")).unwrap();
    let refused = ModelFiles::open(folder.path()).map(|_| ()).expect_err("a third half").to_string();
    assert!(refused.contains("half 2 of it; accepted: 0, 1"), "{refused}");
}

/// The numbers of Llama 4 that no key changes.
fn blocks_of_llama4() -> [(&'static str, serde_json::Value); 3] {
    let length = serde_json::json!(8192);
    let growth = ("attn_scale", serde_json::json!(0.1));
    [("attention_chunk_size", length.clone()), ("floor_scale", length), growth]
}

/// Golden models whose own settings llama.cpp does not have.
#[test]
fn models_of_other_settings_are_themselves_again() {
    let llama4 = blocks_of_llama4();
    // Scout's factors: the divisors are a step.
    let [scout, early] = [8192, 500].map(|original| {
        let rope = serde_json::json!({ "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": original });
        [&llama4[..], &[("rope_parameters", rope)]].concat()
    });
    let lfm2 = [("routed_scaling_factor", serde_json::json!(1.0))];
    // Without a scaling of rotary positions, which its family has by default.
    let plain = serde_json::json!({ "rope_type": "default", "rope_theta": 1e4 });
    let apertus = [("rope_scaling", serde_json::Value::Null), ("rope_parameters", plain)];
    for (name, settings) in [
        ("tiny-llama4", &llama4[..]),
        ("tiny-llama4", &scout),
        ("tiny-llama4", &early),
        ("tiny-lfm2-moe", &lfm2),
        ("tiny-apertus", &apertus),
    ] {
        let exported = Exported::with(name, settings);
        let file = exported.changed(|_| ());
        assert_eq!(exported.is_in(&file), [] as [&str; 0], "{name}");
    }
}

/// The blocks after those of the model are counted with them.
#[test]
fn blocks_that_predict_further_tokens_are_skipped() {
    for (name, arch, further) in
        [("tiny-qwen3-5", "qwen35", 1), ("tiny-glm4-moe", "glm4moe", 1), ("tiny-gemma4", "gemma4", 2)]
    {
        let exported = Exported::of(name);
        let layers = exported.own.num_layers() as u32;
        let matrix = Tensor::ones((4, 32), DType::F32, &Device::Cpu).unwrap();
        let file = exported.changed(|contents| contents.predict_further(arch, layers, further));
        let wanted =
            format!("finetune skips {} tensors of blocks that predict further tokens (`nextn`)", 2 * further);
        assert_eq!(exported.is_in(&file), [wanted.as_str()], "{name}");
        // Without the key they are no part of the model.
        let file = exported.changed(|contents| {
            contents.add(&format!("blk.{layers}.attn_q.weight"), &matrix, GgmlDType::F32)
        });
        let refused = describe_base(&file, &exported.dir.path().join("described")).unwrap_err();
        assert!(refused.to_string().contains(&format!("blk.{layers}.attn_q.weight")), "{refused}");
        let file = exported.changed(|contents| {
            contents.keys.insert(format!("{arch}.nextn_predict_layers"), Value::U32(layers));
        });
        let refused = describe_base(&file, &exported.dir.path().join("described")).unwrap_err();
        assert!(refused.to_string().contains(&format!("accepted: more than `{arch}.nextn_predict_layers`")));
    }
}

/// The converter also writes keys and values of blocks that read those of others.
#[test]
fn keys_that_no_block_reads_are_skipped() {
    let exported = Exported::of("tiny-gemma4-e2b");
    let matrix = Tensor::ones((16, 48), DType::F32, &Device::Cpu).unwrap();
    let file = exported.changed(|contents| {
        for part in ["attn_k", "attn_v", "attn_k_norm"] {
            contents.add(&format!("blk.3.{part}.weight"), &matrix, GgmlDType::F32);
        }
    });
    let note = "finetune skips 3 tensors of keys and values that no block reads";
    assert_eq!(exported.is_in(&file), [note]);
    let file = exported.changed(|contents| contents.add("blk.2.attn_k.bias", &matrix, GgmlDType::F32));
    let refused = describe_base(&file, &exported.dir.path().join("described")).unwrap_err();
    assert!(refused.to_string().contains("`blk.2.attn_k.bias` is no part"), "{refused}");
}

/// llama.cpp reads one number under a key for all layers.
#[test]
fn one_number_counts_for_all_layers() {
    let apertus = Exported::of("tiny-apertus");
    let layers = apertus.own.num_layers();
    let [one, all] = [Value::F32(0.25), Value::Array(vec![Value::F32(0.25); layers])].map(|value| {
        let file = apertus.changed(|contents| {
            contents.keys.insert("xielu.alpha_p".to_owned(), value.clone());
        });
        let folder = described(&file);
        let files = ModelFiles::open(folder.path()).unwrap();
        let names = files.names().map(str::to_owned).collect::<Vec<_>>();
        names.into_iter().map(|name| (floats(&files, &name), name)).collect::<Vec<_>>()
    });
    assert_eq!(one, all);
    let alphas = one.iter().filter(|(values, name)| name.ends_with("alpha_p") && values == &[0.25]);
    assert!(layers > 1 && alphas.count() == layers);
}

/// Keys whose values would be another model.
#[test]
fn keys_that_do_not_fit_the_tensors_are_refused() {
    let e2b = Exported::of("tiny-gemma4-e2b");
    let [lfm2, apertus, mixtral] = ["tiny-lfm2", "tiny-apertus", "tiny-mixtral"].map(Exported::of);
    let llama4 = Exported::with("tiny-llama4", &blocks_of_llama4());
    let halves = |count: usize| Value::Array(vec![Value::F32(0.5); count]);
    let numbers = |values: &[i32]| Value::Array(values.iter().map(|value| Value::I32(*value)).collect());
    for (exported, key, value, fault) in [
        (&e2b, "gemma4.feed_forward_length", numbers(&[32, 32, 32, 64, 64, 64, 32]), "feed_forward_length"),
        (&e2b, "gemma4.attention.shared_kv_layers", Value::U32(3), "layer 2 in layer 4"),
        (&e2b, "gemma4.embedding_length_per_layer_input", Value::U32(8), "per_layer"),
        (&lfm2, "lfm2.attention.head_count_kv", numbers(&[0, 2, 2]), "blk.2.attn_q.weight"),
        (&lfm2, "lfm2.attention.head_count_kv", numbers(&[0, 2]), "a number for each layer"),
        (&lfm2, "lfm2.shortconv.l_cache", Value::U32(4), "shortconv.conv"),
        (&lfm2, "lfm2.attention.sliding_window", Value::U32(32), "`lfm2.attention.sliding_window` is 32"),
        (
            &apertus,
            "xielu.beta",
            halves(1),
            "`xielu.beta` is [0.5]; accepted: a number, or a list with one for each",
        ),
        (&apertus, "xielu.beta", halves(9), "`xielu.beta` is [0.5, 0.5"),
        (&apertus, "xielu.beta", Value::U32(1), "`xielu.beta` is 1; accepted"),
        (&llama4, "llama4.expert_gating_func", Value::U32(1), "accepted: 2, a sigmoid"),
        (&mixtral, "llama.expert_gating_func", Value::U32(2), "accepted: 1, a softmax"),
        (&mixtral, "llama.feed_forward_length", numbers(&[96; 9]), "has 9 entries; accepted: one for each"),
    ] {
        let file = exported.changed(|contents| {
            contents.keys.insert(key.to_owned(), value.clone());
        });
        let dir = exported.dir.path().join("described");
        let refused = describe_base(&file, &dir).and_then(|()| ModelFiles::open(&dir).map(|_| ()));
        let refused = refused.expect_err(key);
        let causes = refused.causes().join("; ");
        assert!(causes.contains(fault), "{key}: {causes}");
    }
}
