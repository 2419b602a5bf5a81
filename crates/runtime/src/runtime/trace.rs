//! Activity of threads over time: spans with a begin and an end, and values at moments, for trace
//! viewers.
//!
//! A [`TraceRecorder`] belongs to a rank. A thread that has joined it ([`TraceRecorder::join`])
//! records its spans while the recorder is on; other threads record nothing. While no recorder of
//! the process is on, a span costs one relaxed load, without its description. Tracing changes no
//! result.
//!
//! Spans of a thread nest: a closed span is inside those that are still open. Phases and steps,
//! which end where the next one begins, are opened between other spans.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Tensor;

use super::{clock, trace_ranges};
use crate::locks::locked;

/// Maximum events of a recorder, beyond which viewers become slow; later ones are only counted.
pub const MOST_EVENTS: usize = 1 << 20;
/// Minimum nanoseconds between two values of a name.
const LEAST_GAP: u64 = 20_000_000;
/// Name of spans that release memory.
const RELEASE: &str = "release";
/// Maximum number of sizes of a span.
pub const DIMS: usize = 4;

/// Number of this process's recorders that are on.
static RECORDING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Recorder that this thread has joined, and its thread number there.
    static JOINED: RefCell<Option<(Arc<TraceRecorder>, u32)>> = const { RefCell::new(None) };
}

/// Kind of a span: the category in a trace viewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpanKind {
    /// An optimizer step with everything until the next.
    Step,
    /// A phase of a step.
    Phase,
    /// A block or another segment of the model.
    Segment,
    /// A tensor operation.
    Op,
    /// A communication with other ranks.
    Collective,
    /// A wait for the device.
    Wait,
    /// A copy between host and device memory.
    Copy,
    /// Writing of files.
    Save,
    /// A release or a reading of memory.
    Memory,
}

impl SpanKind {
    /// Name of the category.
    pub fn name(self) -> &'static str {
        match self {
            SpanKind::Step => "step",
            SpanKind::Phase => "phase",
            SpanKind::Segment => "segment",
            SpanKind::Op => "op",
            SpanKind::Collective => "collective",
            SpanKind::Wait => "wait",
            SpanKind::Copy => "copy",
            SpanKind::Save => "save",
            SpanKind::Memory => "memory",
        }
    }
}

/// Description of a span, known when it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanInfo {
    /// Category in a viewer.
    pub kind: SpanKind,
    /// Name of the activity.
    pub name: &'static str,
    /// Object or variant, if the name alone is ambiguous.
    pub detail: &'static str,
    /// Number among several.
    pub index: Option<u32>,
    /// Sizes of the computation, padded with zeros.
    pub dims: [u32; DIMS],
    /// Bytes that it reads and writes, or sends.
    pub bytes: u64,
    /// Floating-point operations of its products.
    pub flops: u64,
}

impl SpanInfo {
    /// A span of a kind and a name.
    pub fn new(kind: SpanKind, name: &'static str) -> Self {
        SpanInfo { kind, name, detail: "", index: None, dims: [0; DIMS], bytes: 0, flops: 0 }
    }

    /// A span of an operation on tensors.
    pub fn op(name: &'static str) -> Self {
        SpanInfo::new(SpanKind::Op, name)
    }

    /// A span that releases or measures memory.
    pub fn memory(name: &'static str) -> Self {
        SpanInfo::new(SpanKind::Memory, name)
    }

    /// Sets the detail.
    #[must_use]
    pub fn detail(self, detail: &'static str) -> Self {
        SpanInfo { detail, ..self }
    }

    /// Sets the number among several.
    #[must_use]
    pub fn index(self, index: usize) -> Self {
        SpanInfo { index: u32::try_from(index).ok(), ..self }
    }

    /// Sets the sizes, at most four.
    #[must_use]
    pub fn dims(mut self, dims: &[usize]) -> Self {
        for (own, dim) in self.dims.iter_mut().zip(dims) {
            *own = u32::try_from(*dim).unwrap_or(u32::MAX);
        }
        self
    }

    /// Adds bytes that it reads, writes or sends.
    #[must_use]
    pub fn bytes(self, bytes: usize) -> Self {
        SpanInfo { bytes: self.bytes + bytes as u64, ..self }
    }

    /// Adds the bytes of `tensors` of any shapes and dtypes, each read or written once.
    #[must_use]
    pub fn moves(self, tensors: &[&Tensor]) -> Self {
        self.bytes(tensors.iter().map(|x| x.elem_count() * x.dtype().size_in_bytes()).sum())
    }

    /// Adds floating-point operations of its products.
    #[must_use]
    pub fn flops(self, flops: usize) -> Self {
        SpanInfo { flops: self.flops + flops as u64, ..self }
    }

    /// Title of the span: `forward block 3`, `matmul 512x64x128 nt`
    pub fn title(&self) -> String {
        let mut text = self.name.to_owned();
        let dims: Vec<String> = self.dims.iter().take_while(|dim| **dim > 0).map(u32::to_string).collect();
        for part in [dims.join("x").as_str(), self.detail] {
            if !part.is_empty() {
                text += &format!(" {part}");
            }
        }
        if let Some(index) = self.index {
            text += &format!(" {index}");
        }
        text
    }
}

/// A span that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceSpan {
    /// Description of the span.
    pub info: SpanInfo,
    /// Number of the thread, 0 for the rank's own.
    pub thread: u32,
    /// Begin, in nanoseconds since [`base_nanos`].
    pub start: u64,
    /// Length in nanoseconds.
    pub nanos: u64,
}

/// A value at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceValue {
    /// Name of the value.
    pub name: &'static str,
    /// Time in nanoseconds since [`base_nanos`].
    pub at: u64,
    /// The value itself.
    pub value: u64,
}

/// Events of a recording.
#[derive(Debug, Clone, Default)]
pub struct TraceEvents {
    /// Spans in the order of their ends.
    pub spans: Vec<TraceSpan>,
    /// Values in order of time.
    pub values: Vec<TraceValue>,
    /// Number of events beyond the maximum.
    pub dropped: u64,
}

/// Recorder of a rank.
#[derive(Debug, Default)]
pub struct TraceRecorder {
    state: Mutex<RecorderState>,
}

#[derive(Debug, Default)]
struct RecorderState {
    is_on: bool,
    /// Number of times it was switched on: an earlier span does not belong to this recording.
    session: u64,
    events: TraceEvents,
    /// Open step and phase of the rank's own thread, with their begins.
    step: Option<(SpanInfo, u64)>,
    phase: Option<(SpanInfo, u64)>,
    /// Open spans of other threads, which are cut when the recording ends; their lengths are still
    /// unknown.
    open_elsewhere: Vec<TraceSpan>,
}

impl RecorderState {
    fn push(&mut self, span: TraceSpan) {
        if self.events.spans.len() < MOST_EVENTS {
            self.events.spans.push(span);
        } else {
            self.events.dropped += 1;
        }
    }

    fn close(&mut self, open: Option<(SpanInfo, u64)>, now: u64) {
        if let Some((info, start)) = open {
            trace_ranges::pop();
            self.push(TraceSpan { info, thread: 0, start, nanos: now - start });
        }
    }

    fn close_phase(&mut self, now: u64) {
        let phase = self.phase.take();
        self.close(phase, now);
    }

    fn close_step(&mut self, now: u64) {
        self.close_phase(now);
        let step = self.step.take();
        self.close(step, now);
    }
}

/// Zero of the times, in nanoseconds since 1970, for aligning the traces of several processes.
pub fn base_nanos() -> u64 {
    clock::start_nanos()
}

fn now() -> u64 {
    u64::try_from(clock::now().as_nanos()).unwrap_or(u64::MAX)
}

impl TraceRecorder {
    fn state(&self) -> MutexGuard<'_, RecorderState> {
        locked(&self.state)
    }

    /// Makes this thread record here as thread number `thread`, 0 being the rank's own, until the
    /// returned value is dropped.
    pub fn join(self: &Arc<Self>, thread: u32) -> TraceMembership {
        let before = JOINED.with(|joined| joined.borrow_mut().replace((Arc::clone(self), thread)));
        TraceMembership(before)
    }

    /// Starts recording; earlier events that were not taken stay.
    pub fn switch_on(&self) {
        let mut state = self.state();
        if !state.is_on {
            state.is_on = true;
            state.session += 1;
            RECORDING.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends the open step and stops recording.
    pub fn switch_off(&self) {
        let now = now();
        let mut state = self.state();
        if state.is_on {
            state.close_step(now);
            for span in std::mem::take(&mut state.open_elsewhere) {
                state.push(TraceSpan { nanos: now.saturating_sub(span.start), ..span });
            }
            state.is_on = false;
            RECORDING.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Discards the recorded events.
    pub fn clear(&self) {
        self.state().events = TraceEvents::default();
    }

    /// Takes the recorded events.
    pub fn take(&self) -> TraceEvents {
        std::mem::take(&mut self.state().events)
    }

    /// Ends the open step, and begins the step `number`.
    pub fn begin_step(&self, number: u64) {
        let now = now();
        let mut state = self.state();
        if state.is_on {
            state.close_step(now);
            let info = SpanInfo::new(SpanKind::Step, "step").index(number as usize);
            trace_ranges::push(|| info.title());
            state.step = Some((info, now));
        }
    }
}

impl Drop for TraceRecorder {
    fn drop(&mut self) {
        self.switch_off();
    }
}

/// A thread's membership of a recorder.
#[derive(Debug)]
pub struct TraceMembership(Option<(Arc<TraceRecorder>, u32)>);

impl Drop for TraceMembership {
    fn drop(&mut self) {
        let before = self.0.take();
        JOINED.with(|joined| *joined.borrow_mut() = before);
    }
}

/// Recorder of this thread, for a helper thread to join.
pub fn recorder() -> Option<Arc<TraceRecorder>> {
    JOINED.with(|joined| joined.borrow().as_ref().map(|(recorder, _)| Arc::clone(recorder)))
}

/// Returns true if this thread records.
pub fn is_on() -> bool {
    RECORDING.load(Ordering::Relaxed) > 0
        && JOINED.with(|joined| joined.borrow().as_ref().is_some_and(|(recorder, _)| recorder.state().is_on))
}

/// A span that ends when this is dropped.
#[derive(Debug)]
#[must_use = "the span ends where this is dropped"]
pub struct OpenSpan {
    info: SpanInfo,
    start: u64,
    session: u64,
}

impl OpenSpan {
    /// Adds bytes that became known during the span.
    pub fn add_bytes(&mut self, bytes: u64) {
        self.info.bytes += bytes;
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let end = now();
        trace_ranges::pop();
        JOINED.with(|joined| {
            let joined = joined.borrow();
            let Some((recorder, thread)) = joined.as_ref() else { return };
            let mut state = recorder.state();
            if state.is_on && state.session == self.session {
                let (start, nanos) = (self.start, end - self.start);
                state.open_elsewhere.retain(|span| (span.thread, span.start) != (*thread, start));
                state.push(TraceSpan { info: self.info, thread: *thread, start, nanos });
            }
        });
    }
}

/// A span of the drops at the end of a scope: values declared after it are dropped before it.
#[derive(Debug, Default)]
#[must_use = "the span ends where this is dropped"]
pub struct ReleaseSpan(Option<OpenSpan>);

impl ReleaseSpan {
    /// Begins the span, at the end of the scope.
    pub fn begin(&mut self) {
        self.0 = span(|| SpanInfo::memory(RELEASE));
    }
}

/// Drops a finished value in a separate span.
pub fn release<T>(done_with: T) {
    let _span = span(|| SpanInfo::memory(RELEASE));
    drop(done_with);
}

/// Begins a span if this thread records; only then calls `describe`.
#[inline]
pub fn span(describe: impl FnOnce() -> SpanInfo) -> Option<OpenSpan> {
    if RECORDING.load(Ordering::Relaxed) == 0 { None } else { open(describe) }
}

fn open(describe: impl FnOnce() -> SpanInfo) -> Option<OpenSpan> {
    JOINED.with(|joined| {
        let joined = joined.borrow();
        let (recorder, thread) = joined.as_ref()?;
        if !recorder.state().is_on {
            return None;
        }
        let info = describe();
        trace_ranges::push(|| info.title());
        let mut state = recorder.state();
        let start = now();
        if *thread > 0 && state.is_on {
            state.open_elsewhere.push(TraceSpan { info, thread: *thread, start, nanos: 0 });
        }
        Some(OpenSpan { info, start, session: state.session })
    })
}

/// Enters a phase of the rank's own thread, which ends the previous one.
pub fn enter_phase(name: &'static str) {
    with_own(|state| {
        let now = now();
        state.close_phase(now);
        let info = SpanInfo::new(SpanKind::Phase, name);
        trace_ranges::push(|| info.title());
        state.phase = Some((info, now));
    });
}

/// Records a value, unless the last one of this name is recent, because reading it costs more than
/// a small operation.
pub fn value(name: &'static str, read: impl FnOnce() -> Option<u64>) {
    let mut due = None;
    with_own(|state| {
        let at = now();
        let last = state.events.values.iter().rev().find(|value| value.name == name);
        let is_late = last.is_none_or(|last| at - last.at >= LEAST_GAP);
        due = Some(at).filter(|_| is_late && state.events.values.len() < MOST_EVENTS);
    });
    let Some(at) = due else { return };
    let read = {
        let _span = span(|| SpanInfo::memory("read what is held"));
        read()
    };
    if let Some(value) = read {
        with_own(|state| state.events.values.push(TraceValue { name, at, value }));
    }
}

/// Lets `change` edit this rank's recorder, if it is on and this is the rank's own thread.
fn with_own(change: impl FnOnce(&mut RecorderState)) {
    if RECORDING.load(Ordering::Relaxed) == 0 {
        return;
    }
    JOINED.with(|joined| {
        if let Some((recorder, 0)) = joined.borrow().as_ref() {
            let mut state = recorder.state();
            if state.is_on {
                change(&mut state);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &'static str) -> impl FnOnce() -> SpanInfo {
        move || SpanInfo::op(name).dims(&[2, 3]).detail("nt")
    }

    #[test]
    fn spans_nest_and_steps_hold_phases() {
        let recorder = Arc::new(TraceRecorder::default());
        assert!(span(named("before")).is_none());
        let member = recorder.join(0);
        recorder.switch_on();
        recorder.begin_step(1);
        enter_phase("forward");
        let outer = span(named("outer"));
        drop(span(named("inner")));
        value("bytes", || Some(7));
        drop(outer);
        let mut at_end = ReleaseSpan::default();
        at_end.begin();
        drop(at_end);
        release(vec![0_u8; 8]);
        enter_phase("backward");
        recorder.begin_step(2);
        recorder.switch_off();
        assert!(span(named("after")).is_none() && !is_on());
        drop(member);
        let events = recorder.take();
        let names: Vec<String> = events.spans.iter().map(|span| span.info.title()).collect();
        assert_eq!(
            names,
            [
                "inner 2x3 nt",
                "read what is held",
                "outer 2x3 nt",
                "release",
                "release",
                "forward",
                "backward",
                "step 1",
                "step 2"
            ],
            "in the order in which they ended"
        );
        let find = |name: &str| {
            let span = events.spans.iter().find(|span| span.info.title() == name).expect("recorded");
            (span.start, span.start + span.nanos)
        };
        let inside = |inner: &str, outer: &str| {
            let (inner, outer) = (find(inner), find(outer));
            assert!(outer.0 <= inner.0 && inner.1 <= outer.1, "{inner:?} in {outer:?}");
        };
        inside("inner 2x3 nt", "outer 2x3 nt");
        inside("outer 2x3 nt", "forward");
        inside("forward", "step 1");
        assert_eq!(find("step 1").1, find("step 2").0);
        assert_eq!(events.values.iter().map(|value| value.value).collect::<Vec<_>>(), [7]);
        assert!(recorder.take().spans.is_empty());
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
    fn threads_record_where_they_have_joined() {
        let recorder = Arc::new(TraceRecorder::default());
        recorder.switch_on();
        let member = recorder.join(0);
        let other = Arc::clone(&recorder);
        std::thread::spawn(move || {
            assert!(span(named("a stranger")).is_none());
            let _member = other.join(1);
            enter_phase("no phase of its own");
            drop(span(named("helper")));
        })
        .join()
        .expect("no panic");
        let threads: Vec<u32> = recorder.take().spans.iter().map(|span| span.thread).collect();
        assert_eq!(threads, [1]);
        // An open span of another thread ends with the recording.
        let helper = recorder.join(1);
        let open = span(named("open"));
        recorder.switch_off();
        drop(open);
        drop(helper);
        let spans = recorder.take().spans;
        assert_eq!(spans.iter().map(|span| (span.info.name, span.thread)).collect::<Vec<_>>(), [("open", 1)]);
        recorder.switch_on();
        // A span from before the recording, or before its restart, is dropped.
        let early = span(named("early"));
        recorder.switch_off();
        recorder.switch_on();
        drop(early);
        assert!(recorder.take().spans.is_empty());
        drop(member);
    }
}
