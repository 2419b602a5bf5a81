//! Noise on the embeddings of training rows (NEFTune, arXiv 2310.05914): a uniform number of at
//! most `alpha / √(L · D)` on each value of a row of L tokens in a model of width D.
//!
//! L is the row's own length, packed or not. transformers takes the longest row of the padded
//! batch, so its noise depends on the neighbours of a row.

use candle_core::Tensor;

use crate::data::Batch;
use crate::error::Result;
use crate::ops::noise::{Noise, add_noise};
use crate::runtime::rng::RngStream;

/// The noise of a step.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingNoise {
    /// The factor of the largest noise, above 0.
    pub alpha: f64,
    /// The stream of (seed, step).
    pub stream: RngStream,
}

impl EmbeddingNoise {
    /// Returns the noise of step `step` for `alpha`; none for 0.
    pub(super) fn of_step(alpha: f64, seed: u64, step: u64) -> Option<Self> {
        (alpha > 0.0)
            .then(|| EmbeddingNoise { alpha, stream: RngStream::new(seed).named("neftune").part(step) })
    }

    /// Returns the embeddings of `batch`, `[N, D]`, with noise.
    pub(super) fn added(self, embeddings: &Tensor, batch: &Batch) -> Result<Tensor> {
        let width = embeddings.dims2()?.1;
        let mut bounds = vec![0.0; batch.len()];
        for sample in &batch.samples {
            let bound = self.alpha / (sample.len as f64 * width as f64).sqrt();
            bounds[sample.start..][..sample.len].fill(bound as f32);
        }
        add_noise(embeddings, Noise { bounds: &bounds, stream: self.stream, first_token: batch.first_token })
    }
}
