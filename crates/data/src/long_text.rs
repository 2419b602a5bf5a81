//! Ids of texts of any length in the memory of a piece of them.
//!
//! Encoding holds some 160 bytes for each byte of its text, so that one long line costs gigabytes. A long text is
//! therefore encoded in overlapping pieces. How a tokenizer cuts a text depends on what stands near: where two pieces
//! that begin thousands of bytes apart give the same tokens on both sides of a place, the tokens of the whole do not
//! depend on where either began, and the pieces are joined there. Where they differ another place is tried; a text
//! without any is refused, not guessed at.

use std::ops::Range;

use super::encoded::Encoded;
use crate::error::{Error, Result};

/// Bytes of a piece. Texts of up to one and a half are encoded as a whole.
const PIECE_BYTES: usize = 256 << 10;
/// What two pieces share on each side of the place at which they are joined; half of it must be the same tokens.
const CONTEXT_BYTES: usize = 4096;
/// Places that are tried, of each kind.
const TRIES: usize = 12;

/// Whether a text is to be encoded in pieces.
pub(super) fn is_long(text: &str) -> bool {
    text.len() > PIECE_BYTES + PIECE_BYTES / 2
}

/// Ids of `text` with the bytes they cover, by `encode`, which encodes a part without special tokens.
///
/// # Errors
/// Those of `encode`; the user's: there is no place at which the text can be cut.
pub(super) fn encode_in_pieces(text: &str, encode: impl Fn(&str) -> Result<Encoded>) -> Result<Encoded> {
    let mut whole = Encoded::default();
    for_each_piece(text, encode, |ids, offsets| {
        whole.ids.extend(ids);
        whole.offsets.extend_from_slice(offsets);
    })?;
    Ok(whole)
}

/// As [`encode_in_pieces`]; hands over each piece's share of the ids and of the bytes that they cover, so that whoever needs
/// the ids alone does not hold the rest, which is four times as large.
///
/// # Errors
/// As [`encode_in_pieces`].
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
        .because("there is no place at which its tokens do not depend on what stands far away, so it cannot be cut")
        .hint("divide it into rows")
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

/// A place near the end of `piece`, which begins before `from`, at which the next may begin, and the number of tokens
/// before it.
fn find_cut(
    text: &str,
    from: usize,
    piece: &Encoded,
    encode: &impl Fn(&str) -> Result<Encoded>,
) -> Result<Option<(usize, usize)>> {
    for place in places(text, from + PIECE_BYTES / 2..from + PIECE_BYTES) {
        let Some(tokens) = cut(piece, place) else { continue };
        let near = boundary(text, place - CONTEXT_BYTES)..boundary(text, place + CONTEXT_BYTES);
        if agree(&encode_part(text, near, encode)?, piece, place) {
            return Ok(Some((place, tokens)));
        }
    }
    Ok(None)
}

/// Places of `range` in the order in which they are tried: beginnings of lines, ends of words, any characters.
fn places(text: &str, range: Range<usize>) -> Vec<usize> {
    let bytes = text.as_bytes();
    let word = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphanumeric);
    let line = |at: &usize| bytes[at - 1] == b'\n' && word(*at);
    let space = |at: &usize| word(at - 1) && bytes[*at] == b' ' && word(at + 1);
    let any = |at: &usize| text.is_char_boundary(*at);
    let mut found: Vec<usize> = range.clone().rev().filter(line).take(TRIES).collect();
    found.extend(range.clone().rev().filter(space).take(TRIES));
    found.extend(range.rev().filter(any).take(TRIES));
    found
}

/// The number of tokens before `place`; none where one reaches over it.
fn cut(encoded: &Encoded, place: usize) -> Option<usize> {
    let before = encoded.offsets.iter().position(|token| token.end > place).unwrap_or(encoded.ids.len());
    encoded.offsets[before..].iter().all(|token| token.start >= place).then_some(before)
}

/// Whether two encodings of parts that both reach well beyond `place` have the same tokens around it, and a cut there.
fn agree(a: &Encoded, b: &Encoded, place: usize) -> bool {
    let near = place - CONTEXT_BYTES / 2..place + CONTEXT_BYTES / 2;
    let tokens = |encoded: &Encoded| -> Vec<(u32, Range<usize>)> {
        let all = encoded.ids.iter().copied().zip(encoded.offsets.iter().cloned());
        all.filter(|(_, at)| near.start <= at.start && at.end <= near.end).collect()
    };
    let tokens_of_a = tokens(a);
    !tokens_of_a.is_empty() && cut(a, place).is_some() && cut(b, place).is_some() && tokens_of_a == tokens(b)
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
