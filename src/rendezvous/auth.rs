//! The secret that the processes of a run share.
//!
//! `FINETUNE_RDZV_SECRET`, or a file that its owner alone can read, named by `FINETUNE_RDZV_SECRET_FILE`. Never on the
//! command line, which every user of a host can see. Whoever can reach the port and knows the secret is a rank, so
//! without one only the loopback address will do, unless `FINETUNE_RDZV_WITHOUT_SECRET=1` says that the network is
//! the user's alone. The secret leaves this module as a derived key alone: `Debug` and errors do not show it.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};

const SECRET: &str = "FINETUNE_RDZV_SECRET";
const SECRET_FILE: &str = "FINETUNE_RDZV_SECRET_FILE";
const WITHOUT_SECRET: &str = "FINETUNE_RDZV_WITHOUT_SECRET";
/// Keeps the key apart from whatever else a user derives from the same secret.
const KEY_CONTEXT: &str = "finetune 2026-11-21 pre-shared key of the rendezvous";

/// Fewer bytes could be guessed offline from one recorded handshake.
const MIN_BYTES: usize = 16;
const MAX_BYTES: usize = 4096;
const HINT: &str =
    "make one and give it to every process: `export FINETUNE_RDZV_SECRET=$(openssl rand -hex 32)`";

/// The secret by which a process proves that it belongs to the run.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// There is none; only the loopback address may be used.
    Absent,
    /// There is none; the user allows any address.
    Waived,
    /// The bytes that all processes know.
    Shared(Arc<[u8]>),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Secret::Absent => "Absent",
            Secret::Waived => "Waived",
            Secret::Shared(_) => "Shared(..)",
        })
    }
}

impl Secret {
    /// A secret of these bytes; white space around them does not count.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] when it is shorter than 16 bytes or longer than 4096.
    pub fn shared(bytes: &[u8]) -> Result<Secret> {
        let bytes = bytes.trim_ascii();
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes.len()) {
            return Err(Error::user("cannot use the secret of this run")
                .because(format!("it has {} bytes; accepted: {MIN_BYTES} to {MAX_BYTES}", bytes.len()))
                .hint(HINT));
        }
        Ok(Secret::Shared(bytes.into()))
    }

    /// The secret that the environment names.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] when both variables are set, or the file can be read by others than its owner.
    pub fn from_environment(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Secret> {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        match (set(SECRET), set(SECRET_FILE)) {
            (Some(_), Some(_)) => Err(Error::user("cannot tell which secret to use")
                .because(format!("{SECRET} and {SECRET_FILE} are both set; accepted: one of them"))),
            (Some(text), None) => Secret::shared(text.as_encoded_bytes()),
            (None, Some(path)) => Secret::from_file(&PathBuf::from(path)),
            (None, None) => match set(WITHOUT_SECRET).as_ref().map(|value| value.to_str()) {
                None | Some(Some("0")) => Ok(Secret::Absent),
                Some(Some("1")) => Ok(Secret::Waived),
                Some(_) => Err(Error::user(format!("cannot use {WITHOUT_SECRET}")).because("accepted: 0, 1")),
            },
        }
    }

    fn from_file(path: &Path) -> Result<Secret> {
        let fault = |source: std::io::Error| Error::io("read the secret in", path, &source);
        // Opened once, so that what is checked is what is read; without waiting for the writer of a pipe.
        let mut options = File::options();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(fault)?;
        let facts = file.metadata().map_err(fault)?;
        let refused =
            |why: String| Error::user(format!("cannot use the secret in {}", path.display())).because(why);
        if !facts.is_file() {
            return Err(refused("it is not a regular file".to_owned()));
        }
        let mode = facts.mode() & 0o777;
        if mode & 0o077 != 0 {
            let hint = format!("chmod 600 {} (a Kubernetes Secret: `defaultMode: 0400`)", path.display());
            return Err(
                refused(format!("its mode is {mode:03o}: others than its owner may use it")).hint(hint)
            );
        }
        let mut bytes = Vec::new();
        file.take(2 * MAX_BYTES as u64).read_to_end(&mut bytes).map_err(fault)?;
        Secret::shared(&bytes)
    }

    /// The key that both ends of a handshake need; without a secret one that anybody can derive.
    pub(super) fn pre_shared_key(&self) -> [u8; 32] {
        let secret: &[u8] = if let Secret::Shared(bytes) = self { bytes } else { b"" };
        blake3::derive_key(KEY_CONTEXT, secret)
    }

    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Secret::Shared(_))
    }

    /// Refuses to talk over `address` without a secret.
    pub(super) fn suffices(&self, address: &SocketAddr) -> Result<()> {
        if *self != Secret::Absent || address.ip().is_loopback() {
            return Ok(());
        }
        Err(Error::user("cannot connect to processes on other hosts without a secret")
            .because(format!("rank 0 is at {address}, and neither {SECRET} nor {SECRET_FILE} is set"))
            .hint(format!("{HINT}, or, on a network that is yours alone, set {WITHOUT_SECRET}=1")))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const CANARY: &str = "canary-0123456789-canary";

    fn from(variables: &[(&str, &str)]) -> Result<Secret> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
        Secret::from_environment(&find)
    }

    fn shared(text: &str) -> Secret {
        Secret::shared(text.as_bytes()).unwrap()
    }

    #[test]
    fn comes_from_a_variable_or_from_a_file_of_its_owner() {
        assert_eq!(from(&[]).unwrap(), Secret::Absent);
        assert_eq!(from(&[(WITHOUT_SECRET, "1")]).unwrap(), Secret::Waived);
        assert!(from(&[(WITHOUT_SECRET, "yes")]).is_err());
        assert_eq!(from(&[(SECRET, CANARY)]).unwrap(), shared(CANARY));
        assert!(
            from(&[(SECRET, "short")]).unwrap_err().causes()[0].contains("5 bytes; accepted: 16 to 4096")
        );

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, format!("{CANARY}\n")).unwrap();
        let name = path.to_str().unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let error = from(&[(SECRET_FILE, name)]).unwrap_err().to_string();
            assert!(error.contains(&format!("its mode is {mode:03o}")), "{error}");
            assert!(error.contains(&format!("chmod 600 {name}")) && !error.contains(CANARY), "{error}");
        }
        for mode in [0o600, 0o400] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(from(&[(SECRET_FILE, name)]).unwrap(), shared(CANARY));
        }
        let both = from(&[(SECRET, CANARY), (SECRET_FILE, name)]).unwrap_err().to_string();
        assert!(both.contains("both set") && !both.contains(CANARY), "{both}");
        assert!(from(&[(SECRET_FILE, folder.path().to_str().unwrap())]).is_err());
    }

    #[test]
    fn is_not_shown() {
        let shown = format!("{:?}", shared(CANARY));
        assert_eq!(shown, "Shared(..)");
    }

    #[test]
    fn different_secrets_give_different_keys() {
        let keys = [Secret::Absent, shared(CANARY), shared("canary-0123456789-Canary")];
        let keys = keys.map(|secret| secret.pre_shared_key());
        assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
        assert_eq!(keys[0], Secret::Waived.pre_shared_key());
        assert!(!keys[1].starts_with(b"canary"));
    }

    #[test]
    fn without_it_only_loopback_will_do() {
        let (here, there) = ("127.0.0.1:1".parse().unwrap(), "10.0.0.1:1".parse().unwrap());
        assert!(Secret::Absent.suffices(&here).is_ok());
        let error = Secret::Absent.suffices(&there).unwrap_err().to_string();
        assert!(error.contains(SECRET) && error.contains(WITHOUT_SECRET), "{error}");
        assert!(Secret::Waived.suffices(&there).is_ok());
        assert!(shared(CANARY).suffices(&there).is_ok());
    }
}
