//! URL to which alerts are posted, which is a secret.

use std::fmt;
use std::path::Path;

use toml::Value;

use super::value::{Setting, ValueRefusal};
use crate::address;
use crate::error::{Error, Result};

/// URL to which alerts are posted, or `env:NAME` for the variable that holds it.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookSource(String);

/// Hides the URL, because it is a secret and must not reach a log.
impl fmt::Debug for WebhookSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.variable().map_or("(hidden)", |_| &self.0))
    }
}

impl WebhookSource {
    fn variable(&self) -> Option<&str> {
        self.0.strip_prefix("env:")
    }

    /// The URL itself.
    ///
    /// # Errors
    /// The variable is not set or holds no http or https address, which the error does not quote.
    pub fn address(&self) -> Result<String> {
        let Some(name) = self.variable() else { return Ok(self.0.clone()) };
        let refused = |why: String| {
            Error::user("cannot use `alerts.webhook`")
                .because(format!("the environment variable {name}: {why}"))
                .hint(format!("export {name} with the http or https address to post to"))
        };
        let address = std::env::var(name).map_err(|_| refused("it is not set".into()))?.trim().to_owned();
        address::http(&address).map_err(refused).map(|_| address)
    }
}

impl Setting for WebhookSource {
    fn accepted() -> String {
        "an http or https address, env:NAME".into()
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        let text = String::read(value, folder)?;
        let is_usable = match text.strip_prefix("env:") {
            Some(name) if name.is_empty() || name.contains(['=', '\0']) => Err(ValueRefusal::Shape),
            Some(_) => Ok(()),
            None => address::http(&text)
                .map(drop)
                .map_err(|why| ValueRefusal::Unusable(format!("{why}; accepted: {}", Self::accepted()))),
        };
        is_usable.map(|()| WebhookSource(text))
    }

    /// Omits a URL, because users share the files of a run.
    fn write(&self) -> Option<Value> {
        self.variable().map(|_| Value::String(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhook(text: &str) -> Result<WebhookSource, ValueRefusal> {
        WebhookSource::read(&Value::String(text.into()), Path::new("."))
    }

    #[test]
    fn an_address_is_kept_to_itself() {
        let address = "https://hooks.example/services/canary";
        let read = webhook(address).unwrap();
        assert_eq!(read.address().unwrap(), address);
        assert_eq!(read.write(), None);
        assert!(!format!("{read:?}").contains("canary"));
        for wrong in [
            "ftp://h/canary",
            "hooks.example/canary",
            "http:///canary",
            "canary",
            "https://h/ canary",
            "https://h:8o/canary",
        ] {
            let Err(ValueRefusal::Unusable(why)) = webhook(wrong) else { panic!("{wrong}") };
            assert!(!why.contains("canary"), "{why}");
        }
        let variable = webhook("env:HOOK").unwrap();
        assert_eq!(variable.write(), Some(Value::String("env:HOOK".into())));
        assert!(matches!(webhook("env:"), Err(ValueRefusal::Shape)));
        assert!(matches!(webhook(""), Err(ValueRefusal::Empty)));
    }
}
