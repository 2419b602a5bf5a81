//! AdamW by the kernel of `kernels/adamw.cu`: all pieces in one launch.

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::{AdamWPiece, AdamWStep};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, kernels, number, upload};
use crate::error::{Error, Result};
use crate::runtime::TensorMut;

/// Values per block.
const CHUNK: usize = 4096;

/// Device addresses of a piece's moments.
pub(in crate::ops) struct MomentAddresses {
    /// Addresses of both moments, or of their codes.
    pub(in crate::ops) values: [u64; 2],
    /// Addresses of the codes' scales; 0 for f32 moments.
    pub(in crate::ops) scales: [u64; 2],
}

/// The table of pieces that the kernels read.
pub(in crate::ops) struct PieceTable {
    /// `[pieces, 12]` i64; `kernels/adamw.cu` names the columns.
    pub(in crate::ops) rows: Tensor,
    /// `[pieces + 1]` u32: the first block of each piece, and the end.
    pub(in crate::ops) first_block: Tensor,
    /// `[pieces, 6]` f32: the update constants of each piece.
    pub(in crate::ops) rates: Tensor,
    /// `[1]` f32: the factor on the gradients.
    pub(in crate::ops) grad_scale: Tensor,
    /// Number of pieces.
    pub(in crate::ops) count: u32,
    /// Number of blocks of all pieces.
    pub(in crate::ops) blocks: usize,
}

impl PieceTable {
    /// Uploads the pieces that are not empty, with one block per `chunk` values.
    ///
    /// # Errors
    /// Fails if a tensor is not contiguous or of another type, or the pieces differ in their
    /// gradient factor.
    pub(in crate::ops) fn upload<M>(
        pieces: &[AdamWPiece<'_, M>],
        chunk: usize,
        moments: impl Fn([&M; 2]) -> Result<MomentAddresses>,
    ) -> Result<Self> {
        let device = pieces.first().map_or(&Device::Cpu, |piece| piece.param.device());
        let grad_scale = pieces.first().map_or(1.0, |piece| piece.step.rates().grad_scale);
        let (mut rows, mut first_block, mut rates, mut blocks) = (Vec::new(), vec![0], Vec::new(), 0);
        for piece in pieces.iter().filter(|piece| piece.param.elem_count() > 0) {
            let AdamWPiece { param, rounding, step, .. } = piece;
            if step.rates().grad_scale != grad_scale {
                return Err(Error::internal("pieces of an update have different gradient factors"));
            }
            let MomentAddresses { values: [mean, square], scales: [mean_scales, square_scales] } =
                moments(piece.moments)?;
            let ([param_at, value_at], [grad_at, half_grad_at]) =
                (param_addresses(piece)?, grad_addresses(piece)?);
            let (count, group) = (param.elem_count(), (first_block.len() - 1) as u64);
            let values = [param_at, grad_at, mean, square, value_at];
            let scales = [mean_scales, square_scales];
            rows.extend(values.into_iter().chain([count as u64, group]).chain(scales).map(u64::cast_signed));
            let random = [half_grad_at, rounding.stream.state(), rounding.first];
            rows.extend(random.map(u64::cast_signed));
            rates.extend(group_of(step));
            blocks += count.div_ceil(chunk);
            first_block.push(number(blocks)?);
        }
        let count = first_block.len() - 1;
        Ok(PieceTable {
            rows: upload(&rows, (count, 12), device)?,
            first_block: upload(&first_block, count + 1, device)?,
            rates: upload(&rates, (count, 6), device)?,
            grad_scale: upload(&[grad_scale], 1, device)?,
            count: number(count)?,
            blocks,
        })
    }
}

/// Returns the addresses of a piece's f32 parameters and of its bf16 values, 0 if absent.
fn param_addresses<M>(piece: &AdamWPiece<'_, M>) -> Result<[u64; 2]> {
    let AdamWPiece { param, value, .. } = piece;
    if param.dtype() == DType::BF16 {
        return Ok([0, InOut::<bf16>::all(param)?.arg().value]);
    }
    let value = InOut::<bf16>::optional(value.map(|value| &**value))?;
    Ok([InOut::<f32>::all(param)?.arg().value, value.arg().value])
}

/// Returns the addresses of a piece's gradients in f32 and in bf16, 0 if absent.
fn grad_addresses<M>(piece: &AdamWPiece<'_, M>) -> Result<[u64; 2]> {
    Ok(match piece.grad.dtype() {
        DType::BF16 => [0, In::<bf16>::all(piece.grad)?.arg().value],
        _ => [In::<f32>::all(piece.grad)?.arg().value, 0],
    })
}

/// Returns the constants of a step in the kernel's order.
fn group_of(step: &AdamWStep) -> [f32; 6] {
    let rates = step.rates();
    [rates.decay, rates.step, rates.root, rates.beta1, rates.beta2, rates.eps]
}

pub(super) fn adamw(driver: &dyn Driver, pieces: &[AdamWPiece<'_, TensorMut>]) -> Result<()> {
    let address = |tensor: &TensorMut| -> Result<u64> { Ok(InOut::<f32>::all(tensor)?.arg().value) };
    let table = PieceTable::upload(pieces, CHUNK, |[mean, square]| {
        Ok(MomentAddresses { values: [address(mean)?, address(square)?], scales: [0; 2] })
    })?;
    let (shape, rows) = (LaunchShape::line(table.blocks, 256), In::all(&table.rows)?);
    let (rates, grad_scale) = (In::all(&table.rates)?, In::all(&table.grad_scale)?);
    kernels::adamw_f32(driver, shape, rows, In::all(&table.first_block)?, table.count, rates, grad_scale)
}
