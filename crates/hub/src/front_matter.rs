//! Reads the `configs` of a data set's README.md, whose front matter is YAML.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::{MessageFormatter as _, UserMessageFormatter};

/// A configuration as README.md lists it.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct ListedConfig {
    pub(super) config_name: Option<String>,
    pub(super) default: bool,
    pub(super) data_dir: String,
    pub(super) data_files: Option<DataFiles>,
}

/// The files of a configuration.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(
    untagged,
    expecting = "`data_files` is not a pattern, a list of patterns, a list of `split` and `path`, or \
                 patterns by split"
)]
pub(super) enum DataFiles {
    /// Files without a split.
    Unnamed(Patterns),
    /// An entry per split.
    Entries(Vec<SplitEntry>),
    /// Patterns by the name of their split.
    BySplit(BTreeMap<String, Patterns>),
}

/// The files of one split.
#[derive(Debug, PartialEq, Deserialize)]
pub(super) struct SplitEntry {
    split: Option<String>,
    path: Patterns,
}

/// Patterns of file names.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Patterns {
    One(String),
    Many(Vec<String>),
}

impl DataFiles {
    /// Returns the name of each split, if it has one, and its patterns.
    pub(super) fn splits(&self) -> Vec<(Option<&str>, &[String])> {
        match self {
            DataFiles::Unnamed(patterns) => vec![(None, patterns.as_slice())],
            DataFiles::Entries(entries) => {
                entries.iter().map(|entry| (entry.split.as_deref(), entry.path.as_slice())).collect()
            }
            DataFiles::BySplit(splits) => {
                splits.iter().map(|(split, paths)| (Some(split.as_str()), paths.as_slice())).collect()
            }
        }
    }
}

impl Patterns {
    fn as_slice(&self) -> &[String] {
        match self {
            Patterns::One(pattern) => std::slice::from_ref(pattern),
            Patterns::Many(patterns) => patterns,
        }
    }
}

#[derive(Deserialize)]
struct FrontMatter {
    configs: Option<Vec<ListedConfig>>,
}

/// Returns the value of the top-level key `configs` of a README.md; empty without front matter or
/// such a key.
///
/// # Errors
/// The front matter is not YAML, or `configs` has another form, with the line.
pub(super) fn configs(readme: &str) -> Result<Vec<ListedConfig>, String> {
    let readme = readme.trim_start_matches('\u{feff}');
    let mut lines = readme.split_inclusive('\n');
    if lines.next().is_none_or(|first| first.trim_end() != "---") {
        return Ok(Vec::new());
    }
    let block: Vec<&str> = lines.take_while(|line| line.trim_end() != "---").collect();
    // Front matter without `configs` need not be valid.
    if !block.iter().any(|line| line.starts_with("configs:")) {
        return Ok(Vec::new());
    }
    // Its first line keeps the numbers of lines.
    let yaml = format!("---\n{}", block.concat());
    let front: FrontMatter = serde_saphyr::from_str_with_options(&yaml, options()).map_err(|error| {
        let line = error.location().map_or(1, |location| location.line());
        format!("line {line}: {}", UserMessageFormatter.format_message(error.without_snippet()))
    })?;
    Ok(front.configs.unwrap_or_default())
}

/// Limits for cards of unknown origin: nesting is bounded, and aliases cannot multiply the size.
/// The most nodes are ten times those of long cards, which describe a thousand configurations.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        with_snippet: false,
        budget: serde_saphyr::budget! { max_nodes: 2_000_000, max_events: 4_000_000 },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(split: &str, path: Patterns) -> SplitEntry {
        SplitEntry { split: Some(split.to_owned()), path }
    }

    fn one(pattern: &str) -> Patterns {
        Patterns::One(pattern.to_owned())
    }

    fn many(patterns: &[&str]) -> Patterns {
        Patterns::Many(patterns.iter().map(|pattern| (*pattern).to_owned()).collect())
    }

    fn config(name: &str, data_files: DataFiles) -> ListedConfig {
        ListedConfig {
            config_name: Some(name.to_owned()),
            data_files: Some(data_files),
            ..ListedConfig::default()
        }
    }

    #[test]
    fn what_the_tools_of_the_hub_write() {
        let readme = "---\nlicense: mit\ndataset_info:\n- config_name: x\n  features:\n  - name: a\n    dtype: string\nconfigs:\n\
            - config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n\
            - config_name: socratic\n  default: true\n  data_files:\n  - split: train\n    path:\n    - a/*.parquet\n    - 'b #1.parquet'\n\
            tags:\n- math\n---\n# configs:\n- config_name: no\n";
        let main = [entry("train", one("main/train-*")), entry("test", one("main/test-*"))];
        let socratic = [entry("train", many(&["a/*.parquet", "b #1.parquet"]))];
        let expected = vec![
            config("main", DataFiles::Entries(main.into())),
            ListedConfig { default: true, ..config("socratic", DataFiles::Entries(socratic.into())) },
        ];
        assert_eq!(configs(readme), Ok(expected));
    }

    #[test]
    fn what_people_write() {
        let readme = "---\nconfigs: # two\n  - config_name: \"a\"\n    data_files: [\"x.csv\", 'y.csv'] # both\n\n  -\n    config_name: 1.0\n    data_files: \"*.jsonl\"\n\
            \x20 - {config_name: c, data_files: {train: [x.csv,\n     y.csv], test: z.csv}}\n---\n";
        let by_split = [("train", many(&["x.csv", "y.csv"])), ("test", one("z.csv"))];
        let by_split = by_split.map(|(split, patterns)| (split.to_owned(), patterns));
        let expected = vec![
            config("a", DataFiles::Unnamed(many(&["x.csv", "y.csv"]))),
            config("1.0", DataFiles::Unnamed(one("*.jsonl"))),
            config("c", DataFiles::BySplit(by_split.into())),
        ];
        assert_eq!(configs(readme), Ok(expected));
        for none in [
            "",
            "# title\n",
            "---\nlicense: mit\n---\n",
            "---\nlicense: [\n---\n",
            "---\nconfigs:\n---\n",
            "text\n---\nconfigs:\n- a\n---\n",
        ] {
            assert_eq!(configs(none), Ok(Vec::new()), "{none:?}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_line() {
        for (block, line) in [
            ("configs:\n- {config_name: a", 3),
            ("configs:\n  config_name: a", 3),
            ("configs:\n- a", 3),
            ("configs:\n- config_name: a\n      data_files: b", 4),
            ("configs:\n- config_name: a\n  config_name: b", 4),
            ("configs:\n- config_name: a\n  data_files:\n  - split: train", 5),
            ("configs:\n- config_name: a\n  data_files: *unknown", 4),
        ] {
            let error = configs(&format!("---\n{block}\n---\n")).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")), "{block:?}: {error}");
        }
    }

    #[test]
    fn a_small_card_does_not_need_much_memory_or_time() {
        let deep = format!("---\nconfigs: {}\n---\n", "[".repeat(100_000));
        let error = configs(&deep).unwrap_err();
        assert!(error.starts_with("line 2: "), "{error}");
        let mut laughs = "---\na0: &a0 [lol, lol]\n".to_owned();
        for n in 1..60 {
            laughs += &format!("a{n}: &a{n} [*a{0}, *a{0}]\n", n - 1);
        }
        let error = configs(&format!("{laughs}configs:\n---\n")).unwrap_err();
        assert!(error.contains("total_replayed_events"), "{error}");
    }
}
