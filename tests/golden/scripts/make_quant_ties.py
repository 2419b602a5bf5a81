"""Writes tests/golden/quant/ties.safetensors: how bitsandbytes (versions.json; its CPU library)
rounds values halfway between two codes and near it.

    python make_quant_ties.py tests/golden

Codes grow with values. The count of each code among the dyadic numbers i / 2^20 from -1 to 1, in
order, therefore determines all 2,097,153 codes. The script checks that they depend neither on the
index in the block nor on the block's scale.

dyadic.<map>       i64 [codes]: those counts; indices in ascending order of values for nf4 and fp4
limits.<map>       f32 [codes - 1]: the least f32 that gets the next code, found by halving
intervals bf16.<map>.<rest>  blocks of random bf16 values whose largest is no power of two: input,
codes, absmax nested.<case>.<rest>  scales of quantized bf16 weights with few distinct values, and
their double quantization
"""
import pathlib
import sys

import bitsandbytes.functional as F
import numpy as np
import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
golden = pathlib.Path(sys.argv[1])
dynamic = F.create_dynamic_map(signed=True)
tensors = {}


def eight(values, block):
    codes, state = F.quantize_blockwise(values, code=dynamic, blocksize=block)
    return codes.view(-1), state.absmax


def four(kind):
    order = torch.argsort(F.get_4bit_type(kind, device="cpu"), stable=True)
    place = torch.empty(16, dtype=torch.uint8)
    place[order] = torch.arange(16, dtype=torch.uint8)

    def quantize(values, block):
        packed, state = F.quantize_4bit(values, blocksize=block, quant_type=kind, compress_statistics=False)
        packed = packed.view(-1)
        codes = torch.stack([packed >> 4, packed & 15], 1).view(-1)[: values.numel()]
        return place[codes.long()], state.absmax

    return quantize


def codes_of(quantize, values, block, at, scale=1.0):
    """Returns the codes of `values` in blocks whose number `at` is the largest."""
    rows = torch.nn.functional.pad(values, (0, -values.numel() % (block - 1))).view(-1, block - 1) * scale
    largest = torch.full((len(rows), 1), scale)
    codes, absmax = quantize(torch.cat([rows[:, :at], largest, rows[:, at:]], 1).view(-1).contiguous(), block)
    assert (absmax == scale).all()
    codes = codes.view(-1, block)
    return torch.cat([codes[:, :at], codes[:, at + 1 :]], 1).reshape(-1)[: values.numel()]


def limits(quantize, count):
    """Returns the least f32 from -1 to 1 of each code but the first, by bisecting floats as ordered
    integers."""
    def value(key):
        bits = np.where(key < 0, (-key).astype(np.int64) | 0x8000_0000, key).astype(np.uint32)
        return torch.from_numpy(bits.view(np.float32).copy())

    one = 0x3F80_0000
    low, high = np.full(count - 1, -one, np.int64), np.full(count - 1, one, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        reached = codes_of(quantize, value(middle), 64, 5).numpy() > np.arange(count - 1)
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return value(low)


dyadic = torch.arange(-(2**20), 2**20 + 1).float() / 2**20
generator = torch.Generator().manual_seed(0)
for name, quantize, count, block in [("int8", eight, 256, 256), ("nf4", four("nf4"), 16, 64), ("fp4", four("fp4"), 16, 64)]:
    codes = codes_of(quantize, dyadic, block, 0)
    assert (codes[1:].int() >= codes[:-1].int()).all()
    # Every index in a block, every index of the largest value, and scales that change only the
    # exponent.
    for at in range(block):
        part = slice(at, None, 61) if at % 32 else slice(None)
        assert torch.equal(codes_of(quantize, dyadic[part], block, at), codes[part]), (name, at)
    for scale in [2.0**-20, 0.25, 1024.0]:
        assert torch.equal(codes_of(quantize, dyadic, block, 7, scale), codes), (name, scale)
    tensors[f"dyadic.{name}"] = torch.bincount(codes.long(), minlength=count)
    tensors[f"limits.{name}"] = limits(quantize, count)
    # The last block is not full.
    values = (torch.randn(24 * 256 - 100, generator=generator) * 0.02).bfloat16()
    codes, absmax = quantize(values.float(), block)
    tensors |= {f"bf16.{name}.input": values, f"bf16.{name}.codes": codes, f"bf16.{name}.absmax": absmax}

# Seeds whose few distinct scales often have codes that are not the nearest, including at zero.
cases = [("uniform", 192, 415), ("uniform", 192, 361), ("uniform", 64, 31), ("normal", 192, 194), ("normal", 8000, 0)]
for kind, rows, seed in cases:
    generator, name = torch.Generator().manual_seed(seed), f"{kind}_{rows}_{seed}"
    draw = torch.rand if kind == "uniform" else torch.randn
    weight = draw(rows, 64, generator=generator)
    weight = ((weight * 2 - 1) * 0.1 if kind == "uniform" else weight * 0.02).bfloat16()
    _, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    _, plain = F.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    scales = plain.absmax.bfloat16()
    assert torch.equal(scales.float(), plain.absmax)
    centred = plain.absmax - state.offset
    outer = state.state2.absmax.repeat_interleave(256)[: centred.numel()]
    nearest = torch.bucketize(centred / outer, (dynamic[1:] + dynamic[:-1]) / 2)
    print(name, int((nearest != state.absmax).sum()), "of", centred.numel(), "codes are not the nearest")
    case = {"scales": scales, "codes": state.absmax, "absmax": state.state2.absmax, "offset": state.offset.view(1)}
    tensors |= {f"nested.{name}.{key}": value.contiguous() for key, value in case.items()}
save_file(tensors, golden / "quant/ties.safetensors")
