//! Finds the trained parts of a rendered chat: the assistant's text, or messages of other roles.
//!
//! If the template marks the assistant's text with `{% generation %}`, these are the parts. Else
//! each turn is located in the rendering of the *whole* chat, because templates render a turn by
//! its position (Qwen3 and R1 drop earlier reasoning).
//!
//! The end of a turn: the chat is rendered again with a mark in place of each text of the turn. The
//! rendering after the last mark is also the end of the whole chat, so the turn's text ends before
//! it. The turn's end token follows. To find it, a chat that ends with this turn (for the last
//! turn: one that continues) is rendered, too: the token is in the text that both print after the
//! mark. The end token is trained, the newline after it is not.
//!
//! The beginning: the whole chat begins with the chat before the turn, rendered with the generation
//! prompt. If that differs (a prompt that opens a thought which the turn does not have), the
//! longest beginning of the prompt that is before the turn's text is its header. Of a message of
//! another role, the text and the special token right after it are trained, without a header.
//!
//! In [`TrainedEnds`], the end of a turn is the special token, or the text that ends each answer,
//! at the end of its bytes.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::child_pool::RowBudget;
use super::template::{ChatTemplate, TemplateInputs};
use super::template_form::{MARK, TemplateForm};
use crate::error::{Error, ErrorCategory, Result};
use crate::recipe::TrainedEnds;

const HINT: &str =
    "give a template with {% generation %} tags in `data.chat_template`, or write `data.train_on = \"all\"`";

/// A chat in the form that its template reads, the row's further inputs, and the row's remaining
/// processor time.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChatOfRow<'a> {
    pub(super) messages: &'a [Value],
    pub(super) tools: Option<&'a Value>,
    pub(super) options: Option<&'a Value>,
    pub(super) budget: &'a RowBudget,
}

impl<'a> ChatOfRow<'a> {
    /// The inputs of the template beside the messages.
    pub(super) fn inputs(&self, add_generation_prompt: bool) -> TemplateInputs<'a> {
        TemplateInputs { tools: self.tools, add_generation_prompt, options: self.options }
    }
}

/// A rendered chat and its trained parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TrainedChat {
    pub(super) text: String,
    /// The trained bytes, in order.
    pub(super) spans: Vec<Range<usize>>,
    /// The trained messages with their bytes; empty if the template's tags do not identify them.
    pub(super) turns: Vec<(usize, Range<usize>)>,
}

/// The trained messages of a chat, with the data to locate them.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainedMessages<'a> {
    /// True for each trained message.
    pub(super) trained: &'a [bool],
    pub(super) ends: TrainedEnds,
    /// The texts of the tokenizer's special tokens, none of them empty.
    pub(super) special: &'a [&'a str],
    pub(super) form: &'a TemplateForm,
}

/// Renders a chat and finds the text of the messages that are `trained`.
///
/// # Errors
/// Fails if the template refuses the chat, or its turns cannot be located.
pub(super) fn render_trained(
    template: &ChatTemplate,
    chat: ChatOfRow<'_>,
    trained: TrainedMessages<'_>,
) -> Result<TrainedChat> {
    let whole = template.render_within(chat.messages, &chat.inputs(false), chat.budget)?;
    let (TrainedMessages { special, form, ends, .. }, text) = (trained, whole.text.clone());
    let search = TurnSearch { template, chat, special, prompt: &form.prompt, whole: &text };
    let turns: Vec<usize> = (0..chat.messages.len()).filter(|turn| trained.trained[*turn]).collect();
    let assistant = |turn: &usize| chat.messages[*turn]["role"] == "assistant";
    let mut found_spans = if template.marks_generation() && turns.iter().all(assistant) {
        let all: Vec<usize> = (0..chat.messages.len()).filter(assistant).collect();
        marked(whole.text, whole.spans, &all, &turns)?
    } else {
        let turns = search.spans(&turns)?;
        let spans = turns.iter().map(|(_, span)| span.clone()).collect();
        TrainedChat { text: whole.text, spans, turns }
    };
    let without_end = |span: &mut Range<usize>| span.end -= end_len(&text[span.clone()], special, &form.end);
    match ends {
        TrainedEnds::Turn => {}
        TrainedEnds::None => found_spans.spans.iter_mut().for_each(without_end),
        TrainedEnds::Last => found_spans.spans.iter_mut().rev().skip(1).for_each(without_end),
        TrainedEnds::All => {
            let others = (0..chat.messages.len()).filter(|turn| !trained.trained[*turn]);
            for span in
                others.map(|turn| search.text_span(turn)).collect::<Result<Vec<_>>>()?.into_iter().flatten()
            {
                found_spans.spans.push(span.end - end_len(&text[span.clone()], special, &form.end)..span.end);
            }
            found_spans.spans.sort_by_key(|span| span.start);
        }
    }
    Ok(found_spans)
}

/// The number of bytes at the end of a turn's text that end it: a special token, or `end`, which
/// ends each answer.
fn end_len(turn: &str, special: &[&str], end: &str) -> usize {
    let text = turn.trim_end();
    let ends =
        special.iter().copied().chain([end.trim()]).filter(|end| !end.is_empty() && text.ends_with(end));
    ends.map(|end| turn.len() - (text.len() - end.len())).max().unwrap_or(0)
}

/// Selects from the spans that tags mark those of the `trained` turns among `all` turns of the
/// assistant.
fn marked(text: String, spans: Vec<Range<usize>>, all: &[usize], trained: &[usize]) -> Result<TrainedChat> {
    if spans.len() == all.len() {
        let turns = all.iter().copied().zip(spans).filter(|(turn, _)| trained.contains(turn));
        let turns: Vec<_> = turns.collect();
        let spans = turns.iter().map(|(_, span)| span.clone()).collect();
        return Ok(TrainedChat { text, spans, turns });
    }
    if all.len() != trained.len() {
        return Err(Error::user("cannot locate the trained turns of the chat").because(format!(
            "the template marks {} turns of {}",
            spans.len(),
            all.len()
        )));
    }
    Ok(TrainedChat { text, spans, turns: Vec::new() })
}

fn ambiguous(turn: usize, why: &str) -> Error {
    Error::user(format!("cannot locate the assistant's text in message {turn}")).because(why).hint(HINT)
}

/// Searches for turns in the rendering of a whole chat.
struct TurnSearch<'a> {
    template: &'a ChatTemplate,
    chat: ChatOfRow<'a>,
    special: &'a [&'a str],
    prompt: &'a str,
    whole: &'a str,
}

impl TurnSearch<'_> {
    fn render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<String> {
        let inputs = self.chat.inputs(add_generation_prompt);
        Ok(self.template.render_within(messages, &inputs, self.chat.budget)?.text)
    }

    /// Like [`Self::render`], but `None` if the template refuses the messages.
    fn try_render(&self, messages: &[Value], add_generation_prompt: bool) -> Result<Option<String>> {
        match self.render(messages, add_generation_prompt) {
            Err(error) if error.kind() == ErrorCategory::User => Ok(None),
            rendered => rendered.map(Some),
        }
    }

    /// The bytes of each of `turns`.
    fn spans(&self, turns: &[usize]) -> Result<Vec<(usize, Range<usize>)>> {
        let (mut spans, mut after) = (Vec::new(), 0);
        for turn in turns {
            if self.chat.messages[*turn]["role"] == "assistant" {
                let span = self.span(*turn, after)?;
                after = span.end;
                spans.push((*turn, span));
            } else {
                spans.extend(self.text_span(*turn)?.map(|span| (*turn, span)));
            }
        }
        Ok(spans)
    }

    /// The bytes of a message's text and of the special token right after it; `None` if the
    /// template prints no text of it.
    fn text_span(&self, turn: usize) -> Result<Option<Range<usize>>> {
        let mark = self.mark();
        let mut messages = self.chat.messages.to_vec();
        messages[turn] = marked_message(&messages[turn], &mark);
        let Some(replaced) = self.try_render(&messages, false)? else { return Ok(None) };
        let (Some(first), Some(last)) = (replaced.find(&mark), replaced.rfind(&mark)) else {
            return Ok(None);
        };
        let after = &replaced[last + mark.len()..];
        if !self.whole.ends_with(after) {
            return Err(ambiguous(turn, "the text after the turn depends on the text of the turn"));
        }
        let end = self.whole.len() - after.len();
        let start = common_prefix(self.whole, &replaced[..first]).min(end);
        Ok(Some(start..end + self.leading_special(after).unwrap_or(0)))
    }

    /// The bytes of the assistant's turn `turn`, from `least` on.
    fn span(&self, turn: usize, least: usize) -> Result<Range<usize>> {
        let mark = self.mark();
        let with_marks = marked_message(&self.chat.messages[turn], &mark);
        let mut messages = self.chat.messages.to_vec();
        messages[turn] = with_marks.clone();
        let replaced = self.render(&messages, false)?;
        let (Some(first), Some(last)) = (replaced.find(&mark), replaced.rfind(&mark)) else {
            // The turn has no text of its own; the caller checks the printed text.
            return self.silent_span(turn, least);
        };
        let after = &replaced[last + mark.len()..];
        if !self.whole.ends_with(after) {
            return Err(ambiguous(turn, "the text after the turn depends on the text of the turn"));
        }
        let text_end = self.whole.len() - after.len();
        let text_start = common_prefix(self.whole, &replaced[..first]).min(text_end);
        let start = self.start(turn, least, text_start, text_end)?;
        let alone = [&messages[..turn], &[with_marks]].concat();
        let end = text_end + self.end_of_turn(turn, &alone, text_end, &mark)?;
        if start < least || start > end {
            return Err(ambiguous(turn, "it overlaps the turn before"));
        }
        Ok(start..end)
    }

    /// The bytes of a turn without texts: its end token.
    fn silent_span(&self, turn: usize, least: usize) -> Result<Range<usize>> {
        let until = self.render(&self.chat.messages[..=turn], false)?;
        let end = common_prefix(self.whole, &until);
        let start = self.start(turn, least, end, end)?;
        Ok(start..self.last_special(start, end).unwrap_or(end))
    }

    /// A mark that the chat does not contain.
    fn mark(&self) -> String {
        let mut mark = MARK.to_owned();
        while self.whole.contains(&mark) {
            mark.push_str(MARK);
        }
        mark
    }

    /// The number of bytes that belong to the turn after its text.
    fn end_of_turn(&self, turn: usize, alone: &[Value], text_end: usize, mark: &str) -> Result<usize> {
        let here = &self.whole[text_end..];
        let mut other = alone.to_vec();
        if turn + 1 == self.chat.messages.len() {
            other.push(json!({"role": "user", "content": other_user(alone)}));
        }
        let printed = self.try_render(&other, false)?;
        let rest = printed.as_ref().and_then(|printed| Some(&printed[printed.rfind(mark)? + mark.len()..]));
        let Some(rest) = rest else {
            let end = self.last_special(text_end, self.whole.len()).map(|end| end - text_end);
            return Ok(end.or_else(|| self.leading_special(here)).unwrap_or(0));
        };
        let common = common_prefix(here, rest);
        if let Some(end) = self.last_special(text_end, text_end + common) {
            return Ok(end - text_end);
        }
        let shared = self.whole_tokens(&here[..common]);
        if !shared.trim().is_empty() {
            return Ok(shared.len());
        }
        match (self.leading_special(here), self.leading_special(rest)) {
            // The last turn of a chat ends differently.
            (Some(end), Some(_)) => Ok(end),
            (Some(end), None) if rest.trim().is_empty() || here[end..].trim().is_empty() => Ok(end),
            _ => Ok(shared.len()),
        }
    }

    /// Removes the beginning of a special token at the end of a text, or a token that opens a
    /// result.
    fn whole_tokens<'t>(&self, text: &'t str) -> &'t str {
        let opened = self.special.iter().filter(|token| opens_result(token));
        let text = opened.filter_map(|token| text.strip_suffix(*token)).next().unwrap_or(text);
        let tokens = self.special.iter();
        let begun = tokens.filter_map(|token| {
            (1..token.len()).rev().find(|len| token.is_char_boundary(*len) && text.ends_with(&token[..*len]))
        });
        &text[..text.len() - begun.max().unwrap_or(0)]
    }

    /// The byte at which the assistant begins to write a turn whose text begins at `text_start`.
    fn start(&self, turn: usize, least: usize, text_start: usize, text_end: usize) -> Result<usize> {
        if let Some(prompt) = self.try_render(&self.chat.messages[..turn], true)?
            && (least..=text_end).contains(&prompt.len())
            && self.whole.starts_with(&prompt)
        {
            // Some templates print no prompt after a tool's result, but then a header all the same.
            let header = self.whole[prompt.len()..text_end].starts_with(self.prompt);
            return Ok(prompt.len() + if header { self.prompt.len() } else { 0 });
        }
        let Some(before) = self.whole.get(least..text_start) else {
            return Err(ambiguous(turn, "it overlaps the turn before"));
        };
        if self.prompt.is_empty() {
            // Without a generation prompt, the turn begins right after the text before it.
            return Ok(least + before.trim_end().len());
        }
        let header = self
            .beginnings_of_prompt()
            .into_iter()
            .find_map(|beginning| before.rfind(beginning).map(|at| least + at + beginning.len()));
        header.ok_or_else(|| {
            ambiguous(turn, "neither the chat before it nor the generation prompt marks its beginning")
        })
    }

    /// The generation prompt and its beginnings that end in a special token or a line, the longest
    /// first.
    fn beginnings_of_prompt(&self) -> Vec<&str> {
        let prompt = self.prompt;
        let mut ends: Vec<usize> = prompt.match_indices('\n').map(|(at, _)| at + 1).collect();
        for token in self.special.iter() {
            ends.extend(prompt.match_indices(token).map(|(at, _)| at + token.len()));
        }
        // The token that opens a turn names no role: `<|im_start|>` alone is no header.
        let opening = self.leading_special(prompt).filter(|end| !prompt[*end..].trim().is_empty());
        let names_role =
            |end: &usize| opening.is_none_or(|opening| *end > opening) || opens_by_name(prompt, *end);
        ends.push(prompt.len());
        ends.retain(|end| *end > 0 && names_role(end));
        ends.sort_unstable();
        ends.dedup();
        ends.into_iter().rev().map(|end| &prompt[..end]).collect()
    }

    /// The end of the last special token in a range of the whole text, if only space follows it
    /// there.
    fn last_special(&self, start: usize, end: usize) -> Option<usize> {
        let text = &self.whole[start..end];
        let tokens = self.special.iter();
        let ends = tokens.filter_map(|token| text.rfind(token).map(|at| (start + at + token.len(), *token)));
        let (last, token) = ends.max_by_key(|(end, _)| *end)?;
        if opens_result(token) {
            // Gemma 4 opens the result right after the call.
            return self.last_special(start, last - token.len());
        }
        Some(last).filter(|last| {
            // Two texts may first differ within the token that opens the next turn.
            let rest = self.whole[*last..end].trim_start();
            rest.is_empty() || self.special.iter().any(|token| token.starts_with(rest))
        })
    }

    /// The end of the special token at the beginning of `text`, after space.
    fn leading_special(&self, text: &str) -> Option<usize> {
        let trimmed = text.trim_start();
        let ends_here = |token: &&&str| trimmed.starts_with(**token) && !opens_result(token);
        let tokens = self.special.iter().filter(ends_here);
        tokens.map(|token| text.len() - trimmed.len() + token.len()).max()
    }
}

/// Returns whether the special token that ends at `end` of a prompt names the assistant by itself
/// (`<|assistant|>`).
fn opens_by_name(prompt: &str, end: usize) -> bool {
    let token = prompt[..end].to_lowercase();
    ["assistant", "model", "bot", "gpt", "response"].iter().any(|name| token.contains(name))
}

/// Returns whether a special token opens the result of a call, which is no longer the assistant's
/// text.
fn opens_result(token: &str) -> bool {
    let closes = token.contains('/') || (!token.starts_with("<|") && token.ends_with("|>"));
    token.contains("tool_response") && !closes
}

/// Content of a user's next message, in the form of the chat.
fn other_user(messages: &[Value]) -> Value {
    if messages.iter().any(|message| message["content"].is_array()) {
        json!([{"type": "text", "text": "a"}])
    } else {
        Value::from("a")
    }
}

/// Returns a message with `mark` in place of each of its texts.
fn marked_message(message: &Value, mark: &str) -> Value {
    let mut message = message.clone();
    // A turn without texts also needs a mark.
    let silent = ["tool_calls", "reasoning_content"].iter().all(|key| message.get(key).is_none());
    for key in super::conversation::REASONING_KEYS {
        if message.get(key).is_some() {
            message[key] = Value::from(mark);
        }
    }
    match &mut message["content"] {
        Value::String(text) if silent || !text.trim().is_empty() => *text = mark.to_owned(),
        Value::Array(parts) if !parts.is_empty() => *parts = vec![json!({"type": "text", "text": mark})],
        _ => {}
    }
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        match call["function"].get_mut("arguments") {
            Some(Value::String(text)) if !text.trim().is_empty() => *text = marked_json(text, mark),
            Some(Value::Object(arguments)) if !arguments.is_empty() => mark_arguments(arguments, mark),
            // A template may print the name again with the call's result, so it is replaced only
            // without arguments.
            _ => call["function"]["name"] = Value::from(mark),
        }
    }
    message
}

/// Puts `mark` in place of each text among the arguments of a call, or else of the last key. The
/// text after the mark is then printed as before: a quote ends a text, but not a number.
fn mark_arguments(arguments: &mut Map<String, Value>, mark: &str) {
    let mut texts = 0;
    for text in arguments.values_mut().filter(|value| value.is_string()) {
        *text = Value::from(mark);
        texts += 1;
    }
    if texts == 0
        && let Some(last) = arguments.keys().next_back().cloned()
        && let Some(value) = arguments.shift_remove(&last)
    {
        arguments.insert(mark.to_owned(), value);
    }
}

/// Returns a JSON text with `mark` within its braces, so that its end is unchanged.
fn marked_json(text: &str, mark: &str) -> String {
    let body = text.trim();
    let is_object = body.strip_prefix('{').is_some_and(|body| body.ends_with('}'));
    let marked = if is_object { format!("{{{mark}}}") } else { mark.to_owned() };
    text.replacen(body, &marked, 1)
}

/// The length of the common prefix, on a character boundary of both.
fn common_prefix(a: &str, b: &str) -> usize {
    let same = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    (0..=same).rev().find(|at| a.is_char_boundary(*at) && b.is_char_boundary(*at)).unwrap_or(0)
}
