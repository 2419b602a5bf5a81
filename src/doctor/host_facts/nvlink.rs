//! Active NVLinks of each GPU and their remote ends, from NVIDIA's management library (NVML). The
//! library comes with the driver and is loaded at run time.
//!
//! finetune binds the functions itself: it needs six of some four hundred, and a crate for them
//! would bring a second version of `libloading`. Names, layouts and values are those of `nvml.h`,
//! which keeps them stable.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use serde::Serialize;

/// The active links of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct NvLinks {
    /// Number of active links.
    pub(crate) active: usize,
    /// Generation as a value of `nvmlNvlinkVersion_t`: 1 is 1.0, 2 and 3 are 2.x, 4 and 5 are 3.x,
    /// 6 is 4.0, 7 is 5.0.
    pub(crate) version: Option<u32>,
    /// PCI addresses of the remote ends (GPUs or NVSwitches), with the number of links to each.
    pub(crate) remotes: BTreeMap<String, usize>,
}

impl NvLinks {
    /// Returns 10^9 bytes per second in one direction over all links (NVIDIA's data sheets: 20, 25
    /// or 50 GB/s each).
    pub(crate) fn gbytes_per_sec(&self) -> Option<f64> {
        let each = match self.version? {
            1 => 20.0,
            2..=6 => 25.0,
            7 => 50.0,
            _ => return None,
        };
        Some(each * self.active as f64)
    }

    /// Describes the links.
    pub(crate) fn text(&self) -> String {
        if self.active == 0 {
            return "no active NVLink".to_owned();
        }
        let rate = self.gbytes_per_sec().map(|rate| format!(" ({rate} GB/s)")).unwrap_or_default();
        let remotes: Vec<String> =
            self.remotes.iter().map(|(address, links)| format!("{links} to {address}")).collect();
        let leads = if remotes.is_empty() { String::new() } else { format!(": {}", remotes.join(", ")) };
        format!("{} NVLinks{rate}{leads}", self.active)
    }
}

type RawDevice = *mut c_void;

/// `nvmlPciInfo_t` of `nvml.h`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `NVML_SUCCESS`, and `NVML_FEATURE_ENABLED` of a link that is active.
const SUCCESS: c_int = 0;
const ENABLED: c_uint = 1;

/// `NVML_NVLINK_MAX_LINKS`, the most links that a GPU has.
const MOST_LINKS: c_uint = 18;

type HandleByAddress = unsafe extern "C" fn(*const c_char, *mut RawDevice) -> c_int;
type LinkState = unsafe extern "C" fn(RawDevice, c_uint, *mut c_uint) -> c_int;
type RemoteAddress = unsafe extern "C" fn(RawDevice, c_uint, *mut PciInfo) -> c_int;

/// Returns the links of the GPUs at `addresses`, by address; none if the library is missing or does
/// not start.
pub(crate) fn read(addresses: &[String]) -> Option<BTreeMap<String, NvLinks>> {
    if addresses.is_empty() {
        return None;
    }
    // SAFETY: NVIDIA's library only reads the environment as it is loaded.
    let library = unsafe { libloading::Library::new("libnvidia-ml.so.1") }.ok()?;
    // SAFETY: the signatures are those of nvml.h; the functions are called while `library` lives,
    // after `init` has succeeded, with a device from the library and memory of the sizes that it
    // writes.
    unsafe {
        let init: unsafe extern "C" fn() -> c_int = *library.get(b"nvmlInit_v2").ok()?;
        let shutdown: unsafe extern "C" fn() -> c_int = *library.get(b"nvmlShutdown").ok()?;
        let handle: HandleByAddress = *library.get(b"nvmlDeviceGetHandleByPciBusId_v2").ok()?;
        let state: LinkState = *library.get(b"nvmlDeviceGetNvLinkState").ok()?;
        let version: LinkState = *library.get(b"nvmlDeviceGetNvLinkVersion").ok()?;
        let remote: RemoteAddress = *library.get(b"nvmlDeviceGetNvLinkRemotePciInfo_v2").ok()?;
        if init() != SUCCESS {
            return None;
        }
        let links = |address: &String| {
            let name = CString::new(address.as_str()).ok()?;
            let mut device: RawDevice = std::ptr::null_mut();
            (handle(name.as_ptr(), &raw mut device) == SUCCESS)
                .then(|| (address.clone(), links_of(device, state, version, remote)))
        };
        let all_links = addresses.iter().filter_map(links).collect();
        shutdown();
        Some(all_links)
    }
}

/// Returns the active links of a device.
///
/// # Safety
/// The functions come from an initialized library, and `device` comes from it too.
unsafe fn links_of(
    device: RawDevice,
    state: LinkState,
    version: LinkState,
    remote: RemoteAddress,
) -> NvLinks {
    let mut links = NvLinks::default();
    for link in 0..MOST_LINKS {
        let (mut active, mut generation) = (0, 0);
        // SAFETY: the caller's; the numbers outlive the calls.
        unsafe {
            if state(device, link, &raw mut active) != SUCCESS || active != ENABLED {
                continue;
            }
            if version(device, link, &raw mut generation) == SUCCESS {
                links.version = Some(generation);
            }
        }
        links.active += 1;
        let mut info = std::mem::MaybeUninit::<PciInfo>::zeroed();
        // SAFETY: the caller's; zeroes are a valid value of the whole structure.
        let info = unsafe {
            if remote(device, link, info.as_mut_ptr()) != SUCCESS {
                continue;
            }
            info.assume_init()
        };
        let bytes: Vec<u8> = info.bus_id.iter().map(|c| *c as u8).take_while(|byte| *byte != 0).collect();
        *links.remotes.entry(short_address(&String::from_utf8_lossy(&bytes))).or_default() += 1;
    }
    links
}

/// Converts an address of NVML, with eight digits of domain and capital letters, to the kernel's
/// form, with four digits and small letters.
fn short_address(address: &str) -> String {
    let address = address.to_lowercase();
    address.strip_prefix("0000").filter(|rest| rest.find(':') == Some(4)).unwrap_or(&address).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates of all links in one direction by the data sheets (P100, V100, A100, H100, B200).
    #[test]
    fn rates_of_generations() {
        for (version, active, rate) in
            [(1, 4, 80.0), (2, 6, 150.0), (4, 12, 300.0), (6, 18, 450.0), (7, 18, 900.0)]
        {
            let links = NvLinks { active, version: Some(version), remotes: BTreeMap::new() };
            assert_eq!(links.gbytes_per_sec(), Some(rate), "{version}");
        }
        assert_eq!(NvLinks { active: 1, version: Some(99), remotes: BTreeMap::new() }.gbytes_per_sec(), None);
        assert_eq!(NvLinks::default().text(), "no active NVLink");
    }

    #[test]
    fn addresses_as_the_kernel_writes_them() {
        assert_eq!(short_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(short_address("0000:3b:00.0"), "0000:3b:00.0");
        assert_eq!(short_address("00010000:C1:00.0"), "00010000:c1:00.0");
    }
}
