//! `finetune doctor`: what this build and this machine offer, and whether every operation computes here what its
//! definition says.

use std::path::Path;

use candle_core::Device;

use super::print;
use crate::cli::DoctorArgs;
use crate::error::{Error, Result};
use crate::hub::HubOptions;
use crate::instruction_set::{self, InstructionSet};
use crate::ops::selftest::{self, ProbeReport, SelftestSummary};
use crate::run::nvidia_libraries;
use crate::runtime::device::GPU_BUILD;
use crate::runtime::{device, machine};
use crate::units;

/// Prints what there is; with `--selftest`, then a line an op.
pub(super) fn run(args: &DoctorArgs) -> Result<()> {
    print(&lines(&[host(), gpus(), hub()].concat()))?;
    if args.selftest { check(args) } else { Ok(()) }
}

type DoctorLine = (String, String);

fn lines(lines: &[DoctorLine]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

fn line(name: &str, value: impl Into<String>) -> DoctorLine {
    (name.to_owned(), value.into())
}

fn host() -> Vec<DoctorLine> {
    let build = if GPU_BUILD { "CPU and CUDA" } else { "CPU alone (no feature `cuda`)" };
    let memory = machine::host_memory().map_or_else(
        || "this system does not say".to_owned(),
        |memory| format!("{}, {} available", units::bytes(memory.total), units::bytes(memory.available)),
    );
    vec![
        line("finetune", env!("CARGO_PKG_VERSION")),
        line("build", format!("{build}, {}-{}", std::env::consts::OS, std::env::consts::ARCH)),
        line("processor", processor()),
        line("instructions", instructions()),
        line("memory", memory),
        line("threads", format!("{} (RAYON_NUM_THREADS sets it)", rayon::current_num_threads())),
    ]
}

fn processor() -> String {
    let mut facts = vec![machine::processor_name().unwrap_or_else(|| "name unknown".to_owned())];
    if let Ok(cores) = std::thread::available_parallelism() {
        facts.push(format!("{cores} cores to use"));
    }
    facts.join(", ")
}

/// The instructions that ops on the CPU use, and those that could be chosen.
fn instructions() -> String {
    let (in_use, names) = (InstructionSet::in_use().name(), InstructionSet::names_here());
    format!("{in_use} ({} chooses among {names})", instruction_set::VARIABLE)
}

fn gpus() -> Vec<DoctorLine> {
    let libraries = line("GPU libraries", nvidia_libraries::found_and_missing());
    if !GPU_BUILD {
        let other = "not used by this build; `cargo build --release --features cuda` makes one that does";
        return vec![line("GPU", other), libraries];
    }
    let mut all = match device::gpus() {
        Err(error) => vec![line("GPU", format!("none: {}", error.in_one_line()))],
        Ok(gpus) if gpus.is_empty() => vec![line("GPU", "none: the driver sees no device")],
        Ok(gpus) => {
            let text = |gpu: &device::Gpu| {
                let (major, minor) = gpu.compute_capability;
                format!("{}, {}, compute capability {major}.{minor}", gpu.name, units::bytes(gpu.total_bytes))
            };
            gpus.iter().map(|gpu| line(&format!("GPU {}", gpu.index), text(gpu))).collect()
        }
    };
    let driver = match device::driver_version() {
        Ok(version) => format!("speaks CUDA up to {}", version.unwrap_or_else(|| "none".to_owned())),
        Err(error) => error.in_one_line(),
    };
    all.extend([line("GPU driver", driver), libraries]);
    all
}

fn hub() -> Vec<DoctorLine> {
    let options = match HubOptions::from_env(false) {
        Ok(options) => options,
        Err(error) => return vec![line("hub", error.in_one_line())],
    };
    let token = match (&options.token, options.refused_token()) {
        (Some(_), _) => "set".to_owned(),
        (None, Some(refused)) => format!("refused: {}", refused.in_one_line()),
        (None, None) => "not set; private and gated models need HF_TOKEN".to_owned(),
    };
    let offline = if options.offline { " (offline: HF_HUB_OFFLINE is set)" } else { "" };
    vec![
        line("hub", format!("{}{offline}", options.endpoint())),
        line("hub cache", options.cache_dir.display().to_string()),
        line("hub token", token),
    ]
}

/// Runs the self-test on the first GPU, where this build and machine have one, else on the CPU; or on the emulator.
fn check(args: &DoctorArgs) -> Result<()> {
    let (device, name) = if args.emulated {
        selftest::emulate()?;
        (Device::Cpu, "emulated GPU kernels".to_owned())
    } else {
        let choice = device::preferred()?;
        (device::open(choice)?, choice.to_string())
    };
    let probe_failure = probe(&device, &name, args.probe.as_deref())?;
    print(&format!("\nself-test on {name}: largest error as a part of what is tolerated\n"))?;
    print(&SelftestSummary::header())?;
    let summary: SelftestSummary = selftest::run(&device).collect();
    print(&summary.table())?;
    match (probe_failure, summary.failure(&name)) {
        (Some(probe), Some(ops)) => Err(ops.causes().iter().fold(probe.because(ops.what()), Error::because)),
        (Some(error), None) | (None, Some(error)) => Err(error),
        (None, None) => {
            let took = units::duration(summary.secs());
            print(&format!("all {} cases passed in {took}\n", summary.cases()))
        }
    }
}

/// Holds the instructions of `device`, where kernels compute there, against the recorded ones; writes what they left to
/// `file`. What failed is for the end of the self-test.
fn probe(device: &Device, name: &str, file: Option<&Path>) -> Result<Option<Error>> {
    let report = ProbeReport::of(device)?;
    match (&report, file) {
        (Some(report), Some(file)) => report.write(file)?,
        (None, Some(file)) => {
            return Err(Error::user(format!("cannot write the probe's dump to {}", file.display()))
                .because(format!("no kernels ran: the self-test computes on {name}"))
                .hint("on a machine with an NVIDIA GPU, a build with `--features cuda`; or `--emulated`"));
        }
        (_, None) => {}
    }
    let Some(report) = report else { return Ok(None) };
    print(&format!("\n{}", report.line()))?;
    Ok(report.failure(name))
}
