//! Output formats of `finetune data` for people: marked text, tables of tokens, an HTML page.

use std::fmt::Write as _;
use std::path::Path;

use crate::data::{Dataset, Example, ExampleFigures, Role, Tokenizer};
use crate::error::Result;
use crate::report::Terminal;
use crate::report::html::{HtmlReport, MaskedRow};
use crate::training::masked_row::masked_row;
use crate::units;
use crate::weights::OutputKind;

/// First bytes of a page of rows. A new page replaces only files that begin with them.
const BEGINNING: &str = "<!doctype html>\n<!-- rows, by `finetune data` -->\n";

/// Output file of `--html`.
const OUTPUT: OutputKind = OutputKind {
    what: "a page of `finetune data`",
    option: "--html",
    example: "rows.html",
    replaces: Some(BEGINNING),
};

/// A data set with its held-out rows.
pub(super) struct DataView<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) train: &'a Dataset,
    pub(super) held_out: Option<&'a Dataset>,
    /// Number of rows to show.
    pub(super) rows: usize,
    /// Statistics of the training rows.
    pub(super) figures: ExampleFigures,
    /// Sentences on steps, micro-batches and packing.
    pub(super) batches: String,
    /// Report on held-out rows, with its warning.
    pub(super) held_out_report: Option<String>,
}

impl DataView<'_> {
    /// The examples of the first rows, each with the number of its row. The answers of a row share
    /// one number.
    pub(super) fn shown(&self) -> impl Iterator<Item = (usize, &Example)> {
        let groups = self.train.groups().take(self.rows).enumerate();
        groups.flat_map(|(at, group)| group.iter().map(move |example| (at + 1, example)))
    }

    pub(super) fn masked(&self) -> Result<Vec<MaskedRow>> {
        self.shown().map(|(_, example)| masked_row(example, self.tokenizer, 0..usize::MAX)).collect()
    }

    /// Prints rows as text, then a summary of all rows.
    pub(super) fn print_text(&self, terminal: &Terminal) -> Result<()> {
        for ((number, example), row) in self.shown().zip(self.masked()?) {
            let head = head(number, example);
            let mut pieces = vec![(head, false)];
            let ends_line = row.pieces.last().is_some_and(|(text, _)| text.ends_with('\n'));
            pieces.extend(row.pieces);
            pieces.push((if ends_line { "\n" } else { "\n\n" }.into(), false));
            terminal.marked_data(&pieces)?;
        }
        terminal.data(self.summary())
    }

    /// Prints each row as a table: position, id, whether the token is trained, token, its text.
    pub(super) fn print_tokens(&self, terminal: &Terminal) -> Result<()> {
        for (number, example) in self.shown() {
            terminal.data(self.table(number, example)?)?;
        }
        terminal.data(self.summary())
    }

    fn table(&self, number: usize, example: &Example) -> Result<String> {
        let mut text = head(number, example);
        for (position, (id, trained)) in example.ids.iter().zip(&example.trained).enumerate() {
            let piece = self.tokenizer.decode(&[*id], false)?;
            let token = self.tokenizer.token(*id).unwrap_or_default();
            let mark = if position > 0 && *trained { "train" } else { "" };
            let _ = writeln!(text, "  {position:>5}  {id:>7}  {mark:<5}  {token:<16}  {piece:?}");
        }
        text.push('\n');
        Ok(text)
    }

    /// Returns the sentences on all rows.
    pub(super) fn summary(&self) -> String {
        let held_out = self.held_out_report.as_ref().map(|text| format!("held out: {text}\n"));
        let (report, figures, batches) = (self.train.report(), &self.figures, &self.batches);
        format!("{report}\n{figures}\n{batches}{}", held_out.unwrap_or_default())
    }

    /// Writes an HTML page of rows with their masks to `path`.
    ///
    /// # Errors
    /// The user's: a file at `path` is no such page. Storage: the file cannot be written.
    pub(super) fn write_page(&self, path: &Path) -> Result<()> {
        let report = HtmlReport {
            title: "Rows as the model sees them",
            rows: &self.masked()?,
            data: &[("All rows", self.summary())],
            ..HtmlReport::default()
        };
        OUTPUT.write(path, &report.render().replacen("<!doctype html>\n", BEGINNING, 1))
    }
}

/// The line above an example: its row, its part in the objective, its place, numbers of tokens.
fn head(number: usize, example: &Example) -> String {
    let (tokens, trained) = (units::exact(example.ids.len(), "token"), example.num_trained());
    let (role, what) = match example.role {
        Role::Plain => (String::new(), "trained"),
        role => (format!("{role}, "), "in the answer"),
    };
    format!("row {number}, {role}{}: {tokens}, {trained} {what}\n", example.origin)
}
