//! Work on files of unknown origin in a child process with limits of memory and time.
//!
//! A chat template is a program, and the parsers of some formats believe what a file claims: a few bytes of either can
//! ask for terabytes, nest until the stack ends, or never end, and none of the crates that read them has a bound for
//! all of it. A process can have one. So the binary starts itself again as such a child (`sandboxed-parser`), without an
//! environment and with nothing open but its pipes; whatever ends the child is an error of its file, and the work of
//! this process goes on.
//!
//! The child's limits are the system's: address space, processor time of what it is asked, no new files, no core dump. A
//! program that is not this binary (a test that calls the library) has no such child: see [`is_available`]. The child's
//! own side is [`super::sandboxed`].
//!
//! A child that runs into one of these limits is the fault of its input. A child that the system does not start, that
//! something else kills, or to which the system refuses its limits, is none: see [`ChildEnd`]. The limits end a child by
//! SIGPROF (processor time), by an allocation that fails (memory, SIGABRT) or by the end of its stack (SIGSEGV or SIGABRT),
//! never by SIGKILL, which is the signal of the system when memory is short, and of a person.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::error::{Error, ErrorCategory, Result};
use crate::program;

/// The first argument of the binary as a child; the second says which work it is to do.
pub(super) const ARGUMENT: &str = "sandboxed-parser";

/// The binary to start; none in other programs.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// What a child does.
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

    /// The work of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        let tables = [SandboxedWork::Parquet, SandboxedWork::Arrow];
        let mut all = [SandboxedWork::ChatTemplate, SandboxedWork::Tokenizer].into_iter().chain(tables);
        all.find(|work| work.name() == name)
    }
}

/// From now on work is done in child processes that run `program`, a `finetune` binary. The first call decides.
pub fn run_in(program: PathBuf) {
    PROGRAM.get_or_init(|| program);
}

/// From now on work is done in child processes that run this process's own binary, which is `finetune`.
pub fn run_in_this_program() {
    if let Ok(program) = program::own() {
        run_in(program);
    }
}

/// Whether there are child processes to do the work in.
pub(super) fn is_available() -> bool {
    PROGRAM.get().is_some()
}

/// The reason for which a child gave no answer.
#[derive(Debug, Clone)]
pub(super) enum ChildEnd {
    /// The input, in words: it is refused, or it took all of the child's memory, stack or processor time.
    ByInput(String),
    /// The machine: a process that does not start, or that something other than its own limits ended. The input may be
    /// innocent, so this is never a fault of a row or of a file.
    ByMachine(Error),
}

impl ChildEnd {
    /// The error of having failed at `what`; its category tells the two kinds apart.
    pub(super) fn into_error(self, what: impl Into<String>) -> Error {
        match self {
            ChildEnd::ByInput(why) => Error::user(what).because(why),
            ChildEnd::ByMachine(error) => error.during(what),
        }
    }
}

/// A child process at work.
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
    /// Transient: the system starts no process.
    pub(super) fn start(work: SandboxedWork, input: Option<Stdio>) -> Result<Self> {
        let program = PROGRAM.get().ok_or_else(|| Error::internal("no program to start was named"))?;
        let mut command = Command::new(program);
        command.args([ARGUMENT, work.name()]).env_clear().current_dir("/");
        // Where the binary's own libraries are looked for.
        command.envs(std::env::var_os("LD_LIBRARY_PATH").map(|path| ("LD_LIBRARY_PATH", path)));
        command.stdin(input.unwrap_or_else(Stdio::piped)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|error| not_started(program, &error))?;
        let replies = process.stdout.take().ok_or_else(|| Error::internal("a child without a pipe"))?;
        let requests = process.stdin.take().map(BufWriter::new);
        Ok(SandboxedChild { process, requests, replies: BufReader::with_capacity(1 << 16, replies) })
    }

    /// The answer to `request`.
    ///
    /// # Errors
    /// Why the child ended instead of answering.
    pub(super) fn ask(&mut self, request: &[u8]) -> Result<Vec<u8>, ChildEnd> {
        if let Some(requests) = &mut self.requests {
            // A child that has ended cannot read; the reason is found below.
            let _ = write_frame(requests, request).and_then(|()| requests.flush());
        }
        self.next()
    }

    /// The next answer.
    ///
    /// # Errors
    /// Why the child ended instead of answering.
    pub(super) fn next(&mut self) -> Result<Vec<u8>, ChildEnd> {
        read_frame(&mut self.replies).map_err(|error| self.why_ended(&error))
    }

    fn why_ended(&mut self, error: &io::Error) -> ChildEnd {
        self.requests = None;
        if error.kind() != io::ErrorKind::UnexpectedEof {
            // The child has not ended by itself, and might wait for a reader of its answers.
            let _ = self.process.kill();
            let _ = self.process.wait();
            return match error.kind() {
                io::ErrorKind::InvalidData => ChildEnd::ByInput(UNREADABLE.to_owned()),
                _ => ChildEnd::ByMachine(lost(format!("its answers cannot be read: {error}"))),
            };
        }
        let mut said = String::new();
        if let Some(errors) = &mut self.process.stderr {
            let _ = errors.take(4096).read_to_string(&mut said);
        }
        match self.process.wait() {
            Ok(status) => ended(status, &said),
            Err(error) => ChildEnd::ByMachine(lost(format!("its process was lost: {error}"))),
        }
    }
}

/// The reason where a child's answer makes no sense.
pub(super) const UNREADABLE: &str = "its process gave no answer that can be read";

/// The system does not start a process: the limit that stopped it.
fn not_started(program: &Path, error: &io::Error) -> Error {
    let cannot = Error::new(
        ErrorCategory::Transient,
        "cannot start a process of its own for a file of unknown origin",
    )
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

/// The way out where the machine takes a child's memory or process away.
const MORE_MEMORY: &str = "raise the memory of the job (`memory.max` of the container, `ulimit -v`), or set \
     `RAYON_NUM_THREADS` lower";

/// A child that is gone, and not by its own limits.
fn lost(why: String) -> Error {
    Error::new(ErrorCategory::Transient, "the process for a file of unknown origin was ended from outside")
        .because(why)
}

/// The end of a child that wrote `said` to its standard error.
fn ended(status: ExitStatus, said: &str) -> ChildEnd {
    if said.contains("memory allocation") || said.contains("out of memory") {
        if said.contains(NOT_GRANTED) {
            let why = "it needs more memory than the machine lets it have (`ulimit -v`, `ulimit -d`)";
            return ChildEnd::ByMachine(lost(why.to_owned()).hint(MORE_MEMORY));
        }
        return ChildEnd::ByInput(format!("it needs more than {} MiB of memory", MEMORY_BYTES >> 20));
    }
    if said.contains("overflowed its stack") {
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
            let why = "it reached the limit of processor time that this process was started with";
            ChildEnd::ByMachine(lost(why.to_owned()).hint("raise `ulimit -t`"))
        }
        (Some(signal), _) => ChildEnd::ByMachine(lost(format!("it was ended by signal {signal}"))),
        // The loader of programs ends with 127 when it lacks memory or files.
        (None, Some(code)) if code == i32::from(REFUSED_BY_SYSTEM) || code == 127 => {
            ChildEnd::ByMachine(lost(format!("the system refused it something: {}", said.trim())))
        }
        (None, _) => ChildEnd::ByInput(format!("its process ended with {status}")),
    }
}

/// The exit code of a child to which the system refuses a limit, or its pipes.
pub(super) const REFUSED_BY_SYSTEM: u8 = 75;

/// A child's note that the machine's limits leave it less memory than its own would.
pub(super) const NOT_GRANTED: &str = "less memory granted than asked for";

impl Drop for SandboxedChild {
    fn drop(&mut self) {
        // One that ended by itself is no fault.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Memory of a child beyond what its binary needs and what it was given, in bytes.
pub(super) const MEMORY_BYTES: u64 = 512 << 20;

/// Processor time of a request, or of all requests of a row, beyond that for their size.
pub(super) const REQUEST_TIME: Duration = Duration::from_millis(800);
/// Bytes of a file to read for which there is a second more.
pub(super) const BYTES_PER_SECOND: u64 = 8 << 20;

/// The time for the size of a request of `bytes` bytes.
pub(super) fn time_for_size(bytes: u64, bytes_per_second: u64) -> Duration {
    Duration::from_micros(bytes.saturating_mul(1_000_000) / bytes_per_second)
}

/// The reason where a child, or all children of a row, used up their processor time.
pub(super) const TOO_LONG: &str = "it takes more processor time than a row or file is given";

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

    /// The limits of a child are faults of its input; all else is none, and says which limit to raise.
    #[test]
    fn an_end_from_outside_is_no_fault_of_the_input() {
        let by_signal = |signal, said: &str| ended(ExitStatus::from_raw(signal), said);
        let by_code = |code: i32, said: &str| ended(ExitStatus::from_raw(code << 8), said);
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
