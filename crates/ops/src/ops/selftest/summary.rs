//! The result of a self-test, as a table with a row for each op.

use std::fmt::Write;

use candle_core::DType;

use super::CaseOutcome;
use crate::error::Error;

/// The outcomes of a self-test, by op.
#[derive(Debug, Default)]
pub struct SelftestSummary {
    rows: Vec<OpSummary>,
}

impl FromIterator<CaseOutcome> for SelftestSummary {
    fn from_iter<I: IntoIterator<Item = CaseOutcome>>(outcomes: I) -> Self {
        let mut rows: Vec<OpSummary> = Vec::new();
        for outcome in outcomes {
            match rows.iter_mut().find(|row| row.op == outcome.op) {
                Some(row) => row.add(outcome),
                None => rows.push(OpSummary::new(outcome)),
            }
        }
        SelftestSummary { rows }
    }
}

impl SelftestSummary {
    /// Returns the header line of the table.
    pub fn header() -> String {
        format!("{:<22} {:>5} {:>7} {:>7}\n", "operation", "cases", "f32", "bf16")
    }

    /// Returns a line for each op: its cases, and its largest error in f32 and bf16 relative to the
    /// tolerance.
    pub fn table(&self) -> String {
        self.rows.iter().map(OpSummary::line).collect()
    }

    /// Returns the number of cases that ran.
    pub fn cases(&self) -> usize {
        self.rows.iter().map(|row| row.cases).sum()
    }

    /// Returns the seconds that the cases took.
    pub fn secs(&self) -> f64 {
        self.rows.iter().map(|row| row.secs).sum()
    }

    /// Returns an error that lists the failed cases on `device`; none if all passed.
    pub fn failure(&self, device: &str) -> Option<Error> {
        let failed: Vec<&CaseOutcome> = self.rows.iter().flat_map(|row| &row.failed).collect();
        if failed.is_empty() {
            return None;
        }
        let (count, cases) = (failed.len(), self.cases());
        let what = format!("{count} of {cases} cases of the self-test failed on {device}");
        let case = |error: Error, outcome: &CaseOutcome| {
            let CaseOutcome { op, what, dtype, error: measured, tolerance, .. } = outcome;
            let why = match &outcome.fault {
                Some(fault) => fault.in_one_line(),
                None => format!("error {measured:.1e}, tolerated {tolerance:.1e}"),
            };
            let comma = if what.is_empty() { "" } else { ", " };
            error.because(format!("{op} ({}{comma}{what}): {why}", dtype.as_str()))
        };
        Some(failed.into_iter().fold(Error::internal(what), case))
    }
}

/// The outcomes of one op.
#[derive(Debug)]
struct OpSummary {
    op: &'static str,
    cases: usize,
    /// Largest `error / tolerance` in f32 and bf16.
    worst: [Option<f64>; 2],
    secs: f64,
    failed: Vec<CaseOutcome>,
}

impl OpSummary {
    fn new(first: CaseOutcome) -> Self {
        let mut row = OpSummary { op: first.op, cases: 0, worst: [None; 2], secs: 0.0, failed: Vec::new() };
        row.add(first);
        row
    }

    fn add(&mut self, outcome: CaseOutcome) {
        self.cases += 1;
        self.secs += outcome.secs;
        let worst = &mut self.worst[usize::from(outcome.dtype != DType::F32)];
        *worst = Some(worst.unwrap_or(0.0).max(outcome.error / outcome.tolerance));
        if !outcome.passed {
            self.failed.push(outcome);
        }
    }

    fn line(&self) -> String {
        let mut text = format!("{:<22} {:>5}", self.op, self.cases);
        for worst in self.worst {
            let part = worst.map_or_else(|| "-".to_owned(), |part| format!("{:.1}%", 100.0 * part));
            // Writing to a string cannot fail.
            let _ = write!(text, " {part:>7}");
        }
        if !self.failed.is_empty() {
            text += &format!("  FAILED: {}", self.failed.len());
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(what: &str, error: f64) -> CaseOutcome {
        CaseOutcome {
            op: "add",
            what: what.into(),
            dtype: DType::BF16,
            error,
            tolerance: 0.01,
            passed: error <= 0.01,
            fault: None,
            secs: 0.0,
        }
    }

    #[test]
    fn a_failure_is_named_and_is_ours() {
        let passed = SelftestSummary::from_iter([outcome("one dtype", 0.005)]);
        assert_eq!(passed.table(), "add                        1       -   50.0%\n");
        assert!(passed.failure("the CPU").is_none());
        let outcomes = [outcome("one dtype", 0.005), outcome("into f32", 0.02), outcome("", f64::INFINITY)];
        let summary = SelftestSummary::from_iter(outcomes);
        assert_eq!(summary.table(), "add                        3       -    inf%  FAILED: 2\n");
        let error = summary.failure("the CPU").expect("two have failed");
        assert_eq!(error.kind().exit_code(), 3);
        assert_eq!(
            error.to_string(),
            "error: 2 of 3 cases of the self-test failed on the CPU\
             \n  caused by: add (bf16, into f32): error 2.0e-2, tolerated 1.0e-2\
             \n  caused by: add (bf16): error inf, tolerated 1.0e-2"
        );
    }
}
