//! Choice of the base weights of a merge, and certificate that the merged model matches base and
//! adapter.

use std::path::Path;

use serde_json::{Value, json};

use crate::adapter::{BaseValues, SavedAdapter};
use crate::cli::BaseChoice;
use crate::data::{self, Split};
use crate::engine::Comparison;
use crate::error::{Error, Result};
use crate::export::quantized::LinearLayers;
use crate::loading::adapter_setup::AdapterSetup;
use crate::loading::base_model::{BaseModel, EngineOptions, format};
use crate::loading::gguf_base;
use crate::loading::param_layout::Trains;
use crate::loading::resolver::Resolver;
use crate::quant::QuantFormat;
use crate::recipe::{
    DataSource, ModelSection, Purpose, QuantizationSection, Recipe, RecipeLayers, RecipeText,
};
use crate::units;
use crate::weights::ModelIdentity;

/// Recipe that a run writes beside its adapter.
const RECIPE_FILE: &str = "recipe.toml";
/// Largest number of rows that a certificate compares.
const ROWS: usize = 64;
/// Share of the adapter's effect below which a merge warns.
const LOST: f64 = 0.5;
/// Largest mean divergence from rounding the merged weights, in nats per token.
const SAME_BASE: f64 = 0.005;
/// Largest mean divergence if the base weights are not those that the adapter was trained on, or
/// the merged ones are quantized.
const OTHER_BASE: f64 = 0.1;

/// Base weights of a merge.
#[derive(Debug)]
pub(crate) struct MergeBase {
    /// Format of the base that the adapter was trained on, if it was quantized.
    pub(crate) trained_over: Option<QuantFormat>,
    /// Linear layers that were not quantized.
    pub(crate) skipped: Vec<String>,
    /// Weights that the adapter is added to.
    pub(crate) values: BaseValues,
    /// True if the adapter was trained on these weights.
    pub(crate) same: bool,
    /// Reason of the choice, for the user.
    pub(crate) reason: String,
}

impl MergeBase {
    /// Decides by the recipe beside the adapter and by the format of the model's files. Without a
    /// `choice` the base is the one that the adapter was trained on.
    ///
    /// # Errors
    /// `choice` is `quantized`, and the quantization of the base is unknown; the adapter cannot be
    /// read.
    pub(crate) fn decide(choice: Option<BaseChoice>, base: &BaseModel, adapter: &Path) -> Result<Self> {
        let stored = base.format;
        let (trained_over, skipped) = match (stored, recipe_quantization(adapter)?) {
            (Some(format), _) => (Some(format), base.skipped.clone()),
            (None, Some(declared)) => {
                (Some(format(&declared)), LinearLayers::new(&base.config, &declared.skip_modules)?.skipped)
            }
            (None, None) => (None, Vec::new()),
        };
        let mut values = BaseValues::AsStored;
        let over = trained_over.map(|format| format.scheme().describe()).unwrap_or_default();
        let (same, reason) = match (choice, stored, trained_over) {
            (_, Some(_), _) => {
                (true, format!("onto the dequantized weights of the model, which is stored in {over}"))
            }
            (None | Some(BaseChoice::Quantized), None, Some(format)) => {
                values = BaseValues::Quantized(format);
                (
                    true,
                    format!(
                        "onto the weights dequantized from {over}: the adapter was trained on these (`--base original` adds it to the unquantized ones)"
                    ),
                )
            }
            (Some(BaseChoice::Quantized), None, None) => {
                return Err(Error::user(format!("cannot merge {} onto a quantized base", adapter.display()))
                    .because(format!(
                        "the quantization of its base is unknown: the model is not quantized, and the adapter's folder has no {RECIPE_FILE} with a `[quantization]` table"
                    ))
                    .hint("give the quantized model as `--model` (`finetune quantize` writes one), or write `--base original`"));
            }
            (Some(BaseChoice::Original), None, Some(_)) => (
                false,
                format!(
                    "onto the unquantized weights, as asked; the adapter was trained over {over}, whose rounding it may have learned to correct"
                ),
            ),
            (_, None, None) => match quantized_checkpoint(adapter)? {
                Some(checkpoint) => (
                    false,
                    format!(
                        "onto the unquantized weights; the adapter was trained over the quantized checkpoint {checkpoint}, whose rounding it may have learned to correct (give that as `--model` to merge onto it)"
                    ),
                ),
                None => (true, "onto the weights in the model's files".into()),
            },
        };
        Ok(MergeBase { trained_over, skipped, values, same, reason })
    }

    /// Returns the largest accepted mean divergence in nats per token, unless the user sets
    /// `--max-kl`.
    pub(crate) fn threshold(&self, requantized: bool) -> f64 {
        if self.same && !requantized { SAME_BASE } else { OTHER_BASE }
    }
}

/// Returns the quantized checkpoint that the adapter was trained on, if the adapter records one.
fn quantized_checkpoint(adapter: &Path) -> Result<Option<ModelIdentity>> {
    let base = SavedAdapter::read(adapter)?.base_model()?;
    Ok(base.filter(|base| base.quantized_from().is_some()))
}

/// Returns `[quantization]` of the run that wrote the adapter.
fn recipe_quantization(adapter: &Path) -> Result<Option<QuantizationSection>> {
    let path = adapter.join(RECIPE_FILE);
    if !path.exists() {
        return Ok(None);
    }
    let text = RecipeText::find(&path.display().to_string(), adapter)?;
    let layers = RecipeLayers {
        recipe: Some(text),
        folder: adapter.to_owned(),
        purpose: Purpose::Other,
        ..RecipeLayers::default()
    };
    Ok(Recipe::load(&layers)?.quantization)
}

/// Inputs of a check of a merge.
pub(crate) struct MergeCheck<'a> {
    /// Base in the form that the adapter was trained on.
    pub(crate) base: &'a BaseModel,
    /// Folder of the adapter.
    pub(crate) adapter: &'a Path,
    /// Data set, of which the first rows are compared.
    pub(crate) dataset: &'a DataSource,
    /// Largest accepted mean divergence, in nats per token.
    pub(crate) max_kl: f64,
    /// True if the merged weights are quantized again, so that a part of the adapter's effect is
    /// lost.
    pub(crate) requantized: bool,
    /// Device and dtype of both models.
    pub(crate) options: &'a EngineOptions,
    /// Resolver of the data set.
    pub(crate) resolver: &'a Resolver<'a>,
}

/// Result of a check.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Certificate {
    /// Differences between the two models.
    pub(crate) comparison: Comparison,
    /// Largest accepted mean divergence, in nats per token.
    pub(crate) max_kl: f64,
    /// True if the merged weights are quantized again.
    requantized: bool,
}

impl Certificate {
    /// Describes the certificate: the divergence and, for quantized weights, the share of the
    /// adapter's effect that survived.
    pub(crate) fn lines(self) -> Vec<String> {
        let Certificate { comparison, max_kl, requantized } = self;
        let divergence = format!(
            "verified on {}: mean KL divergence {:.6} nats a token between base + adapter and the merged model (accepted: up to {max_kl}); the likeliest token is the same at {:.2} % of positions",
            units::exact(comparison.rows, "row"),
            comparison.mean_kl(),
            100.0 * comparison.top1_agreement()
        );
        [divergence].into_iter().chain(requantized.then(|| self.effect())).collect()
    }

    /// Describes the share of the adapter's effect that quantized weights have.
    fn effect(self) -> String {
        match self.comparison.kept_share() {
            None => "the adapter does not change the logits of these rows".to_owned(),
            Some(share) => format!(
                "{:.1} % of the adapter's effect on the logits survived the quantization of the merged weights",
                100.0 * share
            ),
        }
    }

    /// Returns a warning if quantization removed most of the adapter's effect.
    pub(crate) fn warning(self) -> Option<&'static str> {
        let is_lost = self.requantized && self.comparison.kept_share().is_some_and(|share| share < LOST);
        is_lost.then_some(
            "the merged model has lost most of the adapter's effect: merge without `--requantize`, or use the adapter beside its base",
        )
    }

    /// Returns the certificate as in merge.json.
    pub(crate) fn to_json(self) -> Value {
        let mut entries = json!({
            "rows": self.comparison.rows,
            "tokens": self.comparison.tokens,
            "mean_kl": self.comparison.mean_kl(),
            "max_kl": self.comparison.max_kl,
            "top1_agreement": self.comparison.top1_agreement(),
            "threshold_mean_kl": self.max_kl,
        });
        if let Some(share) = self.comparison.kept_share() {
            entries["effect_kept"] = share.into();
        }
        entries
    }
}

impl MergeCheck<'_> {
    /// Compares base and adapter with the merged model in `merged`.
    ///
    /// # Errors
    /// The mean divergence exceeds the threshold: the chosen base or dtype changes the trained
    /// model too much.
    pub(crate) fn certify(&self, merged: &Path) -> Result<Certificate> {
        let compared = self.compare(merged);
        // `merged` is a temporary folder.
        gguf_base::forget(merged);
        let comparison = compared?;
        let certificate = Certificate { comparison, max_kl: self.max_kl, requantized: self.requantized };
        if comparison.mean_kl() <= self.max_kl {
            return Ok(certificate);
        }
        let error = Error::user("the merged model differs too much from base and adapter").because(format!(
            "KL divergence {:.4} nats a token on {} of {} (largest {:.3}, same likeliest token at {:.1} %); accepted: up to {}",
            comparison.mean_kl(),
            units::exact(comparison.rows, "row"),
            self.dataset,
            comparison.max_kl,
            100.0 * comparison.top1_agreement(),
            self.max_kl
        ));
        let error = if self.requantized { error.because(certificate.effect()) } else { error };
        Err(error.because("nothing was written").hint(self.hint()))
    }

    fn compare(&self, merged: &Path) -> Result<Comparison> {
        let recipe = Recipe::default();
        let loader = self.base.dataset_loader(self.base.tokenizer()?, &recipe.data)?;
        let dataset = loader.load(&[self.dataset.clone().into()], Split::Eval, self.resolver)?.dataset;
        let examples = &dataset.examples()[..dataset.len().min(ROWS)];
        let adapter_setup = AdapterSetup::saved_in(self.adapter, &self.base.config)?;
        let trained = self.base.engine(Trains::Adapter(&adapter_setup), self.options)?;
        let model = ModelSection { id: Some(DataSource::Path(merged.to_owned())), ..ModelSection::default() };
        let merged = BaseModel::open(&model, None, self.resolver)?.engine(Trains::Nothing, self.options)?;
        let batches = data::batch::in_order(examples, recipe.data.longest_row());
        if !self.requantized {
            return trained.compare(&merged, batches);
        }
        let other = || self.base.engine(Trains::Nothing, self.options);
        let base = (!trained.has_base()).then(other).transpose()?;
        trained.compare_effect(&merged, base.as_ref(), batches)
    }

    fn hint(&self) -> &'static str {
        if self.requantized {
            "merge without `--requantize`, into plain weights; `--max-kl` accepts more"
        } else {
            "merge onto the base it was trained on (leave out `--base`) or in `--dtype f32`; `--max-kl` accepts more"
        }
    }
}
