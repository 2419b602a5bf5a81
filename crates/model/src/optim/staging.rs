//! Updates of values in host memory. Short runs of values, gradients and state are copied to the
//! device, updated there by the same operation, and copied back. The result equals an update in
//! place bit for bit, and for any model size the device holds one run of each.

use candle_core::{DType, Device};

use super::algorithm::{OptimizerAlgorithm, UpdatePiece, UpdateStep};
use super::param_group::ParamGroup;
use super::state::{StateLayout, StateValues};
use crate::error::{Error, Result};
use crate::ops::adamw_int8::STATE_BLOCK;
use crate::recipe::enums::StateDtype;
use crate::runtime::TensorMut;
use crate::runtime::param_storage::copy_across;

/// Buffers for one run of each on the device.
#[derive(Debug)]
pub(super) struct UpdateStaging {
    /// One buffer for each dtype of parameters.
    params: Vec<TensorMut>,
    /// One buffer for each dtype of gradients.
    grads: Vec<TensorMut>,
    /// For each state tensor, one buffer for each dtype that it may have.
    state: Vec<Vec<StateValues>>,
    /// The most values of a run: whole blocks of an 8-bit state.
    limit: usize,
    /// The most values that a run has had.
    most: usize,
}

impl UpdateStaging {
    /// Allocates memory on `device` for runs of at most `limit` values of `groups`.
    pub(super) fn new(
        device: &Device,
        layout: StateLayout,
        groups: &[ParamGroup],
        limit: usize,
    ) -> Result<Self> {
        let longest = groups.iter().map(|group| group.param.elements()).max().unwrap_or(0);
        let limit = limit.min(longest).next_multiple_of(STATE_BLOCK).max(STATE_BLOCK);
        let zeros = |dtype| TensorMut::zeros(limit, dtype, device);
        let each = |dtypes: Vec<DType>| dtypes.into_iter().map(zeros).collect::<Result<Vec<_>>>();
        let params = each(dtypes(groups.iter().map(|group| group.param.dtype())))?;
        let grads = each(dtypes(groups.iter().map(|group| group.grad.dtype())))?;
        let mut state = Vec::with_capacity(layout.tensors.len());
        for tensor in layout.tensors {
            let mut staged = vec![StateValues::F32(zeros(DType::F32)?)];
            if layout.dtype == StateDtype::Int8 && tensor.may_be_int8 {
                staged.push(StateValues::zeros(limit, StateDtype::Int8, device)?);
            }
            state.push(staged);
        }
        Ok(UpdateStaging { params, grads, state, limit, most: 0 })
    }

    /// Returns the most values that a run has had.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Updates a piece, run after run.
    pub(super) fn update(
        &mut self,
        group: &ParamGroup,
        state: &[StateValues],
        algorithm: &dyn OptimizerAlgorithm,
        step: UpdateStep,
    ) -> Result<()> {
        let len = group.param.elements();
        for start in (0..len).step_by(self.limit) {
            let run = self.limit.min(len - start);
            self.most = self.most.max(run);
            let at_home = group.param.narrow(start, run)?;
            let param = of_dtype(&self.params, at_home.dtype())?.narrow(0, 0, run)?;
            let grad = of_dtype(&self.grads, group.grad.dtype())?.narrow(0, 0, run)?;
            at_home.load_to(&param)?;
            copy_across(&group.grad.narrow(0, start, run)?, &grad)?;
            let state_at_home =
                state.iter().map(|values| values.narrow(start, run)).collect::<Result<Vec<_>>>()?;
            let staged = self.staged(state, run)?;
            for (from, to) in state_at_home.iter().zip(&staged) {
                from.copy_to(to)?;
            }
            algorithm.update(&[UpdatePiece {
                param: &param,
                value: None,
                rounding: group.rounding_of(step.update).offset(start),
                grad: &grad,
                state: &staged,
                step,
            }])?;
            for (from, to) in staged.iter().zip(&state_at_home) {
                from.copy_to(to)?;
            }
            at_home.store_from(&param)?;
        }
        Ok(())
    }

    /// Returns the buffers for a run of `len` values of `state`, in the same dtypes.
    fn staged(&self, state: &[StateValues], len: usize) -> Result<Vec<StateValues>> {
        let alike = |(values, staged): (&StateValues, &Vec<StateValues>)| {
            let kept_alike =
                |other: &&StateValues| std::mem::discriminant(*other) == std::mem::discriminant(values);
            let staged = staged.iter().find(kept_alike);
            staged.ok_or_else(|| Error::internal("an optimizer's state without staging"))?.narrow(0, len)
        };
        state.iter().zip(&self.state).map(alike).collect()
    }
}

/// Returns each dtype among `all` once.
fn dtypes(all: impl Iterator<Item = DType>) -> Vec<DType> {
    all.fold(Vec::new(), |mut distinct, dtype| {
        if !distinct.contains(&dtype) {
            distinct.push(dtype);
        }
        distinct
    })
}

/// Returns the one of `runs` with this dtype.
fn of_dtype(runs: &[TensorMut], dtype: DType) -> Result<&TensorMut> {
    let run_of_dtype = runs.iter().find(|run| run.dtype() == dtype);
    run_of_dtype.ok_or_else(|| Error::internal("values without staging"))
}
