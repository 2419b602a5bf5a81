"""Runs the golden trajectories of the tests through a binary and compares every step with PyTorch's float64 run. Prints JSON.

    python3 golden.py --binary finetune --gpus 0

Standard library only. What is compared: loss (2e-5 relative), learning rate (1e-9), gradient norm (2e-4 relative).
Exit code 1 when a run fails or differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "tests/golden"
RUNS = ("lora", "rslora", "full", "lora_qwen2", "lora_phi3")
LOSS, LEARNING_RATE, GRAD_NORM = 2e-5, 1e-9, 2e-4


def command(binary, golden, name, run, output, gpus):
    """The command line that repeats `run`, the hyper-parameters in trajectory.json."""
    settings = {
        "model.dtype": "f32",
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
        settings["adapter.path"] = golden / "train" / name / "adapter_step0"
    line = [binary, "--model", golden / "models" / run["model"], "--dataset", golden / "data/sft_messages.jsonl"]
    line += ["--output", output, "--offline", "--quiet"]
    if gpus is not None:
        line += ["--gpus", gpus]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return [str(word) for word in line]


def steps_of(metrics):
    """The optimizer steps in metrics.jsonl."""
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def compare(expected, found):
    """The largest difference of each figure, and what is out of bounds."""
    worst = {"loss": 0.0, "learning_rate": 0.0, "grad_norm": 0.0}
    faults = []
    if len(expected) != len(found):
        faults.append(f"{len(found)} steps, expected {len(expected)}")
    for want, have in zip(expected, found):
        differences = {
            "loss": (abs(have["loss"] - want["loss_f64"]) / want["loss_f64"], LOSS),
            "learning_rate": (abs(have["learning_rate"] - want["lr"]), LEARNING_RATE),
            "grad_norm": (abs(have["grad_norm"] - want["grad_norm_f64"]) / want["grad_norm_f64"], GRAD_NORM),
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
        line = command(args.binary, args.golden, name, golden["run"], output, args.gpus)
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=args.timeout, errors="replace")
        except subprocess.TimeoutExpired:
            return {"run": name, "ok": False, "faults": [f"not done after {args.timeout} s"]}
        if done.returncode != 0:
            said = done.stderr.strip()[-2000:]
            return {"run": name, "ok": False, "faults": [f"exit code {done.returncode}", said]}
        found = steps_of(output / "metrics.jsonl")
    worst, faults = compare(golden["steps"], found)
    return {"run": name, "ok": not faults, "steps": len(found), "worst": worst, "faults": faults[:10]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder with train/, models/ and data/")
    parser.add_argument("--gpus", help="as the binary takes it; default: not given")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for one run")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    args = parser.parse_args()
    results = [check(args, name) for name in args.runs]
    ok = all(result["ok"] for result in results)
    print(json.dumps({"ok": ok, "runs": results}, indent=2))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
