//! `finetune doctor`: what this build and this machine offer, and whether every operation computes here what its
//! definition says.

use std::fmt::Write;
use std::fs;

use candle_core::DType;

use super::print;
use crate::cli::DoctorArgs;
use crate::error::{Error, Result};
use crate::hub::HubOptions;
use crate::ops;
use crate::ops::selftest::{self, CaseOutcome};
use crate::runtime::device;
use crate::runtime::device::GPU_BUILD;
use crate::units;

/// Prints what there is; with `--selftest`, then a line an op.
pub(super) fn run(args: &DoctorArgs) -> Result<()> {
    print(&lines(&[machine(), gpus(), hub()].concat()))?;
    if args.selftest { check() } else { Ok(()) }
}

type DoctorLine = (String, String);

fn lines(lines: &[DoctorLine]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

fn line(name: &str, value: impl Into<String>) -> DoctorLine {
    (name.to_owned(), value.into())
}

fn machine() -> Vec<DoctorLine> {
    let build = if GPU_BUILD { "CPU and CUDA" } else { "CPU alone (no feature `cuda`)" };
    vec![
        line("finetune", env!("CARGO_PKG_VERSION")),
        line("build", format!("{build}, {}-{}", std::env::consts::OS, std::env::consts::ARCH)),
        line("processor", processor()),
        line("memory", memory().unwrap_or_else(|| "this system does not say".to_owned())),
        line("threads", format!("{} (RAYON_NUM_THREADS sets it)", rayon::current_num_threads())),
    ]
}

fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut text = model_name(&info).unwrap_or("name unknown").to_owned();
    if let Ok(cores) = std::thread::available_parallelism() {
        text += &format!(", {cores} cores to use");
    }
    match instructions().as_slice() {
        [] => text,
        found => text + ", " + &found.join(", "),
    }
}

/// The name of the first processor in Linux's `/proc/cpuinfo`.
fn model_name(info: &str) -> Option<&str> {
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim())
}

/// The vector instructions that decide the speed of the CPU forms.
fn instructions() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut found = vec!["SSE2"];
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            found.push("AVX2");
        }
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            found.push("AVX-512");
        }
        if ops::has_matrix_unit() {
            found.push("AMX");
        }
        found
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

fn memory() -> Option<String> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let text = |key| kib(&info, key).map(|kib| units::bytes(kib * 1024));
    Some(format!("{}, {} available", text("MemTotal:")?, text("MemAvailable:")?))
}

/// The value of a line `key   1234 kB` of Linux's `/proc/meminfo`.
fn kib(info: &str, key: &str) -> Option<u64> {
    let value = info.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix("kB")?.trim().parse().ok()
}

fn gpus() -> Vec<DoctorLine> {
    if !GPU_BUILD {
        return vec![line(
            "GPU",
            "not used by this build; `cargo build --release --features cuda` makes one that does",
        )];
    }
    match device::gpus() {
        Err(error) => vec![line("GPU", format!("none: {}", told(&error)))],
        Ok(gpus) if gpus.is_empty() => vec![line("GPU", "none: the driver sees no device")],
        Ok(gpus) => {
            let text = |gpu: &device::Gpu| {
                let (major, minor) = gpu.compute_capability;
                format!("{}, {}, compute capability {major}.{minor}", gpu.name, units::bytes(gpu.total_bytes))
            };
            gpus.iter().map(|gpu| line(&format!("GPU {}", gpu.index), text(gpu))).collect()
        }
    }
}

fn hub() -> Vec<DoctorLine> {
    let options = match HubOptions::from_env(false) {
        Ok(options) => options,
        Err(error) => return vec![line("hub", told(&error))],
    };
    let token =
        if options.token.is_some() { "set" } else { "not set; private and gated models need HF_TOKEN" };
    let offline = if options.offline { " (offline: HF_HUB_OFFLINE is set)" } else { "" };
    vec![
        line("hub", format!("{}{offline}", options.endpoint())),
        line("hub cache", options.cache_dir.display().to_string()),
        line("hub token", token),
    ]
}

/// An error in one line.
fn told(error: &Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    text.replace("\n  caused by: ", ": ").replace("\nhint: ", "; ")
}

/// Runs the self-test on the first GPU, where this build and machine have one, else on the CPU.
fn check() -> Result<()> {
    let choice = device::preferred()?;
    let (device, name) = (device::open(choice)?, choice.to_string());
    print(&format!("\nself-test on {name}: largest error as a part of what is tolerated\n"))?;
    print(&format!("{:<22} {:>5} {:>7} {:>7}\n", "operation", "cases", "f32", "bf16"))?;
    let mut all: Vec<DoctorRow> = Vec::new();
    for outcome in selftest::run(&device) {
        match all.iter_mut().find(|row| row.op == outcome.op) {
            Some(row) => row.add(outcome),
            None => all.push(DoctorRow::new(outcome)),
        }
    }
    print(&all.iter().map(DoctorRow::line).collect::<String>())?;
    let cases: usize = all.iter().map(|row| row.cases).sum();
    let secs: f64 = all.iter().map(|row| row.secs).sum();
    let failed: Vec<CaseOutcome> = all.into_iter().flat_map(|row| row.failed).collect();
    if failed.is_empty() {
        return print(&format!("all {cases} cases passed in {}\n", units::duration(secs)));
    }
    Err(refusal(&name, cases, &failed))
}

fn refusal(device: &str, cases: usize, failed: &[CaseOutcome]) -> Error {
    let what = format!("{} of {cases} cases of the self-test failed on {device}", failed.len());
    let case = |error: Error, outcome: &CaseOutcome| {
        let CaseOutcome { op, what, dtype, error: found, tolerance, .. } = outcome;
        let why = match &outcome.fault {
            Some(fault) => told(fault),
            None => format!("error {found:.1e}, tolerated {tolerance:.1e}"),
        };
        error.because(format!("{op} ({}{what}): {why}", prefix(*dtype, what)))
    };
    failed.iter().fold(Error::internal(what), case)
}

fn prefix(dtype: DType, what: &str) -> String {
    let comma = if what.is_empty() { "" } else { ", " };
    format!("{}{comma}", dtype.as_str())
}

/// The cases of one op.
struct DoctorRow {
    op: &'static str,
    cases: usize,
    /// Largest `error / tolerance` in f32 and bf16.
    worst: [Option<f64>; 2],
    secs: f64,
    failed: Vec<CaseOutcome>,
}

impl DoctorRow {
    fn new(first: CaseOutcome) -> Self {
        let mut row = DoctorRow { op: first.op, cases: 0, worst: [None; 2], secs: 0.0, failed: Vec::new() };
        row.add(first);
        row
    }

    fn add(&mut self, outcome: CaseOutcome) {
        self.cases += 1;
        self.secs += outcome.secs;
        let worst = &mut self.worst[usize::from(outcome.dtype != DType::F32)];
        *worst = Some(worst.unwrap_or(0.0).max(outcome.error / outcome.tolerance));
        if !outcome.passed {
            self.failed.push(outcome);
        }
    }

    fn line(&self) -> String {
        let mut text = format!("{:<22} {:>5}", self.op, self.cases);
        for worst in self.worst {
            let part = worst.map_or_else(|| "-".to_owned(), |part| format!("{:.1}%", 100.0 * part));
            // Writing to a string cannot fail.
            let _ = write!(text, " {part:>7}");
        }
        if !self.failed.is_empty() {
            text += &format!("  FAILED: {}", self.failed.len());
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(what: &str, error: f64) -> CaseOutcome {
        CaseOutcome {
            op: "add",
            what: what.into(),
            dtype: DType::BF16,
            error,
            tolerance: 0.01,
            passed: error <= 0.01,
            fault: None,
            secs: 0.0,
        }
    }

    #[test]
    fn a_failure_is_named_and_is_ours() {
        let mut row = DoctorRow::new(outcome("one dtype", 0.005));
        assert_eq!(row.line(), "add                        1       -   50.0%\n");
        row.add(outcome("into f32", 0.02));
        row.add(outcome("", f64::INFINITY));
        assert_eq!(row.line(), "add                        3       -    inf%  FAILED: 2\n");
        let error = refusal("the CPU", 3, &row.failed);
        assert_eq!(error.kind().exit_code(), 3);
        assert_eq!(
            error.to_string(),
            "error: 2 of 3 cases of the self-test failed on the CPU\
             \n  caused by: add (bf16, into f32): error 2.0e-2, tolerated 1.0e-2\
             \n  caused by: add (bf16): error inf, tolerated 1.0e-2"
        );
    }

    #[test]
    fn reads_the_kernels_lines() {
        let info = "processor\t: 0\nmodel name\t: A processor @ 2 GHz\nmodel name\t: another\n";
        assert_eq!(model_name(info), Some("A processor @ 2 GHz"));
        assert_eq!(kib("MemTotal:       24 kB\nMemAvailable: 7 kB\n", "MemAvailable:"), Some(7));
        assert_eq!(kib("MemTotal: many\n", "MemTotal:"), None);
    }

    #[test]
    fn an_error_in_one_line() {
        assert_eq!(
            told(&Error::user("a is 1").because("b").hint("write `a = 2`")),
            "a is 1: b; write `a = 2`"
        );
    }
}
