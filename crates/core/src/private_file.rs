//! Files that hold a secret: the token of the hub, the secret of a rendezvous. They are used only where no other user of
//! the machine can read or change them. What holds a secret beside other things is shown without it.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

/// The bits of a mode by which others than the owner may use a file.
const OTHERS: u32 = 0o077;

/// Files that this process began to make, so that two of its threads do not take one name.
static BEGUN: AtomicU32 = AtomicU32::new(0);

/// The bytes of the file at `path`, which holds `what`, such as "the hub token"; none if there is no such file.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] when it is no regular file, others than its owner may use it, or it has more than
/// `most` bytes; [`crate::error::ErrorCategory::Storage`] when it cannot be read.
pub fn read(path: &Path, what: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let fault = |source: io::Error| Error::io(&format!("read {what} in"), path, &source);
    // Opened once, so that what is checked is what is read; without waiting for the writer of a pipe.
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
        return Err(refused(format!("its mode is {mode:03o}: others than its owner may use it")).hint(hint));
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(fault)?;
    if bytes.len() as u64 > most {
        return Err(refused(format!("it has more than {most} bytes")));
    }
    Ok(Some(bytes))
}

/// As [`read`], of a file in a folder that only this user may use. Folder and file are made where they are missing, the
/// file with what `make` gives; of several processes that do so at once, all get what one of them made.
///
/// # Errors
/// As [`read`]; the folder or the file belongs to someone else, or cannot be made.
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
    // What a process of this number left when it was killed.
    let _ = std::fs::remove_file(&temporary);
    let made = File::options().write(true).create_new(true).mode(0o600).open(&temporary);
    made.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all())).map_err(fault)?;
    // A link is made once, whoever else tries; a rename would take the place of what others have read already.
    let linked = std::fs::hard_link(&temporary, path);
    std::fs::remove_file(&temporary).map_err(fault)?;
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(fault(error)),
        _ => read(path, what, most)?.ok_or_else(|| fault(ErrorKind::NotFound.into())),
    }
}

/// Refuses a folder, or a link to one, that another user has put there or may write to.
fn check_folder(folder: &Path, what: &str) -> Result<()> {
    let facts = folder.symlink_metadata().map_err(|e| Error::io("look at", folder, &e))?;
    let why = if !facts.is_dir() {
        "it is not a folder".to_owned()
    } else if facts.uid() != own_uid() {
        format!("it belongs to user {}, not to this one ({})", facts.uid(), own_uid())
    } else if facts.mode() & OTHERS != 0 {
        format!("its mode is {:03o}: others than its owner may use it", facts.mode() & 0o777)
    } else {
        return Ok(());
    };
    Err(Error::user(format!("cannot keep {what} in {}", folder.display())).because(why))
}

/// An address without the user name and password in it, which nobody but its server should see.
pub fn without_user(given: &str) -> String {
    let parts = given.split_once("://").and_then(|(scheme, rest)| {
        let end = rest.find('/').unwrap_or(rest.len());
        let user = rest[..end].rfind('@')?;
        Some(format!("{scheme}://(hidden){}", &rest[user..]))
    });
    parts.unwrap_or_else(|| given.to_owned())
}

/// A setting, such as `alerts.webhook=https://...`, without the address in it to which anybody can post who knows it.
pub fn without_address(given: &str) -> String {
    let start = ["alerts.webhook=", "https://", "http://"].into_iter().find_map(|start| {
        let end = given.find(start)? + start.len();
        (!given[end..].starts_with("env:")).then_some(end)
    });
    start.map_or_else(|| given.to_owned(), |end| format!("{}(hidden)", &given[..end]))
}

/// The number of the user that this process acts as.
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
