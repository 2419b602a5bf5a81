//! Every parser of files of unknown origin on thousands of broken files: no panic, no abort, no hang, bounded memory.
//!
//! The files are real ones with changes (see [`mutate`]); the changes are drawn from a fixed seed, so that a finding
//! comes again. `cargo test --test fuzz` tries some hundred of each. `FINETUNE_FUZZ_SECS=600 cargo test --test fuzz
//! -- --nocapture` goes on for that many seconds with each parser and tells how many files it tried, the slowest, and the
//! most memory that one took. What ends the process (no stack, no memory) leaves its file in the folder that is told
//! first.
//!
//! [`bombs`] and [`long_text`] try what no change of a real file comes upon: templates that would take all memory or all
//! time, and texts of a size at which memory matters.
//!
//! It is a binary of its own, because it counts all memory that is asked for.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test may panic, and tells what it did")]

mod bombs;
mod counting;
mod long_text;
mod mutate;
mod network;
mod patterns;
mod seeds;
mod sizing;
mod targets;
mod tokenizer_children;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use counting::CountingAllocator;
use finetune::runtime::machine::work_done;
use mutate::Mutator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// One parser at a time: memory is counted for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until nothing else is measured.
fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that any input may take, in bytes: several times what the largest tables of the parsers do.
const FREE_BYTES: usize = 256 << 20;
/// Memory for each byte of the input.
const BYTES_FOR_EACH: usize = 1000;
/// Processor time of this process, far more than any input needs.
const LONGEST: Duration = Duration::from_secs(20);
/// Bytes of the largest input.
const LARGEST_INPUT: usize = 1 << 20;

/// What is tried.
struct Target<'a> {
    name: &'a str,
    seeds: Vec<Vec<u8>>,
    /// Files that are tried where no number of seconds is given.
    tries: u64,
    /// Parses one file; what it returns does not matter.
    parse: &'a dyn Fn(&[u8]),
}

/// What was seen.
#[derive(Default)]
struct Seen {
    executions: u64,
    slowest: Duration,
    largest: usize,
}

impl Target<'_> {
    fn run(&self) {
        let alone = alone();
        let seconds = std::env::var("FINETUNE_FUZZ_SECS").ok().map(|text| text.parse::<u64>().unwrap());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
        std::fs::create_dir_all(&folder).unwrap();
        let input = folder.join(format!("{}.input", self.name));
        if seconds.is_some() {
            eprintln!("{}: the file under test is {}", self.name, input.display());
        }
        let mut mutator = Mutator::new(self.name, &self.seeds, LARGEST_INPUT);
        let (begun, mut seen) = (Instant::now(), Seen::default());
        // The seeds themselves first.
        for seed in &self.seeds {
            self.check(seed, &mut seen, &input);
        }
        while match seconds {
            Some(seconds) => begun.elapsed() < Duration::from_secs(seconds),
            None => seen.executions < self.tries,
        } {
            let bytes = mutator.next_input();
            if seconds.is_some() {
                std::fs::write(&input, &bytes).unwrap();
            }
            self.check(&bytes, &mut seen, &input);
        }
        eprintln!(
            "{}: {} executions in {:.0} s, the slowest {:.2} s, at most {:.1} MiB",
            self.name,
            seen.executions,
            begun.elapsed().as_secs_f64(),
            seen.slowest.as_secs_f64(),
            seen.largest as f64 / (1 << 20) as f64
        );
        drop(alone);
    }

    fn check(&self, bytes: &[u8], seen: &mut Seen, input: &Path) {
        let before = counting::begin();
        let begun = work_done().unwrap().cpu;
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.parse)(bytes)));
        let took = work_done().unwrap().cpu.saturating_sub(begun);
        let held = counting::peak().saturating_sub(before);
        seen.executions += 1;
        seen.slowest = seen.slowest.max(took);
        seen.largest = seen.largest.max(held);
        let fault = if outcome.is_err() {
            "panics".to_owned()
        } else if took > LONGEST {
            format!("takes {took:?} of a processor")
        } else if held > FREE_BYTES + BYTES_FOR_EACH * bytes.len() {
            format!("takes {held} bytes of memory")
        } else {
            return;
        };
        let kept = keep(bytes, input);
        panic!("{} {fault} on try {}, kept as {}", self.name, seen.executions, kept.display());
    }
}

/// Keeps an input that is a finding.
fn keep(bytes: &[u8], input: &Path) -> PathBuf {
    let digest = blake3::hash(bytes).to_hex();
    let kept = input.with_extension(&digest[..12]);
    std::fs::write(&kept, bytes).unwrap();
    kept
}
