//! Inputs of the probe's instructions: values that identify the source of each word of a result,
//! and values at the edges of arithmetic.

use half::bf16;

/// Lanes of a warp.
pub(super) const LANES: usize = 32;

/// Dimensions of mma: `a` is 16 x K, `b` K x N, the sums 16 x N.
pub(super) const K: usize = 16;
const N: usize = 8;

/// A position in a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) row: usize,
    pub(super) col: usize,
}

/// Returns the position of value `i` of 8 of a lane's `a`: PTX ISA, "Matrix Fragments for
/// mma.m16n8k16 with floating point type", which calls `lane / 4` the group and `lane % 4` the
/// thread in it. Two values share a register, the first in its low half.
pub(super) fn place_in_a(lane: usize, i: usize) -> Element {
    let lower = matches!(i, 0 | 1 | 4 | 5);
    let row = if lower { lane / 4 } else { lane / 4 + 8 };
    let col = lane % 4 * 2 + (i & 1);
    Element { row, col: if i < 4 { col } else { col + 8 } }
}

/// Returns the position of value `i` of 4 of a lane's `b`.
pub(super) fn place_in_b(lane: usize, i: usize) -> Element {
    let row = lane % 4 * 2 + (i & 1);
    Element { row: if i < 2 { row } else { row + 8 }, col: lane / 4 }
}

/// Returns the position of value `i` of 4 of a lane's sums, one register each.
pub(super) fn place_in_sums(lane: usize, i: usize) -> Element {
    let row = if i < 2 { lane / 4 } else { lane / 4 + 8 };
    Element { row, col: lane % 4 * 2 + (i & 1) }
}

/// Operands of one product. All sums are integers below 2^24, so no order of addition rounds.
pub(super) struct MmaCase {
    pub(super) name: &'static str,
    pub(super) a: fn(usize, usize) -> f32,
    pub(super) b: fn(usize, usize) -> f32,
    pub(super) sums: fn(usize, usize) -> f32,
}

fn one_where(condition: bool) -> f32 {
    f32::from(u8::from(condition))
}

/// Returns a distinct integer up to 256, exact in bf16, for every element of `a`.
fn number_in_a(row: usize, k: usize) -> f32 {
    (1 + row * K + k) as f32
}

fn zero(_: usize, _: usize) -> f32 {
    0.0
}

/// Each element of an operand reaches a sum alone, then all of them do.
pub(super) static MMA_CASES: [MmaCase; 5] = [
    MmaCase { name: "columns 0 to 7 of a", a: number_in_a, b: |k, n| one_where(k == n), sums: zero },
    MmaCase {
        name: "columns 8 to 15 of a",
        a: |row, k| -number_in_a(row, k),
        b: |k, n| one_where(k == n + 8),
        sums: zero,
    },
    MmaCase {
        name: "rows of b",
        a: |row, k| one_where(k == row),
        b: |k, n| (1 + k * N + n) as f32,
        sums: zero,
    },
    MmaCase {
        name: "sums alone",
        a: zero,
        b: |k, n| (1 + k * N + n) as f32,
        sums: |row, n| -((1 + row * N + n) as f32) - 0.5,
    },
    MmaCase {
        name: "all of them",
        a: |row, k| (1 + (7 * row + 3 * k) % 31) as f32,
        b: |k, n| (1 + (5 * k + 11 * n) % 29) as f32,
        sums: |row, n| (4096 + 256 * row + n) as f32,
    },
];

/// Packs two bf16 numbers into a register.
fn packed(low: f32, high: f32) -> u32 {
    let bits = |x| u32::from(bf16::from_f32(x).to_bits());
    bits(low) | bits(high) << 16
}

/// Returns for each case and lane 4 registers of a, 2 of b, 4 of sums.
pub(super) fn mma() -> Vec<u32> {
    let mut words = Vec::new();
    for case in &MMA_CASES {
        for lane in 0..LANES {
            let at = |of: fn(usize, usize) -> f32, element: Element| of(element.row, element.col);
            for r in 0..4 {
                let [low, high] = [0, 1].map(|half| at(case.a, place_in_a(lane, 2 * r + half)));
                words.push(packed(low, high));
            }
            for r in 0..2 {
                let [low, high] = [0, 1].map(|half| at(case.b, place_in_b(lane, 2 * r + half)));
                words.push(packed(low, high));
            }
            words.extend((0..4).map(|i| at(case.sums, place_in_sums(lane, i)).to_bits()));
        }
    }
    words
}

/// Returns the 16-bit value in row `row` of 32 and column `col` of 8 of the memory that ldmatrix
/// reads.
pub(super) fn matrix_value(row: usize, col: usize) -> u32 {
    (0x100 + 8 * row + col) as u32
}

/// Returns the row whose address a lane gives to ldmatrix: distinct for each lane, and not in lane
/// order.
pub(super) fn matrix_row(lane: usize) -> usize {
    (5 * lane + 3) % LANES
}

/// Returns memory for ldmatrix, then the lanes' rows.
pub(super) fn ldmatrix() -> Vec<u32> {
    let pair = |i: usize| matrix_value(i / 4, i % 4 * 2) | matrix_value(i / 4, i % 4 * 2 + 1) << 16;
    (0..4 * LANES).map(pair).chain((0..LANES).map(|lane| matrix_row(lane) as u32)).collect()
}

/// Returns word `i` of memory that is copied or loaded.
pub(super) fn memory_word(i: usize) -> u32 {
    0xc0de_0000 + i as u32
}

/// Returns the location that a lane copies from or loads.
pub(super) fn memory_place(lane: usize) -> usize {
    (7 * lane + 5) % LANES
}

/// Returns true if a lane's asynchronous copy has a source.
pub(super) fn is_there(lane: usize) -> bool {
    !lane.is_multiple_of(3)
}

/// Returns 128 words of memory, then the lanes' locations.
pub(super) fn memory() -> Vec<u32> {
    (0..4 * LANES).map(memory_word).chain((0..LANES).map(|lane| memory_place(lane) as u32)).collect()
}

/// Returns the words of [`memory`], then 1 for each lane whose copy has a source, else 0.
pub(super) fn copies() -> Vec<u32> {
    let flags = (0..LANES).map(|lane| u32::from(is_there(lane)));
    memory().into_iter().chain(flags).collect()
}

/// Returns value `i` of 256 16-bit values in memory.
pub(super) fn half_value(i: usize) -> u16 {
    0x1000 + i as u16
}

/// Returns word `i` of the 32 behind an address in a table.
pub(super) fn listed_word(i: usize) -> u32 {
    0xad00_0000 + 100 * i as u32
}

/// Returns a pseudo-random word, unique to this lane and input.
pub(super) fn coded(lane: usize, input: usize) -> u32 {
    let mixed = (lane as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (input as u64 + 1).wrapping_mul(0xd6e8_feb8_6659_fd93);
    ((mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
}

/// Returns a number from `low` to `high` for each lane and input.
fn between(low: f32, high: f32, lane: usize, input: usize) -> f32 {
    low + (high - low) * (coded(lane, input) >> 8) as f32 / 16_777_216.0
}

/// Returns the lane that another reads from; shuffles interpret it modulo 32.
pub(super) fn shuffled_from(lane: usize) -> usize {
    (11 * lane + 7) % LANES + if lane % 4 == 1 { LANES } else { 0 }
}

/// Returns a thread's number in a sum over warps, chosen so that another order of addition gives
/// other bits.
pub(super) fn summand(thread: usize) -> f32 {
    const SCALES: [f32; 7] = [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0];
    between(-1.0, 1.0, thread, 2) * SCALES[thread % 7]
}

/// Returns for each lane a word, a lane to read from, and an f32 number.
pub(super) fn shuffles() -> Vec<u32> {
    let words = (0..LANES).map(|lane| coded(lane, 0));
    let from = (0..LANES).map(|lane| shuffled_from(lane) as u32);
    words.chain(from).chain((0..LANES).map(|lane| summand(lane).to_bits())).collect()
}

/// Returns an f32 number for each of 128 threads.
pub(super) fn block_sum() -> Vec<u32> {
    (0..4 * LANES).map(|thread| summand(thread).to_bits()).collect()
}

/// f32 numbers to round to bf16, for each lane's first and second half: ties to an even and to an
/// odd neighbour and values beside them, infinities, quiet and signaling NaN, overflow, subnormal
/// numbers.
const ROUNDED: [u32; 46] = [
    0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x3f808000, 0x3f818000, 0xbf808000, 0xbf818000,
    0x3f807fff, 0x3f808001, 0x3f817fff, 0x3f818001, 0x3fff8000, 0x3fff7fff, 0xbfff8000, 0x40ffffff,
    0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff,
    0x7fa5a5a5, 0xffbfffff, 0x7f7fffff, 0xff7fffff, 0x7f7f7fff, 0x7f7f8000, 0xff7f8000, 0x7f7e8000,
    0x00000001, 0x80000001, 0x00008000, 0x80008000, 0x00008001, 0x00018000, 0x80018000, 0x0000ffff,
    0x007f8000, 0x007f7fff, 0x007fffff, 0x807fffff, 0x00800000, 0x00808000,
];

/// Returns two f32 numbers for each lane.
pub(super) fn conversions() -> Vec<u32> {
    let filled = (ROUNDED.len()..2 * LANES).map(|i| coded(i, 3) & 0xbfff_ffff);
    ROUNDED.into_iter().chain(filled).collect()
}

/// Operands a, b and c that distinguish arithmetic: a product and a sum rounded once or twice,
/// intermediate overflow, NaN, subnormal numbers.
const OPERANDS: [[f32; 3]; 14] = [
    [1.000_244_3, 1.000_244_3, -1.0],
    [1.000_244_3, -1.000_244_3, 1.000_488_6],
    [f32::MAX, 2.0, -f32::MAX],
    [f32::INFINITY, 0.0, 1.0],
    [0.0, 0.0, 1.0],
    [1.0, 0.0, f32::INFINITY],
    [f32::NAN, 3.0, 4.0],
    [-1.0, 7.0, f32::NEG_INFINITY],
    [f32::MIN_POSITIVE, 0.5, 1e-45],
    [f32::MIN_POSITIVE, 3.0, -1e-40],
    [3e-42, 1e-3, 5e-44],
    [-2.5, 1e38, 1e38],
    [-0.5, -0.5, 0.75],
    [16_777_215.0, 16_777_215.0, -1.0],
];

/// Returns for each lane a, b and c, then x and y.
pub(super) fn arithmetic() -> Vec<u32> {
    let of = |input: usize| {
        let given = OPERANDS.into_iter().map(move |operands| operands[input]);
        let filled = (OPERANDS.len()..LANES).map(move |lane| between(0.001, 1000.0, lane, 4 + input));
        given.chain(filled).map(f32::to_bits)
    };
    let positive = |input: usize| (0..LANES).map(move |lane| between(1e-3, 1e3, lane, input).to_bits());
    (0..3).flat_map(of).chain([7, 8].into_iter().flat_map(positive)).collect()
}

/// A function's special arguments, and the range of the others.
struct Arguments {
    special: &'static [f32],
    low: f32,
    high: f32,
}

const INF: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;
const MAX: f32 = f32::MAX;

/// A subnormal number.
const TINY: f32 = 1e-40;

/// Arguments of fast_exp2, fast_reciprocal, rsqrtf, expf, logf and tanhf. No exact result is
/// adjacent to a power of two below which results flush to zero, and no nonzero result is
/// subnormal.
static ARGUMENTS: [Arguments; 6] = [
    Arguments {
        special: &[
            0.0, -0.0, TINY, -TINY, 1.0, -1.0, 10.0, INF, -INF, NAN, 128.0, 200.0, -127.5, -150.0, -300.0,
            127.5,
        ],
        low: -30.0,
        high: 30.0,
    },
    Arguments {
        special: &[
            0.0, -0.0, TINY, -TINY, 1.0, -1.0, 2.0, 3.0, INF, -INF, NAN, 1e38, -1e38, MAX, 1e-37, -7.0,
        ],
        low: 0.01,
        high: 100.0,
    },
    Arguments { special: &[0.0, TINY, 1.0, 4.0, 0.25, INF, NAN, -1.0, -INF, 1e30], low: 0.01, high: 100.0 },
    Arguments {
        special: &[0.0, -0.0, TINY, 1.0, -1.0, INF, -INF, NAN, 89.0, 1000.0, -110.0, -1000.0, 88.5, -87.0],
        low: -20.0,
        high: 20.0,
    },
    Arguments { special: &[0.0, 1.0, TINY, 2.0, INF, NAN, -1.0, -INF, MAX], low: 0.01, high: 100.0 },
    // Arguments for which the C library's tanhf, used by the emulator, is correctly rounded.
    Arguments {
        special: &[
            0.0, -0.0, INF, -INF, NAN, 20.0, -20.0, 1e-5, -0.5, 0.55, 0.17, -0.28, 0.39, -0.61, 0.72, -0.77,
            0.88, -0.94, 1.04, -1.16, 1.27, -1.43, 1.6, -1.82, 2.04, -2.2, 2.53, -2.75, 3.03, -3.3, 3.63,
            -4.13,
        ],
        low: 0.0,
        high: 0.0,
    },
];

/// Returns the argument of each lane for each function in turn.
pub(super) fn functions() -> Vec<u32> {
    let of = |(input, arguments): (usize, &'static Arguments)| {
        let filled = (arguments.special.len()..LANES)
            .map(move |lane| between(arguments.low, arguments.high, lane, 9 + input));
        arguments.special.iter().copied().chain(filled).map(f32::to_bits)
    };
    ARGUMENTS.iter().enumerate().flat_map(of).collect()
}
