//! AdamW (arXiv 1711.05101), fused: one pass over parameter, gradient and both moments, in f32 and
//! in torch's order of operations. The clip coefficient is applied while the gradient is read.
//! Parameters stored in bf16 without an f32 master are rounded by [`StochasticRounding`]; gradients
//! may be bf16.

pub(super) mod cases;
pub(super) mod cuda;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::stochastic_rounding::{self, RUN, StochasticRounding};
use crate::backends::gpu;
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::copy::{copy_into, to_device};
use crate::runtime::cpu_tensor::{FloatElement, read, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// The constants of one update.
#[derive(Debug, Clone, Copy)]
pub struct AdamWStep {
    /// Learning rate of this update.
    pub learning_rate: f64,
    /// Decay rates of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// 1 for the first update.
    pub update: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f64,
}

/// A contiguous range of parameters to update.
#[derive(Debug, Clone, Copy)]
pub struct AdamWPiece<'a, M> {
    /// The parameters, f32 or bf16.
    pub param: &'a TensorMut,
    /// The bf16 copy used in forward and backward, if any: receives the rounded `param`.
    pub value: Option<&'a TensorMut>,
    /// The rounding of a `param` in bf16.
    pub rounding: StochasticRounding,
    /// Their gradients, f32 or bf16.
    pub grad: &'a Tensor,
    /// Moving averages of the gradients and of their squares.
    pub moments: [&'a M; 2],
    /// The constants of the update.
    pub step: AdamWStep,
}

impl<M> AdamWPiece<'_, M> {
    /// Runs `update` on host copies of the parameters and gradients, then copies the parameters
    /// back.
    pub(super) fn on_host(&self, update: impl FnOnce(&TensorMut, &Tensor) -> Result<()>) -> Result<()> {
        let (param, grad) = (to_device(self.param, &Device::Cpu)?, to_device(self.grad, &Device::Cpu)?);
        let param = TensorMut::new(param);
        update(&param, &grad)?;
        self.param.slice_set(&to_device(&param, self.param.device())?, 0, 0)?;
        self.round()
    }

    /// Rounds `param` into `value`.
    pub(super) fn round(&self) -> Result<()> {
        self.value.map_or(Ok(()), |value| copy_into(value, self.param))
    }
}

/// The constants of the loop, in f32.
#[derive(Clone, Copy)]
pub(super) struct Rates {
    decay: f32,
    step: f32,
    root: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    grad_scale: f32,
}

impl AdamWStep {
    pub(super) fn rates(&self) -> Rates {
        let correction1 = 1.0 - self.betas[0].powf(self.update as f64);
        let correction2 = 1.0 - self.betas[1].powf(self.update as f64);
        Rates {
            decay: (1.0 - self.learning_rate * self.weight_decay) as f32,
            step: (self.learning_rate / correction1) as f32,
            root: correction2.sqrt() as f32,
            beta1: self.betas[0] as f32,
            beta2: self.betas[1] as f32,
            eps: self.eps as f32,
            grad_scale: self.grad_scale as f32,
        }
    }
}

/// Elements per task.
const CHUNK: usize = 1 << 15;

/// Updates the parameters of all pieces and their moments in place. The tensors of a piece are
/// contiguous `[elements]`, on the one device of all pieces, and share no storage. Moments are f32,
/// `value` is bf16. On a GPU this is one launch.
///
/// # Errors
/// Fails if a tensor is not contiguous or of another type, or an operation of the device fails.
pub fn adamw(pieces: &[AdamWPiece<'_, TensorMut>]) -> Result<()> {
    let _span = span(|| update_info("adamw", pieces, 16));
    let Some(first) = pieces.first() else { return Ok(()) };
    if let Some(driver) = gpu::driver_of(first.param) {
        return cuda::adamw(driver, pieces);
    }
    pieces.iter().try_for_each(update_piece)
}

/// Returns the trace info of an update: the number of parameters, and the bytes read and written,
/// with `moments` bytes per parameter for its moments.
pub(super) fn update_info<M>(name: &'static str, pieces: &[AdamWPiece<'_, M>], moments: usize) -> SpanInfo {
    let count: usize = pieces.iter().map(|piece| piece.param.elem_count()).sum();
    let info = SpanInfo::op(name).dims(&[count]).bytes(count * moments);
    pieces.iter().fold(info, |info, piece| info.moves(&[piece.param, piece.param, piece.grad]))
}

fn update_piece(piece: &AdamWPiece<'_, TensorMut>) -> Result<()> {
    let &AdamWPiece { param, rounding, grad, moments, step, .. } = piece;
    if !param.device().is_cpu() {
        if param.dtype() == DType::F32 && grad.dtype() == DType::F32 {
            reference(param, grad, moments, &step)?;
            return piece.round();
        }
        let host = |moment: &TensorMut| -> Result<_> { Ok(TensorMut::new(to_device(moment, &Device::Cpu)?)) };
        let there = [host(moments[0])?, host(moments[1])?];
        let copies = [&there[0], &there[1]];
        piece.on_host(|param, grad| {
            update_piece(&AdamWPiece { param, value: None, rounding, grad, moments: copies, step })
        })?;
        return moments
            .iter()
            .zip(copies)
            .try_for_each(|(to, from)| copy_into(to, &to_device(from, to.device())?));
    }
    let rates = step.rates();
    with_elem!(param.dtype(), P => with_elem!(grad.dtype(), G => {
        let grad = read::<G>(grad)?;
        let grad: &[G] = &grad;
        update(param, |p: &mut [P]| {
            update(moments[0], |m: &mut [f32]| {
                update(moments[1], |v: &mut [f32]| {
                    let chunks = p.par_chunks_mut(CHUNK).zip(m.par_chunks_mut(CHUNK));
                    let chunks = chunks.zip(v.par_chunks_mut(CHUNK)).zip(grad.par_chunks(CHUNK));
                    chunks.enumerate().for_each(|(i, (((p, m), v), g))| {
                        update_runs(p, m, v, g, (rates, rounding.offset(i * CHUNK)));
                    });
                })
            })
        })???;
        Ok(())
    }))?;
    piece.round()
}

fn update_runs<P: Parameter, G: FloatElement>(
    p: &mut [P],
    m: &mut [f32],
    v: &mut [f32],
    g: &[G],
    (rates, rounding): (Rates, StochasticRounding),
) {
    for start in (0..p.len()).step_by(RUN) {
        let (here, next) = (start..p.len().min(start + RUN), start + RUN..p.len().min(start + 2 * RUN));
        // The arithmetic of a run, including its random bits, takes as long as loading the next
        // run.
        prefetch_all(m.get(next.clone()));
        prefetch_all(v.get(next.clone()));
        prefetch_all(p.get(next.clone()));
        prefetch_all(g.get(next));
        let (p, m, v) = (&mut p[here.clone()], &mut m[here.clone()], &mut v[here.clone()]);
        P::update(p, m, v, &g[here], (rates, rounding.offset(start)));
    }
}

fn prefetch_all<T>(values: Option<&[T]>) {
    for line in values.unwrap_or(&[]).chunks(64 / size_of::<T>()) {
        simd::prefetch(line.as_ptr());
    }
}

/// A storage type of parameters.
pub(super) trait Parameter: FloatElement {
    /// Updates at most [`RUN`] values and their moments.
    fn update<G: FloatElement>(
        p: &mut [Self],
        m: &mut [f32],
        v: &mut [f32],
        g: &[G],
        how: (Rates, StochasticRounding),
    );
}

impl Parameter for f32 {
    fn update<G: FloatElement>(
        p: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        g: &[G],
        (rates, _): (Rates, StochasticRounding),
    ) {
        update_f32(p, m, v, g, rates);
    }
}

impl Parameter for bf16 {
    fn update<G: FloatElement>(
        p: &mut [bf16],
        m: &mut [f32],
        v: &mut [f32],
        g: &[G],
        (rates, rounding): (Rates, StochasticRounding),
    ) {
        update_bf16(p, m, v, g, rounding, rates);
    }
}

impl Rates {
    /// Returns the updated parameter, and updates its moments.
    #[inline(always)]
    fn update(&self, p: f32, m: &mut f32, v: &mut f32, g: f32) -> f32 {
        let g = g * self.grad_scale;
        let p = p * self.decay;
        *m += (g - *m) * (1.0 - self.beta1);
        *v = *v * self.beta2 + g * g * (1.0 - self.beta2);
        p - self.step * (*m / (v.sqrt() / self.root + self.eps))
    }
}

vectorized! {
    fn update_f32<G: FloatElement>(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G], rates: Rates) {
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            *p = rates.update(*p, m, v, g.widen());
        }
    }
}

vectorized! {
    fn update_bf16<G: FloatElement>(
        p: &mut [bf16],
        m: &mut [f32],
        v: &mut [f32],
        g: &[G],
        rounding: StochasticRounding,
        rates: Rates,
    ) {
        let noise = rounding.noise(p.len());
        for ((((p, m), v), g), noise) in p.iter_mut().zip(m).zip(v).zip(g).zip(noise.as_flattened()) {
            *p = stochastic_rounding::round(rates.update(p.widen(), m, v, g.widen()), *noise);
        }
    }
}

/// The definition, in candle's primitives.
pub(crate) fn reference(
    param: &TensorMut,
    grad: &Tensor,
    moments: [&TensorMut; 2],
    options: &AdamWStep,
) -> Result<()> {
    let [beta1, beta2] = options.betas;
    let correction1 = 1.0 - beta1.powf(options.update as f64);
    let correction2 = 1.0 - beta2.powf(options.update as f64);
    let g = (grad * options.grad_scale)?;
    let m = ((&**moments[0] * beta1)? + (&g * (1.0 - beta1))?)?;
    let v = ((&**moments[1] * beta2)? + (g.sqr()? * (1.0 - beta2))?)?;
    let denominator = ((v.sqrt()? / correction2.sqrt())? + options.eps)?;
    let shrunk = (&**param * (1.0 - options.learning_rate * options.weight_decay))?;
    let p = (shrunk - ((&m / denominator)? * (options.learning_rate / correction1))?)?;
    param.slice_set(&p, 0, 0)?;
    moments[0].slice_set(&m, 0, 0)?;
    moments[1].slice_set(&v, 0, 0)?;
    Ok(())
}
