//! Which key a person probably meant.

use super::Recipe;

/// Keys of other trainers (transformers, PEFT, TRL, axolotl, torchtune, LLaMA-Factory) and ours.
const OTHER_NAMES: [(&str, &str, &str); 24] = [
    ("base_model", "model", "id"),
    ("model_name_or_path", "model", "id"),
    ("lora_r", "adapter", "r"),
    ("lora_rank", "adapter", "r"),
    ("rank", "adapter", "r"),
    ("lora_target", "adapter", "target_modules"),
    ("lora_attn_modules", "adapter", "target_modules"),
    ("init_lora_weights", "adapter", "init"),
    ("dataset", "data", "train"),
    ("datasets", "data", "train"),
    ("cutoff_len", "data", "max_seq_len"),
    ("sequence_len", "data", "max_seq_len"),
    ("max_length", "data", "max_seq_len"),
    ("num_epochs", "train", "epochs"),
    ("num_train_epochs", "train", "epochs"),
    ("batch_size", "train", "micro_batch_size"),
    ("per_device_train_batch_size", "train", "micro_batch_size"),
    ("clip_grad_norm", "train", "max_grad_norm"),
    ("gradient_checkpointing", "train", "recompute"),
    ("lr", "optimizer", "learning_rate"),
    ("lr_scheduler", "scheduler", "kind"),
    ("lr_scheduler_type", "scheduler", "kind"),
    ("num_warmup_steps", "scheduler", "warmup_steps"),
    ("logging_steps", "log", "every_steps"),
];

/// Longest name that is compared, in bytes: no key or choice comes near it.
const LONGEST: usize = 64;

/// The entry of `names` most like `name`, if any is alike at all.
pub(crate) fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST {
        return None;
    }
    let name = name.to_lowercase();
    let alike = |other: &'a str| match strsim::damerau_levenshtein(&name, other) {
        // One slip of the finger, which weighs too much in a short name.
        1 => (1.0, other),
        _ => (strsim::jaro_winkler(&name, other), other),
    };
    let best = names.into_iter().map(alike).max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.filter(|(likeness, _)| *likeness > 0.75).map(|(_, other)| other)
}

/// The section and key that `section.key` probably means: the same name elsewhere, another trainer's name for it,
/// or a like name in the section.
pub(super) fn nearest_key(section: &str, key: &str) -> Option<(&'static str, &'static str)> {
    let recipe = Recipe::complete();
    let sections = recipe.sections();
    let mut all =
        sections.iter().flat_map(|section| section.keys().iter().map(|key| (section.name(), key.name)));
    let elsewhere = all.find(|(_, name)| *name == key);
    let translated = OTHER_NAMES.iter().find(|(theirs, ..)| *theirs == key).map(|(_, s, k)| (*s, *k));
    let here = || {
        let section = sections.iter().find(|known| known.name() == section)?;
        let name = nearest(key, section.keys().iter().map(|key| key.name))?;
        Some((section.name(), name))
    };
    elsewhere.or(translated).or_else(here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_lead_to_keys_that_exist() {
        let mut recipe = Recipe::complete();
        for (theirs, section, key) in OTHER_NAMES {
            let keys = recipe.section_mut(section).unwrap().keys();
            assert!(keys.iter().any(|known| known.name == key), "{section}.{key}");
            assert_eq!(nearest_key("train", theirs), Some((section, key)));
        }
    }

    #[test]
    fn alike_elsewhere_or_nothing() {
        assert_eq!(nearest_key("train", "epoch"), Some(("train", "epochs")));
        assert_eq!(nearest_key("train", "learning_rate"), Some(("optimizer", "learning_rate")));
        assert_eq!(nearest_key("train", "zzz"), None);
        assert_eq!(nearest("lgo", ["log", "data"]), Some("log"));
        assert_eq!(nearest("qlroa", ["lora", "qlora", "full"]), Some("qlora"));
    }
}
