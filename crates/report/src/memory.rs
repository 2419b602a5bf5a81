//! The memory of this process, as the kernel counts it, beside the plan.
//!
//! Linux gives both figures in `/proc/self/status`. Elsewhere `getrusage` gives the peak, and no
//! call the present figure. Memory of a GPU is not included; the device's own module counts it.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use crate::units::{self, field_bytes};

/// The file with the memory of a process on Linux, and the keys of its lines.
const STATUS: &str = "/proc/self/status";
const HIGH_WATER: &str = "VmHWM:";
const RESIDENT: &str = "VmRSS:";

/// The planned and the measured peak memory of a run, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryComparison {
    /// Planned memory of a rank, by cause.
    pub causes: Vec<(&'static str, u64)>,
    /// Number of ranks measured together: those of the process on a CPU, one on a GPU.
    pub ranks: u64,
    /// Planned memory of the process beside its ranks, if `causes` does not include it.
    pub shared: u64,
    /// Planned host memory beside a GPU, which the measured figure does not include.
    pub host: u64,
    /// The measured peak; none without a measurement.
    pub peak: Option<u64>,
    /// Planned and measured peak by phase, in the order of a run.
    pub phases: Vec<PhaseMemory>,
}

/// The memory of a phase, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PhaseMemory {
    /// Name of the phase, such as `backward`.
    pub name: &'static str,
    /// Planned peak of the memory that [`MemoryComparison::peak`] measures.
    pub planned: u64,
    /// Known peak of the process's host memory in it, 0 without a measurement.
    pub host: u64,
    /// Known peak of the GPU memory of tensors in it, 0 without a measurement.
    pub device: u64,
}

impl MemoryComparison {
    /// Returns the planned bytes of all measured memory.
    pub fn predicted(&self) -> u64 {
        let a_rank = self.causes.iter().map(|(_, bytes)| bytes).sum::<u64>();
        a_rank.saturating_mul(self.ranks).saturating_add(self.shared)
    }

    /// Returns the first phase that reached the peak; none if phases are not measured.
    pub(crate) fn peak_phase(&self) -> Option<&'static str> {
        let peak = self.peak?;
        let on_device = self.phases.iter().any(|phase| phase.device > 0);
        let held = |phase: &PhaseMemory| if on_device { phase.device } else { phase.host };
        self.phases.iter().find(|phase| held(phase) >= peak).map(|phase| phase.name)
    }

    /// Returns the difference of the peak from the plan as a share of the plan, below 0 if under
    /// it; none without a measurement or a plan.
    pub fn difference(&self) -> Option<f64> {
        let predicted = Some(self.predicted()).filter(|bytes| *bytes > 0)?;
        self.peak.map(|peak| (peak as f64 - predicted as f64) / predicted as f64)
    }
}

impl fmt::Display for MemoryComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let planned = units::bytes(self.predicted());
        let Some(peak) = self.peak else {
            return write!(f, "peak memory not measured ({planned} planned)");
        };
        write!(f, "peak memory {}", units::bytes(peak))?;
        if let Some(phase) = self.peak_phase() {
            write!(f, " in {phase}")?;
        }
        write!(f, " ({planned} planned)")
    }
}

/// Returns the largest resident set that the process has ever had, in bytes.
pub fn peak_bytes() -> u64 {
    status_bytes(HIGH_WATER).unwrap_or_else(rusage_peak_bytes)
}

/// The resident set of this process for frequent reads: the kernel's file stays open.
#[derive(Debug)]
pub struct ResidentSet(Option<File>);

impl ResidentSet {
    /// Opens the file of the kernel's figures.
    pub fn open() -> Self {
        ResidentSet(File::open(STATUS).ok())
    }

    /// Returns the present resident set, 0 if the system does not give it, and its peak; both in
    /// bytes.
    pub fn read(&self) -> (u64, u64) {
        let mut text = [0; 4096];
        let read = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = String::from_utf8_lossy(&text[..read]);
        let high = field_bytes(&text, HIGH_WATER).unwrap_or_else(rusage_peak_bytes);
        (field_bytes(&text, RESIDENT).unwrap_or(0), high)
    }
}

/// Returns the resident set of the process, in bytes; `None` if the system does not give it.
pub fn current_bytes() -> Option<u64> {
    status_bytes(RESIDENT)
}

fn status_bytes(key: &str) -> Option<u64> {
    field_bytes(&fs::read_to_string(STATUS).ok()?, key)
}

fn rusage_peak_bytes() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole `rusage`, for which all zeroes is a valid value.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    // getrusage(2): kilobytes, but bytes on macOS.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_lines() {
        let status = "Name:\tfinetune\nVmPeak:\t  999999 kB\nVmHWM:\t   20480 kB\nVmRSS:\t    4 kB\n";
        assert_eq!(field_bytes(status, "VmHWM:"), Some(20_971_520));
        assert_eq!(field_bytes(status, "VmRSS:"), Some(4096));
        assert_eq!(field_bytes(status, "VmSwap:"), None);
        assert_eq!(field_bytes("MemTotal:       24 kB\nMemAvailable: 7 kB\n", "MemAvailable:"), Some(7168));
        assert_eq!(field_bytes("MemTotal: many\n", "MemTotal:"), None);
    }

    #[test]
    fn a_peak_stands_beside_its_plan() {
        let causes = vec![("weights", 30 << 20), ("workspace", 10 << 20)];
        let plan = MemoryComparison {
            causes,
            ranks: 2,
            shared: 20 << 20,
            host: 0,
            peak: Some(90 << 20),
            phases: Vec::new(),
        };
        assert_eq!(plan.predicted(), 100 << 20);
        assert_eq!(plan.to_string(), "peak memory 90.0 MiB (100 MiB planned)");
        let phase = |name, host| PhaseMemory { name, host, ..PhaseMemory::default() };
        let phases = vec![phase("load", 60 << 20), phase("loss", 90 << 20), phase("save", 90 << 20)];
        let plan = MemoryComparison { phases, ..plan };
        assert_eq!(plan.to_string(), "peak memory 90.0 MiB in loss (100 MiB planned)");
        let plan = MemoryComparison { peak: None, ..plan };
        assert_eq!(plan.to_string(), "peak memory not measured (100 MiB planned)");
        assert_eq!(MemoryComparison { peak: Some(1), ..MemoryComparison::default() }.difference(), None);
    }

    #[test]
    fn holding_memory_shows() {
        let before = peak_bytes();
        let held = vec![1_u8; 64 << 20];
        let (peak, rusage) = (peak_bytes(), rusage_peak_bytes());
        assert!(peak >= 64 << 20, "{peak} from {before} with {} held", held.len());
        assert!(rusage >= 64 << 20, "{rusage}");
        assert!(current_bytes().is_none_or(|now| now <= peak_bytes()));
        let (now, high) = ResidentSet::open().read();
        assert!(high >= 64 << 20 && now <= high, "{now} {high}");
        assert_eq!(now > 0, current_bytes().is_some());
    }
}
