//! Exports a model with quantized linear layers, for transformers and vLLM to load.
//!
//! Tensors are streamed from the source's memory map a piece at a time, so that memory holds one
//! tensor's scales and a piece. As in transformers, every linear layer but the head is quantized;
//! embeddings, norms and biases stay as stored. `bitsandbytes` and `mxfp4` define the tensors of a
//! format, `layers` which weights have them.

mod bitsandbytes;
mod layers;
mod mxfp4;

use std::path::{Path, PathBuf};

use super::hf::SHARD_BYTES;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::quant::{self, BlockFormat, FourBit};
use crate::weights::sidecar_files;
use crate::weights::sidecar_files::{ConfigChanges, QuantizationChange};
use crate::weights::{
    AtomicDir, ClassNames, LM_HEAD_MODULE, Metadata, ModelFiles, ModelIdentity, PlannedFile, QUANTIZED_FROM,
    RandomAccessWriter, StoredDtype, StoredElement as _, WriteEntry,
};
pub use layers::LinearLayers;
use mxfp4::Mxfp4Tensors;

/// Number of elements (or bytes, if only copied) in memory at once, or one row if it is longer.
const PIECE: usize = 1 << 22;

/// The storage format of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// NF4 or FP4 of bitsandbytes.
    FourBits(BlockFormat<FourBit>),
    /// LLM.int8() of bitsandbytes: whole numbers with one scale per row.
    LlmInt8,
    /// MXFP4: e2m1 with a power of two for each 32 values of a row.
    Mxfp4,
}

/// The result of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Number of quantized tensors.
    pub quantized: usize,
    /// Number of tensors copied from the source.
    pub copied: usize,
    /// Bytes of the source's tensors.
    pub bytes_before: u64,
    /// The files, with their sizes, under their names in the output folder.
    pub files: Vec<(PathBuf, u64)>,
}

/// The tensors of a format.
enum SchemeTensors {
    FourBits(BlockFormat<FourBit>),
    LlmInt8,
    Mxfp4(Mxfp4Tensors),
}

impl SchemeTensors {
    fn new(scheme: Scheme, config: &ModelConfig, layers: &LinearLayers) -> Self {
        match scheme {
            Scheme::FourBits(format) => SchemeTensors::FourBits(format),
            Scheme::LlmInt8 => SchemeTensors::LlmInt8,
            Scheme::Mxfp4 => SchemeTensors::Mxfp4(Mxfp4Tensors::new(config, layers)),
        }
    }

    /// Returns the tensors into which `name` is converted. Those of a stack belong to its first
    /// part.
    fn planned(&self, files: &ModelFiles, name: &str) -> Result<Vec<PlannedFile>> {
        match self {
            SchemeTensors::FourBits(format) => bitsandbytes::planned_four_bits(files, name, *format),
            SchemeTensors::LlmInt8 => bitsandbytes::planned_rows(files, name),
            SchemeTensors::Mxfp4(tensors) => tensors.planned(files, name),
        }
    }

    fn write(&self, source: &mut SourceTensor<'_>) -> Result<()> {
        match self {
            SchemeTensors::FourBits(format) => bitsandbytes::four_bits(source, *format),
            SchemeTensors::LlmInt8 => bitsandbytes::rows(source),
            SchemeTensors::Mxfp4(tensors) => tensors.write(source),
        }
    }
}

/// Writes the model of `files` and `config` to the new folder `output`, with its linear layers in
/// `scheme`. Layers that `skip` names stay: by the whole name, or by consecutive parts of it, such
/// as `down_proj` or `layers.0`. `from` is the identity of the model, which the files record.
/// `done` is called with the name of each written tensor.
///
/// # Errors
/// User: the model is already quantized by bitsandbytes, a name in `skip` matches no linear layer,
/// a weight is NaN or infinite or has rows that the format cannot hold, `output` is not empty.
/// Storage: the disk is full or fails; `output` is then removed.
pub fn write_quantized(
    files: &ModelFiles,
    config: &ModelConfig,
    scheme: Scheme,
    skip: &[String],
    from: &ModelIdentity,
    output: &Path,
    mut done: impl FnMut(&str),
) -> Result<Report> {
    refuse_quantized(files)?;
    let layers = match scheme {
        Scheme::Mxfp4 => mxfp4::layers(config, skip)?,
        Scheme::FourBits(_) | Scheme::LlmInt8 => LinearLayers::new(config, skip)?,
    };
    let tensors = SchemeTensors::new(scheme, config, &layers);
    let names: Vec<&str> = files.files().flat_map(|(_, names)| names).collect();
    let mut groups = Vec::with_capacity(names.len());
    for name in &names {
        groups.push(if layers.quantizes(name) {
            tensors.planned(files, name)?
        } else {
            vec![PlannedFile::Sized(as_stored(files, name)?)]
        });
    }
    let metadata = Metadata::from([(QUANTIZED_FROM.to_owned(), from.to_json())]);
    let folder = AtomicDir::create(output)?;
    let names_and_texts = (config.family.class_names, &metadata);
    let mut writer = RandomAccessWriter::create(folder.path(), &groups, names_and_texts, SHARD_BYTES)?;
    for name in &names {
        let can_skip = !(scheme == Scheme::Mxfp4 && config.family.stacks_in_mxfp4);
        let mut source = SourceTensor { files, name, writer: &mut writer, can_skip };
        if layers.quantizes(name) {
            tensors.write(&mut source)?
        } else {
            source.copy()?
        }
        files.discard(name);
        done(name);
    }
    let mut written = writer.finish()?;
    let settings = settings(scheme, config, files, &layers);
    let quantization = QuantizationChange::Set(settings);
    sidecar_files::copy(
        files.folder(),
        None,
        folder.path(),
        ConfigChanges { quantization, ..ConfigChanges::default() }.untied(files.head_is_apart()),
    )?;
    folder.commit()?;
    for (path, _) in &mut written {
        *path = output.join(path.file_name().unwrap_or_default());
    }
    let quantized = names.iter().filter(|name| layers.quantizes(name)).count();
    Ok(Report {
        quantized,
        copied: names.len() - quantized,
        bytes_before: files.file_bytes().map(|(_, bytes)| bytes).sum(),
        files: written,
    })
}

/// Returns `quantization_config` of the new config.json.
fn settings(
    scheme: Scheme,
    config: &ModelConfig,
    files: &ModelFiles,
    layers: &LinearLayers,
) -> serde_json::Value {
    let first = layers.quantized.first().and_then(|name| files.info(&format!("{name}.weight")));
    let dtype = first.map_or(StoredDtype::F32, |info| info.dtype);
    let unquantized = unquantized(config.family.class_names, layers);
    // Without a list, transformers skips the head alone.
    let listed = (!layers.skipped.is_empty()).then_some(unquantized.as_slice());
    match scheme {
        Scheme::FourBits(format) => bitsandbytes::settings(Some(format), dtype, listed),
        Scheme::LlmInt8 => bitsandbytes::settings(None, dtype, listed),
        Scheme::Mxfp4 => mxfp4::settings(config, &unquantized),
    }
}

/// Returns the names of the linear layers that stay as they are, as the class `names` has them, the
/// head first: under its name in memory and, if the files have another, that one.
fn unquantized(names: &ClassNames, layers: &LinearLayers) -> Vec<String> {
    let stored = names.stored(LM_HEAD_MODULE);
    let heads = [Some(LM_HEAD_MODULE.to_owned()), (stored != LM_HEAD_MODULE).then_some(stored)];
    heads.into_iter().flatten().chain(layers.skipped.iter().map(|name| names.module(name))).collect()
}

fn refuse_quantized(files: &ModelFiles) -> Result<()> {
    let cause_of_refusal = files.names().find_map(|name| {
        let format = files.quantized_format(name)?;
        Some(format!("`{name}` is quantized to {}", format.scheme().name()))
    });
    let is_packed = files.names().any(|name| files.stored_format(name).is_some());
    let described = if is_packed { None } else { sidecar_files::quantization_place(files.folder())? };
    match cause_of_refusal.or(described) {
        Some(cause) => Err(Error::user(format!("cannot quantize {}", files.folder().display()))
            .because(format!("it is quantized already: {cause}"))
            .hint("give the model that was not quantized")),
        None => Ok(()),
    }
}

fn as_stored(files: &ModelFiles, name: &str) -> Result<WriteEntry> {
    let info = files.require(name)?;
    Ok(WriteEntry { name: name.into(), dtype: info.dtype, shape: info.shape.clone(), stack: None })
}

/// A tensor of the source and the writer for its output.
struct SourceTensor<'a> {
    files: &'a ModelFiles,
    name: &'a str,
    writer: &'a mut RandomAccessWriter,
    /// True if the user may leave it as it is.
    can_skip: bool,
}

impl SourceTensor<'_> {
    fn put(&mut self, end: &str, bytes: &[u8]) -> Result<()> {
        self.writer.write(&format!("{}{end}", self.name), 0, bytes)
    }

    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(self.name)
    }

    /// Writes the values as they are before quantization.
    fn copy(&mut self) -> Result<()> {
        if !self.files.is_plain(self.name) {
            return self.dequantized();
        }
        for (i, block) in self.files.bytes(self.name)?.chunks(PIECE).enumerate() {
            self.writer.write(self.name, (i * PIECE) as u64, block)?;
            self.files.discard(self.name);
        }
        Ok(())
    }

    fn dequantized(&mut self) -> Result<()> {
        let info = self.files.require(self.name)?;
        let (n, dtype) = (info.elements(), info.dtype);
        let mut values = vec![0f32; PIECE.min(n)];
        let mut bytes = Vec::new();
        for start in (0..n).step_by(PIECE) {
            let values = &mut values[..PIECE.min(n - start)];
            self.files.read_part(self.name, start, values)?;
            self.files.discard(self.name);
            bytes.clear();
            if !f32::encode(values, dtype, &mut bytes) {
                return Err(Error::internal(format!("cannot write {} as {dtype}", self.name)));
            }
            self.writer.write(self.name, (start * dtype.size_bytes()) as u64, &bytes)?;
        }
        Ok(())
    }

    /// Calls `write` for pieces of `piece` values, as `prepare` returns them, with the position of
    /// the first. `range` describes the accepted values.
    fn pieces(
        &mut self,
        piece: usize,
        prepare: impl Fn(f32) -> f32,
        range: &str,
        mut write: impl FnMut(usize, &[f32], &mut RandomAccessWriter) -> Result<()>,
    ) -> Result<()> {
        let n = self.files.require(self.name)?.elements();
        let mut values = vec![0f32; piece.min(n)];
        for start in (0..n).step_by(piece) {
            let values = &mut values[..piece.min(n - start)];
            self.files.read_part(self.name, start, values)?;
            self.files.discard(self.name);
            values.iter_mut().for_each(|value| *value = prepare(*value));
            self.check(start, values, range)?;
            write(start, values, self.writer)?;
        }
        Ok(())
    }

    fn check(&self, start: usize, values: &[f32], range: &str) -> Result<()> {
        let Some(at) = quant::first_not_finite(values) else { return Ok(()) };
        let mut stored = [0f32];
        self.files.read_part(self.name, start + at, &mut stored)?;
        Err(Error::user(format!("cannot quantize tensor `{}`", self.name))
            .because(format!("its value {} is {}; accepted: {range}", start + at, stored[0]))
            .hint(if self.can_skip {
                format!("leave it as it is with `--skip {}`, or repair the model", self.module())
            } else {
                "repair the model".to_owned()
            }))
    }
}
