//! Merges an adapter into the weights of a model, streamed.
//!
//! Files keep the base's names and order, and tensors pass through in blocks of rows. For any model
//! size, memory holds a block and the adapter's A and B of one module (and, if the base is
//! quantized first, the codes of one tensor). Each weight is rounded once, at the end. The output
//! folder appears complete or not at all, and its merge.json records the sources.
//!
//! On request the weights go back into the quantized format of the base (`requantize`), one tensor
//! in memory at a time.
//!
//! `base_values` reads the weights before the change, `delta` applies the adapter, `embeddings`
//! handles embedding and head, and `report` prevents a second merge of the same adapter.

mod base_values;
mod delta;
mod embeddings;
mod report;
mod requantize;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use self::base_values::{MergeValues, ValueSource};
use self::delta::WeightDelta;
use self::embeddings::{EmbeddingParts, Tie};
pub use self::report::{MERGE_FILE, MergeRecord};
use super::{SavedAdapter, Target, TensorKind};
use crate::error::{Error, Result};
use crate::model::{Module, ModuleKind};
use crate::quant::QuantFormat;
use crate::recipe::enums::Dtype;
use crate::weights::sidecar_files;
use crate::weights::sidecar_files::{ConfigChanges, TokenizerFiles};
use crate::weights::{self, AtomicDir, ModelFiles, StoredDtype, TensorSink, WriteEntry, Written};

/// Elements (or bytes, if only copied) of a tensor in memory at once, or one row if it is longer.
const BLOCK: usize = 1 << 22;
/// Maximum size of a file of weights, if the base has none to copy from: that of transformers.
const SHARD_BYTES: u64 = 5_000_000_000;

/// The values to which an adapter is added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BaseValues {
    /// The values in the model's files, dequantized if they are quantized there.
    #[default]
    AsStored,
    /// The values of the blocks' linear layers after quantization to this format, for an adapter
    /// that was trained on such a base. The other tensors are as stored.
    Quantized(QuantFormat),
}

/// Checks the merged model before its folder gets its name. The result goes into merge.json.
pub type Verify<'a> = dyn Fn(&Path) -> Result<Option<Value>> + 'a;

/// Options of a merge.
pub struct MergeOptions<'a> {
    /// The type of the merged weights.
    pub dtype: Dtype,
    /// The values to which the adapter is added.
    pub base: BaseValues,
    /// Modules that stay as stored on a base that is quantized first.
    pub skip: &'a [String],
    /// True if the merged weights are quantized to the format of the base's files.
    pub requantize: bool,
    /// A check of the result; if it fails, the output is removed.
    pub verify: &'a Verify<'a>,
}

/// The result of a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeReport {
    /// Number of tensors that the adapter changed.
    pub merged: usize,
    /// Number of tensors replaced by ones that the adapter saved whole.
    pub replaced: usize,
    /// Number of unchanged tensors of the base.
    pub copied: usize,
    /// True if a tied embedding and head are now two tensors.
    pub untied: bool,
    /// The written weight files, under their names in the output folder.
    pub files: Vec<Written>,
}

/// Writes the model `base`, with the adapter in the folder `adapter` added to its weights, to the
/// new folder `output`.
///
/// # Errors
/// User: the adapter cannot be read, is not of this base or is already merged; the base has no
/// quantized format to write, or not the sizes of the merged weights; `output` is not empty.
/// Storage: the disk is full or fails. Errors of `options.verify`. `output` is then removed.
pub fn merge(
    base: &ModelFiles,
    adapter: &Path,
    output: &Path,
    options: &MergeOptions<'_>,
) -> Result<MergeReport> {
    let adapter = SavedAdapter::read(adapter)?.without(base.unread());
    let (earlier, digest) = report::merges_before(base, &adapter)?;
    let config = sidecar_files::read_config(base.folder())?;
    let modules = embeddings::modules(base, &Tie::new(base, &config), &adapter);
    let adapter = adapter.fitted(&modules)?;
    let plan = MergePlan::new(base, &adapter, &config, options)?;
    if options.requantize {
        plan.check_requantized(options.base)?;
    }
    let folder = AtomicDir::create(output)?;
    let mut files =
        if options.requantize { plan.requantize(folder.path())? } else { plan.write(folder.path())? };
    let changes = plan.config_changes(options.requantize);
    let dtype = changes.dtype;
    // A GGUF file has everything in itself.
    if !(options.requantize && base.is_gguf()) {
        sidecar_files::copy(
            base.folder(),
            TokenizerFiles::of_adapter(adapter.folder(), base.folder())?.as_ref(),
            folder.path(),
            changes,
        )?;
    }
    let record = MergeRecord {
        base: base.source().display().to_string(),
        base_values: words(options.base),
        adapter: adapter.folder().display().to_string(),
        adapter_blake3: digest,
        dtype: dtype.and_then(StoredDtype::config_name).map(String::from),
        requantized: options.requantize,
        certificate: (options.verify)(folder.path())?,
        earlier,
    };
    record.write(folder.path())?;
    folder.commit()?;
    for file in &mut files {
        file.path = output.join(file.path.file_name().unwrap_or_default());
    }
    let count = |wanted: fn(&MergeOutput<'_>) -> bool| plan.outs().filter(|out| wanted(out)).count();
    Ok(MergeReport {
        merged: count(|out| out.is_changed()),
        replaced: count(|out| out.is_replaced()),
        copied: count(|out| !out.is_changed() && !out.is_replaced()),
        untied: plan.untied,
        files,
    })
}

fn words(base: BaseValues) -> String {
    match base {
        BaseValues::AsStored => "as stored".into(),
        BaseValues::Quantized(format) => format!("dequantized from {}", format.scheme().describe()),
    }
}

/// A tensor of the merged model.
struct MergeOutput<'a> {
    entry: WriteEntry,
    /// The name of the base's tensor.
    stored: &'a str,
    source: ValueSource<'a>,
    /// The format to which the tensor is quantized before the adapter is added.
    format: Option<QuantFormat>,
    rows: Option<&'a str>,
    lora: Option<&'a Target>,
}

impl MergeOutput<'_> {
    fn is_changed(&self) -> bool {
        self.lora.is_some() || self.rows.is_some()
    }

    fn is_replaced(&self) -> bool {
        matches!(self.source, ValueSource::Adapter(_, kind) if kind.is_saved())
    }
}

/// A file of the merged model.
struct MergeFile<'a> {
    name: String,
    /// Its tensors, in order.
    outs: Vec<MergeOutput<'a>>,
    /// Further tensors, which stay as the base has them.
    retained: Vec<WriteEntry>,
}

/// Distributes the tensors of all files over files of a Hugging Face folder.
fn in_shards(files: Vec<MergeFile<'_>>) -> Vec<MergeFile<'_>> {
    let all = files.into_iter().flat_map(|file| file.outs).map(|out| vec![out]);
    let shards = weights::split_groups(all, |out| out.entry.bytes(), SHARD_BYTES);
    let named = weights::shard_names(shards.len()).into_iter().zip(shards);
    named.map(|(name, outs)| MergeFile { name, outs, retained: Vec::new() }).collect()
}

/// The files of the merged model.
struct MergePlan<'a> {
    base: &'a ModelFiles,
    adapter: &'a SavedAdapter,
    files: Vec<MergeFile<'a>>,
    untied: bool,
}

impl<'a> MergePlan<'a> {
    fn new(
        base: &'a ModelFiles,
        adapter: &'a SavedAdapter,
        config: &Map<String, Value>,
        options: &MergeOptions<'_>,
    ) -> Result<Self> {
        let tie = Tie::new(base, config);
        let modules = embeddings::modules(base, &tie, adapter);
        let untied = tie.is_broken_by(adapter, &modules)?;
        let modules: BTreeMap<&str, &Module> =
            modules.iter().map(|module| (module.name.as_str(), module)).collect();
        let mut plan = Self { base, adapter, files: Vec::new(), untied };
        // A file of which all tensors are skipped is not written.
        for (path, names) in base.files() {
            let unused = base.retained().entries_of(path);
            if names.is_empty() && unused.is_empty() {
                continue;
            }
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let split = tie.only_one_stored().filter(|(_, stored)| untied && names.contains(stored));
            let mut outs = Vec::with_capacity(names.len() + 1);
            for (name, stored) in names.into_iter().map(|name| (name, name)).chain(split) {
                let module = name.strip_suffix(".weight").and_then(|module| modules.get(module).copied());
                let dtype = weights::output_dtype(name, base.require(stored)?.dtype, options.dtype);
                outs.push(plan.out((name, stored), dtype, module, &tie, options)?);
            }
            plan.files.push(MergeFile { name: file, outs, retained: unused });
        }
        // The files of a GGUF model are no examples for those of a folder.
        if base.is_gguf() {
            plan.files = in_shards(plan.files);
        }
        Ok(plan)
    }

    /// Returns the output tensor `name`, stored in the base as `stored`; `module` is the module of
    /// the weight, if any.
    fn out(
        &self,
        (name, stored): (&'a str, &'a str),
        dtype: StoredDtype,
        module: Option<&Module>,
        tie: &Tie,
        options: &MergeOptions<'_>,
    ) -> Result<MergeOutput<'a>> {
        let info = self.base.require(stored)?;
        let shape = module.map_or(&info.shape, |module| &module.shape).clone();
        let mut out = MergeOutput {
            entry: self.base.retained().named_as_stored(WriteEntry {
                name: name.into(),
                dtype,
                shape,
                stack: info.stack.clone(),
            }),
            stored,
            source: ValueSource::Base(stored),
            format: None,
            rows: None,
            lora: None,
        };
        if let (Some(module), Some(name)) = (module, name.strip_suffix(".weight")) {
            let parts = EmbeddingParts::of(self.adapter, name, tie);
            out.source = match parts {
                EmbeddingParts { whole: Some(module), .. } => {
                    ValueSource::Adapter(module, TensorKind::SavedWeight)
                }
                EmbeddingParts { base: Some(module), .. } => {
                    ValueSource::Adapter(module, TensorKind::BaseWeight)
                }
                _ => out.source,
            };
            if parts.whole.is_none() {
                (out.rows, out.lora) = (parts.rows, parts.lora);
                let quantized = module.kind == ModuleKind::Linear && !options.skip.contains(&module.name);
                out.format = match options.base {
                    BaseValues::Quantized(format) if quantized => Some(format),
                    _ => None,
                };
            }
        } else if let Some(module) = name.strip_suffix(".bias")
            && self.adapter.info(module, TensorKind::SavedBias).is_some()
        {
            out.source = ValueSource::Adapter(module, TensorKind::SavedBias);
        }
        Ok(out)
    }

    /// Returns the changes of config.json: none for weights in the format of the base.
    fn config_changes(&self, requantized: bool) -> ConfigChanges {
        if requantized {
            return ConfigChanges::for_same_files();
        }
        let entries: Vec<WriteEntry> = self.outs().map(|out| out.entry.clone()).collect();
        ConfigChanges::for_weights(&entries)
            .untied(self.untied || self.base.head_is_apart())
            .with_retained(self.base.retained())
    }

    fn outs(&self) -> impl Iterator<Item = &MergeOutput<'a>> {
        self.files.iter().flat_map(|file| &file.outs)
    }

    /// Writes the weights, and their index if the base has one.
    fn write(&self, folder: &Path) -> Result<Vec<Written>> {
        let mut files = Vec::with_capacity(self.files.len() + 1);
        for MergeFile { name, outs, retained } in &self.files {
            let by_name: BTreeMap<&str, &MergeOutput<'_>> =
                outs.iter().map(|out| (out.entry.name.as_str(), out)).collect();
            let entries: Vec<WriteEntry> =
                outs.iter().map(|out| &out.entry).chain(retained).cloned().collect();
            files.push(weights::write_file(&folder.join(name), &entries, |entry, sink| {
                match by_name.get(entry.name.as_str()) {
                    Some(out) => self.write_tensor(out, sink),
                    None if self.base.retained().write(entry, sink)? => Ok(()),
                    None => Err(Error::internal(format!("cannot write tensor `{}`", entry.name))),
                }
            })?);
        }
        if self.base.is_indexed() || self.files.len() > 1 {
            let places = self.files.iter();
            let map = places.flat_map(|file| {
                let entries = file.outs.iter().map(|out| &out.entry).chain(&file.retained);
                entries.map(|entry| (entry, file.name.as_str()))
            });
            files.push(weights::write_index(folder, map)?);
        }
        Ok(files)
    }

    fn write_tensor(&self, out: &MergeOutput<'_>, sink: &mut TensorSink<'_>) -> Result<()> {
        if let Some(name) = self.unchanged_name(out)? {
            for block in self.base.bytes(name)?.chunks(BLOCK) {
                sink.write_bytes(block)?;
                self.base.discard(name);
            }
            return Ok(());
        }
        self.merged(out, |block| sink.write_values(block))
    }

    /// Calls `write` for the merged values of a tensor, in blocks of whole rows.
    fn merged(&self, out: &MergeOutput<'_>, mut write: impl FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let shape = &out.entry.shape;
        let elements = shape.iter().product();
        let values = MergeValues::open(self.base, self.adapter, out.source, (elements, out.format))?;
        let mut change = WeightDelta::read(self.adapter, out.rows, out.lora, shape)?;
        // Whole rows, so that each block's rows match their rows of B.
        let row = shape.last().copied().unwrap_or(1).max(1);
        let block = (BLOCK / row).max(1) * row;
        let mut buffer = vec![0f32; block.min(elements)];
        let starts = || (0..elements).step_by(block);
        if change.needs_measuring() {
            for start in starts() {
                let block = &mut buffer[..block.min(elements - start)];
                values.read(start, block)?;
                change.measure(block, start / row);
            }
        }
        for start in starts() {
            let block = &mut buffer[..block.min(elements - start)];
            values.read(start, block)?;
            change.apply(block, start / row)?;
            write(block)?;
        }
        Ok(())
    }

    /// Returns the base's tensor with exactly the bytes of the output.
    fn unchanged_name<'o>(&self, out: &MergeOutput<'o>) -> Result<Option<&'o str>> {
        let ValueSource::Base(name) = out.source else { return Ok(None) };
        let info = self.base.require(name)?;
        let same = info.dtype == out.entry.dtype && info.shape == out.entry.shape;
        let plain = same && self.base.stored_format(name).is_none();
        Ok((plain && out.format.is_none() && !out.is_changed()).then_some(name))
    }
}
