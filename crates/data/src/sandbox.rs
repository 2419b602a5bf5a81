//! Processes files of unknown origin in a child process with limits of memory and time.
//!
//! A chat template is a program, and the parsers of some formats trust the sizes in a file. A few
//! bytes of either can request terabytes, overflow the stack or never end, and no crate that reads
//! them bounds all of this. The system can limit a process. So the binary starts itself again as a
//! child (`sandboxed-parser`), without an environment and with only its pipes open. If the child
//! ends, its file is in error, and this process continues.
//!
//! The system enforces the limits: address space, processor time of a request, no new files, no
//! core dump. A program that is not this binary (a test that calls the library) has no such child:
//! see `is_available`. [`super::sandboxed`] is the child's side.
//!
//! If a child exceeds one of these limits, its input is at fault. The input is not at fault if the
//! system does not start the child or refuses its limits, or something else kills it: see
//! `ChildEnd`. The limits end a child by SIGPROF (processor time), by a failed allocation
//! (memory, SIGABRT) or by a stack overflow (SIGSEGV or SIGABRT). They never send SIGKILL: that
//! comes from the system when memory is short, or from a person.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::error::{Error, ErrorCategory, Result};
use crate::program;

/// The first argument of the binary as a child; the second names its work.
pub(super) const ARGUMENT: &str = "sandboxed-parser";

/// The binary to start; unset in other programs.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// The work of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SandboxedWork {
    /// Renders a chat template.
    ChatTemplate,
    /// Encodes and decodes with a tokenizer.
    Tokenizer,
    /// Reads the rows of the Parquet file that is its standard input.
    Parquet,
    /// Reads the rows of the Arrow file that is its standard input.
    Arrow,
}

impl SandboxedWork {
    fn name(self) -> &'static str {
        match self {
            SandboxedWork::ChatTemplate => "chat-template",
            SandboxedWork::Tokenizer => "tokenizer",
            SandboxedWork::Parquet => "parquet",
            SandboxedWork::Arrow => "arrow",
        }
    }

    /// The work with this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        let tables = [SandboxedWork::Parquet, SandboxedWork::Arrow];
        let mut all = [SandboxedWork::ChatTemplate, SandboxedWork::Tokenizer].into_iter().chain(tables);
        all.find(|work| work.name() == name)
    }
}

/// Enables child processes, which run `program`: `finetune`, or another program whose `main` calls
/// [`super::sandboxed::serve_if_asked`] first. Only the first call has an effect.
pub fn run_in(program: PathBuf) {
    PROGRAM.get_or_init(|| program);
}

/// Enables child processes that run this process's own binary; see [`run_in`].
pub fn run_in_this_program() {
    if let Ok(program) = program::own() {
        run_in(program);
    }
}

/// Returns true if child processes are enabled.
pub(super) fn is_available() -> bool {
    PROGRAM.get().is_some()
}

/// The reason why a child gave no answer.
#[derive(Debug, Clone)]
pub(super) enum ChildEnd {
    /// The input is at fault: the child refuses it, or it exceeds the child's memory, stack or
    /// processor time.
    ByInput(String),
    /// The machine is at fault: the process does not start, or something other than its own limits
    /// ended it. This is never a fault of a row or a file.
    ByMachine(Error),
}

impl ChildEnd {
    /// Converts to an error with the message `what`: a user error for [`ChildEnd::ByInput`].
    pub(super) fn into_error(self, what: impl Into<String>) -> Error {
        match self {
            ChildEnd::ByInput(why) => Error::user(what).because(why),
            ChildEnd::ByMachine(error) => error.during(what),
        }
    }
}

/// A running child process.
#[derive(Debug)]
pub(super) struct SandboxedChild {
    process: Child,
    requests: Option<BufWriter<ChildStdin>>,
    replies: BufReader<ChildStdout>,
}

impl SandboxedChild {
    /// Starts a child for `work`, which reads requests, or `input` instead.
    ///
    /// # Errors
    /// Fails with a transient error if the system starts no process.
    pub(super) fn start(work: SandboxedWork, input: Option<Stdio>) -> Result<Self> {
        let program =
            PROGRAM.get().ok_or_else(|| Error::internal("no program for child processes is set"))?;
        let mut command = Command::new(program);
        command.args([ARGUMENT, work.name()]).env_clear().current_dir("/");
        // The binary searches its own libraries there.
        command.envs(std::env::var_os("LD_LIBRARY_PATH").map(|path| ("LD_LIBRARY_PATH", path)));
        command.stdin(input.unwrap_or_else(Stdio::piped)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|error| not_started(program, &error))?;
        let replies =
            process.stdout.take().ok_or_else(|| Error::internal("a child process has no output pipe"))?;
        let requests = process.stdin.take().map(BufWriter::new);
        Ok(SandboxedChild { process, requests, replies: BufReader::with_capacity(1 << 16, replies) })
    }

    /// Sends `request` and returns the answer.
    ///
    /// # Errors
    /// Fails with the reason why the child gave no answer.
    pub(super) fn ask(&mut self, request: &[u8]) -> Result<Vec<u8>, ChildEnd> {
        if let Some(requests) = &mut self.requests {
            // If the child has ended, `next` finds the reason.
            let _ = write_frame(requests, request).and_then(|()| requests.flush());
        }
        self.next()
    }

    /// The next answer.
    ///
    /// # Errors
    /// Fails with the reason why the child gave no answer.
    pub(super) fn next(&mut self) -> Result<Vec<u8>, ChildEnd> {
        read_frame(&mut self.replies).map_err(|error| self.why_ended(&error))
    }

    fn why_ended(&mut self, error: &io::Error) -> ChildEnd {
        self.requests = None;
        if error.kind() != io::ErrorKind::UnexpectedEof {
            // The child may still run and wait for a reader of its answers.
            let _ = self.process.kill();
            let _ = self.process.wait();
            return match error.kind() {
                io::ErrorKind::InvalidData => ChildEnd::ByInput(UNREADABLE.to_owned()),
                _ => ChildEnd::ByMachine(lost(format!("its answers cannot be read: {error}"))),
            };
        }
        let mut stderr = String::new();
        if let Some(errors) = &mut self.process.stderr {
            let _ = errors.take(4096).read_to_string(&mut stderr);
        }
        match self.process.wait() {
            Ok(status) => ended(status, &stderr),
            Err(error) => ChildEnd::ByMachine(lost(format!("its process was lost: {error}"))),
        }
    }
}

/// The reason for an answer that cannot be parsed.
pub(super) const UNREADABLE: &str = "the answer of its process cannot be read";

/// The error of a process that does not start, with the limit to raise.
fn not_started(program: &Path, error: &io::Error) -> Error {
    let cannot =
        Error::new(ErrorCategory::Transient, "cannot start a child process for a file of unknown origin")
            .because(format!("{}: {error}", program.display()));
    match error.raw_os_error() {
        Some(libc::EAGAIN) => cannot.hint(
            "raise the limit of processes and threads (`ulimit -u`, or `pids.max` of the container), or set \
             `RAYON_NUM_THREADS` lower",
        ),
        Some(libc::EMFILE | libc::ENFILE) => cannot.hint("raise the limit of open files: `ulimit -n`"),
        Some(libc::ENOMEM) => cannot.hint(MORE_MEMORY),
        _ => cannot,
    }
}

/// The hint if the machine limits a child's memory or kills it.
const MORE_MEMORY: &str = "raise the memory of the job (`memory.max` of the container, `ulimit -v`), or set \
     `RAYON_NUM_THREADS` lower";

/// The error of a child that ended, but not by its own limits.
fn lost(why: String) -> Error {
    Error::new(
        ErrorCategory::Transient,
        "something outside ended the child process for a file of unknown origin",
    )
    .because(why)
}

/// Classifies the end of a child that wrote `stderr` to its standard error.
fn ended(status: ExitStatus, stderr: &str) -> ChildEnd {
    if stderr.contains("memory allocation") || stderr.contains("out of memory") {
        if stderr.contains(NOT_GRANTED) {
            let why = "it needs more memory than the machine allows (`ulimit -v`, `ulimit -d`)";
            return ChildEnd::ByMachine(lost(why.to_owned()).hint(MORE_MEMORY));
        }
        return ChildEnd::ByInput(format!("it needs more than {} MiB of memory", MEMORY_BYTES >> 20));
    }
    if stderr.contains("overflowed its stack") {
        return ChildEnd::ByInput("it nests too deep".to_owned());
    }
    match (status.signal(), status.code()) {
        (Some(libc::SIGPROF), _) => ChildEnd::ByInput(TOO_LONG.to_owned()),
        (Some(libc::SIGSEGV | libc::SIGBUS | libc::SIGABRT), _) => ChildEnd::ByInput(format!(
            "it nests too deep, or needs more than {} MiB of memory",
            MEMORY_BYTES >> 20
        )),
        (Some(libc::SIGKILL), _) => {
            let why = "it was killed (signal 9), as the system does when memory is short";
            ChildEnd::ByMachine(lost(why.to_owned()).hint(MORE_MEMORY))
        }
        (Some(libc::SIGXCPU), _) => {
            let why = "it reached the machine's limit of processor time";
            ChildEnd::ByMachine(lost(why.to_owned()).hint("raise `ulimit -t`"))
        }
        (Some(signal), _) => ChildEnd::ByMachine(lost(format!("it was ended by signal {signal}"))),
        // The program loader exits with 127 if it gets no memory or files.
        (None, Some(code)) if code == i32::from(REFUSED_BY_SYSTEM) || code == 127 => {
            ChildEnd::ByMachine(lost(format!("the system refused a resource: {}", stderr.trim())))
        }
        (None, _) => ChildEnd::ByInput(format!("its process ended with {status}")),
    }
}

/// Exit code of a child if the system refuses a limit, or its pipes.
pub(super) const REFUSED_BY_SYSTEM: u8 = 75;

/// A child's note that the machine's limits allow less memory than its own limit.
pub(super) const NOT_GRANTED: &str = "less memory granted than asked for";

impl Drop for SandboxedChild {
    fn drop(&mut self) {
        // Fails if the child has ended already, which is fine.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Memory of a child in bytes, beyond that of its binary and its input.
pub(super) const MEMORY_BYTES: u64 = 512 << 20;

/// Processor time of a request, or of all requests of a row, beyond that for their size.
pub(super) const REQUEST_TIME: Duration = Duration::from_millis(800);
/// Bytes of a file that add one second of processor time.
pub(super) const BYTES_PER_SECOND: u64 = 8 << 20;

/// The time for the size of a request of `bytes` bytes.
pub(super) fn time_for_size(bytes: u64, bytes_per_second: u64) -> Duration {
    Duration::from_micros(bytes.saturating_mul(1_000_000) / bytes_per_second)
}

/// The reason if a child, or all children of a row, used up their processor time.
pub(super) const TOO_LONG: &str = "it takes more processor time than a row or file may use";

/// The largest frame: a row is no larger.
const MAX_FRAME_BYTES: u64 = 4 << 30;

/// Writes one message.
pub(super) fn write_frame(to: &mut impl Write, body: &[u8]) -> std::io::Result<()> {
    to.write_all(&(body.len() as u64).to_le_bytes())?;
    to.write_all(body)
}

/// Reads one message; memory grows only with what has arrived.
pub(super) fn read_frame(from: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_FRAME_BYTES {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut body = Vec::with_capacity(length.min(1 << 20) as usize);
    let read = from.take(length).read_to_end(&mut body)?;
    if read as u64 == length { Ok(body) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exceeding a child's limits is a fault of its input; every other end names the limit to
    /// raise.
    #[test]
    fn an_end_from_outside_is_no_fault_of_the_input() {
        let by_signal = |signal, stderr: &str| ended(ExitStatus::from_raw(signal), stderr);
        let by_code = |code: i32, stderr: &str| ended(ExitStatus::from_raw(code << 8), stderr);
        for end in [
            by_signal(libc::SIGPROF, ""),
            by_signal(libc::SIGABRT, "memory allocation of 9 bytes failed"),
            by_signal(libc::SIGABRT, "thread 'main' has overflowed its stack"),
            by_signal(libc::SIGSEGV, ""),
            by_code(101, "panicked"),
        ] {
            assert!(matches!(end, ChildEnd::ByInput(_)), "{end:?}");
            assert_eq!(end.into_error("cannot render").kind(), ErrorCategory::User);
        }
        for (end, hint) in [
            (by_signal(libc::SIGKILL, ""), "memory.max"),
            (by_signal(libc::SIGXCPU, ""), "ulimit -t"),
            (
                by_signal(libc::SIGABRT, &format!("{NOT_GRANTED}\nmemory allocation of 9 bytes failed")),
                "ulimit -v",
            ),
            (by_signal(libc::SIGQUIT, ""), "signal 3"),
            (by_code(127, "error while loading shared libraries"), "shared libraries"),
            (by_code(REFUSED_BY_SYSTEM.into(), ""), "refused"),
        ] {
            let error = end.into_error("cannot render");
            assert_eq!(error.kind(), ErrorCategory::Transient, "{error}");
            assert!(error.to_string().contains(hint), "{error}");
        }
        for (errno, hint) in
            [(libc::EAGAIN, "pids.max"), (libc::EMFILE, "ulimit -n"), (libc::ENOMEM, "memory.max")]
        {
            let error = not_started(Path::new("finetune"), &io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), ErrorCategory::Transient);
            assert!(error.to_string().contains(hint), "{error}");
        }
    }

    #[test]
    fn a_frame_that_claims_more_than_comes_is_refused() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, b"abc").unwrap();
        assert_eq!(read_frame(&mut &bytes[..]).unwrap(), b"abc");
        assert!(read_frame(&mut &bytes[..10]).is_err());
        for claimed in [u64::MAX, MAX_FRAME_BYTES, 5] {
            let frame = [&claimed.to_le_bytes()[..], b"abc"].concat();
            assert!(read_frame(&mut &frame[..]).is_err(), "{claimed}");
        }
    }
}
