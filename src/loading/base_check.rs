//! Whether an adapter, or a checkpoint, is used on the model that it was trained on.

use std::path::Path;

use crate::adapter::SavedAdapter;
use crate::error::{Error, Result};
use crate::loading::resolver::ResolvedSource;
use crate::model::{self, ModelConfig};
use crate::report::Terminal;
use crate::weights::{ConfigDifference, DigestTask, ModelFiles, ModelIdentity};

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
        let (then, now) = (trained_on.told_from(model), model.told_from(trained_on));
        match trained_on.is_same(model) {
            Some(true) => Ok(BaseCheck::Same),
            None => Ok(BaseCheck::Unchecked(format!(
                "{what} was trained on {then}; whether {now} is the same cannot be told"
            ))),
            Some(false) if force_base => Ok(BaseCheck::Forced(format!(
                "{what} was trained on {then}, and is used on {now} as `--force-base` says"
            ))),
            Some(false) => {
                let error = Error::user(format!("cannot use {what} with this model"))
                    .because(format!("it was trained on {then}; the model is {now}"));
                let differences = trained_on.config_differences(model).into_iter();
                let differences = differences.map(|ConfigDifference { key, here, there }| {
                    format!("config.json says otherwise: {key} was {here} in training, and is {there}")
                });
                Err(differences.fold(error, Error::because).hint(
                    "give the model it was trained on as `--model`, or add `--force-base` to use it on this one",
                ))
            }
        }
    }

    /// Says what was found where that is not the same model for sure.
    pub fn say(&self, terminal: &Terminal) {
        match self {
            BaseCheck::Same => {}
            BaseCheck::Unchecked(text) => terminal.line(text),
            BaseCheck::Forced(text) => terminal.warn(text),
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

    /// For the adapter in `folder` and the model `found` of shape `config`, of which perhaps only config.json is on this
    /// machine: by a sample of the weights where they are, else by commits.
    ///
    /// # Errors
    /// The user's: they are different models.
    pub fn of_headers(
        folder: &Path,
        found: &ResolvedSource,
        config: &ModelConfig,
        force_base: bool,
    ) -> Result<Self> {
        // Who uses the adapter reads it too, and says better what is wrong with it.
        if SavedAdapter::read(folder).is_err() {
            return Ok(BaseCheck::Same);
        }
        let (named, mut config) = (found.identity(), config.clone());
        let model = match ModelFiles::open(&found.folder) {
            Ok(mut files) => {
                model::settle(&mut config, &mut files)?;
                named.with_config(config.semantics()).of_files(&files)?
            }
            Err(_) => {
                // Whether a tied model has a head of its own, its weights alone can tell.
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

/// The comparison of an adapter's base with the model at hand: at once by names, config.json, headers and a sample, then by
/// every byte, which are digested while the weights are loaded.
#[derive(Debug)]
pub struct BaseComparison {
    what: String,
    trained_on: Option<ModelIdentity>,
    model: ModelIdentity,
    force_base: bool,
    first: BaseCheck,
    task: Option<DigestTask>,
}

impl BaseComparison {
    /// Begins to compare the base of the adapter in `folder` with `model`, of whose bytes `digest` begins a digest.
    ///
    /// # Errors
    /// The user's: they are different models already; the adapter cannot be read.
    pub(crate) fn begin(
        folder: &Path,
        model: ModelIdentity,
        force_base: bool,
        terminal: &Terminal,
        digest: impl FnOnce() -> Result<Option<DigestTask>>,
    ) -> Result<Self> {
        let trained_on = SavedAdapter::read(folder)?.base_model()?;
        let what = format!("adapter {}", folder.display());
        let first = BaseCheck::new(&what, trained_on.as_ref(), &model, force_base)?;
        first.say(terminal);
        let comparable = trained_on.as_ref().is_some_and(ModelIdentity::says_every_byte);
        let task = if comparable && first == BaseCheck::Same { digest()? } else { None };
        Ok(BaseComparison { what, trained_on, model, force_base, first, task })
    }

    /// Waits for the digest of every byte and compares it, once the weights are loaded and before anything is made of them.
    ///
    /// # Errors
    /// The user's: the models differ after all; the files cannot be read.
    pub fn finish(self, terminal: &Terminal) -> Result<()> {
        let Some(task) = self.task else { return Ok(()) };
        let model = self.model.with_digest(&task.wait()?);
        let check = BaseCheck::new(&self.what, self.trained_on.as_ref(), &model, self.force_base)?;
        if check != self.first {
            check.say(terminal);
        }
        Ok(())
    }
}
