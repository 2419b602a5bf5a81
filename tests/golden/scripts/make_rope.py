"""Writes tests/golden/rope: two tiny random models, and for each kind of rope (rope_type) the
logits, the loss and gradients of transformers (versions.json), for a sequence shorter and one
longer than the original context.

    python make_rope.py tests/golden

cases.json: for each case its model and the keys that it adds to that model's config.json, the mean
loss over both sequences (also computed in float64), and the norm of all gradients.
<model>/config.json, model.safetensors: shared by the cases. expected.safetensors: `ids.short`,
`ids.long` i64; `<case>.logits.short`, `.logits.long` [tokens, vocabulary];
`<case>.grad.<parameter>`.

Each sequence goes through a fresh model, alone. transformers uses the longest position of a batch,
padding included, as the length of all its rows, and "dynamic" remembers the longest batch so far.
"""
import json
import math
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import save_file

torch.set_num_threads(1)
target = pathlib.Path(sys.argv[1]) / "rope"
shape = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
shape |= dict(num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0)
shape |= dict(tie_word_embeddings=True, dtype="float32", bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "llama": shape | dict(architectures=["LlamaForCausalLM"], model_type="llama", head_dim=16),
    "phi3": shape
    | dict(architectures=["Phi3ForCausalLM"], model_type="phi3", partial_rotary_factor=0.75)
    | dict(original_max_position_embeddings=16, sliding_window=None),
}
SHORT = [1.0, 1.05, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0]
LONG = [1.0, 1.2, 1.7, 2.5, 4.0, 7.0, 9.0, 12.0]
old = lambda name, **keys: {"rope_scaling": {"type": name, **keys}}
new = lambda name, **keys: {"rope_scaling": {"rope_type": name, **keys}}
five = lambda name, **keys: {"rope_parameters": {"rope_type": name, "rope_theta": 5000.0, **keys}, "rope_theta": None}
CASES = {
    "linear": ("llama", old("linear", factor=4.0)),
    "linear_v5": ("llama", five("linear", factor=2.5)),
    "dynamic": ("llama", old("dynamic", factor=2.0) | dict(max_position_embeddings=16)),
    "dynamic_v5": ("llama", five("dynamic", factor=4.0) | dict(max_position_embeddings=24)),
    "llama3_no_original": ("llama", new("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "yarn": ("llama", new("yarn", factor=4.0, original_max_position_embeddings=16)),
    "yarn_old_name": ("llama", old("yarn", factor=2.0, original_max_position_embeddings=32)),
    "yarn_betas": ("llama", new("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=3.0, beta_slow=0.1)),
    "yarn_untruncated": (
        "llama",
        five("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.5, beta_slow=0.05, truncate=False),
    ),
    "yarn_mscale": ("llama", new("yarn", factor=16.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)),
    "yarn_attention_factor": ("llama", new("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3)),
    "yarn_max_positions": ("llama", new("yarn", factor=4.0, beta_fast=4.0, beta_slow=0.25)),
    "yarn_ratio": ("llama", new("yarn", factor=None, beta_slow=None) | dict(original_max_position_embeddings=16)),
    "longrope_factor": (
        "llama",
        new("longrope", factor=8.0, original_max_position_embeddings=16, short_factor=SHORT, long_factor=LONG),
    ),
    "longrope_attention_factor": (
        "llama",
        five("longrope", attention_factor=1.2, original_max_position_embeddings=16, short_factor=SHORT, long_factor=LONG),
    ),
    "phi3_longrope": ("phi3", old("longrope", short_factor=SHORT[:6], long_factor=LONG[:6])),
    "phi3_su": ("phi3", old("su", original_max_position_embeddings=16, short_factor=SHORT[1:7], long_factor=LONG[1:7])),
    "phi3_yarn": ("phi3", new("yarn", short_factor=SHORT[2:], long_factor=LONG[2:])),
}


def load(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


weights, tensors, cases = {}, {}, {}
for seed, (name, config) in enumerate(MODELS.items()):
    (target / name).mkdir(parents=True, exist_ok=True)
    (target / name / "config.json").write_text(json.dumps(config, indent=1))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(target / name))
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        # Scores that differ from token to token, so that positions matter.
        std = 0.35 if "q_proj" in key or "k_proj" in key or "qkv" in key else 0.15
        state[key] = 1 + 0.2 * noise if value.dim() == 1 else std * noise
    state.pop("lm_head.weight")
    weights[name] = state
    save_file(state, target / name / "model.safetensors", metadata={"format": "pt"})

generator = torch.Generator().manual_seed(7)
sequences = {"short": torch.randint(3, 40, (1, 13), generator=generator), "long": torch.randint(3, 40, (1, 45), generator=generator)}
tensors |= {f"ids.{key}": ids[0] for key, ids in sequences.items()}
count = sum(ids.shape[1] - 1 for ids in sequences.values())
for name, (base, keys) in CASES.items():
    config = {key: value for key, value in (MODELS[base] | keys).items()}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights[base], folder / "model.safetensors", metadata={"format": "pt"})
        total, total64, gradients = 0.0, 0.0, {}
        for key, ids in sequences.items():
            model = load(folder)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
            tensors[f"{name}.logits.{key}"] = logits[0].detach().contiguous()
            for parameter, value in model.named_parameters():
                gradients[parameter] = gradients.get(parameter, 0) + value.grad
            with torch.no_grad():
                exact = load(folder, torch.float64)(input_ids=ids, use_cache=False).logits
            total64 += torch.nn.functional.cross_entropy(exact[0, :-1], ids[0, 1:], reduction="sum").item() / count
            print(name, key, "f32 from f64", (exact[0] - logits[0]).abs().max().item())
    norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in gradients.values()))
    for parameter, value in gradients.items():
        if "layers.0.self_attn" in parameter and "o_proj" not in parameter:
            tensors[f"{name}.grad.{parameter}"] = value
    cases[name] = dict(model=base, config=keys, loss=total, loss_f64=total64, grad_norm=norm)
save_file(tensors, target / "expected.safetensors")
(target / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
