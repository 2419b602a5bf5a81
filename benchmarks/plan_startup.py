#!/usr/bin/env python3
"""Measures startup time and memory of the program: its help, a recipe that it refuses, and
`finetune plan` for a folder of a 70B Llama. Wall and CPU time, peak memory.

    python3 benchmarks/plan_startup.py --binary target/release/finetune --out FILE

Writes a folder with config.json, the index and the headers of 30 shards, whose tensors are sparse.
Needs only Python's standard library.
"""

import argparse
import ctypes
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

from collect import facts

HIDDEN, MLP, LAYERS, KV, VOCABULARY, SHARDS = 8192, 28672, 80, 1024, 128256, 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}


# Constants of ptrace(2).
TRACE_ME, CONTINUE, SET_OPTIONS, TRACE_EXIT = 0, 7, 0x4200, 0x40
AT_EXIT = 5 | 6 << 8


def tensors():
    """Yields the names and shapes of tensors."""
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


def most_held(line):
    """Returns the bytes of a command's high-water mark, read as it exits. wait4 and GNU time would
    also count the parent's memory: at exec the kernel inherits the mark of the previous program,
    which is this Python's.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    pid = os.fork()
    if pid == 0:
        libc.ptrace(TRACE_ME, 0, None, None)
        silent = os.open("/dev/null", os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.execv(line[0], line)
    _, status = os.waitpid(pid, 0)
    libc.ptrace(SET_OPTIONS, pid, None, TRACE_EXIT)
    high, signal = None, 0
    while os.WIFSTOPPED(status):
        if status >> 8 == AT_EXIT:
            text = Path(f"/proc/{pid}/status").read_text()
            high = next(int(row.split()[1]) << 10 for row in text.splitlines() if row.startswith("VmHWM"))
        libc.ptrace(CONTINUE, pid, None, signal)
        _, status = os.waitpid(pid, 0)
        signal = os.WSTOPSIG(status) if os.WIFSTOPPED(status) and os.WSTOPSIG(status) != 5 else 0
    return high


def measured(line, expected, runs):
    """Returns median wall and CPU time in ms, and the peak bytes of a command that must exit with
    `expected`."""
    wall, processor = [], []
    silent = [(os.POSIX_SPAWN_OPEN, stream, "/dev/null", os.O_WRONLY, 0) for stream in (1, 2)]
    for _ in range(runs):
        start = time.perf_counter()
        _, status, usage = os.wait4(os.posix_spawn(line[0], line, os.environ, file_actions=silent), 0)
        wall.append(1e3 * (time.perf_counter() - start))
        if os.waitstatus_to_exitcode(status) != expected:
            raise SystemExit(f"plan_startup: exit status {os.waitstatus_to_exitcode(status)}, not {expected}, of {line}")
        processor.append(1e3 * (usage.ru_utime + usage.ru_stime))
    return {"wall_ms": statistics.median(wall), "fastest_ms": min(wall), "slowest_ms": max(wall),
            "processor_ms": statistics.median(processor), "peak_bytes": max(most_held(line) for _ in range(3))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures, with the facts of the machine")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        commands = {
            "help": (["--help"], 0),
            "a recipe that is refused": (["--recipe", "lora", "--set", "train.max_stps=1"], 1),
            "plan of a 70B folder": (["plan", "--model", folder, "--on", "8xH100-80GB", "--recipe", "qlora", "--quiet"], 0),
        }
        for what, (words, expected) in commands.items():
            found[what] = measured([args.binary, *words], expected, args.runs)
            print("{what}: {wall_ms:.1f} ms (fastest {fastest_ms:.1f}, slowest {slowest_ms:.1f}), {processor_ms:.1f} ms of processor time, "
                  "{peak:.1f} MB at the peak; medians of {runs} runs".format(
                      what=what, peak=found[what]["peak_bytes"] / 1e6, runs=args.runs, **found[what]))
    if args.out:
        args.python = sys.executable
        args.out.write_text(json.dumps(facts(args) | {"runs": args.runs, "commands": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
