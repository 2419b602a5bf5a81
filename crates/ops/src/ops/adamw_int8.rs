//! AdamW with both moments in 8 bits (arXiv 2110.02861): codes of bitsandbytes' dynamic maps in
//! blocks of [`STATE_BLOCK`], with one f32 scale per block. One visit dequantizes, updates and
//! quantizes a block; the parameter is updated from the dequantized moments, as in bitsandbytes'
//! AdamW8bit.

pub(super) mod cases;
mod cuda;

use candle_core::Device;
use rayon::prelude::*;

use super::adamw::{AdamWPiece, Parameter, update_info};
use super::stochastic_rounding::RUN;
use crate::backends::gpu;
use crate::error::Result;
use crate::quant::DynamicMap;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::{FloatElement, read, update, with_elem};
use crate::runtime::trace::span;

/// Number of values that share a scale.
pub const STATE_BLOCK: usize = 256;

/// One 8-bit moment of a range of parameters.
#[derive(Debug, Clone)]
pub struct Int8State {
    /// u8, one per parameter.
    pub codes: TensorMut,
    /// f32, one per block.
    pub absmax: TensorMut,
}

impl Int8State {
    /// Returns the state of `len` parameters, filled with zeros.
    ///
    /// # Errors
    /// Fails if the device has not enough memory.
    pub fn zeros(len: usize, device: &Device) -> Result<Self> {
        let zeros = |len, dtype| TensorMut::zeros(len, dtype, device);
        Ok(Int8State {
            codes: zeros(len, candle_core::DType::U8)?,
            absmax: zeros(len.div_ceil(STATE_BLOCK), candle_core::DType::F32)?,
        })
    }

    /// Returns a copy on the host.
    fn to_host(&self) -> Result<Self> {
        let copy = |tensor: &TensorMut| -> Result<_> { Ok(TensorMut::new(to_device(tensor, &Device::Cpu)?)) };
        Ok(Int8State { codes: copy(&self.codes)?, absmax: copy(&self.absmax)? })
    }

    /// Copies the values of `from` into this state.
    fn store_from(&self, from: &Self) -> Result<()> {
        for (here, from) in [(&self.codes, &from.codes), (&self.absmax, &from.absmax)] {
            here.slice_set(&to_device(from, here.device())?, 0, 0)?;
        }
        Ok(())
    }
}

/// Updates the parameters of all pieces and their moments in place. Parameters and gradients of a
/// piece are contiguous and of one shape, and all tensors are on one device. On a GPU this is one
/// launch; a device without kernels updates on the host.
///
/// # Errors
/// Fails if a parameter or gradient is not contiguous f32 or bf16, or a copy to or from the device
/// fails.
pub fn adamw_int8(pieces: &[AdamWPiece<'_, Int8State>]) -> Result<()> {
    let _span = span(|| update_info("adamw_int8", pieces, 4));
    let Some(first) = pieces.first() else { return Ok(()) };
    if let Some(driver) = gpu::driver_of(first.param) {
        return cuda::adamw_int8(driver, pieces);
    }
    pieces.iter().try_for_each(update_piece)
}

fn update_piece(piece: &AdamWPiece<'_, Int8State>) -> Result<()> {
    let &AdamWPiece { param, rounding, grad, moments, step, .. } = piece;
    if !param.device().is_cpu() {
        let there = [moments[0].to_host()?, moments[1].to_host()?];
        let copies = [&there[0], &there[1]];
        piece.on_host(|param, grad| {
            update_piece(&AdamWPiece { param, value: None, rounding, grad, moments: copies, step })
        })?;
        return moments.iter().zip(copies).try_for_each(|(to, from)| to.store_from(from));
    }
    with_elem!(param.dtype(), P => with_elem!(grad.dtype(), G => update_on_cpu::<P, G>(piece)))?;
    piece.round()
}

fn update_on_cpu<P: Parameter, G: FloatElement>(piece: &AdamWPiece<'_, Int8State>) -> Result<()> {
    let &AdamWPiece { param, rounding, grad, moments: [first, second], step, .. } = piece;
    let grad = read::<G>(grad)?;
    let grad: &[G] = &grad;
    let rates = step.rates();
    let maps = [DynamicMap::signed(), DynamicMap::unsigned()];
    update(param, |p: &mut [P]| {
        update(&first.codes, |c1: &mut [u8]| {
            update(&second.codes, |c2: &mut [u8]| {
                update(&first.absmax, |a1: &mut [f32]| {
                    update(&second.absmax, |a2: &mut [f32]| {
                        let codes = c1.par_chunks_mut(STATE_BLOCK).zip(c2.par_chunks_mut(STATE_BLOCK));
                        let states = codes.zip(a1.par_iter_mut()).zip(a2.par_iter_mut());
                        let values = p.par_chunks_mut(STATE_BLOCK).zip(grad.par_chunks(STATE_BLOCK));
                        let blocks = values.zip(states).enumerate().with_min_len(8);
                        blocks.for_each(|(i, ((p, g), (((c1, c2), a1), a2)))| {
                            let (mut m, mut v) = ([0f32; STATE_BLOCK], [0f32; STATE_BLOCK]);
                            let (m, v) = (&mut m[..p.len()], &mut v[..p.len()]);
                            widen(m, c1, *a1, maps[0]);
                            widen(v, c2, *a2, maps[1]);
                            P::update(p, m, v, g, (rates, rounding.offset(i * STATE_BLOCK)));
                            *a1 = maps[0].quantize(m, c1);
                            *a2 = maps[1].quantize(v, c2);
                        });
                    })
                })
            })
        })
    })?????;
    Ok(())
}

const _: () = assert!(STATE_BLOCK == RUN, "a block of state is one run");

fn widen(values: &mut [f32], codes: &[u8], absmax: f32, map: &DynamicMap) {
    let map = map.values();
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = map[usize::from(code)] * absmax;
    }
}
