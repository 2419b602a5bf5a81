//! Names of keys and values of other trainers (transformers, PEFT, TRL, axolotl, torchtune,
//! LLaMA-Factory, Unsloth, mlx-lm), with their equivalents here. Error hints use them, and
//! docs/recipes.md lists them.

/// Sections and keys, each with the equivalent keys of other trainers.
pub(super) const KEYS: &[(&str, &str, &[&str])] = &[
    ("model", "id", &["base_model", "model_name_or_path", "model_name", "model_id"]),
    ("model", "dtype", &["torch_dtype", "compute_dtype", "bf16", "fp16"]),
    ("model", "attention", &["attn_implementation", "flash_attn", "flash_attention"]),
    ("quantization", "kind", &["load_in_4bit", "load_in_8bit", "quantization_bit", "bnb_4bit_quant_type"]),
    ("quantization", "double_quant", &["bnb_4bit_use_double_quant"]),
    ("adapter", "r", &["lora_r", "lora_rank", "rank"]),
    ("adapter", "lora_alpha", &["alpha"]),
    ("adapter", "lora_dropout", &["dropout"]),
    ("adapter", "target_modules", &["lora_target", "lora_target_modules", "lora_attn_modules"]),
    ("adapter", "init", &["init_lora_weights"]),
    ("adapter", "path", &["adapter_name_or_path", "lora_model_dir"]),
    ("adapter", "modules_to_save", &["additional_target"]),
    ("data", "train", &["dataset", "datasets", "train_file", "dataset_name"]),
    ("data", "eval", &["test_datasets", "eval_dataset", "validation_file"]),
    ("data", "eval_split", &["val_set_size", "test_size", "validation_split", "val_size"]),
    ("data", "max_seq_len", &["cutoff_len", "sequence_len", "seq_len", "max_seq_length", "max_length"]),
    ("data", "packing", &["sample_packing", "packed"]),
    (
        "data",
        "train_on",
        &[
            "train_on_inputs",
            "train_on_input",
            "completion_only_loss",
            "assistant_only_loss",
            "roles_to_train",
        ],
    ),
    ("data", "chat_template", &["template"]),
    ("objective", "kind", &["rl", "stage"]),
    ("objective", "loss_type", &["pref_loss", "dpo_loss_type", "rpo_alpha", "pref_ftx"]),
    ("objective", "beta", &["rl_beta", "dpo_beta", "pref_beta", "kto_beta", "orpo_alpha", "orpo_beta"]),
    ("objective", "label_smoothing", &["dpo_label_smoothing"]),
    ("objective", "ld_alpha", &["pref_ld_alpha"]),
    ("objective", "use_weighting", &["dpo_use_weighting"]),
    ("objective", "desirable_weight", &["kto_desirable_weight", "kto_chosen_weight"]),
    ("objective", "undesirable_weight", &["kto_undesirable_weight", "kto_rejected_weight"]),
    ("train", "epochs", &["num_epochs", "num_train_epochs"]),
    ("train", "max_steps", &["iters"]),
    ("train", "micro_batch_size", &["batch_size", "per_device_train_batch_size"]),
    ("train", "gradient_accumulation_steps", &["gradient_accumulation", "grad_accumulation_steps"]),
    ("train", "max_grad_norm", &["clip_grad_norm", "gradient_clipping"]),
    (
        "train",
        "recompute",
        &[
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "use_reentrant",
            "grad_checkpoint",
            "enable_activation_checkpointing",
            "activation_checkpointing",
            "activation_checkpoint",
            "selective_ac_option",
            "recompute_granularity",
            "recompute_num_layers",
        ],
    ),
    ("train", "neftune_alpha", &["neftune_noise_alpha", "noisy_embedding_alpha"]),
    ("optimizer", "learning_rate", &["lr"]),
    ("optimizer", "kind", &["optim"]),
    ("optimizer", "eps", &["adam_epsilon"]),
    ("optimizer", "lora_plus_ratio", &["loraplus_lr_ratio"]),
    ("scheduler", "kind", &["lr_scheduler", "lr_scheduler_type"]),
    ("scheduler", "warmup_steps", &["num_warmup_steps"]),
    ("scheduler", "min_lr_ratio", &["cosine_min_lr_ratio"]),
    ("log", "every_steps", &["logging_steps", "log_every_n_steps", "steps_per_report"]),
    ("log", "command", &["report_to", "wandb_project", "mlflow", "mlflow_experiment"]),
    ("checkpoint", "keep_last", &["save_total_limit"]),
    ("checkpoint", "save_steps", &["save_every", "saves_per_epoch"]),
    (
        "eval",
        "steps",
        &["eval_steps", "steps_per_eval", "eval_strategy", "evaluation_strategy", "evals_per_epoch"],
    ),
    ("eval", "keep_best", &["load_best_model_at_end", "save_best"]),
    ("eval", "patience", &["early_stopping_patience", "early_stopping_rounds"]),
];

/// Keys in [`KEYS`] that correspond to one value of the equivalent key, in TOML.
const KEYS_OF_ONE_VALUE: &[(&str, &str)] = &[
    ("rpo_alpha", CHOSEN_TOO),
    ("pref_ftx", CHOSEN_TOO),
    ("saves_per_epoch", "\"epoch\""),
    ("evals_per_epoch", "\"epoch\""),
    ("wandb_project", "[\"python3\", \"integrations/wandb.py\"]"),
    ("mlflow", MLFLOW),
    ("mlflow_experiment", MLFLOW),
];
const CHOSEN_TOO: &str = "[\"sigmoid\", \"sft\"]";
const MLFLOW: &str = "[\"python3\", \"integrations/mlflow.py\"]";

/// Keys of [`KEYS`] that finetune itself had: the recipe.toml of an older run may hold them.
const REMOVED: [(&str, &str); 2] = [("log", "mlflow"), ("log", "mlflow_experiment")];

/// Keys of other trainers, each with the entry for a table of `data.train`.
const KEYS_OF_A_SOURCE: &[(&str, &str)] =
    &[("max_samples", "limit = 1000"), ("dataset_text_field", "columns = { text = \"COLUMN\" }")];

/// Sections of other trainers, each with the equivalent one.
const SECTIONS: &[(&str, &str)] = &[
    ("lora", "adapter"),
    ("lora_config", "adapter"),
    ("peft", "adapter"),
    ("dataset", "data"),
    ("datasets", "data"),
    ("training", "train"),
    ("trainer", "train"),
    ("training_args", "train"),
    ("lr_scheduler", "scheduler"),
    ("bnb", "quantization"),
    ("bitsandbytes", "quantization"),
    ("quant", "quantization"),
    ("logging", "log"),
    ("distributed", "parallel"),
    ("fsdp", "parallel"),
    ("evaluation", "eval"),
];

/// Values of other trainers: section and key, their values in lower case, the hint.
const VALUES: &[(&str, &[&str], &str)] = &[
    ("model.dtype", &["bfloat16", "torch.bfloat16"], "write `dtype = \"bf16\"`"),
    ("model.dtype", &["float32", "fp32", "torch.float32"], "write `dtype = \"f32\"`"),
    ("model.dtype", &["float16", "torch.float16", "fp16", "f16", "half"], F16),
    (
        "model.attention",
        &["sdpa", "flash_attention_2", "flash_attention_3", "flash_attn", "xformers"],
        "write `attention = \"flash\"`",
    ),
    ("quantization.kind", &["int4", "4bit", "4", "q4"], FOUR_BITS),
    ("quantization.kind", &["8bit", "8"], "write `kind = \"int8\"`"),
    ("adapter.init", &["pissa_niter_4"], "write `init = \"pissa\"`"),
    ("adapter.init", &["true"], "write `init = \"default\"`"),
    ("data.train_on", &["completion", "completions"], COMPLETIONS),
    ("data.train_on", &["assistant_only"], "write `train_on = \"assistant\"`"),
    ("data.train_on", &["inputs"], "write `train_on = \"all\"`"),
    ("data.format", &["chat_template", "chat", "chatml", "openai"], "write `format = \"messages\"`"),
    ("data.format", &["completion"], "write `format = \"text\"` for plain text, or \"prompt_completion\""),
    ("objective.kind", &["sft", "pt", "causal_lm"], "write `kind = \"cross_entropy\"`"),
    ("objective.kind", &["rm", "reward", "reward_model"], "not available: finetune trains no reward models"),
    ("objective.kind", &["ipo"], "write `kind = \"dpo\"` and `loss_type = [\"ipo\"]`"),
    (
        "objective.kind",
        &["ppo", "grpo", "gdpo", "rloo", "ebft"],
        "not available: no answers of the model are trained",
    ),
    ("objective.loss_type", &["orpo"], "write `kind = \"orpo\"` and no `loss_type`"),
    ("objective.loss_type", &["kto_pair"], "write `kind = \"kto\"`, which takes pairs, and no `loss_type`"),
    ("train.recompute", &["true", "unsloth", "full"], "write `recompute = \"block\"`"),
    ("train.recompute", &["false"], "write `recompute = \"none\"`"),
    ("train.recompute", &["op", "core_attn"], "write `recompute = \"selective\"`"),
    ("train.recompute", &["uniform"], "write `recompute = \"every:2\"` for runs of 2 blocks"),
    ("train.recompute", &["sqrt"], "write `recompute = \"every:sqrt\"`"),
    ("optimizer.kind", &["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit"], EIGHT_BIT_STATE),
    ("optimizer.kind", &["adamw_torch", "adamw_torch_fused", "adamw_hf"], "write `kind = \"adamw\"`"),
    (
        "optimizer.kind",
        &["paged_adamw_32bit"],
        "write `kind = \"adamw\"` and `offload = \"optimizer\"` under `[parallel]`",
    ),
    ("optimizer.state", &["8bit"], "write `state = \"int8\"`"),
    ("scheduler.kind", &["wsd"], "write `kind = \"warmup_stable_decay\"`"),
    ("scheduler.kind", &["warmup_cosine", "cosine_decay"], "write `kind = \"cosine\"`"),
    ("scheduler.kind", &["linear_decay"], "write `kind = \"linear\"`"),
    ("scheduler.kind", &["rex"], "not available; \"cosine\" is the nearest"),
    (
        "parallel.strategy",
        &["deepspeed"],
        "write `strategy = \"fsdp\"` for ZeRO-3, \"zero1\" or \"zero2\" for the others",
    ),
    ("parallel.strategy", &["zero3", "fsdp2", "full_shard"], "write `strategy = \"fsdp\"`"),
    ("parallel.strategy", &["hybrid_shard"], "write `strategy = \"hsdp\"`"),
    ("parallel.offload", &["cpu"], "write `offload = \"params\"`, or \"optimizer\" for its state alone"),
];

const F16: &str = "write `dtype = \"bf16\"`: computing in f16 is not available";
const FOUR_BITS: &str = "write `kind = \"nf4\"` (or \"fp4\") for 4 bits";
const EIGHT_BIT_STATE: &str = "write `kind = \"adamw\"` and `state = \"int8\"`";
const COMPLETIONS: &str = "remove `train_on`: only completions are trained by default (\"assistant\" means the answers of any format)";

/// The TOML value of the equivalent key that the key `theirs` of another trainer implies; none if
/// `theirs` has its own value.
pub(super) fn value_of_key(theirs: &str) -> Option<&'static str> {
    KEYS_OF_ONE_VALUE.iter().find(|(key, _)| *key == theirs).map(|(_, value)| *value)
}

/// True if an earlier version of finetune had this key.
pub(super) fn is_removed(section: &str, key: &str) -> bool {
    REMOVED.contains(&(section, key))
}

/// Hint for a key of another trainer that belongs into a table of `data.train`.
pub(super) fn key_of_a_source(theirs: &str) -> Option<String> {
    let known = KEYS_OF_A_SOURCE.iter().find(|(key, _)| *key == theirs);
    known.map(|(_, ours)| format!("write `{ours}` in a `[[data.train]]` table"))
}

/// The equivalent section for a section of another trainer.
pub(super) fn section_of_peers(section: &str) -> Option<&'static str> {
    SECTIONS.iter().find(|(theirs, _)| *theirs == section).map(|(_, ours)| *ours)
}

/// Hint for a value of another trainer.
pub(super) fn value_of_peers(section: &str, key: &str, value: &str) -> Option<&'static str> {
    let (name, value) = (format!("{section}.{key}"), value.to_lowercase());
    let has = |theirs: &[&str]| theirs.contains(&value.as_str());
    VALUES.iter().find(|(at, theirs, _)| *at == name && has(theirs)).map(|(.., hint)| *hint)
}

/// Language of a recipe whose first non-empty line is YAML or JSON.
pub(super) fn other_language(text: &str) -> Option<&'static str> {
    let mut lines = text.lines().map(str::trim_end);
    let first = lines.find(|line| !line.is_empty() && !line.trim_start().starts_with('#'))?;
    if first.starts_with('{') {
        return Some("JSON");
    }
    let is_name =
        |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c)) && !name.is_empty();
    let is_mapping = first
        .split_once(':')
        .is_some_and(|(name, value)| is_name(name) && (value.is_empty() || value.starts_with(' ')));
    (first == "---" || first.starts_with("- ") || is_mapping).then_some("YAML")
}

#[cfg(test)]
mod tests {
    use super::super::Recipe;
    use super::super::row_source::KEYS as SOURCE_KEYS;
    use super::*;

    #[test]
    fn names_of_peers_lead_to_sections_and_keys_that_exist() {
        assert!(
            SECTIONS.iter().all(|(theirs, ours)| Recipe::has_section(ours) && !Recipe::has_section(theirs))
        );
        for (at, ..) in VALUES {
            let (section, key) = at.split_once('.').unwrap();
            let keys = Recipe::complete().section_mut(section).unwrap().keys();
            assert!(keys.iter().any(|known| known.name == key), "{at}");
        }
        for (theirs, ours) in KEYS_OF_A_SOURCE {
            let (key, _) = ours.split_once(" = ").unwrap();
            assert!(SOURCE_KEYS.contains(&key), "{ours}");
            assert!(ours.parse::<toml::Table>().is_ok(), "{ours}");
            assert!(KEYS.iter().all(|(.., keys)| !keys.contains(theirs)), "{theirs}");
        }
        for (theirs, value) in KEYS_OF_ONE_VALUE {
            let (section, key, _) = KEYS.iter().find(|(.., keys)| keys.contains(theirs)).unwrap();
            let value = format!("key = {value}").parse::<toml::Table>().unwrap().remove("key").unwrap();
            let mut recipe = Recipe::complete();
            let section = recipe.section_mut(section).unwrap();
            assert!(section.set(key, &value, std::path::Path::new("/")).is_ok(), "{theirs}");
        }
    }

    #[test]
    fn other_languages_are_told_by_their_first_line() {
        assert_eq!(other_language("# axolotl\n\nbase_model: x\n"), Some("YAML"));
        assert_eq!(other_language("---\nmodel:\n"), Some("YAML"));
        assert_eq!(other_language("{\n"), Some("JSON"));
        assert_eq!(other_language("[model]\nid = \"a: b\"\n"), None);
        assert_eq!(other_language("id = \"a: b\"\n"), None);
        assert_eq!(other_language(""), None);
    }
}
