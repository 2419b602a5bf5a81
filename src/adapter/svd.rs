//! The best approximation of a matrix by two thin ones: what PiSSA (arXiv 2404.02948) and LoftQ (arXiv 2310.08659) start
//! an adapter from.
//!
//! Small matrices get their full singular value decomposition (faer's). Of large ones only the leading subspace is
//! found, by randomized iteration (Halko, Martinsson and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1); its start is a
//! function of the seed and the module's name.

use faer::{Mat, MatRef};

use crate::error::{Error, Result};
use crate::runtime::rng::RngStream;

/// Up to this smaller dimension the whole decomposition is cheap.
const EXACT: usize = 384;
/// Columns tried beyond the rank.
const OVERSAMPLING: usize = 16;
/// Rounds of power iteration; PEFT's documentation recommends 4 to 16 (`pissa_niter_<n>`).
const ITERATIONS: usize = 8;

/// `b · a` is the best approximation of rank r; the singular values are split evenly between the two.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRankFactors {
    /// `[r, in]`, row by row.
    pub a: Vec<f32>,
    /// `[out, r]`, row by row.
    pub b: Vec<f32>,
}

/// The factors of `weight: [out, inputs]`, row by row.
///
/// # Errors
/// The weight has values that are not finite, so that no decomposition is found; `r` exceeds its smaller dimension.
pub fn principal(
    weight: &[f32],
    (out, inputs): (usize, usize),
    r: usize,
    stream: RngStream,
) -> Result<LowRankFactors> {
    let failed = |cause: String| Error::user("cannot factor a weight for the adapter's start").because(cause);
    if r > out.min(inputs) {
        return Err(failed(format!(
            "r is {r}; the weight is {out} x {inputs}; accepted: r up to the smaller"
        ))
        .hint("lower `adapter.r`, or start with `init = \"default\"`"));
    }
    let weight = MatRef::from_row_major_slice(weight, out, inputs);
    let no_svd = |_| failed("its singular value decomposition does not converge: is it finite?".into());
    if out.min(inputs) <= EXACT {
        let svd = weight.thin_svd().map_err(no_svd)?;
        return Ok(split(svd.U(), svd.V(), |j| svd.S()[j], r));
    }
    let columns = (r + OVERSAMPLING).min(out.min(inputs));
    let start = Mat::from_fn(inputs, columns, |i, j| stream.normal((i * columns + j) as u64));
    let mut basis = (weight * start).qr().compute_thin_Q();
    for _ in 0..ITERATIONS {
        let other = (weight.transpose() * &basis).qr().compute_thin_Q();
        basis = (weight * other).qr().compute_thin_Q();
    }
    // W ≈ Q (Qᵀ W): the decomposition of the small matrix is that of W within the subspace.
    let small = (weight.transpose() * &basis).thin_svd().map_err(no_svd)?;
    let left = &basis * small.V();
    Ok(split(left.as_ref(), small.U(), |j| small.S()[j], r))
}

/// The first `r` columns of `u: [out, k]` and `v: [inputs, k]`, each times the root of its singular value.
fn split(u: MatRef<'_, f32>, v: MatRef<'_, f32>, s: impl Fn(usize) -> f32, r: usize) -> LowRankFactors {
    let roots: Vec<f32> = (0..r).map(|j| s(j).max(0.0).sqrt()).collect();
    let a = (0..r).flat_map(|j| (0..v.nrows()).map(move |i| (i, j)));
    let b = (0..u.nrows()).flat_map(|i| (0..r).map(move |j| (i, j)));
    LowRankFactors {
        a: a.map(|(i, j)| v[(i, j)] * roots[j]).collect(),
        b: b.map(|(i, j)| u[(i, j)] * roots[j]).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Singular values 1, 1/2, 1/3 … in random directions.
    fn matrix(out: usize, inputs: usize) -> Vec<f32> {
        let stream = RngStream::new(3);
        let random = |rows: usize, cols: usize, name: &str| {
            let stream = stream.named(name);
            Mat::from_fn(rows, cols, |i, j| stream.normal((i * cols + j) as u64)).qr().compute_thin_Q()
        };
        let k = out.min(inputs).min(60);
        let (u, v) = (random(out, k, "u"), random(inputs, k, "v"));
        let u = Mat::from_fn(out, k, |i, j| u[(i, j)] / (j + 1) as f32);
        let w = u * v.transpose();
        (0..out * inputs).map(|i| w[(i / inputs, i % inputs)]).collect()
    }

    fn residual(w: &[f32], factors: &LowRankFactors, inputs: usize, r: usize) -> f64 {
        let entry = |i: usize| -> f32 {
            (0..r).map(|j| factors.b[i / inputs * r + j] * factors.a[j * inputs + i % inputs]).sum()
        };
        w.iter().enumerate().map(|(i, w)| f64::from(w - entry(i)).powi(2)).sum::<f64>().sqrt()
    }

    /// No matrix of rank r is nearer than the root of the sum of squares of the other singular values.
    #[test]
    fn both_ways_reach_the_best_distance() {
        for (out, inputs) in [(50, 70), (70, 50), (500, 450), (400, 900)] {
            let (w, r) = (matrix(out, inputs), 4);
            let best: f64 = (r..out.min(inputs).min(60)).map(|j| 1.0 / ((j + 1) as f64).powi(2)).sum::<f64>();
            let factors = principal(&w, (out, inputs), r, RngStream::new(0)).expect("finite");
            let found = residual(&w, &factors, inputs, r);
            assert!((found / best.sqrt() - 1.0).abs() < 1e-3, "{out}x{inputs}: {found} {}", best.sqrt());
        }
    }

    #[test]
    fn a_rank_above_the_dimension_is_refused() {
        assert!(principal(&[0.0; 12], (3, 4), 4, RngStream::new(0)).is_err());
    }
}
