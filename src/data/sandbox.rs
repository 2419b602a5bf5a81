//! Work on files of unknown origin in a child process with limits of memory and time.
//!
//! A chat template is a program, and the parsers of some formats believe what a file claims: a few bytes of either can
//! ask for terabytes, nest until the stack ends, or never end, and none of the crates that read them has a bound for
//! all of it. A process can have one. So the binary starts itself again as such a child (`sandboxed-parser`), without an
//! environment and with nothing open but its pipes; whatever ends the child is an error of its file, and the work of
//! this process goes on.
//!
//! The child's limits are the system's: address space, processor time of one request, no new files, no core dump. A
//! program that is not this binary (a test that calls the library) has no such child: see [`is_available`]. What the child does stands
//! in [`super::sandboxed`].

use std::io::{BufReader, BufWriter, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
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
    /// Reads the rows of the Parquet file that is its standard input.
    Parquet,
}

impl SandboxedWork {
    fn name(self) -> &'static str {
        match self {
            SandboxedWork::ChatTemplate => "chat-template",
            SandboxedWork::Parquet => "parquet",
        }
    }

    /// The work of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        [SandboxedWork::ChatTemplate, SandboxedWork::Parquet].into_iter().find(|work| work.name() == name)
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
        let cannot = |why: String| {
            Error::new(
                ErrorCategory::Transient,
                "cannot start a process of its own for a file of unknown origin",
            )
            .because(why)
        };
        let program = PROGRAM.get().ok_or_else(|| Error::internal("no program to start was named"))?;
        let mut command = Command::new(program);
        command.args([ARGUMENT, work.name()]).env_clear().current_dir("/");
        // Where the binary's own libraries are looked for.
        command.envs(std::env::var_os("LD_LIBRARY_PATH").map(|path| ("LD_LIBRARY_PATH", path)));
        command.stdin(input.unwrap_or_else(Stdio::piped)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(|e| cannot(format!("{}: {e}", program.display())))?;
        let replies = process.stdout.take().ok_or_else(|| Error::internal("a child without a pipe"))?;
        let requests = process.stdin.take().map(BufWriter::new);
        Ok(SandboxedChild { process, requests, replies: BufReader::with_capacity(1 << 16, replies) })
    }

    /// The answer to `request`.
    ///
    /// # Errors
    /// Why the child ended instead of answering.
    pub(super) fn ask(&mut self, request: &[u8]) -> Result<Vec<u8>, String> {
        if let Some(requests) = &mut self.requests {
            // A child that has ended cannot read; why it did is said below.
            let _ = write_frame(requests, request).and_then(|()| requests.flush());
        }
        self.next()
    }

    /// The next answer.
    ///
    /// # Errors
    /// Why the child ended instead of answering.
    pub(super) fn next(&mut self) -> Result<Vec<u8>, String> {
        match read_frame(&mut self.replies) {
            Ok(reply) => Ok(reply),
            Err(error) => Err(self.why_ended(&error)),
        }
    }

    /// Whether it was ended by a kill, which is none of its limits.
    pub(super) fn was_killed(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(Some(status)) if status.signal() == Some(libc::SIGKILL))
    }

    fn why_ended(&mut self, error: &std::io::Error) -> String {
        self.requests = None;
        if error.kind() != std::io::ErrorKind::UnexpectedEof {
            // It has not ended by itself, and might wait for a reader of its answers.
            let _ = self.process.kill();
        }
        let mut said = String::new();
        if let Some(errors) = &mut self.process.stderr {
            let _ = errors.take(4096).read_to_string(&mut said);
        }
        let status = self.process.wait();
        let Ok(status) = status else { return "its process was lost".to_owned() };
        if said.contains("memory allocation") || said.contains("out of memory") {
            return format!("it needs more than {} MiB of memory", MEMORY_BYTES >> 20);
        }
        if said.contains("overflowed its stack") {
            return "it nests too deep".to_owned();
        }
        ended(status)
    }
}

impl Drop for SandboxedChild {
    fn drop(&mut self) {
        // One that ended by itself is no fault.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGPROF) => "it takes more processor time than is given to one request".to_owned(),
        Some(libc::SIGSEGV | libc::SIGBUS | libc::SIGABRT) => {
            format!("it nests too deep, or needs more than {} MiB of memory", MEMORY_BYTES >> 20)
        }
        Some(signal) => format!("its process was ended by signal {signal}"),
        None => format!("its process ended with {status}"),
    }
}

/// Memory of a child beyond what its binary needs and what it was given, in bytes.
pub(super) const MEMORY_BYTES: u64 = 512 << 20;

/// Processor time of one request, beyond that for its size.
pub(super) const REQUEST_TIME: Duration = Duration::from_millis(800);
/// Bytes of a request for which there is a second more.
pub(super) const BYTES_PER_SECOND: u64 = 8 << 20;

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
