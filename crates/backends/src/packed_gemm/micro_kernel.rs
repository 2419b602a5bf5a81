//! Kernels that multiply packed operands, or rows in memory: one per instruction set, selected once
//! per product.

use super::f32_kernel;
use super::register_sums::{self, RegisterSums};
use super::tile::{PackedFormat, RowsInMemory, SQUARE, STEP, Strip};
use std::cell::Cell;

#[cfg(target_arch = "x86_64")]
use super::{amx, avx512_bf16};
use crate::instruction_set::InstructionSet;
use crate::mat_view::{GemmMatrix, OperandRole};

/// A kernel and its operand formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MicroKernel {
    /// The matrix unit, for operands that are bf16 or rounded to it.
    #[cfg(target_arch = "x86_64")]
    AmxBf16,
    /// The matrix unit, for f32 split into three bf16 parts.
    #[cfg(target_arch = "x86_64")]
    AmxF32,
    /// Pairs of bf16 at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// Emulates the matrix unit, including all padding of its operands, by the instructions of
    /// [`MicroKernel::Avx512Bf16`]: tests its packing on processors without one.
    #[cfg(all(test, target_arch = "x86_64"))]
    AmxByAvx512 {
        /// True if operands may be rounded to bf16.
        may_round: bool,
    },
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
    /// Returns the kernel for a product whose operands may be rounded to bf16, or may not.
    pub fn of(set: InstructionSet, may_round: bool) -> Self {
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

    /// Returns true if operands are packed as f32.
    pub(super) fn takes_f32(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            MicroKernel::AmxBf16 | MicroKernel::AmxF32 | MicroKernel::Avx512Bf16 => false,
            #[cfg(all(test, target_arch = "x86_64"))]
            MicroKernel::AmxByAvx512 { .. } => false,
            _ => true,
        }
    }

    /// Returns true if the kernel also suits products with fewer rows, columns or inner elements
    /// than a block.
    pub(super) fn takes_thin(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return !matches!(self, MicroKernel::AmxF32 | MicroKernel::Avx512);
        #[cfg(not(target_arch = "x86_64"))]
        true
    }

    /// Returns the packed format of an operand.
    pub(super) fn format(self, of: &impl GemmMatrix, role: OperandRole) -> PackedFormat {
        if self.takes_f32() {
            let by_rows = role == OperandRole::Left && !of.is_transposed();
            return if by_rows { PackedFormat::F32Rows } else { PackedFormat::F32 };
        }
        if self.splits_f32() && !of.is_bf16() { PackedFormat::Bf16Parts } else { PackedFormat::Bf16 }
    }

    /// Returns true if it splits f32 into three bf16 parts.
    pub(super) fn splits_f32(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            MicroKernel::AmxF32 => true,
            #[cfg(all(test, target_arch = "x86_64"))]
            MicroKernel::AmxByAvx512 { may_round } => !may_round,
            _ => false,
        }
    }

    /// Returns true if it multiplies rows of bf16 directly from memory.
    pub(super) fn takes_rows(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == MicroKernel::Avx512Bf16;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Returns the number of products of parts per product.
    pub(super) fn passes(self) -> usize {
        if self.splits_f32() { 6 } else { 1 }
    }

    /// Returns the instruction set of the kernel and of its surrounding code.
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

    /// Configures the kernel on this thread until the result is dropped, one at a time per thread.
    ///
    /// # Panics
    /// Panics if the processor does not have the instructions, or another kernel is open on this
    /// thread.
    pub fn open(self) -> OpenKernel {
        assert!(self.set() <= InstructionSet::detected(), "{self:?} on a processor without its instructions");
        // Dropping the second kernel would release the matrix unit's registers of the first.
        assert!(!IS_OPEN.replace(true), "two kernels at a time on one thread");
        OpenKernel {
            kernel: self,
            #[cfg(target_arch = "x86_64")]
            registers: (self.set() == InstructionSet::Amx).then(amx::TileRegisters::configure),
        }
    }
}

thread_local! {
    /// True if a kernel is open on this thread.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// A kernel that is configured on one thread.
pub struct OpenKernel {
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
    /// Computes `dst = [dst +] left · right` for the rows of `left` and the columns of `right`,
    /// `stride` elements from row to row; other sums of the 32 × 32 may change. The products of an
    /// element are added in the order of its inner elements; with operands in parts, the smallest
    /// products of a step come first.
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
        // SAFETY: `open` asserted that the processor has the instructions.
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

    /// Multiplies like [`OpenKernel::multiply`], with rows in memory, if the kernel supports them.
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
            // SAFETY: `open` asserted that the processor has the instructions.
            MicroKernel::Avx512Bf16 => unsafe {
                avx512_bf16::multiply_rows(left, right, dst, stride, accumulate);
            },
            kernel => unreachable!("{kernel:?} multiplies packed operands alone"),
        }
    }

    /// Multiplies ones and adds them up in registers, `rounds` times for each sum, by the
    /// instructions of the kernel.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_unsafe))]
    pub(super) fn multiply_ones(&self, rounds: u64) -> RegisterSums {
        // SAFETY: `open` asserted that the processor has the instructions.
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
