//! The frozen weights of linear layers in fp8: the layers of a group that multiply so, and their
//! codes.

use super::{ModelConfig, ModuleKind, modules};
use crate::error::Result;
use crate::ops::matmul_fp8::{FP8_MULTIPLE, Fp8Rows, matmul_fp8};
use crate::ops::matmul_quantized::{Weight, matmul_weights};
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose};

/// The first layers of a group whose frozen weights are multiplied in fp8.
#[derive(Debug, Clone)]
pub(super) struct Fp8Base {
    /// The number of these layers.
    pub(super) layers: usize,
    /// Their weights as one matrix; `None` if each use quantizes them, because they are gathered or
    /// copied for it.
    pub(super) codes: Option<Fp8Rows>,
}

/// The weights of a part of a group in fp8.
#[derive(Debug, Clone)]
pub(super) enum Fp8Part {
    /// Codes that are kept.
    Kept(Fp8Rows),
    /// Codes made for each use.
    EachUse,
}

impl Fp8Part {
    /// Returns the codes of `weights`, the part's own.
    pub(super) fn codes(&self, weights: &[Weight<'_>]) -> Result<Fp8Rows> {
        match self {
            Fp8Part::Kept(codes) => Ok(codes.clone()),
            Fp8Part::EachUse => Fp8Rows::of(weights),
        }
    }
}

impl Fp8Base {
    /// Returns `len` rows from `start` on, which are those of a layer or of several.
    pub(super) fn part(&self, start: usize, len: usize) -> Result<Fp8Part> {
        let part = self.codes.as_ref().map(|codes| codes.rows(start, len)).transpose()?;
        Ok(part.map_or(Fp8Part::EachUse, Fp8Part::Kept))
    }
}

/// The weights of one product, stacked by rows.
pub(super) struct BaseWeights<'a> {
    /// The weights, `[out, in]` each.
    pub(super) values: Vec<Weight<'a>>,
    /// Their codes, if they are multiplied in fp8.
    pub(super) codes: Option<Fp8Rows>,
}

impl BaseWeights<'_> {
    /// Computes `dst = [added +] form(a, weights)`; `form` is [`Transpose::Nt`] (forward) or
    /// [`Transpose::Nn`] (the input's gradient).
    pub(super) fn multiply(
        &self,
        dst: ColumnViewMut<'_>,
        a: ColumnView<'_>,
        form: Transpose,
        added: Addend<'_>,
    ) -> Result<()> {
        match &self.codes {
            Some(codes) => matmul_fp8(dst, a, codes, form, added),
            None => matmul_weights(dst, a, &self.values, form, added),
        }
    }
}

/// Returns whether a frozen matrix of this shape is multiplied in fp8, as in torchao.
pub(super) fn fits([out, inputs]: [usize; 2]) -> bool {
    out.is_multiple_of(FP8_MULTIPLE) && inputs.is_multiple_of(FP8_MULTIPLE)
}

/// Returns the names of the weights of blocks that are multiplied in fp8 while they are frozen: of
/// linear layers whose sizes are multiples of 16, except routers and other gates.
pub fn fp8_weights(config: &ModelConfig) -> impl Iterator<Item = String> {
    let takes =
        |kind, shape: &[usize]| kind == ModuleKind::Linear && <[usize; 2]>::try_from(shape).is_ok_and(fits);
    let takes = modules(config).into_iter().filter(move |module| takes(module.kind, &module.shape));
    takes.map(|module| format!("{}.weight", module.name))
}
