//! NUMA nodes: processors and the memory that is near them.

use std::path::Path;

use serde::Serialize;

use super::sysfs;
use crate::doctor::fact_lines::{FactLine, line};
use crate::units;

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct NumaNode {
    pub(crate) number: u32,
    /// Processors of the node in the kernel's format: `0-31,64-95`.
    pub(crate) cpus: String,
    /// Memory of the node in bytes, if the kernel reports it.
    pub(crate) memory_bytes: Option<u64>,
}

/// Returns the nodes below `root`, in order of their numbers; none if the kernel reports none.
pub(crate) fn read(root: &Path) -> Vec<NumaNode> {
    let folder = root.join("sys/devices/system/node");
    let node = |name: String| {
        let number = name.strip_prefix("node")?.parse().ok()?;
        let path = folder.join(&name);
        Some(NumaNode {
            number,
            cpus: sysfs::text(&path.join("cpulist"))?,
            memory_bytes: sysfs::text(&path.join("meminfo")).and_then(|text| total(&text)),
        })
    };
    let mut nodes: Vec<NumaNode> = sysfs::names(&folder).into_iter().filter_map(node).collect();
    nodes.sort_by_key(|node| node.number);
    nodes
}

/// Returns the bytes of the line `Node 0 MemTotal:  11626700 kB`.
fn total(meminfo: &str) -> Option<u64> {
    meminfo
        .lines()
        .find_map(|line| units::field_bytes(line.split_once("MemTotal").map(|(_, rest)| rest)?, ":"))
}

impl NumaNode {
    /// Formats the node as a line.
    pub(crate) fn line(&self) -> FactLine {
        let cpus = if self.cpus.is_empty() { "no CPUs".to_owned() } else { format!("CPUs {}", self.cpus) };
        let memory = self.memory_bytes.map_or_else(|| "memory unknown".to_owned(), units::bytes);
        line(format!("NUMA node {}", self.number), format!("{cpus}, {memory}"))
    }
}
