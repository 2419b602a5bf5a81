"""Writes e4m3.json: torch's float8_e4m3fn of all 256 codes, and of f32 numbers at, beside and between
them.

    python make_e4m3.py --out OUT

`values` has the bits of the f32 number of each code. `rounded` has pairs: the bits of an f32 number
that torch rounds to nearest, ties to even, and the code. Numbers beyond 448 are left out: torch
turns those from 464 on to NaN, and finetune to 448.
"""

import argparse
import json
from pathlib import Path

import torch


def bits(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.view(torch.int32).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()
    positive = values[:127]
    middles = (positive[:-1] + positive[1:]) / 2
    beside = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, float("inf"))]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(512, generator=generator) * torch.logspace(-4, 2, 512)
    numbers = torch.cat([positive, middles, *beside, drawn.clamp(-448, 448)])
    numbers = torch.cat([numbers, -numbers])
    rounded = numbers.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    pairs = [list(pair) for pair in zip(bits(numbers), rounded)]
    table = {"torch": torch.__version__, "values": bits(values), "rounded": pairs}
    (out / "e4m3.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
