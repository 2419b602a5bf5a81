//! A model found and understood, and the engine made of it.

use candle_core::{DType, Device};

use super::adaptation::Adaptation;
use super::locate::{Finder, Found};
use super::parameters::{Values, slots};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::ops::attention::Algorithm;
use crate::ops::device;
use crate::recipe::{Attention, Dtype, Model, ModelInit};
use crate::strategy::Single;
use crate::weights::ModelFiles;

/// A model before its weights are read.
#[derive(Debug)]
pub struct Base {
    /// Where it is.
    pub found: Found,
    /// Its shape.
    pub config: ModelConfig,
    /// Its weights on disk; none when they start random.
    pub files: Option<ModelFiles>,
}

/// How an engine computes.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Where.
    pub device: Device,
    /// In which dtype.
    pub dtype: DType,
    /// With which attention.
    pub algorithm: Algorithm,
    /// Seeds random initial values.
    pub seed: u64,
}

impl EngineOptions {
    /// What `[model]` says on this device.
    ///
    /// # Errors
    /// f16 was asked for: training in it needs loss scaling, which this program does not do yet.
    pub fn new(model: &Model, device: Device, seed: u64) -> Result<Self> {
        let dtype = match model.dtype {
            Dtype::Auto => device::default_dtype(&device),
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::BF16,
            Dtype::F16 => {
                return Err(Error::user("cannot compute in f16")
                    .because(
                        "`model.dtype` is \"f16\", which needs loss scaling; accepted now: auto, f32, bf16",
                    )
                    .hint("write `dtype = \"bf16\"`; a model stored in f16 is converted as it is read"));
            }
        };
        let algorithm = match model.attention {
            Attention::Flash => Algorithm::Flash,
            Attention::Eager => Algorithm::Eager,
        };
        Ok(EngineOptions { device, dtype, algorithm, seed })
    }
}

impl Base {
    /// Finds the model of `[model]`, reads its config.json and, unless it starts random, opens its weights.
    pub fn open(model: &Model, finder: &Finder<'_>) -> Result<Self> {
        let source = model.id.as_ref().ok_or_else(|| {
            Error::user("no model is given").hint("give one with `--model`, or as `model.id` in the recipe")
        })?;
        let found = match model.init {
            ModelInit::Pretrained => finder.model(source, &model.revision)?,
            ModelInit::Random => finder.model_headers(source, &model.revision)?,
        };
        let path = found.folder.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, &e))?;
        let config = ModelConfig::from_json(&text, &path.display().to_string())?;
        let files = match model.init {
            ModelInit::Pretrained => Some(ModelFiles::open(&found.folder)?),
            ModelInit::Random => None,
        };
        Ok(Base { found, config, files })
    }

    /// Whether the files hold every tensor in the shape that config.json says, and no other: by their headers alone.
    ///
    /// # Errors
    /// A tensor is missing, has another shape, or has no place in the model.
    pub fn check(&self, adaptation: Option<&Adaptation>, trains_all: bool) -> Result<()> {
        let values = Values { config: &self.config, files: self.files.as_ref(), adaptation, seed: 0 };
        values.check(&slots(&self.config, adaptation, trains_all))
    }

    /// Loads the weights: an engine in which `adaptation` trains, or everything when there is none and
    /// `trains_all`, or nothing.
    ///
    /// # Errors
    /// A tensor is missing, has another shape than config.json says, or has no place in the model.
    pub fn engine(
        &self,
        adaptation: Option<&Adaptation>,
        trains_all: bool,
        options: &EngineOptions,
    ) -> Result<Engine> {
        self.check(adaptation, trains_all)?;
        let values =
            Values { config: &self.config, files: self.files.as_ref(), adaptation, seed: options.seed };
        let slots = slots(&self.config, adaptation, trains_all);
        let loras = adaptation.map(Adaptation::loras).unwrap_or_default();
        let strategy =
            Single::new(&self.config, slots, loras, options.dtype, &options.device, &mut |slot, fill| {
                values.fill(slot, fill)
            })?;
        Ok(Engine {
            config: self.config.clone(),
            strategy,
            algorithm: options.algorithm,
            device: options.device.clone(),
        })
    }
}
