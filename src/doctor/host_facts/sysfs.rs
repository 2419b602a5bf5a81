//! Readers of the kernel's small files and links. Any of them may be missing, unreadable or
//! malformed; the result is none then.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Largest number of bytes to read of a file; more are ignored.
const MOST_BYTES: u64 = 1 << 18;

/// Returns the text of a file without blanks around it. Invalid UTF-8 is replaced.
pub(crate) fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Returns the whole number in a file. None for -1, by which the kernel marks unknown values.
pub(crate) fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// Returns the number in a file of hexadecimal digits after `0x`.
pub(crate) fn hex(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

/// Returns the sorted names in a folder; none if the folder is missing.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    // eth2 before eth10.
    let stem = |name: &str| name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    names.sort_by_cached_key(|name| (stem(name), name.len(), name.clone()));
    names
}

/// Returns the last name of a link's target, such as that of a driver.
pub(crate) fn link_name(link: &Path) -> Option<String> {
    std::fs::read_link(link).ok()?.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Returns all names in the path of a link's target, from the root.
pub(crate) fn way(link: &Path) -> Vec<String> {
    let target = std::fs::canonicalize(link).unwrap_or_default();
    target.iter().map(|name| name.to_string_lossy().into_owned()).collect()
}

/// Returns whether `name` is the address of a PCI function, such as `0000:3b:00.0`.
pub(crate) fn is_pci_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let of_digits = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    let has_marks = name.matches(':').count() == 2 && name.matches('.').count() == 1;
    parts.len() == 4 && has_marks && parts.iter().all(of_digits)
}
