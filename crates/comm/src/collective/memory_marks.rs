//! How much memory a rank's phases came to hold: read where one phase ends and the next begins, so that an estimate by phase
//! can stand beside a measurement.
//!
//! The system keeps one high-water mark, which only rises. A phase in which it rose held as much as the mark then said; of
//! any other phase it is known that it held no more, and of a GPU what was held at its two ends. Nothing is set back: what
//! others measure of this process stays true.

use std::sync::{Mutex, OnceLock};

use candle_core::Device;

use super::Phase;
use crate::rendezvous::locked;
use crate::report::memory::ResidentSet;
use crate::runtime::device;
use crate::runtime::trace::{SpanInfo, span};

/// Bytes that were held, each 0 where nothing measures it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Of host memory, by the whole process.
    pub host: u64,
    /// Of a GPU, by this process's tensors.
    pub device: u64,
}

impl HeldBytes {
    fn max(self, other: Self) -> Self {
        HeldBytes { host: self.host.max(other.host), device: self.device.max(other.device) }
    }

    /// Where one is above the other, that one; else nothing.
    fn above(self, other: Self) -> Self {
        let risen = |own: u64, other: u64| if own > other { own } else { 0 };
        HeldBytes { host: risen(self.host, other.host), device: risen(self.device, other.device) }
    }
}

/// The marks of a rank; nothing is read before somebody asks for them.
#[derive(Debug, Default)]
pub(super) struct MemoryMarks {
    meter: OnceLock<Meter>,
    state: Mutex<Marks>,
}

/// What is held now and at most.
#[derive(Debug)]
struct Meter {
    resident: ResidentSet,
    device: Device,
}

#[derive(Debug, Default)]
struct Marks {
    phase: Option<Phase>,
    /// What was held when the phase began.
    began: HeldBytes,
    /// The most that was held before it.
    high: HeldBytes,
    by_phase: [HeldBytes; Phase::ALL.len()],
}

impl MemoryMarks {
    /// From now on phases are measured, those of a rank that computes on `device`.
    pub(super) fn watch(&self, device: &Device) {
        self.meter.get_or_init(|| Meter { resident: ResidentSet::open(), device: device.clone() });
    }

    /// The phase before ends, and `phase` begins.
    pub(super) fn enter(&self, phase: Phase) {
        let Some(meter) = self.meter.get() else { return };
        let (now, high) = meter.read();
        locked(&self.state).turn(Some(phase), now, high);
    }

    /// The phases that were entered, with the most that is known of each; the present one counts as far as it has come.
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
            // What a process has of the host it keeps: only a rise says what a phase took.
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
        // It held 50 for a moment.
        marks.turn(Some(Phase::Backward), held(40), held(50));
        // Never more than before.
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
        let taken = std::hint::black_box(vec![1_u8; 48 << 20]);
        marks.enter(Phase::Forward);
        let read = marks.read();
        let of = |phase: Phase| read.iter().find(|(one, _)| *one == phase).map_or(0, |(_, held)| held.host);
        assert!(of(Phase::Data) >= 48 << 20, "{read:?} with {} held", taken.len());
        assert!(of(Phase::Load) == 0, "{read:?}");
    }
}
