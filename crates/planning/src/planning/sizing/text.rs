//! Formats a [`Sizing`] for a terminal.

use std::fmt::Write;

use super::advice::RecipeChange;
use super::conventions::StrategyBytes;
use super::run_time::RunTime;
use super::{MemoryTerm, RecomputePolicy, Sizing};
use crate::units;

/// Columns of a bar.
const COLUMNS: usize = 60;
/// Columns before the sizes of a rule of thumb.
const RULE: usize = 33;
/// Number of splits to print.
const SHOWN: usize = 8;

/// Formats bytes in units of 10^9, as vendors specify hardware.
pub fn gigabytes(bytes: u64) -> String {
    let gb = bytes as f64 / 1e9;
    match gb {
        _ if gb >= 100.0 => format!("{gb:.0} GB"),
        _ if gb >= 10.0 => format!("{gb:.1} GB"),
        _ if gb >= 0.1 => format!("{gb:.2} GB"),
        _ => format!("{:.1} MB", 1e3 * gb),
    }
}

impl Sizing {
    /// Returns the whole sizing as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.write_head(&mut text);
        self.write_memory(&mut text);
        self.write_conventions(&mut text);
        self.write_time(&mut text);
        self.write_advice(&mut text);
        self.write_splits(&mut text);
        text
    }

    fn write_head(&self, text: &mut String) {
        let on = self.hardware.as_ref().map_or_else(|| "this machine".to_owned(), super::Hardware::text);
        let why = self.why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
        let _ = writeln!(
            text,
            "{}: {}, {} of {}, {}\non {on}: {}, strategy {}{why}; recompute {}; micro-batches of {} tokens, {} a step and rank",
            self.model,
            self.method,
            units::count(self.trainable),
            self.parameters_in_short(),
            self.dtype,
            units::exact(self.ranks, "rank"),
            self.strategy,
            self.recompute,
            self.micro_batch_tokens,
            self.micro_batches,
        );
    }

    fn write_memory(&self, text: &mut String) {
        let budget = match (self.budget, self.budget.map(|budget| self.bytes <= budget)) {
            (Some(budget), Some(true)) => format!(", which fits the budget of {}", gigabytes(budget)),
            (Some(budget), _) => format!(", which does NOT fit the budget of {}", gigabytes(budget)),
            _ => String::new(),
        };
        let _ = writeln!(text, "\nmemory of a rank: {}{budget}", gigabytes(self.bytes));
        if let Some(budget) = self.host_budget.filter(|budget| self.host_bytes > *budget) {
            let _ = writeln!(
                text,
                "  host memory of a rank: {}, which does NOT fit the budget of {}",
                gigabytes(self.host_bytes),
                gigabytes(budget)
            );
        }
        let whole = self.budget.unwrap_or(0).max(self.bytes).max(1);
        let _ = writeln!(text, "  [{}]", bar(&self.memory, whole));
        for MemoryTerm { cause, bytes, formula } in &self.memory {
            let _ = writeln!(text, "  {} {cause:<12} {:>9}  {formula}", letter(cause), gigabytes(*bytes));
        }
        let head = ["activations", "memory", "operations", "a step"].map(|name| format!(" {name:>11}"));
        let _ = writeln!(text, "  {:<17}{}", "train.recompute", head.concat());
        for RecomputePolicy { policy, bytes, total, again, secs } in &self.activations {
            let more = format!("+{:.1} %", 100.0 * again);
            let secs = secs.map_or_else(String::new, self::secs);
            let cells = [gigabytes(*bytes), gigabytes(*total), more, secs].map(|cell| format!(" {cell:>11}"));
            let _ = writeln!(text, "  {policy:<17}{}", cells.concat().trim_end());
        }
    }

    fn write_conventions(&self, text: &mut String) {
        let _ = writeln!(text, "\nrules of thumb for all weights, without activations, a rank:");
        if self.ranks > 1 {
            let heads = ["ddp", "zero1", "zero2", "fsdp"].map(|name| format!(" {name:>9}"));
            let _ = writeln!(text, "{:RULE$}{}", "", heads.concat());
        }
        for rule in &self.conventions {
            let StrategyBytes { ddp, zero1, zero2, fsdp } = rule.by_strategy;
            let shown = if self.ranks > 1 { &[ddp, zero1, zero2, fsdp][..] } else { &[ddp] };
            let shown: Vec<_> = shown.iter().map(|bytes| format!("{:>9}", gigabytes(*bytes))).collect();
            let head = format!("  {:<14} {:>2} B a parameter", rule.rule, rule.bytes_per_parameter);
            let _ = writeln!(text, "{head} {}  {}", shown.join(" "), rule.assumes);
        }
        let _ = writeln!(text, "  this plan      {:.2} B a parameter", self.bytes_per_parameter);
    }

    fn write_time(&self, text: &mut String) {
        let Some(time) = &self.time else {
            let _ =
                writeln!(text, "\ntime: give the hardware with `--on`, or a `--calibration` of this machine");
            if self.ranks > 1 {
                let _ = writeln!(text, "splits over the ranks are compared by time");
            }
            return;
        };
        let _ = writeln!(
            text,
            "\na step takes {}: {} tokens/s, MFU {:.0} %, HFU {:.0} %; bound by {}",
            secs(time.total),
            speed(time.tokens_per_sec),
            100.0 * time.mfu,
            100.0 * time.hfu,
            time.bound.text()
        );
        if let Some(speeds) = &self.speeds {
            let _ = writeln!(text, "  at the speeds of {speeds}");
        }
        let parts = [
            ("forward and backward", time.compute),
            ("of it recomputing", time.recompute),
            ("of it dequantizing", time.dequantize),
            ("update", time.update),
            ("kernel launches", time.launch),
            ("copies to and from the host", time.offload),
            ("communication", time.communication),
            ("of it not hidden", time.exposed),
        ];
        for (what, time) in parts.into_iter().filter(|(_, time)| *time > 0.0) {
            let _ = writeln!(text, "  {what:<28} {}", secs(time));
        }
        if time.sent_bytes > 0 {
            let _ = writeln!(text, "  a rank sends {} a step", gigabytes(time.sent_bytes));
        }
        match &self.run {
            Some(run) => write_run(text, run),
            None => {
                let hours = 1e9 / time.tokens_per_sec / 3600.0;
                let _ = writeln!(text, "  a billion tokens take {hours:.1} h");
            }
        }
        if let Some(cost) = self.cost {
            let what = if self.run.is_some() { "the run" } else { "a billion tokens" };
            let _ = writeln!(text, "  {what} costs {cost:.2}");
        }
    }

    fn write_advice(&self, text: &mut String) {
        let _ = writeln!(text, "\nways to train this model on that hardware, * the first that fits:");
        for leaf in &self.leaves {
            let mark = match (leaf.first, leaf.fits) {
                (true, _) => "*",
                (_, true) => "+",
                _ => "-",
            };
            let speed =
                leaf.tokens_per_sec.map_or_else(String::new, |rate| format!(" {:>9} tokens/s", speed(rate)));
            let cost =
                leaf.cost_per_billion.map_or_else(String::new, |cost| format!(" {cost:>9.0} a billion"));
            let _ = writeln!(
                text,
                "  {mark} {:<58} {:>9} {:<6}{speed}{cost}",
                leaf.what,
                gigabytes(leaf.bytes),
                leaf.strategy
            );
        }
        if let Some(first) = self.leaves.iter().find(|leaf| leaf.first && !leaf.typed.is_empty()) {
            let _ = writeln!(text, "  to choose the line with *: {}", changes_to(first));
        }
        for better in &self.better {
            let _ = writeln!(
                text,
                "  {:.2} times as fast: {} ({})",
                better.speedup,
                better.typed,
                gigabytes(better.bytes)
            );
        }
    }

    fn write_splits(&self, text: &mut String) {
        if self.splits.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nsplits of {} ranks for {}, by modelled time:", self.ranks, self.method);
        let _ = writeln!(text, "  data shard tensor pipeline context   a step     a rank");
        for split in self.splits.iter().take(SHOWN) {
            let runs = if split.runs { "" } else { "  not yet run by this engine" };
            let fits = if split.fits { "" } else { "  does not fit" };
            let _ = writeln!(
                text,
                "  {:>4} {:>5} {:>6} {:>8} {:>7} {:>8} {:>10}{fits}{runs}",
                split.data,
                split.shard,
                split.tensor,
                split.pipeline,
                split.context,
                secs(split.step_secs),
                gigabytes(split.bytes)
            );
        }
        write_more(text, self.splits.len());
        for refused in self.refused.iter().take(SHOWN) {
            let _ = writeln!(text, "  no {}: {}", refused.what, refused.why);
        }
        write_more(text, self.refused.len());
    }
}

fn write_run(text: &mut String, run: &RunTime) {
    let _ = writeln!(
        text,
        "  {}, {} tokens: {} (loading {}, evaluating {}, saving {})",
        units::exact(run.steps, "step"),
        units::count(run.tokens as u64),
        units::duration(run.total),
        units::duration(run.loading),
        units::duration(run.evaluating),
        units::duration(run.saving)
    );
}

/// Returns the changes that turn the current command into that of `leaf`.
fn changes_to(leaf: &RecipeChange) -> String {
    let flags = leaf.typed.split_once(", without ").map_or(leaf.typed.as_str(), |(flags, _)| flags);
    let removed = (!leaf.left_out.is_empty()).then(|| format!("remove {}", leaf.left_out.join(" and ")));
    let added = (!["", "the same"].contains(&flags)).then(|| format!("add `{flags}`"));
    removed.into_iter().chain(added).collect::<Vec<_>>().join(", ")
}

/// Formats tokens a second: 119766, and 11.2M from a million on.
fn speed(rate: f64) -> String {
    if rate < 1e6 { format!("{rate:.0}") } else { units::count(rate as u64) }
}

/// Returns the letter of a cause in a bar.
fn letter(cause: &str) -> char {
    match cause {
        "weights" => 'W',
        "gradients" => 'G',
        "optimizer" => 'O',
        "activations" => 'A',
        "workspace" => 'K',
        "saving" => 'S',
        "NCCL" => 'N',
        "process" => 'P',
        _ => ' ',
    }
}

/// Returns the causes on a device as letters, each with its share of `COLUMNS` by bytes over
/// `whole`.
fn bar(terms: &[MemoryTerm], whole: u64) -> String {
    let on_device = terms.iter().filter(|term| letter(term.cause) != ' ');
    let (mut bytes, mut text) = (0u64, String::new());
    for term in on_device {
        bytes += term.bytes;
        let end = (bytes as f64 / whole as f64 * COLUMNS as f64).round() as usize;
        text.extend(std::iter::repeat_n(letter(term.cause), end.saturating_sub(text.len())));
    }
    format!("{text:<COLUMNS$}")
}

/// Formats a time between microseconds and days.
fn secs(secs: f64) -> String {
    match secs {
        _ if secs >= 60.0 => units::duration(secs),
        _ if secs >= 1.0 => format!("{secs:.2} s"),
        _ => format!("{:.1} ms", 1e3 * secs),
    }
}

/// Writes the number of omitted entries, if `all` exceeds [`SHOWN`].
fn write_more(text: &mut String, all: usize) {
    if all > SHOWN {
        let _ = writeln!(text, "  and {} more, which `--json` lists", all - SHOWN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_of_a_million_is_short() {
        assert_eq!([119_766.4, 11_220_788.0].map(speed), ["119766", "11.2M"]);
    }

    #[test]
    fn the_line_with_the_mark_is_chosen_by_flags_and_by_removing_tables() {
        let changes = |typed: &str, left_out: &[&str]| {
            changes_to(&RecipeChange {
                what: "LoRA",
                typed: typed.into(),
                left_out: left_out.iter().map(ToString::to_string).collect(),
                strategy: "single".into(),
                recompute: "none".into(),
                bytes: 0,
                host_bytes: 0,
                fits: true,
                first: true,
                tokens_per_sec: None,
                cost_per_billion: None,
            })
        };
        assert_eq!(changes("--set a.b=1", &[]), "add `--set a.b=1`");
        assert_eq!(
            changes("--set a.b=1, without [quantization], [adapter]", &["[quantization]", "[adapter]"]),
            "remove [quantization] and [adapter], add `--set a.b=1`"
        );
        assert_eq!(changes("the same, without [adapter]", &["[adapter]"]), "remove [adapter]");
    }
}
