//! Who the ranks are: the place of this process among all, from explicit flags or from what a launcher left in the
//! environment.
//!
//! One host needs nothing ([`LaunchSource::Alone`]). Several processes are started by torchrun, Open MPI, Slurm, another
//! MPI launcher (PMI) or a Kubernetes indexed Job, each with its own variables; [`Launch::detect`] is a pure function
//! of them. The most specific wins: flags, then what a user or torchrun names `RANK`, then `mpirun` before Slurm,
//! because a process that `mpirun` started inside a Slurm job also sees the variables of the job, and they are not its
//! own. Launchers count processes; each process may hold several ranks (threads), the same number in all of them.
//! How processes then find and check one another is the business of [`crate::rendezvous`].

mod environment;
mod launchers;
mod master;
pub mod nodelist;
mod slurm;

use std::ffi::OsString;

use crate::error::{Error, Result};
use crate::rendezvous::{MAX_WORLD, Master};
use crate::units;
use environment::LaunchEnvironment;

/// The port of rank 0 unless the user or a launcher gives another (PyTorch's).
pub const DEFAULT_PORT: u16 = 29_500;

/// Ports that are tried where the first may be taken.
pub const PORTS_TRIED: u16 = 16;

/// What the command line says about ranks; the rest comes from the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// Ranks that this process holds (`--ranks`, or the length of `--gpus`); 1 if unset.
    pub ranks_here: Option<usize>,
    /// Ranks in all processes (`--world-size`).
    pub world_size: Option<usize>,
    /// The first rank of this process (`--rank`).
    pub rank: Option<usize>,
    /// Where rank 0 listens (`--master-addr`).
    pub master_addr: Option<String>,
    /// And on which port (`--master-port`).
    pub master_port: Option<u16>,
}

/// Who started the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchSource {
    /// Nobody: this process holds all ranks.
    Alone,
    /// `--world-size` and `--rank`.
    Flags,
    /// `RANK` and `WORLD_SIZE`: torchrun, PyTorchJob, a script.
    Torchrun,
    /// Slurm's launcher, `srun`.
    Slurm,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Another launcher that speaks PMI or PMIx (MPICH, Intel MPI, PALS).
    Pmi,
    /// An indexed Job of Kubernetes.
    KubernetesIndexedJob,
}

impl LaunchSource {
    /// As people read it.
    pub fn name(self) -> &'static str {
        match self {
            LaunchSource::Alone => "one process",
            LaunchSource::Flags => "--world-size and --rank",
            LaunchSource::Torchrun => "RANK and WORLD_SIZE (torchrun)",
            LaunchSource::Slurm => "Slurm",
            LaunchSource::OpenMpi => "Open MPI",
            LaunchSource::Pmi => "PMI",
            LaunchSource::KubernetesIndexedJob => "Kubernetes indexed Job",
        }
    }
}

/// A place among equals: `index < count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// Which one, from 0.
    pub index: usize,
    /// Of how many.
    pub count: usize,
}

/// The place of this process among all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Who said so.
    pub source: LaunchSource,
    /// The first rank of this process; it holds `rank..rank + ranks_here`.
    pub rank: usize,
    /// Ranks of this process, one a thread.
    pub ranks_here: usize,
    /// The place of the first rank among the ranks of its host: its device, if none is named.
    pub local_rank: usize,
    /// Ranks of all processes on this host, where the launcher tells.
    pub local_world_size: Option<usize>,
    /// Ranks of all processes.
    pub world_size: usize,
    /// The host among the hosts, where the launcher tells.
    pub host: Option<LocalRank>,
    /// Where rank 0 listens; none when this process holds all ranks.
    pub master: Option<Master>,
    /// Names the run where the launcher does, so that two runs on one host do not meet each other; may be empty.
    pub run: String,
}

/// What a launcher says, in processes.
struct DetectedLaunch {
    source: LaunchSource,
    process: LocalRank,
    /// Place among the processes of the host.
    local_index: usize,
    /// Processes of the host, where the launcher tells.
    local_count: Option<usize>,
    host: Option<LocalRank>,
    master: Option<Master>,
    run: String,
}

impl Launch {
    /// Finds the place of this process from `flags` and the environment that `lookup` reads
    /// (`&|name| std::env::var_os(name)`).
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] when variables are missing, malformed or contradict each other: the variable, its
    /// value and what is accepted.
    pub fn detect(flags: &Flags, lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Launch> {
        let env = LaunchEnvironment::new(lookup);
        let ranks_here = flags.ranks_here.unwrap_or(1);
        if !(1..=MAX_WORLD).contains(&ranks_here) {
            return Err(Error::user(format!("cannot start {ranks_here} ranks"))
                .because(format!("accepted: 1 to {MAX_WORLD}")));
        }
        match (flags.world_size, flags.rank) {
            (Some(world_size), Some(rank)) => return by_flags(flags, &env, ranks_here, world_size, rank),
            (None, None) => {}
            (world_size, _) => {
                let (given, other) = if world_size.is_some() {
                    ("--world-size", "--rank")
                } else {
                    ("--rank", "--world-size")
                };
                return Err(Error::user(format!("cannot use {given} without {other}"))
                    .hint("give both in every process: `--world-size 16 --rank 8`"));
            }
        }
        let found = launchers::torchrun(&env, flags)?;
        let found = found.map_or_else(|| launchers::open_mpi(&env, flags), |found| Ok(Some(found)))?;
        let found = found.map_or_else(|| slurm::slurm(&env, flags), |found| Ok(Some(found)))?;
        let found = found.map_or_else(|| launchers::pmi(&env, flags), |found| Ok(Some(found)))?;
        let found = found.map_or_else(|| launchers::kubernetes(&env, flags), |found| Ok(Some(found)))?;
        match found {
            Some(found) => found.with_ranks(&env, ranks_here),
            None => alone(flags, &env, ranks_here),
        }
    }
}

impl DetectedLaunch {
    /// Turns places of processes into places of ranks.
    fn with_ranks(self, env: &LaunchEnvironment<'_>, ranks_here: usize) -> Result<Launch> {
        let LocalRank { index, count } = self.process;
        let world_size = count * ranks_here;
        if world_size > MAX_WORLD {
            return Err(Error::user(format!("cannot start {count} processes of {ranks_here} ranks each"))
                .because(format!("accepted: up to {MAX_WORLD} ranks")));
        }
        // Scripts set WORLD_SIZE beside Slurm or MPI; some count processes, some ranks.
        if let Some(said) = env.count("WORLD_SIZE")?
            && said.value != count
            && said.value != world_size
        {
            let accepted = format!("unset, or {count}: {} started {count} processes", self.source.name());
            return Err(environment::refused(said.name, &said.value.to_string(), &accepted));
        }
        Ok(Launch {
            source: self.source,
            rank: index * ranks_here,
            ranks_here,
            local_rank: self.local_index * ranks_here,
            local_world_size: match count {
                1 => Some(ranks_here),
                _ => self.local_count.map(|count| count * ranks_here),
            },
            world_size,
            host: self.host,
            master: self.master,
            run: self.run,
        })
    }
}

fn by_flags(
    flags: &Flags,
    env: &LaunchEnvironment<'_>,
    ranks_here: usize,
    world_size: usize,
    rank: usize,
) -> Result<Launch> {
    let fault = |text: String, accepted: String| {
        Error::user(format!("cannot use {text}")).because(format!("accepted: {accepted}"))
    };
    if !(1..=MAX_WORLD).contains(&world_size) {
        return Err(fault(format!("--world-size {world_size}"), format!("1 to {MAX_WORLD}")));
    }
    let here = units::exact(ranks_here, "rank");
    if ranks_here > world_size {
        let text = format!("--world-size {world_size} with {here} in this process");
        return Err(fault(
            text,
            format!("--world-size {ranks_here} or more: it counts the ranks of all processes"),
        ));
    }
    if rank > world_size - ranks_here {
        let text = format!("--rank {rank} of {world_size} with {here} in this process");
        return Err(fault(text, format!("--rank 0 to {}", world_size - ranks_here)));
    }
    let master = if world_size == ranks_here {
        None
    } else {
        Some(master::named_master(env, flags, "--world-size is above the ranks of this process")?)
    };
    Ok(Launch {
        source: LaunchSource::Flags,
        rank,
        ranks_here,
        local_rank: env.index("LOCAL_RANK")?.map_or(0, |local| local.value),
        local_world_size: match env.count("LOCAL_WORLD_SIZE")? {
            Some(local) => Some(local.value),
            // A process of several ranks is its host's; how many processes of one rank a host has, nobody says.
            None => Some(ranks_here).filter(|ranks| *ranks > 1 || world_size == 1),
        },
        world_size,
        host: None,
        master,
        run: String::new(),
    })
}

fn alone(flags: &Flags, env: &LaunchEnvironment<'_>, ranks_here: usize) -> Result<Launch> {
    if flags.master_addr.is_some() || flags.master_port.is_some() {
        return Err(Error::user("cannot use --master-addr and --master-port for a run of one process")
            .because("no launcher started this process, and neither --world-size nor --rank is given")
            .hint("give every process its place: `--world-size 16 --rank 8 --master-addr HOST`"));
    }
    if let Some(world) = env.count("WORLD_SIZE")?
        && world.value > 1
    {
        return Err(environment::missing("RANK", &format!("WORLD_SIZE is {}", world.value))
            .hint("set RANK in every process, or unset WORLD_SIZE"));
    }
    Ok(Launch {
        source: LaunchSource::Alone,
        rank: 0,
        ranks_here,
        local_rank: 0,
        local_world_size: Some(ranks_here),
        world_size: ranks_here,
        host: Some(LocalRank { index: 0, count: 1 }),
        master: None,
        run: String::new(),
    })
}
