//! The unit against f64, and against an f32 product's own error. Without the unit these tests say so and end.

use half::bf16;

use super::*;
use crate::ops::gemm::{MatView, QuantMat};
use crate::quant::{Blocks, CodeKind, Scales};

/// Numbers in -1..1 with all bits in use.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f32 / (1u64 << 30) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

struct Case {
    shape: (usize, usize, usize),
    /// The operands lie transposed in memory.
    turned: (bool, bool),
    accumulate: bool,
    threads: Threads,
}

/// `rows · cols` values, of which the transpose is meant if `turned`.
fn matrix<T: FloatElement>(values: &[T], rows: usize, cols: usize, turned: bool) -> MatView<'_, T> {
    if turned { MatView::new(values, cols, rows, rows).t() } else { MatView::new(values, rows, cols, cols) }
}

/// The largest error of any element against f64, in units of 2⁻²⁴ · Σ|a||b|: of the unit, and of f32 sums.
fn errors<A: FloatElement, B: FloatElement>(amx: Amx, case: &Case) -> (f64, f64) {
    let (m, n, k) = case.shape;
    let a: Vec<A> = numbers(m * k, 1).into_iter().map(A::nearest).collect();
    let b: Vec<B> = numbers(k * n, 2).into_iter().map(B::nearest).collect();
    let stride = n + 5;
    let before = if case.accumulate { numbers(m * stride, 3) } else { vec![f32::NAN; m * stride] };
    let mut out = before.clone();
    let dst = MatViewMut { data: &mut out, stride, accumulate: case.accumulate };
    let matrices = (matrix(&a, m, k, case.turned.0), matrix(&b, k, n, case.turned.1));
    product(amx, dst, matrices.0, matrices.1, None, 0.5, case.threads);
    let at = |i: usize, j: usize, (rows, cols): (usize, usize), turned| {
        if turned { j * rows + i } else { i * cols + j }
    };
    // Beside bf16 activations everything is.
    let is_bf16 = [A::DTYPE, B::DTYPE].map(|dtype| dtype == candle_core::DType::BF16);
    let rounded = matches!((is_bf16, case.turned.0), ([true, false], _) | ([false, true], true));
    let taken = |value: f32| if rounded { bf16::from_f32(value).to_f32() } else { value };
    let (mut worst, mut worst_f32) = (0f64, 0f64);
    for i in 0..m {
        for j in 0..n {
            let (mut exact, mut size, mut single) = (0f64, 0f64, 0f32);
            for l in 0..k {
                let x = taken(a[at(i, l, (m, k), case.turned.0)].widen());
                let y = taken(b[at(l, j, (k, n), case.turned.1)].widen());
                exact += f64::from(x) * f64::from(y);
                size += (f64::from(x) * f64::from(y)).abs();
                single += x * y;
            }
            let start = if case.accumulate { f64::from(before[i * stride + j]) } else { 0.0 };
            let unit = 2f64.powi(-24) * (size * 0.5 + start.abs());
            let error = (f64::from(out[i * stride + j]) - (start + 0.5 * exact)).abs() / unit;
            worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
            worst_f32 = worst_f32.max((f64::from(single) - exact).abs() / (2f64.powi(-24) * size));
        }
        // What lies between rows is left alone.
        let between = i * stride + n..((i + 1) * stride).min(out.len());
        assert!(out[between.clone()].iter().zip(&before[between]).all(|(x, y)| x.to_bits() == y.to_bits()));
    }
    (worst, worst_f32)
}

/// The unit, or a word that nothing was tested.
fn unit() -> Option<Amx> {
    let here = Amx::here();
    if here.is_none() {
        std::io::Write::write_all(
            &mut std::io::stderr(),
            b"SKIPPED tests of AMX products: this processor has no AMX\n",
        )
        .unwrap();
    }
    here
}

#[test]
fn a_product_is_as_exact_as_in_f32() {
    let Some(amx) = unit() else { return };
    for (i, shape) in
        [(32, 32, 32), (64, 96, 512), (33, 35, 37), (130, 47, 550), (70, 40, 2100), (40, 1100, 1000)]
            .into_iter()
            .enumerate()
    {
        for turned in [(false, false), (false, true), (true, false), (true, true)] {
            let threads = if i % 3 == 0 { Threads::All } else { Threads::One };
            let case = Case { shape, turned, accumulate: i % 2 == 0, threads };
            let found = [
                errors::<f32, f32>(amx, &case),
                errors::<bf16, f32>(amx, &case),
                errors::<f32, bf16>(amx, &case),
                errors::<bf16, bf16>(amx, &case),
            ];
            for (kind, (unit, single)) in found.into_iter().enumerate() {
                // One rounding of the result and some of the sum; f32 sums in a row lose more with every term.
                assert!(
                    unit <= single.max(2.0),
                    "{shape:?} {turned:?} {kind}: {unit} beside {single} of f32"
                );
            }
        }
    }
}

#[test]
fn an_element_does_not_depend_on_the_tasks() {
    let Some(amx) = unit() else { return };
    let (m, n, k) = (300, 200, 900);
    let (a, b) = (numbers(m * k, 4), numbers(k * n, 5));
    let whole = |rows: usize, threads| {
        let mut out = vec![0f32; rows * n];
        let dst = MatViewMut { data: &mut out, stride: n, accumulate: false };
        product(amx, dst, MatView::new(&a, rows, k, k), MatView::new(&b, k, n, n), None, 1.0, threads);
        out
    };
    let want = whole(m, Threads::One);
    assert_eq!(want, whole(m, Threads::All));
    assert_eq!(want, crate::runtime::thread_pool::in_own_pool(3, || Ok(whole(m, Threads::All))).unwrap());
    assert_eq!(want[..75 * n], whole(75, Threads::All));
}

#[test]
fn quantized_is_dequantized_on_the_way() {
    let Some(amx) = unit() else { return };
    let (m, out, inputs) = (100, 160, 832);
    let codes: Vec<u8> = numbers(out * inputs / 2, 8).iter().map(|x| x.to_bits() as u8).collect();
    let scales: Vec<f32> = numbers(out * inputs / 64, 9);
    let blocks =
        Blocks { kind: CodeKind::NF4, block_size: 64, codes: &codes, scales: Scales::Plain(&scales) };
    let mut dense = vec![0f32; out * inputs];
    blocks.dequantize(0, &mut dense);
    let (quantized, dense) = (QuantMat::new(blocks, out, inputs), MatView::new(&dense, out, inputs, inputs));
    let a = numbers(m * inputs, 10);
    for transposed in [false, true] {
        let (k, n) = if transposed { (inputs, out) } else { (out, inputs) };
        let a = MatView::new(&a, m, k, k);
        let mut results = [vec![0f32; m * n], vec![0f32; m * n]];
        let dst = |data| MatViewMut { data, stride: n, accumulate: false };
        let [first, second] = &mut results;
        if transposed {
            product(amx, dst(first), a, quantized.t(), None, 1.0, Threads::All);
            product(amx, dst(second), a, dense.t(), None, 1.0, Threads::All);
        } else {
            product(amx, dst(first), a, quantized, None, 1.0, Threads::All);
            product(amx, dst(second), a, dense, None, 1.0, Threads::All);
        }
        assert!(results[0].iter().any(|x| *x != 0.0));
        assert_eq!(results[0], results[1]);
    }
}

#[test]
fn a_narrower_result_is_rounded_once() {
    let Some(amx) = unit() else { return };
    let (m, n, k) = (40, 70, 2000);
    let narrowed = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (a, b) = (narrowed(numbers(m * k, 11)), narrowed(numbers(k * n, 12)));
    let (a, b) = (MatView::new(&a, m, k, k), MatView::new(&b, k, n, n));
    let mut narrow = vec![bf16::from_f32(1.0); m * n];
    product(
        amx,
        MatViewMut { data: &mut narrow, stride: n, accumulate: true },
        a,
        b,
        None,
        1.0,
        Threads::All,
    );
    let mut wide = vec![1f64; m * n];
    let mut sums = vec![0f32; m * n];
    product(amx, MatViewMut { data: &mut sums, stride: n, accumulate: false }, a, b, None, 1.0, Threads::All);
    wide.iter_mut().zip(&sums).for_each(|(x, sum)| *x += f64::from(*sum));
    for (narrow, wide) in narrow.iter().zip(wide) {
        // Half a unit in the last of eight bits, and the f32 sums' own error.
        assert!((f64::from(narrow.to_f32()) - wide).abs() <= wide.abs() * 2f64.powi(-8) + 2e-4);
    }
}

/// Sums in one pass, with a row and a column of blocks that are not whole and inner elements in two parts.
#[test]
fn a_term_of_low_rank_is_added_once() {
    let Some(amx) = unit() else { return };
    let (m, n, r) = (70, 100, 24);
    for k in [200, 2600] {
        let narrowed = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let (a, b) = (narrowed(numbers(m * k, 11)), narrowed(numbers(k * n, 12)));
        let (u, factor) = (numbers(m * r, 13), numbers(n * r, 14));
        let (a, b) = (MatView::new(&a, m, k, k), MatView::new(&b, k, n, n));
        let (u, factor) = (MatView::new(&u, m, r, r), MatView::new(&factor, n, r, r).t());
        let term = Some(LowRankTerm { u, factor });
        let run = |a, b, term, from: &[bf16], accumulate| {
            let mut out = from.to_vec();
            let dst = MatViewMut { data: &mut out, stride: n, accumulate };
            product(amx, dst, a, b, term, 1.0, Threads::All);
            out
        };
        let start = narrowed(numbers(m * n, 15));
        let got = run(a, b, term, &start, true);
        let mut sums: Vec<f32> = start.iter().map(|x| x.to_f32()).collect();
        for (i, sum) in sums.iter_mut().enumerate() {
            let (row, column) = (i / n, i % n);
            let of_base =
                (0..k).map(|l| f64::from(a_at(&a, row, l)) * f64::from(a_at(&b, l, column))).sum::<f64>();
            let rounded = |x: f32| f64::from(bf16::from_f32(x).to_f32());
            let of_term =
                (0..r).map(|l| rounded(a_at(&u, row, l)) * rounded(a_at(&factor, l, column))).sum::<f64>();
            *sum += (of_base + of_term) as f32;
        }
        for (got, want) in got.iter().zip(&sums) {
            assert!((got.to_f32() - want).abs() <= want.abs() * 2f32.powi(-8) + 1e-3, "{got} {want}");
        }
    }
}

/// An element of a matrix.
fn a_at<T: FloatElement>(matrix: &MatView<'_, T>, row: usize, column: usize) -> f32 {
    let (line, at) = if matrix.is_transposed() { (column, row) } else { (row, column) };
    let mut value = [0.0];
    matrix.widen(line, at, &mut value);
    value[0]
}

#[test]
fn what_is_not_finite_stays_so() {
    let Some(amx) = unit() else { return };
    for bad in [f32::NAN, f32::INFINITY, f32::from_bits(0x7fff_ffff)] {
        let mut a = numbers(32 * 32, 6);
        a[5 * 32 + 7] = bad;
        let b = numbers(32 * 32, 7);
        let mut out = vec![0f32; 32 * 32];
        let dst = MatViewMut { data: &mut out, stride: 32, accumulate: false };
        product(
            amx,
            dst,
            MatView::new(&a, 32, 32, 32),
            MatView::new(&b, 32, 32, 32),
            None,
            1.0,
            Threads::One,
        );
        for (i, row) in out.chunks(32).enumerate() {
            assert!(row.iter().all(|x| x.is_finite() == (i != 5)));
        }
        // And where it is rounded to bf16.
        let b: Vec<bf16> = b.into_iter().map(bf16::from_f32).collect();
        let dst = MatViewMut { data: &mut out, stride: 32, accumulate: false };
        product(
            amx,
            dst,
            MatView::new(&a, 32, 32, 32),
            MatView::new(&b, 32, 32, 32),
            None,
            1.0,
            Threads::One,
        );
        for (i, row) in out.chunks(32).enumerate() {
            assert!(row.iter().all(|x| x.is_finite() == (i != 5)));
        }
    }
}
