//! What this process holds in memory, as the kernel counts it.
//!
//! Linux tells both figures in `/proc/self/status`. Elsewhere `getrusage` knows the peak, and nobody the present.
//! Memory of a GPU is not in here; the device's own module counts that.

use std::fs;

use crate::units::field_bytes;

/// The most memory the process has ever held (resident set), in bytes.
pub fn peak_bytes() -> u64 {
    status_bytes("VmHWM:").unwrap_or_else(rusage_peak_bytes)
}

/// The memory the process holds now (resident set), in bytes; `None` where the system does not tell.
pub fn current_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

fn status_bytes(key: &str) -> Option<u64> {
    field_bytes(&fs::read_to_string("/proc/self/status").ok()?, key)
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
    fn holding_memory_shows() {
        let before = peak_bytes();
        let held = vec![1_u8; 64 << 20];
        let (peak, rusage) = (peak_bytes(), rusage_peak_bytes());
        assert!(peak >= 64 << 20, "{peak} from {before} with {} held", held.len());
        assert!(rusage >= 64 << 20, "{rusage}");
        assert!(current_bytes().is_none_or(|now| now <= peak_bytes()));
    }
}
