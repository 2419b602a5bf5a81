//! Planted faults for tests: a rank fails, panics, leaves or is late when it enters a phase.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::collective::Phase;
use crate::error::{Error, Result};
use crate::runtime::clock;
use crate::runtime::planned_failure::PlannedFailure;

/// Effect of a fault on the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFaultKind {
    /// `enter` returns an error.
    Error,
    /// The call of `enter` panics.
    Panic,
    /// The rank leaves silently: its peers get no message, and its later ones are ignored.
    Exit,
    /// The rank sleeps once.
    Delay(Duration),
    /// The rank sleeps at this and every later entry: it is slow.
    Slow(Duration),
    /// Every later call of the rank takes this much longer, as over a slow link.
    SlowLink(Duration),
    /// The rank sleeps before each later message to this rank: the link between the two is slow.
    SlowLinkTo(usize, Duration),
    /// The rank's thread sleeps forever.
    Hang,
    /// The rank's thread computes forever.
    Spin,
    /// The whole process stops, as by SIGSTOP.
    Stop,
    /// The next memory request on the rank's device fails, or the next kernel launch under the
    /// emulator.
    Device(PlannedFailure),
    /// `enter` returns a GPU's error of an earlier kernel.
    LateKernelFault,
}

/// Names of the kinds of faults without a number.
const KINDS: [(&str, InjectedFaultKind); 9] = [
    ("error", InjectedFaultKind::Error),
    ("panic", InjectedFaultKind::Panic),
    ("exit", InjectedFaultKind::Exit),
    ("out_of_memory", InjectedFaultKind::Device(PlannedFailure::Request)),
    ("launch_fault", InjectedFaultKind::Device(PlannedFailure::Launch)),
    ("late_fault", InjectedFaultKind::LateKernelFault),
    ("hang", InjectedFaultKind::Hang),
    ("spin", InjectedFaultKind::Spin),
    ("stop", InjectedFaultKind::Stop),
];

/// Constructor of a fault with a number of milliseconds.
type TimedKind = fn(Duration) -> InjectedFaultKind;

/// Names of the kinds of faults with a number.
const TIMED_KINDS: [(&str, TimedKind); 3] = [
    ("delay", InjectedFaultKind::Delay),
    ("slow", InjectedFaultKind::Slow),
    ("slow_link", InjectedFaultKind::SlowLink),
];

impl InjectedFaultKind {
    /// Delays, hangs or stops the calling thread, if the fault does so.
    pub(in crate::collective) fn hold_up(self) {
        match self {
            InjectedFaultKind::Delay(time) | InjectedFaultKind::Slow(time) => clock::pass(time),
            InjectedFaultKind::Hang => {
                clock::hold_up();
                loop {
                    std::thread::park();
                }
            }
            InjectedFaultKind::Spin => {
                clock::hold_up();
                loop {
                    std::hint::spin_loop();
                }
            }
            InjectedFaultKind::Stop => {
                // SAFETY: stops this process until it gets SIGCONT.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            _ => {}
        }
    }
}

/// A fault of `rank` when it enters `phase` for the `occurrence`th time.
///
/// Text form `RANK:PHASE[:OCCURRENCE]:KIND`: `1:backward:panic`, `0:save:2:error`, `2:data:exit`,
/// `1:forward:delay=250ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedFault {
    /// Rank in the world.
    pub rank: usize,
    /// Phase at whose entry it strikes.
    pub phase: Phase,
    /// Number of the entry, from 1.
    pub occurrence: u64,
    /// Effect on the rank.
    pub kind: InjectedFaultKind,
}

impl InjectedFault {
    /// True if it strikes the rank at the `time`th entry of its phase.
    pub(in crate::collective) fn strikes_at(&self, time: u64) -> bool {
        match self.kind {
            InjectedFaultKind::Slow(_) => time >= self.occurrence,
            _ => time == self.occurrence,
        }
    }

    /// Error of a copy to the host after a kernel's illegal memory access.
    pub(in crate::collective) fn late_kernel_fault(&self) -> Error {
        let reason = "DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access was encountered\")";
        Error::from(candle_core::Error::Cuda(reason.into())).because(format!("planted fault {self}"))
    }
}

impl fmt::Display for InjectedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.rank, self.phase.name())?;
        if self.occurrence != 1 {
            write!(f, ":{}", self.occurrence)?;
        }
        let word = KINDS.iter().find(|(_, kind)| *kind == self.kind).map(|(word, _)| *word);
        match (word, self.kind) {
            (_, InjectedFaultKind::Delay(time)) => write!(f, ":delay={}ms", time.as_millis()),
            (_, InjectedFaultKind::Slow(time)) => write!(f, ":slow={}ms", time.as_millis()),
            (_, InjectedFaultKind::SlowLink(time)) => write!(f, ":slow_link={}ms", time.as_millis()),
            (_, InjectedFaultKind::SlowLinkTo(to, time)) => write!(f, ":slow_to_{to}={}ms", time.as_millis()),
            (word, _) => write!(f, ":{}", word.unwrap_or_default()),
        }
    }
}

impl FromStr for InjectedFault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        let read = match parts[..] {
            [rank, phase, kind] => read(rank, phase, "1", kind),
            [rank, phase, occurrence, kind] => read(rank, phase, occurrence, kind),
            _ => Err("expected RANK:PHASE:KIND or RANK:PHASE:OCCURRENCE:KIND".to_owned()),
        };
        read.map_err(|cause| {
            Error::user(format!("cannot read the planted fault `{text}`"))
                .because(cause)
                .hint("write a fault such as `1:backward:panic` or `0:save:2:delay=250ms`")
        })
    }
}

fn read(rank: &str, phase: &str, occurrence: &str, kind: &str) -> Result<InjectedFault, String> {
    Ok(InjectedFault {
        rank: rank.parse().map_err(|_| format!("the rank is `{rank}`, expected a number from 0"))?,
        phase: Phase::ALL.into_iter().find(|known| known.name() == phase).ok_or_else(|| {
            format!("the phase is `{phase}`, expected one of {}", Phase::ALL.map(Phase::name).join(", "))
        })?,
        occurrence: (occurrence.parse().ok().filter(|n| *n > 0))
            .ok_or_else(|| format!("the occurrence is `{occurrence}`, expected a number from 1"))?,
        kind: read_kind(kind)?,
    })
}

fn read_kind(kind: &str) -> Result<InjectedFaultKind, String> {
    if let Some((_, known)) = KINDS.iter().find(|(word, _)| *word == kind) {
        return Ok(*known);
    }
    if let Some(link) = kind.strip_prefix("slow_to_") {
        let read = link.split_once('=').and_then(|(to, time)| {
            let millis = time.strip_suffix("ms")?.parse().ok()?;
            Some(InjectedFaultKind::SlowLinkTo(to.parse().ok()?, Duration::from_millis(millis)))
        });
        return read.ok_or_else(|| format!("the slow link is `{link}`, expected slow_to_<rank>=<n>ms"));
    }
    let timed = TIMED_KINDS.into_iter().find_map(|(word, make)| {
        let time = kind.strip_prefix(word)?.strip_prefix('=')?.strip_suffix("ms")?;
        Some((word, make, time))
    });
    match timed {
        Some((word, make, time)) => match time.parse() {
            Ok(millis) => Ok(make(Duration::from_millis(millis))),
            Err(_) => Err(format!("the {word} is `{time}` ms, expected a whole number")),
        },
        None => {
            let words = KINDS.map(|(word, _)| word).join(", ");
            Err(format!(
                "the kind is `{kind}`, expected {words}, delay=<n>ms, slow=<n>ms, slow_link=<n>ms or slow_to_<rank>=<n>ms"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for (text, occurrence, kind) in [
            ("1:backward:panic", 1, InjectedFaultKind::Panic),
            ("1:backward:7:error", 7, InjectedFaultKind::Error),
            ("1:backward:2:exit", 2, InjectedFaultKind::Exit),
            ("1:backward:out_of_memory", 1, InjectedFaultKind::Device(PlannedFailure::Request)),
            ("1:backward:3:late_fault", 3, InjectedFaultKind::LateKernelFault),
            ("1:backward:delay=250ms", 1, InjectedFaultKind::Delay(Duration::from_millis(250))),
            ("1:backward:2:slow=40ms", 2, InjectedFaultKind::Slow(Duration::from_millis(40))),
            ("1:backward:slow_link=3ms", 1, InjectedFaultKind::SlowLink(Duration::from_millis(3))),
            ("1:backward:slow_to_2=40ms", 1, InjectedFaultKind::SlowLinkTo(2, Duration::from_millis(40))),
            ("1:backward:hang", 1, InjectedFaultKind::Hang),
            ("1:backward:spin", 1, InjectedFaultKind::Spin),
            ("1:backward:stop", 1, InjectedFaultKind::Stop),
        ] {
            let fault: InjectedFault = text.parse().unwrap();
            assert_eq!(fault, InjectedFault { rank: 1, phase: Phase::Backward, occurrence, kind });
            assert_eq!(fault.to_string(), text);
        }
        for phase in Phase::ALL {
            assert_eq!(format!("0:{}:error", phase.name()).parse::<InjectedFault>().unwrap().phase, phase);
        }
    }

    #[test]
    fn says_what_it_cannot_read() {
        for (text, cause) in [
            ("", "expected RANK:PHASE:KIND or RANK:PHASE:OCCURRENCE:KIND"),
            ("1:2:3:4:5", "expected RANK:PHASE:KIND or RANK:PHASE:OCCURRENCE:KIND"),
            ("x:save:error", "the rank is `x`, expected a number from 0"),
            ("-1:save:error", "the rank is `-1`, expected a number from 0"),
            (
                "0:Save:0:error",
                "the phase is `Save`, expected one of meet, load, data, forward, loss, backward",
            ),
            ("0:save:0:error", "the occurrence is `0`, expected a number from 1"),
            (
                "0:save:boom",
                "the kind is `boom`, expected error, panic, exit, out_of_memory, launch_fault, late_fault, hang, spin, stop, delay=<n>ms, slow=<n>ms, slow_link=<n>ms or slow_to_<rank>=<n>ms",
            ),
            ("0:save:delay=2s", "the kind is `delay=2s`, expected error, panic, exit, out_of_memory"),
            ("0:save:slow_to_x=2ms", "the slow link is `x=2ms`, expected slow_to_<rank>=<n>ms"),
            ("0:save:delay=-2ms", "the delay is `-2` ms, expected a whole number"),
        ] {
            let error = text.parse::<InjectedFault>().unwrap_err();
            assert_eq!(error.kind().exit_code(), 1);
            assert!(error.causes()[0].starts_with(cause), "{error}");
        }
    }
}
