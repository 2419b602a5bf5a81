//! Turns `[data]` into examples: finds data sets, loads tokenizer and template, encodes rows.

use chrono::{DateTime, FixedOffset};

use super::resolver::{ResolvedSource, Resolver};
use crate::data::{self, ChatTemplate, DataFile, DataOptions, Dataset, Split, Tokenizer};
use crate::error::{ErrorContext, Result};
use crate::recipe::{self, AutoOr, DataSource, Recipe, RowSource, SplitSlice};

/// Rows as examples, with the location of each of their sources.
#[derive(Debug)]
pub struct LoadedDataset {
    /// The encoded rows.
    pub dataset: Dataset,
    /// The location of each source, in the order of the recipe.
    pub sources: Vec<ResolvedSource>,
}

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
            ..DataOptions::default()
        };
        Ok(DatasetLoader { tokenizer, template, options })
    }

    /// Returns the same rules for the objective of `recipe`, which decides the examples of a row.
    #[must_use]
    pub fn for_objective(mut self, recipe: &Recipe) -> Self {
        self.options.objective = recipe.objective.kind;
        self.options.mismatched_block =
            recipe.objective.needs_mismatched().then_some(match recipe.train.micro_batch_size {
                // An answer is no mismatched one of its own row: all rows are one block.
                AutoOr::Auto | AutoOr::Fixed(..=1) => usize::MAX,
                AutoOr::Fixed(rows) => rows,
            });
        self
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
    ) -> Result<LoadedDataset> {
        let (read, resolved_sources) = read_all(sources, split, resolver)?;
        let dataset = self.encode(sources, weighted_rows(sources, read), split)?;
        Ok(LoadedDataset { dataset, sources: resolved_sources })
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
    ) -> Result<(LoadedDataset, Option<LoadedDataset>)> {
        let Some(size) = data.eval_split else {
            let train = self.load(&data.train, Split::Train, resolver)?;
            let eval = (!data.eval.is_empty()).then(|| self.load(&data.eval, Split::Eval, resolver));
            return Ok((train, eval.transpose()?));
        };
        let (mut read, resolved_sources) = read_all(&data.train, Split::Train, resolver)?;
        let held_out = data::hold_out(&mut read, size, seed)?;
        let dataset = self.encode(&data.train, weighted_rows(&data.train, read), Split::Train)?;
        let train = LoadedDataset { dataset, sources: resolved_sources.clone() };
        let dataset = self.encode(&data.train, held_out, Split::Eval)?;
        Ok((train, Some(LoadedDataset { dataset, sources: resolved_sources })))
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
    let (mut read, mut resolved_sources) = (Vec::new(), Vec::new());
    for source in sources {
        let resolved = resolver.dataset(&of_split(source), split)?;
        // On the hub, the files already belong to the split.
        let of_files = |mut split: SplitSlice| {
            split.name = split.name.filter(|_| !resolved.on_hub);
            split
        };
        let own = RowSource { split: source.split.clone().map(of_files), ..source.clone() };
        let rows = data::take(&own, resolved.row_paths(), split);
        read.push(rows.during(|| format!("cannot use the data set {source}"))?);
        resolved_sources.push(resolved);
    }
    Ok((read, resolved_sources))
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
