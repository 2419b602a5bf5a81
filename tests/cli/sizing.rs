//! `finetune plan`: memory, time and cost on hardware that is not here, of models of which there is a config.json alone.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::place::Place;
#[cfg(target_os = "linux")]
use crate::planning::{peak, write_headers};

/// Llama shapes: name, hidden size, MLP, layers, heads, key-value heads, vocabulary, tied.
pub(crate) const SHAPES: [(&str, [u64; 6], bool); 7] = [
    ("0.5B", [896, 4864, 24, 14, 2, 151_936], true),
    ("1B", [2048, 8192, 16, 32, 8, 128_256], true),
    ("3B", [3072, 8192, 28, 24, 8, 128_256], true),
    ("7B", [4096, 11008, 32, 32, 32, 32_000], false),
    ("8B", [4096, 14336, 32, 32, 8, 128_256], false),
    ("13B", [5120, 13824, 40, 40, 40, 32_000], false),
    ("70B", [8192, 28672, 80, 64, 8, 128_256], false),
];

/// A folder for each shape, with its config.json.
pub(crate) fn shapes() -> Place {
    let place = Place::new();
    for (name, [hidden, mlp, layers, heads, kv, vocabulary], tied) in SHAPES {
        std::fs::create_dir(place.path(name)).unwrap();
        let config = json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
            "tie_word_embeddings": tied, "max_position_embeddings": 131_072,
        });
        place.write(&format!("{name}/config.json"), &config.to_string());
    }
    place
}

pub(crate) fn plan(place: &Place, model: &str, more: &[&str]) -> Value {
    let args = [&["plan", "--quiet", "--json", "--model", model], more].concat();
    let output = place.command(&args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", place.told(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn gigabytes(value: &Value) -> f64 {
    value.as_f64().unwrap() / 1e9
}

/// What one command says of thirty pairs of model and machine: the first way that fits, over which strategy, how large a
/// rank is and how fast all of them are.
#[test]
fn thirty_cases_are_decided_as_before() {
    let (place, mut found) = (shapes(), String::new());
    let machines = ["4090", "mac-64GB", "8xA100-40GB", "8xH100-80GB", "4xA100-40GB*16"];
    for (model, machine) in
        SHAPES.iter().filter(|(name, ..)| *name != "13B").flat_map(|(name, ..)| machines.map(|m| (name, m)))
    {
        let said = plan(&place, model, &["--on", machine]);
        let leaves = said["leaves"].as_array().unwrap();
        let line = match leaves.iter().find(|leaf| leaf["first"] == true) {
            None => "nothing fits".to_owned(),
            Some(first) => format!(
                "{}, {}, {:.1} GB, {:.0} tokens/s",
                first["what"].as_str().unwrap(),
                first["strategy"].as_str().unwrap(),
                gigabytes(&first["bytes"]),
                first["tokens_per_sec"].as_f64().unwrap()
            ),
        };
        writeln!(found, "{model} on {machine}: {line}").unwrap();
    }
    assert_eq!(found.lines().count(), 30);
    assert_eq!(found, include_str!("sizing_cases.txt"), "the new ones:\n{found}");
}

#[test]
fn memory_is_the_sum_of_its_causes_and_of_their_parts() {
    let place = shapes();
    let said = plan(&place, "7B", &["--on", "8xH100-80GB", "--set", "parallel.strategy=fsdp"]);
    let causes = said["memory"].as_array().unwrap();
    let on_device = |cause: &&Value| !["host memory", "file"].contains(&cause["cause"].as_str().unwrap());
    let sum: u64 = causes.iter().filter(on_device).map(|cause| cause["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, said["bytes"].as_u64().unwrap());
    let parameters = said["parameters"].as_u64().unwrap();
    assert_eq!(parameters, 6_738_415_616);
    let of = |name: &str| causes.iter().find(|cause| cause["cause"] == name).unwrap();
    // bf16 weights and f32 masters, f32 gradients, two f32 moments, each over eight ranks.
    assert_eq!(of("weights")["bytes"], 6 * parameters / 8);
    assert_eq!(of("gradients")["bytes"], 4 * parameters / 8);
    assert_eq!(of("optimizer")["bytes"], 8 * parameters / 8);
    assert_eq!(of("optimizer")["formula"], "f32 moments: 8 B x 6.74B / 8");
    assert_eq!(said["bytes_per_parameter"], 18.0);
    // What people quote for 7B, of the parameters that it has, over eight.
    let rule = &said["conventions"][0];
    assert_eq!(
        (rule["bytes_per_parameter"].as_u64(), rule["bytes"].as_u64()),
        (Some(12), Some(12 * parameters / 8))
    );
}

/// QLoRA of 70B in 4-bit blocks with 8-bit scales.
#[test]
fn a_70b_base_in_4_bits_is_35_gigabytes() {
    let place = shapes();
    let more = ["--on", "A100-80GB", "--recipe", "qlora", "--set", "train.recompute=block"];
    let said = plan(&place, "70B", &more);
    let weights = said["memory"][0]["bytes"].as_u64().unwrap() as f64 / 1e9;
    // 68.45 billion weights of blocks at 4.127 bits; embedding and head of 2.1 billion values in bf16, and adapters.
    assert!((35.3 + 4.2..35.3 + 4.2 + 2.5).contains(&weights), "{weights}");
    assert!(
        said["memory"][0]["formula"]
            .as_str()
            .unwrap()
            .contains("nf4 in blocks of 64, its scales in 8 bits: 0.516 B")
    );
}

/// What the headers of 723 tensors of 282 GB take beside the program, whose pages are some 25 MB of this in the build of the tests: a
/// release build holds 16 MB in all (`benchmarks/plan_startup.py`).
#[test]
#[cfg(target_os = "linux")]
fn a_70b_folder_is_planned_in_little_memory() {
    let place = shapes();
    write_headers(&place.path("70B"));
    let args = ["plan", "--model", "70B", "--recipe", "qlora", "--on", "8xH100-80GB", "--quiet"];
    let (bytes, done) = peak(&mut place.command(&args));
    assert!(done.status.success(), "{}", place.told(&done.stderr));
    assert!((1e6..48e6).contains(&bytes), "{bytes}");
}

/// 500 million tokens on 64 A100 are told to take a week; by arithmetic it is hours.
#[test]
fn a_published_case_is_computed_again() {
    let place = shapes();
    let sets = |recompute: &'static str| {
        // 64 ranks of 8 rows of 2048 tokens: 1,048,576 tokens a step, 477 steps.
        let mut args = vec!["--on", "8xA100-80GB*8"];
        for set in [
            "parallel.strategy=fsdp",
            "train.micro_batch_size=8",
            "data.max_seq_len=2048",
            "train.max_steps=477",
            "parallel.reduce_dtype=bf16",
            recompute,
        ] {
            args.extend(["--set", set]);
        }
        args
    };
    let hours =
        |recompute| plan(&place, "70B", &sets(recompute))["run"]["stepping"].as_f64().unwrap() / 3600.0;
    let (none, block) = (hours("train.recompute=none"), hours("train.recompute=block"));
    assert!((6.5..8.5).contains(&none), "{none}");
    assert!((9.0..11.5).contains(&block), "{block}");
    assert_eq!(
        plan(&place, "70B", &sets("train.recompute=block"))["conventions"][0]["bytes_per_parameter"],
        12
    );
}

#[test]
fn ten_gigabits_are_hopeless_for_ddp() {
    let place = shapes();
    let said = plan(
        &place,
        "7B",
        &["--on", "4090*2", "--set", "parallel.strategy=ddp", "--set", "parallel.reduce_dtype=bf16"],
    );
    assert_eq!(said["time"]["bound"], "hopeless");
    let secs = said["time"]["communication"].as_f64().unwrap();
    // 13.5 GB there and back in a ring of two, at 1.25 GB/s.
    assert!((10.5..11.5).contains(&secs), "{secs}");
}

/// What is said of the room is what is compared: of the device, and of the host where something is kept there.
#[test]
fn what_fits_is_no_more_than_the_room() {
    let place = shapes();
    for (model, on) in [("7B", "4090"), ("7B", "4xA100-40GB"), ("7B", "2xA100-80GB"), ("13B", "8xA100-40GB")]
    {
        for recipe in ["full", "lora"] {
            let said = plan(&place, model, &["--on", on, "--recipe", recipe]);
            let fits = said["bytes"].as_u64() <= said["budget"].as_u64();
            assert_eq!(
                said["fits"].as_bool(),
                Some(fits),
                "{model} on {on}: {}, {}",
                said["bytes"],
                said["budget"]
            );
        }
    }
    let offload = ["--set", "parallel.offload=optimizer", "--set", "train.recompute=block"];
    let roomy = plan(&place, "7B", &[&["--on", "2xA100-80GB"], &offload[..]].concat());
    assert_eq!(roomy["fits"], true, "{}", roomy["host_bytes"]);
    // The masters are counted where they are.
    let weights = roomy["memory"][0]["formula"].as_str().unwrap();
    assert!(weights.contains("f32 masters (on the host): 4 B x"), "{weights}");
    place.write(
        "small.toml",
        "[device]\nname = \"small\"\nmemory_gb = 80\nbf16_tflops = 312\nf32_tflops = 19.5\nmemory_gbps = 2039\n\
         link = \"PCIe\"\nlink_gbps = 10\nhost_gbps = 20\nnetwork_gbps = 1.25\nhost_memory_gb = 16\ndisk_gbps = 3\n\
         devices_per_host = 2\nefficiency = 0.4\nsource = \"a bench\"\n",
    );
    let small = [&["--on", "2xsmall.toml"], &offload[..]].concat();
    let said = plan(&place, "7B", &small);
    assert_eq!(said["fits"], false);
    assert!(said["bytes"].as_u64() <= said["budget"].as_u64());
    let output =
        place.command(&[&["plan", "--model", "7B", "--quiet"], &small[..]].concat()).output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(
        told.contains("its host has 7.20 GB for each rank, and ") && told.contains("that does NOT fit"),
        "{told}"
    );
}

/// A split that the engine runs has the memory and the time of such a run's plan.
#[test]
fn splits_that_run_are_as_planned() {
    let place = shapes();
    let fsdp = plan(&place, "13B", &["--on", "8xA100-40GB", "--set", "parallel.strategy=fsdp"]);
    let splits = fsdp["splits"].as_array().unwrap();
    let split =
        |shard: u64| splits.iter().find(|split| split["runs"] == true && split["shard"] == shard).unwrap();
    assert_eq!(
        (&split(8)["bytes"], &split(8)["fits"], &split(8)["step_secs"]),
        (&fsdp["bytes"], &fsdp["fits"], &fsdp["time"]["total"])
    );
    let groups = ["--on", "8xA100-40GB", "--set", "parallel.strategy=hsdp", "--set", "parallel.shard_size=4"];
    let hsdp = plan(&place, "13B", &groups);
    assert_eq!((&split(4)["bytes"], &split(4)["step_secs"]), (&hsdp["bytes"], &hsdp["time"]["total"]));
}

/// Published splits are in the list, which is told in part and written whole.
#[test]
fn splits_are_all_listed() {
    let place = shapes();
    std::fs::create_dir(place.path("175B")).unwrap();
    let config = json!({
        "model_type": "llama", "hidden_size": 12288, "intermediate_size": 32768, "num_hidden_layers": 96,
        "num_attention_heads": 96, "num_key_value_heads": 96, "vocab_size": 50_257, "max_position_embeddings": 2048,
    });
    place.write("175B/config.json", &config.to_string());
    for (on, [tensor, pipeline, data]) in [("8xA100-80GB*100", [8, 4, 25]), ("8xA100-80GB*384", [8, 12, 32])]
    {
        let args = ["--on", on, "--set", "data.max_seq_len=2048", "--set", "parallel.strategy=fsdp"];
        let said = plan(&place, "175B", &args);
        let splits = said["splits"].as_array().unwrap();
        let is_it = |split: &&Value| {
            (&split["tensor"], &split["pipeline"], &split["data"], &split["shard"], &split["context"])
                == (&json!(tensor), &json!(pipeline), &json!(data), &json!(1), &json!(1))
        };
        assert!(splits.iter().any(|split| is_it(&split)), "{on}: {} splits", splits.len());
        let output =
            place.command(&[&["plan", "--model", "175B", "--quiet"], &args[..]].concat()).output().unwrap();
        let more = format!("and {} more, which `--json` lists", splits.len() - 8);
        assert!(String::from_utf8(output.stdout).unwrap().contains(&more), "{more}");
    }
}

/// Prices add up, of the run or of a billion tokens.
#[test]
fn a_run_has_a_price() {
    let place = shapes();
    let base = ["--on", "8xH100-80GB", "--set", "train.max_steps=1000", "--price", "98.32/h"];
    let said = plan(&place, "8B", &base);
    let hours = said["run"]["total"].as_f64().unwrap() / 3600.0;
    assert!((said["cost"].as_f64().unwrap() - 98.32 * hours).abs() < 1e-6);
    let more = plan(&place, "8B", &[&base[..], &["--price", "0.14/GB-month*730"]].concat());
    let added = more["cost"].as_f64().unwrap() - said["cost"].as_f64().unwrap();
    assert!((added - 0.14 * hours).abs() < 1e-6, "{added}");
    let open = plan(&place, "8B", &["--on", "8xH100-80GB", "--price", "98.32/h"]);
    let rate = open["time"]["tokens_per_sec"].as_f64().unwrap();
    assert!((open["cost"].as_f64().unwrap() - 98.32 * 1e9 / rate / 3600.0).abs() < 1e-6);
}

#[test]
fn what_cannot_be_planned_is_one_error() {
    let place = shapes();
    place.write("ops.json", "{}");
    place.write("own.toml", "[device]\nname = \"x\"\n");
    let cases: [(&[&str], &str); 10] = [
        (&["--on", "8xH1000-80GB"], "no device is called \"H1000-80GB\" (near: H100-80GB); accepted: "),
        (&["--on", "own.toml"], "cannot understand the hardware in "),
        (&["--on=-8xH100-80GB"], "is no number of devices or hosts"),
        (&["--on", "-8xH100-80GB"], "is no number of devices or hosts"),
        (&["--on", "4090", "--price", "-3/h"], "the amount is no number of 0 or more"),
        (&["--on", "4090", "--ranks", "2"], "cannot be used with '--ranks <N>'"),
        (&["--on", "4090", "--price=-3/h"], "the amount is no number of 0 or more"),
        (&["--calibration", "ops.json"], "cannot use the calibration "),
        (&["--on", "V100-32GB", "--set", "model.dtype=bf16"], "cannot compute in bf16 on V100-32GB"),
        (&["--on", "4090", "--set", "data.max_seq_len=-1"], "data.max_seq_len"),
    ];
    for (more, why) in cases {
        let output = place.command(&[&["plan", "--model", "8B"], more].concat()).output().unwrap();
        let told = place.told(&output.stderr);
        assert!(!output.status.success() && told.contains(why), "{more:?}: {told}");
        assert_eq!(told.matches("error: ").count(), 1, "{told}");
        assert!(output.stdout.is_empty());
    }
}

/// Hardware of one's own is a file; the page of a plan stands alone, whatever the model is called.
#[test]
fn a_page_holds_the_plan_and_asks_for_nothing() {
    let place = shapes();
    place.write(
        "own.toml",
        "[device]\nname = \"own\"\nmemory_gb = 24\nbf16_tflops = 100\nf32_tflops = 50\nmemory_gbps = 900\n\
         link = \"PCIe\"\nlink_gbps = 10\nhost_gbps = 20\nnetwork_gbps = 1.25\nhost_memory_gb = 64\ndisk_gbps = 3\n\
         devices_per_host = 1\nefficiency = 0.4\nsource = \"a bench\"\n",
    );
    let odd = "<b>&\"model</script>";
    let folder = odd.replace('/', "_");
    std::fs::create_dir(place.path(&folder)).unwrap();
    std::fs::copy(place.path("1B/config.json"), place.path(&folder).join("config.json")).unwrap();
    let args = ["plan", "--model", &folder, "--on", "2xown.toml", "--html", "plan.html", "--quiet"];
    let output = place.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", place.told(&output.stderr));
    assert!(String::from_utf8(output.stdout).unwrap().contains("on 2xown: 2 ranks"));
    let page = std::fs::read_to_string(place.path("plan.html")).unwrap();
    assert_eq!(page.matches("</script>").count(), 1);
    assert!(!page.contains("<b>&"), "the model's name is text");
    // Its sliders begin with the device of the plan.
    assert_eq!(page.matches(r#""name":"own""#).count(), 2);
    for reference in ["src=", "href=", "@import", "fetch("] {
        assert!(!page.contains(reference), "{reference}");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("name=\"viewport\""));
}

/// A rank on this machine is planned as a run is, with a data set or without.
#[test]
fn a_plan_is_what_the_run_says() {
    let place = Place::new();
    let keys = [
        "--set",
        "data.max_seq_len=96",
        "--set",
        "data.packing=false",
        "--set",
        "optimizer.learning_rate=1e-4",
    ];
    let args =
        [&["plan", "--json", "--model", "model", "--dataset", "rows.jsonl", "--ranks", "2"][..], &keys]
            .concat();
    let output = place.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", place.told(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let run =
        [&["--model", "model", "--dataset", "rows.jsonl", "--ranks", "2", "--dry-run"][..], &keys].concat();
    let dry = place.told(&place.command(&run).output().unwrap().stderr);
    let bytes = finetune::units::bytes(said["bytes"].as_u64().unwrap());
    assert!(dry.contains(&format!("memory of a step: {bytes} =")), "{bytes}: {dry}");
    assert!(dry.contains(&format!("strategy {}", said["strategy"].as_str().unwrap())), "{dry}");
}
