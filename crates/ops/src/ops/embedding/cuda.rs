//! Embeddings by the kernels of `kernels/embedding.cu`. Gradients are added id by id, over the
//! tokens of each id in order.

use candle_core::{DType, Device, Tensor};

use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number, upload};
use crate::error::Result;
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;

/// Columns per block of the gradient.
const COLUMNS: usize = 1024;

pub(super) fn embed(
    driver: &dyn Driver,
    table: &Tensor,
    ids: &[u32],
    factor: f64,
    dtype: DType,
) -> Result<Tensor> {
    embed_listed(driver, table, &list(ids, table.device())?, factor, dtype)
}

pub(super) fn rows_of(driver: &dyn Driver, tables: [&Tensor; 2], ids: &[u32]) -> Result<[Tensor; 2]> {
    let ids = list(ids, tables[0].device())?;
    let [first, second] = tables.map(|table| embed_listed(driver, table, &ids, 1.0, DType::F32));
    Ok([first?, second?])
}

/// Embeds ids that are on the device, like [`embed`].
fn embed_listed(
    driver: &dyn Driver,
    table: &Tensor,
    ids: &Tensor,
    factor: f64,
    dtype: DType,
) -> Result<Tensor> {
    let (count, width) = (ids.elem_count(), table.dim(1)?);
    let y = empty(count, width, dtype, table.device())?;
    let shape = LaunchShape::line(count, 256);
    macro_rules! launch {
        ($kernel:ident) => {{
            let table = In::all(table)?.touching(count * width);
            let (ids, y) = (In::all(ids)?, Out::all(&y)?);
            kernels::$kernel(driver, shape, table, ids, y, number(width)?, factor as f32)?
        }};
    }
    match (table.dtype(), dtype) {
        (DType::BF16, DType::BF16) => launch!(embed_bf16_bf16),
        (DType::BF16, _) => launch!(embed_bf16_f32),
        (_, DType::BF16) => launch!(embed_f32_bf16),
        _ => launch!(embed_f32_f32),
    }
    Ok(y.into_tensor())
}

pub(super) fn embed_backward(
    driver: &dyn Driver,
    grad: &TensorMut,
    ids: &[u32],
    dy: &Tensor,
    factor: f64,
    skip: Option<u32>,
) -> Result<()> {
    let (width, by_id) = (grad.dim(1)?, ById::of(ids, skip));
    if by_id.ids.is_empty() {
        return Ok(());
    }
    let [listed, starts, places] = by_id.upload(grad.device())?;
    let (ids, starts, places) = (In::all(&listed)?, In::all(&starts)?, In::all(&places)?);
    let columns = number(width.div_ceil(COLUMNS))?;
    let grid = [number(by_id.ids.len())?, columns, 1];
    let shape = LaunchShape { grid, block: [256, 1, 1], shared_bytes: 0 };
    let touched = by_id.ids.len() * width;
    let (grad, width, factor) = (InOut::<f32>::all(grad)?.touching(touched), number(width)?, factor as f32);
    // Skipped tokens are not listed.
    macro_rules! launch {
        ($kernel:ident) => {{
            let dy = In::all(dy)?;
            kernels::$kernel(driver, shape, grad, ids, starts, places, dy, width, factor, u32::MAX)
        }};
    }
    if dy.dtype() == DType::BF16 { launch!(embed_backward_bf16) } else { launch!(embed_backward_f32) }
}

pub(super) fn columns_of(driver: &dyn Driver, a: &Tensor, ids: &[u32]) -> Result<Tensor> {
    let (r, vocab) = a.dims2()?;
    let y = empty(ids.len(), r, DType::F32, a.device())?;
    let uploaded = list(ids, a.device())?;
    let shape = LaunchShape::line((ids.len() * r).div_ceil(256), 256);
    let a = In::<f32>::all(a)?.touching(ids.len() * r);
    let (listed, out) = (In::all(&uploaded)?, Out::<f32>::all(&y)?);
    kernels::columns_of_f32(driver, shape, a, listed, out, ids.len() as i64, number(r)?, vocab as i64)?;
    Ok(y.into_tensor())
}

pub(super) fn columns_of_backward(
    driver: &dyn Driver,
    grad: &TensorMut,
    ids: &[u32],
    du: &Tensor,
    skip: Option<u32>,
) -> Result<()> {
    let ((r, vocab), by_id) = (grad.dims2()?, ById::of(ids, skip));
    if by_id.ids.is_empty() {
        return Ok(());
    }
    let [listed, starts, places] = by_id.upload(grad.device())?;
    let (ids, starts, places) = (In::all(&listed)?, In::all(&starts)?, In::all(&places)?);
    let count = by_id.ids.len();
    let shape = LaunchShape::line((count * r).div_ceil(256), 256);
    let (grad, du) = (InOut::<f32>::all(grad)?.touching(count * r), In::<f32>::all(du)?);
    let (count, r, vocab) = (count as i64, number(r)?, vocab as i64);
    kernels::columns_of_backward_f32(driver, shape, grad, ids, starts, places, du, count, r, vocab, u32::MAX)
}

/// Tokens sorted by their id: the tokens of `ids[i]` are `places[starts[i]..starts[i + 1]]`, in
/// order.
struct ById {
    ids: Vec<u32>,
    starts: Vec<u32>,
    places: Vec<u32>,
}

impl ById {
    fn of(ids: &[u32], skip: Option<u32>) -> Self {
        let mut places: Vec<u32> =
            (0u32..).zip(ids).filter(|(_, id)| Some(**id) != skip).map(|(n, _)| n).collect();
        // Stable: the tokens of one id stay in order.
        places.sort_by_key(|&n| ids[n as usize]);
        let (mut listed, mut starts) = (Vec::new(), Vec::new());
        for (at, &n) in (0u32..).zip(&places) {
            let id = ids[n as usize];
            if listed.last() != Some(&id) {
                listed.push(id);
                starts.push(at);
            }
        }
        starts.push(places.len() as u32);
        ById { ids: listed, starts, places }
    }

    fn upload(&self, device: &Device) -> Result<[Tensor; 3]> {
        Ok([list(&self.ids, device)?, list(&self.starts, device)?, list(&self.places, device)?])
    }
}

fn list(numbers: &[u32], device: &Device) -> Result<Tensor> {
    upload(numbers, numbers.len(), device)
}
