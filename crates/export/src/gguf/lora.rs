//! A LoRA adapter as a GGUF file that llama.cpp loads beside its base.
//!
//! Each weight W has `W.lora_a`, A [r, in], and `W.lora_b`, B [out, r], under the base's names
//! (convert_lora_to_gguf.py). Rows of B are reordered and scaled like the rows of W. llama.cpp
//! scales each product by alpha / r, with one alpha for the whole file. B absorbs other scales
//! (rsLoRA, alpha patterns), so the sum equals that of training. The format has only products of A
//! and B.

use std::collections::HashMap;
use std::path::Path;

use super::description::refused;
use super::destinations::{TensorRows, destinations};
use super::metadata::refuse_unknown;
use super::tensors::{TensorChange, change};
use super::writer::{self, GgufMetadata, MetadataValue, TensorEntry};
use super::{Exported, GgufType};
use crate::adapter::{CONFIG_FILE, SavedAdapter, Target, TensorKind};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::model::{self, BlockPart, ModelConfig, ModelPart, ParamSpec, Role, TokenMixer};
use crate::quant::BlockType;
use crate::weights::{LM_HEAD_MODULE, encode_blocks, rows_of};

/// Writes the adapter in the folder `adapter`, of the model `config`, to the new file `output`.
/// `name` is a display name.
///
/// # Errors
/// User: the adapter cannot be read, is of another model, or is more than LoRA; `kind` is neither
/// f32 nor f16; `output` exists. Storage: the disk is full or fails; no file is left then.
pub fn write_adapter(
    config: &ModelConfig,
    adapter: &Path,
    name: &str,
    kind: GgufType,
    output: &Path,
) -> Result<Exported> {
    writer::OUTPUT.refuse_taken(output)?;
    let block = match kind {
        GgufType::F32 => BlockType::F32,
        GgufType::F16 => BlockType::F16,
        other => {
            return Err(Error::user(format!("cannot export an adapter as {other}"))
                .because("accepted for an adapter: f32, f16")
                .hint(merge_hint(adapter)));
        }
    };
    refuse_more_than_lora(adapter)?;
    refuse_unknown(config)?;
    let opened = SavedAdapter::read(adapter)?.fitted(&model::modules(config))?;
    if let Some(saved) = opened.saved().next() {
        return Err(more_than_lora(adapter, &format!("it has the module `{saved}` saved whole")));
    }
    let parts = parts(config, &opened, adapter)?;
    let alpha = Some(opened.config().spec.lora_alpha).filter(|alpha| *alpha > 0.0).unwrap_or(1.0);
    let mut metadata = GgufMetadata::default();
    metadata.text("general.architecture", config.family.gguf.architecture);
    metadata.text("general.type", "adapter");
    metadata.text("general.name", name);
    metadata.set("general.file_type", MetadataValue::U32(kind as u32));
    metadata.text("adapter.type", "lora");
    metadata.set("adapter.lora.alpha", MetadataValue::F32(alpha as f32));
    let mut entries: Vec<TensorEntry> = Vec::with_capacity(parts.len());
    for part in &parts {
        let mut shape = part.shape(&opened)?;
        if let Some(rows) = shape.first_mut().filter(|_| part.kind == TensorKind::LoraB) {
            *rows = part.rows(*rows).len();
        }
        if part.is_of_experts {
            shape.insert(0, part.targets.len());
        }
        entries.push(TensorEntry { name: part.name.clone(), shape, kind: block });
    }
    let mut exported = Exported::default();
    let mut left = parts.iter();
    exported.bytes = writer::write(output, &metadata, &entries, |entry, sink| {
        let part = left.next().ok_or_else(|| Error::internal("an entry without a part"))?;
        exported.count(entry.kind, entry.kind);
        sink.write(&part.encode(&opened, alpha, entry)?)
    })?;
    Ok(exported)
}

/// A, or some of B's rows, of a module's LoRA, or of those of all experts of a layer.
struct LoraPart<'a> {
    name: String,
    targets: Vec<&'a Target>,
    is_of_experts: bool,
    kind: TensorKind,
    /// The tensor of the base, whose rows are those of B.
    tensor: TensorRows,
    change: TensorChange,
}

fn parts<'a>(config: &ModelConfig, opened: &'a SavedAdapter, folder: &Path) -> Result<Vec<LoraPart<'a>>> {
    let parameters = model::parameters(config);
    let weights = parameters.iter().filter(|spec| spec.role != Role::Bias);
    let modules: HashMap<&str, &ParamSpec> = weights.map(|spec| (spec.module(), spec)).collect();
    let mut parts: Vec<LoraPart<'a>> = Vec::with_capacity(2 * opened.targets().len());
    let mut of_experts: HashMap<String, usize> = HashMap::new();
    for target in opened.targets() {
        let spec = modules.get(target.name.as_str());
        match spec.map(|spec| spec.part) {
            Some(ModelPart::EmbedTokens | ModelPart::EmbedPerLayer) => {
                return Err(more_than_lora(folder, "it has LoRA on the embedding"));
            }
            Some(part) if fault(config, part).is_some() => {
                let fault = fault(config, part).unwrap_or_default();
                return Err(more_than_lora(folder, &format!("it has LoRA on `{}`, {fault}", target.name)));
            }
            Some(_) => {}
            None if target.name == LM_HEAD_MODULE => {
                return Err(more_than_lora(
                    folder,
                    "it has LoRA on the head, which is one tensor with the embedding",
                ));
            }
            None => return Err(refused(format!("`{}` has no name in llama.cpp", target.name))),
        }
        for tensor in spec.into_iter().flat_map(|spec| destinations(config, spec)) {
            let change = spec.map_or(TensorChange::NONE, |spec| change(config, spec));
            let halves = [("lora_a", TensorKind::LoraA), ("lora_b", TensorKind::LoraB)];
            let expert = match spec.map(|spec| spec.part) {
                Some(ModelPart::Block { part, .. }) => part.expert().map(usize::from),
                _ => None,
            };
            for (half, kind) in halves {
                let name = format!("{}.{half}", tensor.name);
                if let Some(at) = of_experts.get(&name) {
                    let part: &mut LoraPart<'_> = &mut parts[*at];
                    part.targets.push(target);
                    continue;
                }
                let is_of_experts = expert.is_some();
                if is_of_experts {
                    of_experts.insert(name.clone(), parts.len());
                }
                let targets = vec![target];
                parts.push(LoraPart { name, targets, is_of_experts, kind, tensor: tensor.clone(), change });
            }
        }
    }
    let count = config.experts().next().map_or(0, |experts| experts.count);
    let is_whole = |part: &LoraPart<'_>| {
        part.targets.len() == count && part.targets.iter().all(|target| target.r == part.targets[0].r)
    };
    match parts.iter().find(|part| part.is_of_experts && !is_whole(part)) {
        Some(part) => Err(more_than_lora(
            folder,
            &format!("`{}` has not all {count} experts of its layer with one rank", part.targets[0].name),
        )),
        None => Ok(parts),
    }
}

/// Returns what is wrong with an adapter of this module in llama.cpp.
fn fault(config: &ModelConfig, part: ModelPart) -> Option<&'static str> {
    let ignored = Some("which llama.cpp computes without adapters");
    match part {
        ModelPart::LmHead if config.family.gguf.has_latents => ignored,
        ModelPart::Block { layer, part } => {
            let block = &config.blocks[layer];
            let is_latent = matches!(block.token_mixer, TokenMixer::Latent(_));
            match part {
                BlockPart::QProj | BlockPart::LatentQ | BlockPart::LatentKv if is_latent => ignored,
                BlockPart::LatentQUp | BlockPart::LatentKvUp | BlockPart::PerLayerModel => ignored,
                BlockPart::ExpertDown(_) if block.channel_mixer.has_both() => {
                    Some("from which llama.cpp leaves out the factor of each expert")
                }
                _ => None,
            }
        }
        _ => None,
    }
}

impl LoraPart<'_> {
    /// Returns the rows of B, of which there are `count`, in the order of the file.
    fn rows(&self, count: usize) -> Vec<usize> {
        match &self.tensor.rows {
            Some(runs) => rows_of(runs).collect(),
            None => (0..count).map(|row| self.change.source_row(row, count)).collect(),
        }
    }

    /// Returns the shape of A or B of one module.
    fn shape(&self, opened: &SavedAdapter) -> Result<Vec<usize>> {
        let info = self.targets.first().and_then(|target| opened.info(&target.name, self.kind));
        match info.map(|info| info.shape.clone()) {
            Some(shape) if shape.len() == 2 => Ok(shape),
            other => Err(Error::internal(format!("`{}` has shape {other:?}", self.name))),
        }
    }

    fn encode(&self, opened: &SavedAdapter, alpha: f64, entry: &TensorEntry) -> Result<Vec<u8>> {
        let shape = self.shape(opened)?;
        let (rows, row) = (shape[0], shape[1]);
        let mut all = Vec::new();
        for target in &self.targets {
            let mut values = vec![0f32; rows * row];
            opened.read_part(&target.name, self.kind, 0, &mut values)?;
            if self.kind == TensorKind::LoraB {
                let factor = target.scale * target.r as f64 / alpha * f64::from(self.change.factor);
                let rows = self.rows(rows).into_iter();
                let moved = rows.flat_map(|from| &values[from * row..(from + 1) * row]);
                all.extend(moved.map(|value| (f64::from(*value) * factor) as f32));
            } else if let Some(columns) = &self.tensor.columns {
                let columns: Vec<usize> = rows_of(columns).collect();
                let lines = values.chunks_exact(row);
                all.extend(lines.flat_map(|line| columns.iter().map(|from| line[*from])));
            } else {
                all.append(&mut values);
            }
        }
        encode_blocks(&entry.name, &all, row, entry.kind)
    }
}

/// Refuses an adapter whose adapter_config.json has more than LoRA.
fn refuse_more_than_lora(folder: &Path) -> Result<()> {
    let path = folder.join(CONFIG_FILE);
    let Ok(text) = input_file::read("read", &path) else { return Ok(()) };
    let Ok(config) = serde_json::from_slice::<serde_json::Value>(&text) else { return Ok(()) };
    let asks = |key: &str| match &config[key] {
        serde_json::Value::Null | serde_json::Value::Bool(false) => false,
        serde_json::Value::Array(list) => !list.is_empty(),
        serde_json::Value::Object(map) => !map.is_empty(),
        _ => true,
    };
    let keys = ["use_dora", "modules_to_save", "trainable_token_indices", "lora_bias"];
    match keys.into_iter().find(|key| asks(key)) {
        Some(key) => Err(more_than_lora(folder, &format!("it has `{key}`: {}", config[key]))),
        None => Ok(()),
    }
}

fn more_than_lora(folder: &Path, cause: &str) -> Error {
    Error::user(format!("cannot export adapter {} as GGUF", folder.display()))
        .because(format!("{cause}; a GGUF adapter holds LoRA of linear layers alone"))
        .hint(merge_hint(folder))
}

fn merge_hint(folder: &Path) -> String {
    format!(
        "merge first: `finetune merge --model MODEL --adapter {} --output merged`, then export `--model merged`",
        folder.display()
    )
}
