"""Copies one quantized checkpoint for each way of packing codes, and a LoRA run on it, from the
output of make_qbases.py into tests/golden/qbases.

    python make_qbases.py --spec spec_qbases.json --out FIXTURES
    python trim_qbases.py FIXTURES tests/golden/qbases
"""
import json
import pathlib
import shutil
import sys

RUNS = ["lora_gptq", "lora_awq", "lora_ct_int4", "lora_fp8_block", "lora_mxfp4", "lora_gguf_q4_k"]
# Further checkpoints, without a run.
OTHERS = ["tiny-ct-int8-channel", "tiny-ct-w8a8", "tiny-gptq-8-g32-asym"]
# Further GGUF files, without a run.
GGUF = ["tiny-gguf-q4_k", "tiny-gguf-q4_0", "tiny-gguf-q8_0"]
source, target = map(pathlib.Path, sys.argv[1:])
digests = json.loads((source / "golden/qbases/qbases.json").read_text())
kept = {}
ignored = shutil.ignore_patterns("final_logits.safetensors", "quantize_config.json", "hf")
models = list(OTHERS)
for run in RUNS:
    folder = source / "golden/qbases_train" / run
    models.append(json.loads((folder / "trajectory.json").read_text())["run"]["model"])
    shutil.copytree(folder, target / "train" / run, ignore=ignored, dirs_exist_ok=True)
for model in models:
    shutil.copytree(source / "qbases" / model, target / "models" / model, ignore=ignored, dirs_exist_ok=True)
    if model not in GGUF:
        kept[model] = {name: weight["sha256_f32"] for name, weight in digests[model]["weights"].items()}
# Of GGUF files also the ids of texts, and the loss.
of_gguf = {}
for model in GGUF:
    shutil.copytree(source / "qbases" / model, target / "models" / model, ignore=ignored, dirs_exist_ok=True)
    found = digests[model]
    weights = {name: weight["sha256_f32"] for name, weight in found["weights"].items()}
    of_gguf[model] = {"loss": found["loss"], "weights": weights, "encode": found["encode"]}
(target / "gguf.json").write_text(json.dumps(of_gguf, indent=1) + "\n")
(target / "sha256_f32.json").write_text(json.dumps(kept, indent=1) + "\n")
