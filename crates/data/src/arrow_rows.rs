//! Rows of Arrow files and streams, as `Dataset.save_to_disk`, `pyarrow.feather` and `pyarrow.ipc`
//! write them.

use std::fs::File;
use std::io::{BufReader, Read, Seek};

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::ArrowError;

use super::arrow_values::columns_at;
use super::expansion::ExpansionBounds;
use super::table_values::{ReadFailure, RowMaker, TableRow};

/// First bytes of an Arrow file, which has a footer; a stream has none.
const FILE_MAGIC: &[u8] = b"ARROW1";
/// First bytes of each message of a stream.
const STREAM_MAGIC: &[u8] = b"\xFF\xFF\xFF\xFF";

impl From<ArrowError> for ReadFailure {
    fn from(error: ArrowError) -> Self {
        match error {
            // A bad offset inside the file fails a seek with InvalidInput, which is no storage
            // error.
            ArrowError::IoError(_, io)
                if io.raw_os_error().is_some() && io.kind() != std::io::ErrorKind::InvalidInput =>
            {
                ReadFailure::Storage(io.to_string())
            }
            other => other.to_string().into(),
        }
    }
}

/// Passes the rows of a file of `bytes` bytes to `emit` until it returns an error.
///
/// # Errors
/// Fails if the file cannot be read or `emit` refuses a row.
pub(super) fn read_rows(
    mut file: File,
    bytes: u64,
    mut emit: impl FnMut(TableRow) -> Result<(), String>,
) -> Result<(), ReadFailure> {
    let mut head = Vec::new();
    let failed = |error: std::io::Error| ReadFailure::Storage(error.to_string());
    (&file).take(FILE_MAGIC.len() as u64).read_to_end(&mut head).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let mut rows = ArrowRows { bounds: ExpansionBounds::of(bytes), rows: 0 };
    if head.starts_with(FILE_MAGIC) {
        for batch in FileReader::try_new(BufReader::new(file), None)? {
            rows.hand_over(&batch?, &mut emit)?;
        }
    } else if head.starts_with(STREAM_MAGIC) {
        for batch in StreamReader::try_new(BufReader::new(file), None)? {
            rows.hand_over(&batch?, &mut emit)?;
        }
    } else {
        return Err("it is no Arrow file or stream, by its first bytes".to_owned().into());
    }
    Ok(())
}

struct ArrowRows {
    bounds: ExpansionBounds,
    rows: u64,
}

impl ArrowRows {
    fn hand_over(
        &mut self,
        batch: &RecordBatch,
        emit: &mut impl FnMut(TableRow) -> Result<(), String>,
    ) -> Result<(), String> {
        // A column of nulls takes no bytes, whatever number of rows it claims.
        self.rows = self.rows.saturating_add(batch.num_rows() as u64);
        self.bounds.check_rows(self.rows)?;
        let schema = batch.schema();
        for index in 0..batch.num_rows() {
            emit(
                RowMaker::default().row(|maker| columns_at(maker, schema.fields(), batch.columns(), index)),
            )?;
        }
        Ok(())
    }
}
