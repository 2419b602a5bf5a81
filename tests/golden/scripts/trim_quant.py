"""Copies the quantization references into tests/golden/quant, without the tensors that the tests
work out themselves.

    python trim_quant.py FIXTURES/golden/quant tests/golden/quant
"""
import pathlib
import shutil
import sys

from safetensors.torch import load_file, save_file

source, target = map(pathlib.Path, sys.argv[1:])
target.mkdir(parents=True, exist_ok=True)
for name in ["maps", "fp4", "int8", "adamw8bit"]:
    shutil.copyfile(source / f"{name}.safetensors", target / f"{name}.safetensors")
tensors = load_file(source / "nf4.safetensors")
# The one large case: its values follow from codes and scales, which stay.
dropped = [f"nested3_192x256.{end}" for end in ("dequant", "nested.dequant", "nested_nearest.dequant")]
save_file({k: v for k, v in tensors.items() if k not in dropped}, target / "nf4.safetensors")
shutil.copyfile(source / "cases.json", target / "cases.json")
shutil.copytree(source / "tiny-llama-bnb-nf4", target / "tiny-llama-bnb-nf4", dirs_exist_ok=True)
