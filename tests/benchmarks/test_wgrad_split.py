"""The benchmark of the split runs; kernels are counted, not timed, which other processes would disturb."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "view" not in func.__name__ and func.overloadpacket.__name__ not in ("t", "detach", "unsqueeze")
        return func(*args, **(kwargs or {}))


def kernels_of(way, stage):
    x, dy = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    way(stage, x, dy)()  # gradients accumulate from here on
    run = way(stage, x, dy)
    with Kernels() as kernels:
        run()
    return kernels.count


def test_splitting_runs_no_kernel_twice(script):
    benchmark = script("wgrad_split")
    stage = torch.nn.Sequential(*[benchmark.Block(16, 32) for _ in range(benchmark.LAYERS)])
    plain = kernels_of(benchmark.plain, stage)
    assert kernels_of(benchmark.ours, benchmark.defer_weight_grads(stage)) <= plain
