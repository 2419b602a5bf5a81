//! Generates a model's answers to one prompt, a dialogue, or a file of prompts.

use std::cell::Cell;
use std::io::BufRead;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cli::GenerateArgs;
use crate::data::prompts::PromptFile;
use crate::data::{Prompt, PromptEncoder};
use crate::engine::{Engine, SamplingOptions, StopSearch, TokenSampler};
use crate::error::{Error, Result};
use crate::planning::prompt_beyond_positions;
use crate::report::Terminal;
use crate::units;
use crate::weights::{OutputFile, OutputKind};

/// Output file of `--output`.
pub(crate) const ANSWERS: OutputKind =
    OutputKind { what: "a file of answers", option: "--output", example: "answers.jsonl", replaces: None };

/// Returns the key of the answers in a row of [`ANSWERS`]. Rows of `--input` must not have this
/// key.
fn answer_key(args: &GenerateArgs) -> &'static str {
    if args.samples == 1 { "answer" } else { "answers" }
}

/// Prompts of a command.
#[derive(Debug)]
pub(crate) enum PromptSource {
    /// One prompt of the command line.
    One(Box<Prompt>),
    /// Each line of the standard input is a turn. The system message, if any, comes first.
    Dialogue(Option<Value>),
    /// The rows of a file.
    File(Vec<Prompt>),
}

impl PromptSource {
    /// Reads the prompts of `args`, and warns about message parts that the chat template omits.
    ///
    /// # Errors
    /// The user's: a prompt cannot be used with this model. Transient: the system starts no process
    /// to render chats.
    pub(crate) fn of(args: &GenerateArgs, encoder: &PromptEncoder<'_>, terminal: &Terminal) -> Result<Self> {
        let one = |text: &str, ids, is_chat| {
            let row = Map::from_iter([("prompt".to_owned(), Value::from(text))]);
            PromptSource::One(Box::new(Prompt { row, origin: None, ids, is_chat }))
        };
        if let Some(text) = &args.prompt {
            return Ok(one(text, encoder.text(text)?, false));
        }
        if let Some(path) = &args.input {
            let reserved = args.output.as_ref().map(|_| answer_key(args));
            let PromptFile { prompts, notes } = encoder.file(path, reserved)?;
            for note in notes.to_string().lines().filter_map(|line| line.strip_prefix("warning: ")) {
                terminal.warn(note);
            }
            return Ok(PromptSource::File(prompts));
        }
        encoder.template()?;
        let system = args.system.as_deref().map(|text| encoder.system_message(text)).transpose()?;
        let Some(Some(text)) = &args.chat else { return Ok(PromptSource::Dialogue(system)) };
        if text.trim().is_empty() {
            return Err(Error::user("cannot answer an empty turn")
                .because(format!("`--chat` gives {text:?}; accepted: a text, or no value for a dialogue"))
                .hint("write `--chat \"TEXT\"`, or `--chat` alone and a turn a line of the standard input"));
        }
        let messages: Vec<Value> =
            system.into_iter().chain([json!({ "role": "user", "content": text })]).collect();
        Ok(one(text, encoder.chat(&messages)?, true))
    }

    /// Estimates the size in bytes of a file of the prompts with their answers.
    pub(crate) fn written_bytes(&self, args: &GenerateArgs) -> u64 {
        const TOKEN_BYTES: usize = 4;
        let PromptSource::File(prompts) = self else { return 0 };
        let answers = args.samples.saturating_mul(args.max_new_tokens).saturating_mul(TOKEN_BYTES);
        let rows =
            prompts.iter().map(|prompt| (prompt.ids.len() * TOKEN_BYTES).saturating_add(answers) as u64);
        rows.fold(0, u64::saturating_add)
    }
}

/// Reason for the end of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum FinishReason {
    /// The model wrote a text of `--stop`.
    Stop,
    /// The model chose a token that ends its text or turn.
    Eos,
    /// The answer has `--max-new-tokens` tokens.
    Length,
}

/// One answer to a prompt.
struct GeneratedAnswer {
    text: String,
    /// Number of tokens, with those of a stop text, without the token that ends the answer.
    tokens: usize,
    finish_reason: FinishReason,
}

/// Generates answers with a loaded model.
pub(crate) struct Generator<'a> {
    engine: Engine,
    encoder: PromptEncoder<'a>,
    args: &'a GenerateArgs,
    terminal: &'a Terminal,
    ends: AnswerEnds,
    /// Number of prompts that, with their first answers, exceed the model's positions.
    beyond_positions: Cell<usize>,
}

/// Refuses options that contradict each other.
///
/// # Errors
/// The user's: an option would have no effect or no meaning.
pub(crate) fn check_options(args: &GenerateArgs) -> Result<()> {
    let SamplingOptions { top_k, top_p, min_p, .. } = sampling_options(args);
    let (greedy, temperature) = (sampling_options(args).is_greedy(), args.temperature);
    if args.samples > 1 && greedy {
        return Err(Error::user(format!("cannot give {} different answers", args.samples))
            .because(format!(
                "with temperature {temperature} the likeliest token is always chosen: all answers would be the same"
            ))
            .hint("add a temperature such as `--temperature 0.7`, or remove `--samples`"));
    }
    if args.samples > 1 && args.chat == Some(None) {
        return Err(Error::user(format!("cannot give {} answers in a dialogue", args.samples))
            .because("its next turn follows one answer; accepted: 1")
            .hint("give the turn as a value, `--chat \"TEXT\"`, or remove `--samples`"));
    }
    let useless = [
        top_k.map(|k| format!("--top-k {k}")),
        (top_p < 1.0).then(|| format!("--top-p {top_p}")),
        (min_p > 0.0).then(|| format!("--min-p {min_p}")),
    ];
    let Some(flag) = useless.into_iter().flatten().next().filter(|_| greedy) else { return Ok(()) };
    Err(Error::user(format!("cannot use `{flag}` with temperature {temperature}"))
        .because("the likeliest token is always chosen, so the option would have no effect")
        .hint(format!("add a temperature such as `--temperature 0.7`, or remove `{flag}`")))
}

/// Returns the sampling options of `args`.
fn sampling_options(args: &GenerateArgs) -> SamplingOptions {
    SamplingOptions {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
    }
}

/// Tokens and texts that end answers.
pub(crate) struct AnswerEnds {
    /// Special tokens of `--stop`.
    stop_tokens: Vec<u32>,
    /// Texts of `--stop`.
    stop_texts: Vec<String>,
    /// Tokens that end a text; then these and the tokens that end a turn of a chat.
    ends: [Vec<u32>; 2],
}

impl AnswerEnds {
    /// Finds the tokens and texts that end answers.
    ///
    /// # Errors
    /// The user's: the model can never write a text of `--stop`. Transient: the system starts no
    /// process to render the template.
    pub(crate) fn of(args: &GenerateArgs, encoder: &PromptEncoder<'_>) -> Result<Self> {
        let (mut stop_tokens, mut stop_texts) = (Vec::new(), Vec::new());
        for text in &args.stop {
            match encoder.stop_token(text)? {
                Some(token) => stop_tokens.push(token),
                None => stop_texts.push(text.clone()),
            }
        }
        let of_text = encoder.tokenizer.eos_ids().to_vec();
        let turn_end = match encoder.template.filter(|_| args.prompt.is_none()) {
            Some(template) => template.turn_end(encoder.tokenizer)?,
            None => None,
        };
        let of_turn = [&of_text[..], turn_end.as_slice()].concat();
        Ok(AnswerEnds { stop_tokens, stop_texts, ends: [of_text, of_turn] })
    }
}

impl<'a> Generator<'a> {
    /// Creates a generator of the answers that `args` request.
    pub(crate) fn new(
        engine: Engine,
        encoder: PromptEncoder<'a>,
        ends: AnswerEnds,
        (args, terminal): (&'a GenerateArgs, &'a Terminal),
    ) -> Self {
        Generator { engine, encoder, args, terminal, ends, beyond_positions: Cell::new(0) }
    }

    /// Answers all prompts; writes the answers to a file of prompts to `output` if given.
    ///
    /// # Errors
    /// The model's logits are not finite, the memory does not suffice for the keys and values, or
    /// an output cannot be written.
    pub(crate) fn run(&self, prompts: PromptSource, output: Option<OutputFile>) -> Result<()> {
        match prompts {
            PromptSource::One(prompt) if self.args.json => self.as_json(&prompt).map(drop),
            PromptSource::One(prompt) => self.print(&prompt),
            PromptSource::Dialogue(system) => self.dialogue(system),
            PromptSource::File(prompts) => self.file(&prompts, output),
        }
    }

    /// Prints the answers to a prompt while they are generated. A prompt that is no chat is printed
    /// first.
    fn print(&self, prompt: &Prompt) -> Result<()> {
        for sample in 0..self.args.samples {
            if self.args.samples > 1 {
                self.terminal.line(format!("answer {} of {}", sample + 1, self.args.samples));
            }
            if !prompt.is_chat {
                self.terminal.data(prompt.row["prompt"].as_str().unwrap_or_default())?;
            }
            self.answer(prompt, sample, &mut |piece| self.terminal.data(piece))?;
            self.terminal.data("\n")?;
            if self.terminal.reader_gone() {
                break;
            }
        }
        Ok(())
    }

    /// Prints the answers to a prompt as one line of JSON; returns them.
    fn as_json(&self, prompt: &Prompt) -> Result<Vec<GeneratedAnswer>> {
        let answers = self.answers(prompt)?;
        let mut object = Map::new();
        for key in ["prompt", "messages"] {
            object.extend(prompt.row.get(key).map(|value| (key.to_owned(), value.clone())));
        }
        self.add_answers(&mut object, &answers);
        let tokens = answers.iter().map(|answer| json!(answer.tokens));
        object.insert("tokens".to_owned(), self.one_or_all(tokens));
        let reasons = answers.iter().map(|answer| json!(answer.finish_reason));
        object.insert("finish_reason".to_owned(), self.one_or_all(reasons));
        self.terminal.data(format!("{}\n", Value::Object(object)))?;
        Ok(answers)
    }

    /// Adds the texts of answers to the object of their prompt.
    fn add_answers(&self, object: &mut Map<String, Value>, answers: &[GeneratedAnswer]) {
        let texts = answers.iter().map(|answer| Value::from(answer.text.clone()));
        object.insert(answer_key(self.args).to_owned(), self.one_or_all(texts));
    }

    /// Returns the value itself with `--samples 1`, else a list of the values of all answers.
    fn one_or_all(&self, mut values: impl Iterator<Item = Value>) -> Value {
        if self.args.samples == 1 { values.next().unwrap_or_default() } else { values.collect() }
    }

    /// Answers each line of the standard input, the user's turn; an empty line or the end of the
    /// input ends the dialogue.
    fn dialogue(&self, system: Option<Value>) -> Result<()> {
        let described = self.encoder.template()?.described();
        self.terminal.line(format!("chat template: {described}; an empty line ends the chat"));
        let mut messages: Vec<Value> = system.into_iter().collect();
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|e| Error::io("read", Path::new("the standard input"), &e))?;
            if line.trim().is_empty() {
                break;
            }
            messages.push(json!({ "role": "user", "content": line }));
            let ids = self.encoder.chat(&messages)?;
            let row = Map::from_iter([("prompt".to_owned(), Value::from(line))]);
            let prompt = Prompt { row, origin: None, ids, is_chat: true };
            let answer = if self.args.json {
                self.as_json(&prompt)?.pop().map(|answer| answer.text)
            } else {
                let answer = self.answer(&prompt, 0, &mut |piece| self.terminal.data(piece))?;
                self.terminal.data("\n")?;
                Some(answer.text)
            };
            messages.push(json!({ "role": "assistant", "content": answer }));
        }
        Ok(())
    }

    /// Answers the prompts of a file: rows with their answers into `output`, JSON objects to the
    /// standard output.
    fn file(&self, prompts: &[Prompt], mut output: Option<OutputFile>) -> Result<()> {
        let (total, mut tokens) = (prompts.len(), 0);
        for (before, prompt) in prompts.iter().enumerate() {
            let answers = if self.args.json { self.as_json(prompt)? } else { self.answers(prompt)? };
            tokens += answers.iter().map(|answer| answer.tokens).sum::<usize>();
            if let Some(output) = &mut output {
                let mut row = prompt.row.clone();
                self.add_answers(&mut row, &answers);
                output.put(format!("{}\n", Value::Object(row)).as_bytes())?;
            } else if self.terminal.reader_gone() {
                return Ok(());
            }
            let (done, tenths) = (before + 1, |count: usize| count * 10 / total);
            if total >= 20 && done < total && tenths(done) > tenths(before) {
                self.terminal.line(format!("{done} of {} answered", units::counted(total, "prompt")));
            }
        }
        if self.beyond_positions.get() > 1 {
            let (beyond, all) = (self.beyond_positions.get(), units::counted(total, "prompt"));
            self.terminal.warn(format!("{beyond} of {all} exceed the positions that the model was made for"));
        }
        if let (Some(output), Some(path)) = (output, &self.args.output) {
            output.commit()?;
            let (prompts, tokens) = (units::counted(total, "prompt"), units::counted(tokens, "token"));
            self.terminal.line(format!("answered {prompts} with {tokens} in {}", path.display()));
        }
        Ok(())
    }

    /// Generates all answers to a prompt.
    fn answers(&self, prompt: &Prompt) -> Result<Vec<GeneratedAnswer>> {
        (0..self.args.samples).map(|sample| self.answer(prompt, sample, &mut |_| Ok(()))).collect()
    }

    /// Generates answer number `sample` of a prompt and passes its text to `show` while it grows.
    /// The answer depends on no other prompt or answer.
    fn answer(
        &self,
        prompt: &Prompt,
        sample: usize,
        show: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<GeneratedAnswer> {
        let ids = &prompt.ids;
        let warned = self.warn_beyond_positions(prompt, "the prompt has", ids.len(), sample);
        let mut sampler = TokenSampler::of_sample(sampling_options(self.args), self.args.seed, sample);
        let (mut text, mut whole) = (self.encoder.tokenizer.stream(true), String::new());
        let mut show = |ready: &str, whole: &mut String| {
            whole.push_str(ready);
            show(ready)
        };
        // Decoders drop the space before the first word, so the prompt is decoded too and only the
        // text after it is printed.
        ids.iter().try_for_each(|id| text.push(*id).map(drop))?;
        let mut search = StopSearch::new(&self.ends.stop_texts);
        let (mut stopped, most) = (false, self.args.max_new_tokens);
        let ends = &self.ends.ends[usize::from(prompt.is_chat)];
        let made = self.engine.generate(ids, most, &mut sampler, ends, &mut |id| {
            if self.ends.stop_tokens.contains(&id) {
                stopped = true;
                return Ok(false);
            }
            let (ready, at_stop) = search.push(&text.push(id)?);
            show(&ready, &mut whole)?;
            stopped = at_stop;
            Ok(!at_stop && !self.terminal.reader_gone())
        })?;
        let by_token = made.last().is_some_and(|last| self.ends.stop_tokens.contains(last));
        if !stopped || by_token {
            let (mut ready, is_end) = search.push(&text.finish()?);
            if !is_end {
                ready.push_str(&search.finish());
            }
            stopped |= is_end;
            show(&ready, &mut whole)?;
        }
        let finish_reason = match made.len() {
            _ if stopped => FinishReason::Stop,
            made if made == most => FinishReason::Length,
            _ => FinishReason::Eos,
        };
        if !warned {
            let tokens = ids.len() + made.len();
            self.warn_beyond_positions(prompt, "the prompt and its answer have", tokens, sample);
        }
        Ok(GeneratedAnswer { text: whole, tokens: made.len() - usize::from(by_token), finish_reason })
    }

    /// Returns whether `tokens` exceed the model's positions. Warns at the first answer of the
    /// first such prompt.
    fn warn_beyond_positions(&self, prompt: &Prompt, sequence: &str, tokens: usize, sample: usize) -> bool {
        let origin = prompt.origin.as_ref();
        let sequence = origin.map_or(sequence.to_owned(), |origin| format!("{origin}: {sequence}"));
        let Some(warning) = prompt_beyond_positions(&self.engine.config, &sequence, tokens) else {
            return false;
        };
        if sample == 0 {
            let before = self.beyond_positions.replace(self.beyond_positions.get() + 1);
            if before == 0 || origin.is_none() {
                self.terminal.warn(warning);
            }
        }
        true
    }
}
