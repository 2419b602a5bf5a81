//! Unpacks gzip and zstd files into memory, within the limits of [`ExpansionBounds`].

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::expansion::ExpansionBounds;
use crate::error::{Error, Result};

/// A compression format for one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    Gzip,
    Zstd,
}

impl Packing {
    /// The format of a file that begins with `head`.
    pub(super) fn of(head: &[u8]) -> Option<Self> {
        // A zstd file may begin with a skippable frame; pzstd writes one.
        let is_skippable = head.len() > 3 && head[0] & 0xF0 == 0x50 && head[1..4] == *b"\x2A\x4D\x18";
        match head {
            [0x1F, 0x8B, ..] => Some(Packing::Gzip),
            [0x28, 0xB5, 0x2F, 0xFD, ..] => Some(Packing::Zstd),
            _ if is_skippable => Some(Packing::Zstd),
            _ => None,
        }
    }

    /// Its name, for messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Packing::Gzip => "gzip",
            Packing::Zstd => "zstd",
        }
    }
}

/// Unpacks `file`, whose name is `path`.
///
/// # Errors
/// Fails with a user error if the stream is damaged, cut off or larger than `bounds` allow, or with
/// a storage error if the disk fails.
pub(super) fn unpack(path: &Path, file: File, packing: Packing, bounds: &ExpansionBounds) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let packed = BufReader::with_capacity(1 << 16, file);
    let outcome = match packing {
        Packing::Gzip => gunzip(packed, bounds, &mut out),
        Packing::Zstd => zstd::stream::read::Decoder::with_buffer(packed)
            .map_err(UnpackFault::from)
            .and_then(|stream| append(stream, bounds, &mut out)),
    };
    let cannot = || Error::user(format!("cannot read the data file {}", path.display()));
    match outcome {
        Ok(()) => Ok(out),
        Err(UnpackFault::TooLarge(why)) => Err(cannot().because(why)),
        Err(UnpackFault::Io(error)) if error.raw_os_error().is_some() => {
            Err(Error::io("read the data file", path, &error))
        }
        Err(UnpackFault::Io(error)) => Err(cannot()
            .because(format!(
                "its {} stream is damaged or cut off after {} unpacked bytes: {error}",
                packing.name(),
                out.len()
            ))
            .hint("pack it again, or fetch it again")),
    }
}

enum UnpackFault {
    Io(io::Error),
    TooLarge(String),
}

impl From<io::Error> for UnpackFault {
    fn from(error: io::Error) -> Self {
        UnpackFault::Io(error)
    }
}

/// Unpacks all members of a gzip file; zeros may pad it, which tapes and Python's `gzip` allow.
fn gunzip(mut packed: impl BufRead, bounds: &ExpansionBounds, out: &mut Vec<u8>) -> Result<(), UnpackFault> {
    loop {
        append(flate2::bufread::GzDecoder::new(&mut packed), bounds, out)?;
        let next = loop {
            let rest = packed.fill_buf()?;
            match rest.iter().position(|byte| *byte != 0) {
                Some(at) => break Some(at),
                None if rest.is_empty() => break None,
                None => {
                    let zeros = rest.len();
                    packed.consume(zeros);
                }
            }
        };
        match next {
            None => return Ok(()),
            Some(zeros) => packed.consume(zeros),
        }
    }
}

fn append(mut stream: impl Read, bounds: &ExpansionBounds, out: &mut Vec<u8>) -> Result<(), UnpackFault> {
    let mut piece = vec![0; 1 << 16];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(read) => {
                bounds.check_bytes((out.len() + read) as u64).map_err(UnpackFault::TooLarge)?;
                out.extend(&piece[..read]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn unpacked(packing: Packing, bytes: &[u8]) -> Result<Vec<u8>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows");
        std::fs::write(&path, bytes).unwrap();
        let bounds = ExpansionBounds::of(bytes.len() as u64);
        unpack(&path, File::open(&path).unwrap(), packing, &bounds).map_err(|error| error.to_string())
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    }

    #[test]
    fn streams_are_unpacked_to_their_end() {
        let text = b"some text of a row\n".repeat(5000);
        let two = [gzip(&text), gzip(b"more"), vec![0; 3000]].concat();
        assert_eq!(Packing::of(&two), Some(Packing::Gzip));
        assert_eq!(unpacked(Packing::Gzip, &two).unwrap(), [&text[..], b"more"].concat());
        let frame = zstd::encode_all(&text[..], 1).unwrap();
        assert_eq!(Packing::of(&frame), Some(Packing::Zstd));
        let skipped = [&b"\x50\x2A\x4D\x18\x02\0\0\0ab"[..], &frame, &frame].concat();
        assert_eq!(Packing::of(&skipped), Some(Packing::Zstd));
        assert_eq!(unpacked(Packing::Zstd, &skipped).unwrap(), [&text[..], &text].concat());
    }

    #[test]
    fn damaged_streams_are_one_error() {
        let text: Vec<u8> =
            (0..20_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        for (packing, whole) in
            [(Packing::Gzip, gzip(&text)), (Packing::Zstd, zstd::encode_all(&text[..], 1).unwrap())]
        {
            for cut in [20, whole.len() / 2, whole.len() - 1] {
                let why = unpacked(packing, &whole[..cut]).unwrap_err();
                assert!(why.contains("is damaged or cut off after"), "{cut}: {why}");
            }
        }
        let mut wrong = gzip(&text);
        let crc = wrong.len() - 8;
        wrong[crc] ^= 1;
        assert!(unpacked(Packing::Gzip, &wrong).is_err());
        assert!(unpacked(Packing::Gzip, &[gzip(b"a"), b"b".to_vec()].concat()).is_err());
    }

    #[test]
    fn bombs_are_refused() {
        let text = vec![b'a'; 65 << 20];
        for (packing, bytes) in
            [(Packing::Gzip, gzip(&text)), (Packing::Zstd, zstd::encode_all(&text[..], 1).unwrap())]
        {
            let why = unpacked(packing, &bytes).map(|text| text.len()).unwrap_err();
            assert!(why.contains("bytes become more than"), "{why}");
        }
    }
}
