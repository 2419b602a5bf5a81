"""Model folders of a given shape without weights: config.json, a small tokenizer, rows of text.

Both sides of a benchmark start from such a folder; random_weights.py adds a checkpoint. The
tokenizer is that of a tiny model of the tests. Its few hundred ids are valid in every shape, and
speed does not depend on which ids occur.
"""

import json
import random
import shutil
from pathlib import Path

TOKENIZER_FROM = Path(__file__).resolve().parent.parent / "tests/golden/models/tiny-llama"

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}


def _shape(family, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, tied=True):
    return family | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


# A Qwen3 with 16 experts, of which a token uses 2: 123 million parameters, 49 million of them
# active.
_EXPERTS = _QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}

# A Qwen3.5 with Gated DeltaNet in three of four layers: 117 million parameters.
_DELTA = _QWEN3 | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

# The targets of LoRA, where they are not all linear layers: PEFT puts LoRA on experts by forming
# the whole change of each weight.
TARGETS = {"moe": ["q_proj", "k_proj", "v_proj", "o_proj"]}

SHAPES = {
    # To try the scripts.
    "tiny": _shape(_LLAMA, 64, 2, 4, 2, 16, 128, 512),
    # SmolLM-135M.
    "135m": _shape(_LLAMA, 576, 30, 9, 3, 64, 1536, 49152),
    "moe": _shape(_EXPERTS, 512, 8, 8, 4, 64, 1536, 32000),
    "delta": _shape(_DELTA, 768, 12, 8, 2, 128, 2048, 32000),
    # Llama-3.2-1B.
    "1b": _shape(_LLAMA, 2048, 16, 32, 8, 64, 8192, 128256),
    # Qwen3-0.6B.
    "0.6b": _shape(_QWEN3, 1024, 28, 16, 8, 128, 3072, 151936),
    # Qwen3-1.7B.
    "1.7b": _shape(_QWEN3, 2048, 28, 16, 8, 128, 6144, 151936),
    # Llama-3.2-3B.
    "3b": _shape(_LLAMA, 3072, 28, 24, 8, 128, 8192, 128256),
    # Qwen3-8B: 8.19 billion parameters, 16.4 GB in bf16.
    "8b": _shape(_QWEN3, 4096, 36, 32, 8, 128, 12288, 151936, tied=False),
}

WORDS = (
    "a river bends past the old mill and every lamp on its bank was lit before rain came down over green hills "
    "where two children counted boats until night fell while their mother sang of ships far away from home"
).split()


def write_model(folder, shape, seq, rows):
    """Fills `folder`; each of the `rows` rows of text.jsonl has at least `seq` tokens, so that
    truncated rows have exactly `seq`."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny = json.loads((TOKENIZER_FROM / "config.json").read_text())
    config = SHAPES[shape] | {
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max(2048, seq),
        "torch_dtype": "float32",
    }
    config |= {key: tiny[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TOKENIZER_FROM / name, folder / name)
    dice = random.Random(0)
    with open(folder / "text.jsonl", "w") as file:
        for _ in range(rows):
            # A word has at least one token.
            text = " ".join(dice.choice(WORDS) for _ in range(seq + 8))
            file.write(json.dumps({"text": text}) + "\n")
