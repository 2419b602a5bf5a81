"""Trains on two ranks that share one GPU and compares every step with one rank. Prints JSON.

    python3 two_ranks.py --binary finetune --gpu 0
    python3 two_ranks.py --binary finetune               the same on the CPU with threads, to try
                                                         the script

Standard library only. Two processes use NCCL over the loopback, each pretending to be its own host
(NCCL_HOSTID). NVIDIA does not support such sharing and it is slow, so this checks values, not
speed: the tiny Llama, three steps, one micro-batch of one row a step on each rank. Losses may
differ by 1e-5, gradient norms by 1e-4 (relative): NCCL chooses the order of its sums. Exit code 1
if a run fails or differs.
"""

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from golden import GOLDEN, steps_of

RECIPES = (("lora", "ddp"), ("full", "ddp"), ("full", "zero2"), ("full", "fsdp"))
LOSS, GRAD_NORM = 1e-5, 1e-4
# As in crates/comm/src/collective/nccl/environment.rs, which explains the reason.
SHARED = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_DEBUG": "WARN",
}

TAKES_TURNS = ": kernels of two processes take turns on one GPU, so this shows no fault of finetune"


def library():
    """Returns the NCCL that the loader finds, else that of PyTorch's wheels."""
    if "FINETUNE_NCCL_LIB" in os.environ:
        return {}
    try:
        ctypes.CDLL("libnccl.so.2")
    except OSError:
        try:
            import nvidia
        except ImportError:
            return {}
        return {"FINETUNE_NCCL_LIB": str(Path(list(nvidia.__path__)[0]) / "nccl")}
    return {}


def line(args, recipe, strategy, output, accumulation):
    settings = {
        "model.dtype": "f32",
        "data.max_seq_len": 256,
        "data.packing": "false",
        "train.max_steps": 3,
        "train.micro_batch_size": 1,
        "train.gradient_accumulation_steps": accumulation,
        "train.max_grad_norm": 0,
        "checkpoint.output_dtype": "f32",
        "log.tensorboard": "false",
        "parallel.strategy": strategy,
    }
    words = [args.binary, "--model", GOLDEN / "models/tiny-llama", "--dataset", GOLDEN / "data/sft_messages.jsonl"]
    words += ["--recipe", recipe, "--output", output, "--offline", "--quiet"]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return [str(word) for word in words]


def finished(processes, timeout):
    """Returns the faults of the processes; ends all processes at the limit, or soon after one has
    failed."""
    until = time.monotonic() + timeout
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            until = min(until, time.monotonic() + 15)
        time.sleep(0.05)
    has_failed = any(process.poll() not in (None, 0) for process in processes)
    late = [process for process in processes if process.poll() is None]
    for process in late:
        process.kill()
    said = [(process.communicate()[1][-2000:], process.returncode) for process in processes]
    faults = [text for text, code in said if code != 0]
    if late and not has_failed:
        return [f"not done after {timeout:.0f} s{TAKES_TURNS if len(processes) > 1 else ''}", *faults]
    return faults


def start(words, environment):
    return subprocess.Popen(words, env={**os.environ, **environment}, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)


def two_ranks(args, words):
    if args.gpu is None:
        return [start(words + ["--ranks", "2"], {})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = words + ["--gpus", args.gpu, "--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    own = [{**SHARED, **library(), "NCCL_HOSTID": f"finetune-rank-{rank}"} for rank in range(2)]
    return [start(words + ["--rank", str(rank)], own[rank]) for rank in range(2)]


def check(args, recipe, strategy):
    report = {"recipe": recipe, "strategy": strategy, "ok": False}
    with tempfile.TemporaryDirectory() as place:
        one, two = Path(place) / "one", Path(place) / "two"
        alone = ["--gpus", args.gpu] if args.gpu is not None else ["--ranks", "1"]
        runs = [
            finished([start(line(args, recipe, "single", one, 2) + alone, {})], args.timeout),
            finished(two_ranks(args, line(args, recipe, strategy, two, 1)), args.timeout),
        ]
        if faults := [fault for run in runs for fault in run]:
            return {**report, "faults": faults}
        pairs = list(zip(steps_of(one / "metrics.jsonl"), steps_of(two / "metrics.jsonl"), strict=True))

    def worst(figure):
        return max(abs(a[figure] - b[figure]) / abs(a[figure]) for a, b in pairs)

    loss, norm = worst("loss"), worst("grad_norm")
    return {**report, "ok": loss <= LOSS and norm <= GRAD_NORM, "steps": len(pairs), "loss": loss, "grad_norm": norm}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True)
    parser.add_argument("--gpu", help="its number; without it on the CPU")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each run")
    args = parser.parse_args()
    reports = [check(args, *run) for run in RECIPES]
    print(json.dumps({"runs": reports, "ok": all(report["ok"] for report in reports)}, indent=1))
    sys.exit(not all(report["ok"] for report in reports))


if __name__ == "__main__":
    main()
