//! Codes by the kernels of `kernels/fp8.cu`, and their products by cuBLAS. Not yet run on a GPU.

use candle_core::{DType, Tensor};
use half::bf16;

use super::{FP8_MULTIPLE, Fp8Rows};
use crate::backends::gpu::{Driver, Gemm, In, InOut, LaunchShape, Out, are_floats, kernels, number};
use crate::error::Result;
use crate::ops::matmul::{Addend, ColumnView, ColumnViewMut, Transpose, empty};

/// Threads per block.
const THREADS: u32 = 256;
/// Rows and columns of a block that transposes codes.
const TILE: usize = 64;
/// Alignment in bytes of the rows of a product's result.
const ALIGNMENT: usize = 16;

/// Returns true if a kernel quantizes values of this dtype.
pub(super) fn is_float(x: &Tensor) -> bool {
    are_floats([x.dtype()])
}

/// Returns true if a GPU multiplies by a matrix of this shape, `(out, in)`.
pub(super) fn is_supported(dst: &Tensor, a: &Tensor, (out, inputs): (usize, usize)) -> bool {
    let whole = |size: usize| size.is_multiple_of(FP8_MULTIPLE);
    are_floats([dst.dtype(), a.dtype()]) && whole(out) && whole(inputs)
}

/// Writes the codes and scales of the rows of `x`.
pub(super) fn quantize(
    driver: &dyn Driver,
    x: ColumnView<'_>,
    factors: Option<&Tensor>,
    to: &Fp8Rows,
) -> Result<()> {
    let (rows, pitch) = x.tensor.dims2()?;
    let (shape, width, pitch) = (LaunchShape::line(rows, THREADS), number(x.len)?, pitch as i64);
    let (factors, codes, scales) = (In::optional(factors)?, Out::all(&to.codes)?, Out::all(&to.scales)?);
    match x.tensor.dtype() {
        DType::BF16 => {
            let x = In::<bf16>::columns(&x)?;
            kernels::quantize_fp8_bf16(driver, shape, x, factors, codes, scales, width, pitch)
        }
        _ => {
            let x = In::<f32>::columns(&x)?;
            kernels::quantize_fp8_f32(driver, shape, x, factors, codes, scales, width, pitch)
        }
    }
}

/// Returns the codes of `[rows, width]` as `[width, rows]`.
fn transposed(driver: &dyn Driver, matrix: &Fp8Rows) -> Result<Fp8Rows> {
    let (rows, width) = matrix.dims()?;
    let to = Fp8Rows::unwritten(width, rows, matrix.codes.device())?;
    let grid = [number(width.div_ceil(TILE))?, number(rows.div_ceil(TILE))?, 1];
    let shape = LaunchShape { grid, ..LaunchShape::line(1, THREADS) };
    let (x, y) = (In::all(&matrix.codes)?, Out::all(&to.codes)?);
    kernels::transpose_fp8(driver, shape, x, y, number(rows)?, number(width)?)?;
    Ok(to)
}

/// Multiplies codes. The scales are part of the product if it takes scales of rows (`scales_rows`)
/// and the result is aligned; else a kernel multiplies its sums by them.
pub(super) fn matmul(
    driver: &dyn Driver,
    dst: ColumnViewMut<'_>,
    a: &Fp8Rows,
    weight: &Fp8Rows,
    form: Transpose,
    addend: Addend<'_>,
    scales_rows: bool,
) -> Result<()> {
    let (rows, width) = a.dims()?;
    if rows == 0 || width == 0 || dst.len == 0 {
        return addend.place_in(dst).map(drop);
    }
    let turned;
    let (by, outputs) = match form {
        Transpose::Nt => (&weight.codes, Some(&*weight.scales)),
        _ => {
            turned = transposed(driver, weight)?;
            (&turned.codes, None)
        }
    };
    let codes: [&Tensor; 2] = [&a.codes, by];
    if scales_rows && is_aligned(dst) {
        let ones = outputs.is_none().then(|| Tensor::ones(dst.len, DType::F32, dst.tensor.device()));
        let ones = ones.transpose()?;
        let scales = outputs.or(ones.as_ref()).map(|outputs| [&*a.scales, outputs]);
        return driver.gemm(&Gemm::of_codes(&dst, codes, scales, addend)?);
    }
    let sums = empty(rows, dst.len, DType::F32, dst.tensor.device())?;
    driver.gemm(&Gemm::of_codes(&ColumnViewMut::all(&sums), codes, None, Addend::Nothing)?)?;
    let accumulate = u32::from(addend.place_in(dst)?);
    let (view, (_, pitch)) = (dst.as_view(), dst.tensor.dims2()?);
    let (shape, width, pitch) = (LaunchShape::line(rows, THREADS), number(dst.len)?, pitch as i64);
    let (sums, tokens, outputs) = (In::all(&sums)?, In::all(&a.scales)?, In::optional(outputs)?);
    match dst.tensor.dtype() {
        DType::BF16 => {
            let dst = InOut::<bf16>::columns(&view)?;
            kernels::scale_fp8_bf16(driver, shape, dst, sums, tokens, outputs, width, pitch, accumulate)
        }
        _ => {
            let dst = InOut::<f32>::columns(&view)?;
            kernels::scale_fp8_f32(driver, shape, dst, sums, tokens, outputs, width, pitch, accumulate)
        }
    }
}

/// Returns true if all rows of the columns start at a multiple of [`ALIGNMENT`] in a tensor that
/// does.
fn is_aligned(dst: ColumnViewMut<'_>) -> bool {
    let (bytes, pitch) = (dst.tensor.dtype().size_in_bytes(), dst.tensor.dims().last().copied());
    let starts = [dst.start, pitch.unwrap_or_default(), dst.tensor.layout().start_offset()];
    starts.into_iter().all(|start| (start * bytes).is_multiple_of(ALIGNMENT))
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
