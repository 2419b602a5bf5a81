//! Ranks of this process and of the run, from explicit flags or a launcher's environment variables.
//!
//! One host needs none ([`LaunchSource::Alone`]). Several processes are started by torchrun, Open
//! MPI, Slurm, another MPI launcher (PMI) or a Kubernetes indexed Job, each with its own variables;
//! [`Launch::detect`] is a pure function of them. The most specific source wins: flags, then `RANK`
//! of a user or torchrun, then `mpirun` before Slurm, because a process that `mpirun` started
//! inside a Slurm job also has the job's variables, which are not its own. Launchers count
//! processes; each process may hold several ranks (threads), the same number in all.
//! [`crate::rendezvous`] connects and checks the processes.

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

/// Default port of rank 0 (PyTorch's).
pub(crate) const DEFAULT_PORT: u16 = 29_500;

/// Number of ports to try if the first may be in use.
pub(crate) const PORTS_TRIED: u16 = 16;

/// Variable with the number of ports that rank 0 may use, for a process with the flags of its rank.
const PORTS: &str = "FINETUNE_RDZV_PORTS";

/// Flags about ranks; the rest is from the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// Ranks in this process (`--ranks`, or the length of `--gpus`); 1 if unset.
    pub ranks_here: Option<usize>,
    /// Ranks in all processes (`--world-size`).
    pub world_size: Option<usize>,
    /// First rank of this process (`--rank`).
    pub rank: Option<usize>,
    /// Address of rank 0 (`--master-addr`).
    pub master_addr: Option<String>,
    /// Port of rank 0 (`--master-port`).
    pub master_port: Option<u16>,
}

/// Source of the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchSource {
    /// No launcher: this process holds all ranks.
    Alone,
    /// `--world-size` and `--rank`.
    Flags,
    /// `RANK` and `WORLD_SIZE`: torchrun, PyTorchJob, a script.
    Torchrun,
    /// Slurm's launcher, `srun`.
    Slurm,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Another launcher with PMI or PMIx (MPICH, Intel MPI, PALS).
    Pmi,
    /// An indexed Job of Kubernetes.
    KubernetesIndexedJob,
}

impl LaunchSource {
    /// Name of the source, for messages.
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

/// An index among several: `index < count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// The index, from 0.
    pub index: usize,
    /// The number of all.
    pub count: usize,
}

/// Ranks and host of this process among all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// Source of these values.
    pub source: LaunchSource,
    /// First rank of this process; it holds `rank..rank + ranks_here`.
    pub rank: usize,
    /// Ranks of this process, one per thread.
    pub ranks_here: usize,
    /// Index of the first rank among the ranks of its host: its device by default.
    pub local_rank: usize,
    /// Ranks of all processes on this host, if the launcher provides it.
    pub local_world_size: Option<usize>,
    /// Ranks of all processes.
    pub world_size: usize,
    /// Index of the host among the hosts, if the launcher provides it.
    pub host: Option<LocalRank>,
    /// Address of rank 0; none if this process holds all ranks.
    pub master: Option<Master>,
    /// Name of the run from the launcher, which separates two runs on one host; may be empty.
    pub run: String,
}

/// Values of a launcher, counted in processes.
struct DetectedLaunch {
    source: LaunchSource,
    process: LocalRank,
    /// Index among the processes of the host.
    local_index: usize,
    /// Processes of the host, if the launcher provides it.
    local_count: Option<usize>,
    host: Option<LocalRank>,
    master: Option<Master>,
    run: String,
}

impl Launch {
    /// Returns the variables that give a process with flags of its own rank what this launch knows
    /// beside ranks and address: the host, the run's name and the number of ports.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![(launchers::RUN_ID, self.run.clone())];
        variables.extend(self.master.iter().map(|master| (PORTS, master.ports.to_string())));
        if let Some(LocalRank { index, count }) = self.host {
            variables.extend([(launchers::HOST, index.to_string()), (launchers::HOSTS, count.to_string())]);
        }
        variables
    }

    /// Determines the ranks of this process from `flags` and the environment that `lookup` reads
    /// (`&|name| std::env::var_os(name)`).
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] if variables are missing, malformed or contradict each
    /// other, with the variable, its value and the accepted values.
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
        let launcher = launchers::torchrun(&env, flags)?;
        let launcher =
            launcher.map_or_else(|| launchers::open_mpi(&env, flags), |detected| Ok(Some(detected)))?;
        let launcher = launcher.map_or_else(|| slurm::slurm(&env, flags), |detected| Ok(Some(detected)))?;
        let launcher = launcher.map_or_else(|| launchers::pmi(&env, flags), |detected| Ok(Some(detected)))?;
        let launcher =
            launcher.map_or_else(|| launchers::kubernetes(&env, flags), |detected| Ok(Some(detected)))?;
        match launcher {
            Some(detected) => detected.with_ranks(&env, ranks_here),
            None => alone(flags, &env, ranks_here),
        }
    }
}

impl DetectedLaunch {
    /// Converts indices of processes to ranks.
    fn with_ranks(self, env: &LaunchEnvironment<'_>, ranks_here: usize) -> Result<Launch> {
        let LocalRank { index, count } = self.process;
        let world_size = count * ranks_here;
        if world_size > MAX_WORLD {
            return Err(Error::user(format!("cannot start {count} processes of {ranks_here} ranks each"))
                .because(format!("accepted: up to {MAX_WORLD} ranks")));
        }
        // Scripts set WORLD_SIZE beside Slurm or MPI; some count processes, some ranks.
        if let Some(declared) = env.count("WORLD_SIZE")?
            && declared.value != count
            && declared.value != world_size
        {
            let accepted = format!("unset, or {count}: {} started {count} processes", self.source.name());
            return Err(environment::refused(declared.name, &declared.value.to_string(), &accepted));
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
        let named = master::named_master(env, flags, "--world-size is above the ranks of this process")?;
        let ports = env.number(PORTS, 1, u64::from(PORTS_TRIED))?.unwrap_or(1);
        Some(Master { ports: ports as u16, ..named })
    };
    Ok(Launch {
        source: LaunchSource::Flags,
        rank,
        ranks_here,
        local_rank: env.index("LOCAL_RANK")?.map_or(0, |local| local.value),
        local_world_size: match env.count("LOCAL_WORLD_SIZE")? {
            Some(local) => Some(local.value),
            // A process of several ranks is the only one of its host; for single ranks the number
            // is unknown.
            None => Some(ranks_here).filter(|ranks| *ranks > 1 || world_size == 1),
        },
        world_size,
        host: launchers::host_of_agent(env)?,
        master,
        run: env.text(launchers::RUN_ID)?.unwrap_or_default(),
    })
}

fn alone(flags: &Flags, env: &LaunchEnvironment<'_>, ranks_here: usize) -> Result<Launch> {
    let address = flags.master_addr.as_ref().map(|_| "--master-addr");
    let port = flags.master_port.map(|_| "--master-port");
    let given: Vec<&str> = address.into_iter().chain(port).collect();
    if !given.is_empty() {
        let given = given.join(" and ");
        return Err(Error::user(format!("cannot use {given} for a run of one process"))
            .because("no launcher started this process, and neither --world-size nor --rank is given")
            .hint(format!(
                "give every process its rank: `--world-size 16 --rank 8 --master-addr HOST`, \
                 or remove {given} to train with one process"
            )));
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
