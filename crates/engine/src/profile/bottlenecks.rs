//! Bottleneck rules: a table of causes of lost time, their thresholds, and the keys or hardware
//! that help.
//!
//! Rules over the seconds of the parts of a step need no trace and run after every run. Without a
//! trace they report only a large loss of time. The other rules need a trace.

use super::op_table::{OpRow, OpTable};
use crate::median::median;
use crate::report::StepReport;
use crate::runtime::trace::SpanKind;

/// Seconds that a run without a trace must lose before a rule reports it: very short runs have
/// other costs.
const LEAST_LOST_SECS: f64 = 1.0;
/// Minimum number of steps of such a run: the first step takes longer than others.
const LEAST_STEPS: u64 = 2;
/// An operation is memory-bound if it moves at least this fraction of the bytes per second of a
/// copy,
const NEAR_COPY: f64 = 0.5;
/// and computes at most this fraction of the FLOP/s of a matrix product.
const FAR_FROM_PRODUCTS: f64 = 0.1;

/// The speed of the device at copies and matrix products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyAndProductRates {
    /// Bytes per second that a copy reads and writes.
    pub copy_bytes: f64,
    /// Floating-point operations per second of a product.
    pub product_flops: f64,
}

/// Measurements of a run at its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunFacts {
    /// Number of measured steps.
    pub steps: u64,
    /// Seconds in which the first rank loaded rows.
    pub data_secs: f64,
    /// Seconds that it spent in collectives.
    pub exposed_secs: f64,
    /// Seconds in which it waited for checkpoints.
    pub save_secs: f64,
    /// Seconds of all its parts together, without evaluation.
    pub all_secs: f64,
    /// Seconds of the steps themselves.
    pub step_secs: f64,
    /// Seconds that each rank computed in the steps, without its waits; empty for a single rank.
    pub rank_secs: Vec<f64>,
    /// True if the run computed on a GPU.
    pub on_gpu: bool,
    /// True if the planned memory suffices without recomputing activations; `None` if the run does
    /// not recompute.
    pub fits_without_recompute: Option<bool>,
    /// The table of the traced steps, if any.
    pub trace: Option<OpTable>,
    /// The speed of the device; `None` if it was not measured.
    pub rates: Option<CopyAndProductRates>,
}

impl RunFacts {
    /// Adds the measurements of a step.
    pub(crate) fn add_step(&mut self, report: &StepReport) {
        self.steps += 1;
        self.step_secs += report.step_secs;
        self.data_secs += report.data_secs;
        self.exposed_secs += report.exposed_secs;
        self.save_secs += report.save_secs;
        self.all_secs += report.all_parts();
        self.rank_secs.resize(report.rank_secs.len(), 0.0);
        self.rank_secs.iter_mut().zip(&report.rank_secs).for_each(|(sum, secs)| *sum += secs);
    }

    /// Adds seconds of saving outside of steps.
    pub(crate) fn add_save(&mut self, secs: f64) {
        self.save_secs += secs;
        self.all_secs += secs;
    }
}

/// A rule of the table.
#[derive(Debug)]
pub struct BottleneckRule {
    /// Name of the rule.
    pub name: &'static str,
    /// The rule applies from this share of the time on.
    pub threshold: f64,
    /// The proposed remedy as text.
    pub change: &'static str,
    measure: fn(&RunFacts) -> Option<Measured>,
}

/// The measurement of a rule.
struct Measured {
    /// Number of lost seconds.
    secs: f64,
    /// The seconds of which they are a part.
    all: f64,
    /// The text after "… % of the time".
    what: String,
    /// True if the share is of the whole run, false if of a trace.
    of_run: bool,
}

/// All rules, the most frequent ones first.
pub const RULES: [BottleneckRule; 9] = [
    BottleneckRule {
        name: "input-bound",
        threshold: 0.10,
        change: "use larger micro-batches (`train.micro_batch_size`), `data.packing = true` for fewer, fuller rows, or a \
                 faster processor",
        measure: |facts| {
            of_run(facts.data_secs, facts.all_secs, "rows were loaded while nothing was computed")
        },
    },
    BottleneckRule {
        name: "straggler",
        threshold: 0.10,
        change: "look at that rank's machine: other work on it, heat, a slower device, fewer threads; ranks that share \
                 cores need fewer ranks (`--ranks`)",
        measure: straggler,
    },
    BottleneckRule {
        name: "communication-bound",
        threshold: 0.20,
        change: "more work between sums (`train.gradient_accumulation_steps`, `train.micro_batch_size`), \
                 `parallel.strategy = \"hsdp\"` or \"ddp\" where memory allows, `parallel.reduce_dtype = \"bf16\"`, or a \
                 faster link",
        measure: communication,
    },
    BottleneckRule {
        name: "saving stalls",
        threshold: 0.10,
        change: "save less often (`checkpoint.save_steps`), in the background (`checkpoint.async_save = true`), or on a \
                 faster disk",
        measure: |facts| of_run(facts.save_secs, facts.all_secs, "training waited for checkpoints"),
    },
    BottleneckRule {
        name: "recompute waste",
        threshold: 0.10,
        change: "activations fit without it: `train.recompute = \"none\"`, or \"auto\"",
        measure: recompute,
    },
    BottleneckRule {
        name: "host-bound",
        threshold: 0.98,
        change: "the GPU waits for the host to start its kernels: larger micro-batches (`train.micro_batch_size`), \
                 `data.packing = true`, `train.cuda_graphs = true`, or a processor with a faster core",
        measure: host,
    },
    BottleneckRule {
        name: "memory-bound operations",
        threshold: 0.40,
        change: "for an optimizer: `train.gradient_accumulation_steps`, `optimizer.state = \"int8\"`; otherwise `model.dtype = \
                 \"bf16\"`, or memory with more bandwidth",
        measure: memory_bound,
    },
    BottleneckRule {
        name: "dtype casts",
        threshold: 0.05,
        change: "keep weights in the compute dtype: `model.dtype`, and `optimizer.master = \"none\"` if all \
                 weights train in bf16",
        measure: casts,
    },
    BottleneckRule {
        name: "host-device copies",
        threshold: 0.10,
        change: "keep the copied tensors on the device: `parallel.offload = \"none\"`, or \"optimizer\" instead of \"params\"; \
                 otherwise use a wider PCIe link",
        measure: copies,
    },
];

/// A rule that applies to a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Bottleneck {
    /// The rule's name.
    pub name: &'static str,
    /// The share of the time that it covers.
    pub share: f64,
    /// Name, share and remedy as text.
    pub text: String,
}

/// Returns the bottlenecks of a run, in the order of [`RULES`]; empty for a healthy one.
pub fn find(facts: &RunFacts) -> Vec<Bottleneck> {
    let holds = |rule: &BottleneckRule| {
        let Measured { secs, all, what, of_run } =
            (rule.measure)(facts).filter(|measured| measured.all > 0.0)?;
        let share = secs / all;
        let is_clear =
            facts.trace.is_some() || of_run && facts.steps >= LEAST_STEPS && secs >= LEAST_LOST_SECS;
        (share >= rule.threshold && is_clear).then(|| Bottleneck {
            name: rule.name,
            share,
            text: format!("{}: {:.0} % of the time {what}; {}", rule.name, 100.0 * share, rule.change),
        })
    };
    RULES.iter().filter_map(holds).collect()
}

fn of_run(secs: f64, all: f64, what: impl Into<String>) -> Option<Measured> {
    Some(Measured { secs, all, what: what.into(), of_run: true })
}

fn of_trace(secs: f64, table: &OpTable, what: impl Into<String>) -> Option<Measured> {
    Some(Measured { secs, all: table.secs, what: what.into(), of_run: false })
}

/// Measures the time that the slowest rank computed beyond the median of all ranks.
fn straggler(facts: &RunFacts) -> Option<Measured> {
    let median = median(facts.rank_secs.iter().copied())?;
    let (rank, secs) = facts.rank_secs.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
    let what = format!(
        "rank {rank} was the slowest: it computed for {secs:.1} s, the ranks' median is {median:.1} s; the others waited"
    );
    of_run(secs - median, median, what)
}

/// Measures the waits of the busiest rank: others also wait for a straggler.
fn communication(facts: &RunFacts) -> Option<Measured> {
    let busiest = facts.rank_secs.iter().copied().reduce(f64::max)?;
    let waited = (facts.step_secs - busiest).max(0.0).min(facts.exposed_secs);
    of_run(waited, facts.step_secs, "ranks waited for communication that computing did not hide")
}

fn recompute(facts: &RunFacts) -> Option<Measured> {
    let table = facts.trace.as_ref().filter(|_| facts.fits_without_recompute == Some(true))?;
    of_trace(table.recompute_secs, table, "activations were computed a second time")
}

fn host(facts: &RunFacts) -> Option<Measured> {
    let table = facts.trace.as_ref().filter(|_| facts.on_gpu)?;
    let waited = table.secs_of(SpanKind::Wait);
    of_trace(table.secs - waited, table, "the host was busy and did not wait for the GPU")
}

fn memory_bound(facts: &RunFacts) -> Option<Measured> {
    let (table, rates) = (facts.trace.as_ref()?, facts.rates?);
    let bound = |row: &&OpRow| {
        row.kind == SpanKind::Op.name()
            && row.bytes_per_sec() >= NEAR_COPY * rates.copy_bytes
            && row.flops_per_sec() <= FAR_FROM_PRODUCTS * rates.product_flops
    };
    let rows: Vec<_> = table.operations.iter().filter(bound).collect();
    let dearest = rows.first()?;
    let secs = rows.iter().map(|row| row.self_secs).sum();
    let rate = dearest.bytes_per_sec() / 1e9;
    let what = format!("was limited by memory, most in {} at {rate:.1} GB/s", dearest.name);
    of_trace(secs, table, what)
}

fn casts(facts: &RunFacts) -> Option<Measured> {
    let table = facts.trace.as_ref()?;
    let secs = table.operations.iter().filter(|row| row.name == "cast").map(|row| row.self_secs).sum();
    of_trace(secs, table, "values were only converted to another type")
}

fn copies(facts: &RunFacts) -> Option<Measured> {
    let table = facts.trace.as_ref()?;
    of_trace(table.secs_of(SpanKind::Copy), table, "was copying between the host and the device")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns ten seconds of training on two ranks with a trace of one second, without a
    /// bottleneck.
    fn healthy() -> RunFacts {
        let mut facts = RunFacts {
            on_gpu: true,
            fits_without_recompute: Some(false),
            trace: Some(OpTable {
                steps: 10,
                secs: 1.0,
                recompute_secs: 0.2,
                operations: vec![
                    row("matmul nt", SpanKind::Op, 0.5, 5_000_000_000, 40_000_000_000_000),
                    row("adamw", SpanKind::Op, 0.1, 90_000_000_000, 0),
                    row("wait for the device", SpanKind::Wait, 0.2, 0, 0),
                    row("cast", SpanKind::Op, 0.02, 1_000_000_000, 0),
                    row("copy to the device", SpanKind::Copy, 0.02, 1_000_000_000, 0),
                ],
                by_shape: Vec::new(),
            }),
            rates: Some(CopyAndProductRates { copy_bytes: 1e12, product_flops: 1e14 }),
            ..RunFacts::default()
        };
        let step = StepReport {
            step_secs: 0.1,
            data_secs: 0.004,
            forward_secs: 0.03,
            backward_secs: 0.055,
            exposed_secs: 0.009,
            update_secs: 0.005,
            save_secs: 0.002,
            other_secs: 0.001,
            rank_secs: vec![0.091, 0.088],
            ..StepReport::default()
        };
        (0..100).for_each(|_| facts.add_step(&step));
        facts
    }

    fn row(name: &str, kind: SpanKind, self_secs: f64, bytes: u64, flops: u64) -> OpRow {
        OpRow { name: name.into(), kind: kind.name(), calls: 1, self_secs, bytes, flops }
    }

    fn names(facts: &RunFacts) -> Vec<&'static str> {
        find(facts).into_iter().map(|bottleneck| bottleneck.name).collect()
    }

    /// Adds a bottleneck to a healthy run.
    type Plant = fn(&mut RunFacts);

    fn secs_of(facts: &mut RunFacts, name: &str, secs: f64) {
        let rows = facts.trace.iter_mut().flat_map(|table| &mut table.operations);
        rows.filter(|row| row.name == name).for_each(|row| {
            // The operation keeps its speed.
            row.bytes = (row.bytes as f64 * secs / row.self_secs) as u64;
            row.self_secs = secs;
        });
    }

    #[test]
    fn each_rule_finds_what_is_planted_for_it_and_nothing_else() {
        assert_eq!(names(&healthy()), [""; 0]);
        let plants: [(&str, Plant); 9] = [
            ("input-bound", |f| f.data_secs = 0.2 * f.all_secs),
            ("straggler", |f| f.rank_secs = vec![6.0, 9.1]),
            ("communication-bound", |f| {
                (f.exposed_secs, f.rank_secs) = (4.0, vec![6.0, 5.9]);
            }),
            ("saving stalls", |f| f.save_secs = 0.3 * f.all_secs),
            ("recompute waste", |f| f.fits_without_recompute = Some(true)),
            ("host-bound", |f| secs_of(f, "wait for the device", 0.01)),
            ("memory-bound operations", |f| secs_of(f, "adamw", 0.5)),
            ("dtype casts", |f| secs_of(f, "cast", 0.1)),
            ("host-device copies", |f| secs_of(f, "copy to the device", 0.3)),
        ];
        assert_eq!(plants.map(|(name, _)| name), RULES.map(|rule| rule.name), "a plant for each rule");
        for (name, plant) in plants {
            let mut facts = healthy();
            plant(&mut facts);
            assert_eq!(names(&facts), [name]);
            let text = &find(&facts)[0].text;
            assert!(text.starts_with(&format!("{name}: ")) && text.contains(" % of the time "), "{text}");
        }
    }

    #[test]
    fn without_a_trace_only_what_is_clear_is_said() {
        let plain = |facts: RunFacts| RunFacts { trace: None, ..facts };
        let slow = |facts: &mut RunFacts| facts.data_secs = 0.2 * facts.all_secs;
        let mut facts = plain(healthy());
        assert_eq!(names(&facts), [""; 0]);
        slow(&mut facts);
        assert_eq!(names(&facts), ["input-bound"]);
        // The same share in a very short run.
        let short = |secs: f64| RunFacts { data_secs: 0.2 * secs, all_secs: secs, ..plain(healthy()) };
        assert_eq!(names(&short(4.0)), [""; 0]);
        assert_eq!(names(&short(6.0)), ["input-bound"]);
        assert_eq!(names(&RunFacts { steps: 1, ..short(6.0) }), [""; 0]);
        // A single rank waits for no other.
        assert_eq!(names(&RunFacts { rank_secs: Vec::new(), ..facts }), ["input-bound"]);
        assert_eq!(names(&RunFacts::default()), [""; 0]);
    }

    #[test]
    fn a_straggler_is_named_and_is_no_slow_link() {
        let facts = RunFacts { rank_secs: vec![5.0, 5.2, 9.1, 5.1], exposed_secs: 4.5, ..healthy() };
        let bottlenecks = find(&facts);
        assert_eq!(bottlenecks.len(), 1, "{bottlenecks:?}");
        assert!(
            bottlenecks[0].text.contains("rank 2 was the slowest: it computed for 9.1 s"),
            "{}",
            bottlenecks[0].text
        );
        assert!(bottlenecks[0].text.contains("the ranks' median is 5.2 s"), "{}", bottlenecks[0].text);
    }
}
