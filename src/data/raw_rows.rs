//! The rows of data files before their format is known.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::{BadRow, Origin};

/// One record of a data file.
#[derive(Debug, Clone)]
pub struct RawRow {
    /// Its fields, in the order of the file.
    pub value: Map<String, Value>,
    /// Where it stood.
    pub origin: Origin,
    /// Whether it is a whole text file, to be cut into chunks instead of shortened.
    pub document: bool,
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
    /// What a person should know about the choice of files.
    pub notes: Vec<String>,
}
