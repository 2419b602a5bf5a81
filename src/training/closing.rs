//! Last lines of a run: time and tokens, held-out losses, paths, and commands to continue with.

use std::path::Path;

use super::card::is_chat;
use super::output_folder::{RECIPE, REPORT};
use super::train::TrainRun;
use crate::data::{Example, Tokenizer};
use crate::engine::RunSummary;
use crate::error::{Error, ErrorCategory};
use crate::planning::{Plan, UnusualRate};
use crate::recipe::quoted_for_shell;
use crate::report::memory::MemoryComparison;
use crate::units;

/// Losses that differ by less than this fraction count as equal.
const SAME: f64 = 0.001;
/// Largest number of characters of a prompt in a command.
const PROMPT: usize = 60;

impl TrainRun<'_> {
    /// Returns the end of a run that stopped on request, which is no failure: the checkpoint and
    /// the command to resume.
    pub(crate) fn stopped(&self, summary: &RunSummary) -> Error {
        let (devices, output) = (&self.args.devices, self.args.output());
        let folder = output.join(format!("checkpoint-{}", summary.steps));
        let mut command =
            format!("finetune --resume --output {}", quoted_for_shell(&output.display().to_string()));
        devices.ranks.iter().for_each(|ranks| command += &format!(" --ranks {ranks}"));
        if let Some(gpus) = &devices.gpus {
            let gpus: Vec<String> = gpus.0.iter().map(usize::to_string).collect();
            command += &format!(" --gpus {}", gpus.join(","));
        }
        let in_this_process =
            devices.ranks.map_or(1, usize::from).max(devices.gpus.as_ref().map_or(1, |gpus| gpus.0.len()));
        let how = if self.plan.world_size > in_this_process {
            "the same command and `--resume`".to_owned()
        } else {
            format!("`{command}`")
        };
        let (step, folder) = (summary.steps, folder.display());
        let text = format!("stopped after step {step} as asked, saved in {folder}; go on with {how}");
        Error::new(ErrorCategory::SavedAndStopped, text)
    }

    /// Prints the closing lines of a run with its result in `result`, after `secs` seconds in
    /// total.
    pub(crate) fn close(&self, summary: &RunSummary, result: &Path, secs: f64, memory: &MemoryComparison) {
        let (plan, terminal) = (self.plan, self.terminal);
        let steps =
            if summary.steps == 1 { "one step".to_owned() } else { format!("{} steps", summary.steps) };
        let (time, tokens) = (units::duration(secs), units::count(summary.tokens));
        terminal.heading(format!("done in {time}: {steps}, {tokens} tokens"));
        terminal.line(verdict(plan, summary));
        best_and_last(summary).iter().for_each(|text| terminal.line(text));
        terminal.line(memory.to_string());
        let report = self.args.output().join(REPORT);
        if report.is_file() {
            terminal.line(format!("report: {}", report.display()));
        }
        let next = next_commands(plan, result);
        if !next.is_empty() {
            terminal.line("next:");
            next.iter().for_each(|command| terminal.line(format!("  {command}")));
        }
    }
}

/// Returns the sentence on the best and the last weights of a run that keeps the best.
fn best_and_last(summary: &RunSummary) -> Option<String> {
    let (after, last) = (summary.after.as_ref()?, summary.last.as_ref()?);
    if let Some(lost) = &summary.lost_best {
        return Some(format!(
            "last: step {}, held-out loss {:.4}: these weights are saved; the best, of step {}, {:.4}, are lost",
            last.step, last.eval_loss, lost.step, lost.eval_loss
        ));
    }
    if after.step == last.step {
        return Some(format!(
            "best: step {}, the last, held-out loss {:.4}: these weights are saved",
            after.step, after.eval_loss
        ));
    }
    Some(format!(
        "best: step {}, held-out loss {:.4}: these weights are saved; last: step {}, {:.4}, in checkpoint-{}",
        after.step, after.eval_loss, last.step, last.eval_loss, last.step
    ))
}

/// Returns the sentence on the held-out loss before and after, with the cause if it is clear.
fn verdict(plan: &Plan, summary: &RunSummary) -> String {
    let (before, after) = match (&summary.before, &summary.after) {
        (Some(before), Some(after)) => (before.eval_loss, after.eval_loss),
        (None, Some(after)) => return format!("held-out loss: {:.4}", after.eval_loss),
        (_, None) if plan.held_out.is_some() => return "held-out loss: not measured at the end".to_owned(),
        (_, None) => {
            return "held-out loss: no rows were held out (`--eval-dataset`), so nothing is known about unseen text"
                .to_owned();
        }
    };
    let losses = format!("{before:.2} -> {after:.2}");
    if (after - before).abs() <= SAME * before {
        return format!("held-out loss: as before training, {before:.4} -> {after:.4}");
    }
    if after < before {
        return format!("held-out loss: better, {losses}");
    }
    let cause = cause(plan, summary, after).map_or_else(String::new, |cause| format!("; {cause}"));
    format!("held-out loss: worse than before training, {losses}{cause}")
}

/// Returns the clear cause, if any, of a loss that grew to `after`.
fn cause(plan: &Plan, summary: &RunSummary, after: f64) -> Option<String> {
    if let Some(UnusualRate { rate, times, usual }) = plan.unusual_rate() {
        return Some(format!(
            "the learning rate of {rate} is {times:.0} times the usual {usual:e}: try `--lr {usual:e}`"
        ));
    }
    let last = summary.last_loss.filter(|last| *last < after / 2.0)?;
    Some(format!(
        "the training loss is {last:.2}: the run has overfitted the training rows, try fewer epochs or more rows"
    ))
}

/// Returns commands that work unchanged, in this order, on the result in `result_folder`.
fn next_commands(plan: &Plan, result_folder: &Path) -> Vec<String> {
    let is_adapter = plan.adapter_setup.is_some();
    if is_adapter && plan.base.files.is_none() {
        // No verb can read a base of random weights, which is in no file.
        return Vec::new();
    }
    let flag = if is_adapter { "--adapter" } else { "--model" };
    let result = quoted_for_shell(&result_folder.display().to_string());
    let beside = |end: &str| quoted_for_shell(&free_name(result_folder, end));
    let recipe = quoted_for_shell(&result_folder.join(RECIPE).display().to_string());
    let input = if is_chat(plan) { "--chat".to_owned() } else { format!("--prompt {}", prompt(plan)) };
    let mut commands = vec![format!("finetune generate {flag} {result} {input}")];
    let mut model = result.clone();
    if is_adapter {
        model = beside("-merged");
        commands.push(format!("finetune merge --adapter {result} --output {model}"));
    } else if let Some(rows) = plan.recipe.data.eval.first() {
        let rows = quoted_for_shell(&rows.to_string());
        commands.push(format!("finetune eval --model {result} --recipe {recipe} --dataset {rows}"));
    }
    if !plan.base.config.family.gguf.architecture.is_empty() {
        commands.push(format!("finetune export --model {model} --format gguf --output {}", beside(".gguf")));
    }
    commands
}

/// Returns the name of the folder `path` with `end`, and with a number if that name exists.
fn free_name(path: &Path, end: &str) -> String {
    let stem = match path.file_name() {
        Some(_) => path.display().to_string(),
        // Names such as `.` have no last part.
        None => "model".to_owned(),
    };
    let stem = stem.trim_end_matches('/');
    let names = std::iter::once(format!("{stem}{end}"));
    let (start, extension) = end.split_once('.').map_or((end, String::new()), |(s, e)| (s, format!(".{e}")));
    let mut names = names.chain((2..1000).map(|n| format!("{stem}{start}-{n}{extension}")));
    names.find(|name| Path::new(name).symlink_metadata().is_err()).unwrap_or_else(|| format!("{stem}{end}"))
}

/// Returns the beginning of the first row, quoted for a shell: its question, if it has one.
fn prompt(plan: &Plan) -> String {
    let first = plan.train.dataset.examples().first();
    let text = first.and_then(|example| asked(example, &plan.dataset_loader.tokenizer));
    let text = text.filter(|text| !text.trim().is_empty());
    text.map_or_else(|| "'Once upon a time'".to_owned(), |text| quoted_on_one_line(&cut(&text)))
}

/// Returns the text before the first trained token of a row, or the first words of a row of plain
/// text.
fn asked(example: &Example, tokenizer: &Tokenizer) -> Option<String> {
    // The first token of a row is never predicted.
    let start = example.trained.iter().skip(1).position(|trained| *trained)? + 1;
    let is_text = start <= 1;
    let ids = if is_text { example.ids.get(..example.ids.len().min(8))? } else { &example.ids[..start] };
    tokenizer.decode(ids, true).ok()
}

/// Returns the beginning of a long prompt, up to the end of a word.
fn cut(text: &str) -> String {
    let Some((end, _)) = text.char_indices().nth(PROMPT) else { return text.to_owned() };
    let start = &text[..end];
    start.rsplit_once(' ').map_or(start, |(words, _)| words).to_owned()
}

/// Quotes a word for bash and zsh on one line, whatever characters it has.
fn quoted_on_one_line(text: &str) -> String {
    if !text.contains(['\n', '\r', '\t']) {
        return quoted_for_shell(text);
    }
    let mut quoted = String::from("$'");
    for c in text.chars() {
        match c {
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\'' | '\\' => quoted.extend(['\\', c]),
            _ => quoted.push(c),
        }
    }
    quoted + "'"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_stand_on_one_line() {
        assert_eq!(quoted_on_one_line("plain"), "plain");
        assert_eq!(quoted_on_one_line("it's"), r"'it'\''s'");
        assert_eq!(quoted_on_one_line("it's\n"), r"$'it\'s\n'");
        assert_eq!(cut("short"), "short");
        assert!(cut(&"word ".repeat(40)).len() <= PROMPT);
    }
}
