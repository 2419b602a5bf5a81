//! Merges into the quantized format of the base: the files of the base, GGUF files too, with new
//! bytes for the tensors that the adapter changes.

use std::path::Path;

use super::base_values::ValueSource;
use super::{BaseValues, MergeOutput, MergePlan};
use crate::error::{Error, Result};
use crate::weights::{PatchedFiles, Written};

impl MergePlan<'_> {
    /// Checks that the merged weights fit into the files of the base.
    ///
    /// # Errors
    /// User: the base is neither quantized nor a GGUF file; the adapter belongs to the base
    /// quantized once more, adds tokens, or separates a tied embedding from the head.
    pub(super) fn check_requantized(&self, values: BaseValues) -> Result<()> {
        let refused = |cause: String, hint: &str| {
            let base = self.base.source().display();
            Err(Error::user(format!("cannot merge into the format of {base}")).because(cause).hint(hint))
        };
        if !self.base.is_gguf() && !self.base.names().any(|name| self.base.stored_format(name).is_some()) {
            return refused(
                "it is not quantized".into(),
                "merge without `--requantize`; `finetune quantize` quantizes the merged model",
            );
        }
        if let BaseValues::Quantized(format) = values {
            let format = format.scheme().describe();
            return refused(
                format!("the adapter was trained over {format}, made from the weights that the files hold"),
                "merge without `--requantize`; `--base original` adds the adapter to the weights in the files",
            );
        }
        let plain = "merge without `--requantize`";
        if self.untied {
            return refused("the adapter separates its embedding from its head".into(), plain);
        }
        let resized = |out: &&MergeOutput<'_>| {
            self.base.info(out.stored).is_none_or(|info| info.shape != out.entry.shape)
        };
        match self.outs().find(resized) {
            None => Ok(()),
            Some(out) => refused(
                format!(
                    "the adapter adds tokens: `{}` becomes {:?}, and quantized files keep their sizes",
                    out.entry.name, out.entry.shape
                ),
                plain,
            ),
        }
    }

    /// Writes the files of the base with the changed tensors.
    pub(super) fn requantize(&self, folder: &Path) -> Result<Vec<Written>> {
        let mut files = PatchedFiles::copy(self.base, folder)?;
        for out in self.outs() {
            if !out.is_changed() && matches!(out.source, ValueSource::Base(_)) {
                continue;
            }
            let mut values = Vec::with_capacity(out.entry.shape.iter().product());
            self.merged(out, |block| {
                values.extend_from_slice(block);
                Ok(())
            })?;
            files.replace(out.stored, &values)?;
        }
        files.finish()
    }
}
