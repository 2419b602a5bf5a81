//! Names of the files that hold the vocabulary of a tokenizer.

/// The file of the crate `tokenizers`, which also holds the rules of the tokenizer.
pub const TOKENIZER_JSON: &str = "tokenizer.json";
/// Mistral's vocabulary of bytes.
pub const TEKKEN: &str = "tekken.json";
/// The other name of a vocabulary of tiktoken.
pub const TIKTOKEN: &str = "tiktoken.model";
/// A model of sentencepiece, or a vocabulary of tiktoken as Llama 3 has it.
const TOKENIZER_MODEL: &str = "tokenizer.model";
/// The vocabulary of the first Qwen models, in the format of tiktoken.
pub const QWEN: &str = "qwen.tiktoken";

/// The accepted names. The first one that exists describes the tokenizer. transformers takes
/// tokenizer.json too; without it, the first of the other names in the folder's listing, and it
/// does not know [`QWEN`].
pub const VOCABULARIES: [&str; 5] = [TOKENIZER_JSON, TEKKEN, TIKTOKEN, TOKENIZER_MODEL, QWEN];

/// The files of an image-text model that describe its inputs for other programs.
pub const PROCESSOR_FILES: [&str; 3] =
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

/// Returns the name of the file that describes the tokenizer, if `exists` is true for any.
pub fn vocabulary(exists: impl Fn(&str) -> bool) -> Option<&'static str> {
    VOCABULARIES.into_iter().find(|name| exists(name))
}
