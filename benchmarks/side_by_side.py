"""One training configuration, with finetune and PEFT alternately on the same shape and tokens.
Prints JSON.

    python3 side_by_side.py --binary finetune --shape 135m --mode lora --dtype f32 \
        --seq 512 --steps 8 --rounds 2

Standard library only; `--python` names the interpreter that has torch, transformers and peft. Both
sides start from the same bf16 checkpoint of random weights and are measured in the same way
(measure.py). Tokens/s are the tokens of a step over the wall time that the program itself reports,
as the median of the steps after `--warmup`. `peak_bytes` is the peak of tensors that each program
reports, `peak_gpu_bytes` that of nvidia-smi.

If PEFT cannot run the same configuration, the nearest one is measured, and a note in the output
names it: without bitsandbytes, LoRA over a bf16 base replaces QLoRA, and torch's AdamW replaces
8-bit AdamW. If a side runs out of memory without --checkpointing, both are also compared with it
(`summary_checkpointing`).
"""

import argparse
import hashlib
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import run
from random_weights import complete
from shapes import SHAPES, TARGETS, write_model

HERE = Path(__file__).resolve().parent
# Settings that form both command lines and identify a stored result.
CONFIGURATION = ("shape", "mode", "dtype", "seq", "micro_batch", "accumulation", "steps", "warmup", "checkpointing", "state", "master",
                 "device", "threads")  # fmt: skip
LEAST_SECS = 5


def ours(args, folder, output):
    """Returns the command that trains with the binary."""
    settings = {
        "model.dtype": args.dtype,
        "data.format": "text",
        "data.packing": "false",
        "data.shuffle": "false",
        "data.max_seq_len": args.seq,
        "train.max_steps": args.steps,
        "train.micro_batch_size": args.micro_batch,
        "train.gradient_accumulation_steps": args.accumulation,
        "train.recompute": "block" if args.checkpointing else "none",
        "optimizer.learning_rate": 1e-4,
        "optimizer.state": args.state,
        "scheduler.kind": "constant",
        "log.tensorboard": "false",
    }
    if args.master != "f32":
        settings |= {"optimizer.master": args.master}
    if args.trace:
        # The second and third step, within the warm-up: the trace does not change the figures.
        settings |= {"profile.wait": 0, "profile.warmup": 1, "profile.active": 2}
    if args.mode == "qlora":
        settings |= {"quantization.kind": "nf4", "quantization.double_quant": "true"}
    if args.mode != "full":
        settings |= {"adapter.r": 16, "adapter.lora_alpha": 32, "adapter.target_modules": json.dumps(TARGETS.get(args.shape, "all-linear"))}
    line = [args.binary, "--model", folder, "--dataset", folder / "text.jsonl", "--output", output, "--offline", "--quiet"]
    line += ["--gpus", "0"] if args.device == "cuda" else []
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return line


def theirs(args, folder):
    """Returns the command that trains with PEFT."""
    line = [args.python, HERE / "peft_bench.py", "--folder", folder]
    for name in ("shape", "mode", "dtype", "seq", "micro_batch", "accumulation", "steps", "warmup", "state", "device", "threads"):
        line += ["--" + name.replace("_", "-"), getattr(args, name)]
    return line + (["--checkpointing"] if args.checkpointing else [])


def what_they_can(args):
    """Returns the configuration that PEFT can run, and its differences from the requested one."""
    if args.mode != "qlora" and args.state != "int8":
        return args, []
    line = [args.python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('bitsandbytes') is None)"]
    if subprocess.run(line, stderr=subprocess.DEVNULL).returncode == 0:
        return args, []
    instead, notes = argparse.Namespace(**vars(args)), []
    if args.mode == "qlora":
        instead.mode = "lora"
        notes.append(f"PEFT's side is LoRA over a {args.dtype} base, not QLoRA: {args.python} has no bitsandbytes")
    if args.state == "int8":
        instead.state = "f32"
        what = f"torch's AdamW with {args.dtype if args.mode == 'full' else 'f32'} moments, not 8-bit AdamW"
        notes.append(f"PEFT's optimizer is {what}: {args.python} has no bitsandbytes")
    return instead, notes


def run_ours(args, folder, timeout):
    with tempfile.TemporaryDirectory() as place:
        metrics = Path(place) / "out/metrics.jsonl"
        end_after = args.steps if args.end_after_steps else None
        line = ours(args, folder, metrics.parent)
        result, _ = run(line, args.device, timeout, args.threads, metrics, end_after)
        if args.trace and (traced := metrics.parent / "trace").is_dir():
            shutil.copytree(traced, args.trace, dirs_exist_ok=True)
        if not result["ok"]:
            return result
        steps = [entry for entry in map(json.loads, metrics.read_text().splitlines()) if "loss" in entry]
    result["step_secs"] = [entry["step_secs"] for entry in steps]
    result["losses"] = [entry["loss"] for entry in steps]
    result["tokens"] = [entry["tokens"] for entry in steps]
    result["peak_bytes"] = max((entry["peak_bytes"] for entry in steps), default=None)
    tokens = args.seq * args.micro_batch * args.accumulation
    if result["tokens"] != [tokens] * args.steps:
        return result | {"ok": False, "error": f"steps of {result['tokens']} tokens, not {args.steps} of {tokens}"}
    # A run shorter than a poll: its end bounds the first step.
    result.setdefault("first_step_secs", result["wall_secs"])
    result["tokens_per_sec"] = tokens / statistics.median(result["step_secs"][args.warmup :] or result["step_secs"])
    return result


def run_theirs(args, folder, timeout):
    result, said = run(theirs(args, folder), args.device, timeout, args.threads)
    if not result["ok"]:
        return result
    told = json.loads(said.splitlines()[-1])
    peak = told["peak_gpu_allocated_bytes"] if args.device == "cuda" else result["peak_rss_bytes"]
    return result | told | {"peak_rss_bytes": result["peak_rss_bytes"], "peak_bytes": peak}


class Bench:
    """One configuration's model folder, its results stored in `--results`, and the remaining
    time."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.until = time.monotonic() + args.limit if args.limit else None

    def side(self, measure, args, turn):
        """Runs one side, or returns the stored result of the same run."""
        key = [measure.__name__, turn] + [getattr(args, name) for name in CONFIGURATION]
        kept = None
        if self.args.results:
            name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
            kept = self.args.results / f"{name}.json"
            if kept.is_file():
                return json.loads(kept.read_text())
        timeout = min(self.args.timeout, self.until - time.monotonic()) if self.until else self.args.timeout
        if timeout < LEAST_SECS:
            return {"ok": False, "error": f"not run: the {self.args.limit:.0f} s were used up"}
        result = measure(args, self.folder, timeout)
        print(f"side_by_side: {measure.__name__}, {'ok' if result['ok'] else result['error']}", file=sys.stderr)
        # A run stopped at the time limit may be retried.
        if kept and (result["ok"] or out_of_memory(result)):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(result))
        return result

    def sides(self, args, instead):
        mine, other = [], []
        for turn in range(args.rounds):
            if self.args.only != "peft":
                mine.append(self.side(run_ours, args, turn))
            if self.args.only != "ours":
                other.append(self.side(run_theirs, instead, turn))
        return mine, other


def out_of_memory(result):
    return not result["ok"] and re.search("out.of.memory|ALLOC_FAILED", result["error"], re.IGNORECASE) is not None


def best(runs, figure, choose):
    values = [run[figure] for run in runs if run["ok"] and run.get(figure) is not None]
    return choose(values) if values else None


def ratios(mine, other):
    """Returns finetune's figures over PEFT's: the fastest run of each, the least memory of each."""
    figures = {"tokens_per_sec": max} | dict.fromkeys(
        ("peak_bytes", "peak_rss_bytes", "peak_gpu_bytes", "first_step_secs", "cpu_secs"), min
    )
    pairs = {name: (best(mine, name, choose), best(other, name, choose)) for name, choose in figures.items()}
    return {name: {"ours": a, "peft": b, "ratio": a / b if a and b else None} for name, (a, b) in pairs.items()}


def compared(bench):
    """Returns all measurements, the ratio of each figure, and true if all runs succeeded."""
    args = bench.args
    instead, notes = what_they_can(args) if args.only != "ours" else (args, [])
    mine, other = bench.sides(args, instead)
    found = {"summary": ratios(mine, other), "notes": notes, "ours": mine, "peft": other}
    failed = [run for run in mine + other if not run["ok"]]
    who = [name for name, runs in (("ours", mine), ("PEFT", other)) if any(map(out_of_memory, runs))]
    if who and not args.checkpointing:
        notes.append(f"without checkpointing {' and '.join(who)} ran out of memory: summary_checkpointing is with it on both sides")
        again = [argparse.Namespace(**vars(side) | {"checkpointing": True}) for side in (args, instead)]
        mine, other = bench.sides(*again)
        found |= {"summary_checkpointing": ratios(mine, other), "ours_checkpointing": mine, "peft_checkpointing": other}
        # An unsupported configuration of PEFT is a result, not a failure of the benchmark.
        failed = [run for run in failed if not out_of_memory(run) or run in found["ours"]]
        failed += [run for run in mine + other if not run["ok"]]
    return found | {"ok": not failed}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch, transformers, peft")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--mode", choices=("lora", "qlora", "full"), default="lora")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that do not count in the median")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again, block by block")
    parser.add_argument("--state", choices=("f32", "int8"), default="f32", help="of AdamW; PEFT's side: bitsandbytes'")
    parser.add_argument("--master", choices=("f32", "none"), default="f32",
                        help="of our bf16 weights when all train; PEFT's side has none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: their own choice")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=("ours", "peft"), help="one side alone")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--limit", type=float, help="seconds for all runs; the output names those that did not fit")
    parser.add_argument("--end-after-steps", action="store_true", help="end our run with its last step, before it saves")
    parser.add_argument("--trace", type=Path, help="folder that receives the trace of our second and third step")
    parser.add_argument("--models", type=Path, help="folder that keeps the models, one a shape; default: made anew")
    parser.add_argument("--results", type=Path, help="folder that keeps each side's result, for calls that need the same again")
    args = parser.parse_args()
    if not shutil.which(args.binary):
        parser.error(f"--binary must be a program, {args.binary} is none")
    return args


def prepared(args, scratch):
    """Prepares the model folder, with its checkpoint and enough rows for the steps."""
    folder = (args.models or Path(scratch)).resolve() / args.shape
    write_model(folder, args.shape, args.seq, args.steps * args.micro_batch * args.accumulation)
    if not complete(folder):
        maker = [args.python, HERE / "random_weights.py", "--folder", folder, "--device", args.device]
        if subprocess.run(maker, stdout=sys.stderr).returncode != 0:
            sys.exit(f"side_by_side: no weights for the {args.shape} shape, see above: {args.python} must have torch, "
                     f"transformers and safetensors" + (", and torch must see a GPU" if args.device == "cuda" else ""))  # fmt: skip
    return folder


def main():
    # Ends runs and removes folders if a caller's time limit ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        found = compared(Bench(args, prepared(args, scratch)))
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    hidden = ("binary", "python", "models", "results", "trace")
    print(json.dumps({"configuration": {k: v for k, v in shown.items() if k not in hidden}} | found, indent=2))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
