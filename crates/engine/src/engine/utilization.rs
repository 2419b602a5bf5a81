//! Which part of what its devices could compute a run uses (Chowdhery et al., arXiv 2204.02311, appendix B).

/// What a token costs, and what all devices of a run could compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeakFlops {
    /// Operations of the model for a token, forward and backward.
    pub model: f64,
    /// Those with what is computed a second time.
    pub hardware: f64,
    /// Operations a second of all devices at their peak.
    pub peak: f64,
}

impl PeakFlops {
    /// Model FLOP utilisation at so many tokens a second, 0 to 1.
    pub fn mfu(&self, tokens_per_sec: f64) -> f64 {
        tokens_per_sec * self.model / self.peak
    }

    /// Hardware FLOP utilisation, which counts recomputation as work.
    pub fn hfu(&self, tokens_per_sec: f64) -> f64 {
        tokens_per_sec * self.hardware / self.peak
    }
}
