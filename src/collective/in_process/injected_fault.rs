//! Faults planted for tests: a rank that errors, panics, leaves or is late on entering a phase.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::collective::Phase;
use crate::error::{Error, Result};

/// What happens to the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFaultKind {
    /// `enter` returns an error.
    Error,
    /// A panic inside of `enter`.
    Panic,
    /// The rank leaves without a word: its peers are told nothing, and what it says later is not heard.
    Exit,
    /// The rank sleeps first.
    Delay(Duration),
}

/// A fault that strikes `rank` when it enters `phase` for the `occurrence`th time.
///
/// Written `RANK:PHASE[:OCCURRENCE]:KIND`: `1:backward:panic`, `0:save:2:error`, `2:data:exit`, `1:forward:delay=250ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectedFault {
    /// Rank in the world.
    pub rank: usize,
    /// On entering it.
    pub phase: Phase,
    /// Which time, from 1.
    pub occurrence: u64,
    /// What then happens.
    pub kind: InjectedFaultKind,
}

impl fmt::Display for InjectedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.rank, self.phase.name())?;
        if self.occurrence != 1 {
            write!(f, ":{}", self.occurrence)?;
        }
        match self.kind {
            InjectedFaultKind::Error => write!(f, ":error"),
            InjectedFaultKind::Panic => write!(f, ":panic"),
            InjectedFaultKind::Exit => write!(f, ":exit"),
            InjectedFaultKind::Delay(time) => write!(f, ":delay={}ms", time.as_millis()),
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
        kind: match (kind, kind.strip_prefix("delay=").and_then(|time| time.strip_suffix("ms"))) {
            ("error", _) => InjectedFaultKind::Error,
            ("panic", _) => InjectedFaultKind::Panic,
            ("exit", _) => InjectedFaultKind::Exit,
            (_, Some(time)) => InjectedFaultKind::Delay(Duration::from_millis(
                time.parse().map_err(|_| format!("the delay is `{time}` ms, expected a whole number"))?,
            )),
            _ => return Err(format!("the kind is `{kind}`, expected error, panic, exit or delay=<n>ms")),
        },
    })
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
            ("1:backward:delay=250ms", 1, InjectedFaultKind::Delay(Duration::from_millis(250))),
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
            ("0:save:boom", "the kind is `boom`, expected error, panic, exit or delay=<n>ms"),
            ("0:save:delay=2s", "the kind is `delay=2s`, expected error, panic, exit or delay=<n>ms"),
            ("0:save:delay=-2ms", "the delay is `-2` ms, expected a whole number"),
        ] {
            let error = text.parse::<InjectedFault>().unwrap_err();
            assert_eq!(error.kind().exit_code(), 1);
            assert!(error.causes()[0].starts_with(cause), "{error}");
        }
    }
}
