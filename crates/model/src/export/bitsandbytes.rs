//! Exports a model with linear layers quantized in bitsandbytes' format, for transformers to load.
//!
//! Tensors are streamed from the source's memory map a piece at a time, so that memory holds one
//! tensor's scales and a piece. As in transformers, every linear layer but the head is quantized;
//! embeddings, norms and biases stay as stored. The names and the JSON text are those of
//! `QuantState.as_dict` (bitsandbytes/functional.py) and of `Linear8bitLt`, the keys of
//! `quantization_config` those of transformers' `BitsAndBytesConfig`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use half::f16;
use serde_json::{Value, json};

use super::hf::SHARD_BYTES;
use crate::error::{Error, Result};
use crate::model::{self, ModelConfig, ModuleKind};
use crate::quant::{self, BlockCodes, BlockFormat, FourBit, Int8Rows, NESTED_BLOCK};
use crate::weights::readers::{BITSANDBYTES, QUANTIZATION_CONFIG};
use crate::weights::sidecar_files;
use crate::weights::sidecar_files::{ConfigChanges, QuantizationChange};
use crate::weights::{
    AtomicDir, LM_HEAD_MODULE, Metadata, ModelFiles, ModelIdentity, PlannedFile, QUANTIZED_FROM,
    RandomAccessWriter, StoredDtype, StoredElement as _, WriteEntry,
};

/// Number of elements (or bytes, if only copied) in memory at once, or one row if it is longer.
const PIECE: usize = 1 << 22;
/// Longer than any number of a quant_state, in characters.
const LONGEST_NUMBER: usize = 24;

/// The storage format of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// NF4 or FP4.
    FourBits(BlockFormat<FourBit>),
    /// LLM.int8(): whole numbers with one scale per row.
    LlmInt8,
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

/// Writes the model of `files` and `config` to the new folder `output`, with its linear layers in
/// `scheme`. Layers that `skip` names stay: by the whole name, or by consecutive parts of it, such
/// as `down_proj` or `layers.0`. `from` is the identity of the model, which the files record.
/// `done` is called with the name of each written tensor.
///
/// # Errors
/// User: the model is already quantized by bitsandbytes, a name in `skip` matches no linear layer,
/// a weight is NaN or infinite, `output` is not empty. Storage: the disk is full or fails; `output`
/// is then removed.
pub fn write_quantized(
    files: &ModelFiles,
    config: &ModelConfig,
    scheme: Scheme,
    skip: &[String],
    from: &ModelIdentity,
    output: &Path,
    mut done: impl FnMut(&str),
) -> Result<Report> {
    let json = sidecar_files::read_config(files.folder())?;
    refuse_quantized(files, json.contains_key(QUANTIZATION_CONFIG))?;
    let layers = LinearLayers::new(config, skip)?;
    let names: Vec<&str> = files.files().flat_map(|(_, names)| names).collect();
    let mut groups = Vec::with_capacity(names.len());
    for name in &names {
        groups.push(planned(files, name, layers.quantizes(name).then_some(scheme))?);
    }
    let metadata = Metadata::from([(QUANTIZED_FROM.to_owned(), from.to_json())]);
    let folder = AtomicDir::create(output)?;
    let mut writer = RandomAccessWriter::create(folder.path(), &groups, &metadata, SHARD_BYTES)?;
    for name in &names {
        let mut source = SourceTensor { files, name, writer: &mut writer };
        match (layers.quantizes(name), scheme) {
            (false, _) => source.copy()?,
            (true, Scheme::FourBits(format)) => source.four_bits(format)?,
            (true, Scheme::LlmInt8) => source.rows()?,
        }
        files.discard(name);
        done(name);
    }
    let mut written = writer.finish()?;
    let dtype = layers
        .quantized
        .first()
        .and_then(|name| files.info(&format!("{name}.weight")))
        .map(|info| info.dtype);
    let settings = quantization_config(scheme, dtype.unwrap_or(StoredDtype::F32), &layers.skipped);
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

fn refuse_quantized(files: &ModelFiles, says_so: bool) -> Result<()> {
    let found = files.names().find_map(|name| {
        let format = files.quantized_format(name)?;
        Some(format!("`{name}` is quantized to {}", format.scheme().name()))
    });
    let is_packed = files.names().any(|name| files.stored_format(name).is_some());
    let says_so = says_so && !is_packed;
    match found.or(says_so.then(|| format!("config.json has `{QUANTIZATION_CONFIG}`"))) {
        Some(cause) => Err(Error::user(format!("cannot quantize {}", files.folder().display()))
            .because(format!("it is quantized already: {cause}"))
            .hint("give the model that was not quantized")),
        None => Ok(()),
    }
}

/// The linear layers of a model's blocks, quantized and skipped; head, embedding, routers of
/// experts and other gates are never quantized.
#[derive(Debug)]
pub struct LinearLayers {
    /// The names of the quantized layers.
    pub quantized: Vec<String>,
    /// The names of the skipped layers.
    pub skipped: Vec<String>,
    /// The names of `quantized`, as a set.
    by_name: HashSet<String>,
}

impl LinearLayers {
    /// Skips the layers that `skip` names: by the whole name, or by consecutive parts of it.
    ///
    /// # Errors
    /// User: a name in `skip` matches no linear layer, or all are skipped.
    pub fn new(config: &ModelConfig, skip: &[String]) -> Result<Self> {
        let layers = model::modules(config).into_iter().filter(|module| module.kind.is_layer_of_block());
        let (gates, linear): (Vec<_>, Vec<_>) = layers.partition(|module| module.kind != ModuleKind::Linear);
        let [gates, linear] = [gates, linear]
            .map(|modules| modules.into_iter().map(|module| module.name).collect::<Vec<String>>());
        let wanted: HashSet<&str> = skip.iter().map(String::as_str).collect();
        // A gate is skipped without its name too.
        let named: HashSet<&str> =
            linear.iter().chain(&gates).flat_map(|layer| runs_of_parts(layer)).collect();
        for name in skip {
            if !named.contains(name.as_str()) {
                let mut ends: Vec<&str> =
                    linear.iter().filter_map(|layer| layer.rsplit('.').next()).collect();
                ends.sort_unstable();
                ends.dedup();
                return Err(Error::user(format!("cannot skip `{name}`")).because(format!(
                    "no linear layer has this name; accepted: {}, each also with the parts before it, as in `{}`",
                    ends.join(", "),
                    linear.first().map_or("", String::as_str)
                )));
            }
        }
        let (mut skipped, quantized): (Vec<_>, Vec<_>) =
            linear.iter().cloned().partition(|layer| runs_of_parts(layer).any(|run| wanted.contains(run)));
        if quantized.is_empty() {
            return Err(Error::user("cannot quantize the model")
                .because("every linear layer is skipped")
                .hint("leave one of the names out"));
        }
        skipped.extend(gates);
        let by_name = quantized.iter().cloned().collect();
        Ok(Self { quantized, skipped, by_name })
    }

    /// Returns whether the tensor `name` is the weight of a quantized layer.
    fn quantizes(&self, name: &str) -> bool {
        let module = name.strip_suffix(".weight");
        module.is_some_and(|module| self.by_name.contains(module))
    }
}

/// Returns the runs of consecutive parts of a module's name: `a.b` has `a.b`, `a` and `b`.
fn runs_of_parts(module: &str) -> impl Iterator<Item = &str> {
    let starts = std::iter::once(0).chain(module.match_indices('.').map(|(dot, _)| dot + 1));
    starts.flat_map(move |start| {
        let ends = module[start..].match_indices('.').map(move |(dot, _)| start + dot);
        ends.chain([module.len()]).map(move |end| &module[start..end])
    })
}

/// Returns the tensors into which `name` is converted.
fn planned(files: &ModelFiles, name: &str, scheme: Option<Scheme>) -> Result<Vec<PlannedFile>> {
    let info = files.require(name)?;
    let tensor = |name: String, dtype, shape: &[usize]| {
        PlannedFile::Sized(WriteEntry { name, dtype, shape: shape.into(), stack: None })
    };
    let sized = |end: &str, dtype, shape: &[usize]| tensor(format!("{name}{end}"), dtype, shape);
    let (n, float, byte) = (info.elements(), StoredDtype::F32, StoredDtype::U8);
    Ok(match scheme {
        None => vec![sized("", info.dtype, &info.shape)],
        Some(Scheme::FourBits(format)) => {
            let blocks = format.blocks(n);
            let mut tensors = vec![sized("", byte, &[format.code_bytes(n), 1])];
            if format.double_quant {
                tensors.push(sized(".absmax", byte, &[blocks]));
                tensors.push(sized(".nested_absmax", float, &[blocks.div_ceil(NESTED_BLOCK)]));
                tensors.push(sized(".nested_quant_map", float, &[quant::dynamic_signed().len()]));
            } else {
                tensors.push(sized(".absmax", float, &[blocks]));
            }
            tensors.push(sized(".quant_map", float, &[format.codes.table().len()]));
            let longest = state(format, info.dtype, &info.shape, Some(0.0)).len() + LONGEST_NUMBER;
            tensors.push(PlannedFile::Text(state_name(name, format.codes), longest));
            tensors
        }
        Some(Scheme::LlmInt8) => {
            let module = |end: &str| name.replace(".weight", end);
            vec![
                sized("", StoredDtype::I8, &info.shape),
                tensor(module(".SCB"), float, &info.shape[..1]),
                tensor(module(".weight_format"), byte, &[]),
            ]
        }
    })
}

/// A tensor of the source and the writer for its output.
struct SourceTensor<'a> {
    files: &'a ModelFiles,
    name: &'a str,
    writer: &'a mut RandomAccessWriter,
}

impl SourceTensor<'_> {
    fn put(&mut self, end: &str, bytes: &[u8]) -> Result<()> {
        self.writer.write(&format!("{}{end}", self.name), 0, bytes)
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

    /// Quantizes the values, piece by piece, as `prepare` returns them. Writes the codes and
    /// returns the scales; `range` describes the accepted values.
    fn codes<C: BlockCodes>(
        &mut self,
        format: BlockFormat<C>,
        prepare: impl Fn(f32) -> f32,
        range: &str,
    ) -> Result<Vec<f32>> {
        let n = self.files.require(self.name)?.elements();
        let piece = (PIECE / format.block_size).max(1) * format.block_size;
        let (mut values, mut scales) = (vec![0f32; piece.min(n)], vec![0f32; format.blocks(n)]);
        let mut codes = vec![0u8; format.code_bytes(piece.min(n))];
        for (start, scales) in (0..n).step_by(piece).zip(scales.chunks_mut(format.blocks(piece))) {
            let values = &mut values[..piece.min(n - start)];
            self.files.read_part(self.name, start, values)?;
            self.files.discard(self.name);
            values.iter_mut().for_each(|value| *value = prepare(*value));
            self.check(start, values, range)?;
            let codes = &mut codes[..format.code_bytes(values.len())];
            format.quantize(values, codes, scales);
            self.writer.write(self.name, format.code_bytes(start) as u64, codes)?;
        }
        Ok(scales)
    }

    fn check(&self, start: usize, values: &[f32], range: &str) -> Result<()> {
        let Some(at) = quant::first_not_finite(values) else { return Ok(()) };
        let mut stored = [0f32];
        self.files.read_part(self.name, start + at, &mut stored)?;
        Err(Error::user(format!("cannot quantize tensor `{}`", self.name))
            .because(format!("its value {} is {}; accepted: {range}", start + at, stored[0]))
            .hint(format!("leave it as it is with `--skip {}`, or repair the model", self.module())))
    }

    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(self.name)
    }

    fn four_bits(&mut self, format: BlockFormat<FourBit>) -> Result<()> {
        let info = self.files.require(self.name)?;
        let absmax = self.codes(format, |value| value, "finite numbers")?;
        let mut offset = None;
        if format.double_quant {
            let mut nested = vec![0u8; absmax.len()];
            let mut outer = vec![0f32; absmax.len().div_ceil(NESTED_BLOCK)];
            offset = Some(quant::nest(&absmax, &mut nested, &mut outer));
            self.put(".absmax", &nested)?;
            self.put(".nested_absmax", &le(&outer))?;
            self.put(".nested_quant_map", &le(quant::dynamic_signed()))?;
        } else {
            self.put(".absmax", &le(&absmax))?;
        }
        self.put(".quant_map", &le(format.codes.table()))?;
        let text = state(format, info.dtype, &info.shape, offset);
        self.writer.write(&state_name(self.name, format.codes), 0, text.as_bytes())
    }

    fn rows(&mut self) -> Result<()> {
        let &[_, columns] = self.files.require(self.name)?.shape.as_slice() else {
            return Err(Error::internal(format!("tensor `{}` is no matrix", self.name)));
        };
        let format = BlockFormat { codes: Int8Rows, block_size: columns, double_quant: false };
        let range = "numbers within the range of f16, from which LLM.int8() quantizes";
        // bitsandbytes quantizes from f16, for any stored type of the weights.
        let scales = self.codes(format, |value| f16::from_f32(value).to_f32(), range)?;
        let module = self.module().to_owned();
        self.writer.write(&format!("{module}.SCB"), 0, &le(&scales))?;
        // "row" in bitsandbytes' list of layouts.
        self.writer.write(&format!("{module}.weight_format"), 0, &[0])
    }
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn state_name(weight: &str, kind: FourBit) -> String {
    format!("{weight}.quant_state.bitsandbytes__{}", kind.name())
}

/// Returns the JSON text beside the codes, byte for byte as Python writes it.
fn state(format: BlockFormat<FourBit>, dtype: StoredDtype, shape: &[usize], offset: Option<f32>) -> String {
    // Numbers of other widths are quantized from f32.
    let dtype = dtype.config_name().filter(|_| dtype.size_bytes() <= 4).unwrap_or("float32");
    let mut text = format!(
        "{{\"quant_type\": \"{}\", \"blocksize\": {}, \"dtype\": \"{dtype}\", \"shape\": {shape:?}",
        format.codes.name(),
        format.block_size
    );
    if let Some(offset) = offset {
        text += &format!(
            ", \"nested_blocksize\": {NESTED_BLOCK}, \"nested_dtype\": \"float32\", \"nested_offset\": {}",
            python_float(f64::from(offset))
        );
    }
    text + "}"
}

/// Returns Python's `repr` of a non-negative number.
fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    match scientific.split_once('e').map(|(digits, power)| (digits, power.parse::<i32>())) {
        Some((digits, Ok(power))) if x != 0.0 && !(-4..16).contains(&power) => {
            format!("{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs())
        }
        _ => format!("{x:?}"),
    }
}

/// Returns the quantization entry of config.json. `skipped` are whole names, which every version of
/// transformers compares in the same way. A list replaces the default one, so it also has the head.
fn quantization_config(scheme: Scheme, dtype: StoredDtype, skipped: &[String]) -> Value {
    let skip: Option<Vec<&str>> = (!skipped.is_empty())
        .then(|| [LM_HEAD_MODULE].into_iter().chain(skipped.iter().map(String::as_str)).collect());
    let four = match scheme {
        Scheme::FourBits(format) => Some(format),
        Scheme::LlmInt8 => None,
    };
    // For 8 bits too, config.json has bitsandbytes' defaults of 4 bits.
    let format = four.unwrap_or(BlockFormat { codes: FourBit::Fp4, block_size: 64, double_quant: false });
    let compute = dtype.config_name().filter(|_| four.is_some()).unwrap_or("float32");
    json!({
        "_load_in_4bit": four.is_some(),
        "_load_in_8bit": four.is_none(),
        "bnb_4bit_compute_dtype": compute,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": format.codes.name(),
        "bnb_4bit_use_double_quant": format.double_quant,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skip,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": four.is_some(),
        "load_in_8bit": four.is_none(),
        "quant_method": BITSANDBYTES,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_python_writes_them() {
        for (x, text) in [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (0.210_155_874_490_737_92, "0.21015587449073792"),
            (0.0001, "0.0001"),
            (0.000_099, "9.9e-05"),
            (1e-7, "1e-07"),
            (1.5e16, "1.5e+16"),
            (123_456_789.0, "123456789.0"),
            (9_007_199_254_740_992.0, "9007199254740992.0"),
        ] {
            assert_eq!(python_float(x), text);
        }
    }

    #[test]
    fn names_in_a_row() {
        let module = "model.layers.10.mlp.down_proj";
        for name in ["down_proj", "mlp", "mlp.down_proj", "layers.10", "model.layers.10", module, "10"] {
            assert!(runs_of_parts(module).any(|run| run == name), "{name}");
        }
        for name in ["", "proj", "layers.1", "mlp.up_proj", "layers.down_proj", "model.layers.1"] {
            assert!(!runs_of_parts(module).any(|run| run == name), "{name}");
        }
    }
}
