//! Orthogonal bases and singular values of a few long vectors, for [`super::low_rank`].
//!
//! A matrix here is a list of `k` vectors of `n` elements, `k ≤ n`, one after the other in a slice.
//! The decomposition is the one-sided Jacobi method of Hestenes, in f64: it rotates two vectors at
//! a time until all are orthogonal. It is the most accurate of the known methods (Demmel and
//! Veselić 1992, doi:10.1137/0613074) and the shortest. Its cost, about ten times k²·n products, is
//! small for the few hundred vectors at most that it gets. A linear algebra crate instead took an
//! eighth of the build time.

use rayon::prelude::*;

/// The decomposition of `k` vectors of `n` elements: `vectors[i] = Σ_j left[j, i] · values[j] ·
/// right[j]`.
pub(super) struct Svd {
    /// `[k, k]`: row j is the left singular vector of `values[j]`.
    pub(super) left: Vec<f64>,
    /// `[k]`: not negative, largest first.
    pub(super) values: Vec<f64>,
    /// `[k, n]`: row j is the right singular vector of `values[j]`; zero where that is zero.
    pub(super) right: Vec<f64>,
}

/// Vectors with a smaller cosine count as orthogonal; a hundredth of the precision of the f32
/// results.
const ORTHOGONAL: f64 = 1e-10;
/// Maximum number of rounds over all pairs. Ten are usual: late rounds square the remaining error.
const SWEEPS: usize = 60;

/// Decomposes `vectors: [k, n]`, all finite; `n > 0`. Returns none if they do not become
/// orthogonal.
pub(super) fn decompose(vectors: &[f32], n: usize) -> Option<Svd> {
    let k = vectors.len() / n;
    let mut right: Vec<f64> = vectors.iter().map(|x| f64::from(*x)).collect();
    let mut left = vec![0f64; k * k];
    (0..k).for_each(|i| left[i * k + i] = 1.0);
    let done = (0..SWEEPS).any(|_| !sweep(&mut right, &mut left, n, k));
    let mut values: Vec<(usize, f64)> =
        right.chunks_exact(n).map(|row| dot(row, row).sqrt()).enumerate().collect();
    values.sort_by(|a, b| b.1.total_cmp(&a.1));
    let sorted = |rows: &[f64], width: usize, scale: &dyn Fn(f64) -> f64| -> Vec<f64> {
        let row = |&(i, value): &(usize, f64)| {
            let scale = scale(value);
            rows[i * width..][..width].iter().map(move |x| x * scale)
        };
        values.iter().flat_map(row).collect()
    };
    done.then(|| Svd {
        left: sorted(&left, k, &|_| 1.0),
        right: sorted(&right, n, &|value| if value > 0.0 { value.recip() } else { 0.0 }),
        values: values.iter().map(|(_, value)| *value).collect(),
    })
}

/// Rotates every pair of `right: [k, n]`, and of `left: [k, k]` with it, until it is orthogonal;
/// returns true if any was not.
fn sweep(right: &mut [f64], left: &mut [f64], n: usize, k: usize) -> bool {
    let mut turned = false;
    for i in 1..k {
        for j in 0..i {
            let (x, y) = two(right, n, j, i);
            let (xx, yy, xy) = (dot(x, x), dot(y, y), dot(x, y));
            if xy.abs() <= ORTHOGONAL * (xx * yy).sqrt() {
                continue;
            }
            turned = true;
            // The smaller of the two angles that make the product zero (Golub and Van Loan, section
            // 8.6.3).
            let zeta = (yy - xx) / (2.0 * xy);
            let tangent = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
            let cosine = tangent.hypot(1.0).recip();
            rotate(x, y, cosine, cosine * tangent);
            let (x, y) = two(left, k, j, i);
            rotate(x, y, cosine, cosine * tangent);
        }
    }
    turned
}

/// Returns rows `first` and `second`; `second` is the larger.
fn two(rows: &mut [f64], width: usize, first: usize, second: usize) -> (&mut [f64], &mut [f64]) {
    let (before, from) = rows.split_at_mut(second * width);
    (&mut before[first * width..][..width], &mut from[..width])
}

fn rotate(x: &mut [f64], y: &mut [f64], cosine: f64, sine: f64) {
    for (x, y) in x.iter_mut().zip(y) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    let mut lanes = [0f64; 8];
    let ((xs, x), (ys, y)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in xs.iter().zip(ys) {
        (0..8).for_each(|lane| lanes[lane] += x[lane] * y[lane]);
    }
    lanes.iter().sum::<f64>() + x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>()
}

/// Makes `vectors: [k, n]` orthonormal with the same span (modified Gram–Schmidt, twice: Giraud and
/// others 2005, doi:10.1007/s00211-005-0615-4). A vector without remainder becomes zero.
pub(super) fn orthonormalize(vectors: &mut [f32], n: usize) {
    for _ in 0..2 {
        let mut rest = &mut *vectors;
        while !rest.is_empty() {
            let (first, others) = rest.split_at_mut(n);
            let norm = dot32(first, first).sqrt();
            let scale = if norm > 0.0 { norm.recip() } else { 0.0 };
            first.iter_mut().for_each(|x| *x *= scale);
            others.par_chunks_exact_mut(n).with_min_len((1 << 14) / n + 1).for_each(|other| {
                let along = dot32(first, other);
                other.iter_mut().zip(&*first).for_each(|(x, y)| *x -= along * y);
            });
            rest = others;
        }
    }
}

fn dot32(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let ((xs, x), (ys, y)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
    for (x, y) in xs.iter().zip(ys) {
        (0..16).for_each(|lane| lanes[lane] += x[lane] * y[lane]);
    }
    lanes.iter().sum::<f32>() + x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::rng::RngStream;

    fn random(len: usize) -> Vec<f32> {
        (0..len as u64).map(|i| RngStream::new(5).normal(i)).collect()
    }

    fn gram(rows: &[f64], n: usize) -> Vec<f64> {
        let pairs = rows.chunks_exact(n).flat_map(|x| rows.chunks_exact(n).map(move |y| (x, y)));
        pairs.map(|(x, y)| dot(x, y)).collect()
    }

    #[test]
    fn factors_are_orthogonal_and_give_the_vectors_back() {
        for (k, n) in [(1, 1), (1, 9), (7, 7), (20, 33), (64, 64)] {
            let vectors = random(k * n);
            let svd = decompose(&vectors, n).expect("finite");
            assert!(svd.values.is_sorted_by(|a, b| a >= b));
            for (rows, width) in [(&svd.left, k), (&svd.right, n)] {
                for (at, x) in gram(rows, width).into_iter().enumerate() {
                    assert!((x - f64::from(at / k == at % k)).abs() < 1e-8, "{k}x{n}: {at} {x}");
                }
            }
            for (at, wanted) in vectors.iter().enumerate() {
                let terms =
                    (0..k).map(|j| svd.left[j * k + at / n] * svd.values[j] * svd.right[j * n + at % n]);
                assert!((terms.sum::<f64>() - f64::from(*wanted)).abs() < 1e-9, "{k}x{n}: {at}");
            }
        }
    }

    /// Equal vectors, zeros, and sizes 10¹² apart.
    #[test]
    fn degenerate_vectors_are_decomposed() {
        let equal = decompose(&[3.0, 4.0, 3.0, 4.0, 0.0, 0.0], 2).expect("finite");
        assert!((equal.values[0] - 50f64.sqrt()).abs() < 1e-9, "{:?}", equal.values);
        assert!(equal.values[1..].iter().all(|value| *value < 1e-9), "{:?}", equal.values);
        assert_eq!(decompose(&[0.0; 6], 3).expect("finite").values, [0.0, 0.0]);
        let apart = decompose(&[1e6, 1e6, 1e-6, -1e-6], 2).expect("finite");
        assert!(
            (apart.values[1] / 2f64.sqrt() / f64::from(1e-6f32) - 1.0).abs() < 1e-6,
            "{:?}",
            apart.values
        );
    }

    #[test]
    fn bases_are_orthonormal_though_vectors_are_nearly_parallel() {
        let n = 300;
        let mut vectors = random(8 * n);
        let first = vectors[..n].to_vec();
        for (row, scale) in vectors.chunks_exact_mut(n).zip([1.0, 1e-3, 1e-4, 1e-5, 1.0, 1.0, 1.0, 1.0]) {
            row.iter_mut().zip(&first).for_each(|(x, first)| *x = *first + scale * *x);
        }
        vectors[7 * n..].fill(0.0);
        orthonormalize(&mut vectors, n);
        for (i, x) in vectors.chunks_exact(n).enumerate() {
            for (j, y) in vectors.chunks_exact(n).enumerate() {
                let wanted = if i == j && i < 7 { 1.0 } else { 0.0 };
                assert!((dot32(x, y) - wanted).abs() < 1e-5, "{i} {j}: {}", dot32(x, y));
            }
        }
    }
}
