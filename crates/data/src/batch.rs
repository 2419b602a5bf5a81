//! Micro-batches without padding, made of examples.
//!
//! A micro-batch concatenates the tokens of its rows. Attention and positions restart at each
//! segment, so no sample sees another. A target is the next token of the same segment if that token
//! is trained. All functions are pure; the sampler chooses the rows.

use std::borrow::{Borrow, Cow};

use super::encode::Example;
use super::role::Role;
use crate::IGNORE;

/// One sample inside a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sample {
    /// Index of its first token.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Its part in the objective.
    pub role: Role,
    /// Index of its example in the data set.
    pub example: u32,
}

/// One micro-batch: T tokens of one or more samples.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Token to predict at each position, `[T]`, or [`IGNORE`], as always at the end of a segment.
    pub targets: Vec<u32>,
    /// The samples, in order; together they cover the T tokens.
    pub samples: Vec<Sample>,
    /// Index of the first token in the step's global batch. Dropout is keyed by it and so does not
    /// depend on how the batch is split.
    pub first_token: u64,
    /// Number of samples.
    pub num_samples: usize,
}

impl Batch {
    /// Makes the micro-batch of `examples`, which begins at token `first_token` of its step. Each
    /// example has its index in the data set before it.
    pub fn new<E: Borrow<Example>>(examples: impl IntoIterator<Item = (u32, E)>, first_token: u64) -> Self {
        let mut batch = Batch { first_token, ..Batch::default() };
        for (index, example) in examples {
            let example = example.borrow();
            let len = example.ids.len();
            batch.samples.push(Sample { start: batch.ids.len(), len, role: example.role, example: index });
            batch.ids.extend_from_slice(&example.ids);
            let next = example.ids.iter().zip(&example.trained).skip(1);
            batch.targets.extend(next.map(|(id, trained)| if *trained { *id } else { IGNORE }));
            if len > 0 {
                batch.targets.push(IGNORE);
            }
            batch.num_samples += 1;
        }
        batch
    }

    /// The same tokens without targets and roles: no loss, and gradients of zero.
    pub fn without_targets(&self) -> Self {
        let plain = |sample: &Sample| Sample { role: Role::Plain, ..*sample };
        Batch {
            targets: vec![IGNORE; self.targets.len()],
            samples: self.samples.iter().map(plain).collect(),
            ..self.clone()
        }
    }

    /// The samples whose role passes `is_part`, with their tokens; `None` without such a sample.
    pub fn only(&self, is_part: impl Fn(Role) -> bool) -> Option<Self> {
        let mut part = Batch { first_token: self.first_token, ..Batch::default() };
        for sample in self.samples.iter().filter(|sample| is_part(sample.role)) {
            let tokens = sample.start..sample.start + sample.len;
            part.samples.push(Sample { start: part.ids.len(), ..*sample });
            part.ids.extend_from_slice(&self.ids[tokens.clone()]);
            part.targets.extend_from_slice(&self.targets[tokens]);
            part.num_samples += 1;
        }
        (part.num_samples > 0).then_some(part)
    }

    /// Number of tokens, T.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns true if the batch has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Number of positions that carry loss.
    pub fn valid(&self) -> u64 {
        self.targets.iter().filter(|target| **target != IGNORE).count() as u64
    }
}

/// The micro-batches of one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The micro-batches, in the order of their `first_token`.
    pub micro_batches: Vec<Batch>,
    /// Number of positions that carry loss in all micro-batches: the denominator of the step's
    /// loss.
    pub valid: u64,
    /// Number of tokens in all micro-batches.
    pub tokens: u64,
    /// Number of epochs completed after this step.
    pub epoch: f64,
}

impl Step {
    /// A step of these micro-batches; `epoch` is the progress after it.
    pub fn new(micro_batches: Vec<Batch>, epoch: f64) -> Self {
        let valid = micro_batches.iter().map(Batch::valid).sum();
        let tokens = micro_batches.iter().map(|batch| batch.len() as u64).sum();
        Step { micro_batches, valid, tokens, epoch }
    }

    /// Returns those of the [micro-batches](local_micro_batches) that `rank` of `size` computes.
    pub fn local_micro_batches(&self, rank: usize, size: usize) -> Vec<Cow<'_, Batch>> {
        local_micro_batches(&self.micro_batches, rank, size)
    }
}

/// Returns the micro-batches of `rank` among the `size` ranks that get different rows: every
/// `size`-th one. A rank without one in the last round gets one without targets, so all ranks have
/// equally many.
pub fn local_micro_batches(batches: &[Batch], rank: usize, size: usize) -> Vec<Cow<'_, Batch>> {
    let idle = || batches.first().map(|batch| Cow::Owned(batch.without_targets()));
    let turns = batches.len().div_ceil(size);
    let turn = |i| batches.get(i * size + rank).map(Cow::Borrowed).or_else(idle);
    (0..turns).filter_map(turn).collect()
}

/// The examples that stay together: neighbours of one group, or an example by itself.
pub(super) fn groups_of(examples: &[Example]) -> impl Iterator<Item = &[Example]> {
    examples.chunk_by(|a, b| a.group.is_some() && a.group == b.group)
}

/// Micro-batches of at most `max_tokens` tokens, in the order of the examples, for evaluation. A
/// group of examples shares one micro-batch; a longer group gets a micro-batch of its own.
pub fn in_order(examples: &[Example], max_tokens: usize) -> impl Iterator<Item = Batch> {
    let mut groups = groups_of(examples).peekable();
    let (mut next, mut first_token) = (0, 0);
    std::iter::from_fn(move || {
        let (start, mut tokens) = (next, 0);
        let len_of = |group: &[Example]| group.iter().map(|example| example.ids.len()).sum::<usize>();
        while let Some(group) = groups.next_if(|group| next == start || tokens + len_of(group) <= max_tokens)
        {
            tokens += len_of(group);
            next += group.len();
        }
        if start == next {
            return None;
        }
        // A data set has at most `u32::MAX` examples: the sampler refuses more.
        let indices = (start..next).map(|index| u32::try_from(index).unwrap_or(u32::MAX));
        let batch = Batch::new(indices.zip(&examples[start..next]), first_token);
        first_token += batch.len() as u64;
        Some(batch)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Origin, RowOrigin};
    use std::path::Path;
    use std::sync::Arc;

    fn example(ids: &[u32], trained: &[u8]) -> Example {
        Example {
            ids: ids.to_vec(),
            trained: trained.iter().map(|t| *t == 1).collect(),
            origin: Origin { file: Arc::from(Path::new("x")), row: RowOrigin::Line(1) },
            group: None,
            role: Role::Plain,
        }
    }

    #[test]
    fn targets_stay_inside_their_segment() {
        let rows = [example(&[5, 6, 7], &[0, 1, 1]), example(&[8], &[1]), example(&[9, 10, 11], &[1, 0, 1])];
        let batch = Batch::new((7..).zip(&rows), 40);
        assert_eq!(batch.ids, [5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(batch.targets, [6, 7, IGNORE, IGNORE, IGNORE, 11, IGNORE]);
        let segments: Vec<_> = batch.samples.iter().map(|s| (s.start, s.len)).collect();
        assert_eq!(segments, [(0, 3), (3, 1), (4, 3)]);
        assert_eq!((batch.valid(), batch.num_samples, batch.first_token), (3, 3, 40));
        assert_eq!(batch.samples.iter().map(|s| s.example).collect::<Vec<_>>(), [7, 8, 9]);
    }

    #[test]
    fn evaluation_takes_every_row_once_in_order() {
        let rows: Vec<_> = [3, 4, 9, 1, 1].iter().map(|n| example(&vec![2; *n], &vec![1; *n])).collect();
        let batches: Vec<_> = in_order(&rows, 7).collect();
        assert_eq!(batches.iter().map(|b| b.num_samples).collect::<Vec<_>>(), [2, 1, 2]);
        assert_eq!(batches.iter().map(|b| b.first_token).collect::<Vec<_>>(), [0, 7, 16]);
    }

    #[test]
    fn evaluation_keeps_pairs_together() {
        let side = |n: usize, group: u32, role: Role| Example {
            group: Some(group),
            role,
            ..example(&vec![2; n], &vec![1; n])
        };
        let pair = |group, n, m| [side(n, group, Role::Chosen), side(m, group, Role::Rejected)];
        let rows = [pair(0, 2, 3), pair(1, 1, 3), pair(2, 6, 6), pair(3, 1, 1)].concat();
        let batches: Vec<_> = in_order(&rows, 8).collect();
        assert_eq!(batches.iter().map(Batch::len).collect::<Vec<_>>(), [5, 4, 12, 2]);
        for (number, sample) in batches.iter().flat_map(|batch| &batch.samples).enumerate() {
            assert_eq!((sample.example as usize, sample.role), (number, rows[number].role));
        }
    }
}
