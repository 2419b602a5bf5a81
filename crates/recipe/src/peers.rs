//! Names of keys and values of other trainers (transformers, PEFT, TRL, axolotl, torchtune,
//! LLaMA-Factory, Unsloth, mlx-lm), with their equivalents here. Error hints use them, and
//! docs/recipes.md lists them.

/// Keys of other trainers, each with the equivalent section and key.
pub(super) const KEYS: &[(&str, &str, &str)] = &[
    ("base_model", "model", "id"),
    ("model_name_or_path", "model", "id"),
    ("model_name", "model", "id"),
    ("model_id", "model", "id"),
    ("torch_dtype", "model", "dtype"),
    ("compute_dtype", "model", "dtype"),
    ("bf16", "model", "dtype"),
    ("fp16", "model", "dtype"),
    ("attn_implementation", "model", "attention"),
    ("flash_attn", "model", "attention"),
    ("flash_attention", "model", "attention"),
    ("load_in_4bit", "quantization", "kind"),
    ("load_in_8bit", "quantization", "kind"),
    ("quantization_bit", "quantization", "kind"),
    ("bnb_4bit_quant_type", "quantization", "kind"),
    ("bnb_4bit_use_double_quant", "quantization", "double_quant"),
    ("lora_r", "adapter", "r"),
    ("lora_rank", "adapter", "r"),
    ("rank", "adapter", "r"),
    ("alpha", "adapter", "lora_alpha"),
    ("dropout", "adapter", "lora_dropout"),
    ("lora_target", "adapter", "target_modules"),
    ("lora_target_modules", "adapter", "target_modules"),
    ("lora_attn_modules", "adapter", "target_modules"),
    ("init_lora_weights", "adapter", "init"),
    ("adapter_name_or_path", "adapter", "path"),
    ("lora_model_dir", "adapter", "path"),
    ("additional_target", "adapter", "modules_to_save"),
    ("dataset", "data", "train"),
    ("datasets", "data", "train"),
    ("train_file", "data", "train"),
    ("dataset_name", "data", "train"),
    ("test_datasets", "data", "eval"),
    ("eval_dataset", "data", "eval"),
    ("validation_file", "data", "eval"),
    ("val_set_size", "data", "eval_split"),
    ("test_size", "data", "eval_split"),
    ("validation_split", "data", "eval_split"),
    ("val_size", "data", "eval_split"),
    ("cutoff_len", "data", "max_seq_len"),
    ("sequence_len", "data", "max_seq_len"),
    ("seq_len", "data", "max_seq_len"),
    ("max_seq_length", "data", "max_seq_len"),
    ("max_length", "data", "max_seq_len"),
    ("sample_packing", "data", "packing"),
    ("packed", "data", "packing"),
    ("train_on_inputs", "data", "train_on"),
    ("train_on_input", "data", "train_on"),
    ("completion_only_loss", "data", "train_on"),
    ("assistant_only_loss", "data", "train_on"),
    ("roles_to_train", "data", "train_on"),
    ("template", "data", "chat_template"),
    ("num_epochs", "train", "epochs"),
    ("num_train_epochs", "train", "epochs"),
    ("iters", "train", "max_steps"),
    ("batch_size", "train", "micro_batch_size"),
    ("per_device_train_batch_size", "train", "micro_batch_size"),
    ("gradient_accumulation", "train", "gradient_accumulation_steps"),
    ("grad_accumulation_steps", "train", "gradient_accumulation_steps"),
    ("clip_grad_norm", "train", "max_grad_norm"),
    ("gradient_clipping", "train", "max_grad_norm"),
    ("gradient_checkpointing", "train", "recompute"),
    ("grad_checkpoint", "train", "recompute"),
    ("enable_activation_checkpointing", "train", "recompute"),
    ("lr", "optimizer", "learning_rate"),
    ("optim", "optimizer", "kind"),
    ("adam_epsilon", "optimizer", "eps"),
    ("loraplus_lr_ratio", "optimizer", "lora_plus_ratio"),
    ("lr_scheduler", "scheduler", "kind"),
    ("lr_scheduler_type", "scheduler", "kind"),
    ("num_warmup_steps", "scheduler", "warmup_steps"),
    ("cosine_min_lr_ratio", "scheduler", "min_lr_ratio"),
    ("logging_steps", "log", "every_steps"),
    ("log_every_n_steps", "log", "every_steps"),
    ("steps_per_report", "log", "every_steps"),
    ("report_to", "log", "command"),
    ("wandb_project", "log", "command"),
    ("mlflow", "log", "command"),
    ("mlflow_experiment", "log", "command"),
    ("save_total_limit", "checkpoint", "keep_last"),
    ("save_every", "checkpoint", "save_steps"),
    ("saves_per_epoch", "checkpoint", "save_steps"),
    ("eval_steps", "eval", "steps"),
    ("steps_per_eval", "eval", "steps"),
    ("eval_strategy", "eval", "steps"),
    ("evaluation_strategy", "eval", "steps"),
    ("evals_per_epoch", "eval", "steps"),
    ("load_best_model_at_end", "eval", "keep_best"),
    ("save_best", "eval", "keep_best"),
    ("early_stopping_patience", "eval", "patience"),
    ("early_stopping_rounds", "eval", "patience"),
];

/// Keys in [`KEYS`] that correspond to one value of the equivalent key, in TOML.
const KEYS_OF_ONE_VALUE: &[(&str, &str)] = &[
    ("saves_per_epoch", "\"epoch\""),
    ("evals_per_epoch", "\"epoch\""),
    ("wandb_project", "[\"python3\", \"integrations/wandb.py\"]"),
    ("mlflow", MLFLOW),
    ("mlflow_experiment", MLFLOW),
];
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

/// Values of other trainers: section and key, their value in lower case, the hint.
const VALUES: &[(&str, &str, &str)] = &[
    ("model.dtype", "bfloat16", "write `dtype = \"bf16\"`"),
    ("model.dtype", "torch.bfloat16", "write `dtype = \"bf16\"`"),
    ("model.dtype", "float32", "write `dtype = \"f32\"`"),
    ("model.dtype", "fp32", "write `dtype = \"f32\"`"),
    ("model.dtype", "torch.float32", "write `dtype = \"f32\"`"),
    ("model.dtype", "float16", F16),
    ("model.dtype", "torch.float16", F16),
    ("model.dtype", "fp16", F16),
    ("model.dtype", "f16", F16),
    ("model.dtype", "half", F16),
    ("model.attention", "sdpa", "write `attention = \"flash\"`"),
    ("model.attention", "flash_attention_2", "write `attention = \"flash\"`"),
    ("model.attention", "flash_attention_3", "write `attention = \"flash\"`"),
    ("model.attention", "flash_attn", "write `attention = \"flash\"`"),
    ("model.attention", "xformers", "write `attention = \"flash\"`"),
    ("quantization.kind", "int4", FOUR_BITS),
    ("quantization.kind", "4bit", FOUR_BITS),
    ("quantization.kind", "4", FOUR_BITS),
    ("quantization.kind", "q4", FOUR_BITS),
    ("quantization.kind", "8bit", "write `kind = \"int8\"`"),
    ("quantization.kind", "8", "write `kind = \"int8\"`"),
    ("adapter.init", "pissa_niter_4", "write `init = \"pissa\"`"),
    ("adapter.init", "true", "write `init = \"default\"`"),
    ("data.train_on", "completion", COMPLETIONS),
    ("data.train_on", "completions", COMPLETIONS),
    ("data.train_on", "assistant_only", "write `train_on = \"assistant\"`"),
    ("data.train_on", "inputs", "write `train_on = \"all\"`"),
    ("data.format", "chat_template", "write `format = \"messages\"`"),
    ("data.format", "chat", "write `format = \"messages\"`"),
    ("data.format", "chatml", "write `format = \"messages\"`"),
    ("data.format", "openai", "write `format = \"messages\"`"),
    ("data.format", "completion", "write `format = \"text\"` for plain text, or \"prompt_completion\""),
    ("train.recompute", "true", "write `recompute = \"block\"`"),
    ("train.recompute", "unsloth", "write `recompute = \"block\"`"),
    ("train.recompute", "full", "write `recompute = \"block\"`"),
    ("train.recompute", "false", "write `recompute = \"none\"`"),
    ("optimizer.kind", "adamw_8bit", EIGHT_BIT_STATE),
    ("optimizer.kind", "adamw_bnb_8bit", EIGHT_BIT_STATE),
    ("optimizer.kind", "paged_adamw_8bit", EIGHT_BIT_STATE),
    ("optimizer.kind", "adamw8bit", EIGHT_BIT_STATE),
    ("optimizer.kind", "adamw_torch", "write `kind = \"adamw\"`"),
    ("optimizer.kind", "adamw_torch_fused", "write `kind = \"adamw\"`"),
    ("optimizer.kind", "adamw_hf", "write `kind = \"adamw\"`"),
    (
        "optimizer.kind",
        "paged_adamw_32bit",
        "write `kind = \"adamw\"` and `offload = \"optimizer\"` under `[parallel]`",
    ),
    ("optimizer.state", "8bit", "write `state = \"int8\"`"),
    ("scheduler.kind", "wsd", "write `kind = \"warmup_stable_decay\"`"),
    ("scheduler.kind", "warmup_cosine", "write `kind = \"cosine\"`"),
    ("scheduler.kind", "cosine_decay", "write `kind = \"cosine\"`"),
    ("scheduler.kind", "linear_decay", "write `kind = \"linear\"`"),
    ("scheduler.kind", "rex", "not available; \"cosine\" is the nearest"),
    (
        "parallel.strategy",
        "deepspeed",
        "write `strategy = \"fsdp\"` for ZeRO-3, \"zero1\" or \"zero2\" for the others",
    ),
    ("parallel.strategy", "zero3", "write `strategy = \"fsdp\"`"),
    ("parallel.strategy", "fsdp2", "write `strategy = \"fsdp\"`"),
    ("parallel.strategy", "full_shard", "write `strategy = \"fsdp\"`"),
    ("parallel.strategy", "hybrid_shard", "write `strategy = \"hsdp\"`"),
    ("parallel.offload", "cpu", "write `offload = \"params\"`, or \"optimizer\" for its state alone"),
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
    let found = KEYS_OF_A_SOURCE.iter().find(|(key, _)| *key == theirs);
    found.map(|(_, ours)| format!("write `{ours}` in a `[[data.train]]` table"))
}

/// The equivalent section for a section of another trainer.
pub(super) fn section_of_peers(section: &str) -> Option<&'static str> {
    SECTIONS.iter().find(|(theirs, _)| *theirs == section).map(|(_, ours)| *ours)
}

/// Hint for a value of another trainer.
pub(super) fn value_of_peers(section: &str, key: &str, value: &str) -> Option<&'static str> {
    let (name, value) = (format!("{section}.{key}"), value.to_lowercase());
    VALUES.iter().find(|(at, theirs, _)| *at == name && *theirs == value).map(|(.., hint)| *hint)
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
            assert!(KEYS.iter().all(|(key, ..)| key != theirs), "{theirs}");
        }
        for (theirs, value) in KEYS_OF_ONE_VALUE {
            let (_, section, key) = KEYS.iter().find(|(key, ..)| key == theirs).unwrap();
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
