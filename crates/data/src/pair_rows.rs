//! Rows with a chosen and a rejected answer.
//!
//! The prompt is a key of its own, or the beginning that both answers share: in messages the
//! messages, in plain text the characters, as in TRL. A transcript of `Human:` and `Assistant:` is
//! divided before its last answer instead.

use serde_json::{Map, Value};

use super::RowFault;
use super::conversation::{Conversation, messages_of, tools_of};
use super::json_rows::json_type;
use super::parsed_row::{Answer, AnsweredRow, ParsedRow, Task};
use super::role::Role;
use super::row_fields::{alpaca, fault, task, text};

/// Keys of a row that hold its chosen and its rejected answer.
const SIDES: [&str; 2] = ["chosen", "rejected"];
/// Keys of a row that hold the prompt of both answers.
const PROMPTS: [&str; 3] = ["prompt", "messages", "conversations"];

/// A prompt with a chosen and a rejected answer, in this order.
#[expect(clippy::large_enum_variant, reason = "a row is read and turned into another form at once")]
pub(super) enum PairRow {
    Texts { prompt: String, answers: [String; 2] },
    Chats { prompt: Conversation, answers: [Conversation; 2], tools: Option<Value> },
    Tasks { task: Task, answers: [String; 2] },
}

impl PairRow {
    /// Reads a row that has the keys `chosen` and `rejected`.
    ///
    /// # Errors
    /// Fails if their values, or those of the prompt, are no texts or messages.
    pub(super) fn read(row: &Map<String, Value>) -> Result<Self, RowFault> {
        let given = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
        let before = PROMPTS.into_iter().find(|key| given(key));
        match (before, [row.get(SIDES[0]), row.get(SIDES[1])]) {
            (None, [Some(Value::String(_)), Some(Value::String(_))]) if given("instruction") => of_task(row),
            (Some("prompt"), [Some(Value::String(_)), Some(Value::String(_))])
                if row["prompt"].is_string() =>
            {
                let [chosen, rejected] = SIDES.map(|side| text(row, side));
                Ok(PairRow::Texts { prompt: text(row, "prompt")?, answers: [chosen?, rejected?] })
            }
            (None, [Some(Value::String(chosen)), Some(Value::String(rejected))]) => {
                let at =
                    transcript_answer(chosen, rejected).unwrap_or_else(|| shared_start(chosen, rejected));
                let answers = [chosen, rejected].map(|side| side[at..].to_owned());
                Ok(PairRow::Texts { prompt: chosen[..at].to_owned(), answers })
            }
            (
                Some(key),
                [Some(Value::Array(_) | Value::Object(_)), Some(Value::Array(_) | Value::Object(_))],
            ) => of_prompt(row, key),
            (None, [Some(Value::Array(_)), Some(Value::Array(_))]) => of_shared_messages(row),
            (_, [chosen, rejected]) => Err(fault(format!(
                "`chosen` is {} and `rejected` is {}; two strings or two lists of messages, as `{}` is, are needed",
                chosen.map_or("missing", json_type),
                rejected.map_or("missing", json_type),
                before.unwrap_or("instruction")
            ))),
        }
    }

    /// The row with its chosen answer alone.
    pub(super) fn chosen(self) -> ParsedRow {
        match self {
            PairRow::Texts { prompt, answers: [completion, _] } => ParsedRow::Pair { prompt, completion },
            PairRow::Chats { prompt, answers: [answer, _], tools } => {
                prompt.answered_by(answer).into_record(tools)
            }
            PairRow::Tasks { task, answers: [output, _] } => ParsedRow::Task { task, output },
        }
    }

    /// The row with both answers, which get these roles.
    ///
    /// # Errors
    /// Fails if messages have no prompt.
    pub(super) fn answered(self, roles: [Role; 2]) -> Result<ParsedRow, RowFault> {
        Ok(ParsedRow::Answers(match self {
            PairRow::Texts { prompt, answers } => {
                AnsweredRow::Texts { prompt, answers: with_roles(answers, roles) }
            }
            PairRow::Tasks { task, answers } => {
                AnsweredRow::Tasks { task, answers: with_roles(answers, roles) }
            }
            PairRow::Chats { prompt, answers, tools } => {
                let (prompt, options) = prompt.into_parts();
                if prompt.is_empty() {
                    return Err(fault(
                        "`chosen` and `rejected` begin with different messages; a prompt that both share, or the key \
                         `prompt`, is needed",
                    ));
                }
                let answers = with_roles(answers.map(|answer| answer.into_parts().0), roles);
                AnsweredRow::Chats { prompt, answers, tools, options }
            }
        }))
    }
}

fn with_roles<T>(answers: [T; 2], roles: [Role; 2]) -> Vec<Answer<T>> {
    answers.into_iter().zip(roles).map(|(content, role)| Answer { role, content }).collect()
}

/// Reads a pair of answers to a task, perhaps after a history.
fn of_task(row: &Map<String, Value>) -> Result<PairRow, RowFault> {
    let answers = SIDES.map(|side| text(row, side));
    let no_history = |history: &Value| history.is_null() || history.as_array().is_some_and(Vec::is_empty);
    if row.get("history").is_none_or(no_history) {
        let ParsedRow::Task { task, .. } = task(row, "instruction", "input", SIDES[0])? else {
            return Err(fault("its task is none"));
        };
        let [chosen, rejected] = answers;
        return Ok(PairRow::Tasks { task, answers: [chosen?, rejected?] });
    }
    let [chosen, rejected] = SIDES.map(|side| Ok(Conversation::of_record(alpaca(row, side)?)));
    let (chosen, rejected) = (chosen?, rejected?);
    let asked = chosen.len().saturating_sub(1);
    let ([prompt, chosen], [_, rejected]) = (chosen.split_at(asked), rejected.split_at(asked));
    Ok(PairRow::Chats { prompt, answers: [chosen, rejected], tools: tools_of(row)? })
}

/// Reads a pair of answers to the messages, or the text, under `key`.
fn of_prompt(row: &Map<String, Value>, key: &str) -> Result<PairRow, RowFault> {
    let prompt = match &row[key] {
        Value::String(prompt) => Conversation::of_user(prompt),
        _ => Conversation::read(row, key)?,
    };
    let answer = |side: &str| {
        let answer = Conversation::read(row, side)?;
        // UltraFeedback's form: each side begins with the prompt itself.
        Ok(match answer.len_with(&prompt) {
            Some(asked) => answer.split_at(asked),
            None => [Conversation::default(), answer],
        })
    };
    let [chosen, rejected] = SIDES.map(answer);
    let ([own, chosen], [_, rejected]) = (chosen?, rejected?);
    // A side that repeats the prompt may have a system message before it.
    let prompt = if own.is_empty() { prompt } else { own };
    Ok(PairRow::Chats {
        prompt: prompt.with_system(row)?,
        answers: [chosen, rejected],
        tools: tools_of(row)?,
    })
}

/// Reads two chats that begin with the same messages.
fn of_shared_messages(row: &Map<String, Value>) -> Result<PairRow, RowFault> {
    let [chosen, rejected] = SIDES.map(|side| messages_of(row, side));
    let (chosen, rejected) = (chosen?, rejected?);
    let shared = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
    // Of equal chats, the last message is the answer.
    let shared = shared.min(chosen.len().min(rejected.len()).saturating_sub(1));
    let [chosen, rejected] = SIDES.map(|side| Ok(Conversation::read(row, side)?.split_at(shared)));
    let ([prompt, chosen], [_, rejected]) = (chosen?, rejected?);
    let prompt = prompt.with_system(row)?;
    Ok(PairRow::Chats { prompt, answers: [chosen, rejected], tools: tools_of(row)? })
}

/// The byte at which the last answers of two `\n\nHuman: ... \n\nAssistant: ...` transcripts begin,
/// if they are equal before.
fn transcript_answer(chosen: &str, rejected: &str) -> Option<usize> {
    const MARK: &str = "\n\nAssistant:";
    let at = chosen.contains("\n\nHuman:").then(|| chosen.rfind(MARK))?? + MARK.len();
    rejected.starts_with(&chosen[..at]).then_some(at)
}

/// The byte at which two texts differ. A space before it belongs to the answers, and of equal
/// texts, the last character does.
fn shared_start(chosen: &str, rejected: &str) -> usize {
    let least = chosen.chars().count().min(rejected.chars().count()).saturating_sub(1);
    let differ = chosen.char_indices().zip(rejected.chars()).find(|((_, a), b)| a != b);
    match differ {
        Some(((at, _), _)) => at - usize::from(chosen[..at].ends_with(' ')),
        None => chosen.char_indices().nth(least).map_or(0, |(at, _)| at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_divide_where_they_differ() {
        for (chosen, rejected, prompt) in [
            ("Q: say it A: The kettle", "Q: say it A: The key", "Q: say it A: The ke"),
            ("2+2? 4", "2+2? 5", "2+2?"),
            ("abc", "abcd", "ab"),
            ("équal", "équal", "équa"),
            ("one", "two", ""),
            ("", "x", ""),
        ] {
            assert_eq!(&chosen[..shared_start(chosen, rejected)], prompt);
        }
    }

    #[test]
    fn transcripts_divide_before_their_last_answer() {
        let (a, b) = ("\n\nHuman: Hi\n\nAssistant: I am", "\n\nHuman: Hi\n\nAssistant: I can");
        assert_eq!(transcript_answer(a, b).map(|at| &a[at..]), Some(" I am"));
        assert_eq!(transcript_answer(a, "\n\nHuman: Ho\n\nAssistant: I am"), None);
        assert_eq!(transcript_answer("Hi", "Ho"), None);
    }
}
