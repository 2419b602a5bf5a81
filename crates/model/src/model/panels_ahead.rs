//! The dequantized panels of a block's products on a GPU, each made beside the product before it.
//! **Not yet run on a GPU.**
//!
//! A product takes its panel right before it multiplies, and then starts that of the next one. So
//! at most two panels exist at a time, and until its product a panel is optional memory, which a
//! request drops that finds too little. The first product of a block makes its own. The device
//! waits for a panel that no product took when the pass ends: gathers of later blocks overwrite the
//! codes.

#[cfg(test)]
use std::cell::RefCell;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::ops::matmul_quantized::{PanelAhead, Quantized};
use crate::ops::{has_kernels, is_deferring};
use crate::runtime::optional_memory::OptionalMemory;

/// The matrices of one panel, stacked.
pub(super) type PanelWeights<'a> = Vec<&'a Quantized>;

#[cfg(test)]
thread_local! {
    /// Addresses of the first weights of this thread's products, in their order.
    pub(super) static TAKEN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The products with frozen quantized weights in a pass over a block.
#[derive(Debug)]
pub(super) struct PanelsAhead<'a> {
    /// The weights of each product, in the order of the products.
    products: Vec<PanelWeights<'a>>,
    /// The dtype of the activations.
    dtype: DType,
    /// The panel in the making, and the index of its product.
    next: OptionalMemory<(usize, PanelAhead)>,
}

impl<'a> PanelsAhead<'a> {
    /// Describes a pass with `products` over activations like `x`.
    pub(super) fn new(products: impl Iterator<Item = PanelWeights<'a>>, x: &Tensor) -> Self {
        // The second queue would overtake deferred launches.
        let is_ahead = has_kernels(x.device()) && !is_deferring(x.device());
        let products = products.filter(|_| is_ahead).collect();
        let next = OptionalMemory::new(|(_, panel): (usize, PanelAhead)| panel.give_back());
        PanelsAhead { products, dtype: x.dtype(), next }
    }

    /// Returns the panel of the product with `weights`, if it was started, and starts the next one.
    /// The caller multiplies by it before it requests memory.
    ///
    /// # Errors
    /// An operation of the device failed.
    pub(super) fn take(&self, weights: &[&Quantized]) -> Result<Option<Tensor>> {
        #[cfg(test)]
        TAKEN.with_borrow_mut(|taken| taken.extend(weights.first().map(|of| std::ptr::from_ref(*of).addr())));
        let is_this = |product: &PanelWeights<'_>| match (&product[..], weights) {
            ([known, ..], [first, ..]) => std::ptr::eq(*known, *first),
            _ => false,
        };
        let Some(index) = self.products.iter().position(is_this) else { return Ok(None) };
        debug_assert_eq!(
            self.products[index].len(),
            weights.len(),
            "a panel holds all weights of its product"
        );
        let started = self.next.take().filter(|(of, _)| *of == index);
        let panel = started.map(|(_, panel)| panel.finish()).transpose()?;
        if let Some(next) = self.products.get(index + 1) {
            let next = PanelAhead::start(next, self.dtype)?;
            self.next.set(next.map(|next| (index + 1, next)));
        }
        Ok(panel)
    }
}
