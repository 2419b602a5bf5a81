//! Limits that the system sets for this process, each with the value that is enough and a way to
//! raise it.

use std::path::Path;

use serde::Serialize;

use super::sysfs;
use crate::doctor::fact_lines::{FactLine, line};
use crate::units;

/// A limit and its judgement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct LimitFact {
    name: &'static str,
    /// Current value; none: unlimited.
    value: Option<u64>,
    /// Largest value that this process may set; none: unlimited, or the limit has no such value.
    hard: Option<u64>,
    enough: bool,
    /// Value that is enough, with the reason.
    needed: String,
    /// Ways to raise the limit, if it is too low.
    raise: Option<String>,
}

/// Names of the limits that are not in bytes.
const COUNTS: [&str; 2] = ["open files", "cores"];

/// Number of open files and sockets that is enough: shards of weights and data, and several sockets
/// for each peer rank.
const OPEN_FILES: u64 = 8192;

/// Bytes that NVIDIA recommends for NCCL in containers (`docker run --shm-size=1g`).
const SHARED_MEMORY: u64 = 1 << 30;

/// Facts that the judgement depends on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LimitNeeds {
    /// True if a network card uses RDMA.
    pub(crate) has_rdma: bool,
    /// Size of /dev/shm in bytes, if known.
    pub(crate) shared_memory: Option<u64>,
    /// Number of processors that this process may use.
    pub(crate) cores: Option<u64>,
    /// Number of processors of the machine.
    pub(crate) cores_online: Option<u64>,
    /// Memory limit of this process, and memory of the machine, in bytes.
    pub(crate) memory: Option<(u64, u64)>,
}

/// Reads the limits of this process from proc(5) below `root`. Unknown limits are left out.
pub(crate) fn read(root: &Path, needs: &LimitNeeds) -> Vec<LimitFact> {
    let limits = sysfs::text(&root.join("proc/self/limits")).unwrap_or_default();
    let locked =
        process_limit(&limits, "Max locked memory").map(|limit| locked_memory(limit, needs.has_rdma));
    let files = process_limit(&limits, "Max open files").map(open_files);
    let shared = needs.shared_memory.map(shared_memory);
    let cores = needs.cores.zip(needs.cores_online).and_then(|(here, all)| cores(here, all));
    let memory = needs.memory.and_then(|(here, all)| memory(here, all));
    [locked, files, shared, cores, memory].into_iter().flatten().collect()
}

/// Soft and hard limit; none: unlimited.
type SoftHard = (Option<u64>, Option<u64>);

/// Parses a line such as `Max open files   1024   524288   files`.
fn process_limit(text: &str, name: &str) -> Option<SoftHard> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = rest.split_whitespace();
    let mut limit = || match words.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some((limit()?, limit()?))
}

/// Returns the fact of a limit, which is too low if `raise` describes how to raise it.
fn fact(
    name: &'static str,
    (value, hard): SoftHard,
    needed: impl Into<String>,
    raise: Option<&str>,
) -> LimitFact {
    let (enough, needed) = (raise.is_none(), needed.into());
    LimitFact { name, value, hard, enough, needed, raise: raise.map(str::to_owned) }
}

fn locked_memory(limit: SoftHard, has_rdma: bool) -> LimitFact {
    let needed = if has_rdma {
        "unlimited: RDMA locks every buffer that it sends from"
    } else {
        "any value without InfiniBand, RoCE or EFA devices; unlimited with one"
    };
    let raise = "`ulimit -l unlimited` after `* - memlock unlimited` in /etc/security/limits.conf; \
                 `docker run --ulimit memlock=-1`; LimitMEMLOCK=infinity in a service";
    fact("locked memory", limit, needed, (limit.0.is_some() && has_rdma).then_some(raise))
}

fn open_files((value, hard): SoftHard) -> LimitFact {
    let is_low = value.is_some_and(|files| files < OPEN_FILES);
    let raise = if hard.is_none_or(|hard| hard >= OPEN_FILES) {
        "`ulimit -n 65536`, or up to the hard limit, in the shell or job that starts the ranks"
    } else {
        "`* - nofile 65536` in /etc/security/limits.conf; `docker run --ulimit nofile=65536`"
    };
    let needed = format!("{OPEN_FILES}: each peer rank needs several sockets");
    fact("open files", (value, hard), needed, is_low.then_some(raise))
}

fn shared_memory(bytes: u64) -> LimitFact {
    let raise = "`docker run --shm-size=1g` or more; in Kubernetes an emptyDir of `medium: Memory` at /dev/shm; \
                 `mount -o remount,size=8G /dev/shm`";
    let least = units::bytes(SHARED_MEMORY);
    let needed = format!("{least}: NCCL and MPI pass data between ranks of one host through it");
    fact("/dev/shm", (Some(bytes), None), needed, (bytes < SHARED_MEMORY).then_some(raise))
}

/// Returns none if this process may use all processors.
fn cores(here: u64, all: u64) -> Option<LimitFact> {
    let needed = format!(
        "at most the {all} of this machine: affinity (taskset, Slurm) or a control group's cpu.max \
         (`docker run --cpus`) leaves fewer"
    );
    (here < all).then(|| fact("cores", (Some(here), None), needed, None))
}

/// Returns none if no control group sets a limit below the memory of the machine.
fn memory(here: u64, all: u64) -> Option<LimitFact> {
    let needed = format!(
        "what `finetune --dry-run` plans; the machine has {} (`docker run --memory`, memory.max)",
        units::bytes(all)
    );
    (here < all).then(|| fact("memory of the control group", (Some(here), None), needed, None))
}

impl LimitFact {
    /// Formats the limit as a line.
    pub(crate) fn line(&self) -> FactLine {
        let value = match self.value {
            None => "unlimited".to_owned(),
            Some(number) if COUNTS.contains(&self.name) => number.to_string(),
            Some(bytes) => units::bytes(bytes),
        };
        let judgement = match (&self.raise, self.value) {
            (Some(raise), _) => format!(": TOO LOW; enough: {}; raise it: {raise}", self.needed),
            (None, None) => " (enough)".to_owned(),
            (None, Some(_)) => format!(" (enough: {})", self.needed),
        };
        line(format!("limit {}", self.name), value + &judgement)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_kernels_lines() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max open files            1024                 524288               files     \n\
                    Max locked memory         unlimited            unlimited            bytes     \n\
                    Max nice priority         0                    x                             \n";
        assert_eq!(process_limit(text, "Max open files"), Some((Some(1024), Some(524_288))));
        assert_eq!(process_limit(text, "Max locked memory"), Some((None, None)));
        assert_eq!(process_limit(text, "Max nice priority"), None);
        assert_eq!(process_limit(text, "Max processes"), None);
    }

    #[test]
    fn locked_memory_matters_to_rdma_alone() {
        let limit = (Some(8 << 20), Some(8 << 20));
        assert!(locked_memory(limit, false).enough && locked_memory((None, None), true).enough);
        let low = locked_memory(limit, true);
        assert!(!low.enough);
        let (_, text) = low.line();
        assert!(text.starts_with("8.00 MiB: TOO LOW; enough: unlimited"), "{text}");
        assert!(text.contains("memlock=-1"), "{text}");
    }

    #[test]
    fn how_to_raise_the_number_of_files() {
        assert!(open_files((Some(OPEN_FILES), None)).enough);
        let soft = open_files((Some(1024), Some(524_288)));
        assert!(soft.raise.is_some_and(|raise| raise.starts_with("`ulimit -n")));
        let hard = open_files((Some(1024), Some(4096)));
        assert!(hard.raise.is_some_and(|raise| raise.contains("limits.conf")));
    }

    #[test]
    fn what_containers_leave() {
        assert!(!shared_memory(64 << 20).enough && shared_memory(GIB).enough);
        assert!(cores(4, 4).is_none() && memory(8 * GIB, 8 * GIB).is_none());
        assert_eq!(cores(4, 64).map(|fact| fact.value), Some(Some(4)));
        let (_, text) = memory(8 * GIB, 64 * GIB).map(|fact| fact.line()).unwrap();
        assert!(text.starts_with("8.00 GiB (enough: what") && text.contains("64.0 GiB"), "{text}");
    }
}
