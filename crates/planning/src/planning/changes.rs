//! Changes of a recipe that need less memory, in order of their cost. finetune suggests them if no
//! strategy fits, and if a device runs out of memory.

use candle_core::DType;

use super::parallel::WorldSize;
use crate::collective::Phase;
use crate::loading::base_model::{BaseModel, EngineOptions};
use crate::recipe::{
    self, AutoOr, MOST_ACCUMULATION, MasterWeights, Offload, QuantKind, QuantizationSection, Recipe,
    Recompute, StateDtype,
};

/// Fewest tokens of a row in a suggestion of shorter rows.
const SHORTEST_ROW: usize = 128;
/// The change that conflicts with adding an adapter.
pub(super) const WITHOUT_MASTERS: &str = "--set optimizer.master=none";
/// Most doublings of the number of ranks in a suggestion.
const DOUBLINGS: u32 = 6;

/// Properties of the model that the recipe does not contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelSettings {
    /// True if the model runs on GPUs.
    pub(super) on_gpu: bool,
    /// True if its files are already quantized.
    pub(super) quantized: bool,
    /// True if it computes in bf16.
    pub(super) in_bf16: bool,
}

impl ModelSettings {
    /// Returns the settings of the model `base` computed with the options `engine`.
    pub(super) fn of(base: &BaseModel, engine: &EngineOptions) -> Self {
        let (on_gpu, in_bf16) = (!engine.traits.is_cpu, engine.dtype == DType::BF16);
        ModelSettings { on_gpu, quantized: base.format.is_some(), in_bf16 }
    }
}

/// A change and its adjustments, each stronger than the one before.
pub(super) struct Change {
    pub(super) adjustments: Vec<Suggestion>,
    relief: MemoryTarget,
}

type Apply = Box<dyn Fn(&mut Recipe, &mut WorldSize)>;

/// One value of a change.
pub(super) struct Suggestion {
    /// The flags as a user types them.
    pub(super) typed: String,
    pub(super) apply: Apply,
}

/// The memory that a change reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryTarget {
    /// Memory held on the device during the whole run: weights, gradients, states.
    Kept,
    /// Memory that a step keeps of its forward.
    Steps,
    /// Memory that grows with the rows of a batch, in steps and in evaluations.
    Rows,
    /// Memory of the host only.
    Host,
}

impl MemoryTarget {
    /// True if the change frees memory that a device needs in `phase`.
    fn helps_in(self, phase: Phase) -> bool {
        let steps = !matches!(
            phase,
            Phase::Meet | Phase::Load | Phase::Evaluate | Phase::Report | Phase::Save | Phase::Output
        );
        match self {
            MemoryTarget::Kept => true,
            MemoryTarget::Steps => steps,
            MemoryTarget::Rows => steps || phase == Phase::Evaluate,
            MemoryTarget::Host => false,
        }
    }
}

/// Returns the changes that shrink a run of `recipe` on the same number of ranks, in order of their
/// cost. Skips changes that the recipe already has.
pub(super) fn changes(recipe: &Recipe, model: ModelSettings) -> Vec<Change> {
    let mut all: Vec<Change> = Vec::new();
    let mut push = |useful: bool, relief: MemoryTarget, typed: String, apply: Apply| {
        if useful {
            all.push(Change { adjustments: vec![Suggestion { typed, apply }], relief });
        }
    };
    let (train, parallel) = (&recipe.train, &recipe.parallel);
    let blocks = matches!(
        train.recompute,
        AutoOr::Fixed(Recompute::None | Recompute::Selective | Recompute::First(_))
    );
    let to_block: Apply = Box::new(|r, _| r.train.recompute = AutoOr::Fixed(Recompute::Block));
    push(blocks, MemoryTarget::Steps, set("train.recompute=block"), to_block);
    let floats = recipe.optimizer.state == StateDtype::F32;
    let to_int8: Apply = Box::new(|r, _| r.optimizer.state = StateDtype::Int8);
    push(floats, MemoryTarget::Kept, set("optimizer.state=int8"), to_int8);
    let adapter = recipe.adapter.is_some();
    let has_masters = recipe.optimizer.master == MasterWeights::F32;
    let masters = model.in_bf16 && !adapter && has_masters;
    let to_none: Apply = Box::new(|r, _| r.optimizer.master = MasterWeights::None);
    push(masters, MemoryTarget::Kept, WITHOUT_MASTERS.into(), to_none);
    let micro_batches = train.accumulation().saturating_mul(train.micro_batch_rows());
    let accumulated = format!("train.gradient_accumulation_steps={micro_batches}");
    push(
        train.micro_batch_rows() > 1 && micro_batches <= MOST_ACCUMULATION,
        MemoryTarget::Rows,
        format!("{} {}", set("train.micro_batch_size=1"), set(&accumulated)),
        Box::new(move |r, _| {
            r.train.micro_batch_size = AutoOr::Fixed(1);
            r.train.gradient_accumulation_steps = AutoOr::Fixed(micro_batches);
        }),
    );
    let here = parallel.offload == Offload::None && model.on_gpu;
    let to_host: Apply = Box::new(|r, _| r.parallel.offload = Offload::Optimizer);
    push(here, MemoryTarget::Kept, set("parallel.offload=optimizer"), to_host);
    let applies = parallel.offload != Offload::Params && model.on_gpu;
    push(applies, MemoryTarget::Kept, set("parallel.offload=params"), Box::new(offload_params));
    let to_file = format!("{} {}", set("parallel.offload=params"), set("parallel.offload_folder=FOLDER"));
    push(parallel.offload_folder.is_none(), MemoryTarget::Host, to_file, Box::new(offload_to_file));
    let dense = recipe.quantization.is_none() && !model.quantized;
    // Packed weights are either kept as they are or quantized again.
    let again = if recipe.model.dequantize { "" } else { " --set model.dequantize=true" };
    let nf4 = format!("--set quantization.kind=nf4{again}");
    push(adapter && dense, MemoryTarget::Kept, nf4.clone(), Box::new(quantize));
    // An adapter needs f32 masters.
    let mut lora = set("adapter.kind=lora");
    if !has_masters {
        lora = format!("{lora} {}", set("optimizer.master=f32"));
    }
    let both = format!("{lora} {nf4}");
    push(!adapter, MemoryTarget::Kept, lora, Box::new(add_adapter));
    push(!adapter && dense, MemoryTarget::Kept, both, Box::new(add_adapter_and_quantize));
    all.push(shorter_rows(recipe.data.longest_row()));
    all
}

/// Yields the first adjustment of each change that frees device memory in `phase`.
pub(super) fn first_for(phase: Phase, changes: &[Change]) -> impl Iterator<Item = &Suggestion> {
    let helping = changes.iter().filter(move |change| change.relief.helps_in(phase));
    helping.filter_map(|change| change.adjustments.first())
}

fn set(assignment: &str) -> String {
    format!("--set {assignment}")
}

fn offload_params(recipe: &mut Recipe, _: &mut WorldSize) {
    recipe.parallel.offload = Offload::Params;
}

fn offload_to_file(recipe: &mut Recipe, world: &mut WorldSize) {
    offload_params(recipe, world);
    recipe.parallel.offload_folder = Some(recipe::Folder("FOLDER".into()));
}

fn quantize(recipe: &mut Recipe, _: &mut WorldSize) {
    recipe.quantization =
        Some(QuantizationSection { kind: QuantKind::Nf4, ..QuantizationSection::default() });
    recipe.model.dequantize = true;
}

fn add_adapter(recipe: &mut Recipe, _: &mut WorldSize) {
    recipe.adapter = Some(recipe::AdapterSection::default());
    recipe.optimizer.master = MasterWeights::F32;
}

fn add_adapter_and_quantize(recipe: &mut Recipe, world: &mut WorldSize) {
    add_adapter(recipe, world);
    quantize(recipe, world);
}

fn shorter_rows(max_seq_len: usize) -> Change {
    let halves = std::iter::successors(Some(max_seq_len / 2), |length| Some(length / 2));
    let shorter = |length: usize| Suggestion {
        typed: set(&format!("data.max_seq_len={length}")),
        apply: Box::new(move |recipe, _| recipe.data.max_seq_len = AutoOr::Fixed(length)),
    };
    let adjustments = halves.take_while(|length| *length >= SHORTEST_ROW).map(shorter).collect();
    Change { adjustments, relief: MemoryTarget::Rows }
}

/// Returns suggestions of more ranks, over which a strategy shards weights, gradients and states.
/// Ranks on the CPU are threads of one process, which share frozen weights.
pub(super) fn more_ranks(world: WorldSize, on_gpu: bool) -> Change {
    let more = |doubling: u32| {
        let all = world.all.saturating_mul(1 << doubling);
        let (typed, larger) = if world.here == world.all && !on_gpu {
            (format!("--ranks {all}"), WorldSize::in_one_process(all))
        } else {
            (format!("{all} ranks in all"), WorldSize { all, local: None, here: world.here })
        };
        Suggestion { typed, apply: Box::new(move |_, world| *world = larger) }
    };
    Change { adjustments: (1..=DOUBLINGS).map(more).collect(), relief: MemoryTarget::Kept }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advised(recipe: &Recipe, on_gpu: bool, phase: Phase) -> Vec<String> {
        let changes = changes(recipe, ModelSettings { on_gpu, quantized: false, in_bf16: false });
        first_for(phase, &changes).map(|first| first.typed.clone()).collect()
    }

    fn recipe() -> Recipe {
        let mut recipe = Recipe::default();
        recipe.adapter = Some(recipe::AdapterSection::default());
        recipe.train.recompute = AutoOr::Fixed(Recompute::None);
        recipe.train.micro_batch_size = AutoOr::Fixed(4);
        recipe.train.gradient_accumulation_steps = AutoOr::Fixed(2);
        recipe.data.max_seq_len = AutoOr::Fixed(512);
        recipe
    }

    #[test]
    fn what_helps_depends_on_the_phase() {
        let backward = advised(&recipe(), true, Phase::Backward);
        assert_eq!(
            backward,
            [
                "--set train.recompute=block",
                "--set optimizer.state=int8",
                "--set train.micro_batch_size=1 --set train.gradient_accumulation_steps=8",
                "--set parallel.offload=optimizer",
                "--set parallel.offload=params",
                "--set quantization.kind=nf4",
                "--set data.max_seq_len=256",
            ]
        );
        let evaluate = advised(&recipe(), true, Phase::Evaluate);
        assert!(!evaluate.contains(&backward[0]) && evaluate.contains(&backward[2]), "{evaluate:?}");
        let load = advised(&recipe(), true, Phase::Load);
        assert_eq!(load, [1, 3, 4, 5].map(|at: usize| backward[at].clone()));
    }

    /// A recipe above the largest accepted accumulation would be refused.
    #[test]
    fn nothing_is_advised_that_the_recipe_refuses() {
        let mut recipe = recipe();
        recipe.train.gradient_accumulation_steps = AutoOr::Fixed(MOST_ACCUMULATION / 4);
        let wanted = format!("train.gradient_accumulation_steps={MOST_ACCUMULATION}");
        let has = |recipe: &Recipe, part: &str| {
            advised(recipe, true, Phase::Backward).iter().any(|typed| typed.contains(part))
        };
        assert!(has(&recipe, &wanted));
        recipe.train.gradient_accumulation_steps = AutoOr::Fixed(MOST_ACCUMULATION / 4 + 1);
        assert!(!has(&recipe, "gradient_accumulation_steps"));
        recipe.data.max_seq_len = AutoOr::Fixed(3);
        assert!(!has(&recipe, "max_seq_len"));
    }

    /// The recipe refuses `[quantization]` beside `model.dequantize = false`.
    #[test]
    fn advice_to_quantize_no_longer_keeps_packed_weights() {
        let mut recipe = recipe();
        recipe.model.dequantize = false;
        let wanted = "--set quantization.kind=nf4 --set model.dequantize=true";
        assert!(advised(&recipe, false, Phase::Load).iter().any(|typed| typed == wanted));
        quantize(&mut recipe, &mut WorldSize { all: 1, local: None, here: 1 });
        assert!(recipe.model.dequantize);
    }

    #[test]
    fn what_a_run_does_already_is_not_advised() {
        let mut recipe = recipe();
        recipe.train.recompute = AutoOr::Fixed(Recompute::Block);
        recipe.optimizer.state = StateDtype::Int8;
        recipe.train.micro_batch_size = AutoOr::Fixed(1);
        recipe.parallel.offload = Offload::Params;
        recipe.quantization = Some(QuantizationSection::default());
        recipe.data.max_seq_len = AutoOr::Fixed(200);
        assert_eq!(advised(&recipe, true, Phase::Backward), [""; 0]);
        recipe.train.recompute = AutoOr::Fixed(Recompute::None);
        assert_eq!(advised(&recipe, false, Phase::Backward), ["--set train.recompute=block"]);
    }
}
