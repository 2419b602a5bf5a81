//! AdamW with both moments in 8 bits (arXiv 2110.02861): codes of bitsandbytes' dynamic maps in blocks of
//! [`STATE_BLOCK`], one f32 scale a block. A block is widened, updated and rounded again in one visit; the parameter
//! is updated from the widened moments, as in bitsandbytes' AdamW8bit.

pub(super) mod cases;
mod cuda;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::adamw::{AdamWStep, update_chunk};
use super::gpu;
use crate::error::Result;
use crate::quant::DynamicMap;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{read, update};

/// Values that share a scale.
pub const STATE_BLOCK: usize = 256;

/// One tensor of an optimizer's state in 8 bits, of a run of parameters.
#[derive(Debug, Clone)]
pub struct Int8State {
    /// u8, one per parameter.
    pub codes: TensorMut,
    /// f32, one per block.
    pub absmax: TensorMut,
}

impl Int8State {
    /// Zeros for `len` parameters. They live on the host whatever the parameters are on.
    ///
    /// # Errors
    /// When the host has not enough memory.
    pub fn zeros(len: usize) -> Result<Self> {
        let zeros = |len, dtype| TensorMut::zeros(len, dtype, &Device::Cpu);
        Ok(Int8State {
            codes: zeros(len, candle_core::DType::U8)?,
            absmax: zeros(len.div_ceil(STATE_BLOCK), candle_core::DType::F32)?,
        })
    }
}

/// Updates `param` and its moments (mean of gradients, mean of their squares) in place. `param` and `grad` are
/// contiguous f32 of the same shape; off the CPU they pass through the host.
///
/// # Errors
/// When `param` or `grad` is not contiguous f32, or a copy to or from the device fails.
pub fn adamw_int8(
    param: &TensorMut,
    grad: &Tensor,
    moments: [&Int8State; 2],
    options: &AdamWStep,
) -> Result<()> {
    if let Some(driver) = gpu::driver_of(param)
        && moments.iter().all(|moment| moment.codes.device().same_device(param.device()))
    {
        return cuda::adamw_int8(driver, param, grad, moments, options);
    }
    if !param.device().is_cpu() {
        let host = TensorMut::new(param.to_device(&Device::Cpu)?);
        adamw_int8(&host, &grad.to_device(&Device::Cpu)?, moments, options)?;
        return Ok(param.slice_set(&host.to_device(param.device())?, 0, 0)?);
    }
    let grad = read::<f32>(grad)?;
    let grad: &[f32] = &grad;
    let rates = options.rates();
    let (maps, [first, second]) = ([DynamicMap::signed(), DynamicMap::unsigned()], moments);
    update(param, |p: &mut [f32]| {
        update(&first.codes, |c1: &mut [u8]| {
            update(&second.codes, |c2: &mut [u8]| {
                update(&first.absmax, |a1: &mut [f32]| {
                    update(&second.absmax, |a2: &mut [f32]| {
                        let codes = c1.par_chunks_mut(STATE_BLOCK).zip(c2.par_chunks_mut(STATE_BLOCK));
                        let states = codes.zip(a1.par_iter_mut()).zip(a2.par_iter_mut());
                        let values = p.par_chunks_mut(STATE_BLOCK).zip(grad.par_chunks(STATE_BLOCK));
                        values.zip(states).with_min_len(8).for_each(|((p, g), (((c1, c2), a1), a2))| {
                            let (mut m, mut v) = ([0f32; STATE_BLOCK], [0f32; STATE_BLOCK]);
                            let (m, v) = (&mut m[..p.len()], &mut v[..p.len()]);
                            widen(m, c1, *a1, maps[0]);
                            widen(v, c2, *a2, maps[1]);
                            update_chunk(p, m, v, g, rates);
                            *a1 = maps[0].quantize(m, c1);
                            *a2 = maps[1].quantize(v, c2);
                        });
                    })
                })
            })
        })
    })????
}

fn widen(values: &mut [f32], codes: &[u8], absmax: f32, map: &DynamicMap) {
    let map = map.values();
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = map[usize::from(code)] * absmax;
    }
}
