//! A run without a model, in its own process. It claims and marks a folder, logs, saves, keeps the
//! newest checkpoints and publishes a result, with the same calls as training and in the same
//! order. Each step computes eight numbers from the previous ones, so the result shows whether a
//! run resumed from the right state.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use finetune::checkpoint::{
    self, Retention, RunFolder, RunRecord, SaveThreads, SavedCheckpoint, SavedState, SavedValues, Saver,
    SaverOptions, SnapshotPart, SnapshotTensor, TrainingState, WeightValues, WriteWeights,
};
use finetune::collective::in_process::{self, InProcess, InProcessWorld};
use finetune::error::{Error, Result};
use finetune::report::metrics::{MetricsLog, StepReport};
use finetune::weights::{StoredDtype, WriteEntry, Written, write_file, write_text};

use crate::{Done, finish, names, tree};

/// Steps of a run; every second one saves, and one checkpoint is kept.
const STEPS: u64 = 4;

const JOB: &str = "CRASH_JOB";
const OUTPUT: &str = "CRASH_OUTPUT";

/// The command of a run in `output`: "fresh" begins, "resume" resumes, "wait" begins and then waits
/// to be killed.
pub(crate) fn command(job: &str, output: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child::works", "--nocapture", "--test-threads", "1"]);
    command.env(JOB, job).env(OUTPUT, output).stdin(Stdio::null());
    command
}

/// The body of such a process; as an ordinary test it does nothing.
#[test]
fn works() {
    let (Ok(job), Some(output)) = (std::env::var(JOB), std::env::var_os(OUTPUT)) else { return };
    let code = match run(&job, Path::new(&output)) {
        Ok(()) => 0,
        Err(error) => {
            drop(writeln!(std::io::stderr(), "{error}"));
            error.kind().exit_code()
        }
    };
    std::process::exit(code.into());
}

fn say(text: &str) {
    drop(writeln!(std::io::stdout(), "{text}"));
}

fn run(job: &str, output: &Path) -> Result<()> {
    let refused = || Error::user("cannot write").because("the folder is not empty");
    let resume = job == "resume";
    if !resume && !RunFolder::is_free(output)? {
        return Err(refused());
    }
    let folder = RunFolder::claim(output)?;
    if !resume && !RunFolder::is_free(output)? {
        return Err(refused());
    }
    let (saved, passed) = if resume { checkpoint::newest(output)? } else { (None, Vec::new()) };
    passed.iter().for_each(|text| say(&format!("passed over: {text}")));
    let record = match RunRecord::read(output)? {
        Some(record) => record,
        None => RunRecord::new(&BTreeMap::new())?,
    };
    folder.begin(record, &["metrics.jsonl"])?;
    folder.write_text("recipe.toml", "[train]\nseed = 7\n")?;
    if job == "wait" {
        say("at work");
        std::thread::sleep(Duration::from_secs(300));
    }
    let writers = SaveThreads::default();
    let work = |world| train(world, output, saved.as_ref(), &writers);
    in_process::run_ranks(InProcessWorld::new(1).communicators(), work)?;
    folder.seal(1)?;
    match folder.publish(&[])? {
        None => say("published"),
        Some((dir, _)) => say(&format!("published in {}", dir.display())),
    }
    Ok(())
}

fn train(
    world: InProcess,
    output: &Path,
    saved: Option<&SavedCheckpoint>,
    writers: &SaveThreads,
) -> Result<()> {
    let mut values = [1f32; 8];
    let mut done = 0;
    if let Some(saved) = saved {
        saved.optimizer_state("weight", "exp_avg", &mut values)?;
        done = saved.state.step;
    }
    let path = output.join("metrics.jsonl");
    let mut log = if saved.is_some() { MetricsLog::resume(&path, done)? } else { MetricsLog::create(&path)? };
    log.moved_aside().into_iter().for_each(|text| say(&format!("note: {text}")));
    let write_weights: WriteWeights = Arc::new(write_part);
    let (output_folder, writes) = (output.to_owned(), Arc::clone(&write_weights));
    let options = SaverOptions {
        output: output_folder,
        retention: Retention { last: 1, every: None },
        in_background: true,
        bytes: 64,
        write_weights: writes,
    };
    let mut saver = Saver::new(options, true, writers);
    for step in done + 1..=STEPS {
        let grown = values.iter().enumerate().map(|(i, value)| value * 1.25 + i as f32 + step as f32);
        let grown: Vec<f32> = grown.collect();
        values.copy_from_slice(&grown);
        log.append(&report(step).into())?;
        if step % 2 == 0 {
            saver.save(state(step), vec![tensor(&values)], &world)?;
            saver.finish(&world)?;
            saver.take_notes().iter().for_each(|text| say(&format!("note: {text}")));
            say(&format!("saved {step}"));
        }
    }
    let result = RunFolder::result(output);
    let written = write_weights(&result, &[tensor(&values)], SnapshotPart::Tensors(0))?;
    RunFolder::part_written(output, (0, 1), written)?;
    write_weights(&result, &[], SnapshotPart::Rest)?;
    Ok(())
}

fn write_part(folder: &Path, tensors: &[SnapshotTensor], part: SnapshotPart) -> Result<Vec<Written>> {
    if part == SnapshotPart::Rest {
        // Stands for a copied tokenizer.
        let path = folder.join("tokenizer.json");
        std::fs::write(&path, "{\"a\": \"tokenizer\"}").map_err(|e| Error::io("write", &path, &e))?;
        return Ok(vec![write_text(&folder.join("adapter_config.json"), "{\"r\": 2}")?]);
    }
    let tensor = &tensors[0];
    let entry = WriteEntry {
        name: tensor.name.clone(),
        dtype: StoredDtype::F32,
        shape: tensor.shape.clone(),
        stack: None,
    };
    let path = folder.join("adapter_model.safetensors");
    Ok(vec![write_file(&path, &[entry], |_, sink| tensor.values.write(sink))?])
}

fn tensor(values: &[f32]) -> SnapshotTensor {
    let state = vec![SavedState { name: "exp_avg", values: SavedValues::F32(values.to_vec()) }];
    SnapshotTensor {
        name: "weight".into(),
        shape: vec![2, 4],
        values: WeightValues::F32(values.to_vec()),
        state,
    }
}

fn state(step: u64) -> TrainingState {
    TrainingState {
        schema: checkpoint::SCHEMA,
        step,
        epoch: 0,
        index: step,
        tokens: step,
        ranks: 1,
        micro_batches: Some(1),
        base: None,
        best: None,
        chat_template_date: None,
        fingerprint: BTreeMap::new(),
    }
}

fn report(step: u64) -> StepReport {
    StepReport {
        step,
        epoch: 0.5,
        loss: 1.5,
        learning_rate: 1e-3,
        grad_norm: 2.0,
        tokens: 7,
        step_secs: 0.25,
        tokens_per_sec: 28.0,
        peak_bytes: 1,
        ..StepReport::default()
    }
}

/// The files of an undisturbed run, by name.
static EXPECTED: LazyLock<BTreeMap<String, Vec<u8>>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let done = finish(&mut command("fresh", &output));
    assert_eq!(done.code, Some(0), "{done:?}");
    tree(&output)
});

/// Returns the step of the last save that a run reported.
pub(crate) fn last_saved(done: &Done) -> u64 {
    let steps = done.said.lines().filter_map(|line| line.strip_prefix("saved ")?.parse().ok());
    steps.max().unwrap_or(0)
}

/// Checks the folder after anything happened to its run: every reported save exists, no checkpoint
/// is torn, and a result is complete or missing.
pub(crate) fn assert_sound(output: &Path, saved: u64, what: &str) {
    let (newest, passed) = checkpoint::newest(output).unwrap();
    assert!(passed.is_empty(), "{what}: {passed:?}");
    let step = newest.map_or(0, |newest| newest.state.step);
    assert!(step >= saved, "{what}: {step} is there, {saved} was saved: {:?}", names(output));
    if output.join("adapter_config.json").exists() {
        for name in ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"] {
            let actual = std::fs::read(output.join(name)).ok();
            assert!(actual.as_ref() == EXPECTED.get(name), "{what}: {name} of {:?}", names(output));
        }
    }
}

/// Checks that the next start succeeds, with exactly the files of an undisturbed run.
pub(crate) fn assert_goes_on(output: &Path, what: &str) {
    let job = if RunFolder::is_free(output).unwrap() { "fresh" } else { "resume" };
    let done = finish(&mut command(job, output));
    assert!(done.code == Some(0) && done.said.contains("published\n"), "{what}, {job}: {done:?}");
    let (mut actual, wanted) = (tree(output), &*EXPECTED);
    // A run that was killed before removing this checkpoint, and saves nothing more, keeps it.
    actual.retain(|name, _| !name.starts_with("checkpoint-2/"));
    assert_eq!(actual.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{what}, {job}");
    for (name, bytes) in wanted {
        assert!(actual[name] == *bytes, "{what}, {job}: {name} differs");
    }
    crate::assert_tidy(output, what);
}
