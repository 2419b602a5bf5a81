#!/usr/bin/env python3
"""Checks files that `finetune quantize` writes, and reads, against transformers and bitsandbytes.

    python scripts/check_quantized.py --finetune target/release/finetune [--models FOLDER ...]

Needs torch, transformers, bitsandbytes, accelerate, peft and the binary; no network, no GPU. For
each model (the tiny families under tests/golden/models, or the folders given) and each kind:

  structure  it loads without a missing or unexpected tensor; exactly the linear layers but the head
             and the skipped ones are bitsandbytes' modules
  weights    the parts that bitsandbytes holds after loading stand for the weights that a formula
             gives from the file
  logits     4 bits: the loaded model equals a plain model with those weights. It is a float32 copy
             of the model, because transformers loads a quantized one in its own dtype only. It is
             in training mode, because bitsandbytes otherwise computes in bf16 on processors that
             support it. Skipped if a row is no multiple of the block, where its CPU kernel is
             wrong. 8 bits: only close, for LLM.int8() rounds the activations, too
  loss       `finetune eval` on the quantized folder gives the plain model's loss

Prints the largest difference of each check; exits 1 if one is above its limit.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import bitsandbytes as bnb
import safetensors.torch
import torch
import transformers
from check_outputs import GOLDEN, LOGITS_LIMIT, LOSS_LIMIT, MODELS, Family, Figures, Program, Rows

KINDS = {
    "nf4": ["--kind", "nf4"],
    "nf4, 128, plain": ["--kind", "nf4", "--block-size", "128", "--no-double-quant"],
    "fp4, 32": ["--kind", "fp4", "--block-size", "32"],
    "nf4, skip": ["--kind", "nf4", "--skip", "down_proj", "--skip", "layers.0.self_attn"],
    "int8": ["--kind", "int8"],
    "int8, skip": ["--kind", "int8", "--skip", "o_proj"],
}
# Relative to the largest logit: activations have 8 bits.
INT8_LIMIT = 0.05


def is_skipped(module, kind):
    names = [name for flag, name in zip(kind, kind[1:]) if flag == "--skip"]
    return any(f".{name}." in f".{module}." for name in names)


def four_bits(packed, absmax, code, block, shape, state2=None, offset=None):
    """Dequantizes by the definition, independently of bitsandbytes' kernels."""
    if state2 is not None:
        absmax = state2.code[absmax.long()] * state2.absmax.repeat_interleave(256)[: absmax.numel()] + offset
    n = torch.Size(shape).numel()
    packed = packed.reshape(-1)
    nibbles = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:n].long()
    return (code[nibbles] * absmax.repeat_interleave(block)[:n]).reshape(shape)


def stored_weights(folder):
    """Returns every quantized weight of the files, by the formula, with the block that it must not
    straddle."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            codes = tensors[f"{module}.weight"]
            weights[module] = (codes.float() * tensor[:, None] * (1 / 127), None)
        elif ".quant_state." in name:
            weight = name.split(".quant_state.")[0]
            state = bnb.functional.QuantState.from_dict(
                {k.removeprefix(f"{weight}."): v for k, v in tensors.items() if k.startswith(f"{weight}.")}, "cpu"
            )
            value = four_bits(
                tensors[weight], state.absmax, state.code, state.blocksize, state.shape, state.state2, state.offset
            )
            weights[weight.removesuffix(".weight")] = (value, state.blocksize)
    return weights


def loaded_weight(module):
    """Returns the weight that bitsandbytes holds."""
    if isinstance(module, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    state = module.weight.quant_state
    return four_bits(
        module.weight.data, state.absmax, state.code, state.blocksize, state.shape, state.state2, state.offset
    )


class Model(Family):
    """A model in any folder."""

    def __init__(self, folder):
        self.name, self.folder = folder.name.removeprefix("tiny-"), folder
        self.config = json.loads((folder / "config.json").read_text())


class Checks:
    """All checks of one model."""

    def __init__(self, program, family, figures, place):
        self.program, self.family, self.figures, self.place = program, family, figures, place
        self.wide = place / "f32"
        family.load().save_pretrained(self.wide)
        self.rows = Rows(family.folder, GOLDEN / "data" / "text.jsonl") if GOLDEN in family.folder.parents else None

    def note(self, check, value, limit, where):
        self.figures.difference(self.family.name, check, value, limit, where)

    def quantized(self, source, where, flags):
        """Returns finetune's folder, and the model that transformers loads from it."""
        folder = self.place / f"{source.name} {where}"
        self.program.run("quantize", "--model", source, "--output", folder, *flags)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", device_map="cpu", output_loading_info=True
        )
        return folder, model, info

    def kind(self, where, flags):
        folder, model, info = self.quantized(self.family.folder, where, flags)
        wrong = {kind: names for kind, names in info.items() if names}
        self.figures.equal(self.family.name, "structure: tensors", wrong, {}, where)
        plain = self.family.load()
        linear = {n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
        wanted = {name for name in linear if not is_skipped(name, flags)}
        kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
        modules = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
        self.figures.equal(self.family.name, "structure: layers", set(modules), wanted, where)
        weights = stored_weights(folder)
        self.figures.equal(self.family.name, "structure: files", set(weights), wanted, where)
        straddles = False
        for name, (value, block) in weights.items():
            difference = (loaded_weight(modules[name]) - value).abs().max().item()
            self.note("weights as loaded", difference, 0.0 if block else 1e-7, f"{where} {name}")
            plain.get_submodule(name).weight.data.copy_(value)
            straddles |= block is not None and value.shape[1] % block != 0
        self.logits(where, self.quantized(self.wide, where, flags)[1], plain, "int8" in flags, straddles)
        if self.rows:
            ours, theirs = self.program.loss(folder, self.rows)[0], self.rows.loss(plain.eval())[0]
            self.note("loss of the binary", abs(ours - theirs), LOSS_LIMIT, where)

    def logits(self, where, model, plain, is_int8, straddles):
        ids = torch.arange(24).reshape(2, 12) * 7 % self.family.config["vocab_size"]
        if is_int8:
            with torch.no_grad():
                ours, theirs = model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits
            self.note("logits, 8 bits", ((ours - theirs).abs().max() / theirs.abs().max()).item(), INT8_LIMIT, where)
        elif not straddles:
            ours, theirs = model.train()(input_ids=ids).logits, plain.train()(input_ids=ids).logits
            self.note("logits, 4 bits", (ours - theirs).abs().max().item(), LOGITS_LIMIT, where)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="the binary [%(default)s]")
    parser.add_argument("--models", nargs="+", type=Path, default=[], metavar="FOLDER", help="instead of the tiny ones")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    program, figures = Program(str(Path(args.finetune).resolve())), Figures()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, bitsandbytes {bnb.__version__}")
    folders = args.models or list(MODELS.values())
    with tempfile.TemporaryDirectory() as temporary:
        for number, folder in enumerate(folders):
            place = Path(temporary) / str(number)
            place.mkdir()
            family = Model(folder)
            checks = Checks(program, family, figures, place)
            for where in args.kinds:
                try:
                    checks.kind(where, KINDS[where])
                except Exception as error:  # one broken output must not hide the others
                    figures.fault(family.name, where, error)
            print(f"{family.name}: {len([f for f in figures.failures if f.startswith(family.name + ' ')])} failures")
    figures.print()
    for failure in figures.failures:
        print(f"FAILED {failure}")
    sys.exit(1 if figures.failures else 0)


if __name__ == "__main__":
    main()
