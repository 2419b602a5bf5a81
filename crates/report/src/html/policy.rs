//! The content security policy of a page: only its one script and one style sheet apply.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

/// Returns the `meta` element with the policy of a page, to insert before its style sheet and
/// script. It allows both by their digests, and nothing else to load, run or send.
pub fn content_policy(page: &str) -> String {
    let digests = |element: &str| {
        let text = page.split_once(&format!("<{element}>"))?.1.split_once(&format!("</{element}>"))?.0;
        Some(format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text))))
    };
    let source = |element: &str| digests(element).unwrap_or_else(|| "'none'".to_owned());
    format!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src {}; style-src {}; \
         base-uri 'none'; form-action 'none'\">",
        source("script"),
        source("style")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By `printf 'alert(1)' | openssl dgst -sha256 -binary | base64`.
    #[test]
    fn a_script_and_a_style_are_allowed_by_their_digests() {
        let policy = content_policy("<style>a{}</style><script>alert(1)</script>");
        assert!(
            policy.contains("script-src 'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='"),
            "{policy}"
        );
        assert!(content_policy("<p>").contains("default-src 'none'; script-src 'none'; style-src 'none'; "));
    }
}
