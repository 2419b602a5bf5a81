//! Bytes that a run writes, computed from shapes alone. Only tensors count: headers, tokenizers and
//! logs are negligible.

use std::collections::BTreeMap;

use crate::optim::OptimizerOptions;
use crate::parallel::ParamDesc;
use crate::recipe::{Dtype, MasterWeights, Recipe};
use crate::weights::{StoredDtype, output_dtype};

/// The stored dtypes of a run's trained tensors.
pub struct StoredAs {
    /// The dtype that the recipe sets for all tensors.
    pub given: Dtype,
    /// The dtype of each tensor if the recipe says "auto"; missing names: f32, as for adapters.
    pub dtypes: BTreeMap<String, StoredDtype>,
    /// Bytes of the tensors that the result keeps from the base.
    pub retained_bytes: u64,
}

impl StoredAs {
    /// Returns the stored dtype of the tensor `name`.
    pub fn dtype(&self, name: &str) -> StoredDtype {
        let own = self.dtypes.get(name).copied().unwrap_or(StoredDtype::F32);
        output_dtype(name, own, self.given)
    }

    /// Returns the dtype of all tensors if the recipe sets one.
    pub fn given_to_all(&self) -> Option<StoredDtype> {
        match self.given {
            Dtype::Auto => None,
            Dtype::F32 => Some(StoredDtype::F32),
            Dtype::Bf16 => Some(StoredDtype::BF16),
            Dtype::F16 => Some(StoredDtype::F16),
        }
    }
}

/// Bytes of one write, summed over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrittenBytes {
    /// A checkpoint: the trained tensors in the dtype of their update, and the optimizer's state.
    pub checkpoint: u64,
    /// The trained tensors in the final output, and those that it keeps from the base.
    pub result: u64,
}

impl WrittenBytes {
    /// Counts the bytes of a run of `recipe` with these parameters; `stored` gives the dtypes of
    /// its output.
    pub fn of(descs: &[ParamDesc], recipe: &Recipe, stored: &StoredAs) -> Self {
        let layout = OptimizerOptions::from(&recipe.optimizer).state_layout();
        let updated = if recipe.optimizer.master == MasterWeights::None { 2 } else { 4 };
        let mut saved = WrittenBytes { checkpoint: 0, result: stored.retained_bytes };
        for desc in descs.iter().filter(|desc| desc.kind.trains()) {
            let elements = desc.global_elements();
            saved.checkpoint += (updated * elements + layout.bytes(elements)) as u64;
            saved.result += (elements * stored.dtype(&desc.name).size_bytes()) as u64;
        }
        saved
    }
}
