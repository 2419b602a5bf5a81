#!/usr/bin/env python3
"""Checks that a change moves no number: two versions of the program, the same runs, the same bits.

    scripts/same_bits.py BASE HEAD            builds two commits and compares them
    scripts/same_bits.py --binaries A B       compares two existing binaries

Each run of the matrix (methods, adapters, quantization, ranks and strategies, recompute, offload,
precision, resuming in the middle, the verbs that write models, the quickstart) goes through both
binaries on this machine. Two things are compared: byte for byte every safetensors and GGUF file,
including the optimizer's state in checkpoints; and digit for digit every figure of metrics.jsonl
except times and memory. A difference, or a failed run, ends in exit code 1.

Two commits are built in CARGO_TARGET_DIR if it is set, so a binary is built once; else in a
temporary folder. `--only TEXT` runs the cases whose name contains it, `--list` lists all. `--plant
KEY=VALUE` sets a recipe key for the second binary only, to show that a difference is detected.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

# Figures that depend on a clock or the system.
NOT_COMPARED = {"step_secs", "tokens_per_sec", "peak_bytes", "rank_secs"} | {
    f"{part}_secs" for part in ("data", "forward", "backward", "exposed", "update", "save", "other")
}

# Time limit of a run, which takes seconds.
HANGS_SECS = 1200

STEPS = 8
# The step at which every run saves, and from which a resumed one continues.
MIDDLE = 4

# Keys of every training run; a case may override them.
COMMON = {
    "data.max_seq_len": 96,
    "data.packing": "false",
    "train.max_steps": STEPS,
    "train.gradient_accumulation_steps": 2,
    "train.seed": 7,
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.1,
    "scheduler.warmup_steps": 2,
    "checkpoint.save_steps": MIDDLE,
    "checkpoint.output_dtype": "f32",
    "log.tensorboard": "false",
}

LORA = {"adapter.r": 4, "adapter.lora_alpha": 8, "adapter.lora_dropout": 0.1}
NF4 = {"quantization.kind": "nf4"}
# The base of the verbs.
MODEL = ["--model", str(GOLDEN / "models" / "tiny-llama")]


class Case:
    """A run: its name, its recipe keys, the model, and the number of ranks."""

    def __init__(self, name, keys, model="tiny-llama", ranks=1, resumed=False):
        self.name, self.keys, self.ranks, self.resumed = name, keys, ranks, resumed
        self.model = GOLDEN / "models" / model

    def command(self, output):
        keys = {**COMMON, **self.keys}
        if self.ranks > 1:
            keys["train.gradient_accumulation_steps"] = 1
        command = ["--quiet", "--model", self.model, "--dataset", GOLDEN / "data" / "sft_messages.jsonl"]
        command += ["--output", output]
        if self.ranks > 1:
            command += ["--ranks", self.ranks]
        for key, value in keys.items():
            command += ["--set", f"{key}={value}"]
        return command

    def run(self, binary, place, plant):
        output = place / "out"
        command = self.command(output) + plant
        call(binary, command, place)
        if self.resumed:
            resume(binary, command, output, place)


class Quickstart:
    """The README's first command, on built-in data, with its evaluations."""

    name = "quickstart"

    def run(self, binary, place, plant):
        call(binary, ["--recipe", "quickstart", "--quiet", "--output", place / "out"] + plant, place)


class Verbs:
    """Files of the other verbs, from a LoRA adapter: merged, quantized and exported models, and
    greedy text."""

    name = "verbs: merge, quantize, export, eval, generate"

    def run(self, binary, place, plant):
        adapter = place / "adapter"
        keys = {**LORA, "train.max_steps": 4, "data.shuffle": "false"}
        call(binary, Case("", keys).command(adapter) + plant, place)
        adapted = MODEL + ["--adapter", adapter]
        call(binary, ["merge", *adapted, "--output", place / "merged"], place)
        for kind in ["nf4", "fp4", "int8"]:
            call(binary, ["quantize", *MODEL, "--kind", kind, "--output", place / kind], place)
        for kind in ["f16", "q8_0"]:
            flags = ["--format", "gguf", "--type", kind, "--output", place / f"{kind}.gguf"]
            call(binary, ["export", *MODEL, *flags], place)
        data = ["--dataset", GOLDEN / "data" / "sft_messages.jsonl", "--set", "data.max_seq_len=96"]
        told = call(binary, ["eval", *adapted, *data, "--json"], place)
        prompt = ["--prompt", "The river", "--max-new-tokens", "16", "--temperature", "0"]
        told += call(binary, ["generate", *adapted, *prompt], place)
        (place / "told.txt").write_text(told.replace(str(place), "[PLACE]"))


def methods():
    """Yields every training method on one rank."""
    yield Case("full", {}, resumed=True)
    yield Case("full int8 states", {"optimizer.state": "int8"}, resumed=True)
    yield Case("full recompute", {"train.recompute": "block"})
    yield Case("full no recompute", {"train.recompute": "none"})
    yield Case("full bf16", {"model.dtype": "bf16", "checkpoint.output_dtype": "bf16"}, resumed=True)
    yield Case("full eager attention", {"model.attention": "eager"})
    yield Case("full packed", {"data.packing": "true", "data.train_on": "all", "train.max_steps": 6})
    yield Case("full micro-batches of 3", {"train.micro_batch_size": 3, "train.gradient_accumulation_steps": 3})
    yield Case("full clipped", {"train.max_grad_norm": 0.1, "scheduler.kind": "linear"})
    yield Case("full from random", {"model.init": "random"})
    yield Case("full offload optimizer", {"parallel.offload": "optimizer"})
    yield Case("full offload params", {"parallel.offload": "params"})
    yield Case("lora", LORA, resumed=True)
    yield Case("lora int8 states", {**LORA, "optimizer.state": "int8"})
    yield Case("lora recompute", {**LORA, "train.recompute": "block"})
    yield Case("lora bf16", {**LORA, "model.dtype": "bf16"})
    yield Case("lora plus", {**LORA, "optimizer.lora_plus_ratio": 8})
    yield Case("lora patterns", {**LORA, "adapter.rank_pattern": "{ q_proj = 2 }", "adapter.use_rslora": "true"})
    yield Case("lora gaussian", {**LORA, "adapter.init": "gaussian"})
    yield Case("pissa", {**LORA, "adapter.init": "pissa"})
    yield Case("dora", {**LORA, "adapter.kind": "dora"}, resumed=True)
    yield Case("lora tables", {**LORA, "adapter.modules_to_save": '["embed_tokens", "lm_head"]'}, resumed=True)
    yield Case("lora new tokens", {**LORA, "model.new_tokens": '["<tool>", "</tool>"]'}, resumed=True)
    yield Case("qlora nf4", {**LORA, **NF4}, resumed=True)
    yield Case("qlora nf4 single", {**LORA, **NF4, "quantization.double_quant": "false"})
    yield Case("qlora fp4", {**LORA, "quantization.kind": "fp4"})
    yield Case("qlora int8", {**LORA, "quantization.kind": "int8"})
    yield Case("qlora bf16", {**LORA, **NF4, "model.dtype": "bf16", "optimizer.state": "int8"})
    yield Case("qdora", {**LORA, **NF4, "adapter.kind": "dora"})
    evaluated = {"data.eval": json.dumps([str(GOLDEN / "data" / "sharegpt.jsonl")]), "eval.steps": 4}
    yield Case("lora evaluated", {**LORA, **evaluated})


def families():
    """Yields every family of models, with an adapter and in full."""
    for model in sorted(folder.name for folder in (GOLDEN / "models").iterdir() if folder.name != "tiny-llama"):
        # One of their templates accepts no system message.
        keys = {"train.max_steps": 4, "data.on_bad_row": "skip"}
        yield Case(f"{model} lora", {**LORA, **keys}, model=model)
        yield Case(f"{model} full", {**keys, "train.recompute": "block"}, model=model)


def splits():
    """Yields every strategy, on 2 and 4 ranks."""
    trained = {"full": {}, "lora": LORA}
    for name, keys in trained.items():
        for ranks in [2, 4]:
            for strategy in ["ddp", "zero1", "zero2", "fsdp", "hsdp"]:
                split = {"parallel.strategy": strategy}
                if strategy == "hsdp":
                    split["parallel.shard_size"] = ranks // 2
                resumed = ranks == 2 and strategy in ["zero2", "fsdp"]
                yield Case(f"{name} {strategy} on {ranks}", {**keys, **split}, ranks=ranks, resumed=resumed)
    fsdp = {"parallel.strategy": "fsdp"}
    yield Case("qlora fsdp on 2", {**LORA, **NF4, **fsdp}, ranks=2)
    yield Case("dora fsdp on 2", {**LORA, "adapter.kind": "dora", **fsdp}, ranks=2)
    yield Case("full int8 states fsdp on 2", {"optimizer.state": "int8", **fsdp}, ranks=2)
    yield Case("full recompute fsdp on 4", {"train.recompute": "block", **fsdp}, ranks=4)
    yield Case("full bf16 fsdp on 2", {"model.dtype": "bf16", **fsdp}, ranks=2)
    yield Case("full bf16 sums ddp on 2", {"parallel.strategy": "ddp", "parallel.reduce_dtype": "bf16"}, ranks=2)
    yield Case("full offload params fsdp on 2", {"parallel.offload": "params", **fsdp}, ranks=2)
    yield Case("lora tables zero2 on 2", {
        **LORA, "adapter.modules_to_save": '["lm_head"]', "parallel.strategy": "zero2"}, ranks=2)


def matrix():
    """Returns all cases."""
    return [*methods(), *families(), *splits(), Verbs(), Quickstart()]


class Failed(Exception):
    """A run that did not end in exit code 0, with its output."""


def call(binary, arguments, place):
    """Runs `binary` and returns its standard output."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf")}
    command = [str(binary), *map(str, arguments)]
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=environment, timeout=HANGS_SECS, **quiet)
    except subprocess.TimeoutExpired as expired:
        raise Failed(f"{' '.join(command)}\nstill ran after {HANGS_SECS} s") from expired
    if done.returncode:
        raise Failed(f"{' '.join(command)}\nexit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def resume(binary, command, output, place):
    """Resumes from the checkpoint in the middle, in a copy of the run without the later one."""
    copy = place / "resumed"
    shutil.copytree(output, copy)
    shutil.rmtree(copy / f"checkpoint-{STEPS}")
    for weights in copy.glob("*.safetensors"):
        weights.unlink()
    call(binary, [copy if part == output else part for part in command] + ["--resume"], place)


def tensors(path):
    """Returns the tensors of a safetensors file: dtype, shape and bytes by name."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    values = memoryview(data)[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], values[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def compare_weights(base, head):
    """Returns the differences between two files of tensors, or None."""
    if base.read_bytes() == head.read_bytes():
        return None
    if base.suffix != ".safetensors":
        return "other bytes"
    base, head = tensors(base), tensors(head)
    if base.keys() != head.keys():
        return "other tensors: " + ", ".join(sorted(base.keys() ^ head.keys())[:3])
    other = [name for name in base if base[name] != head[name]]
    if not other:
        return "the same tensors under another header"
    return f"{len(other)} of {len(base)} tensors, {other[0]} first"


def figures(path):
    """Returns the lines of a metrics.jsonl, with numbers as written."""
    lines = path.read_text().splitlines()
    return [json.loads(line, parse_float=str, parse_int=str) for line in lines]


def compare_metrics(base, head):
    """Returns the differences between two metrics.jsonl; fields that only the second one has do not
    count."""
    base, head = figures(base), figures(head)
    if len(base) != len(head):
        return f"{len(base)} lines, {len(head)} lines"
    for one, two in zip(base, head):
        for name in one.keys() - NOT_COMPARED:
            if one[name] != two.get(name):
                return f"{name} at step {one['step']}: {one[name]}, {two.get(name)}"
    return None


def written(place):
    """Returns the compared files below `place`, by their relative path."""
    kinds = {".safetensors", ".gguf"}
    named = {"metrics.jsonl", "told.txt"}
    files = (path for path in place.rglob("*") if path.suffix in kinds or path.name in named)
    return {str(path.relative_to(place)): path for path in files}


def differences(base, head):
    """Returns the number of files compared, and the differences between two folders."""
    base, head = written(base), written(head)
    found = [f"{name}: only one left it" for name in sorted(base.keys() ^ head.keys())]
    for name in sorted(base.keys() & head.keys()):
        compare = compare_metrics if name.endswith("metrics.jsonl") else compare_weights
        difference = compare(base[name], head[name])
        if difference:
            found.append(f"{name}: {difference}")
    return len(base), found


def check(case, binaries, plant):
    """Runs a case through both binaries; returns files compared, seconds of each, and
    differences."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        places, seconds = [], []
        for side, binary in enumerate(binaries):
            place = Path(folder) / "ab"[side]
            place.mkdir()
            begun = time.monotonic()
            try:
                case.run(binary, place, plant if side else [])
            except Failed as failed:
                return 0, seconds, [f"the {'second' if side else 'first'} binary failed: {failed}"]
            seconds.append(time.monotonic() - begun)
            places.append(place)
        files, found = differences(*places)
        if not files:
            found.append("nothing was left to compare")
        return files, seconds, found


def build(revision, target, profile):
    """Returns the binary of a commit, built once for each commit and profile in `target`."""
    told = subprocess.run(
        ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        sys.exit(f"error: {revision} is no commit\n{told.stderr}")
    commit = told.stdout.strip()
    place = target / "same_bits" / commit
    binary = place / f"finetune-{profile}"
    if not binary.exists():
        print(f"building {revision} ({commit[:12]})", flush=True)
        place.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        # Update the times: cargo compares them, and would reuse the other commit's library.
        subprocess.run(["tar", "-x", "-m", "-C", place], input=archive, check=True)
        command = ["cargo", "build", "--locked", "--profile", profile, "--bin", "finetune"]
        subprocess.run(command, cwd=place, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(target)})
        built = target / {"dev": "debug"}.get(profile, profile) / "finetune"
        shutil.copy2(built, place / "copied")
        (place / "copied").rename(binary)
    return binary


def report(cases, binaries, plant):
    """Checks every case and prints the table; returns the number of cases that differ."""
    width = max(len(case.name) for case in cases)
    print(f"{'case':{width}}  files  first  second  verdict")
    different = 0
    for case in cases:
        files, seconds, found = check(case, binaries, plant)
        different += bool(found)
        times = "".join(f"{second:6.1f} s" for second in seconds).ljust(16)
        print(f"{case.name:{width}}  {files:5}{times}  {'DIFFERENT' if found else 'same'}")
        for line in found[:5]:
            print("    " + line.replace("\n", "\n    "))
        if len(found) > 5:
            print(f"    and {len(found) - 5} more")
        sys.stdout.flush()
    return different


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="*", metavar="BASE HEAD", help="two commits, or two files with --binaries")
    parser.add_argument("--binaries", action="store_true", help="the pair is two binaries")
    parser.add_argument("--profile", default="dev", help="cargo profile of the two builds (dev)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--plant", metavar="KEY=VALUE", help="a recipe key of the second binary's runs alone")
    arguments = parser.parse_args()
    cases = [case for case in matrix() if arguments.only in case.name]
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    if len(arguments.pair) != 2:
        parser.error("two commits are compared, or with --binaries two files")
    if not cases:
        parser.error(f"no case is named {arguments.only!r}; --list names them all")
    plant = ["--set", arguments.plant] if arguments.plant else []
    with tempfile.TemporaryDirectory(prefix="same-bits-target-") as temporary:
        if arguments.binaries:
            binaries = [Path(path).resolve() for path in arguments.pair]
            for binary in binaries:
                if not os.access(binary, os.X_OK):
                    parser.error(f"{binary} is no program")
        else:
            target = Path(os.environ.get("CARGO_TARGET_DIR") or temporary).resolve()
            binaries = [build(revision, target, arguments.profile) for revision in arguments.pair]
        different = report(cases, binaries, plant)
    print(f"{len(cases) - different} of {len(cases)} cases are the same to the bit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
