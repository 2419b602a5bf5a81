//! Addresses, timeouts and secret of a rendezvous.

use std::ffi::OsString;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::auth::{self, Secret};
use crate::error::{Error, Result};

const BIND: &str = "FINETUNE_RDZV_BIND";
const TIMEOUT: &str = "FINETUNE_RDZV_TIMEOUT";

/// Address of the process of rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    /// Host name or IP address.
    pub address: String,
    /// First port that may be used.
    pub port: u16,
    /// Number of ports that may be used from there: 1, or more if another program may use the
    /// first.
    pub ports: u16,
}

impl Master {
    /// Returns true if the text of the address shows that only this host can reach it.
    pub fn is_loopback(&self) -> bool {
        let ip = self.address.parse::<IpAddr>();
        ip.map_or_else(|_| self.address.eq_ignore_ascii_case("localhost"), |ip| ip.is_loopback())
    }

    /// Ports that may be used, in the order of attempts.
    pub(super) fn all_ports(&self) -> impl Iterator<Item = u16> {
        let first = self.port;
        (0..self.ports).map(move |offset| first.saturating_add(offset))
    }
}

/// Receives a line for the log: a refused connection, once per reason.
pub type LogLine = Arc<dyn Fn(&str) + Send + Sync>;

/// Options of a rendezvous.
#[derive(Clone)]
pub struct RendezvousOptions {
    /// Address of rank 0; none if one process holds all ranks.
    pub master: Option<Master>,
    /// Name of the run, which separates two runs on one host; may be empty.
    pub run: String,
    /// True if the launcher reports several hosts.
    pub has_several_hosts: bool,
    /// Secret with which a process proves that it belongs to the run.
    pub secret: Secret,
    /// Maximum time until all have joined.
    pub join_timeout: Duration,
    /// Time that rank 0 waits for missing processes after the rendezvous has failed, so that they
    /// get the reason.
    pub rejection_timeout: Duration,
    /// Maximum time that a call waits for the other processes.
    pub call_timeout: Duration,
    /// True if the run starts without the ranks that are missing at the timeout.
    pub elastic: bool,
    /// Maximum silence of a joined process.
    pub silence_limit: Duration,
    /// Address of this host on which rank 0 listens, if the master address belongs to another
    /// device (behind a NAT).
    pub bind: Option<String>,
    /// Receives log lines.
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
    /// The options with `master` and `secret` and the defaults: 300 s to join, 1800 s for a call,
    /// 15 s of silence.
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

    /// Creates options with `master` and the environment: the secret (by default the user's, for
    /// the loopback address), `FINETUNE_RDZV_TIMEOUT` (seconds to wait for all ranks) and
    /// `FINETUNE_RDZV_BIND`.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] if a variable is unusable, or a secret cannot be
    /// stored.
    pub fn from_environment(
        master: Option<Master>,
        lookup: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        let mut options = Self::new(master, Secret::from_environment(lookup)?);
        if let (Secret::Absent, Some(master)) = (&options.secret, &options.master) {
            match Secret::of_user(lookup) {
                Ok(secret) => options.secret = secret,
                Err(error) if master.is_loopback() => return Err(error),
                // Without it, the listener refuses an address of this host once its name is
                // resolved, and other addresses anyway.
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

/// Variables for processes that this process starts on this host, and that meet on its loopback
/// address: a new secret; none of a variable means to remove it.
///
/// # Errors
/// The system gives no random bytes.
pub fn one_host_environment() -> Result<[(&'static str, Option<String>); 4]> {
    let secret = String::from_utf8_lossy(&auth::random_digits()?).into_owned();
    Ok([(auth::SECRET, Some(secret)), (auth::SECRET_FILE, None), (auth::WITHOUT_SECRET, None), (BIND, None)])
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

    /// Each run on one host has a secret of its own, whatever its user has set.
    #[test]
    fn processes_of_one_host_get_a_new_secret() {
        let [first, second] = [one_host_environment().unwrap(), one_host_environment().unwrap()];
        assert_ne!(first[0].1, second[0].1);
        let find = |name: &str| {
            first
                .iter()
                .find(|(known, _)| *known == name)
                .and_then(|(_, value)| value.as_ref())
                .map(OsString::from)
        };
        let options = RendezvousOptions::from_environment(None, &find).unwrap();
        assert!(options.secret.is_shared() && options.bind.is_none());
        let removed: Vec<&str> =
            first.iter().filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
        assert_eq!(
            removed,
            ["FINETUNE_RDZV_SECRET_FILE", "FINETUNE_RDZV_WITHOUT_SECRET", "FINETUNE_RDZV_BIND"]
        );
    }
}
