//! Where a run answers and whom it tells: an address to listen at, the address of a server.

use std::net::SocketAddr;
use std::path::Path;

use toml::Value;

use super::value::{Setting, ValueRefusal};
use crate::address;

/// An IP address and a port that a run listens at. Names are not looked up: which address is opened stands in the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenAddress(pub SocketAddr);

impl Setting for ListenAddress {
    fn accepted() -> String {
        "an IP address and a port, such as \"127.0.0.1:9464\", \"[::1]:9464\", or \"0.0.0.0:9464\" for whoever reaches this machine; port 0: a free one, which is said"
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

/// The address of a server over HTTP, without a slash at its end. It holds no password: recipes are shown and kept.
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
                "a name and a password do not belong into a recipe; they are read from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
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
