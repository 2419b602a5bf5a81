//! A sentencepiece model as a tokenizer.json, as transformers 5.24 converts it
//! (`TokenizersBackend._convert_from_sentencepiece` and the classes of [`SpmClass`]).

use std::collections::{BTreeMap, HashMap, HashSet};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::class::{SpmClass, spm_class};
use super::converted::{AddedEnds, ConvertedVocabulary, parts};
use super::settings::TokenizerSettings;
use super::spm_model::{Algorithm, NamedPiece, Piece, PieceKind, SpmModel};
use super::{check_splits, collect_merges, splits};
use crate::linear_cost::RUNS_OF_SPACES;
use crate::tokenizer_outline::{FIRST_MARK, TWO_MARKS};

/// The mark that sentencepiece writes for a space.
const MARK: &str = "▁";
/// The spaces around a text, which sentencepiece removes.
const EDGE_SPACES: &str = r"\A +| +\z";

/// Converts the model in `bytes` of a folder with `settings` and the config.json `model`.
///
/// # Errors
/// Fails with the reason if they are no model, or one that finetune does not support.
pub(super) fn convert(
    bytes: &[u8],
    settings: TokenizerSettings,
    model: &Map<String, Value>,
) -> Result<ConvertedVocabulary, String> {
    convert_model(&SpmModel::read(bytes)?, settings, model)
}

/// Converts `model` of a folder with `settings` and the config.json `config`.
///
/// # Errors
/// Fails with the reason if finetune does not support the model.
pub(super) fn convert_model(
    model: &SpmModel,
    settings: TokenizerSettings,
    config: &Map<String, Value>,
) -> Result<ConvertedVocabulary, String> {
    let class = spm_class(config, &settings.config)?;
    check_splits(model.pieces.iter().map(|piece| piece.text.len()))?;
    if class == SpmClass::Generic {
        return generic(model, settings);
    }
    if model.algorithm()? != Algorithm::Bpe {
        return Err(
            "its algorithm is unigram, and its class makes BPE of the pieces, with other ids than sentencepiece; \
             accepted: \"tokenizer_class\": \"PreTrainedTokenizerFast\" in tokenizer_config.json, which follows the model"
                .to_owned(),
        );
    }
    if class == SpmClass::Llama {
        return llama(model, settings);
    }
    Ok(gemma(model, settings, &merges_by_id(&model.pieces)?))
}

/// The rules of `LlamaTokenizer`.
fn llama(model: &SpmModel, mut settings: TokenizerSettings) -> Result<ConvertedVocabulary, String> {
    for (name, text) in [("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")] {
        settings.name_token(name, text);
    }
    settings.list_tokens(listed(model, &[PieceKind::Control, PieceKind::UserDefined]));
    let prefix = settings.config.get("add_prefix_space").is_none_or(Value::is_null)
        || settings.flag("add_prefix_space") == Some(true);
    let scheme = match settings.flag("legacy") {
        _ if !prefix => "never",
        Some(true) => "always",
        _ => "first",
    };
    let mut decoder = decoder(true);
    decoder.extend(prefix.then(strip));
    Ok(ConvertedVocabulary {
        parts: parts(
            Value::Null,
            metaspace(scheme),
            sequence("decoders", decoder),
            bpe(&ids(&model.pieces), &merges_by_id(&model.pieces)?, None, true, false),
        ),
        ends: Some(AddedEnds::of(&settings, false)),
        settings,
    })
}

/// The rules of `GemmaTokenizer`, with these merges.
pub(super) fn gemma(
    model: &SpmModel,
    mut settings: TokenizerSettings,
    merges: &[(String, String)],
) -> ConvertedVocabulary {
    for name in ["unk", "bos", "eos", "pad", "mask"] {
        settings.name_token(&format!("{name}_token"), &format!("<{name}>"));
    }
    settings.list_tokens(listed(model, &[PieceKind::Control, PieceKind::UserDefined]));
    let unk = settings.lists().text("unk_token");
    let split = json!({
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false
    });
    ConvertedVocabulary {
        parts: parts(
            replace(&json!({"String": " "}), MARK),
            split,
            sequence("decoders", decoder(true)),
            bpe(&ids(&model.pieces), merges, unk.as_deref(), true, false),
        ),
        ends: Some(AddedEnds::of(&settings, false)),
        settings,
    }
}

/// `SpmConverter.build_tokenizer_from_spm_proto`: the settings of the model itself.
fn generic(model: &SpmModel, mut settings: TokenizerSettings) -> Result<ConvertedVocabulary, String> {
    settings.list_tokens(listed(model, &[PieceKind::Control]));
    settings.listed_are_raw = model.dummy_prefix;
    let legacy = settings.flag("legacy").unwrap_or(true);
    let algorithm = model.algorithm()?;
    let texts = match algorithm {
        Algorithm::Unigram => model.pieces.iter().map(|piece| piece.text.clone()).collect(),
        Algorithm::Bpe => renamed(model, &settings),
    };
    let user_defined: Vec<&str> =
        of_kind(model, &texts, PieceKind::UserDefined).map(|(_, text)| text).collect();
    let vocabulary = match algorithm {
        Algorithm::Unigram => unigram(model)?,
        Algorithm::Bpe => {
            let ids = texts.iter().map(String::as_str).zip(0..).collect();
            let merges = merges_by_score(model, &texts)?;
            bpe(&ids, &merges, Some(&model.unk.text), model.byte_fallback, !user_defined.is_empty())
        }
    };
    let converted = parts(
        sequence("normalizers", normalizers(model, legacy)),
        generic_pre_tokenizer(model, legacy, user_defined),
        sequence("decoders", generic_decoders(model)),
        vocabulary,
    );
    let named = |name: &str, piece: &NamedPiece, settings: &mut TokenizerSettings| {
        let text = if piece.text.is_empty() { format!("<{name}>") } else { piece.text.clone() };
        if piece.id >= 0 {
            settings.name_token(&format!("{name}_token"), &text);
        }
    };
    for (name, piece) in [("bos", &model.bos), ("eos", &model.eos), ("unk", &model.unk)] {
        named(name, piece, &mut settings);
    }
    Ok(ConvertedVocabulary { parts: converted, ends: Some(AddedEnds::of(&settings, false)), settings })
}

fn normalizers(model: &SpmModel, legacy: bool) -> Vec<Value> {
    let mut steps = Vec::new();
    if !model.charsmap.is_empty() {
        let table = BASE64_STANDARD.encode(&model.charsmap);
        steps.push(json!({"type": "Precompiled", "precompiled_charsmap": table}));
    }
    if model.removes_spaces {
        steps.push(replace(&json!({"Regex": EDGE_SPACES}), ""));
        steps.push(replace(&json!({"Regex": RUNS_OF_SPACES}), " "));
    }
    if model.escapes_spaces {
        steps.push(replace(&json!({"String": " "}), MARK));
    }
    if model.dummy_prefix && legacy {
        // Metaspace adds no mark to a text that starts with one, but sentencepiece does.
        steps.push(replace(&json!({"Regex": FIRST_MARK}), TWO_MARKS));
    }
    steps
}

fn generic_pre_tokenizer(model: &SpmModel, legacy: bool, mut user_defined: Vec<&str>) -> Value {
    let mut steps = Vec::new();
    if model.dummy_prefix {
        steps.push(metaspace(if legacy { "always" } else { "first" }));
    }
    if !user_defined.is_empty() {
        user_defined.sort_by_key(|text| std::cmp::Reverse(text.chars().count()));
        let escaped: Vec<String> = user_defined.into_iter().map(regex::escape).collect();
        steps.push(json!({
            "type": "Split", "pattern": {"Regex": escaped.join("|")}, "behavior": "Isolated", "invert": false
        }));
    }
    if steps.is_empty() { Value::Null } else { sequence("pretokenizers", steps) }
}

fn generic_decoders(model: &SpmModel) -> Vec<Value> {
    let mut steps = decoder(model.byte_fallback);
    if model.dummy_prefix {
        if !model.byte_fallback {
            steps.push(json!({"type": "Fuse"}));
        }
        steps.push(strip());
    }
    steps
}

/// The texts of the pieces of a BPE model by id. A list of added tokens renames pieces, except to
/// the text of a piece that keeps its name.
fn renamed(model: &SpmModel, settings: &TokenizerSettings) -> Vec<String> {
    let lists = settings.lists();
    let names: BTreeMap<i64, String> =
        lists.listed().into_iter().map(|(id, token)| (id, token.content)).collect();
    let pieces = || (0..).zip(&model.pieces);
    let unchanged: HashSet<&str> =
        pieces().filter(|(id, _)| !names.contains_key(id)).map(|(_, piece)| piece.text.as_str()).collect();
    let name = |(id, piece): (i64, &Piece)| {
        names.get(&id).filter(|name| !unchanged.contains(name.as_str())).unwrap_or(&piece.text).clone()
    };
    pieces().map(name).collect()
}

/// The pieces of a kind with their texts.
fn of_kind<'a>(
    model: &'a SpmModel,
    texts: &'a [String],
    kind: PieceKind,
) -> impl Iterator<Item = (usize, &'a str)> {
    let pieces = model.pieces.iter().zip(texts).enumerate();
    pieces.filter(move |(_, (piece, _))| piece.kind == kind).map(|(id, (_, text))| (id, text.as_str()))
}

/// The special pieces as tokens without a name, in the form of tokenizer_config.json.
fn listed(model: &SpmModel, kinds: &[PieceKind]) -> Vec<Value> {
    let pieces = model.pieces.iter().filter(|piece| kinds.contains(&piece.kind));
    let token = |piece: &Piece| {
        let special = piece.kind == PieceKind::Control;
        json!({"content": piece.text, "normalized": false, "special": special})
    };
    pieces.map(token).collect()
}

fn ids(pieces: &[Piece]) -> HashMap<&str, u32> {
    pieces.iter().map(|piece| piece.text.as_str()).zip(0..).collect()
}

/// All merges in the order of the ids that they make, then of the length of their left side
/// (`generate_merges`).
fn merges_by_id(pieces: &[Piece]) -> Result<Vec<(String, String)>, String> {
    let ids = ids(pieces);
    let known = |(left, right): &(&str, &str)| ids.contains_key(left) && ids.contains_key(right);
    let all = pieces.iter().flat_map(|piece| splits(&piece.text)).filter(known);
    collect_merges(all.map(|(left, right)| (left.to_owned(), right.to_owned())))
}

/// The merges of normal pieces, highest score first.
fn merges_by_score(model: &SpmModel, texts: &[String]) -> Result<Vec<(String, String)>, String> {
    let normal: HashSet<&str> = of_kind(model, texts, PieceKind::Normal).map(|(_, text)| text).collect();
    let all = of_kind(model, texts, PieceKind::Normal).flat_map(|(id, text)| {
        // Adding zero makes one zero of both.
        let score = model.pieces[id].score + 0.0;
        splits(text).map(move |(left, right)| (score, id, left, right))
    });
    let mut ranked =
        collect_merges(all.filter(|(.., left, right)| normal.contains(left) && normal.contains(right)))?;
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    Ok(ranked.into_iter().map(|(_, _, left, right)| (left.to_owned(), right.to_owned())).collect())
}

fn bpe(
    ids: &HashMap<&str, u32>,
    merges: &[(String, String)],
    unk: Option<&str>,
    byte_fallback: bool,
    ignore_merges: bool,
) -> Value {
    let mut vocabulary: Vec<(&str, u32)> = ids.iter().map(|(text, id)| (*text, *id)).collect();
    vocabulary.sort_unstable_by_key(|(_, id)| *id);
    let vocabulary: Map<String, Value> =
        vocabulary.into_iter().map(|(text, id)| (text.to_owned(), id.into())).collect();
    json!({
        "type": "BPE", "dropout": null, "unk_token": unk, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges, "vocab": vocabulary, "merges": merges,
    })
}

fn unigram(model: &SpmModel) -> Result<Value, String> {
    let count = model.pieces.len();
    let unk = usize::try_from(model.unk.id).ok().filter(|id| *id < count);
    let unk = unk.ok_or_else(|| {
        format!("its unknown piece is number {}; accepted: 0 to {}", model.unk.id, count - 1)
    })?;
    let vocabulary: Vec<Value> =
        model.pieces.iter().map(|piece| json!([piece.text, f64::from(piece.score)])).collect();
    Ok(json!({
        "type": "Unigram", "unk_id": unk, "vocab": vocabulary, "byte_fallback": model.byte_fallback
    }))
}

fn sequence(key: &str, steps: Vec<Value>) -> Value {
    let mut part = Map::from_iter([("type".to_owned(), "Sequence".into())]);
    part.insert(key.to_owned(), steps.into());
    Value::Object(part)
}

fn replace(pattern: &Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

fn metaspace(scheme: &str) -> Value {
    json!({"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": false})
}

/// The first steps of a decoder.
fn decoder(byte_fallback: bool) -> Vec<Value> {
    let mut steps = vec![replace(&json!({"String": MARK}), " ")];
    if byte_fallback {
        steps.extend([json!({"type": "ByteFallback"}), json!({"type": "Fuse"})]);
    }
    steps
}

/// The step of a decoder that removes the space before a text.
fn strip() -> Value {
    json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A unigram model keeps its user-defined pieces; only BPE takes the names of a list.
    #[test]
    fn a_list_renames_no_piece_of_a_unigram_model() {
        let project = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let bytes = std::fs::read(project.join("tests/golden/vocabularies/unigram/tokenizer.model")).unwrap();
        let model = SpmModel::read(&bytes).unwrap();
        let mut settings = TokenizerSettings::default();
        settings.config.insert("added_tokens_decoder".to_owned(), json!({"4": {"content": "<call>"}}));
        assert_eq!(
            (model.pieces[4].text.as_str(), renamed(&model, &settings)[4].as_str()),
            ("<tool>", "<call>")
        );
        let pattern =
            &generic(&model, settings).unwrap().parts["pre_tokenizer"]["pretokenizers"][1]["pattern"];
        assert_eq!(pattern["Regex"], "<tool>");
    }
}
