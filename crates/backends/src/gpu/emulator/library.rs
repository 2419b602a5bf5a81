//! Kernels from a shared library, in place of those compiled into the tests.
//!
//! `scripts/mutate_kernels.py` runs tests on kernels with one fault each: compiling such a library
//! takes seconds, rebuilding the tests a minute.

use std::ffi::OsStr;
use std::sync::OnceLock;

use libloading::Library;

use super::{LaunchFunction, finetune_emu_launch};

/// Environment variable with the path of the library.
const VARIABLE: &str = "FINETUNE_EMU_LIBRARY";

/// Returns the launch function of the library, or the built-in one if no library is set.
pub(crate) fn launch_function() -> LaunchFunction {
    static FUNCTION: OnceLock<LaunchFunction> = OnceLock::new();
    *FUNCTION.get_or_init(|| match std::env::var_os(VARIABLE) {
        Some(path) => {
            function_of(&path).unwrap_or_else(|error| panic!("{VARIABLE} is {}: {error}", path.display()))
        }
        None => finetune_emu_launch,
    })
}

fn function_of(path: &OsStr) -> Result<LaunchFunction, libloading::Error> {
    // SAFETY: the library contains the emulator and the kernels, and runs no code when loaded.
    let library = unsafe { Library::new(path) }?;
    // SAFETY: the function is that of `kernels/emu/emu.cpp`, like the built-in emulator.
    let function = *unsafe { library.get::<LaunchFunction>(b"finetune_emu_launch") }?;
    // Keep it loaded until the process exits: threads leave their emulator state in it.
    std::mem::forget(library);
    Ok(function)
}
