//! The probe in the self-test: checks that each instruction of the kernels does on this device what
//! was recorded.

use candle_core::{Device, DeviceLocation};

use crate::error::{Error, Result};
use crate::ops::probe::{HEAD, ProbeDump};
use crate::runtime::device;

/// The registers left by a device's instructions, compared with the recorded ones.
#[derive(Debug)]
pub struct ProbeReport {
    dump: ProbeDump,
    /// The device that ran the recorded dump.
    recorded_by: String,
    /// One line per instruction that differs.
    differences: Vec<String>,
}

impl ProbeReport {
    /// The first lines of every dump file.
    pub const HEAD: &str = HEAD;

    /// Runs the probe on `device`; returns none if operations compute without kernels, as on the
    /// CPU.
    ///
    /// # Errors
    /// Fails if a launch is refused, the emulator finds a fault, or the GPU's driver does not work.
    pub fn of(device: &Device) -> Result<Option<Self>> {
        let Some(dump) = ProbeDump::of(device, &origin(device)?)? else { return Ok(None) };
        let recorded = ProbeDump::recorded()?;
        let differences = dump.differences(&recorded);
        Ok(Some(ProbeReport { dump, recorded_by: recorded.origin, differences }))
    }

    /// Returns the result in one line.
    pub fn line(&self) -> String {
        let (count, by) = (self.dump.instructions.len(), &self.recorded_by);
        match self.differences.len() {
            0 => format!("probe: all {count} instructions match the dump recorded by the {by}\n"),
            failed => {
                format!("probe: {failed} of {count} instructions differ from the dump recorded by the {by}\n")
            }
        }
    }

    /// Returns an error that lists the instructions that differ on `device`, and where; none if all
    /// agree.
    pub fn failure(&self, device: &str) -> Option<Error> {
        if self.differences.is_empty() {
            return None;
        }
        let (failed, count) = (self.differences.len(), self.dump.instructions.len());
        let what = format!(
            "{failed} of {count} instructions of the probe differ from the recorded dump on {device}"
        );
        Some(self.differences.iter().fold(Error::internal(what), Error::because))
    }

    /// Returns the text of a dump file; it begins with [`ProbeReport::HEAD`].
    pub fn text(&self) -> String {
        self.dump.text()
    }
}

/// Returns the name of the device that runs kernels for tensors of `device`.
fn origin(device: &Device) -> Result<String> {
    let DeviceLocation::Cuda { gpu_id } = device.location() else { return Ok("emulator".to_owned()) };
    let gpu = device::gpus()?.into_iter().find(|gpu| gpu.index == gpu_id);
    Ok(gpu.map_or_else(
        || format!("GPU {gpu_id}"),
        |gpu| {
            let (major, minor) = gpu.compute_capability;
            format!("{}, compute capability {major}.{minor}", gpu.name)
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_instructions() -> Result<()> {
        let recorded = ProbeDump::recorded()?;
        let mut dump = recorded.clone();
        dump.instructions[0].words[2] ^= 1;
        let differences = dump.differences(&recorded);
        let report = ProbeReport { dump, recorded_by: recorded.origin, differences };
        let error = report.failure("GPU 0").unwrap();
        assert_eq!(error.kind().exit_code(), 3);
        let told = error.to_string();
        assert!(told.contains("instructions of the probe differ from the recorded dump on GPU 0"), "{told}");
        assert!(told.contains("mma_16816, columns 0 to 7 of a: lane 0, register 2 holds"), "{told}");
        assert!(report.line().contains("1 of ") && report.line().contains("by the emulator"));
        Ok(())
    }
}
