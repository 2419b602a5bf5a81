//! Finds what a recipe or a flag names: a folder, an asset inside the binary, or the hub (with progress on the
//! terminal).

use std::path::{Path, PathBuf};

use super::assets;
use crate::error::Result;
use crate::hub::{self, DownloadEvent, HubOptions, Located};
use crate::recipe::DataSource;
use crate::report::Terminal;

/// Finds models, adapters and data sets for a command.
pub struct Resolver<'a> {
    options: HubOptions,
    terminal: &'a Terminal,
}

/// A model or adapter that was found.
#[derive(Debug, Clone)]
pub struct ResolvedSource {
    /// As the user wrote it (or the sibling that was taken).
    pub id: String,
    /// Where its files are.
    pub folder: PathBuf,
    /// The commit, for one from the hub.
    pub commit: Option<String>,
    /// It came from the hub.
    pub on_hub: bool,
}

impl<'a> Resolver<'a> {
    /// A finder that obeys the hub's environment variables.
    pub fn new(offline: bool, terminal: &'a Terminal) -> Result<Self> {
        Ok(Resolver { options: HubOptions::from_env(offline)?, terminal })
    }

    /// A model with its weights.
    pub fn model(&self, source: &DataSource, revision: &str) -> Result<ResolvedSource> {
        self.find(source, |id, options, progress| hub::locate_model(id, revision, options, progress))
    }

    /// A model without its weights: config, tokenizer, index.
    pub fn model_headers(&self, source: &DataSource, revision: &str) -> Result<ResolvedSource> {
        self.find(source, |id, options, progress| hub::locate_model_headers(id, revision, options, progress))
    }

    /// A data set: a file or a folder.
    pub fn dataset(&self, source: &DataSource) -> Result<ResolvedSource> {
        match source {
            DataSource::Path(path) => Ok(local(source, path)),
            _ => self.find(source, hub::locate_dataset),
        }
    }

    /// An adapter: a folder, or the files of a hub repository.
    pub fn adapter(&self, source: &DataSource) -> Result<ResolvedSource> {
        match source {
            DataSource::Path(path) => Ok(local(source, path)),
            _ => {
                self.find(source, |id, options, progress| hub::locate_adapter(id, "main", options, progress))
            }
        }
    }

    fn find(
        &self,
        source: &DataSource,
        locate: impl Fn(&str, &HubOptions, &mut hub::DownloadProgress<'_>) -> Result<Located>,
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
        Ok(ResolvedSource { id: located.id, folder: located.folder, commit: located.commit, on_hub })
    }

    fn show(&self, event: DownloadEvent<'_>) {
        match event {
            DownloadEvent::Plan { files, bytes } if files > 0 => {
                self.terminal.line(format!("downloading {files} files, {}", crate::units::bytes(bytes)));
            }
            DownloadEvent::Plan { .. } => {}
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
                self.terminal.warn(format!(
                    "{reason}; trying again in {}",
                    crate::units::duration(wait.as_secs_f64())
                ));
            }
        }
    }
}

fn local(source: &DataSource, path: &Path) -> ResolvedSource {
    ResolvedSource { id: source.to_string(), folder: path.to_owned(), commit: None, on_hub: false }
}
