"""Writes a bf16 checkpoint of random weights into a model folder: safetensors in shards of at most
4 GB, with their index.

    python3 random_weights.py --shape 8b --folder models/8b --device cuda

Needs torch, transformers and safetensors. Matrices are drawn from N(0, initializer_range²) on the
device; vectors (the gains of norms) are ones. A folder with complete weights is left as it is: the
file that readers look for first is written last.
"""

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

from shapes import SHAPES, write_model

SHARD_BYTES = 4_000_000_000


def complete(folder):
    """Returns true if the folder has all of its weights."""
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def tensors_of(folder):
    """Returns names and shapes of a checkpoint's tensors, and the deviation of its matrices."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    shapes = {}
    for name, tensor in state.items():
        shapes |= apart(name, tuple(tensor.shape))
    return shapes, config.initializer_range


def apart(name, shape):
    """Returns the tensors of a checkpoint that transformers keeps as one: those of all experts."""
    place, _, last = name.rpartition("experts.")
    if last == "gate_up_proj":
        names, shape = ("gate_proj", "up_proj"), (shape[0], shape[1] // 2, shape[2])
    elif last == "down_proj":
        names = ("down_proj",)
    else:
        return {name: shape}
    return {f"{place}experts.{e}.{layer}.weight": shape[1:] for e in range(shape[0]) for layer in names}


def in_shards(shapes):
    """Splits the names, in order, into shards of at most SHARD_BYTES, or of a single larger tensor;
    also returns the total bytes."""
    shards, room, total = [[]], SHARD_BYTES, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
        total += size
    return shards, total


def write_weights(folder, device):
    import torch
    from safetensors.torch import save_file

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("random_weights: --device cuda, but torch sees no GPU; use --device cpu, or a torch with CUDA where there is one")
    shapes, deviation = tensors_of(folder)
    shards, total = in_shards(shapes)
    free = shutil.disk_usage(folder).free
    if free < total + (1 << 30):
        what = f"writing {total / 1e9:.1f} GB of weights to {folder}: {free / 1e9:.1f} GB are free there, 1 GB more is needed"
        sys.exit(f"random_weights: {what}; name another folder")
    drawn = torch.Generator(device).manual_seed(0)
    files = {}
    for number, names in enumerate(shards, 1):
        tensors = {}
        for name in names:
            values = torch.empty(shapes[name], dtype=torch.bfloat16, device=device)
            values.fill_(1) if values.ndim == 1 else values.normal_(0, deviation, generator=drawn)
            tensors[name] = values.cpu()
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file.name)
    if len(shards) == 1:
        file.rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        unfinished = folder / "index.unfinished"
        unfinished.write_text(json.dumps(index, indent=1))
        unfinished.rename(folder / "model.safetensors.index.json")
    return {"bytes": total, "shards": len(shards)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="of the model; default: that of the config.json in the folder")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the numbers are drawn")
    args = parser.parse_args()
    start = time.monotonic()
    if args.shape and not (args.folder / "config.json").is_file():
        write_model(args.folder, args.shape, 16, 1)
    try:
        done = {"bytes": 0, "shards": 0} if complete(args.folder) else write_weights(args.folder, args.device)
    except ImportError as error:
        sys.exit(f"random_weights: {error}; run it with a Python that has torch, transformers and safetensors")
    print(json.dumps({"folder": str(args.folder), "secs": time.monotonic() - start} | done))


if __name__ == "__main__":
    main()
