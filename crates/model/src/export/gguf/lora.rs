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
use super::metadata::refuse_unknown;
use super::tensors::{change, module_names};
use super::writer::{self, GgufMetadata, MetadataValue, TensorEntry};
use super::{Exported, GgufType, blocks};
use crate::adapter::{CONFIG_FILE, SavedAdapter, Target, TensorKind};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::model::{self, ModelConfig, ModelPart};
use crate::quant::BlockType;
use crate::weights::LM_HEAD_MODULE;

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
        let info = opened.info(&part.target.name, part.kind);
        let mut shape = info.map(|info| info.shape.clone()).unwrap_or_default();
        if let Some(rows) = shape.first_mut().filter(|_| part.kind == TensorKind::LoraB) {
            *rows /= part.shares;
        }
        entries.push(TensorEntry { name: part.name.clone(), shape, kind: block });
    }
    let mut exported = Exported::default();
    let mut left = parts.iter();
    exported.bytes = writer::write(output, &metadata, &entries, |entry, sink| {
        let part = left.next().ok_or_else(|| Error::internal("an entry without a part"))?;
        exported.count(entry.kind, entry.kind);
        sink.write(&part.encode(config, &opened, alpha, entry)?)
    })?;
    Ok(exported)
}

/// A, or a share of B's rows, of a module's LoRA.
struct LoraPart<'a> {
    name: String,
    target: &'a Target,
    module: ModelPart,
    kind: TensorKind,
    /// The number of the share of B, and of all equal shares.
    share: usize,
    shares: usize,
}

fn parts<'a>(config: &ModelConfig, opened: &'a SavedAdapter, folder: &Path) -> Result<Vec<LoraPart<'a>>> {
    let modules: HashMap<String, ModelPart> =
        model::parameters(config).iter().map(|spec| (spec.module().to_owned(), spec.part)).collect();
    let mut parts = Vec::with_capacity(2 * opened.targets().len());
    for target in opened.targets() {
        let module = match modules.get(&target.name) {
            Some(ModelPart::EmbedTokens | ModelPart::EmbedPerLayer) => {
                return Err(more_than_lora(folder, "it has LoRA on the embedding"));
            }
            Some(ModelPart::Block { part, .. }) if part.expert().is_some() => {
                return Err(more_than_lora(
                    folder,
                    "it has LoRA on experts, of which llama.cpp has one tensor",
                ));
            }
            Some(module) => *module,
            None if target.name == LM_HEAD_MODULE => {
                return Err(more_than_lora(
                    folder,
                    "it has LoRA on the head, which is one tensor with the embedding",
                ));
            }
            None => return Err(refused(format!("`{}` has no name in llama.cpp", target.name))),
        };
        let names = module_names(&config.family.gguf, module);
        let shares = names.len();
        for (share, name) in names.into_iter().enumerate() {
            let halves = [("lora_a", TensorKind::LoraA), ("lora_b", TensorKind::LoraB)];
            parts.extend(halves.map(|(half, kind)| {
                let name = format!("{name}.weight.{half}");
                LoraPart { name, target, module, kind, share, shares }
            }));
        }
    }
    Ok(parts)
}

impl LoraPart<'_> {
    fn encode(
        &self,
        config: &ModelConfig,
        opened: &SavedAdapter,
        alpha: f64,
        entry: &TensorEntry,
    ) -> Result<Vec<u8>> {
        let &[rows, row] = entry.shape.as_slice() else {
            return Err(Error::internal(format!("`{}` has shape {:?}", entry.name, entry.shape)));
        };
        let is_b = self.kind == TensorKind::LoraB;
        let first_row = if is_b { self.share * rows } else { 0 };
        let mut values = vec![0f32; rows * row];
        opened.read_part(&self.target.name, self.kind, first_row * row, &mut values)?;
        if is_b {
            let change = change(config, self.module);
            let factor = self.target.scale * self.target.r as f64 / alpha * f64::from(change.factor);
            let rows = (0..rows).map(|at| change.source_row(at, rows));
            let moved = rows.flat_map(|from| &values[from * row..(from + 1) * row]);
            values = moved.map(|value| (f64::from(*value) * factor) as f32).collect();
        }
        blocks::encode(&entry.name, &values, row, entry.kind)
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
