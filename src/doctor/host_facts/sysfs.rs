//! Small files and links of the kernel, of which any may be missing, unreadable or strange: then there is no answer.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// No file that is read here is longer; what is, is cut.
const MOST_BYTES: u64 = 1 << 18;

/// What the file says, without blanks around it; bytes that are no text are replaced.
pub(crate) fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// The whole number that the file says; -1, by which the kernel says that it does not know, is none.
pub(crate) fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// As [`number`], of a file that says it in hexadecimal digits after `0x`.
pub(crate) fn hex(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

/// The names in a folder, in order; none where there is no such folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    // eth2 before eth10.
    let stem = |name: &str| name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    names.sort_by_cached_key(|name| (stem(name), name.len(), name.clone()));
    names
}

/// The last name of what a link leads to, such as that of a driver.
pub(crate) fn link_name(link: &Path) -> Option<String> {
    std::fs::read_link(link).ok()?.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// The names on the way to what a link leads to, from the root.
pub(crate) fn way(link: &Path) -> Vec<String> {
    let place = std::fs::canonicalize(link).unwrap_or_default();
    place.iter().map(|name| name.to_string_lossy().into_owned()).collect()
}

/// Whether `name` is the address of a PCI function, as `0000:3b:00.0`.
pub(crate) fn is_pci_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let of_digits = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    let has_marks = name.matches(':').count() == 2 && name.matches('.').count() == 1;
    parts.len() == 4 && has_marks && parts.iter().all(of_digits)
}
