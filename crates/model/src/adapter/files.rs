//! adapter_model.safetensors: an adapter on disk.
//!
//! Reading checks the file against the configuration (each module has all its tensors, in the
//! shapes of its rank) and keeps it mapped. [`SavedAdapter::fitted`] then compares it with a
//! model. `tensors` defines the names.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::expert_parameters::{
    ExpertLora, ExpertModules, ExpertPart, ParameterLora, WrappedExperts, add_wrapped, parameter_loras,
};
use super::targets::{self, check_ids, check_vocabulary, ends_with_name};
use super::tensors::{PREFIX, WEIGHTS_FILE, file_name, split_name, without_adapter};
use super::{AdapterConfig, AdapterTensor, CONFIG_FILE, Target, TensorKind};
use crate::error::{Error, ErrorContext as _, Result};
use crate::model::{Module, ModuleKind};
use crate::units;
use crate::weights::{
    self, ClassNames, EMBED_TOKENS_MODULE, LM_HEAD_MODULE, Metadata, ModelFiles, ModelIdentity, NameRules,
    StoredDtype, StoredElement, TensorInfo, TensorSink, WriteEntry, Written,
};

/// The metadata entry with the [`ModelIdentity`] of the model on which the adapter was trained. It
/// is not a key of adapter_config.json, because PEFT before 0.13 refuses unknown keys; PEFT ignores
/// metadata.
const BASE_MODEL: &str = "finetune.base_model";

/// The modules of the token embedding and the output head, in every family.
pub(super) const TABLES: [&str; 2] = [EMBED_TOKENS_MODULE, LM_HEAD_MODULE];

/// Suffixes of redundant tensors: another tensor has precedence, that of the table itself or the
/// one that PEFT trained beside the original.
const COPIES: [(&str, &[&str]); 4] = [
    (".original_module.weight", &[".weight", ".modules_to_save.weight"]),
    (".original_module.bias", &[".bias", ".modules_to_save.bias"]),
    (".modules_to_save.weight", &[".weight"]),
    (".token_adapter.trainable_tokens_original", &[".token_adapter.trainable_tokens_delta"]),
];

/// An open adapter on disk, checked against its own configuration.
#[derive(Debug)]
pub struct SavedAdapter {
    config: AdapterConfig,
    files: ModelFiles,
    names: TensorNames,
    targets: Vec<Target>,
    saved: BTreeSet<String>,
    rows: BTreeMap<String, Vec<u32>>,
    /// LoRA on the tensors of all experts of a layer, until a model gives the experts' names.
    parameters: Vec<ParameterLora>,
    /// The parts of these tensors, by module.
    parts: BTreeMap<String, [(TensorKind, ExpertPart); 2]>,
    /// A warning about tensors that the model does not use.
    note: Option<String>,
}

/// The names in the file of each module's tensors.
type TensorNames = BTreeMap<String, BTreeMap<TensorKind, String>>;

impl SavedAdapter {
    /// Opens the adapter in `folder`.
    ///
    /// # Errors
    /// User: a file is missing or malformed; weights are a pickle; a tensor has a name or a type
    /// that is not LoRA's; a module is without a tensor, or has one that does not match the rank,
    /// the magnitudes or the tokens of the configuration; the file has no tensor.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut config = AdapterConfig::read(folder)?;
        let path = folder.join(WEIGHTS_FILE);
        let failed =
            |cause: String| Error::user(format!("cannot read adapter {}", folder.display())).because(cause);
        if !path.exists() {
            return Err(missing_weights(folder));
        }
        let files = ModelFiles::open_file(&path)?;
        let rules = NameRules::new(files.names());
        let class = ClassNames::of(files.names());
        config = config.translated(|name| class.usual(name));
        let mut wrapped = WrappedExperts::new();
        let names = index(&files, &rules, &mut wrapped).map_err(failed)?;
        // PEFT writes the names of the wrapped model. A key that ends a module's name, or is no
        // name, stays.
        let has_module = |key: &str| names.keys().any(|module| targets::ends_with_name(module, key));
        let (ranks, alphas) = (&mut config.spec.rank_pattern, &mut config.spec.alpha_pattern);
        for key in ranks.iter_mut().map(|(key, _)| key).chain(alphas.iter_mut().map(|(key, _)| key)) {
            if !has_module(key) {
                *key = rules.canonical(key);
            }
        }
        config.target_parameters.iter_mut().for_each(|name| *name = rules.canonical(name));
        let adapted =
            names.iter().filter_map(|(module, kinds)| Some((module.as_str(), adapted(module, kinds)?)));
        let targets = targets::targets_of(&config.spec, adapted)?;
        let saved = names.iter().filter(|(_, kinds)| kinds.keys().any(|kind| kind.is_saved()));
        let saved: BTreeSet<String> = saved.map(|(module, _)| module.clone()).collect();
        let parameters = parameter_loras(&wrapped, &config, &files).map_err(failed)?;
        let (rows, parts) = (BTreeMap::new(), BTreeMap::new());
        let mut adapter = Self { config, files, names, targets, saved, rows, parameters, parts, note: None };
        for target in &adapter.targets {
            adapter.check_target(target).map_err(failed)?;
        }
        for name in &adapter.config.spec.modules_to_save {
            if !adapter.saved.iter().any(|module| module.ends_with(name)) {
                return Err(failed(format!(
                    "{CONFIG_FILE} has `modules_to_save` with `{name}`, of which {WEIGHTS_FILE} holds no tensor"
                )));
            }
        }
        adapter.rows = adapter.read_rows().map_err(failed)?;
        Ok(adapter)
    }

    /// Returns the folder from which it was read.
    pub fn folder(&self) -> &Path {
        self.files.folder()
    }

    /// Returns the adapter's configuration, as read from its folder.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Returns the model on which it was trained, or `None` if the file does not record it, as
    /// PEFT's files.
    ///
    /// # Errors
    /// User: the entry is malformed.
    pub fn base_model(&self) -> Result<Option<ModelIdentity>> {
        let text = self.files.metadata(BASE_MODEL);
        let base = text.map(ModelIdentity::from_json).transpose();
        base.during(|| format!("cannot read adapter {}", self.folder().display()))
    }

    /// Returns the modules with LoRA, sorted by name, with the ranks and scales of their training.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// Returns the modules that are saved whole, sorted.
    pub fn saved(&self) -> impl ExactSizeIterator<Item = &str> {
        self.saved.iter().map(String::as_str)
    }

    /// Returns the tokens with trained rows, by embedding or head, in the order of their rows.
    pub fn rows(&self) -> &BTreeMap<String, Vec<u32>> {
        &self.rows
    }

    /// Returns the vocabulary size of a model of `own` tokens with this adapter. It is that of the
    /// saved tables if embedding and head agree on it. Otherwise it is `own`, or more if the
    /// adapter trains the rows of all tokens that follow directly.
    pub fn vocab_size(&self, own: usize, tied: bool) -> usize {
        let ids: BTreeSet<usize> = self.rows.values().flatten().map(|id| *id as usize).collect();
        let grown = (own..).find(|id| !ids.contains(id)).unwrap_or(own);
        // A saved table also replaces its tied twin if they stay tied; a copy of the base's always
        // does.
        let whole = |module: &str| {
            let saved = self.info(module, TensorKind::SavedWeight);
            let info = saved.or_else(|| self.info(module, TensorKind::BaseWeight))?;
            let shared = tied && (saved.is_none() || self.config.ensure_weight_tying);
            Some((*info.shape.first()?, shared))
        };
        match TABLES.map(whole) {
            [Some((embed, _)), Some((head, _))] if embed == head => embed,
            [Some((tokens, true)), None] | [None, Some((tokens, true))] => tokens,
            _ => grown,
        }
    }

    /// Returns the tensors of all experts of a layer that have LoRA, until
    /// [`SavedAdapter::fitted`] gives it to the experts.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = &Target> {
        self.parameters.iter().map(|lora| &lora.target)
    }

    /// Returns the header entry of a tensor.
    pub fn info(&self, module: &str, kind: TensorKind) -> Option<&TensorInfo> {
        self.part(module, kind)
            .map_or_else(|| self.files.info(&self.name(module, kind)), |part| Some(&part.info))
    }

    /// Returns the part of a tensor of all experts that is this tensor.
    fn part(&self, module: &str, kind: TensorKind) -> Option<&ExpertPart> {
        self.parts.get(module)?.iter().find(|(of, _)| *of == kind).map(|(_, part)| part)
    }

    /// Returns the tensor's name in this file, or this program's name for it if it is missing.
    fn name(&self, module: &str, kind: TensorKind) -> Cow<'_, str> {
        match self.names.get(module).and_then(|kinds| kinds.get(&kind)) {
            Some(name) => Cow::Borrowed(name),
            None => Cow::Owned(file_name(module, kind)),
        }
    }

    /// Reads a tensor, rounded to `T`; `out` has its number of elements.
    ///
    /// # Errors
    /// User: the tensor is missing, or holds NaN or infinity. Internal: `out` has another length.
    pub fn read_into<T: StoredElement>(&self, module: &str, kind: TensorKind, out: &mut [T]) -> Result<()> {
        if self.part(module, kind).is_some() {
            return self.read_part(module, kind, 0, out);
        }
        let name = self.name(module, kind);
        self.files.read_into(&name, out)?;
        self.check_finite(&name, out)
    }

    /// Reads `out.len()` elements of a tensor from element `start` on, rounded to `T`.
    ///
    /// # Errors
    /// The same as for [`SavedAdapter::read_into`]; internal: the part is not inside the tensor.
    pub fn read_part<T: StoredElement>(
        &self,
        module: &str,
        kind: TensorKind,
        start: usize,
        out: &mut [T],
    ) -> Result<()> {
        let Some(part) = self.part(module, kind) else {
            let name = self.name(module, kind);
            self.files.read_part(&name, start, out)?;
            return self.check_finite(&name, out);
        };
        let stored = self.files.bytes(&part.name)?;
        let size = part.info.dtype.size_bytes();
        let mut gathered = Vec::with_capacity(out.len() * size);
        while gathered.len() < out.len() * size {
            let done = gathered.len() / size;
            let (source, run) = part.source_run(start + done);
            let end = source + run.min(out.len() - done);
            let values = stored.get(source * size..end * size);
            let outside = || Error::internal(format!("a part of `{}` is outside it", part.name));
            gathered.extend_from_slice(values.ok_or_else(outside)?);
        }
        if !T::decode(&gathered, part.info.dtype, out) {
            let (name, dtype) = (&part.name, part.info.dtype);
            return Err(Error::user(format!("cannot read adapter {}", self.folder().display()))
                .because(format!("tensor `{name}` has dtype {dtype}; accepted: F32, F16, BF16, F64")));
        }
        self.check_finite(&part.name, out)
    }

    fn check_finite<T: StoredElement>(&self, name: &str, values: &[T]) -> Result<()> {
        match values.iter().map(|value| value.to_f32()).find(|value| !value.is_finite()) {
            None => Ok(()),
            Some(value) => Err(Error::user(format!("cannot read adapter {}", self.files.folder().display()))
                .because(format!("tensor `{name}` holds {value}; accepted: finite numbers"))
                .hint("give an earlier checkpoint of that run")),
        }
    }

    /// Returns the raw bytes of a tensor in the file.
    ///
    /// # Errors
    /// User: the tensor is missing.
    pub fn bytes(&self, module: &str, kind: TensorKind) -> Result<&[u8]> {
        self.files.bytes(&self.name(module, kind))
    }

    /// Leaves out the tensors of modules that the model does not use, `unread`: other trainers
    /// adapt keys and values that no block reads. [`SavedAdapter::warning`] counts them. An adapter
    /// without other tensors stays as it is, so that [`SavedAdapter::fitted`] refuses it.
    #[must_use]
    pub fn without(mut self, unread: &BTreeSet<String>) -> Self {
        let count = self.names.keys().filter(|module| unread.contains(*module)).count();
        if count == 0 || count == self.names.len() {
            return self;
        }
        self.names.retain(|module, _| !unread.contains(module));
        self.targets.retain(|target| !unread.contains(&target.name));
        self.saved.retain(|module| !unread.contains(module));
        let modules = units::exact(count, "module");
        self.note = Some(format!(
            "{modules} of the adapter compute keys and values of blocks that read those of another block: \
             they are not used"
        ));
        self
    }

    /// Returns the warning about tensors that the model does not use, if it has some.
    pub fn warning(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Gives LoRA on tensors of all experts to the experts of a model, and checks that each tensor
    /// fits a module of it.
    ///
    /// # Errors
    /// User: the adapter was made for another model.
    pub fn fitted(mut self, modules: &[Module]) -> Result<Self> {
        if !self.parameters.is_empty() {
            let experts = ExpertModules::of(modules);
            for lora in std::mem::take(&mut self.parameters) {
                for ExpertLora { target, parts } in experts.expanded(&lora).map_err(|why| self.misfit(why))? {
                    self.parts.insert(target.name.clone(), parts);
                    self.targets.push(target);
                }
            }
            self.targets.sort_by(|a, b| a.name.cmp(&b.name));
            self.config.name_experts(&self.targets, modules);
        }
        self.check_fits(modules)?;
        Ok(self)
    }

    fn misfit(&self, cause: String) -> Error {
        let base = self.config.base_model_name_or_path.as_deref().unwrap_or("the adapter does not name it");
        Error::user(format!("cannot use adapter {} with this model", self.files.folder().display()))
            .because(cause)
            .hint(format!("give the model it was trained on as `--model`: {base}"))
    }

    /// Checks that each tensor fits a module of the model.
    ///
    /// # Errors
    /// User: the adapter was made for another model.
    pub fn check_fits(&self, modules: &[Module]) -> Result<()> {
        let by_name: BTreeMap<&str, &Module> =
            modules.iter().map(|module| (module.name.as_str(), module)).collect();
        let other = |cause: String| self.misfit(cause);
        for (module, parts) in &self.parts {
            let module = by_name.get(module.as_str()).copied();
            let misfit =
                parts.iter().find(|(kind, part)| !module.is_some_and(|m| fits(*kind, m, &part.info.shape)));
            if let (Some((_, part)), Some(module)) = (misfit, module) {
                return Err(other(format!(
                    "`{}` has {:?} for `{}`, the weight of which has {:?}",
                    part.name, part.info.shape, module.name, module.shape
                )));
            }
        }
        for (module, kinds) in &self.names {
            let Some(target) = by_name.get(module.as_str()) else {
                return Err(other(format!("it has tensors for `{module}`, which the model does not have")));
            };
            let misfit = kinds
                .iter()
                .filter_map(|(kind, name)| Some((*kind, name, self.files.info(name)?)))
                .find(|(kind, _, info)| !fits(*kind, target, &info.shape));
            if let Some((_, name, info)) = misfit {
                return Err(other(format!(
                    "`{name}` has shape {:?}, the weight of `{module}` has {:?}",
                    info.shape, target.shape
                )));
            }
        }
        for (module, ids) in &self.rows {
            by_name
                .get(module.as_str())
                .map_or(Ok(()), |table| check_vocabulary(ids, table))
                .map_err(other)?;
        }
        Ok(())
    }

    fn check_target(&self, target: &Target) -> Result<(), String> {
        let module = &target.name;
        let [first, second] = halves(target.kind);
        for (kind, rank_at) in [(first, 0), (second, 1)] {
            let name = self.name(module, kind);
            let Some(info) = self.files.info(&name) else {
                return Err(format!("{WEIGHTS_FILE} has no tensor `{name}`, though it has the other half"));
            };
            if info.shape.len() != 2 || info.shape[rank_at] != target.r {
                let expected =
                    if rank_at == 0 { format!("[{}, in]", target.r) } else { format!("[out, {}]", target.r) };
                return Err(format!(
                    "tensor `{name}` has shape {:?}; r = {} in {CONFIG_FILE} makes it {expected}",
                    info.shape, target.r
                ));
            }
        }
        self.check_magnitude(target)?;
        let also =
            |kinds: &[TensorKind]| kinds.iter().find(|kind| self.info(module, **kind).is_some()).copied();
        if let Some(kind) = also(&[TensorKind::SavedWeight, TensorKind::SavedBias]) {
            let name = self.name(module, kind);
            return Err(format!("module `{module}` has LoRA and is saved whole too (`{name}`)"));
        }
        let [other, _] = halves(match target.kind {
            ModuleKind::Embedding => ModuleKind::Linear,
            _ => ModuleKind::Embedding,
        });
        if let Some(kind) = also(&[TensorKind::TokensDelta, other]) {
            let name = self.name(module, kind);
            return Err(format!("module `{module}` has `{}` and `{name}` too", self.name(module, first)));
        }
        Ok(())
    }

    /// Checks that DoRA has magnitudes for every module, one value for each row of B.
    fn check_magnitude(&self, target: &Target) -> Result<(), String> {
        let name = self.name(&target.name, TensorKind::LoraMagnitude);
        match (self.config.spec.use_dora, self.files.info(&name)) {
            (false, None) => Ok(()),
            (false, Some(_)) => Err(format!(
                "{WEIGHTS_FILE} has tensor `{name}`, but `use_dora` is not true in {CONFIG_FILE}"
            )),
            (true, None) => {
                Err(format!("{WEIGHTS_FILE} has no tensor `{name}`, but `use_dora` is true in {CONFIG_FILE}"))
            }
            (true, Some(info)) => {
                let [_, b] = halves(target.kind);
                let expected: Option<&[usize]> = self.info(&target.name, b).map(|b| &b.shape[..1]);
                if expected == Some(&info.shape) {
                    return Ok(());
                }
                let (actual, b) = (&info.shape, self.name(&target.name, b));
                Err(format!(
                    "tensor `{name}` has shape {actual:?}; `{b}` makes it {:?}",
                    expected.unwrap_or(&[])
                ))
            }
        }
    }

    /// Returns the tokens of each tensor of rows, in the order of the configuration.
    fn read_rows(&self) -> Result<BTreeMap<String, Vec<u32>>, String> {
        let key = "trainable_token_indices";
        let tokens = &self.config.spec.trainable_token_indices;
        let mut rows: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (module, kinds) in &self.names {
            let Some(name) = kinds.get(&TensorKind::TokensDelta) else { continue };
            // For a tied pair, PEFT may save the rows under both names although the configuration
            // has one.
            let own = tokens.iter().find(|(end, _)| ends_with_name(module, end));
            let Some((_, ids)) = own.or_else(|| tokens.first_key_value().filter(|_| tokens.len() == 1))
            else {
                return Err(format!(
                    "{WEIGHTS_FILE} has tensor `{name}`, but {CONFIG_FILE} has no `{key}` for it"
                ));
            };
            check_ids(ids)?;
            let shape = self.files.info(name).map(|info| info.shape.as_slice()).unwrap_or_default();
            if shape.len() != 2 || shape[0] != ids.len() {
                return Err(format!(
                    "tensor `{name}` has shape {shape:?}; `{key}` in {CONFIG_FILE} makes it [{}, hidden]",
                    ids.len()
                ));
            }
            rows.insert(module.clone(), ids.clone());
        }
        for (end, ids) in tokens {
            // For a tied pair with the same tokens, PEFT saves one tensor.
            let is_saved =
                |(module, saved): (&String, &Vec<u32>)| ends_with_name(module, end) || saved == ids;
            if !rows.iter().any(is_saved) {
                return Err(format!(
                    "{CONFIG_FILE} has `{key}` for `{end}`, of which {WEIGHTS_FILE} holds no rows"
                ));
            }
        }
        Ok(rows)
    }
}

/// Sorts each tensor by its module and kind.
fn index(files: &ModelFiles, rules: &NameRules, wrapped: &mut WrappedExperts) -> Result<TensorNames, String> {
    let mut names = TensorNames::new();
    let all: BTreeMap<&str, String> = files.names().map(|name| (name, without_adapter(name))).collect();
    let known: BTreeSet<&str> = all.values().map(String::as_str).collect();
    for (name, info) in files.tensors() {
        // For a resized table that is saved whole, PEFT also saves the original and a second copy.
        let is_copy = COPIES.iter().any(|(end, others)| {
            let table = all[name].strip_suffix(end);
            table.is_some_and(|table| others.iter().any(|other| known.contains(&*format!("{table}{other}"))))
        });
        if is_copy {
            continue;
        }
        if add_wrapped(wrapped, name, rules) {
            continue;
        }
        let Some((module, kind)) = split_name(name, rules) else {
            return Err(format!(
                "{WEIGHTS_FILE} has tensor `{name}`; accepted: {PREFIX}<module> and .lora_A.weight, .lora_B.weight, .lora_magnitude_vector, .lora_embedding_A, .lora_embedding_B, .token_adapter.trainable_tokens_delta, .base_layer.weight, .weight or .bias"
            ));
        };
        if !info.dtype.is_float() {
            return Err(format!("tensor `{name}` has dtype {}; accepted: F32, F16, BF16, F64", info.dtype));
        }
        if let Some(twin) = names.entry(module).or_default().insert(kind, name.into()) {
            return Err(format!("{WEIGHTS_FILE} has both `{twin}` and `{name}`, which mean the same tensor"));
        }
    }
    if names.is_empty() && wrapped.is_empty() {
        Err(format!("{WEIGHTS_FILE} holds no tensor"))
    } else {
        Ok(names)
    }
}

/// Returns the kind of a module with these tensors, if it has LoRA.
fn adapted(module: &str, kinds: &BTreeMap<TensorKind, String>) -> Option<ModuleKind> {
    let has = |kind| kinds.contains_key(&kind);
    if has(TensorKind::LoraEmbeddingA) || has(TensorKind::LoraEmbeddingB) {
        return Some(ModuleKind::Embedding);
    }
    let kind = if module == TABLES[1] { ModuleKind::Head } else { ModuleKind::Linear };
    kinds.keys().any(|kind| kind.is_lora()).then_some(kind)
}

/// Returns the kinds of A and B.
fn halves(kind: ModuleKind) -> [TensorKind; 2] {
    match kind {
        ModuleKind::Embedding => [TensorKind::LoraEmbeddingA, TensorKind::LoraEmbeddingB],
        _ => [TensorKind::LoraA, TensorKind::LoraB],
    }
}

/// Returns whether a tensor of this shape belongs on the module.
fn fits(kind: TensorKind, module: &Module, saved: &[usize]) -> bool {
    use ModuleKind::{Embedding, Head};
    let has_matrix = module.kind.is_layer_of_block() || module.kind == Head;
    match (kind, module.kind, module.shape.as_slice(), saved) {
        (TensorKind::LoraA, _, &[_, inputs], &[_, saved]) if has_matrix => inputs == saved,
        (TensorKind::LoraB, _, &[outputs, _], &[saved, _]) if has_matrix => outputs == saved,
        (TensorKind::LoraMagnitude, _, &[outputs, _], &[saved]) if has_matrix => outputs == saved,
        (TensorKind::LoraMagnitude, Embedding, &[_, hidden], &[saved]) => hidden == saved,
        (TensorKind::LoraEmbeddingA, Embedding, &[vocabulary, _], &[_, saved]) => vocabulary == saved,
        (TensorKind::LoraEmbeddingB, Embedding, &[_, hidden], &[saved, _]) => hidden == saved,
        (TensorKind::TokensDelta, Embedding | Head, &[_, hidden], &[_, saved]) => hidden == saved,
        (TensorKind::BaseWeight | TensorKind::SavedWeight, _, expected, saved) => expected == saved,
        (TensorKind::SavedBias, _, expected, &[saved]) => expected.first() == Some(&saved),
        _ => false,
    }
}

fn missing_weights(folder: &Path) -> Error {
    let failed = Error::user(format!("cannot read adapter {}", folder.display()));
    if folder.join("adapter_model.bin").exists() {
        let shown = folder.display();
        return failed
            .because(format!("its weights are a pickle file (adapter_model.bin), which can run code when opened; accepted: {WEIGHTS_FILE}"))
            .hint(format!(
                "convert it once with Python: python -c \"import torch; from safetensors.torch import save_file; save_file(torch.load('{shown}/adapter_model.bin', weights_only=True), '{shown}/{WEIGHTS_FILE}')\""
            ));
    }
    failed
        .because(format!("it has no {WEIGHTS_FILE}"))
        .hint(format!("give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}"))
}

/// Writes an adapter into the existing `folder`: the weights as `dtype` in the order of their
/// names, then the configuration, with the names of `class`. `base` is the model on which it was
/// trained. `write` is called once for each tensor and passes its values to the sink.
///
/// # Errors
/// The same as for [`weights::write_file`].
pub fn write(
    folder: &Path,
    (config, class): (&AdapterConfig, &ClassNames),
    base: &ModelIdentity,
    tensors: &[AdapterTensor],
    dtype: StoredDtype,
    mut write: impl FnMut(&AdapterTensor, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Vec<Written>> {
    let by_name: BTreeMap<String, &AdapterTensor> = tensors
        .iter()
        .map(|tensor| (file_name(&class.module(&tensor.module), tensor.kind), tensor))
        .collect();
    let entry = |(name, tensor): (&String, &&AdapterTensor)| WriteEntry {
        name: name.clone(),
        dtype,
        shape: tensor.shape.clone(),
        stack: None,
    };
    let entries: Vec<WriteEntry> = by_name.iter().map(entry).collect();
    let metadata = Metadata::from([(BASE_MODEL.to_owned(), base.to_json())]);
    let path = folder.join(WEIGHTS_FILE);
    let weights =
        weights::write_file_with(&path, &entries, &metadata, |entry, sink| match by_name.get(&entry.name) {
            Some(tensor) => write(tensor, sink),
            None => Err(Error::internal(format!("cannot write tensor `{}`", entry.name))),
        })?;
    let config = weights::write_text(
        &folder.join(CONFIG_FILE),
        &config.translated(|name| class.word(name)).to_json(),
    )?;
    Ok(vec![weights, config])
}
