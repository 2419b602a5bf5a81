//! Where, for how long, and with which secret the processes of a run look for each other.

use std::ffi::OsString;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::auth::Secret;
use crate::error::{Error, Result};

const BIND: &str = "FINETUNE_RDZV_BIND";
const TIMEOUT: &str = "FINETUNE_RDZV_TIMEOUT";

/// Where the process of rank 0 listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    /// Host name or IP address.
    pub address: String,
    /// The first port that may be used.
    pub port: u16,
    /// How many ports from there on may be used: 1, or more where the first may belong to someone else.
    pub ports: u16,
}

impl Master {
    /// Whether the address can be reached from this host alone, as far as its text tells.
    pub fn is_loopback(&self) -> bool {
        let ip = self.address.parse::<IpAddr>();
        ip.map_or_else(|_| self.address.eq_ignore_ascii_case("localhost"), |ip| ip.is_loopback())
    }

    /// The ports that may be used, in the order in which they are tried.
    pub(super) fn all_ports(&self) -> impl Iterator<Item = u16> {
        let first = self.port;
        (0..self.ports).map(move |offset| first.saturating_add(offset))
    }
}

/// Gets a line for the log: a refused connection, once for each reason.
pub type LogLine = Arc<dyn Fn(&str) + Send + Sync>;

/// How the processes of a run find and authenticate each other.
#[derive(Clone)]
pub struct RendezvousOptions {
    /// Where rank 0 listens; none when one process holds all ranks.
    pub master: Option<Master>,
    /// Names the run, so that two runs on one host keep apart; may be empty.
    pub run: String,
    /// Whether the launcher says that there are several hosts.
    pub has_several_hosts: bool,
    /// The secret by which a process proves that it belongs to the run.
    pub secret: Secret,
    /// How long to wait until all have joined.
    pub join_timeout: Duration,
    /// How long rank 0 waits for the rest once the rendezvous cannot succeed any more, so that they hear why.
    pub rejection_timeout: Duration,
    /// How long a call waits for the other processes.
    pub call_timeout: Duration,
    /// Whether those that have joined by then go on without the ranks that have not.
    pub elastic: bool,
    /// How long nothing may be heard of a process that has joined.
    pub silence_limit: Duration,
    /// The address of this host that rank 0 listens on, where the master address is not one (behind a NAT).
    pub bind: Option<String>,
    /// Gets what is to be logged.
    pub log: LogLine,
}

impl std::fmt::Debug for RendezvousOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("RendezvousOptions");
        shown.field("master", &self.master).field("run", &self.run).field("secret", &self.secret);
        shown.field("join_timeout", &self.join_timeout).field("bind", &self.bind);
        shown.finish_non_exhaustive()
    }
}

impl RendezvousOptions {
    /// The options with `master` and `secret` and the defaults: 300 s to join, 1800 s for a call, 15 s of silence.
    pub fn new(master: Option<Master>, secret: Secret) -> Self {
        RendezvousOptions {
            master,
            run: String::new(),
            has_several_hosts: false,
            secret,
            join_timeout: Duration::from_secs(300),
            rejection_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(1800),
            elastic: false,
            silence_limit: Duration::from_secs(15),
            bind: None,
            log: Arc::new(|_| {}),
        }
    }

    /// The options with `master` and what the environment names: the secret (without one that of the user, for the
    /// loopback address), `FINETUNE_RDZV_TIMEOUT` (seconds to wait for all ranks) and `FINETUNE_RDZV_BIND`.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] when a variable cannot be used, or a secret cannot be kept.
    pub fn from_environment(
        master: Option<Master>,
        lookup: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        let mut options = Self::new(master, Secret::from_environment(lookup)?);
        if let (Secret::Absent, Some(master)) = (&options.secret, &options.master) {
            match Secret::of_user(lookup) {
                Ok(secret) => options.secret = secret,
                Err(error) if master.is_loopback() => return Err(error),
                // Without it an address of this host is refused once its name is resolved; others are in any case.
                Err(_) => {}
            }
        }
        let text = |name: &str| {
            let value = lookup(name).filter(|value| !value.is_empty())?;
            Some(value.to_string_lossy().into_owned())
        };
        if let Some(value) = text(TIMEOUT) {
            let secs = value.parse().ok().filter(|secs| (1..=86_400).contains(secs));
            let secs = secs.ok_or_else(|| {
                Error::user(format!("cannot use {TIMEOUT}"))
                    .because(format!("it is `{value}`; accepted: 1 to 86400 (seconds)"))
            })?;
            options.join_timeout = Duration::from_secs(secs);
        }
        options.bind = text(BIND);
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_names_what_it_accepts() {
        let find = |name: &str| (name == TIMEOUT).then(|| OsString::from("soon"));
        let error = RendezvousOptions::from_environment(None, &find).unwrap_err().to_string();
        assert!(error.contains("`soon`; accepted: 1 to 86400"), "{error}");
        let find = |name: &str| (name == TIMEOUT).then(|| OsString::from("60"));
        let options = RendezvousOptions::from_environment(None, &find).unwrap();
        assert_eq!(options.join_timeout, Duration::from_secs(60));
    }
}
