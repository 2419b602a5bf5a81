//! What a run writes, from shapes alone: tensors, beside which headers, tokenizers and logs are nothing.

use std::collections::BTreeMap;

use crate::optim::OptimizerOptions;
use crate::parallel::ParamDesc;
use crate::recipe::{Dtype, MasterWeights, Recipe};
use crate::weights::StoredDtype;

/// How the trained tensors of a run are stored.
pub(crate) struct StoredAs {
    /// What the recipe says of all of them.
    pub(crate) given: Dtype,
    /// What each is stored as where it leaves that open; none: f32, as adapters are.
    pub(crate) dtypes: BTreeMap<String, StoredDtype>,
}

impl StoredAs {
    /// The dtype of the tensor `name`.
    pub(crate) fn dtype(&self, name: &str) -> StoredDtype {
        let own = || self.dtypes.get(name).copied().unwrap_or(StoredDtype::F32);
        self.given_to_all().unwrap_or_else(own)
    }

    /// What all are stored as, where the recipe says so.
    pub(crate) fn given_to_all(&self) -> Option<StoredDtype> {
        match self.given {
            Dtype::Auto => None,
            Dtype::F32 => Some(StoredDtype::F32),
            Dtype::Bf16 => Some(StoredDtype::BF16),
            Dtype::F16 => Some(StoredDtype::F16),
        }
    }
}

/// Bytes that a run writes at a time, on all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WrittenBytes {
    /// A checkpoint: the trained tensors as they are updated, and the optimizer's state.
    pub(crate) checkpoint: u64,
    /// The trained tensors as the run leaves them.
    pub(crate) result: u64,
}

impl WrittenBytes {
    /// Of a run of `recipe` with these parameters, the trained ones of which it leaves `stored` so.
    pub(crate) fn of<'a>(
        params: impl IntoIterator<Item = &'a ParamDesc>,
        recipe: &Recipe,
        stored: &StoredAs,
    ) -> Self {
        let layout = OptimizerOptions::from(&recipe.optimizer).state_layout();
        let updated = if recipe.optimizer.master == MasterWeights::None { 2 } else { 4 };
        let mut saved = WrittenBytes { checkpoint: 0, result: 0 };
        for desc in params.into_iter().filter(|desc| desc.kind.trains()) {
            let elements = desc.elements();
            saved.checkpoint += (updated * elements + layout.bytes(elements)) as u64;
            saved.result += (elements * stored.dtype(&desc.name).size_bytes()) as u64;
        }
        saved
    }
}
