//! Compares two texts by the embeddings of a trained model, and prints the likeliest next token of
//! the first: `cargo run --example embeddings -- MODEL ADAPTER TEXT OTHER_TEXT`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

use finetune::TrainedModel;

fn main() -> finetune::error::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, adapter, one, other] = &words[..] else {
        eprintln!("usage: embeddings MODEL ADAPTER TEXT OTHER_TEXT");
        std::process::exit(2);
    };
    let model = TrainedModel::open(model, Some(adapter))?;
    let (a, b) = (model.embedding(one)?, model.embedding(other)?);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    println!("cosine {:.4}", dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt());
    let logits = model.logits(one)?;
    let last = logits.last().map(Vec::as_slice).unwrap_or_default();
    let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b]));
    println!("token {:?} of {}", best, last.len());
    println!("next: {}", model.generate(one, 1)?);
    Ok(())
}
