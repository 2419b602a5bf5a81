//! File kinds that are not supported: their names, their first bytes, and how to convert them.

use std::path::Path;

use crate::error::Error;

/// Supported containers, for messages.
pub(super) const ACCEPTED: &str = "accepted: .jsonl, .ndjson, .json, .parquet, .arrow, .feather, .csv, .tsv, .txt, .md, \
     text files also as .gz or .zst, or a folder of these";

/// A kind of file, with the extensions and first bytes that identify it.
pub(super) struct OtherFile {
    /// The kind of file, after "it is".
    what: &'static str,
    extensions: &'static [&'static str],
    /// The bytes that identify it, each with its offset.
    magic: &'static [(usize, &'static [u8])],
    /// The hint, with FILE for the name of the file.
    hint: &'static str,
}

const PANDAS: &str = "convert it in Python: pandas.read_excel(\"FILE\").to_json(\"FILE.jsonl\", orient=\"records\", lines=True)";

/// Known kinds; the first match applies.
const OTHERS: &[OtherFile] = &[
    OtherFile {
        what: "an archive of files",
        extensions: &["tar", "tgz", "tbz2", "txz"],
        magic: &[(257, b"ustar")],
        hint: "unpack it first: tar -xf FILE",
    },
    OtherFile {
        what: "an Excel or OpenDocument table",
        extensions: &["xlsx", "xls", "xlsm", "xlsb", "ods"],
        magic: &[(0, b"\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1")],
        hint: PANDAS,
    },
    OtherFile {
        what: "compressed with xz",
        extensions: &["xz", "lzma"],
        magic: &[(0, b"\xFD7zXZ\0")],
        hint: "unpack it first: xz -dk FILE",
    },
    OtherFile {
        what: "compressed with bzip2",
        extensions: &["bz2"],
        magic: &[(0, b"BZh")],
        hint: "unpack it first: bunzip2 -k FILE",
    },
    OtherFile {
        what: "compressed with lz4",
        extensions: &["lz4"],
        magic: &[(0, b"\x04\x22\x4D\x18")],
        hint: "unpack it first: lz4 -d FILE",
    },
    OtherFile {
        what: "compressed with brotli",
        extensions: &["br"],
        magic: &[],
        hint: "unpack it first: brotli -d FILE",
    },
    OtherFile {
        what: "a zip archive",
        extensions: &["zip"],
        magic: &[(0, b"PK\x03\x04"), (0, b"PK\x05\x06")],
        hint: "unpack it first: unzip FILE",
    },
    OtherFile {
        what: "a 7z or RAR archive",
        extensions: &["7z", "rar"],
        magic: &[(0, b"7z\xBC\xAF\x27\x1C"), (0, b"Rar!\x1A\x07")],
        hint: "unpack it first: 7z x FILE",
    },
    OtherFile {
        what: "an SQLite database",
        extensions: &["sqlite", "sqlite3", "db"],
        magic: &[(0, b"SQLite format 3\0")],
        hint: "write its rows as a table: sqlite3 -csv -header FILE \"select * from TABLE\" > rows.csv",
    },
    OtherFile {
        what: "a DuckDB database",
        extensions: &["duckdb"],
        magic: &[(8, b"DUCK")],
        hint: "write its rows as Parquet: duckdb FILE \"copy TABLE to 'rows.parquet'\"",
    },
    OtherFile {
        what: "a Feather file of the first version",
        extensions: &[],
        magic: &[(0, b"FEA1")],
        hint: "convert it in Python: pandas.read_feather(\"FILE\").to_parquet(\"FILE.parquet\")",
    },
    OtherFile {
        what: "an ORC file",
        extensions: &["orc"],
        magic: &[(0, b"ORC")],
        hint: "convert it in Python: pandas.read_orc(\"FILE\").to_parquet(\"FILE.parquet\")",
    },
    OtherFile {
        what: "an Avro file",
        extensions: &["avro"],
        magic: &[(0, b"Obj\x01")],
        hint: "convert it: duckdb -c \"install avro; load avro; copy (from 'FILE') to 'rows.parquet'\"",
    },
    OtherFile {
        what: "an HDF5 file",
        extensions: &["h5", "hdf5"],
        magic: &[(0, b"\x89HDF\r\n\x1A\n")],
        hint: "convert it in Python: pandas.read_hdf(\"FILE\").to_parquet(\"FILE.parquet\")",
    },
    OtherFile {
        what: "a PDF document",
        extensions: &["pdf"],
        magic: &[(0, b"%PDF-")],
        hint: "write its text as .txt: pdftotext FILE",
    },
    OtherFile {
        what: "a document with markup",
        extensions: &["docx", "doc", "odt", "rtf", "html", "htm", "epub"],
        magic: &[],
        hint: "write its text as .md: pandoc FILE -o FILE.md",
    },
    OtherFile {
        what: "YAML or XML",
        extensions: &["yaml", "yml", "xml", "toml"],
        magic: &[],
        hint: "write its rows as JSON lines, with one object a row",
    },
    OtherFile {
        what: "a file that may hold a pickle, which can run code when opened",
        extensions: &["pkl", "pickle", "pt", "pth", "joblib", "npy", "npz", "bin", "ckpt"],
        magic: &[(0, b"\x93NUMPY"), (0, b"\x80\x02"), (0, b"\x80\x03"), (0, b"\x80\x04"), (0, b"\x80\x05")],
        hint: "write its rows as JSON lines with the program that made it",
    },
    OtherFile {
        what: "a picture, a sound or a film",
        extensions: &["png", "jpg", "jpeg", "gif", "webp", "wav", "mp3", "flac", "mp4"],
        magic: &[(0, b"\x89PNG\r\n\x1A\n"), (0, b"\xFF\xD8\xFF"), (0, b"GIF8")],
        hint: "rows are text; write it as .jsonl, .csv or .txt",
    },
];

impl OtherFile {
    /// The kind of a file that begins with `head`.
    pub(super) fn of(head: &[u8]) -> Option<&'static Self> {
        if !is_binary(head) {
            return None;
        }
        let has = |(at, bytes): &(usize, &[u8])| head.get(*at..).is_some_and(|rest| rest.starts_with(bytes));
        OTHERS.iter().find(|other| other.magic.iter().any(has))
    }

    /// The name of this kind of file.
    pub(super) fn name(&self) -> &'static str {
        self.what
    }

    /// The error of a file of this kind.
    pub(super) fn refused(&self, path: &Path) -> Error {
        let name = path.file_name().unwrap_or_default().display().to_string();
        cannot(path).because(format!("it is {}", self.what)).hint(self.hint.replace("FILE", &name))
    }
}

/// Returns whether a file that begins with `head` is no text: a text may begin with the letters of
/// any magic number.
pub(super) fn is_binary(head: &[u8]) -> bool {
    let is_cut = |error: std::str::Utf8Error| error.error_len().is_none();
    head.iter().any(|byte| *byte < 9) || !std::str::from_utf8(head).map_or_else(is_cut, |_| true)
}

/// The error of a file whose name implies no supported container.
pub(super) fn refused_name(path: &Path) -> Error {
    let extension =
        path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase();
    let inner = path.with_extension("");
    let inner = inner.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_packed = ["gz", "zst"].contains(&extension.as_str());
    let known = |name: &str| OTHERS.iter().find(|other| other.extensions.contains(&name));
    if let Some(other) = known(&extension).or_else(|| known(inner).filter(|_| is_packed)) {
        return other.refused(path).because(ACCEPTED);
    }
    let error = cannot(path).because(ACCEPTED);
    if is_packed {
        return error.hint("name it by what is packed in it, such as rows.jsonl.gz");
    }
    error
}

fn cannot(path: &Path) -> Error {
    Error::user(format!("cannot read the data file {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_first_bytes_tell_the_way_out() {
        for (name, hint) in [
            ("a.xlsx", "pandas.read_excel(\"a.xlsx\")"),
            ("a.sqlite", "sqlite3 -csv -header a.sqlite"),
            ("a.jsonl.xz", "xz -dk a.jsonl.xz"),
            ("a.tar.gz", "tar -xf a.tar.gz"),
            ("a.npy", "with the program that made it"),
            ("a.gz", "name it by what is packed in it"),
            ("a.rows", ""),
        ] {
            let error = refused_name(Path::new(name)).to_string();
            assert!(error.contains(hint) && error.contains(ACCEPTED), "{error}");
        }
        assert_eq!(OtherFile::of(b"PK\x03\x04...").unwrap().name(), "a zip archive");
        assert!(OtherFile::of("ORCs, and a half of an \u{e9}".as_bytes().split_last().unwrap().1).is_none());
        assert!(OtherFile::of(b"{\"a\": 1}").is_none() && OtherFile::of(b"").is_none());
    }
}
