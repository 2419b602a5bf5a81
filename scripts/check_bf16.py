#!/usr/bin/env python3
"""Compares the error of a step in bf16 with the same step in f64, for finetune and for PyTorch.

    python scripts/check_bf16.py --finetune target/release/finetune
    python scripts/check_bf16.py --finetune target/release/finetune --model FOLDER --rows 64

Needs torch, transformers and the binary; no network, no GPU. Each row of a text data set is a step
of full training with a learning rate near zero, so that every step uses the stored weights. Loss
and gradient norm of each step are compared with those of transformers in f64; the same is done for
transformers in bf16. Prints, for each model, the root mean square of both relative errors; exits 1
if finetune's is more than a tenth larger than PyTorch's.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from check_outputs import GOLDEN, MAX_SEQ_LEN, MODELS, Rows

# Both errors come from a few dozen steps, so one exceeds the other by chance.
SLACK = 1.1


def ours(binary, folder, rows, steps):
    """Returns loss and gradient norm of each row, in bf16."""
    settings = {
        "model.dtype": "bf16",
        "data.format": "text",
        "data.packing": "false",
        "data.shuffle": "false",
        "data.max_seq_len": MAX_SEQ_LEN,
        "data.on_long_row": "truncate",
        "train.max_steps": steps,
        "train.micro_batch_size": 1,
        "train.gradient_accumulation_steps": 1,
        "optimizer.learning_rate": 1e-30,
        "scheduler.kind": "constant",
        "log.tensorboard": "false",
    }
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out"
        line = [binary, "--model", folder, "--dataset", rows, "--output", output, "--offline", "--quiet"]
        for key, value in settings.items():
            line += ["--set", f"{key}={value}"]
        subprocess.run([str(word) for word in line], check=True)
        entries = [json.loads(entry) for entry in (output / "metrics.jsonl").read_text().splitlines()]
    return [(entry["loss"], entry["grad_norm"]) for entry in entries if "grad_norm" in entry]


def theirs(folder, rows, steps, dtype):
    """Returns the same from transformers, with sums of losses and norms in f64."""
    # The plain form is exact for every family; bf16 uses the default, as users do.
    attention = {"attn_implementation": "eager"} if dtype == torch.float64 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **attention)
    found = []
    for ids, counts in Rows(folder, rows).examples[:steps]:
        model.zero_grad()
        logits = model(torch.tensor([ids])).logits[0]
        # Like transformers' own losses: in f32 at least.
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        targets = torch.tensor([id if count else -100 for id, count in zip(ids, counts, strict=True)])
        loss = torch.nn.functional.cross_entropy(logits[:-1], targets[1:])
        loss.backward()
        squares = sum(parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None)
        found.append((loss.item(), math.sqrt(squares)))
    return found


def error(found, exact, figure):
    """Returns the root mean square of the relative errors of a figure."""
    if len(found) != len(exact):
        sys.exit(f"check_bf16.py: {len(found)} steps beside {len(exact)}")
    squares = [(a[figure] / b[figure] - 1) ** 2 for a, b in zip(found, exact, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune")
    parser.add_argument("--model", type=Path, help="a folder; default: each tiny family that is stored in bf16")
    parser.add_argument("--dataset", type=Path, default=GOLDEN / "data" / "text.jsonl", help="rows of text")
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folders = [args.model] if args.model else list(MODELS.values())
    failed = False
    print(f"{'':24} {'loss: ours':>12} {'PyTorch':>10}   {'norm: ours':>12} {'PyTorch':>10}")
    for folder in folders:
        steps = min(args.rows, len(args.dataset.read_text().splitlines()))
        exact = theirs(folder, args.dataset, steps, torch.float64)
        pairs = ours(args.finetune, folder, args.dataset, steps), theirs(folder, args.dataset, steps, torch.bfloat16)
        loss, norm = ([error(found, exact, figure) for found in pairs] for figure in (0, 1))
        failed |= loss[0] > SLACK * loss[1] or norm[0] > SLACK * norm[1]
        print(f"{folder.name:24} {loss[0]:12.2e} {loss[1]:10.2e}   {norm[0]:12.2e} {norm[1]:10.2e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
