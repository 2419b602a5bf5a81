//! The MPI backend, by three processes under `mpirun`: this test starts itself there, once for each scene. Every rank
//! writes what it found to a file of its own, because mpirun ends the others as soon as one exits without ending MPI.
//!
//! `cargo test --features mpi --test mpi`; skips loudly where there is no `mpirun`.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stderr, reason = "a test without harness says what it does")]

use std::any::Any;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use finetune::collective::mpi::Mpi;
use finetune::collective::{Call, Collective, Element, Memory, Op, Phase};
use half::bf16;

const RANKS: usize = 3;
const SCENE: &str = "FINETUNE_MPI_SCENE";
const FOLDER: &str = "FINETUNE_MPI_FOLDER";

/// What each rank does, and what it must find: `None` for "no error".
struct Scene {
    name: &'static str,
    run: fn(&Mpi) -> Result<(), finetune::error::Error>,
    deadline: Duration,
    /// For each rank, parts of the error that it gets.
    errors: [&'static [&'static str]; RANKS],
}

const SCENES: [Scene; 6] = [
    Scene { name: "values", run: values, deadline: Duration::from_secs(60), errors: [&[]; RANKS] },
    Scene { name: "groups", run: groups, deadline: Duration::from_secs(60), errors: [&[]; RANKS] },
    Scene {
        name: "mismatch",
        run: mismatch,
        deadline: Duration::from_secs(60),
        errors: [
            &[
                "ranks do not make the same call",
                "rank 0 makes call 1: all-reduce of gradients 7 (10 x F32), in phase backward",
                "rank 1 makes call 1: all-reduce of gradients 7 (11 x F32), in phase norm",
            ],
            &["rank 1 makes call 1: all-reduce of gradients 7 (11 x F32)", "(10 x F32)"],
            &["rank 2 makes call 1: all-reduce of gradients 7 (10 x F32)", "rank 1 makes call 1"],
        ],
    },
    Scene {
        name: "failure",
        run: failure,
        deadline: Duration::from_secs(60),
        errors: [
            &[
                "rank 2 failed in phase save",
                "no space left",
                "rank 2: its last call was call 0: split of ranks 0",
            ],
            &[
                "rank 2 failed in phase save",
                "no space left",
                "rank 2: its last call was call 0: split of ranks 0",
            ],
            &["rank 2 failed in phase save", "no space left"],
        ],
    },
    Scene {
        name: "late",
        run: late,
        deadline: Duration::from_secs(2),
        errors: [
            &["no answer from rank 1", "waited 2 s at call 0: barrier of start 0"],
            &[],
            &["no answer from rank 1"],
        ],
    },
    Scene {
        name: "another thread",
        run: another_thread,
        deadline: Duration::from_secs(60),
        errors: [&["rank 0 failed", "the control channel broke"], &["rank 0 failed"], &["rank 0 failed"]],
    },
];

fn main() -> ExitCode {
    match std::env::var(SCENE) {
        Ok(name) => rank(SCENES.iter().find(|scene| scene.name == name).unwrap()),
        Err(_) => launch(),
    }
}

/// Starts every scene under mpirun.
fn launch() -> ExitCode {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no mpirun here (Debian: apt-get install openmpi-bin)");
        return ExitCode::SUCCESS;
    }
    let mut code = ExitCode::SUCCESS;
    for scene in &SCENES {
        let folder = tempfile::tempdir().unwrap();
        let mut mpirun = Command::new("mpirun");
        mpirun.args([
            "-n",
            &RANKS.to_string(),
            "--oversubscribe",
            "--allow-run-as-root",
            "--bind-to",
            "none",
        ]);
        mpirun.arg(std::env::current_exe().unwrap());
        mpirun.env(SCENE, scene.name).env(FOLDER, folder.path());
        let output = mpirun.output().unwrap();
        match judge(scene, folder.path(), output.status.code()) {
            Ok(()) => eprintln!("mpi: {} ok", scene.name),
            Err(why) => {
                eprintln!("mpi: {} FAILED: {why}\n{}", scene.name, String::from_utf8_lossy(&output.stderr));
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

fn judge(scene: &Scene, folder: &Path, code: Option<i32>) -> Result<(), String> {
    for (rank, parts) in scene.errors.iter().enumerate() {
        let found =
            std::fs::read_to_string(found(folder, rank)).map_err(|_| format!("rank {rank} left nothing"))?;
        if parts.is_empty() && found != "done" {
            return Err(format!("rank {rank}: {found}"));
        }
        if let Some(part) = parts.iter().find(|part| !found.contains(**part)) {
            return Err(format!("rank {rank} does not say `{part}` but {found}"));
        }
    }
    let failing = scene.errors.iter().any(|parts| !parts.is_empty());
    let accepted = if failing { 75 } else { 0 };
    if code == Some(accepted) { Ok(()) } else { Err(format!("mpirun ended with {code:?}, not {accepted}")) }
}

fn found(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

/// One rank of a scene.
fn rank(scene: &Scene) -> ExitCode {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let world = Mpi::world(scene.deadline).unwrap();
    assert_eq!(world.size(), RANKS);
    let result = (scene.run)(&world);
    let text = result.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
    std::fs::write(folder.join(format!("new-{}", world.rank())), text).unwrap();
    std::fs::rename(folder.join(format!("new-{}", world.rank())), found(&folder, world.rank())).unwrap();
    if scene.errors.iter().all(|parts| parts.is_empty()) {
        return if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(30) && !(0..RANKS).all(|rank| found(&folder, rank).exists()) {
        std::thread::sleep(Duration::from_millis(10));
    }
    // As the program does on an error: after a failure MPI is not ended in order.
    std::process::exit(75);
}

const fn call(what: &'static str, index: usize) -> Call {
    Call { what, index }
}

/// Memory over a vector that lives as long.
struct Host<T> {
    values: Arc<Vec<T>>,
    memory: Memory,
}

impl<T: Copy + Send + Sync + 'static> Host<T> {
    fn new(element: Element, values: Vec<T>) -> Self {
        let values = Arc::new(values);
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&values) as _;
        // SAFETY: the vector is kept by its owner and read only between collectives.
        let memory = unsafe { Memory::new(values.as_ptr() as usize, values.len(), element, owner) };
        Host { values, memory }
    }

    fn read(&self) -> Vec<T> {
        // SAFETY: no collective is running. The vector was written behind the compiler's back.
        (0..self.values.len())
            .map(|i| unsafe { std::ptr::read_volatile(self.values.as_ptr().add(i)) })
            .collect()
    }
}

/// Values of very different size, so that sums depend on their order.
fn value(rank: usize, i: usize) -> f32 {
    let hash = ((i * RANKS + rank) as u32).wrapping_mul(2_654_435_761);
    let exponent = i32::try_from(hash % 40).unwrap() - 20;
    ((hash >> 8) as f32 / 8_388_608.0 - 1.0) * 2.0_f32.powi(exponent)
}

fn values_f32(rank: usize, elements: usize) -> Vec<f32> {
    (0..elements).map(|i| value(rank, i)).collect()
}

/// The sum in ascending order of ranks, in plain words.
fn sum_f32(i: usize) -> f32 {
    (value(0, i) + value(1, i)) + value(2, i)
}

/// Every operation on every element that it takes; sizes that 3 does not divide; a size of several pieces.
fn values(world: &Mpi) -> Result<(), finetune::error::Error> {
    let rank = world.rank();
    world.enter(Phase::Forward)?;
    for elements in [0, 1, 2, 7, 1000, 1_000_001] {
        let buffer = Host::new(Element::F32, values_f32(rank, elements));
        world.all_reduce(call("f32", elements), &buffer.memory)?;
        let wanted: Vec<u32> = (0..elements).map(|i| sum_f32(i).to_bits()).collect();
        assert_eq!(buffer.read().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), wanted, "{elements}");
    }
    let double = |rank, i| f64::from(value(rank, i)) / 3.0;
    let buffer = Host::new(Element::F64, (0..5).map(|i| double(rank, i)).collect());
    world.all_reduce(call("f64", 0), &buffer.memory)?;
    let wanted: Vec<f64> = (0..5).map(|i| double(0, i) + double(1, i) + double(2, i)).collect();
    assert_eq!(buffer.read(), wanted);

    let narrow = |rank, i| bf16::from_f32(value(rank, i));
    let buffer = Host::new(Element::Bf16, (0..1001).map(|i| narrow(rank, i)).collect());
    world.all_reduce(call("bf16", 0), &buffer.memory)?;
    let wide = |i| (narrow(0, i).to_f32() + narrow(1, i).to_f32()) + narrow(2, i).to_f32();
    assert_eq!(buffer.read(), (0..1001).map(|i| bf16::from_f32(wide(i))).collect::<Vec<_>>());

    let bytes = Host::new(Element::U8, vec![1_u8; 3]);
    assert!(world.all_reduce(call("bytes", 0), &bytes.memory).is_err(), "bytes have no sum");

    // Two pieces and a bit for each rank.
    let part = 600_000;
    let full = Host::new(Element::F32, values_f32(rank, part * RANKS));
    let shard = Host::new(Element::F32, vec![0.0_f32; part]);
    world.reduce_scatter(call("full", 0), &full.memory, &shard.memory)?;
    let wanted: Vec<u32> = (rank * part..(rank + 1) * part).map(|i| sum_f32(i).to_bits()).collect();
    assert_eq!(shard.read().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), wanted);

    gathers(world)?;
    for root in 0..RANKS {
        let buffer = Host::new(Element::U8, vec![rank as u8 + 10; 5]);
        world.broadcast(call("bytes", root), root, &buffer.memory)?;
        assert_eq!(buffer.read(), vec![root as u8 + 10; 5]);
    }
    world.barrier(call("end", 0))?;
    let traffic = world.traffic();
    assert_eq!(traffic.calls(Op::Broadcast), 3);
    assert_eq!(traffic.bytes(Op::Broadcast), 10);
    assert_eq!(traffic.bytes(Op::ReduceScatter), (part * 4 * 2) as u64);
    Ok(())
}

/// Two gathers at once, one in place, with a sum between start and finish.
fn gathers(world: &Mpi) -> Result<(), finetune::error::Error> {
    let rank = world.rank();
    let shard = Host::new(Element::U8, vec![rank as u8 + 1; 70_001]);
    let full = Host::new(Element::U8, vec![0_u8; 70_001 * RANKS]);
    let first = world.start_all_gather(call("codes", 0), &shard.memory, &full.memory)?;

    let mut own = vec![0.0_f32; 4 * RANKS];
    own[rank * 4..(rank + 1) * 4].fill(rank as f32 + 0.5);
    let in_place = Host::new(Element::F32, own);
    let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&in_place.values) as _;
    // SAFETY: this rank's quarter of the vector above.
    let part = unsafe { Memory::new(in_place.memory.address() + rank * 16, 4, Element::F32, owner) };
    let second = world.start_all_gather(call("weights", 1), &part, &in_place.memory)?;

    let scalar = Host::new(Element::F64, vec![rank as f64]);
    world.all_reduce(call("loss", 0), &scalar.memory)?;
    assert_eq!(scalar.read(), [3.0]);

    world.finish(first)?;
    world.finish(second)?;
    let wanted: Vec<u8> = (0..RANKS).flat_map(|rank| vec![rank as u8 + 1; 70_001]).collect();
    assert_eq!(full.read(), wanted);
    let wanted: Vec<f32> = (0..RANKS).flat_map(|rank| [rank as f32 + 0.5; 4]).collect();
    assert_eq!(in_place.read(), wanted);
    Ok(())
}

/// Ranks 0 and 2 form one group, rank 1 another; the groups' calls do not meet.
fn groups(world: &Mpi) -> Result<(), finetune::error::Error> {
    let rank = world.rank();
    let group = world.split(rank % 2)?;
    let (place, size) = if rank == 1 { (0, 1) } else { (rank / 2, 2) };
    assert_eq!((group.rank(), group.size()), (place, size));
    let buffer = Host::new(Element::F32, vec![rank as f32 + 1.0; 3]);
    for index in 0..group.size() {
        group.all_reduce(call("group", index), &buffer.memory)?;
    }
    assert_eq!(buffer.read(), vec![if rank == 1 { 2.0 } else { 8.0 }; 3]);

    // hsdp's sum: shards in a group of one, then over the three that hold the same shard.
    let (alone, replicas) = (world.split(rank)?, world.split(0)?);
    let (full, shard) =
        (Host::new(Element::F32, vec![rank as f32; 5]), Host::new(Element::F32, vec![9.0_f32; 5]));
    alone.reduce_scatter_across(call("across", 0), &*replicas, &full.memory, &shard.memory)?;
    assert_eq!(shard.read(), vec![3.0; 5]);
    world.barrier(call("end", 0))
}

/// Rank 1 reduces one element more, after a call on which all agree.
fn mismatch(world: &Mpi) -> Result<(), finetune::error::Error> {
    world.barrier(call("start", 0))?;
    world.enter(if world.rank() == 1 { Phase::Norm } else { Phase::Backward })?;
    let buffer = Host::new(Element::F32, vec![1.0_f32; if world.rank() == 1 { 11 } else { 10 }]);
    let result = world.all_reduce(call("gradients", 7), &buffer.memory);
    assert_eq!(buffer.read()[0], 1.0, "nothing is added to");
    let again = world.barrier(call("after", 0)).unwrap_err();
    assert_eq!(again.to_string(), result.as_ref().unwrap_err().to_string(), "the first error stays");
    result
}

/// Rank 2 fails while the others wait for it, one of them in another group.
fn failure(world: &Mpi) -> Result<(), finetune::error::Error> {
    let group = world.split(world.rank() / 2)?;
    if world.rank() == 2 {
        world.enter(Phase::Save)?;
        group.abort("no space left");
        group.abort("said twice");
        return world.barrier(call("end", 0));
    }
    if world.rank() == 1 {
        // Never matched: rank 0 waits in the world.
        return group.barrier(call("group", 0));
    }
    world.barrier(call("end", 0))
}

/// Rank 1 does not come.
fn late(world: &Mpi) -> Result<(), finetune::error::Error> {
    if world.rank() == 1 {
        return Ok(());
    }
    world.barrier(call("start", 0))
}

/// Rank 0's other thread raises the alarm while the rank waits for ranks that wait for it in another group.
fn another_thread(world: &Mpi) -> Result<(), finetune::error::Error> {
    let groups = [world.split(0)?, world.split(0)?];
    std::thread::scope(|scope| {
        if world.rank() == 0 {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                world.abort("the control channel broke");
            });
        }
        groups[usize::from(world.rank() == 0)].barrier(call("start", 0))
    })
}
