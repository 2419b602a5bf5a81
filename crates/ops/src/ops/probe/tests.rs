//! The recorded dump matches the manuals, the emulator matches every dump, and a difference is
//! named.

use super::expected::expected;
use super::launches::{Agreement, launches};
use super::{DumpedInstruction, ProbeDump};
use crate::error::Result;

/// Includes the functions, for which a GPU may leave a nearby number.
#[test]
fn the_recorded_dump_is_what_the_manuals_say() -> Result<()> {
    let recorded = ProbeDump::recorded()?;
    assert_eq!(recorded.origin, "emulator");
    let agreements: Vec<Agreement> =
        launches().into_iter().flat_map(|launch| launch.instructions).map(|one| one.agreement).collect();
    let expected = expected();
    assert_eq!((recorded.instructions.len(), agreements.len()), (expected.len(), expected.len()));
    for ((actual, wanted), agreement) in recorded.instructions.iter().zip(&expected).zip(agreements) {
        let canonical = |one: &DumpedInstruction| {
            let word = |bits: &u32| match agreement {
                Agreement::Bits => *bits,
                _ if f32::from_bits(*bits).is_nan() => 0x7fff_ffff,
                _ => *bits,
            };
            DumpedInstruction { words: one.words.iter().map(word).collect(), ..one.clone() }
        };
        assert_eq!(canonical(actual), canonical(wanted));
    }
    Ok(())
}

/// Each word identifies its source: no two lanes of an instruction that moves data hold the same
/// registers.
#[test]
fn inputs_tell_lanes_and_registers_apart() -> Result<()> {
    let recorded = ProbeDump::recorded()?;
    for name in [
        "mma_16816, columns 0 to 7 of a",
        "mma_16816, columns 8 to 15 of a",
        "mma_16816, rows of b",
        "mma_16816, sums alone",
        "ldmatrix_x4",
        "ldmatrix_x4_transposed",
        "In.load16",
        "Out.store16",
        "shuffle",
    ] {
        let one = recorded.instructions.iter().find(|one| one.name == name).unwrap();
        let mut words = one.words.clone();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), one.words.len(), "{name}");
    }
    Ok(())
}

#[test]
fn text_is_read_back() -> Result<()> {
    let recorded = ProbeDump::recorded()?;
    assert_eq!(recorded.text(), super::RECORDED);
    for bad in ["1234 zz", "[a]\n00000001 00000002\n00000003", "00000001"] {
        let refusal = ProbeDump::parse(bad).unwrap_err().to_string();
        assert!(refusal.contains("cannot read a dump of the probe"), "{refusal}");
    }
    Ok(())
}

/// Returns the differences after `change` is applied to word `at` of an instruction.
fn after(name: &str, at: usize, change: impl Fn(u32) -> u32) -> Result<Vec<String>> {
    let recorded = ProbeDump::recorded()?;
    let mut other = recorded.clone();
    let one = other.instructions.iter_mut().find(|one| one.name == name).unwrap();
    one.words[at] = change(one.words[at]);
    Ok(other.differences(&recorded))
}

#[test]
fn a_difference_is_named() -> Result<()> {
    assert_eq!(ProbeDump::recorded()?.differences(&ProbeDump::recorded()?), [""; 0]);
    assert_eq!(
        after("ldmatrix_x4", 4 * 5 + 2, |_| 0x0123_4567)?,
        ["ldmatrix_x4: lane 5, register 2 holds 0x01234567, recorded: 0x01c301c2 (1 of 128 words differ)"]
    );
    assert_eq!(
        after("mma_16816, sums alone", 3, |_| 0x3f80_0000)?,
        ["mma_16816, sums alone: lane 0, register 3 holds 0x3f800000 (1e0), recorded: 0xc2850000 (-6.65e1) \
          (1 of 128 words differ)"]
    );
    assert!(
        after("block_sum", 69, |bits| bits + 1)?[0]
            .starts_with("block_sum: lane 5 of warp 2, register 0 holds")
    );
    Ok(())
}

/// Functions may differ up to the specified error and no farther; a NaN matches any NaN, and a zero
/// has its sign.
#[test]
fn functions_may_be_off_by_what_is_specified() -> Result<()> {
    assert_eq!(after("fast_exp2", 31, |bits| bits + 3)?, [""; 0]);
    let differences = after("fast_exp2", 31, |bits| bits - 4)?;
    assert!(
        differences[0].contains(", 4 units in the last place apart (specified: at most 3)"),
        "{differences:?}"
    );
    assert_eq!(after("fast_reciprocal", 31, |bits| bits + 2)?.len(), 1);
    assert_eq!(after("fast_exp2", 9, |_| 0x7f80_dead)?, [""; 0]);
    assert_eq!(after("fast_exp2", 9, |_| 0x7f80_0000)?.len(), 1);
    assert_eq!(after("tanhf", 1, |_| 0)?.len(), 1);
    assert_eq!(after("fmaf", 31, |bits| bits + 1)?.len(), 1);
    Ok(())
}

#[test]
fn dumps_of_other_instructions_are_told() -> Result<()> {
    let recorded = ProbeDump::recorded()?;
    let mut older = recorded.clone();
    older.instructions[0].name = "another".to_owned();
    older.instructions[1].words.pop();
    let differences = recorded.differences(&older);
    assert_eq!(differences.len(), 2);
    assert!(
        differences[0].ends_with("is missing from one dump: record the older dump again"),
        "{differences:?}"
    );
    assert!(differences[1].contains("has another number of registers or threads"), "{differences:?}");
    Ok(())
}

#[cfg(feature = "kernel-emu")]
mod emulated {
    use std::fs;
    use std::path::Path;

    use candle_core::Device;

    use super::*;
    use crate::backends::gpu::emulator::{Emulator, EmulatorSchedule, Order};

    fn dump(order: Order, late_copies: bool) -> Result<ProbeDump> {
        let schedule = EmulatorSchedule { order, late_copies, counts: false };
        Ok(Emulator::run(schedule, || ProbeDump::of(&Device::Cpu, "emulator")).0?.unwrap())
    }

    /// Covers every dump in `tests/golden`: the emulator's own, and those of GPUs.
    #[test]
    fn the_emulator_leaves_what_was_recorded() -> Result<()> {
        let dumps =
            [dump(Order::Forward, false)?, dump(Order::Reverse, true)?, dump(Order::Shuffled(5), true)?];
        assert_eq!(dumps[0], dumps[1]);
        assert_eq!(dumps[0], dumps[2]);
        let mut seen = 0;
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")).unwrap() {
            let path = entry.unwrap().path();
            let recorded = ProbeDump::parse(&fs::read_to_string(&path).unwrap())?;
            assert_eq!(dumps[0].differences(&recorded), [""; 0], "{}", path.display());
            seen += 1;
        }
        assert!(seen > 0);
        Ok(())
    }

    #[test]
    fn without_kernels_there_is_no_dump() -> Result<()> {
        assert!(ProbeDump::of(&Device::Cpu, "no kernels")?.is_none());
        Ok(())
    }
}
