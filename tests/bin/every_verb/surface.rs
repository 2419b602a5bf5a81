//! Security surface of the binary: it opens no socket unless a hub id, an address or ranks over
//! processes require one, and no output or file holds a secret, however it ends.
//!
//! Commands run under a system call filter (seccomp) that kills a process when it creates a socket;
//! this needs neither `strace` nor root. Their environment holds a canary for every secret of a
//! run. Afterwards neither the output nor a file may hold one.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use clap::CommandFactory;
use finetune::cli::Cli;

use crate::hub_double::{Access, Fault, HubDouble, RepoDouble, Spoil};
use crate::skipped::skipped;
use crate::test_dir::{TestDir, golden};

/// Part of every secret.
const CANARY: &str = "canary";
const TOKEN: &str = "hf_canary0token0of0the0hub";
const SECRETS: [(&str, &str); 7] = [
    ("HF_TOKEN", TOKEN),
    ("FINETUNE_RDZV_SECRET", "canary secret of the rendezvous"),
    ("HTTP_PROXY", "http://ada:canary-of-the-proxy@127.0.0.1:9"),
    ("HTTPS_PROXY", "http://ada:canary-of-the-proxy@127.0.0.1:9"),
    ("ALL_PROXY", "http://ada:canary-of-the-proxy@127.0.0.1:9"),
    ("WANDB_API_KEY", "canary-of-wandb"),
    ("AWS_SECRET_ACCESS_KEY", "canary-of-aws"),
];

/// The binary with every secret, online, and with full panic output.
fn command(dir: &TestDir, args: &[&str]) -> Command {
    let mut command = dir.command(args);
    command.env_remove("HF_HUB_OFFLINE").env("RUST_BACKTRACE", "1").env("RAYON_NUM_THREADS", "1");
    command.env("XDG_CACHE_HOME", dir.path("cache")).envs(SECRETS);
    for name in ["NO_PROXY", "no_proxy", "http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(name);
    }
    command
}

/// Makes the kernel kill the process of `command` with SIGSYS when it creates a socket.
#[cfg(target_os = "linux")]
fn forbid_sockets(command: &mut Command) {
    use std::os::unix::process::CommandExt;

    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUALS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let install = || {
        let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
        let mut steps = [
            // The system call number is the first field of the kernel's description.
            step(LOAD, 0, 0, 0),
            step(EQUALS, libc::SYS_socket as u32, 1, 0),
            step(EQUALS, libc::SYS_io_uring_setup as u32, 0, 1),
            step(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
            step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: prctl reads the program, which lives through the calls, and changes this process
        // alone.
        let set = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if set { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec it makes two system calls on memory of its own stack.
    unsafe {
        command.pre_exec(install);
    }
}

#[cfg(not(target_os = "linux"))]
fn forbid_sockets(_command: &mut Command) {}

/// Returns true if this machine can forbid sockets; otherwise prints that it cannot.
fn can_forbid_sockets(dir: &TestDir) -> bool {
    let mut probe = command(dir, &["recipes"]);
    forbid_sockets(&mut probe);
    match probe.output() {
        Ok(_) if cfg!(target_os = "linux") => true,
        Ok(_) => {
            skipped("that local commands open no socket", "only Linux filters system calls");
            false
        }
        Err(error) => {
            skipped("that local commands open no socket", &format!("no filter can be set: {error}"));
            false
        }
    }
}

/// Fails if the output holds a canary.
fn check_output(told: &str, output: &Output) {
    for (name, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        let text = String::from_utf8_lossy(bytes);
        assert!(!text.contains(CANARY), "{told}: a secret in {name}:\n{text}");
    }
}

/// Fails if a file below `folder`, or a file name, holds a canary.
fn check_files(folder: &Path) -> usize {
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        assert!(!path.to_string_lossy().contains(CANARY), "{}", path.display());
        if path.is_dir() {
            files += check_files(&path);
        } else if path.file_name() != Some(OsStr::new("token")) {
            let bytes = std::fs::read(&path).unwrap();
            let has_secret = bytes.windows(CANARY.len()).any(|window| window == CANARY.as_bytes());
            assert!(!has_secret, "a secret in {}", path.display());
            files += 1;
        }
    }
    files
}

/// A step of training on few tokens.
const TRAIN: [&str; 14] = [
    "--model",
    "model",
    "--dataset",
    "rows.jsonl",
    "--set",
    "data.max_seq_len=96",
    "--set",
    "train.max_steps=1",
    "--set",
    "data.packing=false",
    "--set",
    "checkpoint.save_steps=1",
    "--set",
    "train.micro_batch_size=1",
];

/// Commands with their exit codes: each verb succeeds and fails once. Later commands read the files
/// of the first ones.
fn local_commands() -> Vec<(i32, Vec<&'static str>)> {
    let train = |more: &[&'static str]| [&TRAIN[..], more].concat();
    let verify = |more: &[&'static str]| [&["verify-resume"], &TRAIN[..], more].concat();
    vec![
        (0, train(&["--recipe", "lora", "--output", "out", "-v"])),
        (0, train(&["--recipe", "fsdp-full", "--output", "two", "--ranks", "2", "-v"])),
        (0, train(&["--recipe", "lora", "--output", "plan", "--dry-run", "-v"])),
        (0, vec!["merge", "--model", "model", "--adapter", "out", "--output", "merged", "-v"]),
        (0, vec!["quantize", "--model", "model", "--kind", "nf4", "--output", "nf4", "-v"]),
        (0, vec!["export", "--model", "model", "--format", "gguf", "--output", "m.gguf", "-v"]),
        (0, vec!["generate", "--model", "model", "--prompt", "x", "--max-new-tokens", "1", "-v"]),
        (0, vec!["eval", "--model", "model", "--dataset", "few.jsonl", "-v"]),
        (0, vec!["compare", "out", "two", "--html", "runs.html"]),
        (0, vec!["inspect", "model", "-v"]),
        (0, vec!["plan", "--model", "model", "--on", "2x4090", "-v"]),
        (0, vec!["data", "--model", "model", "--dataset", "few.jsonl", "-v"]),
        (0, vec!["recipes", "show", "lora"]),
        (
            0,
            vec![
                "bench", "ops", "--only", "rms_norm", "--tokens", "4", "--secs", "0.001", "--model", "model",
            ],
        ),
        (0, vec!["doctor"]),
        (0, vec!["doctor", "--json", "--disk", "."]),
        (0, vec!["doctor", "net", "--sizes", "1K"]),
        (0, vec!["bench", "collectives", "--ranks", "3", "--sizes", "1K"]),
        (0, vec!["completions", "bash"]),
        (0, verify(&["--recipe", "lora", "--ranks", "1", "--steps", "3", "--output", "twice"])),
        (1, train(&["--recipe", "lora", "--output", "out"])),
        (1, train(&["--recipe", "nowhere.toml", "--output", "new"])),
        (1, train(&["--recipe", "lora", "--output", "new", "--dataset", "bad.jsonl", "-v"])),
        // Over processes, which this build cannot connect, or with an impossible rank.
        (1, train(&["--recipe", "lora", "--output", "new", "--world-size", "2", "--rank", "7"])),
        (1, vec!["merge", "--model", "model", "--adapter", "model", "--output", "new", "-v"]),
        (1, vec!["quantize", "--model", "model", "--kind", "nf4", "--output", "nf4", "-v"]),
        (1, vec!["export", "--model", "none/", "--format", "gguf", "--output", "new.gguf", "-v"]),
        (1, vec!["generate", "--model", "rows.jsonl", "--prompt", "x", "-v"]),
        (1, vec!["eval", "--model", "model", "--dataset", "bad.jsonl", "-v"]),
        (1, vec!["compare", "out", "model"]),
        (1, vec!["inspect", "https://ada:canary-in-an-address@hub.example/model", "-v"]),
        (1, vec!["data", "--model", "model", "--dataset", "none.jsonl", "-v"]),
        (1, vec!["recipes", "show", "nothing"]),
        (1, vec!["bench", "ops", "--model", "none/"]),
        (1, vec!["bench", "collectives", "--ranks", "1"]),
        (1, vec!["doctor", "net", "--ranks", "1"]),
        (1, verify(&["--recipe", "nowhere.toml", "--output", "new"])),
        (2, vec!["doctor", "--nothing"]),
        (2, vec!["completions", "no-shell"]),
        (1, vec!["inspect", "ada/tiny", "--offline", "-v"]),
    ]
}

#[test]
fn no_local_command_opens_a_socket_or_shows_a_secret() {
    let dir = TestDir::new();
    dir.write("few.jsonl", "{\"text\":\"ask and answer\"}\n{\"text\":\"another row\"}\n");
    dir.write("bad.jsonl", "{\"text\":\n");
    let filtered = can_forbid_sockets(&dir);
    let mut verbs: BTreeSet<&str> = BTreeSet::new();
    for (code, args) in local_commands() {
        let mut command = command(&dir, &args);
        if filtered {
            forbid_sockets(&mut command);
        }
        let output = command.output().unwrap();
        let told = format!("finetune {}", args.join(" "));
        assert_ne!(output.status.signal(), Some(libc::SIGSYS), "{told}: it opened a socket");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{told}\n{stderr}");
        check_output(&told, &output);
        verbs.insert(if args[0].starts_with('-') { "train" } else { args[0] });
    }
    let mut all: BTreeSet<String> =
        Cli::command().get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    all.insert("train".to_owned());
    assert_eq!(
        verbs,
        all.iter().map(String::as_str).collect::<BTreeSet<_>>(),
        "a verb is not among the commands"
    );
    if cfg!(debug_assertions) {
        show_no_secret_in_a_panic(&dir);
    }
    let files = check_files(&dir.path(""));
    assert!(files > 30, "only {files} files were looked through");
}

/// A panic of a rank, with its backtrace. Release builds plant no fault.
fn show_no_secret_in_a_panic(dir: &TestDir) {
    let mut panicking = command(dir, &[&TRAIN[..], &["--recipe", "lora", "--output", "fault"]].concat());
    let output = panicking.env("FINETUNE_FAULT", "0:backward:panic").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    check_output("a panic", &output);
}

/// Shows that the filter works: a hub id opens a socket, and the filter kills the process.
#[test]
fn a_hub_id_opens_a_socket_unless_the_run_is_offline() {
    let dir = TestDir::new();
    if !can_forbid_sockets(&dir) {
        return;
    }
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = command(&dir, args);
        // Nothing listens on this port; an address is enough to create a socket.
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").envs(variables.iter().copied());
        forbid_sockets(&mut command);
        command.output().unwrap()
    };
    let asks: [&[&str]; 3] = [
        &["inspect", "ada/tiny"],
        &["data", "--model", "model", "--dataset", "ada/rows"],
        &["eval", "--model", "model", "--adapter", "ada/lora", "--dataset", "rows.jsonl"],
    ];
    for args in asks {
        assert_eq!(run(args, &[]).status.signal(), Some(libc::SIGSYS), "{args:?} asks no hub");
        let flag = run(&[args, &["--offline"]].concat(), &[]);
        for output in [flag, run(args, &[("HF_HUB_OFFLINE", "1")]), run(args, &[("HF_HUB_OFFLINE", "yes")])] {
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{args:?}\n{stderr}");
            assert!(stderr.contains("is not in the cache, and this run is offline"), "{stderr}");
        }
    }
}

fn tiny(access: Access) -> RepoDouble {
    let folder = golden("models/tiny-llama");
    let mut repo = RepoDouble::model("ada/tiny").access(access);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = std::fs::read(&path).unwrap();
        repo = if name.ends_with(".safetensors") { repo.lfs(&name, bytes) } else { repo.file(&name, bytes) };
    }
    repo
}

/// A hub that echoes the token wherever it can: no output and no file of the run holds it.
#[test]
fn what_the_hub_is_sent_is_shown_nowhere() {
    let repo = tiny(Access::Private { good: TOKEN });
    let commit = repo.commit();
    let hub = HubDouble::start(vec![repo]);
    let dir = TestDir::new();
    let run = |args: &[&str]| {
        let output = command(&dir, args).env("HF_ENDPOINT", hub.url()).output().unwrap();
        check_output(&args.join(" "), &output);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let train = |output| {
        [&["--model", "ada/tiny"], &TRAIN[2..], &["--recipe", "lora", "-v", "--output", output]].concat()
    };
    let (code, stderr) = run(&train("out"));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(hub.requests().iter().all(|request| request.authorization.is_some()));
    // The run records what it trained on.
    let record = std::fs::read_to_string(dir.path("out").join(".finetune/run.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&record).unwrap();
    assert_eq!(record["sources"], serde_json::json!({"ada/tiny": commit}));
    let echo = |name: &'static str, value: &str| vec![(name, format!("{value}{TOKEN}"))];
    let passing =
        |status| Fault::new(&["/api/"], 1, Spoil::Status(status, echo("X-Error-Message", "no such ")));
    let faults = [
        Fault::new(&["/api/"], 1, Spoil::Status(401, echo("X-Error-Message", "no such "))),
        Fault::new(&["/api/"], 1, Spoil::Status(403, echo("X-Error-Code", ""))),
        Fault::new(&["/api/"], 1, Spoil::Status(418, echo("X-Error-Message", "a teapot has "))),
        Fault::new(&["/api/"], 1, Spoil::Status(302, echo("Location", "no address "))),
        Fault::new(&["/api/"], 1, Spoil::Status(302, echo("Location", "ftp://"))),
        Fault::new(&["/api/"], 1, Spoil::Body(TOKEN.as_bytes().to_vec())),
        Fault::new(
            &["/api/"],
            1,
            Spoil::Body(format!("{{\"sha\":[],\"siblings\":\"{TOKEN}\"}}").into_bytes()),
        ),
        Fault::new(&["/api/"], 1, Spoil::Body(format!("{{\"siblings\":\"{TOKEN}\"}}").into_bytes())),
        // Colours, a cleared screen and a terminal title.
        Fault::new(
            &["/api/"],
            1,
            Spoil::Body(br#"{"sha":"\u001b[2J\u001b]0;x\u0007","siblings":[]}"#.to_vec()),
        ),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        hub.forget();
        hub.fault(fault);
        let (code, stderr) = run(&["inspect", "ada/tiny", "-v"]);
        assert!(code == Some(1) || code == Some(75), "{number}: {stderr}");
        assert!(!stderr.contains('\u{1b}'), "{stderr:?}");
    }
    // Printed while the request is retried.
    hub.forget();
    hub.fault(passing(503));
    let (code, stderr) = run(&["inspect", "ada/tiny", "-v"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("trying again"), "{stderr}");
    assert!(check_files(&dir.path("")) > 10);
}

/// The token of a file is used; a file that others can read is refused.
#[test]
fn the_token_of_a_file_is_shown_nowhere() {
    use std::os::unix::fs::PermissionsExt;
    let hub = HubDouble::start(vec![tiny(Access::Private { good: TOKEN })]);
    let dir = TestDir::new();
    std::fs::create_dir_all(dir.path("hf")).unwrap();
    let token = dir.path("hf/token");
    std::fs::write(&token, TOKEN).unwrap();
    let args = ["inspect", "ada/tiny", "-v"];
    for (mode, code) in [(0o600, 0), (0o644, 1)] {
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(mode)).unwrap();
        for (args, code) in [(&args[..], code), (&["inspect", "model", "-v"], 0), (&["doctor"], 0)] {
            let mut command = command(&dir, args);
            let output = command.env("HF_ENDPOINT", hub.url()).env_remove("HF_TOKEN").output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{mode:o} {args:?}: {stderr}");
            assert_eq!(stderr.contains("chmod 600"), code == 1, "{mode:o} {args:?}: {stderr}");
            check_output(&format!("{mode:o} {args:?}"), &output);
        }
    }
    check_files(&dir.path(""));
}

/// User and password of a proxy that does not answer.
#[test]
fn the_password_of_a_proxy_is_shown_nowhere() {
    let dir = TestDir::new();
    let mut command = command(&dir, &["inspect", "ada/tiny", "-v"]);
    let output = command.env("HF_ENDPOINT", "http://hub.invalid").output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", String::from_utf8_lossy(&output.stderr));
    check_output("a proxy that does not answer", &output);
}

/// A number of threads that would exhaust the machine, or a word that rayon would ignore.
#[test]
fn a_number_of_threads_that_cannot_be_is_refused() {
    let dir = TestDir::new();
    for (value, args) in [("1000000", &["doctor"][..]), ("two", &["recipes"]), ("-1", &["inspect", "model"])]
    {
        let output = command(&dir, args).env("RAYON_NUM_THREADS", value).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{value}: {stderr}");
        let said =
            format!("error: cannot use RAYON_NUM_THREADS\n  caused by: it is `{value}`; accepted: 1 to ");
        assert!(stderr.starts_with(&said), "{stderr}");
    }
}
