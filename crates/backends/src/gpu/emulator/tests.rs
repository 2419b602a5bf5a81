//! The emulator names the fault of a kernel, and accepts a correct kernel.

use candle_core::{DType, Device, Tensor};

use super::{Emulator, EmulatorSchedule, Order};
use crate::column_view::{Addend, ColumnView, ColumnViewMut, Transpose};
use crate::error::Result;
use crate::gpu::{Driver, Gemm, In, InOut, LaunchShape, Out, kernels};
use crate::runtime::TensorMut;
use crate::runtime::planned_failure::PlannedFailure;

type Fault = fn(&dyn Driver, LaunchShape, In<'_, f32>, Out<'_, f32>) -> Result<()>;

const SCHEDULES: [EmulatorSchedule; 3] = [
    EmulatorSchedule { order: Order::Forward, late_copies: false, counts: false },
    EmulatorSchedule { order: Order::Reverse, late_copies: true, counts: true },
    EmulatorSchedule { order: Order::Shuffled(3), late_copies: true, counts: false },
];

fn tensors() -> Result<[Tensor; 2]> {
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    Ok([Tensor::from_vec(x, 64, &Device::Cpu)?, Tensor::zeros(64, DType::F32, &Device::Cpu)?])
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
    let faults: [(Fault, u32, &str); 12] = [
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
        (kernels::fault_pending, 32, "ends while 1 of its copy_async are pending"),
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

/// A driver out of memory gets more, and runs a launch or a product again.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plan failures")]
fn without_memory_launches_and_products_run_once_more() -> Result<()> {
    let [x, y] = tensors()?;
    let launch = || kernels::fault_none(&Emulator, LaunchShape::line(2, 32), In::all(&x)?, Out::all(&y)?);
    PlannedFailure::Module.plan();
    Emulator::run(EmulatorSchedule::default(), launch).0?;
    assert_eq!(y.to_vec1::<f32>()?[..2], [1.0, 0.0]);
    assert!(!PlannedFailure::Module.strikes(), "a launch asks for the plan");
    let (a, dst) = (x.reshape((8, 8))?, TensorMut::zeros((8, 8), DType::F32, &Device::Cpu)?);
    let all = ColumnView::all(&a);
    let gemm = Gemm::new(&ColumnViewMut::all(&dst), &all, &all, Transpose::Nn, 1.0, Addend::Nothing)?;
    let product = || gemm.map_or(Ok(()), |gemm| Emulator.gemm(&gemm));
    PlannedFailure::Product.plan();
    Emulator::run(EmulatorSchedule::default(), product).0?;
    // The sum of i · 8i for i of 0 to 7.
    assert_eq!(dst.to_vec2::<f32>()?[0][0], 1120.0);
    assert!(!PlannedFailure::Product.strikes(), "a product asks for the plan");
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
