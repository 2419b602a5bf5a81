//! The address at which a run listens.

use std::net::SocketAddr;
use std::path::Path;

use toml::Value;

use super::value::{Setting, ValueRefusal};

/// IP address and port at which a run listens. Host names are refused, so the recipe shows which
/// address is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenAddress(pub SocketAddr);

impl Setting for ListenAddress {
    fn accepted() -> String {
        "an IP address and a port, such as \"127.0.0.1:9464\", \"[::1]:9464\", or \"0.0.0.0:9464\" for every host that can reach this machine; port 0: any free port, which finetune prints"
            .into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        let text = String::read(value, folder)?;
        text.parse().map(ListenAddress).map_err(|_| ValueRefusal::Shape)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.0.to_string()))
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
}
