#!/usr/bin/env python3
"""Compares `finetune plan` with actual runs, for thirteen runs on the CPU: memory and the time of a
step.

    python3 benchmarks/planned_and_run.py --binary target/release/finetune --out FILE

Writes models of random weights. In each round, before each run, it measures the processor with
`finetune bench ops` for the run's shape and dtype, plans the run, trains it, and takes the median
of its steps. Prints a table of medians over the rounds: predicted, actual and the difference of
both. The table also lists the times of all rounds. Needs only Python's standard library; takes
about 25 minutes on two quiet cores.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from shapes import SHAPES, write_model

# A shape between the tiny one and 135m, for wide layers and a small vocabulary.
SHAPES["60m"] = SHAPES["135m"] | {
    "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048,
    "vocab_size": 8192,
}
LORA = {"adapter.r": 16, "adapter.lora_alpha": 32, "adapter.target_modules": "all-linear"}
QLORA = LORA | {"quantization.kind": "nf4", "quantization.double_quant": "true"}
BLOCK = {"train.recompute": "block"}
# Placeholder for a folder of the run.
FOLDER = "FOLDER"
# Shape, tokens of a row, dtype, ranks, keys.
RUNS = [
    ("135m", 512, "bf16", 1, LORA),
    ("135m", 512, "bf16", 1, LORA | BLOCK),
    ("135m", 512, "bf16", 1, QLORA),
    ("135m", 512, "bf16", 1, {}),
    ("135m", 512, "bf16", 1, {"optimizer.master": "none", "optimizer.state": "int8"}),
    ("135m", 256, "f32", 1, LORA | {"train.micro_batch_size": 2}),
    ("135m", 256, "f32", 1, BLOCK),
    ("60m", 512, "bf16", 1, LORA | {"train.gradient_accumulation_steps": 2}),
    ("60m", 512, "bf16", 1, {"train.gradient_accumulation_steps": 2}),
    ("60m", 256, "bf16", 2, {"parallel.strategy": "ddp"}),
    ("60m", 256, "bf16", 2, {"parallel.strategy": "fsdp"}),
    ("60m", 256, "bf16", 2, QLORA),
    ("135m", 256, "f32", 1, {"parallel.offload": "params", "parallel.offload_folder": FOLDER}),
]
STEPS, WARM_UP = 8, 2


def typed(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def output_of(line):
    return subprocess.run([str(word) for word in line], check=True, stdout=subprocess.PIPE).stdout


UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def memory_of(line, log):
    """Returns the planned and the peak memory that a run prints at its end, final save included."""
    with open(log, "w") as said:
        to_log = [(os.POSIX_SPAWN_DUP2, said.fileno(), 2)]
        pid = os.posix_spawn(str(line[0]), [str(word) for word in line], os.environ, file_actions=to_log)
        _, status, usage = os.wait4(pid, 0)
    text = Path(log).read_text()
    found = re.search(r"^memory: ([0-9.]+) (\w+) predicted", text, re.MULTILINE)
    if status != 0 or not found:
        sys.exit(f"planned_and_run: exit status {status} of {line}\n{text}")
    return float(found[1]) * UNITS[found[2]], usage.ru_maxrss * 1024


def one(binary, folder, run):
    """Returns the plan of one run, and its measured figures."""
    shape, seq, dtype, ranks, keys = run
    model = folder / f"{shape}-{seq}"
    if not model.exists():
        write_model(model, shape, seq, 64)
    settings = {
        "model.dtype": dtype, "model.init": "random", "data.format": "text", "data.packing": "false", "data.shuffle": "false",
        "data.max_seq_len": seq, "train.max_steps": STEPS, "train.micro_batch_size": 1, "train.recompute": "none",
        "optimizer.learning_rate": 1e-5, "scheduler.kind": "constant", "log.tensorboard": "false",
    } | keys
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scratch = Path(scratch)
        settings = {key: scratch if value == FOLDER else value for key, value in settings.items()}
        same = ["--model", model, "--dataset", model / "text.jsonl", "--offline"] + typed(settings)
        same += ["--ranks", ranks] if ranks > 1 else []
        measured = scratch / "ops.json"
        measured.write_bytes(output_of([binary, "bench", "ops", "--model", model, "--tokens", seq, "--max-seq-len", seq,
                                        "--dtype", dtype, "--secs", 0.2, "--json", "--quiet"]))
        plan = json.loads(output_of([binary, "plan", "--json", "--quiet", "--calibration", measured] + same))
        planned, peak = memory_of([binary, "--output", scratch / "out"] + same, scratch / "log")
        lines = [json.loads(line) for line in open(scratch / "out/metrics.jsonl")]
    steps = [line for line in lines if "step_secs" in line][WARM_UP:]
    if len(steps) < 3:
        sys.exit(f"planned_and_run: {run} has {len(steps)} steps to measure")
    return {
        "planned_bytes": planned, "peak_bytes": peak,
        "planned_secs": plan["time"]["total"], "step_secs": statistics.median(line["step_secs"] for line in steps),
    }


def median_of(run, rounds):
    """Returns the medians of the rounds of a run, with its settings."""
    shape, seq, dtype, ranks, keys = run
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    times = {f"{key}_by_round": [round(found[key], 4) for found in rounds] for key in ("planned_secs", "step_secs")}
    return {"shape": shape, "tokens": seq, "dtype": dtype, "ranks": ranks, "keys": keys} | medians | times


def row(last):
    """Returns a line of the table."""
    memory = last["peak_bytes"] / last["planned_bytes"] - 1
    time = last["step_secs"] / last["planned_secs"] - 1
    words = " ".join(f"{key.split('.')[1]}={value}" for key, value in last["keys"].items())
    return (f"{last['shape']:>5} {last['tokens']:>4} {last['dtype']:<4} {last['ranks']} "
            f"{last['planned_bytes'] / 1e6:8.0f} {last['peak_bytes'] / 1e6:8.0f} MB {memory:+7.1%}  "
            f"{last['planned_secs']:7.3f} {last['step_secs']:7.3f} s {time:+7.1%}  {words}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, help="this run alone, from 0")
    args = parser.parse_args()
    binary = args.binary.resolve()
    runs = RUNS if args.only is None else [RUNS[args.only]]
    found = [[] for _ in runs]
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.rounds):
            for run, rounds in zip(runs, found):
                rounds.append(one(binary, Path(scratch), run))
                print(row(median_of(run, rounds[-1:])), flush=True)
    medians = [median_of(run, rounds) for run, rounds in zip(runs, found)]
    print(f"medians of {args.rounds} rounds:", *map(row, medians), sep="\n")
    if args.out:
        args.out.write_text(json.dumps(medians, indent=2) + "\n")


if __name__ == "__main__":
    main()
