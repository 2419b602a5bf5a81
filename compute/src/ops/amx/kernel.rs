//! The unit itself: eight registers of 16 rows of 64 bytes, and the loop that keeps it busy.
//!
//! A call multiplies 32 rows by 32 columns: four registers sum, two hold tiles of the left operand and two of the right
//! one, so that each pair of parts (left part i, right part j) is four instructions between two loads.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use super::pack::{self, AmxTile, PackSource};
use crate::ops::mat_view::{OperandRole, as_f32_mut, is_f32};
use crate::runtime::cpu_tensor::FloatElement;

/// Rows and columns of a call: two tiles each.
pub(super) const PAIR: usize = 32;

/// Says that the unit is there and that this process may use it.
#[derive(Clone, Copy)]
pub(crate) struct Amx {
    /// The processor rounds to bf16 in one instruction (AVX512-BF16).
    rounds: bool,
}

impl Amx {
    /// None where the processor lacks it or the kernel does not give it.
    pub(crate) fn here() -> Option<Amx> {
        static HERE: OnceLock<Option<Amx>> = OnceLock::new();
        let look =
            || (has_unit() && is_permitted()).then(|| Amx { rounds: is_x86_feature_detected!("avx512bf16") });
        *HERE.get_or_init(look)
    }

    /// Sets the registers up on this thread until the result is dropped. One at a time on a thread.
    pub(crate) fn open(self) -> Unit {
        let config = TileConfig {
            palette: 1,
            start_row: 0,
            zero: [0; 14],
            bytes: [64; 8],
            none: [0; 8],
            rows: [16; 8],
            last: [0; 8],
        };
        // SAFETY: the unit is there; the configuration is palette 1's with eight registers of 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Unit(PhantomData)
    }

    /// Packs by [`pack::pack`] with this unit's instructions.
    pub(super) fn pack(
        self,
        tiles: &mut [AmxTile],
        from: PackSource<'_>,
        outer: Range<usize>,
        inner: usize,
        role: OperandRole,
    ) {
        // SAFETY: a processor with the unit has AVX-512 (`has_unit`).
        unsafe { pack::pack(tiles, from, outer, inner, role) }
    }

    /// `dst[i * stride + j] = [itself +] alpha · square[i][j]` for `i < height`, `j < width`.
    pub(super) fn add<D: FloatElement>(
        self,
        dst: &mut [D],
        stride: usize,
        square: &Accumulator,
        (height, width): (usize, usize),
        alpha: f32,
        accumulate: bool,
    ) {
        let is_whole = width == PAIR && (is_f32::<D>() || self.rounds);
        assert!(width <= PAIR && dst.len() >= (height.max(1) - 1) * stride + width);
        for (dst, values) in dst.chunks_mut(stride).zip(&square.0).take(height) {
            // SAFETY: as above; `rounds` says that the last instructions are there.
            unsafe {
                match (is_whole, as_f32_mut(dst)) {
                    (true, Some(dst)) => add_line(dst, values, alpha, accumulate),
                    (true, None) => add_line_bf16(dst, values, alpha, accumulate),
                    (false, _) => add_row(&mut dst[..width], &values[..width], alpha, accumulate),
                }
            };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn add_row<D: FloatElement>(dst: &mut [D], values: &[f32], alpha: f32, accumulate: bool) {
    for (dst, value) in dst.iter_mut().zip(values) {
        *dst = D::nearest(if accumulate { dst.widen() + alpha * value } else { alpha * value });
    }
}

/// As [`add_row`] for a whole line.
#[target_feature(enable = "avx512f,avx512bw")]
fn add_line(dst: &mut [f32], values: &[f32; PAIR], alpha: f32, accumulate: bool) {
    let alpha = _mm512_set1_ps(alpha);
    for (dst, values) in dst[..PAIR].chunks_exact_mut(16).zip(values.chunks_exact(16)) {
        // SAFETY: sixteen values each.
        unsafe {
            let value = _mm512_mul_ps(alpha, _mm512_loadu_ps(values.as_ptr()));
            let value = if accumulate { _mm512_add_ps(_mm512_loadu_ps(dst.as_ptr()), value) } else { value };
            _mm512_storeu_ps(dst.as_mut_ptr(), value);
        }
    }
}

/// As [`add_row`] for a whole line of bf16; what is below 2⁻¹²⁶ becomes zero.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn add_line_bf16<D: FloatElement>(dst: &mut [D], values: &[f32; PAIR], alpha: f32, accumulate: bool) {
    assert!(!is_f32::<D>());
    let dst = dst[..PAIR].as_mut_ptr().cast::<__m512i>();
    let alpha = _mm512_set1_ps(alpha);
    // SAFETY: `FloatElement` is implemented for f32 and bf16 alone, and D is not f32: 32 of them are 64 bytes, as there are.
    // 16 of the 32 values each.
    unsafe {
        let mut low = _mm512_mul_ps(alpha, _mm512_loadu_ps(values.as_ptr()));
        let mut high = _mm512_mul_ps(alpha, _mm512_loadu_ps(values.as_ptr().add(16)));
        if accumulate {
            let there = _mm512_loadu_si512(dst);
            let widened =
                |half: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
            low = _mm512_add_ps(widened(_mm512_castsi512_si256(there)), low);
            high = _mm512_add_ps(widened(_mm512_extracti64x4_epi64::<1>(there)), high);
        }
        // Two vectors of bits: the type has no cast of its own.
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
        _mm512_storeu_si512(dst, rounded);
    }
}

fn has_unit() -> bool {
    // Leaf 7: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE.
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    let both = (1 << 22) | (1 << 24);
    leaf.edx & both == both && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}

/// Asks the kernel for the registers' state, for all threads of this process.
fn is_permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` of asm/prctl.h.
    const ASK: libc::c_long = 0x1023;
    /// The number of the tile registers' state, `XFEATURE_XTILEDATA`.
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours; an old kernel answers with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ASK, TILE_DATA) == 0 }
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    zero: [u8; 14],
    bytes: [u16; 8],
    none: [u16; 8],
    rows: [u8; 8],
    last: [u8; 8],
}

/// 32 × 32 sums.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct Accumulator([[f32; PAIR]; PAIR]);

/// The registers, set up on one thread.
pub(crate) struct Unit(PhantomData<*const ()>);

impl Drop for Unit {
    fn drop(&mut self) {
        // SAFETY: sets the registers back to unused.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

macro_rules! load {
    ($first:literal, $second:literal, $from:literal, $part:literal) => {
        concat!(
            "tileloadd tmm",
            $first,
            ", [{",
            $from,
            "} + {line} + 2048*",
            $part,
            "]\n",
            "tileloadd tmm",
            $second,
            ", [{",
            $from,
            "} + {line} + 2048*",
            $part,
            " + 1024]\n",
        )
    };
}

/// Two left tiles from part `$part`.
macro_rules! left {
    ($part:literal) => {
        load!("4", "5", "a", $part)
    };
}

/// Two right tiles from part `$part`.
macro_rules! right {
    ($part:literal) => {
        load!("6", "7", "b", $part)
    };
}

/// Asks for the 16 lines from `$from` on, and goes past them.
macro_rules! fetch {
    ($from:literal) => {
        fetch!($from; "0", "64", "128", "192", "256", "320", "384", "448",
            "512", "576", "640", "704", "768", "832", "896", "960")
    };
    ($from:literal; $($line:literal),+) => {
        concat!($("prefetcht0 [{", $from, "} + ", $line, "]\n",)+ "add {", $from, "}, 1024")
    };
}

/// A loop of `$square.steps` steps, each of the given loads with four multiplications after each line. Tiles of the next step,
/// which lie in the L2 cache, are asked for meanwhile: a kilobyte of each operand a line, all of them where both have
/// three parts. The sums start from zero, or from what is at `$square.c` if `$square.keep`.
macro_rules! square {
    ($square:expr, $a_parts:literal, $b_parts:literal, $($loads:expr),+) => {
        asm!(
            "test {keep:e}, {keep:e}", "jz 3f",
            "tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm1, [{c} + {c_line} + 64]",
            "tileloadd tmm2, [{c_low} + {c_line}]", "tileloadd tmm3, [{c_low} + {c_line} + 64]",
            "jmp 2f",
            "3:",
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            $(
                $loads,
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                fetch!("a_next"),
                "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                fetch!("b_next"),
            )+
            concat!("add {a}, 2048*", $a_parts), concat!("add {b}, 2048*", $b_parts),
            concat!("lea {a_next}, [{a} + 2048*", $a_parts, "]"),
            concat!("lea {b_next}, [{b} + 2048*", $b_parts, "]"),
            "dec {steps}", "jnz 2b",
            "tilestored [{c} + {c_line}], tmm0", "tilestored [{c} + {c_line} + 64], tmm1",
            "tilestored [{c_low} + {c_line}], tmm2", "tilestored [{c_low} + {c_line} + 64], tmm3",
            a = inout(reg) $square.a => _, b = inout(reg) $square.b => _, steps = inout(reg) $square.steps => _,
            a_next = inout(reg) $square.a.wrapping_byte_add(2048 * $a_parts) => _,
            b_next = inout(reg) $square.b.wrapping_byte_add(2048 * $b_parts) => _,
            c = in(reg) $square.c, c_low = in(reg) $square.c.wrapping_byte_add(16 * $square.line), c_line = in(reg) $square.line,
            keep = in(reg) u32::from($square.keep),
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Where the operands of 32 × 32 sums and the sums are.
struct SquareProduct {
    a: *const AmxTile,
    b: *const AmxTile,
    c: *mut f32,
    /// Bytes from row to row of the sums.
    line: usize,
    steps: usize,
    /// Add to what is there.
    keep: bool,
}

impl Unit {
    /// `square = left · right`, each as [`pack::pack`] lays it out, in `planes` parts. The smallest products come first.
    pub(super) fn multiply(
        &self,
        left: &[AmxTile],
        right: &[AmxTile],
        planes: (usize, usize),
        square: &mut Accumulator,
    ) {
        self.multiply_into(left, right, planes, square.0.as_flattened_mut(), PAIR, false);
    }

    /// `square += left · right`.
    pub(super) fn multiply_more(
        &self,
        left: &[AmxTile],
        right: &[AmxTile],
        planes: (usize, usize),
        square: &mut Accumulator,
    ) {
        self.multiply_into(left, right, planes, square.0.as_flattened_mut(), PAIR, true);
    }

    /// `dst = [dst +] left · right` for 32 rows of 32 sums, `stride` elements from row to row.
    pub(super) fn multiply_into(
        &self,
        left: &[AmxTile],
        right: &[AmxTile],
        planes: (usize, usize),
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        let steps = left.len() / (2 * planes.0);
        assert!(steps > 0 && left.len() == steps * 2 * planes.0 && right.len() == steps * 2 * planes.1);
        assert!(stride >= PAIR && dst.len() >= (PAIR - 1) * stride + PAIR);
        let (a, b, c) = (left.as_ptr(), right.as_ptr(), dst.as_mut_ptr());
        let square = SquareProduct { a, b, c, line: stride * size_of::<f32>(), steps, keep: accumulate };
        // SAFETY: the registers are set up on this thread, which `self` cannot leave. Each step reads 2 · planes tiles
        // of each operand, as many as the first assertion says there are; the second says that `dst` holds what is
        // read and written there.
        unsafe {
            match planes {
                (3, 3) => square!(
                    square,
                    3,
                    3,
                    concat!(left!("0"), right!("2")),
                    right!("1"),
                    left!("1"),
                    right!("0"),
                    left!("2"),
                    left!("0")
                ),
                (3, 1) => {
                    square!(square, 3, 1, concat!(left!("2"), right!("0")), left!("1"), left!("0"))
                }
                (1, 1) => square!(square, 1, 1, concat!(left!("0"), right!("0"))),
                _ => unreachable!(
                    "values of one part or three, and no right ones of three beside left ones of one"
                ),
            }
        }
    }
}
