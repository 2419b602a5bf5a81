//! Extra check: small trained models beside the repository, against transformers' results for them
//! (REFERENCE.json there).
//!
//! Losses, logits and greedy continuations of real text reveal what random weights hide: a wrong
//! token, position or scale shows at once. Without the models the test prints that it is skipped;
//! FINETUNE_SHARED names their folder.

use std::path::{Path, PathBuf};

use crate::logits;
use crate::skipped::skipped;
use candle_core::{DType, Device};
use finetune::data::{Batch, IGNORE, Sample, Tokenizer};
use finetune::engine::{Engine, Evaluation, TokenSampler};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::model::AdapterSwitch;
use finetune::objectives::CrossEntropy;
use finetune::recipe::enums::Attention;
use serde_json::Value;

const REFERENCE: &str = "models/REFERENCE.json";

fn shared() -> Option<PathBuf> {
    let root = std::env::var_os("FINETUNE_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    if !root.join(REFERENCE).exists() {
        let why = format!("{} is not there; set FINETUNE_SHARED", root.join(REFERENCE).display());
        skipped("tests on pretrained models", &why);
        return None;
    }
    Some(root)
}

/// One model and its reference results.
struct Known {
    name: String,
    folder: PathBuf,
    wanted: Value,
    tokenizer: Tokenizer,
    engine: Engine,
}

impl Known {
    fn ids(&self, key: &str) -> Vec<u32> {
        let list = self.wanted[key].as_array().unwrap();
        list.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    }

    fn numbers(&self, key: &str) -> Vec<f64> {
        self.wanted[key].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect()
    }
}

fn engine(folder: &Path) -> Result<Engine> {
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    logits::base(folder).engine(Trains::Nothing, &options)
}

/// Returns every model of REFERENCE.json, the file itself, and their folder.
fn known() -> Result<Option<(Vec<Known>, Value, PathBuf)>> {
    let Some(root) = shared() else { return Ok(None) };
    let reference: Value =
        serde_json::from_str(&std::fs::read_to_string(root.join(REFERENCE)).unwrap()).unwrap();
    let models = reference["models"].as_object().unwrap();
    let known = |(name, wanted): (&String, &Value)| {
        let folder = root.join("models").join(name);
        Ok(Known {
            name: name.clone(),
            wanted: wanted.clone(),
            tokenizer: Tokenizer::load(&folder)?,
            engine: engine(&folder)?,
            folder,
        })
    };
    let known = models.iter().map(known).collect::<Result<Vec<_>>>()?;
    assert!(known.len() >= 4, "REFERENCE.json names {} models", known.len());
    Ok(Some((known, reference, root)))
}

/// One row in which every token after the first is a label.
fn batch(ids: Vec<u32>) -> Batch {
    let len = ids.len();
    Batch {
        targets: ids[1..].iter().copied().chain([IGNORE]).collect(),
        samples: vec![Sample { start: 0, len, ..Sample::default() }],
        num_samples: 1,
        ids,
        ..Batch::default()
    }
}

#[test]
fn prompts_logits_and_continuations_equal_transformers() -> Result<()> {
    let Some((models, reference, _)) = known()? else { return Ok(()) };
    for model in models {
        let prompt = model.tokenizer.encode(reference["prompt"].as_str().unwrap(), true)?;
        assert_eq!(prompt, model.ids("prompt_ids"), "{}", model.name);

        let logits = model.engine.logits(&batch(prompt.clone()), AdapterSwitch::On)?;
        let last = logits.get(prompt.len() - 1)?.to_vec1::<f32>()?;
        for (ours, wanted) in last.iter().zip(model.numbers("last_logits_0_8")) {
            assert!((f64::from(*ours) - wanted).abs() < 1e-4, "{}: {ours} {wanted}", model.name);
        }
        let largest = model.numbers("last_logits_max");
        let at = f64::from(last[largest[0] as usize]);
        assert!((at - largest[1]).abs() < 1e-4, "{}: {at} {largest:?}", model.name);

        let mut greedy = TokenSampler::greedy();
        let mut wanted = model.ids("greedy_ids_40_new");
        // The reference includes the token that ends a text; finetune's continuation ends before
        // it.
        let stop = model.tokenizer.eos_ids();
        if wanted.last().is_some_and(|last| stop.contains(last)) {
            wanted.pop();
        }
        let ours = model.engine.generate(&prompt, 40, &mut greedy, stop, &mut |_| Ok(true))?;
        assert_eq!(ours, wanted, "{}", model.name);
    }
    Ok(())
}

/// Stories of the reference, cut at its length, without EOS.
fn stories(model: &Known, reference: &Value, root: &Path) -> Result<Vec<Vec<u32>>> {
    let (records, cut) = (reference["records"].as_u64().unwrap(), reference["truncate_to"].as_u64().unwrap());
    let text = std::fs::read_to_string(root.join("data/tinystories.jsonl")).unwrap();
    let story = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let mut ids = model.tokenizer.encode(row["text"].as_str().unwrap(), true)?;
        ids.truncate(cut as usize);
        Ok(ids)
    };
    text.lines().take(records as usize).map(story).collect()
}

fn evaluate(engine: &Engine, batches: &[Batch]) -> Result<Evaluation> {
    engine.evaluate(&CrossEntropy, batches, |_| Ok(None), |_| ())
}

#[test]
fn losses_of_stories_equal_transformers() -> Result<()> {
    let Some((models, reference, root)) = known()? else { return Ok(()) };
    for model in models {
        let stories = stories(&model, &reference, &root)?;
        let wanted = model.numbers("record_mean_nll");
        assert_eq!(stories.len(), wanted.len());
        for (i, (ids, wanted)) in stories.iter().zip(wanted).enumerate() {
            let loss = evaluate(&model.engine, &[batch(ids.clone())])?.loss();
            assert!((loss - wanted).abs() < 1e-5, "{} record {i}: {loss} {wanted}", model.name);
        }
        let all = evaluate(&model.engine, &stories.into_iter().map(batch).collect::<Vec<_>>())?;
        let wanted = model.wanted["token_mean_nll"].as_f64().unwrap();
        assert_eq!(Some(all.tokens), model.wanted["predicted_tokens"].as_u64(), "{}", model.name);
        assert!((all.loss() - wanted).abs() < 1e-5, "{}: {} {wanted}", model.name, all.loss());
    }
    Ok(())
}

/// `finetune eval` and `finetune generate` give the same figures. `eval` also counts the EOS of
/// rows that are not truncated.
#[test]
fn the_verbs_say_the_same() -> Result<()> {
    let Some((models, reference, root)) = known()? else { return Ok(()) };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stories.jsonl");
    let records = reference["records"].as_u64().unwrap() as usize;
    let text = std::fs::read_to_string(root.join("data/tinystories.jsonl")).unwrap();
    std::fs::write(&file, text.lines().take(records).collect::<Vec<_>>().join("\n")).unwrap();
    let cut = reference["truncate_to"].as_u64().unwrap();
    let run = |args: &[&str]| {
        let output = assert_cmd::Command::cargo_bin("finetune").unwrap().args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}\n{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for model in models {
        let folder = model.folder.display().to_string();
        let length = format!("data.max_seq_len={cut}");
        let file = file.display().to_string();
        let said =
            run(&["eval", "--model", &folder, "--dataset", &file, "--json", "--set", &length, "--offline"]);
        let said: Value = serde_json::from_str(&said).unwrap();
        let eos = model.tokenizer.eos().unwrap().id;
        let whole = stories(&model, &reference, &root)?.into_iter().map(|mut ids| {
            ids.push(eos);
            ids.truncate(cut as usize);
            batch(ids)
        });
        let wanted = evaluate(&model.engine, &whole.collect::<Vec<_>>())?;
        assert_eq!(said["tokens"].as_u64(), Some(wanted.tokens), "{}", model.name);
        let loss = said["loss"].as_f64().unwrap();
        assert!((loss - wanted.loss()).abs() < 1e-5, "{}: {loss} {}", model.name, wanted.loss());

        let prompt = reference["prompt"].as_str().unwrap();
        let said =
            run(&["generate", "--model", &folder, "--prompt", prompt, "--max-new-tokens", "40", "--offline"]);
        let ids = model.ids("greedy_ids_40_new");
        let stops = ids.last().is_some_and(|id| model.tokenizer.eos_ids().contains(id));
        let wanted = model.wanted["greedy_text"].as_str().unwrap();
        if stops {
            // The reference's text includes the special tokens around it.
            assert!(wanted.contains(said.trim_end()), "{}: {said:?} {wanted:?}", model.name);
        } else {
            assert_eq!(said.trim_end(), wanted, "{}", model.name);
        }
    }
    Ok(())
}
