//! The parameters of a model in the tensors of a GGUF file: the reverse of `tensors`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::places::{TensorPlace, places};
use super::super::tensors::change;
use super::rope::{LLAMA3, LONG, SHORT};
use crate::error::Result;
use crate::model::{self, ModelConfig, ModelPart};
use crate::weights::{GgufFile, GgufIndex, GgufParameter};

/// Lists the parameters.
///
/// # Errors
/// User: a tensor is missing, or not part of the model.
pub(super) fn index(file: &GgufFile, config: &ModelConfig) -> Result<GgufIndex> {
    let mut used: BTreeSet<String> = [LLAMA3, LONG, SHORT].map(str::to_owned).into();
    let mut parameters = BTreeMap::new();
    for spec in model::parameters(config) {
        let places = places(config, &spec);
        let tensors: Vec<String> = places.iter().map(|place| place.name.clone()).collect();
        if let Some(missing) = tensors.iter().find(|name| file.tensor(name).is_none()) {
            return Err(file.refused(format!("its tensor `{missing}` is missing")));
        }
        used.extend(tensors.iter().cloned());
        let expert = match spec.part {
            ModelPart::Block { part, .. } => part.expert(),
            _ => None,
        };
        let change = change(config, &spec);
        let parameter = GgufParameter {
            tensors,
            expert: expert.map(usize::from),
            shape: spec.shape,
            interleaved_heads: change.interleave_heads,
            added: change.add,
            rows: places.iter().filter_map(|place| place.rows.clone()).collect(),
            columns: places.iter().filter_map(|place| place.columns.clone()).flatten().collect(),
            transposed_heads: heads_of(&places),
            by_element: places.iter().any(|place| place.by_element),
            is_log_rate: change.is_log_rate,
        };
        parameters.insert(spec.name, parameter);
    }
    match file.tensors().find(|tensor| !used.contains(&tensor.name)) {
        Some(other) => Err(file.refused(format!(
            "its tensor `{}` is no part of a model of the family {}",
            other.name, config.family.name
        ))),
        None => Ok(GgufIndex { file: file.path().to_owned(), parameters }),
    }
}

/// Returns the numbers of heads that tensors hold transposed; empty if none does.
fn heads_of(places: &[TensorPlace]) -> Vec<Option<usize>> {
    let all: Vec<Option<usize>> = places.iter().map(|place| place.transposed_heads).collect();
    if all.iter().all(Option::is_none) { Vec::new() } else { all }
}
