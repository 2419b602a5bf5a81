//! Information of the system about processes: the host, its boot, whether a process is alive.

pub(super) use crate::weights::is_alive;

/// The name of this host.
pub(super) fn host() -> String {
    let name = line("/proc/sys/kernel/hostname").or_else(|| std::env::var("HOSTNAME").ok());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "an unnamed host".to_owned())
}

/// Returns the id of this boot of the kernel, which containers of one machine share, or `None` if
/// the system reports none.
pub(super) fn boot() -> Option<String> {
    line("/proc/sys/kernel/random/boot_id")
}

fn line(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
