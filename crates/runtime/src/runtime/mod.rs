//! Machine, devices, thread pool and allocator, CPU tensor memory, parameter storage (device, host
//! or file), disk capacity, random numbers, and traces. It has no mathematics: that is in `ops`.

pub mod allocator;
pub mod buffer;
pub mod clock;
pub mod copy;
mod copy_steps;
pub mod cpu_tensor;
pub mod deferred;
pub mod device;
pub mod device_memory;
pub mod device_queue;
pub mod disk_space;
pub mod fault_signals;
pub mod gpu_pool;
pub mod gpu_support;
pub mod machine;
pub mod mmap;
pub mod optional_memory;
pub mod param_storage;
#[cfg(feature = "cuda")]
mod pinned;
pub mod planned_failure;
pub mod rank_sum;
pub mod rng;
mod tensor_mut;
pub mod thread_pool;
pub mod trace;
mod trace_ranges;

pub use tensor_mut::TensorMut;
