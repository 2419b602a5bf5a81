//! A cache of the parameter lists that runs of one model have. A plan compares dozens of variants
//! of a recipe, and most share their parameters. Listing those of a large model takes 1 to 2 ms.

use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::loading::adapter_setup::AdapterSetup;
use crate::locks::locked;
use crate::parallel::ParamDesc;
use crate::recipe::{AdapterSection, QuantizationSection};

/// The keys of a recipe that determine its parameters.
pub(super) type DecidingKeys = (Option<AdapterSection>, Option<QuantizationSection>);

/// The parameters of a run.
#[derive(Debug)]
pub(crate) struct RunParams {
    /// The adapter of the recipe, if the run itself has none.
    pub(crate) own_adapter: Option<AdapterSetup>,
    /// Every parameter of the run.
    pub descs: Arc<[ParamDesc]>,
}

/// The parameter lists made so far.
#[derive(Debug, Default)]
pub struct ParamCache(Mutex<Vec<(DecidingKeys, Arc<RunParams>)>>);

impl ParamCache {
    /// Returns the parameters for these keys; calls `make` if they are not in the cache.
    ///
    /// # Errors
    /// The errors of `make`.
    pub(super) fn get(
        &self,
        keys: DecidingKeys,
        make: impl FnOnce() -> Result<RunParams>,
    ) -> Result<Arc<RunParams>> {
        let known =
            locked(&self.0).iter().find(|(known, _)| *known == keys).map(|(_, params)| Arc::clone(params));
        if let Some(params) = known {
            return Ok(params);
        }
        let params = Arc::new(make()?);
        locked(&self.0).push((keys, Arc::clone(&params)));
        Ok(params)
    }
}
