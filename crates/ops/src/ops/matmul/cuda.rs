//! Products by cuBLAS; biases and their gradients by the kernels of `kernels/elementwise.cu` and
//! `kernels/reduce.cu`.

use candle_core::{DType, Device, Tensor};

use super::{Addend, ColumnView, ColumnViewMut, Transpose, empty, reference};
use crate::backends::gpu::{Driver, Gemm, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::runtime::TensorMut;
use crate::runtime::deferred::issue_deferred;

/// Columns and rows per block of the first stage of a bias's gradient.
const COLUMNS: usize = 128;
const ROWS: usize = 64;
/// Threads per block; each processes a column in the second stage.
const THREADS: usize = 256;

/// Computes the product by cuBLAS if it supports the three dtypes; otherwise, and for empty sums,
/// by its definition.
pub(super) fn matmul(
    driver: &dyn Driver,
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    b: ColumnView<'_>,
    form: Transpose,
    alpha: f64,
    addend: Addend<'_>,
) -> Result<()> {
    match Gemm::new(&dst, &a, &b, form, alpha as f32, addend)? {
        Some(gemm) if gemm.size()[2] > 0 => {
            let [m, n, _] = gemm.size();
            if m == 0 || n == 0 { Ok(()) } else { driver.gemm(&gemm) }
        }
        _ => {
            issue_deferred()?;
            reference(dst, a, b, form, alpha, addend)
        }
    }
}

pub(super) fn add_bias(driver: &dyn Driver, dst: ColumnViewMut<'_>, bias: &Tensor) -> Result<()> {
    let (rows, pitch) = dst.tensor.dims2()?;
    let (shape, width, pitch) = (LaunchShape::line(rows, THREADS as u32), number(dst.len)?, pitch as i64);
    let view = dst.as_view();
    macro_rules! launch {
        ($kernel:ident) => {
            kernels::$kernel(driver, shape, InOut::columns(&view)?, In::all(bias)?, width, pitch)
        };
    }
    match (dst.tensor.dtype(), bias.dtype()) {
        (DType::BF16, DType::BF16) => launch!(add_bias_bf16_bf16),
        (DType::BF16, _) => launch!(add_bias_bf16_f32),
        (_, DType::BF16) => launch!(add_bias_f32_bf16),
        _ => launch!(add_bias_f32_f32),
    }
}

/// The sums of columns in two stages: partial sums of [`ROWS`] rows each, then the sums of those.
pub(in crate::ops) struct ColumnSums {
    /// The result of the first stage, `[parts, width]`.
    pub(in crate::ops) partials: TensorMut,
}

impl ColumnSums {
    pub(in crate::ops) fn new(rows: usize, width: usize, device: &Device) -> Result<Self> {
        Ok(ColumnSums { partials: empty(rows.div_ceil(ROWS), width, DType::F32, device)? })
    }

    /// Returns the threads of the first stage.
    pub(in crate::ops) fn shape(&self) -> Result<LaunchShape> {
        let (parts, width) = self.partials.dims2()?;
        let grid = [number(width.div_ceil(COLUMNS))?, number(parts)?, 1];
        Ok(LaunchShape { grid, block: [THREADS as u32, 1, 1], shared_bytes: 0 })
    }

    /// Runs the second stage: `grad[j] += sum[j]`, divided by `norm[j]` if given.
    pub(in crate::ops) fn add_to(
        &self,
        driver: &dyn Driver,
        grad: &TensorMut,
        norm: Option<&Tensor>,
    ) -> Result<()> {
        let (parts, width) = self.partials.dims2()?;
        let shape = LaunchShape::line(width.div_ceil(THREADS), THREADS as u32);
        let (partials, norm, grad) = (In::all(&self.partials)?, In::optional(norm)?, InOut::all(grad)?);
        kernels::add_column_sums(driver, shape, partials, norm, grad, number(parts)?, number(width)?)
    }
}

pub(super) fn sum_rows(driver: &dyn Driver, grad: &TensorMut, dy: ColumnView<'_>) -> Result<()> {
    let (rows, pitch) = dy.tensor.dims2()?;
    let sums = ColumnSums::new(rows, dy.len, grad.device())?;
    let (shape, out) = (sums.shape()?, Out::<f32>::all(&sums.partials)?);
    let (rows, width, pitch) = (number(rows)?, number(dy.len)?, pitch as i64);
    if dy.tensor.dtype() == DType::BF16 {
        kernels::column_sums_bf16(driver, shape, In::columns(&dy)?, out, rows, width, pitch)?;
    } else {
        kernels::column_sums_f32(driver, shape, In::columns(&dy)?, out, rows, width, pitch)?;
    }
    sums.add_to(driver, grad, None)
}
