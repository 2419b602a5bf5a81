//! Memory use by phase of a rank, read at the borders between phases, so that a measurement can be
//! compared with an estimate.
//!
//! The system keeps one high-water mark, which only rises. A phase in which it rose used as much
//! memory as the mark. For any other phase only an upper bound is known, and for a GPU the use at
//! both ends. The marks are never reset, so other measurements of this process stay valid.

use std::sync::{Mutex, OnceLock};

use candle_core::Device;

use super::Phase;
use crate::locks::locked;
use crate::report::memory::ResidentSet;
use crate::runtime::device;
use crate::runtime::trace::{SpanInfo, span};

/// Memory in use in bytes; 0 if it is not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Host memory of the whole process.
    pub host: u64,
    /// GPU memory of this process's tensors.
    pub device: u64,
}

impl HeldBytes {
    fn max(self, other: Self) -> Self {
        HeldBytes { host: self.host.max(other.host), device: self.device.max(other.device) }
    }

    /// The own values that exceed those of `other`; others are 0.
    fn above(self, other: Self) -> Self {
        let risen = |own: u64, other: u64| if own > other { own } else { 0 };
        HeldBytes { host: risen(self.host, other.host), device: risen(self.device, other.device) }
    }
}

/// Memory marks of a rank; nothing is read before [`MemoryMarks::watch`].
#[derive(Debug, Default)]
pub(super) struct MemoryMarks {
    meter: OnceLock<Meter>,
    state: Mutex<Marks>,
}

/// Readers of the memory in use and of its peak.
#[derive(Debug)]
struct Meter {
    resident: ResidentSet,
    device: Device,
}

#[derive(Debug, Default)]
struct Marks {
    phase: Option<Phase>,
    /// Memory in use when the phase began.
    began: HeldBytes,
    /// Peak before the phase.
    high: HeldBytes,
    by_phase: [HeldBytes; Phase::ALL.len()],
}

impl MemoryMarks {
    /// Starts to measure phases of a rank that computes on `device`.
    pub(super) fn watch(&self, device: &Device) {
        self.meter.get_or_init(|| Meter { resident: ResidentSet::open(), device: device.clone() });
    }

    /// Ends the current phase and begins `phase`.
    pub(super) fn enter(&self, phase: Phase) {
        let Some(meter) = self.meter.get() else { return };
        let (now, high) = meter.read();
        locked(&self.state).turn(Some(phase), now, high);
    }

    /// Entered phases with the known memory use of each; the current one counts up to now.
    pub(super) fn read(&self) -> Vec<(Phase, HeldBytes)> {
        let mut state = locked(&self.state);
        if let Some(meter) = self.meter.get() {
            let (now, high) = meter.read();
            let phase = state.phase;
            state.turn(phase, now, high);
        }
        let all = Phase::ALL.into_iter().map(|phase| (phase, state.by_phase[phase as usize]));
        all.filter(|(_, held)| *held != HeldBytes::default()).collect()
    }
}

impl Meter {
    fn read(&self) -> (HeldBytes, HeldBytes) {
        let _span = span(|| SpanInfo::memory("read what is held"));
        let of_device = |bytes: fn(&Device) -> Option<u64>| bytes(&self.device).unwrap_or(0);
        let (now, high) = self.resident.read();
        let now = HeldBytes { host: now, device: of_device(device::used_bytes) };
        (now, HeldBytes { host: high, device: of_device(device::peak_bytes) })
    }
}

impl Marks {
    fn turn(&mut self, to: Option<Phase>, now: HeldBytes, high: HeldBytes) {
        if let Some(phase) = self.phase {
            // A process keeps its host memory: only a rise shows a phase's use.
            let ends = HeldBytes { host: 0, ..self.began.max(now) };
            let held = &mut self.by_phase[phase as usize];
            *held = held.max(ends).max(high.above(self.high));
        }
        (self.phase, self.began, self.high) = (to, now, high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(host: u64) -> HeldBytes {
        HeldBytes { host, device: 2 * host }
    }

    #[test]
    fn a_mark_belongs_to_the_phase_in_which_it_rose() {
        let mut marks = Marks::default();
        marks.turn(Some(Phase::Load), held(5), held(9));
        marks.turn(Some(Phase::Forward), held(20), held(20));
        // It used 50 for a moment.
        marks.turn(Some(Phase::Backward), held(40), held(50));
        // It never used more than before.
        marks.turn(Some(Phase::Forward), held(30), held(50));
        marks.turn(None, held(10), held(50));
        let of = |phase: Phase| marks.by_phase[phase as usize];
        assert_eq!(of(Phase::Load), held(20));
        assert_eq!(of(Phase::Forward), held(50));
        assert_eq!(of(Phase::Backward), HeldBytes { host: 0, device: 80 });
        assert_eq!(of(Phase::Update), HeldBytes::default());
    }

    #[test]
    fn nothing_is_read_unasked() {
        let marks = MemoryMarks::default();
        marks.enter(Phase::Load);
        assert_eq!(marks.read(), []);
        marks.watch(&Device::Cpu);
        marks.enter(Phase::Data);
        let allocated = std::hint::black_box(vec![1_u8; 48 << 20]);
        marks.enter(Phase::Forward);
        let read = marks.read();
        let of = |phase: Phase| read.iter().find(|(one, _)| *one == phase).map_or(0, |(_, held)| held.host);
        assert!(of(Phase::Data) >= 48 << 20, "{read:?} with {} held", allocated.len());
        assert!(of(Phase::Load) == 0, "{read:?}");
    }
}
