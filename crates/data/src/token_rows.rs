//! Rows of tokens: `input_ids`, with masks for padding and training.
//!
//! Keys and meanings are those of transformers and TRL: `attention_mask` is 0 at padding, which is
//! removed; `labels` are the ids of trained tokens, and -100 elsewhere; TRL's `completion_mask` and
//! `assistant_masks` are 1 at trained tokens. Such a row gets neither BOS nor EOS.

use serde_json::{Map, Value};

use super::json_rows::json_type;
use super::parsed_row::ParsedRow;
use super::{RowFault, RowFaultKind};

/// The key of the token ids.
pub(super) const IDS: &str = "input_ids";
const ATTENTION: &str = "attention_mask";
const LABELS: &str = "labels";
/// Keys of masks that are 1 at trained tokens.
const MASKS: [&str; 2] = ["completion_mask", "assistant_masks"];
/// The keys of a row that this module reads.
pub(super) const KEYS: [&str; 5] = [IDS, ATTENTION, LABELS, MASKS[0], MASKS[1]];
/// The label of an untrained token, as in PyTorch's cross entropy.
const NOT_TRAINED: i64 = -100;

/// Reads a row of tokens.
///
/// # Errors
/// Fails if `input_ids` is missing, or a list has another length or invalid values.
pub(super) fn read(row: &Map<String, Value>) -> Result<ParsedRow, RowFault> {
    let ids = numbers(row, IDS)?.ok_or_else(|| fault(format!("it has no `{IDS}`")))?;
    let of_row = |key: &str| match numbers(row, key)? {
        Some(list) if list.len() != ids.len() => Err(fault(format!(
            "`{key}` has {} values and `{IDS}` {}; one for each token is needed",
            list.len(),
            ids.len()
        ))),
        list => Ok(list),
    };
    let attention = of_row(ATTENTION)?;
    let mut trained = vec![true; ids.len()];
    if let Some(labels) = of_row(LABELS)? {
        for (at, (label, id)) in labels.iter().zip(&ids).enumerate() {
            if *label != NOT_TRAINED && label != id {
                return Err(fault(format!(
                    "`{LABELS}[{at}]` is {label} and `{IDS}[{at}]` {id}; accepted: the same id, or {NOT_TRAINED}"
                )));
            }
            trained[at] &= *label != NOT_TRAINED;
        }
    }
    for key in MASKS {
        for (trained, mask) in trained.iter_mut().zip(of_row(key)?.into_iter().flatten()) {
            *trained &= mask != 0;
        }
    }
    let is_token = |at: usize| attention.as_ref().is_none_or(|attention| attention[at] != 0);
    let mut tokens = (Vec::new(), Vec::new());
    for at in (0..ids.len()).filter(|at| is_token(*at)) {
        let id = u32::try_from(ids[at]);
        tokens.0.push(id.map_err(|_| fault(format!("`{IDS}[{at}]` is {}; an id is needed", ids[at])))?);
        tokens.1.push(trained[at]);
    }
    Ok(ParsedRow::Tokens { ids: tokens.0, trained: tokens.1 })
}

/// The whole numbers under `key`; `None` if the row has no such key.
fn numbers(row: &Map<String, Value>, key: &str) -> Result<Option<Vec<i64>>, RowFault> {
    let list = match row.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(fault(format!("`{key}` is {}; a list of whole numbers is needed", json_type(other))));
        }
    };
    let number = |(at, value): (usize, &Value)| {
        value.as_i64().ok_or_else(|| fault(format!("`{key}[{at}]` is {value}; a whole number is needed")))
    };
    list.iter().enumerate().map(number).collect::<Result<_, _>>().map(Some)
}

fn fault(why: String) -> RowFault {
    RowFault::new(RowFaultKind::Format, why)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tokens(row: Value) -> Result<(Vec<u32>, Vec<bool>), String> {
        match read(row.as_object().unwrap()) {
            Ok(ParsedRow::Tokens { ids, trained }) => Ok((ids, trained)),
            Ok(other) => panic!("{other:?}"),
            Err(fault) => Err(fault.why),
        }
    }

    #[test]
    fn masks_say_what_is_trained_and_what_is_padding() {
        let ids = vec![7, 8, 9];
        assert_eq!(tokens(json!({"input_ids": ids})), Ok((ids.clone(), vec![true; 3])));
        let labels = json!({"input_ids": ids, "labels": [-100, 8, 9], "completion_mask": [0, 0, 1]});
        assert_eq!(tokens(labels), Ok((ids, vec![false, false, true])));
        let padded =
            json!({"input_ids": [0, 7, 8, 0], "attention_mask": [0, 1, 1, 0], "labels": [-100, 7, 8, -100]});
        assert_eq!(tokens(padded), Ok((vec![7, 8], vec![true, true])));
    }

    #[test]
    fn lists_that_do_not_agree_are_faults() {
        let why = |row: Value| tokens(row).unwrap_err();
        assert_eq!(
            why(json!({"input_ids": [1, 2], "labels": [2]})),
            "`labels` has 1 values and `input_ids` 2; one for each token is needed"
        );
        assert_eq!(
            why(json!({"input_ids": [1, 2], "labels": [2, 3]})),
            "`labels[0]` is 2 and `input_ids[0]` 1; accepted: the same id, or -100"
        );
        assert_eq!(why(json!({"input_ids": [-1]})), "`input_ids[0]` is -1; an id is needed");
        assert_eq!(why(json!({"input_ids": [0.5]})), "`input_ids[0]` is 0.5; a whole number is needed");
        assert_eq!(
            why(json!({"input_ids": "1"})),
            "`input_ids` is a string; a list of whole numbers is needed"
        );
    }
}
