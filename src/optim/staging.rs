//! Updates of what lives in host memory: short runs of values, gradients and moments are brought to the device, updated
//! there by the same operation, and taken back. So the result is to the bit that of an update in place, and the device
//! holds no more than one run of each, whatever the model's size.

use candle_core::{DType, Device, Tensor};

use super::{MomentDtype, Moments, ParamGroup};
use crate::error::{Error, Result};
use crate::ops::adamw::{AdamW, adamw};
use crate::ops::adamw_int8::{Int8Moment, STATE_BLOCK, adamw_int8};
use crate::runtime::param_storage::copy_across;

/// One run of each on the device.
#[derive(Debug)]
pub(super) struct UpdateStaging {
    param: Tensor,
    grad: Tensor,
    f32s: [Tensor; 2],
    int8s: Option<[Int8Moment; 2]>,
    /// Most values that a run may have: whole blocks of 8-bit moments.
    limit: usize,
    /// Most values that a run has had.
    most: usize,
}

impl UpdateStaging {
    /// Memory on `device` for runs of at most `limit` values of `groups`.
    pub(super) fn new(
        device: &Device,
        state: MomentDtype,
        groups: &[ParamGroup],
        limit: usize,
    ) -> Result<Self> {
        let longest = groups.iter().map(|group| group.param.elements()).max().unwrap_or(0);
        let limit = limit.min(longest).next_multiple_of(STATE_BLOCK).max(STATE_BLOCK);
        let zeros = || Tensor::zeros(limit, DType::F32, device);
        let int8s = match state {
            MomentDtype::F32 => None,
            MomentDtype::Int8 => Some([Int8Moment::zeros(limit)?, Int8Moment::zeros(limit)?]),
        };
        let f32s = [zeros()?, zeros()?];
        Ok(UpdateStaging { param: zeros()?, grad: zeros()?, f32s, int8s, limit, most: 0 })
    }

    /// Most values that a run has had.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Updates a piece, run after run.
    pub(super) fn update(&mut self, group: &ParamGroup, moments: &Moments, step: &AdamW) -> Result<()> {
        let len = group.param.elements();
        for start in (0..len).step_by(self.limit) {
            let run = self.limit.min(len - start);
            self.most = self.most.max(run);
            let first = |staged: &Tensor| staged.narrow(0, 0, run);
            let (at_home, param, grad) =
                (group.param.narrow(start, run)?, first(&self.param)?, first(&self.grad)?);
            at_home.load_to(&param)?;
            copy_across(&group.grad.narrow(0, start, run)?, &grad)?;
            match (moments, &self.int8s) {
                (Moments::Int8(at_home), Some(staged)) => {
                    let at_home = [part(&at_home[0], start, run)?, part(&at_home[1], start, run)?];
                    let staged = [part(&staged[0], 0, run)?, part(&staged[1], 0, run)?];
                    between(&at_home, &staged)?;
                    adamw_int8(&param, &grad, [&staged[0], &staged[1]], step)?;
                    between(&staged, &at_home)?;
                }
                (Moments::Int8(_), None) => return Err(Error::internal("8-bit moments without staging")),
                (Moments::F32(both), _) => {
                    let staged = [first(&self.f32s[0])?, first(&self.f32s[1])?];
                    for (moment, staged) in both.iter().zip(&staged) {
                        copy_across(&moment.narrow(0, start, run)?, staged)?;
                    }
                    adamw(&param, &grad, [&staged[0], &staged[1]], step)?;
                    for (moment, staged) in both.iter().zip(&staged) {
                        copy_across(staged, &moment.narrow(0, start, run)?)?;
                    }
                }
            }
            at_home.store_from(&param)?;
        }
        Ok(())
    }
}

/// The moments of the `len` values from `start` on, which is where a block begins.
fn part(moment: &Int8Moment, start: usize, len: usize) -> Result<Int8Moment> {
    Ok(Int8Moment {
        codes: moment.codes.narrow(0, start, len)?,
        absmax: moment.absmax.narrow(0, start / STATE_BLOCK, len.div_ceil(STATE_BLOCK))?,
    })
}

fn between(from: &[Int8Moment; 2], to: &[Int8Moment; 2]) -> Result<()> {
    for (from, to) in from.iter().zip(to) {
        copy_across(&from.codes, &to.codes)?;
        copy_across(&from.absmax, &to.absmax)?;
    }
    Ok(())
}
