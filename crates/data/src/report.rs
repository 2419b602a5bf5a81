//! What a data set turned out to be: the figures and faults a person should see before hours of training.

use std::collections::BTreeMap;
use std::fmt;

use super::coverage::NoteCounts;
use super::encode::{EncodedRow, Encoding, Example};
use super::{BadRow, Origin, RowFault, RowFaultKind};
use crate::units;

/// Bad rows of one kind that are named.
const NAMED_ROWS: usize = 3;

/// The figures of a data set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DataReport {
    /// Number of files read.
    pub files: usize,
    /// Rows found, readable or not.
    pub rows: usize,
    /// Examples made of them.
    pub examples: usize,
    /// The format of the rows, and why they were taken to have it.
    pub why: String,
    /// What a person should know besides.
    pub notes: Vec<String>,
    /// Sentences on what tokenizer and chat template make of all rows.
    pub warnings: Vec<String>,
    /// Rows that cannot be used, by kind: how many, and the first of them.
    pub bad: BTreeMap<RowFaultKind, (usize, Vec<BadRow>)>,
    /// Rows left out because they are labelled as bad answers.
    pub left_out: usize,
    /// Rows cut to `max_seq_len`.
    pub truncated: usize,
    /// Those of them whose answer lost its end.
    pub cut_answers: usize,
    /// Rows left out for their length.
    pub dropped: usize,
    /// Rows left out because their answer begins where they are cut.
    pub cut_away: usize,
    /// Rows whose text was cut into several examples.
    pub chunked: usize,
    /// Tokens of the longest row before it was cut, and where it is.
    pub longest: Option<(usize, Origin)>,
    /// Tokens of all examples.
    pub tokens: u64,
    /// Tokens that are trained.
    pub trained_tokens: u64,
    /// Parts that the template does not print, and keys that nothing reads.
    pub note_counts: NoteCounts,
}

impl DataReport {
    /// Rows that cannot be used.
    pub fn num_bad(&self) -> usize {
        self.bad.values().map(|(count, _)| count).sum()
    }

    /// The first bad rows of each kind.
    pub fn first_bad(&self) -> impl Iterator<Item = &BadRow> {
        self.bad.values().flat_map(|(_, rows)| rows)
    }

    pub(super) fn add_bad(&mut self, origin: Origin, fault: RowFault) {
        let (count, rows) = self.bad.entry(fault.kind).or_default();
        *count += 1;
        if rows.len() < NAMED_ROWS {
            rows.push(BadRow { origin, fault });
        }
    }

    /// Counts what became of a row and hands back its examples.
    pub(super) fn add(&mut self, row: EncodedRow, origin: &Origin) -> Vec<Example> {
        self.note_counts.add(row.notes, origin);
        let (examples, was) = match row.encoding {
            Encoding::Examples(examples) => {
                self.chunked += usize::from(examples.len() > 1);
                let was = examples.iter().map(|example| example.ids.len()).sum();
                (examples, was)
            }
            Encoding::Truncated { example, was, lost_answer } => {
                self.truncated += 1;
                self.cut_answers += usize::from(lost_answer);
                (vec![example], was)
            }
            Encoding::Dropped { was } => {
                self.dropped += 1;
                (Vec::new(), was)
            }
            Encoding::CutAway { was } => {
                self.cut_away += 1;
                (Vec::new(), was)
            }
            Encoding::LeftOut => {
                self.left_out += 1;
                return Vec::new();
            }
        };
        if self.longest.as_ref().is_none_or(|(longest, _)| was > *longest) {
            self.longest = Some((was, origin.clone()));
        }
        for example in &examples {
            self.examples += 1;
            self.tokens += example.ids.len() as u64;
            self.trained_tokens += example.num_trained() as u64;
        }
        examples
    }
}

impl DataReport {
    /// A line for each reason for which rows are left out or cut into several examples.
    fn write_left_out(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The words for one row, and for more.
        let counts = [
            (self.dropped, "row", ["dropped for its length", "dropped for their length"]),
            (
                self.cut_away,
                "row",
                [
                    "left out: its answer begins after data.max_seq_len tokens",
                    "left out: their answer begins after data.max_seq_len tokens",
                ],
            ),
            (self.chunked, "text", ["cut into chunks"; 2]),
            (self.left_out, "row", ["left out for its label", "left out for their label"]),
        ];
        for (count, what, [of_one, of_more]) in counts.into_iter().filter(|(count, ..)| *count > 0) {
            let words = if count == 1 { of_one } else { of_more };
            write!(f, "\n{} {words}", units::exact(count, what))?;
        }
        Ok(())
    }
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rows, files) = (units::exact(self.rows, "row"), units::exact(self.files, "file"));
        writeln!(f, "{rows} in {files}, {}", self.why)?;
        for note in &self.notes {
            writeln!(f, "  {note}")?;
        }
        let share = 100.0 * self.trained_tokens as f64 / (self.tokens as f64).max(1.0);
        write!(
            f,
            "{}, {}, {} of them trained ({share:.0} %)",
            units::exact(self.examples, "example"),
            units::counted(self.tokens as usize, "token"),
            units::count(self.trained_tokens)
        )?;
        if let Some((longest, origin)) = &self.longest {
            write!(f, "\nlongest row: {} ({origin})", units::exact(*longest, "token"))?;
        }
        if self.truncated > 0 {
            write!(f, "\n{} cut to data.max_seq_len", units::exact(self.truncated, "row"))?;
        }
        match (self.cut_answers, self.truncated) {
            (0, _) => {}
            (_, 1) => f.write_str(", within the answer, whose end it does not teach")?,
            (cut, _) => write!(f, ", {cut} of them within the answer, whose end they do not teach")?,
        }
        self.write_left_out(f)?;
        for warning in &self.warnings {
            write!(f, "\nwarning: {warning}")?;
        }
        write!(f, "{}", self.note_counts)?;
        for (kind, (count, rows)) in &self.bad {
            write!(f, "\n{}: {kind}", units::exact(*count, "bad row"))?;
            for row in rows {
                write!(f, "\n  {row}")?;
            }
        }
        Ok(())
    }
}
