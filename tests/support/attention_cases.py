"""Queries, keys, values and sinks for tests of attention, and how they are run."""

import itertools

import torch

from dualpipe.nn.attention import Context, Rotary

SCALE = 0.3
WINDOWS = [None, 1, 3, 64]
HEADS = [(4, 4, 16, 16), (4, 2, 16, 16), (3, 1, 24, 16)]  # A, G, D, V


def documents(batch, length):
    """Position ids of rows with one document, two, or several, some of a single token."""
    starts = [[0], [0, length // 3], [0, 1, 2, length // 2]]
    rows = torch.zeros(batch, length, dtype=torch.long)
    for row, cuts in zip(rows, itertools.cycle(starts)):
        for start in filter(length.__gt__, cuts):
            row[start:] = torch.arange(length - start)
    return rows


def make(length, heads, *, packed=False, dtype=torch.float64, device="cpu", batch=3):
    """q, k, v and sinks, which need gradients, and their context."""
    num_heads, groups, qk, v = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, num_heads, length, qk), (batch, groups, length, qk), (batch, groups, length, v), (num_heads,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    positions = documents(batch, length).to(device) if packed else None
    context = Context(Rotary(qk, 1e4), torch.empty(batch, length, 8, dtype=dtype, device=device), positions)
    return [tensor.requires_grad_() for tensor in drawn], context


def run(fn, operands):
    """The result and the gradients of all operands, for the same gradient of the result."""
    y = fn(*operands)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad(y, operands, dy)]


def by_us(fn, context, window, with_sinks):
    def run_ours(q, k, v, sinks_A):
        y = fn(q, k, v, context, scale=SCALE, window=window, sinks_A=sinks_A if with_sinks else None)
        return y + 0 * sinks_A.sum()

    return run_ours
