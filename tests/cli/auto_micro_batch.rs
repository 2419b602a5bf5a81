//! `train.micro_batch_size = "auto"`: which micro-batch is taken of the rows of a step, and what it stops at. By `plan --json` on hardware
//! that is not here; the expected values are computed by hand below, from what docs/recipes.md and docs/sizing.md say:
//!
//! - taken is the largest that divides the rows, fits, computes no more a second time than single rows would, and has no more than 2,048
//!   tokens on a processor and 16,384 on a GPU;
//! - a 4090 has 24 GB, of which the driver holds 0.6: nine tenths of the rest, 21.06 GB, may be planned with, of an H100 71.46 GB;
//! - of a token a block of 8B keeps its input, q, k and v, attention's output, the MLP's input, gate and up: 4,096 + 6,144 + 4,096 + 4,096 +
//!   28,672 values of 2 bytes, 94 kB; 32 blocks keep 3.02 MB. With recomputing they keep inputs alone, 8 kB each, 0.26 MB, and one block
//!   the rest, 0.09 MB;
//! - adapters of rank 16 on all seven matrices of 8B are 42M parameters of 2 + 4 bytes, gradients of 4 and moments of 8: 0.76 GB.

use serde_json::Value;

use crate::place::Place;
use crate::sizing::{plan, shapes};

/// What the next larger micro-batch would be too much for.
#[derive(Debug, Clone, Copy)]
enum Stop {
    /// It would not fit.
    Memory,
    /// It would be computed a second time, or more of it.
    Recomputing,
    /// It would have more tokens than make a difference.
    Tokens,
    /// The same, and nothing else is against it.
    TokensAlone,
    /// There is none: all rows are in one.
    Rows,
}

/// A run, and what is taken of its rows.
struct Case<'a> {
    /// Model, machine, recipe.
    run: [&'a str; 3],
    sets: &'a [&'a str],
    /// Rows of a step and rank, rows of the micro-batch that is taken, tokens of a row.
    rows: [u64; 3],
    recompute: &'a str,
    stop: Stop,
}

impl Case<'_> {
    fn planned(&self, place: &Place, size: &str, accumulation: u64) -> Value {
        let [model, machine, recipe] = self.run;
        let size = format!("train.micro_batch_size={size}");
        let accumulation = format!("train.gradient_accumulation_steps={accumulation}");
        let row = format!("data.max_seq_len={}", self.rows[2]);
        let mut args = vec!["--on", machine, "--recipe", recipe];
        for set in [size.as_str(), &accumulation, &row].iter().chain(self.sets) {
            args.extend(["--set", *set]);
        }
        plan(place, model, &args)
    }

    fn check(&self, place: &Place) {
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
        let auto = self.planned(place, "auto", rows);
        assert_eq!(of(&auto), (taken * row, rows / taken, self.recompute.to_owned()), "{what}");
        assert_eq!(auto["fits"], true, "{what}");
        // It is the plan of that size, whoever chose it.
        let fixed = self.planned(place, &taken.to_string(), rows / taken);
        assert_eq!((&fixed["bytes"], of(&fixed)), (&auto["bytes"], of(&auto)), "{what}");
        let next = (taken + 1..=rows).find(|size| rows.is_multiple_of(*size));
        let larger = next.map(|size| self.planned(place, &size.to_string(), rows / size));
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
    let place = shapes();
    let case = |run, sets, rows, recompute, stop| Case { run, sets, rows, recompute, stop }.check(&place);
    let (qlora, lora) = (["8B", "4090", "qlora"], ["8B", "4090", "lora"]);
    // 6.98 billion weights in 4 bits at 0.516 bytes and 2.1 GB of embedding and head are 5.70 GB, with the adapters 6.46. Two rows are
    // 4,096 tokens, 12.4 GB: 18.9 GB, and with 0.7 of workspace 19.5. Four are 24.7 GB alone, but would fit if they were computed again
    // (2.9 GB), which single rows are not.
    case(qlora, &[], [64, 2, 2048], "none", Stop::Recomputing);
    // The same where computing again is not allowed.
    case(qlora, &["train.recompute=none"], [64, 2, 2048], "none", Stop::Memory);
    // Where it is asked for, 16,384 tokens are 5.7 GB: that they are enough is what stops.
    case(qlora, &["train.recompute=block"], [64, 8, 2048], "block", Stop::Tokens);
    // An H100 has room for 49.5 GB beside the 6.46.
    case(["8B", "H100-80GB", "qlora"], &[], [64, 8, 2048], "none", Stop::Tokens);
    // In bf16 the base is 16.06 GB, with the adapters 16.8: a single row of 6.2 GB does not fit and is computed again, so larger ones may be,
    // too. Four rows are 2.9 GB, with 0.8 of workspace 20.5 GB; eight are 5.7 GB.
    case(lora, &[], [64, 4, 2048], "block", Stop::Memory);
}

/// 1B in bf16 is 2.5 GB, and 16,384 tokens of it are 13.5 GB (25,600 values of 2 bytes in each of 16 blocks): an H100 has room for many more.
#[test]
fn auto_takes_no_more_tokens_than_make_a_difference() {
    let place = shapes();
    let case = |run, sets, rows, stop| Case { run, sets, rows, recompute: "none", stop }.check(&place);
    let gpu = ["1B", "H100-80GB", "lora"];
    case(gpu, &[], [64, 8, 2048], Stop::TokensAlone);
    case(gpu, &[], [64, 32, 512], Stop::TokensAlone);
    // Of twelve rows six are the most that divide them within 16,384 tokens, of eleven one; of seven all.
    case(gpu, &[], [12, 6, 2048], Stop::TokensAlone);
    case(gpu, &[], [11, 1, 2048], Stop::TokensAlone);
    case(gpu, &[], [7, 7, 2048], Stop::Rows);
    // A row is not split, however long it is. Two of 32,768 tokens would be 54 GB, and fit.
    case(gpu, &[], [4, 1, 32_768], Stop::TokensAlone);
    // A processor is as fast as it becomes with 2,048 tokens.
    let processor = ["1B", "cpu-64GB", "lora"];
    case(processor, &["model.dtype=f32"], [64, 4, 512], Stop::TokensAlone);
    case(processor, &["model.dtype=f32"], [64, 1, 2048], Stop::TokensAlone);
    // The rows are a rank's: of eight each takes its own 64.
    case(["1B", "8xH100-80GB", "full"], &[], [64, 8, 2048], Stop::TokensAlone);
}
