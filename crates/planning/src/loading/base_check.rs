//! Checks that an adapter or a checkpoint is used on the model that it was trained on.

use std::path::Path;

use crate::adapter::SavedAdapter;
use crate::error::{Error, Result};
use crate::loading::resolver::ResolvedSource;
use crate::model::{self, ModelConfig};
use crate::report::Terminal;
use crate::weights::{ConfigDifference, DigestTask, ModelFiles, ModelIdentity};

/// The result of comparing the current model with the one trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseCheck {
    /// The models are the same, or both were quantized from the same one.
    Same,
    /// The check is impossible, for the given reason.
    Unchecked(String),
    /// The models differ, and the user forced the use; with a warning.
    Forced(String),
}

impl BaseCheck {
    /// Compares the base of `what`, such as "adapter out", with `model`; `force_base` accepts
    /// another model.
    ///
    /// # Errors
    /// The user's: the models differ.
    pub fn new(
        what: &str,
        trained_on: Option<&ModelIdentity>,
        model: &ModelIdentity,
        force_base: bool,
    ) -> Result<Self> {
        let Some(trained_on) = trained_on else {
            return Ok(BaseCheck::Unchecked(format!(
                "{what} does not record the model it was trained on: the check against {model} is skipped"
            )));
        };
        let (then, now) = (trained_on.described_beside(model), model.described_beside(trained_on));
        match trained_on.is_same(model) {
            Some(true) => Ok(BaseCheck::Same),
            None => Ok(BaseCheck::Unchecked(format!(
                "{what} was trained on {then}; finetune cannot verify that {now} is the same model"
            ))),
            Some(false) if force_base => Ok(BaseCheck::Forced(format!(
                "{what} was trained on {then}; `--force-base` uses it on {now}"
            ))),
            Some(false) => {
                let error = Error::user(format!("cannot use {what} with this model"))
                    .because(format!("it was trained on {then}; the model is {now}"));
                let differences = trained_on.config_differences(model).into_iter();
                let differences = differences.map(|ConfigDifference { key, here, there }| {
                    format!("config.json differs: {key} was {here} in training, and is {there}")
                });
                Err(differences.fold(error, Error::because).hint(
                    "give the model it was trained on as `--model`, or add `--force-base` to use it on this one",
                ))
            }
        }
    }

    /// Prints the result, unless the models are the same for sure.
    pub fn print(&self, terminal: &Terminal) {
        match self {
            BaseCheck::Same => {}
            BaseCheck::Unchecked(text) => terminal.line(text),
            BaseCheck::Forced(text) => terminal.warn(text),
        }
    }

    /// Works like [`BaseCheck::new`], for the adapter in `folder`.
    ///
    /// # Errors
    /// Those of [`BaseCheck::new`]; the adapter cannot be read.
    pub fn of_adapter(folder: &Path, model: &ModelIdentity, force_base: bool) -> Result<Self> {
        let trained_on = SavedAdapter::read(folder)?.base_model()?;
        Self::new(&format!("adapter {}", folder.display()), trained_on.as_ref(), model, force_base)
    }

    /// Compares the base of the adapter in `folder` with the model `source` of shape `config`, of
    /// which only config.json may be on this machine. Uses a sample of the weights if they are
    /// present, else commits.
    ///
    /// # Errors
    /// The user's: the models differ.
    pub fn of_headers(
        folder: &Path,
        source: &ResolvedSource,
        config: &ModelConfig,
        force_base: bool,
    ) -> Result<Self> {
        // The code that loads the adapter reports a better error.
        if SavedAdapter::read(folder).is_err() {
            return Ok(BaseCheck::Same);
        }
        let (named, mut config) = (source.identity(), config.clone());
        let model = match ModelFiles::open(&source.folder) {
            Ok(mut files) => {
                model::settle(&mut config, &mut files)?;
                named.with_config(config.semantics()).of_files(&files)?
            }
            Err(_) => {
                // Only the weights show that a tied model has a separate head.
                let mut semantics = config.semantics();
                if config.tie_word_embeddings {
                    semantics.remove("tie_word_embeddings");
                }
                named.with_config(semantics)
            }
        };
        Self::of_adapter(folder, &model, force_base)
    }
}

/// A comparison of an adapter's base with the current model. It first compares names, config.json,
/// headers and a sample; then every byte, digested while the weights load.
#[derive(Debug)]
pub struct BaseComparison {
    pub(super) what: String,
    pub(super) trained_on: Option<ModelIdentity>,
    pub(super) model: ModelIdentity,
    pub(super) force_base: bool,
    pub(super) first: BaseCheck,
    pub(super) task: Option<DigestTask>,
}

impl BaseComparison {
    /// Waits for the digest of every byte and compares it. Call it after loading the weights and
    /// before using them.
    ///
    /// # Errors
    /// The user's: the bytes differ, or the files cannot be read.
    pub fn finish(self, terminal: &Terminal) -> Result<()> {
        let Some(task) = self.task else { return Ok(()) };
        let model = self.model.with_digest(&task.wait()?);
        let check = BaseCheck::new(&self.what, self.trained_on.as_ref(), &model, self.force_base)?;
        if check != self.first {
            check.print(terminal);
        }
        Ok(())
    }
}
