//! Finds a data set: a file or folder on this machine, or one split of one configuration on the
//! hub.

use std::path::{Path, PathBuf};

use super::client::Client;
use super::configurations::{self, Chosen, Configuration, RowsFor};
use super::fetch::Download;
use super::names::{self, Reference};
use super::select;
use super::{DownloadProgress, HubOptions, Located, RepoRef, RepoSource};
use crate::error::{Error, Result};

const README: &str = "README.md";
/// Larger than the longest card of a data set; the list of configurations is at its start.
const MAX_README_BYTES: u64 = 16 << 20;

/// A data set as the user writes it: `id`, `id@revision`, `id:config`, `id:config/split`,
/// `id:/split`.
#[derive(Debug, PartialEq, Eq)]
struct DatasetSpec<'a> {
    name: &'a str,
    revision: Option<&'a str>,
    wanted: Option<&'a str>,
}

impl<'a> DatasetSpec<'a> {
    fn parse(given: &'a str) -> Self {
        let whole = DatasetSpec { name: given, revision: None, wanted: None };
        if Path::new(given).exists() {
            return whole;
        }
        let start = if given.starts_with("hf://") { "hf://".len() } else { 0 };
        let (name, wanted) = match given[start..].split_once(':') {
            Some((left, wanted)) => (&given[..start + left.len()], Some(wanted)),
            None => (given, None),
        };
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (name, None),
        };
        // `https://...` and `C:\...` name no configuration.
        let is_part = !wanted.is_some_and(|wanted| wanted.starts_with("//") || wanted.starts_with('\\'));
        let is_id = is_part && names::check_repo_id(&name[start..]).is_ok();
        if is_id { DatasetSpec { name, revision, wanted } } else { whole }
    }
}

/// Finds a data set; `id_or_path` is a file, a folder, or an id such as `owner/name`. `@revision`
/// follows the id if it is not `main`. `:config`, `:config/split` or `:/split` follows if the
/// configuration is neither the only nor the default one, or the split not that of `rows_for`.
///
/// From the hub come the files of one split of one configuration, in [`Located::rows`].
///
/// # Errors
/// Those of [`super::locate_model`]; `User` also if a configuration or a split must be named, or
/// does not exist.
pub fn locate_dataset(
    id_or_path: &str,
    rows_for: RowsFor,
    options: &HubOptions,
    progress: &mut DownloadProgress<'_>,
) -> Result<Located> {
    let DatasetSpec { name, revision, wanted } = DatasetSpec::parse(id_or_path);
    let id = match names::parse_reference(name, options.home.as_deref())? {
        Reference::Hub(id) => id,
        Reference::Local(folder) if revision.or(wanted).is_none() => {
            return Ok(Located { id: name.to_owned(), folder, commit: None, note: None, rows: Vec::new() });
        }
        Reference::Local(_) => {
            return Err(Error::user(format!("there is no file or folder `{id_or_path}`"))
                .because(format!(
                    "`{name}` exists, but only data sets on the hub have revisions (`@...`) and configurations (`:...`)"
                ))
                .hint(format!("write `hf://{id_or_path}` to take it from the hub")));
        }
    };
    let revision = revision.unwrap_or("main");
    names::check_revision(revision)?;
    let data = RepoSource { subject: RepoRef::Dataset, id, revision: revision.to_owned(), options };
    if options.offline {
        data.cached_rows(wanted, rows_for, progress)
    } else {
        data.fetched_rows(wanted, rows_for, progress)
    }
}

impl RepoSource<'_> {
    fn fetched_rows(
        &self,
        wanted: Option<&str>,
        rows_for: RowsFor,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<Located> {
        let client: Client<'_> = self.client()?;
        let description = client.describe(progress)?;
        let files = &description.files;
        if select::rows(files).is_empty() {
            return Err(select::no_rows(client.subject(), files));
        }
        let store = self.store();
        let commit = description.commit.as_str();
        let download = Download { client: &client, store: &store, commit, gated: description.gated };
        if select::has(files, README) {
            download.fetch(&[README], progress)?;
        }
        let folder = store.snapshot(commit);
        let all = self.configurations(files, &folder)?;
        let id = self.spec_start();
        let Chosen { files, note } = configurations::choose(&all, wanted, rows_for, client.subject(), &id)?;
        let rows: Vec<&str> = files.iter().map(String::as_str).collect();
        names::check_files(rows.iter().copied())?;
        download.fetch(&rows, progress)?;
        store.set_commit(commit)?;
        let rows = files.iter().map(|file| folder.join(file)).collect();
        Ok(Located { rows, ..self.located(folder, commit.to_owned(), note) })
    }

    fn cached_rows(
        &self,
        wanted: Option<&str>,
        rows_for: RowsFor,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<Located> {
        let (commit, files) = self.cached_files()?.ok_or_else(|| self.not_cached())?;
        if select::rows(&files).is_empty() {
            return Err(self.not_cached());
        }
        let folder = self.store().snapshot(&commit);
        if select::has(&files, README) {
            self.verify(&commit, &[README], progress)?;
        }
        let all = self.configurations(&files, &folder)?;
        let chosen = configurations::choose(&all, wanted, rows_for, &self.subject(), &self.spec_start());
        let files = chosen
            .map_err(|error| error.because("this run is offline and sees only the files in the cache"))?
            .files;
        self.verify(&commit, &files.iter().map(String::as_str).collect::<Vec<_>>(), progress)?;
        let note = format!("offline: using the {1} cached file(s) of {0}", self.subject(), files.len());
        let rows: Vec<PathBuf> = files.iter().map(|file| folder.join(file)).collect();
        Ok(Located { rows, ..self.located(folder, commit, Some(note)) })
    }

    fn configurations(&self, files: &[String], folder: &Path) -> Result<Vec<Configuration>> {
        let path = folder.join(README);
        let readme = match path.metadata() {
            Ok(about) if about.len() <= MAX_README_BYTES => {
                let bytes = std::fs::read(&path).map_err(|e| Error::io("read", &path, &e))?;
                Some(String::from_utf8_lossy(&bytes).into_owned())
            }
            Ok(about) => {
                return Err(Error::user(format!("cannot use {}", self.subject())).because(format!(
                    "its {README} has {} bytes; accepted: up to {MAX_README_BYTES}",
                    about.len()
                )));
            }
            Err(_) => None,
        };
        configurations::configurations(files, readme.as_deref()).map_err(|why| {
            Error::user(format!("cannot read the configurations of {}", self.subject()))
                .because(format!("its {README}: {why}"))
                .hint(format!(
                    "download it with `hf download {} --repo-type dataset --local-dir DIR`, and give its files",
                    self.id
                ))
        })
    }

    /// Returns the start of a name for a part of this data set.
    fn spec_start(&self) -> String {
        if self.revision == "main" { self.id.clone() } else { format!("{}@{}", self.id, self.revision) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_a_data_set_and_a_part_of_it() {
        let spec = |name, revision, wanted| DatasetSpec { name, revision, wanted };
        for (given, expected) in [
            ("a/b", spec("a/b", None, None)),
            ("a/b@v1", spec("a/b", Some("v1"), None)),
            ("a/b:c", spec("a/b", None, Some("c"))),
            ("a/b:c/d", spec("a/b", None, Some("c/d"))),
            ("hf://a/b@refs/pr/1:/d", spec("hf://a/b", Some("refs/pr/1"), Some("/d"))),
            ("a/b:", spec("a/b", None, Some(""))),
            ("C:\\rows", spec("C:\\rows", None, None)),
            ("./x:y", spec("./x:y", None, None)),
            ("https://host/x", spec("https://host/x", None, None)),
        ] {
            assert_eq!(DatasetSpec::parse(given), expected, "{given}");
        }
    }
}
