//! Checks names: a path or a hub id, a revision, a file inside a repository.
//!
//! File names come from a server and end up under the cache folder. So they must be plain relative
//! paths under the rules of POSIX *and* Windows, whatever the machine. Ids and revisions also
//! become parts of a URL and of a path; their characters need no escaping in either.

use std::path::{Path, PathBuf};

use super::options::expand_home;
use crate::error::{Error, Result};
use crate::private_file::without_user;

/// The model or data set that the user's text refers to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reference {
    /// Something that exists on this machine.
    Local(PathBuf),
    /// An id on the hub, `name` or `owner/name`, checked.
    Hub(String),
}

/// Endings of files, so that finetune does not look up a mistyped path on the hub.
const FILE_ENDINGS: [&str; 14] = [
    ".jsonl",
    ".json",
    ".parquet",
    ".arrow",
    ".csv",
    ".tsv",
    ".txt",
    ".gz",
    ".zst",
    ".xlsx",
    ".safetensors",
    ".gguf",
    ".bin",
    ".toml",
];

/// Decides between a path and a hub id. An existing path has precedence; the prefix `hf://` always
/// means the hub.
pub(super) fn parse_reference(given: &str, home: Option<&Path>) -> Result<Reference> {
    if let Some(id) = given.strip_prefix("hf://") {
        check_repo_id(id).map_err(|why| bad_id(given, why))?;
        return Ok(Reference::Hub(id.to_owned()));
    }
    let path = expand_home(Path::new(given), home);
    if !given.is_empty() && path.exists() {
        return Ok(Reference::Local(path));
    }
    if let Some(reason) = reads_as_path(given) {
        let error = Error::user(format!("there is no file or folder `{given}`")).because(reason);
        return Err(match check_repo_id(given) {
            Ok(()) => error.hint(format!("check the path, or write `hf://{given}` to take it from the hub")),
            Err(_) => error.hint("check the path; an id on the hub looks like `owner/name`"),
        });
    }
    check_repo_id(given).map_err(|why| bad_id(given, why))?;
    Ok(Reference::Hub(given.to_owned()))
}

fn bad_id(given: &str, why: &str) -> Error {
    let given = without_user(given);
    Error::user(format!("`{given}` is neither a path that exists nor an id on the hub"))
        .because(why)
        .hint("give a folder, or an id such as `owner/name`")
}

/// Returns the reason to read a text that names nothing on this machine as a path.
fn reads_as_path(given: &str) -> Option<&'static str> {
    let is_url = given.contains("://");
    let drive = given.as_bytes().get(1) == Some(&b':');
    if is_url {
        return None;
    }
    if given.starts_with(['.', '/', '~']) || given.contains('\\') || given.ends_with('/') || drive {
        return Some("it is written as a path");
    }
    if given.matches('/').count() > 1 {
        return Some("it has more than one slash, so it is a path and not `owner/name`");
    }
    if FILE_ENDINGS.iter().any(|ending| given.to_ascii_lowercase().ends_with(ending)) {
        return Some("it has the ending of a file");
    }
    match given.split_once('/') {
        Some((parent, _)) if Path::new(parent).is_dir() => {
            Some("the folder before the slash exists here, so finetune reads it as a path")
        }
        _ => None,
    }
}

/// Checks the rules of the hub for ids (huggingface_hub, `validate_repo_id`).
pub(super) fn check_repo_id(id: &str) -> Result<(), &'static str> {
    if id.matches('/').count() > 1 {
        return Err("an id has one slash at most");
    }
    for part in id.split('/') {
        if part.is_empty() {
            return Err("a part of the id is empty");
        }
        if !part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
            return Err("an id holds letters, digits, `-`, `_` and `.` only");
        }
        if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
            return Err("a part of an id neither starts nor ends with `-` or `.`");
        }
        if part.contains("--") || part.contains("..") {
            return Err("an id does not hold `--` or `..`");
        }
        if part.len() > 96 {
            return Err("a part of an id has 96 characters at most");
        }
    }
    Ok(())
}

/// Checks a revision: a branch, tag, commit hash or `refs/pr/1`.
pub(super) fn check_revision(revision: &str) -> Result<()> {
    let plain = revision.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+/".contains(&b));
    let parts_fit = revision.split('/').all(|part| {
        !part.is_empty() && !part.starts_with('.') && !part.ends_with('.') && !part.contains("..")
    });
    if plain && parts_fit && revision.len() <= 200 {
        return Ok(());
    }
    Err(Error::user(format!("`{}` cannot be a revision", revision.escape_debug()))
        .because("a revision is a branch, a tag or a commit hash")
        .hint("leave it out, or write `main`"))
}

/// Returns whether this is the hash of a commit, which never moves.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Refuses a set of file names if one could leave its folder, or two could mean the same file.
pub(super) fn check_files<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    // Case-folded, since some file systems hold only one of `a` and `A`.
    let mut seen = std::collections::BTreeSet::new();
    for name in names {
        check_file(name).map_err(|why| refused(name, why))?;
        if !seen.insert(name.to_lowercase()) {
            return Err(refused(name, "another file name differs only in upper and lower case"));
        }
    }
    for name in &seen {
        let mut folder = name.as_str();
        while let Some((parent, _)) = folder.rsplit_once('/') {
            if seen.contains(parent) {
                return Err(refused(name, "one of its folders is also the name of a file"));
            }
            folder = parent;
        }
    }
    Ok(())
}

fn refused(name: &str, why: &str) -> Error {
    Error::user(format!("the repository names a file `{}`, which is refused", name.escape_debug()))
        .because(why)
}

fn check_file(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || name.len() > 400 {
        return Err("a name has 1 to 400 bytes");
    }
    if name.starts_with('/') {
        return Err("it is absolute");
    }
    if name.chars().any(|c| c.is_control() || r#"\:<>"|?*"#.contains(c)) {
        return Err(r#"it holds a control character or one of \ : < > " | ? *"#);
    }
    for part in name.split('/') {
        match part {
            "" => return Err("a folder in it has no name"),
            "." | ".." => return Err("it leaves its folder"),
            _ if part.ends_with(['.', ' ']) => return Err("a part of it ends with a dot or a space"),
            _ if is_device(part) => return Err("it is the name of a device on Windows"),
            _ => {}
        }
    }
    Ok(())
}

/// Returns whether Windows opens the name as a device, such as `CON`, `nul.txt` or `com1`.
fn is_device(part: &str) -> bool {
    let stem = part.split('.').next().unwrap_or(part).trim_end().to_ascii_uppercase();
    let numbered = |prefix| {
        stem.strip_prefix(prefix)
            .is_some_and(|digit| digit.len() == 1 && digit.as_bytes()[0].is_ascii_digit())
    };
    matches!(stem.as_str(), "CON" | "PRN" | "AUX" | "NUL") || numbered("COM") || numbered("LPT")
}

/// Returns a file name as a part of an address: all but slashes and unreserved characters escaped
/// (RFC 3986).
pub(super) fn percent_encoded(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_addresses() {
        assert_eq!(percent_encoded("data/a b%ä.jsonl"), "data/a%20b%25%C3%A4.jsonl");
    }

    #[test]
    fn what_exists_wins_and_the_rest_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        assert_eq!(parse_reference(path, None).unwrap(), Reference::Local(folder.path().to_owned()));
        std::fs::create_dir(folder.path().join("m")).unwrap();
        assert_eq!(
            parse_reference("~/m", Some(folder.path())).unwrap(),
            Reference::Local(folder.path().join("m"))
        );
        for id in ["gpt2", "meta-llama/Llama-2-7b", "a/b.c_d-e"] {
            assert_eq!(parse_reference(id, None).unwrap(), Reference::Hub(id.to_owned()));
        }
        assert_eq!(parse_reference("hf://src/x", None).unwrap(), Reference::Hub("src/x".to_owned()));
    }

    #[test]
    fn a_password_in_an_address_is_not_repeated() {
        for address in ["https://ada:geheim@hub/a/b", "https://ada:geheim@hub", "hf://ada:geheim@y"] {
            let error = parse_reference(address, None).unwrap_err().to_string();
            assert!(!error.contains("geheim") && error.contains("://(hidden)@"), "{error}");
        }
    }

    #[test]
    fn a_missing_path_is_not_looked_up_on_the_hub() {
        for path in ["./m", "/m/n", "~/nope", "a/b/c", "../nope", "C:\\m", "m/", "train.jsonl", "model.GGUF"]
        {
            let error = parse_reference(path, Some(Path::new("/nowhere"))).unwrap_err().to_string();
            assert!(error.starts_with("error: there is no file or folder"), "{error}");
        }
        // `src` exists where tests run: beside Cargo.toml.
        let error = parse_reference("src/nope", None).unwrap_err().to_string();
        assert!(error.contains("`hf://src/nope`"), "{error}");
    }

    #[test]
    fn ids_that_the_hub_cannot_have() {
        let long = "x".repeat(97);
        for id in
            ["", "a b", "a/", "/a", "a--b", "a/-b", "b.", "ä", "https://huggingface.co/a/b", "a/b?c", &long]
        {
            assert!(parse_reference(&format!("hf://{id}"), None).is_err(), "{id}");
        }
    }

    #[test]
    fn revisions() {
        for good in ["main", "refs/pr/1", "v1.0", "0123456789abcdef0123456789abcdef01234567"] {
            check_revision(good).unwrap();
        }
        for bad in ["", "../x", "a//b", "/a", "a b", "a?b", "a%2Fb", ".hidden", "a\0b"] {
            assert!(check_revision(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn file_names_that_could_leave_the_cache() {
        for good in
            ["model.safetensors", "model-00001-of-00002.safetensors", "data/train.jsonl", "concat.txt"]
        {
            check_files([good]).unwrap();
        }
        let bad = [
            "",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "a/./b",
            "a//b",
            "C:\\x",
            "C:x",
            "\\\\host\\share",
            "a\\..\\x",
            "a\0b",
            "a\nb",
            "nul",
            "data/CON.jsonl",
            "com1.safetensors",
            "x.",
            "x ",
            "a?b",
        ];
        for name in bad {
            assert!(check_files([name]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn two_names_for_one_place() {
        assert!(check_files(["a.safetensors", "A.safetensors"]).is_err());
        assert!(check_files(["a", "b/c", "a/b/c"]).is_err());
        check_files(["a/b", "a/c"]).unwrap();
    }
}
