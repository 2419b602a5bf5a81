//! Parser of the addresses that HTTP requests go to, and the settings of the agent that sends them.
//!
//! `http::Uri`, which ureq uses, reads an invalid port as no port: `http://host:8o/` would go to
//! port 80. So every address is parsed here first, and callers use the returned `Uri`. The crate
//! `url` does not help: it repairs its input (drops tabs, turns `\` into `/` and `0x7f.1` into
//! 127.0.0.1), so it would check another address than ureq's.

use std::net::{IpAddr, Ipv6Addr};
use std::time::{SystemTime, UNIX_EPOCH};

use ureq::config::ConfigBuilder;
use ureq::http::Uri;
use ureq::typestate::AgentScope;
use ureq::{Agent, Proxy};

use crate::error::{Error, Result};

/// The accepted ports, for messages.
pub const PORTS: &str = "1 to 65535";
/// Longest port that a message repeats: a longer one may be a secret in the wrong field.
const MOST_REPEATED: usize = 6;
/// Variables of the proxy, in the order in which ureq reads them.
const PROXY_VARIABLES: [&str; 6] =
    ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];
/// Accepted schemes of a proxy address.
const PROXY_SCHEMES: [&str; 7] = ["http", "https", "socks", "socks4", "socks4a", "socks5", "socks5h"];

/// The port in `text`: digits only, 1 to 65535.
pub fn port(text: &str) -> Option<u16> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port != 0)
}

/// Parses the http or https address `text`.
///
/// # Errors
/// The reason of the refusal. It quotes at most a short port of the address, no path, user or
/// password.
pub fn http(text: &str) -> Result<Uri, String> {
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err("it holds a space or a control character".into());
    }
    let is_http = |scheme: &&str| ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    let rest = text.split_once("://").filter(|(scheme, _)| is_http(scheme)).map(|(_, rest)| rest);
    let rest = rest.ok_or("it does not start with http:// or https://")?;
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err("it holds a user name or a password".into());
    }
    let parts = Authority::parse(authority)?;
    let uri: Uri = text.parse().map_err(|_| "it holds characters that no address has")?;
    // ureq's parser must find the same host and port as the check above.
    let same = uri.host() == Some(parts.host) && uri.port_u16() == parts.port;
    if same { Ok(uri) } else { Err("it can be read in two ways".into()) }
}

/// Parses `text` as a base address: http or https, without a query, and without its trailing
/// slashes.
///
/// # Errors
/// Same as [`http`].
pub fn base(text: &str) -> Result<String, String> {
    let address = text.trim_end_matches('/');
    http(address)?;
    let sound = |byte: u8| byte.is_ascii_graphic() && !b"?#@%\\\"<>{}|^`".contains(&byte);
    if address.bytes().all(sound) {
        Ok(address.to_owned())
    } else {
        Err("it holds characters that a server address cannot contain".into())
    }
}

/// Host and port, both checked.
struct Authority<'a> {
    host: &'a str,
    port: Option<u16>,
}

impl<'a> Authority<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let (host, rest) = match text.find(']') {
            Some(end) if text.starts_with('[') => text.split_at(end + 1),
            _ => text.find(':').map_or((text, ""), |colon| text.split_at(colon)),
        };
        if host.is_empty() {
            return Err("it names no host".into());
        }
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_host = match inner {
            Some(inner) => inner.parse::<Ipv6Addr>().is_ok(),
            None => host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte)),
        };
        if !is_host {
            return Err(
                "its host is neither a name nor an IP address (write an IPv6 address in brackets)".into()
            );
        }
        if rest.is_empty() {
            return Ok(Authority { host, port: None });
        }
        let digits = rest.strip_prefix(':').unwrap_or(rest);
        let port = port(digits).ok_or_else(|| bad_port(digits))?;
        Ok(Authority { host, port: Some(port) })
    }
}

fn bad_port(digits: &str) -> String {
    let shown = match digits.len() {
        0 => "empty".to_owned(),
        1..=MOST_REPEATED if digits.bytes().all(|byte| byte.is_ascii_graphic()) => format!("`{digits}`"),
        _ => "no number".to_owned(),
    };
    format!("its port is {shown}; accepted: {PORTS}, or no colon and no port")
}

/// Returns true if `address` is this machine (localhost or loopback): it needs no proxy.
pub fn is_this_machine(address: &Uri) -> bool {
    let host = address.host().unwrap_or_default();
    let inner = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || inner.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Settings of an agent for requests to `address`. It follows no redirect, returns every status as
/// a response, and uses the environment's proxy except for this machine.
///
/// # Errors
/// User error: the proxy variable holds no valid address, or the clock is before 1970, so no
/// certificate can be checked.
pub fn agent_for(address: &Uri) -> Result<ConfigBuilder<AgentScope>> {
    check_clock(address)?;
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent(concat!("finetune/", env!("CARGO_PKG_VERSION")));
    if is_this_machine(address) {
        return Ok(config.proxy(None));
    }
    check_proxy(&|name| std::env::var_os(name).map(|value| value.into_string().map_err(drop)))?;
    // ureq uses the first variable that holds an address, which is the checked one.
    Ok(config)
}

/// Refuses https if the clock is before 1970, because rustls panics when it compares certificate
/// dates.
///
/// # Errors
/// User error if `address` is https and the clock is before 1970.
pub fn check_clock(address: &Uri) -> Result<()> {
    if address.scheme_str() != Some("https") || SystemTime::now() >= UNIX_EPOCH {
        return Ok(());
    }
    Err(Error::user(format!("cannot ask {} over https", address.host().unwrap_or_default()))
        .because("the clock of this machine is before 1970, so no certificate is valid")
        .hint("set the clock, for example with `timedatectl set-ntp true`"))
}

/// Refuses an invalid address in the variable that ureq reads its proxy from.
fn check_proxy(lookup: &dyn Fn(&str) -> Option<Result<String, ()>>) -> Result<()> {
    let set = PROXY_VARIABLES.iter().find_map(|name| {
        let value = lookup(name).filter(|value| value.as_ref().map_or(true, |text| !text.is_empty()))?;
        Some((*name, value))
    });
    let Some((name, value)) = set else { return Ok(()) };
    let refused = |why: String| {
        // The message omits the value, which may hold a password.
        Error::user(format!("cannot use the proxy that {name} names"))
            .because(why)
            .hint(format!("set {name} to an address such as http://proxy.example:3128, or unset it"))
    };
    let text = value.map_err(|()| refused("its value is not valid UTF-8".into()))?;
    proxy(&text).map(drop).map_err(refused)
}

fn proxy(text: &str) -> Result<Proxy, String> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
    if !PROXY_SCHEMES.iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
        return Err(format!("it begins with none of {}", PROXY_SCHEMES.join(", ")));
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // A user and password may precede the host.
    let (user, authority) = authority.rsplit_once('@').unwrap_or(("", authority));
    if user.contains('@') {
        return Err("it holds more than one @; write %40 for one in a name or password".into());
    }
    let parts = Authority::parse(authority)?;
    let proxy = Proxy::new(text).map_err(|_| "it holds characters that no address has")?;
    let same = proxy.host() == parts.host && parts.port.is_none_or(|port| proxy.port() == port);
    if same { Ok(proxy) } else { Err("it can be read in two ways".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of these reads as no port in `http::Uri`.
    const BAD_PORTS: [&str; 14] =
        ["8o", "99999", "65536", "-1", "+80", "0x50", "0", "00", "", "80:80", "8 0", "80\t", "٨٠", "1e3"];

    #[test]
    fn a_port_is_a_number_from_1_to_65535_or_not_there() {
        for (text, number) in [("1", 1), ("80", 80), ("65535", 65535), ("0443", 443)] {
            assert_eq!(port(text), Some(number));
            assert_eq!(http(&format!("http://host:{text}/x")).unwrap().port_u16(), Some(number));
        }
        assert_eq!(http("https://host").unwrap().port_u16(), None);
        for bad in BAD_PORTS {
            assert_eq!(port(bad), None, "{bad}");
            for host in ["host", "127.0.0.1", "[::1]"] {
                for end in ["", "/", "/a/b?c", "?c", "#d"] {
                    let address = format!("http://{host}:{bad}{end}");
                    assert!(http(&address).is_err(), "{address}");
                    assert!(base(&address).is_err(), "{address}");
                    assert!(proxy(&address).is_err(), "{address}");
                    assert!(proxy(&format!("ada:geheim@{host}:{bad}")).is_err(), "{address}");
                }
            }
        }
        let told = http("http://host:8o/secret").unwrap_err();
        assert_eq!(told, "its port is `8o`; accepted: 1 to 65535, or no colon and no port");
        assert!(http("https://hooks.example:T0123456789/x").is_err_and(|why| !why.contains("T01234")));
    }

    #[test]
    fn an_address_has_a_scheme_and_a_host_and_nothing_that_hides_it() {
        for good in ["http://a", "HTTPS://a-b_c.d:1/x?y=@#z", "http://[::1]:5/", "http://1.2.3.4"] {
            assert!(http(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "host",
            "//host",
            "ftp://host",
            "http:host",
            "http://",
            "http:///x",
            "http://:80",
            "http://?x",
            "http://ada@host",
            "http://ada:geheim@host",
            "http://good:80@evil",
            r"http://good\@evil",
            r"http://good\evil",
            "http://a b",
            "http://a\tb",
            "http://a\r\nX: y",
            " http://a",
            "http://a/x ",
            "http://a/\u{1b}[2J",
            "http://ä.example",
            "http://a%00b",
            "http://a%2eb",
            "http://[::1",
            "http://[::1]x:80",
            "http://[::g]",
            "http://::1",
            "http://a,b",
        ] {
            let why = http(bad).expect_err(bad);
            assert!(!why.contains("geheim") && !why.contains("evil"), "{why}");
        }
        assert_eq!(base("http://a:1/b//").unwrap(), "http://a:1/b");
        for bad in ["http://a?b", "http://a#b", "http://a/%2e", "http://a/b@c"] {
            assert!(base(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_proxy_that_would_be_used_is_the_one_that_is_checked() {
        let check = |vars: &[(&str, &str)]| {
            let lookup =
                |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, v)| Ok((*v).to_owned()));
            check_proxy(&lookup).map_err(|error| error.to_string())
        };
        for good in ["http://p:3128", "p:3128", "p", "socks5://ada:ge%40heim@p:1080/", "HTTPS://p"] {
            assert_eq!(check(&[("HTTP_PROXY", good)]), Ok(()), "{good}");
        }
        for bad in
            ["http://p:8o", "p:0", "ftp://p", "http://ada:geheim@p:99999", "http://a@b:geheim@p", "http://"]
        {
            let message = check(&[("https_proxy", bad)]).expect_err(bad);
            assert!(message.contains("https_proxy") && !message.contains("geheim"), "{message}");
        }
        assert_eq!(check(&[("ALL_PROXY", "p:1"), ("HTTP_PROXY", "p:0")]), Ok(()), "the first one counts");
        assert!(check(&[("ALL_PROXY", ""), ("HTTP_PROXY", "p:0")]).is_err());
    }

    #[test]
    fn this_machine_is_known_by_its_address() {
        let own = |text: &str| is_this_machine(&text.parse().unwrap());
        assert!(own("http://127.0.0.1:5000/x") && own("http://[::1]:5") && own("http://LOCALHOST"));
        assert!(
            !own("http://localhost.example:1") && !own("http://127.0.0.1.example") && !own("http://10.0.0.1")
        );
    }
}
