//! A model with a LoRA adapter added in: W + scale · B A, streamed.
//!
//! Files keep the base's names and order, and tensors pass through in blocks of rows, so memory holds a block and
//! the adapter's A and B of one module (or one tensor that it saved whole), whatever the model's size. Sums are in f32
//! in PEFT's order (B A, times scale, plus W) and rounded once. The output folder appears whole or not at all.
//!
//! A tied embedding and head are one tensor on disk, under either name. An adapter that changes one of them
//! alone separates them: both are written, and config.json says so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};

use super::{Adapter, ModuleInfo, ModuleKind, Target, TensorKind};
use crate::error::{Error, Result};
use crate::weights::companions::{self, ConfigChanges};
use crate::weights::{
    self, EMBED_TOKENS, Entry, LM_HEAD, ModelFiles, NewFolder, OutputDtype, TensorSink, Written,
};

/// Elements (or bytes that are only copied) of a tensor in memory at once, if a row is not longer.
const BLOCK: usize = 1 << 22;

/// TEMPORARY
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BaseValues {
    /// As stored.
    AsStored,
    /// Quantized.
    Quantized(crate::quant::Format),
}

/// TEMPORARY
pub struct MergeOptions<'a> {
    /// Dtype.
    pub dtype: OutputDtype,
    /// Base.
    pub base: BaseValues,
    /// Verify.
    pub verify: &'a dyn Fn(&Path) -> Result<Option<Value>>,
}

/// What a merge did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeReport {
    /// Tensors that LoRA was added to.
    pub merged: usize,
    /// Tensors replaced by ones the adapter saved whole.
    pub replaced: usize,
    /// Tensors that are the base's.
    pub copied: usize,
    /// Whether a tied embedding and head are two tensors now.
    pub untied: bool,
    /// The weights that were written, under their names in the output folder.
    pub files: Vec<Written>,
}

/// Writes to the new folder `output` the model `base` with the adapter in the folder `adapter` added in.
///
/// # Errors
/// The user's: the adapter cannot be read or is not of this base; the base is quantized; `output` is not empty.
/// Storage: the disk is full or fails; nothing is left of `output` then.
pub fn merge(
    base: &ModelFiles,
    adapter: &Path,
    output: &Path,
    options: &MergeOptions<'_>,
) -> Result<MergeReport> {
    let dtype = options.dtype;
    let adapter = Adapter::read(adapter)?;
    let config = companions::read_config(base.folder())?;
    let plan = Plan::new(base, &adapter, &config, dtype)?;
    let folder = NewFolder::create(output)?;
    let mut files = Vec::with_capacity(plan.files.len());
    for (name, outs) in &plan.files {
        let by_name: BTreeMap<&str, &Out<'_>> =
            outs.iter().map(|out| (out.entry.name.as_str(), out)).collect();
        let entries: Vec<Entry> = outs.iter().map(|out| out.entry.clone()).collect();
        files.push(weights::write_file(&folder.path().join(name), &entries, |entry, sink| {
            match by_name.get(entry.name.as_str()) {
                Some(out) => write_tensor(base, &adapter, out, sink),
                None => Err(Error::internal(format!("cannot write tensor `{}`", entry.name))),
            }
        })?);
    }
    if base.is_indexed() {
        let places = plan.files.iter();
        let map = places.flat_map(|(name, outs)| outs.iter().map(move |out| (&out.entry, name.as_str())));
        files.push(weights::write_index(folder.path(), map)?);
    }
    let entries: Vec<Entry> = plan.outs().map(|out| out.entry.clone()).collect();
    let tie_word_embeddings = plan.untied.then_some(false);
    let changes = ConfigChanges { tie_word_embeddings, ..ConfigChanges::for_weights(&entries) };
    companions::copy(base.folder(), folder.path(), changes)?;
    (options.verify)(folder.path())?;
    folder.commit()?;
    for file in &mut files {
        file.path = output.join(file.path.file_name().unwrap_or_default());
    }
    let count = |wanted: fn(&Out<'_>) -> bool| plan.outs().filter(|out| wanted(out)).count();
    Ok(MergeReport {
        merged: count(|out| out.target.is_some()),
        replaced: count(|out| matches!(out.source, Source::Saved(..))),
        copied: count(|out| out.target.is_none() && matches!(out.source, Source::Base(_))),
        untied: plan.untied,
        files,
    })
}

/// Where the values of a tensor come from.
enum Source<'a> {
    /// The base's tensor of this name.
    Base(&'a str),
    /// The adapter's tensor of this module.
    Saved(&'a str, TensorKind),
}

/// A tensor of the merged model.
struct Out<'a> {
    entry: Entry,
    source: Source<'a>,
    target: Option<&'a Target>,
}

/// The files of the merged model with their tensors in order.
struct Plan<'a> {
    files: Vec<(String, Vec<Out<'a>>)>,
    untied: bool,
}

impl<'a> Plan<'a> {
    fn new(
        base: &'a ModelFiles,
        adapter: &'a Adapter,
        config: &Map<String, Value>,
        dtype: OutputDtype,
    ) -> Result<Self> {
        let tie = Tie::new(base, config);
        adapter.check_fits(&modules(base, &tie))?;
        let untied = tie.is_broken_by(adapter)?;
        let targets: BTreeMap<&str, &Target> =
            adapter.targets().iter().map(|target| (target.name.as_str(), target)).collect();
        let saved: BTreeSet<&str> = adapter.saved().collect();
        let out = |name: &'a str, stored: &'a str| {
            let info = base.require(stored)?;
            let entry = Entry { name: name.into(), dtype: dtype.of(info.dtype), shape: info.shape.clone() };
            let (module, kind) = match (name.strip_suffix(".weight"), name.strip_suffix(".bias")) {
                (Some(module), _) => (module, Some(TensorKind::SavedWeight)),
                (_, Some(module)) => (module, Some(TensorKind::SavedBias)),
                _ => (name, None),
            };
            // While the tie holds, either name takes what was saved under the other.
            let twin = tie.twin(name).filter(|_| !untied).and_then(|twin| twin.strip_suffix(".weight"));
            let holds = |module: &&str, kind| saved.contains(module) && adapter.info(module, kind).is_some();
            let whole = kind.and_then(|kind| {
                let module = [Some(module), twin].into_iter().flatten().find(|module| holds(module, kind))?;
                Some(Source::Saved(module, kind))
            });
            let target = targets.get(module).copied().filter(|_| kind == Some(TensorKind::SavedWeight));
            Ok(Out { entry, source: whole.unwrap_or(Source::Base(stored)), target })
        };
        let mut files = Vec::new();
        for (path, names) in base.files() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut outs = names.iter().map(|name| out(name, name)).collect::<Result<Vec<_>>>()?;
            if untied
                && let Some((missing, stored)) = tie.only_one_stored()
                && names.contains(&stored)
            {
                outs.push(out(missing, stored)?);
            }
            files.push((name, outs));
        }
        Ok(Self { files, untied })
    }

    fn outs(&self) -> impl Iterator<Item = &Out<'a>> {
        self.files.iter().flat_map(|(_, outs)| outs)
    }
}

/// Whether embedding and head are one tensor, and which of the names the base has stored.
struct Tie {
    tied: bool,
    embed: bool,
    head: bool,
}

impl Tie {
    fn new(base: &ModelFiles, config: &Map<String, Value>) -> Self {
        let (embed, head) = (base.info(EMBED_TOKENS).is_some(), base.info(LM_HEAD).is_some());
        // Families differ in what a missing key means; a model that is not tied stores both.
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(embed != head);
        Self { tied, embed, head }
    }

    /// The other name of a tied tensor.
    fn twin(&self, name: &str) -> Option<&'static str> {
        match name {
            EMBED_TOKENS if self.tied => Some(LM_HEAD),
            LM_HEAD if self.tied => Some(EMBED_TOKENS),
            _ => None,
        }
    }

    /// Of a tied pair of which one name is stored: the one that is not, and the one that is.
    fn only_one_stored(&self) -> Option<(&'static str, &'static str)> {
        match (self.tied, self.embed, self.head) {
            (true, true, false) => Some((LM_HEAD, EMBED_TOKENS)),
            (true, false, true) => Some((EMBED_TOKENS, LM_HEAD)),
            _ => None,
        }
    }

    /// Whether the adapter gives embedding and head of a tied model different values.
    fn is_broken_by(&self, adapter: &Adapter) -> Result<bool> {
        let module = |name: &'static str| name.strip_suffix(".weight").unwrap_or(name);
        let pair = [module(EMBED_TOKENS), module(LM_HEAD)];
        let saved = pair.map(|module| adapter.saved().any(|saved| saved == module));
        let adapted = pair.iter().any(|module| adapter.targets().iter().any(|target| target.name == *module));
        Ok(self.tied
            && match saved {
                _ if adapted => true,
                [true, true] => {
                    adapter.bytes(pair[0], TensorKind::SavedWeight)?
                        != adapter.bytes(pair[1], TensorKind::SavedWeight)?
                }
                [false, false] => false,
                _ => !adapter.config().ensure_weight_tying,
            })
    }
}

/// The modules of the base, by its tensors; both of a tied pair.
fn modules(base: &ModelFiles, tie: &Tie) -> Vec<ModuleInfo> {
    let module = |tensor: &str, shape: &[usize]| {
        let name = tensor.strip_suffix(".weight")?;
        let kind = match tensor {
            EMBED_TOKENS => ModuleKind::Embedding,
            LM_HEAD => ModuleKind::Head,
            _ if shape.len() == 1 => ModuleKind::Norm,
            _ => ModuleKind::Linear,
        };
        Some(ModuleInfo { name: name.into(), kind, shape: shape.into() })
    };
    let mut modules: Vec<_> = base.tensors().filter_map(|(name, info)| module(name, &info.shape)).collect();
    if let Some((missing, stored)) = tie.only_one_stored() {
        modules.extend(base.info(stored).and_then(|info| module(missing, &info.shape)));
    }
    modules
}

fn write_tensor(
    base: &ModelFiles,
    adapter: &Adapter,
    out: &Out<'_>,
    sink: &mut TensorSink<'_>,
) -> Result<()> {
    let elements = out.entry.shape.iter().product();
    match (&out.source, out.target) {
        (Source::Saved(module, kind), _) => {
            let mut values = vec![0f32; elements];
            adapter.read_into(module, *kind, &mut values)?;
            sink.write_values(&values)
        }
        (Source::Base(name), None) if base.require(name)?.dtype == out.entry.dtype => {
            for block in base.bytes(name)?.chunks(BLOCK) {
                sink.write_bytes(block)?;
                base.discard(name);
            }
            Ok(())
        }
        (Source::Base(name), target) => {
            let delta = target.map(|target| Delta::read(adapter, target, &out.entry.shape)).transpose()?;
            // Whole rows, so that each block's rows meet their rows of B.
            let row = out.entry.shape.last().copied().unwrap_or(1).max(1);
            let block = (BLOCK / row).max(1) * row;
            let mut values = vec![0f32; block.min(elements)];
            for start in (0..elements).step_by(block) {
                let values = &mut values[..block.min(elements - start)];
                base.read_part(name, start, values)?;
                if let Some(delta) = &delta {
                    delta.add_to(values, start / row);
                }
                sink.write_values(values)?;
                base.discard(name);
            }
            Ok(())
        }
    }
}

/// What LoRA adds to a weight [out, in]: scale · B A.
struct Delta {
    /// [r, in]
    a: Vec<f32>,
    /// [out, r]
    b: Vec<f32>,
    r: usize,
    inputs: usize,
    scale: f32,
}

impl Delta {
    fn read(adapter: &Adapter, target: &Target, shape: &[usize]) -> Result<Self> {
        let &[outputs, inputs] = shape else {
            return Err(Error::internal(format!("cannot merge `{}`", target.name))
                .because(format!("its weight has shape {shape:?}; accepted: [out, in]")));
        };
        let (mut a, mut b) = (vec![0f32; target.r * inputs], vec![0f32; outputs * target.r]);
        adapter.read_into(&target.name, TensorKind::LoraA, &mut a)?;
        adapter.read_into(&target.name, TensorKind::LoraB, &mut b)?;
        Ok(Self { a, b, r: target.r, inputs, scale: target.scale as f32 })
    }

    /// Adds its rows from `first_row` on to `rows`, whole rows of the weight.
    fn add_to(&self, rows: &mut [f32], first_row: usize) {
        let b = &self.b[first_row * self.r..];
        let rows = rows.par_chunks_mut(self.inputs).zip(b.par_chunks(self.r));
        rows.for_each_init(
            || vec![0f32; self.inputs],
            |product, (row, b)| {
                product.fill(0.0);
                for (&b, a) in b.iter().zip(self.a.chunks_exact(self.inputs)) {
                    product.iter_mut().zip(a).for_each(|(product, &a)| *product += b * a);
                }
                row.iter_mut().zip(product).for_each(|(weight, product)| *weight += *product * self.scale);
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_scaled_products_row_by_row() {
        // B = [[1, 2], [3, 4], [5, 6]], A = [[1, 0], [0, 10]], scale 0.5: ΔW = [[.5, 10], [1.5, 20], [2.5, 30]].
        let delta = Delta {
            a: vec![1.0, 0.0, 0.0, 10.0],
            b: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            r: 2,
            inputs: 2,
            scale: 0.5,
        };
        let mut all = [100.0; 6];
        delta.add_to(&mut all, 0);
        assert_eq!(all, [100.5, 110.0, 101.5, 120.0, 102.5, 130.0]);
        let mut last = [100.0; 2];
        delta.add_to(&mut last, 2);
        assert_eq!(last, [102.5, 130.0]);
    }
}
