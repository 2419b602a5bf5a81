//! The parts of a chat that a template leaves out, and the keys of a row that nothing reads.
//!
//! A template skips what it does not know: calls, results, reasoning, whole roles. A part of a
//! message is missing if `TemplateForm` found that the template never prints it, or if a line of
//! it is not in the rendered text. A trained turn that prints nothing would teach the model empty
//! answers, so it is a fault of its row. Other missing parts are counted and printed before
//! training.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use super::conversation::{text_of, texts_of};
use super::spans::TrainedChat;
pub(crate) use super::template_form::ChatField;
use super::template_form::TemplateForm;
use super::{Origin, jinja};
use crate::units;

/// A part of the messages of a role that is missing in the rendered text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DroppedPart {
    /// The role of the messages.
    pub role: String,
    /// The part of them.
    pub field: ChatField,
    /// True if the template never prints it.
    pub always: bool,
}

impl fmt::Display for DroppedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.field, self.role.as_str()) {
            (ChatField::Content, "tool") => f.write_str("tool results"),
            (ChatField::Content, role) => write!(f, "{role} messages"),
            (ChatField::Reasoning, _) => f.write_str("reasoning"),
            (ChatField::ToolCalls, _) => f.write_str("tool calls"),
            (ChatField::Tools, _) => f.write_str("tools"),
        }
    }
}

/// Notes on a row that became an example, for the user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowNotes {
    /// Parts that the template does not print, with the number of messages.
    pub dropped: BTreeMap<DroppedPart, usize>,
    /// Keys of the row, and of its messages, that nothing reads.
    pub unused_keys: Vec<String>,
    /// Special tokens that its messages hold as text.
    pub special_tokens: Vec<String>,
    /// Number of trained turns without text.
    pub empty_answers: usize,
    /// Unknown roles of untrained messages, with the number of messages.
    pub unknown_roles: BTreeMap<String, usize>,
    /// True if the tokens of the prompt alone differ from those before its answer.
    pub merged_prompt: bool,
}

/// The notes of all rows of a data set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NoteCounts {
    dropped: BTreeMap<DroppedPart, (usize, usize)>,
    unused_keys: BTreeMap<String, usize>,
    special_tokens: BTreeMap<String, (usize, Option<Origin>)>,
    empty_answers: (usize, usize),
    unknown_roles: BTreeMap<String, (usize, usize)>,
    merged_prompts: usize,
}

impl NoteCounts {
    /// Counts the notes of one more row.
    pub(super) fn add(&mut self, notes: RowNotes, origin: &Origin) {
        for (part, messages) in notes.dropped {
            let (all, rows) = self.dropped.entry(part).or_default();
            (*all, *rows) = (*all + messages, *rows + 1);
        }
        if notes.empty_answers > 0 {
            let (turns, rows) = &mut self.empty_answers;
            (*turns, *rows) = (*turns + notes.empty_answers, *rows + 1);
        }
        self.merged_prompts += usize::from(notes.merged_prompt);
        for (role, messages) in notes.unknown_roles {
            let (all, rows) = self.unknown_roles.entry(role).or_default();
            (*all, *rows) = (*all + messages, *rows + 1);
        }
        for key in notes.unused_keys {
            *self.unused_keys.entry(key).or_default() += 1;
        }
        for token in notes.special_tokens {
            let (rows, first) = self.special_tokens.entry(token).or_default();
            *rows += 1;
            first.get_or_insert_with(|| origin.clone());
        }
    }
}

impl fmt::Display for NoteCounts {
    /// One line for each kind of note, each after a line end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (always, verb) in [(true, "prints no"), (false, "leaves out some")] {
            let parts = self.dropped.iter().filter(|(part, _)| part.always == always);
            let parts: Vec<String> = parts.map(|(part, counts)| dropped_part(verb, part, *counts)).collect();
            if !parts.is_empty() {
                write!(f, "\nwarning: the chat template {}", parts.join(", "))?;
            }
        }
        if let (turns @ 1.., rows) = self.empty_answers {
            write!(
                f,
                "\nwarning: empty answers ({} in {}): training them teaches the model to say nothing; \
                 `\"train\": false` in such a message leaves it out",
                units::count(turns as u64),
                units::counted(rows, "row")
            )?;
        }
        if self.merged_prompts > 0 {
            write!(
                f,
                "\nwarning: the last tokens of the prompt merge with the answer in {}: the answer begins at the \
                 merged token, which a model that gets the prompt alone does not see; end prompts with a line end",
                units::counted(self.merged_prompts, "row")
            )?;
        }
        for (role, (messages, rows)) in &self.unknown_roles {
            write!(
                f,
                "\nwarning: messages of the role {role:?} are not trained ({} in {}); known roles: {}",
                units::count(*messages as u64),
                units::counted(*rows, "row"),
                KNOWN_ROLES.join(", ")
            )?;
        }
        if !self.unused_keys.is_empty() {
            let keys = self
                .unused_keys
                .iter()
                .map(|(key, rows)| format!("`{key}` ({})", units::counted(*rows, "row")));
            write!(f, "\nnot used: {}", keys.collect::<Vec<_>>().join(", "))?;
        }
        for (token, (rows, first)) in &self.special_tokens {
            let first = first.as_ref().map(|origin| format!(", first {origin}")).unwrap_or_default();
            write!(
                f,
                "\nwarning: messages hold {token:?} as text, which becomes the special token ({}{first}); \
                 `data.sanitize_control_tokens = true` keeps it text",
                units::counted(*rows, "row")
            )?;
        }
        Ok(())
    }
}

fn dropped_part(verb: &str, part: &DroppedPart, (messages, rows): (usize, usize)) -> String {
    let rows_of = units::counted(rows, "row");
    match part.field {
        ChatField::Tools => format!("{verb} {part} ({rows_of})"),
        _ => format!("{verb} {part} ({} in {rows_of})", units::count(messages as u64)),
    }
}

/// The texts of one part of a message.
struct MessagePart {
    field: ChatField,
    texts: Vec<String>,
    /// True if the part is inside `content`.
    in_content: bool,
}

/// The roles of messages that chat templates know.
pub(super) const KNOWN_ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Unknown roles of untrained messages, with the number of messages.
pub(super) fn unknown_roles(messages: &[Value], trained: &[bool]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for (message, _) in messages.iter().zip(trained).filter(|(_, trained)| !**trained) {
        let role = message["role"].as_str().unwrap_or_default();
        if !KNOWN_ROLES.contains(&role) {
            *counts.entry(role.to_owned()).or_default() += 1;
        }
    }
    counts
}

/// The parts that a message has.
fn parts_of(message: &Value) -> Vec<MessagePart> {
    let whole = text_of(message);
    // Reasoning may be inside the content, in the form that models print.
    let (thought, content) = match whole.rsplit_once("</think>") {
        Some((thought, content)) => (thought.replace("<think>", ""), vec![content.to_owned()]),
        None => (String::new(), texts_of(message)),
    };
    let reasoning = message["reasoning_content"].as_str().unwrap_or_default().to_owned();
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let names = calls.filter_map(|call| call["function"]["name"].as_str().map(str::to_owned));
    let part = |field, texts: Vec<String>, in_content| MessagePart {
        field,
        texts: texts.into_iter().filter(|text| !text.trim().is_empty()).collect(),
        in_content,
    };
    let parts = [
        part(ChatField::Content, content, true),
        part(ChatField::Reasoning, vec![thought], true),
        part(ChatField::Reasoning, vec![reasoning], false),
        part(ChatField::ToolCalls, names.collect(), false),
    ];
    parts.into_iter().filter(|part| !part.texts.is_empty()).collect()
}

/// Returns whether `printed` contains a text, as a whole or each of its lines: templates trim,
/// indent and escape. The search for a line begins at the line before, so that a long text is read
/// once.
fn stands(text: &str, printed: &str) -> bool {
    let mut at = 0;
    let mut follows = |line: &str| {
        let offset = place_of(line, &printed[at..]);
        at += offset.unwrap_or(0);
        offset.is_some() || place_of(line, printed).is_some()
    };
    place_of(text.trim(), printed).is_some() || lines_of(text).all(&mut follows)
}

/// Returns whether some line of a text is in `printed`.
fn stands_in_part(text: &str, printed: &str) -> bool {
    place_of(text.trim(), printed).is_some() || lines_of(text).any(|line| place_of(line, printed).is_some())
}

/// The lines of a text that have letters or digits.
fn lines_of(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| line.chars().any(char::is_alphanumeric))
}

/// The byte at which a text begins in `printed`, verbatim or escaped as in JSON or HTML.
fn place_of(text: &str, printed: &str) -> Option<usize> {
    let as_json = || {
        let quoted = Value::from(text).to_string();
        printed.find(&quoted[1..quoted.len() - 1])
    };
    printed.find(text).or_else(as_json).or_else(|| printed.find(&jinja::html_text(text)))
}

/// The parts of a chat that are missing in `text`, with the number of messages.
pub(super) fn dropped_parts(
    form: &TemplateForm,
    messages: &[Value],
    tools: Option<&Value>,
    text: &str,
) -> BTreeMap<DroppedPart, usize> {
    let mut dropped = BTreeMap::new();
    for message in messages {
        let role = message["role"].as_str().unwrap_or_default();
        for MessagePart { field, texts, in_content } in parts_of(message) {
            let read_apart = field == ChatField::Content || !in_content;
            let always = read_apart && !form.prints_field(role, field);
            if always || !texts.iter().all(|part| stands(part, text)) {
                *dropped.entry(DroppedPart { role: role.to_owned(), field, always }).or_default() += 1;
            }
        }
    }
    let mut names = tools
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|tool| tool["function"]["name"].as_str().or_else(|| tool["name"].as_str()));
    let always = !form.prints_field("", ChatField::Tools);
    if names.clone().next().is_some() && (always || !names.all(|name| text.contains(name))) {
        dropped.insert(DroppedPart { role: String::new(), field: ChatField::Tools, always }, 1);
    }
    dropped
}

/// The number of trained turns that are empty in the row itself.
pub(super) fn empty_answers(messages: &[Value], chat: &TrainedChat) -> usize {
    chat.turns.iter().filter(|(turn, _)| parts_of(&messages[*turn]).is_empty()).count()
}

/// The reason of the first fault: a trained turn of which the template prints nothing.
pub(super) fn empty_turn(messages: &[Value], chat: &TrainedChat) -> Option<String> {
    chat.turns.iter().find_map(|(turn, span)| {
        let parts = parts_of(&messages[*turn]);
        let role = messages[*turn]["role"].as_str().unwrap_or_default();
        let printed = &chat.text[span.clone()];
        let missing = !parts.is_empty()
            && !parts.iter().flat_map(|part| &part.texts).any(|text| stands_in_part(text, printed));
        missing.then(|| {
            let fields: Vec<String> = parts
                .iter()
                .map(|part| {
                    DroppedPart { role: role.to_owned(), field: part.field, always: true }.to_string()
                })
                .collect();
            format!(
                "message {turn} ({role}) comes out empty: the chat template prints nothing of its {}",
                fields.join(" and ")
            )
        })
    })
}
