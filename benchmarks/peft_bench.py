"""The other side of the benchmarks: the same training with PyTorch, transformers and PEFT. Prints
one JSON line.

    python peft_bench.py --shape 135m --mode lora --dtype f32 --seq 512 --steps 8

A plain loop in the style of an experienced user: SDPA attention, fused AdamW on a GPU (with
`--state int8` bitsandbytes' 8-bit AdamW), LoRA on all linear layers as PEFT creates it (adapters in
f32), one optimizer step per `--micro-batch` x `--accumulation` rows of exactly `--seq` tokens.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path


def since_start():
    """Returns the seconds since this process started (in steps of 10 ms): the imports below
    count."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def arguments():
    from shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--folder", type=Path, help="model folder made before (shapes.py); default: a new one")
    parser.add_argument("--mode", choices=("lora", "qlora", "full"), default="lora")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that do not count in the median")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--state", choices=("f32", "int8"), default="f32", help="int8: bitsandbytes' 8-bit AdamW")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's own choice")
    return parser.parse_args()


def build(args, torch):
    from shapes import TARGETS
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    torch.manual_seed(0)
    how = {"dtype": dtype, "attn_implementation": "sdpa", "device_map": args.device}
    if args.mode == "qlora":
        from transformers import BitsAndBytesConfig

        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    if any(args.folder.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(args.folder, **how)
    else:
        config = AutoConfig.from_pretrained(args.folder)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if args.mode != "full":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS.get(args.shape, "all-linear"), task_type="CAUSAL_LM")
        )
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def optimizer_of(args, trainable, torch):
    """Returns AdamW and its name."""
    if args.state == "int8":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trainable, lr=1e-4, weight_decay=0.0), "bitsandbytes.optim.AdamW8bit"
    return torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0, fused=args.device == "cuda"), "torch.optim.AdamW"


def rows(args, torch):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    lines = (args.folder / "text.jsonl").read_text().splitlines()
    ids = [tokenizer(json.loads(line)["text"])["input_ids"][: args.seq] for line in lines]
    if min(map(len, ids)) < args.seq:
        sys.exit(f"text.jsonl has rows of fewer than {args.seq} tokens")
    return torch.tensor(ids, device=args.device)


def main():
    args = arguments()
    needed = args.steps * args.accumulation * args.micro_batch
    if args.folder is None:
        from shapes import write_model

        scratch = tempfile.TemporaryDirectory()
        args.folder = Path(scratch.name)
        write_model(args.folder, args.shape, args.seq, needed)

    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("peft_bench: --device cuda, but torch sees no GPU; use --device cpu, or a torch with CUDA where there is one")
    if args.threads:
        torch.set_num_threads(args.threads)
    model, ids = build(args, torch), rows(args, torch)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, optimizer_name = optimizer_of(args, trainable, torch)

    step_secs, losses, first_step_secs = [], [], None
    for step in range(args.steps):
        start = time.perf_counter()
        total = 0.0
        for micro in range(args.accumulation):
            at = (step * args.accumulation + micro) * args.micro_batch % len(ids)
            batch = ids[at : at + args.micro_batch]
            loss = model(input_ids=batch, labels=batch).loss / args.accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))  # waits for the device
        if args.device == "cuda":
            torch.cuda.synchronize()
        step_secs.append(time.perf_counter() - start)
        if first_step_secs is None:
            first_step_secs = since_start()

    import peft
    import transformers

    tokens = args.seq * args.micro_batch * args.accumulation
    counted = step_secs[args.warmup :] or step_secs
    print(
        json.dumps(
            {
                "tokens_per_sec": tokens / statistics.median(counted),
                "peak_rss_bytes": peak_rss_bytes(),
                "peak_gpu_allocated_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
                "peak_gpu_reserved_bytes": torch.cuda.max_memory_reserved() if args.device == "cuda" else None,
                "first_step_secs": first_step_secs,
                "step_secs": step_secs,
                "losses": losses,
                "optimizer": optimizer_name,
                "trainable_parameters": sum(p.numel() for p in trainable),
                "threads": torch.get_num_threads(),
                "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
            }
        )
    )


if __name__ == "__main__":
    main()
