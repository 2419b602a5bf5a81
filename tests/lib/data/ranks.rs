//! Distribution of steps to ranks: every sample once an epoch, in an order that is independent of
//! the number of ranks, with equally many tokens on each.

use std::collections::BTreeMap;

use finetune::data::source::{DataFile, RawRow};
use finetune::data::{Batch, DataOptions, Dataset, Origin, RowOrigin, Sampler, SamplerOptions, Step};
use finetune::recipe::TrainOn;
use finetune::recipe::enums::OnBadRow;

use super::shared_data::shared;
use super::{template, tokenizer};

const MAX_SEQ_LEN: usize = 512;

/// Rows of about these numbers of tokens, distinguished by their first tokens.
fn dataset(lengths: &[usize]) -> Dataset {
    let tokenizer = tokenizer("tiny-llama");
    let row = |(index, length): (usize, &usize)| {
        let text = serde_json::Value::String(format!("{index:05}{}", " .".repeat(*length)));
        RawRow {
            value: serde_json::Map::from_iter([("text".to_owned(), text)]),
            origin: Origin { file: std::path::Path::new("x").into(), row: RowOrigin::Line(index as u64) },
            document: false,
            format: None,
        }
    };
    let source = DataFile { rows: lengths.iter().enumerate().map(row).collect(), ..DataFile::default() };
    let options = DataOptions { train_on: TrainOn::All, max_seq_len: MAX_SEQ_LEN, ..DataOptions::default() };
    Dataset::from_source(source, &options, &tokenizer, None).unwrap()
}

/// Lengths distributed like those of chats: log-normal, most short, some truncated to the maximum.
fn skewed(rows: usize, median: f64, spread: f64) -> Vec<usize> {
    // Knuth's MMIX generator gives the same numbers everywhere.
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut normal = || {
        let (u, v) = (1.0 - uniform(), uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    (0..rows).map(|_| (median * (spread * normal()).exp()).min(MAX_SEQ_LEN as f64) as usize).collect()
}

fn steps(data: &Dataset, packing: bool, shuffle: bool, micro_batch_size: usize, turns: usize) -> Vec<Step> {
    steps_of(data, MAX_SEQ_LEN, packing, shuffle, micro_batch_size, turns)
}

fn steps_of(
    data: &Dataset,
    max_seq_len: usize,
    packing: bool,
    shuffle: bool,
    micro_batch_size: usize,
    turns: usize,
) -> Vec<Step> {
    let options = SamplerOptions {
        seed: 5,
        shuffle,
        packing,
        max_seq_len,
        micro_batch_size,
        gradient_accumulation_steps: turns,
        epochs: 1.0,
        max_steps: None,
    };
    let mut sampler = Sampler::new(data, options).unwrap();
    std::iter::from_fn(|| sampler.next_step()).collect()
}

/// Returns each rank's micro-batches with data, in order.
fn dealt(steps: &[Step], ranks: usize) -> Vec<Vec<Batch>> {
    let of_rank = |rank| {
        let turns = steps.iter().flat_map(|step| step.local_micro_batches(rank, ranks));
        turns.map(|batch| batch.into_owned()).filter(|batch| batch.valid() > 0).collect()
    };
    (0..ranks).map(of_rank).collect()
}

/// Returns the difference between the largest and the smallest token count, in percent of the mean.
fn spread(tokens: &[usize]) -> f64 {
    let mean = tokens.iter().sum::<usize>() as f64 / tokens.len() as f64;
    100.0 * (tokens.iter().max().unwrap() - tokens.iter().min().unwrap()) as f64 / mean
}

/// Returns two figures of an epoch: the spread of the ranks' tokens, and by how many percent the
/// fullest rank of each step exceeds the mean. The others wait for that long.
fn imbalance(steps: &[Step], ranks: usize) -> [f64; 2] {
    let (mut of_ranks, mut longest, mut all) = (vec![0; ranks], 0, 0);
    for step in steps {
        let tokens: Vec<usize> = (0..ranks)
            .map(|rank| step.local_micro_batches(rank, ranks).iter().map(|batch| batch.len()).sum())
            .collect();
        of_ranks.iter_mut().zip(&tokens).for_each(|(sum, tokens)| *sum += tokens);
        longest += tokens.iter().max().unwrap();
        all += tokens.iter().sum::<usize>();
    }
    [spread(&of_ranks), 100.0 * ((longest * ranks) as f64 / all as f64 - 1.0)]
}

/// Keeps full steps: only in the last step of an epoch may ranks have different numbers of
/// micro-batches.
fn whole(mut steps: Vec<Step>, turns: usize) -> Vec<Step> {
    steps.retain(|step| step.micro_batches.len() == turns);
    steps
}

fn rows(batch: &Batch) -> Vec<&[u32]> {
    batch.samples.iter().map(|s| &batch.ids[s.start..s.start + s.len]).collect()
}

#[test]
fn every_row_comes_once_over_the_ranks() {
    // 97 is prime: every split has a short last step, some of one micro-batch.
    let data = dataset(&skewed(97, 60.0, 1.0));
    let wanted: BTreeMap<&[u32], usize> = data.examples().iter().map(|e| (&e.ids[..], 1)).collect();
    assert_eq!(wanted.len(), 97);
    for (packing, shuffle) in [(true, true), (true, false), (false, true), (false, false)] {
        for (micro, turns) in [(1, 12), (2, 12), (1, 24), (4, 12)] {
            let steps = steps(&data, packing, shuffle, micro, turns);
            let last = steps.last().unwrap();
            assert!(packing || last.micro_batches.len() < turns, "the last step is whole");
            assert_eq!(last.epoch, 1.0);
            for ranks in 1..=4 {
                let dealt = dealt(&steps, ranks);
                let mut counts: BTreeMap<&[u32], usize> = BTreeMap::new();
                dealt.iter().flatten().flat_map(rows).for_each(|row| *counts.entry(row).or_default() += 1);
                assert!(counts == wanted, "{ranks} ranks, packing {packing}, {micro} x {turns}");
                // All ranks run equally many micro-batches; a rank without data runs one of zero
                // weight.
                for step in &steps {
                    let turns: Vec<_> =
                        (0..ranks).map(|rank| step.local_micro_batches(rank, ranks)).collect();
                    assert!(
                        turns.iter().all(|turns| turns.len() == step.micro_batches.len().div_ceil(ranks))
                    );
                    let valid: u64 = turns.iter().flatten().map(|batch| batch.valid()).sum();
                    assert_eq!(valid, step.valid);
                }
            }
        }
    }
}

/// Each step trains the same samples at the same positions of the global batch, for any number of
/// ranks.
#[test]
fn the_order_does_not_know_how_many_ranks_there_are() {
    let data = dataset(&skewed(200, 60.0, 1.0));
    for packing in [true, false] {
        let order = |ranks| {
            // Each rank accumulates its share of 12.
            let steps = steps(&data, packing, true, 1, 12);
            let of_step = |step: &Step| {
                let turns = (0..ranks).flat_map(|rank| step.local_micro_batches(rank, ranks));
                let batches = turns.filter(|batch| batch.valid() > 0);
                batches.map(|batch| (batch.first_token, batch.into_owned())).collect::<BTreeMap<_, _>>()
            };
            steps.iter().map(of_step).collect::<Vec<_>>()
        };
        let alone = order(1);
        assert!(alone.len() > 2);
        for ranks in [2, 3, 4] {
            assert!(order(ranks) == alone, "{ranks} ranks, packing {packing}");
        }
    }
}

#[test]
fn ranks_have_as_many_tokens() {
    for (name, lengths) in [
        ("short chats", skewed(3000, 60.0, 1.0)),
        // Rows of half the maximum and more: many bins hold one row and a gap that fits no other.
        ("long documents", skewed(3000, 300.0, 0.5)),
    ] {
        let data = dataset(&lengths);
        for packing in [true, false] {
            for (micro, turns) in [(1, 12), (2, 12), (1, 48)] {
                let steps = whole(steps(&data, packing, true, micro, turns), turns);
                assert!(steps.len() >= 15, "{}", steps.len());
                for ranks in [2, 3, 4] {
                    let [over_the_epoch, in_a_step] = imbalance(&steps, ranks);
                    let case = format!("{name}, {ranks} ranks, packing {packing}, {micro} x {turns}");
                    eprintln!("{case}: {over_the_epoch:.2} % over the epoch, {in_a_step:.2} % in a step");
                    assert!(over_the_epoch <= 2.0, "{case}: {over_the_epoch} % over the epoch");
                    assert!(in_a_step <= 2.0, "{case}: {in_a_step} % in a step");
                }
            }
        }
    }
}

#[test]
fn ranks_have_as_many_tokens_of_real_rows() {
    let Some(shared) = shared() else { return };
    let tokenizer = tokenizer("tiny-qwen3");
    let template = template(&tokenizer);
    for file in ["gsm8k_train.jsonl", "dolly_pairs.jsonl", "messages_sgd.jsonl", "tinystories.jsonl"] {
        let (max_seq_len, vocab_size) = (1024, tokenizer.vocab_size());
        let options =
            DataOptions { max_seq_len, vocab_size, on_bad_row: OnBadRow::Skip, ..DataOptions::default() };
        let data =
            Dataset::load(&[shared.join("data").join(file)], &options, &tokenizer, Some(&template)).unwrap();
        let steps = whole(steps_of(&data, max_seq_len, true, true, 1, 12), 12);
        for ranks in [2, 3, 4] {
            let [over_the_epoch, in_a_step] = imbalance(&steps, ranks);
            let case = format!("{file}, {} steps, {ranks} ranks", steps.len());
            eprintln!("{case}: {over_the_epoch:.2} % over the epoch, {in_a_step:.2} % in a step");
            assert!(over_the_epoch <= 2.0 && in_a_step <= 2.0, "{case}: {over_the_epoch} %, {in_a_step} %");
        }
    }
}
