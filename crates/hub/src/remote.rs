//! The weights of a model that stay on the hub: byte ranges of their files, read and not stored.
//!
//! What a model is stands in the headers of its safetensors files, some hundred kilobytes of many gigabytes. They are
//! asked for with `Range` at the commit that the other files come from. Nothing of them enters the cache, where a
//! piece of a file could be taken for the file. A piece has no digest to be verified against; what is computed from
//! weights therefore never comes from here.

use std::ops::Range;
use std::path::Path;

use super::client::{Client, FileRange};
use super::{DownloadProgress, Located};
use crate::error::Result;

/// A model of which the cache need not hold the weights.
pub struct LocatedModel<'a> {
    /// The folder with its small files, and with those weights files that the cache holds.
    pub located: Located,
    /// The weights files that stay on the hub; none for a model in a folder or in the cache.
    pub remote: Option<RemoteWeights<'a>>,
}

/// Weights files of one commit that lie on the hub alone.
pub struct RemoteWeights<'a> {
    client: Client<'a>,
    commit: String,
    gated: bool,
    files: Vec<String>,
}

impl<'a> RemoteWeights<'a> {
    /// Those of `files` that are not in `folder`; none if all are.
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
    /// `User` when the file may not be read, `Transient` when hub or network fail or the server has no ranges.
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
