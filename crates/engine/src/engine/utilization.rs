//! FLOP utilization: the share of its devices' peak that a run uses (Chowdhery et al., arXiv
//! 2204.02311, appendix B).

/// The operations of a token, and the peak of all devices of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeakFlops {
    /// Operations of the model per token, forward and backward.
    pub model: f64,
    /// Operations per token with recomputation.
    pub hardware: f64,
    /// Peak operations per second of all devices.
    pub peak: f64,
}

impl PeakFlops {
    /// Returns the model FLOP utilization at `tokens_per_sec`, 0 to 1.
    pub fn mfu(&self, tokens_per_sec: f64) -> f64 {
        tokens_per_sec * self.model / self.peak
    }

    /// Returns the hardware FLOP utilization, which counts recomputation as work, 0 to 1.
    pub fn hfu(&self, tokens_per_sec: f64) -> f64 {
        tokens_per_sec * self.hardware / self.peak
    }
}
