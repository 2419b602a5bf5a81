//! What multiplies operands that are packed, or rows where they lie: one kernel for each set of instructions, chosen once for a product.

use super::f32_kernel;
use super::register_sums::{self, RegisterSums};
use super::tile::{PackedFormat, RowsInMemory, SQUARE, STEP, Strip};
use std::cell::Cell;

#[cfg(target_arch = "x86_64")]
use super::{amx, avx512_bf16};
use crate::instruction_set::InstructionSet;
use crate::ops::mat_view::{GemmMatrix, OperandRole};

/// A kernel, with what it takes of operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MicroKernel {
    /// The matrix unit, of operands that are bf16 or rounded to it.
    #[cfg(target_arch = "x86_64")]
    AmxBf16,
    /// The matrix unit, of f32 in three parts that are bf16 each.
    #[cfg(target_arch = "x86_64")]
    AmxF32,
    /// Pairs of bf16 at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// What the matrix unit does with its operands, all of their padding included, by the instructions of
    /// [`MicroKernel::Avx512Bf16`]: tests of packing for it where there is none.
    #[cfg(all(test, target_arch = "x86_64"))]
    AmxByAvx512 { may_round: bool },
    /// Sixteen f32 numbers at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Eight f32 numbers at a time.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Loops over f32 numbers that the compiler vectorizes.
    Baseline,
}

impl MicroKernel {
    /// The kernel for a product whose operands may be rounded to bf16, or for one whose may not.
    pub(crate) fn of(set: InstructionSet, may_round: bool) -> Self {
        #[cfg(target_arch = "x86_64")]
        match (set, may_round) {
            (InstructionSet::Amx, true) => return MicroKernel::AmxBf16,
            (InstructionSet::Amx, false) => return MicroKernel::AmxF32,
            (InstructionSet::Avx512Bf16, true) => return MicroKernel::Avx512Bf16,
            (InstructionSet::Avx512Bf16 | InstructionSet::Avx512, _) => return MicroKernel::Avx512,
            (InstructionSet::Avx2, _) => return MicroKernel::Avx2,
            (InstructionSet::Baseline, _) => {}
        }
        let _ = (set, may_round);
        MicroKernel::Baseline
    }

    /// Whether operands are packed as f32.
    pub(super) fn takes_f32(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            MicroKernel::AmxBf16 | MicroKernel::AmxF32 | MicroKernel::Avx512Bf16 => false,
            #[cfg(all(test, target_arch = "x86_64"))]
            MicroKernel::AmxByAvx512 { .. } => false,
            _ => true,
        }
    }

    /// Whether products with fewer rows, columns or inner elements than a block are for it, too.
    pub(super) fn takes_thin(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return !matches!(self, MicroKernel::AmxF32 | MicroKernel::Avx512);
        #[cfg(not(target_arch = "x86_64"))]
        true
    }

    /// How an operand is laid out for it.
    pub(super) fn format(self, of: &impl GemmMatrix, role: OperandRole) -> PackedFormat {
        if self.takes_f32() {
            let by_rows = role == OperandRole::Left && !of.is_transposed();
            return if by_rows { PackedFormat::F32Rows } else { PackedFormat::F32 };
        }
        if self.splits_f32() && !of.is_bf16() { PackedFormat::Bf16Parts } else { PackedFormat::Bf16 }
    }

    /// Whether it takes f32 in three parts that are bf16.
    pub(super) fn splits_f32(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            MicroKernel::AmxF32 => true,
            #[cfg(all(test, target_arch = "x86_64"))]
            MicroKernel::AmxByAvx512 { may_round } => !may_round,
            _ => false,
        }
    }

    /// Whether it multiplies rows of bf16 as they lie in memory.
    pub(super) fn takes_rows(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == MicroKernel::Avx512Bf16;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Products of parts that make a product.
    pub(super) fn passes(self) -> usize {
        if self.splits_f32() { 6 } else { 1 }
    }

    /// The instructions of the kernel and of what stands around it.
    pub(super) fn set(self) -> InstructionSet {
        match self {
            #[cfg(target_arch = "x86_64")]
            MicroKernel::AmxBf16 | MicroKernel::AmxF32 => InstructionSet::Amx,
            #[cfg(target_arch = "x86_64")]
            MicroKernel::Avx512Bf16 => InstructionSet::Avx512Bf16,
            #[cfg(all(test, target_arch = "x86_64"))]
            MicroKernel::AmxByAvx512 { .. } => InstructionSet::Avx512Bf16,
            #[cfg(target_arch = "x86_64")]
            MicroKernel::Avx512 => InstructionSet::Avx512,
            #[cfg(target_arch = "x86_64")]
            MicroKernel::Avx2 => InstructionSet::Avx2,
            MicroKernel::Baseline => InstructionSet::Baseline,
        }
    }

    /// Sets the kernel up on this thread until the result is dropped. One at a time on a thread.
    ///
    /// # Panics
    /// The processor lacks the instructions; another kernel is set up on this thread.
    pub(crate) fn open(self) -> OpenKernel {
        assert!(self.set() <= InstructionSet::detected(), "{self:?} on a processor without its instructions");
        // The matrix unit's registers would be taken from the first when the second is dropped.
        assert!(!IS_OPEN.replace(true), "two kernels at a time on one thread");
        OpenKernel {
            kernel: self,
            #[cfg(target_arch = "x86_64")]
            registers: (self.set() == InstructionSet::Amx).then(amx::TileRegisters::configure),
        }
    }
}

thread_local! {
    /// Whether a kernel is set up on this thread.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// A kernel that is set up on one thread.
pub(crate) struct OpenKernel {
    kernel: MicroKernel,
    #[cfg(target_arch = "x86_64")]
    registers: Option<amx::TileRegisters>,
}

impl Drop for OpenKernel {
    fn drop(&mut self) {
        IS_OPEN.set(false);
    }
}

impl OpenKernel {
    /// `dst = [dst +] left · right` for the rows of `left` and the columns of `right`, `stride` elements from row to row; other sums
    /// of the 32 × 32 may change. The products of an element are added in the order of its inner elements; where operands are
    /// in parts, the smallest products of a step first.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_unsafe))]
    pub(super) fn multiply(
        &self,
        left: &Strip<'_>,
        right: &Strip<'_>,
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        assert!(left.steps() > 0 && left.steps() == right.steps() && left.inner == right.inner);
        assert!(left.inner.div_ceil(STEP) == left.steps() && left.outer.max(right.outer) <= SQUARE);
        assert!(stride >= SQUARE && dst.len() >= (SQUARE - 1) * stride + SQUARE);
        // SAFETY: `open` asserted that the instructions are there.
        unsafe {
            match self.kernel {
                #[cfg(target_arch = "x86_64")]
                MicroKernel::AmxBf16 | MicroKernel::AmxF32 => {
                    let registers = self.registers.as_ref().expect("configured for these kernels");
                    registers.multiply(left, right, dst, stride, accumulate);
                }
                #[cfg(target_arch = "x86_64")]
                MicroKernel::Avx512Bf16 => avx512_bf16::multiply(left, right, dst, stride, accumulate),
                #[cfg(all(test, target_arch = "x86_64"))]
                MicroKernel::AmxByAvx512 { .. } => {
                    avx512_bf16::multiply(&left.whole(), &right.whole(), dst, stride, accumulate);
                }
                #[cfg(target_arch = "x86_64")]
                MicroKernel::Avx512 => f32_kernel::multiply_avx512(left, right, dst, stride, accumulate),
                #[cfg(target_arch = "x86_64")]
                MicroKernel::Avx2 => f32_kernel::multiply_avx2(left, right, dst, stride, accumulate),
                MicroKernel::Baseline => f32_kernel::multiply_baseline(left, right, dst, stride, accumulate),
            }
        }
    }

    /// As [`OpenKernel::multiply`], of rows in memory, where the kernel takes those.
    pub(super) fn multiply_rows(
        &self,
        left: &RowsInMemory<'_>,
        right: &Strip<'_>,
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        assert!(left.inner > 0 && left.inner.div_ceil(STEP) == right.steps() && left.inner == right.inner);
        assert!(left.outer.max(right.outer) <= SQUARE && right.format == PackedFormat::Bf16);
        assert!(stride >= SQUARE && dst.len() >= (SQUARE - 1) * stride + SQUARE);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = accumulate;
        match self.kernel {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `open` asserted that the instructions are there.
            MicroKernel::Avx512Bf16 => unsafe {
                avx512_bf16::multiply_rows(left, right, dst, stride, accumulate);
            },
            kernel => unreachable!("{kernel:?} multiplies packed operands alone"),
        }
    }

    /// Multiplies ones and adds them up in registers, `rounds` times for each sum, by the instructions of the kernel.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_unsafe))]
    pub(super) fn multiply_ones(&self, rounds: u64) -> RegisterSums {
        // SAFETY: `open` asserted that the instructions are there.
        unsafe {
            match self.kernel {
                #[cfg(target_arch = "x86_64")]
                MicroKernel::AmxBf16 | MicroKernel::AmxF32 => {
                    let registers = self.registers.as_ref().expect("configured for these kernels");
                    registers.multiply_ones(rounds)
                }
                #[cfg(target_arch = "x86_64")]
                MicroKernel::Avx512Bf16 => register_sums::avx512_bf16(rounds),
                #[cfg(all(test, target_arch = "x86_64"))]
                MicroKernel::AmxByAvx512 { .. } => register_sums::avx512_bf16(rounds),
                #[cfg(target_arch = "x86_64")]
                MicroKernel::Avx512 => register_sums::avx512(rounds),
                #[cfg(target_arch = "x86_64")]
                MicroKernel::Avx2 => register_sums::avx2(rounds),
                MicroKernel::Baseline => register_sums::baseline(rounds),
            }
        }
    }
}
