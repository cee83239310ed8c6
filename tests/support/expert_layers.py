"""A layer of experts over ranks, with batches that reach all corners of a dispatch."""

import functools

import torch
from torch import nn

from dualpipe.nn import GroupedLinear, GroupedSwiGLU
from dualpipe.nn.init import seeded_normal_
from dualpipe.nn.segments import Communicate, Compute, run_segments
from dualpipe.parallel.experts.dispatcher import run_experts, shard_experts

E, H, WIDTH = 8, 16, 6  # experts, hidden, intermediate
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Experts(nn.Module):
    """An MLP of experts with seeded values, whatever part of them is on this rank."""

    def __init__(self, dtype, mesh=None):
        super().__init__()
        self.gate_up = GroupedSwiGLU(E, H, WIDTH, bias=True, dtype=dtype)
        self.down = GroupedLinear(E, WIDTH, H, dtype=dtype)
        if mesh is not None:
            shard_experts(self, mesh)
        if self.down.weight.device.type != "meta":
            for name, param in self.named_parameters():
                seeded_normal_(param, std=0.3, seed=0, name=name)

    def forward(self, x, tokens, weights):
        return self.down(self.gate_up(x, tokens, weights), tokens.offs)


# name: (tokens of each of four ranks, and of the next four, experts of a token, who may be chosen)
CASES = {
    "random": ((7, 7, 7, 7), 3, lambda rank: range(E)),
    "uneven": ((3, 9, 1, 6), 2, lambda rank: range(E)),
    "skewed": ((5, 5, 5, 5), 2, lambda rank: (0, 1, 2)),  # the last ranks' experts get nothing
    "one expert": ((4, 6, 4, 2), 1, lambda rank: (5,)),
    "crossed": ((4, 4, 4, 4), 2, lambda rank: (range(4, 8), range(4))[rank % 2]),
    "top 1": ((6, 5, 4, 3), 1, lambda rank: range(E)),
    "all experts": ((3, 4, 5, 2), E, lambda rank: range(E)),
    "a rank without tokens": ((0, 5, 0, 4), 3, lambda rank: range(E)),
    "no tokens": ((0, 0, 0, 0), 2, lambda rank: range(E)),
    "some unassigned": ((6, 6, 6, 6), 3, lambda rank: (*range(E), -1, -1, -1, -1)),
    "all unassigned": ((3, 2, 3, 2), 2, lambda rank: (-1, -1)),
}


def batch(case, rank, dtype):
    """Return the tokens, weights and choices of a rank, and a gradient for its results."""
    counts, top_k, allowed = CASES[case]
    generator = torch.Generator().manual_seed(rank)
    pool = torch.tensor(list(allowed(rank)))
    count = counts[rank % len(counts)]
    order = torch.rand(count, len(pool), generator=generator).argsort(-1)
    weights = torch.rand(count, top_k, generator=generator, dtype=torch.float64)
    x, dy = (torch.randn(count, H, generator=generator, dtype=torch.float64) for _ in range(2))
    return *(t.to(dtype) for t in (x, weights)), pool[order[:, :top_k]], dy.to(dtype)


def through_experts(dispatcher, experts, x, weights, choices):
    """Send (T, H) through the chosen experts of any rank, as a model's segments do it; returns (T, H)."""
    run = functools.partial(run_experts, experts)
    segments = [Compute(dispatcher.plan, ("x", "weights", "choices"), ("rows", "weights", "plan"))]
    if dispatcher.dispatch is None:
        segments.append(Compute(run, ("rows", "weights", "plan"), "rows"))
    else:
        segments += [
            Communicate(dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
            Compute(run, ("rows", "weights", "received"), "rows"),
            Communicate(dispatcher.combine, ("rows", "received"), "rows"),
        ]
    segments.append(Compute(dispatcher.finish, ("rows", "plan"), "x"))
    return run_segments(segments, {"x": x, "weights": weights, "choices": choices})["x"]


def ours(ep, experts, case, rank, dtype):
    x, weights, choices, dy = batch(case, rank, dtype)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = through_experts(ep.dispatcher(), experts, x, weights, choices)
    y.backward(dy)
    return [y.detach(), x.grad, weights.grad]


def advance(pending):
    """Run a communication to its end, as the engine does."""
    pending.advance()
    return pending.wait()
