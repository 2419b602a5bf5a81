//! The best approximation of a matrix by two thin ones: PiSSA (arXiv 2404.02948) and LoftQ (arXiv
//! 2310.08659) initialize an adapter with it.
//!
//! Small matrices get their full singular value decomposition. For large ones only the leading
//! subspace is computed, by randomized iteration (Halko, Martinsson and Tropp, arXiv 0909.4061,
//! algorithms 4.4 and 5.1); its start is a function of the seed and the module's name.

use super::svd::{Svd, decompose, orthonormalize};
use crate::backends::gemm::{MatView, MatViewMut, Threads, matmul};
use crate::backends::mat_view::GemmMatrix;
use crate::error::{Error, Result};
use crate::quant::first_not_finite;
use crate::runtime::rng::RngStream;

/// Up to this smaller dimension, the full decomposition is cheap.
const EXACT: usize = 384;
/// Additional columns beyond the rank.
const OVERSAMPLING: usize = 16;
/// Power iterations; PEFT's documentation recommends 4 to 16 (`pissa_niter_<n>`).
const ITERATIONS: usize = 8;

/// Factors whose product `b · a` is the best approximation of rank r; the singular values are split
/// evenly between them.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRankFactors {
    /// `[r, in]`, row-major.
    pub a: Vec<f32>,
    /// `[out, r]`, row-major.
    pub b: Vec<f32>,
}

impl LowRankFactors {
    /// Returns the factors of `weight: [out, inputs]`, row-major.
    ///
    /// # Errors
    /// Fails if the weight has values that are not finite, so that no decomposition is found, or if
    /// `r` exceeds its smaller dimension.
    pub fn principal(
        weight: &[f32],
        (out, inputs): (usize, usize),
        r: usize,
        stream: RngStream,
    ) -> Result<Self> {
        let failed =
            |cause: String| Error::user("cannot factor a weight to initialize the adapter").because(cause);
        if r > out.min(inputs) {
            return Err(failed(format!(
                "r is {r}; the weight is {out} x {inputs}; accepted: r up to the smaller dimension"
            ))
            .hint("lower `adapter.r`, or start with `init = \"default\"`"));
        }
        if let Some(at) = first_not_finite(weight) {
            return Err(failed(format!("it holds {}; accepted: finite numbers", weight[at])));
        }
        let no_svd = || failed("its singular value decomposition does not converge".into());
        if out.min(inputs) > EXACT {
            let (basis, small) = leading_subspace(weight, (out, inputs), r + OVERSAMPLING, stream);
            let Svd { left, values, right } = decompose(&small, inputs).ok_or_else(no_svd)?;
            // W ≈ Qᵀ (Q W): the decomposition of the small matrix is that of W within the subspace.
            let columns = values.len();
            let turned: Vec<f32> = left[..r * columns].iter().map(|x| *x as f32).collect();
            let mut rows = vec![0f32; r * out];
            let basis = MatView::new(&basis, columns, out, out);
            product(&mut rows, MatView::new(&turned, r, columns, columns), basis);
            let rows: Vec<f64> = rows.into_iter().map(f64::from).collect();
            return Ok(factors(&rows, &right[..r * inputs], &values[..r]));
        }
        if out <= inputs {
            let Svd { left, values, right } = decompose(weight, inputs).ok_or_else(no_svd)?;
            return Ok(factors(&left[..r * out], &right[..r * inputs], &values[..r]));
        }
        let columns: Vec<f32> = (0..weight.len()).map(|at| weight[at % out * inputs + at / out]).collect();
        let Svd { left, values, right } = decompose(&columns, out).ok_or_else(no_svd)?;
        Ok(factors(&right[..r * out], &left[..r * inputs], &values[..r]))
    }

    /// Computes `weight −= scale · b · a`, for `weight: [out, in]`, row-major.
    pub fn subtract_from(&self, weight: &mut [f32], inputs: usize, scale: f32) {
        let r = self.a.len() / inputs.max(1);
        for (row, b) in weight.chunks_exact_mut(inputs).zip(self.b.chunks_exact(r.max(1))) {
            for (b, a) in b.iter().zip(self.a.chunks_exact(inputs)) {
                row.iter_mut().zip(a).for_each(|(w, a)| *w -= scale * b * a);
            }
        }
    }
}

/// Returns an orthonormal basis `Q: [columns, out]`, row-major, of the leading left singular
/// vectors of `weight`, and `Q · W`.
fn leading_subspace(
    weight: &[f32],
    (out, inputs): (usize, usize),
    columns: usize,
    stream: RngStream,
) -> (Vec<f32>, Vec<f32>) {
    let columns = columns.min(out.min(inputs));
    let weight = MatView::new(weight, out, inputs, inputs);
    // The start is drawn as the matrix `[inputs, columns]`.
    let value = |at: usize| stream.normal((at % inputs * columns + at / inputs) as u64);
    let mut other: Vec<f32> = (0..columns * inputs).map(value).collect();
    let mut basis = vec![0f32; columns * out];
    for round in 0..=ITERATIONS {
        if round > 0 {
            orthonormalize(&mut other, inputs);
        }
        product(&mut basis, MatView::new(&other, columns, inputs, inputs), weight.t());
        orthonormalize(&mut basis, out);
        product(&mut other, MatView::new(&basis, columns, out, out), weight);
    }
    (basis, other)
}

fn product(dst: &mut [f32], a: MatView<'_, f32>, b: MatView<'_, f32>) {
    let columns = b.cols();
    matmul(MatViewMut { data: dst, stride: columns, accumulate: false }, a, b, 1.0, Threads::All);
}

/// Scales `left: [r, out]` and `right: [r, in]`, singular vectors row by row, by the roots of the
/// singular values.
fn factors(left: &[f64], right: &[f64], values: &[f64]) -> LowRankFactors {
    let r = values.len();
    let (out, inputs) = (left.len() / r.max(1), right.len() / r.max(1));
    let a = right.iter().enumerate().map(|(at, x)| (x * values[at / inputs].sqrt()) as f32).collect();
    let b = (0..out * r).map(|at| (left[at % r * out + at / r] * values[at % r].sqrt()) as f32).collect();
    LowRankFactors { a, b }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a matrix with singular values 1, 1/2, 1/3 … in random directions.
    fn matrix(out: usize, inputs: usize) -> Vec<f32> {
        let stream = RngStream::new(3);
        let k = out.min(inputs).min(60);
        let random = |n: usize, name: &str| {
            let mut vectors = stream.named(name).normals(0..(k * n) as u64, 1.0);
            orthonormalize(&mut vectors, n);
            vectors
        };
        let (u, v) = (random(out, "u"), random(inputs, "v"));
        let mut w = vec![0f32; out * inputs];
        for (j, (u, v)) in u.chunks_exact(out).zip(v.chunks_exact(inputs)).enumerate() {
            for (row, u) in w.chunks_exact_mut(inputs).zip(u) {
                row.iter_mut().zip(v).for_each(|(w, v)| *w += u * v / (j + 1) as f32);
            }
        }
        w
    }

    fn residual(w: &[f32], factors: &LowRankFactors, inputs: usize, r: usize) -> f64 {
        let entry = |i: usize| -> f32 {
            (0..r).map(|j| factors.b[i / inputs * r + j] * factors.a[j * inputs + i % inputs]).sum()
        };
        w.iter().enumerate().map(|(i, w)| f64::from(w - entry(i)).powi(2)).sum::<f64>().sqrt()
    }

    /// The best distance of rank r is the root of the sum of squares of the remaining singular
    /// values.
    #[test]
    fn both_ways_reach_the_best_distance() {
        for (out, inputs) in [(50, 70), (70, 50), (500, 450), (400, 900)] {
            let (w, r) = (matrix(out, inputs), 4);
            let best: f64 = (r..out.min(inputs).min(60)).map(|j| 1.0 / ((j + 1) as f64).powi(2)).sum::<f64>();
            let factors = LowRankFactors::principal(&w, (out, inputs), r, RngStream::new(0)).expect("finite");
            let found = residual(&w, &factors, inputs, r);
            assert!((found / best.sqrt() - 1.0).abs() < 1e-3, "{out}x{inputs}: {found} {}", best.sqrt());
        }
    }

    #[test]
    fn a_rank_above_the_dimension_is_refused() {
        assert!(LowRankFactors::principal(&[0.0; 12], (3, 4), 4, RngStream::new(0)).is_err());
    }
}
