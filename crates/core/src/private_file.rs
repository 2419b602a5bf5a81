//! Files that hold a secret, such as the hub token or the rendezvous secret. A file is used only if
//! no other user of the machine can read or change it. Texts that contain a secret are printed
//! without it.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

/// Mode bits that give other users access.
const OTHERS: u32 = 0o077;

/// Number of temporary files of this process, so that two threads never share a name.
static BEGUN: AtomicU32 = AtomicU32::new(0);

/// Reads the file at `path`, which holds `what`, such as "the hub token"; none if it does not
/// exist.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] if it is no regular file, other users have access, or it
/// has more than `most` bytes; [`crate::error::ErrorCategory::Storage`] if it cannot be read.
pub fn read(path: &Path, what: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let fault = |source: io::Error| Error::io(&format!("read {what} in"), path, &source);
    // Opened once, so that the checked file is the one that is read; `O_NONBLOCK` avoids waiting on
    // a pipe.
    let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fault(error)),
    };
    let facts = file.metadata().map_err(fault)?;
    let refused = |why: String| Error::user(format!("cannot use {what} in {}", path.display())).because(why);
    if !facts.is_file() {
        return Err(refused("it is not a regular file".to_owned()));
    }
    let mode = facts.mode() & 0o777;
    if mode & OTHERS != 0 {
        let hint = format!("chmod 600 {} (a Kubernetes Secret: `defaultMode: 0400`)", path.display());
        return Err(
            refused(format!("its mode is {mode:03o}: users other than its owner have access")).hint(hint)
        );
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(fault)?;
    if bytes.len() as u64 > most {
        return Err(refused(format!("it has more than {most} bytes")));
    }
    Ok(Some(bytes))
}

/// Same as [`read`], in a folder that only this user can access. Creates a missing folder, and a
/// missing file with the bytes from `make`. If several processes create it at once, all return the
/// same bytes.
///
/// # Errors
/// Same as [`read`]; also if another user owns the folder, or the folder or file cannot be created.
pub fn read_or_make(
    path: &Path,
    what: &str,
    most: u64,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let fault = |source: io::Error| Error::io(&format!("keep {what} at"), path, &source);
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(fault)?;
    check_folder(folder, what)?;
    if let Some(bytes) = read(path, what, most)? {
        return Ok(bytes);
    }
    let bytes = make()?;
    let number = BEGUN.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".{}-{number}", std::process::id()));
    // A killed process with the same number may have left this file.
    let _ = std::fs::remove_file(&temporary);
    let made = File::options().write(true).create_new(true).mode(0o600).open(&temporary);
    made.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all())).map_err(fault)?;
    // Only one hard link can succeed; a rename would replace a file that others have already read.
    let linked = std::fs::hard_link(&temporary, path);
    std::fs::remove_file(&temporary).map_err(fault)?;
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(fault(error)),
        _ => read(path, what, most)?.ok_or_else(|| fault(ErrorKind::NotFound.into())),
    }
}

/// Refuses a folder that is a link, belongs to another user or is accessible to others.
fn check_folder(folder: &Path, what: &str) -> Result<()> {
    let facts = folder.symlink_metadata().map_err(|e| Error::io("look at", folder, &e))?;
    let why = if !facts.is_dir() {
        "it is not a folder".to_owned()
    } else if facts.uid() != own_uid() {
        format!("it belongs to user {}, not to this one ({})", facts.uid(), own_uid())
    } else if facts.mode() & OTHERS != 0 {
        format!("its mode is {:03o}: users other than its owner have access", facts.mode() & 0o777)
    } else {
        return Ok(());
    };
    Err(Error::user(format!("cannot keep {what} in {}", folder.display())).because(why))
}

/// Returns an address without its user name and password.
pub fn without_user(given: &str) -> String {
    let parts = given.split_once("://").and_then(|(scheme, rest)| {
        let end = rest.find('/').unwrap_or(rest.len());
        let user = rest[..end].rfind('@')?;
        Some(format!("{scheme}://(hidden){}", &rest[user..]))
    });
    parts.unwrap_or_else(|| given.to_owned())
}

/// Returns a setting such as `alerts.webhook=https://...` without its address, because anyone who
/// knows that address can post to it.
pub fn without_address(given: &str) -> String {
    let start = ["alerts.webhook=", "https://", "http://"].into_iter().find_map(|start| {
        let end = given.find(start)? + start.len();
        (!given[end..].starts_with("env:")).then_some(end)
    });
    start.map_or_else(|| given.to_owned(), |end| format!("{}(hidden)", &given[..end]))
}

/// Effective user id of this process.
pub fn own_uid() -> u32 {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const WHAT: &str = "the word";

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_others_may_use_is_refused_and_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        assert_eq!(read(&path, WHAT, 99).unwrap(), None);
        std::fs::write(&path, "canary").unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620, 0o602] {
            set_mode(&path, mode);
            let error = read(&path, WHAT, 99).unwrap_err().to_string();
            assert!(error.contains(&format!("its mode is {mode:03o}")), "{error}");
            assert!(error.contains(&format!("chmod 600 {}", path.display())), "{error}");
            assert!(!error.contains("canary"), "{error}");
        }
        for mode in [0o600, 0o400] {
            set_mode(&path, mode);
            assert_eq!(read(&path, WHAT, 6).unwrap().as_deref(), Some(&b"canary"[..]));
        }
        assert!(read(&path, WHAT, 5).unwrap_err().to_string().contains("more than 5 bytes"));
        assert!(read(folder.path(), WHAT, 99).unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test that cannot start a thread may panic")]
    fn is_made_once_by_all_who_need_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/secret");
        let made: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let own = |number: u8| {
                let path = &path;
                scope.spawn(move || read_or_make(path, WHAT, 99, || Ok(vec![number; 40])))
            };
            let threads: Vec<_> = (0..8).map(own).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        });
        assert!(made.iter().all(|bytes| bytes.len() == 40 && *bytes == made[0]), "{made:?}");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(path.parent().unwrap().metadata().unwrap().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_password_in_an_address_is_hidden() {
        for (given, shown) in [
            ("https://ada:geheim@hub/a@b", "https://(hidden)@hub/a@b"),
            ("https://a@b:geheim@hub", "https://(hidden)@hub"),
            ("https://hub/a@b", "https://hub/a@b"),
            ("owner/name@main", "owner/name@main"),
        ] {
            assert_eq!(without_user(given), shown);
        }
    }

    #[test]
    fn a_folder_of_others_is_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let make = |path: &Path| read_or_make(path, WHAT, 99, || Ok(b"word".to_vec()));
        let open = folder.path().join("open");
        std::fs::create_dir(&open).unwrap();
        set_mode(&open, 0o770);
        let error = make(&open.join("secret")).unwrap_err().to_string();
        assert!(error.contains("its mode is 770"), "{error}");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let error = make(&link.join("secret")).unwrap_err().to_string();
        assert!(error.contains("it is not a folder"), "{error}");
        assert!(std::fs::read_dir(&open).unwrap().next().is_none());
    }

    #[test]
    fn an_address_in_a_setting_is_not_shown() {
        for (given, shown) in [
            ("alerts.webhook=https://hooks.example/canary", "alerts.webhook=(hidden)"),
            ("--set=alerts.webhook=canary", "--set=alerts.webhook=(hidden)"),
            ("alert.webhok=https://hooks.example/canary", "alert.webhok=https://(hidden)"),
            ("alerts.webhook=env:HOOK", "alerts.webhook=env:HOOK"),
            ("train.epochs=3", "train.epochs=3"),
        ] {
            assert_eq!(without_address(given), shown);
        }
    }
}
