//! Whether an adapter, or a checkpoint, is used on the model that it was trained on.

use std::path::Path;

use crate::adapter::SavedAdapter;
use crate::error::{Error, Result};
use crate::setup::resolver::ResolvedSource;
use crate::weights::{ModelFiles, ModelIdentity};

/// What was found when the model at hand was compared with the one trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseCheck {
    /// It is that model, or both were quantized from one.
    Same,
    /// It cannot be told, for the reason given.
    Unchecked(String),
    /// It is another model, and is used as asked; in words.
    Forced(String),
}

impl BaseCheck {
    /// Compares the base of `what`, such as "adapter out", with `model`; `force_base` takes another one too.
    ///
    /// # Errors
    /// The user's: they are different models.
    pub(crate) fn new(
        what: &str,
        trained_on: Option<&ModelIdentity>,
        model: &ModelIdentity,
        force_base: bool,
    ) -> Result<Self> {
        let Some(trained_on) = trained_on else {
            return Ok(BaseCheck::Unchecked(format!(
                "{what} does not say which model it was trained on: whether it was {model} is not checked"
            )));
        };
        match trained_on.is_same(model) {
            Some(true) => Ok(BaseCheck::Same),
            None => Ok(BaseCheck::Unchecked(format!(
                "{what} was trained on {trained_on}; whether {model} is the same cannot be told"
            ))),
            Some(false) if force_base => Ok(BaseCheck::Forced(format!(
                "{what} was trained on {trained_on}, and is used on {model} as `--force-base` says"
            ))),
            Some(false) => Err(Error::user(format!("cannot use {what} with this model"))
                .because(format!("it was trained on {trained_on}; the model is {model}"))
                .hint(
                    "give the model it was trained on as `--model`, or add `--force-base` to use it on this one",
                )),
        }
    }

    /// As [`BaseCheck::new`] for the adapter in `folder`.
    ///
    /// # Errors
    /// As [`BaseCheck::new`]; the adapter cannot be read.
    pub(crate) fn of_adapter(folder: &Path, model: &ModelIdentity, force_base: bool) -> Result<Self> {
        let trained_on = SavedAdapter::read(folder)?.base_model()?;
        Self::new(&format!("adapter {}", folder.display()), trained_on.as_ref(), model, force_base)
    }

    /// For the adapter in `folder` and the model `found`, of which perhaps only config.json is on this machine: by the
    /// weights where they are, else by commits.
    ///
    /// # Errors
    /// The user's: they are different models.
    pub fn of_headers(folder: &Path, found: &ResolvedSource, force_base: bool) -> Result<Self> {
        // Who uses the adapter reads it too, and says better what is wrong with it.
        if SavedAdapter::read(folder).is_err() {
            return Ok(BaseCheck::Same);
        }
        let named = found.identity();
        let model = match ModelFiles::open(&found.folder) {
            Ok(files) => named.of_files(&files)?,
            Err(_) => named,
        };
        Self::of_adapter(folder, &model, force_base)
    }
}
