//! Arguments of `finetune bench collectives` and `finetune doctor net`.

use clap::Args;

use super::shared::rank_count;
use super::{Gpus, ProcessArgs};

/// Ranks to measure and sizes of the data that they send.
#[derive(Debug, Clone, Args)]
pub struct CommunicationArgs {
    /// Ranks on the CPU, as threads of each process [default: 2; 1 under a launcher]
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = rank_count())]
    pub ranks: Option<u16>,
    /// GPUs with a rank each, such as 0 or 0,2 or 0-3 [default: all if several]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Data sizes in bytes, such as 4096 or 1K,64K,16M [default: 1K,4K,16K,...,64M]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = size)]
    pub sizes: Vec<u64>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
    /// Position of this process among several without a launcher.
    #[command(flatten)]
    pub processes: ProcessArgs,
}

/// Largest size in bytes; a rank may hold four times as much.
const MOST_BYTES: u64 = 4 << 30;

/// Reads `4096`, `64K`, `64KiB`, `16M` or `1G`, in powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1 << 30),
        _ => None,
    };
    let bytes = digits.parse().ok().zip(unit).and_then(|(number, unit): (u64, u64)| number.checked_mul(unit));
    let bytes = bytes.filter(|bytes| (4..=MOST_BYTES).contains(bytes));
    bytes.ok_or_else(|| "accepted: 4 to 4G bytes, such as 4096, 64K or 16M".to_owned())
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_in_words() {
        for (text, bytes) in
            [("4", 4), ("4096B", 4096), ("1K", 1024), ("64KiB", 65_536), ("16m", 16 << 20), ("4G", 4 << 30)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "K", "3", "5G", "1T", "-1K", "1.5M", "99999999999999999999", "9999999999G"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
