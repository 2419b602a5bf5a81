//! Formats a [`Sizing`] in a few lines, the answer first.

use std::fmt::Write;

use super::Sizing;
use super::text::gigabytes;
use crate::units;

impl Sizing {
    /// Returns the number of all parameters, and of a token's if it does not use all experts.
    pub(super) fn parameters_in_short(&self) -> String {
        let all = units::count(self.parameters);
        if self.active_parameters == self.parameters {
            return format!("{all} parameters");
        }
        format!("{all} parameters ({} for a token)", units::count(self.active_parameters))
    }

    /// Returns the plan in a few lines: if it fits, time, cost and the best alternative.
    pub fn answer_first(&self) -> String {
        let mut text = String::new();
        let on = self.hardware.as_ref().map_or_else(|| "this machine".to_owned(), super::Hardware::text);
        let fits = match self.fits {
            Some(true) => "fits: ",
            Some(false) => "does NOT fit: ",
            None => "",
        };
        let _ = writeln!(text, "{fits}{}", self.memory_in_short());
        let ranks = if self.ranks == 1 {
            "one rank".to_owned()
        } else {
            format!("{} ranks, strategy {}", self.ranks, self.strategy)
        };
        let _ = writeln!(
            text,
            "{}: {}, {} of {}, {}\non {on}: {ranks}, recompute {}",
            self.model,
            self.method,
            units::count(self.trainable),
            self.parameters_in_short(),
            self.dtype,
            self.recompute
        );
        text.push_str(&self.time_in_short());
        if let Some(way) = self.alternative().filter(|_| self.fits == Some(false)) {
            let _ = writeln!(text, "this fits: {way}");
        }
        if let Some(better) = self.better.first().filter(|_| self.fits != Some(false)) {
            let (speedup, bytes) = (better.speedup, gigabytes(better.bytes));
            let _ = writeln!(text, "{speedup:.2} times as fast: `{}` ({bytes})", better.typed);
        }
        text.push_str("tables of memory, time, ways to train and splits: `--full`\n");
        text
    }

    /// Returns the memory that a rank needs and the memory it may use, as text.
    pub fn memory_in_short(&self) -> String {
        let needed = gigabytes(self.bytes);
        let mut text = match self.budget {
            Some(budget) => format!("{needed} of the {} of memory that a rank may use", gigabytes(budget)),
            None => format!("{needed} of memory a rank"),
        };
        if let Some(budget) = self.host_budget.filter(|_| self.host_bytes > 0) {
            let _ =
                write!(text, ", and {} of {} in host memory", gigabytes(self.host_bytes), gigabytes(budget));
        }
        text
    }

    /// Returns the way to train this model that fits and changes least, with its flags.
    pub fn alternative(&self) -> Option<String> {
        let leaf = self.leaves.iter().find(|leaf| leaf.first)?;
        let typed = match leaf.typed.split_once(", without ") {
            Some((flags, tables)) => format!(": `{flags}` and without {tables}"),
            None if leaf.typed.is_empty() => String::new(),
            None => format!(": `{}`", leaf.typed),
        };
        Some(format!("{}{typed} ({})", leaf.what, gigabytes(leaf.bytes)))
    }

    fn time_in_short(&self) -> String {
        let Some(time) = &self.time else {
            return "time: give the hardware with `--on`, or a `--calibration` of this machine\n".to_owned();
        };
        let speed = units::count(time.tokens_per_sec as u64);
        let mut text = match &self.run {
            Some(run) => {
                let steps =
                    if run.steps == 1 { "one step".to_owned() } else { format!("{} steps", run.steps) };
                format!("{steps} take {}, at {speed} tokens/s", units::duration(run.total))
            }
            None => {
                let hours = 1e9 / time.tokens_per_sec / 3600.0;
                format!("a billion tokens take {hours:.1} h, at {speed} tokens/s")
            }
        };
        if let Some(cost) = self.cost {
            let _ = write!(text, "; cost {cost:.2}");
        }
        text + "\n"
    }
}
