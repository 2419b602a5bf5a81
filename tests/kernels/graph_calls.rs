//! Calls of the driver for a step with few tokens, with and without graphs: the table of
//! docs/dev/gpu-work.md. Freed memory is handed out again at the same addresses (`address_pool`).

use std::fmt::Write;

use finetune::ops::{GpuWork, GraphCounts};

use super::work_table::is_on_the_page;
use super::{Mode, PLANNED, RUN, Run, Shape, address_pool, load};

/// The layers of Qwen3-0.6B.
const LAYERS: u64 = 28;

/// The tokens of a row; a micro-batch has two rows.
const TOKENS: usize = 256;

/// Steps before the counted one: two launch one by one, behind which the graphs are made, and
/// addresses repeat after a few.
const BEFORE: usize = 5;

/// Returns the work of a later step of a model with so many layers, and the calls of its graphs
/// since the first step.
fn later_step(layers: usize, run: Run) -> (GpuWork, Option<GraphCounts>) {
    let mut loaded = load(&Shape { layers, vocab: 8192, ..PLANNED[0] }, run);
    for step in 0..BEFORE {
        loaded.trainer.step(&loaded.steps[step % 3]).unwrap();
    }
    let before = super::requested_work();
    loaded.trainer.step(&loaded.steps[BEFORE % 3]).unwrap();
    (super::requested_work() - before, loaded.trainer.graph_counts())
}

/// The work of a block's step, and of all else in a step.
struct Split {
    block: GpuWork,
    others: u64,
}

fn split(run: Run) -> Split {
    let [(two, _), (four, counts)] = [2, 4].map(|layers| later_step(layers, run));
    let both = four - two;
    assert!(both.calls.is_multiple_of(2), "{both:?}");
    let block = GpuWork { calls: both.calls / 2, launches: both.launches / 2, gemms: both.gemms / 2, ..both };
    println!("{run:?}: a block {block:?}; {counts:?}");
    Split { block, others: two.calls - 2 * block.calls }
}

/// Launches of the update for each block, outside its graphs.
const OF_UPDATE: u64 = 2;

/// Products of the other blocks that the first one does not have: nothing needs the gradient of its
/// input.
const OF_DX: u64 = 2;

/// A run, and the calls of a block's passes as graphs.
const RUNS: [(&str, Run, u64); 4] = [
    ("LoRA", RUN, 2),
    ("LoRA, recompute", Run { recompute: true, ..RUN }, 3),
    ("LoRA, dropout 0.1", Run { dropout: 0.1, ..RUN }, 2 + 3 * 7),
    ("QLoRA", Run { mode: Mode::Qlora, ..RUN }, 2),
];

/// Checks the calls of each block, and that the table of the page has them.
pub(super) fn are_few_for_each_block() {
    // Smaller requests than the rows of a tensor are also those of the program itself.
    address_pool::begin(4096);
    let mut table =
        "| run | launches and products of a block | its calls | calls of a step |\n|---|---|---|---|\n"
            .to_owned();
    for (name, run, few) in RUNS {
        let [before, after] = [false, true].map(|graphs| split(Run { graphs, seq_len: TOKENS, ..run }));
        let work = |split: &Split| (split.block.launches, split.block.gemms, split.block.gemm_flops);
        assert_eq!(work(&before), work(&after), "{name}");
        assert_eq!(before.block.calls, before.block.launches + before.block.gemms, "{name}");
        let wanted = (few + OF_UPDATE, before.others + OF_DX);
        assert_eq!((after.block.calls, after.others), wanted, "{name}");
        let step = |split: &Split| split.others + LAYERS * split.block.calls;
        writeln!(
            table,
            "| {name} | {} + {} | {} → {} | {} → {} |",
            before.block.launches,
            before.block.gemms,
            before.block.calls,
            after.block.calls,
            step(&before),
            step(&after)
        )
        .unwrap();
    }
    address_pool::end();
    is_on_the_page("graph_calls.rs", &table);
}
