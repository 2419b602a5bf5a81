#!/usr/bin/env python3
"""Losses of full training in bf16 with and without f32 master weights, each with f32 and with 8-bit
states, and all in f32.

    python3 benchmarks/master_weights.py --binary target/release/finetune --model FOLDER \
        --dataset TRAIN --eval-dataset HELD_OUT

Each run trains the same rows for the same steps, from the same weights. Prints JSON: the mean loss
of each 50 steps, the loss on the held-out rows after the last step, and the largest difference of
both from the bf16 run with masters, in per cent.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = {
    "f32 masters": {},
    "none": {"optimizer.master": "none"},
    "f32 masters, int8 states": {"optimizer.state": "int8"},
    "none, int8 states": {"optimizer.master": "none", "optimizer.state": "int8"},
    "f32": {"model.dtype": "f32"},
}
WINDOW = 50


def train(args, keys, output):
    """Returns the losses of the steps, the last loss on the held-out rows, and the peak memory."""
    settings = {
        "model.dtype": "bf16",
        "train.max_steps": args.steps,
        "train.micro_batch_size": args.batch,
        "optimizer.learning_rate": args.learning_rate,
        "data.max_seq_len": args.seq,
        "data.on_long_row": "truncate",
        "eval.steps": args.steps,
        "log.tensorboard": "false",
    } | keys
    line = [args.binary, "--model", args.model, "--dataset", args.dataset, "--eval-dataset", args.eval_dataset]
    line += ["--output", output, "--offline", "--quiet"]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    subprocess.run([str(word) for word in line], check=True)
    entries = [json.loads(row) for row in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss" in entry and "eval_loss" not in entry]
    held_out = [entry["eval_loss"] for entry in entries if "eval_loss" in entry]
    return [step["loss"] for step in steps], held_out[-1], max(step["peak_bytes"] for step in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--eval-dataset", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, keys) in enumerate(RUNS.items()):
            losses, held_out, peak = train(args, keys, Path(scratch) / str(number))
            windows = [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]
            found[name] = {"losses": windows, "held_out": held_out, "peak_bytes": peak}
    wanted = found["f32 masters"]
    for figures in found.values():
        off = [abs(a / b - 1) for a, b in zip(figures["losses"], wanted["losses"], strict=True)]
        figures["percent_off"] = round(100 * max(off), 3)
        figures["held_out_percent_off"] = round(100 * abs(figures["held_out"] / wanted["held_out"] - 1), 3)
    configuration = {name: getattr(args, name) for name in ("steps", "batch", "seq", "learning_rate")}
    configuration |= {name: Path(getattr(args, name)).name for name in ("model", "dataset", "eval_dataset")}
    json.dump({"configuration": configuration, "runs": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
