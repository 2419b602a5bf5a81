//! Profiles a run: a trace of some steps for each rank (`chrome`), a table of the most expensive
//! operations in it ([`op_table`]), and rules that name bottlenecks ([`bottlenecks`]).
//!
//! [`crate::runtime::trace`] records events. This module selects the steps, by a [`TraceSchedule`],
//! and writes the results. Profiling changes no number of the run, and a failure to write a trace
//! does not end the run.

pub mod bottlenecks;
mod chrome;
pub mod op_table;
mod schedule;

pub use schedule::{StepTracing, TraceSchedule};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrome::TracedRank;
use op_table::OpTable;

use crate::error::{Error, Result};
use crate::runtime::trace::{MOST_EVENTS, TraceEvents, TraceMembership, TraceRecorder};
use crate::weights::write_text;

/// The folder of traces in a run's output folder.
pub const FOLDER: &str = "trace";
/// The file of the table of operations, in that folder.
pub const OPS: &str = "ops.json";

/// Traces the steps of one rank.
#[derive(Debug)]
pub struct Profiler {
    schedule: TraceSchedule,
    recorder: Arc<TraceRecorder>,
    folder: PathBuf,
    of: TracedRank,
    /// Number of steps so far.
    before: u64,
    /// The tracing of the current step.
    tracing: StepTracing,
    /// Bytes sent before the steps that are being traced.
    sent_before: u64,
    events: TraceEvents,
    is_written: bool,
    /// Registers this thread as the one that is recorded.
    _member: TraceMembership,
}

impl Profiler {
    /// Creates the profiler of `rank` among `ranks`. The calling thread must run the steps; the
    /// trace goes into `output`.
    pub fn new(schedule: TraceSchedule, output: &Path, rank: usize, ranks: usize) -> Self {
        let recorder = Arc::new(TraceRecorder::default());
        Profiler {
            schedule,
            _member: recorder.join(0),
            recorder,
            folder: output.join(FOLDER),
            of: TracedRank { rank, ranks, sent_bytes: 0 },
            before: 0,
            tracing: StepTracing::Off,
            sent_before: 0,
            events: TraceEvents::default(),
            is_written: false,
        }
    }

    /// Begins step `number` and ends the one before; the rank has sent `sent` bytes so far.
    ///
    /// # Errors
    /// The trace of the first cycle cannot be written.
    pub fn begin_step(&mut self, number: u64, sent: u64) -> Result<()> {
        let has_room = self.events.spans.len() < MOST_EVENTS;
        let next = if has_room { self.schedule.at(self.before) } else { StepTracing::Off };
        self.before += 1;
        if next != self.tracing {
            self.end_stretch(sent);
            if next != StepTracing::Off {
                self.sent_before = sent;
                self.recorder.switch_on();
            }
            self.tracing = next;
            if !self.is_written && !self.events.spans.is_empty() {
                self.write()?;
            }
        }
        self.recorder.begin_step(number);
        Ok(())
    }

    /// Ends a series of steps with the same tracing, and keeps the events of active steps.
    fn end_stretch(&mut self, sent: u64) {
        self.recorder.switch_off();
        let TraceEvents { spans, values, dropped } = self.recorder.take();
        if self.tracing == StepTracing::Active {
            self.events.spans.extend(spans);
            self.events.values.extend(values);
            self.events.dropped += dropped;
            self.of.sent_bytes += sent - self.sent_before;
        }
        self.tracing = StepTracing::Off;
    }

    fn write(&mut self) -> Result<()> {
        // At most once before the end, even if it fails.
        self.is_written = true;
        let path = self.folder.join(format!("rank-{}.json", self.of.rank));
        chrome::write(&path, self.of, &self.events)
    }

    /// Ends the profile: writes the trace of all cycles and, on the first rank, the table of
    /// operations.
    ///
    /// # Errors
    /// The run had no active step; a file cannot be written.
    pub fn finish(mut self, sent: u64) -> Result<OpTable> {
        self.end_stretch(sent);
        if self.events.spans.is_empty() {
            let (had, first) = (self.before, self.schedule.first_active() + 1);
            return Err(Error::user("nothing was traced")
                .because(format!("the first step that `[profile]` keeps is {first}; the run had {had} steps"))
                .hint("lower `profile.wait` and `profile.warmup`"));
        }
        self.write()?;
        let table = OpTable::new(&self.events);
        if self.of.rank == 0 {
            let json = serde_json::to_string_pretty(&table)
                .map_err(|e| Error::internal("cannot write a table of operations").because(e.to_string()))?;
            write_text(&self.folder.join(OPS), &(json + "\n"))?;
        }
        Ok(table)
    }
}
