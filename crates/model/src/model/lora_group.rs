//! The LoRA adapters of linear layers with the same input: one pass over the input for all of them.
//!
//! ```text
//! [u_q u_k u_v] = x · [A_q; A_k; A_v]ᵀ          [dA_q; dA_k; dA_v] = [du_q du_k du_v]ᵀ · x
//! dx = dy · [W_q; W_k; W_v] + [du_q du_k du_v] · [A_q; A_k; A_v]
//! ```
//!
//! At any rank, such thin products take as long as reading `x`, and on the CPU as starting the
//! threads. The CPU writes `dx` once; on a GPU the product of the weights adds to that of the
//! adapters.
//!
//! A group of m adapters copies their A (`[Σ r, in]`) in each pass, and in backward adds their dA
//! from a copy. It saves m − 1 readings of `x` a pass, and in backward m − 1 times reading and
//! writing `dx`. Counted in bytes, both passes gain if the N rows are more than 2 Σ r / (m − 1): 64
//! for gate and up of rank 16. On a GPU a smaller batch has no group.

use candle_core::{DType, Tensor};

use super::lora::{BranchSaved, DropoutSource, Lora};
use crate::error::Result;
use crate::ops::elementwise::{add_into, stack_rows};
use crate::ops::{Addend, ColumnView, ColumnViewMut, LowRank, Transpose, empty, has_kernels, matmul};

/// Two or more adapters of layers with the same input, in the order of the layers.
pub(super) struct LoraGroup<'a> {
    loras: Vec<Option<Member<'a>>>,
    /// The adapters' A, one under the other: `[Σ r, in]` in their dtype.
    a: Tensor,
}

#[derive(Clone, Copy)]
struct Member<'a> {
    lora: &'a Lora,
    /// The first of its rows of A, and of its columns of u.
    start: usize,
    r: usize,
}

impl<'a> LoraGroup<'a> {
    /// Returns the group of these layers' adapters if it computes the same as each by itself: two
    /// or more LoRA adapters of one dtype with the same input, because none of them has dropout. On
    /// the CPU they are in f32; on a GPU their ranks are multiples of 8, so that the columns of
    /// each start at a multiple of 16 bytes, the unit in which products read, and the input, as
    /// `rows`, the layers' input or output, has rows enough.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn of(
        loras: impl Iterator<Item = Option<&'a Lora>>,
        rows: &Tensor,
        source: DropoutSource,
    ) -> Result<Option<Self>> {
        let mut rank = 0;
        let mut next_member = |lora: &'a Lora| {
            let r = lora.a.value.dims()[0];
            rank += r;
            Member { lora, start: rank - r, r }
        };
        let loras: Vec<_> = loras.map(|lora| lora.map(&mut next_member)).collect();
        let members: Vec<_> = loras.iter().flatten().collect();
        let [first, _, ..] = members[..] else { return Ok(None) };
        let (dtype, on_gpu) = (first.lora.a.value.dtype(), has_kernels(rows.device()));
        let fits = |Member { lora, r, .. }: &Member<'_>| {
            let is_aligned = if on_gpu { r.is_multiple_of(8) } else { dtype == DType::F32 };
            !lora.is_dora() && !lora.drops(source) && lora.a.value.dtype() == dtype && is_aligned
        };
        let on_cpu = rows.device().is_cpu();
        let pays = if on_gpu { pays_on_gpu(rows.dim(0)?, members.len(), rank) } else { on_cpu };
        if !pays || !members.iter().all(|member| fits(member)) {
            return Ok(None);
        }
        let parts: Vec<_> = members.iter().map(|member| &member.lora.a.value).collect();
        Ok(Some(LoraGroup { a: stack_rows(&parts)?, loras }))
    }

    fn rank(&self) -> usize {
        self.a.dims()[0]
    }

    /// Computes the inner activations of each layer's adapter.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn down(&self, x: &Tensor) -> Result<Vec<Option<BranchSaved>>> {
        let u = empty(x.dim(0)?, self.rank(), self.a.dtype(), x.device())?;
        let (all, a) = (ColumnViewMut::all(&u), ColumnView::all(&self.a));
        matmul(all, ColumnView::all(x), a, Transpose::Nt, 1.0, Addend::Nothing)?;
        let u = u.into_tensor();
        let saved = |member: Member<'_>| BranchSaved::lora(u.clone(), member.start);
        Ok(self.loras.iter().map(|member| member.map(saved)).collect())
    }

    /// Adds the gradients of each B. Returns the gradient of the inner activations of all, `[N, Σ
    /// r]`. `columns` are the columns of `dy` that each layer wrote.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn backward(
        &self,
        saved: &[Option<BranchSaved>],
        dy: &Tensor,
        columns: &[(usize, usize)],
    ) -> Result<Tensor> {
        let du = empty(dy.dim(0)?, self.rank(), self.a.dtype(), dy.device())?;
        for ((member, saved), &(start, len)) in self.loras.iter().zip(saved).zip(columns) {
            let (Some(Member { lora, start: first, r }), Some(saved)) = (*member, saved) else { continue };
            let columns = ColumnViewMut { tensor: &du, start: first, len: r };
            lora.up_backward_into(columns, saved, ColumnView { tensor: dy, start, len })?;
        }
        Ok(du.into_tensor())
    }

    /// Returns whether an A trains.
    pub(super) fn trains_a(&self) -> bool {
        self.loras.iter().flatten().any(|member| member.lora.a.grad.is_some())
    }

    /// Adds the gradients of each A, given those of the inner activations.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub(super) fn add_gradients_of_a(&self, x: &Tensor, du: &Tensor) -> Result<()> {
        let all = empty(self.rank(), x.dim(1)?, DType::F32, x.device())?;
        let (du, x) = (ColumnView::all(du), ColumnView::all(x));
        matmul(ColumnViewMut::all(&all), du, x, Transpose::Tn, 1.0, Addend::Nothing)?;
        for &Member { lora, start, r } in self.loras.iter().flatten() {
            if let Some(grad) = &lora.a.grad {
                add_into(grad, &all.narrow(0, start, r)?.into_tensor())?;
            }
        }
        Ok(())
    }

    /// Returns the low-rank term of `du` in the gradient of x.
    pub(super) fn to_input<'t>(&'t self, du: &'t Tensor) -> LowRank<'t> {
        LowRank { u: ColumnView::all(du), factor: &self.a, scale: 1.0 }
    }
}

/// Returns whether a group of so many `members`, of `rank` in all, moves fewer bytes of a GPU than
/// its adapters one by one, over `rows` rows.
fn pays_on_gpu(rows: usize, members: usize, rank: usize) -> bool {
    rows * (members - 1) > 2 * rank
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts bytes of bf16 by hand, in units of the width of x.
    #[test]
    fn a_group_pays_if_it_moves_fewer_bytes() {
        let bytes = |rows: usize, members: usize, rank: usize| {
            // In a group: A is read and written; x is read once. Backward also writes and reads dA
            // in f32 and writes dx.
            let grouped = [4 * rank + 2 * rows, 4 * rank + 2 * rows + 8 * rank + 2 * rows];
            // One by one: x is read by each; backward writes dx and then adds to it.
            let apart = [2 * rows * members, 2 * rows * members + 2 * rows * (2 * members - 1)];
            (grouped, apart)
        };
        for (members, rank) in [(2, 32), (2, 512), (3, 48), (3, 768)] {
            let least = (1..).find(|rows| pays_on_gpu(*rows, members, rank)).unwrap_or_default();
            assert_eq!(least, 2 * rank / (members - 1) + 1);
            for rows in [1, least - 1, least, 4096] {
                let (grouped, apart) = bytes(rows, members, rank);
                for (grouped, apart) in grouped.into_iter().zip(apart) {
                    assert_eq!(grouped < apart, rows >= least, "{rows} rows, {members} of {rank}");
                }
            }
        }
    }
}
