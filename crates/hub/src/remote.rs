//! Weights that stay on the hub: reads byte ranges of their files without storing them.
//!
//! The headers of a model's safetensors files describe it, in some hundred kilobytes of many
//! gigabytes. The client requests them with `Range` at the commit of the other files. They never
//! enter the cache, where a piece of a file could be mistaken for the file. A piece has no digest
//! to verify it, so no result of a computation on weights ever comes from here.

use std::ops::Range;
use std::path::Path;

use super::client::{Client, FileRange};
use super::{DownloadProgress, Located};
use crate::error::Result;

/// A model whose weights need not be in the cache.
pub struct LocatedModel<'a> {
    /// The folder with its small files, and with the weights files that the cache holds.
    pub located: Located,
    /// The weights files that stay on the hub; none for a model in a folder or in the cache.
    pub remote: Option<RemoteWeights<'a>>,
}

/// Weights files of one commit that only the hub has.
pub struct RemoteWeights<'a> {
    client: Client<'a>,
    commit: String,
    gated: bool,
    files: Vec<String>,
}

impl<'a> RemoteWeights<'a> {
    /// Selects the `files` that are not in `folder`; none if all are.
    pub(super) fn new(
        client: Client<'a>,
        commit: &str,
        gated: bool,
        files: Vec<String>,
        folder: &Path,
    ) -> Option<Self> {
        let files: Vec<String> = files.into_iter().filter(|file| !folder.join(file).is_file()).collect();
        (!files.is_empty()).then(|| RemoteWeights { client, commit: commit.to_owned(), gated, files })
    }

    /// The names of the files.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Reads a range of one of the files.
    ///
    /// # Errors
    /// `User` if the file may not be read; `Transient` if the hub or the network fails or the
    /// server has no ranges.
    pub fn read(
        &self,
        file: &str,
        range: Range<u64>,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<FileRange> {
        self.client
            .range(&self.commit, file, &range, self.gated, progress)
            .map_err(|error| error.during(format!("cannot read the header of `{file}` on the hub")))
    }
}
