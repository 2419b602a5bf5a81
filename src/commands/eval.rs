//! `finetune eval`: measures held-out loss, perplexity, token accuracy and exact match, or the
//! metrics of a preference objective.

use serde_json::{Value, json};

use super::{model_or_base, open_device, terminal, warn_without_kernels, working_folder};
use crate::cli::EvalArgs;
use crate::data::{self, Batch, Split};
use crate::error::{Error, Result};
use crate::loading::{EngineOptions, LoadedModel, Resolver, Trains};
use crate::model::AdapterSwitch;
use crate::objectives::{Evaluation, objective};
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
    let objective = objective(&recipe.objective);
    if objective.has_reference() && adapter.is_none() {
        return Err(Error::user(format!("cannot evaluate the objective \"{}\"", recipe.objective.kind))
            .because("it compares a model with its reference: the same model without its adapter")
            .hint("give an adapter with `--adapter`, or choose an objective without a reference, such as \"orpo\""));
    }
    let reference = |batch: &Batch| -> Result<Option<Vec<f64>>> {
        let off = || engine.sample_log_probs(&*objective, batch, AdapterSwitch::Off);
        objective.has_reference().then(off).transpose()
    };
    let evaluation = engine.evaluate(&*objective, &batches, reference, |rows| {
        terminal.detail(format!("{rows} of {total} rows"));
    })?;
    let figures = figures(&evaluation);
    let rows = if evaluation.has_row_figures() { evaluation.rows } else { total as u64 };
    let counts = [("tokens", evaluation.tokens), ("rows", rows)];
    if args.json {
        let figures = figures.into_iter().map(|(name, value)| (name.to_owned(), json!(value)));
        let counts = counts.map(|(name, count)| (name.to_owned(), json!(count)));
        let object = figures.chain(counts).collect();
        return terminal.data(format!("{}\n", Value::Object(object)));
    }
    let width = figures.iter().map(|(name, _)| name.len()).fold(15, usize::max);
    let mut text = String::new();
    for (name, value) in figures {
        text += &format!("{name:<width$} {value:.6}\n");
    }
    for (name, count) in counts {
        text += &format!("{name:<width$} {count}\n");
    }
    terminal.data(text)
}

/// Returns the figures of an evaluation by name: those of rows, or the objective's own.
fn figures(evaluation: &Evaluation) -> Vec<(&'static str, f64)> {
    let mut figures = vec![("loss", evaluation.loss())];
    if evaluation.has_row_figures() {
        figures.extend([
            ("perplexity", evaluation.perplexity()),
            ("token_accuracy", evaluation.token_accuracy()),
            ("exact_match", evaluation.exact_match()),
        ]);
    }
    figures.extend(evaluation.metrics.iter().filter_map(|metric| Some((metric.name, metric.mean()?))));
    figures
}
