"""Steps of small models on CPU ranks, timed, and what `dualpipe.plan` predicts for them on a machine that was measured.

What the machine can do is measured by operators alone, but for one factor: of each model one layout, on one rank, says
by how much all computing there is slower than its operators by themselves.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualpipe import Pipeline
from dualpipe.kernels import grouped_gemm
from dualpipe.models import read_config
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.plan.machines import Machine
from dualpipe.plan.predict import Prediction
from dualpipe.schedule import build
from dualpipe.train.config import fit_world, load_config
from dualpipe.train.model import build_model, build_routers, micro_batch_loss
from dualpipe.train.optimizer import Optimizer
from ranks import run_ranks
from run_files import MODEL, write_files

MODELS = {
    "wide": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32, "num_experts": 8,
             "num_key_value_heads": 4, "moe_intermediate_size": 256, "vocab_size": 1024},
    "deep": {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "head_dim": 32, "num_experts": 4,
             "num_key_value_heads": 6, "moe_intermediate_size": 384, "vocab_size": 512},
}
LENGTH = 128
# pp, dp, ep, schedule, micro-batches, sequences of one, recompute; the first of them is what a model is measured by.
LAYOUTS = (
    (1, 1, 1, "1f1b", 4, 4, "none"),
    (2, 1, 1, "1f1b", 4, 4, "none"),
    (2, 1, 1, "dualpipev", 8, 4, "none"),
    (1, 2, 1, "1f1b", 4, 4, "layer"),
    (1, 1, 2, "1f1b", 4, 4, "none"),
    (2, 1, 1, "zbv", 8, 2, "none"),
    (1, 1, 2, "dualpipev", 8, 2, "layer"),
)


def options(layout: tuple[Any, ...]) -> list[str]:
    names = ("parallel.pp", "parallel.dp", "parallel.ep", "parallel.schedule", "train.num_chunks",
             "train.micro_batch_size", "memory.recompute")
    return [text for name, value in zip(names, layout) for text in (f"--{name}", str(value))] + [
        "--train.sequence_length", str(LENGTH), "--router.balanced", "True"]


def predict(path: str, layout: tuple[Any, ...], machine: Machine) -> Prediction:
    config = load_config(path, options(layout))
    config = fit_world(config, config.parallel.world_size)
    return Prediction(config, read_config(config.model.config), machine)


def steps(rank: int, path: str, layouts: list[tuple[Any, ...]], rounds: int) -> list[list[float]]:
    """Seconds of the steps of each layout, which take turns."""
    runs = [_prepared(path, layout) for layout in layouts]
    found: list[list[float]] = [[] for _ in layouts]
    for turn in range(rounds + 2):
        for run, times in zip(runs, found):
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if turn > 1:
                times.append(time.perf_counter() - start)
    return found


def _prepared(path: str, layout: tuple[Any, ...]):
    config = load_config(path, options(layout))
    p, t = config.parallel, config.train
    mesh, device = build_mesh(p.pp, max(1, p.dp), p.ep, torch.device("cpu")), torch.device("cpu")
    place = Mesh.of(mesh)
    model = build_model(
        read_config(config.model.config), build(p.schedule, p.pp, t.num_chunks), place.rank("pp"), seed=0,
        dtype=torch.float32, device=device, mesh=mesh, recompute=config.memory.recompute,
    )
    optimizer = Optimizer(model.stages, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    pipe = Pipeline(model.stages, process_group=place.group("pp"), schedule=p.schedule)
    routers = build_routers(config, model.stages, group=dist.group.WORLD, device=device)
    tokens = torch.randint(model.config.vocab_size, (t.micro_batch_size * t.num_chunks, t.sequence_length))
    criterion = micro_batch_loss(t.num_chunks) if model.has_last else None

    def run() -> None:
        with routers.step():
            pipe.step(*[tokens] * model.has_first, num_chunks=t.num_chunks, criterion=criterion,
                      labels=(tokens,) * model.has_last)
        optimizer.step(1e-3)
        optimizer.zero_grad()

    return run


# -- what the machine can do


def median(fn, count: int = 30) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine_of(rank: int, model: dict[str, int]) -> dict[str, float]:
    """The fields of `Machine` that operators of a model's sizes reach on two ranks at once."""
    hidden, heads, size, wide = (model[name] for name in (
        "hidden_size", "num_attention_heads", "head_dim", "moe_intermediate_size"))
    rows, experts = 4 * LENGTH, model["num_experts"]
    x, w = torch.randn(rows, hidden), torch.randn(hidden, heads * size)
    dist.barrier()
    gemm = 2 * rows * hidden * heads * size / median(lambda: x @ w)
    sorted_x, weights = torch.randn(2 * rows, hidden), torch.randn(experts, 2 * wide, hidden)
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * (2 * rows // experts)
    grouped = 2 * sorted_x.shape[0] * hidden * 2 * wide / median(lambda: grouped_gemm(sorted_x, weights, ends))
    q, k, v = (torch.randn(4, heads, LENGTH, size, requires_grad=True) for _ in range(3))
    seen = torch.ones(LENGTH, LENGTH).tril().bool()

    def attention() -> torch.Tensor:
        scores = (q @ k.mT * 0.1).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v

    out = attention()
    flops = 4 * heads * size * LENGTH * rows
    forward = flops / median(attention)
    backward = 2.5 * flops / median(lambda: torch.autograd.grad(out, (q, k, v), out, retain_graph=True))
    big, target = torch.randn(rows, 4 * hidden), torch.empty(rows, 4 * hidden)
    copy = 2 * big.nbytes / median(lambda: target.copy_(big))
    small = torch.zeros(8, requires_grad=True)
    launch = median(lambda: small + 1.0, 300)
    few, many = torch.zeros(256), torch.zeros(2**18)
    latency = median(lambda: dist.all_to_all_single(torch.empty_like(few), few))
    moved = median(lambda: dist.all_to_all_single(torch.empty_like(many), many)) - latency
    link = many.nbytes / 2 / max(moved, 1e-6)
    peak = max(gemm, grouped, forward, backward)
    return {
        "tflops": peak / 1e12, "gemm": gemm / peak, "grouped": grouped / peak, "attention": forward / peak,
        "attention_backward": backward / peak, "hbm": copy / 1e9, "nvlink": link / 1e9, "latency": latency * 1e6,
        "launch": launch * 1e6,
    }


def measured_machine(model: dict[str, int]) -> Machine:
    both = run_ranks(machine_of, 2, model, reuse=True, timeout=300)
    fields = {name: statistics.mean(each[name] for each in both) for name in both[0]}
    return Machine(**fields, memory=8, multiprocessors=0, network=1, bandwidth=1, links=1, networks=1,
                   network_latency=1, imbalance=1, reserve=0, host_waits=True)


def compared(folder: Path, name: str, rounds: int) -> list[tuple[tuple[Any, ...], float, float]]:
    """For each layout but the first: it, the median of its measured steps, and the predicted one."""
    model = MODEL | MODELS[name]
    path = str(write_files(folder, model))
    machine = measured_machine(model)
    reference, *rest = LAYOUTS
    (alone,) = run_ranks(steps, 1, path, [reference], rounds, reuse=True, timeout=600)
    factor = statistics.median(alone[0]) / predict(path, reference, machine).step
    machine = replace(machine, tflops=machine.tflops / factor, hbm=machine.hbm / factor,
                      launch=machine.launch * factor)
    both = run_ranks(steps, 2, path, rest, rounds, reuse=True, timeout=600)
    assert all(prod(layout[:3]) == 2 for layout in rest)
    return [(layout, statistics.median(map(max, zip(*(each[i] for each in both)))), predict(path, layout, machine).step)
            for i, layout in enumerate(rest)]


def kendall_tau(pairs: list[tuple[float, float]]) -> float:
    """Agreeing less disagreeing orders of two, of all."""
    signs = [1 if (a - c) * (b - d) > 0 else -1 for i, (a, b) in enumerate(pairs) for c, d in pairs[:i]]
    return sum(signs) / len(signs)


def test_tau():
    assert kendall_tau([(1, 1), (2, 2), (3, 4)]) == 1 and kendall_tau([(1, 2), (2, 1)]) == -1


@pytest.mark.slow
@pytest.mark.skipif(os.getloadavg()[0] > 0.5, reason="times steps on two cores, and others compute here")
def test_predictions_beside_steps_on_cpu_ranks(tmp_path):
    found = []
    for name in MODELS:
        for layout, measured, predicted in compared(tmp_path, name, 20):
            print(f"{name} {layout}: {measured * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms")
            found.append((measured, predicted))
    assert kendall_tau(found) > 0.8
    assert all(abs(predicted / measured - 1) < 0.15 for measured, predicted in found)
