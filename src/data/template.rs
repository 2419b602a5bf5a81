//! Chat templates: the tokenizer's own Jinja, rendered byte for byte as transformers does.
//!
//! A template comes from `chat_template.jinja`, from `chat_template` in tokenizer_config.json (one text, or a list
//! or object of named ones of which `tool_use` serves rows with tools), from `additional_chat_templates/`, or from the
//! recipe. `{% generation %}` marks what the assistant wrote: its tags are rewritten so that they print two
//! noncharacters, which are taken out of the text again and leave the spans. `strftime_now` answers with one moment, so
//! that the rows of one run agree: the one the template was loaded at, or that of [`ChatTemplate::at`], which all ranks
//! of a run and a run that goes on are given.
//!
//! A template is a program from the internet: [`super::template_engine`] bounds what it does, and the binary parses and
//! renders it in a process of its own (see [`super::template_child`]), which bounds the rest.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use chrono::{DateTime, FixedOffset};

use super::child_pool::RowBudget;
use super::jinja::{GENERATION_MARKS, mark_generation};
use super::sandbox::{self, ChildEnd};
use super::template_child::RenderingChildren;
pub use super::template_engine::TemplateInputs;
use super::template_engine::{CLOCK, TemplateEngine, TemplateSource};
use super::template_form::TemplateForm;
use super::tokenizer::Tokenizer;
use super::wire;
use crate::clock;
use crate::error::input_file;
use crate::error::{Error, ErrorCategory, ErrorContext, Result};

const OPEN: char = GENERATION_MARKS[0];
const CLOSE: char = GENERATION_MARKS[1];

/// Bytes of a template file.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// A rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text for the tokenizer, to be encoded without special tokens.
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
    /// The forms that the template for chats without tools reads, and those of the template for chats with tools.
    forms: [OnceLock<TemplateForm>; 2],
}

/// Where templates are rendered.
#[derive(Debug)]
enum TemplateRenderer {
    /// In processes of their own.
    Children(RenderingChildren),
    /// In this one, where it is not the binary that could start them.
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
    /// The template of the tokenizer's folder, or `given` (Jinja text or the path of a file) instead; `None` when
    /// there is neither.
    ///
    /// # Errors
    /// When a template cannot be read or does not parse.
    pub fn load(tokenizer: &Tokenizer, given: Option<&str>) -> Result<Option<Self>> {
        let templates = match given {
            Some(given) => vec![("default".to_owned(), text_or_file(given)?)],
            None => in_folder(tokenizer)?,
        };
        if templates.is_empty() {
            return Ok(None);
        }
        let place = || match given {
            Some(_) => "cannot use `data.chat_template`".to_owned(),
            None => format!("cannot use the tokenizer in {}", tokenizer.folder().display()),
        };
        Self::new(templates, tokenizer.named_tokens(), clock::now()).during(place).map(Some)
    }

    /// Whether so many chats ended the template's process that no more are rendered.
    pub fn has_given_up(&self) -> bool {
        matches!(&self.renderer, TemplateRenderer::Children(children) if children.has_given_up())
    }

    /// A template from its text, with the special tokens it may name (`bos_token`, `eos_token`).
    ///
    /// # Errors
    /// When it does not parse.
    pub fn from_text(text: &str, tokens: &[(&str, &str)]) -> Result<Self> {
        let tokens = tokens.iter().map(|(name, token)| ((*name).to_owned(), (*token).to_owned()));
        Self::new(vec![("default".to_owned(), text.to_owned())], tokens, clock::now())
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
                    .because(format!("it has {} bytes; {MAX_TEMPLATE_BYTES} are accepted", text.len())));
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
        Ok(ChatTemplate { renderer, marks, asks_for_date, forms: Default::default() })
    }

    /// The same template with another moment for `strftime_now`.
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

    /// The moment that `strftime_now` tells.
    pub fn now(&self) -> DateTime<FixedOffset> {
        self.renderer.source().now
    }

    /// Whether what it prints may depend on that moment.
    pub fn asks_for_date(&self) -> bool {
        self.asks_for_date
    }

    /// Whether it marks the assistant's text with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks
    }

    /// Returns what the template for chats with `tools`, or without, reads.
    ///
    /// # Errors
    /// Transient: the system starts no process to render it, or something else ends that.
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

    /// Returns whether a text of the template names `key`.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.renderer.source().templates.iter().any(|(_, text)| text.contains(key))
    }

    /// Renders messages of a row in the form that the template reads.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_fitted(
        &self,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
    ) -> Result<Rendered> {
        self.render(&self.form(inputs.tools.is_some())?.fit(messages), inputs)
    }

    /// Renders `messages`.
    ///
    /// # Errors
    /// The user's: what the template raises itself, and when it uses something unknown or exceeds its limits. Transient: the
    /// system starts no process to render it, or something else ends that.
    pub fn render(&self, messages: &[serde_json::Value], inputs: &TemplateInputs<'_>) -> Result<Rendered> {
        self.render_within(messages, inputs, &RowBudget::default())
    }

    /// As [`Self::render`], within what is left of the processor time of its row.
    ///
    /// # Errors
    /// As [`Self::render`].
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

    /// Gives back what only rendering needs, until something is rendered again.
    pub fn release(&self) {
        if let TemplateRenderer::Children(children) = &self.renderer {
            children.end();
        }
    }

    fn choose(&self, tools: bool) -> Result<&str> {
        let names: Vec<&str> =
            self.renderer.source().templates.iter().map(|(name, _)| name.as_str()).collect();
        let find = |wanted: &str| names.iter().copied().find(|name| *name == wanted);
        let chosen = tools.then(|| find("tool_use")).flatten().or_else(|| find("default"));
        match (chosen, &names[..]) {
            (Some(name), _) => Ok(name),
            (None, [name]) => Ok(*name),
            (None, names) => Err(Error::user("cannot choose a chat template")
                .because(format!("none is named `default`; there are {}", names.join(", ")))
                .hint("write `data.chat_template`, the path of the one to use")),
        }
    }
}

/// A template with the line ends that Jinja gives it before it reads it.
fn with_line_feeds(text: String) -> String {
    if text.contains('\r') { text.replace("\r\n", "\n").replace('\r', "\n") } else { text }
}

/// Takes the marks out of a rendered text.
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

/// The templates of a tokenizer's folder; a file wins over tokenizer_config.json.
fn in_folder(tokenizer: &Tokenizer) -> Result<Vec<(String, String)>> {
    let mut templates: Vec<(String, String)> = Vec::new();
    let file = tokenizer.folder().join("chat_template.jinja");
    if file.is_file() {
        templates.push(("default".to_owned(), read(&file)?));
        let more = tokenizer.folder().join("additional_chat_templates");
        if more.is_dir() {
            let cannot = |e: io::Error| Error::io("list the chat templates in", &more, &e);
            for entry in std::fs::read_dir(&more).map_err(cannot)? {
                let path = entry.map_err(cannot)?.path();
                if path.extension().is_some_and(|e| e == "jinja")
                    && let Some(name) = path.file_stem().and_then(|n| n.to_str())
                {
                    templates.push((name.to_owned(), read(&path)?));
                }
            }
            templates.sort();
        }
        return Ok(templates);
    }
    let bad = |why: &str| {
        Error::user(format!(
            "cannot use `chat_template` of {}",
            tokenizer.folder().join("tokenizer_config.json").display()
        ))
        .because(why)
    };
    match tokenizer.config().get("chat_template") {
        None | Some(serde_json::Value::Null) => {}
        Some(serde_json::Value::String(text)) => templates.push(("default".to_owned(), text.clone())),
        Some(serde_json::Value::Array(named)) => {
            for entry in named {
                match (entry["name"].as_str(), entry["template"].as_str()) {
                    (Some(name), Some(text)) => templates.push((name.to_owned(), text.to_owned())),
                    _ => return Err(bad("its list holds an entry without `name` and `template`")),
                }
            }
        }
        Some(serde_json::Value::Object(named)) => {
            for (name, template) in named {
                match template.as_str() {
                    Some(text) => templates.push((name.clone(), text.to_owned())),
                    None => return Err(bad(&format!("its template `{name}` is not a text"))),
                }
            }
        }
        Some(_) => return Err(bad("it is neither a text nor a list or object of named templates")),
    }
    Ok(templates)
}

fn text_or_file(given: &str) -> Result<String> {
    if given.contains("{{") || given.contains("{%") {
        return Ok(given.to_owned());
    }
    read(Path::new(given))
        .map_err(|error| error.hint("`data.chat_template` is Jinja text or the path of a file"))
}

fn read(path: &Path) -> Result<String> {
    input_file::read_text("read the chat template", path)
}
