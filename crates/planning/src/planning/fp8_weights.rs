//! The frozen weights in fp8, as far as they decide the memory of a step.

use std::collections::BTreeSet;

/// The frozen weights that a step multiplies in fp8.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fp8Weights<'a> {
    /// Their names; none if no weight is multiplied so.
    pub(super) names: Option<&'a BTreeSet<String>>,
    /// True if their codes are kept; else each use quantizes them.
    pub(super) keeps_codes: bool,
    /// True if a product multiplies by the scales itself; else its sums are f32.
    pub(super) scales_rows: bool,
}
