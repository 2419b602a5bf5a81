//! Prompts for generation: texts, chats, and files of many of them.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::coverage::{self, ChatField, RowNotes};
use super::json_rows::json_type;
use super::template::TemplateInputs;
use super::{
    BadRow, ChatTemplate, Origin, ParsedRow, RowError, RowFault, RowFaultKind, RowOrigin, Split, Tokenizer,
    conversation, source,
};
use crate::error::{Error, Result};

/// A prompt as tokens.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// The row of the prompt's file; for a prompt of the command line, only its `prompt`.
    pub row: Map<String, Value>,
    /// File and position; `None` for a prompt of the command line.
    pub origin: Option<Origin>,
    /// Token ids, at least one.
    pub ids: Vec<u32>,
    /// True if the tokens end where the assistant of a chat continues.
    pub is_chat: bool,
}

/// The prompts of a file, and the parts of their chats that the template leaves out.
#[derive(Debug)]
pub struct PromptFile {
    /// The prompts in the order of the file, at least one.
    pub prompts: Vec<Prompt>,
    /// Notes on all of them.
    pub notes: coverage::NoteCounts,
}

/// Turns texts and chats into the tokens of prompts.
#[derive(Debug, Clone, Copy)]
pub struct PromptEncoder<'a> {
    /// The tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// The chat template, which chats require.
    pub template: Option<&'a ChatTemplate>,
    /// Number of rows of the model's embedding; token ids from it on are refused.
    pub vocab_size: usize,
}

impl<'a> PromptEncoder<'a> {
    /// Encodes a text to be continued.
    ///
    /// # Errors
    /// Fails with a user error if the text gives no token, or one that the model does not have.
    pub fn text(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text, true)?;
        if ids.is_empty() {
            return Err(Error::user("cannot continue an empty prompt")
                .because("this tokenizer puts no token of its own before it")
                .hint("give a text with `--prompt`"));
        }
        self.check_known(&ids)?;
        Ok(ids)
    }

    /// Encodes a chat that the assistant continues.
    ///
    /// # Errors
    /// Fails with a user error if the model has no chat template, the template refuses the
    /// messages, or the model does not have a token. Fails with a transient error if the system
    /// starts no process to render it.
    pub fn chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let inputs = TemplateInputs { add_generation_prompt: true, ..TemplateInputs::default() };
        self.rendered(&self.template()?.render_fitted(messages, &inputs)?.text)
    }

    fn rendered(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text, false)?;
        self.check_known(&ids)?;
        Ok(ids)
    }

    /// The template of chats.
    ///
    /// # Errors
    /// Fails with a user error if the tokenizer has none.
    pub fn template(&self) -> Result<&'a ChatTemplate> {
        self.template.ok_or_else(|| {
            Error::user("cannot chat with this model")
                .because("its tokenizer has no chat template")
                .hint("give one in a recipe (`data.chat_template`), or use `--prompt`")
        })
    }

    /// Returns the system message of `text`, the value of `--system`.
    ///
    /// # Errors
    /// Fails with a user error if the template does not print it, or the model has no template.
    pub fn system_message(&self, text: &str) -> Result<Value> {
        let refused = |why: &str| {
            Error::user("cannot use `--system`").because(why).hint(
                "write the text into the user's turn, or give a template that prints system messages in a recipe \
                 (`data.chat_template`)",
            )
        };
        let (template, message) = (self.template()?, json!({ "role": "system", "content": text }));
        let form = template.form(false)?;
        if !form.prints_field("system", ChatField::Content) {
            return Err(refused("the chat template prints no system messages"));
        }
        let messages = form.fit(&[message.clone(), json!({ "role": "user", "content": "a" })]);
        let inputs = TemplateInputs { add_generation_prompt: true, ..TemplateInputs::default() };
        let rendered = template.render(&messages, &inputs)?;
        let dropped = coverage::dropped_parts(form, &messages, None, &rendered.text);
        if dropped.keys().any(|part| part.role == "system") {
            return Err(refused("the chat template leaves out this system message"));
        }
        Ok(message)
    }

    /// Reads the prompts of a file, whose rows must not have the key `reserved`.
    ///
    /// # Errors
    /// Fails with a user error if the file cannot be read, has no row, or a row is no prompt of
    /// this model. The error names the first such row with file and line. Fails with a transient
    /// error if the system starts no process to render a chat.
    pub fn file(&self, path: &Path, reserved: Option<&str>) -> Result<PromptFile> {
        let about = std::fs::metadata(path).map_err(|e| Error::io("read the prompts", path, &e))?;
        let cannot = || Error::user(format!("cannot read the prompts {}", path.display()));
        if about.is_dir() {
            return Err(cannot()
                .because("it is a folder; accepted: a file")
                .hint("write `--input FILE.jsonl`"));
        }
        let file = source::read(path, Split::Train)?;
        let mut read = PromptFile { prompts: Vec::new(), notes: coverage::NoteCounts::default() };
        let unreadable = file.bad.first();
        for row in file.rows {
            if let Some(bad) = unreadable.filter(|bad| comes_before(&bad.origin, &row.origin)) {
                return Err(unusable(bad));
            }
            let EncodedPrompt { ids, is_chat, notes } = match self.row(&row.value, reserved) {
                Ok(encoded) => encoded,
                Err(RowError::Fault(fault)) => return Err(unusable(&BadRow { origin: row.origin, fault })),
                Err(RowError::Run(error)) => return Err(error),
            };
            read.notes.add(notes, &row.origin);
            read.prompts.push(Prompt { row: row.value, origin: Some(row.origin), ids, is_chat });
        }
        match unreadable {
            Some(bad) => Err(unusable(bad)),
            None if read.prompts.is_empty() => Err(cannot().because("it holds no row").hint(ACCEPTED)),
            None => Ok(read),
        }
    }

    fn row(&self, row: &Map<String, Value>, reserved: Option<&str>) -> Result<EncodedPrompt, RowError> {
        let fault = |why: String| Err(RowFault::new(RowFaultKind::Format, why).into());
        if let Some(key) = reserved.filter(|key| row.contains_key(*key)) {
            return fault(format!(
                "it has the key `{key}`, under which finetune writes; give that key another name"
            ));
        }
        let value = |key: &str| row.get(key).filter(|value| !value.is_null());
        match (value("prompt"), value("messages")) {
            (Some(Value::String(_)), Some(_)) => fault("it has both `prompt` and `messages`".to_owned()),
            (Some(Value::String(text)), None) if text.is_empty() => fault("its `prompt` is empty".to_owned()),
            (Some(Value::String(text)), None) => {
                let ids = self.text(text).map_err(|error| RowError::of(RowFaultKind::Vocabulary, error))?;
                Ok(EncodedPrompt { ids, is_chat: false, notes: RowNotes::default() })
            }
            (Some(other), _) => fault(format!("its `prompt` is {}; text is needed", json_type(other))),
            (None, Some(_)) => self.messages(row),
            (None, None) => {
                let keys: Vec<String> = row.keys().take(8).map(|key| format!("`{key:.60}`")).collect();
                fault(format!("it has neither `prompt` nor `messages`; its keys: {}", keys.join(", ")))
            }
        }
    }

    /// Encodes the chat of a row, with its system message, tools and variables for the template.
    fn messages(&self, row: &Map<String, Value>) -> Result<EncodedPrompt, RowError> {
        let chat = conversation::Conversation::read(row, "messages")?.with_system(row)?;
        let record = chat.into_record(conversation::tools_of(row)?);
        let ParsedRow::Messages { messages, tools, options, .. } = record else {
            return Err(RowError::Run(Error::internal("a chat has no messages")));
        };
        if let Some(last) = messages.last().filter(|last| last["role"] == "assistant") {
            let text: String = conversation::text_of(last).chars().take(40).collect();
            let why = format!(
                "its last message is the assistant's ({text:?}), which finetune would write; remove that message"
            );
            return Err(RowFault::new(RowFaultKind::Format, why).into());
        }
        let refused = |error| RowError::of(RowFaultKind::Template, error);
        let template = self.template().map_err(refused)?;
        let (tools, options) = (tools.as_ref(), options.as_ref());
        let form = template.form(tools.is_some()).map_err(refused)?;
        let messages = form.fit(&messages);
        let inputs = TemplateInputs { tools, add_generation_prompt: true, options };
        let text = template.render(&messages, &inputs).map_err(refused)?.text;
        let dropped = coverage::dropped_parts(form, &messages, tools, &text);
        let ids = self.rendered(&text).map_err(|error| RowError::of(RowFaultKind::Vocabulary, error))?;
        if ids.is_empty() {
            return Err(
                RowFault::new(RowFaultKind::Template, "the chat template prints nothing of it").into()
            );
        }
        Ok(EncodedPrompt { ids, is_chat: true, notes: RowNotes { dropped, ..RowNotes::default() } })
    }

    /// Returns the special token with the text `text`, if any, at which an answer can stop.
    ///
    /// # Errors
    /// Fails with a user error if `text` contains a special token beside other text, which no
    /// answer shows.
    pub fn stop_token(&self, text: &str) -> Result<Option<u32>> {
        if let Some(id) = self.tokenizer.token_id(text).filter(|id| self.tokenizer.is_special(*id)) {
            return Ok(Some(id));
        }
        let held = self.tokenizer.special_texts().find(|token| !token.is_empty() && text.contains(token));
        held.map_or(Ok(None), |token| {
            Err(Error::user(format!("cannot stop at {text:?}"))
                .because(format!("it holds the special token {token:?}, which no answer shows as text"))
                .hint(format!("write `--stop \"{token}\"`, the token alone")))
        })
    }

    fn check_known(&self, ids: &[u32]) -> Result<()> {
        let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) else { return Ok(()) };
        let token = self.tokenizer.token(*id).unwrap_or_default();
        Err(Error::user("the prompt has a token that the model does not know")
            .because(format!("token {id} ({token:?}); the model has the ids below {}", self.vocab_size))
            .hint("give tokenizer files and weights of one and the same model"))
    }
}

/// A row as tokens.
struct EncodedPrompt {
    ids: Vec<u32>,
    is_chat: bool,
    notes: RowNotes,
}

/// The accepted rows of a file of prompts, for hints.
const ACCEPTED: &str = "write a row a line: {\"prompt\": \"...\"} or {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}]}";

fn unusable(bad: &BadRow) -> Error {
    Error::user(format!("cannot use the prompt in {}", bad.origin))
        .because(bad.fault.why.clone())
        .hint(ACCEPTED)
}

fn comes_before(a: &Origin, b: &Origin) -> bool {
    let number = |origin: &Origin| match origin.row {
        RowOrigin::Line(number) | RowOrigin::Row(number) => number,
    };
    number(a) < number(b)
}
