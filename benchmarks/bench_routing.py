"""What do sorting tokens by expert, dispatching and combining them cost, next to PyTorch's operations?

For the shapes of three models, with balanced and with skewed choices of experts, in bfloat16. Each result is checked
before it is timed. `torch` is how many times longer the same takes as PyTorch operations (argsort, index_select, sum);
`copy` the fraction of a copy's bytes a second in the same run, counting what must be read and written once.

    python benchmarks/bench_routing.py [--tokens N ...] [--save]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_bench import check_close, run_bandwidth_bench, time_ms
from torch import Tensor

from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens

MODELS = {"deepseek-v2-lite": (2048, 64, 6), "qwen3-30b-a3b": (2048, 128, 8), "gpt-oss-20b": (2880, 32, 4)}  # H, E, K
TOLERANCE = 5e-3  # one rounding here, several in PyTorch's operations


def choices(tokens: int, experts: int, top_k: int, skewed: bool, device: torch.device) -> Tensor:
    """(T, K) different experts for each token; skewed: the first ones far more often."""
    scores = torch.rand(tokens, experts, device=device)
    if skewed:
        scores += 2.0 / torch.arange(1, experts + 1, device=device)
    return scores.topk(top_k).indices


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
    """(name, elements that must be read or written, ours, PyTorch's)."""
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
    plain = lambda: y.index_select(0, inverse).unflatten(0, weights.shape).sum(1)  # noqa: E731
    yield "dispatch backward", there, lambda: combine_tokens(y, None, tokens, top_k=top_k), plain


def measure(model: str, count: int, skewed: bool, copy_rate: float, device: torch.device) -> Iterator[dict[str, Any]]:
    hidden, experts, top_k = MODELS[model]
    expert_idx = choices(count, experts, top_k, skewed, device)
    tokens = sort_tokens(expert_idx, experts)
    if not all(torch.equal(a.long(), b.long()) for a, b in zip(tokens, torch_sort(expert_idx, experts))):
        raise RuntimeError("sort_tokens: not the stable order; not timed")
    common = {"model": model, "tokens": count, "skewed": skewed}
    ours_ms, torch_ms = (time_ms(lambda f=f: f(expert_idx, experts)) for f in (sort_tokens, torch_sort))
    yield {**common, "what": "sort", "us": 1000 * ours_ms, "GB/s": None, "copy": None, "torch": torch_ms / ours_ms}
    x, y = (torch.randn(rows, hidden, dtype=torch.bfloat16, device=device) for rows in (count, count * top_k))
    weights = torch.rand(count, top_k, dtype=torch.bfloat16, device=device)
    for what, elements, ours, theirs in moves(x, y, weights, tokens, top_k):
        results, expected = ours(), theirs()
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (results, expected))):
            check_close(what, a, b, TOLERANCE)
        ours_ms, torch_ms = time_ms(ours), time_ms(theirs)
        rate = 2 * elements / ours_ms / 1e6
        figures = {"us": 1000 * ours_ms, "GB/s": rate, "copy": rate / copy_rate, "torch": torch_ms / ours_ms}
        yield {**common, "what": what, **figures}


def measure_all(tokens: int, copy_rate: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every case at a number of tokens."""
    for model in MODELS:
        for skewed in (False, True):
            yield from measure(model, tokens, skewed, copy_rate, device)


if __name__ == "__main__":
    run_bandwidth_bench(__doc__, "routing", [512, 4096, 16384, 65536], measure_all)
