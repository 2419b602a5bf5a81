//! A data set and the selection of its rows: an entry of `data.train` or `data.eval`.
//!
//! An entry is a text (a path or a hub id, with an optional `?key=value&...`) or a table. In a
//! text, a key that no table has names a column: `odd.csv?prompt=question` reads `prompt` from the
//! column `question`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use toml::{Table, Value};

use super::enums::DataFormat;
use super::source::DataSource;
use super::split_slice::SplitSlice;
use super::value::{Setting, ValueRefusal, read_list};

/// Keys of a table, in writing order.
pub(super) const KEYS: [&str; 8] =
    ["path", "format", "columns", "prompt_template", "system", "weight", "limit", "split"];

/// A data set and the selection of its rows.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSource {
    /// Location of the data set.
    pub path: DataSource,
    /// Format of its rows; `None`: `data.format`.
    pub format: Option<DataFormat>,
    /// Column names of the file, by the key of the format that each replaces.
    pub columns: BTreeMap<String, String>,
    /// Template of the prompt, with `{column}` for values.
    pub prompt_template: Option<String>,
    /// System message of rows without one.
    pub system: Option<String>,
    /// Times that an epoch uses each row; 0.5 uses every other row.
    pub weight: f64,
    /// Maximum number of rows to read, from the first.
    pub limit: Option<usize>,
    /// Split to read, such as "validation", or a part of it, such as "train[:5%]".
    pub split: Option<SplitSlice>,
}

impl From<DataSource> for RowSource {
    fn from(path: DataSource) -> Self {
        RowSource {
            path,
            format: None,
            columns: BTreeMap::new(),
            prompt_template: None,
            system: None,
            weight: 1.0,
            limit: None,
            split: None,
        }
    }
}

impl fmt::Display for RowSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(f)
    }
}

impl RowSource {
    /// The table for a text: its keys follow `?`.
    fn parse(text: &str, folder: &Path) -> Result<Self, ValueRefusal> {
        let whole_is_there = folder.join(text).exists();
        let Some((path, keys)) = text.split_once('?').filter(|_| !whole_is_there) else {
            return DataSource::parse(text, folder).map(Self::from);
        };
        let (mut table, mut columns) = (Table::new(), Table::new());
        table.insert(KEYS[0].into(), path.into());
        for pair in keys.split('&') {
            let Some((key, value)) = pair.split_once('=') else {
                let why = format!("`{pair}` after `?` is not `key=value`");
                return Err(ValueRefusal::Unusable(why));
            };
            let number = value.parse::<i64>().map(Value::Integer).or(value.parse::<f64>().map(Value::Float));
            match key {
                "weight" | "limit" => {
                    table.insert(key.into(), number.unwrap_or_else(|_| value.into()));
                }
                key if KEYS[1..].contains(&key) && key != "columns" => {
                    table.insert(key.into(), value.into());
                }
                key => {
                    columns.insert(key.into(), value.into());
                }
            }
        }
        table.insert("columns".into(), Value::Table(columns));
        Self::read_table(&table, folder)
    }

    fn read_table(table: &Table, folder: &Path) -> Result<Self, ValueRefusal> {
        if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(unusable(format!("unknown key `{unknown}`; accepted: {}", KEYS.join(", "))));
        }
        let path = table.get("path").ok_or_else(|| unusable("it has no `path`".into()))?;
        let path = key("path", DataSource::read(path, folder), DataSource::accepted())?;
        let text = |name: &str| -> Result<Option<String>, ValueRefusal> {
            let read =
                table.get(name).map(|value| key(name, String::read(value, folder), String::accepted()));
            read.transpose()
        };
        let format = table.get("format").map(|value| DataFormat::read(value, folder)).transpose();
        let format = key("format", format, DataFormat::accepted())?;
        let weight: Option<f64> = above_zero(table, "weight", "a number above 0", folder)?;
        let limit = above_zero(table, "limit", "a whole number from 1", folder)?;
        Ok(RowSource {
            path,
            format,
            columns: columns(table.get("columns"))?,
            prompt_template: text("prompt_template")?,
            system: text("system")?,
            weight: weight.unwrap_or(1.0),
            limit,
            split: text("split")?.map(|split| SplitSlice::parse(&split).map_err(unusable)).transpose()?,
        })
    }
}

fn unusable(why: String) -> ValueRefusal {
    ValueRefusal::Unusable(why)
}

/// Value of the key `name`, or a refusal that names the key.
fn key<T>(name: &str, read: Result<T, ValueRefusal>, accepted: String) -> Result<T, ValueRefusal> {
    read.map_err(|refusal| match refusal {
        ValueRefusal::Unusable(why) => unusable(format!("its `{name}`: {why}")),
        _ => unusable(format!("its `{name}` is not accepted; accepted: {accepted}")),
    })
}

/// Value of the key `name`, which is a number above 0.
fn above_zero<T: Setting>(
    table: &Table,
    name: &str,
    accepted: &str,
    folder: &Path,
) -> Result<Option<T>, ValueRefusal> {
    let Some(value) = table.get(name) else { return Ok(None) };
    let read = T::read(value, folder).ok().filter(|number| number.numbers().iter().all(|n| *n > 0.0));
    let refused = || unusable(format!("its `{name}` is not accepted; accepted: {accepted}"));
    read.map(Some).ok_or_else(refused)
}

/// Reads the table of column names by key.
fn columns(value: Option<&Value>) -> Result<BTreeMap<String, String>, ValueRefusal> {
    let refused =
        || unusable("its `columns` is not a table of names, such as { prompt = \"question\" }".into());
    let Some(value) = value else { return Ok(BTreeMap::new()) };
    let table = value.as_table().ok_or_else(refused)?;
    let column = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    table.iter().map(|entry| column(entry).ok_or_else(refused)).collect()
}

impl Setting for RowSource {
    fn accepted() -> String {
        "a path, a hub id, either with ?key=value&... after it, a table with `path`".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value {
            Value::Table(table) => Self::read_table(table, folder),
            value => Self::parse(value.as_str().ok_or(ValueRefusal::Shape)?, folder),
        }
    }

    fn write(&self) -> Option<Value> {
        if *self == RowSource::from(self.path.clone()) {
            return self.path.write();
        }
        let mut table = Table::new();
        table.insert("path".into(), self.path.write()?);
        let columns = self.columns.iter().map(|(key, column)| (key.clone(), Value::from(column.as_str())));
        let values = [
            ("format", self.format.write()),
            ("columns", (!self.columns.is_empty()).then(|| Value::Table(columns.collect()))),
            ("prompt_template", self.prompt_template.write()),
            ("system", self.system.write()),
            ("weight", (self.weight != 1.0).then_some(Value::Float(self.weight))),
            ("limit", self.limit.write()),
            ("split", self.split.as_ref().map(|split| Value::from(split.to_string()))),
        ];
        table.extend(values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        Some(Value::Table(table))
    }
}

impl Setting for Vec<RowSource> {
    fn accepted() -> String {
        "a list of paths, hub ids and tables such as { path = \"a.csv\", columns = { prompt = \"question\" }, limit = 1000 }".into()
    }

    /// Reads a list, or one text or table as a list of one, so that `--set data.train=rows.jsonl`
    /// works.
    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value {
            Value::Array(list) => read_list(list, folder),
            Value::String(_) | Value::Table(_) => RowSource::read(value, folder).map(|source| vec![source]),
            _ => Err(ValueRefusal::Shape),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.iter().filter_map(Setting::write).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<RowSource, ValueRefusal> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.csv"), "").unwrap();
        let table: Table = format!("key = {text}").parse().unwrap();
        RowSource::read(&table["key"], folder.path())
    }

    #[test]
    fn the_short_form_says_the_same_as_the_table() {
        let short = read(
            r#""a.csv?prompt=question&completion=answer_text&limit=10&weight=0.5&format=prompt_completion""#,
        );
        let table = r#"{ path = "a.csv", format = "prompt_completion", weight = 0.5, limit = 10,
            columns = { prompt = "question", completion = "answer_text" } }"#;
        let (short, table) = (short.unwrap(), read(&table.replace('\n', " ")).unwrap());
        assert_eq!(RowSource { path: table.path.clone(), ..short }, table);
        let again = RowSource::read(&table.write().unwrap(), Path::new("/"));
        assert!(matches!(again, Err(ValueRefusal::Unusable(_))), "the folder is gone");
        let hub = read(r#"{ path = "owner/name", split = "test", system = "s", prompt_template = "{a}" }"#)
            .unwrap();
        assert_eq!(RowSource::read(&hub.write().unwrap(), Path::new("/")).unwrap(), hub);
        assert_eq!(read(r#""owner/name""#).unwrap().write(), Some(Value::from("owner/name")));
    }

    #[test]
    fn other_keys_and_values_are_refused() {
        let why = |text: &str| match read(text) {
            Err(ValueRefusal::Unusable(why)) => why,
            read => panic!("{read:?}"),
        };
        assert!(why(r#"{ path = "a.csv", rows = 3 }"#).starts_with("unknown key `rows`; accepted: path"));
        assert_eq!(why(r#"{ limit = 3 }"#), "it has no `path`");
        assert!(why(r#""a.csv?limit=0""#).contains("a whole number from 1"));
        assert!(why(r#""a.csv?limit""#).contains("is not `key=value`"));
        assert!(
            why(r#"{ path = "a.csv", format = "csv" }"#)
                .starts_with("its `format` is not accepted; accepted: \"auto\"")
        );
        assert!(why(r#"{ path = "b.csv" }"#).starts_with("its `path`: no such file or folder: "));
        assert!(why(r#"{ path = "a.csv", columns = ["a"] }"#).contains("not a table of names"));
    }
}
