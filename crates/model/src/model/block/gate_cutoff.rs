//! A cut-off of an MLP's gates (Gemma 3n), forward and backward: of each token, the gates above
//! their mean plus some standard deviations stay, less this sum.
//!
//! ```text
//! y = max(0, x − mean(x) − deviations · std(x))
//! ```

use candle_core::{DType, Tensor};

use super::streams::join;
use crate::error::Result;
use crate::runtime::copy::converted;

/// A divisor of a gradient that is 0 anyway: that of equal gates.
const TINY: f64 = 1e-30;

/// The statistics of the gates of each token, `[N, 1]` f32.
struct GateStatistics {
    /// The gates minus their mean, `[N, F]` f32.
    centred: Tensor,
    std: Tensor,
}

impl GateStatistics {
    fn of(gates: &Tensor) -> Result<Self> {
        let centred = gates.broadcast_sub(&gates.mean_keepdim(1)?)?;
        let std = centred.sqr()?.mean_keepdim(1)?.sqrt()?;
        Ok(GateStatistics { centred, std })
    }

    /// Returns the gates minus their cut-off.
    fn above(&self, deviations: f64) -> Result<Tensor> {
        Ok(self.centred.broadcast_sub(&(&self.std * deviations)?)?)
    }
}

/// Returns the gates and ups `[N, 2F]` with the gates, the first half, cut off.
pub(super) fn cut_off(gate_up: &Tensor, deviations: f64) -> Result<Tensor> {
    let [gates, ups] = halves(gate_up)?;
    let cut = GateStatistics::of(&gates)?.above(deviations)?.relu()?;
    join(&[cut, ups], gate_up.dtype())
}

/// Returns the gradient of `gate_up: [N, 2F]` from that of [`cut_off`].
pub(super) fn cut_off_backward(gate_up: &Tensor, d: &Tensor, deviations: f64) -> Result<Tensor> {
    let ([gates, _], [dgates, dups]) = (halves(gate_up)?, halves(d)?);
    let width = gates.dim(1)? as f64;
    let statistics = GateStatistics::of(&gates)?;
    let stays = statistics.above(deviations)?.gt(0f64)?.to_dtype(DType::F32)?;
    let d = (dgates * stays)?;
    // Every gate moves the mean and the deviation, which all that stay lose.
    let share = (d.sum_keepdim(1)? * (-1.0 / width))?;
    let slope = ((&share * deviations)? / statistics.std.maximum(TINY)?)?;
    let d = (d.broadcast_add(&share)? + statistics.centred.broadcast_mul(&slope)?)?;
    join(&[d, dups], gate_up.dtype())
}

/// Returns both halves of the columns, f32.
fn halves(x: &Tensor) -> Result<[Tensor; 2]> {
    let width = x.dim(1)? / 2;
    let half = |start| -> Result<Tensor> { converted(&x.narrow(1, start, width)?.contiguous()?, DType::F32) };
    Ok([half(0)?, half(width)?])
}
