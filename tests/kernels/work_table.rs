//! The table of docs/dev/gpu-work.md: work of a QLoRA step before and after each change of the
//! engine, as far as the engine can still do it the old way, or counts the difference.

use std::fmt::Write;
use std::path::Path;

use finetune::ops::GpuWork;

use super::{Counted, LAYERS, Mode, WIDE, counted};

/// Operations and bytes a second that an H100 is expected to reach in bf16 products and kernels.
const FLOPS: f64 = 650e12;
const BYTES: f64 = 2.25e12;

/// The figures of a row.
#[derive(Clone, Copy)]
pub(super) struct Figures {
    /// Launches and products.
    pub(super) calls: f64,
    pub(super) bytes: f64,
    pub(super) secs: f64,
}

impl Figures {
    fn of(work: GpuWork) -> Self {
        Figures {
            calls: (work.launches + work.gemms) as f64,
            bytes: (work.kernel_bytes + work.gemm_bytes) as f64,
            secs: work.seconds(FLOPS, BYTES),
        }
    }

    /// Returns the sum with `times` times `other`.
    fn plus(self, times: f64, other: Figures) -> Self {
        Figures {
            calls: self.calls + times * other.calls,
            bytes: self.bytes + times * other.bytes,
            secs: self.secs + times * other.secs,
        }
    }

    /// Extrapolates from the work of 2 and of 4 layers to [`LAYERS`].
    fn extended(work: [GpuWork; 2]) -> Self {
        Self::with_more(work, (LAYERS - 2) as f64 / 2.0)
    }

    /// Adds `times` times the difference of two models to the smaller one.
    pub(super) fn with_more([few, more]: [GpuWork; 2], times: f64) -> Self {
        let (few, more) = (Figures::of(few), Figures::of(more));
        few.plus(times, more.plus(-1.0, few))
    }

    /// Returns the figures of one layer.
    fn of_layer([few, more]: [GpuWork; 2]) -> Self {
        let half = |work| Figures { calls: 0.0, bytes: 0.0, secs: 0.0 }.plus(0.5, Figures::of(work));
        half(more).plus(-1.0, half(few))
    }
}

/// Returns the same work on one queue.
fn on_one_queue(work: [GpuWork; 2]) -> [GpuWork; 2] {
    work.map(|work| GpuWork { launches_beside: 0, hidden_bytes: 0, ..work })
}

/// A change of the engine, and a run before and after it.
struct Row(&'static str, &'static str, [Figures; 2]);

fn rows() -> Vec<Row> {
    let [saved, recomputed] = [false, true].map(|recompute| counted(Mode::Qlora, recompute));
    let copy = counted(Mode::QloraCopy, false);
    let one_queue = |counted: &Counted| Figures::extended(on_one_queue(counted.step));
    let [serial, recompute_serial] = [one_queue(&saved), one_queue(&recomputed)];
    let forward = Figures::of_layer(on_one_queue(saved.forward));
    // The weights that a block dequantizes in a pass; by weights, the part of `down_proj`.
    let panels = forward.plus(-1.0, Figures::of_layer(copy.forward));
    let [d, f] = [WIDE.hidden, WIDE.intermediate].map(|width| width as f64);
    let down = d * f / (3.0 * d * f + d * d * 2.0 + 2.0 * d * d / 4.0);
    let others = Figures { calls: panels.calls - 1.0, bytes: 0.0, secs: 0.0 };
    let scaled = Figures { calls: 0.0, ..panels };
    let others = others.plus(1.0 - down, scaled);
    let layers = LAYERS as f64;
    // Recomputing repeated the whole forward of all blocks.
    let whole = serial.plus(layers, forward);
    // It repeats all but the last product of all blocks but the last, and then makes panels again.
    let three_panels = recompute_serial.plus(layers - 1.0, others);
    let modes = [Mode::Lora, Mode::LoraFp8, Mode::QloraFp8, Mode::LoraPacked];
    let steps = modes.map(|mode| counted(mode, false).step);
    let [lora, lora_fp8, qlora_fp8, packed] = steps.map(Figures::extended);
    let [ahead, recompute_ahead] = [&saved, &recomputed].map(|counted| Figures::extended(counted.step));
    vec![
        Row("recomputing without `down_proj` and the last block", "QLoRA, recompute", [whole, three_panels]),
        Row(
            "panels shared by recomputing and backward",
            "QLoRA, recompute",
            [three_panels, recompute_serial],
        ),
        Row("panels on a second stream", "QLoRA", [serial, ahead]),
        Row("panels on a second stream", "QLoRA, recompute", [recompute_serial, recompute_ahead]),
        Row("frozen products in fp8", "LoRA", [lora, lora_fp8]),
        Row("frozen products in fp8", "QLoRA", [ahead, qlora_fp8]),
        Row("`quantization.bf16_copy`", "QLoRA", [ahead, Figures::extended(copy.step)]),
        Row("`model.dequantize = false`, a base in FP8", "LoRA", [lora, packed]),
    ]
}

/// Compares the page with what is counted now.
pub(super) fn is_that_of_the_page() {
    let mut table = "| change | run | calls | GB | ms |\n|---|---|---|---|---|\n".to_owned();
    for Row(change, run, [before, after]) in rows() {
        let pair = |digits: usize, value: fn(Figures) -> f64| {
            format!("{:.digits$} → {:.digits$}", value(before), value(after))
        };
        let (calls, bytes, secs) =
            (pair(0, |f| f.calls), pair(1, |f| f.bytes / 1e9), pair(1, |f| 1e3 * f.secs));
        writeln!(table, "| {change} | {run} | {calls} | {bytes} | {secs} |").unwrap();
    }
    is_on_the_page("work_table.rs", &table);
}

/// Compares `table` with the one that the page has from this file of tests/kernels.
pub(super) fn is_on_the_page(file: &str, table: &str) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/dev/gpu-work.md");
    let page = std::fs::read_to_string(page).unwrap();
    let begin = format!("<!-- counted by tests/kernels/{file} -->\n");
    let after = page.split_once(&begin).map(|(_, rest)| rest);
    let written = after.and_then(|rest| rest.split_once("<!-- end -->\n")).map(|(table, _)| table);
    assert_eq!(written, Some(table), "the table is now:\n{table}");
}
