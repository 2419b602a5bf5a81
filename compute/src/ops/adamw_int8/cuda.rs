//! AdamW with moments in 8 bits by the kernel of `kernels/adamw.cu`: a warp takes a block of state.

use candle_core::{Device, Tensor};

use super::{AdamWStep, Int8State, STATE_BLOCK};
use crate::error::Result;
use crate::ops::adamw::cuda::{Piece, upload_rates};
use crate::ops::gpu::{Driver, In, InOut, LaunchShape, kernels};
use crate::quant::DynamicMap;
use crate::runtime::TensorMut;

/// Values that a block updates: 64 blocks of state.
const CHUNK: usize = 64 * STATE_BLOCK;

pub(super) fn adamw_int8(
    driver: &dyn Driver,
    param: &TensorMut,
    grad: &Tensor,
    [mean, square]: [&Int8State; 2],
    options: &AdamWStep,
) -> Result<()> {
    let (count, device) = (param.elem_count(), param.device());
    let codes = |state: &Int8State| -> Result<u64> { Ok(InOut::<u8>::all(&state.codes)?.arg().value) };
    let scales = |state: &Int8State| -> Result<u64> { Ok(InOut::<f32>::all(&state.absmax)?.arg().value) };
    let state = [codes(mean)?, codes(square)?];
    let piece = Piece { count, state, scales: [scales(mean)?, scales(square)?] };
    let blocks = count.div_ceil(CHUNK);
    let (piece, rates) = (piece.upload(param, grad, blocks)?, upload_rates(options, device)?);
    let tables = [upload(DynamicMap::signed(), device)?, upload(DynamicMap::unsigned(), device)?];
    kernels::adamw_int8(
        driver,
        LaunchShape::line(blocks, 256),
        In::all(&piece[0])?,
        In::all(&piece[1])?,
        1,
        In::all(&rates[0])?,
        In::all(&rates[1])?,
        In::all(&tables[0].0)?,
        In::all(&tables[0].1)?,
        In::all(&tables[1].0)?,
        In::all(&tables[1].1)?,
    )
}

/// A map as the kernel reads it: values and limits, and the bytes of its index.
fn upload(map: &DynamicMap, device: &Device) -> Result<(Tensor, Tensor)> {
    let (numbers, mut starts) = ([map.values().as_slice(), map.limits()].concat(), map.starts().to_vec());
    starts.resize(starts.len().next_multiple_of(4), 0);
    let (count, bytes) = (numbers.len(), starts.len());
    Ok((Tensor::from_vec(numbers, count, device)?, Tensor::from_vec(starts, bytes, device)?))
}
