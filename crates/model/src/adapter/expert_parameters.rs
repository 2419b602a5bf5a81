//! PEFT's LoRA on the tensors of all experts of a layer (`target_parameters`).
//!
//! transformers 5 has one `gate_up_proj`, `[E, 2F, D]`, and one `down_proj`, `[E, D, F]`, for a
//! layer. PEFT wraps the module of the experts once for each: the name of `gate_up_proj` has a
//! `base_layer` if both are wrapped. Expert e has
//!
//! ```text
//! ΔW_e = scale · B_e A_e      A: [E r, in], rows e r to (e + 1) r;  B: [out, r E], columns e, E + e, ...
//! ```
//!
//! (peft 0.21 `ParamWrapper`.) Llama 4 stores `[E, D, 2F]` and `[E, F, D]`, but PEFT takes them for
//! the above, so that `ΔW_e` is the transpose: its A has the width of outputs. Such a file is read
//! as one adapter for each module of each expert. Gate and up then have A of their own, with the
//! same values.

use std::collections::BTreeMap;

use super::targets::{EXPERTS, PARAMETERS, ends_with_name, targets_of};
use super::tensors::{PREFIX, WEIGHTS_FILE, without_adapter};
use super::{AdapterConfig, CONFIG_FILE, ModulePattern, NamePattern, Target, TensorKind, target_names};
use crate::model::{Module, ModuleKind};
use crate::weights::{ModelFiles, NameRules, TensorInfo};

/// The end of the names of Llama 4's experts, whose tensors PEFT takes for their transposes. Other
/// classes with this name have no layer with gate and up.
const TRANSPOSED: &str = "feed_forward.experts";

/// The end of the name of a wrapped module of experts.
const WRAPPED: &str = ".base_layer";

/// Names of the modules of one expert that a parameter holds, in the order of its rows.
const LEAVES: [(&str, &[&[&str]]); 2] = [
    (PARAMETERS[0], &[&["gate_proj", "up_proj"], &["w1", "w3"], &["gate_up_proj"]]),
    (PARAMETERS[1], &[&["down_proj"], &["w2"]]),
];

/// The wrappers of each module of experts: by the module, `model.layers.0.mlp.experts`, and by
/// whether another wrapper is around it, the names in the file of A and B.
pub(super) type WrappedExperts = BTreeMap<String, BTreeMap<bool, BTreeMap<TensorKind, String>>>;

/// Adds the tensor `name` if it is LoRA on a module of experts, and returns whether it is.
pub(super) fn add_wrapped(wrapped: &mut WrappedExperts, name: &str, rules: &NameRules) -> bool {
    let own = without_adapter(name);
    let ends = [(".lora_A.weight", TensorKind::LoraA), (".lora_B.weight", TensorKind::LoraB)];
    let module_and_kind = ends.iter().find_map(|(end, kind)| Some((own.strip_suffix(end)?, *kind)));
    let Some((module, kind)) = module_and_kind else { return false };
    let inner = module.strip_suffix(WRAPPED);
    let experts = inner.unwrap_or(module);
    if !experts.ends_with(".experts") {
        return false;
    }
    let experts = rules.canonical(experts);
    let experts = experts.strip_prefix(PREFIX).unwrap_or(&experts).to_owned();
    wrapped.entry(experts).or_default().entry(inner.is_some()).or_default().insert(kind, name.to_owned());
    true
}

/// Returns the adapters of the tensors that `config` names.
///
/// # Errors
/// The difference between `config` and the file.
pub(super) fn parameter_loras(
    wrapped: &WrappedExperts,
    config: &AdapterConfig,
    files: &ModelFiles,
) -> Result<Vec<ParameterLora>, String> {
    let mut all = Vec::new();
    let has = |experts: &String, name: &String| {
        PARAMETERS.iter().any(|parameter| ends_with_name(&format!("{experts}.{parameter}"), name))
    };
    if let Some(name) = config.target_parameters.iter().find(|name| !wrapped.keys().any(|of| has(of, name))) {
        return Err(format!(
            "{CONFIG_FILE} has `target_parameters` with `{name}`, of which {WEIGHTS_FILE} holds no tensor"
        ));
    }
    for (experts, wrappers) in wrapped {
        let names = PARAMETERS.map(|parameter| format!("{experts}.{parameter}"));
        let is_named = |name: &&String| config.target_parameters.iter().any(|end| ends_with_name(name, end));
        let named: Vec<&String> = names.iter().filter(is_named).collect();
        // The wrapper within another is of the first tensor.
        let places: Vec<bool> = if named.len() == 2 { vec![true, false] } else { vec![false] };
        if named.is_empty() || !wrappers.keys().rev().eq(&places) {
            let places = wrappers.len();
            return Err(format!(
                "{WEIGHTS_FILE} has LoRA on {places} tensors of `{experts}`, and `target_parameters` in {CONFIG_FILE} names {}; accepted: as many, of {}",
                named.len(),
                PARAMETERS.join(" and ")
            ));
        }
        let targets = named.iter().map(|name| (name.as_str(), ModuleKind::Linear));
        let targets = targets_of(&config.spec, targets).map_err(|error| error.in_one_line())?;
        for (target, halves) in targets.into_iter().zip(places.iter().map(|key| &wrappers[key])) {
            let half = |kind: TensorKind| {
                let name = halves.get(&kind);
                let half = name.and_then(|name| Some((name.clone(), files.info(name)?.clone())));
                half.ok_or_else(|| format!("{WEIGHTS_FILE} has one half of the LoRA of `{}`", target.name))
            };
            let halves = [half(TensorKind::LoraA)?, half(TensorKind::LoraB)?];
            all.push(ParameterLora { target, halves });
        }
    }
    Ok(all)
}

impl AdapterConfig {
    /// Names the modules of experts instead of the tensors of all experts, with the ranks and
    /// alphas of `targets`, sorted by name.
    pub(super) fn name_experts(&mut self, targets: &[Target], modules: &[Module]) {
        self.target_parameters.clear();
        let spec = &mut self.spec;
        spec.target_modules = ModulePattern::Named(NamePattern::List(target_names(targets, modules)));
        (spec.layers_to_transform, spec.exclude_modules) = (None, NamePattern::NONE);
        spec.layers_pattern.clear();
        // By last word of the name: the layers with their rank and alpha.
        let mut of_experts: BTreeMap<&str, Vec<(&str, &Target)>> = BTreeMap::new();
        for target in targets {
            let Some((layer, after)) = target.name.split_once(EXPERTS) else { continue };
            let layers = of_experts.entry(after.rsplit('.').next().unwrap_or(after)).or_default();
            if layers.last().is_none_or(|(last, _)| *last != layer) {
                layers.push((layer, target));
            }
        }
        let (mut ranks, mut alphas) = (Vec::new(), Vec::new());
        for (leaf, layers) in of_experts {
            let same = layers.iter().all(|(_, of)| of.r == layers[0].1.r && of.alpha == layers[0].1.alpha);
            for (layer, target) in if same { &layers[..1] } else { &layers[..] } {
                let before = if same { String::new() } else { regex::escape(layer) + "\\." };
                let key = format!("{before}experts\\.\\d+\\.{leaf}");
                ranks.push((key.clone(), target.r));
                alphas.push((key, target.alpha));
            }
        }
        // The first pattern that matches counts.
        spec.rank_pattern = with_first(ranks, &spec.rank_pattern, spec.r);
        spec.alpha_pattern = with_first(alphas, &spec.alpha_pattern, spec.lora_alpha);
    }
}

/// Returns the patterns `first` before `others`, without those that change nothing: `usual` is the
/// value of names without a pattern.
fn with_first<T: Copy + PartialEq>(
    first: Vec<(String, T)>,
    others: &[(String, T)],
    usual: T,
) -> Vec<(String, T)> {
    let changes = |(_, value): &(String, T)| !others.is_empty() || *value != usual;
    first.into_iter().filter(changes).chain(others.iter().cloned()).collect()
}

/// LoRA on one tensor of all experts of a layer.
#[derive(Debug)]
pub(super) struct ParameterLora {
    /// The tensor, with rank and scale: `model.layers.0.mlp.experts.gate_up_proj`.
    pub(super) target: Target,
    /// The names of A and B in the file, and their headers.
    pub(super) halves: [(String, TensorInfo); 2],
}

/// The part of a tensor in the file that belongs to one module.
#[derive(Debug, Clone)]
pub(super) struct ExpertPart {
    /// The name in the file.
    pub(super) name: String,
    /// The header of the whole tensor, with the shape of the part.
    pub(super) info: TensorInfo,
    /// The place of its first element.
    first: usize,
    /// The distance of its rows.
    row_step: usize,
    /// The distance of its columns.
    column_step: usize,
}

impl ExpertPart {
    /// Returns the place in the whole tensor of element `index`, and the number of elements that
    /// follow it there too.
    pub(super) fn source_run(&self, index: usize) -> (usize, usize) {
        let columns = self.info.shape.last().copied().unwrap_or(1).max(1);
        let (row, column) = (index / columns, index % columns);
        let run = if self.column_step == 1 { columns - column } else { 1 };
        (self.first + row * self.row_step + column * self.column_step, run)
    }
}

/// A module of one expert, and its A and B.
pub(super) struct ExpertLora {
    pub(super) target: Target,
    pub(super) parts: [(TensorKind, ExpertPart); 2],
}

/// The modules of a model's experts: by layer and expert, the full name of each last word.
pub(super) struct ExpertModules<'m>(BTreeMap<(&'m str, usize), BTreeMap<&'m str, &'m Module>>);

impl<'m> ExpertModules<'m> {
    /// Returns those of `modules`.
    pub(super) fn of(modules: &'m [Module]) -> Self {
        let mut all: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for module in modules {
            let Some((before, after)) = module.name.split_once(EXPERTS) else { continue };
            let Some((expert, leaf)) = after.split_once('.') else { continue };
            let Ok(expert) = expert.parse() else { continue };
            all.entry((layer_of(before), expert)).or_default().insert(leaf, module);
        }
        ExpertModules(all)
    }

    /// Returns whether PEFT takes the tensors of the `experts` of `layer` for their transposes.
    fn is_transposed(&self, experts: &str, layer: &str) -> bool {
        let has_one_gate_up = |leaves: &BTreeMap<&str, &Module>| leaves.contains_key(PARAMETERS[0]);
        experts.ends_with(TRANSPOSED) && self.0.get(&(layer, 0)).is_some_and(has_one_gate_up)
    }

    /// Returns the adapters of all experts of `lora`.
    ///
    /// # Errors
    /// The reason for which it does not fit the model.
    pub(super) fn expanded(&self, lora: &ParameterLora) -> Result<Vec<ExpertLora>, String> {
        let name = &lora.target.name;
        let (experts, parameter) = name.rsplit_once('.').unwrap_or_default();
        let layer = layer_of(experts.strip_suffix(".experts").unwrap_or(experts));
        let count = self.0.keys().filter(|(of, _)| *of == layer).count();
        let is_transposed = self.is_transposed(experts, layer);
        let r = lora.target.r;
        let [(a_name, a), (b_name, b)] = &lora.halves;
        let fits = |info: &TensorInfo, at: usize| info.shape.len() == 2 && info.shape[at] == r * count;
        if count == 0 {
            return Err(format!("it has tensors for `{name}`, which the model does not have"));
        }
        for (tensor, info, at) in [(a_name, a, 0), (b_name, b, 1)] {
            if !fits(info, at) {
                let wanted = r * count;
                let wanted = if at == 0 { format!("[{wanted}, in]") } else { format!("[out, {wanted}]") };
                return Err(format!(
                    "tensor `{tensor}` has shape {:?}; r = {r} of {count} experts makes it {wanted}",
                    info.shape
                ));
            }
        }
        let mut all = Vec::new();
        for expert in 0..count {
            let leaves = self.0.get(&(layer, expert)).and_then(|leaves| modules_of(leaves, parameter));
            let modules = leaves
                .ok_or_else(|| format!("it has tensors for `{name}`, which the model does not have"))?;
            let rows: usize = modules.iter().map(|module| module.out_features()).sum();
            let (tensor, tensor_info, at) = if is_transposed { (a_name, a, 1) } else { (b_name, b, 0) };
            if rows != tensor_info.shape[at] {
                let actual = &tensor_info.shape;
                return Err(format!(
                    "`{tensor}` has shape {actual:?}, the weights of an expert have {rows} rows"
                ));
            }
            let mut start = 0;
            for module in modules {
                all.push(if is_transposed {
                    transposed_part_of(lora, module, (expert, count))
                } else {
                    part_of(lora, module, (expert, count), start)
                });
                start += module.out_features();
            }
        }
        Ok(all)
    }
}

/// Returns the layer of the mixer `name`: the name up to its number. In Gemma 4 nothing is between
/// a layer and its experts.
fn layer_of(name: &str) -> &str {
    let is_number = |part: &&str| part.parse::<usize>().is_ok();
    let number = name.split('.').find(is_number).map_or(0, str::len);
    let before: usize = name.split('.').take_while(|part| !is_number(part)).map(|part| part.len() + 1).sum();
    &name[..(before + number).min(name.len())]
}

/// Returns the modules of one expert that `parameter` holds, in the order of its rows.
fn modules_of<'m>(leaves: &BTreeMap<&str, &'m Module>, parameter: &str) -> Option<Vec<&'m Module>> {
    let (_, forms) = LEAVES.iter().find(|(of, _)| *of == parameter)?;
    forms.iter().find_map(|form| form.iter().map(|leaf| leaves.get(leaf).copied()).collect())
}

/// Returns the adapter of `module`, the weights of expert `expert` of `count`, whose transpose PEFT
/// adapts: `ΔWᵀ = B A` has A of the module's outputs and B of its inputs.
fn transposed_part_of(lora: &ParameterLora, module: &Module, (expert, count): (usize, usize)) -> ExpertLora {
    let ParameterLora { target, halves: [(a_name, a), (b_name, b)] } = lora;
    let (r, outputs) = (target.r, a.shape[1]);
    let part = |(name, info): (&String, &TensorInfo),
                shape: [usize; 2],
                first,
                [row_step, column_step]: [usize; 2]| {
        let mut info = info.clone();
        info.shape = shape.into();
        ExpertPart { name: name.clone(), info, first, row_step, column_step }
    };
    let own_a = part((b_name, b), [r, b.shape[0]], expert, [count, r * count]);
    let own_b = part((a_name, a), [module.out_features(), r], expert * r * outputs, [1, outputs]);
    let target = Target { name: module.name.clone(), kind: ModuleKind::Linear, ..target.clone() };
    ExpertLora { target, parts: [(TensorKind::LoraA, own_a), (TensorKind::LoraB, own_b)] }
}

/// Returns the adapter of `module`, the rows from `start` on of expert `expert` of `count`.
fn part_of(
    lora: &ParameterLora,
    module: &Module,
    (expert, count): (usize, usize),
    start: usize,
) -> ExpertLora {
    let ParameterLora { target, halves: [(a_name, a), (b_name, b)] } = lora;
    let (r, inputs) = (target.r, a.shape[1]);
    let of = |info: &TensorInfo, shape: [usize; 2]| {
        let mut info = info.clone();
        info.shape = shape.into();
        info
    };
    let a = ExpertPart {
        name: a_name.clone(),
        info: of(a, [r, inputs]),
        first: expert * r * inputs,
        row_step: inputs,
        column_step: 1,
    };
    let b = ExpertPart {
        name: b_name.clone(),
        info: of(b, [module.out_features(), r]),
        first: start * r * count + expert,
        row_step: r * count,
        column_step: count,
    };
    let target = Target { name: module.name.clone(), kind: ModuleKind::Linear, ..target.clone() };
    ExpertLora { target, parts: [(TensorKind::LoraA, a), (TensorKind::LoraB, b)] }
}
