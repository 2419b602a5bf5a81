//! Output of `finetune data` for programs: one JSON object.

use serde_json::{Value, json};

use super::data_view::DataView;
use crate::data::Role;
use crate::error::Result;
use crate::report::Terminal;

/// Label of an untrained token: `ignore_index` of PyTorch's cross-entropy.
const NOT_TRAINED: i64 = -100;

/// Prints rows and summary as one JSON object.
pub(super) fn print(view: &DataView<'_>, terminal: &Terminal) -> Result<()> {
    let rows = view.shown().zip(view.masked()?).map(|((number, example), row)| {
        let label = |(at, id): (usize, &u32)| {
            if at > 0 && example.trained[at] { json!(id) } else { json!(NOT_TRAINED) }
        };
        let pieces = row.pieces.iter().map(|(text, trained)| json!({ "text": text, "trained": trained }));
        let mut shown = json!({
            "row": number,
            "origin": example.origin.to_string(),
            "input_ids": example.ids,
            "labels": example.ids.iter().enumerate().map(label).collect::<Vec<Value>>(),
            "text": pieces.collect::<Vec<Value>>(),
        });
        if example.role != Role::Plain {
            shown["role"] = json!(example.role.to_string());
        }
        shown
    });
    let held_out = view.held_out.map(|held_out| {
        let (alike, rows) = held_out.count_alike(view.train);
        json!({ "examples": held_out.examples().len(), "rows": rows, "rows_that_are_trained": alike })
    });
    let report = view.train.report();
    let text = json!({
        "rows": rows.collect::<Vec<Value>>(),
        "data": {
            "rows": report.rows,
            "examples": report.examples,
            "tokens": report.tokens,
            "trained_tokens": report.trained_tokens,
            "truncated": report.truncated,
            "cut_answers": report.cut_answers,
            "dropped": report.dropped,
            "cut_away": report.cut_away,
            "left_out": report.left_out,
            "bad_rows": report.num_bad(),
        },
        "figures": view.figures,
        "held_out": held_out,
        "report": view.summary(),
    });
    terminal.data(format!("{text}\n"))
}
