//! First values of parameters. The model's come from files or a seed. The adapter's come from a
//! saved adapter, are new, or derive from the base weight under it (PiSSA, LoftQ, DoRA's
//! magnitudes).
//!
//! Files are read and quantized in pieces. So loading a quantized base needs the memory of the
//! quantized model and the pages of one stored tensor. If an adapter derives from a weight, it also
//! needs that weight in f32.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use candle_core::{Device, Tensor};

use super::adapter_setup::{AdapterSetup, AdapterStart};
use super::param_layout::saved_as;
use crate::adapter::{LowRankFactors, Target, TensorKind};
use crate::error::{Error, Result};
use crate::locks::locked;
use crate::model::{self, ModelConfig, Module, ParamSpec, StoredModel, initial_lora, initial_value};
use crate::ops::dora::weight_norm;
use crate::ops::matmul_quantized::Weight;
use crate::parallel::{LoadTarget, LocalRange, ParamDesc, TOKEN_ROWS};
use crate::quant::{QuantViewMut, first_not_finite};
use crate::recipe::AdapterInit;
use crate::runtime::rng::RngStream;
use crate::weights::{EMBED_TOKENS, LM_HEAD, ModelFiles, ResizedEmbedding, StoredElement};

/// Number of values read at once: 16 MiB of f32.
const PIECE: usize = 1 << 22;

/// The sources of first values.
pub struct InitialValues<'a> {
    config: &'a ModelConfig,
    files: Option<&'a ModelFiles>,
    adapter_setup: Option<&'a AdapterSetup>,
    seed: u64,
    /// The values derived from base weights for their adapters, until those are filled. After a
    /// panic, no code reads them.
    derived: Mutex<BTreeMap<String, DerivedFactors>>,
    /// The parameters to draw if the model has no files, by name.
    drawn: HashMap<String, ParamSpec>,
    /// The modules that get adapters, by name.
    modules: HashMap<String, Module>,
    /// The modules with LoRA, by name.
    targets: HashMap<&'a str, &'a Target>,
    /// Embedding and head as stored, with rows for new tokens.
    tables: [Option<ResizedEmbedding<'a>>; 2],
}

/// An adapter's first values, derived from its base weight.
#[derive(Default)]
struct DerivedFactors {
    factors: Option<LowRankFactors>,
    magnitude: Vec<f32>,
}

impl<'a> InitialValues<'a> {
    /// Returns the first values of the parameters of a model.
    pub fn new(
        config: &'a ModelConfig,
        files: Option<&'a ModelFiles>,
        adapter_setup: Option<&'a AdapterSetup>,
        seed: u64,
    ) -> Self {
        let table = |name| files.map(|files| ResizedEmbedding::new(files, name));
        let tables = [EMBED_TOKENS, LM_HEAD].map(table);
        let drawn = if files.is_none() { model::parameters(config) } else { Vec::new() };
        let drawn = drawn.into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        let modules = if adapter_setup.is_some() { model::modules(config) } else { Vec::new() };
        let modules = modules.into_iter().map(|module| (module.name.clone(), module)).collect();
        let targets = adapter_setup.map_or(&[][..], |adapter_setup| &adapter_setup.targets).iter();
        let targets = targets.map(|target| (target.name.as_str(), target)).collect();
        InitialValues {
            config,
            files,
            adapter_setup,
            seed,
            derived: Mutex::default(),
            drawn,
            modules,
            targets,
            tables,
        }
    }

    /// Checks names and shapes of the whole checkpoint against the model before any weight is read.
    /// If the model in use has more tokens, embedding and head may have rows only for the
    /// `stored_tokens` of config.json.
    ///
    /// # Errors
    /// A tensor of the checkpoint is missing or has another shape.
    pub fn check(&self, descs: &[ParamDesc], stored_tokens: usize) -> Result<()> {
        let Some(files) = self.files else { return Ok(()) };
        let own = descs.iter().filter(|desc| !desc.kind.is_adapter());
        StoredModel { config: self.config, files, stored_tokens }
            .check("load", own.map(|desc| (desc.name.as_str(), desc.global_shape())))
    }

    /// Writes the first value of the part `local` of `desc` to `to`.
    ///
    /// # Errors
    /// A weight cannot be read or has values that the format cannot hold.
    pub fn fill(&self, desc: &ParamDesc, local: &LocalRange, to: LoadTarget<'_>) -> Result<()> {
        let (module, last) = desc.name.rsplit_once('.').unwrap_or((&desc.name, ""));
        let target = self.targets.get(module).copied();
        if let Some((adapter_setup, target)) = self.adapter_setup.zip(target)
            && last == "weight"
            && !desc.kind.is_adapter()
            && adapter_setup.derives_from_weights()
        {
            return self.fill_and_derive((desc, local), adapter_setup, target, to);
        }
        match to {
            LoadTarget::F32(out) => self.fill_as(desc, local, out),
            LoadTarget::Bf16(out) => self.fill_as(desc, local, out),
            LoadTarget::Quantized(runs) => self.fill_quantized(desc, local, runs),
        }
    }

    fn fill_as<T: StoredElement>(&self, desc: &ParamDesc, local: &LocalRange, out: &mut [T]) -> Result<()> {
        if desc.kind.is_adapter() {
            return local.fill_from_whole(out, |out| self.fill_adapter(desc, out));
        }
        let (module, last) = desc.name.rsplit_once('.').unwrap_or((&desc.name, ""));
        let saved = self.adapter_setup.and_then(|a| a.start.saved().zip(saved_as(self.config, a, module)));
        if let Some((adapter, name)) = saved {
            let kind = if last == "bias" { TensorKind::SavedBias } else { TensorKind::SavedWeight };
            return local.fill_from_whole(out, |out| adapter.read_into(name, kind, out));
        }
        // PEFT saves a copy of a table under its adapter; the adapter was trained on that copy.
        let base = self.adapter_setup.and_then(|a| a.start.saved());
        if let Some(adapter) =
            base.filter(|a| last == "weight" && a.info(module, TensorKind::BaseWeight).is_some())
        {
            return local.fill_from_whole(out, |out| adapter.read_into(module, TensorKind::BaseWeight, out));
        }
        // Piece by piece, so that the pages of a file can be released before the next are read.
        let mut start = 0;
        for piece in out.chunks_mut(PIECE) {
            local.read(start, piece, |at, out| self.read_base(&desc.name, at, out))?;
            self.let_go(&desc.name);
            start += piece.len();
        }
        Ok(())
    }

    /// Releases the pages of a base weight after reading.
    fn let_go(&self, name: &str) {
        if let Some(files) = self.files {
            files.discard(model::stored_name(self.config, files, name));
        }
    }

    /// Reads elements of a base weight from `start` on.
    fn read_base<T: StoredElement>(&self, name: &str, start: usize, out: &mut [T]) -> Result<()> {
        match self.files {
            Some(files) => {
                let name = model::stored_name(self.config, files, name);
                match (name, &self.tables) {
                    (EMBED_TOKENS, [Some(table), _]) | (LM_HEAD, [_, Some(table)]) => {
                        table.read_part(start, out)?;
                    }
                    _ => files.read_part(name, start, out)?,
                }
            }
            None => {
                // An untied head starts as the embedding.
                let tied = self.config.tie_word_embeddings && name == LM_HEAD;
                let name = if tied { EMBED_TOKENS } else { name };
                let spec = self.drawn.get(name);
                let spec = spec.ok_or_else(|| Error::internal(format!("no parameter is called {name}")))?;
                T::round(&initial_value(self.config, spec, self.seed, start, out.len()), out);
            }
        }
        Ok(())
    }

    /// Quantizes a base weight piece by piece, or copies the codes of a quantized checkpoint.
    fn fill_quantized(&self, desc: &ParamDesc, local: &LocalRange, mut to: QuantViewMut<'_>) -> Result<()> {
        if self.copy_stored(&desc.name, local, &mut to)? {
            return Ok(());
        }
        to.fill(local.elements(), &|start, values| {
            local.read(start, values, |at, out| self.read_base(&desc.name, at, out))?;
            check_finite(&desc.name, values)
        })?;
        self.let_go(&desc.name);
        Ok(())
    }

    /// Copies the codes of a weight that the files have in the format of `to`. Returns false if
    /// they have another.
    fn copy_stored(&self, name: &str, local: &LocalRange, to: &mut QuantViewMut<'_>) -> Result<bool> {
        let Some(files) = self.files.filter(|files| files.quantized_format(name).is_some()) else {
            return Ok(false);
        };
        local.whole_shape()?;
        let copied = files.copy_quantized(name, to)?;
        self.let_go(name);
        Ok(copied)
    }

    /// Fills the weight of an adapter's module, and derives the adapter's first values. They need
    /// the whole weight.
    fn fill_and_derive(
        &self,
        (desc, local): (&ParamDesc, &LocalRange),
        adapter_setup: &AdapterSetup,
        target: &Target,
        to: LoadTarget<'_>,
    ) -> Result<()> {
        let &[out, inputs] = local.whole_shape()? else {
            return Err(Error::internal(format!("{} is not a matrix", desc.name)));
        };
        let mut weight = vec![0f32; out * inputs];
        self.read_base(&desc.name, 0, &mut weight)?;
        self.let_go(&desc.name);
        check_finite(&desc.name, &weight)?;
        let stream = RngStream::new(self.seed).named(&target.name);
        let best = |weight: &[f32]| {
            LowRankFactors::principal(weight, (out, inputs), target.r, stream)
                .map(|factors| scaled(factors, target.scale))
        };
        let mut factors = match &adapter_setup.start {
            AdapterStart::Fresh(AdapterInit::Pissa) => Some(best(&weight)?),
            AdapterStart::Pissa(saved) => Some(saved.initial(&target.name)?),
            _ => None,
        };
        if let Some(factors) = &factors {
            // The adapter's part is removed from the base.
            factors.subtract_from(&mut weight, inputs, target.scale as f32);
        }
        let wanted =
            matches!(adapter_setup.start, AdapterStart::Fresh(AdapterInit::Loftq)).then(|| weight.clone());
        match to {
            LoadTarget::F32(to) => to.copy_from_slice(&weight),
            LoadTarget::Bf16(to) => {
                StoredElement::round(&weight, to);
                weight.iter_mut().zip(to).for_each(|(w, stored)| *w = stored.to_f32());
            }
            LoadTarget::Quantized(mut to) => {
                // An adapter that changes the weights needs a base that is not quantized.
                if factors.is_some() || !self.copy_stored(&desc.name, local, &mut to)? {
                    to.fill(weight.len(), &|start, values| {
                        values.copy_from_slice(&weight[start..start + values.len()]);
                        Ok(())
                    })?;
                }
                to.view().dequantize(0, &mut weight);
            }
        }
        if let Some(mut lost) = wanted {
            lost.iter_mut().zip(&weight).for_each(|(w, stored)| *w -= stored);
            factors = Some(best(&lost)?);
        }
        let magnitude = if adapter_setup.config.spec.use_dora {
            norms(weight, (out, inputs), factors.as_ref(), target)?
        } else {
            Vec::new()
        };
        locked(&self.derived).insert(target.name.clone(), DerivedFactors { factors, magnitude });
        Ok(())
    }

    /// Returns the factors that PiSSA took from each base weight.
    pub(crate) fn into_initial(self) -> BTreeMap<String, LowRankFactors> {
        let pissa = self.adapter_setup.is_some_and(AdapterSetup::is_pissa);
        let derived = std::mem::take(&mut *locked(&self.derived)).into_iter().filter(|_| pissa);
        derived.filter_map(|(module, derived)| Some((module, derived.factors?))).collect()
    }

    fn fill_adapter<T: StoredElement>(&self, desc: &ParamDesc, out: &mut [T]) -> Result<()> {
        let adapter_setup =
            self.adapter_setup.ok_or_else(|| Error::internal("an adapter slot without an adapter"))?;
        let part = AdapterPart::of(&desc.name)?;
        match &adapter_setup.start {
            AdapterStart::Saved(saved) => return saved.read_into(part.module, part.kind, out),
            AdapterStart::Pissa(saved) => return saved.read_trained(part.module, part.kind, out),
            _ => {}
        }
        let derived = locked(&self.derived);
        let derived = derived.get(part.module);
        let factors = derived.and_then(|derived| derived.factors.as_ref());
        match (part.kind, factors) {
            (TensorKind::LoraA, Some(factors)) => T::round(&factors.a, out),
            (TensorKind::LoraB, Some(factors)) => T::round(&factors.b, out),
            (TensorKind::LoraMagnitude, _) => {
                let derived = derived
                    .ok_or_else(|| Error::internal(format!("no weight of {} was read yet", part.module)))?;
                T::round(&derived.magnitude, out);
            }
            (TensorKind::TokensDelta, _) => self.fill_rows(part.module, out)?,
            (TensorKind::LoraA | TensorKind::LoraEmbeddingB, None) => {
                let gaussian = matches!(adapter_setup.start, AdapterStart::Fresh(AdapterInit::Gaussian));
                let module = self.modules.get(part.module);
                let module =
                    module.ok_or_else(|| Error::internal(format!("no module is called {}", part.module)))?;
                T::round(&initial_lora(module, desc.global_shape(), gaussian, self.seed), out);
            }
            // B, and an embedding's A, start as zero.
            _ => {}
        }
        Ok(())
    }

    /// Fills trained rows with their values in the table.
    fn fill_rows<T: StoredElement>(&self, module: &str, out: &mut [T]) -> Result<()> {
        let width = self.config.hidden_size;
        let ids = self.adapter_setup.and_then(|adapter_setup| adapter_setup.rows.get(module));
        for (row, &id) in out.chunks_exact_mut(width).zip(ids.into_iter().flatten()) {
            self.read_base(&format!("{module}.weight"), id as usize * width, row)?;
        }
        self.let_go(&format!("{module}.weight"));
        Ok(())
    }
}

/// The parts of a slot's name.
pub struct AdapterPart<'a> {
    /// The module that the adapter is on.
    pub module: &'a str,
    /// Which of its tensors it is.
    pub kind: TensorKind,
}

impl<'a> AdapterPart<'a> {
    const ENDS: [(&'static str, TensorKind); 8] = [
        (".lora_A.weight", TensorKind::LoraA),
        (".lora_B.weight", TensorKind::LoraB),
        (".lora_embedding_A", TensorKind::LoraEmbeddingA),
        (".lora_embedding_B", TensorKind::LoraEmbeddingB),
        (".lora_magnitude_vector", TensorKind::LoraMagnitude),
        (TOKEN_ROWS, TensorKind::TokensDelta),
        (".weight", TensorKind::SavedWeight),
        (".bias", TensorKind::SavedBias),
    ];

    /// Splits the name of a slot that an adapter trains.
    ///
    /// # Errors
    /// Fails if the slot belongs to no adapter.
    pub fn of(name: &'a str) -> Result<Self> {
        let split = Self::ENDS.iter().find_map(|(end, kind)| Some((name.strip_suffix(end)?, *kind)));
        let (module, kind) = split.ok_or_else(|| Error::internal(format!("no module for {name}")))?;
        Ok(AdapterPart { module, kind })
    }
}

/// Scales factors so that their product times `scale` is unchanged.
fn scaled(mut factors: LowRankFactors, scale: f64) -> LowRankFactors {
    let root = (1.0 / scale).sqrt() as f32;
    factors.a.iter_mut().chain(&mut factors.b).for_each(|value| *value *= root);
    factors
}

/// Returns DoRA's first magnitudes: the norms of the rows that the layer computes with.
fn norms(
    weight: Vec<f32>,
    (out, inputs): (usize, usize),
    factors: Option<&LowRankFactors>,
    target: &Target,
) -> Result<Vec<f32>> {
    let host = &Device::Cpu;
    let weight = Tensor::from_vec(weight, (out, inputs), host)?;
    let (a, b) = match factors {
        Some(LowRankFactors { a, b }) => (a.clone(), b.clone()),
        None => (vec![0.0; target.r * inputs], vec![0.0; out * target.r]),
    };
    let a = Tensor::from_vec(a, (target.r, inputs), host)?;
    let b = Tensor::from_vec(b, (out, target.r), host)?;
    Ok(weight_norm(Weight::Dense(&weight), &a, &b, target.scale)?.to_vec1()?)
}

fn check_finite(name: &str, values: &[f32]) -> Result<()> {
    match first_not_finite(values).map(|at| values[at]) {
        None => Ok(()),
        Some(value) => Err(Error::user(format!("cannot load {name}"))
            .because(format!("it holds {value}; accepted: finite numbers"))
            .hint("download the model again, or give another")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Segment;
    use crate::parallel::{LrGroup, MeshAxis, MeshShape, ParamKind, Placements, UpdateRule};
    use crate::recipe::{AdapterSection, TargetModules};

    #[test]
    fn a_part_of_a_parameter_starts_as_that_part_of_the_whole() -> Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let target_modules = TargetModules::Named(vec!["down_proj".to_owned()]);
        let section = AdapterSection { target_modules, r: 4, ..AdapterSection::default() };
        let adapter_setup = AdapterSetup::from_recipe(&section, ("base", &config), &[])?;
        let values = InitialValues::new(&config, None, Some(&adapter_setup), 7);
        let rule = UpdateRule { decay: true, lr_group: LrGroup::Base };
        for (name, shape, kind) in [
            ("mlp.down_proj.weight", [16, 24], ParamKind::Frozen { dtype: None }),
            ("mlp.down_proj.lora_A.weight", [4, 24], ParamKind::Adapter(rule)),
        ] {
            for dim in [0, 1] {
                let split = Placements::REPLICATED.shard(MeshAxis::Tensor, dim);
                let name = format!("model.layers.0.{name}");
                let desc = ParamDesc::new(name, shape.into(), split, Segment::Block(0), kind);
                let filled = |local: &LocalRange| {
                    let mut out = vec![0f32; local.elements()];
                    values.fill(&desc, local, LoadTarget::F32(&mut out)).map(|()| out)
                };
                let whole = filled(&desc.local_range(MeshShape::ONE, 0)?)?;
                assert!(whole.iter().all(|value| *value != 0.0));
                for rank in [0, 1] {
                    let local = desc.local_range(MeshShape::ONE.with(MeshAxis::Tensor, 2), rank)?;
                    assert_eq!(filled(&local)?, local.take(&whole, 0..whole.len() / 2), "{desc:?} {rank}");
                }
            }
        }
        Ok(())
    }
}
