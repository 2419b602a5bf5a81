//! Files and messages for people at the end of a run: `report.html` and the model card of real
//! runs, of a stopped run, and of a run that cannot write its page; and planned against actual
//! memory.

use std::process::Stdio;

use crate::test_dir::{TestDir, lora};

fn said(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).env("XDG_CACHE_HOME", dir.path("cache")).output().unwrap();
    let said = dir.told(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{said}");
    format!("{said}{}", dir.told(&output.stdout))
}

fn read(dir: &TestDir, name: &str) -> String {
    std::fs::read_to_string(dir.path(name)).unwrap()
}

/// Returns the difference between plan and peak that a run prints at its end, in percent.
fn difference(said: &str) -> f64 {
    let line = said.lines().find(|line| line.starts_with("peak memory ")).unwrap_or_else(|| panic!("{said}"));
    let mebibytes: Vec<f64> =
        line.split(" MiB").filter_map(|part| part.rsplit([' ', '(']).next()?.parse().ok()).collect();
    let [peak, planned] = mebibytes[..] else { panic!("{line}") };
    100.0 * (peak / planned - 1.0)
}

/// Only ten of these 55 MiB are the model's, so this checks the plan for the process itself. The
/// commands of the model card work.
#[test]
fn the_quickstart_keeps_to_its_plan_and_its_card_to_what_works() {
    let dir = TestDir::new();
    let train = ["--recipe", "quickstart", "--output", "out", "--set", "train.max_steps=30"];
    let told = said(&dir, &train);
    if cfg!(target_os = "linux") {
        assert!(difference(&told).abs() <= 10.0, "{told}");
    }
    let page = read(&dir, "out/report.html");
    for wanted in [
        "builtin:quickstart trained on builtin:questions-train.jsonl (800 rows): LoRA, r 16, on 21 modules.",
        "<dt>held-out loss</dt><dd>10.6",
        "<h2>Answers before and after</h2>",
        "What is the box made of?",
        "<p class=\"row\">&lt;bos&gt;&lt;|user|&gt; Mara made a door of glass.",
        "&lt;|assistant|&gt;<mark> stone&lt;eos&gt;</mark></p>",
        "<h2>Where the time of a step went</h2>",
        "800 rows in 1 file, messages",
        "<th scope=\"row\">the process itself</th>",
        "<th scope=\"row\">difference</th>",
        "<caption>Most memory in each phase",
        "<th scope=\"row\">backward</th>",
        "id = &quot;builtin:quickstart&quot;",
    ] {
        assert!(page.contains(wanted), "no `{wanted}` in {page}");
    }
    for outside in ["http://", "https://", "src=", "href=", "<script"] {
        assert!(!page.contains(outside), "{outside}");
    }
    let card = read(&dir, "out/README.md");
    assert!(!card.contains("from_pretrained(\"builtin:"), "{card}");
    let commands: Vec<&str> = card.lines().filter(|line| line.starts_with("finetune ")).collect();
    assert_eq!(commands.len(), 2, "{card}");
    for command in commands {
        // Commands of the model card are relative to its own folder.
        let args: Vec<&str> = command.split(' ').skip(1).map(|word| word.trim_matches('"')).collect();
        let mut command = dir.command(&args);
        command.current_dir(dir.path("out")).env("XDG_CACHE_HOME", dir.path("cache"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", dir.told(&output.stderr));
    }
    assert!(dir.path("out/merged/config.json").is_file());
}

#[test]
fn rows_of_any_text_are_shown_as_text() {
    let dir = TestDir::new();
    let row = r#"{"messages":[{"role":"user","content":"</script><b>q</b>"},{"role":"assistant","content":"<i onclick='x()'>a & b</i>"}]}"#;
    dir.write("rows.jsonl", &format!("{row}\n").repeat(8));
    let more = ["--set", "train.max_steps=2", "--eval-dataset", "rows.jsonl", "--ranks", "2"];
    let told = said(&dir, &lora(&more));
    assert!(told.contains("\npeak memory "), "{told}");
    let page = read(&dir, "out/report.html");
    assert!(!page.contains("<b>") && !page.contains("</script>") && !page.contains("<i on"), "{page}");
    assert!(page.contains("&lt;/script&gt;&lt;b&gt;q&lt;/b&gt;"), "{page}");
    let learned = page.split("<mark>").nth(2).unwrap().split("</mark>").next().unwrap();
    assert!(learned.contains("&lt;i onclick=&#39;x()&#39;&gt;a &amp; b&lt;/i&gt;"), "{learned}");
    // Two ranks of one process.
    assert!(
        page.contains("2 ranks, the slowest first") && page.contains("all 2 ranks of the process"),
        "{page}"
    );
    // Prompts and answers are also shown as text; the terminal shows samples for the quickstart
    // only.
    assert!(page.contains("Answers before and after") && page.contains("a &amp; b&lt;/i&gt;</td>"), "{page}");
    assert!(!told.contains("expected  "), "{told}");
}

#[cfg(unix)]
mod stopped {
    use std::process::{Child, Command, Output};
    use std::time::Duration;

    use super::*;
    use crate::at_work::{MAX_STEPS, STEPS, go_on, has_stopped, stops_at_work};

    /// A run that has taken three steps.
    fn begun(dir: &TestDir) -> Child {
        let more = ["--set", MAX_STEPS, "--eval-dataset", "rows.jsonl"];
        let mut command = dir.command(&lora(&more));
        let mut child =
            stops_at_work(&mut command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = || std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap_or_default();
        while lines().lines().count() < 4 {
            assert!(child.try_wait().unwrap().is_none(), "the run ended before it was stopped");
            std::thread::sleep(Duration::from_millis(2));
        }
        has_stopped(&mut child);
        child
    }

    fn stop(child: Child) -> Output {
        let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        go_on(&child);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(85), "{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    #[test]
    fn a_stopped_run_has_a_page_that_says_so_and_the_end_replaces_it() {
        let dir = TestDir::new();
        stop(begun(&dir));
        let page = read(&dir, "out/report.html");
        assert!(page.contains("<p class=\"notice\" role=\"note\">Stopped as asked after step "), "{page}");
        assert!(
            page.contains("<h2>Loss and learning rate</h2>") && page.contains("<h2>Recipe</h2>"),
            "{page}"
        );
        let more = ["--set", MAX_STEPS, "--eval-dataset", "rows.jsonl", "--resume"];
        said(&dir, &lora(&more));
        let page = read(&dir, "out/report.html");
        assert!(!page.contains("Stopped as asked"), "{page}");
        assert!(page.contains(&format!("<dt>steps</dt><dd>{STEPS} of {STEPS}</dd>")), "{page}");
        // The base was evaluated in the first part of the run.
        let loss = page.split("<dt>held-out loss</dt><dd>").nth(1).unwrap().split("</dd>").next().unwrap();
        assert!(loss.contains(" → "), "{loss}");
    }

    #[test]
    fn a_page_without_a_place_fails_no_run() {
        let dir = TestDir::new();
        let child = begun(&dir);
        std::fs::create_dir(dir.path("out/report.html")).unwrap();
        let told = dir.told(&stop(child).stderr);
        assert!(told.contains("warning: no report.html: "), "{told}");
        assert!(told.contains(", saved in out/checkpoint-"), "{told}");
    }
}
