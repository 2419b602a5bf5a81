//! The MPI backend, in processes under `mpirun` with one or several ranks each: this test starts
//! itself there, once for each scene. Every rank and process writes its result to its own file,
//! because mpirun ends the others as soon as one exits without ending MPI.
//!
//! `cargo test --features mpi --test mpi`; without `mpirun` it prints that it is skipped.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
#![allow(clippy::print_stderr, reason = "a test without harness says what it does")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use finetune::collective::launch::{Flags, Launch};
use finetune::collective::mpi::{MpiCommunicator, run_ranks};
use finetune::collective::{Call, Collective, Gather, Op, Operation, Phase, Reduction};
use finetune::error::{Error, ErrorCategory};
use finetune::runtime::buffer::{Buffer, ElementType};
use half::bf16;

const SCENE: &str = "FINETUNE_MPI_SCENE";
const FOLDER: &str = "FINETUNE_MPI_FOLDER";

/// Texts that must all occur.
type Parts = &'static [&'static str];

const MINUTE: Duration = Duration::from_secs(60);

/// The work of each rank, and its expected outcome.
struct Scene {
    name: &'static str,
    /// Number of processes, and ranks in each.
    layout: (usize, usize),
    run: fn(&MpiCommunicator) -> Result<(), Error>,
    deadline: Duration,
    /// For each rank, parts of its expected error, or none. Empty if no rank gets an error.
    errors: &'static [Parts],
    /// For each process, parts of its final error: the failing rank and the error.
    ends: &'static [Parts],
}

/// A scene without errors.
const fn fine(
    name: &'static str,
    layout: (usize, usize),
    run: fn(&MpiCommunicator) -> Result<(), Error>,
) -> Scene {
    Scene { name, layout, run, deadline: MINUTE, errors: &[], ends: &[] }
}

const FULL_DISK: Parts =
    &["rank 2 failed in phase save", "no space left", "rank 2: its last call was call 0: split of ranks 0"];

const BROKEN: Parts = &["rank 0 failed", "the control channel broke"];

const ONE_MORE: Parts =
    &["rank 1 makes call 1: all-reduce of gradients 7 (11 x F32), in phase norm", "(10 x F32)"];

const LONGER_MESSAGE: Parts = &[
    "ranks do not make the same call",
    "rank 0 makes call 1: send of activations 7 (10 x F32 to rank 2), in phase forward",
    "rank 2 makes call 1: recv of activations 7 (11 x F32 from rank 0), in phase forward",
];

const SCENES: [Scene; 17] = [
    fine("values", (3, 1), values),
    fine("values of threads", (2, 2), values),
    fine("groups", (3, 1), groups),
    fine("groups of threads", (2, 2), groups_of_four),
    fine("sums across groups", (2, 3), across),
    Scene {
        name: "mismatch",
        layout: (3, 1),
        run: mismatch,
        deadline: MINUTE,
        errors: &[
            &[
                "ranks do not make the same call",
                "rank 0 makes call 1: all-reduce of gradients 7 (10 x F32), in phase backward",
                "rank 1 makes call 1: all-reduce of gradients 7 (11 x F32), in phase norm",
            ],
            &["rank 1 makes call 1: all-reduce of gradients 7 (11 x F32)", "(10 x F32)"],
            &["rank 2 makes call 1: all-reduce of gradients 7 (10 x F32)", "rank 1 makes call 1"],
        ],
        ends: &[&["heard", "rank 0 makes"], &["heard", "rank 1 makes"], &["heard", "rank 2 makes"]],
    },
    Scene {
        name: "mismatch of a message",
        layout: (3, 1),
        run: longer_message,
        deadline: MINUTE,
        errors: &[LONGER_MESSAGE; 3],
        ends: &[LONGER_MESSAGE; 3],
    },
    Scene {
        name: "failure before a message",
        layout: (2, 2),
        run: failed_sender,
        deadline: MINUTE,
        errors: &[FULL_DISK; 4],
        ends: &[FULL_DISK; 2],
    },
    Scene {
        name: "late message",
        layout: (2, 1),
        run: late_message,
        deadline: Duration::from_secs(10),
        errors: &[
            &["no answer from rank 1", "waited 10 s at call 0: recv of activations 0 (3 x F32 from rank 1)"],
            &[],
        ],
        ends: &[&["no answer from rank 1"], &[]],
    },
    Scene {
        name: "mismatch of threads",
        layout: (2, 2),
        run: mismatch,
        deadline: MINUTE,
        errors: &[ONE_MORE; 4],
        ends: &[&["heard", "rank 1 makes"], &["heard", "rank 1 makes"]],
    },
    Scene {
        name: "failure",
        layout: (3, 1),
        run: failure,
        deadline: MINUTE,
        errors: &[FULL_DISK; 3],
        ends: &[FULL_DISK; 3],
    },
    Scene {
        name: "failure of a thread",
        layout: (2, 2),
        run: failure,
        deadline: MINUTE,
        errors: &[FULL_DISK; 4],
        ends: &[FULL_DISK; 2],
    },
    Scene {
        name: "error of a thread",
        layout: (2, 2),
        run: error,
        deadline: MINUTE,
        errors: &[
            &["rank 2 failed in phase norm"],
            &["rank 2 failed in phase norm"],
            &["not a number"],
            &["rank 2 failed in phase norm"],
        ],
        ends: &[
            &[
                "heard",
                "rank 2 failed in phase norm",
                "not a number",
                "rank 2: its last call was call 0: barrier of start 0",
            ],
            &[
                "rank 2: rank 2 failed in phase norm: not a number",
                "rank 2: its last call was call 0: barrier of start 0",
            ],
        ],
    },
    Scene {
        name: "panic of a thread",
        layout: (2, 2),
        run: panic,
        deadline: MINUTE,
        errors: &[
            &["rank 1 failed in phase backward"],
            &["a panic"],
            &["rank 1 failed in phase backward"],
            &["rank 1 failed in phase backward"],
        ],
        ends: &[
            &["rank 1: rank 1 failed in phase backward: the thread panicked: index out of everything"],
            &["heard", "rank 1 failed in phase backward", "index out of everything"],
        ],
    },
    Scene {
        name: "late",
        layout: (3, 1),
        run: late,
        deadline: Duration::from_secs(10),
        errors: &[
            &["no answer from rank 1", "waited 10 s at call 0: barrier of start 0"],
            &[],
            &["no answer from rank 1"],
        ],
        ends: &[&["heard", "no answer from rank 1"], &[], &["heard", "no answer from rank 1"]],
    },
    Scene {
        name: "another thread",
        layout: (3, 1),
        run: another_thread,
        deadline: MINUTE,
        errors: &[&["rank 0 failed", "the control channel broke"], &["rank 0 failed"], &["rank 0 failed"]],
        ends: &[BROKEN; 3],
    },
    Scene {
        name: "another thread beside several",
        layout: (2, 2),
        run: another_thread,
        deadline: MINUTE,
        errors: &[BROKEN; 4],
        ends: &[BROKEN; 2],
    },
];

fn main() -> ExitCode {
    match std::env::var(SCENE) {
        Ok(name) => process(SCENES.iter().find(|scene| scene.name == name).unwrap()),
        Err(_) => launch(),
    }
}

/// Starts every scene under mpirun.
fn launch() -> ExitCode {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("SKIPPED tests of ranks over MPI: no mpirun here (Debian: apt-get install openmpi-bin)");
        return ExitCode::SUCCESS;
    }
    let mut code = ExitCode::SUCCESS;
    for scene in &SCENES {
        let (mut output, mut verdict) = play(scene);
        if output.status.code().is_none() {
            // A rank killed by a signal gives mpirun an exit code. Open MPI 4's own process
            // sometimes crashes in PMIx_server_finalize after all ranks have ended.
            eprintln!("mpi: {}: mpirun itself was ended by a signal; once more", scene.name);
            (output, verdict) = play(scene);
        }
        match verdict {
            Ok(()) => eprintln!("mpi: {} ok", scene.name),
            Err(why) => {
                eprintln!("mpi: {} FAILED: {why}\n{}", scene.name, String::from_utf8_lossy(&output.stderr));
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

/// Runs a scene; returns mpirun's output and the verdict.
fn play(scene: &Scene) -> (Output, Result<(), String>) {
    let folder = tempfile::tempdir().unwrap();
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &scene.layout.0.to_string()]);
    mpirun.args(["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]);
    mpirun.arg(std::env::current_exe().unwrap());
    mpirun.env(SCENE, scene.name).env(FOLDER, folder.path());
    let output = mpirun.output().unwrap();
    let verdict = judge(scene, folder.path(), output.status.code());
    (output, verdict)
}

fn judge(scene: &Scene, folder: &Path, code: Option<i32>) -> Result<(), String> {
    let (processes, here) = scene.layout;
    for rank in 0..processes * here {
        compare(folder, &rank_name(rank), scene.errors.get(rank).unwrap_or(&&[][..]))?;
    }
    for (process, parts) in scene.ends.iter().enumerate().filter(|(_, parts)| !parts.is_empty()) {
        compare(folder, &process_name(process), parts)?;
    }
    let accepted = if scene.ends.is_empty() { 0 } else { 75 };
    if code == Some(accepted) { Ok(()) } else { Err(format!("mpirun ended with {code:?}, not {accepted}")) }
}

/// Checks that the file of this name contains all `parts`, or states that no error occurred.
fn compare(folder: &Path, name: &str, parts: &[&str]) -> Result<(), String> {
    let report = std::fs::read_to_string(folder.join(name)).map_err(|_| format!("{name} left nothing"))?;
    if parts.is_empty() && report != "done" {
        return Err(format!("{name}: {report}"));
    }
    match parts.iter().find(|part| !report.contains(**part)) {
        Some(part) => Err(format!("{name} does not say `{part}` but {report}")),
        None => Ok(()),
    }
}

fn rank_name(rank: usize) -> String {
    format!("rank-{rank}")
}

fn process_name(process: usize) -> String {
    format!("process-{process}")
}

/// Writes `text` to `name` atomically.
fn leave(folder: &Path, name: &str, text: &str) {
    let new = folder.join(format!("new-{name}"));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

/// Runs the ranks of one process of a scene.
fn process(scene: &Scene) -> ExitCode {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let (processes, here) = scene.layout;
    let flags = Flags { ranks_here: Some(here), ..Flags::default() };
    let launch = Launch::detect(&flags, &|name| std::env::var_os(name)).unwrap();
    let work = |local_rank: usize, world: Arc<MpiCommunicator>| {
        assert_eq!((world.rank(), world.size()), (launch.rank + local_rank, processes * here));
        let name = rank_name(world.rank());
        assert_eq!(std::thread::current().name(), Some(name.as_str()));
        let result = catch_unwind(AssertUnwindSafe(|| (scene.run)(&world)));
        let text = match &result {
            Ok(Ok(())) => "done".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "a panic".to_owned(),
        };
        leave(&folder, &name, &text);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    };
    let Err(failed) = run_ranks(&launch, scene.deadline, drop, work) else { return ExitCode::SUCCESS };
    let whose = failed.own.map_or("heard".to_owned(), |(rank, why)| format!("rank {rank}: {why}"));
    leave(&folder, &process_name(launch.rank / here), &format!("{whose}\n{}", failed.error));
    let failing = scene.ends.iter().enumerate().filter(|(_, parts)| !parts.is_empty());
    let mut names: Vec<String> = failing.map(|(process, _)| process_name(process)).collect();
    names.extend((0..processes * here).map(rank_name));
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(300) && !names.iter().all(|name| folder.join(name).exists()) {
        std::thread::sleep(Duration::from_millis(10));
    }
    // The program does the same on an error: after a failure MPI cannot be finalized.
    std::process::exit(i32::from(failed.error.kind().exit_code()));
}

const fn call(what: &'static str, index: usize) -> Call {
    Call { what, index }
}

/// Host memory backed by a vector with the same lifetime.
struct Host<T> {
    values: Arc<Vec<T>>,
    memory: Buffer,
}

impl<T: Copy + Send + Sync + 'static> Host<T> {
    fn new(element: ElementType, values: Vec<T>) -> Self {
        let values = Arc::new(values);
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&values) as _;
        // SAFETY: the owner keeps the vector and reads it only between collectives.
        let memory = unsafe { Buffer::new(values.as_ptr() as usize, values.len(), element, owner) };
        Host { values, memory }
    }

    fn read(&self) -> Vec<T> {
        // SAFETY: no collective runs. The vector was written outside the compiler's view.
        (0..self.values.len())
            .map(|i| unsafe { std::ptr::read_volatile(self.values.as_ptr().add(i)) })
            .collect()
    }
}

/// Values of very different magnitude, so that sums depend on their order.
fn value(rank: usize, i: usize) -> f32 {
    let hash = ((i * 8 + rank) as u32).wrapping_mul(2_654_435_761);
    let exponent = i32::try_from(hash % 40).unwrap() - 20;
    ((hash >> 8) as f32 / 8_388_608.0 - 1.0) * 2.0_f32.powi(exponent)
}

fn values_f32(rank: usize, elements: usize) -> Vec<f32> {
    (0..elements).map(|i| value(rank, i)).collect()
}

/// Returns the sum in ascending order of ranks.
fn sum_f32(ranks: usize, i: usize) -> f32 {
    (0..ranks).map(|rank| value(rank, i)).reduce(|sum, next| sum + next).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Every operation on every element type that it accepts, with sizes that the ranks do not divide
/// and a size of several pieces.
fn values(world: &MpiCommunicator) -> Result<(), Error> {
    let (rank, ranks) = (world.rank(), world.size());
    world.enter(Phase::Forward)?;
    for elements in [0, 1, 2, 7, 1000, 1_000_001] {
        let buffer = Host::new(ElementType::F32, values_f32(rank, elements));
        world.all_reduce(call("f32", elements), &buffer.memory)?;
        let wanted: Vec<f32> = (0..elements).map(|i| sum_f32(ranks, i)).collect();
        assert_eq!(bits(&buffer.read()), bits(&wanted), "{elements}");
    }
    let double = |rank, i| f64::from(value(rank, i)) / 3.0;
    let buffer = Host::new(ElementType::F64, (0..5).map(|i| double(rank, i)).collect());
    world.all_reduce(call("f64", 0), &buffer.memory)?;
    let wanted: Vec<f64> = (0..5)
        .map(|i| (0..ranks).map(|rank| double(rank, i)).reduce(|sum, next| sum + next).unwrap())
        .collect();
    assert_eq!(buffer.read(), wanted);

    let narrow = |rank, i| bf16::from_f32(value(rank, i));
    let buffer = Host::new(ElementType::Bf16, (0..1001).map(|i| narrow(rank, i)).collect());
    world.all_reduce(call("bf16", 0), &buffer.memory)?;
    let wide = |i| (0..ranks).map(|rank| narrow(rank, i).to_f32()).reduce(|sum, next| sum + next).unwrap();
    assert_eq!(buffer.read(), (0..1001).map(|i| bf16::from_f32(wide(i))).collect::<Vec<_>>());

    let bytes = Host::new(ElementType::U8, vec![1_u8; 3]);
    assert!(world.all_reduce(call("bytes", 0), &bytes.memory).is_err(), "bytes have no sum");

    // Two full pieces and part of a third for each rank.
    let part = 600_000;
    let full = Host::new(ElementType::F32, values_f32(rank, part * ranks));
    let shard = Host::new(ElementType::F32, vec![0.0_f32; part]);
    world.reduce_scatter(call("full", 0), &full.memory, &shard.memory)?;
    let wanted: Vec<f32> = (rank * part..(rank + 1) * part).map(|i| sum_f32(ranks, i)).collect();
    assert_eq!(bits(&shard.read()), bits(&wanted));

    gathers(world)?;
    for root in 0..ranks {
        let buffer = Host::new(ElementType::U8, vec![rank as u8 + 10; 5]);
        world.broadcast(call("bytes", root), root, &buffer.memory)?;
        assert_eq!(buffer.read(), vec![root as u8 + 10; 5]);
    }
    messages(world)?;
    world.barrier(call("end", 0))?;
    let traffic = world.traffic();
    let others = ranks as u64 - 1;
    assert_eq!(traffic.calls(Op::Broadcast), ranks as u64);
    assert_eq!(traffic.bytes(Op::Broadcast), 5 * others);
    assert_eq!(traffic.bytes(Op::ReduceScatter), part as u64 * 4 * others);
    Ok(())
}

/// Messages from every rank to every other, one after the other, while the rest take no part. Then
/// between rank 0 and the last one alone, while the others wait in the next call.
fn messages(world: &MpiCommunicator) -> Result<(), Error> {
    let (rank, ranks) = (world.rank(), world.size());
    let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    for (from, to) in pairs.filter(|(from, to)| from != to) {
        for elements in [0, 1, 1_000_001] {
            let buffer = Host::new(ElementType::F32, values_f32(rank, elements));
            if rank == from {
                world.send(call("message", elements), to, &buffer.memory)?;
            } else if rank == to {
                world.recv(call("message", elements), from, &buffer.memory)?;
                assert_eq!(bits(&buffer.read()), bits(&values_f32(from, elements)), "from {from} to {to}");
            }
        }
    }
    let before = world.traffic();
    for index in 0..100 {
        let bytes = Host::new(ElementType::U8, vec![(rank + index) as u8; 9]);
        if rank == 0 {
            world.send(call("codes", index), ranks - 1, &bytes.memory)?;
        } else if rank == ranks - 1 {
            world.recv(call("codes", index), 0, &bytes.memory)?;
            assert_eq!(bytes.read(), vec![index as u8; 9]);
        }
    }
    let counted = world.traffic().since(&before);
    assert_eq!(counted.bytes(Op::Send), if rank == 0 { 900 } else { 0 });
    assert_eq!(counted.calls(Op::Recv), if rank == ranks - 1 { 100 } else { 0 });
    let own = Host::new(ElementType::U8, vec![0_u8; 9]);
    assert!(world.send(call("codes", 0), rank, &own.memory).is_err(), "a message is for another rank");
    assert!(world.recv(call("codes", 0), ranks, &own.memory).is_err(), "there is no such rank");
    Ok(())
}

/// Two gathers at once, one in place, with a sum between start and finish.
fn gathers(world: &MpiCommunicator) -> Result<(), Error> {
    let (rank, ranks) = (world.rank(), world.size());
    let shard = Host::new(ElementType::U8, vec![rank as u8 + 1; 70_001]);
    let full = Host::new(ElementType::U8, vec![0_u8; 70_001 * ranks]);
    let first = world.start_all_gather(call("codes", 0), &shard.memory, &full.memory)?;

    let mut own = vec![0.0_f32; 4 * ranks];
    own[rank * 4..(rank + 1) * 4].fill(rank as f32 + 0.5);
    let in_place = Host::new(ElementType::F32, own);
    let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&in_place.values) as _;
    // SAFETY: this rank's part of the vector above.
    let part = unsafe { Buffer::new(in_place.memory.address() + rank * 16, 4, ElementType::F32, owner) };
    let second = world.start_all_gather(call("weights", 1), &part, &in_place.memory)?;

    let scalar = Host::new(ElementType::F64, vec![rank as f64]);
    world.all_reduce(call("loss", 0), &scalar.memory)?;
    assert_eq!(scalar.read(), [(0..ranks).sum::<usize>() as f64]);

    world.finish(first)?;
    world.finish(second)?;
    let wanted: Vec<u8> = (0..ranks).flat_map(|rank| vec![rank as u8 + 1; 70_001]).collect();
    assert_eq!(full.read(), wanted);
    let wanted: Vec<f32> = (0..ranks).flat_map(|rank| [rank as f32 + 0.5; 4]).collect();
    assert_eq!(in_place.read(), wanted);

    // Both again as one call.
    let [one, two] = [
        Host::new(ElementType::U8, vec![0_u8; 70_001 * ranks]),
        Host::new(ElementType::U8, vec![0_u8; 70_001 * ranks]),
    ];
    let before = world.traffic();
    let both = [&one, &two].map(|all| Gather { shard: &shard.memory, full: &all.memory });
    world.finish(world.start_all_gathers(call("codes", 2), &both)?)?;
    assert_eq!((one.read(), two.read()), (full.read(), full.read()));
    assert_eq!(world.traffic().since(&before).calls(Op::AllGather), 1);
    Ok(())
}

/// Ranks 0 and 2 form one group, rank 1 another; calls of different groups do not match.
fn groups(world: &MpiCommunicator) -> Result<(), Error> {
    let rank = world.rank();
    let group = world.split(rank % 2)?;
    let (group_rank, size) = if rank == 1 { (0, 1) } else { (rank / 2, 2) };
    assert_eq!((group.rank(), group.size()), (group_rank, size));
    let buffer = Host::new(ElementType::F32, vec![rank as f32 + 1.0; 3]);
    for index in 0..group.size() {
        group.all_reduce(call("group", index), &buffer.memory)?;
    }
    assert_eq!(buffer.read(), vec![if rank == 1 { 2.0 } else { 8.0 }; 3]);

    // hsdp's sum: shards in a group of one, then over the three ranks with the same shard.
    let (alone, replicas) = (world.split(rank)?, world.split(0)?);
    let (full, shard) =
        (Host::new(ElementType::F32, vec![rank as f32; 5]), Host::new(ElementType::F32, vec![9.0_f32; 5]));
    sum_across(&*alone, call("across", 0), &*replicas, (&full.memory, &shard.memory))?;
    assert_eq!(shard.read(), vec![3.0; 5]);
    world.barrier(call("end", 0))
}

/// Groups inside processes, groups across them, a group of all, and groups of groups. Each has its
/// own messages, also while gathers of two groups and of the world run.
fn groups_of_four(world: &MpiCommunicator) -> Result<(), Error> {
    let rank = world.rank();
    let (inside, between) = (world.split(rank / 2)?, world.split(rank % 2)?);
    assert_eq!([inside.rank(), inside.size(), between.rank(), between.size()], [rank % 2, 2, rank / 2, 2]);
    // Rank 2 alone creates groups that the others do not know.
    let alone = world.split(rank)?;
    for _ in 0..if rank == 2 { 3 } else { 0 } {
        alone.split(0)?.barrier(call("alone", 0))?;
    }
    let all = world.split(0)?;
    let pair = all.split(rank % 2)?;
    for (group, members) in [
        (&inside, [rank / 2 * 2, rank / 2 * 2 + 1]),
        (&between, [rank % 2, rank % 2 + 2]),
        (&pair, [rank % 2, rank % 2 + 2]),
    ] {
        in_pair(group.as_ref(), members)?;
    }

    let gathered = |group: &dyn Collective, what| -> Result<_, Error> {
        let shard = Host::new(ElementType::F32, vec![rank as f32 + 1.0; 50_000]);
        let full = Host::new(ElementType::F32, vec![0.0_f32; 50_000 * group.size()]);
        let ticket = group.start_all_gather(call(what, 0), &shard.memory, &full.memory)?;
        Ok((ticket, shard, full))
    };
    let started = [
        (gathered(inside.as_ref(), "inside")?, inside.as_ref(), vec![rank / 2 * 2, rank / 2 * 2 + 1]),
        (gathered(world, "world")?, world, vec![0, 1, 2, 3]),
        (gathered(between.as_ref(), "between")?, between.as_ref(), vec![rank % 2, rank % 2 + 2]),
        (gathered(all.as_ref(), "all")?, all.as_ref(), vec![0, 1, 2, 3]),
    ];
    pair.barrier(call("while they move", 0))?;
    // The later ones finish first.
    for ((ticket, _shard, full), group, members) in started.into_iter().rev() {
        group.finish(ticket)?;
        let wanted: Vec<f32> = members.iter().flat_map(|rank| vec![*rank as f32 + 1.0; 50_000]).collect();
        assert_eq!(full.read(), wanted);
    }
    world.barrier(call("end", 0))
}

/// All kinds of calls between two ranks, `members` of the world.
fn in_pair(group: &dyn Collective, members: [usize; 2]) -> Result<(), Error> {
    let rank = members[group.rank()];
    let sum = |i: usize| value(members[0], i) + value(members[1], i);
    let buffer = Host::new(ElementType::F32, values_f32(rank, 1001));
    group.all_reduce(call("pair", 0), &buffer.memory)?;
    assert_eq!(bits(&buffer.read()), bits(&(0..1001).map(sum).collect::<Vec<_>>()));
    let full = Host::new(ElementType::F32, values_f32(rank, 1000));
    let shard = Host::new(ElementType::F32, vec![0.0_f32; 500]);
    group.reduce_scatter(call("pair", 1), &full.memory, &shard.memory)?;
    let own = group.rank() * 500..(group.rank() + 1) * 500;
    assert_eq!(bits(&shard.read()), bits(&own.map(sum).collect::<Vec<_>>()));
    let word = Host::new(ElementType::U8, vec![rank as u8; 3]);
    group.broadcast(call("pair", 2), 1, &word.memory)?;
    assert_eq!(word.read(), vec![members[1] as u8; 3]);
    group.barrier(call("pair", 3))
}

/// Sums the full data over `group`, and the shards over `replicas`.
fn sum_across(
    group: &dyn Collective,
    call: Call,
    replicas: &dyn Collective,
    (full, shard): (&Buffer, &Buffer),
) -> Result<(), Error> {
    let reduction = Reduction::ReduceScatter { full, shard, replicas: Some(replicas) };
    group.call(call, Operation::Reduce(reduction)).map(drop)
}

/// hsdp's sum on three groups of two, the middle one across both processes: in ascending order of
/// all six ranks.
fn across(world: &MpiCommunicator) -> Result<(), Error> {
    let rank = world.rank();
    let (shards, replicas) = (world.split(rank / 2)?, world.split(rank % 2)?);
    // Two full pieces and part of a third.
    let part = 600_000;
    let full = Host::new(ElementType::F32, values_f32(rank, 2 * part));
    let shard = Host::new(ElementType::F32, vec![0.0_f32; part]);
    sum_across(&*shards, call("across", 0), &*replicas, (&full.memory, &shard.memory))?;
    let own = rank % 2 * part..(rank % 2 + 1) * part;
    let wanted: Vec<f32> = own.map(|i| sum_f32(6, i)).collect();
    assert_eq!(bits(&shard.read()), bits(&wanted));
    let narrow = |rank, i| bf16::from_f32(value(rank, i));
    let full = Host::new(ElementType::Bf16, (0..1000).map(|i| narrow(rank, i)).collect());
    let shard = Host::new(ElementType::Bf16, vec![bf16::ZERO; 500]);
    sum_across(&*shards, call("across", 1), &*replicas, (&full.memory, &shard.memory))?;
    let wide = |i| (0..6).map(|rank| narrow(rank, i).to_f32()).reduce(|sum, next| sum + next).unwrap();
    let own = rank % 2 * 500..(rank % 2 + 1) * 500;
    assert_eq!(shard.read(), own.map(|i| bf16::from_f32(wide(i))).collect::<Vec<_>>());
    Ok(())
}

/// Rank 2 returns an error while the others wait for it.
fn error(world: &MpiCommunicator) -> Result<(), Error> {
    world.barrier(call("start", 0))?;
    world.enter(if world.rank() == 2 { Phase::Norm } else { Phase::Backward })?;
    if world.rank() == 2 {
        return Err(Error::new(ErrorCategory::Transient, "not a number"));
    }
    world.barrier(call("end", 0))
}

/// Rank 1 panics while the others wait for it.
fn panic(world: &MpiCommunicator) -> Result<(), Error> {
    world.barrier(call("start", 0))?;
    world.enter(Phase::Backward)?;
    assert!(world.rank() != 1, "index out of everything");
    world.barrier(call("end", 0))
}

/// Rank 1 reduces one element more, after a matching call.
fn mismatch(world: &MpiCommunicator) -> Result<(), Error> {
    world.barrier(call("start", 0))?;
    world.enter(if world.rank() == 1 { Phase::Norm } else { Phase::Backward })?;
    let buffer = Host::new(ElementType::F32, vec![1.0_f32; if world.rank() == 1 { 11 } else { 10 }]);
    let result = world.all_reduce(call("gradients", 7), &buffer.memory);
    assert_eq!(buffer.read()[0], 1.0, "nothing is added to");
    let again = world.barrier(call("after", 0)).unwrap_err();
    assert_eq!(again.to_string(), result.as_ref().unwrap_err().to_string(), "the first error stays");
    result
}

/// The receiver expects one element more in the second message from rank 0 to rank 2; rank 1 waits
/// for both.
fn longer_message(world: &MpiCommunicator) -> Result<(), Error> {
    world.enter(Phase::Forward)?;
    let [shorter, longer] = [10, 11].map(|n| Host::new(ElementType::F32, vec![1.0_f32; n]));
    match world.rank() {
        0 => {
            world.send(call("activations", 6), 2, &shorter.memory)?;
            world.send(call("activations", 7), 2, &shorter.memory)
        }
        2 => {
            world.recv(call("activations", 6), 0, &shorter.memory)?;
            world.recv(call("activations", 7), 0, &longer.memory)
        }
        _ => world.barrier(call("end", 0)),
    }
}

/// Rank 2 fails while rank 0 waits for its message and rank 1 waits to send to it.
fn failed_sender(world: &MpiCommunicator) -> Result<(), Error> {
    let group = world.split(0)?;
    let buffer = Host::new(ElementType::F32, vec![1.0_f32; 10]);
    match world.rank() {
        0 => group.recv(call("activations", 0), 2, &buffer.memory),
        1 => group.send(call("activations", 0), 2, &buffer.memory),
        2 => {
            world.enter(Phase::Save)?;
            world.abort("no space left");
            world.barrier(call("end", 0))
        }
        _ => world.barrier(call("end", 0)),
    }
}

/// Rank 1 sends nothing.
fn late_message(world: &MpiCommunicator) -> Result<(), Error> {
    if world.rank() == 1 {
        return Ok(());
    }
    let buffer = Host::new(ElementType::F32, vec![1.0_f32; 3]);
    world.recv(call("activations", 0), 1, &buffer.memory)
}

/// Rank 2 fails while the others wait for it, one or two of them in other groups.
fn failure(world: &MpiCommunicator) -> Result<(), Error> {
    let group = world.split(world.rank() / 2)?;
    if world.rank() == 2 {
        world.enter(Phase::Save)?;
        group.abort("no space left");
        group.abort("said twice");
        return world.barrier(call("end", 0));
    }
    if world.rank() % 2 == 1 {
        // Never matched: rank 0 waits in the world, and 2 has failed.
        return group.barrier(call("group", 0));
    }
    world.barrier(call("end", 0))
}

/// Rank 1 is missing.
fn late(world: &MpiCommunicator) -> Result<(), Error> {
    if world.rank() == 1 {
        return Ok(());
    }
    world.barrier(call("start", 0))
}

/// Rank 0's second thread reports a failure while the rank waits for ranks that wait for it in
/// another group.
fn another_thread(world: &MpiCommunicator) -> Result<(), Error> {
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
