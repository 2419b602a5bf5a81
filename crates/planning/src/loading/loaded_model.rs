//! Model with its adapter, for verbs that compute with both.

use std::path::Path;

use super::adapter_setup::AdapterSetup;
use super::base_check::BaseComparison;
use super::base_model::BaseModel;
use super::dataset::DatasetLoader;
use super::resolver::Resolver;
use crate::error::Result;
use crate::recipe::{DataSource, Recipe};
use crate::report::Terminal;

/// A model with its adapter, found and checked; the weights are not loaded.
pub struct LoadedModel {
    /// The base model.
    pub base: BaseModel,
    /// The adapter, if the recipe has one.
    pub adapter_setup: Option<AdapterSetup>,
    /// The loader of its data sets.
    pub dataset_loader: DatasetLoader,
    /// Comparison with the model that the adapter was trained on. The caller finishes it after the
    /// weights are loaded.
    pub comparison: Option<BaseComparison>,
}

impl LoadedModel {
    /// Finds the model of `recipe` and `adapter`, a value of the command line relative to `folder`.
    /// With `force_base` a model that the adapter was not trained on is only a warning.
    ///
    /// # Errors
    /// The user's: model or adapter cannot be found or used, or they do not match.
    pub fn find(
        recipe: &Recipe,
        adapter: Option<&str>,
        folder: &Path,
        resolver: &Resolver<'_>,
        (terminal, force_base): (&Terminal, bool),
    ) -> Result<Self> {
        let mut base = BaseModel::open(&recipe.model, recipe.quantization.as_ref(), resolver)?;
        let adapter =
            adapter.map(|adapter| DataSource::from_argument("--adapter", adapter, folder)).transpose()?;
        let (adapter_setup, comparison) = match adapter {
            Some(source) => {
                let folder = resolver.adapter(&source)?.folder;
                base.adopt(&folder)?;
                let adapter_setup = AdapterSetup::saved_in(&folder, &base.config)?;
                let comparison = base.check_adapter(&folder, recipe.train.seed, force_base, terminal)?;
                (Some(adapter_setup), Some(comparison))
            }
            None => (None, None),
        };
        let (tokenizer, _) = base.tokenizer_with(&recipe.model.new_tokens)?;
        let mut data = recipe.data.clone();
        data.fit_positions(base.config.max_position_embeddings);
        let rows = base.dataset_loader(tokenizer, &data)?.for_objective(recipe);
        rows.warnings().iter().for_each(|text| terminal.warn(text));
        Ok(LoadedModel { base, adapter_setup, dataset_loader: rows, comparison })
    }
}
