//! Applies the table of a source in `data.train` or `data.eval` to its rows: renamed columns, a
//! prompt made of columns, a system message, a limit of rows, a weight. Also holds out rows for
//! evaluation.

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;

use serde_json::{Map, Value};

use super::conversation::SYSTEM_KEYS;
use super::raw_rows::{DataFile, RawRow};
use super::source::{Split, read};
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin};
use crate::error::{Error, Result};
use crate::recipe::RowSource;
use crate::units;

/// The key of the prompt that a template makes.
const PROMPT: &str = "prompt";

/// Reads the files `paths` of `source` and applies its table.
///
/// # Errors
/// Fails like [`read`], or if `source` names a split that files do not have, or an invalid
/// template.
pub fn take(source: &RowSource, paths: &[PathBuf], purpose: Split) -> Result<DataFile> {
    let name = source.split.as_ref().and_then(|split| split.name.as_deref());
    let split = name.map_or(Ok(purpose), Split::named)?;
    let template = source.prompt_template.as_deref().map(PromptTemplate::parse).transpose()?;
    let mut data = DataFile::default();
    for path in paths {
        let mut one = read(path, split)?;
        data.files.append(&mut one.files);
        data.rows.append(&mut one.rows);
        data.bad.append(&mut one.bad);
        data.notes.append(&mut one.notes);
    }
    let all = data.rows.len();
    if let Some(rows) = source.split.as_ref().and_then(|split| split.rows(all)) {
        let note = format!("took rows {} to {} of {all} of {source}", rows.start + 1, rows.end);
        keep(&mut data, rows);
        data.notes.push(note);
        if data.rows.is_empty() && all > 0 {
            return Err(Error::user(format!("cannot take a part of {source}"))
                .because(format!("its `split` leaves none of its {}", units::exact(all, "row")))
                .hint("give a larger part, such as train[:5%]"));
        }
    }
    if let Some(limit) = source.limit.filter(|limit| *limit < data.rows.len()) {
        let all = data.rows.len();
        keep(&mut data, 0..limit);
        data.notes.push(format!("took the first {limit} of {all} rows of {source}"));
    }
    for mut row in std::mem::take(&mut data.rows) {
        match shaped(&mut row, source, template.as_ref()) {
            Ok(()) => data.rows.push(row),
            Err(why) => {
                data.bad.push(BadRow { origin: row.origin, fault: RowFault::new(RowFaultKind::Format, why) })
            }
        }
    }
    Ok(data)
}

/// Keeps the rows at these indices, and the bad rows between them.
fn keep(taken: &mut DataFile, rows: Range<usize>) {
    let sort_key = |origin: &Origin| {
        let file = taken.files.iter().position(|file| **file == *origin.file);
        let (RowOrigin::Line(at) | RowOrigin::Row(at)) = origin.row;
        (file, at)
    };
    // `None` if the part begins or ends with the file.
    let bound =
        |is_bound: bool, at: usize| taken.rows.get(at).filter(|_| is_bound).map(|row| sort_key(&row.origin));
    let first = bound(rows.start > 0, rows.start);
    let last = bound(rows.end < taken.rows.len(), rows.end.saturating_sub(1));
    let stands_among = |bad: &BadRow| {
        let at = sort_key(&bad.origin);
        first.is_none_or(|first| at >= first) && last.is_none_or(|last| at <= last)
    };
    let bad = std::mem::take(&mut taken.bad).into_iter().filter(stands_among).collect();
    taken.bad = bad;
    taken.rows = taken.rows.drain(rows).collect();
}

/// Gives a row the keys of its source's table.
fn shaped(row: &mut RawRow, source: &RowSource, template: Option<&PromptTemplate>) -> Result<(), String> {
    row.format = source.format;
    let value = &mut row.value;
    let missing = |column: &str, value: &Map<String, Value>| {
        let keys: Vec<&str> = value.keys().map(String::as_str).take(30).collect();
        format!("it has no column `{column}`; its columns are {}", keys.join(", "))
    };
    let prompt = template.map(|template| template.fill(value).map_err(|column| missing(&column, value)));
    let prompt = prompt.transpose()?;
    let mut named = Vec::new();
    for (key, column) in &source.columns {
        let cell = value.get(column).cloned().ok_or_else(|| missing(column, value))?;
        named.push((key.clone(), cell));
    }
    let used = source.columns.values().chain(template.into_iter().flat_map(PromptTemplate::columns));
    used.for_each(|column| drop(value.shift_remove(column)));
    value.extend(named);
    value.extend(prompt.map(|prompt| (PROMPT.to_owned(), Value::from(prompt))));
    let has_system = SYSTEM_KEYS.iter().any(|key| value.get(*key).is_some_and(|text| !text.is_null()));
    if let Some(system) = source.system.as_ref().filter(|_| !has_system) {
        value.insert(SYSTEM_KEYS[0].to_owned(), Value::from(system.as_str()));
    }
    Ok(())
}

/// A text with columns to fill in.
struct PromptTemplate(Vec<TemplatePart>);

enum TemplatePart {
    Text(String),
    Column(String),
}

impl PromptTemplate {
    /// Parses `{column}` as a column, `{{` and `}}` as braces.
    fn parse(text: &str) -> Result<Self> {
        let refused = |why: &str| {
            Error::user(format!("cannot use the prompt template {text:?}"))
                .because(why)
                .hint("write `{column}` in the place of a value, and `{{` or `}}` for a brace")
        };
        let (mut parts, mut plain, mut rest) = (Vec::new(), String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            plain.push_str(&rest[..at]);
            let brace = &rest[at..at + 1];
            let after = &rest[at + 1..];
            if let Some(after) = after.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(refused("it has a `}` without a `{` before it"));
            }
            let (column, after) =
                after.split_once('}').ok_or_else(|| refused("it has a `{` without a `}` after it"))?;
            parts.push(TemplatePart::Text(std::mem::take(&mut plain)));
            parts.push(TemplatePart::Column(column.to_owned()));
            rest = after;
        }
        plain.push_str(rest);
        parts.push(TemplatePart::Text(plain));
        Ok(PromptTemplate(parts))
    }

    fn columns(&self) -> impl Iterator<Item = &String> {
        self.0.iter().filter_map(|part| match part {
            TemplatePart::Column(column) => Some(column),
            TemplatePart::Text(_) => None,
        })
    }

    /// Returns the text for a row.
    ///
    /// # Errors
    /// Fails with the first column that the row does not have.
    fn fill(&self, row: &Map<String, Value>) -> Result<String, String> {
        let mut filled = String::new();
        for part in &self.0 {
            match part {
                TemplatePart::Text(text) => filled.push_str(text),
                TemplatePart::Column(column) => match row.get(column).ok_or_else(|| column.clone())? {
                    Value::String(text) => filled.push_str(text),
                    Value::Null => {}
                    other => filled.push_str(&other.to_string()),
                },
            }
        }
        Ok(filled)
    }
}

/// Repeats each row `weight` times; a fraction repeats that share of the rows, at equal distances.
pub fn weighted(rows: Vec<RawRow>, weight: f64) -> Vec<RawRow> {
    if weight == 1.0 {
        return rows;
    }
    let (whole, part) = (weight.floor(), weight.fract());
    let copies = |at: usize| {
        let extra = ((at + 1) as f64 * part).floor() > (at as f64 * part).floor();
        whole as usize + usize::from(extra)
    };
    let mut seen = Vec::new();
    for copy in 0..weight.ceil() as usize {
        seen.extend(rows.iter().enumerate().filter(|(at, _)| copies(*at) > copy).map(|(_, row)| row.clone()));
    }
    seen
}

/// Digest of the letters and digits of all texts of a row, in lower case. It is equal for rows that
/// differ only in case, spaces and punctuation.
pub(super) fn likeness(row: &Map<String, Value>) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    row.values().for_each(|value| add_letters(value, &mut hasher));
    let mut digest = [0; 16];
    digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    digest
}

fn add_letters(value: &Value, hasher: &mut blake3::Hasher) {
    match value {
        Value::String(text) => {
            let letters = text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase);
            hasher.update(letters.collect::<String>().as_bytes());
        }
        Value::Array(list) => list.iter().for_each(|value| add_letters(value, hasher)),
        Value::Object(map) => map.values().for_each(|value| add_letters(value, hasher)),
        Value::Number(number) => drop(hasher.update(number.to_string().as_bytes())),
        Value::Null | Value::Bool(_) => {}
    }
    hasher.update(b"\0");
}

/// Moves rows out of `sources`: a share of their rows if `size` is below 1, else `size` rows.
/// `seed` and the rows' texts select them; rows that are alike stay together.
///
/// # Errors
/// Fails with a user error if no row remains to train on.
pub fn hold_out(sources: &mut [DataFile], size: f64, seed: u64) -> Result<DataFile> {
    let rank_of = |row: &RawRow| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(&likeness(&row.value));
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        u64::from_be_bytes(bytes)
    };
    let mut places: Vec<u64> = sources.iter().flat_map(|source| source.rows.iter().map(rank_of)).collect();
    let all = places.len();
    let wanted = if size < 1.0 { (size * all as f64).round().max(1.0) as usize } else { size as usize };
    places.sort_unstable();
    // Rows that are alike have the same place.
    let chosen: HashSet<u64> = places.iter().take(wanted).copied().collect();
    let mut held_out = DataFile::default();
    for source in sources.iter_mut() {
        held_out.files.extend(source.files.iter().cloned());
        let (out, left) =
            std::mem::take(&mut source.rows).into_iter().partition(|row| chosen.contains(&rank_of(row)));
        source.rows = left;
        held_out.rows.extend::<Vec<RawRow>>(out);
    }
    if sources.iter().all(|source| source.rows.is_empty()) {
        return Err(Error::user(format!("`data.eval_split` is {size}, which leaves no row to train on"))
            .because(format!("the data set has {}", units::exact(all, "row")))
            .hint(
                "give a smaller share or number, or remove `data.eval_split` and give held-out rows with \
                 `--eval-dataset DATASET`",
            ));
    }
    let note = format!("{} of {all} rows, held out of the training rows", held_out.rows.len());
    held_out.notes.push(note);
    Ok(held_out)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::{Origin, RowOrigin};

    fn row(value: Value) -> RawRow {
        let origin = Origin { file: Arc::from(Path::new("a")), row: RowOrigin::Row(1) };
        RawRow { value: value.as_object().unwrap().clone(), origin, document: false, format: None }
    }

    #[test]
    fn weights_repeat_and_thin_out() {
        let rows = |weight| -> Vec<u64> {
            let rows = (0..4).map(|n| row(json!({"n": n}))).collect();
            weighted(rows, weight).iter().map(|row| row.value["n"].as_u64().unwrap()).collect()
        };
        assert_eq!(rows(1.0), [0, 1, 2, 3]);
        assert_eq!(rows(2.0), [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(rows(0.5), [1, 3]);
        assert_eq!(rows(1.25), [0, 1, 2, 3, 3]);
    }

    #[test]
    fn likeness_passes_over_case_space_and_punctuation() {
        let of = |value: Value| likeness(value.as_object().unwrap());
        assert_eq!(of(json!({"text": "The Elph, near."})), of(json!({"text": "the elph near"})));
        assert_ne!(of(json!({"text": "the elph"})), of(json!({"text": "the elps"})));
        assert_ne!(of(json!({"a": "x", "b": "y"})), of(json!({"a": "xy", "b": ""})));
    }

    #[test]
    fn rows_held_out_are_chosen_by_seed_and_text() {
        let source = || DataFile {
            rows: (0..100).map(|n| row(json!({"text": format!("row {}", n / 2)}))).collect(),
            ..DataFile::default()
        };
        let texts = |file: &DataFile| -> BTreeSet<String> {
            file.rows.iter().map(|row| row.value["text"].to_string()).collect()
        };
        for size in [0.1, 10.0] {
            let mut sources = [source()];
            let held_out = hold_out(&mut sources, size, 7).unwrap();
            assert_eq!((held_out.rows.len(), sources[0].rows.len()), (10, 90));
            // Two rows of one text stay together.
            assert!(texts(&held_out).is_disjoint(&texts(&sources[0])));
            let again = hold_out(&mut [source()], size, 7).unwrap();
            assert_eq!(texts(&again), texts(&held_out));
            let other = hold_out(&mut [source()], size, 8).unwrap();
            assert_ne!(texts(&other), texts(&held_out));
        }
        let error = hold_out(&mut [source()], 100.0, 7).unwrap_err();
        assert!(error.to_string().contains("leaves no row to train on"), "{error}");
        assert!(error.to_string().contains("remove `data.eval_split`"), "{error}");
    }

    #[test]
    fn prompts_are_made_of_columns() {
        let fill = |text: &str| {
            let template = PromptTemplate::parse(text).map_err(|error| error.to_string())?;
            template.fill(json!({"q": "2 + 2?", "n": 4, "none": null}).as_object().unwrap())
        };
        assert_eq!(fill("{{Q}}: {q} ({n}){none}"), Ok("{Q}: 2 + 2? (4)".to_owned()));
        assert_eq!(fill("{a}"), Err("a".to_owned()));
        assert!(fill("{q").unwrap_err().contains("a `{` without a `}`"));
        assert!(fill("q}").unwrap_err().contains("a `}` without a `{`"));
    }
}
