"""Pipelines whose ranks are threads of one process: on a GPU with separate streams and events, to show missing waits.

The same runs on CPU. At the end, waits are taken away, which the tests must see.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn import cross_entropy_loss, defer_weight_grads
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.parallel.all_to_all import AllToAll, CommStream, PendingRows
from thread_steps import Problem, Result, reference, run, same_bits, share_experts, step, worst
from threads import Delays, Transfer, run_threads

MICRO_BATCHES, ROWS, WIDTH = 5, 4, 8
LAYOUTS = [(1, 2), (2, 2), (1, 4), (4, 1)]  # pipeline ranks, expert-parallel ranks
EACH = 0.002  # seconds: longer than any kernel here


# -- stages that swap rows between the ranks


class Swap:
    """Exchange of rows: part g of a rank goes to rank g; the backward is the same exchange."""

    group = None

    def __init__(self, stream: CommStream) -> None:
        self._stream = stream

    def forward(self, inputs):
        (rows,) = inputs
        pending, each = PendingRows(self._stream), [len(rows) // self._stream.size] * self._stream.size
        return pending.send(rows, each, each)

    def backward(self, context, gradients):
        return self.forward(gradients)


class Swapping(nn.Module):
    """A stage (T, width) -> (T, width) of two layers; a swap sends rows to the ranks that activate them."""

    stream: CommStream | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(torch.tanh(up(x)))
        return x

    def segments(self) -> list:
        swap, found = Swap(self.stream), []
        for up, down in zip(self.up, self.down):
            found += [
                Compute(up, "x", "rows"),
                Communicate(swap, "rows", "rows"),
                Compute(torch.tanh, "rows", "rows"),
                Communicate(swap, "rows", "rows"),
                Compute(lambda x, rows, down=down: x + down(rows), ("x", "rows"), "x"),
            ]
        return found

    def connect(self, all_to_all: AllToAll) -> None:
        self.stream = CommStream(all_to_all)


def swapping(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [defer_weight_grads(Swapping()) for _ in range(count)]


# -- Qwen3-MoE

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,),
    intermediate_size=24, initializer_range=0.3,
)


def qwen(count: int) -> list[nn.Module]:
    stages = build_stages(CONFIG, count)
    for stage in stages:
        stage.double().init_weights(seed=0)
    return stages


# -- parity


def problem(is_qwen: bool, stages: int, replicas: int, per_node: int | None = None) -> Problem:
    """per_node: ranks of a pretended node, between which rows take two hops."""
    generator = torch.Generator().manual_seed(1)
    if is_qwen:
        rows = torch.randint(CONFIG.vocab_size, (replicas, ROWS * MICRO_BATCHES, 8), generator=generator)
        batches = [(each[:, :-1], each[:, 1:].contiguous()) for each in rows]
        connect = partial(share_experts, num_experts=CONFIG.num_experts, ranks_per_node=per_node)
        return Problem(qwen(stages), batches, MICRO_BATCHES, cross_entropy_loss, connect)
    batches = torch.randn(replicas, 2, ROWS * MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return Problem(swapping(stages), [tuple(both) for both in batches], MICRO_BATCHES, F.mse_loss, Swapping.connect)


def check(device: str, is_qwen: bool, pp: int, ep: int, overlap: bool, delays: Delays | None = None,
          recompute: Sequence[str] = ()) -> None:
    it = problem(is_qwen, 2 * pp, ep)
    assert worst(run(it, pp, ep, overlap, recompute, device=device, delays=delays), reference(it)) < 1e-10


def is_slow(is_qwen: bool, layout: tuple[int, int], overlap: bool) -> bool:
    """Return True for a slow case: all but one of Qwen3-MoE, and one layout of the small stages that swap rows."""
    return (layout, overlap) != ((2, 2), True) if is_qwen else layout == (1, 4)


CASES = [
    pytest.param(is_qwen, *layout, overlap, id=f"{'qwen' if is_qwen else 'swapping'}-{layout[0]}-{layout[1]}-{overlap}",
                 marks=pytest.mark.slow if is_slow(is_qwen, layout, overlap) else [])
    for is_qwen, layout, overlap in product((False, True), LAYOUTS, (True, False))
]


@pytest.mark.parametrize("is_qwen, pp, ep, overlap", CASES)
def test_parity(device, is_qwen, pp, ep, overlap):
    check(device, is_qwen, pp, ep, overlap)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [("layer",), ("attention", "experts")], ids=str)
def test_parity_with_recomputation(device, recompute):
    check(device, True, 2, 2, True, recompute=recompute)


STREAMS = ["links", "all_to_all", "beside", "compute"]
ALL_RANKS = [Delays(**{stream: EACH}) for stream in STREAMS]
ONE_RANK = [replace(delays, rank=rank) for delays, rank in product(ALL_RANKS, (0, 3))]


@cache
def in_time(device: str) -> list[Result]:
    """Return the results of four ranks without a late stream."""
    return run_threads(step, 4, problem(True, 4, 2), 2, 2, True, device=device)


@pytest.mark.slow
@pytest.mark.parametrize("delays", [*ALL_RANKS, *ONE_RANK], ids=str)
def test_a_late_stream_changes_no_bit(real_device, delays):
    """Skipped on the pretend device, which has no time: it finds a missing wait without a delay."""
    late = run_threads(step, 4, problem(True, 4, 2), 2, 2, True, device=real_device, delays=delays)
    assert all(map(same_bits, in_time(real_device), late))


TWO_HOPS = [
    (True, ("layer", "dispatch"), None),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (True, (), None), (False, (), None), (True, ("layer", "dispatch"), Delays(all_to_all=EACH, rank=2)))),
]


@pytest.mark.slow
@pytest.mark.parametrize("overlap, recompute, delays", TWO_HOPS, ids=str)
def test_two_hops_change_no_bit_of_a_step(real_device, overlap, recompute, delays):
    """The all-to-all of rank 2 alone is late: between the nodes, and within one."""
    one, two = (run(problem(True, 2, 4, per_node), 1, 4, overlap, recompute, device=real_device, delays=delays)
                for per_node in (None, 2))
    assert same_bits(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("delays", ALL_RANKS, ids=str)
@pytest.mark.parametrize("pp, ep", LAYOUTS)
def test_parity_beside_a_late_stream(pp, ep, delays):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check("cuda", True, pp, ep, True, delays)


@pytest.mark.gpu
@pytest.mark.parametrize("pp, ep", LAYOUTS)
def test_nothing_is_left_in_memory(pp, ep):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    it, left = problem(True, 2 * pp, ep), []
    for _ in range(2):  # the first time, libraries take memory that they keep
        run_threads(step, pp * ep, it, pp, ep, True, device="cuda")
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated())
    assert left[1] <= left[0]


# -- missing waits


@pytest.mark.parametrize("pp, ep", [(1, 2), (2, 2)])
def test_a_missing_wait_for_rows_shows(real_device, monkeypatch, pp, ep):
    monkeypatch.setattr(PendingRows, "receive", lambda rows: list(rows._received))
    it = problem(False, 2 * pp, ep)
    found = run(it, pp, ep, device=real_device, delays=Delays(all_to_all=EACH))
    assert worst(found, reference(it)) > 1e-10


def test_a_missing_wait_for_a_message_shows(real_device, monkeypatch):
    """Remove the waits for activations only: without headers nothing would arrive."""
    waits = Transfer.wait

    def wait(transfer: Transfer) -> bool:
        name = transfer._what.split(" from ")[0]
        return True if name.endswith(": F") else waits(transfer)

    it = problem(False, 4, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "wait", wait)
        found = run(it, 2, 1, device=real_device, delays=Delays(links=EACH))
    assert worst(found, reference(it)) > 1e-10
