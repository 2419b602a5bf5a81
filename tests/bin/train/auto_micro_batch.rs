//! `train.micro_batch_size = "auto"`: the micro-batch chosen for the rows of a step, and the limit
//! that stops it from growing. Uses `plan --json` on GPUs that this machine need not have. The
//! expected values are computed by hand from the rules of docs/recipes.md and docs/sizing.md:
//!
//! - "auto" chooses the largest divisor of the rows that fits, recomputes no more than single rows
//!   would, and has at most 2,048 tokens on a CPU or 16,384 on a GPU;
//! - a 4090 has 24 GB, of which the driver holds 0.6 GB. A plan may use nine tenths of the rest,
//!   21.06 GB; of an H100 71.46 GB;
//! - for each token a block of 8B keeps its input, q, k and v, attention's output, and the MLP's
//!   input, gate and up: 4,096 + 6,144 + 4,096 + 4,096 + 28,672 values of 2 bytes, 94 kB. 32 blocks
//!   keep 3.02 MB. With recomputing they keep only their inputs, 8 kB each, 0.26 MB, and one block
//!   the rest, 0.09 MB;
//! - adapters of rank 16 on all seven matrices of 8B are 42M parameters of 2 + 4 bytes, with
//!   gradients of 4 and moments of 8 bytes: 0.76 GB.

use serde_json::Value;

use crate::plan::sizing::{plan, shapes};
use crate::test_dir::TestDir;

/// The limit that the next larger micro-batch would exceed.
#[derive(Debug, Clone, Copy)]
enum Stop {
    /// The next size does not fit.
    Memory,
    /// The next size recomputes, or recomputes more.
    Recomputing,
    /// The next size has more tokens than the limit.
    Tokens,
    /// The next size exceeds the token limit only.
    TokensAlone,
    /// No next size: one micro-batch has all rows.
    Rows,
}

/// A run, and the micro-batch expected for it.
struct Case<'a> {
    /// Model, machine, recipe.
    run: [&'a str; 3],
    sets: &'a [&'a str],
    /// Rows of a step and rank, rows of the expected micro-batch, tokens of a row.
    rows: [u64; 3],
    recompute: &'a str,
    stop: Stop,
}

impl Case<'_> {
    fn planned(&self, dir: &TestDir, size: &str, accumulation: u64) -> Value {
        let [model, machine, recipe] = self.run;
        let size = format!("train.micro_batch_size={size}");
        let accumulation = format!("train.gradient_accumulation_steps={accumulation}");
        let row = format!("data.max_seq_len={}", self.rows[2]);
        let mut args = vec!["--on", machine, "--recipe", recipe];
        for set in [size.as_str(), &accumulation, &row].iter().chain(self.sets) {
            args.extend(["--set", *set]);
        }
        plan(dir, model, &args)
    }

    fn check(&self, dir: &TestDir) {
        let [rows, taken, row] = self.rows;
        let what = format!("{:?} {:?}, {rows} rows of {row}", self.run, self.sets);
        let of = |said: &Value| {
            let number = |key: &str| said[key].as_u64().unwrap();
            (
                number("micro_batch_tokens"),
                number("micro_batches"),
                said["recompute"].as_str().unwrap().to_owned(),
            )
        };
        let auto = self.planned(dir, "auto", rows);
        assert_eq!(of(&auto), (taken * row, rows / taken, self.recompute.to_owned()), "{what}");
        assert_eq!(auto["fits"], true, "{what}");
        // The same size given explicitly has the same plan.
        let fixed = self.planned(dir, &taken.to_string(), rows / taken);
        assert_eq!((&fixed["bytes"], of(&fixed)), (&auto["bytes"], of(&auto)), "{what}");
        let next = (taken + 1..=rows).find(|size| rows.is_multiple_of(*size));
        let larger = next.map(|size| self.planned(dir, &size.to_string(), rows / size));
        let most = if self.run[1].starts_with("cpu") { 2048 } else { 16_384 };
        let stops = larger.as_ref().map_or(matches!(self.stop, Stop::Rows), |larger| {
            let (fits, again) = (larger["fits"] == true, larger["recompute"] != self.recompute);
            let is_much = larger["micro_batch_tokens"].as_u64().unwrap() > most;
            match self.stop {
                Stop::Memory => !fits && !again && !is_much,
                Stop::Recomputing => fits && again && !is_much,
                Stop::Tokens => is_much,
                Stop::TokensAlone => fits && !again && is_much,
                Stop::Rows => false,
            }
        });
        assert!(stops, "{what}: {:?} is not why, with {next:?} rows: {larger:?}", self.stop);
    }
}

#[test]
fn auto_takes_what_fits_and_makes_a_difference() {
    let dir = shapes();
    let case = |run, sets, rows, recompute, stop| Case { run, sets, rows, recompute, stop }.check(&dir);
    let (qlora, lora) = (["8B", "4090", "qlora"], ["8B", "4090", "lora"]);
    // 6.98 billion weights in 4 bits at 0.516 bytes and 2.1 GB of embedding and head are 5.70 GB,
    // with the adapters 6.46 GB. Two rows are 4,096 tokens, 12.4 GB: 18.9 GB, and with 0.7 GB of
    // workspace 19.5 GB. Four rows take 24.7 GB, or 2.9 GB with recomputing, which single rows do
    // not need.
    case(qlora, &[], [64, 2, 2048], "none", Stop::Recomputing);
    // The same run with recomputing disabled.
    case(qlora, &["train.recompute=none"], [64, 2, 2048], "none", Stop::Memory);
    // With recomputing requested, 16,384 tokens take 5.7 GB: the token limit stops.
    case(qlora, &["train.recompute=block"], [64, 8, 2048], "block", Stop::Tokens);
    // An H100 has 49.5 GB beside the 6.46 GB.
    case(["8B", "H100-80GB", "qlora"], &[], [64, 8, 2048], "none", Stop::Tokens);
    // In bf16 the base is 16.06 GB, with the adapters 16.8 GB. A single row of 6.2 GB does not fit
    // and is recomputed, so larger micro-batches may be, too. Four rows are 2.9 GB, with 0.8 GB of
    // workspace 20.5 GB; eight are 5.7 GB.
    case(lora, &[], [64, 4, 2048], "block", Stop::Memory);
}

/// 1B in bf16 is 2.5 GB, and 16,384 tokens of it are 13.5 GB (25,600 values of 2 bytes in each of
/// 16 blocks). An H100 could hold many more.
#[test]
fn auto_takes_no_more_tokens_than_make_a_difference() {
    let dir = shapes();
    let case = |run, sets, rows, stop| Case { run, sets, rows, recompute: "none", stop }.check(&dir);
    let gpu = ["1B", "H100-80GB", "lora"];
    case(gpu, &[], [64, 8, 2048], Stop::TokensAlone);
    case(gpu, &[], [64, 32, 512], Stop::TokensAlone);
    // Six is the largest divisor of twelve rows within 16,384 tokens, one that of eleven, seven
    // that of seven.
    case(gpu, &[], [12, 6, 2048], Stop::TokensAlone);
    case(gpu, &[], [11, 1, 2048], Stop::TokensAlone);
    case(gpu, &[], [7, 7, 2048], Stop::Rows);
    // A row is never split, however long it is. Two rows of 32,768 tokens would be 54 GB, and fit.
    case(gpu, &[], [4, 1, 32_768], Stop::TokensAlone);
    // A CPU reaches its full speed with 2,048 tokens.
    let processor = ["1B", "cpu-64GB", "lora"];
    case(processor, &["model.dtype=f32"], [64, 4, 512], Stop::TokensAlone);
    case(processor, &["model.dtype=f32"], [64, 1, 2048], Stop::TokensAlone);
    // Rows count per rank: each of eight ranks has its own 64.
    case(["1B", "8xH100-80GB", "full"], &[], [64, 8, 2048], Stop::TokensAlone);
}
