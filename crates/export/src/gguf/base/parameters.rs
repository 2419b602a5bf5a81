//! The parameters of a model in the tensors of a GGUF file: the reverse of `tensors`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::destinations::{TensorRows, destinations};
use super::super::tensors::change;
use super::keys::shown;
use super::rope::{LLAMA3, LONG, SHORT};
use crate::error::Result;
use crate::model::{self, BlockPart, ModelConfig, ModelPart, ParamSpec};
use crate::weights::{GgufFile, GgufIndex, GgufParameter};

/// Lists the parameters. `further_blocks` of the file predict further tokens.
///
/// # Errors
/// User: a tensor is missing, or not part of the model.
pub(super) fn index(file: &GgufFile, config: &ModelConfig, further_blocks: usize) -> Result<GgufIndex> {
    let mut used: BTreeSet<String> = [LLAMA3, LONG, SHORT].map(str::to_owned).into();
    let mut parameters = BTreeMap::new();
    for spec in model::parameters(config) {
        let parameter = parameter(file, config, &spec);
        if parameter.position.is_some() {
            check_list(file, config, &parameter.tensors)?;
        }
        if let Some(missing) = parameter.tensors.iter().find(|name| !file.has(name)) {
            return Err(file.refused(format!("its tensor `{missing}` is missing")));
        }
        used.extend(parameter.tensors.iter().cloned());
        parameters.insert(spec.name, parameter);
    }
    let notes = skipped(file, config, further_blocks, &used)?;
    Ok(GgufIndex { file: file.path().to_owned(), parameters, notes })
}

/// Checks that keys have a number for all layers, or a list with one for each.
fn check_list(file: &GgufFile, config: &ModelConfig, keys: &[String]) -> Result<()> {
    let layers = config.num_layers();
    let is_of_layers = |key: &&String| file.is_number(key) || file.list_len(key) == Some(layers);
    keys.iter().find(|key| !is_of_layers(key)).map_or(Ok(()), |key| {
        let value = file.key(key).map_or("missing".to_owned(), shown);
        Err(file.refused(format!(
            "its key `{key}` is {value}; accepted: a number, or a list with one for each of the {layers} layers"
        )))
    })
}

/// Returns the entry of a parameter.
fn parameter(file: &GgufFile, config: &ModelConfig, spec: &ParamSpec) -> GgufParameter {
    let destinations = destinations(config, spec);
    let mut tensors: Vec<String> = destinations.iter().map(|tensor| tensor.name.clone()).collect();
    let part = match spec.part {
        ModelPart::Block { part, .. } => Some(part),
        _ => None,
    };
    let half = part.and_then(|part| joined_half(file, part, &mut tensors));
    let change = change(config, spec);
    GgufParameter {
        tensors,
        expert: part.and_then(BlockPart::expert).map(usize::from),
        position: destinations
            .iter()
            .find_map(|tensor| if file.is_number(&tensor.name) { Some(0) } else { tensor.of_list }),
        half,
        shape: spec.shape.clone(),
        interleaved_heads: change.interleave_heads,
        added: change.add,
        rows: destinations.iter().filter_map(|tensor| tensor.rows.clone()).collect(),
        columns: destinations.iter().filter_map(|tensor| tensor.columns.clone()).flatten().collect(),
        transposed_heads: heads_of(&destinations),
        by_element: destinations.iter().any(|tensor| tensor.by_element),
        is_log_rate: change.is_log_rate,
    }
}

/// Replaces the name of gates or of ups of experts by that of a tensor with both, if the file has
/// one, and returns which half of its rows they are.
fn joined_half(file: &GgufFile, part: BlockPart, tensors: &mut [String]) -> Option<usize> {
    let (half, name) = match part {
        BlockPart::ExpertGate(_) => (0, "ffn_gate_exps"),
        BlockPart::ExpertUp(_) => (1, "ffn_up_exps"),
        _ => return None,
    };
    let [tensor] = tensors else { return None };
    let joined = tensor.replace(name, "ffn_gate_up_exps");
    if file.has(tensor) || !file.has(&joined) {
        return None;
    }
    *tensor = joined;
    Some(half)
}

/// Returns notes on the tensors that finetune skips.
///
/// # Errors
/// User: one is no part of such a model.
fn skipped(
    file: &GgufFile,
    config: &ModelConfig,
    further_blocks: usize,
    used: &BTreeSet<String>,
) -> Result<Vec<String>> {
    let (layers, mut further, mut unread) = (config.num_layers(), 0, 0);
    for tensor in file.tensors().filter(|tensor| !used.contains(&tensor.name)) {
        let rest = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let (layer, part) = rest.map_or((None, ""), |(layer, part)| (layer.parse().ok(), part));
        let is_further = layer.is_some_and(|layer| (layers..layers + further_blocks).contains(&layer));
        let reads = |layer: usize| {
            let attention = config.blocks.get(layer).and_then(|block| block.token_mixer.attention());
            attention.is_some_and(|attention| attention.reads_from().is_some())
        };
        let is_key = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"].contains(&part);
        if is_further {
            further += 1;
        } else if is_key && layer.is_some_and(reads) {
            unread += 1;
        } else {
            return Err(file.refused(format!(
                "its tensor `{}` is no part of a model of the family {}",
                tensor.name, config.family.name
            )));
        }
    }
    let named = [
        (further, "of blocks that predict further tokens (`nextn`)"),
        (unread, "of keys and values that no block reads"),
    ];
    let notes = named.into_iter().filter(|(count, _)| *count > 0);
    let of = |count: usize| if count == 1 { "tensor" } else { "tensors" };
    Ok(notes.map(|(count, named)| format!("finetune skips {count} {} {named}", of(count))).collect())
}

/// Returns the numbers of heads that tensors hold transposed; empty if none does.
fn heads_of(destinations: &[TensorRows]) -> Vec<Option<usize>> {
    let all: Vec<Option<usize>> = destinations.iter().map(|tensor| tensor.transposed_heads).collect();
    if all.iter().all(Option::is_none) { Vec::new() } else { all }
}
