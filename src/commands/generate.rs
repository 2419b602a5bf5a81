//! `finetune generate`: continues a prompt, chats, or answers a file of prompts.

use super::{model_or_base, open_device, terminal, warn_without_kernels, working_folder};
use crate::cli::{GenerateArgs, RowArgs};
use crate::data::PromptEncoder;
use crate::error::Result;
use crate::generation::{ANSWERS, AnswerEnds, Generator, PromptSource, check_options};
use crate::launcher::interrupt::removing_on_signals;
use crate::loading::{EngineOptions, LoadedModel, Resolver, Trains};
use crate::recipe::Recipe;
use crate::report::Terminal;

/// Generates text from prompts.
pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    check_options(args)?;
    let terminal = terminal(&args.common);
    let Some(output) = &args.output else { return generate(args, &terminal) };
    ANSWERS.refuse_taken(output)?;
    removing_on_signals(output, &terminal, || generate(args, &terminal))
}

fn generate(args: &GenerateArgs, terminal: &Terminal) -> Result<()> {
    let folder = working_folder()?;
    let (resolver, adapter) = (Resolver::new(args.common.offline, terminal)?, args.source.adapter.as_deref());
    let model = model_or_base(args.source.model.as_deref(), adapter, &folder, &resolver, terminal)?;
    let reading = RowArgs { recipe: args.recipe.clone(), ..RowArgs::default() };
    let recipe = Recipe::load(&reading.layers(&model, &[], &folder)?)?;
    let LoadedModel { base, adapter_setup, dataset_loader, comparison } =
        LoadedModel::find(&recipe, adapter, &folder, &resolver, (terminal, args.source.force_base))?;
    let encoder = PromptEncoder {
        tokenizer: &dataset_loader.tokenizer,
        template: dataset_loader.template.as_ref(),
        vocab_size: base.config.vocab_size,
    };
    let prompts = PromptSource::of(args, &encoder, terminal)?;
    let ends = AnswerEnds::of(args, &encoder)?;
    let output =
        args.output.as_ref().map(|path| ANSWERS.create(path, prompts.written_bytes(args))).transpose()?;
    let options = EngineOptions::new(&recipe.model, open_device()?, recipe.train.seed)?;
    warn_without_kernels(terminal, &options, &base.config);
    let engine = base.engine(Trains::adapter_or_nothing(adapter_setup.as_ref()), &options)?;
    comparison.map_or(Ok(()), |comparison| comparison.finish(terminal))?;
    Generator::new(engine, encoder, ends, (args, terminal)).run(prompts, output)
}
