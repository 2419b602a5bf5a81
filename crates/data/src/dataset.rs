//! All rows of a data set as examples, in the order of the files, with a report.
//!
//! Rows are encoded in parallel and kept in memory: ids take four bytes a token, and the sets that
//! fine-tuning uses have tens of millions of tokens at most. Loading collects all faults before it
//! fails, so that the user fixes a data set in one round.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::PathBuf;

use rayon::prelude::*;

use super::answer_groups::AnswerGroups;
use super::batch::groups_of;
use super::child_pool::MOST_ENDED;
use super::encode::{Encoder, Encoding, Example};
use super::example_source::ExampleSource;
use super::file_formats::{FileFormats, OtherFormat};
use super::raw_rows::{DataFile, RawRow};
use super::selected_rows::likeness;
use super::source::read;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::{AnsweredRow, DataOptions, DataReport, ParsedRow, RowError, RowFault, RowFaultKind};
use crate::error::{Error, Result};
use crate::recipe::enums::OnBadRow;
use crate::units;

/// Number of bad rows that an error names.
const NAMED_IN_ERROR: usize = 5;

/// A hint offers to skip bad rows if at most one row in this number is bad; more mean another error
/// in the data set.
const ROWS_TO_A_SKIPPED_ONE: usize = 100;

/// Examples ready to be batched.
#[derive(Debug)]
pub struct Dataset {
    examples: Vec<Example>,
    report: DataReport,
    /// Likeness of each row; see [`likeness`].
    rows: Vec<[u8; 16]>,
}

impl Dataset {
    /// Reads and encodes all rows of `paths`, files or folders, in this order.
    ///
    /// # Errors
    /// Fails if a file cannot be read, its format cannot be detected, a row is bad and `on_bad_row`
    /// is `stop`, or no example is left. With any `on_bad_row`, fails with a transient error if the
    /// system starts no process to render or encode a row, or something outside ends it.
    pub fn load(
        paths: &[PathBuf],
        options: &DataOptions,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<Self> {
        if options.max_seq_len < 2 {
            return Err(Error::user(format!("`data.max_seq_len` is {}", options.max_seq_len))
                .because("a row needs two tokens at least: one to predict the other from"));
        }
        let mut source = DataFile::default();
        for path in paths {
            let mut one = read(path, options.split)?;
            source.files.append(&mut one.files);
            source.rows.append(&mut one.rows);
            source.bad.append(&mut one.bad);
            source.notes.append(&mut one.notes);
        }
        Self::from_source(source, options, tokenizer, template)
    }

    /// Encodes rows that are already read, like [`Self::load`].
    ///
    /// # Errors
    /// Fails like [`Self::load`], except that it reads no file.
    pub fn from_source(
        source: DataFile,
        options: &DataOptions,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<Self> {
        let formats = FileFormats::choose(&source, options)?;
        let mut report = DataReport {
            files: source.files.len(),
            rows: source.rows.len() + source.bad.len(),
            why: formats.why(),
            notes: source.notes,
            ..DataReport::default()
        };
        for bad in source.bad {
            report.add_bad(bad.origin, bad.fault);
        }
        needs_met(&source.rows, &formats, tokenizer, template)?;
        let has_chats = is_rendered(&source.rows, &formats);
        if let Some(template) = template.filter(|_| has_chats) {
            report.rendered = true;
            report.notes.push(format!("chat template: {}", template.described()));
            report.warnings.extend(template.split_markers(tokenizer)?);
        }
        report.warnings.extend(no_eos(tokenizer));
        if options.sanitize_control_tokens && !has_chats {
            report.warnings.push("`data.sanitize_control_tokens` has no effect: no row is a chat".into());
        }
        let encoder = Encoder::new(tokenizer, template, options);
        let encode = |row: &RawRow| match encoder.encode_row(row, formats.of(row)) {
            Ok(encoding) => Ok(Ok(encoding)),
            Err(RowError::Fault(fault)) => Ok(Err(fault)),
            Err(RowError::Run(error)) => Err(error),
        };
        let outcomes = source.rows.par_iter().map(encode).collect::<Result<Vec<_>>>()?;
        tokenizer.release();
        if let Some(template) = template {
            template.release();
        }
        let mut examples = Vec::with_capacity(outcomes.len());
        let mut answers = AnswerGroups::new(options);
        let mut bad = Vec::new();
        for (row, outcome) in source.rows.iter().zip(outcomes) {
            match outcome {
                Ok(outcome) => match report.add(outcome, &row.origin) {
                    Encoding::Answers(row) => answers.add(row),
                    encoding => examples.append(&mut encoding.into_examples()),
                },
                Err(fault) => {
                    report.add_bad(row.origin.clone(), fault);
                    bad.push(row);
                }
            }
        }
        examples.append(&mut answers.into_examples(&mut report));
        stop_on_faults(&report, options, || formats.other_format(&source.rows, &bad))?;
        none_has_given_up(tokenizer, template)?;
        if examples.is_empty() {
            return Err(nothing_left(&report));
        }
        let rows = source.rows.iter().map(|row| likeness(&row.value)).collect();
        Ok(Dataset { examples, report, rows })
    }

    /// The examples, in the order of the files.
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// The examples that stay together in a micro-batch: those of a
    /// [group](ExampleSource::group), or one by itself.
    pub fn groups(&self) -> impl Iterator<Item = &[Example]> {
        groups_of(&self.examples)
    }

    /// Number of tokens of each of [`Self::groups`].
    pub fn group_lengths(&self) -> impl Iterator<Item = usize> {
        self.groups().map(|group| group.iter().map(|example| example.ids.len()).sum())
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.examples.len()
    }

    /// Returns true without examples; a loaded data set has at least one.
    pub fn is_empty(&self) -> bool {
        self.examples.is_empty()
    }

    /// Returns the number of rows that equal a row of `other` except for case, spaces and
    /// punctuation, and the number of all rows.
    pub fn count_alike(&self, other: &Dataset) -> (usize, usize) {
        let known: HashSet<&[u8; 16]> = other.rows.iter().collect();
        (self.rows.iter().filter(|row| known.contains(row)).count(), self.rows.len())
    }

    /// The report on the files, rows and faults.
    pub fn report(&self) -> &DataReport {
        &self.report
    }
}

impl ExampleSource for Dataset {
    fn len(&self) -> usize {
        self.examples.len()
    }

    fn length(&self, index: usize) -> usize {
        self.examples[index].ids.len()
    }

    fn group(&self, index: usize) -> Option<u32> {
        self.examples[index].group
    }

    fn example(&self, index: usize) -> Cow<'_, Example> {
        Cow::Borrowed(&self.examples[index])
    }

    fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for example in &self.examples {
            hasher.update(&(example.ids.len() as u64).to_le_bytes());
            let ids: Vec<u8> = example.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            hasher.update(&ids);
            let trained: Vec<u8> = example.trained.iter().map(|trained| u8::from(*trained)).collect();
            hasher.update(&trained);
            // Data without groups keep the digest that older checkpoints recorded.
            if let Some(group) = example.group {
                hasher.update(&group.to_le_bytes());
            }
            hasher.update(&example.role.digest_bytes());
        }
        hasher.finalize()
    }
}

fn nothing_left(report: &DataReport) -> Error {
    let error = Error::user("no row of the data set can be used");
    let error = report.to_string().lines().fold(error, |error, line| error.because(line.trim()));
    error.hint(way_to_rows(report))
}

/// Returns the hint for a data set without examples, by the reasons for which rows are skipped.
fn way_to_rows(report: &DataReport) -> String {
    if report.left_out > 0 && report.left_out == report.rows {
        return "all rows have a false `label`; no row is trained".to_owned();
    }
    let length = match (report.dropped, report.cut_away) {
        (0, 0) => None,
        (0, _) => Some("raise `data.max_seq_len`"),
        _ => Some("raise `data.max_seq_len`, or write `data.on_long_row = \"truncate\"`"),
    };
    let is_shown = report.num_bad() > 0 || length.is_none();
    let shown = is_shown.then_some("`finetune data` shows what is wrong with each row");
    length.into_iter().chain(shown).collect::<Vec<_>>().join("; ")
}

/// The reason why a process for rows of unknown origin ends.
const OUT_OF_LIMITS: &str = "each ran out of memory, stack or time in a process with limits";

/// Refuses a chat template or a tokenizer whose processes ended too often. The rows after that
/// depend on the timing of threads, so the run does not skip them.
fn none_has_given_up(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<()> {
    if template.is_some_and(ChatTemplate::has_given_up) {
        return Err(Error::user(format!(
            "cannot use the chat template: {MOST_ENDED} chats ended its process"
        ))
        .because(OUT_OF_LIMITS)
        .hint("`data.chat_template` replaces the tokenizer's"));
    }
    if tokenizer.has_given_up() {
        let folder = tokenizer.folder().display();
        return Err(Error::user(format!(
            "cannot use the tokenizer in {folder}: {MOST_ENDED} rows ended its process"
        ))
        .because(OUT_OF_LIMITS)
        .hint("copy tokenizer.json of the model that this one was made from into that folder"));
    }
    Ok(())
}

/// Refuses chats without a chat template, before every row fails for the same reason.
fn needs_met(
    rows: &[RawRow],
    formats: &FileFormats,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<()> {
    let chat = |row: &&RawRow| {
        use AnsweredRow::Chats;
        let record = formats.record(row);
        matches!(record, Ok(Some(ParsedRow::Messages { .. } | ParsedRow::Answers(Chats { .. }))))
    };
    if template.is_none()
        && let Some(row) = formats.first_good_rows(rows).into_iter().find(chat)
    {
        return Err(Error::user(format!(
            "cannot use {} rows with the tokenizer in {}",
            formats.of(row),
            tokenizer.folder().display()
        ))
        .because("it has no chat template")
        .hint("write `data.chat_template`, Jinja text or the path of a file"));
    }
    Ok(())
}

/// Returns a warning if the tokenizer names no EOS token.
fn no_eos(tokenizer: &Tokenizer) -> Option<String> {
    let named = tokenizer.eos().is_some();
    (!named).then(|| format!(
        "the tokenizer in {} names no EOS token: rows end without one, and a model that learns from them does not stop by \
         itself; write `\"eos_token\": \"...\"` into its tokenizer_config.json",
        tokenizer.folder().display()
    ))
}

/// Returns whether rows of any format use a chat template if one is available.
fn is_rendered(rows: &[RawRow], formats: &FileFormats) -> bool {
    use AnsweredRow::{Chats, Tasks};
    formats.first_good_rows(rows).into_iter().any(|row| match formats.record(row) {
        Ok(Some(ParsedRow::Answers(answers))) => matches!(answers, Chats { .. } | Tasks { .. }),
        record => matches!(record, Ok(Some(ParsedRow::Messages { .. } | ParsedRow::Task { .. }))),
    })
}

/// Fails if rows are bad and the options do not skip them. `other_format` finds a file whose bad
/// rows mostly have the keys of another format.
fn stop_on_faults(
    report: &DataReport,
    options: &DataOptions,
    other_format: impl FnOnce() -> Option<OtherFormat>,
) -> Result<()> {
    let stops = |kind: &RowFaultKind| *kind == RowFaultKind::TooLong || options.on_bad_row == OnBadRow::Stop;
    let total: usize = report.bad.iter().filter(|(kind, _)| stops(kind)).map(|(_, (count, _))| count).sum();
    if total == 0 {
        return Ok(());
    }
    let rows = units::exact(report.rows, "row");
    let mut error = Error::user(format!("cannot use {total} of {rows} of the data set"));
    let named: Vec<_> =
        report.first_bad().filter(|bad| stops(&bad.fault.kind)).take(NAMED_IN_ERROR).collect();
    for bad in &named {
        error = error.because(bad.to_string());
    }
    if total > named.len() {
        error = error.because(format!("and {} more", total - named.len()));
    }
    let any = |kind| named.iter().any(|bad| bad.fault.kind == kind);
    let all = |kind| named.iter().all(|bad| bad.fault.kind == kind);
    let is_seldom = total.saturating_mul(ROWS_TO_A_SKIPPED_ONE) <= report.rows;
    let hint = if any(RowFaultKind::TooLong) {
        "raise `data.max_seq_len`, or write `data.on_long_row = \"truncate\"` or `\"drop\"`".to_owned()
    } else if all(RowFaultKind::Vocabulary) {
        "give tokenizer files and weights of one and the same model".to_owned()
    } else if let (false, Some(other)) = (is_seldom, other_format()) {
        other.hint()
    } else {
        ways_out(&all, is_seldom)
    };
    Err(error.hint(hint))
}

/// Returns the hint for bad rows. It offers to skip them if they are rare.
fn ways_out(all: &dyn Fn(RowFaultKind) -> bool, is_seldom: bool) -> String {
    let (mut ways, skip) = if all(RowFaultKind::Template) {
        (vec!["mend the rows or the chat template (`data.chat_template` replaces the tokenizer's)"], "")
    } else if all(RowFaultKind::EmptyTurn) {
        let template = "give a chat template that prints these turns (`data.chat_template`)";
        (vec![template, "mend the rows"], " to leave them out")
    } else if all(RowFaultKind::NothingTrained) {
        (vec!["write `data.train_on = \"all\"` to train on every token"], " to leave the rows out")
    } else {
        (vec!["mend the rows"], " to leave them out")
    };
    let skip = format!("write `data.on_bad_row = \"skip\"`{skip}");
    if is_seldom {
        ways.push(&skip);
    }
    match ways.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{}, or {last}", rest.join(", ")),
        _ => ways.concat(),
    }
}

impl From<RowFault> for Error {
    /// Converts a fault that concerns no row of a file.
    fn from(fault: RowFault) -> Self {
        Error::user(fault.kind.to_string()).because(fault.why)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_hint_without_rows_follows_the_reasons() {
        let rows = |left_out: usize, dropped: usize, cut_away: usize, bad: usize| {
            let rows = left_out + dropped + cut_away + bad;
            let bad = if bad == 0 {
                BTreeMap::new()
            } else {
                BTreeMap::from([(RowFaultKind::Format, (bad, Vec::new()))])
            };
            way_to_rows(&DataReport { rows, left_out, dropped, cut_away, bad, ..DataReport::default() })
        };
        let (data, longer) =
            ("`finetune data` shows what is wrong with each row", "raise `data.max_seq_len`");
        assert_eq!(rows(0, 0, 0, 2), data);
        assert_eq!(rows(1, 0, 0, 1), data);
        assert_eq!(rows(0, 0, 2, 0), longer);
        assert_eq!(rows(0, 0, 1, 1), format!("{longer}; {data}"));
        let shorter = format!("{longer}, or write `data.on_long_row = \"truncate\"`");
        assert_eq!(rows(1, 1, 1, 0), shorter);
        assert_eq!(rows(0, 1, 0, 1), format!("{shorter}; {data}"));
        assert_eq!(rows(2, 0, 0, 0), "all rows have a false `label`; no row is trained");
    }
}
