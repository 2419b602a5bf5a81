//! The tokens of a model in use: its own, those of `model.new_tokens`, and those of an adapter.
//!
//! An adapter works only with the tokenizer and the chat template of its training. Its folder
//! therefore contains them, and they replace the model's. Another vocabulary than a tokenizer.json
//! does not replace a tokenizer.json. Embedding and head of the model grow by
//! the rows that its files do not have.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::base_model::BaseModel;
use super::dataset::DatasetLoader;
use crate::adapter::SavedAdapter;
use crate::data::{ChatTemplate, Tokenizer};
use crate::error::{Error, Result};
use crate::recipe::DataSection;
use crate::weights::sidecar_files::{TEMPLATE_FILE, TOKENIZER_CONFIG, TokenizerFiles};

impl BaseModel {
    /// Adopts the tokenizer of the adapter in `folder`, if it replaces the model's, and its number
    /// of tokens.
    ///
    /// # Errors
    /// The adapter cannot be read.
    pub fn adopt(&mut self, folder: &Path) -> Result<()> {
        let (rows, tied) = (self.config.vocab_size, self.config.tie_word_embeddings);
        self.set_rows(SavedAdapter::read(folder)?.vocab_size(rows, tied))?;
        if let Some(tokenizer) = TokenizerFiles::of_adapter(folder, &self.source.folder)? {
            self.tokenizer = tokenizer.folder;
        }
        Ok(())
    }

    /// Loads the tokenizer in use.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::load_for(&self.tokenizer, &self.source.folder)
    }

    /// Loads the tokenizer, adds `texts` as tokens and returns their ids. The model gets rows for
    /// them.
    ///
    /// # Errors
    /// It cannot be read, or has no ids for them.
    pub(crate) fn tokenizer_with(&mut self, texts: &[String]) -> Result<(Tokenizer, Vec<u32>)> {
        let mut tokenizer = self.tokenizer()?;
        let ids = tokenizer.add_tokens(texts)?;
        let rows = ids.iter().max().map_or(0, |id| *id as usize + 1);
        self.set_rows(self.config.vocab_size.max(rows))?;
        Ok((tokenizer, ids))
    }

    /// Sets the number of rows of embedding and head.
    fn set_rows(&mut self, rows: usize) -> Result<()> {
        let config = &mut self.config;
        if rows != config.vocab_size && config.per_layer_width(1) > 0 {
            return Err(Error::user(format!("cannot use {rows} tokens with this model"))
                .because(format!(
                    "it has per-layer inputs, whose table has rows for its own {} tokens; finetune adds none",
                    config.vocab_size
                ))
                .hint("use tokens that the model has, such as its unused ones"));
        }
        config.vocab_size = rows;
        Ok(())
    }

    /// Returns the rules of `data` for rows of this model, with `tokenizer`.
    ///
    /// # Errors
    /// The user's: the chat template cannot be read, is invalid, or differs from the adapter's.
    pub fn dataset_loader(&self, tokenizer: Tokenizer, data: &DataSection) -> Result<DatasetLoader> {
        let rows = DatasetLoader::new(tokenizer, data, self.config.vocab_size)?;
        let of_adapter = self.tokenizer != self.source.folder;
        let template = rows.template.as_ref().filter(|_| of_adapter);
        match template.and_then(|template| template.difference_from_own(&rows.tokenizer)) {
            None => Ok(rows),
            Some(difference) => Err(Error::user(format!(
                "`data.chat_template` is not the chat template that the adapter in {} was trained with",
                self.tokenizer.display()
            ))
            .because(difference)
            .hint("remove `data.chat_template`: the adapter's own is used then")),
        }
    }

    /// Returns the tokenizer files that a run with `rows` writes beside its weights. A template of
    /// the recipe replaces all others.
    pub fn result_tokenizer(&self, rows: &DatasetLoader) -> TokenizerFiles {
        let mut changed: BTreeMap<String, String> = rows.tokenizer.changed_files().iter().cloned().collect();
        let given = rows.template.as_ref().and_then(ChatTemplate::given);
        if let Some(template) = given {
            let written = changed.get(TOKENIZER_CONFIG).and_then(|text| serde_json::from_str(text).ok());
            let mut config: Map<String, Value> = written.unwrap_or_else(|| rows.tokenizer.config().clone());
            // `remove` would move the last key to this position.
            if config.shift_remove("chat_template").is_some() {
                changed.insert(TOKENIZER_CONFIG.to_owned(), format!("{:#}\n", Value::Object(config)));
            }
            changed.insert(TEMPLATE_FILE.to_owned(), template.text.clone());
        }
        TokenizerFiles {
            folder: self.tokenizer.clone(),
            changed: changed.into_iter().collect(),
            has_template: given.is_some(),
        }
    }
}
