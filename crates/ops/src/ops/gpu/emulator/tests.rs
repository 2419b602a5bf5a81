//! The emulator names the fault of a kernel, and accepts a correct kernel.

use candle_core::{Device, Tensor};

use super::{Emulator, EmulatorSchedule, Order};
use crate::error::Result;
use crate::ops::gpu::{Driver, In, InOut, LaunchShape, Out, kernels};

type Fault = fn(&dyn Driver, LaunchShape, In<'_, f32>, Out<'_, f32>) -> Result<()>;

const SCHEDULES: [EmulatorSchedule; 3] = [
    EmulatorSchedule { order: Order::Forward, late_copies: false, counts: false },
    EmulatorSchedule { order: Order::Reverse, late_copies: true, counts: true },
    EmulatorSchedule { order: Order::Shuffled(3), late_copies: true, counts: false },
];

fn tensors() -> Result<[Tensor; 2]> {
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    Ok([Tensor::from_vec(x, 64, &Device::Cpu)?, Tensor::zeros(64, candle_core::DType::F32, &Device::Cpu)?])
}

/// Returns the error texts of `fault`, in 64 threads in blocks of `threads`, under each schedule.
fn refusals(fault: Fault, threads: u32) -> Result<Vec<String>> {
    let shape = LaunchShape::line(64 / threads as usize, threads);
    SCHEDULES
        .iter()
        .map(|&schedule| {
            let [x, y] = tensors()?;
            let (result, _) =
                Emulator::run(schedule, || fault(&Emulator, shape, In::all(&x)?, Out::all(&y)?));
            Ok(result.err().map_or(String::new(), |error| format!("{error:?}")))
        })
        .collect()
}

#[test]
fn a_right_kernel_passes() -> Result<()> {
    for schedule in SCHEDULES {
        let [x, y] = tensors()?;
        let shape = LaunchShape::line(2, 32);
        Emulator::run(schedule, || kernels::fault_none(&Emulator, shape, In::all(&x)?, Out::all(&y)?)).0?;
        let wanted: Vec<f32> = (0..64).map(|i| (i ^ 1) as f32).collect();
        assert_eq!(y.to_vec1::<f32>()?, wanted);
    }
    Ok(())
}

#[test]
fn faults_are_named() -> Result<()> {
    let faults: [(Fault, u32, &str); 11] = [
        (kernels::fault_bounds, 32, "a read of 4 bytes at byte 256 of argument 0"),
        (kernels::fault_alignment, 32, "a read of 16 bytes of argument 0 is not aligned"),
        (kernels::fault_twice, 32, "a second time"),
        (kernels::fault_unwritten, 32, "byte 28 of argument 1, an Out, was not written"),
        (kernels::fault_race, 64, "reads shared memory"),
        (kernels::fault_overwrite, 32, "race: "),
        (kernels::fault_unset, 32, "reads shared memory that nothing wrote"),
        (kernels::fault_barrier, 32, "barrier"),
        (kernels::fault_divergence, 32, "shuffle"),
        (kernels::fault_copy, 64, "reads shared memory"),
        (kernels::fault_shared_bounds, 32, "behind the end of an array"),
    ];
    for (i, (fault, threads, text)) in faults.into_iter().enumerate() {
        for refusal in refusals(fault, threads)? {
            assert!(refusal.contains(text), "fault {i}: wanted `{text}`, found: {refusal}");
        }
    }
    Ok(())
}

#[test]
fn what_another_block_writes_may_not_be_read() -> Result<()> {
    let [x, y] = tensors()?;
    let (result, _) = Emulator::run(EmulatorSchedule::default(), || {
        kernels::fault_blocks(&Emulator, LaunchShape::line(2, 32), InOut::all(&x)?, Out::all(&y)?)
    });
    let refusal = format!("{:?}", result.err());
    assert!(refusal.contains("race: reads byte"), "{refusal}");
    Ok(())
}

/// A grid without blocks is an error in CUDA, so nothing is launched; a block consists of warps of
/// 32.
#[test]
fn launches_of_nothing_and_of_half_a_warp() -> Result<()> {
    let [x, y] = tensors()?;
    let launch = |shape| {
        Emulator::run(EmulatorSchedule::default(), || {
            kernels::fault_bounds(&Emulator, shape, In::all(&x)?, Out::all(&y)?)
        })
        .0
    };
    assert!(launch(LaunchShape::line(0, 32)).is_ok());
    let refusal = format!("{:?}", launch(LaunchShape::line(1, 48)).err());
    assert!(refusal.contains("a block of 48 threads"), "{refusal}");
    Ok(())
}

/// An argument of another type does not compile; a tensor of another type is refused before the
/// launch.
#[test]
fn a_tensor_of_another_type_is_refused() -> Result<()> {
    let [x, _] = tensors()?;
    let refusal = format!("{:?}", In::<half::bf16>::all(&x).err());
    assert!(refusal.contains("wanted BF16"), "{refusal}");
    Ok(())
}
