//! `finetune doctor`: describes this build and this machine, and checks every operation against its
//! reference.

use std::path::Path;

use candle_core::Device;
use serde::Serialize;

use super::{print, print_json, working_folder};
use crate::bench::communication::net::NetworkReport;
use crate::cli::{CommunicationArgs, DoctorArgs, DoctorVerb};
use crate::doctor::fact_lines::{FactLine, table};
use crate::doctor::host_facts::HostFacts;
use crate::doctor::host_facts::disk::DiskSpeed;
use crate::doctor::program_facts::ProgramFacts;
use crate::error::{Error, Result};
use crate::ops::selftest::{self, ProbeReport, SelftestSummary};
use crate::runtime::device;
use crate::units;
use crate::weights::OutputKind;

/// Prints the facts; with `--selftest`, then a line for each operation.
pub(super) fn run(args: &DoctorArgs) -> Result<()> {
    if let Some(DoctorVerb::Net(args)) = &args.what {
        return net(args);
    }
    let facts = MachineFacts::read(args)?;
    if args.json {
        return print_json(&facts);
    }
    print(&table(&facts.lines()))?;
    if args.selftest { check(args) } else { Ok(()) }
}

fn net(args: &CommunicationArgs) -> Result<()> {
    // Only the process of rank 0 prints.
    let Some(report) = NetworkReport::measure(args)? else { return Ok(()) };
    if args.json { print_json(&report) } else { print(&report.text()) }
}

/// Facts in the form of `--json`.
#[derive(Serialize)]
struct MachineFacts {
    program: ProgramFacts,
    host: HostFacts,
    /// Disks of `--disk`; empty without it.
    disks: Vec<DiskSpeed>,
}

impl MachineFacts {
    fn read(args: &DoctorArgs) -> Result<Self> {
        let (program, host) = (ProgramFacts::read(), HostFacts::of_this_machine());
        let mut disks = Vec::new();
        if let Some(given) = &args.disk {
            let cache = program.hub_cache();
            disks.extend(cache.map(|cache| DiskSpeed::measure("hub cache", &cache)));
            disks.push(match given {
                Some(folder) => DiskSpeed::measure("given folder", folder),
                None => DiskSpeed::measure("working folder", &working_folder()?),
            });
        }
        Ok(MachineFacts { program, host, disks })
    }

    fn lines(&self) -> Vec<FactLine> {
        let disks = self.disks.iter().map(DiskSpeed::line);
        self.program.lines().into_iter().chain(self.host.lines()).chain(disks).collect()
    }
}

/// Runs the self-test on the first GPU if this build and machine have one, else on the CPU; with
/// `--emulated` on the emulator.
fn check(args: &DoctorArgs) -> Result<()> {
    let (device, name) = if args.emulated {
        selftest::emulate()?;
        (Device::Cpu, "emulated GPU kernels".to_owned())
    } else {
        let choice = device::preferred()?;
        (device::open(choice)?, choice.to_string())
    };
    let probe_failure = probe(&device, &name, args.probe.as_deref())?;
    print(&format!("\nself-test on {name}: largest error as a fraction of the tolerance\n"))?;
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

/// Output file of `--probe`. It replaces an older dump.
const DUMP: OutputKind = OutputKind {
    what: "a dump of the probe",
    option: "--probe",
    example: "probe.txt",
    replaces: Some(ProbeReport::HEAD),
};

/// Compares the kernel instructions of `device` with the recorded results, if kernels run there,
/// and writes their results to `file`. Returns a mismatch, which the caller reports after the
/// self-test.
fn probe(device: &Device, name: &str, file: Option<&Path>) -> Result<Option<Error>> {
    let report = ProbeReport::of(device)?;
    match (&report, file) {
        (Some(report), Some(file)) => DUMP.write(file, &report.text())?,
        (None, Some(file)) => {
            return Err(Error::user(format!("cannot write the probe's dump to {}", file.display()))
                .because(format!("no kernels ran: the self-test computes on {name}"))
                .hint(
                    "use a build with `--features cuda` on a machine with an NVIDIA GPU, or add `--emulated`",
                ));
        }
        (_, None) => {}
    }
    let Some(report) = report else { return Ok(None) };
    print(&format!("\n{}", report.line()))?;
    Ok(report.failure(name))
}
