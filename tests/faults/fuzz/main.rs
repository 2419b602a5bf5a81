//! Every parser of untrusted files on thousands of broken files: no panic, no abort, no hang,
//! bounded memory.
//!
//! The files are real ones with changes (see [`mutate`]), drawn from a fixed seed, so every finding
//! is reproducible. `cargo test --test fuzz` tries some hundred of each, and five times as many
//! with `FINETUNE_EXHAUSTIVE=1`. `FINETUNE_FUZZ_SECS=600 cargo test --test fuzz -- --nocapture`
//! continues for that many seconds with each parser and prints the number of files, the slowest
//! one, and the most memory that one took. An input that ends the process (no stack, no memory)
//! stays in the folder that is printed first.
//!
//! [`bombs`] and [`long_text`] try inputs that no change of a real file produces: templates that
//! would exhaust memory or time, and texts large enough for memory to matter.
//!
//! It is a separate binary, because it counts all allocated memory.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test may panic, and tells what it did")]
#![allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]

mod bombs;
mod counting;
#[path = "../../support/exhaustive.rs"]
#[expect(dead_code, reason = "a sample of files is not a third of cases")]
mod exhaustive;
#[path = "../../support/gguf_contents.rs"]
mod gguf_contents;
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
use exhaustive::is_exhaustive;
use finetune::runtime::machine::work_done;
use mutate::Mutator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs one parser at a time, for memory is counted for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until no other measurement runs.
fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of memory that any input may take: several times the largest tables of the parsers.
const FREE_BYTES: usize = 256 << 20;
/// Bytes of memory for each byte of the input.
const BYTES_FOR_EACH: usize = 1000;
/// CPU time limit of this process, far more than any input needs.
const LONGEST: Duration = Duration::from_secs(20);
/// Largest size of an input in bytes.
const LARGEST_INPUT: usize = 1 << 20;

/// A parser under test.
struct Target<'a> {
    name: &'a str,
    seeds: Vec<Vec<u8>>,
    /// Number of files to try if no seconds are given and every case is tried; else a fifth.
    tries: u64,
    /// Parses one file; its result does not matter.
    parse: &'a dyn Fn(&[u8]),
}

/// Statistics of one target.
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
        let tries = if is_exhaustive() { self.tries } else { self.tries / 5 };
        let mut mutator = Mutator::new(self.name, &self.seeds, LARGEST_INPUT);
        let (begun, mut seen) = (Instant::now(), Seen::default());
        // The unchanged seeds come first.
        for seed in &self.seeds {
            self.check(seed, &mut seen, &input);
        }
        while match seconds {
            Some(seconds) => begun.elapsed() < Duration::from_secs(seconds),
            None => seen.executions < tries,
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
        let saved = keep(bytes, input);
        panic!("{} {fault} on try {}, kept as {}", self.name, seen.executions, saved.display());
    }
}

/// Saves an input that caused a finding.
fn keep(bytes: &[u8], input: &Path) -> PathBuf {
    let digest = blake3::hash(bytes).to_hex();
    let saved = input.with_extension(&digest[..12]);
    std::fs::write(&saved, bytes).unwrap();
    saved
}
