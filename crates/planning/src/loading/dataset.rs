//! Turns `[data]` into examples: finds data sets, loads tokenizer and template, encodes rows.

use chrono::{DateTime, FixedOffset};

use super::resolver::{ResolvedSource, Resolver};
use crate::data::{self, ChatTemplate, DataFile, DataOptions, Dataset, Split, Tokenizer};
use crate::error::{ErrorContext, Result};
use crate::recipe::{self, DataSource, RowSource, SplitSlice};

/// Rows as examples, with the location of each of their sources.
pub(crate) type LoadedSources = (Dataset, Vec<ResolvedSource>);

/// Converts rows into tokens for one model.
#[derive(Debug)]
pub struct DatasetLoader {
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if one exists.
    pub template: Option<ChatTemplate>,
    options: DataOptions,
}

impl DatasetLoader {
    /// Combines the tokenizer and the rules of `[data]`; rows with ids from `vocab_size` on are
    /// refused.
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

    /// Returns the same rules with `now` as the time that the chat template sees.
    #[must_use]
    pub fn at(self, now: DateTime<FixedOffset>) -> Self {
        DatasetLoader { template: self.template.map(|template| template.at(now)), ..self }
    }

    /// Returns warnings about tokenizer and template, each in a sentence.
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

    /// Returns the time that the chat template sees, if it asks for one.
    pub fn date(&self) -> Option<DateTime<FixedOffset>> {
        self.template.as_ref().filter(|template| template.asks_for_date()).map(ChatTemplate::now)
    }

    /// Finds and encodes the data sets of `sources`, and returns the location of each.
    ///
    /// # Errors
    /// The user's: a data set cannot be found or read, its rows have no known format, or the rules
    /// of `[data]` refuse a row. Transient: the hub does not answer.
    pub fn load(
        &self,
        sources: &[RowSource],
        split: Split,
        resolver: &Resolver<'_>,
    ) -> Result<LoadedSources> {
        let (read, found) = read_all(sources, split, resolver)?;
        Ok((self.encode(sources, weighted_rows(sources, read), split)?, found))
    }

    /// Returns the training rows of `data`, and the held-out rows: from `data.eval`, or by
    /// `data.eval_split` of the training rows with `seed`.
    ///
    /// # Errors
    /// Those of [`DatasetLoader::load`]; no training row would remain.
    pub fn load_run(
        &self,
        data: &recipe::DataSection,
        seed: u64,
        resolver: &Resolver<'_>,
    ) -> Result<(LoadedSources, Option<LoadedSources>)> {
        let Some(size) = data.eval_split else {
            let train = self.load(&data.train, Split::Train, resolver)?;
            let eval = (!data.eval.is_empty()).then(|| self.load(&data.eval, Split::Eval, resolver));
            return Ok((train, eval.transpose()?));
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
        // On the hub, the files already belong to the split.
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

/// Returns the location of a source, with its split if it is on the hub.
fn of_split(source: &RowSource) -> DataSource {
    match (&source.path, source.split.as_ref().and_then(|split| split.name.as_ref())) {
        (DataSource::Hub(id), Some(split)) if !id.trim_start_matches("hf://").contains(':') => {
            DataSource::Hub(format!("{id}:/{split}"))
        }
        (path, _) => path.clone(),
    }
}

/// Combines the rows of all sources, each repeated by its weight.
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
