//! A server that each alarm is posted to.
//!
//! Its address is a secret: whoever knows it can post there. It leaves this module as the address of a request and in no
//! other way; messages name the host alone.

use std::thread;
use std::time::Duration;

use ureq::Agent;
use ureq::http::Uri;

use super::alarm::OutgoingAlarm;
use super::delivery::AlarmChannel;

/// How long a server may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often an alarm is posted before it is given up.
const TRIES: u32 = 3;
/// The pause before the second try; the next one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The address of a server.
pub(super) struct AlarmWebhook {
    address: Uri,
    agent: Agent,
    timeout: Duration,
    first_pause: Duration,
}

/// Why a try failed.
struct FailedPost {
    why: String,
    /// Another try may succeed.
    passes: bool,
}

impl AlarmWebhook {
    /// A server at `address`; none if that is no address.
    pub(super) fn new(address: &str) -> Option<Self> {
        Self::patient(address, TIMEOUT, FIRST_PAUSE)
    }

    fn patient(address: &str, timeout: Duration, first_pause: Duration) -> Option<Self> {
        let address: Uri = address.parse().ok()?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // An alarm is not posted to where an answer points: whoever it is about chose this server.
            .max_redirects(0)
            .user_agent(concat!("finetune/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(timeout));
        if address.host().is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host)) {
            config = config.proxy(None);
        }
        Some(AlarmWebhook { address, agent: config.build().into(), timeout, first_pause })
    }

    fn post(&self, json: &str) -> Result<(), FailedPost> {
        let request = self.agent.post(&self.address).header("Content-Type", "application/json");
        match request.send(json.as_bytes()) {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => {
                let status = answer.status();
                let passes = status.is_server_error() || [408, 425, 429].contains(&status.as_u16());
                Err(FailedPost { why: format!("it answers with HTTP status {}", status.as_u16()), passes })
            }
            Err(error) => Err(FailedPost { why: self.say(&error), passes: true }),
        }
    }

    /// What went wrong, in words that hold no address.
    fn say(&self, error: &ureq::Error) -> String {
        match error {
            ureq::Error::Timeout(_) => format!("it did not answer in {} s", self.timeout.as_secs_f64()),
            ureq::Error::HostNotFound => "its name is not known".into(),
            ureq::Error::ConnectionFailed => "there is no connection to it".into(),
            ureq::Error::Io(error) => format!("the connection failed: {}", error.kind()),
            ureq::Error::Tls(_) | ureq::Error::Rustls(_) => {
                "TLS failed: its certificate may not be trusted".into()
            }
            _ => "the request failed".into(),
        }
    }
}

impl AlarmChannel for AlarmWebhook {
    fn name(&self) -> String {
        format!("the webhook at {}", self.address.host().unwrap_or_default())
    }

    fn send(&self, alarm: &OutgoingAlarm) -> Result<(), String> {
        let json = alarm.to_json();
        let mut pause = self.first_pause;
        for attempt in 1.. {
            match self.post(&json) {
                Ok(()) => break,
                Err(failed) if attempt < TRIES && failed.passes => thread::sleep(pause),
                Err(failed) => return Err(failed.why),
            }
            pause *= 2;
        }
        Ok(())
    }
}
