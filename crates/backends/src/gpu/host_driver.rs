//! Drivers that replace the GPU on CPU tensors, for all ranks and all work of a process. They run
//! the engine through the launch code without a GPU.

use std::sync::OnceLock;

use super::Driver;
use super::emulator::{self, Emulator, EmulatorSchedule, Order};
use super::work_counter::LaunchCounter;
use crate::error::{Error, Result};

/// Environment variable that makes a process built with feature `kernel-emu` compute by emulated
/// kernels: `forward`, `reverse`, or a number, the seed of a shuffled order. Copies are late except
/// with `forward`.
const VARIABLE: &str = "FINETUNE_EMULATE";

/// A driver that requires no GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostDriver {
    /// Runs the kernels compiled for the host.
    Emulator(EmulatorSchedule),
    /// Runs nothing and counts the requested work.
    Counter,
}

/// The driver of the whole process; none if it uses the CPU forms.
static PROCESS: OnceLock<Option<HostDriver>> = OnceLock::new();

/// Makes the whole process compute on the emulator, with the schedule of [`VARIABLE`] or else in
/// order.
///
/// # Errors
/// Fails if the process already computes another way.
pub fn emulate_process() -> Result<()> {
    let found = PROCESS.get_or_init(|| Some(of_environment().unwrap_or(in_order())));
    began_so(matches!(found, Some(HostDriver::Emulator(_))))
}

/// Makes the whole process count the work of a GPU without doing it: results contain arbitrary
/// values.
///
/// # Errors
/// Fails if the process already computes another way.
pub fn count_process() -> Result<()> {
    began_so(*PROCESS.get_or_init(|| Some(HostDriver::Counter)) == Some(HostDriver::Counter))
}

fn began_so(yes: bool) -> Result<()> {
    let refused = || Error::internal("the process already computes with another driver");
    yes.then_some(()).ok_or_else(refused)
}

fn in_order() -> HostDriver {
    HostDriver::Emulator(EmulatorSchedule::default())
}

fn of_environment() -> Option<HostDriver> {
    let value = std::env::var(VARIABLE).ok()?;
    let order = match value.as_str() {
        "forward" => Order::Forward,
        "reverse" => Order::Reverse,
        seed => match seed.parse() {
            Ok(seed) => Order::Shuffled(seed),
            Err(_) => {
                panic!("{VARIABLE} is {value:?}; accepted: forward, reverse, or a seed (an integer)")
            }
        },
    };
    Some(HostDriver::Emulator(EmulatorSchedule {
        order,
        late_copies: order != Order::Forward,
        counts: false,
    }))
}

/// Returns the driver of this process.
pub(crate) fn of_process() -> Option<&'static dyn Driver> {
    let found = PROCESS.get_or_init(of_environment).as_ref()?;
    Some(match found {
        HostDriver::Emulator(schedule) => {
            emulator::run_all_by(*schedule);
            &Emulator
        }
        HostDriver::Counter => &LaunchCounter,
    })
}
