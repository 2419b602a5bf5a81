"""Writes folders of tokenizers without a tokenizer.json, and the ids that other programs give.

    python make_vocabularies.py ../vocabularies

NAME/ holds the files of a tokenizer, and NAME.json texts with their ids. The sentencepiece models
are trained on the text of `fx_text.py`. The vocabularies of tiktoken and tekken are that of
../models/tiny-llama3. Needs transformers 5.24, sentencepiece, tiktoken and mistral-common.
"""
import base64
import io
import json
import pathlib
import shutil
import sys
import unicodedata

import fx_text
import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

OUT = pathlib.Path(sys.argv[1])
LLAMA3 = pathlib.Path(__file__).parent.parent / "models/tiny-llama3/tokenizer.json"

TEXTS = [
    "Hello world", "hello", " leading space", "  two leading", "trailing space ",
    "two  spaces   three    four", "line\nbreak\r\nand\ttab", "\n", "\n\n\nafter", "", " ", "   ",
    "I'll don't WE'VE", "12345 6.78 9,000", "Grüße aus München, schöne Straße!",
    "今天天气很好。日本語のテキスト", "Привет, мир!", "한국어 문장입니다.", "😀👍🏽 👩‍👩‍👧 ok",
    "é vs é ﬁ ①", "<s>", "</s>", "<s> text</s>", "<s>[INST] x [/INST] y</s>", "a<s>b",
    "<unk> token <unk>", "<|im_start|>user\nhi<|im_end|>\n", "x <|im_end|> y", "<pad><pad>",
    "<start_of_turn>user\nhi<end_of_turn>\n", "<|begin_of_text|>x<|eot_id|> y <|endoftext|>z",
    "def f(x):\n    return x**2  # squared\n", "a" * 40, "\x00\x01", "▁metaspace ▁▁",
    "<0x41> is not a byte", "the quiet lantern repairs the bridge", "THE QUIET LANTERN",
    "π ≈ 3.14159, ∑ xᵢ²", "mixed\u00a0nbsp em\u2003zero\u200b", "tab\t\tdouble  end  ",
]

BPE = dict(
    model_type="bpe", byte_fallback=True, character_coverage=0.995, normalization_rule_name="identity",
    remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, unk_id=0,
    bos_id=1, eos_id=2, pad_id=-1,
)
NAMES = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
ENDS = dict(add_bos_token=True, add_eos_token=False)


def token(text, special=True):
    return dict(
        content=text, lstrip=False, normalized=False, rstrip=False, single_word=False, special=special
    )


def decoder(texts):
    return {str(id): token(text) for id, text in texts.items()}


SPECIAL = decoder({0: "<unk>", 1: "<s>", 2: "</s>"})
LISTED = ["<|im_start|>", "<|im_end|>", "<pad>"]
# Name: options of the trainer, model_type, tokenizer_config.json, and other files.
SENTENCEPIECE = {
    "llama2": (
        dict(BPE, vocab_size=400), "llama",
        dict(NAMES, **ENDS, legacy=False, pad_token=None, tokenizer_class="LlamaTokenizer"),
        {"special_tokens_map.json": NAMES},
    ),
    "llama2-legacy": (
        dict(BPE, vocab_size=424), "llama",
        dict(NAMES, **ENDS, legacy=True, tokenizer_class="LlamaTokenizer"), {},
    ),
    "llama2-added": (
        dict(BPE, vocab_size=400), "llama",
        dict(
            NAMES, eos_token="<|im_end|>", pad_token="<pad>", legacy=False, tokenizer_class="LlamaTokenizer",
            add_bos_token=False, add_eos_token=False,
            added_tokens_decoder={**SPECIAL, **decoder({400 + i: t for i, t in enumerate(LISTED)})},
        ),
        {"added_tokens.json": {text: 400 + i for i, text in enumerate(LISTED)}},
    ),
    "llama2-bare": (dict(BPE, vocab_size=400), "llama", None, {}),
    "llama2-no-prefix": (
        dict(BPE, vocab_size=400), "llama",
        dict(tokenizer_class="LlamaTokenizer", add_prefix_space=False, add_eos_token=True),
        {"added_tokens.json": {"<pad>": 400, "<extra>": 401}},
    ),
    "mistral": (
        dict(BPE, vocab_size=416, user_defined_symbols=["[INST]", "[/INST]", "    "]), "mistral",
        dict(NAMES, **ENDS, legacy=True, added_tokens_decoder=SPECIAL, tokenizer_class="LlamaTokenizer"), {},
    ),
    "gemma": (
        dict(
            BPE, vocab_size=432, unk_id=3, bos_id=2, eos_id=1, pad_id=0, add_dummy_prefix=False,
            pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
            user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁"],
        ),
        "gemma", dict(**ENDS, tokenizer_class="GemmaTokenizer"), {},
    ),
    "unigram": (
        dict(
            model_type="unigram", byte_fallback=True, character_coverage=0.995, vocab_size=500,
            user_defined_symbols=["<tool>"], pad_id=3,
        ),
        "stablelm", dict(**ENDS), {},
    ),
}

LLAMA31 = {
    0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def folder(name, model_type, config, files, **more):
    out = OUT / name
    shutil.rmtree(out, ignore_errors=True)
    write(out / "config.json", dict(model_type=model_type, **more))
    if config is not None:
        write(out / "tokenizer_config.json", config)
    for file, value in files.items():
        write(out / file, value)
    return out


def golden(name, encode, decode):
    rows = []
    for text in TEXTS:
        ids = encode(text, False)
        rows.append(dict(text=text, ids=encode(text, True), ids_no_special=ids, decoded=decode(ids)))
    lines = ",\n".join(" " + json.dumps(row, ensure_ascii=False) for row in rows)
    (OUT / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def transformers_golden(name, ids=None):
    tokenizer = AutoTokenizer.from_pretrained(OUT / name, mistral_format=False)
    own = lambda text, special: tokenizer(text, add_special_tokens=special)["input_ids"]
    golden(name, ids or own, lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return tokenizer


def ranks():
    """Returns the tokens of tiny-llama3 as bytes, by rank."""
    vocab = json.loads(LLAMA3.read_text())
    added = {token["content"] for token in vocab["added_tokens"]}
    byte = {character: value for value, character in bytes_to_unicode().items()}
    texts = sorted((id, text) for text, id in vocab["model"]["vocab"].items() if text not in added)
    return [bytes(byte[character] for character in text) for _, text in texts]


def tiktoken_text(tokens):
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def reference(tokens, pattern, special, first):
    """Returns tiktoken's own encoding; special tokens have the ids from `first` on."""
    return tiktoken.Encoding(
        "reference", pat_str=pattern, mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={text: first + place for place, text in enumerate(special)},
    )


for name, (train, model_type, config, files) in SENTENCEPIECE.items():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(fx_text.corpus(11, 1500)), model_writer=model, num_threads=1, minloglevel=2,
        max_sentence_length=10000, **train,
    )
    (folder(name, model_type, config, files) / "tokenizer.model").write_bytes(model.getvalue())
    transformers_golden(name)

tokens = ranks()
listed = [LLAMA31.get(i, f"<|reserved_special_token_{i}|>") for i in range(12)]
config = dict(
    bos_token=listed[0], eos_token=listed[9], tokenizer_class="PreTrainedTokenizerFast",
    added_tokens_decoder=decoder({len(tokens) + i: text for i, text in enumerate(listed)}),
)
out = folder("llama3", "llama", config, {})
(out / "tokenizer.model").write_text(tiktoken_text(tokens))
transformers_golden("llama3")

reserved = iter(range(256))
special = [LLAMA31.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256)]
out = folder("llama3-bare", "llama", None, {}, rope_scaling=dict(factor=8.0, rope_type="llama3"))
(out / "tokenizer.model").write_text(tiktoken_text(tokens))
llama3 = reference(tokens, PATTERN, special, len(tokens))
bos = llama3.encode_single_token("<|begin_of_text|>")
golden(
    "llama3-bare", lambda text, ends: [bos] * ends + llama3.encode(text, allowed_special="all"), llama3.decode
)

out = folder("qwen", "qwen2", None, {})
(out / "qwen.tiktoken").write_text(tiktoken_text(tokens))
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
qwen = reference(tokens, PATTERN.replace("{1,3}", ""), special, len(tokens))
golden(
    "qwen", lambda text, ends: qwen.encode(unicodedata.normalize("NFC", text), allowed_special="all"), qwen.decode
)

# tekken has the bytes in order.
tokens = [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]
special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
tekken = dict(
    config=dict(
        pattern=TEKKEN, num_vocab_tokens=len(tokens), default_vocab_size=len(tokens) + 20 - 5,
        default_num_special_tokens=20, version="v7",
    ),
    vocab=[
        dict(rank=rank, token_bytes=base64.b64encode(token).decode(), token_str=None)
        for rank, token in enumerate(tokens)
    ],
    special_tokens=[dict(rank=rank, token_str=text, is_control=True) for rank, text in enumerate(special)],
)
folder("tekken", "mistral", None, {"tekken.json": tekken})
tokenizer = transformers_golden("tekken")
mistral = Tekkenizer.from_file(OUT / "tekken/tekken.json")
own = lambda text, special: [1] * special + tokenizer(text, add_special_tokens=False)["input_ids"]
transformers_golden("tekken", own)
for text in TEXTS:
    if not any(token in text for token in special):
        assert own(text, True) == mistral.encode(text, bos=True, eos=False), text
