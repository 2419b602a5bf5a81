//! Addresses with an invalid port: finetune refuses them before any request, wherever it reads an
//! address. A parser that falls back to port 80 or 443 would send the token, the password or the
//! secret path there.

use std::net::TcpListener;
use std::process::Command;

use crate::hub_double::{Fault, HubDouble, RepoDouble, Spoil};
use crate::test_dir::{TestDir, lora};

/// Invalid ports, as written after the colon.
const BAD_PORTS: [&str; 9] = ["8o", "99999", "65536", "-1", "+80", "0x50", "0", "", "80:80"];
const SECRET: &str = "canary0of0the0address";
const PROXIES: [&str; 6] =
    ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];

/// The binary, online and without this machine's proxies.
fn command(dir: &TestDir, args: &[&str]) -> Command {
    let mut command = dir.command(args);
    command.env_remove("HF_HUB_OFFLINE").env_remove("NO_PROXY").env_remove("no_proxy");
    for name in PROXIES {
        command.env_remove(name);
    }
    command
}

/// Returns the message of a refusal, after checking that it holds no secret.
fn refused(dir: &TestDir, mut command: Command) -> String {
    let done = command.output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(!said.contains(SECRET), "{said}");
    assert!(!dir.path("out/metrics.jsonl").exists(), "it has trained: {said}");
    said
}

/// Returns the text of a message about `port`.
fn of_port(port: &str) -> String {
    let shown = if port.is_empty() { "empty".to_owned() } else { format!("`{port}`") };
    format!("its port is {shown}; accepted: 1 to 65535, or no colon and no port")
}

#[test]
fn the_address_of_the_hub() {
    let dir = TestDir::new();
    for port in BAD_PORTS {
        let mut inspect = command(&dir, &["inspect", "a/b"]);
        inspect.env("HF_ENDPOINT", format!("http://127.0.0.1:{port}")).env("HF_TOKEN", SECRET);
        let said = refused(&dir, inspect);
        assert!(said.contains("the address of the hub (HF_ENDPOINT) cannot be used"), "{said}");
        assert!(said.contains(&of_port(port)), "{port}: {said}");
    }
    for address in
        ["http://ada:canary0of0the0address@127.0.0.1", "http://127.0.0.1:80@127.0.0.2", "http://a\tb"]
    {
        let mut inspect = command(&dir, &["inspect", "a/b"]);
        inspect.env("HF_ENDPOINT", address).env("HF_TOKEN", SECRET);
        assert!(refused(&dir, inspect).contains("(HF_ENDPOINT) cannot be used"), "{address}");
    }
}

#[test]
fn where_a_hub_redirects_to() {
    let dir = TestDir::new();
    for port in BAD_PORTS {
        let hub = HubDouble::start(vec![RepoDouble::model("a/b").file("config.json", "{}")]);
        let to = format!("http://127.0.0.1:{port}/{SECRET}");
        hub.fault(Fault::new(&["/revision/"], 9, Spoil::Status(302, vec![("Location", to)])));
        let mut inspect = command(&dir, &["inspect", "a/b"]);
        inspect.env("HF_ENDPOINT", hub.url()).env("HF_TOKEN", SECRET);
        let said = refused(&dir, inspect);
        assert!(said.contains("it names an address that cannot be used"), "{said}");
        assert!(said.contains(&of_port(port)), "{port}: {said}");
        assert_eq!(hub.requests().len(), 1, "{port}");
    }
}

#[test]
fn servers_of_a_recipe() {
    let dir = TestDir::new();
    for port in BAD_PORTS {
        let address = format!("http://127.0.0.1:{port}");
        let webhook = format!("alerts.webhook={address}/{SECRET}");
        let said = refused(&dir, command(&dir, &lora(&["--set", &webhook])));
        assert!(
            said.contains("`alerts.webhook` is (hidden)") && said.contains(&of_port(port)),
            "{port}: {said}"
        );

        let mut run = command(&dir, &lora(&["--set", "alerts.webhook=env:HOOK"]));
        run.env("HOOK", format!("{address}/{SECRET}"));
        let said = refused(&dir, run);
        assert!(said.contains("variable HOOK: ") && said.contains(&of_port(port)), "{port}: {said}");
    }
}

#[test]
fn proxies() {
    let dir = TestDir::new();
    let hidden = |port: &str| format!("http://ada:{SECRET}@127.0.0.1:{port}");
    for (name, port) in PROXIES.into_iter().zip(BAD_PORTS) {
        let mut inspect = command(&dir, &["inspect", "a/b"]);
        inspect.env("HF_ENDPOINT", "http://hub.invalid").env("HF_TOKEN", SECRET).env(name, hidden(port));
        let said = refused(&dir, inspect);
        assert!(said.contains(&format!("cannot use the proxy that {name} names")), "{said}");
        assert!(said.contains(&of_port(port)), "{port}: {said}");
    }
    // ureq ignores a proxy it does not know and would send the request without it.
    let mut inspect = command(&dir, &["inspect", "a/b"]);
    inspect.env("HF_ENDPOINT", "http://hub.invalid").env("HTTPS_PROXY", "ftp://127.0.0.1:1");
    assert!(refused(&dir, inspect).contains("it begins with none of http, https, socks"));
    let mut run = command(&dir, &lora(&["--set", "alerts.webhook=http://hooks.invalid/x"]));
    run.env("http_proxy", hidden("8o"));
    assert!(refused(&dir, run).contains("cannot use the proxy that http_proxy names"));
    // Requests to this machine use no proxy.
    let hub = HubDouble::start(vec![RepoDouble::model("a/b").file("config.json", "{}")]);
    let mut inspect = command(&dir, &["inspect", "a/b"]);
    let said = inspect.env("HF_ENDPOINT", hub.url()).env("HTTP_PROXY", hidden("8o")).output().unwrap();
    assert!(!hub.requests().is_empty(), "{}", dir.told(&said.stderr));
}

#[test]
fn ports_that_processes_meet_at_or_that_figures_are_served_at() {
    let dir = TestDir::new();
    for port in ["8o", "99999", "65536", "-1", "+29500", "0x50", "0"] {
        let mut run = command(&dir, &lora(&[]));
        let meeting =
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")];
        run.envs(meeting).env("LOCAL_RANK", "0").env("MASTER_PORT", port);
        let said = refused(&dir, run);
        assert!(said.contains("MASTER_PORT") && said.contains("1 to 65535"), "{port}: {said}");
    }
    for port in ["8o", "99999", "-1", "+9464", "0x50", ""] {
        let set = format!("log.metrics_address=127.0.0.1:{port}");
        let said = refused(&dir, command(&dir, &lora(&["--set", &set])));
        assert!(
            said.contains("`log.metrics_address` is") && said.contains("an IP address and a port"),
            "{port}: {said}"
        );
    }
}

/// The address that finetune checks is the address it requests.
#[test]
fn a_good_port_is_the_one_that_is_asked() {
    let dir = TestDir::new();
    let hub = HubDouble::start(vec![RepoDouble::model("a/b").file("config.json", "{}")]);
    // Nothing listens on this port.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let to = format!("{}/api/models/a/b/revision/main", hub.url());
    hub.fault(Fault::new(&["/revision/"], 1, Spoil::Status(307, vec![("Location", to)])));
    let mut inspect = command(&dir, &["inspect", "a/b"]);
    inspect.env("HF_ENDPOINT", hub.url()).env("HTTP_PROXY", format!("http://127.0.0.1:{free}"));
    inspect.output().unwrap();
    assert_eq!(hub.requests().iter().filter(|asked| asked.path.contains("/revision/")).count(), 2);
}
