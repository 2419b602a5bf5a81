//! What every floor above computes with: the machine, devices, the thread pool and the allocator, tensors' memory on the CPU,
//! parameter storage in memory, on the host or in a file, the room of disks, random numbers, and what a trace records. No
//! mathematics: that is `ops`.

pub mod allocator;
pub mod buffer;
pub mod clock;
pub mod copy;
mod copy_steps;
pub mod cpu_tensor;
pub mod device;
pub mod device_memory;
pub mod disk_room;
pub mod fault_signals;
pub mod gpu_support;
pub mod machine;
pub mod mmap;
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
