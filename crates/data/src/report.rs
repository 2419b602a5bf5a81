//! Report on a data set: figures and faults for the user to see before hours of training.

use std::collections::BTreeMap;
use std::fmt;

use super::coverage::NoteCounts;
use super::encode::{EncodedRow, Encoding};
use super::role::Role;
use super::{BadRow, Origin, RowFault, RowFaultKind};
use crate::units;

/// Number of bad rows of each kind that the report names.
const NAMED_ROWS: usize = 3;

/// The figures of a data set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DataReport {
    /// Number of files read.
    pub files: usize,
    /// Number of rows, readable or not.
    pub rows: usize,
    /// Number of examples made of the rows.
    pub examples: usize,
    /// The format of the rows, and the reason for it.
    pub why: String,
    /// True if a chat template renders the rows of a format.
    pub rendered: bool,
    /// Further notes for the user.
    pub notes: Vec<String>,
    /// Warnings on the tokenizer and the chat template, for all rows.
    pub warnings: Vec<String>,
    /// Rows that cannot be used, by kind: their number, and the first of them.
    pub bad: BTreeMap<RowFaultKind, (usize, Vec<BadRow>)>,
    /// Number of rows skipped because their label marks a bad answer.
    pub left_out: usize,
    /// Number of rows cut to `max_seq_len`.
    pub truncated: usize,
    /// Number of cut rows whose answer lost its end.
    pub cut_answers: usize,
    /// Number of rows skipped for their length.
    pub dropped: usize,
    /// Number of rows skipped because their answer begins after the cut.
    pub cut_away: usize,
    /// Number of rows whose text was cut into several examples.
    pub chunked: usize,
    /// Number of tokens of the longest row before any cut, and its position.
    pub longest: Option<(usize, Origin)>,
    /// Number of tokens of all examples.
    pub tokens: u64,
    /// Number of trained tokens.
    pub trained_tokens: u64,
    /// Number of examples of each [role](super::Role) but the plain one, by its name.
    pub roles: BTreeMap<String, usize>,
    /// Parts that the template does not print, and keys that nothing reads.
    pub note_counts: NoteCounts,
}

impl DataReport {
    /// Number of rows that cannot be used.
    pub fn num_bad(&self) -> usize {
        self.bad.values().map(|(count, _)| count).sum()
    }

    /// The first bad rows of each kind.
    pub(crate) fn first_bad(&self) -> impl Iterator<Item = &BadRow> {
        self.bad.values().flat_map(|(_, rows)| rows)
    }

    pub(super) fn add_bad(&mut self, origin: Origin, fault: RowFault) {
        let (count, rows) = self.bad.entry(fault.kind).or_default();
        *count += 1;
        if rows.len() < NAMED_ROWS {
            rows.push(BadRow { origin, fault });
        }
    }

    /// Counts the result of a row and returns it.
    pub(super) fn add(&mut self, row: EncodedRow, origin: &Origin) -> Encoding {
        self.note_counts.add(row.notes, origin);
        let was = match &row.encoding {
            Encoding::Examples(examples) => {
                self.chunked += usize::from(examples.len() > 1);
                examples.iter().map(|example| example.ids.len()).sum()
            }
            Encoding::Truncated { was, lost_answer, .. } => {
                self.truncated += 1;
                self.cut_answers += usize::from(*lost_answer);
                *was
            }
            Encoding::Answers(answers) => {
                self.truncated += usize::from(answers.cut > 0);
                self.cut_answers += usize::from(answers.cut > 0);
                answers.was
            }
            Encoding::Dropped { was } => {
                self.dropped += 1;
                *was
            }
            Encoding::CutAway { was } => {
                self.cut_away += 1;
                *was
            }
            Encoding::LeftOut => {
                self.left_out += 1;
                return row.encoding;
            }
        };
        if self.longest.as_ref().is_none_or(|(longest, _)| was > *longest) {
            self.longest = Some((was, origin.clone()));
        }
        for example in row.encoding.examples() {
            self.examples += 1;
            self.tokens += example.ids.len() as u64;
            self.trained_tokens += example.num_trained() as u64;
            if example.role != Role::Plain {
                *self.roles.entry(example.role.to_string()).or_default() += 1;
            }
        }
        row.encoding
    }
}

impl DataReport {
    /// Writes a line for each reason for which rows are skipped or cut into several examples.
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
        let roles: Vec<String> = self.roles.iter().map(|(role, count)| format!("{count} {role}")).collect();
        let (roles, what) = match roles.as_slice() {
            [] => (String::new(), "trained"),
            roles => (format!(" ({})", roles.join(", ")), "in answers"),
        };
        write!(
            f,
            "{}{roles}, {}, {} of them {what} ({share:.0} %)",
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
            (_, 1) => f.write_str(", within the answer, whose end is not trained")?,
            (cut, _) => write!(f, ", {cut} of them within the answer, whose end is not trained")?,
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
