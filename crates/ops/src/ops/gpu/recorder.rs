//! The work of a pass on the emulator, recorded: everything that a CUDA graph of the pass would
//! hold. It can be run again over whatever the same memory holds by then.

use std::cell::RefCell;

use candle_core::Device;

use super::{Arg, Gemm, Kernel, LaunchShape, driver_on, launch_text};
use crate::error::{Error, Result};

thread_local! {
    /// The work of this thread since [`record`] began, in its order.
    static RECORDED: RefCell<Option<Vec<Piece>>> = const { RefCell::new(None) };
}

/// A launch or a product.
#[derive(Debug)]
enum Piece {
    Launch { kernel: Kernel, shape: LaunchShape, args: Vec<Arg> },
    Product(Box<Gemm>),
}

/// Launches and products in their order.
#[derive(Debug)]
pub struct RecordedWork(Vec<Piece>);

/// Returns the result of `pass`, and all launches and products that it requested of the emulator on
/// this thread.
pub fn record<R>(pass: impl FnOnce() -> R) -> (R, RecordedWork) {
    RECORDED.set(Some(Vec::new()));
    let result = pass();
    (result, RecordedWork(RECORDED.take().unwrap_or_default()))
}

/// Notes a launch.
pub(super) fn note_launch(kernel: &Kernel, shape: LaunchShape, args: &[Arg]) {
    note(|| Piece::Launch { kernel: *kernel, shape, args: args.to_vec() });
}

/// Notes a product.
pub(super) fn note_product(gemm: &Gemm) {
    note(|| Piece::Product(Box::new(*gemm)));
}

fn note(piece: impl FnOnce() -> Piece) {
    RECORDED.with_borrow_mut(|recorded| {
        if let Some(work) = recorded {
            work.push(piece());
        }
    });
}

impl RecordedWork {
    /// Returns a line for each launch and product: its function, its threads, the sizes of its
    /// tensors and its numbers, without addresses.
    pub fn lines(&self) -> Vec<String> {
        let line = |piece: &Piece| match piece {
            Piece::Launch { kernel, shape, args } => launch_text(kernel, *shape, args),
            Piece::Product(gemm) => {
                let Gemm { a, b, d, transposed, operands, result, alpha, beta, .. } = &**gemm;
                let [a, b, d] = [a, b, d].map(|of| (of.rows, of.cols, of.leading));
                format!("{d:?} {result:?} = {alpha} {a:?} {b:?} {transposed:?} {operands:?} + {beta}")
            }
        };
        self.0.iter().map(line).collect()
    }

    /// Runs it again with the recorded arguments and addresses.
    ///
    /// # Errors
    /// Fails if no driver replaces the GPU, or a kernel accesses memory outside its tensors.
    ///
    /// # Safety
    /// The memory of all tensors of the recorded pass, also that of dropped ones, is still
    /// allocated and has no other use.
    pub unsafe fn replay(&self) -> Result<()> {
        let driver = driver_on(&Device::Cpu).ok_or_else(|| Error::internal("a replay without a driver"))?;
        self.0.iter().try_for_each(|piece| match piece {
            Piece::Launch { kernel, shape, args } => driver.launch(kernel, *shape, args),
            Piece::Product(gemm) => driver.gemm(gemm),
        })
    }
}
