//! Finds a model, an adapter or a data set: in a folder, in the cache, or on the Hugging Face hub.
//!
//! [`locate_model`], [`locate_adapter`] and [`locate_dataset`] return a folder that holds the
//! files; an existing path has precedence over the hub. A download is chosen by name (never
//! pickles, never code), pinned to one commit, and verified against the digest that the hub
//! announces. It goes to the cache of Python's `huggingface_hub`. If the cache holds everything,
//! the client makes one request (for the commit of the revision), offline none.
//!
//! To plan or describe a model needs no weights: [`locate_model_in_place`] leaves them on the hub,
//! to be read by ranges ([`RemoteWeights`]). Of a data set it selects one split of one
//! configuration.
//!
//! This module opens the only sockets of a run on one machine. It does not parse the files that it
//! fetches: weights, data and recipe do, with the care that a stranger's file needs. It prints
//! nothing; it reports progress through [`DownloadEvent`]s, and notes for the user through
//! [`Located::note`].

mod adapter;
mod cache;
mod client;
mod configurations;
mod dataset;
mod digest;
mod fetch;
mod front_matter;
mod names;
mod options;
mod planted;
mod redirect;
mod refusal;
mod remote;
mod select;
mod speed;
mod verified;

use finetune_core::{address, error, gguf_names, private_file, tokenizer_names, units};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::{Repo, RepoType};

use crate::error::{Error, ErrorContext, Result};
pub use adapter::locate_adapter;
use cache::HubCache;
pub use client::FileRange;
use client::{Client, RepoDescription};
pub use configurations::RowsFor;
pub use dataset::locate_dataset;
use fetch::Download;
use names::Reference;
pub use options::{HubOptions, LeastSpeed, Retry, Token};
pub use remote::{LocatedModel, RemoteWeights};
use select::{ModelMismatch, Scope, Weights};
use verified::VerifiedFiles;

/// An event of a download.
#[derive(Debug, Clone, Copy)]
pub enum DownloadEvent<'a> {
    /// The files to fetch; comes once for the small files of a model and once for its shards.
    Plan {
        /// Number of files.
        files: usize,
        /// Their size together.
        bytes: u64,
    },
    /// A cached file is read to verify it.
    Check {
        /// Its name in the repository.
        file: &'a str,
        /// Its size in bytes.
        bytes: u64,
    },
    /// A file begins, or continues from `present`.
    Start {
        /// Its name in the repository.
        file: &'a str,
        /// Size of the whole file.
        bytes: u64,
        /// Bytes of it that an earlier attempt left.
        present: u64,
    },
    /// More bytes of the file have arrived.
    Advance {
        /// Number of bytes that arrived.
        bytes: u64,
    },
    /// The file is whole and verified.
    Finish {
        /// Its name in the repository.
        file: &'a str,
    },
    /// Another process downloads this file, and this one waits for it.
    Waiting {
        /// Its name in the repository.
        file: &'a str,
    },
    /// An attempt failed and is repeated after `wait`.
    Retry {
        /// The failure, for people.
        reason: &'a str,
        /// The pause before the next attempt.
        wait: Duration,
    },
}

/// The callback for events, on the thread that downloads.
pub type DownloadProgress<'p> = dyn FnMut(DownloadEvent<'_>) + 'p;

/// A model, adapter or data set that is on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The id on the hub (that of the `-hf` sibling, if finetune uses it), or the path as given.
    pub id: String,
    /// The folder with its files. From the hub it holds symbolic links into the cache. For a local
    /// data set this is the path as given, which may be a file.
    pub folder: PathBuf,
    /// The commit, if it came from the hub.
    pub commit: Option<String>,
    /// A note for the user.
    pub note: Option<String>,
    /// The files with the rows of a data set from the hub; otherwise empty.
    pub rows: Vec<PathBuf>,
}

/// Finds a model with its weights; `id_or_path` is a folder, an id such as `owner/name`, or
/// `hf://owner/name`.
///
/// For a repository that holds only Meta's original checkpoint it finds the `-hf` sibling;
/// [`Located::note`] says so.
///
/// # Errors
/// `User` if the model does not exist or may not be read, `Transient` if the hub or the network
/// fails, `Storage` if the cache cannot be written.
pub fn locate_model(
    id_or_path: &str,
    revision: &str,
    options: &HubOptions,
    progress: &mut DownloadProgress<'_>,
) -> Result<Located> {
    Ok(locate(id_or_path, revision, Scope::Weights, options, progress)?.located)
}

/// Finds a model like [`locate_model`]. Weights that the cache does not hold stay on the hub, to be
/// read by ranges.
///
/// # Errors
/// Those of [`locate_model`].
pub fn locate_model_in_place<'a>(
    id_or_path: &str,
    revision: &str,
    options: &'a HubOptions,
    progress: &mut DownloadProgress<'_>,
) -> Result<LocatedModel<'a>> {
    locate(id_or_path, revision, Scope::InPlace, options, progress)
}

/// Finds a model like [`locate_model`], but only configuration, tokenizer and the list of shards,
/// without weights.
///
/// # Errors
/// Those of [`locate_model`].
pub fn locate_model_headers(
    id_or_path: &str,
    revision: &str,
    options: &HubOptions,
    progress: &mut DownloadProgress<'_>,
) -> Result<Located> {
    Ok(locate(id_or_path, revision, Scope::Headers, options, progress)?.located)
}

fn locate<'a>(
    given: &str,
    revision: &str,
    scope: Scope,
    options: &'a HubOptions,
    progress: &mut DownloadProgress<'_>,
) -> Result<LocatedModel<'a>> {
    let whole = |located| LocatedModel { located, remote: None };
    let id = match names::parse_reference(given, options.home.as_deref())? {
        Reference::Local(path) => return local_model(given, path, scope).map(whole),
        Reference::Hub(id) => id,
    };
    names::check_revision(revision)?;
    let model = RepoSource { subject: RepoRef::Model, id, revision: revision.to_owned(), options };
    if options.offline {
        model.cached_model(scope, progress).map(whole)
    } else {
        model.fetched_model(scope, progress)
    }
}

/// Returns a local folder as it is, if its file names show that it holds a model.
fn local_model(given: &str, folder: PathBuf, scope: Scope) -> Result<Located> {
    if !folder.is_dir() {
        return Err(Error::user(format!("model `{given}` is a file"))
            .because("a model is a folder with config.json, a tokenizer and safetensors")
            .hint("give the folder that holds config.json"));
    }
    match select::check_model(&list_folder(&folder)?, scope) {
        Ok(()) => Ok(Located { id: given.to_owned(), folder, commit: None, note: None, rows: Vec::new() }),
        Err(lack) => {
            let error = lack.error(&format!("folder `{}`", folder.display()));
            Err(match names::check_repo_id(given) {
                Ok(()) if lack == ModelMismatch::Config => {
                    error.hint(format!("write `hf://{given}` to take the model of this name from the hub"))
                }
                _ => error,
            })
        }
    }
}

/// Returns the names in a folder, sorted, without those that are not UTF-8.
fn list_folder(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io("list", folder, &e))? {
        let entry = entry.map_err(|e| Error::io("list", folder, &e))?;
        files.extend(entry.file_name().into_string());
    }
    files.sort();
    Ok(files)
}

/// The kind of a repository, as the caller expects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RepoRef {
    Model,
    Adapter,
    Dataset,
}

/// A repository at a revision, before the search for it.
struct RepoSource<'a> {
    subject: RepoRef,
    id: String,
    revision: String,
    options: &'a HubOptions,
}

impl<'a> RepoSource<'a> {
    fn repo(&self) -> Repo {
        let kind = match self.subject {
            RepoRef::Model | RepoRef::Adapter => RepoType::Model,
            RepoRef::Dataset => RepoType::Dataset,
        };
        Repo::with_revision(self.id.clone(), kind, self.revision.clone())
    }

    fn store(&self) -> HubCache {
        let verified = VerifiedFiles::new(self.options.verified_dir.clone());
        HubCache::new(&self.options.cache_dir, &self.repo(), verified)
    }

    /// Returns the client of the hub, or the error of an unusable token: without one the hub would
    /// answer as to a stranger.
    fn client(&self) -> Result<Client<'a>> {
        match self.options.refused_token() {
            Some(refused) => Err(refused.clone()),
            None => Client::new(self.options, self.repo(), self.subject()),
        }
    }

    fn subject(&self) -> String {
        let noun = match self.subject {
            RepoRef::Model => "model",
            RepoRef::Adapter => "adapter",
            RepoRef::Dataset => "data set",
        };
        format!("{noun} `{}`", self.id)
    }

    /// Returns the same model converted for transformers, by Meta's naming.
    fn sibling(&self) -> Option<Self> {
        let is_model = self.subject == RepoRef::Model && !self.id.ends_with("-hf");
        let (id, revision) = (format!("{}-hf", self.id), self.revision.clone());
        is_model.then_some(RepoSource { id, revision, ..*self })
    }

    fn located(&self, folder: PathBuf, commit: String, note: Option<String>) -> Located {
        let of_token = self.options.token_note.clone().filter(|_| !self.options.offline);
        let notes: Vec<String> = note.into_iter().chain(of_token).collect();
        Located {
            id: self.id.clone(),
            folder,
            commit: Some(commit),
            note: (!notes.is_empty()).then(|| notes.join("; ")),
            rows: Vec::new(),
        }
    }

    fn fetched_model(&self, scope: Scope, progress: &mut DownloadProgress<'_>) -> Result<LocatedModel<'a>> {
        let client = self.client()?;
        let description = client.describe(progress)?;
        match select::check_model(&description.files, scope) {
            Ok(()) => self.fetch_model(client, &description, scope, None, progress),
            Err(lack @ ModelMismatch::Consolidated(_)) => self.fetch_sibling(lack, scope, progress),
            Err(lack) => Err(lack.error(client.subject())),
        }
    }

    fn fetch_sibling(
        &self,
        lack: ModelMismatch,
        scope: Scope,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<LocatedModel<'a>> {
        let Some(sibling) = self.sibling() else { return Err(lack.error(&self.subject())) };
        let client = sibling.client()?;
        let description = client.describe(progress).map_err(|error| {
            lack.error(&self.subject())
                .because(format!("its `-hf` sibling is not available: {}", error.what()))
        })?;
        select::check_model(&description.files, scope)
            .map_err(|other| other.error(&sibling.subject()))
            .during(|| format!("{} holds only Meta's original checkpoint", self.subject()))?;
        sibling.fetch_model(client, &description, scope, Some(self.sibling_note(&sibling)), progress)
    }

    fn sibling_note(&self, sibling: &RepoSource<'_>) -> String {
        format!(
            "`{}` holds only Meta's original checkpoint; using `{}`, the same model as safetensors",
            self.id, sibling.id
        )
    }

    fn fetch_model(
        &self,
        client: Client<'a>,
        description: &RepoDescription,
        scope: Scope,
        note: Option<String>,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<LocatedModel<'a>> {
        let store = self.store();
        let (commit, gated) = (description.commit.as_str(), description.gated);
        let download = Download { client: &client, store: &store, commit, gated };
        let texts = select::texts(&description.files);
        names::check_files(texts.iter().copied())?;
        download.fetch(&texts, progress)?;
        let folder = store.snapshot(commit);
        let selected = select::weights(&description.files);
        // A GGUF file holds what the headers of other models do.
        let scope = if selected == Ok(Weights::Gguf) { Scope::Weights } else { scope };
        let weights = match (scope, selected) {
            (_, Ok(Weights::Gguf)) => select::gguf_files(&description.files),
            (Scope::Headers, _) => Vec::new(),
            (_, Ok(Weights::Sharded)) => select::shards(&read_index(&folder)?, &description.files)?,
            _ => vec![select::SINGLE.to_owned()],
        };
        if scope == Scope::Weights {
            let weights: Vec<&str> = weights.iter().map(String::as_str).collect();
            names::check_files(weights.iter().copied())?;
            download.fetch(&weights, progress)?;
        }
        store.set_commit(commit)?;
        let remote = RemoteWeights::new(client, commit, gated, weights, &folder);
        Ok(LocatedModel { located: self.located(folder, commit.to_owned(), note), remote })
    }

    fn cached_model(&self, scope: Scope, progress: &mut DownloadProgress<'_>) -> Result<Located> {
        let (source, note) = match self.sibling() {
            Some(sibling) if self.cached_files()?.is_none() && sibling.cached_files()?.is_some() => {
                let note = self.sibling_note(&sibling);
                (sibling, Some(note))
            }
            _ => (RepoSource { id: self.id.clone(), revision: self.revision.clone(), ..*self }, None),
        };
        let (commit, files) = source.cached_files()?.ok_or_else(|| source.not_cached())?;
        let folder = source.store().snapshot(&commit);
        if select::check_model(&files, scope).is_err() {
            let has_config = files.iter().any(|file| file == select::CONFIG);
            let missing = if has_config { select::SINGLE } else { select::CONFIG };
            return Err(source.incomplete(&folder, missing));
        }
        source.verify(&commit, &select::texts(&files), progress)?;
        let selected = select::weights(&files);
        let scope = if selected == Ok(Weights::Gguf) { Scope::Weights } else { scope };
        let weights = match selected {
            Ok(Weights::Gguf) => select::gguf_files(&files),
            // The names in the index itself: a file that is not in the folder is missing, not
            // refused.
            Ok(Weights::Sharded) if scope != Scope::Headers => select::named_shards(&read_index(&folder)?)?,
            _ => vec![select::SINGLE.to_owned()],
        };
        if scope != Scope::Headers {
            let missing: Vec<&str> =
                weights.iter().filter(|file| !files.contains(file)).map(String::as_str).collect();
            if !missing.is_empty() {
                return Err(source.incomplete(&folder, &missing.join(", ")));
            }
        }
        if scope == Scope::Weights {
            let weights: Vec<&str> = weights.iter().map(String::as_str).collect();
            source.verify(&commit, &weights, progress)?;
        }
        Ok(source.located(folder, commit, note))
    }

    /// Refuses cached files whose bytes do not match their digest; offline, the client cannot fetch
    /// them again.
    fn verify(&self, commit: &str, files: &[&str], progress: &mut DownloadProgress<'_>) -> Result<()> {
        let store = self.store();
        for &file in files {
            if !store.holds(commit, file, |bytes| progress(DownloadEvent::Check { file, bytes }))? {
                let path = store.snapshot(commit).join(file);
                return Err(Error::user(format!(
                    "{} is damaged in the cache, and this run is offline",
                    self.subject()
                ))
                .because(format!("the bytes of {} do not match its digest", path.display()))
                .hint("run once without `--offline` and HF_HUB_OFFLINE to fetch the file again"));
            }
        }
        Ok(())
    }

    /// Returns the commit and the cached files of this revision.
    fn cached_files(&self) -> Result<Option<(String, Vec<String>)>> {
        let store = self.store();
        let Some(commit) = store.known_commit() else { return Ok(None) };
        let files = store.files(&commit)?;
        Ok(Some((commit, files)))
    }

    fn incomplete(&self, folder: &Path, missing: &str) -> Error {
        Error::user(format!("{} is not complete in the cache, and this run is offline", self.subject()))
            .because(format!("{} has no {missing}", folder.display()))
            .hint("run once without `--offline` and HF_HUB_OFFLINE to fetch the rest")
    }

    fn not_cached(&self) -> Error {
        Error::user(format!("{} is not in the cache, and this run is offline", self.subject()))
            .because(format!(
                "looked for revision `{}` in {}",
                self.revision,
                self.options.cache_dir.display()
            ))
            .hint("run once without `--offline` and HF_HUB_OFFLINE to download it, or give a folder")
    }
}

fn read_index(folder: &Path) -> Result<Vec<u8>> {
    let path = folder.join(select::INDEX);
    std::fs::read(&path).map_err(|e| Error::io("read", &path, &e))
}
