//! NVTX ranges, with which NVIDIA's profilers show the host's spans beside the GPU's kernels. They
//! need a GPU build and libnvToolsExt; otherwise they do nothing.

/// Begins a range on this thread; makes the title only if the library exists.
#[cfg(not(feature = "cuda"))]
pub(super) fn push(_title: impl FnOnce() -> String) {}

/// Ends the last range of this thread.
#[cfg(not(feature = "cuda"))]
pub(super) fn pop() {}

#[cfg(feature = "cuda")]
pub(super) use nvtx::{pop, push};

#[cfg(feature = "cuda")]
mod nvtx {
    use std::ffi::{CString, c_char, c_int};
    use std::sync::OnceLock;

    /// Names of the library, the development package's last.
    const LIBRARIES: [&str; 2] = ["libnvToolsExt.so.1", "libnvToolsExt.so"];

    /// The two functions in use; the library stays loaded.
    struct RangeCalls {
        push: unsafe extern "C" fn(*const c_char) -> c_int,
        pop: unsafe extern "C" fn() -> c_int,
    }

    fn calls() -> Option<&'static RangeCalls> {
        static CALLS: OnceLock<Option<RangeCalls>> = OnceLock::new();
        CALLS.get_or_init(load).as_ref()
    }

    fn load() -> Option<RangeCalls> {
        // SAFETY: NVIDIA's library runs no harmful code on loading.
        let library = LIBRARIES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok())?;
        // SAFETY: the signatures are those of nvToolsExt.h, version 2 and 3.
        let calls = unsafe {
            RangeCalls {
                push: *library.get(b"nvtxRangePushA\0").ok()?,
                pop: *library.get(b"nvtxRangePop\0").ok()?,
            }
        };
        // The functions are called until the process ends.
        std::mem::forget(library);
        Some(calls)
    }

    pub(in crate::runtime) fn push(title: impl FnOnce() -> String) {
        let Some(calls) = calls() else { return };
        let title = CString::new(title()).unwrap_or_default();
        // SAFETY: a zero-terminated text, which the library copies.
        let _depth = unsafe { (calls.push)(title.as_ptr()) };
    }

    pub(in crate::runtime) fn pop() {
        if let Some(calls) = calls() {
            // SAFETY: takes nothing; without an open range it returns an error.
            let _depth = unsafe { (calls.pop)() };
        }
    }
}
