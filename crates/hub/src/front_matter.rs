//! Reads the `configs` of a data set's README.md, whose front matter is YAML.

use std::fmt;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, de::DeserializeSeed};
use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{MessageFormatter as _, UserMessageFormatter};

/// A configuration as README.md lists it. A key without a value counts as absent.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct ListedConfig {
    pub(super) config_name: Option<String>,
    #[serde(deserialize_with = "is_true")]
    pub(super) default: bool,
    pub(super) data_dir: Option<String>,
    pub(super) data_files: Option<DataFiles>,
}

/// Patterns of file names, each with its split if it has one.
#[derive(Debug, PartialEq)]
pub(super) struct DataFiles(pub(super) Vec<(Option<String>, String)>);

/// Returns true for the words that YAML 1.1 reads as true, also in quotes.
fn is_true<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let word = Option::<String>::deserialize(deserializer)?.map(|word| word.to_ascii_lowercase());
    Ok(matches!(word.as_deref(), Some("true" | "yes" | "on")))
}

impl<'de> Deserialize<'de> for DataFiles {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<DataFiles, D::Error> {
        Part::DataFiles.deserialize(deserializer).map(DataFiles)
    }
}

/// The parts of `data_files` that have several forms. Derived untagged enums would turn numbers
/// into text that differs from the file's: `1.10` into `1.1`.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    DataFiles,
    /// An element of the list `data_files`.
    Entry,
    /// The patterns of one split.
    Path,
}

impl<'de> DeserializeSeed<'de> for Part {
    type Value = Vec<(Option<String>, String)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Part {
    type Value = Vec<(Option<String>, String)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Part::DataFiles => {
                "a pattern, a list of patterns, a list of `split` and `path`, or patterns by split"
            }
            Part::Entry => "a pattern, or `split` and `path`",
            Part::Path => "a pattern or a list of patterns",
        })
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_str<E>(self, pattern: &str) -> Result<Self::Value, E> {
        Ok(vec![(None, pattern.to_owned())])
    }

    fn visit_bool<E>(self, pattern: bool) -> Result<Self::Value, E> {
        Ok(vec![(None, pattern.to_string())])
    }

    fn visit_i64<E>(self, pattern: i64) -> Result<Self::Value, E> {
        Ok(vec![(None, pattern.to_string())])
    }

    fn visit_u64<E>(self, pattern: u64) -> Result<Self::Value, E> {
        Ok(vec![(None, pattern.to_string())])
    }

    fn visit_f64<E>(self, pattern: f64) -> Result<Self::Value, E> {
        Ok(vec![(None, pattern.to_string())])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let item = match self {
            Part::DataFiles => Part::Entry,
            Part::Path => Part::Path,
            Part::Entry => return Err(A::Error::invalid_type(Unexpected::Seq, &self)),
        };
        let mut all = Vec::new();
        while let Some(patterns) = items.next_element_seed(item)? {
            all.extend(patterns);
        }
        Ok(all)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Self::Value, A::Error> {
        if self == Part::Path {
            return Err(A::Error::invalid_type(Unexpected::Map, &self));
        }
        let of = |split: Option<String>, patterns: Self::Value| {
            patterns.into_iter().map(move |(_, pattern)| (split.clone(), pattern))
        };
        let (mut all, mut split, mut path) = (Vec::new(), None, None);
        while let Some(key) = pairs.next_key::<String>()? {
            match (self, key.as_str()) {
                (Part::Entry, "split") => split = pairs.next_value::<Option<String>>()?,
                (Part::Entry, "path") => path = Some(pairs.next_value_seed(Part::Path)?),
                (Part::Entry, _) => drop(pairs.next_value::<IgnoredAny>()?),
                _ => all.extend(of(Some(key), pairs.next_value_seed(Part::Path)?)),
            }
        }
        if self == Part::Entry {
            all.extend(of(split, path.ok_or_else(|| A::Error::missing_field("path"))?));
        }
        Ok(all)
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
/// The lines of `configs` are not YAML or have another form, with the line. Anchors of other keys
/// are unknown there.
pub(super) fn configs(readme: &str) -> Result<Vec<ListedConfig>, String> {
    let readme = readme.trim_start_matches('\u{feff}');
    let mut lines = readme.split_inclusive('\n');
    if lines.next().is_none_or(|first| first.trim_end() != "---") {
        return Ok(Vec::new());
    }
    // Other keys need not be valid. Their empty lines keep the numbers of lines.
    let mut is_inside = false;
    let of_configs = lines.take_while(|line| line.trim_end() != "---").map(|line| {
        if !line.starts_with(|c: char| c.is_whitespace() || "-#[]{},".contains(c)) {
            is_inside = line.starts_with("configs:");
        }
        if is_inside { line } else { "\n" }
    });
    let yaml = format!("\n{}", of_configs.collect::<String>());
    if yaml.trim().is_empty() {
        return Ok(Vec::new());
    }
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
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        budget: serde_saphyr::budget! { max_nodes: 2_000_000, max_events: 4_000_000 },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data_files(patterns: &[(&str, &str)]) -> DataFiles {
        let split = |split: &str| (!split.is_empty()).then(|| split.to_owned());
        DataFiles(patterns.iter().map(|(of, pattern)| (split(of), (*pattern).to_owned())).collect())
    }

    fn config(name: &str, patterns: &[(&str, &str)]) -> ListedConfig {
        let data_files = Some(data_files(patterns));
        ListedConfig { config_name: Some(name.to_owned()), data_files, ..ListedConfig::default() }
    }

    #[test]
    fn what_the_tools_of_the_hub_write() {
        let readme = "---\nlicense: mit\ndataset_info:\n- config_name: x\n  features:\n  - name: a\n    dtype: string\nconfigs:\n\
            - config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n\
            - config_name: socratic\n  default: true\n  data_files:\n  - split: train\n    path:\n    - a/*.parquet\n    - 'b #1.parquet'\n\
            tags:\n- math\n---\n# configs:\n- config_name: no\n";
        let socratic = config("socratic", &[("train", "a/*.parquet"), ("train", "b #1.parquet")]);
        let expected = vec![
            config("main", &[("train", "main/train-*"), ("test", "main/test-*")]),
            ListedConfig { default: true, ..socratic },
        ];
        assert_eq!(configs(readme), Ok(expected));
    }

    #[test]
    fn what_people_write() {
        let readme = "---\nconfigs: # two\n  - config_name: \"a\"\n    data_files: [\"x.csv\", 'y.csv'] # both\n\n  -\n    config_name: 1.0\n    data_files: \"*.jsonl\"\n\
            \x20 - {config_name: c, data_files: {train: [x.csv,\n     y.csv], test: z.csv}}\n---\n";
        let expected = vec![
            config("a", &[("", "x.csv"), ("", "y.csv")]),
            config("1.0", &[("", "*.jsonl")]),
            config("c", &[("train", "x.csv"), ("train", "y.csv"), ("test", "z.csv")]),
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
    fn a_key_without_a_value_counts_as_absent() {
        for (keys, expected) in [
            ("config_name:\n  default:\n  data_dir:\n  data_files:", ListedConfig::default()),
            ("config_name: a\n  data_files:\n  - split: ~\n    path: [b, null]", config("a", &[("", "b")])),
            ("config_name: a\n  data_files: {train: , test: b}", config("a", &[("test", "b")])),
        ] {
            assert_eq!(configs(&format!("---\nconfigs:\n- {keys}\n---\n")), Ok(vec![expected]), "{keys}");
        }
    }

    #[test]
    fn numbers_are_text() {
        for (keys, expected) in [
            ("- {split: 2019, path: a}\n   - {split: 1.10, path: b}", vec![("2019", "a"), ("1.10", "b")]),
            (
                "- {split: true, path: 7}\n   - {path: [-7, 1.5]}",
                vec![("true", "7"), ("", "-7"), ("", "1.5")],
            ),
            ("{2019: a, 007: .inf}", vec![("2019", "a"), ("007", ".inf")]),
            ("2019", vec![("", "2019")]),
            ("[2019, true]", vec![("", "2019"), ("", "true")]),
        ] {
            let readme = format!("---\nconfigs:\n- config_name: 1.0\n  data_files:\n   {keys}\n---\n");
            assert_eq!(configs(&readme), Ok(vec![config("1.0", &expected)]), "{keys}");
        }
    }

    #[test]
    fn true_is_the_default_also_in_quotes() {
        for (value, default) in
            [("true", true), ("\"true\"", true), ("yes", true), ("false", false), ("1", false)]
        {
            let expected = ListedConfig { default, ..ListedConfig::default() };
            assert_eq!(
                configs(&format!("---\nconfigs:\n- default: {value}\n---\n")),
                Ok(vec![expected]),
                "{value}"
            );
        }
    }

    #[test]
    fn faults_of_other_keys_do_not_matter() {
        let block = "configs: [\n{config_name: a, data_files: [b,\n# both\n c]}\n]\n";
        for other in
            ["pretty_name: Foo: Bar\n", "tags: a\ntags: b\n", "a: [\n", "a: \"b\n", "b: *c\n", "'a': @b\n"]
        {
            for readme in [format!("---\n{other}{block}---\n"), format!("---\n{block}\n{other}---\n")] {
                assert_eq!(configs(&readme), Ok(vec![config("a", &[("", "b"), ("", "c")])]), "{readme}");
            }
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
            ("configs:\n- config_name: a\n  data_files:\n  - [b]", 5),
            ("configs:\n- config_name: a\n  data_files:\n    train: {b: c}", 5),
            ("a: b: c\r\n\nconfigs:\n- a", 5),
            ("configs:\na: b\nconfigs:", 4),
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
        let mut laughs = "---\nconfigs:\n- a0: &a0 [lol, lol]\n".to_owned();
        for n in 1..60 {
            laughs += &format!("  a{n}: &a{n} [*a{0}, *a{0}]\n", n - 1);
        }
        let error = configs(&format!("{laughs}---\n")).unwrap_err();
        assert!(error.contains("total_replayed_events"), "{error}");
    }
}
