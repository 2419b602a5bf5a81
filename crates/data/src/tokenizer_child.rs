//! Tokenizers of unknown cost in child processes (see [`super::child_pool`]).
//!
//! Whoever writes a tokenizer.json chooses its patterns, and some take time with the square of the text, for which the
//! crates have no bound; a thread that computes cannot be ended, a process can. To read a large tokenizer.json takes a
//! second and 100 MB, which each child would need. So [`super::linear_cost`] looks at what a file describes. A tokenizer
//! whose parts are all known to take time in proportion to the text works in the process of the run: those of the families
//! that finetune trains, whose patterns are listed there. Any other works in children, as many as threads encode at once,
//! within the processor time of its row.

use std::io;
use std::path::Path;

use super::child_pool::{self, ChildPool, RowBudget};
use super::encoded::Encoded;
use super::found_tokenizer::{self, FoundTokenizer};
use super::sandbox::{ChildEnd, SandboxedWork, UNREADABLE};
use super::sandbox_limits::SandboxLimits;
use super::wire;

/// Bytes of a text for which there is a second more: a hundredth of the usual speed.
const BYTES_PER_SECOND: u64 = 32 << 10;

/// The first byte of a request.
const ENCODE: u8 = 0;
const ENCODE_WITH_SPECIAL: u8 = 1;
const DECODE: u8 = 2;

/// Children that work with one tokenizer.json.
#[derive(Debug)]
pub(super) struct TokenizingChildren(ChildPool);

impl TokenizingChildren {
    /// Children that work with the tokenizer.json of these bytes.
    pub(super) fn new(bytes: &[u8]) -> Self {
        TokenizingChildren(ChildPool::new(SandboxedWork::Tokenizer, bytes.to_vec(), BYTES_PER_SECOND))
    }

    /// Ids of `text` with the bytes they cover.
    ///
    /// # Errors
    /// The child gave none, with the reason.
    pub(super) fn encode(
        &self,
        text: &str,
        add_special: bool,
        budget: &RowBudget,
    ) -> Result<Encoded, ChildEnd> {
        let kind = if add_special { ENCODE_WITH_SPECIAL } else { ENCODE };
        let answer = self.0.ask(&[&[kind], text.as_bytes()].concat(), budget)?;
        read_encoded(&answer).ok_or_else(|| ChildEnd::ByInput(UNREADABLE.to_owned()))
    }

    /// The text of `ids`.
    ///
    /// # Errors
    /// The child gave none, with the reason.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, ChildEnd> {
        let mut request = vec![DECODE];
        request.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        let text = self.0.ask(&request, &RowBudget::default())?;
        String::from_utf8(text).map_err(|_| ChildEnd::ByInput(UNREADABLE.to_owned()))
    }

    /// Returns whether so many rows ended their child that no more are encoded.
    pub(super) fn has_given_up(&self) -> bool {
        self.0.has_given_up()
    }

    /// Ends the children that have nothing to do; the next text starts one again.
    pub(super) fn end(&self) {
        self.0.end();
    }
}

/// Each token as its id and the bytes that it covers.
fn put_encoded(encoded: &Encoded) -> Vec<u8> {
    let tokens = encoded.ids.iter().zip(&encoded.offsets);
    let numbers = tokens.flat_map(|(id, at)| [u64::from(*id), at.start as u64, at.end as u64]);
    numbers.flat_map(u64::to_le_bytes).collect()
}

fn read_encoded(mut answer: &[u8]) -> Option<Encoded> {
    let mut encoded = Encoded::default();
    while !answer.is_empty() {
        encoded.ids.push(wire::take_u64(&mut answer)?.try_into().ok()?);
        let start = usize::try_from(wire::take_u64(&mut answer)?).ok()?;
        encoded.offsets.push(start..usize::try_from(wire::take_u64(&mut answer)?).ok()?);
    }
    Some(encoded)
}

/// The work of a child: encodes and decodes what it is asked until nobody asks.
///
/// # Errors
/// As [`child_pool::serve`].
pub(super) fn serve(limits: &SandboxLimits) -> io::Result<()> {
    let set_up = |bytes: &[u8]| {
        Some(FoundTokenizer::read(bytes, Path::new("tokenizer.json")).map_err(|error| error.in_one_line()))
    };
    child_pool::serve(limits, set_up, |found, request| answer(&found.inner, request))
}

fn answer(inner: &tokenizers::Tokenizer, request: &[u8]) -> child_pool::ChildAnswer<Vec<u8>> {
    let (&kind, body) = request.split_first()?;
    if kind == DECODE {
        let (ids, rest) = body.as_chunks::<4>();
        let ids: Vec<u32> = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
        return rest.is_empty().then(|| found_tokenizer::decode(inner, &ids).map(String::into_bytes));
    }
    let text = std::str::from_utf8(body).ok()?;
    Some(
        found_tokenizer::encode(inner, text, kind == ENCODE_WITH_SPECIAL)
            .map(|encoded| put_encoded(&encoded)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_out_as_they_went_in() {
        let encoded = Encoded { ids: vec![3, u32::MAX], offsets: vec![0..0, 5..384 << 10] };
        let bytes = put_encoded(&encoded);
        let back = read_encoded(&bytes).unwrap();
        assert_eq!((back.ids, back.offsets), (encoded.ids, encoded.offsets));
        assert!(read_encoded(&bytes[..bytes.len() - 1]).is_none());
    }
}
