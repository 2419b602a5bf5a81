//! NCCL's functions, loaded at run time: the program starts without the library and needs it only
//! for several GPUs.
//!
//! Signatures, values and the layout of the configuration are those of `nccl.h` 2.18 to 2.32, which
//! agree; the header promises that the configuration only grows at its end. cudarc's table is not
//! used: it never tries `libnccl.so.2`, the only name in NVIDIA's wheels, panics without the
//! library, and hides the functions for polling errors and aborting.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::runtime::buffer::ElementType;

/// Environment variable with the path of the library or of its folder.
pub(crate) const LIBRARY_VARIABLE: &str = "FINETUNE_NCCL_LIB";

/// 2.18 introduced `ncclCommSplit` and the layout of [`NcclConfig`].
const OLDEST: NcclVersion = NcclVersion(21800);

/// Name in distributions and wheels, then the one of developer packages.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclComm_t`: a communicator of the library.
pub(crate) type RawComm = *mut c_void;

/// A `cudaStream_t` of the CUDA runtime.
pub type RawStream = *mut c_void;

/// Status of a call, `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclStatus(pub c_int);

impl NcclStatus {
    /// The call succeeded: `ncclSuccess`.
    pub const SUCCESS: NcclStatus = NcclStatus(0);
    /// The call contradicts its arguments or other ranks: `ncclInvalidUsage`.
    pub(super) const INVALID_USAGE: NcclStatus = NcclStatus(5);
    /// A peer has failed: `ncclRemoteError`.
    pub(crate) const REMOTE_ERROR: NcclStatus = NcclStatus(6);
    /// A non-blocking call is still running: `ncclInProgress`.
    pub(crate) const IN_PROGRESS: NcclStatus = NcclStatus(7);
}

/// `ncclDataType_t` of an element.
pub fn data_type(element: ElementType) -> c_int {
    match element {
        ElementType::U8 => 1,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::Bf16 => 9,
    }
}

/// `ncclSum` of `ncclRedOp_t`.
pub(crate) const SUM: c_int = 0;

/// `ncclUniqueId`: rank 0 creates one, and the rendezvous session sends it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of 2.18: the library decides later members by `version`.
#[derive(Debug)]
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// `trafficClass` since 2.22; padding before.
    unused: c_int,
}

impl NcclConfig {
    /// All calls return at once and are polled; other settings are the library's choice.
    pub(crate) fn non_blocking() -> Self {
        /// Leaves a setting to NCCL: `NCCL_CONFIG_UNDEF_INT`.
        const UNSET: c_int = c_int::MIN;
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: OLDEST.0 as u32,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
            unused: UNSET,
        }
    }
}

/// Declares the table and its loading, so that each name occurs once.
macro_rules! table {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions in use, with the names of `nccl.h`.
        #[allow(missing_docs, reason = "each is documented by NVIDIA under the name that it is loaded by")]
        #[derive(Clone, Copy)]
        pub(crate) struct NcclFunctions {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl NcclFunctions {
            /// Loads the functions from `library`.
            ///
            /// # Safety
            /// The library is NCCL.
            unsafe fn load(library: &libloading::Library) -> Result<NcclFunctions, String> {
                Ok(NcclFunctions {
                    $($field: {
                        // SAFETY: the signature is that of nccl.h.
                        let symbol = unsafe { library.get($symbol.as_bytes()) };
                        *symbol.map_err(|_| format!("it does not export {}", $symbol))?
                    },)*
                })
            }
        }
    };
}

table! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> NcclStatus;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> NcclStatus;
    get_error_string = "ncclGetErrorString": fn(NcclStatus) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(RawComm) -> *const c_char;
    comm_init_rank_config = "ncclCommInitRankConfig": fn(*mut RawComm, c_int, UniqueId, c_int, *mut NcclConfig) -> NcclStatus;
    comm_split = "ncclCommSplit": fn(RawComm, c_int, c_int, *mut RawComm, *mut NcclConfig) -> NcclStatus;
    comm_get_async_error = "ncclCommGetAsyncError": fn(RawComm, *mut NcclStatus) -> NcclStatus;
    comm_finalize = "ncclCommFinalize": fn(RawComm) -> NcclStatus;
    comm_destroy = "ncclCommDestroy": fn(RawComm) -> NcclStatus;
    comm_abort = "ncclCommAbort": fn(RawComm) -> NcclStatus;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> NcclStatus;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> NcclStatus;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> NcclStatus;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> NcclStatus;
    group_start = "ncclGroupStart": fn() -> NcclStatus;
    group_end = "ncclGroupEnd": fn() -> NcclStatus;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> NcclStatus;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> NcclStatus;
}

/// A version in the code of `ncclGetVersion` since 2.9: 2.28.9 is 22809.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion(pub c_int);

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// The loaded library.
pub struct NcclLibrary {
    pub(super) table: NcclFunctions,
    version: NcclVersion,
    origin: PathBuf,
}

impl NcclLibrary {
    /// Loads NCCL: the file or folder in `FINETUNE_NCCL_LIB` if it is set, else by name in the
    /// loader's folders (`LD_LIBRARY_PATH`, the system's folders). It stays loaded until the
    /// process ends, because NCCL has its own threads.
    ///
    /// # Errors
    /// The library is missing or older than 2.18; the error names the candidates.
    pub fn open() -> Result<Arc<NcclLibrary>> {
        let given = std::env::var_os(LIBRARY_VARIABLE);
        let searched = match std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) {
            Some(path) => format!("LD_LIBRARY_PATH, which is {}", path.to_string_lossy()),
            None => "LD_LIBRARY_PATH, which is not set".to_owned(),
        };
        Self::open_among(&candidates(given), &searched)
    }

    fn open_among(candidates: &[PathBuf], searched: &str) -> Result<Arc<NcclLibrary>> {
        let mut tried = Vec::new();
        for candidate in candidates {
            match Self::load(candidate) {
                Ok(library) => return Ok(Arc::new(library)),
                Err(why) => tried.push(format!("{}: {why}", candidate.display())),
            }
        }
        let error = Error::user("cannot load NCCL, which several GPUs need");
        if candidates.iter().any(|path| path.parent() == Some(Path::new(""))) {
            tried.push(format!("searched: {searched}; then the system's folders (`ldconfig -p`)"));
        }
        Err(tried.into_iter().fold(error, Error::because).hint(format!(
            "install it (`apt-get install libnccl2`, or `pip install nvidia-nccl-cu13` and \
             {LIBRARY_VARIABLE}=.../site-packages/nvidia/nccl)"
        )))
    }

    fn load(path: &Path) -> Result<NcclLibrary, String> {
        // SAFETY: NCCL's initializers only read the environment.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| error.to_string())?;
        // SAFETY: a library with NCCL's name; its version is checked before any other call.
        let table = unsafe { NcclFunctions::load(&library) }?;
        // Its functions stay loaded.
        std::mem::forget(library);
        Self::of_table(table, path.to_owned())
    }

    pub(super) fn of_table(table: NcclFunctions, origin: PathBuf) -> Result<NcclLibrary, String> {
        let mut version = 0;
        // SAFETY: the pointer is to a local.
        let status = unsafe { (table.get_version)(&mut version) };
        let version = NcclVersion(version);
        match status {
            NcclStatus::SUCCESS if version >= OLDEST => Ok(NcclLibrary { table, version, origin }),
            NcclStatus::SUCCESS => Err(format!("it is version {version}; required: at least {OLDEST}")),
            NcclStatus(code) => Err(format!("ncclGetVersion failed with code {code}")),
        }
    }

    /// Version of the loaded library.
    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// Name or path under which it was loaded.
    pub fn origin(&self) -> &Path {
        &self.origin
    }

    /// Creates an id for [`super::Nccl::connect`] on rank 0. Opens a socket for the other ranks, on
    /// the interface in `NCCL_SOCKET_IFNAME`.
    ///
    /// # Errors
    /// The library finds no network interface.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to a local of the library's size.
        let status = unsafe { (self.table.get_unique_id)(&mut id) };
        if status == NcclStatus::SUCCESS {
            return Ok(id);
        }
        Err(Error::user("cannot make an NCCL id")
            .because(self.text(status, None))
            .hint("name a network interface: `NCCL_SOCKET_IFNAME=eth0`, or `lo` on a single host"))
    }

    /// The library's text for `status`, and for its latest error.
    pub(super) fn text(&self, status: NcclStatus, comm: Option<RawComm>) -> String {
        let read = |text: *const c_char| {
            // SAFETY: the library returns null or a string that stays valid.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().trim().to_owned()).unwrap_or_default()
        };
        // SAFETY: any status is accepted.
        let kind = read(unsafe { (self.table.get_error_string)(status) });
        // SAFETY: null or a valid communicator; the argument is unused up to 2.32.
        let last = read(unsafe { (self.table.get_last_error)(comm.unwrap_or(std::ptr::null_mut())) });
        let text = format!("{kind} (code {})", status.0);
        if last.is_empty() { text } else { format!("{text}: {last}") }
    }
}

impl fmt::Debug for NcclLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} from {}", self.version, self.origin.display())
    }
}

/// Candidates for a value of `FINETUNE_NCCL_LIB`. A folder may be the library's, a wheel's or
/// site-packages.
fn candidates(given: Option<OsString>) -> Vec<PathBuf> {
    let Some(given) = given.filter(|given| !given.is_empty()).map(PathBuf::from) else {
        return NAMES.map(PathBuf::from).to_vec();
    };
    if !given.is_dir() {
        return vec![given];
    }
    let folders = ["", "lib", "nccl/lib", "nvidia/nccl/lib"];
    let all = folders.iter().flat_map(|folder| NAMES.map(|name| given.join(folder).join(name)));
    let existing: Vec<PathBuf> = all.clone().filter(|path| path.exists()).collect();
    if existing.is_empty() { all.collect() } else { existing }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `nccl.h` 2.28.9: the enums, and `offsetof` of the members that 2.18 had.
    #[test]
    fn values_are_those_of_the_header() {
        assert_eq!(
            [ElementType::U8, ElementType::F32, ElementType::F64, ElementType::Bf16].map(data_type),
            [1, 7, 8, 9]
        );
        assert_eq!(size_of::<UniqueId>(), 128);
        assert_eq!(size_of::<NcclConfig>(), 48);
        assert_eq!(std::mem::offset_of!(NcclConfig, magic), 8);
        assert_eq!(std::mem::offset_of!(NcclConfig, blocking), 16);
        assert_eq!(std::mem::offset_of!(NcclConfig, net_name), 32);
        assert_eq!(std::mem::offset_of!(NcclConfig, split_share), 40);
        assert_eq!(std::mem::offset_of!(NcclConfig, unused), 44);
        assert_eq!(NcclVersion(22809).to_string(), "2.28.9");
    }

    #[test]
    fn an_absent_library_is_an_error_that_says_what_was_tried() {
        let error =
            NcclLibrary::open_among(&candidates(Some("/nowhere/libnccl.so.2".into())), "").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot load NCCL"), "{text}");
        assert!(text.contains("/nowhere/libnccl.so.2: "), "{text}");
        assert!(text.contains("hint: install it"), "{text}");
        assert!(!text.contains("searched"), "a path is not searched for: {text}");
    }

    #[test]
    fn what_the_loader_searched_is_named() {
        let error =
            NcclLibrary::open_among(&[PathBuf::from("libno-nccl.so.2")], "LD_LIBRARY_PATH, which is /a:/b");
        let text = error.unwrap_err().to_string();
        assert!(text.contains("libno-nccl.so.2: "), "{text}");
        assert!(text.contains("searched: LD_LIBRARY_PATH, which is /a:/b; then the system's"), "{text}");
    }

    #[test]
    fn another_library_is_refused() {
        let Err(error) = NcclLibrary::load(Path::new("libc.so.6")) else { panic!("libc is no NCCL") };
        assert_eq!(error, "it does not export ncclGetVersion");
    }

    #[test]
    fn a_folder_may_be_a_wheels() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("nvidia/nccl/lib/libnccl.so.2");
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        std::fs::write(&library, "").unwrap();
        for given in ["", "nvidia", "nvidia/nccl", "nvidia/nccl/lib", "nvidia/nccl/lib/libnccl.so.2"] {
            let paths = candidates(Some(folder.path().join(given).into()));
            assert_eq!(
                paths.iter().map(|path| path.canonicalize().unwrap()).collect::<Vec<_>>(),
                [library.canonicalize().unwrap()]
            );
        }
        assert_eq!(candidates(None)[0], Path::new("libnccl.so.2"));
    }

    /// Bypasses the harness, which shows only the output of failing tests.
    fn left_out(why: &str) {
        drop(std::io::Write::write_all(
            &mut std::io::stderr(),
            format!("SKIPPED a test of NCCL's own library: {why}\n").as_bytes(),
        ));
    }

    /// Returns true if the CUDA driver finds a GPU. Unlike `gpus()`, it also works in a build
    /// without GPU support, whose tests load NCCL too.
    fn has_gpu() -> bool {
        // SAFETY: the driver's initializers only read the environment.
        let Ok(driver) = (unsafe { libloading::Library::new("libcuda.so.1") }) else { return false };
        // SAFETY: the signature is that of cuda.h.
        let status = unsafe { driver.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit") }
            // SAFETY: 0 is the only accepted argument.
            .is_ok_and(|init| unsafe { init(0) } == 0);
        // Its functions stay loaded.
        std::mem::forget(driver);
        status
    }

    /// With the real library, if it is installed: these calls need no GPU.
    #[test]
    fn the_real_library_gives_a_version_and_ids() {
        let Ok(library) = NcclLibrary::open() else {
            left_out(&format!("no NCCL here; point {LIBRARY_VARIABLE} at one"));
            return;
        };
        assert!(library.version() >= OLDEST);
        let ids = [library.unique_id().unwrap(), library.unique_id().unwrap()];
        assert_ne!(ids[0], ids[1]);
        assert!(library.text(NcclStatus::REMOTE_ERROR, None).contains("(code 6)"));
    }

    /// Without a driver, the real library refuses to connect, at once and with its own error.
    #[test]
    fn the_real_library_says_why_it_cannot_meet() {
        use crate::collective::nccl::{AbortFlag, Nccl, NcclRankInfo, fake_nccl};
        let Ok(library) = NcclLibrary::open() else {
            left_out(&format!("no NCCL here; point {LIBRARY_VARIABLE} at one"));
            return;
        };
        if has_gpu() {
            left_out("this machine has a GPU, and this test has no memory on it");
            return;
        }
        let deadline = std::time::Duration::from_secs(60);
        let rank_info = NcclRankInfo { id: library.unique_id().unwrap(), rank: 0, size: 1, deadline };
        let met = Nccl::connect(&library, &rank_info, fake_nccl::Host::default(), &AbortFlag::new());
        let error = met.unwrap_err().to_string();
        assert!(error.contains("cannot make an NCCL communicator"), "{error}");
        assert!(error.contains("(code 1)"), "ncclUnhandledCudaError: {error}");
    }
}
