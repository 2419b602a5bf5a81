//! Long texts give the ids of the whole text, with the memory of a piece.

use finetune::data::Tokenizer;

use super::{alone, counting, seeds};

/// Returns prose with everything that tokenizers treat specially: runs of spaces and line ends,
/// numbers, other scripts.
fn prose(bytes: usize) -> String {
    let mut text = String::new();
    let mut at = 1_u32;
    while text.len() < bytes {
        at = at.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        text.push_str(
            [
                "the ",
                "Quick brown",
                "fox's ",
                "jumped\n",
                "\n\n    over ",
                "12345,678 ",
                "Äpfel und 你好 ",
                "…  ",
            ][at as usize >> 13 & 7],
        );
    }
    text
}

#[test]
fn long_texts_get_the_ids_of_the_whole_in_little_memory() {
    let _alone = alone();
    let text = prose(700_000);
    for model in ["tiny-llama", "tiny-gemma3"] {
        let folder = seeds::golden("models").join(model);
        let tokenizer = Tokenizer::load(&folder).unwrap();
        let before = counting::begin();
        let pieces = tokenizer.encode_with_offsets(&text, true).unwrap();
        let held = counting::peak().saturating_sub(before);
        let reference = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
        let before = counting::begin();
        let whole = reference.encode(text.as_str(), true).unwrap();
        let held_by_whole = counting::peak().saturating_sub(before);
        eprintln!("{model}: {} KiB in pieces, {} KiB as a whole", held >> 10, held_by_whole >> 10);
        assert!(pieces.ids == whole.get_ids(), "{model}");
        let added = whole.get_special_tokens_mask();
        let offsets = whole.get_offsets().iter().zip(added);
        assert!(
            pieces.offsets.iter().zip(offsets).all(|(a, (b, added))| *added == 1 || (a.start, a.end) == *b),
            "{model}"
        );
        assert!(held * 4 < held_by_whole * 3, "{model}: {held} bytes of {held_by_whole}");
    }
}
