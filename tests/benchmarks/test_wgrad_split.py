"""The benchmark of the split runs and shows what it is for: far less work of the host than a walk over the graph.

Counted instead of timed, which other processes would disturb: kernels, runs of autograd's engine, and calls in Python.
"""

import sys

import torch
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "view" not in func.__name__ and func.overloadpacket.__name__ not in ("t", "detach", "unsqueeze")
        return func(*args, **(kwargs or {}))


class Engine:
    """Autograd's, with its runs counted."""

    def __init__(self, engine):
        self.engine, self.count = engine, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run_backward(self, *args, **kwargs):
        self.count += 1
        return self.engine.run_backward(*args, **kwargs)


def count_of(way, stage, monkeypatch):
    """(kernels, runs of the engine, calls in Python) of one split backward."""
    x, dy = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    way(stage, x, dy)()  # gradients accumulate from here on
    run = way(stage, x, dy)
    with Kernels() as kernels:
        run()
    engine = Engine(Variable._execution_engine)
    run, calls = way(stage, x, dy), [0]

    def called(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    with monkeypatch.context() as patched:
        patched.setattr(Variable, "_execution_engine", engine)
        sys.setprofile(called)
        try:
            run()
        finally:
            sys.setprofile(None)
    return kernels.count, engine.count, calls[0]


def test_splitting_costs_little_host_time(script, monkeypatch):
    benchmark = script("wgrad_split")
    assert set(benchmark.measure(*benchmark.SIZES["small"], repeats=3)) == {"plain", "ours", "torch"}  # and are equal
    stage = torch.nn.Sequential(*[benchmark.Block(16, 32) for _ in range(benchmark.LAYERS)])
    plain = count_of(benchmark.plain, stage, monkeypatch)
    torch_split = count_of(benchmark.torch_split, stage, monkeypatch)
    ours = count_of(benchmark.ours, benchmark.defer_weight_grads(stage), monkeypatch)
    assert ours[0] <= plain[0], "no kernel twice"
    assert ours[1] == plain[1] == 1 < torch_split[1]
    assert ours[2] - plain[2] < 60 * 2 * benchmark.LAYERS, "for each linear, from its backward to its gradients: 37"
    assert ours[2] < 0.25 * torch_split[2]
