//! Nothing saved is lost: kills at random instants and at every call that writes, disk errors at
//! each of them, damaged checkpoints, leftovers, and folders in use. Ranks that fail, hang or
//! diverge, devices that fail, limits of the system, and stalled terminals end in one clear error.
//!
//! Most tests use a run without a model (`child`), which saves like a training run and takes
//! milliseconds; some use the binary. A preloaded library (`faults.c`), built with the system's C
//! compiler, injects the faults; without a compiler these tests print that they are skipped. By
//! default there are 200 kills, and 20 of the binary; `FINETUNE_CRASH_KILLS=1000` makes them 1,000
//! and 100.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
#![allow(clippy::too_many_lines, reason = "a table of cases or a snapshot is one function")]

#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/at_work.rs"]
mod at_work;
#[path = "../support/exhaustive.rs"]
#[expect(dead_code, reason = "each test binary uses its part")]
mod exhaustive;
#[path = "../support/faulty_run.rs"]
mod faulty_run;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/pseudo_terminal.rs"]
mod pseudo_terminal;
#[path = "../support/skipped.rs"]
mod skipped;
#[allow(dead_code, reason = "each test binary uses its part")]
#[path = "../support/test_dir.rs"]
mod test_dir;

mod child;
mod clocks;
mod damage;
mod device_failure;
mod divergence;
mod end;
mod failure;
mod faults;
mod few_threads;
mod files;
mod folders;
mod full_disk;
mod hangs;
mod kills;
mod nan_policy;
mod outputs;
mod process_limits;
mod restarts;
mod stalled_terminal;
mod system_faults;
mod writes;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

/// Returns every file below a folder by its name, except the program's own state.
fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut contents = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return contents };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != ".finetune" {
            contents.extend(tree(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else if path.is_file() {
            contents.insert(name, std::fs::read(&path).unwrap());
        }
    }
    contents
}

/// Returns the names in a folder and in its `.finetune`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for inner in [folder.to_owned(), folder.join(".finetune")] {
        let Ok(entries) = std::fs::read_dir(inner) else { continue };
        names.extend(entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()));
    }
    names.sort();
    names
}

/// Fails if a temporary name is left.
fn assert_tidy(folder: &Path, what: &str) {
    let left = names(folder);
    let doubtful = |name: &&String| name.contains(".tmp-") || *name == "result" || *name == "committed";
    assert_eq!(left.iter().filter(doubtful).count(), 0, "{what}: {left:?}");
}

/// Exit code and output of a process.
#[derive(Debug)]
struct Done {
    /// None if it was killed.
    code: Option<i32>,
    said: String,
    errors: String,
}

fn finish(command: &mut Command) -> Done {
    told(command.output().unwrap())
}

fn told(done: Output) -> Done {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Done { code: done.status.code(), said: text(&done.stdout), errors: text(&done.stderr) }
}

/// Pseudo-random numbers, the same in every run.
struct Random(u64);

impl Random {
    /// Returns a number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        // Knuth's MMIX constants.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end.max(1)
    }
}
