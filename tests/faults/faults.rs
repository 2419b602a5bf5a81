//! The preloaded library that injects faults into calls that change files, and its settings.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use crate::skipped::skipped;

/// All letters of calls that change files.
pub(crate) const ALL: &str = "owtsrmu";
/// Letters of calls whose error ends a run; removing is only cleanup.
pub(crate) const NEEDED: &str = "owtsrm";

static LIBRARY: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let built = preloaded("faults", include_str!("faults.c"));
    if let Err(why) = &built {
        skipped("faults at calls that write", why);
    }
    built.ok()
});

/// Returns the library; None, after printing it, if this machine cannot build it.
pub(crate) fn library() -> Option<&'static Path> {
    LIBRARY.as_deref()
}

/// Compiles `source` to the library `name`, for preloading into a process.
pub(crate) fn preloaded(name: &str, source: &str) -> Result<PathBuf, String> {
    if !cfg!(all(target_os = "linux", target_env = "gnu")) {
        return Err("they are struck by preloading a library, as Linux with glibc does".into());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (file, library) = (folder.join(format!("{name}.c")), folder.join(format!("lib{name}.so")));
    // Another test process may build it at the same time.
    let made = folder.join(format!("lib{name}-{}.so", std::process::id()));
    std::fs::write(&file, source).map_err(|e| e.to_string())?;
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&made).arg(&file).arg("-ldl");
    let done = compiler.output().map_err(|e| format!("there is no C compiler (cc): {e}"))?;
    if !done.status.success() {
        return Err(format!("cc fails: {}", String::from_utf8_lossy(&done.stderr)));
    }
    std::fs::rename(made, &library).map_err(|e| e.to_string())?;
    Ok(library)
}

/// A fault injected into a process.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fault<'a> {
    /// The number of the failing call, from 1; 0 for none.
    pub(crate) at: usize,
    /// An error number, `kill`, `int` or `stop`.
    pub(crate) what: String,
    /// Letters of counted calls; empty for all.
    pub(crate) ops: &'a str,
    /// Text that the path of a counted call must contain.
    pub(crate) only: &'a str,
    /// Letters of calls that keep failing afterwards.
    pub(crate) sticky: &'a str,
    /// Free bytes that the disk reports from call `at` on.
    pub(crate) free: Option<u64>,
}

impl Fault<'_> {
    /// Injects the fault into `command` at its calls below `root`; each counted call writes a line
    /// to the file `log`.
    pub(crate) fn strike(&self, command: &mut Command, root: &Path, log: Option<&Path>) {
        command.env("LD_PRELOAD", library().unwrap()).env("FAULT_ROOT", root);
        let texts = [
            ("FAULT_DO", &*self.what),
            ("FAULT_OPS", self.ops),
            ("FAULT_ONLY", self.only),
            ("FAULT_STICKY", self.sticky),
        ];
        for (name, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
            command.env(name, text);
        }
        command.env("FAULT_AT", self.at.to_string());
        self.free.map(|free| command.env("FAULT_FREE", free.to_string()));
        log.map(|log| command.env("FAULT_LOG", log));
    }
}

/// Returns the calls of `command` below `root` that match `ops`, one a line.
pub(crate) fn calls(command: &mut Command, root: &Path, ops: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    Fault { ops, ..Fault::default() }.strike(command, root, Some(&log));
    let done = crate::finish(command);
    assert_eq!(done.code, Some(0), "{done:?}");
    std::fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect()
}
