"""Steps of small models on CPU ranks, timed, and what `dualpipe.plan` predicts for them on a machine that was measured.

What the machine can do is measured by operators alone, but for what a layout of one rank says, the same for both
models: by how much its computing is slower than its operators by themselves, by how much more it is so while the other
core computes as well (two cores share a memory, which GPUs do not), and, of a model that is all launches, how long the
host takes for one. Steps of all layouts take turns with these, as the machine's speed comes and goes.
"""

import os
import statistics
import time
from collections.abc import Callable
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
from dualpipe.train.config.fit import fit_world
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import Config
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import build_model, build_routers
from ranks import run_ranks
from routes import BalancedRoutes, random_like_stride
from run_files import MODEL, write_files

MODELS = {
    "wide": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32, "num_experts": 8,
             "num_key_value_heads": 4, "moe_intermediate_size": 256, "vocab_size": 1024},
    "deep": {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "head_dim": 32, "num_experts": 4,
             "num_key_value_heads": 6, "moe_intermediate_size": 384, "vocab_size": 512},
}
LENGTH, SHORT = 128, 4  # tokens of a sequence; of one that takes the host's time alone
ALONE = (1, 1, 1, "1f1b", 4, 4, "none")  # pp, dp, ep, schedule, micro-batches, sequences of one, recompute
LAYOUTS = (
    (2, 1, 1, "1f1b", 4, 4, "none"),
    (2, 1, 1, "dualpipev", 8, 4, "none"),
    (1, 2, 1, "1f1b", 4, 4, "layer"),
    (1, 1, 2, "1f1b", 4, 4, "none"),
    (2, 1, 1, "zbv", 8, 2, "none"),
    (1, 1, 2, "dualpipev", 8, 2, "layer"),
)
Layout = tuple[Any, ...]


def options(layout: Layout, length: int) -> list[str]:
    names = ("parallel.pp", "parallel.dp", "parallel.ep", "parallel.schedule", "train.num_chunks",
             "train.micro_batch_size", "memory.recompute")
    return [text for name, value in zip(names, layout) for text in (f"--{name}", str(value))] + [
        "--train.sequence_length", str(length)]


def predict(path: str, layout: Layout, machine: Machine, length: int = LENGTH) -> Prediction:
    config = load_config(path, options(layout, length))
    config = fit_world(config, config.parallel.world_size)
    return Prediction(config, read_config(config.model.config), machine)


def steps(rank: int, path: str, small: str, rounds: int) -> dict[Any, list[float]]:
    """Seconds of the steps of each layout, which take turns; those of one rank on one core ("alone"), on both at once
    ("both"), and of a model that is all launches ("launches")."""
    alone = _prepared(path, ALONE, LENGTH)
    runs: dict[Any, tuple[Callable[[], None], bool]] = {
        "alone": (alone, rank == 0), "both": (alone, True), "launches": (_prepared(small, ALONE, SHORT), rank == 0)}
    runs |= {layout: (_prepared(path, layout, LENGTH), True) for layout in LAYOUTS}
    found: dict[Any, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, (run, takes_part) in runs.items():
            dist.barrier()
            start = time.perf_counter()
            if takes_part:
                run()
            dist.barrier()
            if turn:  # the first one warms up
                found[name].append(time.perf_counter() - start)
    return found


def _prepared(path: str, layout: Layout, length: int) -> Callable[[], None]:
    config = load_config(path, options(layout, length))
    p, t = config.parallel, config.train
    device, alone = torch.device("cpu"), layout is ALONE
    mesh = None if alone else build_mesh(p.pp, max(1, p.dp), p.ep, device)
    place, world = Mesh.of(mesh), dist.new_subgroups(1)[0] if alone else dist.group.WORLD
    model = build_model(
        read_config(config.model.config), build(p.schedule, p.pp, t.num_chunks), place.rank("pp"),
        dtypes=torch.float32, device=device, mesh=mesh, settings=Config(memory=config.memory),
    )
    for layer in (layer for stage in model.stages for _, layer in stage.numbered()):
        layer.mlp.gate.choice = BalancedRoutes(random_like_stride(model.config.num_experts, 2, p.ep))
    optimizer = Optimizer(model.stages, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    pipe = Pipeline(model.stages, process_group=place.group("pp") or world, schedule=p.schedule)
    routers = build_routers(config, model.stages, group=world, device=device)
    tokens = torch.randint(model.config.vocab_size, (t.micro_batch_size * t.num_chunks, t.sequence_length))
    criterion = MicroBatchLoss(t.num_chunks) if model.has_last else None

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
    few, many = torch.zeros(256), torch.zeros(2**18)
    latency = median(lambda: dist.all_to_all_single(torch.empty_like(few), few))
    moved = median(lambda: dist.all_to_all_single(torch.empty_like(many), many)) - latency
    link = many.nbytes / 2 / max(moved, 1e-6)
    peak = max(gemm, grouped, forward, backward)
    return {
        "tflops": peak / 1e12, "gemm": gemm / peak, "grouped": grouped / peak, "attention": forward / peak,
        "attention_backward": backward / peak, "hbm": copy / 1e9, "nvlink": link / 1e9, "latency": latency * 1e6,
    }


def compared(folder: Path, name: str, rounds: int) -> dict[Layout, tuple[float, float]]:
    """For each layout, the median of its measured steps, and the predicted one."""
    for each in ("model", "small"):
        (folder / each).mkdir(parents=True)
    path, small = str(write_files(folder / "model", MODEL | MODELS[name])), str(write_files(folder / "small"))
    rates = run_ranks(machine_of, 2, MODEL | MODELS[name], timeout=300)
    ranks = run_ranks(steps, 2, path, small, rounds, timeout=600, fresh=True)
    seconds = {run: statistics.median(map(max, zip(*(each[run] for each in ranks)))) for run in ranks[0]}
    fields = {field: statistics.mean(each[field] for each in rates) for field in rates[0]}
    machine = Machine(**fields, launch=1, memory=8, multiprocessors=0, network=1, bandwidth=1, links=1, networks=1,
                      network_latency=1, imbalance=1, reserve=0, host_waits=True)
    launches = sum(one.launches for one in predict(small, ALONE, machine, SHORT).spent.values()) * ALONE[4]
    machine = replace(machine, launch=seconds["launches"] / launches * 1e6)
    plain = predict(path, ALONE, machine)
    slower = (seconds["alone"] - plain.parts["host"]) / (plain.step_seconds - plain.parts["host"])
    machine = replace(machine, tflops=machine.tflops / slower, hbm=machine.hbm / slower)
    beside = seconds["both"] / seconds["alone"]  # by how much a core is slower while the other computes
    print(f"{name}: a launch {machine.launch:.0f} us, {slower:.2f} times slower than its operators, {beside:.2f} more "
          "beside the other core")
    assert all(prod(layout[:3]) == 2 for layout in LAYOUTS)
    predicted = {layout: predict(path, layout, machine) for layout in LAYOUTS}
    return {layout: (seconds[layout], beside * (one.step_seconds - one.parts["bubble"]) + one.parts["bubble"])
            for layout, one in predicted.items()}


def kendall_tau(pairs: list[tuple[float, float]]) -> float:
    signs = [1 if (a - c) * (b - d) > 0 else -1 for i, (a, b) in enumerate(pairs) for c, d in pairs[:i]]
    return sum(signs) / len(signs)


def test_tau():
    assert kendall_tau([(1, 1), (2, 2), (3, 4)]) == 1 and kendall_tau([(1, 2), (2, 1)]) == -1


@pytest.mark.slow
@pytest.mark.idle
@pytest.mark.timeout(900)
def test_predictions_beside_steps_on_cpu_ranks(tmp_path):
    load = os.getloadavg()[0]
    if load > 0.5:
        pytest.skip(f"the load is {load}, as others compute here; run `make test-idle` again when it is below 0.5")
    found = []
    for name in MODELS:
        for layout, (measured, predicted) in compared(tmp_path / name, name, 6).items():
            print(f"{name} {layout}: {measured * 1e3:.0f} ms, predicted {predicted * 1e3:.0f} ms, "
                  f"{predicted / measured - 1:+.0%}")
            found.append((measured, predicted))
    assert kendall_tau(found) > 0.8
    assert all(abs(predicted / measured - 1) < 0.15 for measured, predicted in found)
