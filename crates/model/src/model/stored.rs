//! A model's parameters in a checkpoint: their stored names, and the check that the checkpoint is
//! of this model.

use std::collections::{BTreeSet, HashSet};

use super::ModelConfig;
use super::block_part::BlockPart;
use super::composition::{AttentionMixer, BlockConfig};
use super::layout::{modules_beside_blocks, stacked_experts};
use super::parameters;
use crate::error::{Error, Result};
use crate::units;
use crate::weights::{EMBED_TOKENS, LM_HEAD, ModelFiles, TensorInfo, is_further, is_old_buffer};

/// The ends of the names of scales for a quantized key-value cache.
const CACHE_SCALES: [&str; 5] = [".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale"];

/// The hint if weights and config.json do not match.
const ONE_MODEL: &str = "give config.json and weights of one and the same model";

/// A model and its checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct StoredModel<'a> {
    /// The shape of the model in use.
    pub config: &'a ModelConfig,
    /// The files of the checkpoint.
    pub files: &'a ModelFiles,
    /// Number of rows that embedding and head may have in the checkpoint instead: the model in use
    /// may have more tokens.
    pub stored_tokens: usize,
}

/// Returns the name of a parameter in `files`: a tied table may be stored as the embedding or as
/// the head.
pub fn stored_name<'n>(config: &ModelConfig, files: &ModelFiles, name: &'n str) -> &'n str {
    let other = match name {
        EMBED_TOKENS => LM_HEAD,
        LM_HEAD => EMBED_TOKENS,
        _ => return name,
    };
    if config.tie_word_embeddings && files.info(name).is_none() { other } else { name }
}

/// Aligns `config` and `files` as transformers does. Tensors that the model does not use are
/// ignored (blocks beyond `num_hidden_layers`, scales of a quantized key-value cache and biases of
/// zeros beside packed weights). Blocks that predict further tokens, and the other parts of an
/// image-text model, are set apart: written models keep them. Stacks of experts become a tensor for
/// each expert. A head that differs from the embedding stays, though config.json ties the two. The
/// notes of `files` record all of these.
///
/// # Errors
/// User: a table or a bias cannot be read, or a stack of experts is not of this model.
pub fn settle(config: &mut ModelConfig, files: &mut ModelFiles) -> Result<()> {
    files.write_as(config.family.class_names);
    pass_over_unused(config, files);
    remove_unused_packing(config, files)?;
    unstack_experts(config, files)?;
    if config.tie_word_embeddings && files.tables_differ(EMBED_TOKENS, LM_HEAD)? {
        config.tie_word_embeddings = false;
        files.keep_head_apart();
    }
    Ok(())
}

/// Replaces stacks of experts by a tensor for each expert.
///
/// # Errors
/// User: a stack has another shape than in config.json.
pub fn unstack_experts(config: &ModelConfig, files: &mut ModelFiles) -> Result<()> {
    stacked_experts(config).into_iter().try_for_each(|stack| files.unstack(stack))
}

fn pass_over_unused(config: &ModelConfig, files: &mut ModelFiles) {
    let layers = config.num_layers();
    let beyond = |name: &str| block_of(name).filter(|block| *block >= layers);
    let blocks: BTreeSet<usize> = files.names().filter_map(beyond).collect();
    if files.remove_unused(|name| beyond(name).is_some()) > 0 {
        let (first, count) = (blocks.first().copied().unwrap_or(layers), blocks.len());
        let named = match count {
            1 => format!("block {first} of the weights is"),
            _ => format!("{count} blocks of the weights, from block {first} on, are"),
        };
        files.add_warning(format!("{named} not used: `num_hidden_layers` of config.json is {layers}"));
    }
    let [further, dropped] = files.set_apart(is_further);
    let named = |count| format!("{count} tensors that predict further tokens (`mtp`)");
    if further > 0 {
        files.add_warning(format!("{} are not trained; written models keep them", named(further)));
    }
    if dropped > 0 {
        files.add_warning(format!("{} are quantized: they are neither used nor written", named(dropped)));
    }
    let keys = set_apart_keys(config, files);
    let Some(whole) = &config.text_of else { return warn_about_keys(files, keys) };
    let beside = modules_beside_blocks(config);
    // Such a model has a container in its names by design.
    files.forget_names();
    let [_, quantized] = files.set_apart(|name| {
        let parts = ["model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."];
        let is_part = parts.iter().any(|start| name.starts_with(start));
        !is_part && !beside.iter().any(|module| is_of(name, module))
    });
    // A GGUF file holds the text part alone.
    let writes_whole = quantized == 0 && files.source() == files.folder();
    files.write_whole(writes_whole);
    warn_about_keys(files, if writes_whole { keys } else { [0, keys.iter().sum()] });
    let written = match (quantized, files.retained().count()) {
        (0, 0) => String::new(),
        (0, _) => {
            format!("; written models keep its other tensors as they are: {}", files.retained().describe())
        }
        _ => format!(" and written; its other tensors are not, because {quantized} are quantized"),
    };
    files.add_warning(format!("the text part of an image-text model (`{whole}`) is used{written}"));
}

/// Returns the modules of keys and values of blocks that read those of another block, which some
/// files have and the model does not use.
pub fn unread_modules(config: &ModelConfig) -> BTreeSet<String> {
    let reads =
        |block: &BlockConfig| block.token_mixer.attention().and_then(AttentionMixer::reads_from).is_some();
    let parts = [BlockPart::KProj, BlockPart::VProj, BlockPart::KNorm].map(config.family.module_name);
    let readers = config.blocks.iter().enumerate().filter(|(_, block)| reads(block));
    readers.flat_map(|(layer, _)| parts.map(|part| format!("model.layers.{layer}.{part}"))).collect()
}

/// Sets apart the tensors of [`unread_modules`]. Returns the numbers of those that written models
/// keep and of those that are quantized, which they do not.
fn set_apart_keys(config: &ModelConfig, files: &mut ModelFiles) -> [usize; 2] {
    let unread = unread_modules(config);
    let counts = files.set_apart(|name| unread.iter().any(|module| is_of(name, module)));
    files.leave_unread(unread);
    counts
}

fn warn_about_keys(files: &mut ModelFiles, [retained, dropped]: [usize; 2]) {
    let uses =
        [(retained, "are not used; written models keep them"), (dropped, "are neither used nor written")];
    for (count, written) in uses.into_iter().filter(|(count, _)| *count > 0) {
        files.add_warning(format!(
            "{} of keys and values of blocks that read those of another block {written}",
            units::exact(count, "tensor")
        ));
    }
}

/// Removes what tools store beside packed weights and the model does not use: scales of its
/// key-value cache, and biases of zeros (AutoGPTQ).
fn remove_unused_packing(config: &ModelConfig, files: &mut ModelFiles) -> Result<()> {
    if !files.names().any(|name| files.is_packed(name)) {
        return Ok(());
    }
    let parameters = parameters(config);
    let parameters: HashSet<&str> = parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    let mut zeros: HashSet<String> = HashSet::new();
    for (name, info) in files.tensors().filter(|(name, _)| !parameters.contains(name)) {
        if !name.strip_suffix(".bias").is_some_and(|module| files.is_packed(&format!("{module}.weight"))) {
            continue;
        }
        // Zeros also if the values cannot be read.
        let mut values = vec![0f32; info.elements()];
        if !files.is_header_only() {
            files.read_f32(name, &mut values)?;
        }
        if values.iter().all(|value| *value == 0.0) {
            zeros.insert(name.to_owned());
        }
    }
    if files.remove_unused(|name| zeros.contains(name)) > 0 {
        let count = units::exact(zeros.len(), "quantized weight");
        files.add_warning(format!(
            "finetune does not use the zero biases of {count}: the model has no such biases"
        ));
    }
    let scales = files.remove_unused(|name| CACHE_SCALES.iter().any(|end| name.ends_with(end)));
    if scales > 0 {
        let count = units::exact(scales, "tensor");
        files.add_warning(format!("finetune does not use {count} of the key-value cache's quantization"));
    }
    Ok(())
}

/// Returns whether a tensor is one of `module`.
fn is_of(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|end| end.starts_with('.'))
}

/// Returns the block of a tensor.
fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

impl StoredModel<'_> {
    /// Returns the error for a missing tensor, whose cause is in `error`.
    fn missing(&self, name: &str, error: Error) -> Error {
        let other = if name == LM_HEAD { EMBED_TOKENS } else { LM_HEAD };
        let is_table = name == LM_HEAD || name == EMBED_TOKENS;
        if !is_table || self.config.tie_word_embeddings || self.files.info(other).is_none() {
            return error.hint(ONE_MODEL);
        }
        Error::user(format!("cannot use the weights in {}", self.files.folder().display()))
            .because(format!("they hold `{other}` and no `{name}`"))
            .because("config.json does not tie the two: its `tie_word_embeddings` is false, or missing and false for this family")
            .hint("write `\"tie_word_embeddings\": true` into config.json if embedding and head are one table")
    }

    /// Checks by headers alone that the checkpoint has each of `parameters`, by name and shape, and
    /// no other tensor. `verb` is the purpose in errors, such as "load".
    ///
    /// # Errors
    /// User: a tensor is missing, has another shape than in config.json, or is not part of the
    /// model.
    pub fn check<'p>(
        &self,
        verb: &str,
        parameters: impl IntoIterator<Item = (&'p str, &'p [usize])>,
    ) -> Result<()> {
        let refused = |info: &TensorInfo, cause: String| {
            Error::user(format!("cannot {verb} {}", info.file.display())).because(cause).hint(ONE_MODEL)
        };
        let mut planned: HashSet<&str> = HashSet::new();
        for (parameter, shape) in parameters {
            planned.insert(parameter);
            let name = stored_name(self.config, self.files, parameter);
            let info = self.files.require(name).map_err(|error| self.missing(name, error))?;
            let mut stored = shape.to_vec();
            if name == EMBED_TOKENS || name == LM_HEAD {
                stored[0] = self.stored_tokens;
            }
            if info.shape != shape && info.shape != stored {
                let (actual, sizes) = (&info.shape, self.config.dimensions());
                let cause = format!("{name} has shape {actual:?}, config.json makes it {stored:?} ({sizes})");
                return Err(refused(info, cause));
            }
        }
        for (name, info) in self.files.tensors() {
            // Buffers in old checkpoints, and the second copy of a tied table.
            let harmless = is_old_buffer(name) || name == LM_HEAD || name == EMBED_TOKENS;
            if !harmless && !planned.contains(name) {
                let cause = format!("{name} is not part of the model that config.json describes");
                return Err(refused(info, cause));
            }
        }
        Ok(())
    }
}
