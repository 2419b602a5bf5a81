//! From `[data]` to examples: data sets found, tokenizer and template loaded, rows encoded.

use super::resolver::{ResolvedSource, Resolver};
use crate::data::{
    ChatTemplate, DataOptions, Dataset, OnFault, OnLongRow, RowFormat, Split, Tokenizer, TrainOn,
};
use crate::error::{ErrorContext, Result};
use crate::recipe::{self, DataFormat, DataSource, OnBadRow};

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
    pub fn new(tokenizer: Tokenizer, data: &recipe::DataSection, vocab_size: usize) -> Result<Self> {
        let template =
            ChatTemplate::load(&tokenizer, data.chat_template.as_ref().map(|template| template.0.as_str()))?;
        let options = DataOptions {
            format: format_of(data.format),
            split: Split::Train,
            max_seq_len: data.max_seq_len,
            train_on: match data.train_on {
                recipe::TrainOn::Assistant => TrainOn::Assistant,
                recipe::TrainOn::All => TrainOn::All,
            },
            on_bad_row: match data.on_bad_row {
                OnBadRow::Stop => OnFault::Stop,
                OnBadRow::Skip => OnFault::Skip,
            },
            on_long_row: match data.on_long_row {
                recipe::OnLongRow::Truncate => OnLongRow::Truncate,
                recipe::OnLongRow::Drop => OnLongRow::Drop,
                recipe::OnLongRow::Stop => OnLongRow::Stop,
            },
            vocab_size,
        };
        Ok(DatasetLoader { tokenizer, template, options })
    }

    /// Finds and encodes the data sets of `sources`; also says where each was found.
    pub fn load(
        &self,
        sources: &[DataSource],
        split: Split,
        finder: &Resolver<'_>,
    ) -> Result<(Dataset, Vec<ResolvedSource>)> {
        let found = sources.iter().map(|source| finder.dataset(source)).collect::<Result<Vec<_>>>()?;
        let paths: Vec<_> = found.iter().map(|found| found.folder.clone()).collect();
        let options = DataOptions { split, ..self.options.clone() };
        let names = || sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let dataset = Dataset::load(&paths, &options, &self.tokenizer, self.template.as_ref())
            .during(|| format!("cannot use the data set {}", names()))?;
        Ok((dataset, found))
    }
}

fn format_of(format: DataFormat) -> RowFormat {
    match format {
        DataFormat::Auto => RowFormat::Auto,
        DataFormat::Messages => RowFormat::Messages,
        DataFormat::Sharegpt => RowFormat::ShareGpt,
        DataFormat::Preference => RowFormat::Preference,
        DataFormat::Alpaca => RowFormat::Alpaca,
        DataFormat::Instruction => RowFormat::Instruction,
        DataFormat::PromptCompletion => RowFormat::PromptCompletion,
        DataFormat::QuestionAnswer => RowFormat::QuestionAnswer,
        DataFormat::Text => RowFormat::Text,
    }
}
