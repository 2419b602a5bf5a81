//! The destination of a product's sums: scales and stores them, or adds them to the present values,
//! block by block.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use std::marker::PhantomData;

use super::tile::SQUARE;
use crate::instruction_set::InstructionSet;
use crate::mat_view::MatViewMut;
#[cfg(target_arch = "x86_64")]
use crate::mat_view::{as_f32_mut, is_f32};
use crate::runtime::cpu_tensor::FloatElement;
use crate::simd::prefetch;

/// 32 × 32 sums.
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
pub(super) struct Accumulator([[f32; SQUARE]; SQUARE]);

impl Accumulator {
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        self.0.as_flattened_mut()
    }
}

/// The matrix that a product writes, shared by its tasks.
pub(super) struct Destination<'a, D> {
    data: *mut D,
    len: usize,
    stride: usize,
    shape: (usize, usize),
    alpha: f32,
    accumulate: bool,
    borrowed: PhantomData<&'a mut [D]>,
}

// SAFETY: tasks write blocks that do not overlap, as the contract of `add` requires.
unsafe impl<D: Send> Sync for Destination<'_, D> {}

impl<'a, D: FloatElement> Destination<'a, D> {
    /// Creates the destination of `dst = [dst +] alpha · sums` for a matrix of this shape.
    pub(super) fn new(dst: MatViewMut<'a, D>, shape: (usize, usize), alpha: f32) -> Self {
        let MatViewMut { data, stride, accumulate } = dst;
        let data = &mut data[..(shape.0 - 1) * stride + shape.1];
        assert!(stride >= shape.1, "rows of a destination overlap");
        let (len, data) = (data.len(), data.as_mut_ptr());
        Destination { data, len, stride, shape, alpha, accumulate, borrowed: PhantomData }
    }

    /// Prefetches the 32 × 32 block at this row and column, which is about to be written.
    pub(super) fn prefetch(&self, (row, column): (usize, usize)) {
        for row in row..(row + SQUARE).min(self.shape.0) {
            let line = self.data.wrapping_add(row * self.stride + column);
            for byte in (0..SQUARE * size_of::<D>()).step_by(64) {
                prefetch(line.cast::<u8>().wrapping_add(byte));
            }
        }
    }

    /// Scales and stores, or adds, the sums of the 32 × 32 block at this row and column, except
    /// those outside the matrix, with the instructions of `set`.
    ///
    /// # Safety
    /// No other thread accesses this block meanwhile.
    pub(super) unsafe fn add(&self, set: InstructionSet, at: (usize, usize), sums: &Accumulator) {
        assert!(set <= InstructionSet::detected());
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the assertion; the block belongs to this
        // thread, by this function's contract.
        unsafe {
            let is_whole = at.1 + SQUARE <= self.shape.1;
            match set {
                _ if set >= InstructionSet::Avx512 && is_f32::<D>() && is_whole => {
                    self.add_f32_avx512(at, sums)
                }
                _ if set >= InstructionSet::Avx512Bf16 && is_whole => self.add_bf16_avx512(at, sums),
                _ if set >= InstructionSet::Avx512 => self.add_avx512(at, sums),
                _ if set >= InstructionSet::Avx2 => self.add_avx2(at, sums),
                _ => self.each_row(at, sums, add_row),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: as above.
        unsafe {
            self.each_row(at, sums, add_row);
        }
    }

    /// Calls `add` with each row of the block, its sums, the factor, and true if they are added.
    ///
    /// # Safety
    /// The contract of [`Destination::add`].
    #[inline(always)]
    unsafe fn each_row(
        &self,
        (row, column): (usize, usize),
        sums: &Accumulator,
        add: impl Fn(&mut [D], &[f32; SQUARE], f32, bool),
    ) {
        assert!(row < self.shape.0 && column < self.shape.1);
        let (height, width) = (SQUARE.min(self.shape.0 - row), SQUARE.min(self.shape.1 - column));
        let at = row * self.stride + column;
        assert!(at + (height - 1) * self.stride + width <= self.len);
        for (i, values) in sums.0.iter().take(height).enumerate() {
            // SAFETY: inside the slice, by the assertion; not shared, by this function's contract.
            let dst = unsafe { std::slice::from_raw_parts_mut(self.data.add(at + i * self.stride), width) };
            add(dst, values, self.alpha, self.accumulate);
        }
    }

    /// # Safety
    /// The contract of [`Destination::add`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_avx2(&self, at: (usize, usize), sums: &Accumulator) {
        // SAFETY: by this function's contract.
        unsafe { self.each_row(at, sums, add_row) }
    }

    /// # Safety
    /// The contract of [`Destination::add`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn add_avx512(&self, at: (usize, usize), sums: &Accumulator) {
        // SAFETY: by this function's contract.
        unsafe { self.each_row(at, sums, add_row) }
    }

    /// Writes whole lines of f32.
    ///
    /// # Safety
    /// The contract of [`Destination::add`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn add_f32_avx512(&self, at: (usize, usize), sums: &Accumulator) {
        let add = |dst: &mut [D], values: &[f32; SQUARE], alpha, accumulate| {
            add_line(as_f32_mut(dst).unwrap_or(&mut []), values, alpha, accumulate);
        };
        // SAFETY: by this function's contract.
        unsafe { self.each_row(at, sums, add) }
    }

    /// Writes whole lines of bf16.
    ///
    /// # Safety
    /// The contract of [`Destination::add`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn add_bf16_avx512(&self, at: (usize, usize), sums: &Accumulator) {
        let add = |dst: &mut [D], values: &[f32; SQUARE], alpha, accumulate| {
            add_line_bf16(dst, values, alpha, accumulate);
        };
        // SAFETY: by this function's contract.
        unsafe { self.each_row(at, sums, add) }
    }
}

#[inline(always)]
fn add_row<D: FloatElement>(dst: &mut [D], values: &[f32; SQUARE], alpha: f32, accumulate: bool) {
    for (dst, value) in dst.iter_mut().zip(values) {
        *dst = D::nearest(if accumulate { dst.widen() + alpha * value } else { alpha * value });
    }
}

/// Writes a whole line like [`add_row`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn add_line(dst: &mut [f32], values: &[f32; SQUARE], alpha: f32, accumulate: bool) {
    let alpha = _mm512_set1_ps(alpha);
    for (dst, values) in dst[..SQUARE].chunks_exact_mut(16).zip(values.chunks_exact(16)) {
        // SAFETY: sixteen values each.
        unsafe {
            let value = _mm512_mul_ps(alpha, _mm512_loadu_ps(values.as_ptr()));
            let value = if accumulate { _mm512_add_ps(_mm512_loadu_ps(dst.as_ptr()), value) } else { value };
            _mm512_storeu_ps(dst.as_mut_ptr(), value);
        }
    }
}

/// Writes a whole line of bf16 like [`add_row`]; values below 2⁻¹²⁶ become zero.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn add_line_bf16<D: FloatElement>(dst: &mut [D], values: &[f32; SQUARE], alpha: f32, accumulate: bool) {
    assert!(!is_f32::<D>());
    let dst = dst[..SQUARE].as_mut_ptr().cast::<__m512i>();
    let alpha = _mm512_set1_ps(alpha);
    // SAFETY: `FloatElement` is implemented for f32 and bf16 alone, and D is not f32: 32 values are
    // the 64 bytes of the vector. Each load reads 16 of the 32 sums.
    unsafe {
        let mut low = _mm512_mul_ps(alpha, _mm512_loadu_ps(values.as_ptr()));
        let mut high = _mm512_mul_ps(alpha, _mm512_loadu_ps(values.as_ptr().add(16)));
        if accumulate {
            let there = _mm512_loadu_si512(dst);
            let widened =
                |half: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
            low = _mm512_add_ps(widened(_mm512_castsi512_si256(there)), low);
            high = _mm512_add_ps(widened(_mm512_extracti64x4_epi64::<1>(there)), high);
        }
        // Two vectors of bits: the type has no cast of its own.
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
        _mm512_storeu_si512(dst, rounded);
    }
}
