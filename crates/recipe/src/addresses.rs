//! Addresses in a recipe: one to listen at, and the URL of a server.

use std::net::SocketAddr;
use std::path::Path;

use toml::Value;

use super::value::{Setting, ValueRefusal};
use crate::address;

/// IP address and port at which a run listens. Host names are refused, so the recipe shows which
/// address is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenAddress(pub SocketAddr);

impl Setting for ListenAddress {
    fn accepted() -> String {
        "an IP address and a port, such as \"127.0.0.1:9464\", \"[::1]:9464\", or \"0.0.0.0:9464\" for every host that can reach this machine; port 0: any free port, which finetune prints"
            .into()
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        match value.as_str().ok_or(ValueRefusal::Shape)? {
            "" => Err(ValueRefusal::Empty),
            text => text.parse().map(ListenAddress).map_err(|_| ValueRefusal::Shape),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.0.to_string()))
    }
}

/// URL of an HTTP server, without trailing slashes. It holds no password, because recipes are shown
/// and stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl(pub String);

impl Setting for ServerUrl {
    fn accepted() -> String {
        "an address such as \"http://127.0.0.1:5000\" or \"https://mlflow.example.org/prefix\"".into()
    }

    fn read(value: &Value, _: &Path) -> Result<Self, ValueRefusal> {
        let text = value.as_str().ok_or(ValueRefusal::Shape)?;
        if text.is_empty() {
            return Err(ValueRefusal::Empty);
        }
        if text.contains('@') {
            return Err(ValueRefusal::Unusable(
                "a recipe must not hold a user name or password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
                    .into(),
            ));
        }
        let unusable = |why| ValueRefusal::Unusable(format!("{why}; accepted: {}", Self::accepted()));
        address::base(text).map(ServerUrl).map_err(unusable)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: Setting>(text: &str) -> Option<T> {
        T::read(&Value::String(text.into()), Path::new(".")).ok()
    }

    #[test]
    fn an_address_to_listen_at_has_a_host_and_a_port() {
        for good in ["127.0.0.1:9464", "[::1]:9464", "0.0.0.0:0"] {
            let address: ListenAddress = read(good).unwrap();
            assert_eq!(address.write(), Some(Value::String(good.into())));
        }
        for bad in [
            ":9464",
            "9464",
            "localhost:9464",
            "127.0.0.1",
            "127.0.0.1:70000",
            "http://127.0.0.1:1",
            "1.2.3:4",
        ] {
            assert_eq!(read::<ListenAddress>(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_server_has_a_scheme_and_a_host_and_no_password() {
        for (text, kept) in [
            ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
            ("https://mlflow.example.org/prefix/", "https://mlflow.example.org/prefix"),
        ] {
            assert_eq!(read(text), Some(ServerUrl(kept.into())));
        }
        for bad in [
            "127.0.0.1:5000",
            "http://",
            "http:///x",
            "http://:80",
            "ftp://x",
            "http://a b",
            "http://x?y",
            "http://x:99999",
        ] {
            assert_eq!(read::<ServerUrl>(bad), None, "{bad}");
        }
        let told = ServerUrl::read(&Value::String("http://ada:geheim@host".into()), Path::new("."));
        assert!(matches!(told, Err(ValueRefusal::Unusable(text)) if !text.contains("geheim")));
    }
}
