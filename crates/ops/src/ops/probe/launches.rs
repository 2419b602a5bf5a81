//! The launches of the probe, and the instructions that each of them runs.

use candle_core::{DType, Tensor};
use half::bf16;

use super::inputs::{self, LANES};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels};
use crate::error::Result;

/// The agreement that a word must have with the recorded one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    /// The same bits.
    Bits,
    /// The same f32 number, or NaN with any bits for a recorded NaN.
    Number,
    /// Like `Number`, with up to this many units in the last place of difference.
    Ulps(u32),
}

/// An instruction of the probe.
#[derive(Debug, Clone)]
pub(crate) struct ProbeInstruction {
    /// The name in `kernels/compat.cuh`, and the input.
    pub(crate) name: String,
    /// Number of words that it leaves in each thread.
    pub(crate) registers: usize,
    /// Number of threads that run it.
    pub(crate) threads: usize,
    /// The agreement required with the recorded words.
    pub(crate) agreement: Agreement,
}

/// Launches a kernel that reads u32 words and writes u32 words.
type RunKernel = Box<dyn Fn(&dyn Driver, LaunchShape, &Tensor, &Tensor) -> Result<()>>;

/// A kernel that has no other parameters than these words.
type WordsKernel = fn(&dyn Driver, LaunchShape, In<'_, u32>, Out<'_, u32>) -> Result<()>;

/// A kernel of the probe and its inputs.
pub(super) struct ProbeLaunch {
    run: RunKernel,
    shape: LaunchShape,
    words: Vec<u32>,
    pub(super) instructions: Vec<ProbeInstruction>,
}

impl ProbeLaunch {
    /// Creates a launch of one warp.
    fn new(run: RunKernel, words: Vec<u32>, instructions: Vec<ProbeInstruction>) -> Self {
        ProbeLaunch { run, shape: LaunchShape::line(1, LANES as u32), words, instructions }
    }

    /// Creates a launch of one warp of a kernel that has only words.
    fn of_words(kernel: WordsKernel, words: Vec<u32>, instructions: Vec<ProbeInstruction>) -> Self {
        let run =
            move |driver: &dyn Driver, shape: LaunchShape, words: &Tensor, out: &Tensor| -> Result<()> {
                kernel(driver, shape, In::all(words)?, Out::all(out)?)
            };
        Self::new(Box::new(run), words, instructions)
    }

    /// Returns the results of the instructions, one after another, each as the registers of thread
    /// 0, of thread 1, and so on.
    pub(super) fn results(&self, driver: &dyn Driver, device: &candle_core::Device) -> Result<Vec<u32>> {
        let count: usize = self.instructions.iter().map(|one| one.registers * one.threads).sum();
        let words = Tensor::from_slice(&self.words, self.words.len(), device)?;
        let out = Tensor::zeros(count, DType::U32, device)?;
        (self.run)(driver, self.shape, &words, &out)?;
        Ok(out.to_vec1()?)
    }
}

/// Returns all launches, in the order of a dump.
pub(super) fn launches() -> Vec<ProbeLaunch> {
    let mut all = vec![mma(), ldmatrix(), copies(), memory(), shuffles(), block_sum()];
    all.extend([conversions(), arithmetic(), functions()]);
    all
}

/// Returns instructions of one warp with the same agreement, by name and number of registers.
fn of_warp(agreement: Agreement, list: &[(&str, usize)]) -> Vec<ProbeInstruction> {
    let one = |&(name, registers): &(&str, usize)| ProbeInstruction {
        name: name.to_owned(),
        registers,
        threads: LANES,
        agreement,
    };
    list.iter().map(one).collect()
}

fn mma() -> ProbeLaunch {
    let names = inputs::MMA_CASES
        .iter()
        .flat_map(|case| ["mma_16816", "mma_16816_first"].map(|name| format!("{name}, {}", case.name)));
    let instructions =
        names.flat_map(|name| of_warp(Agreement::Number, &[(name.as_str(), 4)])).collect::<Vec<_>>();
    let shape = LaunchShape::line(inputs::MMA_CASES.len(), LANES as u32);
    ProbeLaunch { shape, ..ProbeLaunch::of_words(kernels::probe_mma, inputs::mma(), instructions) }
}

fn ldmatrix() -> ProbeLaunch {
    let list = [("ldmatrix_x4", 4), ("ldmatrix_x4_transposed", 4)];
    let mut launch =
        ProbeLaunch::of_words(kernels::probe_ldmatrix, inputs::ldmatrix(), of_warp(Agreement::Bits, &list));
    // 32 rows of 16 bytes.
    launch.shape.shared_bytes = 512;
    launch
}

fn copies() -> ProbeLaunch {
    let list = [("copy_async16 after copy_async_wait<1>", 4), ("copy_async4 by the neighbour", 1)];
    ProbeLaunch::of_words(kernels::probe_copies, inputs::copies(), of_warp(Agreement::Bits, &list))
}

fn memory() -> ProbeLaunch {
    let run = |driver: &dyn Driver, shape: LaunchShape, words: &Tensor, out: &Tensor| -> Result<()> {
        let device = words.device();
        let halves: Vec<bf16> = (0..8 * LANES).map(|i| bf16::from_bits(inputs::half_value(i))).collect();
        let halves = Tensor::from_vec(halves, 8 * LANES, device)?;
        let scratch = Tensor::zeros(8 * LANES, DType::U32, device)?;
        let listed: Vec<u32> = (0..LANES).map(inputs::listed_word).collect();
        let listed = Tensor::from_vec(listed, LANES, device)?;
        let address = In::<u32>::all(words)?.arg().value;
        let address_listed = InOut::<u32>::all(&listed)?.arg().value;
        let (halves, scratch) = (In::all(&halves)?, InOut::all(&scratch)?);
        let words = In::all(words)?;
        kernels::probe_memory(driver, shape, words, halves, scratch, address, address_listed, Out::all(out)?)
    };
    let list = [
        ("In.load", 1),
        ("In.load4", 1),
        ("In.load8", 2),
        ("In.load16", 4),
        ("In.offset", 1),
        ("In.load of bf16", 1),
        ("In.load4 of bf16", 1),
        ("In.load8 of bf16", 2),
        ("In.load16 of bf16", 4),
        ("in_at", 1),
        ("Out.store16", 4),
        ("Out.store8", 2),
        ("Out.store4", 1),
        ("in_out_at", 1),
        ("InOut.store16", 4),
        ("InOut.store8", 2),
        ("InOut.store4", 1),
        ("InOut.as", 4),
        ("InOut.store", 1),
        ("Shared.store", 1),
    ];
    ProbeLaunch::new(Box::new(run), inputs::memory(), of_warp(Agreement::Bits, &list))
}

fn shuffles() -> ProbeLaunch {
    let list = [
        ("shuffle", 1),
        ("shuffle of f32", 1),
        ("shuffle_xor", 5),
        ("shuffle_xor of f32", 5),
        ("warp_sum", 1),
        ("warp_max", 1),
    ];
    ProbeLaunch::of_words(kernels::probe_shuffles, inputs::shuffles(), of_warp(Agreement::Bits, &list))
}

fn block_sum() -> ProbeLaunch {
    let threads = 4 * LANES;
    let instruction =
        ProbeInstruction { name: "block_sum".to_owned(), registers: 1, threads, agreement: Agreement::Bits };
    let shape = LaunchShape::line(1, threads as u32);
    let launch = ProbeLaunch::of_words(kernels::probe_block_sum, inputs::block_sum(), vec![instruction]);
    ProbeLaunch { shape, ..launch }
}

fn conversions() -> ProbeLaunch {
    let list = [
        ("round_to_bf16", 1),
        ("nearest<bf16>", 1),
        ("low_half", 1),
        ("high_half", 1),
        ("widen", 1),
        ("u32 to f32", 1),
        ("i32 to f32", 1),
    ];
    ProbeLaunch::of_words(kernels::probe_conversions, inputs::conversions(), of_warp(Agreement::Bits, &list))
}

fn arithmetic() -> ProbeLaunch {
    let of_f32 = [
        ("fmaf", 1),
        ("product and sum", 1),
        ("quotient", 1),
        ("sqrtf", 1),
        ("1 / sqrtf", 1),
        ("fmaxf", 1),
        ("ceilf", 1),
        ("f64 to f32", 1),
    ];
    let of_f64 = [("quotient of f64", 2), ("product and sum of f64", 2), ("sqrt of f64", 2)];
    let mut instructions = of_warp(Agreement::Number, &of_f32);
    instructions.extend(of_warp(Agreement::Bits, &of_f64));
    ProbeLaunch::of_words(kernels::probe_arithmetic, inputs::arithmetic(), instructions)
}

/// Permits the largest error from the correctly rounded result, in units in the last place: for
/// ex2.approx.ftz.f32 and rcp.approx.ftz.f32 from the PTX ISA (9.7.3.21, 9.7.3.13), for the others
/// from the CUDA C++ Programming Guide's table of single-precision functions (appendix
/// "Mathematical Functions"). That of ex2 is relative, 2^-22.5: 2.83 units just below a power of 2.
fn functions() -> ProbeLaunch {
    let list =
        [("fast_exp2", 3), ("fast_reciprocal", 1), ("rsqrtf", 2), ("expf", 2), ("logf", 1), ("tanhf", 2)];
    let instructions = list.iter().flat_map(|&(name, ulps)| of_warp(Agreement::Ulps(ulps), &[(name, 1)]));
    ProbeLaunch::of_words(kernels::probe_functions, inputs::functions(), instructions.collect())
}
