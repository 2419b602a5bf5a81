//! Ways to train a model on some hardware, in the order of how much of it changes, and what would make a recipe faster.

use serde::Serialize;

use super::step_time::StepTime;
use super::{SizingRequest, named};
use crate::error::Result;
use crate::recipe::{
    AutoOr, MasterWeights, Offload, QuantKind, QuantizationSection, Recipe, Recompute, StateDtype, Strategy,
};

/// The part of a step's time that a change must save to be told.
const WORTH: f64 = 0.1;
/// Most doublings of a micro-batch that are tried.
const DOUBLINGS: u32 = 5;

/// A way to train, with what it needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Leaf {
    /// The way in words.
    pub what: &'static str,
    /// As it is typed.
    pub typed: String,
    /// The strategy over the ranks.
    pub strategy: String,
    /// What is computed a second time.
    pub recompute: String,
    /// Bytes that a rank needs.
    pub bytes: u64,
    /// Of host memory.
    pub host_bytes: u64,
    /// Whether the devices have them.
    pub fits: bool,
    /// Whether it is the first that fits.
    pub first: bool,
    /// Tokens a second of all ranks.
    pub tokens_per_sec: Option<f64>,
    /// The cost of a billion tokens.
    pub cost_per_billion: Option<f64>,
}

/// A change of the recipe that makes it faster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Improvement {
    /// As it is typed.
    pub typed: String,
    /// How many times as fast.
    pub speedup: f64,
    /// Bytes that a rank needs then.
    pub bytes: u64,
}

/// A way in words, as it is typed, and what it does to a recipe that trains all weights.
type Way = (&'static str, &'static str, fn(&mut Recipe));

/// The ways, from the one that changes most of the model to the smallest.
const WAYS: [Way; 11] = [
    ("all weights", "", |_| {}),
    ("all weights, recompute", "train.recompute=block", recompute),
    ("all weights, recompute, 8-bit states", "optimizer.state=int8 train.recompute=block", |r| {
        recompute(r);
        r.optimizer.state = StateDtype::Int8;
    }),
    (
        "all weights, recompute, 8-bit states, no f32 masters",
        "optimizer.master=none optimizer.state=int8 train.recompute=block",
        |r| {
            recompute(r);
            r.optimizer.state = StateDtype::Int8;
            r.optimizer.master = MasterWeights::None;
        },
    ),
    (
        "all weights, recompute, states in host memory",
        "parallel.offload=optimizer train.recompute=block",
        |r| {
            recompute(r);
            r.parallel.offload = Offload::Optimizer;
        },
    ),
    ("LoRA", "adapter.r=16", adapter),
    ("LoRA, recompute", "adapter.r=16 train.recompute=block", |r| {
        adapter(r);
        recompute(r);
    }),
    ("QLoRA", "adapter.r=16 quantization.kind=nf4", quantized),
    ("QLoRA, recompute", "adapter.r=16 quantization.kind=nf4 train.recompute=block", |r| {
        quantized(r);
        recompute(r);
    }),
    (
        "QLoRA, recompute, one row at a time",
        "adapter.r=16 quantization.kind=nf4 train.recompute=block train.micro_batch_size=1",
        one_row,
    ),
    (
        "QLoRA, recompute, one row at a time, weights in host memory",
        "adapter.r=16 quantization.kind=nf4 train.recompute=block train.micro_batch_size=1 parallel.offload=params",
        |r| {
            one_row(r);
            r.parallel.offload = Offload::Params;
        },
    ),
];

fn recompute(recipe: &mut Recipe) {
    recipe.train.recompute = AutoOr::Fixed(Recompute::Block);
}

fn adapter(recipe: &mut Recipe) {
    let wanted = recipe.adapter.take();
    recipe.adapter = Some(wanted.unwrap_or_default());
}

fn quantized(recipe: &mut Recipe) {
    adapter(recipe);
    recipe.quantization = Some(QuantizationSection {
        kind: QuantKind::Nf4,
        double_quant: true,
        ..QuantizationSection::default()
    });
}

/// QLoRA with recomputing, over as many rows a step.
fn one_row(recipe: &mut Recipe) {
    quantized(recipe);
    recompute(recipe);
    recipe.train.gradient_accumulation_steps *= recipe.train.micro_batch_rows();
    recipe.train.micro_batch_size = AutoOr::Fixed(1);
}

impl SizingRequest<'_> {
    /// What each way needs, over the best strategy for it.
    pub(super) fn leaves(&self) -> Result<Vec<Leaf>> {
        let mut plain = self.recipe.clone();
        plain.quantization = None;
        plain.parallel.strategy = Strategy::Auto;
        plain.parallel.offload = Offload::None;
        plain.train.recompute = AutoOr::Fixed(Recompute::None);
        (plain.optimizer.state, plain.optimizer.master) = (StateDtype::F32, MasterWeights::F32);
        let wanted = plain.adapter.take();
        let mut leaves: Vec<Leaf> = Vec::new();
        // Weights that are stored in 4 or 8 bits train through adapters alone; f32 has no smaller weights to train.
        let stored = self.inputs.base.files.is_some()
            && self.inputs.base.format.is_some()
            && self.recipe.quantization.is_none();
        let in_bf16 = self.inputs.engine.dtype == candle_core::DType::BF16;
        for (what, typed, apply) in WAYS {
            let mut recipe = plain.clone();
            recipe.adapter.clone_from(&wanted.clone().filter(|_| what.contains("LoRA")));
            apply(&mut recipe);
            let skipped = (stored && !what.contains("QLoRA"))
                || (recipe.optimizer.master == MasterWeights::None && !in_bf16);
            if !skipped {
                leaves.push(self.leaf(what, typed, &recipe)?);
            }
        }
        if let Some(first) = leaves.iter_mut().find(|leaf| leaf.fits) {
            first.first = true;
        }
        Ok(leaves)
    }

    fn leaf(&self, what: &'static str, typed: &str, recipe: &Recipe) -> Result<Leaf> {
        let mut leaf = self.leaf_over(what, typed, recipe)?;
        // What is picked by itself sends least; another strategy may be faster where each rank updates its part alone.
        let others = if self.world.all > 1 { &[Strategy::Zero1, Strategy::Fsdp][..] } else { &[] };
        for &strategy in others {
            let mut recipe = recipe.clone();
            recipe.parallel.strategy = strategy;
            let typed = format!("{typed} parallel.strategy={strategy}");
            let other = self.leaf_over(what, &typed, &recipe)?;
            let faster = other.tokens_per_sec.zip(leaf.tokens_per_sec);
            let worth = faster.is_some_and(|(other, own)| other >= own * (1.0 + WORTH));
            if other.fits && (worth || !leaf.fits) {
                leaf = other;
            }
        }
        Ok(leaf)
    }

    fn leaf_over(&self, what: &'static str, typed: &str, recipe: &Recipe) -> Result<Leaf> {
        let step = self.step(recipe)?;
        let memory = step.fit.memory;
        let time = self.time(recipe, &step);
        Ok(Leaf {
            what,
            typed: typed.split_whitespace().map(|set| format!("--set {set}")).collect::<Vec<_>>().join(" "),
            strategy: named(step.fit.kind),
            recompute: step.fit.recompute.to_string(),
            bytes: memory.total(),
            host_bytes: memory.host,
            fits: self.has_room(&memory),
            first: false,
            tokens_per_sec: time.map(|time| time.tokens_per_sec),
            cost_per_billion: self.cost(time.as_ref(), None, &step),
        })
    }

    /// Changes of the recipe that keep what it trains and make it faster by a tenth or more, the best first.
    pub(super) fn better(&self, now: Option<&StepTime>) -> Result<Vec<Improvement>> {
        let Some(now) = now else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for (typed, recipe) in self.variations() {
            let Some(step) = self.inputs.planned(&recipe, self.world)? else { continue };
            let memory = step.fit.memory;
            let fits = self.has_room(&memory);
            let Some(time) = self.time(&recipe, &step).filter(|_| fits) else { continue };
            let speedup = time.tokens_per_sec / now.tokens_per_sec;
            if speedup >= 1.0 + WORTH {
                found.push(Improvement { typed, speedup, bytes: memory.total() });
            }
        }
        found.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
        Ok(found)
    }

    /// The recipe with one thing changed, as it is typed.
    fn variations(&self) -> Vec<(String, Recipe)> {
        let mut all = Vec::new();
        let mut push = |typed: &str, change: &dyn Fn(&mut Recipe)| {
            let mut recipe = self.recipe.clone();
            change(&mut recipe);
            if recipe != *self.recipe {
                all.push((typed.to_owned(), recipe));
            }
        };
        push("--set train.recompute=none", &|r| r.train.recompute = AutoOr::Fixed(Recompute::None));
        push("--set parallel.offload=none", &|r| r.parallel.offload = Offload::None);
        if self.world.all > 1 {
            push("--set parallel.reduce_dtype=bf16", &|r| {
                r.parallel.reduce_dtype = crate::recipe::ReduceDtype::Bf16
            });
            for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Hsdp] {
                let grouped = self.world.local.is_some_and(|local| self.world.all > local);
                if strategy != Strategy::Hsdp || grouped {
                    push(&format!("--set parallel.strategy={strategy}"), &|r| r.parallel.strategy = strategy);
                }
            }
        }
        for doubling in 1..=DOUBLINGS {
            let times = 1 << doubling;
            let steps = self.recipe.train.gradient_accumulation_steps;
            if steps.is_multiple_of(times) {
                let (size, steps) = (self.recipe.train.micro_batch_rows() * times, steps / times);
                let typed = format!(
                    "--set train.micro_batch_size={size} --set train.gradient_accumulation_steps={steps}"
                );
                push(&typed, &|r| {
                    r.train.micro_batch_size = AutoOr::Fixed(size);
                    r.train.gradient_accumulation_steps = steps;
                });
            }
        }
        all
    }
}
