//! Selects the modules of a model that get LoRA, with rank and scale.
//!
//! The rules are PEFT's. Names in a list match a module or end its name after a dot; a string is a
//! regular expression for the whole name; `all-linear` is every linear layer but the output head;
//! the first key of a pattern that matches the end of a name wins. (peft 0.21:
//! `check_target_module_exists`, `get_pattern_key`, `_maybe_include_all_linear_layers`,
//! `_set_trainable`.) PEFT ignores names without effect; here each is an error with the nearest
//! name.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use regex::{Regex, RegexBuilder};

use crate::error::{Error, Result};
use crate::model::{Module, ModuleKind};
use crate::weights::ClassNames;

/// The longest name, in bytes, that is compared with module names.
const LONGEST_COMPARED: usize = 256;

/// The most patterns of one key: a model with a pattern for each module has fewer.
const MOST_PATTERNS: usize = 4096;

/// The largest size of a compiled pattern, in bytes; names need some hundred kilobytes at most.
const MOST_PATTERN_BYTES: usize = 1 << 20;

/// The part of the name of an expert's module before the expert's number.
pub(super) const EXPERTS: &str = ".experts.";

/// The tensors of all experts of a layer that can have LoRA, in the order in which PEFT wraps them.
pub(super) const PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Module names in PEFT's form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamePattern {
    /// Names, or suffixes of names after a dot.
    List(Vec<String>),
    /// A regular expression for the whole name.
    Regex(String),
}

impl NamePattern {
    /// A pattern that matches no name.
    pub const NONE: NamePattern = NamePattern::List(Vec::new());
}

/// The modules that `target_modules` selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModulePattern {
    /// Every linear layer but the output head.
    AllLinear,
    /// The modules whose names match.
    Named(NamePattern),
}

/// The part of a LoRA configuration that depends on module names: the adapted modules and their
/// settings.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetSpec {
    /// The modules that get LoRA.
    pub target_modules: ModulePattern,
    /// Modules without LoRA, even if `target_modules` names them.
    pub exclude_modules: NamePattern,
    /// Suffixes of names of modules that are trained and saved whole, without LoRA.
    pub modules_to_save: Vec<String>,
    /// Layers to which `target_modules` (if a list) is restricted.
    pub layers_to_transform: Option<Vec<usize>>,
    /// The text before the layer's number in a name; if empty, any word.
    pub layers_pattern: Vec<String>,
    /// The rank of both matrices.
    pub r: usize,
    /// The numerator of the scale.
    pub lora_alpha: f64,
    /// Scale by alpha / sqrt(r) instead of alpha / r (rsLoRA, <https://arxiv.org/abs/2312.03732>).
    pub use_rslora: bool,
    /// Learn the magnitudes of rows apart from their directions (DoRA,
    /// <https://arxiv.org/abs/2402.09353>).
    pub use_dora: bool,
    /// Ranks by suffix of the name (a regular expression); the first match wins.
    pub rank_pattern: Vec<(String, usize)>,
    /// The same as `rank_pattern`, for alpha.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Tokens with trained rows of an embedding or head, by suffix of the module's name.
    pub trainable_token_indices: BTreeMap<String, Vec<u32>>,
}

impl Default for TargetSpec {
    /// Returns PEFT's defaults, on all linear layers.
    fn default() -> Self {
        Self {
            target_modules: ModulePattern::AllLinear,
            exclude_modules: NamePattern::NONE,
            modules_to_save: Vec::new(),
            layers_to_transform: None,
            layers_pattern: Vec::new(),
            r: 8,
            lora_alpha: 8.0,
            use_rslora: false,
            use_dora: false,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            trainable_token_indices: BTreeMap::new(),
        }
    }
}

impl TargetSpec {
    /// Returns the same settings with other names of modules, whole ones or last words. Regular
    /// expressions stay.
    #[must_use]
    pub fn translated(&self, name: impl Fn(&str) -> String) -> Self {
        let all = |names: &[String]| names.iter().map(|one| name(one)).collect::<Vec<_>>();
        let pattern = |pattern: &NamePattern| match pattern {
            NamePattern::List(names) => NamePattern::List(all(names)),
            NamePattern::Regex(regex) => NamePattern::Regex(regex.clone()),
        };
        let target_modules = match &self.target_modules {
            ModulePattern::AllLinear => ModulePattern::AllLinear,
            ModulePattern::Named(names) => ModulePattern::Named(pattern(names)),
        };
        let tokens = self.trainable_token_indices.iter().map(|(key, ids)| (name(key), ids.clone()));
        TargetSpec {
            target_modules,
            exclude_modules: pattern(&self.exclude_modules),
            modules_to_save: all(&self.modules_to_save),
            rank_pattern: self.rank_pattern.iter().map(|(key, r)| (name(key), *r)).collect(),
            alpha_pattern: self.alpha_pattern.iter().map(|(key, alpha)| (name(key), *alpha)).collect(),
            trainable_token_indices: tokens.collect(),
            ..self.clone()
        }
    }
}

/// A module with LoRA: `y = W x + scale · B (A x)`, of an embedding
/// `E[token] + scale · B A[:, token]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Full name of the module, as in the checkpoint.
    pub name: String,
    /// The kind of the module; never a norm.
    pub kind: ModuleKind,
    /// The rank: A is [r, in], B is [out, r].
    pub r: usize,
    /// The numerator of the scale.
    pub alpha: f64,
    /// alpha / r, or alpha / sqrt(r) with rsLoRA.
    pub scale: f64,
}

/// Returns the modules of a model that get LoRA, in the order of `modules`.
///
/// # Errors
/// User: a name, pattern key or regular expression that is invalid or has no effect; a matching
/// module that cannot have LoRA; a rank of 0; no module at all.
pub fn resolve(spec: &TargetSpec, modules: &[Module]) -> Result<Vec<Target>> {
    let exclude = Matcher::new("exclude_modules", &spec.exclude_modules)?;
    let saved = SavedMatcher::new(&spec.modules_to_save)?;
    let layers = LayerFilter::new(spec)?;
    let wanted: Vec<&Module> = match &spec.target_modules {
        ModulePattern::AllLinear => {
            let kinds = [ModuleKind::Linear, ModuleKind::Gate];
            modules.iter().filter(|module| kinds.contains(&module.kind)).collect()
        }
        ModulePattern::Named(names) => {
            let matcher = Matcher::new("target_modules", names)?;
            matcher.refuse_unused(modules)?;
            let in_layer = |module: &&Module| matcher.names_exactly(&module.name) || layers.has(&module.name);
            modules.iter().filter(|module| matcher.matches(&module.name)).filter(in_layer).collect()
        }
    };
    exclude.refuse_unused(modules)?;
    let targets: Vec<&Module> = wanted
        .into_iter()
        .filter(|module| !exclude.matches(&module.name) && !saved.matches(&module.name))
        .collect();
    if targets.is_empty() {
        return Err(failed()
            .because("`target_modules` leaves no module: `exclude_modules`, `modules_to_save` and `layers_to_transform` take away every module that it matches")
            .hint("remove `exclude_modules`, `modules_to_save` and `layers_to_transform`"));
    }
    if let Some(module) = targets.iter().find(|module| module.kind == ModuleKind::Norm) {
        return Err(failed()
            .because(format!(
                "`target_modules` matches `{}`, a norm; accepted: linear layers, the embedding, the head",
                module.name
            ))
            .hint(format!("write `modules_to_save = [\"{}\"]` to train it whole", leaf(&module.name))));
    }
    let (ranks, alphas) = patterns(spec)?;
    ranks.refuse_unused(&targets)?;
    alphas.refuse_unused(&targets)?;
    targets.into_iter().map(|module| target(&module.name, module.kind, spec, &ranks, &alphas)).collect()
}

/// Returns `modules` as targets with the rank and scale of `spec`, for an existing adapter. The
/// other fields of `spec` are ignored.
///
/// # Errors
/// User: a pattern is not a regular expression, or gives a rank of 0.
pub(super) fn targets_of<'a>(
    spec: &TargetSpec,
    modules: impl IntoIterator<Item = (&'a str, ModuleKind)>,
) -> Result<Vec<Target>> {
    let (ranks, alphas) = patterns(spec)?;
    modules.into_iter().map(|(name, kind)| target(name, kind, spec, &ranks, &alphas)).collect()
}

fn patterns(spec: &TargetSpec) -> Result<(CompiledPatterns<usize>, CompiledPatterns<f64>)> {
    let ranks = CompiledPatterns::new("rank_pattern", &spec.rank_pattern)?;
    Ok((ranks, CompiledPatterns::new("alpha_pattern", &spec.alpha_pattern)?))
}

fn target(
    name: &str,
    kind: ModuleKind,
    spec: &TargetSpec,
    ranks: &CompiledPatterns<usize>,
    alphas: &CompiledPatterns<f64>,
) -> Result<Target> {
    let r = ranks.get(name).unwrap_or(spec.r);
    let alpha = alphas.get(name).unwrap_or(spec.lora_alpha);
    if r == 0 || !alpha.is_finite() {
        return Err(failed().because(format!(
            "`{name}` has r {r} and lora_alpha {alpha}; accepted: r from 1, a finite lora_alpha"
        )));
    }
    let scale = if spec.use_rslora { alpha / (r as f64).sqrt() } else { alpha / r as f64 };
    Ok(Target { name: name.into(), kind, r, alpha, scale })
}

/// Returns the modules of a model that are trained and saved whole, in the order of `modules`.
///
/// A name matches every module whose name it ends, even without a dot between, as in PEFT: `norm`
/// is every norm.
///
/// # Errors
/// User: a name matches no module.
pub fn resolve_saved(spec: &TargetSpec, modules: &[Module]) -> Result<Vec<String>> {
    let wanted: HashSet<&str> = spec.modules_to_save.iter().map(String::as_str).collect();
    let (mut saved, mut used) = (Vec::new(), HashSet::new());
    for module in modules {
        let ends = module.name.char_indices().map(|(start, _)| &module.name[start..]);
        let named: Vec<&str> = ends.filter_map(|end| wanted.get(end).copied()).collect();
        if !named.is_empty() {
            saved.push(module.name.clone());
        }
        used.extend(named);
    }
    match spec.modules_to_save.iter().find(|name| !used.contains(name.as_str())) {
        Some(name) => Err(no_match("modules_to_save", name, modules)),
        None => Ok(saved),
    }
}

/// Returns the tables (embedding, head) with single trainable rows, and their tokens.
///
/// # Errors
/// User: a name matches no table; a token is outside its vocabulary or named twice; the table also
/// has LoRA or trains whole.
pub fn resolve_rows(spec: &TargetSpec, modules: &[Module]) -> Result<BTreeMap<String, Vec<u32>>> {
    let key = "trainable_token_indices";
    let mut rows = BTreeMap::new();
    let tables = || modules.iter().filter(|m| matches!(m.kind, ModuleKind::Embedding | ModuleKind::Head));
    for (name, ids) in &spec.trainable_token_indices {
        let Some(table) = tables().find(|table| ends_with_name(&table.name, name)) else {
            let all: Vec<&str> = tables().map(|table| leaf(&table.name)).collect();
            return Err(rows_failed().because(format!(
                "`{key}` has `{name}`, which is no embedding or head; the model has {}",
                all.join(", ")
            )));
        };
        check_ids(ids).and_then(|()| check_vocabulary(ids, table)).map_err(|e| rows_failed().because(e))?;
        let saved = resolve_saved(spec, modules)?.contains(&table.name);
        let adapted = !matches!(spec.target_modules, ModulePattern::AllLinear)
            && resolve(spec, modules)?.iter().any(|target| target.name == table.name);
        if saved || adapted {
            let other = if saved { "modules_to_save" } else { "target_modules" };
            return Err(rows_failed()
                .because(format!("`{other}` has `{}` too", table.name))
                .hint(format!("remove it from `{other}`, or from `{key}`")));
        }
        rows.insert(table.name.clone(), ids.clone());
    }
    Ok(rows)
}

/// Checks that no token is named twice.
pub(super) fn check_ids(ids: &[u32]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    match ids.iter().find(|id| !seen.insert(**id)) {
        Some(twice) => Err(format!("`trainable_token_indices` has token {twice} twice")),
        None => Ok(()),
    }
}

/// Checks that all tokens are rows of the table.
pub(super) fn check_vocabulary(ids: &[u32], table: &Module) -> Result<(), String> {
    let rows = table.shape.first().copied().unwrap_or(0);
    match ids.iter().find(|id| **id as usize >= rows) {
        Some(id) => Err(format!(
            "`trainable_token_indices` has token {id}; `{}` has {rows} rows; accepted: 0 to {}",
            table.name,
            rows.saturating_sub(1)
        )),
        None => Ok(()),
    }
}

/// Returns a short `target_modules` list that selects exactly `targets`, sorted: last words of
/// names if all modules with that ending are targets, of experts otherwise `experts.3.up_proj` by
/// the same rule, otherwise whole names. A resolved `all-linear`, exclude_modules or
/// layers_to_transform is written this way, so that every PEFT reads it.
pub fn target_names(targets: &[Target], modules: &[Module]) -> Vec<String> {
    let chosen: HashSet<&str> = targets.iter().map(|target| target.name.as_str()).collect();
    let others = modules.iter().filter(|module| !chosen.contains(module.name.as_str()));
    let ends_of_others: HashSet<&str> = others.flat_map(|module| ends(&module.name)).collect();
    let short = |target: &'_ Target| -> String {
        let end = ends(&target.name).into_iter().find(|end| !ends_of_others.contains(end));
        end.unwrap_or(&target.name).to_owned()
    };
    let names: BTreeSet<String> = targets.iter().map(short).collect();
    names.into_iter().collect()
}

/// Returns the ends of a module's name that may stand for it: the last word, and of an expert its
/// number too.
fn ends(name: &str) -> Vec<&str> {
    let expert = name.find(EXPERTS).map(|at| &name[at + 1..]);
    std::iter::once(leaf(name)).chain(expert).collect()
}

/// Returns the last word of a module's name. A number in a list of modules is none: PEFT compares
/// the words of all modules, also of blocks.
fn leaf(name: &str) -> &str {
    let is_word = |at: &usize| !name[at + 1..].starts_with(|first: char| first.is_ascii_digit());
    let word = name.rmatch_indices('.').map(|(at, _)| at).find(is_word);
    word.map_or(name, |at| &name[at + 1..])
}

fn failed() -> Error {
    Error::user("cannot choose the modules that get LoRA")
}

fn rows_failed() -> Error {
    Error::user("cannot choose the tokens whose rows train")
}

fn no_match(key: &str, name: &str, modules: &[Module]) -> Error {
    let leaves: BTreeSet<&str> = modules.iter().map(|module| leaf(&module.name)).collect();
    let distance = |other: &&&str| strsim::damerau_levenshtein(leaf(name), other);
    // A larger distance means another word, not a typo; no module has a name this long.
    let nearest = leaves.iter().filter(|_| name.len() <= LONGEST_COMPARED).min_by_key(distance);
    let nearest = nearest.filter(|other| distance(other) <= 1 + leaf(name).len() / 4);
    let all: Vec<&str> = leaves.iter().copied().collect();
    let error = failed()
        .because(format!("`{key}` has `{name}`, which matches no module; the model has {}", all.join(", ")));
    match nearest {
        Some(nearest) => error.hint(format!("did you mean `{nearest}`?")),
        None => error,
    }
}

/// Compiles a regular expression for whole names, with the meaning of Python's `fullmatch`.
fn whole(key: &str, pattern: &str) -> Result<Regex> {
    let compiled = RegexBuilder::new(&format!(r"\A(?:{pattern})\z")).size_limit(MOST_PATTERN_BYTES).build();
    compiled.map_err(|error| {
        // The last line of a regex error has the cause; those above draw it.
        let cause = error.to_string();
        let cause = cause.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
        failed()
            .because(format!("`{key}` has `{pattern}`, which is not a supported regular expression: {cause}"))
            .hint("write the module names as a list")
    })
}

/// Checks that a key has no more patterns than can be tried on every module.
fn check_count(key: &str, count: usize) -> Result<()> {
    if count <= MOST_PATTERNS {
        return Ok(());
    }
    Err(failed().because(format!("`{key}` has {count} entries; accepted: up to {MOST_PATTERNS}")))
}

enum Matcher<'a> {
    /// The list in its order, and as a set.
    List(&'static str, &'a [String], HashSet<&'a str>),
    Regex(&'static str, &'a str, Regex),
}

impl<'a> Matcher<'a> {
    fn new(key: &'static str, names: &'a NamePattern) -> Result<Self> {
        Ok(match names {
            NamePattern::List(list) => Self::List(key, list, list.iter().map(String::as_str).collect()),
            NamePattern::Regex(pattern) => Self::Regex(key, pattern, whole(key, pattern)?),
        })
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::List(_, _, names) => ends_of_name(module).any(|end| names.contains(end)),
            Self::Regex(_, _, regex) => matches_name(regex, module),
        }
    }

    /// Returns whether the module is selected in a way that layers_to_transform does not restrict.
    fn names_exactly(&self, module: &str) -> bool {
        match self {
            Self::List(_, _, names) => names.contains(module),
            Self::Regex(..) => true,
        }
    }

    fn refuse_unused(&self, modules: &[Module]) -> Result<()> {
        let (key, unused) = match self {
            Self::List(key, list, _) => {
                let known: HashSet<&str> =
                    modules.iter().flat_map(|module| ends_of_name(&module.name)).collect();
                (key, list.iter().map(String::as_str).find(|name| !known.contains(name)))
            }
            Self::Regex(key, pattern, regex) => {
                (key, (!modules.iter().any(|module| matches_name(regex, &module.name))).then_some(*pattern))
            }
        };
        unused.map_or(Ok(()), |name| Err(no_match(key, name, modules)))
    }
}

/// Returns whether a pattern matches the name of a module, the name that the module has inside of
/// a model for images, `model.language_model.layers.0` or `language_model.model.layers.0`, or that
/// of another class.
fn matches_name(regex: &Regex, module: &str) -> bool {
    let inside = module.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}"));
    let names = [Some(format!("language_model.{module}")), inside];
    let names = names.into_iter().flatten().chain(ClassNames::in_other_classes(module));
    regex.is_match(module) || names.into_iter().any(|name| regex.is_match(&name))
}

/// Returns the texts for which [`ends_with_name`] holds: `a.b.c`, `b.c`, `c`, and the empty one
/// after a last dot.
fn ends_of_name(module: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(module), |rest| rest.split_once('.').map(|(_, rest)| rest))
}

pub(super) fn ends_with_name(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Modules that modules_to_save excludes from LoRA: those with one of its names as a run of whole
/// words.
struct SavedMatcher(Vec<Regex>);

impl SavedMatcher {
    fn new(names: &[String]) -> Result<Self> {
        check_count("modules_to_save", names.len())?;
        let regexes =
            names.iter().map(|name| whole("modules_to_save", &format!(r"(?:|.*\.){name}(?:|\..*)")));
        Ok(Self(regexes.collect::<Result<_>>()?))
    }

    fn matches(&self, module: &str) -> bool {
        self.0.iter().any(|regex| regex.is_match(module))
    }
}

/// The regular expressions for a layer number in a name, and the allowed layers.
struct LayerFilter<'a> {
    allowed: Option<&'a [usize]>,
    numbers: Vec<Regex>,
}

impl<'a> LayerFilter<'a> {
    fn new(spec: &'a TargetSpec) -> Result<Self> {
        let any = [r"[^.]*".to_owned()];
        let patterns = if spec.layers_pattern.is_empty() { &any[..] } else { &spec.layers_pattern };
        let before = if spec.layers_pattern.is_empty() { r".*?\." } else { r"(?:|.*?\.)" };
        let numbers = patterns
            .iter()
            .map(|pattern| whole("layers_pattern", &format!(r"{before}(?:{pattern})\.(?<idx>\d+)\..*")));
        let allowed = spec.layers_to_transform.as_deref().filter(|layers| !layers.is_empty());
        Ok(Self { allowed, numbers: numbers.collect::<Result<_>>()? })
    }

    fn has(&self, module: &str) -> bool {
        let Some(allowed) = self.allowed else { return true };
        let number = self
            .numbers
            .iter()
            .find_map(|regex| regex.captures(module))
            .and_then(|captures| captures["idx"].parse().ok());
        number.is_some_and(|layer: usize| allowed.contains(&layer))
    }
}

/// Returns a module's usual name and its names in other classes of transformers.
fn names_in_classes(module: &str) -> Vec<String> {
    std::iter::once(module.to_owned()).chain(ClassNames::in_other_classes(module)).collect()
}

fn matches_any(regex: &Regex, names: &[String]) -> bool {
    names.iter().any(|name| regex.is_match(name))
}

/// Values by suffix of the name.
struct CompiledPatterns<T> {
    key: &'static str,
    values: Vec<(Regex, String, T)>,
}

impl<T: Copy> CompiledPatterns<T> {
    fn new(key: &'static str, patterns: &[(String, T)]) -> Result<Self> {
        check_count(key, patterns.len())?;
        let compile = |(pattern, value): &(String, T)| {
            Ok((whole(key, &format!(r"(?:.*\.)?(?:{pattern})"))?, pattern.clone(), *value))
        };
        Ok(Self { key, values: patterns.iter().map(compile).collect::<Result<_>>()? })
    }

    fn get(&self, module: &str) -> Option<T> {
        if self.values.is_empty() {
            return None;
        }
        let names = names_in_classes(module);
        self.values.iter().find(|(regex, ..)| matches_any(regex, &names)).map(|&(.., value)| value)
    }

    fn refuse_unused(&self, targets: &[&Module]) -> Result<()> {
        for (regex, pattern, _) in &self.values {
            if !targets.iter().any(|module| matches_any(regex, &names_in_classes(&module.name))) {
                return Err(failed()
                    .because(format!("`{}` has `{pattern}`, which matches no module with LoRA", self.key))
                    .hint(format!(
                        "remove it, or write the end of a module's name: `{}`",
                        leaf(&targets[0].name)
                    )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
