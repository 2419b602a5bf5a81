"""The other side of the scaling benchmark: PyTorch DDP or FSDP over gloo, one process a rank.
Prints one JSON line.

    python torch_ranks.py --strategy fsdp --ranks 2 --mode lora --shape 135m --seq 512 --steps 6

Starts its own ranks on the loopback. The step is that of peft_bench.py: SDPA attention, f32, AdamW,
LoRA on all linear layers as PEFT creates it. FSDP shards by decoder layer (FSDP1's wrapper with
use_orig_params, which accepts frozen and trained parameters in one layer).
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

from peft_bench import build, peak_rss_bytes, rows
from shapes import SHAPES, write_model


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--mode", choices=("lora", "full"), default="lora")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    args = parser.parse_args()
    args.dtype, args.checkpointing, args.device = "f32", False, "cpu"
    return args


def wrapped(args, model, torch):
    if args.strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = {type(module) for module in model.modules() if type(module).__name__.endswith("DecoderLayer")}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(layers), use_orig_params=True, device_id=torch.device("cpu")
    )


def rank(number, args, port, results):
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", rank=number, world_size=args.ranks)
    model, ids = build(args, torch), rows(args, torch)
    model = wrapped(args, model, torch)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)
    step_secs = []
    for step in range(args.steps):
        start = time.perf_counter()
        at = (step * args.ranks + number) % len(ids)
        batch = ids[at : at + 1]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip = model.clip_grad_norm_ if args.strategy == "fsdp" else lambda norm: torch.nn.utils.clip_grad_norm_(trainable, norm)
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_secs.append(time.perf_counter() - start)
    results.put((number, step_secs, peak_rss_bytes()))
    dist.barrier()
    dist.destroy_process_group()


def main():
    args = arguments()
    scratch = tempfile.TemporaryDirectory()
    args.folder = Path(scratch.name)
    write_model(args.folder, args.shape, args.seq, args.steps * args.ranks)

    import torch
    import torch.multiprocessing as processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = processes.get_context("spawn").SimpleQueue()
    processes.spawn(rank, (args, port, results), nprocs=args.ranks)
    all_ranks = [results.get() for _ in range(args.ranks)]
    secs = statistics.median(next(secs for number, secs, _ in all_ranks if number == 0)[args.warmup :])
    print(
        json.dumps(
            {
                "strategy": args.strategy,
                "mode": args.mode,
                "ranks": args.ranks,
                "threads_per_rank": args.threads,
                "tokens_per_sec": args.seq * args.ranks / secs,
                "step_secs": secs,
                "peak_rss_bytes": sum(peak for _, _, peak in all_ranks),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
