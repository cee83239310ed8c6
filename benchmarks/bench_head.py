"""Benchmark a head with its loss in parts next to the plain form: time, and the most memory that torch has allocated.

One forward and backward, with a float32 accumulator of the weight. All forms take turns in every round, on one thread.
The least CPU time counts, because other load can only add time.

    plain        logits of all rows, their loss, and its backward
    parts        `dualpipe.nn.HeadRows`: a part of the rows at a time, all gradients in the forward
    recomputed   the same, but with the weight gradient from logits that are computed again, as a "W" would
    torch        `torch.nn.functional.linear_cross_entropy` in chunks, of torch 2.13 and later
    ratio        time of `parts` over that of `plain`; of the others the same
    MB           the most that torch has allocated at once beyond what it had before
    error        of torch's loss, relative to the plain form's; the other forms must equal it

    python benchmarks/bench_head.py [--tokens 2048] [--vocab 16384] [--hidden 256 1024] [--part-mb 32] [--save]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from gpu_bench import add_save, save
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dualpipe.nn import Linear, cross_entropy_loss
from dualpipe.nn.head import HeadRows, LinearHead, rows_per_part

GOAL = 1.05


def forms(
    tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype, part_bytes: int
) -> tuple[Linear, Tensor, dict[str, Callable[[], Tensor]]]:
    """Return the head, its rows, and one function by form, which returns the loss after its backward."""
    torch.manual_seed(0)
    layer = Linear(hidden, vocabulary, bias=False, dtype=dtype)
    layer.weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    layer.weight.grad = torch.zeros(vocabulary, hidden)
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    head = LinearHead(layer)

    def loss_of(logits: Tensor | HeadRows) -> Tensor:
        loss = cross_entropy_loss(logits, labels)
        loss.backward()
        return loss.detach()

    def recomputed() -> Tensor:
        loss = loss_of(HeadRows(x, head, part_bytes))
        for part in x.detach().split(rows_per_part(vocabulary, dtype, part_bytes)):
            part.mm(layer.weight.detach().t())
        return loss

    def of_torch() -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        loss = torch.nn.functional.linear_cross_entropy(x, layer.weight, labels, options=options)
        loss.backward()
        return loss.detach()

    by_form = {"plain": lambda: loss_of(layer(x)), "parts": lambda: loss_of(HeadRows(x, head, part_bytes)),
               "recomputed": recomputed}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        by_form["torch"] = of_torch
    return layer, x, by_form


def peak_bytes(function: Callable[[], Tensor]) -> int:
    """Return the most that torch has allocated at once during a call, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measure(args: argparse.Namespace, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Check the forms against each other, and return their times and peaks."""
    part_bytes = round(args.part_mb * 1e6)
    layer, x, functions = forms(args.tokens, args.vocab, hidden, dtype, part_bytes)
    grad = layer.weight.grad
    assert grad is not None, "made by `forms`"
    results = []
    row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "hidden": hidden}
    for form in functions:
        grad.zero_()
        x.grad = None
        row[f"{form}: MB"] = peak_bytes(functions[form]) / 1e6
        assert x.grad is not None, "set by the backward"
        results.append((functions[form]().float(), x.grad.float(), grad.clone()))
        if form == "torch":
            row["torch: error"] = (results[-1][0] / results[0][0] - 1).abs().item()
            continue
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(results[-1], results[0], rtol=tolerance, atol=tolerance)
    seconds = dict.fromkeys(functions, float("inf"))
    for _ in range(args.rounds):
        for form in functions:
            start = time.process_time()
            functions[form]()
            seconds[form] = min(seconds[form], time.process_time() - start)
    row |= {f"{form}: ms": seconds[form] * 1e3 for form in functions}
    return row | {form: seconds[form] / seconds["plain"] for form in functions}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--part-mb", type=float, default=32.0, help="limit of a part's logits in float32 (default: 32)")
    parser.add_argument("--rounds", type=int, default=5)
    add_save(parser, "bench_head")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("dtype     hidden   plain ms   parts ms  ratio  recomputed  torch   plain MB   parts MB   torch MB     error")
    for dtype in args.dtype:
        for hidden in args.hidden:
            row = measure(args, hidden, getattr(torch, dtype))
            rows.append(row)
            print(f"{dtype:8} {hidden:7} {row['plain: ms']:10.0f} {row['parts: ms']:10.0f} {row['parts']:6.2f} "
                  f"{row['recomputed']:11.2f} {row.get('torch', 0):6.2f} {row['plain: MB']:10.0f} "
                  f"{row['parts: MB']:10.0f} {row.get('torch: MB', 0):10.0f} {row.get('torch: error', 0):9.1e}",
                  flush=True)
    if args.save:
        save("bench_head", rows, args.save, load=os.getloadavg()[0], tokens=args.tokens, vocabulary=args.vocab,
             part_mb=args.part_mb, rounds=args.rounds)
    slowest = max(row["parts"] for row in rows)
    is_met = slowest <= GOAL
    print(f"goal: parts take at most {GOAL} of the plain form: {slowest:.2f}, {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
