//! Encodes texts of any length in the memory of one piece.
//!
//! Encoding takes some 160 bytes for each byte of text, so one long line costs gigabytes. A long
//! text is therefore encoded in overlapping pieces. A tokenizer's cuts depend only on nearby text:
//! if two pieces that begin thousands of bytes apart give the same tokens on both sides of a
//! position, the pieces are joined there. If they differ, another position is tried; a text without
//! a common one is refused.

use std::ops::Range;

use super::encoded::Encoded;
use crate::error::{Error, Result};

/// Bytes of a piece. Texts of up to one and a half pieces are encoded as a whole.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes that two pieces share on each side of a joint; the tokens of half of them must be equal.
const CONTEXT_BYTES: usize = 4096;
/// Number of positions of each kind to try.
const TRIES: usize = 12;

/// Returns true if a text must be encoded in pieces.
pub(super) fn is_long(text: &str) -> bool {
    text.len() > PIECE_BYTES + PIECE_BYTES / 2
}

/// Encodes `text` to ids with the bytes that they cover; `encode` encodes a part without special
/// tokens.
///
/// # Errors
/// Fails like `encode`, or with a user error if no position can cut the text.
pub(super) fn encode_in_pieces(text: &str, encode: impl Fn(&str) -> Result<Encoded>) -> Result<Encoded> {
    let mut whole = Encoded::default();
    for_each_piece(text, encode, |ids, offsets| {
        whole.ids.extend(ids);
        whole.offsets.extend_from_slice(offsets);
    })?;
    Ok(whole)
}

/// Like [`encode_in_pieces`], but passes each piece's ids and byte ranges to `take`. A caller that
/// keeps only ids avoids the ranges, which are four times as large.
///
/// # Errors
/// Fails like [`encode_in_pieces`].
pub(super) fn for_each_piece(
    text: &str,
    encode: impl Fn(&str) -> Result<Encoded>,
    mut take: impl FnMut(&[u32], &[Range<usize>]),
) -> Result<()> {
    let mut from = 0_usize;
    let mut seam: Option<Encoded> = None;
    loop {
        let start = boundary(text, from.saturating_sub(CONTEXT_BYTES));
        let is_last = !is_long(&text[from..]);
        let end = if is_last { text.len() } else { boundary(text, from + PIECE_BYTES + CONTEXT_BYTES) };
        let piece = encode_part(text, start..end, &encode)?;
        let first = match &seam {
            None => 0,
            Some(seam) if agree(seam, &piece, from) => cut(&piece, from).ok_or_else(|| no_place(text))?,
            Some(_) => return Err(no_place(text)),
        };
        let (to, stop) = if is_last {
            (end, piece.ids.len())
        } else {
            find_cut(text, from, &piece, &encode)?.ok_or_else(|| no_place(text))?
        };
        take(&piece.ids[first..stop], &piece.offsets[first..stop]);
        if is_last {
            return Ok(());
        }
        (from, seam) = (to, Some(piece));
    }
}

fn no_place(text: &str) -> Error {
    Error::user(format!("cannot encode a text of {} bytes", text.len()))
        .because("its tokens depend on distant text at every position, so it cannot be cut")
        .hint("divide it into rows of at most 384 KiB, which are encoded whole")
}

/// The last boundary of a character up to `at`.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

fn encode_part(text: &str, part: Range<usize>, encode: &impl Fn(&str) -> Result<Encoded>) -> Result<Encoded> {
    let mut encoded = encode(&text[part.clone()])?;
    for offsets in &mut encoded.offsets {
        *offsets = offsets.start + part.start..offsets.end + part.start;
    }
    Ok(encoded)
}

/// Finds a position near the end of `piece`, which begins before `from`, at which the next piece
/// may begin. Returns it and the number of tokens before it.
fn find_cut(
    text: &str,
    from: usize,
    piece: &Encoded,
    encode: &impl Fn(&str) -> Result<Encoded>,
) -> Result<Option<(usize, usize)>> {
    for position in places(text, from + PIECE_BYTES / 2..from + PIECE_BYTES) {
        let Some(tokens) = cut(piece, position) else { continue };
        let near = boundary(text, position - CONTEXT_BYTES)..boundary(text, position + CONTEXT_BYTES);
        if agree(&encode_part(text, near, encode)?, piece, position) {
            return Ok(Some((position, tokens)));
        }
    }
    Ok(None)
}

/// Positions in `range` in the order of trying: beginnings of lines, ends of words, any characters.
fn places(text: &str, range: Range<usize>) -> Vec<usize> {
    let bytes = text.as_bytes();
    let word = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphanumeric);
    let line = |at: &usize| bytes[at - 1] == b'\n' && word(*at);
    let space = |at: &usize| word(at - 1) && bytes[*at] == b' ' && word(at + 1);
    let any = |at: &usize| text.is_char_boundary(*at);
    let mut boundaries: Vec<usize> = range.clone().rev().filter(line).take(TRIES).collect();
    boundaries.extend(range.clone().rev().filter(space).take(TRIES));
    boundaries.extend(range.rev().filter(any).take(TRIES));
    boundaries
}

/// The number of tokens before `position`; `None` if a token spans it.
fn cut(encoded: &Encoded, position: usize) -> Option<usize> {
    let before = encoded.offsets.iter().position(|token| token.end > position).unwrap_or(encoded.ids.len());
    encoded.offsets[before..].iter().all(|token| token.start >= position).then_some(before)
}

/// Returns true if two encodings that extend well beyond `position` have the same tokens around it,
/// and a cut there.
fn agree(a: &Encoded, b: &Encoded, position: usize) -> bool {
    let near = position - CONTEXT_BYTES / 2..position + CONTEXT_BYTES / 2;
    let tokens = |encoded: &Encoded| -> Vec<(u32, Range<usize>)> {
        let all = encoded.ids.iter().copied().zip(encoded.offsets.iter().cloned());
        all.filter(|(_, at)| near.start <= at.start && at.end <= near.end).collect()
    };
    let tokens_of_a = tokens(a);
    !tokens_of_a.is_empty()
        && cut(a, position).is_some()
        && cut(b, position).is_some()
        && tokens_of_a == tokens(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words with the space before them, numbered by their length.
    fn words(text: &str) -> Result<Encoded> {
        let mut encoded = Encoded::default();
        let mut from = 0;
        for at in (1..=text.len()).filter(|at| *at == text.len() || text.as_bytes()[*at] == b' ') {
            encoded.ids.push((at - from) as u32);
            encoded.offsets.push(from..at);
            from = at;
        }
        Ok(encoded)
    }

    #[test]
    fn pieces_give_what_the_whole_gives() {
        let text: String = (0..300_000).map(|word: u64| format!(" w{}", word * word % 7919)).collect();
        assert!(is_long(&text));
        let (whole, pieces) = (words(&text).unwrap(), encode_in_pieces(&text, words).unwrap());
        assert_eq!(pieces.ids, whole.ids);
        assert_eq!(pieces.offsets, whole.offsets);
    }

    #[test]
    fn a_text_that_cannot_be_cut_is_refused() {
        let one =
            |text: &str| Ok(Encoded { ids: vec![1], offsets: std::iter::once(0..text.len()).collect() });
        let error = encode_in_pieces(&"a".repeat(PIECE_BYTES * 3), one).unwrap_err().to_string();
        assert!(error.contains("cannot be cut"), "{error}");
    }
}
