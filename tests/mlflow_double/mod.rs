//! A test double of an MLflow server in this process: the part of its REST API that `finetune`
//! uses, with slow, refusing and silent variants.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

/// The server's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Temper {
    /// Answers at once.
    Good,
    /// Answers after a third of a second.
    Slow,
    /// Answers 401, and echoes the secret it received.
    Refuses,
    /// Never answers.
    Silent,
}

/// Data received by the server.
#[derive(Debug, Clone, Default)]
pub(crate) struct MlflowRecord {
    /// Names of created experiments.
    pub(crate) experiments: Vec<String>,
    pub(crate) run_name: String,
    pub(crate) params: BTreeMap<String, String>,
    /// Key, step and value, in order of arrival.
    pub(crate) metrics: Vec<(String, u64, f64)>,
    pub(crate) status: String,
    /// Distinct values of the header.
    pub(crate) authorization: Vec<String>,
}

pub(crate) struct MlflowDouble {
    url: String,
    record: Arc<Mutex<MlflowRecord>>,
}

impl MlflowDouble {
    /// Listens on the loopback until the test process ends.
    pub(crate) fn start(temper: Temper) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let record: Arc<Mutex<MlflowRecord>> = Arc::default();
        let shared = Arc::clone(&record);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let record = Arc::clone(&shared);
                std::thread::spawn(move || serve(&stream, temper, &record));
            }
        });
        MlflowDouble { url, record }
    }

    pub(crate) fn url(&self) -> String {
        self.url.clone()
    }

    pub(crate) fn log(&self) -> MlflowRecord {
        self.record.lock().unwrap().clone()
    }
}

fn serve(mut stream: &TcpStream, temper: Temper, record: &Mutex<MlflowRecord>) {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length, mut authorization) = (String::new(), 0, String::new());
    if reader.read_line(&mut first).unwrap_or(0) == 0 {
        return;
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "authorization" => authorization = value.to_owned(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body: Value = if length > 0 { serde_json::from_slice(&body).unwrap() } else { Value::Null };
    match temper {
        Temper::Silent => std::thread::sleep(Duration::from_secs(60)),
        Temper::Slow => std::thread::sleep(Duration::from_millis(333)),
        Temper::Good | Temper::Refuses => {}
    }
    let words: Vec<&str> = first.split(' ').collect();
    let (status, answer) = if temper == Temper::Refuses {
        (401, json!({ "error_code": "UNAUTHENTICATED", "message": format!("who is {authorization}?") }))
    } else {
        let path = words[1].strip_prefix("/api/2.0/mlflow/").unwrap();
        let mut record = record.lock().unwrap();
        if !authorization.is_empty() && !record.authorization.contains(&authorization) {
            record.authorization.push(authorization);
        }
        answer(&mut record, (words[0], path), &body)
    };
    let text = answer.to_string();
    // The client may have disconnected.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
}

fn answer(record: &mut MlflowRecord, (method, path): (&str, &str), body: &Value) -> (u16, Value) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    match (method, path.split('?').next().unwrap()) {
        ("GET", "experiments/get-by-name") => {
            (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none" }))
        }
        ("POST", "experiments/create") => {
            record.experiments.push(text(&body["name"]));
            (200, json!({ "experiment_id": "7" }))
        }
        ("POST", "runs/create") => {
            assert_eq!(body["experiment_id"], "7");
            record.run_name = text(&body["run_name"]);
            (200, json!({ "run": { "info": { "run_id": "r1" } } }))
        }
        ("POST", "runs/log-batch") => {
            assert_eq!(body["run_id"], "r1");
            let metrics = body["metrics"].as_array().unwrap();
            assert!(metrics.len() <= 1000);
            for one in metrics {
                assert!(one["timestamp"].as_u64() > Some(1_500_000_000_000), "{one}");
                let figure =
                    (text(&one["key"]), one["step"].as_u64().unwrap(), one["value"].as_f64().unwrap());
                record.metrics.push(figure);
            }
            let params = body["params"].as_array().unwrap();
            assert!(params.len() <= 100);
            for one in params {
                let before = record.params.insert(text(&one["key"]), text(&one["value"]));
                assert_eq!(before, None, "{one} came twice");
            }
            (200, json!({}))
        }
        ("POST", "runs/update") => {
            assert!(body["end_time"].is_u64());
            record.status = text(&body["status"]);
            (200, json!({}))
        }
        _ => (404, json!({ "error_code": "ENDPOINT_NOT_FOUND", "message": path })),
    }
}
