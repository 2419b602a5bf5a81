#!/usr/bin/env python3
"""Trains each built-in recipe on 60, 1,000 and 8,000 rows of a data set and prints the held-out
loss before and after.

The exit status is 1 if the loss of a cell is not lower after training than before. The last rows of
the file, 200 of them at most and a tenth of it at most, are held out. A file with fewer rows than a
column asks for fills the column with all that it has.

  scripts/recipes_learn.py target/release/finetune MODEL ROWS.jsonl \
      [--rows 60,1000] [--recipes lora,full] [--set KEY=VALUE]
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

RECIPES = [
    "lora", "qlora", "qlora-8bit-optimizer", "dora", "full", "ddp-lora", "fsdp-full", "fsdp-qlora", "hsdp-full",
]
RANKS = {"ddp-lora": 2, "fsdp-full": 2, "fsdp-qlora": 2, "hsdp-full": 4}
MOST_HELD_OUT = 200


def read_rows(path):
    """Returns the rows of a .jsonl or .json file as lines of JSON."""
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


def held_out_losses(metrics):
    """Returns the first and the last held-out loss of a run."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return losses[0], losses[-1]


def train(args, recipe, folder, count):
    """Trains `recipe` on `count` rows in `folder`; returns the loss before, the loss after and the
    number of steps."""
    output = folder / f"{recipe}-{count}"
    command = [
        str(args.binary), "--model", str(args.model), "--recipe", recipe, "--dataset", str(folder / f"{count}.jsonl"),
        "--eval-dataset", str(folder / "held-out.jsonl"), "--output", str(output), "--offline", "--quiet",
        "--set", "checkpoint.save_steps=never", "--set", "log.tensorboard=false",
    ]
    if recipe in RANKS:
        command += ["--ranks", str(RANKS[recipe])]
    for setting in args.set:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    metrics = output / "metrics.jsonl"
    steps = sum('"loss"' in line for line in metrics.read_text(encoding="utf-8").splitlines())
    return (*held_out_losses(metrics), steps)


def main():
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=pathlib.Path, help="the finetune binary")
    parser.add_argument("model", type=pathlib.Path, help="folder of the model")
    parser.add_argument("data", type=pathlib.Path, help="rows as .jsonl or .json")
    parser.add_argument("--rows", default="60,1000,8000", help="numbers of rows, with commas (default: 60,1000,8000)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="recipes, with commas (default: all of them)")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run; may be repeated")
    args = parser.parse_args()
    args.binary = args.binary.resolve()
    rows = read_rows(args.data)
    held_out = min(MOST_HELD_OUT, max(1, len(rows) // 10))
    worse = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "held-out.jsonl").write_text("".join(rows[-held_out:]), encoding="utf-8")
        rows = rows[:-held_out]
        print(f"{'recipe':<22}{'rows':>6}{'steps':>7}{'before':>9}{'after':>9}  verdict", flush=True)
        for count in sorted({min(int(count), len(rows)) for count in args.rows.split(",")}):
            (folder / f"{count}.jsonl").write_text("".join(rows[:count]), encoding="utf-8")
            for recipe in args.recipes.split(","):
                before, after, steps = train(args, recipe, folder, count)
                # A loss of NaN is not better either.
                is_better = after < before
                worse += not is_better
                verdict = "better" if is_better else "NOT BETTER"
                print(f"{recipe:<22}{count:>6}{steps:>7}{before:>9.4f}{after:>9.4f}  {verdict}", flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
