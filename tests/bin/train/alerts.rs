//! Alerts of real runs: a planted fault reaches a program and a server once, and a server that
//! fails or hangs ends no run. No output and no file of the run holds the server's address.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Output;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::faulty_run::{TILDE, changed_model, set_column};
use crate::test_dir::{TestDir, lora};

/// Part of every server's address.
const CANARY: &str = "canary0of0the0hook";

/// A server's answer to one request; the last of a list repeats.
#[derive(Clone, Copy)]
enum Answer {
    Status(u16),
    Hang,
}

/// A loopback server that records the bodies posted to it.
struct HookDouble {
    port: u16,
    bodies: Arc<Mutex<Vec<String>>>,
}

impl HookDouble {
    fn start(answers: &'static [Answer]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&bodies);
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for (number, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let body = read_body(&mut stream);
                heard.lock().unwrap().push(body);
                match answers[number.min(answers.len() - 1)] {
                    Answer::Status(status) => {
                        let text =
                            format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                        stream.write_all(text.as_bytes()).unwrap();
                    }
                    Answer::Hang => held.push(stream),
                }
            }
        });
        HookDouble { port, bodies }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/services/{CANARY}", self.port)
    }

    fn posted(&self) -> Vec<Value> {
        self.bodies.lock().unwrap().iter().map(|body| serde_json::from_str(body).unwrap()).collect()
    }
}

fn read_body(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
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

/// Eight rows, one a step. The embedding of token `~` holds a NaN, and the rows of the steps `bad`
/// hold that token.
fn diverging(bad: &[usize]) -> TestDir {
    let dir = TestDir::new();
    changed_model(&dir.path("model"), |tensors| {
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        *table = set_column(table, TILDE..TILDE + 1, 5, f32::NAN);
    });
    let row = |step: usize| {
        let text = if bad.contains(&step) { "a ~" } else { "a text" };
        json!({ "text": format!("row {step} of {text} of some length") }).to_string() + "\n"
    };
    dir.write("rows.jsonl", &(1..=8).map(row).collect::<String>());
    dir
}

const ON_TEXT: [&str; 6] = [
    "--set",
    "data.train_on=all",
    "--set",
    "train.gradient_accumulation_steps=1",
    "--set",
    "train.max_steps=8",
];

/// A program that appends the alert to the file `told`.
fn program(dir: &TestDir) -> String {
    let script = format!("cat >> {}", dir.path("told").display());
    format!("alerts.command={}", json!(["sh", "-c", script]))
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ends(dir: &TestDir, done: &Output, code: i32) -> String {
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(code), "{said}");
    assert!(!said.contains(CANARY) && !String::from_utf8_lossy(&done.stdout).contains(CANARY), "{said}");
    said
}

/// Fails if a file below `folder` holds the server's address.
fn check_files(folder: &Path) {
    let mut files = 0;
    let mut open = vec![folder.to_owned()];
    while let Some(inner) = open.pop() {
        for entry in std::fs::read_dir(inner).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            let has_secret = bytes.windows(CANARY.len()).any(|window| window == CANARY.as_bytes());
            assert!(!has_secret, "the address is in {}", path.display());
            files += 1;
        }
    }
    assert!(files > 5, "{files} files");
}

#[test]
fn a_skipped_step_reaches_a_program_and_a_server_that_fails_at_first() {
    let dir = diverging(&[3, 4]);
    let server = HookDouble::start(&[Answer::Status(500), Answer::Status(200)]);
    let (webhook, command) = (format!("alerts.webhook={}", server.url()), program(&dir));
    let sets = [
        "--set",
        &webhook,
        "--set",
        &command,
        "--set",
        "train.on_nan=skip",
        "--set",
        "checkpoint.save_steps=4",
    ];
    let done = dir.command(&lora(&[&ON_TEXT[..], &sets].concat())).output().unwrap();
    let said = ends(&dir, &done, 0);
    assert_eq!(
        said.lines().filter(|line| line.starts_with("warning: ")).count(),
        2,
        "both steps, no more: {said}"
    );
    let written = lines(&dir.path("out/alerts.jsonl"));
    assert_eq!(written.len(), 1, "one incident: {written:?}");
    assert_eq!((&written[0]["rule"], &written[0]["step"]), (&json!("non_finite"), &json!(3)));
    let keys: Vec<&String> = written[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["rule", "step", "value", "message", "time"]);
    let (told, posted) = (lines(&dir.path("told")), server.posted());
    assert_eq!((told.len(), posted.len()), (1, 2), "{told:?} {posted:?}");
    assert!(told[0] == posted[0] && posted[0] == posted[1], "{told:?} {posted:?}");
    let keys: Vec<&String> = posted[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["text", "rule", "step", "value", "message", "time", "run", "host"]);
    assert!(posted[0]["text"].as_str().unwrap().contains("non_finite: step 3 diverged and updated nothing"));
    check_files(&dir.path("out"));
    // A resumed run appends to the file.
    let resumed = dir.command(&lora(&[&ON_TEXT[..], &sets, &["--resume"]].concat())).output().unwrap();
    ends(&dir, &resumed, 0);
    assert_eq!(lines(&dir.path("out/alerts.jsonl")).len(), 1);
}

#[test]
fn a_run_that_ends_diverged_has_said_so_to_its_server() {
    let dir = diverging(&[3]);
    let server = HookDouble::start(&[Answer::Status(200)]);
    let recipe = "[adapter]\nr = 4\n[optimizer]\nlearning_rate = 1e-4\n[alerts]\nrules = [\"non_finite\"]\n\
                  webhook = \"env:HOOK\"\n[data]\npacking = false\nshuffle = false\n";
    dir.write("my.toml", recipe);
    let base = ["--model", "model", "--dataset", "rows.jsonl", "--output", "out", "--recipe", "my.toml"];
    let args = [&base[..], &ON_TEXT[..]].concat();
    let done = dir.command(&args).env("HOOK", server.url()).output().unwrap();
    let said = ends(&dir, &done, 4);
    assert!(said.contains("error: the numbers diverged at step 3\n"), "{said}");
    let posted = server.posted();
    assert_eq!(posted.len(), 1, "{posted:?}");
    assert_eq!((&posted[0]["step"], &posted[0]["run"]), (&json!(3), &json!("out")));
    assert!(
        posted[0]["message"]
            .as_str()
            .unwrap()
            .starts_with("the run has ended: the numbers diverged at step 3")
    );
    check_files(&dir.path("out"));
}

#[test]
fn a_server_that_hangs_ends_no_run() {
    let dir = diverging(&[2]);
    let server = HookDouble::start(&[Answer::Hang]);
    let webhook = format!("alerts.webhook={}", server.url());
    let sets = ["--set", &webhook, "--set", "train.on_nan=skip"];
    let done = dir.command(&lora(&[&ON_TEXT[..], &sets].concat())).output().unwrap();
    let said = ends(&dir, &done, 0);
    assert!(
        said.contains("warning: not all alerts had reached the webhook at 127.0.0.1 when the run was over"),
        "{said}"
    );
    assert!(said.contains("adapter saved in out"), "{said}");
    assert_eq!(server.posted().len(), 1);
    check_files(&dir.path("out"));
}

/// An unreachable webhook, a program that fails, and an adapter that does not change: one warning
/// each.
#[test]
fn who_cannot_be_reached_is_said_once() {
    let dir = TestDir::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let webhook = format!("alerts.webhook=http://127.0.0.1:{port}/{CANARY}");
    let sets = [
        "--set",
        "adapter.lora_alpha=1e-60",
        "--set",
        r#"alerts.rules=["no_progress"]"#,
        "--set",
        &webhook,
        "--set",
        r#"alerts.command=["false"]"#,
    ];
    let done = dir.command(&lora(&[&ON_TEXT[..], &sets].concat())).output().unwrap();
    let said = ends(&dir, &done, 0);
    let mut warnings: Vec<&str> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
    warnings.sort_unstable();
    assert_eq!(warnings.len(), 3, "{said}");
    assert!(
        warnings[0]
            .starts_with("warning: an alert did not reach the program `false`: it ended with exit status: 1")
    );
    assert!(warnings[1].starts_with("warning: an alert did not reach the webhook at 127.0.0.1: "), "{said}");
    assert!(warnings[2].starts_with("warning: step 3: the gradient norm has been 0 for 3 steps"), "{said}");
    let written = lines(&dir.path("out/alerts.jsonl"));
    assert_eq!((written.len(), &written[0]["rule"]), (1, &json!("no_progress")));
    check_files(&dir.path("out"));
}

/// A run that ends because a rank hangs. Only builds with debug assertions plant faults.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_run_that_hangs_is_an_alert() {
    let dir = TestDir::new();
    let command = program(&dir);
    let sets = ["--set", "parallel.timeout_secs=3", "--set", &command];
    let mut run = dir.command(&lora(&[&ON_TEXT[..], &sets].concat()));
    run.env("FINETUNE_CLOCK", "planted").env("FINETUNE_FAULT", "0:backward:4:hang");
    let said = ends(&dir, &run.output().unwrap(), 75);
    assert!(said.contains("error: rank 0 hangs: no progress in phase backward\n"), "{said}");
    let told = lines(&dir.path("told"));
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0]["rule"], &told[0]["step"]), (&json!("stall"), &json!(2)));
    assert_eq!(lines(&dir.path("out/alerts.jsonl")).len(), 1);
}

/// The second rank is slow, so the first one waits in nearly all of each step.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_device_that_waits_is_an_alert() {
    let dir = TestDir::new();
    let command = program(&dir);
    let sets = ["--set", "train.max_steps=24", "--set", r#"alerts.rules=["idle_device"]"#, "--set", &command];
    let ranks = ["--ranks", "2", "--set", "parallel.strategy=ddp"];
    let mut run = dir.command(&lora(&[&ON_TEXT[..4], &sets, &ranks].concat()));
    run.env("FINETUNE_CLOCK", "planted").env("FINETUNE_FAULT", "1:forward:slow=150ms");
    ends(&dir, &run.output().unwrap(), 0);
    let told = lines(&dir.path("told"));
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0]["rule"], &told[0]["step"]), (&json!("idle_device"), &json!(20)));
}

/// The model memorizes one row and then meets another.
#[test]
fn a_loss_far_above_those_before_is_an_alert() {
    let dir = TestDir::new();
    let row = |i| if i == 105 { "zebras fly 1234567 quickly" } else { "the island of a sea was quiet" };
    dir.write(
        "rows.jsonl",
        &(1..=110).map(|i| json!({ "text": row(i) }).to_string() + "\n").collect::<String>(),
    );
    let sets = ["--set", "train.max_steps=110", "--set", "optimizer.learning_rate=1e-2"];
    let command = program(&dir);
    let done = dir.command(&lora(&[&ON_TEXT[..4], &sets, &["--set", &command]].concat())).output().unwrap();
    let said = ends(&dir, &done, 0);
    assert_eq!(said.matches("far above those of the 64 steps before it").count(), 1, "{said}");
    let told = lines(&dir.path("told"));
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0]["rule"], &told[0]["step"]), (&json!("loss_spike"), &json!(105)));
}

/// Unusable settings are refused before anything is loaded, without showing the address.
#[test]
fn alerts_that_could_not_be_delivered_are_refused() {
    let dir = TestDir::new();
    let refused = |more: &[&str]| {
        let done = dir.command(&lora(&[more, &["--quiet"]].concat())).output().unwrap();
        assert!(!dir.path("out").exists());
        ends(&dir, &done, 1)
    };
    assert_snapshot!(refused(&["--set", r#"alerts.command=["no-such-program"]"#]), @"
    error: cannot use `alerts.command`
      caused by: no folder of PATH has a program `no-such-program`
    hint: name a program in a folder of PATH, or write its path
    ");
    assert_snapshot!(refused(&["--set", "alerts.webhook=env:NO_SUCH_HOOK"]), @"
    error: cannot use `alerts.webhook`
      caused by: the environment variable NO_SUCH_HOOK: it is not set
    hint: export NO_SUCH_HOOK with the http or https address to post to
    ");
    assert_snapshot!(refused(&["--set", &format!("alerts.webhook=ftp://hooks.example/{CANARY}")]), @"
    error: cannot use these settings
      caused by: --set alerts.webhook=(hidden): `alerts.webhook` is (hidden): it does not start with http:// or https://; accepted: an http or https address, env:NAME
    ");
    assert_snapshot!(refused(&["--set", &format!("alerts.webhok=https://hooks.example/{CANARY}")]), @"
    error: cannot use these settings
      caused by: --set alerts.webhok=https://(hidden): unknown key `alerts.webhok`; nearest: `alerts.webhook`; [alerts] has: rules, command, webhook
    hint: write `webhook`
    ");
    let hook = format!("alerts.webhook=https://hooks.example/{CANARY}");
    assert_snapshot!(refused(&["--set", &hook, "--offline"]), @"
    error: cannot use `alerts.webhook`
      caused by: `--offline` disables the network
    hint: add `--set alerts.webhook=`, or leave out `--offline`
    ");
    assert_snapshot!(refused(&["--set", &hook, "--set", "alerts.rules=[]"]), @"
    error: cannot use these settings
      caused by: --set alerts.webhook=(hidden): `alerts.webhook` has no effect with `rules = []`, which disables all alerts
    hint: remove `rules` to watch for all of them, or remove `webhook`
    ");
    dir.write("bare.toml", &format!("[alerts]\nwebhook = https://hooks.example/{CANARY}\n"));
    let done = dir.command(&["--recipe", "bare.toml"]).output().unwrap();
    assert_snapshot!(ends(&dir, &done, 1), @r#"
    error: cannot use recipe bare.toml
      caused by: bare.toml:2:11: not TOML: https://(hidden) is not a value
    hint: write "https://(hidden)" for a text, true or false for a switch
    "#);
    // The message shows the command as typed, without the address.
    let done = dir.command(&["--set", &hook]).output().unwrap();
    assert_snapshot!(ends(&dir, &done, 1), @r#"
    error: cannot use these settings
      caused by: `model.id` is not set
      caused by: `data.train` is not set
      caused by: `optimizer.learning_rate` is not set
    hint: add what is missing: `finetune --set 'alerts.webhook=(hidden)' --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --recipe lora`; each line of rows.jsonl is a row, such as {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    "#);
}
