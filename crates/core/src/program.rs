//! Programs that finetune starts: itself, and those in the recipe or on the command line.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Path of this process's program, for starting it again.
///
/// # Errors
/// The system does not provide the path.
pub fn own() -> io::Result<PathBuf> {
    // The link refers to the running file, even if another file replaced it on disk.
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() { Ok(link) } else { std::env::current_exe() }
}

/// Checks that the system can start the program `name`: a path, or a name in a folder of PATH.
///
/// # Errors
/// The text says why not.
pub fn find(name: &str) -> Result<(), String> {
    if name.contains('/') {
        return check(Path::new(name));
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = std::env::split_paths(&folders).map(|folder| folder.join(name)).collect();
    if places.iter().any(|path| check(path).is_ok()) {
        return Ok(());
    }
    // An existing file that fails the check explains more than all missing ones.
    let problem = places.iter().find(|path| path.is_file()).and_then(|path| check(path).err());
    Err(problem.unwrap_or_else(|| format!("no folder of PATH has a program `{name}`")))
}

/// Checks that `path` is a program that this process may start.
///
/// # Errors
/// The text names the path and the reason why it cannot be started.
pub fn check(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let metadata = path.metadata().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("{shown} does not exist"),
        _ => format!("cannot look at {shown}: {error}"),
    })?;
    if !metadata.is_file() {
        return Err(format!("{shown} is not a file"));
    }
    let is_executable = CString::new(path.as_os_str().as_bytes()).is_ok_and(|path| {
        // SAFETY: a system call that reads a text which ends with a zero byte.
        unsafe { libc::access(path.as_ptr(), libc::X_OK) == 0 }
    });
    if is_executable { Ok(()) } else { Err(format!("{shown} is not executable; `chmod +x` makes it so")) }
}
