"""Quantizes tiny-llama by the packages whose formats finetune reads, and writes each checkpoint
with the digests of the weights that the package dequantizes in f32.

    pip install torch safetensors compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 hqq==0.2.8.post1
    python make_packages.py tests/golden

NVFP4 and MXFP4 of compressed-tensors, NVFP4 and FP8 of ModelOpt, HQQ in 4 and 8 bits.
"""
import hashlib
import json
import pathlib
import shutil
import sys

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file

golden = pathlib.Path(sys.argv[1])
source = golden / "models/tiny-llama"
weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}


def ct_nvfp4(module, weight):
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    factor = (448 * 6 / weight.abs().max()).reshape(1)
    groups = weight.reshape(weight.shape[0], -1, 16).abs().amax(-1)
    scale = (groups / 6 * factor).to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": factor}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, torch.float32)
    value = dequantize(codes, packed["weight_scale"].float(), args=scheme.weights, dtype=torch.float32,
                       global_scale=packed["weight_global_scale"])
    # The package itself rounds to bf16.
    assert torch.equal(value.bfloat16(), NVFP4PackedCompressor.decompress(packed, scheme)["weight"])
    return {f"{module}.{name}": tensor for name, tensor in packed.items()}, value


def ct_mxfp4(module, weight):
    scheme = QuantizationScheme(targets=["Linear"], **MXFP4A16)
    groups = weight.reshape(weight.shape[0], -1, 32).abs().amax(-1)
    scale = torch.exp2(torch.floor(torch.log2(groups)) - 2)
    packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    value = MXFP4PackedCompressor.decompress(packed, scheme)["weight"].float()
    return {f"{module}.{name}": tensor for name, tensor in packed.items()}, value


def modelopt_nvfp4(module, weight):
    codes, scale, factor = NVFP4QTensor.quantize(weight, 16, None, None, try_tensorrt=False)
    value = codes.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    return {f"{module}.weight": codes._quantized_data, f"{module}.weight_scale": scale,
            f"{module}.weight_scale_2": factor, f"{module}.input_scale": torch.tensor(0.01)}, value


def modelopt_fp8(module, weight):
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale.reshape(()),
            f"{module}.input_scale": torch.tensor(0.01)}, codes.float() * scale


def hqq(bits):
    def of(module, weight):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.clone()
        config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
        layer = HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu")
        meta = {**layer.meta, "compute_dtype": torch.float32,
                "scale": layer.meta["scale"].float(), "zero": layer.meta["zero"].float()}
        value = Quantizer.dequantize(layer.W_q.data, meta)
        return {f"{module}.{name}": tensor for name, tensor in layer.state_dict().items()}, value
    return of


def ct_settings(name, arguments):
    arguments = {key: str(value) if isinstance(value, torch.dtype) else value
                 for key, value in arguments["weights"].model_dump().items()}
    return {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}}}


def modelopt_settings(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def hqq_settings(bits):
    # As transformers' HqqConfig writes it.
    config = {"weight_quant_params": {"nbits": bits, "group_size": 64, "channel_wise": True, "optimize": True,
                                      "round_zero": bits == 4, "axis": 1, "view_as_float": False},
              "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}
    return {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}


FORMATS = {
    "tiny-ct-nvfp4": (ct_nvfp4, ct_settings("nvfp4-pack-quantized", NVFP4A16)),
    "tiny-ct-mxfp4": (ct_mxfp4, ct_settings("mxfp4-pack-quantized", MXFP4A16)),
    "tiny-modelopt-nvfp4": (modelopt_nvfp4, modelopt_settings("NVFP4")),
    "tiny-modelopt-fp8": (modelopt_fp8, modelopt_settings("FP8")),
    "tiny-hqq-4": (hqq(4), hqq_settings(4)),
    "tiny-hqq-8": (hqq(8), hqq_settings(8)),
}
digests = {}
for name, (quantize, settings) in FORMATS.items():
    folder = golden / "qbases/models" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored, values = {}, {}
    for weight, tensor in weights.items():
        if weight.endswith("proj.weight"):
            packed, values[weight] = quantize(weight.removesuffix(".weight"), tensor)
            stored.update(packed)
        else:
            stored[weight] = tensor.bfloat16()
            values[weight] = stored[weight].float()
    save_file({name: torch.as_tensor(tensor).contiguous() for name, tensor in stored.items()},
              folder / "model.safetensors", {"format": "pt"})
    # 0.0 is added, so that -0.0 counts as 0.0.
    digest = lambda value: hashlib.sha256((value + 0.0).contiguous().numpy().tobytes()).hexdigest()
    digests[name] = {weight: digest(value) for weight, value in values.items()}
(golden / "qbases/sha256_packages.json").write_text(json.dumps(digests, indent=1) + "\n")
