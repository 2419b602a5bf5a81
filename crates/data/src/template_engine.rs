//! The engine of chat templates: minijinja with the features of transformers' Jinja, within bounds.
//!
//! Templates reach no file and no environment. This module bounds their steps, recursion and
//! printed text, but not their memory, the depth of values or the time of one filter: minijinja has
//! no hook for these. The limits of the child process in which the binary runs this engine bound
//! them (see [`super::template_child`]).

use std::io::{self, Write};

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, FixedOffset};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};

use super::jinja::{self, to_template};
use crate::contained::contain;

/// Maximum steps of a rendering: some hundred times those of a long chat, a fraction of a second.
const MAX_STEPS: u64 = 3_000_000;
/// Bytes a rendering may print beside [`TEXT_BYTES_FOR_EACH`].
const FREE_TEXT_BYTES: usize = 1 << 20;
/// Bytes a rendering may print for each byte of its chat.
const TEXT_BYTES_FOR_EACH: usize = 64;
/// Maximum depth of calls, as minijinja counts them: a macro's call takes several. It fits the
/// stack of a worker thread.
const MAX_RECURSION: usize = 250;

/// Name of the function that returns the date.
pub(super) const CLOCK: &str = "strftime_now";

/// Inputs of a template beside the messages.
#[derive(Debug, Clone, Default)]
pub struct TemplateInputs<'a> {
    /// The tools that the model may call, as JSON definitions.
    pub tools: Option<&'a serde_json::Value>,
    /// True if the text must end where the assistant's turn begins.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), an object.
    pub options: Option<&'a serde_json::Value>,
}

/// Source of an engine.
#[derive(Debug, Clone)]
pub(super) struct TemplateSource {
    /// Names and texts of the templates.
    pub(super) templates: Vec<(String, String)>,
    /// Names and texts of the special tokens that they may use.
    pub(super) tokens: Vec<(String, String)>,
    /// The moment that `strftime_now` returns.
    pub(super) now: DateTime<FixedOffset>,
}

/// The templates of a tokenizer, ready to render.
#[derive(Debug)]
pub(super) struct TemplateEngine {
    env: Environment<'static>,
    tokens: Vec<(String, Value)>,
}

impl TemplateEngine {
    /// Parses the templates of `source`.
    ///
    /// # Errors
    /// Fails with the name of a template that does not parse, and the reason.
    pub(super) fn new(source: &TemplateSource) -> Result<Self, (String, String)> {
        let mut env = environment().map_err(|why| (String::new(), why))?;
        add_clock(&mut env, source.now);
        for (name, text) in &source.templates {
            contain(|| env.add_template_owned(name.clone(), jinja::rewrite(text)))
                .and_then(|added| added.map_err(|e| reason(&e)))
                .map_err(|why| (name.clone(), why))?;
        }
        let tokens = source.tokens.iter();
        let tokens = tokens.map(|(name, token)| (name.clone(), Value::from(token.as_str()))).collect();
        Ok(TemplateEngine { env, tokens })
    }

    /// Sets the moment that `strftime_now` returns.
    pub(super) fn set_clock(&mut self, now: DateTime<FixedOffset>) {
        add_clock(&mut self.env, now);
    }

    /// Renders `messages` with the template `name`. Messages and tools together have `bytes` bytes
    /// (see [`super::wire::put_chat`]).
    ///
    /// # Errors
    /// Fails if the template raises an error, uses something unknown or exceeds its bounds.
    pub(super) fn render(
        &self,
        name: &str,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
        bytes: usize,
    ) -> Result<String, String> {
        let mut variables: Vec<(&str, Value)> =
            self.tokens.iter().map(|(name, token)| (name.as_str(), token.clone())).collect();
        let options = inputs.options.and_then(serde_json::Value::as_object);
        variables
            .extend(options.into_iter().flatten().map(|(name, value)| (name.as_str(), to_template(value))));
        variables.push(("messages", messages.iter().map(to_template).collect()));
        variables.push(("tools", inputs.tools.map_or(Value::from(()), to_template)));
        variables.push(("documents", Value::from(())));
        variables.push(("add_generation_prompt", Value::from(inputs.add_generation_prompt)));
        let rendered = contain(|| {
            let template = self.env.get_template(name)?;
            let mut out = BoundedOutput::for_chat(bytes);
            template.render_captured_to(Value::from_pairs(variables), &mut out)?;
            Ok::<_, minijinja::Error>(out.text)
        })?;
        let text = rendered.map_err(|e| reason(&e))?;
        String::from_utf8(text).map_err(|e| format!("it printed no UTF-8: {e}"))
    }
}

fn environment() -> Result<Environment<'static>, String> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let mut env = jinja::environment();
    env.set_syntax(syntax.map_err(|e| e.to_string())?);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_RECURSION);
    Ok(env)
}

fn add_clock(env: &mut Environment<'static>, now: DateTime<FixedOffset>) {
    env.add_function(CLOCK, move |format: String| -> Result<String, minijinja::Error> {
        let items: Vec<Item<'_>> = StrftimeItems::new(&format).collect();
        if items.contains(&Item::Error) {
            let why = format!("strftime_now does not know the format {format:?}");
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, why));
        }
        Ok(now.format_with_items(items.iter()).to_string())
    });
}

/// The reason of an error, in the terms of a template's author.
fn reason(error: &minijinja::Error) -> String {
    let mut error = error;
    // An error inside an included template or a macro has an outer error without information.
    while let Some(inner) =
        std::error::Error::source(error).and_then(|e| e.downcast_ref::<minijinja::Error>())
    {
        error = inner;
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("it takes more than {MAX_STEPS} steps");
    }
    if let Some(io) = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>()) {
        return io.to_string();
    }
    match (error.kind(), error.detail(), error.line()) {
        (ErrorKind::InvalidOperation, Some(detail), _) => detail.to_owned(),
        (kind, detail, line) => {
            let mut text = kind.to_string();
            if let Some(detail) = detail {
                text.push_str(&format!(": {detail}"));
            }
            if let Some(line) = line {
                text.push_str(&format!(", on line {line} of the template"));
            }
            text
        }
    }
}

/// A writer that refuses text beyond its limit.
struct BoundedOutput {
    text: Vec<u8>,
    most: usize,
    chat: usize,
}

impl BoundedOutput {
    fn for_chat(bytes: usize) -> Self {
        let most = bytes.saturating_mul(TEXT_BYTES_FOR_EACH).saturating_add(FREE_TEXT_BYTES);
        BoundedOutput { text: Vec::new(), most, chat: bytes }
    }
}

impl Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.most {
            return Err(io::Error::other(format!(
                "it prints more than {} bytes for a chat of {}; accepted: 1 MiB, and {TEXT_BYTES_FOR_EACH} for each byte",
                self.most, self.chat
            )));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
