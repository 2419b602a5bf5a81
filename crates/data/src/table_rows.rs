//! Rows of tables in binary formats (Parquet, Arrow): a column keeps its type and may be nested,
//! such as message lists.
//!
//! The crates that read these formats trust the sizes in a file, and some kilobytes can claim
//! gigabytes. So the binary reads them in a child process (see [`super::sandbox`]), which sends the
//! rows one by one.
//!
//! A table has every column in every row. Null fields of an object are removed, like with TRL's
//! `remove_none_values`: the row is then as it was before it became part of the table. A null
//! within a list stays.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use super::expansion::{ExpansionBounds, row_bytes};
use super::other_files::is_binary;
use super::raw_rows::{DataFile, RawRow};
use super::sandbox::{
    self, BYTES_PER_SECOND, ChildEnd, REQUEST_TIME, SandboxedChild, SandboxedWork, UNREADABLE, time_for_size,
    write_frame,
};
use super::sandbox_limits::SandboxLimits;
use super::table_values::{ReadFailure, TableRow};
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin, arrow_rows, parquet_rows, wire};
use crate::contained::contain;
use crate::error::{Error, ErrorCategory, Result};

/// Number of rows that share one limit of a child's processor time.
const ROWS_PER_REQUEST: u64 = 64;

/// A format of tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableKind {
    Parquet,
    /// Arrow IPC, as a file or as a stream.
    Arrow,
}

impl TableKind {
    /// The format of a file that begins with `head`.
    pub(super) fn of(head: &[u8]) -> Option<Self> {
        match head {
            _ if !is_binary(head) => None,
            [b'P', b'A', b'R', b'1', ..] => Some(TableKind::Parquet),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => Some(TableKind::Arrow),
            _ => None,
        }
    }

    /// Its name, for messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            TableKind::Parquet => "Parquet",
            TableKind::Arrow => "Arrow",
        }
    }

    fn work(self) -> SandboxedWork {
        match self {
            TableKind::Parquet => SandboxedWork::Parquet,
            TableKind::Arrow => SandboxedWork::Arrow,
        }
    }

    fn read_rows(
        self,
        file: File,
        bytes: u64,
        emit: impl FnMut(TableRow) -> Result<(), String>,
    ) -> Result<(), ReadFailure> {
        match self {
            TableKind::Parquet => parquet_rows::read_rows(file, bytes, emit),
            TableKind::Arrow => arrow_rows::read_rows(file, bytes, emit),
        }
    }
}

/// Reads all rows of a table.
pub(super) fn read(file: &Arc<Path>, opened: File, kind: TableKind, source: &mut DataFile) -> Result<()> {
    let cannot = |failure: ReadFailure| match failure {
        ReadFailure::Storage(why) => {
            let what = format!("cannot read the data file {}", file.display());
            Error::new(ErrorCategory::Storage, what).because(why)
        }
        ReadFailure::Child(end) => end.into_error(format!("cannot read the data file {}", file.display())),
    };
    let bytes = opened.metadata().map_err(|e| Error::io("read the data file", file, &e))?.len();
    let mut bounds = ExpansionBounds::of(bytes);
    let mut index = 0;
    let mut take = |row: TableRow, size: u64| -> Result<(), String> {
        index += 1;
        bounds.count(row.as_ref().map_or(size, |row| size.max(row_bytes(row))))?;
        let origin = Origin { file: file.clone(), row: RowOrigin::Row(index) };
        match row {
            Ok(value) => source.rows.push(RawRow { value, origin, document: false, format: None }),
            Err(why) => {
                source.bad.push(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) });
            }
        }
        Ok(())
    };
    if sandbox::is_available() {
        return ask_child(kind, opened, &mut take).map_err(cannot);
    }
    contain(|| kind.read_rows(opened, bytes, |row| take(row, 0)))
        .unwrap_or_else(|panic| Err(panic.into()))
        .map_err(cannot)
}

/// The kinds of an answer's first byte.
const ROW: u8 = 0;
const BAD_ROW: u8 = 1;
const FAILED: u8 = 2;
const END: u8 = 3;
const NOT_READ: u8 = 4;

fn ask_child(
    kind: TableKind,
    opened: File,
    take: &mut impl FnMut(TableRow, u64) -> Result<(), String>,
) -> Result<(), ReadFailure> {
    let child = SandboxedChild::start(kind.work(), Some(Stdio::from(opened)));
    let mut child = child.map_err(|error| ReadFailure::Child(ChildEnd::ByMachine(error)))?;
    let broken = || ReadFailure::from(UNREADABLE.to_owned());
    loop {
        let answer = child.next().map_err(ReadFailure::Child)?;
        let (&kind, mut body) = answer.split_first().ok_or_else(broken)?;
        let text = || String::from_utf8_lossy(body).into_owned();
        match kind {
            END => return Ok(()),
            FAILED => return Err(text().into()),
            NOT_READ => return Err(ReadFailure::Storage(text())),
            BAD_ROW => take(Err(text()), answer.len() as u64)?,
            ROW => {
                let row = wire::take_map(&mut body).ok_or_else(broken)?;
                take(Ok(row), answer.len() as u64)?;
            }
            _ => return Err(broken()),
        }
    }
}

/// Runs a child: sends the rows of the file that is its standard input.
///
/// # Errors
/// Fails if the answers cannot be written, or the system refuses a limit.
pub(super) fn serve(limits: &SandboxLimits, kind: TableKind) -> io::Result<()> {
    let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let bytes = file.metadata()?.len();
    let mut answers = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let (mut gone, mut rows, mut answer) = (None, 0, Vec::new());
    let time = REQUEST_TIME + time_for_size(bytes, BYTES_PER_SECOND);
    limits.begin(bytes, time)?;
    let emit = |row: TableRow| -> Result<(), String> {
        answer.clear();
        match row {
            Ok(row) => {
                answer.push(ROW);
                wire::put_map(&row, &mut answer);
            }
            Err(why) => {
                answer.push(BAD_ROW);
                answer.extend(why.as_bytes());
            }
        }
        rows += 1;
        let again = if rows % ROWS_PER_REQUEST == 0 { limits.begin(bytes, time) } else { Ok(()) };
        again.and_then(|()| write_frame(&mut answers, &answer)).map_err(|error| {
            let why = error.to_string();
            gone = Some(error);
            why
        })
    };
    let outcome = contain(|| kind.read_rows(file, bytes, emit)).unwrap_or_else(|panic| Err(panic.into()));
    if let Some(error) = gone {
        return Err(error);
    }
    let last = match outcome {
        Ok(()) => vec![END],
        Err(ReadFailure::Storage(why)) => [&[NOT_READ][..], why.as_bytes()].concat(),
        Err(ReadFailure::Child(ChildEnd::ByInput(why))) => [&[FAILED][..], why.as_bytes()].concat(),
        Err(ReadFailure::Child(ChildEnd::ByMachine(error))) => {
            [&[FAILED][..], error.in_one_line().as_bytes()].concat()
        }
    };
    write_frame(&mut answers, &last)?;
    answers.flush()
}
