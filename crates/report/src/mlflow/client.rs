//! The five requests of MLflow's REST API 2.0 that a run needs
//! (<https://mlflow.org/docs/latest/rest-api.html>).

use std::io::Read as _;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use ureq::Agent;

use super::{LoggedValue, MlflowCredentials, MlflowTarget};
use crate::address;
use crate::error::{Error, ErrorCategory, Result};

/// Time limit for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Time limit for a whole request.
const REQUEST: Duration = Duration::from_secs(30);
/// Most bytes of an answer that the client reads.
const MOST_BYTES: u64 = 1 << 20;
/// Most characters of a recipe value, the limit of older servers.
const MOST_VALUE: usize = 500;
/// Most characters of a server's message that an error repeats.
const MOST_SAID: usize = 300;

/// The client of an MLflow server.
pub(super) struct MlflowClient<'a> {
    server: &'a str,
    credentials: &'a MlflowCredentials,
    agent: Agent,
}

/// A name with its value, as the API writes tags and parameters.
#[derive(Serialize)]
struct KeyValue<'a> {
    key: &'a str,
    value: String,
}

/// An answer of the server.
struct ApiAnswer {
    status: u16,
    body: Value,
}

impl<'a> MlflowClient<'a> {
    pub(super) fn new(target: &'a MlflowTarget, agent: Agent) -> Self {
        MlflowClient { server: &target.server, credentials: &target.credentials, agent }
    }

    /// Returns the id of the experiment `name`; creates it if it does not exist.
    pub(super) fn experiment(&self, name: &str) -> Result<String> {
        if let Some(id) = self.find_experiment(name)? {
            return Ok(id);
        }
        let made = self.post("experiments/create", &json!({ "name": name }))?;
        if made.body["error_code"] == "RESOURCE_ALREADY_EXISTS"
            && let Some(id) = self.find_experiment(name)?
        {
            // Another run was quicker.
            return Ok(id);
        }
        self.text_of(made, "create the experiment", "/experiment_id")
    }

    fn find_experiment(&self, name: &str) -> Result<Option<String>> {
        let path = format!("experiments/get-by-name?experiment_name={}", percent_encoded(name));
        let found = self.get(&path)?;
        if found.status == 404 && found.body["error_code"] == "RESOURCE_DOES_NOT_EXIST" {
            return Ok(None);
        }
        self.text_of(found, "find the experiment", "/experiment/experiment_id").map(Some)
    }

    /// Creates a run that began at `start`, in milliseconds since 1970; returns its id.
    pub(super) fn create_run(&self, experiment: &str, target: &MlflowTarget, start: u64) -> Result<String> {
        let body = json!({
            "experiment_id": experiment,
            "run_name": target.run,
            "start_time": start,
            "tags": pairs(&target.tags),
        });
        let made = self.post("runs/create", &body)?;
        self.text_of(made, "create the run", "/run/info/run_id")
    }

    /// Adds metrics and recipe values to a run.
    pub(super) fn log(&self, run: &str, values: &[LoggedValue], params: &[(String, String)]) -> Result<()> {
        let metrics: Vec<Value> = values
            .iter()
            .map(|LoggedValue { key, value, step, timestamp }| {
                json!({ "key": key, "value": value, "timestamp": timestamp, "step": step })
            })
            .collect();
        let body = json!({ "run_id": run, "metrics": metrics, "params": pairs(params) });
        let answer = self.post("runs/log-batch", &body)?;
        self.accepted(&answer, "log to the run")
    }

    /// Sends the status of an ended run and its end time, in milliseconds since 1970.
    pub(super) fn end_run(&self, run: &str, status: &str, end: u64) -> Result<()> {
        let body = json!({ "run_id": run, "status": status, "end_time": end });
        let answer = self.post("runs/update", &body)?;
        self.accepted(&answer, "end the run")
    }

    fn get(&self, path: &str) -> Result<ApiAnswer> {
        let mut request = self.agent.get(self.url(path));
        if let Some(header) = self.credentials.header() {
            request = request.header("Authorization", header);
        }
        self.read(request.call())
    }

    fn post(&self, path: &str, body: &Value) -> Result<ApiAnswer> {
        let mut request = self.agent.post(self.url(path)).header("Content-Type", "application/json");
        if let Some(header) = self.credentials.header() {
            request = request.header("Authorization", header);
        }
        self.read(request.send(body.to_string()))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.server)
    }

    fn read(&self, answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<ApiAnswer> {
        let gone = |why: String| {
            Error::new(ErrorCategory::Transient, format!("cannot reach the MLflow server {}", self.server))
                .because(self.credentials.redact(&why))
        };
        let answer = answer.map_err(|e| gone(e.to_string()))?;
        let status = answer.status().as_u16();
        let mut text = Vec::new();
        let mut body = answer.into_body().into_reader().take(MOST_BYTES);
        body.read_to_end(&mut text).map_err(|e| gone(e.to_string()))?;
        // A body that is not JSON counts as null.
        Ok(ApiAnswer { status, body: serde_json::from_slice(&text).unwrap_or_default() })
    }

    /// Returns an error that names `what` unless the server answered with status 200.
    fn accepted(&self, answer: &ApiAnswer, what: &str) -> Result<()> {
        let ApiAnswer { status, body } = answer;
        if *status == 200 {
            return Ok(());
        }
        let kind = match status {
            429 | 500.. => ErrorCategory::Transient,
            _ => ErrorCategory::User,
        };
        let said: String = body["message"].as_str().unwrap_or_default().chars().take(MOST_SAID).collect();
        let said =
            if said.is_empty() { String::new() } else { format!(": {}", self.credentials.redact(&said)) };
        let mut error = Error::new(kind, format!("cannot {what} at the MLflow server {}", self.server))
            .because(format!("it answered {status}{said}"));
        if matches!(status, 401 | 403) {
            error = error
                .hint("set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN");
        }
        Err(error)
    }

    /// Returns the text at `pointer` of an answer.
    fn text_of(&self, answer: ApiAnswer, what: &str, pointer: &str) -> Result<String> {
        self.accepted(&answer, what)?;
        let text = answer.body.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        text.ok_or_else(|| {
            Error::user(format!("cannot {what} at {}", self.server))
                .because(format!("its answer has no {pointer}: it is not an MLflow server"))
        })
    }
}

fn pairs(given: &[(String, String)]) -> Vec<KeyValue<'_>> {
    let cut = |value: &str| value.chars().take(MOST_VALUE).collect();
    given.iter().map(|(key, value)| KeyValue { key, value: cut(value) }).collect()
}

/// Returns a client for the server at `address`. It follows no redirect, which could send the
/// credentials elsewhere.
///
/// # Errors
/// `User` if `address` or the proxy of the environment is not a usable address.
pub fn agent(address: &str) -> Result<Agent> {
    let refused = |why: String| Error::user("cannot log to MLflow (`log.mlflow`)").because(why);
    let config = address::agent_for(&address::http(address).map_err(refused)?)?;
    Ok(config.timeout_connect(Some(CONNECT)).timeout_global(Some(REQUEST)).build().into())
}

/// Percent-encodes a name for an address (RFC 3986).
fn percent_encoded(name: &str) -> String {
    let escaped = |byte: u8| match byte {
        b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    name.bytes().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_and_values_cut() {
        assert_eq!(percent_encoded("a b/ü&c=1"), "a%20b%2F%C3%BC%26c%3D1");
        let long = [("key".to_owned(), "ü".repeat(600))];
        assert_eq!(pairs(&long)[0].value.chars().count(), 500);
    }
}
