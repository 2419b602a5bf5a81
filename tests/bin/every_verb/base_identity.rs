//! Adapters and checkpoints on the model they were trained on, on another one of equal shapes, and
//! on one whose identity is unknown: through the binary, for every verb that uses them.

#[allow(dead_code, reason = "each test binary uses its part")]
use crate::test_dir::{TestDir, copy_folder, golden, lora};

/// Flips the lowest bit of each f32, which makes another model of the same shapes.
fn change_weights(dir: &TestDir, model: &str) {
    let path = dir.path(model).join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
    std::fs::write(path, bytes).unwrap();
}

/// `model`, `other` of the same shapes, and `out`, an adapter trained on `model`.
fn two_bases(more: &[&str]) -> TestDir {
    let dir = TestDir::new();
    copy_folder(&dir.path("model"), &dir.path("other"));
    change_weights(&dir, "other");
    succeed(&dir, &lora(more));
    dir
}

/// Returns the output of a command that must succeed.
fn succeed(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).output().unwrap();
    let said = filtered(&dir.told(&output.stderr));
    assert!(output.status.success(), "{args:?}\n{said}");
    said
}

/// Returns the error of a command that must fail because of its input.
fn refused(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).output().unwrap();
    let said = filtered(&dir.told(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{args:?}\n{said}");
    said[said.find("error: ").unwrap()..].to_owned()
}

/// Replaces digests, which mean nothing to a reader of a snapshot.
fn filtered(text: &str) -> String {
    regex::Regex::new("[0-9a-f]{16,64}").unwrap().replace_all(text, "[DIGEST]").into_owned()
}

/// The lines about the model that an adapter was trained on.
fn about_the_base(said: &str) -> String {
    said.lines().filter(|line| line.contains("trained on")).collect::<Vec<_>>().join("\n")
}

/// Each verb that uses an adapter, on `model`.
fn verbs(model: &str, adapter: &str) -> Vec<Vec<String>> {
    let ends = [
        "eval --dataset rows.jsonl --set data.max_seq_len=96",
        "generate --prompt a --max-new-tokens 2",
        "export --format gguf --output adapter.gguf",
        "merge --output merged",
    ];
    let words = |text: String| text.split(' ').map(str::to_owned).collect();
    let command = |end: &str| {
        let (verb, rest) = end.split_once(' ').unwrap();
        words(format!("{verb} --model {model} --adapter {adapter} {rest}"))
    };
    ends.into_iter().map(command).collect()
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

const OTHER: &str = "error: cannot use adapter [DIR]/out with this model
  caused by: it was trained on `model` (digest [DIGEST]); the model is `other` (digest [DIGEST])
hint: give the model it was trained on as `--model`, or add `--force-base` to use it on this one
";

#[test]
fn an_adapter_is_used_on_its_own_base() {
    let dir = two_bases(&[]);
    for args in verbs("other", "out") {
        assert_eq!(refused(&dir, &strs(&args)), OTHER, "{args:?}");
    }
    assert!(!dir.path("merged").exists() && !dir.path("adapter.gguf").exists());
    for args in verbs("other", "out") {
        let args = [&strs(&args)[..], &["--force-base"]].concat();
        assert_eq!(
            about_the_base(&succeed(&dir, &args)),
            "warning: adapter [DIR]/out was trained on `model` (digest [DIGEST]); `--force-base` uses it on `other` (digest [DIGEST])"
        );
    }
    std::fs::remove_dir_all(dir.path("merged")).unwrap();
    std::fs::remove_file(dir.path("adapter.gguf")).unwrap();
    // The same model under another name.
    copy_folder(&dir.path("model"), &dir.path("renamed"));
    for args in verbs("renamed", "out") {
        assert_eq!(about_the_base(&succeed(&dir, &strs(&args))), "", "{args:?}");
    }
}

#[test]
fn an_adapter_of_peft_cannot_be_checked() {
    let dir = TestDir::new();
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    for args in verbs("model", "adapter") {
        assert_eq!(
            about_the_base(&succeed(&dir, &strs(&args))),
            "adapter [DIR]/adapter does not record the model it was trained on: the check against `model` (digest [DIGEST]) is skipped"
        );
    }
}

#[test]
fn a_run_is_resumed_on_its_own_base() {
    for recipe in ["lora", "full"] {
        let dir = TestDir::new();
        let swapped = |args: Vec<&'static str>| -> Vec<&str> {
            args.into_iter().map(|arg| if arg == "lora" { recipe } else { arg }).collect()
        };
        succeed(&dir, &swapped(lora(&["--set", "checkpoint.save_steps=2"])));
        change_weights(&dir, "model");
        let resume = swapped(lora(&["--set", "checkpoint.save_steps=2", "--resume", "out/checkpoint-2"]));
        assert_eq!(
            refused(&dir, &resume),
            "error: cannot use checkpoint out/checkpoint-2 with this model
  caused by: it was trained on `model` (digest [DIGEST]); the model is `model` (digest [DIGEST])
hint: give the model it was trained on as `--model`, or add `--force-base` to use it on this one
"
        );
        let said = succeed(&dir, &[&resume[..], &["--force-base"]].concat());
        assert!(said.contains("resuming from out/checkpoint-2"), "{said}");
        assert_eq!(about_the_base(&said).matches("; `--force-base` uses it on").count(), 1, "{said}");
    }
}

#[test]
fn a_saved_adapter_is_trained_further_on_its_own_base() {
    let dir = two_bases(&[]);
    let on = |output: &str, more: &[&'static str]| -> Vec<String> {
        let args = lora(&["--set", "adapter.path=out"]);
        let args = args.into_iter().chain(more.iter().copied());
        args.map(|arg| match arg {
            "model" => "other".to_owned(),
            "out" => output.to_owned(),
            arg => arg.to_owned(),
        })
        .collect()
    };
    assert_eq!(refused(&dir, &strs(&on("on", &[]))), OTHER);
    assert!(!dir.path("on").exists());
    let said = succeed(&dir, &strs(&on("on", &["--force-base"])));
    assert!(about_the_base(&said).starts_with("warning: adapter [DIR]/out was trained on `model`"), "{said}");
    // From now on the adapter's base is `other`.
    assert_eq!(about_the_base(&succeed(&dir, &strs(&verbs("other", "on")[0]))), "");
    assert!(refused(&dir, &strs(&verbs("model", "on")[0])).contains("it was trained on `other`"));
}

#[test]
fn a_quantized_base_is_the_model_it_was_quantized_from() {
    let over_nf4 = ["--set", "quantization.kind=nf4"];
    let dir = two_bases(&over_nf4);
    for model in ["model", "other"] {
        let output = format!("{model}-nf4");
        succeed(&dir, &["quantize", "--model", model, "--kind", "nf4", "--output", &output]);
    }
    let merge = |model: &str, adapter: &str, more: &[&str]| -> Vec<String> {
        let output = format!("merged-{model}-{adapter}-{}", more.len());
        let args = ["merge", "--model", model, "--adapter", adapter, "--output", &output];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    };
    // Trained over codes that the run quantized from the original model.
    for base in ["original", "quantized"] {
        let said = succeed(&dir, &strs(&merge("model", "out", &["--base", base])));
        assert!(!said.contains("warning") && !said.contains("not checked"), "{said}");
        std::fs::remove_dir_all(dir.path("merged-model-out-2")).unwrap();
        assert_eq!(refused(&dir, &strs(&merge("other", "out", &["--base", base]))), OTHER);
    }
    succeed(&dir, &strs(&merge("model-nf4", "out", &[])));
    let error = refused(&dir, &strs(&merge("other-nf4", "out", &[])));
    assert!(
        error.contains("it was trained on `model` (digest [DIGEST]); the model is `other-nf4`"),
        "{error}"
    );

    // Trained over a quantized checkpoint.
    let args: Vec<String> = lora(&[])
        .into_iter()
        .map(|arg| match arg {
            "model" => "model-nf4".to_owned(),
            "out" => "over".to_owned(),
            arg => arg.to_owned(),
        })
        .collect();
    succeed(&dir, &strs(&args));
    succeed(&dir, &strs(&merge("model-nf4", "over", &[])));
    let said = succeed(&dir, &strs(&merge("model", "over", &[])));
    assert_eq!(about_the_base(&said), "");
    assert!(said.contains("the adapter was trained over the quantized checkpoint `model-nf4`"), "{said}");
    let error = refused(&dir, &strs(&merge("other", "over", &[])));
    assert!(
        error.contains("it was trained on `model-nf4` (digest [DIGEST]); the model is `other`"),
        "{error}"
    );
    refused(&dir, &strs(&merge("other-nf4", "over", &[])));
}

#[test]
fn random_weights_are_a_base_of_their_own() {
    let dir = TestDir::new();
    succeed(&dir, &lora(&["--set", "model.init=random", "--set", "train.seed=3"]));
    let eval = |more: &[&'static str]| -> Vec<&str> {
        let args = ["eval", "--model", "model", "--adapter", "out", "--dataset", "rows.jsonl"];
        [&args[..], more].concat()
    };
    assert!(refused(&dir, &eval(&[])).contains("cannot use adapter [DIR]/out with this model"));
    let random = ["--set", "model.init=random", "--set"];
    assert_eq!(about_the_base(&succeed(&dir, &eval(&[&random[..], &["train.seed=3"]].concat()))), "");
    assert!(refused(&dir, &eval(&[&random[..], &["train.seed=4"]].concat())).contains("with this model"));
}
