//! The program around the verbs: it parses arguments into a command, and turns its result into an
//! exit code.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{PanicHookInfo, catch_unwind, set_hook};
use std::process::{ExitCode, exit};

use crate::cli;
use crate::commands;
use crate::contained;
use crate::data::{sandbox, sandboxed};
use crate::error::ErrorCategory;
use crate::launcher::child;
use crate::report::{alerts::guard, finish, print_last, ui::restore_screen};
use crate::runtime::allocator::use_one_heap;
use crate::runtime::device::set_gpu_environment;
use crate::runtime::fault_signals::make_large_files_errors;

/// Runs the binary `finetune` with the arguments of this process, and returns its exit code.
pub fn run_binary() -> ExitCode {
    set_hook(Box::new(print_panic));
    if let Some(code) = sandboxed::serve_if_asked().or_else(guard::serve_if_asked) {
        return code;
    }
    #[cfg(unix)]
    if let Some(warning) = crate::doctor::gpu_build::become_gpu_build() {
        print_last(&format_args!("warning: {warning}"));
    }
    // SAFETY: no other thread exists yet, and nothing has asked for GPUs.
    unsafe { set_gpu_environment() };
    sandbox::run_in_this_program();
    use_one_heap();
    make_large_files_errors();
    let code = match catch_unwind(|| cli::parse()?.run_by(commands::run)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            print_last(&error);
            child::exit_code(&error)
        }
        Err(_) => ErrorCategory::Internal.exit_code(),
    };
    finish();
    ExitCode::from(code)
}

/// Reports a panic, which is a bug of this program on whichever thread it happens. If the reader of
/// stdout is gone, as after `| head`, exits with code 0 instead.
fn print_panic(panic: &PanicHookInfo<'_>) {
    if contained::is_contained() {
        return;
    }
    restore_screen();
    let message = contained::message(panic.payload());
    if message.starts_with("failed printing to stdout") && message.contains("Broken pipe") {
        exit(0);
    }
    let location = panic.location().map(|location| format!(" ({}:{})", location.file(), location.line()));
    print_last(&format_args!("error: internal error: {message}{}", location.unwrap_or_default()));
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => print_last(&backtrace),
        _ => print_last(&"hint: run it again with RUST_BACKTRACE=1 and report what it prints"),
    }
}
