//! Image-text models: their text part, and the parts that written models keep.

use serde_json::json;

use super::{TEXT, edit, json, loss, read, rename, succeed, test_dir, write};
use crate::test_dir::{TestDir, copy_folder, golden};

const WEIGHTS: &str = "model/model.safetensors";

#[test]
fn the_text_part_is_the_text_model() {
    let dir = test_dir("tiny-gemma3");
    let (expected, _) = loss(&dir, "model");
    edit(&dir.path("model/config.json"), |config| {
        let text = config.take();
        *config = json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8}
        });
    });
    let original = std::fs::read(dir.path(WEIGHTS)).unwrap();
    // Up to 4.51 transformers wrote the first form, later versions the second.
    let names: [fn(&str) -> String; 2] =
        [|name| format!("language_model.{name}"), |name| name.replace("model.", "model.language_model.")];
    for name in names {
        std::fs::write(dir.path(WEIGHTS), &original).unwrap();
        rename(&dir.path(WEIGHTS), name);
        let mut tensors = read(&dir.path(WEIGHTS));
        let norm = tensors.first_entry().unwrap().get().clone();
        tensors.insert("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight".to_owned(), norm.clone());
        tensors.insert("multi_modal_projector.mm_input_projection_weight".to_owned(), norm);
        write(&dir.path(WEIGHTS), &tensors);
        let (actual, warnings) = loss(&dir, "model");
        assert_eq!(actual.to_bits(), expected.to_bits(), "{actual} {expected}");
        insta::allow_duplicates! {
            insta::assert_snapshot!(warnings, @"warning: the text part of an image-text model (`gemma3`) is used; written models keep its other tensors as they are: 2 tensors (140 KiB: multi_modal_projector, vision_tower)");
        }
    }
    // Written models are the whole model.
    let base = read(&dir.path(WEIGHTS));
    let set = ["--set", "train.max_steps=1", "--set", "optimizer.learning_rate=1e-3"];
    let train = ["--model", "model", "--dataset", "rows.jsonl"];
    succeed(&dir, &[&train[..], &set, &["--output", "full"]].concat());
    succeed(&dir, &["export", "--model", "model", "--format", "hf", "--output", "plain"]);
    for folder in ["full", "plain"] {
        assert_keeps(&dir, "model", folder);
    }
    assert_eq!(read(&dir.path("plain/model.safetensors")), base);
    assert_eq!(loss(&dir, "plain").0.to_bits(), expected.to_bits());
}

/// Mistral Small 4 is stored like Mistral Small 3, around another text model.
#[test]
fn mistral_small_4_is_a_text_part_too() {
    let dir = test_dir("tiny-mistral4");
    let (expected, _) = loss(&dir, "model");
    edit(&dir.path("model/config.json"), |config| {
        let text = config.take();
        *config = json!({
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"],
            "vision_config": {"model_type": "pixtral", "hidden_size": 8}
        });
    });
    rename(&dir.path(WEIGHTS), |name| format!("language_model.{name}"));
    let (actual, warnings) = loss(&dir, "model");
    assert_eq!(actual.to_bits(), expected.to_bits(), "{actual} {expected}");
    assert!(warnings.contains("`mistral3`"), "{warnings}");
}

/// Gemma 4 E2B has an audio tower, and its files have keys and values for the blocks that read
/// those of another block too.
#[test]
fn gemma4_e2b_is_a_text_part_beside_audio() {
    let dir = test_dir("tiny-gemma4-e2b");
    let (expected, _) = loss(&dir, "model");
    edit(&dir.path("model/config.json"), |config| {
        let text = config.take();
        *config = json!({
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text,
            "tie_word_embeddings": true, "audio_config": {"model_type": "gemma4_audio"},
            "vision_config": {"model_type": "gemma4_vision", "hidden_size": 8}
        });
    });
    rename(&dir.path(WEIGHTS), |name| name.replace("model.", "model.language_model."));
    let mut tensors = read(&dir.path(WEIGHTS));
    for part in ["k_proj", "v_proj", "k_norm"] {
        let name = |layer: usize| format!("model.language_model.layers.{layer}.self_attn.{part}.weight");
        let Some(owner) = tensors.get(&name(1)).cloned() else { panic!("no {part}") };
        for reader in [3, 5] {
            tensors.insert(name(reader), owner.clone());
        }
    }
    let norm = tensors["model.language_model.norm.weight"].clone();
    for other in ["audio_tower.layers.0.norm_out", "embed_audio.embedding_projection"] {
        tensors.insert(format!("model.{other}.weight"), norm.clone());
    }
    write(&dir.path(WEIGHTS), &tensors);
    let (actual, warnings) = loss(&dir, "model");
    assert_eq!(actual.to_bits(), expected.to_bits(), "{actual} {expected}");
    for said in [
        "6 tensors of keys and values of blocks that read those of another block are not used",
        "audio_tower",
    ] {
        assert!(warnings.contains(said), "{warnings}");
    }
    let set = ["--set", "train.max_steps=2", "--set", "optimizer.learning_rate=1e-2"];
    let train = [&["--model", "model", "--dataset", "rows.jsonl"][..], &set].concat();
    succeed(&dir, &[&train[..], &["--output", "full"]].concat());
    succeed(&dir, &[&train[..], &["--recipe", "lora", "--output", "adapter"]].concat());
    succeed(&dir, &["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"]);
    for folder in ["full", "merged"] {
        assert!(assert_keeps(&dir, "model", folder) > 50, "{folder}");
        let written = read(&dir.path(&format!("{folder}/model.safetensors")));
        for (name, tensor) in &tensors {
            let is_reader = [".layers.3.", ".layers.5."].iter().any(|layer| name.contains(layer));
            if is_reader && [".k_proj.", ".v_proj.", ".k_norm."].iter().any(|part| name.contains(part)) {
                assert_eq!(&written[name], tensor, "{folder} {name}");
            }
        }
        assert!(loss(&dir, folder).0 < actual - 0.01, "{folder}");
    }
}

/// Asserts that `folder` has the config.json and the tensors of `model`, and those that are not of
/// the text model byte for byte. Returns the number of changed tensors.
fn assert_keeps(dir: &TestDir, model: &str, folder: &str) -> usize {
    let [before, after] = [model, folder].map(|at| json(&dir.path(&format!("{at}/config.json"))));
    assert_eq!(after, before, "{folder}");
    let [base, written] = [model, folder].map(|at| read(&dir.path(&format!("{at}/model.safetensors"))));
    assert_eq!(written.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>(), "{folder}");
    let changed: Vec<&String> = base.keys().filter(|name| base[*name] != written[*name]).collect();
    let is_text = |name: &&&String| name.contains("language_model");
    assert_eq!(changed.iter().filter(|name| !is_text(name)).count(), 0, "{folder}: {changed:?}");
    changed.len()
}

/// The losses of the models in transformers' `AutoModelForImageTextToText` are given; it opens
/// each written model with all of its tensors.
#[test]
fn all_other_parts_stay_byte_for_byte() {
    for (model, expected, message) in [
        (
            "tiny-gemma3-mm",
            10.130_291_9,
            "kept as they are: 39 tensors (50.6 KiB: multi_modal_projector, vision_tower)",
        ),
        (
            "tiny-gemma4-mm",
            7.790_512_9,
            "kept as they are: 16 tensors (31.3 KiB: model.embed_vision, model.vision_tower)",
        ),
        (
            "tiny-llama4-mm",
            6.031_092_2,
            "kept as they are: 26 tensors (31.5 KiB: multi_modal_projector, vision_model)",
        ),
        ("tiny-qwen3-5-mm", 7.333_655_4, "kept as they are: 21 tensors (22.2 KiB: model.visual)"),
    ] {
        let dir = TestDir::new();
        copy_folder(&golden(&format!("wrappers/{model}")), &dir.path("model"));
        dir.write("rows.jsonl", TEXT);
        dir.write("model/preprocessor_config.json", "{}");
        let actual = loss(&dir, "model").0;
        assert!((actual - expected).abs() < 2e-5, "{model}: {actual}, expected {expected}");
        let set = ["--set", "train.max_steps=2", "--set", "optimizer.learning_rate=1e-2"];
        let train = [&["--model", "model", "--dataset", "rows.jsonl"][..], &set].concat();
        succeed(&dir, &[&train[..], &["--output", "full"]].concat());
        succeed(&dir, &[&train[..], &["--recipe", "lora", "--output", "adapter"]].concat());
        let merge = ["merge", "--model", "model", "--adapter", "adapter", "--output"];
        let said = succeed(&dir, &[&merge[..], &["merged"]].concat());
        assert!(format!("{said:?}").contains(message), "{said:?}");
        for folder in ["full", "merged"] {
            assert!(assert_keeps(&dir, "model", folder) > 7, "{model} {folder}");
            assert_eq!(
                std::fs::read(dir.path(&format!("{folder}/preprocessor_config.json"))).unwrap(),
                b"{}"
            );
            assert!(loss(&dir, folder).0 < actual - 0.01, "{model} {folder}");
        }
        // PEFT names the modules so if it trained the class of the whole model.
        let adapter = dir.path("adapter/adapter_model.safetensors");
        rename(&adapter, |name| name.replace(".model.layers.", ".model.language_model.layers."));
        succeed(&dir, &[&merge[..], &["again"]].concat());
        let [merged, again] =
            ["merged", "again"].map(|at| read(&dir.path(&format!("{at}/model.safetensors"))));
        assert_eq!(merged, again, "{model}");
        // A checkpoint has the parameters alone.
        succeed(&dir, &[&train[..], &["--set", "checkpoint.save_steps=1", "--output", "saved"]].concat());
        let saved = json(&dir.path("saved/checkpoint-1/config.json"));
        assert!(saved["model_type"].as_str().unwrap().ends_with("_text"), "{saved}");
        std::fs::remove_dir_all(dir.path("saved/checkpoint-2")).unwrap();
        let resumed = ["--resume", "--output", "saved"];
        succeed(&dir, &[&train[..], &["--set", "checkpoint.save_steps=1"], &resumed].concat());
        let [full, saved] = ["full", "saved"].map(|at| read(&dir.path(&format!("{at}/model.safetensors"))));
        assert_eq!(full, saved, "{model}");
    }
}
