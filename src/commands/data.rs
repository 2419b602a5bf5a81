//! `finetune data`: shows how rows become tokens, masks and batches, and lists bad rows.

use std::fmt::Write;

use super::data_view::DataView;
use super::{data_json, terminal, working_folder};
use crate::cli::DataArgs;
use crate::data::{Dataset, ExampleFigures, Sampler, SamplerOptions, Tokenizer};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::loading::{DatasetLoader, Resolver};
use crate::model::ModelConfig;
use crate::planning::{decide_accumulation, decide_rows, held_out_report, sampler_options};
use crate::recipe::{ObjectiveRows, OnBadRow, Recipe};
use crate::units;

/// Shows rows as tokens and masks.
pub(super) fn run(args: &DataArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let mut recipe = Recipe::load(&args.reading.layers(&args.model, &args.dataset, &working_folder()?)?)?;
    // The command lists every bad row, not only the first.
    recipe.data.on_bad_row = OnBadRow::Skip;
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let source = recipe
        .model
        .id
        .as_ref()
        .ok_or_else(|| Error::internal("the recipe has no model in spite of `--model`"))?;
    let folder = resolver.model_headers(source, &recipe.model.revision)?.folder;
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
    let loader = DatasetLoader::new(tokenizer, &recipe.data, vocab_size)?.for_objective(&recipe);
    loader.warnings().iter().for_each(|text| terminal.warn(text));
    let (train, held_out) = loader.load_run(&recipe.data, recipe.train.seed, &resolver)?;
    let (train, held_out) = (train.dataset, held_out.map(|held_out| held_out.dataset));
    decide_rows(&mut recipe, 1, None)?;
    decide_accumulation(&mut recipe, Some(&train), 1)?;
    let view = DataView {
        tokenizer: &loader.tokenizer,
        train: &train,
        held_out: held_out.as_ref(),
        rows: args.rows,
        figures: ExampleFigures::of(&train, &loader.tokenizer),
        batches: batches(&train, &recipe)?,
        held_out_report: held_out.as_ref().map(|held_out| held_out_report(held_out, &train)),
    };
    if let Some(path) = &args.html {
        view.write_page(path)?;
        terminal.line(format!("the rows as a page: {}", path.display()));
    }
    if args.json {
        return data_json::print(&view, &terminal);
    }
    if args.tokens { view.print_tokens(&terminal) } else { view.print_text(&terminal) }
}

fn batches(dataset: &Dataset, recipe: &Recipe) -> Result<String> {
    let options = SamplerOptions { epochs: 1.0, max_steps: None, ..sampler_options(recipe, 1) };
    let mut sampler = Sampler::new(dataset, options)?;
    let mut lengths = Vec::new();
    while let Some(step) = sampler.next_step() {
        lengths.extend(step.micro_batches.iter().map(|batch| batch.len()));
    }
    let total = lengths.iter().sum::<usize>();
    let longest = lengths.iter().max().copied().unwrap_or(0);
    let unit = match (recipe.data.packing, recipe.objective.kind.rows()) {
        (true, _) => "packed row",
        (false, ObjectiveRows::Single) => "row",
        (false, ObjectiveRows::Pairs) => "pair",
        (false, ObjectiveRows::Labelled) => "labelled answer",
    };
    let in_words = |n: usize, what: &str| if n == 1 { format!("one {what}") } else { units::exact(n, what) };
    let mut text = format!(
        "an epoch is {} of {} ({} tokens on average); a micro-batch has {} tokens at most and no padding\n",
        in_words(sampler.steps_per_epoch() as usize, "step"),
        in_words(recipe.train.micro_batch_rows() * recipe.train.accumulation(), unit),
        with_commas(total / sampler.num_units().max(1)),
        with_commas(longest)
    );
    if recipe.data.packing {
        let capacity = sampler.num_units() * recipe.longest_group();
        let share = 100.0 * total as f64 / capacity.max(1) as f64;
        let _ = writeln!(text, "packing fills {share:.1} % of {} tokens", units::count(capacity as u64));
    }
    Ok(text)
}

/// Formats a number with a comma between thousands: 1,568.
fn with_commas(number: usize) -> String {
    match (number / 1000, number % 1000) {
        (0, rest) => rest.to_string(),
        (thousands, rest) => format!("{},{rest:03}", with_commas(thousands)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_stand_apart() {
        let numbers = [0, 14, 999, 1000, 1568, 20_048, 1_000_001].map(with_commas);
        assert_eq!(numbers, ["0", "14", "999", "1,000", "1,568", "20,048", "1,000,001"]);
    }
}
