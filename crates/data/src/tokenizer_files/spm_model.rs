//! The contents of a sentencepiece model (sentencepiece_model.proto).

use std::collections::HashSet;

use super::MAX_TOKENS;
use super::protobuf::{Field, Fields};

/// Maximum bytes of a piece: sixteen times that of any known tokenizer.
const MAX_PIECE_BYTES: usize = 4096;

/// The algorithm of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Unigram,
    Bpe,
}

/// The kind of a piece, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Control,
    UserDefined,
    /// Unknown, unused or a byte.
    Other,
}

/// A piece of text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// A special piece that the model names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedPiece {
    pub(super) id: i64,
    pub(super) text: String,
}

impl NamedPiece {
    fn new(id: i64, text: &str) -> Self {
        NamedPiece { id, text: text.to_owned() }
    }
}

/// A sentencepiece model; its defaults are those of the format.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SpmModel {
    pub(super) pieces: Vec<Piece>,
    /// The number of the algorithm: 1 is unigram, 2 is BPE.
    algorithm: i64,
    pub(super) byte_fallback: bool,
    pub(super) unk: NamedPiece,
    pub(super) bos: NamedPiece,
    pub(super) eos: NamedPiece,
    space_as_suffix: bool,
    pub(super) charsmap: Vec<u8>,
    pub(super) dummy_prefix: bool,
    pub(super) removes_spaces: bool,
    pub(super) escapes_spaces: bool,
}

impl SpmModel {
    /// Reads the model in `bytes`.
    ///
    /// # Errors
    /// Fails with the reason if they are no model, or one that finetune does not support.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let mut model = SpmModel {
            pieces: Vec::new(),
            algorithm: 1,
            byte_fallback: false,
            unk: NamedPiece::new(0, "<unk>"),
            bos: NamedPiece::new(1, "<s>"),
            eos: NamedPiece::new(2, "</s>"),
            space_as_suffix: false,
            charsmap: Vec::new(),
            dummy_prefix: true,
            removes_spaces: true,
            escapes_spaces: true,
        };
        model.fields(bytes).map_err(|why| {
            format!("it is neither a sentencepiece model nor a vocabulary of tiktoken: {why}")
        })?;
        model.check()?;
        Ok(model)
    }

    /// Creates a BPE model of these pieces; `special` returns id and text of a special token.
    pub(super) fn of_bpe<'t>(
        pieces: Vec<Piece>,
        byte_fallback: bool,
        dummy_prefix: bool,
        removes_spaces: bool,
        special: impl Fn(&str) -> Option<(i64, &'t str)>,
    ) -> Self {
        let named =
            |name| special(name).map_or(NamedPiece::new(-1, ""), |(id, text)| NamedPiece::new(id, text));
        SpmModel {
            pieces,
            algorithm: 2,
            byte_fallback,
            unk: named("unk_token"),
            bos: named("bos_token"),
            eos: named("eos_token"),
            space_as_suffix: false,
            charsmap: Vec::new(),
            dummy_prefix,
            removes_spaces,
            escapes_spaces: true,
        }
    }

    fn fields(&mut self, bytes: &[u8]) -> Result<(), String> {
        for field in Fields(bytes) {
            let field = field?;
            match field.number {
                1 => self.pieces.push(piece(field.bytes()?)?),
                2 => Fields(field.bytes()?).try_for_each(|field| self.trainer(&field?))?,
                3 => Fields(field.bytes()?).try_for_each(|field| self.normalizer(&field?))?,
                _ => {}
            }
            if self.pieces.len() > MAX_TOKENS {
                return Err(format!("it has more than {MAX_TOKENS} pieces"));
            }
        }
        Ok(())
    }

    fn trainer(&mut self, field: &Field<'_>) -> Result<(), String> {
        match field.number {
            3 => self.algorithm = field.integer()?,
            24 => self.space_as_suffix = field.integer()? != 0,
            35 => self.byte_fallback = field.integer()? != 0,
            40 => self.unk.id = field.integer()?,
            41 => self.bos.id = field.integer()?,
            42 => self.eos.id = field.integer()?,
            45 => field.text()?.clone_into(&mut self.unk.text),
            46 => field.text()?.clone_into(&mut self.bos.text),
            47 => field.text()?.clone_into(&mut self.eos.text),
            _ => {}
        }
        Ok(())
    }

    fn normalizer(&mut self, field: &Field<'_>) -> Result<(), String> {
        match field.number {
            2 => field.bytes()?.clone_into(&mut self.charsmap),
            3 => self.dummy_prefix = field.integer()? != 0,
            4 => self.removes_spaces = field.integer()? != 0,
            5 => self.escapes_spaces = field.integer()? != 0,
            _ => {}
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        if self.pieces.is_empty() {
            return Err("it has no pieces".to_owned());
        }
        if self.space_as_suffix {
            return Err(
                "it writes the space of a word after it (`treat_whitespace_as_suffix`); accepted: before it"
                    .to_owned(),
            );
        }
        self.algorithm()?;
        let mut seen = HashSet::new();
        for (id, piece) in self.pieces.iter().enumerate() {
            let text = &piece.text;
            if text.is_empty() || text.len() > MAX_PIECE_BYTES {
                let length = text.len();
                return Err(format!("piece {id} has {length} bytes; accepted: 1 to {MAX_PIECE_BYTES}"));
            }
            if !piece.score.is_finite() {
                return Err(format!("piece {id} ({text:?}) has the score {}", piece.score));
            }
            if !seen.insert(text.as_str()) {
                return Err(format!("piece {id} ({text:?}) has the text of an earlier piece"));
            }
        }
        Ok(())
    }

    /// Returns the algorithm.
    ///
    /// # Errors
    /// Fails with its name if finetune does not support it.
    pub(super) fn algorithm(&self) -> Result<Algorithm, String> {
        let name = match self.algorithm {
            1 => return Ok(Algorithm::Unigram),
            2 => return Ok(Algorithm::Bpe),
            3 => "word",
            4 => "char",
            _ => "unknown",
        };
        Err(format!("its algorithm is {name} ({}); accepted: unigram (1), bpe (2)", self.algorithm))
    }
}

fn piece(bytes: &[u8]) -> Result<Piece, String> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    for field in Fields(bytes) {
        let field = field?;
        match field.number {
            1 => field.text()?.clone_into(&mut piece.text),
            2 => piece.score = field.float()?,
            3 => {
                piece.kind = match field.integer()? {
                    1 => PieceKind::Normal,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    _ => PieceKind::Other,
                }
            }
            _ => {}
        }
    }
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(number: u8, bytes: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    fn model(trainer: &[u8], pieces: &[&str]) -> Result<SpmModel, String> {
        let pieces = pieces.iter().flat_map(|text| message(1, &message(1, text.as_bytes())));
        SpmModel::read(&[pieces.collect(), message(2, trainer)].concat())
    }

    #[test]
    fn missing_fields_have_the_defaults_of_the_format() {
        let parsed = model(&[], &["a"]).unwrap();
        assert_eq!(parsed.algorithm(), Ok(Algorithm::Unigram));
        assert_eq!((parsed.unk.id, parsed.bos.id, parsed.eos.id), (0, 1, 2));
        assert!(
            parsed.dummy_prefix && parsed.removes_spaces && parsed.escapes_spaces && !parsed.byte_fallback
        );
        assert_eq!(parsed.pieces[0].kind, PieceKind::Normal);
    }

    #[test]
    fn unsupported_models_are_refused_by_name() {
        let why = |trainer: &[u8], pieces: &[&str]| model(trainer, pieces).unwrap_err();
        assert!(why(&[0x18, 3], &["a"]).contains("word (3); accepted: unigram (1), bpe (2)"));
        assert!(why(&[0x18, 4], &["a"]).contains("char (4)"));
        assert!(why(&[0x18, 9], &["a"]).contains("unknown (9)"));
        assert!(why(&[0xc0, 1, 1], &["a"]).contains("treat_whitespace_as_suffix"));
        assert!(why(&[], &["a", "b", "a"]).contains(r#"piece 2 ("a") has the text of an earlier piece"#));
        assert!(why(&[], &[""]).contains("piece 0 has 0 bytes"));
        assert!(why(&[], &[]).contains("no pieces"));
        let score = message(1, &[&message(1, b"a")[..], &[0x15], &f32::NAN.to_le_bytes()].concat());
        assert!(SpmModel::read(&score).unwrap_err().contains("score NaN"));
    }
}
