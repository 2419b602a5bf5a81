//! The credentials for an MLflow server, from the variables of MLflow's own client.

use std::fmt;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use crate::error::{Error, Result};

/// A name with its password, or a token; never printed.
#[derive(Clone, Default)]
pub struct MlflowCredentials {
    /// The value of the header `Authorization`.
    header: Option<String>,
    /// Texts that no message may repeat.
    secrets: Vec<String>,
}

impl fmt::Debug for MlflowCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.header.is_some() { "MlflowCredentials(..)" } else { "MlflowCredentials(none)" })
    }
}

impl MlflowCredentials {
    /// Reads MLFLOW_TRACKING_USERNAME with MLFLOW_TRACKING_PASSWORD, else MLFLOW_TRACKING_TOKEN;
    /// `lookup` returns a variable.
    ///
    /// # Errors
    /// `User` if the token holds anything but visible ASCII, which no header can hold.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let given = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let named = given("MLFLOW_TRACKING_USERNAME").zip(given("MLFLOW_TRACKING_PASSWORD"));
        if let Some((name, password)) = named {
            let encoded = BASE64_STANDARD.encode(format!("{name}:{password}"));
            return Ok(MlflowCredentials {
                header: Some(format!("Basic {encoded}")),
                secrets: vec![password, encoded],
            });
        }
        let Some(token) = given("MLFLOW_TRACKING_TOKEN") else { return Ok(MlflowCredentials::default()) };
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::user("MLFLOW_TRACKING_TOKEN cannot be used")
                .because("it holds characters other than visible ASCII"));
        }
        Ok(MlflowCredentials { header: Some(format!("Bearer {token}")), secrets: vec![token] })
    }

    /// The value of the header `Authorization`.
    pub(super) fn header(&self) -> Option<&str> {
        self.header.as_deref()
    }

    /// Returns `text` without secrets, in case a server has echoed one.
    pub(super) fn redact(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "(secret)"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<MlflowCredentials> {
        MlflowCredentials::from_lookup(&|name| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_name_with_a_password_goes_before_a_token() {
        let token = ("MLFLOW_TRACKING_TOKEN", "geheim");
        let name = ("MLFLOW_TRACKING_USERNAME", "ada");
        let password = ("MLFLOW_TRACKING_PASSWORD", "pass");
        assert_eq!(from(&[]).unwrap().header(), None);
        assert_eq!(from(&[name]).unwrap().header(), None);
        assert_eq!(from(&[token, name]).unwrap().header(), Some("Bearer geheim"));
        assert_eq!(from(&[token, name, password]).unwrap().header(), Some("Basic YWRhOnBhc3M="));
        let shown = from(&[token]).unwrap();
        assert!(!format!("{shown:?}").contains("geheim"));
        assert_eq!(shown.redact("no geheim here"), "no (secret) here");
        let told = from(&[("MLFLOW_TRACKING_TOKEN", "ge\nheim")]).unwrap_err().to_string();
        assert!(!told.contains("heim"), "{told}");
    }
}
