"""One training configuration, ours and PEFT's by turns on the same shape and tokens. Prints JSON.

    python3 side_by_side.py --binary finetune --shape 135m --mode lora --dtype f32 --seq 512 --steps 8 --rounds 2

Standard library only; `--python` names the interpreter that has torch, transformers and peft. Both sides are measured from
outside in the same way: wall time from the start of the process to the end of its first step, peak resident memory and CPU time as
the system counts them, and on a GPU the device memory that nvidia-smi sees above what was in use before. Tokens/s are the tokens
of a step over its wall time as the program itself gives it, median of the steps after `--warmup`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from shapes import SHAPES, write_model

POLL_SECS = 0.02


class DeviceMemory:
    """The most memory in use on the first GPU while the block runs, above what was in use before it."""

    QUERY = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

    def __init__(self, device):
        self.watch = device == "cuda"
        self.peak_bytes = None

    def __enter__(self):
        if self.watch:
            try:
                self.before = int(subprocess.check_output(self.QUERY, timeout=20).split()[0])
                self.process = subprocess.Popen((*self.QUERY, "-lms", "50"), stdout=subprocess.PIPE)
            except (OSError, ValueError, IndexError, subprocess.SubprocessError):
                self.watch = False
                return self
            self.thread = threading.Thread(target=self._read)
            self.thread.start()
        return self

    def _read(self):
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.peak_bytes = max(self.peak_bytes or 0, (int(line) - self.before) << 20)

    def __exit__(self, *_):
        if self.watch:
            self.process.terminate()
            self.process.wait()
            self.thread.join()


def ours(args, folder, output):
    """The command that trains with the binary."""
    settings = {
        "model.init": "pretrained" if from_disk(args) else "random",
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
        "scheduler.kind": "constant",
        "log.tensorboard": "false",
    }
    if args.mode == "qlora":
        settings |= {"quantization.kind": "nf4", "quantization.double_quant": "true"}
    if args.mode != "full":
        settings |= {"adapter.r": 16, "adapter.lora_alpha": 32, "adapter.target_modules": "all-linear"}
    line = [args.binary, "--model", folder, "--dataset", folder / "text.jsonl", "--output", output, "--offline", "--quiet"]
    line += ["--gpus", "0"] if args.device == "cuda" else []
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    return line


def from_disk(args):
    """Whether both start from a bf16 checkpoint, as people do, and not from random weights."""
    return args.mode != "full"


def theirs(args, folder):
    """The command that trains with PEFT."""
    line = [args.python, Path(__file__).with_name("peft_bench.py"), "--folder", folder]
    for name in ("mode", "dtype", "seq", "micro_batch", "accumulation", "steps", "warmup", "device", "threads"):
        line += ["--" + name.replace("_", "-"), getattr(args, name)]
    return line + (["--checkpointing"] if args.checkpointing else [])


def run(args, line, metrics=None):
    """Starts `line`, waits for it at most `--timeout` seconds, and measures it; `metrics` is the file that gets a line a step."""
    line = [str(word) for word in line]
    environment = os.environ.copy()
    if args.threads:
        environment |= {"RAYON_NUM_THREADS": str(args.threads), "OMP_NUM_THREADS": str(args.threads)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in line)
    result = {"command": shown, "ok": False}
    with DeviceMemory(args.device) as memory, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(line, stdout=out, stderr=err, env=environment)
        status = 0
        while (done := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            elapsed = time.monotonic() - start
            if metrics and "first_step_secs" not in result and metrics.exists() and b"\n" in metrics.read_bytes():
                result["first_step_secs"] = elapsed
            if elapsed > args.timeout:
                process.send_signal(signal.SIGKILL)
                result["error"] = f"not done after {args.timeout} s"
            time.sleep(POLL_SECS)
        _, status, usage = done
        process.returncode = os.waitstatus_to_exitcode(status)
        result |= {"wall_secs": time.monotonic() - start, "cpu_secs": usage.ru_utime + usage.ru_stime}
        result["peak_rss_bytes"] = usage.ru_maxrss * 1024
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    result["peak_gpu_bytes"] = memory.peak_bytes
    if process.returncode != 0:
        result.setdefault("error", f"exit code {process.returncode}: {texts[1].strip()[-2000:]}")
        return result, ""
    return result | {"ok": True}, texts[0]


def run_ours(args, folder, output):
    metrics = output / "metrics.jsonl"
    result, _ = run(args, ours(args, folder, output), metrics)
    if result["ok"]:
        steps = [entry for entry in map(json.loads, metrics.read_text().splitlines()) if "loss" in entry]
        result["step_secs"] = [entry["step_secs"] for entry in steps]
        result["losses"] = [entry["loss"] for entry in steps]
        result["tokens"] = [entry["tokens"] for entry in steps]
        result["peak_bytes_reported"] = max(entry["peak_bytes"] for entry in steps)
        tokens = args.seq * args.micro_batch * args.accumulation
        if set(result["tokens"]) != {tokens}:
            return result | {"ok": False, "error": f"steps of {result['tokens']} tokens, not {tokens}"}
        # A run shorter than a poll: its end bounds the first step.
        result.setdefault("first_step_secs", result["wall_secs"])
        result["tokens_per_sec"] = tokens / statistics.median(result["step_secs"][args.warmup :] or result["step_secs"])
    return result


def run_theirs(args, folder):
    result, said = run(args, theirs(args, folder))
    return result | json.loads(said.splitlines()[-1]) | {"peak_rss_bytes": result["peak_rss_bytes"]} if result["ok"] else result


def best(runs, figure, choose):
    values = [run[figure] for run in runs if run["ok"] and run.get(figure) is not None]
    return choose(values) if values else None


def ratios(mine, other):
    """Ours over PEFT's: the fastest run of each, the least memory of each."""
    figures = {"tokens_per_sec": max, "peak_rss_bytes": min, "peak_gpu_bytes": min, "first_step_secs": min, "cpu_secs": min}
    pairs = {name: (best(mine, name, choose), best(other, name, choose)) for name, choose in figures.items()}
    return {name: {"ours": a, "peft": b, "ratio": a / b if a and b else None} for name, (a, b) in pairs.items()}


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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: their own choice")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    return parser.parse_args()


def main():
    args = arguments()
    mine, other = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, args.shape, args.seq, args.steps * args.micro_batch * args.accumulation)
        if from_disk(args):
            maker = Path(__file__).with_name("peft_bench.py")
            subprocess.run([args.python, maker, "--folder", folder, "--write-weights"], check=True, stdout=sys.stderr)
        for turn in range(args.rounds):
            mine.append(run_ours(args, folder, Path(scratch) / f"out-{turn}"))
            other.append(run_theirs(args, folder))
            print(f"side_by_side: round {turn + 1} of {args.rounds} done", file=sys.stderr)
    shown = {key: value for key, value in vars(args).items() if key not in ("binary", "python")}
    summary = ratios(mine, other)
    print(json.dumps({"configuration": shown, "summary": summary, "ours": mine, "peft": other}, indent=2))
    sys.exit(0 if all(run["ok"] for run in mine + other) else 1)


if __name__ == "__main__":
    main()
