//! `finetune data`: how rows become tokens, masks and batches, and what is wrong with them.

use std::fmt::Write;

use super::{terminal, working_folder};
use crate::cli::DataArgs;
use crate::data::{Dataset, Example, Sampler, SamplerOptions, Split, Tokenizer};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::plan::{decide_accumulation, decide_rows};
use crate::recipe::{OnBadRow, Recipe};
use crate::setup::{DatasetLoader, Resolver};
use crate::units;

/// Shows rows as tokens and masks.
pub(super) fn run(args: &DataArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let mut recipe = Recipe::load(&args.reading.layers(&args.model, &args.dataset, &working_folder()?)?)?;
    // Every bad row is to be seen, not only the first.
    recipe.data.on_bad_row = OnBadRow::Skip;
    let finder = Resolver::new(args.common.offline, &terminal)?;
    let source = recipe.model.id.as_ref().ok_or_else(|| Error::internal("`--model` was not taken over"))?;
    let folder = finder.model_headers(source, &recipe.model.revision)?.folder;
    let config = folder.join("config.json");
    let vocab_size = if config.exists() {
        let config = ModelConfig::from_json(&input_file::read_text("read", &config)?, "config.json")?;
        recipe.data.fit_positions(config.max_position_embeddings);
        config.vocab_size
    } else {
        usize::MAX
    };
    let mut tokenizer = Tokenizer::load(&folder)?;
    let added = tokenizer.add_tokens(&recipe.model.new_tokens)?;
    let vocab_size = added.into_iter().fold(vocab_size, |size, id| size.max(id as usize + 1));
    let rows = DatasetLoader::new(tokenizer, &recipe.data, vocab_size)?;
    rows.warnings().iter().for_each(|text| terminal.warn(text));
    let (dataset, _) = rows.load(&recipe.data.train, Split::Train, &finder)?;
    decide_rows(&mut recipe, 1, None)?;
    decide_accumulation(&mut recipe, Some(&dataset), 1)?;
    for (number, example) in dataset.examples().iter().take(args.rows).enumerate() {
        terminal.data(row(number + 1, example, &rows.tokenizer)?)?;
    }
    terminal.data(format!("{}\n{}", dataset.report(), batches(&dataset, &recipe)?))
}

/// A row as a table: position, token, whether it is trained, its text.
fn row(number: usize, example: &Example, tokenizer: &Tokenizer) -> Result<String> {
    let trained = example.num_trained();
    let mut text =
        format!("row {number}, {}: {} tokens, {trained} trained\n", example.origin, example.ids.len());
    for (position, (id, trained)) in example.ids.iter().zip(&example.trained).enumerate() {
        let piece = tokenizer.decode(&[*id], false)?;
        let token = tokenizer.token(*id).unwrap_or_default();
        let mark = if *trained { "train" } else { "" };
        let _ = writeln!(text, "  {position:>5}  {id:>7}  {mark:<5}  {token:<16}  {piece:?}");
    }
    text.push('\n');
    Ok(text)
}

fn batches(dataset: &Dataset, recipe: &Recipe) -> Result<String> {
    let options = SamplerOptions {
        seed: recipe.train.seed,
        shuffle: recipe.data.shuffle,
        packing: recipe.data.packing,
        max_seq_len: recipe.data.longest_row(),
        micro_batch_size: recipe.train.micro_batch_rows(),
        gradient_accumulation_steps: recipe.train.accumulation(),
        epochs: 1.0,
        max_steps: None,
    };
    let mut sampler = Sampler::new(dataset, options)?;
    let mut lengths = Vec::new();
    while let Some(step) = sampler.next_step() {
        lengths.extend(step.micro_batches.iter().map(|batch| batch.len()));
    }
    let (count, total) = (lengths.len().max(1), lengths.iter().sum::<usize>());
    let longest = lengths.iter().max().copied().unwrap_or(0);
    let unit = if recipe.data.packing { "packed rows" } else { "rows" };
    let mut text = format!(
        "an epoch: {} steps of {} {unit}; micro-batches of {} tokens on average, {longest} at most, no padding\n",
        sampler.steps_per_epoch(),
        recipe.train.micro_batch_rows() * recipe.train.accumulation(),
        total / count
    );
    if recipe.data.packing {
        let room = sampler.num_units() * recipe.data.longest_row();
        let share = 100.0 * total as f64 / room.max(1) as f64;
        let _ = writeln!(text, "packing fills {share:.1} % of {} tokens", units::count(room as u64));
    }
    Ok(text)
}
