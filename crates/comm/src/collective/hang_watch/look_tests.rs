//! The watch with looks and times from the tests, so that no result depends on the machine's speed.

use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::collective::in_process::{InProcessWorld, run_ranks};
use crate::collective::{Call, Collective, SingleRank, TimedCollective};

const LIMIT: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(1);

/// A watch without a thread.
struct HandWatch {
    shared: WatchShared,
    ranks: Vec<WatchedRank>,
    process: IdleTime,
}

impl HandWatch {
    fn over(board: &Arc<ProgressBoard>, limits: HangLimits) -> Self {
        let shared = WatchShared {
            limits,
            board: Arc::clone(board),
            report: OnceLock::new(),
            hooks: Mutex::default(),
            over: Mutex::new(false),
            ended: Condvar::new(),
        };
        HandWatch { shared, ranks: Vec::new(), process: IdleTime::default() }
    }

    fn look(&mut self, later: Duration) -> Option<HangReport> {
        self.shared.look(&mut self.ranks, &mut self.process, later)
    }
}

fn limits(timeout: Option<Duration>) -> HangLimits {
    HangLimits { floor: HangLimits::FLOOR, timeout, on_host: false, holds_all: true }
}

/// Waits for a line of `board` that begins with `line`.
fn wait_for(board: &ProgressBoard, line: &str) {
    while !board.lines().iter().any(|own| own.starts_with(line)) {
        std::thread::sleep(MOMENT);
    }
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
fn a_silent_rank_is_named_and_its_peers_go_free() {
    let board = Arc::new(ProgressBoard::default());
    let (wake, sleeping) = channel::<()>();
    let sleeping: Mutex<Receiver<()>> = Mutex::new(sleeping);
    let (enters, entered) = channel::<()>();
    let rank = |world: &TimedCollective| {
        world.enter(Phase::Backward)?;
        if world.rank() == 1 {
            // The group now has the phase, which the board had before.
            enters.send(()).unwrap();
            // Sleeps until the peer's call has ended.
            let _woken = locked(&sleeping).recv();
        }
        let done = world.barrier(Call { what: "gradients of block", index: 3 });
        if world.rank() == 0 {
            wake.send(()).unwrap();
        }
        done
    };
    let mut watch = HandWatch::over(&board, limits(Some(LIMIT)));
    let done = std::thread::scope(|scope| {
        let ranks = scope.spawn(|| {
            run_ranks(InProcessWorld::new(2).communicators(), |end| {
                let world = TimedCollective::watched(Arc::new(end), &board);
                let _works = world.work_guard();
                rank(&world)
            })
        });
        wait_for(&board, "rank 0 waits in phase backward");
        entered.recv().unwrap();
        assert!(watch.look(Duration::ZERO).is_none() && watch.look(LIMIT).is_none());
        let hang = watch.look(MOMENT).expect("a hang");
        assert_eq!(hang.rank, 1);
        let text = hang.error.to_string();
        assert!(text.starts_with("error: rank 1 hangs: no progress in phase backward\n"), "{text}");
        assert!(text.contains("rank 1 is in phase backward; it has made no call\n"), "{text}");
        assert!(text.contains("rank 0 waits in phase backward: barrier of gradients of block 3\n"), "{text}");
        assert!(text.contains("on several GPUs, try `CUDA_MODULE_LOADING=EAGER`"), "{text}");
        // The ranks end by this alone.
        watch.shared.conclude(hang, &watch.ranks, |_| ());
        ranks.join().unwrap()
    });
    let error = done.unwrap_err();
    assert_eq!(error.what(), "rank 1 failed in phase backward", "{error}");
}

/// Progress is a phase, a call or a heartbeat: only the time since the last one counts.
#[test]
fn a_rank_that_gives_signs_of_life_does_not_hang() {
    let board = Arc::new(ProgressBoard::default());
    let world = TimedCollective::watched(Arc::new(SingleRank), &board);
    let mut watch = HandWatch::over(&board, limits(Some(LIMIT)));
    assert!(watch.look(Duration::ZERO).is_none());
    let signs: [&dyn Fn(); 3] = [&|| world.enter(Phase::Forward).unwrap(), &|| world.heartbeat(), &|| {
        world.barrier(Call::single("the end")).unwrap()
    }];
    for sign in signs.into_iter().cycle().take(40) {
        sign();
        assert!(watch.look(Duration::ZERO).is_none());
        assert!(watch.look(LIMIT).is_none(), "{:?}", board.lines());
    }
    assert_eq!(watch.look(MOMENT).map(|hang| hang.rank), Some(0));
}

/// A rank is compared with itself: passes longer than the floor are normal for it, and one of over
/// three times their length is a hang.
#[test]
fn what_a_slow_rank_may_take_is_learned() {
    let floor = HangLimits::FLOOR;
    for (last, hangs) in [(2, false), (3, false), (8, true)] {
        let board = Arc::new(ProgressBoard::default());
        let world = TimedCollective::watched(Arc::new(SingleRank), &board);
        // Ranks on other devices: an idle process may still compute.
        let mut watch = HandWatch::over(&board, limits(None));
        let mut pass = |times: u32| {
            world.enter(Phase::Forward).unwrap();
            assert!(watch.look(MOMENT).is_none());
            let report = watch.look(2 * floor * times);
            world.enter(Phase::Data).unwrap();
            assert!(watch.look(MOMENT).is_none());
            report.is_some()
        };
        assert_eq!([1, 1, last].map(&mut pass), [false, false, hangs], "{last} times");
    }
}
