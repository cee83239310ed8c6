"""Benchmark finding destinations, sorting tokens by expert, dispatch and combine, next to PyTorch's operations.

For the shapes of three models, with balanced and with skewed choices of experts, in bfloat16. Each result is checked
before it is timed. `torch` is the time of PyTorch's operations (argsort, index_select, sum) over ours. `copy` is the
fraction of the copy bandwidth of the same run, counting every byte that must be read or written once.

    python benchmarks/bench_routing.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from expert_shapes import MODELS, ROUTINGS, SIZES, TOKENS, choices, every
from gpu_bench import Bench, Goal, Machine, Row, check_close, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.kernels.routing import find_destinations, find_destinations_reference

RANKS = 8  # that the experts are sharded over, for the destinations
TOLERANCE = 5e-3  # one rounding in ours, several in PyTorch's operations


def torch_sort(expert_idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = expert_idx.flatten()
    order = torch.argsort(chosen, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.searchsorted(chosen[order], torch.arange(experts, device=order.device), right=True)
    return order, inverse, ends.to(torch.int32)


def moves(
    x: Tensor, y: Tensor, weights: Tensor, tokens: SortedTokens, top_k: int
) -> Iterator[tuple[str, int, Callable[[], Any], Callable[[], Any]]]:
    """Yield (name, elements that must be read or written, ours, PyTorch's) of every move of rows."""
    gather, inverse = tokens.gather.long(), tokens.inverse.long()
    leaves = [t.detach().requires_grad_() for t in (y, weights)]

    def torch_combine(y: Tensor, weights: Tensor) -> Tensor:
        return (y.index_select(0, inverse).unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)

    def backward(function: Callable[..., Tensor]) -> Callable[[], Any]:
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, x, retain_graph=True)

    there = x.numel() + y.numel()
    yield "dispatch", there, lambda: dispatch_tokens(x, tokens, top_k), lambda: x.index_select(0, gather)
    yield "combine", there, lambda: combine_tokens(y, weights, tokens), lambda: torch_combine(y, weights)
    ours, theirs = backward(lambda y, w: combine_tokens(y, w, tokens)), backward(torch_combine)
    yield "combine backward", there + y.numel(), ours, theirs
    theirs = lambda: y.index_select(0, inverse).unflatten(0, weights.shape).sum(1)  # noqa: E731
    yield "dispatch backward", there, lambda: combine_tokens(y, None, tokens, top_k=top_k), theirs


def measure(machine: Machine, model: str, tokens: int, routing: str) -> Iterator[Row]:
    """Yield the rows of the destinations, of the sort, and of every move by its result."""
    sizes = SIZES[model]
    expert_idx = choices(tokens, sizes.experts, sizes.top_k, routing == "skewed", machine.device)
    yield measure_destinations(expert_idx, sizes.experts // RANKS)
    yield measure_sort(expert_idx, sizes.experts)
    x = torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16, device=machine.device)
    y = torch.randn(tokens * sizes.top_k, sizes.hidden, dtype=torch.bfloat16, device=machine.device)
    weights = torch.rand(tokens, sizes.top_k, dtype=torch.bfloat16, device=machine.device)
    where = sort_tokens(expert_idx, sizes.experts)
    for what, elements, ours, theirs in moves(x, y, weights, where, sizes.top_k):
        check(what, ours, theirs)
        ours_ms, torch_ms = time_ms(ours), time_ms(theirs)
        rate = 2 * elements / ours_ms / 1e6
        figures = {"us": 1000 * ours_ms, "GB/s": rate, "copy": rate / machine.copy_gb_per_s}
        yield {"what": what, **figures, "torch": torch_ms / ours_ms}


def measure_destinations(expert_idx: Tensor, experts_per_rank: int) -> Row:
    weights = torch.rand(expert_idx.shape, device=expert_idx.device)
    operands = (expert_idx, weights, RANKS, experts_per_rank)
    with poisoned():
        results = find_destinations(*operands)
    if not all(torch.equal(a, b) for a, b in zip(results, find_destinations_reference(*operands))):
        raise RuntimeError("find_destinations: not those of the reference; not timed")
    ours_ms, torch_ms = (time_ms(lambda f=f: f(*operands)) for f in (find_destinations, find_destinations_reference))
    return {"what": "destinations", "us": 1000 * ours_ms, "GB/s": None, "copy": None, "torch": torch_ms / ours_ms}


def measure_sort(expert_idx: Tensor, experts: int) -> Row:
    with poisoned():
        results = sort_tokens(expert_idx, experts)
    if not all(torch.equal(a.long(), b.long()) for a, b in zip(results, torch_sort(expert_idx, experts))):
        raise RuntimeError("sort_tokens: not the stable order; not timed")
    ours_ms, torch_ms = (time_ms(lambda f=f: f(expert_idx, experts)) for f in (sort_tokens, torch_sort))
    return {"what": "sort", "us": 1000 * ours_ms, "GB/s": None, "copy": None, "torch": torch_ms / ours_ms}


def check(what: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    with poisoned():
        results = ours()
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (results, theirs()))):
        check_close(what, a, b, TOLERANCE)


BENCH = Bench(
    doc=__doc__,
    name="routing",
    settings=every(model=MODELS, tokens=(512, *TOKENS), routing=ROUTINGS),
    quick={"tokens": 4096, "routing": "skewed"},
    measure=measure,
    goals=(
        Goal("combine and its backward, from 4096 tokens on, 85% of copy bandwidth", "copy", 0.85,
             lambda row: "combine" in row["what"] and row["tokens"] >= 4096),
        Goal("never slower than PyTorch's operations", "torch", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
