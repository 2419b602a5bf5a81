#!/usr/bin/env python3
"""How long `finetune plan` takes for a folder of a 70B Llama, and what it holds: wall and processor time, peak memory.

    python3 benchmarks/plan_startup.py --binary target/release/finetune

Writes a folder with config.json, the index and the headers of 30 shards, whose tensors are holes in sparse files. Needs nothing but
Python's library.
"""

import argparse
import json
import os
import statistics
import struct
import tempfile
import time
from pathlib import Path

HIDDEN, MLP, LAYERS, KV, VOCABULARY, SHARDS = 8192, 28672, 80, 1024, 128256, 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}


def tensors():
    """Names and shapes."""
    yield "model.embed_tokens.weight", [VOCABULARY, HIDDEN]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, shape in [
            ("self_attn.q_proj", [HIDDEN, HIDDEN]), ("self_attn.k_proj", [KV, HIDDEN]), ("self_attn.v_proj", [KV, HIDDEN]),
            ("self_attn.o_proj", [HIDDEN, HIDDEN]), ("mlp.gate_proj", [MLP, HIDDEN]), ("mlp.up_proj", [MLP, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, MLP]), ("input_layernorm", [HIDDEN]), ("post_attention_layernorm", [HIDDEN]),
        ]:
            yield f"{at}{name}.weight", shape
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCABULARY, HIDDEN]


def write_folder(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    every, weight_map = list(tensors()), {}
    each = -(-len(every) // SHARDS)
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header, end = {}, 0
        for tensor, shape in every[shard * each:(shard + 1) * each]:
            size = 2
            for dimension in shape:
                size *= dimension
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end, weight_map[tensor] = end + size, name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    wall, processor, memory = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        line = [args.binary, "plan", "--model", folder, "--on", "8xH100-80GB", "--recipe", "qlora", "--quiet"]
        for _ in range(args.runs):
            start = time.perf_counter()
            silent = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
            _, status, usage = os.wait4(os.posix_spawn(line[0], line, os.environ, file_actions=silent), 0)
            if status != 0:
                raise SystemExit(f"plan_startup: exit status {status} of {line}")
            wall.append(1e3 * (time.perf_counter() - start))
            processor.append(1e3 * (usage.ru_utime + usage.ru_stime))
            memory.append(usage.ru_maxrss / 1024)
    print(f"plan of a 70B folder: {statistics.median(wall):.1f} ms (fastest {min(wall):.1f}), "
          f"{statistics.median(processor):.1f} ms of processor time, {max(memory):.1f} MiB at the peak; medians of {args.runs} runs")


if __name__ == "__main__":
    main()
