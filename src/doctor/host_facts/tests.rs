//! Tests on other machines as trees of files: a host of eight GPUs, a laptop, an empty container,
//! and malformed files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::*;

/// Files of a machine in a temporary folder.
struct FakeMachine(tempfile::TempDir);

impl FakeMachine {
    fn new() -> Self {
        FakeMachine(tempfile::tempdir().unwrap())
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.root().join(target), path).unwrap();
    }

    fn node(&self, number: u32, cpus: &str, kib: u64) {
        let folder = format!("sys/devices/system/node/node{number}");
        self.write(&format!("{folder}/cpulist"), &format!("{cpus}\n"));
        let meminfo = format!("Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:  1 kB\n");
        self.write(&format!("{folder}/meminfo"), &meminfo);
    }

    /// Adds a PCI function at the end of `way`; the last name is its address.
    fn pci(&self, way: &str, numbers: (&str, &str, &str), numa: i32, driver: Option<&str>) {
        let (folder, address) = (format!("sys/devices/{way}"), way.rsplit('/').next().unwrap());
        let (class, vendor, device) = numbers;
        for (name, value) in [("class", class), ("vendor", vendor), ("device", device)] {
            self.write(&format!("{folder}/{name}"), &format!("{value}\n"));
        }
        self.write(&format!("{folder}/numa_node"), &format!("{numa}\n"));
        for which in ["max", "current"] {
            let speed = if which == "max" { "32.0" } else { "2.5" };
            self.write(&format!("{folder}/{which}_link_speed"), &format!("{speed} GT/s PCIe\n"));
            self.write(&format!("{folder}/{which}_link_width"), "16\n");
        }
        if let Some(driver) = driver {
            self.link(&format!("{folder}/driver"), &format!("sys/bus/pci/drivers/{driver}"));
        }
        self.link(&format!("sys/bus/pci/devices/{address}"), &folder);
    }

    fn interface(&self, name: &str, way: Option<&str>, state: &str, megabits: i64) {
        let folder = format!("sys/class/net/{name}");
        let hardware = if name == "lo" { "772" } else { "1" };
        for (file, text) in [("type", hardware), ("operstate", state), ("speed", &megabits.to_string())] {
            self.write(&format!("{folder}/{file}"), &format!("{text}\n"));
        }
        if let Some(way) = way {
            self.link(&format!("{folder}/device"), &format!("sys/devices/{way}"));
        }
    }

    fn facts(&self) -> HostFacts {
        let plugins = NetworkPlugins::read(self.root(), "/opt/own/lib:", None);
        HostFacts::read(self.root(), plugins, |_| None)
    }

    fn text(&self, facts: &HostFacts) -> String {
        super::super::fact_lines::table(&facts.lines()).replace(&self.root().display().to_string(), "")
    }
}

fn value<'a>(text: &'a str, name: &str) -> &'a str {
    let line = text.lines().find(|line| line.starts_with(name));
    line.unwrap_or_else(|| panic!("no {name} in {text}"))[name.len()..].trim()
}

/// Returns the path to a GPU (`card` 0) or network card (1 and on) behind switch `switch` of eight,
/// four at each processor.
fn way(switch: usize, card: usize) -> String {
    let bus = 0x10 + 0x10 * switch;
    format!(
        "pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0/0000:{:02x}:{card:02x}.0/0000:{:02x}:00.0",
        bus + 1,
        bus + 2,
        bus + 3 + card
    )
}

const EFA: (&str, &str, &str) = ("0x020000", "0x1d0f", "0xefa2");
const H100: (&str, &str, &str) = ("0x030200", "0x10de", "0x2330");

/// Builds a host like Amazon's with eight H100: a switch for each GPU, with an EFA device beside
/// it.
fn eight_gpus() -> FakeMachine {
    let machine = FakeMachine::new();
    machine.node(0, "0-47,96-143", 1_056_000_000);
    machine.node(1, "48-95,144-191", 1_056_000_000);
    for switch in 0..8 {
        let (gpu, card, numa) = (way(switch, 0), way(switch, 1), i32::from(switch >= 4));
        machine.pci(&gpu, H100, numa, Some("nvidia"));
        machine.pci(&card, EFA, numa, Some("efa"));
        let address = gpu.rsplit('/').next().unwrap();
        let text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 50\n";
        machine.write(&format!("proc/driver/nvidia/gpus/{address}/information"), text);
        let rdma = format!("sys/class/infiniband/rdmap{switch}");
        machine.write(&format!("{rdma}/ports/1/state"), "4: ACTIVE\n");
        machine.write(&format!("{rdma}/ports/1/rate"), "100 Gb/sec (4X EDR)\n");
        machine.write(&format!("{rdma}/ports/1/link_layer"), "Unspecified\n");
        machine.link(&format!("{rdma}/device"), &format!("sys/devices/{card}"));
    }
    let ethernet = "pci0000:00/0000:00:05.0";
    machine.pci(ethernet, ("0x020000", "0x1d0f", "0xec20"), 0, Some("ena"));
    machine.interface("lo", None, "unknown", -1);
    machine.interface("eth0", Some(ethernet), "up", -1);
    machine.interface("docker0", None, "down", -1);
    machine.write(
        "proc/self/limits",
        "Max open files   1024  524288  files\nMax locked memory  65536  65536  bytes\n",
    );
    machine
}

#[test]
fn a_host_of_eight_gpus() {
    let machine = eight_gpus();
    let facts = machine.facts();
    let text = machine.text(&facts);
    assert_eq!(value(&text, "NUMA node 1"), "CPUs 48-95,144-191, 1007 GiB");
    assert_eq!(
        value(&text, "network eth0"),
        "ethernet, up, speed unknown, driver ena, PCI 0000:00:05.0, NUMA node 0"
    );
    let rdma = value(&text, "network rdmap5");
    assert_eq!(rdma, "EFA, up, 100 Gb/s, driver efa, PCI 0000:64:00.0, NUMA node 1");
    assert_eq!(value(&text, "network, no device"), "docker0");
    assert!(!text.contains("network lo"), "{text}");
    assert_eq!(
        value(&text, "PCI 0000:63:00.0 GPU"),
        "NVIDIA H100 80GB HBM3, NUMA node 1, 32 GT/s x 16 lanes (63.0 GB/s); \
         NVLink unknown (libnvidia-ml.so.1 does not answer); nearest network card 0000:64:00.0, \
         behind the same PCIe switch (PIX)"
    );
    assert!(value(&text, "PCI 0000:64:00.0 network card").ends_with("; interface rdmap5"), "{text}");
    let plugin = value(&text, "NCCL network plugin");
    assert!(plugin.contains("install aws-ofi-nccl, https://github.com/aws/aws-ofi-nccl"), "{text}");
    assert!(
        value(&text, "limit locked memory").starts_with("64.0 KiB: TOO LOW; enough: unlimited"),
        "{text}"
    );
    assert!(value(&text, "limit open files").starts_with("1024: TOO LOW; enough: 8192"), "{text}");
    let network = facts.network().unwrap();
    assert_eq!((network.name.as_str(), network.gbytes_per_sec), ("100 Gb/s EFA", 12.5));
    let between = facts.between_gpus().unwrap();
    assert_eq!(between.name, "PCI Express");
    assert!((between.gbytes_per_sec - 63.0).abs() < 0.1, "{between:?}");
    let json = serde_json::to_value(&facts).unwrap();
    assert_eq!(json["pci"].as_array().map(Vec::len), Some(17));
    assert_eq!(json["nearest_nics"]["0000:13:00.0"]["distance"], "PIX");
    assert_eq!(json["interfaces"][0]["kind"], "virtual");
}

/// A plugin outside of the loader's folders is reported; one inside them is enough.
#[test]
fn a_plugin_for_efa() {
    let machine = eight_gpus();
    machine.write("opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", "");
    let text = machine.text(&machine.facts());
    let plugin = value(&text, "NCCL network plugin");
    assert_eq!(
        plugin,
        "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so, where the loader does not look: \
         `export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH`"
    );
    machine.write("etc/ld.so.conf.d/efa.conf", "# Amazon's\n/opt/amazon/ofi-nccl/lib\n");
    let text = machine.text(&machine.facts());
    assert_eq!(value(&text, "NCCL network plugin"), "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so");
    machine.write("opt/own/lib/libnccl-net.so", "");
    let text = machine.text(&machine.facts());
    assert!(value(&text, "NCCL network plugin").starts_with("/opt/own/lib/libnccl-net.so, "), "{text}");
}

#[test]
fn nvlinks_count_where_the_library_tells() {
    let machine = eight_gpus();
    let links = |addresses: &[String]| {
        assert_eq!(addresses.len(), 8);
        let remotes = BTreeMap::from([("0000:c1:00.0".to_owned(), 10), ("0000:c2:00.0".to_owned(), 8)]);
        let all = NvLinks { active: 18, version: Some(6), remotes };
        Some(addresses.iter().map(|address| (address.clone(), all.clone())).collect())
    };
    let facts = HostFacts::read(machine.root(), NetworkPlugins::default(), links);
    let text = machine.text(&facts);
    assert!(
        value(&text, "PCI 0000:13:00.0 GPU")
            .contains("; 18 NVLinks (450 GB/s): 10 to 0000:c1:00.0, 8 to 0000:c2:00.0; nearest"),
        "{text}"
    );
    let between = facts.between_gpus().unwrap();
    assert_eq!((between.name.as_str(), between.gbytes_per_sec), ("NVLink", 450.0));
}

#[test]
fn an_efa_device_without_its_driver() {
    let machine = FakeMachine::new();
    machine.pci("pci0000:00/0000:00:06.0", EFA, -1, None);
    let text = machine.text(&machine.facts());
    let card = value(&text, "PCI 0000:00:06.0 network card");
    assert!(card.starts_with("Amazon 1d0f:efa2, NUMA node unknown, 32 GT/s"), "{text}");
    assert!(
        card.ends_with("no driver; an EFA device that the driver efa does not serve: `modprobe efa`"),
        "{text}"
    );
}

#[test]
fn a_laptop() {
    let machine = FakeMachine::new();
    machine.node(0, "0-7", 16_000_000);
    machine.pci("pci0000:00/0000:00:02.0", ("0x030000", "0x8086", "0x46a6"), -1, Some("i915"));
    machine.pci("pci0000:00/0000:00:14.3", ("0x028000", "0x8086", "0x51f0"), -1, Some("iwlwifi"));
    machine.interface("lo", None, "unknown", -1);
    machine.interface("wlp0s20f3", Some("pci0000:00/0000:00:14.3"), "up", -1);
    machine.write("sys/class/net/wlp0s20f3/wireless/x", "");
    machine.write(
        "proc/self/limits",
        "Max open files  1048576  1048576  files\nMax locked memory  8388608  8388608  bytes\n",
    );
    let facts = machine.facts();
    let text = machine.text(&facts);
    assert_eq!(
        value(&text, "network wlp0s20f3"),
        "wireless, up, speed unknown, driver iwlwifi, PCI 0000:00:14.3"
    );
    assert!(value(&text, "PCI 0000:00:02.0 GPU").contains("under the same PCIe host bridge (PHB)"), "{text}");
    assert_eq!(value(&text, "NCCL network plugin"), "none, and none is needed without EFA");
    assert!(value(&text, "limit locked memory").starts_with("8.00 MiB (enough: any"), "{text}");
    assert!(value(&text, "limit open files").starts_with("1048576 (enough"), "{text}");
    assert_eq!((facts.network(), facts.between_gpus()), (None, None));
}

#[test]
fn a_container_that_shows_nothing() {
    let machine = FakeMachine::new();
    let facts = machine.facts();
    assert!(facts.interfaces.is_empty() && facts.pci.is_empty() && facts.numa_nodes.is_empty());
    let text = machine.text(&facts);
    assert_eq!(value(&text, "network"), "no interface except the loopback");
    assert!(!text.contains("limit open files"), "{text}");
    assert!(serde_json::to_string(&facts).unwrap().contains("\"nvlinks\":null"));
}

/// Files in place of folders, folders in place of files, broken links, and invalid numbers.
#[test]
fn nonsense_is_left_out() {
    let machine = FakeMachine::new();
    machine.write("sys/class/net/bonding_masters", "bond0\n");
    machine.write("sys/class/net/eth0/speed/folder", "");
    machine.write("sys/class/net/eth0/type", "\u{0}\u{ffff}");
    machine.link("sys/class/net/eth0/device", "nowhere");
    machine.write("sys/class/infiniband/mlx5_0/ports/1/rate", "fast\n");
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "\n");
    machine.write("sys/devices/system/node/node0", "a file");
    machine.write("sys/devices/system/node/nodeX/cpulist", "0");
    machine.write("sys/devices/system/node/node7/cpulist", "");
    machine.write("sys/devices/system/node/node7/meminfo", "Node 7 MemTotal: lots");
    machine.write("sys/bus/pci/devices/0000:00:00.0/class", "0xzz");
    machine.write("sys/bus/pci/devices/x/class", "0x030000");
    machine.write("sys/bus/pci/devices/x/max_link_speed", "-5 GT/s");
    machine.write("sys/bus/pci/devices/x/max_link_width", "16");
    machine.write("sys/bus/pci/devices/y/class", "0x020000");
    machine.write("sys/bus/pci/devices/y/max_link_speed", "Unknown");
    machine.write("proc/self/limits", "Max open files  many  more\n");
    machine.write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n/nowhere\n");
    machine.link("sys/class/net/loop", "sys/class/net/loop");
    let facts = machine.facts();
    let text = machine.text(&facts);
    assert_eq!(value(&text, "NUMA node 7"), "no CPUs, memory unknown");
    assert_eq!(value(&text, "network, no device"), "eth0");
    assert!(value(&text, "network mlx5_0").starts_with("InfiniBand, "), "{text}");
    assert_eq!(facts.pci.iter().map(|device| device.link).collect::<Vec<_>>(), [None, None]);
    assert_eq!(facts.numa_nodes.len(), 1);
}

/// The facts of this machine can be read.
#[test]
fn this_machine() {
    let facts = HostFacts::of_this_machine();
    let names: Vec<String> = facts.lines().into_iter().map(|(name, _)| name).collect();
    assert!(names.iter().any(|name| name == "NCCL network plugin"), "{names:?}");
}
