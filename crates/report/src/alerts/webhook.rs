//! A server that gets each alert by POST.
//!
//! Its address is a secret: anyone who knows it can post to it. It leaves this module only as the
//! address of a request; messages name the host alone.

use std::thread;
use std::time::Duration;

use ureq::Agent;
use ureq::http::Uri;

use super::alert::OutgoingAlert;
use super::delivery::AlertChannel;
use crate::address;
use crate::error::{Error, Result};

/// Time limit for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses before the second and the third attempt.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];

/// The address of a server.
pub(super) struct AlertWebhook {
    address: Uri,
    agent: Agent,
    timeout: Duration,
    pauses: [Duration; 2],
}

impl AlertWebhook {
    /// Creates the channel to the server at `address`.
    ///
    /// # Errors
    /// `User` if `address` or the proxy of the environment is not a usable address.
    pub(super) fn new(address: &str) -> Result<Self> {
        Self::patient(address, TIMEOUT, PAUSES)
    }

    fn patient(address: &str, timeout: Duration, pauses: [Duration; 2]) -> Result<Self> {
        let refused = |why: String| Error::user("cannot post alerts (`alerts.webhook`)").because(why);
        let address = address::http(address).map_err(refused)?;
        // Redirects are not followed: the user chose this server, and no other.
        let config = address::agent_for(&address)?.timeout_global(Some(timeout));
        Ok(AlertWebhook { agent: config.build().into(), address, timeout, pauses })
    }

    /// Posts once; an error has the reason, and whether another attempt may succeed.
    fn post(&self, json: &str) -> Result<(), (String, bool)> {
        let request = self.agent.post(&self.address).header("Content-Type", "application/json");
        let status = request.send(json.as_bytes()).map(|answer| answer.status().as_u16());
        // Others are final.
        let passes = matches!(status, Err(_) | Ok(408 | 425 | 429 | 500..));
        let why = match status {
            Ok(200..300) => return Ok(()),
            Ok(status) => format!("it answers with HTTP status {status}"),
            Err(ureq::Error::Timeout(_)) => format!("it did not answer in {} s", self.timeout.as_secs_f64()),
            Err(ureq::Error::Io(error)) => format!("the connection failed: {}", error.kind()),
            // Texts without the address.
            Err(error @ (ureq::Error::HostNotFound | ureq::Error::ConnectionFailed)) => error.to_string(),
            Err(ureq::Error::Tls(_) | ureq::Error::Rustls(_)) => "its certificate may not be trusted".into(),
            Err(_) => "the request failed".into(),
        };
        Err((why, passes))
    }
}

impl AlertChannel for AlertWebhook {
    fn name(&self) -> String {
        format!("the webhook at {}", self.address.host().unwrap_or_default())
    }

    fn send(&self, alert: &OutgoingAlert) -> Result<(), String> {
        let json = alert.to_json();
        let mut pauses = self.pauses.iter();
        loop {
            match (self.post(&json), pauses.next()) {
                (Ok(()), _) => return Ok(()),
                (Err((_, true)), Some(pause)) => thread::sleep(*pause),
                (Err((why, _)), _) => return Err(why),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
pub(super) mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use super::super::alert::Alert;
    use super::*;

    const PAUSED: [Duration; 2] = [Duration::from_millis(1); 2];

    /// A server that gives these answers in turn, and repeats the last one; `nothing` stands for
    /// one that never comes.
    pub(in super::super) struct ServerDouble {
        pub(in super::super) address: String,
        pub(in super::super) posted: Arc<Mutex<Vec<String>>>,
    }

    impl ServerDouble {
        pub(in super::super) fn start(answers: Vec<String>) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("http://{}/hook", listener.local_addr().unwrap());
            let posted = Arc::new(Mutex::new(Vec::new()));
            let heard = Arc::clone(&posted);
            thread::spawn(move || {
                let mut held = Vec::new();
                for (number, stream) in listener.incoming().enumerate() {
                    let mut stream = stream.unwrap();
                    let body = body_of(&stream);
                    heard.lock().unwrap().push(body);
                    let answer = &answers[number.min(answers.len() - 1)];
                    if answer.is_empty() {
                        held.push(stream);
                    } else {
                        stream.write_all(answer.as_bytes()).unwrap();
                    }
                }
            });
            ServerDouble { address, posted }
        }

        /// Returns the result of one alert, and the number of posts.
        fn posted(&self) -> (Result<(), String>, usize) {
            self.posted_within(Duration::from_secs(30))
        }

        fn posted_within(&self, timeout: Duration) -> (Result<(), String>, usize) {
            let webhook = AlertWebhook::patient(&self.address, timeout, PAUSED).unwrap();
            let alert = Alert {
                rule: "stall",
                step: 7,
                value: Some(61.0),
                message: "no step".into(),
                time: "now".into(),
            };
            let sent = webhook.send(&OutgoingAlert::new(alert, "out", "node7"));
            let posted = self.posted.lock().unwrap();
            assert!(posted.iter().all(|body| body.contains(r#""step":7"#)), "{posted:?}");
            (sent, posted.len())
        }
    }

    fn body_of(stream: &TcpStream) -> String {
        let mut reader = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            length = line.strip_prefix("content-length:").map_or(length, |text| text.trim().parse().unwrap());
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        String::from_utf8(body).unwrap()
    }

    pub(in super::super) fn status(status: u16, more: &str) -> String {
        format!("HTTP/1.1 {status} X\r\n{more}content-length: 0\r\nconnection: close\r\n\r\n")
    }

    /// The times of docs/alerts.md: 10 seconds to answer, three attempts, after 1 and 2 seconds.
    #[test]
    fn a_server_has_as_long_as_the_page_says() {
        assert_eq!((TIMEOUT.as_secs(), PAUSES.map(|pause| pause.as_secs())), (10, [1, 2]));
        let page = include_str!("../../../../docs/alerts.md");
        assert!(page.contains(
            "A server has 10 seconds to answer. finetune tries three times, after pauses of 1 and 2 seconds."
        ));
    }

    #[test]
    fn a_server_that_does_not_answer_in_time_is_asked_three_times() {
        let silent = ServerDouble::start(vec![String::new()]);
        let (result, _) = silent.posted_within(Duration::from_millis(200));
        assert_eq!(result, Err("it did not answer in 0.2 s".into()));
        // The server may read the last one later than that.
        while silent.posted.lock().unwrap().len() < 3 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // One answer in time is enough.
        let late = ServerDouble::start(vec![String::new(), String::new(), status(204, "")]);
        assert_eq!(late.posted_within(Duration::from_secs(5)), (Ok(()), 3));
    }

    /// The time limit is for the whole answer, not for a byte.
    #[test]
    fn a_server_whose_answer_drips_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/hook", listener.local_addr().unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                body_of(&stream);
                let answer = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "y".repeat(200));
                for byte in answer.bytes() {
                    thread::sleep(Duration::from_millis(5));
                    if stream.write_all(&[byte]).is_err() {
                        break;
                    }
                }
            }
        });
        let webhook = AlertWebhook::patient(&address, Duration::from_millis(300), PAUSED).unwrap();
        assert_eq!(webhook.post("{}").map_err(|(why, _)| why), Err("it did not answer in 0.3 s".into()));
    }

    #[test]
    fn of_the_refusals_only_those_that_pass_are_tried_again() {
        for number in [400, 401, 403, 404, 410, 422, 499] {
            let server = ServerDouble::start(vec![status(number, ""), status(200, "")]);
            assert_eq!(server.posted(), (Err(format!("it answers with HTTP status {number}")), 1));
        }
        for number in [408, 425, 429, 500, 503] {
            let server = ServerDouble::start(vec![status(number, ""), status(200, "")]);
            assert_eq!(server.posted(), (Ok(()), 2), "{number}");
            let server = ServerDouble::start(vec![status(number, "")]);
            assert_eq!(server.posted(), (Err(format!("it answers with HTTP status {number}")), 3));
        }
    }

    #[test]
    fn no_redirect_is_followed() {
        for number in [301, 302, 303, 307, 308] {
            let elsewhere = ServerDouble::start(vec![status(200, "")]);
            let server =
                ServerDouble::start(vec![status(number, &format!("location: {}\r\n", elsewhere.address))]);
            assert_eq!(server.posted(), (Err(format!("it answers with HTTP status {number}")), 1));
            assert_eq!(elsewhere.posted.lock().unwrap().len(), 0, "{number}");
        }
    }
}
