//! Renders chat templates in child processes (see [`super::child_pool`]), so that a template that
//! crashes one does not crash the run.

use std::io;

use chrono::{DateTime, FixedOffset};

use super::child_pool::{self, ChildPool, RowBudget};
use super::sandbox::{ChildEnd, SandboxedWork};
use super::sandbox_limits::SandboxLimits;
use super::template_engine::{TemplateEngine, TemplateInputs, TemplateSource};
use super::wire;
use crate::error::{Error, Result};

/// Bytes of chats that add one second to their row's budget. To find the assistant's turns, parts
/// of a long chat are rendered some hundred times.
const BYTES_PER_SECOND: u64 = 1 << 20;

/// Children that render the templates of one source.
#[derive(Debug)]
pub(super) struct RenderingChildren {
    source: TemplateSource,
    pool: ChildPool,
}

impl RenderingChildren {
    /// Parses the templates of `source` in a first child.
    ///
    /// # Errors
    /// Fails with a user error if a template does not parse, or with a transient error if the
    /// system starts no process.
    pub(super) fn new(source: TemplateSource) -> Result<Self> {
        let children = Self::of(source);
        children.pool.check().map_err(|end| match end {
            // The answer has the name of the template and the reason.
            ChildEnd::ByInput(why) => match why.split_once('\0') {
                Some((name, why)) => {
                    Error::user(format!("cannot use the chat template `{name}`")).because(why)
                }
                None => ChildEnd::ByInput(why).into_error(children.cannot_use()),
            },
            ChildEnd::ByMachine(_) => end.into_error(children.cannot_use()),
        })?;
        Ok(children)
    }

    fn of(source: TemplateSource) -> Self {
        let pool = ChildPool::new(SandboxedWork::ChatTemplate, setup(&source), BYTES_PER_SECOND);
        RenderingChildren { source, pool }
    }

    fn cannot_use(&self) -> String {
        let names: Vec<&str> = self.source.templates.iter().map(|(name, _)| name.as_str()).collect();
        format!("cannot use the chat template `{}`", names.join(", "))
    }

    /// Returns the same templates with another moment for `strftime_now`.
    pub(super) fn at(self, now: DateTime<FixedOffset>) -> Self {
        Self::of(TemplateSource { now, ..self.source })
    }

    /// The source of the templates.
    pub(super) fn source(&self) -> &TemplateSource {
        &self.source
    }

    /// Renders `messages` with the template `name`, within the time left in `budget`.
    ///
    /// # Errors
    /// Fails with the reason if the child prints no text.
    pub(super) fn render(
        &self,
        name: &str,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
        budget: &RowBudget,
    ) -> Result<String, ChildEnd> {
        let mut request = Vec::new();
        wire::put_text(name, &mut request);
        request.push(u8::from(inputs.add_generation_prompt));
        wire::put(inputs.options.unwrap_or(&serde_json::Value::Null), &mut request);
        wire::put_chat(messages, inputs.tools, &mut request);
        let text = self.pool.ask(&request, budget)?;
        String::from_utf8(text).map_err(|error| ChildEnd::ByInput(format!("it printed no UTF-8: {error}")))
    }

    /// Returns true if so many chats ended their child that no more are rendered.
    pub(super) fn has_given_up(&self) -> bool {
        self.pool.has_given_up()
    }

    /// Ends the idle children; the next chat starts a new one.
    pub(super) fn end(&self) {
        self.pool.end();
    }
}

/// The request that gives a child its templates.
fn setup(source: &TemplateSource) -> Vec<u8> {
    let mut request = Vec::new();
    for texts in [&source.templates, &source.tokens] {
        request.extend((texts.len() as u64).to_le_bytes());
        for (name, text) in texts {
            wire::put_text(name, &mut request);
            wire::put_text(text, &mut request);
        }
    }
    wire::put_text(&source.now.to_rfc3339(), &mut request);
    request
}

fn read_setup(mut request: &[u8]) -> Option<TemplateSource> {
    let bytes = &mut request;
    let mut texts = || {
        let length = wire::take_u64(bytes)?;
        (0..length)
            .map(|_| Some((wire::take_text(bytes)?, wire::take_text(bytes)?)))
            .collect::<Option<Vec<_>>>()
    };
    let (templates, tokens) = (texts()?, texts()?);
    let now = DateTime::parse_from_rfc3339(&wire::take_text(bytes)?).ok()?;
    Some(TemplateSource { templates, tokens, now })
}

/// A chat to render.
struct RenderRequest {
    name: String,
    add_generation_prompt: bool,
    options: serde_json::Value,
    tools: serde_json::Value,
    messages: Vec<serde_json::Value>,
    /// Bytes of the tools and messages.
    bytes: usize,
}

impl RenderRequest {
    fn read(mut request: &[u8]) -> Option<Self> {
        let bytes = &mut request;
        let name = wire::take_text(bytes)?;
        let add_generation_prompt = wire::take_byte(bytes)? != 0;
        let options = wire::take(bytes)?;
        let size = bytes.len();
        let tools = wire::take(bytes)?;
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            messages.push(wire::take(bytes)?);
        }
        Some(RenderRequest { name, add_generation_prompt, options, tools, messages, bytes: size })
    }

    fn answer(&self, engine: &TemplateEngine) -> Result<Vec<u8>, String> {
        let tools = Some(&self.tools).filter(|tools| !tools.is_null());
        let options = Some(&self.options).filter(|options| !options.is_null());
        let inputs = TemplateInputs { tools, add_generation_prompt: self.add_generation_prompt, options };
        engine.render(&self.name, &self.messages, &inputs, self.bytes).map(String::into_bytes)
    }
}

/// Runs a child, which renders chats until the pipe closes.
///
/// # Errors
/// Fails like [`child_pool::serve`].
pub(super) fn serve(limits: &SandboxLimits) -> io::Result<()> {
    let set_up = |request: &[u8]| {
        let engine = TemplateEngine::new(&read_setup(request)?);
        Some(engine.map_err(|(name, why)| format!("{name}\0{why}")))
    };
    child_pool::serve(limits, set_up, |engine, request| Some(RenderRequest::read(request)?.answer(engine)))
}
