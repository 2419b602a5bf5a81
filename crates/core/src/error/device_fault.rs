//! Classifies GPU failures by the code names of NVIDIA's libraries: `CUDA_ERROR_*` of the driver
//! (CUDA Driver API, "CUresult"), `CUBLAS_STATUS_*` and `CURAND_STATUS_*`.
//!
//! Errors of candle, cudarc and cuBLAS hold these names in their text at any depth. So one table
//! serves all of them, in every build.

use super::ErrorCategory;

/// A failure of the GPU, its driver or the machine. Invalid calls of this program are not listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFault {
    /// The GPU's memory is too small for the request.
    OutOfMemory,
    /// A kernel failed. The GPU refuses all later calls of this process.
    Kernel,
    /// The GPU itself or its link failed.
    Hardware,
    /// The driver has no code for this GPU, or cannot read the code it gets.
    NoCode,
    /// The driver is unusable, or unusable with this GPU.
    Unusable,
}

/// Code names of each fault; all other codes come from invalid calls.
const NAMES: &[(DeviceFault, &[&str])] = &[
    (
        DeviceFault::OutOfMemory,
        &["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "CURAND_STATUS_ALLOCATION_FAILED"],
    ),
    (
        DeviceFault::Kernel,
        &[
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "CUDA_ERROR_LAUNCH_TIMEOUT",
            "CUDA_ERROR_ASSERT",
            "CUDA_ERROR_HARDWARE_STACK_ERROR",
            "CUDA_ERROR_ILLEGAL_INSTRUCTION",
            "CUDA_ERROR_MISALIGNED_ADDRESS",
            "CUDA_ERROR_INVALID_ADDRESS_SPACE",
            "CUDA_ERROR_INVALID_PC",
            "CUDA_ERROR_LAUNCH_FAILED",
            "CUDA_ERROR_TENSOR_MEMORY_LEAK",
            "CUBLAS_STATUS_EXECUTION_FAILED",
            "CURAND_STATUS_LAUNCH_FAILURE",
            "CURAND_STATUS_PREEXISTING_FAILURE",
        ],
    ),
    (
        DeviceFault::Hardware,
        &[
            "CUDA_ERROR_ECC_UNCORRECTABLE",
            "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            "CUDA_ERROR_CONTAINED",
            "CUDA_ERROR_EXTERNAL_DEVICE",
        ],
    ),
    (
        DeviceFault::NoCode,
        &[
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            "CUDA_ERROR_INVALID_PTX",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
            "CUDA_ERROR_JIT_COMPILATION_DISABLED",
            "CUBLAS_STATUS_ARCH_MISMATCH",
            "CURAND_STATUS_ARCH_MISMATCH",
        ],
    ),
    (
        DeviceFault::Unusable,
        &[
            "CUDA_ERROR_STUB_LIBRARY",
            "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
            "CUDA_ERROR_NO_DEVICE",
            "CUDA_ERROR_INVALID_DEVICE",
            "CUDA_ERROR_DEVICE_NOT_LICENSED",
            "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION",
            "CUDA_ERROR_OPERATING_SYSTEM",
            "CUDA_ERROR_NOT_PERMITTED",
            "CUDA_ERROR_SYSTEM_NOT_READY",
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            "CUDA_ERROR_MPS_CONNECTION_FAILED",
            "CUDA_ERROR_MPS_RPC_FAILURE",
            "CUDA_ERROR_MPS_SERVER_NOT_READY",
            "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
            "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
            "CUDA_ERROR_MPS_CLIENT_TERMINATED",
            "CURAND_STATUS_VERSION_MISMATCH",
        ],
    ),
];

impl DeviceFault {
    /// The fault in an error's text; none without a known code, or with the code of an invalid
    /// call.
    pub fn of(text: &str) -> Option<Self> {
        let mut names = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        names.find_map(|name| NAMES.iter().find(|(_, known)| known.contains(&name)).map(|(fault, _)| *fault))
    }

    /// Category of the error, by the cause of the fault.
    pub(super) fn category(self) -> ErrorCategory {
        match self {
            DeviceFault::OutOfMemory | DeviceFault::NoCode | DeviceFault::Unusable => ErrorCategory::User,
            DeviceFault::Kernel => ErrorCategory::Internal,
            DeviceFault::Hardware => ErrorCategory::Transient,
        }
    }

    /// Text of the failure.
    pub(super) fn what(self) -> &'static str {
        match self {
            DeviceFault::OutOfMemory => "the GPU is out of memory",
            DeviceFault::Kernel => "a kernel on the GPU failed",
            DeviceFault::Hardware => "the GPU failed",
            DeviceFault::NoCode => "this binary has no code for this GPU and its driver",
            DeviceFault::Unusable => "the GPU cannot be used",
        }
    }

    /// Default hint, for an error without a more specific one.
    pub(super) fn hint(self) -> &'static str {
        match self {
            DeviceFault::OutOfMemory => "`nvidia-smi` shows which other processes hold memory of the GPU",
            DeviceFault::Kernel => {
                "run it again with `FINETUNE_CUDA_SYNC=1`, which waits for each kernel, so that the error names the \
                 failing one, and report that error"
            }
            DeviceFault::Hardware => {
                "`nvidia-smi -q` shows the GPU's errors; run it again with `--resume`, on another GPU if it fails again"
            }
            DeviceFault::NoCode => {
                "install driver release 580 or newer (550 for the build for CUDA 12), or build the binary on this machine: \
                 `CUDA_COMPUTE_CAP=80 cargo build --release --features cuda`, 80 being compute capability 8.0"
            }
            DeviceFault::Unusable => {
                "`nvidia-smi` shows whether the driver works; the build for CUDA 13 needs release 580 or newer, that for \
                 CUDA 12 needs release 550 or newer"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// Text in which cudarc prints a code of the driver.
    fn driver_error(name: &str) -> String {
        format!("DriverError({name}, \"what the driver says of it\")")
    }

    #[test]
    fn every_name_is_found_in_the_text_of_an_error() {
        for (fault, names) in NAMES {
            for name in *names {
                assert_eq!(DeviceFault::of(name), Some(*fault), "{name}");
                assert_eq!(DeviceFault::of(&driver_error(name)), Some(*fault), "{name}");
                let cublas = format!("cannot multiply: CublasError({name})");
                assert_eq!(DeviceFault::of(&cublas), Some(*fault), "{name}");
            }
        }
    }

    /// Codes of CUDA 13.0's driver: 2 is memory; 214, 220, 226 and 911 are hardware; 700 and above
    /// are kernel faults, which end every later call, except those that refuse one launch.
    #[test]
    fn codes_of_the_driver() {
        let of = |name: &str| DeviceFault::of(&driver_error(name));
        assert_eq!(of("CUDA_ERROR_OUT_OF_MEMORY"), Some(DeviceFault::OutOfMemory));
        for name in ["ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED", "ILLEGAL_INSTRUCTION"] {
            assert_eq!(of(&format!("CUDA_ERROR_{name}")), Some(DeviceFault::Kernel), "{name}");
        }
        assert_eq!(of("CUDA_ERROR_ECC_UNCORRECTABLE"), Some(DeviceFault::Hardware));
        for name in ["NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION"] {
            assert_eq!(of(&format!("CUDA_ERROR_{name}")), Some(DeviceFault::NoCode), "{name}");
        }
        for name in ["NO_DEVICE", "STUB_LIBRARY", "SYSTEM_DRIVER_MISMATCH", "DEVICE_UNAVAILABLE"] {
            assert_eq!(of(&format!("CUDA_ERROR_{name}")), Some(DeviceFault::Unusable), "{name}");
        }
        // An invalid call: the driver refuses one launch and continues.
        for name in ["INVALID_VALUE", "INVALID_HANDLE", "NOT_FOUND", "LAUNCH_OUT_OF_RESOURCES", "UNKNOWN"] {
            assert_eq!(of(&format!("CUDA_ERROR_{name}")), None, "{name}");
        }
        // A name inside another name does not match.
        assert_eq!(DeviceFault::of("CUDA_ERROR_OUT_OF_MEMORY_2, MY_CUDA_ERROR_ASSERT"), None);
        assert_eq!(DeviceFault::of("out of memory"), None);
    }

    #[test]
    fn errors_of_candle_are_what_their_codes_say() {
        let candle = |text: &str| Error::from(candle_core::Error::Cuda(text.into()).bt());
        let error = candle(&driver_error("CUDA_ERROR_OUT_OF_MEMORY"));
        assert_eq!((error.device_fault(), error.kind().exit_code()), (Some(DeviceFault::OutOfMemory), 1));
        assert_eq!(error.what(), "the GPU is out of memory");
        assert!(error.causes()[0].contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        let error = candle(&driver_error("CUDA_ERROR_ILLEGAL_ADDRESS"));
        assert_eq!((error.device_fault(), error.kind().exit_code()), (Some(DeviceFault::Kernel), 3));
        assert!(error.to_string().contains("FINETUNE_CUDA_SYNC=1"), "{error}");
        let error = candle(&driver_error("CUDA_ERROR_ECC_UNCORRECTABLE"));
        assert_eq!(error.kind().exit_code(), 75);
        let error = candle(&driver_error("CUDA_ERROR_INVALID_VALUE"));
        assert_eq!((error.device_fault(), error.kind().exit_code()), (None, 3));
        assert_eq!(error.what(), "a tensor operation failed");
    }

    /// Added text does not change the fault.
    #[test]
    fn stays_what_it_is_as_it_goes_up() {
        let error = Error::of_device("cannot start cuBLAS", "CublasError(CUBLAS_STATUS_ALLOC_FAILED)");
        let error = error.at_step(7).during("cannot train").hint("another");
        assert_eq!(error.device_fault(), Some(DeviceFault::OutOfMemory));
        assert_eq!(error.step(), Some(7));
        assert_eq!(Error::internal("a").at_step(7).step(), None, "only of a device");
    }
}
