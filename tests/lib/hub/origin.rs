//! The token's recipients: every kind of request, every redirect status, every notation of the
//! redirect's target.

use finetune::hub::{LocatedModel, locate_model_in_place};

use super::*;

/// A notation of an address on this hub or another one, and its consequence for the token.
struct Way {
    /// Returns the beginning of a `Location`, given the authorities (host and port) of this hub and
    /// of the other one.
    written: fn(own: &str, other: &str) -> String,
    leads: Leads,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Leads {
    /// The endpoint's own origin: the token is sent.
    Home,
    /// Another origin: the token is not sent.
    Away,
    /// Refused.
    Nowhere,
}

/// Returns the port of an authority.
fn port(authority: &str) -> &str {
    authority.rsplit_once(':').unwrap().1
}

const WAYS: [Way; 13] = [
    Way { written: |_, _| String::new(), leads: Leads::Home },
    Way { written: |own, _| format!("http://{own}"), leads: Leads::Home },
    Way { written: |own, _| format!("HTTP://{own}"), leads: Leads::Home },
    Way { written: |own, _| format!("//{own}"), leads: Leads::Home },
    Way { written: |_, other| format!("http://{other}"), leads: Leads::Away },
    Way { written: |_, other| format!("//{other}"), leads: Leads::Away },
    // The same server under another name.
    Way { written: |own, _| format!("http://localhost:{}", port(own)), leads: Leads::Away },
    Way { written: |own, _| format!("//LOCALHOST:{}", port(own)), leads: Leads::Away },
    Way { written: |own, other| format!("http://{own}@{other}"), leads: Leads::Nowhere },
    Way { written: |own, _| format!("http://ada:geheim@{own}"), leads: Leads::Nowhere },
    Way { written: |own, _| format!("//ada@{own}"), leads: Leads::Nowhere },
    Way { written: |own, _| format!("ftp://{own}"), leads: Leads::Nowhere },
    Way { written: |own, other| format!(r"http://{own}\@{other}"), leads: Leads::Nowhere },
];

/// Requests of a download or a plan: the beginning of their line, and a part of it.
const REQUESTS: [[&str; 2]; 4] = [
    ["GET /api/", "/revision/"],
    ["HEAD /ada", "config.json"],
    ["GET /ada", "config.json"],
    ["GET /ada", "safetensors"],
];

fn tiny() -> RepoDouble {
    RepoDouble::model("ada/tiny").file("config.json", "{}").lfs("model.safetensors", weights(100))
}

fn path_of(request: [&str; 2], commit: &str) -> String {
    match request[1] {
        "/revision/" => "/api/models/ada/tiny/revision/main".to_owned(),
        "config.json" => format!("/ada/tiny/resolve/{commit}/config.json"),
        _ => format!("/ada/tiny/resolve/{commit}/model.safetensors"),
    }
}

/// With `in_place` plans and reads weights by range; otherwise downloads all files.
fn ask(world: &World, in_place: bool) -> Result<()> {
    if !in_place {
        return world.model("ada/tiny").map(drop);
    }
    let mut quiet = |_: DownloadEvent<'_>| {};
    let LocatedModel { remote, .. } = locate_model_in_place("ada/tiny", "main", &world.options, &mut quiet)?;
    let bytes = remote.unwrap().read("model.safetensors", 10..20, &mut quiet)?.bytes;
    assert_eq!(bytes, weights(100)[10..20]);
    Ok(())
}

/// Redirects one kind of request of a hub, and checks who receives the token.
fn redirected(way: &Way, request: [&str; 2], status: u16, in_place: bool) {
    let elsewhere = HubDouble::start(vec![tiny()]);
    let world = World::new(vec![tiny()]).with_token();
    let authority = |hub: &HubDouble| hub.url().trim_start_matches("http://").to_owned();
    let location = (way.written)(&authority(&world.hub), &authority(&elsewhere));
    let path = path_of(request, &tiny().commit());
    // Redirect once, so that a request that returns to this hub is answered.
    let to = vec![("Location", format!("{location}{path}"))];
    world.hub.fault(Fault::new(&request, 1, Spoil::Status(status, to)));
    let told = format!("{request:?} {status} to {location}");
    let asked = ask(&world, in_place);
    let bearer = format!("Bearer {SECRET}");
    let has_token = |request: &crate::hub_double::Request| match request.authorization.as_deref() {
        Some(value) => {
            assert_eq!(value, bearer);
            true
        }
        None => false,
    };
    let (home, away): (Vec<_>, Vec<_>) =
        world.hub.requests().into_iter().partition(|request| request.host.starts_with("127.0.0.1"));
    assert!(!home.is_empty() && home.iter().all(has_token), "{told}: {home:?}");
    let away: Vec<_> = away.into_iter().chain(elsewhere.requests()).collect();
    assert!(!away.iter().any(has_token), "{told}: {away:?}");
    assert_eq!(!away.is_empty(), way.leads == Leads::Away, "{told}: {away:?}");
    match way.leads {
        Leads::Nowhere => {
            let text = asked.unwrap_err().to_string();
            assert!(text.contains("does not answer as a hub does"), "{told}: {text}");
            assert!(!text.contains("geheim") && !text.contains(SECRET), "{told}: {text}");
        }
        _ => asked.unwrap_or_else(|error| panic!("{told}: {error}")),
    }
}

#[test]
fn the_token_goes_home_alone_over_the_whole_matrix() {
    let mut statuses = [301, 302, 303, 307, 308].into_iter().cycle();
    for way in &WAYS {
        for request in REQUESTS {
            for in_place in [false, true] {
                // Both ways read weights with a GET; for the small files one of them is enough.
                if !in_place || request[1] == "safetensors" {
                    redirected(way, request, statuses.next().unwrap(), in_place);
                }
            }
        }
    }
}

/// However long a chain of redirects is, the token is sent until the chain leaves the origin, and
/// never again. The chains visit this hub and another one, in every order of three.
#[test]
fn the_token_stays_off_once_a_chain_has_left() {
    for order in 0..8_usize {
        let elsewhere = HubDouble::start(vec![tiny()]);
        let world = World::new(vec![tiny()]).with_token();
        let hubs = [&world.hub, &elsewhere];
        let places: Vec<usize> = (0..3).map(|bit| order >> bit & 1).collect();
        let mut at = 0;
        for (step, &hub) in places.iter().enumerate() {
            let from = if step == 0 { "/api/".to_owned() } else { format!("/step-{step}") };
            let last = step + 1 == places.len();
            let to = if last {
                "/api/models/ada/tiny/revision/main".to_owned()
            } else {
                format!("/step-{}", step + 1)
            };
            redirect_once(hubs[at], &from, hubs[hub].url(), &to);
            at = hub;
        }
        world.model("ada/tiny").unwrap();
        let mut left = false;
        let expected = std::iter::once(0).chain(places.iter().copied()).map(|hub| {
            left |= hub == 1;
            !left
        });
        let expected: Vec<bool> = expected.collect();
        let mut sent = Vec::new();
        let mut lines = [world.hub.requests(), elsewhere.requests()].map(Vec::into_iter);
        for hub in std::iter::once(0).chain(places.iter().copied()) {
            sent.push(lines[hub].next().unwrap().authorization.is_some());
        }
        assert_eq!(sent, expected, "{places:?}");
    }
}

fn redirect_once(hub: &HubDouble, from: &str, to: &str, path: &str) {
    let location = vec![("Location", format!("{to}{path}"))];
    hub.fault(Fault::new(&["GET", from], 1, Spoil::Status(302, location)));
}
