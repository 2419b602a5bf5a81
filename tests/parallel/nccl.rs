//! The NCCL backend on a real GPU: two ranks as processes that share it over the loopback
//! interface. **Not yet run.**
//!
//! `cargo test --features cuda --test nccl`; without a GPU or the library (`FINETUNE_NCCL_LIB`) it
//! prints that it is skipped. It checks values and the end after failures. NVIDIA does not support
//! such sharing, and it is slow.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stderr, reason = "a test without harness says what it does")]

use std::any::Any;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use finetune::collective::nccl::{
    AbortFlag, Cuda, Nccl, NcclLibrary, NcclRankInfo, UniqueId, one_gpu_environment,
};
use finetune::collective::{Call, Collective, Phase, Reduction};
use finetune::error::Result;
use finetune::runtime::buffer::{Buffer, ElementType};
use finetune::runtime::device;

const RANKS: usize = 2;
const SCENE: &str = "FINETUNE_NCCL_SCENE";
const RANK: &str = "FINETUNE_NCCL_RANK";
const FOLDER: &str = "FINETUNE_NCCL_FOLDER";
const LIMIT: Duration = Duration::from_secs(180);

type Scene = fn(&Nccl<Cuda>, &Arc<CudaStream>) -> Result<()>;

/// A scene's work for each rank, and part of the error that each rank gets.
const SCENES: [(&str, Scene, [&str; RANKS]); 3] = [
    ("values", values, ["", ""]),
    (
        "mismatch",
        mismatch,
        [
            "rank 1 makes call 0: all-reduce of gradients of block 1 (8 x F32), in phase backward",
            "rank 0 makes call 0: all-reduce of gradients of block 0 (8 x F32), in phase backward",
        ],
    ),
    ("failure", failure, ["another rank stopped", "rank 1 failed"]),
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(SCENE) {
        rank(&name);
        return ExitCode::SUCCESS;
    }
    // A machine without driver gives an error instead of an empty list.
    match device::gpus() {
        Ok(gpus) if !gpus.is_empty() => {}
        gpus => {
            let why = gpus.map_or_else(|error| error.in_one_line(), |_| "no NVIDIA GPU here".to_owned());
            eprintln!("SKIPPED tests of ranks over NCCL: {why}");
            return ExitCode::SUCCESS;
        }
    }
    if let Err(error) = NcclLibrary::open() {
        eprintln!("SKIPPED tests of ranks over NCCL: {error}");
        return ExitCode::SUCCESS;
    }
    let failures = SCENES.iter().filter(|(name, _, errors)| match launch(name, errors) {
        Ok(()) => {
            eprintln!("nccl: {name} ok");
            false
        }
        Err(why) => {
            eprintln!("nccl: {name} FAILED: {why}");
            true
        }
    });
    if failures.count() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn launch(name: &str, errors: &[&str; RANKS]) -> std::result::Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.envs(one_gpu_environment(rank)).env("NCCL_DEBUG", "WARN");
        command.env(SCENE, name).env(RANK, rank.to_string()).env(FOLDER, folder.path());
        command.spawn().unwrap()
    };
    let mut ranks: Vec<Child> = (0..RANKS).map(start).collect();
    let begin = Instant::now();
    while begin.elapsed() < LIMIT && ranks.iter_mut().any(|rank| rank.try_wait().unwrap().is_none()) {
        std::thread::sleep(Duration::from_millis(50));
    }
    for rank in &mut ranks {
        // The process may have ended.
        let _ = rank.kill();
        let _ = rank.wait();
    }
    for (rank, error) in errors.iter().enumerate() {
        let report = std::fs::read_to_string(folder.path().join(format!("rank-{rank}")))
            .map_err(|_| format!("rank {rank} left nothing within {} s", LIMIT.as_secs()))?;
        let right = if error.is_empty() { report == "done" } else { report.contains(error) };
        if !right {
            return Err(format!("rank {rank}: {report}, not `{error}`"));
        }
    }
    Ok(())
}

fn rank(name: &str) {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let rank: usize = std::env::var(RANK).unwrap().parse().unwrap();
    let library = NcclLibrary::open().unwrap();
    let device = CudaDevice::new_with_stream(0).unwrap();
    // SAFETY: before the first allocation; events order the streams.
    unsafe { device.disable_event_tracking() };
    let id = if rank == 0 {
        let id = library.unique_id().unwrap();
        std::fs::write(folder.join("new"), id.0).unwrap();
        std::fs::rename(folder.join("new"), folder.join("id")).unwrap();
        id
    } else {
        let begin = Instant::now();
        while begin.elapsed() < LIMIT && !folder.join("id").exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        UniqueId(std::fs::read(folder.join("id")).unwrap().try_into().unwrap())
    };
    let rank_info = NcclRankInfo { id, rank, size: RANKS, deadline: Duration::from_secs(60) };
    let cuda = Cuda::new(&device).unwrap();
    let nccl = Nccl::connect(&library, &rank_info, cuda, &AbortFlag::new()).unwrap();
    let (_, scene, _) = SCENES.iter().find(|(scene, ..)| *scene == name).unwrap();
    let result = scene(&nccl, &device.cuda_stream());
    let text = result.map_or_else(|error| error.to_string(), |()| "done".to_owned());
    std::fs::write(folder.join(format!("rank-{rank}")), text).unwrap();
}

const fn call(what: &'static str, index: usize) -> Call {
    Call { what, index }
}

/// A vector on the GPU.
struct Values<T> {
    slice: Arc<CudaSlice<T>>,
    memory: Buffer,
}

impl<T: DeviceRepr + Clone + Default + Send + Sync + 'static> Values<T> {
    fn new(stream: &Arc<CudaStream>, element: ElementType, values: &[T]) -> Self {
        let slice = Arc::new(stream.clone_htod(values).unwrap());
        let address = slice.device_ptr(stream).0 as usize;
        let owner: Arc<dyn Any + Send + Sync> = Arc::clone(&slice) as _;
        // SAFETY: the owner keeps the slice, which is read on the compute stream only.
        let memory = unsafe { Buffer::on_gpu(address, values.len(), element, owner) };
        Values { slice, memory }
    }

    fn read(&self, stream: &Arc<CudaStream>) -> Vec<T> {
        stream.clone_dtoh(&*self.slice).unwrap()
    }
}

fn values(nccl: &Nccl<Cuda>, stream: &Arc<CudaStream>) -> Result<()> {
    let rank = nccl.rank();
    let own = rank as f32 + 1.0;
    let sum = Values::new(stream, ElementType::F32, &vec![own; 100_003]);
    nccl.all_reduce(call("gradients", 0), &sum.memory)?;
    assert_eq!(sum.read(stream), vec![3.0; 100_003]);
    let loss = Values::new(stream, ElementType::F64, &[0.25, 0.5 * f64::from(own)]);
    nccl.all_reduce(call("loss", 0), &loss.memory)?;
    assert_eq!(loss.read(stream), [0.5, 1.5]);

    let mut norms = [0.5, f64::from(own)];
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
    // SAFETY: the values outlive the call.
    let host = unsafe { Buffer::new(norms.as_mut_ptr() as usize, 2, ElementType::F64, owner) };
    nccl.all_reduce(call("norms", 0), &host)?;
    assert_eq!(norms, [1.0, 3.0], "memory of the host");

    let full = Values::new(stream, ElementType::F32, &[own, own, 2.0 * own, 2.0 * own]);
    let shard = Values::new(stream, ElementType::F32, &[0.0_f32; 2]);
    nccl.reduce_scatter(call("gradients", 1), &full.memory, &shard.memory)?;
    assert_eq!(shard.read(stream), [3.0 * own; 2]);

    // Runs beside a gather, with its own stream and communicator.
    assert!(nccl.open_reduction_stream()?);
    let gradients = Values::new(stream, ElementType::F32, &vec![own; 200_006]);
    let summed = Values::new(stream, ElementType::F32, &vec![0.0_f32; 100_003]);
    let part = Values::new(stream, ElementType::F32, &vec![own; 100_003]);
    let whole = Values::new(stream, ElementType::F32, &vec![0.0_f32; 200_006]);
    let gather = nccl.start_all_gather(call("values", 2), &part.memory, &whole.memory)?;
    let reduction =
        Reduction::ReduceScatter { full: &gradients.memory, shard: &summed.memory, replicas: None };
    let started = nccl.start_reduction(call("gradients", 2), reduction)?;
    nccl.finish(gather)?;
    nccl.finish(started.expect("it goes on"))?;
    assert_eq!(summed.read(stream), vec![3.0; 100_003]);
    assert_eq!(whole.read(stream), [vec![1.0; 100_003], vec![2.0; 100_003]].concat());

    let codes = Values::new(stream, ElementType::U8, &vec![rank as u8 + 1; 70_001]);
    let all = Values::new(stream, ElementType::U8, &vec![0_u8; 140_002]);
    let ticket = nccl.start_all_gather(call("codes", 0), &codes.memory, &all.memory)?;
    nccl.finish(ticket)?;
    assert_eq!(all.read(stream), [vec![1_u8; 70_001], vec![2; 70_001]].concat());
    nccl.broadcast(call("codes", 1), 1, &codes.memory)?;
    assert_eq!(codes.read(stream), vec![2; 70_001]);
    let message = Values::new(stream, ElementType::F32, &vec![own; 100_003]);
    if rank == 0 {
        nccl.send(call("message", 0), 1, &message.memory)?;
    } else {
        nccl.recv(call("message", 0), 0, &message.memory)?;
    }
    assert_eq!(message.read(stream), vec![1.0; 100_003]);

    let alone = nccl.split(rank)?;
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    alone.all_reduce(call("alone", 0), &shard.memory)?;
    assert_eq!(shard.read(stream), [3.0 * own; 2]);
    nccl.barrier(call("end", 0))
}

fn mismatch(nccl: &Nccl<Cuda>, stream: &Arc<CudaStream>) -> Result<()> {
    nccl.enter(Phase::Backward)?;
    let sum = Values::new(stream, ElementType::F32, &[1.0_f32; 8]);
    nccl.all_reduce(call("gradients of block", nccl.rank()), &sum.memory)?;
    nccl.barrier(call("end", 0))
}

fn failure(nccl: &Nccl<Cuda>, _: &Arc<CudaStream>) -> Result<()> {
    nccl.barrier(call("start", 0))?;
    if nccl.rank() == 1 {
        nccl.abort("no space left");
    }
    nccl.barrier(call("end", 0))
}
