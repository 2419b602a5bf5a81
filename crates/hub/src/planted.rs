//! Opens files in a cache that other users may write to. It neither writes to nor waits for a link,
//! pipe or other thing that they planted in place of a file.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::private_file::own_uid;

/// Flags that refuse the target of a link, and do not wait for the other end of a pipe.
const AS_IT_IS: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// Opens a file to continue, or an empty one. A new file replaces anything but this user's regular
/// file with a single name, such as a link, a pipe, or a file that its owner could still change.
/// The target of a link stays as it is.
pub(super) fn open_part(path: &Path) -> io::Result<File> {
    match File::options().read(true).write(true).custom_flags(AS_IT_IS).open(path) {
        Ok(file) if is_own(&file)? => Ok(file),
        Err(error) if error.kind() == ErrorKind::NotFound => create(path),
        _ => {
            std::fs::remove_file(path)?;
            create(path)
        }
    }
}

fn is_own(file: &File) -> io::Result<bool> {
    let facts = file.metadata()?;
    Ok(facts.is_file() && facts.nlink() <= 1 && facts.uid() == own_uid())
}

/// Creates a file; fails if the name exists.
pub(super) fn create(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create_new(true).open(path)
}

/// Opens a file for locking, never for writing; it may be another user's.
pub(super) fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).custom_flags(AS_IT_IS);
    let opened = options.open(path).or_else(|error| match error.kind() {
        ErrorKind::PermissionDenied => File::options().read(true).custom_flags(AS_IT_IS).open(path),
        _ => Err(error),
    });
    match opened {
        Ok(file) if file.metadata()?.is_file() => Ok(file),
        _ if path.symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) => {
            std::fs::remove_file(path)?;
            create(path)
        }
        other => other,
    }
}

/// Opens a regular file for reading, links followed; none if it is something else, which could be
/// endless.
pub(super) fn open_file(path: &Path) -> io::Result<Option<File>> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    Ok(file.metadata()?.is_file().then_some(file))
}

/// Returns the text of a file of at most `most` bytes; none if it is longer, not text, or not a
/// file.
pub(super) fn short_text(path: &Path, most: u64) -> Option<String> {
    let mut bytes = Vec::new();
    open_file(path).ok()??.take(most + 1).read_to_end(&mut bytes).ok()?;
    String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= most)
}

/// Creates a folder at or below `root`. It follows a link on the way if this user or the
/// administrator made it, as to a larger disk; another user's link could lead into any folder of
/// this user.
///
/// # Errors
/// A link on the way is another user's, or the folder cannot be created.
pub(super) fn make_folder(root: &Path, folder: &Path) -> Result<()> {
    if let Some((link, owner)) = foreign_link(root, folder, own_uid()) {
        return Err(Error::user(format!("cannot use the cache folder {}", folder.display()))
            .because(format!("{} is a link made by user {owner}", link.display()))
            .hint("remove it, or use your own cache: `HF_HUB_CACHE=DIR`"));
    }
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, &e))
}

/// Returns the first link from `root` to `folder` that neither the user `own` nor the administrator
/// made, and its owner.
fn foreign_link(root: &Path, folder: &Path, own: u32) -> Option<(PathBuf, u32)> {
    let mut steps: Vec<&Path> = folder.ancestors().take_while(|step| step.starts_with(root)).collect();
    steps.reverse();
    steps.into_iter().find_map(|step| {
        let metadata = step.symlink_metadata().ok()?;
        let is_foreign = metadata.is_symlink() && metadata.uid() != own && metadata.uid() != 0;
        is_foreign.then(|| (step.to_owned(), metadata.uid()))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_part_is_continued_and_what_is_planted_is_not_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let [part, victim] = ["x.part", "victim"].map(|name| folder.path().join(name));
        std::fs::write(&part, "begun").unwrap();
        let mut text = String::new();
        open_part(&part).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "begun");
        let plant: [&dyn Fn(); 3] =
            [&|| symlink(&victim, &part).unwrap(), &|| std::fs::hard_link(&victim, &part).unwrap(), &|| {
                assert_eq!(make_pipe(&part), 0)
            }];
        for plant in plant {
            std::fs::write(&victim, "precious").unwrap();
            std::fs::remove_file(&part).unwrap();
            plant();
            open_part(&part).unwrap().write_all(b"bytes of a stranger").unwrap();
            assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
            assert!(part.symlink_metadata().unwrap().is_file());
        }
    }

    #[test]
    fn a_lock_is_neither_followed_nor_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let [lock, victim] = ["x.lock", "victim"].map(|name| folder.path().join(name));
        std::fs::write(&victim, "precious").unwrap();
        symlink(&victim, &lock).unwrap();
        open_lock(&lock).unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        std::fs::write(&lock, "kept").unwrap();
        open_lock(&lock).unwrap();
        assert_eq!(std::fs::read_to_string(&lock).unwrap(), "kept");
        std::fs::remove_file(&lock).unwrap();
        assert_eq!(make_pipe(&lock), 0);
        assert!(open_lock(&lock).unwrap().metadata().unwrap().is_file());
    }

    #[test]
    fn what_has_no_end_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("main");
        symlink("/dev/zero", &link).unwrap();
        assert_eq!(short_text(&link, 64), None);
        std::fs::remove_file(&link).unwrap();
        assert_eq!(make_pipe(&link), 0);
        assert_eq!(short_text(&link, 64), None);
        std::fs::remove_file(&link).unwrap();
        std::fs::write(&link, "abc").unwrap();
        assert_eq!(short_text(&link, 3).as_deref(), Some("abc"));
        assert_eq!(short_text(&link, 2), None);
    }

    #[test]
    fn links_of_other_users_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [root, elsewhere] = ["root", "elsewhere"].map(|name| folder.path().join(name));
        std::fs::create_dir_all(root.join("a")).unwrap();
        std::fs::create_dir(&elsewhere).unwrap();
        let target = root.join("a/link/b");
        assert_eq!(foreign_link(&root, &target, own_uid()), None);
        symlink(&elsewhere, root.join("a/link")).unwrap();
        assert_eq!(foreign_link(&root, &target, own_uid()), None);
        make_folder(&root, &target).unwrap();
        assert!(elsewhere.join("b").is_dir());
        // The view of another user; links of the administrator are trusted.
        let seen = foreign_link(&root, &target, own_uid() + 1).map(|(link, _)| link);
        assert_eq!(seen, (own_uid() != 0).then(|| root.join("a/link")));
    }

    fn make_pipe(path: &Path) -> i32 {
        let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the path ends with a zero byte and lives through the call.
        unsafe { libc::mkfifo(path.as_ptr(), 0o600) }
    }
}
