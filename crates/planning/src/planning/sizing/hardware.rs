//! Hardware that may be elsewhere, as `--on 8xH100-80GB*4` names it: from a table of devices or a
//! file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::figure_range::FigureRange;
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::recipe::nearest;

/// The table of common training devices, with the source of each row.
const DEVICES: &str = include_str!("devices.toml");

/// The figures of a device: a GPU, or a computer with one memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSheet {
    /// The name in `--on`.
    pub name: String,
    /// Other names for it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// 10^9 bytes of memory.
    pub memory_gb: f64,
    /// 10^12 bf16 operations a second with sums in f32; 0 if the device has no bf16.
    pub bf16_tflops: f64,
    /// 10^12 f32 operations a second.
    pub f32_tflops: f64,
    /// 10^9 bytes a second between the device and its memory.
    pub memory_gbps: f64,
    /// True if runs compute on the processor: the computer has no GPU with kernels in finetune.
    #[serde(default)]
    pub processor: bool,
    /// The connection between devices of a host; "none" for a computer with one device.
    pub link: String,
    /// 10^9 bytes a second of a device in a ring over the link; 0 if devices are not connected.
    pub link_gbps: f64,
    /// 10^9 bytes a second between device and host memory, one way.
    pub host_gbps: f64,
    /// 10^9 bytes a second between hosts, for all devices of a host; 0 if hosts are not connected.
    pub network_gbps: f64,
    /// 10^9 bytes of the host's memory.
    pub host_memory_gb: f64,
    /// 10^9 bytes a second that the host reads from its disk.
    pub disk_gbps: f64,
    /// The compute capability of an NVIDIA GPU, such as 8.9; none if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<f64>,
    /// The usual number of devices of a host: link, network, memory and disk belong to such a host.
    pub devices_per_host: usize,
    /// The part of its peak speed that training reaches.
    pub efficiency: f64,
    /// The source of the figures.
    pub source: String,
}

/// A number of hosts with devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hardware {
    /// The device type.
    pub device: DeviceSheet,
    /// Devices of a host.
    pub per_host: usize,
    /// Number of hosts.
    pub hosts: usize,
}

#[derive(Deserialize)]
struct Sheets {
    device: Vec<DeviceSheet>,
}

/// A user's file that describes one device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnHardware {
    device: DeviceSheet,
}

impl DeviceSheet {
    /// Returns 10^12 operations a second in this dtype.
    pub fn tflops(&self, bf16: bool) -> f64 {
        if bf16 { self.bf16_tflops } else { self.f32_tflops }
    }

    /// Returns the compute capability as major and minor number.
    pub fn capability(&self) -> Option<(i32, i32)> {
        let tenths = self.compute_capability.map(|number| (number * 10.0).round() as i32);
        tenths.map(|tenths| (tenths / 10, tenths % 10))
    }

    /// True if the sheet is a computer with one device, or only its processor.
    fn is_whole_computer(&self) -> bool {
        self.link == "none"
    }

    fn is_called(&self, name: &str) -> bool {
        let names = std::iter::once(&self.name).chain(&self.aliases);
        names.into_iter().any(|known| known.eq_ignore_ascii_case(name))
    }

    /// Returns the number of words that the driver's name of a GPU shares with this sheet. Requires
    /// all words of one of its names; the other words must not affect speed.
    fn words_of(&self, driver: &[String]) -> Option<usize> {
        let names = std::iter::once(&self.name).chain(&self.aliases);
        let covered = names.filter_map(|name| {
            let own = words(name);
            let rest = driver.iter().filter(|word| !own.contains(word));
            let is_generic = |word: &String| {
                is_vendor_word(word) || is_memory_size(word) && !own.iter().any(|own| is_memory_size(own))
            };
            (own.iter().all(|word| driver.contains(word)) && rest.into_iter().all(is_generic))
                .then_some(own.len())
        });
        covered.max()
    }

    /// Checks that every figure is possible for hardware.
    fn check(&self, name: &str) -> Result<()> {
        let figures = [
            ("memory_gb", self.memory_gb, SIZE),
            ("bf16_tflops", self.bf16_tflops, SPEED.or_none()),
            ("f32_tflops", self.f32_tflops, SPEED),
            ("memory_gbps", self.memory_gbps, SPEED),
            ("link_gbps", self.link_gbps, SPEED.or_none()),
            ("host_gbps", self.host_gbps, SPEED),
            ("network_gbps", self.network_gbps, SPEED.or_none()),
            ("host_memory_gb", self.host_memory_gb, SIZE),
            ("disk_gbps", self.disk_gbps, SPEED),
            ("efficiency", self.efficiency, FigureRange::new(0.001, 1.0)),
            ("devices_per_host", self.devices_per_host as f64, FigureRange::new(1.0, MOST_DEVICES as f64)),
        ];
        let capability = self.compute_capability.map(|number| ("compute_capability", number, CAPABILITY));
        let wrong =
            figures.into_iter().chain(capability).find_map(|(key, value, range)| range.refusal(key, value));
        let of_name = || {
            let is_bad = self.name.chars().any(char::is_control);
            is_bad.then(|| format!("`name` is {:?}; accepted: a text without control characters", self.name))
        };
        let why = wrong.or_else(of_name);
        why.map_or(Ok(()), |why| Err(Error::user(format!("cannot plan for {name}")).because(why)))
    }
}

/// Sizes of memories, in 10^9 bytes.
const SIZE: FigureRange = FigureRange::new(0.001, 1e6);
/// Speeds, in 10^9 bytes or 10^12 operations a second.
const SPEED: FigureRange = FigureRange::new(0.001, 1e6);
/// Compute capabilities of GPUs.
const CAPABILITY: FigureRange = FigureRange::new(1.0, 20.0);
/// Most devices of a host, and most hosts.
const MOST_DEVICES: usize = 100_000;
/// Most devices of all hosts.
const MOST_RANKS: usize = 1_000_000;

/// Returns every device of the table.
///
/// # Errors
/// An internal error: the table is malformed.
pub fn devices() -> Result<Vec<DeviceSheet>> {
    let sheets: Sheets = toml::from_str(DEVICES)
        .map_err(|e| Error::internal("the table of devices is malformed").because(e.to_string()))?;
    Ok(sheets.device)
}

/// Returns the device that a driver calls `name`, such as "NVIDIA H100 80GB HBM3". Returns none if
/// the table does not have that exact form: cards of the same name for another slot, or for
/// laptops, are slower.
///
/// # Errors
/// An internal error: the table is malformed.
pub fn called_by_driver(name: &str) -> Result<Option<DeviceSheet>> {
    let driver = words(name);
    let known = devices()?.into_iter().filter(|sheet| !sheet.is_whole_computer());
    let matching = known.filter_map(|sheet| Some((sheet.words_of(&driver)?, sheet)));
    Ok(matching.max_by_key(|(count, _)| *count).map(|(_, sheet)| sheet))
}

fn words(name: &str) -> Vec<String> {
    name.split([' ', '-']).filter(|word| !word.is_empty()).map(str::to_uppercase).collect()
}

/// True for a word that says nothing about the speed of a card.
fn is_vendor_word(word: &str) -> bool {
    let plain = ["NVIDIA", "TESLA", "GEFORCE", "QUADRO", "GENERATION", "HBM2", "HBM3", "HBM3E"];
    plain.contains(&word) || matches!(word, "SXM2" | "SXM3" | "SXM4" | "SXM5")
}

fn is_memory_size(word: &str) -> bool {
    word.strip_suffix("GB").is_some_and(|number| number.parse::<u32>().is_ok())
}

impl Hardware {
    /// Parses `[COUNTx]DEVICE[*HOSTS]`; the path of a file may replace DEVICE. Without a count, it
    /// is a host with one device.
    ///
    /// # Errors
    /// The user's: unknown device, invalid counts, or a file that cannot be read or parsed.
    pub fn parse(text: &str, folder: &Path) -> Result<Self> {
        let refused = |why: String| {
            Error::user(format!("cannot plan for hardware {text:?} (`--on`)"))
                .because(why)
                .hint("write [COUNTx]DEVICE[*HOSTS], such as 8xH100-80GB, 4xA100-40GB*16 or mac-64GB; or the path of a TOML file in place of DEVICE")
        };
        let (rest, hosts) = match text.rsplit_once('*') {
            Some((rest, hosts)) => (rest, count(hosts).map_err(&refused)?),
            None => (text, 1),
        };
        let (per_host, name) = match rest.split_once(['x', 'X']) {
            Some((many, name))
                if !many.is_empty() && many.bytes().all(|b| b.is_ascii_digit() || b == b'-') =>
            {
                (Some(count(many).map_err(&refused)?), name)
            }
            _ => (None, rest),
        };
        let device = if name.ends_with(".toml") {
            from_file(&folder.join(name))?
        } else {
            let all = devices()?;
            let called_so = all.iter().find(|device| device.is_called(name));
            called_so.cloned().ok_or_else(|| refused(unknown(name, &all)))?
        };
        let per_host = per_host.unwrap_or(1);
        if device.is_whole_computer() && per_host > 1 {
            return Err(refused(format!(
                "{} is a whole computer; write several as {}*{per_host}",
                device.name, device.name
            )));
        }
        if per_host * hosts > MOST_RANKS {
            return Err(refused(format!(
                "this hardware has {} devices; accepted: 1 to {MOST_RANKS}",
                per_host * hosts
            )));
        }
        let connected = [
            ("network_gbps", device.network_gbps, hosts, "hosts"),
            ("link_gbps", device.link_gbps, per_host, "devices of a host"),
        ];
        if let Some((key, _, many, what)) =
            connected.into_iter().find(|(_, speed, many, _)| *many > 1 && *speed == 0.0)
        {
            return Err(refused(format!(
                "`{key}` of {} is 0 (not connected), but {many} {what} must exchange data",
                device.name
            ))
            .hint(format!(
                "set `{key}` to the speed of their connection in 10^9 bytes a second, or plan for 1x{name}"
            )));
        }
        Ok(Hardware { device, per_host, hosts })
    }

    /// Describes this machine as one device per rank, the processor or a GPU. Each rank copies
    /// `copy_gbps` 10^9 bytes a second, and its memory has `memory` bytes. Other figures are
    /// unused, or derived from these.
    pub fn here(ranks: usize, copy_gbps: f64, memory: u64, is_cpu: bool) -> Self {
        let gigabytes = memory as f64 / 1e9;
        let device = DeviceSheet {
            name: "this machine".into(),
            aliases: Vec::new(),
            memory_gb: gigabytes,
            bf16_tflops: 0.0,
            f32_tflops: 0.0,
            memory_gbps: copy_gbps,
            processor: is_cpu,
            link: if is_cpu { "none" } else { "unknown" }.into(),
            // A transfer is a read and a write, and `copy_gbps` counts both.
            link_gbps: copy_gbps / 2.0,
            host_gbps: copy_gbps / 2.0,
            network_gbps: 0.0,
            host_memory_gb: gigabytes,
            disk_gbps: 1.0,
            compute_capability: None,
            devices_per_host: 1,
            efficiency: 1.0,
            source: "measured".into(),
        };
        Hardware { device, per_host: ranks, hosts: 1 }
    }

    /// Returns a warning if a host has more devices than usual, since link, network, memory and
    /// disk are those of the usual size.
    pub fn unusual(&self) -> Option<String> {
        let DeviceSheet { name, link, devices_per_host: usual, .. } = &self.device;
        let hosts = self.devices().div_ceil(*usual);
        (self.per_host > *usual).then(|| {
            format!(
                "{} devices in a host: the table describes {name} in hosts of {usual}; finetune plans {} with the link ({link}), the \
                 network, the memory and the disk of such a host; write hosts of {usual} as {usual}x{name}*{hosts}",
                self.per_host, self.per_host
            )
        })
    }

    /// Returns the number of all devices.
    pub fn devices(&self) -> usize {
        self.per_host * self.hosts
    }

    /// Returns the hardware in the form of `--on`.
    pub fn text(&self) -> String {
        let hosts = if self.hosts > 1 { format!("*{}", self.hosts) } else { String::new() };
        format!("{}x{}{hosts}", self.per_host, self.device.name)
    }

    /// Returns 10^9 bytes a second that a rank sends in a ring of `size` ranks, each `stride` from
    /// the next. Parallel rings send at the same time, so all data that leaves a host shares the
    /// host's network.
    pub fn ring_gbps(&self, stride: usize, size: usize) -> f64 {
        let DeviceSheet { link_gbps, network_gbps, .. } = self.device;
        match () {
            () if stride * size <= self.per_host => link_gbps,
            // Every neighbour is on another host.
            () if stride >= self.per_host => network_gbps / self.per_host as f64,
            () => link_gbps.min(network_gbps / stride as f64),
        }
    }

    /// Returns the seconds of one trip around such a ring, for any number of bytes. They grow with
    /// the ranks. The figures are those of NCCL's own model of its "simple" protocol in a ring
    /// (src/graph/tuning.cc).
    pub(crate) fn ring_latency(&self, stride: usize, size: usize) -> f64 {
        let hops = size.saturating_sub(1);
        let between_hosts = match () {
            () if stride * size <= self.per_host => 0,
            () if stride >= self.per_host => hops,
            () => hops.min((stride * size).div_ceil(self.per_host) - 1),
        };
        let link = if self.device.link.starts_with("PCIe") { 5.7e-6 } else { 3.4e-6 };
        let call = if hops > 0 { 8.4e-6 } else { 0.0 };
        call + (hops - between_hosts) as f64 * link + between_hosts as f64 * 14e-6
    }

    /// Returns the seconds that a rank takes to send `bytes` in such a ring; 0 for no bytes.
    pub(crate) fn ring_secs(&self, bytes: f64, stride: usize, size: usize) -> f64 {
        if bytes > 0.0 { bytes / (self.ring_gbps(stride, size) * 1e9) } else { 0.0 }
    }
}

/// Parses a number of devices or hosts.
fn count(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|n| (1..=MOST_DEVICES).contains(n));
    number.ok_or_else(|| format!("{text:?} is no number of devices or hosts; accepted: 1 to {MOST_DEVICES}"))
}

/// Returns the message that no device of the table has this name.
fn unknown(name: &str, all: &[DeviceSheet]) -> String {
    let known: Vec<&str> = all.iter().map(|device| device.name.as_str()).collect();
    let names = all.iter().flat_map(|device| std::iter::once(&device.name).chain(&device.aliases));
    let lower: Vec<String> = names.map(|name| name.to_lowercase()).collect();
    let near = nearest(name, lower.iter().map(String::as_str));
    let near = all.iter().find(|device| near.is_some_and(|near| device.is_called(near)));
    let near = near.map_or_else(String::new, |near| format!(" (near: {})", near.name));
    format!("no device is called {name:?}{near}; accepted: {}", known.join(", "))
}

fn from_file(path: &Path) -> Result<DeviceSheet> {
    let shown = path.display().to_string();
    let text = input_file::read_text("read", path)?;
    let own: OwnHardware = toml::from_str(&text).map_err(|e| {
        Error::user(format!("cannot understand the hardware in {shown}"))
            .because(e.to_string())
            .hint("write one table `[device]`; `finetune plan --help` lists its keys")
    })?;
    own.device.check(&shown)?;
    Ok(own.device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_its_devices_once_and_whole() -> Result<()> {
        let all = devices()?;
        assert!(!all.is_empty());
        let mut names: Vec<String> = Vec::new();
        for device in &all {
            device.check(&device.name)?;
            assert!(!device.source.is_empty(), "{}", device.name);
            // The hint for a missing connection changes a file.
            assert!(device.network_gbps > 0.0, "{}", device.name);
            assert!(device.link_gbps > 0.0 || device.is_whole_computer(), "{}", device.name);
            names.extend(std::iter::once(&device.name).chain(&device.aliases).map(|n| n.to_lowercase()));
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        Ok(())
    }

    #[test]
    fn a_gpu_is_known_by_what_its_driver_calls_it() -> Result<()> {
        for (name, sheet) in [
            ("NVIDIA H100 80GB HBM3", "H100-80GB"),
            ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
            ("NVIDIA H100 NVL", "H100-NVL-94GB"),
            ("NVIDIA H200", "H200-141GB"),
            ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
            ("NVIDIA A100-PCIE-40GB", "A100-PCIe-80GB"),
            ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
            ("Tesla V100-SXM2-32GB", "V100-32GB"),
            ("NVIDIA L4", "L4-24GB"),
            ("NVIDIA L40S", "L40S-48GB"),
            ("NVIDIA A10G", "A10G-24GB"),
            ("Tesla T4", "T4-16GB"),
            ("NVIDIA GeForce RTX 4090", "4090"),
            ("NVIDIA RTX A6000", "RTX-A6000-48GB"),
            ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada-48GB"),
        ] {
            assert_eq!(
                called_by_driver(name)?.map(|hardware| hardware.name).as_deref(),
                Some(sheet),
                "{name}"
            );
        }
        for name in [
            "NVIDIA H200 NVL",
            "Tesla V100-PCIE-16GB",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA B300",
            "cpu",
        ] {
            assert_eq!(called_by_driver(name)?, None, "{name}");
        }
        Ok(())
    }

    #[test]
    fn hosts_of_another_size_are_told() -> Result<()> {
        let unusual = |text: &str| Ok::<_, Error>(Hardware::parse(text, Path::new("."))?.unusual());
        assert_eq!(unusual("8xH100-80GB*4")?, None);
        assert_eq!(unusual("4090*2")?, None);
        let warning = unusual("16xH100-80GB")?.unwrap_or_default();
        assert!(warning.contains("write hosts of 8 as 8xH100-80GB*2"), "{warning}");
        let warning = unusual("8x4090*4")?.unwrap_or_default();
        assert!(warning.contains("in hosts of 2") && warning.contains("2x4090*16"), "{warning}");
        Ok(())
    }

    /// A computer with a GPU is no processor, even without another device.
    #[test]
    fn processors_are_computers_without_a_gpu_of_ours() -> Result<()> {
        let on_processor = devices()?.into_iter().filter(|device| device.processor);
        let names: Vec<String> = on_processor.map(|device| device.name).collect();
        assert_eq!(names, ["mac-16GB", "mac-32GB", "mac-64GB", "mac-128GB", "cpu-64GB", "cpu-512GB"]);
        assert!(devices()?.iter().all(|device| !device.processor || device.is_whole_computer()));
        Ok(())
    }

    #[test]
    fn rings_that_leave_a_host_share_its_network() -> Result<()> {
        let hosts = Hardware::parse("8x4090*4", Path::new("."))?;
        let link = hosts.device.link_gbps;
        assert_eq!(hosts.device.network_gbps, 1.25);
        for (stride, size, gbps) in [
            (1, 8, link),
            (4, 2, link),
            // One ring over all ranks; two and four that each have some ranks of every host; one
            // from each device.
            (1, 32, 1.25),
            (2, 16, 1.25 / 2.0),
            (4, 8, 1.25 / 4.0),
            (8, 4, 1.25 / 8.0),
            (16, 2, 1.25 / 8.0),
        ] {
            assert_eq!(hosts.ring_gbps(stride, size), gbps, "{size} ranks, {stride} apart");
        }
        // Computers with one device have no link.
        assert_eq!(Hardware::parse("4090*2", Path::new("."))?.ring_gbps(1, 2), 1.25);
        Ok(())
    }

    #[test]
    fn hardware_is_read_as_it_is_written() -> Result<()> {
        let of = |text: &str| Hardware::parse(text, Path::new("."));
        let many = of("4xA100-40GB*16")?;
        assert_eq!((many.device.name.as_str(), many.per_host, many.hosts), ("A100-40GB", 4, 16));
        assert_eq!(many.devices(), 64);
        assert_eq!(many.text(), "4xA100-40GB*16");
        assert_eq!(of("2x4090")?.per_host, 2);
        assert_eq!(of("mac-64GB")?.devices(), 1);
        assert_eq!(of("h100-80gb")?.device.name, "H100-80GB");
        for (text, why) in [
            ("8xH1000", "no device is called \"H1000\""),
            // B200 is another name of B200-180GB.
            ("8xB300", "no device is called \"B300\" (near: B200-180GB)"),
            ("0xH100-80GB", "is no number of devices"),
            ("-2xH100-80GB", "is no number of devices"),
            ("8xH100-80GB*0", "is no number of devices or hosts"),
            ("2xmac-64GB", "is a whole computer"),
        ] {
            let error = of(text).expect_err(text).to_string();
            assert!(error.contains(why) && error.contains("hint:"), "{text}: {error}");
        }
        Ok(())
    }
}
