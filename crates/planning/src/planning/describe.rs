//! The plan in words.

use super::Plan;
use super::memory::MemoryPlan;
use crate::recipe::Offload;
use crate::units;

impl Plan {
    /// Returns the plan in a few lines.
    pub fn describe(&self) -> String {
        let (trainable, all) = self.parameters();
        let method = self.method();
        let (recompute, memory) = (self.recompute, &self.memory);
        let away = self.describe_offload();
        let spread = match (self.ranks, &self.why) {
            (1, _) => String::new(),
            (n, why) => {
                let why = why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
                format!("\n{n} ranks, strategy {}{why}; the memory below is per rank", self.strategy())
            }
        };
        format!(
            "training {method}: {} of {} parameters, {:?}, {}{spread}\nmemory of a step: {} = {} (recompute {recompute}){away}",
            units::count(trainable),
            units::count(all),
            self.engine.dtype,
            units::exact(self.total_steps, "step"),
            units::bytes(memory.total()),
            memory.by_cause(),
        )
    }

    /// Returns lines about the tensors stored outside the device.
    fn describe_offload(&self) -> String {
        let MemoryPlan { host, file, .. } = self.memory;
        let mut text = String::new();
        if self.engine.offload.what == Offload::None {
            return text;
        }
        if host > 0 {
            text += &format!("\nbeside it, in host memory: {}", units::bytes(host));
        }
        if let Some(folder) = self.engine.offload.folder() {
            text += &format!("\nin a file in {}: {}", folder.display(), units::bytes(file));
        } else if self.engine.device.is_cpu() {
            text += "\non the CPU offload to host memory frees nothing; `parallel.offload_folder` keeps parameters on a disk";
        }
        text
    }
}
