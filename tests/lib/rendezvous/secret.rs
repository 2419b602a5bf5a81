//! Processes without a given secret: on the loopback they use their user's own secret, elsewhere
//! they are refused.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::*;

/// Returns the options of a user's process with this cache folder and these further variables.
fn of_user(cache: &Path, address: &str, port: u16, more: &[(&str, &str)]) -> Result<RendezvousOptions> {
    let options_read = RendezvousOptions::from_environment(master(address, port, 1), &|name| match name {
        "XDG_CACHE_HOME" => Some(cache.as_os_str().to_owned()),
        _ => more.iter().find(|(other, _)| *other == name).map(|(_, value)| OsString::from(value)),
    })?;
    Ok(RendezvousOptions {
        run: "test run".to_owned(),
        ..RendezvousOptions { secret: options_read.secret, ..options(port) }
    })
}

fn with_address(options: RendezvousOptions, address: &str, port: u16) -> RendezvousOptions {
    RendezvousOptions { master: master(address, port, 1), ..options }
}

/// Another user of the host, with access to the port and to readable files, can neither join nor
/// impersonate rank 0.
#[test]
fn processes_of_one_user_meet_and_those_of_another_are_refused() {
    let caches = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let own = |port| of_user(caches[0].path(), "127.0.0.1", port, &[]).unwrap();
    let (first, port) = host(2, &own(0));
    let other = of_user(caches[1].path(), "127.0.0.1", port, &[]).unwrap();
    let waived =
        of_user(caches[1].path(), "127.0.0.1", port, &[("FINETUNE_RDZV_WITHOUT_SECRET", "1")]).unwrap();
    for intruder in [&other, &waived] {
        let error = refusal(guest(request(1, 2), intruder));
        assert_eq!(error.kind(), ErrorCategory::User);
        assert!(
            error.to_string().contains("the secret of the joining process differs from that of rank 0"),
            "{error}"
        );
        assert!(error.to_string().contains("FINETUNE_RDZV_SECRET"), "{error}");
    }
    // A process with a given secret, which rank 0 does not have.
    let given = of_user(caches[0].path(), "127.0.0.1", port, &[("FINETUNE_RDZV_SECRET", SECRET)]).unwrap();
    let error = refusal(guest(request(1, 2), &given));
    assert!(error.to_string().contains("rank 0 was started without a secret"), "{error}");
    all_join(vec![first, guest(request(1, 2), &own(port))]);
    let secret = caches[0].path().join("finetune/rendezvous/secret").metadata().unwrap();
    assert_eq!(secret.mode() & 0o777, 0o600);
}

#[test]
fn no_address_does_without_a_secret() {
    let cache = tempfile::tempdir().unwrap();
    let none = RendezvousOptions { secret: Secret::Absent, ..options(0) };
    let own = of_user(cache.path(), "127.0.0.1", 0, &[]).unwrap();
    let error = Listener::open(&none).unwrap_err();
    assert!(error.to_string().contains("the other processes of this host without a secret"), "{error}");
    // 192.0.2.1 is an address for documentation (RFC 5737).
    for (options, address) in [(&none, "127.0.0.1"), (&none, "192.0.2.1"), (&own, "192.0.2.1")] {
        let error = refusal(guest(request(1, 2), &with_address(options.clone(), address, 29_500)));
        assert_eq!(error.kind(), ErrorCategory::User);
        assert!(error.to_string().contains("FINETUNE_RDZV_WITHOUT_SECRET=1"), "{error}");
    }
    let waived = |port| RendezvousOptions { secret: Secret::Waived, ..options(port) };
    let (first, port) = host(2, &waived(0));
    all_join(vec![first, guest(request(1, 2), &waived(port))]);
}

/// A folder that cannot keep the secret, for example because another user created it first.
#[test]
fn a_secret_that_cannot_be_kept_is_told_with_the_way_out() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let more = [("TMPDIR", path)];
    let error = of_user(file.path(), "127.0.0.1", 0, &more).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::User);
    let text = error.to_string();
    assert!(text.contains(path) && text.contains("openssl rand -hex 32"), "{text}");
    // Other hosts need a given secret, whatever this folder can keep.
    let away = of_user(file.path(), "node-a", 0, &more).unwrap();
    assert_eq!(away.secret, Secret::Absent);
}
