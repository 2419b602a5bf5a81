//! The gated RMSNorm by the kernels of `kernels/gated_norm.cu`: a warp for each head.

use candle_core::{DType, Tensor};

use crate::backends::gpu::{Driver, In, LaunchShape, Out, kernels, number};
use crate::error::{Error, Result};
use crate::ops::matmul::{ColumnView, ColumnViewMut, empty};
use crate::ops::rms_norm::cuda::add_partials;
use crate::runtime::TensorMut;

/// Threads per block, and heads of rows that they process.
const THREADS: u32 = 256;
const UNITS: usize = 8;
/// Threads per block of the weight's gradient, and maximum number of these blocks; each writes a
/// row of partial sums.
const GAIN_THREADS: u32 = 128;
const PARTS: usize = 256;

/// The scalar arguments of the kernels.
#[derive(Clone, Copy)]
struct NormSizes {
    units: usize,
    rows: u32,
    heads: u32,
    width: u32,
    z_stride: u32,
}

impl NormSizes {
    fn of(x: &Tensor, z: ColumnView<'_>, weight: &Tensor) -> Result<Self> {
        let ((rows, all), width) = (x.dims2()?, weight.elem_count());
        let heads = all / width.max(1);
        Ok(NormSizes {
            units: rows * heads,
            rows: number(rows)?,
            heads: number(heads)?,
            width: number(width)?,
            z_stride: number(z.tensor.dim(1)?)?,
        })
    }

    fn shape(self) -> LaunchShape {
        LaunchShape::line(self.units.div_ceil(UNITS), THREADS)
    }
}

pub(super) fn forward(
    driver: &dyn Driver,
    x: &Tensor,
    z: ColumnView<'_>,
    weight: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let (sizes, (rows, all)) = (NormSizes::of(x, z, weight)?, x.dims2()?);
    let y = empty(rows, all, x.dtype(), x.device())?;
    macro_rules! launch {
        ($kernel:ident) => {{
            let NormSizes { rows, heads, width, z_stride, .. } = sizes;
            let (x, z, weight, y) = (In::all(x)?, In::columns(&z)?, In::all(weight)?, Out::all(&y)?);
            let eps = eps as f32;
            kernels::$kernel(driver, sizes.shape(), x, z, weight, y, rows, heads, width, z_stride, eps)?
        }};
    }
    match (x.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(gated_norm_bf16),
        (DType::BF16, DType::F32) => launch!(gated_norm_bf16_f32),
        (DType::F32, DType::F32) => launch!(gated_norm_f32),
        _ => return Err(refused(x, weight)),
    }
    Ok(y.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    [x, weight, dy]: [&Tensor; 3],
    z: ColumnView<'_>,
    dweight: Option<&TensorMut>,
    eps: f64,
    dz: ColumnViewMut<'_>,
) -> Result<Tensor> {
    let (sizes, (rows, all)) = (NormSizes::of(x, z, weight)?, x.dims2()?);
    let dx = empty(rows, all, x.dtype(), x.device())?;
    let inverses = dweight.map(|_| empty(1, sizes.units, DType::F32, x.device())).transpose()?;
    let dz_stride = number(dz.tensor.dim(1)?)?;
    macro_rules! launch {
        ($kernel:ident) => {{
            let NormSizes { rows, heads, width, z_stride, .. } = sizes;
            let (x, z, weight, dy) = (In::all(x)?, In::columns(&z)?, In::all(weight)?, In::all(dy)?);
            let (dx, dz) = (Out::all(&dx)?, Out::columns(&dz.as_view())?);
            let (inverses, eps) = (Out::optional(inverses.as_deref())?, eps as f32);
            kernels::$kernel(
                driver,
                sizes.shape(),
                x,
                z,
                weight,
                dy,
                dx,
                dz,
                inverses,
                rows,
                heads,
                width,
                z_stride,
                dz_stride,
                eps,
            )?
        }};
    }
    match (x.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(gated_norm_backward_bf16),
        (DType::BF16, DType::F32) => launch!(gated_norm_backward_bf16_f32),
        (DType::F32, DType::F32) => launch!(gated_norm_backward_f32),
        _ => return Err(refused(x, weight)),
    }
    if let (Some(dweight), Some(inverses), true) = (dweight, inverses, sizes.units > 0) {
        gain_gradient(driver, [x, dy, &inverses], z, sizes, dweight)?;
    }
    Ok(dx.into_tensor())
}

/// Adds the weight's gradient to `dweight`, in two stages.
fn gain_gradient(
    driver: &dyn Driver,
    [x, dy, inverses]: [&Tensor; 3],
    z: ColumnView<'_>,
    sizes: NormSizes,
    dweight: &TensorMut,
) -> Result<()> {
    let NormSizes { units, rows, heads, width, z_stride } = sizes;
    let parts = units.clamp(1, PARTS);
    let partial = empty(parts, width as usize, DType::F32, x.device())?;
    let shape = LaunchShape::line(parts, GAIN_THREADS);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, z, dy) = (In::all(x)?, In::columns(&z)?, In::all(dy)?);
            let (inverses, partial) = (In::all(inverses)?, Out::all(&partial)?);
            kernels::$kernel(driver, shape, x, z, dy, inverses, partial, rows, heads, width, z_stride)?
        }};
    }
    if x.dtype() == DType::BF16 {
        launch!(gated_norm_gain_partial_bf16)
    } else {
        launch!(gated_norm_gain_partial_f32)
    }
    add_partials(driver, &partial, dweight)
}

fn refused(x: &Tensor, weight: &Tensor) -> Error {
    let found = format!("found {:?} with a weight of {:?}", x.dtype(), weight.dtype());
    Error::internal("no kernel of the gated RMSNorm supports these types").because(found)
}
