//! What computes in the place of a GPU, on CPU tensors: on a thread, for tests of single operations, or in a whole process,
//! all its ranks and whatever it does. It is the engine's way through the launch code without a GPU.

#[cfg(test)]
use std::cell::Cell;
use std::sync::OnceLock;

use super::Driver;
use super::counter::LaunchCounter;
use super::emulator::{Emulator, EmulatorSchedule, Order};
use crate::error::{Error, Result};

/// Makes a process of a build with feature `kernel-emu` compute by emulated kernels: `forward`, `reverse`, or a number, the
/// seed of a shuffled order. Copies are late but in the first.
const VARIABLE: &str = "FINETUNE_EMULATE";

/// A driver that needs no GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StandIn {
    /// Runs the kernels compiled for the host.
    Emulator(EmulatorSchedule),
    /// Runs nothing and counts.
    Counter,
}

/// What the whole process computes by; none where it is the CPU forms.
static PROCESS: OnceLock<Option<StandIn>> = OnceLock::new();

/// Makes the whole process compute on the emulator, as [`VARIABLE`] says, else in order.
///
/// # Errors
/// It has begun to compute another way.
pub(crate) fn emulate_process() -> Result<()> {
    let found = PROCESS.get_or_init(|| Some(of_environment().unwrap_or(in_order())));
    began_so(matches!(found, Some(StandIn::Emulator(_))))
}

/// Makes the whole process count what it would compute.
///
/// # Errors
/// It has begun to compute another way.
pub(super) fn count_process() -> Result<()> {
    began_so(*PROCESS.get_or_init(|| Some(StandIn::Counter)) == Some(StandIn::Counter))
}

fn began_so(yes: bool) -> Result<()> {
    match yes {
        true => Ok(()),
        false => Err(Error::internal("the process has begun to compute another way")),
    }
}

fn in_order() -> StandIn {
    StandIn::Emulator(EmulatorSchedule::default())
}

fn of_environment() -> Option<StandIn> {
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
    Some(StandIn::Emulator(EmulatorSchedule { order, late_copies: order != Order::Forward, counts: false }))
}

/// How the emulator runs kernels in this process.
pub(super) fn schedule_of_process() -> EmulatorSchedule {
    match PROCESS.get_or_init(of_environment) {
        Some(StandIn::Emulator(schedule)) => *schedule,
        _ => EmulatorSchedule::default(),
    }
}

/// The driver of this thread, else of this process.
pub(super) fn driver() -> Option<&'static dyn Driver> {
    #[cfg(test)]
    if let Some(driver) = THREAD.get() {
        return Some(driver);
    }
    PROCESS.get_or_init(of_environment).map(|stand_in| match stand_in {
        StandIn::Emulator(_) => &Emulator as &dyn Driver,
        StandIn::Counter => &LaunchCounter,
    })
}

#[cfg(test)]
thread_local! {
    /// What stands in on this thread.
    static THREAD: Cell<Option<&'static dyn Driver>> = const { Cell::new(None) };
}

/// Runs `work` with kernels on `driver` wherever ops of this thread meet CPU tensors.
#[cfg(test)]
pub(super) fn with<R>(driver: &'static dyn Driver, work: impl FnOnce() -> R) -> R {
    /// Puts back what was there before, also when `work` panics.
    struct Restore(Option<&'static dyn Driver>);
    impl Drop for Restore {
        fn drop(&mut self) {
            THREAD.set(self.0);
        }
    }
    let _restore = Restore(THREAD.replace(Some(driver)));
    work()
}
