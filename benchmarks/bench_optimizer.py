"""Benchmark a step of Muon next to one of AdamW: time, and bytes sent to other ranks.

FSDP2 shards the parameters of a model, as in training, over CPU processes joined by gloo or GPUs joined by NCCL. Times
are medians over rounds in which the two take turns, from a barrier to the slowest rank.

    AdamW, Muon   seconds of the optimizer's step alone, masters and rounding included
    bytes         bytes that a rank sends in Muon's step; AdamW sends nothing
    formula       2 bytes there and 2 back for each element that another rank owns

    python benchmarks/bench_optimizer.py [--config CONFIG.json] [--ranks 2] [--dtype bf16] [--rounds 5] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_bench import add_save, save
from rank_processes import RankProcesses, results_of

from dualpipe.models import read_config
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule import build
from dualpipe.train.launch.join import connect
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import build_model

SECONDS = 3600.0  # timeout of the ranks
MODEL = {  # a small model with Qwen3-30B-A3B's proportions
    "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 512, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192,
    "norm_topk_prob": True, "num_hidden_layers": 4,
}


def measure(args: argparse.Namespace, info: RankInfo, prefix: str) -> dict[str, float]:
    """Return this rank's median times, its number of parameters, and the bytes that it sends."""
    rank = info.rank
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=args.ranks,
                            store=connect(info, timedelta(seconds=SECONDS), prefix=prefix))
    mesh = build_mesh(1, args.ranks, 1, device) if args.ranks > 1 else None
    stages = build_model(read_config(args.config), build("1f1b", 1, 1), 0, dtypes=dtype_of(args.dtype), device=device,
                         mesh=mesh).stages
    terms: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = {name: Optimizer(stages, name=name, **terms) for name in ("adamw", "muon")}
    for parameter in optimizers["muon"].parameters:
        parameter.grad = torch.randn_like(parameter, dtype=parameter.grad_dtype)
    sent, send = [0], dist.all_to_all_single

    def counted(received: torch.Tensor, given: torch.Tensor, *sizes: Any, **options: Any) -> Any:
        sent[0] += given.nbytes - sizes[1][rank] * given.itemsize
        return send(received, given, *sizes, **options)

    dist.all_to_all_single = counted
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(args.rounds + 1):
        for name, optimizer in optimizers.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.step(1e-3)
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - start)
    dist.all_to_all_single = send
    numbers = sum(p.numel() for p in optimizers["muon"].parameters)
    matrices = sum(p.numel() for p, state in optimizers["muon"].state_tensors().items() if "momentum_buffer" in state
                   and p.dim() == 2)
    dist.destroy_process_group()
    return {name: statistics.median(seconds) for name, seconds in times.items()} | {
        "parameters": numbers, "bytes": sent[0] / (args.rounds + 1),
        "formula": 4 * matrices * (args.ranks - 1) / args.ranks / args.ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    add_save(parser, "bench_optimizer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.config:
            args.config = f"{folder}/config.json"
            Path(args.config).write_text(json.dumps(MODEL))
        row = results_of(RankProcesses(measure, alone=args.ranks, seconds=SECONDS).run(args))[0]
    print(f"{row['parameters']:,} parameters on {args.ranks} ranks: AdamW {row['adamw'] * 1e3:.1f} ms, Muon "
          f"{row['muon'] * 1e3:.1f} ms ({row['muon'] / row['adamw']:.1f} times), {row['bytes'] / 1e6:.2f} MB sent by a "
          f"rank ({row['formula'] / 1e6:.2f} by the formula)")
    if args.save:
        save("bench_optimizer", [row], args.save, ranks=args.ranks, dtype=args.dtype, rounds=args.rounds)


if __name__ == "__main__":
    main()
