"""Benchmark attention by each of torch's backends, and FlexAttention on packed documents.

Causal attention in bfloat16 with the heads of each model, forward and backward, on one sequence of all tokens. `causal`
runs each of torch's backends by itself, and FlashAttention 3 and 4 where torch finds them. `documents` runs a packed
sequence of four documents as the library does: FlexAttention on a GPU. Each way is checked against float32 on a short
sequence before it is timed. `of dense` is the fraction of the dense GEMM rate of the same run. A way that cannot run
gets a row with the reason.

    python benchmarks/bench_attention.py [--model NAME ...] [--tokens N ...] [--quick] [--minutes M] [--save]

Dimension letters: A query heads, G key/value heads, S tokens, D and V dimensions of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from expert_shapes import every
from gpu_bench import Bench, Goal, Machine, Row, check_close, run_bench, time_ms
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualpipe.nn.attention import Context, Rotary, attend

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Heads(NamedTuple):
    """Head counts and head dimensions."""

    A: int
    G: int
    D: int
    V: int


MODELS = {
    "qwen3-30b-a3b": Heads(32, 4, 128, 128),
    "deepseek-v3": Heads(128, 128, 192, 128),
    "gpt-oss-20b": Heads(64, 8, 64, 64),
}
SIZES = MODELS | {"tiny": Heads(4, 2, 16, 16), "tiny clamped": Heads(3, 1, 24, 16)}
TOKENS = (4096, 8192)
DOCUMENTS = 4  # per packed sequence
CHECKED = 512  # tokens of the sequence that is checked
TOLERANCE = 2e-2  # for results and gradients in bfloat16
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def operands(heads: Heads, tokens: int, device: torch.device) -> list[Tensor]:
    """Return random q, k and v of one sequence, with `requires_grad`."""
    shapes = ((heads.A, heads.D), (heads.G, heads.D), (heads.G, heads.V))
    return [torch.randn(1, number, tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
            for number, width in shapes]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def packed(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    return attend(q, k, v, context, scale=q.shape[-1] ** -0.5)


def make_context(heads: Heads, tokens: int, device: torch.device) -> Context:
    """Return the `Context` of a packed sequence of `DOCUMENTS` documents."""
    positions = torch.arange(tokens, device=device) % max(1, tokens // DOCUMENTS)
    x = torch.empty(1, tokens, 1, device=device, dtype=torch.bfloat16)
    return Context(Rotary(heads.D, 1e4), x, positions.unsqueeze(0))


@contextmanager
def flash_release(name: str) -> Iterator[None]:
    """Make `scaled_dot_product_attention` use the FlashAttention release that torch registers as `name`."""
    attention.activate_flash_attention_impl(name)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        attention.restore_flash_attention_impl()


def ways(kind: str, heads: Heads, device: torch.device) -> dict[str, tuple[AbstractContextManager, Callable]]:
    """Return, by name, the context manager to run an attention in and a factory from a token count to the attention."""
    if kind == "documents":
        return {"library": (nullcontext(), lambda tokens: partial(packed, context=make_context(heads, tokens, device)))}
    found = {name: (sdpa_kernel(backend), lambda tokens: causal) for name, backend in BACKENDS.items()}
    releases = attention.list_flash_attention_impls() if device.type == "cuda" else ()
    return found | {name: (flash_release(name), lambda tokens: causal) for name in releases}


def run_both(way: Attention, leaves: list[Tensor], d_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the result and the gradients of q, k and v."""
    out = way(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if d_out is None else d_out)


def exact(leaves: list[Tensor], documents: Tensor | None, d_out: Tensor) -> tuple[Tensor, ...]:
    """Compute attention by its definition in float32; return the result and the gradients."""
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    tokens = leaves[0].shape[2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=d_out.device).tril()
    if documents is not None:
        seen &= documents[0, :, None] == documents[0, None, :]

    def defined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v

    return run_both(defined, wide, d_out.float())


def check(name: str, make: Callable[[int], Attention], heads: Heads, tokens: int, device: torch.device) -> None:
    leaves, way = operands(heads, tokens, device), make(tokens)
    d_out = torch.randn(1, heads.A, tokens, heads.V, device=device, dtype=torch.bfloat16)
    context = way.keywords["context"] if isinstance(way, partial) else None
    expected = exact(leaves, None if context is None else context.documents_BS, d_out)
    for what, found, wanted in zip(("result", "dq", "dk", "dv"), run_both(way, leaves, d_out), expected):
        check_close(f"{name}: {what}", found, wanted, TOLERANCE)


def measure(machine: Machine, model: str, tokens: int, kind: str) -> Iterator[Row]:
    """Yield the rows of every way: forward, and forward with backward."""
    heads, device = SIZES[model], machine.device
    for name, (within, make) in ways(kind, heads, device).items():
        try:
            with within:
                check(name, make, heads, min(tokens, CHECKED), device)
                leaves = operands(heads, tokens, device)
                yield from time_way(name, make(tokens), leaves, DOCUMENTS if kind == "documents" else 1, machine)
        except RuntimeError as error:
            if "relative error" in str(error):
                raise
            yield {"way": name, "direction": None, "ms": None, "TFLOP/s": None, "of dense": None,
                   "why not": str(error).partition("\n")[0]}


def time_way(name: str, way: Attention, leaves: list[Tensor], documents: int, machine: Machine) -> Iterator[Row]:
    """Time one way. FLOPs count only the visible keys of each query: half of each document's square."""
    q, _, v = leaves
    tokens = q.shape[2]
    forward_flops = 2 * q.shape[1] * (tokens * tokens // documents // 2) * (q.shape[-1] + v.shape[-1])
    runs: dict[str, tuple[Callable[[], Any], float]] = {
        "forward": (lambda: way(*(leaf.detach() for leaf in leaves)), 1.0),
        "forward and backward": (lambda: run_both(way, leaves), 3.5),  # two GEMMs forward, five backward
    }
    for direction, (run, times) in runs.items():
        ms = time_ms(run)
        tflops = times * forward_flops / ms / 1e9
        yield {"way": name, "direction": direction, "ms": ms, "TFLOP/s": tflops,
               "of dense": tflops / machine.dense_tflops, "why not": None}


BENCH = Bench(
    doc=__doc__,
    name="attention",
    settings=every(model=MODELS, tokens=TOKENS, kind=("causal", "documents")),
    quick={"tokens": 4096},
    measure=measure,
    goals=(
        Goal("documents, forward: a quarter of dense", "of dense", 0.25,
             lambda row: row["kind"] == "documents" and row["direction"] == "forward"),
    ),
)

if __name__ == "__main__":
    sys.exit(run_bench(BENCH))
