//! Chat templates: the tokenizer's own Jinja, rendered byte for byte as transformers does.
//!
//! A template comes from `chat_template.jinja`, from `chat_template` in tokenizer_config.json (one text, or a list
//! of named ones of which `tool_use` serves rows with tools), from `additional_chat_templates/`, or from the
//! recipe. `{% generation %}` marks what the assistant wrote: its tags are rewritten so that they print two
//! noncharacters, which are taken out of the text again and leave the spans. `strftime_now` answers with one moment, so
//! that the rows of one run agree: the one the template was loaded at, or that of [`ChatTemplate::at`], which all ranks
//! of a run and a run that goes on are given.
//!
//! A template is a program from the internet: it reaches no file and no environment, its steps, its recursion and
//! the text it prints are bounded. What it may hold in memory is not: minijinja has no hook for that.

use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use chrono::format::{Item, StrftimeItems};
use chrono::{DateTime, FixedOffset, Local};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::Regex;

use super::python::{to_template, tojson};
use super::tokenizer::Tokenizer;
use crate::error::{Error, ErrorContext, Result};

/// Noncharacters: never part of text that is exchanged (Unicode 16, section 23.7).
const OPEN: char = '\u{FDD0}';
const CLOSE: char = '\u{FDD1}';

/// Steps a rendering may take: some hundred times what a long chat needs, a fraction of a second.
const MAX_STEPS: u64 = 3_000_000;
/// Bytes a rendering may print.
const MAX_TEXT_BYTES: usize = 64 << 20;
/// Calls within calls, as minijinja counts them: a macro's call takes several. Fits the stack of a worker thread.
const MAX_RECURSION: usize = 250;
/// Bytes of a template file.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// What a template is given beside the messages.
#[derive(Debug, Clone, Default)]
pub struct TemplateInputs<'a> {
    /// The tools that the model may call, as JSON definitions.
    pub tools: Option<&'a serde_json::Value>,
    /// Whether the text ends where the assistant is to begin.
    pub add_generation_prompt: bool,
}

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
    env: Environment<'static>,
    names: Vec<String>,
    marks: bool,
    asks_for_date: bool,
    tokens: Vec<(String, Value)>,
    now: DateTime<FixedOffset>,
}

/// The function that tells a template the date.
const CLOCK: &str = "strftime_now";

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
        Self::new(templates, tokenizer.named_tokens(), Local::now().fixed_offset()).during(place).map(Some)
    }

    /// A template from its text, with the special tokens it may name (`bos_token`, `eos_token`).
    ///
    /// # Errors
    /// When it does not parse.
    pub fn from_text(text: &str, tokens: &[(&str, &str)]) -> Result<Self> {
        let tokens = tokens.iter().map(|(name, token)| ((*name).to_owned(), (*token).to_owned()));
        Self::new(vec![("default".to_owned(), text.to_owned())], tokens, Local::now().fixed_offset())
    }

    fn new(
        templates: Vec<(String, String)>,
        tokens: impl IntoIterator<Item = (String, String)>,
        now: DateTime<FixedOffset>,
    ) -> Result<Self> {
        let mut env = environment()?;
        add_clock(&mut env, now);
        let mut names = Vec::new();
        let (mut marks, mut asks_for_date) = (false, false);
        for (name, text) in templates {
            let cannot = || Error::user(format!("cannot use the chat template `{name}`"));
            if text.len() > MAX_TEMPLATE_BYTES {
                return Err(cannot()
                    .because(format!("it has {} bytes; {MAX_TEMPLATE_BYTES} are accepted", text.len())));
            }
            if text.contains([OPEN, CLOSE]) {
                return Err(cannot().because("it holds U+FDD0 or U+FDD1, which are no characters"));
            }
            let marked = mark(&text)?;
            marks |= marked != text;
            asks_for_date |= text.contains(CLOCK);
            env.add_template_owned(name.clone(), marked).map_err(|e| cannot().because(reason(&e)))?;
            names.push(name);
        }
        let tokens = tokens.into_iter().map(|(name, token)| (name, Value::from(token))).collect();
        Ok(ChatTemplate { env, names, marks, asks_for_date, tokens, now })
    }

    /// The same template with another moment for `strftime_now`.
    #[must_use]
    pub fn at(mut self, now: DateTime<FixedOffset>) -> Self {
        add_clock(&mut self.env, now);
        self.now = now;
        self
    }

    /// The moment that `strftime_now` tells.
    pub fn now(&self) -> DateTime<FixedOffset> {
        self.now
    }

    /// Whether what it prints may depend on that moment.
    pub fn asks_for_date(&self) -> bool {
        self.asks_for_date
    }

    /// Whether it marks the assistant's text with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks
    }

    /// Renders `messages`.
    ///
    /// # Errors
    /// What the template raises itself, and when it uses something unknown or exceeds its limits.
    pub fn render(&self, messages: &[serde_json::Value], inputs: &TemplateInputs<'_>) -> Result<Rendered> {
        let name = self.choose(inputs.tools.is_some())?;
        let mut variables: Vec<(&str, Value)> =
            self.tokens.iter().map(|(name, token)| (name.as_str(), token.clone())).collect();
        variables.push(("messages", messages.iter().map(to_template).collect()));
        variables.push(("tools", inputs.tools.map_or(Value::from(()), to_template)));
        variables.push(("documents", Value::from(())));
        variables.push(("add_generation_prompt", Value::from(inputs.add_generation_prompt)));
        let cannot = || Error::user("cannot render the chat template");
        let template = self.env.get_template(name).map_err(|e| cannot().because(reason(&e)))?;
        let mut out = BoundedOutput(Vec::new());
        template
            .render_captured_to(Value::from_pairs(variables), &mut out)
            .map_err(|e| cannot().because(reason(&e)))?;
        let text = String::from_utf8(out.0)
            .map_err(|e| Error::internal("a template printed no UTF-8").because(e.to_string()))?;
        unmark(text).during(|| "cannot render the chat template".to_owned())
    }

    fn choose(&self, tools: bool) -> Result<&str> {
        let find = |wanted: &str| self.names.iter().find(|name| *name == wanted);
        let chosen = tools.then(|| find("tool_use")).flatten().or_else(|| find("default"));
        match (chosen, &self.names[..]) {
            (Some(name), _) | (None, [name]) => Ok(name),
            (None, names) => Err(Error::user("cannot choose a chat template")
                .because(format!("none is named `default`; there are {}", names.join(", ")))
                .hint("write `data.chat_template`, the path of the one to use")),
        }
    }
}

fn environment() -> Result<Environment<'static>> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let syntax =
        syntax.map_err(|e| Error::internal("the template syntax is refused").because(e.to_string()))?;
    let mut env = Environment::new();
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(unknown_method_callback);
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_RECURSION);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
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

/// Rewrites the generation tags so that they print the marks and keep their whitespace control.
fn mark(text: &str) -> Result<String> {
    let pattern = |source: &str| {
        Regex::new(source)
            .map_err(|e| Error::internal("a pattern of ours does not compile").because(e.to_string()))
    };
    let open = pattern(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")?;
    let close = pattern(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")?;
    // `with` gives the block its own scope, as Jinja's has, and pairs the tags.
    let text =
        open.replace_all(text, format!("{{%$1 with generation_ = 0 %}}{OPEN}{{% set generation_ = 0 $2%}}"));
    let text = close.replace_all(&text, format!("{{%$1 set generation_ = 0 %}}{CLOSE}{{% endwith $2%}}"));
    Ok(text.into_owned())
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
        Some(_) => return Err(bad("it is neither a text nor a list of named templates")),
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
    std::fs::read_to_string(path).map_err(|e| Error::io("read the chat template", path, &e))
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

/// Takes text up to the limit.
struct BoundedOutput(Vec<u8>);

impl Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT_BYTES {
            return Err(io::Error::other(format!("it prints more than {MAX_TEXT_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
