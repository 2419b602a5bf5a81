//! Network interfaces, and the RDMA devices beside them: InfiniBand, RoCE and Amazon's EFA.

use std::path::Path;

use serde::Serialize;

use super::sysfs;
use crate::doctor::fact_lines::{FactLine, line};

/// Kind of network of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NetworkKind {
    /// Ethernet over the kernel's sockets.
    Ethernet,
    /// A wireless network.
    Wireless,
    /// InfiniBand, and IP over it.
    Infiniband,
    /// RDMA over Ethernet.
    Roce,
    /// Amazon's Elastic Fabric Adapter.
    Efa,
    /// No device: bridges, tunnels and interfaces of containers.
    Virtual,
}

impl NetworkKind {
    /// Returns the name for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            NetworkKind::Ethernet => "ethernet",
            NetworkKind::Wireless => "wireless",
            NetworkKind::Infiniband => "InfiniBand",
            NetworkKind::Roce => "RDMA over ethernet (RoCE)",
            NetworkKind::Efa => "EFA",
            NetworkKind::Virtual => "virtual",
        }
    }

    /// Returns whether the network uses RDMA, which registers (locks) memory.
    pub(crate) fn is_rdma(self) -> bool {
        matches!(self, NetworkKind::Infiniband | NetworkKind::Roce | NetworkKind::Efa)
    }
}

/// A network interface, or the RDMA device of a network card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct NetworkInterface {
    pub(crate) name: String,
    pub(crate) kind: NetworkKind,
    /// State: `up`, `down` or another word of the kernel.
    pub(crate) state: String,
    /// Speed in 10^9 bits per second, if the driver reports it.
    pub(crate) gbits_per_sec: Option<f64>,
    pub(crate) driver: Option<String>,
    /// PCI function of the interface.
    pub(crate) pci_address: Option<String>,
    pub(crate) numa_node: Option<u64>,
}

/// Returns the interfaces below `root` without the loopback, RDMA devices last.
pub(crate) fn read(root: &Path) -> Vec<NetworkInterface> {
    let (net, rdma) = (root.join("sys/class/net"), root.join("sys/class/infiniband"));
    let interfaces = sysfs::names(&net).into_iter().filter_map(|name| interface(&net, name));
    let devices = sysfs::names(&rdma).into_iter().map(|name| rdma_device(&rdma, name));
    interfaces.chain(devices).collect()
}

/// ARPHRD_INFINIBAND and ARPHRD_LOOPBACK of `linux/if_arp.h`.
const ARP_INFINIBAND: u64 = 32;
const ARP_LOOPBACK: u64 = 772;

fn interface(folder: &Path, name: String) -> Option<NetworkInterface> {
    let path = folder.join(&name);
    let hardware = sysfs::number(&path.join("type"));
    // The folder may also hold files, such as that of bonding.
    if hardware == Some(ARP_LOOPBACK) || !path.is_dir() {
        return None;
    }
    let kind = if !path.join("device").exists() {
        NetworkKind::Virtual
    } else if hardware == Some(ARP_INFINIBAND) {
        NetworkKind::Infiniband
    } else if path.join("wireless").exists() || path.join("phy80211").exists() {
        NetworkKind::Wireless
    } else {
        NetworkKind::Ethernet
    };
    let megabits =
        sysfs::number(&path.join("speed")).filter(|speed| *speed > 0 && *speed < u64::from(u32::MAX));
    Some(NetworkInterface {
        kind,
        state: sysfs::text(&path.join("operstate")).unwrap_or_else(|| "state unknown".to_owned()),
        gbits_per_sec: megabits.map(|megabits| megabits as f64 / 1e3),
        driver: sysfs::link_name(&path.join("device/driver")),
        pci_address: pci_address(&path),
        numa_node: sysfs::number(&path.join("device/numa_node")),
        name,
    })
}

/// Reads a device of `/sys/class/infiniband`, by its first port.
fn rdma_device(folder: &Path, name: String) -> NetworkInterface {
    let path = folder.join(&name);
    let driver = sysfs::link_name(&path.join("device/driver"));
    let port = sysfs::names(&path.join("ports")).into_iter().next().unwrap_or_default();
    let port = path.join("ports").join(port);
    let link_layer = sysfs::text(&port.join("link_layer"));
    let kind = match (driver.as_deref(), link_layer.as_deref()) {
        (Some("efa"), _) => NetworkKind::Efa,
        (_, Some("Ethernet")) => NetworkKind::Roce,
        _ => NetworkKind::Infiniband,
    };
    NetworkInterface {
        kind,
        state: sysfs::text(&port.join("state"))
            .map_or_else(|| "state unknown".to_owned(), |text| port_state(&text)),
        gbits_per_sec: sysfs::text(&port.join("rate")).and_then(|rate| rate.split(' ').next()?.parse().ok()),
        driver,
        pci_address: pci_address(&path),
        numa_node: sysfs::number(&path.join("device/numa_node")),
        name,
    }
}

/// Translates `4: ACTIVE` to `up`, the word of network interfaces.
fn port_state(text: &str) -> String {
    let word = text.split_once(": ").map_or(text, |(_, word)| word).to_lowercase();
    if word == "active" { "up".to_owned() } else { word }
}

/// Returns the PCI function of an interface's device.
fn pci_address(folder: &Path) -> Option<String> {
    sysfs::way(&folder.join("device")).into_iter().rev().find(|name| sysfs::is_pci_address(name))
}

impl NetworkInterface {
    /// Returns whether the interface is up.
    pub(crate) fn is_up(&self) -> bool {
        self.state == "up"
    }

    /// Formats the interface as a line.
    fn line(&self) -> FactLine {
        let speed = self.gbits_per_sec.map(|speed| format!("{speed} Gb/s"));
        let speed = speed.unwrap_or_else(|| "speed unknown".to_owned());
        let mut facts = vec![self.kind.name().to_owned(), self.state.clone(), speed];
        facts.extend(self.driver.iter().map(|driver| format!("driver {driver}")));
        facts.extend(self.pci_address.iter().map(|address| format!("PCI {address}")));
        facts.extend(self.numa_node.iter().map(|node| format!("NUMA node {node}")));
        line(format!("network {}", self.name), facts.join(", "))
    }
}

/// Formats all interfaces. Those without a device, of which containers create dozens, share a line.
pub(crate) fn lines(interfaces: &[NetworkInterface]) -> Vec<FactLine> {
    let (without_device, devices): (Vec<_>, Vec<_>) =
        interfaces.iter().partition(|interface| interface.kind == NetworkKind::Virtual);
    let mut lines: Vec<FactLine> = devices.into_iter().map(NetworkInterface::line).collect();
    if !without_device.is_empty() {
        let names: Vec<&str> = without_device.iter().map(|interface| interface.name.as_str()).collect();
        lines.push(line("network, no device", names.join(", ")));
    }
    if lines.is_empty() {
        lines.push(line("network", "no interface except the loopback"));
    }
    lines
}
