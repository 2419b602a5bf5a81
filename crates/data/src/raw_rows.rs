//! The rows of data files before their format is known.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::expansion::ExpansionBounds;
use super::{BadRow, Origin};
use crate::recipe::enums::DataFormat;

/// One record of a data file.
#[derive(Debug, Clone)]
pub struct RawRow {
    /// The fields of the row, in the order of the file.
    pub value: Map<String, Value>,
    /// File and position of the row.
    pub origin: Origin,
    /// True for a whole text file, which is cut into chunks instead of shortened.
    pub document: bool,
    /// The format that the recipe gives its source, if any.
    pub format: Option<DataFormat>,
}

/// The rows of one path.
#[derive(Debug, Clone, Default)]
pub struct DataFile {
    /// Files that were read, in order.
    pub files: Vec<PathBuf>,
    /// Readable rows, in the order of the files.
    pub rows: Vec<RawRow>,
    /// Records that could not be read.
    pub bad: Vec<BadRow>,
    /// Notes for the user on the files.
    pub notes: Vec<String>,
}

/// The text of a file, in UTF-8 as far as it is text, without a byte order mark.
pub(super) struct TextFile<'a> {
    /// The file's path as the user named it.
    pub(super) file: Arc<Path>,
    /// The text itself.
    pub(super) bytes: Cow<'a, [u8]>,
    /// The size of the file on disk, in bytes.
    pub(super) file_bytes: u64,
    /// Limits of the rows, if the file is packed.
    pub(super) packed: Option<ExpansionBounds>,
}
