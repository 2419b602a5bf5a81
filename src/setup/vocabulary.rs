//! The tokens of a model in use: its own, those of `model.new_tokens`, and those that an adapter was trained with.
//!
//! An adapter with new tokens is of use only with the tokenizer that knows them, which therefore lies in its folder and
//! takes the place of the model's. Embedding and head of the model grow by the rows that its files lack.

use std::path::Path;

use super::base_model::BaseModel;
use crate::adapter::SavedAdapter;
use crate::data::Tokenizer;
use crate::error::Result;
use crate::weights::sidecar_files::TokenizerFiles;

impl BaseModel {
    /// Takes over what comes with the adapter in `folder`: its tokenizer, if there is one, and the number of tokens.
    ///
    /// # Errors
    /// The adapter cannot be read.
    pub fn adopt(&mut self, folder: &Path) -> Result<()> {
        let config = &mut self.config;
        config.vocab_size =
            SavedAdapter::read(folder)?.vocab_size(config.vocab_size, config.tie_word_embeddings);
        if let Some(tokenizer) = TokenizerFiles::find(folder)? {
            self.tokenizer = tokenizer.folder;
        }
        Ok(())
    }

    /// The tokenizer in use.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::load_for(&self.tokenizer, &self.found.folder)
    }

    /// The tokenizer with `texts` as tokens, for which the model gets rows; and their ids.
    ///
    /// # Errors
    /// It cannot be read, or has no ids for them.
    pub fn tokenizer_with(&mut self, texts: &[String]) -> Result<(Tokenizer, Vec<u32>)> {
        let mut tokenizer = self.tokenizer()?;
        let ids = tokenizer.add_tokens(texts)?;
        let rows = ids.iter().max().map_or(0, |id| *id as usize + 1);
        self.config.vocab_size = self.config.vocab_size.max(rows);
        Ok((tokenizer, ids))
    }

    /// What a run leaves beside its weights instead of the model's own tokenizer, if it uses another.
    pub(crate) fn other_tokenizer(&self, tokenizer: &Tokenizer) -> Option<TokenizerFiles> {
        let changed = tokenizer.changed_files();
        (self.tokenizer != self.found.folder || !changed.is_empty())
            .then(|| TokenizerFiles { folder: self.tokenizer.clone(), changed: changed.to_vec() })
    }
}
