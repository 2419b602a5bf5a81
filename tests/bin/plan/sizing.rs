//! `finetune plan`: memory, time and cost on hardware elsewhere, for models of which only
//! config.json exists.

use std::fmt::Write;

use serde_json::{Value, json};

#[cfg(target_os = "linux")]
use crate::planned_run::{peak, write_headers};
use crate::test_dir::{TestDir, golden};

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
pub(crate) fn shapes() -> TestDir {
    let dir = TestDir::new();
    for (name, [hidden, mlp, layers, heads, kv, vocabulary], tied) in SHAPES {
        std::fs::create_dir(dir.path(name)).unwrap();
        let config = json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
            "tie_word_embeddings": tied, "max_position_embeddings": 131_072,
        });
        dir.write(&format!("{name}/config.json"), &config.to_string());
    }
    dir
}

pub(crate) fn plan(dir: &TestDir, model: &str, more: &[&str]) -> Value {
    let args = [&["plan", "--quiet", "--json", "--model", model], more].concat();
    let output = dir.command(&args).output().unwrap();
    let told = dir.told(&output.stderr);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{args:?}: {told}"));
    // A plan that does not fit is printed as well; scripts see it by the exit code.
    assert_eq!(output.status.code(), Some(i32::from(plan["fits"] == false)), "{args:?}: {told}");
    assert_eq!(told.contains("error: the plan does not fit\n"), plan["fits"] == false, "{told}");
    plan
}

#[test]
fn a_plan_is_short_with_the_answer_first() {
    let dir = shapes();
    let plan = |more: &[&str]| {
        let args = [&["plan", "--quiet", "--model", "1B"], more].concat();
        let output = dir.command(&args).output().unwrap();
        (output.status.code(), dir.told(&output.stdout), dir.told(&output.stderr))
    };
    let (code, text, errors) = plan(&["--on", "H100-80GB", "--price", "2/h", "--set", "train.max_steps=10"]);
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(text.starts_with("fits: ") && text.lines().count() <= 7, "{text}");
    assert!(text.contains("\n10 steps take ") && text.contains("; cost 0."), "{text}");
    let (code, text, errors) = plan(&["--on", "4090"]);
    assert_eq!(code, Some(1), "{errors}");
    assert!(text.starts_with("does NOT fit: ") && text.contains("\nthis fits: "), "{text}");
    assert!(
        errors.starts_with("error: the plan does not fit\n") && errors.contains("hint: this fits: "),
        "{errors}"
    );
    // The suggested change fits.
    let way = errors.split('`').nth(1).unwrap();
    let flags: Vec<&str> = way.split(' ').collect();
    assert_eq!(plan(&[&["--on", "4090"], &flags[..]].concat()).0, Some(0), "{way}");
    let (_, full, _) = plan(&["--on", "4090", "--full"]);
    assert!(full.contains("rules of thumb") && full.lines().count() > 20, "{full}");
    assert!(full.contains("4090: 1 rank, strategy single"), "{full}");
    assert!(full.contains(&format!("  to choose the line with *: add `{way}`\n")), "{full}");
}

fn gigabytes(value: &Value) -> f64 {
    value.as_f64().unwrap() / 1e9
}

/// A custom hardware file.
pub(super) const OWN: &str = "[device]\nname = \"NAME\"\nmemory_gb = 24\nbf16_tflops = 100\nf32_tflops = 50\nmemory_gbps = 900\n\
     link = \"PCIe\"\nlink_gbps = 10\nhost_gbps = 20\nnetwork_gbps = 1.25\nhost_memory_gb = 64\ndisk_gbps = 3\n\
     devices_per_host = 2\nefficiency = 0.4\nsource = \"a bench\"\n";

/// The decision for pairs of model and machine: the first option that fits, its strategy, the
/// memory of a rank and the total speed.
#[test]
fn all_cases_are_decided_as_before() {
    let (dir, mut lines) = (shapes(), String::new());
    let machines = ["4090", "mac-64GB", "8xA100-40GB", "8xH100-80GB", "4xA100-40GB*16"];
    for (model, machine) in
        SHAPES.iter().filter(|(name, ..)| *name != "13B").flat_map(|(name, ..)| machines.map(|m| (name, m)))
    {
        let said = plan(&dir, model, &["--on", machine, "--set", "checkpoint.save_steps=never"]);
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
        writeln!(lines, "{model} on {machine}: {line}").unwrap();
    }
    assert_eq!(lines, include_str!("sizing_cases.txt"), "the new ones:\n{lines}");
}

#[test]
fn memory_is_the_sum_of_its_causes_and_of_their_parts() {
    let dir = shapes();
    let said = plan(&dir, "7B", &["--on", "8xH100-80GB", "--set", "parallel.strategy=fsdp"]);
    let causes = said["memory"].as_array().unwrap();
    let on_device = |cause: &&Value| !["host memory", "file"].contains(&cause["cause"].as_str().unwrap());
    let sum: u64 = causes.iter().filter(on_device).map(|cause| cause["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, said["bytes"].as_u64().unwrap());
    let parameters = said["parameters"].as_u64().unwrap();
    assert_eq!(parameters, 6_738_415_616);
    let of = |name: &str| causes.iter().find(|cause| cause["cause"] == name).unwrap();
    // bf16 weights and f32 masters, f32 gradients, two f32 moments, each sharded over eight ranks.
    assert_eq!(of("weights")["bytes"], 6 * parameters / 8);
    assert_eq!(of("gradients")["bytes"], 4 * parameters / 8);
    assert_eq!(of("optimizer")["bytes"], 8 * parameters / 8);
    assert_eq!(of("optimizer")["formula"], "f32 moments: 8 B x 6.74B / 8");
    assert_eq!(said["bytes_per_parameter"], 18.0);
    // The common rule for 7B, with its actual parameters, over eight ranks.
    let rule = &said["conventions"][0];
    assert_eq!(
        (rule["bytes_per_parameter"].as_u64(), rule["bytes"].as_u64()),
        (Some(12), Some(12 * parameters / 8))
    );
}

/// Half a gigabyte for each of NCCL's communicators, which a rank alone and a processor lack.
#[test]
fn communicators_are_counted_among_gpus() {
    let dir = shapes();
    let nccl = |on: &str, sets: &[&str]| {
        let mut args = vec!["--on", on, "--recipe", "full"];
        args.extend(sets.iter().flat_map(|set| ["--set", set]));
        let causes = plan(&dir, "7B", &args)["memory"].as_array().unwrap().clone();
        let cause = causes.iter().find(|cause| cause["cause"] == "NCCL");
        cause.map(|cause| (cause["bytes"].as_u64().unwrap(), cause["formula"].as_str().unwrap().to_owned()))
    };
    let of = |count: u64| Some((count * 500_000_000, format!("communicators: {count} x 0.50 GB")));
    assert_eq!(nccl("H100-80GB", &[]), None);
    assert_eq!(nccl("cpu-64GB*2", &[]), None);
    assert_eq!(nccl("8xH100-80GB", &["parallel.strategy=fsdp"]), of(2));
    assert_eq!(nccl("8xH100-80GB*2", &["parallel.strategy=hsdp"]), of(5));
    assert_eq!(nccl("8xH100-80GB*2", &["parallel.strategy=hsdp", "adapter.kind=lora"]), of(4));
}

/// QLoRA of 70B in 4-bit blocks with 8-bit scales.
#[test]
fn a_70b_base_in_4_bits_is_35_gigabytes() {
    let dir = shapes();
    let more = ["--on", "A100-80GB", "--recipe", "qlora", "--set", "train.recompute=block"];
    let said = plan(&dir, "70B", &more);
    let weights = said["memory"][0]["bytes"].as_u64().unwrap() as f64 / 1e9;
    // 68.45 billion weights in blocks of 4.127 bits each; embedding and head of 2.1 billion values
    // in bf16, and adapters.
    assert!((35.3 + 4.2..35.3 + 4.2 + 2.5).contains(&weights), "{weights}");
    assert!(
        said["memory"][0]["formula"]
            .as_str()
            .unwrap()
            .contains("nf4 in blocks of 64, its scales in 8 bits: 0.516 B")
    );
}

/// Memory for the headers of 723 tensors of 282 GB. The test build's own pages are some 25 MB of
/// it; a release build takes 16 MB in all (`benchmarks/plan_startup.py`).
#[test]
#[cfg(target_os = "linux")]
fn a_70b_folder_is_planned_in_little_memory() {
    let dir = shapes();
    write_headers(&dir.path("70B"));
    let args = ["plan", "--full", "--model", "70B", "--recipe", "qlora", "--on", "8xH100-80GB", "--quiet"];
    let (bytes, done) = peak(&mut dir.command(&args));
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
    // The code of a test build takes some 45 MB.
    assert!((1e6..56e6).contains(&bytes), "{bytes}");
}

/// Of a mixture, the plan also counts the weights that a token uses.
#[test]
fn a_mixture_has_two_numbers_of_parameters() {
    let table = std::fs::read_to_string(golden("published.json")).unwrap();
    let table: Vec<Value> = serde_json::from_str(&table).unwrap();
    let mixtral = table.iter().find(|model| model["name"] == "mistralai/Mixtral-8x7B-v0.1").unwrap();
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("mixtral")).unwrap();
    dir.write("mixtral/config.json", &mixtral["config"].to_string());
    let args = ["--model", "mixtral", "--on", "8xH200", "--recipe", "full"];
    let said = dir.said(&[&["plan"][..], &args].concat());
    assert!(said.contains("46.7B of 46.7B parameters (12.9B for a token)"), "{said}");
    let said = plan(&dir, "mixtral", &args[2..]);
    let counts = ["parameters", "active_parameters"].map(|key| said[key].as_u64().unwrap());
    assert_eq!(counts, [46_702_792_704, 12_879_925_248]);
}

/// A published estimate says a week for 500 million tokens on 64 A100; by arithmetic it is hours.
#[test]
fn a_published_case_is_computed_again() {
    let dir = shapes();
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
    let hours = |recompute| plan(&dir, "70B", &sets(recompute))["run"]["stepping"].as_f64().unwrap() / 3600.0;
    let (none, block) = (hours("train.recompute=none"), hours("train.recompute=block"));
    assert!((6.5..8.5).contains(&none), "{none}");
    assert!((9.0..11.5).contains(&block), "{block}");
    // "100k iterations are 210 B tokens", of 512 rows of 4096 tokens each.
    let more = ["--set", "data.max_seq_len=4096", "--set", "train.max_steps=100000"];
    let said = plan(&dir, "70B", &[&sets("train.recompute=block")[..], &more].concat());
    assert_eq!(said["run"]["tokens"], 100_000.0 * 512.0 * 4096.0);
    assert!((2.09e11..2.10e11).contains(&said["run"]["tokens"].as_f64().unwrap()));
}

/// A plan for a CPU elsewhere equals the plan of a run on this one: in f32 the same bytes, except
/// the program's.
#[test]
fn a_processor_elsewhere_computes_as_this_one() {
    let dir = shapes();
    for recipe in ["lora", "full"] {
        let here = plan(&dir, "1B", &["--recipe", recipe, "--ranks", "1", "--set", "train.recompute=none"]);
        for on in ["cpu-64GB", "mac-64GB"] {
            let there = plan(&dir, "1B", &["--recipe", recipe, "--on", on, "--set", "train.recompute=none"]);
            assert_eq!((&there["dtype"], &here["dtype"]), (&json!("f32"), &json!("f32")), "{on}");
            let causes = |said: &Value| -> Vec<Value> {
                let causes = said["memory"].as_array().unwrap().iter();
                causes.filter(|cause| cause["cause"] != "process").cloned().collect()
            };
            assert_eq!(causes(&there), causes(&here), "{on}");
            let process =
                there["memory"].as_array().unwrap().iter().find(|cause| cause["cause"] == "process");
            assert_eq!(process.unwrap()["bytes"], 32_000_000);
        }
    }
    // A GPU in its own computer counts as one, too; bf16 is used if requested.
    assert_eq!(plan(&dir, "1B", &["--on", "GH200-96GB"])["dtype"], "bf16");
    assert_eq!(plan(&dir, "1B", &["--on", "cpu-64GB", "--set", "model.dtype=bf16"])["dtype"], "bf16");
}

/// A plan uses the results of `bench ops` if they are of the planned device.
#[test]
fn a_calibration_is_of_the_device_that_is_planned() {
    let dir = TestDir::new();
    let bench = |dtype: &str| {
        let args =
            ["bench", "ops", "--model", "model", "--tokens", "48", "--max-seq-len", "20", "--secs", "0.0001"];
        let output = dir.command(&[&args[..], &["--json", "--dtype", dtype]].concat()).output().unwrap();
        let speeds = String::from_utf8(output.stdout).unwrap();
        dir.write(&format!("{dtype}.json"), &speeds);
        serde_json::from_str::<Value>(&speeds).unwrap()
    };
    let (measured, _) = (bench("f32"), bench("bf16"));
    let here = ["--ranks", "1", "--calibration"];
    let said = plan(&dir, "model", &[&here[..], &["f32.json"]].concat());
    assert_eq!(said["speeds"], format!("{}, f32, 48 tokens", measured["device"].as_str().unwrap()));
    // MFU is relative to the measured matrix product.
    let time = &said["time"];
    let peak = measured["gemm_tflops"].as_f64().unwrap() * 1e12;
    let flops = time["mfu"].as_f64().unwrap() * time["total"].as_f64().unwrap() * peak;
    let tokens = said["micro_batch_tokens"].as_f64().unwrap();
    // Llama of 2 layers, see its config.json: 6 operations a weight, 3.5 times attention over half
    // of a row.
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.path("model/config.json")).unwrap()).unwrap();
    let of = |key: &str| config[key].as_f64().unwrap();
    let (d, f, layers) = (of("hidden_size"), of("intermediate_size"), of("num_hidden_layers"));
    let kv = d * of("num_key_value_heads") / of("num_attention_heads");
    let weights = layers * (2.0 * d * (d + kv) + 3.0 * d * f) + of("vocab_size") * d;
    let by_hand = tokens * (6.0 * weights + 3.5 * layers * 4.0 * d * tokens / 2.0);
    assert!((flops / by_hand - 1.0).abs() < 1e-6, "{flops:e}, by hand {by_hand:e}");
    let in_bf16 = plan(&dir, "model", &[&here[..], &["bf16.json", "--set", "model.dtype=bf16"]].concat());
    assert!(in_bf16["speeds"].as_str().unwrap().contains(", bf16, 48 tokens"));
    assert!(plan(&dir, "model", &["--on", "cpu-64GB", "--calibration", "f32.json"])["time"].is_object());
    for (more, why) in [
        (
            &["--ranks", "1", "--calibration", "bf16.json"][..],
            "measured in bf16, and the plan computes in f32",
        ),
        (
            &["--on", "cpu-64GB", "--calibration", "bf16.json"],
            "measured in bf16, and the plan computes in f32",
        ),
        (&["--on", "4090", "--calibration", "bf16.json"], "measured on a processor, "),
    ] {
        let output = dir.command(&[&["plan", "--full", "--model", "model"], more].concat()).output().unwrap();
        let told = dir.told(&output.stderr);
        assert!(!output.status.success() && told.contains(why) && told.contains("hint:"), "{more:?}: {told}");
    }
}

/// Omitted parts have a reason: splits are compared by time, which needs `--on`. A host with more
/// devices than usual gets a warning.
#[test]
fn what_a_plan_takes_for_granted_is_said() {
    let dir = shapes();
    let told = |more: &[&str]| {
        let output = dir.command(&[&["plan", "--full", "--model", "1B"], more].concat()).output().unwrap();
        let errors = dir.told(&output.stderr);
        let is_made = output.status.success() || errors.contains("error: the plan does not fit\n");
        assert!(is_made, "{errors}");
        (dir.told(&output.stdout), errors)
    };
    let reason = "splits over the ranks are compared by time";
    assert!(told(&["--ranks", "2"]).0.contains(reason) && !told(&["--ranks", "1"]).0.contains(reason));
    let hint = "write hosts of 8 as 8xH100-80GB*2";
    assert!(told(&["--on", "16xH100-80GB"]).1.contains(hint));
    assert!(!told(&["--on", "8xH100-80GB*2"]).1.contains("warning:"));
}

#[test]
fn ten_gigabits_are_hopeless_for_ddp() {
    let dir = shapes();
    let said = plan(
        &dir,
        "7B",
        &["--on", "4090*2", "--set", "parallel.strategy=ddp", "--set", "parallel.reduce_dtype=bf16"],
    );
    assert_eq!(said["time"]["bound"], "hopeless");
    let secs = said["time"]["communication"].as_f64().unwrap();
    // 13.5 GB both ways in a ring of two, at 1.25 GB/s.
    assert!((10.5..11.5).contains(&secs), "{secs}");
}

/// `fits` compares the printed budget: that of the device, and of the host if anything is kept
/// there.
#[test]
fn what_fits_is_no_more_than_the_room() {
    let dir = shapes();
    for (model, on) in [("7B", "4090"), ("7B", "4xA100-40GB"), ("7B", "2xA100-80GB"), ("13B", "8xA100-40GB")]
    {
        for recipe in ["full", "lora"] {
            let said = plan(&dir, model, &["--on", on, "--recipe", recipe]);
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
    let roomy = plan(&dir, "7B", &[&["--on", "2xA100-80GB"], &offload[..]].concat());
    assert_eq!(roomy["fits"], true, "{}", roomy["host_bytes"]);
    // The masters are counted where they are stored.
    let weights = roomy["memory"][0]["formula"].as_str().unwrap();
    assert!(weights.contains("f32 masters (on the host): 4 B x"), "{weights}");
    dir.write(
        "small.toml",
        "[device]\nname = \"small\"\nmemory_gb = 80\nbf16_tflops = 312\nf32_tflops = 19.5\nmemory_gbps = 2039\n\
         link = \"PCIe\"\nlink_gbps = 10\nhost_gbps = 20\nnetwork_gbps = 1.25\nhost_memory_gb = 16\ndisk_gbps = 3\n\
         devices_per_host = 2\nefficiency = 0.4\nsource = \"a bench\"\n",
    );
    let small = [&["--on", "2xsmall.toml"], &offload[..]].concat();
    let said = plan(&dir, "7B", &small);
    assert_eq!(said["fits"], false);
    assert!(said["bytes"].as_u64() <= said["budget"].as_u64());
    let output = dir
        .command(&[&["plan", "--full", "--model", "7B", "--quiet"], &small[..]].concat())
        .output()
        .unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(
        told.contains("\n  host memory of a rank: ") && told.contains("does NOT fit the budget of 7.20 GB"),
        "{told}"
    );
}

/// A split that the engine can run has the memory and time of that run's plan.
#[test]
fn splits_that_run_are_as_planned() {
    let dir = shapes();
    let fsdp = plan(&dir, "13B", &["--on", "8xA100-40GB", "--set", "parallel.strategy=fsdp"]);
    let splits = fsdp["splits"].as_array().unwrap();
    let split =
        |shard: u64| splits.iter().find(|split| split["runs"] == true && split["shard"] == shard).unwrap();
    assert_eq!(
        (&split(8)["bytes"], &split(8)["fits"], &split(8)["step_secs"]),
        (&fsdp["bytes"], &fsdp["fits"], &fsdp["time"]["total"])
    );
    let groups = ["--on", "8xA100-40GB", "--set", "parallel.strategy=hsdp", "--set", "parallel.shard_size=4"];
    let hsdp = plan(&dir, "13B", &groups);
    assert_eq!((&split(4)["bytes"], &split(4)["step_secs"]), (&hsdp["bytes"], &hsdp["time"]["total"]));
}

/// Splits use the recipe's own method: those of QLoRA need a small part of the memory of full
/// training, and name the method.
#[test]
fn splits_are_of_the_recipes_method() {
    let dir = shapes();
    let on = ["--on", "8xA100-40GB", "--set", "parallel.strategy=fsdp"];
    let full = plan(&dir, "13B", &on);
    let qlora = plan(&dir, "13B", &[&on[..], &["--recipe", "qlora"]].concat());
    let bytes = |said: &Value, tensor: u64, pipeline: u64| {
        let splits = said["splits"].as_array().unwrap();
        let split = splits.iter().find(|split| split["tensor"] == tensor && split["pipeline"] == pipeline);
        split.unwrap()["bytes"].as_u64().unwrap()
    };
    for (tensor, pipeline) in [(8, 1), (2, 4), (1, 8)] {
        let [all, few] = [&full, &qlora].map(|said| bytes(said, tensor, pipeline));
        assert!(few < all / 2, "{tensor} x {pipeline}: {few} of {all}");
    }
    let output = dir
        .command(&[&["plan", "--full", "--model", "13B", "--quiet", "--recipe", "qlora"], &on[..]].concat())
        .output()
        .unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    let method = qlora["method"].as_str().unwrap();
    assert!(told.contains(&format!("splits of 8 ranks for {method}, by modelled time:")), "{told}");
    assert!(
        told.contains("context parallelism pays from rows of 8192 tokens, and these have 2048"),
        "{told}"
    );
}

/// Published splits are listed, the largest one among the first ten. Text shows part of the list,
/// JSON all of it.
#[test]
fn splits_are_all_listed() {
    let dir = shapes();
    std::fs::create_dir(dir.path("175B")).unwrap();
    let config = json!({
        "model_type": "llama", "hidden_size": 12288, "intermediate_size": 32768, "num_hidden_layers": 96,
        "num_attention_heads": 96, "num_key_value_heads": 96, "vocab_size": 50_257, "max_position_embeddings": 2048,
    });
    dir.write("175B/config.json", &config.to_string());
    for (on, [tensor, pipeline, data], first) in
        [("8xA100-80GB*100", [8, 4, 25], usize::MAX), ("8xA100-80GB*384", [8, 12, 32], 10)]
    {
        let args = ["--on", on, "--set", "data.max_seq_len=2048", "--set", "parallel.strategy=fsdp"];
        let said = plan(&dir, "175B", &args);
        let splits = said["splits"].as_array().unwrap();
        let is_it = |split: &&Value| {
            (&split["tensor"], &split["pipeline"], &split["data"], &split["shard"], &split["context"])
                == (&json!(tensor), &json!(pipeline), &json!(data), &json!(1), &json!(1))
        };
        let rank = splits.iter().position(|split| is_it(&split));
        assert!(rank.is_some_and(|index| index < first), "{on}: {rank:?} of {} splits", splits.len());
        let output = dir
            .command(&[&["plan", "--full", "--model", "175B", "--quiet"], &args[..]].concat())
            .output()
            .unwrap();
        let more = format!("and {} more, which `--json` lists", splits.len() - 8);
        assert!(String::from_utf8(output.stdout).unwrap().contains(&more), "{more}");
    }
}

/// A tiny model cannot keep a GPU busy: a step takes at least as long as the host needs to launch
/// its kernels.
#[test]
fn a_tiny_model_is_bound_by_the_start_of_kernels() {
    let dir = shapes();
    let args = ["--on", "H100-80GB", "--recipe", "lora", "--set", "train.gradient_accumulation_steps=4"];
    let said = plan(&dir, "model", &args);
    // Four micro-batches, 2 layers, 40 kernels forward and 60 backward, 7 µs each.
    let least = 4.0 * 2.0 * 100.0 * 7e-6;
    assert!(said["time"]["total"].as_f64().unwrap() >= least, "{said:#}");
    assert_eq!(said["time"]["bound"], "launch", "{said:#}");
    // The step of a large model takes longer by itself.
    assert_eq!(plan(&dir, "8B", &args)["time"]["launch"], 0.0);
}

/// Prices add up, for the run and for a billion tokens.
#[test]
fn a_run_has_a_price() {
    let dir = shapes();
    let base = ["--on", "8xH100-80GB", "--set", "train.max_steps=1000", "--price", "98.32/h"];
    let said = plan(&dir, "8B", &base);
    let hours = said["run"]["total"].as_f64().unwrap() / 3600.0;
    assert!((said["cost"].as_f64().unwrap() - 98.32 * hours).abs() < 1e-6);
    let more = plan(&dir, "8B", &[&base[..], &["--price", "0.14/GB-month*730"]].concat());
    let added = more["cost"].as_f64().unwrap() - said["cost"].as_f64().unwrap();
    assert!((added - 0.14 * hours).abs() < 1e-6, "{added}");
    let open = plan(&dir, "8B", &["--on", "8xH100-80GB", "--price", "98.32/h"]);
    let rate = open["time"]["tokens_per_sec"].as_f64().unwrap();
    assert!((open["cost"].as_f64().unwrap() - 98.32 * 1e9 / rate / 3600.0).abs() < 1e-6);
}

#[test]
fn what_cannot_be_planned_is_one_error() {
    let dir = shapes();
    dir.write("ops.json", "{}");
    dir.write("own.toml", "[device]\nname = \"x\"\n");
    dir.write("two.toml", &format!("{}[link]\nbogus = 1\n", OWN.replace("NAME", "own")));
    dir.write("bell.toml", &OWN.replace("NAME", r"a\u0007b"));
    let cases: [(&[&str], &str); 17] = [
        (&["--on", "8xH1000-80GB"], "no device is called \"H1000-80GB\" (near: H100-80GB); accepted: "),
        (&["--on", "own.toml"], "cannot understand the hardware in "),
        (&["--on=-8xH100-80GB"], "is no number of devices or hosts"),
        (&["--on", "-8xH100-80GB"], "is no number of devices or hosts"),
        (
            &["--on", "4090", "--price", "-3/h"],
            "`AMOUNT` is -3.0; accepted: 0 for none, or 1e-9 to 1000000000.0",
        ),
        (&["--on", "4090", "--ranks", "2"], "cannot be used with '--ranks <N>'"),
        (
            &["--on", "4090", "--price=-3/h"],
            "`AMOUNT` is -3.0; accepted: 0 for none, or 1e-9 to 1000000000.0",
        ),
        (&["--on", "two.toml"], "unknown field `link`"),
        (&["--on", "bell.toml"], "accepted: a text without control characters"),
        (&["--on", "8xB300"], "no device is called \"B300\" (near: B200-180GB)"),
        (&["--on", "4090", "--price", "3/h*0"], "`COUNT` is 0.0; accepted: 1e-6 to 1000000000.0"),
        (&["--price", "3/h"], "the speed of this machine is unknown"),
        (&["--price", "3/h", "--ranks", "2"], "the speed of this machine is unknown"),
        (&["--on", "8xH100", "--set", "parallel.strategy=single"], "leave the strategy out, or use one rank"),
        (&["--calibration", "ops.json"], "cannot use the calibration "),
        (&["--on", "V100-32GB", "--set", "model.dtype=bf16"], "cannot compute in bf16 on V100-32GB"),
        (&["--on", "4090", "--set", "data.max_seq_len=-1"], "data.max_seq_len"),
    ];
    for (more, why) in cases {
        let output = dir.command(&[&["plan", "--full", "--model", "8B"], more].concat()).output().unwrap();
        let told = dir.told(&output.stderr);
        assert!(!output.status.success() && told.contains(why), "{more:?}: {told}");
        assert_eq!(told.matches("error: ").count(), 1, "{told}");
        assert!(output.stdout.is_empty());
    }
}

/// Custom hardware is a file. The page of a plan is self-contained, whatever the model's name.
#[test]
fn a_page_holds_the_plan_and_asks_for_nothing() {
    let dir = shapes();
    dir.write("own.toml", &OWN.replace("NAME", "own"));
    let odd = "<b>&\"model</script>";
    let folder = odd.replace('/', "_");
    std::fs::create_dir(dir.path(&folder)).unwrap();
    std::fs::copy(dir.path("1B/config.json"), dir.path(&folder).join("config.json")).unwrap();
    let args = ["plan", "--model", &folder, "--on", "2xown.toml", "--html", "plan.html", "--quiet"];
    let output = dir.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    assert!(String::from_utf8(output.stdout).unwrap().contains("on 2xown: 2 ranks"));
    let page = std::fs::read_to_string(dir.path("plan.html")).unwrap();
    assert_eq!(page.matches("</script>").count(), 1);
    assert!(!page.contains("<b>&"), "the model's name is text");
    // Its sliders start with the planned device.
    assert_eq!(page.matches(r#""name":"own""#).count(), 2);
    for reference in ["src=", "href=", "@import", "fetch("] {
        assert!(!page.contains(reference), "{reference}");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("name=\"viewport\""));
}

/// A rank on this machine is planned like a run, with a data set or without.
#[test]
fn a_plan_is_what_the_run_says() {
    let dir = TestDir::new();
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
    let output = dir.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let run =
        [&["--model", "model", "--dataset", "rows.jsonl", "--ranks", "2", "--dry-run"][..], &keys].concat();
    let dry = dir.told(&dir.command(&run).output().unwrap().stderr);
    let bytes = finetune::units::bytes(said["bytes"].as_u64().unwrap());
    assert!(dry.contains(&format!("memory of a step: {bytes} =")), "{bytes}: {dry}");
    assert!(dry.contains(&format!("strategy {}", said["strategy"].as_str().unwrap())), "{dry}");
}
