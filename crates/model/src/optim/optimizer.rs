//! The optimizer: an algorithm over pieces of parameter memory, and their state.

use std::sync::Arc;

use candle_core::Device;

use super::adamw::AdamW;
use super::algorithm::{OptimizerAlgorithm, UpdatePiece, UpdateStep};
use super::param_group::ParamGroup;
use super::staging::UpdateStaging;
use super::state::{StateLayout, StateTensor, StateValues};
use crate::error::Result;
use crate::recipe::OptimizerSection;
use crate::recipe::enums::{OptimizerKind, StateDtype};
use crate::runtime::copy::copy_into;
use crate::runtime::param_storage::STAGING_ELEMENTS;

/// The options of a run's optimizer.
#[derive(Debug, Clone)]
pub struct OptimizerOptions {
    /// The algorithm with its constants.
    pub algorithm: Arc<dyn OptimizerAlgorithm>,
    /// Weight decay of matrices and tables; norms and biases are never decayed.
    pub weight_decay: f64,
    /// The dtype of the state of large parameters.
    pub state: StateDtype,
}

impl OptimizerOptions {
    /// Returns the layout of a parameter's state.
    pub fn state_layout(&self) -> StateLayout {
        StateLayout { tensors: self.algorithm.state(), dtype: self.state }
    }
}

impl From<&OptimizerSection> for OptimizerOptions {
    fn from(section: &OptimizerSection) -> Self {
        let algorithm = match section.kind {
            OptimizerKind::Adamw => Arc::new(AdamW { betas: section.betas, eps: section.eps }),
        };
        OptimizerOptions { algorithm, weight_decay: section.weight_decay, state: section.state }
    }
}

/// An optimizer and the state of its pieces.
#[derive(Debug)]
pub struct Optimizer {
    options: OptimizerOptions,
    groups: Vec<ParamGroup>,
    /// By piece, then in the order of the algorithm.
    states: Vec<Vec<StateValues>>,
    updates: u64,
    /// Staging buffers, if state is not on the device.
    staging: Option<UpdateStaging>,
}

impl Optimizer {
    /// Creates a state of zeros for every piece, on the device of its gradient.
    ///
    /// # Errors
    /// The memory does not suffice for the state.
    pub fn new(options: OptimizerOptions, groups: Vec<ParamGroup>) -> Result<Self> {
        let zeros = |group: &ParamGroup| zeros(group, options.state_layout(), group.grad.device());
        let states = groups.iter().map(zeros).collect::<Result<_>>()?;
        Ok(Optimizer { options, groups, states, updates: 0, staging: None })
    }

    /// Creates a state of zeros in host memory. Runs of at most `limit` values (default
    /// [`STAGING_ELEMENTS`]) are copied to `device` and updated there. Pieces may be on any device.
    ///
    /// # Errors
    /// The memory does not suffice for the state or the staging buffers.
    pub fn offloaded(
        options: OptimizerOptions,
        groups: Vec<ParamGroup>,
        device: &Device,
        limit: Option<usize>,
    ) -> Result<Self> {
        let layout = options.state_layout();
        let staging = UpdateStaging::new(device, layout, &groups, limit.unwrap_or(STAGING_ELEMENTS))?;
        let zeros = |group: &ParamGroup| zeros(group, layout, &Device::Cpu);
        let states = groups.iter().map(zeros).collect::<Result<_>>()?;
        Ok(Optimizer { options, groups, states, updates: 0, staging: Some(staging) })
    }

    /// Returns the most values of a piece that were on the device at a time; 0 without offloading.
    pub fn most_staged(&self) -> usize {
        self.staging.as_ref().map_or(0, UpdateStaging::most)
    }

    /// Runs one update at this learning rate, with gradients multiplied by `grad_scale`.
    ///
    /// # Errors
    /// An operation of the device, or a copy between host and device, fails.
    pub fn update(&mut self, learning_rate: f64, grad_scale: f64) -> Result<()> {
        self.updates += 1;
        let OptimizerOptions { algorithm, weight_decay, .. } = &self.options;
        let step = |group: &ParamGroup| UpdateStep {
            learning_rate: learning_rate * group.rate,
            weight_decay: if group.decay { *weight_decay } else { 0.0 },
            update: self.updates,
            grad_scale,
        };
        let mut all = self.groups.iter().zip(&self.states);
        if let Some(staging) = &mut self.staging {
            return all
                .try_for_each(|(group, state)| staging.update(group, state, &**algorithm, step(group)));
        }
        let pieces = all.map(|(group, state)| {
            let value = group.value.as_ref().filter(|_| algorithm.writes_value());
            let (param, grad) = (group.param.tensor()?, &group.grad);
            let step = step(group);
            Ok(UpdatePiece { param, value, rounding: group.rounding_of(step.update), grad, state, step })
        });
        algorithm.update(&pieces.collect::<Result<Vec<_>>>()?)?;
        if algorithm.writes_value() {
            return Ok(());
        }
        let with_value = self.groups.iter().filter_map(|group| Some((group.value.as_ref()?, &group.param)));
        with_value.into_iter().try_for_each(|(value, param)| copy_into(value, param.tensor()?))
    }

    /// Returns the number of updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Returns the layout of a parameter's state.
    pub fn state_layout(&self) -> StateLayout {
        self.options.state_layout()
    }

    /// Returns the state of each piece, in order: the tensors of [`Optimizer::state_layout`].
    pub fn states(&self) -> &[Vec<StateValues>] {
        &self.states
    }

    /// Continues after `updates` updates, with a state already written through
    /// [`Optimizer::states`].
    pub fn resume(&mut self, updates: u64) {
        self.updates = updates;
    }
}

fn zeros(group: &ParamGroup, layout: StateLayout, device: &Device) -> Result<Vec<StateValues>> {
    let len = group.param.elements();
    let zeros = |tensor: &StateTensor| {
        let dtype = if group.large && tensor.may_be_int8 { layout.dtype } else { StateDtype::F32 };
        StateValues::zeros(len, dtype, device)
    };
    layout.tensors.iter().map(zeros).collect()
}
