//! Configurations and splits of data sets on the hub: finetune uses one of each, and asks for a
//! choice if several remain.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use finetune::error::{ErrorCategory, Result};
use finetune::hub::{HubOptions, RowsFor, locate_dataset};

use super::World;
use crate::hub_double::RepoDouble;

/// Returns the files used of a data set, without their folder.
fn taken(id: &str, rows_for: RowsFor, options: &HubOptions) -> Result<Vec<PathBuf>> {
    let located = locate_dataset(id, rows_for, options, &mut |_| {})?;
    assert!(located.rows.iter().all(|file| file.is_file()), "{:?}", located.rows);
    Ok(located.rows.iter().map(|file| file.strip_prefix(&located.folder).unwrap().to_owned()).collect())
}

fn train(world: &World, id: &str) -> Vec<PathBuf> {
    taken(id, RowsFor::Training, &world.options).unwrap()
}

fn held_out(world: &World, id: &str) -> Vec<PathBuf> {
    taken(id, RowsFor::Evaluation, &world.options).unwrap()
}

fn refused(world: &World, id: &str, rows_for: RowsFor) -> String {
    let error = taken(id, rows_for, &world.options).unwrap_err();
    assert_eq!(error.kind(), ErrorCategory::User);
    error.to_string()
}

fn paths(names: &[&str]) -> Vec<PathBuf> {
    names.iter().map(PathBuf::from).collect()
}

fn repo(id: &str, files: &[&str]) -> RepoDouble {
    files.iter().fold(RepoDouble::dataset(id), |repo, file| repo.lfs(file, format!("rows of {file}")))
}

/// gsm8k, as its README.md lists it.
const TWO_CONFIGURATIONS: &str = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    \
    path: main/train-*\n  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files:\n  - split: train\n    \
    path: socratic/train-*\n  - split: test\n    path: socratic/test-*\n---\n# GSM8K\n";

fn two_configurations(id: &str) -> RepoDouble {
    repo(
        id,
        &[
            "main/test-00000-of-00001.parquet",
            "main/train-00000-of-00002.parquet",
            "main/train-00001-of-00002.parquet",
            "socratic/test-00000-of-00001.parquet",
            "socratic/train-00000-of-00001.parquet",
        ],
    )
}

#[test]
fn one_of_several_configurations_must_be_named() {
    let world = World::new(vec![
        two_configurations("ada/listed").file("README.md", TWO_CONFIGURATIONS),
        two_configurations("ada/folders"),
    ]);
    for id in ["ada/listed", "ada/folders"] {
        let text = refused(&world, id, RowsFor::Training);
        assert!(text.contains("has 2 configurations, and one of them must be named"), "{text}");
        assert!(text.contains("main (test, train), socratic (test, train)"), "{text}");
        assert!(text.contains(&format!("write `{id}:main/train`")), "{text}");
        assert_eq!(world.hub.count(".parquet"), 0, "nothing is downloaded before that is known");

        let of = |part: &str| format!("{id}:{part}");
        let both = paths(&["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]);
        assert_eq!(train(&world, &of("main")), both);
        assert_eq!(train(&world, &format!("hf://{id}@main:main/train")), both);
        assert_eq!(held_out(&world, &of("main")), paths(&["main/test-00000-of-00001.parquet"]));
        assert_eq!(train(&world, &of("socratic/test")), paths(&["socratic/test-00000-of-00001.parquet"]));

        let text = refused(&world, &of("other"), RowsFor::Training);
        assert!(
            text.contains("has no configuration `other`") && text.contains("socratic (test, train)"),
            "{text}"
        );
        let text = refused(&world, &of("main/dev"), RowsFor::Training);
        assert!(text.contains("has no split `dev`") && text.contains("main (test, train)"), "{text}");
        world.hub.forget();
    }
}

#[test]
fn the_default_configuration_is_taken_and_said() {
    let readme =
        TWO_CONFIGURATIONS.replace("socratic\n  data_files", "socratic\n  default: true\n  data_files");
    let world = World::new(vec![two_configurations("ada/rows").file("README.md", readme)]);
    let located = locate_dataset("ada/rows", RowsFor::Training, &world.options, &mut |_| {}).unwrap();
    assert_eq!(located.rows, [located.folder.join("socratic/train-00000-of-00001.parquet")]);
    let note = located.note.unwrap();
    assert!(
        note.contains("default configuration `socratic`") && note.contains("main (test, train)"),
        "{note}"
    );
    assert_eq!(train(&world, "ada/rows:/test"), paths(&["socratic/test-00000-of-00001.parquet"]));
}

#[test]
fn splits_by_the_names_of_files() {
    let world = World::new(vec![
        repo(
            "ada/chat",
            &["data/test_sft-00000-of-00001-0a1b.parquet", "data/train_sft-00000-of-00001-0a1b.parquet"],
        ),
        repo(
            "ada/plain",
            &["data/test.jsonl", "data/train-1.jsonl", "data/train-2.jsonl", "data/more.jsonl"],
        ),
        repo("ada/unnamed", &["a.csv", "b/c.csv"]),
        repo("ada/languages", &["data/de/train.jsonl", "data/en/train.jsonl", "data/en/validation.jsonl"]),
    ]);
    let text = refused(&world, "ada/chat", RowsFor::Training);
    assert!(text.contains("no split `train`") && text.contains("test_sft, train_sft"), "{text}");
    assert_eq!(train(&world, "ada/chat:/train_sft"), paths(&["data/train_sft-00000-of-00001-0a1b.parquet"]));
    let text = refused(&world, "ada/chat:train_sft", RowsFor::Training);
    assert!(text.contains("write `ada/chat:/train_sft`"), "{text}");
    assert_eq!(train(&world, "ada/plain"), paths(&["data/train-1.jsonl", "data/train-2.jsonl"]));
    assert_eq!(held_out(&world, "ada/plain"), paths(&["data/test.jsonl"]));
    assert_eq!(train(&world, "ada/unnamed"), paths(&["a.csv", "b/c.csv"]));
    assert_eq!(held_out(&world, "ada/unnamed"), paths(&["a.csv", "b/c.csv"]));
    assert!(
        refused(&world, "ada/languages", RowsFor::Training).contains("de (train), en (train, validation)")
    );
    assert_eq!(held_out(&world, "ada/languages:en"), paths(&["data/en/validation.jsonl"]));
    assert!(refused(&world, "ada/languages:de", RowsFor::Evaluation).contains("no split to evaluate on"));
}

#[test]
fn what_the_hub_converted_to_parquet() {
    let files = ["de/train/0000.parquet", "de/train/0001.parquet", "en/partial-train_sft/0000.parquet"];
    let world = World::new(vec![repo("ada/rows", &files).revision("refs/convert/parquet")]);
    let id = "ada/rows@refs/convert/parquet";
    let text = refused(&world, id, RowsFor::Training);
    assert!(
        text.contains("de (train), en (train_sft)") && text.contains(&format!("{id}:de/train")),
        "{text}"
    );
    assert_eq!(train(&world, &format!("{id}:de")), paths(&files[..2]));
    assert_eq!(train(&world, &format!("{id}:en/train_sft")), paths(&files[2..]));
}

#[test]
fn patterns_of_a_readme() {
    let readme = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path:\n    - \"rows/**\"\n    - extra-[ab].jsonl\n\
        - config_name: deep\n  data_dir: more\n  data_files: \"*/x?.jsonl\"\n- config_name: empty\n  data_files: none/*.jsonl\n\
        - config_name: inside\n  data_dir: more\n---\n";
    let files = [
        "extra-a.jsonl",
        "extra-b.jsonl",
        "extra-c.jsonl",
        "more/y/x1.jsonl",
        "more/y/z/x1.jsonl",
        "rows/1.jsonl",
        "rows/2/3.jsonl",
        "rows/card.png",
    ];
    let world = World::new(vec![repo("ada/rows", &files).file("README.md", readme)]);
    let expected = paths(&["extra-a.jsonl", "extra-b.jsonl", "rows/1.jsonl", "rows/2/3.jsonl"]);
    assert_eq!(train(&world, "ada/rows"), expected);
    assert_eq!(train(&world, "ada/rows:deep"), paths(&["more/y/x1.jsonl"]));
    assert_eq!(train(&world, "ada/rows:inside"), paths(&["more/y/x1.jsonl", "more/y/z/x1.jsonl"]));
    let text = refused(&world, "ada/rows:empty", RowsFor::Training);
    assert!(text.contains("has no file of rows"), "{text}");

    let world = World::new(vec![
        repo("ada/odd", &["a.jsonl"]).file("README.md", "---\nconfigs:\n- {config_name: a\n---\n"),
        repo("ada/away", &["a.jsonl"])
            .file("README.md", "---\nconfigs:\n- data_files: hf://datasets/eve/rows/*\n---\n"),
    ]);
    let text = refused(&world, "ada/odd", RowsFor::Training);
    assert!(text.contains("its README.md: line 3: ") && text.contains("hf download ada/odd"), "{text}");
    assert!(refused(&world, "ada/away", RowsFor::Training).contains("leads out of the repository"));
}

#[test]
fn offline_a_split_that_was_not_fetched_is_not_replaced_by_another() {
    let world = World::new(vec![two_configurations("ada/rows").file("README.md", TWO_CONFIGURATIONS)]);
    assert_eq!(held_out(&world, "ada/rows:main"), paths(&["main/test-00000-of-00001.parquet"]));
    world.hub.forget();
    let offline = world.offline();
    assert_eq!(
        taken("ada/rows:main", RowsFor::Evaluation, &offline).unwrap(),
        paths(&["main/test-00000-of-00001.parquet"])
    );
    for id in ["ada/rows:main", "ada/rows", "ada/rows:socratic/test"] {
        let text = taken(id, RowsFor::Training, &offline).unwrap_err().to_string();
        assert!(text.contains("offline"), "{text}");
    }
    assert_eq!(world.hub.requests().len(), 0);
}

#[test]
fn the_binary_reads_the_rows_of_one_configuration() {
    let row = |text: &str| format!("{{\"text\": \"{text}\"}}\n");
    let repo = RepoDouble::dataset("ada/rows")
        .file("de/train.jsonl", row("Hallo"))
        .file("en/train.jsonl", row("Hello") + &row("Bye"));
    let world = World::new(vec![repo]);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    let run = |dataset: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        command.args(["data", "--model", golden.to_str().unwrap(), "--dataset", dataset]);
        command.env("HF_ENDPOINT", world.hub.url()).env("HF_HUB_CACHE", world.cache.path().join("hub"));
        command.env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN").stdin(Stdio::null());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (code, said) = run("ada/rows:en");
    assert!(code == Some(0) && said.contains("2 rows"), "{said}");
    let (code, said) = run("hf://ada/rows:de/train");
    assert!(code == Some(0) && said.contains("1 row"), "{said}");
    let (code, said) = run("ada/rows");
    assert!(code == Some(1) && said.contains("hint: write `ada/rows:de/train`"), "{said}");
}
