//! `adapter.path` through the binary: which keys of `[adapter]` agree with the saved adapter, which
//! are refused, and which values the run's recipe.toml records.

use crate::test_dir::{TestDir, lora};
#[allow(dead_code, reason = "each test binary uses its part")]
use insta::assert_snapshot;
use serde_json::Value;

const COMMON: &str = "
[data]
max_seq_len = 96
packing = false
shuffle = false
[train]
max_steps = 2
[optimizer]
learning_rate = 1e-2
";

/// Trains `saved`: an adapter with r = 4 (2 in one module), rsLoRA, dropout and a fully trained
/// head.
fn saved_adapter() -> TestDir {
    let dir = TestDir::new();
    let sets = [
        "adapter.r=4",
        "adapter.lora_alpha=12",
        "adapter.lora_dropout=0.25",
        r#"adapter.target_modules=["v_proj", "down_proj", "q_proj"]"#,
        r#"adapter.modules_to_save=["lm_head"]"#,
        r#"adapter.rank_pattern={ "layers.1.self_attn.q_proj" = 2 }"#,
        r#"adapter.alpha_pattern={ "v_proj" = 6 }"#,
        "adapter.use_rslora=true",
    ];
    let mut args = lora(&[]);
    sets.iter().for_each(|set| args.extend(["--set", set]));
    let args: Vec<&str> = args.into_iter().map(|arg| if arg == "out" { "saved" } else { arg }).collect();
    succeed(&dir, &args);
    dir
}

fn succeed(dir: &TestDir, args: &[&str]) {
    let output = dir.command(args).output().unwrap();
    assert!(output.status.success(), "{args:?}\n{}", dir.told(&output.stderr));
}

/// Trains with `keys` beside `path` under `[adapter]`; returns the bytes of the resulting adapter.
fn train(dir: &TestDir, output: &str, keys: &str) -> Vec<u8> {
    dir.write("go_on.toml", &format!("[adapter]\npath = \"./saved\"\n{keys}{COMMON}"));
    let args = ["--recipe", "go_on.toml", "--model", "model", "--dataset", "rows.jsonl", "--output", output];
    succeed(dir, &args);
    adapter(dir, output)
}

fn adapter(dir: &TestDir, output: &str) -> Vec<u8> {
    std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap()
}

/// Returns the error of a run with `keys`.
fn refused(dir: &TestDir, keys: &str) -> String {
    dir.write("go_on.toml", &format!("[adapter]\npath = \"./saved\"\n{keys}{COMMON}"));
    let args = ["--recipe", "go_on.toml", "--model", "model", "--dataset", "rows.jsonl", "--quiet"];
    let output = dir.command(&args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(!dir.path("out").exists());
    said
}

/// Returns `[adapter]` of the recipe.toml in `output`.
fn recorded(dir: &TestDir, output: &str) -> String {
    let text = std::fs::read_to_string(dir.path(output).join("recipe.toml")).unwrap();
    let from = text.find("[adapter]").unwrap();
    let section = text[from..].split("\n\n").next().unwrap();
    dir.told(section.as_bytes())
}

#[test]
fn keys_not_written_are_the_saved_adapter_s() {
    let dir = saved_adapter();
    let trained = train(&dir, "on", "");
    assert_snapshot!(recorded(&dir, "on"), @r#"
    [adapter]
    kind = "lora"
    r = 4
    lora_alpha = 12.0
    lora_dropout = 0.25
    target_modules = ["down_proj", "q_proj", "v_proj"]
    exclude_modules = []
    modules_to_save = ["lm_head"]
    rank_pattern = { "layers.1.self_attn.q_proj" = 2 }
    alpha_pattern = { "v_proj" = 6.0 }
    use_rslora = true
    init = "default"
    path = "[DIR]/saved"
    "#);
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path("on/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["r"], &config["lora_dropout"]), (&4.into(), &0.25.into()));
    // The recorded recipe repeats the run.
    succeed(&dir, &["--recipe", "on/recipe.toml", "--output", "again"]);
    assert!(adapter(&dir, "again") == trained);
    assert_eq!(recorded(&dir, "again"), recorded(&dir, "on"));
}

#[test]
fn written_keys_that_mean_the_same_agree() {
    let dir = saved_adapter();
    let trained = train(&dir, "on", "");
    for (case, keys) in [
        "target_modules = [\"q_proj\", \"v_proj\", \"down_proj\"]\n",
        "target_modules = \"all-linear\"\nexclude_modules = [\"k_proj\", \"o_proj\", \"up_proj\", \"gate_proj\"]\n",
        "exclude_modules = [\"k_proj\"]\n",
        "kind = \"lora\"\nr = 4\nlora_alpha = 12\nuse_rslora = true\nmodules_to_save = [\"lm_head\"]\n",
        "rank_pattern = { \"1.self_attn.q_proj\" = 2, \"0.self_attn.q_proj\" = 4 }\n",
        "alpha_pattern = { \"v_proj\" = 6.0 }\n",
        "lora_dropout = 0.25\n",
    ]
    .into_iter()
    .enumerate()
    {
        assert!(train(&dir, &format!("on-{case}"), keys) == trained, "{keys}");
    }
    // Dropout may differ: it belongs to the new run, also where the recipe writes its default.
    assert!(train(&dir, "plain", "lora_dropout = 0.0\n") != trained);
    assert!(recorded(&dir, "plain").contains("lora_dropout = 0.0\n"));
    let config = std::fs::read_to_string(dir.path("plain/adapter_config.json")).unwrap();
    assert!(config.contains("\"lora_dropout\": 0.0"), "{config}");
}

#[test]
fn written_keys_that_contradict_are_refused() {
    let dir = saved_adapter();
    // Each key has its default value.
    let defaults = "kind = \"lora\"\nr = 16\nlora_alpha = 16\nuse_rslora = false\nrank_pattern = {}\nalpha_pattern = {}\nmodules_to_save = []\n";
    assert_snapshot!(refused(&dir, defaults), @r#"
    error: cannot go on with the adapter in [DIR]/saved
      caused by: go_on.toml:4:5: `adapter.r` is 16; in the saved adapter it is 4
      caused by: go_on.toml:5:14: `adapter.lora_alpha` is 16.0; in the saved adapter it is 12.0
      caused by: go_on.toml:9:19: `adapter.modules_to_save` is []; in the saved adapter it is ["lm_head"]
      caused by: go_on.toml:7:16: `adapter.rank_pattern` is {}; in the saved adapter it is { "layers.1.self_attn.q_proj" = 2 }
      caused by: go_on.toml:8:17: `adapter.alpha_pattern` is {}; in the saved adapter it is { "v_proj" = 6.0 }
      caused by: go_on.toml:6:14: `adapter.use_rslora` is false; in the saved adapter it is true
    hint: write the saved adapter's values (`--set 'adapter.r=4'`, `--set 'adapter.lora_alpha=12.0'`, `--set 'adapter.modules_to_save=["lm_head"]'`, `--set 'adapter.rank_pattern={ "layers.1.self_attn.q_proj" = 2 }'`, `--set 'adapter.alpha_pattern={ "v_proj" = 6.0 }'`, `--set 'adapter.use_rslora=true'`), or remove these keys to use its values; without `adapter.path` a new adapter starts
    "#);
    assert_snapshot!(refused(&dir, "target_modules = [\"q_proj\", \"k_proj\"]\n"), @r#"
    error: cannot go on with the adapter in [DIR]/saved
      caused by: go_on.toml:3:18: `adapter.target_modules` is ["q_proj", "k_proj"]; in the saved adapter it is ["down_proj", "q_proj", "v_proj"]
    hint: write the saved adapter's values (`--set 'adapter.target_modules=["down_proj", "q_proj", "v_proj"]'`), or remove these keys to use its values; without `adapter.path` a new adapter starts
    "#);
    assert_snapshot!(refused(&dir, "kind = \"dora\"\nexclude_modules = [\"v_proj\"]\n"), @r#"
    error: cannot go on with the adapter in [DIR]/saved
      caused by: go_on.toml:3:8: `adapter.kind` is "dora"; in the saved adapter it is "lora"
      caused by: go_on.toml:4:19: `adapter.exclude_modules` is ["v_proj"]; the saved adapter covers ["down_proj", "q_proj", "v_proj"]
    hint: write the saved adapter's values (`--set 'adapter.kind="lora"'`, `--set 'adapter.exclude_modules=[]'`), or remove these keys to use its values; without `adapter.path` a new adapter starts
    "#);
    assert_snapshot!(refused(&dir, "init = \"gaussian\"\n"), @"
    error: cannot use recipe go_on.toml
      caused by: go_on.toml:3:8: `adapter.init` has no effect with `path`: a saved adapter brings its own weights
    hint: remove `init` or `path`
    ");
    assert_snapshot!(refused(&dir, "bias = \"all\"\n"), @"
    error: cannot use recipe go_on.toml
      caused by: go_on.toml:3:1: unknown key `adapter.bias`; [adapter] has: kind, r, lora_alpha, lora_dropout, target_modules, exclude_modules, modules_to_save, rank_pattern, alpha_pattern, use_rslora, init, path
    hint: `finetune recipes show reference` documents every key
    ");
    let args = lora(&["--set", "adapter.path=./saved"]);
    let output = dir.command(&args).arg("--quiet").output().unwrap();
    assert_snapshot!(dir.told(&output.stderr), @r#"
    error: cannot go on with the adapter in [DIR]/saved
      caused by: lora (built in):12:5: `adapter.r` is 16; in the saved adapter it is 4
      caused by: lora (built in):13:14: `adapter.lora_alpha` is 32.0; in the saved adapter it is 12.0
      caused by: lora (built in):14:18: `adapter.target_modules` is "all-linear"; in the saved adapter it is ["down_proj", "q_proj", "v_proj"]
    hint: write the saved adapter's values (`--set 'adapter.r=4'`, `--set 'adapter.lora_alpha=12.0'`, `--set 'adapter.target_modules=["down_proj", "q_proj", "v_proj"]'`), or remove these keys to use its values; without `adapter.path` a new adapter starts
    "#);
}
