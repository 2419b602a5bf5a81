//! Finds ends of answers that a run cannot learn: their row of the output layer equals those of
//! tokens that the base never saw.
//!
//! The logit of a token is the product of its row with the hidden state. No adapter before the
//! output layer can distinguish two tokens with the same row. The loss of such an end stays at the
//! logarithm of their number, and the trained model never stops. Base models have such rows for
//! reserved tokens, and small models for an EOS that ended no text.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;

use super::Plan;
use crate::data::Example;
use crate::error::Result;
use crate::weights::{EMBED_TOKENS, EMBED_TOKENS_MODULE, LM_HEAD, LM_HEAD_MODULE, ModelFiles};

/// The distance of two rows, as a share of the length of one, below which a product with a hidden
/// state cannot distinguish them. In stories3M and stories260K, 171 and 248 rows are that near to
/// the row of `</s>`, and none is near to the row of a trained token.
const SAME_ROW: f32 = 0.1;
/// Number of tokens with the same row from which an end counts as unlearnable; a few are synonyms.
const MANY: usize = 8;
/// Checks an end only if at least one answer in so many ends with it.
const RARE: usize = 10;
/// Elements of the output layer in memory at once.
const BLOCK: usize = 1 << 20;

impl Plan {
    /// Returns a warning for each token that ends answers and that the run cannot learn to predict.
    ///
    /// # Errors
    /// The output layer cannot be read.
    pub fn unlearnable_ends(&self) -> Result<Vec<String>> {
        let Some(files) = self.base.files.as_ref().filter(|files| !files.is_header_only()) else {
            return Ok(Vec::new());
        };
        let ends = self.frozen_ends();
        let head = if files.info(LM_HEAD).is_some() { LM_HEAD } else { EMBED_TOKENS };
        let mut warnings = Vec::new();
        for (end, others) in tokens_with_the_same_row(files, head, &ends)? {
            if others >= MANY {
                let token = self.rows.tokenizer.token(end).unwrap_or_default();
                let least = ((others + 1) as f64).ln();
                warnings.push(format!(
                    "answers end in `{token}`, which this run cannot learn to write: the output layer has the same row for \
                     {others} other tokens, which the base was never trained on, so its loss stays above {least:.1}; write \
                     `model.new_tokens = [{token:?}]` to train its row"
                ));
            }
        }
        Ok(warnings)
    }

    /// Returns the tokens that often end answers and whose rows of the output layer do not train.
    fn frozen_ends(&self) -> BTreeSet<u32> {
        let Some(adapter) = &self.adapter_setup else { return BTreeSet::new() };
        let trains_all = [LM_HEAD_MODULE, EMBED_TOKENS_MODULE].iter().any(|module| {
            adapter.saves(module) || adapter.targets.iter().any(|target| target.name == *module)
        });
        if trains_all {
            return BTreeSet::new();
        }
        let trained: BTreeSet<u32> = adapter.rows.values().flatten().copied().collect();
        let tokenizer = &self.rows.tokenizer;
        let is_end = |id: &u32| tokenizer.is_special(*id) || tokenizer.eos_ids().contains(id);
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        let ends = self.train.0.examples().iter().flat_map(trained_ends);
        ends.for_each(|id| *counts.entry(id).or_default() += 1);
        let all: usize = counts.values().sum();
        let often = counts.into_iter().filter(|(_, count)| count * RARE >= all).map(|(id, _)| id);
        often.filter(|id| is_end(id) && !trained.contains(id)).collect()
    }
}

/// Yields the last token of each trained part of an example.
fn trained_ends(example: &Example) -> impl Iterator<Item = u32> {
    let is_last = |at: &usize| example.trained[*at] && example.trained.get(at + 1) != Some(&true);
    (1..example.ids.len()).filter(is_last).map(|at| example.ids[at])
}

/// Returns, for each of `tokens`, the number of other tokens with the same row in the matrix
/// `head`, `[vocab, hidden]`.
fn tokens_with_the_same_row(
    files: &ModelFiles,
    head: &str,
    tokens: &BTreeSet<u32>,
) -> Result<Vec<(u32, usize)>> {
    let [vocab, hidden] = files.require(head)?.shape[..] else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for token in tokens.iter().filter(|token| (**token as usize) < vocab) {
        let mut row = vec![0.0; hidden];
        files.read_part(head, *token as usize * hidden, &mut row)?;
        found.push((*token, row, 0));
    }
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let rows_at_once = (BLOCK / hidden.max(1)).clamp(1, vocab.max(1));
    let mut block = vec![0.0; rows_at_once * hidden];
    for first in (0..vocab).step_by(rows_at_once) {
        let block = &mut block[..rows_at_once.min(vocab - first) * hidden];
        files.read_part(head, first * hidden, block)?;
        for (_, row, same) in &mut found {
            *same += block.par_chunks(hidden).filter(|other| are_same(row, other)).count();
        }
    }
    files.discard(head);
    // Each row equals itself.
    Ok(found.into_iter().map(|(token, _, same)| (token, same.saturating_sub(1))).collect())
}

/// Returns true if two rows differ by at most [`SAME_ROW`] of the length of the first.
fn are_same(row: &[f32], other: &[f32]) -> bool {
    let length: f32 = row.iter().map(|value| value * value).sum();
    let apart: f32 = row.iter().zip(other).map(|(a, b)| (a - b) * (a - b)).sum();
    apart <= SAME_ROW * SAME_ROW * length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_same_within_a_tenth_of_their_length() {
        assert!(are_same(&[3.0, 4.0], &[3.0, 4.4]));
        assert!(!are_same(&[3.0, 4.0], &[3.0, 4.6]));
        assert!(are_same(&[0.0, 0.0], &[0.0, 0.0]));
        assert!(!are_same(&[0.0, 0.0], &[0.0, 1e-3]));
    }
}
