//! Fine-tuning and trained models from another program: [`Session`] trains, [`TrainedModel`]
//! answers.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device};

use crate::checkpoint::SnapshotPart;
use crate::clock;
use crate::collective::SingleRank;
use crate::data::{Batch, Cursor, Example, Origin, PromptEncoder, Role, RowOrigin, Sampler};
use crate::engine::{Engine, Evaluation, Reference, SamplingOptions, StepResult, TokenSampler, Trainer};
use crate::error::{Error, Result};
use crate::loading::{DatasetLoader, EngineOptions, LoadedModel, Resolver, Trains};
use crate::model::AdapterSwitch;
use crate::planning::{MemoryBudget, Plan, WorldSize};
use crate::recipe::enums::OnNan;
use crate::recipe::{Purpose, Recipe, RecipeLayers, RecipeText};
use crate::report::{Terminal, Verbosity};
use crate::runtime::device;
use crate::training::reference::{batches_in_order, is_precomputed, reference_log_probs};
use crate::training::{trainer, weights_writer};

/// A training run on one device: a recipe in, steps out.
///
/// The session writes nothing before [`save`](Session::save), takes no checkpoints, and prints only
/// warnings. Keys about them (`[checkpoint]`, `[log]`, `[alerts]`, `[profile]`, `eval.steps`) have
/// no effect. It refuses `eval.keep_best`, `eval.patience` and `train.on_nan` other than "stop",
/// because they change the result of a run.
///
/// ```no_run
/// use std::path::Path;
///
/// # fn main() -> finetune::error::Result<()> {
/// let recipe = r#"
///     model = { id = "models/base" }
///     adapter = { r = 8 }
///     data = { train = ["rows.jsonl"] }
///     optimizer = { learning_rate = 1e-4 }
/// "#;
/// let mut session = finetune::Session::new(recipe, Path::new("."))?;
/// for step in session.steps()? {
///     println!("loss {:.4}", step?.loss);
/// }
/// session.save(Path::new("out"))
/// # }
/// ```
pub struct Session {
    plan: Plan,
    trainer: Trainer,
    cursor: Cursor,
}

impl Session {
    /// Loads model and data of `recipe`, a recipe as TOML. Relative paths in it begin at `folder`.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// let recipe = std::fs::read_to_string("runs/first.toml").unwrap();
    /// let session = finetune::Session::new(&recipe, "runs".as_ref())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Anything in recipe, model or data that cannot be used.
    pub fn new(recipe: &str, folder: &Path) -> Result<Self> {
        let text = RecipeText { name: "recipe".into(), text: recipe.to_owned(), folder: folder.into() };
        let recipe = Recipe::load(&RecipeLayers {
            recipe: Some(text),
            folder: folder.into(),
            ..RecipeLayers::default()
        })?;
        refuse_run_keys(&recipe)?;
        let terminal = Terminal::stderr(Verbosity::Quiet);
        let resolver = Resolver::new(false, &terminal)?;
        let device = device::open(device::preferred()?)?;
        let world = WorldSize::in_one_process(1);
        let plan = Plan::resolve(
            recipe,
            &resolver,
            (device.clone(), MemoryBudget::Local),
            world,
            None,
            clock::now(),
        )?;
        plan.check_learns()?;
        plan.check_base(None, false)?;
        let digest = plan.base.start_digest()?;
        let trainer = trainer(&plan, None, Arc::new(SingleRank), &device)?;
        digest.map_or(Ok(()), |digest| plan.finish_digest(digest))?;
        plan.check_base(None, false)?;
        let trainer = if is_precomputed(&plan) {
            let log_probs = reference_log_probs(&plan, &trainer, |_, _| ())?;
            trainer.with_reference(Reference::Precomputed(log_probs))
        } else {
            trainer
        };
        Ok(Session { plan, trainer, cursor: Cursor::default() })
    }

    /// Returns the remaining steps of the run as an iterator, which takes one at each call of
    /// `next`. After an iterator was dropped early, the next one continues where it stopped.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let mut session = finetune::Session::new("", ".".as_ref())?;
    /// // Trains half of the steps, then the rest.
    /// let half = session.steps()?.total() / 2;
    /// for step in session.steps()?.take(half as usize) {
    ///     step?;
    /// }
    /// println!("held out: {:?}", session.evaluate()?.map(|found| found.loss()));
    /// session.steps()?.try_for_each(|step| step.map(drop))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The data do not fit the sizes of a step.
    pub fn steps(&mut self) -> Result<SessionSteps<'_>> {
        let mut sampler = self.plan.sampler()?;
        sampler.seek(self.cursor)?;
        Ok(SessionSteps { sampler, trainer: &mut self.trainer, cursor: &mut self.cursor, failed: false })
    }

    /// Evaluates the held-out rows of `data.eval` or `data.eval_split`; none without such rows.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let session = finetune::Session::new("", ".".as_ref())?;
    /// if let Some(evaluation) = session.evaluate()? {
    ///     println!("loss {:.4}, perplexity {:.2}", evaluation.loss(), evaluation.perplexity());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The loss is not finite, or an operation of the device fails.
    pub fn evaluate(&self) -> Result<Option<Evaluation>> {
        let Some(held_out) = &self.plan.held_out else { return Ok(None) };
        self.trainer.evaluate(&batches_in_order(&self.plan, &held_out.dataset)).map(Some)
    }

    /// Writes the trained weights into the new folder `folder`: a PEFT adapter, or a Hugging Face
    /// model.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let session = finetune::Session::new("", ".".as_ref())?;
    /// session.save("out".as_ref())?;
    /// let trained = finetune::TrainedModel::open("models/base", Some("out"))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `folder` exists, or it cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir(folder).map_err(|error| Error::io("create the folder", folder, &error))?;
        let write = weights_writer(&self.plan, false, &self.trainer)?;
        write(folder, &self.trainer.snapshot(false)?, SnapshotPart::Tensors(0))?;
        write(folder, &[], SnapshotPart::Rest)?;
        Ok(())
    }

    /// Continues `prompt` by at most `max_new_tokens` tokens, each the likeliest one.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let session = finetune::Session::new("", ".".as_ref())?;
    /// println!("{}", session.generate("The capital of Ruritania is", 8)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `prompt` has no token, or the logits are not finite.
    pub fn generate(&self, prompt: &str, max_new_tokens: usize) -> Result<String> {
        generate(&self.trainer.engine, &self.plan.dataset_loader, prompt, max_new_tokens)
    }
}

/// Refuses keys that would change the result of a run, and that a session does not carry out.
fn refuse_run_keys(recipe: &Recipe) -> Result<()> {
    let refused = match () {
        () if recipe.eval.keeps_best() => "`eval.keep_best` or `eval.patience`",
        () if recipe.train.on_nan != OnNan::Stop => "`train.on_nan`",
        () => return Ok(()),
    };
    Err(Error::user(format!("a session cannot follow {refused}"))
        .because("it takes no checkpoints, from which such a run takes weights back")
        .hint("remove the key, or run the program `finetune`"))
}

/// The steps of a [`Session`]. After an error it yields nothing more, and the failed step counts as
/// not taken.
///
/// ```no_run
/// # fn main() -> finetune::error::Result<()> {
/// # let mut session = finetune::Session::new("", ".".as_ref())?;
/// let mut steps = session.steps()?;
/// while let Some(step) = steps.next() {
///     println!("loss {:.4}", step?.loss);
/// }
/// # Ok(())
/// # }
/// ```
pub struct SessionSteps<'a> {
    sampler: Sampler<'a>,
    trainer: &'a mut Trainer,
    cursor: &'a mut Cursor,
    failed: bool,
}

impl SessionSteps<'_> {
    /// Returns the number of steps of the whole run.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let mut session = finetune::Session::new("", ".".as_ref())?;
    /// let steps = session.steps()?;
    /// let total = steps.total();
    /// for (number, step) in (1..).zip(steps) {
    ///     println!("step {number} of {total}: loss {:.4}", step?.loss);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn total(&self) -> u64 {
        self.sampler.total_steps()
    }
}

impl Iterator for SessionSteps<'_> {
    type Item = Result<StepResult>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let step = self.sampler.next_step()?;
        let result = self.trainer.step(&step);
        match &result {
            Ok(_) => *self.cursor = self.sampler.cursor(),
            Err(_) => self.failed = true,
        }
        Some(result)
    }
}

/// A model that computes: a base, or a base with a trained adapter.
///
/// ```no_run
/// # fn main() -> finetune::error::Result<()> {
/// let model = finetune::TrainedModel::open("models/base", Some("out"))?;
/// println!("{}", model.generate("The capital of Ruritania is", 8)?);
/// # Ok(())
/// # }
/// ```
pub struct TrainedModel {
    engine: Engine,
    rows: DatasetLoader,
}

impl TrainedModel {
    /// Loads `model`, a folder or a hub id, and the adapter in `adapter`, if any.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// let base = finetune::TrainedModel::open("models/base", None)?;
    /// let trained = finetune::TrainedModel::open("models/base", Some("out"))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Model or adapter cannot be found or used, or they do not match.
    pub fn open(model: &str, adapter: Option<&str>) -> Result<Self> {
        let recipe = Recipe::load(&RecipeLayers {
            model: Some(model.to_owned()),
            purpose: Purpose::Other,
            ..RecipeLayers::default()
        })?;
        let terminal = Terminal::stderr(Verbosity::Quiet);
        let resolver = Resolver::new(false, &terminal)?;
        let LoadedModel { base, adapter_setup, dataset_loader: rows, comparison } =
            LoadedModel::find(&recipe, adapter, Path::new(""), &resolver, (&terminal, false))?;
        let device = device::open(device::preferred()?)?;
        let options = EngineOptions::new(&recipe.model, device, recipe.train.seed)?;
        let engine = base.engine(Trains::adapter_or_nothing(adapter_setup.as_ref()), &options)?;
        comparison.map_or(Ok(()), |comparison| comparison.finish(&terminal))?;
        Ok(TrainedModel { engine, rows })
    }

    /// Continues `prompt` by at most `max_new_tokens` tokens, each the likeliest one.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let model = finetune::TrainedModel::open("models/base", Some("out"))?;
    /// println!("{}", model.generate("The capital of Ruritania is", 8)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `prompt` has no token, or the logits are not finite.
    pub fn generate(&self, prompt: &str, max_new_tokens: usize) -> Result<String> {
        generate(&self.engine, &self.rows, prompt, max_new_tokens)
    }

    /// Returns the logits of each token of `text`: one row a token, one f32 value a word of the
    /// vocabulary.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let model = finetune::TrainedModel::open("models/base", Some("out"))?;
    /// let logits = model.logits("The capital of")?;
    /// let last = &logits[logits.len() - 1];
    /// let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b]));
    /// println!("token {best:?} of {}", last.len());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `text` has no token, or an operation of the device fails.
    pub fn logits(&self, text: &str) -> Result<Vec<Vec<f32>>> {
        Ok(self.engine.logits(&self.batch(text)?, AdapterSwitch::On)?.to_vec2()?)
    }

    /// Returns the embedding of `text`: the mean of its hidden states after the last block, one f32
    /// value a hidden dimension.
    ///
    /// ```no_run
    /// # fn main() -> finetune::error::Result<()> {
    /// # let model = finetune::TrainedModel::open("models/base", Some("out"))?;
    /// let (a, b) = (model.embedding("a cat")?, model.embedding("a dog")?);
    /// let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    /// println!("cosine {:.4}", dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `text` has no token, or an operation of the device fails.
    pub fn embedding(&self, text: &str) -> Result<Vec<f32>> {
        let hidden = self.engine.hidden(&self.batch(text)?, AdapterSwitch::On)?;
        Ok(hidden.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.mean(0)?.to_vec1()?)
    }

    fn batch(&self, text: &str) -> Result<Batch> {
        let ids = encoder(&self.engine, &self.rows).text(text)?;
        let origin = Origin { file: Arc::from(Path::new("text")), row: RowOrigin::Line(1) };
        let trained = vec![true; ids.len()];
        let example = Example { ids, trained, origin, group: None, role: Role::Plain };
        Ok(Batch::new([(0, example)], 0))
    }
}

fn encoder<'a>(engine: &Engine, rows: &'a DatasetLoader) -> PromptEncoder<'a> {
    PromptEncoder {
        tokenizer: &rows.tokenizer,
        template: rows.template.as_ref(),
        vocab_size: engine.config.vocab_size,
    }
}

fn generate(engine: &Engine, rows: &DatasetLoader, prompt: &str, max_new_tokens: usize) -> Result<String> {
    let ids = encoder(engine, rows).text(prompt)?;
    let mut sampler = TokenSampler::new(SamplingOptions::default(), 0);
    let answer =
        engine.generate(&ids, max_new_tokens, &mut sampler, rows.tokenizer.eos_ids(), &mut |_| Ok(true))?;
    rows.tokenizer.decode(&answer, true)
}
