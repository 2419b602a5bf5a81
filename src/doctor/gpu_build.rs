//! The step from the build for the CPU to the build with GPU support beside it.
//!
//! The loader ends a build with feature `cuda` before its first line if it does not find a library
//! of NVIDIA, and it does not look into the folders of PyTorch's wheels, nor into those that
//! containers and WSL mount. So `finetune` may be the build for the CPU, with the other one beside
//! it under the name `finetune-cuda`: the first looks for the libraries, then becomes the second.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::nvidia_libraries::{DRIVER, linked, look_for};
use crate::runtime::device::{self, GPU_BUILD};

/// The name of the build with GPU support.
const NAME: &str = "finetune-cuda";
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

/// Becomes the build with GPU support if this build has none and the other is installed beside it,
/// the machine has a driver, and the user neither hides the GPUs nor asks for ranks on the CPU.
/// Otherwise returns, with a warning if a library is missing.
pub(crate) fn become_gpu_build() -> Option<String> {
    let is_of_ranks = |word: OsString| word == "--ranks" || word.as_encoded_bytes().starts_with(b"--ranks=");
    if GPU_BUILD || env::args_os().any(is_of_ranks) {
        return None;
    }
    let own = env::current_exe().ok()?;
    let build = own.with_file_name(NAME);
    let are_hidden = env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|gpus| gpus.is_empty());
    if are_hidden || build == own || !build.is_file() {
        return None;
    }
    let (mut folders, missing) = folders_of(&linked(device::cuda_release()), &candidates());
    if missing.iter().any(|name| name == DRIVER) {
        return None;
    }
    if !missing.is_empty() {
        return Some(format!(
            "{NAME} cannot start, so this run uses the CPU: the loader does not find {}; install the CUDA {} toolkit \
             or `pip install torch`, or name their folder in {LOADER_FOLDERS}; `CUDA_VISIBLE_DEVICES=` silences \
             this warning",
            missing.join(", "),
            device::cuda_release()
        ));
    }
    // Only several GPUs need NCCL, whose wheel has a folder of its own.
    let (of_nccl, _) = folders_of(&[NCCL.to_owned()], &candidates());
    folders.extend(of_nccl.into_iter().filter(|folder| !folders.contains(folder)).collect::<Vec<_>>());
    let given = env::var_os(LOADER_FOLDERS).unwrap_or_default();
    let all = env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty()).chain(folders);
    let mut command = Command::new(&build);
    command.args(env::args_os().skip(1));
    match env::join_paths(all) {
        Ok(all) if all.is_empty() => {}
        Ok(all) => drop(command.env(LOADER_FOLDERS, all)),
        Err(error) => return Some(format!("{NAME} cannot start, so this run uses the CPU: {error}")),
    }
    let error = command.exec();
    // `exec` has made writes to closed pipes end the process; they are errors in this program.
    // SAFETY: a system call that takes numbers, and no other thread exists.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    Some(format!("{NAME} cannot start, so this run uses the CPU: {}: {error}", build.display()))
}

/// Returns the folders of `candidates` that hold those of `names` that the loader does not find,
/// and the names that no folder holds.
fn folders_of(names: &[String], candidates: &[PathBuf]) -> (Vec<PathBuf>, Vec<String>) {
    let (mut folders, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        if look_for(name.clone()).found.is_some() {
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
