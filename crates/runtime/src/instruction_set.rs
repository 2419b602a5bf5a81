//! Vector instructions for the CPU implementations of ops: the best that the processor has, or the
//! set in `FINETUNE_CPU`, for tests and comparisons.

use std::ffi::OsString;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Environment variable that chooses one of the processor's instruction sets.
pub const VARIABLE: &str = "FINETUNE_CPU";

/// Instruction sets, each of which includes all before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// Required by the architecture: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with bf16 products, two at a time (`VDPBF16PS`).
    Avx512Bf16,
    /// The matrix unit of newer Intel processors: tiles of bf16 (`TDPBF16PS`).
    Amx,
}

impl InstructionSet {
    /// All sets in ascending order.
    pub const ALL: [InstructionSet; 5] = [
        InstructionSet::Baseline,
        InstructionSet::Avx2,
        InstructionSet::Avx512,
        InstructionSet::Avx512Bf16,
        InstructionSet::Amx,
    ];

    /// Name of the set in `FINETUNE_CPU`.
    pub fn name(self) -> &'static str {
        match self {
            InstructionSet::Baseline => "baseline",
            InstructionSet::Avx2 => "avx2",
            InstructionSet::Avx512 => "avx512",
            InstructionSet::Avx512Bf16 => "avx512bf16",
            InstructionSet::Amx => "amx",
        }
    }

    /// The best set that this processor has and the system permits.
    pub fn detected() -> Self {
        static DETECTED: OnceLock<InstructionSet> = OnceLock::new();
        *DETECTED.get_or_init(detect)
    }

    /// The set that ops use: [`InstructionSet::detected`], or a smaller one from `FINETUNE_CPU`. A
    /// value that [`check_environment`] refuses is ignored.
    pub fn in_use() -> Self {
        static IN_USE: OnceLock<InstructionSet> = OnceLock::new();
        *IN_USE.get_or_init(|| {
            let named = std::env::var(VARIABLE).ok().and_then(|name| InstructionSet::named(&name));
            named.unwrap_or(InstructionSet::Amx).min(InstructionSet::detected())
        })
    }

    /// Names of this processor's sets, in ascending order.
    pub fn names_here() -> String {
        let here = InstructionSet::ALL.into_iter().filter(|set| *set <= InstructionSet::detected());
        here.map(InstructionSet::name).collect::<Vec<_>>().join(", ")
    }

    fn named(name: &str) -> Option<Self> {
        InstructionSet::ALL.into_iter().find(|set| set.name() == name)
    }
}

/// Refuses a value of `FINETUNE_CPU` that names no instruction set, or one that this processor
/// does not have.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] with the value and the accepted ones.
pub fn check_environment(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<()> {
    let Some(value) = lookup(VARIABLE).filter(|value| !value.is_empty()) else { return Ok(()) };
    let detected = InstructionSet::detected();
    if value.to_str().and_then(InstructionSet::named).is_some_and(|set| set <= detected) {
        return Ok(());
    }
    let shown: String = value.to_string_lossy().chars().take(80).collect();
    let accepted = InstructionSet::names_here();
    Err(Error::user(format!("cannot use {VARIABLE}"))
        .because(format!("it is `{}`; accepted on this processor: {accepted}", shown.escape_debug()))
        .hint(format!("unset {VARIABLE} to use the best one, {}", detected.name())))
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> InstructionSet {
    InstructionSet::Baseline
}

#[cfg(target_arch = "x86_64")]
fn detect() -> InstructionSet {
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        InstructionSet::Baseline
    } else if !(is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl"))
    {
        InstructionSet::Avx2
    } else if !is_x86_feature_detected!("avx512bf16") {
        InstructionSet::Avx512
    } else if !(has_matrix_unit() && is_permitted()) {
        InstructionSet::Avx512Bf16
    } else {
        InstructionSet::Amx
    }
}

#[cfg(target_arch = "x86_64")]
fn has_matrix_unit() -> bool {
    // Leaf 7: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE.
    let both = (1 << 22) | (1 << 24);
    // Newer versions of Rust declare this call safe.
    #[allow(unused_unsafe)]
    // SAFETY: every processor of the architecture has the instruction.
    let leaf = unsafe { std::arch::x86_64::__cpuid_count(7, 0) };
    leaf.edx & both == both
}

/// Requests the register state of the matrix unit from the kernel, for all threads of this process.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn is_permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` of asm/prctl.h.
    const ASK: libc::c_long = 0x1023;
    /// Number of the tile registers' state, `XFEATURE_XTILEDATA`.
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of this process; an old kernel
    // answers with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ASK, TILE_DATA) == 0 }
}

/// Other systems: the way to request the unit is unknown.
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn is_permitted() -> bool {
    false
}

/// Compiles a function of plain loops for AVX-512, AVX2 and the baseline; a call runs the one for
/// [`InstructionSet::in_use`]. All give the same bits if the loops fix their order of operations.
#[macro_export]
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($generic:ident: $bound:path),+>)? (
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn baseline $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::instruction_set::InstructionSet;
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512 $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $result)? {
                    baseline($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2 $(<$($generic: $bound),+>)? ($($arg: $type),*) $(-> $result)? {
                    baseline($($arg),*)
                }
                let set = InstructionSet::in_use();
                if set >= InstructionSet::Avx512 {
                    // SAFETY: the processor has the instructions of the set in use.
                    return unsafe { avx512($($arg),*) };
                }
                if set >= InstructionSet::Avx2 {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            baseline($($arg),*)
        }
    };
}
pub use vectorized;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCategory;

    #[test]
    fn a_set_that_is_not_here_is_refused() {
        let check =
            |value: &str| check_environment(&|name| (name == VARIABLE).then(|| OsString::from(value)));
        for set in InstructionSet::ALL {
            assert_eq!(check(set.name()).is_ok(), set <= InstructionSet::detected(), "{set:?}");
        }
        assert!(check("").is_ok());
        for value in ["AVX2", "avx2 ", "sse9", "\u{1b}[2J"] {
            let error = check(value).unwrap_err();
            assert_eq!(error.kind(), ErrorCategory::User);
            let text = error.to_string();
            assert!(
                text.contains("accepted on this processor: baseline") && !text.contains('\u{1b}'),
                "{text:?}"
            );
        }
        assert!(InstructionSet::in_use() <= InstructionSet::detected());
    }
}
