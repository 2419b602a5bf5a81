"""Runs the golden trajectories of the tests through a binary and compares every step with PyTorch's
float64 run. Prints JSON.

    python3 golden.py --binary finetune --gpus 0 --dtype bf16

Standard library only. Compares the loss (relative; 2e-5 in f32, 1e-2 in bf16), the gradient norm
(ten times that) and the learning rate (1e-9). Exit code 1 if a run fails or differs.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "tests/golden"
RUNS = ("lora", "rslora", "full", "qlora", "dora", "lora_tokens", "lora_qwen2", "lora_phi3")
# The largest relative difference of a loss, by computing dtype.
LOSS = {"f32": 2e-5, "bf16": 1e-2}
LEARNING_RATE = 1e-9
FIGURES = ("loss", "learning_rate", "grad_norm")


def command(args, name, run, output):
    """Returns the command line that repeats `run`, the hyperparameters in trajectory.json."""
    settings = {
        "model.dtype": args.dtype,
        "data.max_seq_len": run["max_len"],
        "data.packing": "false",
        "data.shuffle": "false",
        "train.max_steps": run["steps"],
        "train.micro_batch_size": run["micro_batch"],
        "train.gradient_accumulation_steps": run["accum"],
        "train.max_grad_norm": run["clip"],
        "optimizer.learning_rate": run["lr"],
        "optimizer.weight_decay": run["weight_decay"],
        "optimizer.betas": json.dumps(run["betas"]),
        "optimizer.eps": run["eps"],
        "scheduler.kind": run["schedule"],
        "scheduler.warmup_steps": run["warmup"],
        "log.tensorboard": "false",
    }
    if run["method"] == "lora":
        settings["adapter.path"] = args.golden / "train" / name / "adapter_step0"
    if "quant" in run:
        settings |= {"quantization.kind": run["quant"], "quantization.double_quant": json.dumps(run["double_quant"])}
    line = [args.binary, "--model", args.golden / "models" / run["model"]]
    line += ["--dataset", args.golden / "data/sft_messages.jsonl", "--output", output, "--offline", "--quiet"]
    if args.gpus is not None:
        line += ["--gpus", args.gpus]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return [str(word) for word in line]


def steps_of(metrics):
    """Returns the optimizer steps in metrics.jsonl."""
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def compare(expected, found, tolerance_of_loss):
    """Returns the largest difference of each figure, and those out of bounds."""
    worst = dict.fromkeys(FIGURES, 0.0)
    faults = []
    if len(expected) != len(found):
        faults.append(f"{len(found)} steps, expected {len(expected)}")
    for want, have in zip(expected, found):
        differences = {
            "loss": (abs(have["loss"] - want["loss_f64"]) / want["loss_f64"], tolerance_of_loss),
            "learning_rate": (abs(have["learning_rate"] - want["lr"]), LEARNING_RATE),
            "grad_norm": (abs(have["grad_norm"] - want["grad_norm_f64"]) / want["grad_norm_f64"], 10 * tolerance_of_loss),
        }
        for figure, (difference, tolerance) in differences.items():
            worst[figure] = max(worst[figure], difference)
            if not difference <= tolerance:
                faults.append(f"step {want['step']}: {figure} off by {difference:.3g}, at most {tolerance:g}")
    return worst, faults


def check(args, name):
    folder = args.golden / "train" / name
    if not (folder / "trajectory.json").is_file():
        return {"run": name, "ok": False, "faults": [f"no {folder / 'trajectory.json'}"]}
    golden = json.loads((folder / "trajectory.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out"
        line = command(args, name, golden["run"], output)
        timeout = min(args.timeout, args.until - time.monotonic())
        if timeout <= 0:
            return {"run": name, "ok": False, "faults": [f"not run: the {args.limit:.0f} s for all were used up"]}
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, errors="replace")
        except subprocess.TimeoutExpired:
            return {"run": name, "ok": False, "faults": [f"not done after {timeout:.0f} s"]}
        if done.returncode != 0:
            said = done.stderr.strip()[-2000:]
            return {"run": name, "ok": False, "faults": [f"exit code {done.returncode}", said]}
        found = steps_of(output / "metrics.jsonl")
    worst, faults = compare(golden["steps"], found, args.loss)
    return {"run": name, "ok": not faults, "steps": len(found), "worst": worst, "faults": faults[:10]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder with train/, models/ and data/")
    parser.add_argument("--gpus", help="as the binary takes it; default: not given")
    parser.add_argument("--dtype", choices=LOSS, default="f32", help="of weights and computation")
    parser.add_argument("--loss", type=float, help="largest relative difference of a loss that passes; default: by the type")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for one run")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all runs; what does not fit is not run")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    args = parser.parse_args()
    args.loss = args.loss or LOSS[args.dtype]
    args.until = time.monotonic() + args.limit
    results = [check(args, name) for name in args.runs]
    ok = all(result["ok"] for result in results)
    # Over all runs, so omitted if one did not end.
    ended = all("worst" in result for result in results)
    worst = {figure: max(result["worst"][figure] for result in results) for figure in FIGURES} if ended else None
    print(json.dumps({"ok": ok, "dtype": args.dtype, "loss_tolerance": args.loss, "worst": worst, "runs": results}, indent=2))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
