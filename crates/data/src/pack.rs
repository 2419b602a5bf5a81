//! Packs rows into bins of at most `max_seq_len` tokens, so that micro-batches are full.
//!
//! A row is never split. Shuffled data is packed by best fit over a bounded window of open bins:
//! each row goes to the bin it fills best. If the window is full, the fullest bin is closed. Bins
//! are full within a few percent, hold rows near each other in the shuffled order, and take O(n log
//! window) time. In file order, next fit fills bins with consecutive rows.

use std::collections::BTreeSet;

/// Maximum number of open bins.
const WINDOW: usize = 512;

/// Packs rows of the given `lengths`, in the order `order`, into bins of at most `capacity` tokens.
/// A bin keeps this order; a row longer than `capacity` gets a bin of its own.
pub(crate) fn best_fit(order: &[u32], lengths: &[usize], capacity: usize) -> Vec<Vec<u32>> {
    let mut bins: Vec<Vec<u32>> = Vec::new();
    // Open bins by (free tokens, bin): the first that is large enough is the best fit, the oldest
    // among equals.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for &row in order {
        let length = lengths[row as usize];
        let fit = open.range((length, 0)..).next().copied();
        let (free, bin) = match fit {
            Some(best) => {
                open.remove(&best);
                bins[best.1].push(row);
                best
            }
            None => {
                bins.push(vec![row]);
                (capacity, bins.len() - 1)
            }
        };
        if length < free {
            open.insert((free - length, bin));
        }
        if open.len() > WINDOW {
            open.pop_first();
        }
    }
    bins
}

/// Packs consecutive rows: a new bin begins when the next row does not fit.
pub(crate) fn next_fit(lengths: &[usize], capacity: usize) -> Vec<Vec<u32>> {
    let mut bins: Vec<Vec<u32>> = Vec::new();
    let mut free = 0;
    for (row, &length) in (0u32..).zip(lengths) {
        match bins.last_mut() {
            Some(bin) if length <= free => {
                bin.push(row);
                free -= length;
            }
            _ => {
                bins.push(vec![row]);
                free = capacity.saturating_sub(length);
            }
        }
    }
    bins
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(bins: &[Vec<u32>], lengths: &[usize], capacity: usize) -> f64 {
        let tokens: usize = bins.iter().flatten().map(|row| lengths[*row as usize]).sum();
        tokens as f64 / (bins.len() * capacity) as f64
    }

    /// Lengths like those of gsm8k: 344 tokens on average, most between 150 and 700.
    fn like_gsm8k(rows: u64) -> Vec<usize> {
        let mut random = super::super::sampler::Random::new(7, 0);
        let mut uniform = || random.below(1000) as usize;
        (0..rows).map(|_| 120 + (uniform() * uniform() + uniform() * uniform()) / 2300).collect()
    }

    #[test]
    fn bins_of_gsm8k_lengths_are_97_percent_full() {
        let lengths = like_gsm8k(1200);
        let mean = lengths.iter().sum::<usize>() / lengths.len();
        assert!((300..400).contains(&mean), "the lengths are not like those of gsm8k: {mean}");
        let order: Vec<u32> = (0..1200).collect();
        let bins = best_fit(&order, &lengths, 2048);
        assert!(fill(&bins, &lengths, 2048) >= 0.97, "{}", fill(&bins, &lengths, 2048));
    }

    #[test]
    fn the_best_bin_is_taken() {
        // 6 opens a bin (4 free), 7 another (3 free); 3 fits both and fills the second; 4 fills the
        // first.
        assert_eq!(best_fit(&[0, 1, 2, 3], &[6, 7, 3, 4], 10), vec![vec![0, 3], vec![1, 2]]);
    }

    #[test]
    fn file_order_is_kept() {
        assert_eq!(
            next_fit(&[4, 4, 4, 1, 9, 12, 1], 10),
            vec![vec![0, 1], vec![2, 3], vec![4], vec![5], vec![6]]
        );
    }
}
