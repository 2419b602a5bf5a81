"""Writes tests/golden/quant/tiny-llama-bnb-int8: tiny-llama as transformers saves it in LLM.int8(),
and the logits of a float32 forward over its dequantized weights.

    python make_llm_int8.py tests/golden

bitsandbytes' own product also rounds the activations to 8 bits, which a frozen base must not do.
"""
import pathlib
import shutil
import sys

import bitsandbytes.functional as F
import torch
import transformers
from safetensors.torch import load_file, save_file

golden = pathlib.Path(sys.argv[1])
source, target = golden / "models/tiny-llama", golden / "quant/tiny-llama-bnb-int8"
shutil.rmtree(target, ignore_errors=True)
config = transformers.BitsAndBytesConfig(load_in_8bit=True)
model = transformers.AutoModelForCausalLM.from_pretrained(
    source, quantization_config=config, dtype=torch.float16, device_map="cpu"
)
model.save_pretrained(target)

tensors = load_file(target / "model.safetensors")
weights = {}
for name, value in tensors.items():
    if value.dtype == torch.int8:
        scales = tensors[name.removesuffix("weight") + "SCB"]
        value = F.int8_vectorwise_dequant(value, scales)
        weights["dequantized." + name] = value
    if value.is_floating_point() and not name.endswith("SCB"):
        weights[name] = value.float()
plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
plain.load_state_dict({k: v for k, v in weights.items() if not k.startswith("dequantized.")}, strict=True)
batch = load_file(golden / "quant/tiny-llama-bnb-nf4/expected_forward.safetensors")
with torch.no_grad():
    logits = plain.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
# One dequantized matrix is enough to compare the arithmetic.
name = "dequantized.model.layers.0.self_attn.k_proj.weight"
expected = {"logits": logits, name: weights[name]}
expected |= {key: batch[key] for key in ["input_ids", "attention_mask"]}
save_file(expected, target / "expected_forward.safetensors")
