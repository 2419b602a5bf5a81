//! Golden models and runs of all families. Those of the second set are in tests/golden/families,
//! made by tests/golden/scripts/make_families.py; those in packed formats are in
//! tests/golden/qbases, made by make_qbases.py and trim_qbases.py there.

use std::path::{Path, PathBuf};

/// Returns the path of a file or folder of a golden model or run: `models/tiny-llama`.
pub(crate) fn golden_of_family(path: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    [golden.join(path), golden.join("families").join(path), golden.join("qbases").join(path)]
        .into_iter()
        .find(|path| path.exists())
        .expect(path)
}

/// Returns the values of a parameter that make_families.py stores as a tensor of shape `stored`:
/// all, or of more than 512 values every k-th of them.
pub(crate) fn sample(values: Vec<f32>, stored: &[usize]) -> Vec<f32> {
    let (count, wanted) = (values.len(), stored.iter().product::<usize>());
    let step = if wanted == count { 1 } else { 3 * ((count / 256) | 1) };
    values.into_iter().step_by(step).collect()
}

/// Returns the names in a checkpoint of a parameter that transformers has in memory as `name`, in
/// the order of its values. It fuses gate and up of all experts, and renames those of Mixtral and
/// the router of Granite. `exists` tells whether a checkpoint has a name.
pub(crate) fn names_in_checkpoint(name: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    // Classes of transformers with other names than Llama's, and moved biases of routers.
    let renamed = [
        ("gpt_neox.layers.", "model.layers."),
        ("gpt_neox.embed_in.", "model.embed_tokens."),
        ("gpt_neox.final_layer_norm.", "model.norm."),
        ("transformer.h.", "model.layers."),
        ("transformer.word_embeddings.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        ("model.embedding_norm.", "model.norm."),
    ];
    let usual = renamed.iter().find_map(|(from, to)| Some(format!("{to}{}", name.strip_prefix(from)?)));
    let name = usual.as_deref().unwrap_or(name);
    if exists(name) {
        return vec![name.to_owned()];
    }
    let (prefix, layers) = match name.rsplit_once("experts.") {
        Some((prefix, "gate_up_proj")) => {
            (prefix, [["gate_proj", "up_proj"], ["w1", "w3"], ["gate_up_proj", ""]])
        }
        Some((prefix, "down_proj")) => (prefix, [["down_proj", ""], ["w2", ""], ["", ""]]),
        _ if name.contains(".router.") => return vec![name.replace(".router.", ".router.layer.")],
        _ => return vec![name.replace(".mlp.", ".block_sparse_moe.")],
    };
    // Granite stores them fused too, under other names.
    let layer = if name.ends_with("gate_up_proj") { "input" } else { "output" };
    let stacked = format!("{prefix}{layer}_linear.weight");
    if exists(&stacked) {
        return vec![stacked];
    }
    let places = [prefix.to_owned(), prefix.replace(".mlp.", ".block_sparse_moe."), prefix.to_owned()];
    let of_expert = |expert: usize| {
        let named = places.iter().zip(layers).flat_map(move |(prefix, layers)| {
            let layers = layers.into_iter().filter(|layer| !layer.is_empty());
            layers.map(move |layer| format!("{prefix}experts.{expert}.{layer}.weight"))
        });
        named.filter(|name| exists(name)).collect::<Vec<_>>()
    };
    (0..).map(of_expert).take_while(|names| !names.is_empty()).flatten().collect()
}
