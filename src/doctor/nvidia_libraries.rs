//! NVIDIA's libraries that the loader finds on this machine. The build with feature `cuda` is
//! linked to all but NCCL and does not start without them. The CPU build shows beforehand whether
//! the CUDA build would start.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::collective::nccl::NcclLibrary;
use crate::runtime::device;

/// The name of the driver's library.
pub(super) const DRIVER: &str = "libcuda.so.1";

/// Returns the names of the driver's library and those of CUDA's release `release`, as a binary
/// requests them from the loader. cuRAND kept its number (CUDA Toolkit release notes, "CUDA
/// Component Versions").
pub(super) fn linked(release: u32) -> [String; 5] {
    let of_release = |name: &str| format!("lib{name}.so.{release}");
    [
        DRIVER.to_owned(),
        of_release("cudart"),
        of_release("cublas"),
        of_release("cublasLt"),
        "libcurand.so.10".to_owned(),
    ]
}

/// A library and its path, if found.
pub(super) struct Library {
    name: String,
    pub(super) path: Option<String>,
}

/// NVIDIA's libraries that the loader finds on this machine, and those that are missing.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GpuLibraries {
    /// Paths of the libraries.
    #[serde(rename = "found")]
    loaded: Vec<String>,
    /// Names of the libraries.
    missing: Vec<String>,
}

impl GpuLibraries {
    /// Looks for all libraries with the loader.
    pub(crate) fn look() -> Self {
        let mut libraries: Vec<Library> = linked(device::cuda_release()).into_iter().map(look_for).collect();
        libraries.push(Library {
            name: "NCCL (for several GPUs)".to_owned(),
            path: NcclLibrary::open().ok().map(|library| format!("{library:?}")),
        });
        Self::of(libraries)
    }

    fn of(libraries: Vec<Library>) -> Self {
        let (mut loaded, mut missing) = (Vec::new(), Vec::new());
        for library in libraries {
            match library.path {
                Some(path) => loaded.push(path),
                None => missing.push(library.name),
            }
        }
        GpuLibraries { loaded, missing }
    }

    /// Formats the found and the missing libraries in one line.
    pub(crate) fn text(&self) -> String {
        let parts = [("found", &self.loaded), ("missing", &self.missing)];
        let parts = parts.into_iter().filter(|(_, names)| !names.is_empty());
        parts.map(|(word, names)| format!("{word}: {}", names.join(", "))).collect::<Vec<_>>().join("; ")
    }
}

/// Looks for a library with the loader.
pub(super) fn look_for(name: String) -> Library {
    // SAFETY: NVIDIA's libraries only read the environment as they are loaded.
    let path_of_library = unsafe { libloading::Library::new(&name) }.ok().map(|library| {
        let path = loaded_from(&name).unwrap_or_else(|| PathBuf::from(&name));
        // A driver's library must not be unloaded after it has started.
        std::mem::forget(library);
        path.display().to_string()
    });
    Library { name, path: path_of_library }
}

/// Returns the file of a library that this process has loaded.
fn loaded_from(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    mapped(&maps, name)
}

/// Returns the path in `maps` (proc(5)) of the file `name` or of its link target:
/// `libcuda.so.580.82` for `libcuda.so.1`.
fn mapped(maps: &str, name: &str) -> Option<PathBuf> {
    let stem = name.split(".so").next()?;
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_it = |path: &&Path| {
        let file = path.file_name().map(|file| file.to_string_lossy());
        file.is_some_and(|file| file.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so")))
    };
    paths.into_iter().find(is_it).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_release() {
        assert_eq!(
            linked(13),
            ["libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"]
        );
    }

    #[test]
    fn the_file_behind_a_name() {
        let maps = "7f00-7f01 r--p 00000000 fe:01 12  /usr/lib/libcublasLt.so.13.1.0\n\
                    7f02-7f03 r-xp 00000000 fe:01 13  /usr/lib/libcublas.so.13.1.0\n7f04-7f05 rw-p 00000000 00:00 0\n";
        assert_eq!(mapped(maps, "libcublas.so.13"), Some("/usr/lib/libcublas.so.13.1.0".into()));
        assert_eq!(mapped(maps, "libcublasLt.so.13"), Some("/usr/lib/libcublasLt.so.13.1.0".into()));
        assert_eq!(mapped(maps, "libcuda.so.1"), None);
    }

    #[test]
    fn what_is_found_and_what_is_missing() {
        let present = Library { name: "liba.so.1".into(), path: Some("/lib/liba.so.1.2".into()) };
        let away = look_for("libnothing-of-this-name.so.7".to_owned());
        assert!(away.path.is_none());
        assert_eq!(
            GpuLibraries::of(vec![present, away]).text(),
            "found: /lib/liba.so.1.2; missing: libnothing-of-this-name.so.7"
        );
        // Every machine that runs this test has the C library.
        assert!(look_for("libc.so.6".to_owned()).path.is_some_and(|path| path.contains("/libc.so")));
    }
}
