//! Which part of a rendered chat the assistant wrote.
//!
//! Where the template marks it with `{% generation %}`, that is the answer. Else by *prefix difference*: the chat up
//! to a turn, rendered with the generation prompt, must be a literal prefix of the whole chat; the turn reaches from
//! there to where the chat up to and including the turn, the same with a generation prompt, and the whole part
//! ways. The end-of-turn token is trained, the newline after it is not. A template that renders a turn differently
//! when more follows (as those do that drop earlier reasoning) has no such prefix: it is refused, since any mask
//! would be a guess.

use std::ops::Range;

use serde_json::Value;

use super::child_pool::RowBudget;
use super::template::{ChatTemplate, Rendered, TemplateInputs};
use crate::error::{Error, ErrorCategory, Result};

const HINT: &str =
    "give a template with {% generation %} tags in `data.chat_template`, or write `data.train_on = \"all\"`";

/// A chat, the tools of its row and the processor time that the row has left.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChatOfRow<'a> {
    pub(super) messages: &'a [Value],
    pub(super) tools: Option<&'a Value>,
    pub(super) budget: &'a RowBudget,
}

/// Renders a chat and finds the text of the assistant turns for which `counts` is set.
///
/// `special` holds the texts of the tokenizer's special tokens.
///
/// # Errors
/// When the template refuses the chat, or its turns cannot be told apart.
pub(super) fn render_trained(
    template: &ChatTemplate,
    chat: ChatOfRow<'_>,
    counts: &[bool],
    special: &[&str],
) -> Result<Rendered> {
    let ChatOfRow { messages, tools, budget } = chat;
    let inputs = TemplateInputs { tools, ..TemplateInputs::default() };
    let mut whole = template.render_within(messages, &inputs, budget)?;
    let turns: Vec<usize> = (0..messages.len()).filter(|i| messages[*i]["role"] == "assistant").collect();
    let counted = |turn: usize| counts.get(turn).copied().unwrap_or(true);
    if template.marks_generation() {
        if turns.iter().any(|turn| !counted(*turn)) {
            if whole.spans.len() != turns.len() {
                return Err(Error::user("cannot tell the trained turns from the others").because(format!(
                    "the template marks {} turns of {}",
                    whole.spans.len(),
                    turns.len()
                )));
            }
            let mut turn = turns.iter();
            whole.spans.retain(|_| turn.next().is_some_and(|turn| counted(*turn)));
        }
        return Ok(whole);
    }
    let difference = Difference { template, chat, special, whole: &whole.text };
    let mut spans: Vec<Range<usize>> = Vec::new();
    for turn in turns.into_iter().filter(|turn| counted(*turn)) {
        let span = difference.span(turn)?;
        if spans.last().is_some_and(|last| last.end > span.start) {
            return Err(ambiguous(turn, "it overlaps the turn before"));
        }
        spans.push(span);
    }
    whole.spans = spans;
    Ok(whole)
}

fn ambiguous(turn: usize, why: &str) -> Error {
    Error::user(format!("cannot tell what the assistant wrote in message {turn}")).because(why).hint(HINT)
}

struct Difference<'a> {
    template: &'a ChatTemplate,
    chat: ChatOfRow<'a>,
    special: &'a [&'a str],
    whole: &'a str,
}

impl Difference<'_> {
    fn render(&self, messages: usize, add_generation_prompt: bool) -> Result<String> {
        let ChatOfRow { messages: all, tools, budget } = self.chat;
        let inputs = TemplateInputs { tools, add_generation_prompt };
        Ok(self.template.render_within(&all[..messages], &inputs, budget)?.text)
    }

    fn span(&self, turn: usize) -> Result<Range<usize>> {
        let until = self.render(turn + 1, false)?;
        // Some templates refuse a prompt after an assistant's turn; then nothing more can be learnt from it.
        let prompted = match self.render(turn + 1, true) {
            Err(error) if error.kind() == ErrorCategory::User => until.clone(),
            prompted => prompted?,
        };
        let start = self.start(turn, &until, &prompted)?;
        let shared = common_prefix(&until, self.whole);
        let own = common_prefix(&until[..shared], &prompted);
        if own < start {
            return Err(ambiguous(turn, "the template renders it differently when more messages follow"));
        }
        let cut = self.last_special(start, own);
        if own == until.len() {
            let end = cut.filter(|cut| self.whole[*cut..own].trim().is_empty());
            return Ok(start..end.unwrap_or(own));
        }
        // What follows the turn itself (an end-of-text that only closes a chat) may hold no more than tokens.
        match cut.filter(|cut| self.only_special(&until[*cut..])) {
            Some(end) => Ok(start..end),
            None => Err(ambiguous(turn, "the template renders it differently when more messages follow")),
        }
    }

    /// Where the assistant begins to write.
    fn start(&self, turn: usize, until: &str, prompted: &str) -> Result<usize> {
        match self.render(turn, true) {
            Ok(prompt) if self.whole.starts_with(&prompt) && until.starts_with(&prompt) => Ok(prompt.len()),
            Ok(_) => Err(ambiguous(
                turn,
                "the chat before it, with the generation prompt, is not how the whole begins",
            )),
            // Templates look at the first message, and refuse when there is none.
            Err(error) if turn == 0 && error.kind() == ErrorCategory::User => {
                let prompt = prompted.strip_prefix(until).filter(|prompt| !prompt.is_empty());
                let mut found = prompt.into_iter().flat_map(|prompt| until.match_indices(prompt));
                match (found.next(), found.next()) {
                    (Some((at, prompt)), None) if self.whole.starts_with(until) => Ok(at + prompt.len()),
                    _ => {
                        Err(error.during("cannot tell where the assistant's first message begins").hint(HINT))
                    }
                }
            }
            Err(error) => {
                Err(error.during(format!("cannot render the chat before message {turn}")).hint(HINT))
            }
        }
    }

    /// The end of the last special token in a range of the whole text.
    fn last_special(&self, start: usize, end: usize) -> Option<usize> {
        let text = &self.whole[start..end];
        self.special
            .iter()
            .filter(|token| !token.is_empty())
            .filter_map(|token| text.rfind(token).map(|at| start + at + token.len()))
            .max()
    }

    fn only_special(&self, mut text: &str) -> bool {
        loop {
            text = text.trim_start();
            if text.is_empty() {
                return true;
            }
            match self
                .special
                .iter()
                .filter(|token| !token.is_empty())
                .find_map(|token| text.strip_prefix(token))
            {
                Some(rest) => text = rest,
                None => return false,
            }
        }
    }
}

/// The length of the common prefix, on a character boundary of both.
fn common_prefix(a: &str, b: &str) -> usize {
    let same = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    (0..=same).rev().find(|at| a.is_char_boundary(*at) && b.is_char_boundary(*at)).unwrap_or(0)
}
