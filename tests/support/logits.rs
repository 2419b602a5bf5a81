//! Compares finetune's logits with stored ones of transformers (input_ids, attention_mask and
//! logits in one safetensors file).

use std::path::Path;

use candle_core::{DType, Device};
use finetune::data::{Batch, IGNORE, Sample};
use finetune::loading::{BaseModel, EngineOptions, Resolver, Trains};
use finetune::model::AdapterSwitch;
use finetune::recipe::enums::Attention;
use finetune::recipe::{self, DataSource};
use finetune::report::{Terminal, Verbosity};
use finetune::weights::ModelFiles;

/// Loads the model in `folder`.
pub(crate) fn base(folder: &Path) -> BaseModel {
    let terminal = Terminal::stderr(Verbosity::Quiet);
    let finder = Resolver::new(true, &terminal).expect("offline");
    let model =
        recipe::ModelSection { id: Some(DataSource::Path(folder.into())), ..recipe::ModelSection::default() };
    BaseModel::open(&model, None, &finder).expect("a model")
}

/// Returns the values of a tensor.
pub(crate) fn floats(files: &ModelFiles, name: &str) -> Vec<f32> {
    let mut values = vec![0f32; files.require(name).expect("there").elements()];
    files.read_f32(name, &mut values).expect("floats");
    values
}

fn integers(files: &ModelFiles, name: &str) -> Vec<i64> {
    let bytes = files.bytes(name).expect("there").chunks_exact(8);
    bytes.map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes"))).collect()
}

/// Returns the largest difference between the logits of the model in `folder` and those in
/// `expected`, over tokens that are not padding.
pub(crate) fn distance(expected: &Path, folder: &Path) -> f32 {
    let expected = ModelFiles::open_file(expected).expect("stored logits");
    let (ids, mask) = (integers(&expected, "input_ids"), integers(&expected, "attention_mask"));
    let length = expected.info("input_ids").expect("there").shape[1];
    let mut batch = Batch::default();
    for (ids, mask) in ids.chunks(length).zip(mask.chunks(length)) {
        let valid: Vec<u32> =
            ids.iter().zip(mask).filter(|(_, m)| **m == 1).map(|(id, _)| *id as u32).collect();
        batch.samples.push(Sample { start: batch.ids.len(), len: valid.len(), ..Sample::default() });
        batch.targets.extend(vec![IGNORE; valid.len()]);
        batch.ids.extend(valid);
        batch.num_samples += 1;
    }
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let engine = base(folder).engine(Trains::Nothing, &options).expect("loads");
    let logits =
        engine.logits(&batch, AdapterSwitch::On).and_then(|logits| Ok(logits.flatten_all()?.to_vec1()?));
    let ours: Vec<f32> = logits.expect("computes");
    let stored = floats(&expected, "logits");
    let vocab = engine.config.vocab_size;
    // Some files have the last positions alone.
    let positions = expected.info("logits").expect("there").shape[1];
    let (mut count, mut distance) = (0, 0f32);
    for (row, theirs) in stored.chunks(vocab).enumerate() {
        let (sequence, position) = (row / positions, length - positions + row % positions);
        if mask[sequence * length + position] == 1 {
            let start = (batch.samples[sequence].start + position) * vocab;
            let pairs = theirs.iter().zip(&ours[start..start + vocab]);
            distance = pairs.fold(distance, |most, (theirs, ours)| most.max((theirs - ours).abs()));
            count += 1;
        }
    }
    assert!(count == batch.ids.len() || (positions < length && count > 0), "{count}");
    distance
}
