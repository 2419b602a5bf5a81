"""Writes random blocks of each type of ggml and the values that gguf-py dequantizes from them.

    python make_gguf_blocks.py tests/golden/qbases/gguf_blocks.json

gguf 0.19.0. The digest is that of the little-endian f32 bytes, with 0.0 added.
"""
import hashlib
import json
import pathlib
import sys

import gguf
import numpy as np

TYPES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
# Positions of f16 numbers in a block, whose exponents are kept small: random bytes hold infinities.
HALVES = {"F16": [0], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
random = np.random.default_rng(7)
found = {}
for name in TYPES:
    kind = getattr(gguf.GGMLQuantizationType, name)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    count = 4 if elements > 1 else 64
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES.get(name, []):
        blocks[:, at + 1] &= 0xBF
    if name in ("F32", "BF16"):
        blocks[:, -1] &= 0xBF
    values = gguf.quants.dequantize(blocks.reshape(1, -1), kind).astype(np.float32) if elements > 1 or name == "BF16" \
        else blocks.reshape(-1).view(np.float16 if name == "F16" else np.float32).astype(np.float32)
    assert np.isfinite(values).all(), name
    found[int(kind)] = {"name": name, "blocks": blocks.tobytes().hex(), "elements": int(values.size),
                        "sha256_f32": hashlib.sha256((values.reshape(-1) + np.float32(0)).astype("<f4").tobytes()).hexdigest()}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
