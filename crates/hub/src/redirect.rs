//! Redirects, followed by hand: finds the next address of a request, and decides if the token goes
//! with it.
//!
//! The token is for one origin (scheme, host and port, RFC 6454): that of the configured endpoint.
//! ureq compares host names alone, so it would send the token to any server on another port of the
//! hub's host. A chain of redirects that has left the origin once stays untrusted even if it comes
//! back.

use ureq::http::{Response, Uri};

use crate::address;

/// The target of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Redirect {
    /// The address to ask.
    pub(super) uri: Uri,
    /// True if this and every hop before it have the endpoint's origin, so that the token may go
    /// there.
    pub(super) is_trusted: bool,
}

impl Redirect {
    /// The first hop of a request to `url`, an address below `endpoint`.
    pub(super) fn first(url: &str, endpoint: &str) -> Result<Self, String> {
        let uri = parse(url)?;
        let is_trusted = is_same_origin(&uri, &parse(endpoint)?);
        Ok(Redirect { uri, is_trusted })
    }

    /// Returns the target that `response` redirects to; none if it is no redirect.
    pub(super) fn next<B>(&self, response: &Response<B>) -> Result<Option<Self>, String> {
        if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
            return Ok(None);
        }
        let location = response.headers().get("location").and_then(|value| value.to_str().ok());
        location.map(|location| self.follow(location)).transpose()
    }

    fn follow(&self, location: &str) -> Result<Self, String> {
        let uri = self.resolve(location)?;
        if self.uri.scheme_str() == Some("https") && uri.scheme_str() != Some("https") {
            return Err("it redirects from https to http, where anybody on the way could answer".into());
        }
        let is_trusted = self.is_trusted && is_same_origin(&self.uri, &uri);
        Ok(Redirect { uri, is_trusted })
    }

    /// Resolves a `Location` to an absolute address (RFC 3986, section 5.2).
    fn resolve(&self, location: &str) -> Result<Uri, String> {
        if location.split(['/', '?', '#']).next().is_some_and(|start| start.contains(':')) {
            return parse(location);
        }
        let scheme = self.uri.scheme_str().unwrap_or("https");
        if location.starts_with("//") {
            return parse(&format!("{scheme}:{location}"));
        }
        let folder = self.uri.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        let path =
            if location.starts_with('/') { location.to_owned() } else { format!("{folder}/{location}") };
        parse(&format!(
            "{scheme}://{}{path}",
            self.uri.authority().map_or("", |authority| authority.as_str())
        ))
    }

    /// Scheme, host and port, for messages.
    pub(super) fn origin(&self) -> String {
        let authority = self.uri.authority().map_or("", |authority| authority.as_str());
        format!("{}://{authority}", self.uri.scheme_str().unwrap_or("https"))
    }
}

fn parse(address: &str) -> Result<Uri, String> {
    address::http(address).map_err(|why| format!("it names an address that cannot be used: {why}"))
}

/// Returns whether two addresses have the same scheme, host and port.
fn is_same_origin(a: &Uri, b: &Uri) -> bool {
    let port = |uri: &Uri| uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    let host = |uri: &Uri| uri.host().map(str::to_ascii_lowercase);
    a.scheme_str() == b.scheme_str() && host(a) == host(b) && port(a) == port(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(url: &str) -> Redirect {
        Redirect::first(url, url).unwrap()
    }

    #[test]
    fn the_token_goes_to_the_endpoints_origin_alone() {
        let hub = hop("https://hub.example/a/resolve/main/x");
        for (location, is_trusted) in [
            ("/b", true),
            ("y?download=1", true),
            ("https://hub.example/b", true),
            ("https://HUB.example:443/b", true),
            ("//hub.example/b", true),
            ("https://hub.example:8443/b", false),
            ("https://cdn.hub.example/b", false),
            ("https://hub.example.evil/b", false),
            ("https://hub.example./b", false),
            ("//evil/b", false),
        ] {
            assert_eq!(hub.follow(location).unwrap().is_trusted, is_trusted, "{location}");
        }
        assert!(!Redirect::first("https://evil/x", "https://hub.example").unwrap().is_trusted);
    }

    /// Tries every scheme, user, host and port from every endpoint: the client follows them, with
    /// the token or without, as RFC 6454 demands.
    #[test]
    fn the_whole_matrix_of_addresses() {
        let ports = |scheme: &str| if scheme == "https" { 443 } else { 80 };
        let endpoints = ["http", "https"]
            .into_iter()
            .flat_map(|scheme| ["", ":80", ":443", ":8080"].map(|port| (scheme, port)));
        let number = |scheme: &str, port: &str| {
            port.strip_prefix(':').map_or(ports(scheme), |digits| digits.parse().unwrap())
        };
        let (mut followed, mut refused, mut trusted) = (0, 0, 0);
        for (scheme, port) in endpoints {
            let hub = hop(&format!("{scheme}://hub.example{port}/a/b"));
            for to_scheme in ["http", "https", "HTTP", "ftp", "ws", "file"] {
                for user in ["", "ada@", "ada:geheim@", ":@", "hub.example@", "hub.example:80@"] {
                    for host in [
                        "hub.example",
                        "HUB.example",
                        "hub.example.",
                        "hub.example.evil",
                        "evil",
                        "127.0.0.1",
                        "[::1]",
                    ] {
                        for to_port in ["", ":80", ":443", ":8080"] {
                            let address = format!("{to_scheme}://{user}{host}{to_port}/x");
                            let scheme_is = to_scheme.to_ascii_lowercase();
                            let may = user.is_empty()
                                && ["http", "https"].contains(&scheme_is.as_str())
                                && !(scheme == "https" && scheme_is == "http");
                            let same = scheme_is == scheme
                                && host.eq_ignore_ascii_case("hub.example")
                                && number(scheme, port) == number(&scheme_is, to_port);
                            match hub.follow(&address) {
                                Ok(next) => {
                                    assert!(may, "{hub:?} followed {address}");
                                    assert_eq!(next.is_trusted, same, "{hub:?} to {address}");
                                    followed += 1;
                                    trusted += usize::from(same);
                                }
                                Err(why) => {
                                    assert!(!may, "{hub:?} did not follow {address}: {why}");
                                    refused += 1;
                                }
                            }
                        }
                    }
                }
            }
        }
        // Of 8 endpoints and 1,008 addresses.
        assert_eq!(followed + refused, 8 * 1008);
        assert!(followed > 400 && trusted > 20, "{followed} followed, {trusted} with the token");
    }

    /// Addresses that parsers are known to read in different ways lead nowhere, or not to the
    /// token.
    #[test]
    fn addresses_that_parsers_disagree_about() {
        let hub = hop("https://hub.example/a/b");
        for location in [
            r"https://hub.example\@evil/x",
            r"https://evil\@hub.example/x",
            r"/\evil/x",
            r"\\evil/x",
            "https:///evil/x",
            "https:/hub.example/x",
            "https:hub.example/x",
            "https://hub.example%2eevil/x",
            "https://hub.example#@evil/x",
            "https://hub.example?@evil/x",
            "https://evil#@hub.example/x",
            "https://evil?@hub.example/x",
            "https://evil/@hub.example/x",
            "https://hub.example%00.evil/x",
            "https://hub.example%20/x",
            "https://hub。example/x",
            "////evil/x",
            "//evil\\x",
            " https://hub.example/x",
            "",
        ] {
            if let Ok(next) = hub.follow(location) {
                let host = next.uri.host().map(str::to_owned);
                assert_eq!(next.is_trusted, host.as_deref() == Some("hub.example"), "{location}: {next:?}");
                assert!(!next.origin().contains('@'), "{location}: {next:?}");
            }
        }
    }

    #[test]
    fn a_chain_that_has_left_the_origin_does_not_get_the_token_back() {
        let away = hop("http://hub:1/x").follow("http://hub:2/x").unwrap();
        let back = away.follow("http://hub:1/x").unwrap();
        assert_eq!((away.is_trusted, back.is_trusted), (false, false));
        assert_eq!(back.uri.port_u16(), Some(1));
    }

    #[test]
    fn what_is_not_followed() {
        let hub = hop("https://hub.example/a/x");
        for location in [
            "http://hub.example/x",
            "https://hub.example@evil/x",
            "https://ada:secret@hub.example/x",
            "//ada@hub.example/x",
            "ftp://hub.example/x",
            "javascript:x",
            "file:///etc/passwd",
            "https://hub.example:99999/x",
            "https://hub.example:8o/x",
            "https://hub.example:0/x",
            "https://hub.example:/x",
            "https://hub.example:443:80/x",
            "//hub.example:-1/x",
        ] {
            assert!(hub.follow(location).is_err(), "{location}");
        }
        assert!(hop("http://hub/x").follow("https://hub/x").is_ok_and(|next| !next.is_trusted));
    }

    #[test]
    fn relative_locations_are_those_of_the_address_that_answered() {
        let elsewhere = hop("http://hub:1/a/b").follow("http://cdn:2/c/d?e=f").unwrap();
        for (location, address) in [
            ("/x", "http://cdn:2/x"),
            ("x", "http://cdn:2/c/x"),
            ("//h/x", "http://h/x"),
            ("x?u=http://hub:1/", "http://cdn:2/c/x?u=http://hub:1/"),
        ] {
            assert_eq!(elsewhere.follow(location).unwrap().uri, address, "{location}");
        }
    }
}
