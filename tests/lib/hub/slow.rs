//! Hubs that send a byte now and then: they never stall, and without a limit they would never end.

use super::*;

/// With this pause some hundred bytes take longer than [`LIMIT`] on any machine.
const DRIP: Duration = Duration::from_millis(5);
const LIMIT: Duration = Duration::from_millis(300);

fn transient(result: Result<Located>) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::Transient, "{error}");
    error.to_string()
}

#[test]
fn a_description_has_a_deadline_from_the_request_to_the_last_byte() {
    let repo = || vec![single("ada/tiny")];
    for (of, method, spoil) in [
        ("/revision/", "GET", Spoil::Drip(DRIP)),
        ("/revision/", "GET", Spoil::DripBody(DRIP)),
        ("model.safetensors", "HEAD", Spoil::Drip(DRIP)),
    ] {
        let mut world = World::new(repo());
        world.options.retry.description = LIMIT;
        world.hub.fault(Fault::new(&[method, of], 9, spoil));
        let told = transient(world.model("ada/tiny"));
        assert!(told.contains("its description was not complete 0.3 s after the request"), "{told}");
        let asked = world.hub.requests();
        let asked = asked.iter().filter(|asked| asked.method == method && asked.path.contains(of)).count();
        assert_eq!(asked, 1, "it is not asked again: {told}");
    }
    // A hub that is slow, but above the limit.
    let world = World::new(repo());
    world.hub.fault(Fault::new(&["/revision/"], 1, Spoil::Drip(Duration::from_millis(1))));
    world.model("ada/tiny").unwrap();
}

#[test]
fn a_file_that_drips_is_broken_off_and_its_part_is_kept() {
    let mut world = World::new(vec![single("ada/tiny")]);
    let of = ["GET", "model.safetensors"];
    world.options.retry.attempts = 2;
    world.options.retry.least_speed = LeastSpeed { bytes_per_sec: 100_000, over: LIMIT };
    world.hub.fault(Fault::new(&of, 9, Spoil::DripBody(DRIP)));
    let told = transient(world.model("ada/tiny"));
    assert!(told.contains("cannot download `model.safetensors`"), "{told}");
    assert!(told.contains(" bytes/s); the minimum is 100000 bytes/s over 0.3 s"), "{told}");
    assert!(told.contains("2 attempts without progress"), "{told}");
    let part = |path: &PathBuf| path.extension().is_some_and(|end| end == "part");
    let part = world.blobs().into_iter().find(part).unwrap().metadata().unwrap().len();
    assert!(part > 0);
    // The next run continues with the bytes received so far.
    world.hub.forget();
    world.options.retry = Retry::default();
    let located = world.model("ada/tiny").unwrap();
    assert_eq!(read(&located, "model.safetensors"), weights(400_000));
    let range = world.hub.requests().into_iter().find_map(|request| request.range);
    assert_eq!(range, Some(format!("bytes={part}-")));
}

#[test]
fn a_hub_that_sends_some_bytes_and_hangs_up_makes_no_progress() {
    let mut world = World::new(vec![single("ada/tiny")]);
    world.options.retry.attempts = 4;
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 100, Spoil::BreakAfter(10)));
    let told = transient(world.model("ada/tiny"));
    assert!(told.contains("4 attempts without progress"), "{told}");
    assert_eq!(world.hub.requests().iter().filter(|request| request.range.is_some()).count(), 3);
}

#[test]
fn a_header_that_drips_is_broken_off() {
    let mut world = World::new(vec![single("ada/tiny")]);
    world.options.retry.attempts = 2;
    world.options.retry.least_speed = LeastSpeed { bytes_per_sec: 100_000, over: LIMIT };
    let mut quiet = |_: DownloadEvent<'_>| {};
    let located =
        finetune::hub::locate_model_in_place("ada/tiny", "main", &world.options, &mut quiet).unwrap();
    world.hub.fault(Fault::new(&["GET", "model.safetensors"], 9, Spoil::DripBody(DRIP)));
    let told =
        located.remote.unwrap().read("model.safetensors", 0..4000, &mut quiet).unwrap_err().to_string();
    assert!(told.contains("the minimum is 100000 bytes/s over 0.3 s"), "{told}");
}
