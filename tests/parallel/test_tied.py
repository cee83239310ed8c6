"""Parameters that both ends of a pipeline have: shared in a V, copies elsewhere, whose gradients are summed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dualpipe import DualPipeV, Pipeline
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.errors import PipelineError
from dualpipe.schedule import build
from ranks import run_ranks
from refusals import refusal
from toys import use_own_groups

WIDTH, WORDS = 6, 11


class End(nn.Module):
    """Looks words up, or scores them, by a weight of which the other end has a copy."""

    fails = 0  # from which call on

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.first, self.last, self.calls = number == 0, number == count - 1, 0
        self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        if self.first or self.last:
            self.words = nn.Parameter(torch.randn(WORDS, WIDTH, dtype=torch.float64,
                                                  generator=torch.Generator().manual_seed(99)))

    def tied_parameters(self) -> list[nn.Parameter]:
        return [self.words] if self.first or self.last else []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls >= self.fails:
            raise ZeroDivisionError("boom")
        x = torch.tanh((self.words[x] if self.first else x) @ self.inner)
        return x @ self.words.T if self.last else x


def criterion(scores: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), words.flatten())


def batch(number: int) -> Tensor:
    return torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(number))


def expected(count: int, steps: list[int]) -> dict[str, Tensor]:
    """Gradients of the unpipelined model, summed over steps; of the tied parameter by its first name."""
    stages = [End(number, count) for number in range(count)]
    stages[-1].words = stages[0].words
    for step in steps:
        for part in batch(step).tensor_split(4):
            x = part
            for stage in stages:
                x = stage(x)
            criterion(x, part).backward()
    return {name: p.grad for name, p in nn.ModuleList(stages).named_parameters()}


def step(pipe: Pipeline, number: int, first: bool, last: bool, **options) -> None:
    words = batch(number)
    pipe.step(words if first else None, num_chunks=4, criterion=criterion, labels=words if last else None, **options)


def steps(rank, name, own_groups=False):
    """The gradients after one step, then two without zeroing, one that reduces nothing between, and after a zero_grad:
    how far they are from the reference; and those of the tied parameter after some steps without zeroing."""
    if own_groups:
        use_own_groups()
    schedule = build(name, 2, 4)
    numbers = schedule.rank_stages(rank)
    stages = [End(number, schedule.num_stages) for number in numbers]
    ends = 0 in numbers, schedule.num_stages - 1 in numbers
    if all(ends):
        stages[-1].words = stages[0].words
    pipe = Pipeline(stages, schedule=schedule)

    def error(done: list[int]) -> float:
        wanted = expected(schedule.num_stages, done)
        found = {f"{n}.{name}": p.grad for n, stage in zip(numbers, stages) for name, p in stage.named_parameters()}
        return max(float((wanted.get(name, wanted["0.words"]) - grad).abs().max()) for name, grad in found.items())

    step(pipe, 1, *ends)
    errors = [error([1])]
    step(pipe, 2, *ends, sync=False)
    step(pipe, 3, *ends)
    errors.append(error([1, 2, 3]))
    with torch.no_grad():
        step(pipe, 5, *ends)
    step(pipe, 4, *ends)
    errors.append(error([1, 2, 3, 4]))
    tied = [stage.words.grad.tolist() for stage in stages if hasattr(stage, "words")]
    norm = pipe.clip_grad_norm_(1.0)
    wanted = sum(float(grad.square().sum()) for name, grad in expected(schedule.num_stages, [1, 2, 3, 4]).items())
    errors.append(abs(float(norm) / wanted**0.5 - 1))
    pipe.zero_grad()
    step(pipe, 6, *ends)
    errors.append(error([6]))
    return errors, tied


@pytest.mark.parametrize("name, own_groups", [
    ("1f1b", False), ("1f1b", True), ("interleaved_1f1b", False), ("dualpipev", False)])
def test_gradients_are_sums_of_both_ends_over_any_number_of_steps(name, own_groups):
    found = run_ranks(steps, 2, name, own_groups)
    for errors, _ in found:
        assert max(errors) < 1e-12, errors
    first, second = (grad for _, tied in found for grad in tied)
    assert first == second, "bit for bit, or copies would drift apart"


def failing(rank, world, who):
    """The error of a step in whose middle the rank `who` fails."""
    stage = End(rank, world)
    pipe = Pipeline([stage], schedule="1f1b")
    stage.fails = stage.calls + 2 if rank == who else 0
    with pytest.raises(PipelineError) as error:
        step(pipe, 1, rank == 0, rank == world - 1)
    return str(error.value)


@pytest.mark.parametrize("who", range(3))
def test_a_rank_that_fails_leaves_no_end_waiting_for_the_other(who):
    assert all("boom" in message for message in run_ranks(failing, 3, 3, who, fresh=True))


def with_gradients_in_float32(rank: int, world: int) -> End:
    stage = End(rank, world)
    if rank:
        stage.words.grad_dtype = torch.float32
    return stage


def mistakes(rank, world):
    attempts = {
        "one end only": lambda: Pipeline([End(0, world) if rank == 0 else nn.Linear(2, 2)], schedule="1f1b"),
        "dtypes": lambda: Pipeline([End(rank, world).float() if rank else End(rank, world)], schedule="1f1b"),
        "dtypes of gradients": lambda: Pipeline([with_gradients_in_float32(rank, world)], schedule="1f1b"),
        "apart in a V": lambda: DualPipeV([End(rank, 4), End(3 - rank, 4)]),
    }
    return {name: refusal(attempt) for name, attempt in attempts.items()}


def test_ends_that_are_no_copies_are_refused_on_every_rank():
    for found in run_ranks(mistakes, 2, 2):
        assert "['float64[11, 6]']" in found["one end only"] and "[]" in found["one end only"]
        assert "['float64[11, 6]']" in found["dtypes"] and "['float32[11, 6]']" in found["dtypes"]
        assert "['float64[11, 6] with float32 gradients']" in found["dtypes of gradients"]
        assert "different Parameters" in found["apart in a V"]


def equal_ends(rank):
    """Build pipelines whose ends have equal weights that no method or config declares; return their errors."""
    errors = {}
    for name in ("two ranks", "one rank", "not tied", "frozen", "constant", "shared"):
        torch.manual_seed(0)
        first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if name == "constant":
            nn.init.zeros_(first.weight)
        last.weight = first.weight if name == "shared" else nn.Parameter(first.weight.detach().clone())
        first.requires_grad_(name != "frozen")
        if name == "not tied":
            last.config = SimpleNamespace(tie_word_embeddings=False)
        if name in ("one rank", "shared"):
            stages, schedule = [first, last] if rank == 0 else [nn.Identity(), nn.Identity()], "dualpipev"
        else:
            stages, schedule = [last if rank else first], "1f1b"
        errors[name] = refusal(lambda stages=stages, schedule=schedule: Pipeline(stages, schedule=schedule))
    return errors


def test_ends_with_equal_weights_are_refused_unless_they_are_no_copies():
    for errors in run_ranks(equal_ends, 2):
        assert {name for name, text in errors.items() if text} == {"two ranks", "one rank"}
        assert "have the same values" in errors["one rank"] and "dualpipe.parallel.shard_stages" in errors["one rank"]
        assert "have the same values" in errors["two ranks"] and "tied_parameters()" in errors["two ranks"]


class Unused(nn.Module):
    """An end whose copy of a tied parameter is used if asked for."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.tied = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))
        self.is_used = is_used

    def tied_parameters(self) -> list[nn.Parameter]:
        return [self.tied]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.tied if self.is_used else self.inner(x)


def unused(rank, dp):
    """Return, after each of several steps, the sum of the tied gradient; None for no gradient."""
    mesh = build_mesh(2, dp, 1, torch.device("cpu"))
    pp = mesh["pp"].get_local_rank()
    stage = Unused(False)
    if dp > 1:
        fully_shard(stage, mesh=mesh["dp"])
    tied = stage.tied
    pipe = Pipeline([stage], schedule="1f1b", process_group=mesh["pp"].get_group())
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    sums = []
    # The ranks that use the parameter, and True to drop the gradients first.
    for users, drops in (((), True), ((1,), True), ((), False), ((), True), ((0, 2), True)):
        stage.is_used = rank in users
        if drops:
            pipe.zero_grad()
        pipe.step(x if pp == 0 else None, num_chunks=2, criterion=lambda y: y.square().sum() if pp else None)
        grad = tied.grad.full_tensor() if dp > 1 and tied.grad is not None else tied.grad
        sums.append(None if grad is None else float(grad.sum()))
    return sums


@pytest.mark.parametrize("dp", [1, 2])
def test_copies_that_neither_end_uses_have_no_gradient(dp):
    results = run_ranks(unused, 2 * dp, dp)
    for sums in results:
        assert sums == results[0]
        assert [value is None for value in sums] == [True, False, False, True, False]
        assert sums[2] == sums[1], "a step without a use adds nothing to the sum"
