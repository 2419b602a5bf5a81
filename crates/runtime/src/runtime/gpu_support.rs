//! Requirements of this binary on a GPU and its driver: driver version, code for the GPU's compute
//! capability, bf16.

#![cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a build for the CPU meets no GPU"))]

use candle_core::DType;

use crate::error::{Error, Result};

/// A GPU as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Number of the GPU for `--gpus`.
    pub index: usize,
    /// Model name, such as "NVIDIA H200".
    pub name: String,
    /// Size of its memory in bytes.
    pub total_bytes: u64,
    /// Compute capability, major and minor: (9, 0) is Hopper.
    pub compute_capability: (i32, i32),
    /// True if its driver has memory pools, which allocate and free in the order of a stream.
    pub has_pools: bool,
}

/// Lowest compute capability that computes in bf16, for which this project's kernels are compiled.
pub(super) const AMPERE: (i32, i32) = (8, 0);

/// Lowest compute capability that multiplies in fp8.
const ADA: (i32, i32) = (8, 9);

/// Lowest compute capability for which CUDA 13 compiles.
const TURING: (i32, i32) = (7, 5);

/// GPUs that run this project's kernels, as `crates/backends/build.rs` compiles them.
pub const KERNELS_RUN_ON: &str = "compute capability 8.0 and newer";

/// Hint for a GPU that runs none of this project's kernels, in any build.
pub const NEWER_GPU: &str =
    "use a GPU of compute capability 8.0 or newer, or train on the CPU with `--ranks 1`";

/// Releases of the driver that the builds need, for hints.
pub(super) const DRIVERS: &str =
    "the build for CUDA 13 needs release 580 or newer, that for CUDA 12 needs release 550 or newer";

/// A version in the numbering of the driver and CUDA: 13000 is 13.0.
pub(super) fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Refuses a driver that supports only an older CUDA than this build.
///
/// # Errors
/// User error with both versions.
pub(super) fn check_driver(driver: i32, built_with: i32) -> Result<()> {
    if driver >= built_with {
        return Ok(());
    }
    let (driver, needed) = (version(driver), version(built_with));
    let compat = format!("cuda-compat-{}", needed.replace('.', "-"));
    Err(Error::user("the NVIDIA driver is too old")
        .because(format!("it supports CUDA up to {driver}; this binary needs CUDA {needed}"))
        .hint(format!(
            "install a newer driver ({DRIVERS}); `nvidia-smi` shows the installed one. On a data-centre GPU, NVIDIA's \
             package {compat} is enough"
        )))
}

/// Target of PTX in its `.target` line: `sm_80`.
fn ptx_target(ptx: &str) -> Option<&str> {
    let line = ptx.lines().find_map(|line| line.trim().strip_prefix(".target"))?;
    line.split(',').next().map(str::trim)
}

/// Returns true if PTX for `target` runs on this compute capability; none if the target is no `sm_`
/// number. `sm_90` runs on 9.0 and newer, `sm_90a` only on 9.0, `sm_100f` on its family (CUDA C++
/// Programming Guide, "Feature Availability").
fn runs_on(target: &str, (major, minor): (i32, i32)) -> Option<bool> {
    let number = target.strip_prefix("sm_")?;
    let digits = number.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let least: i32 = digits.parse().ok()?;
    let own = 10 * major + minor;
    match &number[digits.len()..] {
        "" => Some(own >= least),
        "a" => Some(own == least),
        "f" => Some(own >= least && major == least / 10),
        _ => None,
    }
}

/// Refuses a GPU that cannot run the tensor operations in `ptx`.
///
/// # Errors
/// User error with the GPU's compute capability and those that the binary has code for.
pub(super) fn check_code(gpu: &Gpu, ptx: &str) -> Result<()> {
    let Some(target) = ptx_target(ptx) else { return Ok(()) };
    if runs_on(target, gpu.compute_capability) != Some(false) {
        return Ok(());
    }
    let (major, minor) = gpu.compute_capability;
    let refused = Error::user(format!("cannot use GPU {}", gpu.index))
        .because(format!("the {} has compute capability {major}.{minor}", gpu.name))
        .because(format!("this binary has tensor operations for {target} and kernels for {KERNELS_RUN_ON}"));
    let build = format!("`CUDA_COMPUTE_CAP={major}{minor} cargo build --release --features cuda`");
    Err(if gpu.compute_capability < TURING {
        refused.because("finetune is built for compute capability 7.5 and newer").hint(NEWER_GPU)
    } else if gpu.compute_capability < AMPERE {
        refused
            .hint(format!("{NEWER_GPU}; a binary of {build} computes in f32 without those kernels, slowly"))
    } else {
        refused.hint(format!("build it for that GPU: {build}"))
    })
}

/// Refuses a GPU whose driver has no memory pools. Without them every free waits for all kernels.
///
/// # Errors
/// User error with the GPU's name.
pub(super) fn check_pools(gpu: &Gpu) -> Result<()> {
    if gpu.has_pools {
        return Ok(());
    }
    Err(Error::user(format!("cannot use GPU {}", gpu.index))
        .because(format!("the driver of the {} offers no memory pools, as with some vGPU profiles", gpu.name))
        .because("without them every free waits for the GPU, and a step takes many times longer")
        .hint("use a vGPU profile with unified memory or a whole GPU, or train on the CPU with `--ranks 1`"))
}

/// Refuses bf16 on a GPU that does not support it.
///
/// # Errors
/// User error with the GPU's compute capability.
pub(super) fn check_bf16(gpu: &Gpu, dtype: DType) -> Result<()> {
    if dtype != DType::BF16 || gpu.compute_capability >= AMPERE {
        return Ok(());
    }
    let (major, minor) = gpu.compute_capability;
    Err(Error::user(format!("cannot compute in bf16 on GPU {}", gpu.index))
        .because(format!("the {} has compute capability {major}.{minor}; bf16 needs 8.0", gpu.name))
        .hint("compute in f32 with `--set model.dtype=f32`, or on the CPU with `CUDA_VISIBLE_DEVICES=`"))
}

/// Refuses products in fp8 on a GPU that does not support them.
///
/// # Errors
/// User error with the GPU's compute capability.
#[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code, reason = "without GPUs none is checked"))]
pub(super) fn check_fp8(gpu: &Gpu) -> Result<()> {
    check_fp8_of(&gpu.name, &format!("GPU {}", gpu.index), gpu.compute_capability)
}

/// Refuses products in fp8 on `device`, a GPU called `name`, if its compute capability, major and
/// minor, has none.
///
/// # Errors
/// User error with the compute capability.
pub fn check_fp8_of(name: &str, device: &str, (major, minor): (i32, i32)) -> Result<()> {
    if (major, minor) >= ADA {
        return Ok(());
    }
    let what = "cannot multiply the frozen weights in fp8 (`train.base_products`)";
    Err(Error::user(format!("{what} on {device}"))
        .because(format!("the {name} has compute capability {major}.{minor}; fp8 needs 8.9"))
        .hint("remove `base_products`: products are then in bf16"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(compute_capability: (i32, i32)) -> Gpu {
        Gpu { index: 2, name: "NVIDIA T4".into(), total_bytes: 1 << 34, compute_capability, has_pools: true }
    }

    #[test]
    fn a_driver_that_is_too_old() {
        assert!(check_driver(13000, 13000).is_ok() && check_driver(13020, 13000).is_ok());
        let error = check_driver(12040, 13000).unwrap_err();
        assert_eq!(error.kind().exit_code(), 1);
        assert!(error.in_one_line().contains("CUDA up to 12.4; this binary needs CUDA 13.0"), "{error}");
        assert!(error.to_string().ends_with("NVIDIA's package cuda-compat-13-0 is enough"), "{error}");
    }

    #[test]
    fn targets_of_ptx() {
        let ptx = "//\n.version 9.0\n.target sm_90a, texmode_independent\n.address_size 64\n";
        assert_eq!(ptx_target(ptx), Some("sm_90a"));
        assert_eq!(ptx_target("// nothing"), None);
        for (target, capability, runs) in [
            ("sm_80", (7, 5), Some(false)),
            ("sm_80", (8, 0), Some(true)),
            ("sm_80", (12, 0), Some(true)),
            ("sm_90a", (9, 0), Some(true)),
            ("sm_90a", (8, 9), Some(false)),
            ("sm_90a", (10, 0), Some(false)),
            ("sm_100f", (10, 3), Some(true)),
            ("sm_100f", (12, 0), Some(false)),
            ("texmode", (8, 0), None),
        ] {
            assert_eq!(runs_on(target, capability), runs, "{target} on {capability:?}");
        }
    }

    #[test]
    fn a_gpu_without_code() {
        let ptx = ".target sm_80\n";
        assert!(check_code(&gpu((8, 9)), ptx).is_ok());
        assert_eq!(
            check_code(&gpu((7, 5)), ptx).unwrap_err().to_string(),
            "error: cannot use GPU 2\n  caused by: the NVIDIA T4 has compute capability 7.5\n  caused by: this binary \
             has tensor operations for sm_80 and kernels for compute capability 8.0 and newer\nhint: use a GPU of \
             compute capability 8.0 or newer, or train on the CPU with `--ranks 1`; a binary of `CUDA_COMPUTE_CAP=75 \
             cargo build --release --features cuda` computes in f32 without those kernels, slowly"
        );
        // CUDA 13 refuses to compile for older GPUs.
        let error = check_code(&gpu((7, 0)), ptx).unwrap_err();
        assert!(
            error.in_one_line().contains("finetune is built for compute capability 7.5 and newer"),
            "{error}"
        );
        assert!(!error.to_string().contains("cargo build"), "{error}");
        // Another build has tensor operations for this GPU.
        let error = check_code(&gpu((8, 9)), ".target sm_90\n").unwrap_err().to_string();
        assert!(error.ends_with("`CUDA_COMPUTE_CAP=89 cargo build --release --features cuda`"), "{error}");
    }

    #[test]
    fn a_gpu_without_memory_pools() {
        let gpu = gpu((9, 0));
        assert!(check_pools(&gpu).is_ok());
        assert_eq!(
            check_pools(&Gpu { name: "GRID V100D-8Q".into(), has_pools: false, ..gpu })
                .unwrap_err()
                .to_string(),
            "error: cannot use GPU 2\n  caused by: the driver of the GRID V100D-8Q offers no memory pools, as with some \
             vGPU profiles\n  caused by: without them every free waits for the GPU, and a step takes many times \
             longer\nhint: use a vGPU profile with unified memory or a whole GPU, or train on the CPU with `--ranks 1`"
        );
    }

    #[test]
    fn bf16_needs_compute_capability_8() {
        assert!(
            check_bf16(&gpu((8, 0)), DType::BF16).is_ok() && check_bf16(&gpu((7, 5)), DType::F32).is_ok()
        );
        assert_eq!(
            check_bf16(&gpu((7, 5)), DType::BF16).unwrap_err().to_string(),
            "error: cannot compute in bf16 on GPU 2\n  caused by: the NVIDIA T4 has compute capability 7.5; bf16 needs \
             8.0\nhint: compute in f32 with `--set model.dtype=f32`, or on the CPU with `CUDA_VISIBLE_DEVICES=`"
        );
    }

    #[test]
    fn fp8_needs_compute_capability_8_9() {
        assert!(check_fp8(&gpu((8, 9))).is_ok() && check_fp8(&gpu((9, 0))).is_ok());
        assert_eq!(
            check_fp8(&gpu((8, 6))).unwrap_err().to_string(),
            "error: cannot multiply the frozen weights in fp8 (`train.base_products`) on GPU 2\n  caused by: the NVIDIA \
             T4 has compute capability 8.6; fp8 needs 8.9\nhint: remove `base_products`: products are then in bf16"
        );
    }
}
