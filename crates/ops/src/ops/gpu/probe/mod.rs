//! The probe: what every instruction that kernels use leaves in each lane's registers, on coded inputs.
//!
//! The emulator models these instructions, and all kernels are tested on it; so a GPU has to do what the emulator does.
//! A recorded dump of the emulator is part of the binary, and a GPU's own is held against it; tests hold the emulator
//! against every dump in `tests/golden`, and the recorded one against what the manuals say of the instructions. The kernels are
//! `kernels/probe.cu`.

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
use super::driver_of;
use crate::error::Result;

/// The dump that others are held against.
const RECORDED: &str = include_str!("../../../../tests/golden/probe.txt");

impl ProbeDump {
    /// Runs the probe where kernels compute on `device`; none where they do not. `origin` says what runs it.
    ///
    /// # Errors
    /// The driver refuses a launch; the emulator finds a fault.
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

    /// The dump that is part of this binary.
    ///
    /// # Errors
    /// An internal one: it cannot be read.
    pub(crate) fn recorded() -> Result<Self> {
        Self::parse(RECORDED)
    }
}
