//! The engine of chat templates: minijinja with what transformers' Jinja has, within bounds.
//!
//! Templates reach no file and no environment, and their steps, their recursion and the text they print are bounded
//! here. What one may hold in memory, how deep its values nest and how long one filter takes is not: minijinja has no
//! hook for that. A process with limits has, in which the binary runs this engine (see [`super::template_child`]).

use std::io::{self, Write};

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, FixedOffset};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};

use super::jinja::{self, to_template};
use crate::contained::contain;

/// Steps a rendering may take: some hundred times what a long chat needs, a fraction of a second.
const MAX_STEPS: u64 = 3_000_000;
/// Bytes a rendering may print beside [`TEXT_BYTES_FOR_EACH`].
const FREE_TEXT_BYTES: usize = 1 << 20;
/// Bytes a rendering may print for each byte of its chat.
const TEXT_BYTES_FOR_EACH: usize = 64;
/// Calls within calls, as minijinja counts them: a macro's call takes several. Fits the stack of a worker thread.
const MAX_RECURSION: usize = 250;

/// The function that tells a template the date.
pub(super) const CLOCK: &str = "strftime_now";

/// What a template is given beside the messages.
#[derive(Debug, Clone, Default)]
pub struct TemplateInputs<'a> {
    /// The tools that the model may call, as JSON definitions.
    pub tools: Option<&'a serde_json::Value>,
    /// Whether the text ends where the assistant is to begin.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), an object.
    pub options: Option<&'a serde_json::Value>,
}

/// What an engine is made from.
#[derive(Debug, Clone)]
pub(super) struct TemplateSource {
    /// Names and texts of the templates.
    pub(super) templates: Vec<(String, String)>,
    /// Names and texts of the special tokens that they may use.
    pub(super) tokens: Vec<(String, String)>,
    /// The moment that they are told.
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
    /// A template does not parse: its name, and why.
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

    /// Tells another moment from now on.
    pub(super) fn set_clock(&mut self, now: DateTime<FixedOffset>) {
        add_clock(&mut self.env, now);
    }

    /// The text that the template `name` prints for `messages`, which have `bytes` bytes together with the tools (see
    /// [`super::wire::put_chat`]).
    ///
    /// # Errors
    /// What the template raises itself, and when it uses something unknown or exceeds its bounds.
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

/// What went wrong, as the template's author would say it.
fn reason(error: &minijinja::Error) -> String {
    let mut error = error;
    // An error inside an included template or a macro is wrapped in one that only says so.
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

/// Takes text up to its limit.
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
