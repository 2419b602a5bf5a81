//! `finetune generate`: continue a prompt, or chat.

use std::io::BufRead;

use serde_json::json;

use super::{Opened, model_or_base, open_device, say_without_kernels, terminal, working_folder};
use crate::cli::GenerateArgs;
use crate::data::template::TemplateInputs;
use crate::data::{ChatTemplate, Tokenizer};
use crate::engine::{Engine, LogitsProcessor};
use crate::error::{Error, Result};
use crate::plan::prompt_beyond_positions;
use crate::recipe::{Purpose, Recipe, RecipeLayers, RecipeText};
use crate::report::Terminal;
use crate::setup::{EngineOptions, Resolver, Trains};

/// Generates text from prompts.
pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let (finder, adapter) = (Resolver::new(args.common.offline, &terminal)?, args.adapter.as_deref());
    let model = model_or_base(args.model.as_deref(), adapter, &folder, &finder, &terminal)?;
    let recipe = Recipe::load(&RecipeLayers {
        recipe: args.recipe.as_deref().map(|name| RecipeText::find(name, &folder)).transpose()?,
        model: Some(model),
        folder: folder.clone(),
        purpose: Purpose::Other,
        ..RecipeLayers::default()
    })?;
    let Opened { base, adapter_setup, rows, comparison } =
        Opened::find(&recipe, adapter, &folder, &finder, (&terminal, args.force_base))?;
    let task = match &args.prompt {
        Some(text) => {
            Task::Continue { text, ids: prompt_ids(&rows.tokenizer, text, base.config.vocab_size)? }
        }
        None => Task::Chat(rows.template.as_ref().ok_or_else(|| {
            Error::user("cannot chat with this model")
                .because("its tokenizer has no chat template")
                .hint("give one in a recipe (`data.chat_template`), or use `--prompt`")
        })?),
    };
    let options = EngineOptions::new(&recipe.model, open_device()?, recipe.train.seed)?;
    say_without_kernels(&terminal, &options, &base.config);
    let engine = base.engine(Trains::adapter_or_nothing(adapter_setup.as_ref()), &options)?;
    comparison.map_or(Ok(()), |comparison| comparison.finish(&terminal))?;
    let generator = Generator { engine, tokenizer: &rows.tokenizer, args, terminal };
    match task {
        Task::Continue { text, ids } => generator.continue_text(text, &ids),
        Task::Chat(template) => generator.chat(template),
    }
}

/// What is asked for.
enum Task<'a> {
    Continue { text: &'a str, ids: Vec<u32> },
    Chat(&'a ChatTemplate),
}

/// The ids of a prompt, of which there must be one, and none that the model does not have.
fn prompt_ids(tokenizer: &Tokenizer, prompt: &str, vocab_size: usize) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(prompt, true)?;
    if ids.is_empty() {
        return Err(Error::user("cannot continue an empty prompt")
            .because("this tokenizer puts no token of its own before it")
            .hint("give a text with `--prompt`"));
    }
    known(tokenizer, &ids, vocab_size)?;
    Ok(ids)
}

fn known(tokenizer: &Tokenizer, ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => {
            let token = tokenizer.token(*id).unwrap_or_default();
            Err(Error::user("the prompt has a token that the model does not know")
                .because(format!("token {id} ({token:?}); the model has the ids below {vocab_size}"))
                .hint("give tokenizer files and weights of one and the same model"))
        }
    }
}

struct Generator<'a> {
    engine: Engine,
    tokenizer: &'a Tokenizer,
    args: &'a GenerateArgs,
    terminal: Terminal,
}

impl Generator<'_> {
    fn continue_text(&self, prompt: &str, ids: &[u32]) -> Result<()> {
        self.terminal.data(prompt)?;
        self.stream(ids, self.tokenizer.eos_ids())?;
        self.terminal.data("\n")
    }

    /// Each line of the standard input is the user's turn; an empty line or the end of the input ends the chat.
    fn chat(&self, template: &ChatTemplate) -> Result<()> {
        let mut messages = Vec::new();
        self.terminal.line(format!("chat template: {}; an empty line ends the chat", template.described()));
        let stop = [self.tokenizer.eos_ids(), template.turn_end(self.tokenizer)?.as_slice()].concat();
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|e| Error::io("read", std::path::Path::new("the standard input"), &e))?;
            if line.trim().is_empty() {
                break;
            }
            messages.push(json!({ "role": "user", "content": line }));
            let inputs = TemplateInputs { add_generation_prompt: true, ..TemplateInputs::default() };
            let rendered = template.render_fitted(&messages, &inputs)?;
            let ids = self.tokenizer.encode(&rendered.text, false)?;
            known(self.tokenizer, &ids, self.engine.config.vocab_size)?;
            let answer = self.stream(&ids, &stop)?;
            self.terminal.data("\n")?;
            messages.push(json!({ "role": "assistant", "content": answer }));
        }
        Ok(())
    }

    /// What chooses the tokens of one continuation; each starts from the seed.
    fn sampler(&self) -> LogitsProcessor {
        // It counts probabilities in f32, where the smallest of the accepted shares are zero.
        let top_p = (self.args.top_p < 1.0).then_some(self.args.top_p.max(f64::from(f32::MIN_POSITIVE)));
        LogitsProcessor::new(self.args.seed, Some(self.args.temperature), top_p)
    }

    /// Prints the continuation of `ids` as it is made, to a token of `stop`; returns it.
    fn stream(&self, ids: &[u32], stop: &[u32]) -> Result<String> {
        let warn = |sequence: &str, tokens: usize| {
            let warning = prompt_beyond_positions(&self.engine.config, sequence, tokens);
            warning.map(|warning| self.terminal.warn(warning))
        };
        let warned = warn("the prompt has", ids.len());
        let mut sampler = self.sampler();
        let (mut text, mut whole) = (self.tokenizer.stream(true), String::new());
        // Decoders drop the space before the first word: what is printed is what the new tokens add to the prompt.
        ids.iter().try_for_each(|id| text.push(*id).map(drop))?;
        let made = self.engine.generate(ids, self.args.max_new_tokens, &mut sampler, stop, &mut |id| {
            let piece = text.push(id)?;
            whole.push_str(&piece);
            self.terminal.data(&piece)?;
            Ok(!self.terminal.reader_gone())
        })?;
        let rest = text.finish()?;
        self.terminal.data(&rest)?;
        whole.push_str(&rest);
        warned.or_else(|| warn("the prompt and what follows it have", ids.len() + made.len()));
        Ok(whole)
    }
}
