//! Runs tokenizers of unknown cost in child processes (see [`super::child_pool`]).
//!
//! The author of a tokenizer.json chooses its patterns, and some take time with the square of the
//! text. The crates have no bound for that, and only a process can be ended, not a thread. But each
//! child must read tokenizer.json, which takes a second and 100 MB if it is large. So
//! [`super::linear_cost`] checks the parts of a tokenizer. If all are known to take linear time, as
//! in the families that finetune trains, it runs in the process of the run. Any other runs in
//! children, as many as threads encode at once, within the processor time of its row.

use std::io;
use std::path::Path;

use super::child_pool::{self, ChildPool, RowBudget};
use super::encoded::Encoded;
use super::parsed_tokenizer::{self, ParsedTokenizer};
use super::sandbox::{ChildEnd, SandboxedWork, UNREADABLE};
use super::sandbox_limits::SandboxLimits;
use super::wire;

/// Bytes of a text that add one second to its row's budget: a hundredth of the usual speed.
const BYTES_PER_SECOND: u64 = 32 << 10;

/// First byte of a request.
const ENCODE: u8 = 0;
const ENCODE_WITH_SPECIAL: u8 = 1;
const DECODE: u8 = 2;

/// Children that work with one tokenizer.json.
#[derive(Debug)]
pub(super) struct TokenizingChildren(ChildPool);

impl TokenizingChildren {
    /// Makes children for the tokenizer.json in `bytes`.
    pub(super) fn new(bytes: &[u8]) -> Self {
        TokenizingChildren(ChildPool::new(SandboxedWork::Tokenizer, bytes.to_vec(), BYTES_PER_SECOND))
    }

    /// Encodes `text` to ids with the bytes that they cover.
    ///
    /// # Errors
    /// Fails with the reason if the child gives no answer.
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

    /// Decodes `ids`.
    ///
    /// # Errors
    /// Fails with the reason if the child gives no answer.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, ChildEnd> {
        let mut request = vec![DECODE];
        request.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        let text = self.0.ask(&request, &RowBudget::default())?;
        String::from_utf8(text).map_err(|_| ChildEnd::ByInput(UNREADABLE.to_owned()))
    }

    /// Returns true if so many rows ended their child that no more are encoded.
    pub(super) fn has_given_up(&self) -> bool {
        self.0.has_given_up()
    }

    /// Ends the idle children; the next text starts a new one.
    pub(super) fn end(&self) {
        self.0.end();
    }
}

/// Serializes each token as its id and the bytes that it covers.
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

/// Runs a child, which encodes and decodes until the pipe closes.
///
/// # Errors
/// Fails like [`child_pool::serve`].
pub(super) fn serve(limits: &SandboxLimits) -> io::Result<()> {
    let set_up = |bytes: &[u8]| {
        Some(ParsedTokenizer::read(bytes, Path::new("tokenizer.json")).map_err(|error| error.in_one_line()))
    };
    child_pool::serve(limits, set_up, |parsed, request| answer(&parsed.inner, request))
}

fn answer(inner: &tokenizers::Tokenizer, request: &[u8]) -> child_pool::ChildAnswer<Vec<u8>> {
    let (&kind, body) = request.split_first()?;
    if kind == DECODE {
        let (ids, rest) = body.as_chunks::<4>();
        let ids: Vec<u32> = ids.iter().map(|id| u32::from_le_bytes(*id)).collect();
        return rest.is_empty().then(|| parsed_tokenizer::decode(inner, &ids).map(String::into_bytes));
    }
    let text = std::str::from_utf8(body).ok()?;
    Some(
        parsed_tokenizer::encode(inner, text, kind == ENCODE_WITH_SPECIAL)
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
