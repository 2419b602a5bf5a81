//! Facts about the machine: network interfaces, NUMA nodes, the PCI Express topology of GPUs and
//! network cards, NVLink, NCCL's network plugins, limits, and on request the speed of disks.
//!
//! Every reader takes the root folder of the kernel's files (`/`), so that tests can show it other
//! machines. A missing or malformed file leaves a fact unknown and is never an error.

pub(crate) mod disk;
mod interfaces;
mod limits;
mod network_plugins;
mod numa;
mod nvlink;
mod pci;
mod sysfs;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use self::interfaces::NetworkInterface;
use self::limits::{LimitFact, LimitNeeds};
use self::network_plugins::NetworkPlugins;
use self::numa::NumaNode;
use self::nvlink::NvLinks;
use self::pci::{PciDevice, PciDistance, PciRole};
use super::fact_lines::{FactLine, line};
use crate::runtime::disk_space::DiskSpace;
use crate::runtime::machine;

/// Facts about the machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HostFacts {
    interfaces: Vec<NetworkInterface>,
    numa_nodes: Vec<NumaNode>,
    pci: Vec<PciDevice>,
    /// Nearest network cards of each GPU, by the GPU's address.
    nearest_nics: BTreeMap<String, NearestNics>,
    /// Links by the GPU's address; none if NVIDIA's library does not answer.
    nvlinks: Option<BTreeMap<String, NvLinks>>,
    network_plugins: NetworkPlugins,
    limits: Vec<LimitFact>,
}

/// The network cards nearest to a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct NearestNics {
    distance: PciDistance,
    /// PCI addresses of the cards.
    nics: Vec<String>,
}

/// Kind of a link between two ranks, and its expected rate in one direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LinkClass {
    /// Name, such as `NVLink` or `100 Gb/s EFA`.
    pub(crate) name: String,
    /// Rate in 10^9 bytes per second.
    pub(crate) gbytes_per_sec: f64,
}

impl HostFacts {
    /// Reads the facts of this machine.
    pub(crate) fn of_this_machine() -> Self {
        let root = Path::new("/");
        let variable = |name| std::env::var(name).ok();
        let library_path = variable("LD_LIBRARY_PATH").unwrap_or_default();
        let plugins = NetworkPlugins::read(root, &library_path, variable("NCCL_NET_PLUGIN"));
        Self::read(root, plugins, nvlink::read)
    }

    /// Reads the facts of the machine with its files below `root`. `nvlinks` returns the links of
    /// the NVIDIA GPUs at the given addresses.
    fn read(
        root: &Path,
        network_plugins: NetworkPlugins,
        nvlinks: impl FnOnce(&[String]) -> Option<BTreeMap<String, NvLinks>>,
    ) -> Self {
        let (interfaces, pci) = (interfaces::read(root), pci::read(root));
        let has_rdma = interfaces.iter().any(|interface| interface.kind.is_rdma());
        let memory = machine::host_memory().map(|memory| (memory.limit, memory.total));
        let needs = LimitNeeds {
            has_rdma: has_rdma || pci.iter().any(PciDevice::is_efa),
            shared_memory: File::open(root.join("dev/shm"))
                .ok()
                .and_then(|folder| DiskSpace::of(&folder))
                .map(|space| space.total),
            cores: std::thread::available_parallelism().ok().map(|cores| cores.get() as u64),
            cores_online: machine::processors_online(),
            memory,
        };
        let gpus: Vec<String> = pci
            .iter()
            .filter(|device| device.role == PciRole::Gpu && device.is_nvidia())
            .map(|gpu| gpu.address.clone())
            .collect();
        HostFacts {
            numa_nodes: numa::read(root),
            nearest_nics: nearest_nics(&pci),
            nvlinks: nvlinks(&gpus),
            limits: limits::read(root, &needs),
            interfaces,
            pci,
            network_plugins,
        }
    }

    /// Formats all facts as lines.
    pub(crate) fn lines(&self) -> Vec<FactLine> {
        let mut lines: Vec<FactLine> = self.numa_nodes.iter().map(NumaNode::line).collect();
        lines.extend(interfaces::lines(&self.interfaces));
        for device in &self.pci {
            let (name, more) = match device.role {
                PciRole::Gpu => ("GPU", self.near_gpu(device)),
                PciRole::Nic => ("network card", self.interfaces_of(device)),
            };
            let text = std::iter::once(device.text()).chain(more).collect::<Vec<_>>().join("; ");
            lines.push(line(format!("PCI {} {name}", device.address), text));
        }
        let has_efa = self.pci.iter().any(PciDevice::is_efa);
        lines.push(line("NCCL network plugin", self.network_plugins.text(has_efa)));
        lines.extend(self.limits.iter().map(LimitFact::line));
        lines
    }

    /// Describes the links and the nearest network cards of a GPU.
    fn near_gpu(&self, gpu: &PciDevice) -> Vec<String> {
        let links = match &self.nvlinks {
            Some(links) => links.get(&gpu.address).map(NvLinks::text),
            None => gpu.is_nvidia().then(|| "NVLink unknown (libnvidia-ml.so.1 does not answer)".to_owned()),
        };
        let near = self.nearest_nics.get(&gpu.address).map(|near| {
            format!("nearest network card {}, {}", near.nics.join(" and "), near.distance.name())
        });
        links.into_iter().chain(near).collect()
    }

    /// Describes the interfaces of a network card.
    fn interfaces_of(&self, card: &PciDevice) -> Vec<String> {
        let of_card = |interface: &&NetworkInterface| interface.pci_address.as_deref() == Some(&card.address);
        let names: Vec<&str> =
            self.interfaces.iter().filter(of_card).map(|interface| interface.name.as_str()).collect();
        match (names.is_empty(), card.is_efa()) {
            (false, _) => vec![format!("interface {}", names.join(" and "))],
            (true, true) => {
                vec!["an EFA device that the driver efa does not serve: `modprobe efa`".to_owned()]
            }
            (true, false) => Vec::new(),
        }
    }

    /// Returns the fastest network interface that is up and reports its speed.
    pub(crate) fn network(&self) -> Option<LinkClass> {
        let is_used = |interface: &&NetworkInterface| interface.is_up();
        let fastest = self.interfaces.iter().filter(is_used).filter_map(|interface| {
            let gbits = interface.gbits_per_sec?;
            Some((gbits, format!("{gbits} Gb/s {}", interface.kind.name())))
        });
        let (gbits, name) = fastest.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
        Some(LinkClass { name, gbytes_per_sec: gbits / 8.0 })
    }

    /// Returns the slowest link between the GPUs of this machine: NVLink if all GPUs have it, else
    /// PCI Express; none without GPUs.
    pub(crate) fn between_gpus(&self) -> Option<LinkClass> {
        let gpus = || self.pci.iter().filter(|device| device.role == PciRole::Gpu && device.is_nvidia());
        let rate = |gpu: &PciDevice| self.nvlinks.as_ref()?.get(&gpu.address)?.gbytes_per_sec();
        let slowest = |rates: Vec<f64>| rates.into_iter().reduce(f64::min).filter(|rate| *rate > 0.0);
        let class = |name: &str| {
            let name = name.to_owned();
            move |gbytes_per_sec| LinkClass { name, gbytes_per_sec }
        };
        let nvlink = gpus().map(rate).collect::<Option<Vec<f64>>>().and_then(slowest);
        let pcie = || {
            let rates = gpus().map(|gpu| gpu.link.map(|link| link.gbytes_per_sec()));
            slowest(rates.collect::<Option<Vec<f64>>>()?)
        };
        nvlink.map(class("NVLink")).or_else(|| pcie().map(class("PCI Express")))
    }
}

/// Returns for each GPU the network cards at the least distance.
fn nearest_nics(pci: &[PciDevice]) -> BTreeMap<String, NearestNics> {
    let of_gpu = |gpu: &PciDevice| {
        let cards = pci.iter().filter(|device| device.role == PciRole::Nic);
        let known: Vec<(PciDistance, &str)> =
            cards.filter_map(|card| Some((gpu.distance(card)?, card.address.as_str()))).collect();
        let distance = known.iter().map(|(distance, _)| *distance).min()?;
        let nearest = known.iter().filter(|(far, _)| *far == distance);
        let nics = nearest.map(|(_, address)| (*address).to_owned()).collect();
        Some((gpu.address.clone(), NearestNics { distance, nics }))
    };
    pci.iter().filter(|device| device.role == PciRole::Gpu).filter_map(of_gpu).collect()
}
