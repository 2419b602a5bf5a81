//! The settings of a download: the hub's address, the cache folder, the token, offline or not.
//!
//! The names and their precedence are those of Python's `huggingface_hub`, so that finetune uses
//! its cache and login: `HF_ENDPOINT`, `HF_HUB_CACHE` (or `HUGGINGFACE_HUB_CACHE`, `HF_HOME`,
//! `XDG_CACHE_HOME`), `HF_TOKEN` (or `HF_TOKEN_PATH`, `$HF_HOME/token`), `HF_HUB_OFFLINE`. One
//! function reads the environment through a lookup, because it is global to a process and tests run
//! in one.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::address;
use crate::error::{Error, ErrorCategory, Result};
use crate::private_file;

/// Longer than any token.
const MAX_TOKEN_FILE_BYTES: u64 = 64 << 10;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// An access token of the hub. Neither `Debug` nor any message of this module shows it.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Reads a token from the text of a file or a variable; white space around it does not count.
    ///
    /// # Errors
    /// It is empty or holds anything but visible ASCII, which no token does and no HTTP header can
    /// carry.
    pub fn new(text: &str) -> Result<Self> {
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(Error::user("the hub token cannot be used")
                .because("it is empty or holds characters other than visible ASCII")
                .hint("set HF_TOKEN to a token from https://huggingface.co/settings/tokens"));
        }
        Ok(Token(token.to_owned()))
    }

    fn in_file(path: &Path) -> Result<Option<Self>> {
        let bytes = private_file::read(path, "the hub token", MAX_TOKEN_FILE_BYTES)?.unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        if text.trim().is_empty() {
            return Ok(None);
        }
        Token::new(&text)
            .map(Some)
            .map_err(|error| error.because(format!("it comes from {}", path.display())))
    }

    pub(super) fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

/// The limits for attempts while the hub or the network fails.
#[derive(Debug, Clone)]
pub struct Retry {
    /// Attempts in a row without any progress before giving up; the client makes at least one.
    pub attempts: u32,
    /// Wait before the second attempt; it doubles each time, up to a minute. `Retry-After` has
    /// precedence.
    pub first_wait: Duration,
    /// Time without a byte after which the client breaks off a connection; it counts as an attempt.
    pub stall: Duration,
    /// Time from a request for a description to the last byte of the answer, before the client
    /// gives up.
    pub description: Duration,
    /// The minimum speed of a file.
    pub least_speed: LeastSpeed,
}

/// The minimum speed at which the hub must send a file, as a mean over some time.
#[derive(Debug, Clone, Copy)]
pub struct LeastSpeed {
    /// Bytes per second.
    pub bytes_per_sec: u64,
    /// The time of the mean; only time spent waiting for the hub counts.
    pub over: Duration,
}

impl LeastSpeed {
    /// Returns the bytes that must arrive in that time.
    pub(super) fn bytes(&self) -> u64 {
        (self.bytes_per_sec as f64 * self.over.as_secs_f64()) as u64
    }
}

impl Default for Retry {
    fn default() -> Self {
        Retry {
            attempts: 5,
            first_wait: Duration::from_millis(500),
            stall: Duration::from_secs(60),
            description: Duration::from_secs(30),
            least_speed: LeastSpeed { bytes_per_sec: 1 << 10, over: Duration::from_secs(60) },
        }
    }
}

/// The addresses of the hub and its cache, and the token.
#[derive(Debug, Clone)]
pub struct HubOptions {
    endpoint: String,
    /// The folder that holds `models--owner--name`, as `huggingface_hub` lays it out.
    pub cache_dir: PathBuf,
    /// Sent as `Authorization: Bearer` to the endpoint's origin (scheme, host and port) alone.
    pub token: Option<Token>,
    /// True to open no socket and use only the cache.
    pub offline: bool,
    /// The folder that `~/` stands for.
    pub home: Option<PathBuf>,
    /// The limits for repeated attempts.
    pub retry: Retry,
    /// This user's folder with records of verified cache files; without it, files are verified each
    /// time.
    pub verified_dir: Option<PathBuf>,
    pub(super) token_note: Option<String>,
    refused_token: Option<Error>,
}

impl HubOptions {
    /// Options for one hub and one cache: no token, online.
    ///
    /// # Errors
    /// `endpoint` is not a plain `http://` or `https://` address.
    pub fn new(endpoint: &str, cache_dir: impl Into<PathBuf>) -> Result<Self> {
        Ok(HubOptions {
            endpoint: checked_endpoint(endpoint)?,
            cache_dir: cache_dir.into(),
            token: None,
            offline: false,
            home: None,
            retry: Retry::default(),
            verified_dir: None,
            token_note: None,
            refused_token: None,
        })
    }

    /// Reads the options from the environment; `offline` (the flag) and `HF_HUB_OFFLINE` each
    /// suffice.
    ///
    /// # Errors
    /// A variable holds an unusable value.
    pub fn from_env(offline: bool) -> Result<Self> {
        Self::from_lookup(offline, std::env::home_dir(), &|name| std::env::var_os(name))
    }

    /// Reads the options like [`HubOptions::from_env`], with the given home folder and `lookup` for
    /// variables.
    ///
    /// # Errors
    /// Those of [`HubOptions::from_env`].
    pub fn from_lookup(
        offline: bool,
        home: Option<PathBuf>,
        lookup: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        let env = HubEnvironment { home, lookup };
        let endpoint = env.text("HF_ENDPOINT")?;
        let hf_home = env.hf_home();
        let cache_dir = env
            .path("HF_HUB_CACHE")
            .or_else(|| env.path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| hf_home.as_ref().map(|folder| folder.join("hub")))
            .ok_or_else(|| {
                Error::user("cannot find a folder for downloads")
                    .because("HF_HOME is not set and the home folder is unknown")
                    .hint("set HF_HOME to a folder that can hold models")
            })?;
        let mut options = Self::new(endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT), cache_dir)?;
        options.offline = offline || env.is_true("HF_HUB_OFFLINE");
        options.find_token(&env, hf_home.as_deref())?;
        options.verified_dir = env.own_cache().map(|folder| folder.join("finetune/verified"));
        options.home = env.home;
        Ok(options)
    }

    /// Takes the token that the environment names. A run that may not need it goes on without a
    /// file that cannot be read; with a file that may not be used, the client sends no request.
    fn find_token(&mut self, env: &HubEnvironment<'_>, hf_home: Option<&Path>) -> Result<()> {
        if env.is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            return Ok(());
        }
        if let Some(text) = env.text("HF_TOKEN")?.filter(|text| !text.trim().is_empty()) {
            self.token = Some(Token::new(&text)?);
            return Ok(());
        }
        let path = env.path("HF_TOKEN_PATH").or_else(|| hf_home.map(|folder| folder.join("token")));
        match path.map_or(Ok(None), |path| Token::in_file(&path)) {
            Ok(token) => self.token = token,
            Err(error) if error.kind() == ErrorCategory::Storage => {
                self.token_note = Some(format!("ignoring the token file: {}", error.in_one_line()));
            }
            Err(error) => self.refused_token = Some(error),
        }
        Ok(())
    }

    /// Returns the hub's address, without a slash at its end.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the reason for which the token file is not used: users other than its owner may use
    /// it, or it holds no token. This does not fail a run that needs no hub.
    pub fn refused_token(&self) -> Option<&Error> {
        self.refused_token.as_ref()
    }

    /// Returns `text` without the token, in case a server has echoed it.
    pub(super) fn redact(&self, text: &str) -> String {
        match &self.token {
            Some(token) => text.replace(token.secret(), "(token)"),
            None => text.to_owned(),
        }
    }
}

fn checked_endpoint(given: &str) -> Result<String> {
    // The message does not repeat the text: it may hold a password.
    address::base(given.trim()).map_err(|fault| {
        Error::user("the address of the hub (HF_ENDPOINT) cannot be used")
            .because(fault)
            .hint("unset HF_ENDPOINT, or set it to an address such as https://huggingface.co")
    })
}

struct HubEnvironment<'a> {
    home: Option<PathBuf>,
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl HubEnvironment<'_> {
    /// Returns a variable; an empty one counts as not set.
    fn raw(&self, name: &str) -> Option<OsString> {
        (self.lookup)(name).filter(|value| !value.is_empty())
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        self.raw(name)
            .map(|value| value.into_string().map_err(|_| Error::user(format!("{name} is not valid UTF-8"))))
            .transpose()
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.raw(name).map(|value| expand_home(Path::new(&value), self.home.as_deref()))
    }

    fn is_true(&self, name: &str) -> bool {
        self.raw(name)
            .is_some_and(|value| ["1", "on", "yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes)))
    }

    fn hf_home(&self) -> Option<PathBuf> {
        self.path("HF_HOME").or_else(|| self.own_cache().map(|folder| folder.join("huggingface")))
    }

    /// Returns the folder for this user's caches.
    fn own_cache(&self) -> Option<PathBuf> {
        self.path("XDG_CACHE_HOME").or_else(|| self.home.as_ref().map(|home| home.join(".cache")))
    }
}

/// Replaces the `~` of `~` and `~/x` by the home folder; returns other paths as they are.
pub(super) fn expand_home(path: &Path, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<HubOptions> {
        let vars: Vec<(String, OsString)> =
            vars.iter().map(|(name, value)| ((*name).to_owned(), OsString::from(value))).collect();
        HubOptions::from_lookup(false, Some(PathBuf::from("/home/ada")), &move |name| {
            vars.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
        })
    }

    #[test]
    fn defaults_are_those_of_huggingface_hub() {
        let options = from(&[]).unwrap();
        assert_eq!(options.endpoint(), "https://huggingface.co");
        assert_eq!(options.cache_dir, Path::new("/home/ada/.cache/huggingface/hub"));
        assert!(options.token.is_none() && !options.offline);
    }

    #[test]
    fn the_nearest_variable_names_the_cache() {
        let all = [
            ("HF_HUB_CACHE", "/a"),
            ("HUGGINGFACE_HUB_CACHE", "/b"),
            ("HF_HOME", "~/c"),
            ("XDG_CACHE_HOME", "/d"),
        ];
        let expected = ["/a", "/b", "/home/ada/c/hub", "/d/huggingface/hub"];
        for (skip, path) in expected.iter().enumerate() {
            assert_eq!(from(&all[skip..]).unwrap().cache_dir, Path::new(path));
        }
        assert_eq!(
            from(&[("HF_HUB_CACHE", "")]).unwrap().cache_dir,
            Path::new("/home/ada/.cache/huggingface/hub")
        );
    }

    #[test]
    fn without_a_home_the_way_out_is_named() {
        let error = HubOptions::from_lookup(false, None, &|_| None).unwrap_err();
        assert!(error.to_string().contains("set HF_HOME"), "{error}");
    }

    #[test]
    fn offline_by_flag_or_by_variable() {
        for yes in ["1", "true", "ON", "Yes"] {
            assert!(from(&[("HF_HUB_OFFLINE", yes)]).unwrap().offline, "{yes}");
        }
        assert!(!from(&[("HF_HUB_OFFLINE", "0")]).unwrap().offline);
        assert!(
            HubOptions::from_lookup(true, Some(PathBuf::from("/home/ada")), &|_| None).unwrap().offline,
            "the flag"
        );
    }

    #[test]
    fn endpoints() {
        assert_eq!(
            from(&[("HF_ENDPOINT", "http://mirror:8080/hf/")]).unwrap().endpoint(),
            "http://mirror:8080/hf"
        );
        for bad in [
            "huggingface.co",
            "https://",
            "ftp://x",
            "https://ada:geheim@mirror",
            "https://a b",
            "https://mirror:8o",
            "https://mirror?x",
        ] {
            let error = from(&[("HF_ENDPOINT", bad)]).unwrap_err().to_string();
            assert!(error.contains("HF_ENDPOINT") && !error.contains("geheim"), "{error}");
        }
    }

    #[test]
    fn token_from_variable_before_files_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "hf_file\n").unwrap();
        set_mode(&file, 0o600);
        let home = folder.path().to_str().unwrap();
        let secret = |vars: &[(&str, &str)]| from(vars).unwrap().token.map(|token| token.secret().to_owned());
        assert_eq!(secret(&[("HF_HOME", home)]).as_deref(), Some("hf_file"));
        assert_eq!(secret(&[("HF_HOME", home), ("HF_TOKEN", " hf_env ")]).as_deref(), Some("hf_env"));
        assert_eq!(secret(&[("HF_TOKEN_PATH", file.to_str().unwrap())]).as_deref(), Some("hf_file"));
        assert_eq!(secret(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(secret(&[("HF_HOME", "/nowhere")]), None);
        let shown = format!("{:?}", from(&[("HF_TOKEN", "hf_env")]).unwrap());
        assert!(!shown.contains("hf_env"), "{shown}");
        let error = from(&[("HF_TOKEN", "hf_a\u{7}b")]).unwrap_err().to_string();
        assert!(!error.contains("hf_a"), "{error}");
    }

    #[test]
    fn a_token_file_open_to_others_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "hf_file").unwrap();
        for (mode, refused) in [(0o600, false), (0o400, false), (0o640, true), (0o604, true), (0o644, true)] {
            set_mode(&file, mode);
            let options = from(&[("HF_HOME", folder.path().to_str().unwrap())]).unwrap();
            assert_eq!(options.token.is_some(), !refused, "{mode:o}");
            let message = options.refused_token().map(Error::to_string).unwrap_or_default();
            assert_eq!(
                message.contains(&format!("chmod 600 {}", file.display())),
                refused,
                "{mode:o}: {message}"
            );
            assert!(!message.contains("hf_file"), "{message}");
        }
        // finetune does not read the file if the token comes from elsewhere, or if no token is
        // wanted.
        for other in [("HF_TOKEN", "hf_env"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")] {
            let options = from(&[("HF_HOME", folder.path().to_str().unwrap()), other]).unwrap();
            assert!(options.refused_token().is_none(), "{other:?}");
        }
    }

    #[test]
    fn a_token_file_without_a_token_is_refused_and_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        for text in [&b"hf_a b"[..], b"hf_a\xff", b"hf_a\x1b[2J", &[b'x'; 70_000]] {
            std::fs::write(&file, text).unwrap();
            set_mode(&file, 0o600);
            let options = from(&[("HF_HOME", folder.path().to_str().unwrap())]).unwrap();
            let message = options.refused_token().unwrap().to_string();
            assert!(message.contains(file.to_str().unwrap()) && !message.contains("hf_a"), "{message}");
        }
        std::fs::write(&file, "\n").unwrap();
        let options = from(&[("HF_HOME", folder.path().to_str().unwrap())]).unwrap();
        assert!(options.token.is_none() && options.refused_token().is_none());
    }

    fn set_mode(path: &Path, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
}
