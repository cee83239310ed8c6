"""Pipelines whose ranks are threads of one process: on a GPU with separate streams and events, to show missing waits.

The same runs on CPU. The support code of the threads, `threads.py`, is tested at the end.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, Linear, cross_entropy_loss, defer_weight_grads
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.parallel.all_to_all import AllToAll, CommStream, PendingRows
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from threads import Delays, Rank, Transfer, run_threads
from toys import relative_error, stages_of_rank

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


def share_experts(stage: nn.Module, all_to_all: AllToAll, per_node: int | None = None) -> None:
    """Keep only the experts of this rank. per_node: ranks of a pretended node, between which rows take two hops."""
    for layer in stage.modules():
        if isinstance(layer, GroupedLinear):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(all_to_all.size)[all_to_all.rank].clone())
    stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, all_to_all, ranks_per_node=per_node))


# -- parity


class Problem(NamedTuple):
    """A training case: stages, the rank's part of the batch and of a stage, and the criterion."""

    stages: list[nn.Module]
    batches: list[tuple[Tensor, Tensor]]  # by expert-parallel rank
    is_qwen: bool
    per_node: int | None = None  # see `share_experts`

    def connect(self, stage: nn.Module, all_to_all: AllToAll) -> None:
        share_experts(stage, all_to_all, self.per_node) if self.is_qwen else stage.connect(all_to_all)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return (cross_entropy_loss if self.is_qwen else F.mse_loss)(output, target)


def problem(is_qwen: bool, stages: int, replicas: int) -> Problem:
    generator = torch.Generator().manual_seed(1)
    if is_qwen:
        rows = torch.randint(CONFIG.vocab_size, (replicas, ROWS * MICRO_BATCHES, 8), generator=generator)
        return Problem(qwen(stages), [(each[:, :-1], each[:, 1:].contiguous()) for each in rows], True)
    batches = torch.randn(replicas, 2, ROWS * MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return Problem(swapping(stages), [tuple(both) for both in batches], False)


class Result(NamedTuple):
    loss: Tensor | None
    gradients: dict[str, Tensor]  # by stage and name


def step(rank: Rank, it: Problem, pp: int, ep: int, overlap: bool, recompute: Sequence[str] = ()) -> Result:
    """Run one step as rank (pipeline rank) * ep + (expert-parallel rank)."""
    mine, replica = divmod(rank.number, ep)
    numbers = stages_of_rank("dualpipev", pp, mine)
    all_to_all = rank.all_to_all(f"ep of {mine}", [mine * ep + e for e in range(ep)])
    stages = [copy.deepcopy(it.stages[number]).to(rank.device) for number in numbers]
    for stage in stages:
        stage.recompute = Recompute(recompute)
        it.connect(stage, all_to_all)
        rank.slow_down(stage, (nn.Linear, Linear, GroupedLinear))
    group = rank.group(f"pp of {replica}", [p * ep + replica for p in range(pp)])
    pipe = Pipeline(stages, process_group=group, schedule="dualpipev", overlap=overlap)
    x, y = (t.to(rank.device) for t in it.batches[replica])
    for _ in range(2):  # the second time, memory of the first is used again
        pipe.zero_grad()
        loss, _ = pipe.step(x, num_chunks=MICRO_BATCHES, criterion=it.criterion, labels=(y,))
    found = {f"{n}.{name}": p.grad for n, stage in zip(numbers, stages) for name, p in stage.named_parameters()}
    return Result(None if loss is None else loss.cpu(), {name: grad.cpu() for name, grad in found.items()})


def reference(it: Problem) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses by expert-parallel rank, and the gradients summed over all their data."""
    losses, stages = [], copy.deepcopy(it.stages)
    for x, y in it.batches:
        found = []
        for xs, ys in zip(x.tensor_split(MICRO_BATCHES), y.tensor_split(MICRO_BATCHES)):
            for stage in stages:
                xs = stage(xs)
            found.append(it.criterion(xs, ys))
            found[-1].backward()
        losses.append(torch.stack(found).detach())
    return losses, {f"{n}.{name}": p.grad for n, stage in enumerate(stages) for name, p in stage.named_parameters()}


def gathered(results: Sequence[Result], ep: int) -> dict[str, Tensor]:
    """Join the gradients of experts; sum all others over the expert-parallel ranks."""
    whole = {}
    for first in range(0, len(results), ep):
        for name in results[first].gradients:
            parts = [result.gradients[name] for result in results[first : first + ep]]
            whole[name] = torch.cat(parts) if ".experts." in name else torch.stack(parts).sum(0)
    return whole


def check(device: str, is_qwen: bool, pp: int, ep: int, overlap: bool, delays: Delays | None = None,
          recompute: Sequence[str] = ()) -> None:
    it = problem(is_qwen, 2 * pp, ep)
    results = run_threads(step, pp * ep, it, pp, ep, overlap, recompute, device=device, delays=delays)
    losses, gradients = reference(it)
    found = gathered(results, ep)
    assert found.keys() == gradients.keys()
    worst = max(gradients, key=lambda name: relative_error(found[name], gradients[name]))
    assert relative_error(found[worst], gradients[worst]) < 1e-10, worst
    for number, result in enumerate(results):
        if number < ep:  # the first pipeline rank has the last stage of a V
            assert relative_error(result.loss, losses[number]) < 1e-10
        else:
            assert result.loss is None


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
    for one, other in zip(in_time(real_device), late):
        assert (one.loss is None and other.loss is None) or one.loss.equal(other.loss)
        assert all(other.gradients[name].equal(gradient) for name, gradient in one.gradients.items())


TWO_HOPS = [
    (True, ("layer", "dispatch"), None),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (True, (), None), (False, (), None), (True, ("layer", "dispatch"), Delays(all_to_all=EACH, rank=2)))),
]


@pytest.mark.slow
@pytest.mark.parametrize("overlap, recompute, delays", TWO_HOPS, ids=str)
def test_two_hops_change_no_bit_of_a_step(real_device, overlap, recompute, delays):
    """The all-to-all of rank 2 alone is late: between the nodes, and within one."""
    it = problem(True, 2, 4)
    one, two = (run_threads(step, 4, it._replace(per_node=per_node), 1, 4, overlap, recompute, device=real_device,
                            delays=delays) for per_node in (None, 2))
    for by_one, by_two in zip(one, two):
        assert by_one.loss.equal(by_two.loss)
        assert all(by_two.gradients[name].equal(gradient) for name, gradient in by_one.gradients.items())


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


# -- the threads themselves


@pytest.mark.parametrize("pp, ep", [(1, 2), (2, 2)])
def test_a_missing_wait_for_rows_shows(real_device, monkeypatch, pp, ep):
    monkeypatch.setattr(PendingRows, "receive", lambda rows: list(rows._received))
    it = problem(False, 2 * pp, ep)
    results = run_threads(step, pp * ep, it, pp, ep, True, device=real_device, delays=Delays(all_to_all=EACH))
    _, gradients = reference(it)
    found = gathered(results, ep)
    assert any(not relative_error(found[name], gradients[name]) < 1e-10 for name in gradients)


def test_a_missing_wait_for_a_message_shows(real_device, monkeypatch):
    """Remove the waits for activations only: without headers nothing would arrive."""
    waits = Transfer.wait

    def wait(transfer: Transfer) -> bool:
        name = transfer._what.split(" from ")[0]
        return True if name.endswith(": F") else waits(transfer)

    it = problem(False, 4, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "wait", wait)
        results = run_threads(step, 2, it, 2, 1, True, device=real_device, delays=Delays(links=EACH))
    assert not relative_error(results[0].loss, reference(it)[0][0]) < 1e-10


def failing(rank: Rank, where: str) -> None:
    group = rank.group("pp", range(rank.world.size))
    stages = [defer_weight_grads(Swapping()) for _ in range(2)]
    for stage in stages:
        stage.connect(rank.all_to_all("one", [rank.number]))
    if rank.number == 1 and where == "construction":
        raise KeyError("out of luck")
    pipe = Pipeline(stages, process_group=group, schedule="dualpipev")
    if rank.number == 1:
        stages[0].up[0].forward = None
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,))


@pytest.mark.parametrize("where, message", [("construction", "out of luck"), ("step", "not callable")])
def test_an_error_in_one_thread_ends_the_others(where, message):
    start = time.monotonic()
    with pytest.raises(Exception, match=message):
        run_threads(failing, 3, where, timeout=60)
    assert time.monotonic() - start < 30


def only_sends(rank: Rank) -> None:
    if rank.number == 0:
        rank.group("pp", (0, 1))
        rank.all_to_all("ep", (0, 1)).start(torch.empty(2, 1), torch.ones(2, 1), [1, 1], [1, 1]).wait()


def test_a_rank_that_nobody_answers_gives_up():
    with pytest.raises(RuntimeError, match="ep from rank 0 to 1: the other side did not come within"):
        run_threads(only_sends, 2, timeout=0.2)


def swap_unequal(rank: Rank) -> list[list[float]]:
    """Send r + p rows from rank r to rank p."""
    sizes = [rank.number + peer for peer in range(rank.world.size)]
    sent = torch.arange(sum(sizes), dtype=torch.float64, device=rank.device).unsqueeze(1) + 100 * rank.number
    received = torch.empty_like(sent)
    work = rank.all_to_all("all", range(rank.world.size)).start(received, sent, sizes, sizes)
    early = received.flatten().tolist() if rank.device.type == "cpu" else [math.nan]
    work.wait()
    return [early, received.flatten().tolist()]


def test_rows_go_where_they_should_and_not_before_they_are_waited_for(device):
    results = run_threads(swap_unequal, 3, device=device)
    assert [received for _, received in results] == [
        [100.0, 200.0, 201.0], [0.0, 101.0, 102.0, 202.0, 203.0, 204.0],
        [1.0, 2.0, 103.0, 104.0, 105.0, 205.0, 206.0, 207.0, 208.0],
    ]
    assert any(all(map(math.isnan, early)) for early, _ in results)
