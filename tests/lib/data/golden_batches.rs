//! The batches of the golden trajectories: sft_messages.jsonl in file order, as encoded by
//! transformers.

use safetensors::SafeTensors;

use finetune::data::{DataOptions, Dataset, IGNORE, Sampler, SamplerOptions};

use super::{golden, template, tokenizer};

fn integers(tensors: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<i64>) {
    let view = tensors.tensor(name).unwrap();
    let data =
        view.data().chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect();
    (view.shape().to_vec(), data)
}

#[test]
fn golden_batches_are_reproduced() {
    for (model, file) in [
        ("tiny-llama", "tiny-llama-steps20-accum2-mb2-len96"),
        ("tiny-qwen2", "tiny-qwen2-steps10-accum1-mb2-len96"),
        ("tiny-phi3", "tiny-phi3-steps10-accum1-mb2-len96"),
        ("wide-llama", "wide-llama-steps5-accum2-mb8-len96"),
    ] {
        let bytes = std::fs::read(golden(&format!("train/batches/{file}.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let (shape, ids) = integers(&tensors, "input_ids");
        let (_, mask) = integers(&tensors, "attention_mask");
        let (_, labels) = integers(&tensors, "labels");
        let [steps, accumulation, micro, length] = shape[..] else { panic!("{shape:?}") };

        let tokenizer = tokenizer(model);
        let options =
            DataOptions { max_seq_len: 96, vocab_size: tokenizer.vocab_size(), ..DataOptions::default() };
        let paths = [golden("data/sft_messages.jsonl")];
        let data = Dataset::load(&paths, &options, &tokenizer, Some(&template(&tokenizer))).unwrap();
        assert_eq!(data.len(), 80, "{model}");
        let mut sampler = Sampler::new(
            &data,
            SamplerOptions {
                seed: 0,
                shuffle: false,
                packing: false,
                max_seq_len: 96,
                micro_batch_size: micro,
                gradient_accumulation_steps: accumulation,
                epochs: 1.0,
                max_steps: Some(steps as u64),
            },
        )
        .unwrap();
        for step in 0..steps {
            let actual = sampler.next_step().unwrap();
            assert_eq!(actual.micro_batches.len(), accumulation);
            for (a, batch) in actual.micro_batches.iter().enumerate() {
                assert_eq!(batch.num_samples, micro);
                for (row, segment) in batch.samples.iter().enumerate() {
                    let at = ((step * accumulation + a) * micro + row) * length;
                    let about = format!("{model}: step {step}, micro-batch {a}, row {row}");
                    let real: usize = mask[at..at + length].iter().sum::<i64>() as usize;
                    assert_eq!(segment.len, real, "{about}");
                    let range = segment.start..segment.start + segment.len;
                    let expected: Vec<u32> = ids[at..at + real].iter().map(|id| *id as u32).collect();
                    assert_eq!(batch.ids[range.clone()], expected, "{about}");
                    // Labels are at their own token's position; a target is at the position that
                    // predicts it.
                    let mut expected: Vec<u32> = labels[at + 1..at + real]
                        .iter()
                        .map(|label| u32::try_from(*label).unwrap_or(IGNORE))
                        .collect();
                    expected.push(IGNORE);
                    assert_eq!(batch.targets[range], expected, "{about}");
                }
            }
        }
        assert!(sampler.next_step().is_none());
    }
}
