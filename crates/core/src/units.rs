//! Sizes, counts and times in readable form.

use std::fmt::Display;

/// Bytes in binary units with three significant figures: `512 B`, `1.50 MiB`, `61.2 GiB`.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"])
}

/// A count in decimal units with three significant figures: `950`, `4.88M`, `6.74B`.
pub fn count(n: u64) -> String {
    scaled(n as f64, 1000.0, &["", "K", "M", "B", "T"])
}

/// A count with its noun: `1 row`, `4.88M rows`.
pub fn counted(n: usize, what: &str) -> String {
    format!("{} {what}{}", count(n as u64), if n == 1 { "" } else { "s" })
}

/// An exact count with its noun: `1 row`, `3000 rows`.
pub fn exact<N: Display + From<u8> + PartialEq>(n: N, what: &str) -> String {
    let end = if n == N::from(1) { "" } else { "s" };
    format!("{n} {what}{end}")
}

/// A duration in its two largest units: `0.8 s`, `41 s`, `3 min 20 s`, `2 h 05 min`.
pub fn duration(secs: f64) -> String {
    let whole = secs.round() as u64;
    match whole {
        _ if secs < 10.0 => format!("{secs:.1} s"),
        0..=59 => format!("{whole} s"),
        60..=3599 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= base && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{}", units[unit])
}

/// The value of the line `key   1234 kB` of `status` or `meminfo` (proc(5)), in bytes.
pub fn field_bytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_figures() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1_572_864), "1.50 MiB");
        assert_eq!(count(6_738_415_616), "6.74B");
        assert_eq!(count(950), "950");
        assert_eq!((counted(1, "row"), counted(3000, "row")), ("1 row".to_owned(), "3.00K rows".to_owned()));
        assert_eq!((exact(1, "row"), exact(3000_u64, "row")), ("1 row".to_owned(), "3000 rows".to_owned()));
        assert_eq!(duration(200.4), "3 min 20 s");
        assert_eq!(duration(7500.0), "2 h 05 min");
    }
}
