//! Which modules of a model get LoRA, and with what rank and scale.
//!
//! The rules are PEFT's: names in a list match a module or end its name after a dot; a string is a regular
//! expression for the whole name; `all-linear` is every linear layer but the output head; the first key of a
//! pattern that matches the end of a name wins. (peft 0.21: `check_target_module_exists`, `get_pattern_key`,
//! `_maybe_include_all_linear_layers`, `_set_trainable`.) PEFT passes over names without effect; here each
//! is an error with the nearest name.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

use crate::error::{Error, Result};

/// What a module is, which decides what can be attached to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModuleKind {
    /// A linear layer inside a block.
    Linear,
    /// The token embedding.
    Embedding,
    /// A norm.
    Norm,
    /// The output head, a linear layer of its own or tied to the embedding.
    Head,
}

/// A module of the model that has a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleInfo {
    /// Its Hugging Face name, without `.weight`: `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// What it is.
    pub kind: ModuleKind,
    /// The shape of its weight: [out, in], [vocab, hidden] of an embedding, [n] of a norm.
    pub shape: Vec<usize>,
}

/// Module names as PEFT takes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    /// Names, or ends of names from a dot on.
    List(Vec<String>),
    /// A regular expression for the whole name.
    Regex(String),
}

impl Names {
    /// Matches nothing.
    pub const NONE: Names = Names::List(Vec::new());
}

/// `target_modules`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear layer but the output head.
    AllLinear,
    /// These modules.
    Named(Names),
}

/// Which modules are adapted and how: the part of a LoRA configuration that depends on module names.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetSpec {
    /// The modules that get LoRA.
    pub target_modules: TargetModules,
    /// Modules that get none, whatever `target_modules` says.
    pub exclude_modules: Names,
    /// Ends of names of modules that are trained and saved whole; they get no LoRA.
    pub modules_to_save: Vec<String>,
    /// Layers that `target_modules` (if a list) is restricted to.
    pub layers_to_transform: Option<Vec<usize>>,
    /// What stands before the layer's number in a name; empty: any word.
    pub layers_pattern: Vec<String>,
    /// The rank.
    pub r: usize,
    /// The numerator of the scale.
    pub lora_alpha: f64,
    /// Scale by alpha / sqrt(r) instead of alpha / r (rsLoRA, <https://arxiv.org/abs/2312.03732>).
    pub use_rslora: bool,
    /// Learn the magnitudes of rows apart from their directions (DoRA, <https://arxiv.org/abs/2402.09353>).
    pub use_dora: bool,
    /// Ranks by end of name (a regular expression); the first that matches wins.
    pub rank_pattern: Vec<(String, usize)>,
    /// As `rank_pattern`, for alpha.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Tokens whose rows of an embedding or head train, by end of the module's name.
    pub trainable_token_indices: BTreeMap<String, Vec<u32>>,
}

impl Default for TargetSpec {
    /// PEFT's defaults, on all linear layers.
    fn default() -> Self {
        Self {
            target_modules: TargetModules::AllLinear,
            exclude_modules: Names::NONE,
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

/// A module with LoRA: y = W x + scale · B (A x), of an embedding E[token] + scale · B A[:, token].
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// The module.
    pub name: String,
    /// What it is; never a norm.
    pub kind: ModuleKind,
    /// The rank: A is [r, in], B is [out, r].
    pub r: usize,
    /// The numerator of the scale.
    pub alpha: f64,
    /// alpha / r, or alpha / sqrt(r) with rsLoRA.
    pub scale: f64,
}

/// The modules of a model that get LoRA, in the order of `modules`.
///
/// # Errors
/// The user's: a name, pattern key or regular expression that is invalid or has no effect; a matching module
/// that cannot have LoRA; a rank of 0; no module at all.
pub fn resolve(spec: &TargetSpec, modules: &[ModuleInfo]) -> Result<Vec<Target>> {
    let exclude = Matcher::new("exclude_modules", &spec.exclude_modules)?;
    let saved = SavedMatcher::new(&spec.modules_to_save)?;
    let layers = Layers::new(spec)?;
    let wanted: Vec<&ModuleInfo> = match &spec.target_modules {
        TargetModules::AllLinear => {
            modules.iter().filter(|module| module.kind == ModuleKind::Linear).collect()
        }
        TargetModules::Named(names) => {
            let matcher = Matcher::new("target_modules", names)?;
            matcher.refuse_unused(modules)?;
            let in_layer =
                |module: &&ModuleInfo| matcher.names_exactly(&module.name) || layers.has(&module.name);
            modules.iter().filter(|module| matcher.matches(&module.name)).filter(in_layer).collect()
        }
    };
    exclude.refuse_unused(modules)?;
    let targets: Vec<&ModuleInfo> = wanted
        .into_iter()
        .filter(|module| !exclude.matches(&module.name) && !saved.matches(&module.name))
        .collect();
    if targets.is_empty() {
        return Err(failed()
            .because("`target_modules` leaves no module: exclude_modules, modules_to_save or layers_to_transform take all")
            .hint("write `target_modules = \"all-linear\"` and remove the others"));
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

/// The targets `modules` by the rank and scale of `spec`, whose other fields are not looked at: for an
/// adapter that exists.
///
/// # Errors
/// The user's: a pattern is not a regular expression, or gives a rank of 0.
pub(super) fn targets_of<'a>(
    spec: &TargetSpec,
    modules: impl IntoIterator<Item = (&'a str, ModuleKind)>,
) -> Result<Vec<Target>> {
    let (ranks, alphas) = patterns(spec)?;
    modules.into_iter().map(|(name, kind)| target(name, kind, spec, &ranks, &alphas)).collect()
}

fn patterns(spec: &TargetSpec) -> Result<(Patterns<usize>, Patterns<f64>)> {
    let ranks = Patterns::new("rank_pattern", &spec.rank_pattern)?;
    Ok((ranks, Patterns::new("alpha_pattern", &spec.alpha_pattern)?))
}

fn target(
    name: &str,
    kind: ModuleKind,
    spec: &TargetSpec,
    ranks: &Patterns<usize>,
    alphas: &Patterns<f64>,
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

/// The modules of a model that are trained and saved whole, in the order of `modules`.
///
/// As in PEFT a name matches every module whose name it ends, without a dot between: `norm` is every norm.
///
/// # Errors
/// The user's: a name matches no module.
pub fn resolve_saved(spec: &TargetSpec, modules: &[ModuleInfo]) -> Result<Vec<String>> {
    for name in &spec.modules_to_save {
        if !modules.iter().any(|module| module.name.ends_with(name)) {
            return Err(no_match("modules_to_save", name, modules));
        }
    }
    let saved = |module: &&ModuleInfo| spec.modules_to_save.iter().any(|name| module.name.ends_with(name));
    Ok(modules.iter().filter(saved).map(|module| module.name.clone()).collect())
}

/// The tables (embedding, head) of which single rows train, with the tokens.
///
/// # Errors
/// The user's: a name matches no table; a token is outside its vocabulary or named twice; the table has LoRA or trains
/// whole besides.
pub fn resolve_rows(spec: &TargetSpec, modules: &[ModuleInfo]) -> Result<BTreeMap<String, Vec<u32>>> {
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
        let adapted = !matches!(spec.target_modules, TargetModules::AllLinear)
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

/// Whether no token is named twice.
pub(super) fn check_ids(ids: &[u32]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    match ids.iter().find(|id| !seen.insert(**id)) {
        Some(twice) => Err(format!("`trainable_token_indices` has token {twice} twice")),
        None => Ok(()),
    }
}

/// Whether all tokens are rows of the table.
pub(super) fn check_vocabulary(ids: &[u32], table: &ModuleInfo) -> Result<(), String> {
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

/// The shortest `target_modules` list that means exactly `targets`: last words of names where all modules that end
/// so are targets, else whole names. Sorted. What a resolved `all-linear`, exclude_modules or
/// layers_to_transform is written as, so that every PEFT reads it.
pub fn target_names(targets: &[Target], modules: &[ModuleInfo]) -> Vec<String> {
    let is_target = |name: &str| targets.iter().any(|target| target.name == name);
    let names: BTreeSet<&str> = targets
        .iter()
        .map(|target| {
            let last = leaf(&target.name);
            let mut alike = modules.iter().filter(|module| leaf(&module.name) == last);
            if alike.all(|module| is_target(&module.name)) { last } else { target.name.as_str() }
        })
        .collect();
    names.into_iter().map(String::from).collect()
}

fn leaf(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn failed() -> Error {
    Error::user("cannot choose the modules that get LoRA")
}

fn rows_failed() -> Error {
    Error::user("cannot choose the tokens whose rows train")
}

fn no_match(key: &str, name: &str, modules: &[ModuleInfo]) -> Error {
    let leaves: BTreeSet<&str> = modules.iter().map(|module| leaf(&module.name)).collect();
    let distance = |other: &&&str| strsim::damerau_levenshtein(leaf(name), other);
    // Further off it is another word, not a slip.
    let nearest =
        leaves.iter().min_by_key(distance).filter(|other| distance(other) <= 1 + leaf(name).len() / 4);
    let all: Vec<&str> = leaves.iter().copied().collect();
    let error = failed()
        .because(format!("`{key}` has `{name}`, which matches no module; the model has {}", all.join(", ")));
    match nearest {
        Some(nearest) => error.hint(format!("did you mean `{nearest}`?")),
        None => error,
    }
}

/// A regular expression for whole names, with Python's `fullmatch` meaning.
fn whole(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(&format!(r"\A(?:{pattern})\z")).map_err(|error| {
        // The last line of a regex error says what is wrong; those above draw it.
        let cause = error.to_string();
        let cause = cause.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
        failed()
            .because(format!(
                "`{key}` has `{pattern}`, which is not a regular expression we can use: {cause}"
            ))
            .hint("write the module names as a list")
    })
}

enum Matcher<'a> {
    List(&'static str, &'a [String]),
    Regex(&'static str, &'a str, Regex),
}

impl<'a> Matcher<'a> {
    fn new(key: &'static str, names: &'a Names) -> Result<Self> {
        Ok(match names {
            Names::List(list) => Self::List(key, list),
            Names::Regex(pattern) => Self::Regex(key, pattern, whole(key, pattern)?),
        })
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Self::List(_, list) => list.iter().any(|name| ends_with_name(module, name)),
            Self::Regex(_, _, regex) => regex.is_match(module),
        }
    }

    /// Whether the module is chosen in a way that layers_to_transform does not restrict.
    fn names_exactly(&self, module: &str) -> bool {
        match self {
            Self::List(_, list) => list.iter().any(|name| name == module),
            Self::Regex(..) => true,
        }
    }

    fn refuse_unused(&self, modules: &[ModuleInfo]) -> Result<()> {
        let (key, unused) = match self {
            Self::List(key, list) => {
                let unused =
                    |name: &&String| !modules.iter().any(|module| ends_with_name(&module.name, name));
                (key, list.iter().find(unused).map(String::as_str))
            }
            Self::Regex(key, pattern, regex) => {
                (key, (!modules.iter().any(|module| regex.is_match(&module.name))).then_some(*pattern))
            }
        };
        unused.map_or(Ok(()), |name| Err(no_match(key, name, modules)))
    }
}

pub(super) fn ends_with_name(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Modules that modules_to_save takes from LoRA: those with one of its names as a run of whole words.
struct SavedMatcher(Vec<Regex>);

impl SavedMatcher {
    fn new(names: &[String]) -> Result<Self> {
        let regexes =
            names.iter().map(|name| whole("modules_to_save", &format!(r"(?:|.*\.){name}(?:|\..*)")));
        Ok(Self(regexes.collect::<Result<_>>()?))
    }

    fn matches(&self, module: &str) -> bool {
        self.0.iter().any(|regex| regex.is_match(module))
    }
}

/// The first number in a name that follows a word, and the layers it may be.
struct Layers<'a> {
    allowed: Option<&'a [usize]>,
    numbers: Vec<Regex>,
}

impl<'a> Layers<'a> {
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
            .and_then(|found| found["idx"].parse().ok());
        number.is_some_and(|layer: usize| allowed.contains(&layer))
    }
}

/// Values by end of name.
struct Patterns<T> {
    key: &'static str,
    values: Vec<(Regex, String, T)>,
}

impl<T: Copy> Patterns<T> {
    fn new(key: &'static str, patterns: &[(String, T)]) -> Result<Self> {
        let compile = |(pattern, value): &(String, T)| {
            Ok((whole(key, &format!(r"(?:.*\.)?(?:{pattern})"))?, pattern.clone(), *value))
        };
        Ok(Self { key, values: patterns.iter().map(compile).collect::<Result<_>>()? })
    }

    fn get(&self, module: &str) -> Option<T> {
        self.values.iter().find(|(regex, ..)| regex.is_match(module)).map(|&(.., value)| value)
    }

    fn refuse_unused(&self, targets: &[&ModuleInfo]) -> Result<()> {
        for (regex, pattern, _) in &self.values {
            if !targets.iter().any(|module| regex.is_match(&module.name)) {
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
mod tests {
    use super::*;

    fn model() -> Vec<ModuleInfo> {
        let module = |name: String, kind, shape: &[usize]| ModuleInfo { name, kind, shape: shape.into() };
        let mut modules = vec![module("model.embed_tokens".into(), ModuleKind::Embedding, &[48, 8])];
        for layer in [0, 1, 10] {
            let block = format!("model.layers.{layer}");
            modules.push(module(format!("{block}.input_layernorm"), ModuleKind::Norm, &[8]));
            for name in ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"] {
                modules.push(module(format!("{block}.{name}"), ModuleKind::Linear, &[8, 8]));
            }
        }
        modules.push(module("model.norm".into(), ModuleKind::Norm, &[8]));
        modules.push(module("lm_head".into(), ModuleKind::Head, &[48, 8]));
        modules
    }

    fn list(names: &[&str]) -> Names {
        Names::List(names.iter().map(|&name| name.into()).collect())
    }

    fn named(names: Names) -> TargetSpec {
        TargetSpec { target_modules: TargetModules::Named(names), ..Default::default() }
    }

    fn short(spec: &TargetSpec) -> Vec<String> {
        let targets = resolve(spec, &model()).expect("resolves");
        targets.iter().map(|target| target.name.replace("model.layers.", "").replace("_proj", "")).collect()
    }

    fn error(spec: &TargetSpec) -> String {
        resolve(spec, &model()).expect_err("refused").to_string()
    }

    #[test]
    fn all_linear_leaves_the_head_alone() {
        let spec = TargetSpec::default();
        assert_eq!(
            short(&spec),
            [
                "0.self_attn.q",
                "0.self_attn.o",
                "0.mlp.gate",
                "1.self_attn.q",
                "1.self_attn.o",
                "1.mlp.gate",
                "10.self_attn.q",
                "10.self_attn.o",
                "10.mlp.gate"
            ]
        );
    }

    #[test]
    fn a_list_matches_whole_words_at_the_end() {
        assert_eq!(short(&named(list(&["0.self_attn.q_proj", "lm_head"]))), ["0.self_attn.q", "lm_head"]);
        // `proj` ends many names, but none from a dot on.
        assert!(error(&named(list(&["proj"]))).contains("`proj`, which matches no module"));
    }

    #[test]
    fn a_string_is_a_regex_for_the_whole_name() {
        assert_eq!(
            short(&named(Names::Regex(r".*\.1\..*(q|gate)_proj".into()))),
            ["1.self_attn.q", "1.mlp.gate"]
        );
        assert!(error(&named(Names::Regex("q_proj".into()))).contains("matches no module"));
        assert!(error(&named(Names::Regex("(".into()))).contains("unclosed group"));
    }

    #[test]
    fn exclusions_and_saved_modules_get_no_lora() {
        let mut spec =
            TargetSpec { exclude_modules: list(&["o_proj", "mlp.gate_proj"]), ..Default::default() };
        assert_eq!(short(&spec), ["0.self_attn.q", "1.self_attn.q", "10.self_attn.q"]);
        spec.exclude_modules = Names::Regex(r".*\.(0|10)\..*".into());
        spec.modules_to_save = vec!["mlp".into()];
        assert_eq!(short(&spec), ["1.self_attn.q", "1.self_attn.o"]);
        spec.exclude_modules = list(&["k_proj"]);
        assert!(error(&spec).contains("`exclude_modules` has `k_proj`"));
    }

    #[test]
    fn layers_restrict_ends_of_names_only() {
        let mut spec = named(list(&["q_proj", "model.layers.0.mlp.gate_proj"]));
        spec.layers_to_transform = Some(vec![1]);
        assert_eq!(short(&spec), ["0.mlp.gate", "1.self_attn.q"]);
        spec.layers_pattern = vec!["layers".into()];
        assert_eq!(short(&spec), ["0.mlp.gate", "1.self_attn.q"]);
        spec.layers_pattern = vec!["blocks".into()];
        assert_eq!(short(&spec), ["0.mlp.gate"]);
    }

    #[test]
    fn ranks_and_scales() {
        let mut spec = named(list(&["q_proj", "gate_proj"]));
        (spec.r, spec.lora_alpha) = (4, 16.0);
        // The first key that matches wins; `1.self_attn.q_proj` must not match layer 10 or 1 of a longer word.
        spec.rank_pattern = vec![("0.self_attn.q_proj".into(), 2), ("q_proj".into(), 16)];
        spec.alpha_pattern = vec![(r"layers\.\d+\.mlp.*".into(), 8.0)];
        let triples = |spec: &TargetSpec| {
            let targets = resolve(spec, &model()).expect("resolves");
            targets.iter().map(|t| (t.r, t.alpha, t.scale)).collect::<Vec<_>>()
        };
        let rest = [(16, 16.0, 1.0), (4, 8.0, 2.0)];
        assert_eq!(triples(&spec), [[(2, 16.0, 8.0), (4, 8.0, 2.0)], rest, rest].concat());
        spec.use_rslora = true;
        assert_eq!(triples(&spec)[2..4], [(16, 16.0, 4.0), (4, 8.0, 4.0)]);
    }

    #[test]
    fn a_name_without_effect_is_an_error() {
        insta::assert_snapshot!(error(&named(list(&["q_prj"]))), @r"
        error: cannot choose the modules that get LoRA
          caused by: `target_modules` has `q_prj`, which matches no module; the model has embed_tokens, gate_proj, input_layernorm, lm_head, norm, o_proj, q_proj
        hint: did you mean `q_proj`?
        ");
        let unused = TargetSpec { rank_pattern: vec![("up_proj".into(), 4)], ..Default::default() };
        insta::assert_snapshot!(error(&unused), @"
        error: cannot choose the modules that get LoRA
          caused by: `rank_pattern` has `up_proj`, which matches no module with LoRA
        hint: remove it, or write the end of a module's name: `q_proj`
        ");
        insta::assert_snapshot!(error(&named(list(&["norm"]))), @r#"
        error: cannot choose the modules that get LoRA
          caused by: `target_modules` matches `model.norm`, a norm; accepted: linear layers, the embedding, the head
        hint: write `modules_to_save = ["norm"]` to train it whole
        "#);
        let none = TargetSpec { exclude_modules: Names::Regex(".*".into()), ..Default::default() };
        insta::assert_snapshot!(error(&none), @r#"
        error: cannot choose the modules that get LoRA
          caused by: `target_modules` leaves no module: exclude_modules, modules_to_save or layers_to_transform take all
        hint: write `target_modules = "all-linear"` and remove the others
        "#);
        insta::assert_snapshot!(error(&TargetSpec { r: 0, ..Default::default() }), @"
        error: cannot choose the modules that get LoRA
          caused by: `model.layers.0.self_attn.q_proj` has r 0 and lora_alpha 8; accepted: r from 1, a finite lora_alpha
        ");
    }

    #[test]
    fn saved_modules_end_with_the_name() {
        let spec = |name: &str| TargetSpec { modules_to_save: vec![name.into()], ..Default::default() };
        assert_eq!(resolve_saved(&spec("lm_head"), &model()).expect("known"), ["lm_head"]);
        assert_eq!(resolve_saved(&spec("norm"), &model()).expect("known").len(), 4);
        assert!(resolve_saved(&spec("score"), &model()).is_err());
    }

    #[test]
    fn tables_may_have_lora_where_they_are_named() {
        let targets = resolve(&named(list(&["embed_tokens", "lm_head"])), &model()).expect("resolves");
        let kinds: Vec<ModuleKind> = targets.iter().map(|target| target.kind).collect();
        assert_eq!(kinds, [ModuleKind::Embedding, ModuleKind::Head]);
        let all = resolve(&named(Names::Regex(r".*(embed_tokens|\.0\..*q_proj)".into())), &model());
        assert_eq!(all.expect("resolves").len(), 2);
    }

    #[test]
    fn rows_are_of_tables_and_within_them() {
        let spec = |name: &str, ids: &[u32]| TargetSpec {
            trainable_token_indices: BTreeMap::from([(name.into(), ids.into())]),
            ..Default::default()
        };
        let rows = |spec: &TargetSpec| resolve_rows(spec, &model());
        assert_eq!(
            rows(&spec("embed_tokens", &[47, 0])).expect("resolves"),
            BTreeMap::from([("model.embed_tokens".to_owned(), vec![47, 0])])
        );
        assert!(rows(&spec("lm_head", &[1])).is_ok());
        let mut errors: Vec<_> = [("q_proj", &[1][..]), ("embed_tokens", &[1, 48]), ("lm_head", &[3, 3])]
            .iter()
            .map(|(name, ids)| rows(&spec(name, ids)).expect_err(name).to_string())
            .collect();
        let saved = TargetSpec { modules_to_save: vec!["lm_head".into()], ..spec("lm_head", &[1]) };
        errors.push(rows(&saved).expect_err("saved too").to_string());
        let target_modules = TargetModules::Named(list(&["lm_head"]));
        let adapted = TargetSpec { target_modules, ..spec("lm_head", &[1]) };
        errors.push(rows(&adapted).expect_err("adapted too").to_string());
        insta::assert_snapshot!(errors.join("\n"), @"
        error: cannot choose the tokens whose rows train
          caused by: `trainable_token_indices` has `q_proj`, which is no embedding or head; the model has embed_tokens, lm_head
        error: cannot choose the tokens whose rows train
          caused by: `trainable_token_indices` has token 48; `model.embed_tokens` has 48 rows; accepted: 0 to 47
        error: cannot choose the tokens whose rows train
          caused by: `trainable_token_indices` has token 3 twice
        error: cannot choose the tokens whose rows train
          caused by: `modules_to_save` has `lm_head` too
        hint: remove it from `modules_to_save`, or from `trainable_token_indices`
        error: cannot choose the tokens whose rows train
          caused by: `target_modules` has `lm_head` too
        hint: remove it from `target_modules`, or from `trainable_token_indices`
        ");
    }

    #[test]
    fn written_names_mean_the_same_modules() {
        let mut spec =
            TargetSpec { exclude_modules: Names::Regex(r".*\.0\.mlp.*".into()), ..Default::default() };
        let targets = resolve(&spec, &model()).expect("resolves");
        let names = target_names(&targets, &model());
        assert_eq!(
            names,
            ["model.layers.1.mlp.gate_proj", "model.layers.10.mlp.gate_proj", "o_proj", "q_proj"]
        );
        spec = named(Names::List(names));
        assert_eq!(resolve(&spec, &model()).expect("resolves"), targets);
    }
}
