//! Input from the network: addresses of requests, requests to the metrics page, and alert settings.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::path::Path;

use finetune::hub::HubOptions;
use finetune::recipe::{Recipe, RecipeLayers, RecipeText};
use finetune::report::PageServer;
use finetune_core::address;
use ureq::http::Uri;

use super::Target;
use super::targets::{folder_of, on_file};

/// Checks the port to which ureq would send a request for the accepted `address`: only a port that
/// the address names.
fn check_port(address: &str) {
    let uri: Uri = address.parse().unwrap();
    let authority = uri.authority().unwrap().as_str();
    assert!(!authority.contains('@'), "{address:?} holds a user");
    let named = authority.rsplit_once(':').map(|(_, port)| port).filter(|port| !port.ends_with(']'));
    assert_eq!(uri.port_u16().map(u32::from), named.map(|port| port.parse().unwrap()), "{address:?}");
    assert!(uri.port_u16() != Some(0) && uri.host().is_some_and(|host| !host.is_empty()), "{address:?}");
    assert!(matches!(uri.scheme_str(), Some("http" | "https")), "{address:?}");
    assert!(!address.contains(char::is_whitespace) && !address.contains(char::is_control), "{address:?}");
}

#[test]
fn addresses() {
    let addresses = [
        "https://huggingface.co",
        "http://127.0.0.1:8080/hf/",
        "http://[::1]:5000/a/b?c=d#e",
        "https://ada:secret@hooks.example.org:443/services/T0/B0/x",
        "socks5://proxy:1080",
        "http://host:8o",
        "http://host:99999/",
        r"http://a\@b:65536",
    ];
    let parse = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        if address::http(&text).is_ok() {
            check_port(&text);
        }
        if let Ok(options) = HubOptions::new(&text, "cache") {
            check_port(options.endpoint());
        }
    };
    let seeds = addresses.iter().map(|address| address.as_bytes().to_vec()).collect();
    Target { name: "address", seeds, tries: 2000, parse: &parse }.run();
}

#[test]
fn requests_to_the_page_of_figures() {
    let server = PageServer::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), "/metrics").unwrap();
    server.show("loss 1\n".into());
    let url = server.url();
    let authority = url.strip_prefix("http://").unwrap().split('/').next().unwrap();
    let ask = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(authority).unwrap();
        let mut answer = Vec::new();
        // A request that is too long is answered before its end.
        let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
        let _ = stream.read_to_end(&mut answer);
        answer
    };
    let parse = |bytes: &[u8]| {
        let answer = ask(bytes);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 "), "{answer:?}");
    };
    let seeds = [
        "GET /metrics HTTP/1.1\r\nHost: a:1\r\nAccept: */*\r\n\r\n",
        "HEAD /metrics?x=1 HTTP/1.0\r\n\r\n",
        "POST /metrics HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "GET http://a/metrics HTTP/1.1\nX: y\n z\n\n",
        "GET /../metrics HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    ];
    let seeds = seeds.iter().map(|request| request.as_bytes().to_vec()).collect();
    Target { name: "metrics-request", seeds, tries: 300, parse: &parse }.run();
    // After all these requests the server still serves the page.
    let page = String::from_utf8(ask(b"GET /metrics HTTP/1.1\r\n\r\n")).unwrap();
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("loss 1\n"), "{page}");
}

#[test]
fn settings_of_alerts() {
    let sections = [
        "[alerts]\nrules = [\"loss_spike\", \"stall\", \"non_finite\"]\ncommand = [\"sh\", \"-c\", \"cat\"]\nwebhook = \"env:HOOK\"\n",
        "[alerts]\nwebhook = \"https://hooks.example.org:8443/services/T0/x\"\n[log]\ncommand = [\"python3\", \"a b.py\"]\nmetrics_address = \"127.0.0.1:9464\"\n",
        "[alerts]\ncommand = [\"/bin/true\"]\nrules = []\n",
    ];
    let seeds = sections.iter().map(|text| text.as_bytes().to_vec()).collect();
    let loaded = Cell::new(0);
    on_file("alerts.toml", seeds, 1000, &[("rows.jsonl", b"{}\n".to_vec())], |path: &Path| {
        let Ok(recipe) = RecipeText::find("alerts.toml", folder_of(path)) else { return };
        let layers = RecipeLayers {
            recipe: Some(recipe),
            model: Some("a/b".to_owned()),
            train: vec!["rows.jsonl".to_owned()],
            set: vec!["optimizer.learning_rate=1e-4".to_owned()],
            folder: folder_of(path).to_owned(),
            ..RecipeLayers::default()
        };
        let Ok(recipe) = Recipe::load(&layers) else { return };
        loaded.set(loaded.get() + 1);
        if let Some(Ok(address)) = recipe.alerts.webhook.map(|webhook| webhook.address()) {
            check_port(&address);
        }
    });
    assert!(loaded.get() >= 2, "no recipe is read, and no address checked");
}
