//! Output files at a path that the user names: finetune never replaces or follows existing ones,
//! and no file name becomes markup.

use std::os::unix::fs::symlink;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::plan::sizing::shapes;
use crate::test_dir::{TestDir, lora};

/// Returns a hardware file; the `changed` lines replace those of the same keys.
pub(crate) fn hardware(changed: &[(&str, &str)]) -> String {
    let keys = [
        ("name", "\"own\""),
        ("memory_gb", "24"),
        ("bf16_tflops", "100"),
        ("f32_tflops", "50"),
        ("memory_gbps", "900"),
        ("link", "\"PCIe\""),
        ("link_gbps", "10"),
        ("host_gbps", "20"),
        ("network_gbps", "1.25"),
        ("host_memory_gb", "64"),
        ("disk_gbps", "3"),
        ("devices_per_host", "2"),
        ("efficiency", "0.4"),
        ("source", "\"a bench\""),
    ];
    let value =
        |key: &str, usual| changed.iter().find(|(name, _)| *name == key).map_or(usual, |(_, value)| *value);
    keys.iter().fold("[device]\n".to_owned(), |text, (key, usual)| {
        text + &format!("{key} = {}\n", value(key, usual))
    })
}

/// Runs `plan` for a small model; returns exit code, stdout and stderr.
fn planned(dir: &TestDir, more: &[&str]) -> (Option<i32>, String, String) {
    let args = [&["plan", "--model", "1B", "--quiet"], more].concat();
    let output = dir.command(&args).output().unwrap();
    let (code, errors) = (output.status.code(), dir.told(&output.stderr));
    // A plan that does not fit ends with 1 after writing all output.
    let is_made = errors.starts_with("error: the plan does not fit\n");
    assert!(!is_made || code == Some(1), "{errors}");
    (if is_made { Some(0) } else { code }, dir.told(&output.stdout), errors)
}

/// Returns the text of a page between `<element>` and `</element>`, which occur once.
fn inside<'a>(page: &'a str, element: &str) -> &'a str {
    let (open, close) = (format!("<{element}>"), format!("</{element}>"));
    assert_eq!((page.matches(&open).count(), page.matches(&close).count()), (1, 1), "{element}");
    page.split_once(&open).unwrap().1.split_once(&close).unwrap().0
}

/// Checks that the page's policy allows its one script and one style sheet by their digests, and
/// precedes both.
fn assert_policy(page: &str, has_script: bool) {
    let policy = page.find("http-equiv=\"Content-Security-Policy\"").unwrap();
    assert!(policy < page.find("<style>").unwrap() && page.find("<script>").is_none_or(|at| policy < at));
    let digest = |element: &str| STANDARD.encode(Sha256::digest(inside(page, element)));
    let script = if has_script { format!("'sha256-{}'", digest("script")) } else { "'none'".into() };
    let wanted = format!(
        "content=\"default-src 'none'; script-src {script}; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'\"",
        digest("style")
    );
    assert!(page.contains(&wanted), "no {wanted} in {}", &page[..page.len().min(1200)]);
    // The policy would block inline styles and handlers, so no element may have one.
    assert!(!page.split("<script>").next().unwrap().contains(" style=\""), "a style in an element");
}

#[test]
fn markup_in_a_hardware_file_stays_text_in_the_page() {
    let dir = shapes();
    let markup =
        r#"own<img src=x onerror=\"document.title='XSSRUN'\"></script><script>alert(1)</script><!--"#;
    let name = format!("\"{markup}\"");
    dir.write("own.toml", &hardware(&[("name", &name), ("source", &name)]));
    let (code, _, errors) = planned(&dir, &["--on", "own.toml", "--html", "p.html"]);
    assert_eq!(code, Some(0), "{errors}");
    let page = std::fs::read_to_string(dir.path("p.html")).unwrap();
    assert_policy(&page, true);
    assert!(!page.contains("<img") && page.matches("<script").count() == 1, "markup of the name");
    let script = inside(&page, "script");
    for parser in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("] {
        assert!(!script.contains(parser), "{parser}");
    }
    let data = script.split_once("const data = ").unwrap().1.split_once(";\n").unwrap().0;
    assert!(!data.contains('<'), "data that a parser of HTML may obey");
    let data: Value = serde_json::from_str(data).unwrap();
    let mut names = data["devices"].as_array().unwrap().iter().map(|device| device["name"].as_str().unwrap());
    assert!(names.next_back().unwrap().starts_with("own<img src=x onerror=\"document"));
}

#[test]
fn a_page_replaces_a_page_and_nothing_else() {
    let dir = shapes();
    dir.write("my.toml", "[model]\nid = \"1B\"\n");
    dir.write("victim", "precious");
    let page = |name: &str| planned(&dir, &["--on", "4090", "--html", name]);
    for _ in 0..2 {
        let (code, _, errors) = page("p.html");
        assert_eq!(code, Some(0), "{errors}");
    }
    symlink("victim", dir.path("link.html")).unwrap();
    symlink("p.html", dir.path("page-link.html")).unwrap();
    symlink("made-by-a-link", dir.path("loose.html")).unwrap();
    let before = std::fs::read(dir.path("p.html")).unwrap();
    for (name, why) in [
        ("my.toml", "a file of that name exists, and it is not a page of `finetune plan`"),
        ("victim", "a file of that name exists, and it is not a page of `finetune plan`"),
        ("link.html", "it is a link; finetune does not write through links"),
        ("page-link.html", "it is a link; finetune does not write through links"),
        ("loose.html", "it is a link; finetune does not write through links"),
        ("1B", "it is a folder; a page of `finetune plan` is one file"),
    ] {
        let (code, _, errors) = page(name);
        assert_eq!(code, Some(1), "{name}: {errors}");
        assert!(errors.contains(why) && errors.contains("hint: "), "{name}: {errors}");
    }
    let text = |name: &str| std::fs::read_to_string(dir.path(name)).unwrap();
    assert_eq!((text("my.toml"), text("victim")), ("[model]\nid = \"1B\"\n".into(), "precious".into()));
    assert!(std::fs::read(dir.path("p.html")).unwrap() == before && !dir.path("made-by-a-link").exists());
    assert!(dir.path("link.html").is_symlink() && temporary_files(&dir).is_empty());
}

/// Returns the temporary file names in a folder.
fn temporary_files(dir: &TestDir) -> Vec<String> {
    let entries = std::fs::read_dir(dir.path("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(".tmp-")).collect()
}

#[test]
fn of_five_exports_at_once_one_gives_the_file() {
    let dir = TestDir::new();
    let args = ["export", "--model", "model", "--format", "gguf", "--output", "m.gguf", "--quiet"];
    let start = |_| {
        let mut command = dir.command(&args);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<_> = (0..5).map(start).collect();
    let ended: Vec<_> = started.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let codes: Vec<_> = ended.iter().map(|output| output.status.code().unwrap()).collect();
    assert_eq!(codes.iter().filter(|code| **code == 0).count(), 1, "{codes:?}");
    for output in ended.iter().filter(|output| !output.status.success()) {
        let told = dir.told(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains("cannot write m.gguf") && told.contains("a file of that name exists"),
            "{told}"
        );
    }
    assert!(std::fs::read(dir.path("m.gguf")).unwrap().starts_with(b"GGUF"));
    assert_eq!(temporary_files(&dir), [""; 0]);
}

/// Names of folders and files in the model card: markup becomes code, and controls become escapes.
#[test]
fn names_in_a_model_card_stay_text() {
    let dir = TestDir::new();
    let (output, model, rows) = ("o<script>alert(1)<script>\x1b[31m", "m|`<b>", "r|<i>`\n# x.jsonl");
    std::fs::rename(dir.path("model"), dir.path(model)).unwrap();
    std::fs::rename(dir.path("rows.jsonl"), dir.path(rows)).unwrap();
    let named = |arg| match arg {
        "out" => output,
        "model" => model,
        "rows.jsonl" => rows,
        "train.max_steps=4" => "train.max_steps=2",
        other => other,
    };
    let args: Vec<&str> = lora(&["--quiet"]).into_iter().map(named).collect();
    let done = dir.command(&args).output().unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
    let folder = dir.path(output);
    let card = dir.told(&std::fs::read(folder.join("README.md")).unwrap());
    for line in [
        "# `o<script>alert(1)<script>\\u{1b}[31m`\n",
        "for the local model ``m|`<b>``, trained by",
        "\n| ``r\\|<i>`\\n# x.jsonl`` | ",
        "\nfinetune generate --model '[DIR]/m|`<b>' --adapter . --chat\n",
        "from_pretrained(\"[DIR]/m|`<b>\")",
    ] {
        assert!(card.contains(line), "no {line} in {card}");
    }
    assert!(!card.chars().any(|c| c.is_control() && c != '\n'), "{card:?}");
    let page = std::fs::read_to_string(folder.join("report.html")).unwrap();
    assert_policy(&page, false);
    assert!(!page.contains("<script") && !page.contains("<i>`"));
}

/// A link in the place of something that a run appends to is refused before anything is written.
#[test]
fn links_in_the_place_of_what_a_run_adds_to_are_refused() {
    let dir = TestDir::new();
    let sets = ["--quiet", "--set", "checkpoint.save_steps=2", "--set", "log.tensorboard=true"];
    let profile = ["--set", "profile.wait=0", "--set", "profile.warmup=0", "--set", "profile.active=1"];
    let run = |more: &[&str]| {
        let args = lora(&[&sets[..], &profile[..], more].concat());
        dir.command(&args).output().unwrap()
    };
    let first = run(&[]);
    assert!(first.status.success(), "{}", dir.told(&first.stderr));
    std::fs::create_dir(dir.path("elsewhere")).unwrap();
    for name in ["trace", "tensorboard", "alerts.jsonl"] {
        let (at, moved) = (dir.path("out").join(name), dir.path("kept"));
        let had = at.exists();
        if had {
            std::fs::rename(&at, &moved).unwrap();
        }
        symlink(dir.path("elsewhere"), &at).unwrap();
        let done = run(&["--resume", "--set", "train.max_steps=6"]);
        let told = dir.told(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{told}");
        assert!(
            told.contains(&format!("out/{name} is a link; a run writes only to regular files and folders")),
            "{told}"
        );
        assert!(told.contains(&format!("hint: run `rm out/{name}`")), "{told}");
        std::fs::remove_file(&at).unwrap();
        if had {
            std::fs::rename(&moved, &at).unwrap();
        }
    }
    assert_eq!(std::fs::read_dir(dir.path("elsewhere")).unwrap().count(), 0);
    let done = run(&["--resume", "--set", "train.max_steps=6"]);
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
}

/// Each figure of a hardware file has a range, which its error names; 0 means absent.
#[test]
fn figures_of_hardware_have_ranges() {
    let dir = shapes();
    let plan = |changed: &[(&str, &str)], on: &str, more: &[&str]| {
        dir.write("own.toml", &hardware(changed));
        planned(&dir, &[&["--on", on], more].concat())
    };
    let sizes = "accepted: 0.001 to 1000000.0";
    let or_none = "accepted: 0 for none, or 0.001 to 1000000.0";
    for (key, accepted) in [
        ("memory_gb", sizes),
        ("bf16_tflops", or_none),
        ("f32_tflops", sizes),
        ("memory_gbps", sizes),
        ("link_gbps", or_none),
        ("host_gbps", sizes),
        ("network_gbps", or_none),
        ("host_memory_gb", sizes),
        ("disk_gbps", sizes),
        ("efficiency", "accepted: 0.001 to 1.0"),
    ] {
        for value in ["1e-308", "1e308", "-1", "nan", "inf", "-inf"] {
            let (code, _, errors) = plan(&[(key, value)], "2xown.toml*2", &[]);
            let number: f64 = value.parse().unwrap();
            let why = format!("`{key}` is {number:?}; {accepted}");
            assert!(code == Some(1) && errors.contains(&why), "{key} = {value}: {errors}");
        }
    }
    let (code, _, errors) = plan(&[("devices_per_host", "0")], "own.toml", &[]);
    assert!(code == Some(1) && errors.contains("accepted: 1.0 to 100000.0"), "{errors}");
    // Absent figures are accepted where nothing needs them.
    for (key, on, needs) in
        [("network_gbps", "2xown.toml", "own.toml*2"), ("link_gbps", "own.toml*2", "2xown.toml")]
    {
        for format in [&[][..], &["--json"]] {
            let (code, text, errors) = plan(&[(key, "0")], on, format);
            assert_eq!(code, Some(0), "{key}: {errors}");
            assert_finite(&text);
        }
        let (code, _, errors) = plan(&[(key, "0")], needs, &[]);
        let why = format!("`{key}` of own is 0 (not connected)");
        assert!(code == Some(1) && errors.contains(&why) && errors.contains("hint: "), "{errors}");
    }
    let (code, _, errors) = plan(&[], "100000xown.toml*100000", &[]);
    assert!(code == Some(1) && errors.contains("accepted: 1 to 1000000"), "{errors}");
}

/// Checks that no number of a plan is infinite or NaN: not in its text, nor as `null` among the
/// JSON figures of a step, a run or a split.
fn assert_finite(text: &str) {
    for word in ["inf", "-inf", "NaN", "nan"] {
        let is_word = |part: &str| part.trim_matches(|c: char| !c.is_alphanumeric() && c != '-') == word;
        assert!(!text.split_whitespace().any(is_word), "{word} in {text}");
    }
    let Ok(json) = serde_json::from_str::<Value>(text) else { return };
    let numbers = |value: &Value, whose: &str| {
        assert!(value.as_object().unwrap().values().all(|figure| !figure.is_null()), "{whose}: {value}");
    };
    numbers(&json["time"], "time");
    json["run"].as_object().into_iter().for_each(|_| numbers(&json["run"], "run"));
    json["splits"].as_array().unwrap().iter().for_each(|split| numbers(split, "split"));
    json["leaves"]
        .as_array()
        .unwrap()
        .iter()
        .for_each(|leaf| assert!(leaf["tokens_per_sec"].is_number(), "{leaf}"));
}

/// At the ends of all ranges, times and costs are finite in the text and as JSON.
#[test]
fn what_is_printed_is_finite() {
    let dir = shapes();
    let speeds =
        ["bf16_tflops", "f32_tflops", "memory_gbps", "link_gbps", "host_gbps", "network_gbps", "disk_gbps"];
    for end in ["0.001", "1e6"] {
        let changed: Vec<(&str, &str)> = speeds.iter().map(|key| (*key, end)).collect();
        dir.write("own.toml", &hardware(&[&changed[..], &[("efficiency", "0.001")]].concat()));
        for format in [&[][..], &["--json"]] {
            let steps = "train.max_steps=9223372036854775807";
            let prices = ["--price", "1e9/h*1e9", "--price", "1e9/GB-month", "--set", steps];
            let (code, text, errors) =
                planned(&dir, &[&["--on", "2xown.toml*2"], &prices[..], format].concat());
            assert_eq!(code, Some(0), "{errors}");
            assert_finite(&text);
            if !format.is_empty() {
                assert!(serde_json::from_str::<Value>(&text).unwrap()["cost"].is_number(), "{text}");
            }
        }
    }
    for (price, why) in [
        ("1e308/h*1000000", "`AMOUNT` is 1e308; accepted: 0 for none, or 1e-9 to 1000000000.0"),
        ("inf/h", "`AMOUNT` is inf"),
        ("1/GB-month*1e300", "`GB` is 1e300; accepted: 1e-6 to 1000000000.0"),
    ] {
        let (code, _, errors) = planned(&dir, &["--on", "own.toml", "--price", price]);
        assert!(code == Some(1) && errors.contains(why), "{price}: {errors}");
    }
}

#[test]
fn figures_of_a_calibration_have_ranges() {
    let dir = shapes();
    let op =
        |op: &str, key: &str, value: &str| format!(r#"{{"op": "{op}", "shape": "x", "{key}": {value}}}"#);
    let file = |copy: &str, product: &str, matmul: &str| {
        let ops = [
            op("matmul", "tflops", matmul),
            op("linear_cross_entropy", "tflops", "0.1"),
            op("attention", "tflops", "0.1"),
            op("attention_backward", "tflops", "0.1"),
            op("glu", "gbps", "10"),
            op("softmax", "gbps", "0"),
        ];
        let ops = ops.join(", ");
        format!(
            r#"{{"device": "a processor", "processor": true, "tokens": 48, "dtype": "f32", "copy_gbps": {copy},
            "gemm_tflops": {product}, "ops": [{ops}]}}"#
        )
    };
    let plan = |text: &str| {
        dir.write("speeds.json", text);
        planned(&dir, &["--ranks", "2", "--calibration", "speeds.json", "--json"])
    };
    let (code, text, errors) = plan(&file("10", "0.2", "0.1"));
    assert_eq!(code, Some(0), "{errors}");
    assert_finite(&text);
    for (text, why) in [
        (file("0", "0.2", "0.1"), "`copy_gbps` is 0.0; accepted: 1e-9 to 1000000000.0"),
        (file("10", "1e308", "0.1"), "`gemm_tflops` is 1e308; accepted"),
        (file("10", "0.2", "1e-308"), "`tflops of matmul` is 1e-308; accepted"),
        (file("10", "0.2", "-1"), "`tflops of matmul` is -1.0; accepted"),
    ] {
        let (code, _, errors) = plan(&text);
        assert!(code == Some(1) && errors.contains(why) && errors.contains("hint: "), "{errors}");
    }
}
