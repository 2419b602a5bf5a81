//! `finetune generate`: continue a prompt, or chat.

use std::io::BufRead;

use serde_json::json;

use super::{open_device, terminal, working_folder};
use crate::cli::GenerateArgs;
use crate::data::Tokenizer;
use crate::data::template::Inputs;
use crate::engine::{Engine, Sampling};
use crate::error::{Error, Result};
use crate::plan::{Adaptation, Base, EngineOptions, Finder, Rows};
use crate::recipe::{Layers, Purpose, Recipe, RecipeText, Source};
use crate::report::Terminal;

/// Generates.
pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let folder = working_folder()?;
    let recipe = Recipe::load(&Layers {
        recipe: args.recipe.as_deref().map(|name| RecipeText::find(name, &folder)).transpose()?,
        model: Some(args.model.clone()),
        folder: folder.clone(),
        purpose: Purpose::Other,
        ..Layers::default()
    })?;
    let finder = Finder::new(args.common.offline, &terminal)?;
    let base = Base::open(&recipe.model, &finder)?;
    let adapter = args.adapter.as_deref().map(|adapter| Source::from_argument("--adapter", adapter, &folder));
    let adaptation = match adapter.transpose()? {
        Some(source) => Some(Adaptation::saved_in(&finder.adapter(&source)?.folder, &base.config)?),
        None => None,
    };
    let rows = Rows::open(&base.found.folder, &recipe.data, base.config.vocab_size)?;
    let options = EngineOptions::new(&recipe.model, open_device(None)?, recipe.train.seed)?;
    let engine = base.engine(adaptation.as_ref(), false, &options)?;
    let generator = Generator { engine, rows, args, terminal };
    match &args.prompt {
        Some(prompt) => generator.continue_text(prompt),
        None => generator.chat(),
    }
}

struct Generator<'a> {
    engine: Engine,
    rows: Rows,
    args: &'a GenerateArgs,
    terminal: Terminal,
}

impl Generator<'_> {
    fn tokenizer(&self) -> &Tokenizer {
        &self.rows.tokenizer
    }

    fn continue_text(&self, prompt: &str) -> Result<()> {
        let ids = self.tokenizer().encode(prompt, true)?;
        self.terminal.data(prompt)?;
        self.stream(&ids)?;
        self.terminal.data("\n")
    }

    /// Each line of the standard input is the user's turn; an empty line or the end of the input ends the chat.
    fn chat(&self) -> Result<()> {
        let template = self.rows.template.as_ref().ok_or_else(|| {
            Error::user("cannot chat with this model")
                .because("its tokenizer has no chat template")
                .hint("give one in a recipe (`data.chat_template`), or use `--prompt`")
        })?;
        let mut messages = Vec::new();
        self.terminal.line("an empty line ends the chat");
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|e| Error::io("read", std::path::Path::new("the standard input"), &e))?;
            if line.trim().is_empty() {
                break;
            }
            messages.push(json!({ "role": "user", "content": line }));
            let inputs = Inputs { add_generation_prompt: true, ..Inputs::default() };
            let rendered = template.render(&messages, &inputs)?;
            let ids = self.tokenizer().encode(&rendered.text, false)?;
            let answer = self.stream(&ids)?;
            self.terminal.data("\n")?;
            messages.push(json!({ "role": "assistant", "content": answer }));
        }
        Ok(())
    }

    /// Prints the continuation of `ids` as it is made; returns it.
    fn stream(&self, ids: &[u32]) -> Result<String> {
        let sampling =
            Sampling { temperature: self.args.temperature, top_p: self.args.top_p, seed: self.args.seed };
        let mut text = self.tokenizer().stream(true);
        let mut whole = String::new();
        if ids.iter().any(|id| *id as usize >= self.engine.config.vocab_size) {
            return Err(Error::user("the prompt has tokens that the model does not know")
                .because(format!("the model has {} tokens, its tokenizer more", self.engine.config.vocab_size)));
        }
        // Decoders drop the space before the first word: what is printed is what the new tokens add to the prompt.
        for id in ids {
            text.push(*id)?;
        }
        let stop = self.tokenizer().eos_ids();
        self.engine.generate(ids, self.args.max_new_tokens, sampling, stop, &mut |id| {
            let piece = text.push(id)?;
            whole.push_str(&piece);
            self.terminal.data(&piece)?;
            Ok(!self.terminal.reader_gone())
        })?;
        Ok(whole)
    }
}
