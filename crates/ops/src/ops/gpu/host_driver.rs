//! What computes in the place of a GPU, on CPU tensors, in a whole process: all its ranks and whatever it does. It is the
//! engine's way through the launch code without a GPU.

use std::sync::OnceLock;

use super::Driver;
use super::emulator::{self, Emulator, EmulatorSchedule, Order};
use super::work_counter::LaunchCounter;
use crate::error::{Error, Result};

/// Makes a process of a build with feature `kernel-emu` compute by emulated kernels: `forward`, `reverse`, or a number, the
/// seed of a shuffled order. Copies are late but in the first.
const VARIABLE: &str = "FINETUNE_EMULATE";

/// A driver that needs no GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostDriver {
    /// Runs the kernels compiled for the host.
    Emulator(EmulatorSchedule),
    /// Runs nothing and counts.
    Counter,
}

/// What the whole process computes by; none where it is the CPU forms.
static PROCESS: OnceLock<Option<HostDriver>> = OnceLock::new();

/// Makes the whole process compute on the emulator, as [`VARIABLE`] says, else in order.
///
/// # Errors
/// It has begun to compute another way.
pub(crate) fn emulate_process() -> Result<()> {
    let found = PROCESS.get_or_init(|| Some(of_environment().unwrap_or(in_order())));
    began_so(matches!(found, Some(HostDriver::Emulator(_))))
}

/// Makes the whole process count what a GPU would do, and do nothing: results are whatever the memory held.
///
/// # Errors
/// It has begun to compute another way.
pub fn count_process() -> Result<()> {
    began_so(*PROCESS.get_or_init(|| Some(HostDriver::Counter)) == Some(HostDriver::Counter))
}

fn began_so(yes: bool) -> Result<()> {
    let refused = || Error::internal("the process has begun to compute another way");
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
                panic!("{VARIABLE} is {value:?}; accepted: forward, reverse, or the number of a shuffle")
            }
        },
    };
    Some(HostDriver::Emulator(EmulatorSchedule {
        order,
        late_copies: order != Order::Forward,
        counts: false,
    }))
}

/// The driver of this process.
pub(super) fn of_process() -> Option<&'static dyn Driver> {
    let found = PROCESS.get_or_init(of_environment).as_ref()?;
    Some(match found {
        HostDriver::Emulator(schedule) => {
            emulator::run_all_by(*schedule);
            &Emulator
        }
        HostDriver::Counter => &LaunchCounter,
    })
}
