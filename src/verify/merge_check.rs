//! What a merge adds the adapter to, and the certificate that the merged model does what base and adapter did.

use std::path::Path;

use serde_json::{Value, json};

use crate::adapter::{BaseValues, SavedAdapter};
use crate::cli::BaseChoice;
use crate::data::{self, Split};
use crate::engine::{Comparison, Engine};
use crate::error::{Error, Result};
use crate::export::bitsandbytes::LinearLayers;
use crate::loading::adapter_setup::AdapterSetup;
use crate::loading::base_model::{BaseModel, EngineOptions, describe, format};
use crate::loading::param_layout::Trains;
use crate::loading::resolver::Resolver;
use crate::quant::QuantFormat;
use crate::recipe::{
    DataSource, ModelInit, ModelSection, Purpose, QuantizationSection, Recipe, RecipeLayers, RecipeText,
};
use crate::units;
use crate::weights::ModelIdentity;

/// The file a run leaves beside its adapter.
const RECIPE_FILE: &str = "recipe.toml";
/// Rows of the data set that a certificate looks at, at most.
const ROWS: usize = 64;
/// Mean divergence that rounding the merged weights may cost, in nats per token.
const SAME_BASE: f64 = 0.005;
/// The same where the merged model has other base weights than the adapter was trained on.
const OTHER_BASE: f64 = 0.1;

/// A merge's base, decided.
#[derive(Debug)]
pub struct MergeBase {
    /// The format that the adapter was trained over, if its base was quantized.
    pub trained_over: Option<QuantFormat>,
    /// The linear layers that were not quantized.
    pub skipped: Vec<String>,
    /// What it is added to.
    pub values: BaseValues,
    /// Whether it is what the adapter was trained on.
    pub same: bool,
    /// Why, for the user.
    pub reason: String,
}

impl MergeBase {
    /// Decides by the recipe that lies beside the adapter and by what the model's files hold; without a `choice` it is
    /// what the adapter was trained on.
    ///
    /// # Errors
    /// `quantized` was asked for, and nothing says how the base was quantized; the adapter cannot be read.
    pub fn decide(choice: Option<BaseChoice>, base: &BaseModel, adapter: &Path) -> Result<Self> {
        let stored = base.format;
        let (trained_over, skipped) = match (stored, recipe_quantization(adapter)?) {
            (Some(format), _) => (Some(format), base.skipped.clone()),
            (None, Some(said)) => {
                (Some(format(&said)), LinearLayers::new(&base.config, &said.skip_modules)?.skipped)
            }
            (None, None) => (None, Vec::new()),
        };
        let merge =
            |values, same, reason: String| Ok(MergeBase { trained_over, skipped, values, same, reason });
        match (choice, stored, trained_over) {
            (_, Some(format), _) => merge(
                BaseValues::AsStored,
                true,
                format!("onto the dequantized weights of the model, which is stored in {}", describe(&format)),
            ),
            (None | Some(BaseChoice::Quantized), None, Some(format)) => merge(
                BaseValues::Quantized(format),
                true,
                format!(
                    "onto the weights dequantized from {}: the adapter was trained on these (`--base original` adds it to the unquantized ones)",
                    describe(&format)
                ),
            ),
            (Some(BaseChoice::Quantized), None, None) => {
                Err(Error::user(format!("cannot merge {} onto a quantized base", adapter.display()))
                    .because(format!(
                        "nothing says how its base was quantized: the model is not, and the adapter's folder has no {RECIPE_FILE} with a `[quantization]` table"
                    ))
                    .hint("give the quantized model as `--model` (`finetune quantize` writes one), or write `--base original`"))
            }
            (Some(BaseChoice::Original), None, Some(format)) => merge(
                BaseValues::AsStored,
                false,
                format!(
                    "onto the unquantized weights, as asked; the adapter was trained over {}, whose rounding it may have learned to correct",
                    describe(&format)
                ),
            ),
            (_, None, None) => match quantized_checkpoint(adapter)? {
                Some(checkpoint) => merge(
                    BaseValues::AsStored,
                    false,
                    format!(
                        "onto the unquantized weights; the adapter was trained over the quantized checkpoint {checkpoint}, whose rounding it may have learned to correct (give that as `--model` to merge onto it)"
                    ),
                ),
                None => merge(BaseValues::AsStored, true, "onto the weights in the model's files".into()),
            },
        }
    }

    /// The mean divergence above which a merge is refused, unless the user names another.
    pub fn threshold(&self) -> f64 {
        if self.same { SAME_BASE } else { OTHER_BASE }
    }
}

/// The quantized checkpoint that the adapter was trained over, if it says so.
fn quantized_checkpoint(adapter: &Path) -> Result<Option<ModelIdentity>> {
    let base = SavedAdapter::read(adapter)?.base_model()?;
    Ok(base.filter(|base| base.quantized_from().is_some()))
}

/// `[quantization]` of the run that left the adapter.
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

/// What a merge is checked with.
pub struct MergeCheck<'a> {
    /// The base in the form that the adapter was trained on.
    pub base: &'a BaseModel,
    /// The adapter's folder.
    pub adapter: &'a Path,
    /// Rows, of which the first are looked at.
    pub dataset: &'a DataSource,
    /// The most that the mean divergence may be, in nats per token.
    pub max_kl: f64,
    /// Where and in which dtype both models compute.
    pub options: &'a EngineOptions,
    /// Finds the rows.
    pub resolver: &'a Resolver<'a>,
}

/// What was found.
#[derive(Debug, Clone, Copy)]
pub struct Certificate {
    /// How far the two models differ.
    pub found: Comparison,
    /// What was allowed.
    pub max_kl: f64,
}

impl Certificate {
    /// As merge.json holds it.
    pub fn to_json(self) -> Value {
        json!({
            "rows": self.found.rows,
            "tokens": self.found.tokens,
            "mean_kl": self.found.mean_kl(),
            "max_kl": self.found.max_kl,
            "top1_agreement": self.found.top1_agreement(),
            "threshold_mean_kl": self.max_kl,
        })
    }
}

impl MergeCheck<'_> {
    /// Compares base and adapter with the merged model in `merged`.
    ///
    /// # Errors
    /// The mean divergence exceeds the threshold: the user's choice of base or dtype does not keep what was trained.
    pub fn certify(&self, merged: &Path) -> Result<Certificate> {
        let recipe = Recipe::default();
        let rows = self.base.dataset_loader(self.base.tokenizer()?, &recipe.data)?;
        let (dataset, _) = rows.load(&[self.dataset.clone().into()], Split::Eval, self.resolver)?;
        let examples = &dataset.examples()[..dataset.len().min(ROWS)];
        let adapter_setup = AdapterSetup::saved_in(self.adapter, &self.base.config)?;
        let trained = self.base.engine(Trains::Adapter(&adapter_setup), self.options)?;
        let merged = open_merged(merged, self.resolver)?.engine(Trains::Nothing, self.options)?;
        let found = compare(&trained, &merged, examples, recipe.data.longest_row())?;
        let certificate = Certificate { found, max_kl: self.max_kl };
        if found.mean_kl() > self.max_kl {
            return Err(Error::user("the merged model does not do what base and adapter do")
                .because(format!(
                    "KL divergence {:.4} nats a token on {} of {} (largest {:.3}, same likeliest token at {:.1} %); accepted: up to {}",
                    found.mean_kl(),
                    units::exact(found.rows, "row"),
                    self.dataset,
                    found.max_kl,
                    100.0 * found.top1_agreement(),
                    self.max_kl
                ))
                .because("nothing was written")
                .hint("merge onto the base it was trained on (leave out `--base`) or in `--dtype f32`; `--max-kl` accepts more"));
        }
        Ok(certificate)
    }
}

fn open_merged(folder: &Path, resolver: &Resolver<'_>) -> Result<BaseModel> {
    let model = ModelSection {
        id: Some(DataSource::Path(folder.to_owned())),
        init: ModelInit::Pretrained,
        ..ModelSection::default()
    };
    BaseModel::open(&model, None, resolver)
}

fn compare(first: &Engine, second: &Engine, examples: &[data::Example], tokens: usize) -> Result<Comparison> {
    first.compare(second, data::batch::in_order(examples, tokens))
}
