//! Aborts that do not return, over the fake: nobody waits for them, and the process can end.

use super::fake_nccl::{FakeEvent, FakeGroup, Host, library};
use super::tests::{PATIENT, Values, call};
use super::*;
use crate::collective::{RankFailure, Reduction};
use crate::runtime::buffer::ElementType;

const MOMENT: Duration = Duration::from_millis(1);

/// A rank alone, and the groups of its two communicators.
fn rank_alone(flag: &Arc<AbortFlag>) -> (Nccl<Host>, [Arc<FakeGroup>; 2]) {
    let library = library();
    let device = Host::default();
    let other_end = device.other_end();
    let id = library.unique_id().unwrap();
    let rank_info = NcclRankInfo { id, rank: 0, size: 1, deadline: PATIENT };
    let nccl = Nccl::connect(&library, &rank_info, device, flag).unwrap();
    nccl.open_reduction_stream().unwrap();
    other_end.events();
    let sum = Values::new(ElementType::F32, vec![1.0_f32; 2]);
    nccl.all_reduce(call("sum", 0), &sum.1).unwrap();
    let started = nccl.start_reduction(call("sum", 1), Reduction::AllReduce(&sum.1)).unwrap();
    nccl.finish(started.expect("it goes on")).unwrap();
    let group = |event| match event {
        FakeEvent::Call { group, .. } => Some(group),
        _ => None,
    };
    let groups: Vec<Arc<FakeGroup>> = other_end.events().into_iter().filter_map(group).collect();
    (nccl, groups.try_into().unwrap_or_else(|_| panic!("not two calls")))
}

fn failure() -> Error {
    Error::new(ErrorCategory::Transient, "rank 7 on b failed")
}

#[test]
fn a_stuck_abort_holds_up_neither_the_error_nor_other_aborts() {
    let flag = AbortFlag::limited(MOMENT, None);
    let (nccl, [stuck, other]) = rank_alone(&flag);
    stuck.hold_aborts(true);
    assert_eq!(flag.raise(failure()).what(), "rank 7 on b failed");
    // This loop also ends if the other abort waits for the stuck one.
    while !other.is_aborted() {
        std::thread::sleep(MOMENT);
    }
    assert_eq!(nccl.barrier(call("end", 0)).unwrap_err().what(), "rank 7 on b failed");
    drop(nccl);
    assert!(!stuck.is_aborted(), "a caller waited for the abort");
    stuck.hold_aborts(false);
}

/// Causes with which the process would have ended.
static ENDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn end_process(cause: &Error) {
    locked(&ENDS).push(cause.what().to_owned());
}

#[test]
fn a_process_with_a_stuck_abort_ends_with_the_cause() {
    let flag = AbortFlag::limited(MOMENT, Some(end_process));
    let (nccl, [stuck, _]) = rank_alone(&flag);
    stuck.hold_aborts(true);
    flag.raise(failure());
    flag.raise(Error::internal("a later failure"));
    while locked(&ENDS).is_empty() && !stuck.is_aborted() {
        std::thread::sleep(MOMENT);
    }
    assert_eq!(*locked(&ENDS), ["rank 7 on b failed"]);
    drop(nccl);
    stuck.hold_aborts(false);
}

#[test]
fn an_abort_that_returns_ends_no_process() {
    fn end(_: &Error) {
        panic!("the abort has returned");
    }
    let flag = AbortFlag::limited(abort_threads::LIMIT, Some(end));
    let (_nccl, groups) = rank_alone(&flag);
    flag.raise(failure());
    // After the raise of another thread, too.
    assert_eq!(flag.raise(Error::internal("a later failure")).what(), "rank 7 on b failed");
    assert!(groups.iter().all(|group| group.is_aborted()));
}

/// Runs a rank that fails with a full disk and a stuck abort, of which `held` gets the group.
fn rank_with_a_full_disk(flag: &Arc<AbortFlag>, held: &Arc<OnceLock<Arc<FakeGroup>>>) -> RankFailure {
    let library = library();
    let group_info = GroupInfo { id: library.unique_id().unwrap(), first: 0, size: 1, deadline: PATIENT };
    let device = Host::default();
    let other_end = device.other_end();
    let work = |_, nccl: Arc<Nccl<Host>>| -> Result<()> {
        other_end.events();
        let sum = Values::new(ElementType::F32, vec![1.0_f32; 2]);
        nccl.all_reduce(call("sum", 0), &sum.1)?;
        let group = other_end.events().into_iter().find_map(|event| match event {
            FakeEvent::Call { group, .. } => Some(group),
            _ => None,
        });
        held.get_or_init(|| group.expect("a call")).hold_aborts(true);
        Err(Error::new(ErrorCategory::Storage, "the disk is full"))
    };
    run_ranks(&library, &group_info, vec![device], flag, work).unwrap_err()
}

#[test]
fn peers_hear_of_a_failure_before_the_aborts() {
    let flag = AbortFlag::new();
    let (held, heard) = (Arc::new(OnceLock::new()), Arc::new(Mutex::new(Vec::new())));
    let (group, notified) = (Arc::clone(&held), Arc::clone(&heard));
    let other = Arc::downgrade(&flag);
    flag.notify_peers_by(move |rank, why| {
        let group: &Arc<FakeGroup> = group.get().expect("the rank ran");
        locked(&notified).push((rank, why.to_owned(), group.is_aborted()));
        // As the session does: it must not wait for the abort that is held.
        drop(other.upgrade().map(|flag| flag.start_raise(failure())));
        assert!(!group.is_aborted());
        group.hold_aborts(false);
    });
    let failed = rank_with_a_full_disk(&flag, &held);
    assert_eq!(failed.error.kind(), ErrorCategory::Storage);
    let heard = locked(&heard);
    let [(0, why, false)] = heard.as_slice() else { panic!("{heard:?}") };
    assert!(why.contains("the disk is full"), "{why}");
    // The peers' words do not replace the cause.
    assert!(flag.check().unwrap_err().to_string().contains("the disk is full"));
}

/// Error with which a process would have ended.
static OWN_END: OnceLock<Error> = OnceLock::new();

fn end_with_own_error(error: &Error) {
    drop(OWN_END.set(error.clone()));
}

#[test]
fn a_process_with_a_stuck_abort_ends_with_its_own_error() {
    let flag = AbortFlag::limited(MOMENT, Some(end_with_own_error));
    let held = Arc::new(OnceLock::new());
    rank_with_a_full_disk(&flag, &held);
    let group: &Arc<FakeGroup> = held.get().expect("the rank ran");
    while OWN_END.get().is_none() && !group.is_aborted() {
        std::thread::sleep(MOMENT);
    }
    assert_eq!(OWN_END.get().expect("it ended").kind(), ErrorCategory::Storage);
    group.hold_aborts(false);
}
