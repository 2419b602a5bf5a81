//! The error for a folder without weights that finetune reads.

use std::path::Path;

use super::{INDEX_FILE, MODEL_FILE};
use crate::error::Error;

/// Returns the error for a `folder` without safetensors weights, by its other contents.
pub(super) fn no_weights(folder: &Path) -> Error {
    let failed = Error::user(format!("cannot read a model from {}", folder.display()));
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => {
            return Error::io("read a model from", folder, &error).hint(
                "give a folder that holds config.json and the weights, or a hub id such as `org/name`",
            );
        }
    };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let with = |extensions: &[&str]| {
        let has_extension = |name: &&String| {
            let extension = Path::new(name.as_str()).extension();
            extension.is_some_and(|extension| {
                extensions.iter().any(|wanted| extension.eq_ignore_ascii_case(wanted))
            })
        };
        names.iter().filter(has_extension).map(String::as_str).take(3).collect::<Vec<_>>().join(", ")
    };
    let pickles = with(&["bin", "pth", "pt", "ckpt", "pkl"]);
    let ggufs = with(&["gguf"]);
    let shown = folder.display();
    if names.iter().any(|name| name == "adapter_config.json") {
        failed
            .because("it holds a PEFT adapter, not a model")
            .hint(format!(
                "give the base model, and the adapter as `--adapter {shown}` (in training `--set adapter.path={shown}`)"
            ))
    } else if !pickles.is_empty() {
        failed
            .because(format!(
                "its weights are pickle files ({pickles}), which can run code when opened; accepted: {MODEL_FILE}, or {INDEX_FILE} and its shards"
            ))
            .hint(format!(
                "convert it once with Python: python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{shown}').save_pretrained('{shown}-safetensors')\""
            ))
    } else if !ggufs.is_empty() {
        failed
            .because(format!(
                "its weights are GGUF ({ggufs}); accepted: {MODEL_FILE}, or {INDEX_FILE} and its shards"
            ))
            .hint("give the path of one GGUF file itself as the model")
    } else {
        failed
            .because(format!("it has neither {MODEL_FILE} nor {INDEX_FILE}"))
            .hint("give a folder that holds config.json and the weights, or a hub id such as `org/name`")
    }
}
