//! Ranks of this process: threads, one for each of its GPUs or shares of its cores. If a launcher
//! or a parent (`processes`) started several processes, their ranks form one world.
//!
//! Ranks on GPUs communicate over NCCL, in one process or many. Ranks on CPUs use memory within one
//! process and MPI between several.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Device;

use super::child;
use crate::cli::{Gpus, ProcessArgs, TrainArgs};
use crate::collective;
use crate::collective::in_process::InjectedFault;
use crate::collective::launch::{Flags, Launch};
use crate::collective::nccl::{self, AbortFlag, GroupInfo, NcclLibrary, UniqueId};
use crate::collective::{
    Collective, FaultInjector, FaultNotice, HangLimits, HangWatch, ProgressBoard, RankFailure,
    TimedCollective, in_process,
};
use crate::data::ExampleSource as _;
use crate::error::{Error, ErrorCategory, ErrorContext as _, Result};
use crate::locks::locked;
use crate::ops;
use crate::planning::{MemoryBudget, Plan, available};
use crate::rendezvous::{self, JoinRequest, Peer, RendezvousOptions, Session};
use crate::report::alerts::raise_hang;
use crate::report::ui::restore_screen;
use crate::report::{Terminal, Verbosity};
use crate::runtime::clock;
use crate::runtime::device;
use crate::runtime::device::DeviceChoice;
use crate::runtime::thread_pool;
use crate::threads;

/// Environment variable that injects a fault into a rank, such as `1:backward:panic`, for tests.
/// Only builds with debug assertions, which tests use, read it.
const FAULT: &str = "FINETUNE_FAULT";

/// Environment variable by which tests replace the clock: `planted` or `processor`.
const CLOCK: &str = "FINETUNE_CLOCK";

/// Longest time that a process which lost a peer waits for the rendezvous to name the failed rank
/// and the reason.
const PEER_FAILURE_TIMEOUT: Duration = Duration::from_secs(2);

/// Ranks that a command requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankRequest<'a> {
    /// GPUs with a rank each.
    pub(crate) gpus: Option<&'a Gpus>,
    /// Number of ranks on the CPU.
    pub(crate) ranks: Option<u16>,
    pub(crate) processes: &'a ProcessArgs,
    /// Purpose of the ranks for messages, as a verb: "train".
    pub(crate) purpose: &'static str,
}

impl<'a> From<&'a TrainArgs> for RankRequest<'a> {
    fn from(args: &'a TrainArgs) -> Self {
        let (gpus, ranks) = (args.devices.gpus.as_ref(), args.devices.ranks);
        RankRequest { gpus, ranks, processes: &args.processes, purpose: "train" }
    }
}

/// Values that must be equal in all processes of a run, by names for messages. Also the time that a
/// rank may be silent; none: learned from the run.
struct RunFingerprint<'a> {
    alike: &'a (dyn Fn() -> Result<BTreeMap<String, String>> + Sync),
    timeout: Option<Duration>,
}

/// Detects the ranks of the run from flags and environment.
///
/// # Errors
/// Flags and environment contradict each other; this binary cannot connect several processes.
pub(crate) fn launch<'a>(request: impl Into<RankRequest<'a>>) -> Result<Launch> {
    let RankRequest { gpus, ranks, processes, purpose } = request.into();
    let flags = Flags {
        ranks_here: ranks.map(usize::from).or(gpus.map(|gpus| gpus.0.len())),
        world_size: processes.world_size,
        rank: processes.rank,
        master_addr: processes.master_addr.clone(),
        master_port: processes.master_port,
    };
    let launch = Launch::detect(&flags, &|name| std::env::var_os(name))?;
    let needs_no_mpi = launch.master.is_none() || on_gpus(RankRequest { gpus, ranks, processes, purpose })?;
    if needs_no_mpi || collective::CONNECTS_PROCESSES {
        return Ok(launch);
    }
    let (all, source) = (launch.world_size, launch.source.name());
    Err(Error::user(format!("cannot {purpose} over several processes"))
        .because(format!("the world size is {all}, from {source}"))
        .because("this binary was built without MPI, which CPU ranks in several processes need")
        .hint(
            "on one host, start one process with `--ranks N`; over hosts, start a build with `--features mpi` (`cargo build \
             --release --features mpi`) under `mpirun`; torchrun cannot replace mpirun",
        ))
}

/// Returns whether the ranks are on GPUs: with `--gpus` yes, with `--ranks` no, else if this build
/// and machine have GPUs.
pub(crate) fn on_gpus<'a>(request: impl Into<RankRequest<'a>>) -> Result<bool> {
    let RankRequest { gpus, ranks, .. } = request.into();
    Ok(match (gpus, ranks) {
        (Some(_), _) => true,
        (None, Some(_)) => false,
        (None, None) => device::preferred()? != DeviceChoice::Cpu,
    })
}

/// Ranks of this process with their devices.
pub(crate) struct RankSetup {
    /// Their ranks and the world size.
    pub(crate) launch: Launch,
    /// A GPU for each rank, or the CPU for all.
    devices: Vec<Device>,
    /// NCCL for several ranks on GPUs, else none.
    nccl: Option<Arc<NcclLibrary>>,
}

impl RankSetup {
    /// Opens the devices, loads their kernels, and opens NCCL where several GPUs need it.
    ///
    /// # Errors
    /// A requested GPU is missing or cannot be opened; NCCL is missing or too old.
    pub(crate) fn open<'a>(launch: Launch, request: impl Into<RankRequest<'a>>) -> Result<Self> {
        let request = request.into();
        if !on_gpus(request)? {
            return Ok(RankSetup { launch, devices: vec![Device::Cpu], nccl: None });
        }
        let devices = match request.gpus {
            Some(gpus) => device::open_gpus(&gpus.0)?,
            // With a process for each GPU, the GPU number is the local rank, or 0 if the launcher
            // hides the other GPUs. NCCL refuses two ranks on one GPU.
            None => device::open_gpus(&[launch.local_rank % device::gpus()?.len().max(1)])?,
        };
        devices.iter().try_for_each(ops::preload)?;
        let nccl = (launch.world_size > 1).then(NcclLibrary::open).transpose()?;
        Ok(RankSetup { launch, devices, nccl })
    }

    /// Returns the device to plan for: the one with the least free memory.
    pub(crate) fn device(&self) -> Device {
        device::tightest(&self.devices)
    }

    /// Returns the memory that decides keys that are "auto": among several processes the least of
    /// all, so that their plans are the same.
    ///
    /// # Errors
    /// The processes do not all join.
    pub(crate) fn memory(&self) -> Result<MemoryBudget> {
        if !self.among_others() {
            return Ok(MemoryBudget::Local);
        }
        let options = rendezvous_options(&self.launch)?;
        least(&self.launch, &options, available(&self.device())).map(MemoryBudget::Agreed)
    }

    /// Returns whether the run has other processes.
    pub(crate) fn among_others(&self) -> bool {
        self.launch.master.is_some()
    }

    /// Broadcasts the result of `make` in the process of rank 0 to all processes, before they have
    /// a plan to compare.
    ///
    /// # Errors
    /// Those of `make`; the processes do not all join.
    pub(crate) fn agree(&self, what: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        if !self.among_others() {
            return make();
        }
        agree(&self.launch, &rendezvous_options(&self.launch)?, what, make)
    }

    /// Runs `rank` on every rank of this process, with its communicator and its device, and returns
    /// the first failure. `begin` runs before them, after all processes have joined with the same
    /// plan. A rank that hangs ends the run: if its thread does not return, the process ends here.
    ///
    /// # Errors
    /// Those of `begin` or of a rank; the processes do not all join; another process has failed; a
    /// rank hangs.
    pub(crate) fn run(
        &self,
        plan: &Plan,
        begin: impl FnOnce() -> Result<()>,
        rank: impl Fn(TimedCollective, &Device) -> Result<()> + Sync,
    ) -> Result<()> {
        let timeout = plan.recipe.parallel.timeout_secs.map(Duration::from_secs);
        self.run_on(&RunFingerprint { alike: &|| plan_digests(plan), timeout }, begin, rank)
    }

    /// Runs `rank` like [`RankSetup::run`], without a plan: all processes must pass the same
    /// `what`. Returns the result of rank 0 in its process, none in others.
    ///
    /// # Errors
    /// Those of [`RankSetup::run`].
    pub(crate) fn measure<T: Send>(
        &self,
        what: &str,
        rank: impl Fn(&TimedCollective, &Device) -> Result<T> + Sync,
    ) -> Result<Option<T>> {
        let result = Mutex::new(None);
        let alike = || Ok(BTreeMap::from([("measurement".to_owned(), hash(what))]));
        let terms = RunFingerprint { alike: &alike, timeout: None };
        let keep_first = |world: TimedCollective, device: &Device| -> Result<()> {
            let measured = rank(&world, device)?;
            if world.rank() == 0 {
                *locked(&result) = Some(measured);
            }
            Ok(())
        };
        self.run_on(&terms, || Ok(()), keep_first)?;
        Ok(result.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn run_on(
        &self,
        terms: &RunFingerprint<'_>,
        begin: impl FnOnce() -> Result<()>,
        rank: impl Fn(TimedCollective, &Device) -> Result<()> + Sync,
    ) -> Result<()> {
        let fault = planted_fault()?;
        let board = Arc::new(ProgressBoard::default());
        let rank = |local_rank: usize, world: Arc<dyn Collective>| {
            let device = self.devices.get(local_rank).unwrap_or(&Device::Cpu);
            let world = TimedCollective::watched(with_fault(world, fault), &board);
            let _works = world.work_guard();
            rank(world, device)
        };
        let limits = HangLimits {
            floor: HangLimits::FLOOR,
            timeout: terms.timeout,
            on_host: self.devices.iter().all(Device::is_cpu),
            holds_all: !self.among_others(),
        };
        let watch = HangWatch::start(&board, limits, end_process)?;
        let done = match (&self.launch.master, &self.nccl) {
            (None, None) => begin().and_then(|()| {
                let ranks = self.launch.world_size;
                let each = (thread_pool::num_threads() / ranks).max(1);
                // The watch detects hung ranks better than a fixed timeout.
                let world = in_process::InProcessWorld::new(ranks).with_timeout(Duration::MAX);
                run_threads(world, each, |world| rank(0, world)).map(drop)
            }),
            (None, Some(library)) => begin().and_then(|()| {
                let id = library.unique_id()?;
                let abort_flag = AbortFlag::ending_by(end_process);
                self.on_gpus(library, id, &abort_flag, &rank).map_err(|failed| failed.error)
            }),
            (Some(_), library) => {
                let watched = Watched { watch: &watch, board: &board, terms };
                self.among_processes(library.as_ref(), &watched, begin, &rank)
            }
        };
        match watch.stop() {
            Some(hang) => Err(hang.error),
            None => done,
        }
    }

    fn on_gpus(
        &self,
        library: &Arc<NcclLibrary>,
        id: UniqueId,
        abort_flag: &Arc<AbortFlag>,
        rank: &(impl Fn(usize, Arc<dyn Collective>) -> Result<()> + Sync),
    ) -> Result<(), RankFailure> {
        let Launch { rank: first, world_size: size, .. } = self.launch;
        let group_info = GroupInfo { id, first, size, deadline: nccl::DEADLINE };
        let each = (thread_pool::num_threads() / self.devices.len()).max(1);
        run_on_gpus(library, &group_info, &self.devices, abort_flag, each, rank).map(drop)
    }

    /// Joins the other processes, which must have the same fingerprint, then runs the ranks.
    fn among_processes(
        &self,
        library: Option<&Arc<NcclLibrary>>,
        watched: &Watched<'_>,
        begin: impl FnOnce() -> Result<()>,
        rank: &(impl Fn(usize, Arc<dyn Collective>) -> Result<()> + Sync),
    ) -> Result<()> {
        let request = join_request(&self.launch, digests((watched.terms.alike)()?, library)?);
        let mut options = rendezvous_options(&self.launch)?;
        options.silence_limit = watched.terms.timeout.unwrap_or(options.silence_limit);
        let session = Session::join(request, &options)?;
        watch_failures_elsewhere(&self.launch, &session);
        let board = Arc::clone(watched.board);
        session.report_status(move || board.lines().join("; "));
        let messenger = session.messenger();
        watched.watch.on_hang(move |hang| messenger.fail(hang.rank, &hang.why));
        begin().inspect_err(|error| session.fail(self.launch.rank, error.what()))?;
        let done = match library {
            Some(library) => {
                let id = session.broadcast("the NCCL id", || Ok(library.unique_id()?.0.to_vec()))?;
                let id = <[u8; 128]>::try_from(id.as_slice())
                    .map_err(|_| Error::internal(format!("the NCCL id came as {} bytes", id.len())))?;
                let abort_flag = AbortFlag::ending_by(end_process);
                let messenger = session.messenger();
                abort_flag.notify_peers_by(move |rank, why| messenger.fail(rank, why));
                // Weak, because the flag holds the session's connections, which hold this.
                let stop = Arc::downgrade(&abort_flag);
                session.on_failure(move |failure| {
                    // The thread that reads from peers does not wait for aborts.
                    drop(stop.upgrade().map(|stop| stop.start_raise(failure.clone().into())));
                });
                self.on_gpus(library, UniqueId(id), &abort_flag, rank)
            }
            None => {
                let armed = |stop: Box<dyn Fn(Error) + Send>| {
                    session.on_failure(move |failure| stop(failure.clone().into()));
                };
                let each = (thread_pool::num_threads() / self.launch.ranks_here).max(1);
                collective::run_among_processes(&self.launch, armed, |local_rank, world| {
                    thread_pool::in_own_pool(each, || rank(local_rank, world))
                })
            }
        };
        match done {
            Ok(()) => session.leave(),
            Err(failed) if failed.error.kind() == ErrorCategory::SavedAndStopped => {
                // All ranks stop together. If one fails meanwhile, this one has saved all the same.
                drop(session.leave());
                Err(failed.error)
            }
            Err(failed) => {
                let here = if failed.own.is_some() { Vec::new() } else { watched.board.lines() };
                Err(here.into_iter().fold(self.ended(&session, failed), Error::because))
            }
        }
    }

    /// Reports a failure of this process to the others, or waits for their report of the failure.
    fn ended(&self, session: &Session, failed: RankFailure) -> Error {
        if let Some((rank, why)) = &failed.own {
            session.fail(*rank, why);
            return failed.error;
        }
        let begin = Instant::now();
        while begin.elapsed() < PEER_FAILURE_TIMEOUT {
            if let Some(failure) = session.failure() {
                return failure.into();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        session.fail(self.launch.rank, failed.error.what());
        failed.error
    }
}

/// Hang detection of the ranks of this process.
struct Watched<'a> {
    watch: &'a HangWatch,
    board: &'a Arc<ProgressBoard>,
    terms: &'a RunFingerprint<'a>,
}

/// Longest time for the last message before the process ends.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Ends the process at once, because a hung rank or a stuck abort never ends, and exit handlers of
/// the system may wait for it too.
pub(crate) fn end_process(error: &Error) {
    restore_screen();
    // The rank may hang in a write to stderr and hold its lock.
    let (done, last) = std::sync::mpsc::channel::<()>();
    let words = error.clone();
    let print = move || {
        Terminal::stderr(Verbosity::Normal).last_words(&words);
        raise_hang(&words);
        // Dropping this closes the channel.
        let _done = done;
    };
    if threads::start("last words", print).is_ok() {
        let _done = last.recv_timeout(LAST_WORDS);
    }
    // SAFETY: ends the process at once; what it has saved is on the disk under its name or under
    // none.
    unsafe { libc::_exit(i32::from(child::exit_code(error))) }
}

/// Returns the fault of [`FAULT`]; none in a release build. [`CLOCK`] replaces the clock, or makes
/// it count CPU time.
fn planted_fault() -> Result<Option<InjectedFault>> {
    if cfg!(debug_assertions) {
        match std::env::var(CLOCK).as_deref() {
            Ok("planted") => clock::plant(),
            Ok("processor") => clock::count_processor_time(),
            _ => {}
        }
    }
    match std::env::var(FAULT) {
        Ok(text) if cfg!(debug_assertions) => text.parse().map(Some).during(|| format!("cannot use {FAULT}")),
        _ => Ok(None),
    }
}

/// Returns the options by which the processes of `launch` find each other, from the environment.
pub(crate) fn rendezvous_options(launch: &Launch) -> Result<RendezvousOptions> {
    let lookup = |name: &str| std::env::var_os(name);
    let mut options = RendezvousOptions::from_environment(launch.master.clone(), &lookup)?;
    options.run.clone_from(&launch.run);
    options.has_several_hosts = launch.host.is_some_and(|host| host.count > 1);
    options.log = Arc::new(|text| Terminal::stderr(Verbosity::Normal).warn(text));
    Ok(options)
}

/// Returns the request with which this process joins the others.
pub(crate) fn join_request(launch: &Launch, digests: BTreeMap<String, String>) -> JoinRequest {
    let (rank, ranks_here, host) = (launch.rank, launch.ranks_here, rendezvous::host_name());
    let peer = Peer { rank, ranks_here, host, free_bytes: None };
    JoinRequest { peer, world_size: launch.world_size, digests }
}

/// Returns the least of `free`, the free bytes of each process, in a separate rendezvous; none if a
/// process has none.
fn least(launch: &Launch, options: &RendezvousOptions, free: Option<u64>) -> Result<Option<u64>> {
    let mut request = join_request(launch, BTreeMap::new());
    request.peer.free_bytes = free;
    let session = Session::join(request, options)?;
    watch_failures_elsewhere(launch, &session);
    let least = session.peers().iter().map(|peer| peer.free_bytes).min().flatten();
    session.leave()?;
    Ok(least)
}

/// Broadcasts the result of `make` in a separate rendezvous, which ends after all processes have
/// it.
fn agree(
    launch: &Launch,
    options: &RendezvousOptions,
    what: &str,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let session = Session::join(join_request(launch, BTreeMap::new()), options)?;
    watch_failures_elsewhere(launch, &session);
    let made = session.broadcast(what, make)?;
    session.leave()?;
    Ok(made)
}

/// Makes the exit code of this process say so if it ends because another process has failed first.
fn watch_failures_elsewhere(launch: &Launch, session: &Session) {
    let own = launch.rank..launch.rank + launch.ranks_here;
    session.on_failure(move |failure| {
        if !own.contains(&failure.rank) {
            child::record_failure_elsewhere();
        }
    });
}

/// Returns `world`, with the injected `fault` if any.
fn with_fault(world: Arc<dyn Collective>, fault: Option<InjectedFault>) -> Arc<dyn Collective> {
    let Some(fault) = fault else { return world };
    let notice: FaultNotice =
        Arc::new(|text| Terminal::stderr(Verbosity::Normal).warn(format!("{text} strikes")));
    Arc::new(FaultInjector::new(world, fault, &notice))
}

/// Runs `rank` as threads of this process on the CPU, each in a pool of `threads` threads, and
/// returns their results in order of ranks.
///
/// # Errors
/// The first failure of a rank.
pub(crate) fn run_on_cpu<T: Send>(
    ranks: usize,
    threads: usize,
    rank: impl Fn(Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_threads(in_process::InProcessWorld::new(ranks), threads, rank)
}

fn run_threads<T: Send>(
    world: in_process::InProcessWorld,
    threads: usize,
    rank: impl Fn(Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    in_process::run_ranks(world.communicators(), |end| {
        thread_pool::in_own_pool(threads, || rank(Arc::new(end)))
    })
}

/// Runs `rank` on each of `devices`, as threads of this process that NCCL connects, each in a pool
/// of `threads` threads.
///
/// # Errors
/// The first failure of a rank.
pub(crate) fn run_on_gpus<T: Send>(
    library: &Arc<NcclLibrary>,
    group_info: &GroupInfo,
    devices: &[Device],
    abort_flag: &Arc<AbortFlag>,
    threads: usize,
    rank: impl Fn(usize, Arc<dyn Collective>) -> Result<T> + Sync,
) -> Result<Vec<T>, RankFailure> {
    let work = |local_rank, world| thread_pool::in_own_pool(threads, || rank(local_rank, world));
    nccl::run_on_gpus(library, group_info, devices, abort_flag, work)
}

/// Returns the digests that must be equal in all processes that train `plan`.
fn plan_digests(plan: &Plan) -> Result<BTreeMap<String, String>> {
    let mut digests = BTreeMap::from([
        ("plan".to_owned(), hash(&plan.run_text())),
        ("data".to_owned(), plan.train.dataset.digest().to_hex().to_string()),
    ]);
    // In a resumed full run the base is the weights of the checkpoint.
    if let Some(digest) = plan.base.identity(plan.recipe.train.seed)?.digest() {
        digests.insert("model".to_owned(), digest.to_owned());
    }
    Ok(digests)
}

/// Adds the digests of the program and its libraries to `alike`. All processes must have the same.
fn digests(
    mut alike: BTreeMap<String, String>,
    library: Option<&Arc<NcclLibrary>>,
) -> Result<BTreeMap<String, String>> {
    let binary = child::binary()?;
    let mut hasher = blake3::Hasher::new();
    let mut file = std::fs::File::open(&binary).map_err(|e| Error::io("read", &binary, &e))?;
    std::io::copy(&mut file, &mut hasher).map_err(|e| Error::io("read", &binary, &e))?;
    alike.insert("binary".to_owned(), hasher.finalize().to_hex().to_string());
    if let Some(library) = library {
        alike.insert("NCCL".to_owned(), hash(&library.version().to_string()));
    }
    Ok(alike)
}

fn hash(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::launch::LaunchSource;
    use crate::rendezvous::{Master, Secret};

    /// All processes get the least free memory and the date of rank 0, and can join again at the
    /// same address.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
    fn processes_agree_before_they_have_a_plan() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        drop(listener);
        let process = |rank: usize| {
            let address = "127.0.0.1".to_owned();
            let launch = Launch {
                source: LaunchSource::Flags,
                rank,
                ranks_here: 1,
                local_rank: rank,
                local_world_size: None,
                world_size: 3,
                host: None,
                master: Some(Master { address, port, ports: 1 }),
                run: "test run".to_owned(),
            };
            let secret = Secret::shared(b"canary-secret-0123456789").expect("a secret");
            let patience = Duration::from_secs(60);
            let options = RendezvousOptions {
                run: launch.run.clone(),
                join_timeout: patience,
                rejection_timeout: patience,
                call_timeout: patience,
                ..RendezvousOptions::new(launch.master.clone(), secret)
            };
            let free = [Some(3), Some(1 << 60), Some(2)][rank];
            assert_eq!(least(&launch, &options, free).expect("joined"), Some(2));
            let unknown = free.filter(|_| rank != 1);
            assert_eq!(least(&launch, &options, unknown).expect("joined"), None);
            ["first", "second"].map(|time| {
                agree(&launch, &options, "the date", || Ok(format!("{time} of {rank}").into_bytes()))
                    .expect("agreed")
            })
        };
        std::thread::scope(|scope| {
            let processes: Vec<_> = (0..3).map(|rank| scope.spawn(move || process(rank))).collect();
            for process in processes {
                let agreed = process.join().expect("no panic");
                assert_eq!(agreed, [b"first of 0".to_vec(), b"second of 0".to_vec()]);
            }
        });
    }
}
