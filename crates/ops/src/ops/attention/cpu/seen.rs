//! Visibility of keys for the queries of a tile: columns of a row of scores, and squares of 32 × 32
//! to multiply.

use std::ops::Range;

use super::{AttentionKind, Span, TILE};
use crate::backends::packed_gemm::SQUARE;

/// Strips per tile.
const STRIPS: usize = TILE / SQUARE;

/// A pair of tiles: `n` queries from `first` and `m` keys from `key`, relative to their span.
#[derive(Clone, Copy)]
pub(super) struct TilePair {
    pub(super) span: Span,
    pub(super) window: Option<usize>,
    pub(super) first: usize,
    pub(super) n: usize,
    pub(super) key: usize,
    pub(super) m: usize,
}

impl TilePair {
    /// Returns the pair of the query tile at `first` and the key tile at `key`.
    pub(super) fn new(span: Span, kind: AttentionKind, (first, key): (usize, usize)) -> Self {
        let (n, m) = (TILE.min(span.q_len - first), TILE.min(span.k_len - key));
        TilePair { span, window: kind.window, first, n, key, m }
    }

    /// Returns the columns of the tile that some of these neighbouring queries see: from the first
    /// column of the first query to the last column of the last query.
    fn columns(self, queries: Range<usize>) -> (usize, usize) {
        let (from, _) = self.span.visible(self.first + queries.start, self.window);
        let (_, to) = self.span.visible(self.first + queries.end - 1, self.window);
        let within = |key: usize| key.clamp(self.key, self.key + self.m) - self.key;
        (within(from), within(to).max(within(from)))
    }

    /// Returns the visible columns of each query, in order.
    pub(super) fn of_rows(self) -> [(usize, usize); TILE] {
        let mut seen = [(0, 0); TILE];
        for (i, seen) in seen.iter_mut().enumerate().take(self.n) {
            *seen = self.columns(i..i + 1);
        }
        seen
    }

    pub(super) fn strips(self) -> SeenStrips {
        let mut keys = [const { 0..0 }; STRIPS];
        for (strip, start) in keys.iter_mut().zip((0..self.n).step_by(SQUARE)) {
            let (from, to) = self.columns(start..(start + SQUARE).min(self.n));
            if from < to {
                *strip = from / SQUARE..to.div_ceil(SQUARE);
            }
        }
        SeenStrips { keys }
    }
}

/// For each strip of queries of a pair of tiles, the strips of keys visible to any of them.
pub(super) struct SeenStrips {
    keys: [Range<usize>; STRIPS],
}

impl SeenStrips {
    /// Returns the strips of keys that a strip of queries sees.
    pub(super) fn keys(&self, queries: usize) -> Range<usize> {
        self.keys[queries].clone()
    }

    /// Returns the strips of queries that see a strip of keys.
    pub(super) fn queries(&self, keys: usize) -> Range<usize> {
        let sees = |seen: &Range<usize>| seen.contains(&keys);
        let from = self.keys.iter().position(sees);
        let last = self.keys.iter().rposition(sees);
        from.zip(last).map_or(0..0, |(from, last)| from..last + 1)
    }

    /// Returns `0..steps` if the strip of queries sees the strip of keys, else an empty range.
    pub(super) fn all_or_none(&self, queries: usize, keys: usize, steps: usize) -> Range<usize> {
        if self.keys[queries].contains(&keys) { 0..steps } else { 0..0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::Heads;

    /// Compares rows and squares with what each query sees, element by element.
    #[test]
    fn squares_that_are_left_out_are_seen_by_nobody() {
        for (q_len, k_len) in [(300, 300), (1, 200), (40, 300), (129, 129)] {
            for window in [None, Some(1), Some(33), Some(150)] {
                let span = Span { q_start: 0, q_len, k_start: 0, k_len };
                let heads = Heads { num_heads: 1, num_kv_heads: 1, head_dim: 8 };
                let kind = AttentionKind { heads, scale: 1.0, softcap: None, window };
                for first in (0..q_len).step_by(TILE) {
                    for key in (0..k_len).step_by(TILE) {
                        check(TilePair::new(span, kind, (first, key)));
                    }
                }
            }
        }
    }

    fn check(pair: TilePair) {
        let (rows, strips) = (pair.of_rows(), pair.strips());
        let mut seen = [[false; STRIPS]; STRIPS];
        for (i, row) in rows.iter().enumerate().take(pair.n) {
            let (from, to) = pair.span.visible(pair.first + i, pair.window);
            for j in 0..pair.m {
                let sees = (from..to).contains(&(pair.key + j));
                assert_eq!((row.0..row.1).contains(&j), sees, "query {i}, key {j}");
                seen[i / SQUARE][j / SQUARE] |= sees;
            }
        }
        for (i, seen) in seen.iter().enumerate() {
            for (j, seen) in seen.iter().enumerate() {
                assert_eq!(strips.keys(i).contains(&j), *seen, "square {i}, {j}");
                assert_eq!(strips.queries(j).contains(&i), *seen, "square {i}, {j}");
                assert_eq!(strips.all_or_none(i, j, 3).len(), if *seen { 3 } else { 0 });
            }
        }
    }
}
