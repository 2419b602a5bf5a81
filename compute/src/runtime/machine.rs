//! What the machine offers beside its GPUs: the processor, its vector instructions, and the memory of the host. Linux
//! tells them in `/proc`; elsewhere some of it stays unknown.

use std::fs;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use crate::units::field_bytes;

/// Memory of the host, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// All that there is.
    pub total: u64,
    /// What can still be had without swapping.
    pub available: u64,
    /// What a process may hold at most, swapped out or not: the system's, or that of its control group (a container).
    pub limit: u64,
}

/// The memory of this host; none where the system does not say.
pub fn host_memory() -> Option<HostMemory> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |key| field_bytes(&info, key);
    let (total, swap) = (bytes("MemTotal:")?, bytes("SwapTotal:").unwrap_or(0));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_limit(Path::new("/sys/fs/cgroup"), &groups, swap);
    let limit = group.map_or(total + swap, |group| group.min(total + swap));
    Some(HostMemory { total, available: bytes("MemAvailable:")?, limit })
}

/// The least that the control groups (version 2) of a process allow it, swap included; `groups` is what the system says of
/// its groups, `root` where they are, `swap` what there is of it.
fn group_limit(root: &Path, groups: &str, swap: u64) -> Option<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // "max" is no limit.
    let number = |group: &Path, file: &str| -> Option<u64> {
        fs::read_to_string(root.join(group).join(file)).ok()?.trim().parse().ok()
    };
    let of_group = |group: &Path| {
        let swapped = number(group, "memory.swap.max").map_or(swap, |limit| limit.min(swap));
        Some(number(group, "memory.max")?.saturating_add(swapped))
    };
    Path::new(own).ancestors().filter_map(of_group).min()
}

/// What this process has done since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkDone {
    /// Time of its threads on processors.
    pub cpu: Duration,
    /// Blocks that it has read from disks and written to them.
    pub blocks: i64,
}

/// What this process has done so far; none where the system does not say.
pub fn work_done() -> Option<WorkDone> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the system fills the memory in where it returns 0, and only then is it read.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0 {
            return None;
        }
        usage.assume_init()
    };
    let time = |spent: libc::timeval| {
        let micros = u64::try_from(spent.tv_usec).unwrap_or_default();
        Duration::from_secs(u64::try_from(spent.tv_sec).unwrap_or_default()) + Duration::from_micros(micros)
    };
    let cpu = time(usage.ru_utime) + time(usage.ru_stime);
    Some(WorkDone { cpu, blocks: usage.ru_inblock + usage.ru_oublock })
}

/// Processors that the machine has switched on, also those that this process may not use; none where the system does not
/// say.
pub fn processors_online() -> Option<u64> {
    // SAFETY: asks the system for a number.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).ok().filter(|count| *count > 0)
}

/// The name of the first processor; none where the system does not say.
pub fn processor_name() -> Option<String> {
    model_name(&fs::read_to_string("/proc/cpuinfo").ok()?).map(str::to_owned)
}

/// The name of the first processor in Linux's `/proc/cpuinfo`.
fn model_name(info: &str) -> Option<&str> {
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_lines() {
        let info = "processor\t: 0\nmodel name\t: A processor @ 2 GHz\nmodel name\t: another\n";
        assert_eq!(model_name(info), Some("A processor @ 2 GHz"));
        assert_eq!(model_name("processor\t: 0\n"), None);
    }

    #[test]
    fn computing_is_work() {
        let before = work_done().unwrap();
        let mut sum = 0_u64;
        while work_done().unwrap().cpu < before.cpu + Duration::from_millis(20) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(sum > 0);
    }

    #[test]
    fn the_strictest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |group: &str, file: &str, text: &str| {
            fs::create_dir_all(root.path().join(group)).unwrap();
            fs::write(root.path().join(group).join(file), text).unwrap();
        };
        write("a/b", "memory.max", "max\n");
        assert_eq!(group_limit(root.path(), "0::/a/b\n", 7), None);
        write("a", "memory.max", "1000\n");
        assert_eq!(group_limit(root.path(), "0::/a/b\n", 7), Some(1007));
        write("a", "memory.swap.max", "0\n");
        assert_eq!(group_limit(root.path(), "1:cpu:/x\n0::/a/b\n", 7), Some(1000));
        write("", "memory.max", "900\n");
        assert_eq!(group_limit(root.path(), "0::/a/b\n", 7), Some(907));
        assert_eq!(group_limit(root.path(), "3:memory:/a\n", 7), None);
    }
}
