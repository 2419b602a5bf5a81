//! The parameters that runs of one model would have, by what a recipe trains and quantizes. A plan compares dozens of
//! variations of a recipe, of which most differ in other things; of a large model the list takes a millisecond or two to make.

use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::loading::adapter_setup::AdapterSetup;
use crate::parallel::ParamDesc;
use crate::recipe::{AdapterSection, QuantizationSection};
use crate::rendezvous::locked;

/// What a recipe says that decides them.
pub(super) type DecidingKeys = (Option<AdapterSection>, Option<QuantizationSection>);

/// The parameters of a run.
#[derive(Debug)]
pub(crate) struct RunParams {
    /// The adapter of a recipe that has one where the run has none.
    pub(crate) own_adapter: Option<AdapterSetup>,
    /// Every parameter of the run.
    pub(crate) descs: Arc<[ParamDesc]>,
}

/// Those that were made already.
#[derive(Debug, Default)]
pub(crate) struct ParamCache(Mutex<Vec<(DecidingKeys, Arc<RunParams>)>>);

impl ParamCache {
    /// The parameters of a recipe with these keys, which `make` lists where they are not known.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn get(
        &self,
        keys: DecidingKeys,
        make: impl FnOnce() -> Result<RunParams>,
    ) -> Result<Arc<RunParams>> {
        let known = |all: &[(DecidingKeys, Arc<RunParams>)]| {
            all.iter().find(|(known, _)| *known == keys).map(|(_, params)| Arc::clone(params))
        };
        if let Some(params) = known(&locked(&self.0)) {
            return Ok(params);
        }
        let params = Arc::new(make()?);
        locked(&self.0).push((keys, Arc::clone(&params)));
        Ok(params)
    }
}
