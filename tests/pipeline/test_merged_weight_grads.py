"""Weight gradients of neighbouring "W" in one GEMM: which are merged, their bits, their memory, and what fails."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dualpipe import Pipeline, PipelineError
from dualpipe.kernels import combine_tokens, sort_tokens
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, defer_weight_grads
from dualpipe.pipeline.lower import ProgramCache
from dualpipe.runtime.recorder import KIND, WHAT, Observer, Recorder
from dualpipe.schedule import Action, Schedule, build
from schedules import SCHEDULES
from tensor_bytes import AliveBytes
from threads import run_threads
from weight_grads import Wgrads

WIDTH, EXPERTS, TOP_K = 8, 3, 2
MICRO_BATCHES = 3


class Experts(nn.Module):
    """(T, WIDTH) -> (T, WIDTH): a linear layer, then experts that are chosen by the tokens' numbers; a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.up = GroupedSwiGLU(EXPERTS, WIDTH, 12, bias=True)
        self.down = GroupedLinear(EXPERTS, 12, WIDTH)
        for param in self.parameters():
            param.grad_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        tokens = sort_tokens(x.detach().topk(TOP_K, dim=1).indices % EXPERTS, EXPERTS)
        rows = self.down(self.up(hidden, tokens), tokens.offs)
        return x + combine_tokens(rows, None, tokens, top_k=TOP_K)


def make_stages(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    return [defer_weight_grads(Experts()).to(dtype) for _ in range(count)]


def tail(text: str, num_stages: int = 1) -> Schedule:
    """A schedule of one rank, all forwards and input gradients and then steps such as "0W0 0W1;1W0"."""
    slots = [(stage, mb) for stage in range(num_stages) for mb in range(MICRO_BATCHES)]
    steps = [(Action("F", stage, mb),) for stage, mb in slots]
    steps += [(Action("I", stage, mb),) for stage, mb in reversed(slots)]
    steps += [tuple(map(Action.read, step.split(";"))) for step in text.split()]
    return Schedule("by hand", 1, num_stages, MICRO_BATCHES, (tuple(steps),), (0,) * num_stages)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(13, WIDTH, generator=generator).to(dtype) for _ in range(2))  # 5, 4 and 4 tokens
    return x, y


def step(pipe: Pipeline, dtype: torch.dtype = torch.float32) -> None:
    x, y = batch(dtype)
    pipe.step(x, num_chunks=MICRO_BATCHES, criterion=F.mse_loss, labels=(y,))


def grads(pipe: Pipeline) -> list[Tensor]:
    return [param.grad for param in pipe.parameters()]


@pytest.mark.parametrize(("order", "num_stages", "sizes"), [
    ("0W0 0W1 0W2", 1, [3, 3]),
    ("0W2 0W0 0W1", 1, [3, 3]),
    ("0W0 1W0 0W1 1W1 0W2 1W2", 2, [3, 3, 3, 3]),
    ("1W0 0W0 0W1 0W2 1W1 1W2", 2, [3, 3, 3, 3]),
], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_gemm_for_neighbours_and_the_same_bits(order, num_stages, sizes, dtype):
    merged = Pipeline(make_stages(num_stages, dtype), schedule=tail(order, num_stages))
    plain = Pipeline(make_stages(num_stages, dtype), schedule=tail(order, num_stages), merge_weight_grads=False)
    for _ in range(2):  # without gradients before, and with
        with Wgrads() as merged_wgrads:
            step(merged, dtype)
        with Wgrads() as plain_wgrads:
            step(plain, dtype)
        assert merged_wgrads.sizes == sizes
        assert plain_wgrads.sizes == [1] * sum(sizes)
    for a, b in zip(grads(merged), grads(plain), strict=True):
        assert a.dtype is b.dtype is torch.float32
        assert torch.equal(a, b)


def test_pairs_and_single_actions_are_not_merged():
    slots = [Action("F", 0, mb) for mb in range(2)]
    steps = [(a,) for a in slots] + [
        (Action("I", 0, 0),), (Action("W", 0, 0), Action("F", 0, 2)), (Action("I", 0, 1),), (Action("W", 0, 1),),
        (Action("I", 0, 2),), (Action("W", 0, 2),)]
    schedule = Schedule("by hand", 1, 1, MICRO_BATCHES, (tuple(steps),), (0,))
    pipe = Pipeline(make_stages(1), schedule=schedule)
    with Wgrads() as wgrads:
        step(pipe)
    assert wgrads.sizes == [1] * 6


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_merging_moves_no_instruction(name, num_ranks, train):
    for rank, num_microbatches in itertools.product(range(num_ranks), (1, 3, 12)):
        stages = len(build(name, num_ranks, num_microbatches).rank_stages(rank))
        programs = []
        for merges in (False, True):
            programs.append(ProgramCache(name, num_ranks=num_ranks, rank=rank, num_modules=stages))
            programs[-1].merges = merges
        plain, merged = (p.program(num_microbatches, train=train) for p in programs)
        assert [i._replace(merged=()) for i in merged.instructions] == [*plain.instructions]
        for index, instruction in enumerate(merged.instructions):
            if not instruction.merged:
                continue
            (action,) = instruction.actions
            own = instruction.merged.index(action)
            assert {other.stage for other in instruction.merged} == {action.stage}
            if own == 0:  # the others follow before anything but a "W" does
                following = itertools.takewhile(lambda i: i.kinds == "W", merged.instructions[index:])
                found = [i for i in following if i.merged == instruction.merged]
                assert [i.actions[0] for i in found] == [*instruction.merged]


def on_rank(rank, schedule, stages, merged):
    num_microbatches = schedule.num_microbatches
    own = schedule.rank_stages(rank.number)
    pipe = Pipeline([stages[s] for s in own], process_group=rank.group("pp", tuple(range(4))), schedule=schedule,
                    merge_weight_grads=merged)
    x, y = (torch.cat([t] * 4) for t in batch())
    with Wgrads() as wgrads:
        pipe.step(x if 0 in own else None, num_chunks=num_microbatches, criterion=F.mse_loss,
                  labels=(y,) if schedule.num_stages - 1 in own else ())
    return grads(pipe), wgrads.sizes


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_several_ranks_have_the_bits_of_unmerged_runs(name):
    schedule = build(name, 4, 10)
    merged, plain = (
        run_threads(on_rank, 4, schedule, make_stages(schedule.num_stages), merge) for merge in (True, False))
    assert max(size for _, sizes in merged for size in sizes) >= 2
    for (actual, sizes), (expected, single) in zip(merged, plain, strict=True):
        assert sum(sizes) == len(single)
        assert all(map(torch.equal, actual, expected))


class Seen(Observer):
    """Actions of the recorder's entries and of results, in order."""

    def __init__(self) -> None:
        self.began_at: list[str] = []
        self.results: list[str] = []

    def began(self, recorder, entry):
        if entry[KIND] == "W":
            self.began_at += map(str, entry[WHAT].actions)

    def made(self, recorder, what, results):
        if isinstance(what, Action) and what.kind == "W":
            self.results.append(str(what))


def test_every_action_is_in_the_record():
    seen = Seen()
    pipe = Pipeline(make_stages(1), schedule=tail("0W0 0W1 0W2"))
    with Recorder().activate() as recorder, recorder.observed_by(seen):
        step(pipe)
    assert seen.began_at == seen.results == ["0W0", "0W1", "0W2"]


def test_parameters_with_hooks_are_not_deferred_and_run_their_hooks():
    pipe = Pipeline(make_stages(1), schedule=tail("0W0 0W1 0W2"))
    calls = []
    pipe.module[0].up.weight.register_post_accumulate_grad_hook(calls.append)
    with Wgrads() as wgrads:
        step(pipe)
    assert len(calls) == MICRO_BATCHES
    assert wgrads.sizes == [1, 1, 1, 3]


class Failing(TorchDispatchMode):
    """Fails in a merged GEMM, before it adds anything."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.dualpipe.grouped_gemm_wgrad_merged.default:
            raise RuntimeError("no such launch")
        return function(*args, **kwargs or {})


def test_a_launch_that_fails_names_all_actions_and_leaves_nothing_behind():
    pipe = Pipeline(make_stages(1), schedule=tail("0W0 0W1 0W2"))
    with pytest.raises(PipelineError) as raised, Failing():
        step(pipe)
    names = " and ".join(f"0W{mb} (weight gradients of stage 0, micro-batch {mb})" for mb in range(MICRO_BATCHES))
    assert f"{names}: " in str(raised.value) and "no such launch" in str(raised.value)
    assert pipe.weight_grad_store.pending() == {}
    # No gradient of the experts is half there, and the next step is whole.
    assert pipe.module[0].up.weight.grad is None and pipe.module[0].down.weight.grad is None
    del raised
    pipe.zero_grad()
    step(pipe)
    plain = Pipeline(make_stages(1), schedule=tail("0W0 0W1 0W2"), merge_weight_grads=False)
    step(plain)
    assert all(map(torch.equal, grads(pipe), grads(plain)))


@pytest.mark.parametrize("has_accumulators", [False, True])
@pytest.mark.parametrize("order", ["0W0 0W1 0W2", "0W0 1W0 0W1 1W1 0W2 1W2"])
def test_the_peak_is_at_most_that_of_unmerged_gradients(order, has_accumulators):
    peaks = {}
    for merged in (True, False):
        num_stages = 2 if "1W" in order else 1
        pipe = Pipeline(make_stages(num_stages), schedule=tail(order, num_stages), merge_weight_grads=merged)
        step(pipe)
        if not has_accumulators:
            pipe.zero_grad()
        gc.collect()
        with AliveBytes() as alive:
            step(pipe)
        peaks[merged] = alive.peak
    assert 0 < peaks[True] <= peaks[False], peaks


