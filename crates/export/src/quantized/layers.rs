//! The linear layers that a quantization changes.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::model::{self, ModelConfig, ModuleKind};

/// The linear layers of a model's blocks, quantized and skipped; head, embedding, routers of
/// experts and other gates are never quantized.
#[derive(Debug)]
pub struct LinearLayers {
    /// The names of the quantized layers.
    pub quantized: Vec<String>,
    /// The names of the skipped layers.
    pub skipped: Vec<String>,
    /// The names of `quantized`, as a set.
    by_name: HashSet<String>,
}

impl LinearLayers {
    /// Skips the layers that `skip` names: by the whole name, or by consecutive parts of it.
    ///
    /// # Errors
    /// User: a name in `skip` matches no linear layer, or all are skipped.
    pub fn new(config: &ModelConfig, skip: &[String]) -> Result<Self> {
        let layers = model::modules(config).into_iter().filter(|module| module.kind.is_layer_of_block());
        let (gates, linear): (Vec<_>, Vec<_>) = layers.partition(|module| module.kind != ModuleKind::Linear);
        let [gates, linear] = [gates, linear]
            .map(|modules| modules.into_iter().map(|module| module.name).collect::<Vec<String>>());
        let names = config.family.class_names;
        let skip: Vec<String> = skip.iter().map(|name| names.usual(name)).collect();
        let wanted: HashSet<&str> = skip.iter().map(String::as_str).collect();
        // A gate is skipped without its name too.
        let named: HashSet<&str> =
            linear.iter().chain(&gates).flat_map(|layer| runs_of_parts(layer)).collect();
        for name in &skip {
            if !named.contains(name.as_str()) {
                let mut ends: Vec<&str> =
                    linear.iter().filter_map(|layer| layer.rsplit('.').next()).collect();
                ends.sort_unstable();
                ends.dedup();
                return Err(Error::user(format!("cannot skip `{name}`")).because(format!(
                    "no linear layer has this name; accepted: {}, each also with the parts before it, as in `{}`",
                    ends.join(", "),
                    linear.first().map_or(String::new(), |layer| names.module(layer))
                )));
            }
        }
        let (mut skipped, quantized): (Vec<_>, Vec<_>) =
            linear.iter().cloned().partition(|layer| runs_of_parts(layer).any(|run| wanted.contains(run)));
        if quantized.is_empty() {
            return Err(Error::user("cannot quantize the model")
                .because("every linear layer is skipped")
                .hint("leave one of the names out"));
        }
        skipped.extend(gates);
        let by_name = quantized.iter().cloned().collect();
        Ok(Self { quantized, skipped, by_name })
    }

    /// Returns the linear layers with these names; all others are skipped.
    pub(super) fn those(config: &ModelConfig, quantized: impl Iterator<Item = String>) -> Self {
        let quantized: Vec<String> = quantized.collect();
        let by_name: HashSet<String> = quantized.iter().cloned().collect();
        let modules = model::modules(config).into_iter().filter(|module| module.kind.is_layer_of_block());
        let names = modules.map(|module| module.name);
        Self { skipped: names.filter(|name| !by_name.contains(name)).collect(), quantized, by_name }
    }

    /// Returns whether the tensor `name` is the weight of a quantized layer.
    pub(super) fn quantizes(&self, name: &str) -> bool {
        let module = name.strip_suffix(".weight");
        module.is_some_and(|module| self.by_name.contains(module))
    }
}

/// Returns the runs of consecutive parts of a module's name: `a.b` has `a.b`, `a` and `b`.
fn runs_of_parts(module: &str) -> impl Iterator<Item = &str> {
    let starts = std::iter::once(0).chain(module.match_indices('.').map(|(dot, _)| dot + 1));
    starts.flat_map(move |start| {
        let ends = module[start..].match_indices('.').map(move |(dot, _)| start + dot);
        ends.chain([module.len()]).map(move |end| &module[start..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_row() {
        let module = "model.layers.10.mlp.down_proj";
        for name in ["down_proj", "mlp", "mlp.down_proj", "layers.10", "model.layers.10", module, "10"] {
            assert!(runs_of_parts(module).any(|run| run == name), "{name}");
        }
        for name in ["", "proj", "layers.1", "mlp.up_proj", "layers.down_proj", "model.layers.1"] {
            assert!(!runs_of_parts(module).any(|run| run == name), "{name}");
        }
    }
}
