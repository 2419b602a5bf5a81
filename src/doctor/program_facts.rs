//! Facts about this build of the program, its devices and its hub.

use std::path::PathBuf;

use serde::Serialize;

use super::fact_lines::{FactLine, line};
use super::nvidia_libraries::GpuLibraries;
use crate::error::Error;
use crate::hub::HubOptions;
use crate::instruction_set::{self, InstructionSet};
use crate::runtime::device::{self, GPU_BUILD};
use crate::runtime::machine;
use crate::units;

/// Facts about the program and its devices.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ProgramFacts {
    version: &'static str,
    /// True if this build can use GPUs.
    gpu_build: bool,
    os: &'static str,
    arch: &'static str,
    processor: Option<String>,
    /// Number of processors that this process may use.
    cores: Option<usize>,
    /// Instruction set of ops on the CPU, then the available ones.
    instructions: &'static str,
    instruction_choices: String,
    memory: Option<MemoryFacts>,
    threads: usize,
    gpus: Vec<GpuFacts>,
    /// Reason for having no usable GPU.
    no_gpu: Option<String>,
    /// Newest CUDA version that the driver supports.
    driver_cuda: Option<String>,
    driver_failure: Option<String>,
    gpu_libraries: GpuLibraries,
    /// Source of models and data sets.
    hub: Option<HubFacts>,
    hub_failure: Option<String>,
}

/// Memory of the host, in bytes.
#[derive(Debug, Clone, Serialize)]
struct MemoryFacts {
    total: u64,
    available: u64,
    limit: u64,
}

/// A GPU that this build can use.
#[derive(Debug, Clone, Serialize)]
struct GpuFacts {
    index: usize,
    name: String,
    total_bytes: u64,
    compute_capability: String,
}

/// Source of models and data sets.
#[derive(Debug, Clone, Serialize)]
struct HubFacts {
    endpoint: String,
    offline: bool,
    cache: PathBuf,
    /// Only whether a token is set, never the token.
    token: String,
}

impl ProgramFacts {
    /// Reads the facts from the system, the driver and the environment.
    pub(crate) fn read() -> Self {
        let (gpus, no_gpu) = gpus();
        let (driver_cuda, driver_failure) = match device::driver_version().map_err(|e| e.in_one_line()) {
            Ok(version) => (version, None),
            Err(failure) => (None, Some(failure)),
        };
        let (hub, hub_failure) = match HubFacts::read() {
            Ok(hub) => (Some(hub), None),
            Err(error) => (None, Some(error.in_one_line())),
        };
        ProgramFacts {
            version: env!("CARGO_PKG_VERSION"),
            gpu_build: GPU_BUILD,
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            processor: machine::processor_name(),
            cores: std::thread::available_parallelism().ok().map(usize::from),
            instructions: InstructionSet::in_use().name(),
            instruction_choices: InstructionSet::names_here(),
            memory: machine::host_memory().map(|memory| MemoryFacts {
                total: memory.total,
                available: memory.available,
                limit: memory.limit,
            }),
            threads: rayon::current_num_threads(),
            gpus,
            no_gpu,
            driver_cuda,
            driver_failure,
            gpu_libraries: GpuLibraries::look(),
            hub,
            hub_failure,
        }
    }

    /// Returns the folder of downloads; none if the environment names no valid one.
    pub(crate) fn hub_cache(&self) -> Option<PathBuf> {
        self.hub.as_ref().map(|hub| hub.cache.clone())
    }

    /// Formats the facts about the program and its devices.
    pub(crate) fn lines(&self) -> Vec<FactLine> {
        let build = if self.gpu_build { "CPU and CUDA" } else { "CPU alone (no feature `cuda`)" };
        let memory = self.memory.as_ref().map_or_else(
            || "unknown on this system".to_owned(),
            |memory| format!("{}, {} available", units::bytes(memory.total), units::bytes(memory.available)),
        );
        let processor = self.processor.clone().unwrap_or_else(|| "name unknown".to_owned());
        let cores = self.cores.map_or_else(String::new, |cores| format!(", {cores} cores available"));
        let (in_use, names) = (self.instructions, &self.instruction_choices);
        let mut lines = vec![
            line("finetune", self.version),
            line("build", format!("{build}, {}-{}", self.os, self.arch)),
            line("processor", processor + &cores),
            line("instructions", format!("{in_use} ({} chooses among {names})", instruction_set::VARIABLE)),
            line("memory", memory),
            line("threads", format!("{} (RAYON_NUM_THREADS sets it)", self.threads)),
        ];
        lines.extend(self.gpu_lines());
        match (&self.hub, &self.hub_failure) {
            (Some(hub), _) => lines.extend(hub.lines()),
            (None, failure) => lines.push(line("hub", failure.clone().unwrap_or_default())),
        }
        lines
    }

    fn gpu_lines(&self) -> Vec<FactLine> {
        let none = self.no_gpu.iter().map(|why| line("GPU", why.clone()));
        let mut lines: Vec<FactLine> = none.chain(self.gpus.iter().map(GpuFacts::line)).collect();
        let needed = if self.gpu_build { "" } else { " (this build needs none of them)" };
        if self.gpu_build {
            let driver = match (&self.driver_failure, &self.driver_cuda) {
                (Some(failure), _) => failure.clone(),
                (None, version) => format!("supports CUDA up to {}", version.as_deref().unwrap_or("none")),
            };
            lines.push(line("GPU driver", driver));
        }
        lines.push(line("GPU libraries", self.gpu_libraries.text() + needed));
        lines
    }
}

/// Returns the usable GPUs, or the reason for having none.
fn gpus() -> (Vec<GpuFacts>, Option<String>) {
    if !GPU_BUILD {
        let other = "not used by this build; `cargo build --release --features cuda` makes one that does";
        return (Vec::new(), Some(other.to_owned()));
    }
    match device::gpus() {
        Err(error) => (Vec::new(), Some(format!("none: {}", error.in_one_line()))),
        Ok(gpus) if gpus.is_empty() => (Vec::new(), Some("none: the driver sees no device".to_owned())),
        Ok(gpus) => (gpus.into_iter().map(GpuFacts::of).collect(), None),
    }
}

impl GpuFacts {
    fn of(gpu: device::Gpu) -> Self {
        let (major, minor) = gpu.compute_capability;
        GpuFacts {
            index: gpu.index,
            name: gpu.name,
            total_bytes: gpu.total_bytes,
            compute_capability: format!("{major}.{minor}"),
        }
    }

    fn line(&self) -> FactLine {
        let GpuFacts { index, name, total_bytes, compute_capability } = self;
        let memory = units::bytes(*total_bytes);
        line(format!("GPU {index}"), format!("{name}, {memory}, compute capability {compute_capability}"))
    }
}

impl HubFacts {
    fn read() -> Result<Self, Error> {
        let options = HubOptions::from_env(false)?;
        let token = match (&options.token, options.refused_token()) {
            (Some(_), _) => "set".to_owned(),
            (None, Some(refused)) => format!("refused: {}", refused.in_one_line()),
            (None, None) => "not set; private and gated models need HF_TOKEN".to_owned(),
        };
        Ok(HubFacts {
            endpoint: options.endpoint().to_string(),
            offline: options.offline,
            cache: options.cache_dir,
            token,
        })
    }

    fn lines(&self) -> [FactLine; 3] {
        let offline = if self.offline { " (offline: HF_HUB_OFFLINE is set)" } else { "" };
        [
            line("hub", format!("{}{offline}", self.endpoint)),
            line("hub cache", self.cache.display().to_string()),
            line("hub token", self.token.clone()),
        ]
    }
}
