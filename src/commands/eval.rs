//! `finetune eval`: held-out loss, perplexity, token accuracy, exact match.

use serde_json::json;

use super::{open_device, terminal, working_folder};
use crate::cli::EvalArgs;
use crate::data::{self, Split};
use crate::error::Result;
use crate::recipe::{DataSource, Recipe};
use crate::setup::{AdapterSetup, BaseModel, DatasetLoader, EngineOptions, Resolver};

/// Evaluates.
pub(super) fn run(args: &EvalArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let recipe = Recipe::load(&args.rows.layers(&args.model, &args.dataset, &folder)?)?;
    let finder = Resolver::new(args.common.offline, &terminal)?;
    let mut base = BaseModel::open(&recipe.model, recipe.quantization.as_ref(), &finder)?;
    let adapter =
        args.adapter.as_deref().map(|adapter| DataSource::from_argument("--adapter", adapter, &folder));
    let adapter_setup = match adapter.transpose()? {
        Some(source) => {
            let folder = finder.adapter(&source)?.folder;
            base.adopt(&folder)?;
            Some(AdapterSetup::saved_in(&folder, &base.config)?)
        }
        None => None,
    };
    let (tokenizer, _) = base.tokenizer_with(&recipe.model.new_tokens)?;
    let rows = DatasetLoader::new(tokenizer, &recipe.data, base.config.vocab_size)?;
    let (dataset, _) = rows.load(&recipe.data.train, Split::Eval, &finder)?;
    terminal.line(format!("data: {}", dataset.report()));
    let options = EngineOptions::new(&recipe.model, open_device()?, recipe.train.seed)?;
    let engine = base.engine(adapter_setup.as_ref(), false, &options)?;
    let tokens = recipe.train.micro_batch_size * recipe.data.max_seq_len;
    let total = dataset.len();
    let evaluation = engine.evaluate(data::batch::in_order(dataset.examples(), tokens), |rows| {
        terminal.detail(format!("{rows} of {total} rows"));
    })?;
    let figures = [
        ("loss", evaluation.loss()),
        ("perplexity", evaluation.perplexity()),
        ("token_accuracy", evaluation.token_accuracy()),
        ("exact_match", evaluation.exact_match()),
    ];
    if args.json {
        let mut object = serde_json::Map::new();
        for (name, value) in figures {
            object.insert(name.into(), json!(value));
        }
        object.insert("tokens".into(), json!(evaluation.tokens));
        object.insert("rows".into(), json!(evaluation.rows));
        return terminal.data(format!("{}\n", serde_json::Value::Object(object)));
    }
    let mut text = String::new();
    for (name, value) in figures {
        text.push_str(&format!("{name:<15} {value:.6}\n"));
    }
    text.push_str(&format!("{:<15} {}\n{:<15} {}\n", "tokens", evaluation.tokens, "rows", evaluation.rows));
    terminal.data(text)
}
