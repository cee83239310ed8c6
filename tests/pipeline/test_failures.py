"""A rank that fails anywhere in a step: all ranks raise within seconds, with its name, and no process is aborted.

An exception is raised at the n-th call of one of the library's functions inside a step, by a profile function, on each
rank in turn: for a few n in the fast tests, for hundreds in the slow ones.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dualpipe
from dualpipe import Pipeline, PipelineError
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.accumulators import local
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import ExpertParallel, shard_experts
from dualpipe.parallel.mesh import build_mesh
from dualpipe.pipeline import p2p
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import build
from ranks import run_ranks

ROOT = Path(dualpipe.__file__).parent.parent
ROOMS = tuple(str(ROOT / room) for room in ("dualpipe", "kernels", "models"))
SECONDS = 5.0  # in which all ranks raise
GROUP_TIMEOUT = 60.0  # so that nobody who waits for it raises in time
MICRO_BATCHES = 3
CONFIG = Qwen3MoeConfig(  # of two layers, or as many as there are stages
    vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
)


class Layout(NamedTuple):
    """Sizes of a mesh, a schedule, rules for recomputation, and the ranks of a pretended node."""

    pp: int
    dp: int
    cp: int
    ep: int
    schedule: str
    recompute: tuple[str, ...] = ()
    per_node: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.ep

    def __str__(self) -> str:
        sizes = "-".join(f"{name}{getattr(self, name)}" for name in ("pp", "dp", "cp", "ep") if getattr(self, name) > 1)
        nodes = [] if self.per_node is None else [f"{self.per_node} per node"]
        return "-".join([sizes, self.schedule, *self.recompute, *nodes])


class Planted(Exception):
    """Planted error."""


class Planting:
    """Profile function that counts the calls of the library in a step, and raises `Planted` at the n-th, from 0."""

    def __init__(self, at: int | None = None, file: str = "") -> None:
        self._at = at
        self._file = file
        self.num_calls = 0
        self.in_file: list[int] = []  # the calls of functions of `file`
        self.place = ""
        self._depth_is_inside = False

    def __enter__(self) -> Planting:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOMS):
            return
        name = frame.f_code.co_qualname
        if name.endswith("<genexpr>"):  # is also entered when it is dropped, where an exception is lost
            return
        if event == "return":
            if name == "Pipeline._run":
                self._depth_is_inside = False  # the other ranks have gone on
            return
        if name == "merge_side_inputs":  # the first call whose failure is told to the other ranks
            self._depth_is_inside = True
        if not self._depth_is_inside:
            return
        number = self.num_calls
        self.num_calls += 1
        if self._file and frame.f_code.co_filename.endswith(self._file):
            self.in_file.append(number)
        if number == self._at:
            self.place = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}: {name}"
            sys.setprofile(None)
            raise Planted(self.place)


def make_stages(layout: Layout, mesh: Any) -> list[nn.Module]:
    schedule = build(layout.schedule, layout.pp, MICRO_BATCHES)
    numbers = schedule.rank_stages(mesh["pp"].get_local_rank())
    config = dataclasses.replace(CONFIG, num_hidden_layers=max(CONFIG.num_hidden_layers, schedule.num_stages))
    stages: list[Any] = build_stages(config, schedule.num_stages, only=numbers)
    for stage in stages:
        stage.init_weights(0)
        stage.recompute = Recompute(layout.recompute)
        if layout.cp > 1:
            stage.use_context_parallelism(ContextParallel(mesh["cp"], method="ring"))
        if layout.ep > 1:
            stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, mesh["ep"], ranks_per_node=layout.per_node))
            shard_experts(stage, mesh["ep"])
        if layout.dp > 1:
            plan = resolve_dtypes(stage, DTypePolicy(torch.float32, torch.float32, torch.float32))
            shard(stage, mesh["dp"] if layout.ep == 1 else mesh["dp", "ep"]._flatten("dp_ep"), plan,
                  expert_mesh=mesh["dp"])
    return stages


def new_step(layout: Layout) -> Callable[[], list[Tensor]]:
    """Run a step of a new pipeline; return the gradients."""
    mesh = build_mesh(layout.pp, layout.dp, layout.ep, torch.device("cpu"), cp=layout.cp)
    stages = make_stages(layout, mesh)
    pipe = Pipeline(stages, process_group=mesh["pp"].get_group(), schedule=layout.schedule)
    tokens = torch.randint(61, (2 * MICRO_BATCHES, 9), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    side = {}
    if layout.cp > 1:
        own = stages[0].split.token_indices(8)
        side = {"positions": torch.arange(8).expand(2 * MICRO_BATCHES, 8)}
        inputs, labels = inputs[:, own], labels[:, own]

    def step() -> list[Tensor]:
        pipe.zero_grad()
        criterion, targets = cross_entropy_loss, (labels.contiguous(),)
        pipe.step(inputs, num_chunks=MICRO_BATCHES, criterion=criterion, labels=targets, side=side)
        return [local(parameter.grad).clone() for parameter in pipe.parameters()]

    return step


class Outcome(NamedTuple):
    """Error of a rank, the step out of two in which it was raised, its time, and whether a later step is correct."""

    kind: str
    text: str
    seconds: float
    is_right: bool


def count_calls(rank: int, *layout: Any) -> int:
    step = new_step(Layout(*layout))
    step()
    with Planting() as counted:
        step()
    return counted.num_calls


def planted(rank: int, culprit: int, place: int, *layout: Any) -> tuple[Any, ...]:
    """Return the outcome of a step in which rank `culprit` fails at its n-th call."""
    step = new_step(Layout(*layout))
    expected = step()
    dist.barrier()
    kind = text = ""
    planting = Planting(place if rank == culprit else None)
    try:
        for _ in range(2):  # a failure behind the last message of a step is heard of in the next one
            began = time.monotonic()
            with planting:
                step()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    # Keep the pipeline until all ranks have raised: a loop that catches the error does, and memory that is dropped ends
    # waits as well.
    store = dist.distributed_c10d._get_default_store()
    name = f"raised/{Layout(*layout)}/{culprit}/{place}"
    store.set(f"{name}/{rank}", "")
    with suppress(RuntimeError):  # some wait for longer
        store.wait([f"{name}/{other}" for other in range(dist.get_world_size())], timedelta(seconds=2 * SECONDS))
    is_right = kind != "ValueError" or all(map(torch.equal, step(), expected))
    return kind, text, seconds, is_right


def check(layout: Layout, culprit: int, places: list[int]) -> None:
    for place in places:
        results = run_ranks(planted, layout.num_ranks, culprit, place, *layout, group_timeout=GROUP_TIMEOUT)
        outcomes = [Outcome(*result) for result in results]
        message = f"{layout}, rank {culprit}, call {place}: {outcomes}"
        said = {(outcome.kind, outcome.text) for outcome in outcomes}
        assert len(said) == 1, message
        kind, text = said.pop()
        assert kind in (PipelineError.__name__, "ValueError"), message
        assert text.startswith((f"rank {culprit} (", f"rank {culprit}: ")) and "Planted: " in text, message
        assert all(outcome.seconds < SECONDS and outcome.is_right for outcome in outcomes), message


TWO_HOPS = Layout(1, 1, 1, 4, "1f1b", ("layer", "dispatch"), per_node=2)
LAYOUTS = [
    Layout(2, 1, 1, 1, "dualpipev"),
    Layout(1, 1, 1, 2, "1f1b", ("layer", "dispatch")),
    Layout(2, 1, 1, 2, "dualpipev"),
    Layout(2, 1, 2, 1, "1f1b", ("attention",)),
    Layout(1, 2, 1, 2, "1f1b"),
    TWO_HOPS,
]


def spread(num_calls: int, count: int) -> list[int]:
    """Return places of a step, from the first call to the last; the number of calls differs a little between steps."""
    return sorted({round(i * (0.98 * num_calls - 1) / (count - 1)) for i in range(count)})


def few(layout: Layout) -> int:
    """Return the number of places for a layout: most where they cost least.

    On four ranks a place costs three times as much as on two.
    """
    if layout.num_ranks > 2:
        return 3
    return 8


@pytest.mark.parametrize("layout", [
    LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:]),
], ids=str)
def test_a_failure_at_a_few_places_of_a_step_ends_it_on_all_ranks(layout):
    counts = run_ranks(count_calls, layout.num_ranks, *layout)
    check(layout, layout.num_ranks - 1, spread(counts[-1], few(layout)))


def calls_of_two_hops(rank: int, *layout: Any) -> list[int]:
    step = new_step(Layout(*layout))
    step()
    with Planting(file="two_hop.py") as counted:
        step()
    return counted.in_file


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_failure_within_or_between_two_hops_ends_the_step_on_all_ranks(culprit):
    calls = run_ranks(calls_of_two_hops, 4, *TWO_HOPS)[culprit]
    assert len(calls) > 100
    check(TWO_HOPS, culprit, [calls[i] for i in (len(calls) // 4, len(calls) // 4 + 5, len(calls) // 2)])


@dataclasses.dataclass
class NeverWoken:
    """Stand-in for a send that was partly written when its connection closed: no wait for it ends."""

    work: dist.Work  # without it nothing would be sent

    def wait(self) -> None:
        time.sleep(GROUP_TIMEOUT)


def fails_behind_its_last_message(rank: int) -> tuple[str, float]:
    """Let rank 1 fail after its last message, while the last sends of rank 0 never finish."""
    step = new_step(Layout(2, 1, 1, 1, "1f1b"))
    step()
    dist.barrier()
    sent = Counter[int]()
    start = p2p.Link.send

    def send(link: p2p.Link, tensor: Tensor) -> Any:
        work = start(link, tensor)
        sent[link.tag] += 1
        return work if sent[link.tag] <= MICRO_BATCHES - p2p.SENDS_IN_FLIGHT else NeverWoken(work)

    def fail(_: RankSync) -> None:
        raise Planted

    planted = patch.object(p2p.Link, "send", send) if rank == 0 else patch.object(RankSync, "wait_for_all", fail)
    began = time.monotonic()
    with planted, pytest.raises(PipelineError) as raised:
        step()
    return str(raised.value), time.monotonic() - began


def test_a_send_that_is_cut_off_is_not_waited_for():
    for text, seconds in run_ranks(fails_behind_its_last_message, 2, group_timeout=GROUP_TIMEOUT):
        assert text.startswith("rank 1") and seconds < SECONDS, (text, seconds)


MANY = 24  # places for each rank of each layout


def marks_for(layout, culprit):
    """Return the marks of a case: `make test-slow` fails the first and the last rank, `make test-all` each."""
    return [pytest.mark.slow] if culprit in (0, layout.num_ranks - 1) else [pytest.mark.slow, pytest.mark.long]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout, culprit", [pytest.param(layout, rank, marks=marks_for(layout, rank))
                                             for layout in LAYOUTS for rank in range(layout.num_ranks)], ids=str)
def test_a_failure_at_any_place_of_a_step_ends_it_on_all_ranks(layout, culprit):
    counts = run_ranks(count_calls, layout.num_ranks, *layout)
    check(layout, culprit, spread(counts[culprit], MANY))
