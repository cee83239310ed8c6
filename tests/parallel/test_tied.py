"""Parameters that both ends of a pipeline have: shared in a V, copies elsewhere, whose gradients are summed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dualpipe import DualPipeV, Pipeline
from dualpipe.runtime.errors import PipelineError
from dualpipe.schedule import build
from ranks import run_ranks
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
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(ValueError) as error:
            attempt()
        found[name] = str(error.value)
    return found


def test_ends_that_are_no_copies_are_refused_on_every_rank():
    for found in run_ranks(mistakes, 2, 2):
        assert "must be copies of each other" in found["one end only"]
        assert "first stage are ['float64[11, 6]'], those of the last stage []" in found["one end only"]
        assert "['float64[11, 6]'], those of the last stage ['float32[11, 6]']" in found["dtypes"]
        assert "of the last stage ['float64[11, 6] with float32 gradients']" in found["dtypes of gradients"]
        assert "their tied_parameters() return different Parameters" in found["apart in a V"]
