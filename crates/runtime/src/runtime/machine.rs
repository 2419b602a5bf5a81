//! The machine without its GPUs: the processor, and the memory that this process may use. The
//! values are from Linux's `/proc`; on other systems some are unknown.

use std::fs;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use libc::__rlimit_resource_t as ResourceName;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
use libc::c_int as ResourceName;

use crate::units::{self, field_bytes};

/// Host memory that this process may use, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Total memory of the host.
    pub total: u64,
    /// Bytes that this process can still allocate without swapping.
    pub available: u64,
    /// Maximum bytes of this process, including swap: the lowest of the limits in [`MemoryBound`].
    pub limit: u64,
    /// The cause of `limit`.
    pub bound: MemoryBound,
}

/// Limits on the memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryBound {
    /// Memory and swap of the host.
    Host,
    /// Limit of a control group, such as a container's.
    Group,
    /// Limit on the address space of a process (RLIMIT_AS), which includes threads' stacks and
    /// mapped files.
    AddressSpace,
    /// Limit on the data of a process (RLIMIT_DATA), which includes threads' stacks.
    Data,
}

impl MemoryBound {
    /// Text of the limit, with the bytes that it leaves to this process.
    pub fn in_words(self, bytes: u64) -> String {
        let bytes = units::bytes(bytes);
        match self {
            MemoryBound::Host => format!("this host has {bytes}, swap included"),
            MemoryBound::Group => {
                format!("the control group of this process (memory.max) allows {bytes}, swap included")
            }
            MemoryBound::AddressSpace => {
                format!("the limit on the address space of this process (`ulimit -v`) leaves {bytes}")
            }
            MemoryBound::Data => {
                format!("the limit on the data of this process (`ulimit -d`) leaves {bytes}")
            }
        }
    }
}

/// Bytes below a limit of the process that are reserved for stacks of later threads.
const KEPT_FOR_STACKS: u64 = 64 << 20;

/// Host memory that this process may use; none if the system does not report it.
pub fn host_memory() -> Option<HostMemory> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |key| field_bytes(&info, key);
    let (total, swap) = (bytes("MemTotal:")?, bytes("SwapTotal:").unwrap_or(0));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut memory = HostMemory {
        total,
        available: bytes("MemAvailable:")?,
        limit: total + swap,
        bound: MemoryBound::Host,
    };
    if let Some(limit) = group_limit(Path::new("/sys/fs/cgroup"), &groups, swap)
        && limit < memory.limit
    {
        (memory.limit, memory.bound) = (limit, MemoryBound::Group);
    }
    let used = AddressSpace::used().unwrap_or_default();
    let address_space = (MemoryBound::AddressSpace, soft_limit(libc::RLIMIT_AS), used.total);
    let data = (MemoryBound::Data, soft_limit(libc::RLIMIT_DATA), used.data);
    for (bound, limit, used_bytes) in [address_space, data] {
        let Some(free) = limit.map(|limit| usable(limit.saturating_sub(used_bytes))) else { continue };
        memory.available = memory.available.min(free);
        if used.resident + free < memory.limit {
            (memory.limit, memory.bound) = (used.resident + free, bound);
        }
    }
    Some(memory)
}

/// Bytes of `free` below a process limit that a step may use: a fifth is reserved for fragmentation
/// and unplanned allocations (13 MiB were measured for activations of 70 MiB).
fn usable(free: u64) -> u64 {
    free.saturating_sub(KEPT_FOR_STACKS) / 5 * 4
}

/// Soft limit of this process on a resource; none if unlimited.
fn soft_limit(resource: ResourceName) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call, which fills it in.
    let status = unsafe { libc::getrlimit(resource, &raw mut limit) };
    (status == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Address space of this process, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct AddressSpace {
    total: u64,
    resident: u64,
    data: u64,
}

impl AddressSpace {
    fn used() -> Option<Self> {
        // SAFETY: the call only returns a number.
        let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        Self::of_statm(&fs::read_to_string("/proc/self/statm").ok()?, page)
    }

    /// Parses proc(5)'s statm: total pages, resident, shared, code, 0, data and stack.
    fn of_statm(text: &str, page: u64) -> Option<Self> {
        let fields: Vec<u64> = text.split_whitespace().map_while(|field| field.parse().ok()).collect();
        let bytes = |nth: usize| Some(fields.get(nth)? * page);
        Some(AddressSpace { total: bytes(0)?, resident: bytes(1)?, data: bytes(5)? })
    }
}

/// Lowest limit of the process's control groups, including swap; `groups` is `/proc/self/cgroup`,
/// `root` the folder of the groups, `swap` the host's swap in bytes.
fn group_limit(root: &Path, groups: &str, swap: u64) -> Option<u64> {
    // "max" means no limit.
    let number = |folder: &Path, file: &str| -> Option<u64> {
        fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    let second = |folder: &Path| {
        let swapped = number(folder, "memory.swap.max").map_or(swap, |limit| limit.min(swap));
        Some(number(folder, "memory.max")?.saturating_add(swapped))
    };
    // Version 1, in which a huge number means no limit.
    let first = |folder: &Path| {
        let memory = number(folder, "memory.limit_in_bytes")?.saturating_add(swap);
        Some(number(folder, "memory.memsw.limit_in_bytes").map_or(memory, |both| both.min(memory)))
    };
    let least = |root: &Path, own: &str, of: &dyn Fn(&Path) -> Option<u64>| {
        Path::new(own).ancestors().filter_map(|group| of(&root.join(group))).min()
    };
    let of_line = |line: &str| {
        let (controllers, own) = line.split_once(':')?.1.split_once(":/")?;
        match controllers {
            "" => least(root, own, &second),
            _ if controllers.split(',').any(|name| name == "memory") => {
                // A container may see its group under the path outside the container.
                least(&root.join("memory"), own, &first)
            }
            _ => None,
        }
    };
    groups.lines().filter_map(of_line).min()
}

/// Resources that this process has used since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkDone {
    /// Processor time of its threads.
    pub cpu: Duration,
    /// Blocks that it has read from and written to disks.
    pub blocks: i64,
}

/// Resources that this process has used; none if the system does not report them.
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

/// Online processors of the machine, including those that this process may not use; none if the
/// system does not report it.
pub fn processors_online() -> Option<u64> {
    // SAFETY: the call only returns a number.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).ok().filter(|count| *count > 0)
}

/// Name of the first processor; none if the system does not report it.
pub fn processor_name() -> Option<String> {
    model_name(&fs::read_to_string("/proc/cpuinfo").ok()?).map(str::to_owned)
}

/// Name of the first processor in Linux's `/proc/cpuinfo`.
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
        write("memory/a", "memory.limit_in_bytes", "500\n");
        write("memory", "memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(group_limit(root.path(), "3:cpu,memory:/a/b\n0::/\n", 7), Some(507));
        write("memory/a", "memory.memsw.limit_in_bytes", "502\n");
        assert_eq!(group_limit(root.path(), "3:memory:/a\n", 7), Some(502));
        assert_eq!(group_limit(root.path(), "3:memory:/elsewhere\n", 7), Some(9_223_372_036_854_771_719));
    }

    #[test]
    fn the_address_space_in_use_is_read() {
        let used = AddressSpace::of_statm("100 50 30 20 0 40 0\n", 4096).unwrap();
        assert_eq!(used, AddressSpace { total: 409_600, resident: 204_800, data: 163_840 });
        assert_eq!(AddressSpace::of_statm("100 50", 4096), None);
        assert_eq!(usable(KEPT_FOR_STACKS - 1), 0);
        assert_eq!(usable(KEPT_FOR_STACKS + 50), 40);
    }
}
