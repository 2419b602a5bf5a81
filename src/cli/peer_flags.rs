//! Hints for flags of other trainers, such as `--learning_rate`, and for recipe keys typed as
//! flags.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::settings::SETTINGS;
use crate::recipe::key_of_peers;

/// Flags of other trainers and the flags of finetune for the same purpose.
const FLAGS: [(&str, &str); 12] = [
    ("output_dir", "--output DIR"),
    ("out_dir", "--output DIR"),
    ("model_name_or_path", "--model MODEL"),
    ("base_model", "--model MODEL"),
    ("dataset_name", "--dataset DATASET"),
    ("train_file", "--dataset DATASET"),
    ("validation_file", "--eval-dataset DATASET"),
    ("max_samples", "--dataset 'FILE?limit=1000'"),
    ("dataset_text_field", "--dataset 'FILE?text=COLUMN'"),
    ("resume_from_checkpoint", "--resume [DIR]"),
    ("config", "--recipe RECIPE"),
    ("adapter_name_or_path", "--set adapter.path=DIR"),
];

/// Returns whether the first word of a command line belongs to training or planning.
pub(super) fn is_for_training(first: &str) -> bool {
    first.starts_with('-') || ["train", "plan"].contains(&first)
}

/// Replaces clap's suggestion for an unknown argument by finetune's own flag, if one exists.
pub(super) fn explain(error: &mut clap::Error) {
    if error.kind() != ErrorKind::UnknownArgument {
        return;
    }
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidArg) else { return };
    let Some(ours) = ours(typed) else { return };
    for guess in [ContextKind::SuggestedArg, ContextKind::SuggestedValue, ContextKind::SuggestedSubcommand] {
        error.remove(guess);
    }
    let tip = StyledStr::from(format!("write `{ours}`"));
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
}

/// Returns finetune's flags for the argument `typed`, as the user types them.
fn ours(typed: &str) -> Option<String> {
    let typed = typed.strip_prefix("--")?;
    let typed = typed.split_once('=').map_or(typed, |(name, _)| name);
    let set = |section: &str, key: &str| {
        let flag = SETTINGS.iter().find(|(_, s, k)| (*s, *k) == (section, key)).map(|(flag, ..)| *flag);
        let long = format!("--set {section}.{key}=VALUE");
        flag.map_or(long.clone(), |flag| format!("{flag} VALUE` or `{long}"))
    };
    if let Some((section, key)) = typed.split_once('.') {
        let known = key_of_peers(key).filter(|(theirs, _)| *theirs == section);
        return known.map(|(section, key)| set(section, key));
    }
    let name = typed.replace('-', "_");
    let flag = FLAGS.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| (*ours).to_owned());
    flag.or_else(|| key_of_peers(&name).map(|(section, key)| set(section, key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_peers_lead_to_ours() {
        for (typed, wanted) in [
            ("--learning_rate", "--lr VALUE` or `--set optimizer.learning_rate=VALUE"),
            ("--num-train-epochs", "--epochs VALUE` or `--set train.epochs=VALUE"),
            ("--per_device_train_batch_size=4", "--batch VALUE` or `--set train.micro_batch_size=VALUE"),
            ("--output_dir", "--output DIR"),
            ("--warmup-ratio", "--set scheduler.warmup_ratio=VALUE"),
            ("--max_samples", "--dataset 'FILE?limit=1000'"),
            ("--val_set_size", "--set data.eval_split=VALUE"),
            ("--train.epochs", "--epochs VALUE` or `--set train.epochs=VALUE"),
        ] {
            assert_eq!(ours(typed).as_deref(), Some(wanted), "{typed}");
        }
        assert_eq!(ours("--colour"), None);
        assert_eq!(ours("stray"), None);
    }
}
