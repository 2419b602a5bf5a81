//! Chat templates: the tokenizer's own Jinja, rendered byte for byte like in transformers.
//!
//! A template comes from `chat_template.jinja`, from `chat_template` in tokenizer_config.json (one
//! text, or a list or object of named ones of which `tool_use` serves rows with tools), from
//! `additional_chat_templates/`, or from the recipe. `{% generation %}` marks the assistant's text:
//! its tags are rewritten to print two noncharacters, which are then removed and give the spans.
//! `strftime_now` returns one moment for all rows of a run: that of loading, or of
//! [`ChatTemplate::at`], which all ranks of a run and a resumed run use.
//!
//! A template is a program from the internet: `template_engine` bounds it, and the binary
//! parses and renders it in a child process (see `template_child`), which bounds the rest.

use std::ops::Range;
use std::sync::{LazyLock, OnceLock};

use chrono::{DateTime, FixedOffset};
use regex::Regex;

use super::child_pool::RowBudget;
use super::jinja::{GENERATION_MARKS, mark_generation};
use super::sandbox::{self, ChildEnd};
use super::template_child::RenderingChildren;
pub use super::template_engine::TemplateInputs;
use super::template_engine::{CLOCK, TemplateEngine, TemplateSource};
use super::template_files::{first_difference, stored_templates, with_line_feeds};
use super::template_form::TemplateForm;
use super::tokenizer::Tokenizer;
use super::wire;
use crate::clock;
use crate::error::{Error, ErrorCategory, ErrorContext, Result};
use crate::recipe::Template;

const OPEN: char = GENERATION_MARKS[0];
const CLOSE: char = GENERATION_MARKS[1];

/// Matches texts that name a role or end a turn, and should be one token.
static MARKER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>").expect("a pattern"));

/// Maximum bytes of a template.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// Name of the template for all chats, except those with tools if `tool_use` exists.
const DEFAULT: &str = "default";

/// A rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text for the tokenizer, which must encode it without special tokens.
    pub text: String,
    /// Byte ranges inside `{% generation %}`, in order; empty for templates without it.
    pub spans: Vec<Range<usize>>,
}

/// The chat template of a tokenizer.
#[derive(Debug)]
pub struct ChatTemplate {
    renderer: TemplateRenderer,
    marks: bool,
    asks_for_date: bool,
    /// The template of the recipe, if this is it.
    given: Option<Template>,
    /// Forms that the templates for chats without tools and with tools read.
    forms: [OnceLock<TemplateForm>; 2],
}

/// Renders templates in children or in this process.
#[derive(Debug)]
enum TemplateRenderer {
    /// In child processes.
    Children(RenderingChildren),
    /// In this process, if it is not the binary that can start children.
    Here(Box<TemplateEngine>, TemplateSource),
}

impl TemplateRenderer {
    fn new(source: TemplateSource) -> Result<Self> {
        if sandbox::is_available() {
            return RenderingChildren::new(source).map(TemplateRenderer::Children);
        }
        match TemplateEngine::new(&source) {
            Ok(engine) => Ok(TemplateRenderer::Here(Box::new(engine), source)),
            Err((name, why)) => {
                Err(Error::user(format!("cannot use the chat template `{name}`")).because(why))
            }
        }
    }

    fn source(&self) -> &TemplateSource {
        match self {
            TemplateRenderer::Children(children) => children.source(),
            TemplateRenderer::Here(_, source) => source,
        }
    }
}

impl ChatTemplate {
    /// Loads the template of the tokenizer's folder, or `given` instead; `None` without both.
    ///
    /// # Errors
    /// Fails if a template cannot be read or does not parse.
    pub fn load(tokenizer: &Tokenizer, given: Option<&Template>) -> Result<Option<Self>> {
        let templates = match given {
            Some(given) => vec![(DEFAULT.to_owned(), given.text.clone())],
            None => stored_templates(tokenizer)?,
        };
        if templates.is_empty() {
            return Ok(None);
        }
        let failed_action = || match given {
            Some(_) => "cannot use `data.chat_template`".to_owned(),
            None => format!("cannot use the tokenizer in {}", tokenizer.folder().display()),
        };
        let template = Self::new(templates, tokenizer.named_tokens(), clock::now()).during(failed_action)?;
        Ok(Some(ChatTemplate { given: given.cloned(), ..template }))
    }

    /// The template of the recipe, if this is it and not the tokenizer's own.
    pub fn given(&self) -> Option<&Template> {
        self.given.as_ref()
    }

    /// Describes the origin of the template.
    pub fn described(&self) -> String {
        match &self.given {
            None => "the tokenizer's own".to_owned(),
            Some(Template { name: Some(name), .. }) => format!("`{name}`"),
            Some(_) => "`data.chat_template`".to_owned(),
        }
    }

    /// Describes the first difference between the template of the recipe and the default one in the
    /// folder of `tokenizer`. `None` if they are equal, or one of them is missing.
    pub fn difference_from_own(&self, tokenizer: &Tokenizer) -> Option<String> {
        let given = self.given.as_ref()?;
        let own = stored_templates(tokenizer).ok()?;
        let (_, own) = own.iter().find(|(name, _)| name == DEFAULT).or(own.first())?;
        let (line, [own_line, given_line]) = first_difference(own, &given.text)?;
        Some(format!(
            "they differ in line {line}: {own_line:?} in its own, {given_line:?} in {}",
            self.described()
        ))
    }

    /// Returns true if so many chats ended the template's process that no more are rendered.
    pub(crate) fn has_given_up(&self) -> bool {
        matches!(&self.renderer, TemplateRenderer::Children(children) if children.has_given_up())
    }

    /// Makes a template from its text, with the special tokens it may name (`bos_token`,
    /// `eos_token`).
    ///
    /// # Errors
    /// Fails if it does not parse.
    pub fn from_text(text: &str, tokens: &[(&str, &str)]) -> Result<Self> {
        let tokens = tokens.iter().map(|(name, token)| ((*name).to_owned(), (*token).to_owned()));
        Self::new(vec![(DEFAULT.to_owned(), text.to_owned())], tokens, clock::now())
    }

    fn new(
        templates: Vec<(String, String)>,
        tokens: impl IntoIterator<Item = (String, String)>,
        now: DateTime<FixedOffset>,
    ) -> Result<Self> {
        let (mut marks, mut asks_for_date) = (false, false);
        let mut marked = Vec::new();
        for (name, text) in templates {
            let cannot = || Error::user(format!("cannot use the chat template `{name}`"));
            if text.len() > MAX_TEMPLATE_BYTES {
                return Err(cannot()
                    .because(format!("it has {} bytes; accepted: up to {MAX_TEMPLATE_BYTES}", text.len())));
            }
            if text.contains([OPEN, CLOSE]) {
                return Err(cannot().because("it holds U+FDD0 or U+FDD1, which are no characters"));
            }
            let text = with_line_feeds(text);
            asks_for_date |= text.contains(CLOCK);
            let with_marks = mark_generation(&text);
            marks |= with_marks.is_some();
            marked.push((name, with_marks.unwrap_or(text)));
        }
        let tokens = tokens.into_iter().collect();
        let renderer = TemplateRenderer::new(TemplateSource { templates: marked, tokens, now })?;
        Ok(ChatTemplate { renderer, marks, asks_for_date, given: None, forms: Default::default() })
    }

    /// Returns the same template with another moment for `strftime_now`.
    #[must_use]
    pub fn at(self, now: DateTime<FixedOffset>) -> Self {
        let renderer = match self.renderer {
            TemplateRenderer::Children(children) => TemplateRenderer::Children(children.at(now)),
            TemplateRenderer::Here(mut engine, source) => {
                engine.set_clock(now);
                TemplateRenderer::Here(engine, TemplateSource { now, ..source })
            }
        };
        ChatTemplate { renderer, ..self }
    }

    /// The moment that `strftime_now` returns.
    pub fn now(&self) -> DateTime<FixedOffset> {
        self.renderer.source().now
    }

    /// Returns true if its text may depend on that moment.
    pub fn asks_for_date(&self) -> bool {
        self.asks_for_date
    }

    /// Returns true if it marks the assistant's text with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks
    }

    /// Returns the form that the template for chats with `tools`, or without, reads.
    ///
    /// # Errors
    /// Fails with a transient error if the system starts no process to render it, or something
    /// outside ends it.
    pub(super) fn form(&self, tools: bool) -> Result<&TemplateForm> {
        let known = &self.forms[usize::from(tools)];
        if let Some(form) = known.get() {
            return Ok(form);
        }
        let name = self.choose(tools)?;
        let form = TemplateForm::probe(&|messages, tools, add_generation_prompt| {
            let inputs = TemplateInputs { tools, add_generation_prompt, options: None };
            match self.render_named(name, messages, &inputs, &RowBudget::default()) {
                Err(error) if error.kind() == ErrorCategory::User => Ok(None),
                rendered => rendered.map(|rendered| Some(rendered.text)),
            }
        })?;
        Ok(known.get_or_init(|| form))
    }

    /// Returns the token that ends the assistant's turn, if that is one special token.
    ///
    /// # Errors
    /// Fails like `form`.
    pub fn turn_end(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        let end = self.form(false)?.end.trim_start();
        let tokens = tokenizer.special_texts().filter(|token| !token.is_empty() && end.starts_with(*token));
        Ok(tokens.max_by_key(|token| token.len()).and_then(|token| tokenizer.token_id(token)))
    }

    /// Returns a warning if markers of turns, such as `<|im_start|>`, are several tokens of
    /// `tokenizer`.
    ///
    /// # Errors
    /// Fails like `form`, or with a user error if the tokenizer cannot encode them.
    pub(super) fn split_markers(&self, tokenizer: &Tokenizer) -> Result<Option<String>> {
        let form = self.form(false)?;
        let mut split: Vec<(&str, usize)> = Vec::new();
        for text in [&form.prompt, &form.end] {
            for marker in MARKER.find_iter(text).map(|matched| matched.as_str()) {
                let tokens = tokenizer.encode(marker, false)?.len();
                if tokens > 1 && !split.iter().any(|(known, _)| *known == marker) {
                    split.push((marker, tokens));
                }
            }
        }
        let shown: Vec<String> =
            split.iter().map(|(marker, tokens)| format!("`{marker}` is {tokens}")).collect();
        let markers: Vec<&str> = split.iter().map(|(marker, _)| *marker).collect();
        Ok((!split.is_empty()).then(|| {
            format!(
                "markers of the chat template are several tokens here ({}), which other programs may not read as turns; \
                 write `model.new_tokens = {markers:?}` to make each one token",
                shown.join(", ")
            )
        }))
    }

    /// Returns whether a text of the template names `key`.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.renderer.source().templates.iter().any(|(_, text)| text.contains(key))
    }

    /// Renders messages of a row in the form that the template reads.
    ///
    /// # Errors
    /// Fails like [`Self::render`].
    pub(crate) fn render_fitted(
        &self,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
    ) -> Result<Rendered> {
        self.render(&self.form(inputs.tools.is_some())?.fit(messages), inputs)
    }

    /// Renders `messages`.
    ///
    /// # Errors
    /// Fails with a user error if the template raises one, uses something unknown or exceeds its
    /// limits. Fails with a transient error if the system starts no process to render it, or
    /// something outside ends it.
    pub fn render(&self, messages: &[serde_json::Value], inputs: &TemplateInputs<'_>) -> Result<Rendered> {
        self.render_within(messages, inputs, &RowBudget::default())
    }

    /// Like [`Self::render`], within the remaining processor time of its row.
    ///
    /// # Errors
    /// Fails like [`Self::render`].
    pub(super) fn render_within(
        &self,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
        budget: &RowBudget,
    ) -> Result<Rendered> {
        self.render_named(self.choose(inputs.tools.is_some())?, messages, inputs, budget)
    }

    fn render_named(
        &self,
        name: &str,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
        budget: &RowBudget,
    ) -> Result<Rendered> {
        let rendered = match &self.renderer {
            TemplateRenderer::Children(children) => children.render(name, messages, inputs, budget),
            TemplateRenderer::Here(engine, _) => {
                let mut chat = Vec::new();
                wire::put_chat(messages, inputs.tools, &mut chat);
                engine.render(name, messages, inputs, chat.len()).map_err(ChildEnd::ByInput)
            }
        };
        let text = rendered.map_err(|end| end.into_error("cannot render the chat template"))?;
        unmark(text).during(|| "cannot render the chat template".to_owned())
    }

    /// Ends idle child processes; the next rendering starts them again.
    pub fn release(&self) {
        if let TemplateRenderer::Children(children) = &self.renderer {
            children.end();
        }
    }

    fn choose(&self, tools: bool) -> Result<&str> {
        let names: Vec<&str> =
            self.renderer.source().templates.iter().map(|(name, _)| name.as_str()).collect();
        let find = |wanted: &str| names.iter().copied().find(|name| *name == wanted);
        let chosen = tools.then(|| find("tool_use")).flatten().or_else(|| find(DEFAULT));
        match (chosen, &names[..]) {
            (Some(name), _) => Ok(name),
            (None, [name]) => Ok(*name),
            (None, names) => Err(Error::user("cannot choose a chat template")
                .because(format!("none is named `default`; found: {}", names.join(", ")))
                .hint("write `data.chat_template`, the path of the one to use")),
        }
    }
}

/// Removes the marks from a rendered text and returns their spans.
fn unmark(marked: String) -> Result<Rendered> {
    if !marked.contains([OPEN, CLOSE]) {
        return Ok(Rendered { text: marked, spans: Vec::new() });
    }
    let mut text = String::with_capacity(marked.len());
    let (mut spans, mut open) = (Vec::new(), None);
    for part in marked.split_inclusive([OPEN, CLOSE]) {
        let mark = part.chars().next_back().filter(|c| [OPEN, CLOSE].contains(c));
        text.push_str(&part[..part.len() - mark.map_or(0, char::len_utf8)]);
        match (mark, open) {
            (None, _) => {}
            (Some(OPEN), None) => open = Some(text.len()),
            (Some(CLOSE), Some(start)) => {
                spans.push(start..text.len());
                open = None;
            }
            _ => {
                return Err(Error::user("the generation marks do not pair").because(
                    "the template nests them, or the chat holds U+FDD0 or U+FDD1, which are no characters",
                ));
            }
        }
    }
    match open {
        None => Ok(Rendered { text, spans }),
        Some(_) => Err(Error::user("a generation block does not end")),
    }
}
