//! The one error type of the project, and the exit codes of the binary.
//!
//! An [`Error`] holds *what* failed on which thing, *why* (the chain of causes, with the value
//! found and the values accepted) and a *hint* (a whole command or key to write). Modules return
//! it; only `main` prints it.

mod device_fault;
pub mod input_file;
mod system_limit;

use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

pub use self::device_fault::DeviceFault;
use self::system_limit::SystemLimit;

/// `Result` with the project's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Category of an error, which decides the exit code (DESIGN: command line).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCategory {
    /// The user's input is unusable: a recipe, a model, a data set. Exit code 1.
    User,
    /// The command line does not parse. Exit code 2.
    Usage,
    /// Internal error. Exit code 3.
    Internal,
    /// The numbers diverged (NaN or infinity). Exit code 4.
    Diverged,
    /// Disk full, I/O error. Exit code 74.
    Storage,
    /// A peer or the network failed for now; the same command may work later. Exit code 75.
    Transient,
    /// Stopped by a signal after saving. Exit code 85.
    SavedAndStopped,
    /// Stopped immediately. Exit code 130.
    Stopped,
}

impl ErrorCategory {
    /// The process exit code of this kind.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorCategory::User => 1,
            ErrorCategory::Usage => 2,
            ErrorCategory::Internal => 3,
            ErrorCategory::Diverged => 4,
            ErrorCategory::Storage => 74,
            ErrorCategory::Transient => 75,
            ErrorCategory::SavedAndStopped => 85,
            ErrorCategory::Stopped => 130,
        }
    }
}

/// The failure, its causes and a hint. Displayed as
///
/// ```text
/// error: cannot read model `m`
///   caused by: m/config.json: no such file
/// hint: give a folder that holds config.json, or a hub id such as `org/name`
/// ```
#[derive(Debug, Clone)]
pub struct Error(Box<ErrorParts>);

#[derive(Debug, Clone)]
struct ErrorParts {
    kind: ErrorCategory,
    what: String,
    causes: Vec<String>,
    hint: Option<String>,
    device: Option<FaultOfStep>,
}

/// A GPU fault and the training step in which it occurred.
#[derive(Debug, Clone, Copy)]
struct FaultOfStep {
    fault: DeviceFault,
    step: Option<u64>,
}

/// The function that [`set_memory_report`] registers.
static MEMORY: OnceLock<fn() -> Option<String>> = OnceLock::new();

/// Registers a function that describes the memory of the current thread's GPU. Every later
/// out-of-memory error of a GPU quotes it, because the failed operation frees its memory before the
/// error is shown. Only the first call has an effect.
pub fn set_memory_report(report: fn() -> Option<String>) {
    MEMORY.get_or_init(|| report);
}

impl Error {
    /// A new error of `kind`; `what` is a lower-case phrase without a full stop.
    pub fn new(kind: ErrorCategory, what: impl Into<String>) -> Self {
        Error(Box::new(ErrorParts { kind, what: what.into(), causes: Vec::new(), hint: None, device: None }))
    }

    /// The user's input cannot be used.
    pub fn user(what: impl Into<String>) -> Self {
        Self::new(ErrorCategory::User, what)
    }

    /// Internal error: an invariant of the program does not hold.
    pub fn internal(what: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Internal, what)
    }

    /// An I/O failure while doing `what` to `path`. A missing file, or invalid contents (no UTF-8),
    /// is a user error. A limit on open files or memory is transient and named. Any other failure
    /// is a storage error.
    pub fn io(what: &str, path: &Path, source: &std::io::Error) -> Self {
        let what = format!("cannot {what} {}", path.display());
        if let Some(limit) = SystemLimit::of(source) {
            return Self::of_limit(what, limit, source);
        }
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound
            | std::io::ErrorKind::InvalidData
            | std::io::ErrorKind::IsADirectory
            | std::io::ErrorKind::NotADirectory => ErrorCategory::User,
            _ => ErrorCategory::Storage,
        };
        Self::new(kind, what).because(source.to_string())
    }

    /// The system refused to start `what`, a thread or a process. A system limit is transient and
    /// named; any other reason is internal.
    pub fn cannot_start(what: impl fmt::Display, source: &std::io::Error) -> Self {
        let what = format!("cannot start {what}");
        match SystemLimit::at_start(source) {
            Some(limit) => Self::of_limit(what, limit, source),
            None => Self::internal(what).because(source.to_string()),
        }
    }

    /// A user error while doing `what`, or a transient one that names the system limit behind
    /// `source`.
    pub fn user_or_limit(what: impl Into<String>, source: &std::io::Error) -> Self {
        match SystemLimit::of(source) {
            Some(limit) => Self::of_limit(what.into(), limit, source),
            None => Self::user(what).because(source.to_string()),
        }
    }

    fn of_limit(what: String, limit: SystemLimit, source: &std::io::Error) -> Self {
        Self::new(ErrorCategory::Transient, what).because(source.to_string()).hint(limit.hint())
    }

    /// A failure of a GPU while doing `what`; `reason` is the text of its library.
    pub fn of_device(what: impl Into<String>, reason: &str) -> Self {
        match DeviceFault::of(reason) {
            Some(fault) => Self::of_fault(fault, what).because(reason),
            None => Self::internal(what).because(reason),
        }
    }

    /// A failure of a GPU with a known fault.
    pub fn of_fault(fault: DeviceFault, what: impl Into<String>) -> Self {
        let mut error = Self::new(fault.category(), what).hint(fault.hint());
        error.0.device = Some(FaultOfStep { fault, step: None });
        let figures = MEMORY.get().filter(|_| fault == DeviceFault::OutOfMemory);
        match figures.and_then(|report| report()) {
            Some(figures) => error.because(figures),
            None => error,
        }
    }

    /// The fault of the GPU; none for errors without one, such as an invalid call.
    pub fn device_fault(&self) -> Option<DeviceFault> {
        self.0.device.map(|device| device.fault)
    }

    /// Training step in which the GPU failed, counted from 1.
    pub fn step(&self) -> Option<u64> {
        self.0.device?.step
    }

    /// Records the training step in which a GPU failed; other errors stay unchanged.
    #[must_use]
    pub fn at_step(mut self, step: u64) -> Self {
        if let Some(device) = &mut self.0.device {
            device.step = Some(step);
        }
        self
    }

    /// Adds the reason: the value found and the values accepted.
    #[must_use]
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.0.causes.push(cause.into());
        self
    }

    /// Sets the hint: a whole command or key to write.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Replaces the failure by `what`; the old text becomes the first cause.
    #[must_use]
    pub fn during(mut self, what: impl Into<String>) -> Self {
        let inner = std::mem::replace(&mut self.0.what, what.into());
        self.0.causes.insert(0, inner);
        self
    }

    /// The kind, which decides the exit code.
    pub fn kind(&self) -> ErrorCategory {
        self.0.kind
    }

    /// The failure, without causes and hint.
    pub fn what(&self) -> &str {
        &self.0.what
    }

    /// The whole error in one line, for lists and logs.
    pub fn in_one_line(&self) -> String {
        let text = self.to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        text.replace("\n  caused by: ", ": ").replace("\nhint: ", "; ")
    }

    /// Causes of the failure, outermost first.
    pub fn causes(&self) -> &[String] {
        &self.0.causes
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A requested stop is no error.
        let label = if self.0.kind == ErrorCategory::SavedAndStopped { "" } else { "error: " };
        write!(f, "{label}{}", self.0.what)?;
        for cause in &self.0.causes {
            write!(f, "\n  caused by: {cause}")?;
        }
        match &self.0.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<candle_core::Error> for Error {
    /// The engine checks shapes and dtypes before it calls candle, so candle's errors are internal
    /// ones, except those with a GPU's code, such as out of memory.
    fn from(source: candle_core::Error) -> Self {
        let reason = source.to_string();
        Self::of_device(
            DeviceFault::of(&reason).map_or("a tensor operation failed", DeviceFault::what),
            &reason,
        )
    }
}

/// Adds the failed action to the error of a [`Result`].
pub trait ErrorContext<T> {
    /// See [`Error::during`]; builds the text only for an error.
    ///
    /// # Errors
    /// The error of `self`, as a cause of the new one.
    fn during(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<Error>> ErrorContext<T> for Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.into().during(what()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_from_what_to_why_to_way_out() {
        let error = Error::user("x is 3")
            .because("accepted: 1, 2")
            .hint("write `x = 1`")
            .during("cannot use recipe r");
        assert_eq!(
            error.to_string(),
            "error: cannot use recipe r\n  caused by: x is 3\n  caused by: accepted: 1, 2\nhint: write `x = 1`"
        );
        assert_eq!(error.kind().exit_code(), 1);
        assert_eq!(error.in_one_line(), "cannot use recipe r: x is 3: accepted: 1, 2; write `x = 1`");
    }
}
