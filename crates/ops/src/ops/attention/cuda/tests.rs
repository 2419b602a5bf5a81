use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::super::{KERNEL_HEAD_DIMS as HEAD_DIMS, cpu, reference};
use super::*;
use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};
use crate::ops::rotary::Heads;
use crate::ops::selftest::random;
use crate::runtime::rng::RngStream;

/// Sequences, heads and masks with edges at many positions of a tile.
#[derive(Debug, Clone)]
struct Case {
    /// Lengths of the sequences, end to end; a negative one is a gap.
    lens: Vec<i64>,
    heads: (usize, usize),
    window: Option<usize>,
    softcap: Option<f64>,
    /// Standard deviation of q and k.
    spread: f64,
}

impl Case {
    fn new(lens: &[i64], heads: (usize, usize)) -> Self {
        Case { lens: lens.to_vec(), heads, window: None, softcap: None, spread: 1.0 }
    }

    fn one_token() -> Self {
        Case::new(&[1], (2, 1))
    }

    fn one_key_head_for_eight() -> Self {
        Case::new(&[131, 1, 3, 2, 70], (8, 1))
    }

    fn window_of_5() -> Self {
        Case { window: Some(5), ..Case::new(&[150, 2, 77], (2, 2)) }
    }

    fn window_of_95_and_a_gap() -> Self {
        Case { window: Some(95), ..Case::new(&[290, -140, 1, 40], (2, 1)) }
    }

    /// A window one shorter than a tile.
    fn window_of_127() -> Self {
        Case { window: Some(127), ..Case::new(&[260], (2, 1)) }
    }

    fn soft_cap() -> Self {
        Case { softcap: Some(5.0), spread: 3.0, ..Case::new(&[129, 65], (2, 1)) }
    }

    fn large_scores() -> Self {
        Case { spread: 5.0, ..Case::new(&[200, -3], (2, 1)) }
    }
}

fn spans_of(lens: &[i64]) -> (Vec<Span>, usize) {
    let (mut at, mut spans) = (0, Vec::new());
    for &len in lens {
        if len > 0 {
            spans.push(Span::sequence(at, len as usize));
        }
        at += len.unsigned_abs() as usize;
    }
    (spans, at)
}

/// Returns normal values, rounded to bf16.
fn normal(seed: u64, rows: usize, width: usize, spread: f64) -> Result<Tensor> {
    let stream = RngStream::new(seed);
    let values: Vec<f32> = (0..(rows * width) as u64).map(|i| stream.normal(i) * spread as f32).collect();
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?.to_dtype(DType::BF16)?)
}

/// Sets the rows outside every span to NaN: no result may depend on them.
fn without_gaps(x: &Tensor, spans: &[Span]) -> Result<Tensor> {
    let mut factors = vec![f32::NAN; x.dim(0)?];
    for span in spans {
        factors[span.q_start..span.q_start + span.q_len].fill(1.0);
    }
    let factors = Tensor::from_vec(factors, (x.dim(0)?, 1), &Device::Cpu)?.to_dtype(x.dtype())?;
    Ok(x.broadcast_mul(&factors)?)
}

fn qkv_of(x: &Tensor, heads: Heads) -> Qkv<'_> {
    let range = |start, len| ColumnView { tensor: x, start, len };
    Qkv {
        q: range(0, heads.q_width()),
        k: range(heads.q_width(), heads.kv_width()),
        v: range(heads.qk_width(), heads.kv_width()),
    }
}

/// A plain implementation that rounds to bf16 after each op, one span and head at a time.
mod plain {
    use super::*;

    fn rounded(x: Tensor) -> Result<Tensor> {
        Ok(x.to_dtype(DType::BF16)?.to_dtype(DType::F32)?)
    }

    fn head(x: &Tensor, span: Span, start: usize, dim: usize) -> Result<Tensor> {
        Ok(x.narrow(0, span.q_start, span.q_len)?
            .narrow(1, start, dim)?
            .contiguous()?
            .to_dtype(DType::F32)?)
    }

    /// Returns the output `[N, H · D]` and the gradients of q, k and v, in f32.
    pub(super) fn run(
        x: &Tensor,
        dout: &Tensor,
        spans: &[Span],
        kind: AttentionKind,
    ) -> Result<(Tensor, Tensor)> {
        let (heads, dim, rows) = (kind.heads, kind.heads.head_dim, x.dim(0)?);
        let group = heads.num_heads / heads.num_kv_heads;
        let out = Tensor::zeros((rows, heads.q_width()), DType::F32, &Device::Cpu)?;
        let d = Tensor::zeros((rows, heads.qkv_width()), DType::F32, &Device::Cpu)?;
        for &span in spans {
            for h in 0..heads.num_heads {
                let (kv, n) = (h / group, span.q_len);
                let columns = [h * dim, heads.q_width() + kv * dim, heads.qk_width() + kv * dim];
                let [q, k, v] = [
                    head(x, span, columns[0], dim)?,
                    head(x, span, columns[1], dim)?,
                    head(x, span, columns[2], dim)?,
                ];
                let do_ = head(dout, span, h * dim, dim)?;
                let mut s = rounded((rounded(q.matmul(&k.t()?)?)? * kind.scale)?)?;
                let mut slope = s.ones_like()?;
                if let Some(cap) = kind.softcap {
                    let tanh = rounded((&s / cap)?.tanh()?)?;
                    slope = (1.0 - tanh.sqr()?)?;
                    s = rounded((tanh * cap)?)?;
                }
                let mut mask = vec![f32::NEG_INFINITY; n * n];
                for (i, row) in mask.chunks_exact_mut(n).enumerate() {
                    let (from, to) = span.visible(i, kind.window);
                    row[from..to].fill(0.0);
                }
                let s = (s + Tensor::from_vec(mask, (n, n), &Device::Cpu)?)?;
                let p = rounded(candle_nn::ops::softmax(&s, 1)?)?;
                let o = rounded(p.matmul(&v)?)?;
                let dp = rounded(do_.matmul(&v.t()?)?)?;
                let delta = (&p * &dp)?.sum_keepdim(1)?;
                let ds = rounded(((rounded((&p * dp.broadcast_sub(&delta)?)?)? * slope)? * kind.scale)?)?;
                add(&out, &o, span, h * dim)?;
                add(&d, &ds.matmul(&k)?, span, columns[0])?;
                add(&d, &ds.t()?.matmul(&q)?, span, columns[1])?;
                add(&d, &p.t()?.matmul(&do_)?, span, columns[2])?;
            }
        }
        Ok((out, d))
    }

    /// Computes `to[span, column..] += part`, rounded.
    fn add(to: &Tensor, part: &Tensor, span: Span, column: usize) -> Result<()> {
        let rows = to.narrow(0, span.q_start, span.q_len)?.contiguous()?.copy()?;
        let sum = rounded((rows.narrow(1, column, part.dim(1)?)? + rounded(part.clone())?)?)?;
        rows.slice_set(&sum.contiguous()?, 1, column)?;
        Ok(to.slice_set(&rows, 0, span.q_start)?)
    }
}

/// Returns the largest difference and the root mean square of the differences.
fn apart(a: &Tensor, b: &Tensor) -> Result<(f32, f32)> {
    let distance = (a.to_dtype(DType::F32)? - b.to_dtype(DType::F32)?)?.flatten_all()?;
    Ok((distance.abs()?.max(0)?.to_scalar()?, distance.sqr()?.mean_all()?.sqrt()?.to_scalar()?))
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let values: Vec<f32> = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// Returns every order of threads, with asynchronous copies as early and as late as possible.
fn schedules() -> [EmulatorSchedule; 3] {
    let ways = [(Order::Forward, false), (Order::Reverse, true), (Order::Shuffled(7), true)];
    ways.map(|(order, late_copies)| EmulatorSchedule { order, late_copies, counts: false })
}

fn run(
    schedule: EmulatorSchedule,
    x: &Tensor,
    dout: &Tensor,
    spans: &[Span],
    kind: AttentionKind,
) -> Result<(AttentionOutput, Tensor)> {
    // As in a transformer block: q and k are rotated, v comes from the projection, in wider rows.
    let rotated = x.narrow(1, 0, kind.heads.qk_width())?.contiguous()?;
    let (result, _) = Emulator::run(schedule, || {
        let qkv = Qkv { v: qkv_of(x, kind.heads).v, ..qkv_of(&rotated, kind.heads) };
        assert!(is_supported(&qkv, &kind), "{kind:?}");
        let attended = forward(&Emulator, qkv, spans, kind)?;
        let d = backward(&Emulator, qkv, &attended, dout, spans, kind)?;
        Ok((attended, d))
    });
    result
}

fn kind_of(case: &Case, head_dim: usize) -> AttentionKind {
    let heads = Heads { num_heads: case.heads.0, num_kv_heads: case.heads.1, head_dim };
    AttentionKind { heads, scale: 1.0 / (head_dim as f64).sqrt(), softcap: case.softcap, window: case.window }
}

/// Checks that the error is at most twice (forward) or three times (backward) that of a plain bf16
/// implementation. Both are compared with the CPU form in f32, whose own error is a thousandth of
/// it. All orders must give the same bits.
fn as_exact_as_bf16_allows(
    head_dim: usize,
    case: &Case,
    schedules: impl IntoIterator<Item = EmulatorSchedule>,
) -> Result<()> {
    let kind = kind_of(case, head_dim);
    let (spans, rows) = spans_of(&case.lens);
    let qk = normal(1, rows, kind.heads.qk_width(), case.spread)?;
    let x = Tensor::cat(&[qk, normal(2, rows, kind.heads.kv_width(), 1.0)?], 1)?.contiguous()?;
    let x = without_gaps(&x, &spans)?;
    let dout = without_gaps(&normal(3, rows, kind.heads.q_width(), 1.0)?, &spans)?;
    let wide = x.to_dtype(DType::F32)?;
    let exact = cpu::forward(qkv_of(&wide, kind.heads), &spans, kind)?;
    let exact_d =
        cpu::backward(qkv_of(&wide, kind.heads), &exact, &dout.to_dtype(DType::F32)?, &spans, kind)?;
    let (plain, plain_d) = plain::run(&x, &dout, &spans, kind)?;
    let mut first = None;
    for schedule in schedules {
        let (attended, d) = run(schedule, &x, &dout, &spans, kind)?;
        let found = (bits(&attended.out)?, bits(&attended.lse)?, bits(&d)?);
        assert!(*first.get_or_insert(found.clone()) == found, "other bits under {schedule:?}");
        let (lse, _) = apart(&attended.lse, &exact.lse)?;
        assert!(lse < 1e-4, "log-sum-exp {lse} apart");
        for (what, times, got, exact, plain) in
            [("out", 2.0, &attended.out, &exact.out, &plain), ("gradient", 3.0, &d, &exact_d, &plain_d)]
        {
            let (ours, theirs) = (apart(got, exact)?, apart(plain, exact)?);
            assert!(
                ours.0 <= times * theirs.0 + 1e-6 && ours.1 <= times * theirs.1 + 1e-6,
                "{what}: {ours:?} apart, plain bf16 {theirs:?}"
            );
        }
    }
    Ok(())
}

/// One test per head width and case: they run in parallel, and `kernels/mutants.toml` names single
/// tests.
macro_rules! exact_for {
    ($($width:ident: $head_dim:literal),*) => {$(
        mod $width {
            exact_for!(
                $head_dim;
                one_token,
                one_key_head_for_eight,
                window_of_5,
                window_of_95_and_a_gap,
                window_of_127,
                soft_cap,
                large_scores
            );
        }
    )*};
    ($head_dim:literal; $($case:ident),*) => {$(
        #[test]
        fn $case() -> super::Result<()> {
            super::as_exact_as_bf16_allows($head_dim, &super::Case::$case(), super::schedules())
        }
    )*};
}
exact_for!(heads_of_64: 64, heads_of_80: 80, heads_of_96: 96, heads_of_128: 128, heads_of_256: 256);

proptest! {
    #![proptest_config(random::config(24))]

    /// Any heads, sequences of 1 to 3 tokens among long ones, gaps, windows and soft-caps.
    #[test]
    fn as_exact_on_random_shapes(
        head_dim in select(&HEAD_DIMS[..]),
        lens in vec(prop_oneof![2 => 1..=3_i64, 2 => 4..=140_i64, 1 => -20..=-1_i64], 1..5),
        (kv_heads, group) in select(&[(1, 1), (2, 1), (1, 2), (1, 4)][..]),
        window in option::of(2..200_usize),
        softcap in option::of(2.0..30.0_f64),
        (spread, schedule) in (0.5..3.0_f64, random::schedules()),
    ) {
        prop_assume!(lens.iter().any(|&len| len > 0));
        let case = Case { lens, heads: (kv_heads * group, kv_heads), window, softcap, spread };
        as_exact_as_bf16_allows(head_dim, &case, [schedule]).map_err(|error| TestCaseError::fail(error.to_string()))?;
    }
}

/// Returns separate operands; k and v skip the first 16 columns of their tensors.
fn cached<'a>(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor, width: usize) -> Qkv<'a> {
    let tail = |tensor| ColumnView { tensor, start: 16, len: width };
    Qkv { q: ColumnView::all(q), k: tail(k), v: tail(v) }
}

/// Queries at the end of a cache: fewer than keys, with and without window and soft-cap.
#[test]
fn queries_after_cached_keys() -> Result<()> {
    let spans = [
        Span { q_start: 0, q_len: 5, k_start: 3, k_len: 195 },
        Span { q_start: 5, q_len: 1, k_start: 210, k_len: 77 },
        Span { q_start: 6, q_len: 90, k_start: 300, k_len: 91 },
    ];
    for (head_dim, (window, softcap)) in
        HEAD_DIMS.into_iter().flat_map(|d| [(None, None), (Some(30), Some(20.0))].map(|masks| (d, masks)))
    {
        let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim };
        let kind = AttentionKind { heads, scale: 1.0 / (head_dim as f64).sqrt(), softcap, window };
        let q = normal(1, 98, heads.q_width(), 1.0)?;
        // Columns of wider rows, to detect a wrong stride.
        let (k, v) =
            (normal(2, 400, heads.kv_width() + 16, 1.0)?, normal(3, 400, heads.kv_width() + 16, 1.0)?);
        let (k_wide, v_wide, q_wide) =
            (k.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?, q.to_dtype(DType::F32)?);
        let width = heads.kv_width();
        let exact = reference::forward(cached(&q_wide, &k_wide, &v_wide, width), &spans, kind, usize::MAX)?;
        for schedule in schedules() {
            let (found, _) =
                Emulator::run(schedule, || forward(&Emulator, cached(&q, &k, &v, width), &spans, kind));
            let found = found?;
            let (out, lse) = (apart(&found.out, &exact.out)?, apart(&found.lse, &exact.lse)?);
            assert!(out.0 < 1.5e-2 && out.1 < 1e-3 && lse.0 < 1e-4, "head dim {head_dim}: {out:?}, {lse:?}");
        }
    }
    Ok(())
}

/// Shared-memory banks serve eight 16-byte chunks at once: rows of a matrix for the products, and
/// data copied in and out.
#[test]
fn no_bank_conflicts() -> Result<()> {
    for head_dim in HEAD_DIMS {
        let case = Case::new(&[131, 1, 3], (2, 1));
        let kind = kind_of(&case, head_dim);
        let (spans, rows) = spans_of(&case.lens);
        let (x, dout) =
            (normal(1, rows, kind.heads.qkv_width(), 1.0)?, normal(2, rows, kind.heads.q_width(), 1.0)?);
        let schedule = EmulatorSchedule { counts: true, ..EmulatorSchedule::default() };
        let (done, counters) = Emulator::run(schedule, || {
            let qkv = qkv_of(&x, kind.heads);
            let attended = forward(&Emulator, qkv, &spans, kind)?;
            backward(&Emulator, qkv, &attended, &dout, &spans, kind)
        });
        done?;
        assert_eq!(counters.bank_conflicts, 0, "head dim {head_dim}");
    }
    Ok(())
}

/// Returns the 32-byte sectors that one sequence of `len` tokens must read and write if no masked
/// tile is visited, without the f32 vectors.
fn least_sectors(len: usize, kind: AttentionKind, shape: HeadShape) -> usize {
    let (heads, kv_heads) = (kind.heads.num_heads, kind.heads.num_kv_heads);
    let window = kind.window.unwrap_or(len);
    let mut rows_moved = 2 * heads * len;
    for first in (0..len).step_by(shape.tile) {
        let rows = shape.tile.min(len - first);
        let keys = first + rows - (first + 1).saturating_sub(window);
        let queries = len.min(first + shape.tile - 1 + window) - first;
        rows_moved += heads * (2 * keys + 2 * rows) + heads * (2 * keys + 3 * rows);
        rows_moved += kv_heads * (shape.parts * 2 * rows + 2 * rows) + heads * shape.parts * 2 * queries;
    }
    rows_moved * kind.heads.head_dim * size_of::<bf16>() / 32
}

/// Checks that tiles outside the triangle or the window are neither read nor computed.
fn only_visible_tiles_are_visited(head_dim: usize) -> Result<()> {
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim };
    let (spans, rows) = spans_of(&[512]);
    let (x, dout) = (normal(1, rows, heads.qkv_width(), 1.0)?, normal(2, rows, heads.q_width(), 1.0)?);
    let count = |window| -> Result<u64> {
        let kind = AttentionKind { heads, scale: 0.1, softcap: None, window };
        let (done, counters) =
            Emulator::run(EmulatorSchedule { counts: true, ..EmulatorSchedule::default() }, || {
                let attended = forward(&Emulator, qkv_of(&x, heads), &spans, kind)?;
                backward(&Emulator, qkv_of(&x, heads), &attended, &dout, &spans, kind)
            });
        done?;
        // Up to a quarter more: a large host allocation may start in the middle of a sector.
        let share = counters.global_sectors as f64 / least_sectors(rows, kind, shape_of(kind)?) as f64;
        assert!((0.99..1.3).contains(&share), "window {window:?}: {share} of the least");
        Ok(counters.shared_phases)
    };
    let share = count(Some(70))? as f64 / count(None)? as f64;
    assert!(share < 0.7, "with a window {share} of the work without");
    Ok(())
}

#[test]
fn heads_of_64_visit_only_visible_tiles() -> Result<()> {
    only_visible_tiles_are_visited(64)
}

#[test]
fn heads_of_256_visit_only_visible_tiles() -> Result<()> {
    only_visible_tiles_are_visited(256)
}

#[test]
fn tiles_are_the_longest_first_and_cover_every_row() {
    let spans = [Span::sequence(0, 300), Span::sequence(304, 2), Span::sequence(306, 130)];
    let queries = query_tiles(&spans, 440, 128);
    // The last row of each tile sees 128, 256 and 300 keys; the gaps that follow see none.
    assert_eq!(
        queries,
        [
            [0, 300, 0, 300, 256],
            [0, 300, 0, 300, 128],
            [306, 130, 306, 130, 128],
            [0, 300, 0, 300, 0],
            [306, 130, 306, 130, 0],
            [304, 2, 304, 2, 0],
            [300, 4, 0, 0, 0],
            [436, 4, 0, 0, 0],
        ]
    );
    let keys = key_tiles(&spans, 440, 128);
    assert_eq!(
        keys,
        [
            [0, 300, 0, 300, 0],
            [0, 300, 0, 300, 128],
            [306, 130, 306, 130, 0],
            [0, 300, 0, 300, 256],
            [304, 2, 304, 2, 0],
            [306, 130, 306, 130, 128],
            [0, 0, 300, 4, 0],
            [0, 0, 436, 4, 0],
        ]
    );
    let cached = Span { q_start: 0, q_len: 3, k_start: 0, k_len: 200 };
    assert_eq!(query_tiles(&[cached], 3, 128), [[0, 3, 0, 200, 0]]);
    assert!(query_tiles(&[], 0, 128).is_empty());
}

/// The shared memory of every block fits the smallest card that computes in bf16 (99 KB on compute
/// capability 8.6).
#[test]
fn shared_memory_fits_every_card() {
    for dim in 0..=512 {
        assert_eq!(HeadShape::of(dim).is_some(), HEAD_DIMS.contains(&dim), "{dim}");
    }
    for shape in HEAD_DIMS.into_iter().filter_map(HeadShape::of) {
        let most = shape.forward_bytes().max(shape.backward_keys_bytes()).max(shape.backward_queries_bytes());
        assert!(most <= 99 << 10, "{shape:?}: {most}");
    }
}
