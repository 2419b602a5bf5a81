//! A model's parameters in a checkpoint: under which name each is stored, and whether the checkpoint is of this model.

use std::collections::HashSet;

use super::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::{EMBED_TOKENS, LM_HEAD, ModelFiles, is_rotary_buffer};

/// The way out when weights and config.json do not fit.
const ONE_MODEL: &str = "give config.json and weights of one and the same model";

/// What a model needs of its checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct StoredModel<'a> {
    /// The shape of the model in use.
    pub config: &'a ModelConfig,
    /// The files of the checkpoint.
    pub files: &'a ModelFiles,
    /// Rows that embedding and head may have there instead: the model in use may have more tokens.
    pub stored_tokens: usize,
}

/// The name that a parameter has in `files`: a tied table may be stored as the embedding or as the head.
pub fn stored_name<'n>(config: &ModelConfig, files: &ModelFiles, name: &'n str) -> &'n str {
    let other = match name {
        EMBED_TOKENS => LM_HEAD,
        LM_HEAD => EMBED_TOKENS,
        _ => return name,
    };
    if config.tie_word_embeddings && files.info(name).is_none() { other } else { name }
}

impl StoredModel<'_> {
    /// Checks by headers alone that the checkpoint has each of `parameters`, names and shapes, and no other tensor; `verb`
    /// says in errors what for, such as "load".
    ///
    /// # Errors
    /// The user's: a tensor is missing, has another shape than config.json says, or has no place in the model.
    pub fn check<'p>(
        &self,
        verb: &str,
        parameters: impl IntoIterator<Item = (&'p str, &'p [usize])>,
    ) -> Result<()> {
        let mut planned: HashSet<&str> = HashSet::new();
        for (parameter, shape) in parameters {
            planned.insert(parameter);
            let name = stored_name(self.config, self.files, parameter);
            let info = self.files.require(name).map_err(|e| e.hint(ONE_MODEL))?;
            let mut stored = shape.to_vec();
            if name == EMBED_TOKENS || name == LM_HEAD {
                stored[0] = self.stored_tokens;
            }
            if info.shape != shape && info.shape != stored {
                return Err(Error::user(format!("cannot {verb} {}", info.file.display()))
                    .because(format!(
                        "{name} has shape {:?}, config.json makes it {stored:?} ({})",
                        info.shape,
                        self.config.dimensions()
                    ))
                    .hint(ONE_MODEL));
            }
        }
        for (name, info) in self.files.tensors() {
            // Buffers that old checkpoints carry, and the second copy of a tied table.
            let harmless = is_rotary_buffer(name) || name == LM_HEAD || name == EMBED_TOKENS;
            if !harmless && !planned.contains(name) {
                return Err(Error::user(format!("cannot {verb} {}", info.file.display()))
                    .because(format!("{name} has no place in the model that config.json describes"))
                    .hint(ONE_MODEL));
            }
        }
        Ok(())
    }
}
