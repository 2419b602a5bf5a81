//! Fine-tunes a model in twenty lines: `cargo run --example finetune -- MODEL ROWS.jsonl OUTPUT`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

use std::env::args;
use std::path::Path;

fn main() -> finetune::error::Result<()> {
    let words: Vec<String> = args().skip(1).collect();
    let [model, rows, output] = &words[..] else {
        eprintln!("usage: finetune MODEL ROWS.jsonl OUTPUT");
        std::process::exit(2);
    };
    let recipe = format!(
        "model = {{ id = {model:?} }}\nadapter = {{ r = 8 }}\ndata = {{ train = [{rows:?}] }}\n\
         train = {{ max_steps = 20 }}\noptimizer = {{ learning_rate = 1e-3 }}\n"
    );
    let mut session = finetune::Session::new(&recipe, Path::new(""))?;
    for (number, step) in (1..).zip(session.steps()?) {
        println!("step {number}: loss {:.4}", step?.loss);
    }
    session.save(Path::new(output))
}
