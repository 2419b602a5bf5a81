//! Refuses a step that exceeds the memory of the machine. Otherwise an allocation would fail, or
//! the system would end the process, without a reason.

use super::memory::{MemoryPlan, NCCL};
use super::{MemoryBudget, Plan, process_bytes};
use crate::collective::Phase;
use crate::error::{Error, Result};
use crate::runtime::device::free_bytes;
use crate::runtime::machine::{HostMemory, MemoryBound, host_memory};
use crate::runtime::thread_pool;
use crate::units;

/// Most settings that a hint names.
const ADVICE: usize = 4;
/// Bytes of the stack of a rank's thread, and of each thread of its pool.
const STACK_BYTES: u64 = 8 << 20;

impl Plan {
    /// Checks that the available memory can hold a step of the `ranks_here` ranks of this process,
    /// or of those of all processes of this host, if their number is known.
    ///
    /// # Errors
    /// The user's: the memory is too small. The message names the largest part of a step and the
    /// keys that set it.
    pub fn check_memory(&self, ranks_here: usize, ranks_on_host: Option<usize>) -> Result<()> {
        let memory = &self.memory;
        let on_host = if self.engine.device.is_cpu() { memory.total() } else { 0 };
        let on_host = on_host.saturating_add(memory.host);
        let needs = |host: HostMemory| {
            let shared = matches!(host.bound, MemoryBound::Host | MemoryBound::Group);
            let ranks = ranks_on_host.filter(|_| shared).unwrap_or(ranks_here) as u64;
            let needed = on_host.saturating_mul(ranks);
            (host, ranks, needed.saturating_add(self.counted_too(host.bound, ranks)))
        };
        let free = match self.budget {
            MemoryBudget::Agreed(free) if !self.engine.device.is_cpu() => free,
            _ => free_bytes(&self.engine.device),
        };
        let short = match (host_memory().map(needs), free) {
            (Some((host, ranks, needed)), _) if needed > host.limit => {
                let ranks = match ranks {
                    1 => "a step needs".into(),
                    _ if ranks == ranks_here as u64 => format!("{ranks} ranks of this process need"),
                    _ => format!("{ranks} ranks on this host need"),
                };
                format!("{ranks} {} of memory; {}", units::bytes(needed), host.bound.in_words(host.limit))
            }
            (_, Some(free)) if memory.persistent_bytes() > free => {
                let persistent = units::bytes(memory.persistent_bytes());
                format!(
                    "a rank keeps {persistent} on its GPU; the least free memory of one is {}",
                    units::bytes(free)
                )
            }
            _ => return Ok(()),
        };
        let advice = self.memory_advice(Phase::Load);
        Err(refused(memory, &short, &advice))
    }

    /// Returns the bytes beside a step's memory that count to `bound`, for `ranks` ranks. They are
    /// the memory of this process, if the plan omits it; stacks of ranks and of the threads of
    /// their pools; and weights mapped a second time for their digest.
    fn counted_too(&self, bound: MemoryBound, ranks: u64) -> u64 {
        let mapped: u64 = match (bound, &self.base.files) {
            (MemoryBound::Host | MemoryBound::Group, _) => return 0,
            (MemoryBound::AddressSpace, Some(files)) => files.file_bytes().map(|(_, bytes)| bytes).sum(),
            _ => 0,
        };
        let process = if self.memory.process == 0 { process_bytes() } else { 0 };
        let of_pools = ranks.max(thread_pool::num_threads() as u64);
        // A single rank computes in the pool that already runs.
        let stacks = if ranks > 1 { ranks.saturating_add(of_pools).saturating_mul(STACK_BYTES) } else { 0 };
        process.saturating_add(stacks).saturating_add(mapped)
    }
}

fn refused(memory: &MemoryPlan, short: &str, advice: &[String]) -> Error {
    let (part, bytes, keys) = memory.largest();
    let error = Error::user("cannot train: a step does not fit the available memory")
        .because(short)
        .because(format!("a rank's {}", memory.by_cause()))
        .because(format!("the largest part is {part}, {}: it follows from {keys}", units::bytes(bytes)));
    error.hint(match &advice[..advice.len().min(ADVICE)] {
        [] => "take a smaller model, or a machine with more memory".to_owned(),
        some => format!("these need less memory, the cheapest first: {}", some.join(", ")),
    })
}

impl MemoryPlan {
    /// Returns the bytes that a rank keeps from step to step.
    fn persistent_bytes(&self) -> u64 {
        [self.gradients, self.optimizer, self.nccl].into_iter().fold(self.weights, u64::saturating_add)
    }

    /// Returns the largest part, its bytes, and the settings that determine it.
    fn largest(&self) -> (&'static str, u64, &'static str) {
        let parts = [
            ("weights", self.weights, "the model, `quantization.kind`, `adapter.r`"),
            ("gradients", self.gradients, "what trains: the model, or `adapter.r`"),
            ("optimizer", self.optimizer, "what trains and `optimizer.state`"),
            (
                "activations",
                self.activations,
                "`train.micro_batch_size`, `data.max_seq_len`, `train.recompute`",
            ),
            (
                "workspace",
                self.workspace,
                "the model's vocabulary, `data.max_seq_len`, `train.micro_batch_size`",
            ),
            ("saving", self.saving, "what trains, `checkpoint.save_steps` and `checkpoint.async_save`"),
            (NCCL, self.nccl, "the number of ranks and `parallel.strategy`"),
            ("host memory", self.host, "what trains and `parallel.offload`"),
        ];
        // Reversed: `max_by_key` returns the last of equal parts, and the first is wanted.
        parts.into_iter().rev().max_by_key(|(_, bytes, _)| *bytes).unwrap_or((
            "process",
            self.process,
            "data and tokenizer",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_part_is_named_with_its_keys() {
        let memory = MemoryPlan { weights: 5, optimizer: 9, activations: 9, ..MemoryPlan::default() };
        assert_eq!(memory.largest().0, "optimizer");
        let error = refused(&memory, "short", &["`--set a=1` (3 B a rank)".to_owned()]).to_string();
        assert!(error.contains("caused by: short\n"), "{error}");
        assert!(error.contains(
            "the largest part is optimizer, 9 B: it follows from what trains and `optimizer.state`"
        ));
        assert!(
            error.ends_with("hint: these need less memory, the cheapest first: `--set a=1` (3 B a rank)"),
            "{error}"
        );
    }
}
