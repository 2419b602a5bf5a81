//! System limits on threads, processes, files and memory, each with the setting that raises it.

use std::io;

/// A limit of the system that a call has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SystemLimit {
    /// Threads and processes of a user or of a container.
    Tasks,
    /// Open files of a process.
    Files,
    /// Open files of the machine.
    FilesOfMachine,
    /// Memory or address space.
    Memory,
}

impl SystemLimit {
    /// The limit behind a failed start of a thread or a process.
    pub(crate) fn at_start(error: &io::Error) -> Option<Self> {
        match error.raw_os_error()? {
            libc::EAGAIN => Some(SystemLimit::Tasks),
            _ => Self::of(error),
        }
    }

    /// The limit behind a failure of any other call, for which EAGAIN has another meaning.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        match error.raw_os_error()? {
            libc::EMFILE => Some(SystemLimit::Files),
            libc::ENFILE => Some(SystemLimit::FilesOfMachine),
            libc::ENOMEM => Some(SystemLimit::Memory),
            _ => None,
        }
    }

    /// Hint that names the setting to raise.
    pub(crate) fn hint(self) -> &'static str {
        match self {
            SystemLimit::Tasks => {
                "raise the limit on threads and processes, of the user (`ulimit -u`) or of the container (pids.max), \
                 or set RAYON_NUM_THREADS to a smaller number"
            }
            SystemLimit::Files => "raise the limit on open files of a process (`ulimit -n`)",
            SystemLimit::FilesOfMachine => "raise the limit on open files of the machine (fs.file-max)",
            SystemLimit::Memory => {
                "free memory, or raise the limit on it: `ulimit -v`, `ulimit -d`, or memory.max of the container"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_that_of_the_call() {
        let of = |code| io::Error::from_raw_os_error(code);
        assert_eq!(SystemLimit::at_start(&of(libc::EAGAIN)), Some(SystemLimit::Tasks));
        assert_eq!(SystemLimit::of(&of(libc::EAGAIN)), None);
        assert_eq!(SystemLimit::at_start(&of(libc::EMFILE)), Some(SystemLimit::Files));
        assert_eq!(SystemLimit::of(&of(libc::ENOMEM)), Some(SystemLimit::Memory));
        assert_eq!(SystemLimit::of(&of(libc::EIO)), None);
        assert_eq!(SystemLimit::of(&io::ErrorKind::NotFound.into()), None);
    }
}
