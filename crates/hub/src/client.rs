//! Requests to a hub: the description of a repository, the facts of a file, the bytes of a file.
//!
//! The crate hf-hub 0.5 gives the layout of the cache and of the addresses; the requests go through
//! ureq, which hf-hub uses too. A caller cannot guard hf-hub's own download. It drops the headers
//! of a refusal (`X-Error-Code`, `Retry-After`), sends the token to the host of a redirect, and
//! uses the server's ETag as a file name unchecked. It has no timeout, and moves a file into the
//! cache before a caller can verify it.

use std::io::Read;
use std::ops::Range;
use std::time::{Duration, Instant};

use hf_hub::Repo;
use ureq::http::{HeaderMap, Method, Response};
use ureq::{Agent, Body, BodyReader};

use super::digest::Digest;
use super::options::{HubOptions, Retry};
use super::redirect::Redirect;
use super::refusal::{ErrorResponse, Request};
use super::speed::{SpeedWatch, TooSlow};
use super::{DownloadEvent, DownloadProgress};
use crate::address;
use crate::error::{Error, ErrorCategory, Result};
use crate::units;

/// More than the largest descriptions, small enough for memory.
const MAX_DESCRIPTION_BYTES: u64 = 64 << 20;
const MAX_REDIRECTS: usize = 5;
/// Bytes before a range to read from a server without ranges. Enough for a header, not for most
/// tensors.
const MAX_SKIPPED_BYTES: u64 = 1 << 20;
/// The longest pause that a server may ask for; a longer one is an error.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(300);

/// The failure of an attempt.
pub(super) enum HttpFault {
    /// Another attempt may succeed, after `wait` if the server gave one.
    Passing { reason: String, wait: Option<Duration> },
    /// Another attempt would fail too.
    Final(Error),
}

/// The hub's description of a repository.
pub(super) struct RepoDescription {
    /// The commit of the revision, as the hub wrote it.
    pub(super) commit: String,
    pub(super) gated: bool,
    /// The names of all files, not checked.
    pub(super) files: Vec<String>,
}

/// Digest and size of a file, as the hub announces them.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) digest: Digest,
    pub(super) size: u64,
}

/// Some bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange {
    /// The requested bytes; fewer if the file ends before.
    pub bytes: Vec<u8>,
    /// The size of the whole file.
    pub file_bytes: u64,
}

/// An answer that is no redirect, and its source.
struct FinalResponse {
    response: Response<Body>,
    hop: Redirect,
}

/// The answer to a request for the bytes of a file.
pub(super) enum Bytes {
    /// The bytes from this offset on.
    From(u64, BodyReader<'static>),
    /// The file is shorter than the offset asked for.
    BeyondEnd,
}

/// One repository of one hub.
pub(super) struct Client<'a> {
    options: &'a HubOptions,
    agent: Agent,
    repo: Repo,
    subject: String,
    page: String,
}

impl<'a> Client<'a> {
    /// `subject` names the repository in messages, such as "model `a/b`".
    ///
    /// # Errors
    /// `User` if the proxy of the environment or the clock allows no request.
    pub(super) fn new(options: &'a HubOptions, repo: Repo, subject: String) -> Result<Self> {
        let endpoint = address::http(options.endpoint()).map_err(Error::internal)?;
        let config = address::agent_for(&endpoint)?
            .timeout_connect(Some(options.retry.stall))
            .timeout_recv_response(Some(options.retry.stall))
            .timeout_per_read(Some(options.retry.stall));
        let page = format!("{}/{}", options.endpoint(), repo.url());
        Ok(Client { options, agent: config.build().into(), repo, subject, page })
    }

    pub(super) fn retry(&self) -> &'a Retry {
        &self.options.retry
    }

    pub(super) fn subject(&self) -> &str {
        &self.subject
    }

    /// Requests the description of the repository at its revision.
    pub(super) fn describe(&self, progress: &mut DownloadProgress<'_>) -> Result<RepoDescription> {
        let url = format!("{}/api/{}", self.options.endpoint(), self.repo.api_url());
        self.patiently(progress, || {
            let answered = self.get(&url, None, Some(self.deadline()))?;
            if answered.response.status() != 200 {
                return Err(self.refused(&answered, None, false));
            }
            self.read_description(answered.response)
        })
    }

    fn read_description(&self, response: Response<Body>) -> Result<RepoDescription, HttpFault> {
        #[derive(serde::Deserialize)]
        struct JsonPage {
            sha: String,
            #[serde(default)]
            gated: Gated,
            siblings: Vec<Sibling>,
        }
        #[derive(serde::Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        // ureq's own limit counts bytes on the wire, which gzip can expand a thousandfold.
        let mut bytes = Vec::new();
        let mut body = response.into_body().into_reader().take(MAX_DESCRIPTION_BYTES + 1);
        body.read_to_end(&mut bytes).map_err(|e| self.transport(&e.into()))?;
        if bytes.len() as u64 > MAX_DESCRIPTION_BYTES {
            return Err(self.not_a_hub(&format!(
                "its description of the repository has more than {MAX_DESCRIPTION_BYTES} bytes"
            )));
        }
        let wire: JsonPage = serde_json::from_slice(&bytes).map_err(|e| self.not_a_hub(&e.to_string()))?;
        if !super::names::is_commit(&wire.sha) {
            return Err(self.not_a_hub("its `sha` is not the hash of a commit"));
        }
        Ok(RepoDescription {
            commit: wire.sha,
            gated: wire.gated.0,
            files: wire.siblings.into_iter().map(|sibling| sibling.rfilename).collect(),
        })
    }

    /// Requests size and digest of a file. The hub's own answer has them, so the client follows a
    /// redirect to another origin only while one is missing.
    pub(super) fn facts(
        &self,
        commit: &str,
        file: &str,
        gated: bool,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<Facts> {
        self.patiently(progress, || {
            let (mut etag, mut size) = (None, None);
            let mut hop = self.first_hop(&self.file_url(commit, file))?;
            let deadline = Some(self.deadline());
            for _ in 0..=MAX_REDIRECTS {
                let response = self.send(Method::HEAD, &hop, Some(""), deadline)?;
                let headers = response.headers();
                let digest = |name| text(headers, name).and_then(Digest::from_etag);
                etag = digest("x-linked-etag").or_else(|| digest("etag")).or(etag);
                size = number(headers, "x-linked-size").or(size);
                let status = response.status();
                if status == 200 {
                    size = size.or_else(|| number(headers, "content-length"));
                } else if !status.is_redirection() {
                    return Err(self.refused(&FinalResponse { response, hop }, Some(file), gated));
                }
                let next = hop.next(&response).map_err(|why| self.not_a_hub(&why))?;
                match (next, etag.clone(), size) {
                    // A redirect inside the hub may lead to more figures.
                    (Some(next), digest, size) if next.is_trusted || digest.is_none() || size.is_none() => {
                        hop = next;
                    }
                    (_, Some(digest), Some(size)) => return Ok(Facts { digest, size }),
                    _ => {
                        return Err(self.not_a_hub(&format!(
                            "it announces no size or no digest (ETag) for `{file}`, so the file could not be verified"
                        )));
                    }
                }
            }
            Err(self.not_a_hub(&format!("it redirects more than {MAX_REDIRECTS} times for `{file}`")))
        })
    }

    /// Requests the bytes of a file from an offset on.
    pub(super) fn bytes(&self, commit: &str, file: &str, from: u64, gated: bool) -> Result<Bytes, HttpFault> {
        let range = if from > 0 { format!("bytes={from}-") } else { String::new() };
        let answered = self.get(&self.file_url(commit, file), Some(&range), None)?;
        match answered.response.status().as_u16() {
            200 => Ok(Bytes::From(0, answered.response.into_body().into_reader())),
            206 => {
                let range = text(answered.response.headers(), "content-range").and_then(ContentRange::parse);
                match range.and_then(|range| range.start) {
                    Some(start) if start == from => {
                        Ok(Bytes::From(start, answered.response.into_body().into_reader()))
                    }
                    _ => Err(HttpFault::Passing {
                        reason: format!("the server did not send the requested bytes from {from} on"),
                        wait: None,
                    }),
                }
            }
            416 => Ok(Bytes::BeyondEnd),
            _ => Err(self.refused(&answered, Some(file), gated)),
        }
    }

    /// Reads a range of a file, and stops there if a server without ranges sends more.
    pub(super) fn range(
        &self,
        commit: &str,
        file: &str,
        range: &Range<u64>,
        gated: bool,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<FileRange> {
        let wanted = format!("bytes={}-{}", range.start, range.end.saturating_sub(1));
        self.patiently(progress, || {
            let answered = self.get(&self.file_url(commit, file), Some(&wanted), None)?;
            let headers = answered.response.headers();
            let content_range = text(headers, "content-range").and_then(ContentRange::parse);
            let (skipped, file_bytes) = match (answered.response.status().as_u16(), content_range) {
                (200, _) => (range.start, number(headers, "content-length")),
                (206, Some(ContentRange { start: Some(start), file_bytes })) if start == range.start => {
                    (0, file_bytes)
                }
                // The file ends before the range.
                (416, Some(ContentRange { file_bytes: Some(file_bytes), .. })) => {
                    return Ok(FileRange { bytes: Vec::new(), file_bytes });
                }
                (206 | 416, _) => {
                    let reason = format!("the server did not send the requested {wanted}");
                    return Err(HttpFault::Passing { reason, wait: None });
                }
                _ => return Err(self.refused(&answered, Some(file), gated)),
            };
            let file_bytes = file_bytes
                .ok_or_else(|| self.not_a_hub(&format!("it announces no size for a range of `{file}`")))?;
            if skipped > MAX_SKIPPED_BYTES {
                return Err(self.not_a_hub(&format!(
                    "it sends all {file_bytes} bytes of `{file}` instead of the requested range"
                )));
            }
            let length = range.end.min(file_bytes).saturating_sub(range.start);
            let mut watch = SpeedWatch::new(self.retry().least_speed);
            let mut body = watch.over(answered.response.into_body().into_reader());
            std::io::copy(&mut (&mut body).take(skipped), &mut std::io::sink()).map_err(broken)?;
            let mut bytes = Vec::new();
            body.take(length).read_to_end(&mut bytes).map_err(broken)?;
            if (bytes.len() as u64) < length {
                let reason = format!("the connection ended after {} of {length} bytes", bytes.len());
                return Err(HttpFault::Passing { reason, wait: None });
            }
            Ok(FileRange { bytes, file_bytes })
        })
    }

    /// Returns the time limit for a description requested now.
    fn deadline(&self) -> Instant {
        Instant::now() + self.retry().description
    }

    /// Sends a GET and follows redirects; `range` and `deadline` as in [`Client::send`].
    fn get(
        &self,
        url: &str,
        range: Option<&str>,
        deadline: Option<Instant>,
    ) -> Result<FinalResponse, HttpFault> {
        let mut hop = self.first_hop(url)?;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(Method::GET, &hop, range, deadline)?;
            match hop.next(&response).map_err(|why| self.not_a_hub(&why))? {
                Some(next) => hop = next,
                None => return Ok(FinalResponse { response, hop }),
            }
        }
        Err(self.not_a_hub(&format!("it redirects more than {MAX_REDIRECTS} times")))
    }

    fn first_hop(&self, url: &str) -> Result<Redirect, HttpFault> {
        Redirect::first(url, self.options.endpoint()).map_err(|why| self.not_a_hub(&why))
    }

    /// Sends one request. `range`, given for files and perhaps empty, is the header `Range`. After
    /// `deadline` the client breaks off the answer, body included.
    fn send(
        &self,
        method: Method,
        hop: &Redirect,
        range: Option<&str>,
        deadline: Option<Instant>,
    ) -> Result<Response<Body>, HttpFault> {
        address::check_clock(&hop.uri).map_err(HttpFault::Final)?;
        let mut request = match method {
            Method::HEAD => self.agent.head(&hop.uri),
            _ => self.agent.get(&hop.uri),
        };
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            request = request.config().timeout_global(Some(left)).build();
        }
        if let Some(range) = range {
            request = request.header("Accept-Encoding", "identity");
            if !range.is_empty() {
                request = request.header("Range", range);
            }
        }
        if let Some(token) = self.options.token.as_ref().filter(|_| hop.is_trusted) {
            request = request.header("Authorization", format!("Bearer {}", token.secret()));
        }
        request.call().map_err(|e| match hop.uri.host().filter(|_| self.finds_no_host(&e)) {
            Some(host) => {
                let reason = self.shown(&format!("cannot find {host} (no network?)"));
                HttpFault::Passing { reason, wait: None }
            }
            None => self.transport(&e),
        })
    }

    /// Returns whether the system found no address for the requested host. Behind a proxy that may
    /// be the proxy's.
    fn finds_no_host(&self, error: &ureq::Error) -> bool {
        self.agent.config().proxy().is_none() && is_unknown_host(error)
    }

    fn file_url(&self, commit: &str, file: &str) -> String {
        format!("{}/resolve/{commit}/{}", self.page, super::names::percent_encoded(file))
    }

    /// Repeats `attempt` while its failures may pass.
    fn patiently<T>(
        &self,
        progress: &mut DownloadProgress<'_>,
        mut attempt: impl FnMut() -> Result<T, HttpFault>,
    ) -> Result<T> {
        let mut patience = Patience::new(self.retry());
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(HttpFault::Final(error)) => return Err(error),
                Err(HttpFault::Passing { reason, wait }) => {
                    self.pause(&mut patience, reason, wait, progress)?;
                }
            }
        }
    }

    /// Waits before another attempt.
    ///
    /// # Errors
    /// `Transient` after the last attempt.
    pub(super) fn pause(
        &self,
        patience: &mut Patience<'_>,
        reason: String,
        asked: Option<Duration>,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<()> {
        let Some(wait) = patience.next(asked) else {
            let what = format!("cannot get {} from {}", self.subject, self.options.endpoint());
            return Err(Error::new(ErrorCategory::Transient, what)
                .because(reason)
                .because(format!("{} without progress", units::exact(patience.failures, "attempt")))
                .hint("check the network and HF_ENDPOINT, or try again later; `--offline` uses a copy that the cache holds"));
        };
        progress(DownloadEvent::Retry { reason: &reason, wait });
        std::thread::sleep(wait);
        Ok(())
    }

    /// Classifies a failure below HTTP: the network's, unless TLS shows a wrong server.
    fn transport(&self, error: &ureq::Error) -> HttpFault {
        let reason = self.shown(&error.to_string());
        let is_tls = matches!(error, ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData);
        match error {
            ureq::Error::Io(_) if !is_tls => HttpFault::Passing { reason, wait: None },
            ureq::Error::Timeout(ureq::Timeout::Global) => self.too_late(),
            ureq::Error::Timeout(_)
            | ureq::Error::HostNotFound
            | ureq::Error::ConnectionFailed
            | ureq::Error::ConnectProxyFailed(_)
            | ureq::Error::Protocol(_) => HttpFault::Passing { reason, wait: None },
            _ => HttpFault::Final(
                Error::new(
                    ErrorCategory::Transient,
                    format!("cannot get {} from {}", self.subject, self.options.endpoint()),
                )
                .because(reason)
                .hint("check HF_ENDPOINT and the proxy variables (HTTPS_PROXY, NO_PROXY)"),
            ),
        }
    }

    /// Returns the error for a late description, as from a hub that sends a byte now and then.
    fn too_late(&self) -> HttpFault {
        let what = format!("cannot get {} from {}", self.subject, self.options.endpoint());
        let limit = self.retry().description.as_secs_f64();
        HttpFault::Final(
            Error::new(ErrorCategory::Transient, what)
                .because(format!("its description was not complete {limit} s after the request, the time limit"))
                .hint("try again later, or set HF_ENDPOINT to a mirror; `--offline` uses a copy that the cache holds"),
        )
    }

    /// Returns the failure for an answer other than success.
    fn refused(&self, answered: &FinalResponse, file: Option<&str>, gated: bool) -> HttpFault {
        let FinalResponse { response, hop } = answered;
        let headers = response.headers();
        let shown = |name| text(headers, name).map(|value| self.shown(value));
        let answer = ErrorResponse {
            status: response.status().as_u16(),
            code: shown("x-error-code"),
            message: shown("x-error-message"),
        };
        if matches!(answer.status, 408 | 429 | 500 | 502 | 503 | 504) {
            let wait = number(headers, "retry-after").map(Duration::from_secs);
            return HttpFault::Passing { reason: answer.to_string(), wait };
        }
        let error = answer.error(&Request {
            subject: &self.subject,
            revision: self.repo.revision(),
            page: &self.page,
            file,
            has_token: self.options.token.is_some(),
            gated,
        });
        HttpFault::Final(if hop.is_trusted || self.options.token.is_none() {
            error
        } else {
            error.because(format!(
                "the answer came from {}; the token goes to {} alone (HF_ENDPOINT)",
                self.shown(&hop.origin()),
                self.options.endpoint()
            ))
        })
    }

    fn not_a_hub(&self, why: &str) -> HttpFault {
        HttpFault::Final(
            Error::user(format!("{} does not answer as a hub does", self.options.endpoint()))
                .because(format!("requested {}: {}", self.subject, self.shown(why)))
                .hint("check HF_ENDPOINT; a network with a login page causes this error too"),
        )
    }

    /// Returns a server's text in printable form: one line, not long, without the token.
    fn shown(&self, text: &str) -> String {
        let line: String = self.options.redact(text).chars().filter(|c| !c.is_control()).collect();
        match line.char_indices().nth(300) {
            Some((end, _)) => format!("{}...", &line[..end]),
            None => line,
        }
    }
}

/// Counts failures in a row, and returns the wait after each.
pub(super) struct Patience<'a> {
    retry: &'a Retry,
    failures: u32,
}

impl<'a> Patience<'a> {
    pub(super) fn new(retry: &'a Retry) -> Self {
        Patience { retry, failures: 0 }
    }

    /// Resets the count of failures after progress.
    pub(super) fn renew(&mut self) {
        self.failures = 0;
    }

    fn next(&mut self, asked: Option<Duration>) -> Option<Duration> {
        self.failures += 1;
        let longest = Duration::from_secs(60);
        let usual = self.retry.first_wait.saturating_mul(1 << (self.failures - 1).min(16)).min(longest);
        let wait = asked.unwrap_or(usual);
        (self.failures < self.retry.attempts && wait <= MAX_RETRY_AFTER).then_some(wait)
    }
}

/// True if the repository is gated: the hub sends `false` or null if not, else `true` or a way.
#[derive(Default)]
struct Gated(bool);

impl<'de> serde::Deserialize<'de> for Gated {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Gated;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a bool, null, or the name of a way to be granted access")
            }

            fn visit_bool<E>(self, gated: bool) -> Result<Gated, E> {
                Ok(Gated(gated))
            }

            fn visit_unit<E>(self) -> Result<Gated, E> {
                Ok(Gated(false))
            }

            fn visit_str<E>(self, _way: &str) -> Result<Gated, E> {
                Ok(Gated(true))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    text(headers, name).and_then(|value| value.trim().parse().ok())
}

/// A header `Content-Range`: `bytes 0-7/100`, or `bytes */100` without such a range.
struct ContentRange {
    start: Option<u64>,
    file_bytes: Option<u64>,
}

impl ContentRange {
    fn parse(text: &str) -> Option<Self> {
        let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
        let start = range.split('-').next().and_then(|start| start.trim().parse().ok());
        Some(ContentRange { start, file_bytes: size.trim().parse().ok() })
    }
}

/// Returns the failure for a body that broke off, or that the client broke off.
pub(super) fn broken(error: std::io::Error) -> HttpFault {
    let reason = match error.get_ref().filter(|inner| inner.is::<TooSlow>()) {
        Some(slow) => slow.to_string(),
        None => format!("the connection broke: {error}"),
    };
    HttpFault::Passing { reason, wait: None }
}

/// Returns whether a name did not resolve; the standard library gives only a text.
fn is_unknown_host(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::HostNotFound => true,
        ureq::Error::Io(error) => error.to_string().starts_with("failed to lookup address information"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_is_not_found_is_known() {
        let text = "failed to lookup address information: Name or service not known";
        assert!(is_unknown_host(&ureq::Error::Io(std::io::Error::other(text))));
        assert!(is_unknown_host(&ureq::Error::HostNotFound));
        assert!(!is_unknown_host(&ureq::Error::ConnectionFailed));
        assert!(!is_unknown_host(&ureq::Error::Io(std::io::Error::other("the connection broke"))));
    }

    #[test]
    fn patience_ends() {
        let retry = Retry { attempts: 3, first_wait: Duration::from_secs(1), ..Retry::default() };
        let mut patience = Patience::new(&retry);
        assert_eq!(patience.next(None), Some(Duration::from_secs(1)));
        assert_eq!(patience.next(None), Some(Duration::from_secs(2)));
        assert_eq!(patience.next(None), None);
        patience.renew();
        assert_eq!(patience.next(Some(Duration::from_secs(7))), Some(Duration::from_secs(7)));
        assert_eq!(patience.next(Some(Duration::from_secs(3600))), None);
    }
}
