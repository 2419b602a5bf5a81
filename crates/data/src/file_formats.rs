//! The format of each data file: files of one run may differ, rows of one file may not.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::format::{RowFormat as _, convert, detect};
use super::labelled_rows::LABEL_KEYS;
use super::parsed_row::ParsedRow;
use super::raw_rows::{DataFile, RawRow};
use super::{DataOptions, RowFault};
use crate::error::{Error, Result};
use crate::recipe::enums::{DataFormat, ObjectiveKind, ObjectiveRows};

/// The formats of the files of a data set.
#[derive(Debug)]
pub(super) struct FileFormats {
    files: HashMap<Arc<Path>, DataFormat>,
    /// The format of rows of other files.
    otherwise: DataFormat,
    why: String,
    objective: ObjectiveKind,
}

/// A file with rows of another format than it was read as.
#[derive(Debug)]
pub(super) struct OtherFormat {
    file: Arc<Path>,
    /// The other format.
    format: DataFormat,
    /// True if most rows of the file have it.
    is_of_most_rows: bool,
    /// True if the objective reads single rows.
    is_single: bool,
}

impl OtherFormat {
    /// Returns the hint for the rows of that format.
    pub(super) fn hint(&self) -> String {
        let file = self.file.display();
        let format = match self.format {
            // Cross-entropy refuses pairs until their chosen side is named.
            DataFormat::Preference if self.is_single => DataFormat::PreferenceChosen,
            format => format,
        };
        if self.is_of_most_rows {
            format!(
                "give {file} its own format: `format = \"{format}\"` in a `[[data.train]]` table of its `path`"
            )
        } else {
            format!("put the rows of {file} that have the format {format} into a file of their own")
        }
    }
}

impl FileFormats {
    /// Chooses the format that `options` names, or that of most rows of each file.
    ///
    /// # Errors
    /// Fails without rows, or if the format of a file cannot be detected.
    pub(super) fn choose(source: &DataFile, options: &DataOptions) -> Result<Self> {
        if source.rows.is_empty() && source.bad.is_empty() {
            let files: Vec<String> = source.files.iter().map(|file| file.display().to_string()).collect();
            return Err(
                Error::user("the data set is empty").because(format!("no row in {}", files.join(", ")))
            );
        }
        let objective = options.objective;
        let one = |otherwise, why| FileFormats { files: HashMap::new(), otherwise, why, objective };
        let formats = match options.format {
            // The faults of the rows explain more than a failed detection.
            DataFormat::Auto if source.rows.is_empty() => {
                Ok(one(DataFormat::Auto, "no row is readable".to_owned()))
            }
            DataFormat::Auto => Self::detect(&source.rows, objective),
            format => Ok(one(format, format!("{format}: as `data.format` says"))),
        }?;
        formats.refuse_other_rows(&source.rows)?;
        Ok(formats)
    }

    /// Refuses rows that the objective does not read, before each of them is a fault.
    fn refuse_other_rows(&self, rows: &[RawRow]) -> Result<()> {
        let (kind, wanted) = (self.objective, self.objective.rows());
        let has_label = |row: &RawRow| LABEL_KEYS.iter().any(|key| row.value.contains_key(*key));
        let is_pair = |format| matches!(format, DataFormat::Preference | DataFormat::PreferenceChosen);
        let is_other = |row: &&RawRow| match (wanted, self.of(row)) {
            (_, DataFormat::Auto) => false,
            (ObjectiveRows::Single, format) => format == DataFormat::Preference,
            (ObjectiveRows::Pairs, format) => !is_pair(format),
            (ObjectiveRows::Labelled, format) => !is_pair(format) && !has_label(row),
        };
        let Some(row) = rows.iter().find(is_other) else { return Ok(()) };
        let format = self.of(row);
        let reads = match wanted {
            ObjectiveRows::Single => {
                "which trains one answer a row; these rows have two, `chosen` and `rejected`"
            }
            ObjectiveRows::Pairs => "which compares two answers a row, `chosen` and `rejected`",
            ObjectiveRows::Labelled => {
                "which learns from answers with a `label`, or from two answers a row, `chosen` and `rejected`"
            }
        };
        let of_row = match wanted {
            ObjectiveRows::Single => String::new(),
            _ => format!("; {} has the keys {}", row.origin, super::row_fields::keys_of(&row.value)),
        };
        let hint = match wanted {
            ObjectiveRows::Single => {
                let format = match row.format {
                    Some(_) => "`format = \"preference_chosen\"` in the `[[data.train]]` table of this source",
                    None => "`data.format = \"preference_chosen\"`",
                };
                format!(
                    "write `objective.kind = \"dpo\"` to learn from both answers, or {format} to train the chosen \
                     answers alone"
                )
            }
            _ if has_label(row) => "write `objective.kind = \"kto\"` to learn from labelled answers".to_owned(),
            _ => "write `objective.kind = \"cross_entropy\"` to train on these rows, or give rows with `chosen` \
                  and `rejected`; `columns` in a `[[data.train]]` table renames keys"
                .to_owned(),
        };
        Err(Error::user(format!("cannot train on the {format} rows of {}", row.origin.file.display()))
            .because(format!("`objective.kind` is \"{kind}\", {reads}{of_row}"))
            .hint(hint))
    }

    fn detect(rows: &[RawRow], objective: ObjectiveKind) -> Result<Self> {
        let wanted = objective.rows();
        let mut formats = Vec::new();
        // The rows of a file are consecutive.
        for rows in rows.chunk_by(|a, b| a.origin.file == b.origin.file) {
            let detected = match rows[0].format {
                None | Some(DataFormat::Auto) => detect(rows, wanted)?,
                Some(format) => (format, format!("{format}: as its source says")),
            };
            formats.push((&rows[0].origin.file, detected));
        }
        let first = formats.first().map(|(_, (format, _))| *format);
        let why = if formats.iter().all(|(_, (format, _))| Some(*format) == first) {
            match rows[0].format {
                None | Some(DataFormat::Auto) => detect(rows, wanted)?.1,
                Some(_) => formats[0].1.1.clone(),
            }
        } else {
            let each = formats.iter().map(|(file, (_, why))| format!("\n  {}: {why}", file.display()));
            format!("each file by its own rows:{}", each.collect::<String>())
        };
        let files = formats.into_iter().map(|(file, (format, _))| (Arc::clone(file), format)).collect();
        Ok(FileFormats { files, otherwise: DataFormat::Auto, why, objective })
    }

    /// The format of a row.
    pub(super) fn of(&self, row: &RawRow) -> DataFormat {
        row.format.or_else(|| self.files.get(&row.origin.file).copied()).unwrap_or(self.otherwise)
    }

    /// Finds the first file of which most bad rows have the keys of one other format. `bad` are the
    /// bad rows of `rows`, in their order.
    pub(super) fn other_format(&self, rows: &[RawRow], bad: &[&RawRow]) -> Option<OtherFormat> {
        bad.chunk_by(|a, b| a.origin.file == b.origin.file).find_map(|of_file| {
            let mut counts: Vec<(DataFormat, usize)> = Vec::new();
            for row in of_file {
                let row = std::slice::from_ref(*row);
                let Ok((format, _)) = detect(row, self.objective.rows()) else { continue };
                match counts.iter_mut().find(|(known, _)| *known == format) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((format, 1)),
                }
            }
            let (format, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
            let file = &of_file[0].origin.file;
            let all = rows.iter().filter(|row| row.origin.file == *file).count();
            let is_other = format.keys() != self.of(of_file[0]).keys();
            (count * 2 > of_file.len() && is_other).then(|| OtherFormat {
                file: Arc::clone(file),
                format,
                is_of_most_rows: count * 2 > all,
                is_single: self.objective.rows() == ObjectiveRows::Single,
            })
        })
    }

    /// Converts a row by its format; `None` if the objective skips it.
    pub(super) fn record(&self, row: &RawRow) -> Result<Option<ParsedRow>, RowFault> {
        convert(&row.value, self.of(row), self.objective.rows())
    }

    /// A sentence with the chosen formats and the reason.
    pub(super) fn why(&self) -> String {
        self.why.clone()
    }

    /// The first row of each format that converts without a fault.
    pub(super) fn first_good_rows<'a>(&self, rows: &'a [RawRow]) -> Vec<&'a RawRow> {
        let mut seen = Vec::new();
        let mut examples = Vec::new();
        for row in rows {
            let format = self.of(row);
            if !seen.contains(&format) && self.record(row).is_ok() {
                seen.push(format);
                examples.push(row);
            }
        }
        examples
    }
}
