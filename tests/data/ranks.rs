//! Steps dealt out to ranks: every sample once an epoch, in an order that does not know how many ranks there are, and
//! as many tokens on each.

use std::collections::BTreeMap;

use finetune::data::source::{Row, Source};
use finetune::data::{Batch, DataOptions, Dataset, Origin, Place, Sampler, SamplerOptions, Step, TrainOn};

use crate::shared_data::shared;
use crate::{template, tokenizer};

const MAX_SEQ_LEN: usize = 512;

/// Rows of about these numbers of tokens, told apart by their first ones.
fn dataset(lengths: &[usize]) -> Dataset {
    let tokenizer = tokenizer("tiny-llama");
    let row = |(index, length): (usize, &usize)| {
        let text = serde_json::Value::String(format!("{index:05}{}", " .".repeat(*length)));
        Row {
            value: serde_json::Map::from_iter([("text".to_owned(), text)]),
            origin: Origin { file: std::path::Path::new("x").into(), place: Place::Line(index as u64) },
            document: false,
        }
    };
    let source = Source { rows: lengths.iter().enumerate().map(row).collect(), ..Source::default() };
    let options = DataOptions { train_on: TrainOn::All, max_seq_len: MAX_SEQ_LEN, ..DataOptions::default() };
    Dataset::from_source(source, &options, &tokenizer, None).unwrap()
}

/// Lengths as those of chats: log-normal, most short, some cut at what is allowed.
fn skewed(rows: usize, median: f64, spread: f64) -> Vec<usize> {
    // The generator of Knuth's MMIX: the same numbers everywhere.
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
    let options = SamplerOptions {
        seed: 5,
        shuffle,
        packing,
        max_seq_len: MAX_SEQ_LEN,
        micro_batch_size,
        gradient_accumulation_steps: turns,
        epochs: 1.0,
        max_steps: None,
    };
    let mut sampler = Sampler::new(data, options).unwrap();
    std::iter::from_fn(|| sampler.next_step()).collect()
}

/// The micro-batches of each rank that carry data, in the order in which it takes them.
fn dealt(steps: &[Step], ranks: usize) -> Vec<Vec<Batch>> {
    let of_rank = |rank| {
        let turns = steps.iter().flat_map(|step| step.turns(rank, ranks));
        turns.map(|batch| batch.into_owned()).filter(|batch| batch.valid() > 0).collect()
    };
    (0..ranks).map(of_rank).collect()
}

/// How much more than the mean the fullest rank has, in percent.
fn imbalance(dealt: &[Vec<Batch>]) -> f64 {
    let tokens: Vec<f64> = dealt.iter().map(|rank| rank.iter().map(Batch::len).sum::<usize>() as f64).collect();
    let mean = tokens.iter().sum::<f64>() / tokens.len() as f64;
    let most = tokens.iter().fold(0.0, |a: f64, b| a.max(*b));
    let least = tokens.iter().fold(f64::INFINITY, |a: f64, b| a.min(*b));
    100.0 * (most - least) / mean
}

#[test]
fn explore() {
    for (name, lengths) in [
        ("chat 2000", skewed(2000, 60.0, 1.0)),
        ("chat 10000", skewed(10000, 60.0, 1.0)),
        ("long 2000", skewed(2000, 300.0, 0.5)),
        ("long 10000", skewed(10000, 300.0, 0.5)),
    ] {
        let data = dataset(&lengths);
        for packing in [true, false] {
            for shuffle in [true, false] {
            for (micro, all) in [(1, 12), (2, 12), (1, 48)] {
                let steps = steps(&data, packing, shuffle, micro, all);
                let mut line = format!("{name} packing {packing} shuffle {shuffle} {micro}x{all}: {} steps;", steps.len());
                for ranks in [2, 3, 4] {
                    let dealt = dealt(&steps, ranks);
                    // wait: sum over steps of max over ranks / mean
                    let mut wait = 0.0; let mut sum = 0.0;
                    for step in &steps {
                        let t: Vec<f64> = (0..ranks).map(|r| step.turns(r, ranks).iter().map(|b| b.len()).sum::<usize>() as f64).collect();
                        wait += t.iter().fold(0.0, |a: f64, b| a.max(*b)); sum += t.iter().sum::<f64>() / ranks as f64;
                    }
                    line += &format!(" {ranks}: {:.2} % (steps {:.2} %)", imbalance(&dealt), 100.0 * (wait / sum - 1.0));
                }
                println!("{line}");
            }
            }
        }
    }
}
