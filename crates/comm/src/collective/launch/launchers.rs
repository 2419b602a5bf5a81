//! Environment variables of each launcher except Slurm.
//!
//! Sources: PyTorch's `torchrun` documentation ("Environment Variables"), Open MPI's "Environment
//! variables set for MPI applications", MPICH's Hydra (`PMI_*`, `MPI_LOCAL*`), the PMIx standard,
//! Kubernetes' "Indexed Job" and "Job with Pod-to-Pod Communication".

use super::environment::{Count, LaunchEnvironment, missing, refused};
use super::master::{address, named_master, number_of, with_derived_port};
use super::{DetectedLaunch, Flags, LaunchSource, LocalRank, PORTS_TRIED, slurm};
use crate::error::{Error, Result};
use crate::rendezvous::Master;

/// Variable of torchrun's agent with the index of the host.
pub(super) const HOST: &str = "GROUP_RANK";
/// Variable of torchrun's agent with the number of hosts.
pub(super) const HOSTS: &str = "GROUP_WORLD_SIZE";
/// Variable of torchrun's agent with the name of the run.
pub(super) const RUN_ID: &str = "TORCHELASTIC_RUN_ID";

/// `RANK`, `WORLD_SIZE`: torchrun, PyTorchJob, or a user's script.
pub(super) fn torchrun(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<DetectedLaunch>> {
    let Some(rank) = env.index("RANK")? else { return Ok(None) };
    let world = env.count("WORLD_SIZE")?.ok_or_else(|| missing("WORLD_SIZE", "RANK is"))?;
    rank.below(&world)?;
    let local = env.index("LOCAL_RANK")?;
    let local_world = env.count("LOCAL_WORLD_SIZE")?;
    let local_index = local.as_ref().map_or(0, |local| local.value);
    if let Some(local_world) = &local_world {
        let local = local.ok_or_else(|| missing("LOCAL_RANK", "LOCAL_WORLD_SIZE is"))?;
        local.below(local_world)?;
        if local_world.value > world.value {
            let accepted = format!("1 to {}, because WORLD_SIZE is {}", world.value, world.value);
            return Err(refused(local_world.name, &local_world.value.to_string(), &accepted));
        }
    }
    let host = match host_of_agent(env)? {
        None => even_host(&rank, &world, local_world.as_ref()),
        known => known,
    };
    let local_count = local_world.map(|local_world| local_world.value);
    let (master, run) = match world.value {
        1 => (None, String::new()),
        _ => (Some(torchrun_master(env, flags)?), env.text(RUN_ID)?.unwrap_or_default()),
    };
    let process = LocalRank { index: rank.value, count: world.value };
    let source = LaunchSource::Torchrun;
    Ok(Some(DetectedLaunch { source, process, local_index, local_count, host, master, run }))
}

/// Host index of torchrun's agent.
pub(super) fn host_of_agent(env: &LaunchEnvironment<'_>) -> Result<Option<LocalRank>> {
    let Some(count) = env.count(HOSTS)? else { return Ok(None) };
    let index = env.index(HOST)?.ok_or_else(|| missing(HOST, &format!("{HOSTS} is")))?;
    index.below(&count)?;
    Ok(Some(LocalRank { index: index.value, count: count.value }))
}

/// Host index of an even spread of the processes.
fn even_host(rank: &Count, world: &Count, local_world: Option<&Count>) -> Option<LocalRank> {
    local_world
        .filter(|local| world.value.is_multiple_of(local.value))
        .map(|local| LocalRank { index: rank.value / local.value, count: world.value / local.value })
}

/// torchrun's agent has its store on MASTER_PORT, so the next ports are used.
fn torchrun_master(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Master> {
    let because = "WORLD_SIZE is above 1";
    let mut master = named_master(env, flags, because)?;
    if flags.master_port.is_none() && env.port("MASTER_PORT")?.is_none() {
        return Err(missing("MASTER_PORT", because)
            .hint("set the same free port in every process: `MASTER_PORT=29500`"));
    }
    let agent = match env.text("TORCHELASTIC_USE_AGENT_STORE")?.as_deref() {
        None | Some("False" | "false" | "0") => false,
        Some("True" | "true" | "1") => flags.master_port.is_none(),
        Some(other) => return Err(refused("TORCHELASTIC_USE_AGENT_STORE", other, "True, False")),
    };
    if agent {
        let first = master.port.checked_add(1).filter(|first| first.checked_add(PORTS_TRIED - 1).is_some());
        let most = u16::MAX - PORTS_TRIED;
        let why = format!("1 to {most}: {PORTS_TRIED} ports behind it are used");
        master.port = first.ok_or_else(|| refused("MASTER_PORT", &master.port.to_string(), &why))?;
        master.ports = PORTS_TRIED;
    }
    Ok(master)
}

/// Open MPI's `mpirun`.
pub(super) fn open_mpi(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<DetectedLaunch>> {
    let Some(rank) = env.index("OMPI_COMM_WORLD_RANK")? else { return Ok(None) };
    let size = env.count("OMPI_COMM_WORLD_SIZE")?;
    let size = size.ok_or_else(|| missing("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK is"))?;
    let local = env.index("OMPI_COMM_WORLD_LOCAL_RANK")?;
    let local_size = env.count("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let run = match env.text("PMIX_NAMESPACE")? {
        Some(run) => run,
        None => env.text("OMPI_MCA_ess_base_jobid")?.unwrap_or_default(),
    };
    mpi(env, flags, LaunchSource::OpenMpi, MpiVariables { rank, size, local, local_size, run }).map(Some)
}

/// Launchers with PMI (Hydra, PALS) or PMIx.
pub(super) fn pmi(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<DetectedLaunch>> {
    let Some(rank) = env.first_index(&["PMI_RANK", "PMIX_RANK"])? else { return Ok(None) };
    let size = match rank.name {
        "PMI_RANK" => env.count("PMI_SIZE")?.ok_or_else(|| missing("PMI_SIZE", "PMI_RANK is"))?,
        // PMIx gives the number of processes only to programs that link its library.
        _ => env.first_count(&["PMIX_SIZE", "WORLD_SIZE"])?.ok_or_else(|| {
            missing("WORLD_SIZE", "PMIX_RANK is")
                .hint("set the number of processes in every process: `WORLD_SIZE=16`")
        })?,
    };
    let local =
        env.first_index(&["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "PMIX_LOCAL_RANK"])?;
    let local_size =
        env.first_count(&["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "PMIX_LOCAL_SIZE"])?;
    let run = match env.text("PMI_JOBID")? {
        Some(run) => run,
        None => env.text("PMIX_NAMESPACE")?.unwrap_or_default(),
    };
    mpi(env, flags, LaunchSource::Pmi, MpiVariables { rank, size, local, local_size, run }).map(Some)
}

/// Values of an MPI launcher's variables.
struct MpiVariables {
    rank: Count,
    size: Count,
    local: Option<Count>,
    local_size: Option<Count>,
    run: String,
}

fn mpi(
    env: &LaunchEnvironment<'_>,
    flags: &Flags,
    source: LaunchSource,
    variables: MpiVariables,
) -> Result<DetectedLaunch> {
    let MpiVariables { rank, size, local, local_size, run } = variables;
    rank.below(&size)?;
    if let (Some(local), Some(local_size)) = (&local, &local_size) {
        local.below(local_size)?;
    }
    let one_host = local_size.as_ref().is_some_and(|local| local.value == size.value);
    let master = match size.value {
        1 => None,
        _ => Some(mpi_master(env, flags, one_host, &run)?),
    };
    // The host index is known only for one host, because hosts may hold different numbers of
    // processes.
    let host = one_host.then_some(LocalRank { index: 0, count: 1 });
    let process = LocalRank { index: rank.value, count: size.value };
    let local_index = local.map_or(0, |local| local.value);
    let local_count = local_size.map(|local| local.value);
    Ok(DetectedLaunch { source, process, local_index, local_count, host, master, run })
}

/// MASTER_ADDR; else this host if it has all processes; else the first host of the enclosing Slurm
/// job, where `mpirun` starts process 0.
fn mpi_master(env: &LaunchEnvironment<'_>, flags: &Flags, one_host: bool, run: &str) -> Result<Master> {
    let address = match address(env, flags)? {
        Some(address) => address,
        None if one_host => "127.0.0.1".to_owned(),
        None => slurm::first_host(env)?.ok_or_else(|| {
            missing("MASTER_ADDR", "the processes are on several hosts")
                .hint("name the host of process 0: `mpirun -x MASTER_ADDR=HOST ...` (MPICH: `-genv MASTER_ADDR HOST`)")
        })?,
    };
    with_derived_port(env, flags, address, number_of(run))
}

/// A Kubernetes Job with `completionMode: Indexed`. The index alone may also number independent
/// runs, so the pods form one run only if WORLD_SIZE or MASTER_ADDR is set.
pub(super) fn kubernetes(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<DetectedLaunch>> {
    let Some(index) = env.index("JOB_COMPLETION_INDEX")? else { return Ok(None) };
    let world = env.count("WORLD_SIZE")?;
    let joined = world.as_ref().is_some_and(|world| world.value > 1);
    if !joined && address(env, flags)?.is_none() {
        return Ok(None);
    }
    let world = world.ok_or_else(|| {
        missing("WORLD_SIZE", "JOB_COMPLETION_INDEX and MASTER_ADDR are")
            .hint("set it in the pod's env to the Job's `completions`")
    })?;
    index.below(&world)?;
    let master = match world.value {
        1 => None,
        _ => {
            let has_address = matches!(address(env, flags), Ok(Some(_)));
            let hinted = |error| if has_address { error } else { kubernetes_hint(env, error) };
            Some(named_master(env, flags, "WORLD_SIZE is above 1").map_err(hinted)?)
        }
    };
    let process = LocalRank { index: index.value, count: world.value };
    // A pod counts as a host: it has its own network, devices and files.
    let (source, host) = (LaunchSource::KubernetesIndexedJob, Some(process));
    let run = String::new();
    Ok(Some(DetectedLaunch { source, process, local_index: 0, local_count: Some(1), host, master, run }))
}

/// Adds the address of pod 0: its host name is JOB-0, resolved through a headless service.
fn kubernetes_hint(env: &LaunchEnvironment<'_>, error: Error) -> Error {
    let name = env.text("HOSTNAME").ok().flatten();
    let job = name.as_deref().and_then(|name| name.rsplit_once('-')).map_or("JOB", |(job, _)| job);
    error.hint(format!(
        "set `MASTER_ADDR={job}-0.SERVICE` in the pod's env, SERVICE being a headless service that is the pods' `subdomain`"
    ))
}
