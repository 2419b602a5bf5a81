//! Environment variables of a task of `srun`.
//!
//! The variables of the step (`SLURM_STEP_*`) take precedence: those of the job cover the whole
//! allocation, of which a step may use a part. Only `srun` sets them (Slurm's src/common/env.c).
//! Without them the process is the batch script's: its SLURM_PROCID is 0, and no other task was
//! started.

use super::environment::{Count, LaunchEnvironment, missing, refused};
use super::master::{address, with_derived_port};
use super::nodelist::{expand, tasks_per_node};
use super::{DetectedLaunch, Flags, LaunchSource, LocalRank};
use crate::error::{Error, ErrorContext, Result};

const NODELISTS: [&str; 3] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];

/// Ranks of a task of a job step.
pub(super) fn slurm(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<DetectedLaunch>> {
    let Some(rank) = env.index("SLURM_PROCID")? else { return Ok(None) };
    if other_launcher(env, &rank)? {
        return Ok(None);
    }
    let step = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"];
    if rank.value == 0 && !step.iter().any(|name| env.is_set(name)) {
        return batch_script(env);
    }
    let tasks = env.first_count(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"])?;
    let tasks = tasks.ok_or_else(|| missing("SLURM_NTASKS", "SLURM_PROCID is"))?;
    rank.below(&tasks)?;
    let process = LocalRank { index: rank.value, count: tasks.value };
    let source = LaunchSource::Slurm;
    if tasks.value == 1 {
        let (host, run) = (Some(process), String::new());
        let (local_index, local_count, master) = (0, Some(1), None);
        return Ok(Some(DetectedLaunch { source, process, local_index, local_count, host, master, run }));
    }
    let local = env.index("SLURM_LOCALID")?.ok_or_else(|| missing("SLURM_LOCALID", "SLURM_PROCID is"))?;
    let host = host(env)?;
    let local_count = check_spread(env, &tasks, &local, host)?;
    let number = |name: &'static str| env.number(name, 0, u64::from(u32::MAX));
    let job = number("SLURM_JOB_ID")?.map_or_else(|| number("SLURM_JOBID"), |job| Ok(Some(job)))?;
    let step = number("SLURM_STEP_ID")?.unwrap_or(0);
    let job = job.ok_or_else(|| missing("SLURM_JOB_ID", "SLURM_PROCID is"))?;
    let address = match (address(env, flags)?, first_host(env)?) {
        (Some(address), _) | (None, Some(address)) => address,
        (None, None) => return Err(missing("SLURM_STEP_NODELIST", "SLURM_NTASKS is above 1")),
    };
    let master = Some(with_derived_port(env, flags, address, job + step)?);
    let run = format!("slurm {job}.{step}");
    let local_index = local.value;
    Ok(Some(DetectedLaunch { source, process, local_index, local_count, host, master, run }))
}

/// First host of the step or job: it runs task 0 in every distribution except `arbitrary`.
pub(super) fn first_host(env: &LaunchEnvironment<'_>) -> Result<Option<String>> {
    Ok(hosts(env)?.and_then(|hosts| hosts.into_iter().next()))
}

fn hosts(env: &LaunchEnvironment<'_>) -> Result<Option<Vec<String>>> {
    for name in NODELISTS {
        if let Some(list) = env.text(name)? {
            return expand(&list).map(Some).during(|| format!("cannot use {name}"));
        }
    }
    Ok(None)
}

/// True for an MPI launcher inside a job: its processes inherit Slurm's variables of another
/// process. `srun --mpi=pmi2` sets the same numbers in both.
fn other_launcher(env: &LaunchEnvironment<'_>, rank: &Count) -> Result<bool> {
    match env.index("PMI_RANK")? {
        Some(pmi) => {
            let (theirs, ours) = (env.count("PMI_SIZE")?, env.count("SLURM_NTASKS")?);
            Ok(pmi.value != rank.value || theirs.map(|n| n.value) != ours.map(|n| n.value))
        }
        None => Ok(false),
    }
}

/// Handles a process that `srun` did not start: valid on one node, where ranks are threads.
fn batch_script(env: &LaunchEnvironment<'_>) -> Result<Option<DetectedLaunch>> {
    match env.first_count(&["SLURM_JOB_NUM_NODES", "SLURM_NNODES"])? {
        Some(nodes) if nodes.value > 1 => Err(Error::user("cannot use the other nodes of this Slurm job")
            .because(format!("{} is {}, but this process was not started by srun", nodes.name, nodes.value))
            .hint("put srun before the command: `srun --ntasks-per-node=1 finetune ...`")),
        _ => Ok(None),
    }
}

/// Index of this node in the step.
fn host(env: &LaunchEnvironment<'_>) -> Result<Option<LocalRank>> {
    let Some(count) = env.first_count(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"])?
    else {
        return Ok(None);
    };
    if let Some(hosts) = hosts(env)?
        && count.name == "SLURM_STEP_NUM_NODES"
        && env.is_set("SLURM_STEP_NODELIST")
        && hosts.len() != count.value
    {
        let accepted = format!("{}, the hosts in SLURM_STEP_NODELIST", hosts.len());
        return Err(refused(count.name, &count.value.to_string(), &accepted));
    }
    let Some(index) = env.index("SLURM_NODEID")? else { return Ok(None) };
    index.below(&count)?;
    Ok(Some(LocalRank { index: index.value, count: count.value }))
}

/// Number of tasks of this node, if known. Checks that the tasks per node add up to all tasks, and
/// that this task's index on its node exists.
fn check_spread(
    env: &LaunchEnvironment<'_>,
    tasks: &Count,
    local: &Count,
    host: Option<LocalRank>,
) -> Result<Option<usize>> {
    let name =
        ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"].into_iter().find(|name| env.is_set(name));
    let Some(name) = name else {
        return match env.count("SLURM_NTASKS_PER_NODE")? {
            Some(most) => local.below(&most),
            None => local.below(tasks),
        }
        .map(|()| host.filter(|host| host.count == 1).map(|_| tasks.value));
    };
    let text = env.text(name)?.unwrap_or_default();
    let spread = tasks_per_node(&text).during(|| format!("cannot use {name}"))?;
    // Without the step's own list it may be the job's, which a step need not fill.
    let own = name == "SLURM_STEP_TASKS_PER_NODE" || !env.is_set("SLURM_STEP_NUM_TASKS");
    if own && spread.iter().sum::<usize>() != tasks.value {
        let accepted = format!("numbers that add up to {}, which {} is", tasks.value, tasks.name);
        return Err(refused(name, &text, &accepted));
    }
    match host.and_then(|host| spread.get(host.index)) {
        Some(here) if own && local.value >= *here => {
            let accepted = format!("0 to {}, because {name} is {text}", here.saturating_sub(1));
            Err(refused(local.name, &local.value.to_string(), &accepted))
        }
        here => Ok(here.copied().filter(|_| own)),
    }
}
