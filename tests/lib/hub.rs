//! Location of models and data sets on a hub, against an in-process double of its protocol, with
//! faults.

mod configurations;
mod headers;
mod origin;
mod slow;
mod untrusted;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::hub_double::{Access, Fault, HubDouble, RepoDouble, Spoil};
use finetune::error::{ErrorCategory, Result};
use finetune::hub::{
    DownloadEvent, HubOptions, LeastSpeed, Located, Retry, RowsFor, Token, locate_adapter, locate_dataset,
    locate_model, locate_model_headers,
};

const SECRET: &str = "hf_canary_0123456789";

/// A hub, a cache and options for both.
struct World {
    hub: HubDouble,
    cache: tempfile::TempDir,
    options: HubOptions,
}

impl World {
    fn new(repos: Vec<RepoDouble>) -> Self {
        Self::with(HubDouble::start(repos))
    }

    fn with(hub: HubDouble) -> Self {
        let cache = tempfile::tempdir().unwrap();
        let mut options = HubOptions::new(hub.url(), cache.path().join("hub")).unwrap();
        options.retry = Retry {
            attempts: 3,
            first_wait: Duration::from_millis(1),
            stall: Duration::from_secs(20),
            ..Retry::default()
        };
        World { hub, cache, options }
    }

    fn with_token(mut self) -> Self {
        self.options.token = Some(Token::new(SECRET).unwrap());
        self
    }

    fn model(&self, id: &str) -> Result<Located> {
        locate_model(id, "main", &self.options, &mut |_| {})
    }

    fn dataset(&self, id: &str) -> Result<Located> {
        locate_dataset(id, RowsFor::Training, &self.options, &mut |_| {})
    }

    fn adapter(&self, id: &str) -> Result<Located> {
        locate_adapter(id, "main", &self.options, &mut |_| {})
    }

    fn offline(&self) -> HubOptions {
        let mut options = self.options.clone();
        options.offline = true;
        options
    }

    fn refused(&self, id: &str) -> String {
        let error = self.model(id).unwrap_err();
        assert_eq!(error.kind(), ErrorCategory::User, "{error}");
        error.to_string()
    }

    fn refused_adapter(&self, id: &str) -> String {
        let error = self.adapter(id).unwrap_err();
        assert_eq!(error.kind(), ErrorCategory::User, "{error}");
        error.to_string()
    }

    /// Returns every file below the cache's parent folder, without following links.
    fn files(&self) -> Vec<PathBuf> {
        let mut paths = Vec::new();
        let mut folders = vec![self.cache.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                let is_folder = entry.file_type().unwrap().is_dir();
                let list = if is_folder { &mut folders } else { &mut paths };
                list.push(entry.path());
            }
        }
        paths
    }

    fn blobs(&self) -> Vec<PathBuf> {
        let in_blobs = |path: &PathBuf| path.parent().unwrap().ends_with("blobs");
        let is_lock = |path: &PathBuf| path.extension().is_some_and(|end| end == "lock");
        self.files().into_iter().filter(|path| in_blobs(path) && !is_lock(path)).collect()
    }
}

/// Bytes without a short period, so that any missing part shows.
fn weights(len: usize) -> Vec<u8> {
    let mut state = 7u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect()
}

fn single(id: &str) -> RepoDouble {
    RepoDouble::model(id)
        .file("config.json", "{}")
        .file("README.md", "# card")
        .file("modeling_custom.py", "print()")
        .file("tokenizer.json", "{\"model\":{}}")
        .lfs("model.safetensors", weights(400_000))
        .lfs("pytorch_model.bin", "pickle")
}

fn sharded(id: &str) -> RepoDouble {
    let index = r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors",
        "c":"model-00001-of-00002.safetensors"}}"#;
    RepoDouble::model(id)
        .file("config.json", "{}")
        .file("additional_chat_templates/tool use.jinja", "{{ messages }}")
        .file("model.safetensors.index.json", index)
        .lfs("model-00001-of-00002.safetensors", weights(1000))
        .lfs("model-00002-of-00002.safetensors", weights(2000))
        .lfs("model-00003-of-00002.safetensors", "not named by the index")
}

fn lora(id: &str) -> RepoDouble {
    RepoDouble::model(id)
        .file("README.md", "# card")
        .file("adapter_config.json", "{\"peft_type\":\"LORA\"}")
        .file("chat_template.jinja", "{{ messages }}")
        .file("tokenizer.json", "{\"model\":{}}")
        .lfs("adapter_model.bin", "pickle")
        .lfs("adapter_model.safetensors", weights(50_000))
        .lfs("checkpoint-5/adapter_model.safetensors", "an earlier one")
        .lfs("training_args.bin", "pickle")
}

fn read(located: &Located, file: &str) -> Vec<u8> {
    std::fs::read(located.folder.join(file)).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_fresh_model_and_then_one_request() {
    let repo = single("ada/tiny");
    let commit = repo.commit();
    let world = World::new(vec![repo]);
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(located.id, "ada/tiny");
    assert_eq!(located.commit.as_deref(), Some(commit.as_str()));
    assert_eq!(located.note, None);
    assert_eq!(names(&located.folder), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    let repo_folder = world.cache.path().join("hub/models--ada--tiny");
    assert_eq!(located.folder, repo_folder.join("snapshots").join(&commit));
    assert_eq!(std::fs::read_to_string(repo_folder.join("refs/main")).unwrap(), commit);
    let same_layout = hf_hub::Cache::new(world.options.cache_dir.clone()).model("ada/tiny".to_owned());
    assert_eq!(same_layout.get("config.json"), Some(located.folder.join("config.json")));
    assert_eq!(world.hub.count("pytorch_model.bin") + world.hub.count(".py"), 0);
    // One description, and a HEAD and a GET for each of three files.
    assert_eq!(world.hub.requests().len(), 7);

    world.hub.forget();
    assert_eq!(world.model("ada/tiny").unwrap(), located);
    let lines: Vec<String> = world.hub.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(lines, ["/api/models/ada/tiny/revision/main"]);
}

#[test]
fn events_add_up_to_the_announced_bytes() {
    let world = World::new(vec![single("ada/tiny")]);
    let (mut planned, mut advanced, mut finished) = (0, 0, Vec::new());
    locate_model("ada/tiny", "main", &world.options, &mut |event| match event {
        DownloadEvent::Plan { bytes, .. } => planned += bytes,
        DownloadEvent::Advance { bytes } => advanced += bytes,
        DownloadEvent::Finish { file } => finished.push(file.to_owned()),
        _ => {}
    })
    .unwrap();
    assert_eq!(planned, 400_000 + 2 + 12);
    assert_eq!(advanced, planned);
    assert_eq!(finished, ["config.json", "tokenizer.json", "model.safetensors"]);
}

#[test]
fn only_the_shards_that_the_index_names() {
    let world = World::new(vec![sharded("ada/big")]);
    let located = world.model("ada/big").unwrap();
    let expected = [
        "additional_chat_templates",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(names(&located.folder), expected);
    assert_eq!(read(&located, "additional_chat_templates/tool use.jinja"), b"{{ messages }}");
    assert_eq!(read(&located, "model-00002-of-00002.safetensors"), weights(2000));
}

#[test]
fn headers_first_and_the_weights_later() {
    let world = World::new(vec![sharded("ada/big"), RepoDouble::model("ada/bare").file("config.json", "{}")]);
    let headers = locate_model_headers("ada/big", "main", &world.options, &mut |_| {}).unwrap();
    assert!(headers.folder.join("model.safetensors.index.json").is_file());
    assert_eq!(world.hub.count("-of-00002"), 0);
    world.hub.forget();
    world.model("ada/big").unwrap();
    assert_eq!(world.hub.count("config.json"), 0);
    assert_eq!(world.hub.count("GET /ada/big/resolve"), 2);
    locate_model_headers("ada/bare", "main", &world.options, &mut |_| {}).unwrap();
    assert!(world.refused("ada/bare").contains("model `ada/bare` has no weights"));
}

#[test]
fn a_branch_with_a_slash_and_a_commit() {
    let repo = single("ada/tiny").revision("refs/pr/1");
    let commit = repo.commit();
    let world = World::new(vec![repo]);
    let located = locate_model("ada/tiny", "refs/pr/1", &world.options, &mut |_| {}).unwrap();
    world.hub.forget();
    let pinned = locate_model("ada/tiny", &commit, &world.options, &mut |_| {}).unwrap();
    assert_eq!(pinned, located);
    assert_eq!(world.hub.requests().len(), 1);
    let offline = locate_model("ada/tiny", &commit, &world.offline(), &mut |_| {}).unwrap();
    assert_eq!(offline, located);
}

#[test]
fn a_broken_body_is_continued_where_it_broke() {
    let world = World::new(vec![single("ada/tiny")]);
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 2, Spoil::BreakAfter(100_000)));
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    let ranges: Vec<Option<String>> = world
        .hub
        .requests()
        .into_iter()
        .filter(|request| request.method == "GET" && request.path.ends_with("model.safetensors"))
        .map(|request| request.range)
        .collect();
    assert_eq!(ranges, [None, Some("bytes=100000-".to_owned()), Some("bytes=200000-".to_owned())]);
}

#[test]
fn a_later_run_continues_what_an_earlier_one_left() {
    let mut world = World::new(vec![single("ada/tiny")]);
    world.options.retry.attempts = 1;
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::BreakAfter(123_456)));
    let error = world.model("ada/tiny").unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient, "{error}");
    assert!(error.to_string().contains("cannot download `model.safetensors`"), "{error}");
    let part =
        world.blobs().into_iter().find(|path| path.extension().is_some_and(|end| end == "part")).unwrap();
    assert_eq!(part.metadata().unwrap().len(), 123_456);

    let mut started_at = 0;
    let located = locate_model("ada/tiny", "main", &world.options, &mut |event| {
        if let DownloadEvent::Start { file: "model.safetensors", present, .. } = event {
            started_at = present;
        }
    })
    .unwrap();
    assert_eq!(started_at, 123_456);
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    assert_eq!(world.hub.requests().last().unwrap().range.as_deref(), Some("bytes=123456-"));
    assert!(!part.exists());
}

#[test]
fn a_connection_that_stalls_is_broken_off() {
    let mut world = World::new(vec![single("ada/tiny")]);
    // Without a stall the hub answers within that time, also on a busy machine.
    world.options.retry.stall = Duration::from_secs(5);
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::StallAfter(2000)));
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    assert_eq!(world.hub.requests().last().unwrap().range.as_deref(), Some("bytes=2000-"));
}

#[test]
fn a_server_without_ranges_begins_again() {
    let world = World::new(vec![single("ada/tiny")]);
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::BreakAfter(100_000)));
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::IgnoreRange));
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
}

#[test]
fn what_an_earlier_run_left_damaged_is_fetched_anew() {
    let mut world = World::new(vec![single("ada/tiny")]);
    world.options.retry.attempts = 1;
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::BreakAfter(100_000)));
    world.model("ada/tiny").unwrap_err();
    let part =
        world.blobs().into_iter().find(|path| path.extension().is_some_and(|end| end == "part")).unwrap();
    for bytes in [vec![0; 1000], vec![0; 400_000], vec![0; 500_000]] {
        std::fs::write(&part, bytes).unwrap();
        let located = world.model("ada/tiny").unwrap();
        assert_eq!(read(&located, "model.safetensors"), weights(400_000));
        std::fs::rename(std::fs::canonicalize(located.folder.join("model.safetensors")).unwrap(), &part)
            .unwrap();
    }
}

#[test]
fn damaged_bytes_are_fetched_once_more_and_never_kept() {
    for file in ["config.json", "model.safetensors"] {
        for spoil in [Spoil::Damage, Spoil::Lengthen(10)] {
            let world = World::new(vec![single("ada/tiny")]);
            world.hub.fault(Fault::new(&["GET", file], 1, spoil.clone()));
            let located = world.model("ada/tiny").unwrap();
            assert_eq!(read(&located, "model.safetensors"), weights(400_000));
            assert_eq!(read(&located, "config.json"), b"{}");

            let world = World::new(vec![single("ada/tiny")]);
            world.hub.fault(Fault::new(&["GET", file], 9, spoil));
            let error = world.model("ada/tiny").unwrap_err();
            assert_eq!(error.kind(), ErrorCategory::Transient);
            assert!(error.to_string().contains("damaged, twice"), "{error}");
            assert_eq!(world.hub.count(&format!("/{file}")), 3, "a HEAD and two attempts");
            let whole = if file == "config.json" { 0 } else { 2 };
            assert_eq!(world.blobs().len(), whole, "{:?}", world.blobs());
        }
    }
}

#[test]
fn a_short_body_is_not_taken_for_the_file() {
    let world = World::new(vec![single("ada/tiny")]);
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::Shorten(1000)));
    world.model("ada/tiny").unwrap();

    let world = World::new(vec![single("ada/tiny")]);
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 99, Spoil::Shorten(0)));
    let error = world.model("ada/tiny").unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient, "{error}");
    assert!(error.to_string().contains("0 of 400000 bytes"), "{error}");
    assert_eq!(world.hub.count("GET /ada/tiny/resolve"), 2 + 3);
}

#[test]
fn an_empty_file_is_a_file() {
    let world = World::new(vec![single("ada/tiny").file("special_tokens_map.json", "")]);
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "special_tokens_map.json"), b"");
}

#[test]
fn what_is_not_there() {
    let world =
        World::new(vec![single("ada/tiny"), single("ada/holey").only_listed("generation_config.json")]);
    let text = world.refused("ada/holey");
    assert!(text.contains("model `ada/holey` has no file `generation_config.json`"), "{text}");
    let text = world.refused("ada/none");
    assert!(text.contains("the hub has no model `ada/none`") && text.contains("or it is private"), "{text}");
    let error = locate_model("ada/tiny", "v9", &world.options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("model `ada/tiny` has no revision `v9`"), "{error}");
    let world = world.with_token();
    assert!(world.refused("ada/none").contains("the token may not read it"));
}

#[test]
fn gated_repositories() {
    let repos = || {
        let gated = Access::Gated { good: SECRET };
        let others = Access::Gated { good: "hf_other" };
        vec![single("ada/gated").access(gated), single("ada/closed").access(others)]
    };
    let world = World::new(repos());
    let text = world.refused("ada/gated");
    assert!(text.contains("model `ada/gated` is gated"), "{text}");
    assert!(text.contains(&format!("accept the terms at {}/ada/gated", world.hub.url())), "{text}");
    assert_eq!(world.hub.count("GET /ada"), 0, "refused before the first byte");

    let world = World::new(repos()).with_token();
    let text = world.refused("ada/closed");
    assert!(text.contains("the token has no access to model `ada/closed`"), "{text}");
    assert!(text.contains(&format!("{}/ada/closed", world.hub.url())), "{text}");
    world.model("ada/gated").unwrap();
    let sent = format!("Bearer {SECRET}");
    assert!(world.hub.requests().iter().all(|request| request.authorization.as_deref() == Some(&sent)));
}

#[test]
fn a_token_that_the_hub_does_not_know() {
    let world = World::new(vec![single("ada/tiny")]).with_token();
    let echo = vec![("X-Error-Message", format!("Invalid credentials {SECRET} in Authorization header"))];
    world.hub.fault(Fault::new(&["/api/"], 1, Spoil::Status(401, echo)));
    let text = world.refused("ada/tiny");
    assert!(text.contains("the hub does not accept the token"), "{text}");
    assert!(text.contains("Invalid credentials (token)") && !text.contains(SECRET), "{text}");
}

#[test]
fn the_token_stays_with_the_hub() {
    let hub = HubDouble::start_with_cdn(vec![single("ada/tiny").access(Access::Private { good: SECRET })]);
    let world = World::with(hub).with_token();
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    let (cdn, hub): (Vec<_>, Vec<_>) =
        world.hub.requests().into_iter().partition(|request| request.host.starts_with("localhost"));
    assert_eq!(cdn.len(), 1);
    assert!(cdn.iter().all(|request| request.authorization.is_none()), "{cdn:?}");
    assert!(hub.iter().all(|request| request.authorization.is_some()));
    assert!(!format!("{:?}", world.options).contains(SECRET));
}

#[test]
fn a_mirror_that_sends_everybody_elsewhere_gets_the_token_alone() {
    use sha2::Digest;
    let world = World::with(HubDouble::start_with_cdn(vec![single("ada/tiny")])).with_token();
    let nothing = vec![("X-Linked-ETag", String::new()), ("X-Linked-Size", String::new())];
    world.hub.fault(Fault::new(&["HEAD /ada", "model.safetensors"], 1, Spoil::Headers(nothing)));
    let etag = format!("\"{:x}\"", sha2::Sha256::digest(weights(400_000)));
    world.hub.fault(Fault::new(&["HEAD /cdn"], 1, Spoil::Headers(vec![("ETag", etag)])));
    world.model("ada/tiny").unwrap();
    let requests = world.hub.requests();
    let elsewhere: Vec<_> = requests.iter().filter(|request| request.path.starts_with("/cdn")).collect();
    assert_eq!(elsewhere.iter().map(|request| request.method.as_str()).collect::<Vec<_>>(), ["HEAD", "GET"]);
    assert!(elsewhere.iter().all(|request| request.authorization.is_none()), "{elsewhere:?}");
}

/// Faults that answer every request of `hub` that contains all of `of` with a redirect to the same
/// path at `to`.
fn redirect(hub: &HubDouble, of: &[&str], path: &str, to: &str, status: u16) {
    let location = vec![("Location", format!("{to}{path}"))];
    hub.fault(Fault::new(of, 9, Spoil::Status(status, location)));
}

#[test]
fn the_token_goes_to_no_other_port_of_the_host() {
    for status in [301, 302, 303, 307, 308] {
        let repo = single("ada/tiny");
        let commit = repo.commit();
        let elsewhere = HubDouble::start(vec![repo.clone()]);
        let world = World::new(vec![repo]).with_token();
        redirect(&world.hub, &["/api/"], "/api/models/ada/tiny/revision/main", elsewhere.url(), status);
        for file in ["config.json", "tokenizer.json", "model.safetensors"] {
            let path = format!("/ada/tiny/resolve/{commit}/{file}");
            redirect(&world.hub, &[&path], &path, elsewhere.url(), status);
        }
        let located = world.model("ada/tiny").unwrap();
        assert_eq!(read(&located, "model.safetensors"), weights(400_000));
        let away = elsewhere.requests();
        // The description, and a HEAD and a GET for each of three files.
        assert_eq!(away.len(), 7, "{status}: {away:?}");
        assert!(away.iter().all(|request| request.authorization.is_none()), "{status}: {away:?}");
        assert!(world.hub.requests().iter().all(|request| request.authorization.is_some()), "{status}");
    }
}

#[test]
fn the_token_does_not_come_back_with_a_redirect() {
    let repo = single("ada/tiny");
    let path = format!("/ada/tiny/resolve/{}/model.safetensors", repo.commit());
    let world = World::new(vec![repo]).with_token();
    let elsewhere = HubDouble::start(Vec::new());
    world.hub.fault(Fault::new(
        &["GET", &path],
        1,
        Spoil::Status(302, vec![("Location", format!("{}/there", elsewhere.url()))]),
    ));
    redirect(&elsewhere, &["/there"], &path, world.hub.url(), 302);
    world.model("ada/tiny").unwrap();
    let mut asked = world.hub.requests();
    asked.retain(|request| request.method == "GET" && request.path == path);
    let with_token: Vec<bool> = asked.iter().map(|request| request.authorization.is_some()).collect();
    assert_eq!(with_token, [true, false]);
    assert!(elsewhere.requests().iter().all(|request| request.authorization.is_none()));
}

#[test]
fn a_redirect_with_a_user_name_is_not_followed() {
    let elsewhere = HubDouble::start(vec![single("ada/tiny")]);
    let host = elsewhere.url().trim_start_matches("http://").to_owned();
    let world = World::new(vec![single("ada/tiny")]).with_token();
    let own = world.hub.url().trim_start_matches("http://").to_owned();
    for target in [format!("http://{own}@{host}"), format!("http://ada:geheim@{own}")] {
        world.hub.forget();
        redirect(&world.hub, &["/api/"], "/api/models/ada/tiny/revision/main", &target, 302);
        let text = world.refused("ada/tiny");
        assert!(
            text.contains("cannot be used: it holds a user name or a password") && !text.contains("geheim"),
            "{text}"
        );
        assert_eq!((world.hub.requests().len(), elsewhere.requests().len()), (1, 0), "{target}");
    }
}

#[test]
fn a_refusal_behind_a_redirect_says_that_the_token_stayed_behind() {
    let elsewhere = HubDouble::start(vec![single("ada/tiny").access(Access::Private { good: SECRET })]);
    let world = World::new(Vec::new()).with_token();
    redirect(&world.hub, &["/api/"], "/api/models/ada/tiny/revision/main", elsewhere.url(), 307);
    let text = world.refused("ada/tiny");
    let said = format!("{}; the token goes to {} alone", elsewhere.url(), world.hub.url());
    assert!(text.contains(&said), "{text}");
}

#[test]
fn a_resumed_download_behind_a_redirect() {
    let world = World::with(HubDouble::start_with_cdn(vec![single("ada/tiny")]));
    world.hub.fault(Fault::new(&["GET /cdn"], 1, Spoil::BreakAfter(5000)));
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    let last = world.hub.requests().pop().unwrap();
    assert_eq!((last.path.starts_with("/cdn"), last.range.as_deref()), (true, Some("bytes=5000-")));
}

#[test]
fn a_renamed_repository_is_followed() {
    let repo = single("ada/new");
    let commit = repo.commit();
    let world = World::new(vec![repo]);
    let moved = |path: String| Spoil::Status(307, vec![("Location", path)]);
    world.hub.fault(Fault::new(
        &["/api/models/ada/old"],
        9,
        moved("/api/models/ada/new/revision/main".into()),
    ));
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let target = format!("/ada/new/resolve/{commit}/{file}");
        world.hub.fault(Fault::new(&["/ada/old/resolve", file], 9, moved(target)));
    }
    let located = world.model("ada/old").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
}

#[test]
fn passing_failures_are_waited_out() {
    let world = World::new(vec![single("ada/tiny")]);
    let busy = |wait: &str| Spoil::Status(429, vec![("Retry-After", wait.to_owned())]);
    world.hub.fault(Fault::new(&["/api/"], 2, busy("0")));
    world.hub.fault(Fault::new(&["HEAD", "config.json"], 2, Spoil::Status(503, Vec::new())));
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, busy("0")));
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 1, Spoil::Close));
    let mut waits = Vec::new();
    locate_model("ada/tiny", "main", &world.options, &mut |event| {
        if let DownloadEvent::Retry { wait, .. } = event {
            waits.push(wait.as_millis());
        }
    })
    .unwrap();
    assert_eq!(waits, [0, 0, 1, 2, 0, 2]);
}

#[test]
fn lasting_failures_end() {
    let world = World::new(vec![single("ada/tiny")]);
    world.hub.fault(Fault::new(&["/api/"], 99, Spoil::Status(502, Vec::new())));
    let error = world.model("ada/tiny").unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert!(error.to_string().contains("the hub answered 502"), "{error}");
    assert_eq!(world.hub.requests().len(), 3);

    world.hub.forget();
    let later = vec![("Retry-After", "86400".to_owned())];
    world.hub.fault(Fault::new(&["/api/"], 99, Spoil::Status(429, later)));
    assert_eq!(world.model("ada/tiny").unwrap_err().kind(), ErrorCategory::Transient);
    assert_eq!(world.hub.requests().len(), 1, "nobody waits for a day");
}

#[test]
fn a_refusal_of_the_body_is_not_stored_as_the_file() {
    let world = World::new(vec![single("ada/tiny")]);
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 9, Spoil::Status(403, Vec::new())));
    let text = world.refused("ada/tiny");
    assert!(text.contains("the hub refuses access") && text.contains("the hub answered 403"), "{text}");
    assert!(world.blobs().iter().all(|blob| blob.metadata().unwrap().len() < 100), "{:?}", world.blobs());
    world.hub.forget();
    world.model("ada/tiny").unwrap();
}

#[test]
fn hostile_names_stay_out() {
    let index = |name: &str| serde_json::json!({ "weight_map": { "w": name } }).to_string();
    let evil = [
        "../../../evil.safetensors",
        "/tmp/evil.safetensors",
        "C:\\evil.safetensors",
        "\\\\h\\s.safetensors",
        "a\u{0}.safetensors",
        "evil.bin",
    ];
    for name in evil {
        let repo = RepoDouble::model("eve/model")
            .file("config.json", "{}")
            .file("model.safetensors.index.json", index(name))
            .file(name, "evil");
        let world = World::new(vec![repo]);
        let text = world.refused("eve/model");
        assert!(text.contains("model.safetensors.index.json"), "{text}");
        assert_eq!(world.hub.count("evil"), 0, "{name:?} was asked for");
    }
    let world = World::new(vec![
        single("eve/template").only_listed("additional_chat_templates/../../../evil.jinja"),
        RepoDouble::dataset("eve/rows").file("a.jsonl", "{}").only_listed("../../evil.jsonl"),
    ]);
    assert!(world.refused("eve/template").contains("it leaves its folder"));
    assert!(world.dataset("eve/rows").unwrap_err().to_string().contains("it leaves its folder"));
    assert_eq!(world.files().len(), 0);
}

#[test]
fn hostile_headers_stay_out() {
    for etag in ["../../../../evil", "\"short\"", ""] {
        let world = World::new(vec![single("eve/model")]);
        let headers = vec![("ETag", etag.to_owned())];
        world.hub.fault(Fault::new(&["HEAD", "config.json"], 1, Spoil::Headers(headers)));
        let text = world.refused("eve/model");
        assert!(text.contains("no size or no digest"), "{text}");
        assert_eq!(world.files().len(), 0);
    }
    for body in [r#"{"sha":"../../../evil","siblings":[]}"#, "<html>please log in</html>", "{}", ""] {
        let world = World::new(vec![single("eve/model")]);
        world.hub.fault(Fault::new(&["/api/"], 1, Spoil::Body(body.into())));
        assert!(world.refused("eve/model").contains("does not answer as a hub does"));
    }
}

#[test]
fn metas_original_is_answered_by_its_sibling() {
    let original = RepoDouble::model("meta/Llama-2-7b")
        .file("params.json", "{}")
        .lfs("consolidated.00.pth", "pickle")
        .lfs("tokenizer.model", "pieces");
    let world = World::new(vec![original.clone(), single("meta/Llama-2-7b-hf")]);
    let located = world.model("meta/Llama-2-7b").unwrap();
    assert_eq!(located.id, "meta/Llama-2-7b-hf");
    let note = located.note.clone().unwrap();
    assert!(note.contains("using `meta/Llama-2-7b-hf`"), "{note}");
    assert_eq!(world.hub.count("consolidated"), 0);
    let headers = locate_model_headers("meta/Llama-2-7b", "main", &world.options, &mut |_| {}).unwrap();
    assert_eq!(headers, located);

    world.hub.forget();
    let offline = locate_model("meta/Llama-2-7b", "main", &world.offline(), &mut |_| {}).unwrap();
    assert_eq!(offline, located);
    assert_eq!(world.hub.requests().len(), 0);

    let world = World::new(vec![original]);
    let text = world.refused("meta/Llama-2-7b");
    assert!(text.contains("holds only Meta's original checkpoint (consolidated.00.pth)"), "{text}");
    assert!(text.contains("convert_llama_weights_to_hf"), "{text}");
}

#[test]
fn a_gated_sibling_says_so() {
    let original = RepoDouble::model("meta/L").lfs("consolidated.00.pth", "pickle");
    let sibling = single("meta/L-hf").access(Access::Gated { good: "hf_other" });
    let world = World::new(vec![original, sibling]);
    assert!(world.refused("meta/L").contains("model `meta/L-hf` is gated"));
}

/// Its file holds what config.json and the tokenizer of other models do.
#[test]
fn one_gguf_file_is_a_model() {
    let repo = RepoDouble::model("ada/one").file("README.md", "").lfs("m.gguf", "gguf");
    let mut world = World::new(vec![repo]);
    let located = world.model("ada/one").unwrap();
    assert_eq!(std::fs::read(located.folder.join("m.gguf")).unwrap(), b"gguf");
    world.options.offline = true;
    assert_eq!(world.model("ada/one").unwrap().folder, located.folder);
}

#[test]
fn weights_that_are_no_safetensors() {
    let world = World::new(vec![
        RepoDouble::model("ada/pickle").file("config.json", "{}").lfs("pytorch_model.bin", "pickle"),
        RepoDouble::model("ada/gguf").lfs("m.Q4_K_M.gguf", "gguf").lfs("m.Q8_0.gguf", "gguf"),
        RepoDouble::model("ada/lora").file("adapter_config.json", "{}").lfs("adapter_model.safetensors", "a"),
        RepoDouble::model("ada/empty").file("README.md", ""),
    ]);
    let text = world.refused("ada/pickle");
    assert!(
        text.contains("only pickled weights (pytorch_model.bin)") && text.contains("save_pretrained"),
        "{text}"
    );
    assert!(text.contains("often the same name with `-hf` at its end"), "{text}");
    let text = world.refused("ada/gguf");
    assert!(text.contains("several GGUF models") && text.contains("m.Q4_K_M.gguf, m.Q8_0.gguf"), "{text}");
    assert!(world.refused("ada/lora").contains("a PEFT adapter and not a model"));
    assert!(world.refused("ada/empty").contains("has no config.json"));
    assert_eq!(world.hub.count("/resolve/"), 0);
}

#[test]
fn offline_uses_the_cache_and_no_socket() {
    let world = World::new(vec![sharded("ada/big")]);
    let offline = world.offline();
    let locate = |id: &str, revision: &str| locate_model(id, revision, &offline, &mut |_| {});
    let text = locate("ada/big", "main").unwrap_err().to_string();
    assert!(text.contains("model `ada/big` is not in the cache, and this run is offline"), "{text}");
    assert!(text.contains("without `--offline`"), "{text}");
    assert_eq!(world.hub.requests().len(), 0);

    let located = world.model("ada/big").unwrap();
    world.hub.forget();
    assert_eq!(locate("ada/big", "main").unwrap(), located);
    assert!(locate("ada/big", "other").is_err());
    std::fs::remove_file(located.folder.join("model-00002-of-00002.safetensors")).unwrap();
    let text = locate("ada/big", "main").unwrap_err().to_string();
    assert!(text.contains("not complete") && text.contains("model-00002-of-00002.safetensors"), "{text}");
    std::fs::remove_file(located.folder.join("config.json")).unwrap();
    assert!(locate("ada/big", "main").unwrap_err().to_string().contains("has no config.json"));
    assert_eq!(world.hub.requests().len(), 0);
}

#[test]
fn an_unfinished_download_is_not_used_offline() {
    let world = World::new(vec![sharded("ada/big")]);
    world.hub.fault(Fault::new(&["GET", "00002-of"], 99, Spoil::Status(403, Vec::new())));
    world.model("ada/big").unwrap_err();
    let text = locate_model("ada/big", "main", &world.offline(), &mut |_| {}).unwrap_err().to_string();
    assert!(text.contains("is not in the cache"), "{text}");
}

#[test]
fn a_blob_that_another_revision_brought_is_not_fetched_again() {
    let first = single("ada/tiny");
    let second = single("ada/tiny").revision("v2").file("config.json", "{\"v\":2}");
    let world = World::new(vec![first]);
    world.model("ada/tiny").unwrap();
    let hub = HubDouble::start(vec![second]);
    let mut options = HubOptions::new(hub.url(), world.cache.path().join("hub")).unwrap();
    options.retry = world.options.retry.clone();
    let located = locate_model("ada/tiny", "v2", &options, &mut |_| {}).unwrap();
    assert_eq!(read(&located, "config.json"), b"{\"v\":2}");
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    assert_eq!(hub.count("GET /ada/tiny/resolve"), 1);
}

#[test]
fn several_at_once_download_once() {
    let world = World::new(vec![single("ada/tiny")]);
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..4).map(|_| scope.spawn(|| world.model("ada/tiny").unwrap())).collect();
        for run in runs {
            assert_eq!(read(&run.join().unwrap(), "model.safetensors"), weights(400_000));
        }
    });
    assert_eq!(world.hub.count("GET /ada/tiny/resolve"), 3);
}

/// Simulates the ranks of a host, started at once by a launcher: the first one downloads, the
/// others wait for it.
#[test]
fn processes_started_at_once_download_each_file_once() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut repo = RepoDouble::model("ada/tiny");
    let mut files = names(&golden.join("models/tiny-llama"));
    files.retain(|name| name.ends_with(".json") || name.ends_with(".safetensors"));
    for name in &files {
        let bytes = std::fs::read(golden.join("models/tiny-llama").join(name)).unwrap();
        repo = if name.ends_with(".json") { repo.file(name, bytes) } else { repo.lfs(name, bytes) };
    }
    let commit = repo.commit();
    let world = World::new(vec![repo]);
    let start = |number| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_finetune"));
        command.args(["export", "--model", "ada/tiny", "--format", "hf", "--output"]);
        command.arg(world.cache.path().join(format!("out-{number}")));
        command.env("HF_ENDPOINT", world.hub.url()).env("HF_HUB_CACHE", world.cache.path().join("hub"));
        for name in ["HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
            command.env_remove(name);
        }
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let all: Vec<_> = (0..4).map(start).collect();
    for process in all {
        let done = process.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    for name in files {
        let line = format!("GET /ada/tiny/resolve/{commit}/{name}");
        assert_eq!(world.hub.count(&line), 1, "{name}: {:?}", world.hub.requests());
    }
    assert!(world.files().iter().all(|path| path.extension().is_none_or(|end| end != "part")));
}

#[test]
fn no_hub_at_the_address() {
    let mut world = World::new(Vec::new());
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let cache = world.options.cache_dir.clone();
    let retry = world.options.retry.clone();
    world.options = HubOptions::new(&format!("http://127.0.0.1:{port}"), &cache).unwrap();
    world.options.retry = retry.clone();
    let error = world.model("ada/tiny").unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient);
    let text = error.to_string();
    assert!(text.contains(&format!("http://127.0.0.1:{port}")) && text.contains("--offline"), "{text}");
}

#[test]
fn https_is_spoken() {
    let mut world = World::new(Vec::new());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 2];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(b"HTTP/1.1 400 this is not TLS\r\n\r\n").unwrap();
        hello
    });
    world.options = HubOptions::new(&url, &world.options.cache_dir).unwrap();
    let error = world.model("ada/tiny").unwrap_err();
    // A TLS handshake record, RFC 8446 section 5.1. finetune does not retry after this answer.
    assert_eq!(server.join().unwrap(), [0x16, 0x03]);
    assert_eq!(error.kind(), ErrorCategory::Transient);
    assert!(!error.to_string().contains("attempts"), "{error}");
}

#[test]
fn a_folder_wins_over_the_hub() {
    let world = World::new(vec![single("ada/tiny")]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let text = world.refused(path);
    assert!(text.contains("has no config.json"), "{text}");
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    std::fs::write(folder.path().join("pytorch_model.bin"), "pickle").unwrap();
    assert!(world.refused(path).contains("only pickled weights"));
    assert_eq!(
        locate_model_headers(path, "main", &world.options, &mut |_| {}).unwrap().folder,
        folder.path()
    );
    std::fs::write(folder.path().join("model.safetensors"), "").unwrap();
    let located = world.model(path).unwrap();
    assert_eq!((located.folder.as_path(), located.commit), (folder.path(), None));
    assert!(world.refused(&format!("{path}/config.json")).contains("is a file"));
    assert!(world.refused(&format!("{path}/nope")).contains("there is no file or folder"));
    let rows = folder.path().join("rows.jsonl");
    std::fs::write(&rows, "{}").unwrap();
    assert_eq!(world.dataset(rows.to_str().unwrap()).unwrap().folder, rows);
    // Tests run beside the folder `src`: it has no revision, so the error suggests the hub.
    let text = world.dataset("src@v1").unwrap_err().to_string();
    assert!(text.contains("`hf://src@v1`"), "{text}");
    assert_eq!(world.hub.requests().len(), 0);
}

#[test]
fn data_sets() {
    let rows = RepoDouble::dataset("ada/rows")
        .file("README.md", "")
        .file("dataset_infos.json", "{}")
        .file("train.jsonl", "{\"text\":\"a\"}\n")
        .lfs("data/test.jsonl", "{\"text\":\"b\"}\n")
        .file("copy.csv", "text\na\n");
    let converted =
        RepoDouble::dataset("ada/script").revision("refs/convert/parquet").lfs("d/0000.parquet", "PAR1");
    let script = RepoDouble::dataset("ada/only-script").file("script.py", "");
    let world = World::new(vec![rows, converted, script]);
    let located = world.dataset("ada/rows").unwrap();
    assert_eq!(names(&located.folder), ["README.md", "train.jsonl"]);
    assert_eq!(located.rows, [located.folder.join("train.jsonl")]);
    let held_out =
        |options: &HubOptions| locate_dataset("ada/rows", RowsFor::Evaluation, options, &mut |_| {});
    let located = held_out(&world.options).unwrap();
    assert_eq!(located.rows, [located.folder.join("data/test.jsonl")]);
    assert_eq!(read(&located, "data/test.jsonl"), b"{\"text\":\"b\"}\n");
    let converted = world.dataset("ada/script@refs/convert/parquet").unwrap();
    assert_eq!(read(&converted, "d/0000.parquet"), b"PAR1");
    let text = world.dataset("ada/only-script").unwrap_err().to_string();
    assert!(text.contains("data set `ada/only-script` has no file of rows"), "{text}");
    assert!(text.contains("@refs/convert/parquet"), "{text}");
    let text = world.dataset("ada/none").unwrap_err().to_string();
    assert!(
        text.contains("the hub has no data set `ada/none`") && text.contains("/datasets/ada/none"),
        "{text}"
    );

    world.hub.forget();
    let offline = held_out(&world.offline()).unwrap();
    assert_eq!(offline.rows, located.rows);
    assert!(offline.note.unwrap().contains("1 cached file(s)"));
    assert!(locate_dataset("ada/none", RowsFor::Training, &world.offline(), &mut |_| {}).is_err());
    assert_eq!(world.hub.requests().len(), 0);
}

#[test]
fn a_fresh_adapter_then_one_request_then_none() {
    let repo = lora("ada/lora");
    let commit = repo.commit();
    let world = World::new(vec![repo]);
    let located = world.adapter("ada/lora").unwrap();
    assert_eq!((located.id.as_str(), located.commit.as_deref()), ("ada/lora", Some(commit.as_str())));
    assert_eq!(located.note, None);
    let expected =
        ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json"];
    assert_eq!(names(&located.folder), expected);
    assert_eq!(read(&located, "adapter_model.safetensors"), weights(50_000));
    assert_eq!(read(&located, "adapter_config.json"), b"{\"peft_type\":\"LORA\"}");
    // One description, and a HEAD and a GET for each of four files.
    assert_eq!(world.hub.requests().len(), 9);

    world.hub.forget();
    assert_eq!(world.adapter("hf://ada/lora").unwrap(), located);
    let lines: Vec<String> = world.hub.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(lines, ["/api/models/ada/lora/revision/main"]);

    world.hub.forget();
    let offline = |id: &str, revision: &str| locate_adapter(id, revision, &world.offline(), &mut |_| {});
    assert_eq!(offline("ada/lora", "main").unwrap(), located);
    assert_eq!(offline("ada/lora", &commit).unwrap(), located);
    assert!(offline("ada/lora", "other").is_err());
    let text = offline("ada/none", "main").unwrap_err().to_string();
    assert!(text.contains("adapter `ada/none` is not in the cache, and this run is offline"), "{text}");
    std::fs::remove_file(located.folder.join("adapter_model.safetensors")).unwrap();
    let text = offline("ada/lora", "main").unwrap_err().to_string();
    assert!(text.contains("not complete") && text.contains("has no adapter_model.safetensors"), "{text}");
    assert_eq!(world.hub.requests().len(), 0);
}

#[test]
fn an_adapter_is_resumed_and_verified() {
    let mut world = World::new(vec![lora("ada/lora")]);
    world.options.retry.attempts = 1;
    let file = "adapter_model.safetensors";
    world.hub.fault(Fault::new(&["GET", file], 1, Spoil::BreakAfter(20_000)));
    assert_eq!(world.adapter("ada/lora").unwrap_err().kind(), ErrorCategory::Transient);
    let text = locate_adapter("ada/lora", "main", &world.offline(), &mut |_| {}).unwrap_err().to_string();
    assert!(text.contains("is not in the cache"), "{text}");

    world.hub.forget();
    let located = world.adapter("ada/lora").unwrap();
    assert_eq!(read(&located, file), weights(50_000));
    let ranges: Vec<_> = world.hub.requests().into_iter().filter_map(|request| request.range).collect();
    assert_eq!(ranges, ["bytes=20000-"]);

    let world = World::new(vec![lora("ada/lora")]);
    world.hub.fault(Fault::new(&["GET", file], 9, Spoil::Damage));
    let text = world.adapter("ada/lora").unwrap_err().to_string();
    assert!(text.contains("damaged, twice"), "{text}");
    let of_weights = |path: &PathBuf| path.metadata().unwrap().len() == 50_000;
    assert!(!world.files().iter().any(of_weights), "{:?}", world.files());
}

#[test]
fn what_is_no_adapter_is_refused_by_name() {
    let world = World::new(vec![
        RepoDouble::model("ada/pickle").file("adapter_config.json", "{}").lfs("adapter_model.bin", "pickle"),
        single("ada/tiny"),
        RepoDouble::model("ada/half").file("adapter_config.json", "{}").lfs("w.safetensors", "w"),
        RepoDouble::model("ada/empty").file("README.md", ""),
        lora("eve/lora").only_listed("additional_chat_templates/../../../evil.jinja"),
    ]);
    let text = world.refused_adapter("ada/pickle");
    assert!(text.contains("adapter `ada/pickle` holds only pickled weights (adapter_model.bin)"), "{text}");
    assert!(text.contains("`hf download ada/pickle --revision main --local-dir pickle`"), "{text}");
    assert!(text.contains("'pickle/adapter_model.bin' 'pickle/adapter_model.safetensors'`"), "{text}");
    let text = world.refused_adapter("ada/tiny");
    assert!(text.contains("adapter `ada/tiny` is a model and not a PEFT adapter"), "{text}");
    assert!(text.contains("it has no adapter_config.json") && text.contains("`--model`"), "{text}");
    let text = world.refused_adapter("ada/half");
    assert!(text.contains("has no adapter_model.safetensors") && text.contains("w.safetensors"), "{text}");
    assert!(world.refused_adapter("ada/empty").contains("adapter `ada/empty` has no adapter_config.json"));
    assert!(world.refused_adapter("eve/lora").contains("it leaves its folder"));
    assert_eq!(world.hub.count("/resolve/"), 0);
    assert_eq!(world.files().len(), 0);
    let bad = locate_adapter("ada/pickle", "../x", &world.options, &mut |_| {}).unwrap_err().to_string();
    assert!(bad.contains("cannot be a revision"), "{bad}");
}

#[test]
fn an_adapter_that_is_missing_gated_or_without_that_revision() {
    let closed = lora("ada/closed").access(Access::Gated { good: SECRET });
    let world = World::new(vec![closed, lora("ada/lora")]);
    let text = world.refused_adapter("ada/none");
    assert!(
        text.contains("the hub has no adapter `ada/none`") && text.contains("or it is private"),
        "{text}"
    );
    let error = locate_adapter("ada/lora", "v9", &world.options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("adapter `ada/lora` has no revision `v9`"), "{error}");
    assert!(world.refused_adapter("ada/closed").contains("adapter `ada/closed` is gated"));
    assert_eq!(world.hub.count("GET /ada"), 0, "refused before the first byte");
    let world = world.with_token();
    assert_eq!(read(&world.adapter("ada/closed").unwrap(), "adapter_model.safetensors"), weights(50_000));
}

#[test]
fn a_cached_model_is_no_adapter_offline_and_the_other_way_round() {
    let both = single("ada/both").file("adapter_config.json", "{}").lfs("adapter_model.safetensors", "a");
    let world = World::new(vec![both]);
    world.model("ada/both").unwrap();
    let offline = world.offline();
    let text = locate_adapter("ada/both", "main", &offline, &mut |_| {}).unwrap_err().to_string();
    assert!(text.contains("adapter `ada/both` is not complete in the cache"), "{text}");
    assert!(text.contains("the cached files of it are those of a model"), "{text}");
    let located = world.adapter("ada/both").unwrap();
    assert_eq!(locate_adapter("ada/both", "main", &offline, &mut |_| {}).unwrap(), located);

    let world = World::new(vec![lora("ada/lora")]);
    world.adapter("ada/lora").unwrap();
    let text = locate_model("ada/lora", "main", &world.offline(), &mut |_| {}).unwrap_err().to_string();
    assert!(text.contains("model `ada/lora` is not complete in the cache"), "{text}");
}

#[test]
fn an_adapter_in_a_folder() {
    let world = World::new(Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let put = |name: &str| std::fs::write(folder.path().join(name), "{}").unwrap();
    assert!(world.refused_adapter(path).contains("has no adapter_config.json"));
    put("config.json");
    put("model.safetensors");
    assert!(world.refused_adapter(path).contains("is a model and not a PEFT adapter"));
    put("adapter_config.json");
    put("adapter_model.bin");
    let text = world.refused_adapter(path);
    assert!(text.contains("only pickled weights") && !text.contains("hf download"), "{text}");
    assert!(
        text.contains(&format!("'{path}/adapter_model.bin' '{path}/adapter_model.safetensors'")),
        "{text}"
    );
    put("adapter_model.safetensors");
    let located = world.adapter(path).unwrap();
    assert_eq!((located.id.as_str(), located.folder.as_path(), located.commit), (path, folder.path(), None));
    let text = world.refused_adapter(&format!("{path}/adapter_model.safetensors"));
    assert!(
        text.contains("is a file") && text.contains("the folder that holds adapter_config.json"),
        "{text}"
    );
    assert!(world.refused_adapter(&format!("{path}/nope")).contains("there is no file or folder"));
    // Tests run beside `src`, which could also be a name on the hub.
    assert!(world.refused_adapter("src").contains("`hf://src`"));
    assert_eq!(world.hub.requests().len(), 0);
}
