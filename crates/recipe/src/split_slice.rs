//! A split of a data set and the range of its rows to read, in the notation of Hugging Face
//! datasets: `train[:1000]`, `train[10%:20%]`, `[-5%:]`.

use std::fmt;
use std::ops::Range;

/// The name of a split, a range of its rows, or both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitSlice {
    /// Name of the split; none: the default one for the purpose.
    pub name: Option<String>,
    /// Range of rows; none: all.
    rows: Option<[Option<RowBound>; 2]>,
}

/// A bound of a range of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowBound {
    /// Number of rows from the first, or from the last if negative.
    Rows(i64),
    /// Percentage of all rows, with the same sign rule.
    Percent(i64),
}

impl SplitSlice {
    /// Reads a name, a range in brackets, or both.
    ///
    /// # Errors
    /// The reason why the text is invalid.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let why = || {
            format!(
                "`{text}` is not a split; accepted: a name, or rows such as train[:1000] and train[10%:20%]"
            )
        };
        let Some((name, rest)) = text.split_once('[') else {
            return if text.is_empty() {
                Err(why())
            } else {
                Ok(SplitSlice { name: Some(text.into()), rows: None })
            };
        };
        let (from, to) = rest.strip_suffix(']').and_then(|part| part.split_once(':')).ok_or_else(why)?;
        let bound = |text: &str| RowBound::parse(text).ok_or_else(why);
        let name = (!name.is_empty()).then(|| name.to_owned());
        Ok(SplitSlice { name, rows: Some([bound(from)?, bound(to)?]) })
    }

    /// Range of the rows to read out of `all` rows; none: all of them.
    pub fn rows(&self, all: usize) -> Option<Range<usize>> {
        let [from, to] = self.rows?.map(|bound| bound.map(|bound| bound.row_index(all)));
        let from = from.unwrap_or(0);
        Some(from..to.unwrap_or(all).max(from))
    }
}

impl fmt::Display for SplitSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name.as_deref().unwrap_or_default())?;
        let Some(bounds) = self.rows else { return Ok(()) };
        let [from, to] = bounds.map(|bound| match bound {
            None => String::new(),
            Some(RowBound::Rows(rows)) => rows.to_string(),
            Some(RowBound::Percent(percent)) => format!("{percent}%"),
        });
        write!(f, "[{from}:{to}]")
    }
}

impl RowBound {
    /// Parses a bound: `Some(None)` for an empty text, `None` for an invalid one.
    fn parse(text: &str) -> Option<Option<Self>> {
        let text = text.trim();
        match text.strip_suffix('%') {
            _ if text.is_empty() => Some(None),
            Some(percent) => {
                let percent = percent.trim().parse().ok().filter(|percent| (-100..=100).contains(percent));
                Some(Some(RowBound::Percent(percent?)))
            }
            None => Some(Some(RowBound::Rows(text.parse().ok()?))),
        }
    }

    /// Row index of this bound out of `all` rows; a percentage rounds half to even, as in
    /// `datasets`.
    fn row_index(self, all: usize) -> usize {
        let rows = match self {
            RowBound::Rows(rows) => rows as f64,
            RowBound::Percent(percent) => (percent as f64 * all as f64 / 100.0).round_ties_even(),
        };
        let from_end = if rows < 0.0 { all as f64 } else { 0.0 };
        (rows + from_end).clamp(0.0, all as f64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges of 1,005 rows by the rules of `datasets.ReadInstruction.from_spec`.
    #[test]
    fn rows_are_those_of_datasets() {
        let rows = |text: &str| SplitSlice::parse(text).unwrap().rows(1005);
        assert_eq!(rows("train"), None);
        assert_eq!(rows("train[:1000]"), Some(0..1000));
        assert_eq!(rows("train[:5%]"), Some(0..50));
        assert_eq!(rows("train[50%:]"), Some(502..1005));
        assert_eq!(rows("[10%:20%]"), Some(100..201));
        assert_eq!(rows("[-5%:]"), Some(955..1005));
        assert_eq!(rows("[-10:-5]"), Some(995..1000));
        assert_eq!(rows("[:]"), Some(0..1005));
        assert_eq!(rows("[20:10]"), Some(20..20));
        assert_eq!(rows("[:9999]"), Some(0..1005));
    }

    #[test]
    fn a_split_is_written_as_it_is_read() {
        for text in ["train", "train[:5%]", "[-10:-5]", "validation[10%:]"] {
            assert_eq!(SplitSlice::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "train[", "train[5]", "train[a:]", "train[:101%]", "train[:5%] x"] {
            assert!(SplitSlice::parse(text).unwrap_err().contains("is not a split"), "{text}");
        }
    }
}
