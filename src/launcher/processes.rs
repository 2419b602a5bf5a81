//! A process for each rank of this host, and their common end.
//!
//! CUDA blocks the threads of a process against one another, and NCCL waits for other ranks on the
//! GPU: two ranks in one process can wait for each other forever. So each of several GPUs gets a
//! process. Their parent computes nothing and opens no GPU. It starts this binary once for each
//! rank, with the flags of a launch by hand, passes signals on, and ends as the rank ended that
//! failed first. The processes of one host meet on its loopback address, with a new secret.
//!
//! The process of the first rank has the standard streams of the parent. The last output of the
//! others is kept, and printed if they end the run. **Not yet run on a GPU**; tests run ranks on
//! CPUs this way, over MPI.

mod last_output;
mod run_end;
mod started;
#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) use self::run_end::RunEnd;
use self::started::StartedProcess;
use super::child::{self, POLL, Running};
use super::process_position::{ProcessPosition, without};
use super::signals::{self, SeenSignal};
use crate::cli::{Gpus, TrainArgs};
use crate::collective::launch::Launch;
use crate::error::{Error, ErrorCategory, Result};
use crate::rendezvous::{Master, one_host_environment};
use crate::report::LONGEST_END;
use crate::report::ui::ScreenOfChild;
use crate::runtime::{device, thread_pool};

/// Limits on the end of the other processes, after the longest end of the first one and that of
/// saves in the background: 60 s for all.
const LIMITS: EndLimits =
    EndLimits { joining: Duration::from_secs(5), all: Duration::from_secs(LONGEST_END.as_secs() + 15) };

/// Variable by which tests start CPU ranks as processes: a folder with a file `rank-R` for each
/// rank, which holds the variables of MPI's process R, each with a zero byte behind it. Only builds
/// with debug assertions read it.
const MPI_PROCESSES: &str = "FINETUNE_MPI_PROCESSES";

/// Variable with the number of threads in which a process computes.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Variable by which CUDA loads the code of a library as a whole when it starts, and the value. By
/// default CUDA loads a kernel before its first launch. It then waits for all earlier work of the
/// GPU, which may include a collective that waits for other ranks. Finetune's own kernels and those
/// of candle are loaded before the first collective (`ops::preload`), but cuBLASLt has a kernel for
/// each kind of shape. Not yet run on a GPU.
const EAGER_LOADING: (&str, &str) = ("CUDA_MODULE_LOADING", "EAGER");

/// First of the ports to choose from, which are above those of Linux's outgoing connections.
const FIRST_PORT: u16 = 61_440;
/// Ports to try, of which another program may use some.
const PORTS_TRIED: usize = 64;

/// Times after which the other processes end if one has failed.
#[derive(Debug, Clone, Copy)]
struct EndLimits {
    /// Limit for ranks that still plan, or wait for the failed one to join. All others learn of the
    /// failure at once.
    joining: Duration,
    /// Limit for all ranks.
    all: Duration,
}

/// A rank that gets a process of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitRank {
    /// Flag of the device and its value.
    device: [String; 2],
    /// Variables beside those of this process.
    variables: Vec<Variable>,
}

/// An environment variable.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Variable {
    name: OsString,
    value: OsString,
}

impl SplitRank {
    /// Returns a rank for each of `gpus`.
    ///
    /// # Errors
    /// A GPU is missing: one error instead of one from each process.
    pub(crate) fn on_gpus(gpus: &Gpus) -> Result<Vec<Self>> {
        device::check_gpus(&gpus.0)?;
        let given = std::env::var_os(EAGER_LOADING.0);
        Ok(gpus.0.iter().map(|gpu| SplitRank::on_gpu(*gpu, given.as_deref())).collect())
    }

    /// Returns the rank on a GPU among several. `given` is the user's value of the variable of
    /// [`EAGER_LOADING`].
    fn on_gpu(gpu: usize, given: Option<&OsStr>) -> Self {
        let (name, value) = EAGER_LOADING;
        let eager = || Variable { name: name.into(), value: value.into() };
        let variables = given.is_none().then(eager).into_iter().collect();
        SplitRank { device: ["--gpus".to_owned(), gpu.to_string()], variables }
    }

    /// Reads the variables of the rank `rank` in `folder`.
    fn in_mpi(folder: &Path, rank: u16) -> Result<Self> {
        let path = folder.join(format!("rank-{rank}"));
        let bytes = std::fs::read(&path).map_err(|e| Error::io("read", &path, &e))?;
        let text = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
        let variable = |line: &[u8]| {
            let equals = line.iter().position(|byte| *byte == b'=')?;
            Some(Variable { name: text(&line[..equals]), value: text(&line[equals + 1..]) })
        };
        let variables = bytes.split(|byte| *byte == 0).filter_map(variable).collect();
        Ok(SplitRank { device: ["--ranks".to_owned(), "1".to_owned()], variables })
    }

    /// Name of the rank with the number `rank`, for messages.
    fn name(&self, rank: usize) -> String {
        let [flag, number] = &self.device;
        if flag == "--gpus" { format!("rank {rank} on GPU {number}") } else { format!("rank {rank}") }
    }
}

/// Returns whether the ranks of a training command get a process each.
pub(crate) fn are_wanted(args: &TrainArgs) -> bool {
    let devices = &args.devices;
    let gpus = devices.gpus.as_ref().is_some_and(|gpus| gpus.0.len() > 1 && !args.gpus_in_process);
    !args.dry_run && (gpus || mpi_processes().is_some() && devices.ranks.is_some_and(|ranks| ranks > 1))
}

/// Returns the ranks of a training command that get a process each; none if they are threads.
///
/// # Errors
/// A GPU is missing.
pub(crate) fn ranks_of(args: &TrainArgs) -> Result<Vec<SplitRank>> {
    if !are_wanted(args) {
        return Ok(Vec::new());
    }
    if let Some(gpus) = &args.devices.gpus {
        return SplitRank::on_gpus(gpus);
    }
    let folder = mpi_processes().unwrap_or_default();
    (0..args.devices.ranks.unwrap_or(1)).map(|rank| SplitRank::in_mpi(Path::new(&folder), rank)).collect()
}

fn mpi_processes() -> Option<OsString> {
    std::env::var_os(MPI_PROCESSES).filter(|_| cfg!(debug_assertions))
}

/// A process to start, with its name for messages.
pub(crate) struct RankProcess {
    name: String,
    command: Command,
    /// The terminal's screen, which the process may take.
    screen: Option<ScreenOfChild>,
}

impl RankProcess {
    fn new(name: impl Into<String>, command: Command) -> Self {
        RankProcess { name: name.into(), command, screen: None }
    }

    /// Returns the process of a whole run with the arguments `words`, at `position` among others.
    ///
    /// # Errors
    /// Internal: this binary cannot be found.
    pub(crate) fn of_run(words: &[OsString], position: Option<&ProcessPosition>) -> Result<Self> {
        let Some(position) = position else {
            return Ok(Self::new("the run", child::command(words)?));
        };
        let mut command = child::command(&position.in_words(words))?;
        command.envs(position.environment());
        Ok(Self::new("the run", command))
    }

    /// Returns the processes of `ranks`, the ranks of `launch` on this host, with the arguments
    /// `words`. `position` replaces that of `launch`.
    ///
    /// # Errors
    /// No port is free; the system gives no random bytes.
    pub(crate) fn of_ranks(
        words: &[OsString],
        ranks: &[SplitRank],
        launch: &Launch,
        position: Option<ProcessPosition>,
    ) -> Result<Vec<Self>> {
        let is_alone = launch.master.is_none();
        let position = match (position, &launch.master) {
            (Some(position), _) => position,
            (None, Some(master)) => ProcessPosition::of(launch, master.clone()),
            (None, None) => ProcessPosition::of(launch, loopback()?),
        };
        let common = if is_alone { one_host_environment()?.to_vec() } else { Vec::new() };
        let threads = (thread_pool::threads_of_process() / ranks.len().max(1)).max(1);
        let process = |(index, rank): (usize, &SplitRank)| -> Result<Self> {
            let own = position.of_one(index, ranks.len());
            let mut command = child::command(&words_of(words, rank, &own))?;
            command.envs(rank.variables.iter().map(|variable| (&variable.name, &variable.value)));
            command.envs(own.environment()).env(THREADS, threads.to_string()).env(child::OF_RANK, "1");
            for (name, value) in &common {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            Ok(Self::new(rank.name(own.rank), command))
        };
        ranks.iter().enumerate().map(process).collect()
    }

    /// Leaves the process in the process group of this one, so that it can take the screen and the
    /// keys of their terminal. If it is killed, this process gives them back. The process also gets
    /// the terminal's signals, each of which counts once although this process passes it on.
    pub(crate) fn in_foreground(&mut self) {
        self.screen = ScreenOfChild::save();
        // SAFETY: a system call without arguments, which always succeeds.
        self.command.process_group(unsafe { libc::getpgrp() });
    }
}

/// Returns the arguments of the process of `rank` at `position`, if those of all ranks are `words`.
fn words_of(words: &[OsString], rank: &SplitRank, position: &ProcessPosition) -> Vec<OsString> {
    let mut words = position.in_words(&without(words, &["--gpus", "--ranks"]));
    words.extend(rank.device.iter().map(OsString::from));
    words
}

/// Returns a loopback address with a port that is free now.
fn loopback() -> Result<Master> {
    for _ in 0..PORTS_TRIED {
        let mut bytes = [0; 2];
        getrandom::fill(&mut bytes)
            .map_err(|e| Error::internal("cannot get random numbers").because(e.to_string()))?;
        let port = FIRST_PORT + u16::from_le_bytes(bytes) % (u16::MAX - FIRST_PORT);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(Master { address: Ipv4Addr::LOCALHOST.to_string(), port, ports: 1 });
        }
    }
    Err(Error::new(ErrorCategory::Transient, "cannot find a port for the processes of this host")
        .because(format!("{PORTS_TRIED} ports from {FIRST_PORT} on are in use"))
        .hint("close other programs, or train with `--gpus-in-process`"))
}

/// Runs the command of this process on each of `ranks`, the ranks of `launch` on this host.
///
/// # Errors
/// A process cannot be started; a rank was killed. If a rank has reported an error, this process
/// ends with its exit code instead.
pub(crate) fn run(ranks: &[SplitRank], launch: &Launch) -> Result<()> {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let signals = signals::seen_by_parent()?;
    let end = until_end(RankProcess::of_ranks(&words, ranks, launch, None)?, &signals)?;
    if end.status.success() { Ok(()) } else { end.conclude() }
}

/// Starts `processes`, passes `signals` on to them, and waits until all have ended. If one fails,
/// the others have the time of [`LIMITS`] to end by themselves. Prints the last output of the one
/// that ended the run, unless it has the standard streams of this process.
///
/// # Errors
/// A process cannot be started; the others then end.
pub(crate) fn until_end(processes: Vec<RankProcess>, signals: &[SeenSignal]) -> Result<RunEnd> {
    let end = until_end_within(LIMITS, processes, signals)?;
    end.print_output();
    Ok(end)
}

fn until_end_within(
    limits: EndLimits,
    processes: Vec<RankProcess>,
    signals: &[SeenSignal],
) -> Result<RunEnd> {
    let mut started: Vec<StartedProcess> = Vec::new();
    for process in processes {
        let is_first = started.is_empty();
        started.push(StartedProcess::start(process, is_first)?);
    }
    let (mut order, mut asked_to_stop, mut failed_since) = (Vec::new(), false, None);
    loop {
        for (index, process) in started.iter_mut().enumerate() {
            if !order.contains(&index) && process.child.has_ended()? {
                order.push(index);
            }
        }
        if order.len() == started.len() {
            return Ok(RunEnd::of(started, &order, asked_to_stop));
        }
        let mut children: Vec<&mut Running> = started.iter_mut().map(|process| &mut process.child).collect();
        asked_to_stop |= child::pass_on(signals, &mut children);
        if order.iter().any(|index| started[*index].has_failed()) {
            let since: Instant = *failed_since.get_or_insert_with(Instant::now);
            if since.elapsed() > limits.joining {
                started.iter_mut().for_each(StartedProcess::end_before_run);
            }
            if since.elapsed() > limits.all {
                started.iter_mut().for_each(StartedProcess::kill);
            }
        }
        std::thread::sleep(POLL);
    }
}
