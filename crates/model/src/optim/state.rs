//! The state that an optimizer keeps for each parameter: a list of named tensors, each in f32 or in
//! 8 bits.

use candle_core::{DType, Device};

use crate::error::{Error, Result};
use crate::ops::adamw_int8::{Int8State, STATE_BLOCK};
use crate::recipe::enums::StateDtype;
use crate::runtime::TensorMut;
use crate::runtime::copy::zero;
use crate::runtime::param_storage::copy_across;

/// One state tensor of an optimizer, in the parameter's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name, the same as in torch if torch has it: a checkpoint calls it `<parameter>.<name>`.
    pub name: &'static str,
    /// True if an update supports 8-bit values of it.
    pub may_be_int8: bool,
}

/// The state tensors of a parameter and their dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateLayout {
    /// The tensors, in the order in which an update expects them.
    pub tensors: &'static [StateTensor],
    /// The dtype of large parameters' tensors, if they support it.
    pub dtype: StateDtype,
}

/// Smaller parameters keep their state in f32 (bitsandbytes' `min_8bit_size`).
pub(crate) const INT8_MIN_ELEMENTS: usize = 4096;

impl StateLayout {
    /// Returns whether the state of a parameter of `elements` elements is kept in 8 bits, if its
    /// tensors support it.
    pub fn is_int8(&self, elements: usize) -> bool {
        self.dtype == StateDtype::Int8 && elements >= INT8_MIN_ELEMENTS
    }

    /// Returns the dtype of `tensor` for a parameter of `elements` elements.
    pub fn dtype_of(&self, tensor: &StateTensor, elements: usize) -> StateDtype {
        if tensor.may_be_int8 && self.is_int8(elements) { StateDtype::Int8 } else { StateDtype::F32 }
    }

    /// Returns the bytes of the state of a parameter of `elements` elements.
    pub fn bytes(&self, elements: usize) -> usize {
        let bytes = |tensor: &StateTensor| match self.dtype_of(tensor, elements) {
            StateDtype::F32 => 4 * elements,
            StateDtype::Int8 => elements + 4 * elements.div_ceil(STATE_BLOCK),
        };
        self.tensors.iter().map(bytes).sum()
    }
}

/// The values of one state tensor for a run of parameter memory. A clone shares the memory.
#[derive(Debug, Clone)]
pub enum StateValues {
    /// One f32 for each parameter.
    F32(TensorMut),
    /// Codes with one scale per block.
    Int8(Int8State),
}

impl StateValues {
    /// Allocates zeros for `len` parameters on `device`.
    pub(super) fn zeros(len: usize, dtype: StateDtype, device: &Device) -> Result<Self> {
        if dtype == StateDtype::Int8 {
            return Ok(StateValues::Int8(Int8State::zeros(len, device)?));
        }
        let zeros = TensorMut::zeros(len, DType::F32, device)?;
        // Written here: reading a new page before writing it costs two page faults, and a flush on
        // all threads.
        zero(&zeros)?;
        Ok(StateValues::F32(zeros))
    }

    /// Returns the values of the `len` parameters from `start` on, which begins a block; they share
    /// the memory.
    pub(super) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        Ok(match self {
            StateValues::F32(values) => StateValues::F32(values.narrow(0, start, len)?),
            StateValues::Int8(Int8State { codes, absmax }) => StateValues::Int8(Int8State {
                codes: codes.narrow(0, start, len)?,
                absmax: absmax.narrow(0, start / STATE_BLOCK, len.div_ceil(STATE_BLOCK))?,
            }),
        })
    }

    /// Copies the values to `to`, on any device, with the same length and dtype.
    pub(super) fn copy_to(&self, to: &StateValues) -> Result<()> {
        match (self, to) {
            (StateValues::F32(from), StateValues::F32(to)) => copy_across(from, to),
            (StateValues::Int8(from), StateValues::Int8(to)) => {
                copy_across(&from.codes, &to.codes)?;
                copy_across(&from.absmax, &to.absmax)
            }
            _ => Err(Error::internal("cannot copy between a state in f32 and one in 8 bits")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_the_size_of_the_parameter() {
        const TENSORS: [StateTensor; 2] = [
            StateTensor { name: "large", may_be_int8: true },
            StateTensor { name: "exact", may_be_int8: false },
        ];
        let layout = |dtype| StateLayout { tensors: &TENSORS, dtype };
        assert_eq!(layout(StateDtype::F32).bytes(5000), 2 * 4 * 5000);
        assert_eq!(layout(StateDtype::Int8).bytes(4095), 2 * 4 * 4095);
        assert_eq!(layout(StateDtype::Int8).bytes(5000), 5000 + 4 * 20 + 4 * 5000);
    }
}
