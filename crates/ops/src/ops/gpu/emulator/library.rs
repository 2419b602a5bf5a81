//! Kernels out of a shared library, in place of those that tests were built with.
//!
//! `scripts/mutate_kernels.py` runs tests on kernels with a fault each: such a library takes seconds to make, the tests
//! anew a minute.

use std::ffi::OsStr;
use std::sync::OnceLock;

use libloading::Library;

use super::{LaunchFunction, finetune_emu_launch};

/// Names the library.
const VARIABLE: &str = "FINETUNE_EMU_LIBRARY";

/// What launches kernels: the function of the library, where one is named.
pub(super) fn launch_function() -> LaunchFunction {
    static FUNCTION: OnceLock<LaunchFunction> = OnceLock::new();
    *FUNCTION.get_or_init(|| match std::env::var_os(VARIABLE) {
        Some(path) => {
            function_of(&path).unwrap_or_else(|error| panic!("{VARIABLE} is {}: {error}", path.display()))
        }
        None => finetune_emu_launch,
    })
}

fn function_of(path: &OsStr) -> Result<LaunchFunction, libloading::Error> {
    // SAFETY: it holds the emulator and the kernels, which run nothing when they are loaded.
    let library = unsafe { Library::new(path) }?;
    // SAFETY: the function is that of `kernels/emu/emu.cpp`, as the emulator that tests were built with.
    let function = *unsafe { library.get::<LaunchFunction>(b"finetune_emu_launch") }?;
    // Loaded as long as the process runs: threads leave the state of their emulator behind.
    std::mem::forget(library);
    Ok(function)
}
