//! NCCL and a GPU in host memory, for tests: ranks are threads, and "kernels" run after the last
//! rank's call. Like the real library it returns at once, reports progress, and hangs if the ranks'
//! calls differ. It reports success for messages that are not on their streams yet.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::Duration;

use super::device::{CommStream, GpuStreams};
use super::library::{NcclConfig, NcclFunctions, NcclLibrary, NcclStatus, RawComm, RawStream, UniqueId};
use crate::error::Result;

/// A call that waits for its peers, with addresses as numbers.
#[derive(Clone, Copy, PartialEq)]
enum FakePost {
    Meet,
    Split { color: c_int, target: usize },
    Sum { from: usize, to: usize, count: usize, kind: c_int, scatter: bool },
    Gather { from: usize, to: usize, bytes: usize },
    Copy { at: usize, bytes: usize, root: c_int },
    Send { from: usize, bytes: usize, peer: usize },
    Recv { to: usize, bytes: usize, peer: usize },
    Finalize,
}

/// Time after which a held abort returns, so that a caller that waits for it fails its test.
const HELD: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct FakeGroup {
    posts: Mutex<Vec<Option<FakePost>>>,
    aborted: AtomicBool,
    /// True while aborts wait.
    held: Mutex<bool>,
    released: Condvar,
    /// True if the GPUs of its ranks are one card.
    one_card: AtomicBool,
}

impl FakeGroup {
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Makes aborts wait, or lets them go.
    pub(super) fn hold_aborts(&self, held: bool) {
        *self.held.lock().unwrap() = held;
        self.released.notify_all();
    }
}

/// A message, or a call of a group, that is not on its stream yet.
struct LateCall {
    op: &'static str,
    stream: RawStream,
    post: FakePost,
    /// Polls until it is on its stream.
    polls: usize,
}

thread_local! {
    /// Calls of this thread's group; none outside of a group.
    static OPEN: RefCell<Option<Vec<(RawComm, LateCall)>>> = const { RefCell::new(None) };
    /// Groups and calls outside of groups: the threads that the real library would have created.
    static THREADS: Cell<usize> = const { Cell::new(0) };
    static LAST_ERROR: Cell<&'static CStr> = const { Cell::new(c"") };
}

/// Returns true if this thread has begun a group and not ended it.
pub(super) fn is_in_group() -> bool {
    OPEN.with_borrow(Option::is_some)
}

/// Number of threads that the real library would have created for calls of this thread.
pub(super) fn threads() -> usize {
    THREADS.get()
}

/// An operation on a rank's streams, in order.
#[derive(Clone)]
pub(super) enum FakeEvent {
    /// A call on a communicator, whose ranks share one group.
    Call { op: &'static str, lane: CommStream, group: Arc<FakeGroup> },
    /// A stream waits for another one up to its mark.
    Follow { lane: CommStream, mark: FakeMark },
    /// Computation of a test, on the compute stream.
    Compute(String),
}

/// A point on a stream: after a number of calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct FakeMark {
    pub(super) lane: CommStream,
    pub(super) calls: usize,
    /// True if it is never reached.
    stuck: bool,
}

/// Target of a raw stream.
struct FakeStream {
    lane: CommStream,
    log: Arc<Mutex<Vec<FakeEvent>>>,
}

/// Records that a call is on a stream.
fn put(stream: RawStream, op: &'static str, raw: RawComm) {
    // SAFETY: one of the streams of a `Host`, which its rank's communicator keeps.
    let stream = unsafe { &*stream.cast_const().cast::<FakeStream>() };
    let group = Arc::clone(&comm(raw).group);
    stream.log.lock().unwrap().push(FakeEvent::Call { op, lane: stream.lane, group });
}

/// Target of a raw communicator.
struct FakeComm {
    group: Arc<FakeGroup>,
    rank: usize,
    late: Mutex<VecDeque<LateCall>>,
}

static GROUPS: LazyLock<Mutex<HashMap<[u8; 128], Arc<FakeGroup>>>> = LazyLock::new(Mutex::default);
static IDS: AtomicU8 = AtomicU8::new(1);

fn comm(raw: RawComm) -> &'static FakeComm {
    // SAFETY: created by `made` below and leaked.
    unsafe { &*raw.cast::<FakeComm>() }
}

fn made(group: &Arc<FakeGroup>, rank: usize) -> RawComm {
    let comm = FakeComm { group: Arc::clone(group), rank, late: Mutex::default() };
    std::ptr::from_mut(Box::leak(Box::new(comm))).cast()
}

/// The group of the ranks that connect under `id`.
fn group_of(id: &UniqueId) -> Arc<FakeGroup> {
    Arc::clone(GROUPS.lock().unwrap().entry(id.0).or_default())
}

/// Gives the ranks that connect under `id` MIG instances of one card.
pub(super) fn share_card(id: &UniqueId) {
    group_of(id).one_card.store(true, Ordering::SeqCst);
}

/// Makes a call; the last rank does the work of all.
fn post(raw: RawComm, post: FakePost) -> NcclStatus {
    let FakeComm { group, rank, .. } = comm(raw);
    if group.is_aborted() {
        return NcclStatus::REMOTE_ERROR;
    }
    let mut posts = group.posts.lock().unwrap();
    posts[*rank] = Some(post);
    if let FakePost::Send { peer, .. } | FakePost::Recv { peer, .. } = post {
        let sides = [Some(post), posts[peer]];
        let done = pass_on(sides, [*rank, peer]) || pass_on([sides[1], sides[0]], [peer, *rank]);
        if done {
            (posts[*rank], posts[peer]) = (None, None);
        }
        return if done { NcclStatus::SUCCESS } else { NcclStatus::IN_PROGRESS };
    }
    let all: Option<Vec<FakePost>> = posts.iter().copied().collect();
    if let Some(all) = all
        && work(&all)
    {
        posts.fill(None);
        return NcclStatus::SUCCESS;
    }
    NcclStatus::IN_PROGRESS
}

/// True if the calls of the two ranks are the sides of one message, from the first to the second;
/// then copies it.
fn pass_on(sides: [Option<FakePost>; 2], [sender, receiver]: [usize; 2]) -> bool {
    let [
        Some(FakePost::Send { from, bytes, peer: to_rank }),
        Some(FakePost::Recv { to, bytes: capacity, peer: from_rank }),
    ] = sides
    else {
        return false;
    };
    let fits = (bytes, to_rank, from_rank) == (capacity, receiver, sender);
    if fits {
        // SAFETY: tests keep the memory until the call finishes.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    }
    fits
}

/// True if the calls match; then does their work.
fn work(all: &[FakePost]) -> bool {
    let ranks = all.len();
    for (rank, post) in all.iter().enumerate() {
        let same = match (*post, all[0]) {
            (
                FakePost::Sum { count: a, kind: b, scatter: c, .. },
                FakePost::Sum { count, kind, scatter, .. },
            ) => (a, b, c) == (count, kind, scatter),
            (FakePost::Gather { bytes: a, .. }, FakePost::Gather { bytes, .. }) => a == bytes,
            (FakePost::Copy { bytes: a, root: b, .. }, FakePost::Copy { bytes, root, .. }) => {
                (a, b) == (bytes, root)
            }
            (FakePost::Split { .. }, FakePost::Split { .. }) => true,
            (one, other) => one == other && rank < ranks,
        };
        if !same {
            return false;
        }
    }
    match all[0] {
        FakePost::Meet | FakePost::Finalize => {}
        FakePost::Send { .. } | FakePost::Recv { .. } => return false,
        FakePost::Split { .. } => split(all),
        FakePost::Sum { kind: 7, .. } => sum::<f32>(all),
        FakePost::Sum { .. } => sum::<f64>(all),
        FakePost::Gather { bytes, .. } => gather(all, bytes),
        FakePost::Copy { bytes, root, .. } => {
            let FakePost::Copy { at: from, .. } = all[root as usize] else { return false };
            for post in all {
                let FakePost::Copy { at, .. } = post else { return false };
                // SAFETY: tests keep the memory until the call finishes.
                unsafe { std::ptr::copy(from as *const u8, *at as *mut u8, bytes) };
            }
        }
    }
    true
}

fn split(all: &[FakePost]) {
    let mut groups: HashMap<c_int, (Arc<FakeGroup>, usize)> = HashMap::new();
    for post in all {
        let FakePost::Split { color, target } = *post else { return };
        let (group, rank) = groups.entry(color).or_default();
        group.posts.lock().unwrap().push(None);
        // SAFETY: the caller leaks the place.
        unsafe { (target as *mut RawComm).write(made(group, *rank)) };
        *rank += 1;
    }
}

fn sum<T: Copy + std::iter::Sum<T>>(all: &[FakePost]) {
    let calls = all.iter().filter_map(|post| match *post {
        FakePost::Sum { from, to, count, scatter, .. } => Some((from, to, count, scatter)),
        _ => None,
    });
    let calls: Vec<(usize, usize, usize, bool)> = calls.collect();
    let total = calls[0].2 * if calls[0].3 { all.len() } else { 1 };
    // SAFETY: tests keep the memory until the call finishes.
    let at = |from: usize, i: usize| unsafe { (from as *const T).add(i).read() };
    let sums: Vec<T> = (0..total).map(|i| calls.iter().map(|call| at(call.0, i)).sum()).collect();
    for (rank, (_, to, count, scatter)) in calls.iter().enumerate() {
        let begin = if *scatter { rank * count } else { 0 };
        // SAFETY: as above.
        unsafe { std::ptr::copy(sums[begin..].as_ptr(), *to as *mut T, *count) };
    }
}

fn gather(all: &[FakePost], bytes: usize) {
    for target in all {
        for (rank, source) in all.iter().enumerate() {
            let (FakePost::Gather { to, .. }, FakePost::Gather { from, .. }) = (target, source) else {
                return;
            };
            // SAFETY: same as for sums.
            unsafe { std::ptr::copy(*from as *const u8, (*to + rank * bytes) as *mut u8, bytes) };
        }
    }
}

unsafe extern "C" fn get_version(version: *mut c_int) -> NcclStatus {
    // SAFETY: a local of the caller, as for all pointers here.
    unsafe { version.write(22809) };
    NcclStatus::SUCCESS
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> NcclStatus {
    // SAFETY: as above.
    unsafe { id.write(UniqueId([IDS.fetch_add(1, Ordering::SeqCst); 128])) };
    NcclStatus::SUCCESS
}

unsafe extern "C" fn get_error_string(_: NcclStatus) -> *const c_char {
    c"stand-in error".as_ptr()
}

unsafe extern "C" fn get_last_error(_: RawComm) -> *const c_char {
    LAST_ERROR.get().as_ptr()
}

unsafe extern "C" fn init(
    target: *mut RawComm,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    _: *mut NcclConfig,
) -> NcclStatus {
    let group = group_of(&id);
    group.posts.lock().unwrap().resize(size as usize, None);
    // SAFETY: as above.
    unsafe { target.write(made(&group, rank as usize)) };
    // SAFETY: just written.
    post(unsafe { target.read() }, FakePost::Meet)
}

unsafe extern "C" fn comm_split(
    raw: RawComm,
    color: c_int,
    _: c_int,
    target: *mut RawComm,
    _: *mut NcclConfig,
) -> NcclStatus {
    post(raw, FakePost::Split { color, target: target as usize })
}

unsafe extern "C" fn get_async_error(raw: RawComm, state: *mut NcclStatus) -> NcclStatus {
    let FakeComm { group, rank, late } = comm(raw);
    let waits = || group.posts.lock().unwrap()[*rank].is_some();
    let mut late = late.lock().unwrap();
    late.iter_mut().for_each(|call| call.polls = call.polls.saturating_sub(1));
    // Calls of a communicator run one after the other.
    while let Some(call) = late.pop_front_if(|call| call.polls == 0 && !waits()) {
        put(call.stream, call.op, raw);
        post(raw, call.post);
    }
    // A peer may have ended the posted call since.
    let waits = late.front().is_some_and(|call| call.polls == 0) || waits();
    drop(late);
    let status = if group.is_aborted() {
        NcclStatus::REMOTE_ERROR
    } else if group.one_card.load(Ordering::SeqCst) {
        LAST_ERROR.set(c"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000");
        NcclStatus::INVALID_USAGE
    } else if waits {
        NcclStatus::IN_PROGRESS
    } else {
        NcclStatus::SUCCESS
    };
    // SAFETY: as above.
    unsafe { state.write(status) };
    NcclStatus::SUCCESS
}

unsafe extern "C" fn finalize(raw: RawComm) -> NcclStatus {
    post(raw, FakePost::Finalize)
}

unsafe extern "C" fn destroy(_: RawComm) -> NcclStatus {
    NcclStatus::SUCCESS
}

unsafe extern "C" fn abort(raw: RawComm) -> NcclStatus {
    let group = &comm(raw).group;
    let held = group.held.lock().unwrap();
    drop(group.released.wait_timeout_while(held, HELD, |held| *held).unwrap());
    group.aborted.store(true, Ordering::SeqCst);
    NcclStatus::SUCCESS
}

unsafe extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    op: c_int,
    raw: RawComm,
    stream: RawStream,
) -> NcclStatus {
    assert_eq!(op, 0);
    let call = FakePost::Sum { from: from as usize, to: to as usize, count, kind, scatter: false };
    collective(raw, "all-reduce", stream, call)
}

unsafe extern "C" fn reduce_scatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    op: c_int,
    raw: RawComm,
    stream: RawStream,
) -> NcclStatus {
    assert_eq!(op, 0);
    let call = FakePost::Sum { from: from as usize, to: to as usize, count, kind, scatter: true };
    collective(raw, "reduce-scatter", stream, call)
}

fn width(kind: c_int) -> usize {
    [(1, 1), (7, 4), (8, 8), (9, 2)].into_iter().find(|(code, _)| *code == kind).unwrap().1
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    raw: RawComm,
    stream: RawStream,
) -> NcclStatus {
    let call = FakePost::Gather { from: from as usize, to: to as usize, bytes: count * width(kind) };
    collective(raw, "all-gather", stream, call)
}

unsafe extern "C" fn broadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    root: c_int,
    raw: RawComm,
    stream: RawStream,
) -> NcclStatus {
    assert_eq!(from, to.cast_const());
    collective(raw, "broadcast", stream, FakePost::Copy { at: to as usize, bytes: count * width(kind), root })
}

unsafe extern "C" fn group_start() -> NcclStatus {
    OPEN.set(Some(Vec::new()));
    NcclStatus::SUCCESS
}

unsafe extern "C" fn group_end() -> NcclStatus {
    let Some(calls) = OPEN.take() else { return NcclStatus::INVALID_USAGE };
    THREADS.set(THREADS.get() + 1);
    for (raw, call) in calls {
        comm(raw).late.lock().unwrap().push_back(call);
    }
    NcclStatus::SUCCESS
}

/// Accepts a collective, which is on its stream at once if it has no group.
fn collective(raw: RawComm, op: &'static str, stream: RawStream, call: FakePost) -> NcclStatus {
    if is_in_group() {
        return accept(raw, op, stream, call);
    }
    THREADS.set(THREADS.get() + 1);
    put(stream, op, raw);
    post(raw, call)
}

/// Accepts a call. It is on its stream at the first poll after its group, and one poll later if it
/// has no group.
fn accept(raw: RawComm, op: &'static str, stream: RawStream, post: FakePost) -> NcclStatus {
    let FakeComm { group, late, .. } = comm(raw);
    if group.is_aborted() {
        return NcclStatus::REMOTE_ERROR;
    }
    let call = |polls| LateCall { op, stream, post, polls };
    OPEN.with_borrow_mut(|open| match open {
        Some(open) => open.push((raw, call(1))),
        None => late.lock().unwrap().push_back(call(2)),
    });
    NcclStatus::SUCCESS
}

unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    kind: c_int,
    peer: c_int,
    raw: RawComm,
    stream: RawStream,
) -> NcclStatus {
    let bytes = count * width(kind);
    accept(raw, "send", stream, FakePost::Send { from: from as usize, bytes, peer: peer as usize })
}

unsafe extern "C" fn recv(
    to: *mut c_void,
    count: usize,
    kind: c_int,
    peer: c_int,
    raw: RawComm,
    stream: RawStream,
) -> NcclStatus {
    let bytes = count * width(kind);
    accept(raw, "recv", stream, FakePost::Recv { to: to as usize, bytes, peer: peer as usize })
}

/// The fake library.
pub(super) fn library() -> Arc<NcclLibrary> {
    let table = NcclFunctions {
        get_version,
        get_unique_id,
        get_error_string,
        get_last_error,
        comm_init_rank_config: init,
        comm_split,
        comm_get_async_error: get_async_error,
        comm_finalize: finalize,
        comm_destroy: destroy,
        comm_abort: abort,
        all_reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        group_start,
        group_end,
        send,
        recv,
    };
    Arc::new(NcclLibrary::of_table(table, "stand-in".into()).unwrap())
}

/// A device whose work finishes at once, until it is stuck.
pub(super) struct Host {
    pub(super) stuck: Arc<AtomicBool>,
    log: Arc<Mutex<Vec<FakeEvent>>>,
    /// Streams by lane.
    streams: [Box<FakeStream>; CommStream::COUNT],
}

impl Default for Host {
    fn default() -> Self {
        let log: Arc<Mutex<Vec<FakeEvent>>> = Arc::default();
        let stream = |lane| Box::new(FakeStream { lane, log: Arc::clone(&log) });
        let streams = [CommStream::Compute, CommStream::Gather, CommStream::Reduce].map(stream);
        Host { stuck: Arc::default(), log, streams }
    }
}

impl Host {
    /// Another view of the same device.
    pub(super) fn other_end(&self) -> Host {
        Host { stuck: Arc::clone(&self.stuck), log: Arc::clone(&self.log), ..Host::default() }
    }

    /// Records a computation of a test.
    pub(super) fn compute(&self, what: String) {
        self.log.lock().unwrap().push(FakeEvent::Compute(what));
    }

    /// Operations on the streams since the last call of this.
    pub(super) fn events(&self) -> Vec<FakeEvent> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }
}

/// "Device" memory and its counterpart.
pub(super) struct FakeScratch {
    device: Vec<u8>,
    host: Vec<u8>,
}

impl GpuStreams for Host {
    type Mark = FakeMark;
    type Scratch = FakeScratch;

    fn bind(&self) -> Result<()> {
        Ok(())
    }

    fn stream(&self, lane: CommStream) -> RawStream {
        std::ptr::from_ref(&*self.streams[lane as usize]).cast_mut().cast()
    }

    fn mark(&self, lane: CommStream) -> Result<FakeMark> {
        let log = self.log.lock().unwrap();
        let on_lane = |event: &&FakeEvent| match event {
            FakeEvent::Call { lane: of, .. } => *of == lane,
            FakeEvent::Compute(_) => lane == CommStream::Compute,
            FakeEvent::Follow { .. } => false,
        };
        let stuck = self.stuck.load(Ordering::SeqCst);
        Ok(FakeMark { lane, calls: log.iter().filter(on_lane).count(), stuck })
    }

    fn follow(&self, lane: CommStream, mark: &FakeMark) -> Result<()> {
        assert_ne!(lane, mark.lane, "a stream needs no mark of its own");
        self.log.lock().unwrap().push(FakeEvent::Follow { lane, mark: *mark });
        Ok(())
    }

    fn reached(&self, mark: &FakeMark) -> Result<bool> {
        Ok(!mark.stuck)
    }

    fn scratch(&self, bytes: usize) -> Result<FakeScratch> {
        Ok(FakeScratch { device: vec![0; bytes], host: vec![0; bytes] })
    }

    fn address(&self, scratch: &FakeScratch) -> usize {
        scratch.device.as_ptr() as usize
    }

    fn host<'a>(&self, scratch: &'a mut FakeScratch) -> Result<&'a mut [u8]> {
        Ok(&mut scratch.host)
    }

    fn put(&self, scratch: &mut FakeScratch, range: Range<usize>) -> Result<()> {
        scratch.device[range.clone()].copy_from_slice(&scratch.host[range]);
        Ok(())
    }

    fn fetch(&self, scratch: &mut FakeScratch, range: Range<usize>) -> Result<()> {
        scratch.host[range.clone()].copy_from_slice(&scratch.device[range]);
        Ok(())
    }
}
