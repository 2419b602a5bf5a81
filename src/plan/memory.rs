//! How much memory a step will need, from shapes alone, and whether it fits: the ground for `recompute = "auto"`.

use candle_core::{DType, Device};

use super::adaptation::Adaptation;
use crate::engine::Recompute;
use crate::model::ModelConfig;
use crate::strategy::Slot;

/// Bytes by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weights in the compute dtype, and f32 masters.
    pub weights: u64,
    /// f32 gradients.
    pub gradients: u64,
    /// Both moments.
    pub optimizer: u64,
    /// What forward keeps for backward.
    pub activations: u64,
    /// What lives for a moment: one block's temporaries, the logits of a chunk.
    pub workspace: u64,
}

impl Memory {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.weights + self.gradients + self.optimizer + self.activations + self.workspace
    }

    /// Of a step over `tokens` tokens a micro-batch.
    pub fn of_step(
        config: &ModelConfig,
        slots: &[Slot],
        adaptation: Option<&Adaptation>,
        dtype: DType,
        tokens: usize,
        recompute: Recompute,
    ) -> Self {
        let size = dtype.size_in_bytes();
        let mut memory = Memory::default();
        for slot in slots {
            let n = slot.elements() as u64;
            let held = if slot.adapter { 4 } else { size as u64 };
            let master = if slot.trainable && held != 4 { 4 } else { 0 };
            memory.weights += n * (held + master);
            if slot.trainable {
                memory.gradients += 4 * n;
                memory.optimizer += 8 * n;
            }
        }
        let (input, saved) = block_bytes(config, adaptation, size);
        let layers = config.num_layers();
        let kept = match recompute {
            Recompute::None => layers * (input + saved),
            Recompute::Block => layers * input + saved,
        };
        memory.activations = (kept * tokens) as u64;
        // Backward holds the gradients of a block's widest tensors beside what it recomputes.
        let widest = 2 * config.intermediate_size + config.heads.qkv_width() + 4 * config.hidden_size;
        let logits = (48 << 20).max(64 * config.vocab_size);
        memory.workspace = (2 * widest * size * tokens + logits) as u64;
        memory
    }
}

/// Bytes a token of a block's input, and of the rest that its backward needs.
fn block_bytes(config: &ModelConfig, adaptation: Option<&Adaptation>, size: usize) -> (usize, usize) {
    let heads = config.heads;
    let post = if config.post_norms { 2 * config.hidden_size } else { 0 };
    let values = heads.qkv_width() + heads.q_width() + config.hidden_size + 2 * config.intermediate_size + post;
    let ranks: usize = adaptation.map_or(0, |a| a.targets.iter().map(|target| target.r).sum());
    (config.hidden_size * size, values * size + 4 * (heads.num_heads + ranks / config.num_layers().max(1)))
}

/// Bytes that can still be had on the device; none when nothing tells.
pub(super) fn available(device: &Device) -> Option<u64> {
    if !device.is_cpu() {
        return crate::ops::device::free_bytes(device);
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
