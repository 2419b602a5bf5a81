//! Hang detection for the ranks of this process. If a rank shows no progress for too long, the run
//! ends with an error that names the rank, its phase and the ranks that wait for it.
//!
//! A rank shows progress by its phases, its calls and its heartbeats between them (`progress`). Its
//! limit is learned: three times its longest silence in an earlier pass through the same phase, and
//! at least 15 s. For a micro-batch larger than all before, the limit grows with the square of its
//! tokens, which is the cost of attention. A slow rank is slow in every pass, so it does not count
//! as hung. In the first pass through a phase, a rank that computes has half an hour, and one whose
//! process neither computes nor does I/O has 15 s. Meeting, loading, reporting and writing wait for
//! storage, terminals and other programs: there a process must be idle for ten minutes.
//! `parallel.timeout_secs` replaces all of this.
//!
//! A rank inside a call waits for its peers, so a long call counts against the missing ranks. In a
//! process that holds all ranks, it is also an error if all of them are inside calls for too long.
//!
//! Each look of the watch advances its time only a little: a process that was stopped (`SIGSTOP`, a
//! closed lid) finds its ranks no later than before.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Phase;
use super::progress::{ProgressBoard, RankActivity, RankProgress};
use crate::error::{Error, ErrorCategory, Result};
use crate::locks::locked;
use crate::runtime::clock;
use crate::runtime::machine::{WorkDone, work_done};
use crate::threads;
use crate::units;

/// A silence longer than this many times the longest one so far counts as a hang.
const FACTOR: u32 = 3;

/// Limit for a computing rank in a phase without an earlier pass.
const UNSEEN: Duration = Duration::from_secs(1800);

/// Maximum idle time of a process that waits for storage.
const STORAGE: Duration = Duration::from_secs(600);

/// Minimum share of a core that a computing process uses, even at the lowest priority.
const BUSY: f64 = 0.01;

/// Maximum time between two looks.
const PERIOD: Duration = Duration::from_millis(500);

/// Time for the other ranks and their saves to end after a hang. The hung rank is not waited for.
const LAST_WORDS: Duration = Duration::from_secs(4);

/// Switches to try after a hang on several GPUs: CUDA loads its code before the first step, and
/// NCCL's kernels leave more of a GPU to others.
pub(super) const GPU_SWITCHES: &str =
    "try `CUDA_MODULE_LOADING=EAGER`, then `NCCL_MAX_CTAS=8`, in the environment of all ranks";

/// Limits on the silence of a rank.
#[derive(Debug, Clone, Copy)]
pub struct HangLimits {
    /// Minimum of the learned limit: [`HangLimits::FLOOR`] except in tests.
    pub floor: Duration,
    /// Limit of the user; none: learned.
    pub timeout: Option<Duration>,
    /// True if ranks compute on this host's cores, so that an idle process has idle ranks.
    pub on_host: bool,
    /// True if all ranks are in this process.
    pub holds_all: bool,
}

/// Longest silence and largest micro-batch of a rank's earlier passes through a phase.
#[derive(Debug, Clone, Copy, Default)]
struct EarlierPasses {
    longest: Duration,
    /// Tokens of the largest micro-batch.
    tokens: u64,
}

/// Phase of a rank, and the time since its last progress.
#[derive(Debug, Clone, Copy)]
struct Silence {
    phase: Phase,
    /// Tokens of its micro-batch.
    tokens: u64,
    silent: Duration,
    /// Time for which its process has been idle.
    idle: Duration,
}

impl HangLimits {
    /// Minimum silence that counts as a hang, unless the user sets a limit.
    pub const FLOOR: Duration = Duration::from_secs(15);

    /// The limit that a silence exceeds.
    fn passed(&self, silence: &Silence, earlier: Option<EarlierPasses>) -> Option<Duration> {
        let Silence { phase, tokens, silent, idle } = *silence;
        let over = |silent: Duration, limit: Duration| Some(limit).filter(|limit| silent > *limit);
        if let Some(timeout) = self.timeout {
            return over(silent, timeout);
        }
        let learned = earlier.map(|earlier| {
            // Before the first micro-batch, no comparison or computation is possible.
            let growth =
                if earlier.tokens == 0 { 1.0 } else { tokens as f64 / earlier.tokens as f64 }.max(1.0);
            let longest = earlier.longest.max(self.period()).mul_f64((growth * growth).min(1e6));
            self.floor.max(longest * FACTOR)
        });
        if matches!(phase, Phase::Meet | Phase::Load | Phase::Report | Phase::Save | Phase::Output) {
            return over(silent.min(idle), learned.map_or(STORAGE, |learned| learned.max(STORAGE)));
        }
        match learned {
            Some(limit) => over(silent, limit),
            None if self.on_host => over(silent.min(idle), self.floor).or_else(|| over(silent, UNSEEN)),
            None => over(silent, UNSEEN),
        }
    }

    fn period(&self) -> Duration {
        (self.timeout.unwrap_or(self.floor) / 20).clamp(Duration::from_millis(10), PERIOD)
    }
}

/// A hung rank.
#[derive(Debug, Clone)]
pub struct HangReport {
    /// The rank in the world.
    pub rank: usize,
    /// The reason in one line, for its peers.
    pub why: String,
    /// Error of this process: rank, phase and last call, and the state of its other ranks.
    pub error: Error,
}

/// Callback for a hang, which informs other processes.
type HangHook = Box<dyn FnOnce(&HangReport) + Send>;

struct WatchShared {
    limits: HangLimits,
    board: Arc<ProgressBoard>,
    report: OnceLock<HangReport>,
    hooks: Mutex<Vec<HangHook>>,
    over: Mutex<bool>,
    ended: Condvar,
}

/// The watch, until it is dropped.
pub struct HangWatch {
    shared: Arc<WatchShared>,
    thread: Option<JoinHandle<()>>,
}

impl HangWatch {
    /// Starts a watch over the ranks of `board`. If one hangs, its peers' calls fail. If the ranks
    /// do not end then, `end` gets the error and must end the process.
    ///
    /// # Errors
    /// The system refuses to start a thread.
    pub fn start(
        board: &Arc<ProgressBoard>,
        limits: HangLimits,
        end: impl FnOnce(&Error) + Send + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(WatchShared {
            limits,
            board: Arc::clone(board),
            report: OnceLock::new(),
            hooks: Mutex::default(),
            over: Mutex::new(false),
            ended: Condvar::new(),
        });
        let theirs = Arc::clone(&shared);
        let thread = threads::start("hang watch", move || theirs.run(end))?;
        Ok(HangWatch { shared, thread: Some(thread) })
    }

    /// Calls `hook` with the first hang.
    pub fn on_hang(&self, hook: impl FnOnce(&HangReport) + Send + 'static) {
        locked(&self.shared.hooks).push(Box::new(hook));
    }

    /// Ends the watch after the ranks have ended; returns the hang, if there was one.
    pub fn stop(self) -> Option<HangReport> {
        let shared = Arc::clone(&self.shared);
        drop(self);
        shared.report.get().cloned()
    }
}

impl Drop for HangWatch {
    fn drop(&mut self) {
        *locked(&self.shared.over) = true;
        self.shared.ended.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panicked watch has nothing more to report.
            drop(thread.join());
        }
    }
}

/// State of a rank, as the watch has observed it.
struct WatchedRank {
    progress: Arc<RankProgress>,
    beats: u64,
    activity: RankActivity,
    /// Time since its last progress.
    silent: Duration,
    /// Longest silence in this pass through the phase, and its largest micro-batch.
    now: EarlierPasses,
    /// Earlier passes, by phase.
    earlier: [Option<EarlierPasses>; Phase::ALL.len()],
}

impl WatchedRank {
    fn new(progress: Arc<RankProgress>) -> Self {
        let (beats, activity) = (progress.beats(), progress.activity());
        let (silent, now) = (Duration::ZERO, EarlierPasses::default());
        WatchedRank { progress, beats, activity, silent, now, earlier: [None; Phase::ALL.len()] }
    }

    /// Looks at the rank again, `later` after the last look.
    fn look(&mut self, later: Duration) {
        let (beats, activity) = (self.progress.beats(), self.progress.activity());
        if beats == self.beats {
            self.silent += later;
            return;
        }
        if !self.activity.waits {
            self.now.longest = self.now.longest.max(self.silent);
        }
        self.now.tokens = self.now.tokens.max(self.activity.tokens);
        // Also if the rank has returned to the same phase between two looks.
        if activity.phase != self.activity.phase || activity.has_passed(activity.phase) {
            let now = std::mem::take(&mut self.now);
            let earlier = self.earlier[self.activity.phase as usize].get_or_insert_default();
            earlier.longest = earlier.longest.max(now.longest);
            earlier.tokens = earlier.tokens.max(now.tokens);
        }
        for phase in Phase::ALL.into_iter().filter(|phase| activity.has_passed(*phase)) {
            // A pass that was shorter than the time between two looks.
            let tokens = activity.tokens_passed;
            self.earlier[phase as usize].get_or_insert(EarlierPasses { longest: Duration::ZERO, tokens });
        }
        (self.beats, self.activity, self.silent) = (beats, activity, Duration::ZERO);
    }

    /// The limit that its silence exceeds, in a process that has been idle for `idle`.
    fn passed(&self, limits: &HangLimits, idle: Duration) -> Option<Duration> {
        let RankActivity { phase, tokens, waits, .. } = self.activity;
        let silence = Silence { phase, tokens, silent: self.silent, idle };
        limits.passed(&silence, self.earlier[phase as usize]).filter(|_| !waits)
    }

    fn works(&self) -> bool {
        !self.progress.has_ended()
    }
}

/// Idle time of the process.
#[derive(Default)]
struct IdleTime {
    idle: Duration,
    work: Option<WorkDone>,
}

impl IdleTime {
    /// Looks at the process again, `later` after the last look.
    fn look(&mut self, later: Duration) {
        let now = work_done();
        let idle = match (self.work, now) {
            (Some(then), Some(now)) => {
                let computed = now.cpu.saturating_sub(then.cpu);
                computed < later.mul_f64(BUSY) && now.blocks == then.blocks
            }
            _ => false,
        };
        self.idle = if idle { self.idle + later } else { Duration::ZERO };
        self.work = now;
    }
}

/// Returns true if time passes for the watch over `ranks`. On a planted clock it passes only after
/// a rank is held up forever and all others wait, so that a busy machine never makes a rank silent.
fn does_time_pass(ranks: &[WatchedRank]) -> bool {
    let computes = |rank: &&WatchedRank| rank.works() && !rank.activity.waits;
    !clock::is_planted() || clock::is_held_up() && ranks.iter().filter(computes).count() <= 1
}

impl WatchShared {
    fn run(&self, end: impl FnOnce(&Error)) {
        let period = self.limits.period();
        let (mut ranks, mut process) = (Vec::<WatchedRank>::new(), IdleTime::default());
        let mut last = Instant::now();
        while !self.is_over(period) {
            // A long stop of this process must not count as silence of its ranks.
            let later = last.elapsed().min(2 * period);
            last = Instant::now();
            let later = if does_time_pass(&ranks) { later } else { Duration::ZERO };
            if let Some(report) = self.look(&mut ranks, &mut process, later) {
                return self.conclude(report, &ranks, end);
            }
        }
    }

    /// Looks at all ranks, `later` after the last look, and returns a hang.
    fn look(
        &self,
        ranks: &mut Vec<WatchedRank>,
        process: &mut IdleTime,
        later: Duration,
    ) -> Option<HangReport> {
        for progress in self.board.ranks().into_iter().skip(ranks.len()) {
            ranks.push(WatchedRank::new(progress));
        }
        process.look(later);
        ranks.iter_mut().for_each(|rank| rank.look(later));
        self.find(ranks, process.idle)
    }

    /// Waits for `time`; true if the ranks have ended.
    fn is_over(&self, time: Duration) -> bool {
        let over = locked(&self.over);
        *self.ended.wait_timeout_while(over, time, |over| !*over).unwrap_or_else(PoisonError::into_inner).0
    }

    fn find(&self, ranks: &[WatchedRank], idle: Duration) -> Option<HangReport> {
        let working = || ranks.iter().filter(|rank| rank.works());
        let hung: Vec<(&WatchedRank, Duration)> =
            working().filter_map(|rank| Some((rank, rank.passed(&self.limits, idle)?))).collect();
        if let Some((worst, limit)) = hung.iter().max_by_key(|(rank, _)| rank.silent) {
            let others: Vec<&WatchedRank> = hung.iter().map(|(rank, _)| *rank).collect();
            return Some(self.report(worst, *limit, &others));
        }
        let patience = self.limits.timeout.unwrap_or(UNSEEN);
        let all_wait = working().all(|rank| rank.activity.waits && rank.silent > patience);
        let first = working().next().filter(|_| all_wait && self.limits.holds_all)?;
        let waited = units::duration(first.silent.as_secs_f64());
        let why = format!("all ranks wait for one another since {waited}");
        let error = Error::new(ErrorCategory::Transient, "the ranks wait for one another without end");
        Some(HangReport { rank: first.progress.rank(), error: self.placed(error, None), why })
    }

    fn report(&self, worst: &WatchedRank, limit: Duration, hung: &[&WatchedRank]) -> HangReport {
        let (rank, phase) = (worst.progress.rank(), worst.activity.phase);
        let limit = units::duration(limit.as_secs_f64());
        let limit_text = match (self.limits.timeout, worst.earlier[phase as usize]) {
            (Some(_), _) => format!("`parallel.timeout_secs` allows {limit}"),
            (None, Some(earlier)) => {
                let longest = units::duration(earlier.longest.as_secs_f64());
                format!("its longest silence in this phase was {longest}, and the limit is {limit}")
            }
            (None, None) => format!("the limit is {limit}"),
        };
        let silent = units::duration(worst.silent.as_secs_f64());
        let position = worst.progress.to_string();
        let why = format!("it has made no progress for {silent}; {limit_text}; {position}");
        let mut error = Error::new(
            ErrorCategory::Transient,
            format!("rank {rank} hangs: no progress in phase {}", phase.name()),
        )
        .because(format!("it has made no progress for {silent}; {limit_text}"))
        .because(position);
        for other in hung.iter().filter(|other| other.progress.rank() != rank) {
            let silent = units::duration(other.silent.as_secs_f64());
            error = error.because(format!("rank {} is silent too, for {silent}", other.progress.rank()));
        }
        let mut hint =
            "the same command with `--resume` goes on from the newest checkpoint; if the rank was only \
                        slow, allow more with `--set parallel.timeout_secs=SECONDS`"
                .to_owned();
        if !self.limits.on_host {
            hint += &format!("; on several GPUs, {GPU_SWITCHES}");
        }
        HangReport { rank, why, error: self.placed(error, Some(rank)).hint(hint) }
    }

    /// Adds the state of all ranks except `rank` to `error`.
    fn placed(&self, error: Error, rank: Option<usize>) -> Error {
        let others = self.board.ranks();
        let others = others.iter().filter(|other| Some(other.rank()) != rank);
        others.fold(error, |error, other| error.because(other.to_string()))
    }

    /// Ends the other ranks' waits and calls the hooks; then ends the process, unless the ranks end
    /// by themselves.
    fn conclude(&self, report: HangReport, ranks: &[WatchedRank], end: impl FnOnce(&Error)) {
        let hooks = std::mem::take(&mut *locked(&self.hooks));
        let hung = ranks.iter().find(|rank| rank.progress.rank() == report.rank);
        let hung = hung.map(|rank| Arc::clone(&rank.progress));
        let theirs = report.clone();
        drop(self.report.set(report.clone()));
        // In a separate thread, because the hung rank may hold a lock that this needs.
        let notify = move || {
            hooks.into_iter().for_each(|hook| hook(&theirs));
            if let Some(world) = hung.and_then(|rank| rank.end()) {
                world.abort(&theirs.why);
            }
        };
        // Without the thread nobody is informed, but the process still ends.
        drop(threads::start("hang report", notify));
        if !self.is_over(LAST_WORDS) {
            end(&report.error);
        }
    }
}

#[cfg(test)]
mod look_tests;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limits(timeout: Option<Duration>) -> HangLimits {
        HangLimits { floor: HangLimits::FLOOR, timeout, on_host: true, holds_all: true }
    }

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// A silence of `silent` seconds with `tokens` tokens, in a process that was idle for `idle`
    /// seconds.
    fn silence(phase: Phase, silent: u64, tokens: u64, idle: u64) -> Silence {
        Silence { phase, tokens, silent: secs(silent), idle: secs(idle) }
    }

    fn after(longest: u64) -> Option<EarlierPasses> {
        Some(EarlierPasses { longest: secs(longest), tokens: 100 })
    }

    #[test]
    fn what_is_allowed_is_learned() {
        let learned = limits(None);
        let forward = |silent| silence(Phase::Forward, silent, 100, 0);
        for (longest, limit) in [(1, 15), (5, 15), (6, 18), (40, 120)] {
            assert_eq!(learned.passed(&forward(limit), after(longest)), None);
            assert_eq!(learned.passed(&forward(limit + 1), after(longest)), Some(secs(limit)));
        }
        // Three times the tokens, nine times the time.
        let larger = |silent| silence(Phase::Loss, silent, 300, 0);
        assert_eq!(learned.passed(&larger(270), after(10)), None);
        assert_eq!(learned.passed(&larger(271), after(10)), Some(secs(270)));
        assert_eq!(limits(Some(secs(2))).passed(&forward(3), after(40)), Some(secs(2)));
    }

    #[test]
    fn a_first_pass_is_cut_short_where_nothing_is_done() {
        let (host, gpu) = (limits(None), HangLimits { on_host: false, ..limits(None) });
        let busy = silence(Phase::Forward, 1800, 100, 2);
        let idle = silence(Phase::Forward, 16, 100, 20);
        assert_eq!(host.passed(&busy, None), None);
        assert_eq!(host.passed(&idle, None), Some(HangLimits::FLOOR));
        assert_eq!(gpu.passed(&idle, None), None);
        assert_eq!(gpu.passed(&silence(Phase::Forward, 1801, 100, 0), None), Some(UNSEEN));
    }

    /// A long save that writes is no hang.
    #[test]
    fn storage_may_be_slow() {
        let learned = limits(None);
        assert_eq!(learned.passed(&silence(Phase::Save, 9000, 100, 500), after(1)), None);
        assert_eq!(learned.passed(&silence(Phase::Save, 9000, 100, 601), after(1)), Some(STORAGE));
        assert_eq!(learned.passed(&silence(Phase::Load, 9000, 0, 601), None), Some(STORAGE));
    }

    /// A rank is compared with its own passes, without its waits for others.
    #[test]
    fn a_pass_through_a_phase_counts_when_it_is_over() {
        let world: Arc<dyn super::super::Collective> = Arc::new(super::super::SingleRank);
        let progress = RankProgress::new(&world);
        let mut rank = WatchedRank::new(Arc::clone(&progress));
        progress.enter(Phase::Forward);
        progress.expect_tokens(100);
        rank.look(SECOND);
        rank.look(20 * SECOND);
        progress.beat();
        rank.look(SECOND);
        assert!(rank.earlier[Phase::Forward as usize].is_none());
        progress.begin_call(None);
        rank.look(SECOND);
        rank.look(100 * SECOND);
        assert_eq!(rank.passed(&limits(Some(SECOND)), Duration::ZERO), None, "it waits");
        progress.end_call();
        rank.look(SECOND);
        progress.enter(Phase::Backward);
        rank.look(SECOND);
        let earlier = rank.earlier[Phase::Forward as usize].unwrap();
        assert_eq!((earlier.longest, earlier.tokens), (20 * SECOND, 100));
        // Ten times slower than all before: the limit is now 60 s.
        progress.enter(Phase::Forward);
        rank.look(SECOND);
        assert_eq!(rank.silent, Duration::ZERO);
        rank.look(59 * SECOND);
        assert_eq!(rank.passed(&limits(None), Duration::ZERO), None);
        rank.look(2 * SECOND);
        assert_eq!(rank.passed(&limits(None), Duration::ZERO), Some(60 * SECOND));
    }
}
