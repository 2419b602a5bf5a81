//! Facts that `finetune doctor` prints: the program, the machine, and the libraries that GPUs need.

pub(crate) mod fact_lines;
#[cfg(unix)]
pub(crate) mod gpu_build;
pub(crate) mod host_facts;
mod nvidia_libraries;
pub(crate) mod program_facts;
