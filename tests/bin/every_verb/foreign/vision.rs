//! The text part of vision models.

use serde_json::{Value, json};

use super::{edit, json, loss, place, read, rename, succeed, write};

const WEIGHTS: &str = "model/model.safetensors";

#[test]
fn the_text_part_is_the_text_model() {
    let place = place("tiny-gemma3");
    let (expected, _) = loss(&place, "model");
    edit(&place.path("model/config.json"), |config| {
        let text = config.take();
        *config = json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8}
        });
    });
    let original = std::fs::read(place.path(WEIGHTS)).unwrap();
    // Up to 4.51 transformers wrote the first form, later versions the second.
    let names: [fn(&str) -> String; 2] =
        [|name| format!("language_model.{name}"), |name| name.replace("model.", "model.language_model.")];
    for name in names {
        std::fs::write(place.path(WEIGHTS), &original).unwrap();
        rename(&place.path(WEIGHTS), name);
        let mut tensors = read(&place.path(WEIGHTS));
        let norm = tensors.first_entry().unwrap().get().clone();
        tensors.insert("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight".to_owned(), norm.clone());
        tensors.insert("multi_modal_projector.mm_input_projection_weight".to_owned(), norm);
        write(&place.path(WEIGHTS), &tensors);
        let (found, warnings) = loss(&place, "model");
        assert_eq!(found.to_bits(), expected.to_bits(), "{found} {expected}");
        insta::allow_duplicates! {
            insta::assert_snapshot!(warnings, @"warning: the text part of a model for images (`gemma3`) is used and written; its 2 other tensors are not");
        }
    }
    // The result is a text model.
    let set = ["--set", "train.max_steps=1", "--set", "optimizer.learning_rate=1e-3"];
    let train = ["--model", "model", "--dataset", "rows.jsonl"];
    succeed(&place, &[&train[..], &set, &["--output", "full"]].concat());
    succeed(&place, &[&train[..], &set, &["--recipe", "lora", "--output", "adapter"]].concat());
    succeed(&place, &["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"]);
    succeed(&place, &["export", "--model", "model", "--format", "hf", "--output", "plain"]);
    for folder in ["full", "merged", "plain"] {
        let config = json(&place.path(&format!("{folder}/config.json")));
        assert_eq!(config["model_type"], "gemma3_text", "{folder}");
        assert_eq!(config["architectures"], json!(["Gemma3ForCausalLM"]), "{folder}");
        assert_eq!(config.get("vision_config"), None::<&Value>, "{folder}");
        assert_eq!(loss(&place, folder).1, "", "{folder}");
    }
    assert_eq!(loss(&place, "plain").0.to_bits(), expected.to_bits());
}
