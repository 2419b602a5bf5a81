//! Weights that another program truncates while they are mapped: an error names the file, whether a
//! page or a few bytes are missing.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;

use finetune::error::ErrorCategory;
use finetune::weights::{ModelFiles, StoredDtype, WriteEntry, write_file};

const ELEMENTS: usize = 1 << 16;

/// Creates a file of several pages in `folder`.
fn weights(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("model.safetensors");
    let entry = WriteEntry { name: "w".into(), dtype: StoredDtype::F32, shape: vec![ELEMENTS], stack: None };
    write_file(&path, &[entry], |_, sink| sink.write_values(&[1.0; ELEMENTS])).unwrap();
    path
}

fn cut(path: &Path, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - bytes).unwrap();
}

#[test]
#[cfg(unix)]
fn a_file_that_loses_pages_while_it_is_read() {
    const FOLDER: &str = "FINETUNE_TEST_CUTS_WEIGHTS";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let path = weights(Path::new(&folder));
        // A second, complete file is mapped, too.
        let other = tempfile::tempdir().unwrap();
        let whole = ModelFiles::open_file(&weights(other.path())).unwrap();
        let files = ModelFiles::open_file(&path).unwrap();
        let bytes = files.bytes("w").unwrap();
        cut(&path, 100_000);
        whole.read_f32("w", &mut vec![0f32; ELEMENTS]).unwrap();
        let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
        panic!("bytes that are not there were read: {sum}");
    }
    let folder = tempfile::tempdir().unwrap();
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mapped_files::a_file_that_loses_pages_while_it_is_read", "--nocapture"])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(74), "{:?}: {said}", done.status);
    let path = folder.path().join("model.safetensors");
    let error = format!(
        "error: cannot read weights {}\n  caused by: the file is shorter than it was when it was opened",
        path.display()
    );
    assert!(said.contains(&error), "{said}");
}

/// The rest of a page reads as zeros without a fault; a read after the truncation does not begin.
#[test]
fn a_file_that_loses_bytes_while_it_is_open() {
    for lost in [4, 100_000] {
        let folder = tempfile::tempdir().unwrap();
        let path = weights(folder.path());
        let files = ModelFiles::open_file(&path).unwrap();
        let mut values = vec![0f32; ELEMENTS];
        files.read_f32("w", &mut values).unwrap();
        files.check_lengths().unwrap();
        cut(&path, lost);
        for error in [files.read_f32("w", &mut values).unwrap_err(), files.check_lengths().unwrap_err()] {
            assert_eq!(error.kind(), ErrorCategory::Storage);
            assert!(error.what().starts_with("cannot read weights "), "{error}");
            assert!(error.causes()[0].contains("bytes when it was opened and has"), "{error}");
        }
    }
}
