//! `finetune eval`: measures held-out loss, perplexity, token accuracy and exact match.

use serde_json::{Value, json};

use super::{model_or_base, open_device, terminal, warn_without_kernels, working_folder};
use crate::cli::EvalArgs;
use crate::data::{self, Batch, Split};
use crate::error::Result;
use crate::loading::{EngineOptions, LoadedModel, Resolver, Trains};
use crate::objectives::{CrossEntropy, StepTotals};
use crate::recipe::Recipe;

/// Evaluates a model on rows.
pub(super) fn run(args: &EvalArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let resolver = Resolver::new(args.common.offline, &terminal)?;
    let adapter = args.source.adapter.as_deref();
    let model = model_or_base(args.source.model.as_deref(), adapter, &folder, &resolver, &terminal)?;
    let recipe = Recipe::load(&args.rows.layers(&model, &args.dataset, &folder)?)?;
    let LoadedModel { base, adapter_setup, dataset_loader, comparison } =
        LoadedModel::find(&recipe, adapter, &folder, &resolver, (&terminal, args.source.force_base))?;
    let dataset = dataset_loader.load(&recipe.data.train, Split::Eval, &resolver)?.dataset;
    terminal.line(format!("data: {}", dataset.report()));
    let options = EngineOptions::new(&recipe.model, open_device()?, recipe.train.seed)?;
    warn_without_kernels(&terminal, &options, &base.config);
    let engine = base.engine(Trains::adapter_or_nothing(adapter_setup.as_ref()), &options)?;
    comparison.map_or(Ok(()), |comparison| comparison.finish(&terminal))?;
    let tokens = recipe.train.micro_batch_rows() * recipe.longest_group();
    let total = dataset.len();
    let batches: Vec<Batch> = data::batch::in_order(dataset.examples(), tokens).collect();
    let evaluation = engine.evaluate(
        &CrossEntropy,
        (&batches, StepTotals::of(&batches)),
        |_| Ok(None),
        |rows| {
            terminal.detail(format!("{rows} of {total} rows"));
        },
    )?;
    let figures = [
        ("loss", evaluation.loss()),
        ("perplexity", evaluation.perplexity()),
        ("token_accuracy", evaluation.token_accuracy()),
        ("exact_match", evaluation.exact_match()),
    ];
    let counts = [("tokens", evaluation.tokens), ("rows", evaluation.rows)];
    if args.json {
        let figures = figures.map(|(name, value)| (name.to_owned(), json!(value)));
        let counts = counts.map(|(name, count)| (name.to_owned(), json!(count)));
        let object = figures.into_iter().chain(counts).collect();
        return terminal.data(format!("{}\n", Value::Object(object)));
    }
    let figures = figures.map(|(name, value)| format!("{name:<15} {value:.6}\n"));
    let counts = counts.map(|(name, count)| format!("{name:<15} {count}\n"));
    terminal.data(figures.concat() + &counts.concat())
}
