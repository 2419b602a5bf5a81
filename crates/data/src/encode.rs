//! Encodes a [`ParsedRow`] as an [`Example`]: token ids, with a flag for each that is trained.
//!
//! The whole text is tokenized once, and token offsets map trained characters to tokens, so that
//! exactly the row's text is trained. Chats are encoded without special tokens: the template writes
//! its own. Other text gets BOS if the tokenizer's post-processor adds it; text that already begins
//! with BOS is then a fault. A row ends in EOS, which is trained, unless it already ends in a token
//! that stops generation. A row without trained tokens is a fault.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use regex::Regex;
use serde_json::{Value, json};

use super::child_pool::RowBudget;
use super::control_tokens::ControlTokens;
use super::conversation::{REASONING_KEYS, TOOLS_KEYS, text_of};
use super::coverage::{self, RowNotes};
pub use super::example::{EncodedRow, Encoding, Example};
use super::parsed_row::{ParsedRow, Task};
use super::raw_rows::RawRow;
use super::role::Role;
use super::row_fields::question;
use super::spans::{ChatOfRow, TrainedChat, TrainedMessages, render_trained};
use super::template::ChatTemplate;
use super::tokenizer::{Encoded, Tokenizer};
use super::{DataOptions, Origin, RowError, RowFault, RowFaultKind};
use crate::error::{Error, Result};
use crate::recipe::enums::{DataFormat, OnLongRow};
use crate::recipe::{TrainOn, TrainedEnds, TrainedTurns};

/// Turns records into examples for one model.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    options: &'a DataOptions,
    special: Vec<&'a str>,
    /// Matches any of `special`; `None` without special tokens.
    special_pattern: Option<Regex>,
    /// Control tokens to encode as text; found with the first chat.
    control: OnceLock<Option<ControlTokens>>,
}

/// Tokens of a whole row, of any length.
struct Tokens {
    ids: Vec<u32>,
    trained: Vec<bool>,
}

impl<'a> Encoder<'a> {
    /// Makes an encoder; only rows of messages require `template`.
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: Option<&'a ChatTemplate>,
        options: &'a DataOptions,
    ) -> Self {
        let special: Vec<&str> = tokenizer.special_texts().filter(|token| !token.is_empty()).collect();
        let any = special.iter().map(|token| regex::escape(token)).collect::<Vec<_>>().join("|");
        // Escaped texts fail to compile only if they are too large; then no special token is
        // reported.
        let special_pattern = (!special.is_empty()).then(|| Regex::new(&any).ok()).flatten();
        Encoder { tokenizer, template, options, special, special_pattern, control: OnceLock::new() }
    }

    /// Encodes a row that is of `format`.
    ///
    /// # Errors
    /// Fails with the row's fault, or with an error that ends the run.
    pub(crate) fn encode_row(&self, row: &RawRow, format: DataFormat) -> Result<EncodedRow, RowError> {
        let rows = self.options.objective.rows();
        let Some(record) = super::format::convert(&row.value, format, rows)? else {
            return Ok(EncodedRow { encoding: Encoding::LeftOut, notes: RowNotes::default() });
        };
        let mut encoded = self.encode(&record, &row.origin, row.document)?;
        encoded.notes.unused_keys.extend(super::format::unused_keys(&row.value, format, rows));
        Ok(encoded)
    }

    /// Encodes a record; a `document` longer than `max_seq_len` becomes several examples.
    ///
    /// # Errors
    /// Fails with the record's fault, or with an error that ends the run.
    pub fn encode(
        &self,
        record: &ParsedRow,
        origin: &Origin,
        document: bool,
    ) -> Result<EncodedRow, RowError> {
        let mut notes = RowNotes::default();
        let encoding = match record {
            ParsedRow::Answers(row) => self.answers(row, origin, &mut notes)?,
            record => {
                let tokens = self.tokens(record, &mut notes, &RowBudget::default())?;
                self.fitted(tokens, origin, document)?
            }
        };
        Ok(EncodedRow { encoding, notes })
    }

    /// The examples of a row's tokens, none longer than `max_seq_len`.
    fn fitted(&self, tokens: Tokens, origin: &Origin, document: bool) -> Result<Encoding, RowFault> {
        self.check_known(&tokens.ids)?;
        let (max, was) = (self.options.max_seq_len, tokens.ids.len());
        if was <= max {
            return self.example(tokens, origin).map(|example| Encoding::Examples(vec![example]));
        }
        if document {
            return self.chunks(&tokens, origin);
        }
        match self.options.on_long_row {
            OnLongRow::Drop => Ok(Encoding::Dropped { was }),
            OnLongRow::Stop => Err(self.too_long(was)),
            OnLongRow::Truncate => {
                let Tokens { mut ids, mut trained } = tokens;
                let any = trained.iter().skip(1).any(|trained| *trained);
                let lost_answer = trained[max..].contains(&true);
                ids.truncate(max);
                trained.truncate(max);
                if any && !trained.iter().skip(1).any(|trained| *trained) {
                    return Ok(Encoding::CutAway { was });
                }
                let example = self.example(Tokens { ids, trained }, origin)?;
                Ok(Encoding::Truncated { example, was, lost_answer })
            }
        }
    }

    /// Refuses a row with a token that the model does not have.
    pub(super) fn check_known(&self, ids: &[u32]) -> Result<(), RowFault> {
        let Some(id) = ids.iter().find(|id| **id as usize >= self.options.vocab_size) else { return Ok(()) };
        let token = self.tokenizer.token(*id).unwrap_or_default();
        let why = format!("token {id} ({token:?}); the model has the ids below {}", self.options.vocab_size);
        Err(RowFault::new(RowFaultKind::Vocabulary, why))
    }

    pub(super) fn too_long(&self, was: usize) -> RowFault {
        let why = format!("{was} tokens; `data.max_seq_len` is {}", self.options.max_seq_len);
        RowFault::new(RowFaultKind::TooLong, why)
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        self.tokenizer
    }

    pub(super) fn template(&self) -> Option<&ChatTemplate> {
        self.template
    }

    pub(super) fn options(&self) -> &DataOptions {
        self.options
    }

    /// Splits a document into consecutive pieces of at most `max_seq_len` tokens. Nothing predicts
    /// a last piece of one token: it takes a token from the piece before, or is dropped if that has
    /// only two.
    fn chunks(&self, tokens: &Tokens, origin: &Origin) -> Result<Encoding, RowFault> {
        let (size, mut len) = (self.options.max_seq_len, tokens.ids.len());
        let mut examples = Vec::with_capacity(len.div_ceil(size));
        let mut start = 0;
        while start < len {
            let mut end = (start + size).min(len);
            match len - end {
                1 if end - start > 2 => end -= 1,
                1 => len = end,
                _ => {}
            }
            let (ids, trained) = (tokens.ids[start..end].to_vec(), tokens.trained[start..end].to_vec());
            examples.push(self.example(Tokens { ids, trained }, origin)?);
            start = end;
        }
        Ok(Encoding::Examples(examples))
    }

    fn example(&self, tokens: Tokens, origin: &Origin) -> Result<Example, RowFault> {
        let Tokens { ids, trained } = tokens;
        let example = Example { ids, trained, origin: origin.clone(), group: None, role: Role::Plain };
        if example.num_trained() == 0 {
            let why = match (example.ids.len(), &self.options.train_on) {
                (0 | 1, _) => "it is empty",
                (_, TrainOn::Messages { .. }) => "no token is trained",
                (_, TrainOn::All) => "it has no token to predict",
            };
            return Err(RowFault::new(RowFaultKind::NothingTrained, why));
        }
        Ok(example)
    }

    fn tokens(
        &self,
        record: &ParsedRow,
        notes: &mut RowNotes,
        budget: &RowBudget,
    ) -> Result<Tokens, RowError> {
        match record {
            ParsedRow::Messages { messages, tools, counts, options } => {
                let (tools, options) = (tools.as_ref(), options.as_ref());
                self.chat(ChatOfRow { messages, tools, options, budget }, counts, notes)
            }
            ParsedRow::Task { task: Task { system, instruction, input }, output }
                if self.template.is_some() =>
            {
                let mut messages: Vec<Value> =
                    system.iter().map(|text| json!({"role": "system", "content": text})).collect();
                messages.push(json!({"role": "user", "content": question(instruction, input)}));
                messages.push(json!({"role": "assistant", "content": output}));
                self.chat(ChatOfRow { messages: &messages, tools: None, options: None, budget }, &[], notes)
            }
            ParsedRow::Task { task: Task { system, instruction, input }, output } => {
                self.text(&task_prompt(system.as_deref(), instruction, input), output, budget)
            }
            ParsedRow::Pair { prompt, completion } => self.text(prompt, completion, budget),
            ParsedRow::Text(text) => self.text("", text, budget),
            ParsedRow::Tokens { ids, trained } => Ok(Tokens { ids: ids.clone(), trained: trained.clone() }),
            ParsedRow::Answers(_) => Err(RowError::Run(Error::internal("answers are no single text"))),
        }
    }

    fn chat(&self, chat: ChatOfRow<'_>, counts: &[bool], notes: &mut RowNotes) -> Result<Tokens, RowError> {
        let Some(template) = self.template else {
            let why = "the tokenizer has no chat template; write `data.chat_template`";
            return Err(RowFault::new(RowFaultKind::Template, why).into());
        };
        let refused = |error| RowError::of(RowFaultKind::Template, error);
        let form = template.form(chat.tools.is_some()).map_err(refused)?;
        let mut messages = form.fit(chat.messages);
        let control = self.control(template).map_err(refused)?;
        let marked = |value: Option<&Value>| Some(control?.mark(value?));
        let (tools, options) = (marked(chat.tools), marked(chat.options));
        if let Some(control) = control {
            messages.iter_mut().for_each(|message| *message = control.mark(message));
        } else {
            notes.special_tokens = self.special_tokens_of(&ChatOfRow { messages: &messages, ..chat });
        }
        let chat = ChatOfRow {
            messages: &messages,
            tools: tools.as_ref().or(chat.tools),
            options: options.as_ref().or(chat.options),
            ..chat
        };
        let train_on = &self.options.train_on;
        let all = *train_on == TrainOn::All;
        let trained = &trained_messages(train_on, chat.messages, counts);
        if !all {
            notes.unknown_roles = coverage::unknown_roles(chat.messages, trained);
        }
        if !notes.unknown_roles.is_empty() && !trained.contains(&true) {
            return Err(RowFault::new(RowFaultKind::NothingTrained, none_trained(chat.messages)).into());
        }
        let rendered = if all {
            let rendered = template.render_within(chat.messages, &chat.inputs(false), chat.budget);
            rendered.map(|whole| TrainedChat { text: whole.text, spans: Vec::new(), turns: Vec::new() })
        } else {
            let (ends, special) = (train_on.ends(), &self.special[..]);
            render_trained(template, chat, TrainedMessages { trained, ends, special, form })
        };
        let rendered = rendered.map_err(refused)?;
        if let Some(why) = coverage::empty_turn(chat.messages, &rendered) {
            return Err(RowFault::new(RowFaultKind::EmptyTurn, why).into());
        }
        notes.empty_answers = coverage::empty_answers(chat.messages, &rendered);
        notes.dropped = coverage::dropped_parts(form, chat.messages, chat.tools, &rendered.text);
        notes.unused_keys = unused_message_keys(template, chat.messages);
        let encoded = match control {
            None => self.encoded(&rendered.text, false, chat.budget)?,
            Some(control) => {
                control.encode(self.tokenizer, &rendered.text, chat.budget).map_err(unreadable)?
            }
        };
        let trained = if all {
            vec![true; encoded.ids.len()]
        } else {
            encoded.offsets.iter().map(|at| rendered.spans.iter().any(|span| overlaps(at, span))).collect()
        };
        let reaches_end = rendered.spans.last().is_some_and(|s| rendered.text[s.end..].trim().is_empty());
        let ends_trained = all || (reaches_end && train_on.ends() != TrainedEnds::None);
        Ok(self.with_eos(&rendered.text, encoded, trained, ends_trained))
    }

    /// The control tokens to encode as text; `None` unless the options request it.
    pub(super) fn control(&self, template: &ChatTemplate) -> Result<Option<&ControlTokens>> {
        if !self.options.sanitize_control_tokens {
            return Ok(None);
        }
        if let Some(control) = self.control.get() {
            return Ok(control.as_ref());
        }
        let tokens = ControlTokens::new(self.tokenizer, template)?;
        Ok(self.control.get_or_init(|| tokens).as_ref())
    }

    /// The control tokens of earlier chats, if they are encoded as text.
    pub(super) fn known_control(&self) -> Option<&ControlTokens> {
        self.control.get()?.as_ref()
    }

    /// The special tokens that the texts of a chat hold: contents, reasoning, calls and tools.
    pub(super) fn special_tokens_of(&self, chat: &ChatOfRow<'_>) -> Vec<String> {
        let Some(pattern) = &self.special_pattern else { return Vec::new() };
        let mut held = BTreeSet::new();
        let mut find = |text: &str| {
            held.extend(pattern.find_iter(text).map(|matched| matched.as_str().to_owned()));
        };
        for message in chat.messages {
            find(&text_of(message));
            let others = ["reasoning_content", "tool_calls"].iter().filter_map(|key| message.get(*key));
            others.for_each(|value| find(&value.to_string()));
        }
        chat.tools.into_iter().for_each(|tools| find(&tools.to_string()));
        held.into_iter().collect()
    }

    /// Encodes plain text; `train_on` selects `prompt`, `completion` or both as trained.
    fn text(&self, prompt: &str, completion: &str, budget: &RowBudget) -> Result<Tokens, RowError> {
        let text = format!("{prompt}{completion}");
        if let Some(bos) = self.tokenizer.bos()
            && self.tokenizer.adds_bos()
            && text.starts_with(&bos.text)
        {
            let why = format!("it begins with {:?}, which the tokenizer adds itself", bos.text);
            return Err(RowFault::new(RowFaultKind::DoubleBos, why).into());
        }
        if completion.is_empty() {
            let why = if prompt.is_empty() { "it is empty" } else { "its completion is empty" };
            return Err(RowFault::new(RowFaultKind::NothingTrained, why).into());
        }
        let train_on = &self.options.train_on;
        // A text without a prompt has nothing to mask.
        let whole = prompt.is_empty() || (train_on.trains("user") && train_on.trains("assistant"));
        if whole && train_on.ends() != TrainedEnds::None {
            // The text may be a whole book, and offsets are several times as large as ids.
            let encoded = self.tokenizer.encode_with_last_offsets(&text, true, budget);
            let encoded = encoded.map_err(unreadable)?;
            let trained = vec![true; encoded.ids.len()];
            return Ok(self.with_eos(&text, encoded, trained, true));
        }
        let encoded = self.encoded(&text, true, budget)?;
        let span = match (train_on.trains("user"), train_on.trains("assistant")) {
            _ if whole => 0..text.len(),
            (true, _) => 0..prompt.len(),
            (false, true) => prompt.len()..text.len(),
            (false, false) => 0..0,
        };
        let trained = encoded.offsets.iter().map(|at| overlaps(at, &span)).collect();
        let ends_trained = span.end == text.len() && train_on.ends() != TrainedEnds::None;
        Ok(self.with_eos(&text, encoded, trained, ends_trained))
    }

    pub(super) fn encoded(
        &self,
        text: &str,
        add_special: bool,
        budget: &RowBudget,
    ) -> Result<Encoded, RowError> {
        self.tokenizer.encode_within(text, add_special, budget).map_err(unreadable)
    }

    /// Appends a trained EOS if `ends_trained` and the row does not end in a token that stops
    /// generation. Reads only the offsets of the last tokens. Whitespace before EOS is trained too,
    /// because the model must generate it.
    fn with_eos(&self, text: &str, encoded: Encoded, mut trained: Vec<bool>, ends_trained: bool) -> Tokens {
        let mut ids = encoded.ids;
        let is_space = |at: &std::ops::Range<usize>| {
            !at.is_empty() && text.get(at.clone()).is_some_and(|part| part.trim().is_empty())
        };
        let spaces = encoded.offsets.iter().rev().take_while(|at| is_space(at)).count();
        let last = ids.len().checked_sub(spaces + 1).map(|index| ids[index]);
        let stops = last.is_some_and(|id| self.tokenizer.eos_ids().contains(&id));
        if let (false, true, Some(eos)) = (stops, ends_trained, self.tokenizer.eos()) {
            let from = ids.len() - spaces;
            trained[from..].fill(true);
            ids.push(eos.id);
            trained.push(true);
        }
        Tokens { ids, trained }
    }
}

/// Returns true for each trained message: `train_on` names it, and `counts` is set for it or empty.
fn trained_messages(train_on: &TrainOn, messages: &[Value], counts: &[bool]) -> Vec<bool> {
    let counted = |index: usize| counts.get(index).copied().unwrap_or(true);
    let is_trained = |(index, message): (usize, &Value)| {
        train_on.trains(message["role"].as_str().unwrap_or_default()) && counted(index)
    };
    let mut trained: Vec<bool> = messages.iter().enumerate().map(is_trained).collect();
    if let TrainOn::Messages { turns: TrainedTurns::Last, .. } = train_on {
        let last = trained.iter().rposition(|trained| *trained);
        trained.iter_mut().enumerate().for_each(|(index, trained)| *trained = Some(index) == last);
    }
    trained
}

pub(super) fn unreadable(error: Error) -> RowError {
    RowError::of(RowFaultKind::Unreadable, error)
}

/// The reason why no message of a chat with unknown roles is trained.
fn none_trained(messages: &[Value]) -> String {
    let roles = messages.iter().filter_map(|message| message["role"].as_str()).collect::<BTreeSet<_>>();
    let roles: Vec<&str> = roles.into_iter().collect();
    format!(
        "no message is trained: its roles are {}; known: {}",
        roles.join(", "),
        coverage::KNOWN_ROLES.join(", ")
    )
}

/// Keys of messages that neither this program nor the template reads, as `messages.KEY`. A template
/// that names `tools` reads the row's tools, not a key of a message.
pub(super) fn unused_message_keys(template: &ChatTemplate, messages: &[Value]) -> Vec<String> {
    const READ: [&str; 5] = ["role", "content", "tool_calls", "tool_call_id", "name"];
    let keys = messages.iter().filter_map(Value::as_object).flat_map(|message| message.keys());
    let reads_of_message = |key: &str| {
        ["'", "\""].iter().any(|quote| template.mentions(&format!("{quote}{key}{quote}")))
            || template.mentions(&format!(".{key}"))
    };
    let unused: BTreeSet<&String> = keys
        .filter(|key| !READ.contains(&key.as_str()) && !REASONING_KEYS.contains(&key.as_str()))
        .filter(|key| !template.mentions(key) || TOOLS_KEYS.contains(&key.as_str()) && !reads_of_message(key))
        .collect();
    unused.into_iter().map(|key| format!("messages.{key}")).collect()
}

/// The prompt of a task, for models without a chat template.
pub(super) fn task_prompt(system: Option<&str>, instruction: &str, input: &str) -> String {
    let mut prompt = String::new();
    for (heading, part) in
        [("System", system.unwrap_or_default()), ("Instruction", instruction), ("Input", input)]
    {
        if !part.is_empty() {
            prompt.push_str(&format!("### {heading}:\n{part}\n\n"));
        }
    }
    prompt.push_str("### Response:\n");
    prompt
}

/// Returns true if a token covers part of a span. A token without width (a space that offsets leave
/// out) belongs to the span that contains its position.
fn overlaps(token: &std::ops::Range<usize>, span: &std::ops::Range<usize>) -> bool {
    if token.is_empty() {
        return token.start != 0 && span.contains(&token.start);
    }
    token.start < span.end && span.start < token.end
}
