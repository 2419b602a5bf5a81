//! `finetune compare`: compares runs by their output folders.

use super::{print_json, working_folder};
use crate::cli::CompareArgs;
use crate::comparison::comparison_table::ComparisonTable;
use crate::error::Result;
use crate::report::{Terminal, Verbosity};

/// Prints the table and writes the HTML page of `--html`.
pub(super) fn run(args: &CompareArgs) -> Result<()> {
    let terminal = Terminal::stderr(Verbosity::Normal);
    let table = ComparisonTable::read(&args.runs)?;
    table.warnings().iter().for_each(|text| terminal.warn(text));
    if let Some(file) = &args.html {
        table.write_page(&working_folder()?.join(file))?;
        terminal.line(format!("wrote {}", file.display()));
    }
    if args.json { print_json(&table.json()) } else { terminal.data(table.text()) }
}
