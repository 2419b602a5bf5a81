//! From `[data]` to examples: data sets found, tokenizer and template loaded, rows encoded.

use chrono::{DateTime, FixedOffset};

use super::resolver::{ResolvedSource, Resolver};
use crate::data::{ChatTemplate, DataOptions, Dataset, Split, Tokenizer};
use crate::error::{ErrorContext, Result};
use crate::recipe::{self, DataSource};

/// What turns rows into tokens for one model.
#[derive(Debug)]
pub struct DatasetLoader {
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, where there is one.
    pub template: Option<ChatTemplate>,
    options: DataOptions,
}

impl DatasetLoader {
    /// The tokenizer and the rules of `[data]`; ids from `vocab_size` on are refused.
    ///
    /// # Errors
    /// The user's: the chat template cannot be read or is no valid template.
    pub fn new(tokenizer: Tokenizer, data: &recipe::DataSection, vocab_size: usize) -> Result<Self> {
        let template =
            ChatTemplate::load(&tokenizer, data.chat_template.as_ref().map(|template| template.0.as_str()))?;
        let options = DataOptions {
            format: data.format,
            split: Split::Train,
            max_seq_len: data.longest_row(),
            train_on: data.train_on,
            on_bad_row: data.on_bad_row,
            on_long_row: data.on_long_row,
            vocab_size,
        };
        Ok(DatasetLoader { tokenizer, template, options })
    }

    /// The same rules with `now` as the moment that the chat template is told.
    #[must_use]
    pub fn at(self, now: DateTime<FixedOffset>) -> Self {
        DatasetLoader { template: self.template.map(|template| template.at(now)), ..self }
    }

    /// The moment that the chat template is told, if it asks for it.
    pub fn date(&self) -> Option<DateTime<FixedOffset>> {
        self.template.as_ref().filter(|template| template.asks_for_date()).map(ChatTemplate::now)
    }

    /// As [`DatasetLoader::load`]; none where there are no sources.
    ///
    /// # Errors
    /// As there.
    pub fn load_if_any(
        &self,
        sources: &[DataSource],
        split: Split,
        finder: &Resolver<'_>,
    ) -> Result<Option<(Dataset, Vec<ResolvedSource>)>> {
        (!sources.is_empty()).then(|| self.load(sources, split, finder)).transpose()
    }

    /// Finds and encodes the data sets of `sources`; also says where each was found.
    ///
    /// # Errors
    /// The user's: a data set cannot be found or read, its rows have no known format, or a row is refused by the rules of
    /// `[data]`. A transient fault: the hub does not answer.
    pub fn load(
        &self,
        sources: &[DataSource],
        split: Split,
        finder: &Resolver<'_>,
    ) -> Result<(Dataset, Vec<ResolvedSource>)> {
        let found = sources.iter().map(|source| finder.dataset(source, split)).collect::<Result<Vec<_>>>()?;
        let paths: Vec<_> = found.iter().flat_map(|found| found.row_paths().to_vec()).collect();
        let options = DataOptions { split, ..self.options.clone() };
        let names = || sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let dataset = Dataset::load(&paths, &options, &self.tokenizer, self.template.as_ref())
            .during(|| format!("cannot use the data set {}", names()))?;
        Ok((dataset, found))
    }
}
