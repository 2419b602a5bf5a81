//! Encodes a prompt with its answers as TRL 1.16 does: one example for each answer.
//!
//! The prompt and the whole texts are tokenized apart. The answer begins where their tokens differ:
//! tokens that merge across the boundary belong to the answer. The two answers of a pair share one
//! prompt, the shorter of the two. Plain texts end in EOS, chats as their template ends them.
//!
//! ORPO, CPO and SimPO have a way of their own. They encode without the tokenizer's special tokens,
//! then put BOS before each text and EOS after it, also after the end token of a chat. Their two
//! prompts may differ in the last token.

use serde_json::{Value, json};

use super::child_pool::RowBudget;
use super::coverage::{self, RowNotes};
use super::encode::{Encoder, task_prompt, unreadable, unused_message_keys};
use super::example::{EncodedAnswers, Encoding, Example};
use super::parsed_row::{Answer, AnsweredRow, Task};
use super::role::Role;
use super::row_fields::question;
use super::spans::ChatOfRow;
use super::{Origin, RowError, RowFault, RowFaultKind};
use crate::recipe::enums::OnLongRow;

/// A text before its tokens.
struct AnsweredText {
    prompt: String,
    /// Prompt and answer together.
    wholes: Vec<Answer<String>>,
    is_chat: bool,
}

/// Tokens of a prompt with its answer, of any length.
struct AnswerTokens {
    role: Role,
    ids: Vec<u32>,
    /// The number of tokens before the answer.
    prompt: usize,
}

impl Encoder<'_> {
    /// Encodes a prompt with its answers.
    ///
    /// # Errors
    /// Fails with the row's fault, or with an error that ends the run.
    pub(super) fn answers(
        &self,
        row: &AnsweredRow,
        origin: &Origin,
        notes: &mut RowNotes,
    ) -> Result<Encoding, RowError> {
        let budget = RowBudget::default();
        let text = match row {
            AnsweredRow::Texts { prompt, answers } => self.plain(prompt, answers)?,
            AnsweredRow::Tasks { task, answers } if self.template().is_none() => {
                let Task { system, instruction, input } = task;
                self.plain(&task_prompt(system.as_deref(), instruction, input), answers)?
            }
            AnsweredRow::Tasks { task, answers } => {
                let answers: Vec<_> = answers.iter().map(as_message).collect();
                let chat =
                    ChatOfRow { messages: &messages_of(task), tools: None, options: None, budget: &budget };
                self.rendered(chat, &answers, notes)?
            }
            AnsweredRow::Chats { prompt, answers, tools, options } => {
                let (tools, options) = (tools.as_ref(), options.as_ref());
                let chat = ChatOfRow { messages: prompt, tools, options, budget: &budget };
                self.rendered(chat, answers, notes)?
            }
        };
        let answers = self.answer_tokens(&text, notes, &budget)?;
        self.fitted_answers(answers, origin)
    }

    /// The texts of plain answers, with EOS.
    fn plain(&self, prompt: &str, answers: &[Answer<String>]) -> Result<AnsweredText, RowFault> {
        let bos = self.tokenizer().bos().filter(|_| self.tokenizer().adds_bos());
        let is_cpo_like = self.options().objective.is_cpo_like();
        let eos = self.tokenizer().eos().filter(|_| !is_cpo_like).map_or("", |eos| &eos.text);
        let mut wholes = Vec::with_capacity(answers.len());
        for Answer { role, content } in answers {
            let eos = if content.ends_with(eos) { "" } else { eos };
            let content = format!("{prompt}{content}{eos}");
            if let Some(bos) = bos.filter(|bos| !is_cpo_like && content.starts_with(&bos.text)) {
                let why = format!("it begins with {:?}, which the tokenizer adds itself", bos.text);
                return Err(RowFault::new(RowFaultKind::DoubleBos, why));
            }
            wholes.push(Answer { role: *role, content });
        }
        Ok(AnsweredText { prompt: prompt.to_owned(), wholes, is_chat: false })
    }

    /// The texts that the chat template prints: of the prompt before an answer, and of the prompt
    /// with each answer.
    fn rendered(
        &self,
        chat: ChatOfRow<'_>,
        answers: &[Answer<Vec<Value>>],
        notes: &mut RowNotes,
    ) -> Result<AnsweredText, RowError> {
        let Some(template) = self.template() else {
            let why = "the tokenizer has no chat template; write `data.chat_template`";
            return Err(RowFault::new(RowFaultKind::Template, why).into());
        };
        let refused = |error| RowError::of(RowFaultKind::Template, error);
        let form = template.form(chat.tools.is_some()).map_err(refused)?;
        let control = self.control(template).map_err(refused)?;
        let marked = |value: Option<&Value>| Some(control?.mark(value?));
        let (tools, options) = (marked(chat.tools), marked(chat.options));
        let chat = ChatOfRow {
            tools: tools.as_ref().or(chat.tools),
            options: options.as_ref().or(chat.options),
            ..chat
        };
        let mut fitted = |messages: &[Value]| -> Vec<Value> {
            let messages = form.fit(messages);
            match control {
                Some(control) => messages.iter().map(|message| control.mark(message)).collect(),
                None => {
                    let tokens = self.special_tokens_of(&ChatOfRow { messages: &messages, ..chat });
                    notes.special_tokens.extend(tokens);
                    messages
                }
            }
        };
        let prompt = fitted(chat.messages);
        let prompt = template.render_within(&prompt, &chat.inputs(true), chat.budget).map_err(refused)?.text;
        let mut wholes = Vec::with_capacity(answers.len());
        for Answer { role, content } in answers {
            let messages = fitted(&[chat.messages, content].concat());
            let whole =
                template.render_within(&messages, &chat.inputs(false), chat.budget).map_err(refused)?;
            for (part, count) in coverage::dropped_parts(form, &messages, chat.tools, &whole.text) {
                let messages = notes.dropped.entry(part).or_default();
                *messages = count.max(*messages);
            }
            notes.unused_keys.extend(unused_message_keys(template, &messages));
            wholes.push(Answer { role: *role, content: whole.text });
        }
        for list in [&mut notes.special_tokens, &mut notes.unused_keys] {
            list.sort();
            list.dedup();
        }
        Ok(AnsweredText { prompt, wholes, is_chat: true })
    }

    /// The tokens of each answer after its prompt.
    fn answer_tokens(
        &self,
        text: &AnsweredText,
        notes: &mut RowNotes,
        budget: &RowBudget,
    ) -> Result<Vec<AnswerTokens>, RowError> {
        let is_cpo_like = self.options().objective.is_cpo_like();
        let add_special = !text.is_chat && !is_cpo_like;
        let ids = |text: &str, is_chat: bool| -> Result<Vec<u32>, RowError> {
            Ok(match self.known_control().filter(|_| is_chat) {
                Some(control) => control.encode(self.tokenizer(), text, budget).map_err(unreadable)?.ids,
                None => self.encoded(text, add_special, budget)?.ids,
            })
        };
        let prompt_text = if is_cpo_like {
            // TRL takes the part of the prompt that each whole text begins with.
            let shared = |prompt: &str, whole: &Answer<String>| shared_bytes(prompt, &whole.content);
            let bytes = text
                .wholes
                .iter()
                .fold(text.prompt.len(), |bytes, whole| shared(&text.prompt[..bytes], whole));
            &text.prompt[..bytes]
        } else {
            &text.prompt
        };
        let prompt = ids(prompt_text, text.is_chat)?;
        let mut answers = Vec::with_capacity(text.wholes.len());
        for Answer { role, content } in &text.wholes {
            let ids = ids(content, text.is_chat)?;
            let shared = prompt.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            notes.merged_prompt |= shared < prompt.len();
            let answer = AnswerTokens { role: *role, ids, prompt: shared };
            answers.push(if is_cpo_like { self.as_cpo(answer, prompt.len()) } else { answer });
        }
        let is_pair = |role: Role| matches!(role, Role::Chosen | Role::Rejected);
        if !is_cpo_like && answers.iter().all(|answer| is_pair(answer.role)) {
            let shared = answers.iter().map(|answer| answer.prompt).min().unwrap_or(0);
            answers.iter_mut().for_each(|answer| answer.prompt = shared);
        }
        Ok(answers)
    }

    /// The tokens as TRL's CPO and ORPO make them of an encoding without special tokens. `asked` is
    /// the number of the prompt's own tokens.
    fn as_cpo(&self, answer: AnswerTokens, asked: usize) -> AnswerTokens {
        let AnswerTokens { role, mut ids, prompt: shared } = answer;
        // A prompt whose last token merges with the answer loses it; TRL looks no further.
        let mut prompt = if shared < asked { (asked - 1).min(ids.len()) } else { asked };
        if let Some(eos) = self.tokenizer().eos()
            && (ids.len() == prompt || ids.last() != Some(&eos.id))
        {
            ids.push(eos.id);
        }
        if let Some(bos) = self.tokenizer().bos()
            && (prompt == 0 || ids[0] != bos.id)
        {
            ids.insert(0, bos.id);
            prompt += 1;
        }
        AnswerTokens { role, ids, prompt }
    }

    /// The examples of the answers, none longer than `max_seq_len`.
    fn fitted_answers(&self, answers: Vec<AnswerTokens>, origin: &Origin) -> Result<Encoding, RowError> {
        answers.iter().try_for_each(|answer| self.check_known(&answer.ids))?;
        if let Some(empty) = answers.iter().find(|answer| answer.ids.len() <= answer.prompt) {
            let why = format!("its {} answer adds no token to the prompt", empty.role);
            return Err(RowFault::new(RowFaultKind::NothingTrained, why).into());
        }
        let options = self.options();
        let max = options.max_seq_len;
        let was = answers.iter().map(|answer| answer.ids.len()).max().unwrap_or(0);
        if was > max {
            match options.on_long_row {
                OnLongRow::Stop => return Err(self.too_long(was).into()),
                OnLongRow::Drop => return Ok(Encoding::Dropped { was }),
                OnLongRow::Truncate if answers.iter().any(|answer| answer.prompt >= max) => {
                    return Ok(Encoding::CutAway { was });
                }
                OnLongRow::Truncate => {}
            }
        }
        let cut = answers.iter().filter(|answer| answer.ids.len() > max).count();
        let completions = match options.mismatched_block {
            Some(_) => answers.iter().map(|answer| answer.ids[answer.prompt..].to_vec()).collect(),
            None => Vec::new(),
        };
        let examples = answers.into_iter().map(|AnswerTokens { role, mut ids, prompt }| {
            ids.truncate(max);
            let trained = (0..ids.len()).map(|at| at >= prompt).collect();
            Example { ids, trained, origin: origin.clone(), group: None, role }
        });
        Ok(Encoding::Answers(EncodedAnswers { examples: examples.collect(), completions, was, cut }))
    }
}

/// The user's turn of a task, after its system message.
fn messages_of(task: &Task) -> Vec<Value> {
    let Task { system, instruction, input } = task;
    let system = system.iter().map(|text| json!({"role": "system", "content": text}));
    system.chain([json!({"role": "user", "content": question(instruction, input)})]).collect()
}

fn as_message(answer: &Answer<String>) -> Answer<Vec<Value>> {
    let Answer { role, content } = answer;
    Answer { role: *role, content: vec![json!({"role": "assistant", "content": content})] }
}

/// Number of bytes that two texts begin with, in whole characters.
fn shared_bytes(a: &str, b: &str) -> usize {
    let differ = a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y);
    differ.map_or(a.len().min(b.len()), |((at, _), _)| at)
}
