//! The step from the build for the CPU to the build with GPU support beside it.
//!
//! The loader ends a build with feature `cuda` before its first line if it does not find a library
//! of NVIDIA, and it does not look into the folders of PyTorch's wheels, nor into those that
//! containers and WSL mount. So `finetune` may be the build for the CPU, with the other one beside
//! it under the name `finetune-cuda` (CUDA 13) or `finetune-cuda12` (CUDA 12, for older drivers).
//! The first asks the driver, looks for the libraries, then becomes the one that can start.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::nvidia_libraries::{DRIVER, linked, look_for};
use crate::runtime::device::GPU_BUILD;

/// A build with GPU support, as users install it beside the build for the CPU.
struct Build {
    name: &'static str,
    /// The release of CUDA that it is linked to, and that its driver must support.
    cuda: u32,
}

/// The builds with GPU support, the preferred one first.
const BUILDS: [Build; 2] =
    [Build { name: "finetune-cuda", cuda: 13 }, Build { name: "finetune-cuda12", cuda: 12 }];
/// The name of NCCL, for several GPUs.
const NCCL: &str = "libnccl.so.2";
/// Folders of toolkits, containers and WSL.
const FOLDERS: [&str; 6] = [
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib64-nvidia",
    "/usr/lib/wsl/lib",
    "/usr/local/lib",
];
/// Variable with folders of libraries, for the loader.
const LOADER_FOLDERS: &str = "LD_LIBRARY_PATH";

/// Becomes a build with GPU support if this build has none and one that the driver supports is
/// installed beside it, unless the user hides the GPUs or asks for ranks on the CPU. Otherwise
/// returns, with a warning if each of those builds needs a newer driver or misses a library.
pub(crate) fn become_gpu_build() -> Option<String> {
    let is_of_ranks = |word: OsString| word == "--ranks" || word.as_encoded_bytes().starts_with(b"--ranks=");
    if GPU_BUILD || env::args_os().any(is_of_ranks) {
        return None;
    }
    let own = env::current_exe().ok()?;
    let are_hidden = env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|gpus| gpus.is_empty());
    let is_beside = |build: &&Build| own.with_file_name(build.name).is_file();
    let builds: Vec<&Build> = BUILDS.iter().filter(is_beside).collect();
    if are_hidden || builds.is_empty() {
        return None;
    }
    let candidates = candidates();
    let (of_driver, missing) = folders_of(&[DRIVER.to_owned()], &candidates);
    if !missing.is_empty() {
        return None;
    }
    let driver = driver_cuda(of_driver.first());
    let mut causes = Vec::new();
    for build in builds {
        let cause = match library_folders(build, driver, &candidates) {
            Ok(folders) => start(&own.with_file_name(build.name), folders),
            Err(cause) => cause,
        };
        causes.push(format!("{} cannot start: {cause}", build.name));
    }
    Some(format!(
        "this run uses the CPU: {}; `CUDA_VISIBLE_DEVICES=` silences this warning",
        causes.join("; ")
    ))
}

/// Returns the folders of the libraries of `build` that the loader does not find by itself.
///
/// # Errors
/// The cause, if the build cannot start with this driver or misses a library.
fn library_folders(
    build: &Build,
    driver: Option<u32>,
    candidates: &[PathBuf],
) -> Result<Vec<PathBuf>, String> {
    if let Some(driver) = driver.filter(|driver| *driver < build.cuda) {
        return Err(format!("it needs CUDA {}, and the NVIDIA driver supports CUDA {driver}", build.cuda));
    }
    let (mut folders, missing) = folders_of(&linked(build.cuda), candidates);
    if !missing.is_empty() {
        return Err(format!(
            "the loader does not find {}; install the CUDA {} toolkit or `pip install torch`, or name their folder in \
             {LOADER_FOLDERS}",
            missing.join(", "),
            build.cuda
        ));
    }
    // Only several GPUs need NCCL, whose wheel has a folder of its own.
    let (of_nccl, _) = folders_of(&[NCCL.to_owned()], candidates);
    folders.extend(of_nccl.into_iter().filter(|folder| !folders.contains(folder)).collect::<Vec<_>>());
    Ok(folders)
}

/// Becomes the program `build` with `folders` for its loader. Returns only if that fails, with the
/// cause.
fn start(build: &Path, folders: Vec<PathBuf>) -> String {
    let given = env::var_os(LOADER_FOLDERS).unwrap_or_default();
    let all = env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty()).chain(folders);
    let mut command = Command::new(build);
    command.args(env::args_os().skip(1));
    match env::join_paths(all) {
        Ok(all) if all.is_empty() => {}
        Ok(all) => drop(command.env(LOADER_FOLDERS, all)),
        Err(error) => return error.to_string(),
    }
    let error = command.exec();
    // `exec` has made writes to closed pipes end the process; they are errors in this program.
    // SAFETY: a system call that takes numbers, and no other thread exists.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    format!("{}: {error}", build.display())
}

/// Returns the newest release of CUDA that the driver supports (13 for 13.0), or none if the driver
/// does not tell. `folder` holds the driver's library if the loader does not find it by itself.
fn driver_cuda(folder: Option<&PathBuf>) -> Option<u32> {
    type DriverGetVersion = unsafe extern "C" fn(*mut libc::c_int) -> libc::c_int;
    let path = folder.map_or_else(|| PathBuf::from(DRIVER), |folder| folder.join(DRIVER));
    let mut version = 0;
    // SAFETY: the library only reads the environment as it is loaded. CUDA Driver API,
    // `cuDriverGetVersion`: it writes one int and needs no `cuInit`.
    let status = unsafe {
        let driver = std::mem::ManuallyDrop::new(libloading::Library::new(path).ok()?);
        let get_version = driver.get::<DriverGetVersion>(b"cuDriverGetVersion\0").ok()?;
        get_version(&raw mut version)
    };
    u32::try_from(version / 1000).ok().filter(|_| status == 0)
}

/// Returns the folders of `candidates` that hold those of `names` that the loader does not find,
/// and the names that no folder holds.
fn folders_of(names: &[String], candidates: &[PathBuf]) -> (Vec<PathBuf>, Vec<String>) {
    let (mut folders, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        if look_for(name.clone()).path.is_some() {
            continue;
        }
        match candidates.iter().find(|folder| folder.join(name).is_file()) {
            Some(folder) if folders.contains(folder) => {}
            Some(folder) => folders.push(folder.clone()),
            None => missing.push(name.clone()),
        }
    }
    (folders, missing)
}

/// Returns the folders in which NVIDIA's libraries may be: those of Python environments first.
fn candidates() -> Vec<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = variable("HOME").map(|home| home.join(".local"));
    let environments = [variable("VIRTUAL_ENV"), variable("CONDA_PREFIX"), home, Some("/usr/local".into())];
    let mut all: Vec<PathBuf> = environments.iter().flatten().flat_map(|root| wheels(root)).collect();
    all.extend(variable("CONDA_PREFIX").map(|root| root.join("lib")));
    all.extend(FOLDERS.map(PathBuf::from));
    all
}

/// Returns the folders of libraries of the wheels in a Python environment:
/// `lib/python3.12/site-packages/nvidia/cu13/lib`.
fn wheels(root: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| {
        let mut names: Vec<OsString> = std::fs::read_dir(folder)
            .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect())
            .unwrap_or_default();
        names.sort();
        names
    };
    let is_python = |name: &OsString| name.to_string_lossy().starts_with("python3");
    let lib = root.join("lib");
    let pythons = entries(&lib).into_iter().filter(is_python).map(|name| lib.join(name));
    let packages = |python: PathBuf| {
        ["site-packages", "dist-packages"].map(|packages| python.join(packages).join("nvidia"))
    };
    let of_package = |nvidia: PathBuf| {
        entries(&nvidia).into_iter().map(move |name| nvidia.join(name).join(OsStr::new("lib")))
    };
    pythons.flat_map(packages).flat_map(of_package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_in_wheels() {
        let root = tempfile::tempdir().expect("a folder");
        let lib = root.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).expect("created");
        std::fs::write(lib.join("libno-such-library.so.13"), "").expect("written");
        let names = ["libno-such-library.so.13", "libno-such-library.so.14", "libc.so.6"].map(String::from);
        assert_eq!(folders_of(&names, &wheels(root.path())), (vec![lib], vec![names[1].clone()]));
    }
}
