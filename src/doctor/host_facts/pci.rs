//! GPUs and network cards on the PCI Express bus: address, speed of the link, and distance between
//! devices.

use std::path::Path;

use serde::Serialize;

use super::sysfs;

/// Role of a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PciRole {
    /// A display or 3D controller (class 0x03).
    Gpu,
    /// A network controller (class 0x02).
    Nic,
}

/// Link between a device and its upstream port.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct PcieLink {
    /// Rate of each lane, in 10^9 transfers per second.
    pub(crate) gt_per_sec: f64,
    /// Number of lanes.
    pub(crate) lanes: u64,
}

impl PcieLink {
    /// Returns 10^9 bytes per second in one direction, without the headers of packets: 8 of 10 bits
    /// carry data up to 5 GT/s, 128 of 130 up to 32 GT/s, 242 of 256 bytes from 64 GT/s on (PCI
    /// Express base specification 6.0).
    pub(crate) fn gbytes_per_sec(self) -> f64 {
        let coded = match self.gt_per_sec {
            rate if rate <= 5.0 => 8.0 / 10.0,
            rate if rate <= 32.0 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        };
        self.gt_per_sec * self.lanes as f64 * coded / 8.0
    }
}

/// A GPU or a network card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PciDevice {
    /// Address, such as `0000:3b:00.0`.
    pub(crate) address: String,
    pub(crate) role: PciRole,
    pub(crate) vendor: u32,
    pub(crate) device: u32,
    /// Model, if a driver reports it.
    pub(crate) name: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) numa_node: Option<u64>,
    /// Fastest link of device and slot; an idle GPU slows its link down.
    pub(crate) link: Option<PcieLink>,
    /// Link at its current speed and width.
    pub(crate) link_now: Option<PcieLink>,
    /// Host bridge and ports above the device, from the processor on.
    #[serde(skip)]
    pub(crate) above: Vec<String>,
}

/// PCI vendor number of NVIDIA.
const NVIDIA: u32 = 0x10de;
/// PCI vendor number of Amazon, and the range of its EFA device numbers.
const AMAZON: u32 = 0x1d0f;
const EFA_DEVICES: std::ops::RangeInclusive<u32> = 0xefa0..=0xefaf;

/// Returns the GPUs and network cards below `root`, in order of their addresses.
pub(crate) fn read(root: &Path) -> Vec<PciDevice> {
    let folder = root.join("sys/bus/pci/devices");
    let mut addresses = sysfs::names(&folder);
    addresses.sort();
    addresses.into_iter().filter_map(|address| device(root, &folder.join(&address), address)).collect()
}

fn device(root: &Path, folder: &Path, address: String) -> Option<PciDevice> {
    let role = match sysfs::hex(&folder.join("class"))? >> 16 {
        0x02 => PciRole::Nic,
        0x03 => PciRole::Gpu,
        _ => return None,
    };
    let mut above = sysfs::way(folder);
    above.pop();
    let bridge = above.iter().position(|name| name.starts_with("pci")).unwrap_or(above.len());
    Some(PciDevice {
        role,
        vendor: sysfs::hex(&folder.join("vendor")).unwrap_or_default(),
        device: sysfs::hex(&folder.join("device")).unwrap_or_default(),
        name: nvidia_model(root, &address),
        driver: sysfs::link_name(&folder.join("driver")),
        numa_node: sysfs::number(&folder.join("numa_node")),
        link: link(folder, "max"),
        link_now: link(folder, "current"),
        above: above.split_off(bridge),
        address,
    })
}

/// Reads a link from texts such as `16.0 GT/s PCIe` and `16`. A link that is off has 0 lanes, an
/// unknown one 255.
fn link(folder: &Path, which: &str) -> Option<PcieLink> {
    let rate = sysfs::text(&folder.join(format!("{which}_link_speed")))?;
    let gt_per_sec =
        rate.split(' ').next()?.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite())?;
    let lanes = sysfs::number(&folder.join(format!("{which}_link_width")))?;
    (1..=32).contains(&lanes).then_some(PcieLink { gt_per_sec, lanes })
}

/// Returns the model name of the GPU at this address, from NVIDIA's driver.
fn nvidia_model(root: &Path, address: &str) -> Option<String> {
    let text = sysfs::text(&root.join("proc/driver/nvidia/gpus").join(address).join("information"))?;
    text.lines().find_map(|line| line.strip_prefix("Model:")).map(|name| name.trim().to_owned())
}

/// Distance of two devices, in the terms and the order of `nvidia-smi topo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum PciDistance {
    /// One switch between them.
    Pix,
    /// Several switches, no host bridge.
    Pxb,
    /// The host bridge of a processor.
    Phb,
    /// Host bridges of one NUMA node.
    Node,
    /// The link between NUMA nodes.
    Sys,
}

impl PciDistance {
    /// Describes the distance for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PciDistance::Pix => "behind the same PCIe switch (PIX)",
            PciDistance::Pxb => "behind switches of the same PCIe port (PXB)",
            PciDistance::Phb => "under the same PCIe host bridge (PHB)",
            PciDistance::Node => "on the same NUMA node (NODE)",
            PciDistance::Sys => "on another NUMA node (SYS)",
        }
    }
}

impl PciDevice {
    pub(crate) fn is_nvidia(&self) -> bool {
        self.vendor == NVIDIA
    }

    /// Returns whether this is an EFA device, even without its driver.
    pub(crate) fn is_efa(&self) -> bool {
        self.vendor == AMAZON && EFA_DEVICES.contains(&self.device)
    }

    /// Returns the distance to `other`; none if neither bus nor NUMA nodes are known.
    pub(crate) fn distance(&self, other: &PciDevice) -> Option<PciDistance> {
        let shared = self.above.iter().zip(&other.above).take_while(|(mine, theirs)| mine == theirs).count();
        // Above a device are the downstream port of its switch, the upstream port, and the root
        // port. Two devices that share the upstream port are on one switch.
        let below = self.above.len().max(other.above.len()).saturating_sub(shared);
        match shared {
            0 => match (self.numa_node, other.numa_node) {
                (Some(mine), Some(theirs)) if mine == theirs => Some(PciDistance::Node),
                (Some(_), Some(_)) => Some(PciDistance::Sys),
                _ => None,
            },
            1 => Some(PciDistance::Phb),
            _ if below <= 1 => Some(PciDistance::Pix),
            _ => Some(PciDistance::Pxb),
        }
    }

    /// Describes the device without its address.
    pub(crate) fn text(&self) -> String {
        let vendor = match self.vendor {
            NVIDIA => "NVIDIA",
            0x1002 => "AMD",
            0x8086 => "Intel",
            0x15b3 => "Mellanox",
            0x14e4 => "Broadcom",
            AMAZON => "Amazon",
            0x1af4 => "virtio",
            _ => "",
        };
        let number = format!("{vendor} {:04x}:{:04x}", self.vendor, self.device);
        let mut facts = vec![self.name.clone().unwrap_or_else(|| number.trim().to_owned())];
        facts.push(self.numa_node.map_or("NUMA node unknown".to_owned(), |node| format!("NUMA node {node}")));
        facts.extend(self.link.map(|link| self.link_text(link)));
        facts.extend(self.driver.is_none().then(|| "no driver".to_owned()));
        facts.join(", ")
    }

    fn link_text(&self, link: PcieLink) -> String {
        let fewer = self.link_now.map(|now| now.lanes).filter(|lanes| *lanes < link.lanes);
        let now = fewer.map_or_else(String::new, |lanes| format!(", of which {lanes} are in use"));
        let PcieLink { gt_per_sec, lanes } = link;
        format!("{gt_per_sec} GT/s x {lanes} lanes ({:.1} GB/s){now}", link.gbytes_per_sec())
    }
}
