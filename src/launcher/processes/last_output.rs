//! The last output of a process, which nobody sees unless the process ends the run.

use std::io::{ErrorKind, PipeReader, Read as _};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::launcher::child::POLL;
use crate::locks::locked;
use crate::threads;

/// Bytes of the output that are kept.
const KEPT_BYTES: usize = 16 << 10;

/// Lines of the output that are printed.
const SHOWN_LINES: usize = 20;

/// Longest wait for the output of a process that has ended: a program that it started may hold the
/// pipe open.
const PATIENCE: Duration = Duration::from_secs(1);

/// The last output of a process, stdout and stderr.
pub(super) struct LastOutput {
    last_bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl LastOutput {
    /// Connects stdout and stderr of `command`, the process `name`, to a thread that reads them.
    /// The command keeps the pipe open until it is dropped.
    ///
    /// # Errors
    /// [`Error::cannot_start`]: the system gives no pipe or no thread.
    pub(super) fn of(command: &mut Command, name: &str) -> Result<Self> {
        let failed = |error: std::io::Error| Error::cannot_start(format!("the output of {name}"), &error);
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        command.stdin(Stdio::null()).stdout(writer.try_clone().map_err(failed)?).stderr(writer);
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let theirs = Arc::clone(&bytes);
        let reader = threads::start(&format!("output of {name}"), move || keep_last(reader, &theirs))?;
        Ok(LastOutput { last_bytes: bytes, reader })
    }

    /// Returns the last lines that the process, which has ended, has written.
    pub(super) fn lines(&self) -> Vec<String> {
        let begin = Instant::now();
        while !self.reader.is_finished() && begin.elapsed() < PATIENCE {
            std::thread::sleep(POLL);
        }
        let text = String::from_utf8_lossy(&locked(&self.last_bytes)).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].iter().map(|line| (*line).to_owned()).collect()
    }
}

/// Reads `pipe` to its end and keeps the last bytes in `last_bytes`.
fn keep_last(mut pipe: PipeReader, last_bytes: &Mutex<Vec<u8>>) {
    let mut piece = [0; 4096];
    loop {
        match pipe.read(&mut piece) {
            Ok(0) => return,
            Ok(count) => {
                let mut output = locked(last_bytes);
                output.extend_from_slice(&piece[..count]);
                let beyond = output.len().saturating_sub(KEPT_BYTES);
                output.drain(..beyond);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
