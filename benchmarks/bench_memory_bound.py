"""Benchmark the kernels that only move memory against the copy bandwidth and PyTorch's operations, in bfloat16.

For the shapes of three models and several numbers of tokens:

    norm             the norm of the hidden state, with the residual added before it
    rotary           the norms and RoPE of 32 query heads and 4 key heads of 128 dimensions
    top_k            the router's choice among a model's experts
    routing          destinations of the tokens, their sort by expert, dispatch and combine; skewed_routing: with skewed
                     choices of experts
    swiglu           the gated activation, with all tokens of a micro-batch on one rank; weighted_swiglu: with routing
                     weights
    cross_entropy    loss and gradient of logits for the vocabularies of four models, in place and not

Each result is checked before it is timed. `copy` is the fraction of the copy bandwidth of the same run, counting every
byte that must be read or written once. `eager` is the time of PyTorch's operations over ours, `compiled` the same under
torch.compile. `peak GB` is the memory above the logits over forward and backward, `eager's` that of PyTorch.

    python benchmarks/bench_memory_bound.py [--kernel NAME ...] [--model NAME ...] [--tokens N ...] [--quick]
                                            [--minutes M] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from expert_shapes import MODELS, SIZES, TOKENS, choices, every
from gpu_bench import Bench, Goal, Machine, Row, check_close, compiled, peak_gb, poisoned, run_bench, time_ms
from torch import Tensor

from dualpipe.kernels import (
    clamped_swiglu,
    combine_tokens,
    cross_entropy,
    dispatch_tokens,
    rms_norm,
    rms_norm_backward,
    rotate_heads,
    rotate_heads_backward,
    sort_tokens,
    swiglu,
)
from dualpipe.kernels.norm import rms_norm_reference
from dualpipe.kernels.rotary import rotate_reference
from dualpipe.kernels.routing import find_destinations, find_destinations_reference
from dualpipe.kernels.top_k import softmax_top_k, softmax_top_k_backward, softmax_top_k_reference

SWIGLU = import_module("dualpipe.kernels.swiglu")  # the function of that name hides the module
EPS = 1e-6
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
RANKS = 8  # that the experts are sharded over, for the destinations
ALPHA, LIMIT = 1.702, 7.0
VOCABULARIES = {"deepseek-v2-lite": 102_400, "qwen3-30b-a3b": 151_936, "gpt-oss-20b": 201_088, "gpt-2": 50_257}
LOGITS = VOCABULARIES | {"tiny": 100, "tiny clamped": 100}

Random = Callable[..., Tensor]
LossOf = Callable[[Tensor, Tensor], Tensor]


class Pass(NamedTuple):
    """One pass of a kernel, next to PyTorch's operations.

    eager: PyTorch's operations; None: they are not timed. reference: the expected results; None: those of `eager`.
    tolerance: of the relative error; 0: all results are equal. nbytes: read and written once; None: not counted.
    """

    name: str
    ours: Callable[[], Any]
    eager: Callable[[], Any] | None
    tolerance: float
    nbytes: int | None = None
    reference: Callable[[], Any] | None = None
    compiled: Callable[[], Any] | None = None


# ------------------------------------------------------------------------------------------- between the layer's GEMMs


class Between(NamedTuple):
    """A kernel between two GEMMs: plain: the forward as PyTorch operations; grads: of its first results."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    plain: Callable[..., Any]
    operands: list[Tensor]
    grads: list[Tensor]


def norm(model: str, tokens: int, random: Random) -> Between:
    width = SIZES[model].hidden
    x, residual, dy, d_sum = (random(tokens, width) for _ in range(4))
    weight = random(width)
    _, total, scale = rms_norm(x, weight, EPS, residual)
    return Between(
        lambda: rms_norm(x, weight, EPS, residual)[:2],
        lambda: rms_norm_backward(dy, d_sum, total, scale, weight)[:1],
        lambda x, weight, residual: rms_norm_reference(x, weight, EPS, residual)[:2],
        [x, weight, residual], [dy, d_sum],
    )


def rotary(model: str, tokens: int, random: Random) -> Between:
    q, dq = (random(1, tokens, HEADS, HEAD_DIM) for _ in range(2))
    k, dk = (random(1, tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
    weight = random(HEAD_DIM)
    angles = random(tokens, HEAD_DIM // 2).float().repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    rotated = rotate_heads(q, k, cos, sin, weight, weight, EPS)
    return Between(
        lambda: rotate_heads(q, k, cos, sin, weight, weight, EPS)[:2],
        lambda: rotate_heads_backward(dq, dk, q, k, cos, sin, weight, weight, *rotated[2:])[:2],
        lambda q, k, weight: [rotate_reference(x, cos, sin, weight, EPS, False)[0] for x in (q, k)],
        [q, k, weight], [dq, dk],
    )


def top_k(model: str, tokens: int, random: Random) -> Between:
    experts, chosen = SIZES[model].experts, SIZES[model].top_k
    logits = random(tokens, experts).argsort(-1).bfloat16() / 16  # no ties
    d_weights = random(tokens, chosen)
    _, indices, probs = softmax_top_k(logits, chosen, True)
    return Between(
        lambda: softmax_top_k(logits, chosen, True)[:1],
        lambda: [softmax_top_k_backward(d_weights, None, indices, probs, True)],
        lambda logits: softmax_top_k_reference(logits, chosen, True, 1.0)[:1],
        [logits], [d_weights],
    )


def between_passes(
    make: Callable[[str, int, Random], Between], model: str, tokens: int, random: Random
) -> Iterator[Pass]:
    """Yield forward and backward. PyTorch rounds after each operation, which the tolerance allows."""
    kernel = make(model, tokens, random)
    leaves = [operand.detach().requires_grad_() for operand in kernel.operands]
    results = list(kernel.plain(*leaves))
    forward_bytes = num_bytes(*kernel.operands, *kernel.forward())
    yield Pass("forward", kernel.forward, lambda: kernel.plain(*leaves), 1e-2, forward_bytes)
    input_grads = list(kernel.backward())
    backward_bytes = num_bytes(*kernel.operands[: len(input_grads)], *kernel.grads, *input_grads)
    yield Pass("backward", kernel.backward,
               lambda: torch.autograd.grad(results, leaves, kernel.grads, retain_graph=True), 1e-2, backward_bytes)


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# ------------------------------------------------------------------------------------------------------------- routing


def torch_sort(expert_idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = expert_idx.flatten()
    order = torch.argsort(chosen, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.searchsorted(chosen[order], torch.arange(experts, device=order.device), right=True)
    return order, inverse, ends.to(torch.int32)


def routing_passes(skewed: bool, model: str, tokens: int, random: Random) -> Iterator[Pass]:
    """Yield the destinations, the sort, and every move of rows by its result."""
    sizes = SIZES[model]
    x = random(tokens, sizes.hidden)
    expert_idx = choices(tokens, sizes.experts, sizes.top_k, skewed, x.device)
    route = (expert_idx, torch.rand(expert_idx.shape, device=x.device), RANKS, sizes.experts // RANKS)
    yield Pass("destinations", lambda: find_destinations(*route), lambda: find_destinations_reference(*route), 0.0)
    yield Pass("sort", lambda: sort_tokens(expert_idx, sizes.experts),
               lambda: torch_sort(expert_idx, sizes.experts), 0.0)

    rows = sort_tokens(expert_idx, sizes.experts)
    gather, inverse = rows.gather.long(), rows.inverse.long()
    y = random(tokens * sizes.top_k, sizes.hidden)
    weights = torch.rand(tokens, sizes.top_k, dtype=torch.bfloat16, device=x.device)
    leaves = [operand.detach().requires_grad_() for operand in (y, weights)]

    def combine(y: Tensor, weights: Tensor) -> Tensor:
        return combine_tokens(y, weights, rows)

    def torch_combine(y: Tensor, weights: Tensor) -> Tensor:
        return (y.index_select(0, inverse).unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)

    def backward(function: Callable[..., Tensor]) -> Callable[[], Any]:
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, x, retain_graph=True)

    tolerance = 5e-3  # one rounding in ours, several in PyTorch's operations
    moved = num_bytes(x, y)
    yield Pass("dispatch", lambda: dispatch_tokens(x, rows, sizes.top_k), lambda: x.index_select(0, gather), tolerance,
               moved)
    yield Pass("combine", lambda: combine(y, weights), lambda: torch_combine(y, weights), tolerance, moved)
    yield Pass("combine backward", backward(combine), backward(torch_combine), tolerance, moved + y.nbytes)
    yield Pass("dispatch backward", lambda: combine_tokens(y, None, rows, top_k=sizes.top_k),
               lambda: y.index_select(0, inverse).unflatten(0, weights.shape).sum(1), tolerance, moved)


# ---------------------------------------------------------------------------------------------------------- activation


def eager_swiglu(gate_up: Tensor, weight: Tensor | None, clamped: bool) -> Tensor:
    if clamped:
        gate, up = gate_up[:, ::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
        h = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    else:
        gate, up = gate_up.chunk(2, dim=1)
        h = F.silu(gate) * up
    return h if weight is None else h * weight[:, None]


def swiglu_passes(weighted: bool, model: str, tokens: int, random: Random) -> Iterator[Pass]:
    clamped, width, rows = SIZES[model].clamped, SIZES[model].intermediate, tokens * SIZES[model].top_k
    gate_up, dh = 3 * random(rows, 2 * width), random(rows, width)
    operands = [gate_up]
    if weighted:
        operands.append(torch.rand(rows, dtype=torch.bfloat16, device=dh.device))

    def plain(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
        return eager_swiglu(gate_up, weight, clamped)

    def backward(function: Callable[..., Tensor]) -> Callable[[], Any]:
        leaves = [operand.detach().requires_grad_() for operand in operands]
        h = function(*leaves)
        return lambda: torch.autograd.grad(h, leaves, dh, retain_graph=True)

    ours, fast = clamped_swiglu if clamped else swiglu, compiled(plain)
    exact = (gate_up.float(), operands[1] if weighted else None, clamped, ALPHA if clamped else 1.0, LIMIT)
    tolerance = 5e-3  # ours rounds the result once
    yield Pass("forward", lambda: ours(*operands), lambda: plain(*operands), tolerance, num_bytes(gate_up, dh),
               lambda: SWIGLU.swiglu_reference(*exact), lambda: fast(*operands))
    yield Pass("backward", backward(ours), backward(plain), tolerance, num_bytes(gate_up, gate_up, dh),
               lambda: SWIGLU.swiglu_backward_reference(dh.float(), *exact), backward(fast))


# ------------------------------------------------------------------------------------------------------- cross-entropy


def eager_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def loss_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, in_place=True)


def loss_backward(loss_of: LossOf, logits: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = loss_of(leaf, labels)
    return lambda: torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def loss_step(loss_of: LossOf, logits: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward and returns the gradient."""
    leaf = logits.detach().requires_grad_()
    return lambda: torch.autograd.grad(loss_of(leaf, labels), leaf)[0]


def make_logits(model: str, tokens: int, random: Random) -> tuple[Tensor, Tensor]:
    logits = 3 * random(tokens, LOGITS[model])
    return logits, torch.randint(LOGITS[model], (tokens,), device=logits.device)


def loss_passes(model: str, tokens: int, random: Random) -> Iterator[Pass]:
    """Yield the passes. The last one overwrites the logits every time, which does not change its time."""
    logits, labels = make_logits(model, tokens, random)
    fast = compiled(eager_loss)
    yield Pass("forward", lambda: cross_entropy(logits, labels), lambda: eager_loss(logits, labels), 1e-5,
               logits.nbytes, compiled=lambda: fast(logits, labels))
    ours, eager, fastest = (loss_backward(loss_of, logits, labels) for loss_of in (cross_entropy, eager_loss, fast))
    yield Pass("backward", ours, eager, 4e-3, 2 * logits.nbytes, compiled=fastest)
    yield Pass("both, in place", loss_step(loss_in_place, logits, labels), None, 4e-3, 3 * logits.nbytes,
               loss_step(eager_loss, logits, labels))


def loss_memory(model: str, tokens: int, random: Random) -> Row:
    logits, labels = make_logits(model, tokens, random)
    ours, eager = (peak_gb(loss_step(way, logits, labels), logits.device) for way in (cross_entropy, eager_loss))
    return {"peak GB": ours, "eager's": eager}


# ----------------------------------------------------------------------------------------------------------- measuring

KERNELS: dict[str, Callable[[str, int, Random], Iterator[Pass]]] = {
    "norm": partial(between_passes, norm),
    "rotary": partial(between_passes, rotary),
    "top_k": partial(between_passes, top_k),
    "routing": partial(routing_passes, False),
    "skewed_routing": partial(routing_passes, True),
    "swiglu": partial(swiglu_passes, False),
    "weighted_swiglu": partial(swiglu_passes, True),
    "cross_entropy": loss_passes,
}


def measure(machine: Machine, model: str, tokens: int, kernel: str) -> Iterator[Row]:
    """Yield a row for each pass of a kernel."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=machine.device)

    memory = loss_memory(model, tokens, random) if kernel == "cross_entropy" else {}
    for kernel_pass in KERNELS[kernel](model, tokens, random):
        check(kernel_pass)
        yield measure_pass(kernel_pass, machine) | memory


def check(kernel_pass: Pass) -> None:
    expected = (kernel_pass.reference or kernel_pass.eager)()
    with poisoned():
        results = kernel_pass.ours()
    for actual, wanted in zip(*([r] if isinstance(r, Tensor) else r for r in (results, expected))):
        check_close(kernel_pass.name, actual, wanted.detach(), kernel_pass.tolerance)


def measure_pass(kernel_pass: Pass, machine: Machine) -> Row:
    ours_ms = time_ms(kernel_pass.ours)
    row: Row = {"pass": kernel_pass.name, "us": 1000 * ours_ms, "GB/s": None, "copy": None}
    if kernel_pass.nbytes is not None:
        row["GB/s"] = kernel_pass.nbytes / ours_ms / 1e6
        row["copy"] = row["GB/s"] / machine.copy_gb_per_s
    row["eager"] = None if kernel_pass.eager is None else time_ms(kernel_pass.eager) / ours_ms
    row["compiled"] = None if kernel_pass.compiled is None else time_ms(kernel_pass.compiled) / ours_ms
    return row


def reaches_copy(row: Row) -> bool:
    """Return True for the passes that are to reach 85% of the copy bandwidth."""
    if row["kernel"] == "cross_entropy":
        return True
    is_bound = "swiglu" in row["kernel"] or "combine" in row["pass"]
    return is_bound and row["tokens"] >= 4096


BENCH = Bench(
    doc=__doc__,
    name="memory_bound",
    settings=[
        *every(model=MODELS, tokens=TOKENS, kernel=("norm", "rotary", "top_k")),
        *every(model=MODELS, tokens=(512, *TOKENS), kernel=("routing", "skewed_routing", "swiglu", "weighted_swiglu")),
        *every(model=VOCABULARIES, tokens=(1024, 4096, 16384), kernel=("cross_entropy",)),
    ],
    quick={"tokens": 4096, "model": "qwen3-30b-a3b"},
    measure=measure,
    goals=(
        Goal("combine, its backward and swiglu from 4096 tokens on, and cross-entropy, 85% of copy bandwidth", "copy",
             0.85, reaches_copy),
        Goal("norm and rotary from 16384 tokens on, 70% of copy bandwidth", "copy", 0.7,
             lambda row: row["tokens"] >= 16384 and row["kernel"] in ("norm", "rotary")),
        Goal("never slower than PyTorch's operations", "eager", 1.0),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
