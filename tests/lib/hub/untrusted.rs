//! A hostile hub and a hostile cache: responses that decompress without end, planted links and
//! changed bytes in a shared cache, and a token file that others can read.

use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};

use finetune::hub::locate_model_in_place;
use sha2::Digest;

use super::*;

/// Size limit of a description in bytes.
const CAP: usize = 64 << 20;

/// Compresses `start`, `mib` MiB of spaces, and `end` with gzip in three members; the second one is
/// repeated.
fn packed(start: &str, mib: usize, end: &str) -> Vec<u8> {
    let member = |bytes: &[u8]| {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(bytes).unwrap();
        packer.finish().unwrap()
    };
    let spaces = member(&vec![b' '; 1 << 20]);
    [member(start.as_bytes()), spaces.repeat(mib), member(end.as_bytes())].concat()
}

/// The actual description, surrounded by more white space than the limit.
#[test]
fn a_description_that_unpacks_to_more_than_the_cap_is_refused() {
    let repo = single("ada/tiny");
    let (commit, files) = (repo.commit(), r#"[{"rfilename":"config.json"}]"#);
    let world = World::new(vec![repo]);
    let start = format!(r#"{{"sha":"{commit}","siblings":{files}"#);
    let small = packed(&start, 1, "}");
    world.hub.fault(Fault::new(&["/api/"], 1, Spoil::Gzip(small)));
    locate_model_headers("ada/tiny", "main", &world.options, &mut |_| {}).unwrap();
    let bomb = packed(&start, (CAP >> 20) + 1, "}");
    assert!(bomb.len() < 1 << 20, "{} bytes on the wire", bomb.len());
    world.hub.fault(Fault::new(&["/api/"], 1, Spoil::Gzip(bomb)));
    let text = world.refused("ada/tiny");
    assert!(text.contains(&format!("more than {CAP} bytes")), "{text}");
}

#[test]
fn a_file_that_unpacks_to_more_than_its_size_ends() {
    let world = World::new(vec![single("ada/tiny")]);
    let bomb = packed("", 2, "");
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 2, Spoil::Gzip(bomb)));
    let error = world.model("ada/tiny").unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert!(error.to_string().contains("the downloaded bytes are damaged, twice"), "{error}");
    assert_eq!(
        world.files().iter().filter(|path| path.extension().is_some_and(|end| end == "part")).count(),
        0
    );
}

/// `gated` is a word or a boolean; other values up to the size limit are no description.
#[test]
fn what_is_no_answer_about_gates_is_no_description() {
    for (gated, is_fine) in
        [("false", true), ("null", true), (r#""auto""#, true), ("[0]", false), ("7", false)]
    {
        let world = World::new(vec![single("ada/tiny")]);
        let body = format!(
            r#"{{"sha":"{}","gated":{gated},"siblings":[{{"rfilename":"config.json"}}]}}"#,
            single("ada/tiny").commit()
        );
        world.hub.fault(Fault::new(&["/api/"], 1, Spoil::Body(body.into_bytes())));
        let located = locate_model_headers("ada/tiny", "main", &world.options, &mut |_| {});
        assert_eq!(located.is_ok(), is_fine, "{gated}");
    }
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", sha2::Sha256::digest(bytes))
}

/// Another user with access to the cache plants links at the paths that a download will write.
#[test]
fn nothing_is_written_through_a_planted_link() {
    let world = World::new(vec![single("ada/tiny")]);
    let victim = world.cache.path().join("victim");
    let folder = world.options.cache_dir.join("models--ada--tiny");
    for name in ["blobs", "refs", "snapshots"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
    }
    let digest = sha256(&weights(400_000));
    let planted = [format!("blobs/{digest}.part"), format!("blobs/{digest}.lock"), "refs/main".to_owned()];
    std::fs::write(&victim, "precious").unwrap();
    for name in &planted {
        symlink(&victim, folder.join(name)).unwrap();
    }
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    for name in [&format!("blobs/{digest}"), &planted[2]] {
        assert!(folder.join(name).symlink_metadata().unwrap().is_file(), "{name} is still a link");
    }
    assert_eq!(
        locate_model("ada/tiny", "main", &world.offline(), &mut |_| {}).unwrap().commit,
        located.commit
    );
}

/// At the path of a blob itself: a link to a file of the same size, or a pipe.
#[test]
fn what_is_planted_as_a_blob_is_not_taken_for_it() {
    let world = World::new(vec![single("ada/tiny")]);
    let victim = world.cache.path().join("victim");
    std::fs::write(&victim, vec![b'x'; 400_000]).unwrap();
    let blobs = world.options.cache_dir.join("models--ada--tiny/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let blob = blobs.join(sha256(&weights(400_000)));
    symlink(&victim, &blob).unwrap();
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    assert!(blob.symlink_metadata().unwrap().is_file());
    assert!(std::fs::read(&victim).unwrap().iter().all(|byte| *byte == b'x'));
}

/// Flips one bit of the blob behind a file of a snapshot.
fn damage(located: &Located, file: &str) {
    let path = located.folder.join(file);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
}

#[test]
fn a_cached_file_that_was_changed_is_fetched_anew_and_refused_offline() {
    for file in ["model.safetensors", "config.json"] {
        for noted in [false, true] {
            let mut world = World::new(vec![single("ada/tiny")]);
            world.options.verified_dir = noted.then(|| world.cache.path().join("verified"));
            let located = world.model("ada/tiny").unwrap();
            let sound = read(&located, file);
            damage(&located, file);
            let error = locate_model("ada/tiny", "main", &world.offline(), &mut |_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorCategory::User);
            let text = error.to_string();
            assert!(text.contains("is damaged in the cache") && text.contains(file), "{text}");
            assert!(read(&located, file) != sound, "an offline run changed the cache");
            world.hub.forget();
            world.model("ada/tiny").unwrap();
            assert_eq!(read(&located, file), sound, "{file}");
            assert_eq!(world.hub.count("GET /ada"), 1, "{file}: {:?}", world.hub.requests());
            locate_model("ada/tiny", "main", &world.offline(), &mut |_| {}).unwrap();
        }
    }
}

/// Planning reads no weights, so it stays fast for a large model.
#[test]
fn weights_that_are_only_planned_with_are_not_hashed() {
    let world = World::new(vec![single("ada/tiny")]);
    let located = world.model("ada/tiny").unwrap();
    damage(&located, "model.safetensors");
    let mut checked = Vec::new();
    let mut note = |event: DownloadEvent<'_>| {
        if let DownloadEvent::Check { file, .. } = event {
            checked.push(file.to_owned());
        }
    };
    for options in [&world.options, &world.offline()] {
        assert!(locate_model_in_place("ada/tiny", "main", options, &mut note).unwrap().remote.is_none());
    }
    assert_eq!(checked, ["config.json", "tokenizer.json", "config.json", "tokenizer.json"]);
}

#[test]
fn cached_adapters_and_rows_are_verified_too() {
    let rows =
        RepoDouble::dataset("ada/rows").file("README.md", "# rows").lfs("train.jsonl", "{\"text\":\"a\"}\n");
    let world = World::new(vec![lora("ada/lora"), rows]);
    let adapter = world.adapter("ada/lora").unwrap();
    let data = world.dataset("ada/rows").unwrap();
    let offline = world.offline();
    let again = || {
        [
            locate_adapter("ada/lora", "main", &offline, &mut |_| {}),
            locate_dataset("ada/rows", RowsFor::Training, &offline, &mut |_| {}),
        ]
    };
    assert!(again().iter().all(Result::is_ok));
    for (located, file) in [(&adapter, "adapter_model.safetensors"), (&data, "train.jsonl")] {
        let sound = read(located, file);
        damage(located, file);
        let texts = again().map(|located| located.err().map(|error| error.to_string()).unwrap_or_default());
        assert_eq!(texts.iter().filter(|text| text.contains(file)).count(), 1, "{texts:?}");
        std::fs::write(located.folder.join(file), sound).unwrap();
    }
}

/// Each file is hashed once, not at every start.
#[test]
fn what_was_verified_is_not_hashed_again() {
    let mut world = World::new(vec![sharded("ada/big")]);
    world.options.verified_dir = Some(world.cache.path().join("verified"));
    let mut checked = 0;
    let mut count =
        |event: DownloadEvent<'_>| checked += u32::from(matches!(event, DownloadEvent::Check { .. }));
    for _ in 0..2 {
        locate_model("ada/big", "main", &world.options, &mut count).unwrap();
    }
    assert_eq!(checked, 0);
    std::fs::remove_dir_all(world.cache.path().join("verified")).unwrap();
    for _ in 0..2 {
        locate_model("ada/big", "main", &world.offline(), &mut |event: DownloadEvent<'_>| {
            checked += u32::from(matches!(event, DownloadEvent::Check { .. }));
        })
        .unwrap();
    }
    assert_eq!(checked, 5, "three small files and two shards, once");
}

#[test]
fn a_token_file_that_others_can_read_stops_what_asks_the_hub_and_nothing_else() {
    let world = World::new(vec![single("ada/tiny").access(Access::Private { good: SECRET })]);
    let token = world.cache.path().join("token");
    std::fs::write(&token, format!("{SECRET}\n")).unwrap();
    let options = |mode: u32, offline: bool| {
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(mode)).unwrap();
        HubOptions::from_lookup(offline, None, &|name| match name {
            "HF_ENDPOINT" => Some(world.hub.url().into()),
            "HF_HOME" => Some(world.cache.path().into()),
            _ => None,
        })
        .unwrap()
    };
    let locate = |options: &HubOptions| locate_model("ada/tiny", "main", options, &mut |_| {});
    for mode in [0o644, 0o640, 0o604] {
        let error = locate(&options(mode, false)).unwrap_err();
        assert_eq!(error.kind(), ErrorCategory::User);
        let text = error.to_string();
        assert!(text.contains(&format!("chmod 600 {}", token.display())) && !text.contains(SECRET), "{text}");
        assert_eq!(world.hub.requests().len(), 0, "{mode:o}: {:?}", world.hub.requests());
    }
    assert_eq!(locate(&options(0o600, false)).unwrap().note, None);
    // Neither the cache nor a local folder needs a token.
    let located = locate(&options(0o644, true)).unwrap();
    let folder = located.folder.to_str().unwrap();
    locate_model(folder, "main", &options(0o644, false), &mut |_| {}).unwrap();
}
