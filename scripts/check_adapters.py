#!/usr/bin/env python3
"""Checks that `finetune merge` of PEFT's adapters gives the model that PEFT computes with them.

    python scripts/check_adapters.py --finetune target/release/finetune

Needs torch, transformers, peft and the binary; no network, no GPU. Takes minutes. For each tiny
family under tests/golden/models and families/models PEFT makes adapters of every kind with random
nonzero values and saves them. The merged folder must load in transformers without a missing or
unexpected tensor, and give the logits of the saved adapter in PEFT on the base in f32. Kinds that
PEFT refuses for a family are shown as such. (check_outputs.py checks adapters that the binary
trains.)

Prints the largest difference of logits for each kind and family; exits 1 if one is above its limit.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from check_outputs import FAMILIES, Family

LIMIT = 1e-4


def kinds(family):
    """Settings of LoraConfig by name; `resize` holds tokens to add before."""
    attention, mlp, gate, down = family.attention, family.mlp, family.gate, family.down
    linear = dict(target_modules="all-linear")
    table = family.config["vocab_size"]
    tokens = [3, table - 1, 0, 17]
    embedding, head = dict(target_modules=[*attention, "embed_tokens"]), dict(target_modules=[*attention, "lm_head"])
    both = dict(target_modules=[*attention, "embed_tokens", "lm_head"])
    patterns = dict(
        rank_pattern={down: 2, f"layers.0.{mlp}.{gate}": 7}, alpha_pattern={r".*\.1\.self_attn\.o_proj": 3}
    )
    all_kinds = {
        "lora": linear,
        "rslora": dict(**linear, use_rslora=True),
        "patterns": dict(**linear, **patterns),
        "patterns, rslora": dict(**linear, **patterns, use_rslora=True),
        "regex": dict(target_modules=rf".*\.0\..*(o_proj|{down})"),
        "layers": dict(target_modules=attention, layers_to_transform=[1], layers_pattern="layers"),
        "exclude": dict(**linear, exclude_modules=["o_proj"]),
        "gaussian": dict(**linear, init_lora_weights="gaussian"),
        "orthogonal": dict(**linear, init_lora_weights="orthogonal"),
        "dora": dict(**linear, use_dora=True),
        "dora, rslora": dict(**linear, **patterns, use_dora=True, use_rslora=True),
        "dora on tables": dict(**both, use_dora=True),
        "saved head": dict(target_modules=attention, modules_to_save=["lm_head"]),
        "saved embedding": dict(target_modules=attention, modules_to_save=["embed_tokens"]),
        "saved norms": dict(target_modules=attention, modules_to_save=["norm", family.norm]),
        "embedding": embedding,
        "embedding, rslora": dict(**embedding, use_rslora=True),
        "head": head,
        "embedding and head": both,
        "tables by regex": dict(target_modules=r".*(embed_tokens|lm_head|o_proj)"),
        "tokens": dict(target_modules=attention, trainable_token_indices=tokens),
        "tokens of the head": dict(target_modules=attention, trainable_token_indices={"lm_head": tokens}),
        "tokens of both": dict(
            target_modules=attention, trainable_token_indices={"embed_tokens": tokens, "lm_head": [5, 6]}
        ),
        "the same of both": dict(
            target_modules=attention, trainable_token_indices={"embed_tokens": tokens, "lm_head": tokens}
        ),
        "tokens, head": dict(**head, trainable_token_indices={"embed_tokens": tokens}),
        "tokens, saved head": dict(
            target_modules=attention, trainable_token_indices=tokens, modules_to_save=["lm_head"]
        ),
        "new tokens": dict(target_modules=attention, resize=table + 5),
        "new tokens, rows": dict(
            target_modules=attention, resize=table + 5, trainable_token_indices=[1, table, table + 4]
        ),
    }
    if family.tied:
        tied = dict(ensure_weight_tying=True)
        all_kinds |= {
            # PEFT saves no head of its own beside an embedding with LoRA: with two tables the new
            # rows of one are lost.
            "tied: new tokens": dict(**embedding, resize=table + 5),
            "tied: saved": dict(target_modules=attention, modules_to_save=["embed_tokens"], **tied),
            "tied: embedding": dict(**embedding, **tied),
            "tied: head": dict(**head, **tied),
            "tied: tokens": dict(target_modules=attention, trainable_token_indices=tokens, **tied),
        }
    return all_kinds


def base(family, resize):
    model = family.load()
    if resize:
        model.resize_token_embeddings(resize, mean_resizing=False)
    return model


@torch.no_grad()
def logits(model):
    ids = torch.arange(4 * 32).reshape(4, 32) * 37 % model.config.vocab_size
    # The tokens whose rows change, and the last ones.
    ids[:, ::9] = torch.tensor([3, 0, 17, model.config.vocab_size - 1]).unsqueeze(1)
    return model(input_ids=ids).logits


def refused(error):
    """Returns true if PEFT reports that it does not support this."""
    return isinstance(error, (ValueError, TypeError, NotImplementedError))


def make(family, folder, resize=0, **settings):
    """Saves an adapter with random values; returns PEFT's logits with it, loaded again."""
    torch.manual_seed(7)
    settings = {"init_lora_weights": False, **settings}
    model = peft.get_peft_model(
        base(family, resize), peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            random = torch.randn_like(parameter)
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.1 * random)
            else:
                # Vary existing values: magnitudes and rows of tables have their scale from the
                # base.
                parameter.add_(0.1 * parameter.abs().mean() * random)
    model.save_pretrained(folder, save_embedding_layers=True if resize else "auto")
    plain = logits(base(family, resize))
    again = logits(peft.PeftModel.from_pretrained(base(family, resize), folder).eval())
    if (again - plain).abs().max() < 0.01:
        raise AssertionError("the adapter changes nothing")
    return again


def check(binary, family, place, settings):
    """Returns the largest difference of the merged model's logits, or the reason if PEFT has no
    such adapter."""
    adapter, merged = place / "adapter", place / "merged"
    try:
        theirs = make(family, adapter, **settings)
    except Exception as error:  # anything else is a failure
        if refused(error):
            return str(error).splitlines()[0]
        raise
    command = [binary, "merge", "--model", family.folder, "--adapter", adapter]
    command += ["--output", merged, "--dtype", "f32", "--base", "original", "--offline"]
    done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr.decode(errors="replace").strip())
    record = json.loads((merged / "merge.json").read_text())
    if record["adapter"] != str(adapter):
        raise AssertionError(f"merge.json: {record}")
    return (logits(family.load(merged)) - theirs).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="the binary [%(default)s]")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="names of kinds, such as dora or 'tokens of both'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    found, failures = {}, []
    binary = Path(args.finetune).resolve()
    for family in args.families:
        model = Family(family)
        for kind, settings in kinds(model).items():
            if args.only and kind not in args.only:
                continue
            place = Path(tempfile.mkdtemp())
            try:
                value = check(binary, model, place, settings)
                found.setdefault(kind, {})[family] = value
                if isinstance(value, float) and not value <= LIMIT:
                    failures.append(f"{family} {kind}: logits differ by {value:.3g}, limit {LIMIT:g}")
            except Exception as error:  # one broken adapter must not hide the others
                failures.append(f"{family} {kind}: {type(error).__name__}: {error}")
            finally:
                shutil.rmtree(place)
    width = max(map(len, found), default=0)
    print(" " * width, *(f"{family:>8}" for family in args.families))
    for kind, values in found.items():
        shown = {str: lambda v: " refused", float: lambda v: f"{v:8.1e}", type(None): lambda v: "       –"}
        cells = (values.get(family) for family in args.families)
        print(f"{kind:<{width}}", *(shown[type(value)](value) for value in cells))
    for kind, values in found.items():
        for reason in sorted({value for value in values.values() if isinstance(value, str)}):
            print(f"PEFT refuses {kind}: {reason}")
    for failure in failures:
        print(f"FAILED {failure}")
    if not found and not failures:
        parser.error("nothing was checked: no kind has that name")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
