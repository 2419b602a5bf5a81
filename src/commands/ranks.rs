//! Ranks: threads of this process, or one in each of several processes that a launcher started.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cli::TrainArgs;
use crate::collective::control::{Control, Identity, Terms};
use crate::collective::launch::{Flags, Launch};
use crate::collective::{self, Collective, local};
use crate::error::{Context as _, Error, Result};
use crate::ops::threads;
use crate::plan::Plan;
use crate::report::{Terminal, Verbosity};

/// Plants a fault in a rank, as `1:backward:panic`: for tests of how runs end.
const FAULT: &str = "FINETUNE_FAULT";

/// Who the ranks are, by flags and environment.
///
/// # Errors
/// They contradict each other; several processes are there that this binary has no way to connect.
pub(super) fn launch(args: &TrainArgs) -> Result<Launch> {
    let gpus = args.gpus.as_ref().map(|gpus| gpus.0.len());
    let flags = Flags {
        ranks_here: args.ranks.map(usize::from).or(gpus),
        world_size: args.processes.world_size,
        rank: args.processes.rank,
        master_addr: args.processes.master_addr.clone(),
        master_port: args.processes.master_port,
    };
    let launch = Launch::detect(&flags, &|name| std::env::var_os(name))?;
    if launch.master.is_none() {
        return Ok(launch);
    }
    let found = || {
        let (all, source) = (launch.world_size, launch.source.name());
        Error::user("cannot train over several processes")
            .because(format!("there are {all} ranks, by {source}"))
    };
    if gpus.is_some() {
        return Err(found()
            .because("GPUs of several processes are not connected in this version")
            .hint("leave out `--gpus` to train on the CPUs"));
    }
    if launch.ranks_here > 1 {
        return Err(found()
            .because(format!("each process holds {}; accepted: one rank in each process", launch.ranks_here))
            .hint("start more processes, and leave out `--ranks`"));
    }
    if collective::CONNECTS_PROCESSES {
        Ok(launch)
    } else {
        Err(found()
            .because("this binary was built without MPI, which carries what ranks say between processes")
            .hint("build it with `cargo build --release --features mpi`; on one host, `--ranks N` needs neither"))
    }
}

/// Runs `rank` on every rank of this process and returns the failure that came first.
pub(super) fn run(
    launch: &Launch,
    plan: &Plan,
    rank: impl Fn(Arc<dyn Collective>) -> Result<()> + Sync,
) -> Result<()> {
    match launch.master {
        None => in_this_process(launch.world_size, rank),
        Some(_) => among_processes(launch, plan, rank),
    }
}

fn in_this_process(ranks: usize, rank: impl Fn(Arc<dyn Collective>) -> Result<()> + Sync) -> Result<()> {
    let mut world = local::World::new(ranks);
    if let Ok(text) = std::env::var(FAULT) {
        world = world.with_fault(text.parse().during(|| format!("cannot use {FAULT}"))?);
    }
    let each = (threads::count() / ranks).max(1);
    local::run_ranks(world.ends(), |end| match ranks {
        1 => rank(Arc::new(end)),
        _ => threads::in_own_pool(each, || rank(Arc::new(end))),
    })?;
    Ok(())
}

/// Meets the other processes, which must be about to run the same, then trains as one rank of them.
fn among_processes(
    launch: &Launch,
    plan: &Plan,
    rank: impl Fn(Arc<dyn Collective>) -> Result<()> + Sync,
) -> Result<()> {
    let mut terms = Terms::from_environment(&|name| std::env::var_os(name))?;
    terms.notice = Arc::new(|text| Terminal::stderr(Verbosity::Normal).warn(text));
    let control = Control::meet(launch, &Identity::here(digests(plan)?), &terms)?;
    let done = threads::in_own_pool(threads::count(), || {
        let world = collective::between_processes()?;
        let peers = Arc::downgrade(&world);
        control.on_failure(move |failure| {
            if let Some(world) = peers.upgrade() {
                world.abort(&format!("rank {} on {}: {}", failure.rank, failure.host, failure.why));
            }
        });
        let done = rank(Arc::clone(&world));
        if let Err(error) = &done {
            world.abort(error.what());
        }
        done
    });
    match &done {
        Ok(()) => control.leave()?,
        Err(error) => control.fail(launch.rank, error.what()),
    }
    done
}

/// What all processes must have alike.
fn digests(plan: &Plan) -> Result<BTreeMap<String, String>> {
    let binary = std::env::current_exe()
        .map_err(|e| Error::internal("cannot find this binary").because(e.to_string()))?;
    let mut hasher = blake3::Hasher::new();
    let mut file = std::fs::File::open(&binary).map_err(|e| Error::io("read", &binary, &e))?;
    std::io::copy(&mut file, &mut hasher).map_err(|e| Error::io("read", &binary, &e))?;
    let of = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    let mut digests = BTreeMap::from([
        ("binary".to_owned(), hasher.finalize().to_hex().to_string()),
        ("plan".to_owned(), of(&plan.run_text())),
        ("data".to_owned(), plan.train.0.digest().to_hex().to_string()),
    ]);
    if let Some(files) = &plan.base.files {
        digests.insert("model".to_owned(), files.fingerprint().to_hex().to_string());
    }
    Ok(digests)
}
