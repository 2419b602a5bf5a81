#!/usr/bin/env python3
"""Checks that llama.cpp computes what `finetune` computes: the GGUF files of `finetune export`, run
by llama-cpp-python.

    python scripts/check_gguf.py --binary target/release/finetune tests/golden/models/tiny-* \
        tests/golden/families/models/tiny-[!e]* tests/golden/families/models/tiny-ernie* \
        --adapter tests/golden/models/tiny-llama=tests/golden/train/lora/adapter_final

Needs llama-cpp-python, tokenizers, numpy and safetensors, and the binary. For each model folder:

- text becomes the same tokens as in tokenizer.json;
- the greedy continuation of 40 tokens equals `finetune generate`'s, for f32 and for f16 (against
  the model stored in f16); where they part, the margin between the two tokens in llama.cpp's logits
  must be below --margin, a near-tie;
- the perplexity of q8_0 is within 0.5 % of f16's;
- every other type loads and gives finite logits; its perplexity is shown.

For each adapter: llama.cpp with base and adapter gives the logits that it gives for the model
`finetune merge` writes, and PEFT's, where `final_logits.safetensors` lies beside the adapter's
folder.

llama.cpp has no sliding windows for some families: there the check runs on a copy of the model
without the window. Prints a table; the exit code is 1 when anything failed.
"""

import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

import llama_cpp
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

PROMPTS = ["Once upon a time, there was a little", "The cat sat", "What is 2 + 2?\nIt is"]
TEXT = """Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. One day,
she found a big red ball under a tree. Her friend Tom came and asked, "Can I play with you?" Lily smiled and said,
"Yes, we can play together!" They threw the ball up and down, and they laughed a lot. Then it started to rain, so
they ran into the house. Mom gave them warm milk and cookies. "Thank you, Mom," said Lily. They were very happy.
The next morning the sun was back. Tom had a new kite, and the wind was strong. They went up the hill and let it fly
high above the trees. A bird came to look at it. At the end of the day they went home, tired, and slept well.
A week later Lily could not find the ball. She looked under her bed, behind the door and in the garden. "Where is my
ball?" she cried. Tom helped her to look. They saw a little dog with the ball in its mouth. The dog wanted to play too!
Lily laughed. She gave the dog a cookie, and the dog gave her the ball. From that day on, the three of them were best
friends, and they played together in the park every day."""
MIXED = "Hello, world! 123 4567 — naïve café\n\n  two  spaces\ttab 'tis they're I'LL 北京 🙂 x=y+1;"
TYPES = ["q4_0", "q4_k_m", "q5_k_m", "q6_k"]
NO_WINDOW = {"mistral", "ministral", "phi3", "qwen2", "qwen3"}
F32, NEW_TOKENS = 0, 40


def plain_parameters(defaults=llama_cpp.llama_cpp.llama_model_default_params):
    """Disables repacking of weights: the check is of the file, not of a kernel (AMX crashes on some
    hosts)."""
    parameters = defaults()
    parameters.use_extra_bufts = False
    return parameters


class Report:
    def __init__(self):
        self.rows = []
        self.failed = 0

    def add(self, model, check, passed, detail):
        self.failed += not passed
        self.rows.append((model, check, "ok" if passed else "FAILED", detail))
        print(f"{model:<22} {check:<22} {'ok' if passed else 'FAILED':<7} {detail}", flush=True)


class Finetune:
    def __init__(self, binary, place):
        self.binary, self.place, self.files = binary, place, 0

    def run(self, *args):
        done = subprocess.run([self.binary, *map(str, args)], capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"finetune {' '.join(map(str, args))}: {done.stderr.decode()}")
        return done.stdout.decode()

    def path(self, end):
        self.files += 1
        return self.place / f"{self.files}{end}"

    def gguf(self, model, kind, *more):
        path = self.path(".gguf")
        self.run("export", "--model", model, "--format", "gguf", "--type", kind, "--output", path, "-q", *more)
        return path

    def continuation(self, model, prompt, *more):
        text = self.run(
            "generate", "--model", model, "--prompt", prompt, "--temperature", "0",
            "--max-new-tokens", NEW_TOKENS, "-q", *more,
        )
        return text[len(prompt):].removesuffix("\n")


def load(path, context, **more):
    # With the cache in f32 and no flash attention, only the order of sums differs.
    return llama_cpp.Llama(
        model_path=str(path), n_ctx=context, logits_all=True, verbose=False, n_threads=2, type_k=F32, type_v=F32,
        flash_attn=False, **more,
    )


def logits(llama, ids):
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)])


def perplexity(llama, ids, context):
    total = count = 0
    for start in range(0, len(ids) - 1, context):
        part = ids[start : start + context]
        if len(part) < 2:
            break
        scores = logits(llama, part)[:-1].astype(np.float64)
        if not np.isfinite(scores).all():
            return math.nan
        scores -= scores.max(-1, keepdims=True)
        log_probs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        total -= log_probs[np.arange(len(part) - 1), part[1:]].sum()
        count += len(part) - 1
    return math.exp(total / count)


def greedy(llama, ids, ends):
    """Returns the new ids, and the logits that each was chosen from."""
    new, rows = [], []
    llama.reset()
    llama.eval(ids)
    for _ in range(NEW_TOKENS):
        row = np.array(llama.scores[llama.n_tokens - 1])
        token = int(row.argmax())
        if token in ends:
            break
        new.append(token)
        rows.append(row)
        llama.eval([token])
    return new, rows


def streamed(decode, ids, new):
    """Returns the text as `finetune generate` prints it, token by token. Printed bytes that turn
    out to be no character cannot be taken back, and a character is held until it is complete.
    """
    shown = decode(ids)
    printed = ""
    for end in range(1, len(new) + 1):
        text = decode(ids + new[:end])
        if text.endswith("\ufffd") and end < len(new):
            continue
        common = next((at for at, pair in enumerate(zip(text, shown)) if pair[0] != pair[1]), min(len(text), len(shown)))
        printed, shown = printed + text[common:], text
    return printed


def compare(decode, ids, new, rows, theirs, margin):
    """Returns true if `theirs` is the text of `new` or differs from a near-tie on, and a
    description."""
    text = lambda tokens: streamed(decode, ids, tokens)
    if text(new) == theirs:
        return True, f"{len(new)} tokens"
    for at, row in enumerate(rows):
        for other in row.argsort()[::-1][1:5]:
            gap = float(row[new[at]] - row[other])
            whole = text(new[:at] + [int(other)])
            if theirs.startswith(whole) and not text(new[: at + 1]) == theirs[: len(text(new[: at + 1]))]:
                return gap < margin, f"parts at token {at + 1} of {len(new)}, logit margin {gap:.2g}"
    return False, f"{text(new)!r} is not {theirs!r}"


def ends_of(folder):
    ends = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            found = json.loads((folder / name).read_text()).get("eos_token_id")
            ends |= set(found if isinstance(found, list) else [found] if found is not None else [])
    return ends


def without_window(folder, place):
    """Returns the folder, or a copy of it without the sliding window, which llama.cpp does not
    support."""
    config = json.loads((folder / "config.json").read_text())
    used = config["model_type"] not in ("qwen2", "qwen3") or config.get("use_sliding_window")
    if config["model_type"] not in NO_WINDOW or not config.get("sliding_window") or not used:
        return folder, folder.name
    copy = place / f"{folder.name}-full"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config["sliding_window"] = None
    (copy / "config.json").write_text(json.dumps(config))
    return copy, f"{folder.name} (full)"


def check_model(folder, finetune, report, margin):
    folder, name = without_window(folder, finetune.place)
    tokenizer, ends = Tokenizer.from_file(str(folder / "tokenizer.json")), ends_of(folder)
    context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings", 2048)
    context = min(context, 512)
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    half = finetune.path("-f16")
    finetune.run("export", "--model", folder, "--format", "hf", "--type", "f16", "--output", half, "-q")
    text_ids = tokenizer.encode(TEXT).ids
    measured = {}
    for kind, theirs in (("f32", folder), ("f16", half)):
        llama = load(finetune.gguf(folder, kind), context)
        if kind == "f32":
            check_tokens(name, llama, tokenizer, report)
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt).ids
            new, rows = greedy(llama, ids, ends)
            passed, detail = compare(decode, ids, new, rows, finetune.continuation(theirs, prompt), margin)
            report.add(name, f"greedy {kind}", passed, detail)
        measured[kind] = perplexity(llama, text_ids, context)
        llama.close()
    report.add(name, "perplexity f16", math.isfinite(measured["f16"]), f"{measured['f16']:.4f}")
    for kind in ["bf16", "q8_0", *TYPES]:
        llama = load(finetune.gguf(folder, kind), context)
        measured[kind] = perplexity(llama, text_ids, context)
        llama.close()
        change = measured[kind] / measured["f16"] - 1
        passed = abs(change) <= 0.005 if kind == "q8_0" else math.isfinite(measured[kind])
        report.add(name, f"perplexity {kind}", passed, f"{measured[kind]:.4f}, {100 * change:+.2f} % of f16")


def check_tokens(name, llama, tokenizer, report):
    for label, text in (("story", TEXT), ("mixed", MIXED)):
        ours = tokenizer.encode(text).ids
        if "<unk>" in tokenizer.encode(text).tokens:
            report.add(name, f"tokens of {label}", True, "skipped: it has no token for some characters")
            continue
        theirs = llama.tokenize(text.encode(), add_bos=True, special=True)
        differ = sum(a != b for a, b in zip(ours, theirs)) + abs(len(ours) - len(theirs))
        report.add(name, f"tokens of {label}", ours == theirs, f"{len(ours)} tokens, {differ} differ")


def check_adapter(base, adapter, finetune, report, margin):
    original, (base, name) = base, without_window(base, finetune.place)
    name = f"{name} + {adapter.parent.name}"
    tokenizer, ends = Tokenizer.from_file(str(base / "tokenizer.json")), ends_of(base)
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    merged = finetune.path("-merged")
    finetune.run("merge", "--model", base, "--adapter", adapter, "--output", merged, "--dtype", "f32", "-q")
    model, context = finetune.gguf(base, "f32"), 256
    ids = tokenizer.encode(TEXT).ids[:64]
    plain = logits(load(model, context), ids)
    wanted = logits(load(finetune.gguf(merged, "f32"), context), ids)
    for kind, most in (("f32", 1e-4), ("f16", 1e-2)):
        lora = finetune.gguf(base, kind, "--adapter", adapter)
        llama = load(model, context, lora_path=str(lora))
        found = logits(llama, ids)
        far, near = np.abs(found - plain).max(), np.abs(found - wanted).max()
        passed = near <= most * np.abs(wanted).max() and far > 10 * near
        report.add(name, f"adapter {kind}", passed, f"from merged {near:.1e}, from base {far:.1e}")
        if kind == "f16":
            continue
        prompt_ids = tokenizer.encode(PROMPTS[0]).ids
        new, rows = greedy(llama, prompt_ids, ends)
        theirs = finetune.continuation(base, PROMPTS[0], "--adapter", adapter)
        report.add(name, "greedy", *compare(decode, prompt_ids, new, rows, theirs, margin))
        golden = adapter.parent / "final_logits.safetensors"
        if golden.exists() and base == original:
            against_peft(name, llama, load_file(golden), report)


def against_peft(name, llama, golden, report):
    worst = scale = 0.0
    for row, mask, wanted in zip(golden["input_ids"], golden["attention_mask"], golden["logits"]):
        length = int(mask.sum())
        if mask[0] == 0:
            continue
        found = logits(llama, [int(token) for token in row[:length]])
        worst = max(worst, float(np.abs(found - wanted[:length]).max()))
        scale = max(scale, float(np.abs(wanted[:length]).max()))
    report.add(name, "PEFT's logits", 0 < scale and worst <= 1e-4 * scale, f"off by {worst:.1e}, largest {scale:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="the finetune binary")
    parser.add_argument("--adapter", action="append", default=[], metavar="MODEL=ADAPTER")
    parser.add_argument("--margin", type=float, default=0.01, help="logit margin of a near-tie")
    parser.add_argument("models", nargs="*", type=pathlib.Path, help="model folders")
    args = parser.parse_args()
    llama_cpp.llama_cpp.llama_model_default_params = plain_parameters
    llama_cpp.llama_model_default_params = plain_parameters
    report = Report()
    with tempfile.TemporaryDirectory() as place:
        finetune = Finetune(args.binary, pathlib.Path(place))
        checks = [(check_model, [folder]) for folder in args.models]
        pairs = [pair.split("=", 1) for pair in args.adapter]
        checks += [(check_adapter, [pathlib.Path(base), pathlib.Path(adapter)]) for base, adapter in pairs]
        for check, what in checks:
            try:
                check(*what, finetune, report, args.margin)
            except (RuntimeError, ValueError) as error:
                report.add(what[-1].name, check.__name__, False, str(error))
    print(f"{len(report.rows)} checks, {report.failed} failed")
    return 1 if report.failed or not report.rows else 0


if __name__ == "__main__":
    sys.exit(main())
