//! The results that the manuals specify for the probe's instructions, computed without the
//! emulator: fragments from the PTX ISA's formulas, sums in tree order, arithmetic by this
//! processor, functions rounded once from f64.

use half::bf16;

use super::DumpedInstruction;
use super::inputs::{self, K, LANES, MMA_CASES, MmaCase};

/// Returns the words of every instruction, in the order of a dump.
pub(super) fn expected() -> Vec<DumpedInstruction> {
    [mma(), ldmatrix(), copies(), memory(), shuffles(), conversions(), arithmetic(), functions()].concat()
}

/// Returns an instruction whose registers `of` computes for each thread.
fn threads<const R: usize>(name: &str, count: usize, of: impl Fn(usize) -> [u32; R]) -> DumpedInstruction {
    DumpedInstruction { name: name.to_owned(), registers: R, words: (0..count).flat_map(of).collect() }
}

fn lanes<const R: usize>(name: &str, of: impl Fn(usize) -> [u32; R]) -> DumpedInstruction {
    threads(name, LANES, of)
}

fn mma() -> Vec<DumpedInstruction> {
    let product = |case: &MmaCase, row: usize, n: usize| -> f64 {
        (0..K).map(|k| f64::from((case.a)(row, k)) * f64::from((case.b)(k, n))).sum()
    };
    let of = |case: &'static MmaCase| {
        // "row = groupID for c0 and c1, groupID + 8 for c2 and c3; col = threadID_in_group * 2 + (i
        // & 0x1)".
        let place = |lane: usize, i: usize| ((lane >> 2) + 8 * (i >> 1), (lane & 3) * 2 + (i & 1));
        let word = move |lane: usize, i: usize, adds: bool| {
            let (row, n) = place(lane, i);
            let before = if adds { f64::from((case.sums)(row, n)) } else { 0.0 };
            let sum = product(case, row, n) + before;
            assert_eq!(f64::from(sum as f32), sum, "{}: a sum that is rounded", case.name);
            (sum as f32).to_bits()
        };
        let all = |name: &str, adds: bool| {
            lanes(&format!("{name}, {}", case.name), |lane| [0, 1, 2, 3].map(|i| word(lane, i, adds)))
        };
        [all("mma_16816", true), all("mma_16816_first", false)]
    };
    MMA_CASES.iter().flat_map(of).collect()
}

fn ldmatrix() -> Vec<DumpedInstruction> {
    // Lane 8 m + r points to row r of matrix m. Register m of a thread holds two adjacent values of
    // row lane / 4, from column 2 (lane % 4) on; transposed, rows and columns are swapped.
    let value = |matrix: usize, row: usize, col: usize| {
        inputs::matrix_value(inputs::matrix_row(8 * matrix + row), col)
    };
    vec![
        lanes("ldmatrix_x4", |lane| {
            let (row, col) = (lane / 4, 2 * (lane % 4));
            [0, 1, 2, 3].map(|m| value(m, row, col) | value(m, row, col + 1) << 16)
        }),
        lanes("ldmatrix_x4_transposed", |lane| {
            let (row, col) = (2 * (lane % 4), lane / 4);
            [0, 1, 2, 3].map(|m| value(m, row, col) | value(m, row + 1, col) << 16)
        }),
    ]
}

fn copies() -> Vec<DumpedInstruction> {
    let copied = |lane: usize, i: usize| if inputs::is_there(lane) { inputs::memory_word(i) } else { 0 };
    vec![
        lanes("copy_async16 after copy_async_wait<1>", |lane| {
            [0, 1, 2, 3].map(|i| copied(lane, 4 * inputs::memory_place(lane) + i))
        }),
        lanes("copy_async4 by the neighbour", |lane| [copied(lane ^ 1, inputs::memory_place(lane ^ 1))]),
    ]
}

/// Returns the lane whose location is `at`.
fn lane_at(at: usize) -> usize {
    (0..LANES).find(|&lane| inputs::memory_place(lane) == at).unwrap()
}

fn memory() -> Vec<DumpedInstruction> {
    let word = inputs::memory_word;
    let place = inputs::memory_place;
    let pair =
        |i: usize| u32::from(inputs::half_value(2 * i)) | u32::from(inputs::half_value(2 * i + 1)) << 16;
    let two = |first: usize| [word(first), word(first + 1)];
    let four = |first: usize| [0, 1, 2, 3].map(|i| word(first + i));
    // The 64 words that store8 wrote, two per lane, at the lane's location.
    let stored = |i: usize| word(2 * lane_at(i / 2) + i % 2);
    vec![
        lanes("In.load", |lane| [word(place(lane))]),
        lanes("In.load4", |lane| [word(place(lane))]),
        lanes("In.load8", |lane| two(2 * place(lane))),
        lanes("In.load16", |lane| four(4 * place(lane))),
        lanes("In.offset", |lane| [word(32 + place(lane))]),
        lanes("In.load of bf16", |lane| [u32::from(inputs::half_value(place(lane)))]),
        lanes("In.load4 of bf16", |lane| [pair(place(lane))]),
        lanes("In.load8 of bf16", |lane| [0, 1].map(|i| pair(2 * place(lane) + i))),
        lanes("In.load16 of bf16", |lane| [0, 1, 2, 3].map(|i| pair(4 * place(lane) + i))),
        lanes("in_at", |lane| [word(place(lane))]),
        lanes("Out.store16", |lane| four(4 * place(lane))),
        lanes("Out.store8", |lane| two(2 * place(lane))),
        lanes("Out.store4", |lane| [word(place(lane))]),
        lanes("in_out_at", |lane| [inputs::listed_word(lane) + lane_at(lane) as u32]),
        lanes("InOut.store16", |lane| four(4 * lane_at(lane))),
        lanes("InOut.store8", |lane| two(2 * lane_at(lane))),
        lanes("InOut.store4", |lane| [word(lane_at(lane))]),
        lanes("InOut.as", |lane| [0, 1, 2, 3].map(|i| stored(4 * (lane / 2) + i))),
        lanes("InOut.store", |lane| [word(lane_at(lane))]),
        lanes("Shared.store", |lane| [word(lane_at(lane))]),
    ]
}

/// Returns the sum in every lane: neighbours 16 apart first, then 8, and so on.
fn tree_sum(mut x: Vec<f32>) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        x = (0..LANES).map(|lane| x[lane] + x[lane ^ distance]).collect();
    }
    x[0]
}

fn shuffles() -> Vec<DumpedInstruction> {
    let word = |lane: usize| inputs::coded(lane, 0);
    let number = |lane: usize| inputs::summand(lane).to_bits();
    let from = |lane: usize| inputs::shuffled_from(lane) % LANES;
    let sum = |warp: usize| tree_sum((0..LANES).map(|lane| inputs::summand(32 * warp + lane)).collect());
    let in_turn = (0..LANES).map(inputs::summand).fold(0.0, |sum, x| sum + x);
    assert_ne!(sum(0), in_turn, "another order gives the same sum");
    let largest = (0..LANES).map(inputs::summand).fold(f32::NEG_INFINITY, f32::max);
    let mut of_warps = vec![0.0; LANES];
    for (warp, of_warp) in of_warps.iter_mut().take(4).enumerate() {
        *of_warp = sum(warp);
    }
    let of_block = tree_sum(of_warps);
    vec![
        lanes("shuffle", |lane| [word(from(lane))]),
        lanes("shuffle of f32", |lane| [number(from(lane))]),
        lanes("shuffle_xor", |lane| [1, 2, 4, 8, 16].map(|mask| word(lane ^ mask))),
        lanes("shuffle_xor of f32", |lane| [1, 2, 4, 8, 16].map(|mask| number(lane ^ mask))),
        lanes("warp_sum", |_| [sum(0).to_bits()]),
        lanes("warp_max", |_| [largest.to_bits()]),
        threads("block_sum", 4 * LANES, |_| [of_block.to_bits()]),
    ]
}

/// Returns the bits of x in bf16; every NaN is the canonical one.
fn rounded(x: f32) -> u32 {
    if x.is_nan() { 0x7fff } else { u32::from(bf16::from_f32(x).to_bits()) }
}

fn conversions() -> Vec<DumpedInstruction> {
    let words = inputs::conversions();
    let word = |lane: usize, input: usize| words[LANES * input + lane];
    let of = |lane, input| rounded(f32::from_bits(word(lane, input)));
    vec![
        lanes("round_to_bf16", |lane| [of(lane, 0) | of(lane, 1) << 16]),
        lanes("nearest<bf16>", |lane| [of(lane, 1)]),
        lanes("low_half", |lane| [word(lane, 0) << 16]),
        lanes("high_half", |lane| [word(lane, 0) & 0xffff_0000]),
        lanes("widen", |lane| [word(lane, 0) << 16]),
        lanes("u32 to f32", |lane| [(word(lane, 0) as f32).to_bits()]),
        lanes("i32 to f32", |lane| [(word(lane, 0).cast_signed() as f32).to_bits()]),
    ]
}

fn arithmetic() -> Vec<DumpedInstruction> {
    let words = inputs::arithmetic();
    let input = |lane: usize, i: usize| f32::from_bits(words[LANES * i + lane]);
    let operands = |lane| [input(lane, 0), input(lane, 1), input(lane, 2)];
    let positive = |lane| [f64::from(input(lane, 3)), f64::from(input(lane, 4))];
    let contracted = |lane| {
        let [a, b, c] = operands(lane);
        a.mul_add(b, c).to_bits() == (a * b + c).to_bits()
    };
    assert!(!(0..LANES).all(contracted), "a contraction would not be seen");
    let of_f32 = |name: &str, of: fn([f32; 3]) -> f32| lanes(name, |lane| [of(operands(lane)).to_bits()]);
    let of_f64 = |name: &str, of: fn([f64; 2]) -> f64| {
        lanes(name, |lane| {
            let bits = of(positive(lane)).to_bits();
            [bits as u32, (bits >> 32) as u32]
        })
    };
    vec![
        of_f32("fmaf", |[a, b, c]| a.mul_add(b, c)),
        of_f32("product and sum", |[a, b, c]| a * b + c),
        of_f32("quotient", |[a, b, _]| a / b),
        of_f32("sqrtf", |[a, _, _]| a.sqrt()),
        of_f32("1 / sqrtf", |[a, _, _]| 1.0 / a.sqrt()),
        of_f32("fmaxf", |[a, b, _]| a.max(b)),
        of_f32("ceilf", |[a, _, _]| a.ceil()),
        lanes("f64 to f32", |lane| {
            let [x, y] = positive(lane);
            [((x / y) as f32).to_bits()]
        }),
        of_f64("quotient of f64", |[x, y]| x / y),
        of_f64("product and sum of f64", |[x, y]| x / y * x + y),
        of_f64("sqrt of f64", |[x, _]| x.sqrt()),
    ]
}

/// Returns zero for a subnormal number, as .ftz flushes inputs and results.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

fn functions() -> Vec<DumpedInstruction> {
    let words = inputs::functions();
    let of = |input: usize, name: &str, of: fn(f32) -> f32| {
        lanes(name, |lane| [of(f32::from_bits(words[LANES * input + lane])).to_bits()])
    };
    vec![
        of(0, "fast_exp2", |x| flushed(f64::from(flushed(x)).exp2() as f32)),
        of(1, "fast_reciprocal", |x| flushed(f64::from(flushed(x)).recip() as f32)),
        of(2, "rsqrtf", |x| f64::from(x).sqrt().recip() as f32),
        of(3, "expf", |x| f64::from(x).exp() as f32),
        of(4, "logf", |x| f64::from(x).ln() as f32),
        of(5, "tanhf", |x| f64::from(x).tanh() as f32),
    ]
}
