//! The matrix unit (AMX): eight registers of 16 rows of 64 bytes, and a loop that saturates it.
//!
//! A call multiplies 32 rows by 32 columns: four registers sum, two hold tiles of the left operand
//! and two of the right one, so that each pair of parts (left part i, right part j) is four
//! instructions between two loads.

use std::arch::asm;
use std::marker::PhantomData;

use super::register_sums::{RegisterSums, TWO_ONES};
use super::tile::{LANES, PackedFormat, Strip, Tile};

/// The operand of `ldtilecfg`.
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

/// The configured registers of one thread; dropping this releases them.
pub(super) struct TileRegisters(PhantomData<*const ()>);

impl Drop for TileRegisters {
    fn drop(&mut self) {
        // SAFETY: releases the registers only.
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

/// Loads two left tiles from part `$part`.
macro_rules! left {
    ($part:literal) => {
        load!("4", "5", "a", $part)
    };
}

/// Loads two right tiles from part `$part`.
macro_rules! right {
    ($part:literal) => {
        load!("6", "7", "b", $part)
    };
}

/// Prefetches the 16 lines from `$from` on, and advances past them.
macro_rules! fetch {
    ($from:literal) => {
        fetch!($from; "0", "64", "128", "192", "256", "320", "384", "448",
            "512", "576", "640", "704", "768", "832", "896", "960")
    };
    ($from:literal; $($line:literal),+) => {
        concat!($("prefetcht0 [{", $from, "} + ", $line, "]\n",)+ "add {", $from, "}, 1024")
    };
}

/// Loops over `$square.steps` steps: each of the given loads, with four multiplications after each
/// line. Meanwhile it prefetches tiles of the next step from the L2 cache, a kilobyte of each
/// operand per line; with three parts on both sides that covers all tiles. The sums start from
/// zero, or from the values at `$square.c` if `$square.keep`.
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

/// Addresses of the operands of 32 × 32 sums and of the sums.
struct SquareProduct {
    a: *const Tile,
    b: *const Tile,
    c: *mut f32,
    /// Bytes from row to row of the sums.
    line: usize,
    steps: usize,
    /// True to add to the present sums.
    keep: bool,
}

impl TileRegisters {
    /// Configures the registers of this thread, which must support AMX
    /// ([`super::micro_kernel::MicroKernel::open`]).
    pub(super) fn configure() -> Self {
        let config = TileConfig {
            palette: 1,
            start_row: 0,
            zero: [0; 14],
            bytes: [64; 8],
            none: [0; 8],
            rows: [16; 8],
            last: [0; 8],
        };
        // SAFETY: the processor has AMX; the configuration is palette 1's with eight registers of
        // 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        TileRegisters(PhantomData)
    }

    /// Implements [`super::micro_kernel::OpenKernel::multiply`], which has checked the arguments.
    pub(super) fn multiply(
        &self,
        left: &Strip<'_>,
        right: &Strip<'_>,
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        let (a, b, c) = (left.tiles.as_ptr(), right.tiles.as_ptr(), dst.as_mut_ptr());
        let line = stride * size_of::<f32>();
        let square = SquareProduct { a, b, c, line, steps: left.steps(), keep: accumulate };
        // SAFETY: the registers are configured on this thread, which `self` cannot leave. Each step
        // reads one step's tiles of each format, and both strips have the same number of steps; all
        // accesses to `dst` are within it.
        unsafe {
            match (left.format, right.format) {
                (PackedFormat::Bf16Parts, PackedFormat::Bf16Parts) => square!(
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
                (PackedFormat::Bf16Parts, PackedFormat::Bf16) => {
                    square!(square, 3, 1, concat!(left!("2"), right!("0")), left!("1"), left!("0"))
                }
                (PackedFormat::Bf16, PackedFormat::Bf16) => {
                    square!(square, 1, 1, concat!(left!("0"), right!("0")))
                }
                _ => unreachable!(
                    "values of one part or three, and no right ones of three beside left ones of one"
                ),
            }
        }
    }

    /// Implements [`super::micro_kernel::OpenKernel::multiply_ones`]: six registers sum, two hold
    /// ones.
    pub(super) fn multiply_ones(&self, rounds: u64) -> RegisterSums {
        /// Number of summing registers.
        const SUMS: usize = 6;
        /// Multiplications per instruction: 16 rows by 16 columns, of 32 inner elements.
        const PRODUCTS: usize = LANES * LANES * 2 * LANES;
        assert!(rounds > 0, "a loop of no rounds");
        let mut ones = Tile::ZERO;
        (0..LANES).for_each(|line| ones.line_mut(line).fill(TWO_ONES.to_bits()));
        let mut sums = [Tile::ZERO; SUMS];
        // SAFETY: the registers are configured on this thread, which `self` cannot leave; a
        // register holds one tile.
        unsafe {
            asm!(
                "tileloadd tmm6, [{ones} + {line}]", "tileloadd tmm7, [{ones} + {line}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
                "2:",
                "tdpbf16ps tmm0, tmm6, tmm7", "tdpbf16ps tmm1, tmm6, tmm7", "tdpbf16ps tmm2, tmm6, tmm7",
                "tdpbf16ps tmm3, tmm6, tmm7", "tdpbf16ps tmm4, tmm6, tmm7", "tdpbf16ps tmm5, tmm6, tmm7",
                "dec {rounds}", "jnz 2b",
                "tilestored [{sums} + {line}], tmm0", "tilestored [{sums} + {line} + 1024], tmm1",
                "tilestored [{sums} + {line} + 2048], tmm2", "tilestored [{sums} + {line} + 3072], tmm3",
                "tilestored [{sums} + {line} + 4096], tmm4", "tilestored [{sums} + {line} + 5120], tmm5",
                ones = in(reg) &raw const ones, sums = in(reg) &raw mut sums,
                rounds = inout(reg) rounds => _, line = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        let lines = sums.iter().flat_map(|tile| (0..LANES).map(|line| tile.line(line)));
        let sums = lines.flatten().map(|bits| f32::from_bits(*bits)).collect();
        RegisterSums { sums, flops: rounds * (SUMS * PRODUCTS * 2) as u64 }
    }
}
