//! Decides which rows share a step, and the order of steps.
//!
//! The order is a pure function of (seed, epoch, index): a run resumes from a [`Cursor`] of two
//! numbers. Only the product of micro-batch size and accumulation steps decides which rows share a
//! step.
//!
//! A *unit* is a row or a [group](ExampleSource::group) of rows, or with packing a bin of them,
//! packed once in a shuffled order; epochs shuffle the units. Shuffled units are sorted by length
//! inside windows of 64 global batches and cut into batches. Then the batches are shuffled, and
//! each in itself. So units of similar length share a step, and its micro-batches and ranks take
//! equal time. `shuffle = false` keeps the order of the files. The last, smaller batch of an epoch
//! is a step of its own and stays last. Steps are counted like in transformers: `ceil(epochs x
//! steps per epoch)`; a given `max_steps` overrides that.

use serde::{Deserialize, Serialize};

use super::batch::{Batch, Step};
use super::example_source::ExampleSource;
use super::pack::{best_fit, next_fit};
use crate::error::{Error, Result};
use crate::runtime::rng::{GOLDEN_GAMMA, splitmix64};

/// Number of global batches that are sorted by length together.
const WINDOW_BATCHES: usize = 64;

/// Options of the sampler, with the names of the recipe.
#[derive(Debug, Clone)]
pub struct SamplerOptions {
    /// Seed of the order.
    pub seed: u64,
    /// True to shuffle rows; else they come in file order.
    pub shuffle: bool,
    /// True to pack rows into bins of `max_seq_len` tokens.
    pub packing: bool,
    /// Maximum tokens of a bin.
    pub max_seq_len: usize,
    /// Number of units in a micro-batch.
    pub micro_batch_size: usize,
    /// Number of micro-batches in a step.
    pub gradient_accumulation_steps: usize,
    /// Number of passes over the data, perhaps with a fraction.
    pub epochs: f64,
    /// Number of optimizer steps; overrides `epochs`.
    pub max_steps: Option<u64>,
}

/// Position of a run in its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cursor {
    /// Number of completed epochs.
    pub epoch: u64,
    /// Number of units of this epoch already used.
    pub index: u64,
}

/// Iterates over the steps of a run.
#[derive(Debug)]
pub struct Sampler<'a> {
    examples: &'a dyn ExampleSource,
    options: SamplerOptions,
    units: Vec<Vec<u32>>,
    lengths: Vec<usize>,
    cursor: Cursor,
    /// The order of `ordered_epoch`.
    order: Vec<u32>,
    ordered_epoch: Option<u64>,
}

impl<'a> Sampler<'a> {
    /// Makes a sampler at the beginning of the run.
    ///
    /// # Errors
    /// Fails if an option is zero or not a number, or a row does not fit into a bin.
    pub fn new(examples: &'a dyn ExampleSource, options: SamplerOptions) -> Result<Self> {
        let zero = |key: &str| Err(Error::user(format!("`{key}` is 0")).because("accepted: 1 and more"));
        if options.micro_batch_size == 0 {
            return zero("train.micro_batch_size");
        }
        if options.gradient_accumulation_steps == 0 {
            return zero("train.gradient_accumulation_steps");
        }
        if options.max_steps == Some(0) {
            return zero("train.max_steps");
        }
        if !(options.epochs.is_finite() && options.epochs > 0.0) && options.max_steps.is_none() {
            return Err(Error::user(format!("`train.epochs` is {}", options.epochs))
                .because("accepted: a number above 0, perhaps with a fraction"));
        }
        let count = u32::try_from(examples.len()).map_err(|_| {
            Error::user(format!("cannot train on {} rows", examples.len()))
                .because("accepted: up to 4,294,967,295")
                .hint("set `limit` for a source in `[[data.train]]`")
        })?;
        let rows: Vec<usize> = (0..examples.len()).map(|row| examples.length(row)).collect();
        if let Some(long) = rows.iter().find(|len| options.packing && **len > options.max_seq_len) {
            let why = format!("a row has {long} tokens, a bin {}", options.max_seq_len);
            return Err(Error::internal("cannot pack the rows").because(why));
        }
        let units = units(&groups(examples, count), &rows, &options);
        let lengths = units.iter().map(|unit| unit.iter().map(|row| rows[*row as usize]).sum()).collect();
        let cursor = Cursor::default();
        Ok(Sampler { examples, options, units, lengths, cursor, order: Vec::new(), ordered_epoch: None })
    }

    /// Number of units of an epoch: rows, or bins of rows.
    pub fn num_units(&self) -> usize {
        self.units.len()
    }

    /// Number of optimizer steps of a whole epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.units.len().div_ceil(self.global_batch()) as u64
    }

    /// Number of optimizer steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        match self.options.max_steps {
            Some(steps) => steps,
            // A hair less, so that 0.1 x 30 is 3 and not 4.
            None => ((self.options.epochs * self.steps_per_epoch() as f64 - 1e-9).ceil() as u64).max(1),
        }
    }

    /// Number of steps already returned.
    pub fn steps_done(&self) -> u64 {
        self.cursor.epoch * self.steps_per_epoch() + self.cursor.index.div_ceil(self.global_batch() as u64)
    }

    /// The micro-batch of the longest units; no micro-batch of any step has more tokens.
    pub fn longest_micro_batch(&self) -> Batch {
        let mut units: Vec<usize> = (0..self.units.len()).collect();
        // Stable: the first of equal ones.
        units.sort_by_key(|unit| std::cmp::Reverse(self.lengths[*unit]));
        let longest = units.iter().take(self.options.micro_batch_size);
        self.batch(longest.map(|unit| &self.units[*unit]), 0)
    }

    /// Number of tokens of the largest micro-batch of the next step; `None` at the end of the run.
    pub fn widest_of_next_step(&mut self) -> Option<usize> {
        let cursor = self.cursor;
        let step = self.next_step();
        self.cursor = cursor;
        step?.micro_batches.iter().map(Batch::len).max()
    }

    /// The position of the next step.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Continues at a cursor of the same data and options.
    ///
    /// # Errors
    /// Fails if the cursor is not at the beginning of a step of this data.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let (batch, units) = (self.global_batch() as u64, self.units.len() as u64);
        if cursor.index >= units || !cursor.index.is_multiple_of(batch) {
            return Err(Error::user("cannot continue at the saved position in the data")
                .because(format!("it is row {} of epoch {}", cursor.index, cursor.epoch))
                .because(format!(
                    "an epoch has {units} rows in steps of {batch}: data, batch size or packing differ"
                ))
                .hint("resume with the recipe and the data of the first run"));
        }
        self.cursor = cursor;
        Ok(())
    }

    /// The next step; `None` at the end of the run.
    pub fn next_step(&mut self) -> Option<Step> {
        if self.steps_done() >= self.total_steps() {
            return None;
        }
        if self.ordered_epoch != Some(self.cursor.epoch) {
            self.order = self.epoch_order(self.cursor.epoch);
            self.ordered_epoch = Some(self.cursor.epoch);
        }
        let start = usize::try_from(self.cursor.index).ok()?;
        let end = (start + self.global_batch()).min(self.order.len());
        let mut first_token = 0;
        let mut micro_batches = Vec::new();
        for units in self.order[start..end].chunks(self.options.micro_batch_size) {
            let batch = self.batch(units.iter().map(|unit| &self.units[*unit as usize]), first_token);
            first_token += batch.len() as u64;
            micro_batches.push(batch);
        }
        let epoch = self.cursor.epoch as f64 + end as f64 / self.order.len() as f64;
        self.cursor = if end == self.order.len() {
            Cursor { epoch: self.cursor.epoch + 1, index: 0 }
        } else {
            Cursor { epoch: self.cursor.epoch, index: end as u64 }
        };
        Some(Step::new(micro_batches, epoch))
    }

    fn batch<'b>(&self, units: impl Iterator<Item = &'b Vec<u32>>, first_token: u64) -> Batch {
        let rows = units.flatten();
        Batch::new(rows.map(|row| (*row, self.examples.example(*row as usize))), first_token)
    }

    fn global_batch(&self) -> usize {
        self.options.micro_batch_size.saturating_mul(self.options.gradient_accumulation_steps)
    }

    fn epoch_order(&self, epoch: u64) -> Vec<u32> {
        let mut order: Vec<u32> = (0u32..).take(self.units.len()).collect();
        if !self.options.shuffle {
            return order;
        }
        Random::new(self.options.seed, epoch).shuffle(&mut order);
        self.group_by_length(&mut order, epoch);
        order
    }

    fn group_by_length(&self, order: &mut Vec<u32>, epoch: u64) {
        let batch = self.global_batch();
        let whole = order.len() / batch;
        let rest = order.split_off(whole * batch);
        for window in order.chunks_mut(batch.saturating_mul(WINDOW_BATCHES)) {
            // Stable: rows of one length stay as shuffled.
            window.sort_by_key(|unit| self.lengths[*unit as usize]);
        }
        let mut batches: Vec<u32> = (0u32..).take(whole).collect();
        let mut random = Random::new(self.options.seed, epoch ^ Random::BATCHES);
        random.shuffle(&mut batches);
        for units in order.chunks_mut(batch) {
            // In sorted order, the last rank would get the longest units of every step.
            random.shuffle(units);
        }
        let sorted = std::mem::take(order);
        order.extend(batches.iter().flat_map(|index| &sorted[*index as usize * batch..][..batch]));
        order.extend(rest);
    }
}

/// Returns the rows that stay together: neighbours of one group, or a row by itself.
fn groups(examples: &dyn ExampleSource, count: u32) -> Vec<Vec<u32>> {
    let mut groups: Vec<Vec<u32>> = Vec::with_capacity(count as usize);
    let mut last = None;
    for row in 0..count {
        let group = examples.group(row as usize);
        match groups.last_mut() {
            Some(members) if group.is_some() && group == last => members.push(row),
            _ => groups.push(vec![row]),
        }
        last = group;
    }
    groups
}

/// Returns the rows of each unit: a group, or with packing a bin of groups. A group with more
/// tokens than a bin has a bin of its own.
fn units(groups: &[Vec<u32>], rows: &[usize], options: &SamplerOptions) -> Vec<Vec<u32>> {
    if !options.packing {
        return groups.to_vec();
    }
    let lengths: Vec<usize> =
        groups.iter().map(|group| group.iter().map(|row| rows[*row as usize]).sum()).collect();
    let bins = if options.shuffle {
        let mut order: Vec<u32> = (0u32..).take(groups.len()).collect();
        Random::new(options.seed, Random::PACKING).shuffle(&mut order);
        best_fit(&order, &lengths, options.max_seq_len)
    } else {
        next_fit(&lengths, options.max_seq_len)
    };
    let rows_of =
        |bin: Vec<u32>| bin.into_iter().flat_map(|group| groups[group as usize].iter().copied()).collect();
    bins.into_iter().map(rows_of).collect()
}

/// The SplitMix64 generator, one stream for each (seed, use). No crate, so that no update of one
/// changes the order of data.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    /// The stream for packing.
    const PACKING: u64 = 1 << 63;
    /// The bit of streams that shuffle batches.
    const BATCHES: u64 = 1 << 62;

    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut first = Random(seed);
        let mixed = first.next() ^ Random(stream ^ 0x6a09_e667_f3bc_c908).next();
        Random(mixed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN_GAMMA);
        splitmix64(self.0)
    }

    /// A number below `n`, without bias that matters for `n` far below 2^64 (Lemire's
    /// multiplication).
    pub(super) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// Shuffles in place (Fisher and Yates).
    fn shuffle(&mut self, items: &mut [u32]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The first outputs for the seed 1234567, as in the reference implementation by Vigna.
        let mut random = Random(1_234_567);
        let numbers: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(
            numbers,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
