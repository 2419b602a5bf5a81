//! The secret that the processes of a run share.
//!
//! It is in `FINETUNE_RDZV_SECRET`, or in a file that only its owner can read, named by
//! `FINETUNE_RDZV_SECRET_FILE`; never on the command line, which every user of a host can see. A
//! process that can reach the port and has the secret is a rank, and every user of a host can reach
//! its loopback address. There, processes without a secret use one of the user: a file of mode 0600
//! in the user's cache folder, created by the first process that needs it. Every process of the
//! user finds it, so no launcher has to pass it on. Other addresses need an explicit secret, unless
//! `FINETUNE_RDZV_WITHOUT_SECRET=1` declares network and hosts private. The secret leaves this
//! module only as a derived key: `Debug` and errors do not show it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::private_file::{self, own_uid};

pub(super) const SECRET: &str = "FINETUNE_RDZV_SECRET";
pub(super) const SECRET_FILE: &str = "FINETUNE_RDZV_SECRET_FILE";
pub(super) const WITHOUT_SECRET: &str = "FINETUNE_RDZV_WITHOUT_SECRET";
/// Separates the key from other uses of the same secret.
const KEY_CONTEXT: &str = "finetune 2026-11-21 pre-shared key of the rendezvous";

/// Minimum length: fewer bytes could be guessed offline from one recorded handshake.
const MIN_BYTES: usize = 16;
const MAX_BYTES: usize = 4096;
/// Random bytes of the user's own secret, which is stored as hexadecimal digits.
const OWN_BYTES: usize = 32;
/// Name of the secret in errors.
const WHAT: &str = "the secret";

/// Secret with which a process proves that it belongs to the run.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// No secret, and no address may be used.
    Absent,
    /// No secret, and the user allows any address.
    Waived,
    /// Bytes that all processes of this user on this host can read; only the loopback address may
    /// be used.
    OfUser(Arc<[u8]>),
    /// Bytes that all processes have received.
    Shared(Arc<[u8]>),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Secret::Absent => "Absent",
            Secret::Waived => "Waived",
            Secret::OfUser(_) => "OfUser(..)",
            Secret::Shared(_) => "Shared(..)",
        })
    }
}

impl Secret {
    /// Creates a secret of these bytes, without surrounding white space.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] if it is shorter than 16 bytes or longer than 4096.
    pub fn shared(bytes: &[u8]) -> Result<Secret> {
        let bytes = bytes.trim_ascii();
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes.len()) {
            return Err(Error::user("cannot use the secret of this run")
                .because(format!("it has {} bytes; accepted: {MIN_BYTES} to {MAX_BYTES}", bytes.len()))
                .hint(hint()));
        }
        Ok(Secret::Shared(bytes.into()))
    }

    /// Reads the secret from the environment.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::User`] if both variables are set, or users other than its
    /// owner can read the file.
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
        // Reads more than the maximum, so that the error names the length.
        let bytes = private_file::read(path, WHAT, 2 * MAX_BYTES as u64)?;
        let absent = || Error::io(&format!("read {WHAT} in"), path, &ErrorKind::NotFound.into());
        Secret::shared(&bytes.ok_or_else(absent)?)
    }

    /// Returns the secret of this user on this host, which is created if missing: in
    /// `$XDG_CACHE_HOME/finetune/rendezvous` or `~/.cache/finetune/rendezvous`, else in the folder
    /// for temporary files.
    ///
    /// # Errors
    /// None of these folders can hold it.
    pub(super) fn of_user(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Secret> {
        let absolute = |name: &str| lookup(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        let temporary = absolute("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp"));
        let folders = cache
            .map(|cache| cache.join("finetune/rendezvous"))
            .into_iter()
            .chain([temporary.join(format!("finetune-{}", own_uid()))]);
        let mut failed = Error::user("cannot make a secret for the processes of this host");
        for folder in folders {
            let path = folder.join("secret");
            let result = private_file::read_or_make(&path, WHAT, MAX_BYTES as u64, random_digits);
            match result {
                Ok(bytes) if bytes.len() == 2 * OWN_BYTES => return Ok(Secret::OfUser(bytes.into())),
                Ok(_) => {
                    return Err(Error::user(format!("cannot use {WHAT} in {}", path.display()))
                        .because("its length has changed")
                        .hint(format!("rm {}", path.display())));
                }
                Err(error) => failed = failed.because(error.in_one_line()),
            }
        }
        Err(failed.hint(hint()))
    }

    /// Key for both ends of a handshake; without a secret, a key that anyone can derive.
    pub(super) fn pre_shared_key(&self) -> [u8; 32] {
        let secret: &[u8] = match self {
            Secret::Shared(bytes) | Secret::OfUser(bytes) => bytes,
            Secret::Absent | Secret::Waived => b"",
        };
        blake3::derive_key(KEY_CONTEXT, secret)
    }

    /// Returns true if the processes received it explicitly.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Secret::Shared(_))
    }

    /// Refuses to connect to `address` without a secret, or with one that the processes there
    /// cannot have.
    pub(super) fn suffices(&self, address: &SocketAddr) -> Result<()> {
        let is_here = address.ip().is_loopback();
        match self {
            Secret::Shared(_) | Secret::Waived => return Ok(()),
            Secret::OfUser(_) if is_here => return Ok(()),
            Secret::OfUser(_) | Secret::Absent => {}
        }
        let what = if is_here { "the other processes of this host" } else { "processes on other hosts" };
        Err(Error::user(format!("cannot connect to {what} without a secret"))
            .because(format!("rank 0 is at {address}, and neither {SECRET} nor {SECRET_FILE} is set"))
            .hint(format!(
                "{}; or, on a private network, set {WITHOUT_SECRET}=1: anyone on that network can then join",
                hint()
            )))
    }
}

/// Returns the hint to give every process a secret.
fn hint() -> String {
    format!("make one secret with `openssl rand -hex 32` and set {SECRET} to the same value in every process")
}

/// Returns a new secret in hexadecimal digits.
pub(super) fn random_digits() -> Result<Vec<u8>> {
    let mut bytes = [0; OWN_BYTES];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::internal("the system gives no random bytes").because(error.to_string()))?;
    Ok(bytes.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()).collect())
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
    fn which_address_needs_which() {
        let own = Secret::OfUser((*b"canary-0123456789-canary").into());
        let (loopback, remote) = ("127.0.0.1:1".parse().unwrap(), "10.0.0.1:1".parse().unwrap());
        for (secret, address) in [(&Secret::Absent, &loopback), (&Secret::Absent, &remote), (&own, &remote)] {
            let error = secret.suffices(address).unwrap_err().to_string();
            assert!(error.contains(SECRET) && error.contains(WITHOUT_SECRET), "{error}");
        }
        for secret in [&own, &Secret::Waived, &shared(CANARY)] {
            assert!(secret.suffices(&loopback).is_ok());
        }
        for secret in [Secret::Waived, shared(CANARY)] {
            assert!(secret.suffices(&remote).is_ok());
        }
    }

    #[test]
    fn the_users_own_is_made_once_for_each_user() {
        let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let of = |home: &tempfile::TempDir| {
            let home = home.path().as_os_str().to_owned();
            Secret::of_user(&move |name| (name == "HOME").then(|| home.clone())).unwrap()
        };
        let [first, again, other] = [of(&homes[0]), of(&homes[0]), of(&homes[1])];
        assert_eq!(format!("{first:?}"), "OfUser(..)");
        assert!(first == again && first != other);
        assert!(first.pre_shared_key() != other.pre_shared_key());
        let path = homes[0].path().join(".cache/finetune/rendezvous/secret");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        let home = homes[0].path().as_os_str().to_owned();
        let error = Secret::of_user(&|name| (name == "HOME").then(|| home.clone())).unwrap_err().to_string();
        assert!(error.contains(&format!("rm {}", path.display())), "{error}");
    }

    #[test]
    fn a_home_that_cannot_be_written_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let (file, temporary) = (folder.path().join("file"), folder.path().join("tmp"));
        std::fs::write(&file, "").unwrap();
        std::fs::create_dir(&temporary).unwrap();
        let lookup = |name: &str| match name {
            "HOME" => Some(file.as_os_str().to_owned()),
            "TMPDIR" => Some(temporary.as_os_str().to_owned()),
            _ => None,
        };
        assert!(matches!(Secret::of_user(&lookup), Ok(Secret::OfUser(_))));
        let own = temporary.join(format!("finetune-{}", own_uid()));
        assert!(own.join("secret").is_file());
        // Another user created it first.
        std::fs::set_permissions(&own, PermissionsExt::from_mode(0o777)).unwrap();
        let error = Secret::of_user(&lookup).unwrap_err().to_string();
        assert!(error.contains("its mode is 777") && error.contains("openssl rand"), "{error}");
    }
}
