//! The unit against f64, and against an f32 product's own error. Without the unit these tests say so and end.

use half::bf16;

use super::*;

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
    is_bf16: (bool, bool),
    accumulate: bool,
    parallel: bool,
}

/// The largest error of any element against f64, in units of 2⁻²⁴ · Σ|a||b|: of the unit, and of f32 sums.
fn errors(amx: Amx, case: &Case) -> (f64, f64) {
    let (m, n, k) = case.shape;
    let values = |len, seed, is_bf16| -> Vec<f32> {
        let values = numbers(len, seed);
        if is_bf16 { values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect() } else { values }
    };
    let (a, b) = (values(m * k, 1, case.is_bf16.0), values(k * n, 2, case.is_bf16.1));
    let (a_outer, a_inner) = if case.turned.0 { (1, m) } else { (k, 1) };
    let (b_outer, b_inner) = if case.turned.1 { (k, 1) } else { (1, n) };
    let stride = n + 5;
    let before = if case.accumulate { numbers(m * stride, 3) } else { vec![f32::NAN; m * stride] };
    let mut out = before.clone();
    let source = |data, outer, inner, is_bf16| Source { data, outer, inner, is_bf16 };
    let sources =
        (source(&a, a_outer, a_inner, case.is_bf16.0), source(&b, b_outer, b_inner, case.is_bf16.1));
    product(amx, &mut out, stride, case.accumulate, case.shape, sources.0, sources.1, 0.5, case.parallel);
    let (mut worst, mut worst_f32) = (0f64, 0f64);
    for i in 0..m {
        for j in 0..n {
            let (mut exact, mut size, mut single) = (0f64, 0f64, 0f32);
            for l in 0..k {
                let (x, y) = (a[i * a_outer + l * a_inner], b[j * b_outer + l * b_inner]);
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

#[test]
fn a_product_is_as_exact_as_in_f32() {
    let Some(amx) = Amx::here() else { return eprintln!("SKIPPED: this processor has no AMX") };
    for (i, shape) in
        [(32, 32, 32), (64, 96, 512), (33, 35, 37), (130, 47, 550), (70, 40, 2100), (40, 1100, 1000)]
            .into_iter()
            .enumerate()
    {
        for turned in [(false, false), (false, true), (true, false), (true, true)] {
            for is_bf16 in [(false, false), (true, false), (false, true), (true, true)] {
                let (accumulate, parallel) = (i % 2 == 0, i % 3 == 0);
                let (unit, single) = errors(amx, &Case { shape, turned, is_bf16, accumulate, parallel });
                // One rounding of the result and some of the sum; f32 sums in a row lose more with every term.
                assert!(
                    unit <= single.max(2.0),
                    "{shape:?} {turned:?} {is_bf16:?}: {unit} beside {single} of f32"
                );
            }
        }
    }
}

#[test]
fn an_element_does_not_depend_on_the_tasks() {
    let Some(amx) = Amx::here() else { return eprintln!("SKIPPED: this processor has no AMX") };
    let (m, n, k) = (300, 200, 700);
    let (a, b) = (numbers(m * k, 4), numbers(k * n, 5));
    let whole = |rows: usize, parallel| {
        let mut out = vec![0f32; rows * n];
        let a = Source { data: &a, outer: k, inner: 1, is_bf16: false };
        let b = Source { data: &b, outer: 1, inner: n, is_bf16: false };
        product(amx, &mut out, n, false, (rows, n, k), a, b, 1.0, parallel);
        out
    };
    let want = whole(m, false);
    assert_eq!(want, whole(m, true));
    assert_eq!(want, threads::in_own_pool(3, || Ok(whole(m, true))).unwrap());
    assert_eq!(want[..75 * n], whole(75, true));
}

#[test]
fn what_is_not_finite_stays_so() {
    let Some(amx) = Amx::here() else { return eprintln!("SKIPPED: this processor has no AMX") };
    for bad in [f32::NAN, f32::INFINITY, f32::from_bits(0x7fff_ffff)] {
        let mut a = numbers(32 * 32, 6);
        a[5 * 32 + 7] = bad;
        let b = numbers(32 * 32, 7);
        let mut out = vec![0f32; 32 * 32];
        let a = Source { data: &a, outer: 32, inner: 1, is_bf16: false };
        let b = Source { data: &b, outer: 1, inner: 32, is_bf16: false };
        product(amx, &mut out, 32, false, (32, 32, 32), a, b, 1.0, false);
        for (i, row) in out.chunks(32).enumerate() {
            assert!(row.iter().all(|x| x.is_finite() == (i != 5)));
        }
    }
}
