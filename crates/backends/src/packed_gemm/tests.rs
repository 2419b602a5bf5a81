//! Compares every kernel of the processor with f64, and with an f32 product's own error.

use half::bf16;

use super::*;
use crate::gemm::{MatView, QuantMat};
use crate::instruction_set::{InstructionSet, VARIABLE};
use crate::quant::{QuantFormat, QuantTensor, RunMeaning, RunsView};
use crate::recipe::enums::QuantKind;

/// Returns numbers in -1..1 with all bits in use.
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
    /// True for operands that are transposed in memory.
    turned: (bool, bool),
    accumulate: bool,
    threads: Threads,
}

/// Returns `rows · cols` values as a matrix, stored transposed if `turned`.
fn matrix<T: FloatElement>(values: &[T], rows: usize, cols: usize, turned: bool) -> MatView<'_, T> {
    if turned { MatView::new(values, cols, rows, rows).t() } else { MatView::new(values, rows, cols, cols) }
}

/// The expected product, element by element of its rows.
struct Expected {
    /// Σ ab and Σ |ab| in f64.
    exact: Vec<f64>,
    size: Vec<f64>,
    /// The largest error of f32 sums, in units of 2⁻²⁴ · Σ|ab|.
    single: f64,
}

/// Computes the definition, with values rounded to bf16 first if `rounded`.
fn expected<A: FloatElement, B: FloatElement>(case: &Case, rounded: bool) -> Expected {
    let (m, n, k) = case.shape;
    let taken = |value: f32| if rounded { bf16::from_f32(value).to_f32() } else { value };
    let at = |i: usize, j: usize, (rows, cols): (usize, usize), turned| {
        if turned { j * rows + i } else { i * cols + j }
    };
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    let a = |i, l| taken(A::nearest(a[at(i, l, (m, k), case.turned.0)]).widen());
    let b: Vec<f32> =
        (0..k * n).map(|e| taken(B::nearest(b[at(e / n, e % n, (k, n), case.turned.1)]).widen())).collect();
    let mut all = Expected { exact: vec![0.0; m * n], size: vec![0.0; m * n], single: 0.0 };
    for (i, (exact, size)) in all.exact.chunks_mut(n).zip(all.size.chunks_mut(n)).enumerate() {
        let mut single = vec![0f32; n];
        for (l, b) in b.chunks(n).enumerate() {
            let x = a(i, l);
            for (((exact, size), single), y) in exact.iter_mut().zip(&mut *size).zip(&mut single).zip(b) {
                let term = f64::from(x) * f64::from(*y);
                *exact += term;
                *size += term.abs();
                *single += x * y;
            }
        }
        for ((exact, size), single) in exact.iter().zip(&*size).zip(&single) {
            all.single = all.single.max((f64::from(*single) - exact).abs() / (2f64.powi(-24) * size));
        }
    }
    all
}

/// Returns the largest error of any element by a kernel, in units of 2⁻²⁴ · Σ|a||b|.
fn error<A: FloatElement, B: FloatElement>(kernel: MicroKernel, case: &Case, expected: &Expected) -> f64 {
    let (m, n, k) = case.shape;
    let a: Vec<A> = numbers(m * k, 1).into_iter().map(A::nearest).collect();
    let b: Vec<B> = numbers(k * n, 2).into_iter().map(B::nearest).collect();
    let stride = n + 5;
    let before = if case.accumulate { numbers(m * stride, 3) } else { vec![f32::NAN; m * stride] };
    let mut out = before.clone();
    let dst = MatViewMut { data: &mut out, stride, accumulate: case.accumulate };
    let matrices = (matrix(&a, m, k, case.turned.0), matrix(&b, k, n, case.turned.1));
    product(kernel, dst, matrices.0, matrices.1, None, 0.5, case.threads);
    let mut worst = 0f64;
    for i in 0..m {
        for j in 0..n {
            let (exact, size) = (expected.exact[i * n + j], expected.size[i * n + j]);
            let start = if case.accumulate { f64::from(before[i * stride + j]) } else { 0.0 };
            let unit = 2f64.powi(-24) * (size * 0.5 + start.abs());
            let error = (f64::from(out[i * stride + j]) - (start + 0.5 * exact)).abs() / unit;
            worst = if worst.is_nan() || error.is_nan() { f64::NAN } else { worst.max(error) };
        }
        // Memory between rows must not change.
        let between = i * stride + n..((i + 1) * stride).min(out.len());
        assert!(out[between.clone()].iter().zip(&before[between]).all(|(x, y)| x.to_bits() == y.to_bits()));
    }
    worst
}

/// Returns the kernels of this processor for products whose operands may be rounded to bf16, or may
/// not; only that of one instruction set if `FINETUNE_CPU` names it (`scripts/emulate_amx.sh`).
fn kernels(may_round: bool) -> Vec<MicroKernel> {
    if std::env::var_os(VARIABLE).is_some() {
        return vec![MicroKernel::of(InstructionSet::in_use(), may_round)];
    }
    let sets = InstructionSet::ALL.into_iter().filter(|set| *set <= InstructionSet::detected());
    let mut kernels: Vec<MicroKernel> = sets.map(|set| MicroKernel::of(set, may_round)).collect();
    // The emulated matrix unit, on processors without one.
    #[cfg(target_arch = "x86_64")]
    if InstructionSet::detected() >= InstructionSet::Avx512Bf16 {
        kernels.push(MicroKernel::AmxByAvx512 { may_round });
    }
    kernels.dedup();
    kernels
}

/// Returns true if a kernel rounds operands to bf16.
fn rounds(kernel: MicroKernel) -> bool {
    !kernel.takes_f32() && !kernel.splits_f32()
}

/// Returns a product in f32 of contiguous rows.
fn f32_product(
    kernel: MicroKernel,
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: &[f32],
    threads: Threads,
) -> Vec<f32> {
    let mut out = vec![0f32; m * n];
    let dst = MatViewMut { data: &mut out, stride: n, accumulate: false };
    product(kernel, dst, MatView::new(a, m, k, k), MatView::new(b, k, n, n), None, 1.0, threads);
    out
}

/// Returns the largest error of each kernel that takes operands of these types, and that of f32
/// sums.
fn errors_of_kernels<A: FloatElement, B: FloatElement>(case: &Case) -> Vec<(MicroKernel, f64, f64)> {
    let is_bf16 = [A::DTYPE, B::DTYPE].map(|dtype| dtype == candle_core::DType::BF16);
    let may_round = is_bf16[0] || (case.turned.0 && is_bf16[1]);
    // Rounding does not change bf16 values.
    let exact = expected::<A, B>(case, false);
    let rounded = (may_round && is_bf16 != [true; 2]).then(|| expected::<A, B>(case, true));
    let found = kernels(may_round).into_iter().map(|kernel| {
        let expected = rounded.as_ref().filter(|_| rounds(kernel)).unwrap_or(&exact);
        (kernel, error::<A, B>(kernel, case, expected), expected.single)
    });
    found.collect()
}

#[test]
fn a_product_is_as_exact_as_in_f32() {
    for (i, shape) in
        [(32, 32, 32), (64, 96, 512), (33, 35, 37), (130, 47, 550), (70, 40, 2100), (40, 1100, 1000)]
            .into_iter()
            .enumerate()
    {
        for turned in [(false, false), (false, true), (true, false), (true, true)] {
            let threads = if i % 3 == 0 { Threads::All } else { Threads::One };
            let case = Case { shape, turned, accumulate: i % 2 == 0, threads };
            let found = [
                errors_of_kernels::<f32, f32>(&case),
                errors_of_kernels::<bf16, f32>(&case),
                errors_of_kernels::<f32, bf16>(&case),
                errors_of_kernels::<bf16, bf16>(&case),
            ];
            for (types, kernels) in found.into_iter().enumerate() {
                for (kernel, error, single) in kernels {
                    // Split f32 takes six products, and each rounds the sum.
                    #[cfg(target_arch = "x86_64")]
                    let single = if kernel.splits_f32() { 3.0 * single } else { single };
                    // One rounding of the result, one if it is accumulated, and some of the sum;
                    // sequential f32 sums lose more with every term.
                    assert!(
                        error <= single.max(2.0) + 1.0,
                        "{kernel:?} {shape:?} {turned:?} {types}: {error} beside {single} of f32"
                    );
                }
            }
        }
    }
}

#[test]
fn an_element_does_not_depend_on_the_tasks() {
    let (m, n, k) = (300, 200, 900);
    let (a, b) = (numbers(m * k, 4), numbers(k * n, 5));
    for kernel in [kernels(false), kernels(true)].concat() {
        let whole = |rows: usize, threads| f32_product(kernel, (rows, n, k), &a[..rows * k], &b, threads);
        let want = whole(m, Threads::One);
        assert_eq!(want, whole(m, Threads::All));
        for threads in [3, 64] {
            let in_pool = || Ok(whole(m, Threads::All));
            assert_eq!(want, crate::runtime::thread_pool::in_own_pool(threads, in_pool).unwrap());
        }
        assert_eq!(want[..75 * n], whole(75, Threads::All));
    }
}

#[test]
fn quantized_is_dequantized_on_the_way() {
    kernels(false).into_iter().chain(kernels(true)).for_each(quantized_beside_dense);
}

fn quantized_beside_dense(kernel: MicroKernel) {
    let (m, out, inputs) = (100, 160, 832);
    let codes: Vec<u8> = numbers(out * inputs / 2, 8).iter().map(|x| x.to_bits() as u8).collect();
    let scales: Vec<f32> = numbers(out * inputs / 64, 9);
    let format = QuantFormat::of_kind(QuantKind::Nf4, 64, false);
    let (codes, scales) = ([(RunMeaning::Codes, &codes[..])], [(RunMeaning::Scales, &scales[..])]);
    let view = QuantTensor { format, runs: RunsView::new(codes, scales, 0.0) };
    let mut dense = vec![0f32; out * inputs];
    view.dequantize(0, &mut dense);
    let (quantized, dense) = (QuantMat::new(view, out, inputs), MatView::new(&dense, out, inputs, inputs));
    let a = numbers(m * inputs, 10);
    for transposed in [false, true] {
        let (k, n) = if transposed { (inputs, out) } else { (out, inputs) };
        let a = MatView::new(&a, m, k, k);
        let mut results = [vec![0f32; m * n], vec![0f32; m * n]];
        let dst = |data| MatViewMut { data, stride: n, accumulate: false };
        let [first, second] = &mut results;
        if transposed {
            product(kernel, dst(first), a, quantized.t(), None, 1.0, Threads::All);
            product(kernel, dst(second), a, dense.t(), None, 1.0, Threads::All);
        } else {
            product(kernel, dst(first), a, quantized, None, 1.0, Threads::All);
            product(kernel, dst(second), a, dense, None, 1.0, Threads::All);
        }
        assert!(results[0].iter().any(|x| *x != 0.0));
        assert_eq!(results[0], results[1]);
    }
}

#[test]
fn a_narrower_result_is_rounded_once() {
    kernels(true).into_iter().for_each(narrower_result);
}

fn narrower_result(kernel: MicroKernel) {
    let (m, n, k) = (40, 70, 2000);
    let narrowed = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (a, b) = (narrowed(numbers(m * k, 11)), narrowed(numbers(k * n, 12)));
    let (a, b) = (MatView::new(&a, m, k, k), MatView::new(&b, k, n, n));
    let mut narrow = vec![bf16::from_f32(1.0); m * n];
    product(
        kernel,
        MatViewMut { data: &mut narrow, stride: n, accumulate: true },
        a,
        b,
        None,
        1.0,
        Threads::All,
    );
    let mut wide = vec![1f64; m * n];
    let mut sums = vec![0f32; m * n];
    product(
        kernel,
        MatViewMut { data: &mut sums, stride: n, accumulate: false },
        a,
        b,
        None,
        1.0,
        Threads::All,
    );
    wide.iter_mut().zip(&sums).for_each(|(x, sum)| *x += f64::from(*sum));
    for (narrow, wide) in narrow.iter().zip(wide) {
        // Half a unit in the last of eight bits, plus the error of f32 sums.
        assert!((f64::from(narrow.to_f32()) - wide).abs() <= wide.abs() * 2f64.powi(-8) + 2e-4);
    }
}

/// Sums in one pass, with partial blocks in rows and columns, and inner elements in two parts.
#[test]
fn a_term_of_low_rank_is_added_once() {
    for may_round in [true, false] {
        kernels(may_round).into_iter().for_each(low_rank_term);
    }
}

fn low_rank_term(kernel: MicroKernel) {
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
            product(kernel, dst, a, b, term, 1.0, Threads::All);
            out
        };
        let start = narrowed(numbers(m * n, 15));
        let got = run(a, b, term, &start, true);
        let mut sums: Vec<f32> = start.iter().map(|x| x.to_f32()).collect();
        for (i, sum) in sums.iter_mut().enumerate() {
            let (row, column) = (i / n, i % n);
            let of_base = (0..k)
                .map(|l| f64::from(element(&a, row, l)) * f64::from(element(&b, l, column)))
                .sum::<f64>();
            let rounded = |x: f32| f64::from(if rounds(kernel) { bf16::from_f32(x).to_f32() } else { x });
            let of_term = (0..r)
                .map(|l| rounded(element(&u, row, l)) * rounded(element(&factor, l, column)))
                .sum::<f64>();
            *sum += (of_base + of_term) as f32;
        }
        for (got, want) in got.iter().zip(&sums) {
            assert!((got.to_f32() - want).abs() <= want.abs() * 2f32.powi(-8) + 1e-3, "{got} {want}");
        }
    }
}

/// Returns an element of a matrix.
fn element<T: FloatElement>(matrix: &MatView<'_, T>, row: usize, column: usize) -> f32 {
    let (line, at) = if matrix.is_transposed() { (column, row) } else { (row, column) };
    let mut value = [0.0];
    matrix.copy_line(line, at, &mut value);
    value[0]
}

/// A row with a value that is not finite becomes NaN or infinite, and no other row does, also if it
/// is rounded to bf16.
#[test]
fn what_is_not_finite_stays_so() {
    for kernel in [kernels(false), kernels(true)].concat() {
        for bad in [f32::NAN, f32::INFINITY, f32::from_bits(0x7fff_ffff)] {
            let mut a = numbers(32 * 32, 6);
            a[5 * 32 + 7] = bad;
            let out = f32_product(kernel, (32, 32, 32), &a, &numbers(32 * 32, 7), Threads::One);
            for (i, row) in out.chunks(32).enumerate() {
                assert!(row.iter().all(|x| x.is_finite() == (i != 5)), "{kernel:?} {bad}");
            }
        }
    }
}

/// Partial squares, in all formats, by the products of tiles within a task.
#[test]
fn tiles_multiply_as_matrices_do() {
    let (m, n, k) = (50, 70, 90);
    let (a, b) = (numbers(m * k, 16), numbers(k * n, 17));
    for kernel in [kernels(false), kernels(true)].concat() {
        let want = f32_product(kernel, (m, n, k), &a, &b, Threads::One);
        // The same values in the transposed order in memory.
        let turned = |values: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..rows * cols).map(|at| values[at % rows * cols + at / rows]).collect()
        };
        let (at, bt) = (turned(&a, m, k), turned(&b, k, n));
        let lefts = [MatView::new(&a, m, k, k), MatView::new(&at, k, m, m).t()];
        let rights = [MatView::new(&b, k, n, n), MatView::new(&bt, n, k, k).t()];
        for (left, right) in lefts.iter().flat_map(|left| rights.iter().map(move |right| (left, right))) {
            let left = TileOperand::of(kernel, left, OperandRole::Left);
            let right = TileOperand::of(kernel, right, OperandRole::Right);
            let stride = 96;
            let mut out = vec![1f32; 64 * stride];
            let open = kernel.open();
            let steps = k.div_ceil(STEP);
            open.multiply_operands((&left, &right), &mut out, stride, false, |_, _| 0..steps);
            // In parts, the last of which is a partial step; a skipped square must not change.
            open.multiply_operands((&left, &right), &mut out, stride, true, |_, _| 0..1);
            open.multiply_operands((&left, &right), &mut out, stride, true, |_, _| 1..steps);
            open.multiply_operands((&left, &right), &mut out, stride, false, |_, _| 0..0);
            for (i, want) in want.iter().enumerate() {
                let got = out[i / n * stride + i % n];
                assert!((got - 2.0 * want).abs() <= 1e-5 * want.abs().max(1.0), "{kernel:?} {got} {want}");
            }
        }
    }
}

/// The operation count of the peak loops is correct: the sums of ones give the number of additions.
#[test]
fn the_peak_counts_what_is_multiplied() {
    for kernel in [kernels(false), kernels(true)].concat() {
        let rounds = [1, 1000].map(|rounds| kernel.open().multiply_ones(rounds));
        for done in &rounds {
            let ones: f64 = done.sums.iter().map(|sum| f64::from(*sum)).sum();
            assert_eq!(2.0 * ones, done.flops as f64, "{kernel:?}");
            assert!(done.sums.iter().all(|sum| *sum == done.sums[0]), "{kernel:?}");
        }
        assert!(rounds[0].flops > 0 && rounds[1].flops == 1000 * rounds[0].flops, "{kernel:?}");
    }
}

/// The golden runs of wide-llama (tests/golden) must compare packed products with PyTorch's. Its
/// projections and its output layer, forward and backward, are large enough for every kernel, even
/// in the micro-batch with the fewest tokens.
#[test]
fn the_products_of_a_golden_model_are_packed() {
    let golden =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("tests/golden");
    let config = std::fs::read_to_string(golden.join("models/wide-llama/config.json")).unwrap();
    let number = |key: &str| -> usize {
        let (_, rest) = config.split_once(&format!("\"{key}\": ")).unwrap();
        rest.split([',', '\n']).next().unwrap().parse().unwrap()
    };
    let (width, inner, vocab) = (number("hidden_size"), number("intermediate_size"), number("vocab_size"));
    let keys = width / number("num_attention_heads") * number("num_key_value_heads");

    let batches = golden.join("train/batches/wide-llama-steps5-accum2-mb8-len96.safetensors");
    let batches = candle_core::safetensors::load(batches, &candle_core::Device::Cpu).unwrap();
    // Indexed by step, micro-batch, row and position; the loss counts rows that have a target.
    let fewest = |name: &str, counts: fn(i64) -> bool| {
        let (steps, turns, rows, len) = batches[name].dims4().unwrap();
        let values: Vec<i64> = batches[name].flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(values.len(), steps * turns * rows * len);
        values.chunks(rows * len).map(|batch| batch.iter().filter(|x| counts(**x)).count()).min().unwrap()
    };
    let (tokens, targets) = (fewest("attention_mask", |x| x == 1), fewest("labels", |x| x != -100));

    for (rows, out, inputs) in [
        (tokens, width, width),
        (tokens, keys, width),
        (tokens, inner, width),
        (tokens, width, inner),
        (targets, vocab, width),
    ] {
        for kernel in [kernels(false), kernels(true)].concat() {
            for (m, n, k) in [(rows, out, inputs), (rows, inputs, out), (out, inputs, rows)] {
                assert!(is_profitable(kernel, m, n, k), "{kernel:?} {m} x {n} x {k}");
            }
        }
    }
}

/// Rows multiplied in memory give the bits of packed ones, regardless of neighbouring values: as
/// columns of a wider matrix of NaNs, from an odd column on.
#[test]
fn rows_in_memory_give_the_bits_of_packed_ones() {
    let to_bf16 = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    for kernel in kernels(true) {
        for (m, n, k) in [
            (5, 70, 90),
            (64, 64, 64),
            (130, 33, 34),
            (41, 200, 62),
            (33, 40, 35),
            (130, 140, 2602),
            (130, 140, 2601),
        ] {
            let (a, b) = (to_bf16(numbers(m * k, 21)), to_bf16(numbers(k * n, 22)));
            let (start, stride) = (3, k + 7);
            let mut wide = vec![bf16::NAN; start + (m - 1) * stride + k];
            let mut turned = vec![bf16::ZERO; m * k];
            for (at, value) in a.iter().enumerate() {
                wide[start + at / k * stride + at % k] = *value;
                turned[at % k * m + at / k] = *value;
            }
            let in_memory = MatView::new(&wide[start..], m, k, stride);
            let [got, want] = [in_memory, MatView::new(&turned, k, m, m).t()].map(|a| {
                let mut out = vec![0f32; m * n];
                let dst = MatViewMut { data: &mut out, stride: n, accumulate: false };
                product(kernel, dst, a, MatView::new(&b, k, n, n), None, 1.0, Threads::All);
                out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            assert_eq!(got, want, "{kernel:?} {m} x {n} x {k}");
        }
    }
}
