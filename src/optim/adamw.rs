//! AdamW over pieces of parameter memory, with moments in f32 or in 8 bits.

use candle_core::{DType, Device, Tensor};

use super::staging::UpdateStaging;
use crate::error::Result;
use crate::ops::adamw::{AdamW, adamw};
use crate::ops::adamw_int8::{Int8Moment, adamw_int8};
use crate::recipe::enums::StateDtype;
use crate::runtime::copy::zero;
use crate::runtime::param_storage::{ParamStorage, STAGING_ELEMENTS};

/// The constants of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerOptions {
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices and tables; norms and biases are never decayed.
    pub weight_decay: f64,
    /// How moments are kept.
    pub state: StateDtype,
}

/// Smaller parameters keep f32 moments (bitsandbytes' `min_8bit_size`).
pub const INT8_MIN_ELEMENTS: usize = 4096;

/// A run of parameter memory that is updated alike: f32 values and gradients, one-dimensional.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// What is updated in place.
    pub param: ParamStorage,
    /// Its gradient, on the device or, where state is offloaded, on the host.
    pub grad: Tensor,
    /// Weight decay applies.
    pub decay: bool,
    /// Factor on the learning rate (LoRA+ for B).
    pub rate: f64,
    /// Its moments may be kept in 8 bits: it is one tensor, or a shard of one, of [`INT8_MIN_ELEMENTS`] or more.
    pub large: bool,
}

/// Both moments of a piece: the mean of gradients and the mean of their squares.
#[derive(Debug, Clone)]
pub enum Moments {
    /// f32, as the piece.
    F32([Tensor; 2]),
    /// Codes and scales.
    Int8([Int8Moment; 2]),
}

impl Moments {
    fn zeros(group: &ParamGroup, dtype: StateDtype, device: &Device) -> Result<Self> {
        let len = group.param.elements();
        if dtype == StateDtype::Int8 && group.large {
            return Ok(Moments::Int8([Int8Moment::zeros(len)?, Int8Moment::zeros(len)?]));
        }
        let zeros = || -> Result<Tensor> {
            let zeros = Tensor::zeros(len, DType::F32, device)?;
            // Written here: a new page that is read before it is written costs two faults, and all threads a flush.
            zero(&zeros)?;
            Ok(zeros)
        };
        Ok(Moments::F32([zeros()?, zeros()?]))
    }
}

/// State beside the pieces it was made for.
#[derive(Debug)]
pub struct Optimizer {
    options: OptimizerOptions,
    groups: Vec<ParamGroup>,
    moments: Vec<Moments>,
    updates: u64,
    /// Where state is not on the device.
    staging: Option<UpdateStaging>,
}

impl Optimizer {
    /// Moments of zero for every piece, beside its gradient.
    ///
    /// # Errors
    /// When the moments find no memory.
    pub fn new(options: OptimizerOptions, groups: Vec<ParamGroup>) -> Result<Self> {
        let zeros = |group: &ParamGroup| Moments::zeros(group, options.state, group.grad.device());
        let moments = groups.iter().map(zeros).collect::<Result<_>>()?;
        Ok(Optimizer { options, groups, moments, updates: 0, staging: None })
    }

    /// Moments of zero in host memory, from where runs of at most `limit` values are brought to `device` and updated;
    /// none: [`STAGING_ELEMENTS`]. Pieces may be anywhere.
    ///
    /// # Errors
    /// When the moments or the staging buffers find no memory.
    pub fn offloaded(
        options: OptimizerOptions,
        groups: Vec<ParamGroup>,
        device: &Device,
        limit: Option<usize>,
    ) -> Result<Self> {
        let staging = UpdateStaging::new(device, options.state, &groups, limit.unwrap_or(STAGING_ELEMENTS))?;
        let zeros = |group: &ParamGroup| Moments::zeros(group, options.state, &Device::Cpu);
        let moments = groups.iter().map(zeros).collect::<Result<_>>()?;
        Ok(Optimizer { options, groups, moments, updates: 0, staging: Some(staging) })
    }

    /// Most values of a piece that were on the device at a time; 0 when nothing is offloaded.
    pub fn most_staged(&self) -> usize {
        self.staging.as_ref().map_or(0, UpdateStaging::most)
    }

    /// One update at this learning rate; gradients count `grad_scale` times.
    ///
    /// # Errors
    /// When an operation of the device or a copy between host and device fails.
    pub fn update(&mut self, learning_rate: f64, grad_scale: f64) -> Result<()> {
        self.updates += 1;
        for (group, moments) in self.groups.iter().zip(&self.moments) {
            let step = AdamW {
                learning_rate: learning_rate * group.rate,
                betas: self.options.betas,
                eps: self.options.eps,
                weight_decay: if group.decay { self.options.weight_decay } else { 0.0 },
                update: self.updates,
                grad_scale,
            };
            if let Some(staging) = &mut self.staging {
                staging.update(group, moments, &step)?;
                continue;
            }
            let param = group.param.tensor()?;
            match moments {
                Moments::F32([first, second]) => adamw(param, &group.grad, [first, second], &step)?,
                Moments::Int8([first, second]) => adamw_int8(param, &group.grad, [first, second], &step)?,
            }
        }
        Ok(())
    }

    /// Updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The state to save: both moments of each piece, in order.
    pub fn moments(&self) -> &[Moments] {
        &self.moments
    }

    /// Goes on after `updates` updates with moments already put in place through [`Optimizer::moments`].
    pub fn resume(&mut self, updates: u64) {
        self.updates = updates;
    }
}
