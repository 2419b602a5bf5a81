//! Suggests ways to train a model on given hardware, from the most thorough to the smallest, and
//! changes that make a recipe faster.

use serde::Serialize;

use super::step_time::StepTime;
use super::{SizingRequest, named};
use crate::error::Result;
use crate::recipe::{AdapterInit, AutoOr, MasterWeights, Offload, Recipe, Recompute, StateDtype, Strategy};

/// The smallest speedup that finetune reports, as a part of the current speed.
const WORTH: f64 = 0.1;
/// Most doublings of a micro-batch to try.
const DOUBLINGS: u32 = 5;

/// One way to train, with its needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecipeChange {
    /// The way in words.
    pub what: &'static str,
    /// The flags to add to the current command.
    pub typed: String,
    /// Parts of the current command to remove, since no flag undoes them: `[section]`, or
    /// `section.key`.
    pub left_out: Vec<String>,
    /// The strategy over the ranks.
    pub strategy: String,
    /// The value of `train.recompute`.
    pub recompute: String,
    /// Bytes that a rank needs.
    pub bytes: u64,
    /// Bytes of host memory that a rank needs.
    pub host_bytes: u64,
    /// True if device and host memory suffice.
    pub fits: bool,
    /// True if it is the first way that fits.
    pub first: bool,
    /// Tokens a second over all ranks.
    pub tokens_per_sec: Option<f64>,
    /// The cost of a billion tokens.
    pub cost_per_billion: Option<f64>,
}

/// A change that makes the recipe faster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Improvement {
    /// The flags to add to the current command.
    pub typed: String,
    /// The speedup as a factor.
    pub speedup: f64,
    /// Bytes that a rank needs with the change.
    pub bytes: u64,
}

/// A way in words, and its change to a recipe that trains all weights.
type Way = (&'static str, fn(&mut Recipe));

/// The ways that train all weights, from the one that changes most of the model to the smallest.
const FULL: [Way; 5] = [
    ("all weights", |_| {}),
    ("all weights, recompute", recompute),
    ("all weights, recompute, 8-bit states", |r| {
        recompute(r);
        r.optimizer.state = StateDtype::Int8;
    }),
    ("all weights, recompute, 8-bit states, no f32 masters", |r| {
        recompute(r);
        r.optimizer.state = StateDtype::Int8;
        r.optimizer.master = MasterWeights::None;
    }),
    ("all weights, recompute, states in host memory", |r| {
        recompute(r);
        r.parallel.offload = Offload::Optimizer;
    }),
];

/// The ways that train an adapter, in the same order.
const ADAPTING: [Way; 6] = [
    ("LoRA", |r| r.quantization = None),
    ("LoRA, recompute", |r| {
        r.quantization = None;
        recompute(r);
    }),
    ("QLoRA", |_| {}),
    ("QLoRA, recompute", recompute),
    ("QLoRA, recompute, one row at a time", one_row),
    ("QLoRA, recompute, one row at a time, weights in host memory", |r| {
        one_row(r);
        r.parallel.offload = Offload::Params;
    }),
];

fn recompute(recipe: &mut Recipe) {
    recipe.train.recompute = AutoOr::Fixed(Recompute::Block);
}

/// Enables recomputing with one row a micro-batch, and keeps the rows of a step.
fn one_row(recipe: &mut Recipe) {
    recompute(recipe);
    let rows = recipe.train.accumulation().saturating_mul(recipe.train.micro_batch_rows());
    recipe.train.gradient_accumulation_steps = AutoOr::Fixed(rows);
    recipe.train.micro_batch_size = AutoOr::Fixed(1);
}

/// Resets keys that have no effect on this way and would be refused.
fn without_conflicts(recipe: &mut Recipe) {
    recipe.parallel.shard_size = None;
    if recipe.parallel.offload != Offload::Params {
        recipe.parallel.offload_folder = None;
    }
    match &mut recipe.adapter {
        None => recipe.optimizer.lora_plus_ratio = 1.0,
        Some(adapter) if recipe.quantization.is_none() && adapter.init == AdapterInit::Loftq => {
            adapter.init = AdapterInit::Default;
        }
        Some(_) => {}
    }
}

impl SizingRequest<'_> {
    /// Returns the needs of each way, with its best strategy.
    pub(super) fn leaves(&self) -> Result<Vec<RecipeChange>> {
        let mut plain = self.recipe.clone();
        plain.quantization = None;
        plain.parallel.strategy = Strategy::Auto;
        plain.parallel.offload = Offload::None;
        plain.train.recompute = AutoOr::Fixed(Recompute::None);
        (plain.optimizer.state, plain.optimizer.master) = (StateDtype::F32, MasterWeights::F32);
        // Weights stored in 4 or 8 bits train through adapters only; in f32 the option without
        // masters saves nothing.
        let stored = self.inputs.base.files.is_some()
            && self.inputs.base.format.is_some()
            && self.recipe.quantization.is_none();
        let in_bf16 = self.inputs.engine.dtype == candle_core::DType::BF16;
        let adapter = plain.adapter.take().unwrap_or_default();
        let mut quantization = (!stored).then(|| self.recipe.quantization.clone().unwrap_or_default());
        // A way may shard the weights or keep them on the host, where nothing reads a bf16 copy.
        quantization.iter_mut().for_each(|quantization| quantization.bf16_copy = false);
        let (mut leaves, mut seen): (Vec<RecipeChange>, Vec<Recipe>) = Default::default();
        let ways = FULL.map(|way| (way, false)).into_iter().chain(ADAPTING.map(|way| (way, true)));
        for ((what, apply), adapts) in ways {
            let mut recipe = plain.clone();
            if adapts {
                (recipe.adapter, recipe.quantization) = (Some(adapter.clone()), quantization.clone());
            }
            apply(&mut recipe);
            without_conflicts(&mut recipe);
            let skipped = (stored && !what.contains("QLoRA"))
                || (recipe.optimizer.master == MasterWeights::None && !in_bf16)
                || seen.contains(&recipe);
            if !skipped {
                leaves.push(self.leaf(what, &recipe)?);
                seen.push(recipe);
            }
        }
        if let Some(first) = leaves.iter_mut().find(|leaf| leaf.fits) {
            first.first = true;
        }
        Ok(leaves)
    }

    fn leaf(&self, what: &'static str, recipe: &Recipe) -> Result<RecipeChange> {
        let mut leaf = self.leaf_over(what, recipe)?;
        // The automatic choice sends least. Another strategy may be faster if each rank updates
        // only its part.
        let others = if self.world.all > 1 { &[Strategy::Zero1, Strategy::Fsdp][..] } else { &[] };
        for &strategy in others {
            let mut recipe = recipe.clone();
            recipe.parallel.strategy = strategy;
            let other = self.leaf_over(what, &recipe)?;
            let faster = other.tokens_per_sec.zip(leaf.tokens_per_sec);
            let worth = faster.is_some_and(|(other, own)| other >= own * (1.0 + WORTH));
            if other.fits && (worth || !leaf.fits) {
                leaf = other;
            }
        }
        Ok(leaf)
    }

    fn leaf_over(&self, what: &'static str, recipe: &Recipe) -> Result<RecipeChange> {
        let step = self.step(recipe)?;
        let memory = step.fit.memory;
        let time = self.time(recipe, &step);
        let difference = self.typed.difference(recipe);
        Ok(RecipeChange {
            what,
            typed: difference.to_string(),
            left_out: difference.left_out,
            strategy: named(step.fit.strategy),
            recompute: step.fit.recompute.to_string(),
            bytes: memory.total(),
            host_bytes: memory.host,
            fits: self.has_room(&memory),
            first: false,
            tokens_per_sec: time.map(|time| time.tokens_per_sec),
            cost_per_billion: self.cost(time.as_ref(), None, (recipe, &step)),
        })
    }

    /// Returns changes that keep the trained parameters and raise the speed by a tenth or more, the
    /// best first.
    pub(super) fn better(&self, now: Option<&StepTime>) -> Result<Vec<Improvement>> {
        let Some(now) = now else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for recipe in self.variations() {
            let Some(step) = self.inputs.planned(&recipe, self.world)? else { continue };
            let memory = step.fit.memory;
            let fits = self.has_room(&memory);
            let Some(time) = self.time(&recipe, &step).filter(|_| fits) else { continue };
            let speedup = time.tokens_per_sec / now.tokens_per_sec;
            if speedup >= 1.0 + WORTH {
                let typed = self.typed.difference(&recipe).to_string();
                found.push(Improvement { typed, speedup, bytes: memory.total() });
            }
        }
        found.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
        Ok(found)
    }

    /// Returns variants of the recipe with one thing changed.
    fn variations(&self) -> Vec<Recipe> {
        let mut all = Vec::new();
        let mut push = |change: &dyn Fn(&mut Recipe)| {
            let mut recipe = self.recipe.clone();
            change(&mut recipe);
            if recipe != *self.recipe {
                all.push(recipe);
            }
        };
        push(&|r| r.train.recompute = AutoOr::Fixed(Recompute::None));
        push(&|r| (r.parallel.offload, r.parallel.offload_folder) = (Offload::None, None));
        if self.world.all > 1 {
            push(&|r| r.parallel.reduce_dtype = crate::recipe::ReduceDtype::Bf16);
            for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Hsdp] {
                let grouped = self.world.local.is_some_and(|local| self.world.all > local);
                if strategy != Strategy::Hsdp || grouped {
                    let size = self.recipe.parallel.shard_size.filter(|_| strategy == Strategy::Hsdp);
                    push(&|r| (r.parallel.strategy, r.parallel.shard_size) = (strategy, size));
                }
            }
        }
        for doubling in 1..=DOUBLINGS {
            let times = 1 << doubling;
            let steps = self.recipe.train.accumulation();
            if steps.is_multiple_of(times) {
                let (size, steps) = (self.recipe.train.micro_batch_rows() * times, steps / times);
                push(&|r| {
                    r.train.micro_batch_size = AutoOr::Fixed(size);
                    r.train.gradient_accumulation_steps = AutoOr::Fixed(steps);
                });
            }
        }
        all
    }
}
