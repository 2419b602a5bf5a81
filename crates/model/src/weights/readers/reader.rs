//! The interface of a reader of quantized checkpoints.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::weights::TensorInfo;
use crate::weights::header::clip;
use crate::weights::quantized::QuantizedParts;

/// Tensors by name.
pub(in crate::weights) type Tensors = BTreeMap<String, TensorInfo>;

/// A reader of one format of quantized checkpoints.
pub(super) trait CheckpointReader: Sync {
    /// Returns the `quant_method` in config.json.
    fn method(&self) -> &'static str;

    /// Returns whether a `quantization_config` without a method, which has the keys that `has`
    /// accepts, belongs to this format.
    fn reads_unnamed(&self, has: &dyn Fn(&str) -> bool) -> bool;

    /// Returns the weight of which a tensor of this name would be a companion.
    fn owner(&self, name: &str) -> Option<String>;

    /// Returns whether [`CheckpointReader::read`] reads the values of a tensor of this name. They
    /// are fetched even if a plan reads only the headers of a model.
    fn is_label(&self, name: &str) -> bool;

    /// Checks a weight with its companions. Returns its entry, as before quantization but with the
    /// position of its codes, and the positions of its other runs; or the cause of a refusal.
    fn read(&self, weight: &StoredWeight<'_, '_>) -> Result<(TensorInfo, QuantizedParts), String>;
}

/// A quantized weight among the tensors of a checkpoint.
pub(super) struct StoredWeight<'w, 'a> {
    /// All tensors of the checkpoint.
    pub(super) tensors: &'w Tensors,
    /// The name of the weight.
    pub(super) name: &'w str,
    /// Reads a tensor.
    pub(super) bytes: &'w dyn Fn(&TensorInfo) -> &'a [u8],
}

impl StoredWeight<'_, '_> {
    /// Returns the name of its module.
    pub(super) fn module(&self) -> &str {
        self.name.trim_end_matches(".weight")
    }

    /// Returns the companion that is named by the weight and `end`.
    pub(super) fn companion(&self, end: &str) -> Option<&TensorInfo> {
        self.tensors.get(&format!("{}{end}", self.name))
    }

    /// Returns the companion that is named by the module and `end`.
    pub(super) fn of_module(&self, end: &str) -> Option<&TensorInfo> {
        self.tensors.get(&format!("{}{end}", self.module()))
    }

    /// Returns the tensor under the weight's own name.
    pub(super) fn codes(&self) -> Result<&TensorInfo, String> {
        self.tensors.get(self.name).ok_or_else(|| "its codes are missing".into())
    }

    /// Returns the error for a weight that cannot be read.
    pub(super) fn malformed(&self, method: &str, cause: &str) -> Error {
        let any = self.tensors.iter().find(|(name, _)| name.starts_with(self.module()));
        let file = any.map(|(_, info)| info.file.display().to_string()).unwrap_or_default();
        Error::user(format!("cannot read weights {file}"))
            .because(format!("tensor `{}`, quantized by {method}: {cause}", clip(self.name)))
            .hint("quantize the model again: `finetune quantize --model ORIGINAL --kind nf4 --output NEW`")
    }
}
