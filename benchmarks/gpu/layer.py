"""Parts 8 and 11: one layer of Qwen3-MoE, its host time against its device time, and its kernel launches."""

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
LEAD_CYCLES = 10**8  # the device waits some 50 ms before it is timed, so that the host is ahead
AGREEMENT = 0.9  # the smaller number of launches over the larger

# Lists the launches of a layer by operator. Runs without a GPU, because the pretend device replaces torch.cuda.
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
    """Send rows of forward and backward: the host time to launch them, and the device time to run them."""
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
        if not output.dry:  # on a CPU the two times are the same
            output.goal("the device takes longer than the host, so that the host keeps ahead", measured,
                        measured - ahead)


def layer_times(stage: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> dict[str, tuple[float, float]]:
    """Return, by direction, the median milliseconds of the host and of the device."""
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
    """Return the host's milliseconds to launch the work, and the device's milliseconds to run it."""
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
    """Send rows per operator, and a total: launches listed by the pretend device, and kernels seen by the profiler."""
    pretended = pretended_launches()
    seen = profiled_launches(device_of(output))
    for name in sorted({*pretended, *seen}):
        output.row(operator=name, pretended=pretended.get(name, 0), seen=seen.get(name, 0))
    listed, launched = sum(pretended.values()), sum(seen.values())
    agreement = min(listed, launched) / max(listed, launched)
    output.row(operator="all", pretended=listed, seen=launched, agreement=agreement)
    if not output.dry:  # a CPU has no launches to compare with
        output.goal("the pretend device lists as many launches as the profiler saw, within a tenth", 1,
                    int(agreement < AGREEMENT))


def pretended_launches() -> dict[str, float]:
    """Return a layer's launches per micro-batch, by operator, from a process that sees no GPU."""
    command = [sys.executable, "-P", "-c", PRETEND, str(SUPPORT)]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the pretend device failed: {done.stderr}")
    return json.loads(done.stdout)


def profiled_launches(device: torch.device) -> dict[str, float]:
    """Return a layer's kernels per micro-batch, by launching operator: those of two layers less those of one."""
    sys.path.insert(0, str(SUPPORT))
    from layer_launches import MICRO_BATCHES, make_step

    one, two = (profiled_step(make_step(layers, False, None, device), device) for layers in (1, 2))
    return {name: (two[name] - one[name]) / MICRO_BATCHES for name in two if two[name] != one[name]}


def profiled_step(step: Callable[[], None], device: torch.device) -> Counter[str]:
    """Return the third call's launches by operator. On a CPU, every operator that calls no other is one launch."""
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
