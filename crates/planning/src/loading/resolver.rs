//! Finds the source that a recipe or a flag names: a folder, an asset inside the binary, or a
//! repository on the hub (with progress on the terminal).

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{assets, custom_code, gguf_base};
use crate::adapter::{self, AdapterConfig};
use crate::data::Split;
use crate::error::{Error, Result};
use crate::hub::{self, DownloadEvent, HubOptions, Located, RemoteWeights, RowsFor};
use crate::recipe::DataSource;
use crate::report::Terminal;
use crate::weights::{ModelFiles, ModelIdentity, RangeReader, RemoteRange};

/// Size in bytes from which a file takes long enough to hash that a line is printed.
const LONG_TO_HASH: u64 = 1 << 30;

/// The most keys of an adapter's configuration that a warning names.
const MOST_KEYS: usize = 8;

/// Finds models, adapters and data sets for a command.
pub struct Resolver<'a> {
    options: HubOptions,
    terminal: &'a Terminal,
    leaves_weights: bool,
}

/// The weights of a model, found but not yet opened.
pub struct FoundWeights<'f> {
    remote: Option<RemoteWeights<'f>>,
    resolver: &'f Resolver<'f>,
}

/// A model, adapter or data set with its location.
#[derive(Debug, Clone)]
pub struct ResolvedSource {
    /// The name as the user wrote it, or the sibling repository used instead.
    pub id: String,
    /// The folder of its files.
    pub folder: PathBuf,
    /// The commit, for a source from the hub.
    pub commit: Option<String>,
    /// True if it came from the hub.
    pub on_hub: bool,
    /// The files with the rows of a data set from the hub; empty for all else.
    pub rows: Vec<PathBuf>,
}

impl ResolvedSource {
    /// Returns the paths of the rows of a data set: its files, or the file or folder itself.
    pub(crate) fn row_paths(&self) -> &[PathBuf] {
        if self.rows.is_empty() { std::slice::from_ref(&self.folder) } else { &self.rows }
    }

    /// Returns the hub id, or the last part of the folder's path, which does not depend on this
    /// machine.
    pub fn name(&self) -> String {
        // `.` is no name, so the whole path is resolved.
        let whole = self.folder.canonicalize().ok().filter(|_| !self.on_hub);
        let last = whole.as_deref().and_then(Path::file_name);
        last.map_or_else(|| self.id.clone(), |name| name.to_string_lossy().into_owned())
    }

    /// Returns the identity of the model by name only.
    pub fn identity(&self) -> ModelIdentity {
        ModelIdentity::named(&self.name(), self.commit.as_deref())
    }
}

impl<'a> Resolver<'a> {
    /// Creates a resolver with the hub's environment variables.
    ///
    /// # Errors
    /// The user's: one of the variables is malformed.
    pub fn new(offline: bool, terminal: &'a Terminal) -> Result<Self> {
        Ok(Resolver { options: HubOptions::from_env(offline)?, terminal, leaves_weights: false })
    }

    /// Returns a resolver for plans and descriptions: it reads only the headers of weights on the
    /// hub.
    #[must_use]
    pub fn leaving_weights(self) -> Self {
        Resolver { leaves_weights: true, ..self }
    }

    /// Finds a model and its weights: downloads them, or leaves them on the hub after
    /// [`Resolver::leaving_weights`].
    ///
    /// # Errors
    /// Those of [`hub::locate_model`].
    pub fn model_and_weights<'f>(
        &'f self,
        source: &DataSource,
        revision: &str,
    ) -> Result<(ResolvedSource, FoundWeights<'f>)> {
        if let Some(gguf) = self.gguf_model(source)? {
            return Ok((gguf, FoundWeights { remote: None, resolver: self }));
        }
        let mut remote = None;
        let resolved = self.find(source, |id, options, progress| {
            if !self.leaves_weights {
                return hub::locate_model(id, revision, options, progress);
            }
            let model = hub::locate_model_in_place(id, revision, &self.options, progress)?;
            remote = model.remote;
            Ok(model.located)
        })?;
        Ok((in_cache(resolved)?, FoundWeights { remote, resolver: self }))
    }

    /// Finds a model with its weights.
    ///
    /// # Errors
    /// Those of [`hub::locate_model`].
    pub fn model(&self, source: &DataSource, revision: &str) -> Result<ResolvedSource> {
        if let Some(gguf) = self.gguf_model(source)? {
            return Ok(gguf);
        }
        in_cache(
            self.find(source, |id, options, progress| hub::locate_model(id, revision, options, progress))?,
        )
    }

    /// Finds a model without its weights: config, tokenizer, index.
    ///
    /// # Errors
    /// Those of [`hub::locate_model_headers`].
    pub fn model_headers(&self, source: &DataSource, revision: &str) -> Result<ResolvedSource> {
        if let Some(gguf) = self.gguf_model(source)? {
            return Ok(gguf);
        }
        in_cache(self.find(source, |id, options, progress| {
            hub::locate_model_headers(id, revision, options, progress)
        })?)
    }

    /// Finds a model in a GGUF file on this machine.
    fn gguf_model(&self, source: &DataSource) -> Result<Option<ResolvedSource>> {
        let DataSource::Path(path) = source else { return Ok(None) };
        Ok(gguf_base::described(path)?.map(|folder| local(source, &folder)))
    }

    /// Finds a data set: a file or a folder, or the files of `split` in a hub repository.
    ///
    /// # Errors
    /// Those of [`hub::locate_dataset`]; an asset of the binary cannot be written to disk.
    pub fn dataset(&self, source: &DataSource, split: Split) -> Result<ResolvedSource> {
        let rows_for = match split {
            Split::Train => RowsFor::Training,
            Split::Eval | Split::Validation | Split::Test => RowsFor::Evaluation,
        };
        match source {
            DataSource::Path(path) => Ok(local(source, path)),
            _ => self
                .find(source, |id, options, progress| hub::locate_dataset(id, rows_for, options, progress)),
        }
    }

    /// Finds an adapter: a folder, the one adapter in a folder below it, or the files of a hub
    /// repository. Warns of unknown keys in its configuration.
    ///
    /// # Errors
    /// Those of [`hub::locate_adapter`]; several adapters are below the folder.
    pub fn adapter(&self, source: &DataSource) -> Result<ResolvedSource> {
        let resolved = match source {
            DataSource::Path(path) => {
                let folder = adapter::one_below(path)?;
                if folder != *path {
                    let (whole, used) = (path.display(), folder.display());
                    self.terminal.line(format!("the adapter in {whole} is {used}"));
                }
                local(source, &folder)
            }
            _ => {
                self.find(source, |id, options, progress| hub::locate_adapter(id, "main", options, progress))?
            }
        };
        let mut unknown = AdapterConfig::unknown_keys(&resolved.folder);
        if !unknown.is_empty() {
            let more = unknown.len().saturating_sub(MOST_KEYS);
            unknown.truncate(MOST_KEYS);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            self.terminal.warn(format!(
                "{} of {} has keys that finetune and PEFT 0.21 do not know; finetune ignores them: {}{more}",
                adapter::CONFIG_FILE,
                resolved.folder.display(),
                unknown.join(", ")
            ));
        }
        Ok(resolved)
    }

    /// Prints a warning on the terminal.
    pub fn warn(&self, text: &str) {
        self.terminal.warn(text);
    }

    fn find(
        &self,
        source: &DataSource,
        locate: impl FnOnce(&str, &HubOptions, &mut hub::DownloadProgress<'_>) -> Result<Located>,
    ) -> Result<ResolvedSource> {
        let (text, on_hub) = match source {
            DataSource::Builtin(name) => return Ok(local(source, &assets::unpack(name)?)),
            DataSource::Path(path) => (path.display().to_string(), false),
            DataSource::Hub(id) => (id.clone(), true),
        };
        let located = locate(&text, &self.options, &mut |event| self.show(event))?;
        if let Some(note) = &located.note {
            self.terminal.warn(note);
        }
        let Located { id, folder, commit, rows, .. } = located;
        if let Some(note) = custom_code::named_in(&folder) {
            self.terminal.warn(note);
        }
        Ok(ResolvedSource { id, folder, commit, on_hub, rows })
    }

    fn show(&self, event: DownloadEvent<'_>) {
        match event {
            DownloadEvent::Plan { files, bytes } if files > 0 => {
                let files = crate::units::exact(files, "file");
                self.terminal.line(format!("downloading {files}, {}", crate::units::bytes(bytes)));
            }
            DownloadEvent::Check { file, bytes } if bytes >= LONG_TO_HASH => {
                self.terminal.line(format!("checking {file} in the cache, {}", crate::units::bytes(bytes)));
            }
            DownloadEvent::Plan { .. } | DownloadEvent::Check { .. } => {}
            DownloadEvent::Start { file, bytes, present } => {
                self.terminal.download_start(file, bytes);
                self.terminal.download_advance(present);
            }
            DownloadEvent::Advance { bytes } => self.terminal.download_advance(bytes),
            DownloadEvent::Finish { .. } => self.terminal.download_finish(),
            DownloadEvent::Waiting { file } => {
                self.terminal.line(format!("waiting for another process that downloads {file}"));
            }
            DownloadEvent::Retry { reason, wait } => {
                let wait = crate::units::duration(wait.as_secs_f64());
                self.terminal.warn(format!("{reason}; trying again in {wait}"));
            }
        }
    }
}

impl FoundWeights<'_> {
    /// Opens the weights; `folder` is that of the model.
    ///
    /// # Errors
    /// Those of [`ModelFiles::open`]; weights on the hub cannot be read.
    pub fn open(&self, folder: &Path) -> Result<ModelFiles> {
        let Some(remote) = &self.remote else { return ModelFiles::open(folder) };
        let files = crate::units::exact(remote.files().len(), "weights file");
        self.resolver.terminal.line(format!("reading the headers of {files} on the hub"));
        ModelFiles::open_in_place(folder, self)
    }
}

impl RangeReader for FoundWeights<'_> {
    fn files(&self) -> &[String] {
        self.remote.as_ref().map_or(&[], RemoteWeights::files)
    }

    fn read(&self, file: &str, range: Range<u64>) -> Result<RemoteRange> {
        let Some(remote) = &self.remote else {
            return Err(Error::internal(format!("`{file}` is not on the hub")));
        };
        let hub::FileRange { bytes, file_bytes } =
            remote.read(file, range, &mut |event| self.resolver.show(event))?;
        Ok(RemoteRange { bytes, file_bytes })
    }
}

/// Replaces the folder of a GGUF model by that of its description.
fn in_cache(source: ResolvedSource) -> Result<ResolvedSource> {
    let folder = gguf_base::described(&source.folder)?;
    Ok(ResolvedSource { folder: folder.unwrap_or(source.folder), ..source })
}

fn local(source: &DataSource, path: &Path) -> ResolvedSource {
    ResolvedSource {
        id: source.to_string(),
        folder: path.to_owned(),
        commit: None,
        on_hub: false,
        rows: Vec::new(),
    }
}
