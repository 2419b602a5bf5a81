//! Rows with one answer and its label, or with a chosen and a rejected answer, of which each
//! becomes a labelled one.

use serde_json::{Map, Value};

use super::RowFault;
use super::conversation::truth;
use super::pair_rows::PairRow;
use super::parsed_row::{Answer, AnsweredRow, ParsedRow};
use super::role::Role;
use super::row_fields::{fault, keys_of};

/// Keys of a row that hold its label: TRL's and LLaMA-Factory's.
pub(super) const LABEL_KEYS: [&str; 2] = ["label", "kto_tag"];

/// The labelled answers of a pair.
///
/// # Errors
/// Fails like [`PairRow::answered`].
pub(super) fn of_pair(pair: PairRow) -> Result<ParsedRow, RowFault> {
    pair.answered([Role::Desirable, Role::Undesirable])
}

/// The labelled answer of a row that was read as `single`.
///
/// # Errors
/// Fails without a label, or if the row has no prompt and answer.
pub(super) fn of_single(row: &Map<String, Value>, single: ParsedRow) -> Result<ParsedRow, RowFault> {
    let role = if label(row)? { Role::Desirable } else { Role::Undesirable };
    let answer = |content| vec![Answer { role, content }];
    Ok(ParsedRow::Answers(match single {
        ParsedRow::Pair { prompt, completion } => AnsweredRow::Texts { prompt, answers: answer(completion) },
        ParsedRow::Task { task, output } => AnsweredRow::Tasks { task, answers: answer(output) },
        ParsedRow::Messages { mut messages, tools, options, .. } => {
            let asked =
                messages.iter().rposition(|message| message["role"] != "assistant").map_or(0, |at| at + 1);
            let content = messages.split_off(asked);
            if content.is_empty() || messages.is_empty() {
                return Err(fault("its messages are no prompt with an answer of the assistant at the end"));
            }
            AnsweredRow::Chats { prompt: messages, answers: vec![Answer { role, content }], tools, options }
        }
        ParsedRow::Text(_) | ParsedRow::Tokens { .. } | ParsedRow::Answers(_) => {
            return Err(fault("it has no prompt apart from its answer"));
        }
    }))
}

fn label(row: &Map<String, Value>) -> Result<bool, RowFault> {
    let Some((key, label)) = LABEL_KEYS.into_iter().find_map(|key| Some((key, row.get(key)?))) else {
        return Err(fault(format!("it has no `label`; its keys are {}", keys_of(row))));
    };
    truth(label).ok_or_else(|| fault(format!("`{key}` is {label}; true or false is needed")))
}
