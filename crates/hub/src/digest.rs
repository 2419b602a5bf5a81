//! The digest that the hub announces for a file, and the sum that checks it.
//!
//! The ETag of a large file is the sha256 of its bytes. That of a small one is git's hash of the
//! blob: sha1 over `blob <size>\0` and the bytes. Both also name the file in the cache, so the
//! client refuses an ETag of another form: it could neither be checked nor be trusted as a file
//! name.

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The hash that the bytes of a file must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Digest {
    /// 64 hex digits: sha256 of the bytes.
    Sha256(String),
    /// 40 hex digits: git's hash of the blob.
    GitBlob(String),
}

impl Digest {
    /// Reads an ETag, with or without `W/` and quotes; `None` when it is no digest.
    pub(super) fn from_etag(etag: &str) -> Option<Self> {
        let text = etag.trim().trim_start_matches("W/").trim_matches('"');
        if !text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return None;
        }
        match text.len() {
            64 => Some(Digest::Sha256(text.to_owned())),
            40 => Some(Digest::GitBlob(text.to_owned())),
            _ => None,
        }
    }

    /// Returns the hex digits, which name the blob in the cache.
    pub(super) fn hex(&self) -> &str {
        match self {
            Digest::Sha256(hex) | Digest::GitBlob(hex) => hex,
        }
    }

    /// Returns an empty sum for a file of `size` bytes.
    pub(super) fn sum(&self, size: u64) -> Sum {
        match self {
            Digest::Sha256(_) => Sum::Sha256(Sha256::new()),
            Digest::GitBlob(_) => Sum::GitBlob(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }
}

/// A sum over the bytes seen so far.
#[derive(Clone)]
pub(super) enum Sum {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Sum {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Sum::Sha256(sum) => sum.update(bytes),
            Sum::GitBlob(sum) => sum.update(bytes),
        }
    }

    /// Returns the hex digits of the sum of all bytes so far.
    pub(super) fn hex(&self) -> String {
        match self {
            Sum::Sha256(sum) => format!("{:x}", sum.clone().finalize()),
            Sum::GitBlob(sum) => format!("{:x}", sum.clone().finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_sums() {
        // `printf abc | sha256sum` (FIPS 180-2, appendix B.1) and `printf 'hello\n' | git
        // hash-object --stdin`.
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = Digest::from_etag(&format!("\"{sha}\"")).unwrap();
        let mut sum = digest.sum(3);
        sum.update(b"a");
        sum.update(b"bc");
        assert_eq!(sum.hex(), sha);
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let digest = Digest::from_etag(&format!("W/\"{git}\"")).unwrap();
        assert_eq!(digest.hex(), git);
        let mut sum = digest.sum(6);
        sum.update(b"hello\n");
        assert_eq!(sum.hex(), git);
    }

    #[test]
    fn an_etag_that_is_no_digest() {
        for etag in
            ["", "\"abc\"", "../../../../x", "\"d41d8cd98f00b204e9800998ecf8427e-2\"", &"g".repeat(40)]
        {
            assert_eq!(Digest::from_etag(etag), None, "{etag}");
        }
    }
}
