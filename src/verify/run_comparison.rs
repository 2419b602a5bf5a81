//! Comparison of two runs by every byte of their folders, except files and values that hold times.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::profile;
use crate::report::{MetricsEntry, metrics};
use crate::training::output_folder::{CARD, METRICS, REPORT};

/// Folders and files of a run that hold times.
const TIMED: [&str; 5] = [CARD, REPORT, "tensorboard", profile::FOLDER, ".finetune"];

/// Result of comparing the folders of two runs.
pub(crate) struct RunComparison {
    /// Number of files in one folder or both.
    pub(crate) files: usize,
    /// Bytes of the common files in one folder.
    pub(crate) bytes: u64,
    /// Differences as sentences, by file.
    pub(crate) differences: Vec<String>,
}

impl RunComparison {
    /// Compares the folder of an uninterrupted run with that of a killed and resumed one.
    pub(crate) fn new(straight: &Path, broken: &Path) -> Result<Self> {
        let (ours, theirs) = (listing(straight)?, listing(broken)?);
        let mut comparison = RunComparison { files: 0, bytes: 0, differences: Vec::new() };
        let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
        for name in names {
            comparison.files += 1;
            let difference = match (ours.get(name), theirs.get(name)) {
                (Some(one), Some(other)) => {
                    comparison.bytes += one.metadata().map_or(0, |data| data.len());
                    if name == METRICS { steps_differ(one, other)? } else { bytes_differ(one, other)? }
                }
                (Some(_), None) => Some("the killed and resumed run has no such file".to_owned()),
                _ => Some("the straight run has no such file".to_owned()),
            };
            comparison.differences.extend(difference.map(|difference| format!("{name}: {difference}")));
        }
        Ok(comparison)
    }
}

/// Returns every file below a run's folder by its relative name, without files that hold times.
fn listing(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let (mut files, mut open) = (BTreeMap::new(), vec![folder.to_owned()]);
    while let Some(inner) = open.pop() {
        for entry in std::fs::read_dir(&inner).map_err(|e| Error::io("read", &inner, &e))? {
            let path = entry.map_err(|e| Error::io("read", &inner, &e))?.path();
            let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy().into_owned();
            if TIMED.contains(&name.as_str()) {
                continue;
            }
            if path.is_dir() { open.push(path) } else { drop(files.insert(name, path)) }
        }
    }
    Ok(files)
}

fn bytes_differ(one: &Path, other: &Path) -> Result<Option<String>> {
    let sizes = [one, other].map(|path| path.metadata().map_or(0, |data| data.len()));
    if sizes[0] != sizes[1] {
        return Ok(Some(format!("{} bytes straight, {} bytes resumed", sizes[0], sizes[1])));
    }
    let open = |path: &Path| File::open(path).map(BufReader::new).map_err(|e| Error::io("read", path, &e));
    let (ours, theirs) = (open(one)?.bytes(), open(other)?.bytes());
    for (at, (ours, theirs)) in ours.zip(theirs).enumerate() {
        let of = |byte: std::io::Result<u8>, path| byte.map_err(|e| Error::io("read", path, &e));
        if of(ours, one)? != of(theirs, other)? {
            return Ok(Some(format!("byte {at} of {} is the first that differs", sizes[0])));
        }
    }
    Ok(None)
}

/// Describes the first entry of two logs that differs in more than its times.
fn steps_differ(one: &Path, other: &Path) -> Result<Option<String>> {
    let read = |path| Ok::<_, Error>(metrics::read(path)?.into_iter().map(timeless).collect::<Vec<_>>());
    let (ours, theirs) = (read(one)?, read(other)?);
    if ours.len() != theirs.len() {
        return Ok(Some(format!("{} lines straight, {} lines resumed", ours.len(), theirs.len())));
    }
    let first = ours.iter().zip(&theirs).find(|(ours, theirs)| ours != theirs);
    Ok(first.map(|(entry, _)| format!("the line of step {} is the first that differs", entry.step())))
}

fn timeless(entry: MetricsEntry) -> MetricsEntry {
    match entry {
        MetricsEntry::Step(report) => MetricsEntry::Step(report.without_times()),
        eval => eval,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A differing byte, file and step are named; times are not.
    #[test]
    fn differences_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        let step = |loss: f64, secs: f64| {
            format!(
                "{{\"step\":1,\"epoch\":1.0,\"loss\":{loss},\"learning_rate\":0.1,\"grad_norm\":1.0,\"tokens\":3,\"step_secs\":{secs},\"tokens_per_sec\":{secs},\"peak_bytes\":9}}\n"
            )
        };
        for (run, secs) in [(&one, 1.5), (&other, 2.5)] {
            std::fs::create_dir_all(run.join("checkpoint-1")).expect("made");
            std::fs::write(run.join("checkpoint-1/optimizer.safetensors"), [7; 9]).expect("written");
            std::fs::write(run.join(METRICS), step(0.5, secs)).expect("written");
            std::fs::write(run.join(CARD), secs.to_string()).expect("written");
        }
        let compared = || RunComparison::new(&one, &other).expect("read");
        let equal = compared();
        assert_eq!((equal.files, equal.differences), (2, Vec::<String>::new()));
        let mut bytes = [7; 9];
        bytes[4] = 8;
        std::fs::write(other.join("checkpoint-1/optimizer.safetensors"), bytes).expect("written");
        std::fs::write(other.join(METRICS), step(0.25, 1.0)).expect("written");
        std::fs::write(one.join("config.json"), "{}").expect("written");
        assert_eq!(
            compared().differences,
            [
                "checkpoint-1/optimizer.safetensors: byte 4 of 9 is the first that differs",
                "config.json: the killed and resumed run has no such file",
                "metrics.jsonl: the line of step 1 is the first that differs",
            ]
        );
    }
}
