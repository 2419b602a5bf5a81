#!/usr/bin/env python3
"""Checks files that `finetune` writes and reads against transformers and PEFT.

    python scripts/check_outputs.py --finetune target/release/finetune

Needs torch, transformers, peft and the binary; no network, no GPU. Takes minutes. For each tiny
family under tests/golden/models and tests/golden/families/models:

  finetune's     adapters of several kinds load in PEFT: same loss, same greedy continuation;
                 `finetune merge` gives the logits of PEFT's model, loads in transformers without a
                 missing or unexpected tensor, and keeps the tokenizer
  full           the folder of a full run loads in transformers: same loss, same continuation
  new tokens     the tokenizer beside an adapter or in a model has the ids that transformers gives
                 them; the model resized to it, and PEFT on it, have the same logits as the merged
                 one and the same loss
  PEFT's         adapters with random values give `finetune eval` PEFT's loss, and training can
                 start from them
  experts        of models with experts, which PEFT cannot adapt so: merged adapters of all linear
                 layers, experts included, and full runs load in transformers without a missing or
                 unexpected tensor, with the loss of the adapter and the same continuation

Losses are compared over a text and a prompt/completion data set that are tokenized here, from
tokenizer.json alone. Prints the largest difference of each check; exits 1 if one is above its
limit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import peft
import safetensors
import safetensors.torch
import tokenizers
import torch
import transformers

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
SETS = [GOLDEN / "models", GOLDEN / "families" / "models"]
# transformers has no class for the text part alone.
WITHOUT_CLASS = {"mistral4"}
MODELS = {path.name.removeprefix("tiny-"): path for folder in SETS for path in sorted(folder.glob("tiny-*"))}
# The keys of config.json that count experts.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# PEFT on transformers 5 cannot load an adapter with a pair of matrices for each expert.
EXPERTS = sorted(
    name
    for name, path in MODELS.items()
    if name not in WITHOUT_CLASS
    and any(json.loads((path / "config.json").read_text()).get(key) for key in EXPERT_KEYS)
)
FAMILIES = sorted(MODELS.keys() - WITHOUT_CLASS)
# Factors on the limits of logits: the delta rule of this random model amplifies rounding.
AMPLIFIED = {"qwen3-5": 20}
# finetune refuses new tokens where a table of inputs for each block has rows of its own, and PiSSA
# where a layer is smaller than the rank.
REFUSED = {"gemma4-e2b": ("new tokens",), "gemma3n": ("new tokens", "pissa")}
MAX_SEQ_LEN = 96
PROMPT = "The gentle copper signs the"
NEW_TOKENS = 24

LOSS_LIMIT = 1e-5
LOGITS_LIMIT = 1e-4
# A merged weight rounded to 16 bits differs by half a unit in its last place, which moves the
# logits of these models by some hundredths. A wrong merge moves them by ones.
ROUNDED_LIMITS = {torch.bfloat16: 0.25, torch.float16: 0.05, torch.float32: LOGITS_LIMIT}


@dataclass
class Family:
    """A tiny model and the names of its modules."""

    name: str
    folder: Path = field(init=False)

    def __post_init__(self):
        self.folder = MODELS[self.name]
        self.config = json.loads((self.folder / "config.json").read_text())
        self.tied = self.config["tie_word_embeddings"]
        modules = set()
        for path in self.folder.glob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                modules |= {part for name in file.keys() for part in name.split(".")}
        self.attention = ["qkv_proj", "o_proj"] if "qkv_proj" in modules else ["q_proj", "v_proj"]
        self.mlp, self.gate, self.down, self.norm = (
            next(name for name in names if name in modules)
            for names in (
                ("mlp", "shared_mlp"),
                ("gate_proj", "gate_up_proj", "input_linear"),
                ("down_proj", "output_linear"),
                ("input_layernorm", "post_attention_layernorm"),
            )
        )

    def load(self, folder=None, dtype=torch.float32):
        """Returns a model in f32; fails for each tensor that does not belong to it."""
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder or self.folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        wrong = {kind: names for kind, names in info.items() if names}
        if wrong:
            raise AssertionError(f"{folder}: {wrong}")
        return model.eval()

    def load_adapter(self, adapter, tokens=0):
        """Returns PEFT's model with at least `tokens` tokens; a missing or unexpected tensor in the
        file is a failure."""
        base = self.load()
        # Beside a resized base PEFT would also save a copy of its tables.
        tables = False if tokens > base.config.vocab_size else "auto"
        if tokens > base.config.vocab_size:
            base.resize_token_embeddings(tokens)
        model = peft.PeftModel.from_pretrained(base, adapter).eval()
        stored = safetensors.torch.load_file(adapter / "adapter_model.safetensors").keys()
        # PEFT writes a copy of a table beside the adapter on it, but does not need it for reading;
        # finetune writes none.
        asked = peft.get_peft_model_state_dict(model, save_embedding_layers=tables).keys()
        wrong = {name for name in stored ^ asked if "base_layer" not in name}
        if wrong:
            raise AssertionError(f"{adapter}: tensors missing or not asked for: {sorted(wrong)}")
        return model


@dataclass
class ExpertFamily(Family):
    """A tiny model with experts."""

    def __post_init__(self):
        self.folder = MODELS[self.name]
        self.config = json.loads((self.folder / "config.json").read_text())


class Figures:
    """The largest difference of each check, by family."""

    def __init__(self):
        self.largest = {}
        self.failures = []

    def difference(self, family, check, value, limit, where):
        """Records a difference; above `limit`, or not a number, it is a failure."""
        if "logits" in check:
            limit *= AMPLIFIED.get(family, 1)
        key = (family, check)
        self.largest[key] = max(self.largest.get(key, 0.0), value)
        if not value <= limit:
            self.failures.append(f"{family} {where}: {check} {value:.3g}, limit {limit:g}")

    def equal(self, family, check, ours, theirs, where):
        """Records whether two things are equal."""
        self.difference(family, check, 0.0 if ours == theirs else 1.0, 0.0, f"{where}: {ours!r} != {theirs!r}")

    def fault(self, family, where, error):
        """Records that a check could not be made."""
        self.failures.append(f"{family} {where}: {type(error).__name__}: {error}")

    def print(self):
        checks = sorted({check for _, check in self.largest})
        families = list(dict.fromkeys(family for family, _ in self.largest))
        width = max(map(len, checks), default=0)
        print(" " * width, *(f"{family:>8}" for family in families))
        for check in checks:
            values = (self.largest.get((family, check)) for family in families)
            print(f"{check:<{width}}", *("       –" if v is None else f"{v:8.1e}" for v in values))


class Rows:
    """The tokens of a data set by its documentation, and the loss of a model over them."""

    def __init__(self, folder, file):
        self.file = file
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        eos = settings["eos_token"]
        eos = tokenizer.token_to_id(eos if isinstance(eos, str) else eos["content"])
        self.examples = [self.example(tokenizer, json.loads(row), eos) for row in file.read_text().splitlines()]

    @staticmethod
    def example(tokenizer, row, eos):
        prompt, answer = row.get("prompt", ""), row.get("completion", row.get("text"))
        encoding = tokenizer.encode(prompt + answer)
        # A token counts if it covers part of the answer; a token of zero width belongs to the text
        # that begins there.
        counts = [
            not prompt or end > len(prompt) or (start == end == len(prompt)) for start, end in encoding.offsets
        ]
        return (encoding.ids + [eos])[:MAX_SEQ_LEN], (counts + [True])[:MAX_SEQ_LEN]

    @torch.no_grad()
    def loss(self, model):
        total, tokens = 0.0, 0
        for ids, counts in self.examples:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            mask = torch.tensor(counts[1:])
            total += losses[mask].sum().item()
            tokens += int(mask.sum())
        return total / tokens, tokens

    @torch.no_grad()
    def logits(self, model):
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids, _ in self.examples[:8]])


@torch.no_grad()
def continuation(family, model):
    """Returns the greedy continuation as text, without a cache: the whole sequence each time."""
    tokenizer = tokenizers.Tokenizer.from_file(str(family.folder / "tokenizer.json"))
    settings = json.loads((family.folder / "generation_config.json").read_text())
    stops = settings.get("eos_token_id", family.config.get("eos_token_id"))
    stops = stops if isinstance(stops, list) else [stops]
    prompt = tokenizer.encode(PROMPT).ids
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        token = model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()
        if token in stops:
            break
        ids.append(token)
    shown = tokenizer.decode(prompt, skip_special_tokens=True)
    return PROMPT + tokenizer.decode(ids, skip_special_tokens=True)[len(shown) :]


class Program:
    """The binary under test."""

    def __init__(self, binary):
        self.binary = binary

    def run(self, *args):
        done = subprocess.run([self.binary, *map(str, args), "--offline"], capture_output=True, check=False)
        if done.returncode != 0:
            raise AssertionError(f"finetune {args[0]} …: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode(errors="replace")

    def train(self, family, recipe, output, dataset=GOLDEN / "data" / "sft_messages.jsonl", **keys):
        keys = {
            "data.on_bad_row": '"skip"',
            "data.max_seq_len": MAX_SEQ_LEN,
            "train.max_steps": 8,
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        flags = [flag for key, value in keys.items() for flag in ("--set", f"{key}={value}")]
        self.run(
            *("--model", family.folder, "--output", output, "--quiet"),
            *(("--recipe", recipe) if recipe else ()),
            *("--dataset", dataset),
            *("--eval-dataset", GOLDEN / "data" / "text.jsonl"),
            *flags,
        )
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [line["eval_loss"] for line in lines if "eval_loss" in line]

    def loss(self, model, rows, adapter=None):
        more = ["--adapter", adapter] if adapter else []
        length = f"data.max_seq_len={MAX_SEQ_LEN}"
        out = self.run("eval", "--model", model, "--dataset", rows.file, "--set", length, "--json", *more)
        figures = json.loads(out)
        return figures["loss"], figures["tokens"]

    def continuation(self, model, adapter=None):
        more = ["--adapter", adapter] if adapter else []
        out = self.run("generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, *more)
        return out.removesuffix("\n")


def same_text(ours, theirs):
    """Compares texts up to the first bytes that are no text, which a stream cannot show like the
    decoded whole."""
    readable, broken, _ = theirs.partition("\ufffd")
    return ours.startswith(readable) if broken else ours.rstrip("\ufffd") == theirs


class Checks:
    """All checks of one family."""

    def __init__(self, program, family, figures, place):
        self.program, self.family, self.figures, self.place = program, family, figures, place
        self.rows = [Rows(family.folder, GOLDEN / "data" / name) for name in ("text.jsonl", "prompt_completion.jsonl")]

    def note(self, check, value, limit, where):
        self.figures.difference(self.family.name, check, value, limit, where)

    def same(self, check, ours, theirs, where):
        self.figures.equal(self.family.name, check, ours, theirs, where)

    def scores(self, check, where, model, folder, adapter=None):
        """Compares losses and continuation of `model` with the binary's on the same files."""
        for rows in self.rows:
            ours, our_tokens = self.program.loss(folder, rows, adapter)
            theirs, tokens = rows.loss(model)
            self.same(f"{check}: tokens", our_tokens, tokens, f"{where} {rows.file.name}")
            self.note(f"{check}: loss", abs(ours - theirs), LOSS_LIMIT, f"{where} {rows.file.name}")
        ours, theirs = self.program.continuation(folder, adapter), continuation(self.family, model)
        wrong = 0.0 if same_text(ours, theirs) else 1.0
        self.note(f"{check}: continuation", wrong, 0.0, f"{where}: {ours!r} != {theirs!r}")

    def tokenizer(self, where, folder):
        theirs = transformers.AutoTokenizer.from_pretrained(self.family.folder)
        ours = transformers.AutoTokenizer.from_pretrained(folder)
        text = "Grüße, 日本 1 2 3\n\tdone"
        self.same("tokenizer", ours(text).input_ids, theirs(text).input_ids, where)
        self.same("tokenizer", ours.chat_template, theirs.chat_template, where)
        self.same("tokenizer", ours.special_tokens_map, theirs.special_tokens_map, where)

    def adapter_kinds(self):
        """Settings of [adapter]."""
        attention, mlp, gate, down = self.family.attention, self.family.mlp, self.family.gate, self.family.down
        patterns = {
            "adapter__rank_pattern": f'{{"{down}" = 3, "layers.0.{mlp}.{gate}" = 5}}',
            "adapter__alpha_pattern": '{"o_proj" = 7.5}',
        }
        return {
            "lora": {},
            "dropout": {"adapter__lora_dropout": 0.3, "adapter__init": '"gaussian"'},
            "rslora": {"adapter__use_rslora": "true", "adapter__r": 6},
            "patterns": patterns,
            "patterns and rslora": {**patterns, "adapter__use_rslora": "true"},
            "two modules": {"adapter__target_modules": json.dumps(attention)},
            "without": {"adapter__exclude_modules": f'["layers.1.{mlp}.{down}", "o_proj"]'},
            "head": {"adapter__modules_to_save": '["lm_head"]'},
            "embedding": {"adapter__modules_to_save": '["embed_tokens"]'},
            "embedding and head": {"adapter__modules_to_save": '["embed_tokens", "lm_head"]'},
            "norms": {"adapter__modules_to_save": '["norm"]'},
            "a linear": {"adapter__modules_to_save": f'["{attention[-1]}"]'},
            "bf16": {"checkpoint__output_dtype": '"bf16"'},
            "dora": {"adapter__kind": '"dora"'},
            "dora with dropout": {"adapter__kind": '"dora"', "adapter__lora_dropout": 0.2, **patterns},
            "pissa": {"adapter__init": '"pissa"', "adapter__r": 4},
            "pissa, dora, rslora": {
                "adapter__init": '"pissa"', "adapter__kind": '"dora"', "adapter__use_rslora": "true", "adapter__r": 4
            },
            "on the embedding": {"adapter__target_modules": json.dumps([attention[0], "embed_tokens"])},
            "on the head": {"adapter__target_modules": json.dumps([attention[0], "lm_head"])},
            "8-bit states, LoRA+": {"optimizer__state": '"int8"', "optimizer__lora_plus_ratio": 4, "adapter__r": 64},
        }

    def our_adapter(self, where, keys):
        out = self.place / where
        # High enough that a missing or wrongly scaled adapter shows.
        losses = self.program.train(self.family, "lora", out, optimizer__learning_rate=1e-2, **keys)
        model = self.family.load_adapter(out)
        self.note("moved by", 0.0 if abs(losses[1] - losses[0]) > 0.01 else 1.0, 0.0, f"{where}: {losses}")
        self.scores("adapter", where, model, self.family.folder, out)
        if "checkpoint__output_dtype" not in keys:
            theirs = self.rows[0].loss(model)[0]
            self.note("adapter: loss in the run", abs(losses[1] - theirs), LOSS_LIMIT, where)
        logits = self.rows[0].logits(model)
        own = getattr(torch, self.family.config.get("dtype", self.family.config.get("torch_dtype")))
        for dtype in ("f32", "auto"):
            merged = self.place / f"{where} {dtype}"
            flags = ("--model", self.family.folder, "--adapter", out, "--output", merged, "--dtype", dtype)
            self.program.run("merge", *flags)
            loaded = self.family.load(merged)
            limit = LOGITS_LIMIT if dtype == "f32" else ROUNDED_LIMITS[own]
            difference = (self.rows[0].logits(loaded) - logits).abs().max().item()
            self.note(f"merge, {dtype}: logits", difference, limit, where)
        self.scores("merge", where, loaded, merged)
        self.tokenizer(where, merged)

    def full(self):
        for dtype in ("auto", "f32"):
            where = f"full {dtype}"
            out = self.place / where
            keys = {"optimizer__learning_rate": 1e-3, "checkpoint__output_dtype": f'"{dtype}"'}
            losses = self.program.train(self.family, "full", out, **keys)
            model = self.family.load(out)
            self.scores("full", where, model, out)
            self.tokenizer(where, out)
            if dtype == "f32":
                self.note("full: loss in the run", abs(losses[1] - self.rows[0].loss(model)[0]), LOSS_LIMIT, where)

    def new_tokens(self, recipe, **keys):
        where = " ".join(["new tokens", recipe, *keys])
        out, merged, data = self.place / where, self.place / f"{where} merged", self.place / f"{where}.jsonl"
        texts = ["<tool>", "</tool>", "new word"]
        lines = [f"The <tool>amber {i}</tool> signs a new word, <tool>river</tool>." for i in range(16)]
        data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        keys["model__new_tokens"] = json.dumps(texts)
        keys["checkpoint__output_dtype"] = '"f32"'
        self.program.train(self.family, recipe, out, dataset=data, optimizer__learning_rate=1e-2, **keys)
        theirs = transformers.AutoTokenizer.from_pretrained(self.family.folder)
        theirs.add_tokens(texts)
        ours = transformers.AutoTokenizer.from_pretrained(out)
        self.same("new tokens: ids", ours(lines).input_ids, theirs(lines).input_ids, where)
        self.same("new tokens: ids", len(ours), len(theirs), where)
        rows = Rows(out, data)
        if recipe == "full":
            model, files = self.family.load(out), (out,)
        else:
            model, files = self.family.load_adapter(out, len(ours)), (self.family.folder, rows, out)
            self.program.run(
                *("merge", "--model", self.family.folder, "--adapter", out, "--output", merged, "--dtype", "f32")
            )
            loaded = self.family.load(merged)
            difference = (rows.logits(loaded) - rows.logits(model)).abs().max().item()
            self.note("new tokens: logits merged", difference, LOGITS_LIMIT, where)
            self.same("new tokens: ids", len(transformers.AutoTokenizer.from_pretrained(merged)), len(theirs), where)
        theirs = rows.loss(model)[0]
        ours = self.program.loss(files[0], rows, *files[2:])[0]
        self.note("new tokens: loss", abs(ours - theirs), LOSS_LIMIT, where)

    def peft_kinds(self):
        """Settings of LoraConfig."""
        attention, mlp, gate, down = self.family.attention, self.family.mlp, self.family.gate, self.family.down
        kinds = {
            "plain": dict(target_modules=attention),
            "all-linear": dict(target_modules="all-linear", use_rslora=True, lora_dropout=0.1),
            "patterns": dict(
                target_modules="all-linear",
                rank_pattern={down: 2, f"layers.0.{mlp}.{gate}": 7},
                alpha_pattern={r".*\.1\.self_attn\.o_proj": 3},
            ),
            "a regex": dict(target_modules=rf".*\.0\..*(o_proj|{down})"),
            "a layer": dict(target_modules=attention, layers_to_transform=[self.family.config["num_hidden_layers"] - 1], layers_pattern="layers"),
            "without": dict(target_modules="all-linear", exclude_modules=["o_proj"]),
            "head": dict(target_modules=attention, modules_to_save=["lm_head"]),
            "embedding": dict(target_modules=attention, modules_to_save=["embed_tokens"]),
            "norms": dict(target_modules=attention, modules_to_save=["norm", self.family.norm]),
            "dora": dict(target_modules="all-linear", use_dora=True),
            "on the embedding": dict(target_modules=[*attention, "embed_tokens"]),
            "on the head": dict(target_modules=[*attention, "lm_head"]),
            "token rows": dict(target_modules=attention, trainable_token_indices={"embed_tokens": [5, 3, 40]}),
        }
        if self.family.tied:
            for module in ("embed_tokens", "lm_head"):
                kinds[f"tied {module}"] = dict(
                    target_modules=attention, modules_to_save=[module], ensure_weight_tying=True
                )
        return kinds

    def peft_adapter(self, where, kind):
        folder, out = self.place / f"peft {where}", self.place / f"from peft {where}"
        torch.manual_seed(7)
        config = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **kind)
        made = peft.get_peft_model(self.family.load(), config)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "modules_to_save" in name and parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        made.save_pretrained(folder)
        model = self.family.load_adapter(folder)
        self.scores("of PEFT", where, model, self.family.folder, folder)
        keys = {"train__max_steps": 1, "optimizer__learning_rate": 1e-12}
        losses = self.program.train(self.family, None, out, adapter__path=json.dumps(str(folder)), **keys)
        theirs = self.rows[0].loss(model)[0]
        self.note("of PEFT: loss at the start", abs(losses[0] - theirs), LOSS_LIMIT, where)
        back = self.rows[0].loss(self.family.load_adapter(out))[0]
        self.note("of PEFT: loss when written back", abs(back - theirs), LOSS_LIMIT, where)
        merged = self.place / f"merged {where}"
        flags = ("--model", self.family.folder, "--adapter", folder, "--output", merged, "--dtype", "f32")
        self.program.run("merge", *flags)
        difference = self.rows[0].logits(self.family.load(merged)) - self.rows[0].logits(model)
        self.note("of PEFT: logits merged", difference.abs().max().item(), LOGITS_LIMIT, where)

    def peft_new_tokens(self, **kind):
        where = " ".join(["peft new tokens", *kind])
        folder, merged, data = self.place / where, self.place / f"{where} merged", self.place / f"{where}.jsonl"
        data.write_text("".join(json.dumps({"text": f"The <tool>amber {i}</tool> end"}) + "\n" for i in range(8)))
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.family.folder)
        first = len(tokenizer)
        tokenizer.add_tokens(["<tool>", "</tool>"])
        if "trainable_token_indices" in kind:
            kind["trainable_token_indices"] = {"embed_tokens": [first, first + 1]}
        torch.manual_seed(7)
        base = self.family.load()
        if len(tokenizer) > base.config.vocab_size:
            base.resize_token_embeddings(len(tokenizer))
        config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=self.family.attention, **kind)
        model = peft.get_peft_model(base, config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" not in name and parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        rows = Rows(folder, data)
        theirs = rows.loss(model)[0]
        ours = self.program.loss(self.family.folder, rows, folder)[0]
        self.note("of PEFT: loss with new tokens", abs(ours - theirs), LOSS_LIMIT, where)
        flags = ("--model", self.family.folder, "--adapter", folder, "--output", merged, "--dtype", "f32")
        self.program.run("merge", *flags)
        difference = (rows.logits(self.family.load(merged)) - rows.logits(model)).abs().max().item()
        self.note("of PEFT: logits merged with new tokens", difference, LOGITS_LIMIT, where)

    def experts(self):
        """An adapter of all linear layers, merged, against the binary's own results with it."""
        out = self.place / "experts"
        losses = self.program.train(self.family, "lora", out, optimizer__learning_rate=1e-2)
        self.note("moved by", 0.0 if abs(losses[1] - losses[0]) > 0.01 else 1.0, 0.0, f"experts: {losses}")
        for dtype in ("f32", "auto"):
            merged = self.place / f"experts {dtype}"
            flags = ("--model", self.family.folder, "--adapter", out, "--output", merged, "--dtype", dtype)
            self.program.run("merge", *flags)
            loaded = self.family.load(merged)
            self.scores(f"merge, {dtype}", "experts", loaded, merged)
            if dtype == "f32":
                ours, theirs = self.program.loss(self.family.folder, self.rows[0], out)[0], self.rows[0].loss(loaded)[0]
                self.note("merge, f32: loss of the adapter", abs(ours - theirs), LOSS_LIMIT, "experts")
        self.tokenizer("experts", merged)

    def all(self, only):
        if self.family.name in EXPERTS:
            return self.each([("experts", self.experts), ("full", self.full)], only)
        checks = [(name, lambda n=name, k=keys: self.our_adapter(n, k)) for name, keys in self.adapter_kinds().items()]
        checks.append(("full", self.full))
        both = {"adapter__modules_to_save": '["embed_tokens", "lm_head"]'}
        for recipe, keys in (("lora", {}), ("lora", both), ("full", {})):
            checks.append(("new tokens", lambda r=recipe, k=keys: self.new_tokens(r, **k)))
        for kind in ({}, {"trainable_token_indices": None}, {"modules_to_save": ["embed_tokens", "lm_head"]}):
            checks.append(("peft new tokens", lambda k=kind: self.peft_new_tokens(**k)))
        checks += [
            (f"peft {name}", lambda n=name, k=kind: self.peft_adapter(n, k)) for name, kind in self.peft_kinds().items()
        ]
        refused = REFUSED.get(self.family.name, ())
        self.each([(name, check) for name, check in checks if not any(word in name for word in refused)], only)

    def each(self, checks, only):
        for name, check in checks:
            if only and name not in only:
                continue
            try:
                check()
            except Exception as error:  # one broken output must not hide the others
                self.figures.fault(self.family.name, name, error)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune", default="target/release/finetune", help="the binary [%(default)s]")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="names of checks, such as lora, full, 'peft plain'")
    parser.add_argument("--keep", type=Path, help="a new folder for everything that is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    program, figures = Program(str(Path(args.finetune).resolve())), Figures()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.families:
            place = (args.keep or Path(temporary)) / name
            place.mkdir(parents=True)
            family = ExpertFamily(name) if name in EXPERTS else Family(name)
            Checks(program, family, figures, place).all(args.only)
            print(f"{name}: {len([f for f in figures.failures if f.startswith(name + ' ')])} failures", flush=True)
    if not figures.largest and not figures.failures:
        parser.error(f"nothing was checked: no check is called {' or '.join(args.only)}")
    figures.print()
    for failure in figures.failures:
        print(f"FAILED {failure}")
    sys.exit(1 if figures.failures else 0)


if __name__ == "__main__":
    main()
