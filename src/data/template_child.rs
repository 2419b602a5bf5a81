//! Chat templates rendered by child processes: what a template does to its process, it does not do to the run.
//!
//! A child is given the templates once, then chats one by one; as many children work as threads ask at once. One that
//! ends instead of answering (out of memory, of stack or of time) is the fault of its chat, and its place is taken by a
//! new one; after a few such chats no more are rendered. One that is killed from outside gets its chat a second time.

use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, FixedOffset};

use super::sandbox::{SandboxedChild, SandboxedWork, read_frame, write_frame};
use super::sandbox_limits::SandboxLimits;
use super::template_engine::{TemplateEngine, TemplateInputs, TemplateSource};
use super::wire;
use crate::error::{Error, ErrorCategory, Result};

/// The first byte of an answer that is no text but the reason for none.
const REFUSED: u8 = 1;
const RENDERED: u8 = 0;

/// Chats that may end their child: each takes all of its time first.
const MOST_ENDED: usize = 16;
/// How long an idle child is waited for where the system starts no more.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two tries to have a child.
const POLL: Duration = Duration::from_millis(20);

/// Children that render the templates of one source.
#[derive(Debug)]
pub(super) struct RenderingChildren {
    source: TemplateSource,
    idle: Mutex<Vec<SandboxedChild>>,
    /// Chats that ended their child.
    ended: AtomicUsize,
}

impl RenderingChildren {
    /// Parses the templates of `source` in a first child.
    ///
    /// # Errors
    /// The user's: a template does not parse. Transient: the system starts no process.
    pub(super) fn new(source: TemplateSource) -> Result<Self> {
        let children = RenderingChildren { source, idle: Mutex::default(), ended: AtomicUsize::new(0) };
        let first = children.start()?;
        children.rest(first);
        Ok(children)
    }

    /// The same templates with another moment for `strftime_now`.
    pub(super) fn at(self, now: DateTime<FixedOffset>) -> Self {
        let source = TemplateSource { now, ..self.source };
        RenderingChildren { source, idle: Mutex::default(), ended: AtomicUsize::new(0) }
    }

    /// What they were made from.
    pub(super) fn source(&self) -> &TemplateSource {
        &self.source
    }

    /// The text that the template `name` prints for `messages`.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn render(
        &self,
        name: &str,
        messages: &[serde_json::Value],
        inputs: &TemplateInputs<'_>,
    ) -> Result<String, String> {
        let mut request = Vec::new();
        wire::put_text(name, &mut request);
        request.push(u8::from(inputs.add_generation_prompt));
        wire::put(inputs.tools.unwrap_or(&serde_json::Value::Null), &mut request);
        messages.iter().for_each(|message| wire::put(message, &mut request));
        if self.has_given_up() {
            return Err(format!("{MOST_ENDED} chats before it ended the template's process"));
        }
        let mut child = self.take()?;
        let mut answer = child.ask(&request);
        // The system's doing, which is short of memory, or a person's: the chat may be innocent.
        if answer.is_err() && child.was_killed() {
            child = self.take()?;
            answer = child.ask(&request);
        }
        if answer.is_err() {
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
        let answer = text(answer?);
        self.rest(child);
        answer
    }

    /// Whether so many chats ended their child that no more are rendered.
    pub(super) fn has_given_up(&self) -> bool {
        self.ended.load(Ordering::Relaxed) >= MOST_ENDED
    }

    /// A child that has nothing to do, or a new one.
    fn take(&self) -> Result<SandboxedChild, String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if let Some(child) = idle {
                return Ok(child);
            }
            match self.start() {
                Ok(child) => return Ok(child),
                Err(error) if error.kind() == ErrorCategory::Transient && Instant::now() < until => {
                    std::thread::sleep(POLL);
                }
                Err(error) => return Err(error.in_one_line()),
            }
        }
    }

    /// Ends the children that have nothing to do; the next chat starts one again.
    pub(super) fn end(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn rest(&self, child: SandboxedChild) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }

    fn start(&self) -> Result<SandboxedChild> {
        let mut child = SandboxedChild::start(SandboxedWork::ChatTemplate, None)?;
        let cannot = |name: &str, why: String| {
            Error::user(format!("cannot use the chat template `{name}`")).because(why)
        };
        let all =
            || self.source.templates.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        let answer = child.ask(&setup(&self.source)).map_err(|why| cannot(&all(), why))?;
        // Which one does not parse, and why.
        match text(answer) {
            Ok(_) => Ok(child),
            Err(refused) => match refused.split_once('\0') {
                Some((name, why)) => Err(cannot(name, why.to_owned())),
                None => Err(cannot(&all(), refused)),
            },
        }
    }
}

/// An answer, of which the first byte says what it is.
fn text(answer: Vec<u8>) -> Result<String, String> {
    let broken = || "its process gave no answer that can be read".to_owned();
    let (&kind, text) = answer.split_first().ok_or_else(broken)?;
    let text = std::str::from_utf8(text).map_err(|_| broken())?.to_owned();
    if kind == RENDERED { Ok(text) } else { Err(text) }
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

/// A chat to be rendered.
struct RenderRequest {
    name: String,
    add_generation_prompt: bool,
    tools: serde_json::Value,
    messages: Vec<serde_json::Value>,
}

impl RenderRequest {
    fn read(mut request: &[u8]) -> Option<Self> {
        let bytes = &mut request;
        let name = wire::take_text(bytes)?;
        let add_generation_prompt = wire::take_byte(bytes)? != 0;
        let tools = wire::take(bytes)?;
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            messages.push(wire::take(bytes)?);
        }
        Some(RenderRequest { name, add_generation_prompt, tools, messages })
    }

    fn answer(&self, engine: &TemplateEngine) -> Result<String, String> {
        let tools = Some(&self.tools).filter(|tools| !tools.is_null());
        let inputs = TemplateInputs { tools, add_generation_prompt: self.add_generation_prompt };
        engine.render(&self.name, &self.messages, &inputs)
    }
}

/// The work of a child: renders what it is asked until nobody asks.
///
/// # Errors
/// Whoever asks has gone, or asks what cannot be read.
pub(super) fn serve(limits: &SandboxLimits) -> io::Result<()> {
    let unreadable = || io::Error::from(io::ErrorKind::InvalidData);
    let mut requests = io::stdin().lock();
    let mut answers = io::BufWriter::new(io::stdout().lock());
    let mut reply = |answer: Result<&str, &str>| {
        let (kind, text) = match answer {
            Ok(text) => (RENDERED, text),
            Err(why) => (REFUSED, why),
        };
        write_frame(&mut answers, &[&[kind][..], text.as_bytes()].concat())?;
        answers.flush()
    };
    let request = read_frame(&mut requests)?;
    limits.begin(request.len() as u64)?;
    let source = read_setup(&request).ok_or_else(unreadable)?;
    let engine = match TemplateEngine::new(&source) {
        Ok(engine) => engine,
        Err((name, why)) => return reply(Err(&format!("{name}\0{why}"))),
    };
    reply(Ok(""))?;
    // The end of the pipe is the end of the work.
    while let Ok(request) = read_frame(&mut requests) {
        limits.begin(request.len() as u64)?;
        let request = RenderRequest::read(&request).ok_or_else(unreadable)?;
        match request.answer(&engine) {
            Ok(text) => reply(Ok(&text))?,
            Err(why) => reply(Err(&why))?,
        }
    }
    Ok(())
}
