//! The probe: the registers that every instruction used by kernels leaves in each lane, on coded
//! inputs.
//!
//! The emulator models these instructions, and all kernels are tested on it, so a GPU must do what
//! the emulator does. The binary contains a recorded dump of the emulator, and a GPU's dump is
//! compared with it. Tests compare the emulator with every dump in `tests/golden`, and the recorded
//! dump with the manuals' specification. The kernels are `kernels/probe.cu`.

mod dump;
#[cfg(test)]
mod expected;
mod inputs;
mod launches;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Tensor};

pub(crate) use self::dump::{DumpedInstruction, HEAD, ProbeDump};
use self::launches::launches;
use crate::backends::gpu::driver_of;
use crate::error::Result;

/// The reference dump.
const RECORDED: &str = include_str!("../../../tests/golden/probe.txt");

impl ProbeDump {
    /// Runs the probe if kernels compute on `device`; returns none otherwise. `origin` names the
    /// device that runs it.
    ///
    /// # Errors
    /// Fails if the driver refuses a launch, or the emulator finds a fault.
    pub(crate) fn of(device: &Device, origin: &str) -> Result<Option<Self>> {
        let Some(driver) = driver_of(&Tensor::zeros(1, DType::U32, device)?) else { return Ok(None) };
        let mut instructions = Vec::new();
        for launch in launches() {
            let words = launch.results(driver, device)?;
            let mut rest = words.as_slice();
            for one in launch.instructions {
                let (mine, after) = rest.split_at(one.registers * one.threads);
                let words = mine.to_vec();
                instructions.push(DumpedInstruction { name: one.name, registers: one.registers, words });
                rest = after;
            }
        }
        Ok(Some(ProbeDump { origin: origin.to_owned(), instructions }))
    }

    /// Returns the dump that is part of this binary.
    ///
    /// # Errors
    /// Fails with an internal error if it cannot be parsed.
    pub(crate) fn recorded() -> Result<Self> {
        Self::parse(RECORDED)
    }
}
