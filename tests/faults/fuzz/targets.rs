//! The fuzz targets: one test for each parser.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use assert_cmd::cargo::cargo_bin;
use finetune::adapter::SavedAdapter;
use finetune::checkpoint::SavedCheckpoint;
use finetune::collective::launch::nodelist;
use finetune::data::template::TemplateInputs;
use finetune::data::{ChatTemplate, Split, Tokenizer, sandbox, source};
use finetune::export::gguf;
use finetune::model::ModelConfig;
use finetune::recipe::{BUILT_IN, Recipe, RecipeLayers, RecipeText};
use finetune::rendezvous::{JoinRequest, Listener, Master, Peer, RendezvousOptions, Secret, Session};
use finetune::weights::ModelFiles;
use serde_json::json;
use tempfile::TempDir;

use super::{Target, seeds};

/// Parses the file `name` in a new folder with a reader of that folder or file.
pub(crate) fn on_file(
    name: &str,
    seeds: Vec<Vec<u8>>,
    tries: u64,
    beside: &[(&str, Vec<u8>)],
    read: impl Fn(&Path),
) {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in beside {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let path = folder.path().join(name);
    let parse = |bytes: &[u8]| {
        // Written as a new file, so that a mapped file is never truncated.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).unwrap();
        read(&path);
    };
    Target { name: &name.replace('.', "-"), seeds, tries, parse: &parse }.run();
}

pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap()
}

#[test]
fn safetensors_headers() {
    on_file("model.safetensors", vec![seeds::safetensors()], 3000, &[], |path| {
        if let Ok(files) = ModelFiles::open_file(path) {
            for (name, info) in files.tensors() {
                let mut values = vec![0.0; info.elements()];
                let _ = files.read_f32(name, &mut values);
            }
        }
    });
}

/// Checkpoints in packed formats: codes, companions, and their labels.
#[test]
fn packed_weights() {
    for model in ["tiny-gptq-4-g32-act", "tiny-awq-4-g32", "tiny-ct-int4-g32-asym", "tiny-fp8-block"] {
        let file = |name: &str| std::fs::read(seeds::golden("qbases/models").join(model).join(name)).unwrap();
        let config = [("config.json", file("config.json"))];
        on_file(
            "model.safetensors",
            vec![seeds::of_one_layer(&file("model.safetensors"))],
            400,
            &config,
            |path| {
                let Ok(files) = ModelFiles::open(folder_of(path)) else { return };
                for (name, info) in files.tensors() {
                    // A header may claim rows without bytes.
                    let mut values = vec![0.0; info.elements().min(1 << 20)];
                    let _ = files.read_part(name, 0, &mut values);
                }
            },
        );
    }
}

/// GGUF files: the container, the metadata of model and tokenizer, blocks.
#[test]
fn gguf_models() {
    let seeds = ["tiny-gguf-q4_0", "tiny-gguf-q8_0"]
        .map(|model| std::fs::read(seeds::golden("qbases/models").join(model).join("model.gguf")).unwrap());
    on_file("model.gguf", seeds.into(), 100, &[], read_gguf);
}

/// Headers of latent attention, Gated DeltaNet, sinks, convolutions, shared keys, lists of numbers,
/// and experts in some layers. The bytes of tensors are zeros.
#[test]
fn gguf_headers() {
    on_file("header.gguf", seeds::gguf_headers(), 600, &[], |path| {
        let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
        file.write_all(&vec![0; seeds::GGUF_TENSORS]).unwrap();
        drop(file);
        read_gguf(path);
    });
}

/// Describes a GGUF file as a base and reads all of its weights.
fn read_gguf(path: &Path) {
    let folder = folder_of(path).join("described");
    if gguf::describe_base(path, &folder).is_err() {
        return;
    }
    let Ok(files) = ModelFiles::open(&folder) else { return };
    for (name, info) in files.tensors() {
        let mut values = vec![0.0; info.elements()];
        let _ = files.read_f32(name, &mut values);
    }
}

/// Settings of packed formats.
#[test]
fn settings_of_packed_weights() {
    let configs = seeds::of_folders("qbases/models", "config.json");
    let weights = [("model.safetensors", seeds::safetensors())];
    on_file("config.json", configs, 500, &weights, |path| {
        drop(ModelFiles::open(folder_of(path)));
    });
}

#[test]
fn indexes() {
    let index = json!({
        "metadata": {"total_size": 64},
        "weight_map": {
            "model.embed_tokens.weight": "model-00001-of-00001.safetensors",
            "model.norm.weight": "model-00001-of-00001.safetensors",
        },
    });
    let shard = [("model-00001-of-00001.safetensors", seeds::safetensors())];
    on_file("model.safetensors.index.json", vec![index.to_string().into_bytes()], 1000, &shard, |path| {
        drop(ModelFiles::open(folder_of(path)));
    });
}

#[test]
fn manifests() {
    let file = seeds::safetensors();
    let digest = blake3::hash(&file).to_hex().to_string();
    let manifest = json!({
        "schema": 1,
        "files": {"optimizer.safetensors": {"bytes": file.len(), "blake3": digest}},
    });
    let beside = [("optimizer.safetensors", file)];
    on_file("manifest.json", vec![manifest.to_string().into_bytes()], 1000, &beside, |path| {
        drop(SavedCheckpoint::open(folder_of(path)));
    });
}

#[test]
fn model_configs() {
    let parse = |bytes: &[u8]| drop(ModelConfig::from_json(&String::from_utf8_lossy(bytes), "config.json"));
    Target { name: "config-json", seeds: seeds::of_models("config.json"), tries: 500, parse: &parse }.run();
}

#[test]
fn adapter_configs() {
    let golden = |name: &str| std::fs::read(seeds::golden("train/lora/adapter_final").join(name)).unwrap();
    let weights = [("adapter_model.safetensors", golden("adapter_model.safetensors"))];
    on_file("adapter_config.json", vec![golden("adapter_config.json")], 500, &weights, |path| {
        drop(SavedAdapter::read(folder_of(path)));
    });
}

#[test]
fn tokenizers() {
    let text = "Hello, world! 12345\n\tÄpfel 你好 😀 <s> </s> aaaaaaaaaaaaaaaaaaaaaa";
    let beside = [
        ("tokenizer_config.json", br#"{"bos_token": "<s>"}"#.to_vec()),
        ("config.json", br#"{"eos_token_id": [1, 2]}"#.to_vec()),
    ];
    on_file("tokenizer.json", seeds::of_models("tokenizer.json"), 150, &beside, |path| {
        let Ok(tokenizer) = Tokenizer::load(folder_of(path)) else { return };
        for special in [true, false] {
            if let Ok(encoded) = tokenizer.encode_with_offsets(text, special) {
                let _ = tokenizer.decode(&encoded.ids, special);
                let mut stream = tokenizer.stream(special);
                encoded.ids.iter().for_each(|id| drop(stream.push(*id)));
            }
        }
        let _ = tokenizer.clone().add_tokens(&["<new>".to_owned(), "a".to_owned()]);
    });
}

#[test]
fn vocabularies() {
    for (name, folders) in [
        ("tokenizer.model", &["llama2", "mistral", "gemma", "unigram", "llama3"][..]),
        ("tekken.json", &["tekken"]),
        ("qwen.tiktoken", &["qwen"]),
    ] {
        let file =
            |folder: &&str| std::fs::read(seeds::golden("vocabularies").join(folder).join(name)).unwrap();
        for config in [&br#"{"model_type": "llama"}"#[..], br#"{"model_type": "mistral"}"#] {
            let class = br#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}"#;
            let beside = [("config.json", config.to_vec()), ("tokenizer_config.json", class.to_vec())];
            on_file(name, folders.iter().map(file).collect(), 150, &beside, |path| {
                let Ok(tokenizer) = Tokenizer::load(folder_of(path)) else { return };
                if let Ok(ids) = tokenizer.encode("Hello  12345\n\tÄpfel 你好 <s> </s>▁", true) {
                    let _ = tokenizer.decode(&ids, false);
                }
            });
        }
    }
}

#[test]
fn chat_templates() {
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let messages = [
        json!({"role": "user", "content": "hi there"}),
        json!({"role": "assistant", "content": "ho", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.5}}}]}),
    ];
    let parse = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let Ok(template) = ChatTemplate::from_text(&text, &[("bos_token", "<s>"), ("eos_token", "</s>")])
        else {
            return;
        };
        for add_generation_prompt in [false, true] {
            let _ = template
                .render(&messages, &TemplateInputs { add_generation_prompt, ..TemplateInputs::default() });
        }
    };
    Target { name: "chat-template", seeds: seeds::templates(), tries: 60, parse: &parse }.run();
}

#[test]
fn data_files() {
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let read = |path: &Path| drop(source::read(path, Split::Train));
    on_file("rows.jsonl", seeds::rows(), 500, &[], read);
    let arrays: Vec<Vec<u8>> = seeds::rows()
        .iter()
        .map(|rows| {
            let text = String::from_utf8_lossy(rows).replace('\n', ",\n");
            format!("{{\"version\": 1, \"data\": [{text}]}}").into_bytes()
        })
        .collect();
    on_file("rows.json", arrays, 500, &[], read);
    let table = b"prompt,completion\n\"a, b\",\"say \"\"c\"\"\"\nd,e\n\"f\ng\",h\n".to_vec();
    on_file("rows.csv", vec![table], 100, &[], read);
    on_file("rows.parquet", seeds::parquet(), 60, &[], read);
}

#[test]
fn data_files_of_other_containers() {
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let read = |path: &Path| drop(source::read(path, Split::Train));
    on_file("rows.arrow", seeds::arrow(), 100, &[], read);
    on_file("rows.ndjson", seeds::wide_rows(), 200, &[], read);
    let packed = seeds::rows().iter().flat_map(|rows| seeds::packed(rows)).collect();
    on_file("rows.jsonl.gz", packed, 300, &[], read);
    // Objects over several lines, concatenated, in arrays, with Python-only literals.
    let sequences = seeds::rows().into_iter().flat_map(|rows| {
        let text = String::from_utf8_lossy(&rows).into_owned();
        let spread = text.replace('{', "{\n").replace('}', "\n}");
        let python = text.replacen("\": \"", "\": NaN, \"x\": -Infinity, \"y\": \"\\ud83d", 1);
        [
            spread,
            text.replace('\n', ""),
            text.replace('\n', "\r"),
            format!("[{}]", text.replace('\n', "][")),
            python,
        ]
    });
    on_file("sequence.jsonl", sequences.map(String::into_bytes).collect(), 500, &[], read);
    let semicolons = b"sep=;\r\nprompt;completion\r\n\"a; b\";\"say \"\"c\"\"\"\r\nd;e\r\n".to_vec();
    on_file("semicolons.csv", vec![semicolons], 100, &[], read);
    let state = br#"{"_data_files": [{"filename": "data.arrow"}], "_split": null}"#.to_vec();
    let beside = [("data.arrow", seeds::arrow().swap_remove(1))];
    on_file("state.json", vec![state], 60, &beside, |path| drop(source::read(folder_of(path), Split::Train)));
}

#[test]
fn nodelists() {
    let lists = ["node[1-4,7,09-12],login", "a1b[001-003]c[2,4-5]", "n1", "gpu-[1-2]-[3-4]", "2(x3),1,4(x2)"];
    let parse = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        drop(nodelist::expand(&text));
        drop(nodelist::tasks_per_node(&text));
    };
    let seeds = lists.iter().map(|list| list.as_bytes().to_vec()).collect();
    Target { name: "nodelist", seeds, tries: 3000, parse: &parse }.run();
}

#[test]
fn recipes() {
    let recipes = BUILT_IN.iter().map(|recipe| recipe.text.as_bytes().to_vec()).collect();
    on_file("recipe.toml", recipes, 400, &[], |path| {
        let Ok(recipe) = RecipeText::find("recipe.toml", folder_of(path)) else { return };
        let layers = RecipeLayers {
            recipe: Some(recipe),
            model: Some("model".to_owned()),
            train: vec!["rows.jsonl".to_owned()],
            folder: folder_of(path).to_owned(),
            ..RecipeLayers::default()
        };
        drop(Recipe::load(&layers));
    });
}

#[test]
fn rendezvous_frames() {
    let wait = Duration::from_secs(60);
    let master = Some(Master { address: "127.0.0.1".to_owned(), port: 0, ports: 1 });
    let options = RendezvousOptions {
        run: "fuzz".to_owned(),
        join_timeout: wait,
        rejection_timeout: Duration::from_secs(1),
        call_timeout: wait,
        ..RendezvousOptions::new(master, Secret::shared(b"a secret that nobody guesses").unwrap())
    };
    let listener = Listener::open(&options).unwrap();
    let port = listener.address().port();
    let request = |rank: usize| JoinRequest {
        peer: Peer { rank, ranks_here: 1, host: format!("host-{rank}"), free_bytes: None },
        world_size: 2,
        digests: BTreeMap::from([("plan".to_owned(), "12".to_owned())]),
    };
    let longer = RendezvousOptions { join_timeout: wait * 1000, ..options.clone() };
    let host = {
        let options = longer.clone();
        let request = request(0);
        std::thread::spawn(move || Session::join_at(listener, request, &options))
    };
    let parse = |bytes: &[u8]| {
        // A refused peer is disconnected while it still writes.
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return };
        let _ = stream.write_all(bytes);
    };
    let frame = |body: &[u8]| [&(body.len() as u16).to_be_bytes()[..], body].concat();
    let seeds = vec![
        frame(&[0; 48]),
        frame(br#"{"join": {"rank": 1}}"#),
        [frame(&[7; 32]), frame(&[9; 64])].concat(),
    ];
    Target { name: "rendezvous", seeds, tries: 100, parse: &parse }.run();
    // After all that, a peer with the secret still joins.
    let master = Some(Master { address: "127.0.0.1".to_owned(), port, ports: 1 });
    let guest = Session::join(request(1), &RendezvousOptions { master, ..longer }).unwrap();
    let host = host.join().unwrap().unwrap();
    assert_eq!(host.peers().len(), 2);
    drop((guest, host));
}
