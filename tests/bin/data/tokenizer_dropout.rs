//! A tokenizer whose BPE model has dropout: finetune disables it with a warning, so that two runs
//! with one seed are equal.

use serde_json::Value;

use crate::test_dir::{TestDir, lora};

#[test]
fn two_runs_see_the_same_tokens() {
    let dir = TestDir::new();
    let run = |output: &str| {
        let args: Vec<_> = lora(&[]).into_iter().map(|arg| if arg == "out" { output } else { arg }).collect();
        let done = dir.command(&args).output().unwrap();
        let said = dir.told(&done.stderr);
        assert!(done.status.success(), "{said}");
        (std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap(), said)
    };
    let (plain, said) = run("plain");
    assert!(!said.contains("dropout"), "{said}");
    let path = dir.path("model/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(tokenizer["model"]["type"], "BPE");
    tokenizer["model"]["dropout"] = 0.5.into();
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    for output in ["first", "second"] {
        let (adapter, said) = run(output);
        assert!(adapter == plain, "{output}: other tokens");
        let warning = "warning: tokenizer.json of [DIR]/model has a BPE dropout of 0.5 (`model.dropout`): \
                       it is disabled, so that a text always has the same tokens";
        assert!(said.contains(warning), "{said}");
    }
    let data = ["data", "--tokens", "--model", "model", "--dataset", "rows.jsonl", "--rows", "1"];
    let said = dir.command(&data).output().unwrap();
    assert!(dir.told(&said.stderr).contains("`model.dropout`"));
}
