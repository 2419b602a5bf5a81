//! Data files in all supported containers: each gives the same rows as JSON lines, or one error
//! with a remedy.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::test_dir::{TestDir, golden};

/// The two rows of most cases.
const ROWS: &str = "{\"prompt\": \"Hi\", \"completion\": \" Ahoy.\"}\n{\"prompt\": \"Bye\", \"completion\": \" So long.\"}\n";

fn test_dir() -> TestDir {
    let dir = TestDir::with_model("tiny-qwen3");
    dir.write("plain.jsonl", ROWS);
    dir
}

/// Returns exit code and output of `finetune data` for `dataset`.
fn data(dir: &TestDir, dataset: &str, more: &[&str]) -> (Option<i32>, String) {
    let args =
        [&["data", "--tokens", "--model", "model", "--dataset", dataset, "--rows", "99"][..], more].concat();
    let output = dir.command(&args).output().unwrap();
    (output.status.code(), dir.told(&output.stdout) + &dir.told(&output.stderr))
}

/// Returns the output for a readable `dataset`, and its rows: locations, tokens and texts.
fn read(dir: &TestDir, dataset: &str, more: &[&str]) -> (String, String) {
    let (code, said) = data(dir, dataset, more);
    assert_eq!(code, Some(0), "{dataset}: {said}");
    let is_token = |line: &&str| line.starts_with("   ") && line.ends_with('"');
    let tokens: Vec<&str> = said.lines().filter(is_token).collect();
    let tokens = tokens.join("\n");
    (said, tokens)
}

/// Returns the text of tokens.
fn text_of(tokens: &str) -> String {
    let pieces = tokens.lines().filter_map(|line| line.get(35..)?.split_once('"')?.1.strip_suffix('"'));
    pieces.collect::<String>().replace("\\\"", "\"")
}

/// Returns the locations of the rows of `said`, without the file name.
fn places(said: &str) -> Vec<String> {
    let rows = said.lines().filter(|line| line.starts_with("row ") && line.contains(" tokens, "));
    rows.map(|line| {
        let location = line.split_once(", ").unwrap().1.rsplit_once(": ").unwrap().0;
        location.rsplit_once(['/', '\\']).map_or(location, |(_, name)| name).to_owned()
    })
    .collect()
}

/// Checks that `dataset` has the two rows of [`ROWS`]; returns the output.
fn has_rows(dir: &TestDir, dataset: &str) -> String {
    let expected = read(dir, "plain.jsonl", &[]).1;
    assert!(expected.lines().count() > 6, "{expected}");
    let (said, tokens) = read(dir, dataset, &[]);
    assert_eq!(tokens, expected, "{dataset}: {said}");
    assert!(said.contains("2 rows in 1 file, prompt_completion"), "{said}");
    assert!(!said.contains("bad row"), "{said}");
    said
}

/// Returns the error of `dataset`, which must be refused.
fn refused(dir: &TestDir, dataset: &str) -> String {
    let (code, said) = data(dir, dataset, &[]);
    assert_eq!(code, Some(1), "{dataset}: {said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
    said
}

fn tables(dir: &TestDir) {
    copy_folder_of_tables(&golden("field/tables"), &dir.path("tables"));
}

fn copy_folder_of_tables(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder_of_tables(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

#[test]
fn json_in_every_container() {
    let dir = test_dir();
    let objects: Vec<&str> = ROWS.lines().collect();
    let (one, two) = (objects[0], objects[1]);
    let spread = ROWS.replace("{", "{\n  ").replace(", \"comp", ",\n  \"comp").replace('}', "\n}");
    for (name, text, lines) in [
        ("array.jsonl", format!("[\n  {one},\n  {two}\n]\n"), [2, 3]),
        ("array.ndjson", format!("[{one},{two}]"), [1, 1]),
        ("arrays.jsonl", format!("[{one}]\n[{two}]\n"), [1, 2]),
        ("arrays.json", format!("[{one}][\n{two}]"), [1, 2]),
        ("spread.jsonl", spread.clone(), [1, 5]),
        ("spread.json", spread, [1, 5]),
        ("joined.jsonl", format!("{one}{two}"), [1, 1]),
        ("lines.json", ROWS.to_owned(), [1, 2]),
        ("held.jsonl", format!("{{\"version\": 1, \"data\": [\n{one},\n{two}]}}"), [2, 3]),
        ("cr.jsonl", ROWS.replace('\n', "\r"), [1, 2]),
        ("crlf.jsonl", ROWS.replace('\n', "\r\n\r\n"), [1, 3]),
        ("mark.jsonl", format!("\u{FEFF}{ROWS}"), [1, 2]),
        ("a.csv", ROWS.to_owned(), [1, 2]),
        ("a.parquet", ROWS.to_owned(), [1, 2]),
    ] {
        dir.write(name, &text);
        let said = has_rows(&dir, name);
        assert_eq!(places(&said), lines.map(|line| format!("{name}:{line}")), "{said}");
    }
}

#[test]
fn a_broken_row_names_itself_and_hides_no_other() {
    let dir = test_dir();
    for bad in [
        "{\"prompt\": \"Hi\", \"completion\": \" Aho",
        "{\"prompt\": [\"Hi\", \"completion\": 1}",
        "[\"no\"",
        "prompt",
    ] {
        for (first, lines) in [(false, [1, 3]), (true, [2, 3])] {
            let rows: Vec<&str> = ROWS.lines().collect();
            let text = if first { [bad, rows[0], rows[1]] } else { [rows[0], bad, rows[1]] };
            dir.write("rows.jsonl", &text.join("\n"));
            let (said, _) = read(&dir, "rows.jsonl", &[]);
            assert_eq!(places(&said), lines.map(|line| format!("rows.jsonl:{line}")), "{said}");
            assert!(said.contains("1 bad row: unreadable"), "{said}");
            let line = if first { 1 } else { 2 };
            assert!(said.contains(&format!("rows.jsonl:{line}: not JSON: ")), "{said}");
        }
    }
    dir.write("rows.json", "[\n{\"prompt\": \"a\", \"completion\": \"b\"},\n{\"prompt\" 1},\n{\"prompt\": \"c\", \"completion\": \"d\"}]");
    let (said, _) = read(&dir, "rows.json", &[]);
    assert!(said.contains("rows.json:3: not JSON: expected `:` at column 11"), "{said}");
    dir.write("rows.json", "{\"data\": [\n{\"prompt\" 1}]}");
    assert!(refused(&dir, "rows.json").contains("not JSON: expected `:` at line 2, column 11"));
}

#[test]
fn text_in_other_encodings() {
    let dir = test_dir();
    let units = |little: bool, mark: &str| -> Vec<u8> {
        let units = mark.encode_utf16().chain(ROWS.encode_utf16());
        units.flat_map(|unit| if little { unit.to_le_bytes() } else { unit.to_be_bytes() }).collect()
    };
    for (little, name) in [(true, "UTF-16LE"), (false, "UTF-16BE")] {
        std::fs::write(dir.path("rows.jsonl"), units(little, "\u{FEFF}")).unwrap();
        assert!(has_rows(&dir, "rows.jsonl").contains(&format!("rows.jsonl is {name} text")));
        std::fs::write(dir.path("rows.jsonl"), units(little, "")).unwrap();
        let said = refused(&dir, "rows.jsonl");
        assert!(said.contains(&format!("it is probably {name} without a byte order mark")), "{said}");
        assert!(said.contains(&format!("iconv -f {name} -t UTF-8 rows.jsonl > utf8-rows.jsonl")), "{said}");
    }
    let latin: Vec<u8> =
        ROWS.replace("Hi", "H\u{ef}").replace("Bye", "Adi\u{f3}s").chars().map(|c| c as u8).collect();
    for name in ["rows.jsonl", "rows.csv", "rows.txt"] {
        std::fs::write(dir.path(name), &latin).unwrap();
        let said = refused(&dir, name);
        assert!(said.contains("byte 13, on line 1, is 0xEF, and 2 lines hold such bytes"), "{said}");
        assert!(said.contains("iconv -f ISO-8859-1"), "{said}");
    }
    // One line in another encoding among good ones is a bad row.
    let one: Vec<u8> =
        [ROWS.as_bytes(), &latin[..latin.iter().position(|byte| *byte == b'\n').unwrap()]].concat();
    std::fs::write(dir.path("rows.jsonl"), one).unwrap();
    let (said, _) = read(&dir, "rows.jsonl", &[]);
    assert!(said.contains("rows.jsonl:3: not UTF-8: its byte 14 is 0xEF, perhaps of Latin-1"), "{said}");
    // Excel's Unicode text.
    let table = "prompt\tcompletion\nHi\t Ahoy.\nBye\t So long.\n";
    let table: Vec<u8> =
        "\u{FEFF}".encode_utf16().chain(table.encode_utf16()).flat_map(u16::to_le_bytes).collect();
    std::fs::write(dir.path("rows.csv"), table).unwrap();
    has_rows(&dir, "rows.csv");
}

#[test]
fn values_that_no_format_needs_are_no_fault() {
    let dir = test_dir();
    for value in [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "123456789012345678901234567890",
        "\"\\ud83d\"",
        "[1, {\"a\": NaN}]",
        "\"NaN\"",
        "{\"\\ud83d\": 1}",
    ] {
        dir.write(
            "rows.jsonl",
            &ROWS.replacen("\"completion\"", &format!("\"n\": {value}, \"completion\""), 1),
        );
        has_rows(&dir, "rows.jsonl");
    }
    dir.write("rows.jsonl", &ROWS.replacen("\"completion\"", "\"completion\": \"no\", \"completion\"", 1));
    has_rows(&dir, "rows.jsonl");
    for (row, why) in [
        ("{\"prompt\": \"a\", \"completion\": NaN}", "`completion` is NaN"),
        ("{\"prompt\": \"a\", \"completion\": -Infinity}", "`completion` is -Infinity"),
        ("{\"prompt\": \"a\", \"completion\": \"b\\ud83d\"}", "`completion` holds half of a surrogate pair"),
    ] {
        dir.write("rows.jsonl", &format!("{ROWS}{row}\n"));
        let (said, _) = read(&dir, "rows.jsonl", &[]);
        assert!(said.contains(&format!("rows.jsonl:3: {why}")), "{said}");
    }
    let row = "{\"prompt\": \"a NaN\", \"completion\": \"\\ud83d\\ude00 -Infinity\", \"n\": NaN}\n";
    dir.write("rows.jsonl", row);
    let tokens = read(&dir, "rows.jsonl", &[]).1;
    dir.write("plain.jsonl", &row.replace("\"n\": NaN", "\"n\": null"));
    assert_eq!(tokens, read(&dir, "plain.jsonl", &[]).1);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

#[test]
fn packed_files_are_unpacked() {
    let dir = test_dir();
    let array = format!("[{}]", ROWS.trim().replace('\n', ","));
    let table = "prompt,completion\nHi, Ahoy.\nBye, So long.\n";
    for extension in ["gz", "zst"] {
        let pack = |bytes: &[u8]| match extension {
            "gz" => gzip(bytes),
            _ => zstd::encode_all(bytes, 3).unwrap(),
        };
        for (name, text) in [
            ("rows.jsonl", ROWS),
            ("rows.json", &array),
            ("rows.csv", table),
            ("rows.tsv", &table.replace(',', "\t")),
        ] {
            let name = format!("{name}.{extension}");
            std::fs::write(dir.path(&name), pack(text.as_bytes())).unwrap();
            has_rows(&dir, &name);
        }
        std::fs::write(dir.path("rows.jsonl"), pack(ROWS.as_bytes())).unwrap();
        let said = has_rows(&dir, "rows.jsonl");
        assert!(said.contains("rows.jsonl is packed with ") && said.contains("was unpacked"), "{said}");
        let name = format!("rows.txt.{extension}");
        std::fs::write(dir.path(&name), pack(b"A text to train on.")).unwrap();
        assert!(read(&dir, &name, &[]).0.contains("1 row in 1 file, text"));
        // Truncated, damaged, compressed twice, and a table inside a compressed file.
        let whole = pack(ROWS.repeat(50).as_bytes());
        let name = format!("rows.jsonl.{extension}");
        std::fs::write(dir.path(&name), &whole[..whole.len() - 5]).unwrap();
        assert!(refused(&dir, &name).contains("stream is damaged or cut off after"));
        std::fs::write(dir.path(&name), pack(&whole)).unwrap();
        assert!(refused(&dir, &name).contains("unpack it first"));
        let parquet = std::fs::read(golden("field/tables/tools.parquet")).unwrap();
        let name = format!("rows.parquet.{extension}");
        std::fs::write(dir.path(&name), pack(&parquet)).unwrap();
        assert!(refused(&dir, &name).contains("it is Parquet, packed with"));
        // Decompression bombs: one of spaces, one of empty rows.
        let name = format!("bomb.jsonl.{extension}");
        std::fs::write(dir.path(&name), pack(&vec![b' '; 80 << 20])).unwrap();
        assert!(refused(&dir, &name).contains("bytes become more than 67108864 bytes of text"));
        std::fs::write(dir.path(&name), pack("{}\n".repeat(200_000).as_bytes())).unwrap();
        assert!(refused(&dir, &name).contains("rows or more in"));
    }
    std::fs::create_dir(dir.path("folder")).unwrap();
    std::fs::write(dir.path("folder/train.jsonl.gz"), gzip(ROWS.as_bytes())).unwrap();
    std::fs::write(dir.path("folder/test.jsonl.gz"), gzip(b"{\"text\": \"a\"}")).unwrap();
    assert!(has_rows(&dir, "folder").contains("took the train split: 1 of 2 files"));
}

#[test]
fn files_that_are_not_read_name_the_way_out() {
    let dir = test_dir();
    for (name, bytes, hint) in [
        ("rows.xlsx", &b"PK\x03\x04"[..], "pandas.read_excel(\"rows.xlsx\").to_json("),
        ("rows.ods", b"PK\x03\x04", "pandas.read_excel(\"rows.ods\")"),
        ("rows.sqlite", b"SQLite format 3\0", "sqlite3 -csv -header rows.sqlite"),
        ("rows.npy", b"\x93NUMPY", "write its rows as JSON lines"),
        ("rows.jsonl.xz", b"\xFD7zXZ\0", "xz -dk rows.jsonl.xz"),
        ("rows.jsonl.bz2", b"BZh91AY", "bunzip2 -k rows.jsonl.bz2"),
        ("rows.zip", b"PK\x03\x04", "unzip rows.zip"),
        ("rows.tar.gz", b"\x1F\x8B", "tar -xf rows.tar.gz"),
        ("rows.rows", b"{}", "accepted: .jsonl"),
    ] {
        std::fs::write(dir.path(name), bytes).unwrap();
        let said = refused(&dir, name);
        assert!(said.contains(hint) && said.contains("accepted: .jsonl, .ndjson"), "{said}");
    }
    for (name, bytes, hint) in [
        ("rows.jsonl", &b"PK\x03\x04\x14\0\0\0"[..], "unzip rows.jsonl"),
        ("rows.csv", b"\xFD7zXZ\0\0", "xz -dk rows.csv"),
        ("rows.arrow", b"FEA1\0\0\0\0", "pandas.read_feather(\"rows.arrow\")"),
        ("other.arrow", b"0123456789", "it is no Arrow file or stream"),
        ("other.parquet", b"0123456789", "other.parquet"),
    ] {
        std::fs::write(dir.path(name), bytes).unwrap();
        let said = refused(&dir, name);
        assert!(said.contains(hint), "{said}");
    }
}

#[test]
fn tables_of_text_with_other_delimiters() {
    let dir = test_dir();
    for (name, text, delimiter) in [
        ("rows.csv", "prompt;completion\nHi; Ahoy.\nBye;\" So long.\"\n", "';'"),
        ("rows.csv", "prompt\tcompletion\nHi\t Ahoy.\nBye\t So long.\n", "'\\t'"),
        ("rows.csv", "prompt|completion\r\nHi| Ahoy.\r\nBye| So long.\r\n", "'|'"),
        ("rows.tsv", "prompt,completion\nHi, Ahoy.\nBye, So long.\n", "','"),
        ("rows.csv", "sep=;\nprompt;completion\nHi; Ahoy.\nBye; So long.\n", ""),
        ("rows.csv", "prompt,completion\rHi, Ahoy.\rBye, So long.\r", ""),
    ] {
        dir.write(name, text);
        let said = has_rows(&dir, name);
        let note = format!("has fields separated by {delimiter}, by its header");
        assert_eq!(said.contains(&note), !delimiter.is_empty(), "{said}");
        let first = if text.starts_with("sep") { 3 } else { 2 };
        assert_eq!(places(&said), [first, first + 1].map(|line| format!("{name}:{line}")), "{said}");
    }
}

/// Files of pyarrow (tests/golden/scripts/make_tables.py).
#[test]
fn arrow_files_streams_and_saved_data_sets() {
    let dir = test_dir();
    tables(&dir);
    for name in ["rows.arrow", "stream.arrow", "lz4.feather", "zstd.feather", "types.arrow", "saved"] {
        has_rows(&dir, &format!("tables/{name}"));
    }
    assert!(has_rows(&dir, "tables/saved_dict").contains("took the train split: 1 of 2 files"));
    std::fs::copy(dir.path("tables/rows.arrow"), dir.path("named.jsonl")).unwrap();
    assert!(has_rows(&dir, "named.jsonl").contains("named.jsonl is Arrow, by its first bytes"));
    // Files that datasets caches are ignored; a list that names missing files is an error.
    std::fs::copy(dir.path("tables/rows.arrow"), dir.path("tables/saved/cache-1.arrow")).unwrap();
    has_rows(&dir, "tables/saved");
    std::fs::rename(dir.path("tables/saved/data-00000-of-00001.arrow"), dir.path("elsewhere.arrow")).unwrap();
    let said = refused(&dir, "tables/saved");
    assert!(said.contains("state.json names data-00000-of-00001.arrow, which does not exist"), "{said}");
    dir.write("tables/saved/state.json", "{\"_data_files\": [{\"filename\": \"../../elsewhere.arrow\"}]}");
    assert!(refused(&dir, "tables/saved").contains("which is no name of a file in it"));
    let cut = std::fs::read(dir.path("tables/rows.arrow")).unwrap();
    std::fs::write(dir.path("cut.arrow"), &cut[..cut.len() - 20]).unwrap();
    refused(&dir, "cut.arrow");
}

#[test]
fn what_a_table_adds_to_its_rows_is_taken_away() {
    let dir = test_dir();
    tables(&dir);
    let more = ["--set", "data.max_seq_len=700"];
    let expected = read(&dir, "tables/tools.jsonl", &more).1;
    let shown = text_of(&expected);
    assert!(shown.contains("\"enum\": [\"x\", \"y\"]") && !shown.contains("null"), "{shown}");
    for name in ["tools.parquet", "tools.arrow", "json.parquet", "json.arrow"] {
        let (said, tokens) = read(&dir, &format!("tables/{name}"), &more);
        assert_eq!(tokens, expected, "{name}: {said}");
    }
    // Values that users wrote into JSON stay.
    let lines = std::fs::read_to_string(dir.path("tables/tools.jsonl")).unwrap();
    dir.write(
        "nulls.jsonl",
        &lines.replace("{\"type\": \"string\"}", "{\"type\": \"string\", \"default\": null}"),
    );
    assert!(text_of(&read(&dir, "nulls.jsonl", &more).1).contains("\"default\": null"));
    // Bytes, NaN and impossible dates, in columns that are not used.
    has_rows(&dir, "tables/needless.parquet");
    for name in ["needed.parquet", "needed.arrow"] {
        let said = data(&dir, &format!("tables/{name}"), &[]).1;
        assert!(
            said.contains(&format!("{name} row 1: `completion` holds bytes that are not UTF-8")),
            "{said}"
        );
    }
}
