//! The binary `finetune`.

use std::process::ExitCode;

fn main() -> ExitCode {
    finetune::run_binary()
}
