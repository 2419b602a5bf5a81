//! Explains a refusal of the hub, and what the user can do about it.
//!
//! The status alone is ambiguous: the hub answers 401 to an anonymous reader of a repository that
//! is missing, private or gated. `X-Error-Code` distinguishes them; without it the message names
//! both causes.

use crate::error::{Error, ErrorCategory};

const TOKENS: &str = "https://huggingface.co/settings/tokens";

/// The request that the hub refused, and its sender's rights.
pub(super) struct Request<'a> {
    /// The repository, such as "model `a/b`".
    pub(super) subject: &'a str,
    pub(super) revision: &'a str,
    /// The page of the repository, for people.
    pub(super) page: &'a str,
    /// The file, or `None` for the description of the repository.
    pub(super) file: Option<&'a str>,
    pub(super) has_token: bool,
    /// True if the description says that its authors grant access one by one.
    pub(super) gated: bool,
}

/// The hub's answer: its status and, if present, `X-Error-Code` and `X-Error-Message`.
pub(super) struct ErrorResponse {
    pub(super) status: u16,
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
}

impl ErrorResponse {
    /// Returns the error for an answer that another attempt would not change.
    pub(super) fn error(&self, asked: &Request<'_>) -> Error {
        let subject = asked.subject;
        let code = self.code.as_deref();
        let gated = code == Some("GatedRepo") || asked.gated;
        let error = match (self.status, code) {
            (401, _) if gated && !asked.has_token => Error::user(format!("{subject} is gated"))
                .because("its authors ask readers to accept their terms, and finetune sent no token")
                .hint(format!("accept the terms at {}, then set HF_TOKEN to a token from {TOKENS}", asked.page)),
            (401, Some("RepoNotFound")) => self.not_found(asked),
            (401, _) if asked.has_token => Error::user("the hub does not accept the token")
                .because(format!("finetune sent it to read {subject}; it is wrong, expired or revoked"))
                .hint(format!("set HF_TOKEN to a token from {TOKENS}, or unset it to read without one")),
            (401, _) => self.not_found(asked),
            (403, _) if gated => Error::user(format!("the token has no access to {subject}, which is gated"))
                .because("its authors have not (yet) granted access to this account, or the token does not cover gated repositories")
                .hint(format!("ask for access at {}; a fine-grained token also needs the right to read gated repositories", asked.page)),
            (403, _) => Error::user(format!("the hub refuses access to {subject}")).hint(format!(
                "open {} in a browser; for a private repository set HF_TOKEN to a token that may read it",
                asked.page
            )),
            (404, Some("RevisionNotFound")) => {
                Error::user(format!("{subject} has no revision `{}`", asked.revision))
                    .hint(format!("its branches, tags and commits are listed at {}/commits/main", asked.page))
            }
            (404, Some("RepoNotFound")) => self.not_found(asked),
            (404, _) => match asked.file {
                Some(file) => Error::user(format!("{subject} has no file `{file}`"))
                    .because(format!("revision {}", asked.revision))
                    .hint(format!("its files are listed at {}/tree/{}", asked.page, asked.revision)),
                None => self.not_found(asked),
            },
            _ => Error::new(ErrorCategory::Transient, format!("the hub did not deliver {subject}"))
                .hint("try again later; check HF_ENDPOINT and any proxy"),
        };
        let error = match asked.file {
            Some(file) if self.status != 404 => error.because(format!("requested its file `{file}`")),
            _ => error,
        };
        error.because(self.to_string())
    }

    fn not_found(&self, asked: &Request<'_>) -> Error {
        let error = Error::user(format!("the hub has no {} that can be read", asked.subject));
        if asked.has_token {
            error
                .because("it does not exist, or it is private and the token may not read it")
                .hint(format!("check the spelling: {}", asked.page))
        } else {
            error
                .because(
                    "it does not exist, or it is private: without a token the hub answers the same to both",
                )
                .hint(format!("check the spelling: {}; for a private one set HF_TOKEN", asked.page))
        }
    }
}

impl std::fmt::Display for ErrorResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the hub answered {}", self.status)?;
        if let Some(code) = &self.code {
            write!(f, " {code}")?;
        }
        match &self.message {
            Some(message) => write!(f, ": {message}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(status: u16, code: Option<&str>, has_token: bool, gated: bool, file: Option<&str>) -> String {
        let asked = Request {
            subject: "model `a/b`",
            revision: "v9",
            page: "https://huggingface.co/a/b",
            file,
            has_token,
            gated,
        };
        ErrorResponse { status, code: code.map(str::to_owned), message: None }.error(&asked).to_string()
    }

    #[test]
    fn each_refusal_says_something_else() {
        let file = Some("config.json");
        let cases = [
            (text(401, Some("GatedRepo"), false, false, file), "model `a/b` is gated"),
            (text(401, None, false, true, file), "accept the terms at https://huggingface.co/a/b"),
            (text(403, Some("GatedRepo"), true, true, file), "the token has no access to model `a/b`"),
            (text(401, None, false, false, None), "without a token the hub answers the same to both"),
            (text(401, Some("RepoNotFound"), true, false, None), "the token may not read it"),
            (text(401, None, true, false, None), "the hub does not accept the token"),
            (text(403, None, true, false, file), "the hub refuses access to model `a/b`"),
            (text(404, Some("RepoNotFound"), true, false, None), "the hub has no model `a/b`"),
            (text(404, Some("RevisionNotFound"), false, false, None), "model `a/b` has no revision `v9`"),
            (text(404, Some("EntryNotFound"), false, false, file), "model `a/b` has no file `config.json`"),
            (text(404, None, false, false, file), "model `a/b` has no file `config.json`"),
            (text(404, None, false, false, None), "the hub has no model `a/b`"),
            (text(418, None, false, false, None), "the hub answered 418"),
        ];
        for (text, expected) in cases {
            assert!(text.contains(expected), "{expected:?} is not in:\n{text}");
        }
    }
}
