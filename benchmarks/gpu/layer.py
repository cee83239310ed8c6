"""Parts 8 and 11: one layer of Qwen3-MoE, its host time against its device time, and the launches that it makes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from bench_overlap import HEADS, make_stage
from expert_shapes import SIZES
from torch import Tensor

from gpu.kernels import device_of
from gpu.session import Output

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
REPEATS = 15
LEAD_CYCLES = 10**8  # the device waits for so long before it is timed, some 50 ms, so that the host is ahead
AGREEMENT = 0.9  # of the numbers of launches, the smaller over the larger

# Runs without a GPU, as the pretend device replaces torch.cuda: what it lists of a layer, by operator.
PRETEND = """
import collections, json, sys
sys.path.insert(0, sys.argv[1])
from layer_launches import layer_launches
found = collections.Counter()
for (name, _), count in layer_launches(False).items():
    found[name] += count
print(json.dumps(found))
"""


# ----------------------------------------------------------------------------------------------------------- host time


def host_time(output: Output) -> None:
    """Rows of forward and backward: what the host takes to launch them, and what the device takes to run them."""
    device, model = device_of(output), "tiny" if output.dry else "qwen3-30b-a3b"
    stage = make_stage(SIZES[model], HEADS[model], SIZES[model].experts, 1, device)
    dtype = next(stage.parameters()).dtype
    ahead, measured = 0, 0
    for tokens in (32,) if output.dry else (4096, 16384):
        x = torch.randn(1, tokens, SIZES[model].hidden, device=device, dtype=dtype, requires_grad=True)
        for direction, (host_ms, device_ms) in layer_times(stage, x, 1 if output.dry else REPEATS).items():
            output.row(model=model, tokens=tokens, direction=direction, host_ms=host_ms, device_ms=device_ms,
                       lead=device_ms / host_ms)
            measured += 1
            ahead += device_ms >= host_ms
        if not output.dry:  # on a CPU both are the same
            output.goal("the device takes longer than the host, so that the host keeps ahead", measured,
                        measured - ahead)


def layer_times(stage: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> dict[str, tuple[float, float]]:
    """Return by direction the median milliseconds of the host and of the device."""
    found: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for _ in range(2 + repeats):
        outputs: list[Tensor] = []
        found["forward"].append(both_times(lambda outputs=outputs: outputs.append(stage(x)), x.device))
        (y,) = outputs
        found["backward"].append(both_times(lambda y=y: y.backward(y.detach()), x.device))
    timed = {direction: times[2:] for direction, times in found.items()}  # the first ones compile
    return {direction: (statistics.median(host for host, _ in times), statistics.median(on for _, on in times))
            for direction, times in timed.items()}


def both_times(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the milliseconds that the host takes to launch the work, and that the device takes to run it."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        ms = 1000 * (time.perf_counter() - start)
        return ms, ms
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD_CYCLES)
    first.record()
    start = time.perf_counter()
    work()
    host_ms = 1000 * (time.perf_counter() - start)
    last.record()
    last.synchronize()
    return host_ms, first.elapsed_time(last)


# ------------------------------------------------------------------------------------------------------------ launches


def launches(output: Output) -> None:
    """Rows of operators, and of all: launches that the pretend device lists, and kernels that the profiler saw."""
    pretended = pretended_launches()
    seen = profiled_launches(device_of(output))
    for name in sorted({*pretended, *seen}):
        output.row(operator=name, pretended=pretended.get(name, 0), seen=seen.get(name, 0))
    listed, launched = sum(pretended.values()), sum(seen.values())
    agreement = min(listed, launched) / max(listed, launched)
    output.row(operator="all", pretended=listed, seen=launched, agreement=agreement)
    if not output.dry:  # on a CPU there are no launches to agree with
        output.goal("the pretend device lists as many launches as the profiler saw, within a tenth", 1,
                    int(agreement < AGREEMENT))


def pretended_launches() -> dict[str, float]:
    """Return the launches of a layer for a micro-batch by operator, from a process that sees no GPU."""
    command = [sys.executable, "-P", "-c", PRETEND, str(SUPPORT)]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the pretend device failed: {done.stderr}")
    return json.loads(done.stdout)


def profiled_launches(device: torch.device) -> dict[str, float]:
    """Return the kernels of a layer for a micro-batch by the operator that launched them: of two layers less of one."""
    sys.path.insert(0, str(SUPPORT))
    from layer_launches import MICRO_BATCHES, make_step

    one, two = (profiled_step(make_step(layers, False, None, device), device) for layers in (1, 2))
    return {name: (two[name] - one[name]) / MICRO_BATCHES for name in two if two[name] != one[name]}


def profiled_step(step: Callable[[], None], device: torch.device) -> Counter[str]:
    """Return what the third call launches, by operator. On a CPU every operator that calls no other is one launch."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()
    step()
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CPU:
            count = len(event.kernels) if on_cuda else int(not event.cpu_children)
            found[event.name.removeprefix("aten::")] += count
    return found
