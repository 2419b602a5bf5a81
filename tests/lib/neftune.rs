//! Noise on the embeddings of training rows (NEFTune).

use std::path::Path;

use candle_core::{DType, Device};
use finetune::data::{Batch, IGNORE, Sample};
use finetune::engine::{EmbeddingNoise, Engine, MicroStep, Stage, StageOutput};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::objectives::{CrossEntropy, StepTotals};
use finetune::recipe::enums::{Attention, Recompute};
use finetune::runtime::rng::RngStream;

use crate::logits;

const ALPHA: f64 = 5.0;

/// Returns two samples of 4 and 16 tokens.
fn batch(first_token: u64) -> Batch {
    let ids = (0..20).map(|i| i * 31 % 300 + 3).collect();
    let samples = [(0, 4), (4, 16)].map(|(start, len)| Sample { start, len, ..Sample::default() }).to_vec();
    Batch { ids, targets: vec![IGNORE; 20], samples, first_token, num_samples: 2 }
}

/// Returns the output of the embedding, `[20, D]`.
fn embeddings(engine: &Engine, batch: &Batch, noise: Option<EmbeddingNoise>) -> Result<Vec<Vec<f32>>> {
    let step = MicroStep {
        objective: &CrossEntropy,
        scale: 1.0,
        totals: StepTotals::default(),
        reference: None,
        recompute: Recompute::None,
        dropout: None,
        noise,
        balance: None,
        last: true,
        graphs: None,
    };
    let stage = Stage { blocks: 0..0, has_embedding: true, has_head: false };
    match engine.forward(&stage, batch, None, step)?.0 {
        StageOutput::Hidden(output) => Ok(output.hidden.to_vec2()?),
        StageOutput::Loss(_) => unreachable!("the stage has no head"),
    }
}

/// Returns `noisy − plain` of rows, relative to the largest noise of a sample of this length.
fn relative(noisy: &[Vec<f32>], plain: &[Vec<f32>]) -> Vec<f64> {
    let bound = ALPHA / ((plain.len() * plain[0].len()) as f64).sqrt();
    let pairs = noisy.iter().flatten().zip(plain.iter().flatten());
    pairs.map(|(noisy, plain)| f64::from(noisy - plain) / bound).collect()
}

#[test]
fn noise_is_uniform_and_bounded_by_the_length_of_its_sample() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let engine = logits::base(&folder).engine(Trains::All, &options)?;
    let noise = |step| Some(EmbeddingNoise { alpha: ALPHA, stream: RngStream::new(1).part(step) });
    let plain = embeddings(&engine, &batch(0), None)?;
    let noisy = embeddings(&engine, &batch(0), noise(1))?;
    for rows in [0..4, 4..20] {
        let relative = relative(&noisy[rows.clone()], &plain[rows.clone()]);
        let largest = relative.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        let square = relative.iter().map(|value| value * value).sum::<f64>() / relative.len() as f64;
        // Rounding of the sum adds a little.
        assert!(largest > 0.9 && largest < 1.0 + 1e-4, "{rows:?}: {largest}");
        assert!((square - 1.0 / 3.0).abs() < 0.06, "{rows:?}: {square}");
    }
    // The same step repeats its noise; another step, and another place in the batch, do not.
    assert_eq!(embeddings(&engine, &batch(0), noise(1))?, noisy);
    assert_ne!(embeddings(&engine, &batch(0), noise(2))?, noisy);
    assert_ne!(embeddings(&engine, &batch(20), noise(1))?, noisy);
    Ok(())
}
