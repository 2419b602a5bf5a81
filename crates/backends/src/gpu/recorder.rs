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

/// A request of the host.
#[derive(Debug)]
enum Piece {
    Launch {
        kernel: Kernel,
        shape: LaunchShape,
        args: Vec<Arg>,
        /// True if the second queue runs it.
        is_beside: bool,
    },
    Product(Box<Gemm>),
    /// Bytes copied to the device.
    Upload(usize),
    /// Work on the second queue, by the addresses that it writes to.
    Begin(Vec<u64>),
    /// The first queue waits for the work that begins at this piece.
    End(usize),
}

/// Launches, products and uploads in the order in which the emulator did them, and the order of the
/// host's calls for a second queue.
#[derive(Debug)]
pub struct RecordedWork(Vec<Piece>);

/// A product with dequantized weights, by indices into [`RecordedWork`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PanelProduct {
    /// The product itself.
    pub product: usize,
    /// The begin of the work on the second queue that made its panel; none if it made its own.
    pub begin: Option<usize>,
    /// The wait of the first queue for that work.
    pub end: Option<usize>,
}

/// Ends the recording of a pass, even if it panics, and goes on with that of an outer one.
struct Recording(Option<Vec<Piece>>);

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDED.set(self.0.take());
    }
}

/// Returns the result of `pass`, and all work that it requested of the emulator on this thread. An
/// outer recording does not hold that work.
pub fn record<R>(pass: impl FnOnce() -> R) -> (R, RecordedWork) {
    let outer = Recording(RECORDED.replace(Some(Vec::new())));
    let result = pass();
    let work = RECORDED.take().unwrap_or_default();
    drop(outer);
    (result, RecordedWork(work))
}

/// Notes a launch on the first queue or, with `is_beside`, on the second.
pub(crate) fn note_launch(kernel: &Kernel, shape: LaunchShape, args: &[Arg], is_beside: bool) {
    note(|| Piece::Launch { kernel: *kernel, shape, args: args.to_vec(), is_beside });
}

/// Notes a product.
pub(crate) fn note_product(gemm: &Gemm) {
    note(|| Piece::Product(Box::new(*gemm)));
}

/// Notes an upload.
pub(super) fn note_upload(bytes: usize) {
    note(|| Piece::Upload(bytes));
}

/// Notes work on the second queue that writes to these addresses. Returns its number.
pub(crate) fn note_begin(written: Vec<u64>) -> usize {
    let number = RECORDED.with_borrow(|recorded| recorded.as_ref().map_or(0, Vec::len));
    note(|| Piece::Begin(written));
    number
}

/// Notes a wait of the first queue for the work of this number.
pub(crate) fn note_end(number: usize) {
    note(|| Piece::End(number));
}

fn note(piece: impl FnOnce() -> Piece) {
    RECORDED.with_borrow_mut(|recorded| {
        if let Some(work) = recorded {
            work.push(piece());
        }
    });
}

/// Returns the text of an argument's size: rows, their bytes and their distance, or a number.
fn memory(arg: &Arg) -> [u64; 3] {
    [arg.rows, arg.row_bytes, arg.pitch]
}

/// Removes the panels whose memory is overwritten.
fn forget(panels: &mut Vec<(u64, Option<usize>)>, written: &Arg) {
    let end = written.value + written.rows.saturating_sub(1) * written.pitch + written.row_bytes;
    panels.retain(|(address, _)| !(written.value..end).contains(address));
}

impl RecordedWork {
    /// Returns a line for each launch, product and upload: its function, its threads, the sizes and
    /// pitches of its tensors and its numbers, without addresses.
    pub fn lines(&self) -> Vec<String> {
        let line = |piece: &Piece| match piece {
            Piece::Launch { kernel, shape, args, .. } => {
                let pitches: Vec<_> = args.iter().map(|arg| arg.pitch).collect();
                format!("{}, pitches {pitches:?}", launch_text(kernel, *shape, args))
            }
            Piece::Product(gemm) => {
                let Gemm { a, b, c, d, transposed, operands, result, alpha, beta, scales } = &**gemm;
                let [a, b, c, d] = [a, b, c, d].map(|of| (of.rows, of.cols, of.leading, memory(&of.arg)));
                let scales = scales.map(|scales| scales.map(|arg| memory(&arg)));
                format!(
                    "{d:?} {result:?} = {alpha} {a:?} {b:?} {transposed:?} {operands:?} {scales:?} + {beta} {c:?}"
                )
            }
            Piece::Upload(bytes) => format!("upload of {bytes} B"),
            Piece::Begin(written) => format!("second queue: {} launches", written.len()),
            Piece::End(number) => format!("wait for the second queue's work {number}"),
        };
        self.0.iter().map(line).collect()
    }

    /// Returns the number of uploads.
    pub fn uploads(&self) -> usize {
        self.0.iter().filter(|piece| matches!(piece, Piece::Upload(_))).count()
    }

    /// Returns whether a wait for the second queue came last: a pass that failed while that queue
    /// worked ends so.
    pub fn ends_with_wait(&self) -> bool {
        matches!(self.0.last(), Some(Piece::End(_)))
    }

    /// Returns the products that read what a kernel of `dequantize.cu` wrote, in their order.
    pub fn panel_products(&self) -> Vec<PanelProduct> {
        // The address of each panel, and the begin of its work.
        let (mut panels, mut found): (Vec<(u64, Option<usize>)>, _) = (Vec::new(), Vec::new());
        let end_of = |begin| self.0.iter().position(|piece| matches!(piece, Piece::End(of) if *of == begin));
        for (index, piece) in self.0.iter().enumerate() {
            match piece {
                Piece::Product(gemm) => {
                    let is_read = |panel: &&(u64, _)| [gemm.a.arg.value, gemm.b.arg.value].contains(&panel.0);
                    let read = panels.iter().find(is_read).map(|(_, begin)| *begin);
                    let of = |begin: Option<usize>| PanelProduct {
                        product: index,
                        begin,
                        end: begin.and_then(end_of),
                    };
                    found.extend(read.map(of));
                    forget(&mut panels, &gemm.d.arg);
                }
                Piece::Launch { kernel, args, is_beside: false, .. } => {
                    let written = || args.iter().filter(|arg| arg.is_written);
                    written().for_each(|arg| forget(&mut panels, arg));
                    if kernel.module == "dequantize" {
                        panels.extend(written().map(|arg| (arg.value, None)));
                    }
                }
                Piece::Begin(written) => {
                    panels.retain(|(address, _)| !written.contains(address));
                    panels.extend(written.iter().map(|address| (*address, Some(index))));
                }
                Piece::Launch { .. } | Piece::Upload(_) | Piece::End(_) => {}
            }
        }
        found
    }

    /// Runs it again with the recorded arguments and addresses, without the uploads.
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
            Piece::Launch { kernel, shape, args, .. } => driver.launch(kernel, *shape, args),
            Piece::Product(gemm) => driver.gemm(gemm),
            Piece::Upload(_) | Piece::Begin(_) | Piece::End(_) => Ok(()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces() -> Option<usize> {
        RECORDED.with_borrow(|recorded| recorded.as_ref().map(Vec::len))
    }

    #[test]
    fn a_panic_ends_a_recording() {
        let outcome = std::panic::catch_unwind(|| record(|| panic!("a kernel is missing")));
        assert!(outcome.is_err() && pieces().is_none());
        let ((), outer) = record(|| {
            note_upload(4);
            let inner = std::panic::catch_unwind(|| {
                record(|| {
                    note_upload(8);
                    panic!("a kernel is missing")
                })
            });
            assert!(inner.is_err() && pieces() == Some(1));
            let ((), inner) = record(|| note_upload(16));
            assert_eq!(inner.lines(), ["upload of 16 B"]);
            note_upload(32);
        });
        assert_eq!(outer.lines(), ["upload of 4 B", "upload of 32 B"]);
        assert!(pieces().is_none());
    }
}
