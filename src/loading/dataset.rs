//! From `[data]` to examples: data sets found, tokenizer and template loaded, rows encoded.

use chrono::{DateTime, FixedOffset};

use super::resolver::{ResolvedSource, Resolver};
use crate::data::{self, ChatTemplate, DataFile, DataOptions, Dataset, Split, Tokenizer};
use crate::error::{ErrorContext, Result};
use crate::recipe::{self, DataSource, RowSource, SplitSlice};

/// Rows as examples, and where each of their sources was found.
pub(crate) type LoadedSources = (Dataset, Vec<ResolvedSource>);

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
        let template = ChatTemplate::load(&tokenizer, data.chat_template.as_ref())?;
        let options = DataOptions {
            format: data.format,
            split: Split::Train,
            max_seq_len: data.longest_row(),
            train_on: data.train_on.clone(),
            on_bad_row: data.on_bad_row,
            on_long_row: data.on_long_row,
            sanitize_control_tokens: data.sanitize_control_tokens,
            vocab_size,
        };
        Ok(DatasetLoader { tokenizer, template, options })
    }

    /// The same rules with `now` as the moment that the chat template is told.
    #[must_use]
    pub fn at(self, now: DateTime<FixedOffset>) -> Self {
        DatasetLoader { template: self.template.map(|template| template.at(now)), ..self }
    }

    /// Sentences that a person should know of tokenizer and template before they are used.
    pub fn warnings(&self) -> Vec<String> {
        let replaced = self.template.as_ref().and_then(|template| {
            let difference = template.difference_from_own(&self.tokenizer)?;
            let folder = self.tokenizer.folder().display();
            Some(format!(
                "the tokenizer in {folder} has a chat template of its own, which is not used: {difference}"
            ))
        });
        self.tokenizer.left_out().into_iter().chain(replaced).collect()
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
        sources: &[RowSource],
        split: Split,
        resolver: &Resolver<'_>,
    ) -> Result<Option<LoadedSources>> {
        (!sources.is_empty()).then(|| self.load(sources, split, resolver)).transpose()
    }

    /// Finds and encodes the data sets of `sources`; also says where each was found.
    ///
    /// # Errors
    /// The user's: a data set cannot be found or read, its rows have no known format, or a row is refused by the rules of
    /// `[data]`. A transient fault: the hub does not answer.
    pub fn load(
        &self,
        sources: &[RowSource],
        split: Split,
        resolver: &Resolver<'_>,
    ) -> Result<LoadedSources> {
        let (read, found) = read_all(sources, split, resolver)?;
        Ok((self.encode(sources, weighted_rows(sources, read), split)?, found))
    }

    /// The rows to train on of `data`, and those held out: of `data.eval`, or `data.eval_split` of the training rows by `seed`.
    ///
    /// # Errors
    /// As [`DatasetLoader::load`]; no row would be left to train on.
    pub fn load_run(
        &self,
        data: &recipe::DataSection,
        seed: u64,
        resolver: &Resolver<'_>,
    ) -> Result<(LoadedSources, Option<LoadedSources>)> {
        let Some(size) = data.eval_split else {
            let train = self.load(&data.train, Split::Train, resolver)?;
            return Ok((train, self.load_if_any(&data.eval, Split::Eval, resolver)?));
        };
        let (mut read, found) = read_all(&data.train, Split::Train, resolver)?;
        let held_out = data::hold_out(&mut read, size, seed)?;
        let train = self.encode(&data.train, weighted_rows(&data.train, read), Split::Train)?;
        let held_out = self.encode(&data.train, held_out, Split::Eval)?;
        Ok(((train, found.clone()), Some((held_out, found))))
    }

    fn encode(&self, sources: &[RowSource], rows: DataFile, split: Split) -> Result<Dataset> {
        let names = || sources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let options = DataOptions { split, ..self.options.clone() };
        Dataset::from_source(rows, &options, &self.tokenizer, self.template.as_ref())
            .during(|| format!("cannot use the data set {}", names()))
    }
}

/// Finds and reads each of `sources`.
fn read_all(
    sources: &[RowSource],
    split: Split,
    resolver: &Resolver<'_>,
) -> Result<(Vec<DataFile>, Vec<ResolvedSource>)> {
    let (mut read, mut found) = (Vec::new(), Vec::new());
    for source in sources {
        let place = resolver.dataset(&of_split(source), split)?;
        // The files of a data set on the hub are those of its split.
        let of_files = |mut split: SplitSlice| {
            split.name = split.name.filter(|_| !place.on_hub);
            split
        };
        let own = RowSource { split: source.split.clone().map(of_files), ..source.clone() };
        let rows = data::take(&own, place.row_paths(), split);
        read.push(rows.during(|| format!("cannot use the data set {source}"))?);
        found.push(place);
    }
    Ok((read, found))
}

/// The place of a source, with its split where that is on the hub.
fn of_split(source: &RowSource) -> DataSource {
    match (&source.path, source.split.as_ref().and_then(|split| split.name.as_ref())) {
        (DataSource::Hub(id), Some(split)) if !id.trim_start_matches("hf://").contains(':') => {
            DataSource::Hub(format!("{id}:/{split}"))
        }
        (path, _) => path.clone(),
    }
}

/// The rows of all sources in one, each as often as its weight says.
fn weighted_rows(sources: &[RowSource], read: Vec<DataFile>) -> DataFile {
    let mut all = DataFile::default();
    for (source, mut one) in sources.iter().zip(read) {
        if source.weight != 1.0 {
            let rows = one.rows.len();
            one.rows = data::weighted(one.rows, source.weight);
            one.notes.push(format!(
                "{} of the {rows} of {source}: weight {}",
                crate::units::exact(one.rows.len(), "row"),
                source.weight
            ));
        }
        all.files.append(&mut one.files);
        all.rows.append(&mut one.rows);
        all.bad.append(&mut one.bad);
        all.notes.append(&mut one.notes);
    }
    all
}
