//! Rows of new tokens that train beside an adapter: their tables, and the settings that exclude
//! them.

use crate::adapter::Target;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::weights::{EMBED_TOKENS_MODULE, LM_HEAD_MODULE};

/// Returns the tables whose rows for new tokens train beside an adapter that saves the modules
/// `saved` whole. A tied head follows the embedding. Names are those of PEFT's
/// `trainable_token_indices`.
pub(super) fn tables_with_rows(config: &ModelConfig, saved: &[String]) -> Vec<&'static str> {
    let whole = |module: &str| saved.iter().any(|saved| saved == module);
    let (embed, head) = (whole(EMBED_TOKENS_MODULE), whole(LM_HEAD_MODULE));
    let own_head = !config.tie_word_embeddings || embed || head;
    [("embed_tokens", !embed), (LM_HEAD_MODULE, own_head && !head)]
        .into_iter()
        .filter_map(|(table, trains)| trains.then_some(table))
        .collect()
}

/// Refuses LoRA on a table with trained rows: PEFT trains only one of the two.
pub(super) fn refuse_lora_beside_rows(tables: &[&str], targets: &[Target]) -> Result<()> {
    let on = |table: &&&str| targets.iter().any(|target| target.name.ends_with(**table));
    match tables.iter().find(on) {
        None => Ok(()),
        Some(table) => Err(Error::user("cannot train new tokens")
            .because(format!(
                "`{table}` has LoRA (`adapter.target_modules` names it), and the rows of the new tokens would train in it too"
            ))
            .hint(format!(
                "remove it from `target_modules`, or train it whole: `modules_to_save = [{table:?}]`"
            ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_trains_whole_needs_no_rows() {
        let config = |tied: bool| {
            let text = format!(
                r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
                    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
                    "max_position_embeddings": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": {tied}}}"#
            );
            ModelConfig::from_json(&text, "config.json").expect("valid")
        };
        let of = |tied, saved: &[&str]| {
            let saved: Vec<String> = saved.iter().map(|module| (*module).to_owned()).collect();
            tables_with_rows(&config(tied), &saved)
        };
        assert_eq!(of(true, &[]), ["embed_tokens"]);
        assert_eq!(of(false, &[]), ["embed_tokens", "lm_head"]);
        assert_eq!(of(false, &["lm_head"]), ["embed_tokens"]);
        assert_eq!(of(true, &["model.embed_tokens"]), ["lm_head"]);
        assert!(of(true, &["model.embed_tokens", "lm_head"]).is_empty());
    }
}
