//! Order, packing and resuming, on synthetic rows.

use std::borrow::Cow;
use std::collections::BTreeMap;

use proptest::prelude::*;

use finetune::data::source::{DataFile, RawRow};
use finetune::data::{
    Cursor, DataOptions, Dataset, Example, ExampleSource, Origin, Role, RowOrigin, Sampler, SamplerOptions,
    Step,
};

use super::tokenizer;

/// Distinguishable rows: row i is `i` in words of one token a digit.
fn dataset(lengths: &[usize]) -> Dataset {
    let tokenizer = tokenizer("tiny-llama");
    let row = |(index, length): (usize, &usize)| {
        let text = format!("{index:04}{}", " .".repeat(length % 7));
        let text = serde_json::Value::String(text);
        RawRow {
            value: serde_json::Map::from_iter([("text".to_owned(), text)]),
            origin: Origin { file: std::path::Path::new("x").into(), row: RowOrigin::Line(index as u64) },
            document: false,
            format: None,
        }
    };
    let rows = lengths.iter().enumerate().map(row).collect();
    let source = DataFile { rows, ..DataFile::default() };
    Dataset::from_source(source, &DataOptions::default(), &tokenizer, None).unwrap()
}

fn options() -> SamplerOptions {
    SamplerOptions {
        seed: 3,
        shuffle: true,
        packing: false,
        max_seq_len: 40,
        micro_batch_size: 2,
        gradient_accumulation_steps: 2,
        epochs: 1.0,
        max_steps: None,
    }
}

fn steps(data: &Dataset, options: SamplerOptions) -> Vec<Step> {
    let mut sampler = Sampler::new(data, options).unwrap();
    let total = sampler.total_steps();
    let steps: Vec<Step> = std::iter::from_fn(|| sampler.next_step()).collect();
    assert_eq!(steps.len() as u64, total);
    steps
}

/// Returns the rows of a step as token ids.
fn rows(step: &Step) -> Vec<Vec<u32>> {
    let batches = step.micro_batches.iter();
    batches.flat_map(|b| b.samples.iter().map(|s| b.ids[s.start..s.start + s.len].to_vec())).collect()
}

/// Returns how often each row of the data set occurs in these steps.
fn counts(steps: &[Step]) -> BTreeMap<Vec<u32>, usize> {
    let mut counts = BTreeMap::new();
    for row in steps.iter().flat_map(rows) {
        *counts.entry(row).or_default() += 1;
    }
    counts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_row_comes_once_an_epoch(
        lengths in proptest::collection::vec(0usize..7, 1..60),
        (shuffle, packing) in any::<(bool, bool)>(),
        (micro, accumulation, seed) in (1usize..5, 1usize..4, any::<u64>()),
    ) {
        let data = dataset(&lengths);
        let options = SamplerOptions {
            seed, shuffle, packing, micro_batch_size: micro, gradient_accumulation_steps: accumulation, epochs: 2.0,
            ..options()
        };
        let all = steps(&data, options.clone());
        let actual = counts(&all);
        prop_assert_eq!(actual.len(), data.len());
        prop_assert!(actual.values().all(|count| *count == 2));
        let first = steps(&data, SamplerOptions { epochs: 1.0, ..options });
        prop_assert_eq!(&all[..first.len()], &first[..]);
        prop_assert!(counts(&first).values().all(|count| *count == 1));
        prop_assert_eq!(first.last().map(|step| step.epoch), Some(1.0));
        for step in &all {
            prop_assert_eq!(step.valid, step.micro_batches.iter().map(|b| b.valid()).sum::<u64>());
            prop_assert!(step.micro_batches.iter().all(|b| b.num_samples > 0 && b.ids.len() == b.targets.len()));
            if packing {
                let full = step.micro_batches.iter().map(|b| b.len()).max();
                prop_assert!(full <= Some(40 * micro));
            }
        }
    }

    #[test]
    fn only_the_product_of_the_split_matters(
        lengths in proptest::collection::vec(0usize..7, 1..60),
        (shuffle, packing, seed) in any::<(bool, bool, u64)>(),
    ) {
        let data = dataset(&lengths);
        let split = |micro, accumulation| {
            let options = SamplerOptions {
                seed, shuffle, packing, micro_batch_size: micro, gradient_accumulation_steps: accumulation, ..options()
            };
            // Tokens in order with their position in the global batch: the input of loss and
            // dropout.
            let tokens = |step: &Step| {
                let mut first = 0;
                for batch in &step.micro_batches {
                    assert_eq!(batch.first_token, first);
                    first += batch.len() as u64;
                }
                let batches = || step.micro_batches.iter();
                let ids: Vec<u32> = batches().flat_map(|b| b.ids.clone()).collect();
                let targets: Vec<u32> = batches().flat_map(|b| b.targets.clone()).collect();
                let lengths: Vec<usize> = batches().flat_map(|b| b.samples.iter().map(|s| s.len)).collect();
                (ids, targets, lengths, step.valid, step.tokens)
            };
            steps(&data, options).iter().map(tokens).collect::<Vec<_>>()
        };
        let one = split(8, 1);
        prop_assert_eq!(&one, &split(1, 8));
        prop_assert_eq!(&one, &split(2, 4));
        prop_assert_eq!(&one, &split(4, 2));
    }

    #[test]
    fn a_resumed_run_goes_on_as_it_would_have(
        lengths in proptest::collection::vec(0usize..7, 1..40),
        (shuffle, packing, seed) in any::<(bool, bool, u64)>(),
        at in 0usize..30,
    ) {
        let data = dataset(&lengths);
        let options = SamplerOptions { seed, shuffle, packing, epochs: 2.5, ..options() };
        let mut whole = Sampler::new(&data, options.clone()).unwrap();
        for _ in 0..at {
            whole.next_step();
        }
        let cursor: Cursor = serde_json::from_str(&serde_json::to_string(&whole.cursor()).unwrap()).unwrap();
        let mut resumed = Sampler::new(&data, options).unwrap();
        resumed.seek(cursor).unwrap();
        prop_assert_eq!(resumed.steps_done(), whole.steps_done());
        loop {
            let (a, b) = (whole.next_step(), resumed.next_step());
            prop_assert_eq!(&a, &b);
            if a.is_none() {
                break;
            }
        }
    }
}

#[test]
fn file_order_is_kept_without_shuffling() {
    let data = dataset(&[6, 0, 3, 1, 5, 2, 4, 0, 6]);
    let expected: Vec<Vec<u32>> = data.examples().iter().map(|e| e.ids.clone()).collect();
    for packing in [false, true] {
        let all = steps(&data, SamplerOptions { shuffle: false, packing, ..options() });
        assert_eq!(all.iter().flat_map(rows).collect::<Vec<_>>(), expected, "packing {packing}");
    }
}

#[test]
fn shuffling_depends_on_seed_and_epoch() {
    let data = dataset(&[3; 40]);
    let order = |seed, epochs| {
        let all = steps(&data, SamplerOptions { seed, epochs, ..options() });
        all.iter().flat_map(rows).collect::<Vec<_>>()
    };
    let two = order(1, 2.0);
    assert_ne!(two[..40], two[40..]);
    assert_eq!(two[..40], order(1, 1.0));
    assert_ne!(order(1, 1.0), order(2, 1.0));
}

#[test]
fn rows_of_like_length_share_a_step() {
    let lengths: Vec<usize> = (0..128).map(|i| i % 7).collect();
    let data = dataset(&lengths);
    let spread = |step: &Step| {
        let lengths = || step.micro_batches.iter().flat_map(|b| b.samples.iter().map(|s| s.len));
        lengths().max().unwrap() - lengths().min().unwrap()
    };
    let all = steps(&data, options());
    // 32 steps, 7 lengths: at most 6 steps contain a change of length.
    assert!(all.iter().filter(|step| spread(step) > 0).count() <= 6);
    let sizes: Vec<u64> = all.iter().map(|step| step.tokens).collect();
    assert!(!sizes.is_sorted(), "steps come in random order of length");
}

#[test]
fn the_last_small_group_is_a_step() {
    let data = dataset(&[2; 10]);
    for shuffle in [false, true] {
        let all = steps(&data, SamplerOptions { shuffle, ..options() });
        assert_eq!(all.iter().map(|s| rows(s).len()).collect::<Vec<_>>(), [4, 4, 2]);
        assert_eq!(all.iter().map(|s| s.epoch).collect::<Vec<_>>(), [0.4, 0.8, 1.0]);
    }
}

#[test]
fn epochs_and_steps_are_counted_as_transformers_counts() {
    let data = dataset(&[2; 10]);
    for (epochs, max_steps, total) in [
        (1.0, None, 3),
        (2.0, None, 6),
        (0.01, None, 1),
        (0.5, None, 2),
        (1.0, Some(7), 7),
        (f64::NAN, Some(2), 2),
    ] {
        let sampler = Sampler::new(&data, SamplerOptions { epochs, max_steps, ..options() }).unwrap();
        assert_eq!(sampler.total_steps(), total, "{epochs} {max_steps:?}");
    }
    for (broken, key) in [
        (SamplerOptions { epochs: 0.0, ..options() }, "train.epochs"),
        (SamplerOptions { micro_batch_size: 0, ..options() }, "train.micro_batch_size"),
        (SamplerOptions { gradient_accumulation_steps: 0, ..options() }, "train.gradient_accumulation_steps"),
        (SamplerOptions { max_steps: Some(0), ..options() }, "train.max_steps"),
    ] {
        assert!(Sampler::new(&data, broken).unwrap_err().to_string().contains(key));
    }
}

#[test]
fn a_cursor_of_other_data_is_refused() {
    let data = dataset(&[2; 10]);
    let mut sampler = Sampler::new(&data, options()).unwrap();
    for index in [3, 12] {
        assert!(sampler.seek(Cursor { epoch: 0, index }).is_err());
    }
    assert!(sampler.seek(Cursor { epoch: 4, index: 8 }).is_ok());
}

/// The micro-batch computed before the first step is as long as any of the run, and computing it
/// does not move the sampler.
#[test]
fn no_micro_batch_is_longer_than_the_longest() {
    let data = dataset(&[3, 6, 1, 5, 0, 2, 6, 4, 1, 3, 5]);
    for packing in [false, true] {
        let options = SamplerOptions { packing, ..options() };
        let all = steps(&data, options.clone());
        let mut sampler = Sampler::new(&data, options).unwrap();
        let longest = sampler.longest_micro_batch();
        let lengths: Vec<usize> =
            all.iter().flat_map(|step| &step.micro_batches).map(|batch| batch.len()).collect();
        assert!(lengths.iter().all(|length| *length <= longest.len()), "{lengths:?}, {}", longest.len());
        assert!(longest.num_samples >= 2 && longest.len() > 10, "{longest:?}");
        let first = all[0].micro_batches.iter().map(|batch| batch.len()).max();
        assert_eq!((sampler.widest_of_next_step(), sampler.widest_of_next_step()), (first, first));
        let again: Vec<_> = std::iter::from_fn(|| sampler.next_step()).collect();
        assert_eq!(again, all);
        assert_eq!(sampler.widest_of_next_step(), None);
    }
}

/// Examples of so many tokens, with the group of each.
#[derive(Debug)]
struct Grouped(Vec<Example>);

impl Grouped {
    fn new(rows: &[(usize, Option<u32>)]) -> Self {
        let example = |(index, &(len, group)): (usize, &(usize, Option<u32>))| Example {
            ids: vec![index as u32; len],
            trained: vec![true; len],
            origin: Origin { file: std::path::Path::new("x").into(), row: RowOrigin::Line(index as u64) },
            group,
            role: Role::Plain,
        };
        Grouped(rows.iter().enumerate().map(example).collect())
    }
}

impl ExampleSource for Grouped {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn length(&self, index: usize) -> usize {
        self.0[index].ids.len()
    }

    fn group(&self, index: usize) -> Option<u32> {
        self.0[index].group
    }

    fn example(&self, index: usize) -> Cow<'_, Example> {
        // As a source that reads its rows from a file.
        Cow::Owned(self.0[index].clone())
    }

    fn digest(&self) -> blake3::Hash {
        blake3::hash(&[])
    }
}

/// Pairs share a micro-batch, in their order, whatever is shuffled or packed; a row without a group
/// goes where it likes.
#[test]
fn a_group_stays_in_one_micro_batch() {
    let rows: Vec<(usize, Option<u32>)> =
        (0..30).map(|row| (3 + row % 5, if row < 20 { Some(row as u32 / 2) } else { None })).collect();
    let source = Grouped::new(&rows);
    for (shuffle, packing) in [(false, false), (true, false), (false, true), (true, true)] {
        let options = SamplerOptions { shuffle, packing, max_seq_len: 16, epochs: 2.0, ..options() };
        let mut sampler = Sampler::new(&source, options).unwrap();
        let mut seen = [0; 30];
        while let Some(step) = sampler.next_step() {
            for batch in &step.micro_batches {
                let actual: Vec<usize> =
                    batch.samples.iter().map(|sample| batch.ids[sample.start] as usize).collect();
                for (at, &row) in actual.iter().enumerate() {
                    seen[row] += 1;
                    if row < 20 && row % 2 == 0 {
                        assert_eq!(actual.get(at + 1), Some(&(row + 1)), "{shuffle} {packing}: {actual:?}");
                    }
                }
            }
        }
        assert_eq!(seen, [2; 30], "shuffle {shuffle}, packing {packing}");
    }
    // A group that no bin holds has one of its own.
    let wide = Grouped::new(&[(10, Some(0)), (10, Some(0)), (4, None)]);
    let options = SamplerOptions { packing: true, max_seq_len: 16, ..options() };
    assert_eq!(Sampler::new(&wide, options).unwrap().num_units(), 2);
}
